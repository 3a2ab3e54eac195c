"""MultiHeadAttention: the eight steps as a layer.

It projects, puts tokens at their positions and builds the call; `headwise.attention` computes it.
It never picks a kernel, and nothing is causal unless a mask says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from headwise.arguments import Cache, check_arguments, check_parts, context_pair
from headwise.cache import KVCache, RollingKVCache
from headwise.call import AttentionCall
from headwise.int8_cache import QuantizedKVCache, attend, plain
from headwise.intervals import Mask
from headwise.masks import padding
from headwise.options import AttentionOptions, Context, ProjectedContext, check_heads
from headwise.positions import (
    ALiBi,
    Position,
    Rotary,
    count_positions,
    real_tokens,
    require_causal,
)
from headwise.quantized import Held
from headwise.reference import merge_heads, split_heads
from headwise.trace import Trace, attention_weights, trace_layer

Note = Callable[[str, Tensor], None]


class MultiHeadAttention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, arXiv 1706.03762, section 3.2.2), batch first.

    Args:
        embed_dim: features E of a token, in and out.
        num_heads: query heads Hq.
        num_kv_heads: key/value heads Hkv. None: Hq (multi-head); fewer: grouped-query attention
            (Ainslie et al. 2023, arXiv 2305.13245); 1: multi-query (Shazeer 2019, 1911.02150).
            Query head h reads key/value head h // (Hq / Hkv).
        head_dim: features D of a head; None: embed_dim / num_heads.
        kdim, vdim: features of the tokens that keys and values are made of; None: embed_dim.
        bias: whether the projections have one.
        dropout: share of attention weights dropped while training; never in eval.
        position: Rotary(...), ALiBi(...), RelativeBias(...), or None: no notion of order.
        options: AttentionOptions(...).

    The projections q_proj, k_proj, v_proj, out_proj (and gate_proj) are `nn.Linear`s that are
    called as modules: hooks, adapters and quantised replacements work.

    Raises:
        ValueError: head counts or widths that do not fit, with the numbers.
        TypeError: a position or options of another class.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        position: Position | None = None,
        options: AttentionOptions | None = None,
    ) -> None:
        super().__init__()
        options = AttentionOptions() if options is None else options
        check_parts(num_heads, position, options)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_heads(embed_dim, num_heads, num_kv_heads, head_dim)
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"MultiHeadAttention: dropout={dropout} must lie in [0, 1)")
        head_dim = embed_dim // num_heads if head_dim is None else head_dim
        value_dim = options.value_head_dim or head_dim
        out_bias = bias if options.out_bias is None else options.out_bias
        self.embed_dim, self.head_dim, self.value_head_dim = embed_dim, head_dim, value_dim
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.dropout, self.options, self.position = dropout, options, position

        self.q_proj = nn.Linear(embed_dim, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(self.kdim, num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(self.vdim, num_kv_heads * value_dim, bias=bias)
        self.out_proj = nn.Linear(num_heads * value_dim, embed_dim, bias=out_bias)
        norm, gate = options.qk_norm, options.output_gate
        self.q_norm = nn.RMSNorm(head_dim, eps=options.qk_norm_eps) if norm else None
        self.k_norm = nn.RMSNorm(head_dim, eps=options.qk_norm_eps) if norm else None
        self.gate_proj = nn.Linear(embed_dim, num_heads * value_dim, bias=bias) if gate else None
        self.sinks = nn.Parameter(torch.empty(num_heads)) if options.sinks else None

        # What would fail only at the first call fails here.
        if isinstance(position, Rotary):
            position.rotated(head_dim)
        if isinstance(position, ALiBi) and position.form == "key" and options.sinks:
            raise ValueError(
                "MultiHeadAttention: ALiBi(form='key') moves whole rows of scores, which a sink "
                "logit notices; use ALiBi() with sinks"
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform projections to query, key and value, zero biases and sinks."""
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.xavier_uniform_(projection.weight)
        self.out_proj.reset_parameters()
        if self.gate_proj is not None:
            self.gate_proj.reset_parameters()
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.out_proj, self.gate_proj):
            if linear is not None and linear.bias is not None:
                nn.init.zeros_(linear.bias)
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    @overload
    def forward(
        self,
        x: Tensor,
        context: Context | None = ...,
        *,
        mask: Mask | None = ...,
        cache: Cache | None = ...,
        positions: Tensor | None = ...,
        need_weights: Literal[False] = ...,
        average_weights: bool = ...,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        x: Tensor,
        context: Context | None = ...,
        *,
        mask: Mask | None = ...,
        cache: Cache | None = ...,
        positions: Tensor | None = ...,
        need_weights: Literal[True],
        average_weights: bool = ...,
    ) -> tuple[Tensor, Tensor]: ...

    def forward(
        self,
        x: Tensor,
        context: Context | None = None,
        *,
        mask: Mask | None = None,
        cache: Cache | None = None,
        positions: Tensor | None = None,
        need_weights: bool = False,
        average_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from x to itself, or to `context`.

        Args:
            x: (B, L, embed_dim).
            context: None: self-attention. (B, S, kdim), where kdim = vdim; a pair
                (key context (B, S, kdim), value context (B, S, vdim)); or what `project_context`
                returned.
            mask: a headwise mask over (L, S); None hides nothing, and is not causal. With a cache S
                counts the cached keys too: `causal()` stands right, the last query at the last key.
                `padding(real)` in it (joined by &) also sets positions: real tokens are counted.
            cache: the tokens seen so far; the new ones are added to it. Tokens once marked as
                padding stay hidden, so later calls need no padding mask.
            positions: int (L,) or (B, L), in place of counting, for Rotary, ALiBi, RelativeBias.
            need_weights: also return the weights, (B, Hq, L, S), before dropout, one map a head.
            average_weights: with need_weights, their mean over heads, (B, L, S).

        Returns:
            (B, L, embed_dim), and the weights where asked for. A query that sees no key gets
            out_proj of zeros, and weights 0.

        Raises:
            TypeError: a raw tensor as mask. ValueError: shapes that do not fit, with the numbers;
            a cache that is full, or that keeps less than the layer looks back.
        """
        if average_weights and not need_weights:
            raise ValueError("MultiHeadAttention: average_weights=True needs need_weights=True")
        parts = self.parts(x, context, mask, cache, positions, _ignore)
        heads = attend(parts, self.dropout if self.training else 0.0)
        output = self.join(x, heads, _ignore)
        if not need_weights:
            return output
        weights = attention_weights(AttentionCall(**plain(parts))).to(output.dtype)
        return output, weights.mean(1) if average_weights else weights

    def project_context(self, context: Tensor | tuple[Tensor, Tensor]) -> ProjectedContext:
        """Keys and values of a context, once for all steps of a decoder's cross-attention."""
        key, value = self._project(*context_pair(self, context), _ignore)
        return ProjectedContext(key, value)

    def make_cache(
        self,
        batch: int,
        capacity: int | None = None,
        *,
        quantized: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Cache:
        """A cache that fits this layer: rolling where it has a window and no `capacity` is given.

        quantized: keys and values as int8 (`QuantizedKVCache`); needs `capacity`.
        dtype, device: of the keys as k_proj gives them; None: those of its weight.
        """
        dtype = self.k_proj.weight.dtype if dtype is None else dtype
        device = self.k_proj.weight.device if device is None else device
        heads, key, value = self.num_kv_heads, self.head_dim, self.value_head_dim
        if quantized:
            if capacity is None:
                raise ValueError(
                    "MultiHeadAttention.make_cache: quantized=True needs capacity=, the most "
                    "tokens it must hold"
                )
            return QuantizedKVCache(batch, heads, capacity, key, value, dtype=dtype, device=device)
        if capacity is not None:
            return KVCache(batch, heads, capacity, key, value, dtype=dtype, device=device)
        if self.options.reach is None:
            raise ValueError(
                "MultiHeadAttention.make_cache: pass capacity=, the most tokens it must hold; only "
                "a layer with options.window can do without"
            )
        reach = self.options.reach
        return RollingKVCache(batch, heads, reach, key, value, dtype=dtype, device=device)

    def trace(
        self,
        x: Tensor,
        context: Context | None = None,
        *,
        mask: Mask | None = None,
        positions: Tensor | None = None,
    ) -> Trace:
        """Every intermediate of the eight steps, computed by the float64 definition, in eval.

        The arguments are those of `forward`. A float64 copy of this layer does the work, so neither
        it nor any cache changes; memory grows with L * S. `print(layer.trace(x))` shows a table.
        """
        return trace_layer(self, x, context, mask, positions)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> MultiHeadAttention:
        """The same layer with copies of the weights of an `nn.MultiheadAttention`.

        Outputs are equal; weights come per head (torch averages them by default). This layer is
        batch first whatever `module.batch_first` was: for a module that took (L, B, E), pass
        x.transpose(0, 1). dtype, device, training flag and requires_grad are kept.

        Raises:
            TypeError: another class.
            ValueError: the module has add_bias_kv or add_zero_attn, keys that this layer lacks.
        """
        if not isinstance(module, nn.MultiheadAttention):
            raise TypeError(
                "MultiHeadAttention.from_torch: wanted a torch.nn.MultiheadAttention, got "
                f"{type(module).__name__}"
            )
        for name, present in (
            ("add_bias_kv=True", module.bias_k is not None or module.bias_v is not None),
            ("add_zero_attn=True", module.add_zero_attn),
        ):
            if present:
                raise ValueError(
                    f"MultiHeadAttention.from_torch: the module was built with {name}, an extra "
                    "key that every query sees; this layer has none (sinks are the nearest option)"
                )
        layer = cls(
            module.embed_dim,
            module.num_heads,
            kdim=module.kdim,
            vdim=module.vdim,
            bias=module.in_proj_bias is not None,
            dropout=module.dropout,
            options=AttentionOptions(out_bias=module.out_proj.bias is not None),
        ).to(module.out_proj.weight)
        fused, bias = module.in_proj_weight, module.in_proj_bias
        separate = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        for index, linear in enumerate((layer.q_proj, layer.k_proj, layer.v_proj)):
            # The fused weight's rows are queries, keys, values, a third each; so is the bias.
            _copy(
                linear.weight, separate[index] if fused is None else fused, index, fused is not None
            )
            _copy(linear.bias, bias, index, True)
        _copy(layer.out_proj.weight, module.out_proj.weight, 0, False)
        _copy(layer.out_proj.bias, module.out_proj.bias, 0, False)
        return layer.train(module.training)

    @classmethod
    def from_hf(cls, module: nn.Module, *, position: Position | None = None) -> MultiHeadAttention:
        """The same layer from a Hugging Face attention module, or a fused one as in timm.

        See `headwise.surgery.from_hf` for the families, and the errors raised.
        """
        from headwise.surgery import from_hf

        return from_hf(module, position=position)

    def parts(
        self,
        x: Tensor,
        context: Context | None,
        mask: Mask | None,
        cache: Cache | None,
        positions: Tensor | None,
        note: Note,
    ) -> dict[str, Any]:
        """Steps 1 and 2, and everything else that the call is made of: `AttentionCall(**parts)`."""
        check_arguments(self, x, context, mask, cache, positions)
        note("x", x)
        projected = self.q_proj(x)
        note("query_projected", projected)
        query = split_heads(projected, self.num_heads)
        note("query", query)
        if self.q_norm is not None:
            query = _normed(self.q_norm, query)
            note("query_normed", query)
        if isinstance(context, ProjectedContext):
            key, value = context.key, context.value
            note("key", key)
            note("value", value)
        else:
            key, value = self._project(*context_pair(self, x if context is None else context), note)
        bias = None
        keys: Tensor | Held = key
        values: Tensor | Held = value
        if context is None:
            query, keys, values, mask, bias = self._place(
                query, key, value, mask, cache, positions, note
            )
        options = self.options
        return {
            "query": query,
            "key": keys,
            "value": values,
            "mask": mask,
            "bias": bias,
            "scale": options.scale,
            "softcap": options.softcap,
            "sinks": None if self.sinks is None else self.sinks.to(query.dtype),
        }

    def _project(self, keys: Tensor, values: Tensor, note: Note) -> tuple[Tensor, Tensor]:
        note("key_context", keys)
        note("value_context", values)
        projected = self.k_proj(keys), self.v_proj(values)
        note("key_projected", projected[0])
        note("value_projected", projected[1])
        key, value = (split_heads(x, self.num_kv_heads) for x in projected)
        note("key", key)
        note("value", value)
        if self.k_norm is not None:
            key = _normed(self.k_norm, key)
            note("key_normed", key)
        return key, value

    def _place(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask | None,
        cache: Cache | None,
        positions: Tensor | None,
        note: Note,
    ) -> tuple[Tensor, Tensor | Held, Tensor | Held, Mask | None, Tensor | None]:
        """Self-attention: positions of the tokens, their effect, the cache, and the final mask.

        Keys and values of one token upon a quantised cache are what that cache holds.
        """
        batch, _, length, _ = query.shape
        own = self.options.window_mask()
        if own is not None:
            mask = own if mask is None else own & mask
        keys = length if cache is None else cache.visible_after(length)
        real = real_tokens(mask, batch, keys)
        real = None if real is None else real[:, keys - length :].to(query.device)
        if cache is not None and mask is not None:
            # Here, so that a mask that does not fit fails before the cache has changed.
            mask = mask.compile(
                batch=batch, heads=self.num_heads, queries=length, keys=keys, device=query.device
            )
        if positions is None and cache is not None:
            positions = cache.next_positions(length, real)
        elif positions is None and real is not None:
            positions = count_positions(real)
        elif positions is None:
            positions = torch.arange(length, device=query.device)
        if isinstance(self.position, Rotary):
            table = self.position.table(positions, self.head_dim, query.dtype)
            query, key = self.position.turn(query, *table), self.position.turn(key, *table)
            note("query_turned", query)
            note("key_turned", key)
        key_positions = positions
        keys_held: Tensor | Held = key
        values_held: Tensor | Held = value
        if cache is not None:
            if isinstance(cache, QuantizedKVCache) and length == 1:
                held, key_positions, all_real = cache.store(
                    key, value, positions=positions, real=real
                )
                keys_held = values_held = held
            else:
                keys_held, values_held, key_positions, all_real = cache.append(
                    key, value, positions=positions, real=real
                )
            if all_real is not None:
                mask = padding(all_real) if mask is None else mask & padding(all_real)
        bias = None
        if self.position is not None and not isinstance(self.position, Rotary):
            if isinstance(self.position, ALiBi) and self.position.form == "key":
                mask = require_causal(query, keys, mask)
            bias = self.position.bias(
                positions, key_positions, num_heads=self.num_heads, dtype=query.dtype
            )
        return query, keys_held, values_held, mask, bias

    def join(self, x: Tensor, heads: Tensor, note: Note) -> Tensor:
        """Step 8: heads side by side, gated where the layer has a gate, projected out."""
        joined = merge_heads(heads)
        note("concatenated", joined)
        if self.gate_proj is not None:
            gate = torch.sigmoid(self.gate_proj(x))
            note("gate", gate)
            joined = joined * gate
            note("gated", joined)
        output: Tensor = self.out_proj(joined)
        return output

    def extra_repr(self) -> str:
        extra = [f"{self.embed_dim}, {self.num_heads} heads"]
        if self.num_kv_heads != self.num_heads:
            extra.append(f"num_kv_heads={self.num_kv_heads}")
        extra.append(f"head_dim={self.head_dim}")
        extra += [
            f"{name}={getattr(self, name)}"
            for name in ("kdim", "vdim")
            if getattr(self, name) != self.embed_dim
        ]
        if self.dropout:
            extra.append(f"dropout={self.dropout}")
        if self.position is not None and not isinstance(self.position, nn.Module):
            extra.append(f"position={self.position}")
        if self.options != AttentionOptions():
            extra.append(f"options={self.options}")
        return ", ".join(extra)


def _ignore(name: str, tensor: Tensor) -> None:
    pass


def _normed(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """The norm in its own dtype, then back: under autocast x is a half type and the weight not."""
    normed: Tensor = norm(x.to(norm.weight.dtype))
    return normed.to(x.dtype)


def _copy(target: Tensor | None, source: Tensor | None, index: int, fused: bool) -> None:
    """Copy `source`, or its third number `index` where it is fused, and its requires_grad."""
    if target is None or source is None:
        return
    with torch.no_grad():
        target.copy_(source.chunk(3)[index] if fused else source)
    target.requires_grad_(source.requires_grad)
