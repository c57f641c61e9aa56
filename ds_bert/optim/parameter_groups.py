"""Which parameters weight decay is for, told by what they are: names differ from model to model."""

from torch import nn

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


def parameter_groups(model: nn.Module) -> list[dict]:
    """The trainable parameters in groups for an optimizer: with its weight decay, and without any.

    No decay for biases, norms and everything else of one dimension.

    Returns:
        one group for each kind that the model has: {"params": [...]} and {"params": [...], "weight_decay": 0.0}.
    """
    of_norms = {
        id(p) for module in model.modules() if isinstance(module, NORMS) for p in module.parameters(recurse=False)
    }
    decayed, plain = [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (plain if parameter.dim() <= 1 or id(parameter) in of_norms else decayed).append(parameter)
    groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
