"""Uniformly shuffled global batches with a position that can be saved and resumed on any number of ranks."""

from collections.abc import Iterator

import numpy as np

from ds_bert.errors import UserError

# Streams of random numbers that share a seed are told apart by a number of their own: seed + epoch would make
# epoch 1 of seed 0 the same order as epoch 0 of seed 1.
ORDER_STREAM = 1


class RandomBatchSampler:
    """Batches of sample indices for one rank, for `torch.utils.data.DataLoader(batch_sampler=...)`.

    The samples of an epoch are put into an order that depends on (seed, epoch) alone and cut into global batches;
    what does not fill the last one is dropped (`num_dropped`). A global batch is dealt to micro-steps and ranks as
    consecutive runs. So the global batches are the same for every split of them, each rank knows its part without
    communication, and all ranks have the same number of micro-steps.

    Args:
        num_samples: samples in the data set.
        micro_batch_size: samples a rank and micro-step.
        gradient_accumulation_steps: micro-steps an optimizer step.
        world_size: number of ranks.
        rank: this rank.
        seed: of the order.

    Raises:
        UserError: the data hold less than one global batch.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        micro_batch_size: int,
        gradient_accumulation_steps: int,
        world_size: int,
        rank: int,
        seed: int = 0,
    ) -> None:
        self.num_samples = num_samples
        self.micro_batch_size = micro_batch_size
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.world_size = world_size
        self.rank = rank
        self.seed = seed
        self.global_batch_size = micro_batch_size * gradient_accumulation_steps * world_size
        self.steps_per_epoch = num_samples // self.global_batch_size
        self.num_dropped = num_samples % self.global_batch_size
        if self.steps_per_epoch == 0:
            raise UserError(
                f"the data hold {num_samples} samples, less than one global batch of {self.global_batch_size} "
                f"(micro-batch {micro_batch_size} x accumulation {gradient_accumulation_steps} x world size "
                f"{world_size}); lower train_batch_size or prepare more text"
            )
        self.epoch = 0
        self._start_step = 0
        self._order: tuple[int, np.ndarray] | None = None

    def order(self) -> np.ndarray:
        """The samples of the current epoch in their order: (num_samples,) int64."""
        if self._order is None or self._order[0] != self.epoch:
            rng = np.random.default_rng([self.seed, self.epoch, ORDER_STREAM])
            self._order = (self.epoch, rng.permutation(self.num_samples))
        return self._order[1]

    def global_batch(self, step: int) -> np.ndarray:
        """The samples of optimizer step `step` of the current epoch, over all ranks: (global_batch_size,) int64."""
        return self.order()[step * self.global_batch_size : (step + 1) * self.global_batch_size]

    def set_epoch(self, epoch: int) -> None:
        """Start `epoch` at its first sample; the epoch that was loaded goes on where it was."""
        if epoch != self.epoch:
            self.epoch, self._start_step = epoch, 0

    @property
    def start_step(self) -> int:
        """The optimizer step of the current epoch at which iteration begins (0 unless a state was loaded)."""
        return self._start_step

    def __len__(self) -> int:
        """Micro-steps left in the current epoch, the same on every rank."""
        return (self.steps_per_epoch - self._start_step) * self.gradient_accumulation_steps

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self._start_step, self.steps_per_epoch):
            shape = (self.gradient_accumulation_steps, self.world_size, self.micro_batch_size)
            for micro_batch in self.global_batch(step).reshape(shape)[:, self.rank]:
                yield micro_batch.tolist()

    def state_dict(self, steps_consumed: int) -> dict:
        """The position as plain values, the same on every rank.

        Args:
            steps_consumed: optimizer steps of the current epoch that the trainer has done. (Workers that prefetch let
                the sampler run ahead of the training, so it cannot count them itself.)
        """
        return {
            "version": 1,
            "epoch": self.epoch,
            "samples_consumed": steps_consumed * self.global_batch_size,
            "num_samples": self.num_samples,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on at a saved position, on any number of ranks and any split of the same global batch.

        Raises:
            UserError: the state belongs to other data, another seed or another global batch.
        """
        for key, mine in (("num_samples", self.num_samples), ("seed", self.seed)):
            if state[key] != mine:
                raise UserError(f"the saved data position has {key} {state[key]}, this run has {mine}")
        step, rest = divmod(state["samples_consumed"], self.global_batch_size)
        if rest:
            raise UserError(
                f"the saved data position is {state['samples_consumed']} samples into the epoch, which is no multiple "
                f"of this run's global batch of {self.global_batch_size}; go on with the global batch of the saved run"
            )
        self.epoch, self._start_step = state["epoch"], step
        if step >= self.steps_per_epoch:
            self.epoch, self._start_step = self.epoch + 1, 0
