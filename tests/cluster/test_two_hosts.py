"""Real runs over two real hosts: every launcher trains what one machine trains; every failure ends all in time."""

import os
import signal
import sys
import time

import pytest

from tests.cluster.job_runs import LAUNCH, SHORT, lines, steps, wait_for_steps
from tests.test_end_to_end import ds_bert

# Of the run that fails and is resumed again and again; and how many steps it makes between two failures.
ENDLESS, STRIDE = 100_000, 20
TIMEOUT_S = 10

# Seconds within which all processes on both hosts have ended.
AT_ONCE, AFTER_TIMEOUT = 30, TIMEOUT_S + 30

RAISED = "rank 1 on node-b failed first: FileNotFoundError: the data went away"
# An exception in the midst of training, on a signal from the test.
RAISE_ON_SIGNAL = """
import signal
def fail(signum, frame):
    raise FileNotFoundError("the data went away")
signal.signal(signal.SIGUSR1, fail)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # A name that shells could trip over.
    return tmp_path_factory.mktemp("it's $HOME (*)")


@pytest.fixture(scope="module")
def options(job_options) -> list:
    return ["pretrain", *job_options]


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi", "ssh"])
def test_each_launcher_trains_what_one_machine_trains(ssh_hosts, folder, options, on_one_machine, launcher):
    words = [*options[1:], "--launcher", launcher, "--max-steps", SHORT, "--output", folder / launcher]
    done = ssh_hosts.run(0, ["bash", LAUNCH / "pretrain_hostfile.sh", ssh_hosts.hostfile, *words])
    assert done.returncode == 0, done.stderr
    assert lines(folder / launcher) == on_one_machine
    assert "2 ranks, started by" in done.stderr + done.stdout
    assert "they meet at 10.78.0.1:" in done.stderr + done.stdout
    assert "over eth0" in done.stderr + done.stdout
    assert ssh_hosts.wait_until_empty(5) == []


def test_a_single_remote_host_is_used_and_its_run_folder_is_its_own(ssh_hosts, folder, options):
    """DeepSpeed's launcher alone would run on the machine it is started on."""
    words = [*options, "--hostfile", ssh_hosts.hostfile, "--include", "node-b", "--max-steps", 10_000]
    run = folder / "remote"
    process = ssh_hosts.start(0, [sys.executable, "-m", "ds_bert.cli.main", *words, "--output", run])
    wait_for_steps(process, run, 1)
    assert ssh_hosts.rank(1)
    second = ssh_hosts.ds_bert(*options, "--max-steps", 10_000, "--output", run)
    assert second.returncode == 1
    assert "a run is going on in it (process" in second.stderr
    assert "on node-b); wait for its end, or end it" in second.stderr
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 128 + signal.SIGINT
    assert ssh_hosts.wait_until_empty(5) == []


class Failing:
    """A long run over two hosts that is made to fail, and goes on from there the next time."""

    def __init__(self, hosts, folder, options) -> None:
        (hosts.folder / "sitecustomize.py").write_text(RAISE_ON_SIGNAL)
        self.hosts, self.run = hosts, folder / "failing"
        self.words = [*options, "--max-steps", ENDLESS, "--save-interval", 10, "--keep-last", 2, "--output", self.run]
        self.words += ["--hostfile", hosts.hostfile, "--failure-timeout", TIMEOUT_S]
        self.environment = {"PYTHONPATH": f"{hosts.folder}:{os.getcwd()}"}

    def start(self, *more):
        with (self.run.parent / "said").open("w") as said:
            words = [sys.executable, "-m", "ds_bert.cli.main", *self.words, *more]
            self.process = self.hosts.start(0, words, stdout=said, stderr=said, env=self.environment)
        wait_for_steps(self.process, self.run, steps(self.run) + STRIDE)

    def said(self) -> str:
        return (self.run.parent / "said").read_text()

    def wait_until_said(self, text: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.said():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.1)

    def end(self, seconds: float) -> tuple[int, str, float]:
        """Exit code, last line, and seconds until the command and all processes on both hosts had ended."""
        started = time.monotonic()
        code = self.process.wait(timeout=seconds)
        left = self.hosts.wait_until_empty(seconds - (time.monotonic() - started))
        assert left == []
        return code, self.said().strip().splitlines()[-1], time.monotonic() - started


@pytest.fixture(scope="module")
def failing(ssh_hosts, folder, options):
    return Failing(ssh_hosts, folder, options)


def test_it_starts_again_by_itself(failing):
    failing.start("--max-restarts", 1)
    failing.hosts.rank(1).kill()
    failing.wait_until_said("starting again (1 of 1)")
    wait_for_steps(failing.process, failing.run, steps(failing.run) + STRIDE)
    raise_in_a_rank(failing)
    code, last_line, _ = failing.end(AT_ONCE)
    assert (code, last_line) == (1, f"ds-bert pretrain: error: {RAISED}")


def kill_a_rank(failing):
    failing.hosts.rank(1).kill()


def raise_in_a_rank(failing):
    failing.hosts.rank(1).send_signal(signal.SIGUSR1)


def stop_a_rank(failing):
    failing.hosts.rank(0).send_signal(signal.SIGSTOP)


def stop_a_supervisor(failing):
    failing.hosts.rank(1).parent().suspend()


def cut_the_cable(failing):
    failing.hosts.cut()


def interrupt(failing):
    failing.process.send_signal(signal.SIGINT)


def terminate(failing):
    failing.process.send_signal(signal.SIGTERM)


def interrupt_twice(failing):
    failing.process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    failing.process.send_signal(signal.SIGINT)


def kill_the_command(failing):
    failing.process.kill()


@pytest.mark.parametrize(
    ("fail", "limit_s", "code", "last_line"),
    [
        (kill_a_rank, AT_ONCE, 137, "rank 1 on node-b failed first: its process was ended by SIGKILL"),
        (raise_in_a_rank, AT_ONCE, 1, RAISED),
        (stop_a_rank, AFTER_TIMEOUT, 1, "rank 0 on node-a failed first: its process"),
        (stop_a_supervisor, AFTER_TIMEOUT, 1, "rank 1 on node-b failed first: no sign of life for 10 s"),
        (cut_the_cable, AFTER_TIMEOUT, 1, "rank 1 on node-b failed first: no sign of life for 10 s"),
        (interrupt, AT_ONCE, 130, "stopped by SIGINT"),
        (terminate, AT_ONCE, 143, "stopped by SIGTERM"),
        (interrupt_twice, AT_ONCE, 130, "stopped by SIGINT"),
        (kill_the_command, AT_ONCE, -9, ""),
    ],
)
def test_a_failure_ends_everything_in_time(failing, fail, limit_s, code, last_line, capsys):
    failing.start()
    fail(failing)
    try:
        ended_with, said, seconds = failing.end(limit_s)
    finally:
        failing.hosts.mend()
        failing.hosts.end_jobs()
    with capsys.disabled():
        print(f"\n{fail.__name__}: all had ended after {seconds:.1f} s", end=" ")
    assert ended_with == code
    assert last_line in said
    if fail in (interrupt, terminate):
        assert "stopped as asked, saved at step" in failing.said()


def test_after_all_failures_it_has_the_metrics_of_an_uninterrupted_run(failing, folder, options):
    end = ["--max-steps", steps(failing.run) + 5]
    done = failing.hosts.ds_bert(*failing.words, *end)
    assert done.returncode == 0, done.stderr
    whole = ds_bert(*options, "--num-procs", 2, *end, "--output", folder / "whole")
    assert whole.returncode == 0, whole.stderr
    assert lines(failing.run) == lines(folder / "whole")


def test_a_host_that_refuses_ssh_is_named_in_seconds(ssh_hosts, folder, options):
    (folder / "hostfile").write_text("node-a slots=1\nnode-c slots=1\n")
    words = [*options, "--hostfile", folder / "hostfile", "--max-steps", 1, "--output", folder / "never"]
    done = ssh_hosts.ds_bert(*words, timeout=40)
    assert done.returncode == 1
    assert "node-c: cannot log in over ssh without a question" in done.stderr
    assert done.stderr.count("\n") == 1
