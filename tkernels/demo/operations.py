"""What a training step communicates: counts and times tkernels' operators, and counts a pipeline's messages."""

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


class OperatorCounter(TorchDispatchMode):
    """While entered, counts and times the operators of torch.ops.tkernels, including those that autograd calls."""

    def __init__(self, ctx: Context):
        super().__init__()
        self.ctx, self.calls = ctx, {}  # by operation: (start, end, sent bytes) of each call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "tkernels":
            return func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("tkernels::").removesuffix("_out")
        arguments = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
        start = self._now()
        result = func(*args, **(kwargs or {}))
        self.calls.setdefault(name, []).append((start, self._now(), _sent_bytes(name, arguments, self.ctx)))
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
        operations = []
        for name, calls in sorted(self.calls.items()):
            if self.ctx.device.type == "cuda":
                seconds = sum(start.elapsed_time(end) for start, end, _ in calls) / 1e3
            else:
                seconds = sum(end - start for start, end, _ in calls)
            operations.append(Operation(name, len(calls), sum(sent for *_, sent in calls), seconds))
        return operations


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
    """Counts the messages of an overlapped pipeline, which bypass the operators: `sent` has (number, bytes) by name."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.sent = {}

    def send_forward_recv_forward(self, output_tensor, *arguments):
        self._count("send_forward", output_tensor)
        return super().send_forward_recv_forward(output_tensor, *arguments)

    def send_backward_recv_backward(self, input_tensor_grad, *arguments):
        self._count("send_backward", input_tensor_grad)
        return super().send_backward_recv_backward(input_tensor_grad, *arguments)

    def _count(self, name: str, tensor: torch.Tensor | None):
        if tensor is not None:
            number, sent_bytes = self.sent.get(name, (0, 0))
            self.sent[name] = number + 1, sent_bytes + tensor.nbytes
