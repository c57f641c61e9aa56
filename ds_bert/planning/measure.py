"""Timing a model's training step on this machine, to know what a sample of each length costs here."""

import platform
import sys
import time

import numpy as np
import torch

from ds_bert.modeling import MaskedPositionHead, architecture, build_model

LENGTHS = (16, 32, 64, 96, 128, 192, 256, 384, 512)
REPEATS = 5
MASKED_SHARE = 0.15


def measure_costs(model_name: str, *, micro_batch_size: int) -> dict:
    """Time forward and backward over batches of equally long samples and fit what a sample costs.

    seconds of a micro-step of B samples = seconds_per_step + B (seconds_per_token n + seconds_per_token_squared n^2)

    by least squares over the relative errors; a coefficient that comes out negative is left out of the fit.

    Args:
        model_name: preset, or Hugging Face name or folder.
        micro_batch_size: samples.

    Returns:
        the coefficients, the measured points (medians) and where they were measured, as plain values.

    Raises:
        UserError: there is no such model.
    """
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    config = architecture(model_name)
    model = build_model(model_name, config, from_config=True).to(device)
    head = MaskedPositionHead(model)
    head.use_fused_loss(model)
    points = []
    for length in LENGTHS:
        points.append({"length": length, "seconds": _seconds(model, head, micro_batch_size, length, device)})
        print(f"{micro_batch_size} samples of {length}: {1e3 * points[-1]['seconds']:.1f} ms", file=sys.stderr)
    constant, linear, square = _fit(points, micro_batch_size)
    return {
        "seconds_per_step": constant,
        "seconds_per_token": linear,
        "seconds_per_token_squared": square,
        "micro_batch_size": micro_batch_size,
        "measured": points,
        "model": model_name,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine(),
        "torch": torch.__version__,
    }


def _seconds(
    model: torch.nn.Module, head: MaskedPositionHead, samples: int, length: int, device: torch.device
) -> float:
    vocabulary = model.get_input_embeddings().num_embeddings
    input_ids = torch.randint(5, vocabulary, (samples, length), device=device)
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    positions = torch.arange(0, samples * length, round(1 / MASKED_SHARE), device=device)
    times = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        loss = head.loss(model, inputs, positions, input_ids.flatten()[positions])
        loss.backward()
        loss.item()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - started)
    return float(np.median(times[1:]))


def _fit(points: list[dict], samples: int) -> tuple[float, float, float]:
    length = np.array([point["length"] for point in points], dtype=np.float64)
    seconds = np.array([point["seconds"] for point in points])
    terms = np.stack([np.ones_like(length), samples * length, samples * length**2], axis=1) / seconds[:, None]
    used = [0, 1, 2]
    while True:
        found, *_ = np.linalg.lstsq(terms[:, used], np.ones(len(points)), rcond=None)
        if (found >= 0).all():
            result = np.zeros(3)
            result[used] = found
            return tuple(result.tolist())
        used.pop(int(np.argmin(found)))
        if used == [0]:  # noise hid that longer samples take longer
            used = [1]
