"""Text -> units -> samples: sentences, packing, special tokens. Pure functions of text and numbers.

A group is what a sample never crosses: a document, a paragraph or a sentence. It comes as parts, each
tokenized by itself. A group longer than a sample is cut: for `pack` after as many words as fit, else between
its parts, which are sentences, as long as these fit.
"""

import re
from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from ds_bert.data.preparing.documents import is_title
from ds_bert.data.tokenizer import Frame

SAMPLE_UNITS = ("pack", "paragraph", "sentence", "document")

MAX_WORD_TOKENS = 16
"""Words of more tokens may be cut between two samples."""

# A mark that also ends abbreviations and numbers counts only before a blank; the marks of scripts written
# without blanks always count. Closing quotes and brackets stay with their sentence.
_SENTENCE_END = re.compile(r"""[.!?…؟۔।॥։።]["'”’»)\]]*(?=\s)|[。！？｡]["'”’»)\]）」』】》]*""")
_HEADING = re.compile(r"\s*=(?: ?=)* (?!=).* =(?: ?=)*\s*")


class Groups(NamedTuple):
    """The text of some documents as parts, in groups."""

    parts: list[str]
    """Pieces of text, each to be tokenized by itself; together they are the whole text."""
    group_ends: list[int]
    """For each group the number of parts up to its end."""
    num_paragraphs: int
    num_sentences: int | None
    """None for `pack`, which does not look for them."""


class Samples(NamedTuple):
    """S samples of together T tokens."""

    ids: np.ndarray
    """int32 (T,): the samples one after another, special tokens included."""
    lengths: np.ndarray
    """int32 (S,): tokens of each sample, special tokens included."""
    maskable: np.ndarray
    """int32 (S,): tokens of each sample that are not special."""


def split_sentences(paragraph: str) -> list[str]:
    """Split a paragraph after each sentence end: a mark (`.!?…` and the like, with closing quotes or
    brackets) followed by a blank, or one of `。！？｡`.

    The rule knows no abbreviations and no language. Joined, the sentences are the paragraph again, so no word
    is lost; a blank between two belongs to the second.
    """
    sentences = []
    start = 0
    for match in _SENTENCE_END.finditer(paragraph):
        sentences.append(paragraph[start : match.end()])
        start = match.end()
    rest = paragraph[start:]
    if sentences and (not rest or rest.isspace()):
        sentences[-1] += rest
    else:
        sentences.append(rest)
    return sentences


def group_text(documents: list[str], unit: str) -> Groups:
    """Cut documents into groups and parts for one sample unit.

    Args:
        documents: texts whose lines are paragraphs, none of them blank.
        unit: one of `SAMPLE_UNITS`.

    Returns:
        The parts in order. Between two paragraphs of a group stands a blank, so that tokenizers that see
        blanks read the group as one text. For `paragraph` a section heading belongs to the paragraph after
        it; a level-1 title is a paragraph.
    """
    parts: list[str] = []
    ends: list[int] = []
    num_paragraphs = 0
    for text in documents:
        paragraphs = text.split("\n")
        num_paragraphs += len(paragraphs)
        if unit == "pack":
            parts.append(paragraphs[0])
            parts.extend(" " + paragraph for paragraph in paragraphs[1:])
            ends.append(len(parts))
        elif unit == "document":
            parts.extend(split_sentences(paragraphs[0]))
            for paragraph in paragraphs[1:]:
                parts.extend(split_sentences(" " + paragraph))
            ends.append(len(parts))
        elif unit == "paragraph":
            for paragraph in _join_headings(paragraphs):
                parts.extend(split_sentences(paragraph))
                ends.append(len(parts))
        else:
            parts.extend(sentence.strip() for paragraph in paragraphs for sentence in split_sentences(paragraph))
    if unit == "sentence":
        ends = list(range(1, len(parts) + 1))
    return Groups(parts, ends, num_paragraphs, None if unit == "pack" else len(parts))


def _join_headings(paragraphs: list[str]) -> list[str]:
    joined = []
    headings = ""
    for paragraph in paragraphs:
        is_heading = paragraph.lstrip().startswith("=") and _HEADING.fullmatch(paragraph)
        if is_heading and not is_title(paragraph):
            headings += paragraph + " "
        else:
            joined.append(headings + paragraph)
            headings = ""
    if headings:
        joined.append(headings)
    return joined


def cut_samples(
    part_lengths: np.ndarray, group_ends: list[int], room: int, continues_word: np.ndarray, fill: bool
) -> tuple[np.ndarray, int]:
    """Cut a row of T tokens into samples that never cross a group.

    Args:
        part_lengths: integer (P,): tokens of each part, together T; zero is allowed.
        group_ends: for each group the number of parts up to its end, ascending, the last equal to P.
        room: tokens that fit into one sample, > 0.
        continues_word: bool (T,), True where a token is not the first of its word.
        fill: cut a long group after as many words as fit; else after as many parts as fit, and inside a part
            only where it alone is longer than `room`.

    Returns:
        Sample boundaries int64 (S + 1,), in tokens: sample i is the tokens [bounds[i], bounds[i + 1]). And
        the number of groups that were longer than `room`. A word is cut only where more than
        `MAX_WORD_TOKENS` of its tokens would have to move to the next sample.
    """
    part_stops = np.cumsum(part_lengths, dtype=np.int64).tolist()
    bounds = [0]
    start = num_split = first = 0
    for group_end in group_ends:
        group_stop = part_stops[group_end - 1] if group_end else 0
        num_split += group_stop - start > room
        while start < group_stop:
            cut = min(start + room, group_stop)
            if cut < group_stop:
                fitting = 0 if fill else bisect_right(part_stops, cut, first, group_end)
                if fitting > first and part_stops[fitting - 1] > start:
                    cut, first = part_stops[fitting - 1], fitting
                else:
                    cut = _word_cut(start, cut, continues_word)
            bounds.append(cut)
            start = cut
        first = group_end
    return np.array(bounds, np.int64), num_split


def _word_cut(start: int, cut: int, continues_word: np.ndarray) -> int:
    for position in range(cut, max(start, cut - MAX_WORD_TOKENS), -1):
        if not continues_word[position]:
            return position
    return cut


def frame_samples(token_ids: np.ndarray, bounds: np.ndarray, frame: Frame) -> Samples:
    """Put the special tokens around each sample, and leave out samples with nothing to mask.

    Args:
        token_ids: int32, the tokens `bounds` speaks of.
        bounds: int64 (S + 1,), see `cut_samples`.
        frame: the special tokens.

    Returns:
        The samples, in order.
    """
    ordinary = np.concatenate(([0], np.cumsum(~frame.is_special(token_ids), dtype=np.int64)))
    maskable = np.diff(ordinary[bounds])
    body_lengths = np.diff(bounds)
    kept = maskable > 0
    if not kept.all():
        token_ids = token_ids[np.repeat(kept, body_lengths)]
        body_lengths, maskable = body_lengths[kept], maskable[kept]
    lengths = body_lengths + frame.size
    ends = np.cumsum(lengths)
    ids = np.empty(int(lengths.sum()), np.int32)
    is_body = np.ones(len(ids), bool)
    for offset, token in enumerate(frame.prefix):
        ids[ends - lengths + offset] = token
        is_body[ends - lengths + offset] = False
    for offset, token in enumerate(reversed(frame.suffix), 1):
        ids[ends - offset] = token
        is_body[ends - offset] = False
    ids[is_body] = token_ids
    return Samples(ids, lengths.astype(np.int32), maskable.astype(np.int32))
