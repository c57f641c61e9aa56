"""Which rank a process is, from what launchers set, and what interactive shells leave."""

import pytest

from ds_bert.cli.main import main
from ds_bert.cluster.supervision.which_rank import find_place, started_as_rank
from ds_bert.errors import UserError

DEEPSPEED = {
    "CROSS_RANK": "1", "CROSS_SIZE": "2", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501",
}  # fmt: skip
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501",
}  # fmt: skip
MPICH = {
    "PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501",
}  # fmt: skip
SRUN = {
    "SLURM_JOB_ID": "42", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501",
}  # fmt: skip


@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        (DEEPSPEED, "the deepspeed launcher"),
        (TORCHRUN, "torchrun"),
        (OPEN_MPI, "mpirun (Open MPI)"),
        (MPICH, "mpirun (MPICH)"),
        (SRUN, "srun"),
        ({**SRUN, **DEEPSPEED}, "the deepspeed launcher"),  # started inside an sbatch script
        ({"RANK": "0", "WORLD_SIZE": "8", **OPEN_MPI}, "mpirun (Open MPI)"),  # exported in a shell once
    ],
)
def test_each_launcher_is_recognised(env, launcher):
    assert started_as_rank(env)
    place = find_place(env)
    assert place.started_by == launcher
    assert (place.rank, place.world_size, place.local_rank, place.local_size) == (3, 4, 1, 2)
    assert (place.master_addr, place.master_port) == ("10.0.0.1", 29501)


def test_srun_alone_gives_all_tasks_the_same_meeting_point():
    env = {name: value for name, value in SRUN.items() if not name.startswith("MASTER")}
    places = [find_place({**env, "SLURM_PROCID": str(rank)}) for rank in range(4)]
    assert {(place.master_addr, place.master_port) for place in places} == {("gpu07", 20042)}
    assert [place.rank for place in places] == [0, 1, 2, 3]


INTERACTIVE = {name: value for name, value in SRUN.items() if not name.startswith("MASTER")} | {"SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    "env",
    [
        {},
        {**INTERACTIVE, "SLURM_PTY_PORT": "41000"},  # srun --pty bash
        {**INTERACTIVE, "SLURM_STEP_ID": str(0xFFFFFFFA)},  # salloc with an interactive step
        {name: value for name, value in INTERACTIVE.items() if name != "SLURM_STEP_ID"},  # a batch script
        {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"},  # a shell of salloc
        {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"},  # no SLURM_NTASKS
        {"OMPI_COMM_WORLD_SIZE": "4"},
        {"RANK": "0", "WORLD_SIZE": "8"},
        {"WORLD_SIZE": "8", "LOCAL_RANK": "0"},
    ],
)
def test_left_over_variables_do_not_make_it_wait_for_others(env):
    assert not started_as_rank(env)
    place = find_place(env)
    assert (place.rank, place.world_size, place.started_by) == (0, 1, "this command itself")


def test_a_variable_that_is_no_number_is_named():
    with pytest.raises(UserError, match="environment variable MASTER_PORT=x: must be a whole number; unset it"):
        find_place({**TORCHRUN, "MASTER_PORT": "x"})


def test_a_rank_that_cannot_be_is_an_error():
    with pytest.raises(UserError, match="torchrun: rank 4 of 4 cannot be"):
        find_place({**TORCHRUN, "RANK": "4"})


@pytest.mark.parametrize("option", ["--num-procs", "--hostfile"])
def test_a_rank_of_a_launcher_is_not_to_start_ranks_itself(option, monkeypatch, capsys):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    words = ["pretrain", "--data", "d", "--output", "o", "--deepspeed_config", "c", "--model", "tiny"]
    words += ["--max-steps", "1"]
    assert main([*words, option, "2"]) == 2
    assert f"{option}: this is one of several ranks" in capsys.readouterr().err
