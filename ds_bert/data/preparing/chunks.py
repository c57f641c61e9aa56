"""Documents in chunks of about a megabyte, and what a worker process makes of one.

Nothing heavy is imported here: every worker process loads this module.
"""

import os
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from ds_bert.data.preparing.documents import Piece
from ds_bert.data.preparing.samples import Samples, cut_samples, frame_samples, group_text
from ds_bert.data.preparing.word_memory import WordMemory, remember_words, splits_into_words
from ds_bert.data.tokenizer import Frame

CHUNK_CHARS = 1 << 20
# An encoding takes about 250 bytes for each token until its ids are taken out.
_BATCH_CHARS = 1 << 16


class Chunk(NamedTuple):
    """Some documents on their way to a worker."""

    texts: tuple[list[str], list[str]]
    """Of the training and of the validation part."""
    num_documents: tuple[int, int]
    """Documents that end in this chunk, in each part."""
    num_bytes: int
    """UTF-8 bytes of all texts, line ends included."""


@dataclass
class Counts:
    """What became of a part's text; sums over chunks.

    Attributes:
        documents, paragraphs: of the input; a paragraph is a line that is not blank.
        sentences: None for `pack`, which does not look for them.
        samples, tokens: made; tokens with special tokens.
        unknown_tokens: tokens that are [UNK].
        split_units: documents (for `pack` and `document`), paragraphs or sentences longer than a sample, cut
            to fit.
        unmaskable_samples: not made, because all their tokens are special or unknown.
        empty_texts: paragraphs (for `pack`) or sentences without any token (control characters only).
    """

    documents: int = 0
    paragraphs: int = 0
    sentences: int | None = 0
    samples: int = 0
    tokens: int = 0
    unknown_tokens: int = 0
    split_units: int = 0
    unmaskable_samples: int = 0
    empty_texts: int = 0

    def add(self, other: "Counts") -> None:
        """Add another chunk's counts to these."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            setattr(self, name, None if value is None or mine is None else mine + value)


class ChunkResult(NamedTuple):
    """A chunk's samples and counts, for the training and for the validation part."""

    samples: tuple[Samples, Samples]
    counts: tuple[Counts, Counts]
    num_bytes: int


@dataclass(frozen=True)
class ChunkJob:
    """All that a worker must know; sent to each once.

    Attributes:
        tokenizer_json: a serialised `tokenizers.Tokenizer`.
        frame: its special tokens.
        continues_word: bool (vocabulary size,), True for tokens that are not the first of their word.
        unk_id: None for a tokenizer without [UNK].
        unit: one of `SAMPLE_UNITS`.
        max_length: tokens of the longest sample, special tokens included.
    """

    tokenizer_json: str
    frame: Frame
    continues_word: np.ndarray
    unk_id: int | None
    unit: str
    max_length: int


def chunk_documents(pieces: Iterable[tuple[Piece, bool]]) -> Iterator[Chunk]:
    """Collect pieces into chunks of at least `CHUNK_CHARS` characters; where chunks end depends on the text
    alone.

    Args:
        pieces: each with whether it is held out for validation.
    """
    texts, ended, num_chars, num_bytes = ([], []), [0, 0], 0, 0
    for piece, is_held_out in pieces:
        texts[is_held_out].append(piece.text)
        ended[is_held_out] += piece.last
        num_chars += len(piece.text)
        num_bytes += len(piece.text.encode()) + 1
        if num_chars >= CHUNK_CHARS:
            yield Chunk(texts, tuple(ended), num_bytes)
            texts, ended, num_chars, num_bytes = ([], []), [0, 0], 0, 0
    if num_chars:
        yield Chunk(texts, tuple(ended), num_bytes)


_job: ChunkJob
_tokenizer: Tokenizer
_memory: WordMemory[tuple[int, ...]] | None


def start_job(job: ChunkJob) -> None:
    """Get this process ready for `make_samples`."""
    global _job, _tokenizer, _memory
    # The processes share the cores already; threads in each of them would only get in each other's way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _job = job
    _tokenizer = Tokenizer.from_str(job.tokenizer_json)
    _tokenizer.encode_special_tokens = True
    _memory = remember_words(_encode_anew, _join) if splits_into_words(job.tokenizer_json) else None


def make_samples(chunk: Chunk) -> ChunkResult:
    """Tokenize, cut and frame a chunk."""
    parts = [_make_part(texts, ended) for texts, ended in zip(chunk.texts, chunk.num_documents, strict=True)]
    samples, counts = zip(*parts, strict=True)
    return ChunkResult(samples, counts, chunk.num_bytes)


def _make_part(texts: list[str], num_documents: int) -> tuple[Samples, Counts]:
    groups = group_text(texts, _job.unit)
    token_ids, part_lengths = _encode(groups.parts)
    room = _job.max_length - _job.frame.size
    bounds, num_split = cut_samples(
        part_lengths, groups.group_ends, room, _job.continues_word[token_ids], fill=_job.unit == "pack"
    )
    samples = frame_samples(token_ids, bounds, _job.frame)
    counts = Counts(
        documents=num_documents,
        paragraphs=groups.num_paragraphs,
        sentences=groups.num_sentences,
        samples=len(samples.lengths),
        tokens=len(samples.ids),
        unknown_tokens=0 if _job.unk_id is None else int((samples.ids == _job.unk_id).sum()),
        split_units=num_split,
        unmaskable_samples=len(bounds) - 1 - len(samples.lengths),
        empty_texts=int((part_lengths == 0).sum()),
    )
    return samples, counts


def _encode(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of all texts in a row, int32 (T,), and how many each has, int64 (P,)."""
    all_ids = array("i")
    stops = [0]
    for batch in _batches(texts):
        if _memory is None:
            id_lists = _encode_anew(batch)
        else:
            id_lists = [chain.from_iterable(words) for words in _memory.look_up(batch)]
        for ids in id_lists:
            all_ids.extend(ids)
            stops.append(len(all_ids))
    return np.array(all_ids, np.int32), np.diff(np.array(stops, np.int64))


def _encode_anew(texts: list[str]) -> list[tuple[int, ...]]:
    return [tuple(encoding.ids) for encoding in _tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def _join(ids_of_pieces: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(chain.from_iterable(ids_of_pieces))


def _batches(texts: list[str]) -> Iterator[list[str]]:
    start = num_chars = 0
    for index, text in enumerate(texts):
        num_chars += len(text)
        if num_chars >= _BATCH_CHARS:
            yield texts[start : index + 1]
            start, num_chars = index + 1, 0
    if start < len(texts):
        yield texts[start:]
