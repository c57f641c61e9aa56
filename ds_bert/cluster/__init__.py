"""Ranks on machines: how they are started, watched, and brought to a common end. Each sub-room reads alone.

    command: ds-bert pretrain                 launching/launch, running_job  <------ outcome ------+
      +- [ssh HOST] deepspeed.launcher.launch                                                      |
           +- supervision/task -> supervisor  <---- network/connection, a beat a second ---->  coordinator
                +- python -m ds_bert.training.pretrain -> rank_program -> training/loop     (beside rank 0)

`network` knows hosts and connections, `supervision` stands beside each rank and loads no torch, `launching` runs where
the command was given, `rank_program` is the frame of every rank's program. docs/architecture.md walks through it.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Machines": "launching.machines",
    "launch": "launching.launch",
    "run_rank": "rank_program",
    "start": "launching.launch",
    "stop_request": "supervision.rank_side",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
