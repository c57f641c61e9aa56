"""Text -> prepared samples -> masked batches.

`ds_bert.data.preparing.prepare.prepare` makes the samples, `PreparedData` opens them.
"""

from importlib import import_module
from typing import Any

# Names are looked up when they are first used: a worker process that tokenizes would otherwise load torch,
# too.
_HOMES = {
    "PackedMaskedLMCollator": "batches.hf_packed_collator",
    "PrepareSettings": "preparing.prepare",
    "PreparedData": "prepared",
    "PreparedSplit": "prepared",
    "learn_tokenizer": "preparing.vocabulary",
    "load_tokenizer": "tokenizer",
    "read_documents": "preparing.documents",
    "special_token_ids": "tokenizer",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
