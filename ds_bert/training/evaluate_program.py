"""The program each rank of an evaluation runs (`ds-bert evaluate` starts it)."""

import argparse
import json
import sys
from pathlib import Path

from ds_bert.arguments import add_trust_remote_code, positive_int
from ds_bert.errors import UserError


def add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="a run, one checkpoint of it, or a Hugging Face folder",
    )
    parser.add_argument("--data", required=True, metavar="DIR", help="prepared data; its held-out part is used")
    parser.add_argument(
        "--micro-batch-size",
        type=positive_int,
        default=32,
        metavar="B",
        help="samples a rank at a time (default: 32)",
    )
    add_trust_remote_code(parser)


def evaluate(args: argparse.Namespace) -> dict:
    """Evaluate a trained model on the held-out part of prepared data. A collective call if there is a process group.

    Args:
        args: from `add_evaluate_arguments`.

    Returns:
        the figures of `Evaluator`, most_frequent_token_accuracy, samples, and the checkpoint used.

    Raises:
        UserError: on all ranks alike.
    """
    import torch
    from deepspeed.accelerator import get_accelerator

    from ds_bert.agreement import together
    from ds_bert.data.prepared import PreparedData
    from ds_bert.modeling import (
        MaskedPositionHead,
        check_same_tokenizer,
        check_tokenizer_and_lengths,
        collator_for,
    )
    from ds_bert.training.evaluator import Evaluator, most_frequent_token_accuracy
    from ds_bert.training.trained_model import find_trained_model

    def load():
        trained = find_trained_model(args.checkpoint, trust_remote_code=args.trust_remote_code)
        data = PreparedData(args.data)
        if data.validation is None:
            raise UserError(f"{args.data} has no held-out part; prepare it with --validation-fraction above 0")
        tokenizer = data.load_tokenizer(trust_remote_code=args.trust_remote_code)
        folder = str(trained.folder)
        check_same_tokenizer(folder, tokenizer, trust_remote_code=args.trust_remote_code)
        model = trained.load_as_trained()
        check_tokenizer_and_lengths(
            folder, model.config, tokenizer, int(data.validation.lengths.max()), from_config=True
        )
        return trained, data.validation, tokenizer, model

    trained, split, tokenizer, model = together(load)
    device = torch.device(get_accelerator().current_device_name())
    # A run's model computes as it did in training.
    packed = trained.checkpoint is not None and trained.section.execution.packed
    evaluator = Evaluator(
        split,
        tokenizer,
        probability=trained.section.masking.probability,
        micro_batch_size=args.micro_batch_size,
        collate=collator_for(model, tokenizer, packed=packed),
    )
    head = MaskedPositionHead(model)
    with trained.autocast(device):
        figures = evaluator(model.to(device), head, device)
    used = trained.checkpoint.folder if trained.checkpoint else trained.folder
    return {
        **figures,
        "most_frequent_token_accuracy": most_frequent_token_accuracy(evaluator),
        "samples": len(split),
        "checkpoint": str(used),
    }


def main(argv: list[str] | None = None) -> int:
    """Evaluate on one of several ranks. Returns the exit code: 0 done, 1 failed, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="ds_bert.training.evaluate_program", description=__doc__, allow_abbrev=False)
    add_evaluate_arguments(parser)
    parser.add_argument("--result-file", required=True, type=Path, help="where rank 0 writes the figures as JSON")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)

    from ds_bert.cluster.rank_program import run_rank

    def work(rank: int) -> None:
        figures = evaluate(args)
        if rank == 0:
            args.result_file.write_text(json.dumps(figures))

    return run_rank("ds-bert evaluate", "ds_bert.training.evaluate_program", argv or sys.argv[1:], work)


if __name__ == "__main__":
    sys.exit(main())
