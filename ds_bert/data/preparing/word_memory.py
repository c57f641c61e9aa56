"""Tokenize each distinct word once: most words of a text have been seen before.

A tokenizer of BERT's kind treats what stands between two blanks or beside an ASCII punctuation mark
independently of the rest, so its result for a text is the results for these pieces one after another.
Remembering them is several times as fast as tokenizing anew.
"""

import json
import re
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

Value = TypeVar("Value", bound=Hashable)

# Bounds the memory of one process to about 50 MB; all but the rarest words of a language fit.
_MEMORY_CHARS = 16 << 20
_ENTRY_CHARS = 80  # what an entry costs beside the characters of its word, about
_AROUND_PUNCTUATION = re.compile(r"([!-/:-@\[-`{-~])")


class WordMemory(Generic[Value]):
    """Remembers a function's values for pieces of text.

    The values should be tuples or strings: the garbage collector would walk through lists again and again.
    """

    def __init__(self, split: Callable[[str], list[str]], compute: Callable[[list[str]], Iterable[Value]]) -> None:
        """Args: split: a text's pieces, in order. compute: the values for a list of pieces, in order."""
        self._split = split
        self._compute = compute
        self._values: dict[str, Value] = {}
        self._num_chars = 0

    def look_up(self, texts: Iterable[str]) -> list[list[Value]]:
        """For each text the values of its pieces, in order."""
        pieces = list(map(self._split, texts))
        unknown = [piece for piece in set().union(*pieces) if piece not in self._values]
        if unknown:
            num_chars = sum(map(len, unknown)) + _ENTRY_CHARS * len(unknown)
            if self._num_chars + num_chars > _MEMORY_CHARS and self._values:
                self._values.clear()
                self._num_chars = 0
                unknown = list(set().union(*pieces))
            self._num_chars += num_chars
            self._values.update(zip(unknown, self._compute(unknown), strict=True))
        value_of = self._values.__getitem__
        return [list(map(value_of, pieces_of_text)) for pieces_of_text in pieces]


def remember_words(
    compute: Callable[[list[str]], Iterable[Value]], join: Callable[[Iterable[Value]], Value]
) -> WordMemory[Value]:
    """A memory of the words between blanks (U+0020) that takes those with punctuation apart, and remembers
    these smaller pieces, too.

    Args:
        compute: the values for a list of pieces.
        join: the value of a text from those of its pieces.
    """
    pieces = WordMemory(_AROUND_PUNCTUATION.split, compute)
    return WordMemory(_split_at_blanks, lambda words: map(join, pieces.look_up(words)))


def _split_at_blanks(text: str) -> list[str]:
    return text.split(" ")


def splits_into_words(tokenizer_json: str) -> bool:
    """Whether a tokenizer surely treats what stands between blanks or punctuation marks independently.

    Args:
        tokenizer_json: a serialised `tokenizers.Tokenizer` that reads special tokens as text.

    Returns:
        True for BERT's normaliser and pre-tokenizer without added ordinary tokens (which may contain blanks).
    """
    state = json.loads(tokenizer_json)
    splitter = state["pre_tokenizer"] or {}
    steps = splitter.get("pretokenizers", [splitter]) if splitter.get("type") == "Sequence" else [splitter]
    return (
        (state["normalizer"] or {}).get("type") == "BertNormalizer"
        and steps[0].get("type") == "BertPreTokenizer"
        and all(step.get("type") == "FixedLength" for step in steps[1:])
        and all(token["special"] for token in state["added_tokens"])
    )
