"""Fused operations by who sends: the copy engine, programs to where copies go, or all programs between steps."""

import ctypes
import dataclasses
import functools
import importlib
import itertools
import threading
import time
from unittest import mock

import pytest
import torch
import triton.language as tl
from execution import execution
from products import own_rows_of_sum, product_of_gathered, sum_of_products
from transports import (
    by_copies,
    every_transport,
    expire_after,
    interleaved,
    into_landing,
    late,
    launches,
    over,
    poison_workspace,
    poisoned_memory,
    simulated_only,
)

import tkernels
from tkernels import fused
from tkernels.choice import overlap_config
from tkernels.comm import WaitTimeoutError, collectives, copies, device, interpreter, mail
from tkernels.comm.collectives import split_rows
from tkernels.comm.launch import PreparedLaunch
from tkernels.configs import GemmConfig, OverlapConfig, by_copy_engine
from tkernels.gemm import layout_of
from tkernels.testing.compare import integers

AG, RS, AR = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
# (rows of each rank, N and K of each product)
SHAPES = {
    2: [((33, 32), 40, 48), ((0, 65), 33, 50)],
    3: [((33, 0, 5), 20, 24)],
    4: [((17, 40, 0, 16), 33, 40)],
}
PATIENCE_S = {"right": 0.2, "wrong": 300.0}  # how long a rank waits for a mistake, which comes in the wrong form
SHORT_S = 1.0  # where what the other rank waits for lies behind what this one holds up


def operands(ctx, name, rows, N, K, dtype, seed):
    """x, w and the right result of this rank; every sum is exact in bf16."""
    seed = 100 * seed + 10 * ctx.rank
    x = integers((rows[ctx.rank] if name == AG else sum(rows), K), dtype, seed, -2, 2, device=ctx.device)
    w = integers((N, K), dtype, seed + 1, -2, 2, device=ctx.device)
    if name == AG:
        return x, w, product_of_gathered(ctx, x, w).to(dtype)
    return x, w, (own_rows_of_sum(ctx, rows, x, w) if name == RS else sum_of_products(ctx, x, w)).to(dtype)


def options(name, rows):
    return {} if name == AR else {"rows": rows}


@pytest.mark.ranks(2, 3, 4)
@every_transport
def test_copies_give_the_same_between_calls_of_the_other_ways_on_a_poisoned_workspace(ctx, transport):
    ctx = over(ctx, transport)
    results = []
    for seed, (rows, N, K) in enumerate(SHAPES[ctx.size]):
        for name in (AG, RS, AR):
            dtype = (torch.float32, torch.bfloat16)[seed % 2]
            x, w, want = operands(ctx, name, rows, N, K, dtype, seed)
            late(ctx, seed % ctx.size, 0.02)
            results.append((by_copies(ctx, name, x, w, **options(name, rows)), want, name, rows))
            if seed == 0:
                stored = getattr(tkernels, name)(x, w, **options(name, rows), ctx=ctx, path="fused")
                results.append((stored, want, name, rows))
            if name == RS:
                poison_workspace(ctx)
            with poisoned_memory():
                got = by_copies(ctx, name, 2 * x, w, chunk_rows=1 << 20, **options(name, rows))
            results.append((got, 2 * want, name, rows))
    for got, want, name, rows in results:
        assert torch.equal(got, want), (name, rows)
    ctx.check()


@pytest.mark.ranks(2, 3, 4)
def test_who_sends_is_each_ranks_own_affair(ctx):
    """The copy engine, in copies of one chunk or several, some programs, or all: some ranks so, some so, in turns."""
    gemm = GemmConfig(16, 32, 16) if ctx.device.type == "cpu" else GemmConfig(64, 64, 64, num_warps=4)
    chunk_rows = gemm.block_m
    ways = [
        OverlapConfig(gemm, chunk_rows, num_comm=0),
        OverlapConfig(gemm, chunk_rows, num_comm=1, landing=True),
        OverlapConfig(gemm, chunk_rows, num_comm=0, copy_rows=2 * chunk_rows),
        OverlapConfig(gemm, chunk_rows, num_comm=0, interleaved=True, landing=True),
    ]
    results = []
    for seed, (rows, N, K) in enumerate(SHAPES[ctx.size] * 3):
        for name in (AG, RS, AR):
            senders = [way for way in ways if name != AG or not way.interleaved]
            x, w, want = operands(ctx, name, rows, N, K, torch.bfloat16, seed)
            operation = getattr(tkernels, name)
            late(ctx, seed % ctx.size, 0.02)
            with poisoned_memory():
                got = operation(x, w, config=senders[(ctx.rank + seed) % len(senders)], **options(name, rows), ctx=ctx)
            results.append((got, want, name, rows, seed))
            if seed % 2:
                poison_workspace(ctx)
    for got, want, *case in results:
        assert torch.equal(got, want), case
    ctx.check()
    ctx.group.barrier()
    assert not ctx.workspace().delivered.any()  # nor will a peer count any more


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("landing", [False, True])
def test_all_programs_send_between_the_steps_of_their_products(ctx, landing):
    results = []
    for seed, (rows, N, K) in enumerate(SHAPES[ctx.size] * 2):
        for name in (RS, AR):
            x, w, want = operands(ctx, name, rows, N, K, torch.bfloat16, seed)
            late(ctx, seed % ctx.size, 0.02)
            poison_workspace(ctx)
            with poisoned_memory(), launches() as launched:
                got = interleaved(ctx, name, x, w, landing=landing, **options(name, rows))
            sent = [arguments["INTERLEAVED"] for _, _, arguments in launched if "INTERLEAVED" in arguments]
            assert sent == [True]  # besides the copies of rows that TMA can't take
            results.append((got, want, name, rows))
    for got, want, *case in results:
        assert torch.equal(got, want), case
    ctx.check()


@pytest.mark.ranks(2, 3, 4)
def test_programs_send_their_last_tile_before_they_wait_for_others(ctx):
    """Few programs, of several tiles each, whose turn to send comes in a tile's last step, or in its only one."""
    results, rows = [], (70, 33, 0, 40)[: ctx.size]
    for most, (name, K) in itertools.product((1, 2, 3, 5), itertools.product((RS, AR), (32, 96))):
        x, w, want = operands(ctx, name, rows, 96, K, torch.float32, most)
        gemm = GemmConfig(32, 64, 32, split=2, num_stages=2)
        config = OverlapConfig(gemm, 64, num_comm=0, interleaved=True, max_programs=min(most, ctx.num_programs))
        operation = getattr(tkernels, name)
        results.append((operation(x, w, config=config, **options(name, rows), ctx=ctx), want, name, K, most))
    for got, want, *case in results:
        assert torch.equal(got, want), case
    ctx.check()


@simulated_only
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("wire, out", [*itertools.product((torch.float16, torch.float32), repeat=2)])
def test_all_programs_send_every_element_once(ctx, wire, out):
    """In tiles that lie beside each other, of sums and results that may differ in size."""
    rows, N, K = (33, 20, 7)[: ctx.size], 200, 16
    reductions, sent = importlib.import_module(f"tkernels.{RS}"), []
    put_tile = reductions.put_tile

    @interpreter.builtin
    def note(dst, src, stride, count, columns, *arguments):
        bits = src.dtype.element_ty.primitive_bitwidth
        most = arguments[3][1]  # of BLOCK
        sent.append(int(count) * min(int(columns), int(getattr(most, "value", most))) * bits // 8)
        put_tile(dst, src, stride, count, columns, *arguments)

    for name in (RS, AR):
        x, w, want = operands(ctx, name, rows, N, K, torch.float16, 1)
        given = {"wire_dtype": wire, "out_dtype": out, **options(name, rows)}
        sent.clear()
        with mock.patch.object(reductions, "put_tile", note):
            assert torch.equal(interleaved(ctx, name, x, w, **given), want.to(out))
        own = split_rows(sum(rows), ctx.size)[ctx.rank] if name == AR else rows[ctx.rank]
        finished = own * (ctx.size - 1) * out.itemsize if name == AR else 0
        assert sum(sent) == N * ((sum(rows) - own) * wire.itemsize + finished), name


@pytest.mark.ranks(2)
def test_bias_activation_and_dtypes_are_the_same_whoever_sends(ctx):
    x, w, _ = operands(ctx, RS, (33, 20), 24, 16, torch.float16, 1)
    bias = integers(24, torch.float16, 7, device=ctx.device)
    for name, operation in ((RS, tkernels.matmul_reduce_scatter), (AR, tkernels.matmul_all_reduce)):
        for wire, out in itertools.product((torch.float16, torch.float32), repeat=2):
            asked = {"wire_dtype": wire, "out_dtype": out, **options(name, (33, 20))}
            stored = operation(x, w, bias, "gelu", path="fused", **asked, ctx=ctx)
            for way in (by_copies, interleaved):
                assert torch.equal(way(ctx, name, x, w, bias, "gelu", **asked), stored), (name, wire, out, way)


@pytest.mark.ranks(2)
def test_delays_change_no_bit_and_a_launch_has_no_program_that_sends(ctx):
    rows = (40, 27)
    for name in (AG, RS, AR):
        x, w, want = operands(ctx, name, rows, 40, 48, torch.bfloat16, 3)
        for seed in range(3):
            late(ctx, seed % 2, 0.02)
            with execution(jitter_seed=seed, rank=ctx.rank), launches() as launched:
                got = by_copies(ctx, name, x, w, **options(name, rows))
            assert torch.equal(got, want), (name, seed)
            assert [arguments["COPIED"] for _, _, arguments in launched] == [True]


@simulated_only
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", [AG, RS, AR])
def test_the_last_program_alone_opens_the_gate_and_waits_for_the_copies(ctx, name):
    rows = (40, 27, 0)[: ctx.size]
    x, w, want = operands(ctx, name, rows, 40, 48, torch.bfloat16, 3)
    call = functools.partial(by_copies, ctx, name, x, w, **options(name, rows))
    call()  # the workspace is as large as it needs to be
    copied, count, wait_signal = ctx.workspace().copied.data_ptr(), mail.count, mail.wait_signal
    opened, awaited = [], []

    @interpreter.builtin
    def note_opened(*arguments):
        opened.append(tl.program_id(0).handle.data.item())
        count(*arguments)

    @interpreter.builtin
    def note_awaited(word, *arguments):
        if word.handle.data.item() == copied:
            awaited.append(tl.program_id(0).handle.data.item())
        wait_signal(word, *arguments)

    with (
        mock.patch.object(mail, "count", note_opened),
        mock.patch.object(mail, "wait_signal", note_awaited),
        launches() as launched,
    ):
        assert torch.equal(call(), want)
    ((_, programs, _),) = launched
    assert opened == awaited == [programs - 1] and programs > 1


@pytest.mark.ranks(2)
def test_ranks_that_are_not_mapped_are_refused_before_the_first_signal(ctx):
    x, w, want = operands(ctx, AG, (32, 32), 16, 32, torch.float32, 1)
    whole = torch.cat([x, x])
    with mock.patch.object(ctx, "mapped", False):
        for call in (
            lambda: by_copies(ctx, AG, x, w, out_dtype=torch.float32, chunk_rows=4096),
            lambda: by_copies(ctx, RS, whole, w, chunk_rows=4096),
            lambda: by_copies(ctx, AR, whole, w, chunk_rows=4096),
            lambda: tkernels.matmul_all_reduce(whole, w, config=OverlapConfig(num_comm=1, landing=True), ctx=ctx),
            lambda: tkernels.matmul_all_reduce(whole, w, config=OverlapConfig(num_comm=0, interleaved=True), ctx=ctx),
        ):
            with pytest.raises(ValueError, match="num_comm=0 .* need every .* num_comm of 1 or more, landing=False"):
                call()
    assert torch.equal(by_copies(ctx, AG, x, w, chunk_rows=4096), want)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", [AG, RS, AR])
def test_a_peer_that_never_calls_is_named_and_copies_come_to_an_end(ctx, name):
    with tkernels.init(heap_bytes=64 << 20) as context:
        rows, N, K = (256, 256), 1024, 64
        x, w, want = operands(ctx, name, rows, N, K, torch.float32, 1)
        call = functools.partial(by_copies, context, name, x, w, chunk_rows=64, **options(name, rows))
        assert torch.equal(call(), want)
        expire_after(context, 1.0)
        if ctx.rank == 0:
            with pytest.raises(WaitTimeoutError, match="rank 0 waited 1 s for the signal of rank 1"):
                call()
                context.check()
        ctx.group.barrier()  # behind all streams
        if ctx.rank == 1:  # rank 0 has told us
            with pytest.raises(WaitTimeoutError):
                context.check()


@pytest.mark.ranks(2)
def test_one_program_suffices(ctx):
    alone = over(ctx, ctx.transport, num_programs=1)
    x, w, want = operands(alone, RS, (20, 20), 16, 32, torch.float32, 1)
    with pytest.raises(ValueError, match="comm programs: of one program none is left that mult.*use path='plain'"):
        tkernels.matmul_reduce_scatter(x, w, ctx=alone, path="fused")
    by_rule = overlap_config(ctx, RS, 40, *w.shape, x.dtype, layout_of(x, w))
    for sender in ({"landing": True}, {"interleaved": True, "split_tiles": None}):
        config = dataclasses.replace(by_rule, copy_rows=None, num_comm=0, **sender)
        assert torch.equal(tkernels.matmul_reduce_scatter(x, w, config=config, ctx=alone), want)
    assert torch.equal(tkernels.matmul_reduce_scatter(x, w, ctx=alone), want)
    choice = tkernels.explain("matmul_reduce_scatter", 40, 16, 64, torch.float32, ctx=alone)
    assert str(choice) == "plain: num_programs=1 leaves no program that multiplies while another one sends"


class Meeting:
    """A word that the other rank sets, and this rank may wait for a while."""

    def __init__(self, ctx, patience_s):
        self.patience_s = patience_s
        self.cell = ctx.empty(1, dtype=torch.int64)
        self.cell.zero_()
        address = ctx.heap.segment.bases[1 - ctx.rank] + ctx.heap.offset(self.cell)
        self.theirs = ctypes.c_int64.from_address(address)
        ctx.group.barrier()

    def tell(self):
        self.theirs.value = 1

    def wait(self):
        limit = time.monotonic() + self.patience_s
        while not self.cell.item() and time.monotonic() < limit:
            time.sleep(1e-3)


@interpreter.builtin
def no_wait(*arguments):
    pass


def signal_first(ctx, form, name):
    """One call; in the wrong form data follows their signals, once the peer has its result."""
    rows = (33, 20)
    x, w, _ = operands(ctx, name, rows, 24, 16, torch.float32, 1)
    by_copies(ctx, name, x, w, **options(name, rows))
    x, w, want = operands(ctx, name, rows, 24, 16, torch.float32, 2)
    poison_workspace(ctx)
    peer, copy, on_words, spin, held = Meeting(ctx, SHORT_S), copies.host_copy, copies.host_on_words, device.spin, []
    copied = ctx.workspace().copied.data_ptr()

    def hold(*what):
        held.append(what)

    def late_copies(operations):
        if held:
            on_words(operations[: copies.OPERATION_WORDS])  # the signal
            peer.wait()
            copy(*held.pop())
            operations = operations[copies.OPERATION_WORDS :]
        on_words(operations)

    @interpreter.builtin
    def tell(word, *arguments):
        if word.handle.data.item() == copied:  # the last program's tiles are done
            peer.tell()
        return spin(word, *arguments)

    with (
        mock.patch.object(copies, "host_copy", hold if form == "wrong" else copy),
        mock.patch.object(copies, "host_on_words", late_copies if form == "wrong" else on_words),
        mock.patch.object(device, "spin", tell),
    ):
        got = by_copies(ctx, name, x, w, **options(name, rows))
    return torch.equal(got, want)


def landing_used_again(ctx, form, name, call):
    """Two calls, in the first of which rank 1 reads late; in the wrong form nobody waits for who has come to a call."""
    rows = (40, 40)
    made = [operands(ctx, name, rows, 24, 16, torch.float32, seed) for seed in range(3)]
    module, stores = importlib.import_module(f"tkernels.{name}"), call is not by_copies
    call(ctx, name, *made[0][:2], rows=rows)
    spin, copy, delay = device.spin, copies.host_copy, device.delay
    (peer, done), calls, delays = [Meeting(ctx, PATIENCE_S[form]) for _ in range(2)], [], []

    @interpreter.builtin
    def late_reader(*arguments):
        arrived = spin(*arguments)
        if ctx.rank == 1 and len(calls) == 1:
            peer.wait()
        return arrived

    def tell(goal, source, num_bytes):
        copy(goal, source, num_bytes)
        if ctx.rank == 0 and len(calls) == 2:
            peer.tell()
            done.wait()  # else the peer would set to zero what is counted now

    @interpreter.builtin
    def put(*arguments):
        if stores and ctx.rank == 0 and len(calls) == 2:
            program = threading.get_ident()  # it delays before it tells of the call, before its first data, and behind
            delays.append(program)
            if delays.count(program) == 3:
                peer.tell()
        return delay(*arguments)

    results = []
    with (
        mock.patch.object(device, "spin", late_reader),
        mock.patch.object(device, "delay", put),
        mock.patch.object(copies, "host_copy", tell),
        mock.patch.object(mail, "await_peers", no_wait if form == "wrong" else mail.await_peers),
        mock.patch.object(module, "await_peers", no_wait if form == "wrong" else mail.await_peers, create=True),
    ):
        for x, w, want in made[1:]:
            calls.append(None)
            results.append((call(ctx, name, x, w, rows=rows), want))
            done.tell()
    return all(torch.equal(got, want) for got, want in results)


def counts_stay(ctx, form, name):
    """Two calls, in the second of which rank 0's copies are late; in the wrong form their counts stay as they are."""
    made = [operands(ctx, name, (40, 40), 24, 16, torch.float32, seed) for seed in range(2)]
    module = importlib.import_module(f"tkernels.{AG if name == AG else RS}")  # whose kernel it is
    peer, copy, end_mail, calls, results = Meeting(ctx, PATIENCE_S[form]), copies.host_copy, module.end_mail, [], []

    def late_copy(*arguments):
        if ctx.rank == 0 and len(calls) == 2:
            peer.wait()
        copy(*arguments)

    @interpreter.builtin
    def keep(*arguments):
        end_mail(*arguments[:-1], arguments[-1]._replace(LANDING=False))

    with (
        mock.patch.object(copies, "host_copy", late_copy),
        mock.patch.object(module, "end_mail", keep if form == "wrong" else end_mail),
    ):
        for x, w, want in made:
            calls.append(None)
            results.append((by_copies(ctx, name, x, w), want))
    if ctx.rank == 1:
        peer.tell()
    return all(torch.equal(got, want) for got, want in results)


def signals_early(ctx, form, name):
    """One call; in the wrong form its programs don't count, and each signals behind its own tile of a chunk.

    Rank 0 holds up what it sends behind its first signal until the peer has its result.
    """
    rows = (20, 20)
    made = [operands(ctx, name, rows, 80, 16, torch.float32, seed) for seed in range(2)]
    interleaved(ctx, name, *made[0][:2], **options(name, rows))
    poison_workspace(ctx)
    peer, told, (x, w, want) = Meeting(ctx, SHORT_S), [], made[1]
    reductions = importlib.import_module(f"tkernels.{RS}")
    put_tile, tell, completes = (getattr(reductions, verb) for verb in ("put_tile", "tell", "completes"))

    @interpreter.builtin
    def put_late(*arguments):
        if ctx.rank == 0 and told:
            peer.wait()
        put_tile(*arguments)

    @interpreter.builtin
    def note(*arguments):
        tell(*arguments)
        told.append(None)

    @interpreter.builtin
    def count_nothing(*arguments):
        return True

    with (
        mock.patch.object(reductions, "put_tile", put_late),
        mock.patch.object(reductions, "tell", note),
        mock.patch.object(reductions, "completes", count_nothing if form == "wrong" else completes),
    ):
        got = interleaved(ctx, name, x, w, **options(name, rows))
    if ctx.rank == 1:
        peer.tell()
    return torch.equal(got, want)


def ends_early(ctx, form, name):
    """Rank 0's copies are late; in the wrong form its launch ends before, and what follows overwrites their source."""
    rows = (33, 20)
    x, w, _ = operands(ctx, name, rows, 24, 16, torch.float32, 3)
    copy, wait_signal, ended, late_copies = copies.host_copy, mail.wait_signal, [], []

    def late_copy(goal, source, num_bytes):
        limit = time.monotonic() + PATIENCE_S[form]
        while ctx.rank == 0 and not ended and time.monotonic() < limit:
            time.sleep(1e-3)
        late_copies.append(bool(ended))
        copy(goal, source, num_bytes)

    def launch_and_note(self, *tensors, launch=PreparedLaunch.__call__):
        launch(self, *tensors)
        if self._kernel is not collectives.announce_kernel:  # of a workspace that grows
            ended.append(None)

    @interpreter.builtin
    def wait_for_peers(word, epoch, source, *arguments):
        if int(source) != ctx.rank:  # else for the copies
            wait_signal(word, epoch, source, *arguments)

    with (
        mock.patch.object(copies, "host_copy", late_copy),
        mock.patch.object(PreparedLaunch, "__call__", launch_and_note),
        mock.patch.object(mail, "wait_signal", wait_for_peers if form == "wrong" else wait_signal),
    ):
        by_copies(ctx, name, x, w, chunk_rows=1 << 20, **options(name, rows))
    return not any(late_copies)


@simulated_only
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "mistake",
    [
        "a signal before its data",
        "a landing that is used again at once",
        "a landing that programs use again at once",
        "a landing that all programs use again at once",
        "a chunk that is signalled before its last tile",
        "a launch that ends before its copies",
        "counts of chunks that stay",
    ],
)
def test_a_wrong_form_is_caught(ctx, mistake):
    for form in ("right", "wrong"):
        with tkernels.init(heap_bytes=8 << 20) as context:
            if mistake == "a signal before its data":
                right = all([signal_first(context, form, name) for name in (AG, RS)])
            elif mistake == "a launch that ends before its copies":
                right = all([ends_early(context, form, name) for name in (AG, RS)])
            elif mistake == "counts of chunks that stay":
                right = all([counts_stay(context, form, name) for name in (AG, RS, AR)])
            elif mistake == "a chunk that is signalled before its last tile":
                right = all([signals_early(context, form, name) for name in (RS, AR)])
            elif "all programs" in mistake:
                right = landing_used_again(context, form, RS, functools.partial(interleaved, landing=True))
            elif "programs" in mistake:
                right = landing_used_again(context, form, AG, functools.partial(into_landing, 1))
            else:
                right = landing_used_again(context, form, AG, by_copies)
            assert all(ctx.group.gather(right)) == (form == "right")


def copied_by_rule(*problem, **options):
    """A configuration by rule, but that the copy engine sends."""
    return dataclasses.replace(overlap_config(*problem, **options), num_comm=0)


@pytest.mark.ranks(2)
def test_the_gathered_rows_come_out_of_the_landing_or_are_borrowed_there(ctx):
    rows = (33, 20)
    x, w, want = operands(ctx, AG, rows, 24, 16, torch.float32, 5)
    config = by_copy_engine(overlap_config(ctx, AG, sum(rows), 24, 16, torch.float32, "TN"), max(rows), x[0].nbytes)
    for how in (True, "borrowed", True, "borrowed"):
        y, gathered = tkernels.all_gather_matmul(x, w, return_gathered=how, rows=rows, config=config, ctx=ctx)
        assert torch.equal(y, want)
        assert torch.equal(gathered.cpu(), torch.cat(ctx.group.gather(x.cpu())))
        assert (ctx.heap.offset(gathered) is None) == (how is True)
    _, gathered = tkernels.all_gather_matmul(x, w, return_gathered="borrowed", rows=rows, path="fused", ctx=ctx)
    assert ctx.heap.offset(gathered) is None  # of two inboxes only the device knows which


@pytest.mark.ranks(2, 4)
def test_gradients_are_multiplied_where_the_gathered_rows_landed(ctx):
    rows = {2: (33, 20), 4: (0, 21, 40, 3)}[ctx.size]
    N, K, own = 24, 16, slice(sum(rows[: ctx.rank]), sum(rows[: ctx.rank + 1]))
    gathers = importlib.import_module(f"tkernels.{AG}")
    with (
        mock.patch.object(fused, "overlap_config", copied_by_rule),
        mock.patch.object(gathers, "_collect", None),  # nothing copies all of the rows
    ):
        ctx.forget_calls()
        for seed in range(2):
            x, w, _ = operands(ctx, RS, rows, N, K, torch.float32, seed)
            bias = torch.ones(N, device=ctx.device)
            dy = integers((sum(rows), N), torch.float32, 50 + seed, -2, 2, device=ctx.device)
            leaves = [tensor.requires_grad_() for tensor in (x, w, bias)]
            y = tkernels.matmul_reduce_scatter(*leaves, rows=rows, ctx=ctx, path="fused")
            late(ctx, seed % ctx.size, 0.02)
            y.backward(dy[own])
            for leaf, want in zip(leaves, (dy @ w, dy.t() @ x, dy.sum(0)), strict=True):
                assert torch.equal(leaf.grad, want), seed
    ctx.forget_calls()


@pytest.mark.ranks(2)
def test_a_workspace_counts_the_landing(ctx):
    with tkernels.init(heap_bytes=64 << 20) as context:
        x, w, want = operands(ctx, RS, (512, 512), 512, 16, torch.bfloat16, 1)
        before = context.workspace().reserve(num_chunks=1).nbytes
        assert torch.equal(by_copies(context, RS, x, w), want)
        workspace = context.workspace()
        assert workspace.nbytes >= before + workspace.landing.nbytes + workspace.scratch.nbytes
        assert workspace.landing.nbytes >= 1024 * 512 * 2 > workspace.scratch.nbytes  # the outbox is the call's own
