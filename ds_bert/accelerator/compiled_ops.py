"""DeepSpeed's compiled ops: built once per machine, in one process, before anything waits for them.

DeepSpeed compiles an op when it is first used. Two ranks doing that at the same time can abort one of them, and a run
killed meanwhile leaves torch's `lock` file, for which every later run waits without a word. So each rank calls
`build_ops` first: one process builds while the others wait at a file lock that the system itself frees.
"""

import logging
import subprocess
import sys
import time
from pathlib import Path

import psutil

from ds_bert.errors import last_line
from ds_bert.files import lock_exclusively
from ds_bert.optim.optimizers import kernel_builder

log = logging.getLogger(__name__)

BUILD = "from deepspeed.accelerator import get_accelerator; get_accelerator().create_op_builder({name!r}).load()"


def needed_ops(config: dict) -> list[str]:
    """Builder names of the ops that training with this DeepSpeed configuration loads."""
    optimizer = config.get("optimizer", {})
    builder = kernel_builder(optimizer.get("type", ""))
    return [] if builder is None or optimizer.get("params", {}).get("torch_adam") else [builder]


def skip_unused_comm_op() -> None:
    """Keep DeepSpeed from compiling its shared-memory op at start: only inference calls it."""
    import deepspeed.ops
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is not None:
        deepspeed.ops.__compatible_ops__[builder.NAME] = False


def build_ops(names: list[str]) -> str | None:
    """Compile what is not compiled yet, or wait until another process of this machine has.

    Returns:
        None if all ops can be loaded, else why one cannot be built (the compiler's last words).
    """
    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import _get_build_directory

    for name in names:
        builder = get_accelerator().create_op_builder(name)
        if builder is None:
            return f"{name} does not exist for this accelerator"
        folder = Path(_get_build_directory(builder.name, verbose=False))
        with open(folder.parent / f"{builder.name}.ds_bert_lock", "w") as guard:
            lock_exclusively(guard.fileno())
            remove_stale_lock(folder / "lock")
            if (folder / f"{builder.name}.so").exists():
                continue
            print(
                f"compiling DeepSpeed's {builder.name}, once per machine; this takes some minutes",
                file=sys.stderr,
            )
            done = subprocess.run([sys.executable, "-c", BUILD.format(name=name)], capture_output=True, text=True)
            if done.returncode:
                return last_line(done.stderr or done.stdout)
    return None


def remove_stale_lock(lock: Path) -> None:
    """Remove the lock that a killed compilation left behind.

    The process that compiles keeps the file open. One that nobody on this machine has open is removed, and named in
    the log. A process on another host that shares this folder cannot be seen, and would lose its lock.
    """
    if not lock.exists() or _is_open_somewhere(lock):
        return
    age = time.time() - lock.stat().st_mtime
    log.warning(f"{lock} was left by a run that was killed {age:.0f} s ago or earlier; removed")
    lock.unlink(missing_ok=True)


def _is_open_somewhere(path: Path) -> bool:
    for process in psutil.process_iter():
        try:
            if any(Path(file.path) == path for file in process.open_files()):
                return True
        except (psutil.Error, OSError):
            continue
    return False


def use_torch_adam(config: dict) -> None:
    """Make DeepSpeed use torch's Adam, which needs no compiled op."""
    config["optimizer"].setdefault("params", {})["torch_adam"] = True
