"""`ds-bert sweep` with real trainings: killed, resumed, a trial that diverges."""

import csv
import json
import signal
import time

import psutil
import pytest

from tests.test_end_to_end import ds_bert, start

BASE = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": "auto"}},
}


def test_killed_and_resumed_it_has_every_trial_once(tmp_path, prepared, small_model):
    (tmp_path / "base.json").write_text(json.dumps(BASE))
    words = ["sweep", "--data", prepared, "--model", small_model(0.1), "--deepspeed_config", tmp_path / "base.json"]
    words += ["--output", tmp_path / "sweep", "--budget-samples", 160, "--num-procs", 2, "--param"]
    words += ["train_batch_size=8", "optimizer.params.lr=1e-2,1e30", "gradient_clipping=1.0,0.5"]
    process, folder = start(*words), tmp_path / "sweep" / "trials"
    deadline = time.monotonic() + 120
    while not (folder / "0001" / "run" / "metrics.jsonl").is_file():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = ds_bert(*words, "--resume")
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "sweep" / "trials.csv").open()))
    assert [(row["optimizer.params.lr"], row["gradient_clipping"], row["state"]) for row in rows] == [
        ("0.01", "1.0", "complete"),
        ("0.01", "0.5", "complete"),
        ("1e+30", "1.0", "failed"),
        ("1e+30", "0.5", "failed"),
    ]
    assert all(row["problem"] for row in rows[2:])
    assert [(row["steps"], row["samples"]) for row in rows[:2]] == [("20", "160")] * 2
    # What trials.csv says is what a run of the best configuration gives.
    best = ["pretrain", *words[1:5], "--deepspeed_config", tmp_path / "sweep" / "best_config.json"]
    again = ds_bert(*best, "--output", tmp_path / "again", "--num-procs", 2, "--max-steps", 20)
    assert again.returncode == 0, again.stderr
    lines = [json.loads(line) for line in (tmp_path / "again" / "metrics.jsonl").read_text().splitlines()]
    eval_loss = next(line["eval_loss"] for line in lines if "eval_loss" in line)
    assert eval_loss == pytest.approx(min(float(row["eval_loss"]) for row in rows[:2]), rel=1e-6)
    assert not [p for p in psutil.process_iter() if any(str(tmp_path) in word for word in p.cmdline())]
