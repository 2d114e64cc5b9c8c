"""Ranks on several nodes, simulated: what reaches which rank, in what order, and every operation across them."""

import contextlib
import os
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl

import tkernels
from tkernels.comm import runtime, simulated_network
from tkernels.comm.device import Net, fence, operation, peer, put, put_signal, quiet, wait_signal
from tkernels.comm.errors import TkernelsError
from tkernels.comm.simulated_network import nodes_of
from tkernels.testing.compare import integers

pytestmark = pytest.mark.skipif(runtime.RUNTIME != "simulated", reason="nodes are simulated in the interpreter")
OP = operation("test of nodes")


@contextlib.contextmanager
def two_nodes(ctx):
    """A context over the same ranks, of which each half is on a node."""
    nodes = ",".join(str(rank * 2 // ctx.size) for rank in range(ctx.size))
    with mock.patch.dict(os.environ, TKERNELS_NODES=nodes):
        made = tkernels.init(ctx.group.process_group, heap_bytes=64 << 20, default=False)
    with made:
        yield made


@pytest.mark.quick
def test_nodes_of_reads_a_number_for_each_rank(monkeypatch):
    monkeypatch.delenv("TKERNELS_NODES", raising=False)
    assert nodes_of([0, 3]) == [0, 0]
    monkeypatch.setenv("TKERNELS_NODES", "0,0,1,1")
    assert nodes_of([0, 1, 2, 3]) == [0, 0, 1, 1] and nodes_of([1, 3]) == [0, 1]
    for asked, ranks in (("0,0,1,1", [4]), ("0,x", [0, 1]), ("0,,1", [0])):
        monkeypatch.setenv("TKERNELS_NODES", asked)
        with pytest.raises(ValueError, match=f"TKERNELS_NODES='{asked}' must be a number for each rank"):
            nodes_of(ranks)


@pytest.mark.ranks(4)
def test_operations_are_exact_across_nodes(ctx):
    with two_nodes(ctx) as ctx:
        _check_operations(ctx)


@pytest.mark.ranks(2)
def test_reserve_larger_memory_gets_no_signals_that_were_for_the_memory_before(ctx):
    network = simulated_network._network
    with two_nodes(ctx) as ctx, mock.patch.object(simulated_network, "LATE_S", 0.1):
        workspace = ctx.workspace().reserve(num_chunks=1)
        for _ in range(4):
            workspace.reserve(inbox_bytes=workspace.inbox_bytes + 4096)
            network.wait_until(lambda: not network.underway)
            ctx.group.barrier()
            assert not workspace.begun.any() and not workspace.ready.any()
            tkernels.barrier(ctx=ctx)


def _check_operations(ctx, M=38, N=32, K=32):
    assert ctx.transport == "nvshmem" and not ctx.mapped
    for seed in range(2):
        x, w = (integers((ctx.size, each, K), torch.float32, seed) for each in (M, N))
        rows, rank = tkernels.split_rows(M, ctx.size), ctx.rank
        own, total = x[0].split(rows)[rank], x.sum(0)
        product, options = (x @ w.mT).sum(0), {"ctx": ctx}
        assert torch.equal(tkernels.all_gather(own, rows=rows, **options), x[0])
        assert torch.equal(tkernels.reduce_scatter(x[rank], rows=rows, **options), total.split(rows)[rank])
        assert torch.equal(tkernels.all_reduce(x[rank], **options), total)
        gathered = tkernels.all_gather_matmul(own, w[rank], rows=rows, path="fused", **options)
        assert torch.equal(gathered, x[0] @ w[rank].T)
        scattered = tkernels.matmul_reduce_scatter(x[rank], w[rank], rows=rows, path="fused", **options)
        assert torch.equal(scattered, product.split(rows)[rank])
        assert torch.equal(tkernels.matmul_all_reduce(x[rank], w[rank], path="fused", **options), product)
        ctx.barrier()


@triton.jit
def store_kernel(words, table, rank, L):
    tl.store(peer(words, (rank + 1) % L.RANKS, Net(table, rank)), 1)


@pytest.mark.ranks(2)
def test_stores_to_another_node_are_refused(ctx):
    with two_nodes(ctx) as across:
        words = across.empty(1, dtype=torch.int64)
        with pytest.raises(TkernelsError, match="can't load or store in the memory of rank [01], on another node"):
            across.launch(store_kernel, 1, words, across.table, across.rank, across.link(OP))
        across.abandon()  # a kernel of it was interrupted


@triton.jit
def two_puts_kernel(data, ready, source, table, rank, epoch, L, FENCED: tl.constexpr):
    """Put one block and then another with a signal; the peer looks at the first once it sees that signal."""
    net, other = Net(table, rank), 1 - rank
    if rank == 0:
        put(data, source, 64, other, net, L, 64)
        if FENCED:
            fence(L)
        put_signal(data + 64, source, 64, ready, epoch, other, net, L, 64)
        tl.store(source + tl.arange(0, 64), tl.full((64,), -1, tl.int64))  # locally complete: neither put sees it
        quiet(L)
    else:
        wait_signal(ready, epoch, other, 0, net, L)
        tl.store(source + tl.arange(0, 128), tl.load(data + tl.arange(0, 128)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fenced", [True, False])
def test_puts_arrive_late_and_in_any_order_but_for_fences(ctx, fenced):
    """Without the fence the first put must be seen missing, or this network would hide a race.

    It is late by up to 20 ms here, as a busy machine may wake the other rank a millisecond after the signal.
    """
    with two_nodes(ctx) as across, mock.patch.object(simulated_network, "LATE_S", 0.02):
        _check_puts(across, fenced)


def _check_puts(across, fenced: bool):
    data, ready = across.empty(128, dtype=torch.int64), across.empty(1, dtype=torch.int64)
    ready.zero_()
    early = 0
    for epoch in range(1, 31):
        data.zero_()
        source = torch.full((128,), epoch)
        across.group.barrier()
        table, rank, link = across.table, across.rank, across.link(OP)
        across.launch(two_puts_kernel, 1, data, ready, source, table, rank, epoch, link, fenced)
        if across.rank == 1:
            assert source[64:].tolist() == [epoch] * 64  # the signal's own data are there
            early += source[0] != epoch
            assert set(source[:64].tolist()) <= {0, epoch}
        across.group.barrier()
    assert across.rank == 0 or (early == 0) == fenced
