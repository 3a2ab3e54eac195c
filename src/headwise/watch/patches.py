"""Attributes that are replaced while at least one watch is open, and put back afterwards.

A torch function mode would see the same calls, but it makes `has_torch_function` true, which turns
torch's fast paths off and so changes the model's bits. A replaced attribute changes nothing but
who is called first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_MISSING = object()
_lock = threading.Lock()


@dataclass
class _Patch:
    owner: Any
    name: str
    own: object  # what stood in the owner's own namespace, _MISSING if it was inherited
    wrapper: Callable
    users: int = 1


_patches: dict[tuple[int, str], _Patch] = {}


@dataclass(frozen=True, eq=False)
class Target:
    """One attribute to replace: `make` gets the original and returns what calls it and records."""

    owner: Any
    name: str
    make: Callable[[Callable], Callable]


def acquire(targets: list[Target]) -> None:
    """Replace each attribute, once for all watches of the process."""
    with _lock:
        for target in targets:
            key = (id(target.owner), target.name)
            if key in _patches:
                _patches[key].users += 1
                continue
            own = vars(target.owner).get(target.name, _MISSING)
            wrapper = target.make(getattr(target.owner, target.name))
            setattr(target.owner, target.name, wrapper)
            _patches[key] = _Patch(target.owner, target.name, own, wrapper)


def release(targets: list[Target]) -> None:
    """Put back what no other watch needs replaced."""
    with _lock:
        for target in reversed(targets):
            patch = _patches[(id(target.owner), target.name)]
            patch.users -= 1
            if patch.users:
                continue
            del _patches[(id(target.owner), target.name)]
            if vars(patch.owner).get(patch.name) is not patch.wrapper:
                # Somebody replaced it after us. Theirs stays; ours only passes calls through now.
                continue
            if patch.own is _MISSING:
                delattr(patch.owner, patch.name)
            else:
                setattr(patch.owner, patch.name, patch.own)


def open_patches() -> int:
    """How many attributes are replaced now; 0 when no watch is open."""
    return len(_patches)
