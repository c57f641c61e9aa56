"""Everything about a run that is known, and checked, before its ranks start."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ds_bert.config import DsBertConfig, parse_section, read_json
from ds_bert.data.prepared import PreparedData
from ds_bert.errors import UserError
from ds_bert.files import write_atomically
from ds_bert.identity import describe_changes, differing_keys, fingerprint
from ds_bert.modeling import check_tokenizer_and_lengths, has_weights, load_config
from ds_bert.resolution import Resolved, resolve, resolve_batch_sizes
from ds_bert.sampling import LengthBalancedBatchSampler
from ds_bert.training.checkpoint import TAG
from ds_bert.training.run_lock import LOCK_FILE

RUN_FILE = "run.json"

SCHEDULE_LENGTHS = ("scheduler.params.total_num_steps", "ds_bert.schedule.total_steps")

# For the cost model, of a model that does not tell its own.
DEFAULT_HIDDEN_SIZE = 768

# Keys of the DeepSpeed configuration that change the numbers of a run, so that a resumed run must not change them.
DECISIVE_KEYS = (
    "train_batch_size",
    "optimizer",
    "scheduler",
    "gradient_clipping",
    "fp16",
    "bf16",
    "torch_autocast",
    "zero_optimization.stage",
    "ds_bert",
)

# Keys of the section "ds_bert" that do not.
UNDECISIVE = {"execution": {"compile", "gradient_checkpointing"}}


@dataclass(frozen=True)
class RunSetup:
    """A run, checked. Everything is the same on all ranks."""

    args: argparse.Namespace
    data: PreparedData
    tokenizer: PreTrainedTokenizerBase
    model_config: PretrainedConfig
    resolved: Resolved
    total_steps: int

    @property
    def section(self) -> DsBertConfig:
        return self.resolved.section

    @property
    def ds_config(self) -> dict:
        return self.resolved.ds_config

    @property
    def run_folder(self) -> Path:
        return Path(self.args.output)

    @property
    def continues_weights(self) -> bool:
        """Whether training starts from the weights that --model comes with."""
        return has_weights(self.args.model) and not self.args.from_config

    def identity(self) -> dict:
        """What makes this run this run, as flat plain values: resuming with other ones is refused."""
        decisive = {key: _look_up(self.ds_config, key) for key in DECISIVE_KEYS}
        decisive["ds_bert"] = self.section.model_dump(exclude=UNDECISIVE)
        facts = {
            "data": fingerprint(self.data.manifest),
            "seed": self.args.seed,
            "weights from": self.args.model if self.continues_weights else "fresh",
            "model": json.loads(self.model_config.to_json_string(use_diff=True)),
            **decisive,
        }
        # Through JSON, so that a tuple compares equal to the list it is read back as.
        return json.loads(json.dumps(_flatten(facts)))


def set_up_run(args: argparse.Namespace, world_size: int) -> RunSetup:
    """Read and check all that a run needs.

    Args:
        args: from `options.add_pretrain_arguments`.
        world_size: number of ranks.

    Raises:
        UserError: anything the user should mend first.
    """
    raw = read_json(args.deepspeed_config)
    section = parse_section(raw, args.deepspeed_config)
    data = PreparedData(args.data)
    tokenizer = data.load_tokenizer(trust_remote_code=args.trust_remote_code)
    max_length = max(int(split.lengths.max()) for split in (data.train, data.validation) if split)
    model_config = load_config(args.model, tokenizer, max_length, trust_remote_code=args.trust_remote_code)
    check_tokenizer_and_lengths(
        args.model,
        model_config,
        tokenizer,
        max_length,
        from_config=args.from_config,
        trust_remote_code=args.trust_remote_code,
    )
    try:
        sampler = make_sampler(raw, section, data, model_config, world_size=world_size, rank=0, seed=args.seed)
        total_steps = args.max_steps or args.epochs * sampler.steps_per_epoch
        resolved = resolve(
            raw,
            world_size=world_size,
            total_steps=total_steps,
            hidden_size=getattr(model_config, "hidden_size", None),
            section=section,
        )
        check_trainable(resolved.ds_config)
    except UserError as error:
        raise UserError(f"{args.deepspeed_config}: {error}") from None
    setup = RunSetup(args, data, tokenizer, model_config, resolved, total_steps)
    check_run_folder(setup)
    return setup


def make_sampler(
    ds_config: dict,
    section: DsBertConfig,
    data: PreparedData,
    model_config: PretrainedConfig,
    *,
    world_size: int,
    rank: int,
    seed: int,
) -> LengthBalancedBatchSampler:
    """The sampler of one rank, for the batch sizes and the section of a DeepSpeed configuration.

    Raises:
        UserError: batch sizes that do not divide, a key the sampler refuses, or data of less than one global batch.
    """
    _, micro_batch_size, accumulation_steps = resolve_batch_sizes(ds_config, world_size)
    return LengthBalancedBatchSampler(
        data.train.lengths,
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=accumulation_steps,
        world_size=world_size,
        rank=rank,
        seed=seed,
        packed=section.execution.packed,
        hidden_size=getattr(model_config, "hidden_size", DEFAULT_HIDDEN_SIZE),
        **section.sampling.model_dump(exclude_unset=True),
    )


def check_trainable(ds_config: dict) -> None:
    """Refuse what a script with an optimizer of its own may do, and this program cannot.

    Raises:
        UserError: names the key.
    """
    if "type" not in ds_config.get("optimizer", {}):
        raise UserError('no optimizer: add for example "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}')
    stage = ds_config.get("zero_optimization", {}).get("stage", 0)
    if stage not in (0, 1, 2):
        raise UserError(f"zero_optimization.stage: {stage} is not supported; use 0, 1 or 2")


def check_run_folder(setup: RunSetup) -> None:
    """Check that the output folder is new, or holds this very run.

    Raises:
        UserError: it holds another run (the settings that differ are named), something else, or a run that
            --resume never forbids to go on with.
    """
    folder, resume = setup.run_folder, setup.args.resume
    if resume not in ("auto", "never") and not TAG.fullmatch(resume):
        raise UserError(f"--resume {resume}: must be auto, never or a checkpoint's name such as global_step100")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output {folder} is a file; name a folder")
    run_file = folder / RUN_FILE
    if not run_file.is_file():
        if folder.is_dir() and any(path.name != LOCK_FILE for path in folder.iterdir()):
            raise UserError(f"--output {folder} is not empty and holds no run (no {RUN_FILE}); name another folder")
        if resume not in ("auto", "never"):
            raise UserError(f"--resume {resume}: {folder} holds no run")
        return
    if resume == "never":
        raise UserError(
            f"--output {folder} holds a run and --resume never forbids to go on with it; name another folder"
        )
    try:
        theirs = json.loads(run_file.read_text(encoding="utf-8"))
    except ValueError:
        raise UserError(f"{run_file} is damaged; restore it, or start again in another --output folder") from None
    mine = setup.identity()
    differing = differing_keys(theirs, mine)
    if differing:
        advice = "name another folder"
        for length in set(SCHEDULE_LENGTHS) & set(differing):
            advice = f'keep --max-steps or --epochs, from which an "auto" {length} follows, or {advice}'
        raise UserError(f"--output {folder} holds another run: {describe_changes(theirs, mine)}; {advice}")


def write_run_file(setup: RunSetup) -> None:
    """Leave the run's identity and configuration in its folder, for a resumed run and for people."""
    setup.run_folder.mkdir(parents=True, exist_ok=True)
    write_atomically(setup.run_folder / RUN_FILE, json.dumps(setup.identity(), indent=1, ensure_ascii=False))
    write_atomically(setup.run_folder / "ds_config.json", json.dumps(setup.ds_config, indent=2))
    setup.model_config.save_pretrained(setup.run_folder)
    setup.tokenizer.save_pretrained(setup.run_folder)


def _look_up(config: dict, path: str):
    for key in path.split("."):
        config = config.get(key) if isinstance(config, dict) else None
    return config


def _flatten(node: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in node.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + str(key)] = value
    return flat
