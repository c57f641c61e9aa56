"""One trial: a real training through the deepspeed launcher, watched by its metrics."""

import argparse
import contextlib
import json
import shutil
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from ds_bert.arguments import forwarded
from ds_bert.cluster.launching.launch import start
from ds_bert.cluster.launching.machines import Machines
from ds_bert.cluster.supervision.outcome import Outcome
from ds_bert.errors import last_line
from ds_bert.training.checkpoint import list_checkpoints
from ds_bert.training.metrics import read_metrics
from ds_bert.training.options import add_pretrain_arguments

PRETRAIN = "ds_bert.training.pretrain"
POLL_S = 0.5
OUT_OF_MEMORY = ("out of memory", "OutOfMemoryError", "can't allocate memory", "MemoryError")
KILLED = 128 + signal.SIGKILL  # by the kernel, which on a CPU says no more

# The share of the budget whose last training losses are averaged.
WINDOW = 0.1


@dataclass(frozen=True)
class TrialOutcome:
    """How a trial ended."""

    losses: list[float | None]
    """Training loss of each step; None where it was not finite."""
    eval_loss: float | None
    pruned: bool
    problem: str | None
    """Why it failed."""
    out_of_memory: bool
    seconds: float
    step_seconds: float | None = None
    """Of a step, the median of the second half."""

    @property
    def train_loss(self) -> float | None:
        """Mean of the last steps."""
        return mean_of_last(self.losses, len(self.losses))

    @property
    def value(self) -> float | None:
        """What the sweep minimises: the held-out loss, or without a held-out part that of training."""
        return self.train_loss if self.eval_loss is None else self.eval_loss


def mean_of_last(losses: list[float | None], steps: int) -> float | None:
    """Mean training loss of the last tenth before `steps`; None if there are none, or one was not finite."""
    window = losses[max(0, steps - max(1, round(WINDOW * steps))) : steps]
    return None if not window or None in window else sum(window) / len(window)


def run_trial(
    folder: Path, options: argparse.Namespace, config: dict, machines: Machines, should_stop: Callable[[list], bool]
) -> TrialOutcome:
    """Train in a new folder, to the end or until it should stop.

    Args:
        folder: of the trial: configuration, log, the run with its metrics; a former one is deleted.
        options: of `ds-bert pretrain`; its `output` and `deepspeed_config` are set here.
        config: the DeepSpeed configuration.
        machines: where its ranks run.
        should_stop: called with the losses so far, as they come.
    """
    _end_orphans(folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config_path, run_folder, log_path = folder / "ds_config.json", folder / "run", folder / "log.txt"
    config_path.write_text(json.dumps(config, indent=2))
    options = argparse.Namespace(**{**vars(options), "output": str(run_folder), "deepspeed_config": str(config_path)})
    started, pruned = time.perf_counter(), False
    words = forwarded(options, add_pretrain_arguments)
    with log_path.open("w") as log, start("ds-bert pretrain", PRETRAIN, words, machines, output=log) as job:
        try:
            while job.poll() is None:
                time.sleep(POLL_S)
                if not pruned and should_stop(_losses(read_metrics(run_folder))):
                    pruned = True
                    job.kill("SIGTERM")
        finally:
            if job.poll() is None:
                job.kill("SIGTERM")
            code = job.wait()
    text, lines, problem = log_path.read_text(errors="replace"), read_metrics(run_folder), None
    losses = _losses(lines)
    evaluations = [line["eval_loss"] for line in lines if "eval_loss" in line]
    times = [line["step_s"] for line in lines if "step_s" in line]
    if code and not pruned:
        problem = _problem(text, job.outcome, code)
    elif not pruned and (not losses or None in [*losses[-1:], *evaluations[-1:]]):  # null for what is not finite
        problem = "diverged: the loss is not finite"
    # A trial is judged by its metrics; weights and optimizer of each would fill a disk.
    for checkpoint in list_checkpoints(run_folder):
        shutil.rmtree(checkpoint.folder, ignore_errors=True)
    return TrialOutcome(
        losses=losses,
        eval_loss=evaluations[-1] if evaluations and not problem else None,
        pruned=pruned,
        problem=problem,
        out_of_memory=code == KILLED or any(sign in text for sign in OUT_OF_MEMORY),
        seconds=time.perf_counter() - started,
        step_seconds=statistics.median(times[len(times) // 2 :]) if times else None,
    )


def _end_orphans(folder: Path) -> None:
    """End what a killed sweep left running in this folder."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(f"={folder}/" in word for word in process.cmdline()):
                process.kill()


def _losses(lines: list[dict]) -> list[float | None]:
    return [line["loss"] for line in lines if "loss" in line]


def _problem(log: str, outcome: Outcome | None, code: int) -> str:
    """The one line that says why a run failed."""
    if outcome and outcome.failure:
        return outcome.failure.line()
    return f"exit code {code}: {last_line(log)}"
