"""Two hosts, and runs over them."""

import pytest

from tests.cluster.ssh_hosts import NEEDED, SshHosts, need


@pytest.fixture(scope="package", autouse=True)
def one_thread_a_rank():
    """The order of a sum, and so its last digit, depends on the threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def ssh_hosts(tmp_path_factory):
    """Two real hosts with ssh between them; skipped without root and their programs."""
    need(*NEEDED)
    with SshHosts(tmp_path_factory.mktemp("hosts")).started() as hosts:
        yield hosts
