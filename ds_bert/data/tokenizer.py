"""What preparing and masking must know about a Hugging Face tokenizer.

Learning one from text is in `vocabulary`.
"""

import hashlib
import os
import socket
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies

import numpy as np

from ds_bert.errors import UserError

if TYPE_CHECKING:  # loading transformers takes seconds, which errors in the arguments should not wait for
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Frame:
    """What a tokenizer puts around a text, and which of its ids are special.

    Attributes:
        prefix: ids before the text ([CLS] for BERT).
        suffix: ids after it ([SEP]).
        special: bool, True at special ids; reaches one beyond the largest of them.
    """

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    special: np.ndarray

    @property
    def size(self) -> int:
        """Special tokens in each sample."""
        return len(self.prefix) + len(self.suffix)

    def is_special(self, ids: np.ndarray) -> np.ndarray:
        """bool, same shape as `ids`."""
        return self.special[np.minimum(ids, len(self.special) - 1)]


def load_tokenizer(name_or_path: str | os.PathLike, trust_remote_code: bool = False) -> "PreTrainedTokenizerFast":
    """Load a fast tokenizer with a mask token.

    Args:
        name_or_path: a folder, or a name on the Hugging Face Hub (taken from the local cache if it is there).
        trust_remote_code: run Python code that comes with the tokenizer.

    Raises:
        UserError: it cannot be loaded, has no fast version, or has no mask token.
    """
    where = f"--tokenizer {name_or_path}"
    if Path(name_or_path).is_file():
        raise UserError(f"{where}: is a file; give the folder that holds it (as written by save_pretrained)")
    is_folder = Path(name_or_path).is_dir()
    if not is_folder and (str(name_or_path).count("/") > 1 or str(name_or_path).startswith((".", "/", "~"))):
        raise UserError(f"{where}: no such folder; check the path")
    from transformers import AutoTokenizer

    load = partial(AutoTokenizer.from_pretrained, str(name_or_path), trust_remote_code=trust_remote_code)
    asked_hub = False
    try:
        try:
            tokenizer = load(local_files_only=True)
        except Exception:
            if is_folder or not _hub_is_reachable():
                raise
            asked_hub = True
            tokenizer = load()
    except Exception as error:  # anything can come out of a tokenizer's folder, and of code in it
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        if "trust_remote_code" in str(error) or "custom code" in str(error):
            advice = "pass --trust-remote-code if you trust its code"
        elif is_folder:
            advice = "give a folder written by save_pretrained"
        else:
            reason = reason if asked_hub else "it is no folder here, not in the cache, and the Hub cannot be reached"
            advice = "check the name and the network, or give a folder written by save_pretrained"
        raise UserError(f"{where}: cannot be loaded ({reason}); {advice}") from None
    if not tokenizer.is_fast:
        raise UserError(
            f"{where}: has no fast version (tokenizer.json); convert it, or choose a tokenizer that has one"
        )
    if tokenizer.mask_token_id is None:
        raise UserError(
            f"{where}: has no mask token, which masked-LM training needs; choose the tokenizer of an "
            "encoder, or add "
            'one: tokenizer.add_special_tokens({"mask_token": "[MASK]"}) and save_pretrained'
        )
    return tokenizer


def _hub_is_reachable() -> bool:
    """Look before asking: without a network, downloading is tried again and again for a minute."""
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "TRUE", "YES", "ON"):
        return False
    if getproxies():  # then a proxy, and not this host, must reach it
        return True
    address = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        socket.create_connection((address.hostname, address.port or 443), timeout=5).close()
    except OSError:
        return False
    return True


def special_token_ids(tokenizer: "PreTrainedTokenizerFast") -> np.ndarray:
    """The ids that are never masked and never drawn as a random replacement.

    Returns:
        int64, sorted, unique: the tokenizer's `all_special_ids`. As in Hugging Face, [UNK] is one of them.
    """
    return np.unique(np.array(tokenizer.all_special_ids, np.int64))


def frame_of(tokenizer: "PreTrainedTokenizerFast") -> Frame:
    """Find the special tokens that a tokenizer's own post-processing puts around one text.

    Raises:
        UserError: it puts special tokens elsewhere than before and after the text.
    """
    encoding = plain_backend(tokenizer).encode("a", add_special_tokens=True)
    is_special = np.array(encoding.special_tokens_mask, bool)
    body = np.flatnonzero(~is_special)
    if len(body) == 0 or is_special[body[0] : body[-1] + 1].any():
        raise UserError(
            f"--tokenizer {tokenizer.name_or_path}: its special tokens for 'a' are {encoding.tokens}; only "
            "tokens before and after the text are supported"
        )
    special_ids = special_token_ids(tokenizer)
    special = np.zeros(int(special_ids.max()) + 2, bool)
    special[special_ids] = True
    return Frame(tuple(encoding.ids[: body[0]]), tuple(encoding.ids[body[-1] + 1 :]), special)


def continues_word(tokenizer: "PreTrainedTokenizerFast") -> np.ndarray:
    """Which tokens are not the first of their word, told by the mark of the tokenizer's model (`##`, `Ġ` or
    `▁`).

    Returns:
        bool (vocabulary size,); all False where there is no such mark.
    """
    vocab = tokenizer.get_vocab()
    result = np.zeros(max(vocab.values()) + 1, bool)
    prefix = getattr(tokenizer.backend_tokenizer.model, "continuing_subword_prefix", None)
    starts = {mark: sum(token.startswith(mark) for token in vocab) for mark in ("Ġ", "▁")}
    mark = max(starts, key=starts.get)
    for token, index in vocab.items():
        if prefix:
            result[index] = token.startswith(prefix)
        elif starts[mark] > len(vocab) // 20:
            result[index] = not token.startswith(mark)
    result[special_token_ids(tokenizer)] = False
    return result


def plain_backend(tokenizer: "PreTrainedTokenizerFast"):
    """A copy of the `tokenizers.Tokenizer` that neither cuts nor pads, and reads "[MASK]" in a text as text."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend


def tokenizer_hash(folder: str | os.PathLike) -> str:
    """Hexadecimal hash of the content of a folder's tokenizer.json.

    Raises:
        UserError: the folder has no tokenizer.json.
    """
    path = Path(folder) / "tokenizer.json"
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); the folder must hold a fast tokenizer") from None
