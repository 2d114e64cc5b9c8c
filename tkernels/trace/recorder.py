"""Recording: allocates the mark buffers of each launch and gathers the marks of all ranks into one trace."""

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
import triton.language as tl

from tkernels.comm.context import Context, as_context
from tkernels.comm.device import TRACE_BUFFER, TRACE_CAPACITY, operation_name
from tkernels.comm.errors import TkernelsError
from tkernels.comm.marks import MARK
from tkernels.trace.clocks import compare_clocks
from tkernels.trace.timeline import Launch, Trace

DEFAULT_MARKS = 1024  # llama405b-gate-up on 4 ranks, 51 tiles a program, makes 160; 1024 take 4 MB a launch on an H200


@contextlib.contextmanager
def tracing(ctx: Context | None = None, *, marks: int = DEFAULT_MARKS) -> Iterator[Trace]:
    """Collective. Record what the context's kernels do in this block; afterwards, every rank has the complete trace.

        with tkernels.tracing() as trace:
            y = tkernels.all_gather_matmul(x, w)
        if ctx.rank == 0:
            trace.save("trace.json")  # for https://ui.perfetto.dev or chrome://tracing

    Every launch of the operations on several ranks is recorded, forward and backward, but no local GEMMs and no replays
    of CUDA graphs. A recorded kernel is compiled separately: call the operation in a tracing block of its own first, or
    the trace shows a wait for the compiler.

    marks: capacity for each program of a launch, 32 bytes a mark, until the block ends. Marks that do not fit are
        counted in `Trace.lost`.

    Raises ValueError for fewer than 2 marks or inside another such block, TkernelsError where a CUDA graph is captured.
    """
    ctx = as_context(ctx, "tracing: ctx")
    if marks < 2:
        raise ValueError(f"tracing: marks={marks}, but a program makes at least 2; the default is {DEFAULT_MARKS}")
    if ctx.recorder is not None:
        raise ValueError(f"tracing: {ctx.name} is being traced already; a block of tracing has no other inside")
    trace, recorder = Trace(), Recorder(ctx, marks)
    before = compare_clocks(ctx)
    ctx.recorder = recorder
    try:
        yield trace
    finally:
        ctx.recorder = None
    ctx.check()
    launches = ctx.group.gather(recorder.launches())
    trace.fill(launches, before, compare_clocks(ctx))


ENDS = frozenset({"end_marks", "end_mail"})  # of which each kernel that can make marks calls one


class Recorder:
    """The value of a context's `recorder` during tracing: collects the launches."""

    def __init__(self, ctx: Context, marks: int):
        self.ctx, self.marks = ctx, marks
        self._recorded = []  # of each launch; the buffer and the table stay alive while the kernel may use them

    def record(self, kernel, num_programs: int, arguments: dict) -> dict:
        """The launch's arguments, by name, changed so that it writes marks; unchanged for a kernel without marks."""
        ctx = self.ctx
        if not ENDS.intersection(kernel.fn.__code__.co_names):
            return arguments
        if ctx.capturing:
            raise TkernelsError("a CUDA graph is being captured, whose replays a trace can't record; trace eager calls")
        table, link = arguments["table"].clone(), arguments["L"]
        buffer = torch.empty(num_programs, 1 + MARK.value * self.marks, dtype=torch.int64, device=ctx.device)
        buffer[:, 0] = 0
        table[TRACE_BUFFER.value] = buffer.data_ptr()
        table[TRACE_CAPACITY.value] = self.marks
        name = operation_name(link.OPERATION.value)
        stream = torch.cuda.current_stream().cuda_stream if ctx.device.type == "cuda" else 0
        self._recorded.append((name, arguments.get("num_comm"), stream, buffer, table))
        return arguments | {"table": table, "L": link._replace(TRACE=tl.constexpr(True))}

    def launches(self) -> list[Launch]:
        """The launches recorded on this rank. The device must have finished them."""
        launches, lanes = [], {}  # lanes: number of each stream
        for name, num_comm, stream, buffer, _ in self._recorded:
            counts = buffer[:, 0].cpu().numpy()
            kept = np.minimum(counts, self.marks)
            words = buffer[:, 1 : 1 + MARK.value * kept.max()].cpu().numpy().reshape(len(counts), -1, MARK.value)
            marks = [program[:number].copy() for program, number in zip(words, kept, strict=True)]
            lane = lanes.setdefault(stream, len(lanes))
            launches.append(Launch(name, num_comm, lane, marks, (counts - kept).tolist()))
        return launches
