"""`ds-bert doctor` over two real hosts: it passes healthy ones, and names each fault that was put in."""

import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM
from two_hosts import set_rate

from ds_bert.config import DsBertConfig
from ds_bert.doctor.memory import estimate_memory
from tests.cluster.job_runs import CONFIG

LISTEN = "import socket, time; s = socket.create_server(('', 29871)); print('listens', flush=True); time.sleep(600)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("doctor")


@pytest.fixture(scope="module")
def job(folder, prepared, small_model) -> list:
    (folder / "ds.json").write_text(json.dumps(CONFIG))
    (folder / "runs").mkdir()
    words = ["--data", prepared, "--model", small_model(0.1), "--deepspeed_config", folder / "ds.json"]
    return [*words, "--output", folder / "runs" / "new"]


def examine(hosts, *words, **options) -> tuple[int, list[dict]]:
    done = hosts.ds_bert("doctor", *words, "--json", **options)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] == (done.returncode == 0)
    return done.returncode, report["findings"]


def of(findings: list[dict], level: str) -> dict[tuple[str, str], str]:
    return {(one["check"], one["host"]): one["text"] for one in findings if one["level"] == level}


def test_a_healthy_pair_passes(ssh_hosts, job):
    code, findings = examine(ssh_hosts, "--hostfile", ssh_hosts.hostfile, *job)
    assert code == 0
    assert {one["level"] for one in findings} == {"ok"}, findings
    good = of(findings, "ok")
    assert good["host name", "node-b"] == "node-b is 10.78.0.2"
    assert "over eth0" in good["all-reduce", ""]
    assert f"deepspeed {importlib.metadata.version('deepspeed')}" in good["versions", ""]
    assert good["shared output", ""] == "the same folder on all hosts"
    assert "million parameters" in good["memory", "node-b"]
    assert ssh_hosts.wait_until_empty(5) == []


@contextlib.contextmanager
def mounted(hosts, node: int, *mounts: list):
    """While mounts lie over files and folders of one host alone."""
    inside = ["nsenter", "-t", hosts.sshd_pid(node), "-m", "--"]
    done = []
    try:
        for mount in mounts:
            subprocess.run([*inside, "mount", *map(str, mount)], check=True)
            done.append(mount[-1])
        yield inside
    finally:
        for target in reversed(done):
            subprocess.run([*inside, "umount", str(target)], check=True)


def test_each_fault_has_its_own_message(ssh_hosts, job, folder, prepared):
    installed = importlib.metadata.version("deepspeed")
    metadata = importlib.metadata.distribution("deepspeed")._path / "METADATA"
    (folder / "METADATA").write_text(metadata.read_text().replace(f"Version: {installed}", "Version: 0.1.2", 1))
    (folder / "hosts").write_text("127.0.0.1 localhost node-b\n10.78.0.1 node-a\n")
    (folder / "work" / "here").mkdir(parents=True)
    there = {"cwd": folder / "work" / "here", "env": {"PYTHONPATH": os.getcwd()}}
    mounts = [
        ["-t", "tmpfs", "tmpfs", folder / "work"],
        ["--bind", folder / "METADATA", metadata],
        ["--bind", folder / "hosts", "/etc/hosts"],
        ["-t", "tmpfs", "tmpfs", prepared],
        ["-t", "tmpfs", "-o", "size=1m", "tmpfs", folder / "runs"],
    ]
    user = ssh_hosts.start(0, [sys.executable, "-c", LISTEN], stdout=subprocess.PIPE, text=True)
    assert user.stdout.readline() == "listens\n"
    try:
        with mounted(ssh_hosts, 1, *mounts):
            words = ["--hostfile", ssh_hosts.hostfile, *job, "--master_port", 29871]
            code, findings = examine(ssh_hosts, *words, **there)
            words = ["pretrain", "--hostfile", ssh_hosts.hostfile, *job, "--max-steps", 1]
            training = ssh_hosts.ds_bert(*words, **there, timeout=50)
    finally:
        user.kill()
        user.wait()
    assert code == 1
    failed = of(findings, "failed")
    assert failed["versions", "node-b"] == f"deepspeed 0.1.2, but {installed} on node-a"
    assert failed["data", "node-b"].startswith(f"{prepared} is not prepared data")
    assert failed["output", "node-b"].startswith(f"{folder}/runs")
    assert "is full" in failed["output", "node-b"]
    assert failed["port", "node-a"].startswith("29871: Address already in use: by process")
    assert "node-b, resolves to 127.0.0.1" in of(findings, "warning")["host name", "node-b"]
    assert failed["folder", "node-b"] == f"has no {folder}/work/here, where ranks would work"
    mends = {one["check"]: one["mend"] for one in findings if one["level"] == "failed"}
    assert f"pip install deepspeed=={installed}" in mends["versions"]
    said = "rank 1 on node-b failed first: the launcher on its host ended (exit code 1); what it said is above"
    assert said in failed["all-reduce", ""]
    assert training.stderr.splitlines()[-1] == f"ds-bert pretrain: error: {said}"
    assert f"No such file or directory: '{folder}/work/here'" in training.stderr + training.stdout
    assert mends["data"] == f"ssh node-a rsync -a {prepared}/ node-b:{prepared}/"


@pytest.mark.parametrize(
    ("config", "bytes_a_parameter", "wide"),
    [
        ({}, 4 + 4 + 8, 2),
        ({"zero_optimization": {"stage": 1}}, 4 + 4 + 8 / 4, 2),
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}, 2 + 2 / 4 + 12 / 4, 1),
    ],
)
def test_the_estimate_of_memory_is_the_documented_one(config, bytes_a_parameter, wide):
    with torch.device("meta"):
        model = BertForMaskedLM(BertConfig())
    # Embeddings, 12 layers, the head's transform and its bias, as counted by hand for BERT base.
    layer = 4 * (768 * 768 + 768) + 2 * 768 * 3072 + 3072 + 768 + 4 * 768
    parameters = (30522 + 512 + 2 + 2) * 768 + 12 * layer + 768 * 768 + 3 * 768 + 30522
    found = estimate_memory(model, config, DsBertConfig(), tokens=1000, world_size=4)
    assert found.parameters == parameters
    assert found.states == pytest.approx(bytes_a_parameter * parameters)
    assert found.activations == pytest.approx(12 * 34 * wide * 1000 * 768 + 2 * 4 * 150 * 30522)


def test_a_slow_cable_and_a_folder_that_is_not_shared(ssh_hosts, folder):
    set_rate("100mbit")
    try:
        with mounted(ssh_hosts, 1, ["-t", "tmpfs", "tmpfs", folder]):
            code, findings = examine(ssh_hosts, "--hostfile", ssh_hosts.hostfile, "--output", folder / "run")
    finally:
        set_rate(None)
    assert code == 1
    assert list(of(findings, "failed")) == [("shared output", "node-b")]
    text = of(findings, "warning")["all-reduce", ""]
    assert 0.07 < float(text.removeprefix("slow network: ").split()[0]) < 0.11, text


def test_a_host_that_refuses_ssh_is_named(ssh_hosts, folder):
    hostfile = folder / "hostfile"
    hostfile.write_text("node-a slots=1\nnode-c slots=1\n")
    code, findings = examine(ssh_hosts, "--hostfile", hostfile)
    assert code == 1
    failed = of(findings, "failed")
    assert "cannot log in over ssh without a question" in failed["ssh", "node-c"]
    assert "Connection refused" in failed["ssh", "node-c"]
    assert failed["all-reduce", ""] == "not tried: it needs all hosts"


def test_this_machine_alone_is_examined_without_ssh():
    done = subprocess.run(
        [sys.executable, "-m", "ds_bert.cli.main", "doctor", "--num-procs", "2"],
        capture_output=True, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("The job can run. 0 failed")
    assert "over lo" in done.stdout
