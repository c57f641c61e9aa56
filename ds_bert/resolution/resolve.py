"""The one way from the JSON that a user wrote to the configuration that a run has."""

import copy
from dataclasses import dataclass

from ds_bert.config import BucketClippingConfig, DsBertConfig, parse_section
from ds_bert.optim.optimizers import resolve_name
from ds_bert.resolution.auto import fill_auto
from ds_bert.resolution.batch_sizes import BATCH_KEYS, resolve_batch_sizes
from ds_bert.resolution.bucket_clipping import resolve_bucket_clipping
from ds_bert.resolution.learning_rate import carry_out_section, unify_learning_rate
from ds_bert.resolution.refusals import check_supported


@dataclass(frozen=True)
class Resolved:
    """A configuration, checked and complete."""

    ds_config: dict
    """The JSON as DeepSpeed shall see it: batch sizes filled in, "auto" resolved, one learning rate."""
    section: DsBertConfig
    """The section "ds_bert", with `lr_scaling` carried out and the length of `schedule` filled in."""
    bucket_clipping: BucketClippingConfig
    """What the section and DeepSpeed's keys together say of it."""


def resolve(
    config: dict,
    *,
    world_size: int,
    total_steps: int | None = None,
    hidden_size: int | None = None,
    section: DsBertConfig | None = None,
) -> Resolved:
    """Check a configuration and fill in everything that follows from it.

    Args:
        config: the DeepSpeed configuration as the user wrote it; it is not changed.
        world_size: number of data-parallel ranks.
        total_steps: optimizer steps of the run, for a schedule's length of "auto".
        hidden_size: of the model, for "auto" bucket sizes.
        section: its section "ds_bert" if that has been parsed already.

    Raises:
        UserError: an "auto" whose value nobody knows, batch sizes that do not divide, two learning rates, values that
            contradict each other, or something that is not supported.
    """
    section, config = section or parse_section(config), copy.deepcopy(config)
    config.update(zip(BATCH_KEYS, resolve_batch_sizes(config, world_size), strict=True))
    resolve_name(config)
    section = carry_out_section(config, section, config["train_batch_size"], total_steps)
    fill_auto(config, total_steps, hidden_size)
    unify_learning_rate(config)
    check_supported(config)
    config, bucket_clipping = resolve_bucket_clipping(config, section.bucket_clipping)
    return Resolved(config, section, bucket_clipping)
