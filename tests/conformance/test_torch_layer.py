"""nn.MultiheadAttention: what PyTorch's documentation and tests expect of it, asked of the layer
that `MultiHeadAttention.from_torch` makes of it.

torch says in its masks what is hidden, headwise says which: `translated` is the whole difference.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import multi_head_attention_forward

import headwise
from headwise import Mask, MultiHeadAttention, causal, everything, hide, keep, padding
from headwise.options import ProjectedContext
from headwise.reference import merge_heads, split_heads
from ledger import Suite, parameters
from tolerances import assert_near

pytestmark = pytest.mark.conformance

SUITE = Suite("nn.MultiheadAttention")
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
    return torch.zeros(grid.shape, dtype=torch.float64).masked_fill(grid, -torch.inf)


# --- weights, torch's two code paths ---------------------------------------------------------------

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


# --- masks of every rank ---------------------------------------------------------------------------

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
    r"MultiHeadAttention: mask is a Tensor, which does not say what it means; wrap it: keep\(mask\)",
)
def _() -> None:
    _, ours = pair()
    ours(inputs()[0], mask=hidden(L, L))


# --- is_causal -------------------------------------------------------------------------------------

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


# --- widths, biases, layouts, dtypes ---------------------------------------------------------------

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


for _dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):

    @SUITE.passes(f"{_dtype}".removeprefix("torch."), _dtype)
    def _(dtype: torch.dtype) -> None:
        theirs, ours = pair(dtype)
        assert {p.dtype for p in ours.parameters()} == {dtype}
        x = inputs(dtype)[0]
        wanted, _ = theirs.double()(*[x.double()] * 3, need_weights=False)
        # Four projections and two products, each rounded to the dtype.
        assert_near(ours(x), wanted.to(dtype), terms=6 * TERMS)


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


# --- one sequence alone ----------------------------------------------------------------------------


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


# --- extra keys ------------------------------------------------------------------------------------

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


# --- shapes that both refuse -----------------------------------------------------------------------


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


# --- empty sizes, rows with no key -----------------------------------------------------------------

SIZES = {"empty batch": (0, L, S), "L = 0": (B, 0, S), "S = 0": (B, L, 0)}
for _name, _sizes in SIZES.items():
    for _weights in ("off", "averaged", "per head"):

        @SUITE.passes(f"{_name}, weights {_weights}", _sizes, _weights)
        def _(sizes: tuple[int, int, int], weights: str) -> None:
            batch, queries, keys = sizes
            context = (draw(batch, keys, E, seed=1), draw(batch, keys, E, seed=2))
            agree(*pair(), draw(batch, queries, E), context, weights=(weights,))


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


# --- training --------------------------------------------------------------------------------------


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


# --- ragged batches --------------------------------------------------------------------------------


@SUITE.passes("a ragged batch (torch: a nested tensor) is a padded batch with padding()")
def _() -> None:
    theirs, ours = pair()
    parts = [draw(4, E, seed=4), draw(6, E, seed=5)]
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype")
        nested = torch.nested.nested_tensor(parts, layout=torch.strided)
        wanted = theirs(nested, nested, nested, need_weights=False)[0].unbind()
    x = nn.utils.rnn.pad_sequence(parts, batch_first=True)
    got = ours(x, mask=padding(lengths=torch.tensor([4, 6])))
    for row, whole in zip(got, wanted, strict=True):
        assert_near(row[: len(whole)], whole.clone(), terms=TERMS)


@SUITE.known_fault("a nested tensor as it is", "a nested tensor is not refused by name")
def _() -> None:
    _, ours = pair()
    nested = torch.nested.nested_tensor([draw(4, E), draw(6, E)], layout=torch.jagged)
    with pytest.raises(TypeError, match="x is a nested tensor"):
        ours(nested)


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
