"""nn.MultiheadAttention: weights, masks of every rank, is_causal, rows with no key.

What PyTorch's documentation says and its tests (test/nn/test_multihead_attention.py) check.
"""

from __future__ import annotations

import pytest
import torch
from ledger import Suite, parameters
from torch import Tensor, nn
from torch_layers import (
    HEADS,
    TERMS,
    B,
    L,
    S,
    added,
    agree,
    draw,
    hidden,
    inputs,
    pair,
    translated,
)

import headwise
from headwise import causal, hide, keep, padding
from headwise.reference import merge_heads, split_heads
from tolerances import assert_near

pytestmark = pytest.mark.conformance

SUITE = Suite("nn.MultiheadAttention: weights and masks")


# --- weights, torch's two code paths -------------------------------------------------------------

for _weights in ("off", "averaged", "per head"):

    @SUITE.passes(f"self-attention, weights {_weights}", _weights)
    def _(weights: str) -> None:
        agree(*pair(), inputs()[0], weights=(weights,))

    @SUITE.passes(
        f"self-attention in inference mode (torch's fast path), weights {_weights}", _weights
    )
    def _(weights: str) -> None:
        with torch.inference_mode():
            agree(*pair(), inputs()[0], weights=(weights,))

    @SUITE.passes(f"keys and values of another sequence, weights {_weights}", _weights)
    def _(weights: str) -> None:
        agree(*pair(), *inputs(), weights=(weights,))


# --- masks of every rank -------------------------------------------------------------------------

MASKS = {
    "attn_mask (L, S)": (hidden(L, S), None),
    "attn_mask (B·H, L, S)": (hidden(B * HEADS, L, S), None),
    "key_padding_mask (B, S)": (None, hidden(B, S)),
    "attn_mask (L, S) and key_padding_mask": (hidden(L, S), hidden(B, S)),
    "attn_mask (B·H, L, S) and key_padding_mask": (hidden(B * HEADS, L, S), hidden(B, S)),
}
for _name, _masks in MASKS.items():
    for _kind in ("bool", "float 0/-inf"):
        _given = tuple(
            None if mask is None else mask if _kind == "bool" else added(mask) for mask in _masks
        )
        for _weights in ("off", "averaged", "per head"):

            @SUITE.passes(f"{_kind} {_name}, weights {_weights}", _given, _weights)
            def _(masks: tuple, weights: str) -> None:
                attn_mask, key_padding_mask = masks
                agree(
                    *pair(),
                    *inputs(),
                    attn_mask=attn_mask,
                    key_padding_mask=key_padding_mask,
                    weights=(weights,),
                )


@SUITE.passes("both masks in inference mode (torch's fast path)")
def _() -> None:
    with torch.inference_mode():
        agree(*pair(), inputs()[0], attn_mask=hidden(L, L), key_padding_mask=hidden(B, L))


@SUITE.passes("attn_mask (B·H, L, S) equals attn_mask (L, S) of each batch element")
def _() -> None:
    _, ours = pair()
    x, context = inputs()
    grids = hidden(B, L, S)
    whole = ours(x, context, mask=translated(grids.repeat_interleave(HEADS, 0), None))
    for i, grid in enumerate(grids):
        alone = ours(x[i : i + 1], tuple(c[i : i + 1] for c in context), mask=hide(grid))
        assert_near(whole[i : i + 1], alone, terms=TERMS)


SCORES = "the layer takes masks, not scores to add; headwise.attention(bias=) takes those"


@SUITE.refuses(
    "float attn_mask of real scores", SCORES, TypeError, "keep: .*real-valued scores go into bias="
)
def _() -> None:
    _, ours = pair()
    x, context = inputs()
    ours(x, context, mask=keep(draw(L, S, seed=3)))


@SUITE.refuses(
    "float key_padding_mask of real scores",
    SCORES,
    TypeError,
    r"padding: real is bool or 0/1 integers, True for real tokens; got torch\.float64",
)
def _() -> None:
    _, ours = pair()
    x, context = inputs()
    ours(x, context, mask=padding(draw(B, S, seed=3)))


@SUITE.passes("float attn_mask (L, S) of real scores, through headwise.attention", (L, S))
@SUITE.passes(
    "float attn_mask (B·H, L, S) of real scores, through headwise.attention", (B * HEADS, L, S)
)
def _(shape: tuple[int, ...]) -> None:
    theirs, ours = pair()
    x, (keys, values) = inputs()
    scores = draw(*shape, seed=3)
    wanted, _ = theirs(x, keys, values, attn_mask=scores, need_weights=False)
    bias = scores if scores.dim() == 2 else scores.unflatten(0, (B, HEADS))
    query, key, value = (
        split_heads(linear(tokens), HEADS)
        for linear, tokens in ((ours.q_proj, x), (ours.k_proj, keys), (ours.v_proj, values))
    )
    heads = headwise.attention(query, key, value, bias=bias)
    assert_near(ours.out_proj(merge_heads(heads)), wanted, terms=TERMS)


@SUITE.refuses(
    "a bare tensor as the mask",
    "a raw tensor does not say what True means",
    TypeError,
    r"mask is a Tensor, which does not say what it means; wrap it: keep\(mask\)",
)
def _() -> None:
    _, ours = pair()
    ours(inputs()[0], mask=hidden(L, L))


# --- is_causal -----------------------------------------------------------------------------------

for _kind in ("bool", "float"):
    for _weights in ("off", "averaged", "per head"):

        @SUITE.passes(
            f"is_causal hint beside its {_kind} mask, weights {_weights}", _kind, _weights
        )
        def _(kind: str, weights: str) -> None:
            future = torch.ones(L, L, dtype=torch.bool).triu(1)
            given = future if kind == "bool" else nn.Transformer.generate_square_subsequent_mask(L)
            given = given if kind == "bool" else given.double()
            theirs, ours = pair()
            x = inputs()[0]
            agree(theirs, ours, x, attn_mask=given, is_causal=True, weights=(weights,))
            wanted = theirs(x, x, x, attn_mask=given, is_causal=True, need_weights=False)[0]
            assert_near(ours(x, mask=causal()), wanted, terms=TERMS)


@SUITE.differs(
    "is_causal without attn_mask", "torch wants the mask beside its hint; ours is a mask"
)
def _() -> None:
    theirs, ours = pair()
    x = inputs()[0]
    with pytest.raises(RuntimeError, match="Need attn_mask if specifying the is_causal hint"):
        theirs(x, x, x, is_causal=True)
    future = torch.ones(L, L, dtype=torch.bool).triu(1)
    wanted, _ = theirs(x, x, x, attn_mask=future)
    assert_near(ours(x, mask=causal()), wanted, terms=TERMS)


# --- rows with no key ---


def _row(form: str) -> tuple[dict[str, Tensor], tuple]:
    """Masks that leave a row with no key, and where such rows are."""
    if form == "attn_mask":
        grid = hidden(L, S)
        grid[2] = True
        return {"attn_mask": grid}, (slice(None), 2)
    grid = hidden(B, S)
    grid[1] = True
    return {"key_padding_mask": grid}, (1,)


for _form in ("attn_mask", "key_padding_mask"):

    @SUITE.passes(f"a row with no key in {_form}, weights off", _form)
    def _(form: str) -> None:
        masks, rows = _row(form)
        theirs, ours = pair()
        agree(theirs, ours, *inputs(), **masks, weights=("off",))
        x, context = inputs()
        got = ours(
            x, context, mask=translated(masks.get("attn_mask"), masks.get("key_padding_mask"))
        )
        assert torch.equal(got[rows], ours.out_proj.bias.expand_as(got[rows]))

    @SUITE.differs(
        f"a row with no key in {_form}, weights on",
        "torch gives NaN where weights are asked for; ours gives weights 0 and output out_proj(0)",
    )
    def _(form: str = _form) -> None:
        masks, rows = _row(form)
        theirs, ours = pair()
        x, context = inputs()
        wanted, weights = theirs(x, *context, **masks, average_attn_weights=False)
        mask = translated(masks.get("attn_mask"), masks.get("key_padding_mask"))
        got, ours_weights = ours(x, context, mask=mask, need_weights=True)
        assert wanted[rows].isnan().all() and wanted.isnan().sum() == wanted[rows].numel()
        assert torch.equal(got[rows], ours.out_proj.bias.expand_as(got[rows]))
        empty = weights.isnan()
        assert empty.any() and not ours_weights[empty].any()
        # Everywhere else they agree.
        assert_near(torch.where(wanted.isnan(), got, wanted), got, terms=TERMS)
        assert_near(torch.where(empty, 0.0, weights), ours_weights, terms=TERMS)


@pytest.mark.parametrize("case", parameters(SUITE))
def test_case(case):
    case.run()
