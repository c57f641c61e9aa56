"""The DeepSpeed JSON with our section in it: what is filled in, and what each mistake is called."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_bert import config as configuration
from ds_bert import resolution
from ds_bert.errors import UserError

ADAM = {"type": "Adam", "params": {"lr": 1e-3}}


def resolve(**config):
    return resolution.resolve(
        {"train_batch_size": 8, "optimizer": ADAM, **config}, world_size=2, total_steps=70
    ).ds_config


def test_the_keys_of_the_section_are_these():
    """A key is added or renamed on purpose: change this list and docs/ together."""
    keys = {
        f"{name}.{inner}"
        for name, field in configuration.DsBertConfig.model_fields.items()
        for inner in configuration.section_of(field.annotation).model_fields
    }
    sampling = (
        "strategy", "cost_model", "window", "window_scope", "edges", "strata", "equal_counts",
        "max_tokens_per_micro_batch", "carry_over",
    )  # fmt: skip
    clipping = ("enabled", "threshold", "bucket_size_mb", "overlap", "communication_dtype", "trace")
    assert keys == {
        "execution.compile",
        "execution.gradient_checkpointing",
        "execution.packed",
        "masking.probability",
        "masking.unit",
        *(f"lr_scaling.{key}" for key in ("rule", "base_lr", "base_batch_size", "scale_warmup", "scale_adam")),
        *(
            f"schedule.{key}"
            for key in ("type", "warmup_steps", "start_step", "total_steps", "end_lr", "power", "continuous")
        ),
        *(f"sampling.{key}" for key in sampling),
        *(f"bucket_clipping.{key}" for key in clipping),
    }


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"execution": True}, "ds_bert.execution: must be an object {...} (given: True)"),
        (
            {"maskin": {}},
            "ds_bert.maskin: unknown key; did you mean 'masking'? "
            "(valid: bucket_clipping, sampling, execution, masking, lr_scaling, schedule)",
        ),
        (
            {"masking": {"probabilty": 0.1}},
            "ds_bert.masking.probabilty: unknown key; did you mean 'probability'? (valid: probability, unit)",
        ),
        ({"masking": {"probability": 1.5}}, "ds_bert.masking.probability: Input should be less than 1 (given: 1.5)"),
        ({"masking": {"probability": "1"}}, "ds_bert.masking.probability: Input should be a valid number (given: '1')"),
        (
            {"bucket_clipping": {"trace": "yes"}},
            "ds_bert.bucket_clipping.trace: Input should be a valid boolean (given: 'yes')",
        ),
        (
            {"bucket_clipping": {"bucket_size_mb": True}},
            "ds_bert.bucket_clipping.bucket_size_mb: Input should be a valid number (given: True)",
        ),
        (
            {"bucket_clipping": {"bucket_size_mb": float("inf")}},
            "ds_bert.bucket_clipping.bucket_size_mb: Input should be a finite number (given: inf)",
        ),
        ({"masking": {"unit": "char"}}, "ds_bert.masking.unit: 'char' is not valid (valid: token)"),
        (
            {"sampling": {"strategy": "balancd"}},
            "ds_bert.sampling.strategy: 'balancd' is not valid; did you mean 'balanced'? (valid: random, local_sort, "
            "stratified, balanced)",
        ),
        ({"sampling": {"edges": [2, 1]}}, "ds_bert.sampling.edges: must be rising, not [2, 1]"),
        ({"masking": {"xyz": 1}}, "ds_bert.masking.xyz: unknown key (valid: probability, unit)"),
    ],
)
def test_a_mistake_in_the_section_names_its_path(section, message):
    with pytest.raises(UserError, match="^" + re.escape(f"f.json: {message}") + "$"):
        configuration.parse_section({"ds_bert": section}, "f.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "b" 2}', ":2:6: not valid JSON: Expecting ':' delimiter; mend that place"),
        ("", ":1:1: not valid JSON: Expecting value; mend that place"),
        ("[1]", ": a DeepSpeed configuration is a JSON object {...}, not list"),
        ('{"a": {"b": 1, "b": 2}}', ": the key 'b' stands twice in one object; keep one of them"),
    ],
)
def test_broken_json_is_named_with_its_place(tmp_path, text, message):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(UserError, match="^" + re.escape(f"{path}{message}") + "$"):
        configuration.read_json(path)


def test_a_missing_or_binary_file_is_one_line(tmp_path):
    with pytest.raises(UserError, match="cannot read the DeepSpeed configuration: No such file or directory"):
        configuration.read_json(tmp_path / "none.json")
    (tmp_path / "x").write_bytes(b"\xff\xfe{")
    with pytest.raises(UserError, match="not UTF-8 text: byte 0"):
        configuration.read_json(tmp_path / "x")
    with pytest.raises(UserError, match="must be a regular file, since every rank reads it"):
        configuration.read_json(tmp_path)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
def test_any_two_batch_sizes_give_the_third(micro, accumulation, world_size):
    batch = micro * accumulation * world_size
    full = (batch, micro, accumulation)
    for missing in resolution.BATCH_KEYS:
        given = dict(zip(resolution.BATCH_KEYS, full, strict=True))
        for value in (None, "auto"):
            given[missing] = value
            assert resolution.resolve_batch_sizes(given, world_size) == full


@pytest.mark.parametrize(
    ("batch", "micro", "accumulation", "message"),
    [
        (30, 8, None, "30 is not a multiple of train_micro_batch_size_per_gpu 8 x world size 2 = 16; nearest valid "
         "train_batch_size: 16 or 32"),
        (5, None, 4, "5 is not a multiple of gradient_accumulation_steps 4 x world size 2 = 8; nearest valid "
         "train_batch_size: 8"),
        (7, None, None, "7 is not a multiple of world size 2 = 2; nearest valid train_batch_size: 6 or 8"),
        (30, 8, 2, "30 is not train_micro_batch_size_per_gpu 8 x gradient_accumulation_steps 2 x world size 2 = 32; "
         "write train_batch_size 32"),
        (None, None, 4, "no batch size: give train_batch_size"),
        (0, None, None, "train_batch_size: must be a whole number of at least 1, not 0"),
        (8, "4", None, "train_micro_batch_size_per_gpu: must be a whole number of at least 1, not '4'"),
        (True, None, None, "train_batch_size: must be a whole number of at least 1, not True"),
    ],
)  # fmt: skip
def test_batch_sizes_that_do_not_divide_give_the_numbers_and_the_nearest(batch, micro, accumulation, message):
    values = dict(zip(resolution.BATCH_KEYS, (batch, micro, accumulation), strict=True))
    with pytest.raises(UserError, match=re.escape(message)):
        resolution.resolve_batch_sizes(values, 2)


def test_a_scheduler_without_a_peak_takes_the_optimizers_rate_and_the_other_way_round():
    config = resolve(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}})
    assert config["scheduler"]["params"]["warmup_max_lr"] == 1e-3
    adam = {"type": "Adam"}
    config = resolve(optimizer=adam, scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 2e-3}})
    assert config["optimizer"]["params"]["lr"] == 2e-3


def test_two_learning_rates_are_an_error_that_names_both():
    message = "two learning rates: optimizer.params.lr is 0.001 and scheduler.params.warmup_max_lr is 0.002"
    with pytest.raises(UserError, match=re.escape(message)):
        resolve(scheduler={"type": "WarmupDecayLR", "params": {"warmup_max_lr": 2e-3}})
    resolve(scheduler={"type": "WarmupDecayLR", "params": {"warmup_max_lr": 1e-3}})


def test_auto_values_are_filled_where_known():
    config = resolve(
        train_micro_batch_size_per_gpu="auto",
        gradient_accumulation_steps="auto",
        optimizer={"type": "Adam", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}},
        scheduler={
            "type": "WarmupDecayLR",
            "params": {
                "warmup_max_lr": 3e-4, "warmup_min_lr": "auto", "warmup_num_steps": 5, "total_num_steps": "auto",
            },
        },
        zero_optimization={"stage": 1, "stage3_max_live_parameters": "auto"},
    )  # fmt: skip
    assert config["optimizer"]["params"] == {"lr": 3e-4}
    assert config["scheduler"]["params"] == {
        "warmup_max_lr": 3e-4, "warmup_min_lr": 0.0, "warmup_num_steps": 5, "total_num_steps": 70,
    }  # fmt: skip
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (4, 1)
    assert config["zero_optimization"] == {"stage": 1}


def test_auto_values_nobody_knows_are_all_named():
    message = "at: optimizer.params.lr, optimizer.params.weight_decay, gradient_clipping; write the numbers"
    with pytest.raises(UserError, match=re.escape(message)):
        resolve(gradient_clipping="auto", optimizer={"type": "Adam", "params": {"lr": "auto", "weight_decay": "auto"}})


def test_resolving_does_not_change_what_was_given():
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR"},
    }
    before = json.dumps(config)
    resolution.resolve(config, world_size=1)
    assert json.dumps(config) == before


@pytest.mark.parametrize("path", sorted(Path("ds_configs").rglob("*.json")), ids=str)
def test_every_shipped_configuration_is_valid(path, fp16_allowed):
    config = configuration.read_json(path)
    configuration.parse_section(config, str(path))
    resolved = resolution.resolve(config, world_size=2, total_steps=100, hidden_size=768).ds_config
    assert '"auto"' not in json.dumps(resolved)
    rates = [v for k, v in re.findall(r'"(lr|base_lr|warmup_max_lr)": ([\d.e-]+)', path.read_text())]
    assert len(rates) == 1
