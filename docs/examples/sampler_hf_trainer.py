"""The sampler in the HF Trainer: torchrun --standalone --nproc-per-node 2 docs/examples/sampler_hf_trainer.py"""

import tempfile

from tiny_corpus import Sentences, check_seen_once, collate, leave, tiny_bert
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from ds_bert.sampling import LengthBalancedBatchSampler


class LengthBalancedTrainer(Trainer):
    """A Trainer whose batches are dealt by length."""

    def get_train_dataloader(self) -> DataLoader:
        self.sampler = LengthBalancedBatchSampler(
            self.train_dataset.lengths,
            micro_batch_size=self.args.per_device_train_batch_size,
            gradient_accumulation_steps=self.args.gradient_accumulation_steps,
            world_size=self.args.world_size,
            rank=self.args.process_index,
            seed=self.args.seed,
            hidden_size=self.model.config.hidden_size,
        )
        self.add_callback(SetEpoch(self.sampler))
        # Not through accelerator.prepare(): that would shard the sampler a second time, and each rank would see
        # only its share of its share.
        return DataLoader(self.train_dataset, batch_sampler=self.sampler, collate_fn=self.data_collator)


class SetEpoch(TrainerCallback):
    """Tells the sampler which epoch it is."""

    def __init__(self, sampler: LengthBalancedBatchSampler) -> None:
        self.sampler = sampler

    def on_epoch_begin(self, args, state, control, **kwargs) -> None:
        self.sampler.set_epoch(int(state.epoch or 0))


def main() -> None:
    dataset, epochs = Sentences(), 2
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            num_train_epochs=epochs,
            save_strategy="no",
            report_to="none",
        )
        trainer = LengthBalancedTrainer(tiny_bert(), arguments, data_collator=collate, train_dataset=dataset)
        result = trainer.train()
    assert result.global_step == epochs * trainer.sampler.steps_per_epoch
    check_seen_once(dataset, trainer.sampler.num_dropped, epochs)


if __name__ == "__main__":
    main()
    leave()
