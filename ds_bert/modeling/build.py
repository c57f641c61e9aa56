"""Building a Hugging Face masked-language model from a preset, a hub name or a folder, and checking its limits."""

from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ds_bert.errors import UserError, first_line
from ds_bert.modeling.presets import PRESETS

BERT_POSITIONS = 512

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model")


def load_config(
    name: str, tokenizer: PreTrainedTokenizerBase, max_length: int, *, trust_remote_code: bool = False
) -> PretrainedConfig:
    """The architecture of `--model`.

    Args:
        name: a preset (a BERT of that size, with the tokenizer's vocabulary), or a Hugging Face name or folder.
        tokenizer: of the prepared data.
        max_length: longest sample in tokens; a preset gets at least so many positions.
        trust_remote_code: allow code that comes with the model.

    Raises:
        UserError: there is no such model.
    """
    return architecture(
        name,
        vocab_size=len(tokenizer),
        max_position_embeddings=max(BERT_POSITIONS, max_length),
        pad_token_id=tokenizer.pad_token_id or 0,
        trust_remote_code=trust_remote_code,
    )


def architecture(name: str, *, trust_remote_code: bool = False, **bert_options: int) -> PretrainedConfig:
    """A preset's architecture, with these options of `BertConfig`, or that of a Hugging Face name or folder as it is.

    Raises:
        UserError: there is no such model.
    """
    if name in PRESETS:
        layers, hidden, heads = PRESETS[name]
        return BertConfig(
            num_hidden_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            intermediate_size=4 * hidden,
            **bert_options,
        )
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(
            f"--model {name}: neither a preset ({', '.join(PRESETS)}) nor a Hugging Face model that can be loaded: "
            f"{first_line(error)}"
        ) from None


def has_weights(name: str) -> bool:
    """Whether `--model` comes with weights: a hub name does, a folder if it holds some, a preset never."""
    if name in PRESETS:
        return False
    folder = Path(name)
    return not folder.is_dir() or any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))


def build_model(
    name: str, config: PretrainedConfig, *, from_config: bool = False, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model in fp32: with its weights where `name` has some and `from_config` is not set, else freshly initialised.

    Fresh weights are drawn from torch's global generator.

    Raises:
        UserError: the weights cannot be loaded, or the architecture has no masked-language-modelling head.
    """
    try:
        if has_weights(name) and not from_config:
            return AutoModelForMaskedLM.from_pretrained(
                name, config=config, dtype=torch.float32, trust_remote_code=trust_remote_code
            )
        return AutoModelForMaskedLM.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"--model {name}: cannot build a masked-language model: {first_line(error)}") from None


def check_tokenizer_and_lengths(
    name: str,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    *,
    from_config: bool = False,
    trust_remote_code: bool = False,
) -> None:
    """Check that the prepared data fit the model, without allocating its weights.

    Args:
        name: what `--model` said, for the messages.
        config: from `load_config`.
        tokenizer: of the prepared data.
        max_length: longest sample in tokens.
        from_config: the weights will be fresh, so that any tokenizer of the right size will do.
        trust_remote_code: allow code that comes with the model.

    Raises:
        UserError: more tokens than rows in the embedding, samples longer than the model's positions, or weights that
            were trained with another tokenizer.
    """
    with torch.device("meta"):
        model = build_model(name, config, from_config=True, trust_remote_code=trust_remote_code)
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise UserError(
            f"--model {name}: its embedding has {rows} rows, the data's tokenizer has {len(tokenizer)} tokens; prepare "
            f"the data with the model's own tokenizer (ds-bert prepare --tokenizer {name}), or train a preset"
        )
    positions = usable_positions(model)
    if max_length > positions:
        raise UserError(
            f"--model {name}: it has positions for {positions} tokens, the longest sample has {max_length}; prepare "
            f"the data with --max-length {positions}"
        )
    if has_weights(name) and not from_config:
        check_same_tokenizer(name, tokenizer, trust_remote_code=trust_remote_code)


def usable_positions(model: PreTrainedModel) -> int:
    """The longest sample the model's position embeddings allow.

    RoBERTa and its kin number positions from padding_idx + 1, so that many rows of the table are lost.
    """
    table = _position_table(model)
    if table is not None:
        return table.num_embeddings - first_position(model)
    return getattr(model.config, "max_position_embeddings", None) or 2**31


def first_position(model: PreTrainedModel) -> int:
    """The number of a sample's first position: not 0 with RoBERTa and its kin."""
    table = _position_table(model)
    return 0 if table is None or table.padding_idx is None else table.padding_idx + 1


def _position_table(model: PreTrainedModel) -> nn.Embedding | None:
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return module
    return None


def check_same_tokenizer(name: str, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool = False) -> None:
    """Check that the weights of `name` were trained with this tokenizer, if a tokenizer lies beside them.

    Raises:
        UserError: it has another vocabulary.
    """
    folder = Path(name)
    if folder.is_dir() and not any((folder / file).exists() for file in TOKENIZER_FILES):
        # transformers would make up an empty tokenizer of the model's kind.
        return
    try:
        own = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: its tokenizer cannot be loaded: {first_line(error)}") from None
    if own.get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"the weights of {name} were trained with another tokenizer than the data were prepared with; prepare the "
            f"data with it (ds-bert prepare --tokenizer {name}), or train fresh weights (--from-config)"
        )
