"""Dropout by our own masks: its share, its scale, its gradient, and that the seed decides."""

import pytest
import torch
from torch import nn

from ds_bert.layers.cpu_dropout import CpuDropout, dropout
from ds_bert.modeling import use_cpu_dropout


@pytest.mark.parametrize("p", [0.02, 0.1, 0.5, 0.9])
def test_the_share_and_the_scale(p):
    torch.manual_seed(0)
    dropped = dropout(torch.ones(1000, 1001), p)
    zeros = (dropped == 0).double()
    # Six standard deviations of a binomial share; whole, in rows and in columns of one.
    tolerance = 6 * (p * (1 - p)) ** 0.5
    assert abs(zeros.mean() - p) < tolerance / dropped.numel() ** 0.5
    assert (zeros.mean(0) - p).abs().max() < tolerance / 1000**0.5
    assert (zeros.mean(1) - p).abs().max() < tolerance / 1001**0.5
    assert dropped[dropped != 0].unique().tolist() == pytest.approx([1 / (1 - p)], rel=2e-5 / (1 - p))


def test_neighbours_are_independent():
    torch.manual_seed(0)
    zeros = (dropout(torch.ones(10**6), 0.5) == 0).double()
    for distance in (1, 2, 3, 4, 8):
        both = (zeros[:-distance] * zeros[distance:]).mean()
        assert abs(both - 0.25) < 5 * (0.25 * 0.75 / 10**6) ** 0.5


def test_the_global_seed_decides_and_calls_differ():
    draws = []
    for _ in range(2):
        torch.manual_seed(5)
        draws.append([dropout(torch.ones(7, 3), 0.5) for _ in range(2)])
    assert torch.equal(draws[0][0], draws[1][0])
    assert torch.equal(draws[0][1], draws[1][1])
    assert not torch.equal(draws[0][0], draws[0][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gradient_goes_where_values_went(dtype):
    x = torch.ones(33, 5, dtype=dtype, requires_grad=True)
    dropped = dropout(x, 0.3)
    assert dropped.dtype == dtype
    dropped.sum().backward()
    assert torch.equal(x.grad, dropped.detach())


def test_modules_are_replaced_in_place_and_rest_in_evaluation():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.0), nn.AlphaDropout(0.1)))
    names, dropouts = list(model.state_dict()), [model[1], model[2][0]]
    use_cpu_dropout(model)
    assert [type(module) for module in (model[1], model[2][0], model[2][1])] == [
        CpuDropout,
        CpuDropout,
        nn.AlphaDropout,
    ]
    assert [model[1], model[2][0]] == dropouts
    assert list(model.state_dict()) == names
    x = torch.randn(6, 4)
    assert torch.equal(model[2][0](x), x)
    assert not torch.equal(model[1](x), x)
    assert torch.equal(model.eval()[1](x), x)


@pytest.mark.parametrize("p", [1.0, 0.999999])
def test_a_probability_of_one_drops_all(p):
    assert not dropout(torch.ones(3, 5), p).any()
