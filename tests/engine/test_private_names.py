"""Everything of other libraries' inside that this package relies on, named once.

A new version of DeepSpeed, transformers or torch that renames one of them breaks a line here and says which, before
a training breaks somewhere inside.
"""

import argparse
import ast
import inspect
from pathlib import Path

import optuna
import pytest
import torch

from ds_bert.engine import patches

PACKAGE = Path(__file__).parents[2] / "ds_bert"


def deepspeed_engine():
    from deepspeed.runtime.engine import DeepSpeedEngine

    return DeepSpeedEngine


def zero_optimizer():
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    return DeepSpeedZeroOptimizer


def deepspeed_config():
    from deepspeed.runtime.config import DeepSpeedConfig

    return DeepSpeedConfig


def pretrained_config():
    from transformers import PretrainedConfig

    return PretrainedConfig


def extension_builder():
    import torch.utils.cpp_extension

    return torch.utils.cpp_extension


# Names that only objects have stand in the source of what makes them; (what has it, names).
USED = [
    (deepspeed_engine, "_config _copy_recovery_script _global_grad_norm _manual_backward_expected _take_model_step"),
    (deepspeed_engine, "allreduce_gradients backward checkpoint_engine forward get_global_grad_norm scale"),
    (deepspeed_engine, "save_checkpoint load_checkpoint is_gradient_accumulation_boundary"),
    (deepspeed_config, "_param_dict gradient_clipping"),
    (zero_optimizer, "_zero_padding average_tensor averaged_gradients bit16_groups get_param_comm_dtype ipg_buckets"),
    (zero_optimizer, "reduce_bucket_size overflow"),
    (pretrained_config, "_attn_implementation"),
    (extension_builder, "_get_build_directory"),
    (
        lambda: torch,
        "_foreach_add_ _foreach_addcmul_ _foreach_div _foreach_div_ _foreach_lerp_ _foreach_mul_ _foreach_norm "
        "_foreach_sqrt_",
    ),
    (lambda: torch.nn.modules.batchnorm, "_NormBase"),
    (lambda: torch.nn.Module, "_parameters"),
    (lambda: argparse.ArgumentParser, "_actions"),
    (lambda: optuna.trial.FrozenTrial, "_trial_id"),
]
# Objects of this package, whose private names are its own matter; names that are documented all the same.
OURS = {"self", "cls", "super()"}
DOCUMENTED = {"_exit", "_replace"}
CASES = [(owner, name) for owner, names in USED for name in names.split()]


@pytest.mark.parametrize(("owner", "name"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_the_name_is_there(owner, name):
    found = owner()
    if not hasattr(found, name):
        assert f".{name}" in inspect.getsource(found), f"{found.__name__} no longer has {name!r}: see who uses it"


def test_no_private_name_is_used_that_is_not_listed():
    listed = {name for _, name in CASES}
    unlisted = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in OURS:
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("ds_bert"):
                names = [alias.name for alias in node.names]
            unlisted += [
                f"{path.relative_to(PACKAGE)}:{node.lineno} {name}"
                for name in names
                if name.startswith("_") and not name.startswith("__") and name not in listed | DOCUMENTED
            ]
    assert not unlisted


class Owner:
    def allreduce_gradients(self):
        return ["engine"]


def layer(name):
    return lambda inner: lambda: [name, *inner()]


def test_wrappers_lie_in_the_order_of_the_list_whoever_comes_first():
    owner = Owner()
    for name in ("rank clock", "bucket clipping", "trace"):
        patches.wrap(owner, "allreduce_gradients", name, layer(name))
    assert owner.allreduce_gradients() == ["rank clock", "trace", "bucket clipping", "engine"]


def test_a_second_wrapper_of_one_layer_takes_the_place_of_the_first():
    owner = Owner()
    for _ in range(2):
        patches.wrap(owner, "allreduce_gradients", "trace", layer("trace"))
    assert owner.allreduce_gradients() == ["trace", "engine"]


def test_what_somebody_else_wrapped_stays_inside():
    owner = Owner()
    patches.wrap(owner, "allreduce_gradients", "trace", layer("trace"))
    owner.allreduce_gradients = layer("somebody")(owner.allreduce_gradients)
    patches.wrap(owner, "allreduce_gradients", "rank clock", layer("rank clock"))
    assert owner.allreduce_gradients() == ["rank clock", "somebody", "trace", "engine"]


def test_an_unknown_layer_is_refused():
    with pytest.raises(ValueError, match="'mine' is not a layer of allreduce_gradients"):
        patches.wrap(Owner(), "allreduce_gradients", "mine", layer("mine"))
