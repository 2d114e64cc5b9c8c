"""Contexts: made and given back any number of times, over any group of ranks; and waits that end with a reason."""

import concurrent.futures
import contextlib
import copy
import functools
import gc
import json
import mmap
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transports import (
    TRANSPORTS,
    every_transport,
    expire_after,
    message_on_every_rank,
    over,
    simulated_only,
    starts_ranks,
)

import tkernels
from tkernels import layers
from tkernels.comm import (
    Channel,
    Context,
    Fault,
    HeapExhaustedError,
    MismatchError,
    OutOfStepError,
    TkernelsError,
    WaitTimeoutError,
    as_context,
    collectives,
    contexts,
    current_context,
    find_context,
    runtime,
    simulated_runtime,
)
from tkernels.comm import group as meetings
from tkernels.comm.collectives import all_reduce
from tkernels.comm.context import _options
from tkernels.testing.compare import integers


def resources():
    """What a leak would add to: open files, mapped segments, memory of the GPU."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        segments = sum("memfd:tkernels" in line for line in maps)
    memory = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
    return {"files": len(os.listdir("/proc/self/fd")), "segments": segments, "memory": memory}


def resources_before():
    """Collective. `resources`, without what earlier tests have abandoned, which the next init frees."""
    tkernels.init(heap_bytes=1 << 20).finalize()
    return resources()


def check_gather(context, value=0.0):
    """Collective. An operation over the context gives the ranks' own values in their order."""
    mine = torch.full((3, 5), value + context.rank, device=context.device)
    gathered = tkernels.all_gather(mine, ctx=context)
    context.check()  # before what a wait that has ended early would leave is looked at
    assert gathered[::3, 0].tolist() == [value + rank for rank in range(context.size)]


@pytest.mark.ranks(2)
def test_what_ranks_abandon_at_different_times_is_given_back_where_they_meet_next(ctx):
    tkernels.init(heap_bytes=4 << 20).finalize()
    before = resources_before()
    context, counted = tkernels.init(heap_bytes=4 << 20, default=False), []
    assert len(set(ctx.group.gather(context.name))) == 1
    for rank in range(2):
        if ctx.rank == rank:
            context.abandon()  # meets nobody
            context.abandon()
            with pytest.raises(TkernelsError, match="has been finalized"):
                find_context(context.name)
        ctx.group.barrier()
        tkernels.init(heap_bytes=4 << 20, default=False).finalize()
        counted.append(resources()["segments"])
    context.finalize()  # nothing is left to do
    del context
    assert resources() == before and counted[0] - counted[1] == (ctx.runtime == "simulated")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("warm", [False, True], ids=["in the first call", "in a later call"])
def test_init_starts_afresh_after_an_exception_of_one_rank_wherever_the_others_wait(ctx, warm):
    """In a first call the others wait on the host: one init of the rank that failed tells them, and the next meets."""
    for fails in (True, False):
        try:
            with tkernels.init(heap_bytes=4 << 20, default=False) as context:
                if warm:
                    check_gather(context)
                if fails and ctx.rank == 1:
                    raise ZeroDivisionError
                check_gather(context, 5.0)
        except (ZeroDivisionError, TkernelsError) as error:
            assert fails and isinstance(error, ZeroDivisionError) == (ctx.rank == 1)
        else:
            assert not fails


@pytest.mark.ranks(2)
def test_init_and_finalize_twenty_times_leave_nothing_behind(ctx):
    def once(round):
        with tkernels.init(heap_bytes=4 << 20) as context:
            kept = context.empty(100)
            kept.fill_(1.0)
            check_gather(context, 10.0 * round)

    once(0)  # what is made once a process, such as compiled kernels
    before = resources_before()
    for round in range(20):
        once(round)
    assert resources() == before


@pytest.mark.ranks(2)
def test_simulated_memory_has_no_name_in_the_file_system(ctx):
    if ctx.runtime != "simulated":
        pytest.skip("the nvshmem runtime and NCCL have files of their own")
    check_gather(ctx)
    with open("/proc/self/maps") as maps:  # other packages, once imported, hold named semaphores
        assert not [line for line in maps if "/dev/shm" in line and "/dev/shm/sem." not in line]
    opened = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    assert not [path for path in opened if os.path.lexists(path) and "/dev/shm" in os.readlink(path)]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "groups", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 3], [1, 2], [2, 3]], [[3]]], ids=str
)
def test_sub_groups_work_side_by_side(ctx, groups):
    made = [dist.new_group(ranks) for ranks in groups]
    contexts = {}
    for number, (ranks, group) in enumerate(zip(groups, made, strict=True)):
        if ctx.rank in ranks:
            contexts[number] = tkernels.init(group, heap_bytes=4 << 20)
    for round in range(2):
        for number, context in contexts.items():
            assert (context.rank, context.size) == (groups[number].index(ctx.rank), len(groups[number]))
            mine = torch.full((2, 3), 10.0 * round + ctx.rank, device=ctx.device)
            gathered = tkernels.all_gather(mine, ctx=context)
            assert gathered[::2, 0].tolist() == [10.0 * round + rank for rank in groups[number]]
            x, w = integers((4, 8), torch.float32, ctx.rank, device=ctx.device), torch.eye(8, device=ctx.device)
            want = sum(integers((4, 8), torch.float32, rank) for rank in groups[number])
            assert tkernels.matmul_all_reduce(x, w, ctx=context).cpu().equal(want)
    check_gather(ctx)  # the whole group's context is untouched
    for context in contexts.values():
        context.finalize()
    for group in made:
        dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_any_backend_of_torch_distributed_bootstraps(ctx):
    for backend in ["gloo"] + ["nccl"] * (ctx.runtime == "nvshmem" and not runtime.shares_gpus()):
        group = dist.new_group([0, 1], backend=backend)
        with tkernels.init(group, heap_bytes=4 << 20) as context:
            check_gather(context)
        dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_torchs_default_device_changes_nothing(ctx):
    with torch.device("meta"), tkernels.init(ctx.group.process_group, heap_bytes=4 << 20) as context:
        check_gather(context)
        assert context.on_device([1, 2, 4]).tolist() == [1, 2, 4]


@pytest.mark.ranks(2)
def test_a_rank_outside_the_group_is_refused(ctx):
    group = dist.new_group([1])
    if ctx.rank == 0:
        with pytest.raises(ValueError, match="rank 0 is not a member of the group"):
            tkernels.init(group)
    else:
        tkernels.init(group, heap_bytes=1 << 20).finalize()
        dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_a_meeting_that_fails_is_named_with_the_line_of_the_program(ctx):
    with mock.patch.object(meetings.Group, "_all_gather", side_effect=RuntimeError("Connection closed by peer")):
        told = r"heap.empty \(.*test_context.py:\d+\): the ranks can't meet, .*: Connection closed by peer$"
        with pytest.raises(TkernelsError, match=told):
            ctx.empty(3)
    ctx.free(ctx.empty(3))


@simulated_only
@pytest.mark.ranks(2)
def test_a_kernel_that_is_left_by_an_exception_makes_its_context_useless(ctx):
    in_chunks = collectives.CollectiveConfig(0, 0, 0)

    def gather(context):
        return collectives.all_gather(context, torch.full((3,), float(ctx.rank)), config=in_chunks)

    context = tkernels.init(ctx.group.process_group, heap_bytes=4 << 20)
    gather(context)
    expire_after(context, 1.0)
    if ctx.rank == 0:
        with mock.patch.object(collectives, "chunk_count", None), pytest.raises(Exception, match="NoneType"):
            gather(context)
        for _ in range(2):
            with pytest.raises(TkernelsError, match=f"{context.name} was interrupted by TypeError: .* out of step"):
                gather(context)
    else:
        with pytest.raises(WaitTimeoutError):
            gather(context)
    context.finalize()
    with tkernels.init(ctx.group.process_group, heap_bytes=4 << 20) as context:
        assert gather(context).tolist() == [0.0] * 3 + [1.0] * 3


@pytest.mark.ranks(2)
def test_init_a_rank_that_leaves_its_block_with_an_error_is_named_where_a_peer_waits(ctx):
    shard = torch.full((3,), float(ctx.rank), device=ctx.device)
    error, message = (TkernelsError, "rank 0 has failed: KeyError: 'mine'. The") if ctx.rank else (KeyError, "mine")
    with pytest.raises(error, match=message):
        with tkernels.init(ctx.group.process_group, heap_bytes=4 << 20) as own:
            tkernels.all_gather(shard, ctx=own)
            if ctx.rank == 0:
                raise KeyError("mine")
            tkernels.all_gather(shard, ctx=own)
            own.check()


@pytest.mark.ranks(2)
def test_init_a_rank_that_exits_its_block_without_an_error_ends_no_peers_waits(ctx):
    with pytest.raises(SystemExit), tkernels.init(ctx.group.process_group, heap_bytes=4 << 20) as own:
        if ctx.rank == 0:
            sys.exit()
        ctx.group.barrier()
        own.check()
        sys.exit(0)
    if ctx.rank == 0:
        ctx.group.barrier()


@pytest.mark.ranks(2)
def test_fail_leaves_the_error_of_a_device_that_answers_no_more(ctx):
    own, lost = tkernels.init(ctx.group.process_group, heap_bytes=4 << 20), RuntimeError("of the device")
    with mock.patch.object(Context, "failed", mock.PropertyMock(side_effect=lost)), pytest.raises(KeyError), own:
        raise KeyError("mine")
    with pytest.raises(TkernelsError, match="is not open"):
        find_context(own.name)


def calls_that_differ(ctx):
    """(a call of this rank that another one's doesn't fit, what is raised, what it says)"""
    x, w = torch.zeros((8, 10)[ctx.rank], 16, device=ctx.device), torch.zeros(8, 16, device=ctx.device)
    by_rank = torch.bfloat16, torch.float16
    ones = torch.ones(8, 16, dtype=by_rank[ctx.rank], device=ctx.device)
    bias = (torch.zeros(8, device=ctx.device), None)[ctx.rank]
    path = ("fused", "plain")[ctx.rank]
    return {
        "rows": (lambda own: tkernels.all_gather_matmul(x, w, ctx=own), MismatchError,
                 r"all_gather_matmul: .* rows by rank: \(8, 8\), \(10, 10\); all .* same, or, .* rows=\(8, 10\)$"),
        "M": (lambda own: tkernels.matmul_reduce_scatter(x, w, ctx=own), MismatchError,
              "matmul_reduce_scatter: the ranks' calls differ, in M by rank: 8, 10; rows .*; all must pass the same$"),
        "K": (lambda own: tkernels.all_gather_matmul(w[:, : 8 + 8 * ctx.rank], w[:, : 8 + 8 * ctx.rank], ctx=own),
              MismatchError, "in K by rank: 8, 16"),
        "dtype": (lambda own: tkernels.all_reduce(ones, ctx=own), MismatchError,
                  "all_reduce: .* dtype by rank: torch.bfloat16, torch.float16"),
        "bias": (lambda own: tkernels.matmul_all_reduce(w, w, bias, ctx=own), MismatchError,
                 "matmul_all_reduce: .* bias by rank: True, False"),
        "path": (lambda own: tkernels.matmul_all_reduce(w, w, ctx=own, path=path), MismatchError,
                 "path by rank: fused, plain"),
        "path, left out": (lambda own: tkernels.all_gather_matmul(w, w, ctx=own, path=("plain", None)[ctx.rank]),
                           MismatchError, "path by rank: plain, None"),
        "out_dtype": (lambda own: all_reduce(own, w, out_dtype=(torch.bfloat16, None)[ctx.rank]), MismatchError,
                      "out_dtype by rank: torch.bfloat16, torch.float32"),
        "max_programs": (lambda own: all_reduce(own, w, max_programs=(1, 4)[ctx.rank]), MismatchError,
                         "max_programs by rank: 1, 4"),
        "operation": (lambda own: (tkernels.all_gather, tkernels.all_reduce)[ctx.rank](w, ctx=own), OutOfStepError,
                      "rank 0 is in all_gather .*test_context.py.*; rank 1 is in all_reduce "),
    }  # fmt: skip


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "case", ["rows", "M", "K", "dtype", "bias", "path", "path, left out", "out_dtype", "max_programs", "operation"]
)
def test_calls_that_differ_between_ranks_are_named_where_ranks_compare_them(ctx, case):
    call, error, message = calls_that_differ(ctx)[case]
    with tkernels.init(ctx.group.process_group, heap_bytes=8 << 20, compare_calls=True) as own:
        for _ in range(2):
            tkernels.all_reduce(torch.ones(4000, device=ctx.device), ctx=own)  # makes room for what comes
            with pytest.raises(error, match=message):
                call(own)
        assert tkernels.all_reduce(torch.ones(1, device=ctx.device), ctx=own).item() == 2.0


@pytest.mark.ranks(2)
def test_a_first_call_that_differs_between_ranks_is_named_where_they_meet_anyway(ctx):
    rows = torch.zeros((300, 200)[ctx.rank], 64, device=ctx.device)
    with tkernels.init(ctx.group.process_group, heap_bytes=16 << 20) as own:
        with pytest.raises(MismatchError, match=r"all_gather_matmul: the ranks' calls differ, .* rows=\(300, 200\)$"):
            tkernels.all_gather_matmul(rows, rows[:8], ctx=own)
        with pytest.raises(OutOfStepError, match="rank 0 is in reduce_scatter .*; rank 1 is in all_reduce "):
            (tkernels.reduce_scatter, tkernels.all_reduce)[ctx.rank](torch.zeros(1 << 20, device=ctx.device), ctx=own)


@pytest.mark.ranks(2)
def test_a_call_that_differs_is_named_though_the_workspace_grows_on_one_rank_alone(ctx):
    w = torch.zeros(8, 64, device=ctx.device)
    with tkernels.init(ctx.group.process_group, heap_bytes=16 << 20, timeout_s=20) as own:
        tkernels.all_gather_matmul(w, w, path="fused", ctx=own)
        rows = torch.zeros((8, 6000)[ctx.rank], 64, device=ctx.device)
        with pytest.raises(MismatchError, match=r"differ, in rows: \(8, 8\) on rank 0, \(6000, 6000\) on rank 1"):
            tkernels.all_gather_matmul(rows, w, path="fused", ctx=own)
            own.check()
        if ctx.rank == 0:  # the other one waits on the host
            with pytest.raises(OutOfStepError):
                ctx.group.barrier()


def mismatches():
    """{what differs: (the call of this rank on a context that is in use, what every rank is told)}"""

    def ones(ctx, *shape, dtype=torch.float32):
        return torch.ones(shape, dtype=dtype, device=ctx.device)

    def reduce(own, size, dtype=torch.float32, **config):
        return all_reduce(own, ones(own, size, dtype=dtype), config=collectives.CollectiveConfig(**config))

    def product(own, bias=False, activation=None, path="fused"):
        x, w = ones(own, 8, 8), ones(own, 5, 8)
        tkernels.matmul_all_reduce(x, w, ones(own, 5) if bias else None, activation, path=path, ctx=own)

    def skip(own):
        tkernels.barrier(ctx=own)  # compiled: rank 0 has 10 s to name its call, once rank 1 has noticed
        if own.rank == 0:
            reduce(own, 64)
        tkernels.barrier(ctx=own)

    no_packets = collectives.CollectiveConfig(packet_bytes=0)
    chunks = dict(lamport_bytes=0)
    copies = dict(copy_bytes=0)
    activation = "matmul_all_reduce: the ranks' calls differ, in activation: relu on rank 0, gelu on rank 1"
    rows = r"the ranks' calls differ, in rows: \(4, 4\) on rank 0, \(6, 6\) on rank 1; all must pass the same"
    return {
        "operation": (lambda own: (tkernels.all_reduce, tkernels.reduce_scatter)[own.rank](ones(own, 64), ctx=own),
                      r"rank 0 is in all_reduce\(.*; rank 1 is in reduce_scatter\(.*; all must make the same calls"),
        "operation by packets or not": (
            lambda own: reduce(own, 64) if own.rank else collectives.all_gather(own, ones(own, 64), config=no_packets),
            r"rank 0 is in all_gather\(.*; rank 1 is in all_reduce\("),
        "barrier": (lambda own: tkernels.barrier(ctx=own) if own.rank else tkernels.all_gather(ones(own, 64), ctx=own),
                    r"rank 0 is in all_gather\(.*; rank 1 is in barrier\("),
        "skipped": (skip, r"rank 0 is in all_reduce\(.*; rank 1 is in barrier\("),
        "dtype": (lambda own: reduce(own, 64, (torch.float32, torch.bfloat16)[own.rank]),
                  r"all_reduce: .* dtype: torch.float32 on rank 0, torch.bfloat16 on rank 1; "),
        "shape": (lambda own: reduce(own, (40, 48)[own.rank]), r"all_reduce: .* in shape: \(40,\) on rank 0, \(48,\)"),
        "shape, in chunks": (lambda own: reduce(own, (40, 1000)[own.rank], **chunks), r"in shape: \(40,\) on rank 0, "),
        "shape, by the copy engine": (lambda own: reduce(own, (40, 48)[own.rank], **copies), r"in shape: \(40,\) on"),
        "way of sending": (lambda own: reduce(own, 64, **(chunks, copies)[own.rank]),
                           r"in config: CollectiveConfig\(lamport_bytes=0\) on rank 0, CollectiveConfig\(copy_b"),
        "rows": (lambda own: tkernels.all_gather(ones(own, (4, 6)[own.rank], 8), ctx=own), rows),
        "rows of a product": (
            lambda own: tkernels.all_gather_matmul(ones(own, (4, 6)[own.rank], 8), ones(own, 5, 8), ctx=own), rows),
        "rows, of which a rank has none": (
            lambda own: tkernels.all_gather(ones(own, 1 - own.rank, 8), ctx=own), r"\(1, 1\) on rank 0, \(0, 0\) on"),
        "rows of a product, of which a rank has none": (
            lambda own: tkernels.matmul_reduce_scatter(ones(own, (2, 0)[own.rank], 8), ones(own, 5, 8), ctx=own),
            r"matmul_reduce_scatter: the ranks' calls differ, in M: 2 on rank 0, 0 on rank 1"),
        "shape, of which a rank has nothing": (
            lambda own: reduce(own, 40 * own.rank), r"in shape: \(0,\) on rank 0, \(40,\)"),
        "bias": (lambda own: product(own, bias=own.rank == 0), r"in bias: True on rank 0, False on rank 1"),
        "activation": (lambda own: product(own, activation=("relu", "gelu")[own.rank]), activation),
        "activation of a plain product": (
            lambda own: product(own, activation=("relu", "gelu")[own.rank], path="plain"), activation),
    }  # fmt: skip


@pytest.mark.ranks(2)
@every_transport
def test_mismatch_error_names_calls_of_a_warm_context_that_differ_on_every_rank(ctx, transport):
    for what, (call, message) in mismatches().items():
        if ctx.transport == "nvshmem" and "copy" in what:
            continue  # whose kernels don't use the copy engine
        context = tkernels.init(transport=transport, heap_bytes=64 << 20, timeout_s=30.0)
        ways = [{}, {"lamport_bytes": 0}, {"copy_bytes": 0}]
        for options in ways[: 3 if re.search("copy|sending", what) else 2]:  # makes room for what comes
            all_reduce(context, torch.ones(1000, device=ctx.device), config=collectives.CollectiveConfig(**options))
        context.check()
        with pytest.raises(MismatchError, match=message) as caught:
            call(context)
            context.check()
            pytest.fail(f"{what}: nobody noticed")
        assert "finalize() it and init() a new one" in message_on_every_rank(ctx, caught.value), what
        with pytest.raises(MismatchError, match=message):
            tkernels.barrier(ctx=context)  # the context is of no more use
        context.finalize()
    with tkernels.init(heap_bytes=8 << 20) as fresh:
        check_gather(fresh)


@pytest.mark.ranks(2)
def test_barrier_that_a_rank_skips_names_the_epochs_of_the_wait(ctx):
    with tkernels.init(heap_bytes=8 << 20, default=False) as context:
        check_gather(context)
        context.check()
        expire_after(context, 1.0)
        if ctx.rank == 0:
            with pytest.raises(WaitTimeoutError, match="barrier: rank 0 waited .* rank 1") as caught:
                tkernels.barrier(ctx=context)
                context.check()
            assert (caught.value.expected, caught.value.seen) == (2, 1)
            assert "Rank 1 waits for it on the host, in " in str(caught.value)
        ctx.group.barrier()
        with pytest.raises(WaitTimeoutError):
            context.check()


@pytest.mark.ranks(2)
def test_init_compare_calls_ends_with_the_limit_and_names_the_rank_that_is_missing(ctx):
    context = tkernels.init(heap_bytes=32 << 20, compare_calls=True)
    assert context.group.limit_s == context.timeout_s
    x = torch.ones(2 << 20, device=ctx.device)
    for size in (64, len(x)):  # the larger one meets for memory before it compares
        tkernels.all_gather(x[:8], ctx=context)
        if ctx.rank == 1:
            ctx.group.barrier()  # behind the end of rank 0's wait
        missing = r"rank 0 is in all_reduce \(.*; rank 1 is in no call for 0.5 s"
        short = 0.5 if ctx.rank == 0 else context.timeout_s  # of the call that fails alone: others may take longer
        with mock.patch.object(context.group, "limit_s", short):
            with pytest.raises(OutOfStepError, match=missing) as caught:
                tkernels.all_reduce(x[:size], ctx=context)
        if ctx.rank == 0:
            ctx.group.barrier()
        message = message_on_every_rank(ctx, caught.value)
        assert re.search(rf"for 0.5 s \(last in a.* \({re.escape(__file__)}:\d+\)\)", message)
    assert tkernels.all_reduce(x[:8], ctx=context).tolist() == [2.0] * 8
    context.finalize()


@pytest.mark.quick
@pytest.mark.ranks(1)
def test_context_is_shared_by_copies_and_refuses_to_be_pickled(ctx):
    assert copy.deepcopy({"ctx": ctx})["ctx"] is copy.copy(ctx) is ctx
    with pytest.raises(TypeError, match=r"Context\(.*: rank 0 of 1, .* can't be pickled: .* make its own by init"):
        pickle.dumps({"ctx": ctx})


@pytest.mark.quick
@pytest.mark.ranks(2)
def test_options_that_differ_between_ranks_are_refused_on_every_rank(ctx):
    before = resources_before()
    for options, told in [
        ({"num_programs": 3 + ctx.rank}, "num_programs by rank: 3, 4"),
        ({"timeout_s": 1.5 + ctx.rank}, "timeout_s by rank: 1.5, 2.5"),
        ({"transport": TRANSPORTS[0] if ctx.rank else "auto"}, f"transport by rank: auto, {TRANSPORTS[0]}"),
    ]:
        with pytest.raises(MismatchError) as e:
            tkernels.init(heap_bytes=1 << 20, **options)
        assert told in message_on_every_rank(ctx, e.value)
    assert resources() == before


@pytest.mark.parametrize("pool, heap", [(None, 2 << 30), (1 << 30, 1 << 30)])
def test_init_takes_no_larger_heap_than_the_pool_unless_it_is_told(pool, heap, monkeypatch):
    monkeypatch.setattr(runtime, "RUNTIME", "nvshmem")
    monkeypatch.delenv("TKERNELS_POOL_BYTES", raising=False)
    if pool is not None:
        monkeypatch.setenv("TKERNELS_POOL_BYTES", str(pool))
    assert _options("auto", 60.0, 4, None, None)["heap_bytes"] == heap
    assert _options("auto", 60.0, 4, 3 << 30, None)["heap_bytes"] == 3 << 30


@pytest.mark.ranks(2)
def test_options_that_make_no_sense_are_refused_by_name(ctx, monkeypatch):
    with pytest.raises(ValueError, match="init: timeout_s=0 must be positive"):
        tkernels.init(timeout_s=0)
    with pytest.raises(ValueError, match="init: num_programs=0 must be at least 1"):
        tkernels.init(num_programs=0)
    with pytest.raises(ValueError, match="timeout_s=inf must be positive, and at most 1e.09, or 30 years"):
        tkernels.init(timeout_s=float("inf"))
    with pytest.raises(TypeError, match="timeout_s='60' must be a number"):
        tkernels.init(timeout_s="60")
    with pytest.raises(TypeError, match="heap_bytes=8000000.0 must be a whole number"):
        tkernels.init(heap_bytes=8e6)
    with pytest.raises(ValueError, match="transport='rdma' is unknown; use auto, simulated, peer, nvshmem"):
        tkernels.init(transport="rdma")
    elsewhere = "peer" if ctx.runtime == "simulated" else "simulated"
    before = resources_before()
    with pytest.raises(ValueError, match=f"'{elsewhere}' can't reach every rank on the {ctx.runtime} runtime; usable"):
        tkernels.init(transport=elsewhere, heap_bytes=1 << 20)
    assert resources() == before
    for name, wrong, said in (
        ("transport", ["peer"], r"transport=\['peer'\] must be a name"),
        ("num_programs", None if ctx.rank else 2.5, "num_programs=2.5 must be a whole number"),  # of one rank alone
        ("default", "False" if ctx.rank else True, "default='False' must be True or False"),
        ("group", "world", "group='world' must be .* torch.distributed, a DeviceMesh of one dimension, or"),
    ):
        with pytest.raises(TypeError, match=f"init: {said}") as refused:
            tkernels.init(**{name: wrong})
        message_on_every_rank(ctx, refused.value)
    for name, wrong, said in (
        ("TKERNELS_POOL_BYTES", "8GiB", "='8GiB' is not an integer"),
        ("TKERNELS_POOL_BYTES", "-1", "=-1 must be at least 1"),
        ("TKERNELS_SHARE_GPUS", "all", "='all' is neither on .* nor off"),
    ):
        with mock.patch.dict(os.environ, {name: wrong} if ctx.rank else {}):
            with pytest.raises(ValueError, match=f"^{name}{said}") as refused:
                tkernels.init()
        message_on_every_rank(ctx, refused.value)
    check_gather(ctx)


@pytest.mark.ranks(2)
def test_init_raises_on_every_rank_where_the_memory_of_one_fails(ctx, monkeypatch):
    tkernels.init(heap_bytes=1 << 20).finalize()  # gives back what earlier local calls have kept
    before = resources_before()
    failing = [(Context, "make_table", r"made: RuntimeError: out of memory. Is the device's memory full\? ")]
    if ctx.runtime == "simulated":
        calls = (os, "memfd_create"), (os, "ftruncate"), (mmap, "mmap")
        failing += [(*call, "out of memory. .*smaller heap_bytes.*") for call in calls]

    def fail(*_):
        raise RuntimeError("out of memory")

    for owner, name, said in failing:
        with monkeypatch.context() as patch:
            if ctx.rank == 1:
                patch.setattr(owner, name, fail)
            with pytest.raises(TkernelsError, match=rf"^init: .*{said}\(on rank 1\)$") as failed:
                tkernels.init(heap_bytes=1 << 20)
            message_on_every_rank(ctx, failed.value)
            del failed  # and with it the frames that hold what was mapped
    if ctx.runtime == "simulated":
        with pytest.raises(ValueError, match=r"init: heap_bytes=10\S* must be at most"):
            tkernels.init(heap_bytes=10**30)
    assert resources() == before
    check_gather(ctx)


@pytest.mark.ranks(2)
@simulated_only
def test_a_rank_of_another_runtime_and_more_memory_than_there_is_are_refused_on_every_rank(ctx, monkeypatch):
    if ctx.rank == 1:
        monkeypatch.setattr(runtime, "RUNTIME", "nvshmem")
        monkeypatch.setattr(runtime, "device", lambda: ctx.device)
        monkeypatch.setattr(runtime, "default_programs", lambda: 4)
    with pytest.raises(MismatchError) as different:
        tkernels.init(heap_bytes=1 << 20)
    monkeypatch.undo()
    assert "runtime by rank: simulated, nvshmem" in message_on_every_rank(ctx, different.value)
    before = resources_before()
    with pytest.raises(RuntimeError, match="could not map .*: OSError: .*pass a smaller heap_bytes") as too_much:
        tkernels.init(heap_bytes=1 << 55)
    message_on_every_rank(ctx, too_much.value)
    assert resources() == before


@pytest.mark.ranks(2)
def test_a_finalized_context_says_so_and_holds_nothing(ctx):
    group = dist.new_group([0, 1])
    context = tkernels.init(group, heap_bytes=4 << 20)
    x, kept = torch.ones(3, device=ctx.device), context.empty(100)
    channel = Channel(context, 1 - ctx.rank, 1 - ctx.rank, slot_bytes=256)
    calls = {
        "all_gather": lambda: collectives.all_gather(context, x),
        "send": lambda: channel.send(x),
        "barrier": context.barrier,
        "empty": lambda: context.empty(4),
        "check": context.check,
    }
    calls["all_gather"]()
    assert not context.closed
    context.finalize()
    assert context.closed
    for name, call in calls.items():
        with pytest.raises(TkernelsError, match="has been finalized; init.. a new one"):
            call()
            pytest.fail(f"{name} did not notice")
    context.free(kept)  # nothing is left to do
    channel.close()
    held = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert held() is None


@pytest.mark.ranks(2)
def test_the_newest_context_that_is_open_is_the_default(ctx):
    older = tkernels.init(heap_bytes=1 << 20)
    newer = tkernels.init(heap_bytes=1 << 20)
    assert tkernels.current_context() is newer and find_context(older.name) is older
    assert tkernels.all_gather(torch.full((2,), float(ctx.rank), device=ctx.device)).tolist() == [0.0, 0.0, 1.0, 1.0]
    tkernels.finalize()
    assert tkernels.current_context() is older
    older.finalize()
    older.finalize()  # once more changes nothing
    with pytest.raises(TkernelsError, match=f"context '{older.name}' is not open: it has been finalized"):
        tkernels.all_gather(torch.zeros(2, device=ctx.device), ctx=older)


@pytest.mark.ranks(2)
def test_as_context_finds_or_makes_the_context_of_a_mesh_or_group(ctx):
    mesh = init_device_mesh(ctx.device.type, (1, 2), mesh_dim_names=("dp", "tp"))
    default, tp, dp = current_context(), as_context(mesh["tp"]), as_context(mesh["dp"])
    assert tp is default and (dp.size, dp.rank) == (1, 0) and current_context() is default
    for ranks in (mesh["dp"], mesh["dp"].get_group(), dp):
        assert as_context(ranks) is dp
    one = torch.ones(3, device=ctx.device)
    assert torch.equal(tkernels.all_reduce(one, ctx=mesh["tp"]), 2 * one)
    assert torch.equal(tkernels.all_reduce(one, ctx=mesh["dp"]), one)
    with tkernels.init(mesh["dp"], heap_bytes=1 << 20, default=False) as own:
        assert as_context(mesh["dp"]) is own
        own.shared = False
    with tkernels.init(mesh["dp"], heap_bytes=1 << 20) as own:
        own.shared = False  # before anybody has looked for it
        assert own.size == 1 and as_context(mesh["dp"]) is dp
    with pytest.raises(ValueError, match="all_reduce: ctx: the mesh has 2 dim.*pass one of them, as mesh.*_flat"):
        tkernels.all_reduce(one, ctx=mesh)
    with pytest.raises(ValueError, match="the mesh has 2 dimensions, None; make it with mesh_dim_names="):
        tkernels.all_reduce(one, ctx=init_device_mesh(ctx.device.type, (1, 2)))
    with pytest.raises(ValueError, match=r"^parallelize: mesh: .* the ranks \[1, 0\], in another order than their"):
        layers.parallelize(torch.nn.Linear(2, 2), {}, DeviceMesh(ctx.device.type, [1, 0]))
    for alone in (dist.new_group([0]), DeviceMesh(ctx.device.type, [0])):
        if ctx.rank == 1:
            with pytest.raises(ValueError, match="^mesh: rank 1 is not one of these ranks; call it on those alone"):
                as_context(alone)
        else:
            assert as_context(alone) is dp
    tkernels.finalize(mesh["dp"])
    tkernels.finalize(mesh["dp"])  # there is none any more
    assert dp.closed


@pytest.mark.ranks(2)
def test_as_context_leaves_a_context_whose_process_group_was_destroyed(ctx):
    before, default = resources_before(), current_context()
    for _ in range(2):
        first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
        context = tkernels.init(first, heap_bytes=4 << 20)
        assert as_context(second) is context
        check_gather(context)
        dist.destroy_process_group(first)
        assert as_context(second) is default  # the pair's older one, whose group is there
        with pytest.raises(TkernelsError, match="torch.distributed has been shut down, or this process group"):
            context.finalize()
        dist.destroy_process_group(second)
        alone = dist.new_group([ctx.rank], use_local_synchronization=True)
        made = as_context(alone)
        assert context.closed  # by the first `init` after it
        dist.destroy_process_group(alone)
        again = dist.new_group([ctx.rank], use_local_synchronization=True)
        assert as_context(again) is not made and made.closed
        tkernels.finalize(again)
        dist.destroy_process_group(again)
        del first, second, alone, again, context, made
    assert resources()["segments"] == before["segments"]


@pytest.mark.ranks(4)
def test_as_context_makes_one_context_for_all_threads(ctx):
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    groups = [mesh[name].get_group() for name in ("tp", "dp", "tp", "dp")]
    on_this_gpu = functools.partial(torch.cuda.set_device, ctx.device) if ctx.device.type == "cuda" else None
    with concurrent.futures.ThreadPoolExecutor(4, initializer=on_this_gpu) as threads:
        order = range(4) if ctx.rank in (0, 3) else range(3, -1, -1)  # ranks wait for each other in a circle
        found = {at: threads.submit(as_context, groups[at]) for at in order}
        tp, dp, tp_again, dp_again = (found[at].result() for at in range(4))
    assert tp is tp_again and dp is dp_again and (tp.size, dp.size) == (2, 2)
    assert len({tp.name, dp.name}) == 2 and len(set(map(tuple, tp.group.gather([tp.name])))) == 1
    check_gather(tp)
    check_gather(dp)
    tkernels.finalize(mesh["tp"])
    tkernels.finalize(mesh["dp"])


@pytest.mark.ranks(2)
@simulated_only
def test_as_context_raises_on_every_rank_what_fails_on_one(ctx, monkeypatch):
    group = dist.new_group([0, 1])
    meetings.Group(group).barrier()  # its connections stay
    monkeypatch.setattr(contexts, "open_contexts", lambda *_: [])  # as if the pair had none
    before = resources_before()
    with monkeypatch.context() as patch:
        if ctx.rank == 1:
            patch.setattr(simulated_runtime, "_map", mock.Mock(side_effect=OSError("no more files")))
        with pytest.raises(TkernelsError, match=r"could not map .*: OSError: no more files.* \(on rank 1\)") as error:
            as_context(group)
    message_on_every_rank(ctx, error.value)
    del error  # its traceback holds what was mapped
    assert resources() == before
    made = as_context(group)
    check_gather(made)
    made.finalize()
    dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_as_context_is_traced_by_compile(ctx):
    mesh = init_device_mesh(ctx.device.type, (2, 1), mesh_dim_names=("dp", "tp"))
    one = torch.ones(3, device=ctx.device)

    def total(x):
        x = layers.reduce_from_tensor_model_parallel_region(x, mesh=mesh["tp"])
        return tkernels.all_reduce(x, ctx=mesh["dp"].get_group())

    compiled = torch.compile(total, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(one), 2 * one)  # makes the one of "tp" while it is traced
    tkernels.finalize(mesh["tp"])
    assert torch.equal(compiled(one), 2 * one)
    tkernels.finalize(mesh["tp"])
    torch._dynamo.reset()


@simulated_only
def test_as_context_leaves_nothing_to_warn_of_at_exit(tmp_path):
    script = f"""
        import sys, torch, tkernels
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
        for turn in range(2):
            init = f"file://{tmp_path}/{{turn}}"
            dist.init_process_group("gloo", init_method=init, rank=int(sys.argv[1]), world_size=2)
            mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
            for name in ("dp", "tp"):
                size = mesh[name].size()
                assert tkernels.all_reduce(torch.ones(3), ctx=mesh[name]).tolist() == [size] * 3
            dist.destroy_process_group()
        maps = open("/proc/self/maps").read()
        assert maps.count("memfd:tkernels") == 3, maps  # those of the second turn alone
    """
    command = [sys.executable, "-W", "always::UserWarning", "-c", textwrap.dedent(script)]
    ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    for rank in ranks:
        _, said = rank.communicate(timeout=120)
        assert (rank.returncode, said) == (0, "")


def test_what_is_no_context_is_refused_by_its_type():
    for call in (
        lambda: tkernels.all_reduce(torch.ones(1), ctx="tp"),
        lambda: layers.copy_to_tensor_model_parallel_region(torch.ones(1), mesh="tp"),
        lambda: tkernels.finalize("tp"),
    ):
        with pytest.raises(TypeError, match="(ctx|mesh): takes .* a DeviceMesh of one dimension, not str"):
            call()


def test_without_a_context_the_error_says_what_to_call():
    script = """
        import os
        import torch, tkernels
        for call in (tkernels.current_context, tkernels.finalize, tkernels.barrier):
            try:
                call()
            except tkernels.TkernelsError as error:
                assert "call tkernels.init() on every rank first" in str(error), error
            else:
                raise AssertionError(call)
        os.environ["WORLD_SIZE"] = "2"
        try:
            tkernels.init()
        except ValueError as error:
            assert "WORLD_SIZE is 2" in str(error) and "init_process_group() before init()" in str(error), error
        else:
            raise AssertionError("init")
        for name, wrong in (("WORLD_SIZE", "two"), ("TKERNELS_COMPARE_CALLS", "2")):
            os.environ[name] = wrong
            try:
                tkernels.init()
            except ValueError as error:
                assert f"{name}='{wrong}' is n" in str(error), error
            else:
                raise AssertionError(name)
            os.environ[name] = ""
        assert tkernels.init(heap_bytes=1 << 20).size == 1
    """
    run_script(script, TKERNELS_RUNTIME=tkernels.RUNTIME)


@pytest.mark.ranks(2)
def test_gather_after_torch_distributed_was_shut_down_is_refused(ctx, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(TkernelsError, match="has been shut down.*finalize.. contexts before destroy_process_group"):
        ctx.group.gather(None)


def test_one_rank_needs_no_torch_distributed_and_computes_plain_products():
    script = """
        import torch, tkernels
        from tkernels.comm import collectives
        with tkernels.init(heap_bytes=1 << 20) as ctx:
            assert (ctx.rank, ctx.size) == (0, 1) and not torch.distributed.is_initialized()
            generator = torch.Generator().manual_seed(0)
            x, w, bias = (torch.randint(-4, 5, size, generator=generator).float().to(ctx.device)
                          for size in ((33, 40), (20, 40), (20,)))
            want = torch.nn.functional.linear(x.double(), w.double(), bias.double()).relu().float()
            y, gathered = tkernels.all_gather_matmul(x, w, bias, "relu", return_gathered=True)
            assert y.equal(want) and gathered.equal(x) and gathered.data_ptr() != x.data_ptr()
            assert tkernels.matmul_reduce_scatter(x, w, bias, "relu").equal(want)
            assert tkernels.matmul_all_reduce(x, w, bias, "relu").equal(want)
            for collective in (tkernels.all_gather, tkernels.reduce_scatter, tkernels.all_reduce):
                out = collective(x)
                assert out.equal(x) and out.data_ptr() != x.data_ptr(), collective
            x, w, bias = (16 * x).bfloat16(), w.bfloat16(), bias.bfloat16()
            want = torch.nn.functional.linear(x.double(), w.double(), bias.double()).float()
            assert not want.equal(want.bfloat16().float())
            for product in (tkernels.all_gather_matmul, tkernels.matmul_reduce_scatter, tkernels.matmul_all_reduce):
                y = product(x, w, bias, out_dtype=torch.float32)
                assert y.dtype == torch.float32 and y.equal(want), product
            for collective in (collectives.reduce_scatter, collectives.all_reduce):
                y = collective(ctx, x, out_dtype=torch.float32)
                assert y.dtype == torch.float32 and y.equal(x), collective
            tkernels.barrier()
            assert ctx.empty(3).shape == (3,)
    """
    run_script(script)


def test_constant_in_traces_marks_as_torch_does_and_nothing_imports_torchs_compiler():
    script = """
        import sys
        import torch
        import tkernels, tkernels.operators
        from tkernels.comm.context import constant_in_traces
        assert "torch._dynamo" not in sys.modules
        ours, torchs = (lambda: 0), (lambda: 0)
        assert constant_in_traces(ours) is ours
        torch.compiler.assume_constant_result(torchs)
        assert ours.__dict__ == torchs.__dict__ != {}
        assert tkernels.RUNTIME in ("nvshmem", "simulated")
    """
    run_script(script, TKERNELS_RUNTIME="")  # as if it weren't set


def run_script(script, **environment):
    environment = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"} | environment
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr


# Waits that can't succeed


def test_the_error_of_a_wait_says_who_waited_for_whom_and_what_to_do():
    fault = Fault("all_gather", rank=1, peer=3, chunk=7, expected=12, seen=11)
    error = WaitTimeoutError(fault, 2.5)
    assert str(error).startswith(
        "all_gather: rank 1 waited 2.5 s for the signal of rank 3, chunk 7: expected 12, seen 11."
    )
    assert "init(timeout_s=...)" in str(error)
    assert (error.operation, error.rank, error.peer, error.chunk, error.expected, error.seen) == (
        "all_gather", 1, 3, 7, 12, 11
    )  # fmt: skip
    own = WaitTimeoutError(Fault("all_gather", rank=1, peer=1, chunk=0, expected=1, seen=0), 2.5)
    assert str(own).startswith("all_gather: rank 1 waited 5 s for its own programs or copies, chunk 0: ")
    assert "died" not in str(own) and "init(timeout_s=...)" in str(own)
    with pytest.raises(AttributeError):
        error.nothing  # noqa: B018
    of_a_group = WaitTimeoutError(fault, 2.5, [4, 5, 8, 9])
    assert str(of_a_group) == f"{error} (ranks are those of a group, whose global ranks are [4, 5, 8, 9])"
    for each in (error, of_a_group, HeapExhaustedError(1, 2, 3)):
        again = pickle.loads(pickle.dumps(each))
        assert (str(again), vars(again)) == (str(each), vars(each))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("operation", ["all_gather", "all_gather in chunks", "matmul_all_reduce"])
@every_transport
def test_a_rank_that_never_sends_is_named_by_every_rank_and_a_new_context_works(ctx, transport, operation):
    silent = ctx.size - 1
    x = integers((4 * ctx.size, 8), torch.float32, ctx.rank, device=ctx.device)
    w = integers((5, 8), torch.float32, 9, device=ctx.device)

    def call(context):
        if operation == "all_gather":  # as packets, over all transports that have them
            tkernels.all_gather(x, ctx=context)
        elif operation == "all_gather in chunks":
            collectives.all_gather(context, x, config=collectives.CollectiveConfig(0, 0, 0))
        else:
            tkernels.matmul_all_reduce(x, w, ctx=context, path="fused")
        context.check()  # on a GPU, where a launch returns before its kernel has run

    context = tkernels.init(transport=transport, heap_bytes=8 << 20)
    call(context)
    assert not context.failed
    ctx.group.barrier()
    expire_after(context, 1.0)
    if ctx.rank == silent:
        while not context.failed:
            time.sleep(0.02)
        with pytest.raises(WaitTimeoutError) as caught:
            context.check()
    else:
        with pytest.raises(WaitTimeoutError) as caught:
            call(context)

    error = caught.value
    assert error.operation == operation.removesuffix(" in chunks")
    assert error.rank != silent and error.peer == silent
    assert (error.chunk, error.expected, error.seen) == (0, 2, 1)
    with pytest.raises(WaitTimeoutError):
        tkernels.barrier(ctx=context)  # the context is of no more use, and says so before it waits
    segment = context.heap.segment
    context.finalize()
    assert context.closed and segment.local is not None  # a peer that is late may still write there
    ctx.group.barrier()
    with tkernels.init(transport=transport, heap_bytes=8 << 20) as fresh:
        assert segment.local is None
        check_gather(fresh)


@pytest.mark.ranks(2)
def test_a_rank_that_does_not_come_to_a_meeting_is_named_in_the_log_with_where_it_was_last(ctx, tmp_path):
    with mock.patch.object(meetings._log, "warning", side_effect=lambda *_: told.touch()) as warning:
        ctx.group.barrier()
        for late in range(2):
            told = tmp_path / str(1 - ctx.rank)
            if ctx.rank == late:  # until the other one has named it
                while not (tmp_path / str(late)).exists():
                    time.sleep(0.01)
            with mock.patch.object(meetings, "PATIENCE_S", 60.0 if ctx.rank == late else 0.2):
                ctx.group.gather(None, "a meeting")
    ((said, *values), _), = warning.call_args_list
    said %= tuple(values)
    last = "a call of the program's own" if ctx.rank == 1 else "a meeting"
    assert said.startswith(f"a meeting ({__file__}:") and f"rank {ctx.rank} waits on the host, 0.2 s so far" in said
    assert f"for rank {1 - ctx.rank}, which was last in {last} ({__file__}:" in said


@pytest.mark.ranks(2)
def test_empty_meets_beside_a_collective_of_another_thread_over_the_same_process_group(ctx):
    """As dcp.async_save's, which goes on while the next steps are made."""
    found = [None] * 2
    gather = functools.partial(dist.all_gather_object, found, ctx.rank, group=ctx.group.process_group)
    if ctx.rank == 0:
        saving = in_a_thread("saving", gather)
        time.sleep(0.2)  # so that it comes first on this rank, and last on the other
    ctx.free(ctx.empty(4))
    assert ctx.group.gather("a" * ctx.rank * 10_000) == ["", "a" * 10_000]  # more than one message
    saving.result(60) if ctx.rank == 0 else gather()
    assert found == [0, 1]


@pytest.mark.ranks(2)
def test_ranks_out_of_step_all_hear_where_each_of_them_is(ctx):
    with pytest.raises(OutOfStepError) as caught:
        ctx.empty(4) if ctx.rank == 0 else ctx.group.barrier()
    message = message_on_every_rank(ctx, caught.value)
    assert "rank 0 is in tkernels.comm.heap.empty (" in message and "rank 1 is in a call of the program's" in message
    assert message.count(f"{os.path.basename(__file__)}:") == 2 and "the same calls in the same order" in message

    context = tkernels.init(heap_bytes=4 << 20)
    with pytest.raises(OutOfStepError, match=f"rank 0 is in init.*; rank 1 is in finalize.. of {context.name} "):
        tkernels.init(heap_bytes=4 << 20) if ctx.rank == 0 else context.finalize()  # which rank 0 may go on to use
    if ctx.rank == 0:
        context.finalize()
    with tkernels.init(heap_bytes=4 << 20) as fresh:
        check_gather(fresh)
    assert context.closed


@pytest.mark.ranks(2)
@pytest.mark.parametrize("failure", ["wait", "exception", "exception on all"])
def test_after_a_failure_of_one_rank_all_meet_again_in_init(ctx, failure):
    tkernels.init(heap_bytes=4 << 20).finalize()
    before = resources_before()
    for _ in range(2):
        context = tkernels.init(heap_bytes=4 << 20)
        check_gather(context)
        context.check()
        ctx.group.barrier()
        expire_after(context, 1.0)
        if failure == "wait":
            if ctx.rank == 0:
                with pytest.raises(WaitTimeoutError):
                    tkernels.barrier(ctx=context)  # one more than the others make
                    context.check()
            try:
                context.finalize()
            except WaitTimeoutError as error:  # rank 1 may know by now
                assert ctx.rank == 1 and error.peer == 1
        else:
            waits = ctx.rank == 1 and failure == "exception"
            with pytest.raises(TkernelsError if waits else ZeroDivisionError), context:
                if not waits:
                    1 / 0  # noqa: B018
                tkernels.barrier(ctx=context)
                context.check()
        with tkernels.init(heap_bytes=4 << 20) as fresh:
            check_gather(fresh)
        assert context.closed
        del context, fresh
    assert resources() == before


@pytest.mark.ranks(2)
@every_transport
def test_a_rank_slower_than_others_but_within_the_limit_is_waited_for(ctx, transport):
    context = over(ctx, transport, timeout_s=600.0)
    ctx.group.barrier()
    if ctx.rank == 1:
        time.sleep(0.5)
    check_gather(context)
    context.check()


SURVIVOR = """
    import os, sys
    import torch, tkernels
    import torch.distributed as dist
    from tkernels.launch import gpus_of
    from transports import expire_after

    rank, operation = int(os.environ["RANK"]), sys.argv[1]
    if tkernels.RUNTIME == "nvshmem":
        torch.cuda.set_device(rank % gpus_of(3))
    dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=3)
    ctx = tkernels.init(heap_bytes=8 << 20)
    x, w = torch.ones(6, 8, device=ctx.device), torch.ones(5, 8, device=ctx.device)
    call = tkernels.barrier if operation == "barrier" else lambda: tkernels.matmul_all_reduce(x, w, path="fused")
    call()
    ctx.check()
    expire_after(ctx, 1.0)
    dist.barrier()
    if rank == 1:
        os._exit(7)
    try:
        call()
        ctx.check()
    except tkernels.WaitTimeoutError as error:
        assert error.operation == operation and error.peer == 1, error
    else:
        raise AssertionError("nothing was raised")
    ctx.finalize()
    print("survived", flush=True)
    os._exit(0)  # the group has lost a member, so it can't be left in an orderly way
"""


@pytest.mark.parametrize("operation", ["barrier", pytest.param("matmul_all_reduce", marks=pytest.mark.exhaustive)])
@starts_ranks(3)
def test_a_rank_that_dies_is_named_by_the_others_in_time(operation, tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(SURVIVOR), operation, str(tmp_path / "store")]
    environment = os.environ | {"WORLD_SIZE": "3", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    ranks = [
        subprocess.Popen(
            command, env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    try:
        results = [(*process.communicate(timeout=600), process.returncode) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert results[1][2] == 7, results[1][1]
    for out, err, code in (results[0], results[2]):
        assert (out.strip(), code) == ("survived", 0), err


@pytest.mark.ranks(2)
def test_a_librarys_own_context_does_not_become_the_default(ctx):
    before = current_context()
    with tkernels.init(ctx.group.process_group, heap_bytes=1 << 20, default=False) as own:
        assert current_context() is before is not own
        assert find_context(own.name) is own


@pytest.mark.ranks(2)
def test_a_context_tells_what_it_is(ctx):
    assert isinstance(ctx, Context)
    assert repr(ctx).endswith(f": rank {ctx.rank} of 2, {ctx.runtime} runtime, {ctx.transport})")
    assert ctx.runtime == tkernels.RUNTIME and ctx.transport in TRANSPORTS


GPU_WITHOUT_NVSHMEM = """
import importlib.util, json, warnings
import torch

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *package: None if name == "nvshmem" else find_spec(name, *package)
torch.cuda.is_available = lambda: {sees_gpu}
import tkernels

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        tkernels.init(heap_bytes=1 << 20).finalize()
told = [(each.category.__name__, each.filename, str(each.message)) for each in caught]
told = [each for each in told if "init: " in each[2]]
print(json.dumps([tkernels.RUNTIME, told]))
"""


@pytest.mark.parametrize(
    "asked, sees_gpu, warns",
    [
        (None, True, True),
        pytest.param("auto", True, True, marks=pytest.mark.exhaustive),
        ("simulated", True, False),
        (None, False, False),
    ],
)
def test_gpus_that_auto_leaves_out_are_told_of_once_with_the_reason(asked, sees_gpu, warns):
    environment = {name: value for name, value in os.environ.items() if name != "TKERNELS_RUNTIME"}
    environment |= {"TKERNELS_RUNTIME": asked} if asked else {}
    code = GPU_WITHOUT_NVSHMEM.format(sees_gpu=sees_gpu)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    chosen, told = json.loads(done.stdout)
    assert chosen == "simulated" and len(told) == warns
    for category, filename, message in told:
        assert (category, filename) == ("UserWarning", "<string>")  # where init was called
        assert "the GPUs are left out: nvshmem4py is not installed (pip install" in message


# Threads


class Held(NamedTuple):
    """A call that is what its field is."""

    hold: Callable

    operation = "held"

    def prepare(self, ctx):
        return self.hold


def in_a_thread(name, function):
    """A started thread whose `join` returns what `function` returned, or raises what it raised."""
    executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=name)
    future = executor.submit(function)
    executor.shutdown(wait=False)
    return future


@pytest.mark.ranks(2)
def test_all_reduce_in_two_threads_at_once_is_refused_by_name_on_every_rank(ctx):
    context, x = tkernels.init(heap_bytes=8 << 20, timeout_s=30.0), torch.ones(8, device=ctx.device)
    tkernels.all_reduce(x, ctx=context)
    context.check()
    ctx.group.barrier()
    if ctx.rank == 0:
        inside, release = threading.Event(), threading.Event()
        holder = in_a_thread("holder", lambda: context.call(Held(lambda: inside.set() or release.wait())))
        assert inside.wait(60)
        message = r"'MainThread' in all_reduce \(.*test_context.py:\d+\): thread 'holder_0' in call \(.*new_group"
        with pytest.raises(TkernelsError, match=message):
            tkernels.all_reduce(x, ctx=context)
        release.set()
        assert holder.result(60)
        with pytest.raises(TkernelsError, match=message):  # whichever call is next: a peer may have made both
            tkernels.barrier(ctx=context)
    else:
        with pytest.raises(TkernelsError, match="two threads of rank 0 made calls of one context that overlapped"):
            tkernels.all_reduce(x, ctx=context)
            context.check()
    context.finalize()
    with tkernels.init(heap_bytes=8 << 20) as fresh:
        check_gather(fresh)


@pytest.mark.ranks(2)
def test_all_reduce_in_a_process_that_was_forked_from_a_rank_is_refused_and_the_rank_goes_on(ctx):
    if ctx.device.type != "cpu":
        pytest.skip("CUDA itself refuses a forked process")
    total = lambda value, size=3: tkernels.all_reduce(torch.full((size,), value), ctx=ctx).tolist()  # noqa: E731
    assert total(1.0) == [2.0] * 3
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for size in (3, 100_000):  # of a call that was made before, and of one that the ranks would meet for
            try:
                said.append(str(total(5.0, size)[:1]))
            except TkernelsError as error:
                said.append(str(error))
        os.write(sink, " | ".join([*said, str(tkernels.matmul(torch.ones(2, 3), torch.ones(2, 3)).tolist())]).encode())
        os._exit(0)
    os.close(sink)
    with os.fdopen(source) as pipe:
        first, other, local = pipe.read().split(" | ")
    os.waitpid(child, 0)
    assert first == other
    message = rf"{ctx.name} belongs to the rank that this process was forked from.*make the call there"
    assert re.fullmatch(message, first)
    assert local == "[[3.0, 3.0], [3.0, 3.0]]"
    ctx.group.barrier()
    assert [total(float(value)) for value in (1, 2, 3)] == [[2.0] * 3, [4.0] * 3, [6.0] * 3]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("call", ["all_reduce", "init", "empty"])
def test_init_and_a_first_call_in_a_process_that_was_forked_from_a_rank_are_refused_and_the_rank_goes_on(ctx, call):
    if ctx.device.type != "cpu":
        pytest.skip("CUDA itself refuses a forked process")
    fresh = tkernels.init(ctx.group.process_group, heap_bytes=8 << 20, default=False)
    calls = {
        "all_reduce": lambda: tkernels.all_reduce(torch.ones(3), ctx=fresh),
        "init": lambda: tkernels.init(ctx.group.process_group),
        "empty": lambda: fresh.empty(3),
    }
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # instead of gloo's limit, if it waits for ranks
        try:
            calls[call]()
        except TkernelsError as error:
            os.write(sink, str(error).encode())
        os._exit(0)
    os.close(sink)
    with os.fdopen(source) as pipe:
        message = pipe.read()
    os.waitpid(child, 0)
    assert message.startswith("the process group" if call == "init" else fresh.name)
    assert re.search("belongs to the rank that this process was forked from.*make the call there", message)
    ctx.group.barrier()
    assert tkernels.all_reduce(torch.ones(3), ctx=fresh).tolist() == [2.0] * 3
    fresh.finalize()


@pytest.mark.ranks(2)
def test_all_reduce_in_threads_that_take_turns_works_and_so_does_backward_in_another_thread(ctx):
    x = torch.ones(8, device=ctx.device, requires_grad=True)
    gathered = in_a_thread("other", lambda: tkernels.all_gather(x, ctx=ctx)).result(60)
    assert gathered.tolist() == [1.0] * 16
    in_a_thread("backward", lambda: gathered.sum().backward()).result(60)
    assert x.grad.tolist() == [2.0] * 8
    square = torch.ones(16, 16, device=ctx.device)
    assert torch.equal(in_a_thread("local", lambda: tkernels.matmul(square, square)).result(60), square * 16)
    ctx.check()


@pytest.mark.ranks(2)
def test_init_twice_over_one_group_lets_one_thread_meet_at_a_time_and_a_group_for_each_works(ctx, monkeypatch):
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(tkernels.init(heap_bytes=16 << 20)) for _ in range(2))
        if ctx.rank == 0:
            inside, release, gather = threading.Event(), threading.Event(), meetings.Group._all_gather

            def hold(*arguments, **options):
                inside.set()
                assert release.wait(60)
                return gather(*arguments, **options)

            monkeypatch.setattr(meetings.Group, "_all_gather", hold)
            holder = in_a_thread("holder", lambda: first.empty(4))
            assert inside.wait(60)
            with pytest.raises(TkernelsError, match="'MainThread' in empty .*'holder_0' in empty .* group of its own"):
                second.empty(4)
            release.set()
            holder.result(60)
            monkeypatch.undo()
        else:
            first.empty(4)
        check_gather(second)
    if ctx.runtime != "simulated":
        return  # on one stream of a GPU, a kernel that waits for a peer would hold up the other thread's
    with contextlib.ExitStack() as stack:
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        contexts = [stack.enter_context(tkernels.init(group, heap_bytes=32 << 20)) for group in groups]

        def work(number):
            for size in (8, 3 << 18, 40):  # the second takes more memory, for which ranks meet
                x = torch.full((size,), float(number + ctx.rank), device=ctx.device)
                assert tkernels.all_reduce(x, ctx=contexts[number]).eq(2 * number + 1).all()

        for thread in [in_a_thread("each", functools.partial(work, number)) for number in range(2)]:
            thread.result(120)
