"""Where a model keeps its heads: one `Site` per attention module, whatever its family calls them.

A site is recognised by its parts, not by a table of model names, and only where every part is
known: an attention module with something else in it (learned sinks, a norm over all heads) is
refused by name, because changing its heads would silently change more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import BadInput
from headwise.layer import MultiHeadAttention

FAMILIES = (
    "headwise layers, Llama-like and ViT-like (q_proj, k_proj, v_proj, o_proj), GPT-2, BERT-like, "
    "T5, Whisper"
)
_PROJ = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "rotary_emb"}


@dataclass(frozen=True, eq=False)
class Site:
    """One attention module. name: "self/3", "decoder.cross/0", as `watch` names it. path: dotted
    path of `module` in the model. family: "headwise", "llama", "vit", "gpt2", "bert", "t5",
    "whisper"."""

    name: str
    path: str
    module: Any
    family: str

    @property
    def inner(self) -> Any:
        """The module that holds the head count: BERT's `self`, else the module itself."""
        return self.module.self if self.family == "bert" else self.module

    @property
    def head_dim(self) -> int:
        m = self.inner
        for name in ("head_dim", "attention_head_size", "key_value_proj_dim"):
            if hasattr(m, name):
                return int(getattr(m, name))
        raise BadInput(f"{self.path}: {type(m).__name__} does not say its head_dim")

    @property
    def value_dim(self) -> int:
        return int(getattr(self.inner, "value_head_dim", self.head_dim))

    @property
    def heads(self) -> int:
        """Query heads, from the width of the output projection's input."""
        out = self.output
        width = out.weight.shape[0] if self.family == "gpt2" else out.in_features
        return int(width) // self.value_dim

    @property
    def kv_heads(self) -> int:
        if self.family == "gpt2":
            return self.heads
        return int(self.projections["k"].out_features) // self.head_dim

    @property
    def output(self) -> Any:
        """The output projection."""
        m = self.module
        if self.family == "bert":
            return m.output.dense
        return getattr(
            m,
            {"gpt2": "c_proj", "t5": "o", "headwise": "out_proj", "whisper": "out_proj"}.get(
                self.family, "o_proj"
            ),
        )

    @property
    def projections(self) -> dict[str, Any]:
        """The query, key and value projections by "q", "k", "v"; not for GPT-2, which fuses."""
        names = {"bert": ("query", "key", "value"), "t5": ("q", "k", "v")}.get(
            self.family, ("q_proj", "k_proj", "v_proj")
        )
        return {k: getattr(self.inner, name) for k, name in zip("qkv", names, strict=True)}


def _family(module: nn.Module) -> str | None:
    if isinstance(module, MultiHeadAttention):
        return "headwise"
    names = {name for name, _ in module.named_children()}
    own = {name for name, _ in module.named_parameters(recurse=False)}
    kind = type(module).__name__
    if {"q_proj", "k_proj", "v_proj"} <= names:
        norms = [getattr(module, n, None) for n in ("q_norm", "k_norm")]
        odd = any(
            n is not None and sum(p.numel() for p in n.parameters()) != module.head_dim
            for n in norms
        )
        if "o_proj" in names and names <= _PROJ and not own and not odd:
            if hasattr(module, "num_key_value_groups"):
                return "llama"
            return "vit" if hasattr(module, "num_attention_heads") else None
        whisper = names == {"q_proj", "k_proj", "v_proj", "out_proj"} and not own
        return "whisper" if whisper and kind == "WhisperAttention" else None
    if kind == "GPT2Attention" and "q_attn" not in names:
        return "gpt2"
    if {"self", "output"} <= names:
        inner = {name for name, _ in module.self.named_children()}  # type: ignore[union-attr]
        ok = inner == {"query", "key", "value", "dropout"} and hasattr(module.output, "dense")
        return "bert" if ok and hasattr(module.self, "attention_head_size") else None
    if kind == "T5Attention":
        return "t5"
    return None


def sites(model: nn.Module) -> list[Site]:
    """Every attention module of `model`, in its order.

    Raises:
        BadInput: no attention module of a known family, or one beside them that is not.
    """
    both = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    found: list[Site] = []
    strange: list[str] = []
    counts: dict[str, int] = {}
    inside: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{outer}." if outer else "") for outer in inside):
            continue
        family = _family(module)
        if family is None:
            names = {name for name, _ in module.named_children()}
            if type(module).__name__.endswith("Attention") and names & {
                *_PROJ,
                "query",
                "q",
                "c_attn",
                "qkv",
                "query_key_value",
                "Wqkv",
                "in_proj",
            }:
                strange.append(type(module).__name__)
            continue
        inside.append(path)
        cross = any(w in path for w in ("cross", "EncDec", "encoder_attn"))
        stack = "decoder." if "decoder" in path.split(".") else "encoder."
        label = f"{stack if both else ''}{'cross' if cross else 'self'}"
        found.append(Site(f"{label}/{counts.get(label, 0)}", path, module, family))
        counts[label] = counts.get(label, 0) + 1
    if strange or not found:
        what = strange[0] if strange else f"{type(model).__name__} (no attention module found)"
        raise BadInput(f"surgery: {what} is not of a family whose heads can be changed: {FAMILIES}")
    return found


def pick(found: Sequence[Site], layer: int | str) -> Site:
    """The site of a layer number (models with one stack), a name such as "decoder.cross/0", or a
    module path.

    Raises:
        BadInput: there is none, with the names there are.
    """
    wanted = f"self/{layer}" if isinstance(layer, int) else layer
    for site in found:
        if wanted in (site.name, site.path):
            return site
    names = ", ".join(s.name for s in found[:4]) + (", …" if len(found) > 4 else "")
    raise BadInput(f"surgery: no layer {layer!r}; the {len(found)} layers are {names}")


def rows(heads: Sequence[int], width: int) -> Tensor:
    """Indices of the features of `heads`, each `width` wide, in order."""
    return torch.tensor([h * width + i for h in heads for i in range(width)], dtype=torch.long)


def cut(linear: Any, index: Tensor, axis: int) -> None:
    """Keep the outputs (axis 0) or inputs (axis 1) at `index` of an nn.Linear, in place."""
    if type(linear) is not nn.Linear:
        raise BadInput(
            f"surgery: a projection is a {type(linear).__name__}, wanted a plain nn.Linear; "
            "merge adapters and undo quantisation first"
        )
    index = index.to(linear.weight.device)
    linear.weight = _chosen(linear.weight, index, axis)
    if axis == 0:
        if linear.bias is not None:
            linear.bias = _chosen(linear.bias, index, 0)
        linear.out_features = len(index)
    else:
        linear.in_features = len(index)


def cut_conv(conv: Any, index: Tensor, axis: int) -> None:
    """The same for GPT-2's Conv1D, whose weight is (inputs, outputs)."""
    index = index.to(conv.weight.device)
    conv.weight = _chosen(conv.weight, index, 1 - axis)
    if axis == 0:
        conv.bias = _chosen(conv.bias, index, 0)
        conv.nf = len(index)
    else:
        conv.nx = len(index)


def _chosen(parameter: Any, index: Tensor, axis: int) -> nn.Parameter:
    data = parameter.detach().index_select(axis, index).clone()
    return nn.Parameter(data, requires_grad=parameter.requires_grad)
