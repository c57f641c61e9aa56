"""Bucket clipping in the HF Trainer: deepspeed --num_gpus 2 docs/examples/clipping_hf_trainer.py"""

import tempfile

import torch.distributed as dist
from tiny_corpus import Sentences, collate, leave, tiny_bert
from transformers import Trainer, TrainerCallback, TrainingArguments

from ds_bert.engine import attach_to_engine

DEEPSPEED = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 0},
    "optimizer": {"type": "Adam", "params": {"lr": "auto", "torch_adam": True}},
}


class BucketClipping(TrainerCallback):
    """Replaces DeepSpeed's reduction once accelerate has built the engine, before the first step.

    Args:
        settings: of `attach_to_engine`; the maximum norm is the Trainer's `max_grad_norm`.
    """

    def __init__(self, trainer: Trainer, **settings) -> None:
        self.trainer, self.settings = trainer, settings

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.clipping = attach_to_engine(self.trainer.model_wrapped, **self.settings)

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if self.clipping.statistics is not None and state.is_world_process_zero:
            logs["clipped_share"] = self.clipping.statistics.clipped_share


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            deepspeed=DEEPSPEED,
            max_grad_norm=0.5,
            learning_rate=1e-3,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=20,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(tiny_bert(), arguments, data_collator=collate, train_dataset=Sentences())
        trainer.add_callback(BucketClipping(trainer))
        trainer.train()
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    assert len(norms) == 4, norms
    assert max(norms) <= 0.5 * (1 + 1e-5), norms
    if dist.get_rank() == 0:
        print(f"norms of the averaged gradient: {', '.join(f'{norm:.3f}' for norm in norms)}")


if __name__ == "__main__":
    main()
    leave()
