"""What the examples share: random sentences of very different lengths, a tiny BERT, and a check of what was seen."""

import gc
import random

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

VOCABULARY = 200


class Sentences(torch.utils.data.Dataset):
    """Token ids of random sentences; remembers which were asked for."""

    def __init__(self, number: int = 250) -> None:
        rng = random.Random(0)
        self.sentences = [[rng.randrange(5, VOCABULARY) for _ in range(rng.randint(2, 60))] for _ in range(number)]
        self.lengths = [len(sentence) for sentence in self.sentences]
        self.seen: list[int] = []

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, index: int) -> list[int]:
        self.seen.append(int(index))
        return self.sentences[index]


def collate(sentences: list[list[int]]) -> dict[str, torch.Tensor]:
    """Pad to the longest; the labels are the tokens themselves (a real run masks some: ds_bert.data.batches)."""
    rows = [torch.tensor(sentence) for sentence in sentences]
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"input_ids": input_ids, "attention_mask": (input_ids > 0).long(), "labels": input_ids}


def tiny_bert() -> BertForMaskedLM:
    torch.manual_seed(0)
    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
        )
    )


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: i for i, word in enumerate([*specials, *(f"word{i}" for i in range(5, VOCABULARY))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    names = {f"{name.strip('[]').lower()}_token": name for name in specials}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def check_seen_once(dataset: Sentences, num_dropped: int, epochs: int) -> None:
    """Every sample once an epoch over all ranks, but for those that do not fill the last global batch."""
    seen: list = [None] * dist.get_world_size()
    dist.all_gather_object(seen, dataset.seen)
    together = [index for rank in seen for index in rank]
    assert len(together) == epochs * (len(dataset) - num_dropped), (len(together), len(dataset), num_dropped)
    assert max(together.count(index) for index in set(together)) <= epochs
    assert len({len(rank) for rank in seen}) == 1
    if dist.get_rank() == 0:
        print(f"every sample seen once in each of {epochs} epochs by {len(seen)} ranks; {num_dropped} left out")


def leave() -> None:
    """End the process group and its threads, after `main()` has let go of the model.

    gloo's threads can hold a tensor until the group is gone, and abort a process that ends before it.
    """
    gc.collect()
    dist.destroy_process_group()
