"""Moments on a device: of the CPU at once, of a GPU when its stream comes to them."""

import time

import torch

Moment = float | torch.Event


def now(device: torch.device) -> Moment:
    """This moment in the work of a device."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def seconds_between(start: Moment, end: Moment) -> float:
    """Waits for the device if that works on its own."""
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3
