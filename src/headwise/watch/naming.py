"""Names for people: which layer, which stack, self or cross, from a module and its path."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import Tensor, nn

CROSS_PATH = re.compile(
    r"cross|encdec|enc_dec|encoder_attn|encoder_attention|multihead_attn|src_attn|context_attn",
    re.IGNORECASE,
)
SELF_PATH = re.compile(r"self_?att|selfattention|^attn1$|(^|\.)self$", re.IGNORECASE)
OTHER_SOURCE = (
    "key_value_states",
    "encoder_hidden_states",
    "encoder_output",
    "encoder_outputs",
    "context",
    "memory",
    "kv_states",
)
CACHE = ("cache", "past_key_value", "past_key_values", "layer_past", "kv_cache")


class Names:
    """Every module of a model by its dotted path, and what the paths say of layers and stacks."""

    def __init__(self, model: nn.Module, attention_paths: Iterable[str]) -> None:
        self.path = {id(module): path for path, module in model.named_modules()}
        self._patterns: dict[str, list[str]] = {}
        for path in self.path.values():
            self._patterns.setdefault(_pattern(path), []).append(path)
        self._trunks = sorted({_trunk(path) for path in attention_paths})

    def layer(self, path: str) -> int:
        """The layer's number. The path's first number, where it tells like modules apart."""
        alike = self._patterns.get(_pattern(path), [path])
        numbers = [_first_number(other) for other in alike]
        own = _first_number(path)
        if own is not None and len(set(numbers)) == len(alike):
            return own
        # Numbers that repeat (stages of blocks) or are absent: the order in the model.
        return alike.index(path) if path in alike else 0

    def stack(self, path: str) -> str:
        """ "encoder" or "decoder" in a model with both, another distinguishing name, or ""."""
        trunk = _trunk(path)
        trunks = self._trunks if trunk in self._trunks else [*self._trunks, trunk]
        if len(trunks) < 2:
            return ""
        labels = {other: _side(other) for other in trunks}
        side = labels[trunk]
        if side and list(labels.values()).count(side) == 1:
            return side
        parts = [other.split(".") for other in trunks if other != trunk]
        for place, component in enumerate(trunk.split(".")):
            if all(place >= len(other) or other[place] != component for other in parts):
                return component
        return side


def kind_of(
    module: nn.Module,
    path: str,
    args: tuple,
    kwargs: dict,
    queries: int,
    keys: int,
    *,
    default: str | None = None,
) -> str:
    """ "self" or "cross": do the keys come from the sequence that the queries come from?

    Lengths alone cannot tell (a cache makes self-attention's keys longer), so the module's own
    word comes first, then its name, then what it was called with, and lengths last.
    """
    own_word = getattr(module, "is_cross_attention", None)
    if isinstance(own_word, bool):
        return "cross" if own_word else "self"
    tail = _tail(path)
    if CROSS_PATH.search(tail):
        return "cross"
    if SELF_PATH.search(tail):
        return "self"
    tensors = [x for x in args if isinstance(x, Tensor) and x.is_floating_point() and x.dim() >= 2]
    hidden = tensors[0] if tensors else kwargs.get("hidden_states")
    for name in OTHER_SOURCE:
        other = kwargs.get(name)
        if isinstance(other, Tensor):
            return "self" if _same(other, hidden) else "cross"
    if isinstance(module, nn.MultiheadAttention):
        given = [*args[:2], kwargs.get("query"), kwargs.get("key")]
        pair = [x for x in given if isinstance(x, Tensor)][:2]
        if len(pair) == 2:
            return "self" if _same(*pair) else "cross"
    if default is not None:
        return default
    if queries == keys:
        return "self"
    if any(kwargs.get(name) is not None for name in CACHE):
        return "self"
    axis = -2
    for other in tensors[1:]:
        if other.dim() == 3 and other.shape[axis] == keys and not _same(other, hidden):
            return "cross"
    if "cross" in type(module).__name__.lower():
        return "cross"
    # A cache only ever makes the keys longer than the queries.
    return "cross" if keys < queries else "self"


def _same(one: object, two: object) -> bool:
    if one is two:
        return True
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        return False
    return one.shape == two.shape and one.data_ptr() == two.data_ptr()


def _components(path: str) -> list[str]:
    return path.split(".") if path else []


def _pattern(path: str) -> str:
    return re.sub(r"\d+", "#", path)


def _first_number(path: str) -> int | None:
    parts = _components(path)
    for part in parts:
        if part.isdigit():
            return int(part)
    # `layer1.attention`, `block_3.attn`: a number at the end of an ancestor's name.
    for part in parts[:-1]:
        found = re.search(r"(\d+)$", part)
        if found:
            return int(found.group(1))
    return None


def _trunk(path: str) -> str:
    """The path up to its first number: `model.decoder.layers` of `model.decoder.layers.3.attn`."""
    parts = _components(path)
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[:place])
    return ".".join(parts[:-1])


def _tail(path: str) -> str:
    """What stands after the path's first number, or its last two names."""
    parts = _components(path)
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbers[0] + 1 :] if numbers else parts[-2:])


def _side(trunk: str) -> str:
    sides = {side for side in ("encoder", "decoder") for part in trunk.split(".") if side in part}
    return sides.pop() if len(sides) == 1 else ""
