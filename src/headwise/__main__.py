"""`python -m headwise` is the headwise command."""

from headwise.cli import main

main()
