"""The sampler in Lightning: torchrun --standalone --nproc-per-node 2 docs/examples/sampler_lightning.py"""

import lightning
import torch
from tiny_corpus import Sentences, check_seen_once, collate, leave, tiny_bert
from torch.utils.data import DataLoader

from ds_bert.sampling import LengthBalancedBatchSampler

EPOCHS, ACCUMULATION = 2, 2


class Encoder(lightning.LightningModule):
    def __init__(self, dataset: Sentences) -> None:
        super().__init__()
        self.model, self.dataset = tiny_bert(), dataset

    def training_step(self, batch: dict, batch_idx: int) -> torch.Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader:
        self.sampler = LengthBalancedBatchSampler(
            self.dataset.lengths,
            micro_batch_size=4,
            gradient_accumulation_steps=ACCUMULATION,
            world_size=self.trainer.world_size,
            rank=self.trainer.global_rank,
            hidden_size=self.model.config.hidden_size,
        )
        return DataLoader(self.dataset, batch_sampler=self.sampler, collate_fn=collate)

    def on_train_epoch_start(self) -> None:
        self.sampler.set_epoch(self.current_epoch)

    def on_fit_end(self) -> None:
        check_seen_once(self.dataset, self.sampler.num_dropped, EPOCHS)


def main() -> None:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=EPOCHS,
        accumulate_grad_batches=ACCUMULATION,
        use_distributed_sampler=False,  # else Lightning puts a sampler of its own in place of ours
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Encoder(Sentences()))


if __name__ == "__main__":
    main()
    leave()
