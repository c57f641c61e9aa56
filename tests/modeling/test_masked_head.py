"""The head on masked positions gives what the whole head gives there, for every family."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForMaskedLM

from ds_bert.errors import UserError
from ds_bert.modeling import MaskedPositionHead, check_tokenizer_and_lengths, load_config, masked_lm_loss, num_correct
from ds_bert.modeling.build import usable_positions
from tests.data.test_masking import TOKENIZER

SIZES = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "max_position_embeddings": 40, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "bert": {},
    "roberta": {},
    "camembert": {},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48},
    "electra": {"embedding_size": 16},
    "albert": {"embedding_size": 16},
    "modernbert": {},
    "mpnet": {},
    "xlm-roberta": {},
}


def family_config(family: str, **changes):
    return AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **changes})


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_and_gradients_equal_those_of_the_whole_head(family):
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(family_config(family)).eval()
    ids = torch.randint(5, 60, (3, 12))
    attention = torch.tensor([[1] * 12, [1] * 7 + [0] * 5, [1] * 9 + [0] * 3])
    ids[attention == 0] = 0
    positions, labels = torch.tensor([1, 5, 13, 30]), torch.tensor([8, 9, 10, 11])
    whole = model(input_ids=ids, attention_mask=attention).logits.flatten(0, 1)[positions]
    expected = torch.nn.functional.cross_entropy(whole, labels, reduction="sum")
    expected_gradients = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)

    head = MaskedPositionHead(model)
    assert head.gathers_before_head
    logits = head(model, {"input_ids": ids, "attention_mask": attention}, positions)
    assert logits.shape == (4, 60)
    loss, correct = masked_lm_loss(logits, labels), num_correct(logits, labels)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert correct.item() == (whole.argmax(-1) == labels).sum().item()
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    # Outside a call of ours the model is as it was.
    assert model(input_ids=ids, attention_mask=attention).logits.shape == (3, 12, 60)


def test_presets_have_the_sizes_of_their_sources():
    sizes = {}
    for name in ("tiny", "mini", "small", "base", "large"):
        config = load_config(name, TOKENIZER, 128)
        assert config.vocab_size == len(TOKENIZER)
        assert config.max_position_embeddings == 512
        sizes[name] = (
            config.num_hidden_layers,
            config.hidden_size,
            config.num_attention_heads,
            config.intermediate_size,
        )
    assert sizes == {
        "tiny": (2, 128, 2, 512), "mini": (4, 256, 4, 1024), "small": (4, 512, 8, 2048),
        "base": (12, 768, 12, 3072), "large": (24, 1024, 16, 4096),
    }  # fmt: skip
    assert load_config("tiny", TOKENIZER, 700).max_position_embeddings == 700


@pytest.mark.parametrize(("family", "usable"), [("bert", 40), ("roberta", 39), ("distilbert", 40), ("modernbert", 40)])
def test_roberta_loses_positions_to_its_padding_index(family, usable):
    assert usable_positions(AutoModelForMaskedLM.from_config(family_config(family))) == usable


def check(tmp_path, max_length, **changes):
    family_config(changes.pop("family", "bert"), **changes).save_pretrained(tmp_path)
    config = load_config(str(tmp_path), TOKENIZER, max_length)
    check_tokenizer_and_lengths(str(tmp_path), config, TOKENIZER, max_length)


def test_data_that_do_not_fit_the_model_are_refused_with_numbers(tmp_path):
    check(tmp_path, 40)
    with pytest.raises(
        UserError, match="has positions for 40 tokens, the longest sample has 41; prepare the data with"
    ):
        check(tmp_path, 41)
    with pytest.raises(UserError, match="has positions for 39 tokens, the longest sample has 40"):
        check(tmp_path, 40, family="roberta")
    with pytest.raises(UserError, match=r"its embedding has 49 rows, the data's tokenizer has 50 tokens"):
        check(tmp_path, 40, vocab_size=49)


def test_weights_of_another_tokenizer_are_refused(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    config = family_config("bert")
    AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path)
    check_tokenizer_and_lengths(str(tmp_path), config, TOKENIZER, 10)
    other = Tokenizer(models.WordLevel({"[UNK]": 0, "other": 1}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=other, unk_token="[UNK]").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="were trained with another tokenizer than the data were prepared with"):
        check_tokenizer_and_lengths(str(tmp_path), config, TOKENIZER, 10)
    check_tokenizer_and_lengths(str(tmp_path), config, TOKENIZER, 10, from_config=True)


@pytest.mark.parametrize("name", ["tinny", "no/such-model"])
def test_a_model_that_does_not_exist_is_one_line(name, tmp_path):
    with pytest.raises(UserError, match=f"--model {name}: neither a preset") as caught:
        load_config(name, TOKENIZER, 10)
    assert "\n" not in str(caught.value)


def test_an_architecture_without_a_masked_head_is_refused(tmp_path):
    AutoConfig.for_model("gpt2", n_embd=32, n_layer=1, n_head=2, vocab_size=60).save_pretrained(tmp_path)
    config = load_config(str(tmp_path), TOKENIZER, 10)
    with pytest.raises(UserError, match="cannot build a masked-language model"):
        check_tokenizer_and_lengths(str(tmp_path), config, TOKENIZER, 10)
