"""Exact statistics of every attention head, streamed in tiles: never a queries × keys map.

Definitions and sources: `HeadStatistics`. Attention maps are clues, never explanations.
"""

from headwise.statistics.bounds import Cost, entropy_lower_bound
from headwise.statistics.flow import gradient_attention, rollout_row
from headwise.statistics.heads import HeadStatistics, head_statistics
from headwise.statistics.importance import Importance, Projection, head_importance
from headwise.statistics.labels import Thresholds, clusters, collapse_warning, labels, sink_rate
from headwise.statistics.outputs import HeadOutputs, head_outputs
from headwise.statistics.records import records
from headwise.statistics.sampled import Estimate, SampledStatistics, sampled_statistics

__all__ = [
    "Cost",
    "Estimate",
    "HeadOutputs",
    "HeadStatistics",
    "Importance",
    "Projection",
    "SampledStatistics",
    "Thresholds",
    "clusters",
    "collapse_warning",
    "entropy_lower_bound",
    "gradient_attention",
    "head_importance",
    "head_outputs",
    "head_statistics",
    "labels",
    "records",
    "rollout_row",
    "sampled_statistics",
    "sink_rate",
]
