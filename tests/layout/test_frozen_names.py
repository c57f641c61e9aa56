"""What users write stays as it is: keys of the "ds_bert" section, options of the commands, names of every room.

A change here is a change of the interface. If it is meant: `python tests/layout/test_frozen_names.py` writes the list
anew, and `CHANGELOG.md` says what changed.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest

RECORDED = Path(__file__).with_name("frozen_names.json")
PACKAGE = Path(__file__).parents[2] / "ds_bert"


def keys() -> list[str]:
    from pydantic import BaseModel

    from ds_bert.config import SECTION, DsBertConfig

    def below(model: type[BaseModel], prefix: str) -> list[str]:
        found = []
        for name, field in model.model_fields.items():
            found.append(f"{prefix}.{name}")
            kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
            for kind in kinds:
                if isinstance(kind, type) and issubclass(kind, BaseModel):
                    found += below(kind, f"{prefix}.{name}")
        return found

    return sorted(below(DsBertConfig, SECTION))


def options() -> dict[str, list[str]]:
    from ds_bert.cli.main import COMMANDS

    found = {}
    for command, (module, _) in COMMANDS.items():
        parser = argparse.ArgumentParser(add_help=False)
        importlib.import_module(module).add_arguments(parser)
        found[command] = sorted("/".join(action.option_strings) or action.dest for action in parser._actions)
    return found


def exports() -> dict[str, list[str]]:
    rooms = [".".join(file.parent.relative_to(PACKAGE.parent).parts) for file in sorted(PACKAGE.rglob("__init__.py"))]
    return {room: sorted(names) for room in rooms if (names := getattr(importlib.import_module(room), "__all__", []))}


NAMES = {"keys": keys, "options": options, "exports": exports}


@pytest.mark.parametrize("what", NAMES)
def test_names_are_as_recorded(what):
    recorded = json.loads(RECORDED.read_text())[what]
    assert NAMES[what]() == recorded, f"{what} changed: if that is meant, run python {Path(__file__).name} and say so"


def test_every_exported_name_exists():
    missing = [
        f"{room}.{name}"
        for room, names in exports().items()
        for name in names
        if not hasattr(importlib.import_module(room), name)
    ]
    assert not missing


if __name__ == "__main__":
    sys.path.insert(0, str(PACKAGE.parent))
    RECORDED.write_text(json.dumps({what: names() for what, names in NAMES.items()}, indent=1) + "\n")
