"""headwise: multi-head attention that is right, fast, visible and decidable."""

from headwise.accelerated import accelerated
from headwise.attention import attention, merge
from headwise.backends import choose, explain
from headwise.cache import KVCache, RollingKVCache
from headwise.call import AttentionCall
from headwise.errors import HeadwiseError
from headwise.int8_cache import QuantizedKVCache
from headwise.layer import MultiHeadAttention
from headwise.masks import (
    Mask,
    causal,
    documents,
    everything,
    hide,
    keep,
    padding,
    prefix,
    window,
)
from headwise.options import AttentionOptions
from headwise.positions import ALiBi, RelativeBias, Rotary
from headwise.record import Record
from headwise.statistics import HeadStatistics, head_statistics
from headwise.watch import watch

__version__ = "0.1.0"

__all__ = [
    "ALiBi",
    "AttentionCall",
    "AttentionOptions",
    "HeadStatistics",
    "HeadwiseError",
    "KVCache",
    "Mask",
    "MultiHeadAttention",
    "QuantizedKVCache",
    "Record",
    "RelativeBias",
    "RollingKVCache",
    "Rotary",
    "accelerated",
    "attention",
    "causal",
    "choose",
    "documents",
    "everything",
    "explain",
    "head_statistics",
    "hide",
    "keep",
    "merge",
    "padding",
    "prefix",
    "watch",
    "window",
]


def _draw(seen: object) -> str:
    """How a notebook shows what a watch saw. The page's libraries load when one is shown."""
    from headwise.examine import records_of
    from headwise.report import overview
    from headwise.watch import Seen

    assert isinstance(seen, Seen)
    return overview(records_of(seen))


def _register_view() -> None:
    from headwise.watch import seen

    seen.html_view = _draw


_register_view()
