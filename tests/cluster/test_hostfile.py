"""Hostfiles as people write them, and what `--include` and `--exclude` leave of them."""

import re

import pytest

from ds_bert.cluster.launching.hostfile import Host, read_hostfile, select
from ds_bert.errors import UserError


def written(tmp_path, text: bytes) -> str:
    path = tmp_path / "hostfile"
    path.write_bytes(text)
    return str(path)


@pytest.mark.parametrize(
    "text",
    [
        b"node1 slots=2\nnode2 slots=1\n",
        b"\xef\xbb\xbfnode1 slots=2\r\nnode2 slots=1\r\n",
        b"# our hosts\n\n  node1\tslots = 2   # the big one\n\tnode2 slots=1",
    ],
)
def test_what_people_write_is_read(tmp_path, text):
    assert read_hostfile(written(tmp_path, text)) == [Host("node1", (0, 1)), Host("node2", (0,))]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"node1 slots=2\nnode2 slot=1\n", "line 2: 'node2 slot=1' cannot be read; write one host a line"),
        (b"node1 slots=2 max\n", "line 1: 'node1 slots=2 max' cannot be read"),
        (b"node1\n", "line 1: 'node1' cannot be read"),
        (b"node1 slots=0\n", "line 1: 'node1 slots=0' has no slot"),
        (b"\nnode1 slots=1\nnode1 slots=2\n", "line 3: 'node1 slots=2' names node1 again (first in line 2)"),
        (b"# nothing\n", "holds no host; write one host a line, as in: node1 slots=8"),
        (b"\xff\xfe\x00", "is not text in UTF-8"),
    ],
)
def test_what_cannot_be_read_is_named_by_line(tmp_path, text, message):
    with pytest.raises(UserError, match=re.escape(message)):
        read_hostfile(written(tmp_path, text))


def test_a_named_but_missing_file_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"--hostfile .*/none: No such file or directory"):
        read_hostfile(str(tmp_path / "none"))


HOSTS = [Host("a", (0, 1, 2, 3)), Host("b", (0, 1)), Host("node3", (0, 1))]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, HOSTS),
        ({"include": "node3"}, [Host("node3", (0, 1))]),
        ({"include": "node3:1@a:3,0"}, [Host("a", (0, 3)), Host("node3", (1,))]),
        ({"exclude": "a:0,1,2@b"}, [Host("a", (3,)), Host("node3", (0, 1))]),
    ],
)
def test_include_and_exclude_choose_hosts_and_slots(options, left):
    assert select(HOSTS, **options) == left


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include": "a", "exclude": "b"}, "give one of them"),
        ({"include": "nod3"}, "the hostfile has no 'nod3'; did you mean 'node3'?"),
        ({"include": "b:2"}, "b has the slots 0 to 1, not 2"),
        ({"exclude": "b:x"}, "'b:x' is not HOST:SLOT,SLOT,... such as b:0,1"),
        ({"exclude": "a@b@node3"}, "leaves no slot of any host"),
    ],
)
def test_what_they_cannot_mean_is_an_error(options, message):
    with pytest.raises(UserError, match=re.escape(message)):
        select(HOSTS, **options)
