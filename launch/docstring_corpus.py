"""Write English text that every machine with Python packages has: their docstrings.

    python launch/docstring_corpus.py --output corpus.txt [--max-mb 6] [PACKAGE ...]

A docstring is a document: its paragraphs are one line each, documents are separated by blank lines. Code examples,
tables and very short docstrings are left out. The result depends only on the packages' files.
"""

import argparse
import ast
import importlib.util
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("numpy", "torch", "transformers", "datasets", "deepspeed", "accelerate", "matplotlib", "pandas", "pydantic")
MIN_WORDS = 12
UNDERLINE = re.compile(r"[-=~^]{3,}")
WORD = re.compile(r"[A-Za-z]+")


def docstrings(package: str) -> Iterator[str]:
    """Every docstring of a package's source files, files in the order of their names."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return
    for path in sorted(Path(spec.origin).parent.rglob("*.py")):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in other people's strings
                tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, OSError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node, clean=False)
                if text:
                    yield text


def paragraphs(docstring: str) -> list[str]:
    """Its paragraphs of prose, each on one line."""
    first, _, rest = docstring.partition("\n")
    kept = []
    for block in re.split(r"\n\s*\n", first.strip() + "\n" + textwrap.dedent(rest)):
        line = " ".join(UNDERLINE.sub(" ", block).split())
        letters = sum(map(len, WORD.findall(line)))
        if len(WORD.findall(line)) >= 4 and letters >= 0.7 * len(line.replace(" ", "")) and ">>>" not in line:
            kept.append(line)
    return kept


def corpus(packages: list[str], max_bytes: int) -> Iterator[str]:
    """Documents, each different, until they amount to `max_bytes`."""
    seen, written = set(), 0
    for package in packages:
        for docstring in docstrings(package):
            document = "\n".join(paragraphs(docstring))
            if len(WORD.findall(document)) < MIN_WORDS or document in seen:
                continue
            seen.add(document)
            written += len(document)
            if written > max_bytes:
                return
            yield document


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=f"default: {' '.join(PACKAGES)}")
    parser.add_argument("--output", type=Path, required=True, help="text file to write")
    parser.add_argument("--max-mb", type=float, default=6, help="stop there (default: 6)")
    args = parser.parse_args()
    documents = list(corpus(args.packages or list(PACKAGES), int(args.max_mb * 1e6)))
    if not documents:
        print("none of the packages is installed with its sources", file=sys.stderr)
        return 1
    args.output.write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    words = sum(len(document.split()) for document in documents)
    print(f"{args.output}: {len(documents):,} docstrings, {words:,} words")
    return 0


if __name__ == "__main__":
    sys.exit(main())
