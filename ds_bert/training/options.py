"""The options of a pretraining run: the same for `ds-bert pretrain` and for the program each rank runs."""

import argparse

from ds_bert.arguments import add_trust_remote_code, not_negative_int, positive_int


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of every command that trains."""
    parser.add_argument("--data", required=True, metavar="DIR", help="prepared data (from `ds-bert prepare`)")
    parser.add_argument(
        "--deepspeed_config",
        required=True,
        metavar="FILE",
        help="DeepSpeed JSON, with our section in it if you like",
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="NAME",
        help="tiny|mini|small|base|large, or a Hugging Face name or folder",
    )
    parser.add_argument(
        "--from-config",
        action="store_true",
        help="take only the architecture of --model; its weights start fresh",
    )
    parser.add_argument(
        "--seed", type=not_negative_int, default=0, help="of weights, order, masks and dropout (default: 0)"
    )
    parser.add_argument(
        "--num-workers",
        type=not_negative_int,
        default=0,
        metavar="N",
        help="processes a rank that mask ahead (default: 0, none)",
    )
    add_trust_remote_code(parser)


def add_pretrain_arguments(parser: argparse.ArgumentParser) -> None:
    add_training_arguments(parser)
    parser.add_argument("--output", required=True, metavar="DIR", help="run folder: checkpoints, metrics, loss.png")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--max-steps", type=positive_int, metavar="N", help="optimizer steps of the whole run")
    length.add_argument("--epochs", type=positive_int, metavar="N", help="passes over the data of the whole run")
    parser.add_argument(
        "--save-interval",
        type=positive_int,
        metavar="N",
        help="steps between checkpoints (default: only at the end)",
    )
    parser.add_argument(
        "--eval-interval",
        type=positive_int,
        metavar="N",
        help="steps between evaluations (default: only at the end)",
    )
    parser.add_argument(
        "--resume", default="auto", metavar="auto|never|TAG", help="go on from the newest whole checkpoint (default), "
        "refuse to, or go on from this one"
    )  # fmt: skip
    parser.add_argument("--keep-last", type=positive_int, metavar="N", help="delete all but the N newest checkpoints")
