"""The program each rank runs: `deepspeed --module ds_bert.training.pretrain ...` (`ds-bert pretrain` starts it)."""

import argparse
import copy
import dataclasses
import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from transformers import PreTrainedModel

from ds_bert.accelerator.compiled_ops import build_ops, needed_ops, use_torch_adam
from ds_bert.agreement import agree, gather, on_first_rank, together
from ds_bert.cluster.rank_program import run_rank
from ds_bert.data.batches.collators import Collator
from ds_bert.engine import TRACE_FOLDER, initialize_resolved
from ds_bert.errors import UserError
from ds_bert.modeling import (
    MaskedPositionHead,
    build_model,
    check_packed_execution,
    collator_for,
    compile_layers,
    use_cpu_dropout,
    use_gradient_checkpointing,
)
from ds_bert.optim import parameter_groups
from ds_bert.optim.optimizers import substitute
from ds_bert.resolution import Resolved
from ds_bert.sampling import LengthBalancedBatchSampler
from ds_bert.training import checkpoint as checkpoints
from ds_bert.training import run_lock
from ds_bert.training.loop import Trainer
from ds_bert.training.metrics import MetricsLog, plot_loss
from ds_bert.training.options import add_pretrain_arguments
from ds_bert.training.setup import RunSetup, set_up_run, write_run_file

log = logging.getLogger("ds_bert")

MODULE = "ds_bert.training.pretrain"


def main(argv: list[str] | None = None) -> int:
    """Train one rank. Returns the exit code: 0 done, 1 failed, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="ds_bert.training.pretrain", description=__doc__, allow_abbrev=False)
    add_pretrain_arguments(parser)
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    return run_rank("ds-bert pretrain", MODULE, argv or sys.argv[1:], lambda rank: pretrain(args))


def pretrain(args: argparse.Namespace) -> None:
    """Do a whole run, or what is left of it. Needs the default process group; a collective call.

    Args:
        args: from `options.add_pretrain_arguments`.

    Raises:
        UserError: on all ranks alike.
    """
    setup = together(lambda: set_up_run(args, dist.get_world_size()))
    agree(setup.identity(), "the ranks", "give all of them the same options, configuration and data")
    first = dist.get_rank() == 0
    lock = together(lambda: run_lock.hold(setup.run_folder) if first else None)
    try:
        _train(setup)
    finally:
        if lock:
            lock.close()


def _train(setup: RunSetup) -> None:
    args, first = setup.args, dist.get_rank() == 0
    chosen = checkpoints.choose_checkpoint(setup.run_folder, args.resume)
    # Of this start only: the compiler of this machine, the checkpoint's number of ranks.
    ds_config = _with_an_adam_that_runs(setup.ds_config)
    folder = _loadable_folder(chosen, ds_config)
    engine, head, collate = _build(setup, dataclasses.replace(setup.resolved, ds_config=ds_config), chosen)
    client_state = None
    if chosen is None:
        on_first_rank(lambda: write_run_file(setup))
    else:
        client_state = checkpoints.load_checkpoint(engine, folder)
        checkpoints.delete_universal(setup.run_folder)
        if args.resume != "auto":
            checkpoints.set_aside_later(setup.run_folder, chosen.step)
        _say(f"resumed from {chosen.folder} at step {engine.global_steps} of {setup.total_steps}")
    metrics = together(lambda: MetricsLog(setup.run_folder, engine.global_steps) if first else None)
    if engine.global_steps >= setup.total_steps:
        _say(f"the run is complete: it has {engine.global_steps} steps and {setup.total_steps} were asked for")
    if setup.section.bucket_clipping.trace and setup.section.bucket_clipping.enabled:
        engine.trace.folder = setup.run_folder / TRACE_FOLDER
    trainer = Trainer(setup, engine, head, collate, metrics, client_state)
    _say(_describe_epoch(trainer.sampler))
    stopped = trainer.train()
    if stopped:
        _say(f"stopped as asked, saved at step {engine.global_steps}; the same command goes on from there")
    if first:
        _say(f"loss curve: {plot_loss(setup.run_folder)}")


def _describe_epoch(sampler: LengthBalancedBatchSampler) -> str:
    steps, dropped = sampler.steps_per_epoch, sampler.num_dropped
    batch = f"{sampler.global_batch_size:,}"
    if sampler.options.max_tokens_per_micro_batch:
        batch = f"{(sampler.num_samples - dropped) / max(1, steps):,.1f} (mean)"
    left = "come first in the next" if sampler.options.carry_over else "are left out"
    return (
        f"{sampler.num_samples:,} samples make {steps:,} steps of {batch} an epoch; {dropped:,} samples, others each "
        f"time, do not fill a batch and {left}"
    )


def _with_an_adam_that_runs(ds_config: dict) -> dict:
    """The configuration with torch's Adam in place of DeepSpeed's where a rank cannot compile that."""
    ds_config = copy.deepcopy(ds_config)
    failures = gather(build_ops(needed_ops(ds_config)))
    reason = next((failure for failure in failures if failure), None)
    if reason:
        name = ds_config["optimizer"]["type"]
        if "adam" not in name.lower():
            raise UserError(f"DeepSpeed's {name} cannot be compiled here ({reason}); take AdamW")
        use_torch_adam(ds_config)
        _say(f"DeepSpeed's fused Adam cannot be compiled here ({reason}); training goes on with torch's Adam")
    return ds_config


def _loadable_folder(chosen: checkpoints.Checkpoint | None, ds_config: dict) -> Path | None:
    """The folder to load: the checkpoint's, or its universal form (then `ds_config` is told) for other rank counts."""
    stage = ds_config.get("zero_optimization", {}).get("stage", 0)
    if chosen is None or not checkpoints.needs_universal(chosen, dist.get_world_size(), stage):
        return chosen and chosen.folder
    _say(
        f"{chosen.tag} was saved by {chosen.manifest['world_size']} ranks, this run has {dist.get_world_size()}: going "
        "through DeepSpeed's universal checkpoint"
    )
    ds_config.setdefault("checkpoint", {})["load_universal"] = True
    return checkpoints.convert_to_universal(chosen)


def _build(
    setup: RunSetup, resolved: Resolved, chosen: checkpoints.Checkpoint | None
) -> tuple[DeepSpeedEngine, MaskedPositionHead, Collator]:
    args = setup.args
    torch.manual_seed(args.seed)
    model = together(
        lambda: build_model(
            args.model, setup.model_config, from_config=args.from_config, trust_remote_code=args.trust_remote_code
        )
    )
    weights = f"continues from the weights of {args.model}" if setup.continues_weights else "starts from fresh weights"
    if chosen:
        weights = f"goes on from {chosen.tag}"
    _say(f"model {args.model}: {sum(p.numel() for p in model.parameters()):,} parameters; {weights}")
    collate, head = together(lambda: _prepare_execution(setup, model))
    return together(lambda: initialize_engine(model, resolved, args.deepspeed_config)), head, collate


def _prepare_execution(setup: RunSetup, model: PreTrainedModel) -> tuple[Collator, MaskedPositionHead]:
    """What makes the model's batches, and its head; the model is changed in place as "execution" says."""
    execution = setup.section.execution
    if execution.packed:
        check_packed_execution(model)
    use_cpu_dropout(model)
    collate = collator_for(model, setup.tokenizer, packed=execution.packed)
    head = MaskedPositionHead(model)
    head.use_fused_loss(model)
    if execution.gradient_checkpointing:
        use_gradient_checkpointing(model)
    if execution.compile:
        compile_layers(model)
    return collate, head


def initialize_engine(model: torch.nn.Module, resolved: Resolved, source: str) -> DeepSpeedEngine:
    """DeepSpeed's engine; what DeepSpeed objects to in its part of the configuration becomes one line.

    Raises:
        UserError: DeepSpeed's own message.
    """
    groups = parameter_groups(model)
    optimizer = substitute(resolved.ds_config, groups)
    parameters = {"model_parameters": groups} if optimizer is None else {"optimizer": optimizer}
    try:
        engine = initialize_resolved(resolved, {"model": model, **parameters})[0]
    except (AssertionError, AttributeError, ImportError, TypeError, ValueError) as error:
        log.debug("", exc_info=True)
        reason = " ".join(str(error).split())[:500]
        raise UserError(f"{source}: DeepSpeed refuses it: {type(error).__name__}: {reason}") from None
    return engine


def _say(message: str) -> None:
    if dist.get_rank() == 0:
        log.info(message)


if __name__ == "__main__":
    sys.exit(main())
