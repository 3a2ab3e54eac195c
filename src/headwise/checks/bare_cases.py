"""One case for a bare attention function or layer: how it is called, and what the definition says.

`Bare` calls the thing as its signature says. `projected`, `call_of` and `joined` are the eight
steps around `headwise.reference.attention_steps`, so that a known fault changes one of them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.call import AttentionCall
from headwise.checks.finding import NotRunnable
from headwise.checks.signature import MaskKind, Signature
from headwise.errors import HeadwiseError
from headwise.masks import Mask, causal, everything, keep, window
from headwise.masks import padding as real_keys
from headwise.reference import attention_steps, merge_heads, split_heads

Split = Callable[[Tensor, int], Tensor]


class WrongOutput(HeadwiseError):
    """What came back is no tensor, or has another shape than the signature declares."""


@dataclass(frozen=True, eq=False)
class Case:
    """Inputs and features of one call, everything float64 and batch first.

    query, key, value   (B, H, L, D), (B, Hkv, S, D), (B, Hkv, S, Dv) of a function; (B, L, E) and
                        twice (B, S, E) of a layer. `own`: all three are one tensor (layers)
    visible   what the mask argument must say: bool (B, H, L, S), axes full or 1; `axes` its shape
    real      what the padding argument must say: bool (B, S)
    causal    whether causality is declared for this call
    strided   tensors are handed over as transposed and sliced views
    """

    query: Tensor
    key: Tensor
    value: Tensor
    own: bool = False
    visible: Tensor | None = None
    axes: str = "bhls"
    real: Tensor | None = None
    causal: bool = False
    window: int | None = None
    scale: float | None = None
    bias: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    strided: bool = False
    name: str = ""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(batch, queries, keys)."""
        return self.query.shape[0], self.query.shape[-2], self.key.shape[-2]

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)


class Bare:
    """The function or layer under test, in each dtype, in eval."""

    def __init__(self, fn: Callable[..., Any], signature: Signature) -> None:
        self.fn, self.signature = fn, signature
        self._at: dict[torch.dtype, Callable[..., Any]] = {}
        self._exact: dict[torch.dtype, nn.Module] = {}
        self.dtype = torch.float64  # what the checks run in; `for_attention` may lower it

    def at(self, dtype: torch.dtype) -> Callable[..., Any]:
        """The thing in `dtype`: of a module a copy on the CPU, never the caller's own."""
        if not isinstance(self.fn, nn.Module):
            return self.fn
        if dtype not in self._at:
            self._at[dtype] = copy.deepcopy(self.fn).to("cpu", dtype).eval()
        return self._at[dtype]

    def exact(self, dtype: torch.dtype) -> Any:
        """The module whose weights are those of `dtype`, held in float64."""
        module = self.at(dtype)
        if not isinstance(module, nn.Module):
            return module
        if dtype not in self._exact:
            self._exact[dtype] = copy.deepcopy(module).double()
        return self._exact[dtype]

    def call(self, case: Case, dtype: torch.dtype | None = None, grad: bool = False) -> Tensor:
        """The output (B, H, L, Dv) or (B, L, E), batch first, of one call.

        Raises:
            WrongOutput: the output is no tensor, or has another shape than was declared.
            Exception: whatever the thing itself raises.
        """
        dtype = self.dtype if dtype is None else dtype
        tensors = [self._hand(x, dtype, case.strided) for x in (case.query, case.key, case.value)]
        keywords = self._keywords(case, dtype)
        if self.signature.is_function or self.signature.inputs == "qkv":
            given = [tensors[0]] * 3 if case.own else tensors
        else:
            given = tensors[:1] if case.own else tensors[:2]
        with torch.set_grad_enabled(grad):
            output = self._take(self.at(dtype)(*given, **keywords), case)
        return self.forgiven(output, case)

    def forgiven(self, output: Tensor, case: Case) -> Tensor:
        """NaN in the rows without a key where the signature declares that they are no zeros."""
        if self.signature.empty_rows == "zeros":
            return output
        empty = ~self.declared(case).any(-1, keepdim=True)
        if not self.signature.is_function:
            empty = empty.any(1)
        return output.masked_fill(empty, torch.nan) if bool(empty.any()) else output

    def declared(self, case: Case) -> Tensor:
        """The declared mask as a bool grid (B, H, L, S)."""
        batch, queries, keys = case.sizes
        return visible_of(self, case).dense(queries, keys, batch=batch, heads=self.heads(case))

    def _hand(self, x: Tensor, dtype: torch.dtype, strided: bool) -> Tensor:
        x = x.to(dtype)
        if self.signature.layout in ("blhd", "lbe"):
            x = x.transpose(1, 2) if x.dim() == 4 else x.transpose(0, 1)
            x = x if x.requires_grad else x.contiguous()
        if strided:
            # Every other number of a transposed block: no axis is where a lazy kernel expects it.
            turned = x.transpose(-3, -2)
            wide = torch.stack((turned, torch.full_like(turned, 7.0)), dim=-1)
            x = wide[..., 0].transpose(-3, -2)
        return x

    def _take(self, output: Any, case: Case) -> Tensor:
        if isinstance(output, tuple | list) and output:
            output = output[0]
        if not isinstance(output, Tensor):
            raise WrongOutput(f"wanted a tensor back, got {type(output).__name__}")
        batch, queries, _ = case.sizes
        shape: tuple[int, ...] = (batch, queries, self.signature.features)
        if self.signature.is_function:
            shape = (batch, case.query.shape[1], queries, case.value.shape[-1])
        turned = output
        if self.signature.layout == "blhd" and output.dim() == 4:
            turned = output.transpose(1, 2)
        elif self.signature.layout == "lbe" and output.dim() == 3:
            turned = output.transpose(0, 1)
        if turned.shape[:-1] != shape[:-1] or (
            self.signature.is_function and turned.shape != shape
        ):
            raise WrongOutput(
                f"wanted an output of {shape} (batch first), got {tuple(turned.shape)}; is layout="
                f"{self.signature.layout!r} right?"
            )
        return turned

    def _keywords(self, case: Case, dtype: torch.dtype) -> dict[str, Any]:
        signature, batch = self.signature, case.sizes[0]
        given: dict[str, Any] = {}
        if case.visible is not None:
            given["mask"] = mask_argument(
                case.visible, case.axes, signature.mask, dtype, (batch, self.heads(case))
            )
        if case.real is not None:
            given["padding"] = _worded(case.real, signature.padding, dtype)
        if case.causal and "causal" in signature.arguments:
            given["causal"] = True
        for name in ("window", "scale", "softcap"):
            if getattr(case, name) is not None:
                given[name] = getattr(case, name)
        for name in ("bias", "sinks"):
            if getattr(case, name) is not None:
                given[name] = getattr(case, name).to(dtype)
        if "grouped" in signature.arguments and case.query.dim() == 4:
            given["grouped"] = case.query.shape[1] != case.key.shape[1]
        return {signature.arguments[name]: value for name, value in given.items()} | dict(
            signature.options
        )

    def heads(self, case: Case) -> int:
        return case.query.shape[1] if self.signature.is_function else self.signature.heads


def mask_argument(
    visible: Tensor,
    axes: str,
    kind: MaskKind | None,
    dtype: torch.dtype,
    sizes: tuple[int, int],
) -> Any:
    """A (B, H, L, S) visibility in the shape and words that the signature takes."""
    if kind == "headwise":
        return keep(visible[0, 0] if axes == "ls" else visible)
    if axes == "ls":
        visible = visible[0, 0]
    elif axes == "bls":
        visible = visible[:, 0]
    elif axes == "(bh)ls":
        visible = visible.expand(*sizes, *visible.shape[2:]).flatten(0, 1)
    return _worded(visible, kind, dtype)


def _worded(visible: Tensor, kind: MaskKind | None, dtype: torch.dtype) -> Any:
    if kind == "headwise":
        return real_keys(visible)
    if kind == "additive":
        return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, -math.inf)
    if kind == "keep01":
        return visible.to(dtype)
    return ~visible if kind == "hide" else visible


# --- the definition, in steps --------------------------------------------------------------------


def projected(
    bare: Bare,
    case: Case,
    dtype: torch.dtype,
    *,
    split: Split = split_heads,
    order: str | None = None,
    interleaved: bool | None = None,
    rotate: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Steps 1 and 2 in float64: queries, keys and values by head; rounded inputs as `dtype` is."""
    query, key, value = (x.to(dtype).double() for x in (case.query, case.key, case.value))
    signature = bare.signature
    if signature.is_function:
        return query, key, value
    where = signature.projections
    if where is None:
        raise NotRunnable(
            "the signature names no projections, so the definition does not know the layer's "
            "weights; pass projections=Projections(...)"
        )
    module = bare.exact(dtype)
    with torch.no_grad():
        if where.fused is not None:
            order = where.order if order is None else order
            sizes = [signature.heads if name == "q" else signature.kv for name in order]
            cuts = [count * signature.head_dim for count in sizes]
            parts = [
                dict(zip(order, _linear(module, where.fused, x).split(cuts, -1), strict=True))
                for x in (query, key, value)
            ]
            query, key, value = parts[0]["q"], parts[1]["k"], parts[2]["v"]
        else:
            names = (where.query, where.key, where.value)
            query, key, value = (
                _linear(module, str(name), x)
                for name, x in zip(names, (query, key, value), strict=True)
            )
        query = split(query, signature.heads)
        key, value = split(key, signature.kv), split(value, signature.kv)
        if where.query_norm is not None:
            query = module.get_submodule(where.query_norm)(query)
        if where.key_norm is not None:
            key = module.get_submodule(where.key_norm)(key)
    if where.rotary is not None and rotate:
        rotary = where.rotary
        if interleaved is not None:
            rotary = replace(rotary, interleaved=interleaved)
        query, key = (rotary.rotate(x, torch.arange(x.shape[2])) for x in (query, key))
    return query, key, value


def _linear(module: nn.Module, name: str, x: Tensor) -> Tensor:
    parameters = dict(module.named_parameters())
    if f"{name}_weight" in parameters:
        weight, bias = parameters[f"{name}_weight"], parameters.get(f"{name}_bias")
        return nn.functional.linear(x, weight, bias)
    output: Tensor = module.get_submodule(name)(x)
    return output


def visible_of(
    bare: Bare,
    case: Case,
    *,
    align: str | None = None,
    extra: int = 0,
    grid: Tensor | None = None,
    real: Tensor | None = None,
    is_causal: bool | None = None,
) -> Mask:
    """The declared mask of a case, all its parts joined; keywords replace one part by another."""
    signature = bare.signature
    align = signature.causal if align is None else align
    width = signature.window if case.window is None else case.window
    mask = everything()
    if case.causal if is_causal is None else is_causal:
        mask = mask & causal(align="start" if align == "start" else "end")
        if width is not None:
            mask = mask & window(width + extra, align="start" if align == "start" else "end")
    grid = case.visible if grid is None else grid
    if grid is not None:
        mask = mask & keep(grid)
    real = case.real if real is None else real
    return mask if real is None else mask & real_keys(real)


def call_of(
    bare: Bare, case: Case, dtype: torch.dtype, parts: tuple[Tensor, Tensor, Tensor]
) -> AttentionCall:
    """Steps 3 to 7 as the signature and the case declare them."""
    signature = bare.signature
    where, sinks = signature.projections, case.sinks
    if where is not None and where.sinks is not None:
        sinks = dict(bare.exact(dtype).named_parameters())[where.sinks].detach()
    return AttentionCall(
        *parts,
        visible_of(bare, case),
        None if case.bias is None else case.bias.to(dtype).double(),
        signature.scale if case.scale is None else case.scale,
        signature.softcap if case.softcap is None else case.softcap,
        None if sinks is None else sinks.to(dtype).double(),
    )


def joined(
    bare: Bare, heads: Tensor, dtype: torch.dtype, merge: Callable[[Tensor], Tensor] = merge_heads
) -> Tensor:
    """Step 8: heads side by side and projected; a function's heads as they are."""
    where = bare.signature.projections
    if where is None:
        return heads
    output = merge(heads)
    if where.output is None:
        return output
    module = bare.exact(dtype)
    with torch.no_grad():
        if f"{where.output}_weight" not in dict(module.named_parameters()):
            output = module.get_submodule(where.output)(output)
        else:
            output = _linear(module, where.output, output)
    return output


def definition(bare: Bare, case: Case, dtype: torch.dtype) -> tuple[Tensor, AttentionCall]:
    """The right output of a case in float64, for inputs and weights rounded to `dtype`."""
    call = call_of(bare, case, dtype, projected(bare, case, dtype))
    output = joined(bare, attention_steps(call)["output"], dtype)
    return bare.forgiven(output, case), call


def bound(call: AttentionCall, wanted: Tensor, dtype: torch.dtype, layer_terms: int = 1) -> float:
    """How far an output computed in `dtype` may be from the definition.

    A score is a sum of D products of results up to s: off by about eps·√D·s, and so is its weight,
    relatively. The sum over S keys adds eps·√S, and a layer's projections eps·√E; all of it times
    the largest value. The exponential turns an error of the score into one of the weight.
    """
    steps = attention_steps(call)
    seen = steps["masked"][steps["masked"].isfinite()]
    top = float(seen.abs().max()) if seen.numel() else 0.0
    size = max(float(call.value.abs().max()), float(wanted.nan_to_num().abs().max()))
    terms = math.sqrt(max(call.head_dim, call.key_length, layer_terms))
    return torch.finfo(dtype).eps * terms * (2 + top) * size
