"""Opening prepared data: fast, in any process, and never a wrong answer from a damaged folder."""

import json
import pickle
import shutil
import time

import numpy as np
import pytest
from torch.utils.data import DataLoader

from ds_bert.data import PreparedData
from ds_bert.data.prepared import PreparedSplit
from ds_bert.errors import UserError
from tests.data.conftest import make_corpus


@pytest.fixture
def data(make_prepared):
    return make_prepared(make_corpus(60), max_length=32)


def as_list(batch):
    return [sample.tolist() for sample in batch]


def test_samples_are_read_only_views_of_the_file(data):
    sample = data.train[0]
    assert sample.dtype == np.int32
    assert not sample.flags.owndata
    assert not sample.flags.writeable
    assert isinstance(data.train.lengths, np.memmap)
    assert data.train.lengths.dtype == data.train.maskable.dtype == np.int32
    assert [len(data.train[i]) for i in range(len(data.train))] == data.train.lengths.tolist()


def test_indices_are_those_of_a_list(data):
    assert (data.train[-1] == data.train[len(data.train) - 1]).all()
    assert (data.train[np.int64(2)] == data.train[2]).all()
    for index in (len(data.train), -len(data.train) - 1):
        with pytest.raises(IndexError, match=f"sample {index} of {len(data.train)}"):
            data.train[index]


def test_many_record_batches_and_files_are_one_row_of_samples(make_prepared, monkeypatch):
    monkeypatch.setattr("ds_bert.data.preparing.chunks.CHUNK_CHARS", 1000)
    monkeypatch.setattr("ds_bert.data.preparing.storage.SHARD_BYTES", 5000)
    data = make_prepared(make_corpus(60), max_length=32)
    monkeypatch.undo()
    plain = make_prepared(make_corpus(60), max_length=32)
    assert len(data.train._batches) > 10
    assert len(list((data.path / "train").glob("*.arrow"))) > 3
    assert as_list(data.train) == as_list(plain.train)


def test_a_sample_takes_microseconds(data):
    order = np.random.default_rng(0).permutation(len(data.train)).tolist() * 20
    start = time.perf_counter()
    for index in order:
        data.train[index]
    assert (time.perf_counter() - start) / len(order) < 50e-6


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_loader_workers_read_the_same(data, method):
    loader = DataLoader(data.train, batch_size=7, num_workers=2, collate_fn=as_list, multiprocessing_context=method)
    assert [sample for batch in loader for sample in batch] == as_list(data.train)


def test_pickling_sends_the_path_only(data):
    pickled = pickle.dumps(data.train)
    assert len(pickled) < 500
    assert as_list(pickle.loads(pickled)) == as_list(data.train)


def test_no_validation_part_is_none(make_prepared):
    assert make_prepared(make_corpus(3), validation_fraction=0).validation is None


def test_the_tokenizer_hash_is_that_of_the_tokenizer(make_prepared):
    first, second = make_prepared(make_corpus(10)), make_prepared(make_corpus(11, seed=1))
    assert first.tokenizer_hash == second.tokenizer_hash == first.manifest["tokenizer_hash"]
    assert make_prepared(make_corpus(10), tokenizer=None, vocab_size=100).tokenizer_hash != first.tokenizer_hash


def test_what_is_no_prepared_data_says_how_to_make_it(tmp_path):
    with pytest.raises(UserError, match=r"nothing: no such folder; make prepared data with: ds-bert prepare --input"):
        PreparedData(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="file: is not a folder"):
        PreparedData(tmp_path / "file")
    with pytest.raises(UserError, match=r"is not prepared data \(no manifest\.json\); make it with: ds-bert prepare"):
        PreparedData(tmp_path)


def cut(path, share=0.5):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_array(path, array):
    np.save(path, array)


ARROW = "train/data-00000-of-00001.arrow"
DAMAGES = {
    "newer format": (
        lambda p: edit(p / "manifest.json", format_version=99),
        "format version 99, but this ds_bert reads",
    ),
    "broken manifest": (lambda p: cut(p / "manifest.json"), r"manifest\.json: not a manifest"),
    "foreign manifest": (lambda p: (p / "manifest.json").write_text("{}"), r"manifest\.json: not a manifest"),
    "no array": (lambda p: (p / "train/lengths.npy").unlink(), r"train/lengths\.npy: missing"),
    "cut array": (lambda p: cut(p / "validation/maskable.npy"), r"validation/maskable\.npy: cut short"),
    "empty array": (lambda p: (p / "train/lengths.npy").write_bytes(b""), r"train/lengths\.npy: cut short"),
    "wrong type": (
        lambda p: write_array(p / "train/lengths.npy", np.zeros(3)),
        r"lengths\.npy: a 1-dimensional array of float64",
    ),
    "wrong rows": (
        lambda p: write_array(p / "train/maskable.npy", np.zeros(3, np.int32)),
        r"train/maskable\.npy: 3 rows, but the Arrow files have \d+",
    ),
    "swapped arrays": (
        lambda p: shutil.copy(p / "train/maskable.npy", p / "train/lengths.npy"),
        r"lengths\.npy: its sum is not the",
    ),
    "no state": (lambda p: (p / "train/state.json").unlink(), r"state\.json: missing"),
    "broken state": (lambda p: (p / "train/state.json").write_text("[]"), r"state\.json: not the state"),
    "no arrow": (lambda p: (p / ARROW).unlink(), r"data-00000-of-00001\.arrow: missing"),
    "cut arrow": (lambda p: cut(p / ARROW), r"data-00000-of-00001\.arrow: cut short|rows, but the Arrow files"),
    "no part": (lambda p: shutil.rmtree(p / "validation"), r"validation/lengths\.npy: missing"),
    "other part": (
        lambda p: (shutil.rmtree(p / "validation"), shutil.copytree(p / "train", p / "validation")),
        r"validation: \d+ samples, but manifest\.json says \d+",
    ),
    "no tokenizer": (lambda p: shutil.rmtree(p / "tokenizer"), r"tokenizer\.json: cannot be read"),
    "other tokenizer": (
        lambda p: (p / "tokenizer/tokenizer.json").write_text("{}"),
        "its hash .* is not the manifest's",
    ),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_named_with_its_file(data, damage, words):
    damage(data.path)
    with pytest.raises(UserError, match=words) as error:
        PreparedData(data.path)
    assert str(data.path) in str(error.value)


def test_a_part_opens_alone(data):
    assert as_list(PreparedSplit(data.path / "train")) == as_list(data.train)
