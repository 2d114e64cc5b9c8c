"""The device verbs, in small kernels over every transport: exact data, odd sizes and places, many rounds."""

import pytest
import round_trips
import torch
import triton
import triton.language as tl
from execution import execution
from transports import every_transport, late, over, simulated_only

import tkernels
from tkernels.comm import TkernelsError, device
from tkernels.comm.device import (
    ADD,
    Net,
    begin_epoch,
    completes,
    copy,
    count,
    count_up_to,
    end_epoch,
    fence,
    get,
    operation,
    operation_name,
    peer,
    put,
    put_signal,
    put_tile,
    quiet,
    signal,
    tell,
    wait_signal,
)
from tkernels.testing.compare import poison

OP = operation("test_device")
GUARD = 9  # elements around what is written, which must stay as they were

# (elements, offset of the source, offset of the destination, what the kernel is told of their alignment in bytes)
PIECES = [
    (1, 0, 0, 1),
    (3, 1, 2, 1),
    (127, 5, 3, 1),
    (128, 0, 0, 16),
    (1000, 1, 0, 1),
    (0, 0, 0, 1),
    (2048, 16, 32, 16),
]
SIZES = ["stride", "epoch", "num_elements"]  # one compilation serves all of them
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]


def test_operations_have_the_same_numbers_on_every_rank_whatever_it_has_imported(monkeypatch):
    number = operation("test_device").value
    assert number == OP.value and operation_name(number) == "test_device" and 0 <= number < 2**31
    assert operation_name(12345) == "operation 12345"  # of a peer that knows more kernels
    monkeypatch.setattr(device.zlib, "crc32", lambda name: 2 * number)
    with pytest.raises(ValueError, match="'other' has the number of 'test_device'; choose another name"):
        operation("other")


class Exchange:
    """An inbox with room for one piece of each rank, signal words, and the values that every rank sends."""

    def __init__(self, ctx, dtype, num_elements):
        self.ctx, self.dtype = ctx, dtype
        self.stride = -(-(num_elements + 64 + GUARD) // 256) * 256
        self.inbox = ctx.empty(ctx.size, self.stride, dtype=dtype)
        self.ready = ctx.empty(ctx.size, dtype=torch.int64)
        self.ready.zero_()
        self.refill()

    def refill(self):
        """Collective. Poison in the inbox; nobody writes there meanwhile."""
        self.ctx.group.barrier()
        poison(self.inbox)
        self.ctx.group.barrier()

    def values(self, rank, round, num_elements):
        """What `rank` sends in that round: distinct in each place, round and rank, as far as the dtype goes."""
        return ((torch.arange(num_elements) * 7 + rank * 31 + round * 13) % 127).to(self.dtype)

    def check(self, round, num_elements, offset):
        """Every peer's piece is in its place, and nothing around it has changed."""
        untouched = poison(torch.empty(1, dtype=self.dtype))
        for source in range(self.ctx.size):
            row = self.inbox[source].cpu()
            if source != self.ctx.rank:
                got = row[offset : offset + num_elements]
                assert torch.equal(got, self.values(source, round, num_elements)), (source, round, num_elements)
                row = torch.cat([row[:offset], row[offset + num_elements :]])
            same = row.isnan() if self.dtype.is_floating_point else row == untouched
            assert same.all(), f"round {round}: written outside of rank {source}'s piece"

    def free(self):
        self.ctx.barrier()
        self.ctx.free(self.ready)
        self.ctx.free(self.inbox)


@triton.jit(do_not_specialize=SIZES)
def put_kernel(
    x, inbox, stride, ready, epoch, num_elements, table,
    RANK: tl.constexpr, L, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    net = Net(table, RANK)
    for step in range(1, L.RANKS):
        target = (RANK + step) % L.RANKS
        put(inbox + RANK * stride, x, num_elements, target, net, L, BLOCK, ALIGN)
        fence(L)
        signal(ready + RANK, epoch, target, net, L)
    for step in range(1, L.RANKS):
        source = (RANK + step) % L.RANKS
        wait_signal(ready + source, epoch, source, 0, net, L)


@triton.jit(do_not_specialize=SIZES)
def put_signal_kernel(
    x, inbox, stride, ready, epoch, num_elements, table,
    RANK: tl.constexpr, L, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    net = Net(table, RANK)
    for step in range(1, L.RANKS):
        target = (RANK + step) % L.RANKS
        put_signal(inbox + RANK * stride, x, num_elements, ready + RANK, epoch, target, net, L, BLOCK, ALIGN)
    for step in range(1, L.RANKS):
        source = (RANK + step) % L.RANKS
        wait_signal(ready + source, epoch, source, 0, net, L)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("kernel", ["put_kernel", "put_signal_kernel"])
@every_transport
def test_pieces_of_any_size_and_place_arrive_whole_and_alone(ctx, transport, kernel):
    ctx = over(ctx, transport)
    for round, (num_elements, source, offset, align) in enumerate(PIECES):
        dtype = DTYPES[round % len(DTYPES)]
        exchange = Exchange(ctx, dtype, num_elements)
        x = torch.zeros(source + num_elements + GUARD, dtype=dtype, device=ctx.device)
        for repeat in range(2):
            x[source : source + num_elements] = exchange.values(ctx.rank, repeat, num_elements).to(ctx.device)
            late(ctx, repeat, 0.01)
            ctx.launch(
                globals()[kernel], 1, x[source:], exchange.inbox[:, offset:], exchange.stride, exchange.ready,
                1 + repeat, num_elements, ctx.table,
                RANK=ctx.rank, L=ctx.link(OP), BLOCK=512, ALIGN=align,
            )  # fmt: skip
            ctx.check()
            exchange.check(repeat, num_elements, offset)
            exchange.refill()
        exchange.free()


@triton.jit(do_not_specialize=["stride", "rows", "columns", "epoch"])
def put_tile_kernel(
    x, inbox, room, stride, rows, columns, ready, counter, epoch, table,
    RANK: tl.constexpr, L, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Each program sends some columns of a matrix, and the one that is done last tells of all."""
    net = Net(table, RANK)
    pid = tl.program_id(0)
    first = pid * COLUMNS
    for step in range(1, L.RANKS):
        put_tile(
            inbox + RANK * room + first,
            x + first,
            stride,
            rows,
            columns - first,
            (RANK + step) % L.RANKS,
            net,
            L,
            (ROWS, COLUMNS),
            ALIGN,
        )
    if completes(counter, tl.num_programs(0), L):
        for step in range(1, L.RANKS):
            tell(ready + RANK, epoch, (RANK + step) % L.RANKS, net, L)
    if pid == 0:
        for step in range(1, L.RANKS):
            source = (RANK + step) % L.RANKS
            wait_signal(ready + source, epoch, source, 0, net, L)


@pytest.mark.ranks(2, 4)
@every_transport
def test_tiles_arrive_whole_and_nothing_beside_them(ctx, transport):
    ctx = over(ctx, transport)
    # (rows, columns, elements between rows, offset, alignment in bytes)
    tiles = [(5, 48, 64, 0, 16), (8, 33, 33, 3, 2), (1, 1, 7, 1, 2), (3, 64, 72, 8, 16), (0, 20, 24, 0, 16)]
    for number, (rows, columns, stride, offset, align) in enumerate(tiles):
        dtype = (torch.int16, torch.int32)[number % 2 if align == 16 else 0]
        inbox, ready = ctx.empty(ctx.size, 1024, dtype=dtype), ctx.empty(ctx.size, dtype=torch.int64)
        ready.zero_()
        room = torch.arange(1024) - offset
        sent = (room >= 0) & (room < rows * stride) & (room % stride < columns)
        for epoch in (1, 2):
            poison(inbox)
            ctx.barrier()
            late(ctx, epoch % ctx.size, 0.01)
            values = [(torch.arange(1024) * 7 + rank * 31 + epoch * 13).to(dtype) for rank in range(ctx.size)]
            x = values[ctx.rank].to(ctx.device)
            ctx.launch(
                put_tile_kernel, -(-columns // 16), x[offset:], inbox[:, offset:], 1024, stride, rows, columns, ready,
                torch.zeros(1, dtype=torch.int64, device=ctx.device), epoch, ctx.table,
                RANK=ctx.rank, L=ctx.link(OP), ROWS=2, COLUMNS=16, ALIGN=align,
            )  # fmt: skip
            ctx.check()
            untouched = poison(torch.empty(1024, dtype=dtype))
            for source, came in enumerate(values):
                want = torch.where(sent & (source != ctx.rank), came, untouched)
                assert torch.equal(inbox[source].cpu(), want), (number, epoch, source)
            ctx.barrier()
        ctx.free(ready)
        ctx.free(inbox)


@triton.jit(do_not_specialize=["stride", "num_elements"])
def get_kernel(
    out, x, stride, num_elements, table,
    RANK: tl.constexpr, L, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    for step in range(L.RANKS):
        source = (RANK + step) % L.RANKS
        get(out + source * stride, x, num_elements, source, Net(table, RANK), L, BLOCK, ALIGN)


@pytest.mark.ranks(2, 4)
@every_transport
def test_get_reads_every_rank_and_nothing_more(ctx, transport):
    ctx = over(ctx, transport)
    for round, (num_elements, source, offset, align) in enumerate(PIECES):
        exchange = Exchange(ctx, DTYPES[round % len(DTYPES)], num_elements)
        x = ctx.empty(source + num_elements + GUARD, dtype=exchange.dtype)
        x[source : source + num_elements] = exchange.values(ctx.rank, round, num_elements).to(ctx.device)
        ctx.barrier()
        ctx.launch(
            get_kernel, 1, exchange.inbox[:, offset:], x[source:], exchange.stride, num_elements, ctx.table,
            RANK=ctx.rank, L=ctx.link(OP), BLOCK=512, ALIGN=align,
        )  # fmt: skip
        own = exchange.inbox[ctx.rank, offset : offset + num_elements]
        assert torch.equal(own.cpu(), exchange.values(ctx.rank, round, num_elements))
        poison(own)
        exchange.check(round, num_elements, offset)
        ctx.barrier()
        ctx.free(x)
        exchange.free()


@triton.jit
def add_kernel(
    word, amount, times, total, table,
    RANK: tl.constexpr, L, OPERATOR: tl.constexpr,
):  # fmt: skip
    net = Net(table, RANK)
    for step in range(1, L.RANKS):
        for _ in range(times):
            signal(word, amount, (RANK + step) % L.RANKS, net, L, OPERATOR)
    wait_signal(word, total, (RANK + 1) % L.RANKS, 0, net, L)


@pytest.mark.ranks(2, 4)
@every_transport
def test_signals_of_all_ranks_add_up_exactly(ctx, transport):
    ctx = over(ctx, transport)
    words = ctx.empty(2, dtype=torch.int64)
    start, times, programs = 1 << 40, 3, 2  # beyond 32 bits
    words.fill_(start)
    ctx.group.barrier()
    amounts = [10**rank for rank in range(ctx.size)]
    total = start + times * programs * (sum(amounts) - amounts[ctx.rank])
    ctx.launch(
        add_kernel, programs, words, amounts[ctx.rank], times, total, ctx.table,
        RANK=ctx.rank, L=ctx.link(OP), OPERATOR=ADD,
    )  # fmt: skip
    ctx.check()
    assert words.tolist() == [total, start]
    ctx.barrier()
    ctx.free(words)


@pytest.mark.ranks(2)
def test_launch_names_what_is_wrong_with_a_kernel_and_its_arguments_and_the_context_goes_on(ctx):
    """A kernel that lacked an argument was taken for one that had been interrupted, and the context for spent."""
    word, link = torch.zeros(1, dtype=torch.int64, device=ctx.device), ctx.link(OP)
    right = word, 1, 1, 1, ctx.table, ctx.rank, link, ADD
    for kernel, programs, arguments, error, said in (
        (add_kernel, 1, right[:3], TypeError, "add_kernel was not given total, table, RANK, L, OPERATOR"),
        (add_kernel, 1, (*right, 1), TypeError, "add_kernel takes 8 arguments, got 9"),
        (add_kernel, 0, right, ValueError, "num_programs=0 must be at least 1"),
        (add_kernel, (1,), right, TypeError, r"num_programs=\(1,\) must be a whole number"),
        (len, 1, right, TypeError, "kernel=<built-in function len> must be a function under @triton.jit"),
    ):
        with pytest.raises(error, match=f"^launch: {said}"):
            ctx.launch(kernel, programs, *arguments)
    with pytest.raises(TypeError, match="^link: operation='shift' must be a whole number"):
        ctx.link("shift")
    with pytest.raises(TypeError, match="^operation: name=3 must be a name"):
        operation(3)
    ctx.check()
    ctx.barrier()


@triton.heuristics({"BLOCK": lambda arguments: 4})
@triton.jit
def count_kernel(out, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), tl.arange(0, BLOCK))


@simulated_only
@pytest.mark.ranks(1)
def test_launch_leaves_to_heuristics_what_they_supply(ctx):
    out = torch.zeros(4, dtype=torch.int64)
    ctx.launch(count_kernel, 1, out)
    assert out.tolist() == [0, 1, 2, 3]


@triton.jit
def add_to_kernel(word, target, table, rank, L, OPERATOR: tl.constexpr):
    signal(word, 1, target, Net(table, rank), L, OPERATOR)


@simulated_only
@pytest.mark.ranks(2)
def test_peer_refuses_ranks_that_are_none(ctx):
    """Their addresses, which were none, ended the process."""
    for target, said in ((2, "names rank 2, but there are 2, from 0 on"), (-1, "names rank -1, but there are 2")):
        with tkernels.init(ctx.group.process_group, heap_bytes=4 << 20, default=False) as context:
            word = context.empty(1, dtype=torch.int64)
            with pytest.raises(TkernelsError, match=f"^a kernel of rank {ctx.rank} {said}"):
                context.launch(add_to_kernel, 1, word, target, context.table, ctx.rank, context.link(OP), ADD)
            context.reported = True
        ctx.barrier()


@triton.jit
def set_kernel(words, value, least, table, RANK: tl.constexpr, L):
    net = Net(table, RANK)
    for step in range(1, L.RANKS):
        signal(words + RANK, value, (RANK + step) % L.RANKS, net, L)
    for step in range(1, L.RANKS):
        source = (RANK + step) % L.RANKS
        wait_signal(words + source, least, source, 0, net, L)


@pytest.mark.quick
@pytest.mark.ranks(2)
@every_transport
def test_a_wait_is_over_at_any_value_from_the_epoch_on(ctx, transport):
    ctx = over(ctx, transport)
    words = ctx.empty(ctx.size, dtype=torch.int64)
    words.zero_()
    ctx.group.barrier()
    for value, least in [(1, 1), (5, 3), ((1 << 40) + 1, 1 << 40), ((1 << 40) + 1, 0)]:
        ctx.launch(
            set_kernel, 1, words, value, least, ctx.table,
            RANK=ctx.rank, L=ctx.link(OP),
        )  # fmt: skip
        ctx.check()
        assert words[1 - ctx.rank].item() == value
        ctx.group.barrier()
    ctx.free(words)


@triton.jit
def reuse_kernel(
    x, inbox, stride, ready, num_elements, rounds, table,
    RANK: tl.constexpr, L, BLOCK: tl.constexpr,
):  # fmt: skip
    net = Net(table, RANK)
    for round in range(rounds):
        at = tl.arange(0, BLOCK)
        tl.store(x + at, (RANK * 1000 + round * 100 + at).to(tl.float32), mask=at < num_elements)
        tl.debug_barrier()
        for step in range(1, L.RANKS):
            target = (RANK + step) % L.RANKS
            put(inbox + (round * L.RANKS + RANK) * stride, x, num_elements, target, net, L, BLOCK)
        quiet(L)
    for step in range(1, L.RANKS):
        signal(ready + RANK, 1, (RANK + step) % L.RANKS, net, L)
    for step in range(1, L.RANKS):
        source = (RANK + step) % L.RANKS
        wait_signal(ready + source, 1, source, 0, net, L)


@pytest.mark.ranks(2, 4)
@every_transport
def test_after_quiet_the_source_may_be_overwritten(ctx, transport):
    ctx = over(ctx, transport)
    num_elements, rounds = 33, 4
    exchange = Exchange(ctx, torch.float32, num_elements)
    inbox = ctx.empty(rounds, ctx.size, num_elements)
    poison(inbox)
    ctx.group.barrier()
    x = torch.zeros(64, device=ctx.device)
    ctx.launch(
        reuse_kernel, 1, x, inbox, num_elements, exchange.ready, num_elements, rounds, ctx.table,
        RANK=ctx.rank, L=ctx.link(OP), BLOCK=64,
    )  # fmt: skip
    ctx.check()
    for round in range(rounds):
        for source in set(range(ctx.size)) - {ctx.rank}:
            want = torch.arange(num_elements) + source * 1000 + round * 100
            assert torch.equal(inbox[round, source].cpu(), want.float())
    ctx.barrier()
    ctx.free(inbox)
    exchange.free()


@triton.jit
def peer_kernel(x, out, table, rank, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    net = Net(table, rank)
    at = tl.arange(0, BLOCK)
    for target in range(RANKS):
        theirs = peer(x, target, net)
        tl.store(out + target * BLOCK + at, tl.load(theirs + at))
    distance = peer(x, rank, net).to(tl.int64) - x.to(tl.int64)
    tl.store(out + RANKS * BLOCK + at, (distance + at).to(tl.float32))


@pytest.mark.ranks(2, 4)
@every_transport
def test_peer_is_the_same_place_in_another_ranks_memory(ctx, transport):
    ctx = over(ctx, transport)
    if not all(ctx.heap.segment.bases):
        pytest.skip("loads and stores don't reach every rank")
    x = ctx.empty(16)
    x.copy_(torch.arange(16) + 100.0 * ctx.rank)
    ctx.barrier()
    out = torch.empty((ctx.size + 1, 16), device=ctx.device)
    ctx.launch(peer_kernel, 1, x, out, ctx.table, ctx.rank, RANKS=ctx.size, BLOCK=16)
    want = [torch.arange(16) + 100.0 * rank for rank in range(ctx.size)]
    assert torch.equal(out.cpu(), torch.stack([*want, torch.arange(16.0)]))  # a rank's peer at itself is itself
    ctx.barrier()
    ctx.free(x)


@triton.jit
def epochs_kernel(
    x, out, inbox, inbox_stride, stride, ready, state, counters, table,
    RANK: tl.constexpr, L, BLOCK: tl.constexpr,
):  # fmt: skip
    net = Net(table, RANK)
    # Each program sends its own chunk; then it counts up, and the last program to arrive copies all chunks out.
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    epoch = begin_epoch(state)
    inbox += epoch % 2 * inbox_stride
    for step in range(1, L.RANKS):
        target = (RANK + step) % L.RANKS
        put_signal(
            inbox + RANK * stride + chunk * BLOCK, x + chunk * BLOCK, BLOCK,
            ready + RANK * chunks + chunk, epoch, target, net, L, BLOCK,
        )  # fmt: skip
    for step in range(1, L.RANKS):
        source = (RANK + step) % L.RANKS
        wait_signal(ready + source * chunks + chunk, epoch, source, chunk, net, L)
        copy(out + source * stride + chunk * BLOCK, inbox + source * stride + chunk * BLOCK, BLOCK, BLOCK)
    count(counters, L, "gpu")
    if chunk == 0:
        wait_signal(counters, epoch * chunks, RANK, chunk, net, L)
        copy(out + RANK * stride, out + (RANK + 1) % L.RANKS * stride, chunks * BLOCK, BLOCK)  # what others stored
    end_epoch(state, epoch)


@pytest.mark.ranks(2, 4)
@every_transport
def test_two_inboxes_carry_many_rounds_without_a_barrier(ctx, transport):
    """Also count, begin_epoch and end_epoch: the epoch advances by one a launch, once all programs have ended."""
    ctx = over(ctx, transport)
    programs, block, rounds = 3, 16, 12
    stride = programs * block
    inbox = ctx.empty(2, ctx.size, stride)
    ready = ctx.empty(ctx.size, programs, dtype=torch.int64)
    poison(inbox)
    ready.zero_()
    state, counters = (torch.zeros(2, dtype=torch.int64, device=ctx.device) for _ in range(2))
    ctx.group.barrier()
    with execution(jitter_seed=5, rank=ctx.rank):
        for round in range(rounds):
            x = torch.arange(stride, device=ctx.device) + 1000.0 * round + 100_000 * ctx.rank
            out = poison(torch.empty((ctx.size, stride), device=ctx.device))
            ctx.launch(
                epochs_kernel, programs, x, out, inbox, ctx.size * stride, stride, ready, state, counters, ctx.table,
                RANK=ctx.rank, L=ctx.link(OP), BLOCK=block,
            )  # fmt: skip
            sources = [rank if rank != ctx.rank else (rank + 1) % ctx.size for rank in range(ctx.size)]
            want = [torch.arange(stride) + 1000.0 * round + 100_000 * source for source in sources]
            assert torch.equal(out.cpu(), torch.stack(want)), f"round {round}"
            assert state.tolist() == [round + 1, 0]
    ctx.check()
    ctx.barrier()
    ctx.free(ready)
    ctx.free(inbox)


@triton.jit
def count_up_to_kernel(
    x, counters, looked, seen, number, L, FORM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """All programs but the first store and count; that one looks on at what they stored, once they have passed.

    Those that count first store once it has looked.
    """
    pid = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    if pid > 0:
        if FORM == "count first":
            count_up_to(counters, number, L)
            while tl.atomic_add(looked, tl.full((), 0, tl.int64), sem="acquire", scope="sys") == 0:
                pass
        tl.store(x + (pid - 1) * BLOCK + at, pid + at)
        if FORM != "count first":
            count_up_to(counters, number, L)
    else:
        passed = tl.full((), 0, tl.int64)
        while passed <= number:
            passed = tl.atomic_add(counters, tl.full((), 0, tl.int64), sem="acquire", scope="sys")
        tl.debug_barrier()
        for program in range(number):
            tl.store(seen + program * BLOCK + at, tl.load(x + program * BLOCK + at, volatile=True))
        tl.atomic_add(looked, tl.full((), 1, tl.int64), sem="release", scope="sys")


@pytest.mark.ranks(1)
def test_whoever_sees_a_number_passed_sees_what_all_that_counted_stored(ctx):
    programs, block = 4, 64
    want = torch.arange(1, programs)[:, None] + torch.arange(block)
    for form in ("right", "count first") if ctx.runtime == "simulated" else ("right",):
        found = set()
        for round in range(20):
            counters, looked = torch.zeros(2, 1, dtype=torch.int64, device=ctx.device)
            x, seen = (torch.full((programs - 1, block), -1, device=ctx.device) for _ in range(2))
            with execution(jitter_seed=round, rank=ctx.rank):
                ctx.launch(
                    count_up_to_kernel, programs, x, counters, looked, seen, programs - 1,
                    L=ctx.link(OP), FORM=form, BLOCK=block,
                )  # fmt: skip
            assert counters.item() == programs, f"round {round}"
            found.add(torch.equal(seen.cpu(), want))
        assert found == {form == "right"}, form


@every_transport
@pytest.mark.ranks(2)
def test_round_trips_by_every_verb_carry_data(ctx, transport):
    for verb in round_trips.verbs_of(transport):
        assert round_trips.round_trips(over(ctx, transport), verb) is None
