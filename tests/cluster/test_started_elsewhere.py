"""Ranks that torchrun, mpirun and Slurm start train what `--num-procs` trains."""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ssh_hosts import DS_BERT, write_command

from tests.cluster.job_runs import LAUNCH, SHORT, lines
from tests.cluster.need import SLURM, need
from tests.cluster.one_slurm import one_slurm


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture(scope="module")
def options(job_options) -> list[str]:
    return [str(word) for word in [*job_options, "--max-steps", SHORT]]


@pytest.fixture(scope="module")
def environment(folder):
    """With a `ds-bert` on PATH that is this one."""
    write_command(folder / "bin" / "ds-bert", DS_BERT)
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    path = f"{folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, **root, "PATH": path, "PYTHONPATH": os.getcwd()}


def run(words: list, **options) -> subprocess.CompletedProcess:
    return subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=200, **options)


def test_torchrun(folder, options, on_one_machine, environment):
    words = ["torchrun", "--nproc-per-node", "2", "--master-port", "29741", "--no-python", "ds-bert", "pretrain"]
    words[0:1] = [sys.executable, "-m", "torch.distributed.run"]
    done = run([*words, *options, "--output", folder / "torchrun"], env=environment)
    assert done.returncode == 0, done.stderr
    assert "2 ranks, started by torchrun" in done.stderr
    assert lines(folder / "torchrun") == on_one_machine


def test_mpirun(folder, options, on_one_machine, environment):
    need("mpirun")
    more = {"RANKS": "2", "MPIRUN_OPTIONS": "--oversubscribe"}
    words = ["bash", LAUNCH / "pretrain_mpi.sh", *options, "--output", folder / "mpirun"]
    done = run(words, env={**environment, **more})
    assert done.returncode == 0, done.stderr
    assert "2 ranks, started by mpirun (Open MPI)" in done.stderr
    assert lines(folder / "mpirun") == on_one_machine


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    need(*SLURM)
    with one_slurm(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


def test_slurm_runs_the_batch_script(folder, options, on_one_machine, environment, slurm):
    words = ["sbatch", "--parsable", "--ntasks=2", f"--output={folder}/slurm.log", LAUNCH / "pretrain_slurm.sbatch"]
    submitted = run([*words, *options, "--output", folder / "slurm"], env={**environment, **slurm})
    state = "PENDING"
    while state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
        time.sleep(0.5)
        job = run(["scontrol", "show", "job", submitted.stdout.strip()], env={**environment, **slurm}).stdout
        state = re.search(r"JobState=(\w+)", job)[1]
    log = (folder / "slurm.log").read_text()
    assert state == "COMPLETED", log
    assert "2 ranks, started by srun" in log
    assert lines(folder / "slurm") == on_one_machine


def test_an_interactive_shell_of_slurm_trains_alone(folder, options, environment, slurm):
    """`srun --pty -n2 bash` leaves variables of a step with two tasks."""
    words = ["srun", "--pty", "-n2", "ds-bert", "pretrain", *options, "--num-procs", "1", "--output", folder / "pty"]
    # `script` gives srun the terminal that it wants.
    done = run(["script", "-qec", shlex.join(map(str, words)), "/dev/null"], env={**environment, **slurm})
    assert "1 ranks, started by" in done.stdout, done.stdout
    assert [line["step"] for line in lines(folder / "pty") if "loss" in line] == list(range(1, SHORT + 1))
