"""Optimizer x precision x ZeRO stage x bucket clipping: each trains, saves and resumes, or is refused in one line."""

import itertools
from pathlib import Path

import pytest
import torch.distributed as dist

from ds_bert.errors import UserError
from tests.reduction import reference

OPTIMIZERS = {
    "Adam": {"type": "Adam", "params": {"lr": 1e-2, "adam_w_mode": False}},
    "AdamW": {"type": "AdamW", "params": {"lr": 1e-2}},
    "AdamW, torch_adam": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "Lamb": {"type": "Lamb", "params": {"lr": 5e-2, "weight_decay": 0.01}},
}
PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16, dynamic scale": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
STEPS = 20
DOCS = Path(__file__).parents[2] / "docs" / "large_batches.md"


def outcomes(optimizer: str, precision: str, stage: int, folder: str) -> list[str]:
    """Either "trains" or why not, without bucket clipping and with it."""
    return [outcome(optimizer, precision, stage, clipping, f"{folder}/{clipping}") for clipping in (False, True)]


def outcome(optimizer: str, precision: str, stage: int, clipping: bool, folder: str) -> str:
    from ds_bert.engine import guard_of
    from ds_bert.resolution import resolve
    from ds_bert.training.pretrain import initialize_engine

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": OPTIMIZERS[optimizer],
        "zero_optimization": {"stage": stage},
        "ds_bert": {"bucket_clipping": {"enabled": clipping}},
        **PRECISIONS[precision],
    }
    try:
        resolved = resolve(config, world_size=dist.get_world_size())
        engine, again = (initialize_engine(reference.tiny_bert(seed=seed), resolved, "ds.json") for seed in (0, 1))
        for one in (engine, again):
            guard_of(one)  # as the training loop has it
    except UserError as error:
        return f"refused: {error}"
    losses = [step(engine) for _ in range(STEPS)]
    engine.save_checkpoint(folder)
    again.load_checkpoint(folder)
    if not losses[-1] < 0.9 * losses[0]:
        return f"does not learn: {losses[0]:.3f} to {losses[-1]:.3f}"
    after = [[step(one) for _ in range(2)] for one in (engine, again)]
    # DeepSpeed's kernel rounds by where the tensors lie.
    return "trains" if after[0] == pytest.approx(after[1], rel=1e-5) else f"does not resume: {after}"


def step(engine) -> float:
    """One step on always the same batch; its loss before."""
    loss = engine(**reference.batch(0, 0, dist.get_rank())).loss
    engine.backward(loss)
    engine.step()
    total = loss.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@pytest.fixture(scope="module")
def matrix(rank_pool, tmp_path_factory) -> dict[tuple, list[str]]:
    """(optimizer, precision, stage) -> outcomes."""
    folder = tmp_path_factory.mktemp("matrix")
    return {
        cell: rank_pool(2).run(outcomes, *cell, str(folder / str(number)))[0]
        for number, cell in enumerate(itertools.product(OPTIMIZERS, PRECISIONS, (0, 1, 2)))
    }


def test_everything_trains_and_resumes_or_is_refused(matrix):
    for (optimizer, precision, stage), found in matrix.items():
        for result in found:
            if optimizer == "Lamb" and stage:
                assert result.startswith(f"refused: optimizer.type Lamb and zero_optimization.stage {stage}: ZeRO cuts")
            else:
                assert result == "trains", (optimizer, precision, stage)


def test_the_table_in_the_docs_is_this_one(matrix):
    lines = ["| optimizer | precision | ZeRO 0 | ZeRO 1 | ZeRO 2 |", "| --- | --- | --- | --- | --- |"]
    for optimizer, precision in itertools.product(OPTIMIZERS, PRECISIONS):
        cells = []
        for stage in (0, 1, 2):
            words = sorted({result.split(":")[0] for result in matrix[optimizer, precision, stage]})
            cells.append(" / ".join(words))
        lines.append(f"| {optimizer} | {precision} | {' | '.join(cells)} |")
    assert "\n".join(lines) in DOCS.read_text(), "put this into docs/large_batches.md:\n" + "\n".join(lines)
