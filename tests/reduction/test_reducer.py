"""The reducer under plain torch.distributed: what it promises for odd models and odd steps."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ds_bert.errors import UserError
from ds_bert.reduction import attach
from tests.reduction import reference
from tests.runs import relative_difference


class Linears(nn.Module):
    """Parameters a, b, c, d; the loss is their product with given tensors, so that the gradients are those tensors."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abcd":
            self.register_parameter(name, nn.Parameter(torch.zeros(40)))

    def forward(self, gradients: dict[str, torch.Tensor], order: str = "abcd") -> torch.Tensor:
        # Autograd runs what was computed last first.
        total = torch.zeros(())
        for name in reversed(order):
            if name in gradients:
                total = total + (getattr(self, name) * gradients[name]).sum()
        return total


def averaged(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def draw(rank: int, step: int, names: str = "abcd") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(40, generator=generator) for name in names}


def run_steps(names_of_rank: dict[int, str], order_of_rank: dict[int, str], steps: int = 3) -> list[dict]:
    """What is averaged when ranks have gradients of some parameters only, ready in an order of their own."""
    module, rank, found = Linears(), dist.get_rank(), []
    # Two parameters a bucket.
    reducer = attach(module, max_norm=1e6, bucket_size_mb=340 / 2**20)
    for step in range(steps):
        module(draw(rank, step, names_of_rank[rank]), order_of_rank[rank]).backward()
        reducer.finish()
        found.append(averaged(module))
        module.zero_grad()
    reducer.detach()
    return found


def expected_average(names_of_rank: dict[int, str], step: int) -> dict[str, torch.Tensor | None]:
    result: dict[str, torch.Tensor | None] = {}
    for name in "abcd":
        having = [rank for rank, names in names_of_rank.items() if name in names]
        result[name] = (
            sum(draw(rank, step, names_of_rank[rank])[name] for rank in having) / len(names_of_rank) if having else None
        )
    return result


@pytest.mark.parametrize(
    ("names_of_rank", "order_of_rank"),
    [
        ({0: "abcd", 1: "abcd"}, {0: "abcd", 1: "dcba"}),
        ({0: "abcd", 1: "ab"}, {0: "abcd", 1: "abcd"}),
        ({0: "ab", 1: "cd"}, {0: "dcba", 1: "abcd"}),
        ({0: "acd", 1: "a"}, {0: "abcd", 1: "abcd"}),
    ],
    ids=["another order", "a bucket without any", "each has other buckets", "one that nobody has"],
)
def test_ranks_agree_whatever_gradients_they_have(rank_pool, names_of_rank, order_of_rank):
    answers = rank_pool(2).run(run_steps, names_of_rank, order_of_rank)
    for steps in answers:
        for step, ours in enumerate(steps):
            for name, expected in expected_average(names_of_rank, step).items():
                if expected is None:
                    assert ours[name] is None
                else:
                    assert torch.allclose(ours[name], expected, atol=1e-6)


def frozen_grouped_and_mixed() -> dict:
    """A frozen parameter, two optimizer groups, two dtypes and one shared parameter."""
    module, rank = Linears(), dist.get_rank()
    module.b.requires_grad_(False)
    module.c = nn.Parameter(module.c.double())
    module.shared = module.a
    reducer = attach(module, max_norm=1e6)
    optimizer = torch.optim.SGD([{"params": [module.a], "lr": 1.0}, {"params": [module.c, module.d], "lr": 2.0}])
    drawn = draw(rank, 0)
    module(drawn).backward()
    reducer.finish()
    optimizer.step()
    reducer.detach()
    return {"weights": {name: p.detach() for name, p in module.named_parameters()}, "plan": reducer.plan.buckets}


def test_frozen_parameters_groups_and_dtypes(rank_pool):
    answer = rank_pool(2).run(frozen_grouped_and_mixed)[0]
    expected = {name: (draw(0, 0)[name] + draw(1, 0)[name]) / 2 for name in "abcd"}
    weights = answer["weights"]
    assert torch.equal(weights["b"], torch.zeros(40))
    assert torch.allclose(weights["a"], -expected["a"], atol=1e-6)
    assert torch.allclose(weights["c"].float(), -2 * expected["c"], atol=1e-6)
    assert weights["c"].dtype == torch.float64
    assert sorted(map(sorted, answer["plan"])) == [["a", "d"], ["c"]]


def accumulate(overlap: bool) -> dict:
    module, rank = Linears(), dist.get_rank()
    reducer = attach(module, max_norm=1e6, overlap=overlap)
    for step in range(2):
        for micro_step in range(3):
            # b only in the first micro-step: its sum must be sent all the same.
            names = "abcd" if micro_step == 0 else "acd"
            with reducer.no_sync() if micro_step < 2 else contextlib.nullcontext():
                module(draw(rank, 10 * step + micro_step, names)).backward()
        reducer.finish()
        result = averaged(module)
        module.zero_grad()
    reducer.detach()
    return result


@pytest.mark.parametrize("overlap", [True, False])
def test_no_sync_accumulates(rank_pool, overlap):
    answer = rank_pool(2).run(accumulate, overlap)[0]
    drawn = [
        draw(rank, 10 + micro_step, "abcd" if micro_step == 0 else "acd") for rank in (0, 1) for micro_step in range(3)
    ]
    for name in "abcd":
        expected = sum(one[name] for one in drawn if name in one) / 2
        assert torch.allclose(answer[name], expected, atol=1e-6)


def second_backward() -> str:
    module = Linears()
    reducer = attach(module, max_norm=1.0)
    try:
        for _ in range(2):
            module(draw(0, 0)).backward()
            reducer.finish()
        module(draw(0, 0)).backward()
        with pytest.raises(UserError, match=r"a second gradient of . arrived after its bucket was sent") as caught:
            module(draw(0, 0)).backward()
        reducer.finish()
        return str(caught.value)
    finally:
        reducer.detach()


def test_a_backward_pass_too_many_is_an_error(rank_pool):
    assert "no_sync()" in rank_pool(2).run(second_backward)[0]


def differing(max_norm_of_rank: list[float], extra_on_rank_1: bool, other_weights_on_rank_1: bool = False) -> str:
    module = Linears()
    if other_weights_on_rank_1 and dist.get_rank() == 1:
        next(module.parameters()).data[0] += 1e-6
    if extra_on_rank_1 and dist.get_rank() == 1:
        module.e = nn.Parameter(torch.zeros(3))
    reducer = attach(module, max_norm=max_norm_of_rank[dist.get_rank()])
    module(draw(0, 0)).backward()
    try:
        reducer.finish()
    except UserError as error:
        return str(error)
    finally:
        reducer.detach()
    return "no error"


@pytest.mark.parametrize(
    ("what", "arguments"),
    [
        ("gradient_clipping", ([1.0, 2.0], False)),
        ("trainable parameters", ([1.0, 1.0], True)),
        ("weights", ([1.0, 1.0], False, True)),
    ],
)
def test_ranks_that_differ_stop_at_the_first_step(rank_pool, what, arguments):
    for answer in rank_pool(2).run(differing, *arguments):
        assert f"bucket clipping: the ranks differ in {what}: " in answer


def test_one_process_needs_no_process_group():
    module = Linears()
    reducer = attach(module, max_norm=1.0)
    module({name: torch.full((40,), 5.0) for name in "abcd"}).backward()
    statistics = reducer.finish()
    assert statistics.grad_norm_after_clip == pytest.approx(1.0, rel=1e-5)
    assert statistics.grad_norm_before_clip == pytest.approx(5 * 160**0.5, rel=1e-6)
    assert statistics.clipped_share == 1
    assert statistics.wait_s >= 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_norm": 0}, "max_norm: must be a positive number"),
        ({"max_norm": float("nan")}, "max_norm: must be a positive number"),
        ({"max_norm": 1, "threshold": "half"}, "threshold: 'half' is not known (valid: proportional, equal, uniform)"),
        ({"max_norm": 1, "bucket_size_mb": 0}, "bucket_size_mb: must be a positive number"),
        ({"max_norm": "1"}, "max_norm: must be a positive number, not '1'"),
        ({"max_norm": 1, "communication_dtype": "bf16"}, "communication_dtype: give a torch.dtype or None, not 'bf16'"),
    ],
)
def test_bad_settings(arguments, message):
    with pytest.raises(UserError) as caught:
        attach(Linears(), **arguments)
    assert message in str(caught.value)


def test_a_module_takes_one_reducer():
    module = Linears()
    reducer = attach(module, max_norm=1.0)
    with pytest.raises(UserError, match="this module has a reducer already"):
        attach(module, max_norm=1.0)
    reducer.detach()
    attach(module, max_norm=1.0)


def test_a_model_without_trainable_parameters():
    with pytest.raises(UserError, match="no trainable parameter"):
        attach(Linears().requires_grad_(False), max_norm=1.0)


@given(
    scales=st.lists(st.floats(1e-6, 1e6), min_size=4, max_size=4),
    threshold=st.sampled_from(["proportional", "equal", "uniform"]),
    buckets=st.sampled_from([40, 80, 160]),
)
@settings(max_examples=60)
def test_an_unclipped_gradient_stays_the_same_to_the_bit(scales, threshold, buckets):
    module = Linears()
    reducer = attach(module, max_norm=10.0, threshold=threshold, bucket_size_mb=buckets * 4.1 / 2**20)
    drawn = {name: scale * values for scale, (name, values) in zip(scales, draw(0, 0).items(), strict=True)}
    module(drawn).backward()
    reducer.finish()
    for bucket in reducer.buckets:
        norm = torch.cat([drawn[name] for name in bucket.names]).double().norm().item()
        unchanged = all(
            torch.equal(p.grad, drawn[name]) for name, p in zip(bucket.names, bucket.parameters, strict=True)
        )
        # At the threshold itself the norm's own rounding decides.
        if (norm + 1e-6) * (1 + 1e-6) <= bucket.threshold:
            assert unchanged
        elif norm > bucket.threshold * (1 + 1e-6):
            assert not unchanged


def norm_of_average(scale_of_rank: list[float], threshold: str, elements: int, same_direction: bool) -> float:
    """The worst case for the bound: all ranks have the same gradient, of any size."""
    rank = dist.get_rank()
    module = TiedLookup()
    reducer = attach(module, max_norm=0.7, threshold=threshold, bucket_size_mb=elements * 4 / 2**20)
    for _ in range(2):
        module(0 if same_direction else rank, scale_of_rank[rank]).backward()
        statistics = reducer.finish()
        exact = torch.cat([p.grad.double().flatten() for p in module.parameters()]).norm().item()
        assert statistics.grad_norm_after_clip == pytest.approx(exact, rel=1e-6)
        module.zero_grad()
    assert reducer.plan.split == "embedding.weight"
    reducer.detach()
    return exact


class TiedLookup(nn.Module):
    """A tied embedding between two layers, without anything else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(30, 8)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.decoder = nn.Linear(8, 30)
        self.decoder.weight = self.embedding.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder

    def forward(self, seed: int, scale: float) -> torch.Tensor:
        ids = torch.randint(0, 30, (5,), generator=torch.Generator().manual_seed(seed))
        return nn.functional.cross_entropy(self.decoder(self.middle(self.embedding(ids))), ids) * scale


@given(
    scale_of_rank=st.lists(st.floats(1e-3, 1e4), min_size=2, max_size=2),
    threshold=st.sampled_from(["proportional", "equal"]),
    elements=st.sampled_from([1, 80, 200, 5000]),
    same_direction=st.booleans(),
)
@settings(max_examples=40)
def test_the_average_is_never_longer_than_the_maximum_norm(
    rank_pool, scale_of_rank, threshold, elements, same_direction
):
    for norm in rank_pool(2).run(norm_of_average, scale_of_rank, threshold, elements, same_direction):
        assert norm <= 0.7 * (1 + 1e-5)


def saved_plan_gives_the_same_numbers() -> float:
    import json

    def gradients(reducer, module) -> dict:
        module(dist.get_rank(), 10.0).backward()
        reducer.finish()
        result = averaged(module)
        module.zero_grad()
        return result

    module = TiedLookup()
    reducer = attach(module, max_norm=0.1, bucket_size_mb=100 * 4 / 2**20)
    gradients(reducer, module)
    state, expected = json.loads(json.dumps(reducer.state_dict())), gradients(reducer, module)
    reducer.detach()
    again = attach(module, max_norm=0.1, bucket_size_mb=3000 * 4 / 2**20)
    again.load_state_dict(state)
    ours = gradients(again, module)
    again.detach()
    return relative_difference(ours, expected)


def test_the_plan_survives_a_checkpoint(rank_pool):
    assert rank_pool(2).run(saved_plan_gives_the_same_numbers) == [0.0, 0.0]


def test_the_plan_of_another_model_is_refused():
    reducer = attach(Linears(), max_norm=1.0)
    state = {"plan": {"version": 1, "buckets": [["a", "x"]], "split": None}}
    with pytest.raises(UserError, match="other trainable parameters: 4 differ, such as 'b'"):
        reducer.load_state_dict(state)
    state["plan"]["version"] = 7
    with pytest.raises(UserError, match="version 7"):
        reducer.load_state_dict(state)


def test_the_buckets_are_the_one_copy_of_the_gradients():
    model = reference.tiny_bert()
    reducer = attach(model, max_norm=0.5, bucket_size_mb=0.004)
    for step in range(3):
        model(**reference.batch(step, 0, 0)).loss.backward()
        if step:
            # What was sent has left its parameter.
            assert [n for n, p in model.named_parameters() if p.grad is not None] == []
        reducer.finish()
        storages = {p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes() for p in model.parameters()}
        elements = sum(p.numel() for p in model.parameters())
        # One number a parameter says whether a rank had a gradient at all.
        assert sum(storages.values()) == 4 * (elements + len(list(model.parameters())))
        assert len(storages) == len(reducer.buckets)
        model.zero_grad()
