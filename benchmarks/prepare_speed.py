"""How fast is `ds-bert prepare`, against `datasets.map` with the same tokenizer, and how much memory does it take?

Both turn the same text into token ids on disk, in as many processes. `datasets.map` starts from an Arrow table of
the documents, made beforehand and not timed, and stores the ids of each document, cut to 512 tokens; `prepare` starts
from the text file, reads it twice (once to choose the held-out documents) and writes packed samples with their
lengths. The text is real: the docstrings of the installed Python packages, repeated as a whole where `--size-mb` asks
for more than there is.

    python benchmarks/prepare_speed.py --size-mb 100 --repeats 5 --json
    python benchmarks/prepare_speed.py --size-mb 1000 --repeats 1 --learn --json
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path

import datasets
import psutil
from record import RESULTS, setting, setting_lines, write

from ds_bert.data import PreparedData, PrepareSettings, load_tokenizer
from ds_bert.data.preparing.documents import read_documents
from ds_bert.data.preparing.prepare import prepare
from ds_bert.data.preparing.processes import available_cores

_DOCSTRING = re.compile(r'"""(.{100,}?)"""', re.DOTALL)


def write_docstrings(path: Path, size_mb: int) -> float:
    """Write `size_mb` MB of text, a document for each docstring; returns the MB before the first repetition."""
    limit = size_mb * 1_000_000
    written = unrepeated = 0
    with open(path, "w", encoding="utf-8") as file:
        while written < limit:
            for source in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
                for docstring in _DOCSTRING.findall(source.read_text(encoding="utf-8", errors="ignore")):
                    lines = [line for line in docstring.split("\n") if line.strip()]
                    file.write("\n".join(lines) + "\n\n")
                written = file.tell()
                if written >= limit:
                    break
            unrepeated = unrepeated or written
    return unrepeated / 1e6


class PeakMemory:
    """Peak of the summed memory of this process and all its children, in MB, sampled 10 times a second.

    Proportional set size where the system tells it (shared pages count once), else resident set size.
    """

    def __enter__(self) -> "PeakMemory":
        self.peak_mb = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        this = psutil.Process()
        while not self._stop.wait(0.1):
            total = 0
            for process in [this, *this.children(recursive=True)]:
                try:
                    info = process.memory_full_info()
                except psutil.Error:
                    continue
                total += getattr(info, "pss", info.rss)
            self.peak_mb = max(self.peak_mb, total / 1e6)


def time_prepare(text: Path, output: Path, tokenizer: Path | None, num_workers: int) -> tuple[float, float]:
    """Seconds and peak MB of one run, in a process of its own like a user's."""
    command = [sys.executable, "-m", "ds_bert.cli.main", "prepare", "--input", str(text), "--output", str(output)]
    command += ["--tokenizer", str(tokenizer)] if tokenizer else []
    start = time.perf_counter()
    before = psutil.Process().memory_full_info()
    with PeakMemory() as memory:
        subprocess.run([*command, "--num-workers", str(num_workers)], check=True, stdout=subprocess.DEVNULL)
    own = getattr(before, "pss", before.rss) / 1e6
    return time.perf_counter() - start, memory.peak_mb - own


def time_datasets_map(table: Path, output: Path, tokenizer: Path, num_workers: int) -> float:
    """Seconds of the usual way: `map` in batches over a table of documents."""
    loaded = datasets.load_from_disk(str(table))
    fast = load_tokenizer(tokenizer)

    def encode(batch):
        ids = fast(batch["text"], truncation=True, max_length=512)
        return {"input_ids": ids["input_ids"]}

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    start = time.perf_counter()
    loaded.map(
        encode,
        batched=True,
        num_proc=num_workers,
        remove_columns=["text"],
        load_from_cache_file=False,
        cache_file_name=str(output / "map.arrow"),
    )
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mb", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5, help="of both, one after the other in turn")
    parser.add_argument("--learn", action="store_true", help="only prepare, learning its tokenizer: time and memory")
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/prepare_speed.json and .md")
    parser.add_argument("--folder", type=Path, help="for temporary files")
    args = parser.parse_args()
    datasets.disable_progress_bars()
    num_workers = available_cores()
    work = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        run = measure(work, args, num_workers)
    finally:
        shutil.rmtree(work)
    print(json.dumps(run, indent=2))
    if args.json:
        record(run, "learn" if args.learn else "compare")


def measure(work: Path, args: argparse.Namespace, num_workers: int) -> dict:
    text = work / "text.txt"
    unrepeated_mb = write_docstrings(text, args.size_mb)
    size_mb = text.stat().st_size / 1e6
    run = {
        **setting("tokenizers", "transformers", "datasets", "pyarrow", "numpy"),
        "text_mb": round(size_mb, 1),
        "unrepeated_mb": round(unrepeated_mb, 1),
        "processes": num_workers,
    }
    if args.learn:
        runs = [time_prepare(text, work / f"out{i}", None, num_workers) for i in range(args.repeats)]
        manifest = PreparedData(work / "out0").manifest
        run["vocab_size"] = manifest["vocab_size"]
        run["tokens"] = sum(part["tokens"] for part in manifest["parts"].values())
    else:
        small = work / "small.txt"
        write_docstrings(small, 20)
        prepare([small], work / "learnt", PrepareSettings(), report=lambda line: None, show_progress=False)
        tokenizer = work / "learnt" / "tokenizer"
        datasets.Dataset.from_generator(
            lambda: ({"text": piece.text} for piece in read_documents([text])), cache_dir=str(work / "cache")
        ).save_to_disk(str(work / "table"))
        runs, map_seconds = [], []
        for i in range(args.repeats):
            runs.append(time_prepare(text, work / f"out{i}", tokenizer, num_workers))
            map_seconds.append(time_datasets_map(work / "table", work, tokenizer, num_workers))
            shutil.rmtree(work / f"out{i}")
        run["datasets_map_mb_per_s"] = [round(size_mb / seconds, 2) for seconds in map_seconds]
        pairs = zip(map_seconds, runs, strict=True)
        run["ratio"] = [round(map_s / prepare_s, 2) for map_s, (prepare_s, _) in pairs]
    run["prepare_mb_per_s"] = [round(size_mb / seconds, 2) for seconds, _ in runs]
    run["prepare_peak_mb"] = [round(peak_mb) for _, peak_mb in runs]
    return run


def record(run: dict, kind: str) -> None:
    """Add a run to the recorded results, in place of the last one of its kind."""
    path = RESULTS / "prepare_speed.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    results[kind] = run
    write("prepare_speed", results, _report(results))


def _report(results: dict) -> list[str]:
    lines = ["# Is `ds-bert prepare` as fast as `datasets.map`, and how much memory does it take?", ""]
    if run := results.get("compare"):
        lines += [
            f"With a given tokenizer it is {statistics.median(run['ratio'])} times as fast (median; whole command, "
            "start and both readings included).",
            "",
            "| MB of text/s | median | smallest | largest |",
            "| --- | --- | --- | --- |",
            _row("`ds-bert prepare`", run["prepare_mb_per_s"]),
            _row("`datasets.map(batched=True)`", run["datasets_map_mb_per_s"]),
            _row("ratio, each pair of runs", run["ratio"]),
            "",
            f"{len(run['ratio'])} runs of each in turn, {run['text_mb']} MB (repeating after "
            f"{run['unrepeated_mb']} MB), "
            f"{run['processes']} processes. Peak memory of prepare, all its processes: "
            f"{max(run['prepare_peak_mb'])} MB.",
            *setting_lines(run),
        ]
    if run := results.get("learn"):
        lines += [
            "",
            f"## {run['text_mb']:,.0f} MB of text, tokenizer learnt",
            "",
            f"{statistics.median(run['prepare_mb_per_s'])} MB/s (median of {len(run['prepare_mb_per_s'])}), "
            f"{run['tokens']:,} tokens, vocabulary {run['vocab_size']:,}. Peak memory, all its processes: "
            f"**{max(run['prepare_peak_mb'])} MB**. The text repeats after {run['unrepeated_mb']} MB.",
            *setting_lines(run),
        ]
    return lines


def _row(label: str, values: list[float]) -> str:
    return f"| {label} | {statistics.median(values):.2f} | {min(values):.2f} | {max(values):.2f} |"


if __name__ == "__main__":
    main()
