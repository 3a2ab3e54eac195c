"""What a changed model's config says, and how the model is saved and loaded again.

Where transformers' own config can say the new head counts (every layer alike, a family with a
head_dim in its config) they stand there, and `from_pretrained` reads the model. Where it cannot
(uneven layers, or BERT, GPT-2 and Whisper, which derive head_dim from the head count) the counts
stand in `config.headwise_heads` = {module path: [heads, kv heads]} and `headwise.surgery.load`
reads it; there plain `from_pretrained` stops at the weights' shapes, it never loads them wrong.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from headwise._extras import require
from headwise.errors import BadFile
from headwise.surgery.families import Site, cut, rows, sites

ENTRY = "headwise_heads"


def note(model: nn.Module) -> None:
    """Write the head counts into the model's config, where it has one."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return
    found = sites(model)
    counts = {site.path: [site.heads, site.kv_heads] for site in found}
    alike = len({tuple(pair) for pair in counts.values()}) == 1
    family = found[0].family
    if alike and family in ("llama", "vit"):
        heads, kv_heads = next(iter(counts.values()))
        config.head_dim = found[0].head_dim
        config.num_attention_heads = heads
        if family == "llama":
            config.num_key_value_heads = kv_heads
        if hasattr(config, ENTRY):
            delattr(config, ENTRY)
        return
    setattr(config, ENTRY, counts)


def own_bias(model: nn.Module) -> None:
    """Give every T5 attention module its own position bias, so that heads may differ by layer.

    T5 computes the bias in the first layer of a stack and hands it on. Here each self-attention
    gets a copy of that table, and what is handed on is dropped before the layer sees it.
    """
    first: dict[str, nn.Embedding] = {}
    for site in sites(model):
        if site.family != "t5":
            continue
        m, stack = site.module, site.name.split("/")[0]
        if getattr(m, "_headwise_own_bias", False):
            continue
        if m.has_relative_attention_bias:
            first[stack] = m.relative_attention_bias
        elif stack in first:
            table = first[stack]
            m.relative_attention_bias = nn.Embedding(
                table.num_embeddings,
                table.embedding_dim,
                device=table.weight.device,
                dtype=table.weight.dtype,
            )
            m.relative_attention_bias.weight.data.copy_(table.weight.data)
            m.has_relative_attention_bias = True
        m._headwise_own_bias = True
        m.register_forward_pre_hook(_drop_bias, with_kwargs=True)


def _drop_bias(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, "position_bias": None}


def load(directory: str | Path, *, dtype: Any = None) -> nn.Module:
    """A model that was changed here and written by `save_pretrained`, in eval mode.

    Reads safetensors and JSON only. Models without uneven heads load too.

    Raises:
        BadFile: no config.json, no safetensors, a class transformers lacks, or weights
        that do not fit.
    """
    from headwise.surgery.prune import keep

    transformers = require("transformers", extra="hf", purpose="headwise.surgery.load")
    path = Path(directory)
    try:
        raw = json.loads((path / "config.json").read_text(encoding="utf-8"))
        kind = getattr(transformers, (raw.get("architectures") or ["?"])[0])
    except (OSError, ValueError, AttributeError) as error:
        raise BadFile(f"surgery.load: {path}: no readable config.json: {error}") from None
    counts = raw.get(ENTRY)
    if counts is None:
        model: nn.Module = kind.from_pretrained(path, dtype=dtype, use_safetensors=True)
        return model.eval()

    def build(self: Any, config: Any, *args: Any, **options: Any) -> None:
        kind.__init__(self, config, *args, **options)
        own_bias(self)
        for site in sites(self):
            _resize(site, counts.get(site.path), path, keep)

    # transformers builds the model, names and ties the weights; only the shapes are ours.
    resized: Any = type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})
    try:
        model, told = resized.from_pretrained(
            path, dtype=dtype, use_safetensors=True, output_loading_info=True
        )
    except (OSError, RuntimeError) as error:
        raise BadFile(f"surgery.load: {path}: {str(error).strip().splitlines()[0]}") from None
    lost = sorted(told["missing_keys"]) + sorted(told["unexpected_keys"])
    if lost:
        raise BadFile(f"surgery.load: {path}: weights missing or not wanted: {lost[:3]}")
    model.__class__ = kind
    restored: nn.Module = model.eval()
    return restored


def _resize(site: Site, pair: Any, path: Path, keep: Any) -> None:
    ok = isinstance(pair, list) and len(pair) == 2 and all(isinstance(n, int) for n in pair)
    if not ok or not 0 < pair[1] <= site.kv_heads:
        raise BadFile(f"surgery.load: {path}: {ENTRY} does not give heads for {site.path}: {pair}")
    group, rest = divmod(pair[0], pair[1])
    if site.family == "llama" and not rest and group % (site.heads // site.kv_heads) == 0:
        # Pruned unevenly and shared too: wider groups over fewer key/value heads.
        keep(site, range(pair[0] // (site.heads // site.kv_heads)))
        for name in ("k", "v"):
            cut(site.projections[name], rows(range(pair[1]), site.head_dim), 0)
        site.module.num_key_value_groups = group
        return
    if rest or group != site.heads // site.kv_heads:
        raise BadFile(f"surgery.load: {path}: {site.path} has {pair}, groups of another size")
    keep(site, range(pair[1]))
