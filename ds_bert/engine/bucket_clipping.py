"""Bucket clipping on a DeepSpeed engine: our reducer at stage 0, DeepSpeed's own buckets at ZeRO 1 and 2."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_bert.engine.gradient_guard import guard_of
from ds_bert.engine.patches import wrap
from ds_bert.engine.zero_clipping import ZeroClipping
from ds_bert.errors import UserError
from ds_bert.reduction.reducer import OverlappedReducer, check_settings
from ds_bert.reduction.trace import Trace
from ds_bert.resolution.refusals import KEY, check_compatible

CLIENT_STATE = "ds_bert_bucket_clipping"


def attach_to_engine(
    engine: DeepSpeedEngine,
    *,
    max_norm: float | None = None,
    threshold: str = "proportional",
    bucket_size_mb: float = 25.0,
    overlap: bool = True,
    communication_dtype: torch.dtype | None = None,
    trace: str | Path | None = None,
) -> OverlappedReducer | ZeroClipping:
    """Replace DeepSpeed's reduction and its clipping by bucket-wise clipping before the all-reduce.

    DeepSpeed's own clipping is switched off (`engine.gradient_clipping()` is 0 afterwards), steps with a non-finite
    gradient are skipped on all ranks (`GradientGuard`), `engine.get_global_grad_norm()` is the norm of the averaged
    gradient at every stage, and checkpoints carry the bucket plan.

    Args:
        engine: before its first backward pass; the same on all ranks.
        max_norm: maximum norm; None for the engine's own `gradient_clipping`.
        threshold, bucket_size_mb, overlap, communication_dtype: see `OverlappedReducer`. At ZeRO 1 and 2 only
            `threshold` counts: there DeepSpeed's `reduce_bucket_size`, `overlap_comm` and `communication_data_type` say
            the rest.
        trace: folder for a Chrome trace of each rank; None for none.

    Returns:
        the reducer, also as `engine.bucket_clipping`; its `statistics` are those of the last step.

    Raises:
        UserError: this engine reduces gradients in a way that cannot be clipped by bucket; names the key.
    """
    check_engine(engine)
    if max_norm is None:
        max_norm = engine.gradient_clipping()
        if not max_norm:
            raise UserError("the engine's gradient_clipping is 0; set that key, or give max_norm")
    check_settings(max_norm, threshold, bucket_size_mb)
    guard = guard_of(engine)
    if engine.zero_optimization():
        clipping = ZeroClipping(engine, max_norm=max_norm, threshold=threshold, loss_scale=guard.loss_scale)
    else:
        clipping = _reduce_in_place_of(
            engine,
            max_norm=max_norm,
            threshold=threshold,
            bucket_size_mb=bucket_size_mb,
            overlap=overlap,
            communication_dtype=communication_dtype,
            loss_scale=guard.loss_scale,
        )
    guard.clipping = engine.bucket_clipping = clipping
    _switch_off_own_clipping(engine)
    _save_with_checkpoints(engine)
    if trace is not None:
        _trace_steps(engine, Trace(Path(trace), dist.get_rank()))
    return clipping


def check_engine(engine: DeepSpeedEngine) -> None:
    """Refuse engines whose gradients take another way.

    Raises:
        UserError: names the key and what to do.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise UserError(f"not an engine from deepspeed.initialize but a {type(engine).__name__}; see reduction.attach")
    # Not engine.config, which is the path where a path was given.
    check_compatible(engine._config._param_dict)
    obstacles = {
        "a pipeline module": isinstance(engine, PipelineEngine),
        "experts (MoE)": engine.has_moe_layers,
    }
    for obstacle, present in obstacles.items():
        if present:
            raise UserError(f"{KEY} does not work together with {obstacle}; set {KEY}.enabled to false")
    if "bucket_clipping" in vars(engine):
        raise UserError("this engine has a bucket clipping already: attach one only")


def _reduce_in_place_of(engine: DeepSpeedEngine, **settings) -> OverlappedReducer:
    reducer = OverlappedReducer(
        engine.module,
        process_group=engine.data_parallel_group,
        synchronizes=lambda: engine.is_gradient_accumulation_boundary() and not engine.inside_no_sync_ctxt,
        **settings,
    )

    def finish_at_the_boundary(*args, **kwargs) -> None:
        if engine.is_gradient_accumulation_boundary():
            reducer.finish()

    # In place of DeepSpeed's own, which is not called.
    wrap(engine, "allreduce_gradients", "bucket clipping", lambda _: finish_at_the_boundary)
    return reducer


def _trace_steps(engine: DeepSpeedEngine, trace: Trace) -> None:
    """Spans of forward, backward and optimizer around those of the reduction."""
    engine.bucket_clipping.trace = engine.trace = trace
    backward_started = 0.0

    def forward(inner: Callable) -> Callable:
        def traced(*args, **kwargs):
            with trace.span("forward", "compute"):
                return inner(*args, **kwargs)

        return traced

    def backward(inner: Callable) -> Callable:
        def traced(*args, **kwargs):
            nonlocal backward_started
            backward_started = time.perf_counter()
            return inner(*args, **kwargs)

        return traced

    def reduce(inner: Callable) -> Callable:
        def traced(*args, **kwargs):
            # DeepSpeed reduces at the end of its backward.
            trace.add("backward", "compute", backward_started, time.perf_counter())
            return inner(*args, **kwargs)

        return traced

    def take_step(inner: Callable) -> Callable:
        def traced(*args, **kwargs):
            with trace.span("optimizer", "compute"):
                inner(*args, **kwargs)
            trace.end_step(engine.global_steps)

        return traced

    wrap(engine, "forward", "trace", forward)
    wrap(engine, "backward", "trace", backward)
    wrap(engine, "allreduce_gradients", "trace", reduce)
    wrap(engine, "_take_model_step", "trace", take_step)


def _switch_off_own_clipping(engine: DeepSpeedEngine) -> None:
    engine._config.gradient_clipping = 0.0
    if hasattr(engine.optimizer, "clip_grad"):
        engine.optimizer.clip_grad = 0.0


def _save_with_checkpoints(engine: DeepSpeedEngine) -> None:
    def save(inner: Callable) -> Callable:
        def save_with_plan(save_dir, tag=None, client_state=None, **kwargs):
            client_state = {**(client_state or {}), CLIENT_STATE: engine.bucket_clipping.state_dict()}
            return inner(save_dir, tag=tag, client_state=client_state, **kwargs)

        return save_with_plan

    def load(inner: Callable) -> Callable:
        def load_with_plan(*args, **kwargs):
            path, client_state = inner(*args, **kwargs)
            state = client_state.pop(CLIENT_STATE, None) if client_state else None
            if state is not None:
                engine.bucket_clipping.load_state_dict(state)
            _switch_off_own_clipping(engine)  # DeepSpeed's optimizers restore the maximum norm of the checkpoint
            return path, client_state

        return load_with_plan

    wrap(engine, "save_checkpoint", "bucket clipping", save)
    wrap(engine, "load_checkpoint", "bucket clipping", load)
