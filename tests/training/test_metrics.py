"""`metrics.jsonl` as a resumed run finds it."""

import json
import logging

import pytest

from ds_bert.training.metrics import MetricsLog, read_metrics


def write(folder, text):
    (folder / "metrics.jsonl").write_text(text)


LINES = "".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, 6))


@pytest.mark.parametrize(
    ("text", "kept", "warning"),
    [
        (LINES, [1, 2, 3], None),
        (LINES + '{"step": 6, "lo', [1, 2, 3], None),
        ("", [], "lacks 3 of the 3 steps done"),
        (LINES[:-1].replace('{"step": 2, "loss": 1.0}\n', ""), [1, 3], "lacks 1 of the 3 steps done"),
    ],
    ids=["whole", "torn", "emptied", "a line missing"],
)
def test_later_lines_are_cut_and_missing_ones_are_told(tmp_path, caplog, text, kept, warning):
    write(tmp_path, text)
    with caplog.at_level(logging.WARNING):
        MetricsLog(tmp_path, step=3).write({"step": 4, "loss": float("nan")})
    assert [line["step"] for line in read_metrics(tmp_path)] == [*kept, 4]
    assert read_metrics(tmp_path)[-1]["loss"] is None
    assert (warning in caplog.text) if warning else not caplog.text
