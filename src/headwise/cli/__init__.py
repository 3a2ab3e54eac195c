"""The command line: parse, call, print; a file a command. Exit codes: 0 fine, 1 findings, 2 could
not run."""

from __future__ import annotations

import sys
from typing import NoReturn

from headwise.cli.common import app
from headwise.errors import HeadwiseError

# Each file adds its command to `app`, in this order: the one that `headwise --help` shows.
# isort: off
from headwise.cli import report  # noqa: F401
from headwise.cli import check  # noqa: F401
from headwise.cli import profile  # noqa: F401
from headwise.cli import whatif  # noqa: F401
from headwise.cli import train  # noqa: F401
from headwise.cli import study  # noqa: F401
from headwise.cli import about  # noqa: F401
# isort: on

# How shells report Ctrl-C.
INTERRUPTED = 130


def main() -> None:
    """The `headwise` command. A failure that a person can mend is one line and exit code 2."""
    debug = "--debug" in sys.argv[1:]
    try:
        code = app(standalone_mode=False)
    except HeadwiseError as error:
        if debug:
            raise
        _stop(str(error), 2)
    except MemoryError:
        if debug:
            raise
        _stop("out of memory; a shorter input or --dtype bfloat16 needs less", 2)
    except Exception as error:
        if debug:
            raise
        if type(error).__module__.startswith(("typer", "click")) and hasattr(
            error, "format_message"
        ):
            _stop(error.format_message(), 2)
        first = (str(error).strip().splitlines() or [""])[0]
        _stop(f"{type(error).__name__}: {first} (--debug shows where)", 2)
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED:
        _stop("interrupted; nothing was written", INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _stop(message: str, code: int) -> NoReturn:
    print(f"headwise: {message}", file=sys.stderr)
    sys.exit(code)
