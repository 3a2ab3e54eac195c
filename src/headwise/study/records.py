"""A study as records: one for each design, one for the answer."""

from __future__ import annotations

import math

from headwise.record import Record
from headwise.study.judgement import Judgement
from headwise.study.trials import Results


def records(results: Results, judged: Judgement) -> list[Record]:
    """Records of kind "study" (a design), "study_baseline" and "study_answer"."""
    found = []
    for row in judged.rows:
        design = results.plan.designs[row.design]
        apart = row.difference
        speed = results.speed.get(row.design, {})
        found.append(
            Record(
                "study",
                {"task": results.plan.task, "design": design.label},
                {
                    "metric": results.metric,
                    "better": results.better,
                    "mean": row.mean,
                    "spread": None if math.isnan(row.spread) else row.spread,
                    "seeds": row.seeds,
                    "difference": None if apart is None else apart.mean,
                    "low": None if apart is None or math.isinf(apart.low) else apart.low,
                    "high": None if apart is None or math.isinf(apart.high) else apart.high,
                    "parameters": results.parameters[row.design] if results.parameters else None,
                    "kv_bytes": design.kv_bytes_per_token(4),
                    "latency": speed.get("latency"),
                    "decode": speed.get("decode"),
                    "train": speed.get("train"),
                    "unsteady": speed.get("unsteady"),
                    "best": row.design == judged.best,
                    "chosen": row.design == judged.smallest,
                },
            )
        )
    for name, value in results.baselines.items():
        found.append(
            Record("study_baseline", {"task": results.plan.task, "model": name}, {"mean": value})
        )
    found.append(
        Record(
            "study_answer",
            {"task": results.plan.task},
            {
                "answer": judged.answer,
                "cautions": list(judged.cautions),
                "limits": list(judged.limits),
                "match": results.plan.match,
            },
        )
    )
    return found
