"""One rank of benchmarks/overlap.py: the same training step with every way to reduce gradients, in turn.

T = tokens of a micro-batch, V = vocabulary.
"""

import argparse
import contextlib
import functools
import json
import os
import statistics
import time
from collections.abc import Callable

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from transformers import BertConfig, BertForMaskedLM

import ds_bert
from ds_bert.accelerator.compiled_ops import skip_unused_comm_op
from ds_bert.modeling import MaskedPositionHead, masked_lm_loss
from ds_bert.reduction import attach

LENGTH, VOCABULARY, HIDDEN, LAYERS = 128, 30_528, 256, 4
MASKED_SHARE = 0.15
MAX_NORM = 0.5
WARM_UP = 2


class Training:
    """A model with its optimizer; a subclass says how gradients are reduced.

    Args:
        args: of the worker.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=4,
            intermediate_size=4 * HIDDEN, max_position_embeddings=LENGTH, tie_word_embeddings=not args.untied,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.model = BertForMaskedLM(config)
        self.head = MaskedPositionHead(self.model)
        self.accumulation, self.sequences = args.accumulation, args.sequences
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.wait_s: list[float] = []
        self.prepare(args)

    def prepare(self, args: argparse.Namespace) -> None:
        pass

    def loss(self, model: nn.Module, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
        # Words are as frequent as in text (Zipf), since the rows looked up follow from that.
        ids = (VOCABULARY ** torch.rand(self.sequences, LENGTH, generator=generator)).long().clamp(max=VOCABULARY - 1)
        positions = torch.arange(0, ids.numel(), round(1 / MASKED_SHARE))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        loss = masked_lm_loss(self.head(model, inputs, positions), ids.flatten()[positions])
        return loss / len(positions) / self.accumulation

    def step(self, seed: int) -> None:
        for micro_step in range(self.accumulation):
            self.is_last = micro_step == self.accumulation - 1
            with contextlib.nullcontext() if self.is_last else self.no_sync():
                self.backward(self.loss(self.wrapped(), self.accumulation * seed + micro_step))
        self.reduce()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def wrapped(self) -> nn.Module:
        return self.model

    def no_sync(self):
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def reduce(self) -> None:
        pass


class NoCommunication(Training):
    """Each rank by itself."""


class ClippedAlone(Training):
    """Each rank by itself, its gradient clipped by the whole norm."""

    def reduce(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)


class DummyTransfer(Training):
    """Each rank by itself, while as many bytes as gradients have travel from the start of backward on."""

    def prepare(self, args: argparse.Namespace) -> None:
        self.payload = [torch.zeros(size) for size in piece_sizes(self.model)]

    def backward(self, loss: torch.Tensor) -> None:
        if self.is_last:
            self.works = [dist.all_reduce(piece, async_op=True) for piece in self.payload]
        loss.backward()

    def reduce(self) -> None:
        started = time.perf_counter()
        for work in self.works:
            work.wait()
        self.wait_s.append(time.perf_counter() - started)


class TorchDDP(Training):
    """torch's DistributedDataParallel, clipped after the reduction."""

    def prepare(self, args: argparse.Namespace) -> None:
        # An untied BERT has a bias that nothing uses.
        self.parallel = nn.parallel.DistributedDataParallel(
            self.model, gradient_as_bucket_view=True, find_unused_parameters=args.untied
        )

    def wrapped(self) -> nn.Module:
        return self.parallel

    def no_sync(self):
        return self.parallel.no_sync()

    def reduce(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)


class OursPlain(Training):
    """`ds_bert.reduction.attach`, without DeepSpeed."""

    def prepare(self, args: argparse.Namespace) -> None:
        self.reducer = attach(self.model, max_norm=MAX_NORM, bucket_size_mb=args.bucket_size_mb)

    def no_sync(self):
        return self.reducer.no_sync()

    def reduce(self) -> None:
        self.wait_s.append(self.reducer.finish().wait_s)


class DeepSpeed(Training):
    """`deepspeed.initialize` at a ZeRO stage, with its own clipping."""

    stage = 0
    bucket_clipping = False
    sent_in: str | None = None

    def prepare(self, args: argparse.Namespace) -> None:
        config = {
            "train_micro_batch_size_per_gpu": self.sequences,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": MAX_NORM,
            "zero_optimization": {"stage": self.stage, **({"overlap_comm": True} if self.stage else {})},
            "zero_allow_untested_optimizer": True,
        }
        section = {
            "enabled": self.bucket_clipping,
            "bucket_size_mb": args.bucket_size_mb,
            "communication_dtype": self.sent_in,
        }
        initialize = deepspeed.initialize
        if self.bucket_clipping:
            initialize, config["ds_bert"] = ds_bert.initialize, {"bucket_clipping": section}
        self.engine = initialize(model=self.model, optimizer=self.optimizer, config=config)[0]

    def step(self, seed: int) -> None:
        for micro_step in range(self.accumulation):
            loss = self.loss(self.engine, self.accumulation * seed + micro_step) * self.accumulation
            self.engine.backward(loss)
            self.engine.step()
        if self.bucket_clipping and self.stage == 0:
            self.wait_s.append(self.engine.bucket_clipping.statistics.wait_s)


class DeepSpeedZero2(DeepSpeed):
    """The same at ZeRO 2 with `overlap_comm`."""

    stage = 2


class Ours(DeepSpeed):
    """`ds_bert.initialize` with bucket clipping at stage 0."""

    bucket_clipping = True


class OursInBf16(Ours):
    """The same, the gradients sent in bf16."""

    sent_in = "bf16"


class OursZero2(DeepSpeedZero2):
    """The same at ZeRO 2."""

    bucket_clipping = True


VARIANTS: dict[str, type[Training]] = {
    "no communication": NoCommunication,
    "no communication, clipped": ClippedAlone,
    "dummy transfer": DummyTransfer,
    "torch DDP": TorchDDP,
    "DeepSpeed stage 0": DeepSpeed,
    "DeepSpeed ZeRO 2": DeepSpeedZero2,
    "ds_bert without DeepSpeed": OursPlain,
    "ds_bert stage 0": Ours,
    "ds_bert stage 0, sent in bf16": OursInBf16,
    "ds_bert ZeRO 2": OursZero2,
}


def piece_sizes(model: nn.Module) -> list[int]:
    """Elements of the parameters but the smallest, the largest first: nearly all bytes of a gradient."""
    return [p.numel() for p in sorted(model.parameters(), key=lambda p: -p.numel()) if p.numel() > 4096]


def seconds_of(function: Callable[[], None]) -> float:
    dist.barrier()
    started = time.perf_counter()
    function()
    # The slowest rank decides.
    seconds = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def all_reduces_alone(model: nn.Module) -> float:
    payload = [torch.zeros(size) for size in piece_sizes(model)]

    def transfer() -> None:
        for work in [dist.all_reduce(piece, async_op=True) for piece in payload]:
            work.wait()

    return statistics.median(seconds_of(transfer) for _ in range(5))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequences", type=int, required=True)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--bucket-size-mb", type=float, default=1.0)
    parser.add_argument("--untied", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    skip_unused_comm_op()
    deepspeed.init_distributed()
    variants = {name: VARIANTS[name](args) for name in args.variants}
    alone = all_reduces_alone(next(iter(variants.values())).model)
    steps: dict[str, list[float]] = {name: [] for name in variants}
    for round_number in range(WARM_UP + args.rounds):
        for name, training in variants.items():
            seconds = seconds_of(functools.partial(training.step, round_number))
            if round_number >= WARM_UP:
                steps[name].append(seconds)
    if dist.get_rank() == 0:
        report = {
            "all_reduces_alone_s": alone,
            "steps_s": steps,
            "wait_s": {name: training.wait_s[WARM_UP:] for name, training in variants.items() if training.wait_s},
        }
        print("RESULT " + json.dumps(report), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # DeepSpeed's atexit handlers want a process group


if __name__ == "__main__":
    main()
