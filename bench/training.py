"""Times forward and backward of llama70b's layers: python -m bench.training [--ranks R] [--json PATH], from the root.

Two pairs of a column and a row layer, bf16, sequence parallel, M tokens over all ranks:

    mlp          x [M/R, 8192] -> silu(gate) * up, of [M, 2 * 28672/R] -> [M/R, 8192]
    attention    x [M/R, 8192] -> q, k, v [M, 10240/R]; q -> [M/R, 8192]    without attention itself, the same for all

Our layers (ours) are compared with the same GEMMs over NCCL and cuBLAS, with the same weights and with the gathered
input of forward kept for backward: one after the other (serial), and as in Megatron-LM, with the reduce-scatter of the
input's gradient overlapping the GEMM of the weight's gradient (async). Results and gradients are compared before
anything is timed. On the simulated runtime gloo and torch's CPU GEMMs replace NCCL and cuBLAS, and the layers are tiny.

peak_bytes: peak of torch's allocator in one step, weights included; for ours, its workspace is added, symmetric or not.
Memory that NCCL allocates for itself is not included.
Exit code 0: all was measured. 1: ours differs from NCCL + cuBLAS, or a rank failed. 2: wrong arguments.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.table import Table
from torch.nn import functional as F

import tkernels
from bench import steps
from bench.harness import with_host_times
from bench.provenance import provenance
from tkernels.comm.context import Context
from tkernels.comm.group import all_gather_single, reduce_scatter_single
from tkernels.layers import ColumnParallelLinear, RowParallelLinear
from tkernels.timing import WARMUPS, agree, measure

DTYPE = torch.bfloat16
# Of a row, relative to its norm plus the RMS of all rows' norms: two ways to round partial sums and their gradients
# stay below.
ROW_ERROR = 0.05
WIRE, PRODUCTS = {"nvshmem": ("NCCL", "cuBLAS"), "simulated": ("gloo", "torch.mm")}[tkernels.RUNTIME]
SERIES = {"ours": "tkernels", "serial": f"{WIRE} + {PRODUCTS}", "async": f"{WIRE} beside {PRODUCTS}"}


@dataclass(frozen=True)
class Pair:
    """A column layer hidden -> inner and a row layer between -> hidden; features of all ranks."""

    hidden: int
    inner: int
    between: int

    @property
    def gated(self) -> bool:
        return self.inner == 2 * self.between

    def connect(self, h: torch.Tensor, ranks: int) -> torch.Tensor:
        """[M, inner/R] -> [M, between/R]: the gated activation, or the queries alone."""
        if self.gated:
            gate, up = h.chunk(2, dim=-1)
            return F.silu(gate) * up
        return h[..., : self.between // ranks]


PAIRS = {
    "nvshmem": {"mlp": Pair(8192, 2 * 28672, 28672), "attention": Pair(8192, 10240, 8192)},
    "simulated": {"mlp": Pair(32, 128, 64), "attention": Pair(32, 48, 32)},
}
TOKENS = {"nvshmem": 8192, "simulated": 32}


class GatherLinear(torch.autograd.Function):
    """x_shard_m [M/R, K], w [N/R, K] -> [M, N/R], by NCCL and cuBLAS."""

    @staticmethod
    def forward(ctx, x, w, group, beside):
        gathered = x.new_empty((x.shape[0] * group.size(), x.shape[1]))
        all_gather_single(gathered, x, group=group)
        ctx.save_for_backward(gathered, w)
        ctx.group, ctx.beside = group, beside
        return gathered @ w.t()

    @staticmethod
    def backward(ctx, dy):
        gathered, w = ctx.saved_tensors
        dgathered = dy @ w
        dx = dgathered.new_empty((dgathered.shape[0] // ctx.group.size(), dgathered.shape[1]))
        work = reduce_scatter_single(dx, dgathered, group=ctx.group, async_op=ctx.beside)
        dw = dy.t() @ gathered
        if ctx.beside:
            work.wait()
        return dx, dw, None, None


class LinearScatter(torch.autograd.Function):
    """x [M, K/R], w [N, K/R] -> [M/R, N], by cuBLAS and NCCL."""

    @staticmethod
    def forward(ctx, x, w, group):
        ctx.save_for_backward(x, w)
        ctx.group = group
        y = x @ w.t()
        shard = y.new_empty((y.shape[0] // group.size(), y.shape[1]))
        reduce_scatter_single(shard, y, group=group)
        return shard

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        gathered = dy.new_empty((dy.shape[0] * ctx.group.size(), dy.shape[1]))
        all_gather_single(gathered, dy.contiguous(), group=ctx.group)
        return gathered @ w, gathered.t() @ x, None


class Steps:
    """Forward and backward of a pair on this rank, in each way by its name in SERIES."""

    def __init__(self, ctx: Context, pair: Pair, tokens: int):
        torch.manual_seed(0)
        self.ctx, self.pair = ctx, pair
        options = dict(bias=False, sequence_parallel=True, dtype=DTYPE, mesh=ctx)
        stride = 2 if pair.gated else 1
        self.column = ColumnParallelLinear(pair.hidden, pair.inner, partition_stride=stride, **options)
        self.row = RowParallelLinear(pair.between, pair.hidden, **options)
        shape = (tokens // ctx.size, pair.hidden)
        generator = torch.Generator(ctx.device).manual_seed(ctx.rank)
        make = lambda: torch.randn(shape, generator=generator, device=ctx.device, dtype=DTYPE)  # noqa: E731
        self.x, self.dy = make().requires_grad_(), make()

    @property
    def inputs(self) -> list[torch.Tensor]:
        return [self.x, self.column.weight, self.row.weight]

    def forward(self, name: str) -> torch.Tensor:
        group, size = self.ctx.group.process_group, self.ctx.size
        if name == "ours":
            return self.row(self.pair.connect(self.column(self.x), size))
        h = GatherLinear.apply(self.x, self.column.weight, group, name == "async")
        return LinearScatter.apply(self.pair.connect(h, size), self.row.weight, group)

    def step(self, name: str) -> Callable[[], None]:
        def run():
            for tensor in self.inputs:
                tensor.grad = None
            self.result = self.forward(name)
            self.result.backward(self.dy)

        return run

    def outcome(self, name: str) -> list[torch.Tensor]:
        """The result and the gradients of one step: y, dx, dw of the column layer, dw of the row layer."""
        self.step(name)()
        return [self.result.detach(), *(tensor.grad for tensor in self.inputs)]

    def peak_bytes(self, name: str) -> int | None:
        """Peak memory of one step that is not the first; None without a GPU."""
        if self.ctx.device.type != "cuda":
            return None
        self.result = None
        for tensor in self.inputs:
            tensor.grad = None
        own = sum(tensor.nbytes for tensor in [*self.inputs, self.dy])
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.step(name)()
        torch.cuda.synchronize()
        peak = own + torch.cuda.max_memory_allocated() - before
        if name == "ours":
            peak += self.ctx.workspace().nbytes
        return peak


def differs(got: list[torch.Tensor], want: list[torch.Tensor]) -> str | None:
    """Which result or gradient of ours is off on this rank, or None; compared row by row."""
    for name, ours, theirs in zip(("y", "dx", "dw1", "dw2"), got, want, strict=True):
        error = (ours.double() - theirs.double()).norm(dim=1)
        size = theirs.double().norm(dim=1)
        off = ~(error <= ROW_ERROR * (size + size.norm() / len(size) ** 0.5))  # so that NaN is off
        if off.any():
            row = int(off.nonzero()[0])
            return f"{int(off.sum())} of {len(off)} rows of {name} differ from {SERIES['serial']}'s, the first is {row}"
    return None


def measure_pair(ctx: Context, name: str, pair: Pair, tokens: int, iterations: int) -> dict:
    """Collective. The record of one pair, or {"op", "shape", "refused"}."""
    head = {"op": "training", "shape": f"llama70b-{name}", "layout": "TN"}
    ways = Steps(ctx, pair, tokens)
    want, got = ways.outcome("serial"), ways.outcome("ours")
    ctx.check()
    reason = agree(ctx, differs(got, want))
    if reason is not None:
        return {**head, "refused": reason}
    del got, want
    peaks = {f"{series}_peak_bytes": ways.peak_bytes(series) for series in SERIES}
    calls = {series: ways.step(series) for series in SERIES}
    timings, _ = measure(ctx, calls, iterations)
    timings = with_host_times(ctx, timings, calls)
    ctx.check()
    line = head | {"M": tokens, "N": pair.inner, "K": pair.hidden, "ranks": ctx.size, "dtype": "bfloat16"}
    line |= {"runtime": ctx.runtime, "transport": ctx.transport, "iterations": iterations}
    for series, timing in timings.items():
        line |= {f"{series}_{key}": value for key, value in dataclasses.asdict(timing).items()}
    for series in ("serial", "async"):
        line[f"speedup_over_{series}"] = timings[series].us / timings["ours"].us
    return line | peaks | {"warmups": WARMUPS[ctx.device.type]} | provenance(ctx)


def table(lines: list[dict]) -> Table:
    first = lines[0]
    title = f"forward and backward, {first['M']} tokens, bf16, {first['transport']}"
    return steps.table(title, lines, lambda line: SERIES)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = steps.parser_of("training", __doc__, iterations=20)
    parser.add_argument("--tokens", type=int, default=TOKENS[tkernels.RUNTIME], help="of all ranks")
    args = parser.parse_args(argv)
    steps.check(parser, args)
    if args.tokens < 1 or args.tokens % args.ranks:
        parser.error(f"--tokens {args.tokens} must be shared evenly by {args.ranks} ranks")
    return args


def main(argv: list[str] | None = None) -> int:
    args, pairs = parse(argv), PAIRS[tkernels.RUNTIME]
    comparisons = {name: (measure_pair, name, pair, args.tokens, args.iterations) for name, pair in pairs.items()}
    return steps.run(args, comparisons, table)


if __name__ == "__main__":
    sys.exit(main())
