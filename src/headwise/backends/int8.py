"""One new token upon int8 keys and values: this package's kernel, or torch tile by tile.

`choose` takes the first that does not refuse; `headwise.explain(call)` says why one does.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from headwise import native, reference
from headwise.backends.native import CODES, MOST_DIM, _at, tell_bias, tell_mask
from headwise.quantized import QuantizedCall

# Tokens that are turned back into float32 at a time, in torch's path.
TILE = 4096


class Int8Path(Protocol):
    name: str

    def refuse(self, call: QuantizedCall) -> str | None:
        """Why it cannot compute the call, or None when it can."""

    def forward(self, call: QuantizedCall) -> tuple[Tensor, Tensor]:
        """Output (B, Hq, 1, Dv) in the call's dtype and lse (B, Hq, 1) float32."""


class NativeInt8:
    """Reads int8 in place (native/decode_int8.inl)."""

    name = "native int8"

    def refuse(self, call: QuantizedCall) -> str | None:
        if call.query.device.type != "cpu":
            return f"it runs on the CPU, and the call is on {call.query.device}"
        if torch.compiler.is_compiling():
            return "it reads memory in place, which torch.compile cannot follow"
        for what, width in (
            ("head dimension", call.query.shape[3]),
            ("value dimension", call.held.value_dim),
        ):
            if width > MOST_DIM:
                return f"it takes a {what} of up to {MOST_DIM}, got {width}"
        try:
            native.module()
        except ImportError as error:
            return str(error)
        return None

    def forward(self, call: QuantizedCall) -> tuple[Tensor, Tensor]:
        held, query = call.held, call.query
        query = query if query.stride(3) == 1 or query.shape[3] == 1 else query.contiguous()
        batch, heads, _, dim = query.shape
        output = query.new_empty((batch, heads, 1, held.value_dim))
        lse = held.key_scales.new_empty((batch, heads, 1))
        runs, bits, masks = tell_mask(call.visible)
        bias = None if call.bias is None else tell_bias(call.bias)
        sinks = None if call.sinks is None else call.sinks.contiguous()
        scales = held.value_scales.stride()
        native.module().decode_int8(
            CODES[query.dtype],
            (batch, heads, held.tail.shape[1], 1, held.length, dim, held.value_dim),
            _at(query),
            (
                _at(held.keys),
                _at(held.tail),
                _at(held.values),
                _at(held.key_scales),
                (held.value_scales.data_ptr(), scales[0], scales[1], 0),
            ),
            held.sealed,
            runs,
            bits,
            bias,
            0 if sinks is None else sinks.data_ptr(),
            (call.scale_value, call.softcap or 0.0, 0.0),
            torch.get_num_threads(),
            _at(output),
            lse.data_ptr(),
        )
        del masks  # held until the kernel had read them
        return output, lse


class TorchTiles:
    """Turns `TILE` tokens at a time back into float32 and joins the parts by their lse (Dao 2022,
    arXiv 2205.14135, section 3.1)."""

    name = "torch tiles"

    def refuse(self, call: QuantizedCall) -> str | None:
        return None

    def forward(self, call: QuantizedCall) -> tuple[Tensor, Tensor]:
        batch, heads = call.query.shape[:2]
        lse = call.query.new_full((batch, heads, 1), -torch.inf, dtype=torch.float32)
        output = call.query.new_zeros((batch, heads, 1, call.held.value_dim), dtype=torch.float32)

        def join(other: Tensor, other_lse: Tensor) -> None:
            nonlocal output, lse
            both = torch.logaddexp(lse, other_lse)
            mine, its = (torch.exp(x - both)[..., None] for x in (lse, other_lse))
            output = torch.where(mine > 0, mine * output, 0.0) + torch.where(
                (its > 0) | its.isnan(), its * other, 0.0
            )
            empty = both == -torch.inf
            output = torch.where(empty[..., None], 0.0, output)
            lse = both

        for start in range(0, call.held.length, TILE):
            part = call.part(start, min(start + TILE, call.held.length), torch.float32)
            steps = reference.attention_steps(part)
            join(steps["output"], steps["lse"])
        if call.sinks is not None:
            empty = lse == -torch.inf
            sinks = call.sinks.float()[:, None].expand_as(lse)
            join(torch.zeros_like(output), torch.where(empty, -torch.inf, sinks))
        return output.to(call.query.dtype), lse


PATHS: tuple[Int8Path, ...] = (NativeInt8(), TorchTiles())


def choose(call: QuantizedCall, name: str | None = None) -> Int8Path:
    """The path that computes `call`: the first that accepts it, or the one named.

    Raises:
        ValueError: an unknown name, or the named path refuses (with its reason).
    """
    if name is None:
        return next(path for path in PATHS if path.refuse(call) is None)
    for path in PATHS:
        if path.name == name:
            reason = path.refuse(call)
            if reason is not None:
                raise ValueError(f"attention: {name!r} refuses this call: {reason}")
            return path
    names = ", ".join(path.name for path in PATHS)
    raise ValueError(f"attention: unknown path {name!r} upon a quantised cache; there are {names}")
