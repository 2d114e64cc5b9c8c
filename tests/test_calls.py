"""Calls: one like an earlier one does what that one did, to its own tensors; one unlike it is prepared for itself."""

import functools
import gc
import json
import os
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from transports import without_launches

import tkernels
from tkernels.comm import Context, HeapExhaustedError, TkernelsError, calls, capture, collectives
from tkernels.comm.calls import PreparedCalls, describe
from tkernels.comm.collectives import split_rows
from tkernels.comm.launch import TFLOAT32, PreparedLaunch
from tkernels.configs import GemmConfig, OverlapConfig
from tkernels.testing.compare import integers


def misaligned(tensor):
    """A copy whose memory does not begin at a multiple of 16 bytes."""
    memory = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
    return memory.copy_(tensor)


@pytest.mark.quick
def test_tensors_are_alike_if_a_kernel_can_not_tell_them_apart():
    x = torch.zeros(8, 16)
    assert describe(x) == describe(torch.ones(8, 16)) and describe(None) is None
    unlike = [
        torch.zeros(8, 17), torch.zeros(1, 16), torch.zeros(16, 8).t(), torch.zeros(8, 32)[:, :16], x.half(), x.int(),
        misaligned(x), torch.zeros(8, 16, device="meta"), torch.zeros(128), None,
    ]  # fmt: skip
    described = [describe(tensor) for tensor in [x, *unlike]]
    assert len(set(described)) == len(described)


@pytest.mark.quick
def test_in_step_is_who_has_begun_the_same_call_or_a_later_one():
    first, other, later = (3 << calls.CALL_BITS) + 7, (3 << calls.CALL_BITS) + 8, (4 << calls.CALL_BITS) + 1
    assert calls.in_step([first, first, first], 1) and calls.in_step([later, first, later], 1)
    assert not calls.in_step([later, first, first], 0) and not calls.in_step([first, other, first], 0)


@pytest.mark.quick
def test_the_newest_plans_are_kept_up_to_a_bound(monkeypatch):
    monkeypatch.setattr(calls, "MAX_PREPARED", 8)
    kept, made = PreparedCalls(), []

    def find(key):
        return kept.find((key,), lambda: made.append(key) or f"plan of {key}")

    for key in range(20):
        assert find(key) == find(key) == f"plan of {key}"
        assert len(kept) <= 8
    assert made == list(range(20))
    for key in range(12, 20):
        find(key)
    assert made == list(range(20))
    find(11)
    assert made[20:] == [11]


def test_a_plan_that_can_not_be_made_leaves_nothing():
    kept = PreparedCalls()
    with pytest.raises(ZeroDivisionError):
        kept.find(("key",), lambda: 1 // 0)
    assert len(kept) == 0 and kept.find(("key",), lambda: "plan") == "plan"


def made_by(call) -> int:
    """How many launches a call binds; one that follows another's plan binds none."""
    bound, init = [], PreparedLaunch.__init__

    def watch(launch, *arguments, **options):
        bound.append(launch)
        init(launch, *arguments, **options)

    PreparedLaunch.__init__ = watch
    try:
        call()
    finally:
        PreparedLaunch.__init__ = init
    return len(bound)


@pytest.mark.quick
@pytest.mark.ranks(2)
def test_calls_that_differ_in_anything_but_addresses_have_plans_of_their_own(ctx):
    ctx.forget_calls()
    config = OverlapConfig(GemmConfig(32, 32, 32, group_m=2), 32, 1, put_block=4096)
    x, w, bias = torch.ones(32, 16), torch.ones(24, 16), torch.ones(24)
    x, w, bias = x.to(ctx.device), w.to(ctx.device), bias.to(ctx.device)
    calls = [
        ((x, w), {}),
        ((x, w, bias), {}),
        ((x, w, bias, "relu"), {}),
        ((x, w.t().contiguous().t()), {}),
        ((x, misaligned(w)), {}),
        ((misaligned(x), w), {}),
        ((x.half(), w.half()), {}),
        ((x, w[:1]), {}),
        ((x[:1], w), {}),
        ((x, w, None, None, True), {}),
        ((x, w), {"out": x.new_empty(64, 24)}),
        ((x, w), {"out": misaligned(x.new_empty(64, 24))}),
        ((x, w), {"config": config}),
        ((x, w), {"config": replace(config, chunk_rows=64)}),
        ((x.half(), w.half()), {"out_dtype": torch.float32}),
    ]
    call = functools.partial(tkernels.all_gather_matmul, path="fused", ctx=ctx)
    with mock.patch.object(PreparedLaunch, "__call__", lambda *_: None):  # plans alone: no kernel has to be compiled
        for number, (arguments, options) in enumerate(calls):
            assert made_by(lambda: call(*arguments, **options)) > 0, number  # noqa: B023
            again = [a.clone() if a is x or a is w else a for a in arguments]
            assert made_by(lambda: call(*again, **options)) == 0, number  # noqa: B023


@pytest.mark.ranks(2)
def test_a_call_with_other_tensors_computes_with_those(ctx):
    """Each operation, for sizes that come and go, from memory that is somewhere else in each call."""
    kept = []  # so that no address comes twice
    for turn in range(3):
        for M, N, K in [(40, 24, 32), (7, 24, 32), (1, 1, 5), (40, 24, 32)]:
            rows = split_rows(M, ctx.size)
            seed = 10 * turn + M
            x = [integers((M, K), torch.float32, seed + rank) for rank in range(ctx.size)]
            w = [integers((N, K), torch.float32, 100 + seed + rank) for rank in range(ctx.size)]
            bias = integers(N, torch.float32, seed)
            shard, mine, weight = (t.to(ctx.device) for t in (x[0].split(rows)[ctx.rank], x[ctx.rank], w[ctx.rank]))
            shard, mine, weight = shard.clone(), mine.clone(), weight.clone()
            total = sum(a @ b.t() for a, b in zip(x, w, strict=True))
            kept += [shard, mine, weight]
            pairs = [
                (tkernels.matmul(mine, weight, bias.to(ctx.device)), x[ctx.rank] @ w[ctx.rank].t() + bias),
                (tkernels.all_gather_matmul(shard, weight, rows=rows, ctx=ctx), x[0] @ w[ctx.rank].t()),
                (tkernels.matmul_reduce_scatter(mine, weight, rows=rows, ctx=ctx), total.split(rows)[ctx.rank]),
                (tkernels.matmul_all_reduce(mine, weight, bias.to(ctx.device), ctx=ctx), total + bias),
                (tkernels.all_gather(shard, rows=rows, ctx=ctx), x[0]),
                (tkernels.reduce_scatter(mine, rows=rows, ctx=ctx), sum(x).split(rows)[ctx.rank]),
                (tkernels.all_reduce(mine, ctx=ctx), sum(x)),
                (tkernels.all_gather_matmul(shard, weight, None, None, True, rows=rows, ctx=ctx)[1], x[0]),
            ]
            kept += [got for got, _ in pairs]
            assert [torch.equal(got.cpu(), want) for got, want in pairs] == [True] * len(pairs), (turn, M, N, K)


@pytest.mark.ranks(2)
def test_an_out_that_overlaps_is_refused_by_a_plan_too(ctx):
    whole = torch.zeros(8, 16, device=ctx.device)
    shard = torch.ones(4, 16, device=ctx.device)
    for _ in range(2):
        tkernels.all_gather(shard, out=whole, ctx=ctx)
        tkernels.all_gather(whole[4 * ctx.rank :][:4], out=whole, ctx=ctx)
    with pytest.raises(ValueError, match="overlaps it"):
        tkernels.all_gather(whole[2:6], out=whole, ctx=ctx)
    ctx.group.barrier()


@pytest.mark.ranks(2)
def test_plans_hold_no_tensors_of_calls_and_go_with_their_context(ctx):
    with tkernels.init(ctx.group.process_group, heap_bytes=4 << 20) as context:
        x, w = torch.ones(4, 16, device=ctx.device), torch.ones(8, 16, device=ctx.device)
        bias = torch.ones(8, device=ctx.device)
        seen = [weakref.ref(tensor) for tensor in (x, w, bias)]
        for operation in (tkernels.all_gather_matmul, tkernels.matmul_reduce_scatter, tkernels.matmul_all_reduce):
            operation(x, w, bias, ctx=context)
        for operation in (tkernels.all_gather, tkernels.reduce_scatter, tkernels.all_reduce):
            operation(x, ctx=context)
        tkernels.matmul(x, w, bias)
        del x, w, bias, operation
        assert [reference() for reference in seen] == [None] * 3
        inbox = weakref.ref(context.workspace().inbox)
        assert made_by(lambda: tkernels.barrier(ctx=context)) == 1
        assert made_by(lambda: tkernels.barrier(ctx=context)) == 0
        collectives.all_gather(context, torch.ones(1 << 16, device=ctx.device))  # the workspace grows and moves
        assert made_by(lambda: tkernels.barrier(ctx=context)) == 1
        gc.disable()
    gc.enable()
    assert inbox() is None


def check_gather(ctx, w, call, rows, seed):
    """Collective. `call` of this rank's rows gives the product of every rank's."""
    every = [integers((rows, w.shape[1]), torch.float32, seed + rank, device=ctx.device) for rank in range(ctx.size)]
    y = call(every[ctx.rank].clone())
    assert torch.equal(y, torch.cat(every) @ w.t()), (rows, seed)


@pytest.mark.ranks(2, 3)
def test_a_workspace_grows_under_captures_without_a_meeting_and_all_calls_stay_right(ctx):
    """As if captured, between eager calls of any size: what captures have seen runs again and again, as replays do."""
    w, replays = integers((24, 16), torch.float32, seed=1, device=ctx.device), []
    check = functools.partial(check_gather, ctx, w)
    # Captures have an eighth of it, and on a GPU a workspace has room for more packets from the first call on.
    heap_bytes = (32 if ctx.device.type == "cpu" else 256) << 20
    with tkernels.init(ctx.group.process_group, heap_bytes=heap_bytes) as context:

        def operation(x):
            return tkernels.all_gather_matmul(x, w, path="fused", ctx=context)

        for step, rows in enumerate([40, -40, 900, -40, -2000, 40, 3000, -900]):  # negative: an eager call
            if rows < 0:
                check(operation, -rows, 100 * step)
            else:
                known = {plan for _, plan in replays}
                with without_launches(context, as_if_captured=True):
                    check(operation, rows, 100 * step)
                replays += [(rows, plan) for plan in context.workspace()._captured_calls - known]
            for number, (rows, plan) in enumerate(replays):
                check(lambda x, plan=plan: plan(x, w, None, None, None)[0], rows, 100 * step + 10 * number)
        assert [rows for rows, _ in replays] == [40, 900, 40, 3000] and len(context._workspaces) == 1


MAIN, SIDE, CAPTURE, OTHER = range(4)  # streams


# Streams with eager calls; those that a capture comes to, in order; which two have one workspace then.
SHARED = [
    ([MAIN], [CAPTURE], {(MAIN, CAPTURE)}),
    ([SIDE, MAIN], [CAPTURE], {(MAIN, CAPTURE)}),  # a side stream came first, but replays go to the default one
    ([SIDE], [CAPTURE], {(SIDE, CAPTURE)}),
    ([SIDE, OTHER], [CAPTURE], set()),  # who can tell which of them will replay?
    ([SIDE], [CAPTURE, SIDE, CAPTURE], set()),  # the lender joins the capture
    ([SIDE], [SIDE, CAPTURE], set()),
    ([MAIN, SIDE], [CAPTURE, SIDE, OTHER], {(MAIN, CAPTURE)}),
    ([], [CAPTURE, SIDE], set()),
]


@pytest.mark.ranks(1)
def test_streams_that_may_run_at_the_same_time_share_no_workspace(ctx):
    for eager, captured, shared in SHARED:
        taken, spaces = set(), {}
        with (
            tkernels.init(ctx.group.process_group, heap_bytes=32 << 20) as context,
            mock.patch.object(capture, "taken", taken.__contains__),
        ):
            for number, stream in enumerate((*eager, *captured)):
                if is_captured := number >= len(eager):
                    taken.add(stream)
                with (
                    mock.patch.object(context, "current_stream", lambda stream=stream: stream, create=True),
                    mock.patch.object(Context, "capturing", property(lambda self, yes=is_captured: yes)),
                ):
                    spaces[stream] = context.workspace()  # of a lender the one that it has in the end
            pairs = {(a, b) for a in spaces for b in spaces if a < b and spaces[a] is spaces[b]}
            assert pairs == shared, (eager, captured)


@pytest.mark.ranks(1)
def test_a_second_capture_borrows_of_the_default_stream_as_soon_as_that_has_a_workspace(ctx):
    """torch captures on one stream after the other's warm-up; what replays is the default stream."""
    taken, spaces = set(), []
    with (
        tkernels.init(ctx.group.process_group, heap_bytes=32 << 20) as context,
        mock.patch.object(capture, "taken", taken.__contains__),
    ):
        for stream in (SIDE, CAPTURE, MAIN, CAPTURE, CAPTURE):
            taken.clear()
            taken.update({CAPTURE} & {stream})
            with (
                mock.patch.object(context, "current_stream", lambda stream=stream: stream, create=True),
                mock.patch.object(Context, "capturing", property(lambda self, yes=bool(taken): yes)),
            ):
                spaces.append(context.workspace())
    side, first, main, second, third = spaces
    assert first is side and second is third is main is not side


@pytest.mark.ranks(2)
def test_what_a_capture_outgrows_is_given_back_when_ranks_meet_next(ctx):
    w = torch.ones(24, 16, device=ctx.device)
    with tkernels.init(ctx.group.process_group, heap_bytes=4 << 20) as context:

        def call(rows):
            y = tkernels.all_gather_matmul(torch.ones(rows, 16, device=ctx.device), w, path="fused", ctx=context)
            assert y.eq(16.0).all() and y.shape == (2 * rows, 24)
            return len(context.heap._held)

        at_first = call(40)
        with without_launches(context, as_if_captured=True):
            assert call(900) == at_first + 1
        assert call(40) == at_first + 1
        assert call(2000) == at_first + 1  # what was captured, and the newest


@pytest.mark.ranks(2)
def test_what_a_graph_was_captured_with_is_left_to_it_by_larger_calls(ctx):
    """As if captured: a plan that a capture has seen runs again and again, as replays do, between calls of any size."""
    as_if_captured = mock.patch.object(Context, "capturing", property(lambda self: True))
    rows, K = 40, 16
    w = integers((24, K), torch.float32, seed=1, device=ctx.device)
    check = functools.partial(check_gather, ctx, w)
    with tkernels.init(ctx.group.process_group, heap_bytes=4 << 20) as context:

        def eager(x):
            return tkernels.all_gather_matmul(x, w, path="fused", ctx=context)

        def replayed(x):
            return captured()(x, w, None, None, None)[0]

        check(eager, rows, 0)
        with as_if_captured:
            check(eager, rows, 10)
            with pytest.raises(TkernelsError, match="memory that no call has used before.* before the capture"):
                eager(torch.ones(30000, K, device=ctx.device))
        workspace, left = context.workspace(), context.workspace().inbox
        captured = weakref.ref(*workspace._captured_calls)  # a graph holds none either
        for turn, size in enumerate([rows, 900, rows, 2000, 900, rows]):
            check(eager, size, 100 * turn)
            ctx.group.barrier()
            left.fill_(0xFF), workspace.inbox.fill_(0xFF)
            ctx.group.barrier()
            for replay in range(turn % 2 + 1):
                check(replayed, rows, 100 * turn + 50 + 10 * replay)
        # Faults, the graph's memory, the newest and the rest for captures are held; what lay between is free again.
        assert len(context.heap._held) == 4
        with pytest.raises(HeapExhaustedError):
            eager(torch.ones(30000, K, device=ctx.device))
        check(eager, 2000, 7), check(replayed, rows, 8)


@pytest.fixture(scope="module")
def asked_of_the_driver(tmp_path_factory):
    output = tmp_path_factory.mktemp("launches") / "facts.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("prepared_launches.py")
    done = subprocess.run(
        [sys.executable, script, output], env=environment | {"TKERNELS_RUNTIME": "nvshmem"}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text())


@pytest.mark.compile
def test_a_prepared_launch_asks_the_driver_for_what_a_plain_one_does(asked_of_the_driver):
    assert len(asked_of_the_driver) == 9
    for name, facts in asked_of_the_driver.items():
        assert facts["same_launch"], name
        assert facts["prepared"] == facts["plain"], name
        assert facts["encoded_again"] == 0, name  # descriptors of addresses that were seen before
        assert facts["launchers"] <= 1, name  # no C compiler runs a second time
    assert sum("descriptor" in str(facts["prepared"]) for facts in asked_of_the_driver.values()) == 5


FLOAT32, BFLOAT16 = 7, 9  # as CUtensorMapDataType numbers them


@pytest.mark.compile
def test_rounded_to_tf32_has_tma_round_what_is_multiplied_and_nothing_else(asked_of_the_driver):
    for name, types in (("matmul as TF32", [TFLOAT32, TFLOAT32, FLOAT32]), ("matmul", [BFLOAT16] * 3)):
        *_, parameters = asked_of_the_driver[name]["prepared"]
        descriptors = [value for value in parameters if isinstance(value, list)]
        assert [int(of_elements) for _, _, _, _, of_elements, *_ in descriptors] == types, name


@pytest.mark.compile
def test_launch_hooks_see_prepared_launches(asked_of_the_driver):
    for facts in asked_of_the_driver.values():
        assert len(facts["hooked"]) == 1 and facts["hooked"][0].endswith("_kernel")


@pytest.mark.compile
def test_a_kernel_for_aligned_tensors_is_not_given_others(asked_of_the_driver):
    checked = [facts for facts in asked_of_the_driver.values() if "misaligned" in facts]
    assert len(checked) == 3
    for facts in checked:
        *_, parameters = facts["misaligned"]
        assert set(facts["addresses"]) <= {value for value in parameters if isinstance(value, int)}
    # Pointers to 33 columns and to 5 were compiled for as aligned; other kernels were needed.
    assert all(facts["kernels_for_misaligned"] == 1 for facts in checked)
