"""What facts about hosts mean for a job, and the command that mends what is wrong."""

import ipaddress
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from ds_bert.doctor.facts import SHARED_MEMORY, Questions
from ds_bert.doctor.memory import MemoryEstimate

THIS_HOST = "this machine"
OK, WARNING, FAILED = "ok", "warning", "failed"

# A gigabit Ethernet gives 0.93; what is slower is slower than any network that was meant for training.
SLOW_BITS_PER_S = 0.9e9
CLOCK_SKEW_S = 2.0
LITTLE_SHARED_MEMORY = 64 << 20
# Of a run folder whose model is not known: metrics, plots and checkpoints of a small one.
LITTLE_SPACE = 1 << 30
GB = 1e9


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: str
    """OK, WARNING, or FAILED: the job would fail."""
    check: str
    host: str
    """Empty: of all hosts."""
    text: str
    mend: str = ""
    """What to do, where possible a command."""


@dataclass(frozen=True)
class Report:
    """Of one host."""

    host: str
    """As the hostfile names it."""
    slots: int
    facts: dict
    arrived: float
    """This machine's time (seconds since the epoch) when the facts arrived."""


def _on(host: str, command: str) -> str:
    return command if host == THIS_HOST else f"ssh {host} {command}"


def judge(reports: list[Report], questions: Questions, memory: MemoryEstimate | None) -> Iterator[Finding]:
    """The findings about all hosts.

    Args:
        reports: in the hostfile's order; at least one.
        questions: that the facts answer.
        memory: of a rank, if the model is known.
    """
    yield from _versions(reports)
    for report in reports:
        if not report.facts["has_folder"]:
            mend = f"start from a folder that all hosts have, or: {_on(report.host, f'mkdir -p {questions.folder}')}"
            yield Finding(FAILED, "folder", report.host, f"has no {questions.folder}, where ranks would work", mend)
        if len(reports) > 1:
            yield from _own_name(report)
    if questions.port:
        yield _port(reports[0], questions.port)
    if questions.data:
        yield from _data(reports, questions.data)
    for report in reports:
        if questions.output:
            yield from _output(report, memory)
        yield from _host(report, memory)
    yield from _clocks(reports)


def _versions(reports: list[Report]) -> Iterator[Finding]:
    """That all have the versions of the first."""
    first = reports[0].facts["versions"]
    same = True
    for report in reports[1:]:
        for name, version in report.facts["versions"].items():
            if version == first[name]:
                continue
            same = False
            mend = _on(report.host, f"{sys.executable} -m pip install {name}=={first[name]}")
            if name in ("python", "ds_bert"):
                mend = f"make {report.host}'s environment as {reports[0].host}'s was made"
            # The same minor version of Python runs and pickles the same.
            minor = name == "python" and version.split(".")[:2] == first[name].split(".")[:2]
            text = f"{name} {version}, but {first[name]} on {reports[0].host}"
            yield Finding(WARNING if minor else FAILED, "versions", report.host, text, mend)
    missing = [name for name, version in first.items() if version == "missing"]
    if missing:
        mend = _on(reports[0].host, f"{sys.executable} -m pip install {' '.join(missing)}")
        yield Finding(FAILED, "versions", reports[0].host, f"{', '.join(missing)} is not installed", mend)
    elif same:
        yield Finding(OK, "versions", "", ", ".join(f"{name} {version}" for name, version in first.items()))


def _own_name(report: Report) -> Iterator[Finding]:
    name, address = report.facts["own_name"].values()
    if address is None:
        mend = f"add a line `ADDRESS {name}` to /etc/hosts of {report.host}"
        yield Finding(WARNING, "host name", report.host, f"its own name, {name}, does not resolve", mend)
    elif ipaddress.ip_address(address).is_loopback:
        text = (
            f"its own name, {name}, resolves to {address}: ds-bert names the interface and trains all the same, but "
            "torchrun and deepspeed alone wait minutes and then fail"
        )
        mend = f"in /etc/hosts of {report.host} give {name} its network address instead of {address}"
        yield Finding(WARNING, "host name", report.host, text, mend)
    else:
        yield Finding(OK, "host name", report.host, f"{name} is {address}")


def _port(first: Report, port: int) -> Finding:
    problem = first.facts["port_problem"]
    if problem:
        mend = f"end what uses it, or leave --master_port {port} out: a free one is chosen then"
        return Finding(FAILED, "port", first.host, f"{port}: {problem}", mend)
    return Finding(OK, "port", first.host, f"{port} is free")


def _data(reports: list[Report], data: str) -> Iterator[Finding]:
    good = [report for report in reports if not report.facts["data"]["problem"]]
    source = good[0].host if good else ""
    for report in reports:
        mend = f"ssh {source} rsync -a {data}/ {report.host}:{data}/" if good else ""
        found = report.facts["data"]
        if found["problem"]:
            problem, _, advice = found["problem"].partition("; ")
            yield Finding(FAILED, "data", report.host, problem, mend or advice)
        elif found["hash"] != good[0].facts["data"]["hash"]:
            text = f"{data} is not the same as on {source} ({found['hash']}, {good[0].facts['data']['hash']} there)"
            yield Finding(FAILED, "data", report.host, text, mend)
    if good and all(report.facts["data"] == good[0].facts["data"] for report in reports):
        yield Finding(OK, "data", "", f"{data}: {good[0].facts['data']['hash']}")


def _output(report: Report, memory: MemoryEstimate | None) -> Iterator[Finding]:
    found = report.facts["output"]
    folder, free = found["folder"], f"{found['free'] / GB:.1f} GB free"
    # Two: the old checkpoint is kept until the new one is whole.
    need = 2 * memory.checkpoint if memory else LITTLE_SPACE
    mend = f"make room there ({_on(report.host, f'df -h {folder}')}), or name another --output"
    if found["problem"] == "full":
        yield Finding(FAILED, "output", report.host, f"{folder} is full ({free})", mend)
    elif found["problem"]:
        text = f"{folder} cannot be written: {found['problem']}"
        yield Finding(
            FAILED, "output", report.host, text, _on(report.host, f"ls -ld {folder}") + ", and chown or chmod it"
        )
    elif found["free"] < need:
        level = FAILED if memory else WARNING
        what = "two checkpoints of this model" if memory else "checkpoints of a small model"
        yield Finding(level, "output", report.host, f"{folder} has {free}; {what} need {need / GB:.1f} GB", mend)
    else:
        yield Finding(OK, "output", report.host, f"{folder}: {free}")


def _host(report: Report, memory: MemoryEstimate | None) -> Iterator[Finding]:
    facts, host = report.facts, report.host
    if facts["shared_memory"] is not None and facts["shared_memory"] < LITTLE_SHARED_MEMORY:
        text = f"{SHARED_MEMORY} has {facts['shared_memory'] / 1e6:.0f} MB left, which NCCL and data workers fill"
        mend = f"mount -o remount,size=8G {SHARED_MEMORY}, or a container with --shm-size=8g"
        yield Finding(WARNING, "shared memory", host, text, mend)
    names = sorted({gpu["name"] for gpu in facts["gpus"]})
    if facts["gpus"] and len(facts["gpus"]) < report.slots:
        mend = f"write slots={len(facts['gpus'])} for {host} in the hostfile"
        yield Finding(FAILED, "devices", host, f"{report.slots} slots, but {len(facts['gpus'])} GPUs", mend)
    else:
        what = f"{len(facts['gpus'])} x {', '.join(names)}" if names else "no GPU: trains on the CPU"
        yield Finding(OK, "devices", host, what)
    if facts["ops_problem"]:
        mend = "install a C++ compiler (and for GPUs nvcc); until then training goes on with torch's own Adam"
        yield Finding(WARNING, "compiled ops", host, facts["ops_problem"], mend)
    if memory:
        yield _memory(report, memory)


def _memory(report: Report, memory: MemoryEstimate) -> Finding:
    facts = report.facts
    there = min(gpu["memory"] for gpu in facts["gpus"]) if facts["gpus"] else facts["memory"] / report.slots
    text = (
        f"about {memory.total / GB:.1f} GB a rank ({memory.parameters / 1e6:.0f} million parameters "
        f"{memory.states / GB:.1f}, activations {memory.activations / GB:.1f}), {there / GB:.1f} GB there"
    )
    if memory.total < 0.9 * there:
        return Finding(OK, "memory", report.host, text)
    mend = (
        'a smaller train_micro_batch_size_per_gpu, "zero_optimization": {"stage": 1}, or '
        '"ds_bert": {"execution": {"gradient_checkpointing": true}}'
    )
    return Finding(FAILED if memory.states > there else WARNING, "memory", report.host, text, mend)


def _clocks(reports: list[Report]) -> Iterator[Finding]:
    ahead = [report.facts["time"] - report.arrived for report in reports]
    for report, skew in zip(reports, ahead, strict=True):
        if abs(skew) > CLOCK_SKEW_S:
            side = "ahead of" if skew > 0 else "behind"
            text = f"its clock is {abs(skew):.0f} s {side} this machine's: logs and file times mislead"
            yield Finding(WARNING, "clock", report.host, text, _on(report.host, "timedatectl set-ntp true"))
    if all(abs(skew) <= CLOCK_SKEW_S for skew in ahead) and len(reports) > 1:
        yield Finding(OK, "clock", "", f"within {CLOCK_SKEW_S:g} s of this machine's")


def judge_exchange(answer: dict, *, hosts: int, output: str | None) -> Iterator[Finding]:
    """The findings of what ranks saw together.

    Args:
        answer: of `exchange`.
        hosts: number of them.
        output: as the user gave it.
    """
    if answer["ranks"] == 1:
        yield Finding(OK, "all-reduce", "", "one rank: nothing to exchange")
        return
    speed, latency = answer["bits_per_s"], answer["latency_s"]
    text = f"{speed / 1e9:.2f} Gbit/s for 64 MB, {1e6 * latency:.0f} us for 1 KB, over {answer['interface']}"
    if hosts > 1 and speed < SLOW_BITS_PER_S:
        mend = (
            f"look at the link (ethtool {answer['interface']}), or name a faster interface: "
            "GLOO_SOCKET_IFNAME=NAME NCCL_SOCKET_IFNAME=NAME ds-bert ..."
        )
        yield Finding(WARNING, "all-reduce", "", f"slow network: {text}", mend)
    else:
        yield Finding(OK, "all-reduce", "", text)
    if hosts == 1 or not output:
        return
    if answer["unseen"]:
        text = f"{output} is not the same folder as on the first host; checkpoints need a shared one to be resumed from"
        yield Finding(
            FAILED, "shared output", ", ".join(answer["unseen"]), text, "name an --output on a shared file system"
        )
    else:
        yield Finding(OK, "shared output", "", "the same folder on all hosts")
