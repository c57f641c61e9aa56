"""Every recipe: its arithmetic at its real number of GPUs, and three steps of training at two ranks."""

import json
import math
from pathlib import Path

import pytest

from ds_bert.config import parse_section, read_json
from ds_bert.optim.lr_scaling import scaled_rate
from ds_bert.optim.schedule import rate_at
from ds_bert.resolution import BATCH_KEYS, resolve, resolve_batch_sizes
from tests.runs import metrics_lines, train

FOLDER = Path(__file__).parents[2] / "ds_configs" / "recipes"

# GPUs, samples a step, micro-batch; rates by step, as the sources in docs/recipes.md give them.
SAMSUNG = {1: 3.9299e-4 * 17 / 82, 65: 3.9299e-4 * 81 / 82, 179: 4.9455e-5, 299: 4.9455e-5}
RECIPES = {
    "mlperf_adam_1024gpu": (1024, 16_384, 16, SAMSUNG),
    "mlperf_adam_1368gpu": (1368, 16_416, 12, SAMSUNG),
    "mlperf_lamb_8gpu": (8, 448, 56, {1: 4.25e-4 * (1 - 1 / 6700), 3350: 2.125e-4, 6700: 0}),
    "mlperf_lamb_1024gpu": (1024, 4096, 4, {1: 2.55e-3 * 77 / 256, 179: 2.55e-3 * 255 / 256, 410: 1.275e-3}),
    "mlperf_lamb_4096gpu": (4096, 16_384, 4, {1: 3.3e-3 * 101 / 290, 190: 3.3e-3 * 280 / 470, 470: 0}),
    "lamb_bert": (1024, 32_768, 32, {625: 1e-3, 3125: 5e-3, 15_625: 0}),
    "bert": (8, 256, 32, None),
    "roberta_8k": (64, 8192, 32, None),
    "academic_budget_8gpu": (8, 4096, 32, None),
}


def read(name: str) -> dict:
    return read_json(FOLDER / f"{name}.json")


def test_every_recipe_is_known_here_and_in_the_docs():
    names = {path.stem for path in FOLDER.glob("*.json")}
    assert names == RECIPES.keys()
    docs = (FOLDER.parents[1] / "docs" / "recipes.md").read_text()
    assert not [name for name in names if f"`{name}`" not in docs]


@pytest.mark.parametrize("name", RECIPES)
def test_the_arithmetic_at_its_real_size(name, fp16_allowed):
    gpus, batch_size, micro_batch_size, rates = RECIPES[name]
    resolved = resolve(read(name), world_size=gpus).ds_config
    assert resolve_batch_sizes(resolved, gpus)[:2] == (batch_size, micro_batch_size)
    assert gpus * micro_batch_size * resolved["gradient_accumulation_steps"] == batch_size
    schedule = parse_section(resolved).schedule
    for step, rate in (rates or {}).items():
        assert rate_at(step, resolved["optimizer"]["params"]["lr"], schedule) == pytest.approx(rate, rel=1e-6), step


def test_lambs_rates_and_warm_ups_at_every_batch_size_are_those_of_its_paper():
    """arXiv 1904.00962, table of untuned LAMB: rate 5 / (2^(k/2) x 10^3) and warm-up 1 / (5 x 2^k) of the steps."""
    section = parse_section(read("lamb_bert"))
    for halvings in range(7):
        batch_size, steps = 32_768 >> halvings, 15_625 << halvings
        assert scaled_rate(section.lr_scaling, batch_size) == pytest.approx(5e-3 / 2 ** (halvings / 2), rel=1e-12)
        assert section.schedule.warmup_steps / steps == 1 / (5 * 2**halvings)


@pytest.mark.parametrize("name", RECIPES)
def test_three_steps_at_two_ranks(rank_pool, run_args, name):
    config = {key: value for key, value in read(name).items() if key not in BATCH_KEYS}
    args = run_args("tiny", {**config, "train_batch_size": 16}, max_steps=3)
    first, _ = rank_pool(2).run(train, args)
    assert first["error"] is None
    lines = [line for line in metrics_lines(args) if "loss" in line]
    assert len(lines) == 3
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert all(line["learning_rate"] >= 0 for line in lines)
    # A dynamic loss scale may skip its first steps; it must not skip all for want of anything else.
    assert lines[-1]["skipped_steps"] < 3 or "fp16" in config, json.dumps(lines)
