"""`ds-bert balance`: its figures against plain references, its files and its mistakes."""

import json

import numpy as np
import pytest

from ds_bert.cli.main import main
from ds_bert.planning import simulate
from ds_bert.planning.measure import _fit
from ds_bert.sampling import LengthBalancedBatchSampler, cost_table

STRATEGIES = ["random", "local_sort", "stratified", "balanced"]


@pytest.fixture(scope="module")
def lengths_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("lengths") / "lengths.npy"
    rng = np.random.default_rng(0)
    np.save(path, np.minimum(rng.integers(10, 640, 6000), 512))
    return path


def balance(capsys, *arguments):
    assert main(["balance", *map(str, arguments)]) == 0
    return capsys.readouterr()


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_figures_are_those_of_the_batches_the_ranks_get(lengths_file, strategy, accumulation):
    lengths, steps, world = np.load(lengths_file), 5, 8
    sizes = {"micro_batch_size": 4, "gradient_accumulation_steps": accumulation, "world_size": world}
    table = cost_table("flops", 512, hidden_size=768)
    report = simulate(lengths, table, steps=steps, strategy=strategy, **sizes).as_dict()
    for packed in (True, False):
        ranks = [
            LengthBalancedBatchSampler(lengths, **sizes, rank=rank, strategy=strategy, packed=packed)
            for rank in range(world)
        ]
        work, ideal, tokens, real, peak = np.zeros((steps, world)), np.zeros(steps), 0, 0, 0
        for rank, sampler in enumerate(ranks):
            for micro_step, batch in enumerate(list(sampler)[: steps * accumulation]):
                here = lengths[batch]
                shape = here if packed else np.full(len(here), here.max())
                work[micro_step // accumulation, rank] += sum(n + n * n / (6 * 768) for n in shape.tolist())
                ideal[micro_step // accumulation] += sum(n + n * n / (6 * 768) for n in here.tolist()) / world
                tokens, real, peak = tokens + shape.sum(), real + here.sum(), max(peak, shape.sum())
        got = report["packed" if packed else "padded"]
        ratios = work.max(axis=1) / work.mean(axis=1)
        assert got["max_over_mean"] == pytest.approx(ratios.mean())
        assert got["max_over_mean_worst"] == pytest.approx(ratios.max())
        assert got["max_over_mean_p99"] == pytest.approx(np.quantile(ratios, 0.99))
        assert got["time_over_ideal"] == pytest.approx(work.max(axis=1).sum() / ideal.sum())
        assert got["time_over_ideal_worst"] == pytest.approx((work.max(axis=1) / ideal).max())
        assert got["padding_share"] == pytest.approx(1 - real / tokens)
        assert got["peak_tokens"] == peak


def test_json_is_one_object_and_the_picture_is_drawn(capsys, lengths_file, tmp_path):
    options = ["--lengths", lengths_file, "--world-size", 16, "--micro-batch-size", 4, "--steps", 3]
    printed = balance(capsys, *options, "--json", "--plot", tmp_path / "b.png")
    report = json.loads(printed.out)
    assert list(report["strategies"]) == STRATEGIES
    for strategy in report["strategies"].values():
        assert strategy["packed"]["max_over_mean"] <= strategy["packed"]["max_over_mean_worst"]
        assert strategy["padded"]["time_over_ideal"] >= 1
    assert report["recommendation"].startswith("With packed execution take balanced")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    assert "b.png" in printed.err


def test_the_table_names_every_strategy_and_prepared_data_work(capsys, prepared):
    printed = balance(capsys, "--data", prepared, "--world-size", 4, "--micro-batch-size", 2, "--steps", 3)
    assert all(name in printed.out for name in STRATEGIES)
    assert "With packed execution take" in printed.out


def test_options_reach_their_strategy(capsys, lengths_file):
    options = ["--lengths", lengths_file, "--world-size", 16, "--micro-batch-size", 4, "--steps", 3, "--json"]
    plain = json.loads(balance(capsys, *options).out)["strategies"]
    keys = ["--window-scope", "world", "--window", 8, "--strata", 4, "--no-equal-counts", "--cost-model", "tokens"]
    other = json.loads(balance(capsys, *options, *keys).out)
    assert other["options"] == {
        "local_sort": {"window": 8, "window_scope": "world"},
        "stratified": {"strata": 4},
        "balanced": {"equal_counts": False},
    }
    assert all(plain[name]["padded"] != other["strategies"][name]["padded"] for name in STRATEGIES)


@pytest.mark.parametrize(
    ("name", "content"),
    [("l.txt", "3\n5\n\n5\n"), ("l.json", "[3, 5, 5]"), ("c.json", '{"counts": [0, 0, 1, 0, 2]}')],
)
def test_lengths_in_other_forms(tmp_path, name, content):
    from ds_bert.planning import read_lengths

    (tmp_path / name).write_text(content)
    assert read_lengths(tmp_path / name).tolist() == [3, 5, 5]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("l.txt", "3\nfive\n", "l.txt:2: 'five' is no whole number; write one a line"),
        ("l.txt", "", "one-dimensional row of whole numbers, not shape (0,)"),
        ("l.txt", "0\n4\n", "sample 0 has 0 tokens"),
        ("l.json", '{"count": [1]}', "must be a list of whole numbers, or"),
        ("l.json", "{", "l.json:1:2: not valid JSON"),
        ("l.npy", "not numpy", "l.npy: cannot be read"),
        ("l.npy", "", "l.npy: cannot be read"),
        ("l.txt", "9" * 40, "is no whole number"),
        ("l.json", f"[{'9' * 40}]", "is no sample's number of tokens"),
        ("l.json", f"[{'9' * 5000}]", "Exceeds the limit"),
        ("l.json", "[" * 100_000, "too deeply nested"),
        ("l.json", '{"counts": [1000000000000]}', "1000000000000 samples; at most"),
        ("missing.txt", None, "missing.txt: No such file"),
    ],
    ids=str,
)
def test_other_files_are_refused(capsys, tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    code = main(["balance", "--lengths", str(tmp_path / name), "--world-size", "1", "--micro-batch-size", "1"])
    assert code == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give --world-size and --micro-batch-size"),
        (["--world-size", "2", "--micro-batch-size", "1", "--edges", "a,b"], "must be whole numbers with commas"),
        (["--world-size", "2", "--micro-batch-size", "1", "--plot", "b.nonsense"], "--plot b.nonsense: "),
        (["--world-size", "2", "--micro-batch-size", "1", "--plot", "b"], "--plot b: give the picture an ending"),
        (
            ["--world-size", "2", "--micro-batch-size", "1", "--plot", "no/b.png"],
            "--plot no/b.png: there is no folder no",
        ),
    ],
    ids=str,
)
def test_wrong_usage_exits_with_2(capsys, lengths_file, options, message):
    assert main(["balance", "--lengths", str(lengths_file), *options]) == 2
    assert message in capsys.readouterr().err


def test_more_ranks_than_data_is_one_line(capsys, lengths_file):
    code = main(["balance", "--lengths", str(lengths_file), "--world-size", "9999", "--micro-batch-size", "1"])
    assert code == 1
    assert "hold 6000 samples, less than one global batch of 9999" in capsys.readouterr().err


def test_a_table_that_cannot_be_written_is_told_before_measuring(capsys):
    assert main(["balance", "--measure", "no/such/folder/cost.json"]) == 2
    assert "there is no folder no/such/folder" in capsys.readouterr().err


def test_a_measured_table_can_be_used(capsys, tmp_path, lengths_file, monkeypatch):
    from ds_bert.planning import measure

    monkeypatch.setattr(measure, "LENGTHS", (8, 16, 32))
    monkeypatch.setattr(measure, "REPEATS", 2)
    table = tmp_path / "cost.json"
    balance(capsys, "--measure", table, "--model", "tiny", "--micro-batch-size", 2)
    content = json.loads(table.read_text())
    assert [point["length"] for point in content["measured"]] == [8, 16, 32]
    options = ["--lengths", lengths_file, "--world-size", 4, "--micro-batch-size", 4, "--steps", 2, "--json"]
    report = json.loads(balance(capsys, *options, "--cost-model", table).out)
    assert report["cost_model"] == str(table)


def test_the_fit_finds_the_coefficients_it_was_made_from_and_never_a_negative_one():
    def points(constant, linear, square):
        return [{"length": n, "seconds": constant + 4 * (linear * n + square * n * n)} for n in (16, 64, 128, 256, 512)]

    assert _fit(points(0.02, 1e-4, 1e-7), 4) == pytest.approx((0.02, 1e-4, 1e-7))
    constant, linear, square = _fit(points(0.02, 1e-4, -2e-8), 4)
    assert square == 0
    assert constant > 0 < linear
    # Noise larger than the length's effect must not make a table in which every sample costs nothing.
    constant, linear, square = _fit(points(0.5, -1e-5, 0), 4)
    assert (constant, square) == (0, 0)
    assert linear > 0
