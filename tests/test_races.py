"""Wrong forms that the tests must catch on every run, beside the right forms, which pass under the same conditions.

Each control is a mistake that works by luck when ranks run in step: a wait left out, a signal sent before its data, an
inbox used again too early. Nothing is left to luck here: a rank that could come too late by a mistake waits until the
other one has gone ahead. They stay on the simulated runtime, where a wrong read is a wrong number and no more.
"""

import contextlib
import ctypes

import pytest
import torch
import triton
import triton.language as tl
from products import own_rows_of_sum, product_of_gathered, sum_of_products
from transports import LateRank, interleaved, poison_workspace, simulated_only

import tkernels
from tkernels.comm import collectives, device, interpreter
from tkernels.comm.device import (
    Net,
    copy,
    count,
    operation,
    put,
    put_packets,
    put_signal,
    signal,
    wait_packets,
    wait_signal,
)
from tkernels.comm.errors import WaitTimeoutError
from tkernels.gemm import Matrix
from tkernels.overlap import add_parts, store_part
from tkernels.testing.compare import integers, poison

pytestmark = simulated_only
OP = operation("test_races")
CHUNKS = collectives.CollectiveConfig(0, 0, 0)
TWO_SHOTS = collectives.CollectiveConfig(0, 0, 0, hop_bytes=-1)
TWO_TRIPS = collectives.CollectiveConfig(hop_bytes=-1, packet_hop_bytes=-1)  # between two ranks; of packets


@contextlib.contextmanager
def replaced(module, name, value):
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@interpreter.builtin
def no_wait(*arguments):
    return 1


def waits(form):
    """In the wrong form every wait of this process returns at once."""
    stack = contextlib.ExitStack()
    for name in ("spin", "spin_packets") if form == "wrong" else ():
        stack.enter_context(replaced(device, name, no_wait))
    return stack


def failures(ctx, check, *arguments):
    """Collective. How many ranks' check failed."""
    failed = False
    try:
        check(*arguments)
    except AssertionError:
        failed = True
    return sum(ctx.group.gather(failed))


def shards(ctx, seed):
    """x, w and bias of this rank; K of x and w agree, so that all operations take them."""
    seed = 100 * seed + 10 * ctx.rank
    make = [((40, 24), seed), ((20, 24), seed + 1), ((20,), 1000 * seed + 1)]
    return [integers(shape, torch.float32, s, device=ctx.device) for shape, s in make]


def all_gather(ctx, x, w, bias, config=collectives.DEFAULT):
    want = torch.cat(ctx.group.gather(x))
    return lambda: collectives.all_gather(ctx, x, config=config), want


def all_gather_in_chunks(ctx, x, w, bias):
    return all_gather(ctx, x, w, bias, CHUNKS)


def reduce_scatter(ctx, x, w, bias, config=collectives.DEFAULT):
    want = sum(ctx.group.gather(x)).chunk(2)[ctx.rank]
    return lambda: collectives.reduce_scatter(ctx, x, config=config), want


def reduce_scatter_in_chunks(ctx, x, w, bias):
    return reduce_scatter(ctx, x, w, bias, CHUNKS)


def all_reduce(ctx, x, w, bias, config=collectives.DEFAULT):
    want = sum(ctx.group.gather(x))
    return lambda: collectives.all_reduce(ctx, x, config=config), want


def all_reduce_in_chunks(ctx, x, w, bias):
    return all_reduce(ctx, x, w, bias, CHUNKS)


def all_reduce_in_two_shots(ctx, x, w, bias):
    return all_reduce(ctx, x, w, bias, TWO_SHOTS)


def all_reduce_in_two_trips(ctx, x, w, bias):
    return all_reduce(ctx, x, w, bias, TWO_TRIPS)


def all_gather_matmul(ctx, x, w, bias):
    want = product_of_gathered(ctx, x, w, bias).float()
    return lambda: tkernels.all_gather_matmul(x, w, bias, ctx=ctx), want


def matmul_reduce_scatter(ctx, x, w, bias):
    want = own_rows_of_sum(ctx, collectives.split_rows(len(x), ctx.size), x, w, bias).float()
    return lambda: tkernels.matmul_reduce_scatter(x, w, bias, ctx=ctx), want


def matmul_reduce_scatter_interleaved(ctx, x, w, bias):
    want = matmul_reduce_scatter(ctx, x, w, bias)[1]
    return lambda: interleaved(ctx, "matmul_reduce_scatter", x, w, bias), want


def matmul_all_reduce(ctx, x, w, bias):
    bias = ctx.group.gather(bias)[0]
    want = sum_of_products(ctx, x, w, bias).float()
    return lambda: tkernels.matmul_all_reduce(x, w, bias, ctx=ctx), want


def matmul_all_reduce_interleaved(ctx, x, w, bias):
    bias = ctx.group.gather(bias)[0]
    want = matmul_all_reduce(ctx, x, w, bias)[1]
    return lambda: interleaved(ctx, "matmul_all_reduce", x, w, bias), want


OPERATIONS = [
    all_gather,
    all_gather_in_chunks,
    reduce_scatter,
    reduce_scatter_in_chunks,
    all_reduce,
    all_reduce_in_chunks,
    all_reduce_in_two_shots,
    all_reduce_in_two_trips,
    all_gather_matmul,
    matmul_reduce_scatter,
    matmul_reduce_scatter_interleaved,
    matmul_all_reduce,
    matmul_all_reduce_interleaved,
]


def check_with_a_late_rank(ctx, make, form):
    """The check of the other test files: a poisoned workspace, a late rank, fresh data, and equality."""
    make(ctx, *shards(ctx, 1))[0]()  # the workspace has its size; making it larger would bring the ranks into step
    call, want = make(ctx, *shards(ctx, 2))
    poison_workspace(ctx)
    with waits(form), LateRank(ctx, form):
        got = call()
    assert torch.equal(got, want)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [operation.__name__ for operation in OPERATIONS])
def test_an_operation_without_its_waits_is_caught(ctx, make):
    for form in ("right", "wrong"):
        with tkernels.init(heap_bytes=8 << 20) as context:
            failed = failures(ctx, check_with_a_late_rank, context, globals()[make], form)
            assert failed == 0 if form == "right" else failed > 0, (form, failed)


def check_barrier(ctx, form):
    tkernels.barrier(ctx=ctx)
    late = LateRank(ctx, form)
    arrived = ctx.empty(1, dtype=torch.int64)
    arrived.zero_()
    ctx.group.barrier()
    with waits(form), late:
        if ctx.rank == 1:
            ctypes.c_int64.from_address(ctx.heap.segment.bases[0] + ctx.heap.offset(arrived)).value = 1
        tkernels.barrier(ctx=ctx)
        seen = arrived.item()
    assert seen == 1 or ctx.rank == 1


@pytest.mark.quick
@pytest.mark.ranks(2)
def test_a_barrier_without_its_waits_is_caught(ctx):
    for form in ("right", "wrong"):
        with tkernels.init(heap_bytes=8 << 20) as context:
            failed = failures(ctx, check_barrier, context, form)
            assert failed == (0 if form == "right" else 1), (form, failed)


@triton.jit
def exchange_kernel(
    x, out, inbox, ready, read, epoch, num_elements, table,
    RANK: tl.constexpr, L, BLOCK: tl.constexpr, SIGNAL_FIRST: tl.constexpr,
):  # fmt: skip
    net = Net(table, RANK)
    if SIGNAL_FIRST:
        signal(ready, epoch, 1 - RANK, net, L)
        if RANK == 1:
            wait_signal(read, epoch, 0, 0, net, L)
        put(inbox, x, num_elements, 1 - RANK, net, L, BLOCK)
    else:
        put_signal(inbox, x, num_elements, ready, epoch, 1 - RANK, net, L, BLOCK)
    wait_signal(ready, epoch, 1 - RANK, 0, net, L)
    copy(out, inbox, num_elements, BLOCK)
    signal(read, epoch, 1 - RANK, net, L)


def check_exchange(ctx, form):
    inbox, (ready, read) = ctx.empty(64), ctx.empty(2, dtype=torch.int64).zero_().split(1)
    seen, wanted = [], []
    for epoch in range(1, 13):
        poison(inbox)
        ctx.group.barrier()
        x, out = torch.full((64,), 10.0 * epoch + ctx.rank), torch.zeros(64)
        ctx.launch(
            exchange_kernel, 1, x, out, inbox, ready, read, epoch, 64, ctx.table,
            RANK=ctx.rank, L=ctx.link(OP), BLOCK=64, SIGNAL_FIRST=form == "wrong",
        )  # fmt: skip
        seen.append(out)
        wanted.append(torch.full((64,), 10.0 * epoch + 1 - ctx.rank))
        ctx.group.barrier()
    assert torch.equal(torch.stack(seen), torch.stack(wanted))


@pytest.mark.ranks(2)
def test_a_signal_before_its_data_is_caught(ctx):
    for form in ("right", "wrong"):
        with tkernels.init(heap_bytes=1 << 20) as context:
            failed = failures(ctx, check_exchange, context, form)
            assert failed == 0 if form == "right" else failed > 0, (form, failed)


@triton.jit
def rounds_kernel(
    x, out, inbox, ready, rounds, num_elements, table,
    RANK: tl.constexpr, L, BLOCK: tl.constexpr, INBOXES: tl.constexpr,
):  # fmt: skip
    net = Net(table, RANK)
    for round in range(rounds):
        epoch = round + 1
        mine = inbox + epoch % INBOXES * num_elements
        put_signal(mine, x + round * num_elements, num_elements, ready, epoch, 1 - RANK, net, L, BLOCK)
        wait_signal(ready, epoch, 1 - RANK, 0, net, L)
        if RANK == 1 and round + 1 < rounds:  # a slow reader
            wait_signal(ready, epoch + 1, 0, 0, net, L)
        copy(out + round * num_elements, mine, num_elements, BLOCK)


def check_rounds(ctx, inboxes):
    rounds, num_elements = 8, 16
    inbox, ready = ctx.empty(inboxes, num_elements), ctx.empty(1, dtype=torch.int64)
    poison(inbox)
    ready.zero_()
    ctx.group.barrier()
    x, want = (torch.arange(rounds * num_elements).float() + 1000 * rank for rank in (ctx.rank, 1 - ctx.rank))
    out = poison(torch.empty(rounds * num_elements))
    ctx.launch(
        rounds_kernel, 1, x, out, inbox, ready, rounds, num_elements, ctx.table,
        RANK=ctx.rank, L=ctx.link(OP), BLOCK=16, INBOXES=inboxes,
    )  # fmt: skip
    assert torch.equal(out, want)


@pytest.mark.ranks(2)
def test_an_inbox_that_is_used_again_at_once_is_caught_and_two_by_parity_are_enough(ctx):
    with tkernels.init(heap_bytes=1 << 20) as context:
        assert failures(ctx, check_rounds, context, 2) == 0
        assert failures(ctx, check_rounds, context, 1) > 0


def check_stale_epochs(ctx, make, form):
    """Two calls in a row; in the wrong form the second one expects the epoch of the first."""
    call, _ = make(ctx, *shards(ctx, 1))
    call()
    call, want = make(ctx, *shards(ctx, 2))
    poison_workspace(ctx)  # an epoch, too
    if form == "wrong":
        ctx.workspace().state[0] -= 2
    with LateRank(ctx, form):
        got = call()
    assert torch.equal(got, want)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", ["all_gather", "all_gather_in_chunks"])
def test_a_stale_epoch_is_caught(ctx, make):
    for form in ("right", "wrong"):
        with tkernels.init(heap_bytes=8 << 20) as context:
            failed = failures(ctx, check_stale_epochs, context, globals()[make], form)
            assert failed == 0 if form == "right" else failed > 0, (form, failed)


@triton.jit
def packets_kernel(
    x, out, packets, sent, read, parity_stride, epoch, last, table, rank, L, BLOCK: tl.constexpr, FORM: tl.constexpr
):  # fmt: skip
    """Two blocks of words to both ranks, and back the other rank's."""
    net = Net(table, rank)
    at = tl.arange(0, BLOCK)
    if FORM != "one inbox":
        packets += epoch % 2 * parity_stride
    for index in range(2):
        if FORM == "one wait":
            if rank * index == 1:
                wait_signal(read, epoch, 0, 0, net, L)
        mine = packets + rank * 2 * BLOCK + index * BLOCK
        put_packets(mine, tl.load(x + index * BLOCK + at), epoch, rank, net, L)
        put_packets(mine, tl.load(x + index * BLOCK + at), epoch, 1 - rank, net, L)
    signal(sent, epoch, 1 - rank, net, L)
    for index in range(2):
        waited = index
        if FORM == "one wait":
            waited = 0
        arrived = wait_packets(packets + waited * BLOCK, 2 * BLOCK, epoch, index, net, L, BLOCK)
        theirs = tl.load(packets + (1 - rank) * 2 * BLOCK + index * BLOCK + at).to(tl.int32)
        if FORM == "right":
            theirs = tl.where(rank == 0, arrived[1], arrived[0])
        if FORM != "one wait":
            if (rank == 1) & (epoch < last):  # a slow reader
                wait_signal(sent, epoch + 1, 0, 0, net, L)
                if FORM == "one inbox":
                    theirs = tl.load(packets + index * BLOCK + at).to(tl.int32)
        tl.store(out + index * BLOCK + at, theirs)
    signal(read, epoch, 1 - rank, net, L)


def check_packets(ctx, form, kernel, dtype, words, room, turns, *arguments):
    """Words go to the other rank in each of `turns`, by packets that a kernel puts into `room` of them."""
    packets, (sent, read) = ctx.empty(room, dtype=dtype), ctx.empty(2, dtype=torch.int64).zero_().split(1)
    packets.zero_()
    ctx.group.barrier()
    seen, wanted = [], []
    for turn in turns:
        value = lambda rank, turn=turn: (torch.arange(words) * 1000 + 10 * turn + rank - 5).int()  # noqa: E731
        out = torch.zeros(words, dtype=torch.int32)
        try:
            ctx.launch(
                kernel, 1, value(ctx.rank), out, packets, sent, read, *arguments, turn, turns[-1], ctx.table,
                ctx.rank, L=ctx.link(OP), BLOCK=16, FORM=form,
            )  # fmt: skip
        except WaitTimeoutError as error:  # a packet that another one, or zeros, replaced never comes
            raise AssertionError(f"turn {turn}") from error
        seen.append(out)
        wanted.append(value(1 - ctx.rank))
    assert torch.equal(torch.stack(seen), torch.stack(wanted))


def wrong_packets_are_caught(ctx, forms, *exchange):
    for form in forms:
        with tkernels.init(heap_bytes=1 << 20, timeout_s=60.0 if form == "right" else 1.0) as context:
            failed = failures(ctx, check_packets, context, form, *exchange)
            assert failed == 0 if form == "right" else failed > 0, (form, failed)


@pytest.mark.ranks(2)
def test_packets_that_are_not_waited_for_one_by_one_and_a_single_inbox_for_them_are_caught(ctx):
    words = 2 * 16
    exchange = packets_kernel, torch.int64, words, 2 * 2 * words, range(1, 11), 2 * words
    wrong_packets_are_caught(ctx, ("right", "one wait", "one inbox"), *exchange)


@triton.jit
def lamport_kernel(
    x, out, packets, sent, read, turn, last, table, rank, L, BLOCK: tl.constexpr, FORM: tl.constexpr
):  # fmt: skip
    """A block of words to both ranks, and back the other rank's, by packets that are there once they are not zero."""
    net = Net(table, rank)
    at = tl.arange(0, BLOCK)
    INBOXES: tl.constexpr = 2 if FORM == "two inboxes" else 3
    inbox = packets + turn % INBOXES * 2 * BLOCK
    if FORM == "never set to zero":
        if (rank == 1) & (turn > INBOXES):
            wait_signal(read, turn, 0, 0, net, L)
    for step in range(2):
        put_packets(inbox + rank * BLOCK, tl.load(x + at), 0, (rank + step) % 2, net, L)
    signal(sent, turn, 1 - rank, net, L)
    if FORM != "never set to zero":
        left = packets + (turn + INBOXES - 1) % INBOXES * 2 * BLOCK
        if (rank == 1) & (turn < last):  # it takes its time
            wait_signal(sent, turn + 1, 0, 0, net, L)
        for part in range(2):
            tl.store(left + part * BLOCK + at, tl.zeros((BLOCK,), tl.int32))
    arrived = wait_packets(inbox, BLOCK, 0, 0, net, L, BLOCK)
    tl.store(out + at, tl.where(rank == 0, arrived[1], arrived[0]))
    signal(read, turn, 1 - rank, net, L)


@pytest.mark.ranks(2)
def test_packets_without_an_epoch_that_are_not_set_to_zero_in_time_are_caught(ctx):
    exchange = lamport_kernel, torch.int32, 16, 3 * 2 * 16, range(1, 11)
    wrong_packets_are_caught(ctx, ("right", "never set to zero", "two inboxes"), *exchange)


@triton.jit
def parts_kernel(
    x, out, sums, counter, added, table, rank, L, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Two parts of a tile, a program each; the second one adds the first one's sums to its own."""
    value = tl.load(x + tl.program_id(0)) + tl.zeros((ROWS, COLUMNS), tl.float32)
    if tl.program_id(0) == 0:
        if FORM == "count first":
            count(counter, L, "gpu")
        if FORM != "right":  # the first part takes longer
            wait_signal(added, 1, rank, 0, Net(table, rank), L)
        store_part(value, Matrix(sums, COLUMNS, 1, ROWS, COLUMNS), 0, 0, ROWS, COLUMNS)
        if FORM != "count first":
            count(counter, L, "gpu")
    else:
        if FORM != "no wait":
            wait_signal(counter, 1, rank, 0, Net(table, rank), L)
        value = add_parts(value, Matrix(sums, COLUMNS, 1, ROWS, COLUMNS), 0, 0, 2, ROWS, COLUMNS)
        store_part(value, Matrix(out, COLUMNS, 1, ROWS, COLUMNS), 0, 0, ROWS, COLUMNS)
        count(added, L, "gpu")


def check_parts(ctx, form):
    seen, wanted = [], []
    for number in range(6):
        sums, out = poison(torch.empty(4, 8)), poison(torch.empty(4, 8))
        ctx.launch(
            parts_kernel, 2, torch.tensor([1.0, 10.0 * number]), out, sums, *torch.zeros(2, 1, dtype=torch.int64),
            ctx.table, ctx.rank, ctx.link(OP), ROWS=4, COLUMNS=8, FORM=form,
        )  # fmt: skip
        seen.append(out)
        wanted.append(torch.full((4, 8), 10.0 * number + 1))
    assert torch.equal(torch.stack(seen), torch.stack(wanted))


@pytest.mark.ranks(2)
def test_parts_of_a_tile_that_are_added_too_early_are_caught(ctx):
    for form in ("right", "no wait", "count first"):
        with tkernels.init(heap_bytes=1 << 20) as context:
            failed = failures(ctx, check_parts, context, form)
            assert failed == 0 if form == "right" else failed > 0, (form, failed)
