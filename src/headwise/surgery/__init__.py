"""Changing a model's heads with proof: prune them, share keys and values, save and load."""

from headwise.surgery.families import Site, sites
from headwise.surgery.imports import from_hf
from headwise.surgery.prune import prune_heads
from headwise.surgery.shape import load
from headwise.surgery.share import share_kv
from headwise.surgery.trial import Trial, language, token_losses
from headwise.surgery.what_if import Variant, importance, what_if

__all__ = [
    "Site",
    "Trial",
    "Variant",
    "from_hf",
    "importance",
    "language",
    "load",
    "prune_heads",
    "share_kv",
    "sites",
    "token_losses",
    "what_if",
]
