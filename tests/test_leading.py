"""Operations over any number of leading dimensions: what torch's fused operators return, shapes and strides too."""

import pytest
import torch
from torch.distributed import _symmetric_memory as symm_mem

import tkernels
from tkernels.comm.collectives import split_rows
from tkernels.testing.compare import integers

K, N = 6, 5
SHAPES = [((4,), 0), ((2, 4), 1), ((2, 4), 0), ((2, 3, 4), 2), ((2, 3, 4), -2), ((3, 0, 4), 2)]  # leading sizes, dim


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(got, want) and (got.stride() == want.stride() or got.numel() == 0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sizes, dim", SHAPES, ids=str)
def test_all_gather_matmul_returns_what_torchs_fused_operator_does(ctx, sizes, dim):
    group = ctx.group.process_group.group_name
    dim = dim if dim >= 0 else dim - (len(sizes) == 3) + 1  # -2 of [..., K]
    x = integers((*sizes, K), torch.float32, ctx.rank, device=ctx.device)
    w, bias = integers((N, K), torch.float32, 8, device=ctx.device), integers(N, torch.float32, 9, device=ctx.device)
    for each in (x, x.movedim(0, -2).contiguous().movedim(-2, 0)):  # whatever the memory is like
        gathered, (y,) = symm_mem._fused_all_gather_matmul_fallback(each, [w.t()], dim % (x.dim()), group)
        got, also = tkernels.all_gather_matmul(each, w, None, None, True, gather_dim=dim, ctx=ctx)
        assert same(got, y) and same(also, gathered)
        assert same(tkernels.all_gather_matmul(each, w, bias, "relu", gather_dim=dim, ctx=ctx), (y + bias).relu())
    ctx.check()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sizes, dim", SHAPES, ids=str)
def test_matmul_reduce_scatter_returns_what_torchs_fused_operator_does(ctx, sizes, dim):
    group = ctx.group.process_group.group_name
    x = integers((*sizes, K), torch.float32, ctx.rank, device=ctx.device)
    w, bias = integers((N, K), torch.float32, 8, device=ctx.device), integers(N, torch.float32, 9, device=ctx.device)
    want = symm_mem._fused_matmul_reduce_scatter_fallback(x, w.t(), "sum", dim % x.dim(), group)
    assert same(tkernels.matmul_reduce_scatter(x, w, scatter_dim=dim, ctx=ctx), want)
    got = tkernels.matmul_reduce_scatter(x, w, bias, "relu", scatter_dim=dim, ctx=ctx)
    assert same(got, (want + bias).relu())
    ctx.check()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sizes", [(), (3,), (2, 3), (2, 0, 3), (1, 2, 3)], ids=str)
def test_matmul_and_matmul_all_reduce_take_what_torch_matmul_takes(ctx, sizes):
    x = integers((*sizes, K), torch.float32, ctx.rank, device=ctx.device).requires_grad_()
    w, bias = integers((N, K), torch.float32, 8, device=ctx.device), integers(N, torch.float32, 9, device=ctx.device)
    terms = [integers((*sizes, K), torch.float32, rank, device=ctx.device) @ w.t() for rank in range(2)]
    for got, want in (
        (tkernels.matmul(x, w, bias), terms[ctx.rank] + bias),
        (tkernels.matmul_all_reduce(x, w, bias, ctx=ctx), sum(terms) + bias),
    ):
        assert same(got.detach(), want)
        (dx,) = torch.autograd.grad(got.sum(), x)
        assert torch.equal(dx, w.sum(0).expand(x.shape))
    with torch.no_grad():
        out = torch.empty_like(terms[0])
        if x.dim() > 1:
            assert tkernels.matmul(x, w, bias, out=out) is out and torch.equal(out, terms[ctx.rank] + bias)
        assert tkernels.matmul(x, w, out_dtype=torch.float32).equal(terms[ctx.rank])


@pytest.mark.ranks(2)
def test_all_gather_matmul_and_matmul_reduce_scatter_have_gradients_over_uneven_lengths(ctx):
    """A block of two layers over dimension 1 of [2, S, K], eager and compiled, against the unsharded one."""
    lengths = split_rows(5, 2)
    w1 = [integers((N, K), torch.float32, 10 + rank, device=ctx.device) for rank in range(2)]
    w2 = [integers((K, N), torch.float32, 20 + rank, device=ctx.device) for rank in range(2)]
    whole = integers((2, 5, K), torch.float32, 3, device=ctx.device)
    x64, *w64 = [each.double().requires_grad_() for each in (whole, torch.cat(w1), torch.cat(w2, 1))]
    want = (x64 @ w64[0].t()).relu() @ w64[1].t()
    dy = integers(want.shape, torch.float32, 4, device=ctx.device)
    want.backward(dy.double())

    def block(x, first, second):
        hidden = tkernels.all_gather_matmul(x, first, None, "relu", gather_dim=1, rows=lengths, ctx=ctx)
        return tkernels.matmul_reduce_scatter(hidden, second, scatter_dim=1, rows=lengths, ctx=ctx)

    for function in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        x, first, second = (
            each.clone().requires_grad_()
            for each in (whole.split(lengths, 1)[ctx.rank].contiguous(), w1[ctx.rank], w2[ctx.rank])
        )
        y = function(x, first, second)
        y.backward(dy.split(lengths, 1)[ctx.rank])
        assert torch.equal(y.double(), want.split(lengths, 1)[ctx.rank])
        for got, expected in (
            (x, x64.grad.split(lengths, 1)[ctx.rank]),
            (first, w64[0].grad.chunk(2)[ctx.rank]),
            (second, w64[1].grad.chunk(2, 1)[ctx.rank]),
        ):
            assert torch.equal(got.grad.double(), expected)
    ctx.check()


@pytest.mark.ranks(2)
def test_all_gather_matmul_and_matmul_reduce_scatter_fill_memory_that_has_the_dimension_first(ctx):
    x = integers((3, 2, K), torch.float32, ctx.rank, device=ctx.device)
    w = integers((N, K), torch.float32, 8, device=ctx.device)
    with torch.no_grad():
        for dim in (0, 1):
            sizes = [3, 2]
            sizes[dim] *= 2
            memory = [torch.empty([sizes[dim], sizes[1 - dim], each], device=ctx.device) for each in (N, K)]
            out, into = (each.movedim(0, dim) for each in memory)
            y, gathered = tkernels.all_gather_matmul(x, w, None, None, into, gather_dim=dim, out=out, ctx=ctx)
            assert y is out and gathered is into
            want, also = tkernels.all_gather_matmul(x, w, None, None, True, gather_dim=dim, ctx=ctx)
            assert torch.equal(y, want) and torch.equal(gathered, also)
            summed = tkernels.matmul_reduce_scatter(also, w, scatter_dim=dim, ctx=ctx)
            out = torch.empty_like(summed.movedim(dim, 0)).contiguous().movedim(0, dim)
            assert tkernels.matmul_reduce_scatter(also, w, scatter_dim=dim, out=out, ctx=ctx) is out
            assert torch.equal(out, summed)
        for name, option in (("all_gather_matmul", "gather_dim"), ("matmul_reduce_scatter", "scatter_dim")):
            call, out = getattr(tkernels, name), torch.empty(3, 4, N, device=ctx.device)
            with pytest.raises(
                ValueError, match=rf"^{name}: out is \(3, 4, 5\) with .* in memory dimension 1 comes first$"
            ):
                call(x, w, out=out, ctx=ctx, **{option: 1})
    ctx.check()


@pytest.mark.ranks(2)
def test_all_gather_matmul_and_matmul_reduce_scatter_refuse_a_dimension_that_is_not_a_leading_one(ctx):
    w = torch.zeros(N, K, device=ctx.device)
    for name, option in (("all_gather_matmul", "gather_dim"), ("matmul_reduce_scatter", "scatter_dim")):
        for sizes, dim in (((4,), 1), ((4,), -1), ((2, 4), 2), ((2, 4), 3), ((2, 4), -4), ((), 0)):
            with pytest.raises(ValueError, match=rf"^{name}: x is .*, but must be .*{option}={dim} one of its leading"):
                getattr(tkernels, name)(torch.zeros(*sizes, K, device=ctx.device), w, ctx=ctx, **{option: dim})
        for x in (torch.zeros(4, K, device=ctx.device), torch.zeros(4, 4, K, device=ctx.device)):
            for dim in ("M", None, 0.5):
                with pytest.raises(TypeError, match=f"^{name}: {option}={dim!r} must be a whole number"):
                    getattr(tkernels, name)(x, w, **{option: dim}, ctx=ctx)
    with pytest.raises(ValueError, match=r"matmul_reduce_scatter: M=3 rows don't divide by 2 ranks; pass rows=split"):
        tkernels.matmul_reduce_scatter(torch.zeros(2, 3, K, device=ctx.device), w, scatter_dim=1, ctx=ctx)
    with pytest.raises(ValueError, match=r"^matmul: x is \(\), but must be \[..., K\]"):
        tkernels.matmul(torch.zeros((), device=ctx.device), w)


@pytest.mark.ranks(2)
def test_all_gather_matmul_and_its_kin_name_ranks_whose_leading_dimensions_have_another_order(ctx):
    """Of equal sizes: without a word each rank would take its peers' rows in its own order."""
    x, w = torch.zeros(4, 4, K, device=ctx.device), torch.zeros(N, K, device=ctx.device)
    gather, scatter, turned = tkernels.all_gather_matmul, tkernels.matmul_reduce_scatter, (x, x.view(2, 8, K))[ctx.rank]
    by_dim = r": 0, 1; all must pass the same$"
    with tkernels.init(ctx.group.process_group, heap_bytes=8 << 20, compare_calls=True) as own:
        for call, found in (
            (lambda: gather(x, w, gather_dim=ctx.rank, ctx=own), "in gather_dim by rank" + by_dim),
            (lambda: gather(x, [w, w], gather_dim=ctx.rank, ctx=own), "in gather_dim by rank" + by_dim),
            (lambda: gather(x, w, gather_dim=ctx.rank, out_dtype=x.dtype, return_gathered="borrowed", ctx=own), by_dim),
            (lambda: scatter(x, w, scatter_dim=ctx.rank, ctx=own), "in scatter_dim by rank" + by_dim),
            (lambda: scatter(turned, w, ctx=own), r"in sizes beside it by rank: \(4,\), \(8,\)"),
            (lambda: tkernels.matmul_all_reduce(turned, w, ctx=own), r"in sizes beside it by rank: \(4,\), \(8,\)"),
        ):
            with pytest.raises(tkernels.MismatchError, match=found):
                call()
