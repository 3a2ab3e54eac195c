"""Two workers share a study through a real PostgreSQL; a killed one's trial is run again."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from studying import worker
from test_study import EVERY, alone, ended, states, wait_for

FOLDERS = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)


def program(name: str) -> str | None:
    return shutil.which(name) or next(
        (str(folder / name) for folder in FOLDERS if (folder / name).is_file()), None
    )


def lacking(what: str) -> NoReturn:
    """A failure where HEADWISE_REQUIRE_POSTGRES is set, a skipped test elsewhere."""
    if os.environ.get("HEADWISE_REQUIRE_POSTGRES"):
        pytest.fail(what)
    pytest.skip(what)


def programs() -> tuple[str, str, list[str]]:
    """initdb, pg_ctl, and the words before them: the server refuses to run as root."""
    initdb, control = program("initdb"), program("pg_ctl")
    if initdb is None or control is None:
        lacking("PostgreSQL is missing (Debian: apt install postgresql)")
    if importlib.util.find_spec("psycopg") is None:
        lacking("psycopg is missing (pip install 'headwise[study]')")
    if os.getuid() != 0:
        return initdb, control, []
    try:
        pwd.getpwnam("postgres")
    except KeyError:
        lacking("run as root, and there is no user postgres to run the server as")
    return initdb, control, ["runuser", "-u", "postgres", "--"]


@pytest.fixture
def postgres() -> Iterator[str]:
    """The URL of a server of its own, stopped and removed afterwards."""
    initdb, control, before = programs()
    home = Path("/tmp") / f"headwise-postgres-{os.getpid()}"
    home.mkdir(mode=0o755)
    if before:
        shutil.chown(home, "postgres", "postgres")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data = str(home / "data")

    def call(*arguments: str) -> None:
        subprocess.run(
            [*before, *arguments], check=True, cwd="/", stdout=subprocess.DEVNULL, timeout=120
        )

    try:
        call(initdb, "-D", data, "-U", "headwise", "-A", "trust", "--no-sync")
        options = f"-p {port} -k {home} -c listen_addresses=127.0.0.1 -c fsync=off"
        call(control, "-D", data, "-o", options, "-l", str(home / "log"), "-w", "start")
        try:
            yield f"postgresql+psycopg://headwise@127.0.0.1:{port}/postgres"
        finally:
            call(control, "-D", data, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(home, ignore_errors=True)


@pytest.mark.slow
def test_workers_share_the_work_and_two_are_killed(postgres: str, tmp_path: Path) -> None:
    """One in a training, and one while it measures speed; then two are left, and one measures."""
    log = tmp_path / "log"
    first = worker(postgres, tmp_path / "first", pause=0.1)
    wait_for(postgres, 0)
    second = worker(postgres, tmp_path / "second", pause=0.02, measuring=60)
    wait_for(postgres, 1)
    first.kill()
    first.join()
    wait_for(postgres, 6, "speed")
    second.kill()
    second.join()
    third, fourth = (worker(postgres, log, measuring=0.5) for _ in range(2))
    for process in (third, fourth):
        process.join(120)
        assert process.exitcode == 0
    assert sorted(ended(postgres)) == EVERY
    found = states(postgres)
    # What the killed ones held was failed, put back and run by others.
    failed = [key for state, key in found if state == "FAIL"]
    assert len(failed) == 2 and failed[0] in EVERY and failed[1] == "speed"
    assert {state for state, _ in found} <= {"COMPLETE", "FAIL", "PRUNED"}
    assert (tmp_path / "second").read_text().splitlines()[-1].startswith("begin speed")
    alone(log)


@pytest.mark.parametrize(
    ("gone", "says"),
    [
        ("server", "PostgreSQL is missing"),
        ("psycopg", "psycopg is missing"),
        ("user", "there is no user postgres"),
    ],
)
def test_a_server_that_is_required_is_not_skipped(gone: str, says: str, monkeypatch) -> None:
    monkeypatch.setitem(globals(), "program", lambda name: None if gone == "server" else name)
    find = None if gone == "psycopg" else "found"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find)
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(pwd, "getpwnam", lambda name: {}[name])
    monkeypatch.setenv("HEADWISE_REQUIRE_POSTGRES", "1")
    with pytest.raises(pytest.fail.Exception, match=says):
        programs()
    monkeypatch.delenv("HEADWISE_REQUIRE_POSTGRES")
    with pytest.raises(pytest.skip.Exception, match=says):
        programs()
