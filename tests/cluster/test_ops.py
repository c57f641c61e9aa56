"""Compiled ops: what is needed, and locks that a killed compilation left."""

import logging
import os
import subprocess
import sys

import pytest

from ds_bert.accelerator import compiled_ops


@pytest.mark.parametrize(
    ("optimizer", "needed"),
    [
        ({"type": "Adam"}, ["FusedAdamBuilder"]),
        ({"type": "AdamW", "params": {}}, ["FusedAdamBuilder"]),
        ({"type": "AdamW", "params": {"torch_adam": True}}, []),
        ({"type": "SGD"}, []),
        (None, []),
    ],
)
def test_only_adam_needs_an_op(optimizer, needed):
    assert compiled_ops.needed_ops({"optimizer": optimizer} if optimizer else {}) == needed


def test_a_lock_that_nobody_holds_is_removed_and_named(tmp_path, caplog):
    lock = tmp_path / "lock"
    lock.touch()
    with caplog.at_level(logging.WARNING):
        compiled_ops.remove_stale_lock(lock)
    assert not lock.exists()
    assert str(lock) in caplog.text


def test_a_lock_that_a_live_process_holds_stays(tmp_path):
    lock = tmp_path / "lock"
    # As torch's FileBaton takes it.
    code = f"import os, time; os.open({str(lock)!r}, os.O_CREAT | os.O_EXCL); print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            compiled_ops.remove_stale_lock(lock)
            assert lock.exists()
        finally:
            holder.kill()
    compiled_ops.remove_stale_lock(lock)
    assert not lock.exists()


def test_without_a_compiler_the_reason_is_given(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    reason = compiled_ops.build_ops(["FusedAdamBuilder"])
    assert reason
    assert "\n" not in reason
