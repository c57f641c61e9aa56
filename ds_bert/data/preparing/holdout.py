"""Which documents are held out for validation: a pure function of seed and text.

A document is held out when its 64-bit hash is below a cutoff. The same text always lands on the same side, so
a document that occurs twice cannot be in both parts.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ds_bert.data.preparing.documents import Piece
from ds_bert.errors import UserError

_HASH_RANGE = 1 << 64


@dataclass
class Holdout:
    """What one reading of all documents says about them.

    Attributes:
        seed: of the hash.
        cutoff: documents with a hash below it are held out.
        num_documents: in all inputs.
        num_bytes: of their text, in UTF-8.
        corpus_hash: hexadecimal hash of all texts in order; it does not depend on the seed.
        long_documents: hash by document number, for documents that come in several pieces. Their hash is
            known only after their end; about a million characters each, so there are few.
    """

    seed: int
    cutoff: int = 0
    num_documents: int = 0
    num_bytes: int = 0
    corpus_hash: str = ""
    long_documents: dict[int, int] = field(default_factory=dict)

    def is_held_out(self, piece: Piece) -> bool:
        """Whether the piece's document belongs to the validation part."""
        if self.cutoff == 0:
            return False
        if piece.first and piece.last:
            return document_hash(piece.text, self.seed) < self.cutoff
        return self.long_documents[piece.document] < self.cutoff


def document_hash(text: str, seed: int) -> int:
    """Hash of a document's text, 0 <= hash < 2**64, the same on every machine."""
    return int.from_bytes(_start_hash(seed, text.encode()).digest(), "big")


def survey(pieces: Iterable[Piece], fraction: float, seed: int) -> Holdout:
    """Read all documents once and choose the cutoff.

    Args:
        pieces: all documents.
        fraction: share of the documents to hold out, 0 <= fraction < 1.
        seed: another seed holds out other documents.

    Returns:
        The choice. About `fraction` of the documents are held out, at least one (the one with the smallest
        hash) and never all (the one with the largest hash stays for training), unless `fraction` is 0.

    Raises:
        UserError: there is no text, or only one document (or copies of one) while some are to be held out.
    """
    holdout = Holdout(seed)
    corpus = hashlib.blake2b(digest_size=16)
    smallest, largest = _HASH_RANGE, -1
    hasher = None
    for piece in pieces:
        data = piece.text.encode()
        holdout.num_bytes += len(data)
        corpus.update(data)
        corpus.update(b"\0" if piece.last else b"\n")
        if piece.first:
            hasher = _start_hash(seed, data)
        else:
            hasher.update(b"\n" + data)
        if piece.last:
            value = int.from_bytes(hasher.digest(), "big")
            smallest, largest = min(smallest, value), max(largest, value)
            holdout.num_documents += 1
            if not piece.first:
                holdout.long_documents[piece.document] = value
    holdout.corpus_hash = corpus.hexdigest()
    if holdout.num_documents == 0:
        raise UserError("--input: there is no text in the input (nothing but blank lines); give files with text")
    if fraction > 0:
        if smallest == largest:
            copies = f"{holdout.num_documents} copies of one document"
            found = "only one document" if holdout.num_documents == 1 else copies
            raise UserError(
                f"--input: {found}, so none can be held out for validation; part the text into documents "
                "with blank lines (or `= Title =` headings), give more files, or use --validation-fraction 0"
            )
        holdout.cutoff = min(max(int(fraction * _HASH_RANGE), smallest + 1), largest)
    return holdout


def split_documents(pieces: Iterable[Piece], holdout: Holdout) -> Iterator[tuple[Piece, bool]]:
    """Each piece with whether it is held out.

    Raises:
        UserError: these are not the documents that were surveyed.
    """
    num_bytes = 0
    for piece in pieces:
        if not (piece.first and piece.last) and piece.document not in holdout.long_documents:
            raise _changed()
        yield piece, holdout.is_held_out(piece)
        num_bytes += len(piece.text.encode())
    if num_bytes != holdout.num_bytes:
        raise _changed()


def _changed() -> UserError:
    return UserError("--input: a file changed while it was being read; run again when nothing writes to it")


def _start_hash(seed: int, data: bytes) -> "hashlib.blake2b":
    hasher = hashlib.blake2b(b"%d\n" % seed, digest_size=8)
    hasher.update(data)
    return hasher
