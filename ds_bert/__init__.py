"""ds_bert: fast BERT-type pretraining on DeepSpeed.

`ds_bert.initialize` takes the place of `deepspeed.initialize`; the command `ds-bert` does whole runs.
"""

from typing import Any

from ds_bert import deprecated_paths
from ds_bert.version import __version__

__all__ = ["__version__", "initialize"]

deprecated_paths.install()


def __getattr__(name: str) -> Any:
    # Loading DeepSpeed takes seconds, which `ds-bert --help` and every early error would otherwise pay.
    if name == "initialize":
        from ds_bert.engine import initialize

        return initialize
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
