"""What an attention function or layer declares: its layout, its mask, its head counts.

A check compares what the thing does with what is declared here. What is not declared is not
checked, and the check says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn

from headwise.layer import MultiHeadAttention
from headwise.rotary import Rotary

Layout = Literal["bhld", "blhd", "ble", "lbe"]
MaskKind = Literal["keep", "hide", "keep01", "additive", "headwise"]

ARGUMENTS = ("mask", "padding", "causal", "window", "scale", "bias", "softcap", "sinks", "grouped")
AXES = ("ls", "bls", "bhls", "b1ls", "1hls", "11ls", "b11s", "(bh)ls")


@dataclass(frozen=True)
class Projections:
    """Where a layer keeps what the definition needs: dotted names of its submodules.

    query, key, value   three linear layers; or `fused`, one layer that gives all three
    output              the projection of the joined heads; None: there is none
    fused               a submodule, or the stem of parameters `<stem>_weight` and `<stem>_bias`
    order               order of the thirds in `fused`
    query_norm, key_norm   norms over the features of a head, before rotary
    rotary              the rotary embedding, counted from position 0
    sinks               a parameter with one logit a query head
    """

    query: str | None = None
    key: str | None = None
    value: str | None = None
    output: str | None = None
    fused: str | None = None
    order: str = "qkv"
    query_norm: str | None = None
    key_norm: str | None = None
    rotary: Rotary | None = None
    sinks: str | None = None

    def __post_init__(self) -> None:
        apart = [self.query, self.key, self.value]
        if (self.fused is None) == any(name is None for name in apart):
            raise ValueError(
                "Projections: name query=, key= and value=, or fused= for one layer that gives "
                f"all three; got query={self.query!r}, key={self.key!r}, value={self.value!r}, "
                f"fused={self.fused!r}"
            )
        if sorted(self.order) != ["k", "q", "v"]:
            raise ValueError(f"Projections: order is made of q, k and v, got {self.order!r}")


@dataclass(frozen=True, eq=False)
class Signature:
    """How to call an attention function or layer, and what it promises.

    layout     of a function fn(q, k, v): "bhld" (batch, heads, length, dimension) or "blhd"; of a
               layer: "ble" (batch, length, features) or "lbe"
    inputs     of a layer: "self" layer(x), "context" layer(x) and layer(x, context), or "qkv"
               layer(query, key, value)
    heads, kv_heads, head_dim   query heads (a layer's own; a function is tried with these), key and
               value heads (None: as many), features of a head
    width      features of a token in a layer; None: heads * head_dim
    value_dim  another width of values that the function takes; None: values are as wide as keys
    mask       what the mask argument means: "keep" (bool, True visible), "hide" (bool, True
               hidden), "keep01" (numbers, 1 visible), "additive" (0 and −inf), "headwise" (a
               headwise mask), or None: there is no such argument
    mask_axes  the shapes it takes, of "ls", "bls", "bhls", "b1ls", "1hls", "11ls", "b11s", "(bh)ls"
    padding    the same words as `mask` for a separate (batch, keys) padding argument
    causal     "end": the last query stands at the last key; "start": query 0 stands at key 0; None:
               never causal. With "causal" among the arguments it is a flag, else it always holds
    window     keys that a query looks back over, its own among them; needs causal
    scale, softcap   fixed numbers; scale None: 1/√head_dim
    arguments  keyword of each feature the caller may set: "mask", "padding", "causal", "window",
               "scale", "bias", "softcap", "sinks" (the name by which to pass it), "grouped" (a flag
               that must be set where kv_heads < heads)
    options    further keywords passed at each call
    empty_rows what a row with no visible key gives: "zeros" (before any output projection), or
               "nan" for one that is known to
    projections   of a layer; without them its numbers cannot be compared with the definition

    Raises:
        ValueError: words or numbers that do not go together.
    """

    layout: Layout = "bhld"
    inputs: Literal["self", "context", "qkv"] = "self"
    heads: int = 4
    kv_heads: int | None = None
    head_dim: int = 8
    width: int | None = None
    value_dim: int | None = None
    mask: MaskKind | None = None
    mask_axes: tuple[str, ...] = ("bhls", "b1ls", "11ls")
    padding: MaskKind | None = None
    causal: Literal["end", "start"] | None = None
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    arguments: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    empty_rows: Literal["zeros", "nan"] = "zeros"
    projections: Projections | None = None

    def __post_init__(self) -> None:
        _one_of("layout", self.layout, ("bhld", "blhd", "ble", "lbe"))
        _one_of("inputs", self.inputs, ("self", "context", "qkv"))
        kinds = ("keep", "hide", "keep01", "additive", "headwise", None)
        _one_of("mask", self.mask, kinds)
        _one_of("padding", self.padding, kinds)
        _one_of("causal", self.causal, ("end", "start", None))
        _one_of("empty_rows", self.empty_rows, ("zeros", "nan"))
        for name in self.arguments:
            _one_of("arguments", name, ARGUMENTS)
        for axes in self.mask_axes:
            _one_of("mask_axes", axes, AXES)
        if self.heads < 1 or self.heads % self.kv:
            raise ValueError(
                f"Signature: {self.heads} query heads cannot share {self.kv} key/value heads evenly"
            )
        for feature, declared in (("mask", self.mask), ("padding", self.padding)):
            if (declared is None) != (feature not in self.arguments):
                raise ValueError(
                    f"Signature: {feature}={declared!r} and arguments={dict(self.arguments)} do not"
                    f" go together; name the keyword, arguments={{{feature!r}: ...}}, and say what "
                    f"it means, {feature}="
                )
        if self.causal is None and ("causal" in self.arguments or self.looks_back):
            raise ValueError(
                "Signature: a causal flag or a window needs causal='end' (the last query stands at "
                "the last key) or causal='start'"
            )
        if self.is_function and (self.projections is not None or self.inputs != "self"):
            raise ValueError(
                f"Signature: layout={self.layout!r} is a function of q, k, v; inputs= and "
                "projections= belong to a layer ('ble' or 'lbe')"
            )

    @property
    def is_function(self) -> bool:
        """fn(q, k, v) over heads, in contrast to a layer over features."""
        return self.layout in ("bhld", "blhd")

    @property
    def kv(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def features(self) -> int:
        return self.heads * self.head_dim if self.width is None else self.width

    @property
    def looks_back(self) -> bool:
        return self.window is not None or "window" in self.arguments

    @property
    def always_causal(self) -> bool:
        return self.causal is not None and "causal" not in self.arguments

    @property
    def rectangular(self) -> bool:
        """Whether it takes more or fewer keys than queries."""
        return self.is_function or self.inputs != "self"

    def but(self, **changes: object) -> Signature:
        """The same signature with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


def _one_of(name: str, got: object, choices: tuple[object, ...]) -> None:
    if got not in choices:
        raise ValueError(f"Signature: {name} is one of {choices}, got {got!r}")


# --- ready signatures ----------------------------------------------------------------------------


def torch_sdpa() -> Signature:
    """`torch.nn.functional.scaled_dot_product_attention`: is_causal stands at the start."""
    return Signature(
        layout="bhld",
        heads=4,
        kv_heads=2,
        value_dim=5,
        mask="keep",
        mask_axes=("ls", "bhls", "b1ls", "1hls", "11ls", "b11s"),
        causal="start",
        arguments={
            "mask": "attn_mask",
            "causal": "is_causal",
            "scale": "scale",
            "grouped": "enable_gqa",
        },
    )


def torch_mha(module: nn.MultiheadAttention) -> Signature:
    """An `nn.MultiheadAttention`. Its rows without a key give NaN where weights are returned.

    Raises:
        TypeError: another class. ValueError: add_bias_kv or add_zero_attn, which add a key.
    """
    if not isinstance(module, nn.MultiheadAttention):
        raise TypeError(
            f"torch_mha: wanted a torch.nn.MultiheadAttention, got {type(module).__name__}"
        )
    if module.bias_k is not None or module.add_zero_attn:
        raise ValueError(
            "torch_mha: the module was built with add_bias_kv or add_zero_attn, an extra key that "
            "every query sees; the definition has none"
        )
    if not module.kdim == module.vdim == module.embed_dim:
        raise ValueError(
            f"torch_mha: kdim={module.kdim} and vdim={module.vdim} differ from embed_dim="
            f"{module.embed_dim}; compare MultiHeadAttention.from_torch(module) instead"
        )
    return Signature(
        layout="ble" if module.batch_first else "lbe",
        inputs="qkv",
        heads=module.num_heads,
        head_dim=module.head_dim,
        mask="hide",
        mask_axes=("ls", "(bh)ls"),
        padding="hide",
        arguments={"mask": "attn_mask", "padding": "key_padding_mask"},
        empty_rows="nan",
        projections=Projections(fused="in_proj", output="out_proj"),
    )


def headwise_attention(backend: str | None = None) -> Signature:
    """`headwise.attention`, on the backend named."""
    names = ("mask", "scale", "bias", "softcap", "sinks")
    return Signature(
        layout="bhld",
        heads=4,
        kv_heads=2,
        value_dim=5,
        mask="headwise",
        mask_axes=("ls", "bhls", "b1ls", "1hls", "11ls", "b11s"),
        arguments={name: name for name in names},
        options={"backend": backend},
    )


def headwise_layer(layer: MultiHeadAttention) -> Signature:
    """A `headwise.MultiHeadAttention`: heads, norms, rotary, sinks and window are read from it.

    Raises:
        TypeError: another class.
        ValueError: a layer with what the check's definition does not build: ALiBi, a relative bias,
            an output gate, values of another width, a window that looks ahead, or kdim and vdim.
    """
    if not isinstance(layer, MultiHeadAttention):
        raise TypeError(
            f"headwise_layer: wanted a headwise.MultiHeadAttention, got {type(layer).__name__}"
        )
    options = layer.options
    odd = {
        f"position={type(layer.position).__name__}": layer.position is not None
        and not isinstance(layer.position, Rotary),
        "options.output_gate": options.output_gate,
        "options.value_head_dim": layer.value_head_dim != layer.head_dim,
        f"options.window={options.window}": options.window is not None and options.reach is None,
        "kdim or vdim": not layer.kdim == layer.vdim == layer.embed_dim,
    }
    for name, present in odd.items():
        if present:
            raise ValueError(
                f"headwise_layer: {name} is not part of the check's definition; layer.trace(x) "
                "holds the float64 definition of this layer"
            )
    ordered = options.window is not None or layer.position is not None
    return Signature(
        layout="ble",
        inputs="self" if ordered else "context",
        heads=layer.num_heads,
        kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        width=layer.embed_dim,
        mask="headwise",
        causal=None if options.window is None else "end",
        window=options.reach,
        scale=options.scale,
        softcap=options.softcap,
        arguments={"mask": "mask"},
        projections=Projections(
            query="q_proj",
            key="k_proj",
            value="v_proj",
            output="out_proj",
            query_norm="q_norm" if options.qk_norm else None,
            key_norm="k_norm" if options.qk_norm else None,
            rotary=layer.position if isinstance(layer.position, Rotary) else None,
            sinks="sinks" if options.sinks else None,
        ),
    )
