"""A Chrome trace of what a rank does in each step: open it in chrome://tracing or ui.perfetto.dev.

Times are the host's; on a GPU, where the host only launches work, use torch.profiler for the device's own.
"""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

# Rows of the trace, from above.
LANES = ("compute", "clip", "communication", "wait")


class Trace:
    """Collects the spans of one rank and appends them to a file after each step.

    The file is a JSON array without its closing bracket, which Chrome's format allows: a killed run leaves a whole one.

    Args:
        folder: gets a file `rank<N>.json`.
        rank: this rank.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self._events: list[dict] = []
        # One clock for all ranks of a host.
        self._offset = time.time() - time.perf_counter()
        self._started = False

    @property
    def path(self) -> Path:
        return self.folder / f"rank{self.rank}.json"

    @contextlib.contextmanager
    def span(self, name: str, lane: str) -> Iterator[None]:
        """What happens inside takes place on this lane."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, lane, start, time.perf_counter())

    def add(self, name: str, lane: str, start: float, end: float) -> None:
        """A span in seconds of `time.perf_counter`."""
        self._events.append(
            {
                "name": name,
                "ph": "X",
                "pid": self.rank,
                "tid": LANES.index(lane),
                "ts": round(1e6 * (start + self._offset), 1),
                "dur": round(1e6 * (end - start), 1),
            }
        )

    def follow(self, name: str, work: dist.Work, start: float) -> None:
        """A communication that started then and ends when it is done, whoever waits for it."""
        work.get_future().add_done_callback(lambda _: self.add(name, "communication", start, time.perf_counter()))

    def end_step(self, step: int) -> None:
        """Write the spans of a step."""
        events, self._events = self._events, []
        lines = [json.dumps({**event, "args": {"step": step}}) + ",\n" for event in events]
        if not self._started:
            self._started = True
            self.folder.mkdir(parents=True, exist_ok=True)
            lines = [*([] if self.path.exists() else ["[\n"]), *self._names(), *lines]
        with open(self.path, "a", encoding="utf-8") as file:
            file.writelines(lines)

    def _names(self) -> list[str]:
        named = [("process_name", 0, f"rank {self.rank}")]
        named += [("thread_name", number, lane) for number, lane in enumerate(LANES)]
        return [
            json.dumps({"name": kind, "ph": "M", "pid": self.rank, "tid": lane, "args": {"name": name}}) + ",\n"
            for kind, lane, name in named
        ]


def span(trace: Trace | None, name: str, lane: str) -> contextlib.AbstractContextManager:
    """A span if there is a trace."""
    return trace.span(name, lane) if trace else contextlib.nullcontext()
