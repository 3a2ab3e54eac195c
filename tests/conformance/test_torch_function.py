"""F.scaled_dot_product_attention: what its documentation says, asked of headwise.attention.

The numbers wanted are torch's own, in float64 unless a case is about another dtype.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from ledger import Suite, parameters
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torch_attention
from torch_layers import nested

import headwise
from headwise import causal, hide, keep
from headwise.backends import BACKENDS
from tolerances import assert_near

pytestmark = pytest.mark.conformance

SUITE = Suite("F.scaled_dot_product_attention")
# Every axis another number, so that a mask laid over the wrong one cannot fit.
B, H, L, S, D = 2, 6, 5, 7, 3


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(heads: int = H, queries: int = L, keys: int = S, batch: int = B, width: int = D):
    """query (B, H, L, D), key (B, heads, S, D), value (B, heads, S, width)."""
    return (
        draw(batch, H, queries, D),
        draw(batch, heads, keys, D, seed=1),
        draw(batch, heads, keys, width, seed=2),
    )


def agree(wanted: Tensor, *given: Tensor, terms: int = S + D, **options: object) -> None:
    """headwise gives `wanted`: as a user calls it, and on every backend by name."""
    for backend in (None, *(backend.name for backend in BACKENDS)):
        got = headwise.attention(*given, **options, backend=backend)
        assert got.dtype == wanted.dtype
        assert_near(got, wanted, terms=terms)


def selection(*shape: int) -> Tensor:
    """A bool mask in which every row of a full grid keeps a key."""
    grid = draw(*shape, seed=3) > 0
    grid[..., 0] = True
    return grid


# --- plain, causal, scale, shared heads ----------------------------------------------------------


@SUITE.passes("no mask")
def _() -> None:
    agree(torch_attention(*inputs()), *inputs())


@SUITE.passes("value wider than key", 10)
@SUITE.passes("value narrower than key", 2)
def _(width: int) -> None:
    agree(torch_attention(*inputs(width=width)), *inputs(width=width))


for _queries, _keys in ((5, 5), (2, 5), (5, 2), (1, 4)):

    @SUITE.passes(f"is_causal, L={_queries}, S={_keys}", _queries, _keys)
    def _(queries: int, keys: int) -> None:
        given = inputs(queries=queries, keys=keys)
        wanted = torch_attention(*given, is_causal=True)
        agree(wanted, *given, mask=causal(align="start"))


for _scale in (1.0, 0.01, 7.5):

    @SUITE.passes(f"scale={_scale}", _scale)
    def _(scale: float) -> None:
        # A larger scale makes larger scores, whose rounding the softmax passes on.
        agree(torch_attention(*inputs(), scale=scale), *inputs(), scale=scale, terms=400)


for _heads in (1, 2, 3):

    @SUITE.passes(f"enable_gqa, {H} query heads on {_heads}", _heads)
    def _(heads: int) -> None:
        agree(torch_attention(*inputs(heads), enable_gqa=True), *inputs(heads))


@SUITE.passes("enable_gqa with is_causal and a scale")
def _() -> None:
    given = inputs(2)
    wanted = torch_attention(*given, is_causal=True, scale=0.3, enable_gqa=True)
    agree(wanted, *given, mask=causal(align="start"), scale=0.3)


@SUITE.passes("enable_gqa that does not divide: both refuse")
def _() -> None:
    with pytest.raises(RuntimeError, match="must divide the number of heads"):
        torch_attention(*inputs(4), enable_gqa=True)
    with pytest.raises(ValueError, match="6 query heads cannot share 4 key/value heads evenly"):
        headwise.attention(*inputs(4))


# --- masks, broadcast over every axis ------------------------------------------------------------

SHAPES = [
    (L, S), (1, S), (L, 1), (1, 1),
    (B, H, L, S), (1, H, L, S), (B, 1, L, S), (1, 1, L, S),
    (B, H, 1, S), (B, 1, 1, S), (1, H, 1, S), (B, H, L, 1), (1, 1, 1, 1),
]  # fmt: skip

for _shape in SHAPES:

    @SUITE.passes(f"bool attn_mask {_shape}", _shape)
    def _(shape: tuple[int, ...]) -> None:
        grid = selection(*shape)
        wanted = torch_attention(*inputs(), attn_mask=grid)
        agree(wanted, *inputs(), mask=keep(grid))
        agree(wanted, *inputs(), mask=hide(~grid))

    @SUITE.passes(f"float attn_mask {_shape}", _shape)
    def _(shape: tuple[int, ...]) -> None:
        scores = draw(*shape, seed=3)
        agree(torch_attention(*inputs(), attn_mask=scores), *inputs(), bias=scores)


for _shape in ((L, S), (B, 1, 1, S), (B, H, L, S)):

    @SUITE.passes(f"float attn_mask of 0 and -inf {_shape}", _shape)
    def _(shape: tuple[int, ...]) -> None:
        grid = selection(*shape)
        added = torch.zeros(shape, dtype=torch.float64).masked_fill(~grid, -torch.inf)
        wanted = torch_attention(*inputs(), attn_mask=added)
        agree(wanted, *inputs(), bias=added)
        agree(wanted, *inputs(), mask=keep(added == 0))


@SUITE.passes("a bool attn_mask over enable_gqa's query heads")
def _() -> None:
    grid = selection(B, H, L, S)
    wanted = torch_attention(*inputs(3), attn_mask=grid, enable_gqa=True)
    agree(wanted, *inputs(3), mask=keep(grid))


RANK = "an axis that could mean batch or heads, or the number of axes itself, is not guessed"


@SUITE.refuses(
    "bool attn_mask (H, L, S)", RANK, ValueError, r"keep: rank 3, shape \(6, 5, 7\), could be"
)
def _() -> None:
    grid = selection(H, L, S)
    # With its batch axis it means the same.
    agree(torch_attention(*inputs(), attn_mask=grid), *inputs(), mask=keep(grid[None]))
    headwise.attention(*inputs(), keep(grid))


@SUITE.refuses("float attn_mask (H, L, S)", RANK, ValueError, r"bias: rank 3, shape \(6, 5, 7\)")
def _() -> None:
    scores = draw(H, L, S, seed=3)
    agree(torch_attention(*inputs(), attn_mask=scores), *inputs(), bias=scores[None])
    headwise.attention(*inputs(), bias=scores)


@SUITE.passes("attn_mask of one axis: both refuse")
def _() -> None:
    with pytest.raises(IndexError, match="Dimension out of range"):
        torch_attention(*inputs(), attn_mask=selection(S))
    with pytest.raises(ValueError, match=r"keep: wanted \(L, S\) or .* got rank 1, \(7,\)"):
        headwise.attention(*inputs(), keep(selection(S)))


@SUITE.passes("attn_mask of integers: both refuse")
def _() -> None:
    grid = selection(L, S).int()
    with pytest.raises(RuntimeError, match="Expected attn_mask dtype to be bool or float"):
        torch_attention(*inputs(), attn_mask=grid)
    with pytest.raises(TypeError, match=r"keep: wanted a bool tensor, got torch\.int32"):
        headwise.attention(*inputs(), keep(grid))


@SUITE.refuses(
    "a bare tensor as the mask",
    "a raw tensor does not say what True means",
    TypeError,
    r"mask is a Tensor, which does not say what it means; wrap it: keep\(mask\)",
)
def _() -> None:
    headwise.attention(*inputs(), selection(L, S))


@SUITE.passes("float attn_mask of a dtype that is not the query's: both refuse")
def _() -> None:
    scores = draw(L, S, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="Expected attn_mask dtype to be bool or float"):
        torch_attention(*inputs(), attn_mask=scores)
    with pytest.raises(ValueError, match=r"query is torch\.float64 but bias is torch\.float16"):
        headwise.attention(*inputs(), bias=scores)


@SUITE.refuses(
    "a float32 attn_mask on bfloat16 inputs",
    "all tensors of a call have one dtype",
    ValueError,
    "query is torch.bfloat16 but bias is torch.float32; bring them to one dtype",
)
def _() -> None:
    given = [x.bfloat16() for x in inputs()]
    scores = draw(L, S, dtype=torch.float32)
    assert torch_attention(*given, attn_mask=scores).dtype == torch.bfloat16
    headwise.attention(*given, bias=scores)


# --- rows and keys that nobody sees --------------------------------------------------------------


@SUITE.passes("a row with no key in a bool attn_mask", lambda seen: seen)
@SUITE.passes(
    "a row with no key in a float attn_mask",
    lambda seen: torch.zeros(L, S, dtype=torch.float64).masked_fill(~seen, -torch.inf),
)
def _(form) -> None:
    seen = torch.ones(L, S, dtype=torch.bool)
    seen[2] = False
    given = form(seen)
    wanted = torch_attention(*inputs(), attn_mask=given)
    assert not wanted[:, :, 2].any()
    agree(wanted, *inputs(), **({"mask": keep(given)} if given is seen else {"bias": given}))


@SUITE.differs("NaN at a hidden key", "torch's output is NaN wherever a hidden key holds NaN")
def _() -> None:
    query, key, value = inputs()
    seen = torch.ones(L, S, dtype=torch.bool)
    seen[:, -1] = False
    spoiled = key.clone()
    spoiled[:, :, -1] = torch.nan
    assert torch_attention(query, spoiled, value, attn_mask=seen).isnan().all()
    wanted = torch_attention(query, key[:, :, :-1], value[:, :, :-1])
    agree(wanted, query, spoiled, value, mask=keep(seen))


@SUITE.passes("L = 0", {"queries": 0})
@SUITE.passes("S = 0", {"keys": 0})
@SUITE.passes("empty batch", {"batch": 0})
@SUITE.passes("a single key", {"keys": 1})
def _(sizes: dict[str, int]) -> None:
    agree(torch_attention(*inputs(**sizes)), *inputs(**sizes))


# --- layouts and dtypes --------------------------------------------------------------------------

LAYOUT = "the layout is (batch, heads, length, head dimension), nothing is guessed"
for _name, _cut in (("(L, E)", 2), ("(H, L, E)", 1)):

    @SUITE.refuses(f"inputs {_name}", LAYOUT, ValueError, rf"must have 4 axes .* got {4 - _cut}: ")
    def _(cut: int = _cut) -> None:
        given = [x[(0,) * cut] for x in inputs()]
        wanted = torch_attention(*given)
        agree(wanted[(None,) * cut], *(x[(None,) * cut] for x in given))
        headwise.attention(*given)


@SUITE.refuses("inputs (N, …, H, L, E)", LAYOUT, ValueError, "must have 4 axes .* got 5: ")
def _() -> None:
    given = [torch.stack((x, 2 * x, 3 * x)) for x in inputs()]
    agree(torch_attention(*given).flatten(0, 1), *(x.flatten(0, 1) for x in given), terms=200)
    headwise.attention(*given)


@SUITE.refuses(
    "keys of batch 1 under queries of batch 2",
    "batch sizes agree; nothing is repeated in silence",
    ValueError,
    "batch sizes differ: query 2, key 1, value 1",
)
def _() -> None:
    query, key, value = inputs()
    wanted = torch_attention(query, key[:1], value[:1])
    agree(wanted, query, *(x[:1].expand(B, -1, -1, -1) for x in (key, value)))
    headwise.attention(query, key[:1], value[:1])


for _dtype in (torch.float32, torch.float16, torch.bfloat16):

    @SUITE.passes(f"{_dtype} with is_causal".replace("torch.", ""), _dtype)
    def _(dtype: torch.dtype) -> None:
        given = [x.to(dtype) for x in inputs()]
        other = torch_attention(*given, is_causal=True)
        wanted = torch_attention(*(x.double() for x in given), is_causal=True)
        # torch's own rounding is the measure: ours is at most twice that, or one unit.
        unit = torch.finfo(dtype).eps * float(wanted.abs().max())
        allowed = max(unit, 2 * float((other.double() - wanted).abs().max()))
        for backend in (None, *(backend.name for backend in BACKENDS)):
            got = headwise.attention(*given, causal(align="start"), backend=backend)
            assert got.dtype == other.dtype == dtype
            assert float((got.double() - wanted).abs().max()) <= allowed


@SUITE.passes("query and key of different dtypes: both refuse")
def _() -> None:
    query, key, value = inputs()
    with pytest.raises(RuntimeError, match="to have the same dtype"):
        torch_attention(query, key.float(), value)
    with pytest.raises(ValueError, match=r"query is torch\.float64 but key is torch\.float32"):
        headwise.attention(query, key.float(), value)


@SUITE.passes("integer inputs: both refuse", torch.int64, "expected scalar type Float")
@SUITE.passes("complex inputs: both refuse", torch.complex64, "not implemented for 'ComplexFloat'")
def _(dtype: torch.dtype, said: str) -> None:
    given = [x.to(dtype) for x in inputs()]
    with pytest.raises(RuntimeError, match=said):
        torch_attention(*given)
    with pytest.raises(TypeError, match=f"wanted float16, .*, got query {dtype}"):
        headwise.attention(*given)


@SUITE.passes("E = 0")
def _() -> None:
    # Every score is 0, whatever the scale: torch gives each row the mean of the values.
    query, key, value = inputs()
    wanted = torch_attention(query[..., :0], key[..., :0], value)
    assert_near(wanted, value.mean(2, keepdim=True).expand_as(wanted), terms=S)
    agree(wanted, query[..., :0], key[..., :0], value)


@SUITE.refuses(
    "a nested tensor",
    "nested tensors have no (B, H, L, D) shape; pad them and say what is padding",
    TypeError,
    "query is a nested tensor",
)
def _() -> None:
    parts = [draw(4, H, D), draw(6, H, D)]
    ragged = nested(parts, torch.jagged).transpose(1, 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype")
        assert torch_attention(ragged, ragged, ragged).is_nested
    headwise.attention(ragged, ragged, ragged)


@SUITE.passes("query and key of different widths: both refuse")
def _() -> None:
    query, key, value = inputs()
    with pytest.raises(RuntimeError, match="Expected size"):
        torch_attention(query, key[..., :2], value)
    with pytest.raises(ValueError, match="query has head dimension 3, key has 2"):
        headwise.attention(query, key[..., :2], value)


@SUITE.passes("strided inputs, (B, L, H, D) turned")
def _() -> None:
    given = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs()]
    assert not given[0].is_contiguous()
    agree(torch_attention(*given), *given)


# --- scale, dropout, gradients -------------------------------------------------------------------

for _scale in (0.0, -1.0):

    @SUITE.refuses(
        f"scale={_scale}",
        "a scale is a finite number above 0",
        ValueError,
        f"scale must be a finite number above 0, got {_scale}",
    )
    def _(scale: float = _scale) -> None:
        assert torch_attention(*inputs(), scale=scale).isfinite().all()
        headwise.attention(*inputs(), scale=scale)


@SUITE.refuses(
    "dropout_p=1", "dropout lies in [0, 1)", ValueError, r"dropout must lie in \[0, 1\), got 1.0"
)
def _() -> None:
    assert not torch_attention(*inputs(), dropout_p=1.0).any()
    headwise.attention(*inputs(), dropout=1.0)


@SUITE.passes("dropout_p keeps the mean and is drawn from torch's generator")
def _() -> None:
    query, key, value = (x.expand(4000, -1, -1, -1) for x in inputs(batch=1))
    wanted = torch_attention(query[:1], key[:1], value[:1])
    for attend in (
        lambda: torch_attention(query, key, value, dropout_p=0.25),
        lambda: headwise.attention(query, key, value, dropout=0.25),
    ):
        torch.manual_seed(0)
        got = attend()
        torch.manual_seed(0)
        assert torch.equal(attend(), got)
        # Five standard errors of the mean, for each of the 90 numbers.
        error = got.std(0, keepdim=True) / len(got) ** 0.5
        assert (error > 0).all()
        assert ((got.mean(0, keepdim=True) - wanted).abs() < 5 * error).all()


@SUITE.passes("gradients, is_causal", {"is_causal": True}, {"mask": causal(align="start")})
@SUITE.passes(
    "gradients, bool attn_mask",
    {"attn_mask": selection(B, 1, L, S)},
    {"mask": keep(selection(B, 1, L, S))},
)
@SUITE.passes("gradients, enable_gqa", {"enable_gqa": True}, {})
def _(theirs: dict, ours: dict) -> None:
    given = inputs(2 if "enable_gqa" in theirs else H)
    grads = []
    for attend, options in ((torch_attention, theirs), (headwise.attention, ours)):
        leaves = [x.clone().requires_grad_() for x in given]
        attend(*leaves, **options).square().sum().backward()
        grads.append([x.grad for x in leaves])
    for got, wanted in zip(grads[1], grads[0], strict=True):
        assert_near(got, wanted, terms=100)


@SUITE.passes("gradient of a float attn_mask")
def _() -> None:
    grads = []
    for attend, name in ((torch_attention, "attn_mask"), (headwise.attention, "bias")):
        scores = draw(1, H, 1, S, seed=3).requires_grad_()
        attend(*inputs(), **{name: scores}).square().sum().backward()
        grads.append(scores.grad)
    assert_near(grads[1], grads[0], terms=100)


@pytest.mark.parametrize("case", parameters(SUITE))
def test_case(case):
    case.run()
