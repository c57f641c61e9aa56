"""Bucket clipping in plain PyTorch: torchrun --standalone --nproc-per-node 2 docs/examples/clipping_pytorch.py"""

import math

import torch
import torch.distributed as dist
from tiny_corpus import Sentences, collate, leave, tiny_bert

from ds_bert.reduction import attach

STEPS, ACCUMULATION, MAX_NORM = 20, 2, 0.5


def main() -> None:
    dataset, model = Sentences(), tiny_bert()  # the same weights on all ranks, and no DistributedDataParallel
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    reducer = attach(model, max_norm=MAX_NORM)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        for micro_step in range(ACCUMULATION):
            picked = torch.randint(len(dataset), (8,), generator=generator)
            batch = collate([dataset[index] for index in picked])
            if micro_step < ACCUMULATION - 1:
                with reducer.no_sync():
                    (model(**batch).loss / ACCUMULATION).backward()
            else:
                (model(**batch).loss / ACCUMULATION).backward()  # buckets are sent from in here
        statistics = reducer.finish()
        if math.isfinite(statistics.grad_norm_after_clip):  # the same on all ranks: they skip together
            optimizer.step()
        elif where := reducer.first_nonfinite():
            print(f"step skipped: the gradient is not finite ({where})")
        optimizer.zero_grad()
        assert statistics.grad_norm_after_clip <= MAX_NORM * (1 + 1e-5)
    checksum = torch.cat([p.detach().flatten() for p in model.parameters()]).double().sum()
    checksums = [torch.zeros_like(checksum) for _ in range(dist.get_world_size())]
    dist.all_gather(checksums, checksum)
    assert len({value.item() for value in checksums}) == 1
    if dist.get_rank() == 0:
        print(
            f"after {STEPS} steps: norm {statistics.grad_norm_before_clip:.3f} before and "
            f"{statistics.grad_norm_after_clip:.3f} after clipping, {statistics.clipped_share:.0%} of buckets clipped; "
            "all ranks have the same weights"
        )


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    leave()
