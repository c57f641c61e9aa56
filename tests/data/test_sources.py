"""Reading: documents, paragraphs and lines, and what is no text."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_bert.data.preparing import documents
from ds_bert.data.preparing.documents import check_inputs, is_title, read_documents, read_lines
from ds_bert.errors import UserError


def write(path, content):
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def texts(path):
    return [piece.text for piece in read_documents([path])]


def test_blank_lines_part_documents(tmp_path):
    path = write(tmp_path / "a.txt", "\n\none\ntwo\n\n \t \nthree\n")
    assert texts(path) == ["one\ntwo", "three"]


def test_titles_alone_part_documents_and_stay_text(tmp_path):
    text = " \n = First = \n \n a \n\n = = Section = = \n b\n= Second =\nc"
    assert texts(write(tmp_path / "a.txt", text)) == [" = First = \n a \n = = Section = = \n b", "= Second =\nc"]


def test_a_title_beyond_the_first_block_is_seen(tmp_path):
    filler = "word\n\n" * (documents._BLOCK_BYTES // 5)
    path = write(tmp_path / "a.txt", filler + "= Late =\nx\n\ny")
    assert texts(path)[-1] == "= Late =\nx\ny"


@pytest.mark.parametrize(
    ("line", "expected"),
    [("= A =", True), (" = A b = ", True), ("= = A = =", False), ("= A", False), ("== A ==", False), ("=  =", False)],
)
def test_level_one_headings(line, expected):
    assert is_title(line) is expected


def test_only_line_feeds_end_lines(tmp_path):
    path = write(tmp_path / "a.txt", "\ufeffa\u2028b\u0085c\x0bd\r\ne\rf\r\n")
    assert list(read_lines(path)) == ["a\u2028b\u0085c\x0bd", "e\rf"]


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=200))
def test_lines_are_those_of_split(tmp_path_factory, text):
    path = write(tmp_path_factory.getbasetemp() / "lines.txt", text)
    expected = text.removeprefix("\ufeff").split("\n")
    if not expected[-1]:
        expected.pop()
    assert list(read_lines(path)) == [line.removesuffix("\r") for line in expected]


def test_characters_across_blocks_survive(tmp_path):
    text = "x" + "é中" * documents._BLOCK_BYTES
    assert "".join(read_lines(write(tmp_path / "a.txt", text))) == text


@pytest.mark.parametrize("separator", [" ", "\n"], ids=["one giant line", "many lines"])
def test_a_giant_document_comes_in_bounded_pieces_without_loss(tmp_path, separator):
    words = [f"w{i}" for i in range(600_000)]
    pieces = list(read_documents([write(tmp_path / "a.txt", separator.join(words))]))
    assert len(pieces) > 2
    assert max(len(piece.text) for piece in pieces) <= 2 * documents.PIECE_CHARS
    assert {piece.document for piece in pieces} == {0}
    assert [piece.first for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert " ".join(piece.text for piece in pieces).split() == words


def test_bytes_that_are_not_utf8_are_located(tmp_path):
    path = write(tmp_path / "latin.txt", b"good\nalso good\nM\xfcnchen\n")
    with pytest.raises(
        UserError, match=r"latin\.txt: bytes that are not UTF-8 \(line 3, byte 16\).*iconv -f ISO-8859-1"
    ):
        list(read_lines(path))


def test_bytes_that_are_not_utf8_are_located_in_a_later_block(tmp_path):
    good = b"line\n" * documents._BLOCK_BYTES
    path = write(tmp_path / "latin.txt", good + b"abc\xff")
    message = rf"\(line {documents._BLOCK_BYTES + 1}, byte {len(good) + 3}\)"
    with pytest.raises(UserError, match=message):
        list(read_lines(path))


def test_a_character_cut_off_at_the_end_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"\(line 1, byte 3\)"):
        list(read_lines(write(tmp_path / "a.txt", "abcé".encode()[:-1])))


@pytest.mark.parametrize(
    ("content", "words"),
    [("text".encode("utf-16"), "UTF-16, not UTF-8 text.*iconv -f UTF-16"), (b"\x1f\x8b\x08\x00", "gzip.*gzip -dc")],
)
def test_other_formats_are_named(tmp_path, content, words):
    with pytest.raises(UserError, match=words):
        list(read_lines(write(tmp_path / "it's.txt", content)))


def test_inputs_are_checked_before_work(tmp_path):
    assert check_inputs([write(tmp_path / "a.txt", "abc")]) == 3
    with pytest.raises(UserError, match=r"--input .*missing\.txt: no such file"):
        check_inputs([tmp_path / "missing.txt"])
    with pytest.raises(UserError, match=r"is a folder; give the text files in it"):
        check_inputs([tmp_path])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="is not a regular file"):
        check_inputs([tmp_path / "pipe"])


def test_an_unreadable_file_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "a.txt", "abc")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(UserError, match=r"a\.txt: cannot be read \(Permission denied\); check its permissions"):
        check_inputs([path])
