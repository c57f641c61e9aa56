"""Show what the quickstart's model has learnt; exit code 1 if that is too little.

python launch/show_answers.py RUN_FOLDER
"""

import json
import sys
from pathlib import Path

from transformers import pipeline
from transformers.utils import logging

SENTENCES = (
    "Returns the [MASK] of the input.",
    "the model is trained on the [MASK].",
    "If [MASK], the output is a list.",
)


def main(run: Path) -> int:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    fill_mask = pipeline("fill-mask", model=str(run / "model"))
    for sentence in SENTENCES:
        answers = ", ".join(f"{answer['token_str']} ({answer['score']:.2f})" for answer in fill_mask(sentence)[:4])
        print(f"{sentence:45} {answers}")
    figures = json.loads((run / "figures.json").read_text())
    accuracy, baseline = figures["eval_accuracy"], figures["most_frequent_token_accuracy"]
    print(
        f"\nmasked accuracy on held-out text: {accuracy:.4f}; always guessing the most frequent token: {baseline:.4f} "
        f"({accuracy / baseline:.1f} times as good)\nloss curve: {run / 'run' / 'loss.png'}\nmodel: {run / 'model'}"
    )
    if accuracy < 2 * baseline:
        print("the accuracy is less than twice that baseline: something is wrong", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
