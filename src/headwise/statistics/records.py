"""Statistics as records: what the report is drawn from, bounded in size at any context length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from headwise.record import Record, pack
from headwise.statistics.heads import HeadStatistics
from headwise.statistics.labels import Thresholds, clusters, collapse_warning, labels

SCALARS = (
    "entropy", "effective_keys", "relative_entropy", "largest_weight", "distance",
    "distance_ratio", "previous_token", "own_token", "duplicate_token", "induction",
    "hidden_mass", "sink_logit_mass", "score_norm", "entropy_bound", "frobenius",
)  # fmt: skip
# All rows up to this many queries: a page can then show every token's strongest keys.
ALL_ROWS = 512


def records(
    statistics: HeadStatistics,
    where: Mapping[str, str | int | None],
    *,
    item: int = 0,
    thresholds: Thresholds | None = None,
    top_rows: int = 256,
    received_cells: int = 1024,
) -> list[Record]:
    """The `head`, `map`, `top`, `received`, `similarity` and `layer_summary` records of one call.

    Args:
        statistics: of the call.
        where: names the attention module, for example {"id": "self/9"}; every record carries it,
            and those of one head carry its number beside it.
        item: the batch element. Elements have token axes of their own, so records never mix them.
        thresholds: for the heads' names.
        top_rows: rows kept in `top` where there are more than 512 queries: half of them the
            last ones, the others evenly spread. All rows that count up to 512 queries.
        received_cells: `received` is summed in blocks of keys so that it has at most so many.

    Raises:
        IndexError: the batch has no such element.
    """
    if not 0 <= item < statistics.entropy.shape[0]:
        raise IndexError(
            f"records: batch element {item} of {statistics.entropy.shape[0]} does not exist"
        )
    limit = thresholds or Thresholds()
    names = labels(statistics, item, limit)
    rows = _top_rows(statistics, item, top_rows)
    found = []
    for head, labelled in enumerate(names):
        place = {**where, "head": head}
        found += [
            Record("head", place, {**_scalars(statistics, item, head), "labels": labelled}),
            Record("map", place, _map(statistics, item, head)),
            Record("top", place, _top(statistics, item, head, rows)),
            Record("received", place, _received(statistics, item, head, received_cells)),
        ]
    if statistics.bhattacharyya is not None and statistics.cosine is not None:
        overlap = statistics.bhattacharyya[item].numpy()
        similarity = {
            "cosine": _rounded(statistics.cosine[item]),
            "bhattacharyya": _rounded(statistics.bhattacharyya[item]),
            "clusters": clusters(overlap, limit.redundant),
        }
        found.append(Record("similarity", where, similarity))
    found.append(Record("layer_summary", where, _summary(statistics, item, limit)))
    return found


def _scalars(statistics: HeadStatistics, item: int, head: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in SCALARS:
        tensor: Tensor | None = getattr(statistics, name)
        values[name] = None if tensor is None else float(tensor[item, head])
    for place in range(4):
        values[f"sink_{place + 1}"] = float(statistics.sink[item, head, place])
    values["distance_histogram"] = _rounded(statistics.distance_histogram[item, head])
    values["rows"] = int(statistics.rows[item, head])
    return values


def _rounded(tensor: Tensor) -> Any:
    """Nested lists with six significant digits: what a page shows, at half the size."""
    return np.vectorize(lambda x: float(f"{x:.6g}"), otypes=[float])(tensor.numpy()).tolist()


def _map(statistics: HeadStatistics, item: int, head: int) -> dict[str, Any]:
    cells = statistics.cells[item, head].numpy().astype(np.float32)
    return {"block": list(statistics.block), "cells": pack(cells)}


def _top_rows(statistics: HeadStatistics, item: int, budget: int) -> np.ndarray:
    """Queries whose strongest keys are kept: rows that count in at least one head."""
    counted = np.flatnonzero((~statistics.row_entropy[item].isnan()).any(0).numpy())
    queries = statistics.row_entropy.shape[-1]
    if queries <= ALL_ROWS or len(counted) <= budget:
        return counted
    last = budget // 2
    spread = np.linspace(0, len(counted) - last - 1, budget - last).round().astype(int)
    return np.concatenate((counted[np.unique(spread)], counted[len(counted) - last :]))


def _top(statistics: HeadStatistics, item: int, head: int, rows: np.ndarray) -> dict[str, Any]:
    return {
        "rows": pack(rows.astype(np.int32)),
        "keys": pack(statistics.top_keys[item, head].numpy()[rows].astype(np.int32)),
        "weights": pack(statistics.top_weights[item, head].numpy()[rows].astype(np.float32)),
    }


def _received(statistics: HeadStatistics, item: int, head: int, cells: int) -> dict[str, Any]:
    sums = statistics.received[item, head].numpy()
    block = max(1, -(-len(sums) // cells))
    padded = np.pad(sums, (0, -len(sums) % block)).reshape(-1, block)
    return {"block": block, "sums": pack(padded.sum(-1).astype(np.float32))}


def _summary(statistics: HeadStatistics, item: int, limit: Thresholds) -> dict[str, Any]:
    """Means over the layer's heads, the collapse warning, and what the call costs."""
    values: dict[str, Any] = {}
    for name in SCALARS:
        tensor: Tensor | None = getattr(statistics, name)
        values[f"mean_{name}"] = None if tensor is None else float(tensor[item].mean())
    for place in range(4):
        values[f"mean_sink_{place + 1}"] = float(statistics.sink[item, :, place].mean())
    over = statistics.sink[item, :, 0] > limit.sink
    values["sink_rate"] = 100.0 * float(over.double().mean())
    values["collapse"] = collapse_warning(statistics, item, limit)
    values["low_rank"] = statistics.low_rank
    values["flops"] = statistics.cost.flops
    values["kv_bytes"] = statistics.cost.kv_bytes
    return values
