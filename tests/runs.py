"""Pretraining runs inside the ranks of a `RankPool`."""

import argparse
import contextlib
import io
import json
import logging
from pathlib import Path
from typing import Any

import torch

from ds_bert.errors import UserError
from ds_bert.training.options import add_pretrain_arguments


def parse_run(**options: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_pretrain_arguments(parser)
    # The one option that is spelled with an underscore, as DeepSpeed spells it.
    words = [
        f"--{key if key == 'deepspeed_config' else key.replace('_', '-')}={value}" for key, value in options.items()
    ]
    return parser.parse_args(words)


def metrics_lines(args: argparse.Namespace) -> list[dict]:
    return [json.loads(line) for line in Path(args.output, "metrics.jsonl").read_text().splitlines()]


class CrashError(Exception):
    """Stands for a kill: nothing is saved, nothing is tidied up."""


def train(args: argparse.Namespace, crash_at: int | None = None) -> dict:
    """Run `pretrain`; what it logged, the error that ended it, and the weights and optimizer state at its end.

    Args:
        args: of the run.
        crash_at: end without a word when this step's evaluation and save are due.
    """
    from ds_bert.training import loop, pretrain

    original = loop.Trainer._evaluate_and_save
    seen: dict = {"error": None}

    def watched(trainer, micro_steps_consumed: int) -> None:
        seen["trainer"] = trainer
        if trainer.engine.global_steps == crash_at:
            raise CrashError
        original(trainer, micro_steps_consumed)

    loop.Trainer._evaluate_and_save = watched
    try:
        with captured_log() as log:
            pretrain.pretrain(args)
    except CrashError:
        pass
    except UserError as error:
        seen["error"] = str(error)
    finally:
        loop.Trainer._evaluate_and_save = original
    trainer = seen.pop("trainer", None)
    if trainer:
        seen["weights"] = {name: p.detach().float().clone() for name, p in trainer.engine.module.named_parameters()}
        seen["optimizer"] = optimizer_tensors(trainer.engine)
    return {**seen, "log": log.getvalue()}


@contextlib.contextmanager
def captured_log():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    loggers = [logging.getLogger("ds_bert"), logging.getLogger("DeepSpeed")]
    for logger in loggers:
        logger.addHandler(handler)
    loggers[0].setLevel(logging.INFO)
    try:
        yield stream
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def optimizer_tensors(engine) -> list[torch.Tensor]:
    """Every tensor of the optimizer's state on this rank."""
    state = engine.optimizer.state
    return [
        value.detach().float().clone()
        for entry in state.values()
        for _, value in sorted(entry.items())
        if isinstance(value, torch.Tensor)
    ]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def relative_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """|a - b| / |b| over all tensors together, in double precision."""
    assert ours.keys() == theirs.keys()
    a = torch.cat([ours[name].double().flatten() for name in ours])
    b = torch.cat([theirs[name].double().flatten() for name in ours])
    return float((a - b).norm() / b.norm())
