"""Packed sequences give the loss and the gradients of padded ones, for every family of encoders."""

import copy
import io
import sys
import types

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from ds_bert.data import PackedMaskedLMCollator
from ds_bert.data.batches.collators import PackingCollator, packed_row
from ds_bert.data.batches.masking import MaskedSample
from ds_bert.errors import UserError
from ds_bert.modeling import (
    PACKED_ATTENTION,
    MaskedPositionHead,
    check_packed_execution,
    first_position,
    masked_lm_loss,
    packed_attention,
    use_packed_execution,
)
from tests.data.test_masking import TOKENIZER

VOCABULARY, POSITIONS = 60, 512
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": POSITIONS,
}  # fmt: skip
# Roberta's positions begin after its padding index.
OFFSET = {**SMALL, "max_position_embeddings": POSITIONS + 2, "pad_token_id": 1}
FAMILIES = {
    "bert": transformers.BertConfig(**SMALL),
    "roberta": transformers.RobertaConfig(**OFFSET),
    "camembert": transformers.CamembertConfig(**OFFSET),
    "distilbert": transformers.DistilBertConfig(
        vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=POSITIONS
    ),
    "electra": transformers.ElectraConfig(**SMALL, embedding_size=16),
    "albert": transformers.AlbertConfig(**SMALL, embedding_size=16),
    # Three layers, of which two attend in a window of 16 tokens.
    "modernbert": transformers.ModernBertConfig(
        **{**SMALL, "num_hidden_layers": 3}, local_attention=16, pad_token_id=0, global_attn_every_n_layers=3,
        bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3,
    ),
}  # fmt: skip


def make(family: str) -> nn.Module:
    torch.manual_seed(0)
    model = transformers.AutoModelForMaskedLM.from_config(FAMILIES[family])
    return model.eval()  # dropout draws differ for differently shaped batches


def draw(lengths: list[int]) -> list[MaskedSample]:
    rng = np.random.default_rng(0)
    samples = []
    for length in lengths:
        ids = rng.integers(4, VOCABULARY, length)
        positions = np.sort(rng.choice(length, max(1, length // 5), replace=False))
        samples.append(MaskedSample(ids, positions, rng.integers(4, VOCABULARY, len(positions))))
    return samples


def padded_loss(model: nn.Module, samples: list[MaskedSample]) -> torch.Tensor:
    """As Hugging Face computes it: rows padded to the longest, labels of -100 where nothing is masked."""
    longest = max(len(sample.input_ids) for sample in samples)
    ids = torch.full((len(samples), longest), model.config.pad_token_id or 0)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.input_ids)] = torch.from_numpy(sample.input_ids)
        mask[row, : len(sample.input_ids)] = 1
        labels[row, torch.from_numpy(sample.positions)] = torch.from_numpy(sample.labels)
    logits = model(input_ids=ids, attention_mask=mask).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def packed_loss(model: nn.Module, samples: list[MaskedSample]) -> torch.Tensor:
    batch = PackingCollator(first_position(model))(samples)
    logits = MaskedPositionHead(model)(model, batch.model_inputs, batch.positions)
    return masked_lm_loss(logits, batch.labels)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("lengths", [[11], [7, 7, 7], [512, 3], [40, 12, 3, 12, 25]], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_padded_sequences(family, lengths):
    model, samples = make(family), draw(lengths)
    expected = padded_loss(model, samples)
    expected.backward()
    expected_gradients = gradients(model)
    model.set_attn_implementation(PACKED_ATTENTION)
    # Padded batches give the same with it, too.
    torch.testing.assert_close(padded_loss(model, samples), expected, rtol=1e-5, atol=0)
    loss = packed_loss(model, samples)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    found = gradients(model)
    assert found.keys() == expected_gradients.keys()
    for name, gradient in found.items():
        reference = expected_gradients[name]
        assert (gradient - reference).norm() <= 1e-5 * max(reference.norm(), 1e-3), name


@pytest.mark.parametrize("family", FAMILIES)
def test_no_sequence_sees_another(family):
    model, samples = make(family), draw([9, 9, 30, 4])
    model.set_attn_implementation(PACKED_ATTENTION)
    collate = PackingCollator(first_position(model))
    changed = list(samples)
    changed[2] = changed[2]._replace(input_ids=np.roll(samples[2].input_ids, 1))
    with torch.no_grad():
        before, after = (model(**collate(batch).model_inputs).logits[0] for batch in (samples, changed))
    longest = 30  # sorted by length: it comes last
    assert torch.equal(before[:-longest], after[:-longest])
    assert not torch.equal(before[-longest:], after[-longest:])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_check_passes_and_leaves_the_model_as_it_was(family):
    model = make(family).train()
    before = model.config._attn_implementation
    check_packed_execution(model)
    assert model.training
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    "config",
    [
        transformers.MPNetConfig(**{**SMALL, "max_position_embeddings": POSITIONS + 2}),
        transformers.DebertaV2Config(**SMALL, relative_attention=True, pos_att_type=["p2c", "c2p"]),
        transformers.BertConfig(**SMALL, is_decoder=True),
    ],
    ids=lambda config: config.model_type,
)
def test_models_that_attend_in_their_own_way_are_refused(config):
    model = transformers.AutoModelForMaskedLM.from_config(config)
    with pytest.raises(UserError, match=r'"ds_bert.execution.packed": false'):
        check_packed_execution(model)


def test_dropout_in_attention_drops_its_share():
    model = make("bert").train()
    model.set_attn_implementation(PACKED_ATTENTION)
    layer = model.bert.encoder.layer[0].attention.self
    boundaries = torch.tensor([0, 500, 1000], dtype=torch.int32)
    # With equal scores and values of one, the output is the share of weights that were kept, over (1 - p).
    query, value = torch.zeros(1, 4, 1000, 8), torch.ones(1, 4, 1000, 8)
    attend = transformers.AttentionInterface()[PACKED_ATTENTION]
    output, _ = attend(layer, query, query, value, None, dropout=0.3, cu_seq_lens_q=boundaries, max_length_q=500)
    assert output.mean().item() == pytest.approx(1, abs=0.01)
    assert output.std().item() == pytest.approx((0.3 / 0.7 / 500) ** 0.5, rel=0.1)


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "dropout", "has_flash_attn", "chosen"),
    [
        ("cpu", None, torch.bfloat16, 0.0, True, "attend_by_runs"),
        ("cuda", (8, 0), torch.float32, 0.0, True, "attend_by_runs"),
        ("cuda", (7, 5), torch.float16, 0.0, True, "attend_by_runs"),
        ("cuda", (8, 0), torch.bfloat16, 0.1, True, "attend_with_flash_attn"),
        ("cuda", (9, 0), torch.float16, 0.0, False, "attend_with_torch_varlen"),
        ("cuda", (9, 0), torch.float16, 0.1, False, "attend_by_runs"),
    ],
)
def test_the_kernel_follows_from_what_the_device_can(
    monkeypatch, device, capability, dtype, dropout, has_flash_attn, chosen
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(packed_attention, "find_spec", lambda name: object() if has_flash_attn else None)
    packed_attention.choose_kernel.cache_clear()
    assert packed_attention.choose_kernel(torch.device(device), dtype, dropout).__name__ == chosen
    packed_attention.choose_kernel.cache_clear()


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kernel", ["attend_with_torch_varlen", "attend_with_flash_attn"])
def test_gpu_kernels_get_the_arguments_that_give_the_same_attention(monkeypatch, kernel, window):
    """The kernel itself is played by a plain loop that reads its arguments as its documentation says."""

    def plain(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size, scale=None, softmax_scale=None, **rest):
        assert (max_q, max_k) == (9, 9)
        assert cu_q.dtype == torch.int32
        outputs = []
        for start, end in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True):
            scores = torch.einsum("qnd,knd->nqk", q[start:end], k[start:end]) * (scale or softmax_scale)
            offset = torch.arange(end - start)[:, None] - torch.arange(end - start)[None, :]
            left, right = window_size
            if left >= 0:
                scores = scores.masked_fill((offset > left) | (-offset > right), float("-inf"))
            outputs.append(torch.einsum("nqk,knd->qnd", scores.softmax(-1), v[start:end]))
        return torch.cat(outputs)

    monkeypatch.setattr(packed_attention, "varlen_attn", plain)
    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(flash_attn_varlen_func=plain))
    query, key, value = torch.randn(3, 16, 4, 8)
    boundaries = torch.tensor([0, 3, 7, 16], dtype=torch.int32)
    row = packed_attention.PackedRow(boundaries, 9, dropout=0.0, scaling=0.3, sliding_window=window)
    found = getattr(packed_attention, kernel)(query, key, value, row)
    expected = packed_attention.attend_by_runs(query, key, value, row)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_collator_for_the_trainer_masks_as_hugging_faces_own():
    samples = [np.array([2, *range(5, 5 + n), 3]) for n in (30, 4, 17)]
    own = transformers.DataCollatorForLanguageModeling(TOKENIZER, seed=3)
    ours = PackedMaskedLMCollator(TOKENIZER, seed=3, first_position=2)
    row = ours([{"input_ids": ids.tolist(), "other": 1} for ids in samples])
    expected = own([np.concatenate(sorted(samples, key=len)).tolist()])
    assert torch.equal(row["input_ids"], expected["input_ids"])
    assert torch.equal(row["labels"], expected["labels"])
    assert row["cu_seq_lens_q"].tolist() == [0, 6, 25, 57]
    assert row["position_ids"][0].tolist() == [*range(2, 8), *range(2, 21), *range(2, 34)]
    assert row["max_length_q"] == 32
    assert row.keys() == {*packed_row(np.array([1])), "input_ids", "labels"}


def test_with_labels_the_head_is_computed_where_they_count():
    model = make("bert")
    samples = draw([9, 4])
    expected = padded_loss(model, samples) / sum(len(sample.labels) for sample in samples)
    use_packed_execution(model)
    batch = PackingCollator(first_position(model))(samples)
    labels = torch.full_like(batch.model_inputs["input_ids"], -100)
    labels[0, batch.positions] = batch.labels
    output = model(**batch.model_inputs, labels=labels)
    torch.testing.assert_close(output.loss, expected, rtol=1e-5, atol=0)
    assert output.logits.shape == (1, len(batch.labels), VOCABULARY)
    # Without labels it is as it was.
    assert model(**batch.model_inputs).logits.shape == (1, 13, VOCABULARY)


def test_a_wrong_model_is_refused_even_where_its_logits_hardly_differ():
    config = transformers.MPNetConfig(
        **{**SMALL, "max_position_embeddings": POSITIONS + 2}, initializer_range=1e-3
    )  # fmt: skip
    with pytest.raises(UserError, match="it has an attention of its own"):
        check_packed_execution(transformers.MPNetForMaskedLM(config))
    config = transformers.BertConfig(**SMALL, is_decoder=True, initializer_range=1e-3)
    with pytest.raises(UserError, match="attention that sees earlier tokens only"):
        use_packed_execution(transformers.BertForMaskedLM(config))


def test_a_model_in_half_precision_is_named_as_such():
    with pytest.raises(UserError, match=r"BertForMaskedLM is in torch.bfloat16; load it in torch.float32"):
        use_packed_execution(make("bert").to(torch.bfloat16))


def test_a_copied_or_pickled_model_has_a_head_of_its_own():
    model = make("bert")
    use_packed_execution(model)
    batch = PackedMaskedLMCollator(TOKENIZER, seed=0)([list(range(5, 40)), list(range(5, 12))])
    expected = model(**batch).loss
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for copied in (copy.deepcopy(model), torch.load(stream, weights_only=False)):
        torch.testing.assert_close(copied(**batch).loss, expected)


def test_what_comes_with_token_ids_is_packed_with_them():
    plain = [list(range(5, 5 + n)) for n in (7, 3)]
    kinds_of = [[0] * 4 + [1] * 3, [0, 1, 1]]
    expected = PackedMaskedLMCollator(TOKENIZER, seed=0)(plain)
    examples = [
        {
            "input_ids": np.array([*ids, 0, 0]),
            "attention_mask": [1] * len(ids) + [0, 0],
            "token_type_ids": torch.tensor([*kinds, 0, 0]),
        }
        for ids, kinds in zip(plain, kinds_of, strict=True)
    ]
    found = PackedMaskedLMCollator(TOKENIZER, seed=0)(examples)
    assert found.pop("token_type_ids").tolist() == [kinds_of[1] + kinds_of[0]]
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected[name])), name


@pytest.mark.parametrize(("examples", "message"), [([], "no examples to pack"), ([{"ids": [1]}], "has no input_ids")])
def test_examples_that_cannot_be_packed_are_named(examples, message):
    with pytest.raises(UserError, match=message):
        PackedMaskedLMCollator(TOKENIZER)(examples)
