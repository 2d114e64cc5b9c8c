"""The torch operators: gradients against the unsharded model in fp64, opcheck, torch.compile and fake tensors."""

import functools
from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.multiprocessing.reductions import StorageWeakRef
from transports import Operators, every_path, launches, multiplied_by

import tkernels
import tkernels.operators
from tkernels.activations import activation_reference
from tkernels.comm import Context, TkernelsError, runtime
from tkernels.comm.collectives import split_rows
from tkernels.configs import GemmConfig, OverlapConfig
from tkernels.gemm import DTYPES
from tkernels.testing.compare import assert_close_to, integers, normal

OPS = torch.ops.tkernels
N, K = 20, 18


def mine(parts, ctx):
    """This rank's part, as a leaf that wants a gradient."""
    return parts[ctx.rank].detach().clone().contiguous().to(ctx.device).requires_grad_()


def leaves(*tensors):
    return [tensor.double().requires_grad_() for tensor in tensors]


class Whole:
    """Operands of one operation and the gradient of its result, unsharded, the same on every rank."""

    def __init__(self, ctx, dtype, rows, make=normal):
        size = ctx.size
        self.x_rows = make((sum(rows), K), dtype, 1)  # sharded by rows
        self.w_rows = make((size * N, K), dtype, 2)  # sharded by out-features
        self.bias_rows = make(size * N, dtype, 3)
        self.x_columns = make((sum(rows), size * K), dtype, 4)  # sharded by the dimension summed over
        self.w_columns = make((N, size * K), dtype, 5)
        self.bias = make(N, dtype, 6)
        self.dy_rows = make((sum(rows), size * N), dtype, 7)
        self.dy = make((sum(rows), N), dtype, 8)
        self.dgathered = make((sum(rows), K), dtype, 9)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_path
def test_gradients_of_all_gather_matmul_are_the_unsharded_models(ctx, dtype, path):
    rows = split_rows(33, ctx.size)
    whole = Whole(ctx, dtype, rows)
    x64, w64, bias64 = leaves(whole.x_rows, whole.w_rows, whole.bias_rows)
    (x64 @ w64.t() + bias64).backward(whole.dy_rows.double())
    for return_gathered in (False, True):
        x = mine(whole.x_rows.split(rows), ctx)
        w, bias = mine(whole.w_rows.chunk(ctx.size), ctx), mine(whole.bias_rows.chunk(ctx.size), ctx)
        y = tkernels.all_gather_matmul(x, w, bias, return_gathered=return_gathered, rows=rows, ctx=ctx, path=path)
        y = y[0] if return_gathered else y
        y.backward(whole.dy_rows.chunk(ctx.size, dim=1)[ctx.rank].to(ctx.device))
        # dx is summed over ranks: each peer's part is rounded on its way, and the own one too where it stays.
        assert_close_to(x.grad, x64.grad.split(rows)[ctx.rank], terms=ctx.size * N, roundings=ctx.size + 1)
        assert_close_to(w.grad, w64.grad.chunk(ctx.size)[ctx.rank], terms=sum(rows))
        assert_close_to(bias.grad, bias64.grad.chunk(ctx.size)[ctx.rank], terms=sum(rows))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_path
def test_gradients_of_matmul_reduce_scatter_and_matmul_all_reduce_are_the_unsharded_models(ctx, dtype, path):
    rows = split_rows(33, ctx.size)
    whole = Whole(ctx, dtype, rows)
    x64, w64, bias64 = leaves(whole.x_columns, whole.w_columns, whole.bias)
    (x64 @ w64.t() + bias64).backward(whole.dy.double())

    def check(operation, dy, **options):
        x = mine(whole.x_columns.chunk(ctx.size, dim=1), ctx)
        w, bias = mine(whole.w_columns.chunk(ctx.size, dim=1), ctx), mine([whole.bias] * ctx.size, ctx)
        operation(x, w, bias, ctx=ctx, path=path, **options).backward(dy.to(ctx.device))
        assert_close_to(x.grad, x64.grad.chunk(ctx.size, dim=1)[ctx.rank], terms=N)
        assert_close_to(w.grad, w64.grad.chunk(ctx.size, dim=1)[ctx.rank], terms=sum(rows))
        assert_close_to(bias.grad, bias64.grad, terms=sum(rows))

    check(tkernels.matmul_reduce_scatter, whole.dy.split(rows)[ctx.rank], rows=rows)
    check(tkernels.matmul_all_reduce, whole.dy)


@pytest.mark.ranks(2, 3)
@every_path
@pytest.mark.parametrize("name", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_matmul_reduce_scatter_and_matmul_all_reduce_where_some_ranks_have_no_columns(ctx, name, path):
    """As many columns as ranks but one, and none at all; the result and all gradients are the unsharded model's."""
    rows, size, by_rank = split_rows(5, ctx.size), ctx.size, {"path": path}
    by_rank |= {"rows": rows} if name == "matmul_reduce_scatter" else {}
    for columns, out_features in ((size - 1, 6), (0, 6), (size - 1, 0)):
        x64, w64, bias64 = leaves(
            integers((5, columns), torch.float32, 1), integers((out_features, columns), torch.float32, 2),
            integers(out_features, torch.float32, 3),
        )  # fmt: skip
        dy = integers((5, out_features), torch.float32, 4)
        want = x64 @ w64.t() + bias64
        want.backward(dy.double())
        parts = split_rows(columns, size)
        x, w = (mine(each.float().split(parts, 1), ctx) for each in (x64, w64))
        bias = mine([bias64.float()] * size, ctx)
        y = getattr(tkernels, name)(x, w, bias, ctx=ctx, **by_rank)
        want, dy = (each.split(rows)[ctx.rank] if "rows" in by_rank else each for each in (want, dy))
        y.backward(dy.to(ctx.device))
        ctx.check()
        assert torch.equal(y.cpu().double(), want), (columns, out_features)
        for got, expected in ((x, x64.grad.split(parts, 1)[ctx.rank]), (w, w64.grad.split(parts, 1)[ctx.rank])):
            assert torch.equal(got.grad.cpu().double(), expected), (columns, out_features)
        assert torch.equal(bias.grad.cpu().double(), bias64.grad)


@pytest.mark.ranks(2, 3)
@every_path
def test_all_gather_matmul_where_some_ranks_have_no_features(ctx, path):
    """As many features as ranks but one, none at all, and no columns; with and without the gathered rows."""
    rows, size = split_rows(5, ctx.size), ctx.size
    for features, columns in ((size - 1, 8), (0, 8), (size - 1, 0)):
        parts = split_rows(features, size)
        for return_gathered in (False, True):
            x64, w64, bias64 = leaves(
                integers((5, columns), torch.float32, 1), integers((features, columns), torch.float32, 2),
                integers(features, torch.float32, 3),
            )  # fmt: skip
            dy = integers((5, features), torch.float32, 4)
            want = x64 @ w64.t() + bias64
            want.backward(dy.double())
            x = mine(x64.float().split(rows), ctx)
            w, bias = (mine(each.float().split(parts), ctx) for each in (w64, bias64))
            y = tkernels.all_gather_matmul(x, w, bias, None, return_gathered, rows=rows, ctx=ctx, path=path)
            if return_gathered:
                y, gathered = y
                assert torch.equal(gathered.cpu().double(), x64)
            y.backward(dy.split(parts, 1)[ctx.rank].to(ctx.device))
            ctx.check()
            assert torch.equal(y.cpu().double(), want.split(parts, 1)[ctx.rank]), (features, columns)
            assert torch.equal(x.grad.cpu().double(), x64.grad.split(rows)[ctx.rank]), (features, columns)
            assert torch.equal(w.grad.cpu().double(), w64.grad.split(parts)[ctx.rank]), (features, columns)
            assert torch.equal(bias.grad.cpu().double(), bias64.grad.split(parts)[ctx.rank])


@pytest.mark.quick
@pytest.mark.ranks(2)
def test_gradients_of_the_collectives_are_exact(ctx):
    rows = (5, 2)
    parts = [integers((count, 3), torch.float32, rank, device=ctx.device) for rank, count in enumerate(rows)]
    wholes = [integers((7, 3), torch.float32, 10 + rank, device=ctx.device) for rank in range(2)]

    x = mine(parts, ctx)
    tkernels.all_gather(x, rows=rows, ctx=ctx).backward(wholes[ctx.rank])
    assert torch.equal(x.grad, sum(wholes).split(rows)[ctx.rank])

    for options, factor in (({}, 1), ({"factor": 0.25}, 0.25)):
        x = mine(wholes, ctx)
        y = tkernels.reduce_scatter(x, rows=rows, ctx=ctx, **options)
        y.backward(parts[ctx.rank])
        assert torch.equal(y, factor * sum(wholes).split(rows)[ctx.rank])
        assert torch.equal(x.grad, factor * torch.cat(parts))

        x = mine(wholes, ctx)
        y = tkernels.all_reduce(x, ctx=ctx, **options)
        y.backward(wholes[0])  # the result is one tensor, and so is its gradient
        assert torch.equal(y, factor * sum(wholes)) and torch.equal(x.grad, factor * wholes[0])


@pytest.mark.ranks(2)
def test_the_gathered_rows_have_a_gradient_alone_and_beside_the_product(ctx):
    rows = split_rows(33, ctx.size)
    whole = Whole(ctx, torch.float32, rows, make=integers)
    for with_product in (False, True):
        x64, w64 = leaves(whole.x_rows, whole.w_rows)
        loss = ctx.size * (x64 * whole.dgathered.double()).sum()
        if with_product:
            loss = loss + ((x64 @ w64.t()) * whole.dy_rows.double()).sum()
        loss.backward()
        x, w = mine(whole.x_rows.split(rows), ctx), mine(whole.w_rows.chunk(ctx.size), ctx)
        y, gathered = tkernels.all_gather_matmul(x, w, return_gathered=True, rows=rows, ctx=ctx)
        loss = (gathered * whole.dgathered.to(ctx.device)).sum()
        if with_product:
            loss = loss + (y * whole.dy_rows.chunk(ctx.size, dim=1)[ctx.rank].to(ctx.device)).sum()
        loss.backward()
        assert torch.equal(x.grad, x64.grad.split(rows)[ctx.rank].float().to(ctx.device))
        if with_product:
            assert torch.equal(w.grad, w64.grad.chunk(ctx.size)[ctx.rank].float().to(ctx.device))


@pytest.mark.ranks(2)
def test_an_activation_has_its_gradient_and_the_same_forward_as_without_one(ctx):
    rows = split_rows(17, ctx.size)
    whole = Whole(ctx, torch.float32, rows)
    for activation in ("relu", "gelu", "gelu_tanh", "silu"):
        x64, w64, bias64 = leaves(whole.x_columns, whole.w_columns, whole.bias)
        activation_reference(x64 @ w64.t() + bias64, activation).backward(whole.dy.double())
        x = mine(whole.x_columns.chunk(ctx.size, dim=1), ctx)
        w, bias = mine(whole.w_columns.chunk(ctx.size, dim=1), ctx), mine([whole.bias] * ctx.size, ctx)
        y = tkernels.matmul_reduce_scatter(x, w, bias, activation, rows=rows, ctx=ctx)
        with torch.no_grad():
            fused = tkernels.matmul_reduce_scatter(x, w, bias, activation, rows=rows, ctx=ctx)
        assert_close_to(y, fused.double(), terms=2 * K)
        y.backward(whole.dy.split(rows)[ctx.rank].to(ctx.device))
        # The slope is taken where the forward sum came out, K terms off its exact place, and then multiplies.
        assert_close_to(x.grad, x64.grad.chunk(ctx.size, dim=1)[ctx.rank], terms=2 * K * N)
        assert_close_to(w.grad, w64.grad.chunk(ctx.size, dim=1)[ctx.rank], terms=2 * K * sum(rows))
    with pytest.raises(TkernelsError, match="no gradient through a fused activation .'silu'.; call tkernels.matmul"):
        OPS.matmul_reduce_scatter(x, w, bias, None, None, "silu", rows, ctx.name).sum().backward()


@pytest.mark.ranks(2)
@every_path
def test_backward_takes_the_path_of_forward(ctx, path):
    x, w = (normal((8, 8), torch.float32, seed, device=ctx.device).requires_grad_() for seed in (1, 2))
    for call, kernel in (
        (tkernels.all_gather_matmul, "matmul_reduce_kernel"),
        (tkernels.matmul_reduce_scatter, "all_gather_matmul_kernel"),
    ):
        for weight in (w, w.detach()):  # with a gradient of both, the gathered rows are borrowed
            y = call(x, weight, ctx=ctx, path=path)
            with launches() as launched:
                y.sum().backward()
            assert (kernel in [name for name, *_ in launched]) == (path == "fused"), call


@pytest.mark.ranks(2)
def test_gradients_agree_with_finite_differences(ctx):
    rows, out = (2, 1), 3
    x_parts = [normal((count, 4), torch.float32, rank, device=ctx.device) for rank, count in enumerate(rows)]
    w1 = [normal((5, 4), torch.float32, 10 + rank, device=ctx.device) for rank in range(2)]
    w2 = [normal((out, 5), torch.float32, 20 + rank, device=ctx.device) for rank in range(2)]

    def loss(x, first, second):
        """Collective. A two-layer block, as the sum over ranks of the squares of what they hold."""
        hidden = tkernels.all_gather_matmul(x, first, None, "gelu", rows=rows, ctx=ctx)
        return tkernels.matmul_reduce_scatter(hidden, second, rows=rows, ctx=ctx).square().sum()

    operands = [mine(x_parts, ctx), mine(w1, ctx), mine(w2, ctx)]
    loss(*operands).backward()
    step = 2.0**-6
    for which, owner in ((0, 0), (0, 1), (1, 1), (2, 0)):
        for place in (0, 3):
            values = []
            for direction in (step, -step):
                moved = [operand.detach().clone() for operand in operands]
                if ctx.rank == owner:
                    moved[which].view(-1)[place] += direction
                values.append(sum(ctx.group.gather(loss(*moved).item())))
            difference = (values[0] - values[1]) / (2 * step)
            gradient = ctx.group.gather(operands[which].grad.view(-1)[place].item())[owner]
            # The truncation of a central difference is about step^2, its rounding 1e-7 of the loss over the step.
            assert abs(difference - gradient) < 2e-2 * max(1.0, abs(gradient)), (which, owner, place)


@pytest.mark.ranks(2)
def test_an_expanded_gradient_is_taken(ctx):
    rows = (4, 3)
    whole = Whole(ctx, torch.float32, rows, make=integers)
    x, w = mine(whole.x_rows.split(rows), ctx), mine(whole.w_rows.chunk(ctx.size), ctx)
    tkernels.all_gather_matmul(x, w, rows=rows, ctx=ctx).sum().backward()
    assert torch.equal(x.grad.cpu(), whole.w_rows.sum(0).expand(rows[ctx.rank], K))
    x = mine(whole.x_columns.chunk(ctx.size, dim=1), ctx)
    w = mine(whole.w_columns.chunk(ctx.size, dim=1), ctx)
    for call in (lambda: tkernels.matmul_reduce_scatter(x, w, rows=rows, ctx=ctx),
                 lambda: tkernels.matmul_all_reduce(x, w, ctx=ctx)):  # fmt: skip
        x.grad = w.grad = None
        call().sum().backward()
        assert torch.equal(x.grad, w.detach().sum(0).expand(7, K))
        assert torch.equal(w.grad, x.detach().sum(0).expand(N, K))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("path", ["fused", "plain"])
def test_matmul_and_its_kin_take_operands_of_any_strides_forward_and_backward(ctx, path):
    """Of which no stride is 1, or one is 0: every second column, expanded numbers, one row or column of a table."""

    def of(way: str, rows: int, seed: int):
        if way == "expanded":
            return torch.tensor([[float(seed % 5)]], dtype=torch.bfloat16, device=ctx.device).expand(rows, 16)
        depth = 1 if way == "one column" else 16
        table = integers((rows, 2 * depth + 2, 3), torch.bfloat16, seed, device=ctx.device)
        return table[:, 2::2, 1]

    calls = {
        "matmul": lambda x, w: tkernels.matmul(x, w),
        "all_gather_matmul": lambda x, w: tkernels.all_gather_matmul(x, w, path=path, ctx=ctx),
        "several": lambda x, w: tkernels.all_gather_matmul(x, [w, w], path=path, ctx=ctx)[1],
        "matmul_reduce_scatter": lambda x, w: tkernels.matmul_reduce_scatter(x, w, path=path, ctx=ctx),
        "matmul_all_reduce": lambda x, w: tkernels.matmul_all_reduce(x, w, path=path, ctx=ctx),
    }
    for way, rows in (("every second", 8), ("every second", 2), ("one column", 8), ("expanded", 8)):
        x, w = of(way, rows, ctx.rank), of(way, 6, 7 + ctx.rank)
        assert 1 not in x.stride() or 0 in x.stride()
        for name, call in calls.items():
            got, want = [], []
            for found, operands in ((got, (x, w)), (want, (x.clone().contiguous(), w.clone().contiguous()))):
                leaves = [each.detach().requires_grad_() for each in operands]
                y = call(*leaves)
                y.backward(integers(tuple(y.shape), y.dtype, 3, device=ctx.device))
                found += [y.detach(), *(leaf.grad for leaf in leaves)]
            for one, other in zip(got, want, strict=True):
                assert torch.equal(one, other), (way, name)
    ctx.check()


@pytest.mark.ranks(2)
def test_only_the_gradients_that_are_wanted_are_computed(ctx):
    rows = (4, 3)
    whole = Whole(ctx, torch.float32, rows, make=integers)
    x, w = whole.x_rows.split(rows)[ctx.rank].to(ctx.device), mine(whole.w_rows.chunk(ctx.size), ctx)
    y = tkernels.all_gather_matmul(x, w, rows=rows, ctx=ctx)
    y.backward(whole.dy_rows.chunk(ctx.size, dim=1)[ctx.rank].to(ctx.device))
    want = whole.dy_rows.t().double() @ whole.x_rows.double()
    assert torch.equal(w.grad.cpu(), want.chunk(ctx.size)[ctx.rank].float())
    w, bias = whole.w_columns.chunk(ctx.size, dim=1)[ctx.rank].to(ctx.device), mine([whole.bias] * ctx.size, ctx)
    x = whole.x_columns.chunk(ctx.size, dim=1)[ctx.rank].to(ctx.device)
    tkernels.matmul_reduce_scatter(x, w, bias, rows=rows, ctx=ctx).backward(
        whole.dy.split(rows)[ctx.rank].to(ctx.device)
    )
    assert torch.equal(bias.grad.cpu(), whole.dy.sum(0))


@pytest.mark.ranks(2)
def test_gradients_have_gradients_themselves(ctx):
    rows = (4, 3)
    whole = Whole(ctx, torch.float32, rows, make=integers)
    x, w = (mine(t.chunk(ctx.size, dim=1), ctx) for t in (whole.x_columns, whole.w_columns))
    y = tkernels.matmul_reduce_scatter(x, w, rows=rows, ctx=ctx)
    dx, dw = torch.autograd.grad(y, (x, w), mine(whole.dy.split(rows), ctx), create_graph=True)
    dx.backward(x.detach())  # dx is dy @ w
    assert torch.equal(w.grad, dw)


@pytest.mark.ranks(2)
def test_what_forward_has_gathered_goes_before_the_gradient_of_x_takes_memory(ctx):
    rows, gone = (4, 3), []
    whole = Whole(ctx, torch.float32, rows, make=integers)
    x, w = mine(whole.x_rows.split(rows), ctx), mine(whole.w_rows.chunk(ctx.size), ctx)
    y, gathered = tkernels.all_gather_matmul(x, w, return_gathered=True, rows=rows, ctx=ctx)
    held = StorageWeakRef(gathered.untyped_storage())
    del gathered
    make_call = Context.call

    def look(context, call, *tensors):
        if call.operation == "matmul_reduce_scatter":
            gone.append(held.expired())
        return make_call(context, call, *tensors)

    with mock.patch.object(Context, "call", look):
        y.backward(torch.ones_like(y), retain_graph=True)
        y.backward(torch.ones_like(y))
    assert gone == [False, True]


@pytest.mark.ranks(2)
def test_opcheck_passes_for_every_operator(ctx):
    rows = (4, 3)
    whole = Whole(ctx, torch.float32, rows)
    x, w = mine(whole.x_rows.split(rows), ctx), mine(whole.w_rows.chunk(ctx.size), ctx)
    bias, w2 = mine(whole.bias_rows.chunk(ctx.size), ctx), w.detach().clone().requires_grad_()
    x_k, w_k = (mine(t.chunk(ctx.size, dim=1), ctx) for t in (whole.x_columns, whole.w_columns))
    bias_k, whole_rows = mine([whole.bias] * ctx.size, ctx), mine([whole.dy] * ctx.size, ctx)
    dy_rows = mine(whole.dy.split(rows), ctx).detach()
    unscaled = None, None
    cases = [
        (OPS.matmul, (x, w, bias, *unscaled, None)),
        (OPS.matmul, (x.detach(), w.detach(), None, *unscaled, "relu")),
        (OPS.matmul, (x.bfloat16(), w.bfloat16(), None, *unscaled, None, torch.float32)),
        (OPS.all_gather_matmul, (x, w, bias, *unscaled, None, False, rows, ctx.name)),
        (OPS.all_gather_matmul, (x, w, None, *unscaled, None, True, rows, ctx.name)),
        (OPS.all_gather_matmul, (x.detach(), w.detach(), None, *unscaled, "silu", False, rows, ctx.name)),
        (OPS.all_gather_matmuls, (x, [w, w2], [bias], [False, True], None, False, rows, ctx.name, None, [0])),
        (OPS.all_gather_matmuls, (x.detach(), [w.detach()], [], [False], "relu", True, rows, ctx.name, None, [0])),
        (OPS.matmul_reduce_scatter, (x_k, w_k, bias_k, *unscaled, None, rows, ctx.name)),
        (OPS.matmul_reduce_scatter, (x_k.detach(), w_k.detach(), None, *unscaled, "gelu", rows, ctx.name)),
        (OPS.matmul_reduce_scatter_backward, (dy_rows, x_k.detach(), w_k.detach(), True, rows, ctx.name)),
        (OPS.matmul_all_reduce, (x_k, w_k, bias_k, *unscaled, None, ctx.name)),
        (OPS.all_gather, (x, rows, ctx.name)),
        (OPS.reduce_scatter, (whole_rows, rows, ctx.name)),
        (OPS.all_reduce, (whole_rows, ctx.name)),
        (OPS.reduce_scatter, (whole_rows, rows, ctx.name, 0.5)),
        (OPS.all_reduce, (whole_rows, ctx.name, 0.5)),
    ]
    for operator, arguments in cases:
        opcheck(operator.default, arguments)
    x, whole_rows = x.detach(), whole_rows.detach()
    into = [
        (OPS.all_gather_out, (x, rows, ctx.name), torch.empty(7, K)),
        (OPS.reduce_scatter_out, (whole_rows, rows, ctx.name), torch.empty(rows[ctx.rank], N)),
        (OPS.all_reduce_out, (whole_rows, ctx.name, 0.5), torch.empty(7, N, dtype=torch.bfloat16)),
    ]
    for operator, arguments, out in into:
        opcheck(operator.default, arguments, {"out": out.to(ctx.device)})
    x8, w8, one = x.to(torch.float8_e4m3fn).new_zeros(7, 16), x.to(torch.float8_e4m3fn).new_zeros(4, 16), x.new_ones(1)
    finish, place = (None, one, one, "relu"), (rows, ctx.name, None)
    scaled = [
        (OPS.quantize, (x, None, "row", torch.float8_e4m3fn, False)),
        (OPS.dequantize, (x8, one, torch.bfloat16)),
        (OPS.transpose_quantized, (x8, one)),
        (OPS.matmul, (x8, w8, *finish)),
        (OPS.all_gather_matmul, (x8[: rows[ctx.rank]], w8, *finish, True, *place, torch.float32)),
        (OPS.matmul_reduce_scatter, (x8, w8, *finish, *place)),
        (OPS.matmul_all_reduce, (x8, w8, *finish, *place[1:], None, torch.float32, False)),
    ]
    for operator, arguments in scaled:  # the check that is left out compares arguments of FP8, which torch can't
        opcheck(operator.default, arguments, test_utils=("test_faketensor", "test_aot_dispatch_dynamic"))
    checked = {operator._qualified_op_name for operator, *_ in cases + into + scaled}
    assert checked == {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("tkernels::")}


@pytest.mark.ranks(2)
def test_who_looks_sees_operators_and_gets_what_others_get(ctx):
    """A mode, a profiler and a subclass see what a plain call leaves out on its short way, forward and backward."""
    rows = (4, 3)
    whole = Whole(ctx, torch.float32, rows, make=integers)

    def step(make=lambda tensor: tensor):
        x, w = mine(whole.x_rows.split(rows), ctx), mine(whole.w_rows.chunk(ctx.size), ctx)
        y, gathered = tkernels.all_gather_matmul(make(x), make(w), None, None, True, rows=rows, ctx=ctx)
        second = mine(whole.w_rows.t().contiguous().chunk(ctx.size, dim=1), ctx)
        z = tkernels.matmul_reduce_scatter(y, second, rows=rows, ctx=ctx)
        total = tkernels.all_reduce(z.sum(0), ctx=ctx) + tkernels.all_gather(z, rows=rows, ctx=ctx).sum(0)
        (total.sum() + gathered.sum()).backward()
        return [tensor.detach() for tensor in (y, gathered, z, total, x.grad, w.grad, second.grad)]

    plain = step()
    with Operators(ours=True) as log:
        watched = step()
    assert {name: log.names.count(name) for name in log.names} == {
        "all_gather_matmul": 1, "matmul_reduce_scatter": 2, "matmul_reduce_scatter_backward": 1, "all_reduce": 1,
        "all_gather": 1, "reduce_scatter": 2,
    }  # fmt: skip
    with torch.profiler.profile() as profiler:
        profiled = step()
    seen = {event.key for event in profiler.key_averages()}
    assert {f"tkernels::{name}" for name in log.names} <= seen
    for others in (watched, profiled):
        assert [torch.equal(*pair) for pair in zip(plain, others, strict=True)] == [True] * len(plain)


class Named(torch.Tensor):
    """A tensor that says what is done to it."""

    called = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.called.append(getattr(function, "__name__", str(function)))
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_subclass_of_tensor_is_asked():
    device = torch.device("cuda", torch.cuda.current_device()) if tkernels.RUNTIME == "nvshmem" else "cpu"
    x = torch.ones(3, 4, device=device).as_subclass(Named)
    y = tkernels.matmul(x, torch.ones(2, 4, device=device))
    assert type(y) is Named and any("matmul" in name for name in Named.called)
    assert torch.equal(y.as_subclass(torch.Tensor), torch.full((3, 2), 4.0, device=device))


@pytest.mark.ranks(2)
def test_a_compiled_block_gives_the_same_results_and_gradients(ctx):
    rows = split_rows(9, ctx.size)
    whole = Whole(ctx, torch.float32, rows)
    second = normal((K, ctx.size * N), torch.float32, 11)

    def block(x, w1, bias, w2):
        hidden = tkernels.all_gather_matmul(x, w1, bias, "gelu_tanh", rows=rows, ctx=ctx)
        return tkernels.matmul_reduce_scatter(hidden, w2, rows=rows, ctx=ctx)

    results = []
    for function in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        operands = [
            mine(whole.x_rows.split(rows), ctx), mine(whole.w_rows.chunk(ctx.size), ctx),
            mine(whole.bias_rows.chunk(ctx.size), ctx), mine(second.chunk(ctx.size, dim=1), ctx),
        ]  # fmt: skip
        y = function(*operands)
        y.square().sum().backward()
        results.append([y.detach(), *(operand.grad for operand in operands)])
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def test_matmul_takes_sizes_of_data_in_compiled_code():
    """What fits by equal masks can't be compared in a trace."""
    x, w, bias = (torch.ones(size, device=runtime.device()) for size in ((8, 16), (32, 16), 32))
    mask = torch.arange(32, device=x.device) % 2 == 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        step = torch.compile(lambda m, n: tkernels.matmul(x, w[m], bias[n]), fullgraph=True, backend="aot_eager")
        assert step(mask, mask.clone()).eq(17.0).all()
    torch.compiler.reset()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["matmul", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_matmul_and_its_kin_name_operands_that_dont_fit_in_compiled_code_too(ctx, name):
    """The trace of their gradients fails at these as well, in torch's words."""
    x, w = (torch.ones(rows, 8, device=ctx.device, requires_grad=True) for rows in (4, 6))
    step = torch.compile(lambda *operands: getattr(tkernels, name)(*operands), fullgraph=True, backend="aot_eager")
    wrong = [
        ((x, w.t()), r"x is \(4, 8\) and w is \(8, 6\), but K"), ((x, w[0]), r"w must be a matrix"),
        ((x, w[None]), "w must be a matrix"), ((x, w.bfloat16()), "x is torch.float32 and w is torch.bfloat16"),
        ((x, w, torch.ones(1, device=ctx.device, requires_grad=True)), r"bias is torch.float32 \(1,\)"),
    ]  # fmt: skip
    for operands, said in wrong:
        torch.compiler.reset()
        with pytest.raises(Exception, match=f"{name}: {said}"):
            step(*operands)
    if name == "all_gather_matmul":
        with pytest.raises(Exception, match=f"{name}: bias is torch.float32 \\(1,\\)"):
            torch.compile(tkernels.all_gather_matmul, fullgraph=True, backend="aot_eager")(
                x, [w, w], [None, torch.ones(1, device=ctx.device, requires_grad=True)]
            )
    ctx.check()


@pytest.mark.ranks(2)
def test_compiled_code_sees_that_out_is_written(ctx):
    def step(shard, memory):
        before = memory + 1
        whole = tkernels.all_gather(shard, out=memory, ctx=ctx)
        return before, whole * 2, memory + 3

    shard = torch.full((2, 3), float(ctx.rank), device=ctx.device)
    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        memory = torch.zeros(4, 3, device=ctx.device)
        results.append([*function(shard, memory), memory])
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)
    assert results[0][0].eq(1).all() and results[0][3][:, 0].tolist() == [0, 0, 1, 1]


@pytest.mark.ranks(2)
def test_fake_tensors_have_the_shapes_of_real_ones(ctx):
    rows = (5, 2)
    shapes = []
    for mode in (None, FakeTensorMode()):

        def make(*shape, dtype=torch.bfloat16, mode=mode):
            if mode is None:
                return torch.zeros(shape, dtype=dtype, device=ctx.device)
            with mode:
                return torch.empty(shape, dtype=dtype, device=ctx.device)

        x, w = make(rows[ctx.rank], 6), make(4, 6)
        y, gathered, scales = OPS.all_gather_matmul(x, w, None, None, None, None, True, rows, ctx.name)
        results = [
            y, gathered, scales, OPS.all_gather_matmul(x, w, None, None, None, None, False, rows, ctx.name)[1],
            OPS.matmul_reduce_scatter(make(7, 6), w, make(4), None, None, "relu", rows, ctx.name),
            *OPS.matmul_reduce_scatter_backward(make(rows[ctx.rank], 4), make(7, 6), w, True, rows, ctx.name),
            OPS.matmul_all_reduce(make(7, 6), make(6, 4).t(), None, None, None, None, ctx.name),
            OPS.all_gather(make(rows[ctx.rank], 2, 3, dtype=torch.int64), rows, ctx.name),
            OPS.reduce_scatter(make(7, 2), rows, ctx.name),
            OPS.all_reduce(make(3, 4).t(), ctx.name),
        ]  # fmt: skip
        shapes.append([(result.shape, result.stride(), result.dtype, result.device) for result in results])
    assert shapes[0] == shapes[1]


@pytest.mark.ranks(2)
def test_the_context_may_be_left_out(ctx):
    with tkernels.init(ctx.group.process_group, heap_bytes=4 << 20) as newest:
        assert tkernels.current_context() is newest
        x = torch.full((2, 3), float(ctx.rank), device=ctx.device)
        w = torch.eye(3, device=ctx.device)
        both = torch.tensor([0.0, 0.0, 1.0, 1.0], device=ctx.device)
        assert torch.equal(tkernels.all_gather_matmul(x, w)[:, 0], both)
        assert torch.equal(tkernels.all_gather(x)[:, 0], both)
        for result in (tkernels.matmul_all_reduce(x, w), tkernels.all_reduce(x)):
            assert torch.equal(result, torch.ones_like(x))
        for result in (tkernels.matmul_reduce_scatter(x, w), tkernels.reduce_scatter(x)):
            assert torch.equal(result, torch.ones_like(x[:1]))
        tkernels.barrier()
        assert newest.workspace().state[0] > 0  # it was this one


@pytest.mark.ranks(2)
@every_path
def test_what_the_first_call_in_inference_mode_prepares_serves_training(ctx, path):
    """torch forbids tensors made in that mode to be written to, or saved, outside of it: inboxes, scratch."""
    x, w = (integers((8, 8), torch.float32, seed, device=ctx.device).requires_grad_() for seed in (ctx.rank, 7))

    def results(context, options):
        for product in (tkernels.all_gather_matmul, tkernels.matmul_reduce_scatter, tkernels.matmul_all_reduce):
            yield product(x, w, ctx=context, **options)
        for move in (tkernels.all_gather, tkernels.reduce_scatter, tkernels.all_reduce):
            yield move(x, ctx=context)

    wanted = list(results(ctx, {}))
    with torch.inference_mode():
        context = tkernels.init(ctx.group.process_group, heap_bytes=16 << 20)
        evaluated = [result.clone() for result in results(context, {"path": path})]
        mine = context.empty(4)
    with context:
        for want, before, result in zip(wanted, evaluated, results(context, {"path": path}), strict=True):
            assert before.equal(want) and result.equal(want)
            gradients = [torch.autograd.grad(each.sum(), (x, w), allow_unused=True) for each in (result, want)]
            assert all(a is b or a.equal(b) for a, b in zip(*gradients, strict=True))
        mine.fill_(1.0)
        context.workspace().scratch.zero_()


@pytest.mark.parametrize("activation", [None, "silu"])
def test_matmul_has_gradients_also_under_autocast(activation):
    device = torch.device("cuda", torch.cuda.current_device()) if tkernels.RUNTIME == "nvshmem" else torch.device("cpu")
    x, w, bias = (normal(shape, torch.float32, i) for i, shape in enumerate([(7, K), (N, K), (N,)]))
    whole = leaves(x, w, bias)
    operands = [t.to(device).requires_grad_() for t in (x, w, bias)]
    y = tkernels.matmul(*operands, activation)
    want = activation_reference(whole[0] @ whole[1].t() + whole[2], activation)
    assert_close_to(y, want, K + 1)
    dy = normal((7, N), torch.float32, 9)
    with torch.autocast(device.type, torch.bfloat16):  # which casts no operands of operators, in backward either
        y.backward(dy.to(device))
    want.backward(dy.double())
    for got, reference in zip(operands, whole, strict=True):
        assert_close_to(got.grad, reference.grad, 4 * N)


@pytest.mark.ranks(2)
def test_gradients_of_rows_that_tma_cant_take_are_products_of_matmul_and_have_gradients_themselves(ctx, monkeypatch):
    multiplied_by(monkeypatch, "kernel")
    monkeypatch.setattr("tkernels.torch_operators.may_stage", lambda a, b: True)
    calls = {
        "matmul": lambda x, w: tkernels.matmul(x, w),
        "all_gather_matmul": lambda x, w: tkernels.all_gather_matmul(x, w, ctx=ctx),
        "matmul_reduce_scatter": lambda x, w: tkernels.matmul_reduce_scatter(x, w, ctx=ctx),
        "matmul_all_reduce": lambda x, w: tkernels.matmul_all_reduce(x, w, ctx=ctx),
    }
    for name, call in calls.items():
        x, w = (integers(s, torch.float32, 7 + ctx.rank, device=ctx.device).requires_grad_() for s in ((6, 5), (3, 5)))
        grads, products = [], []
        for staged in (True, False):
            monkeypatch.setattr("tkernels.torch_operators.may_stage", lambda a, b, staged=staged: staged)
            with launches() as launched:
                first = torch.autograd.grad(call(x, w).square().sum(), (x, w), create_graph=True)
                second = torch.autograd.grad(first[0].sum() + first[1].sum(), (x, w))
            products.append([kernel for kernel, *_ in launched].count("matmul_kernel"))
            grads.append((*first, *second))
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True)), name
        assert products[0] > products[1], name  # of which the plain path, where it is taken, has its own


def test_an_unknown_activation_is_refused_before_anything_is_computed():
    x = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(ValueError, match="activation='tanh' is unknown"):
        tkernels.matmul(x, x, activation="tanh")


@pytest.mark.ranks(2)
def test_matmul_and_the_collectives_under_torch_func(ctx):
    """torch.func.grad and vmap, of each other too, give what autograd and a loop give. Forward mode is refused."""
    whole = Whole(ctx, torch.float32, (3, 3), lambda shape, dtype, seed: integers(shape, dtype, seed, -2, 2))
    w, bias = (each.chunk(2)[ctx.rank].to(ctx.device) for each in (whole.w_rows, whole.bias_rows))
    w_k, bias_k = whole.w_columns.chunk(2, dim=1)[ctx.rank].to(ctx.device), whole.bias.to(ctx.device)
    batch = torch.stack([integers((4, K), torch.float32, 20 + 2 * at + ctx.rank, -2, 2) for at in range(3)])
    batch, heavy = batch.to(ctx.device), torch.arange(3.0, device=ctx.device).view(3, 1, 1)
    functions = {
        "matmul": lambda x: tkernels.matmul(x, w, bias),
        "matmul with relu": lambda x: tkernels.matmul(x, w, bias, "relu"),
        "all_gather_matmul": lambda x: tkernels.all_gather_matmul(x, w, bias, ctx=ctx),
        "gathered": lambda x: tkernels.all_gather_matmul(x, w, return_gathered=True, ctx=ctx)[1],
        "matmul_reduce_scatter": lambda x: tkernels.matmul_reduce_scatter(x, w_k, bias_k, ctx=ctx),
        "matmul_all_reduce": lambda x: tkernels.matmul_all_reduce(x, w_k, bias_k, ctx=ctx),
        "all_gather": lambda x: tkernels.all_gather(x, ctx=ctx),
        "reduce_scatter": lambda x: tkernels.reduce_scatter(x, ctx=ctx),
        "all_reduce": lambda x: tkernels.all_reduce(x, ctx=ctx),
        "all_reduce with a factor": lambda x: tkernels.all_reduce(x, factor=0.5, ctx=ctx),
    }
    for name, function in functions.items():

        def loss(x, function=function):
            return function(x).square().sum()

        def slope(x, loss=loss):
            return torch.func.grad(loss)(x).square().sum()

        def slow(x, loss=loss):
            (dx,) = torch.autograd.grad(loss(x), x, create_graph=True)
            return dx

        x = batch[0].clone().requires_grad_()
        (want_second,) = torch.autograd.grad(slow(x).square().sum(), x)
        looped = torch.stack([slow(each.clone().requires_grad_()).detach() for each in batch])
        assert torch.equal(torch.func.grad(loss)(batch[0]), looped[0]), name
        assert torch.equal(torch.func.grad(slope)(batch[0]), want_second), name
        assert torch.equal(torch.vmap(function)(batch), torch.stack([function(each) for each in batch])), name
        assert torch.equal(torch.vmap(torch.func.grad(loss), in_dims=2)(batch.permute(1, 2, 0)), looped), name
        mapped = torch.func.grad(lambda xs, loss=loss: (torch.vmap(loss)(xs) * heavy.view(3)).sum())(batch)
        assert torch.equal(mapped, looped * heavy), name
        asked = name.split()[0].replace("gathered", "all_gather_matmul")
        for forward in (torch.func.jvp, lambda f, x, t: dual(f, x[0], t[0])):
            with pytest.raises(NotImplementedError, match=f"tkernels.{asked} has no forward mode.*use backward"):
                forward(function, (batch[0],), (batch[1],))
    by_weight = torch.vmap(tkernels.matmul, in_dims=(None, 2))(batch[0], torch.stack([w, 2 * w], dim=2))
    assert torch.equal(by_weight, torch.stack([batch[0] @ w.t(), 2 * batch[0] @ w.t()]))
    # torch.compile would differentiate the forward of a Function in place of its backward.
    slope = torch.func.grad(lambda x: tkernels.matmul(x, w).sum())
    with pytest.raises(torch._dynamo.exc.Unsupported, match="matmul: torch.compile doesn't see through torch.func"):
        torch.compile(slope, backend="eager", fullgraph=True)(batch[0])
    with pytest.raises(ValueError, match="all_reduce: out= has no gradient; leave it out$"):  # no_grad doesn't help
        torch.vmap(lambda x: tkernels.all_reduce(x, out=torch.empty_like(x), ctx=ctx))(batch)


@pytest.mark.ranks(2)
def test_quantize_and_calls_that_fill_out_have_no_forward_mode(ctx):
    """Where nothing has a gradient either: a tangent would be dropped without a word."""
    x, t = (normal((8, 16), torch.float32, seed, device=ctx.device) for seed in (1, 2))
    w, small = normal((6, 16), torch.float32, 3, device=ctx.device), GemmConfig(16, 16, 16)
    calls = {
        "matmul": lambda x: tkernels.matmul(x, w, config=small),
        "all_gather_matmul": lambda x: tkernels.all_gather_matmul(x, w, out=x.new_empty(16, 6), ctx=ctx),
        "matmul_reduce_scatter": lambda x: tkernels.matmul_reduce_scatter(x, w, out=x.new_empty(4, 6), ctx=ctx),
        "all_gather_out": lambda x: tkernels.all_gather(x, out=x.new_empty(16, 16), ctx=ctx),
        "all_reduce_out": lambda x: tkernels.all_reduce(x, out=x.new_empty(8, 16), ctx=ctx),
        "quantize": lambda x: tkernels.quantize(x)[1],
        "dequantize": lambda x: tkernels.dequantize(x.to(torch.float8_e4m3fn), x[:, :1].abs(), torch.float32),
    }
    for name, call in calls.items():
        with pytest.raises(NotImplementedError, match=f"tkernels.{name} has no forward mode"):
            dual(call, x, t)
        with forward_ad.dual_level():
            call(x)  # which has no tangent


def dual(function, x, tangent):
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(x, tangent))


@pytest.mark.ranks(2)
def test_matmul_and_every_operation_name_what_is_no_operand_and_no_option(ctx):
    x, w = torch.zeros(4, 8, device=ctx.device), torch.zeros(6, 8, device=ctx.device)
    sparse, many = x.to_sparse(), torch.nested.nested_tensor([x, x], layout=torch.jagged)
    products = ("matmul", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
    calls = [(name, (wrong, w), {}) for name in products for wrong in (None, 3, [[1.0]], x.cpu().numpy(), sparse)]
    calls += [(name, (x, wrong), {}) for name in products for wrong in (None, "w", sparse)]
    calls += [(name, (x, w, 3), {"activation": activation}) for name in products for activation in (None, "relu")]
    calls += [(name, (x, w), {"path": wrong}) for name in products[1:] for wrong in (["plain"], {})]
    calls += [(name, (x, w), {option: {}}) for name in products for option in ("config", "out_dtype")]
    collectives = ("all_gather", "reduce_scatter", "all_reduce")
    calls += [(name, (wrong,), {}) for name in collectives for wrong in (None, 3, [1.0], sparse)]
    calls += [(name, (x,), {"out": 3}) for name in collectives]
    calls += [(name, (x,), {"factor": wrong}) for name in collectives[1:] for wrong in (None, "2", x)]
    calls += [(name, (x, w), {"out": wrong}) for name in products[:3] for wrong in (sparse, many)]
    calls += [(name, (x, w), {"config": wrong}) for name in products for wrong in ("fast", 3)]
    calls += [(name, (many, w), {}) for name in products] + [(name, (many,), {}) for name in collectives]
    named = "a (strided )?tensor|a number|one tensor, not a nested|must be an? (Gemm|Overlap)Config|is no value of an"
    for name, arguments, options in calls:
        with pytest.raises(TypeError, match=f"^{name}: .*({named})"):
            getattr(tkernels, name)(*arguments, **options)
    for name in products:
        with pytest.raises(ValueError, match=r"activation=\['relu'\] is unknown"):
            getattr(tkernels, name)(x, w, activation=["relu"])
    assert tkernels.all_reduce(x + 1, ctx=ctx).eq(2).all()
    ctx.check()


@pytest.mark.ranks(2)
def test_every_product_with_options_that_no_operator_has_refuses_a_gradient_and_takes_them_without(ctx):
    x, w = (integers((8, 16), torch.bfloat16, seed, device=ctx.device) for seed in (ctx.rank, 7))
    for name in ("matmul", "all_gather_matmul", "matmul_reduce_scatter"):
        call = functools.partial(getattr(tkernels, name), **({} if name == "matmul" else {"ctx": ctx}))
        want = call(x, w)
        out = torch.empty_like(want)
        for wanting in ((x.clone().requires_grad_(), w), (x, w.clone().requires_grad_())):
            with pytest.raises(ValueError, match=f"{name}: out=, .* have no gradient; leave them out, or call under"):
                call(*wanting, out=out)
            with torch.no_grad():
                assert call(*wanting, out=out) is out and torch.equal(out, want), name
        with pytest.raises(TypeError, match=f"{name}: out=3 must be a tensor"):
            call(x, w, out=3)
    with pytest.raises(ValueError, match="return_gathered= of a tensor or .borrowed. have no gradient"):
        tkernels.all_gather_matmul(x.requires_grad_(), w, return_gathered="borrowed", ctx=ctx)
    ctx.check()


@pytest.mark.ranks(2)
def test_matmul_and_its_kin_count_as_writes_to_out_so_that_a_backward_that_has_saved_it_is_refused(ctx):
    x, w = (integers((8, 16), torch.bfloat16, seed, device=ctx.device) for seed in (ctx.rank, 7))
    rows = ctx.rank * 4, ctx.rank * 4 + 4
    gathers = functools.partial(tkernels.all_gather_matmul, ctx=ctx)
    operators = torch.ops.tkernels
    fills = {
        "matmul": ((8, 8), lambda out: tkernels.matmul(x, w, out=out)),
        "matmul of leading dimensions": ((2, 4, 8), lambda out: tkernels.matmul(x.view(2, 4, 16), w, out=out)),
        "all_gather_matmul": ((16, 8), lambda out: gathers(x, w, out=out)),
        "all_gather_matmul: return_gathered": ((16, 16), lambda out: gathers(x, w, return_gathered=out)),
        "matmul_reduce_scatter": ((4, 8), lambda out: tkernels.matmul_reduce_scatter(x, w, out=out, ctx=ctx)),
        "all_gather": ((16, 16), lambda out: tkernels.all_gather(x, out=out, ctx=ctx)),
        "all_gather in place": ((8, 16), lambda out: tkernels.all_gather(out[slice(*rows)], out=out, ctx=ctx)),
        "reduce_scatter": ((4, 16), lambda out: tkernels.reduce_scatter(x, out=out, ctx=ctx)),
        "all_reduce": ((8, 16), lambda out: tkernels.all_reduce(x, out=out, ctx=ctx)),
        "the operator": ((8, 16), lambda out: operators.all_reduce_out(x, ctx.name, out=out)),
    }
    for name, (shape, fill) in fills.items():
        scale = torch.ones((), dtype=torch.bfloat16, device=ctx.device, requires_grad=True)
        saved = torch.ones(shape, dtype=torch.bfloat16, device=ctx.device)
        y = scale * saved
        before = saved._version
        fill(saved)
        assert saved._version > before, name
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        with torch.inference_mode():
            fill(torch.empty(shape, dtype=torch.bfloat16, device=ctx.device))  # counts nothing, and is no error
    ctx.check()


@pytest.mark.ranks(2)
def test_products_and_barrier_break_the_graph_of_compiled_code_where_no_operator_has_the_options(ctx):
    """torch.compile would look into the interpreter, or a launch, and end the context."""
    x, w = (integers((8, 16), torch.bfloat16, seed, device=ctx.device) for seed in (ctx.rank, 7))

    def calls(x, w):
        tkernels.barrier(ctx=ctx)
        y = tkernels.matmul(x, w, out=x.new_empty(8, 8))
        z = tkernels.all_gather_matmul(x, w, return_gathered="borrowed", ctx=ctx)[0]
        return y, z, tkernels.matmul_reduce_scatter(x, w, out=x.new_empty(4, 8), ctx=ctx)

    for compiled, want in zip(torch.compile(calls, backend="eager")(x, w), calls(x, w), strict=True):
        assert torch.equal(compiled, want)
    for function in (functools.partial(tkernels.matmul, out=x.new_empty(8, 8)), lambda x, w: tkernels.barrier(ctx=ctx)):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="barrier, and products with out=, .* don't trace"):
            torch.compile(lambda *each, f=function: f(*each), backend="eager", fullgraph=True)(x, w)
    ctx.check()


def test_barrier_and_matmul_with_options_that_no_operator_has_refuse_every_other_trace():
    """A barrier, or what is written to `out`, would be missing from it without a word."""
    x, w, own = torch.ones(8, 12), torch.ones(6, 12), tkernels.init(default=True)

    class Calls(torch.nn.Module):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def forward(self, x):
            return x + self.function(x)[0, 0]

    def waits(x):
        tkernels.barrier(ctx=own)
        return x

    def fills(x):
        return tkernels.matmul(x, w, out=torch.empty(8, 6))

    def is_configured(x):
        return tkernels.matmul(x, w, config=GemmConfig(16, 16, 16))

    def exports(calls):
        return lambda x: torch.export.export(calls, (x,), strict=False)

    with own:
        for function in (waits, fills, is_configured):
            for trace in (make_fx, exports):
                with pytest.raises(RuntimeError, match="barrier, and products with out=, .* don't trace"):
                    trace(Calls(function))(x)
        for function in (waits, fills, is_configured, lambda x: tkernels.matmul(x, w), tkernels.all_reduce):
            with pytest.raises(NotImplementedError, match="torch.jit.trace doesn't record it; use torch.export"):
                torch.jit.trace(function, (x,))


@pytest.mark.ranks(2)
def test_matmul_and_its_kin_refuse_tensors_that_stand_for_others_where_no_operator_has_the_options(ctx):
    """The memory of a DTensor isn't its elements: a kernel that works in it ends the process."""
    mesh = DeviceMesh.from_group(ctx.group.process_group, ctx.device.type)
    whole = lambda *shape: DTensor.from_local(torch.ones(shape, device=ctx.device), mesh, [Replicate()])  # noqa: E731
    x, w = torch.ones(8, 16, device=ctx.device), torch.ones(6, 16, device=ctx.device)
    small = OverlapConfig(gemm=GemmConfig(16, 16, 16))
    said = "a DTensor that stands for other tensors is no memory"
    for options in (dict(config=GemmConfig(16, 16, 16)), dict(out=torch.empty(8, 6, device=ctx.device))):
        with pytest.raises(TypeError, match=said):
            tkernels.matmul(x, whole(6, 16), **options)
    with pytest.raises(TypeError, match=said):
        tkernels.matmul(x, w, out=whole(8, 6))
    for operation in (tkernels.all_gather_matmul, tkernels.matmul_reduce_scatter, tkernels.matmul_all_reduce):
        with pytest.raises(TypeError, match=said):
            operation(x, whole(6, 16), config=small, ctx=ctx)
    with pytest.raises(TypeError, match=said):
        tkernels.all_gather_matmul(x, w, return_gathered=whole(16, 16), ctx=ctx)
    for operation, rows in ((tkernels.all_gather, 16), (tkernels.reduce_scatter, 4), (tkernels.all_reduce, 8)):
        with pytest.raises(TypeError, match=f"^{operation.__name__}: out is a DTensor; .*to_local"):
            operation(x, out=whole(rows, 16), ctx=ctx)
    fills = lambda x: tkernels.all_reduce(x, out=torch.empty_like(x), ctx=ctx)  # noqa: E731
    for function in (lambda x: tkernels.matmul(x, w, config=GemmConfig(16, 16, 16)), fills):
        with torch.no_grad(), pytest.raises(TypeError, match="stands for other tensors"):
            torch.func.vmap(function)(x[None])


@pytest.mark.ranks(2)
def test_matmul_and_every_operation_refuse_dtensors_and_name_what_is_wrong_in_a_list(ctx):
    """torch's own errors told to make DTensors of the other operands, and then that there is no rule for them."""
    mesh = DeviceMesh.from_group(ctx.group.process_group, ctx.device.type)
    x, w = torch.ones(8, 16, device=ctx.device), torch.ones(6, 16, device=ctx.device)
    whole, many = DTensor.from_local(w, mesh, [Replicate()]), torch.nested.nested_tensor([w, w], layout=torch.jagged)
    for name in ("matmul", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        for operands in ((x, whole), (whole, whole), (whole.view(2, 3, 16), w)):
            with pytest.raises(TypeError, match=rf"^{name}: [xw]\w* is a DTensor; pass .* as its to_local"):
                getattr(tkernels, name)(*operands)
    for operation in (tkernels.all_gather, tkernels.reduce_scatter, tkernels.all_reduce, tkernels.quantize):
        with pytest.raises(TypeError, match=f"^{operation.__name__}: x.* is a DTensor"):
            operation(whole)
    for weights, said in (([w, whole], "a DTensor"), ([w, many], "one tensor, not a nested one")):
        with pytest.raises(TypeError, match=rf"^all_gather_matmul: w_shard_n\[1\] (is|must be) {said}"):
            tkernels.all_gather_matmul(x, weights, ctx=ctx)
    with pytest.raises(TypeError, match="^all_reduce: out must be one tensor, not a nested one"):
        tkernels.all_reduce(x, out=many, ctx=ctx)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("path", ["fused", "plain"])
def test_every_product_has_the_gradient_of_a_result_and_of_a_wire_in_fp32(ctx, path):
    """The gradients are those of a result in the operands' dtype. These numbers are small, and are not rounded."""
    x, w = (integers((8, 16), torch.bfloat16, seed, device=ctx.device) for seed in (ctx.rank, 7))
    bias = integers(8, torch.bfloat16, 8, device=ctx.device)
    for name in ("matmul", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        options = {} if name == "matmul" else {"ctx": ctx, "path": path}
        wire = {} if name in ("matmul", "all_gather_matmul") else {"wire_dtype": torch.float32}
        found = []
        for wide in ({}, {"out_dtype": torch.float32} | wire):
            tensors = [each.clone().requires_grad_() for each in (x, w, bias)]
            y = getattr(tkernels, name)(*tensors, "relu", **options, **wide)
            dy = integers(y.shape, y.dtype, 9 if name == "matmul_all_reduce" else 9 + ctx.rank, -2, 2, ctx.device)
            found.append([y.detach().float(), *torch.autograd.grad(y, tensors, dy)])
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other), name
        assert y.dtype == torch.float32 and all(each.dtype == x.dtype for each in found[1][1:])
    ctx.check()
