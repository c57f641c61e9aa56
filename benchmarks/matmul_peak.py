"""The highest rate of matrix multiplication that this machine shows, to compare a model's with."""

import argparse
import os
import subprocess
import sys
import time

SIZE = 2048
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def matmul_peak(precision: str, ranks: int, threads: int) -> float:
    """Floating-point operations a second of all ranks together, each with so many threads: the best of some tries."""
    command = [sys.executable, __file__, "--precision", precision, "--threads", str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(ranks)]
    return sum(float(process.communicate()[0]) for process in processes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", choices=list(DTYPES), required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()

    import torch

    torch.set_num_threads(args.threads)
    a, b = (torch.randn(SIZE, SIZE, dtype=getattr(torch, DTYPES[args.precision])) for _ in range(2))
    best = float("inf")
    for _ in range(15):
        started = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - started)
    print(2 * SIZE**3 / best)


if __name__ == "__main__":
    main()
