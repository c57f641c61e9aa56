"""Optimizers by their names in the configuration: the right algorithm, and what each is called that cannot be had."""

import math
import re

import pytest
import torch
from torch import nn

from ds_bert.errors import UserError
from ds_bert.optim import parameter_groups
from ds_bert.optim.optimizers import resolve_name, substitute
from ds_bert.resolution.refusals import check_supported


def config(name: str, **params) -> dict:
    return {"optimizer": {"type": name, "params": params}}


def lamb_of_the_paper(weights: list, gradients: list, *, lr, betas, eps, decays, adapted, bounds) -> list:
    """Algorithm 2 of arXiv 1904.00962 with phi(z) = z, in double precision: some steps, one tensor after the other."""
    results = []
    for x, steps, decay, adapts in zip(weights, zip(*gradients, strict=True), decays, adapted, strict=True):
        x, m, v = x.double(), torch.zeros_like(x).double(), torch.zeros_like(x).double()
        for t, gradient in enumerate(steps, start=1):
            g = gradient.double()
            m = betas[0] * m + (1 - betas[0]) * g
            v = betas[1] * v + (1 - betas[1]) * g * g
            r = (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
            update = r + decay * x
            ratio = min(max(x.norm() / update.norm(), bounds[0]), bounds[1]) if adapts else 1.0
            x = x - lr * ratio * update
        results.append(x)
    return results


@pytest.mark.parametrize("bounds", [(0, math.inf), (0.3, 0.31)])
def test_lamb_is_that_of_the_paper(bounds):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    options = {"lr": 2e-3, "betas": (0.71, 0.88), "eps": 1e-6}
    groups = parameter_groups(model)
    matrices, rest = [group["params"] for group in groups]
    weights = [p.detach().clone() for p in (*matrices, *rest)]
    coefficients = {} if bounds[0] == 0 else {"min_coeff": bounds[0], "max_coeff": bounds[1]}
    optimizer = substitute(config("Lamb", **options, weight_decay=0.02, **coefficients), groups)
    gradients = [[torch.randn_like(weight) for weight in weights] for _ in range(20)]
    for step in gradients:
        for parameter, gradient in zip((*matrices, *rest), step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    # As in MLPerf's runs, what does not decay is not adapted either.
    kinds = [True] * len(matrices) + [False] * len(rest)
    decays = [0.02 * kind for kind in kinds]
    expected = lamb_of_the_paper(weights, gradients, **options, decays=decays, adapted=kinds, bounds=bounds)
    for parameter, reference in zip((*matrices, *rest), expected, strict=True):
        assert (parameter - reference).norm() <= 1e-6 * reference.norm()


@pytest.mark.parametrize(
    ("given", "understood"),
    [("FusedAdam", "Adam"), ("fusedlamb", "Lamb"), ("FusedLion", "Lion"), ("AdamW", "AdamW"), ("SGD", "SGD")],
)
def test_names_that_users_try(given, understood):
    found = config(given)
    resolve_name(found)
    assert found["optimizer"]["type"] == understood


def test_what_there_is_none_of_here_is_named():
    groups = [{"params": [nn.Parameter(torch.zeros(2, 2))]}]
    message = (
        "optimizer.params.weight_decy: Lamb has no such parameter on this device (cpu); did you mean 'weight_decay'?"
    )
    with pytest.raises(UserError, match=re.escape(message)):
        substitute(config("Lamb", lr=1e-3, weight_decy=10.0), groups)
    with pytest.raises(UserError, match=re.escape("DeepSpeed has no Lion for this device (cpu); take AdamW or Lamb")):
        substitute(config("Lion", lr=1e-3), groups)
    assert substitute(config("AdamW", lr=1e-3), groups) is None


@pytest.mark.parametrize(
    ("name", "stage", "message"),
    [
        ("Lamp", 0, "optimizer.type: 'Lamp' is not known; did you mean 'Lamb'?"),
        (
            "Lamb",
            1,
            "optimizer.type Lamb and zero_optimization.stage 1: ZeRO cuts layers in pieces, and Lamb's trust ratio",
        ),
    ],
)
def test_what_cannot_train_is_refused(name, stage, message):
    with pytest.raises(UserError, match=re.escape(message)):
        check_supported({**config(name, lr=1e-3), "zero_optimization": {"stage": stage}})
