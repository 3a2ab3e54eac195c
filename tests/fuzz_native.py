"""A long random search for a call on which the kernels leave the definition (make fuzz).

Not part of the suite: its file name says so. `HEADWISE_FUZZ` sets the number of examples.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from headwise import attention, causal, documents, keep, native, padding, window
from headwise.intervals import Mask

EXAMPLES = int(os.environ.get("HEADWISE_FUZZ", "3000"))
LIMIT = {torch.float32: 4e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    batch, kv_heads, groups = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 5)),
    )
    queries = draw(st.one_of(st.just(1), st.integers(1, 160)))
    keys = draw(st.one_of(st.integers(1, 40), st.integers(1, 1100)))
    dim, value_dim = draw(st.integers(1, 90)), draw(st.integers(1, 90))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    made = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    heads = kv_heads * groups

    def noise(*size: int) -> Tensor:
        return torch.randn(size, generator=made, dtype=torch.float64).to(dtype)

    def stored(*size: int) -> Tensor:
        """The same numbers, laid out in memory in some other way."""
        how = draw(st.sampled_from(["plain", "heads inside", "part", "expanded"]))
        if how == "heads inside":
            return noise(size[0], size[2], size[1], size[3]).transpose(1, 2)
        if how == "part":
            return noise(*size[:3], size[3] + 3)[..., 1 : 1 + size[3]]
        if how == "expanded":
            return noise(1, *size[1:]).expand(size)
        return noise(*size)

    parts: list[Mask] = []
    if draw(st.booleans()):
        parts.append(causal(align=draw(st.sampled_from(["end", "start"]))))
    if draw(st.booleans()):
        parts.append(window(draw(st.integers(1, keys + 2))))
    if draw(st.booleans()):
        lengths = torch.randint(0, keys + 1, (batch,), generator=made)
        parts.append(padding(lengths=lengths, side=draw(st.sampled_from(["left", "right"]))))
    if draw(st.booleans()) and queries == keys:
        parts.append(documents(torch.arange(keys)[None] // draw(st.integers(1, keys))))
    if draw(st.integers(0, 3)) == 0:
        parts.append(keep(torch.rand(batch, 1, queries, keys, generator=made) < 0.5))
    mask: Mask | None = None
    for part in parts:
        mask = part if mask is None else mask & part if draw(st.booleans()) else mask | part
    found: dict[str, Any] = {
        "query": stored(batch, heads, queries, dim),
        "key": stored(batch, kv_heads, keys, dim),
        "value": stored(batch, kv_heads, keys, value_dim),
        "mask": mask,
    }
    if draw(st.booleans()):
        sizes = [draw(st.sampled_from([1, full])) for full in (batch, heads, queries, keys)]
        found["bias"] = noise(*sizes)
        if draw(st.booleans()):
            found["bias"][torch.rand(sizes, generator=made) < 0.3] = -math.inf
    if draw(st.booleans()):
        found["softcap"] = draw(st.floats(0.5, 50))
    if draw(st.booleans()):
        found["sinks"] = noise(heads) * 4
    if draw(st.booleans()):
        found["scale"] = draw(st.floats(1e-3, 0.5))
    return found


@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(calls(), st.sampled_from(native.runnable()))
def test_no_call_leaves_the_definition(found: dict[str, Any], isa: str) -> None:
    module = native.module()
    before = module.isa()
    assert module.use(isa) and native.isa() == isa
    try:
        results = {}
        for backend in ("native", "reference"):
            given = dict(found)
            names = [name for name, value in given.items() if isinstance(value, Tensor)]
            for name in names:
                wide = given[name].double() if backend == "reference" else given[name]
                given[name] = wide.detach().requires_grad_()
            tensors = [given[name] for name in names]
            out, lse = attention(**given, return_lse=True, backend=backend)
            pull = torch.arange(out.numel(), dtype=torch.float64).view(out.shape).sin()
            grads = torch.autograd.grad((out.double() * pull).sum(), tensors)
            results[backend] = dict(zip(["out", "lse", *names], [out, lse, *grads], strict=True))
    finally:
        module.use(before)
    limit = LIMIT.get(found["query"].dtype, 1e-11)
    for name, want in results["reference"].items():
        got, want = results["native"][name].detach().double(), want.detach()
        fine = 1e-5 if name == "lse" else limit * (1 if name == "out" else 12)
        size = max(1.0, float(want.nan_to_num(0, 0, 0).abs().max()))
        if name in ("bias", "sinks"):
            # A sum over rows, which may cancel; each row's part is off as its rounded output is.
            rows = want.shape[:3].numel() if name == "bias" else want.numel()
            size = max(size, math.sqrt(results["reference"]["lse"].numel() / rows))
        torch.testing.assert_close(
            got, want, rtol=0, atol=fine * size, equal_nan=True,
            msg=lambda text, name=name: f"{name} on {isa}: {text}",
        )  # fmt: skip
