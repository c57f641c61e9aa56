"""`.deepspeed_env` is read as DeepSpeed reads it, and reaches ranks that our own launches start."""

from pathlib import Path

import pytest

from ds_bert.cluster.launching.launch import launch
from ds_bert.cluster.launching.machines import Machines
from ds_bert.cluster.launching.variables import of_deepspeed_env
from ds_bert.errors import UserError

PROJECT = Path(__file__).parents[2]
TELL = """
import os
from pathlib import Path
Path("told" + os.environ["RANK"]).write_text(os.environ["GLOO_SOCKET_IFNAME"])
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The two files, in a home folder and a current one."""
    for name in ("home", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home" / ".deepspeed_env", tmp_path / "here" / ".deepspeed_env"


def test_the_file_here_wins_over_that_in_the_home_folder(files):
    assert of_deepspeed_env() == {}
    files[0].write_text("A=1\nB=x=y z\n")
    files[1].write_text("A=2\n\n")
    assert of_deepspeed_env() == {"A": "2", "B": "x=y z"}


def test_a_line_without_a_value_is_named(files):
    files[1].write_text("A=2\nexport\n")
    with pytest.raises(UserError, match=r"\.deepspeed_env, line 2: 'export' is not KEY=value"):
        of_deepspeed_env()


def test_ranks_get_the_variables(files, tmp_path, monkeypatch):
    files[1].write_text("GLOO_SOCKET_IFNAME=of the file\n")
    (tmp_path / "here" / "tell.py").write_text(TELL)
    monkeypatch.setenv("PYTHONPATH", f"{PROJECT}:{tmp_path}/here")
    assert launch("a test", "tell", [], Machines(num_procs=2)) == 0
    assert [(tmp_path / "here" / f"told{rank}").read_text() for rank in range(2)] == ["of the file"] * 2
