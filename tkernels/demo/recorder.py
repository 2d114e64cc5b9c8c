"""Measures the cost of a training step's operations and checks their results: it intercepts tkernels' operators."""

import math
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tkernels.all_gather_matmul import all_gather_matmul_reference
from tkernels.comm.collectives import split_rows
from tkernels.comm.context import Context
from tkernels.matmul_reduce_scatter import matmul_reduce_scatter_reference


@dataclass
class Tally:
    """All calls of one operation on this rank."""

    calls: int = 0
    sent_bytes: int = 0  # to peers
    seconds: float = 0.0  # from the call to the result, waiting for peers included
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)  # not yet in `seconds`


class Recorder(TorchDispatchMode):
    """While entered, counts and times the operators of torch.ops.tkernels, including those that autograd calls.

    Once `keep` is set, the next call of each operation is kept, for `check`.
    """

    def __init__(self, ctx: Context):
        super().__init__()
        self.ctx, self.keep = ctx, False
        self._tallies: dict[str, Tally] = {}
        self._kept: dict[str, list] = {}  # arguments and result

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "tkernels":
            return func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("tkernels::").removesuffix("_out")
        tally = self._tallies.setdefault(name, Tally())
        keep = self.keep and name not in self._kept
        if keep:  # copies: the result may be written over its arguments, and the optimizer changes weights in place
            self._kept[name] = [_copies(args), None]
        if self.ctx.device.type == "cuda":
            tally.events.append(tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)))
            tally.events[-1][0].record()
            result = func(*args, **(kwargs or {}))
            tally.events[-1][1].record()
        else:
            start = time.perf_counter()
            result = func(*args, **(kwargs or {}))
            tally.seconds += time.perf_counter() - start
        tally.calls += 1
        tally.sent_bytes += sent_bytes(name, args, self.ctx)
        if keep:
            first = kwargs["out"] if result is None else result[0] if isinstance(result, tuple) else result
            self._kept[name][1] = _copies(first)
        return result

    def tallies(self) -> dict[str, Tally]:
        """The tallies by operation. Waits for the device."""
        for tally in self._tallies.values():
            for start, end in tally.events:
                end.synchronize()
                tally.seconds += start.elapsed_time(end) / 1e3
            tally.events.clear()
        return self._tallies

    def check(self) -> dict[str, tuple[float, float]]:
        """Collective. For each kept call: its error against torch in fp64, the worst of all ranks, and the limit.

        Every element of every result is a sum of `terms` terms. Its error is relative to the sum of the terms' absolute
        values, so that the bound holds for all data. With u = 2**-24, each addition in fp32 errs by at most u of that
        sum (2 u where hardware truncates). Two roundings to the dtype follow, of half an epsilon each: of the partial
        sums that are sent, and of the result. A gather adds nothing, and is exact.
        """
        torch.get_device_module(self.ctx.device).synchronize()  # the copies may have been made on any stream
        checked = {}
        for name, (args, got) in sorted(self._kept.items()):
            want, magnitude, terms = _reference(name, args, self.ctx)
            error = ((got.double() - want).abs() / magnitude.clamp_min(torch.finfo(got.dtype).tiny)).max()
            worst = max(error if error == error else math.inf for error in self.ctx.group.gather(error.item()))
            checked[name] = worst, 2 * terms * 2.0**-24 + torch.finfo(got.dtype).eps if terms else 0.0
        return checked


def _copies(values):
    return tree_map_only(torch.Tensor, torch.clone, values)


def sent_bytes(name: str, args: tuple, ctx: Context) -> int:
    """Bytes that this rank sends to its peers in one call of an operator."""
    x, peers = args[0], ctx.size - 1
    if name in ("all_gather", "all_gather_matmul", "matmul_reduce_scatter_backward"):  # this rank's rows, to each peer
        return x.nbytes * peers
    if name == "reduce_scatter":  # each peer's rows, to that peer
        return (x.shape[0] - args[1][ctx.rank]) * math.prod(x.shape[1:]) * x.itemsize
    if name == "matmul_reduce_scatter":
        w, rows = args[1], args[4]
        return (x.shape[0] - rows[ctx.rank]) * w.shape[0] * x.itemsize
    if name == "all_reduce":  # a reduce-scatter and an all-gather
        own = split_rows(x.numel(), ctx.size)[ctx.rank]
        return (x.numel() - own + own * peers) * x.itemsize
    raise NotImplementedError(f"the demo's model does not use {name}")


def _reference(name: str, args: tuple, ctx: Context) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(first result in fp64, the same from absolute values, number of terms of an element, 0 for a copy)."""
    if name == "matmul_reduce_scatter_backward":
        dy, _, w = args[:3]
        return _reference_of_product("all_gather_matmul", (dy, w.t(), None), ctx)
    if name in ("all_gather_matmul", "matmul_reduce_scatter"):
        return _reference_of_product(name, args, ctx)
    values = [value.to(ctx.device).double() for value in ctx.group.gather(args[0].cpu())]
    if name == "all_gather":
        gathered = torch.cat(values)
        return gathered, gathered.abs(), 0
    own = slice(None)
    if name == "reduce_scatter":
        rows = args[1]
        own = slice(sum(rows[: ctx.rank]), sum(rows[: ctx.rank + 1]))
    return sum(value[own] for value in values), sum(value[own].abs() for value in values), ctx.size


def _reference_of_product(name: str, args: tuple, ctx: Context) -> tuple[torch.Tensor, torch.Tensor, int]:
    group = dist.group.WORLD
    x, w, bias = args[:3]
    sizes = [value if value is None else value.abs() for value in (x, w, bias)]
    if name == "all_gather_matmul":
        reference, terms = all_gather_matmul_reference, x.shape[1] + 1
    else:
        reference, terms = matmul_reduce_scatter_reference, x.shape[1] * ctx.size + ctx.size + 1
    return reference(group, x, w, bias), reference(group, *sizes), terms
