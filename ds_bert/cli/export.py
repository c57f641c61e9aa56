"""Turn a checkpoint into a folder that transformers and sentence-transformers load."""

import argparse
import shutil
from pathlib import Path

from ds_bert.accelerator.device import choose_device
from ds_bert.arguments import add_trust_remote_code
from ds_bert.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", required=True, metavar="DIR", help="a run (its newest checkpoint) or a checkpoint"
    )
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="new folder with model.safetensors and tokenizer"
    )
    add_trust_remote_code(parser)


def run(args: argparse.Namespace) -> int:
    choose_device()
    from ds_bert.training.trained_model import find_trained_model

    output = Path(args.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output {output} exists already; name a new folder")
    trained = find_trained_model(args.checkpoint, trust_remote_code=args.trust_remote_code)
    model = trained.load_in_fp32()
    temporary = output.with_name(output.name + ".tmp")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        model.save_pretrained(temporary)
        trained.tokenizer().save_pretrained(temporary)
        if output.exists():
            output.rmdir()
        temporary.rename(output)
    except OSError as error:
        raise UserError(f"--output {output}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    source = trained.checkpoint.folder if trained.checkpoint else trained.folder
    print(f"{source} -> {output}: AutoModelForMaskedLM.from_pretrained({str(output)!r})")
    return 0
