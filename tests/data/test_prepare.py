"""`ds-bert prepare` from text to folder: what is in it, that it is always the same, and that it is all or nothing."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import datasets
import numpy as np
import pytest

from ds_bert.cli.main import main
from ds_bert.data.prepared import PreparedData
from ds_bert.data.preparing import prepare as prepare_module
from ds_bert.data.preparing.chunks import CHUNK_CHARS
from ds_bert.data.preparing.prepare import PrepareSettings, prepare
from ds_bert.data.preparing.samples import SAMPLE_UNITS
from ds_bert.errors import UserError
from tests.data.conftest import make_corpus


def run(*arguments, **options):
    command = [sys.executable, "-m", "ds_bert.cli.main", "prepare", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def big_file(tmp_path_factory):
    """Several chunks of text, so that workers have something to part."""
    path = tmp_path_factory.mktemp("big") / "big.txt"
    path.write_text("\n\n".join(f"number {i}\n" + make_corpus(40, i).replace("\n\n", "\n") for i in range(150)))
    assert path.stat().st_size > 2.5 * CHUNK_CHARS
    return path


def test_the_same_bytes_for_any_number_of_workers_and_any_hash_seed(tmp_path, big_file):
    results = []
    for workers, hash_seed in ((1, "1"), (3, "2")):
        output = tmp_path / f"of{workers}"
        arguments = ("--input", big_file, "--output", output, "--vocab-size", 500, "--num-workers", workers)
        result = run(*arguments, env=os.environ | {"PYTHONHASHSEED": hash_seed})
        assert result.returncode == 0, result.stderr
        results.append(all_bytes(output))
    assert results[0].keys() == results[1].keys()
    different = [name for name in results[0] if results[0][name] != results[1][name]]
    assert different == []
    assert {"manifest.json", "tokenizer/tokenizer.json", "train/lengths.npy", "validation/state.json"} <= set(
        results[0]
    )
    for content in results[0].values():
        assert str(tmp_path).encode() not in content
        assert os.uname().nodename.encode() not in content


@pytest.mark.parametrize("unit", SAMPLE_UNITS)
@pytest.mark.parametrize("tokenizer", ["bert_folder", "roberta_folder"])
def test_every_word_is_in_one_sample_in_order(make_prepared, unit, tokenizer, request):
    text = make_corpus(25)
    data = make_prepared(
        text, sample_unit=unit, max_length=24, validation_fraction=0.0, tokenizer=request.getfixturevalue(tokenizer)
    )
    loaded = data.load_tokenizer()
    ids = np.concatenate([data.train[i][1:-1] for i in range(len(data.train))])
    expected = loaded(" ".join(text.split()), add_special_tokens=False).input_ids
    # Byte-level tokens at the start of a paragraph or sentence differ by their blank, not by their letters.
    letters = lambda ids: loaded.decode(ids).replace(" ", "")  # noqa: E731
    assert letters(ids) == letters(expected)
    assert all(
        list(data.train[i][[0, -1]]) == [loaded.cls_token_id, loaded.sep_token_id] for i in range(len(data.train))
    )
    assert 5 < data.train.lengths.max() <= 24
    assert data.validation is None


def test_samples_never_cross_documents(make_prepared):
    names = [f"name{chr(97 + i)}{chr(97 + j)}" for i in range(6) for j in range(6)]
    text = "\n\n".join(" ".join([name] * 30) for name in names)
    data = make_prepared(text, max_length=40, tokenizer=None, vocab_size=300)
    tokenizer = data.load_tokenizer()
    for split in (data.train, data.validation):
        for i in range(len(split)):
            assert len(set(tokenizer.decode(split[i], skip_special_tokens=True).split())) == 1


def test_units_differ_as_documented(make_prepared):
    text = "One two three. Four five.\nSix seven.\n\n" * 3 + "Eight."
    counts = {
        unit: make_prepared(text, sample_unit=unit, validation_fraction=0).manifest["parts"]["train"]
        for unit in SAMPLE_UNITS
    }
    assert {unit: part["samples"] for unit, part in counts.items()} == {
        "pack": 4,
        "document": 4,
        "paragraph": 7,
        "sentence": 10,
    }
    assert {unit: part["sentences"] for unit, part in counts.items()} == {
        "pack": None,
        "document": 10,
        "paragraph": 10,
        "sentence": 10,
    }
    assert all(part["documents"] == 4 and part["paragraphs"] == 7 for part in counts.values())


def test_all_that_is_not_made_is_counted_and_told(tmp_path, bert_folder):
    path = tmp_path / "text.txt"
    path.write_text("the of and\n\n☃ ☃\n\n\x01\x02\n\n" + "the " * 50)
    lines = []
    settings = PrepareSettings(tokenizer=bert_folder, max_length=20, validation_fraction=0, sample_unit="paragraph")
    manifest = prepare([path], tmp_path / "out", settings, report=lines.append, show_progress=False)
    counts = manifest["parts"]["train"]
    assert counts["samples"] == 4
    assert (counts["documents"], counts["paragraphs"]) == (4, 4)
    assert (counts["split_units"], counts["unmaskable_samples"], counts["empty_texts"]) == (1, 1, 1)
    assert counts["unknown_tokens"] == 0
    told = "\n".join(lines)
    for words in (
        "4 documents, 4 paragraphs",
        "1 paragraphs longer than 20 tokens split",
        "1 samples with nothing to mask, 1 texts without a token",
        f"vocabulary: {manifest['vocab_size']:,} tokens (given)",
    ):
        assert words in told


def test_special_tokens_in_the_text_are_text(make_prepared):
    data = make_prepared("the [MASK] of [SEP] and [CLS]\n\nthe of", validation_fraction=0)
    tokenizer = data.load_tokenizer()
    assert not {tokenizer.mask_token_id, tokenizer.pad_token_id} & set(data.train[0].tolist())
    assert data.train[0].tolist().count(tokenizer.sep_token_id) == 1


def test_the_data_are_a_hugging_face_data_set_and_the_tokenizer_loads_offline(make_prepared):
    from transformers import AutoTokenizer

    data = make_prepared(make_corpus(30), max_length=64)
    loaded = datasets.load_from_disk(str(data.path))
    assert list(loaded) == ["train", "validation"]
    assert loaded["train"]._fingerprint != loaded["validation"]._fingerprint
    for name, split in (("train", data.train), ("validation", data.validation)):
        alone = datasets.load_from_disk(str(data.path / name))
        assert alone.features == {"input_ids": datasets.List(datasets.Value("int32"))}
        rows = alone["input_ids"][:]
        assert rows == loaded[name]["input_ids"][:] == [split[i].tolist() for i in range(len(split))]
        special = AutoTokenizer.from_pretrained(data.path / "tokenizer").all_special_ids
        assert np.load(data.path / name / "lengths.npy").tolist() == list(map(len, rows))
        maskable = [sum(token not in special for token in row) for row in rows]
        assert np.load(data.path / name / "maskable.npy").tolist() == maskable
        assert min(maskable) > 0


@pytest.mark.parametrize("name", ["my data [v2]", 'd\'été "x" *?', "-dash"])
def test_odd_folder_names(tmp_path, corpus_file, name):
    folder = tmp_path / name
    folder.mkdir()
    source = folder / f"{name}.txt"
    source.write_bytes(corpus_file.read_bytes())
    prepare([source], folder / name, PrepareSettings(vocab_size=300), report=print, show_progress=False)
    data = PreparedData(folder / name)
    assert datasets.load_from_disk(str(folder / name))["train"].num_rows == len(data.train)
    assert data.load_tokenizer().mask_token_id == 4


def test_only_the_training_part_teaches(tmp_path, corpus_file):
    texts = corpus_file.read_text() + "\n\nqqq qqq the of"
    path = tmp_path / "a.txt"
    path.write_text(texts)
    found = set()
    for seed in range(40):
        output = tmp_path / f"out{seed}"
        settings = PrepareSettings(vocab_size=300, seed=seed, validation_fraction=0.5)
        prepare([path], output, settings, report=lambda line: None, show_progress=False)
        data = PreparedData(output)
        has_it = "q" in data.load_tokenizer().get_vocab()
        held_out = data.manifest["parts"]["validation"]["unknown_tokens"] > 0
        assert has_it is not held_out
        found.add(has_it)
        if len(found) == 2:
            return
    raise AssertionError("the document was always on the same side")


def test_a_vocabulary_is_learnt_from_a_bounded_part(tmp_path, corpus_file, monkeypatch):
    taken = []
    real = prepare_module.learn_tokenizer

    def watch(read_texts, vocab_size):
        taken.append(sum(map(len, read_texts())))
        return real(read_texts, vocab_size)

    monkeypatch.setattr(prepare_module, "learn_tokenizer", watch)
    monkeypatch.setattr(prepare_module, "LEARNING_BYTES", 5000)
    prepare([corpus_file], tmp_path / "out", PrepareSettings(vocab_size=300), report=print, show_progress=False)
    assert 4000 < taken[0] < 8000 < corpus_file.stat().st_size


ERRORS = {
    "missing input": (["--input", "missing.txt"], 1, "--input missing.txt: no such file"),
    "folder as input": (["--input", "."], 1, "--input .: is a folder"),
    "blank input": (["--input", "blank.txt"], 1, "there is no text in the input"),
    "empty input": (["--input", "empty.txt"], 1, "there is no text in the input"),
    "single document": (["--input", "single.txt"], 1, "only one document"),
    "max length": (["--input", "good.txt", "--max-length", "2"], 2, "--max-length 2: must be above 2"),
    "negative max length": (["--input", "good.txt", "--max-length", "-1"], 2, "--max-length -1: must be positive"),
    "vocabulary size": (["--input", "good.txt", "--vocab-size", "10"], 2, "--vocab-size 10: must be at least 64"),
    "both": (["--input", "good.txt", "--vocab-size", "99", "--tokenizer", "x"], 2, "--tokenizer and --vocab-size"),
    "fraction": (["--input", "good.txt", "--validation-fraction", "1"], 2, "must be at least 0 and below 1"),
    "fraction nan": (["--input", "good.txt", "--validation-fraction", "nan"], 2, "must be at least 0 and below 1"),
    "workers": (["--input", "good.txt", "--num-workers", "0"], 2, "--num-workers 0: must be at least 1"),
    "tokenizer": (["--input", "good.txt", "--tokenizer", "./none"], 1, "--tokenizer ./none: no such folder"),
    "used output": (["--input", "good.txt", "--output", "used"], 1, "used: exists and is not empty; choose another"),
    "file as output": (["--input", "good.txt", "--output", "good.txt"], 1, "good.txt: exists and is not a folder"),
    "long output": (["--input", "good.txt", "--output", "x" * 300], 1, "cannot be written (File name too long)"),
}


@pytest.mark.parametrize(("arguments", "code", "words"), ERRORS.values(), ids=ERRORS)
def test_errors_are_one_line_and_leave_nothing(tmp_path, monkeypatch, capsys, arguments, code, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.txt").write_text("one two\n\nthree four\n")
    (tmp_path / "single.txt").write_text("one two\nthree four\n")
    (tmp_path / "blank.txt").write_text("\n \n\t\n")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine").write_text("precious")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    assert main(["prepare", "--output", "out", *arguments]) == code
    errors = [line for line in capsys.readouterr().err.replace("\r", "\n").split("\n") if "error" in line]
    assert len(errors) == 1
    assert errors[0].startswith("ds-bert prepare: error: ")
    assert words in errors[0]
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_argparse_refuses_an_unknown_unit(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["prepare", "--input", "a", "--output", "b", "--sample-unit", "word"])
    assert stop.value.code == 2
    assert "invalid choice: 'word'" in capsys.readouterr().err


def test_prepared_data_are_not_overwritten(tmp_path, corpus_file):
    settings = PrepareSettings(vocab_size=300)
    prepare([corpus_file], tmp_path / "out", settings, report=print, show_progress=False)
    before = all_bytes(tmp_path / "out")
    with pytest.raises(UserError, match="is prepared data already; choose another folder, or delete it first"):
        prepare([corpus_file], tmp_path / "out", settings, report=print, show_progress=False)
    assert all_bytes(tmp_path / "out") == before


def test_a_length_above_the_tokenizers_is_only_a_warning(tmp_path, corpus_file, bert_folder, capsys):
    settings = PrepareSettings(tokenizer=bert_folder, max_length=600)
    prepare([corpus_file], tmp_path / "out", settings, report=print, show_progress=False)
    assert "warning: --max-length 600 is above the tokenizer's model_max_length 512" in capsys.readouterr().err


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path, corpus_file, bert_folder):
    # A limit on file sizes makes the write itself fail, as a full disk does; only the errno differs.
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (30000, 30000)); "
    code = limit + "from ds_bert.cli.main import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["prepare", "--input", corpus_file, "--output", tmp_path / "out", "--tokenizer", bert_folder]
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 1
    assert f"--output {tmp_path / 'out'}: cannot be written (File too large)" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_enospc_names_the_folder(tmp_path, corpus_file, bert_folder, monkeypatch):
    def full(self, samples):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ds_bert.data.preparing.storage.PartWriter.add", full)
    with pytest.raises(UserError, match=r"--output .*out: the disk is full .*nothing was kept; make room"):
        prepare(
            [corpus_file], tmp_path / "out", PrepareSettings(tokenizer=bert_folder), report=print, show_progress=False
        )
    assert list(tmp_path.iterdir()) == []


def start_and_wait_for(tmp_path, big_file, label, *more):
    """Start a run and return when its progress bar says that a stage is under way."""
    command = [sys.executable, "-m", "ds_bert.cli.main", "prepare", "--input", str(big_file), "--num-workers", "2"]
    log = open(tmp_path / "log", "w+")  # noqa: SIM115
    process = subprocess.Popen(
        [*command, "--output", str(tmp_path / "out"), *more],
        stderr=log,
        stdout=log,
        # A shell's background job ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while label not in (tmp_path / "log").read_text():
        assert process.poll() is None, (tmp_path / "log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


@pytest.mark.parametrize(
    ("signum", "label", "code"),
    [(signal.SIGINT, "learning", 130), (signal.SIGTERM, "learning", 143), (signal.SIGTERM, "tokenizing", 143)],
    ids=["Ctrl-C while learning", "TERM while learning", "TERM while tokenizing"],
)
def test_an_interrupted_run_leaves_nothing(tmp_path, big_file, signum, label, code):
    process = start_and_wait_for(tmp_path, big_file, label, "--vocab-size", "500")
    time.sleep(0.3)
    process.send_signal(signum)
    assert process.wait(20) == code
    assert "Traceback" not in (tmp_path / "log").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_what_a_killed_run_leaves_is_removed_by_the_next(tmp_path, big_file, corpus_file):
    process = start_and_wait_for(tmp_path, big_file, "learning", "--vocab-size", "500")
    process.kill()
    process.wait()
    assert (tmp_path / ".out.preparing").is_dir()
    (tmp_path / ".out.preparing" / "left over").write_text("x")
    prepare([corpus_file], tmp_path / "out", PrepareSettings(vocab_size=300), report=print, show_progress=False)
    assert not (tmp_path / ".out.preparing").exists()
    assert not (tmp_path / "out" / "left over").exists()
    PreparedData(tmp_path / "out")


def test_two_runs_do_not_write_to_one_folder(tmp_path, big_file, corpus_file):
    process = start_and_wait_for(tmp_path, big_file, "learning", "--vocab-size", "500")
    process.send_signal(signal.SIGSTOP)  # else it might be done too soon
    try:
        with pytest.raises(UserError, match="another ds-bert prepare is writing there"):
            prepare([corpus_file], tmp_path / "out", PrepareSettings(vocab_size=300), report=print, show_progress=False)
        assert (tmp_path / ".out.preparing").is_dir()
    finally:
        process.kill()
        process.wait()


def test_a_run_that_waited_for_another_to_end_does_not_write_over_it(tmp_path, corpus_file):
    staging = tmp_path / ".out.preparing"
    staging.mkdir()
    (staging / "theirs").write_text("x")
    descriptor = os.open(staging, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)

    def end() -> None:
        staging.rename(tmp_path / "out")
        os.close(descriptor)

    threading.Timer(0.3, end).start()
    with pytest.raises(UserError, match="another ds-bert prepare was writing there and has ended just now"):
        prepare([corpus_file], tmp_path / "out", PrepareSettings(vocab_size=300), report=print, show_progress=False)
    assert (tmp_path / "out" / "theirs").read_text() == "x"


def test_a_dead_worker_is_one_clear_error(tmp_path, big_file, bert_folder):
    process = start_and_wait_for(tmp_path, big_file, "tokenizing", "--tokenizer", str(bert_folder))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 20
    killed = False
    while not killed and time.monotonic() < deadline and process.poll() is None:
        for child in children.read_text().split():
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            if b"spawn_main" in command:
                os.kill(int(child), signal.SIGKILL)
                killed = True
    assert killed
    assert process.wait(30) == 1
    log = (tmp_path / "log").read_text()
    assert "a worker process died" in log
    assert "--num-workers 1" in log
    assert "Traceback" not in log
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path, corpus_file, bert_folder, monkeypatch):
    path = tmp_path / "text.txt"
    path.write_bytes(corpus_file.read_bytes())
    real = prepare_module.continues_word

    def append(tokenizer):
        with open(path, "a") as file:
            file.write("\n\nand one more")
        return real(tokenizer)

    monkeypatch.setattr(prepare_module, "continues_word", append)
    with pytest.raises(UserError, match="a file changed while it was being read"):
        prepare([path], tmp_path / "out", PrepareSettings(tokenizer=bert_folder), report=print, show_progress=False)


def test_the_manifest_tells_settings_and_counts_and_no_place_or_time(tmp_path, corpus_file, bert_folder):
    settings = PrepareSettings(tokenizer=bert_folder, max_length=64, seed=3)
    manifest = prepare([corpus_file], tmp_path / "out", settings, report=print, show_progress=False)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text()) == manifest
    assert manifest["format_version"] == 1
    assert manifest["settings"] == {
        "learned_tokenizer": False,
        "vocab_size_limit": None,
        "max_length": 64,
        "sample_unit": "pack",
        "validation_fraction": 0.05,
        "seed": 3,
    }
    parts = manifest["parts"].values()
    assert sum(part["documents"] for part in parts) == manifest["input"]["documents"] == 60
    assert set(manifest) == {"format_version", "tokenizer_hash", "vocab_size", "settings", "input", "parts", "versions"}
