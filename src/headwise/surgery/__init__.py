"""Changing a model's heads with proof: prune them, share keys and values, save and load."""

from headwise.surgery.families import Site, sites
from headwise.surgery.prune import prune_heads
from headwise.surgery.shape import load
from headwise.surgery.share import share_kv

__all__ = ["Site", "load", "prune_heads", "share_kv", "sites"]
