"""What attention costs, counted: public models' published shapes, masks by hand, growth, reach."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise import attention, causal, cli, window
from headwise.call import AttentionCall
from headwise.errors import BadInput
from headwise.profile import Layer, cost, from_config, from_options, growth, reach
from headwise.profile.analytic import activations, pairs
from headwise.profile.measured import Measured
from headwise.profile.run import Profile, profile, share_out, to_csv
from headwise.record import read
from headwise.statistics import head_statistics
from terminals import colours, on_terminal

LLAMA3 = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192,
}  # fmt: skip

# Published shapes, and what follows from them by hand: parameters in all, numbers in the cache of
# one token, at 8,192 tokens. (config, layers, heads, kv heads, dim, parameters, cache numbers)
PUBLIC = {
    "Llama-3-8B": (
        transformers.LlamaConfig(**LLAMA3), 32, 32, 8, 128, 8_030_261_248,
        32 * 2 * 8 * 128 * 8192,
    ),
    "Llama-2-70B": (
        transformers.LlamaConfig(
            hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
            num_attention_heads=64, num_key_value_heads=8, vocab_size=32000,
        ), 80, 64, 8, 128, 68_976_648_192, 80 * 2 * 8 * 128 * 8192,
    ),
    "Mistral-7B-v0.1": (
        transformers.MistralConfig(), 32, 32, 8, 128, 7_241_732_096, 32 * 2 * 8 * 128 * 4096,
    ),
    "Gemma-2-2B": (
        transformers.Gemma2Config(), 26, 8, 4, 256, 2_614_341_888,
        13 * 2 * 4 * 256 * (4096 + 8192),
    ),
    "Qwen2.5-7B": (
        transformers.Qwen2Config(
            hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
            num_attention_heads=28, num_key_value_heads=4, vocab_size=152064,
        ), 28, 28, 4, 128, 7_615_616_512, 28 * 2 * 4 * 128 * 8192,
    ),
    "GPT-2": (
        transformers.GPT2Config(), 12, 12, 12, 64, 124_439_808, 12 * 2 * 12 * 64 * 8192,
    ),
    "BERT-base": (transformers.BertConfig(), 12, 12, 12, 64, 109_482_240, 0),
    "T5-base": (
        transformers.T5Config(
            d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12, vocab_size=32128
        ), 36, 12, 12, 64, 222_903_552, 24 * 2 * 12 * 64 * 8192,
    ),
    "DeepSeek-V3": (
        transformers.DeepseekV3Config(), 61, 128, 128, 192, 671_026_404_352,
        61 * (512 + 64) * 8192,
    ),
    "GPT-OSS-120B": (
        transformers.GptOssConfig(), 36, 64, 8, 64, 116_829_156_672,
        18 * 2 * 8 * 64 * (128 + 8192),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_public_models_come_out_exactly(name: str) -> None:
    config, layers, heads, kv_heads, dim, parameters, cached = PUBLIC[name]
    shape = from_config(config, name)
    assert len(shape.layers) == layers
    assert {one.heads for one in shape.layers} == {heads}
    assert {one.kv_heads for one in shape.layers} == {kv_heads}
    assert {one.dim for one in shape.layers} == {dim}
    assert shape.parameters == parameters
    assert cost(shape, 8192, dtype="bfloat16").kv_bytes == 2 * cached
    assert cost(shape, 8192, dtype="bfloat16", batch=3, cache_dtype="int8").kv_bytes == 3 * cached


def test_flops_of_public_models_by_hand() -> None:
    n = 1000
    found = cost(from_config(PUBLIC["Llama-3-8B"][0]), n)
    # Causal: n(n+1)/2 pairs a head; scores and values, two operations a number.
    assert found.attention_flops == 32 * 32 * (n * (n + 1) // 2) * 4 * 128
    per_layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert found.other_flops == 2 * (32 * per_layer * n + 4096 * 128256)
    assert found.decode_attention_flops == 32 * 32 * (n + 1) * 4 * 128
    assert found.weight_bytes == 4 * 8_030_261_248
    met = 32 * per_layer + 4096 * 128256
    assert found.decode_bytes == 4 * (met + 32 * 2 * 8 * 128 * (n + 1))
    # An encoder sees all pairs; an encoder-decoder has them thrice: self, causal self, cross.
    assert cost(from_config(PUBLIC["BERT-base"][0]), n).attention_flops == 12 * 12 * n * n * 256
    t5 = cost(from_config(PUBLIC["T5-base"][0]), n)
    assert t5.attention_flops == 12 * 12 * 256 * (2 * n * n + n * (n + 1) // 2)
    # Half of Gemma's layers look back over 4,096 keys only.
    gemma, n = from_config(PUBLIC["Gemma-2-2B"][0]), 10_000
    near = 4096 * 4097 // 2 + (n - 4096) * 4096
    assert cost(gemma, n).attention_flops == 13 * 8 * 4 * 256 * (near + n * (n + 1) // 2)
    # Latent attention: 192 numbers of a key, 128 of a value.
    deep = cost(from_config(PUBLIC["DeepSeek-V3"][0]), 1000)
    assert deep.attention_flops == 61 * 128 * (1000 * 1001 // 2) * 2 * (192 + 128)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20), st.integers(0, 20), st.integers(1, 30), st.booleans())
def test_pairs_are_those_of_the_mask(queries: int, before: int, size: int, cut: bool) -> None:
    keys = queries + before
    layer = Layer(1, 1, 4, 4, True, size if cut else None)
    mask = window(size) if cut else causal()
    assert pairs(layer, queries, keys) == int(mask.dense(queries, keys).sum())


def test_counted_flops_are_those_that_statistics_count() -> None:
    query, key = torch.randn(1, 4, 37, 16), torch.randn(1, 2, 37, 16)
    call = AttentionCall(query, key, key, window(9))
    shape = from_options(num_heads=4, num_kv_heads=2, head_dim=16, window=9)
    counted = cost(shape, 37)
    measured = head_statistics(call).cost
    assert counted.attention_flops == measured.flops
    assert counted.kv_bytes == measured.kv_bytes
    attention(query, key, key, window(9))


def test_sixteen_gibibytes() -> None:
    shape = from_options(num_heads=32, num_kv_heads=8, head_dim=128, layers=32)
    found = cost(shape, 131_072, dtype="bfloat16")
    assert found.kv_bytes == 2 * 32 * 8 * 128 * 131_072 * 2 == 16 * 2**30
    assert found.materialised_bytes - found.fused_bytes == 2 * 32 * 131_072**2 * 2


def test_reach_is_the_last_context_that_fits() -> None:
    shape = from_options(num_heads=8, head_dim=64, layers=4)
    for memory in (30 << 20, 1 << 30):
        far = reach(shape, memory)
        assert cost(shape, far).fused_peak <= memory < cost(shape, far + 1).fused_peak
    assert reach(shape, 1000) == 0
    assert activations(shape, 10) == 10 * (3 * 512 + 6 * 512)


def test_growth_finds_the_powers_it_was_given() -> None:
    at = [512, 1024, 2048, 4096]
    square = growth.fit(at, [3e-9 * n**2 for n in at])
    line = growth.fit(at, [6e-6 * n for n in at])
    assert square is not None and line is not None
    assert square.exponent == pytest.approx(2) and line.exponent == pytest.approx(1)
    assert square.low == pytest.approx(2) == square.high
    assert growth.crossing(square, line) == pytest.approx(2000)
    assert growth.reach(square, 0.3) == pytest.approx(10_000)
    noisy = growth.fit(at, [n**1.5 * f for n, f in zip(at, (1.0, 1.2, 0.9, 1.0), strict=True)])
    assert noisy is not None and noisy.low < noisy.exponent < noisy.high
    # scipy.stats.linregress and t.ppf(0.975, 2) on the same numbers.
    assert (noisy.exponent, noisy.low) == pytest.approx((1.4585, 1.0722), abs=2e-4)
    assert growth.fit([8], [1.0]) is None and growth.fit([8, 16], [1.0, 0.0]) is None
    assert growth.crossing(square, square) is None


def measured(context: int, seconds: float, share: float) -> Measured:
    return Measured(context, seconds, 0.1, share, 0.01, 0.001, 2 * 10**8, 4096 * context)


def test_what_a_profile_says() -> None:
    shape = from_options(num_heads=8, num_kv_heads=4, head_dim=64, layers=4)
    found = profile(shape, [1024, 512, 2048])
    assert [c.context for c in found.counted] == [512, 1024, 2048]
    assert found.growth_lines() == []
    found.measured = [measured(512, 1.0, 0.2), measured(1024, 2.4, 1 / 3), measured(2048, 6.4, 0.5)]
    assert found.growth_lines()[0].startswith("attention's time grows as N^2.00 (2.00 to 2.00)")
    assert "they are equal at about 2,048 tokens" in found.growth_lines()[0]
    assert found.latency_line(2.4).startswith("a prefill of 2.4 s: about 997 tokens")
    assert "beyond what was measured" in found.latency_line(100)
    with pytest.raises(BadInput, match=r"512 tokens takes 1 s already, and --latency is 0.5 s"):
        found.latency_line(0.5)
    (line,) = found.memory_lines(1 << 30)
    few = from_options(num_heads=8, num_kv_heads=2, head_dim=64, layers=4)
    assert line.startswith(f"1 GiB: {reach(shape, 1 << 30):,} tokens; with 2 KV heads, ")
    assert reach(few, 1 << 30) > reach(shape, 1 << 30)
    with pytest.raises(BadInput, match=r"before its first token, and --memory is 1,?000 B"):
        found.memory_lines(1000)
    found.stopped = 4096
    records = found.records()
    assert [r.kind for r in records] == ["cost", "cost", "cost", "growth"]
    assert "out of memory at 4,096 tokens" in records[-1].values["lines"]
    lines = to_csv([found]).splitlines()
    assert len(lines) == 4 and lines[0].startswith("model,context,attention_flops")


def test_contexts_beyond_the_positions_are_asked_for() -> None:
    shape = from_config(transformers.GPT2Config(), "gpt2")
    with pytest.raises(BadInput, match=r"made for 1,024 positions and the context is 2,048"):
        profile(shape, [512, 2048])
    assert profile(shape, [512, 2048], beyond_trained=True).beyond == [2048]
    assert Profile(shape, []).name == "gpt2"


def test_models_with_fewer_positions_are_left_out_in_words() -> None:
    short = from_config(transformers.GPT2Config(), "gpt2")
    long = from_config(transformers.GPT2Config(n_positions=4096), "long")
    assert share_out([long, short], [4096, 512, 2048]) == [[512, 2048, 4096], [512]]
    assert share_out([long, short], [8192], True) == [[8192], [8192]]
    with pytest.raises(BadInput, match=r"long was made for 4,096 positions .* is 8,192"):
        share_out([short, long], [512, 8192])
    with pytest.raises(BadInput, match=r"gpt2 was made for 1,024 positions .* is 2,048"):
        share_out([long, short], [2048, 4096])
    found = profile(short, [512])
    found.left_out = [2048, 4096]
    assert found.notes() == [
        "left out: 2,048, 4,096 tokens, beyond the 1,024 positions that gpt2 was made for "
        "(--beyond-trained runs them)"
    ]
    assert found.records()[-1].values["lines"] == found.notes()


def test_a_config_without_attention_is_one_line() -> None:
    config = transformers.MambaConfig(num_hidden_layers=2, hidden_size=32, vocab_size=50)
    with pytest.raises(BadInput, match=r"no attention layer of mamba .* nothing to profile"):
        from_config(config)


# --- the command ---------------------------------------------------------------------------------


def headwise(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headwise", "profile", *arguments],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_the_command_counts_from_options(tmp_path) -> None:
    out = headwise(
        "--num-heads", "32", "--num-kv-heads", "8", "--head-dim", "128", "--layers", "32",
        "--contexts", "1k,128k", "--dtype", "bf16", "--memory", "16GiB",
        "--csv", str(tmp_path / "c.csv"), "--records", str(tmp_path / "r.jsonl"),
        "--html", str(tmp_path / "p.html"), "--picture", str(tmp_path / "p.svg"),
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    assert "131,072" in out.stdout and "16 GiB: " in out.stdout and "16 GiB " in out.stdout
    kinds = [record.kind for record in read(tmp_path / "r.jsonl")]
    assert kinds == ["run", "cost", "cost"]
    page = (tmp_path / "p.html").read_text(encoding="utf-8")
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert [c["context"] for c in data["costs"]] == [1024, 131_072]
    assert data["costs"][1]["kv_bytes"] == 16 * 2**30
    assert (tmp_path / "p.svg").read_text(encoding="utf-8").lstrip().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "name a model, or describe attention"),
        (("--num-heads", "8"), "give --head-dim or --embed-dim"),
        (("--num-heads", "0", "--head-dim", "8"), "num_heads must be at least 1, got 0"),
        (("--num-heads", "6", "--num-kv-heads", "4", "--head-dim", "8"), "4 key/value heads do"),
        (("--num-heads", "6", "--embed-dim", "8"), "6 heads do not divide embed_dim 8"),
        (("--num-heads", "6", "--head-dim", "8", "--contexts", "many"), "got 'many'"),
        (("--num-heads", "6", "--head-dim", "8", "--dtype", "int4"), "got 'int4'"),
        (("--num-heads", "6", "--head-dim", "8", "--memory", "1KiB"), "and --memory is 1 KiB"),
        (("--num-heads", "6", "--head-dim", "8", "--latency", "fast"), "such as 500ms or 2s"),
        (("--num-heads", "6", "--head-dim", "8", "--picture", "p.bmp"), "must end in .png"),
        (("--num-heads", "6", "--head-dim", "8", "--cache", "plain,int4"), "got 'plain,int4'"),
        (("--num-heads", "6", "--head-dim", "8", "--text-file", "t"), "is for --cache int8 of a"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    arguments: tuple[str, ...],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["headwise", "profile", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    printed = capsys.readouterr()
    assert left.value.code == 2 and printed.out == ""
    assert says in printed.err and len(printed.err.strip().splitlines()) == 1, printed.err


def test_a_narrow_terminal_cuts_no_number_and_no_colour_means_none() -> None:
    arguments = (
        "profile", "--num-heads", "32", "--num-kv-heads", "8", "--head-dim", "128", "--layers",
        "32", "--contexts", "1k,128k", "--dtype", "bf16", "--memory", "64GiB",
    )  # fmt: skip
    lines, styles, code = on_terminal(*arguments, columns=60, no_colour=True)
    assert code == 0 and not colours(styles)
    assert max(map(len, lines)) <= 60, lines
    printed = "\n".join(lines)
    assert "…" not in printed
    (row,) = [line for line in lines if line.strip().startswith("131,072")]
    cells = [words for words in row.split("  ") if words.strip()]
    counted = cost(from_options(num_heads=32, num_kv_heads=8, head_dim=128, layers=32), 131_072,
                   dtype="bfloat16")  # fmt: skip
    flop = f"{counted.attention_flops / 1e15:.4g} P"
    assert [cell.strip() for cell in cells[:2]] == ["131,072", flop]
    assert "16 GiB" in row and cells[-1].strip().endswith("TiB")
