"""Real tasks in every domain that attention serves, each small enough to train in minutes.

task = headwise.tasks.load_task("vision")
task.prepare()
model = task.build(task.default_design(), seed=0)
"""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path

from headwise.errors import BadInput
from headwise.tasks.design import Design
from headwise.tasks.task import Budget, RunInput, RunOutput, Score, Task

__all__ = ["TASKS", "Budget", "Design", "RunInput", "RunOutput", "Score", "Task", "load_task"]

# A task's module is imported when the task is asked for: each needs other optional libraries.
TASKS = {
    "language": "headwise.tasks.language:Language",
    "code": "headwise.tasks.code:Code",
    "vision": "headwise.tasks.vision:Vision",
    "fashion": "headwise.tasks.vision:Fashion",
    "tabular": "headwise.tasks.tabular:Tabular",
    "speech": "headwise.tasks.speech:Speech",
    "translation": "headwise.tasks.translation:Translation",
    "summarisation": "headwise.tasks.summarisation:Summarisation",
    "multimodal": "headwise.tasks.multimodal:Multimodal",
    "recommendation": "headwise.tasks.recommendation:Recommendation",
    "series": "headwise.tasks.series:Series",
    "planning": "headwise.tasks.planning:Planning",
}


def load_task(name: str, data: Path | None = None, seed: int = 0) -> Task:
    """The task of that name, not yet prepared. `data` replaces its own data; `seed` is the split's.

    Raises:
        BadInput: no such task; the message lists all.
    """
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise BadInput(f"unknown task {name!r}: {hint}tasks are {', '.join(TASKS)}")
    module, _, kind = TASKS[name].partition(":")
    task: Task = getattr(importlib.import_module(module), kind)(data, seed)
    return task
