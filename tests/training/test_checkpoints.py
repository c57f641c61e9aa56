"""Torn, damaged and missing checkpoints: the newest whole one is used and named, on all ranks alike."""

import errno
import shutil
from pathlib import Path

import pytest

from tests.runs import metrics_lines, train

CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}


@pytest.fixture(scope="module")
def finished(rank_pool, run_args, small_model):
    """A run of 6 steps on two ranks with checkpoints at steps 2, 4 and 6."""
    args = run_args(small_model(0.0), CONFIG, max_steps=6, save_interval=2)
    rank_pool(2).run(train, args)
    return args


@pytest.fixture
def run(finished, tmp_path):
    """Options of a run in a copy of that folder, to be damaged."""
    shutil.copytree(finished.output, tmp_path / "out")
    args = type(finished)(**vars(finished))
    args.output = str(tmp_path / "out")
    return args


def states(args, step: int) -> Path:
    return Path(args.output) / f"global_step{step}" / "mp_rank_00_model_states.pt"


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_is_found_and_the_previous_checkpoint_used_and_named(rank_pool, run):
    damage(states(run, 6))
    answers = rank_pool(2).run(train, run)
    assert all(answer["error"] is None for answer in answers)
    assert "does not match the checksum" in answers[0]["log"] or "do not match the checksum" in answers[0]["log"]
    assert "using global_step4 instead" in answers[0]["log"]
    assert "at step 4 of 6" in answers[0]["log"]


def test_a_save_that_was_cut_short_is_not_used(rank_pool, run):
    (states(run, 6).parent / "ds_bert_checkpoint.json").unlink()
    answers = rank_pool(2).run(train, run)
    assert "was not completely saved" in answers[0]["log"]
    assert "using global_step4 instead" in answers[0]["log"]


@pytest.mark.parametrize("latest", [None, "global_step2", "nonsense"])
def test_a_missing_or_wrong_latest_does_not_matter_and_is_named(rank_pool, run, latest):
    file = Path(run.output) / "latest"
    file.unlink() if latest is None else file.write_text(latest)
    log = rank_pool(2).run(train, run)[0]["log"]
    assert str(file) in log
    assert "the newest whole checkpoint is global_step6" in log


def test_a_tag_that_is_damaged_stops_all_ranks_and_names_a_whole_one(rank_pool, run):
    states(run, 6).write_bytes(b"short")
    run.resume = "global_step6"
    answers = rank_pool(2).run(train, run)
    assert answers[0]["error"] == answers[1]["error"]
    assert "mp_rank_00_model_states.pt is damaged: it has 5 bytes" in answers[0]["error"]
    assert "--resume global_step4 is whole" in answers[0]["error"]


def test_a_tag_that_does_not_exist_is_an_error(rank_pool, run):
    run.resume = "global_step5"
    error = rank_pool(2).run(train, run)[0]["error"]
    assert error.endswith("has no checkpoint global_step5; --resume global_step6 is whole")


def test_a_tag_goes_on_from_there_and_cuts_later_metrics(rank_pool, run):
    run.resume = "global_step2"
    answers = rank_pool(2).run(train, run)
    assert "at step 2 of 6" in answers[0]["log"]
    steps = [line["step"] for line in metrics_lines(run)]
    assert steps == [1, 2, 3, 4, 5, 6, 6]
    folders = {path.name for path in Path(run.output).glob("*global_step*")}
    later = {"global_step4", "global_step6", "superseded_global_step4", "superseded_global_step6"}
    assert folders == {"global_step2", *later}


def hide_on_rank_1(args) -> dict:
    """Train with a file of the newest checkpoint missing on rank 1 alone, as on a host without it."""
    import torch.distributed as dist

    from ds_bert.training import checkpoint

    original = checkpoint.Checkpoint.problem

    def problem(self, **share):
        if dist.get_rank() == 1 and self.step == 6:
            return f"{self.folder}/mp_rank_00_model_states.pt is missing"
        return original(self, **share)

    checkpoint.Checkpoint.problem = problem
    try:
        return train(args)
    finally:
        checkpoint.Checkpoint.problem = original


def test_a_file_missing_on_one_rank_stops_all_with_the_same_message(rank_pool, run):
    run.resume = "global_step6"
    answers = rank_pool(2).run(hide_on_rank_1, run)
    assert answers[0]["error"] == answers[1]["error"]
    assert answers[0]["error"].startswith("rank 1: ")
    assert "--resume global_step4 is whole" in answers[0]["error"]


def test_if_every_checkpoint_is_damaged_the_run_does_not_start_from_zero(rank_pool, run):
    for step in (2, 4, 6):
        damage(states(run, step))
    answers = rank_pool(2).run(train, run)
    assert answers[0]["error"] == answers[1]["error"]
    assert f"no checkpoint in {run.output} is whole" in answers[0]["error"]


def test_a_run_killed_in_its_very_first_save_starts_again_and_says_so(rank_pool, run):
    for step in (4, 6):
        shutil.rmtree(states(run, step).parent)
    (states(run, 2).parent / "ds_bert_checkpoint.json").unlink()
    answers = rank_pool(2).run(train, run)
    assert answers[0]["error"] is None
    assert "no earlier checkpoint exists, so the run starts from step 0" in answers[0]["log"]


def fail_to_write_on_rank_1(args, at_step: int) -> dict:
    """Train with a disk that is full on rank 1 from some step on."""
    import torch
    import torch.distributed as dist

    original = torch.save

    def save(state, path, *rest, **more):
        if dist.get_rank() == 1 and f"global_step{at_step}" in str(path):
            Path(path).write_bytes(b"the first part")
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return original(state, path, *rest, **more)

    torch.save = save
    try:
        return train(args)
    finally:
        torch.save = original


def test_a_full_disk_while_saving_ends_the_run_and_leaves_the_previous_checkpoint_whole(rank_pool, run):
    run.resume = "global_step2"
    shutil.rmtree(states(run, 6).parent)
    answers = rank_pool(2).run(fail_to_write_on_rank_1, run, 6)
    assert answers[0]["error"] == answers[1]["error"]
    assert "No space left on device" in answers[0]["error"]
    assert "The newest whole checkpoint is: global_step4" in answers[0]["error"]
    assert not states(run, 6).parent.exists()
    assert rank_pool(2).run(train, run)[0]["error"] is None


def test_keep_last_deletes_old_checkpoints(rank_pool, run_args, small_model):
    args = run_args(small_model(0.0), CONFIG, max_steps=4, save_interval=1, keep_last=2)
    rank_pool(2).run(train, args)
    kept = sorted(path.name for path in Path(args.output).glob("global_step*"))
    assert kept == ["global_step3", "global_step4"]
    assert (Path(args.output) / "latest").read_text() == "global_step4"
