"""The ways to move bytes with which a fused operation is measured, beside the library's own choice.

To add a way, or a mode of one, add a line to WAYS. bench.summary identifies two kinds of ways by name: the copy engine,
and those in which programs send.
"""

import dataclasses
import functools
from collections.abc import Callable

import torch

import tkernels
from bench.compile import sentence
from bench.problem import Case, Problem, config_of
from tkernels.comm.context import Context
from tkernels.configs import by_copy_engine
from tkernels.timing import agree


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to move bytes.

    transport: of the context; None: the context's own.
    change: fields of the configuration.
    repeatable: gives the same bits on every run.
    path: "plain" has no configuration.
    copies: the copy engine sends.
    reduces: applies to reductions only.
    """

    transport: str | None
    change: dict = dataclasses.field(default_factory=dict)
    repeatable: bool = True
    path: str = "fused"
    copies: bool = False
    reduces: bool = False


INTERLEAVED = Way(None, {"num_comm": 0, "interleaved": True, "split_tiles": None}, reduces=True)
COMMON = {"interleaved": INTERLEAVED, "copy_engine": Way(None, copies=True), "plain": Way(None, path="plain")}
WAYS: dict[str, dict[str, Way]] = {
    "nvshmem": {"peer": Way("peer"), "nvshmem": Way("nvshmem"), **COMMON},
    "simulated": {"simulated": Way("simulated"), **COMMON},
}


@functools.cache
def context_over(ctx: Context, transport: str | None) -> Context:
    """Collective. A context of the same ranks over another transport, kept between cases."""
    if transport in (None, ctx.transport):
        return ctx
    group = ctx.group.process_group
    return tkernels.init(group, transport=transport, timeout_s=ctx.timeout_s, default=False)


@dataclasses.dataclass(frozen=True)
class Opened:
    """A way that works here: its context and its configuration."""

    way: Way
    ctx: Context
    config: object

    def call(self, problem: Problem) -> Callable[[], torch.Tensor]:
        if self.way.path == "plain":
            return lambda: problem.ours("plain")
        return lambda: problem.with_config(self.config, self.ctx)

    def described(self) -> dict:
        """sms: SMs dedicated to sending; None for the plain path, where nothing overlaps."""
        return {"sms": self.config.num_comm if self.way.path == "fused" else None, "repeatable": self.way.repeatable}


def open_ways(ctx: Context, case: Case) -> tuple[dict[str, Opened], dict[str, str]]:
    """Collective. The ways of a fused operation that are available here, and why the others are not."""
    opened, unavailable = {}, {}
    if case.op == "gemm" or "matmul" not in case.op or ctx.size == 1:
        return {}, {}
    for name, way in WAYS[ctx.runtime].items():
        if way.reduces and case.op == "all_gather_matmul":
            continue
        reason = None
        try:
            other = context_over(ctx, way.transport)
            config = dataclasses.replace(config_of(other, case, sending=not way.copies), **way.change)
            if way.copies and not config.copied:
                config = by_copy_engine(config, max(case.rows(other.size)), case.row_bytes)
            opened[name] = Opened(way, other, config)
        except (TypeError, ValueError, RuntimeError) as error:  # no such transport, field or value here
            reason = sentence(error)
        reason = agree(ctx, reason)
        if reason is not None:
            opened.pop(name, None)
            unavailable[name] = reason
    return opened, unavailable
