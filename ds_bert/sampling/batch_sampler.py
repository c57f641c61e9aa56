"""The batch sampler: which samples a rank trains on at each micro-step, and a position that can be saved."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ds_bert.agreement import agree, gather
from ds_bert.config import SamplingConfig, checked
from ds_bert.constants import MAX_INT
from ds_bert.errors import UserError
from ds_bert.sampling.arguments import as_lengths, whole_number
from ds_bert.sampling.cost import cost_table, cost_units
from ds_bert.sampling.epoch import DrawnEpoch
from ds_bert.sampling.plan import BatchSizes, Lengths, StepPlan, Strategy
from ds_bert.sampling.position import NOTHING, Position
from ds_bert.sampling.strategies import strategy_class

# Steps kept, so that who iterates and who asks for a global batch some steps behind share the work.
STEPS_KEPT = 16


class LengthBalancedBatchSampler(torch.utils.data.Sampler[list[int]]):
    """Batches of sample indices for one rank, for `torch.utils.data.DataLoader(batch_sampler=...)`.

    One list a micro-step. Over all ranks an epoch yields every sample once, except what does not fill the last global
    batch: a random choice, dropped (`num_dropped`) or, with `carry_over`, yielded first in the next epoch. All ranks
    have the same number of micro-steps. Everything is a pure function of (seed, epoch, position), so nothing is
    communicated, except that the first iteration compares the ranks if a process group of `world_size` ranks exists.

    Example:
        >>> sampler = LengthBalancedBatchSampler(
        ...     [5, 3, 8, 2], micro_batch_size=1, gradient_accumulation_steps=1, world_size=2, rank=0)
        >>> len(sampler)
        2

    Args:
        lengths: (n,) tokens of each sample, at least 1: array, memory map, tensor or list of integers.
        micro_batch_size: samples a rank and micro-step (with free counts: the mean).
        gradient_accumulation_steps: micro-steps an optimizer step.
        world_size: number of ranks.
        rank: this rank.
        strategy: "random", "local_sort", "stratified" or "balanced" (docs/sampling.md).
        seed: of the order.
        cost_model: "tokens", "flops", or a file from `ds-bert balance --measure`.
        hidden_size: of the model, for "flops".
        packed: whether micro-batches run without padding; with accumulation `balanced` then mixes lengths in each.
        options: `window`, `window_scope`, `edges`, `strata`, `equal_counts`, `max_tokens_per_micro_batch`,
            `carry_over`, as in `ds_bert.config.SamplingConfig`, with its defaults.

    Raises:
        UserError: a bad value, or data of less than one global batch.
    """

    drop_last = True

    def __init__(
        self,
        lengths: np.ndarray | torch.Tensor | Sequence[int],
        *,
        micro_batch_size: int,
        gradient_accumulation_steps: int,
        world_size: int,
        rank: int,
        strategy: str = "balanced",
        seed: int = 0,
        cost_model: str = "flops",
        hidden_size: int = 768,
        packed: bool = False,
        **options: Any,
    ) -> None:
        self.sizes = BatchSizes(
            whole_number("micro_batch_size", micro_batch_size, 1, MAX_INT),
            whole_number("gradient_accumulation_steps", gradient_accumulation_steps, 1, MAX_INT),
            whole_number("world_size", world_size, 1, MAX_INT),
        )
        hidden_size = whole_number("hidden_size", hidden_size, 1, MAX_INT)
        if not isinstance(packed, bool | np.bool_):
            raise UserError(f"packed: must be true or false, not {packed!r}")
        self.rank, self.seed, self.packed = whole_number("rank", rank), whole_number("seed", seed), bool(packed)
        if rank >= world_size:
            raise UserError(f"rank: must be below the world size of {world_size}, not {rank}")
        self.options = checked(
            SamplingConfig, {"strategy": strategy, "cost_model": cost_model, **options}, "ds_bert.sampling"
        )
        of_sample = as_lengths(lengths)
        table = cost_table(self.options.cost_model, int(of_sample.max()), hidden_size=hidden_size)
        self.lengths = Lengths(of_sample, cost_units(table))
        self.num_samples = len(of_sample)
        self._ranks_compared = False
        self._begin(Position(0))
        self._check_one_step()

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return self._position.epoch

    @property
    def batch_size(self) -> int:
        """Samples a micro-batch (with free counts: the mean)."""
        return self.sizes.micro_batch_size

    @property
    def global_batch_size(self) -> int:
        """Samples an optimizer step (with a token budget steps hold different numbers)."""
        return self.sizes.global_batch_size

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of the current epoch, or, after a change of sizes within it, of the rest."""
        return self._plan().num_steps

    @property
    def num_dropped(self) -> int:
        """Samples that the current epoch leaves out (with `carry_over`: to the next)."""
        return len(self._plan().order) - self._plan().num_used

    @property
    def start_step(self) -> int:
        """The optimizer step at which iteration begins: 0 unless a state was loaded."""
        return self._position.start // self.sizes.gradient_accumulation_steps

    def __len__(self) -> int:
        """Micro-steps that iteration yields, the same on every rank."""
        return self.steps_per_epoch * self.sizes.gradient_accumulation_steps - self._position.start

    def __iter__(self) -> Iterator[list[int]]:
        self.compare_ranks()
        self._yielded = 0
        accumulation, drawn = self.sizes.gradient_accumulation_steps, self._drawn()
        while self._plan().has_step((self._position.start + self._yielded) // accumulation):
            step, micro_step = divmod(self._position.start + self._yielded, accumulation)
            self._yielded += 1
            yield drawn.indices(self._step(step).micro_batch(micro_step * self.sizes.world_size + self.rank))

    def step_plan(self, step: int) -> StepPlan:
        """Optimizer step `step` of the current epoch, dealt to all ranks."""
        return self._step(step)._replace(samples=self.global_batch(step))

    def global_batch(self, step: int) -> np.ndarray:
        """The samples of optimizer step `step` of the current epoch, over all ranks: (samples,) integers."""
        return self._drawn().samples(self._step(step).samples)

    def set_epoch(self, epoch: int) -> None:
        """Start `epoch` at its first sample; the epoch that was loaded continues where it was."""
        epoch = whole_number("epoch", epoch)
        if epoch != self.epoch:
            self._begin(Position(epoch, self._carried_into(epoch)))

    def state_dict(self, micro_steps_consumed: int | None = None) -> dict:
        """The position as plain values, the same on every rank.

        Args:
            micro_steps_consumed: micro-steps the trainer has done since the state was loaded or the epoch started.
                Without it what was yielded counts, which with prefetching workers runs ahead of the training.

        Raises:
            UserError: more than the epoch has.
        """
        done = self._yielded if micro_steps_consumed is None else micro_steps_consumed
        done = whole_number("micro_steps_consumed", done)
        if done > len(self):
            raise UserError(f"micro_steps_consumed: must be from 0 to the {len(self)} that were left, not {done}")
        step = (self._position.start + done) // self.sizes.gradient_accumulation_steps
        return self._position.state_dict(self._identity(), self.sizes, done, self._plan().samples_before(step))

    def load_state_dict(self, state: dict) -> None:
        """Continue at a saved position: at the same micro-step with the same sizes, at an optimizer step with any.

        Raises:
            UserError: the state belongs to other data or settings, or stands inside an optimizer step of other sizes.
        """
        self._begin(Position.from_state_dict(state, self._identity(), self.sizes))

    def compare_ranks(self, group: dist.ProcessGroup | None = None) -> None:
        """Stop if the ranks have different lengths, settings or positions, or two are the same rank.

        Iteration does this by itself, once. A collective call; without a process group of `world_size` ranks it does
        nothing.

        Raises:
            UserError: the same on all ranks; names what differs.
        """
        if self._ranks_compared or not dist.is_initialized() or dist.get_world_size(group) != self.sizes.world_size:
            return
        mine = {**self._identity(), **vars(self.sizes), **self._position.plain_values()}
        agree(mine, "the ranks' samplers", "give every rank the same lengths and settings", group)
        ranks = gather(self.rank, group)
        if sorted(ranks) != list(range(self.sizes.world_size)):
            raise UserError(f"the samplers of the ranks were made for the ranks {ranks}")
        self._ranks_compared = True

    def _identity(self) -> dict:
        """What the order of the samples follows from, besides the sizes."""
        return {
            "num_samples": self.num_samples,
            "lengths": _digest(self.lengths.of_sample),
            "costs": _digest(self.lengths.cost_units),
            "seed": self.seed,
            "packed": self.packed,
            **self.options.model_dump(mode="json", exclude={"cost_model"}),
        }

    def _begin(self, position: Position) -> None:
        self._position, self._yielded = position, 0
        self._cached: tuple[DrawnEpoch, Strategy] | None = None
        self._steps: OrderedDict[int, StepPlan] = OrderedDict()

    def _drawn(self) -> DrawnEpoch:
        return self._planned()[0]

    def _plan(self) -> Strategy:
        return self._planned()[1]

    def _planned(self) -> tuple[DrawnEpoch, Strategy]:
        """The epoch and the plan of what is left of it after all changes of sizes; made when first needed."""
        if self._cached is None:
            drawn = DrawnEpoch(self.epoch, self.lengths, self.seed, self._position.carried)
            order = drawn.order
            for segment in self._position.segments:
                sizes = BatchSizes(*(segment[name] for name in vars(self.sizes)))
                order = self._make_plan(drawn, order, sizes).order_after(segment["steps"], segment["samples_consumed"])
            self._cached = drawn, self._make_plan(drawn, order, self.sizes)
        return self._cached

    def _make_plan(self, drawn: DrawnEpoch, order: np.ndarray, sizes: BatchSizes) -> Strategy:
        return strategy_class(self.options)(
            order,
            lengths=drawn.lengths,
            sizes=sizes,
            options=self.options,
            packed=self.packed,
            key=(self.seed, drawn.number),
        )

    def _step(self, step: int) -> StepPlan:
        """Step `step` in the epoch's own numbers.

        Raises:
            IndexError: there is no such step.
        """
        if step < 0 or not self._plan().has_step(step):
            raise IndexError(f"step {step}: the epoch has {self.steps_per_epoch}")
        if step not in self._steps:
            self._steps[step] = self._plan().step(step)
            if len(self._steps) > STEPS_KEPT:
                self._steps.popitem(last=False)
        return self._steps[step]

    def _carried_into(self, epoch: int) -> np.ndarray:
        """What the epochs before leave over, each planned with this run's sizes unless it is the current one."""
        if not self.options.carry_over or epoch == 0:
            return NOTHING
        if epoch == self.epoch + 1:
            drawn, plan = self._planned()
            return drawn.samples(plan.order[plan.num_used :]).astype(np.int32)
        carried = NOTHING
        for number in range(epoch):
            drawn = DrawnEpoch(number, self.lengths, self.seed, carried)
            plan = self._make_plan(drawn, drawn.order, self.sizes)
            carried = drawn.samples(plan.order[plan.num_used :]).astype(np.int32)
        return carried

    def _check_one_step(self) -> None:
        budget, sizes = self.options.max_tokens_per_micro_batch, self.sizes
        if budget is not None and not self._plan().has_step(0):
            raise UserError(
                f"the data hold {int(self.lengths.of_sample.sum(dtype=np.int64))} tokens, too few for one step of "
                f"{sizes.micro_batches} micro-batches of up to {budget} tokens; lower max_tokens_per_micro_batch or "
                "prepare more text"
            )
        if budget is None and self.num_samples < sizes.global_batch_size:
            raise UserError(
                f"the data hold {self.num_samples} samples, less than one global batch of {sizes.global_batch_size} "
                f"(micro-batch {sizes.micro_batch_size} x accumulation {sizes.gradient_accumulation_steps} x world "
                f"size {sizes.world_size}); lower train_batch_size or prepare more text"
            )


def _digest(array: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(array), digest_size=8).hexdigest()
