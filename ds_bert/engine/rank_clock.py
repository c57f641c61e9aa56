"""How long this rank works on a step before it waits for the others."""

from deepspeed import DeepSpeedEngine

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
        reduce = engine.allreduce_gradients

        def timed(*args, **kwargs):
            self._ended = now(engine.device)
            return reduce(*args, **kwargs)

        engine.allreduce_gradients = timed
        self.start()

    def start(self) -> None:
        """A step begins."""
        self._started = self._ended = now(self._device)

    def seconds(self) -> float:
        """Of the last step; waits for the device if that works on its own."""
        return seconds_between(self._started, self._ended)
