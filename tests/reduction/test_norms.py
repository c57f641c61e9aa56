"""Norms of large fp32 gradients, for which one sum in fp32 is not enough."""

import pytest
import torch

from ds_bert.reduction.norms import global_norm, tensor_norms


@pytest.mark.parametrize("elements", [1, 4096, 4097, 5_000_000, 4096 * 4096 + 1])
def test_the_norm_of_many_elements_is_that_in_double_precision(elements):
    torch.manual_seed(0)
    tensor = torch.rand(elements)
    assert tensor_norms([tensor]).item() == pytest.approx(tensor.double().norm().item(), rel=2e-7)
    assert global_norm([tensor, tensor]).item() == pytest.approx(2**0.5 * tensor.double().norm().item(), rel=3e-7)
