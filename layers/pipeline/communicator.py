"""P2PCommunicator: activations and gradients between pipeline stages, and handles that make freeing them safe.

    comm = P2PCommunicator(ctx)                                  # or (group, backend="nccl")
    x, handles = comm.send_forward_recv_forward(y, True, shape, overlap_p2p_comm=True)
    deallocate_output_tensor(y, True)                            # safe at once: y's storage is held until it is sent
    z = compute()                                                # while the transfers are under way
    handles["recv_prev"].wait()                                  # this stream may use x afterwards

The storage of a sent tensor is leased from the moment of the send. The lease ends without a wait once the send is known
to be over. As long as others hold the storage too, it costs no memory, and nothing waits for it. Once they have freed
it, and `max_inflight` later such sends were made on the same edge, its home stream is ordered behind the send, and the
storage returns to its allocator; `drain` does that at once. No kernel that was launched before then can be given the
memory.

Each of a rank's four edges (send_next, recv_prev, send_prev, recv_next) has a stream of its own, so that a send that
waits for its peer delays no receive, and a receive that was posted early delays no send. Even ranks first send to the
next rank, odd ranks first receive, so that pairs of ranks match on a transport that handles one message at a time.

With channels, a receive launches nothing before its handle is waited for or queried. The sender puts the message into a
slot meanwhile. A kernel that waited for the message would block the host: the CUDA driver loads a module (Triton's, or
that of a torch kernel that is used for the first time), and frees memory, only once the running kernels have ended
(seen with CUDA 13.0). Two ranks that each load something while a kernel waits for the other deadlock. NCCL's kernels do
run, and wait, from the moment the receive is posted: with NCCL, take the first steps without overlap_p2p_comm.
"""

import contextlib
import itertools
import numbers
import os
import threading
import time
import warnings
import weakref
from collections import Counter, deque

import torch
import torch.distributed as dist

from tkernels.comm.arguments import check_resolved, check_torch_dtype, whole
from tkernels.comm.channel import Channel
from tkernels.comm.context import Context
from tkernels.comm.contexts import current_context
from tkernels.comm.errors import LeaseError
from tkernels.comm.fence import EventCompletion, Fence, capturing
from tkernels.comm.group import Group
from tkernels.layers.lease import Keepalive, Lease, WorkCompletion, num_holders

EDGES = ("send_next", "recv_prev", "send_prev", "recv_next")
ISSUE_ORDER = (EDGES, ("recv_prev", "send_next", "recv_next", "send_prev"))  # of even ranks, of odd ranks
SLOT_BYTES = {"simulated": 4 << 20, "nvshmem": 32 << 20}
MAX_DIMENSIONS = 8  # of a tensor whose shape is exchanged
BACKENDS = ("nvshmem", "nccl", "gloo")


class P2PHandle:
    """A transfer that has been started. Close it once: by `wait`, by `release`, or as a context manager.

    It can't be waited for after a release. A handle that is dropped while open is released with a ResourceWarning.
    """

    def __init__(self, name: str, dev, done: list[Fence], leases: list[Lease], keepalive: Keepalive):
        """Takes over the fences and buffers of a transfer.

        done: fences that the transfer completes. leases: buffers that a receive writes; a release, or a drop of the
            handle, hands them to `keepalive`.
        """
        self.name, self.state = name, "open"
        self._dev, self._done, self._leases, self._keepalive = dev, done, leases, keepalive

    def __repr__(self):
        return f"P2PHandle({self.name}, {self.state})"

    def wait(self, stream=None):
        """Order later work of `stream` (None: the current one) behind the transfer. May be repeated.

        The host does not block, except with gloo and on the simulated runtime, which have no streams.
        """
        self._require_not_released()
        stream = self._dev.current_stream() if stream is None else stream
        for done in self._done:
            done.wait(stream)
        self.state = "waited"
        for lease in self._leases:
            if lease.home == stream:  # dropping the tensor is safe: its home stream is behind the write
                lease.release()
        self._leases = [lease for lease in self._leases if not lease.released]

    def query(self) -> bool:
        """Whether the transfer is known to be done; never while a CUDA graph is being captured.

        With channels, the query of a receive launches it, and from then on a kernel waits for the peer.
        """
        self._require_not_released()
        return all(done.query() for done in self._done)

    def release(self):
        """Give the handle up without a wait. May be repeated.

        The storage of a receive is held until its home stream is ordered behind the transfer: when a later receive is
        started while more than `max_inflight` buffers have been given up in this way, or by `drain`.
        """
        self.state = "released"
        while self._leases:
            self._keepalive.defer(self._leases.pop())

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.release()

    def __del__(self):
        if getattr(self, "state", "released") == "open":
            warnings.warn(
                f"the handle of {self.name} was dropped; call wait() or release() on it, or use it as a context "
                f"manager",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )
        if getattr(self, "_leases", None):
            self.release()

    def _require_not_released(self):
        if self.state == "released":
            raise LeaseError(f"the handle of {self.name} has been released: wait for it before, or keep it open")


class P2PCommunicator:
    """Collective. Transfers between each rank of a pipeline and its two neighbours; the first rank follows the last.

    pp_group: a Context (backend "nvshmem"; None is the default one), or a torch process group (None is the default
        one).
    config: Megatron's ModelParallelConfig, or another object with its attributes. dtype is its pipeline_dtype, and
        shapes are exchanged if it has variable_seq_lengths or mtp_standalone. How NCCL would be called (batch_p2p_comm,
        batch_p2p_sync, use_ring_exchange_p2p) has no meaning here, and timers are not started.
    backend: "nvshmem", device-initiated puts through a `Channel` for each direction, also on the simulated runtime;
        "nccl" or "gloo", torch.distributed's isend and irecv (gloo: of CPU tensors). Or an object with
        `send(edge, tensor)` and `receive(edge, tensor)`, which start a transfer on the current stream and return a
        completion, or None if the transfer completes in the order of that stream.
    dtype: of the tensors that the methods below receive; default: config's, or float32.
    max_inflight: the number of sends per direction whose storage is held here alone, because it was freed before it was
        sent. One more makes the home stream, not the host, wait for the oldest.
    variable_seq_lengths: send every tensor's shape before it. The receiver's host then waits for the shape.
    stream: one stream for all transfers, in the order of their issue. None: one per edge, of high priority.
    slot_bytes, copies: of the channels (nvshmem); a sender is at most `copies` slots ahead of its receiver.
    dev: the module that provides streams; None: torch.cuda or torch.cpu.

    Ranks are those of the group. Attributes: rank, size, next_rank, prev_rank, device, streams (by edge), and what
    Megatron's schedules read: pp_group, config, virtual_pipeline_model_parallel_size, is_pp_first_stage,
    is_pp_last_stage, total_stages, current_stage. Pass it to them as p2p_communicator=, beside pg_collection=.

    The methods have Megatron's names and arguments. An output or a shape may be a single one, or a list or a dict; None
    means that nothing is sent, and is returned in the place of each tensor that is not received. Without
    overlap_p2p_comm, the methods return once the current stream is ordered behind all of the call's transfers, so that
    even the sent tensors may be overwritten. Raises ValueError for tensors that aren't contiguous or have another dtype
    or device.
    """

    def __init__(
        self,
        pp_group: Context | dist.ProcessGroup | None = None,
        config=None,
        *,
        backend="nvshmem",
        dtype: torch.dtype | None = None,
        max_inflight: int = 2,
        variable_seq_lengths: bool = False,
        stream=None,
        slot_bytes: int | None = None,
        copies: int | None = None,
        dev=None,
    ):
        if isinstance(backend, str) and backend not in BACKENDS:
            raise ValueError(f"P2PCommunicator: backend={backend!r} is unknown; use {', '.join(BACKENDS)}")
        if not isinstance(backend, str) and not (hasattr(backend, "send") and hasattr(backend, "receive")):
            raise TypeError(f"P2PCommunicator: backend={backend!r} must be a name, or have send and receive")
        ctx = _context_of(pp_group) if backend == "nvshmem" else pp_group if isinstance(pp_group, Context) else None
        self.group = ctx.group if ctx else pp_group if isinstance(pp_group, Group) else Group(pp_group)
        self.rank, self.size = self.group.rank, self.group.size
        self.next_rank, self.prev_rank = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        self.pp_group, self.config, self.max_inflight = self.group.process_group, config, max_inflight
        # Only channels are made together.
        with self.group.checking() if backend == "nvshmem" else contextlib.nullcontext():
            whole("P2PCommunicator: max_inflight", max_inflight, 1)
            if dtype is not None:
                check_torch_dtype("P2PCommunicator: dtype", dtype)
            self.dtype, self.variable_seq_lengths = _of_tensors(config, dtype, variable_seq_lengths, self.size)
            if backend == "nvshmem" and self.size > 1:
                _check_queues(ctx)
        self.device = ctx.device if backend == "nvshmem" else torch.device("cuda" if backend == "nccl" else "cpu")
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.dev = torch.get_device_module(self.device) if dev is None else dev
        if self.size == 1:
            self._wire = None
        elif backend == "nvshmem":
            slot_bytes = SLOT_BYTES[ctx.runtime] if slot_bytes is None else slot_bytes
            copies = max(2, max_inflight) if copies is None else copies
            self._wire = _ChannelWire(ctx, slot_bytes, copies)
        elif isinstance(backend, str):
            self._wire = _TorchWire(self.group, backend, self.dev)
        else:
            self._wire = backend
        self.streams = {edge: self.dev.Stream(priority=-1) if stream is None else stream for edge in EDGES}
        self._in_flight = {edge: deque() for edge in EDGES if edge.startswith("send")}  # a keepalive for each message
        self._headers = Keepalive()  # which nobody else holds; nothing waits for a few bytes
        self._dropped = Keepalive()  # buffers of receives whose home stream has not waited
        self._handles = weakref.WeakSet()

    # What Megatron's schedules read

    @property
    def virtual_pipeline_model_parallel_size(self) -> int | None:
        return getattr(self.config, "virtual_pipeline_model_parallel_size", None)

    @property
    def is_pp_first_stage(self) -> bool:
        return self.rank == 0

    @property
    def is_pp_last_stage(self) -> bool:
        return self.rank == self.size - 1

    @property
    def total_stages(self) -> int:
        return self.size

    @property
    def current_stage(self) -> int:
        return self.rank

    # One transfer

    def isend(self, tensor, dst: int, *, deallocate: bool = False, producers=None, home=None) -> P2PHandle:
        """Start to send a contiguous tensor (or a list or dict of them) to `dst`, the next or the previous rank.

        deallocate: leave the tensor with one element, as `deallocate_output_tensor` does.
        producers: the streams that wrote it; default: the current one. home: the stream on which its memory was
            allocated; default: the first producer. The same tensor may be sent to both peers.
        With two ranks, both neighbours are the same rank. `isend` then uses send_next, and `irecv` receives on
        recv_prev: not on the edges of the backward methods below.
        """
        edge = "send_next" if dst == self.next_rank else "send_prev"
        if dst not in (self.next_rank, self.prev_rank):
            raise ValueError(self._no_neighbour("send to", dst))
        if deallocate:
            _check_own(tensor)
        handle = self._send(edge, tensor, producers, home)
        if deallocate:
            deallocate_output_tensor(tensor, True)
        return handle

    def irecv(self, shape, dtype: torch.dtype | None, src: int) -> tuple[torch.Tensor, P2PHandle]:
        """Start to receive from `src`. Returns a new tensor, to be used after a wait for its handle, and the handle."""
        if src not in (self.next_rank, self.prev_rank):
            raise ValueError(self._no_neighbour("receive from", src))
        return self._receive("recv_prev" if src == self.prev_rank else "recv_next", shape, dtype)

    def drain(self, keep: int = 0):
        """Let go of the storage of all but the newest `keep` sends per direction, once its home stream is behind them.

        With keep=0, also of the storage of receives that were released without a wait.
        """
        whole("P2PCommunicator.drain: keep", keep)
        for messages in self._in_flight.values():
            while len(messages) > keep:
                messages.popleft().drain()
        if keep == 0:
            self._headers.drain()
            self._dropped.drain()

    @property
    def open_handles(self) -> list[str]:
        """The names of transfers that have been started, and neither waited for nor released."""
        return sorted(handle.name for handle in self._handles if handle.state == "open")

    @property
    def num_in_flight(self) -> dict[str, int]:
        """By edge, the number of sends whose storage is held."""
        return {edge: len(messages) for edge, messages in self._in_flight.items()}

    def close(self):
        """Collective. Drain, and free the channels or destroy the process groups."""
        self.drain()
        if isinstance(self._wire, _ChannelWire | _TorchWire):
            self._wire.close()
        self._wire = None

    # Megatron's methods

    def recv_forward(self, tensor_shapes, is_first_stage: bool):
        """Receive the activations from the previous stage. The first stage receives none."""
        return self._swap({}, "recv_prev", tensor_shapes, is_first_stage)

    def recv_backward(self, tensor_shapes, is_last_stage: bool):
        """Receive the gradients from the next stage. The last stage receives none."""
        return self._swap({}, "recv_next", tensor_shapes, is_last_stage)

    def send_forward(self, output_tensors, is_last_stage: bool):
        """Send the activations to the next stage. Does nothing on the last stage."""
        if not is_last_stage:
            self._exchange(send={"send_next": output_tensors})

    def send_backward(self, input_tensor_grads, is_first_stage: bool):
        """Send the gradients to the previous stage. Does nothing on the first stage."""
        if not is_first_stage:
            self._exchange(send={"send_prev": input_tensor_grads})

    def send_forward_recv_backward(self, output_tensors, tensor_shapes, is_last_stage: bool):
        """Send activations, receive gradients and return them. The last stage does neither."""
        shapes = _wrapped_as(output_tensors, tensor_shapes)
        return self._swap({"send_next": output_tensors}, "recv_next", shapes, is_last_stage)

    def send_backward_recv_forward(self, input_tensor_grads, tensor_shapes, is_first_stage: bool):
        """Send gradients, receive activations and return them. The first stage does neither."""
        shapes = _wrapped_as(input_tensor_grads, tensor_shapes)
        return self._swap({"send_prev": input_tensor_grads}, "recv_prev", shapes, is_first_stage)

    def send_forward_recv_forward(self, output_tensor, recv_prev: bool, tensor_shape, overlap_p2p_comm: bool = False):
        """Returns the activations, or None; with overlap_p2p_comm, (activations, handles by edge), not waited for."""
        receive = {"recv_prev": tensor_shape} if recv_prev else {}
        return self._one_way({"send_next": output_tensor}, receive, overlap_p2p_comm)

    def send_backward_recv_backward(
        self, input_tensor_grad, recv_next: bool, tensor_shape, overlap_p2p_comm: bool = False
    ):
        """Returns the gradients, or None; with overlap_p2p_comm, (gradients, handles by edge), not waited for."""
        receive = {"recv_next": tensor_shape} if recv_next else {}
        return self._one_way({"send_prev": input_tensor_grad}, receive, overlap_p2p_comm)

    def send_forward_backward_recv_forward_backward(
        self, output_tensor, input_tensor_grad, recv_prev: bool, recv_next: bool, tensor_shape, grad_shape=None
    ):
        """Returns (activations, gradients), each None if it is not received.

        grad_shape: the shape of the gradients, if it differs from tensor_shape.
        """
        receive = {"recv_prev": tensor_shape} if recv_prev else {}
        if recv_next:
            receive["recv_next"] = tensor_shape if grad_shape is None else grad_shape
        received = self._exchange({"send_next": output_tensor, "send_prev": input_tensor_grad}, receive)
        return received.get("recv_prev"), received.get("recv_next")

    # Implementation

    def _swap(self, send: dict, edge: str, shapes, at_the_end: bool):
        """Send and receive with one neighbour; at that end of the pipeline there is none."""
        return map_shapes(shapes, lambda _: None) if at_the_end else self._exchange(send, {edge: shapes})[edge]

    def _one_way(self, send: dict, receive: dict, overlap: bool):
        if not overlap:
            return next(iter(self._exchange(send, receive).values()), None)
        received, handles = self._start(send, receive)
        return next(iter(received.values()), None), handles

    def _exchange(self, send=None, receive=None) -> dict:
        received, handles = self._start(send or {}, receive or {}, at_once=True)
        for handle in handles.values():
            handle.wait()
        return received

    def _start(self, send: dict, receive: dict, at_once: bool = False) -> tuple[dict, dict[str, P2PHandle]]:
        """Start the transfers in this rank's order, receives too if `at_once`.

        Returns the tensors to be received, and the handles, both by edge.
        """
        received, handles = {}, {}
        for edge in ISSUE_ORDER[self.rank % 2]:
            if any(True for _ in leaves(send.get(edge))):
                self._check_dtype(edge, send[edge])
                handles[edge] = self._send(edge, send[edge])
            elif edge in receive:
                received[edge], handles[edge] = self._receive(edge, receive[edge], self.dtype)
                if at_once:
                    handles[edge].query()  # over channels, launches the receive here rather than after all sends
        return received, handles

    def _send(self, edge: str, value, producers=None, home=None) -> P2PHandle:
        self._require_peer(edge)
        tensors = list(leaves(value))
        for tensor in tensors:
            if tensor.device != self.device:
                raise ValueError(f"{edge}: sends tensors on {self.device}, not on {tensor.device}; move it there first")
            if not tensor.is_contiguous():
                raise ValueError(
                    f"{edge}: sends contiguous tensors, not one of strides {tensor.stride()}; pass .contiguous()"
                )
            check_resolved(edge, "the tensor", tensor)
        producers = [self.dev.current_stream()] if producers is None else producers
        self._let_go(next_send=edge)
        message = Keepalive()
        self._in_flight[edge].append(message)
        done = []
        for tensor in tensors:
            if self.variable_seq_lengths:
                header = torch.tensor(_header(tensor.shape), dtype=torch.int64, device=self.device)
                self._launch_send(edge, header, None, None, self._headers)
            done.append(self._launch_send(edge, tensor, producers, home, message))
        return self._handle(f"{edge} of rank {self.rank}", done, [])

    def _let_go(self, next_send: str | None = None):
        """Let go of sends that are over, and of the oldest ones that hold freed storage, down to max_inflight of these.

        next_send: the edge of a send that is about to be made, and counts too.
        """
        for message in (self._headers, *itertools.chain(*self._in_flight.values())):
            message.collect()
        sends = {edge: deque(filter(len, messages)) for edge, messages in self._in_flight.items()}
        leases = Counter(storage for messages in sends.values() for message in messages for storage in message.storages)
        alone = {storage for storage, count in leases.items() if num_holders(storage) == count}
        for edge, messages in sends.items():
            freed = [message for message in messages if not alone.isdisjoint(message.storages)]
            for message in freed[: max(0, len(freed) - self.max_inflight + (edge == next_send))]:
                message.drain()
                messages.remove(message)
        self._in_flight = sends

    def _launch_send(self, edge: str, tensor, producers, home, message: Keepalive) -> Fence:
        producers = [self.dev.current_stream()] if producers is None else producers
        lease = Lease(tensor, dev=self.dev, home=home or producers[0], name=edge)
        for stream in producers:
            with lease.write(stream):
                pass  # already written: orders the send after the stream's work so far
        stream = self.streams[edge]
        try:
            with self.dev.stream(stream), lease.read(stream):
                completion = self._wire.send(edge, lease.tensor)
            if completion is not None:
                lease.read_by(completion)
        finally:  # a send that failed halfway may still read the storage
            message.defer(lease)
        return lease.used

    def _receive(self, edge: str, shapes, dtype) -> tuple[object, P2PHandle]:
        self._require_peer(edge)
        self._let_go()
        self._dropped.drain(keep=self.max_inflight)
        done, leases = [], []
        value = map_shapes(shapes, lambda shape: self._launch_receive(edge, shape, dtype or self.dtype, done, leases))
        return value, self._handle(f"{edge} of rank {self.rank}", done, leases)

    def _launch_receive(self, edge: str, shape, dtype, done: list, leases: list) -> torch.Tensor:
        if self.variable_seq_lengths:
            shape = self._receive_shape(edge)
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        home = self.dev.current_stream()
        gate = Fence(self.dev)
        gate.record(home)  # previous uses of this memory are ordered on this stream
        lease = Lease(tensor, dev=self.dev, home=home, gate=gate, name=edge)
        stream = self.streams[edge]
        leases.append(lease)
        with self.dev.stream(stream), lease.write(stream):
            completion = self._wire.receive(edge, lease.tensor)
        if completion is not None:
            lease.written_by(completion)
        done.append(lease.filled)
        return tensor.requires_grad_(edge == "recv_prev" and dtype.is_floating_point)

    def _receive_shape(self, edge: str) -> tuple[int, ...]:
        stream = self.streams[edge]
        with self.dev.stream(stream):
            header = torch.empty(MAX_DIMENSIONS + 1, dtype=torch.int64, device=self.device)
            completion = self._wire.receive(edge, header)
            if completion is not None:
                completion.wait(stream)
            num_dimensions, *sizes = header.tolist()
        return tuple(sizes[:num_dimensions])

    def _handle(self, name: str, done: list[Fence], leases: list[Lease]) -> P2PHandle:
        handle = P2PHandle(name, self.dev, done, leases, self._dropped)
        self._handles.add(handle)
        return handle

    def _require_peer(self, edge: str):
        if self._wire is None:
            raise ValueError(f"{edge}: rank {self.rank} of {self.size} has no peer, or the communicator was closed")

    def _no_neighbour(self, verb: str, rank: int) -> str:
        return (
            f"rank {self.rank} can't {verb} rank {rank}: a pipeline's rank talks to the one before it "
            f"({self.prev_rank}) and the one after it ({self.next_rank})"
        )

    def _check_dtype(self, edge: str, value):
        for tensor in leaves(value):
            if tensor.dtype != self.dtype:
                raise ValueError(
                    f"{edge}: a {tensor.dtype} tensor, but the peer receives {self.dtype}; pass dtype={tensor.dtype} "
                    f"to P2PCommunicator on every rank"
                )


class _ChannelWire:
    """Transfers by device-initiated puts, through one channel per direction."""

    def __init__(self, ctx: Context, slot_bytes: int, copies: int):
        after, before = (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size
        forward = Channel(ctx, after, before, slot_bytes=slot_bytes, copies=copies)
        try:
            backward = Channel(ctx, before, after, slot_bytes=slot_bytes, copies=copies)
        except Exception:  # raised on all ranks, if there is no room
            forward.close()
            raise
        self.channels = dict(zip(EDGES, (forward, forward, backward, backward), strict=True))
        self._ctx, self._late = ctx, {edge: deque() for edge in EDGES}
        self._lock = threading.RLock()  # handles may be waited for in autograd's threads

    def send(self, edge: str, tensor: torch.Tensor):
        if self._ctx.device.type == "cpu":
            return self._start(edge, tensor)
        self.channels[edge].send(tensor)

    def receive(self, edge: str, tensor: torch.Tensor):
        if self._ctx.device.type == "cpu":
            return self._start(edge, tensor)
        with self._lock:
            self._late[edge].append(_LateReceive(self, edge, tensor))
            return self._late[edge][-1]

    def receive_until(self, last: "_LateReceive"):
        """Launch the receives of an edge, in order, up to `last`."""
        with self._lock:
            while last.done is None:
                self._late[last.edge].popleft().launch()

    def close(self):
        for edge in ("send_prev", "send_next"):
            self.channels[edge].close()

    # On the simulated runtime a launch blocks its caller until it has run. There, queues replace the streams of the
    # four edges: whenever a transfer is started, queried or waited for, everything runs that can run without waiting.

    def _start(self, edge: str, tensor: torch.Tensor) -> "_LateTransfer":
        transfer = _LateTransfer(self, edge, tensor)
        self._late[edge].append(transfer)
        self.progress()
        return transfer

    def move(self, edge: str):
        """Move the next slotful of an edge, even if it has to wait."""
        transfer, channel = self._late[edge][0], self.channels[edge]
        (channel.send if edge.startswith("send") else channel.receive)(transfer.part())
        transfer.moved()

    def progress(self) -> bool:
        """Move everything that can move without waiting. Returns whether anything moved."""
        moved = False
        for edge, queue in self._late.items():
            channel = self.channels[edge]
            signal = channel.credit if edge.startswith("send") else channel.arrival
            while queue and (not queue[0].parts or signal.query()):
                if queue[0].parts:
                    self.move(edge)
                    moved = True
                else:
                    queue.popleft()
        return moved

    def finish(self, transfer: "_LateTransfer"):
        """Move slotfuls until `transfer` is over. If nothing moves for as long as a wait may take, wait for its peer.

        Not earlier: during that wait nothing else moves, and the peer may be waiting for something else.
        """
        limit = time.monotonic() + self._ctx.timeout_s
        while transfer.parts:
            if self.progress():
                limit = time.monotonic() + self._ctx.timeout_s
            elif time.monotonic() < limit and not self._ctx.failed:
                time.sleep(1e-4)
            else:
                self.move(transfer.edge)


class _LateReceive:
    """A completion on GPUs: a receive that is launched when first needed, on the stream it was posted on."""

    def __init__(self, wire: _ChannelWire, edge: str, tensor: torch.Tensor):
        self.key, self.edge, self.done = self, edge, None
        self._wire, self._tensor, self._stream = wire, tensor, torch.cuda.current_stream()
        self.captured = capturing(torch.cuda)

    def launch(self):
        with torch.cuda.stream(self._stream):
            self._wire.channels[self.edge].receive(self._tensor)
        self.done, self._tensor = EventCompletion(self._stream, self.captured), None

    def wait(self, stream):
        self._wire.receive_until(self)
        self.done.wait(stream)

    def query(self) -> bool:
        self._wire.receive_until(self)
        return self.done.query()


class _LateTransfer:
    """A completion on the simulated runtime: the slotfuls of a message that have not moved yet.

    parts: where they start, in bytes. They are no views, which would count as holders of the storage.
    """

    captured = None

    def __init__(self, wire: _ChannelWire, edge: str, tensor: torch.Tensor):
        self.key, self.edge, self._wire, self._tensor = self, edge, wire, tensor
        self.parts = deque(range(0, tensor.nbytes, wire.channels[edge].slot_bytes))

    def part(self) -> torch.Tensor:
        """The next slotful, as bytes."""
        start = self.parts[0]
        return self._tensor.view(-1).view(torch.uint8)[start : start + self._wire.channels[self.edge].slot_bytes]

    def moved(self):
        self.parts.popleft()
        if not self.parts:
            self._tensor = None

    def wait(self, stream):
        self._wire.finish(self)

    def query(self) -> bool:
        self._wire.progress()
        return not self.parts


class _TorchWire:
    """Transfers by torch.distributed, with process groups of its own.

    NCCL runs the sends and receives that a rank issues in one group in order. A receive that is posted early must never
    delay a send. So the edges of each direction are coloured such that no rank has two edges of one colour, and every
    colour of a direction has its own group.
    """

    def __init__(self, group: Group, backend: str, dev):
        ranks, world = group.global_ranks, dist.get_world_size()
        if backend == "nccl" and len(ranks) < world and dist.group.WORLD.bound_device_id is not None:
            raise ValueError(
                f"P2PCommunicator: {len(ranks)} of {world} ranks can't make NCCL groups of their own after "
                f"init_process_group(device_id=...), which splits the communicator of all; leave device_id out"
            )
        self._rank, self._size, self._ranks, self._dev = group.rank, group.size, ranks, dev
        self._groups = [
            dist.new_group(ranks, backend=backend, use_local_synchronization=len(ranks) < world)
            for _ in range(2 * (2 + self._size % 2))
        ]
        if backend == "nccl":
            self._connect()

    def _connect(self):
        """Send a message along every edge, one group at a time; in a group each rank has at most one edge.

        NCCL connects two ranks at their first message, while both hosts wait. If both sent first, they would wait for
        each other; once connected, both may send first.
        """
        nothing = torch.zeros(1, device="cuda")
        for group in self._groups:
            for edge in EDGES:
                if self._group(edge) is group:
                    (dist.send if edge.startswith("send") else dist.recv)(nothing, self._peer(edge), group=group)

    def send(self, edge: str, tensor: torch.Tensor):
        return self._start(dist.isend, edge, tensor)

    def receive(self, edge: str, tensor: torch.Tensor):
        return self._start(dist.irecv, edge, tensor)

    def _peer(self, edge: str) -> int:
        """The global rank of the edge's peer."""
        return self._ranks[(self._rank + (1 if edge.endswith("next") else -1)) % self._size]

    def _group(self, edge: str) -> dist.ProcessGroup:
        sender = self._rank if edge.startswith("send") else self._ranks.index(self._peer(edge))
        colour = 2 if self._size % 2 and sender == self._size - 1 else sender % 2
        return self._groups[2 * colour + (edge in ("send_prev", "recv_next"))]

    def _start(self, transfer, edge: str, tensor: torch.Tensor):
        if not tensor.numel():
            return None
        return WorkCompletion(transfer(tensor, self._peer(edge), group=self._group(edge)), self._dev)

    def close(self):
        for group in self._groups:
            dist.destroy_process_group(group)


def deallocate_output_tensor(out, deallocate_pipeline_outputs: bool | P2PHandle = False):
    """Shrink `out`, a tensor or a list or dict of them, to one element each; only their grad_fn is of use afterwards.

    The storage of a tensor that is being sent is held until it has been sent.
    deallocate_pipeline_outputs: False: leave `out` as it is. Instead of True, the handle of its send may be passed. It
        must be open or waited for, so that a released handle, perhaps of another output, is noticed.

    Raises ValueError for a view, whose storage is shared, and for a leaf that needs a gradient: a parameter, or a
    tensor that a stage has received and passes on. Raises LeaseError for a released handle.
    """
    if not deallocate_pipeline_outputs:
        return
    if isinstance(deallocate_pipeline_outputs, P2PHandle):
        deallocate_pipeline_outputs._require_not_released()
    _check_own(out)
    for tensor in leaves(out):
        tensor.data = torch.empty((1,), dtype=tensor.dtype, device=tensor.device)


def custom_backward(output, grad_output):
    """Backward of a deallocated output. The gradient has the output's original shape, which torch would refuse.

    output, grad_output: a tensor each, or lists or dicts of them. grad_output None: outputs are scalars, whose gradient
        is one. The outputs may include leaves, not deallocated, that a stage passes on unchanged.
    Raises ValueError if another output is neither deallocated nor a scalar; use torch.autograd.backward for those.
    """
    outputs = tuple(leaves(output))
    for tensor in outputs:
        if tensor.numel() != 1 and not (tensor.is_leaf and tensor.requires_grad):
            raise ValueError(
                f"custom_backward: takes an output that was deallocated to one element, not one of shape "
                f"{tuple(tensor.shape)}; use torch.autograd.backward"
            )
    grads = tuple(torch.ones_like(tensor) for tensor in outputs) if grad_output is None else tuple(leaves(grad_output))
    torch.autograd.Variable._execution_engine.run_backward(
        outputs, grads, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _context_of(group) -> Context:
    if isinstance(group, Context):
        return group
    ctx = current_context()
    if group is not None and Group(group).global_ranks != ctx.group.global_ranks:
        raise ValueError(
            f"P2PCommunicator: backend 'nvshmem' sends through a Context, and the default one is of ranks "
            f"{ctx.group.global_ranks}, not {Group(group).global_ranks}; pass tkernels.init(group)"
        )
    return ctx


def _check_queues(ctx: Context):
    if ctx.device.type == "cuda" and int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")) < 8:
        raise ValueError(
            f"CUDA_DEVICE_MAX_CONNECTIONS={os.environ['CUDA_DEVICE_MAX_CONNECTIONS']}: with fewer than 8 queues, a "
            f"kernel that waits for a peer can hold up those that the peer waits for; unset it"
        )


def _of_tensors(config, dtype, variable_seq_lengths: bool, size: int) -> tuple[torch.dtype, bool]:
    """The dtype of what is received, and whether shapes are exchanged: of Megatron's config, if there is one."""
    if config is None:
        return torch.float32 if dtype is None else dtype, variable_seq_lengths
    if not hasattr(config, "pipeline_dtype"):
        raise TypeError(
            f"P2PCommunicator: config has Megatron's attributes, pipeline_dtype and others, and {config!r} has not; "
            f"pass options by name"
        )
    if dtype is not None or variable_seq_lengths:
        raise ValueError(
            "P2PCommunicator: dtype and variable_seq_lengths were passed beside a config, which says them too; leave "
            "them out, or set config.pipeline_dtype and config.variable_seq_lengths"
        )
    if config.pipeline_dtype is None and size > 1:
        raise ValueError("P2PCommunicator: config.pipeline_dtype is None; set it to the dtype of what stages exchange")
    return config.pipeline_dtype, config.variable_seq_lengths or getattr(config, "mtp_standalone", False)


def leaves(value):
    """Yields the tensors of a tensor, of a list or a dict of them, or of None, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from leaves(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from leaves(part)
    elif value is not None:
        raise TypeError(f"takes tensors, or lists or dicts of them, not {type(value).__name__}")


def map_shapes(shapes, make):
    """`make` of each shape. A shape is a sequence of integers, or None if shapes are exchanged."""
    if isinstance(shapes, dict):
        return {name: map_shapes(shape, make) for name, shape in shapes.items()}
    if _is_list_of_shapes(shapes):
        return [map_shapes(shape, make) for shape in shapes]
    return make(shapes)


def _is_list_of_shapes(shapes) -> bool:
    return isinstance(shapes, list | tuple) and any(not isinstance(size, numbers.Integral) for size in shapes)


def _wrapped_as(sent, shapes):
    """`shapes` in a list if `sent` is one: Megatron takes a single tensor with a list of one shape, and the reverse."""
    if isinstance(sent, list) and not isinstance(shapes, dict) and not _is_list_of_shapes(shapes):
        return [shapes]
    return shapes[0] if not isinstance(sent, list) and _is_list_of_shapes(shapes) and len(shapes) == 1 else shapes


def _check_own(out):
    for tensor in leaves(out):
        if tensor.is_leaf and tensor.requires_grad:
            raise ValueError(
                f"deallocate: a {tuple(tensor.shape)} leaf that needs a gradient can't be deallocated, for it is a "
                f"parameter, or what a stage has received and passes on; leave it, since it takes no memory of its own"
            )
        if tensor._base is not None:
            raise ValueError(
                f"deallocate: a {tuple(tensor.shape)} view can't be deallocated, since others use its storage; let "
                f"the stage return a tensor of its own, for instance by .clone()"
            )


def _header(shape) -> list[int]:
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"variable_seq_lengths: sends up to {MAX_DIMENSIONS} dimensions, not {tuple(shape)}")
    return [len(shape), *shape, *[0] * (MAX_DIMENSIONS - len(shape))]
