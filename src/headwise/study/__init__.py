"""Which number of heads does a task need? Trained over seeds, compared with intervals, and
answered in one sentence that never recommends inside the noise.

answer = headwise.study.judge(headwise.study.run(plan, storage="sqlite:///study.db"))
"""

from __future__ import annotations

from headwise.study.judgement import Judgement, judge
from headwise.study.plan import Plan, designs_for
from headwise.study.trials import Outcome, Results, collect, run

__all__ = ["Judgement", "Outcome", "Plan", "Results", "collect", "designs_for", "judge", "run"]
