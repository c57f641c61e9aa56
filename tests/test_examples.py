"""The examples of docs/ run as a user runs them, on two ranks; each asserts what it shows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs" / "examples"


def run(name: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, EXAMPLES / f"{name}.py"], capture_output=True, text=True, env=environment, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", ["sampler_pytorch", "sampler_hf_trainer", "sampler_lightning"])
def test_the_sampler_in_other_loops_sees_every_sample_once(name):
    assert "every sample seen once in each of 2 epochs by 2 ranks; 10 left out" in run(name)


def test_bucket_clipping_in_a_plain_loop():
    assert "all ranks have the same weights" in run("clipping_pytorch")


def test_bucket_clipping_in_the_hf_trainer():
    assert "norms of the averaged gradient: 0." in run("clipping_hf_trainer")


def test_packed_batches_in_the_hf_trainer():
    assert "loss of a packed row" in run("packed_hf_trainer")


def test_the_picture_of_the_strategies_is_drawn(prepared, tmp_path):
    picture = tmp_path / "strategies.png"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, EXAMPLES / "draw_strategies.py", prepared, picture], check=True, env=environment)
    assert picture.read_bytes().startswith(b"\x89PNG")
