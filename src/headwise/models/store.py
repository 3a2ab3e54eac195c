"""The user's cache of models: directories that appear whole or not at all, one builder at a
time."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from headwise._extras import require
from headwise.errors import HeadwiseError


def root() -> Path:
    """Where models are kept: `$HEADWISE_CACHE`, or `~/.cache/headwise`."""
    chosen = os.environ.get("HEADWISE_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "headwise"


def tell(message: str) -> None:
    """One line of progress, on stderr so that it never mixes with a result."""
    print(f"headwise: {message}", file=sys.stderr, flush=True)


def keep(key: str, build: Callable[[Path], None], *, say: Callable[[str], None] = tell) -> Path:
    """The directory `models/<key>` of the cache; `build(directory)` fills it where it is missing.

    `build` works in a directory beside it that is renamed when it is done, so a failure, or a
    process that is killed, leaves nothing that later reads as a model. A lock lets one process
    build while others wait and then use what it built.

    Raises:
        HeadwiseError: the cache cannot be written. What `build` raises passes through.
    """
    home = root() / "models"
    final = home / key
    if final.is_dir():
        return final
    filelock = require("filelock", extra="models", purpose="headwise.models")
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(home / f".{key}.lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            say(f"waiting for another process that is preparing {key}")
            lock.acquire()
    except OSError as error:
        raise _unwritable(home, error) from None
    try:
        if final.is_dir():
            return final
        # We hold the lock, so whatever lies here was left by a process that died.
        for stale in home.glob(f".{key}.partial-*"):
            shutil.rmtree(stale, ignore_errors=True)
        try:
            partial = Path(tempfile.mkdtemp(prefix=f".{key}.partial-", dir=home))
        except OSError as error:
            raise _unwritable(home, error) from None
        try:
            build(partial)
            partial.chmod(0o755)
            partial.replace(final)
        except OSError as error:
            raise _unwritable(home, error) from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    finally:
        lock.release()
    return final


def _unwritable(home: Path, error: OSError) -> HeadwiseError:
    reason = (error.strerror or str(error)).lower()
    return HeadwiseError(
        f"cannot write the model cache {home}: {reason}; free some space, or set HEADWISE_CACHE "
        "to a directory that can be written"
    )
