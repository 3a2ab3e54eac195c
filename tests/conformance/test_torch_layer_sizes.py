"""nn.MultiheadAttention: widths, layouts, dtypes, extra keys, empty sizes, training.

What PyTorch's documentation says and its tests (test/nn/test_multihead_attention.py) check.
"""

from __future__ import annotations

import pytest
import torch
from ledger import Suite, parameters
from torch import Tensor, nn
from torch.nn.functional import multi_head_attention_forward
from torch_layers import (
    HEADS,
    TERMS,
    B,
    E,
    L,
    S,
    agree,
    draw,
    hidden,
    inputs,
    nested,
    pair,
    translated,
)

from headwise import MultiHeadAttention, causal, hide, padding
from headwise.options import ProjectedContext
from tolerances import assert_near

pytestmark = pytest.mark.conformance

SUITE = Suite("nn.MultiheadAttention: sizes and training")


# --- widths, biases, layouts, dtypes -------------------------------------------------------------

for _widths in ((7, 5), (E, 5), (7, E), (7, 7)):
    for _bias in (True, False):

        @SUITE.passes(f"kdim={_widths[0]}, vdim={_widths[1]}, bias={_bias}", *_widths, _bias)
        def _(kdim: int, vdim: int, bias: bool) -> None:
            context = (draw(B, S, kdim, seed=1), draw(B, S, vdim, seed=2))
            agree(*pair(kdim=kdim, vdim=vdim, bias=bias), inputs()[0], context)


@SUITE.passes("bias=False leaves out all four")
def _() -> None:
    theirs, ours = pair(bias=False)
    assert theirs.in_proj_bias is None and theirs.out_proj.bias is None
    linears = (ours.q_proj, ours.k_proj, ours.v_proj, ours.out_proj)
    assert [linear.bias for linear in linears] == [None] * 4
    agree(theirs, ours, inputs()[0])


@SUITE.passes("batch_first=False, self-attention", False)
@SUITE.passes("batch_first=False, keys of another sequence", True)
def _(cross: bool) -> None:
    theirs, ours = pair(batch_first=False)
    x, context = inputs()
    context = context if cross else (x, x)
    wanted, weights = theirs(
        *(t.transpose(0, 1) for t in (x, *context)), average_attn_weights=False
    )
    got, ours_weights = ours(x, context, need_weights=True)
    assert_near(got, wanted.transpose(0, 1), terms=TERMS)
    assert_near(ours_weights, weights, terms=TERMS)


for _dtype in (torch.float32, torch.float16, torch.bfloat16):

    @SUITE.passes(f"{_dtype}".removeprefix("torch."), _dtype)
    def _(dtype: torch.dtype) -> None:
        theirs, ours = pair(dtype)
        assert {p.dtype for p in ours.parameters()} == {dtype}
        x = inputs(dtype)[0]
        with torch.no_grad():
            got, other = ours(x), theirs(x, x, x, need_weights=False)[0]
            wanted, _ = theirs.double()(*[x.double()] * 3, need_weights=False)
        assert got.dtype == other.dtype == dtype
        # torch's own rounding is the measure: ours is at most twice that, or one unit.
        unit = torch.finfo(dtype).eps * float(wanted.abs().max())
        allowed = max(unit, 2 * float((other.double() - wanted).abs().max()))
        assert float((got.double() - wanted).abs().max()) <= allowed


@SUITE.passes("training flag, dropout and frozen parameters come along")
def _() -> None:
    theirs = nn.MultiheadAttention(E, HEADS, dropout=0.25)
    theirs.in_proj_weight.requires_grad_(False)
    ours = MultiHeadAttention.from_torch(theirs)
    assert ours.training and ours.dropout == 0.25
    trained = {name for name, p in ours.named_parameters() if p.requires_grad}
    assert trained == {
        "q_proj.bias", "k_proj.bias", "v_proj.bias", "out_proj.weight", "out_proj.bias"
    }  # fmt: skip


# --- one sequence alone --------------------------------------------------------------------------


@SUITE.refuses(
    "unbatched inputs (L, E)",
    "batch first, always; the message says how to add the axis",
    ValueError,
    r"x must be batch first, .* got 2 axes: \(5, 22\); one sequence alone is x\[None\]",
)
def _() -> None:
    _, ours = pair()
    ours(inputs()[0][0])


@SUITE.passes("unbatched inputs with the axis added", None, None)
@SUITE.passes("unbatched, attn_mask (L, S)", hidden(L, S), None)
@SUITE.passes("unbatched, attn_mask (H, L, S)", hidden(HEADS, L, S), None)
@SUITE.passes("unbatched, key_padding_mask (S,)", None, hidden(S))
def _(attn_mask: Tensor | None, key_padding_mask: Tensor | None) -> None:
    theirs, ours = pair()
    x, context = inputs()
    one = (x[0], context[0][0], context[1][0])
    wanted, weights = theirs(
        *one,
        attn_mask=attn_mask,
        key_padding_mask=key_padding_mask,
        average_attn_weights=False,
    )
    real = None if key_padding_mask is None else key_padding_mask[None]
    got, ours_weights = ours(
        one[0][None], (one[1][None], one[2][None]), mask=translated(attn_mask, real),
        need_weights=True,
    )  # fmt: skip
    assert_near(got[0], wanted, terms=TERMS)
    assert_near(ours_weights[0], weights, terms=TERMS)


# --- extra keys ----------------------------------------------------------------------------------

EXTRA = "an extra key that every query sees is not part of the layer"
for _options in (
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True},
):
    _name = " and ".join(_options)

    @SUITE.refuses(
        _name,
        EXTRA,
        ValueError,
        rf"the module was built with {next(iter(_options))}=True, an extra",
    )
    def _(options: dict = _options) -> None:
        MultiHeadAttention.from_torch(nn.MultiheadAttention(E, HEADS, **options))


@SUITE.refuses(
    "another class than nn.MultiheadAttention",
    "from_torch reads one class",
    TypeError,
    r"wanted a torch\.nn\.MultiheadAttention, got TransformerEncoderLayer",
)
def _() -> None:
    MultiHeadAttention.from_torch(nn.TransformerEncoderLayer(E, HEADS, batch_first=True))


@SUITE.passes("static_k and static_v are a projected context")
def _() -> None:
    theirs, ours = pair()
    x = inputs()[0]
    key, value = draw(B, HEADS, S, E // HEADS, seed=1), draw(B, HEADS, S, E // HEADS, seed=2)
    x_first = x.transpose(0, 1)
    wanted, weights = multi_head_attention_forward(
        x_first,
        *[draw(S, B, E, seed=5)] * 2,  # read for nothing but its shape
        E,
        HEADS,
        theirs.in_proj_weight,
        theirs.in_proj_bias,
        None,
        None,
        False,
        0.0,
        theirs.out_proj.weight,
        theirs.out_proj.bias,
        training=False,
        static_k=key.flatten(0, 1),
        static_v=value.flatten(0, 1),
        average_attn_weights=False,
    )
    got, ours_weights = ours(x, ProjectedContext(key, value), need_weights=True)
    assert_near(got, wanted.transpose(0, 1), terms=TERMS)
    assert_near(ours_weights, weights, terms=TERMS)


# --- shapes that both refuse ---------------------------------------------------------------------


@SUITE.passes("keys (S, E) with values (B, S, E): both refuse", 0, "2-D and 3-D", "key context")
@SUITE.passes("keys (B, S, E) with values (S, E): both refuse", 1, "3-D and 2-D", "value context")
def _(flat: int, said: str, ours_name: str) -> None:
    theirs, ours = pair()
    x, context = inputs()
    wrong = tuple(c[0] if i == flat else c for i, c in enumerate(context))
    with pytest.raises(AssertionError, match=f"to be 3-D but found {said} tensors"):
        theirs(x, *wrong)
    with pytest.raises(ValueError, match=f"{ours_name} must be batch first, .* got 2 axes"):
        ours(x, wrong)


@SUITE.passes("key_padding_mask of one axis: both refuse")
def _() -> None:
    theirs, ours = pair()
    x, context = inputs()
    with pytest.raises(AssertionError, match="expected `key_padding_mask` to be `None` or 2-D"):
        theirs(x, *context, key_padding_mask=hidden(S))
    with pytest.raises(ValueError, match=r"padding: real: wanted shape \(3, 7\), got \(7,\)"):
        ours(x, context, mask=padding(~hidden(S)))


@SUITE.passes("attn_mask of one axis: both refuse")
def _() -> None:
    theirs, ours = pair()
    x, context = inputs()
    with pytest.raises(AssertionError, match="expected `attn_mask` to be `None`, 2-D or 3-D"):
        theirs(x, *context, attn_mask=hidden(S))
    with pytest.raises(ValueError, match=r"hide: wanted \(L, S\) or .* got rank 1, \(7,\)"):
        ours(x, context, mask=hide(hidden(S)))


@SUITE.passes("attn_mask for another number of heads: both refuse")
def _() -> None:
    theirs, ours = pair()
    x, context = inputs()
    with pytest.raises(RuntimeError, match="shape of the 3D attn_mask is"):
        theirs(x, *context, attn_mask=hidden(B * 3, L, S))
    with pytest.raises(
        ValueError, match=r"cannot broadcast shape \(3, 3, 5, 7\) to \(3, 2, 5, 7\)"
    ):
        ours(x, context, mask=hide(hidden(B, 3, L, S)))


@SUITE.refuses(
    "attn_mask (B·H, L, S) as it is",
    "an axis that could mean batch or heads is not guessed",
    ValueError,
    r"rank 3, shape \(6, 5, 7\), could be \(B, L, S\) or \(H, L, S\); make it rank 4",
)
def _() -> None:
    _, ours = pair()
    x, context = inputs()
    ours(x, context, mask=hide(hidden(B * HEADS, L, S)))


# --- empty sizes ---------------------------------------------------------------

SIZES = {"empty batch": (0, L, S), "L = 0": (B, 0, S), "S = 0": (B, L, 0)}
for _name, _sizes in SIZES.items():
    for _weights in ("off", "averaged", "per head"):

        @SUITE.passes(f"{_name}, weights {_weights}", _sizes, _weights)
        def _(sizes: tuple[int, int, int], weights: str) -> None:
            batch, queries, keys = sizes
            context = (draw(batch, keys, E, seed=1), draw(batch, keys, E, seed=2))
            agree(*pair(), draw(batch, queries, E), context, weights=(weights,))


# --- training ------------------------------------------------------------------------------------


def _twins(dropout: float, train: bool) -> tuple:
    theirs, ours = pair(dropout=dropout)
    return theirs.train(train), ours.train(train)


@SUITE.passes("training without dropout, weights on and off", 0.0, True)
@SUITE.passes("eval leaves dropout out, weights on and off", 0.5, False)
def _(dropout: float, train: bool) -> None:
    agree(*_twins(dropout, train), *inputs())


@SUITE.differs(
    "need_weights with dropout in training",
    "torch returns the weights after dropout; ours returns them before, so that rows sum to 1",
)
def _() -> None:
    theirs, ours = _twins(0.5, True)
    x, context = inputs()
    _, wanted = theirs.eval()(x, *context, average_attn_weights=False)
    _, dropped = theirs.train()(x, *context, average_attn_weights=False)
    kept = dropped != 0
    assert kept.any() and not kept.all()
    # A weight that stays is doubled, for half of them go.
    assert_near(dropped[kept], 2 * wanted[kept], terms=TERMS)
    _, got = ours(x, context, need_weights=True)
    assert_near(got, wanted, terms=TERMS)
    assert_near(got.sum(-1), torch.ones_like(got[..., 0]), terms=TERMS)


@SUITE.passes("dropout in training keeps the mean and is reproducible")
def _() -> None:
    theirs, ours = _twins(0.25, True)
    x = draw(1, L, E)
    wanted = ours.eval()(x)
    many = x.expand(4000, -1, -1)
    for module in (lambda: theirs(many, many, many, need_weights=False)[0], lambda: ours(many)):
        ours.train()
        torch.manual_seed(0)
        got = module()
        torch.manual_seed(0)
        assert torch.equal(module(), got)
        # Five standard errors of the mean, for each of the 110 numbers.
        error = got.std(0, keepdim=True) / len(got) ** 0.5
        assert (error > 0).all()
        assert ((got.mean(0, keepdim=True) - wanted).abs() < 5 * error).all()


for _weights in ("off", "averaged", "per head"):

    @SUITE.passes(f"gradients of inputs and parameters, weights {_weights}", _weights)
    def _(weights: str) -> None:
        theirs, ours = pair()
        future = torch.ones(L, L, dtype=torch.bool).triu(1)
        on, averaged = weights != "off", weights == "averaged"
        leaves = [inputs()[0].requires_grad_() for _ in range(2)]
        wanted = theirs(
            *[leaves[0]] * 3, attn_mask=future, need_weights=on, average_attn_weights=averaged
        )
        got = ours(leaves[1], mask=causal(), need_weights=on, average_weights=averaged)
        for results in (wanted, got if on else (got,)):
            sum(r.square().sum() for r in results if r is not None).backward()
        assert_near(leaves[1].grad, leaves[0].grad, terms=20 * TERMS)
        for name in ("weight", "bias"):
            # Side by side: the key bias's own gradient is 0 but for rounding, softmax ignores it.
            linears = (ours.q_proj, ours.k_proj, ours.v_proj)
            ours_grad = torch.cat([getattr(linear, name).grad for linear in linears])
            assert_near(ours_grad, getattr(theirs, f"in_proj_{name}").grad, terms=20 * TERMS)
            ours_grad = getattr(ours.out_proj, name).grad
            assert_near(ours_grad, getattr(theirs.out_proj, name).grad, terms=20 * TERMS)


# --- ragged batches ------------------------------------------------------------------------------


@SUITE.passes("a ragged batch (torch: a nested tensor) is a padded batch with padding()")
def _() -> None:
    theirs, ours = pair()
    parts = [draw(4, E, seed=4), draw(6, E, seed=5)]
    with torch.inference_mode():
        ragged = nested(parts, torch.strided)
        wanted = theirs(ragged, ragged, ragged, need_weights=False)[0].unbind()
    x = nn.utils.rnn.pad_sequence(parts, batch_first=True)
    got = ours(x, mask=padding(lengths=torch.tensor([4, 6])))
    for row, whole in zip(got, wanted, strict=True):
        assert_near(row[: len(whole)], whole.clone(), terms=TERMS)


@SUITE.refuses(
    "a nested tensor as it is",
    "nested tensors have no (B, H, L, D) shape; pad them and say what is padding",
    TypeError,
    "x is a nested tensor",
)
def _() -> None:
    _, ours = pair()
    ragged = nested([draw(4, E), draw(6, E)], torch.jagged)
    ours(ragged)


@SUITE.passes("a fused bias of another dtype (torch takes it in its fast path)")
def _() -> None:
    theirs, _ = pair()
    theirs.in_proj_bias = nn.Parameter(theirs.in_proj_bias.half())
    ours = MultiHeadAttention.from_torch(theirs)
    assert {p.dtype for p in ours.parameters()} == {torch.float64}
    x = inputs()[0]
    with torch.inference_mode():
        assert theirs(x, x, x, need_weights=False)[0].dtype == ours(x).dtype
    theirs.in_proj_bias = nn.Parameter(theirs.in_proj_bias.double())
    agree(theirs, ours, x)


@pytest.mark.parametrize("case", parameters(SUITE))
def test_case(case):
    case.run()
