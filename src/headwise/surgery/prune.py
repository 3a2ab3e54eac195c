"""Heads taken out: the weights shrink, and the output is that of the full model with those heads'
contributions zeroed (Michel et al. 2019, arXiv 1905.10650)."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from headwise.errors import BadInput
from headwise.positions import ALiBi, RelativeBias
from headwise.surgery.families import Site, cut, cut_conv, pick, rows, sites
from headwise.surgery.shape import note, own_bias

Model = TypeVar("Model", bound=nn.Module)


def prune_heads(
    model: Model, heads: Mapping[int | str, Iterable[int]], *, in_place: bool = False
) -> Model:
    """The model without some heads; a copy, unless `in_place`.

    heads: {layer: heads to remove}. A layer is its number, or a name such as "decoder.cross/0"
    where a model has more than one stack, or a module path. In a layer with fewer key/value heads
    than query heads the numbers are those of key/value heads, and each goes with its whole group.

    Outputs equal the full model's with those heads' contributions to the output projection zeroed,
    to rounding. The config follows, see `headwise.surgery.shape`.

    Raises:
        BadInput: an unknown layer, a head out of range or named twice, all heads of a layer, a
        family that cannot be changed, ALiBi (its slopes depend on the number of heads).
    """
    found = sites(model)
    chosen: dict[str, list[int]] = {}
    for layer, numbers in heads.items():
        site = pick(found, layer)
        if site.name in chosen:
            raise BadInput(f"prune_heads: layer {site.name} is given twice")
        chosen[site.name] = _kept(site, list(numbers))
    model = model if in_place else copy.deepcopy(model)
    if found[0].family == "t5":
        own_bias(model)
    changed = {site.name: site for site in sites(model)}
    for name, kept in chosen.items():
        keep(changed[name], kept)
    note(model)
    return model


def _kept(site: Site, numbers: list[int]) -> list[int]:
    units, word = site.kv_heads, "key/value heads" if site.kv_heads < site.heads else "heads"
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < units:
            raise BadInput(
                f"prune_heads: layer {site.name} has {word} 0 to {units - 1}, got {number!r}"
            )
    if len(set(numbers)) < len(numbers):
        raise BadInput(f"prune_heads: layer {site.name}: a head is named twice in {numbers}")
    if len(numbers) == units:
        raise BadInput(
            f"prune_heads: layer {site.name}: all {units} {word} would go, and a layer needs at "
            "least one; leave one, or remove the layer itself"
        )
    if site.family == "headwise" and isinstance(site.module.position, ALiBi):
        raise BadInput(
            f"prune_heads: layer {site.name} has ALiBi, whose slopes depend on the number of heads"
        )
    return [number for number in range(units) if number not in numbers]


def keep(site: Site, units: Sequence[int]) -> None:
    """Shrink one attention module, in place, to these key/value heads and their query heads."""
    group, head, value = site.heads // site.kv_heads, site.head_dim, site.value_dim
    query = [unit * group + i for unit in units for i in range(group)]
    m: Any = site.inner
    if site.family == "gpt2":
        width = site.heads * head
        index = rows(query, head)
        cut_conv(m.c_attn, torch.cat([index, index + width, index + 2 * width]), 0)
        cut_conv(m.c_proj, index, 1)
        m.split_size = len(index)
    else:
        parts = site.projections
        cut(parts["q"], rows(query, head), 0)
        cut(parts["k"], rows(units, head), 0)
        cut(parts["v"], rows(units, value), 0)
        cut(site.output, rows(query, value), 1)
    count = len(query)
    if site.family == "headwise":
        if m.gate_proj is not None:
            cut(m.gate_proj, rows(query, value), 0)
        if m.sinks is not None:
            m.sinks = nn.Parameter(m.sinks.detach()[query].clone(), m.sinks.requires_grad)
        if isinstance(m.position, RelativeBias):
            # One table may serve several layers, so this layer gets its own.
            m.position = copy.deepcopy(m.position)
            m.position.weight = nn.Parameter(m.position.weight.detach()[:, query].clone())
            m.position.num_heads = count
        m.num_kv_heads = len(units)
    if site.family == "bert":
        m.all_head_size = count * head
    if site.family == "t5":
        _prune_t5(m, query)
    for name in ("num_heads", "num_attention_heads", "n_heads"):
        if hasattr(m, name):
            setattr(m, name, count)


def _prune_t5(module: Any, heads: Sequence[int]) -> None:
    """T5 passes one position bias from layer to layer; `shape.own_bias` has given each its own."""
    module.inner_dim = len(heads) * module.key_value_proj_dim
    if module.has_relative_attention_bias:
        table = module.relative_attention_bias
        table.weight = nn.Parameter(table.weight.detach()[:, heads].clone())
        table.embedding_dim = len(heads)
