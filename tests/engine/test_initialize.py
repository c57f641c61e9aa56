"""`ds_bert.initialize` is `deepspeed.initialize` with our section checked."""

import inspect
import json
import re

import pytest


def weights_after_training(initialize_name: str, section: dict | None) -> list:
    import deepspeed
    import torch

    import ds_bert

    initialize = {"ds_bert": ds_bert.initialize, "deepspeed": deepspeed.initialize}[initialize_name]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    config = {
        "train_batch_size": 4,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    if section is not None:
        config["ds_bert"] = section
    results = initialize(model=model, model_parameters=model.parameters(), config=config)
    assert len(results) == 4
    engine, optimizer, loader, scheduler = results
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    assert (loader, scheduler) == (None, None)
    assert optimizer is engine.optimizer
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        engine.backward(engine(torch.randn(2, 8, generator=generator)).square().mean())
        engine.step()
    return [p.detach().clone() for p in engine.module.parameters()]


def test_without_the_section_training_is_plain_deepspeed_bit_for_bit(rank_pool):
    import torch

    expected = rank_pool(2).run(weights_after_training, "deepspeed", None)[0]
    for section in (None, {"masking": {"probability": 0.2}}):
        ours = rank_pool(2).run(weights_after_training, "ds_bert", section)[0]
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_the_signature_is_deepspeeds():
    import deepspeed

    import ds_bert

    assert inspect.signature(ds_bert.initialize) == inspect.signature(deepspeed.initialize)


@pytest.mark.parametrize("how", ["dictionary", "file", "config_params", "args"])
def test_an_unknown_key_is_found_wherever_the_configuration_comes_from(tmp_path, how):
    import argparse

    import ds_bert
    from ds_bert.errors import UserError

    config = {"train_batch_size": 1, "ds_bert": {"masking": {"probabilty": 0.2}}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    arguments = {
        "dictionary": {"config": config},
        "file": {"config": str(path)},
        "config_params": {"config_params": config},
        "args": {"args": argparse.Namespace(deepspeed_config=str(path))},
    }[how]
    message = "ds_bert.masking.probabilty: unknown key; did you mean 'probability'?"
    with pytest.raises(UserError, match=re.escape(message)):
        ds_bert.initialize(model=None, **arguments)
