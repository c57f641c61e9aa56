"""Learn a WordPiece tokenizer from text, the same one every time.

The trainer of the `tokenizers` library gives another vocabulary in each process: the ids of continuing
characters ("##x") follow a randomly seeded hash table, and ids decide between merges of equal count. It is
made deterministic by giving it every "##x" beforehand, sorted, as a special token, and the characters as its
initial alphabet. The tokenizer is then built anew from the resulting vocabulary, with only the real special
tokens marked special.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from ds_bert.data.preparing.word_memory import remember_words
from ds_bert.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Ids 0 to 4 of a learnt tokenizer."""

MIN_VOCAB_SIZE = 64
MAX_WORD_CHARS = 100
_MIN_PAIR_COUNT = 2
_NUM_CODE_POINTS = 0x110000


def learn_tokenizer(read_texts: Callable[[], Iterator[str]], vocab_size: int) -> "Tokenizer":
    """Learn an uncased WordPiece tokenizer.

    Args:
        read_texts: gives the texts anew at each call; it is called twice.
        vocab_size: upper limit of the vocabulary, special tokens included. A small corpus gives fewer.

    Returns:
        A tokenizer that lower-cases and strips accents like BERT's. Runs of more than `MAX_WORD_CHARS`
        characters without a blank (Thai, DNA) are cut into words of that length instead of becoming one
        [UNK].

    Raises:
        UserError: the texts hold no characters.
    """
    alphabet = _alphabet(_count_characters(read_texts()))
    if not alphabet:
        raise UserError("--input: no text to learn a vocabulary from (only control characters); give files with text")
    # Half of the vocabulary is kept for longer pieces; what they leave free goes to the rarer characters.
    in_training = _fit(alphabet, (vocab_size - len(SPECIAL_TOKENS)) // 2)
    vocab = _train(read_texts(), vocab_size, in_training)
    for characters in alphabet[len(in_training) :]:
        if len(vocab) + len(characters) > vocab_size:
            break
        for token in characters:
            vocab.setdefault(token, len(vocab))
    return _build(vocab)


def wrap_learned(tokenizer: "Tokenizer", max_length: int) -> "PreTrainedTokenizerFast":
    """A learnt tokenizer as `transformers` has them; `max_length` becomes its `model_max_length`, in tokens."""
    from transformers import PreTrainedTokenizerFast

    roles = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL_TOKENS}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_length, **roles)


def _build(vocab: dict[str, int]) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    model = models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARS)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.BertPreTokenizer(), pre_tokenizers.FixedLength(length=MAX_WORD_CHARS)]
    )
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", SPECIAL_TOKENS.index("[CLS]")), ("[SEP]", SPECIAL_TOKENS.index("[SEP]"))],
    )
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _train(texts: Iterator[str], vocab_size: int, alphabet: list[tuple[str, ...]]) -> dict[str, int]:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    continuing = sorted(token for characters in alphabet for token in characters[1:])
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=_MIN_PAIR_COUNT,
        special_tokens=[*SPECIAL_TOKENS, *continuing],
        initial_alphabet=[characters[0] for characters in alphabet],
        # Without this limit the trainer would add every other character, too.
        limit_alphabet=len(alphabet),
        continuing_subword_prefix="##",
        show_progress=False,
    )
    tokenizer = Tokenizer(models.WordPiece({}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.train_from_iterator(_normalised(texts), trainer)
    return tokenizer.get_vocab(with_added_tokens=False)


def _normalised(texts: Iterator[str]) -> Iterator[str]:
    """Each text as its normalised words (as the tokenizer splits it) with blanks between them."""
    tokenizer = _build({token: index for index, token in enumerate(SPECIAL_TOKENS)})
    normalise, split = tokenizer.normalizer.normalize_str, tokenizer.pre_tokenizer.pre_tokenize_str
    memory = remember_words(
        lambda pieces: [" ".join(word for word, _ in split(normalise(piece))) for piece in pieces], " ".join
    )
    for text in texts:
        yield " ".join(memory.look_up([text.replace("\n", " ")])[0])


def _count_characters(texts: Iterator[str]) -> np.ndarray:
    """int64 (0x110000,): how often each code point occurs."""
    counts = np.zeros(_NUM_CODE_POINTS, np.int64)
    for text in texts:
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        seen = np.bincount(points)
        counts[: len(seen)] += seen
    return counts


def _alphabet(counts: np.ndarray) -> list[tuple[str, ...]]:
    """The characters of the normalised text, the most frequent first, ties by code point.

    The normaliser works on each character alone, so counting before it is as good and much faster.

    Returns:
        For each character its vocabulary entries: ("x", "##x"), or only ("x",) where it is always a word by
        itself (punctuation, Chinese characters).
    """
    from tokenizers import normalizers, pre_tokenizers

    normalizer = normalizers.BertNormalizer(lowercase=True)
    splitter = pre_tokenizers.BertPreTokenizer()
    normalised: dict[str, int] = {}
    for point in np.flatnonzero(counts).tolist():
        for character in normalizer.normalize_str(chr(point)):
            if not character.isspace():
                normalised[character] = normalised.get(character, 0) + int(counts[point])
    alphabet = []
    for character in sorted(normalised, key=lambda character: (-normalised[character], character)):
        text = normalizer.normalize_str(f"a{character}a")
        continues = len(splitter.pre_tokenize_str(text)) == 1 and character in text
        alphabet.append((character, f"##{character}") if continues else (character,))
    return alphabet


def _fit(alphabet: list[tuple[str, ...]], num_entries: int) -> list[tuple[str, ...]]:
    sizes = np.cumsum([len(characters) for characters in alphabet])
    return alphabet[: max(1, int(np.searchsorted(sizes, num_entries, side="right")))]
