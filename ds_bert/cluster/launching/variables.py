"""Environment variables that ranks on every host get."""

import os
from pathlib import Path

from ds_bert.errors import UserError

# Variables of this shell that the ranks on other hosts get too, as those on this machine do.
FORWARDED = ("DS_", "GLOO_", "NCCL_", "TORCH", "PYTORCH_", "HF_", "OMP_", "MKL_", "TOKENIZERS_", "TQDM_", "WANDB_")


def of_this_shell() -> dict[str, str]:
    """Variables of this process that matter to training."""
    return {key: value for key, value in os.environ.items() if key.startswith(FORWARDED)}


def of_deepspeed_env() -> dict[str, str]:
    """DeepSpeed's own way: `KEY=value` lines of `.deepspeed_env` in the home folder and here, which wins.

    Read by us, too, as DeepSpeed reads it for some of its launchers only. DS_ENV_FILE gives it another name.

    Raises:
        UserError: a line cannot be read.
    """
    found = {}
    for folder in (Path.home(), Path.cwd()):
        path = folder / os.environ.get("DS_ENV_FILE", ".deepspeed_env")
        for number, line in enumerate(path.read_text().splitlines() if path.is_file() else [], start=1):
            key, equals, value = line.strip().partition("=")
            if line.strip() and not (equals and key):
                raise UserError(f"{path}, line {number}: {line!r} is not KEY=value; mend or remove it")
            if key:
                found[key] = value
    return found
