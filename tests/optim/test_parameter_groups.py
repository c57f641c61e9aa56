"""Weight decay is for matrices only, whatever a model family calls its norms and biases."""

import pytest
from torch import nn

from ds_bert.optim import parameter_groups
from tests.modeling.test_packed_execution import FAMILIES, make


@pytest.mark.parametrize("family", FAMILIES)
def test_only_matrices_that_are_no_norms_decay(family):
    model = make(family)
    decayed, plain = parameter_groups(model)
    assert plain["weight_decay"] == 0.0
    assert "weight_decay" not in decayed
    assert all(p.dim() >= 2 for p in decayed["params"])
    assert all(p.dim() == 1 for p in plain["params"])
    found = [*decayed["params"], *plain["params"]]
    assert {id(p) for p in found} == {id(p) for p in model.parameters()}
    assert len(found) == len(list(model.parameters()))
    norms = [m for m in model.modules() if isinstance(m, nn.LayerNorm)]
    assert norms
    assert {id(m.weight) for m in norms} <= {id(p) for p in plain["params"]}


def test_norms_of_two_dimensions_frozen_parameters_and_missing_kinds():
    norm, frozen = nn.LayerNorm((3, 4)), nn.Linear(2, 2)
    frozen.requires_grad_(False)
    (only,) = parameter_groups(nn.Sequential(norm, frozen))
    assert [id(p) for p in only["params"]] == [id(norm.weight), id(norm.bias)]
    assert only["weight_decay"] == 0.0
