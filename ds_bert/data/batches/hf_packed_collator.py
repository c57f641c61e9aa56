"""Packed batches for Hugging Face's Trainer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DataCollatorForLanguageModeling

from ds_bert.data.batches.collators import packed_row
from ds_bert.errors import UserError

NAMES = ("input_ids", "token_type_ids", "special_tokens_mask")


@dataclass
class PackedMaskedLMCollator(DataCollatorForLanguageModeling):
    """`DataCollatorForLanguageModeling` that puts the samples into one row instead of padding them.

    Masks are drawn as there. The model must have been through `ds_bert.modeling.use_packed_execution`.

    Args:
        tokenizer, mlm_probability, mask_replace_prob, random_replace_prob, seed: see there.
        first_position: `ds_bert.modeling.first_position(model)`.
    """

    first_position: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.mlm or self.whole_word_mask or self.pad_to_multiple_of or self.return_tensors != "pt":
            raise UserError("PackedMaskedLMCollator masks single tokens, of rows without padding, as torch tensors")

    def torch_call(self, examples: list[Any]) -> dict[str, torch.Tensor | int]:
        """One row.

        Args:
            examples: token ids, or dictionaries with `input_ids` and, if you have them, `attention_mask` (tokens where
                it is 0 are padding and left out), `token_type_ids` and `special_tokens_mask`.

        Returns:
            `input_ids`, `labels` (-100 where nothing is masked) and, if all examples have them, `token_type_ids`:
            (1, T) int64; and what `packed_row` returns.

        Raises:
            UserError: there are no examples, or one has no `input_ids`.
        """
        samples = sorted(map(_without_padding, examples), key=lambda sample: len(sample["input_ids"]))
        if not samples:
            raise UserError("no examples to pack: a batch needs at least one")
        names = set(NAMES).intersection(*samples)
        row = {name: np.concatenate([sample[name] for sample in samples]).tolist() for name in names}
        types = {name: torch.tensor([row.pop(name)]) for name in names & {"token_type_ids"}}
        batch = super().torch_call([row])
        lengths = np.array([len(sample["input_ids"]) for sample in samples])
        inputs = {"input_ids": batch["input_ids"], "labels": batch["labels"], **types}
        return {**inputs, **packed_row(lengths, self.first_position)}


def _without_padding(example: Any) -> dict[str, np.ndarray]:
    if not isinstance(example, Mapping):
        example = {"input_ids": example}
    if "input_ids" not in example:
        raise UserError(f"an example to pack has no input_ids (it has: {', '.join(map(str, example)) or 'nothing'})")
    found = {name: np.asarray(example[name], dtype=np.int64) for name in NAMES if name in example}
    if "attention_mask" in example:
        real = np.asarray(example["attention_mask"]).astype(bool)
        found = {name: values[real] for name, values in found.items()}
    return found
