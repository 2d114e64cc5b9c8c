"""What tests of several ranks share: contexts over each transport, who sends, poison, and what a block launches."""

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import os
import time
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tkernels
from tkernels import choice, fused, gemm, paths, staging
from tkernels.choice import overlap_config, product_way, product_ways
from tkernels.comm import collectives, runtime
from tkernels.comm.allocator import merged
from tkernels.comm.calls import LocalCalls
from tkernels.comm.device import TIMEOUT_NS
from tkernels.comm.launch import PreparedLaunch
from tkernels.gemm import layout_of

TRANSPORTS = ["simulated"] if tkernels.RUNTIME == "simulated" else ["peer", "nvshmem"]
every_transport = pytest.mark.parametrize("transport", TRANSPORTS)
# Ranks of which each half is on a node of its own, where every transfer is one of NVSHMEM's verbs. A plain run takes
# what test_nodes has of it.
NODES = [pytest.param("nodes", marks=pytest.mark.exhaustive)] if tkernels.RUNTIME == "simulated" else []
every_transport_and_nodes = pytest.mark.parametrize("transport", TRANSPORTS + NODES)
# For what follows from a kernel's arithmetic: linking NVSHMEM's library triples the time that each kernel takes to
# compile, so a plain run leaves out what is the same code but for the verbs.
every_transport_if_exhaustive = pytest.mark.parametrize(
    "transport", [TRANSPORTS[0], *(pytest.param(name, marks=pytest.mark.exhaustive) for name in TRANSPORTS[1:]), *NODES]
)
every_path = pytest.mark.parametrize("path", ["fused", "plain"])


def covered(names, *dimensions, together=2):
    """Parametrizes by a product of lists, or of dictionaries, whose keys are ids.

    Without GPUs, a plain run takes as few cases as it needs for all combinations of the values of so many dimensions:
    for each pair, or with together=1 for each value.
    """
    dimensions = [each if isinstance(each, dict) else {str(value): value for value in each} for each in dimensions]
    cases = list(itertools.product(*dimensions))
    found = {case: set(itertools.combinations(enumerate(case), together)) for case in cases}
    left, taken = set().union(*found.values()), set()
    while left:
        taken.add(case := max(cases, key=lambda case: len(found[case] & left)))
        left -= found[case]
    rest = [pytest.mark.exhaustive] * (tkernels.RUNTIME == "simulated")
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(
                *(values[key] for values, key in zip(dimensions, case, strict=True)),
                id="-".join(case),
                marks=[] if case in taken else rest,
            )
            for case in cases
        ],
    )


simulated_only = pytest.mark.skipif(
    tkernels.RUNTIME != "simulated", reason="replaces parts of the simulated runtime, or would corrupt a GPU's memory"
)
gpu_only = pytest.mark.skipif(tkernels.RUNTIME == "simulated", reason="about CUDA streams, which only GPUs have")
own_gpus = pytest.mark.skipif(
    tkernels.RUNTIME != "simulated" and runtime.shares_gpus(), reason="needs a GPU for each rank, as NCCL does"
)
nccl = pytest.param("nccl", marks=own_gpus)


@functools.cache
def torch_scales_rows() -> bool:
    """Whether torch multiplies FP8 operands that have a scale a row here. On CPUs that of 2.11 refuses them."""
    if tkernels.RUNTIME != "simulated":
        return runtime.has_fp8()
    x, scale = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(x, x.t(), scale, scale.t(), out_dtype=torch.bfloat16)
    except RuntimeError as error:
        if "only supports per-tensor scaling" not in str(error):
            raise
        return False
    return True


# Backends of tests that look at streams: torch.distributed needs NCCL there, since gloo's work blocks the host.
STREAMED = ["tkernels", pytest.param("torch", marks=own_gpus)]

_open = {}


def starts_ranks(number: int):
    """Skips a test where there are too few GPUs for the ranks that it starts itself, without the plugin."""
    found = runtime.most_ranks()
    return pytest.mark.skipif(found < number, reason=f"needs {number} GPUs, found {found}")


def over(ctx, transport, **options):
    """Collective. The caller's own context of these ranks over `transport`, kept as long as the ranks are alive."""
    if not options and ctx.transport == transport:
        return ctx
    key = (transport, *sorted(options.items()))
    if key not in _open or _open[key].failed:
        nodes = {"TKERNELS_NODES": ",".join(str(rank * 2 // ctx.size) for rank in range(ctx.size))}
        asked, environment = ("auto", nodes) if transport == "nodes" else (transport, {})
        options |= {"transport": asked, "heap_bytes": 64 << 20, "default": False}
        with mock.patch.dict(os.environ, environment):
            _open[key] = tkernels.init(ctx.group.process_group, **options)
        _open[key].shared = False  # no mesh of a later test may stand for it
    return _open[key]


def fewer(cases, transport):
    """The first three over nvshmem, where each case's kernel takes three times as long to compile; else all."""
    return cases[:3] if transport == "nvshmem" else cases


def largest_free(heap) -> int:
    """Bytes of the largest tensor that `heap.empty` would give, as far as this rank knows."""
    ranges = merged([*heap.segment.space.free, *heap._freed.items(), heap._reserve])
    left = heap.num_bytes - heap.held_bytes + heap._reserve[1]
    return min(left, max((size for _, size in ranges), default=0))


def forget_choices(ctx):
    """Drop what is known of records, all choices, and the calls prepared by them; the next call reads the records."""
    choice._tuned.pop(ctx, None)
    choice.tuned_locally.cache_clear()
    ctx.forget_calls()


PATIENCE_S = {"right": 0.2, "wrong": 300.0}  # how long a rank waits for a mistake, which comes in the wrong form


class LateRank:
    """Rank 1 begins a block only once rank 0 has ended it, or after PATIENCE_S, if rank 0 waits as it should."""

    def __init__(self, ctx, form):
        self.ctx, self.patience_s = ctx, PATIENCE_S[form]
        self.cell = ctx.empty(1, dtype=torch.int64)
        self.cell.zero_()
        address = ctx.heap.segment.bases[1] + ctx.heap.offset(self.cell)
        self.on_rank_1 = ctypes.c_int64.from_address(address)
        ctx.group.barrier()

    def __enter__(self):
        limit = time.monotonic() + self.patience_s
        while self.ctx.rank == 1 and not self.on_rank_1.value and time.monotonic() < limit:
            time.sleep(1e-3)

    def __exit__(self, *exception):
        if self.ctx.rank == 0:
            self.on_rank_1.value = 1


def poison_workspace(ctx):
    """Collective. NaN into all that operations exchange data through: what they read, they must have received."""
    ctx.barrier()  # the workspace exists from here on
    ctx.group.barrier()
    workspace = ctx.workspace()
    for memory in (workspace.inbox, workspace.scratch, workspace.landing):
        memory.fill_(0xFF)
    ctx.group.barrier()


@contextlib.contextmanager
def poisoned_memory():
    """What is allocated in the block, results and what calls hold in between, is NaN until it is written."""
    new_empty = torch.Tensor.new_empty

    def poisoned(tensor, *arguments, **options):
        return new_empty(tensor, *arguments, **options).fill_(float("nan"))

    with mock.patch.object(torch.Tensor, "new_empty", poisoned):
        yield


def sent_by(sender, ctx, name, x, w, *arguments, chunk_rows=None, **options):
    """Collective. A fused operation in its configuration by rule, with the fields of `sender` in place of its own."""
    rows = options.get("rows") or (x.shape[0],) * (ctx.size if name == "all_gather_matmul" else 1)
    config = overlap_config(ctx, name, sum(rows), *w.shape, x.dtype, layout_of(x, w))
    config = dataclasses.replace(config, copy_rows=None, chunk_rows=chunk_rows or config.chunk_rows, **sender)
    return getattr(tkernels, name)(x, w, *arguments, config=config, ctx=ctx, **options)


def into_landing(num_comm, *arguments, **options):
    """Collective. So many programs of this rank send, or the copy engine if there are none, to where copies go."""
    return sent_by({"num_comm": num_comm, "interleaved": False, "landing": True}, *arguments, **options)


def by_copies(*arguments, **options):
    """Collective. The copy engine sends."""
    return into_landing(0, *arguments, **options)


def interleaved(*arguments, landing=False, **options):
    """Collective. All programs send, between the steps of their products, to where copies go or into inboxes."""
    sender = {"num_comm": 0, "interleaved": True, "landing": landing, "split_tiles": None}
    return sent_by(sender, *arguments, **options)


def late(ctx, rank, seconds=0.1):
    """Collective. Every rank has come here; then `rank` alone is held up."""
    ctx.group.barrier()
    if ctx.rank == rank:
        time.sleep(seconds)


@contextlib.contextmanager
def late_words(rank, seconds=0.2):
    """Rank 1 is held up whenever it sets words to zero."""
    zero_ = torch.Tensor.zero_

    def late_zero_(tensor):
        time.sleep(seconds * rank)
        return zero_(tensor)

    with mock.patch.object(torch.Tensor, "zero_", late_zero_):
        yield


def expire_after(context, seconds):
    """Waits in `context` expire after so long from here on; what came before had all the time that it needed."""
    context.timeout_s = seconds
    for table in (context.table, *(each.table for each in context._workspaces.values() if each.table is not None)):
        table[TIMEOUT_NS.value] = int(seconds * 1e9)


def message_on_every_rank(ctx, error):
    """Collective. The text of `error`, which must be the same on all ranks."""
    texts = ctx.group.gather(f"{type(error).__name__}: {error}")
    assert len(set(texts)) == 1, texts
    return texts[0]


@contextlib.contextmanager
def memory_that_kernels_get():
    """A set of the addresses of all tensors that kernels of a call are given, filled while the block runs."""
    addresses, call = set(), PreparedLaunch.__call__

    def watch(launch, *tensors):
        addresses.update(tensor.data_ptr() for tensor in tensors)
        call(launch, *tensors)

    with mock.patch.object(PreparedLaunch, "__call__", watch):
        yield addresses


@contextlib.contextmanager
def without_launches(context, as_if_captured=False):
    """No kernel runs, or the context takes the block for a capture; nothing may meet the other ranks."""

    def met(*_):
        raise AssertionError("the host met the other ranks")

    with contextlib.ExitStack() as patches:
        for name in ("gather", "barrier"):
            patches.enter_context(mock.patch.object(context.group, name, met))
        if as_if_captured:
            patches.enter_context(mock.patch.object(type(context), "capturing", property(lambda self: True)))
        else:
            patches.enter_context(mock.patch.object(PreparedLaunch, "__call__", lambda *_: None))
        yield


@contextlib.contextmanager
def switched(**switches):
    """Switches of torch.backends.cuda.matmul for the block; a monkeypatch would try to delete them afterwards."""
    matmul = torch.backends.cuda.matmul
    before = {name: getattr(matmul, name) for name in switches}
    try:
        for name, value in switches.items():
            setattr(matmul, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)


def tf32(allowed: bool):
    return switched(allow_tf32=allowed)


def reduced_precision(allowed: bool):
    """Whether cuBLAS may round partial sums of 16-bit operands, where it splits K (tkernels/library.py)."""
    return switched(
        allow_bf16_reduced_precision_reduction=allowed, allow_fp16_reduced_precision_reduction=allowed
    )  # fmt: skip


def multiplied_by(monkeypatch, way: str):
    """Let our "kernel", or the "library", carry out the local products that it can; others go as they do."""

    def asked(problem):
        ways = product_ways(problem)
        return (way, ways[way][0]) if way in ways else product_way(problem)

    monkeypatch.setattr(gemm, "product_way", asked)
    monkeypatch.setattr(gemm, "local_calls", LocalCalls())


def _stages_rows(dtype, precision="ieee", gpu=None) -> bool:
    return dtype.itemsize == 2 or precision == "tf32"


@contextlib.contextmanager
def staged_rows(ctx):
    """Fused operations stage rows that TMA can't take, as on GPUs; what copies have around them is NaN."""
    if not runtime.has_tma():
        pytest.skip("pointers, which read any rows, would read the NaNs")
    ctx.forget_calls()  # which were prepared without
    empty = staging.Rows.empty

    def poisoned(rows, device):
        made = empty(rows, device)
        (made if made._base is None else made._base).fill_(float("nan"))
        return made

    with contextlib.ExitStack() as stack:
        for module in (gemm, fused, choice, paths):
            stack.enter_context(mock.patch.object(module, "stages_rows", _stages_rows))
        stack.enter_context(mock.patch.object(staging.Rows, "empty", poisoned))
        stack.enter_context(poisoned_memory())
        yield
    ctx.forget_calls()


def assert_stages(ctx, call, want, copied: int, turned: bool = False):
    """Collective. A reduction that stages so many matrices is exact, and sends in FP8 what it does without staging.

    turned: x is transposed, and some rank's part of it begins off 16 bytes: it is copied anyway.
    """
    poison_workspace(ctx)
    with staged_rows(ctx), launches() as launched:
        assert torch.equal(y := call(), want) and y.is_contiguous()
        wide = call(out_dtype=torch.float32)
        assert wide.dtype == torch.float32 and torch.equal(wide.to(want.dtype), want)
        lossy = call(wire_dtype=torch.float8_e4m3fn)
    kernels = [name for name, *_ in launched]
    assert kernels.count("matmul_reduce_kernel") == 3 and kernels.count("copy_rows_kernel") == 3 * copied
    if ctx.device.type == "cpu":  # where rows are not staged otherwise
        with launches() as launched:
            assert torch.equal(lossy, call(wire_dtype=torch.float8_e4m3fn))
        assert [name for name, *_ in launched].count("copy_rows_kernel") == turned


@contextlib.contextmanager
def launches():
    """The launches of a block: name of the kernel, number of programs, and its arguments and constants by name.

    But for the one before a workspace grows, as it does or not by what was called before.
    """
    launched, call = [], PreparedLaunch.__call__

    def watch(launch, *tensors):
        arguments = dict(launch._arguments)
        for constants in [value for value in arguments.values() if isinstance(value, tuple)]:
            arguments |= {name: value.value for name, value in constants._asdict().items()}
        if launch._kernel is not collectives.announce_kernel:
            launched.append((launch._kernel.__name__, launch._num_programs, arguments))
        return call(launch, *tensors)

    with mock.patch.object(PreparedLaunch, "__call__", watch):
        yield launched


class Operators(TorchDispatchMode):
    """The names of the operators that a block calls, but for views; of this library's alone if `ours`."""

    def __init__(self, ours=False):
        super().__init__()
        self.names, self.ours = [], ours

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and (not self.ours or function.namespace == "tkernels"):
            self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def host_work(context, call) -> list[str]:
    """What `call` allocates, copies and computes besides its kernels, once it has been made before."""
    with without_launches(context), torch.no_grad():
        call()
        with Operators() as operators:
            call()
    return sorted(operators.names)
