"""Which samples each rank trains on, and in which order: planned from numbers alone, never from the data."""

from ds_bert.sampling.random_batches import RandomBatchSampler

__all__ = ["RandomBatchSampler"]
