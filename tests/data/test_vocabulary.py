"""A learnt vocabulary: the same every time, within its limit, and no word that needs [UNK] without cause."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_bert.data.preparing.chunks import ChunkJob, start_job
from ds_bert.data.preparing.vocabulary import MIN_VOCAB_SIZE, SPECIAL_TOKENS, learn_tokenizer, wrap_learned
from ds_bert.data.preparing.word_memory import splits_into_words
from ds_bert.data.tokenizer import continues_word, frame_of, plain_backend
from ds_bert.errors import UserError
from tests.data.conftest import make_corpus

LEARN_AND_PRINT = """
import hashlib, sys
from ds_bert.data.preparing.vocabulary import learn_tokenizer
from tests.data.conftest import make_corpus
text = make_corpus(30) + "aa bb cc dd ee ff " * 3 + "日本 語中 ひらがな ไทย"
print(hashlib.sha256(learn_tokenizer(lambda: iter([text]), 300).to_str().encode()).hexdigest())
"""


def learn(text, vocab_size):
    return learn_tokenizer(lambda: iter([text]), vocab_size)


def test_another_process_with_another_hash_seed_learns_the_same():
    seen = {
        subprocess.run(
            [sys.executable, "-c", LEARN_AND_PRINT], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(seen) == 1


def test_special_tokens_are_the_first_ids_and_special():
    tokenizer = wrap_learned(learn(make_corpus(5), 300), 128)
    assert tokenizer.convert_ids_to_tokens(range(5)) == list(SPECIAL_TOKENS)
    assert sorted(tokenizer.all_special_ids) == [0, 1, 2, 3, 4]
    assert tokenizer.model_max_length == 128
    assert tokenizer("a b").input_ids[0] == tokenizer.cls_token_id
    assert tokenizer("a", "b", return_token_type_ids=True).token_type_ids == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("vocab_size", [MIN_VOCAB_SIZE, 100, 300])
@pytest.mark.parametrize("text", [make_corpus(10), "".join(map(chr, range(0x4E00, 0x5200)))], ids=["latin", "chinese"])
def test_the_vocabulary_stays_within_its_limit(text, vocab_size):
    vocab = learn(text, vocab_size).get_vocab()
    assert len(vocab) <= vocab_size
    assert sorted(vocab.values()) == list(range(len(vocab)))


def test_characters_fill_what_merges_leave_free():
    text = "".join(chr(0x4E00 + i) * (1000 - i) for i in range(900))
    assert learn(text, 500).get_vocab_size() == 500
    assert learn(text, 2000).get_vocab_size() == 905


def test_the_most_frequent_characters_are_kept_ties_by_code_point():
    text = "丙" + "乙乙" + "甲甲" + "".join(chr(0x5000 + i) * 3 for i in range(57))
    vocab = learn(text, 64).get_vocab()
    # 59 places: 57 characters seen three times, then 乙 (U+4E59) before 甲 (U+7532); 丙 is seen once.
    assert "乙" in vocab
    assert "甲" in vocab
    assert "丙" not in vocab


def test_only_characters_that_can_continue_a_word_get_a_continuing_entry():
    vocab = learn("Ab1é,中 " * 3 + make_corpus(3), 300).get_vocab()
    assert {"##b", "##1", "##e"} <= set(vocab)
    assert {"中", ",", "e"} <= set(vocab)
    assert not {"##中", "##,", "##A", "##é", "é"} & set(vocab)


def test_runs_without_blanks_are_words_not_unknown():
    tokenizer = learn("acgt" * 500 + "\nก" * 3, 100)
    encoding = tokenizer.encode("gattaca" * 100)
    assert SPECIAL_TOKENS.index("[UNK]") not in encoding.ids
    assert "".join(token.removeprefix("##") for token in encoding.tokens[1:-1]) == "gattaca" * 100


def test_a_text_of_control_characters_is_refused():
    with pytest.raises(UserError, match="no text to learn a vocabulary from"):
        learn("\x01\x02", 100)


@pytest.fixture(scope="module")
def encoders(bert_tokenizer):
    """The worker's way, which remembers words, and the library's."""
    from ds_bert.data.preparing import chunks

    backend = plain_backend(bert_tokenizer)
    start_job(ChunkJob(backend.to_str(), frame_of(bert_tokenizer), continues_word(bert_tokenizer), None, "pack", 512))
    assert chunks._memory is not None
    return chunks._encode, lambda texts: [e.ids for e in backend.encode_batch_fast(texts, add_special_tokens=False)]


WORDS = "the unbelievable don't naïve e\u0301 \u0301 中文 ไทย 한국 ΑΣ İ [MASK] ##a - ... a.b \U0001f600"
BLANK_LIKE = [" ", "  ", "\t", "\r", "\u00a0", "\x85", "\x1c", "\x00", "\u200d", "x" * 120]
SNIPPETS = st.sampled_from(WORDS.split(" ") + BLANK_LIKE)


@settings(max_examples=300)
@given(st.lists(st.one_of(st.lists(SNIPPETS).map("".join), st.text()), min_size=1, max_size=5))
def test_remembered_words_give_what_the_tokenizer_gives(encoders, texts):
    encode, reference = encoders
    for _ in range(2):  # learnt the first time, remembered the second
        ids, lengths = encode(texts)
        expected = reference(texts)
        assert ids.tolist() == [token for tokens in expected for token in tokens]
        assert lengths.tolist() == list(map(len, expected))


def test_forgetting_changes_nothing(encoders, monkeypatch):
    encode, _ = encoders
    texts = make_corpus(10).split("\n")
    before = encode(texts)[0].tolist()
    monkeypatch.setattr("ds_bert.data.preparing.word_memory._MEMORY_CHARS", 500)
    assert encode(texts)[0].tolist() == before


def test_only_tokenizers_of_berts_kind_are_remembered(bert_tokenizer, roberta_folder):
    backend = plain_backend(bert_tokenizer)
    assert splits_into_words(backend.to_str())
    backend.add_tokens(["two words"])
    assert not splits_into_words(backend.to_str())
    assert not splits_into_words((roberta_folder / "tokenizer.json").read_text())
