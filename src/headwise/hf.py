"""headwise in any Hugging Face model: `import headwise.hf`, then `set_attn_implementation`.

    import headwise.hf
    model.set_attn_implementation("headwise")

Both the attention function and the mask function are registered: without the second, transformers
drops causality. Masks arrive as row intervals, made once for a forward pass; no queries × keys grid
is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from headwise._extras import require
from headwise.attention import attention
from headwise.int8_cache import attend_held
from headwise.intervals import Mask, Sizes, from_blocks
from headwise.masks import Compact, causal, everything, padding
from headwise.quantized import Held, QuantizedCall
from headwise.watch.masks import read_grid

NAME = "headwise"
# Entries of a mask looked at in one go, where a model's own predicate has to be asked.
BLOCK = 1 << 22


def attention_function(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor | Held,
    value: Tensor | Held,
    attention_mask: Mask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for each attention: (B, H, L, D) in, (B, L, H, Dv) out, no weights.

    Without a mask it is causal where `is_causal`, or else the module, says so. `s_aux` are learned
    sinks. key and value may be what a `QuantizedCache` holds. Keywords that say the same again (the
    window is in the mask) are not read.
    """
    bias = position_bias
    if isinstance(attention_mask, Tensor):
        shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        mask, added = read_grid(attention_mask, *shape)
        if added is not None:
            bias = added.to(query.dtype) if bias is None else bias + added.to(bias.dtype)
    elif attention_mask is not None:
        mask = attention_mask
    else:
        says = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = causal(align="start") if says and query.shape[2] > 1 else None
    bias = None if bias is None else bias.to(query.dtype)
    sinks = None if s_aux is None else s_aux.to(query.dtype)
    if isinstance(key, Held):
        if dropout > 0:
            raise ValueError("QuantizedCache: it serves inference, but dropout is on; model.eval()")
        call = QuantizedCall(query, key, mask, bias, scaling, softcap, sinks)
        return attend_held(call)[0].transpose(1, 2).contiguous(), None
    assert isinstance(value, Tensor)
    output = attention(
        query,
        key,
        value,
        mask,
        bias=bias,
        scale=scaling,
        softcap=softcap,
        sinks=sinks,
        dropout=dropout,
    )
    return output.transpose(1, 2).contiguous(), None


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    use_vmap: bool = False,
    **_: Any,
) -> Mask:
    """What transformers calls once a forward pass to make a mask: row intervals.

    Causal and bidirectional predicates are known; any other is asked in blocks of rows.
    """
    from transformers import masking_utils as known

    if mask_function is None:
        mask_function = known.causal_mask_function
    first, origin = int(q_offset), int(kv_offset)
    if mask_function is known.causal_mask_function:
        # The usual case by its own name, for which kernels have a fast path.
        at_end = first - origin == kv_length - q_length
        mask = causal() if at_end else causal(offset=first - origin)
    elif mask_function is known.bidirectional_mask_function:
        mask = everything()
    else:
        sizes = Sizes(batch_size, 1, q_length, kv_length, torch.device(device))
        rows = _asked(mask_function, sizes, first, origin, use_vmap)
        mask = Compact(from_blocks(sizes, rows))
    if attention_mask is not None:
        real = known.prepare_padding_mask(attention_mask, kv_length, origin)
        real = real[:, origin : origin + kv_length].to(device).bool()
        if torch.compiler.is_compiling() or not bool(real.all()):
            mask = mask & padding(real)
    compiled = mask.compile(
        batch=batch_size, heads=1, queries=q_length, keys=kv_length, device=device
    )
    # The number of heads is not known here; a mask for one head serves them all.
    return everything() if compiled.is_full else Compact(compiled)


def _asked(
    predicate: Callable, sizes: Sizes, first: int, origin: int, use_vmap: bool
) -> Iterator[Tensor]:
    """Blocks of the grid, (B, 1, rows, S), as a model's own predicate answers."""
    batch = torch.arange(sizes.batch, device=sizes.device)
    head = torch.zeros(1, dtype=torch.long, device=sizes.device)
    keys = torch.arange(sizes.keys, device=sizes.device) + origin
    step = max(1, BLOCK // max(1, sizes.batch * sizes.keys))
    for start in range(0, sizes.queries, step):
        stop = min(start + step, sizes.queries)
        queries = torch.arange(start, stop, device=sizes.device) + first
        if use_vmap:
            asked = predicate
            for axes in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None),
                         (0, None, None, None)):  # fmt: skip
                asked = torch.vmap(asked, in_dims=axes)
            grid = asked(batch, head, queries, keys)
        else:
            grid = predicate(
                batch[:, None, None, None],
                head[None, :, None, None],
                queries[None, None, :, None],
                keys[None, None, None, :],
            )
        yield grid.expand(sizes.batch, 1, stop - start, sizes.keys)


def register() -> None:
    """Make "headwise" known to transformers. Importing this module does it."""
    purpose = "headwise.hf"
    require("transformers", extra="models", purpose=purpose)
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, mask_function)


register()

from headwise.hf_cache import QuantizedCache  # noqa: E402  (needs transformers, as asked for above)

__all__ = ["NAME", "QuantizedCache", "attention_function", "mask_function", "register"]
