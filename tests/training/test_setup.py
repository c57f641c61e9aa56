"""Everything about a run that is wrong before it starts is one line."""

import json
import re
from pathlib import Path

import pytest
import torch

from ds_bert.errors import UserError
from ds_bert.training.setup import set_up_run, write_run_file
from tests.runs import parse_run, train

CONFIG = {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": {"type": "Adamm"}}, "optimizer.type: 'Adamm' is not known; did you mean 'Adam'?"),
        ({"scheduler": {"type": "WarmupLr"}}, "scheduler.type: 'WarmupLr' is not known; did you mean 'WarmupLR'?"),
        ({"optimizer": {}}, "no optimizer: add for example"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage: 3 is not supported; use 0, 1 or 2"),
        ({"zero_optimization": {"stage": 1, "compute_grad_norm": False}}, "zero_optimization.compute_grad_norm: false"),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, "bf16.check_grad_overflow: false would let NaN"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, 'torch_autocast.dtype: only "bfloat16"'),
        ({"train_batch_size": 400}, "the data hold 206 samples, less than one global batch of 400"),
    ],
)
def test_what_pretraining_cannot_do_is_refused_by_the_keys_name(run_args, small_model, change, message):
    args = run_args(small_model(0.0), {**CONFIG, **change})
    with pytest.raises(UserError, match=re.escape(f"{args.deepspeed_config}: {message}")):
        set_up_run(args, 2)


def test_fp16_where_the_device_has_none_is_refused_before_ranks_start(run_args, small_model, monkeypatch):
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: False)
    args = run_args(small_model(0.0), {**CONFIG, "fp16": {"enabled": True}})
    with pytest.raises(UserError, match=r'this device \(cpu\) cannot train in fp16; use "bf16": {"enabled": true}'):
        set_up_run(args, 2)


def test_a_run_folder_of_another_run_names_what_differs(run_args, small_model):
    args = run_args(small_model(0.0), CONFIG)
    write_run_file(set_up_run(args, 2))
    set_up_run(args, 4)
    args.seed = 7
    Path(args.deepspeed_config).write_text(json.dumps({**CONFIG, "gradient_clipping": 1.0}))
    with pytest.raises(UserError) as caught:
        set_up_run(args, 2)
    assert "holds another run: seed: 0 there, 7 now; gradient_clipping: None there, 1.0 now" in str(caught.value)


def test_another_length_of_an_auto_schedule_names_the_option(run_args, small_model):
    schedule = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": "auto"}}
    args = run_args(small_model(0.0), {**CONFIG, "scheduler": schedule}, max_steps=4)
    write_run_file(set_up_run(args, 2))
    args.max_steps = 6
    with pytest.raises(UserError, match=r"total_num_steps: 4 there, 6 now; keep --max-steps or --epochs, from which"):
        set_up_run(args, 2)


@pytest.mark.parametrize(
    ("resume", "message"),
    [
        ("never", "holds a run and --resume never forbids to go on with it"),
        ("latest", "--resume latest: must be auto, never or a checkpoint's name such as global_step100"),
    ],
)
def test_resume_options(run_args, small_model, resume, message):
    args = run_args(small_model(0.0), CONFIG)
    write_run_file(set_up_run(args, 2))
    args.resume = resume
    with pytest.raises(UserError, match=re.escape(message)):
        set_up_run(args, 2)


def test_an_output_folder_with_something_else_in_it_is_refused(run_args, small_model):
    args = run_args(small_model(0.0), CONFIG)
    Path(args.output).mkdir()
    (Path(args.output) / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"is not empty and holds no run \(no run.json\); name another folder"):
        set_up_run(args, 2)


def test_what_deepspeed_itself_refuses_is_one_line_on_all_ranks(rank_pool, run_args, small_model):
    bad = {**CONFIG, "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "bettas": [0.9, 0.9], "torch_adam": True}}}
    args = run_args(small_model(0.0), bad)
    answers = rank_pool(2).run(train, args)
    assert answers[0]["error"] == answers[1]["error"]
    assert "DeepSpeed refuses it: TypeError" in answers[0]["error"]
    assert "bettas" in answers[0]["error"]


def test_weights_of_a_folder_are_continued_unless_told_otherwise(rank_pool, run_args, small_model, tmp_path):
    from transformers import AutoConfig, AutoModelForMaskedLM

    torch.manual_seed(5)
    model = AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(small_model(0.0)))
    model.save_pretrained(tmp_path)
    frozen = {**CONFIG, "optimizer": {"type": "Adam", "params": {"lr": 0.0, "torch_adam": True}}}
    args = run_args(tmp_path, frozen, max_steps=1)
    continued = rank_pool(1).run(train, args)[0]
    assert "continues from the weights of" in continued["log"]
    assert all(torch.equal(continued["weights"][name], p) for name, p in model.named_parameters())
    options = {"data": args.data, "output": f"{args.output}2", "max_steps": 1}
    fresh_args = parse_run(model=tmp_path, deepspeed_config=args.deepspeed_config, **options)
    fresh_args.from_config = True
    fresh = rank_pool(1).run(train, fresh_args)[0]
    assert "starts from fresh weights" in fresh["log"]
    name = "bert.embeddings.word_embeddings.weight"
    assert not torch.equal(fresh["weights"][name], model.state_dict()[name])


def train_with_a_seed_of_its_own(args) -> str:
    import torch.distributed as dist

    args.seed = dist.get_rank()
    return train(args)["error"]


def test_ranks_that_were_told_different_things_say_so(rank_pool, run_args, small_model):
    args = run_args(small_model(0.0), CONFIG)
    message = "the ranks differ in seed: 0 on rank 0, 1 on rank 1; give all of them the same options"
    assert all(error.startswith(message) for error in rank_pool(2).run(train_with_a_seed_of_its_own, args))
