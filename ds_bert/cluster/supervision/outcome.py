"""How a rank, and with it a job, ended."""

import contextlib
import dataclasses
import sys
from dataclasses import dataclass

USER_ERROR = "user error"
FAILED = "failed"
LOST = "lost"
FOLLOWED = "followed"

# Of failures reported together, one of the earliest kind here came first: a rank whose partner is gone fails of that.
ORDER = (USER_ERROR, FAILED, LOST, FOLLOWED)


@dataclass(frozen=True)
class Failure:
    """Why a rank failed."""

    kind: str
    """USER_ERROR: told the user what to mend, the same on all ranks. FAILED: an exception, a signal, a stopped process.
    LOST: its host or the connection to it. FOLLOWED: its communication with another rank broke."""
    rank: int
    host: str
    reason: str
    traceback: str = ""
    exit_code: int = 1

    def line(self) -> str:
        """For the user, without a line's end."""
        if self.kind == USER_ERROR:
            return self.reason
        return f"rank {self.rank} on {self.host} failed first: {self.reason}"


@dataclass(frozen=True)
class Outcome:
    """How a job ended: `failure` is None if all ranks came to their end, `stopped_by` a signal that asked them to."""

    failure: Failure | None = None
    stopped_by: str | None = None

    def to_message(self) -> dict:
        return {"outcome": dataclasses.asdict(self)}

    @staticmethod
    def from_message(message: dict) -> "Outcome":
        plain = message["outcome"]
        return Outcome(plain["failure"] and Failure(**plain["failure"]), plain["stopped_by"])


def first_failure(failures: list[Failure]) -> Failure:
    """Which of the failures the others followed from.

    Args:
        failures: in the order of their arrival.
    """
    return min(failures, key=lambda failure: ORDER.index(failure.kind))


def announce(outcome: Outcome, command: str) -> None:
    """Say on stderr how a job ended, if it did not end well."""
    with contextlib.suppress(OSError):
        if outcome.failure:
            print(f"{command}: error: {outcome.failure.line()}", file=sys.stderr, flush=True)
        elif outcome.stopped_by:
            print(f"{command}: stopped by {outcome.stopped_by}", file=sys.stderr, flush=True)
