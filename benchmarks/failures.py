"""How long does it take until everything on two hosts has ended after something fails on one, and what is said?

Two real hosts on this machine (root, iproute2, openssh-server): a rank trains on each, and is made to fail in several
ways, with ds-bert's own timeout.

    ds-bert prepare --input corpus.txt --output data --vocab-size 4096 --max-length 64
    python benchmarks/failures.py --data data --json
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from record import setting, setting_lines, write
from ssh_hosts import SshHosts

from ds_bert.cluster.supervision.protocol import DEFAULT_TIMEOUT_S

CONFIG = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}}
WAIT_S = 120


def kill_a_rank(hosts: SshHosts, command) -> None:
    hosts.rank(1).kill()


def stop_a_rank(hosts: SshHosts, command) -> None:
    hosts.rank(1).suspend()


def cut_the_cable(hosts: SshHosts, command) -> None:
    hosts.cut()


def terminate(hosts: SshHosts, command) -> None:
    command.send_signal(signal.SIGTERM)


def kill_the_command(hosts: SshHosts, command) -> None:
    command.kill()


def measure(hosts: SshHosts, data: Path, fail) -> dict:
    """Train, fail, and wait for the end of all."""
    with tempfile.TemporaryDirectory() as folder:
        run, config, said = Path(folder) / "run", Path(folder) / "config.json", Path(folder) / "said.txt"
        config.write_text(json.dumps(CONFIG))
        words = ["pretrain", "--data", data, "--model", "tiny", "--deepspeed_config", config, "--output", run]
        words += ["--hostfile", hosts.hostfile, "--max-steps", 100_000, "--save-interval", 1000]
        with said.open("w") as output:
            command = hosts.start(
                0, [sys.executable, "-m", "ds_bert.cli.main", *words], stdout=output, stderr=output,
                env={"PYTHONPATH": os.getcwd()},
            )  # fmt: skip
        while not (run / "metrics.jsonl").is_file() or (run / "metrics.jsonl").read_bytes().count(b"\n") < 20:
            assert command.poll() is None, said.read_text()
            time.sleep(0.1)
        started = time.monotonic()
        fail(hosts, command)
        code = command.wait(timeout=WAIT_S)
        command_s = time.monotonic() - started
        left = hosts.wait_until_empty(WAIT_S)
        all_s = time.monotonic() - started
        hosts.mend()
        last_line = said.read_text().strip().splitlines()[-1]
    return {"exit_code": code, "command_s": command_s, "all_s": all_s, "left": left, "last_line": last_line}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/failures.json and .md")
    args = parser.parse_args()
    where, found = setting("torch", "deepspeed"), {}
    with tempfile.TemporaryDirectory() as folder, SshHosts(Path(folder)).started() as hosts:
        for fail in (kill_a_rank, stop_a_rank, cut_the_cable, terminate, kill_the_command):
            name = fail.__name__.replace("_", " ")
            found[name] = measure(hosts, args.data.absolute(), fail)
            print(name, found[name], flush=True)
    lines = [
        "# Until everything on two hosts has ended",
        "",
        f"A rank on each of two hosts, training the tiny model; `--failure-timeout` is the default, "
        f"{DEFAULT_TIMEOUT_S:g} s. Seconds from the failure to the command's end, and to the last process's end.",
        "",
        "| failure | command ended | all ended | exit code | last line |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {name} | {one['command_s']:.1f} | {one['all_s']:.1f} | {one['exit_code']} | {one['last_line']} |"
            for name, one in found.items()
        ),
        *setting_lines(where),
    ]
    print("\n".join(lines))
    if args.json:
        write("failures", {**where, "failures": found}, lines)


if __name__ == "__main__":
    main()
