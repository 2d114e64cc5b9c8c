"""Max-pool plans and allocators; and that a slot's next writer waits for its last readers."""

import itertools
import random
import re
import warnings

import pytest
import torch
from streams import Race, Simulator, subsets
from transports import gpu_only, largest_free, message_on_every_rank

from tkernels.comm import LeaseError, MismatchError
from tkernels.layers.data_parallel.pools import (
    Bucket,
    FixedPoolAllocator,
    FixedPoolPlan,
    MaxPoolAllocator,
    MaxPoolPlan,
    storage_dtype,
)

MI = 1 << 20
LATE = 1_000_000  # cycles, about 0.5 ms: ten times what the host needs for a tenancy
BF16, U8, FP8 = torch.bfloat16, torch.uint8, torch.float8_e4m3fn


def units_of(**units):
    """Units as lists of (dtype, numel); bucket ids count through all of them."""
    ids = itertools.count()
    return {name: [Bucket(next(ids), dtype, numel) for dtype, numel in buckets] for name, buckets in units.items()}


def hybrid(scale=1):
    """A dense layer, a state-space layer and a mixture of experts: 152, 128 and 256 units of `scale` bytes."""
    sizes = {
        "dense": [(BF16, 8), (FP8, 96), (FP8, 64)],
        "mamba": [(BF16, 40), (BF16, 12), (FP8, 24)],
        "moe": [(BF16, 48), (FP8, 72), (FP8, 72), (FP8, 16)],
    }
    return units_of(**{name: [(dtype, n * scale) for dtype, n in buckets] for name, buckets in sizes.items()})


def random_units(rng):
    dtypes = [BF16, torch.float32, U8, FP8, torch.float8_e5m2]
    return units_of(
        **{
            f"unit{i}": [(rng.choice(dtypes), rng.choice([0, 1, 7, 64, rng.randrange(5000)])) for _ in range(n)]
            for i, n in enumerate(rng.choices(range(6), k=rng.randrange(1, 7)))
        }
    )


# The plan


def test_max_pool_plan_has_the_worked_example_to_the_byte():
    plan = MaxPoolPlan.build(hybrid(MI))
    sizes = [(slot.name, slot.nbytes) for slot in plan.slots]
    assert sizes == [
        ("bfloat16[0]", 96 * MI), ("bfloat16[1]", 24 * MI),
        ("uint8[0]", 96 * MI), ("uint8[1]", 72 * MI), ("uint8[2]", 16 * MI),
    ]  # fmt: skip
    assert [slot.offset for slot in plan.slots] == [0, 96 * MI, 120 * MI, 216 * MI, 288 * MI]
    assert [slot.unit for slot in plan.slots] == ["moe", "mamba", "dense", "moe", "moe"]
    assert plan.copy_nbytes == 304 * MI and plan.nbytes == 608 * MI
    names = [plan.slot_of[bucket].name for bucket in range(10)]
    assert names[:3] == ["bfloat16[0]", "uint8[0]", "uint8[1]"]
    assert names[3:6] == ["bfloat16[0]", "bfloat16[1]", "uint8[0]"]
    assert names[6:] == ["bfloat16[0]", "uint8[0]", "uint8[1]", "uint8[2]"]
    lines = str(plan).splitlines()
    assert lines[1].split() == ["bfloat16[0]", f"{96 * MI:,}", "6", "moe"]
    assert lines[-1] == f"2 copies of {304 * MI:,} bytes"


def test_max_pool_plan_fits_every_unit_and_no_smaller_one_would_do():
    rng = random.Random(0)
    for _ in range(2000):
        units = random_units(rng)
        pad, copies = rng.choice([1, 2, 3, 8]), rng.choice([1, 2, 3])
        plan = MaxPoolPlan.build(units, pad_multiple=pad, copies=copies)
        needed = {}
        for buckets in units.values():
            slots = [plan.slot_of[bucket.id] for bucket in buckets]
            assert len(set(slots)) == len(slots)
            stored = {}
            for bucket, slot in zip(buckets, slots, strict=True):
                nbytes = -(-bucket.numel // pad) * pad * bucket.dtype.itemsize
                assert plan.buckets[bucket.id].nbytes == nbytes <= slot.nbytes
                assert slot.dtype == storage_dtype(bucket.dtype)
                stored.setdefault(slot.dtype, []).append(nbytes)
            for dtype, sizes in stored.items():  # whoever fits this unit needs an i-th slot of its i-th size
                for index, nbytes in enumerate(sorted(sizes, reverse=True)):
                    needed[dtype, index] = max(needed.get((dtype, index), 0), nbytes)
        assert {(slot.dtype, slot.index): slot.nbytes for slot in plan.slots} == needed
        ends = [0, *(slot.offset + slot.nbytes for slot in plan.slots)]
        assert all(slot.offset % 256 == 0 and slot.offset >= end for slot, end in zip(plan.slots, ends, strict=False))
        assert plan.copy_nbytes >= ends[-1] and plan.nbytes == copies * plan.copy_nbytes

        shuffled = [(name, rng.sample(buckets, len(buckets))) for name, buckets in units.items()]
        rng.shuffle(shuffled)
        again = MaxPoolPlan.build(dict(shuffled), pad_multiple=pad, copies=copies)
        assert again.fingerprint == plan.fingerprint and again.slots == plan.slots and again.slot_of == plan.slot_of


def test_max_pool_plan_pads_sizes_before_it_compares_them():
    units = units_of(a=[(BF16, 9), (BF16, 8)], b=[(BF16, 10)])
    plan = MaxPoolPlan.build(units, pad_multiple=8)
    assert [slot.nbytes for slot in plan.slots] == [32, 16]
    assert plan.fingerprint != MaxPoolPlan.build(units, pad_multiple=2).fingerprint


def test_max_pool_plan_never_shares_a_slot_between_fp8_and_uint8_of_one_unit():
    plan = MaxPoolPlan.build(units_of(a=[(FP8, 64), (U8, 64), (torch.float8_e5m2, 32)]))
    assert sorted(slot.index for slot in plan.slot_of.values()) == [0, 1, 2]
    pool = MaxPoolAllocator(plan)
    tensors = [pool.acquire(bucket).tensor for bucket in range(3)]
    assert [tensor.dtype for tensor in tensors] == [FP8, U8, torch.float8_e5m2]
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.numel()) for tensor in tensors)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))


def test_max_pool_plan_shares_slots_of_merged_dtypes_by_their_bytes():
    plan = MaxPoolPlan.build(units_of(a=[(BF16, 50), (FP8, 30)], b=[(U8, 120)]), merge_dtypes=True)
    assert [(slot.name, slot.nbytes) for slot in plan.slots] == [("uint8[0]", 120), ("uint8[1]", 30)]
    assert MaxPoolAllocator(plan).acquire(0).tensor.dtype == BF16


def test_max_pool_plan_refuses_what_is_no_whole_number_and_no_bucket():
    units = units_of(a=[(BF16, 8)])
    for error, message, wrong, options in (
        (TypeError, "copies=2.5 must be a whole number", units, {"copies": 2.5}),
        (ValueError, "copies=0 must be at least 1", units, {"copies": 0}),
        (TypeError, "pad_multiple=1.5 must be a whole number", units, {"pad_multiple": 1.5}),
        (TypeError, "numel of bucket 'w'=2.5", {"a": [Bucket("w", BF16, 2.5)]}, {}),
        (ValueError, "numel of bucket 'w'=-1", {"a": [Bucket("w", BF16, -1)]}, {}),
        (TypeError, "dtype of bucket 'w'='bf16' must be a torch.dtype", {"a": [Bucket("w", "bf16", 2)]}, {}),
        (TypeError, "bucket=3 must be a Bucket", {"a": [3]}, {}),
        (TypeError, "units=.* must be a dict", [], {}),
    ):
        with pytest.raises(error, match=message):
            MaxPoolPlan.build(wrong, **options)


@pytest.mark.parametrize("plan", [MaxPoolPlan, FixedPoolPlan])
def test_max_pool_plan_and_fixed_pool_plan_refuse_what_are_no_buckets_alike(plan):
    bucket = Bucket("a", torch.float32, 8)
    for units, options, message in (
        ([bucket], {}, "a pool's units=.* must be a dict of names to buckets"),
        ({"u": bucket}, {}, "a pool's buckets=.* must be a list of Bucket"),
        ({"u": [("a", 8)]}, {}, "a pool's bucket=.* must be a Bucket"),
        ({"u": [bucket]}, {"others": bucket}, "a pool's others=.* must be a list of Bucket"),
        ({"u": [Bucket(["a"], torch.float32, 8)]}, {}, "the id of a bucket=.* must be hashable, as an int or a string"),
        ({"u": [Bucket("a", "float32", 8)]}, {}, "the dtype of bucket 'a'='float32' must be a torch.dtype"),
    ):
        with pytest.raises(TypeError, match=message):
            plan.build(units, **options)


def test_max_pool_plan_refuses_a_bucket_named_twice_with_both_places():
    for units, others in [
        ({"a": [Bucket("w", BF16, 8)], "b": [Bucket("w", torch.float32, 8)]}, ()),
        ({"a": [Bucket("w", BF16, 8), Bucket("w", torch.float32, 8)]}, ()),
        ({"a": [Bucket("w", BF16, 8)]}, [Bucket("w", torch.float32, 8)]),
    ]:
        with pytest.raises(ValueError, match="'w' is named twice: 8 elements of bfloat16 in unit a, 8 of float32 in"):
            MaxPoolPlan.build(units, others=others)
    with pytest.raises(ValueError, match="align that is a power of 2 from 16; .*align=48"):
        MaxPoolPlan.build({}, align=48)
    with pytest.raises(ValueError, match="None is no name for a unit"):
        MaxPoolPlan.build({None: []})


def test_fixed_pool_plan_takes_the_largest_class_of_equal_units():
    units = units_of(
        embed=[(BF16, 100)], a=[(BF16, 8), (U8, 4)], b=[(U8, 4), (BF16, 8)], c=[(BF16, 8), (U8, 4)], d=[(BF16, 9)]
    )
    plan = FixedPoolPlan.build(units)
    assert {plan.unit_of[bucket] for bucket in plan.slot_of} == {"a", "b", "c"}
    assert set(plan.others) == {0, 7} and [slot.nbytes for slot in plan.slots] == [16, 4]
    assert FixedPoolPlan.build(dict(reversed(units.items()))).fingerprint == plan.fingerprint
    # The hybrid of the worked example has no two equal units: one is pooled, two are left out.
    assert len({FixedPoolPlan.build(hybrid()).unit_of[b] for b in FixedPoolPlan.build(hybrid()).slot_of}) == 1
    pool = FixedPoolAllocator(plan)
    for bucket in (1, 2, 7):
        pool.acquire(bucket)
    pool.release(1)
    with pytest.raises(TypeError, match="takes a FixedPoolPlan"):
        FixedPoolAllocator(MaxPoolPlan.build(units))


# The allocator


def pool_of(units, **options):
    plan_options = {name: options.pop(name) for name in ("others", "copies") if name in options}
    policy = options.pop("policy", "persistent")
    return MaxPoolAllocator(MaxPoolPlan.build(units, **plan_options), others=policy, **options)


def take(pool, units, name, **options):
    return [pool.acquire(bucket.id, **options).tensor.data_ptr() for bucket in units[name]]


def give(pool, units, name):
    for bucket in units[name]:
        pool.release(bucket.id)


def test_max_pool_allocator_chooses_copies_for_each_slot_and_not_for_the_unit():
    units = hybrid()
    pool = pool_of(units)
    take(pool, units, "dense"), take(pool, units, "mamba")
    copies = {bucket: slot.name[-1] for bucket, (_, slot) in pool._held.items()}
    assert (copies[3], copies[4], copies[5]) == ("1", "0", "1")
    assert pool.acquire(3) is pool.acquire(3)  # what is held is held once


def test_max_pool_allocator_finds_every_bucket_where_it_was_in_fifty_random_steps():
    rng = random.Random(1)
    names = [f"unit{i}" for i in range(6)]
    kinds = [[(BF16, 8), (U8, 5)], [(BF16, 30), (BF16, 4)], [(BF16, 17), (U8, 9), (U8, 3)]]
    units = units_of(**{name: rng.choice(kinds) for name in names})
    pool = pool_of(units, strict_assignments="error")
    base, seen = pool.memory.data_ptr(), {}
    for _ in range(50):
        held = []
        for name in names + names[::-1]:  # forward, backward; each release comes early or late, never the same
            if name in held:
                continue
            addresses = take(pool, units, name)
            assert seen.setdefault(name, addresses) == addresses
            held.append(name)
            while len(held) > 1 and (len(held) == 2 or rng.random() < 0.5):
                give(pool, units, held.pop(0))
        for name in held:
            give(pool, units, name)
    assert all(base <= address < base + pool.memory.numel() for found in seen.values() for address in found)


def test_max_pool_allocator_warns_or_raises_where_a_copy_is_taken_and_moves_nothing_for_good():
    units = units_of(a=[(BF16, 8)], b=[(BF16, 8)], c=[(BF16, 8)])
    for strict in ("warn", "error", False):
        pool = pool_of(units, strict_assignments=strict)
        first = take(pool, units, "a")
        give(pool, units, "a")
        take(pool, units, "b"), give(pool, units, "b")
        take(pool, units, "c")  # takes the copy that was released first, which is a's
        assert pool.idle(0) == (strict is False)
        if strict == "error":
            with pytest.raises(LeaseError, match=r"bucket 0 had bfloat16\[0\] copy 0 before, which 2 holds now"):
                take(pool, units, "a")
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert take(pool, units, "a") != first
        assert [str(w.message).startswith("bucket 0 had bfloat16[0] copy 0") for w in caught] == [True] * (
            strict == "warn"
        )
        give(pool, units, "a"), give(pool, units, "c")
        if strict:
            assert take(pool, units, "a") == first


def test_max_pool_allocator_raises_at_a_miss_under_capture_though_it_would_only_warn(monkeypatch):
    units = units_of(a=[(BF16, 8)], b=[(BF16, 8)], c=[(BF16, 8)])
    pool = pool_of(units)
    take(pool, units, "a"), give(pool, units, "a"), take(pool, units, "b"), give(pool, units, "b")
    take(pool, units, "c")
    monkeypatch.setattr("tkernels.layers.data_parallel.pools.capturing", lambda dev: True)
    with pytest.raises(LeaseError, match="its memory would move to .* copy 1"):
        take(pool, units, "a")


def test_max_pool_allocator_refuses_the_third_tenant_and_tells_who_holds_the_slot():
    units = units_of(a=[(BF16, 8)], b=[(BF16, 8)], c=[(BF16, 8)])
    pool = pool_of(units)
    take(pool, units, "a"), take(pool, units, "b")
    message = (
        r"bucket 2 wants a slot .* all 2 copies are held, by 0 \(bfloat16\[0\] copy 0\), 1 \(bfloat16\[0\] copy 1\)"
    )
    with pytest.raises(LeaseError, match=message):
        take(pool, units, "c")
    pool = pool_of(units, copies=3)
    assert len({take(pool, units, name)[0] for name in "abc"}) == 3


def test_max_pool_allocator_refuses_releases_and_names_that_make_no_sense():
    units = units_of(a=[(BF16, 8)])
    pool = pool_of(units)
    with pytest.raises(LeaseError, match="bucket 0 was released, but is not held; held are none"):
        pool.release(0)
    pool_of(units, strict_assignments=False).release(0)
    for call in (pool.acquire, pool.release):
        with pytest.raises(ValueError, match="the plan has no bucket 9; it has 0"):
            call(9)
    pool.acquire(0)
    with pytest.raises(LeaseError, match="closed while it holds 0"):
        pool.close()
    pool.release(0)
    pool.close()
    pool.close()
    with pytest.raises(LeaseError, match="bucket 0 was acquired, but the pool has been closed; make a new one"):
        pool.acquire(0)
    for options, message in [
        ({"memory": "cuda"}, "memory='cuda' must be \"torch\""),
        ({"memory": "symmetric"}, "needs a mesh"),
        ({"strict_assignments": True}, "strict_assignments=True must be"),
        ({"policy": "later"}, "others='later'"),
    ]:
        with pytest.raises(ValueError, match=message):
            pool_of(units, **options)


def test_max_pool_allocator_takes_empty_buckets_and_units_like_others():
    units = units_of(a=[(BF16, 0), (U8, 0)], b=[], c=[(BF16, 0), (BF16, 6)])
    pool = pool_of(units, others=[Bucket("none", BF16, 0)])
    assert [pool.acquire(bucket).tensor.numel() for bucket in (0, 1, 2, 3, "none")] == [0, 0, 0, 6, 0]
    for bucket in (0, 1, 2, 3, "none"):
        pool.release(bucket)


def test_max_pool_allocator_gives_buckets_of_no_unit_memory_of_their_own_or_each_time():
    units = units_of(a=[(BF16, 8)], b=[(BF16, 8)])
    others = [Bucket("embedding", BF16, 100), Bucket("head", torch.float32, 3)]
    pool = pool_of(units, others=others)
    assert pool.memory.numel() == pool.plan.nbytes + pool.plan.others_nbytes == 2 * 256 + 256 + 256
    take(pool, units, "a"), take(pool, units, "b")
    address = pool.acquire("embedding").tensor.data_ptr()
    assert pool.acquire("head").tensor.shape == (3,)
    pool.release("embedding")
    assert pool.acquire("embedding").tensor.data_ptr() == address
    pool = pool_of(units, others=others, policy="dynamic")
    assert pool.memory.numel() == 512
    lease = pool.acquire("embedding")
    assert lease.tensor.shape == (100,) and pool.held("embedding") and not pool.idle("embedding")
    pool.release("embedding")
    assert lease.released and not pool.held("embedding") and pool.idle("embedding")
    for _ in range(3):
        pool.acquire("embedding")
        pool.release("embedding")
    assert len(pool._dynamic) == 2  # until their home stream is behind all uses
    pool.close()
    assert len(pool._dynamic) == 0


# Who waits for whom


def fills(sim, pool_form, num_writers, num_units=4, steps=2):
    """Writers fill one unit's slot after the other with its number, and a reader sums it; returns the sums."""
    writers = [sim.Stream(f"writer{i}") for i in range(num_writers)]
    reader = sim.Stream("reader")
    sums = []
    for step in range(steps):
        for unit in range(num_units):
            writer = writers[(step + unit) % num_writers]
            total = pool_form(unit, writer, reader, float(unit + 1))
            sums.append(total)
    return sums


def through_the_pool(sim):
    units = units_of(**{f"unit{i}": [(torch.float32, 256)] for i in range(4)})
    pool = MaxPoolAllocator(MaxPoolPlan.build(units), strict_assignments="error", dev=sim)

    def tenancy(unit, writer, reader, value):
        lease = pool.acquire(unit)
        with lease.write(writer), sim.stream(writer):
            lease.tensor.fill_(value)
        with lease.read(reader), sim.stream(reader):
            total = lease.tensor.sum()
        pool.release(unit)
        return total

    return tenancy


def reader_waits_for_itself(sim):
    """A limiter whose wait for the slot's last reader is issued on that reader's own stream, where it does nothing."""
    slots, read = [torch.empty(256), torch.empty(256)], [None, None]

    def tenancy(unit, writer, reader, value):
        copy = unit % 2
        if read[copy] is not None:
            reader.wait_event(read[copy])
        with sim.stream(writer):
            slots[copy].fill_(value)
        reader.wait_event(writer.record_event())
        with sim.stream(reader):
            total = slots[copy].sum()
        read[copy] = reader.record_event()
        return total

    return tenancy


@pytest.mark.parametrize("num_writers", [1, 2])
def test_max_pool_allocator_lets_the_next_writer_on_any_stream_wait_for_the_last_reader(num_writers):
    for starve in subsets([*(f"writer{i}" for i in range(num_writers)), "reader"]):
        sim = Simulator()
        with sim:
            sums = fills(sim, through_the_pool(sim), num_writers)
        sim.check()
        sim.run(starve)
        assert [total.item() / 256 for total in sums] == [1, 2, 3, 4] * 2


def test_max_pool_allocator_is_closed_behind_its_last_reader():
    sim, units = Simulator(), units_of(a=[(BF16, 256)])
    comm = sim.Stream("comm")
    with sim:
        pool = pool_of(units, dev=sim)
        with pool.acquire(0).write() as bucket:
            bucket.fill_(1)
        with pool.acquire(0).read(comm) as bucket, sim.stream(comm):
            read = bucket.sum()
        del bucket
        pool.release(0)
        memory = pool.memory
        pool.close()
        memory.zero_()
    sim.check()
    sim.run(starve=["comm"])
    assert read.item() == 256


@pytest.mark.parametrize("num_writers", [1, 2])
def test_max_pool_allocator_whose_limiter_waits_on_the_readers_stream_is_found_out(num_writers):
    sim = Simulator()
    with sim:
        sums = fills(sim, reader_waits_for_itself(sim), num_writers)
    with pytest.raises(Race):
        sim.check()
    assert {race.modes for race in sim.races} >= {"rw"}
    sim.run(starve=["reader"])
    assert [total.item() / 256 for total in sums] != [1, 2, 3, 4] * 2


def test_max_pool_allocator_with_two_copies_writes_the_next_unit_while_this_one_is_read():
    sim = Simulator()
    with sim:
        fills(sim, through_the_pool(sim), 1, steps=1)
    sim.run(starve=["reader"])
    assert sim.log == ["fill_", "fill_", "sum", "fill_", "sum", "fill_", "sum", "sum"]


# Several ranks


@pytest.mark.ranks(2, 4)
def test_max_pool_allocator_of_symmetric_memory_is_one_allocation_at_the_same_place_on_every_rank(ctx):
    units = hybrid(256)
    plan = MaxPoolPlan.build(units, others=[Bucket("embedding", BF16, 1000)], pad_multiple=ctx.size)
    allocations, empty, free = [], ctx.heap.empty, largest_free(ctx.heap)
    ctx.heap.empty = lambda *shape, **options: allocations.append(shape) or empty(*shape, **options)
    try:
        pool = MaxPoolAllocator(plan, "symmetric", mesh=ctx, strict_assignments="error")
    finally:
        del ctx.heap.empty
    assert allocations == [(plan.nbytes + plan.others_nbytes,)]
    for _ in range(2):
        take(pool, units, "dense"), take(pool, units, "mamba"), give(pool, units, "dense")
        take(pool, units, "moe"), give(pool, units, "mamba"), give(pool, units, "moe")
    offsets = [ctx.heap.offset(slot.tensor) for slot in pool.slots]
    assert len(set(map(tuple, ctx.group.gather(offsets)))) == 1
    pool.check_order()
    pool.close()
    pool.close()
    assert largest_free(ctx.heap) == free


@pytest.mark.ranks(2)
def test_max_pool_allocator_raises_what_is_wrong_on_one_rank_on_every_rank(ctx):
    plan = MaxPoolPlan.build(units_of(a=[(BF16, 8)]))
    for wrong in ({"memory": "disk"}, {"strict_assignments": "never"}, {"memory": "symmetric", "others": "dynamic"}):
        with pytest.raises(ValueError, match=r" \(on rank 1\)$") as error:
            MaxPoolAllocator(plan, mesh=ctx, **(wrong if ctx.rank == 1 else {}))
        message_on_every_rank(ctx, error.value)


@pytest.mark.ranks(2)
def test_fixed_pool_allocator_raises_another_plan_of_one_rank_on_every_rank(ctx):
    kind = MaxPoolPlan if ctx.rank == 1 else FixedPoolPlan
    with pytest.raises(TypeError, match=r"takes a FixedPoolPlan") as error:
        FixedPoolAllocator(kind.build(units_of(a=[(BF16, 8)])), mesh=ctx)
    message_on_every_rank(ctx, error.value)


@pytest.mark.ranks(2)
def test_max_pool_allocator_tells_ranks_whose_plans_or_orders_differ(ctx):
    units = units_of(a=[(BF16, 8 + ctx.rank)], b=[(BF16, 8)])
    with pytest.raises(MismatchError, match="the plans of rank 0 and rank 1 differ in sizes"):
        MaxPoolAllocator(MaxPoolPlan.build(units), "symmetric", mesh=ctx)
    units = units_of(a=[(BF16, 8)], b=[(BF16, 8)], c=[(BF16, 8)])
    with pytest.raises(MismatchError, match="differ in others .'persistent' and 'dynamic'"):
        others = "dynamic" if ctx.rank else "persistent"
        MaxPoolAllocator(MaxPoolPlan.build(units), others=others, mesh=ctx)
    pool = MaxPoolAllocator(MaxPoolPlan.build(units), mesh=ctx)
    pool.acquire(0), pool.acquire(1)
    pool.release(ctx.rank), pool.release(1 - ctx.rank)
    pool.acquire(2)
    with pytest.raises(MismatchError, match="of acquire of rank 0 and rank 1 differ in order"):  # the slots do
        pool.check_order()
    pool = MaxPoolAllocator(MaxPoolPlan.build(units), "symmetric", mesh=ctx)
    pool.acquire(0), pool.acquire(1)
    pool.check_order()
    pool.release(0), pool.release(1)
    pool.acquire(ctx.rank)
    with pytest.raises(MismatchError, match="of acquire of rank 0 and rank 1 differ in order"):
        pool.check_order()
    pool.release(ctx.rank)
    pool.close()


# On a GPU


def tenancies(pool, comm, waits, sleep, iterations):
    """Fill and sum slots in turns, with the reader late; how many sums came out wrong."""
    main, units = torch.cuda.current_stream(), list(pool.plan.buckets)
    sums = torch.zeros(iterations, device="cuda")
    torch.cuda.synchronize()
    for i in range(iterations):
        lease = pool.acquire(units[i % len(units)])
        if not waits:
            lease.gate.clear()
        with lease.write(main):
            lease.tensor.fill_(i % 251)
        with lease.read(comm), torch.cuda.stream(comm):
            torch.cuda._sleep(sleep)
            torch.sum(lease.tensor, dim=0, out=sums[i])
        pool.release(units[i % len(units)])
    torch.cuda.synchronize()
    wanted = torch.arange(iterations, device="cuda") % 251 * 4096
    return (sums != wanted).sum().item()


@gpu_only
@pytest.mark.ranks(1)
@pytest.mark.parametrize("iterations", [1000])
def test_max_pool_allocator_never_shows_a_late_reader_the_next_tenant(ctx, iterations):
    units = units_of(**{f"unit{i}": [(torch.float32, 4096)] for i in range(4)})
    comm = torch.cuda.Stream()
    for memory in ("torch", "symmetric"):
        pool = MaxPoolAllocator(MaxPoolPlan.build(units), memory, mesh=ctx, strict_assignments="error")
        assert tenancies(pool, comm, True, 0, 8) == 0
        assert tenancies(pool, comm, True, LATE, iterations) == 0
        # Without the gate the writer overtakes the reader: the lever works.
        assert tenancies(pool, comm, False, LATE, 100) > 50
        pool.close()


def test_max_pool_plan_leaves_nothing_out_of_its_messages():
    plan = MaxPoolPlan.build(units_of(a=[(BF16, 8)]), others=[Bucket("embedding", BF16, 100)])
    assert re.search(r"own +200 +embedding +none", str(plan)) and str(plan).endswith("and 256 beside them")
    plan = FixedPoolPlan.build(units_of(a=[(BF16, 8)], b=[(BF16, 8)], c=[(BF16, 9)]))
    assert re.search(r"own +18 +2 +c", str(plan))  # not pooled, but of a unit
