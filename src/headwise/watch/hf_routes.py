"""Hugging Face's attention functions, wrapped where models fetch them.

The implementation stays the model's own, so masks are made by the mask function that belongs to it
(a function of ours registered without one would lose causality) and numbers stay the same.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headwise import masks
from headwise.call import AttentionCall
from headwise.intervals import Mask
from headwise.quantized import Held
from headwise.reference import attention_steps
from headwise.watch.masks import padding_of, read_grid
from headwise.watch.patches import Target
from headwise.watch.session import (
    Frame,
    Unreadable,
    check_plain,
    local,
    muted,
    record,
    recording,
    same_dtype,
    watchers,
)

# Keywords with which an attention function changes the numbers in a way that no call can state.
UNKNOWN = ("block_table", "k_cache", "v_cache")


def targets(model: nn.Module) -> list[Target]:
    """What to replace for this model; nothing where transformers was never imported."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return []
    found = []
    interface = getattr(library, "AttentionInterface", None)
    if interface is not None:
        found += [
            Target(interface, "get_interface", _wrap_getter),
            Target(interface, "__getitem__", _wrap_getter),
        ]
    for kind in {type(module) for module in model.modules()}:
        source = sys.modules.get(kind.__module__)
        if source is None or kind.__module__.startswith(("torch.", "headwise.")):
            continue
        # Models that name their own function, without asking the interface for a default.
        for name in list(vars(source)):
            if name.endswith("eager_attention_forward"):
                target = Target(source, name, wrap_function)
                if not any(t.owner is source and t.name == name for t in found):
                    found.append(target)
        for owner in kind.__mro__:
            if "_upcast_and_reordered_attn" in vars(owner):
                target = Target(owner, "_upcast_and_reordered_attn", _wrap_upcast)
                if not any(t.owner is owner and t.name == target.name for t in found):
                    found.append(target)
                break
    return found


def _wrap_getter(original: Callable) -> Callable:
    @functools.wraps(original)
    def get(*args: Any, **kwargs: Any) -> Any:
        return wrap_function(original(*args, **kwargs))

    return get


_wrapped: dict[Callable, Callable] = {}


def wrap_function(original: Callable) -> Callable:
    """The recording form of an attention function; the same one each time it is asked for.

    headwise's own function (headwise.hf) is left alone: it calls `headwise.attention`, which is
    watched where it is called.
    """
    own = getattr(original, "__module__", None) == "headwise.hf"
    if own or hasattr(original, "_headwise_original") or not callable(original):
        return original
    if original not in _wrapped:
        _wrapped[original] = _wrap(original)
    return _wrapped[original]


def _wrap(original: Callable) -> Callable:
    @functools.wraps(original)
    def attention_function(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not recording():
            return original(module, *args, **kwargs)
        found = watchers(module) or watchers(None)
        if not found:
            return original(module, *args, **kwargs)
        with muted():
            result = original(module, *args, **kwargs)
        record(
            found,
            f"Hugging Face {_short(original)}",
            lambda frame: _call(original, module, result, args, kwargs),
        )
        return result

    attention_function._headwise_original = original  # type: ignore[attr-defined]
    return attention_function


def _short(function: Callable) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return name.removesuffix("_attention_forward").removesuffix("_forward")


def _call(
    function: Callable, module: nn.Module, result: Any, args: tuple, kwargs: dict
) -> tuple[AttentionCall, Tensor | None]:
    names = ("query", "key", "value", "attention_mask")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    for name in names[:3]:  # two models say query_states
        if name not in given and f"{name}_states" in given:
            given[name] = given[f"{name}_states"]
    query, key, value = (given[name] for name in names[:3])
    if isinstance(key, Held):
        key, value = key.dequantized()
    check_plain(query, key, value)
    for name in UNKNOWN:
        if given.get(name) is not None:
            raise Unreadable(f"its keys lie in a paged cache ({name}=)")
    family = _short(function)
    takes = inspect.signature(function).parameters
    batch = max(x.shape[0] for x in (query, key, value))
    query, key, value = (x.expand(batch, *x.shape[1:]) for x in (query, key, value))
    sizes = (batch, query.shape[1], query.shape[2], key.shape[2])

    mask, bias = _mask_of(family, module, given, sizes)
    position = given.get("position_bias") if "position_bias" in takes else None
    if position is not None:
        read = local.reader(position, *sizes)  # T5's layers share the first one's bias
        mask = _and(mask, read.mask)
        if read.bias is not None:
            bias = read.bias if bias is None else bias + read.bias
    scale = given.get("scaling") if "scaling" in takes else None
    if scale is None:
        scale = float(query.shape[-1]) ** -0.5
    softcap = given.get("softcap") if "softcap" in takes else None
    sinks = _sinks_of(function, takes, module, given, query.shape[1])
    dropout = float(given.get("dropout") or 0.0)
    if not family.startswith(("sdpa", "flash")) and not module.training:
        dropout = 0.0  # eager functions drop by the module's mode
    q, k, v, b, s = same_dtype(query, key, value, bias, sinks)
    assert q is not None and k is not None and v is not None
    output = result[0] if isinstance(result, tuple) else result
    heads_first = output.transpose(1, 2) if output.dim() == 4 else None
    call = AttentionCall(q, k, v, mask, b, float(scale), softcap, s, dropout)
    known = family.endswith(("eager", "sdpa", "flash", "flex"))
    if heads_first is not None and not known and not dropout:
        call = _settle(call, family, given, heads_first)
    return call, heads_first


def _and(one: Mask | None, two: Mask | None) -> Mask | None:
    if one is None or two is None:
        return two if one is None else one
    return one & two


def _mask_of(
    family: str, module: nn.Module, given: dict, sizes: tuple[int, int, int, int]
) -> tuple[Mask | None, Tensor | None]:
    batch, heads, queries, keys = sizes
    grid = given.get("attention_mask")
    causal = given.get("is_causal")
    if causal is None:
        causal = bool(getattr(module, "is_causal", True))
    if family.startswith("flash"):
        return _flash_mask(given, bool(causal), sizes), None
    if grid is None:
        # Eager and flex functions hide nothing without a mask. SDPA's take the module's word for
        # more than one query, and torch's flag lets query 0 see key 0 only.
        if family.endswith("sdpa") and causal and queries > 1:
            return masks.causal(align="end" if queries == keys else "start"), None
        return None, None
    if not isinstance(grid, Tensor):
        return _block_mask(grid, sizes), None
    if grid.dim() == 2:
        if grid.shape != (batch, keys):
            raise Unreadable(
                f"its attention mask has shape {tuple(grid.shape)}; wanted (batch, keys) = "
                f"{(batch, keys)} or four axes"
            )
        return _and(padding_of(grid), masks.causal() if causal and queries > 1 else None), None
    read = local.reader(grid, batch, heads, queries, keys)
    return read.mask, read.bias


def _flash_mask(given: dict, causal: bool, sizes: tuple[int, int, int, int]) -> Mask | None:
    """Flash attention's masks: (B, S) padding, packed sequences, causal at the end, a window."""
    batch, _, queries, keys = sizes
    grid, mask = given.get("attention_mask"), None
    lengths_q, lengths_k = given.get("cu_seq_lens_q"), given.get("cu_seq_lens_k")
    positions = given.get("position_ids")
    if grid is not None:
        mask = padding_of(grid[:, :keys] if grid.shape[1] > keys else grid)
        if grid.shape[1] < keys:
            raise Unreadable(f"its padding mask names {grid.shape[1]} keys of {keys}")
    elif lengths_k is not None or _is_packed(positions, batch):
        if batch != 1:
            raise Unreadable(f"packed sequences in a batch of {batch}; wanted one packed row")
        if lengths_k is not None:
            ids = _document_ids(lengths_k, keys)
            query_ids = _document_ids(lengths_k if lengths_q is None else lengths_q, queries)
            if queries != keys:
                raise Unreadable("packed queries and keys of different lengths")
            mask = masks.documents(ids, query_ids=query_ids)
        else:
            assert positions is not None
            mask = masks.documents((positions[0].diff(prepend=positions[0, :1] - 1) != 1).cumsum(0))
    size = given.get("sliding_window")
    if size is not None and keys > size:
        if causal:
            return _and(mask, masks.window(size))
        return _and(mask, masks.window(left=size - 1, right=size - 1))
    return _and(mask, masks.causal()) if causal and queries > 1 else mask


def _is_packed(positions: Tensor | None, batch: int) -> bool:
    """One row whose positions start again; transformers then runs each run by itself."""
    if positions is None or batch != 1 or positions.dim() != 2:
        return False
    return bool((positions[0].diff() != 1).any())


def _document_ids(ends: Tensor, length: int) -> Tensor:
    place = torch.arange(length, device=ends.device)
    return torch.searchsorted(ends[1:].contiguous(), place, right=True)


def _block_mask(block: Any, sizes: tuple[int, int, int, int]) -> Mask | None:
    """FlexAttention's BlockMask, evaluated by its own mask function."""
    from torch.nn.attention.flex_attention import BlockMask, create_mask

    if not isinstance(block, BlockMask):
        raise Unreadable(f"its attention mask is a {type(block).__name__}")
    batch, heads = block.kv_num_blocks.shape[:2]
    grid = create_mask(
        block.mask_mod, batch, heads, sizes[2], sizes[3], device=str(block.kv_num_blocks.device)
    )
    return read_grid(grid, *sizes).mask


def _sinks_of(
    function: Callable, takes: Any, module: nn.Module, given: dict, heads: int
) -> Tensor | None:
    sinks = given.get("s_aux") if "s_aux" in takes else None
    if sinks is None and "sinks" in takes:
        sinks = given.get("sinks")
    code = getattr(inspect.unwrap(function), "__code__", None)
    if sinks is None and code is not None and "sinks" in code.co_names:
        sinks = getattr(module, "sinks", None)
    if sinks is None:
        return None
    if sinks.numel() != heads:
        raise Unreadable(
            f"its sinks have shape {tuple(sinks.shape)}; wanted one logit a head ({heads})"
        )
    return sinks.reshape(-1)


def _settle(call: AttentionCall, family: str, given: dict, output: Tensor) -> AttentionCall:
    """An attention function that we do not know: keep the reading that gives its output.

    Without a mask it may be causal or not, so both are tried on three rows.
    """
    readings = [call]
    if given.get("attention_mask") is None:
        readings += [
            AttentionCall(
                call.query, call.key, call.value, masks.causal(align=align), call.bias,
                call.scale, call.softcap, call.sinks, call.dropout,
            )
            for align in ("end", "start")
        ]  # fmt: skip
    for reading in readings:
        if reproduces(reading, output):
            return reading
    raise Unreadable(
        f"the attention function {family!r} is not one of transformers' own, and its output is not "
        "that of attention with the mask and keywords it was given"
    )


def reproduces(call: AttentionCall, output: Tensor) -> bool:
    """Whether first, middle and last row of the call give the rows of `output`.

    A row is a mean of values, so rounding is at most a few units of the value's size; products
    over D and S elements round like their square roots.
    """
    size = call.head_dim + call.key_length
    for row in sorted({0, call.query_length // 2, call.query_length - 1}):
        rows = slice(row, row + 1)
        steps = attention_steps(call.part(rows))
        have, want = output[:, :, rows].to(steps["output"].dtype), steps["output"]
        eps = max(torch.finfo(output.dtype).eps, torch.finfo(torch.float32).eps)
        peak = steps["scores"].abs().amax() * call.scale_value + 1
        limit = 8 * eps * size**0.5 * float(peak) * float(call.value.abs().amax() + 1e-30)
        seen = steps["weights"].sum(-1, keepdim=True) > 0
        if bool((((have - want).abs() > limit) & seen).any()):
            return False
    return True


def _wrap_upcast(original: Callable) -> Callable:
    """GPT-2's own eager form with float32 scores, a method that asks no interface."""

    @functools.wraps(original)
    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        found = watchers(module) if recording() else []
        if not found:
            return original(module, query, key, value, *args, **kwargs)
        with muted():
            result = original(module, query, key, value, *args, **kwargs)

        def build(frame: Frame) -> tuple[AttentionCall, Tensor | None]:
            check_plain(query, key, value)
            grid = kwargs.get("attention_mask", args[0] if args else None)
            sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
            read = local.reader(grid, *sizes)
            q, k, v, b = same_dtype(query, key, value, read.bias)
            assert q is not None and k is not None and v is not None
            scale = float(module.scaling)  # type: ignore[arg-type]
            dropout = getattr(module.attn_dropout, "p", 0.0) if module.training else 0.0
            call = AttentionCall(q, k, v, read.mask, b, scale, dropout=float(dropout))
            return call, result[0].transpose(1, 2)

        record(found, "Hugging Face upcast and reordered", build)
        return result

    attend._headwise_original = original  # type: ignore[attr-defined]
    return attend
