"""Tokenize each distinct word once: most words of a text have been seen before.

A tokenizer of BERT's kind treats the texts between two blanks independently of each other, so that its result for a
text is the results for these one after another. Remembering them is some ten times as fast as tokenizing anew.
"""

import json
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Value = TypeVar("Value")

# Bounds the memory of one process to about 50 MB; all but the rarest words of a language fit.
_MEMORY_CHARS = 16 << 20
_ENTRY_CHARS = 80  # what an entry costs beside the characters of its word, about


class WordMemory(Generic[Value]):
    """Remembers what `compute` gives for the words (texts without a blank) of a text."""

    def __init__(self, compute: Callable[[list[str]], Iterable[Value]]) -> None:
        """Args: compute: values for a list of words, in order."""
        self._compute = compute
        self._values: dict[str, Value] = {}
        self._num_chars = 0

    def look_up(self, texts: list[str]) -> list[list[Value]]:
        """For each text the values of its words (split at U+0020 only; empty words included), in order."""
        words = [text.split(" ") for text in texts]
        unknown = [word for word in set().union(*words) if word not in self._values]
        num_chars = sum(map(len, unknown)) + _ENTRY_CHARS * len(unknown)
        if self._num_chars + num_chars > _MEMORY_CHARS and self._values:
            self._values.clear()
            self._num_chars = 0
            return self.look_up(texts)
        self._num_chars += num_chars
        self._values.update(zip(unknown, self._compute(unknown), strict=True))
        value_of = self._values.__getitem__
        return [list(map(value_of, words_of_text)) for words_of_text in words]


def is_blind_across_blanks(tokenizer_json: str) -> bool:
    """Whether a tokenizer surely treats the texts between two blanks independently of each other.

    Args:
        tokenizer_json: a serialised `tokenizers.Tokenizer` that reads special tokens as text.

    Returns:
        True for BERT's normaliser and pre-tokenizer without added ordinary tokens (these may contain blanks).
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
