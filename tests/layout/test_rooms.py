"""The layout: which room may import which, and what must not load where.

Imports count wherever they stand, inside functions too, because they say what a room knows; those under
`if TYPE_CHECKING` and strings given to `import_module` (a face's own files) do not.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "ds_bert"

# From the ground up. A room imports only from floors below its own, and from itself.
FLOORS = [
    ["ground"],
    ["layers", "sampling", "optim", "data", "cluster/network"],
    ["reduction", "accelerator", "data/preparing", "data/batches", "cluster/supervision"],
    ["modeling", "resolution"],
    ["planning", "engine", "cluster/launching", "cluster"],
    ["training", "doctor"],
    ["sweep"],
    ["cli"],
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def room_of(path: Path) -> str:
    """Room of a file: the longest folder that `FLOORS` names; files beside the rooms are the ground."""
    parts = path.relative_to(PACKAGE).parts[:-1]
    for length in range(len(parts), 0, -1):
        if "/".join(parts[:length]) in FLOOR:
            return "/".join(parts[:length])
    assert not parts, f"{path}: no room of FLOORS"
    return "ground"


def imports_of(path: Path) -> list[tuple[int, Path]]:
    """Lines and files of this package's modules that one file imports."""
    found = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ds_bert"):
            for alias in node.names:
                found.append((node.lineno, module_file(f"{node.module}.{alias.name}") or module_file(node.module)))
        if isinstance(node, ast.Import):
            found.extend((node.lineno, module_file(a.name)) for a in node.names if a.name.startswith("ds_bert"))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def module_file(name: str) -> Path | None:
    base = PACKAGE.parent.joinpath(*name.split("."))
    candidates = [base.with_suffix(".py"), base / "__init__.py"]
    return next((file for file in candidates if file.is_file()), None)


FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_room_stands_on_a_floor():
    assert {room_of(path) for path in FILES} == set(FLOOR)


def test_no_import_runs_upward_or_across():
    # The package's own __init__ is the way in from outside: it may name anything, lazily.
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} ({room_of(path)}) imports {target.relative_to(PACKAGE)}"
        for path in FILES
        if path != PACKAGE / "__init__.py"
        for line, target in imports_of(path)
        if room_of(path) != room_of(target) and FLOOR[room_of(path)] <= FLOOR[room_of(target)]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_room_is_entered_by_its_package_root():
    """`import ds_bert` inside the package would load the public names, which know everything."""
    wrong = [path for path in FILES for _, target in imports_of(path) if target == PACKAGE / "__init__.py"]
    assert not wrong


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.name == "__init__.py"], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_every_room_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_no_file_is_longer_than_400_lines():
    long = {path.name: lines for path in FILES if (lines := len(path.read_text().splitlines())) > 400}
    assert not long


@pytest.mark.parametrize(("room", "forbidden"), [("cluster/supervision", "torch"), ("reduction", "deepspeed")])
def test_what_must_not_load(room, forbidden):
    modules = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in FILES
        if room_of(path) == room and path.name != "__init__.py"
    ]
    code = (
        f"import importlib, sys\n"
        f"for name in {modules!r}:\n"
        f"    importlib.import_module(name)\n"
        f"    assert {forbidden!r} not in sys.modules, name + ' loads {forbidden}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=False)
    assert not done.returncode, done.stderr[-2000:]
