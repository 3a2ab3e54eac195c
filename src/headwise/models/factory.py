"""Plain PyTorch: `package.module:factory`, a callable that returns a module, or a module and
inputs."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from headwise.errors import BadInput, HeadwiseError, UnknownModel
from headwise.models.loaded import Inputs, Loaded
from headwise.models.text import positions_axis

FORM = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class ModulePreparer:
    """The example inputs that the factory gave; floating ones follow the module's dtype."""

    takes: tuple[str, ...] = ()

    def __init__(self, inputs: Any, name: str):
        self.inputs = inputs
        self.name = name

    def __call__(self, model: nn.Module, **given: Any) -> Inputs:
        if self.inputs is None:
            raise BadInput(
                f"{self.name} returned a module without example inputs: return (module, inputs), "
                "where inputs is a tensor, a tuple of arguments or a dict of keywords"
            )
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)

        def follow(value: Any) -> Any:
            if dtype is not None and isinstance(value, Tensor) and value.is_floating_point():
                return value.to(dtype)
            return value

        kwargs: dict[str, Any] = {}
        args: tuple[Any, ...] = ()
        if isinstance(self.inputs, Mapping):
            kwargs = {str(name): follow(value) for name, value in self.inputs.items()}
        elif isinstance(self.inputs, tuple | list):
            args = tuple(follow(value) for value in self.inputs)
        else:
            args = (follow(self.inputs),)
        for value in (*args, *kwargs.values()):
            # (batch, tokens) of ids or (batch, tokens, width): the layouts that have a token axis.
            if isinstance(value, Tensor) and value.ndim == (3 if value.is_floating_point() else 2):
                axes = {"positions": positions_axis(value.shape[1])}
                return Inputs("module", axes, {"": "positions"}, kwargs, args)
        return Inputs("module", {}, {}, kwargs, args)


def load(source: str) -> Loaded:
    """Import the module (the current directory counts) and call the factory without arguments.

    Raises:
        UnknownModel: no such module or attribute.
        HeadwiseError: the code raised, or returned something else.
    """
    module_name, _, path = source.partition(":")
    with _current_directory():
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise HeadwiseError(f"importing {module_name} failed: {error}") from error
            raise UnknownModel(
                f"no module named {error.name!r}, for the model {source}; looked in the current "
                "directory and among the installed packages"
            ) from None
        except Exception as error:
            raise HeadwiseError(
                f"importing {module_name} failed: {type(error).__name__}: {error}"
            ) from error
        for part in path.split("."):
            if not hasattr(found, part):
                raise UnknownModel(f"{module_name} has no {path!r}, for the model {source}")
            found = getattr(found, part)
        if not isinstance(found, nn.Module):
            if not callable(found):
                raise HeadwiseError(f"{source} is a {type(found).__name__}, wanted a callable")
            try:
                found = found()
            except Exception as error:
                raise HeadwiseError(f"{source}() raised {type(error).__name__}: {error}") from error
    inputs = None
    if isinstance(found, tuple) and len(found) == 2:
        found, inputs = found
    if not isinstance(found, nn.Module):
        raise HeadwiseError(
            f"{source}() returned a {type(found).__name__}; wanted a torch.nn.Module, or a pair "
            "of one and its example inputs"
        )
    return Loaded(source, source, found.eval(), "module", ModulePreparer(inputs, source))


@contextlib.contextmanager
def _current_directory() -> Iterator[None]:
    # A console script's sys.path lacks the directory that the user stands in; `python -m` has it.
    here = os.getcwd()
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        yield
    finally:
        if added and here in sys.path:
            sys.path.remove(here)
