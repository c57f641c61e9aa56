"""What a trace tells: how much of the communication was hidden by computation."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ds_bert.errors import UserError
from ds_bert.reduction.trace import LANES

Span = tuple[float, float]

COLOURS = {"forward": "#7fb2d9", "backward": "#2f6ca3", "optimizer": "#9b8bc4"}
LANE_COLOURS = {"clip": "#e0a030", "communication": "#4a9d5b", "wait": "#c0392b"}


@dataclass(frozen=True)
class TracedStep:
    """One optimizer step of one rank, in seconds from its start."""

    rank: int
    step: int
    spans: dict[str, list[tuple[str, float, float]]]
    """By lane: name, start, end."""

    @property
    def seconds(self) -> float:
        return max(end for lane in self.spans.values() for _, _, end in lane)

    @property
    def communication(self) -> float:
        """Seconds in which something was under way."""
        return _length(self._lane("communication"))

    @property
    def hidden(self) -> float:
        """Seconds of communication in which this rank went forward or backward, or stepped, and did not wait."""
        beside_compute = _intersection(self._lane("communication"), self._lane("compute"))
        return _length(beside_compute) - _length(_intersection(beside_compute, self._lane("wait")))

    @property
    def exposed(self) -> float:
        """Seconds of communication that nothing hid."""
        return self.communication - self.hidden

    def _lane(self, lane: str) -> list[Span]:
        return _union([(start, end) for _, start, end in self.spans.get(lane, [])])


def read_traces(run_folder: Path) -> list[TracedStep]:
    """The steps of all ranks of a run, by step and rank.

    Args:
        run_folder: its folder "trace" is read, or the folder itself.

    Raises:
        UserError: there is no trace, or a file is none.
    """
    if not run_folder.is_dir():
        raise UserError(f"{run_folder} is no folder; give a run folder")
    folder = run_folder / "trace" if (run_folder / "trace").is_dir() else run_folder
    paths = sorted(folder.glob("rank*.json"))
    if not paths:
        raise UserError(
            f'{run_folder} holds no trace; set "ds_bert": {{"bucket_clipping": {{"enabled": true, "trace": true}}}} '
            "and run again"
        )
    steps = []
    for path in paths:
        by_step: dict[int, list[dict]] = {}
        in_this_session: set[int] = set()
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            try:
                event = json.loads(line.rstrip(",")) if line not in ("", "[", "]") else {}
                if event.get("name") == "process_name":
                    in_this_session = set()  # a resumed run does its last steps again
                if event.get("ph") == "X":
                    step, rank = event["args"]["step"], event["pid"]
                    if step not in in_this_session:
                        in_this_session.add(step)
                        by_step[step] = []
                    by_step[step].append(event)
            except (ValueError, KeyError, TypeError, AttributeError):
                if line.endswith(","):  # the last line of a killed run may be torn
                    raise UserError(f"{path}:{number}: no event of a trace that ds_bert wrote") from None
        steps += [_traced_step(rank, step, events) for step, events in by_step.items()]
    if not steps:
        raise UserError(f"{folder} holds traces of no whole step; let the run do some")
    return sorted(steps, key=lambda step: (step.step, step.rank))


def _traced_step(rank: int, step: int, events: list[dict]) -> TracedStep:
    begin = min(event["ts"] for event in events)
    spans: dict[str, list[tuple[str, float, float]]] = {}
    for event in sorted(events, key=lambda event: event["ts"]):
        start = (event["ts"] - begin) / 1e6
        spans.setdefault(LANES[event["tid"]], []).append((event["name"], start, start + event["dur"] / 1e6))
    return TracedStep(rank, step, spans)


def _union(spans: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _intersection(first: list[Span], second: list[Span]) -> list[Span]:
    both = [(max(a, c), min(b, d)) for a, b in first for c, d in second]
    return [(start, end) for start, end in both if start < end]


def _length(spans: list[Span]) -> float:
    return sum(end - start for start, end in spans)


def most_exposed(steps: list[TracedStep]) -> list[TracedStep]:
    """Of each step the rank with the most exposed communication."""
    chosen: dict[int, TracedStep] = {}
    for step in steps:
        if step.step not in chosen or step.exposed > chosen[step.step].exposed:
            chosen[step.step] = step
    return list(chosen.values())


def typical_step(steps: list[TracedStep]) -> TracedStep:
    """Of `most_exposed` that of median length, the first left out: it learns the order, and nothing overlaps."""
    chosen = most_exposed(steps)
    later = chosen[1:] or chosen
    return sorted(later, key=lambda step: step.seconds)[len(later) // 2]


def as_table(steps: list[TracedStep]) -> str:
    """A line a step, of the rank with the most exposed communication in it, and the medians."""
    rows = ["  step  rank  step ms  communication ms  hidden ms  exposed ms  hidden"]
    chosen = most_exposed(steps)
    rows += [_row(f"{s.step:6}  {s.rank:4}", s.seconds, s.communication, s.exposed) for s in chosen]
    later = chosen[1:] or chosen
    medians = [float(np.median([getattr(s, key) for s in later])) for key in ("seconds", "communication", "exposed")]
    return "\n".join([*rows, _row("median      ", *medians) + "  (without the first step)"])


def _row(head: str, seconds: float, communication: float, exposed: float) -> str:
    hidden = communication - exposed
    share = f"{hidden / communication:7.1%}" if communication else "      -"
    return (
        f"{head}  {1e3 * seconds:7.1f}  {1e3 * communication:16.1f}  {1e3 * hidden:9.1f}  {1e3 * exposed:10.1f} {share}"
    )


def plot_overlap(step: TracedStep, path: Path) -> None:
    """Draw the timeline of one step: compute above, then clipping, what travels, and waiting."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.subplots()
    for row, lane in enumerate(reversed(LANES)):
        for name, start, end in step.spans.get(lane, []):
            colour = COLOURS.get(name) or LANE_COLOURS.get(lane, "#888888")
            axes.broken_barh(
                [(1e3 * start, max(1e3 * (end - start), 0.05))], (row - 0.38, 0.76), color=colour, linewidth=0
            )  # fmt: skip
    axes.set_yticks(range(len(LANES)), reversed(LANES))
    backward = [end for name, _, end in step.spans.get("compute", []) if name == "backward"]
    if backward:
        axes.axvline(1e3 * backward[-1], color="black", linewidth=0.8, linestyle=":")
    axes.set(
        xlabel="ms from the start of the step",
        title=f"rank {step.rank}, step {step.step}: {1e3 * step.communication:.0f} ms of communication, "
        f"{1e3 * step.exposed:.0f} ms exposed (dotted: backward ends)",
    )
    axes.margins(x=0.01)
    handles = [Patch(color=colour, label=name) for name, colour in {**COLOURS, **LANE_COLOURS}.items()]
    axes.legend(handles=handles, ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.22), frameon=False)
    figure.savefig(path, dpi=120)
