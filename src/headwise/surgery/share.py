"""Fewer key/value heads: multi-head to grouped-query or multi-query attention, by mean-pooling the
key and value projections of a group (Ainslie et al. 2023, arXiv 2305.13245, section 2.1)."""

from __future__ import annotations

import copy
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from headwise.errors import BadInput
from headwise.surgery.families import Site, cut, rows, sites
from headwise.surgery.shape import note

Model = TypeVar("Model", bound=nn.Module)


def share_kv(
    model: Model,
    num_kv_heads: int,
    *,
    by: Literal["mean", "similar"] = "mean",
    in_place: bool = False,
) -> Model:
    """The model with `num_kv_heads` key/value heads in every layer; a copy, unless `in_place`.

    Key and value projections of the heads of a group become their mean. by="mean" groups
    neighbours; by="similar" first reorders the heads so that those whose key and value weights
    have the largest cosine stand together (query heads and output columns move along, which alone
    changes nothing). Equal to the original where the heads of a group are already equal.

    Headwise layers and Llama-like models really shrink, projections and cache. Transformers'
    GPT-2, BERT, ViT, T5 and Whisper have no grouped heads: there each head of a group gets the
    mean, so quality is that of the shared model while the cache keeps its size.

    Raises:
        BadInput: a count that does not divide a layer's key/value heads, an unknown `by`.
    """
    if by not in ("mean", "similar"):
        raise BadInput(f"share_kv: by={by!r}; use 'mean' or 'similar'")
    for site in sites(model):
        if num_kv_heads < 1 or site.kv_heads % num_kv_heads:
            raise BadInput(
                f"share_kv: num_kv_heads={num_kv_heads} does not divide the {site.kv_heads} "
                f"key/value heads of layer {site.name}"
            )
    model = model if in_place else copy.deepcopy(model)
    for site in sites(model):
        _share(site, num_kv_heads, by)
    if any(site.family == "llama" for site in sites(model)):
        note(model)  # elsewhere no shape has changed
    return model


def _share(site: Site, count: int, by: str) -> None:
    size = site.kv_heads // count
    if size == 1:
        return
    order = _similar(site, count) if by == "similar" else list(range(site.kv_heads))
    if site.family in ("llama", "headwise"):
        if order != sorted(order):
            _reorder(site, order)
        for name, width in (("k", site.head_dim), ("v", site.value_dim)):
            linear = site.projections[name]
            _pool(linear, width, [[g * size + i for i in range(size)] for g in range(count)])
            cut(linear, rows(range(0, count * size, size), width), 0)
        if site.family == "llama":
            site.module.num_key_value_groups = site.heads // count
        else:
            site.module.num_kv_heads = count
        return
    groups = [order[g * size : (g + 1) * size] for g in range(count)]
    if site.family == "gpt2":
        for part in (1, 2):
            _pool_tensors(site.module.c_attn.weight.t(), site.head_dim, groups, part * site.heads)
            _pool_tensors(site.module.c_attn.bias, site.head_dim, groups, part * site.heads)
        return
    for name in ("k", "v"):
        _pool(site.projections[name], site.head_dim, groups)


def _pool(linear: Any, width: int, groups: list[list[int]]) -> None:
    _pool_tensors(linear.weight, width, groups, 0)
    if linear.bias is not None:
        _pool_tensors(linear.bias, width, groups, 0)


def _pool_tensors(weight: Tensor, width: int, groups: list[list[int]], first: int) -> None:
    """Every head of a group gets the group's mean; heads count from `first`."""
    with torch.no_grad():
        for group in groups:
            at = [slice((first + h) * width, (first + h + 1) * width) for h in group]
            mean = torch.stack([weight[s].double() for s in at]).mean(0).to(weight.dtype)
            for s in at:
                weight[s] = mean


def _weights(site: Site) -> Tensor:
    """(kv heads, features): key and value weights of each head, each of unit length."""
    if site.family == "gpt2":
        _, key, value = site.module.c_attn.weight.detach().t().chunk(3)
    else:
        key, value = (site.projections[name].weight.detach() for name in "kv")
    flat = [w.double().reshape(site.kv_heads, -1) for w in (key, value)]
    return torch.cat([nn.functional.normalize(w, dim=-1) for w in flat], -1)


def _similar(site: Site, count: int) -> list[int]:
    """Heads in an order whose equal parts are groups: the first free head takes its nearest."""
    features = _weights(site)
    likeness = features @ features.t()
    free, order = list(range(site.kv_heads)), []
    size = site.kv_heads // count
    while free:
        group = [free.pop(0)]
        while len(group) < size:
            best = max(free, key=lambda h: float(likeness[h, group].mean()))
            free.remove(best)
            group.append(best)
        order += group
    return order


def _reorder(site: Site, order: list[int]) -> None:
    """Whole groups move, by the function that takes heads out: it keeps them in a given order."""
    from headwise.surgery.prune import keep

    keep(site, order)
