"""Real runs over two real hosts: every launcher trains what one machine trains; every failure ends all in time."""

import json
import os
import signal
import sys
import time

import pytest

from tests.cluster.job_runs import CONFIG, LAUNCH, lines, steps, wait_for_steps
from tests.test_end_to_end import ds_bert

SHORT = 4

# Of the run that fails and is resumed again and again; and how many steps it makes between two failures.
LONG, STRIDE = 700, 30
TIMEOUT_S = 10

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
def options(folder, prepared, small_model) -> list:
    (folder / "ds config.json").write_text(json.dumps(CONFIG))
    (folder / "data set").symlink_to(prepared)
    words = ["pretrain", "--data", folder / "data set", "--model", small_model(0.1)]
    return [*words, "--deepspeed_config", folder / "ds config.json"]


@pytest.fixture(scope="module")
def on_one_machine(folder, options):
    """The metrics of a short run of two local ranks."""
    done = ds_bert(*options, "--num-procs", 2, "--max-steps", SHORT, "--output", folder / "local")
    assert done.returncode == 0, done.stderr
    return lines(folder / "local")


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


def test_a_single_remote_host_is_used(ssh_hosts, folder, options):
    """DeepSpeed's launcher alone would run on the machine it is started on."""
    words = [*options, "--hostfile", ssh_hosts.hostfile, "--include", "node-b", "--max-steps", 10_000]
    run = folder / "remote"
    process = ssh_hosts.start(0, [sys.executable, "-m", "ds_bert.cli.main", *words, "--output", run])
    wait_for_steps(process, run, 1)
    assert ssh_hosts.rank(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 128 + signal.SIGINT
    assert ssh_hosts.wait_until_empty(5) == []


class Failing:
    """A long run over two hosts that is made to fail, and goes on from there the next time."""

    def __init__(self, hosts, folder, options) -> None:
        (hosts.folder / "sitecustomize.py").write_text(RAISE_ON_SIGNAL)
        self.hosts, self.run = hosts, folder / "failing"
        self.words = [*options, "--max-steps", LONG, "--save-interval", 10, "--keep-last", 2, "--output", self.run]
        self.words += ["--hostfile", hosts.hostfile, "--failure-timeout", TIMEOUT_S]
        self.environment = {"PYTHONPATH": f"{hosts.folder}:{os.getcwd()}"}

    def start(self, *more):
        with (self.run.parent / "said").open("w") as said:
            words = [sys.executable, "-m", "ds_bert.cli.main", *self.words, *more]
            self.process = self.hosts.start(0, words, stdout=said, stderr=said, env=self.environment)
        wait_for_steps(self.process, self.run, min(LONG, steps(self.run) + STRIDE))

    def end(self, seconds: float) -> tuple[int, str, float]:
        """Exit code, last line, and seconds until the command and all processes on both hosts had ended."""
        started = time.monotonic()
        code = self.process.wait(timeout=seconds)
        left = self.hosts.wait_until_empty(seconds - (time.monotonic() - started))
        assert left == []
        said = (self.run.parent / "said").read_text().strip().splitlines()
        return code, said[-1], time.monotonic() - started


@pytest.fixture(scope="module")
def failing(ssh_hosts, folder, options):
    return Failing(ssh_hosts, folder, options)


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


AT_ONCE, AFTER_TIMEOUT = 30, TIMEOUT_S + 30


@pytest.mark.parametrize(
    ("fail", "limit_s", "code", "last_line"),
    [
        (kill_a_rank, AT_ONCE, 137, "rank 1 on node-b failed first: its process was ended by SIGKILL"),
        (raise_in_a_rank, AT_ONCE, 1, "rank 1 on node-b failed first: FileNotFoundError: the data went away"),
        (stop_a_rank, AFTER_TIMEOUT, 1, "rank 0 on node-a failed first: its process"),
        (stop_a_supervisor, AFTER_TIMEOUT, 1, "rank 1 on node-b failed first: no sign of life for 10 s"),
        (cut_the_cable, AFTER_TIMEOUT, 1, "rank 1 on node-b failed first: no sign of life for 10 s"),
        (interrupt, AT_ONCE, 130, "stopped by SIGINT"),
        (terminate, AT_ONCE, 143, "stopped by SIGTERM"),
        (interrupt_twice, AT_ONCE, 130, "stopped by SIGINT"),
        (kill_the_command, AT_ONCE, -9, ""),
    ],
)
def test_a_failure_ends_everything_in_time(failing, fail, limit_s, code, last_line, record_property):
    failing.start()
    fail(failing)
    try:
        ended_with, said, seconds = failing.end(limit_s)
    finally:
        failing.hosts.mend()
        failing.hosts.end_jobs()
    print(f"{fail.__name__}: all had ended after {seconds:.1f} s")
    record_property("seconds", round(seconds, 1))
    assert ended_with == code
    assert last_line in said


def test_asked_to_stop_it_saved_before(failing):
    assert "stopped as asked, saved at step" in (failing.run.parent / "said").read_text() or steps(failing.run) >= LONG


def test_after_all_failures_it_has_the_metrics_of_an_uninterrupted_run(failing, folder, options):
    done = failing.hosts.ds_bert(*failing.words)
    assert done.returncode == 0, done.stderr
    whole = ds_bert(*options, "--num-procs", 2, "--max-steps", LONG, "--output", folder / "whole")
    assert whole.returncode == 0, whole.stderr
    assert lines(failing.run) == lines(folder / "whole")


def test_it_starts_again_by_itself(ssh_hosts, folder, options):
    run = folder / "restarted"
    words = [*options, "--hostfile", ssh_hosts.hostfile, "--max-steps", 200, "--save-interval", 5, "--output", run]
    words = [sys.executable, "-m", "ds_bert.cli.main", *words, "--max-restarts", "1"]
    with (folder / "said").open("w") as said:
        process = ssh_hosts.start(0, words, stdout=said, stderr=said)
    wait_for_steps(process, run, 20)
    ssh_hosts.rank(1).kill()
    assert process.wait(timeout=120) == 0
    assert "starting again (1 of 1)" in (folder / "said").read_text()
    assert [line["step"] for line in lines(run) if "loss" in line] == list(range(1, 201))


def test_a_second_run_in_the_same_folder_is_refused(ssh_hosts, folder, options):
    run = folder / "twice"
    words = [*options, "--max-steps", 10_000, "--output", run]
    first = ssh_hosts.start(0, [sys.executable, "-m", "ds_bert.cli.main", *words])
    try:
        wait_for_steps(first, run, 1)
        second = ssh_hosts.ds_bert(*words)
        assert second.returncode == 1
        assert "a run is going on in it (process" in second.stderr
        assert "on node-a); wait for its end, or end it" in second.stderr
    finally:
        ssh_hosts.end_jobs()
        first.wait()


def test_a_host_that_refuses_ssh_is_named_in_seconds(ssh_hosts, folder, options):
    (folder / "hostfile").write_text("node-a slots=1\n10.78.0.99 slots=1\n")
    words = [*options, "--hostfile", folder / "hostfile", "--max-steps", 1, "--output", folder / "never"]
    done = ssh_hosts.ds_bert(*words, timeout=40)
    assert done.returncode == 1
    assert "10.78.0.99: cannot log in over ssh without a question" in done.stderr
    assert done.stderr.count("\n") == 1
