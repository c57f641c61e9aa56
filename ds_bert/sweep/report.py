"""What a sweep leaves: `trials.csv`, `best_config.json` and `sweep.png`, written anew after each trial."""

import csv
import io
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from optuna.trial import FrozenTrial, TrialState

from ds_bert.sweep.trial_run import WINDOW
from ds_bert.training.checkpoint import write_atomically

STATES = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}
MOST_TICKS = 8
FACTS = (
    "learning_rate", "batch_size", "micro_batch_size", "accumulation", "steps", "samples", "train_loss", "eval_loss",
    "seconds", "problem",
)  # fmt: skip


def write_report(folder: Path, trials: list[FrozenTrial]) -> None:
    """Write the results of the trials that have ended."""
    ended = [trial for trial in trials if trial.state in STATES]
    paths = sorted({path for trial in ended for path in trial.params})
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["trial", "state", *paths, *FACTS])
    for trial in ended:
        row = [trial.params.get(path) for path in paths] + [trial.user_attrs.get(fact) for fact in FACTS]
        table.writerow([trial.number, STATES[trial.state], *row])
    write_atomically(folder / "trials.csv", text.getvalue())
    complete = [trial for trial in ended if trial.state == TrialState.COMPLETE]
    if complete:
        best = min(complete, key=lambda trial: trial.value)
        write_atomically(folder / "best_config.json", json.dumps(best.user_attrs["config"], indent=2) + "\n")
        plot(folder / "sweep.png", complete)


@dataclass(frozen=True)
class CriticalBatch:
    """Steps to a loss = least_steps (1 + size / batch size), arXiv 1812.06162, equation 2.11 with its (B.1)."""

    target_loss: float
    batch_sizes: list[int]
    steps: list[float]
    """To the target, of the best trial of each batch size."""
    least_steps: float | None
    size: float | None
    """The critical batch size in samples; None if the trials do not show one."""


def critical_batch(trials: list[FrozenTrial]) -> CriticalBatch | None:
    """Fit the critical batch size to the best trial of each batch size.

    Args:
        trials: complete ones.

    Returns:
        None with fewer than two batch sizes.
    """
    best: dict[int, FrozenTrial] = {}
    for trial in sorted(trials, key=lambda trial: -trial.value):
        best[trial.user_attrs["batch_size"]] = trial
    if len(best) < 2:
        return None
    curves = {size: smoothed(best[size].user_attrs["losses"]) for size in sorted(best)}
    # The lowest loss that all of them reach.
    target = max(curve.min() for curve in curves.values())
    steps = [float(np.argmax(curve <= target) + 1) for curve in curves.values()]
    inverse = 1 / np.array(list(curves), dtype=float)
    slope, least = np.polyfit(inverse, steps, 1)
    found = slope > 0 and least > 0
    return CriticalBatch(
        target_loss=float(target),
        batch_sizes=list(curves),
        steps=steps,
        least_steps=float(least) if found else None,
        size=float(slope / least) if found else None,
    )


def smoothed(losses: list[float]) -> np.ndarray:
    """Running mean over the last tenth of the steps before each."""
    window = max(1, round(WINDOW * len(losses)))
    sums = np.cumsum(np.concatenate([[0.0], losses]))
    ends = np.arange(1, len(losses) + 1)
    starts = np.maximum(0, ends - window)
    return (sums[ends] - sums[starts]) / (ends - starts)


def plot(path: Path, trials: list[FrozenTrial]) -> None:
    """Draw loss against learning rate for each batch size, and steps to a loss against batch size.

    Args:
        path: the picture.
        trials: complete ones.
    """
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for size in sorted({trial.user_attrs["batch_size"] for trial in trials}):
        of_size = [trial for trial in trials if trial.user_attrs["batch_size"] == size]
        points = sorted((trial.user_attrs["learning_rate"], trial.value) for trial in of_size)
        left.plot(*zip(*points, strict=True), marker="o", markersize=4, label=f"batch {size:,}")
    left.set(xlabel="learning rate", ylabel="loss (nats per masked token)", xscale="log", title="the same samples each")
    _tick(left, {trial.user_attrs["learning_rate"] for trial in trials})
    left.legend()
    fit = critical_batch(trials)
    if fit:
        right.plot(fit.batch_sizes, fit.steps, "o", label=f"best rate, to a training loss of {fit.target_loss:.3f}")
        if fit.size:
            sizes = np.geomspace(min(fit.batch_sizes), max(fit.batch_sizes))
            label = f"critical batch size {fit.size:,.0f}, at least {fit.least_steps:,.0f} steps"
            right.plot(sizes, fit.least_steps * (1 + fit.size / sizes), label=label)
        right.set(xlabel="batch size (samples)", ylabel="optimizer steps", xscale="log", yscale="log")
        _tick(right, fit.batch_sizes)
        right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _tick(axes, values: Iterable[float]) -> None:
    """Put the values of a short list, rather than powers of ten, under a picture."""
    values = sorted(values)
    if len(values) <= MOST_TICKS:
        axes.set_xticks(values, labels=[f"{value:g}" for value in values])
        axes.set_xticks([], minor=True)
