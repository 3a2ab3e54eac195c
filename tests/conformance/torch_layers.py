"""nn.MultiheadAttention beside the layer that `MultiHeadAttention.from_torch` makes of it.

torch's masks say what is hidden, headwise's masks say what they mean: `translated` is the whole
difference.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from headwise import Mask, MultiHeadAttention, everything, hide, keep, padding
from tolerances import assert_near

# Every axis another number; an even number of heads, or torch leaves its fast path out.
B, L, S, HEADS, E = 3, 5, 7, 2, 22
TERMS = E + S


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pair(dtype: torch.dtype = torch.float64, **options) -> tuple:
    """Their module, batch first unless told otherwise, with no weight 0; and ours made of it."""
    options = {"batch_first": True} | options
    theirs = nn.MultiheadAttention(E, HEADS, **options, dtype=dtype)
    with torch.no_grad():
        for seed, parameter in enumerate(theirs.parameters()):
            parameter.copy_(0.4 * draw(*parameter.shape, seed=seed).to(dtype))
    return theirs.eval(), MultiHeadAttention.from_torch(theirs).eval()


def translated(attn_mask: Tensor | None, key_padding_mask: Tensor | None) -> Mask:
    """torch's masks in headwise's words. bool: True is hidden. Float: 0 is seen, −inf hidden."""
    mask = everything()
    if attn_mask is not None:
        if attn_mask.dim() == 3:  # (B·H, L, S), the heads of a batch element side by side
            attn_mask = attn_mask.unflatten(0, (-1, HEADS))
        mask &= hide(attn_mask) if attn_mask.dtype == torch.bool else keep(attn_mask == 0)
    if key_padding_mask is not None:
        seen = ~key_padding_mask if key_padding_mask.dtype == torch.bool else key_padding_mask == 0
        mask &= padding(seen)
    return mask


def agree(
    theirs: nn.MultiheadAttention,
    ours: MultiHeadAttention,
    x: Tensor,
    context: tuple[Tensor, Tensor] | None = None,
    *,
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    weights: tuple[str, ...] = ("off", "averaged", "per head"),
) -> None:
    """Equal outputs, and weights where asked for."""
    keys, values = (x, x) if context is None else context
    mask = translated(attn_mask, key_padding_mask)
    for form in weights:
        wanted, wanted_weights = theirs(
            x,
            keys,
            values,
            attn_mask=attn_mask,
            key_padding_mask=key_padding_mask,
            is_causal=is_causal,
            need_weights=form != "off",
            average_attn_weights=form != "per head",
        )
        if form == "off":
            assert wanted_weights is None
            got = ours(x, context, mask=mask)
        else:
            averaged = form == "averaged"
            got, got_weights = ours(
                x, context, mask=mask, need_weights=True, average_weights=averaged
            )
            assert got_weights.dtype == wanted_weights.dtype
            assert_near(got_weights, wanted_weights, terms=TERMS)
        assert got.dtype == wanted.dtype
        assert_near(got, wanted, terms=TERMS)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """x (B, L, E) and a context of S keys and values."""
    return draw(B, L, E, dtype=dtype), (
        draw(B, S, E, dtype=dtype, seed=1),
        draw(B, S, E, dtype=dtype, seed=2),
    )


def hidden(*shape: int) -> Tensor:
    """A bool mask in torch's sense, in which every row sees a key."""
    grid = draw(*shape, seed=3) > 0
    grid[..., 0] = False
    return grid


def added(grid: Tensor) -> Tensor:
    """The same as scores to add: −inf where hidden."""
    return torch.zeros(grid.shape, dtype=torch.float64).masked_fill(grid, -torch.inf)


def nested(parts: list[Tensor], layout: torch.layout) -> Tensor:
    """torch's ragged batch. It warns once a process that it is a prototype, whoever comes first."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype")
        return torch.nested.nested_tensor(parts, layout=layout)
