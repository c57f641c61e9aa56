"""The files of prepared data: written here, read in `prepared`.

A part (train, validation) is a folder that `datasets.load_from_disk` reads: Arrow record batches with the
column `input_ids` (list of int32), and beside them `lengths.npy` and `maskable.npy` (int32, one number for
each sample).
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa

from ds_bert.data.prepared import ARRAYS, COLUMN, MANIFEST
from ds_bert.data.preparing.samples import Samples
from ds_bert.errors import UserError
from ds_bert.files import lock_exclusively

SHARD_BYTES = 500_000_000
# The processes of a run that was just killed let go of its lock a moment later.
_LOCK_SECONDS = 2

_FEATURES = {COLUMN: {"feature": {"dtype": "int32", "_type": "Value"}, "_type": "List"}}
_SCHEMA = pa.schema(
    [pa.field(COLUMN, pa.list_(pa.int32()))],
    metadata={"huggingface": json.dumps({"info": {"features": _FEATURES}})},
)


class PartWriter:
    """Writes one part. `add` samples, then `close`.

    Attributes:
        num_samples, num_tokens: written so far.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self.num_samples = 0
        self.num_tokens = 0
        self._folder = folder
        self._fingerprint = fingerprint
        self._shards: list[Path] = []
        self._file = self._stream = None
        folder.mkdir()
        # Files of an object outlive any block; `close` and `abandon` close them.
        self._arrays = {name: open(folder / f"{name}.npy", "wb") for name in ARRAYS}  # noqa: SIM115
        for file in self._arrays.values():
            _write_array_header(file, 0)

    def add(self, samples: Samples) -> None:
        """Append samples as one record batch."""
        if len(samples.lengths) == 0:
            return
        if self._file is None or self._file.tell() >= SHARD_BYTES:
            self._open_shard()
        offsets = np.zeros(len(samples.lengths) + 1, np.int32)
        np.cumsum(samples.lengths, out=offsets[1:])
        column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(samples.ids))
        self._stream.write_batch(pa.record_batch([column], schema=_SCHEMA))
        for name, file in self._arrays.items():
            file.write(getattr(samples, name).tobytes())
        self.num_samples += len(samples.lengths)
        self.num_tokens += len(samples.ids)

    def close(self) -> None:
        """Finish all files."""
        if self._file is None:
            self._open_shard()
        self._close_shard()
        for file in self._arrays.values():
            file.seek(0)
            _write_array_header(file, self.num_samples)
            file.close()
        names = [f"data-{i:05d}-of-{len(self._shards):05d}.arrow" for i in range(len(self._shards))]
        for shard, name in zip(self._shards, names, strict=True):
            shard.rename(self._folder / name)
        # The field values that `datasets.load_from_disk` looks for.
        state = {
            "_data_files": [{"filename": name} for name in names],
            "_fingerprint": self._fingerprint,
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": self._folder.name,
        }
        write_json(self._folder / "state.json", state)
        write_json(self._folder / "dataset_info.json", {"citation": "", "description": "", "features": _FEATURES})

    def abandon(self) -> None:
        """Close the files without finishing them; what cannot be flushed is lost."""
        for file in (self._file, *self._arrays.values()):
            try:
                if file is not None:
                    file.close()
            except OSError:
                pass

    def _open_shard(self) -> None:
        if self._file is not None:
            self._close_shard()
        self._shards.append(self._folder / f"shard-{len(self._shards)}")
        self._file = open(self._shards[-1], "wb")  # noqa: SIM115
        self._stream = pa.ipc.new_stream(self._file, _SCHEMA)

    def _close_shard(self) -> None:
        self._stream.close()
        self._file.close()


def write_dataset_dict(folder: Path, parts: tuple[str, ...]) -> None:
    """Make a folder of parts readable as a `datasets.DatasetDict`."""
    write_json(folder / "dataset_dict.json", {"splits": list(parts)})


def write_json(path: Path, content: dict) -> None:
    """Write JSON for people: indented, in the order given."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_output(output: Path) -> None:
    """Check that prepared data can be made at `output`.

    Raises:
        UserError: it is a file or a folder with something in it.
    """
    try:
        if output.is_dir():
            if not any(output.iterdir()):
                return
            found = "is prepared data already" if (output / MANIFEST).is_file() else "exists and is not empty"
        elif output.exists() or output.is_symlink():
            found = "exists and is not a folder"
        else:
            return
    except OSError as error:
        raise _cannot_write(output, error) from None
    raise UserError(f"--output {output}: {found}; choose another folder, or delete it first")


@contextmanager
def staged_folder(output: Path) -> Iterator[Path]:
    """A temporary folder beside `output` that becomes `output` when the block ends, and vanishes when it
    fails.

    What a killed run has left behind is removed first.

    Raises:
        UserError: another process is writing there, or a file system error inside the block (a full disk).
    """
    place = Path(os.path.abspath(output))
    staging = place.parent / f".{place.name}.preparing"
    lock = None
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir(exist_ok=True)
        lock = _lock(staging, output)
        if lock is not None and not _is_still_there(staging, lock):
            raise UserError(
                f"--output {output}: another ds-bert prepare was writing there and has ended just now; look at what it "
                "left, or choose another folder"
            )
        for left_over in staging.iterdir():
            shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink()
        try:
            yield staging
            os.rename(staging, place)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"--output {output}: the disk is full ({error.strerror}); nothing was kept; make room there "
                "or choose a folder on another disk"
            ) from None
        raise _cannot_write(output, error) from None
    finally:
        if lock is not None:
            os.close(lock)


def _cannot_write(output: Path, error: OSError) -> UserError:
    return UserError(
        f"--output {output}: cannot be written ({error.strerror or error}); check permissions, name and disk"
    )


def _lock(staging: Path, output: Path) -> int | None:
    """Lock a folder until its descriptor is closed or the process ends, however it ends."""
    descriptor = os.open(staging, os.O_RDONLY)
    try:
        if lock_exclusively(descriptor, wait_s=_LOCK_SECONDS):
            return descriptor
    except OSError:  # a file system without locks: then only the user keeps two runs apart
        os.close(descriptor)
        return None
    os.close(descriptor)
    raise UserError(
        f"--output {output}: another ds-bert prepare is writing there; wait for it, or choose another folder"
    )


def _is_still_there(staging: Path, descriptor: int) -> bool:
    """Whether the folder was not renamed or removed while its lock was waited for."""
    try:
        return os.path.samestat(os.stat(staging), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _write_array_header(file, num_samples: int) -> None:
    # numpy pads the header so that its size does not depend on the number.
    np.lib.format.write_array_header_1_0(file, {"descr": "<i4", "fortran_order": False, "shape": (num_samples,)})
