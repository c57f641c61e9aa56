"""Turn raw text into tokenized samples on disk, ready for `ds-bert pretrain`."""

import argparse

from ds_bert.arguments import add_trust_remote_code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `ds-bert prepare`."""
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help="UTF-8 text files, in this order")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to make; must not exist, or be empty")
    parser.add_argument("--tokenizer", metavar="NAME_OR_DIR", help="use this tokenizer (folder or Hub name)")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="learn a tokenizer of at most N (default 30522)")
    parser.add_argument("--max-length", type=int, default=512, metavar="N", help="tokens of a sample (default 512)")
    parser.add_argument(
        "--sample-unit",
        choices=("pack", "paragraph", "sentence", "document"),
        default="pack",
        help="what one sample is; pack (default) fills it with consecutive sentences of one document",
    )
    parser.add_argument(
        "--validation-fraction",
        type=float,
        default=0.05,
        metavar="F",
        help="documents to hold out (default 0.05)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the documents held out (default 0)")
    parser.add_argument("--num-workers", type=int, metavar="N", help="processes (default: one for each core)")
    add_trust_remote_code(parser)


def run(args: argparse.Namespace) -> int:
    """Run `ds-bert prepare`. Returns the exit code."""
    from ds_bert.data.preparing.prepare import PrepareSettings, prepare

    settings = PrepareSettings(
        tokenizer=args.tokenizer,
        vocab_size=args.vocab_size,
        max_length=args.max_length,
        sample_unit=args.sample_unit,
        validation_fraction=args.validation_fraction,
        seed=args.seed,
        trust_remote_code=args.trust_remote_code,
    )
    prepare(args.input, args.output, settings, num_workers=args.num_workers)
    return 0
