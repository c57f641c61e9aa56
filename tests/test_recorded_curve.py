"""A loss curve recorded earlier: a change of numbers anywhere on the road from text to loss shows here.

To record it anew after a change that is meant to change numbers:
RECORD_CURVE=1 python -m pytest tests/test_recorded_curve.py
"""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RECORDED = Path(__file__).parent / "recorded_curve.txt"
PACKAGE = "deepspeed"
CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01, "torch_adam": True}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_type": "linear", "warmup_num_steps": 5, "total_num_steps": "auto"},
    },
    "zero_optimization": {"stage": 1},
}
# Dropout's masks and the order of fp32 sums differ between processors; over 30 steps that moves the loss by less.
TOLERANCE = 2e-3


def pinned_version(package: str) -> str:
    lines = (Path(__file__).parents[1] / "requirements.txt").read_text().splitlines()
    return next(line.split("==")[1].strip() for line in lines if line.startswith(package + "=="))


@pytest.mark.skipif(
    importlib.metadata.version(PACKAGE) != pinned_version(PACKAGE),
    reason="the text is the docstrings of deepspeed in the version of requirements.txt",
)
def test_30_steps_on_our_own_generated_text_give_the_recorded_losses(tmp_path, rank_pool):
    from ds_bert.cli.main import main
    from tests.runs import metrics_lines, parse_run, train

    corpus, data = tmp_path / "corpus.txt", tmp_path / "data"
    script = Path(__file__).parents[1] / "launch" / "docstring_corpus.py"
    subprocess.run([sys.executable, script, "--output", corpus, "--max-mb", "0.3", PACKAGE], check=True)
    options = ["--input", str(corpus), "--output", str(data), "--vocab-size", "1000", "--max-length", "64"]
    assert main(["prepare", *options]) == 0
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    args = parse_run(
        data=data, output=tmp_path / "run", model="tiny", deepspeed_config=tmp_path / "ds.json", max_steps=30
    )
    assert rank_pool(2).run(train, args)[0]["error"] is None
    losses = [line["loss"] for line in metrics_lines(args) if "loss" in line]
    if os.environ.get("RECORD_CURVE"):
        RECORDED.write_text("".join(f"{step} {loss!r}\n" for step, loss in enumerate(losses, 1)))
    recorded = [float(line.split()[1]) for line in RECORDED.read_text().splitlines()]
    assert losses == pytest.approx(recorded, rel=TOLERANCE)
    assert losses[-1] < losses[0] - 0.8
