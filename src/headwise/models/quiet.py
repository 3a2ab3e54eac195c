"""Keeps transformers' bars and log lines off the screen, and its errors to one line."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator

from headwise._extras import require


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars, only errors in the log, no warnings; the caller's settings come back after.

    What those lines would say about weights (missing, unexpected) the loader checks itself.
    """
    log = require("transformers.utils.logging", extra="models", purpose="headwise.models")
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        # Some of its bars (the GGUF reader's) heed no setting; they write to stderr as it is just
        # then.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """The error's type and its first line with words in it, at most 200 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
