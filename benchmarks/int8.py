"""The int8 cache beside the plain one: speed, bytes, rounding error, and what a model loses.

Speed: decoding upon 8,192 tokens, paired with the native kernel upon bfloat16 (A B A B in one
process, the median of the ratios), after the answers were checked against float64.
Error and perplexity: SmolLM2's own keys on an English text, which `--text-file` names. Perplexity
is that of tokens decoded one at a time, every key and value read from the cache.

    python -m benchmarks.int8 [--seconds 1] [--text-file F] [--windows 8] [--tokens 512]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.case import limits, seconds
from headwise import QuantizedKVCache, attention, native
from headwise.int8_cache import attend_held
from headwise.quantized import BLOCK, STEPS, QuantizedCall, quantise_keys

OUT = Path("bench/int8.json")
# Query heads, key/value heads, head dimension.
SHAPES = {"8 heads": (8, 8, 64), "SmolLM2": (9, 3, 64), "32:8 heads": (32, 8, 128)}
CONTEXT = 8192
# Bytes of int8 that one round of a case reads: several times the processor's last cache.
READ = 96 << 20


def speed(name: str, shape: tuple[int, int, int], budget: float) -> dict[str, Any]:
    """One new token through the attention of several layers, each with a cache of its own, so that
    what is read has left the processor's cache since the token before, as in a model."""
    heads, kv_heads, dim = shape
    made = torch.Generator().manual_seed(0)
    query = torch.randn(1, heads, 1, dim, generator=made).bfloat16()
    plain, small = [], []
    while sum(cache.nbytes for cache in small) < READ:
        key, value = torch.randn(2, 1, kv_heads, CONTEXT, dim, generator=made).bfloat16()
        cache = QuantizedKVCache(1, kv_heads, CONTEXT, dim, dtype=torch.bfloat16)
        cache.store(key, value)
        plain.append((key, value))
        small.append(cache)

    def int8_layer(layer: int) -> Tensor:
        return attend_held(QuantizedCall(query, small[layer].held), "native int8")[0]

    def plain_layer(layer: int) -> Tensor:
        return attention(query, *plain[layer], backend="native")

    keys, values = small[0].held.dequantized(dtype=torch.float64)
    want = attention(query.double(), keys, values, backend="reference")
    limit = 2.0**-8 * float(want.abs().max())
    torch.testing.assert_close(int8_layer(0).double(), want, rtol=0, atol=limit)
    count, begin = len(small), time.perf_counter()
    times: list[list[tuple[float, float]]] = [[] for _ in small]
    while len(times[0]) < 9 or time.perf_counter() - begin < budget:
        for layer, found in enumerate(times):
            mine = seconds(lambda layer=layer: int8_layer(layer))  # type: ignore[misc]
            found.append((mine, seconds(lambda layer=layer: plain_layer(layer))))  # type: ignore[misc]
    pairs = [pair for found in times for pair in found]
    mine, its = (statistics.median(column) for column in zip(*pairs, strict=True))
    plain_bytes = sum(t.numel() * t.element_size() for t in plain[0])
    return {
        "name": f"{name}, head dim {dim}",
        "layers": count,
        "int8_tokens": 1 / mine,
        "bf16_tokens": 1 / its,
        "ratio": statistics.median(b / a for a, b in pairs),
        "bytes": small[0].nbytes / plain_bytes,
        "int8_read": small[0].nbytes / 1e9 / mine,
        "bf16_read": plain_bytes / 1e9 / its,
        "pairs": len(pairs),
    }


def rounding(keys: Tensor) -> dict[str, float]:
    """Relative error of keys (B, H, S, D), scales by channel and by token: of all, and of the half
    of each head's channels that are smallest."""
    keys = keys[:, :, : keys.shape[2] // BLOCK * BLOCK]
    small, scale = quantise_keys(keys)
    found = {"channel": (small.float() * scale[..., None]).mT.flatten(2, 3)}
    step = keys.abs().amax(-1, keepdim=True) / STEPS
    found["token"] = (keys / step).round() * step
    size = keys.square().mean((0, 2))  # (H, D)
    low = (size <= size.median(-1, keepdim=True).values)[None, :, None].expand_as(keys)
    return {
        **{f"all by {n}": float((x - keys).norm() / keys.norm()) for n, x in found.items()},
        **{
            f"small by {n}": float(((x - keys) * low).norm() / (keys * low).norm())
            for n, x in found.items()
        },
    }


def nats(model: Any, ids: Tensor, cache: Any, first: int) -> Tensor:
    """Nats of each token after the `first`, decoded one at a time upon `cache`: (B, N − first)."""
    lost = []
    logits = model(input_ids=ids[:, :first], past_key_values=cache).logits[:, -1:]
    for at in range(first, ids.shape[1]):
        token = ids[:, at : at + 1]
        lost.append(cross_entropy(logits[:, 0].float(), token[:, 0], reduction="none"))
        logits = model(input_ids=token, past_key_values=cache).logits
    return torch.stack(lost, 1)


def model_loss(text: str, windows: int, tokens: int) -> dict[str, Any]:
    from transformers import DynamicCache

    from headwise import hf, models

    # transformers renames the argument; both names work meanwhile.
    warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
    loaded = models.load("smollm2")
    model = loaded.model.eval()
    model.set_attn_implementation(hf.NAME)
    ids = loaded.processor(text[: 16 * windows * tokens], return_tensors="pt").input_ids[0]
    ids = ids[: windows * tokens]
    ids = ids[: len(ids) // tokens * tokens].view(-1, tokens)
    plain, small = DynamicCache(), hf.QuantizedCache(model)
    want, got = (nats(model, ids, cache, BLOCK) for cache in (plain, small))
    keys = [layer.keys for layer in plain.layers]
    errors = [rounding(key) for key in keys]
    held = sum(t.numel() * t.element_size() for x in plain.layers for t in (x.keys, x.values))
    off = got - want
    return {
        "tokens": want.numel(),
        "perplexity": math.exp(float(want.mean())),
        "int8_perplexity": math.exp(float(got.mean())),
        "change": math.expm1(float(off.mean())),
        "largest_change_nats": float(off.abs().max()),
        "plain_bytes": held,
        "int8_bytes": small.nbytes,
        "key_error": {n: statistics.mean(e[n] for e in errors) for n in errors[0]},
        "worst_layer": {n: max(e[n] for e in errors) for n in errors[0]},
    }


@torch.no_grad()
def measure(args: argparse.Namespace) -> dict[str, Any]:
    limit = limits()
    print(f"{native.isa()}, {torch.get_num_threads()} threads; read {limit['read']:.1f} GB/s")
    print(f"\nattention of one new token upon {CONTEXT:,} tokens, tokens a second of one layer")
    print(f"{'':26}{'int8':>8}{'bf16':>8}{'ratio':>8}{'bytes':>8}{'GB/s':>14}")
    rows = [speed(name, shape, args.seconds) for name, shape in SHAPES.items()]
    for row in rows:
        print(
            f"{row['name']:26}{row['int8_tokens']:>8.0f}{row['bf16_tokens']:>8.0f}"
            f"{row['ratio']:>7.2f}×{row['bytes']:>8.0%}{row['int8_read']:>8.1f}"
            f"{row['bf16_read']:>6.1f}"
        )
    found: dict[str, Any] = {"limits": limit, "speed": rows}
    if args.text_file:
        text = Path(args.text_file).read_text(encoding="utf-8")
        loss = found["model"] = model_loss(text, args.windows, args.tokens)
        print(f"\nSmolLM2, {loss['tokens']:,} tokens decoded one at a time")
        print(
            f"perplexity {loss['perplexity']:.4f}, with int8 {loss['int8_perplexity']:.4f} "
            f"({loss['change']:+.3%}); one token's loss moves by at most "
            f"{loss['largest_change_nats']:.3f} nats"
        )
        print("relative error of its keys (mean of layers, worst layer)")
        for name in loss["key_error"]:
            print(f"  {name:18}{loss['key_error'][name]:>8.3%}{loss['worst_layer'][name]:>9.3%}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each comparison")
    parser.add_argument("--text-file", help="an English text, for SmolLM2")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="of a window")
    found = measure(parser.parse_args())
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(found, indent=1))
    print(f"\nwrote {OUT}")


if __name__ == "__main__":
    main()
