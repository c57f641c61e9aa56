"""Asking all hosts, and trying them together."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace

from ds_bert.cluster.launching.hostfile import Host
from ds_bert.cluster.launching.launch import start
from ds_bert.cluster.launching.machines import Machines
from ds_bert.cluster.network.ssh import on_all, remote_python, run_on
from ds_bert.doctor.exchange import ANSWER
from ds_bert.doctor.facts import Questions
from ds_bert.doctor.findings import FAILED, OK, THIS_HOST, Finding, Report, judge, judge_exchange
from ds_bert.doctor.memory import MemoryEstimate
from ds_bert.errors import UserError, last_line

# Compiling DeepSpeed's ops takes minutes on some machines.
FACTS_TIMEOUT_S = 600.0
EXCHANGE_TIMEOUT_S = 30.0


def examine(machines: Machines, questions: Questions, memory: MemoryEstimate | None) -> Iterator[Finding]:
    """Examine the machines of a job.

    Args:
        machines: of the job.
        questions: about each.
        memory: of a rank, if the model is known.
    """
    hosts = machines.hosts or (Host(THIS_HOST, tuple(range(machines.num_procs))),)
    reports = []
    for answer in on_all(hosts, lambda host: _ask(host, questions)):
        if isinstance(answer, Finding):
            yield answer
        else:
            reports.append(answer)
            if machines.hosts:
                yield Finding(OK, "ssh", answer.host, "logs in without a question")
    if reports:
        yield from judge(reports, questions, memory)
    if len(reports) < len(hosts):
        mend = "mend the hosts above first"
        yield Finding(FAILED, "all-reduce", "", "not tried: it needs all hosts", mend)
    else:
        yield from _exchange(machines, questions.output)


def _ask(host: Host, questions: Questions) -> Report | Finding:
    words = ["-m", "ds_bert.doctor.facts", questions.encode()]
    try:
        if host.name == THIS_HOST:
            done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
        else:
            done = run_on(host.name, remote_python(words), FACTS_TIMEOUT_S)
    except UserError as error:
        text, _, mend = str(error).removeprefix(f"{host.name}: ").partition("; ")
        return Finding(FAILED, "ssh", host.name, text, mend)
    arrived = time.time()
    if done.returncode:
        text = f"{sys.executable} with ds_bert does not run there ({last_line(done.stderr)})"
        return Finding(FAILED, "python", host.name, text, "make the same environment at the same path there")
    return Report(host.name, len(host.slots), json.loads(done.stdout.splitlines()[-1]), arrived)


def _exchange(machines: Machines, output: str | None) -> Iterator[Finding]:
    # The port the user names may be in use, which has been said.
    machines = replace(machines, master_port=None, timeout_s=min(machines.timeout_s, EXCHANGE_TIMEOUT_S))
    arguments = [output] if output else []
    try:
        with (
            tempfile.TemporaryFile("w+", errors="replace") as said,
            start("ds-bert doctor", "ds_bert.doctor.exchange", arguments, machines, output=said) as job,
        ):
            job.wait()
            said.seek(0)
            text = said.read()
    except UserError as error:
        yield Finding(FAILED, "all-reduce", "", str(error))
        return
    answers = [line.removeprefix(ANSWER) for line in text.splitlines() if line.startswith(ANSWER)]
    if answers:
        yield from judge_exchange(json.loads(answers[0]), hosts=len(machines.hosts) or 1, output=output)
        return
    reason = job.outcome.failure.line() if job.outcome and job.outcome.failure else last_line(text)
    mend = "let the hosts reach each other's TCP ports (a firewall?), over the interface named above"
    yield Finding(FAILED, "all-reduce", "", f"no all-reduce came about: {reason}", mend)
