"""The symmetric heap: where tensors lie, what is refused, and that all ranks agree."""

import concurrent.futures
import gc
import random

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transports import largest_free, message_on_every_rank, simulated_only

import tkernels
from tkernels.comm import HeapExhaustedError, MismatchError, SymmetricHeap, runtime, simulated_runtime
from tkernels.comm.allocator import Space, common, first_fit
from tkernels.comm.group import Group
from tkernels.comm.runtime import Segment


def local_segment(group, num_bytes):
    """Memory of one rank, without a runtime."""
    local = torch.zeros(num_bytes, dtype=torch.uint8)
    return Segment(local, [local.data_ptr()], [0])


@pytest.fixture
def heap():
    return SymmetricHeap(Group(), 4096, local_segment)


@pytest.mark.quick
def test_tensors_are_aligned_contiguous_and_apart(heap):
    tensors = [
        heap.empty(3, 5, dtype=torch.bfloat16),
        heap.empty(1),
        heap.empty((257,), dtype=torch.uint8),
        heap.empty(0, 4),
    ]
    assert [tuple(t.shape) for t in tensors] == [(3, 5), (1,), (257,), (0, 4)]
    assert [t.dtype for t in tensors] == [torch.bfloat16, torch.float32, torch.uint8, torch.float32]
    assert all(t.is_contiguous() for t in tensors)
    assert [heap.offset(t) for t in tensors[:3]] == [0, 256, 512]
    heap.free(tensors[3])
    assert heap.offset(heap.empty(1)) == 1024  # the empty tensor takes no place


def test_free_memory_is_taken_again_lowest_first_and_merges_with_its_neighbours(heap):
    a, b, c, d = (heap.empty(1024, dtype=torch.uint8) for _ in range(4))
    heap.free(c)
    heap.free(a)
    again = heap.empty(512, dtype=torch.uint8)
    assert heap.offset(again) == 0
    heap.free(again)
    heap.free(b)  # joins what lies before it and behind it
    assert heap.offset(heap.empty(3072, dtype=torch.uint8)) == 0
    heap.free(d)
    assert heap.offset(heap.empty(1024, dtype=torch.uint8)) == 3072


def test_exhaustion_says_what_was_asked_free_and_total(heap):
    first = heap.empty(1024, dtype=torch.uint8)
    second = heap.empty(1024, dtype=torch.uint8)
    heap.free(first)
    with pytest.raises(HeapExhaustedError, match="asked for 2052 bytes, .* has 2048 of 4096 bytes; .*heap_bytes") as e:
        heap.empty(513)  # 3072 bytes are free, but no block of them is large enough
    assert (e.value.asked, e.value.free, e.value.total) == (2052, 2048, 4096)
    heap.free(second)
    assert heap.empty(4096, dtype=torch.uint8).numel() == 4096


def test_sizes_are_integers_of_any_kind_but_not_negative(heap):
    assert heap.empty(numpy.int64(3)).shape == heap.empty(torch.Size([3])).shape == (3,)
    for wrong in ((-1000,), (-2, -3)):
        with pytest.raises(ValueError, match=f"size={wrong[0]} must be at least 0"):
            heap.empty(*wrong)
    assert heap.offset(heap.empty(1)) == 512


def test_empty_leaves_the_heap_whole_where_it_refuses(heap):
    for wrong, dtype, said in (
        ((2.5,), torch.float32, "size=2.5 must be a whole number"),
        (([4, "a"],), torch.float32, "size='a' must be a whole number"),
        ((torch.ones(2),), torch.float32, "size=.* must be a whole number"),
        ((None,), torch.float32, "size=None must be a whole number"),
        ((4,), "float32", "dtype='float32' must be a torch.dtype"),
    ):
        with pytest.raises(TypeError, match=f"^symmetric allocation: {said}"):
            heap.empty(*wrong, dtype=dtype)
    with pytest.raises(ValueError, match=f"size=.* must be at most {2**63 - 1}"):
        heap.empty(0, 10**30)
    with pytest.raises(TypeError, match="^free: tensor=None must be a tensor that empty"):
        heap.free(None)
    assert heap.offset(heap.empty(torch.tensor(1024))) == 0 and not heap.segment.space.free


def test_only_a_tensor_of_empty_can_be_freed_and_only_once(heap):
    tensor = heap.empty(300)
    for other in (torch.empty(300), tensor[1:], tensor[:100]):
        with pytest.raises(ValueError, match="no allocation of this heap"):
            heap.free(other)
    heap.free(tensor)
    with pytest.raises(ValueError, match="no allocation of this heap"):
        heap.free(tensor)


def test_offset_is_none_outside_the_heap(heap):
    tensor = heap.empty(300)
    assert heap.offset(tensor[3:]) == 12
    assert heap.offset(torch.empty(3)) is None


def test_the_size_of_a_heap_is_rounded_up_to_whole_blocks():
    heap = SymmetricHeap(Group(), 257, local_segment)
    assert heap.num_bytes == 512
    heap.empty(128)
    with pytest.raises(HeapExhaustedError):
        heap.empty(1)


def test_memory_is_poisoned_where_the_environment_asks_for_it(heap, monkeypatch):
    assert heap.empty(8).eq(0).all()
    monkeypatch.setenv("TKERNELS_POISON", "1")
    assert heap.empty(8).isnan().all()
    assert heap.empty(8, dtype=torch.bfloat16).isnan().all()
    assert heap.empty(8, dtype=torch.int64).eq(-1).all()
    monkeypatch.setenv("TKERNELS_POISON", "")
    heap.empty(8)
    monkeypatch.setenv("TKERNELS_POISON", "please")
    with pytest.raises(ValueError, match="TKERNELS_POISON='please' is neither on .* nor off"):
        heap.empty(8)


def test_any_order_of_allocations_neither_overlaps_nor_loses_memory():
    spaces, taken, draw = (Space(10_000), Space(10_000)), ({}, {}), random.Random(1)
    for _ in range(2000):
        mine = draw.choice((0, 1))  # what the two ranks have taken differs
        if taken[mine] and draw.random() < 0.6:
            offset = draw.choice(list(taken[mine]))
            spaces[mine].give_back(offset)
            del taken[mine][offset]
            continue
        size, both = draw.randint(1, 900), draw.random() < 0.3
        ranges = common(spaces[0].free, spaces[1].free) if both else spaces[mine].free
        offset = first_fit(ranges, size)
        if offset is None:
            assert all(size > free for _, free in ranges)
            continue
        for rank in (0, 1) if both else (mine,):
            assert all(offset + size <= other or other + taken[rank][other] <= offset for other in taken[rank])
            assert offset + size <= 10_000 and spaces[rank].take(offset, size) and not spaces[rank].take(offset, size)
            taken[rank][offset] = size
    for space, offsets in zip(spaces, taken, strict=True):
        assert sum(size for _, size in space.free) == 10_000 - sum(offsets.values())
        for offset in offsets:
            space.give_back(offset)
        assert space.free == [(0, 10_000)]
        with pytest.raises(KeyError):
            space.give_back(0)


def test_untouched_memory_is_zero_and_empty_takes_what_is_left_of_it(heap):
    heap.segment.local.fill_(1)
    heap.segment.fresh = False
    heap.reserve(2048)
    assert largest_free(heap) == 4096
    first = heap.untouched(300)
    assert first.eq(0).all() and heap.offset(first) == 0 and heap.untouched(1600) is None
    second = heap.untouched(1024)
    assert second.eq(0).all() and heap.offset(second) == 512
    heap.empty(2048, dtype=torch.uint8)
    assert heap.offset(heap.empty(512, dtype=torch.uint8)) == 1536 and heap.untouched(1) is None
    heap.free(first)  # as any
    assert largest_free(heap) == 512
    assert heap.offset(heap.empty(300, dtype=torch.uint8)) == 0
    with pytest.raises(HeapExhaustedError, match="largest free block has 0 of 4096"):
        heap.empty(1)


@pytest.mark.quick
@pytest.mark.ranks(2)
def test_ranks_that_ask_for_different_sizes_are_all_refused_with_one_message(ctx):
    gc.collect()  # contexts that earlier tests have dropped
    ctx.empty(0)  # gives back what was freed before
    free = ctx.heap.segment.space.free
    with pytest.raises(MismatchError) as e:
        ctx.empty(10 + ctx.rank)
    message = message_on_every_rank(ctx, e.value)
    assert "rank 0: 40, rank 1: 44; " in message and "the same sizes in the same order" in message
    with pytest.raises(TypeError, match=r"size=2.5 must be a whole number \(on rank 1\)"):
        ctx.empty(10 if ctx.rank == 0 else 2.5)
    assert ctx.heap.segment.space.free == free  # nothing is lost by it

    mine = ctx.empty(10)
    mine.fill_(ctx.rank)
    ctx.barrier()
    assert mine.eq(ctx.rank).all()
    ctx.free(mine)


@pytest.mark.ranks(2)
def test_ranks_that_free_in_another_order_are_refused_at_the_next_allocation(ctx):
    context = tkernels.init(heap_bytes=1 << 20)
    one, two = context.empty(10), context.empty(1000)
    context.free(one if ctx.rank == 0 else two)
    with pytest.raises(MismatchError, match=r"tensors at different offsets: rank 0: [\d, ]+, rank 1: [\d, ]+; all"):
        context.empty(10)
    context.finalize()


@pytest.mark.ranks(2)
def test_exhaustion_and_different_heap_sizes_are_raised_on_every_rank(ctx):
    with pytest.raises(MismatchError) as different:
        tkernels.init(heap_bytes=(1 + ctx.rank) << 20)
    assert "heap_bytes by rank: 1048576, 2097152" in message_on_every_rank(ctx, different.value)

    with tkernels.init(heap_bytes=1 << 20) as context:
        with pytest.raises(HeapExhaustedError) as exhausted:
            context.empty(1 << 20)
        assert "asked for 4194304 bytes" in message_on_every_rank(ctx, exhausted.value)
        assert exhausted.value.total == 1 << 20
        context.free(context.empty(exhausted.value.free, dtype=torch.uint8))  # what it said was free, was


@pytest.mark.ranks(2)
def test_an_operation_that_does_not_fit_leaves_the_context_and_its_tensors_intact(ctx):
    with tkernels.init(heap_bytes=1 << 20) as context:
        tkernels.barrier(ctx=context)
        kept = context.empty(600 << 8)
        kept.fill_(7.0)
        with pytest.raises(HeapExhaustedError, match="largest free block"):
            tkernels.all_gather(torch.zeros(25_000, device=ctx.device), ctx=context)
        for round in range(3):
            mine = torch.full((64,), 10.0 * round + ctx.rank, device=ctx.device)
            gathered = tkernels.all_gather(mine, ctx=context)
            assert gathered.view(2, 64)[:, 0].tolist() == [10.0 * round, 10.0 * round + 1]
        assert kept.eq(7.0).all()


@pytest.mark.ranks(4)
@simulated_only
def test_contexts_of_every_dimension_share_a_pool_that_has_no_room_for_all_their_limits(ctx, monkeypatch):
    pool, held = pooled(ctx, monkeypatch, num_bytes=96 << 20), set()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    pp = dist.new_group([0, 3] if ctx.rank in (0, 3) else [1, 2], use_local_synchronization=True)
    with tkernels.init(heap_bytes=48 << 20) as default:
        tp, dp = (tkernels.init(mesh[name], heap_bytes=48 << 20, default=False) for name in ("tp", "dp"))
        third = tkernels.init(pp, heap_bytes=48 << 20, default=False)
        contexts = (default, tp, dp, third)
        if ctx.rank >= 2:  # from here on, what is free differs from rank to rank
            tp.empty(3 << 20, dtype=torch.uint8)
        for rows in (4, 300, 20_000):  # workspaces grow
            for context in contexts:
                x = torch.full((rows, 8), float(context.rank))
                assert tkernels.all_gather(x, ctx=context)[::rows, 0].tolist() == list(range(context.size))
                if rows < 1000:  # 20,000 take 30 s of the interpreter's time
                    total = tkernels.matmul_all_reduce(x, torch.ones(8, 8), ctx=context, path="fused")
                    assert total.eq(8.0 * sum(range(context.size))).all()
        for context in contexts:
            mine = {(offset, offset + size) for offset, size in context.heap._held.items()}
            assert not any(a < d and c < b for a, b in mine for c, d in held)
            held |= mine
        big = tp.empty(36 << 20, dtype=torch.uint8)
        assert largest_free(dp.heap) < 48 << 20
        with pytest.raises(HeapExhaustedError) as error:
            dp.empty(36 << 20, dtype=torch.uint8)
        message = message_on_every_rank(dp, error.value)
        assert f"of the {96 << 20} bytes on rank " in message and "set TKERNELS_POOL_BYTES to a larger" in message
        assert all(" holds " in each for each in message.split("; ")[1].split(", ")[1:]) and message.count("holds") == 4
        tp.free(big)
        tp.empty(1)  # its ranks have all freed it now
        dp.empty(36 << 20, dtype=torch.uint8)
        for context in (third, dp, tp):
            context.finalize()
    assert pool.free == [(0, 96 << 20)]


@pytest.mark.ranks(2)
@simulated_only
def test_a_pool_that_is_smaller_than_the_limit_of_a_heap_is_named(ctx, monkeypatch):
    pooled(ctx, monkeypatch, num_bytes=8 << 20)
    with tkernels.init(heap_bytes=32 << 20, default=False) as context:
        with pytest.raises(HeapExhaustedError, match=rf"of the {8 << 20} bytes on rank \d, .* TKERNELS_POOL_BYTES"):
            context.empty(16 << 20, dtype=torch.uint8)
    with tkernels.init(heap_bytes=1 << 20, default=False) as context:
        kept = context.empty(300_000, dtype=torch.uint8)
        with pytest.raises(HeapExhaustedError) as error:
            context.empty(1 << 20, dtype=torch.uint8)
        assert f"its tensors and workspaces have {error.value.held[0]}" in str(error.value)
        assert any(size in range(kept.nbytes, kept.nbytes + 256) for size in error.value.held)


@pytest.mark.ranks(2)
@simulated_only
def test_threads_that_allocate_of_one_pool_get_memory_of_their_own(ctx, monkeypatch):
    pool = pooled(ctx, monkeypatch, num_bytes=8 << 20)
    contexts = [tkernels.init(dist.new_group([0, 1]), heap_bytes=4 << 20, default=False) for _ in range(2)]

    def fill(context):
        tensors = [context.empty(1000) for _ in range(30)]
        for tensor in tensors:
            tensor.fill_(float(contexts.index(context)))
        return tensors

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        order = contexts if ctx.rank == 0 else contexts[::-1]
        filled = dict(zip(order, threads.map(fill, order), strict=True))
    for value, context in enumerate(contexts):
        assert all(tensor.eq(value).all() for tensor in filled[context])
    for context in contexts:
        context.finalize()
    assert pool.free == [(0, 8 << 20)]


def pooled(ctx, monkeypatch, num_bytes: int) -> Space:
    """Collective. Let contexts share a pool, as on GPUs. Returns what is free of this rank's."""
    whole, space = simulated_runtime.open_segment(ctx.group, num_bytes), Space(num_bytes)

    def open_segment(group, _):
        bases = [whole.bases[rank] for rank in group.global_ranks]
        return Segment(whole.local, bases, list(range(group.size)), space=space)

    monkeypatch.setattr(runtime, "open_segment", open_segment)
    return space
