"""A sweep: trials of a configuration, kept in an Optuna study that a killed sweep goes on with."""

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import Trial, TrialState

from ds_bert.cluster.launching.machines import Machines
from ds_bert.config import SECTION, read_json
from ds_bert.constants import MAX_INT
from ds_bert.data.prepared import PreparedData
from ds_bert.errors import UserError
from ds_bert.identity import describe_changes, fingerprint
from ds_bert.resolution import resolve, resolve_batch_sizes
from ds_bert.sweep.report import write_report
from ds_bert.sweep.space import Parameter, combinations
from ds_bert.sweep.trial_config import MICRO_BATCH, check_path, frees_micro_batch, trial_config
from ds_bert.sweep.trial_run import TrialOutcome, mean_of_last, run_trial
from ds_bert.training.progress import progress_bar
from ds_bert.training.setup import set_up_run

STORAGE, STUDY = "study.db", "ds_bert"

# Kept with the study.
IDENTITY, MICRO_BATCH_LIMIT, STEP_SECONDS = "identity", "micro_batch_limit", "step_seconds"

# Steps that tell how long one takes, for a budget in minutes.
SPEED_STEPS = 12

# At so many points of a trial its loss is compared with that of others.
REPORTS = 20

PRUNERS = {
    "none": optuna.pruners.NopPruner,
    "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=REPORTS // 4),
    "hyperband": lambda: optuna.pruners.HyperbandPruner(min_resource=REPORTS // 4, max_resource=REPORTS),
}


@dataclass(frozen=True)
class SweepSettings:
    """What is searched and how."""

    parameters: tuple[Parameter, ...]
    budget_samples: int | None
    """That each trial sees, whatever its batch size; None for a budget in minutes."""
    budget_minutes: float | None
    """Of training, without start and evaluation."""
    trials: int | None
    """None: every combination of the lists, once."""
    machines: Machines
    """Where each trial runs."""
    pruner: str = "none"


class Sweep:
    """A sweep in its folder.

    Args:
        folder: of the study, its trials and results.
        options: of `ds-bert pretrain`, for all trials: data, model, seed, ...; `deepspeed_config` is the base.
        settings: of the sweep.
        resume: go on with the sweep that the folder holds.

    Raises:
        UserError: the folder holds another sweep or something else, or a key or a combination cannot be.
    """

    def __init__(self, folder: Path, options: argparse.Namespace, settings: SweepSettings, *, resume: bool) -> None:
        # Absolute, so that the processes of its trials can be told from those of others.
        self.folder, self.options, self.settings = folder.absolute(), options, settings
        self.base = read_json(options.deepspeed_config)
        for parameter in settings.parameters:
            check_path(parameter.path, self.base)
        grid = combinations(list(settings.parameters)) if settings.trials is None else []
        for values in grid:
            self._check(values)
        self.num_trials = settings.trials or len(grid)
        self.study = self._open(resume)
        if not self.study.trials:
            for values in grid:
                self.study.enqueue_trial(values)

    def run(self) -> None:
        """Run the trials that are left; the results are written after each.

        Raises:
            UserError: all trials failed.
        """
        done = sum(trial.state.is_finished() for trial in self.study.trials)
        for _ in progress_bar(
            range(done, self.num_trials), initial=done, total=self.num_trials, desc="sweep", unit="trial"
        ):
            self._run_one(self._next_trial())
            write_report(self.folder, self.study.trials)
        failed = [trial for trial in self.study.trials if trial.state == TrialState.FAIL]
        if len(failed) == len(self.study.trials):
            log = self._trial_folder(failed[0].number) / "log.txt"
            raise UserError(f"every trial failed; the first: {failed[0].user_attrs['problem']} (its log: {log})")

    def _next_trial(self) -> Trial:
        killed = [trial for trial in self.study.trials if trial.state == TrialState.RUNNING]
        return Trial(self.study, killed[0]._trial_id) if killed else self.study.ask()

    def _run_one(self, trial: Trial) -> None:
        values = {parameter.path: parameter.suggest(trial) for parameter in self.settings.parameters}
        try:
            while True:
                config = self._configure(values, self.study.user_attrs.get(MICRO_BATCH_LIMIT))
                outcome = self._train(trial, config)
                if not outcome.out_of_memory or not frees_micro_batch(values) or config[MICRO_BATCH] == 1:
                    break
                self.study.set_user_attr(MICRO_BATCH_LIMIT, config[MICRO_BATCH] // 2)
            self._tell(trial, config, outcome)
        except UserError as error:
            trial.set_user_attr("problem", str(error))
            self.study.tell(trial, state=TrialState.FAIL)

    def _configure(self, values: dict[str, Any], fits: int | None = None) -> dict:
        """The configuration of a trial with these values, of a micro-batch of at most what fits into memory."""
        given = self.base.get(MICRO_BATCH)
        limit = fits or (given if isinstance(given, int) else None)
        return trial_config(self.base, values, world_size=self.settings.machines.world_size, micro_batch_limit=limit)

    def _steps(self, config: dict) -> int:
        """Optimizer steps that the budget allows; with one in minutes `_measure_speed` comes first."""
        batch_size, *_ = resolve_batch_sizes(config, self.settings.machines.world_size)
        if self.settings.budget_samples is None:
            seconds = self.study.user_attrs[STEP_SECONDS][self._speed_key(config)]
            return max(1, int(60 * self.settings.budget_minutes / seconds))
        steps = self.settings.budget_samples // batch_size
        if not steps:
            raise UserError(
                f"a budget of {self.settings.budget_samples:,} samples is less than one step of {batch_size:,}"
            )
        return steps

    def _speed_key(self, config: dict) -> str:
        return " x ".join(map(str, resolve_batch_sizes(config, self.settings.machines.world_size)))

    def _measure_speed(self, config: dict) -> TrialOutcome | None:
        """Time some steps at batch sizes that have not been timed; how that failed, if it did."""
        known, key = self.study.user_attrs.get(STEP_SECONDS, {}), self._speed_key(config)
        if self.settings.budget_samples is not None or key in known:
            return None
        options, folder = self._options(SPEED_STEPS), self.folder / "trials" / "speed"
        # Without the schedule, whose warm-up may be longer.
        config = {name: value for name, value in config.items() if name != "scheduler"}
        ours = {name: value for name, value in config.get(SECTION, {}).items() if name != "schedule"}
        outcome = run_trial(folder, options, {**config, SECTION: ours}, self.settings.machines, lambda losses: False)
        if outcome.step_seconds is None:
            return outcome
        self.study.set_user_attr(STEP_SECONDS, {**known, key: outcome.step_seconds})
        return None

    def _train(self, trial: Trial, config: dict) -> TrialOutcome:
        failed = self._measure_speed(config)
        if failed:
            return failed
        steps, reported = self._steps(config), 0

        def should_stop(losses: list[float | None]) -> bool:
            nonlocal reported
            for point in range(reported + 1, len(losses) * REPORTS // steps + 1):
                reported, loss = point, mean_of_last(losses, point * steps // REPORTS)
                if loss is not None:
                    trial.report(loss, point)
            return reported < REPORTS and trial.should_prune()

        options = self._options(steps)
        return run_trial(self._trial_folder(trial.number), options, config, self.settings.machines, should_stop)

    def _tell(self, trial: Trial, config: dict, outcome: TrialOutcome) -> None:
        resolved = resolve(config, world_size=self.settings.machines.world_size, total_steps=MAX_INT).ds_config
        batch, micro, accumulation = resolve_batch_sizes(resolved, self.settings.machines.world_size)
        facts = {
            "learning_rate": resolved["optimizer"]["params"].get("lr"),
            "batch_size": batch,
            "micro_batch_size": micro,
            "accumulation": accumulation,
            "steps": len(outcome.losses),
            "samples": len(outcome.losses) * batch,
            "train_loss": outcome.train_loss,
            "eval_loss": outcome.eval_loss,
            "seconds": outcome.seconds,
            "problem": outcome.problem,
            "losses": outcome.losses,
            "config": config,
        }
        for name, value in facts.items():
            trial.set_user_attr(name, value)
        if outcome.pruned:
            self.study.tell(trial, state=TrialState.PRUNED)
        elif outcome.problem or outcome.value is None:
            self.study.tell(trial, state=TrialState.FAIL)
        else:
            self.study.tell(trial, outcome.value)

    def _check(self, values: dict[str, Any]) -> None:
        """Find before any training what would end a trial with these values at its start."""
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            try:
                config = self._configure(values)
                # Of a budget in minutes the steps are not known yet; any warm-up is shorter than these.
                steps = MAX_INT if self.settings.budget_samples is None else self._steps(config)
                json.dump(config, file)
                file.flush()
                options = argparse.Namespace(**{**vars(self._options(steps)), "deepspeed_config": file.name})
                set_up_run(options, self.settings.machines.world_size)
            except UserError as error:
                said = " ".join(f"{path}={value}" for path, value in values.items())
                raise UserError(f"{said}: {str(error).removeprefix(f'{file.name}: ')}") from None

    def _options(self, steps: int) -> argparse.Namespace:
        unset = {"epochs": None, "save_interval": None, "eval_interval": None, "resume": "never", "keep_last": None}
        output = self.folder / "new"  # each trial has its own
        return argparse.Namespace(**{**vars(self.options), **unset, "max_steps": steps, "output": str(output)})

    def _trial_folder(self, number: int) -> Path:
        return self.folder / "trials" / f"{number:04d}"

    def _open(self, resume: bool) -> optuna.Study:
        path = self.folder / STORAGE
        if self.folder.exists() and (not self.folder.is_dir() or (any(self.folder.iterdir()) and not path.is_file())):
            raise UserError(f"--output {self.folder} is not empty and holds no sweep; name another folder")
        if path.exists() and not resume:
            raise UserError(f"--output {self.folder} holds a sweep; --resume goes on with it, or name another folder")
        if resume and not path.exists():
            raise UserError(f"--resume: {self.folder} holds no sweep")
        self.folder.mkdir(parents=True, exist_ok=True)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        try:
            study = optuna.create_study(
                storage=f"sqlite:///{path}",
                study_name=STUDY,
                sampler=optuna.samplers.TPESampler(seed=self.options.seed),
                pruner=PRUNERS[self.settings.pruner](),
                load_if_exists=True,
            )
            theirs, mine = study.user_attrs.get(IDENTITY), self._identity()
        except Exception as error:  # SQLAlchemy's and Optuna's, of a file that is none of theirs
            raise UserError(f"{path} cannot be read as the storage of a sweep: {type(error).__name__}") from None
        if theirs is None and not study.trials:
            study.set_user_attr(IDENTITY, mine)
        elif theirs != mine:
            changes = describe_changes(theirs or {}, mine)
            raise UserError(f"{path} was made by another sweep: {changes}; name another folder")
        return study

    def _identity(self) -> dict:
        """What makes this sweep this sweep."""
        return {
            "data": fingerprint(PreparedData(self.options.data).manifest),
            "--deepspeed_config": fingerprint(self.base),
            "--model": self.options.model,
            "--seed": self.options.seed,
            "--param": [f"{parameter.path}={parameter.spec}" for parameter in self.settings.parameters],
            "--budget-samples": self.settings.budget_samples,
            "--budget-minutes": self.settings.budget_minutes,
            "--trials": self.settings.trials,
            "--num-procs": self.settings.machines.world_size,
            "--pruner": self.settings.pruner,
        }
