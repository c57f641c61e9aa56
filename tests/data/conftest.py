"""Small corpora and tokenizers that the tests of this folder share."""

import random
from pathlib import Path

import pytest

from ds_bert.data.prepared import PreparedData
from ds_bert.data.preparing.prepare import PrepareSettings, prepare
from ds_bert.data.preparing.vocabulary import learn_tokenizer, wrap_learned

COMMON_WORDS = (
    "the of and to in a is that it was for on are with as his they be at one have this from or had by hot word but "
    "what some we can out other were all there when up use your how said an each she which do their time if will way "
    "about many then them write would like so these her long make thing see him two has look more day could go come "
    "naïve café Straße unbelievable reduction gradient bucket communication normalisation"
)
WORDS = COMMON_WORDS.split()


def make_corpus(num_documents: int, seed: int = 0) -> str:
    """Documents of a few paragraphs of a few sentences, parted by blank lines."""
    draw = random.Random(seed)

    def sentence() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(3, 25))).capitalize() + draw.choice(".?!")

    def paragraph() -> str:
        return " ".join(sentence() for _ in range(draw.randint(1, 6)))

    return "\n\n".join("\n".join(paragraph() for _ in range(draw.randint(1, 5))) for _ in range(num_documents)) + "\n"


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text(make_corpus(60), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def bert_tokenizer():
    return wrap_learned(learn_tokenizer(lambda: iter([make_corpus(20)]), 400), 512)


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory, bert_tokenizer) -> Path:
    path = tmp_path_factory.mktemp("bert")
    bert_tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def roberta_folder(tmp_path_factory) -> Path:
    """A byte-level BPE with <s> ... </s>, as RoBERTa has it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([make_corpus(20)], trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    roles = {"bos": "<s>", "eos": "</s>", "cls": "<s>", "sep": "</s>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>"}
    path = tmp_path_factory.mktemp("roberta")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{f"{role}_token": token for role, token in roles.items()}
    ).save_pretrained(path)
    return path


@pytest.fixture
def make_prepared(tmp_path, bert_folder):
    """Prepare a text (or the lines of one) and open the result."""
    count = 0

    def make(text: str, **settings) -> PreparedData:
        nonlocal count
        count += 1
        source, output = tmp_path / f"text{count}.txt", tmp_path / f"prepared{count}"
        source.write_text(text, encoding="utf-8")
        settings.setdefault("tokenizer", bert_folder)
        prepare([source], output, PrepareSettings(**settings), report=lambda line: None, show_progress=False)
        return PreparedData(output)

    return make
