"""keep_staged: what is copied again and what isn't, as weights change, move and die; results are exact integers."""

import contextlib
import gc
import math
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from products import matmul_reference
from transports import gpu_only, launches, staged_rows, tf32

import tkernels
from tkernels import choice, gemm, kept, matmul, staging
from tkernels.comm import runtime
from tkernels.comm.calls import LocalCalls
from tkernels.testing.compare import integers

DEVICE, DTYPE = runtime.device(), torch.bfloat16
N, K = 24, 31  # rows of w are 62 bytes; of a copy, 128
COPY = N * 128
GIB = 1 << 30


@contextlib.contextmanager
def staged_products():
    """Local products are staged, and what copies have around them is NaN."""

    def way(problem):
        sizes = problem.M, problem.N, problem.K
        return "staged", choice.gemm_config(*sizes, problem.dtype, problem.staged_layout, problem.stored)

    empty = staging.Rows.empty

    def poisoned(rows, device):
        made = empty(rows, device)
        (made if made._base is None else made._base).fill_(math.nan)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm, "product_way", way)
        patch.setattr(gemm, "local_calls", LocalCalls())
        patch.setattr(staging.Rows, "empty", poisoned)
        yield


@pytest.fixture(autouse=True)
def staged():
    with staged_products():
        yield


def weight(seed=1, shape=(N, K), parameter=True):
    w = integers(shape, DTYPE, seed, -2, 2, DEVICE)
    return torch.nn.Parameter(w) if parameter else w


def input_of(k=K):
    return integers((8, k), DTYPE, 9, -2, 2, DEVICE)  # rows of k = 24 or 32 are whole vectors, others are staged too


def copied(w, x=None):
    """How often a product stages w, which is compared with the truth."""
    x = input_of(w.shape[1]) if x is None else x
    with launches() as launched, torch.no_grad():
        y = matmul(x, w)
    assert torch.equal(y, matmul_reference(x, w.detach()).to(DTYPE))
    return [name for name, *_ in launched].count("copy_rows_kernel") - (not gemm.tma_allowed(x))


def test_keep_staged_copies_a_weight_once_and_gives_its_memory_back_at_the_end():
    w = weight()
    assert [copied(w), copied(w)] == [1, 1]
    with tkernels.keep_staged([w], GIB) as copies:
        assert [copied(w), copied(w), copied(w)] == [1, 0, 0] and copies.bytes == COPY
        assert [copied(weight()), copied(weight())] == [1, 1] and copies.bytes == COPY  # nobody has named these
        (memory,) = copies._memories.values()
        ((_, copy),) = memory.copies.values()
        copy, memory = weakref.ref(copy), None
        copies.forget()
        assert copies.bytes == 0 and copy() is None
        assert [copied(w), copied(w)] == [1, 0] and copies.bytes == COPY
    assert copies.bytes == 0 and copied(w) == 1
    with pytest.raises(KeyError), tkernels.keep_staged([w], GIB) as copies:
        copied(w)
        raise KeyError
    assert copies.bytes == 0 and copied(w) == 1


def test_keep_staged_finds_the_copy_of_a_weight_by_any_view_of_it():
    w, square = weight(), weight(2, (33, 33))
    with tkernels.keep_staged([w, square], GIB) as copies:
        views = w, w.detach(), w.data, w[:], w.view(K, N).view(N, K), w.t().t()
        assert [copied(each) for each in views] == [1, 0, 0, 0, 0, 0]
        with torch.inference_mode():
            assert [copied(w), copied(w[:])] == [0, 0]
        # The transpose is the same copy, turned. It has the sizes of what it is of.
        assert [copied(each) for each in (square, square.t(), square.detach().t())] == [1, 0, 0]
        assert copies.bytes == COPY + 33 * 128
        copies.forget()
        assert [copied(each) for each in (square.t(), square, square.t())] == [1, 0, 0]
        assert [copied(each) for each in (w, w[:12], w[::2], w[:12])] == [1, 1, 1, 0]
        # Parts are others, each its own.
        assert [copied(each) for each in (w[:8], w[8:16], w[:8], w[8:16], w[:, 1:25])] == [1, 1, 0, 0, 1]
        # Copies are of one dtype, too.
        assert copied(w) == 0
        halves = w.detach().view(torch.float16)
        with launches() as launched:
            matmul(input_of().half(), halves)
        assert [name for name, *_ in launched].count("copy_rows_kernel") == 2


OPTIMIZERS = {
    "SGD": lambda ws: torch.optim.SGD(ws, lr=1, foreach=False),
    "SGD foreach": lambda ws: torch.optim.SGD(ws, lr=1, foreach=True),
    "AdamW foreach": lambda ws: torch.optim.AdamW(ws, lr=1, foreach=True),
    "AdamW fused": lambda ws: torch.optim.AdamW(ws, lr=1, fused=True),
}


@pytest.mark.parametrize("made", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_keep_staged_copies_a_weight_anew_after_an_optimizer_s_step(made):
    w = weight()
    optimizer = made([w])
    with tkernels.keep_staged([w], GIB) as copies:
        for _ in range(2):
            before = w.detach().clone()
            assert [copied(w), copied(w)] == [1, 0]
            w.grad = torch.ones_like(w)
            optimizer.step()
            assert not torch.equal(w, before)
            w.data.copy_(w.detach().round())  # for sums that are exact
        assert copied(w) == 1 and copies.bytes == COPY


def test_keep_staged_copies_a_weight_anew_after_writes_to_it_or_to_its_views():
    w, other = weight(), weight(2)
    writes = [
        lambda: w.add_(1),
        lambda: w.copy_(other),
        lambda: w[3:5].zero_(),
        lambda: w.detach().mul_(2),
        lambda: torch._foreach_add_([w], 1),
        lambda: torch.nn.init.ones_(w),
        lambda: matmul(input_of(8), input_of(8), out=w.view(-1)[:64].view(8, 8)),
        lambda: w.set_(other.detach().clone()),
        lambda: setattr(w, "data", other.detach() + 1),
        lambda: setattr(w, "data", w.detach().clone()),
    ]
    with tkernels.keep_staged([w, other], GIB) as copies:
        assert [copied(w), copied(other)] == [1, 1]
        for at, write in enumerate(writes):
            with torch.no_grad():
                write()
            assert [copied(w), copied(w.detach()), copied(other)] == [1, 0, 0], at
            assert copies.bytes == 2 * COPY, at
        with torch.inference_mode():
            w.mul_(2)
        assert copied(w) == 1


def test_keep_staged_watches_all_weights_of_a_storage():
    """Each .data counts its own writes: what is written to by one is read by another."""
    flat = torch.zeros(2 * N * K, dtype=DTYPE, device=DEVICE)
    first, second = (torch.nn.Parameter(flat.data[at * N * K :][: N * K].view(N, K)) for at in range(2))
    with tkernels.keep_staged(iter([first, second, first]), GIB):
        assert [copied(w) for w in (first, second, first, second)] == [1, 1, 0, 0]
        with torch.no_grad():
            second.copy_(weight(3))
        assert [copied(w) for w in (first, second, first, second)] == [1, 1, 0, 0]
        aside = first.data
        first.data = weight(4).detach()
        assert [copied(aside), copied(aside)] == [1, 0]
        aside.mul_(2)  # which no weight counts
        assert [copied(aside), copied(aside)] == [1, 0]
        assert [copied(w) for w in (first, first)] == [1, 0]
        assert [copied(w) for w in (second, second)] == [1, 0]


def test_keep_staged_gives_back_the_copies_of_a_freed_weight_and_takes_none_for_one_at_its_address():
    memory = torch.empty(N * K, dtype=DTYPE, device=DEVICE)
    with tkernels.keep_staged(ws := [weight(), weight(2)], GIB) as copies:
        assert [copied(w) for w in ws] == [1, 1] and copies.bytes == 2 * COPY
        view = ws[0].detach()
        del ws[0]
        gc.collect()
        assert copies.bytes == COPY and [copied(view), copied(view)] == [1, 1]  # nobody counts its writes any more
        ws.clear()
        gc.collect()
        assert copies.bytes == 0 and len(copies._memories) == 0
    lies_at = memory.data_ptr()
    storage = memory.untyped_storage()
    for seed in (1, 2):  # of the second, all that torch tells is what it told of the first
        w = torch.empty(0, dtype=DTYPE, device=DEVICE).set_(storage, 0, (N, K)).data
        w.data.copy_(weight(seed).detach())
        assert w.data_ptr() == lies_at and w._version == 0
        with tkernels.keep_staged([w], GIB) as copies:
            assert [copied(w), copied(w)] == [1, 0]
            del w
            gc.collect()
            assert copies.bytes == 0


def test_keep_staged_takes_no_copy_of_memory_that_a_weight_had_before():
    """Which goes, and comes again, between two calls."""
    w = weight(parameter=False)
    with tkernels.keep_staged([w], GIB) as copies:
        assert [copied(w), copied(w)] == [1, 0]
        for seed in range(2, 12):
            w.data = torch.empty(0, dtype=DTYPE, device=DEVICE)
            w.data = weight(seed).detach().clone()
            if seed % 2:
                assert copies.bytes == 0
            assert [copied(w), copied(w.detach())] == [1, 0] and copies.bytes == COPY, seed


def test_keep_staged_stays_within_its_bound_and_keeps_what_it_has():
    ws = [weight(seed) for seed in range(4)]
    with tkernels.keep_staged(ws, 3 * COPY - 1) as copies:
        for turn in range(3):
            assert [copied(w) for w in ws] == ([1, 1, 1, 1] if turn == 0 else [0, 0, 1, 1])
            assert copies.bytes == 2 * COPY
        with torch.no_grad():
            ws[0].zero_()
        assert [copied(ws[0]), copied(ws[0])] == [1, 0] and copies.bytes == 2 * COPY  # in the room of the last one
        del ws[0]
        gc.collect()
        assert [copied(w) for w in ws] == [0, 1, 1] and [copied(w) for w in ws] == [0, 0, 1]
    with tkernels.keep_staged(ws, COPY - 1) as copies:
        assert [copied(ws[0]), copied(ws[0])] == [1, 1] and copies.bytes == 0


def test_keep_staged_has_the_model_choose_as_if_the_copies_that_it_keeps_cost_nothing(monkeypatch):
    way, seen = gemm.product_way, []
    monkeypatch.setattr(gemm, "product_way", lambda problem: seen.append(problem.staged) or way(problem))
    ws, x = [weight(rows, (rows, K)) for rows in (16, 24, 32)], input_of()
    with tkernels.keep_staged(ws[:2], 16 * 128) as copies:
        assert [copied(w) for w in (*ws, *ws)] == [1, 1, 1, 0, 1, 1]  # the second finds no room, the third isn't named
        assert copies.bytes == 16 * 128 and len(seen) == len(ws)
    copied(ws[0])
    assert seen == [(2 * x.numel(), 2 * K * rows) for rows in (0, 24, 32, 16)]


def test_keep_staged_serves_gradients_from_the_copy_of_forward():
    """Of which dx reads the transpose. None is kept of x, which dw reads as if it were a weight."""
    w, x = weight(shape=(33, 31)), input_of().requires_grad_()
    with tkernels.keep_staged([w], GIB) as copies:
        for step in range(2):
            x.grad = w.grad = None
            with launches() as launched:
                y = matmul(x, w)
            forward = len([name for name, *_ in launched if name == "copy_rows_kernel"])
            dy = integers(y.shape, DTYPE, 5, -2, 2, DEVICE)
            with pytest.MonkeyPatch.context() as patch, launches() as launched:
                patch.setattr("tkernels.torch_operators.may_stage", lambda a, b: True)
                y.backward(dy)
            backward = len([name for name, *_ in launched if name == "copy_rows_kernel"])
            # x and w; dy; dy.T and x
            assert (forward, backward) == (2 - (step > 0), 3)
            assert torch.equal(x.grad, (dy.double() @ w.detach().double()).to(DTYPE))
            assert torch.equal(w.grad, (dy.double().t() @ x.detach().double()).to(DTYPE))
        assert copies.bytes == 33 * 128


def test_keep_staged_neither_uses_nor_makes_copies_under_a_capture_or_after_one_of_a_step(monkeypatch):
    w = weight()
    with tkernels.keep_staged([w], GIB) as copies:
        assert [copied(w), copied(w)] == [1, 0]
        with monkeypatch.context() as patch:
            patch.setattr(kept, "capture", SimpleNamespace(underway=lambda: True))
            assert [copied(w), copied(w)] == [1, 1]
            assert copied(w[:16]) == 1 and copies.bytes == COPY
        assert copied(w) == 0
        monkeypatch.setattr(kept, "_step_captured", False)  # and back at the end
        w.grad = torch.zeros_like(w)
        with monkeypatch.context() as patch:
            patch.setattr(kept, "capture", SimpleNamespace(underway=lambda: True))
            torch.optim.SGD([w]).step()
        assert [copied(w), copied(w)] == [1, 1] and copies.bytes == 0


def test_keep_staged_serves_threads_and_refuses_a_second_block():
    w, counts = weight(), []
    with tkernels.keep_staged([w], GIB):
        assert copied(w) == 1
        thread = threading.Thread(target=lambda: counts.append(copied(w)))
        thread.start()
        thread.join()
        assert counts == [0]
        with pytest.raises(ValueError, match="keep_staged: copies are kept already; a block .* has no other inside"):
            tkernels.keep_staged([w], GIB).__enter__()
        assert copied(w) == 0
    with tkernels.keep_staged([w], GIB):
        assert copied(w) == 1


def test_keep_staged_refuses_by_name_what_it_can_not_watch():
    w = weight()
    with torch.inference_mode():
        uncounted = w.detach().clone()
    cases = [
        (([w], 0), ValueError, "limit_bytes=0 has room for nothing"),
        (([w], 1e9), TypeError, "limit_bytes=1000000000.0 must be a number of bytes"),
        ((w, GIB), TypeError, "weights is a Parameter, but must be an iterable of tensors"),
        ((torch.nn.Linear(2, 2), GIB), TypeError, r"weights is a Linear, .* model\.parameters\(\)"),
        (([w, None], GIB), TypeError, r"weights\[1\]=None must be a tensor"),
        (([w, uncounted], GIB), ValueError, r"weights\[1\] was made under torch.inference_mode\(\)"),
    ]
    for arguments, error, words in cases:
        with pytest.raises(error, match=f"keep_staged: {words}"):
            tkernels.keep_staged(*arguments).__enter__()
    config, x = choice.gemm_config(8, N, K, DTYPE, "TN"), input_of()
    for wrong in (None, "w", w.detach().to_sparse(), w[0], w[0, 0]):
        refused = []
        for block in (contextlib.nullcontext(), tkernels.keep_staged([w], GIB)):
            with pytest.raises((TypeError, ValueError)) as error, block:
                matmul(x, wrong, config=config)
            refused.append(str(error.value))
        assert refused[0] == refused[1]


@pytest.mark.ranks(2)
def test_keep_staged_knows_the_local_tensor_of_a_dtensor_and_counts_writes_to_both(ctx):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    mesh = init_device_mesh(ctx.device.type, (ctx.size,))
    w = torch.nn.Parameter(DTensor.from_local(weight(parameter=False), mesh, [Replicate()]))
    with staged_products(), tkernels.keep_staged([w], GIB) as copies:
        assert [copied(w.to_local()), copied(w.to_local()), copied(w.to_local().t().t())] == [1, 0, 0]
        for write in (lambda: w.mul_(2), lambda: w._local_tensor.mul_(0.5), lambda: w.to_local().add_(1)):
            with torch.no_grad():
                write()
            assert [copied(w.to_local()), copied(w.to_local())] == [1, 0]
        assert copies.bytes == COPY
        w = None
        gc.collect()
        assert copies.bytes == 0


def test_keep_staged_serves_compiled_code():
    w, x = weight(shape=(24, 31)), input_of()
    compiled = torch.compile(lambda: matmul(x, w), backend="aot_eager", fullgraph=True)
    with tkernels.keep_staged([w], GIB):
        for factor in (1, 2):
            with torch.no_grad():
                w.mul_(factor)
            for expected in (2, 1):
                with launches() as launched, torch.no_grad():
                    y = compiled()
                assert [name for name, *_ in launched].count("copy_rows_kernel") == expected
                assert torch.equal(y, matmul_reference(x, w.detach()).to(DTYPE))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_keep_staged_serves_fused_operations(ctx, name):
    x = integers((64, 48), DTYPE, ctx.rank, -2, 2, ctx.device)
    w = torch.nn.Parameter(integers((32, 48), DTYPE, ctx.rank, -2, 2, ctx.device)[:, :31].contiguous())
    x = x[:, :32][:, :31]

    def copies():
        with launches() as launched:
            y = getattr(tkernels, name)(x, w.detach(), ctx=ctx, path="fused")
        return y, [each for each, *_ in launched].count("copy_rows_kernel")

    with staged_rows(ctx):
        want, each_time = copies()
        with tkernels.keep_staged([w], GIB) as kept:
            found = [copies() for _ in range(3)]
            assert [number for _, number in found] == [each_time, each_time - 1, each_time - 1]
            assert all(torch.equal(y, want) for y, _ in found) and kept.bytes == 32 * 128
            with torch.no_grad():
                w.mul_(2)
            y, number = copies()
            assert torch.equal(y, 2 * want) and number == each_time
    ctx.check()


@gpu_only
def test_keep_staged_and_cuda_graphs_whose_replays_read_the_weight_as_it_is():
    w, x = weight(), input_of()
    with tkernels.keep_staged([w], GIB):
        assert [copied(w), copied(w)] == [1, 0]
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            y = matmul(x, w)
        for step in range(3):
            graph.replay()
            assert torch.equal(y, matmul_reference(x, w.detach()).to(DTYPE))
            with torch.no_grad():
                w.add_(1)
            assert [copied(w), copied(w)] == [1, 0], step


@gpu_only
def test_keep_staged_keeps_a_copy_for_each_stream():
    w, side = weight(), torch.cuda.Stream()
    with tkernels.keep_staged([w], GIB) as copies:
        assert copied(w) == 1
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            assert [copied(w), copied(w)] == [1, 0]
        assert copied(w) == 0 and copies.bytes == 2 * COPY


def test_keep_staged_has_two_copies_of_fp32_that_is_multiplied_as_tf32_by_both_of_its_dimensions():
    # K is contiguous in what tensor cores take: in the product by w's rows, and in the one by its columns.
    w = torch.nn.Parameter(integers((33, 33), torch.float32, 1, -2, 2, DEVICE))
    x = integers((8, 33), torch.float32, 9, -2, 2, DEVICE)
    with tf32(True), tkernels.keep_staged([w], GIB) as copies, torch.no_grad():
        for times in (1, 0, 0):
            for each in (w, w.t()):
                with launches() as launched:
                    assert torch.equal(matmul(x, each), matmul_reference(x, each.detach()).float())
                assert [name for name, *_ in launched].count("copy_rows_kernel") == 1 + times
        assert copies.bytes == 2 * 33 * 256  # rows of 132 bytes
        w.add_(1)
        assert torch.equal(matmul(x, w), matmul_reference(x, w.detach()).float())


def test_keep_staged_keeps_nothing_whose_writes_torch_does_not_count():
    w = weight(parameter=False)
    with tkernels.keep_staged([w], GIB) as copies:
        assert [copied(w), copied(w)] == [1, 0]
        with torch.inference_mode():
            w.data = w.data.clone()  # made there
            assert [copied(w), copied(w)] == [1, 1] and copies.bytes == 0
            w.mul_(2)
            assert copied(w) == 1


def test_keep_staged_counts_no_copy_of_what_is_cloned_first():
    w = weight(parameter=False, shape=(N, 2 * K))
    with tkernels.keep_staged([w], GIB) as copies:
        assert kept.keeps(w[:, :K]) and not kept.keeps(w[:, ::2]) and not kept.keeps(w[:1, :K].expand(N, K))
        assert [copied(w[:, ::2]), copied(w[:, ::2])] == [1, 1] and copies.bytes == 0
