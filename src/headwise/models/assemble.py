"""Weights that we read ourselves into a transformers class: every weight placed, none left over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from headwise.errors import BadFile
from headwise.models.quiet import first_line, quiet


def assemble(cls: Any, config: Any, state: dict[str, Tensor], path: Path) -> Any:
    """`cls(config)` with exactly the weights of `state`, float32, in eval mode.

    The names are the published ones; `from_pretrained` maps them to those of the transformers at
    hand, which renames modules from time to time.

    Raises:
        BadFile: a weight is missing, has no place, or has another shape.
    """
    try:
        with quiet():
            model, found = cls.from_pretrained(
                None, config=config, state_dict=state, output_loading_info=True
            )
    except (RuntimeError, ValueError) as error:
        raise BadFile(
            f"{path}: the weights do not fit {cls.__name__} ({first_line(error)})"
        ) from None
    for words, key in (
        ("are missing", "missing_keys"),
        ("have no place", "unexpected_keys"),
        ("have another shape", "mismatched_keys"),
    ):
        names = sorted(str(name) for name in found[key])
        if names:
            raise BadFile(
                f"{path}: {len(names)} weights of {cls.__name__} {words}, e.g. {names[0]}"
            )
    return model.eval()
