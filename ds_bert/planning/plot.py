"""Pictures of how evenly the ranks are loaded."""

from pathlib import Path

import numpy as np

from ds_bert.planning.imbalance import StrategyReport


def plot_balance(reports: dict[str, StrategyReport], path: str | Path, title: str) -> None:
    """Draw each strategy's work per rank in one step, and how its steps differ, packed above padded.

    Args:
        reports: by strategy.
        path: the picture; its ending gives the format.
        title: above the picture.
    """
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle(title)
    for row, kind in zip(figure.subplots(2, 2, width_ratios=(2, 1)), ("packed", "padded"), strict=True):
        executions = {name: getattr(report, kind) for name, report in reports.items()}
        for name, execution in executions.items():
            ranks = np.arange(len(execution.one_step))
            row[0].step(ranks, np.sort(execution.one_step)[::-1], where="mid", label=name, linewidth=1.4)
        row[0].axhline(1, color="black", linewidth=0.8, linestyle=":")
        row[0].set(
            xlabel="rank, the one with the most work first",
            ylabel="work / ideal",
            title=f"{kind}: work of the ranks in one step (the step waits for the leftmost)",
        )
        row[0].set_ylim(bottom=0)
        row[0].legend()
        row[1].boxplot(
            [execution.time_over_ideal for execution in executions.values()],
            tick_labels=list(executions),
            whis=(0, 100),
        )
        row[1].axhline(1, color="black", linewidth=0.8, linestyle=":")
        row[1].set(ylabel="time of the step / ideal", title=f"{kind}: all steps")
        row[1].grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=110)
