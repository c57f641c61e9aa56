"""How much memory a rank will need, before anything is allocated: an estimate, said as one."""

from dataclasses import dataclass

from transformers import PreTrainedModel

from ds_bert.config import DsBertConfig

# Of torch, DeepSpeed and Python themselves, without a model.
BASE_BYTES = 0.6e9

# Of activations of an encoder layer, for each token and hidden unit, in 16 bits and without attention scores, which
# fused attention does not keep: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
# (arXiv 2205.05198), equation 2 without its second term.
LAYER_BYTES = 34


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank."""

    parameters: int
    """Their number."""
    states: float
    """Of weights, gradients and optimizer."""
    activations: float

    @property
    def total(self) -> float:
        return BASE_BYTES + self.states + self.activations

    @property
    def checkpoint(self) -> float:
        """Of a checkpoint of the whole run: fp32 weights and two moments, and the weights once more."""
        return 16 * self.parameters


def estimate_memory(
    model: PreTrainedModel, ds_config: dict, section: DsBertConfig, *, tokens: int, world_size: int
) -> MemoryEstimate:
    """Estimate the memory of a rank.

    Args:
        model: an encoder with a masked-language-modelling head; it may be on the meta device.
        ds_config: the DeepSpeed configuration.
        section: its section "ds_bert".
        tokens: of a micro-batch, padding included where samples are padded.
        world_size: number of ranks.
    """
    parameters = model.num_parameters()
    half = any(ds_config.get(key, {}).get("enabled") for key in ("bf16", "fp16"))
    stage = ds_config.get("zero_optimization", {}).get("stage", 0)
    weights, gradients, moments = (2, 2, 12) if half else (4, 4, 8)  # in half precision with fp32 master weights
    per_parameter = weights + gradients / (world_size if stage >= 2 else 1) + moments / (world_size if stage else 1)
    # Autocast computes in 16 bits with fp32 weights.
    wide = 1 if half or ds_config.get("torch_autocast", {}).get("enabled") else 2
    hidden = getattr(model.config, "hidden_size", 0)
    layer = LAYER_BYTES * wide * tokens * hidden
    layers = getattr(model.config, "num_hidden_layers", 0)
    inputs_only = section.execution.gradient_checkpointing
    kept = layer + 2 * wide * tokens * hidden * layers if inputs_only else layer * layers
    # Scores over the vocabulary and their gradient, in fp32, at masked positions.
    scores = 2 * 4 * section.masking.probability * tokens * model.config.vocab_size
    return MemoryEstimate(parameters, parameters * per_parameter, kept + scores)
