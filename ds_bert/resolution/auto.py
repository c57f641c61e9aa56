"""Values of "auto", as Hugging Face's configurations have them."""

from ds_bert.errors import UserError
from ds_bert.optim.lr_scaling import PEAK_KEYS
from ds_bert.resolution.learning_rate import learning_rate, number

# Where Hugging Face's own default for an "auto" equals DeepSpeed's, so that leaving the key out means the same.
SAME_DEFAULTS = {"optimizer.params.betas", "optimizer.params.eps"}


def fill_auto(config: dict, total_steps: int | None, hidden_size: int | None) -> None:
    """Replace every "auto" of a configuration, in place.

    Args:
        config: a DeepSpeed configuration.
        total_steps: optimizer steps of the run, for a schedule's length; None if nobody knows.
        hidden_size: of the model, for bucket sizes; None if nobody knows.

    Raises:
        UserError: one whose value nobody knows; all of them are named.
    """
    scheduler = config.get("scheduler") or {}
    peak_key = PEAK_KEYS.get(scheduler.get("type"), "warmup_max_lr")
    fill = {
        "optimizer.params.lr": number(scheduler.get("params", {}).get(peak_key)),
        f"scheduler.params.{peak_key}": learning_rate(config),
        "scheduler.params.total_num_steps": total_steps,
        "scheduler.params.warmup_min_lr": 0.0,
        "zero_optimization.reduce_bucket_size": hidden_size and hidden_size * hidden_size,
    }
    unknown = []

    def visit(node: dict, path: str) -> None:
        for key, value in list(node.items()):
            here = f"{path}{key}"
            if isinstance(value, dict):
                visit(value, here + ".")
            elif value != "auto":
                continue
            elif here in SAME_DEFAULTS or here.startswith("zero_optimization.stage3_"):
                del node[key]
            elif fill.get(here) is not None:
                node[key] = fill[here]
            else:
                unknown.append(here)

    visit(config, "")
    if unknown:
        raise UserError(
            f'"auto" stands for a value that only the Hugging Face Trainer knows, at: {", ".join(unknown)}; '
            "write the numbers there"
        )
