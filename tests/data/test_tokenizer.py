"""What is read out of a tokenizer, and the words of its errors."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from ds_bert.data.tokenizer import continues_word, frame_of, load_tokenizer, plain_backend, special_token_ids
from ds_bert.errors import UserError


def test_frame_of_bert_and_roberta(bert_tokenizer, roberta_folder):
    frame = frame_of(bert_tokenizer)
    assert (frame.prefix, frame.suffix, frame.size) == ((2,), (3,), 2)
    assert frame.is_special(np.array([0, 4, 5, 399])).tolist() == [True, True, False, False]
    frame = frame_of(load_tokenizer(roberta_folder))
    assert (frame.prefix, frame.suffix) == ((0,), (2,))


def test_special_ids_are_sorted_and_hold_the_unknown_token(bert_tokenizer, roberta_folder):
    assert special_token_ids(bert_tokenizer).tolist() == [0, 1, 2, 3, 4]
    assert special_token_ids(load_tokenizer(roberta_folder)).tolist() == [0, 1, 2, 3, 4]


def test_words_are_told_by_the_models_own_mark(bert_tokenizer, roberta_folder):
    for tokenizer, inner, start in (
        (bert_tokenizer, "##a", "a"),
        (load_tokenizer(roberta_folder), "a", "Ġa"),
    ):
        table = continues_word(tokenizer)
        assert table[tokenizer.convert_tokens_to_ids(inner)]
        assert not table[tokenizer.convert_tokens_to_ids(start)]
        assert not table[tokenizer.mask_token_id]


def test_special_tokens_in_a_text_are_text(bert_tokenizer):
    ids = plain_backend(bert_tokenizer).encode("[MASK] [SEP]", add_special_tokens=False).ids
    assert not set(ids) & {bert_tokenizer.mask_token_id, bert_tokenizer.sep_token_id}


def test_a_tokenizer_that_cuts_and_pads_does_neither_here(bert_tokenizer):
    backend = Tokenizer.from_str(bert_tokenizer.backend_tokenizer.to_str())
    backend.enable_truncation(8)
    backend.enable_padding(length=8)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="[MASK]")
    assert len(plain_backend(tokenizer).encode("the of " * 20).ids) == 42
    assert len(plain_backend(tokenizer).encode("the").ids) == 3


def test_no_mask_token(tmp_path):
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>")), unk_token="<unk>"
    ).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"has no mask token.*add_special_tokens"):
        load_tokenizer(tmp_path)


def test_no_fast_version(bert_folder, monkeypatch):
    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", False)
    with pytest.raises(UserError, match=r"has no fast version \(tokenizer\.json\)"):
        load_tokenizer(bert_folder)


def test_special_tokens_within_a_text_are_refused(bert_tokenizer):
    from tokenizers.processors import TemplateProcessing

    backend = Tokenizer.from_str(bert_tokenizer.backend_tokenizer.to_str())
    backend.post_processor = TemplateProcessing(single="$A [SEP] $A", special_tokens=[("[SEP]", 3)])
    with pytest.raises(UserError, match="only tokens before and after the text are supported"):
        frame_of(PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="[MASK]"))


def test_what_cannot_be_loaded_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    for name, words in (
        (tmp_path / "empty", "cannot be loaded .*; give a folder written by save_pretrained"),
        (tmp_path / "broken", "cannot be loaded .*; give a folder written by save_pretrained"),
        (tmp_path / "broken" / "tokenizer.json", "is a file; give the folder"),
        (tmp_path / "no" / "such", "no such folder; check the path"),
        ("./nothing", "no such folder; check the path"),
        ("no-org/no-such-tokenizer", "the Hub cannot be reached.*check the name and the network"),
    ):
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(UserError, match=words) as error:
            load_tokenizer(name)
        assert "\n" not in str(error.value)
        assert str(name) in str(error.value)


def test_an_unreachable_hub_is_told_at_once(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("ds_bert.data.tokenizer.getproxies", dict)
    with pytest.raises(UserError, match="the Hub cannot be reached"):
        load_tokenizer("no-org/no-such-tokenizer")


def test_code_that_comes_with_a_tokenizer_needs_consent(tmp_path, bert_tokenizer):
    bert_tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast): pass\n"
    )
    with pytest.raises(UserError, match="pass --trust-remote-code if you trust its code"):
        load_tokenizer(tmp_path)
    assert type(load_tokenizer(tmp_path, trust_remote_code=True)).__name__ == "Own"
