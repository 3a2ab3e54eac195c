"""One watched run becomes records that say what the model did."""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from headwise.errors import BadFile, BadInput, NothingToWatch
from headwise.examine import examine, records_of
from headwise.layer import MultiHeadAttention
from headwise.links import Asked, StrongestLinks
from headwise.masks import causal
from headwise.models import load
from headwise.record import Record, unpack
from headwise.report.collect import collect
from headwise.report.embed import payload
from headwise.watch import watch
from tinymodels import save_bert, save_llama
from toys import Toy, text_axis, toy

KINDS = [
    "run",
    "axis",
    "attention",
    "head",
    "map",
    "top",
    "received",
    "similarity",
    "layer_summary",
]


def of(records: list[Record], kind: str, **where) -> list[Record]:
    return [
        r for r in records if r.kind == kind and all(r.where[key] == where[key] for key in where)
    ]


def weights_of(loaded, inputs) -> dict[str, torch.Tensor]:
    """Each layer's weights, from its own trace: another road than the statistics."""
    found, x = {}, loaded.model.embedding(inputs.kwargs["input_ids"])
    for number, layer in enumerate(loaded.model.layers):
        found[f"self/{number}"] = layer.trace(x, mask=causal())["weights"][0]
        x = x + layer(x, mask=causal())
    return found


def test_records_say_what_the_model_did():
    loaded, inputs = toy()
    done = []
    records = examine(loaded, inputs, progress=lambda *args: done.append(args), command="words")
    assert [kind for kind in KINDS if of(records, kind)] == KINDS
    (run,) = of(records, "run")
    assert run.values["model"] == "toy" and run.values["command"] == "words"
    assert run.values["not_caught"] == [] and run.values["dtype"] == "float32"
    assert run.values["thresholds"]["sink"] == 0.3
    attention = of(records, "attention")
    assert [r.where["id"] for r in attention] == ["self/0", "self/1"]
    assert attention[0].values["mask"] == "causal"
    assert attention[0].values["module"] == "layers.0"
    assert (attention[0].values["heads"], attention[0].values["kv_heads"]) == (4, 2)
    assert [args[0] for args in done] == [1, 2]
    for name, weights in weights_of(loaded, inputs).items():
        for head in range(4):
            (cells,) = of(records, "map", id=name, head=head)
            assert cells.values["block"] == [1, 1]
            got = unpack(cells.values["cells"])
            assert np.allclose(got, weights[head].detach().numpy(), atol=1e-6)
            (values,) = of(records, "head", id=name, head=head)
            p = weights[head].double()
            entropy = -torch.special.xlogy(p, p).sum(-1).mean()
            assert values.values["entropy"] == pytest.approx(entropy.item(), abs=1e-5)


def test_every_record_survives_its_line():
    loaded, inputs = toy()
    for record in examine(loaded, inputs):
        line = record.to_json()
        assert Record.from_json(line).to_json() == line


def test_asked_links_are_exact_and_sorted():
    loaded, inputs = toy()
    records = examine(loaded, inputs, links=[("d", "b")])
    asked = [r for r in of(records, "link") if r.values["asked"]]
    wanted = {}
    for name, weights in weights_of(loaded, inputs).items():
        for head in range(4):
            for key in (1, 4):  # both places of "b"
                wanted[name, head, key] = weights[head, 6, key].item()
    assert len(asked) == 5
    heads: dict[tuple, float] = {}  # each head once, at its stronger place
    for (name, head, _), weight in wanted.items():
        heads[name, head] = max(weight, heads.get((name, head), 0.0))
    for record, weight in zip(asked, sorted(heads.values(), reverse=True), strict=False):
        place = (record.where["id"], record.where["head"], record.values["key"])
        assert record.values["query"] == 6
        assert record.values["weight"] == pytest.approx(wanted[place], abs=1e-6)
        assert record.values["weight"] == pytest.approx(weight, abs=1e-6)


def test_strongest_links_leave_out_the_first_token_itself_and_its_neighbour():
    loaded, inputs = toy()
    records = examine(loaded, inputs)
    links = [r for r in of(records, "link") if not r.values["asked"]]
    weights = weights_of(loaded, inputs)
    found = {r.values["query"]: r for r in links}
    assert len(found) == len(links) > 1
    assert set(found) <= {3, 4, 5, 6}, "earlier queries see no other key"
    assert len({(*r.where.values(), r.values["key"]) for r in links}) == len(links)
    for query, record in found.items():
        best = max(float(w[:, query, 1 : query - 1].max()) for w in weights.values())
        assert record.values["weight"] == pytest.approx(best, abs=1e-6)
        assert 1 <= record.values["key"] < query - 1
    order = [r.values["weight"] for r in links]
    assert order == sorted(order, reverse=True)


def test_a_word_of_several_tokens_sums_over_keys_and_means_over_queries():
    axis = {
        **text_axis("x"),
        "text": "unhappy cat",
        "tokens": ["un", "happy", " cat"],
        "starts": [0, 2, 7],
        "ends": [2, 7, 11],
        "special": [0, 0, 0],
    }
    asked = Asked.find({"text": axis}, "cat", "unhappy")
    assert asked.query_places["text"] == [range(2, 3)]
    assert asked.key_places["text"] == [range(0, 2)]
    # As a model that lowers its text shows it; and never inside another word.
    assert Asked.find({"text": axis}, "Unhappy", "cat").query_places["text"] == [range(0, 2)]
    with pytest.raises(BadInput, match="the key 'hap' is not in the input"):
        Asked.find({"text": axis}, "cat", "hap")


def test_a_link_that_is_not_in_the_text_is_named_before_anything_runs():
    loaded, inputs = toy()
    loaded.model.forward = lambda *args, **kwargs: pytest.fail("ran")
    with pytest.raises(BadInput, match="the query 'zebra' is not in the input"):
        examine(loaded, inputs, links=[("zebra", "a")])


def test_a_model_without_attention_is_named():
    loaded, inputs = toy(layers=0)
    with pytest.raises(NothingToWatch, match="attention"):
        examine(loaded, inputs)


def test_a_watched_object_shows_itself_in_a_notebook():
    pytest.importorskip("jinja2")
    loaded, inputs = toy()
    with watch(loaded.model) as seen:
        loaded.run(inputs)
    html = seen._repr_html_()
    assert (
        "<" in html
        and "http://" not in html
        and "https://" not in html.replace("https://www.w3.org", "")
    )
    records = records_of(seen, tokens=[f"<b>{i}</b>" for i in range(7)])
    (axis,) = of(records, "axis")
    assert axis.values["tokens"][3] == "<b>3</b>"


def test_a_notebook_shows_calls_of_any_length():
    pytest.importorskip("jinja2")
    layer = MultiHeadAttention(8, 2).eval()
    cache, x = layer.make_cache(1, 9), torch.randn(1, 5, 8)
    with watch(layer) as seen, torch.no_grad():
        for part in (x, x[:, :1], x[:, :1]):
            layer(part, mask=causal(), cache=cache)
        layer(x[:, :3], mask=causal())
        layer(x[:, :0])
        layer(x[:0])
    records = records_of(seen)
    sizes = {r.where["axis"]: len(r.values["tokens"]) for r in of(records, "axis")}
    shapes = []
    for record in of(records, "attention"):
        values = record.values
        assert sizes[values["query_axis"]] == values["queries"]
        assert sizes[values["key_axis"]] == values["keys"]
        shapes.append((values["queries"], values["keys"]))
    assert shapes == [(5, 5), (1, 6), (1, 7), (3, 3)]
    (run,) = of(records, "run")
    assert run.values["not_caught"] == ["2 calls without tokens: nothing to draw"]
    assert seen._repr_html_().count("<img") == 8


def test_strongest_links_by_hand():
    """Two heads, four queries; each exclusion takes the strongest key away from some row."""
    weights = torch.zeros(1, 2, 4, 4)
    keys = torch.arange(4).repeat(1, 2, 4, 1)
    weights[0, 0, 3] = torch.tensor([0.9, 0.03, 0.04, 0.02])  # first; neighbour 2; itself 3
    weights[0, 1, 3] = torch.tensor([0.0, 0.01, 0.9, 0.09])  # the neighbour before, then itself
    weights[0, 1, 2] = torch.tensor([0.5, 0.3, 0.2, 0.0])  # first, neighbour and itself only
    stats = SimpleNamespace(top_weights=weights, top_keys=keys)
    axis = text_axis("a b c d")
    strongest = StrongestLinks()
    strongest.take("self/0", stats, "text", axis, "text", axis)
    (record,) = strongest.records({"text": axis})
    assert record.where == {"id": "self/0", "head": 0}
    assert (record.values["query"], record.values["key"]) == (3, 1)
    assert record.values["weight"] == pytest.approx(0.03)
    # A padding query asks nothing.
    padded = {**axis, "real": [1, 1, 1, 0]}
    strongest = StrongestLinks()
    strongest.take("self/0", stats, "text", padded, "text", padded)
    assert strongest.records({"text": padded}) == []


def test_pieces_of_words_are_summed_over_keys_and_averaged_over_queries():
    loaded, inputs = toy("a b c a")
    axis = inputs.axes["text"]
    pieces = {**axis, "text": "ab ca", "starts": [0, 1, 3, 4], "ends": [1, 2, 4, 5]}
    inputs = replace(inputs, axes={"text": {**pieces, "tokens": ["a", "b", "c", "a "]}})
    records = examine(loaded, inputs, links=[("ca", "ab")])
    asked = [r for r in of(records, "link") if r.values["asked"]]
    weights = weights_of(loaded, inputs)
    for record in asked:
        block = weights[record.where["id"]][record.where["head"], 2:4, 0:2]
        assert record.values["weight"] == pytest.approx(float(block.sum(-1).mean()), abs=1e-6)
    assert asked


def test_a_causal_model_that_leaks_has_hidden_mass():
    """The model is declared causal; its second layer sees everything."""

    class Leaky(Toy):
        def forward(self, input_ids):
            x = self.embedding(input_ids)
            for mask, layer in zip((causal(), None), self.layers, strict=True):
                x = x + layer(x, mask=mask)
            return x

    sound, inputs = toy()
    assert all(r.values["hidden_mass"] == 0.0 for r in of(examine(sound, inputs), "head"))
    torch.manual_seed(0)
    records = examine(replace(sound, model=Leaky().eval()), inputs)
    assert all(r.values["hidden_mass"] == 0.0 for r in of(records, "head", id="self/0"))
    assert all(r.values["hidden_mass"] > 0.1 for r in of(records, "head", id="self/1"))


def test_token_ids_and_padding_reach_the_statistics():
    loaded, inputs = toy()  # a b c a b c d
    weights = weights_of(loaded, inputs)
    for record in of(examine(loaded, inputs), "head"):
        p = weights[record.where["id"]][record.where["head"]]
        copies = [float(p[3, 0]), float(p[4, 1]), float(p[5, 2])]
        assert record.values["duplicate_token"] == pytest.approx(sum(copies) / 3, abs=1e-6)
        assert record.values["rows"] == 7
    # Where the mask cannot tell (a decoder reading a sound), the axis says which rows are real.
    torch.manual_seed(0)
    layer = MultiHeadAttention(16, 4).eval()

    class Cross(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder_attn = layer

        def forward(self, x, context):
            return self.encoder_attn(x, context)

    query = {**text_axis("a b c"), "real": [1, 1, 0]}
    crossed = replace(
        inputs,
        axes={"text": query, "sound": text_axis("a b c d")},
        stacks={"": "text", "encoder": "sound"},
        kwargs={},
        args=(torch.randn(1, 3, 16), torch.randn(1, 4, 16)),
    )
    records = examine(replace(loaded, model=Cross().eval()), crossed)
    assert {r.values["attention"] for r in of(records, "attention")} == {"cross"}
    assert all(r.values["rows"] == 2 for r in of(records, "head"))


def test_importance_is_added_to_the_heads_where_it_is_asked_for(tmp_path):
    """Of a head's own loss gradient, by a mask on its output; and the page's table gets it."""
    save_llama(tmp_path)
    loaded = load(tmp_path)
    inputs = loaded.prepare(text="maya placed the book , she left")
    plain = examine(loaded, inputs)
    records = examine(loaded, inputs, importance=True)
    heads = of(records, "head")
    assert len(heads) == 12 and not any("importance" in r.values for r in plain)
    # Michel et al., equation 2: the derivative of the loss by a factor on the head's output.
    ids = inputs.kwargs["input_ids"]
    for layer, block in enumerate(loaded.model.model.layers):
        factors = torch.ones(6, requires_grad=True)
        hook = block.self_attn.o_proj.register_forward_pre_hook(
            lambda _module, args, by=factors: (args[0] * by.repeat_interleave(4),)
        )
        loss = loaded.model(input_ids=ids, labels=ids).loss
        hook.remove()
        (grad,) = torch.autograd.grad(loss, factors)
        wanted = grad.abs() / grad.norm()
        got = [r.values["importance"] for r in of(heads, "head", id=f"self/{layer}")]
        assert got == pytest.approx(wanted.tolist(), rel=1e-3)
    without = [{k: v for k, v in r.values.items() if k != "importance"} for r in heads]
    assert repr(without) == repr([dict(r.values) for r in of(plain, "head")])
    data = payload(collect(records))
    assert len(data["modules"][0]["stats"]["importance"]) == 6
    words = replace(inputs, kwargs={"input_ids": ids[:, :1]})
    with pytest.raises(BadInput, match="at least 2 tokens to predict one, got 1"):
        examine(loaded, words, importance=True)
    with pytest.raises(BadInput, match="causal language models; toy is of kind encoder"):
        examine(replace(toy()[0], kind="encoder"), toy()[1], importance=True)


def test_a_rollout_is_of_all_layers_and_is_drawn_from_records(tmp_path):
    save_bert(tmp_path)
    loaded = load(tmp_path)
    inputs = loaded.prepare(text="maya placed the book , she left")
    records = examine(loaded, inputs, rollout=["she", "[CLS]"])
    she, first = of(records, "rollout")
    assert she.where["query"] == 6 and first.where["query"] == 0
    assert she.values["layers"] == 2 and she.values["tokens"] == 1
    # The whole matrices: half of what came in, half of what the heads read on average.
    with watch(loaded.model) as seen:
        loaded.run(inputs)
    rolled = torch.eye(9).double()
    for item in seen:
        rolled = (0.5 * torch.eye(9) + 0.5 * item.weights()[0].mean(0)).double() @ rolled
    for record in (she, first):
        assert record.values["shares"] == pytest.approx(
            rolled[record.where["query"]].tolist(), 1e-4
        )
    data = payload(collect(records))
    assert [one["text"] for one in data["rollouts"]] == ["she", "[CLS]"]
    assert sum(data["rollouts"][0]["shares"]) == pytest.approx(1, abs=1e-3)
    assert payload(collect(examine(loaded, inputs)))["rollouts"] == []
    with pytest.raises(BadInput, match="--rollout: 'zebra' is not in the input"):
        examine(loaded, inputs, rollout=["zebra"])
    with pytest.raises(BadInput, match=r"wanted a model with an encoder, .* is of kind causal"):
        examine(*toy(), rollout=["a"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"shares": [0.5]}, "wanted one for each of 9 tokens"),
        ({"shares": [float("nan")] * 9}, "wanted finite numbers, not below 0"),
        ({"shares": "many"}, "shares: wanted a list, got str"),
        ({"tokens": 0}, "tokens = 0; wanted a whole number above 0"),
        ({"query": 9}, "query 9 of 9 tokens"),
        ({"axis": "?"}, "no 'axis' record of this name"),
    ],
)
def test_a_damaged_rollout_is_one_line(change, says, tmp_path):
    save_bert(tmp_path)
    loaded = load(tmp_path)
    *others, good = examine(
        loaded, loaded.prepare(text="maya placed the book , she left"), rollout=["she"]
    )
    place = {name: change.get(name, value) for name, value in good.where.items()}
    values = {name: change.get(name, value) for name, value in good.values.items()}
    with pytest.raises(BadFile, match=re.escape(says)):
        collect([*others, Record("rollout", place, values)])
