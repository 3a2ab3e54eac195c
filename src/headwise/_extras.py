"""Optional libraries are imported where they are used, and a missing one is named."""

from __future__ import annotations

import importlib
from types import ModuleType

from headwise.errors import MissingExtra


def require(module: str, *, extra: str, purpose: str = "") -> ModuleType:
    """Import `module`, or raise `MissingExtra` with the line that installs it.

    `extra` is the group of `pyproject.toml` that carries it; `purpose` begins the message.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A module that is present but lacks one of its own parts must not read as absent.
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        who = purpose or f"headwise[{extra}]"
        raise MissingExtra(
            f"{who} needs {module.split('.')[0]}: pip install 'headwise[{extra}]'"
        ) from None
