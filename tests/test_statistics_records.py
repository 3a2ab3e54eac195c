"""Statistics as records: complete, bounded in size, and equal to what they were made from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headwise import masks
from headwise.record import Record, unpack
from headwise.statistics import HeadStatistics, clusters, head_statistics, labels, records
from materialised import make

HEAD_VALUES = {
    "entropy", "effective_keys", "relative_entropy", "largest_weight", "distance",
    "distance_ratio", "distance_histogram", "sink_1", "sink_2", "sink_3", "sink_4",
    "previous_token", "own_token", "duplicate_token", "induction", "hidden_mass",
    "sink_logit_mass", "rows", "labels",
}  # fmt: skip


def taken(length: int, heads: int = 3, batch: int = 1, **more: object) -> HeadStatistics:
    call = make(batch, heads, 1, length, length, 4, 1, torch.float32, mask=masks.causal())
    return head_statistics(call, top=4, **more)  # type: ignore[arg-type]


def of(found: list[Record], kind: str) -> list[Record]:
    return [record for record in found if record.kind == kind]


def test_every_head_has_its_records_and_they_survive_json() -> None:
    statistics = taken(300, map_cells=64)
    found = records(statistics, {"id": "self/9"})
    found = [Record.from_json(record.to_json()) for record in found]
    for kind in ("head", "map", "top", "received"):
        assert [r.where for r in of(found, kind)] == [{"id": "self/9", "head": h} for h in range(3)]
    for head, record in enumerate(of(found, "head")):
        assert record.values.keys() >= HEAD_VALUES
        assert record.values["entropy"] == float(statistics.entropy[0, head])
        assert record.values["sink_2"] == float(statistics.sink[0, head, 1])
        assert record.values["labels"] == labels(statistics)[head]
        assert record.values["hidden_mass"] is None and record.values["rows"] == 300
        assert sum(record.values["distance_histogram"]) == pytest.approx(1, abs=1e-5)
    for head, record in enumerate(of(found, "map")):
        assert record.values["block"] == [5, 5]
        cells = unpack(record.values["cells"])
        np.testing.assert_array_equal(cells, statistics.cells[0, head].float().numpy())
        assert cells.shape == (60, 60) and cells.sum() == pytest.approx(300, rel=1e-5)
    for head, record in enumerate(of(found, "top")):
        rows = unpack(record.values["rows"])
        assert rows.tolist() == list(range(300))
        np.testing.assert_array_equal(
            unpack(record.values["keys"]), statistics.top_keys[0, head].numpy()
        )
        assert unpack(record.values["weights"]).dtype == np.float32
    (similarity,) = of(found, "similarity")
    assert np.array(similarity.values["cosine"]).shape == (3, 3)
    assert statistics.bhattacharyya is not None
    np.testing.assert_allclose(
        similarity.values["bhattacharyya"], statistics.bhattacharyya[0], rtol=1e-5
    )
    assert similarity.values["clusters"] == clusters(statistics.bhattacharyya[0].numpy(), 0.95)
    (summary,) = of(found, "layer_summary")
    assert summary.values["mean_entropy"] == pytest.approx(float(statistics.entropy.mean()))
    assert summary.values["flops"] == statistics.cost.flops
    assert summary.values["collapse"] is None


def test_long_contexts_keep_a_bounded_number_of_rows() -> None:
    statistics = taken(1500, heads=1)
    found = records(statistics, {"id": "self/0"}, top_rows=100, received_cells=400)
    (top,) = of(found, "top")
    rows = unpack(top.values["rows"])
    assert len(rows) == 100 and rows[0] == 0 and rows[-50:].tolist() == list(range(1450, 1500))
    assert (np.diff(rows) > 0).all()
    np.testing.assert_array_equal(
        unpack(top.values["keys"]), statistics.top_keys[0, 0].numpy()[rows]
    )
    (received,) = of(found, "received")
    sums = unpack(received.values["sums"])
    assert received.values["block"] == 4 and len(sums) == 375
    want = statistics.received[0, 0].reshape(-1, 4).sum(-1)
    np.testing.assert_allclose(sums, want, rtol=1e-6)
    size = sum(len(record.to_json()) for record in found)
    assert size < 400_000


def test_batch_elements_have_their_own_records_and_padding_rows_are_left_out() -> None:
    rows = torch.ones(2, 20, dtype=torch.bool)
    rows[1, 15:] = False
    statistics = taken(20, batch=2, query_rows=rows)
    first, second = (records(statistics, {"id": "a"}, item=item) for item in (0, 1))
    assert of(first, "head")[0].values["entropy"] == float(statistics.entropy[0, 0])
    assert of(second, "head")[0].values["entropy"] == float(statistics.entropy[1, 0])
    assert unpack(of(second, "top")[0].values["rows"]).tolist() == list(range(15))
    with pytest.raises(IndexError, match="batch element 2 of 2"):
        records(statistics, {"id": "a"}, item=2)


def test_without_pairs_there_is_no_similarity_record() -> None:
    found = records(taken(20, pairs=False), {"id": "a"})
    assert not of(found, "similarity")
    assert len(of(found, "head")) == 3
