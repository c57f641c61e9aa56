"""The tied embedding's gradient, sent in two parts, is the one autograd gives."""

import copy

import pytest
import torch
from torch import nn

from ds_bert.reduction import attach
from tests.runs import captured_log, gradients, relative_difference

SMALL = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 24, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
FAMILIES = {
    "bert": {},
    "roberta": {"pad_token_id": 1},
    "camembert": {"pad_token_id": 1},
    "electra": {"embedding_size": 8},
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "dropout": 0.0, "attention_dropout": 0.0},
    "albert": {"embedding_size": 8},
    "modernbert": {
        "pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3,
        "global_attn_every_n_layers": 2, "local_attention": 8,
    },
}  # fmt: skip


def make(family: str, **changes) -> nn.Module:
    from transformers import AutoConfig, AutoModelForMaskedLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family], **changes})
    return AutoModelForMaskedLM.from_config(config).train()


def backward(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 50, (3, 12), generator=generator)
    # Padding tokens among them: the lookup gives their row no gradient, the decoder does.
    model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids.roll(1, 0)).loss.backward()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_recognised_and_gets_autograds_gradient(family):
    model = make(family)
    plain = copy.deepcopy(model)
    reducer = attach(model, max_norm=1e6)
    for step in range(2):
        for micro_step in range(3):
            if micro_step < 2:
                with reducer.no_sync():
                    backward(model, 10 * step + micro_step)
            else:
                backward(model, 10 * step + micro_step)
            backward(plain, 10 * step + micro_step)
        reducer.finish()
        assert reducer.plan.split is not None
        # Ready first: sent first.
        assert reducer.plan.buckets[0] == (reducer.plan.split,)
        assert relative_difference(gradients(model), gradients(plain)) < 1e-6
        model.zero_grad()
        plain.zero_grad()
    reducer.detach()
    backward(model, 0)
    backward(plain, 0)
    assert relative_difference(gradients(model), gradients(plain)) == 0


def test_evaluation_and_a_forward_pass_without_backward_leave_no_trace():
    model = make("bert")
    plain = copy.deepcopy(model)
    reducer = attach(model, max_norm=1e6)
    ids = torch.arange(12).view(1, 12)
    for _ in range(2):
        with torch.no_grad():
            model(input_ids=ids)
        model(input_ids=ids)
        backward(model, 3)
        reducer.finish()
        ours = gradients(model)
        model.zero_grad()
    backward(plain, 3)
    assert relative_difference(ours, gradients(plain)) < 1e-6


def test_gradients_that_are_zeroed_instead_of_dropped_give_the_same():
    model = make("bert")
    plain = copy.deepcopy(model)
    reducer = attach(model, max_norm=1e6)
    for step in range(3):
        with reducer.no_sync():
            backward(model, 2 * step)
        backward(model, 2 * step + 1)
        reducer.finish()
        backward(plain, 2 * step)
        backward(plain, 2 * step + 1)
        assert relative_difference(gradients(model), gradients(plain)) < 1e-6
        model.zero_grad(set_to_none=False)
        plain.zero_grad()


def test_many_micro_steps_hold_no_more_rows_than_the_embedding_has():
    model = make("bert")
    plain = copy.deepcopy(model)
    reducer = attach(model, max_norm=1e6)
    for step in range(12):
        with reducer.no_sync():
            backward(model, step)
        backward(plain, step)
        assert sum(len(ids) for ids, _ in reducer.tied._lookups) <= 50 + 36
    reducer.finish()
    assert relative_difference(gradients(model), gradients(plain)) < 1e-6


class ThreeUses(nn.Module):
    """Uses its tied weight once more, in the loss."""

    def __init__(self, model: nn.Module, always: bool) -> None:
        super().__init__()
        self.model, self.always, self.calls = model, always, 0

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.model.get_output_embeddings()

    def forward(self, **batch):
        output = self.model(**batch)
        self.calls += 1
        if self.always or self.calls > 1:
            output.loss = output.loss + self.get_input_embeddings().weight.square().sum()
        return output


def test_a_third_use_falls_back_to_one_piece_with_a_notice():
    model = ThreeUses(make("bert"), always=True)
    plain = copy.deepcopy(model)
    reducer = attach(model, max_norm=1e6)
    with captured_log() as log:
        for step in range(2):
            backward(model, step)
            reducer.finish()
            backward(plain, step)
            assert relative_difference(gradients(model), gradients(plain)) < 1e-6
            model.zero_grad()
            plain.zero_grad()
    assert log.getvalue().count("is sent in one piece, at the end: it has a third use") == 1
    assert reducer.plan.split is None
    assert reducer.plan.buckets[-1][-1] == "model.bert.embeddings.word_embeddings.weight"


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_third_use_that_comes_later_is_an_error(set_to_none):
    from ds_bert.errors import UserError

    model = ThreeUses(make("bert"), always=False)
    reducer = attach(model, max_norm=1e6)
    backward(model, 0)
    reducer.finish()
    model.zero_grad(set_to_none)
    backward(model, 1)
    with pytest.raises(UserError, match="got a gradient from a third use"):
        reducer.finish()


def test_an_embedding_that_computes_in_its_own_way_is_sent_in_one_piece():
    model = make("bert")
    model.get_input_embeddings().max_norm = 1.0
    with captured_log() as log:
        reducer = attach(model, max_norm=1e6)
    assert (
        "is sent in one piece, at the end: the embedding bert.embeddings.word_embeddings.weight has" in log.getvalue()
    )
    backward(model, 0)
    reducer.finish()
    assert reducer.plan.split is None


def test_a_head_that_decodes_in_pieces_sends_the_sum():
    model = make("bert")
    plain = copy.deepcopy(model)

    def pieces(model: nn.Module) -> None:
        hidden = model.bert(input_ids=torch.arange(12).view(1, 12)).last_hidden_state
        sum(model.cls(part).logsumexp(-1).sum() for part in hidden.split(5, dim=1)).backward()

    reducer = attach(model, max_norm=1e6)
    for _ in range(2):
        pieces(model)
        reducer.finish()
        ours = gradients(model)
        model.zero_grad()
    pieces(plain)
    assert relative_difference(ours, gradients(plain)) < 1e-6
