"""Programs and rights that some tests need."""

import os
import shutil

import pytest

TWO_HOSTS = ("ip", "tc", "ssh", "sshd", "ssh-keygen", "pdsh", "mpirun", "unshare")
SLURM = ("slurmctld", "slurmd", "srun", "sbatch", "munged")


def need(*programs: str) -> None:
    """Skip the test without these programs or root; in CI, where they are installed, fail instead."""
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    missing = [program for program in programs if not shutil.which(program, path=path)]
    reason = f"needs {', '.join(missing)}" if missing else "needs root" if os.geteuid() else None
    if reason and os.environ.get("CI"):
        pytest.fail(f"{reason}, which .ci/run should have seen to")
    if reason:
        pytest.skip(reason)
