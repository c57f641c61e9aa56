"""Hugging Face encoders as they are: building them, their limits, and the head on masked positions only."""

from ds_bert.modeling.build import (
    architecture,
    build_model,
    check_same_tokenizer,
    check_tokenizer_and_lengths,
    has_weights,
    load_config,
)
from ds_bert.modeling.masked_head import MaskedPositionHead, masked_lm_loss
from ds_bert.modeling.presets import PRESETS

__all__ = [
    "PRESETS",
    "MaskedPositionHead",
    "architecture",
    "build_model",
    "check_same_tokenizer",
    "check_tokenizer_and_lengths",
    "has_weights",
    "load_config",
    "masked_lm_loss",
]
