"""watch() itself: what Seen holds, what it says it missed, nesting, threads, and cleaning up."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise
from headwise.attention import observers
from headwise.errors import NothingToWatch
from headwise.reference import attention_steps
from headwise.watch import Seen, SeenCall, watch
from headwise.watch import seen as seen_module
from headwise.watch.naming import Names, kind_of
from headwise.watch.patches import open_patches
from headwise.watch.session import local
from watching import assert_all_reproduce, assert_same_bits, watched


class SelfAttention(nn.Module):
    def __init__(self, width: int = 15, heads: int = 3) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


class ByHand(SelfAttention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(-2)


class Raises(SelfAttention):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        raise RuntimeError("the model broke")


def model_of(*kinds: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for kind in kinds)).eval()


X = torch.randn(2, 7, 15, generator=torch.Generator().manual_seed(2))


def assert_clean() -> None:
    assert open_patches() == 0 and observers == []
    assert local.watches == [] and local.muted == 0 and local.catcher is None
    for function in (F.scaled_dot_product_attention, F.multi_head_attention_forward):
        assert not hasattr(function, "_headwise_original")
    assert nn.Module.__call__.__name__ == "_wrapped_call_impl"


# --- headwise's own attention --------------------------------------------------------------------


def test_headwise_attention_and_layer() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn = headwise.MultiHeadAttention(20, 4, num_kv_heads=2)
            self.cross = headwise.MultiHeadAttention(20, 4)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return self.cross(self.self_attn(x, mask=headwise.causal()), memory)

    torch.manual_seed(0)
    model = Decoder().eval()
    x, memory = torch.randn(2, 7, 20), torch.randn(2, 7, 20)
    seen, _ = watched(model, lambda: model(x, memory))
    assert_all_reproduce(seen, 2)
    assert [(c.id, c.module, c.mask_words, c.route) for c in seen] == [
        ("self/0", "self_attn", "causal", "headwise.attention"),
        ("cross/0", "cross", "full", "headwise.attention"),
    ]
    assert seen[0].call.groups == 2
    assert_clean()


# --- what Seen holds -----------------------------------------------------------------------------


def test_weights_are_made_on_demand_and_large_ones_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of(SelfAttention)
    seen, _ = watched(model, lambda: model(X))
    weights = seen.weights(0)
    assert weights.shape == (2, 3, 7, 7)
    assert torch.equal(weights, attention_steps(seen[0].call)["weights"])
    monkeypatch.setattr(seen_module, "LARGEST_MAP", 2 * 3 * 7 * 7 - 1)
    with pytest.raises(ValueError, match=r"map of 0 is \(2, 3, 7, 7\), 294 numbers, .* 293;"):
        seen.weights(0)
    assert torch.equal(seen.weights(0, force=True), weights)


def test_statistics_are_those_of_the_weights() -> None:
    model = model_of(SelfAttention, SelfAttention)
    seen, _ = watched(model, lambda: model(X))
    for index, statistics in enumerate(seen.statistics(map_cells=7)):
        weights = seen.weights(index).double()
        entropy = -(weights * weights.log()).sum(-1).mean(-1)
        assert torch.allclose(statistics.entropy.double(), entropy, rtol=1e-5, atol=0)


def test_padding_rows_are_not_counted() -> None:
    class Padded(SelfAttention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
            real = torch.arange(7) < torch.tensor([[7], [4]])
            return F.scaled_dot_product_attention(q, k, v, attn_mask=real[:, None, None])

    model = model_of(Padded)
    seen, _ = watched(model, lambda: model(X))
    (statistics,) = seen.statistics()
    assert statistics.rows.reshape(2, -1).amax(-1).tolist() == [7, 4]


def test_on_call_streams_and_keeps_nothing() -> None:
    model = model_of(SelfAttention, SelfAttention)
    taken: list[Any] = []
    gone: list[weakref.ref] = []

    def take(call: SeenCall) -> None:
        assert call.output is not None
        taken.append((call.id, call.output.clone(), call.weights()))
        gone.append(weakref.ref(call))

    with watch(model, on_call=take, keep=False) as seen, torch.no_grad():
        expected = model(X)
    assert [entry[0] for entry in taken] == ["self/0", "self/1"]
    assert torch.equal(taken[1][1].transpose(1, 2).flatten(-2), expected)
    assert len(seen) == 0 and seen.count == 2
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    with pytest.raises(ValueError, match=r"2 calls were seen but none kept \(keep=False\)"):
        seen.weights(0)
    with pytest.raises(ValueError, match="none kept"):
        seen.statistics()


def test_what_on_call_computes_is_not_watched() -> None:
    model = model_of(SelfAttention)

    def take(call: SeenCall) -> None:
        model(X)
        headwise.attention(call.call.query, call.call.key, call.call.value)

    with watch(model, on_call=take) as seen:
        model(X)
    assert seen.count == 1


def test_kept_calls_own_their_memory() -> None:
    kept: list[Tensor] = []

    class Overwrites(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
            sinks = torch.ones(3)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            out = out + F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            out = out + headwise.attention(
                q, k, v, headwise.keep(mask), bias=bias, sinks=sinks, backend="reference"
            )
            kept.append(out.clone())
            for x in (q, k, v, mask, bias, sinks, out):
                x.zero_()
            return out

    model = Overwrites()
    q, k, v = torch.randn(3, 2, 3, 7, 5)
    mask, bias = torch.ones(7, 7).tril().bool(), torch.randn(1, 1, 7, 7)
    with torch.no_grad(), watch(model, outputs=True) as seen:
        model(q, k, v, mask, bias)
    assert len(seen) == 3
    again = sum(attention_steps(call.call)["output"] for call in seen)
    assert isinstance(again, Tensor)
    # Three rounded sums of 7 values below 4.
    assert (again - kept[0]).abs().max() < 64 * torch.finfo(torch.float32).eps


def test_summary_is_a_table() -> None:
    model = model_of(SelfAttention, ByHand)
    seen, _ = watched(model, lambda: (model(X), model(X)))
    lines = seen.summary().splitlines()
    assert lines[0] == "Sequential: 2 attention calls caught"
    assert lines[1].split() == [
        "attention",
        "module",
        "heads",
        "L×S",
        "mask",
        "calls",
        "caught",
        "through",
    ]
    route = "F.scaled_dot_product_attention"
    assert lines[2].split() == ["self/0", "0", "3", "7×7", "full", "2", route]
    assert lines[3] == "not caught:" and lines[4].startswith("  1 (ByHand): it ran, but called")
    assert repr(seen) == seen.summary()
    assert repr(seen[0]) == "SeenCall(self/0 #0, '0', 3×7×7, full)"


def test_notebook_view_is_drawn_by_whoever_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(SelfAttention)
    seen, _ = watched(model, lambda: model(X))
    monkeypatch.setattr(seen_module, "html_view", None)
    assert seen._repr_html_() is None
    monkeypatch.setattr(seen_module, "html_view", lambda seen: f"<b>{seen.count}</b>")
    assert seen._repr_html_() == "<b>1</b>"
    assert Seen("none", True)._repr_html_() is None


# --- what could not be caught --------------------------------------------------------------------


def test_missed_modules_are_named_with_the_reason() -> None:
    class Some(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle, self.hand = SelfAttention(), SelfAttention(), ByHand()

        def forward(self, x: Tensor) -> Tensor:
            return self.hand(self.used(x))

    model = Some()
    seen, _ = watched(model, lambda: model(X))
    assert len(seen) == 1
    missed = sorted(seen.not_caught)
    assert missed[0].startswith("hand (ByHand): it ran, but called neither headwise.attention")
    assert missed[0].endswith("its class computes the softmax by hand")
    assert missed[1:] == ["idle (SelfAttention): it did not run during the watch"]


@pytest.mark.parametrize(
    ("kind", "run", "reason"),
    [
        (ByHand, True, r"in Sequential\. Looked for: headwise\.attention, F\.scaled_dot.*ByHand"),
        (SelfAttention, False, r"Sequential did not run inside the `with` block on this thread"),
        (nn.Identity, True, r"no attention call was caught in Sequential"),
    ],
)
def test_nothing_to_watch(kind: type[nn.Module], run: bool, reason: str) -> None:
    model = model_of(kind)
    with pytest.raises(NothingToWatch, match=reason), watch(model):
        if run:
            model(X)
    assert_clean()
    with watch(model, allow_nothing=True) as seen:
        pass
    assert seen.count == 0


def test_only_modules_are_watched() -> None:
    with pytest.raises(TypeError, match=r"wanted a torch\.nn\.Module, got function"):
        watch(lambda: None).__enter__()  # type: ignore[arg-type]
    assert_clean()


def test_a_call_that_cannot_be_read_is_said_and_breaks_nothing() -> None:
    class Strange(SelfAttention):
        def forward(self, x: Tensor) -> Tensor:
            q = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)[0]
            return F.scaled_dot_product_attention(q, q, q, scale=-1.0)

    model = model_of(Strange, SelfAttention)
    seen, _ = watched(model, lambda: (model[0](X), model[1](X)))
    assert len(seen) == 1
    assert seen.not_caught == [
        "0 (Strange): 1 calls seen but not recorded: attention: scale must be a finite number "
        "above 0, got -1.0; leave it out for 1/√head_dim"
    ]


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_meta_tensors_and_function_transforms_are_said() -> None:
    model = model_of(SelfAttention)
    with watch(model, allow_nothing=True) as seen:
        model.to("meta")(X.to("meta"))
    assert "hold no values here" in seen.not_caught[0]
    model = model_of(SelfAttention)
    with watch(model, allow_nothing=True) as seen:
        torch.func.vmap(model)(X[None])
    assert "hold no values here" in seen.not_caught[0]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_torchscript_is_said() -> None:
    model = nn.Sequential(torch.jit.trace(model_of(SelfAttention), X), SelfAttention()).eval()
    seen, _ = watched(model, lambda: model(X))
    assert len(seen) == 1
    assert seen.not_caught[0].startswith("0 (TopLevelTracedModule): TorchScript runs outside")


@pytest.mark.slow
def test_compiled_models_keep_their_bits_and_are_said() -> None:
    plain = model_of(SelfAttention, SelfAttention)
    inside = nn.Sequential(torch.compile(plain[0], backend="aot_eager"), plain[1])
    seen, _ = watched(inside, lambda: inside(X))
    assert [c.module for c in seen] == ["1"]
    assert seen.not_caught == [
        "0 (OptimizedModule): compiled by torch.compile; watch the module it was made from "
        "(._orig_mod)"
    ]
    whole = torch.compile(plain, backend="aot_eager", fullgraph=True)
    said = pytest.raises(NothingToWatch, match=r"OptimizedModule.*watch the module it was made")
    with said, watch(whole), torch.no_grad():
        whole(X)
    plain[1].compile(backend="aot_eager")
    seen, _ = watched(plain, lambda: plain(X))
    assert len(seen) == 1 and "compiled in place" in seen.not_caught[0]
    assert_clean()


def test_data_parallel_is_said() -> None:
    model = nn.DataParallel(model_of(SelfAttention))
    seen, _ = watched(model, lambda: model(X))  # without GPUs it calls its module itself
    assert seen[0].module == "module.0"
    model.device_ids = [0, 1]
    with pytest.raises(NothingToWatch, match="did not run"), watch(model) as seen:
        pass
    assert seen.not_caught[0] == (
        "the model (DataParallel): DataParallel runs copies in 2 other threads; watch its .module"
    )


# --- nesting, threads, errors --------------------------------------------------------------------


def test_only_the_watched_model_counts() -> None:
    model, other = model_of(SelfAttention), model_of(SelfAttention)
    with watch(model) as seen, torch.no_grad():
        other(X)
        F.scaled_dot_product_attention(*torch.randn(3, 1, 1, 4, 8))
        model(X)
    assert seen.count == 1


def test_parts_called_alone_count() -> None:
    model = model_of(SelfAttention, SelfAttention)
    with watch(model) as seen:
        model[1](X)
    assert seen[0].module == "1" and seen.not_caught[0].startswith("0 (SelfAttention): it did not")


def test_nested_watches() -> None:
    model, other = model_of(SelfAttention, SelfAttention), model_of(SelfAttention)
    with torch.no_grad(), watch(model) as outer:
        model(X)
        with watch(model[1], outputs=True) as inner, watch(other) as third:
            expected = model(X)
            other(X)
        assert open_patches() > 0
        model(X)
    assert (outer.count, inner.count, third.count) == (6, 1, 1)
    assert inner[0].module == "" and outer[1].module == "1"
    assert inner[0].output is not None
    assert_same_bits(inner[0].output.transpose(1, 2).flatten(-2), expected)
    assert_clean()


def test_errors_clean_up_and_pass_through() -> None:
    model = model_of(SelfAttention, Raises)
    with pytest.raises(RuntimeError, match="the model broke"), watch(model) as seen:
        model(X)
    assert seen.count == 2
    assert_clean()

    def refuse(call: SeenCall) -> None:
        raise KeyError("from on_call")

    with pytest.raises(KeyError, match="from on_call"), watch(model, on_call=refuse):
        model(X)
    assert_clean()


def test_threads_watch_their_own_calls() -> None:
    """Watches that open and close in overlapping order leave nothing behind."""
    shared = model_of(SelfAttention, SelfAttention)
    expected = shared(X)
    counts: dict[int, list[int]] = {}
    failures: list[BaseException] = []
    start = threading.Barrier(4)

    def work(number: int) -> None:
        try:
            start.wait()
            for _ in range(15):
                if number == 3:  # runs the same model, unwatched
                    assert torch.equal(shared(X), expected)
                    continue
                with watch(shared) as seen:
                    for _ in range(number + 1):
                        assert torch.equal(shared(X), expected)
                counts.setdefault(number, []).append(seen.count)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert counts == {number: [2 * (number + 1)] * 15 for number in range(3)}
    assert_clean()


def test_a_patch_made_by_others_on_top_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever replaces the function inside the block keeps their replacement."""
    model = model_of(SelfAttention)
    original = F.scaled_dot_product_attention
    with watch(model) as seen:
        ours = F.scaled_dot_product_attention
        theirs = lambda *args, **kwargs: ours(*args, **kwargs)  # noqa: E731
        monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
        model(X)
    assert seen.count == 1
    assert F.scaled_dot_product_attention is theirs
    assert torch.equal(model(X), model(X))
    F.scaled_dot_product_attention = original
    monkeypatch.undo()
    F.scaled_dot_product_attention = original
    assert_clean()


# --- names ---------------------------------------------------------------------------------------


def test_layers_and_stacks_from_paths() -> None:
    def tree(*paths: str) -> Names:
        root = nn.Module()
        for path in paths:
            node = root
            for part in path.split("."):
                if part not in dict(node.named_children()):
                    node.add_module(part, nn.Module())
                node = node.get_submodule(part)
        return Names(root, paths)

    names = tree("encoder.layer.3.attention.self", "encoder.layer.11.attention.self")
    assert names.layer("encoder.layer.11.attention.self") == 11
    assert names.stack("encoder.layer.11.attention.self") == ""
    names = tree("model.encoder.layers.0.self_attn", "model.decoder.layers.0.self_attn")
    assert names.stack("model.decoder.layers.0.self_attn") == "decoder"
    # Stages of blocks: numbers repeat, so the order counts.
    stages = [f"stages.{s}.blocks.{b}.attn" for s in (0, 1) for b in (0, 1, 2)]
    assert [tree(*stages).layer(path) for path in stages] == [0, 1, 2, 3, 4, 5]
    # Sparse attention in a hybrid model keeps its own numbers.
    assert tree("layers.3.attn", "layers.7.attn").layer("layers.7.attn") == 7
    assert tree("block2.attn", "block5.attn").layer("block5.attn") == 5
    assert tree("attn").layer("attn") == 0 and tree("attn").stack("attn") == ""


@pytest.mark.parametrize(
    ("path", "kwargs", "sizes", "kind"),
    [
        ("layers.0.self_attn", {}, (5, 9), "self"),
        ("layers.0.encoder_attn", {}, (5, 5), "cross"),
        ("layers.0.multihead_attn", {}, (5, 5), "cross"),
        ("block.0.layer.1.EncDecAttention", {}, (5, 5), "cross"),
        ("layer.0.crossattention.self", {}, (5, 5), "cross"),
        ("layers.0.attn", {"encoder_hidden_states": torch.ones(1, 5, 4)}, (5, 5), "cross"),
        ("layers.0.attn", {"encoder_hidden_states": None}, (5, 5), "self"),
        ("layers.0.attn", {"cache": object()}, (1, 9), "self"),
        ("layers.0.attn", {}, (9, 5), "cross"),
        ("layers.0.attn1", {}, (5, 5), "self"),
    ],
)
def test_kinds(path: str, kwargs: dict, sizes: tuple[int, int], kind: str) -> None:
    hidden = torch.zeros(1, sizes[0], 4)
    assert kind_of(nn.Module(), path, (hidden,), kwargs, *sizes) == kind


def test_kind_from_what_the_module_was_given() -> None:
    x, other = torch.zeros(1, 5, 4), torch.zeros(1, 7, 4)
    assert kind_of(nn.Module(), "attn", (x, other), {}, 5, 7) == "cross"
    assert kind_of(nn.Module(), "attn", (x,), {"context": x}, 5, 5) == "self"
    attention = nn.MultiheadAttention(4, 2)
    assert kind_of(attention, "attn", (x, x, x), {}, 5, 5) == "self"
    assert kind_of(attention, "attn", (x, x.clone(), x), {}, 5, 5) == "cross"
    own_word = nn.Module()
    own_word.is_cross_attention = True
    assert kind_of(own_word, "layers.0.self_attn", (x,), {}, 5, 5) == "cross"
