"""Checkpoints that are whole or not there: DeepSpeed writes them, a manifest written last commits them.

A run folder holds one folder `global_stepN` for each checkpoint. Its `ds_bert_checkpoint.json` is written after all
ranks have saved and lists every file with size and CRC-32; a folder without it is a torn save and never used.
DeepSpeed's files are pickles: load them from your own runs only.
"""

import contextlib
import glob
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from ds_bert.agreement import first_problem, gather, on_first_rank, rank_and_world, together
from ds_bert.errors import UserError, first_line, last_line
from ds_bert.files import write_atomically

MANIFEST = "ds_bert_checkpoint.json"
CLIENT_STATE = "ds_bert"
UNIVERSAL = "universal_checkpoint"
TAG = re.compile(r"global_step(\d+)")
READ_BYTES = 1 << 20

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint folder of a run."""

    folder: Path
    step: int
    manifest: dict | None
    """None if the save was never completed."""

    @property
    def tag(self) -> str:
        return self.folder.name

    def problem(self, *, share: int = 0, of: int = 1) -> str | None:
        """What is wrong with the files as this process sees them, or None.

        Args:
            share, of: compare the contents of every `of`-th file from the `share`-th; the sizes of all.
        """
        if self.manifest is None:
            return f"{self.folder} was not completely saved (it has no {MANIFEST})"
        for position, (name, (size, crc)) in enumerate(sorted(self.manifest["files"].items())):
            path = self.folder / name
            if not path.is_file():
                return f"{path} is missing"
            if path.stat().st_size != size:
                return f"{path} is damaged: it has {path.stat().st_size} bytes instead of {size}"
            if position % of == share and _crc32(path) != crc:
                return f"{path} is damaged: its contents do not match the checksum"
        return None


def list_checkpoints(run_folder: Path) -> list[Checkpoint]:
    """The checkpoints of a run, torn ones included, newest first."""
    found = []
    for folder in run_folder.glob("global_step*") if run_folder.is_dir() else ():
        match = TAG.fullmatch(folder.name)
        if match and folder.is_dir():
            found.append(Checkpoint(folder, int(match[1]), _read_manifest(folder)))
    return sorted(found, key=lambda checkpoint: -checkpoint.step)


def _read_manifest(folder: Path) -> dict | None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return manifest if isinstance(manifest, dict) and {"files", "world_size", "step"} <= manifest.keys() else None
    except (OSError, ValueError):
        return None


def choose_checkpoint(run_folder: Path, resume: str) -> Checkpoint | None:
    """The checkpoint to go on from, the same on all ranks. A collective call.

    Args:
        run_folder: where the run keeps its checkpoints.
        resume: "auto" for the newest whole one, "never", or a tag such as "global_step100".

    Returns:
        None to start from step 0: with "never", or with "auto" if no save of this run was ever completed.

    Raises:
        UserError: the tag does not exist or is damaged (the newest whole one is named), or every completed checkpoint
            is damaged.
    """
    if resume == "never":
        return None
    found = on_first_rank(lambda: list_checkpoints(run_folder))
    if resume != "auto":
        chosen = [checkpoint for checkpoint in found if checkpoint.tag == resume]
        problem = _problem_anywhere(chosen[0]) if chosen else f"{run_folder} has no checkpoint {resume}"
        if problem is None:
            return chosen[0]
        whole = next((c for c in found if c.tag != resume and _problem_anywhere(c) is None), None)
        advice = f"--resume {whole.tag} is whole" if whole else "no other checkpoint of this run is whole"
        raise UserError(f"{problem}; {advice}")
    problems = []
    for checkpoint in found:
        problem = _problem_anywhere(checkpoint)
        if problem is None:
            _report_choice(run_folder, checkpoint, problems)
            return checkpoint
        problems.append(problem)
    if any(checkpoint.manifest for checkpoint in found):
        raise UserError(
            f"no checkpoint in {run_folder} is whole: {'; '.join(problems)}; mend the files, or start again in "
            "another --output folder"
        )
    if found:
        _warn_on_first_rank(f"{'; '.join(problems)}; no earlier checkpoint exists, so the run starts from step 0")
    return None


def _problem_anywhere(checkpoint: Checkpoint) -> str | None:
    """What is wrong with a checkpoint on any rank, or None; the same answer on all. A collective call."""
    rank, world_size = rank_and_world()
    return first_problem(gather(checkpoint.problem(share=rank, of=world_size)))


def _report_choice(run_folder: Path, checkpoint: Checkpoint, problems: list[str]) -> None:
    for problem in problems:
        _warn_on_first_rank(f"{problem}; using {checkpoint.tag} instead")
    latest = run_folder / "latest"
    named = latest.read_text(errors="replace").strip() if latest.is_file() else None
    if named != checkpoint.tag and not problems:
        state = "is missing" if named is None else f"names {named!r}"
        _warn_on_first_rank(f"{latest} {state}; the newest whole checkpoint is {checkpoint.tag}, using that")


def _warn_on_first_rank(message: str) -> None:
    if rank_and_world()[0] == 0:
        log.warning(message)


def save_checkpoint(engine: DeepSpeedEngine, run_folder: Path, client_state: dict, *, keep_last: int | None) -> None:
    """Save a checkpoint, all of it or nothing. A collective call.

    Args:
        engine: its `global_steps` gives the name.
        run_folder: the run.
        client_state: plain values, kept inside DeepSpeed's own file.
        keep_last: afterwards delete all but so many of the newest; None keeps all.

    Raises:
        UserError: a rank could not write (a full disk, say); the folder of this save is gone, earlier ones stay whole.
    """
    folder = run_folder / f"global_step{engine.global_steps}"
    on_first_rank(lambda: shutil.rmtree(folder, ignore_errors=True))
    try:
        with _collected_errors(engine) as errors:
            engine.save_checkpoint(
                str(run_folder), tag=folder.name, client_state={CLIENT_STATE: client_state}, save_latest=False
            )
        together(lambda: _raise_first(errors))
        files = _checksums(folder)
        on_first_rank(lambda: _commit(folder, engine, files))
    except UserError as error:
        on_first_rank(lambda: shutil.rmtree(folder, ignore_errors=True))
        whole = next((c.tag for c in list_checkpoints(run_folder) if c.manifest), "none")
        raise UserError(f"{error}; {folder} could not be saved. The newest whole checkpoint is: {whole}") from None
    if keep_last is not None:
        on_first_rank(lambda: _delete_old(run_folder, keep_last))


@contextlib.contextmanager
def _collected_errors(engine: DeepSpeedEngine) -> Iterator[list[Exception]]:
    """While a rank that cannot write keeps it to itself, it still meets the others at DeepSpeed's barriers."""
    errors: list[Exception] = []

    def forgiving(function: Callable) -> Callable:
        def call(*args, **kwargs):
            try:
                return function(*args, **kwargs)
            except (OSError, RuntimeError) as error:  # torch's writer turns ENOSPC into a RuntimeError
                errors.append(error)

        return call

    writers = [(engine.checkpoint_engine, "save"), (engine.checkpoint_engine, "makedirs")]
    writers.append((engine, "_copy_recovery_script"))
    for owner, name in writers:
        setattr(owner, name, forgiving(getattr(owner, name)))
    try:
        yield errors
    finally:
        for owner, name in writers:
            delattr(owner, name)


def _raise_first(errors: list[Exception]) -> None:
    if errors:
        error = errors[0]
        if isinstance(error, OSError):
            raise error
        raise UserError(first_line(error))


def _checksums(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and CRC-32 of every file of a checkpoint, the work shared among the ranks. A collective call."""
    names = on_first_rank(lambda: sorted(path.name for path in folder.iterdir()))
    rank, world_size = rank_and_world()

    def mine() -> dict[str, tuple[int, int]]:
        return {name: (os.path.getsize(folder / name), _crc32(folder / name)) for name in names[rank::world_size]}

    return {name: entry for part in gather(together(mine)) for name, entry in part.items()}


def _crc32(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(READ_BYTES):
            crc = zlib.crc32(block, crc)
        os.fsync(file.fileno())
    return crc


def _commit(folder: Path, engine: DeepSpeedEngine, files: dict[str, tuple[int, int]]) -> None:
    manifest = {
        "version": 1,
        "step": engine.global_steps,
        "world_size": dist.get_world_size(),
        "zero_stage": int(engine.zero_optimization_stage()),
        "files": files,
    }
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1))
    write_atomically(folder.parent / "latest", folder.name)


def _delete_old(run_folder: Path, keep_last: int) -> None:
    whole = [checkpoint for checkpoint in list_checkpoints(run_folder) if checkpoint.manifest]
    for checkpoint in whole[keep_last:]:
        # The manifest goes first: a deletion that is cut short leaves a torn checkpoint, not a damaged one.
        (checkpoint.folder / MANIFEST).unlink()
        shutil.rmtree(checkpoint.folder, ignore_errors=True)


def set_aside_later(run_folder: Path, step: int) -> None:
    """Rename the checkpoints after `step` to `superseded_...`. A collective call.

    A run that goes back to an earlier checkpoint by name must not, after the next kill, go on from where it once was.
    """

    def rename() -> None:
        for checkpoint in list_checkpoints(run_folder):
            if checkpoint.step > step:
                target = run_folder / f"superseded_{checkpoint.tag}"
                shutil.rmtree(target, ignore_errors=True)
                checkpoint.folder.rename(target)
                log.warning(f"{checkpoint.folder} is later than the step asked for; renamed to {target.name}")

    on_first_rank(rename)


def needs_universal(checkpoint: Checkpoint, world_size: int, zero_stage: int) -> bool:
    """Whether ZeRO's partitions in the checkpoint do not fit so many ranks."""
    return (
        bool(zero_stage) and bool(checkpoint.manifest["zero_stage"]) and checkpoint.manifest["world_size"] != world_size
    )


def convert_to_universal(checkpoint: Checkpoint) -> Path:
    """Make DeepSpeed's universal form of a ZeRO 1 or 2 checkpoint beside it. A collective call.

    Returns:
        the new folder; `delete_universal` removes it after loading.

    Raises:
        UserError: DeepSpeed's converter failed; its last line is given.
    """
    # In a folder of its own, since the converter also writes a file beside its output folder.
    target = checkpoint.folder.parent / UNIVERSAL / checkpoint.tag

    def convert() -> None:
        shutil.rmtree(target.parent, ignore_errors=True)
        target.parent.mkdir()
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
        # Without its own rank the converter would wait for the other ranks of this run.
        plain = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        with without_wildcards(checkpoint.folder.parent) as parent:
            command += ["--input_folder", str(parent / checkpoint.tag)]
            command += ["--output_folder", str(parent / UNIVERSAL / checkpoint.tag)]
            done = subprocess.run(command, capture_output=True, text=True, env=plain)
        if done.returncode:
            raise UserError(f"{checkpoint.folder}: ds_to_universal failed: {last_line(done.stderr)}")

    on_first_rank(convert)
    return target


def delete_universal(run_folder: Path) -> None:
    """Remove what `convert_to_universal` made, if it made anything. A collective call."""
    on_first_rank(lambda: shutil.rmtree(run_folder / UNIVERSAL, ignore_errors=True))


@contextlib.contextmanager
def without_wildcards(folder: Path) -> Iterator[Path]:
    """A name for `folder` without brackets and stars: DeepSpeed takes paths to load for glob patterns."""
    if glob.escape(str(folder)) == str(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="ds_bert_") as temporary:
        link = Path(temporary) / "run"
        link.symlink_to(folder.resolve(), target_is_directory=True)
        yield link


def load_checkpoint(engine: DeepSpeedEngine, folder: Path) -> dict:
    """Load weights, optimizer state and schedule. A collective call.

    Args:
        engine: built with `checkpoint.load_universal` if `folder` is a universal one.
        folder: of the checkpoint.

    Returns:
        the client state that was saved with it.
    """
    with without_wildcards(folder.parent) as parent:
        loaded, client_state = engine.load_checkpoint(str(parent), tag=folder.name)
    if loaded is None or CLIENT_STATE not in client_state:
        raise UserError(f"{folder}: DeepSpeed could not load this checkpoint")
    return client_state[CLIENT_STATE]
