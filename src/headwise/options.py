"""What a layer is told beside its sizes: its options, its context, and whether the sizes fit."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from headwise.intervals import Mask
from headwise.masks import window


@dataclass(frozen=True)
class AttentionOptions:
    """What some layers do beside plain attention; the default is none of it.

    scale           factor on the dot products; None: 1/sqrt(head_dim). T5 uses 1.0
    softcap         c: scores become c * tanh(score / c) (Gemma 2, arXiv 2408.00118, section 2)
    sinks           a learned logit per head joins the softmax denominator and carries no value
                    (Xiao et al. 2023, arXiv 2309.17453, "attention sinks"; gpt-oss)
    window          n: a query sees the last n keys, its own among them, and none after it;
                    (left, right): that many keys on each side. Joined to every mask given
    qk_norm         a learned RMS norm over head_dim on queries and keys, before rotary
                    (Henry et al. 2020, arXiv 2010.04245; RMS form as in Qwen3). qk_norm_eps its eps
    output_gate     head outputs times sigmoid(gate_proj(x)), before out_proj
                    (Qiu et al. 2025, arXiv 2505.06708, variant G1)
    value_head_dim  width of a head's values; None: head_dim
    out_bias        whether out_proj has a bias; None: as the layer's `bias`
    """

    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    window: int | tuple[int, int] | None = None
    qk_norm: bool = False
    qk_norm_eps: float = 1e-6
    output_gate: bool = False
    value_head_dim: int | None = None
    out_bias: bool | None = None

    def __post_init__(self) -> None:
        for name, number in (("scale", self.scale), ("softcap", self.softcap)):
            if number is not None and not (number > 0 and math.isfinite(number)):
                raise ValueError(
                    f"AttentionOptions: {name}={number} must be a finite number above 0; "
                    "leave it out " + ("for 1/sqrt(head_dim)" if name == "scale" else "for no cap")
                )
        if self.value_head_dim is not None and self.value_head_dim < 1:
            raise ValueError(
                f"AttentionOptions: value_head_dim={self.value_head_dim} must be at least 1"
            )
        self.window_mask()  # a size below 1 or a negative side fails here

    def window_mask(self) -> Mask | None:
        """The mask that `window` stands for."""
        if self.window is None:
            return None
        if isinstance(self.window, tuple):
            return window(left=self.window[0], right=self.window[1])
        return window(self.window)

    @property
    def reach(self) -> int | None:
        """How many keys back a query sees, its own among them. None: unlimited, or not causal."""
        if isinstance(self.window, tuple):
            return self.window[0] + 1 if self.window[1] == 0 else None
        return self.window


@dataclass(frozen=True, eq=False)
class ProjectedContext:
    """The keys (B, Hkv, S, D) and values (B, Hkv, S, Dv) of a context, ready for many queries."""

    key: Tensor
    value: Tensor


#: What cross-attention reads: one tensor, a (key context, value context) pair, or both projected.
Context = Tensor | tuple[Tensor, Tensor] | ProjectedContext


def check_heads(embed_dim: int, num_heads: int, num_kv_heads: int, head_dim: int | None) -> None:
    """ValueError unless the head counts and widths of a layer fit together."""
    sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    for name, size in (*sizes.items(), ("head_dim", head_dim)):
        if size is not None and size < 1:
            raise ValueError(f"MultiHeadAttention: {name}={size} must be at least 1")
    if head_dim is None and embed_dim % num_heads:
        raise ValueError(
            f"MultiHeadAttention: num_heads={num_heads} does not divide embed_dim={embed_dim}; "
            "pass "
            f"head_dim= to choose it freely, or num_heads={_nearest_divisor(embed_dim, num_heads)}"
        )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"MultiHeadAttention: num_kv_heads={num_kv_heads} does not divide "
            f"num_heads={num_heads}, "
            "so query heads cannot share key/value heads evenly; "
            f"num_kv_heads={_nearest_divisor(num_heads, num_kv_heads)} would do"
        )


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = (d for d in range(1, number + 1) if number % d == 0)
    return min(divisors, key=lambda d: abs(d - wanted))
