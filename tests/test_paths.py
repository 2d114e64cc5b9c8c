"""Which path an operation takes, what it says about it, and what the plain one leaves behind."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from transports import over, simulated_only

import tkernels
from tkernels import paths, plain
from tkernels.comm import collectives
from tkernels.configs import GemmConfig, OverlapConfig
from tkernels.gpus import GPUS, H200, SIMULATED, stages_rows
from tkernels.model import PROGRAMS, Problem, choose, default_config, plain_limit
from tkernels.testing.compare import integers, normal

OPERATIONS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
WIDTH = 8192  # of llama70b


@pytest.fixture
def rule(monkeypatch):
    """The rule as it is on GPUs: (operation, M, number of ranks) -> Choice."""
    monkeypatch.delenv("TKERNELS_CAPABILITY", raising=False)
    monkeypatch.setattr(paths.runtime, "RUNTIME", "nvshmem")

    def choose(operation, M, size=4, dtype=torch.bfloat16, width=WIDTH, **options):
        return paths.by_rule(operation, M, width, dtype, size, **options)

    return choose


@pytest.mark.parametrize("operation", OPERATIONS)
def test_few_rows_are_plain_and_many_are_fused_and_the_reason_has_the_numbers(rule, operation):
    for M in (1, 16, 64, 256):
        assert rule(operation, M).path == rule(operation, M, 2).path == "plain", M
    for M in (2048, 4096, 8192):
        assert rule(operation, M).path == rule(operation, M, 2).path == "fused", M
    if operation == "matmul_all_reduce":  # which is fused sooner between two
        assert [rule(operation, M, 2).path for M in (512, 768, 769, 1024)] == ["plain", "plain", "fused", "fused"]
        assert [rule(operation, M).path for M in (1024, 1025)] == ["plain", "fused"]
    crossings = 1 + (operation == "matmul_all_reduce")
    few, many = rule(operation, 64), rule(operation, 8192)
    limit = plain_limit(operation, 4)
    senders, where = (1, "from each peer") if operation == "matmul_reduce_scatter" else (3, "into each rank")
    assert f"{crossings * 64 * WIDTH * 2 * senders // 4} bytes {where}, no more than {limit}" in str(few)
    assert str(many).startswith("fused: ") and "travel while it multiplies" in many.reason
    assert rule(operation, 1, 1).reason == "one rank multiplies alone"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_torch_multiplies_far_faster_is_plain_at_any_size(rule, operation):
    for size in (2, 4, 8):
        choice = rule(operation, 8192, size, torch.float32)
        assert choice.path == "plain" and choice.reason.startswith("torch multiplies IEEE fp32 so much faster that ")
        choice = rule(operation, 8192, size, torch.float32, precision="tf32")
        assert choice.path == "plain" and "has not been timed between GPUs; path='fused' asks for it" in choice.reason
        for width in (WIDTH - 1, WIDTH - 4):
            choice = rule(operation, 8192, size, width=width)
            assert choice.path == "fused" and f"in rows of {2 * WIDTH} instead of {2 * width} bytes" in choice.reason
            for gpu in (gpu for gpu in GPUS.values() if gpu.capability < (9, 0)):  # where nothing is staged
                choice = rule(operation, 8192, size, width=width, gpu=gpu)
                assert choice.path == "plain" and "no multiple of 16, are slow in our kernels" in choice.reason, gpu
        for gpu in GPUS.values():
            assert rule(operation, 8192, size, gpu=gpu).path == "fused", gpu


def test_fused_sizes_are_those_of_whole_vectors_where_rows_are_staged():
    for dtype in (torch.bfloat16, torch.float16):
        assert paths.fused_sizes("all_gather_matmul", 5, 50257, 31, dtype, gpu=H200) == (5, 50264, 32)
        for operation in OPERATIONS[1:]:
            assert paths.fused_sizes(operation, 5, 50257, 31, dtype, gpu=H200) == (5, 50264, 31)
    assert paths.fused_sizes("all_gather_matmul", 5, 50257, 31, torch.float32, "tf32", H200) == (5, 50260, 32)
    for dtype, gpu in ((torch.float32, H200), (torch.bfloat16, SIMULATED)):
        assert paths.fused_sizes("all_gather_matmul", 5, 50257, 31, dtype, gpu=gpu) == (5, 50257, 31)
    for gpu in GPUS.values():  # where TMA is not what tiles use by rule, nothing may count on its zeros
        assert stages_rows(torch.bfloat16, gpu=gpu) == default_config(8192, 8192, torch.bfloat16, gpu=gpu).use_tma, gpu


def test_explain_says_who_multiplies_a_local_product_and_why(rule, monkeypatch):
    monkeypatch.setattr("tkernels.gpus.gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(paths.runtime, "default_programs", lambda: 132)
    for sizes, dtype, path, why in [
        ((8192, 8192, 8192), torch.bfloat16, "kernel", "1406 us by torch's matmul; within 2% the model can't tell"),
        ((128, 8192, 8192), torch.bfloat16, "library", "; torch has tiles that suit these sizes better"),
        ((8191, 8191, 8191), torch.bfloat16, "staged", "TMA can't take rows that are no multiples of 16 bytes"),
        ((16, 8191, 8191), torch.bfloat16, "library", "TMA can't take rows that are no multiples of 16 bytes"),
        ((8192, 8192, 8192), torch.float32, "library", "; torch multiplies fp32 faster"),
    ]:
        found = tkernels.explain("matmul", *sizes, dtype)
        assert (found.path, found.ways[0].name) == (path, path) and why in found.reason, sizes
        staged = {"staged"} if sizes[1] % 8 and dtype != torch.float32 else set()
        assert {way.name for way in found.ways} == {"kernel", "library"} | staged


@pytest.mark.ranks(2)
def test_the_choice_of_a_call_is_logged_when_it_is_prepared(ctx):
    ctx.forget_calls()
    x, w = (torch.ones(shape, device=ctx.device) for shape in ((4, 8), (16, 8)))
    with mock.patch.object(paths._log, "debug") as debug:
        for _ in range(3):
            tkernels.matmul_all_reduce(x, w, ctx=ctx)
    ((text, *values),) = (call.args for call in debug.call_args_list)
    assert (text % tuple(values)).startswith("matmul_all_reduce, 4 rows of 16 elements of float32, 2 ranks: ")


@pytest.mark.ranks(2)
def test_explain_says_what_a_call_does_and_an_unknown_path_or_operation_is_refused(ctx):
    x, w = (integers((8, 16), torch.float32, seed + ctx.rank, device=ctx.device) for seed in (1, 5))
    for operation in OPERATIONS:
        choice = tkernels.explain(operation, 16, 16, 16, torch.float32, ctx=ctx)
        assert choice.path == ("fused" if tkernels.RUNTIME == "simulated" else "plain") and choice.reason
        with pytest.raises(ValueError, match=f"{operation}: path='fast' is unknown; use fused, plain or None"):
            getattr(tkernels, operation)(x, w, ctx=ctx, path="fast")
        with pytest.raises(ValueError, match=f"{operation}: path='fast' is unknown"):
            getattr(tkernels, operation)(x[:0], w, ctx=ctx, path="fast")
    with pytest.raises(ValueError, match="operation='barrier' has no paths; those of matmul, all_gather"):
        tkernels.explain("barrier", 16, 16, 16, ctx=ctx)
    for size, dtype, error, said in (
        (2.5, torch.float32, TypeError, "M=2.5 must be a whole number"),
        (-1, torch.float32, ValueError, "M=-1 must be at least 0"),
        (16, None, TypeError, "dtype=None must be a torch.dtype"),
        (16, torch.int8, TypeError, "products are of torch.float32, .*, but dtype=torch.int8"),
        (16, torch.float8_e5m2, TypeError, "products are of .*e4m3fn, but dtype=torch.float8_e5m2"),
    ):
        with pytest.raises(error, match=f"^explain: {said}$"):
            tkernels.explain("all_gather_matmul", size, 16, 16, dtype, ctx=ctx)
    ctx.check()


@simulated_only
@pytest.mark.ranks(2)
def test_the_plain_path_rounds_no_operands_under_autocast(ctx):
    x, w = (100 * normal((16, 64), torch.float32, seed, device=ctx.device) for seed in (1, 2))
    want = tkernels.matmul_reduce_scatter(x, w, ctx=ctx, path="plain")
    with torch.autocast("cpu"):
        assert torch.equal(tkernels.matmul_reduce_scatter(x, w, ctx=ctx, path="plain"), want)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("operation", OPERATIONS[1:])
def test_a_strided_bias_is_read_by_its_stride(ctx, operation):
    x, w, bias = (integers(shape, torch.float32, 1, device=ctx.device) for shape in ((8, 16), (6, 16), (12,)))
    call = getattr(tkernels, operation)
    want = call(x, w, bias[::2].contiguous(), ctx=ctx, path="plain")
    assert torch.equal(call(x, w, bias[::2], ctx=ctx, path="plain"), want)
    assert torch.equal(call(x, w, bias[::2], ctx=ctx, path="fused"), want)


@pytest.mark.ranks(2)
def test_a_configuration_asks_for_the_fused_kernel_unless_the_path_says_otherwise(ctx):
    config = OverlapConfig(GemmConfig(32, 32, 32), chunk_rows=32, num_comm=1)
    asked = [(None, config, "fused"), ("plain", config, "plain"), ("plain", None, "plain"), ("fused", None, "fused")]
    for path, config, taken in asked:
        assert paths.choose_path(ctx, "all_gather_matmul", 64, 32, torch.float16, path, config) == taken


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "large"])
def test_a_plain_call_keeps_little_memory_in_the_workspace_and_reads_symmetric_operands_in_place(
    ctx, monkeypatch, kept
):
    ctx = over(ctx, ctx.transport)
    ctx.forget_calls()
    monkeypatch.setattr(plain, "KEPT_BYTES", plain.KEPT_BYTES if kept else 0)
    x = integers((16, 40), torch.float16, 10 * ctx.rank, device=ctx.device)
    w = integers((24, 40), torch.float16, 10 * ctx.rank + 1, device=ctx.device)
    calls = [
        lambda: tkernels.all_gather_matmul(x, w, ctx=ctx, path="plain"),
        lambda: tkernels.matmul_reduce_scatter(x, w, ctx=ctx, path="plain"),
        lambda: tkernels.matmul_all_reduce(x, w, None, "relu", ctx=ctx, path="plain"),
    ]
    workspace = ctx.workspace()
    empty = workspace.scratch.data_ptr()
    first = [call() for call in calls]
    before = workspace.scratch.data_ptr(), workspace.inbox.data_ptr()
    for call, want in zip(calls, first, strict=True):
        assert torch.equal(call(), want)
    assert (workspace.scratch.data_ptr(), workspace.inbox.data_ptr()) == before
    assert workspace.scratch.numel() >= 16 * 24 * 4 if kept else workspace.scratch.data_ptr() == empty

    # The gathered rows may be symmetric memory, this rank's own already there: nothing is copied before they travel.
    gathered = ctx.empty(32, 40, dtype=torch.float16)
    own = gathered.chunk(2)[ctx.rank]
    own.copy_(x)
    y, whole = tkernels.all_gather_matmul(own, w, return_gathered=gathered, path="plain", ctx=ctx)
    assert whole is gathered and torch.equal(y, first[0])
    assert torch.equal(gathered.cpu(), torch.cat(ctx.group.gather(x.cpu())))
    ctx.barrier()
    ctx.free(gathered)
    ctx.forget_calls()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("M", [40, 8192])
def test_explain_of_one_program_refuses_what_a_program_beside_would_send(operation, M):
    for dtype in (torch.bfloat16, torch.float32):
        problem = Problem(operation, M, 64, 64, dtype, ranks=2, programs=1)
        plain, *others = paths.ways_of(problem, "plain")
        refused = {way.name: way.refused for way in others if way.refused}
        assert plain.name == "plain" and refused[PROGRAMS] == "of one program none is left that multiplies"
        with pytest.raises(ValueError, match=f"{operation}: nothing can send .* comm programs: of one program none"):
            choose(replace(problem, gpu=SIMULATED))


@pytest.mark.ranks(2)
def test_explain_of_rows_that_the_heap_cant_hold_is_plain_and_calls_say_so(ctx):
    M, N, K = 1024, 40, 40  # 164 KB of fp32 travel, to the inboxes 2.5 times as much
    with tkernels.init(heap_bytes=1 << 19) as small, mock.patch.object(paths._log, "warning") as warned:
        for name in OPERATIONS:
            gathers = name == "all_gather_matmul"
            w = [integers((N, K), torch.float32, 2 + rank, device=ctx.device) for rank in range(2)]
            for rows in (2 * M, M):
                shape = rows // 2 if gathers else rows, K
                x = [integers(shape, torch.float32, rank, device=ctx.device) for rank in range(2)]
                y = getattr(tkernels, name)(x[ctx.rank], w[ctx.rank], ctx=small)
            want = torch.cat(x) @ w[ctx.rank].t() if gathers else x[0] @ w[0].t() + x[1] @ w[1].t()
            assert torch.equal(y, want.chunk(2)[ctx.rank] if name == "matmul_reduce_scatter" else want)
            choice = tkernels.explain(name, M, 2 * N if gathers else N, K, torch.float32, ctx=small)
            assert choice.path == "plain" and "too many for a heap of 524288; pass init(heap_bytes=" in choice.reason
            assert [each.args[1] for each in warned.mock_calls].count(name) == 1
        small.check()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", OPERATIONS[1:])
def test_partial_sums_in_a_wider_dtype_that_the_heap_cant_hold_take_the_plain_path(ctx, name):
    x, w = (integers((rows, 40), torch.bfloat16, ctx.rank, -1, 2, device=ctx.device) for rows in (1024, 40))
    takes = 82_000 * 2.5 * (1 if name == "matmul_reduce_scatter" else 2)  # in bf16; an eighth of a heap is kept back
    with tkernels.init(heap_bytes=int(takes / 0.6)) as small, mock.patch.object(paths._log, "warning") as warned:
        narrow = getattr(tkernels, name)(x, w, ctx=small)
        warned.assert_not_called()
        paths._warn_of_heap.cache_clear()
        wide = getattr(tkernels, name)(x, w, wire_dtype=torch.float32, out_dtype=torch.float32, ctx=small)
        assert warned.call_count == 1 and torch.equal(wide.bfloat16(), narrow)
        assert "heap" not in tkernels.explain(name, 1024, 40, 80, ctx=small).reason  # of bf16 on the wire


@pytest.mark.ranks(2, 3)
def test_a_plain_all_reduce_with_a_bias_or_an_activation_finishes_each_ranks_own_rows_where_it_is_large(ctx):
    cases = (37, torch.float32, None), (2, torch.bfloat16, torch.float32), (64, torch.float16, None)
    for M, dtype, out_dtype in cases:
        x, w = (integers((rows, 40), dtype, ctx.rank, -1, 2, device=ctx.device) for rows in (M, 24))
        bias = integers((24,), dtype, 7, device=ctx.device)
        for options in ({"bias": bias}, {"activation": "silu"}, {"bias": bias, "activation": "relu"}):
            options |= {"path": "plain", "ctx": ctx, "out_dtype": out_dtype}
            want = tkernels.matmul_all_reduce(x, w, **options)
            ctx.forget_calls()
            unused = mock.patch.object(collectives, "AllReduce", side_effect=AssertionError)
            with mock.patch.object(plain, "OWN_ROWS_BYTES", 0), unused:
                got = tkernels.matmul_all_reduce(x, w, **options)
            assert torch.equal(got, want) and got.dtype == want.dtype
            ctx.forget_calls()
    ctx.check()
