"""Two hosts, and what a job of two ranks trains on one."""

import json

import pytest
from ssh_hosts import SshHosts

from tests.cluster.job_runs import CONFIG, SHORT, lines
from tests.cluster.need import TWO_HOSTS, need
from tests.test_end_to_end import ds_bert


@pytest.fixture(scope="package", autouse=True)
def one_thread_a_rank():
    """The order of a sum, and so its last digit, depends on the threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="package")
def job_options(tmp_path_factory, prepared, small_model) -> list:
    """Options of `ds-bert pretrain`, in a folder whose name shells could trip over."""
    folder = tmp_path_factory.mktemp("it's $HOME (*)")
    (folder / "ds config.json").write_text(json.dumps(CONFIG))
    (folder / "data set").symlink_to(prepared)
    words = ["--data", folder / "data set", "--model", small_model(0.1)]
    return [*words, "--deepspeed_config", folder / "ds config.json"]


@pytest.fixture(scope="package")
def on_one_machine(tmp_path_factory, job_options) -> list[dict]:
    """The metrics of a short run of two local ranks."""
    run = tmp_path_factory.mktemp("local") / "run"
    done = ds_bert("pretrain", *job_options, "--num-procs", 2, "--max-steps", SHORT, "--output", run)
    assert done.returncode == 0, done.stderr
    return lines(run)


@pytest.fixture(scope="session")
def ssh_hosts(tmp_path_factory):
    """Two real hosts with ssh between them; skipped without root and their programs."""
    need(*TWO_HOSTS)
    with SshHosts(tmp_path_factory.mktemp("hosts")).started() as hosts:
        yield hosts
