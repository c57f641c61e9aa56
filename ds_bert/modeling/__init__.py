"""Hugging Face encoders as they are: building them, their limits, packed execution, the head on masked positions."""

from ds_bert.layers.cpu_dropout import use_cpu_dropout
from ds_bert.modeling.build import (
    architecture,
    build_model,
    check_same_tokenizer,
    check_tokenizer_and_lengths,
    first_position,
    has_weights,
    load_config,
)
from ds_bert.modeling.encoder_layers import compile_layers, use_gradient_checkpointing
from ds_bert.modeling.masked_head import MaskedPositionHead, masked_lm_loss, num_correct
from ds_bert.modeling.packed_attention import PACKED_ATTENTION
from ds_bert.modeling.packed_execution import check_packed_execution, collator_for, use_packed_execution
from ds_bert.modeling.presets import PRESETS

__all__ = [
    "PACKED_ATTENTION",
    "PRESETS",
    "MaskedPositionHead",
    "architecture",
    "build_model",
    "check_packed_execution",
    "check_same_tokenizer",
    "check_tokenizer_and_lengths",
    "collator_for",
    "compile_layers",
    "first_position",
    "has_weights",
    "load_config",
    "masked_lm_loss",
    "num_correct",
    "use_cpu_dropout",
    "use_gradient_checkpointing",
    "use_packed_execution",
]
