"""The road a user goes: the real command, the real launcher, kill -9, resume, evaluate, export, load."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 1},
    "csv_monitor": {"enabled": True, "output_path": "", "job_name": "monitor"},
}
STEPS = 12


def ds_bert(*words, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "ds_bert.cli.main", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    # A name that shells, globs and launchers could trip over.
    return tmp_path_factory.mktemp("it's a [v2] fôlder (*)")


@pytest.fixture(scope="module")
def arguments(folder, prepared, small_model) -> list:
    data = folder / "data set"
    data.symlink_to(prepared)
    config = {**CONFIG, "csv_monitor": {**CONFIG["csv_monitor"], "output_path": str(folder / "csv")}}
    (folder / "ds config.json").write_text(json.dumps(config))
    words = ["pretrain", "--data", data, "--model", small_model(0.1), "--deepspeed_config", folder / "ds config.json"]
    return [*words, "--num-procs", 2, "--max-steps", STEPS, "--save-interval", 3, "--eval-interval", 5]


@pytest.fixture(scope="module")
def uninterrupted(folder, arguments) -> Path:
    done = ds_bert(*arguments, "--output", folder / "whole")
    assert done.returncode == 0, done.stderr
    return folder / "whole"


def start(*words) -> subprocess.Popen:
    command = [sys.executable, "-m", "ds_bert.cli.main", *map(str, words)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def ranks_once_it_has(lines: int, run_folder: Path, process: subprocess.Popen) -> list[psutil.Process]:
    """The rank processes of a run, as soon as its metrics.jsonl has so many lines."""
    file = run_folder / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not file.is_file() or len(file.read_bytes().split(b"\n")) <= lines:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "ds_bert.training.pretrain" in child.cmdline() and "deepspeed.launcher" not in " ".join(child.cmdline())
    ]


def test_killed_and_resumed_through_the_launcher_it_gives_the_same_metrics(folder, arguments, uninterrupted):
    process = start(*arguments, "--output", folder / "killed")
    ranks = ranks_once_it_has(7, folder / "killed", process)
    assert len(ranks) == 2
    for rank in ranks:
        rank.send_signal(signal.SIGKILL)
    assert process.wait(timeout=60) != 0
    resumed = ds_bert(*arguments, "--output", folder / "killed")
    assert resumed.returncode == 0, resumed.stderr
    assert re.search(r"resumed from .*global_step(3|6|9) at step \1 of 12", resumed.stderr)

    def lines(run: Path) -> list[dict]:
        timing = (
            "step_s", "real_tokens_per_s", "padded_tokens_per_s", "data_wait_s", "rank_seconds_max_over_mean",
            "slowest_rank",
        )  # fmt: skip
        found = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        return [{key: value for key, value in line.items() if key not in timing} for line in found]

    assert lines(folder / "killed") == lines(uninterrupted)
    assert [line["step"] for line in lines(uninterrupted) if "loss" in line] == list(range(1, STEPS + 1))
    assert [line["step"] for line in lines(uninterrupted) if "eval_loss" in line] == [5, 10, 12]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_ends_all_processes_without_a_traceback(folder, arguments, signum):
    run = folder / f"stopped by {signum.name}"
    words = [10_000 if word == STEPS else word for word in arguments]
    process = start(*words, "--output", run)
    ranks = ranks_once_it_has(2, run, process)
    process.send_signal(signum)
    assert process.wait(timeout=30) == 128 + signum
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
    errors = process.stderr.read()
    assert "Traceback" not in errors
    assert errors.splitlines()[-1] == f"ds-bert pretrain: stopped by {signum.name}"
    saved = re.search(r"stopped as asked, saved at step (\d+);", errors)[1]
    assert (run / "latest").read_text() == f"global_step{saved}"


def test_the_run_folder_holds_what_the_docs_say(folder, uninterrupted):
    names = {path.name for path in uninterrupted.iterdir()}
    documented = {"run.json", "ds_config.json", "config.json", "metrics.jsonl", "loss.png", "latest", "tokenizer.json"}
    assert documented <= names
    assert {f"global_step{step}" for step in (3, 6, 9, 12)} <= names
    assert (uninterrupted / "loss.png").stat().st_size > 10_000
    assert any("train_loss" in path.name for path in (folder / "csv").rglob("*.csv"))
    assert any("eval_loss" in path.name for path in (folder / "csv").rglob("*.csv"))


def test_a_second_start_finds_the_run_complete(arguments, uninterrupted):
    done = ds_bert(*arguments, "--output", uninterrupted)
    assert done.returncode == 0
    assert "the run is complete: it has 12 steps" in done.stderr


@pytest.mark.parametrize("num_procs", [1, 2])
def test_evaluate_prints_the_figures_of_training_as_one_json_object(folder, uninterrupted, num_procs):
    options = ["--checkpoint", uninterrupted, "--data", folder / "data set", "--json", "--num-procs", num_procs]
    done = ds_bert("evaluate", *options)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    logged = json.loads((uninterrupted / "metrics.jsonl").read_text().splitlines()[-1])
    assert figures["eval_loss"] == pytest.approx(logged["eval_loss"], rel=1e-6)
    assert figures["eval_accuracy"] == logged["eval_accuracy"]
    assert figures["checkpoint"].endswith("global_step12")


@pytest.fixture(scope="module")
def exported(folder, uninterrupted) -> Path:
    done = ds_bert("export", "--checkpoint", uninterrupted, "--output", folder / "model out")
    assert done.returncode == 0, done.stderr
    return folder / "model out"


def test_the_exported_model_loads_offline_and_answers(folder, exported, uninterrupted):
    from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

    assert (exported / "model.safetensors").is_file()
    assert not list(exported.glob("*.bin"))
    answers = pipeline("fill-mask", model=str(exported))("the time of [MASK] people.")
    assert len(answers) == 5
    model = AutoModelForMaskedLM.from_pretrained(exported)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert len(AutoTokenizer.from_pretrained(exported)) == model.config.vocab_size
    figures = json.loads(ds_bert("evaluate", "--checkpoint", exported, "--data", folder / "data set", "--json").stdout)
    logged = json.loads((uninterrupted / "metrics.jsonl").read_text().splitlines()[-1])
    assert figures["eval_loss"] == pytest.approx(logged["eval_loss"], rel=1e-6)


def test_sentence_transformers_loads_the_exported_model(exported):
    from sentence_transformers import SentenceTransformer

    assert SentenceTransformer(str(exported), device="cpu").encode(["the time of people"]).shape == (1, 32)


def test_exporting_over_something_is_refused(exported, uninterrupted):
    done = ds_bert("export", "--checkpoint", uninterrupted, "--output", exported)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "exists already; name a new folder" in done.stderr


def test_the_module_runs_under_the_launcher_itself(folder, arguments, uninterrupted):
    """As `deepspeed [launcher options] --module ds_bert.training.pretrain ...`."""
    words = [str(word) for word in arguments[1:] if word != "--num-procs" and word != 2]
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", "29777"]
    command += ["--module", "ds_bert.training.pretrain", *words, "--output", str(folder / "direct")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first = [
        json.loads(run.joinpath("metrics.jsonl").read_text().splitlines()[0])
        for run in (folder / "direct", uninterrupted)
    ]
    assert first[0]["loss"] == first[1]["loss"]


def test_an_error_in_the_ranks_is_one_line_and_exit_code_1(folder, arguments, uninterrupted):
    done = ds_bert(*arguments, "--output", uninterrupted, "--resume", "global_step7")
    assert done.returncode == 1
    ours = [line for line in done.stderr.splitlines() if "ds-bert pretrain: error:" in line]
    assert len(ours) == 1
    assert "has no checkpoint global_step7; --resume global_step12 is whole" in ours[0]
    assert "Traceback" not in done.stderr


def test_without_a_compiler_training_goes_on_with_torchs_adam(folder, arguments, tmp_path):
    env = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path), "CXX": "no-such-compiler"}
    words = [word if word != STEPS else 2 for word in arguments]
    done = ds_bert(*words, "--output", folder / "no compiler", env=env)
    assert done.returncode == 0, done.stderr
    assert "training goes on with torch's Adam" in done.stderr


def test_help_fits_on_one_screen():
    done = ds_bert("--help")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) <= 24
    assert all(command in done.stdout for command in ("prepare", "pretrain", "evaluate", "export"))


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["nonsense"], 2, "invalid choice: 'nonsense'"),
        (["pretrain"], 2, "the following arguments are required: --data"),
        (["pretrain", "--num-workers", "-1"], 2, "argument --num-workers: must be at least 0, not -1"),
        (["pretrain", "--seed", "x"], 2, "argument --seed: invalid int value: 'x'"),
        (["evaluate", "--checkpoint", "/nowhere", "--data", "/nowhere"], 1, "--checkpoint /nowhere does not exist"),
        (["export", "--checkpoint", "/tmp", "--output", "x"], 1, "is not a run folder (with run.json), a checkpoint"),
    ],
)
def test_exit_codes_and_messages(words, code, message):
    done = ds_bert(*words)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
