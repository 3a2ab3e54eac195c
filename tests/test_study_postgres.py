"""Two workers share a study through a real PostgreSQL; a killed one's trial is run again."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from test_study import states, wait_for, worker

FOLDERS = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)


def program(name: str) -> str | None:
    return shutil.which(name) or next(
        (str(folder / name) for folder in FOLDERS if (folder / name).is_file()), None
    )


@pytest.fixture
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server of its own, stopped and removed afterwards."""
    initdb, control = program("initdb"), program("pg_ctl")
    if initdb is None or control is None:
        if os.environ.get("HEADWISE_REQUIRE_POSTGRES"):
            pytest.fail("PostgreSQL is missing (Debian: apt install postgresql)")
        pytest.skip("PostgreSQL is missing (Debian: apt install postgresql)")
    pytest.importorskip("psycopg")
    home = Path("/tmp") / f"headwise-postgres-{os.getpid()}"
    home.mkdir(mode=0o755)
    before: list[str] = []
    if os.getuid() == 0:  # the server refuses to run as root
        try:
            pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("run as root, and there is no user postgres to run the server as")
        shutil.chown(home, "postgres", "postgres")
        before = ["runuser", "-u", "postgres", "--"]
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
def test_two_workers_share_the_work_and_one_is_killed(postgres: str) -> None:
    first = worker(postgres, 0.1)
    wait_for(postgres, 0, 120)
    second = worker(postgres, 0.05)
    wait_for(postgres, 1, 120)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    out, err = second.communicate(timeout=200)
    assert second.returncode == 0, err
    assert out.strip() == "6"
    found = states(postgres)
    done = sorted(key for state, key in found if state == "COMPLETE" and key is not None)
    assert done == [(design, seed) for design in range(2) for seed in range(3)]
    # The killed worker's trial was failed, put back and run by the other one.
    failed = [key for state, key in found if state == "FAIL"]
    assert len(failed) == 1 and failed[0] in done
    assert {state for state, _ in found} <= {"COMPLETE", "FAIL", "PRUNED"}
