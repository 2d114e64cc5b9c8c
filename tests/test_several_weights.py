"""all_gather_matmul of several weights: one gather, one reduction in backward, and what one by one they would give."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from transports import Operators, every_path, launches

import tkernels
from tkernels.activations import activation_reference
from tkernels.comm.collectives import split_rows
from tkernels.gemm import DTYPES
from tkernels.testing.compare import assert_close_to, integers, normal

K, FEATURES = 6, (7, 3, 5)  # of the weights on each rank
BIASED = (True, False, True)


def operands(ctx, rows, make=integers, dtype=torch.float32):
    """All ranks' x; every weight, bias and gradient of this rank, as leaves that want a gradient."""
    xs = [make((count, K), dtype, 1 + rank) for rank, count in enumerate(rows)]
    at = 100 * ctx.rank
    ws = [make((n, K), dtype, at + 10 + i).to(ctx.device).requires_grad_() for i, n in enumerate(FEATURES)]
    biases = [make(n, dtype, at + 20 + i).to(ctx.device).requires_grad_() for i, n in enumerate(FEATURES)]
    dys = [make((sum(rows), n), dtype, at + 30 + i).to(ctx.device) for i, n in enumerate(FEATURES)]
    return xs, ws, [bias if given else None for bias, given in zip(biases, BIASED, strict=True)], dys


@pytest.mark.ranks(2, 3)
@every_path
def test_all_gather_matmul_of_several_weights_is_exact_with_its_gradients(ctx, path):
    rows = split_rows(9, ctx.size)
    for return_gathered in (False, True):
        for activation in (None, "relu"):
            xs, ws, biases, dys = operands(ctx, rows)
            x = xs[ctx.rank].to(ctx.device).requires_grad_()
            ys = tkernels.all_gather_matmul(x, ws, biases, activation, return_gathered, rows=rows, path=path, ctx=ctx)
            if return_gathered:
                ys, gathered = ys
                assert torch.equal(gathered.cpu(), torch.cat(xs))
            torch.autograd.backward(ys, dys)
            x64 = torch.cat(xs).detach().double().requires_grad_()
            w64, b64 = (
                [None if t is None else t.detach().cpu().double().requires_grad_() for t in ts] for ts in (ws, biases)
            )
            want = [
                activation_reference(torch.nn.functional.linear(x64, w, b), activation)
                for w, b in zip(w64, b64, strict=True)
            ]
            torch.autograd.backward(want, [dy.cpu().double() for dy in dys])
            assert all(torch.equal(y.cpu().double(), each) for y, each in zip(ys, want, strict=True))
            for t, t64 in zip([*ws, *biases], [*w64, *b64], strict=True):
                assert t is None or torch.equal(t.grad.cpu().double(), t64.grad)
            dx = sum(ctx.group.gather(x64.grad)).split(rows)[ctx.rank]
            assert torch.equal(x.grad.cpu().double(), dx)
            with torch.no_grad():  # the activation is fused
                fused = tkernels.all_gather_matmul(x, ws, biases, activation, rows=rows, path=path, ctx=ctx)
            assert all(map(torch.equal, fused, ys))
    ctx.check()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_gather_matmul_of_several_weights_is_rounded_as_one(ctx, dtype):
    rows = (5, 4)
    xs, ws, biases, dys = operands(ctx, rows, normal, dtype)
    x = xs[ctx.rank].to(ctx.device).requires_grad_()
    torch.autograd.backward(tkernels.all_gather_matmul(x, ws, biases, rows=rows, ctx=ctx), dys)
    dx = sum(dy.cpu().double() @ w.detach().cpu().double() for dy, w in zip(dys, ws, strict=True))
    dx = sum(ctx.group.gather(dx)).split(rows)[ctx.rank]
    assert_close_to(x.grad, dx, terms=2 * sum(FEATURES), roundings=3)
    for w, dy in zip(ws, dys, strict=True):
        assert_close_to(w.grad, dy.cpu().double().t() @ torch.cat(xs).double(), terms=9)


@pytest.mark.ranks(2)
def test_all_gather_matmul_of_several_weights_gathers_once_and_reduces_once(ctx):
    rows = (5, 4)
    xs, ws, _, dys = operands(ctx, rows)
    x = xs[ctx.rank].to(ctx.device).requires_grad_()
    with Operators(ours=True) as log:
        torch.autograd.backward(tkernels.all_gather_matmul(x, ws, rows=rows, ctx=ctx), dys)
    assert log.names == ["all_gather_matmuls", "all_gather", "matmul_reduce_scatter"]
    with Operators(ours=True) as log:  # only what is wanted, of the products that are used
        ys = tkernels.all_gather_matmul(x, [w.detach() for w in ws], None, None, True, rows=rows, ctx=ctx)[0]
        x.grad = None
        ys[1].backward(dys[1])
    assert log.names == ["all_gather_matmuls", "matmul_reduce_scatter"]
    dx = sum(ctx.group.gather((dys[1] @ ws[1].detach()).cpu())).split(rows)[ctx.rank]
    assert torch.equal(x.grad.cpu(), dx)
    with Operators(ours=True) as log:
        ys = tkernels.all_gather_matmul(x.detach(), ws, None, None, True, rows=rows, ctx=ctx)[0]
        (ys[0].sum() + ys[2].sum()).backward()
    assert log.names == ["all_gather_matmuls"]
    with launches() as launched, torch.no_grad():
        tkernels.all_gather_matmul(x, ws, rows=rows, ctx=ctx, path="fused")
    assert [name for name, *_ in launched].count("all_gather_matmul_kernel") == 1
    ctx.check()


@pytest.mark.ranks(2)
def test_all_gather_matmul_of_several_weights_compiled_traced_and_under_torch_func(ctx):
    rows = (3, 3)
    xs, ws, biases, dys = operands(ctx, rows)
    x = xs[ctx.rank].to(ctx.device).requires_grad_()

    def loss(x, *ws):
        q, k, v = tkernels.all_gather_matmul(x, ws, biases, "relu", ctx=ctx)
        return (q * dys[0]).sum() + (k * dys[1]).sum() + v.sum()

    want = torch.autograd.grad(loss(x, *ws), [x, *ws, biases[0]])
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, torch.autograd.grad(compiled(x, *ws), [x, *ws, biases[0]]), want))
    mapped = torch.func.grad(loss, argnums=(0, 1, 2, 3))(x.detach(), *(w.detach() for w in ws))
    assert all(map(torch.equal, mapped, want[:4]))
    slope = torch.autograd.grad(loss(x, *ws), x, create_graph=True)[0].square().sum()
    assert torch.autograd.grad(slope, ws[0])[0].shape == ws[0].shape
    given = [bias.detach() for bias in biases if bias is not None]
    arguments = x.detach(), [w.detach() for w in ws], given, list(BIASED), "relu", True, rows, ctx.name, None, [0]
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.ops.tkernels.all_gather_matmuls(*arguments)
    real = torch.ops.tkernels.all_gather_matmuls(*arguments)
    for one, other in zip([*fake[0], fake[1]], [*real[0], real[1]], strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    ctx.check()


@pytest.mark.ranks(2)
def test_all_gather_matmul_of_several_weights_over_a_middle_dimension_and_with_empty_ones(ctx):
    x = integers((2, 3, K), torch.float32, ctx.rank, device=ctx.device)
    ws = [integers((n, K), torch.float32, 10 + n, device=ctx.device) for n in (0, 4, 2)]
    ys, gathered = tkernels.all_gather_matmul(x, ws, None, None, True, gather_dim=1, ctx=ctx)
    for y, w in zip(ys, ws, strict=True):
        want, also = tkernels.all_gather_matmul(x, w, None, None, True, gather_dim=1, ctx=ctx)
        assert torch.equal(y, want) and y.stride() == want.stride() and torch.equal(gathered, also)
    (only,) = tkernels.all_gather_matmul(x, (ws[1],), gather_dim=1, ctx=ctx)
    assert torch.equal(only, ys[1])
    ctx.check()


@pytest.mark.ranks(2)
def test_all_gather_matmul_of_several_weights_refuses_before_anything_is_sent(ctx):
    x, w = torch.zeros(4, K, device=ctx.device), torch.zeros(5, K, device=ctx.device)
    for ws, biases, options, error, said in (
        ([], None, {}, ValueError, "a list of weights, at least one, .* 0 weights and"),
        ([w, w], [None], {}, ValueError, "here are 2 weights and, as biases, 1$"),
        ([w, w], w[:, 0], {}, ValueError, "here are 2 weights and, as biases, Tensor$"),
        ([w, w], None, {"out": w}, ValueError, "take one weight, not a list"),
        ([w, w], None, {"return_gathered": "borrowed"}, ValueError, "take one weight, not a list"),
        ([w, 3], None, {}, TypeError, r"w_shard_n\[1\]=3 must be a tensor"),
        ([w, w], [w, 3], {}, TypeError, r"bias\[1\]=3 must be a tensor"),
        ([w, w[:, :2]], None, {}, ValueError, "K, the second dimension, must match"),
        ([w, w], [None, w], {}, ValueError, "bias is .* but must be"),
        ([w, w], None, {"path": "slow"}, ValueError, "path='slow'"),
    ):
        with pytest.raises(error, match=f"^all_gather_matmul: .*{said}"):
            tkernels.all_gather_matmul(x, ws, biases, ctx=ctx, **options)
    with pytest.raises(TypeError, match="^all_gather_matmul: x=None must be a tensor"):
        tkernels.all_gather_matmul(None, [w], ctx=ctx)
    assert tkernels.all_reduce(torch.ones(1, device=ctx.device), ctx=ctx).item() == 2
    ctx.check()
