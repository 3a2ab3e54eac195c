"""Statistics the short way, from whole L×S maps: what `head_statistics` is compared with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

import headwise
from headwise import causal
from headwise.call import AttentionCall


def materialised_statistics(query: Tensor, key: Tensor) -> dict[str, Tensor]:
    """What `head_statistics` finds, the short way: from the whole map of a causal call (one batch
    element), as one would write it from a model's `output_attentions`."""
    length = query.shape[2]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = (query[0] @ key[0].mT) * query.shape[3] ** -0.5
    log_p = scores.masked_fill(hidden, -torch.inf).log_softmax(-1)
    p = log_p.exp()
    at = torch.arange(length)
    side = -(-length // 256)
    flat, root = p.flatten(1), p.sqrt().flatten(1)
    return {
        "row_entropy": -(p * log_p.masked_fill(hidden, 0.0)).sum(-1),
        "top_weights": p.topk(8).values,
        "received": p.sum(1),
        "distance": (p * (at[:, None] - at).abs()).sum((1, 2)) / p.sum((1, 2)),
        "own_token": p.diagonal(dim1=1, dim2=2).mean(-1),
        "previous_token": p.diagonal(-1, dim1=1, dim2=2).mean(-1),
        "cells": p.unflatten(1, (-1, side)).unflatten(3, (-1, side)).sum((2, 4)),
        "gram": flat @ flat.mT,
        "bhattacharyya": root @ root.mT / length,
    }


def peak(what: str) -> int | None:
    """Bytes by which a process of its own grows at most over statistics of 1×8×2048×64: "headwise"
    or "maps"; None where the system (not Linux) does not say."""
    if not Path("/proc/self/status").exists():
        return None
    command = [sys.executable, "-m", "benchmarks.maps", what]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return int(done.stdout)


def _grow(what: str) -> int:
    def run(length: int) -> None:
        query, key = torch.randn(1, 8, length, 64), torch.randn(1, 8, length, 64)
        if what == "maps":
            materialised_statistics(query, key)
        else:
            headwise.head_statistics(AttentionCall(query, key, key, causal()))

    run(256)  # what the libraries take at their first call is not counted
    before = _high_water()
    run(2048)
    return _high_water() - before


def _high_water() -> int:
    """The most bytes that this process has held. Linux's own record: getrusage's begins with what
    the parent held."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    print(_grow(sys.argv[1]))
