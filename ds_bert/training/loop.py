"""The pretraining loop of one rank."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from torch.utils.data import DataLoader

from ds_bert.cluster.supervision.rank_side import stop_request
from ds_bert.data.batches.collators import Collator, MaskedBatch
from ds_bert.data.batches.masked_dataset import MaskedLMDataset
from ds_bert.data.batches.masking import TokenMasker
from ds_bert.engine import RankClock, guard_of
from ds_bert.modeling import MaskedPositionHead
from ds_bert.training.checkpoint import save_checkpoint
from ds_bert.training.evaluator import Evaluator
from ds_bert.training.metrics import MetricsLog
from ds_bert.training.progress import progress_bar
from ds_bert.training.setup import RunSetup, make_sampler

# A stream of random numbers that shares the run's seed (see sampling.epoch.ORDER_STREAM).
DROPOUT_STREAM = 4


@dataclass
class StepSums:
    """What one rank adds up over the micro-steps of an optimizer step."""

    loss: torch.Tensor
    real_tokens: int = 0
    padded_tokens: int = 0
    data_wait_s: float = 0.0
    started: float = field(default_factory=time.perf_counter)


class Trainer:
    """Trains, evaluates, saves. Every method is a collective call.

    Args:
        setup: the run.
        engine: from `ds_bert.initialize`, weights and optimizer loaded.
        head: attached to the engine's model.
        collate: makes the batches that this model computes.
        metrics: on rank 0 the run's metrics, else None.
        client_state: from the checkpoint the run goes on from.
    """

    def __init__(
        self,
        setup: RunSetup,
        engine: DeepSpeedEngine,
        head: MaskedPositionHead,
        collate: Collator,
        metrics: MetricsLog | None,
        client_state: dict | None,
    ) -> None:
        self.setup, self.engine, self.head, self.collate, self.metrics = setup, engine, head, collate, metrics
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.accumulation_steps = engine.gradient_accumulation_steps()
        probability, seed = setup.section.masking.probability, setup.args.seed
        masker = TokenMasker(setup.tokenizer, probability=probability, seed=seed)
        self.dataset = MaskedLMDataset(setup.data.train, masker)
        self.sampler = make_sampler(
            setup.ds_config,
            setup.section,
            setup.data,
            setup.model_config,
            world_size=self.world_size,
            rank=self.rank,
            seed=seed,
        )
        self.samples = 0
        if client_state:
            self.sampler.load_state_dict(client_state["sampler"])
            self.samples = client_state["samples"]
        self.evaluator = None
        if setup.data.validation:
            self.evaluator = Evaluator(
                setup.data.validation,
                setup.tokenizer,
                probability=probability,
                micro_batch_size=engine.train_micro_batch_size_per_gpu(),
                collate=collate,
            )
        self.stopping = False
        """Whether any rank was asked to stop, as all know since the last step."""
        self.guard = guard_of(engine)
        self.clock = RankClock(engine)
        self.progress = progress_bar(
            total=setup.total_steps,
            initial=engine.global_steps,
            desc="pretrain",
            unit="step",
            disable=self.rank != 0,
        )

    def train(self) -> bool:
        """Train to the run's last step, or until a rank is asked to stop.

        Returns:
            whether it was stopped; it has saved then.

        Raises:
            UserError: gradients stay non-finite, or a checkpoint cannot be saved.
        """
        with self.progress, stop_request.deferred():
            while self.engine.global_steps < self.setup.total_steps and not self.stopping:
                self._train_epoch()
                self.sampler.set_epoch(self.sampler.epoch + 1)
        return self.stopping

    def _train_epoch(self) -> None:
        self.dataset.set_epoch(self.sampler.epoch)
        loader = DataLoader(
            self.dataset,
            batch_sampler=self.sampler,
            collate_fn=self.collate,
            num_workers=self.setup.args.num_workers,
            pin_memory=self.engine.device.type == "cuda",
        )
        micro_batches = iter(loader)
        for epoch_step in range(self.sampler.start_step, self.sampler.steps_per_epoch):
            self._train_step(micro_batches, self.sampler.global_batch(epoch_step))
            steps_consumed = epoch_step + 1 - self.sampler.start_step
            self._evaluate_and_save(micro_steps_consumed=steps_consumed * self.accumulation_steps)
            if self.engine.global_steps >= self.setup.total_steps or self.stopping:
                return

    def _train_step(self, micro_batches: Iterator[MaskedBatch], global_batch: np.ndarray) -> None:
        engine = self.engine
        masked_tokens = int(self.dataset.num_masked(global_batch).sum())
        # DeepSpeed divides by the accumulation steps and averages over the ranks; this undoes both, so that the
        # gradient is that of the mean over all masked tokens of the global batch (docs/loss.md).
        loss_factor = self.world_size * self.accumulation_steps / masked_tokens
        self.clock.start()
        sums = StepSums(loss=torch.zeros((), dtype=torch.float64, device=engine.device))
        for micro_step in range(self.accumulation_steps):
            waiting_since = time.perf_counter()
            batch = next(micro_batches).to(engine.device)
            sums.data_wait_s += time.perf_counter() - waiting_since
            self._seed_dropout(micro_step)
            loss = self.head.loss(engine, batch.model_inputs, batch.positions, batch.labels)
            engine.backward(loss * loss_factor)
            sums.loss += loss.detach()
            sums.real_tokens += batch.real_tokens
            sums.padded_tokens += batch.padded_tokens
            if micro_step == self.accumulation_steps - 1:
                learning_rate = engine.get_lr()[0]
            engine.step()
        self.samples += len(global_batch)
        self._log_step(sums, masked_tokens, learning_rate)

    def _seed_dropout(self, micro_step: int) -> None:
        """Key dropout to (seed, step, micro-step, rank), so that no evaluation and no resume can shift it."""
        key = [self.setup.args.seed, DROPOUT_STREAM, self.engine.global_steps, micro_step, self.rank]
        torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]))

    def _log_step(self, sums: StepSums, masked_tokens: int, learning_rate: float) -> None:
        engine = self.engine
        here = [sums.real_tokens, sums.padded_tokens, sums.data_wait_s, self.clock.seconds(), stop_request.received]
        mine = torch.cat([sums.loss.view(1), torch.tensor(here, dtype=torch.float64).to(engine.device)])
        ranks = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(ranks, mine)
        losses, real_tokens, padded_tokens, data_wait_s, rank_seconds, asked = torch.stack(ranks).cpu().numpy().T
        self.stopping = bool(asked.any())
        norm_before, norm_after = self.guard.norms()
        if self.rank != 0:
            return
        seconds = time.perf_counter() - sums.started
        loss = losses.sum() / masked_tokens
        line = {
            "step": engine.global_steps,
            "loss": loss,
            "grad_norm_before_clip": norm_before,
            "grad_norm_after_clip": norm_after,
            "learning_rate": learning_rate,
            "samples": self.samples,
            "step_s": seconds,
            "real_tokens_per_s": real_tokens.sum() / seconds,
            "padded_tokens_per_s": padded_tokens.sum() / seconds,
            "data_wait_s": data_wait_s.mean(),
            "rank_tokens_max_over_mean": padded_tokens.max() / padded_tokens.mean(),
            "rank_seconds_max_over_mean": rank_seconds.max() / rank_seconds.mean(),
            "slowest_rank": int(rank_seconds.argmax()),
            "skipped_steps": engine.skipped_steps,
        }
        if self.guard.clipping:
            statistics = self.guard.clipping.statistics
            line |= {"clipped_share": statistics.clipped_share, "reduction_wait_s": statistics.wait_s}
        self.metrics.write(line)
        self._feed_monitor({"train_loss": loss, "grad_norm": norm_before})
        self.progress.set_postfix(loss=f"{loss:.3f}", tokens_per_s=f"{line['real_tokens_per_s']:.0f}", refresh=False)
        self.progress.update()

    def _feed_monitor(self, values: dict[str, float]) -> None:
        if self.engine.monitor.enabled:
            events = [(f"Train/Samples/{key}", value, self.samples) for key, value in values.items()]
            self.engine.monitor.write_events(events)

    def _evaluate_and_save(self, micro_steps_consumed: int) -> None:
        args, step = self.setup.args, self.engine.global_steps
        last = step >= self.setup.total_steps

        def due(interval: int | None) -> bool:
            return last or (interval is not None and step % interval == 0)

        # The evaluation comes first: a run killed between the two does both again.
        if self.evaluator and due(args.eval_interval):
            figures = self.evaluator(self.engine, self.head, self.engine.device)
            if self.rank == 0:
                self.metrics.write({"step": step, "samples": self.samples, **figures})
                self._feed_monitor(figures)
                self.progress.write(
                    f"step {step}: held-out loss {figures['eval_loss']:.4f}, masked accuracy "
                    f"{figures['eval_accuracy']:.4f}"
                )
        if due(args.save_interval) or self.stopping:
            position = self.sampler.state_dict(micro_steps_consumed)
            state = {"version": 1, "sampler": position, "samples": self.samples}
            save_checkpoint(self.engine, self.setup.run_folder, state, keep_last=args.keep_last)
