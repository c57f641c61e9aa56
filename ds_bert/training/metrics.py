"""`metrics.jsonl` and `loss.png`: what a run leaves for people and programs to read."""

import json
import logging
import math
from pathlib import Path

from ds_bert.files import write_atomically

FILE_NAME = "metrics.jsonl"

log = logging.getLogger(__name__)


class MetricsLog:
    """Appends lines to a run's `metrics.jsonl`. Only rank 0 has one.

    Args:
        run_folder: where the file lies.
        step: the step the run goes on from; later lines, left by a run that died after its last checkpoint, are cut.
    """

    def __init__(self, run_folder: Path, step: int) -> None:
        self.path = run_folder / FILE_NAME
        kept = [line for line in read_metrics(run_folder) if line["step"] <= step]
        missing = step - len({line["step"] for line in kept if "loss" in line})
        if missing:
            log.warning(f"{self.path} lacks {missing} of the {step} steps done; the run goes on without their lines")
        write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def write(self, line: dict) -> None:
        """Append one line; a number that is not finite becomes null, as JSON knows no other."""
        finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in line.items()}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(finite) + "\n")


def read_metrics(run_folder: Path) -> list[dict]:
    """The lines of a run's `metrics.jsonl`; a last line torn by a kill is left out, a missing file has none."""
    path = run_folder / FILE_NAME
    lines = []
    for text in path.read_text(encoding="utf-8").split("\n") if path.is_file() else ():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def plot_loss(run_folder: Path) -> Path:
    """Draw `loss.png` from `metrics.jsonl`: training loss of each step and the held-out loss.

    Returns:
        the picture's path.
    """
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    lines = read_metrics(run_folder)
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for key, label, style in (
        ("loss", "training (global batch)", {"linewidth": 0.9, "alpha": 0.7}),
        ("eval_loss", "held out", {"marker": "o", "markersize": 4, "linewidth": 1.5}),
    ):
        points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set(xlabel="optimizer step", ylabel="masked-LM loss (nats per masked token)", title=run_folder.name)
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend()
    path = run_folder / "loss.png"
    figure.savefig(path, dpi=120)
    return path
