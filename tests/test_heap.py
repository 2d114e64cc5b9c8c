"""The symmetric heap: where tensors lie, what is refused, and that all ranks agree."""

import random

import numpy
import pytest
import torch
from transports import message_on_every_rank

import tkernels
from tkernels.comm import HeapExhaustedError, MismatchError, SymmetricHeap
from tkernels.comm.allocator import FirstFit
from tkernels.comm.group import Group
from tkernels.comm.runtime import Segment


def local_segment(group, num_bytes):
    """Memory of one rank, without a runtime."""
    local = torch.zeros(num_bytes, dtype=torch.uint8)
    return Segment(local, [local.data_ptr()], [0], [0])


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
    assert heap.offset(heap.empty(torch.tensor(1024))) == 0 and heap._blocks.largest == 0


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
    blocks, taken, draw = FirstFit(10_000), {}, random.Random(1)
    for _ in range(2000):
        if taken and draw.random() < 0.5:
            offset = draw.choice(list(taken))
            blocks.give_back(offset)
            del taken[offset]
        else:
            size = draw.randint(1, 900)
            wanted, offset = blocks.find(size), blocks.take(size)
            assert offset == wanted
            if offset is None:
                assert blocks.largest < size
                continue
            assert all(offset + size <= other or other + taken[other] <= offset for other in taken)
            assert offset + size <= 10_000
            taken[offset] = size
    for offset in taken:
        blocks.give_back(offset)
    assert blocks.largest == 10_000
    with pytest.raises(KeyError):
        blocks.give_back(0)


def test_new_memory_is_what_nobody_ever_had_and_is_given_back_as_any():
    for seed in range(20):
        blocks, had, taken, draw = FirstFit(10_000), set(), {}, random.Random(seed)
        for _ in range(100):
            size, new = draw.randint(1, 300), draw.random() < 0.4
            offset = blocks.take_new(size) if new else blocks.take(size)
            if offset is None:
                assert new and max(had) + size >= 10_000 or blocks.largest < size
            else:
                mine = set(range(offset, offset + size))
                assert offset + size <= 10_000 and not mine & (had if new else set().union(*taken.values()))
                had |= mine
                taken[offset] = mine
            if taken and draw.random() < 0.5:
                offset = draw.choice(list(taken))
                blocks.give_back(offset)
                del taken[offset]
        for offset in taken:
            blocks.give_back(offset)
        assert blocks.largest == 10_000


@pytest.mark.quick
@pytest.mark.ranks(2)
def test_ranks_that_ask_for_different_sizes_are_all_refused_with_one_message(ctx):
    free = ctx.heap._blocks.largest
    with pytest.raises(MismatchError) as e:
        ctx.empty(10 + ctx.rank)
    message = message_on_every_rank(ctx, e.value)
    assert "rank 0: (40, " in message and "rank 1: (44, " in message and "the same sizes in the same order" in message
    with pytest.raises(MismatchError, match="rank 0: .40, .*, rank 1: TypeError, .*size=2.5 must be a whole number"):
        ctx.empty(10 if ctx.rank == 0 else 2.5)
    assert ctx.heap._blocks.largest == free  # nothing is lost by it

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
    with pytest.raises(MismatchError, match=r"in \(bytes, offset\): rank 0: \(40, \d+\), rank 1: \(40, \d+\)"):
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
        with pytest.raises(HeapExhaustedError, match="largest free block"):
            tkernels.all_gather(torch.zeros(1 << 20, device=ctx.device), ctx=context)
        kept = context.empty(1000)
        kept.fill_(7.0)
        for round in range(3):
            mine = torch.full((64,), 10.0 * round + ctx.rank, device=ctx.device)
            gathered = tkernels.all_gather(mine, ctx=context)
            assert gathered.view(2, 64)[:, 0].tolist() == [10.0 * round, 10.0 * round + 1]
        assert kept.eq(7.0).all()
