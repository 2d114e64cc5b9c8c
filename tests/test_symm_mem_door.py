"""torch's fused operators of symmetric memory by our kernels: torch's results, shapes, strides, and torch's again."""

import contextlib
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _symmetric_memory as torch_symm_mem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from transports import simulated_only

import tkernels
from tkernels.layers.doors import symm_mem
from tkernels.testing.compare import integers

OPS = torch.ops.symm_mem
NAMES = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
K = 8
SHAPES = [((4,), 0), ((2, 4), 1), ((2, 4), 0), ((2, 3, 4), 2), ((2, 4, 3), 1)]  # leading sizes of A; the dimension


def mesh_of(ctx):
    return init_device_mesh(ctx.device.type, (ctx.size,), mesh_dim_names=("tp",))


def kernels(ctx):
    """What the dispatcher would call for both operators, as it describes it."""
    dumps = (torch._C._dispatch_dump(f"symm_mem::{name}") for name in NAMES)
    return [[line for line in dump.splitlines() if line.startswith(ctx.device.type.upper())] for dump in dumps]


@contextlib.contextmanager
def counted():
    """The names of this library's products that run in the block, in all threads."""
    names = []

    def spy(name, real):
        return lambda *args, **options: names.append(name) or real(*args, **options)

    each = ("all_gather_matmul", "matmul_reduce_scatter")
    with mock.patch.multiple(tkernels, **{name: spy(name, getattr(tkernels, name)) for name in each}):
        yield names


def same(got, want) -> bool:
    return torch.equal(got, want) and got.stride() == want.stride()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sizes, dim", SHAPES, ids=str)
def test_install_gives_torchs_results_shapes_and_strides(ctx, sizes, dim):
    mesh = mesh_of(ctx)
    group = mesh.get_group().group_name
    Bs = [integers((K, 6), torch.float32, 1, device=ctx.device)]
    Bs += [integers((5, K), torch.float32, 2, device=ctx.device).t()]
    Bs += [integers((2 * K, 10), torch.float32, 3, device=ctx.device)[::2, ::2]]  # neither dimension is dense
    A = integers((*sizes, K), torch.float32, 4 + ctx.rank, device=ctx.device)
    with symm_mem.install(mesh), counted() as calls:
        for each in (A, A.movedim(dim, 0).contiguous().movedim(0, dim)):
            for return_A in (True, False):
                gathered, ys = OPS.fused_all_gather_matmul(each, Bs, dim, group, return_A=return_A)
                want, products = torch_symm_mem._fused_all_gather_matmul_fallback(
                    each, Bs, dim, group, return_A=return_A
                )
                assert all(map(same, ys, products)) and len(ys) == 3
                assert same(gathered, want) if return_A else gathered is None
            for op in ("sum", "avg"):
                got = OPS.fused_matmul_reduce_scatter(each, Bs[1], op, dim, group)
                want = torch_symm_mem._fused_matmul_reduce_scatter_fallback(each, Bs[1], op, dim, group)
                assert same(got, want), op
    assert calls.count("all_gather_matmul") == calls.count("matmul_reduce_scatter") == 4
    ctx.check()


@pytest.mark.ranks(2)
def test_install_is_undone_exactly_also_when_nested_and_in_any_order(ctx):
    before, gates = kernels(ctx), dict(torch_symm_mem._group_name_to_store)
    mesh, world = mesh_of(ctx), ctx.group.process_group
    other = dist.new_group(list(range(ctx.size)))
    A, B = torch.ones(2, K, device=ctx.device), torch.ones(K, 3, device=ctx.device)

    def ours(group):
        with counted() as calls, mock.patch.object(symm_mem, "log_once"):
            if symm_mem._library is not None:
                OPS.fused_matmul_reduce_scatter(A, B, "sum", 0, group.group_name)
        return len(calls) == 1

    first = symm_mem.install(world)
    assert ours(world) and not ours(other) and kernels(ctx) != before
    with symm_mem.install(other, mesh):
        assert ours(world) and ours(other)
        assert torch_symm_mem.is_symm_mem_enabled_for_group(other.group_name)
    assert ours(world) and not ours(other)
    second = symm_mem.install()  # the current context
    third = symm_mem.install(other)
    first.close()
    assert ours(other)
    third.close()
    second.close()
    assert kernels(ctx) == before and torch_symm_mem._group_name_to_store == gates
    assert symm_mem._library is None and symm_mem._contexts == {}
    with pytest.raises(RuntimeError, match="outside"), symm_mem.install(world):
        raise RuntimeError("outside")
    assert kernels(ctx) == before and torch_symm_mem._group_name_to_store == gates


@pytest.mark.ranks(2)
@simulated_only
def test_install_leaves_to_torch_what_it_cannot_take_and_says_why(ctx):
    group = ctx.group.process_group.group_name
    other = dist.new_group(list(range(ctx.size))).group_name
    A, B = integers((2, 4, K), torch.float32, ctx.rank), integers((K, 6), torch.float32, 3)
    cases = {
        f"group '{other}' is not among": lambda: OPS.fused_all_gather_matmul(A, [B], 1, other)[1][0],
        "dimension 2 of 3 is not": lambda: OPS.fused_all_gather_matmul(A[..., : K // 2].contiguous(), [B], 2, group)[1][
            0
        ],
        "dimension 2 of 3 is ": lambda: OPS.fused_matmul_reduce_scatter(A, B, "sum", 2, group),
        "operands are torch.float64": lambda: OPS.fused_matmul_reduce_scatter(A.double(), B.double(), "sum", 1, group),
    }
    said = []
    for text, call in cases.items():
        with symm_mem.install(ctx), counted() as calls, mock.patch.object(symm_mem, "log_once", said.append):
            got = call()
        assert calls == [] and text in said[-1] and said[-1].startswith("symm_mem.fused_"), text
        assert got.isfinite().all()
    assert len(said) == len(cases)
    with symm_mem.install(ctx), mock.patch.object(symm_mem, "log_once", said.append):
        for call, text in (
            (
                lambda: OPS.fused_matmul_reduce_scatter(A[:, :3], B, "sum", 1, group),
                "a length of 3 doesn't divide by 2",
            ),
            (lambda: OPS.fused_matmul_reduce_scatter(A, B, "max", 1, group), "reduce_op='max' is neither sum nor avg"),
            (lambda: OPS.fused_all_gather_matmul(A, [B.half()], 1, group), "operands are torch.float16, torch.float32"),
            (lambda: OPS.fused_all_gather_matmul(A, [B[0]], 1, group), "operands are not matrices on cpu"),
        ):
            with contextlib.suppress(Exception):  # torch's own error, if it has one
                call()
            assert text in said[-1]
    ctx.check()


@pytest.mark.ranks(2)
def test_install_takes_calls_of_threads_that_take_turns(ctx):
    group, B = ctx.group.process_group.group_name, torch.eye(K, device=ctx.device)
    results = []

    def call():
        A = torch.full((2, K), 1.0 + ctx.rank, device=ctx.device)
        results.append(OPS.fused_matmul_reduce_scatter(A, B, "sum", 0, group))

    with symm_mem.install(ctx), counted() as calls:
        for _ in range(3):
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
    assert len(calls) == 3 and all(torch.equal(y, torch.full_like(y, 3.0)) for y in results)
    ctx.check()


@pytest.mark.ranks(2)
def test_install_names_what_is_no_mesh(ctx):
    with pytest.raises(TypeError, match="takes a Context, a ProcessGroup or a DeviceMesh"):
        symm_mem.install("tp")
    if ctx.size == 2:
        with pytest.raises(ValueError, match="the mesh has 2 dimensions"):
            symm_mem.install(init_device_mesh(ctx.device.type, (1, 2), mesh_dim_names=("dp", "tp")))
    assert symm_mem._contexts == {}


class Attention(nn.Module):
    """Two column layers over one input, then a row layer: what torch.compile's pass fuses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.o = (nn.Linear(*sizes, bias=False) for sizes in ((16, 32), (16, 32), (32, 16)))

    def forward(self, x):
        return self.o(torch.relu(self.q(x)) * self.k(x))


@pytest.mark.ranks(2, timeout_s=400)
@simulated_only
def test_install_is_what_torch_compile_calls_for_a_model_of_torchs_tensor_parallelism(ctx):
    """inductor's pass, which asks for NCCL, with that question answered: torch's model, torch's plan, our kernels."""
    import torch._inductor.config as inductor

    mesh, whole = mesh_of(ctx), Attention()
    model = nn.Sequential(Attention())
    plan = {
        "0": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "0.q": ColwiseParallel(),
        "0.k": ColwiseParallel(),
        "0.o": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh, plan)
    x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1))
    shard = x.chunk(2, 1)[ctx.rank].contiguous().requires_grad_()
    options = {"_micro_pipeline_tp": True, "fx_graph_cache": False, "reorder_for_compute_comm_overlap": False}
    with symm_mem.install(mesh), counted() as calls, inductor.patch(options):
        with mock.patch.object(torch.distributed, "is_nccl_available", lambda: True):
            y = torch.compile(model, fullgraph=True)(shard)
            assert calls == ["all_gather_matmul", "matmul_reduce_scatter"]  # q and k behind one gather
            y.square().sum().backward()
    assert len(calls) > 2
    want = whole(x.requires_grad_())
    want.square().sum().backward()
    torch.testing.assert_close(y, want.chunk(2, 1)[ctx.rank])
    torch.testing.assert_close(shard.grad, x.grad.chunk(2, 1)[ctx.rank])
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
    ctx.check()
