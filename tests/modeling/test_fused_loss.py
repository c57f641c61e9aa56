"""The loss without logits is the loss with them, whole or in chunks, for every family."""

import copy

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM

from ds_bert.layers import vocabulary_projection
from ds_bert.modeling import MaskedPositionHead
from ds_bert.reduction import attach
from tests.modeling.test_masked_head import FAMILIES, family_config
from tests.runs import gradients, relative_difference

POSITIONS, LABELS = torch.tensor([1, 5, 13, 20, 30]), torch.tensor([8, 9, 10, 11, 8])


def make(family: str):
    torch.manual_seed(0)
    return AutoModelForMaskedLM.from_config(family_config(family)).eval(), torch.randint(5, 60, (3, 12))


@pytest.mark.parametrize("max_logits", [2**26, 120], ids=["one chunk", "chunks of two rows"])
@pytest.mark.parametrize("reduced", [False, True], ids=["autograd", "reducer"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_with_logits(family, reduced, max_logits, monkeypatch):
    monkeypatch.setattr(vocabulary_projection, "MAX_LOGITS", max_logits)
    model, ids = make(family)
    plain = copy.deepcopy(model)
    logits = plain(input_ids=ids).logits.flatten(0, 1)[POSITIONS]
    expected = F.cross_entropy(logits, LABELS, reduction="sum")
    (3 * expected).backward()

    head = MaskedPositionHead(model)
    head.use_fused_loss(model)
    assert head.projection is model.get_output_embeddings()
    reducer = attach(model, max_norm=1e6) if reduced else None
    loss = head.loss(model, {"input_ids": ids}, POSITIONS, LABELS)
    (3 * loss).backward()
    if reducer:
        reducer.finish()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert relative_difference(gradients(model), gradients(plain)) < 1e-6
    # Outside of `loss` the model is as it was.
    assert model(input_ids=ids).logits.shape == (3, 12, 60)


def test_a_large_logit_neither_overflows_nor_underflows():
    layer = vocabulary_projection.VocabularyProjection(2, 3)
    layer.labels = torch.tensor([2])
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[300.0, 0.0], [0.0, 0.0], [-300.0, 0.0]]))
        layer.bias.zero_()
    loss = layer(torch.tensor([[1.0, 0.0]]))
    loss.backward()
    assert loss.item() == 600
    torch.testing.assert_close(layer.bias.grad, torch.tensor([1.0, 0.0, -1.0]))


def test_a_head_that_goes_on_after_its_projection_keeps_its_own_loss():
    model, ids = make("bert")
    whole_forward = model.cls.forward
    model.cls.forward = lambda hidden: whole_forward(hidden) * 2
    head = MaskedPositionHead(model)
    head.use_fused_loss(model)
    assert head.projection is None
    expected = F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1)[POSITIONS], LABELS, reduction="sum")
    torch.testing.assert_close(head.loss(model, {"input_ids": ids}, POSITIONS, LABELS), expected)
