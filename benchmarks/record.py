"""Where and with what a benchmark was run: the same lines under every recorded result."""

import json
import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import psutil

from ds_bert.data.preparing.processes import available_cores

RESULTS = Path(__file__).parent / "results"


def setting(*libraries: str) -> dict:
    """The command, the machine and its load, versions and commit; call it before the work starts."""
    here = Path(__file__).parent
    git = ["git", "-C", str(here), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False)
    return {
        "command": " ".join(["python", f"{here.name}/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "machine": f"{_cpu_name()}, {available_cores()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB",
        "load_before": round(os.getloadavg()[0], 1),
        "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in libraries},
        "commit": commit.stdout.strip(),
    }


def setting_lines(run: dict) -> list[str]:
    """`setting()` as the lines of a Markdown file."""
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    where = f"{run['machine']}, load average {run['load_before']} before the start"
    return ["", f"    {run['command']}", "", f"{where}; {versions}; commit {run['commit']}."]


def write(name: str, results: dict, lines: list[str]) -> None:
    """Write results/NAME.json and NAME.md."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    end = ["", f"Raw numbers: [{name}.json]({name}.json). How: see the head of the script."]
    (RESULTS / f"{name}.md").write_text("\n".join([*lines, *end]) + "\n")


def _cpu_name() -> str:
    try:
        return re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()).group(1)
    except (OSError, AttributeError):
        return platform.processor() or platform.machine()
