"""Prepared data on disk, opened without loading it."""

import json
import os
from bisect import bisect_right
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ds_bert.data.tokenizer import tokenizer_hash
from ds_bert.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# The format on disk; docs/preparing.md has it in words.
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
COLUMN = "input_ids"
ARRAYS = ("lengths", "maskable")


class PreparedSplit:
    """One part of prepared data: S samples, memory-mapped.

    `split[i]` is the int32 array of sample i's token ids, special tokens included: a read-only view of the
    file, not a copy. It works after a fork, and pickling sends only the path.

    Attributes:
        path: the folder.
        lengths: int32 memory map (S,), tokens of each sample, special tokens included.
        maskable: int32 memory map (S,), tokens of each sample that are not special.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        """Raises: UserError: a file is missing, cut short, or disagrees with another."""
        self.path = Path(path)
        self._open()

    def _open(self) -> None:
        self.lengths, self.maskable = (_open_array(self.path / f"{name}.npy") for name in ARRAYS)
        # One pair of views for each record batch, and the number of samples before it.
        self._batches: list[tuple[np.ndarray, np.ndarray]] = []
        self._firsts: list[int] = []
        num_samples = num_tokens = 0
        for column in _read_columns(self.path):
            offsets = column.offsets.to_numpy(zero_copy_only=True)
            self._batches.append((column.values.to_numpy(zero_copy_only=True), offsets))
            self._firsts.append(num_samples)
            num_samples += len(column)
            num_tokens += int(offsets[-1])
        for name, array in zip(ARRAYS, (self.lengths, self.maskable), strict=True):
            if len(array) != num_samples:
                raise _damaged(self.path / f"{name}.npy", f"{len(array)} rows, but the Arrow files have {num_samples}")
        if int(self.lengths.sum(dtype=np.int64)) != num_tokens:
            raise _damaged(self.path / "lengths.npy", f"its sum is not the {num_tokens} tokens of the Arrow files")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        batch = bisect_right(self._firsts, position) - 1
        values, offsets = self._batches[batch]
        row = position - self._firsts[batch]
        return values[offsets[row] : offsets[row + 1]]

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path = state["path"]
        self._open()


class PreparedData:
    """A folder made by `ds-bert prepare`.

    Attributes:
        path: the folder.
        manifest: content of its manifest.json: settings, counts, versions.
        train: the training part.
        validation: the held-out part, or None where none was held out.
        tokenizer_hash: of the tokenizer's content; a model belongs to the data when they agree.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        """Open and check a folder.

        Raises:
            UserError: it is not prepared data, is of a newer format, or is damaged.
        """
        self.path = Path(path)
        self.manifest = _read_manifest(self.path)
        self.tokenizer_hash: str = self.manifest["tokenizer_hash"]
        found = tokenizer_hash(self.path / "tokenizer")
        if found != self.tokenizer_hash:
            raise _damaged(self.path / "tokenizer", f"its hash {found} is not the manifest's {self.tokenizer_hash}")
        parts: dict[str, PreparedSplit] = {}
        for name, counts in self.manifest["parts"].items():
            parts[name] = PreparedSplit(self.path / name)
            if len(parts[name]) != counts["samples"]:
                raise _damaged(self.path / name, f"{len(parts[name])} samples, but {MANIFEST} says {counts['samples']}")
        self.train = parts["train"]
        self.validation = parts.get("validation")

    def load_tokenizer(self, trust_remote_code: bool = False) -> "PreTrainedTokenizerFast":
        """Load the tokenizer the samples were made with; nothing is downloaded.

        Raises:
            UserError: it cannot be loaded, for example because it needs `trust_remote_code`.
        """
        from ds_bert.data.tokenizer import load_tokenizer

        return load_tokenizer(self.path / "tokenizer", trust_remote_code)


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise UserError(
            f"{path}: {'is not a folder' if path.exists() else 'no such folder'}; make prepared data with: "
            f"ds-bert prepare --input FILE --output {path}"
        )
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        version = manifest["format_version"]
    except FileNotFoundError:
        raise UserError(
            f"{path} is not prepared data (no {MANIFEST}); make it with: ds-bert prepare --input FILE --output {path}"
        ) from None
    except OSError as error:
        raise UserError(f"{path / MANIFEST}: cannot be read ({error.strerror}); check its permissions") from None
    except (ValueError, TypeError, KeyError):
        raise _damaged(path / MANIFEST, "not a manifest written by ds-bert prepare") from None
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path}: format version {version}, but this ds_bert reads version {FORMAT_VERSION}; update "
            "ds_bert, or prepare the data again"
        )
    return manifest


def _open_array(path: Path) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r")
    except FileNotFoundError:
        raise _damaged(path, "missing") from None
    except (ValueError, EOFError) as error:
        raise _damaged(path, f"cut short or not an array ({error})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    if array.dtype != np.int32 or array.ndim != 1:
        raise _damaged(path, f"a {array.ndim}-dimensional array of {array.dtype}, not a list of int32")
    return array


def _read_columns(folder: Path):
    """The `input_ids` column of each record batch, zero-copy."""
    try:
        names = [entry["filename"] for entry in json.loads((folder / "state.json").read_text())["_data_files"]]
    except FileNotFoundError:
        raise _damaged(folder / "state.json", "missing") from None
    except (ValueError, TypeError, KeyError):
        raise _damaged(folder / "state.json", "not the state of a Hugging Face data set") from None
    for name in names:
        try:
            with pa.ipc.open_stream(pa.memory_map(str(folder / name))) as reader:
                for batch in reader:
                    yield batch.column(COLUMN)
        except FileNotFoundError:
            raise _damaged(folder / name, "missing") from None
        except (pa.ArrowInvalid, KeyError, OSError) as error:
            raise _damaged(folder / name, f"cut short or not Arrow ({' '.join(str(error).split())})") from None


def _damaged(path: Path, found: str) -> UserError:
    return UserError(f"{path}: {found}; the prepared data is damaged: copy it again, or delete it and prepare it anew")
