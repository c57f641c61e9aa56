"""How long this rank works on a step before it waits for the others."""

from collections.abc import Callable

from deepspeed import DeepSpeedEngine

from ds_bert.engine.patches import wrap
from ds_bert.reduction.timing import now, seconds_between


class RankClock:
    """Times a step from `start()` to the start of its last gradient reduction, where ranks wait for each other.

    At ZeRO 2 with accumulation, and with `overlap_comm`, ranks also wait before that; there the times of fast ranks
    come out longer.

    Args:
        engine: from `deepspeed.initialize`.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._device = engine.device
        wrap(engine, "allreduce_gradients", "rank clock", self._timed)
        self.start()

    def _timed(self, reduce: Callable) -> Callable:
        def timed(*args, **kwargs):
            self._ended = now(self._device)
            return reduce(*args, **kwargs)

        return timed

    def start(self) -> None:
        """A step begins."""
        self._started = self._ended = now(self._device)

    def seconds(self) -> float:
        """Duration of the last step; waits for the device if that works on its own."""
        return seconds_between(self._started, self._ended)
