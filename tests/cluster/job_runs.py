"""A small training for tests of launches: its options, and what of its metrics does not depend on the clock."""

import json
import time
from pathlib import Path

LAUNCH = Path(__file__).parents[2] / "launch"

# Steps of a run that is only compared.
SHORT = 4

# Keys of metrics.jsonl that are times.
TIMES = {
    "step_s", "real_tokens_per_s", "padded_tokens_per_s", "data_wait_s", "rank_seconds_max_over_mean", "slowest_rank",
    "reduction_wait_s",
}  # fmt: skip

CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "ds_bert": {"bucket_clipping": {"enabled": True}},
}


def lines(run: Path) -> list[dict]:
    """The metrics of a run without their times."""
    found = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key not in TIMES} for line in found]


def steps(run: Path) -> int:
    """Steps that a run has logged so far."""
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b'"loss"') if file.is_file() else 0


def wait_for_steps(process, run: Path, count: int, seconds: float = 120) -> None:
    """Wait until a running command has logged so many steps."""
    deadline = time.monotonic() + seconds
    while steps(run) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{steps(run)} of {count} steps"
        time.sleep(0.02)
