"""How long this rank works on a step before it waits for the others."""

import time

import torch
from deepspeed import DeepSpeedEngine


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
            self._ended = self._now()
            return reduce(*args, **kwargs)

        engine.allreduce_gradients = timed
        self.start()

    def start(self) -> None:
        """A step begins."""
        self._started = self._ended = self._now()

    def seconds(self) -> float:
        """Of the last step; waits for the device if that works on its own."""
        if isinstance(self._started, float):
            return self._ended - self._started
        self._ended.synchronize()
        return self._started.elapsed_time(self._ended) / 1e3

    def _now(self) -> "float | torch.Event":
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event
