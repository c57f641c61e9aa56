"""Masks: how many, where, and what stands there instead."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ds_bert.data import PreparedData
from ds_bert.data.batches.collators import PaddingCollator
from ds_bert.data.batches.masked_dataset import MaskedLMDataset
from ds_bert.data.batches.masking import EVALUATION_MASKS, TokenMasker
from ds_bert.sampling import CarriedIndex

WORDS = [f"w{i}" for i in range(45)]


def tokenizer(**specials: str) -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=core, mask_token="[MASK]", **{**names, **specials})


TOKENIZER = tokenizer()
CLS, SEP, MASK, FIRST_WORD = 2, 3, 4, 5


def masker(**options) -> TokenMasker:
    return TokenMasker(TOKENIZER, **{"probability": 0.15, "seed": 0, **options})


samples = st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=60).map(
    lambda words: np.array([CLS, FIRST_WORD, *words, SEP], dtype=np.int32)
)


@given(samples, st.floats(0.01, 0.99), st.integers(0, 5), st.integers(0, 2**31))
@settings(max_examples=300)
def test_the_count_is_fixed_and_special_tokens_are_never_masked_nor_drawn(ids, probability, epoch, sample):
    mask = masker(probability=probability)
    maskable = int((ids >= FIRST_WORD).sum())
    masked = mask(ids, epoch=epoch, sample=sample)
    assert len(masked.positions) == mask.num_masked(np.array([maskable]))[0] == max(1, round(probability * maskable))
    assert len(set(masked.positions)) == len(masked.positions)
    assert (ids[masked.positions] >= FIRST_WORD).all()
    assert (masked.labels == ids[masked.positions]).all()
    assert np.isin(masked.input_ids[masked.positions], [MASK, *range(FIRST_WORD, len(TOKENIZER))]).all()
    untouched = np.delete(np.arange(len(ids)), masked.positions)
    assert (masked.input_ids[untouched] == ids[untouched]).all()


def test_a_text_of_one_word_gets_one_mask():
    masked = masker()(np.array([CLS, 10, SEP]), epoch=0, sample=0)
    assert masked.positions.tolist() == [1]
    assert masked.labels.tolist() == [10]


def test_masks_are_a_function_of_seed_epoch_and_sample_alone():
    ids = np.array([CLS, *range(5, 45), SEP])

    def positions(epoch=0, sample=0, **options):
        return masker(**options)(ids, epoch=epoch, sample=sample).positions.tolist()

    assert positions() == positions()
    others = [positions(epoch=1), positions(sample=1), positions(seed=1), positions(stream=EVALUATION_MASKS)]
    assert all(other != positions() for other in others)
    # Seed 0, epoch 1 is not seed 1, epoch 0.
    assert positions(epoch=1) != positions(seed=1)


def test_of_the_chosen_tokens_80_percent_become_mask_10_percent_random_and_10_percent_stay():
    mask, ids = masker(probability=0.5), np.full(402, 7)
    ids[[0, -1]] = CLS, SEP
    seen = np.concatenate([(m := mask(ids, epoch=0, sample=i)).input_ids[m.positions] for i in range(200)])
    assert (seen == MASK).mean() == pytest.approx(0.8, abs=0.01)
    assert (seen == 7).mean() == pytest.approx(0.1 + 0.1 / 45, abs=0.01)
    drawn = seen[(seen != MASK) & (seen != 7)]
    assert drawn.min() == FIRST_WORD
    assert drawn.max() == len(TOKENIZER) - 1


@pytest.mark.parametrize("pad_token", ["[SEP]", "[UNK]", "[CLS]", "[PAD]"])
def test_padding_is_told_by_length_not_by_the_pad_token(pad_token):
    same = tokenizer(pad_token=pad_token)
    mask = TokenMasker(same, probability=0.3, seed=0)
    samples = [np.array([CLS, *range(5, 5 + n), SEP]) for n in (1, 9, 4)]
    batch = PaddingCollator(same.pad_token_id)([mask(ids, epoch=0, sample=i) for i, ids in enumerate(samples)])
    assert batch.model_inputs["attention_mask"].sum(dim=1).tolist() == [3, 11, 6]
    assert batch.real_tokens == 20
    assert batch.model_inputs["attention_mask"].flatten()[batch.positions].all()
    rows, columns = batch.positions // 11, batch.positions % 11
    originals = [samples[row][column] for row, column in zip(rows, columns, strict=True)]
    assert batch.labels.tolist() == originals
    assert set(batch.model_inputs["input_ids"][0, 3:].tolist()) == {same.pad_token_id}


def test_a_carried_sample_keeps_the_masks_of_the_epoch_it_was_drawn_in(prepared):
    data = PreparedData(prepared)
    dataset = MaskedLMDataset(data.train, TokenMasker(data.load_tokenizer(), probability=0.15, seed=0))
    longest = int(data.train.lengths.argmax())
    dataset.set_epoch(1)
    drawn_before, drawn_now = dataset[longest], dataset[CarriedIndex(longest, 1)]
    np.testing.assert_array_equal(drawn_before.input_ids, drawn_now.input_ids)
    dataset.set_epoch(2)
    np.testing.assert_array_equal(dataset[CarriedIndex(longest, 1)].input_ids, drawn_before.input_ids)
    assert (dataset[longest].input_ids != drawn_before.input_ids).any()
