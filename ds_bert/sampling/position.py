"""Position of a sampler within the data: the plain values that are saved, and what a saved one must agree with."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ds_bert.errors import UserError
from ds_bert.identity import describe_changes
from ds_bert.sampling.arguments import whole_number
from ds_bert.sampling.plan import BatchSizes

STATE_VERSION = 2

NOTHING = np.empty(0, dtype=np.int32)


@dataclass
class Position:
    """The place in the data where iteration begins."""

    epoch: int
    carried: np.ndarray = field(default_factory=lambda: NOTHING)
    """(n,) int32, samples that the epoch before left over."""
    segments: list[dict] = field(default_factory=list)
    """The sizes this epoch had earlier, each with the optimizer steps and samples done with them."""
    start: int = 0
    """Micro-steps of the current sizes that are done."""

    def plain_values(self) -> dict[str, Any]:
        """The position as JSON knows it."""
        return {**vars(self), "carried": self.carried.tolist()}

    def state_dict(self, identity: dict, sizes: BatchSizes, micro_steps: int, samples: int) -> dict:
        """The position `micro_steps` after this one as plain values.

        Args:
            identity: what the order of the samples follows from, besides the sizes.
            sizes: the current ones.
            micro_steps: micro-steps done since.
            samples: samples that the finished optimizer steps of the current sizes used.
        """
        steps, micro_step = divmod(self.start + micro_steps, sizes.gradient_accumulation_steps)
        return {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "segments": [*self.segments, {**vars(sizes), "steps": steps, "samples_consumed": samples}],
            "micro_step": micro_step,
            "carried": self.carried.tolist(),
            "identity": identity,
        }

    @classmethod
    def from_state_dict(cls, state: dict, identity: dict, sizes: BatchSizes) -> "Position":
        """A saved position, to continue with `sizes`.

        Raises:
            UserError: the state belongs to other data or settings, is damaged, or stands inside an optimizer step of
                other sizes.
        """
        if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
            raise UserError(f"the saved data position is not of version {STATE_VERSION}; it comes from elsewhere")
        try:
            return cls._read(state, identity, sizes)
        except UserError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"the saved data position is damaged ({type(error).__name__}: {error})") from None

    @classmethod
    def _read(cls, state: dict, identity: dict, sizes: BatchSizes) -> "Position":
        saved = {key: state["identity"].get(key) for key in identity}
        if changes := describe_changes(saved, identity):
            raise UserError(f"the saved data position belongs to other data or settings: {changes}")
        *earlier, last = state["segments"]
        same = all(last[name] == value for name, value in vars(sizes).items())
        if state["micro_step"] and not same:
            raise UserError(
                f"the saved data position stands after {state['micro_step']} of the "
                f"{last['gradient_accumulation_steps']} micro-steps of an optimizer step; the sizes can only change at "
                "the end of a step: keep "
                + ", ".join(f"{name} {last[name]} (here {value})" for name, value in vars(sizes).items())
            )
        if not 0 <= state["micro_step"] < last["gradient_accumulation_steps"] or not last["steps"] >= 0:
            raise ValueError(f"micro-step {state['micro_step']} of step {last['steps']}")
        return cls(
            epoch=whole_number("epoch", state["epoch"]),
            carried=np.array(state["carried"], dtype=np.int32),
            segments=earlier if same else [*earlier, last],
            start=last["steps"] * sizes.gradient_accumulation_steps + state["micro_step"] if same else 0,
        )
