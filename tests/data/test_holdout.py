"""The validation part: stable, never empty, never all, never in both parts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_bert.data.preparing.documents import Piece
from ds_bert.data.preparing.holdout import document_hash, split_documents, survey
from ds_bert.errors import UserError

TEXTS = st.lists(st.text(min_size=1, max_size=20), min_size=2, max_size=30, unique=True)


def pieces(texts):
    return [Piece(number, text, True, True) for number, text in enumerate(texts)]


def held_out(texts, fraction, seed=0):
    holdout = survey(pieces(texts), fraction, seed)
    return {piece.text for piece, is_held_out in split_documents(pieces(texts), holdout) if is_held_out}


@given(TEXTS, st.floats(0.001, 0.999), st.integers(0, 5))
def test_both_parts_have_documents_and_the_order_does_not_matter(texts, fraction, seed):
    chosen = held_out(texts, fraction, seed)
    assert 0 < len(chosen) < len(texts)
    assert held_out(texts[::-1], fraction, seed) == chosen


def test_hash_and_choice_never_change():
    assert document_hash("some text", 0) == 2584457382606123400
    assert held_out([f"document {i}" for i in range(20)], 0.2) == {
        "document 11",
        "document 12",
        "document 13",
        "document 14",
        "document 2",
        "document 3",
    }


def test_the_share_is_about_the_fraction_and_depends_on_the_seed():
    texts = [f"document {i}" for i in range(2000)]
    assert 150 < len(held_out(texts, 0.1)) < 250
    assert held_out(texts, 0.1, seed=0) != held_out(texts, 0.1, seed=1)


def test_more_documents_do_not_move_the_others():
    few, many = [f"document {i}" for i in range(500)], [f"document {i}" for i in range(1000)]
    assert held_out(many, 0.1) & set(few) == held_out(few, 0.1)


def test_where_the_hash_picks_none_the_smallest_is_held_out_and_where_all_the_largest_stays():
    texts = ["a", "b", "c"]
    by_hash = sorted(texts, key=lambda text: document_hash(text, 0))
    assert held_out(texts, 1e-9) == {by_hash[0]}
    assert held_out(texts, 1 - 1e-9) == set(by_hash[:2])


def test_a_document_in_pieces_has_the_hash_of_its_text():
    whole = [Piece(0, "a\nb", True, True), Piece(1, "c", True, True)]
    cut = [Piece(0, "a", True, False), Piece(0, "b", False, True), Piece(1, "c", True, True)]
    for fraction in (0.001, 0.999):
        parts = [list(split_documents(source, survey(source, fraction, 0))) for source in (whole, cut)]
        assert parts[1][0][1] == parts[1][1][1] == parts[0][0][1]
    assert survey(whole, 0, 0).corpus_hash == survey(cut, 0, 0).corpus_hash


def test_fraction_zero_holds_out_nothing_and_takes_one_document():
    assert held_out(["only"], 0) == set()


def test_single_documents_and_copies_are_refused():
    with pytest.raises(UserError, match=r"only one document.*blank lines.*more files.*--validation-fraction 0"):
        survey(pieces(["only"]), 0.05, 0)
    with pytest.raises(UserError, match="3 copies of one document"):
        survey(pieces(["same"] * 3), 0.05, 0)
    with pytest.raises(UserError, match="there is no text in the input"):
        survey([], 0.05, 0)


def test_a_changed_input_is_noticed():
    holdout = survey(pieces(["a", "b", "c"]), 0.5, 0)
    with pytest.raises(UserError, match="a file changed while it was being read"):
        list(split_documents(pieces(["a", "b"]), holdout))
