"""A sweep's bookkeeping, with trainings that are played by a formula; `test_sweep_command.py` has real ones."""

import argparse
import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest

from ds_bert.cluster.launching.machines import Machines
from ds_bert.errors import UserError
from ds_bert.sweep import Sweep, SweepSettings, parse_parameter, report, sweep
from ds_bert.sweep.trial_run import TrialOutcome
from tests.runs import parse_run

GRID = ("train_batch_size=2,4", "optimizer.params.lr=1e-3,1e-2")
BASE = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}


class Trainings:
    """Stands for `run_trial`: the loss has its minimum at a rate of 1e-3 for each two samples of batch."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.configs: list[dict] = []
        self.stop_at = stop_at
        self.fits = 10**9
        self.problem: str | None = None

    def __call__(self, folder: Path, options, config: dict, machines: Machines, should_stop) -> TrialOutcome:
        if len(self.configs) == self.stop_at:
            raise KeyboardInterrupt
        self.configs.append(config)
        steps, losses = options.max_steps, []
        too_large = config.get("train_micro_batch_size_per_gpu", 0) > self.fits
        best = config["train_batch_size"] / 2 * 1e-3
        for step in range(0 if too_large or self.problem else steps):
            losses.append(5 + abs(np.log10(config["optimizer"]["params"]["lr"] / best)) + 1 / (step + 1))
            if should_stop(losses):
                return TrialOutcome(losses, None, pruned=True, problem=None, out_of_memory=False, seconds=1.0)
        problem = "out of memory" if too_large else self.problem
        value = None if problem else losses[-1]
        seconds = None if problem else 0.01 * config["train_batch_size"]  # of a step
        return TrialOutcome(losses, value, False, problem, out_of_memory=too_large, seconds=1.0, step_seconds=seconds)


@pytest.fixture
def trainings(monkeypatch):
    played = Trainings()
    monkeypatch.setattr(sweep, "run_trial", played)
    return played


@pytest.fixture
def make(tmp_path, prepared):
    def make(*params: str, resume: bool = False, name: str = "sweep", base: dict = BASE, **settings) -> Sweep:
        path = tmp_path / "base.json"
        path.write_text(json.dumps(base))
        options = parse_run(data=prepared, output="none", model="tiny", deepspeed_config=path, max_steps=1)
        parameters = tuple(map(parse_parameter, params or GRID))
        settings = {"budget_samples": 40, "budget_minutes": None, "trials": None, "machines": Machines(), **settings}
        return Sweep(tmp_path / name, options, SweepSettings(parameters, **settings), resume=resume)

    return make


def rows(made: Sweep) -> list[dict]:
    return list(csv.DictReader((made.folder / "trials.csv").open()))


def test_each_combination_runs_once_with_the_same_samples(make, trainings):
    made = make()
    made.run()
    found = [(row["train_batch_size"], row["optimizer.params.lr"], row["samples"], row["state"]) for row in rows(made)]
    assert found == [(batch, lr, "40", "complete") for batch in ("2", "4") for lr in ("0.001", "0.01")]
    best = json.loads((made.folder / "best_config.json").read_text())
    assert (best["train_batch_size"], best["optimizer"]["params"]["lr"]) == (2, 1e-3)
    assert (made.folder / "sweep.png").stat().st_size > 10_000


@pytest.mark.parametrize("killed_at", [0, 1, 3])
def test_a_killed_sweep_goes_on_to_the_same_table(make, trainings, killed_at):
    whole = make(name="whole")
    whole.run()
    trainings.configs.clear()
    trainings.stop_at = killed_at
    with pytest.raises(KeyboardInterrupt):
        make().run()
    trainings.stop_at = None
    with pytest.raises(UserError, match="holds a sweep; --resume goes on with it"):
        make()
    resumed = make(resume=True)
    resumed.run()
    assert len(trainings.configs) == 4
    assert rows(resumed) == rows(whole)
    resumed.run()  # nothing is left
    assert len(trainings.configs) == 4


def test_drawn_values_are_drawn_anew_after_a_kill_only_for_the_trials_to_come(make, trainings):
    params = ("optimizer.params.lr=log:1e-4..1e-1", "gradient_clipping=0.5..2.0")
    trainings.stop_at = 3
    with pytest.raises(KeyboardInterrupt):
        make(*params, trials=6).run()
    trainings.stop_at = None
    made = make(*params, trials=6, resume=True)
    made.run()
    assert len(rows(made)) == len(trainings.configs) == 6
    assert all(1e-4 <= float(row["learning_rate"]) <= 1e-1 for row in rows(made))


def test_bad_trials_are_pruned_and_reported(make, trainings):
    made = make("optimizer.params.lr=1e-3,1.1e-3,0.9e-3,1.2e-3,1,2", pruner="median", budget_samples=200)
    made.run()
    states = [row["state"] for row in rows(made)]
    assert states == ["complete"] * 4 + ["pruned"] * 2
    assert int(rows(made)[-1]["steps"]) < 100


def test_failures_are_recorded_and_not_fatal_unless_all_fail(make, trainings):
    trainings.problem = "diverged: the loss is not finite"
    made = make()
    with pytest.raises(UserError, match=re.escape("every trial failed; the first: diverged: the loss is not finite")):
        made.run()
    assert {row["problem"] for row in rows(made)} == {"diverged: the loss is not finite"}
    assert {row["state"] for row in rows(made)} == {"failed"}


def test_a_micro_batch_that_does_not_fit_is_halved_for_this_and_later_trials(make, trainings):
    trainings.fits = 3
    made = make("train_batch_size=8,12")
    made.run()
    micro = [config["train_micro_batch_size_per_gpu"] for config in trainings.configs]
    assert micro == [8, 4, 2, 2]
    assert [row["accumulation"] for row in rows(made)] == ["4", "6"]


def test_a_budget_in_minutes_is_the_same_time_for_all(make, trainings):
    made = make(budget_samples=None, budget_minutes=0.01)  # 0.6 s, at 0.02 and 0.04 s a step
    made.run()
    assert [int(row["steps"]) for row in rows(made)] == [30, 30, 15, 15]
    assert len(trainings.configs) == 4 + 2  # each batch size is timed once


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (("optimizr.params.lr=1,2",), "'optimizr' is no key of the configuration; did you mean 'optimizer'"),
        (("train_batch_size=2,80",), "train_batch_size=80: a budget of 40 samples is less than one step of 80"),
        (
            ("ds_bert.sampling.strategy=balanced,best",),
            "ds_bert.sampling.strategy=best: ds_bert.sampling.strategy: 'best'",
        ),
        (("optimizer.type=AdamW,AdamV",), "optimizer.type=AdamV: optimizer.type: 'AdamV' is not known; did you mean"),
    ],
)
def test_a_combination_that_cannot_be_is_found_before_any_training(make, trainings, params, message):
    with pytest.raises(UserError, match=re.escape(message)):
        make(*params)
    assert not trainings.configs


def test_the_storage_of_another_sweep_is_refused(make, trainings, tmp_path):
    make().run()
    with pytest.raises(UserError, match=r"was made by another sweep: --budget-samples: 40 there, 80 now"):
        make(resume=True, budget_samples=80)
    with pytest.raises(UserError, match=r"holds no sweep"):
        make(resume=True, name="new")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").touch()
    with pytest.raises(UserError, match="is not empty and holds no sweep"):
        make(name="other")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "study.db").write_bytes(b"no data base" * 1000)
    with pytest.raises(UserError, match="cannot be read as the storage of a sweep"):
        make(name="torn", resume=True)


def test_the_critical_batch_size_is_that_of_the_curves(make, trainings):
    """Trials whose steps to a loss are 10 (1 + 64 / B) by construction."""

    def trial(batch: int, value: float) -> argparse.Namespace:
        steps = round(10 * (1 + 64 / batch))
        losses = [9.0] * (steps - 1) + [1.0]
        return argparse.Namespace(value=value, user_attrs={"batch_size": batch, "losses": losses})

    fit = report.critical_batch([trial(8, 1.0), trial(16, 1.0), trial(64, 1.0), trial(64, 0.5)])
    assert fit.size == pytest.approx(64, rel=0.05)
    assert fit.least_steps == pytest.approx(10, rel=0.05)
    assert report.critical_batch([trial(8, 1.0)]) is None
