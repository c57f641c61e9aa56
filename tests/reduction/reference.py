"""Bucket clipping as one would write it without the package: clip each bucket on each rank, then average.

Gradients are taken from a copy of the model whose decoder has a weight of its own, so that the dense and the lookup
part of a tied embedding are two gradients.
"""

import copy
import math

import torch
import torch.distributed as dist
from torch import nn

DECODER = "cls.predictions.decoder.weight"
EMBEDDING = "bert.embeddings.word_embeddings.weight"


def tiny_bert(tied: bool = True, seed: int = 0) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=120, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, tie_word_embeddings=tied,
    )  # fmt: skip
    return BertForMaskedLM(config)


def batch(step: int, micro_step: int, rank: int) -> dict[str, torch.Tensor]:
    """Ids and labels; ranks differ in length, so their gradients differ much."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro_step + rank)
    shape = (2, 4 + 3 * rank)
    # Token 0 is the padding token, whose row gets no gradient from the lookup.
    return {name: torch.randint(0, 60, shape, generator=generator) for name in ("input_ids", "labels")}


def untied_copy(model: nn.Module) -> nn.Module:
    copied = copy.deepcopy(model)
    if copied.cls.predictions.decoder.weight is copied.bert.embeddings.word_embeddings.weight:
        copied.cls.predictions.decoder.weight = nn.Parameter(
            copied.bert.embeddings.word_embeddings.weight.detach().clone()
        )
    return copied


def local_gradients(model: nn.Module, batches: list[dict], scale: float, autocast: bool) -> dict[str, torch.Tensor]:
    """Of the mean loss over the batches, unscaled, in double precision; the decoder's apart."""
    model.zero_grad()
    for one in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**one).loss
        (loss / len(batches) * scale).backward()
    return {name: p.grad.double() / scale for name, p in model.named_parameters() if p.grad is not None}


def clip(parts: list[torch.Tensor], threshold: float) -> float:
    """Scale in place to at most the threshold; the norm before."""
    norm = math.sqrt(sum(part.square().sum().item() for part in parts))
    for part in parts:
        part.mul_(min(1.0, threshold / (norm + 1e-6)))
    return norm


def thresholds(rule: str, max_norm: float, sizes: list[int]) -> list[float]:
    return {
        "proportional": [max_norm * math.sqrt(size / sum(sizes)) for size in sizes],
        "equal": [max_norm / math.sqrt(len(sizes))] * len(sizes),
        "uniform": [max_norm] * len(sizes),
    }[rule]


def clipped_average(
    gradients: dict[str, torch.Tensor], buckets: list[list[str]], limits: list[float], split: bool
) -> tuple[dict[str, torch.Tensor], float]:
    """Clip this rank's buckets and average over the ranks.

    Args:
        gradients: from `local_gradients`; changed.
        buckets: names of the tied model's parameters; one without a gradient stays without.
        limits: what each bucket is clipped at.
        split: whether the embedding's two parts are clipped apart, at half of its limit each.

    Returns:
        the averaged gradient, and the root of the mean over ranks of the squared local norms.
    """
    if not split and not any(DECODER in names for names in buckets):
        gradients[EMBEDDING] = gradients[EMBEDDING] + gradients.pop(DECODER)
    square = 0.0
    for names, limit in zip(buckets, limits, strict=True):
        if split and names == [EMBEDDING]:
            norm = clip([gradients[DECODER]], limit / 2) + clip([gradients[EMBEDDING]], limit / 2)
            gradients[EMBEDDING] = gradients[EMBEDDING] + gradients.pop(DECODER)
        else:
            norm = clip([gradients[name] for name in names if name in gradients], limit)
        square += norm**2
    return average(gradients), math.sqrt(average({"": torch.tensor([square], dtype=torch.float64)})[""].item())


def average(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for gradient in gradients.values():
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())
    return gradients


def norm_of(gradients: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients.values()))
