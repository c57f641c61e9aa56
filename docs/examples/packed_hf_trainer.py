"""Packed batches in the HF Trainer: torchrun --standalone --nproc-per-node 2 docs/examples/packed_hf_trainer.py"""

import tempfile

import torch
import torch.distributed as dist
from sampler_hf_trainer import LengthBalancedTrainer
from tiny_corpus import Sentences, leave, tiny_bert, tiny_tokenizer
from transformers import PreTrainedModel, TrainingArguments

from ds_bert.data import PackedMaskedLMCollator
from ds_bert.modeling import first_position, use_packed_execution


@torch.no_grad()
def loss_of_row(model: PreTrainedModel, row: dict) -> tuple[float, float]:
    """The mean over the row's masked tokens, from the row and from each of its samples alone."""
    model.eval()
    lengths = row["cu_seq_lens_q"].diff().tolist()
    samples = zip(row["input_ids"].split(lengths, dim=1), row["labels"].split(lengths, dim=1), strict=True)
    masked = [(ids, labels, int((labels != -100).sum())) for ids, labels in samples]
    total = sum(model(input_ids=ids, labels=labels).loss.item() * count for ids, labels, count in masked if count)
    return model(**row).loss.item(), total / sum(count for _, _, count in masked)


def main() -> None:
    model, dataset = tiny_bert(), Sentences()
    use_packed_execution(model)
    collate = PackedMaskedLMCollator(tiny_tokenizer(), seed=0, first_position=first_position(model))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            max_steps=20,
            save_strategy="no",
            report_to="none",
        )
        trainer = LengthBalancedTrainer(model, arguments, data_collator=collate, train_dataset=dataset)
        trainer.train()
    row = collate([dataset[index] for index in range(8)])
    packed, one_by_one = loss_of_row(model, row)
    assert abs(packed - one_by_one) < 1e-5 * packed, (packed, one_by_one)
    if dist.get_rank() == 0:
        print(f"loss of a packed row: {packed:.5f}; of its samples one by one: {one_by_one:.5f}")


if __name__ == "__main__":
    main()
    leave()
