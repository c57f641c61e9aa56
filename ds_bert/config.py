"""The training configuration: the DeepSpeed JSON with our one section "ds_bert" in it.

Everything here works on plain dictionaries and needs neither torch nor a process group, so that a mistake is found
before any rank starts.
"""

import copy
import difflib
import json
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ds_bert.errors import UserError

SECTION = "ds_bert"

MAX_INT = 2**31 - 1  # what numpy and torch must hold in 32 bits

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

# Where a DeepSpeed scheduler keeps a peak of its own; it then ignores the optimizer's rate.
PEAK_KEYS = {"WarmupLR": "warmup_max_lr", "WarmupDecayLR": "warmup_max_lr", "OneCycle": "cycle_max_lr"}

# Where Hugging Face's own default for an "auto" equals DeepSpeed's, so that leaving the key out means the same.
SAME_DEFAULTS = {"optimizer.params.betas", "optimizer.params.eps"}


Values = TypeVar("Values", bound="Section")


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, strict=True, allow_inf_nan=False
    )


class MaskingConfig(Section):
    """How tokens are chosen for masked-language modelling."""

    probability: float = Field(0.15, gt=0, lt=1)
    """Share of a sample's maskable tokens that is masked: max(1, round(probability x maskable)) of them."""

    unit: Literal["token"] = "token"
    """What is masked as a whole."""


class SamplingConfig(Section):
    """Which samples make a batch (docs/sampling.md)."""

    strategy: Literal["random", "local_sort", "stratified", "balanced"] = "balanced"
    """How batches are filled."""

    cost_model: str = "flops"
    """What a sample of n tokens costs: "tokens" (n), "flops" (n + n^2 / (6 hidden size)), or a file that
    `ds-bert balance --measure` wrote."""

    window: int = Field(32, ge=1, le=MAX_INT)
    """Micro-steps that `local_sort` sorts together."""

    window_scope: Literal["rank", "world"] = "rank"
    """Whether `local_sort` sorts each rank's part of a window by itself or all together."""

    edges: tuple[Annotated[int, Field(ge=1, le=MAX_INT)], ...] = Field((128, 256, 384, 512), strict=False)
    """Tokens at which the strata of `stratified` end, rising; longer samples make one more."""

    strata: int | None = Field(None, ge=1, le=MAX_INT)
    """Number of strata that hold equally many samples, in place of `edges`."""

    equal_counts: bool = True
    """false: `balanced` gives the micro-batches different numbers of samples for more equal work."""

    max_tokens_per_micro_batch: int | None = Field(None, ge=1, le=MAX_INT)
    """`balanced` fills micro-batches up to so many tokens, whatever number of samples that is."""

    carry_over: bool = False
    """Samples that do not fill an epoch's last global batch come first in the next epoch; else they are dropped."""

    @model_validator(mode="after")
    def _keys_that_belong_together(self) -> "SamplingConfig":
        if list(self.edges) != sorted(set(self.edges)) or not self.edges:
            raise ValueError(f"edges: must be rising, not {list(self.edges)}")
        if {"edges", "strata"} <= self.model_fields_set and self.strata is not None:
            raise ValueError("edges and strata: give one of them")
        free = "max_tokens_per_micro_batch" if self.max_tokens_per_micro_batch else "equal_counts: false"
        if self.strategy != "balanced" and (self.max_tokens_per_micro_batch or not self.equal_counts):
            raise ValueError(f"{free}: only the strategy 'balanced' can do that, not {self.strategy!r}")
        return self


class BucketClippingConfig(Section):
    """Gradients clipped bucket by bucket before they are averaged (docs/clipping.md)."""

    enabled: bool = False
    """true: every bucket is clipped by its own norm on its own rank and sent at once, to a whole of at most
    `gradient_clipping`."""

    threshold: Literal["proportional", "equal", "uniform"] = "proportional"
    """What part of `gradient_clipping` a bucket gets."""

    bucket_size_mb: float = Field(25.0, gt=0)
    """MiB of the dtype that is sent; at ZeRO 1 and 2 it sets `reduce_bucket_size`."""

    overlap: bool = True
    """Send while the backward pass goes on; at ZeRO 1 and 2 it sets `overlap_comm`."""

    communication_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """What is sent; null for the gradients' own dtype. DeepSpeed's name for it is `communication_data_type`."""

    trace: bool = False
    """Write a Chrome trace of every rank into the run folder."""


class ExecutionConfig(Section):
    """How a batch is computed (docs/execution.md)."""

    packed: bool = True
    """Samples one after the other in one row, without padding; false: rows padded to the longest."""

    compile: bool = False
    """`torch.compile` the encoder's layers."""

    gradient_checkpointing: bool = False
    """Keep the input of each encoder layer only and compute the layer again in the backward pass: less memory, more
    time."""


class DsBertConfig(Section):
    """The section "ds_bert" of a DeepSpeed configuration."""

    bucket_clipping: BucketClippingConfig = BucketClippingConfig()
    """Gradients clipped before they are averaged."""

    sampling: SamplingConfig = SamplingConfig()
    """Which samples make a batch."""

    execution: ExecutionConfig = ExecutionConfig()
    """How a batch is computed."""

    masking: MaskingConfig = MaskingConfig()
    """Masked-language modelling."""


def read_json(path: str | Path) -> dict:
    """Read a DeepSpeed configuration file.

    Raises:
        UserError: the file is missing or no JSON object (with line and column), or a key stands in it twice.
    """

    def without_repeats(pairs: list[tuple[str, Any]]) -> dict:
        for position, (key, _) in enumerate(pairs):
            if any(key == earlier for earlier, _ in pairs[:position]):
                raise UserError(f"{path}: the key {key!r} stands twice in one object; keep one of them")
        return dict(pairs)

    if Path(path).exists() and not Path(path).is_file():
        raise UserError(f"{path}: the DeepSpeed configuration must be a regular file, since every rank reads it")
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8-sig"), object_pairs_hook=without_repeats)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}; mend that place") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text: byte {error.start} cannot be decoded") from None
    except OSError as error:
        raise UserError(f"{path}: cannot read the DeepSpeed configuration: {error.strerror}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: a DeepSpeed configuration is a JSON object {{...}}, not {type(config).__name__}")
    return config


def parse_section(config: dict, source: str = "") -> DsBertConfig:
    """Check the "ds_bert" section of a DeepSpeed configuration; a missing one means all defaults.

    Args:
        config: the whole DeepSpeed configuration.
        source: the file's name, put in front of an error.

    Raises:
        UserError: an unknown key (with its path and the nearest valid one) or a value out of range.
    """
    return checked(DsBertConfig, config.get(SECTION, {}), SECTION, source)


def checked(model: type[Values], values: Any, path: str, source: str = "") -> Values:
    """Values from a user, checked.

    Args:
        model: what they must be.
        values: a dictionary.
        path: where they stand in the configuration, put in front of an error.
        source: the file's name, likewise.

    Raises:
        UserError: an unknown key (with its path and the nearest valid one) or a value out of range; all of them.
    """
    try:
        return model.model_validate(values)
    except ValidationError as invalid:
        problems = [_problem(model, details, path) for details in invalid.errors()]
    raise UserError((f"{source}: " if source else "") + "; ".join(problems))


def _problem(model: Any, details: dict, path: str) -> str:
    """One pydantic error in the words of this project: path, what was given, what is valid."""
    where = ".".join([path, *map(str, details["loc"])])
    if details["type"] == "value_error":
        return f"{where}.{details['ctx']['error']}"
    if details["type"] == "literal_error" and isinstance(details["input"], str):
        valid = [word.strip("'") for word in details["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        return f"{where}: {details['input']!r} is not valid{did_you_mean(details['input'], valid)}"
    if details["type"] != "extra_forbidden":
        return f"{where}: {details['msg']} (given: {details['input']!r})"
    for name in details["loc"][:-1]:
        model = model.model_fields[name].annotation
    return f"{where}: unknown key{did_you_mean(str(details['loc'][-1]), list(model.model_fields))}"


def did_you_mean(word: str, valid: list[str]) -> str:
    """The end of an error about a name that is not in `valid`: the nearest one, and all of them."""
    nearest = difflib.get_close_matches(word, valid, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"{hint} (valid: {', '.join(valid)})"


def resolve_batch_sizes(config: dict, world_size: int) -> tuple[int, int, int]:
    """Fill in the batch sizes that are not given, by DeepSpeed's rule.

    train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x world size

    Args:
        config: a DeepSpeed configuration; "auto" counts as not given.
        world_size: number of data-parallel ranks.

    Returns:
        global batch (samples a step), micro-batch (samples a rank and micro-step), accumulation (micro-steps).

    Raises:
        UserError: none is given, one is no positive integer, or they do not multiply out; the latter names the three
            numbers and the nearest valid ones.
    """
    given = {key: config.get(key) for key in BATCH_KEYS}
    for key, value in given.items():
        if value == "auto":
            given[key] = None
        elif value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UserError(f"{key}: must be a whole number of at least 1, not {value!r}")
    batch, micro, accumulation = given.values()
    if batch is None and micro is None:
        raise UserError(
            "no batch size: give train_batch_size (samples a step over all ranks) or train_micro_batch_size_per_gpu"
        )
    if batch is None:
        accumulation = accumulation or 1
        return micro * accumulation * world_size, micro, accumulation
    if micro is None:
        unit = (accumulation or 1) * world_size
        micro, accumulation, rest = batch // unit, accumulation or 1, batch % unit
    elif accumulation is None:
        unit = micro * world_size
        accumulation, rest = batch // unit, batch % unit
    else:
        unit, rest = micro * accumulation * world_size, batch - micro * accumulation * world_size
        if rest:
            raise UserError(
                f"train_batch_size {batch} is not train_micro_batch_size_per_gpu {micro} x "
                f"gradient_accumulation_steps {accumulation} x world size {world_size} = {unit}; write "
                f"train_batch_size {unit}, or leave one of the three keys out and DeepSpeed's rule fills it"
            )
    if rest:
        known = {"train_micro_batch_size_per_gpu": given[BATCH_KEYS[1]], BATCH_KEYS[2]: given[BATCH_KEYS[2]]}
        factors = " x ".join([f"{key} {value}" for key, value in known.items() if value] + [f"world size {world_size}"])
        nearest = [n for n in (batch - batch % unit, batch - batch % unit + unit) if n > 0]
        raise UserError(
            f"train_batch_size {batch} is not a multiple of {factors} = {unit}; nearest valid train_batch_size: "
            + " or ".join(map(str, nearest))
        )
    return batch, micro, accumulation


def resolve(config: dict, *, world_size: int, total_steps: int | None = None, hidden_size: int | None = None) -> dict:
    """The configuration as DeepSpeed shall see it: batch sizes filled in, "auto" resolved, one learning rate.

    Args:
        config: the DeepSpeed configuration as the user wrote it; it is not changed.
        world_size: number of data-parallel ranks.
        total_steps: optimizer steps of the run, for a scheduler's "total_num_steps": "auto".
        hidden_size: of the model, for "auto" bucket sizes.

    Raises:
        UserError: an "auto" whose value nobody knows, batch sizes that do not divide, two learning rates.
    """
    config = copy.deepcopy(config)
    config.update(zip(BATCH_KEYS, resolve_batch_sizes(config, world_size), strict=True))
    _fill_auto(config, total_steps, hidden_size)
    _unify_learning_rate(config)
    return config


def _fill_auto(config: dict, total_steps: int | None, hidden_size: int | None) -> None:
    scheduler = config.get("scheduler") or {}
    peak_key = PEAK_KEYS.get(scheduler.get("type"), "warmup_max_lr")
    fill = {
        "optimizer.params.lr": _number(scheduler.get("params", {}).get(peak_key)),
        f"scheduler.params.{peak_key}": _learning_rate(config),
        "scheduler.params.total_num_steps": total_steps,
        "scheduler.params.warmup_min_lr": 0.0,
        "zero_optimization.reduce_bucket_size": hidden_size and hidden_size * hidden_size,
    }
    unknown = []

    def visit(node: dict, path: str) -> None:
        for key, value in list(node.items()):
            here = f"{path}{key}"
            if isinstance(value, dict):
                visit(value, here + ".")
            elif value != "auto":
                continue
            elif here in SAME_DEFAULTS or here.startswith("zero_optimization.stage3_"):
                del node[key]
            elif fill.get(here) is not None:
                node[key] = fill[here]
            else:
                unknown.append(here)

    visit(config, "")
    if unknown:
        raise UserError(
            f'"auto" stands for a value that only the Hugging Face Trainer knows, at: {", ".join(unknown)}; '
            "write the numbers there"
        )


def _learning_rate(config: dict) -> float | None:
    return _number(config.get("optimizer", {}).get("params", {}).get("lr"))


def _number(value: Any) -> Any:
    return None if value == "auto" else value


def _unify_learning_rate(config: dict) -> None:
    """Write the one learning rate given wherever DeepSpeed keeps one (its schedulers ignore the optimizer's)."""
    scheduler = config.get("scheduler") or {}
    peak_key = PEAK_KEYS.get(scheduler.get("type"))
    if peak_key is None or "optimizer" not in config:
        return
    peak, rate = scheduler.setdefault("params", {}).get(peak_key), _learning_rate(config)
    if peak is not None and rate is not None and peak != rate:
        raise UserError(
            f"two learning rates: optimizer.params.lr is {rate} and scheduler.params.{peak_key} is {peak}; "
            f"{scheduler['type']} uses only its own, so remove one of them"
        )
    if peak is None and rate is None:
        raise UserError(f"no learning rate: write optimizer.params.lr (or scheduler.params.{peak_key})")
    scheduler["params"][peak_key] = config["optimizer"].setdefault("params", {})["lr"] = peak if rate is None else rate
