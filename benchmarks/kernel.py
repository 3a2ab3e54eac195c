"""The native kernel beside torch's: paired timing, after the answers were checked.

A B A B in one process, the median of the ratios. Correctness is asserted against float64 before
anything is timed: the error must not be larger than torch's own, give or take rounding.

    python -m benchmarks.kernel [--seconds 0.5] [--peers] [--context 8000]
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import headwise
from benchmarks import peers, picture, whole_model
from benchmarks.case import Case, limits, no_worse, of_limit, paired
from benchmarks.maps import materialised_statistics, peak
from headwise import attention, backends, causal, native, padding, window
from headwise.call import AttentionCall

OUT = Path("bench/kernel.json")


def qkv(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    batch, heads, kv_heads, queries, keys, dim = shape
    made = torch.Generator().manual_seed(0)
    sizes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    return [torch.randn(batch, h, n, dim, generator=made).to(dtype) for h, n in sizes]


def exact(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
    wide = (query.double(), key.double(), value.double())
    return attention(*wide, backend="reference", **more)


def prefill(name: str, shape: tuple[int, ...], dtype: torch.dtype, is_causal: bool) -> Case:
    query, key, value = qkv(shape, dtype)
    mask = causal() if is_causal else None

    def ours() -> Tensor:
        return attention(query, key, value, mask, backend="native")

    def torchs() -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    def check() -> None:
        no_worse(ours(), torchs(), exact(query, key, value, mask=mask), name)

    batch, heads, _, queries, keys, dim = shape
    work = 4.0 * batch * heads * queries * keys * dim / (2 if is_causal else 1)

    def others() -> tuple[dict[str, peers.Run], dict[str, str]]:
        return peers.prepare(query, key, value, is_causal, exact(query, key, value, mask=mask))

    return Case(name, ours, torchs, work, "GFLOP/s", check, others)


def decode(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Case:
    query, key, value = qkv(shape, dtype)

    def ours() -> Tensor:
        return attention(query, key, value, causal(), backend="native")

    def torchs() -> Tensor:
        return scaled_dot_product_attention(query, key, value, enable_gqa=True)

    def check() -> None:
        no_worse(ours(), torchs(), exact(query, key, value), name)

    def others() -> tuple[dict[str, peers.Run], dict[str, str]]:
        return peers.prepare(query, key, value, False, exact(query, key, value))

    work = 2.0 * key.numel() * key.element_size()
    return Case(name, ours, torchs, work, "GB/s", check, others)


def masked(name: str, shape: tuple[int, ...], dtype: torch.dtype, mask: headwise.Mask) -> Case:
    query, key, value = qkv(shape, dtype)
    dense = mask.dense(shape[3], shape[4], batch=shape[0])
    seen = float(dense.expand(shape[0], 1, shape[3], shape[4]).sum())

    def ours() -> Tensor:
        return attention(query, key, value, mask, backend="native")

    def torchs() -> Tensor:
        return scaled_dot_product_attention(query, key, value, attn_mask=dense)

    def check() -> None:
        no_worse(ours(), torchs(), exact(query, key, value, mask=mask), name)

    return Case(name, ours, torchs, 4.0 * seen * shape[1] * shape[5], "GFLOP/s", check)


def dropout(name: str, shape: tuple[int, ...]) -> Case:
    query, key, value = qkv(shape, torch.float32)

    def ours() -> Tensor:
        return attention(query, key, value, dropout=0.1, backend="native")

    def torchs() -> Tensor:
        return scaled_dot_product_attention(query, key, value, dropout_p=0.1)

    def check() -> None:
        # Random on both sides: the mean over many draws is the attention without dropout.
        mean = sum(ours() for _ in range(40)) / 40
        assert isinstance(mean, Tensor)
        off = float((mean.double() - exact(query, key, value)).abs().mean())
        assert off < 0.02, f"{name}: mean of 40 draws is off by {off:.3g}"

    batch, heads, _, queries, keys, dim = shape
    return Case(name, ours, torchs, 4.0 * batch * heads * queries * keys * dim, "GFLOP/s", check)


def backward(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Case:
    query, key, value = qkv(shape, dtype)
    # The same in every run: the largest of half a million errors is luck, and must not stop a run.
    made = torch.Generator().manual_seed(0)
    pull = torch.randn(query.shape, generator=made).to(dtype)
    kernel = backends.get("native")
    call = AttentionCall(query, key, value, causal())
    output, lse = kernel.forward(call, None, True)
    assert lse is not None
    its_output, its_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, True
    )

    def ours() -> Any:
        return kernel.backward(call, None, output, lse, pull, None, False)

    def torchs() -> Any:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            pull, query, key, value, its_output, its_lse, 0.0, True
        )

    def check() -> None:
        leaves = [t.double().requires_grad_() for t in (query, key, value)]
        out = attention(*leaves, causal(), backend="reference")
        wanted = torch.autograd.grad(out, leaves, pull.double())
        found, its = ours(), torchs()
        for which, want, other in zip(("query", "key", "value"), wanted, its, strict=True):
            no_worse(found[which].to(dtype), other, want, f"{name}: {which}")

    batch, heads, _, queries, keys, dim = shape
    return Case(
        name, ours, torchs, 10.0 * batch * heads * queries * keys * dim / 2, "GFLOP/s", check
    )


def x_transformers_layer(name: str) -> Case:
    torch.manual_seed(0)
    mine = headwise.MultiHeadAttention(512, 8, bias=False).eval()
    x = torch.randn(1, 512, 512)
    theirs = peers.x_transformers_layer(mine, x)

    def ours() -> Any:
        return mine(x)

    def check() -> None:
        torch.testing.assert_close(ours(), theirs(), rtol=1e-4, atol=1e-5)

    work = 4.0 * 8 * 512 * 512 * 64 + 8.0 * 512 * 512 * 512
    return Case(name, ours, theirs, work, "GFLOP/s", check)


def layer(name: str, need_weights: bool) -> Case:
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(512, 8, batch_first=True).eval()
    mine = headwise.MultiHeadAttention.from_torch(theirs).eval()
    x = torch.randn(1, 512, 512)

    def ours() -> Any:
        return mine(x)

    def torchs() -> Any:
        return theirs(x, x, x, need_weights=need_weights)[0]

    def check() -> None:
        torch.testing.assert_close(ours(), torchs(), rtol=1e-4, atol=1e-5)

    work = 4.0 * 8 * 512 * 512 * 64 + 8.0 * 512 * 512 * 512
    return Case(name, ours, torchs, work, "GFLOP/s", check)


def statistics_of(name: str, shape: tuple[int, ...], beside: str) -> Case:
    """Statistics of a causal call, beside torch's attention on it or beside whole maps."""
    query, key, value = qkv(shape, torch.float32)
    call = AttentionCall(query, key, value, causal())

    def ours() -> Any:
        return headwise.head_statistics(call)

    def torchs() -> Any:
        if beside == "attention":
            return scaled_dot_product_attention(query, key, value, is_causal=True)
        return materialised_statistics(query, key)

    def check() -> None:
        mine = ours()
        for what, want in materialised_statistics(query.double(), key.double()).items():
            torch.testing.assert_close(
                getattr(mine, what)[0].double(), want, rtol=1e-4, atol=1e-5, msg=f"{name}: {what}"
            )

    batch, heads, _, queries, keys, dim = shape
    work = 4.0 * batch * heads * queries * keys * dim / 2
    return Case(name, ours, torchs, work, "GFLOP/s", check)


def cases() -> list[Case]:
    f32, bf16 = torch.float32, torch.bfloat16
    found = []
    for word, dtype in (("fp32", f32), ("bf16", bf16)):
        for shape in (
            (1, 12, 12, 128, 128, 64),
            (1, 8, 8, 512, 512, 64),
            (1, 8, 8, 2048, 2048, 64),
        ):
            size = f"{shape[0]}×{shape[1]}×{shape[3]}×{shape[5]}"
            found.append(prefill(f"{word} full {size}", shape, dtype, False))
            found.append(prefill(f"{word} causal {size}", shape, dtype, True))
        found.append(decode(f"{word} decode 8 heads, 8192 keys", (1, 8, 8, 1, 8192, 64), dtype))
        found.append(
            backward(f"{word} backward 1×8×1024×64, causal", (1, 8, 8, 1024, 1024, 64), dtype)
        )
        lengths = torch.tensor([256, 204, 186, 164, 140, 120, 90, 70])
        found.append(
            masked(f"{word} padded batch 8×12×256×64, fill 0.6", (8, 12, 12, 256, 256, 64), dtype,
                   padding(lengths=lengths))
        )  # fmt: skip
    found.append(decode("bf16 decode 32:8 heads, 8192 keys", (1, 32, 8, 1, 8192, 128), bf16))
    found.append(masked("fp32 window 256 of 8192", (1, 8, 8, 8192, 8192, 64), f32, window(256)))
    found.append(dropout("fp32 dropout 0.1, 8×12×256×64", (8, 12, 12, 256, 256, 64)))
    found.append(layer("layer 1×512×512, torch without weights", False))
    found.append(layer("layer 1×512×512, torch with weights", True))
    found.append(
        statistics_of(
            "statistics 1×8×4096×64, torch's attention", (1, 8, 8, 4096, 4096, 64), "attention"
        )
    )
    found.append(
        statistics_of(
            "statistics 1×8×2048×64, torch's whole maps", (1, 8, 8, 2048, 2048, 64), "maps"
        )
    )
    return found


@torch.no_grad()
def _measure(budget: float, with_peers: bool, context: int) -> dict[str, Any]:
    limit = limits()
    print(f"{native.isa()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(
        f"this machine: matrix product {limit['fp32']:.0f} (fp32) and {limit['bf16']:.0f} (bf16) "
        f"GFLOP/s, read {limit['read']:.1f} GB/s"
    )
    print(f"\n{'':44}{'headwise':>10}{'torch':>9}{'ratio':>8}{'of limit':>10}")
    rows = []
    todo = cases()
    if with_peers:
        try:
            todo.append(x_transformers_layer("layer 1×512×512, x-transformers"))
        except peers.Missing as error:
            print(error)
    if context:
        todo += whole_model.cases(context)
    for case in todo:
        with torch.enable_grad() if "backward" in case.name else torch.no_grad():
            row = paired(case, budget, with_peers)
        row["of_limit"] = share = of_limit(row, limit)
        rows.append(row)
        print(
            f"{row['name']:44}{row['ours']:>10.1f}{row['torch']:>9.1f}{row['ratio']:>7.2f}×"
            + (f"{'–':>10}" if share is None else f"{share:>9.0%}"),
            flush=True,
        )
        for name, peer in row.get("peers", {}).items():
            print(f"{'  ' + name:44}{'':>10}{peer['rate']:>9.1f}{peer['ratio']:>7.2f}×")
        for name, reason in row.get("left_out", {}).items():
            print(f"  {name} left out: {reason}")
    peaks = {what: peak(what) for what in ("headwise", "maps")}
    if peaks["headwise"] is not None:
        print(
            f"peak memory of the statistics of 1×8×2048×64: {peaks['headwise'] / 1e6:,.0f} MB, "
            f"with whole maps {peaks['maps'] / 1e6:,.0f} MB"
        )
    return {
        "isa": native.isa(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "limits": limit,
        "peaks": peaks,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each comparison")
    parser.add_argument("--peers", action="store_true", help="other libraries too, where installed")
    parser.add_argument(
        "--context", type=int, default=2048, help="tokens for SmolLM2 as a whole; 0: leave it out"
    )
    given = parser.parse_args()
    found = _measure(given.seconds, given.peers, given.context)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(found, indent=1))
    drawn = OUT.with_suffix(".png")
    picture.draw(found, drawn)
    print(f"\nGFLOP/s of useful work, GB/s for decode; wrote {OUT} and {drawn}")


if __name__ == "__main__":
    main()
