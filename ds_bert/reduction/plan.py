"""Which parameters travel together, in which order, and how far each bucket is clipped."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ds_bert.errors import UserError

VERSION = 1


@dataclass(frozen=True)
class Member:
    """What the plan needs to know of a parameter."""

    bytes_sent: int
    kind: str
    """Dtype and device: parameters of one bucket have the same."""


@dataclass(frozen=True)
class BucketPlan:
    """The buckets of a model, in the order in which they are sent.

    Attributes:
        buckets: names of the parameters of each bucket, in the order in which their gradients become ready.
        split: the tied embedding whose dense and lookup gradients are sent apart; the only one of its bucket. None
            where nothing is split.
    """

    buckets: tuple[tuple[str, ...], ...]
    split: str | None = None

    @classmethod
    def build(
        cls,
        ready_order: Iterable[str],
        members: Mapping[str, Member],
        *,
        bucket_bytes: float,
        first_bucket_bytes: float,
        split: str | None = None,
    ) -> "BucketPlan":
        """Fill buckets in ready order; a bucket is closed by the first parameter that would make it too large.

        Args:
            ready_order: names of parameters; one of `members` that is missing here follows last.
            members: every trainable parameter by name.
            bucket_bytes: what a bucket may hold, unless one parameter alone is larger.
            first_bucket_bytes: the same for the first of each kind, small so that sending starts early.
            split: see `BucketPlan`.
        """
        order = [name for name in dict.fromkeys(ready_order) if name in members]
        # Never ready so far, so most likely never used: nothing that is ready shall wait for them.
        seen = set(order)
        unseen = [name for name in reversed(members) if name not in seen]
        buckets = []
        for names in (order, unseen):
            open_buckets: dict[str, list[str]] = {}
            room: dict[str, float] = {}
            for name in names:
                kind = members[name].kind
                if name == split:
                    buckets.append([name])
                    continue
                if kind not in open_buckets or members[name].bytes_sent > room[kind]:
                    is_first = kind not in open_buckets and names is order
                    room[kind] = first_bucket_bytes if is_first else bucket_bytes
                    open_buckets[kind] = []
                    buckets.append(open_buckets[kind])
                open_buckets[kind].append(name)
                room[kind] -= members[name].bytes_sent
        return cls(tuple(map(tuple, buckets)), split)

    def state_dict(self) -> dict:
        """Plain values that survive JSON."""
        return {"version": VERSION, "buckets": [list(bucket) for bucket in self.buckets], "split": self.split}

    @classmethod
    def from_state_dict(cls, state: dict, names: Sequence[str]) -> "BucketPlan":
        """The plan that was saved.

        Args:
            state: from `state_dict`.
            names: of the model's trainable parameters.

        Raises:
            UserError: another version, or the plan of another model.
        """
        if state.get("version") != VERSION:
            raise UserError(f"the bucket plan has version {state.get('version')}, this software reads {VERSION}")
        plan = cls(tuple(tuple(bucket) for bucket in state["buckets"]), state["split"])
        differing = {name for bucket in plan.buckets for name in bucket} ^ set(names)
        if differing:
            raise UserError(
                f"the bucket plan is of a model with other trainable parameters: {len(differing)} differ, such as "
                f"{min(differing)!r}; load a checkpoint of this model"
            )
        return plan
