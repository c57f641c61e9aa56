"""From the JSON that a user wrote to a configuration that is checked, complete and the same for DeepSpeed and us.

`resolve` is the one way: batch sizes, "auto" values, learning rates, bucket clipping, and what is refused. Plain
dictionaries, so that a mistake is found before any rank starts. May import: optim, reduction.plan, and the ground.
"""

from ds_bert.resolution.batch_sizes import BATCH_KEYS, resolve_batch_sizes
from ds_bert.resolution.resolve import Resolved, resolve

__all__ = ["BATCH_KEYS", "Resolved", "resolve", "resolve_batch_sizes"]
