"""A whole training job of some ranks on this machine, and what it measured: what the benchmarks of jobs share."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ds_bert.cluster.launching.launchers import launcher_command
from ds_bert.cluster.network.interface import free_port
from ds_bert.data.preparing.processes import available_cores
from ds_bert.modeling import PRESETS, architecture
from ds_bert.training.metrics import read_metrics

PRETRAIN = ("--module", "ds_bert.training.pretrain")
# bf16 weights, with fp32 master weights in DeepSpeed's optimizer.
PRECISIONS = {
    "fp32": {"zero_optimization": {"stage": 0}},
    "bf16": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
}


class Job:
    """Starts a job; `wait` gives its result.

    Args:
        data: prepared data.
        model: a preset, with `vocabulary` entries or as many as the data's tokenizer, or a Hugging Face name.
        config: the DeepSpeed configuration.
        ranks, steps: of the job.
        program: what the deepspeed launcher starts on each rank, if not ours.
        arguments: further ones for the program.
        cores: to stay on; None for all.
    """

    def __init__(
        self,
        data: Path,
        model: str,
        config: dict,
        *,
        ranks: int,
        steps: int,
        vocabulary: int | None = None,
        program: Sequence[str | Path] = PRETRAIN,
        arguments: Sequence[str | int] = (),
        cores: set[int] | None = None,
    ) -> None:
        self._temporary = tempfile.TemporaryDirectory()
        self.folder = folder = Path(self._temporary.name)
        (folder / "ds_config.json").write_text(json.dumps(config))
        if vocabulary and model in PRESETS:
            architecture(model, vocab_size=vocabulary).save_pretrained(folder / "model")
            model = folder / "model"
        command = [*launcher_command(free_port(), [f"--num_gpus={ranks}"]), *program, *arguments]
        command += ["--data", data, "--model", model, "--max-steps", steps, "--output", folder / "run"]
        command += ["--deepspeed_config", folder / "ds_config.json"]
        # As `ds-bert pretrain` shares the cores out; the Trainer alone would give each rank all of them.
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads(ranks, len(cores or ()) or None))}
        affinity = (lambda: os.sched_setaffinity(0, cores)) if cores else None
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                list(map(str, command)), stdout=log, stderr=log, env=environment, preexec_fn=affinity
            )

    def wait(self) -> tuple[list[dict], float]:
        """The metrics lines of its steps, and the peak resident memory of its largest process, in MB."""
        with self._temporary:
            _, status, usage = os.wait4(self.process.pid, 0)
            if status:
                sys.exit(f"{' '.join(self.process.args)} failed:\n{(self.folder / 'log').read_text()[-3000:]}")
            lines = [line for line in read_metrics(self.folder / "run") if "real_tokens_per_s" in line]
        return lines, usage.ru_maxrss / 1024


def threads(ranks: int, cores: int | None = None) -> int:
    """Of each rank."""
    return max(1, (cores or available_cores()) // ranks)
