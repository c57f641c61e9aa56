"""Large batches: learning rates scaled with the batch size, schedules, optimizers by name, parameter groups."""

from ds_bert.optim.lamb import Lamb
from ds_bert.optim.lr_scaling import scale_learning_rate
from ds_bert.optim.parameter_groups import parameter_groups
from ds_bert.optim.schedule import polynomial_schedule

__all__ = ["Lamb", "parameter_groups", "polynomial_schedule", "scale_learning_rate"]
