"""A task: data, a model from a design, a loss, a metric, and simpler models to compare with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from headwise.tasks.design import Design

Split = Literal["validation", "test"]


@dataclass(frozen=True)
class Budget:
    """How long a training lasts: `steps` batches at most, a learning rate that rises for `warmup`
    steps and then falls, an evaluation every `evaluate_every` steps, an end when `patience`
    evaluations in a row bring nothing better, or when `seconds` have passed."""

    steps: int
    batch_size: int
    learning_rate: float
    warmup: int
    evaluate_every: int
    patience: int
    seconds: float | None = None


@dataclass(frozen=True)
class Score:
    """`value` in the task's metric; `per_example` (N,), one number for each independent example
    (document, user, picture), such that a paired difference makes sense; `extra`: other metrics."""

    value: float
    per_example: np.ndarray
    extra: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunInput:
    """What a person gave to `headwise run DIR`: the words after it, and options by name."""

    given: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunOutput:
    """`lines` to print; `files`: names and contents to write where the person asked for them."""

    lines: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)


class Task(ABC):
    """One domain. `data` is a person's own file or folder in place of `source`; `seed` is that of
    the split only."""

    name: str
    title: str
    metric: str
    better: Literal["higher", "lower"]
    source: str
    licence: str
    causal: bool
    generates: bool

    def __init__(self, data: Path | None = None, seed: int = 0) -> None:
        self.data, self.seed = data, seed

    @abstractmethod
    def prepare(self, say: Callable[[str], None] = lambda line: None) -> None:
        """Fetch, read, split; `say` receives lines of progress.

        Raises:
            BadInput: the person's data cannot be used. HeadwiseError: a fetch failed.
        """

    @abstractmethod
    def default_design(self) -> Design: ...

    @abstractmethod
    def budget(self, name: str = "quick") -> Budget:
        """ "quick" (minutes on two cores) or "full"."""

    @abstractmethod
    def build(self, design: Design, seed: int) -> nn.Module:
        """A model with weights drawn from `seed`; every attention is a MultiHeadAttention."""

    @abstractmethod
    def batch(self, index: int, seed: int) -> Any:
        """Training batch number `index`: a function of (index, seed) alone."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """A scalar to minimise."""

    @abstractmethod
    def evaluate(self, model: nn.Module, split: Split) -> Score:
        """In eval mode and without gradients: the same model gives the same score."""

    @abstractmethod
    def baselines(self) -> dict[str, Callable[[], Score]]:
        """Simpler models by name, the simplest first; each is fitted and scored on the test split
        when it is called, with a fixed seed."""

    @abstractmethod
    def example(self) -> dict[str, Any]:
        """`inputs`: keyword arguments of the model's forward, batch 1; `tokens`: names of the
        tokens that self-attention runs over."""

    def decode_step(self, model: nn.Module) -> Callable[[], Any] | None:
        """What a study times: a function that generates one token upon caches of the example's
        length, the same at every call; None for a task that does not generate."""
        return None

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What `run` needs without the training data, as JSON: vocabulary, scaling."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Back from `state`."""

    @abstractmethod
    def run(self, model: nn.Module, args: RunInput) -> RunOutput:
        """Use a trained model on what a person gave."""
