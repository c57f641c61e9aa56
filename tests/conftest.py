"""Shared fixtures: ranks, prepared data and models, each made once."""

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

# Time is measured in benchmarks/, never asserted in tests.
hypothesis.settings.register_profile("ds_bert", deadline=None)
hypothesis.settings.load_profile("ds_bert")

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def rank_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable]:
    """`rank_pool(n)`: a pool of n real gloo ranks, kept for the whole session."""
    from tests.ranks import RankPool

    pools: dict[int, RankPool] = {}

    def get(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size, tmp_path_factory.mktemp("ranks"))
        return pools[world_size]

    yield get
    for pool in pools.values():
        pool.close()


@pytest.fixture
def fp16_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16 counts as supported, as on a GPU; some CPUs' mkldnn refuses it."""
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)


TEXT = """
the of and to in a is that it was for on are as with his they at be this from have or by one had not but what all were
when we there can an your which their said if do will each about how up out them then she many some so these would
other into has more her two like him see time could no make than first been its who now people my made over
"""
WORDS = TEXT.split()


def random_text(documents: int, seed: int = 0) -> str:
    """Documents of sentences of very different lengths, so that ranks hold different numbers of masks."""
    rng = random.Random(seed)
    return "\n\n".join(
        "\n".join(
            " ".join(rng.choices(WORDS, k=rng.randint(1, 40))) + "." for _ in range(rng.randint(1, 6))
        )
        for _ in range(documents)
    )  # fmt: skip


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data: a sample a paragraph, at most 48 tokens."""
    from ds_bert.cli.main import main

    folder = tmp_path_factory.mktemp("prepared")
    (folder / "text.txt").write_text(random_text(60))
    arguments = ["--input", str(folder / "text.txt"), "--output", str(folder / "data"), "--vocab-size", "300"]
    assert main(["prepare", *arguments, "--max-length", "48", "--sample-unit", "paragraph"]) == 0
    return folder / "data"


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Callable[[float], Path]:
    """`small_model(dropout)`: a folder with the configuration of a 2-layer BERT, 32 wide, for the prepared data."""
    from transformers import AutoTokenizer, BertConfig

    def make(dropout: float) -> Path:
        folder = tmp_path_factory.mktemp("model")
        BertConfig(
            vocab_size=len(AutoTokenizer.from_pretrained(prepared / "tokenizer")),
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=64, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        ).save_pretrained(folder)  # fmt: skip
        return folder

    return make


@pytest.fixture(scope="session")
def run_args(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Callable:
    """`run_args(model, config, **options)`: parsed options of a pretraining run in a new folder."""
    from tests.runs import parse_run

    def make(model: Path, config: dict, **options):
        folder = tmp_path_factory.mktemp("run")
        (folder / "ds.json").write_text(json.dumps(config))
        options = {"output": folder / "out", "data": prepared, "max_steps": 4, **options}
        return parse_run(model=model, deepspeed_config=folder / "ds.json", **options)

    return make
