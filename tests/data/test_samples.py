"""Cutting text into samples: nothing lost, nothing too long, nothing across a group."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_bert.data.preparing.samples import (
    MAX_WORD_TOKENS,
    SAMPLE_UNITS,
    Frame,
    cut_samples,
    frame_samples,
    group_text,
    split_sentences,
)

PARAGRAPHS = st.lists(st.text(st.sampled_from("ab .!?。”) ="), min_size=1).filter(str.strip), min_size=1, max_size=6)


@given(st.text())
def test_sentences_join_to_the_paragraph(paragraph):
    sentences = split_sentences(paragraph)
    assert "".join(sentences) == paragraph
    assert not any(sentence.isspace() for sentence in sentences) or paragraph.isspace()


@pytest.mark.parametrize(
    ("paragraph", "sentences"),
    [
        ("One. Two!  Three", ["One.", " Two!", "  Three"]),
        ('He said "No." Then left.', ['He said "No."', " Then left."]),
        ("Version 3.14 is out... now", ["Version 3.14 is out...", " now"]),
        ("你好。再见！好", ["你好。", "再见！", "好"]),
        ("क है। ख", ["क है।", " ख"]),
        ("one word", ["one word"]),
        ("Ends. ", ["Ends. "]),
    ],
)
def test_sentence_ends(paragraph, sentences):
    assert split_sentences(paragraph) == sentences


@pytest.mark.parametrize("unit", SAMPLE_UNITS)
@given(st.lists(PARAGRAPHS, min_size=1, max_size=4))
def test_no_unit_loses_or_moves_a_word(unit, documents):
    groups = group_text(["\n".join(paragraphs) for paragraphs in documents], unit)
    letters = "".join("".join(groups.parts).split())
    assert letters == "".join("".join(paragraph for paragraphs in documents for paragraph in paragraphs).split())
    assert groups.group_ends[-1] == len(groups.parts)
    assert groups.group_ends == sorted(groups.group_ends)
    assert groups.num_paragraphs == sum(map(len, documents))
    if unit in ("pack", "document"):
        assert len(groups.group_ends) == len(documents)


def test_section_headings_go_with_the_next_paragraph_and_titles_stand_alone():
    groups = group_text([" = T = \n = = S = = \n = = = SS = = = \nbody\nmore\n = = End = = "], "paragraph")
    joined = ["".join(groups.parts[a:b]) for a, b in itertools.pairwise([0, *groups.group_ends])]
    assert joined == [" = T = ", " = = S = =   = = = SS = = =  body", "more", " = = End = =  "]


@st.composite
def token_rows(draw):
    part_lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=30))
    ends = sorted(draw(st.sets(st.integers(1, len(part_lengths)), max_size=10)) | {len(part_lengths)})
    num_tokens = sum(part_lengths)
    continues = draw(st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens))
    return np.array(part_lengths), ends, np.array(continues, bool)


@given(token_rows(), st.integers(1, 50), st.booleans())
def test_samples_tile_the_tokens_within_room_and_group(row, room, fill):
    part_lengths, group_ends, continues = row
    bounds, num_split = cut_samples(part_lengths, group_ends, room, continues, fill)
    stops = np.concatenate([[0], np.cumsum(part_lengths)])
    sizes = np.diff(bounds)
    assert bounds[0] == 0
    assert bounds[-1] == stops[-1]
    assert (sizes > 0).all()
    assert (sizes <= room).all()
    group_stops = stops[group_ends]
    assert set(group_stops.tolist()) <= set(bounds.tolist())
    assert num_split == (np.diff(group_stops, prepend=0) > room).sum()


@given(token_rows(), st.integers(1, 50))
def test_a_filled_sample_stops_short_only_for_a_word_or_a_group(row, room):
    part_lengths, group_ends, continues = row
    bounds, _ = cut_samples(part_lengths, group_ends, room, continues, fill=True)
    group_stops = set(np.cumsum(part_lengths)[np.array(group_ends) - 1].tolist())
    for start, stop in itertools.pairwise(bounds.tolist()):
        if stop - start < room and stop not in group_stops:
            assert stop - start > room - MAX_WORD_TOKENS
            assert not continues[stop]
            assert continues[stop + 1 : start + room + 1].all()


def test_parts_stay_whole_where_they_fit():
    no_marks = np.zeros(30, bool)
    bounds, num_split = cut_samples(np.array([4, 4, 4, 10, 8]), [3, 5], 9, no_marks, fill=False)
    assert bounds.tolist() == [0, 8, 12, 21, 30]
    assert num_split == 2


def make_frame(prefix=(2,), suffix=(3,), special=(0, 1, 2, 3, 4)):
    table = np.zeros(max(special) + 2, bool)
    table[list(special)] = True
    return Frame(tuple(prefix), tuple(suffix), table)


@given(
    st.lists(st.lists(st.sampled_from([1, 5, 6, 7]), min_size=1, max_size=9), max_size=8),
    st.sampled_from([((2,), (3,)), ((), ()), ((2, 3), (4,)), ((), (3, 3))]),
)
def test_frames_go_around_each_sample_and_unmaskable_ones_are_not_made(bodies, ends):
    prefix, suffix = ends
    ids = np.array([token for body in bodies for token in body], np.int32)
    bounds = np.cumsum([0, *map(len, bodies)])
    samples = frame_samples(ids, bounds, make_frame(prefix, suffix))
    expected = [[*prefix, *body, *suffix] for body in bodies if any(token != 1 for token in body)]
    assert samples.ids.dtype == samples.lengths.dtype == samples.maskable.dtype == np.int32
    assert samples.ids.tolist() == [token for sample in expected for token in sample]
    assert samples.lengths.tolist() == list(map(len, expected))
    assert samples.maskable.tolist() == [sum(token > 4 for token in sample) for sample in expected]
