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
from transports import simulated_only, torch_scales_rows

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


# In FP8


def quantized(values, dtype=torch.float8_e4m3fn):
    """Small integers in FP8 with scales that are powers of two: products and sums are exact in any order."""
    return values.to(dtype), torch.exp2(torch.arange(values[..., 0].numel(), device=values.device) % 4.0 - 2)


def scaled_operands(ctx, sizes, features=(32, 16)):
    """A [..., K] of this rank, its scales by row and in all; the weights, their scales, biases."""
    A, A_scale = quantized(integers((*sizes, 32), torch.float32, 4 + ctx.rank, -2, 2, ctx.device))
    A_scale = A_scale.view(*sizes, 1) * 2**ctx.rank
    pairs = [quantized(integers((n, 32), torch.float32, n, -2, 2, ctx.device)) for n in features]
    biases = [integers(n, torch.bfloat16, n, device=ctx.device) if n == 16 else None for n in features]
    return A, A_scale, [w.t() for w, _ in pairs], [scale.view(1, -1) for _, scale in pairs], biases


@pytest.mark.ranks(2)
@pytest.mark.parametrize("scales", ["sharded", "replicated", "tensor"])
@pytest.mark.parametrize("sizes, dim", [((8,), 0), ((2, 4), 1), ((2, 4), 0), ((0, 3), 1)], ids=str)
def test_install_gives_torchs_scaled_all_gather_matmul(ctx, sizes, dim, scales):
    mesh = mesh_of(ctx)
    group = mesh.get_group().group_name
    A, A_scale, Bs, B_scales, biases = scaled_operands(ctx, sizes)
    if scales == "replicated":
        A_scale = torch.cat(ctx.group.gather(A_scale.cpu()), dim).to(ctx.device)
    elif scales == "tensor":
        A_scale, B_scales = torch.tensor(0.5, device=ctx.device), [torch.tensor(2.0, device=ctx.device)] * 2
    options = biases, [None, None], [torch.bfloat16, torch.float32 if biases[1] is None else torch.bfloat16]
    arguments = A, Bs, A_scale, B_scales, dim, group, *options, [True, False]
    with symm_mem.install(mesh), counted() as calls:
        gathered, ys = OPS.fused_all_gather_scaled_matmul(*arguments)
    assert calls == ["all_gather_matmul"] and gathered.dtype == A.dtype
    want = torch.cat(ctx.group.gather(A.float().cpu()), dim).to(ctx.device)
    assert torch.equal(gathered.float(), want)
    strides = torch.empty_like(want.movedim(dim, 0), memory_format=torch.contiguous_format).movedim(0, dim).stride()
    assert gathered.stride() == strides
    if scales == "sharded":
        A_scale = torch.cat(ctx.group.gather(A_scale.cpu()), dim).to(ctx.device)
    for y, B, B_scale, bias, dtype in zip(ys, Bs, B_scales, biases, options[2], strict=True):
        exact = (want @ B.float()) * A_scale * B_scale + (0 if bias is None else bias.float())
        assert y.dtype == dtype and torch.equal(y, exact.to(dtype))
        assert y.movedim(dim, 0).is_contiguous()
    ctx.check()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("sizes, dim", [((8,), 0), ((2, 4), 1), ((2, 4), 0)], ids=str)
def test_install_gives_torchs_scaled_matmul_reduce_scatter(ctx, sizes, dim, op):
    if not torch_scales_rows():
        pytest.skip("results are compared with torch's")
    mesh = mesh_of(ctx)
    group = mesh.get_group().group_name
    A, A_scale, (B, _), (B_scale, _), _ = scaled_operands(ctx, sizes)
    for flat in (False, True):
        for scale, of_B in ((A_scale, B_scale), (torch.tensor(0.25, device=ctx.device), B_scale[0, 0])):
            a = A.flatten(0, -2) if flat else A
            scale = scale.flatten(0, -2) if flat and scale.numel() > 1 else scale
            for dtype in (torch.bfloat16, torch.float32):
                arguments = a, B, scale, of_B, op, dim, 0 if flat else dim, group, [*sizes, B.shape[1]]
                with symm_mem.install(mesh), counted() as calls:
                    got = OPS.fused_scaled_matmul_reduce_scatter(*arguments, out_dtype=dtype, use_fast_accum=True)
                want = torch_symm_mem._fused_scaled_matmul_reduce_scatter_fallback(*arguments, out_dtype=dtype)
                assert calls == ["matmul_reduce_scatter"] and got.dtype == dtype and same(got, want)
    ctx.check()


@pytest.mark.ranks(2)
@simulated_only
def test_install_leaves_to_torch_the_scaled_products_it_cannot_take_and_says_why(ctx):
    group = ctx.group.process_group.group_name
    A, A_scale, (B, _), (B_scale, _), _ = scaled_operands(ctx, (8,))
    bf16, e5m2 = torch.bfloat16, torch.float8_e5m2

    def gather(A=A, B=B, dtype=bf16, scale=None):
        return OPS.fused_all_gather_scaled_matmul(
            A, [B], A_scale, [B_scale], 0, group, [None], [scale], [dtype], [True]
        )

    def reduce(bias=None, op="sum"):
        return OPS.fused_scaled_matmul_reduce_scatter(
            A, B, A_scale, B_scale, op, 0, 0, group, [8, B.shape[1]], bias, None, bf16
        )

    cases = {
        "operands are torch.bfloat16, torch.float8_e4m3fn": lambda: gather(A=A.bfloat16()),
        "operands are torch.float8_e5m2, and not": lambda: gather(A.to(e5m2), B.t().to(e5m2).t()),
        "results are None, or scaled": lambda: gather(dtype=None),
        "results are torch.bfloat16, or scaled": lambda: gather(scale=torch.ones(1)),
        "K=24 is no multiple of 16": lambda: gather(A[:, :24].contiguous(), B.t()[:, :24].contiguous().t()),
        "not contiguous in A and B.t": lambda: gather(B=B.contiguous()),
        "torch's adds a bias on every rank": lambda: reduce(torch.ones(B.shape[1], dtype=bf16)),
        "reduce_op='max' is neither": lambda: reduce(op="max"),
    }
    for text, call in cases.items():
        said = []
        with symm_mem.install(ctx), counted() as calls, mock.patch.object(symm_mem, "log_once", said.append):
            with contextlib.suppress(Exception):  # torch's own error, if it has one
                call()
        assert calls == [] and len(said) == 1 and text in said[0], (text, said)
    if torch_scales_rows():
        bias = torch.arange(B.shape[1], dtype=bf16)
        with symm_mem.install(ctx), mock.patch.object(symm_mem, "log_once"):
            assert (reduce(bias).float() - reduce().float() - 2 * bias.float()).abs().max() <= 1  # roundings
    ctx.check()


@pytest.mark.ranks(2)
def test_install_refuses_scales_of_rows_that_A_does_not_have_on_every_rank(ctx):
    """As torch does: a part of a wrong one might fit on one rank alone, its elements in another order fit on all."""
    group = mesh_of(ctx).get_group().group_name
    A, A_scale, (B, _), (B_scale, _), _ = scaled_operands(ctx, (2, 4))
    bf16, rows, of_rows = torch.bfloat16, A.flatten(0, 1), A_scale.flatten(0, 1)
    refused = "_scaled_matmul.*: A_scale is .* must be one number, or one a row: "
    with symm_mem.install(ctx), counted() as calls:
        for a, scale in ((rows, of_rows[:, 0]), (rows, of_rows[:7]), (A, A_scale.transpose(0, 1))):
            with pytest.raises(ValueError, match=refused):
                OPS.fused_all_gather_scaled_matmul(a, [B], scale, [B_scale], 0, group, [None], [None], [bf16], [True])
            sizes = [*a.shape[:-1], B.shape[1]]
            with pytest.raises(ValueError, match=refused):
                OPS.fused_scaled_matmul_reduce_scatter(a, B, scale, B_scale, "sum", 0, 0, group, sizes, out_dtype=bf16)
    assert calls == []
    ctx.check()
