"""The learning-rate schedule that DeepSpeed has none of: a polynomial decay to an end, as the MLPerf BERT runs use."""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ds_bert.config import ScheduleConfig


def polynomial_schedule(optimizer: Optimizer, schedule: ScheduleConfig) -> LambdaLR:
    """The schedule on an optimizer whose rates are the peaks.

    Args:
        optimizer: with the peak as the learning rate of each group.
        schedule: its `total_steps` is a number.
    """
    peaks = [group["lr"] for group in optimizer.param_groups]
    # A function of the steps done so far; the rate is that of the step to come.
    return LambdaLR(optimizer, [lambda done, peak=peak: rate_at(done + 1, peak, schedule) / peak for peak in peaks])


def rate_at(step: int, peak: float, schedule: ScheduleConfig) -> float:
    """The learning rate of a step.

    Args:
        step: from 1.
        peak: the full learning rate.
        schedule: its `total_steps` is a number.
    """
    since_start = step - schedule.start_step
    if since_start < schedule.warmup_steps:
        return peak * since_start / schedule.warmup_steps
    warm = max(0, schedule.start_step + schedule.warmup_steps) if schedule.continuous else 0
    left = max(0.0, 1 - (step - warm) / (schedule.total_steps - warm))
    return schedule.end_lr + (peak - schedule.end_lr) * left**schedule.power
