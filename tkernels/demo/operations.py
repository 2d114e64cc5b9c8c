"""What a training step communicates: tkernels' operators, counted and timed, and a pipeline's messages, counted."""

import math
import time
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tkernels.comm.collectives import split_rows
from tkernels.comm.context import Context
from tkernels.configs import result_dtype
from tkernels.layers.pipeline.communicator import P2PCommunicator


@dataclass(frozen=True)
class Operation:
    """All calls of one operation on a rank.

    sent_bytes: to its peers.
    seconds: from call to result, waiting for peers included. None for messages, which overlap with the computation.
    """

    operation: str
    calls: int
    sent_bytes: int
    seconds: float | None = None


class OperationCounter(TorchDispatchMode):
    """While entered, counts and times the operators of torch.ops.tkernels, including those that autograd calls."""

    def __init__(self, ctx: Context):
        super().__init__()
        self.ctx, self.calls = ctx, {}  # by operation: (sent bytes, start, end) of each call

    def add(self, operation: str, sent_bytes: int, start=None, end=None):
        """Count a call. start, end: as `_now` returns them."""
        self.calls.setdefault(operation, []).append((sent_bytes, start, end))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "tkernels":
            return func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("tkernels::").removesuffix("_out")
        arguments = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
        start = self._now()
        result = func(*args, **(kwargs or {}))
        self.add(name, _sent_bytes(name, arguments, self.ctx), start, self._now())
        return result

    def _now(self):
        if self.ctx.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def operations(self) -> list[Operation]:
        """What this rank called. Waits for the device."""
        torch.get_device_module(self.ctx.device).synchronize()
        return [
            Operation(name, len(calls), sum(sent for sent, *_ in calls), _seconds(calls))
            for name, calls in sorted(self.calls.items())
        ]


def _seconds(calls: list[tuple]) -> float | None:
    if any(start is None for _, start, _ in calls):
        return None
    return sum(end - start if isinstance(end, float) else start.elapsed_time(end) / 1e3 for _, start, end in calls)


def _sent_bytes(name: str, arguments: dict, ctx: Context) -> int:
    """Bytes that this rank sends to its peers in one call of an operator."""
    x, rows = next(iter(arguments.values())), arguments.get("rows")
    if name in ("quantize", "dequantize", "transpose_quantized", "matmul"):
        return 0
    if name in ("all_gather", "all_gather_matmul", "matmul_reduce_scatter_backward"):  # the last one gathers dy
        scales = 0 if arguments.get("x_scale") is None else len(x)  # each row travels with its own
        return (x.nbytes + scales * torch.float32.itemsize) * (ctx.size - 1)
    if name in ("reduce_scatter", "matmul_reduce_scatter"):
        width = math.prod(x.shape[1:]) if name == "reduce_scatter" else arguments["w_shard_k"].shape[0]
        sent = arguments.get("wire_dtype") or result_dtype(x.dtype)
        return (sum(rows) - rows[ctx.rank]) * width * sent.itemsize
    if name == "all_reduce":  # terms go to the rank that sums them, sums to all
        own = split_rows(x.numel(), ctx.size)[ctx.rank] * x.itemsize
        return x.nbytes - own + own * (ctx.size - 1)
    raise NotImplementedError(f"the demo's model does not use {name}")


class CountingCommunicator(P2PCommunicator):
    """Counts the messages of an overlapped pipeline, which bypass the operators, and can't be timed."""

    def __init__(self, counter: OperationCounter, **options):
        super().__init__(counter.ctx, **options)
        self.counter = counter

    def send_forward_recv_forward(self, output_tensor, *arguments):
        if output_tensor is not None:
            self.counter.add("send_forward", output_tensor.nbytes)
        return super().send_forward_recv_forward(output_tensor, *arguments)

    def send_backward_recv_backward(self, input_tensor_grad, *arguments):
        if input_tensor_grad is not None:
            self.counter.add("send_backward", input_tensor_grad.nbytes)
        return super().send_backward_recv_backward(input_tensor_grad, *arguments)
