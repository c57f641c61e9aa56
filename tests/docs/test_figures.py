"""Figures in README and docs are those of the recorded results."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
THROUGHPUT = json.loads((ROOT / "benchmarks/results/throughput.json").read_text())["results"]
SYSTEMS = ["HF Trainer + DeepSpeed", "HF Trainer, group_by_length", "ds_bert padded", "ds_bert packed"]


def tokens_per_s(job: str, system: str) -> float:
    return THROUGHPUT[job]["systems"][system]["real_tokens_per_s"]


@pytest.mark.parametrize("job", THROUGHPUT)
def test_the_table_of_packed_execution_is_the_recorded_one(job):
    rates = [tokens_per_s(job, system) for system in SYSTEMS]
    model = ", ".join(job.split(", ")[:2])
    row = " | ".join([f"| {model}", *[f"{rate:,.0f}" for rate in rates], f"{rates[3] / rates[0]:.2f} |"])
    assert row in (ROOT / "docs/execution.md").read_text()


def test_readmes_factors_of_packed_execution_are_the_recorded_ones():
    text = " ".join((ROOT / "README.md").read_text().split())
    found = re.search(
        r"([\d.]+) times \(fp32\) and ([\d.]+) times \(bf16\) the tokens a second of HF Trainer \+ DeepSpeed, "
        r"([\d.]+) and ([\d.]+) times with `group_by_length`",
        text,
    )
    jobs = [job for job in THROUGHPUT if job.startswith("mini")]
    factors = [tokens_per_s(job, SYSTEMS[3]) / tokens_per_s(job, other) for other in SYSTEMS[:2] for job in jobs]
    assert found
    assert list(found.groups()) == [f"{factor:.1f}" for factor in factors]


@pytest.mark.parametrize("page", ["README.md", *[f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")]])
def test_links_lead_somewhere(page):
    folder = (ROOT / page).parent
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", (ROOT / page).read_text())
    missing = [link for link in links if "://" not in link and not (folder / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", ["README.md", *[f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")]])
def test_tests_and_files_that_a_page_names_exist(page):
    named = re.findall(r"`((?:tests|benchmarks|launch|ds_configs)/[\w/.]+\.(?:py|sh|json))`", (ROOT / page).read_text())
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


def test_readmes_factors_of_balance_and_of_overlap_are_the_recorded_ones():
    text = (ROOT / "README.md").read_text()
    balance = json.loads((ROOT / "benchmarks/results/balance.json").read_text())["strategies"]
    balanced, random = (balance[name]["packed"]["max_over_mean"] for name in ("balanced", "random"))
    assert f"the slowest rank does {balanced:.3f} instead of {random:.1f} times the mean work" in text
    network = (ROOT / "benchmarks/results/overlap.md").read_text().split("## 2 ranks, 1 Gbit/s")[1].split("##")[0]
    steps = dict(re.findall(r"^\| ([\w ]+) \| (\d+) \|", network, re.M))
    factor = int(steps["DeepSpeed stage 0"]) / int(steps["ds_bert stage 0"])
    assert f"{factor:.2f} times the steps per second of DeepSpeed stage 0" in text


@pytest.mark.parametrize("page", ["README.md", *[f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")]])
def test_no_line_of_prose_is_longer_than_120_columns(page):
    prose = re.sub(r"^ *```.*?^ *```", "", (ROOT / page).read_text(), flags=re.M | re.S)
    assert [line for line in prose.splitlines() if len(line) > 120 and not line.startswith("|")] == []
