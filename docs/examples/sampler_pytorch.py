"""The sampler in a plain PyTorch loop: torchrun --standalone --nproc-per-node 2 docs/examples/sampler_pytorch.py"""

import torch
import torch.distributed as dist
from tiny_corpus import Sentences, check_seen_once, collate, leave, tiny_bert
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ds_bert.sampling import LengthBalancedBatchSampler

EPOCHS, ACCUMULATION = 2, 2


def main() -> None:
    dataset = Sentences()
    model = DistributedDataParallel(tiny_bert())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = LengthBalancedBatchSampler(
        dataset.lengths,
        micro_batch_size=4,
        gradient_accumulation_steps=ACCUMULATION,
        world_size=dist.get_world_size(),
        rank=dist.get_rank(),
        hidden_size=model.module.config.hidden_size,
    )
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for micro_step, batch in enumerate(loader, 1):
            (model(**batch).loss / ACCUMULATION).backward()
            if micro_step % ACCUMULATION == 0:
                optimizer.step()
                optimizer.zero_grad()
    check_seen_once(dataset, sampler.num_dropped, EPOCHS)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    leave()
