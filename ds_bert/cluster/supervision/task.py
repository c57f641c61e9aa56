"""What launchers start for each rank of a job: `python -m ds_bert.cluster.supervision.task TASK`.

Launchers pass words on through shells, which eat blanks, quotes and `$`; the task is one word of letters and digits.
"""

import base64
import json
import os
import sys
from dataclasses import asdict, dataclass

from ds_bert.cluster.supervision.supervisor import supervise_rank
from ds_bert.errors import UserError

TASK_MODULE = "ds_bert.cluster.supervision.task"


@dataclass(frozen=True)
class Task:
    """What each rank of a job does."""

    module: str
    arguments: list[str]
    folder: str
    """Working folder."""
    settings: dict[str, str]
    """Variables to set."""
    environment: dict[str, str]
    """Variables to set where they are not set on the rank's host."""

    def encode(self) -> str:
        return base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode()

    @staticmethod
    def decode(word: str) -> "Task":
        return Task(**json.loads(base64.urlsafe_b64decode(word)))


def main() -> int:
    task = Task.decode(sys.argv[-1])
    os.environ.update({**task.environment, **os.environ, **task.settings})
    try:
        os.chdir(task.folder)
        return supervise_rank(task.module, task.arguments)
    except (UserError, OSError) as error:
        print(f"ds-bert: error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
