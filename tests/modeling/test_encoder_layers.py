"""Compiling the layers and computing them twice change no number."""

import copy

import pytest
import torch
import transformers

from ds_bert.data.batches.collators import PackingCollator
from ds_bert.errors import UserError
from ds_bert.modeling import (
    PACKED_ATTENTION,
    MaskedPositionHead,
    compile_layers,
    first_position,
    use_cpu_dropout,
    use_gradient_checkpointing,
)
from tests.modeling.test_packed_execution import SMALL, draw, make
from tests.runs import gradients, relative_difference

BATCHES = ([11], [40, 12, 3, 12], [5, 5])


def train(model: torch.nn.Module, *prepare, batches: tuple = BATCHES) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of some packed batches of different shapes, in training mode with dropout, and the sum of gradients."""
    model = copy.deepcopy(model).train()
    model.set_attn_implementation(PACKED_ATTENTION)
    use_cpu_dropout(model)
    collate, head = PackingCollator(first_position(model)), MaskedPositionHead(model)
    for change in prepare:
        change(model)
    losses = []
    torch.manual_seed(1)
    for lengths in batches:
        batch = collate(draw(lengths))
        loss = head.loss(model, batch.model_inputs, batch.positions, batch.labels)
        loss.backward()
        losses.append(loss.item())
    return losses, gradients(model)


@pytest.fixture(scope="module", params=["bert", "modernbert"])
def trained(request):
    model = make(request.param)
    return model, *train(model)


@pytest.mark.parametrize(
    "prepare",
    [(compile_layers,), (use_gradient_checkpointing,), (use_gradient_checkpointing, compile_layers)],
    ids=["compiled", "checkpointed", "both"],
)
def test_loss_and_gradients_stay(trained, prepare):
    torch._dynamo.reset()
    model, expected_losses, expected_gradients = trained
    torch._dynamo.utils.counters.clear()
    losses, found = train(model, *prepare)
    assert bool(torch._dynamo.utils.counters["stats"]["unique_graphs"]) == (compile_layers in prepare)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert relative_difference(found, expected_gradients) < 1e-6


def test_one_layer_is_compiled_for_all_layers_and_all_numbers_of_tokens():
    def graphs(layers: int, batches: tuple) -> int:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = transformers.BertForMaskedLM(transformers.BertConfig(**{**SMALL, "num_hidden_layers": layers}))
        train(model, compile_layers, batches=batches)
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    assert graphs(2, BATCHES[:1]) == graphs(4, BATCHES) > 1


def test_checkpointing_keeps_less():
    kept = []
    for prepare in [(), (use_gradient_checkpointing,)]:
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t):
            train(make("bert"), *prepare)
        kept.append(sum(sizes))
    assert kept[1] < 0.6 * kept[0]


@pytest.mark.parametrize(
    ("change", "key"),
    [(compile_layers, "compile"), (use_gradient_checkpointing, "gradient_checkpointing")],
)
def test_a_model_without_known_layers_is_refused(change, key):
    model = transformers.AlbertForMaskedLM(transformers.AlbertConfig(**SMALL, embedding_size=16))
    with pytest.raises(UserError, match=rf'AlbertForMaskedLM .*; set "ds_bert.execution.{key}": false'):
        change(model)


def test_without_a_compiler_there_is_one_line(monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("/nowhere/c++",))
    torch._dynamo.reset()
    with pytest.raises(UserError, match=r'torch.compile does not work here .*; set "ds_bert.execution.compile": false'):
        compile_layers(make("bert"))
