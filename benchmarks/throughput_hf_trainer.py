"""What `throughput.py` starts on each rank for Hugging Face's Trainer: a user's plain script, with a clock."""

import argparse
import json
import time
from pathlib import Path

import datasets
import torch
import torch.distributed as dist
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from ds_bert.data import PreparedData
from ds_bert.training.metrics import FILE_NAME


class CountingCollator(DataCollatorForLanguageModeling):
    """Remembers how many tokens of each micro-batch are no padding."""

    def __call__(self, features, return_tensors=None):
        self.real_tokens = [*getattr(self, "real_tokens", []), sum(len(f["input_ids"]) for f in features)]
        return super().__call__(features, return_tensors)


class Clock(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.ends = [time.perf_counter()]

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.ends.append(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--max-steps", required=True, type=int)
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--group-by-length", action="store_true")
    parser.add_argument("--local_rank", type=int)
    args = parser.parse_args()
    config = json.loads(Path(args.deepspeed_config).read_text())
    arguments = TrainingArguments(
        str(args.output),
        use_cpu=not torch.cuda.is_available(),
        deepspeed=args.deepspeed_config,
        bf16=config.get("bf16", {}).get("enabled", False),
        per_device_train_batch_size=config["train_micro_batch_size_per_gpu"],
        learning_rate=config["optimizer"]["params"]["lr"],
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        max_steps=args.max_steps,
        train_sampling_strategy="group_by_length" if args.group_by_length else "random",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    data = PreparedData(args.data)
    rows = [data.train[index].tolist() for index in range(len(data.train))]
    dataset = datasets.Dataset.from_dict({"input_ids": rows, "length": [len(row) for row in rows]})
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(args.model), dtype=torch.float32)
    clock, collate = Clock(), CountingCollator(data.load_tokenizer(), mlm_probability=0.15)
    Trainer(model, arguments, data_collator=collate, train_dataset=dataset, callbacks=[clock]).train()
    real_tokens = torch.tensor(collate.real_tokens[: args.max_steps])
    dist.all_reduce(real_tokens)
    if dist.get_rank() == 0:
        args.output.mkdir(parents=True, exist_ok=True)
        seconds = [end - start for start, end in zip(clock.ends, clock.ends[1:], strict=False)]
        lines = [
            json.dumps({"step": step + 1, "real_tokens_per_s": tokens / spent})
            for step, (tokens, spent) in enumerate(zip(real_tokens.tolist(), seconds, strict=True))
        ]
        (args.output / FILE_NAME).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
