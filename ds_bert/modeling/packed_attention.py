"""Attention within the sequences of a packed row, for every Hugging Face encoder that uses transformers' interface.

Importing this module registers it with transformers under the name `PACKED_ATTENTION`. A packed batch is one row of all
tokens, with the boundaries of its sequences under the names that transformers has for flash-attention
(`cu_seq_lens_q`, `max_length_q`); only attention sees them. A batch without them is attended as by "sdpa".

S = sequences, T = tokens of the row, N = query heads, K = key and value heads, D = head size.
"""

import functools
import itertools
from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ds_bert.layers import cpu_dropout

PACKED_ATTENTION = "ds_bert_packed"

# Of the GPUs whose flash-attention kernels torch and flash-attn have: A100 and newer.
FLASH_CAPABILITY = (8, 0)

# On a CPU, tokens of a sequence up to which its attention scores are held in training.
HELD_SCORES = 512


class PackedRow(NamedTuple):
    """What the kernels are told beside query, key and value; see `packed_attention`."""

    boundaries: torch.Tensor
    max_length: int
    dropout: float
    scaling: float | None
    sliding_window: int | None

    @property
    def window_size(self) -> tuple[int, int]:
        """Positions seen to the left and to the right, without the token itself, as flash-attention counts them."""
        return (-1, -1) if self.sliding_window is None else (self.sliding_window - 1, self.sliding_window - 1)


@torch.compiler.disable  # the lengths are read; kernels that could be traced have nothing left to fuse
def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """As transformers calls it.

    Args:
        module: the attention layer.
        query: (1, N, T, D).
        key, value: (1, K, T, D).
        attention_mask: None for a packed row.
        dropout: probability, 0 outside training.
        scaling: of the scores; None for D ** -0.5.
        sliding_window: a token sees those less than so many positions away; None for all.
        cu_seq_lens_q: (S + 1,) int32, where each sequence begins, and T.
        max_length_q: tokens of the longest sequence.

    Returns:
        (1, T, N, D), and None for the weights, which are never held.
    """
    if cu_seq_lens_q is None:
        if attention_mask is None and sliding_window is not None:
            attention_mask = window_mask(query.shape[2], sliding_window, query.device)
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if getattr(module, "is_causal", False):
        raise ValueError("attention that sees earlier tokens only cannot be packed")
    attend = choose_kernel(query.device, query.dtype, dropout)
    output_TND = attend(
        *(tensor.transpose(1, 2).squeeze(0) for tensor in (query, key, value)),
        PackedRow(cu_seq_lens_q, int(max_length_q), dropout, scaling, sliding_window),
    )
    return output_TND.unsqueeze(0), None


def packed_attention_mask(*args, attention_mask: torch.Tensor | None = None, **kwargs) -> torch.Tensor | None:
    """What transformers shall make of a model's 2-d mask: nothing for a packed row, for that would be T x T."""
    if attention_mask is None:
        return None
    return sdpa_mask(*args, attention_mask=attention_mask, **kwargs)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, packed_attention_mask)


@functools.cache  # every layer asks, in every forward pass
def choose_kernel(device: torch.device, dtype: torch.dtype, dropout: float) -> Callable[..., torch.Tensor]:
    """The fastest of the kernels below that can do it here."""
    half = dtype in (torch.float16, torch.bfloat16)
    if device.type != "cuda" or not half or torch.cuda.get_device_capability(device) < FLASH_CAPABILITY:
        return attend_by_runs
    if find_spec("flash_attn") is not None:
        return attend_with_flash_attn
    # torch's kernel has no dropout.
    return attend_by_runs if dropout else attend_with_torch_varlen


def attend_by_runs(
    query_TND: torch.Tensor, key_TKD: torch.Tensor, value_TKD: torch.Tensor, row: PackedRow
) -> torch.Tensor:
    """Scaled-dot-product attention on each run of sequences of one length; on every device and in every dtype.

    A collator that sorts the sequences of a row by length makes few runs.
    """
    lengths = row.boundaries.diff().tolist()
    runs = [(length, len(list(same))) for length, same in itertools.groupby(lengths)]
    # Not slices: the backward pass of each would fill a tensor of the whole row.
    pieces = (tensor.split([length * count for length, count in runs]) for tensor in (query_TND, key_TKD, value_TKD))
    outputs = []
    for (length, count), *piece in zip(runs, *pieces, strict=True):
        query, key, value = (tensor.unflatten(0, (count, length)).transpose(1, 2) for tensor in piece)
        mask = None
        if row.sliding_window is not None and row.sliding_window < length:
            mask = window_mask(length, row.sliding_window, query.device)
        grouped = query.shape[1] != key.shape[1]
        if query.device.type == "cpu" and not grouped and (row.dropout or _trains(length)):
            output = _attend_holding_scores(query, key, value, mask, row)
        else:
            output = F.scaled_dot_product_attention(
                query, key, value, mask, row.dropout, scale=row.scaling, enable_gqa=grouped
            )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def _trains(length: int) -> bool:
    # torch's fused kernel is as fast forward, but its backward takes twice the time in bf16.
    return torch.is_grad_enabled() and length <= HELD_SCORES


def _attend_holding_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    row: PackedRow,
) -> torch.Tensor:
    # What torch computes on a CPU where dropout keeps it from its fused kernel, but for the slow draw of the mask.
    scores = torch.matmul(query * (row.scaling or query.shape[-1] ** -0.5), key.transpose(-2, -1))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.softmax(-1)
    return torch.matmul(cpu_dropout.dropout(weights, row.dropout) if row.dropout else weights, value)


def attend_with_torch_varlen(
    query_TND: torch.Tensor, key_TKD: torch.Tensor, value_TKD: torch.Tensor, row: PackedRow
) -> torch.Tensor:
    """torch's own variable-length kernel, on CUDA, in half precision, without dropout."""
    return varlen_attn(
        query_TND,
        key_TKD,
        value_TKD,
        row.boundaries,
        row.boundaries,
        row.max_length,
        row.max_length,
        scale=row.scaling,
        window_size=row.window_size,
        enable_gqa=query_TND.shape[1] != key_TKD.shape[1],
    )


def attend_with_flash_attn(
    query_TND: torch.Tensor, key_TKD: torch.Tensor, value_TKD: torch.Tensor, row: PackedRow
) -> torch.Tensor:
    """The package flash-attn, on CUDA, in half precision."""
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(
        query_TND,
        key_TKD,
        value_TKD,
        row.boundaries,
        row.boundaries,
        row.max_length,
        row.max_length,
        dropout_p=row.dropout,
        softmax_scale=row.scaling,
        window_size=row.window_size,
    )


def window_mask(length: int, sliding_window: int, device: torch.device) -> torch.Tensor:
    """(length, length) bool: which positions a token sees."""
    position = torch.arange(length, device=device)
    return (position[:, None] - position[None, :]).abs() < sliding_window
