"""GradBucket: copies gradients from any stream into one contiguous buffer, and reduces them together on another stream.

A *fill* is the unit of reduction: the gradients that were added since the last `flush`. The bucket has `copies`
buffers. Fills use them in turn, so that gradients are copied into one buffer while another is reduced. Each fill is a
lease of its buffer: a copy is a write by the stream that it is launched on, and the reduction is a read by the comm
stream that covers the collective *and* the use of its result. It follows that

- the reduction is ordered after every copy of its fill, whatever streams they were launched on;
- a copy is ordered after the reduction that last used its buffer, and after no other work of the comm stream;
- the host never waits, not even in `finish`.

    bucket = GradBucket(1 << 24, torch.bfloat16, ranks=R, reduce=all_reduce, deliver=keep, comm_stream=comm)
    def collect(parameter):  # returns None: torch gives what a hook returns to the next one
        bucket.add(parameter, parameter.grad)

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(collect)
    loss.backward()
    bucket.finish()  # orders the current stream after all reductions
"""

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tkernels.comm.arguments import check_flags, check_tensors, check_torch_dtype, check_type, whole
from tkernels.comm.fence import Fence, check_dev, check_stream
from tkernels.layers.data_parallel.values import Buffer
from tkernels.layers.data_parallel.wire import mean
from tkernels.layers.lease import Keepalive, Lease


@dataclass(frozen=True, eq=False)
class Slice:
    """Where the gradient of `parameter` lies in its fill: elements `start` to `stop`, contiguous."""

    parameter: torch.Tensor
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.parameter.numel()

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The slice of `flat` [elements of the fill], in the parameter's shape."""
        return flat[self.start : self.stop].view(self.parameter.shape)


class GradBucket:
    """Gradients of one dtype, reduced in fills of up to `capacity` elements. Fills are reduced in the order of `flush`.

    ranks: R, the divisor for `average`. copies: number of buffers.
    reduce: `reduce(flat)` takes a fill [elements] and returns its sum over ranks, or a part of it. It may overwrite
        `flat`, and is called with the comm stream as the current stream.
    deliver: `deliver(reduced, slices)` uses the result of `reduce`, also on the comm stream. Nothing may use the fill
        later. `slices` are in the order in which they were added. None if `reduce` does all the work.
    average: divide by R, before `deliver`. fp16, which might not hold the sum, and all without `deliver`: before
        `reduce`.
    comm_stream: None is the stream that is current at construction, which means no overlap with its other work.
    device, dev: the device of the buffers, and the module that provides streams; `dev` is torch's module of `device` by
        default.

    `add` and `write` may be called on any stream and from any thread. All ranks must add the same sizes and flush at
    the same places. Raises ValueError for sizes that are not positive, TypeError for a dtype that is not real
    floating-point.
    """

    def __init__(
        self,
        capacity: int,
        dtype: torch.dtype,
        *,
        ranks: int,
        reduce: Callable[[torch.Tensor], torch.Tensor],
        deliver: Callable[[torch.Tensor, list[Slice]], None] | None = None,
        average: bool = True,
        copies: int = 2,
        comm_stream=None,
        device: torch.device | str = "cpu",
        dev=None,
    ):
        named = (("capacity", capacity), ("copies", copies), ("ranks", ranks))
        capacity, copies, ranks = (whole(f"GradBucket: {name}", value, 1) for name, value in named)
        check_torch_dtype("GradBucket: dtype", dtype)
        if not dtype.is_floating_point:
            raise TypeError(f"GradBucket: sums floating-point gradients, not {dtype}")
        check_flags("GradBucket", average=average)
        check_type("GradBucket: reduce", reduce, Callable, "a function of a fill")
        check_type("GradBucket: deliver", deliver, Callable | None, "a function of the sum and its slices, or None")
        self.capacity, self.dtype, self.ranks, self.average = capacity, dtype, ranks, average
        try:
            self.dev = dev if dev is not None else torch.get_device_module(device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"GradBucket: device={device!r} is none that buffers can be on: {error}") from None
        check_dev("GradBucket", self.dev)
        self.comm_stream = self.dev.current_stream() if comm_stream is None else comm_stream
        check_stream("GradBucket: comm_stream", self.comm_stream)
        self._reduce, self._deliver = reduce, deliver
        like = torch.empty(0, dtype=dtype, device=device)
        self._buffers = [Buffer(capacity, like, dtype, self.dev, f"bucket buffer {copy}") for copy in range(copies)]
        for buffer in self._buffers:
            # The memory may have had another owner on this stream. This tenancy orders even the first fill after it.
            with buffer.changed() as memory:
                memory.zero_()
        self._turn = 0
        self._slices: dict[torch.Tensor, Slice] = {}
        self._end = 0
        self._reduced = Fence(self.dev)
        self._large = Keepalive()
        self._lock = threading.RLock()

    def __repr__(self):
        filled = f"{self._end} of {self.capacity} elements in buffer {self._turn}"
        return f"GradBucket({self.dtype}, {len(self._buffers)} copies, {filled})"

    def add(self, parameter: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor:
        """Copy `grad` into the open fill on the current stream, which must be the stream that produced it.

        Returns the slice that holds the gradient, in the parameter's shape, valid until the flush. None adds zeros. A
        fill that has no room is flushed first. If the open fill already has a slice for the parameter, the gradient is
        added to it, ordered behind the writes of other streams. A gradient that was written in place into its slice is
        not copied. A gradient of more than `capacity` elements is a fill of its own and is reduced at once. Its own
        storage is the buffer if it is contiguous and has the bucket's dtype.

        Raises TypeError for sparse and complex gradients, ValueError for one that doesn't fit the parameter.
        """
        _check_gradient(parameter, grad)
        if parameter.numel() == 0:
            return parameter.new_empty(parameter.shape, dtype=self.dtype) if grad is None else grad
        with self._lock:
            if parameter.numel() > self.capacity:
                return self._add_large(parameter, grad)
            again = parameter in self._slices
            with self.write(parameter) as view:
                if grad is None:
                    if not again:
                        view.zero_()
                elif grad.data_ptr() != view.data_ptr():
                    view.add_(grad) if again else view.copy_(grad)
            return view

    @contextlib.contextmanager
    def write(self, parameter: torch.Tensor):
        """A context in which a kernel writes `parameter`'s gradient itself. Yields the slice, in the parameter's shape.

        For kernels that add to a gradient buffer. Launch them inside, on the current stream. A slice that is new in the
        open fill contains an older gradient, or zeros. Raises ValueError for more than `capacity` elements.
        """
        check_tensors("GradBucket.write", parameter=parameter)
        with self._lock:
            again = parameter in self._slices
            slice = self._slices[parameter] if again else self._take(parameter)
            with self._buffers[self._turn].lease.write(ordered=again) as buffer:
                yield slice.of(buffer)

    def flush(self):
        """Reduce the open fill, if any, on the comm stream, behind all its producers; go to the next buffer."""
        with self._lock:
            if not self._slices:
                return
            buffer, slices, elements = self._buffers[self._turn], list(self._slices.values()), self._end
            self._slices, self._end = {}, 0
            try:
                self._read(buffer.lease, elements, slices)
            finally:
                buffer.end()
                self._turn = (self._turn + 1) % len(self._buffers)

    def finish(self, stream=None):
        """Flush, and order `stream` (None: the current one) after all reductions so far. Only `stream` is ordered."""
        stream = self.dev.current_stream() if stream is None else stream
        check_stream("GradBucket.finish: stream", stream)
        with self._lock:
            self.flush()
            self._reduced.wait(stream)
            self._reduced.clear()
            self._large.drain()

    def _take(self, parameter: torch.Tensor) -> Slice:
        if (numel := parameter.numel()) > self.capacity:
            raise ValueError(f"GradBucket: elements 0 to {numel} don't lie within the bucket's {self.capacity}")
        if self._end + numel > self.capacity:
            self.flush()
        slice = self._slices[parameter] = Slice(parameter, self._end)
        self._end = slice.stop
        return slice

    def _add_large(self, parameter: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor:
        self.flush()  # reduces earlier gradients first
        if grad is None:
            grad = torch.zeros_like(parameter, dtype=self.dtype, memory_format=torch.contiguous_format)
        grad = grad.detach().to(self.dtype).contiguous()
        lease = Lease(grad.view(-1), dev=self.dev, name="large gradient")
        with lease.write():
            pass  # its producer has been launched on this stream
        try:
            self._read(lease, grad.numel(), [Slice(parameter, 0)])
        finally:
            self._large.defer(lease)  # even after a failure, work on the comm stream may still use it
        self._large.drain(keep=len(self._buffers))
        return grad

    def _read(self, lease: Lease, elements: int, slices: list[Slice]):
        with self.dev.stream(self.comm_stream), lease.read(self.comm_stream) as buffer:
            flat, factor = buffer[:elements], 1 / self.ranks if self.average else 1
            if self._deliver is not None:
                self._deliver(mean(flat, factor, self._sum), slices)
            else:
                self._reduce(flat if factor == 1 else flat.mul_(factor))
        self._reduced.update(lease.used)

    def _sum(self, flat: torch.Tensor) -> torch.Tensor:
        summed = self._reduce(flat)
        check_tensors("GradBucket", **{"what reduce returns, for deliver": summed})
        return summed


def _check_gradient(parameter: torch.Tensor, grad: torch.Tensor | None):
    """Raises TypeError or ValueError for a gradient that no bucket takes."""
    check_tensors("GradBucket", parameter=parameter)
    if grad is None:
        return
    check_tensors("GradBucket", gradient=grad)
    if grad.layout != torch.strided:
        raise TypeError(f"GradBucket: takes dense gradients, not {grad.layout}; make the layer with sparse=False")
    if grad.is_complex():
        raise TypeError(f"GradBucket: sums real gradients, not {grad.dtype}; keep the parameter as torch.view_as_real")
    if grad.shape != parameter.shape:
        raise ValueError(f"GradBucket: a gradient of shape {list(grad.shape)} for one of {list(parameter.shape)}")
