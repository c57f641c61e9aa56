"""What makes a run, or a sweep, this one and no other: flat plain values that are kept and compared."""

import hashlib
import json


def fingerprint(values: dict) -> str:
    """16 hexadecimal digits that stand for values as JSON knows them, in any order of the keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def differing_keys(theirs: dict, mine: dict) -> list[str]:
    """The keys whose values are not the same in both; a missing one is None."""
    return [key for key in {**theirs, **mine} if theirs.get(key) != mine.get(key)]


def describe_changes(theirs: dict, mine: dict) -> str:
    """Every differing key with both values, for an error."""
    keys = differing_keys(theirs, mine)
    return "; ".join(f"{key}: {theirs.get(key)!r} there, {mine.get(key)!r} now" for key in keys)
