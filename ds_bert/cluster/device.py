"""Which device DeepSpeed trains on."""

import os


def choose_device() -> None:
    """Tell DeepSpeed that there is no GPU, if so, for this process and the ranks it starts.

    DeepSpeed would find out by itself, but warn about it in every process. Call this before anything imports it.
    """
    import torch

    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
