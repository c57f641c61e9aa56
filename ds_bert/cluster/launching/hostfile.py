"""Which hosts and slots a job runs on: DeepSpeed's hostfile, `--include` and `--exclude`."""

import re
from dataclasses import dataclass
from pathlib import Path

from ds_bert.errors import UserError, did_you_mean

LINE = re.compile(r"(?P<host>\S+)\s+slots\s*=\s*(?P<slots>\d+)")
EXAMPLE = "write one host a line, as in: node1 slots=8"


@dataclass(frozen=True)
class Host:
    """A host and the slots of it that a job uses: one rank each, on a machine with GPUs the GPU of that number."""

    name: str
    slots: tuple[int, ...]


def read_hostfile(path: str) -> list[Host]:
    """The hosts of a hostfile in its order, with all their slots.

    Comments (`#`), blank lines, tabs, Windows line ends and a byte-order mark are allowed.

    Raises:
        UserError: the file is missing or holds no host, a line cannot be read, a host has no slot or comes twice. The
            line is given by number and text.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise UserError(f"--hostfile {path}: {error.strerror}; {EXAMPLE}") from None
    except UnicodeDecodeError:
        raise UserError(f"--hostfile {path}: is not text in UTF-8; {EXAMPLE}") from None
    found: dict[str, int] = {}
    hosts = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        where = f"{path}, line {number}: {line.strip()!r}"
        match = LINE.fullmatch(text)
        if match is None:
            raise UserError(f"{where} cannot be read; {EXAMPLE}")
        name, slots = match["host"], int(match["slots"])
        if not slots:
            raise UserError(f"{where} has no slot; give it some, or take the line out")
        if name in found:
            raise UserError(f"{where} names {name} again (first in line {found[name]}); write each host once")
        found[name] = number
        hosts.append(Host(name, tuple(range(slots))))
    if not hosts:
        raise UserError(f"--hostfile {path} holds no host; {EXAMPLE}")
    return hosts


def select(hosts: list[Host], include: str | None = None, exclude: str | None = None) -> list[Host]:
    """The hosts and slots that `--include` or `--exclude` leave.

    Args:
        hosts: of the hostfile.
        include, exclude: as DeepSpeed's launcher takes them: `HOST[:SLOT,SLOT...]`, several joined by `@`; a host
            without slots means all of its slots.

    Raises:
        UserError: both are given, one names what the hostfile does not have, or nothing is left.
    """
    if include and exclude:
        raise UserError("--include and --exclude: give one of them")
    if include:
        chosen = _parse("--include", include, hosts)
        left = [Host(host.name, tuple(s for s in host.slots if s in chosen.get(host.name, ()))) for host in hosts]
    elif exclude:
        chosen = _parse("--exclude", exclude, hosts)
        left = [Host(host.name, tuple(s for s in host.slots if s not in chosen.get(host.name, ()))) for host in hosts]
    else:
        return hosts
    left = [host for host in left if host.slots]
    if not left:
        raise UserError(f"--exclude {exclude}: leaves no slot of any host")
    return left


def _parse(option: str, text: str, hosts: list[Host]) -> dict[str, set[int]]:
    slots_of = {host.name: host.slots for host in hosts}
    chosen: dict[str, set[int]] = {}
    for part in text.split("@"):
        name, colon, numbers = part.strip().partition(":")
        if name not in slots_of:
            raise UserError(f"{option} {text}: the hostfile has no {name!r}{did_you_mean(name, slots_of)}")
        if not colon:
            chosen.setdefault(name, set()).update(slots_of[name])
            continue
        if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", numbers):
            raise UserError(f"{option} {text}: {part!r} is not HOST:SLOT,SLOT,... such as {name}:0,1")
        wanted = {int(number) for number in numbers.split(",")}
        unknown = sorted(wanted - set(slots_of[name]))
        if unknown:
            raise UserError(f"{option} {text}: {name} has the slots 0 to {slots_of[name][-1]}, not {unknown[0]}")
        chosen.setdefault(name, set()).update(wanted)
    return chosen
