"""Exact statistics of every attention head, streamed in tiles: never a queries × keys map.

Definitions and sources: `HeadStatistics`. Attention maps are clues, never explanations.
"""

from headwise.statistics.bounds import Cost, entropy_lower_bound
from headwise.statistics.heads import HeadStatistics, head_statistics
from headwise.statistics.labels import Thresholds, clusters, collapse_warning, labels, sink_rate
from headwise.statistics.records import records
from headwise.statistics.sampled import Estimate, SampledStatistics, sampled_statistics

__all__ = [
    "Cost",
    "Estimate",
    "HeadStatistics",
    "SampledStatistics",
    "Thresholds",
    "clusters",
    "collapse_warning",
    "entropy_lower_bound",
    "head_statistics",
    "labels",
    "records",
    "sampled_statistics",
    "sink_rate",
]
