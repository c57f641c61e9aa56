"""The trace of bucket clipping, and what `ds-bert trace` reads from it."""

import json

import pytest
import torch.distributed as dist

from ds_bert.cli.main import main
from ds_bert.errors import UserError
from ds_bert.reduction.trace import LANES
from ds_bert.reduction.trace_report import read_traces, typical_step
from tests.engine.test_bucket_clipping import base
from tests.reduction import reference


def trace_three_steps(folder: str) -> None:
    import deepspeed

    from ds_bert.engine import attach_to_engine

    model = reference.tiny_bert()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=base())[0]
    attach_to_engine(engine, bucket_size_mb=0.004, trace=folder)
    for step in range(3):
        engine.backward(engine(**reference.batch(step, 0, dist.get_rank())).loss)
        engine.step()


def test_every_part_of_a_step_is_in_the_trace(rank_pool, tmp_path):
    rank_pool(2).run(trace_three_steps, str(tmp_path))
    steps = read_traces(tmp_path)
    assert [(s.step, s.rank) for s in steps] == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    for step in steps:
        names = {lane: [name for name, _, _ in step.spans[lane]] for lane in LANES}
        assert names["compute"] == ["forward", "backward", "optimizer"]
        buckets = len([name for name in names["clip"] if name.startswith("clip bucket")])
        assert buckets > 3
        assert names["clip"][-1] == "clip rows"
        for number in range(buckets):
            assert f"all-reduce bucket {number}" in names["communication"]
            assert f"wait bucket {number}" in names["wait"]
        assert {"all-reduce rows", "which rows", "sums of norms"} <= set(names["communication"])
        assert 0 < step.exposed <= step.communication <= step.seconds
    # From the second step on buckets are sent from inside the backward pass.
    last = steps[-1].spans
    backward_ends = next(end for name, _, end in last["compute"] if name == "backward")
    assert sum(start < backward_ends for _, start, _ in last["communication"]) > 3


def event(name: str, lane: str, start_ms: float, end_ms: float, step: int = 1, rank: int = 0) -> str:
    entry = {"name": name, "ph": "X", "pid": rank, "tid": LANES.index(lane), "args": {"step": step}}
    return json.dumps({**entry, "ts": 1e3 * start_ms, "dur": 1e3 * (end_ms - start_ms)}) + ",\n"


def write(folder, *events: str) -> None:
    start = json.dumps({"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "rank 0"}}) + ",\n"
    with open(folder / "rank0.json", "a") as file:
        file.writelines(["[\n", start, *events])


def test_hidden_and_exposed_communication_add_up(tmp_path):
    write(
        tmp_path,
        event("backward", "compute", 0, 50),
        event("all-reduce bucket 0", "communication", 10, 40),
        event("all-reduce bucket 1", "communication", 30, 70),
        event("wait bucket 0", "wait", 50, 51),
        event("wait bucket 1", "wait", 55, 70),
        event("optimizer", "compute", 80, 100),
    )
    (step,) = read_traces(tmp_path)
    assert step.seconds == pytest.approx(0.1)
    assert step.communication == pytest.approx(0.06)
    assert step.hidden == pytest.approx(0.04)
    assert step.exposed == pytest.approx(0.02)


def test_what_backward_itself_waits_for_is_not_hidden(tmp_path):
    write(
        tmp_path,
        event("backward", "compute", 0, 50),
        event("all-reduce bucket 0", "communication", 10, 40),
        event("wait bucket 0", "wait", 30, 40),
    )
    (step,) = read_traces(tmp_path)
    assert step.hidden == pytest.approx(0.02)
    assert step.exposed == pytest.approx(0.01)


def test_steps_done_again_after_a_kill_count_once_and_a_torn_line_is_left_out(tmp_path):
    write(
        tmp_path, event("forward", "compute", 0, 5, step=1), event("forward", "compute", 9, 15, step=2), '{"name": "ba'
    )
    write(tmp_path, event("forward", "compute", 20, 27, step=2))
    assert [(s.step, round(1e3 * s.seconds)) for s in read_traces(tmp_path)] == [(1, 5), (2, 7)]


def test_a_file_that_is_no_trace_is_named_with_its_line(tmp_path):
    write(tmp_path, "nonsense,\n")
    with pytest.raises(UserError, match=r"rank0\.json:3: no event of a trace"):
        read_traces(tmp_path)


def test_the_command_prints_a_table_and_draws(tmp_path, capsys):
    for step in (1, 2, 3):
        write(
            tmp_path,
            event("backward", "compute", 0, 50 + step, step=step),
            event("all-reduce bucket 0", "communication", 10, 60, step=step),
            event("wait bucket 0", "wait", 50, 60, step=step),
        )
    assert main(["trace", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[2].split() == ["2", "0", "60.0", "50.0", "40.0", "10.0", "80.0%"]
    assert out.splitlines()[4].startswith("median")
    assert (tmp_path / "overlap.png").read_bytes().startswith(b"\x89PNG")
    assert typical_step(read_traces(tmp_path)).step > 1


def test_a_trace_without_steps_is_one_line(tmp_path, capsys):
    (tmp_path / "rank0.json").write_text("")
    assert main(["trace", str(tmp_path)]) == 1
    assert "holds traces of no whole step" in capsys.readouterr().err
    assert main(["trace", str(tmp_path / "nothing")]) == 1
    assert "is no folder" in capsys.readouterr().err


def test_a_run_without_a_trace_says_how_to_get_one(tmp_path, capsys):
    assert main(["trace", str(tmp_path)]) != 0
    assert '"trace": true' in capsys.readouterr().err
