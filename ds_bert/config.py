"""The training configuration: the DeepSpeed JSON with our one section "ds_bert" in it.

Everything here works on plain dictionaries and needs neither torch nor a process group, so that a mistake is found
before any rank starts.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ds_bert.constants import MAX_INT
from ds_bert.errors import UserError, did_you_mean

SECTION = "ds_bert"

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


class LrScalingConfig(Section):
    """The learning rate from that of another batch size (docs/large_batches.md)."""

    rule: Literal["linear", "sqrt", "none"]
    """The rate grows with the batch size, with its square root, or not."""

    base_lr: float = Field(gt=0)
    """The rate that is right at `base_batch_size`."""

    base_batch_size: int | None = Field(None, ge=1, le=MAX_INT)
    """Samples a step."""

    scale_warmup: bool = False
    """Warm-up steps are given for `base_batch_size`, too: as many samples, in fewer steps."""

    scale_adam: bool = False
    """With "sqrt": betas and eps are given for `base_batch_size`, too."""

    @model_validator(mode="after")
    def _base_of_the_rule(self) -> "LrScalingConfig":
        if self.base_batch_size is None and (self.rule != "none" or self.scale_warmup):
            what = "scale_warmup" if self.rule == "none" else f"the rule {self.rule!r}"
            raise ValueError(f"base_batch_size: {what} needs the samples a step at which base_lr is right")
        if self.scale_adam and self.rule != "sqrt":
            raise ValueError(f"scale_adam: belongs to the rule 'sqrt', not to {self.rule!r}")
        return self


class ScheduleConfig(Section):
    """A schedule that DeepSpeed does not have, in place of its section "scheduler" (docs/large_batches.md)."""

    type: Literal["polynomial"] = "polynomial"
    """A linear warm-up, then a polynomial decay."""

    warmup_steps: int = Field(0, ge=0, le=MAX_INT)
    """Optimizer steps from 0 to the full rate."""

    start_step: int = Field(0, ge=-MAX_INT, le=0)
    """Negative: the warm-up began so many steps before the first one."""

    total_steps: int | Literal["auto"] = "auto"
    """The step at which the decay has reached `end_lr`, where it stays; "auto" for the run's last step."""

    end_lr: float = Field(0.0, ge=0)
    """The rate at the end of the decay."""

    power: float = Field(1.0, gt=0)
    """Of the decay: 1 for a line."""

    continuous: bool = True
    """false: as in MLPerf's reference, the decay counts from step 0, so that the rate jumps where the warm-up ends."""

    @model_validator(mode="after")
    def _decay_after_warm_up(self) -> "ScheduleConfig":
        warm = self.start_step + self.warmup_steps
        if self.total_steps != "auto" and not 0 < self.total_steps <= MAX_INT:
            raise ValueError(f"total_steps: must be at least 1, not {self.total_steps}")
        if self.total_steps != "auto" and warm >= self.total_steps:
            raise ValueError(f"total_steps: {self.total_steps} ends before the warm-up does, at step {warm}")
        return self


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

    lr_scaling: LrScalingConfig | None = None
    """The learning rate from that of another batch size."""

    schedule: ScheduleConfig | None = None
    """A schedule that DeepSpeed does not have."""


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
    if details["type"] == "missing":
        return f"{where}: is missing"
    if details["type"] == "model_type":
        return f"{where}: must be an object {{...}} (given: {details['input']!r})"
    if details["type"] != "extra_forbidden":
        return f"{where}: {details['msg']} (given: {details['input']!r})"
    for name in details["loc"][:-1]:
        model = section_of(model.model_fields[name].annotation)
    return f"{where}: unknown key{did_you_mean(str(details['loc'][-1]), list(model.model_fields))}"


def section_of(annotation: Any) -> type[Section]:
    """The section that a field holds, be it optional or not."""
    return next(kind for kind in (*get_args(annotation), annotation) if isinstance(kind, type))
