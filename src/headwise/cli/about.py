"""`headwise models` and `headwise info`."""

from __future__ import annotations

from headwise.cli.common import app
from headwise.cli.common import console as terminal


@app.command()
def models() -> None:
    """List the packaged models: real ones, fetched once by pip and loaded offline."""
    from rich.table import Table

    from headwise.models import PACKAGED

    table = Table(box=None, pad_edge=False)
    for name in ("name", "what", "download", "licence"):
        table.add_column(name)
    for package in PACKAGED.values():
        table.add_row(package.name, package.about, f"{package.megabytes} MB", package.licence)
    terminal().print(table)


@app.command()
def info() -> None:
    """Say what runs here: versions, instruction sets, backends."""
    import platform

    import torch

    from headwise import __version__, native
    from headwise.backends import BACKENDS

    try:
        isa = f"{native.isa()}, of {', '.join(native.supported())}"
    except ImportError as error:
        isa = f"unknown: {error}"
    console = terminal()
    for name, value in (
        ("headwise", __version__),
        ("torch", f"{torch.__version__}, {torch.get_num_threads()} threads"),
        ("python", f"{platform.python_version()} on {platform.machine()}"),
        ("native kernel", isa),
        ("backends", ", ".join(backend.name for backend in BACKENDS)),
    ):
        console.print(f"{name:<17} {value}", highlight=False, markup=False)
