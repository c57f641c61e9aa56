"""Packed batches for Hugging Face's Trainer."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from transformers import DataCollatorForLanguageModeling

from ds_bert.data.collator import packed_row
from ds_bert.errors import UserError


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
            examples: token ids, or dictionaries with `input_ids` and, if you have it, `special_tokens_mask`.

        Returns:
            `input_ids` and `labels` (-100 where nothing is masked): (1, T) int64, and what `packed_row` returns.
        """
        examples = [example if isinstance(example, Mapping) else {"input_ids": example} for example in examples]
        examples.sort(key=lambda example: len(example["input_ids"]))
        names = {"input_ids", "special_tokens_mask"}.intersection(*examples)
        row = {name: list(chain.from_iterable(example[name] for example in examples)) for name in names}
        batch = super().torch_call([row])
        lengths = [len(example["input_ids"]) for example in examples]
        return {
            "input_ids": batch["input_ids"],
            "labels": batch["labels"],
            **packed_row(lengths, self.first_position),
        }
