"""The simpler models that classification is measured against. Each trains with a fixed seed."""

from __future__ import annotations

import math
import warnings

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from headwise._extras import require
from headwise.tasks.pictures import Pictures, vary

# More rows than this make logistic regression slow and hardly better.
MOST_ROWS = 12_000


def logistic_regression(features: np.ndarray, labels: np.ndarray, unseen: np.ndarray) -> np.ndarray:
    """Probabilities (M, classes) of the rows `unseen` (M, F), from `features` (N, F)."""
    linear = require("sklearn.linear_model", extra="tasks", purpose="logistic regression")
    failed = require("sklearn.exceptions", extra="tasks", purpose="logistic regression")
    if len(features) > MOST_ROWS:
        some = np.random.default_rng(0).choice(len(features), MOST_ROWS, replace=False)
        features, labels = features[some], labels[some]
    model = linear.LogisticRegression(max_iter=300, tol=1e-3)
    with warnings.catch_warnings():
        # Stopped after 300 rounds, it is as good a baseline as one that has converged.
        warnings.simplefilter("ignore", failed.ConvergenceWarning)
        model.fit(features, labels)
    return np.asarray(model.predict_proba(unseen))


class SmallCNN(nn.Sequential):
    """Two convolutions with pooling and one hidden layer. (B, C, side, side) → (B, classes)."""

    def __init__(self, channels: int, side: int, classes: int) -> None:
        super().__init__(
            nn.Conv2d(channels, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * (side // 4) ** 2, 64),
            nn.ReLU(),
            nn.Linear(64, classes),
        )


def small_cnn(data: Pictures, steps: int, varied: bool, batch_size: int = 64) -> Tensor:
    """Logits (M, classes) of the test pictures from a `SmallCNN` that saw `steps` batches, varied
    or not, like those of the attention model."""
    images, labels = data.part("train")
    unseen, _ = data.part("test")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SmallCNN(images.shape[1], images.shape[2], len(data.classes))
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    for step in range(steps):
        rows = np.random.default_rng((0, step)).integers(len(images), size=batch_size)
        batch = torch.from_numpy(images[rows])
        if varied:
            batch = vary(step)(batch)
        loss = functional.cross_entropy(model(batch), torch.from_numpy(labels[rows]))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    model.eval()
    with torch.inference_mode():
        parts = torch.from_numpy(unseen).split(512)
        return torch.cat([model(part) for part in parts])
