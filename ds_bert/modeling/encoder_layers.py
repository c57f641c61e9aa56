"""What can be done to a Hugging Face encoder's layers without changing its numbers: compiling, computing them twice."""

import logging

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ds_bert.errors import UserError, first_line

COMPILE_KEY = "ds_bert.execution.compile"
CHECKPOINTING_KEY = "ds_bert.execution.gradient_checkpointing"

log = logging.getLogger(__name__)


def encoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers as transformers marks them; empty for a model that does not."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def use_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Keep a layer's input only, and compute the layer again in the backward pass; dropout is repeated.

    Raises:
        UserError: the model cannot.
    """
    if not model.supports_gradient_checkpointing:
        raise UserError(f'{type(model).__name__} cannot checkpoint gradients; set "{CHECKPOINTING_KEY}": false')
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:  # its name in earlier transformers
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def compile_layers(model: PreTrainedModel) -> None:
    """Let `torch.compile` compile the encoder's layers at their first use, once for every number of tokens.

    One layer is compiled for all of them, since they share their code. Attention and dropout on a CPU stay as they are.
    Call it after `use_gradient_checkpointing`.

    Raises:
        UserError: transformers knows no layers of this model, or there is no working compiler here.
    """
    layers = encoder_layers(model)
    if not layers:
        raise UserError(f'{type(model).__name__} has no layers that can be compiled; set "{COMPILE_KEY}": false')
    try:
        torch.compile(torch.square)(torch.ones(2, device=model.device))
    except Exception as error:  # whatever the compiler, and what it calls, meets
        log.debug("", exc_info=True)
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f'torch.compile does not work here ({reason}); set "{COMPILE_KEY}": false') from None
    for layer in layers:
        # Dynamo compiles nothing of a layer that checkpoints as a whole, since attention cannot be traced.
        for module in layer.children() if layer.gradient_checkpointing else [layer]:
            module.compile(dynamic=True)
    log.info("the encoder's layers are compiled at their first use, which takes up to some minutes")
