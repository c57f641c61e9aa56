"""What is refused: the same by `ds_bert.initialize` in a user's own script and on the way of `ds-bert pretrain`."""

import re

import pytest
import torch

import ds_bert
from ds_bert.errors import UserError
from ds_bert.resolution import resolve

OURS = {"bucket_clipping": {"enabled": True}}
ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}
BASE = {"train_batch_size": 4, "optimizer": ADAM, "gradient_clipping": 1.0, "ds_bert": OURS}

REFUSED = {
    "Lamb with ZeRO": (
        {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 1}},
        "optimizer.type Lamb and zero_optimization.stage 1: ZeRO cuts layers in pieces",
    ),
    "an unknown optimizer": ({"optimizer": {"type": "Adamm"}}, "optimizer.type: 'Adamm' is not known"),
    "an unknown scheduler": ({"scheduler": {"type": "WarmupRL"}}, "scheduler.type: 'WarmupRL' is not known"),
    "no check of the gradient": (
        {"bf16": {"enabled": True, "check_grad_overflow": False}},
        "bf16.check_grad_overflow: false would let NaN into the weights",
    ),
    "no norm of the gradient": (
        {"zero_optimization": {"stage": 1, "compute_grad_norm": False}},
        "zero_optimization.compute_grad_norm: false takes away the check for non-finite gradients",
    ),
    "fp16 by autocast": (
        {"torch_autocast": {"enabled": True, "dtype": "float16"}},
        'torch_autocast.dtype: only "bfloat16" is supported',
    ),
    "an auto that nobody knows": (
        {"fp16": {"enabled": "auto"}},
        "only the Hugging Face Trainer knows, at: fp16.enabled",
    ),
    "batch sizes that do not divide": (
        {"train_batch_size": 5, "train_micro_batch_size_per_gpu": 2},
        "train_batch_size 5 is not a multiple of train_micro_batch_size_per_gpu 2 x world size 1 = 2",
    ),
    "bucket clipping of what it cannot clip": (
        {"prescale_gradients": True},
        'ds_bert.bucket_clipping does not work together with "prescale_gradients": true',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_both_ways_refuse_the_same(name):
    change, words = REFUSED[name]
    config = {**BASE, **change}
    with pytest.raises(UserError, match=re.escape(words)) as by_pretrain:
        resolve(config, world_size=1)
    with pytest.raises(UserError, match=re.escape(words)) as by_script:
        ds_bert.initialize(model=torch.nn.Linear(2, 2), config=config)
    assert str(by_script.value) == str(by_pretrain.value)


def test_what_is_refused_does_not_change_the_users_dictionary():
    config = {
        **BASE,
        "optimizer": {"type": "AdamW"},
        "train_micro_batch_size_per_gpu": 2,
        "ds_bert": {"lr_scaling": {"rule": "none", "base_lr": 1e-4}},
    }
    before = repr(config)
    assert resolve(config, world_size=1).ds_config["optimizer"]["params"]["lr"] == 1e-4
    assert repr(config) == before
