"""Raw text -> a folder of tokenized samples: `prepare` does all that the command `ds-bert prepare` does.

The main process reads the documents and parts them into chunks; workers turn chunks into samples; the main
process writes these in order. Chunks depend on the text alone, so the number of workers changes no byte of
the result.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer
from tqdm import tqdm

from ds_bert.data.prepared import FORMAT_VERSION, MANIFEST
from ds_bert.data.preparing import storage
from ds_bert.data.preparing.chunks import ChunkJob, Counts, chunk_documents, make_samples, start_job
from ds_bert.data.preparing.documents import PIECE_CHARS, Piece, check_inputs, read_documents
from ds_bert.data.preparing.holdout import Holdout, split_documents, survey
from ds_bert.data.preparing.processes import available_cores, ordered_map, run_apart, termination_as_interrupt
from ds_bert.data.preparing.samples import SAMPLE_UNITS
from ds_bert.data.preparing.vocabulary import MIN_VOCAB_SIZE, learn_tokenizer, wrap_learned
from ds_bert.data.tokenizer import continues_word, frame_of, load_tokenizer, plain_backend, tokenizer_hash
from ds_bert.errors import UsageError, UserError
from ds_bert.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DEFAULT_VOCAB_SIZE = 30522
LEARNING_BYTES = 256 << 20
"""A vocabulary is learnt from at most about this much text: the trainer's memory grows with its input."""

_REPORT_CHARS = 1 << 20
PARTS = ("train", "validation")
_LIBRARIES = ("tokenizers", "transformers", "pyarrow", "numpy")


@dataclass(frozen=True, kw_only=True)
class PrepareSettings:
    """How text becomes samples. The defaults are those of the command.

    Attributes:
        tokenizer: folder or Hub name; None learns one.
        vocab_size: upper limit for a learnt tokenizer (default `DEFAULT_VOCAB_SIZE`); not together with
            `tokenizer`.
        max_length: tokens of the longest sample, special tokens included.
        sample_unit: one of `SAMPLE_UNITS`.
        validation_fraction: share of the documents to hold out, in [0, 1).
        seed: of the choice of held-out documents.
        trust_remote_code: run Python code that comes with the tokenizer.
    """

    tokenizer: str | os.PathLike | None = None
    vocab_size: int | None = None
    max_length: int = 512
    sample_unit: str = "pack"
    validation_fraction: float = 0.05
    seed: int = 0
    trust_remote_code: bool = False

    def check(self) -> None:
        """Raises: UsageError: a value is outside its range, or two exclude each other."""
        if self.tokenizer is not None and self.vocab_size is not None:
            raise UsageError(
                "--tokenizer and --vocab-size: a given tokenizer has its own vocabulary; leave one of them out"
            )
        if self.vocab_size is not None and self.vocab_size < MIN_VOCAB_SIZE:
            raise UsageError(
                f"--vocab-size {self.vocab_size}: must be at least {MIN_VOCAB_SIZE} (special tokens and "
                "letters); some thousands are usual"
            )
        if self.sample_unit not in SAMPLE_UNITS:
            raise UsageError(f"--sample-unit {self.sample_unit}: must be one of {', '.join(SAMPLE_UNITS)}")
        if not 0 <= self.validation_fraction < 1:
            raise UsageError(
                f"--validation-fraction {self.validation_fraction}: must be at least 0 and below 1, for example 0.05"
            )
        if self.max_length < 1:
            raise UsageError(f"--max-length {self.max_length}: must be positive, for example 512")


def prepare(
    inputs: Sequence[str | os.PathLike],
    output: str | os.PathLike,
    settings: PrepareSettings = PrepareSettings(),
    *,
    num_workers: int | None = None,
    report: Callable[[str], None] = print,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Turn text files into a folder that `PreparedData` and `datasets.load_from_disk` open.

    The same inputs, settings and library versions give the same bytes in every file. The folder appears
    complete or not at all, also when the process is interrupted or terminated. With more than one worker the
    processes are spawned, so a script that calls this needs `if __name__ == "__main__":`.

    Args:
        inputs: UTF-8 text files.
        output: folder to make; it may exist if it is empty.
        settings: how.
        num_workers: processes that tokenize; None takes one for each core.
        report: gets each line of the summary.
        show_progress: draw a progress bar on stderr.

    Returns:
        The manifest, as written to `output/manifest.json`.

    Raises:
        UsageError: settings that cannot be.
        UserError: anything else that is in the user's hands: inputs, output, tokenizer, disk.
    """
    settings.check()
    if num_workers is not None and num_workers < 1:
        raise UsageError(f"--num-workers {num_workers}: must be at least 1")
    output = Path(output)
    num_bytes = check_inputs(inputs)
    storage.check_output(output)
    # A process for less than a chunk is not worth its start.
    num_workers = min(num_workers or available_cores(), num_bytes // PIECE_CHARS + 1)
    with termination_as_interrupt(), storage.staged_folder(output) as staging:
        progress = partial(_Progress, num_bytes, show_progress)
        manifest = _make(list(inputs), staging, settings, num_workers, progress)
    for line in summary(manifest):
        report(line)
    report(f"prepared data: {output}")
    return manifest


def _make(
    inputs: list[str | os.PathLike],
    folder: Path,
    settings: PrepareSettings,
    num_workers: int,
    progress: Callable[[str], "_Progress"],
) -> dict[str, Any]:
    tokenizer = None
    if settings.tokenizer is not None:  # before the long reading, so that a wrong name is told at once
        tokenizer = load_tokenizer(settings.tokenizer, settings.trust_remote_code)
        _check_max_length(settings.max_length, tokenizer)
    with progress("reading") as bar:
        holdout = survey(bar.watch(read_documents(inputs)), settings.validation_fraction, settings.seed)
    if tokenizer is None:
        with progress("learning the vocabulary") as bar:
            tokenizer = _learn(inputs, holdout, settings, bar)
        _check_max_length(settings.max_length, tokenizer)
    for trace_of_loading in ("is_local", "local_files_only", "name_or_path"):
        tokenizer.init_kwargs.pop(trace_of_loading, None)
    tokenizer.save_pretrained(folder / "tokenizer")
    manifest = {
        "format_version": FORMAT_VERSION,
        "tokenizer_hash": tokenizer_hash(folder / "tokenizer"),
        "vocab_size": len(tokenizer),
        "settings": {
            "learned_tokenizer": settings.tokenizer is None,
            "vocab_size_limit": None if settings.tokenizer else settings.vocab_size or DEFAULT_VOCAB_SIZE,
            "max_length": settings.max_length,
            "sample_unit": settings.sample_unit,
            "validation_fraction": settings.validation_fraction,
            "seed": settings.seed,
        },
        "input": {
            "files": len(inputs),
            "documents": holdout.num_documents,
            "text_bytes": holdout.num_bytes,
            "hash": holdout.corpus_hash,
        },
    }
    job = ChunkJob(
        tokenizer_json=plain_backend(tokenizer).to_str(),
        frame=frame_of(tokenizer),
        continues_word=continues_word(tokenizer),
        unk_id=tokenizer.unk_token_id,
        unit=settings.sample_unit,
        max_length=settings.max_length,
    )
    fingerprint = hashlib.blake2b(json.dumps(manifest).encode(), digest_size=8).hexdigest()
    chunks = chunk_documents(split_documents(read_documents(inputs), holdout))
    with progress("tokenizing") as bar:
        counts = _write_samples(
            folder, chunks, job, PARTS if holdout.cutoff else PARTS[:1], fingerprint, num_workers, bar
        )
    manifest["parts"] = {name: asdict(part) for name, part in counts.items()}
    manifest["versions"] = {"ds_bert": __version__} | {name: metadata.version(name) for name in _LIBRARIES}
    storage.write_json(folder / MANIFEST, manifest)
    return manifest


def _write_samples(folder, chunks, job, parts, fingerprint, num_workers, bar) -> dict[str, Counts]:
    writers = {name: storage.PartWriter(folder / name, f"{fingerprint}-{name}") for name in parts}
    counts = {name: Counts() for name in parts}
    try:
        with closing(ordered_map(make_samples, chunks, num_workers, start_job, (job,))) as results:
            for result in results:
                for index, name in enumerate(parts):
                    writers[name].add(result.samples[index])
                    counts[name].add(result.counts[index])
                bar.update(result.num_bytes)
        for name, writer in writers.items():
            if writer.num_samples == 0:
                raise UserError(_no_samples(name))
            writer.close()
    finally:
        for writer in writers.values():
            writer.abandon()
    storage.write_dataset_dict(folder, parts)
    return counts


def _no_samples(part: str) -> str:
    if part == "train":
        return "--input: no token of the text can be masked (all are unknown to the tokenizer); use another tokenizer"
    return (
        "--validation-fraction: the documents held out have no token that can be masked; use another "
        "--seed or a larger fraction"
    )


def _learn(
    inputs: list[str | os.PathLike], holdout: Holdout, settings: PrepareSettings, bar: "_Progress"
) -> "PreTrainedTokenizerFast":
    vocab_size = settings.vocab_size or DEFAULT_VOCAB_SIZE
    if holdout.num_bytes <= PIECE_CHARS:
        state = learn_from_files(inputs, holdout, vocab_size, bar.update)
    else:
        state = run_apart(learn_from_files, inputs, holdout, vocab_size, on_progress=bar.update)
    return wrap_learned(Tokenizer.from_str(state), settings.max_length)


def learn_from_files(
    inputs: list[str | os.PathLike], holdout: Holdout, vocab_size: int, report: Callable[[float], None]
) -> str:
    """Learn a tokenizer from the documents that are not held out.

    Args:
        inputs: text files.
        holdout: their `survey`.
        vocab_size: upper limit.
        report: gets the characters read since the last call, halved (the files are read twice).

    Returns:
        The tokenizer, serialised.
    """

    def read_training_texts() -> Iterator[str]:
        taken = seen = unreported = 0
        for piece, is_held_out in split_documents(read_documents(inputs), holdout):
            unreported += len(piece.text)
            if unreported > _REPORT_CHARS:
                report(unreported / 2)
                unreported = 0
            if is_held_out:
                continue
            # Evenly over the corpus: taken whenever less was taken so far than its share of what was seen.
            if taken * holdout.num_bytes <= seen * LEARNING_BYTES:
                taken += len(piece.text)
                yield piece.text
            seen += len(piece.text)

    return learn_tokenizer(read_training_texts, vocab_size).to_str()


def _check_max_length(max_length: int, tokenizer: "PreTrainedTokenizerFast") -> None:
    num_special = frame_of(tokenizer).size
    if max_length <= num_special:
        raise UsageError(
            f"--max-length {max_length}: must be above {num_special}, the special tokens of each sample; "
            "128 or 512 are usual"
        )
    if max_length > tokenizer.model_max_length:
        print(
            f"warning: --max-length {max_length} is above the tokenizer's model_max_length "
            f"{tokenizer.model_max_length}; the model must have that many positions",
            file=sys.stderr,
        )


def summary(manifest: dict[str, Any]) -> Iterator[str]:
    """The lines that tell a user what became of the text: everything read is accounted for."""
    settings, source, parts = manifest["settings"], manifest["input"], manifest["parts"]
    origin = f"learnt, at most {settings['vocab_size_limit']:,} asked for" if settings["learned_tokenizer"] else "given"
    yield (
        f"input: {source['files']:,} files, {source['documents']:,} documents, "
        f"{source['text_bytes'] / 1e6:,.1f} MB of text"
    )
    yield f"vocabulary: {manifest['vocab_size']:,} tokens ({origin})"
    for name, counts in parts.items():
        sentences = "" if counts["sentences"] is None else f", {counts['sentences']:,} sentences"
        mean = counts["tokens"] / counts["samples"]
        yield (
            f"{name}: {counts['documents']:,} documents, {counts['paragraphs']:,} paragraphs{sentences} -> "
            f"{counts['samples']:,} samples, {counts['tokens']:,} tokens (mean length {mean:.1f})"
        )
        unit = "document" if settings["sample_unit"] == "pack" else settings["sample_unit"]
        yield (
            f"  {counts['split_units']:,} {unit}s longer than {settings['max_length']} tokens split; "
            f"{counts['unknown_tokens']:,} unknown tokens; not made: {counts['unmaskable_samples']:,} "
            f"samples with nothing to mask, {counts['empty_texts']:,} texts without a token"
        )


class _Progress:
    """A bar over the bytes of all inputs."""

    def __init__(self, num_bytes: int, show: bool, label: str) -> None:
        self._bar = tqdm(
            total=num_bytes,
            desc=label,
            unit="B",
            unit_scale=True,
            unit_divisor=1000,
            disable=not show,
            mininterval=0.5,
        )

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:  # blank lines and line ends are not counted one by one
            self.update(self._bar.total - self._bar.n)
        self._bar.close()

    def update(self, num_bytes: float) -> None:
        self._bar.update(num_bytes)

    def watch(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Pass pieces through and count them."""
        for piece in pieces:
            self._bar.update(len(piece.text) + 1)
            yield piece
