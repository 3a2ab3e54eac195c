"""Measured beside counted: real processes, on a small saved model and on packaged ones."""

from __future__ import annotations

import pytest

from headwise.errors import HeadwiseError
from headwise.models import load
from headwise.profile import cost, from_config
from headwise.profile.measured import Measured, OutOfMemory, measure
from tinymodels import save_bert, save_llama


def test_a_saved_model_is_measured(tmp_path) -> None:
    save_llama(tmp_path)
    shape = from_config(load(tmp_path).model.config)
    lines: list[str] = []
    found = list(measure(str(tmp_path), [32, 16], say=lambda done, total, line: lines.append(line)))
    assert lines == ["measuring 16 tokens", "measuring 32 tokens", "measured"]
    assert [m.context for m in found] == [16, 32]
    for one in found:
        assert isinstance(one, Measured)
        assert one.kv_bytes == cost(shape, one.context).kv_bytes
        assert 0 < one.attention_share < 1 and one.prefill > 0
        assert one.decode is not None and one.decode > 0


def test_an_encoder_does_not_decode(tmp_path) -> None:
    save_bert(tmp_path)
    (one,) = measure(str(tmp_path), [8], attention="sdpa")
    assert isinstance(one, Measured) and one.decode is None and one.kv_bytes == 0


def test_memory_that_ends_is_an_answer(tmp_path, monkeypatch) -> None:
    save_llama(tmp_path)
    import headwise.profile.measured as module

    ask = module._ask
    monkeypatch.setattr(module, "_ask", lambda q: None if q["context"] > 20 else ask(q))
    found = list(measure(str(tmp_path), [16, 32, 64]))
    assert isinstance(found[0], Measured) and found[1:] == [OutOfMemory(32)]


def test_what_stops_a_process_is_told(tmp_path) -> None:
    with pytest.raises(HeadwiseError, match=r"measuring 16 tokens failed: .*nowhere"):
        list(measure(str(tmp_path / "nowhere"), [16]))


@pytest.mark.slow
@pytest.mark.packaged
@pytest.mark.parametrize("name", ["smollm2", "minilm"])
def test_counted_peaks_are_within_a_tenth_of_measured(name: str) -> None:
    shape = from_config(load(name).model.config, name)
    (one,) = measure(name, [512])
    assert isinstance(one, Measured)
    counted = cost(shape, 512)
    assert one.kv_bytes == counted.kv_bytes
    assert one.peak == pytest.approx(counted.fused_peak, rel=0.1)
