"""Supervised ranks end together, whatever happens to one, and the first to fail is named."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from ds_bert.cluster.network.interface import free_port
from ds_bert.cluster.supervision.outcome import FAILED, FOLLOWED, LOST, USER_ERROR, Failure, first_failure

TIMEOUT_S = 3
SUPERVISE = (
    "import sys; from ds_bert.cluster.supervision.supervisor import supervise_rank; "
    "sys.exit(supervise_rank(sys.argv[1], sys.argv[2:]))"
)


class Ranks:
    """Two supervisors, each with a toy rank."""

    def __init__(self, what: str, *, ranks: int = 2) -> None:
        port = free_port()
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", SUPERVISE, "tests.cluster.toy_rank", what],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env={
                    **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_BERT_FAILURE_TIMEOUT": str(TIMEOUT_S),
                },
            )
            for rank in range(ranks)
        ]  # fmt: skip

    def end(self) -> tuple[list[int], str, list[int]]:
        """Exit codes, what they said on stderr, and process numbers of the toys, once all have ended."""
        outputs = [process.communicate(timeout=60) for process in self.processes]
        pids = [int(pid) for out, _ in outputs for pid in re.findall(r"is process (\d+)", out)]
        self.output = "".join(out for out, _ in outputs)
        return [process.returncode for process in self.processes], "".join(err for _, err in outputs), pids


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_all_that_end_well_give_exit_code_0():
    codes, said, _ = Ranks("end").end()
    assert (codes, said) == ([0, 0], "")


@pytest.mark.parametrize(
    ("what", "code", "message"),
    [
        ("exit with 3", 3, "exit code 3; what it printed is above"),
        ("be killed", 137, r"its process was ended by SIGKILL \(out of memory\?"),
        ("be stopped", 1, rf"its process \d+ was stopped \(SIGSTOP\) for {TIMEOUT_S} s"),
    ],
)
def test_one_that_fails_ends_all_and_is_named(what, code, message):
    codes, said, pids = Ranks(what).end()
    assert codes == [code, code]
    assert re.fullmatch(rf"ds-bert: error: rank 1 on \S+ failed first: {message}.*\n", said), said
    assert len(pids) == 2
    assert_gone(pids)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("stop its supervisor", f"no sign of life for {TIMEOUT_S} s"),
        ("kill its supervisor", "its process has ended"),
    ],
)
def test_a_supervisor_that_is_gone_ends_all(what, message):
    codes, said, pids = Ranks(what).end()
    assert codes == [1, -signal.SIGKILL]
    assert re.fullmatch(rf"ds-bert: error: rank 1 on \S+ failed first: {message}\n", said), said
    assert_gone(pids)


def test_what_all_tell_the_user_is_said_once():
    codes, said, _ = Ranks("user error").end()
    assert codes == [1, 1]
    assert said == "ds-bert: error: --data x: does not exist\n"


def test_a_rank_that_never_comes_ends_the_one_that_waits():
    codes, said, pids = Ranks("sleep", ranks=1).end()
    assert codes == [1]
    assert "rank 1 on an unknown host failed first: it did not start" in said
    assert_gone(pids)


@pytest.fixture
def saving() -> Iterator[Ranks]:
    ranks = Ranks("save when asked")
    time.sleep(1.5)
    yield ranks
    for process in ranks.processes:
        process.kill()


def test_one_that_is_asked_to_stop_lets_all_save(saving):
    saving.processes[1].terminate()
    codes, said, _ = saving.end()
    assert codes == [128 + signal.SIGTERM] * 2
    assert said == "ds-bert: stopped by SIGTERM\n"
    assert {"rank 0 saves", "rank 1 saves"} <= set(saving.output.splitlines())


def test_a_launcher_that_dies_takes_its_ranks_along(tmp_path):
    """The supervisors' parent is killed, as a deepspeed launcher by the system when memory runs out."""
    code = f"""
import os, subprocess, sys, time
env = dict(os.environ, RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="{free_port()}")
rank = subprocess.Popen([sys.executable, "-c", {SUPERVISE!r}, "tests.cluster.toy_rank", "sleep"], env=env)
time.sleep(60)
"""
    with (tmp_path / "out").open("w") as out:
        launcher = subprocess.Popen([sys.executable, "-c", code], stdout=out, stderr=out)
        while "is process" not in (tmp_path / "out").read_text():
            time.sleep(0.05)
        ranks = psutil.Process(launcher.pid).children(recursive=True)
        launcher.kill()
        launcher.wait()
    assert len(ranks) == 2
    assert_gone([rank.pid for rank in ranks])


def failure(kind: str, rank: int) -> Failure:
    return Failure(kind, rank, "host", "reason")


def test_the_first_failure_is_one_that_did_not_follow_from_another():
    followed, lost, died, user = (failure(kind, rank) for rank, kind in enumerate((FOLLOWED, LOST, FAILED, USER_ERROR)))
    assert first_failure([followed, lost, died]) == died
    assert first_failure([followed, lost]) == lost
    assert first_failure([died, user]) == user
    assert first_failure([failure(FAILED, 5), failure(FAILED, 2)]).rank == 5
