"""Exact statistics of every attention head, streamed in tiles: never a queries × keys map.

Definitions and sources: `HeadStatistics`. Attention maps are clues, never explanations.
"""

from headwise.statistics.bounds import Cost, entropy_lower_bound
from headwise.statistics.heads import HeadStatistics, head_statistics

__all__ = ["Cost", "HeadStatistics", "entropy_lower_bound", "head_statistics"]
