"""What a study varies: the shape of a model's attention, and its size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headwise.errors import BadInput


@dataclass(frozen=True)
class Design:
    """The sizes of a transformer that a task builds.

    Args:
        embed_dim: features of a token.
        num_heads: query heads.
        num_kv_heads: key/value heads; None: as many as num_heads. It divides num_heads.
        head_dim: features of a head; None: embed_dim / num_heads, which must be whole.
        layers: blocks of a stack.
        feedforward: features inside a block's second half; None: 4 × embed_dim.
        dropout: share of activations dropped while training, in [0, 1).

    Raises:
        BadInput: numbers that do not fit together.
    """

    embed_dim: int = 128
    num_heads: int = 4
    num_kv_heads: int | None = None
    head_dim: int | None = None
    layers: int = 2
    feedforward: int | None = None
    dropout: float = 0.1

    def __post_init__(self) -> None:
        for name in ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "layers", "feedforward"):
            value = getattr(self, name)
            if value is None and name in ("num_kv_heads", "head_dim", "feedforward"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise BadInput(f"design: {name} must be a whole number from 1, got {value!r}")
        if not 0.0 <= self.dropout < 1.0:
            raise BadInput(f"design: dropout must lie in [0, 1), got {self.dropout}")
        if self.head_dim is None and self.embed_dim % self.num_heads:
            raise BadInput(
                f"design: {self.num_heads} heads do not divide embed_dim {self.embed_dim} "
                f"({self.embed_dim} / {self.num_heads} = {self.embed_dim / self.num_heads:.2f}); "
                "give head_dim, or another number of heads"
            )
        if self.num_heads % self.kv_heads:
            raise BadInput(
                f"design: {self.kv_heads} key/value heads do not divide {self.num_heads} heads"
            )

    @property
    def kv_heads(self) -> int:
        """Key/value heads, counted."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def width(self) -> int:
        """Features of a head, counted."""
        return self.embed_dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def hidden(self) -> int:
        """Features inside a block's second half, counted."""
        return 4 * self.embed_dim if self.feedforward is None else self.feedforward

    @property
    def label(self) -> str:
        """In a few signs: "4 heads × 32", "8 heads × 16, 2 KV"."""
        heads = f"{self.num_heads} head{'' if self.num_heads == 1 else 's'} × {self.width}"
        return heads if self.kv_heads == self.num_heads else f"{heads}, {self.kv_heads} KV"

    def kv_bytes_per_token(self, bytes_per_number: int = 4) -> int:
        """Bytes that a token adds to the key/value caches of all layers."""
        return 2 * self.layers * self.kv_heads * self.width * bytes_per_number

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Design:
        """From `to_dict`.

        Raises:
            BadInput: an unknown field, or numbers that do not fit.
        """
        unknown = set(fields) - set(cls.__dataclass_fields__)
        if unknown:
            raise BadInput(f"design: unknown fields {', '.join(sorted(unknown))}")
        return cls(**fields)
