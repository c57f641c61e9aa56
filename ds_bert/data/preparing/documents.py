"""Input files -> documents, read as a stream: memory does not grow with a file, a document or a line.

A file with `= Title =` headings (WikiText, level 1) is one document per heading; any other file has a
document between each two blank lines. A line is a paragraph. Only a line feed ends a line (CRLF is
tolerated): U+2028, U+0085 and their like are text.

Another input format belongs here as one more function that yields `Piece`s.
"""

import codecs
import os
import re
import shlex
import stat
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ds_bert.errors import UserError

PIECE_CHARS = 1 << 20
"""A document longer than this many characters is handed on in pieces of about this size."""

_BLOCK_BYTES = 1 << 20
_TITLE = re.compile(r"[ \t]*= (?![=\s])[^\n]* =[ \t]*")
_TITLE_LINE_BYTES = re.compile(rb"\n[ \t]*= (?![=\s])[^\n]* =[ \t]*\r?(?=\n)")
_FORMAT_MARKS = (
    (codecs.BOM_UTF16_LE, "UTF-16", "iconv -f UTF-16 -t UTF-8", ".utf8"),
    (codecs.BOM_UTF16_BE, "UTF-16", "iconv -f UTF-16 -t UTF-8", ".utf8"),
    (b"\x1f\x8b", "gzip", "gzip -dc", ".txt"),
    (b"\xfd7zXZ", "xz", "xz -dc", ".txt"),
    (b"BZh", "bzip2", "bzip2 -dc", ".txt"),
    (b"\x28\xb5\x2f\xfd", "zstd", "zstd -dc", ".txt"),
)


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    document: int
    """Number of the document over all inputs, from 0."""
    text: str
    """Its non-blank lines (paragraphs), joined by line feeds."""
    first: bool
    """Whether the document starts here."""
    last: bool
    """Whether the document ends here."""


def check_inputs(paths: Sequence[str | os.PathLike]) -> int:
    """Check that every input can be read, before any work is done.

    Returns:
        The size of all inputs together, in bytes.

    Raises:
        UserError: a path does not exist, is a folder or no regular file, or cannot be opened.
    """
    total_bytes = 0
    for path in paths:
        try:
            status = os.stat(path)
            if stat.S_ISDIR(status.st_mode):
                raise UserError(f"--input {path}: is a folder; give the text files in it (for example {path}/*.txt)")
            if not stat.S_ISREG(status.st_mode):
                raise UserError(
                    f"--input {path}: is not a regular file; inputs are read more than once, so save it to a file first"
                )
            with open(path, "rb"):
                pass
        except FileNotFoundError:
            raise UserError(f"--input {path}: no such file; check the path") from None
        except OSError as error:
            raise UserError(f"--input {path}: cannot be read ({error.strerror}); check its permissions") from None
        total_bytes += status.st_size
    return total_bytes


def read_documents(paths: Sequence[str | os.PathLike]) -> Iterator[Piece]:
    """Stream the documents of plain-text files, in the order of `paths`.

    Args:
        paths: UTF-8 text files; a byte order mark is dropped.

    Returns:
        The documents as pieces of at most about `PIECE_CHARS` characters. Where a document is cut depends on
        the files alone. A document without any text is none.

    Raises:
        UserError: a file cannot be read or is not UTF-8.
    """
    document = 0
    for path in paths:
        by_title = has_titles(path)
        lines: list[str] = []
        num_chars = 0
        first = True
        for line in read_lines(path):
            blank = not line or line.isspace()
            if (is_title(line) if by_title else blank) and lines:
                yield Piece(document, "\n".join(lines), first, True)
                document += 1
                lines, num_chars, first = [], 0, True
            if blank:
                continue
            if num_chars >= PIECE_CHARS:
                yield Piece(document, "\n".join(lines), first, False)
                lines, num_chars, first = [], 0, False
            lines.append(line)
            num_chars += len(line) + 1
        if lines:
            yield Piece(document, "\n".join(lines), first, True)
            document += 1


def is_title(line: str) -> bool:
    """Whether a line is a level-1 heading: `= Title =`, but not `= = Section = =`."""
    return "= " in line[:16] and _TITLE.fullmatch(line) is not None


def has_titles(path: str | os.PathLike) -> bool:
    """Whether a file has level-1 headings, so that they, and not blank lines, part its documents."""
    tail = b""
    for block in _read_blocks(path):
        text = tail + block if tail else b"\n" + block.removeprefix(codecs.BOM_UTF8)
        if _TITLE_LINE_BYTES.search(text):
            return True
        tail = text[text.rfind(b"\n") :]
        if len(tail) > _BLOCK_BYTES:  # no heading is that long: all to remember is that a line goes on
            tail = b"\n-"
    return _TITLE_LINE_BYTES.search(tail + b"\n") is not None


def read_lines(path: str | os.PathLike) -> Iterator[str]:
    """Stream the lines of a UTF-8 file without their ends.

    A line longer than `PIECE_CHARS` characters comes in parts, cut after a blank where there is one.

    Raises:
        UserError: the file cannot be read, or holds bytes that are not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    line_number, num_bytes = 1, 0
    rest = ""
    blocks = _read_blocks(path)
    while True:
        block = next(blocks, b"")
        if num_bytes == 0:
            num_bytes = len(codecs.BOM_UTF8) if block.startswith(codecs.BOM_UTF8) else 0
            block = block[num_bytes:]
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            line_number += error.object[: error.start].count(b"\n")
            raise _not_utf8(path, line_number, num_bytes - pending + error.start) from None
        if not block:
            break
        num_bytes += len(block)
        line_number += block.count(b"\n")
        lines = (rest + text).split("\n")
        rest = lines.pop()
        for line in lines:
            yield line.removesuffix("\r")
        while len(rest) > PIECE_CHARS:
            end = rest.rfind(" ", PIECE_CHARS // 2, PIECE_CHARS) + 1 or PIECE_CHARS
            yield rest[:end]
            rest = rest[end:]
    if rest:
        yield rest.removesuffix("\r")


def _read_blocks(path: str | os.PathLike) -> Iterator[bytes]:
    try:
        with open(path, "rb", buffering=0) as file:
            while block := file.read(_BLOCK_BYTES):
                yield block
    except OSError as error:
        raise UserError(f"--input {path}: cannot be read ({error.strerror}); check the file and its disk") from None


def _not_utf8(path: str | os.PathLike, line_number: int, byte_offset: int) -> UserError:
    start = next(_read_blocks(path), b"")
    found, command, ending = "bytes that are not UTF-8", "iconv -f ISO-8859-1 -t UTF-8", ".utf8"
    for mark, name, convert, new_ending in _FORMAT_MARKS:
        if start.startswith(mark):
            found, command, ending = f"{name}, not UTF-8 text", convert, new_ending
    source, target = shlex.quote(str(path)), shlex.quote(str(path) + ending)
    return UserError(
        f"--input {path}: {found} (line {line_number}, byte {byte_offset}); convert the file first, for "
        f"example: {command} {source} > {target}"
    )
