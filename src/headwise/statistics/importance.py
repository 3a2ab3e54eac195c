"""How much the loss leans on each head, by one backward pass (Michel et al. 2019, arXiv
1905.10650, equation 2): I_h = mean over examples of |Σ_i ⟨O_i^h, ∂L/∂O_i^h⟩|.

O^h is what head h hands to the output projection, so a hook at that projection's input reads it
whatever computes the attention: any backend, fused or not. Memory is that of one backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import BadInput


@dataclass(frozen=True, eq=False)
class Projection:
    """An output projection, called as a module on (B, L, heads · Dv), and its head counts."""

    module: nn.Module
    heads: int
    kv_heads: int


@dataclass(frozen=True, eq=False)
class Importance:
    """heads {layer: (H,)} and groups {layer: (Hkv,)}, float64 on the CPU, ℓ2-normalised per layer
    (`raw_heads`, `raw_groups`: before that, in units of the loss). A group's terms are summed with
    their signs before the magnitude is taken. examples: how many the mean is over."""

    heads: dict[str, Tensor]
    groups: dict[str, Tensor]
    raw_heads: dict[str, Tensor]
    raw_groups: dict[str, Tensor]
    examples: int


def head_importance(
    model: nn.Module,
    projections: Mapping[str, Projection],
    batches: Iterable[Any],
    loss: Callable[[nn.Module, Any], Tensor],
) -> Importance:
    """Importance of every head of `projections` over `batches`.

    loss(model, batch) gives the losses of the batch's examples, (B,), where B is the first axis of
    the projections' inputs; or a number, for batches of one example. Parameters gather no gradient.

    Raises:
        BadInput: no batch, a loss that is not finite or of another shape, a projection not called.
    """
    sums_h = {n: torch.zeros(p.heads, dtype=torch.float64) for n, p in projections.items()}
    sums_g = {n: torch.zeros(p.kv_heads, dtype=torch.float64) for n, p in projections.items()}
    signed: dict[str, Tensor] = {}
    count = 0

    def listen(name: str, heads: int) -> Callable[..., Any]:
        def before(_module: nn.Module, args: tuple[Any, ...]) -> Any:
            x = args[0]
            if not x.requires_grad:
                # The first projection of a frozen model: gradients begin here.
                x = x.detach().requires_grad_()

            def read(grad: Tensor) -> None:
                part = (x.detach().double() * grad.double()).reshape(
                    len(x), -1, heads, x.shape[-1] // heads
                )
                own = part.sum((1, 3)).cpu()
                # A module that is called more than once (shared layers) sums before the magnitude.
                signed[name] = signed[name] + own if name in signed else own

            x.register_hook(read)
            return (x, *args[1:])

        return before

    hooks = [
        p.module.register_forward_pre_hook(listen(name, p.heads)) for name, p in projections.items()
    ]
    asked = [p for p in model.parameters() if p.requires_grad]
    try:
        for p in asked:
            p.requires_grad_(False)
        for batch in batches:
            signed.clear()
            with torch.enable_grad():
                losses = loss(model, batch)
                if losses.dim() > 1 or not bool(torch.isfinite(losses).all()):
                    raise BadInput(
                        "importance: the loss must be finite numbers, one an example; got shape "
                        f"{tuple(losses.shape)}"
                    )
                losses.sum().backward()
            examples = losses.numel()
            for name, projection in projections.items():
                if name not in signed or len(signed[name]) != examples:
                    got = f"{len(signed[name])} examples" if name in signed else "no gradient"
                    raise BadInput(
                        f"importance: {name} got {got}, the loss has {examples}; the loss must "
                        "depend on every layer and keep examples on the first axis"
                    )
                sums_h[name] += signed[name].abs().sum(0)
                sums_g[name] += (
                    signed[name].unflatten(1, (projection.kv_heads, -1)).sum(2).abs().sum(0)
                )
            count += examples
    finally:
        for hook in hooks:
            hook.remove()
        for p in asked:
            p.requires_grad_(True)
    if count == 0:
        raise BadInput("importance: no examples were given")
    raw_h = {n: v / count for n, v in sums_h.items()}
    raw_g = {n: v / count for n, v in sums_g.items()}
    return Importance(_unit(raw_h), _unit(raw_g), raw_h, raw_g, count)


def _unit(raw: dict[str, Tensor]) -> dict[str, Tensor]:
    # A layer on which the loss does not depend at all stays 0.
    return {n: v / v.norm() if float(v.norm()) > 0 else v for n, v in raw.items()}
