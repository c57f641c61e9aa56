"""ds_bert: fast BERT-type pretraining on DeepSpeed.

`ds_bert.initialize` takes the place of `deepspeed.initialize`; the command `ds-bert` does whole runs.
"""

from typing import Any

__version__ = "0.1.0"
__all__ = ["initialize"]


def __getattr__(name: str) -> Any:
    # Loading DeepSpeed takes seconds, which `ds-bert --help` and every early error would otherwise pay.
    if name == "initialize":
        from ds_bert.engine import initialize

        return initialize
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
