"""Trained models as they are found on disk: a run, one of its checkpoints, or a Hugging Face folder."""

import contextlib
import io
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ds_bert.config import SECTION, DsBertConfig, read_json
from ds_bert.errors import UserError, first_line
from ds_bert.modeling import build_model, has_weights
from ds_bert.training.checkpoint import TAG, Checkpoint, list_checkpoints, without_wildcards
from ds_bert.training.setup import RUN_FILE

MODEL_STATES = "mp_rank_00_model_states.pt"


@dataclass(frozen=True)
class TrainedModel:
    """A model on disk: `folder` has its config and tokenizer, `checkpoint` its weights if it is a run's."""

    folder: Path
    checkpoint: Checkpoint | None
    trust_remote_code: bool = False

    @property
    def ds_config(self) -> dict:
        """The run's DeepSpeed configuration; empty for a Hugging Face folder."""
        return read_json(self.folder / "ds_config.json") if self.checkpoint else {}

    @property
    def section(self) -> DsBertConfig:
        return DsBertConfig.model_validate(self.ds_config.get(SECTION, {}))

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(self.folder, trust_remote_code=self.trust_remote_code)

    def autocast(self, device: torch.device) -> AbstractContextManager:
        """The autocast that the run trained under."""
        enabled = bool(self.ds_config.get("torch_autocast", {}).get("enabled"))
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)

    def load_as_trained(self) -> PreTrainedModel:
        """The model in the precision it computed in while training: what evaluation in training saw.

        Raises:
            UserError: the weights do not fit the model.
        """
        if self.checkpoint is None:
            return build_model(str(self.folder), self._config(), trust_remote_code=self.trust_remote_code)
        # DeepSpeed's files are pickles; docs/pretraining.md tells to load one's own only.
        file = self.checkpoint.folder / MODEL_STATES
        states = torch.load(file, map_location="cpu", weights_only=False)["module"]
        dtype = next(value.dtype for value in states.values() if value.is_floating_point())
        return self._fill(states).to(dtype)

    def load_in_fp32(self) -> PreTrainedModel:
        """The model in fp32: the optimizer's own fp32 weights at ZeRO 1 and 2, else the weights it computed with.

        Raises:
            UserError: the weights do not fit the model.
        """
        if self.checkpoint is None or not self.checkpoint.manifest["zero_stage"]:
            return self.load_as_trained().float()
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with contextlib.redirect_stdout(io.StringIO()), without_wildcards(self.folder) as folder:
            states = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=self.checkpoint.tag)
        return self._fill(states)

    def _config(self):
        return AutoConfig.from_pretrained(self.folder, trust_remote_code=self.trust_remote_code)

    def _fill(self, states: dict[str, torch.Tensor]) -> PreTrainedModel:
        model = AutoModelForMaskedLM.from_config(
            self._config(), dtype=torch.float32, trust_remote_code=self.trust_remote_code
        )
        try:
            model.load_state_dict(states)
        except RuntimeError as error:
            raise UserError(f"{self.checkpoint.folder}: {first_line(error)}") from None
        return model


def find_trained_model(path: str, *, trust_remote_code: bool = False) -> TrainedModel:
    """Find out what `--checkpoint` names.

    Args:
        path: a run folder (its newest whole checkpoint counts), one of its checkpoints, or a Hugging Face folder.
        trust_remote_code: allow code that comes with the folder.

    Raises:
        UserError: it is none of these, or the checkpoint is damaged (the newest whole one is named).
    """
    folder = Path(path)
    if (folder / RUN_FILE).is_file():
        found = list_checkpoints(folder)
        whole = _newest_whole(found)
        if whole is None:
            raise UserError(f"--checkpoint {folder}: the run has no whole checkpoint" + _problems(found))
        return TrainedModel(folder, whole, trust_remote_code)
    run_folder = folder.parent
    if TAG.fullmatch(folder.name) and (run_folder / RUN_FILE).is_file():
        found = list_checkpoints(run_folder)
        chosen = next((checkpoint for checkpoint in found if checkpoint.tag == folder.name), None)
        problem = chosen.problem() if chosen else f"{folder} does not exist"
        if problem is None:
            return TrainedModel(run_folder, chosen, trust_remote_code)
        whole = _newest_whole(found)
        tag = whole.tag if whole else "none"
        raise UserError(f"--checkpoint: {problem}; the newest whole checkpoint of the run is: {tag}")
    if (folder / "config.json").is_file() and has_weights(str(folder)):
        return TrainedModel(folder, None, trust_remote_code)
    state = "is not" if folder.exists() else "does not exist; give"
    raise UserError(
        f"--checkpoint {folder} {state} a run folder (with {RUN_FILE}), a checkpoint in one, or a Hugging Face folder"
    )


def _newest_whole(found: list[Checkpoint]) -> Checkpoint | None:
    return next((checkpoint for checkpoint in found if checkpoint.problem() is None), None)


def _problems(found: list[Checkpoint]) -> str:
    return f" ({'; '.join(checkpoint.problem() for checkpoint in found)})" if found else ""
