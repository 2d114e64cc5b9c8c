"""Buffer pools that fully sharded units of different shapes share in turn: plans and allocators.

A *unit* (a layer) needs a few *buckets* at a time. Two units are in use at once: the one that computes and the one that
is being gathered. The pool is the elementwise maximum of the units' requests: sort each unit's buckets of one storage
dtype by size, largest first; slot i is as large as the largest i-th bucket. This is the smallest pool that every unit
fits into, since a pool that fits unit u needs an i-th slot at least as large as u's i-th bucket. It does not depend on
the order of the units. There are `copies` of it: a deeper prefetch needs more copies, but never changes the sizes.

    units            bf16         uint8             Mi elements
    dense            8            96  64
    mamba            40  12       24
    moe              48           72  72  16
    pool             48  12       96  72  16        304 MiB a copy; the largest unit has 256

All memory is one allocation, made up front, and the address of a slot never changes afterwards: CUDA graphs and
registered memory may rely on it. The leases of a slot (`tkernels.layers.lease`) order its reads and writes, on whatever
streams its tenants work; the host only decides which bucket is the next tenant, in the same order on every rank.
"""

import contextlib
import hashlib
import itertools
import warnings
import zlib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tkernels.comm.arguments import check_torch_dtype, check_type, whole
from tkernels.comm.capture import lasting
from tkernels.comm.context import MeshLike, as_context
from tkernels.comm.errors import LeaseError
from tkernels.comm.fence import capturing
from tkernels.comm.regions import round_up
from tkernels.layers.lease import Keepalive, Lease, Slot

_ALIKE = "all must have the same units and take the same steps"


@dataclass(frozen=True)
class Bucket:
    """A flat tensor that a unit needs while it is in use. id: an int or a string, unique in the plan."""

    id: int | str
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class SlotSpec:
    """A slot of the pool, the same in each copy.

    dtype: storage dtype; uint8 for 8-bit floats, and for everything in a plan with merge_dtypes.
    index: 0 is the largest slot of this dtype. nbytes: of its largest bucket. offset: in bytes, within a copy.
    bucket, unit: the largest bucket, which sets the size, and its unit.
    """

    dtype: torch.dtype
    index: int
    nbytes: int
    offset: int
    bucket: int | str
    unit: Hashable

    @property
    def name(self) -> str:
        return f"{_short(self.dtype)}[{self.index}]"


def storage_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that buckets of `dtype` are stored as: uint8 for 8-bit floats, otherwise the same."""
    return torch.uint8 if dtype.is_floating_point and dtype.itemsize == 1 else dtype


@dataclass(frozen=True)
class MaxPoolPlan:
    """Assigns a slot to each bucket, and sizes the slots. Made by `build`, on the host alone.

    slots: of one copy. slot_of: bucket id -> slot, for buckets in the pool. unit_of: bucket id -> unit, for all buckets
    of units, pooled or not.
    buckets: id -> bucket, padded, for all. others: id -> byte offset after the copies, for buckets outside of the pool.
    copy_nbytes: bytes of a copy. others_nbytes: bytes of `others`. fingerprint: equal if and only if the plans are.
    """

    slots: tuple[SlotSpec, ...]
    slot_of: Mapping[int | str, SlotSpec]
    unit_of: Mapping[int | str, Hashable]
    buckets: Mapping[int | str, Bucket]
    others: Mapping[int | str, int]
    copies: int
    copy_nbytes: int
    others_nbytes: int
    fingerprint: str

    @classmethod
    def build(
        cls,
        units: Mapping[Hashable, Sequence[Bucket]],
        *,
        others: Iterable[Bucket] = (),
        copies: int = 2,
        align: int = 256,
        pad_multiple: int = 1,
        merge_dtypes: bool = False,
    ) -> "MaxPoolPlan":
        """The smallest pool that every unit fits into.

        units: the buckets of each. others: buckets of no unit, each of which gets separate memory.
        copies: units that may be in use at once.
        align: slots start at multiples of this many bytes, a power of 2, at least 16.
        pad_multiple: every bucket is padded to a multiple of this many elements before sizes are compared, for example
            the number of ranks that it is split over.
        merge_dtypes: all dtypes share slots, which are then sized in bytes.

        Raises ValueError for a bucket id that occurs twice, even with another dtype: a bucket that two units share
        belongs to `others`.
        """
        whole("a pool's copies", copies, 1)
        whole("a pool's pad_multiple", pad_multiple, 1)
        if whole("a pool's align", align, 16) & (align - 1):
            raise ValueError(f"a pool needs an align that is a power of 2 from 16; got align={align}")
        others = _check_buckets(units, others)
        padded, unit_of = {}, {}
        for unit, buckets in [*units.items(), (None, others)]:
            for bucket in buckets:
                if bucket.id in padded:
                    raise ValueError(_twice(padded[bucket.id], unit_of.get(bucket.id), bucket, unit))
                padded[bucket.id] = Bucket(bucket.id, bucket.dtype, round_up(bucket.numel, pad_multiple))
                if unit is not None:
                    unit_of[bucket.id] = unit

        largest, place = {}, {}
        for unit, buckets in sorted(units.items(), key=lambda item: str(item[0])):  # ties: the first by name
            stored = defaultdict(list)
            for bucket in buckets:
                stored[torch.uint8 if merge_dtypes else storage_dtype(bucket.dtype)].append(padded[bucket.id])
            for dtype, same in stored.items():
                for index, bucket in enumerate(sorted(same, key=lambda bucket: (-bucket.nbytes, str(bucket.id)))):
                    place[bucket.id] = (dtype, index)
                    if (dtype, index) not in largest or bucket.nbytes > largest[dtype, index][0].nbytes:
                        largest[dtype, index] = bucket, unit
        slots, offset = {}, 0
        for dtype, index in sorted(largest, key=lambda key: (str(key[0]), key[1])):
            bucket, unit = largest[dtype, index]
            slots[dtype, index] = SlotSpec(dtype, index, bucket.nbytes, offset, bucket.id, unit)
            offset += round_up(bucket.nbytes, align)
        outside, others_nbytes = {}, 0
        for bucket in sorted((padded[bucket.id] for bucket in others), key=lambda bucket: str(bucket.id)):
            outside[bucket.id] = others_nbytes
            others_nbytes += round_up(bucket.nbytes, align)
        slot_of = {bucket_id: slots[key] for bucket_id, key in place.items()}
        sizes = sorted((str(bucket.id), str(bucket.dtype), bucket.numel) for bucket in padded.values())
        layout = sorted((str(bucket_id), slot.name, slot.offset) for bucket_id, slot in slot_of.items())
        fingerprint = hashlib.sha256(repr((sizes, layout, outside, copies, offset)).encode()).hexdigest()[:16]
        return cls(tuple(slots.values()), slot_of, unit_of, padded, outside, copies, offset, others_nbytes, fingerprint)

    @property
    def nbytes(self) -> int:
        """Bytes of all copies, without `others`."""
        return self.copies * self.copy_nbytes

    def __str__(self):
        rows = [("slot", "bytes", "bucket", "unit")]
        rows += [(slot.name, f"{slot.nbytes:,}", str(slot.bucket), str(slot.unit)) for slot in self.slots]
        rows += [
            ("own", f"{self.buckets[id].nbytes:,}", str(id), str(self.unit_of.get(id, "none"))) for id in self.others
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            f"{slot:<{widths[0]}}  {size:>{widths[1]}}  {bucket:<{widths[2]}}  {unit}".rstrip()
            for slot, size, bucket, unit in rows
        ]
        total = f"{self.copies} copies of {self.copy_nbytes:,} bytes"
        return "\n".join([*lines, total + (f", and {self.others_nbytes:,} beside them" if self.others else "")])


class FixedPoolPlan(MaxPoolPlan):
    """A plan that pools only the largest class of equal units; the buckets of all other units become `others`."""

    @classmethod
    def build(
        cls,
        units: Mapping[Hashable, Sequence[Bucket]],
        *,
        others: Iterable[Bucket] = (),
        **options,
    ) -> "FixedPoolPlan":
        """As MaxPoolPlan.build. Units are equal if their buckets are, in number, dtypes and sizes."""
        others = _check_buckets(units, others)
        classes = defaultdict(list)
        for unit, buckets in units.items():
            classes[tuple(sorted((str(bucket.dtype), bucket.numel) for bucket in buckets))].append(unit)
        # A tie goes to the class with larger units, then to the first by its buckets, never by the order of the units.
        pooled = max(
            sorted(classes.items()),
            key=lambda item: (len(item[1]), sum(bucket.nbytes for bucket in units[item[1][0]])),
            default=((), []),
        )[1]
        left = [(bucket, unit) for unit, buckets in units.items() if unit not in pooled for bucket in buckets]
        pooled = {unit: units[unit] for unit in pooled}
        plan = super().build(pooled, others=[*others, *(bucket for bucket, _ in left)], **options)
        return replace(plan, unit_of={**plan.unit_of, **{bucket.id: unit for bucket, unit in left}})


class MaxPoolAllocator:
    """Leases the slots of a plan, each to one bucket at a time.

        pool = MaxPoolAllocator(plan, device="cuda")
        lease = pool.acquire("layer0")
        with lease.write(comm):
            ...                          # gather into lease.tensor
        with lease.read():
            ...                          # compute with it
        pool.release("layer0")           # issues no wait

    A tenant's writes are ordered after all work of the previous tenant, on whatever streams (`Slot`). A bucket keeps
    the copy that it got first, so its address is the same in every step. The first time, it gets the copy that was
    released longest ago: the tenants of a slot alternate between its copies even if the host never holds two at once.
    """

    takes = MaxPoolPlan

    def __init__(
        self,
        plan: MaxPoolPlan,
        memory: str = "torch",
        *,
        strict_assignments: str | bool = "warn",
        others: str = "persistent",
        mesh: MeshLike = None,
        device: torch.device | str | None = None,
        dev=None,
    ):
        """Collective if there is a mesh. Allocates all the memory at once.

        memory: "torch", or "symmetric" for the symmetric heap of `mesh`.
        strict_assignments: what happens if the copy that a bucket had before is not free. "warn" gives it another one,
            "error" raises. While a CUDA graph is captured both raise, since a graph records addresses. False: buckets
            get any free copy.
        others: where buckets of no unit live. "persistent": in the same allocation. "dynamic": allocated at each
            acquire; not on the symmetric heap, where ranks would have to agree on every allocation.
        mesh: the ranks that use the pool together, as in `tkernels.comm.as_context`; their plans are compared. None:
            this rank alone.
        device: for memory="torch"; by default that of mesh, else the CPU. dev: module with the streams; by default the
            device's.

        Raises MismatchError if the ranks' plans differ, ValueError for incompatible options, TypeError for what is no
        plan of this allocator's.
        """
        ctx = None if mesh is None else as_context(mesh, f"{type(self).__name__}: mesh")
        with contextlib.nullcontext() if ctx is None else ctx.group.checking():
            if not isinstance(plan, self.takes):
                raise TypeError(f"{type(self).__name__}: takes a {self.takes.__name__}, not {type(plan).__name__}")
            if memory not in ("torch", "symmetric") or others not in ("persistent", "dynamic"):
                raise ValueError(
                    f'memory={memory!r} must be "torch" or "symmetric", others={others!r} "persistent" or "dynamic"'
                )
            if strict_assignments not in ("warn", "error", False):
                raise ValueError(f'strict_assignments={strict_assignments!r} must be "warn", "error" or False')
            if memory == "symmetric" and (ctx is None or others == "dynamic" or device is not None):
                raise ValueError(
                    'memory="symmetric" needs a mesh, whose device it is on, and others="persistent": every allocation '
                    "on the symmetric heap is one that all ranks agree on"
                )
        if ctx is not None:
            told = {"sizes": plan.fingerprint, "memory": memory, "others": others}
            ctx.group.check_alike(type(self).__name__, "plans", told, _ALIKE)
        self.plan, self.strict_assignments, self.others = plan, strict_assignments, others
        nbytes = plan.nbytes + (plan.others_nbytes if others == "persistent" else 0)
        self._ctx, self._symmetric = ctx, memory == "symmetric"
        if self._symmetric:
            self.memory = ctx.empty(nbytes, dtype=torch.uint8)
        else:
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device or (ctx.device if ctx else "cpu"))
        self._dev = dev if dev is not None else torch.get_device_module(self.memory.device)
        copies = {
            spec: [
                self._slot(f"{spec.name} copy {copy}", copy * plan.copy_nbytes + spec.offset, spec.nbytes)
                for copy in range(plan.copies)
            ]
            for spec in plan.slots
        }
        self._copies = {bucket: copies[spec] for bucket, spec in plan.slot_of.items()}
        if others == "persistent":
            for bucket, offset in plan.others.items():
                slot = self._slot(f"memory of {bucket!r}", plan.nbytes + offset, plan.buckets[bucket].nbytes)
                self._copies[bucket] = [slot]
        self._tenants: dict[Slot, int | str] = {}
        self._held: dict[int | str, tuple[Lease, Slot]] = {}
        self._assigned: dict[int | str, Slot] = {}
        self._released: dict[Slot, int] = {}  # when it was last released, as a count of releases
        self._dynamic = Keepalive()
        self._order, self._count = 0, itertools.count(1)

    def __str__(self):
        return str(self.plan)

    @property
    def slots(self) -> list[Slot]:
        """All slots, to pass to `layers.captured`."""
        return list(dict.fromkeys(slot for copies in self._copies.values() for slot in copies))

    def acquire(self, bucket_id: int | str) -> Lease:
        """Lease a slot for the bucket, or return its open lease. `tensor` has the bucket's dtype and padded size.

        Raises LeaseError if all copies are held, naming the holders, or if strict_assignments is violated.
        """
        if bucket_id in self._held:
            return self._held[bucket_id][0]
        if self.memory is None:
            raise LeaseError(f"bucket {bucket_id!r} was acquired, but the pool has been closed; make a new one")
        bucket = self._bucket(bucket_id)
        if bucket_id in self.plan.others and self.others == "dynamic":
            self._dynamic.drain(keep=1)
            memory = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self.memory.device)
            slot = Slot(memory, dev=self._dev, name=f"memory of {bucket_id!r}")
        else:
            slot = self._choose(bucket_id)
        self._order = zlib.crc32(f"{bucket_id!r} {slot.name}".encode(), self._order)
        lease = slot.acquire()
        with lasting():
            lease.tensor = lease.tensor[: bucket.nbytes].view(bucket.dtype)
        self._tenants[slot] = bucket_id
        self._held[bucket_id] = lease, slot
        return lease

    def release(self, bucket_id: int | str):
        """End the bucket's tenancy. Call it once all work that uses the bucket has been launched. Issues no wait.

        Raises LeaseError for a bucket that is not held, unless strict_assignments is False.
        """
        if bucket_id not in self._held:
            self._bucket(bucket_id)
            if self.strict_assignments:
                raise LeaseError(f"bucket {bucket_id!r} was released, but is not held; held are {self._holders()}")
            return
        lease, slot = self._held[bucket_id]
        if slot in self._copies.get(bucket_id, ()):
            slot.release(lease)
            self._released[slot] = next(self._count)
        else:
            self._dynamic.defer(lease)
        del self._held[bucket_id], self._tenants[slot]

    def held(self, bucket_id: int | str) -> bool:
        return bucket_id in self._held

    def idle(self, bucket_id: int | str) -> bool:
        """Whether acquire would give the bucket its assigned copy, or any copy if none is assigned yet."""
        if bucket_id not in self._copies:
            return bucket_id not in self._held
        choice = self._assigned.get(bucket_id)
        return any(slot not in self._tenants for slot in ([choice] if choice else self._copies[bucket_id]))

    def check_order(self):
        """Collective. Raises MismatchError unless all ranks have acquired the same buckets in the same order."""
        if self._ctx is not None:
            self._ctx.group.check_alike(type(self).__name__, "calls of acquire", {"order": self._order}, _ALIKE)

    def close(self):
        """Collective on the symmetric heap. Free the memory. Raises LeaseError while a bucket is held."""
        if self._held:
            raise LeaseError(f"the pool was closed while it holds {self._holders()}; release them first")
        self._dynamic.drain()
        for slot in self.slots:
            slot.join()
        if self._symmetric and self.memory is not None:
            self._ctx.free(self.memory)
        self.memory = None

    def _slot(self, name: str, offset: int, nbytes: int) -> Slot:
        return Slot(self.memory[offset : offset + nbytes], dev=self._dev, name=name)

    def _bucket(self, bucket_id) -> Bucket:
        if bucket_id not in self.plan.buckets:
            raise ValueError(f"the plan has no bucket {bucket_id!r}; it has {', '.join(map(repr, self.plan.buckets))}")
        return self.plan.buckets[bucket_id]

    def _choose(self, bucket_id) -> Slot:
        copies = self._copies[bucket_id]
        idle = [slot for slot in copies if slot not in self._tenants]
        if not idle:
            holders = ", ".join(f"{self._tenants[slot]!r} ({slot.name})" for slot in copies)
            raise LeaseError(
                f"bucket {bucket_id!r} wants a slot of which all {len(copies)} copies are held, by {holders}; release "
                f"one first, gather less ahead, or plan with more copies"
            )
        oldest = min(idle, key=lambda slot: self._released.get(slot, 0))
        if not self.strict_assignments:
            return oldest
        before = self._assigned.setdefault(bucket_id, oldest)
        if before in idle:
            return before
        message = (
            f"bucket {bucket_id!r} had {before.name} before, which {self._tenants[before]!r} holds now; its memory "
            f"would move to {oldest.name}"
        )
        if self.strict_assignments == "error" or capturing(self._dev):
            raise LeaseError(message + "; acquire and release in the same order in every step")
        warnings.warn(message + ": a CUDA graph that was captured with it would use the old address", stacklevel=3)
        return oldest

    def _holders(self) -> str:
        return ", ".join(map(repr, self._held)) or "none"


class FixedPoolAllocator(MaxPoolAllocator):
    """A pool for models whose units are all equal except for a few, which get separate memory.

    The interface is the same; the plan is a FixedPoolPlan.
    """

    takes = FixedPoolPlan


def _check_buckets(units, others) -> list[Bucket]:
    """Raises TypeError or ValueError for what are no buckets. Returns `others`."""
    check_type("a pool's units", units, Mapping, "a dict of names to buckets")
    if None in units:
        raise ValueError("None is no name for a unit; buckets of no unit go into `others`")
    for buckets in units.values():
        check_type("a pool's buckets", buckets, Sequence, "a list of Bucket")
    check_type("a pool's others", others, Iterable, "a list of Bucket")
    others = list(others)
    for bucket in itertools.chain(*units.values(), others):
        check_type("a pool's bucket", bucket, Bucket, "a Bucket")
        check_type("the id of a bucket", bucket.id, Hashable, "hashable, as an int or a string")
        check_torch_dtype(f"the dtype of bucket {bucket.id!r}", bucket.dtype)
        whole(f"the numel of bucket {bucket.id!r}", bucket.numel)
    return others


def _twice(first: Bucket, first_unit, second: Bucket, second_unit) -> str:
    def where(unit):
        return "no unit" if unit is None else f"unit {unit}"

    return (
        f"bucket {first.id!r} is named twice: {first.numel} elements of {_short(first.dtype)} in {where(first_unit)}, "
        f"{second.numel} of {_short(second.dtype)} in {where(second_unit)}; ids are unique, and what units share "
        f"belongs to `others`, once"
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
