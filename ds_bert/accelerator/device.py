"""Which device DeepSpeed trains on, and how many ranks it has room for."""

import os


def choose_device() -> None:
    """Tell DeepSpeed that there is no GPU, if so, for this process and the ranks it starts.

    DeepSpeed would find out by itself, but warn about it in every process. Call this before anything imports it.
    """
    import torch

    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def default_num_procs() -> int:
    """One rank for each GPU; without a GPU a single one, which uses all cores."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    return 1 if accelerator.device_name() == "cpu" else max(1, accelerator.device_count())
