"""P2PCommunicator: activations and gradients between pipeline stages, and handles that make freeing them safe.

    comm = P2PCommunicator(mesh["pp"])
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
"""

import contextlib
import itertools
import numbers
import os
import warnings
import weakref
from collections import Counter, deque

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tkernels.comm import runtime
from tkernels.comm.arguments import (
    check_dense,
    check_flags,
    check_resolved,
    check_streams,
    check_torch_dtype,
    check_type,
    whole,
)
from tkernels.comm.calls import DTYPES
from tkernels.comm.context import MeshLike, as_context, group_of
from tkernels.comm.contexts import open_contexts
from tkernels.comm.errors import LeaseError
from tkernels.comm.fence import Fence, check_stream
from tkernels.comm.group import Group
from tkernels.layers.lease import Keepalive, Lease, num_holders
from tkernels.layers.pipeline.memory import check_own, deallocate_output_tensor, leaves
from tkernels.layers.pipeline.transports import EDGES, ChannelTransport, TorchTransport

ISSUE_ORDER = (EDGES, ("recv_prev", "send_next", "recv_next", "send_prev"))  # of even ranks, of odd ranks
SLOT_BYTES = {"simulated": 4 << 20, "nvshmem": 32 << 20}
MAX_DIMENSIONS = 8  # of a tensor whose shape is exchanged
BACKENDS = ("tkernels", "torch")


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
        self.require_not_released()
        stream = self._dev.current_stream() if stream is None else stream
        check_stream("P2PHandle.wait: stream", stream)
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
        self.require_not_released()
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

    def require_not_released(self):
        if self.state == "released":
            raise LeaseError(f"the handle of {self.name} has been released: wait for it before, or keep it open")


class P2PCommunicator:
    """Collective. Transfers between each rank of a pipeline and its two neighbours; the first rank follows the last.

    pp_group: the pipeline's ranks, as `mesh` elsewhere: a DeviceMesh of one dimension, a ProcessGroup, a Context; None
        is the current context, or with "torch" all ranks if none is open.
    config: Megatron's ModelParallelConfig, or another object with its attributes. dtype is its pipeline_dtype, and
        shapes are exchanged if it has variable_seq_lengths or mtp_standalone. How NCCL would be called (batch_p2p_comm,
        batch_p2p_sync, use_ring_exchange_p2p) has no meaning here, and timers are not started.
    backend: "tkernels", device-initiated puts through a `Channel` for each direction, in the context over these ranks,
        which is made if there is none; "torch", torch.distributed's isend and irecv, over NCCL on GPUs, else gloo. Or
        an object with `send(edge, tensor)` and `receive(edge, tensor)`: see transports.py.
    dtype: of the tensors that the methods below receive; default: config's, or float32.
    max_inflight: the number of sends per direction whose storage is held here alone, because it was freed before it was
        sent. One more makes the home stream, not the host, wait for the oldest.
    variable_seq_lengths: send every tensor's dtype and shape before it. The receiver's host then waits for them.
    stream: one stream for all transfers, in the order of their issue. None: one per edge, of high priority.
    slot_bytes, copies: of the channels; a sender is at most `copies` slots ahead of its receiver.
    dev: the module that provides streams; None: torch.cuda or torch.cpu.

    Ranks are those of the group. Attributes: rank, size, next_rank, prev_rank, device, streams (by edge), and what
    Megatron's schedules read: pp_group, config, virtual_pipeline_model_parallel_size, is_pp_first_stage,
    is_pp_last_stage, total_stages, current_stage. Pass it to them as p2p_communicator=, beside pg_collection=.

    The methods have Megatron's names and arguments. An output or a shape may be a single one, or a list or a dict; None
    means that nothing is sent, and is returned in the place of each tensor that is not received. Without
    overlap_p2p_comm, the methods return once the current stream is ordered behind all of the call's transfers, so that
    even the sent tensors may be overwritten. Raises ValueError for tensors that aren't contiguous or have another dtype
    or device. The constructor raises what is wrong on one rank on every rank, MismatchError for options that differ.
    """

    def __init__(
        self,
        pp_group: MeshLike = None,
        config=None,
        *,
        backend="tkernels",
        dtype: torch.dtype | None = None,
        max_inflight: int = 2,
        variable_seq_lengths: bool = False,
        stream=None,
        slot_bytes: int | None = None,
        copies: int | None = None,
        dev=None,
    ):
        own = hasattr(backend, "send") and hasattr(backend, "receive")  # made by the caller, and not together
        self.group = group = ranks_of(pp_group, "P2PCommunicator: pp_group")
        self.rank, self.size = self.current_stage, self.total_stages = group.rank, group.size
        self.next_rank, self.prev_rank = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        self.is_pp_first_stage, self.is_pp_last_stage = self.rank == 0, self.rank == self.size - 1
        self.virtual_pipeline_model_parallel_size = getattr(config, "virtual_pipeline_model_parallel_size", None)
        self.pp_group, self.config, self.max_inflight = group.process_group, config, max_inflight
        self._own, self._agreed, alike = own, {}, {}
        with self.checking("P2PCommunicator", alike):
            if not own and backend not in BACKENDS:
                raise (ValueError if isinstance(backend, str) else TypeError)(
                    f"P2PCommunicator: backend={backend!r} is unknown; use {' or '.join(map(repr, BACKENDS))}, or an "
                    f"object that has send and receive"
                )
            whole("P2PCommunicator: max_inflight", max_inflight, 1)
            check_flags("P2PCommunicator", variable_seq_lengths=variable_seq_lengths)
            if dtype is not None:
                check_torch_dtype("P2PCommunicator: dtype", dtype)
            self.device = torch.device("cpu") if own else runtime.device()
            self.dev = torch.get_device_module(self.device) if dev is None else dev
            check_streams("P2PCommunicator", self.dev, None if own else self.device, stream=stream)
            self.dtype, self.variable_seq_lengths = _of_tensors(config, dtype, variable_seq_lengths, self.size)
            if backend == "tkernels" and self.size > 1:
                _check_queues()
            alike |= dict(backend=backend, dtype=self.dtype, variable_seq_lengths=self.variable_seq_lengths)
        if self.size == 1:
            self._transport = None
        elif backend == "tkernels":
            slot_bytes = SLOT_BYTES[runtime.RUNTIME] if slot_bytes is None else slot_bytes
            copies = max(2, max_inflight) if copies is None else copies
            self._transport = ChannelTransport(as_context(pp_group), slot_bytes, copies)
        else:
            self._transport = backend if own else TorchTransport(group, self.device, self.dev)
        self.streams = {edge: self.dev.Stream(priority=-1) if stream is None else stream for edge in EDGES}
        self._in_flight = {edge: deque() for edge in EDGES if edge.startswith("send")}  # a keepalive for each message
        self._headers = Keepalive()  # which nobody else holds; nothing waits for a few bytes
        self._dropped = Keepalive()  # buffers of receives whose home stream has not waited
        self._handles = weakref.WeakSet()

    def __getstate__(self):
        raise TypeError(
            "P2PCommunicator: it belongs to its rank, and can't be copied or pickled; keep it out of what "
            "is, and make one where it is needed"
        )

    @contextlib.contextmanager
    def checking(self, call: str, alike: dict):
        """For `with`: what the block raises on one rank all raise, and MismatchError if `alike`, filled in it, differs.

        Collective for what is new. Once ranks have agreed on a call, the next block raises where it is wrong.
        """
        agreed = self._agreed.setdefault(call, [])
        with contextlib.nullcontext() if self._own or agreed else self.group.checking(call, alike):
            yield
        if not self._own and alike not in agreed:
            if agreed:
                with self.group.checking(call, alike):
                    pass
            agreed.append(dict(alike))

    # One transfer

    def isend(self, tensor, dst: int, *, deallocate: bool = False, producers=None, home=None) -> P2PHandle:
        """Start to send a contiguous tensor (or a list or dict of them) to `dst`, the next or the previous rank.

        deallocate: leave the tensor with one element, as `deallocate_output_tensor` does.
        producers: the streams that wrote it; default: the current one. home: the stream on which its memory was
            allocated; default: the first producer. The same tensor may be sent to both peers.
        With two ranks, both neighbours are the same rank. `isend` then uses send_next, and `irecv` receives on
        recv_prev: not on the edges of the backward methods below.
        """
        dst = whole("P2PCommunicator.isend: dst", dst)
        edge = "send_next" if dst == self.next_rank else "send_prev"
        if dst not in (self.next_rank, self.prev_rank):
            raise ValueError(self._no_neighbour("send to", dst))
        self._check_send(edge, tensor)
        if producers is not None:
            check_type("P2PCommunicator.isend: producers", producers, list | tuple, "a list of streams")
        kind = type(self.dev.current_stream())
        for stream in (*(producers or ()), home):
            check_type("P2PCommunicator.isend: a stream", stream, kind | None, f"a {kind.__name__}")
        if deallocate:
            check_own(tensor)
        handle = self._send(edge, tensor, producers, home)
        if deallocate:
            deallocate_output_tensor(tensor, True)
        return handle

    def irecv(self, shape, dtype: torch.dtype | None, src: int) -> tuple[torch.Tensor, P2PHandle]:
        """Start to receive from `src`. Returns a new tensor, to be used after a wait for its handle, and the handle."""
        src = whole("P2PCommunicator.irecv: src", src)
        if src not in (self.next_rank, self.prev_rank):
            raise ValueError(self._no_neighbour("receive from", src))
        if dtype is not None:
            check_torch_dtype("P2PCommunicator.irecv: dtype", dtype)
        edge = "recv_prev" if src == self.prev_rank else "recv_next"
        self._check_receive(edge, shape)
        return self._receive(edge, shape, dtype)

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
        """Collective. Drain, and free the channels; process groups stay for the next communicator of these ranks."""
        self.drain()
        if isinstance(self._transport, ChannelTransport | TorchTransport):
            self._transport.close()
        self._transport = None

    def fail(self, error: Exception):
        """After an error on this rank alone: end the waits of its peers, which raise TkernelsError with that error.

        Only with channels, whose context can't be used any more.
        """
        if isinstance(self._transport, ChannelTransport):
            self._transport.ctx.fail(f"{type(error).__name__}: {error}")

    # Megatron's methods

    def recv_forward(self, tensor_shapes, is_first_stage: bool):
        """Receive the activations from the previous stage. The first stage receives none."""
        return self._swap({}, "recv_prev", tensor_shapes, is_first_stage)

    def recv_backward(self, tensor_shapes, is_last_stage: bool):
        """Receive the gradients from the next stage. The last stage receives none."""
        return self._swap({}, "recv_next", tensor_shapes, is_last_stage)

    def send_forward(self, output_tensors, is_last_stage: bool):
        """Send the activations to the next stage. Does nothing on the last stage."""
        if not _at_the_end("send_next", is_last_stage):
            self._exchange(send={"send_next": output_tensors})

    def send_backward(self, input_tensor_grads, is_first_stage: bool):
        """Send the gradients to the previous stage. Does nothing on the first stage."""
        if not _at_the_end("send_prev", is_first_stage):
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
        return self._one_way({"send_next": output_tensor}, tensor_shape, overlap_p2p_comm, recv_prev=recv_prev)

    def send_backward_recv_backward(
        self, input_tensor_grad, recv_next: bool, tensor_shape, overlap_p2p_comm: bool = False
    ):
        """Returns the gradients, or None; with overlap_p2p_comm, (gradients, handles by edge), not waited for."""
        return self._one_way({"send_prev": input_tensor_grad}, tensor_shape, overlap_p2p_comm, recv_next=recv_next)

    def send_forward_backward_recv_forward_backward(
        self, output_tensor, input_tensor_grad, recv_prev: bool, recv_next: bool, tensor_shape, grad_shape=None
    ):
        """Returns (activations, gradients), each None if it is not received.

        grad_shape: the shape of the gradients, if it differs from tensor_shape.
        """
        check_flags("P2PCommunicator", recv_prev=recv_prev, recv_next=recv_next)
        receive = {"recv_prev": tensor_shape} if recv_prev else {}
        if recv_next:
            receive["recv_next"] = tensor_shape if grad_shape is None else grad_shape
        received = self._exchange({"send_next": output_tensor, "send_prev": input_tensor_grad}, receive)
        return received.get("recv_prev"), received.get("recv_next")

    # Implementation

    def _swap(self, send: dict, edge: str, shapes, at_the_end: bool):
        """Send and receive with one neighbour; at that end of the pipeline there is none."""
        end = _at_the_end(edge, at_the_end)
        return map_shapes(shapes, lambda _: None) if end else self._exchange(send, {edge: shapes})[edge]

    def _one_way(self, send: dict, shape, overlap: bool, **wanted: bool):
        check_flags("P2PCommunicator", overlap_p2p_comm=overlap, **wanted)
        receive = {edge: shape for edge, flag in wanted.items() if flag}
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
        for edge, value in send.items():  # all of a call, before any of it has begun
            self._check_send(edge, value, self.dtype)
        for edge, shapes in receive.items():
            self._check_receive(edge, shapes)
        received, handles = {}, {}
        for edge in ISSUE_ORDER[self.rank % 2]:
            if leaves(send.get(edge)):
                handles[edge] = self._send(edge, send[edge])
            elif edge in receive:
                received[edge], handles[edge] = self._receive(edge, receive[edge], self.dtype)
                if at_once:
                    handles[edge].query()  # over channels, launches the receive here rather than after all sends
        return received, handles

    def _send(self, edge: str, value, producers=None, home=None) -> P2PHandle:
        producers = [self.dev.current_stream()] if producers is None else producers
        self._let_go(next_send=edge)
        message = Keepalive()
        self._in_flight[edge].append(message)
        done = []
        for tensor in leaves(value):
            if self.variable_seq_lengths:
                header = torch.tensor(_header(tensor), dtype=torch.int64, device=self.device)
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
                completion = self._transport.send(edge, lease.tensor)
            if completion is not None:
                lease.read_by(completion)
        finally:  # a send that failed halfway may still read the storage
            message.defer(lease)
        return lease.used

    def _receive(self, edge: str, shapes, dtype) -> tuple[object, P2PHandle]:
        self._let_go()
        self._dropped.drain(keep=self.max_inflight)
        done, leases = [], []
        value = map_shapes(shapes, lambda shape: self._launch_receive(edge, shape, dtype or self.dtype, done, leases))
        return value, self._handle(f"{edge} of rank {self.rank}", done, leases)

    def _launch_receive(self, edge: str, shape, dtype, done: list, leases: list) -> torch.Tensor:
        if self.variable_seq_lengths:
            shape = self._receive_shape(edge, dtype)
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        home = self.dev.current_stream()
        gate = Fence(self.dev)
        gate.record(home)  # previous uses of this memory are ordered on this stream
        lease = Lease(tensor, dev=self.dev, home=home, gate=gate, name=edge)
        stream = self.streams[edge]
        leases.append(lease)
        with self.dev.stream(stream), lease.write(stream):
            completion = self._transport.receive(edge, lease.tensor)
        if completion is not None:
            lease.written_by(completion)
        done.append(lease.filled)
        return tensor.requires_grad_(edge == "recv_prev" and dtype.is_floating_point)

    def _receive_shape(self, edge: str, dtype: torch.dtype) -> list[int]:
        stream = self.streams[edge]
        with self.dev.stream(stream):
            header = torch.empty(MAX_DIMENSIONS + 2, dtype=torch.int64, device=self.device)
            completion = self._transport.receive(edge, header)
            if completion is not None:
                completion.wait(stream)
            sent, num_dimensions, *sizes = header.tolist()
        if DTYPES[sent] != dtype:
            raise ValueError(
                f"{edge}: rank {self.rank} receives {dtype}, but a {DTYPES[sent]} tensor of shape "
                f"{tuple(sizes[:num_dimensions])} was sent; both must name the same dtype"
            )
        return sizes[:num_dimensions]

    def _handle(self, name: str, done: list[Fence], leases: list[Lease]) -> P2PHandle:
        handle = P2PHandle(name, self.dev, done, leases, self._dropped)
        self._handles.add(handle)
        return handle

    def _require_peer(self, edge: str):
        if self._transport is None:
            raise ValueError(f"{edge}: rank {self.rank} of {self.size} has no peer, or the communicator was closed")

    def _no_neighbour(self, verb: str, rank: int) -> str:
        return (
            f"rank {self.rank} can't {verb} rank {rank}: a pipeline's rank talks to the one before it "
            f"({self.prev_rank}) and the one after it ({self.next_rank})"
        )

    def _check_send(self, edge: str, value, dtype: torch.dtype | None = None):
        """Raise ValueError or TypeError for what can't be sent. dtype: of all tensors; None: any."""
        tensors = leaves(value)
        if tensors:
            self._require_peer(edge)
        for tensor in tensors:
            check_dense(edge, tensor=tensor)
            if dtype not in (None, tensor.dtype):
                raise ValueError(
                    f"{edge}: a {tensor.dtype} tensor, but the peer receives {dtype}; pass dtype={tensor.dtype} to "
                    f"P2PCommunicator on every rank"
                )
            if tensor.device != self.device:
                raise ValueError(f"{edge}: sends tensors on {self.device}, not on {tensor.device}; move it there first")
            if not tensor.is_contiguous():
                raise ValueError(
                    f"{edge}: sends contiguous tensors, not one of strides {tensor.stride()}; pass .contiguous()"
                )
            check_resolved(edge, "the tensor", tensor)
            if self.variable_seq_lengths:
                _header(tensor)

    def _check_receive(self, edge: str, shapes):
        self._require_peer(edge)
        check_shapes(edge, shapes, self.variable_seq_lengths)


def _at_the_end(edge: str, flag: bool) -> bool:
    check_flags("P2PCommunicator", **{"is_last_stage" if edge.endswith("next") else "is_first_stage": flag})
    return flag


def ranks_of(mesh, what: str) -> Group:
    """The ranks of a DeviceMesh of one dimension, a ProcessGroup or a Context; None: of the current context, or all."""
    if mesh is None and (contexts := open_contexts()):
        mesh = contexts[-1]
    return mesh if isinstance(mesh, Group) else group_of(mesh, what)


def _check_queues():
    if runtime.RUNTIME == "nvshmem" and int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")) < 8:
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
    if config.pipeline_dtype is not None:
        check_torch_dtype("P2PCommunicator: config.pipeline_dtype", config.pipeline_dtype)
    return config.pipeline_dtype, config.variable_seq_lengths or getattr(config, "mtp_standalone", False)


def map_shapes(shapes, make):
    """`make` of each shape, in the structure of a value. A shape is a sequence of integers, or None if exchanged."""
    return tree_map(make, shapes, is_leaf=is_shape)


def is_shape(value) -> bool:
    """Whether it is the shape of one tensor, rather than a list or a dict of shapes."""
    return isinstance(value, list | tuple) and all(isinstance(size, numbers.Integral) for size in value)


def check_shapes(what: str, shapes, exchanged: bool):
    """Raise ValueError or TypeError for what is no shape and no pytree of shapes. exchanged: None is one, too."""
    for shape in tree_leaves(shapes, is_leaf=is_shape):
        if not is_shape(shape) and not (shape is None and exchanged):
            raise TypeError(f"{what}: the shape {shape!r} of what is received must be a tuple of sizes")
        for size in shape or ():
            whole(f"{what}: a size of the shape {tuple(shape)}", size)


def _wrapped_as(sent, shapes):
    """`shapes` in a list if `sent` is one: Megatron takes a single tensor with a list of one shape, and the reverse."""
    if isinstance(sent, list) and (shapes is None or is_shape(shapes)):
        return [shapes]
    several = isinstance(shapes, list | tuple) and not is_shape(shapes)
    return shapes[0] if several and len(shapes) == 1 and not isinstance(sent, list) else shapes


def _header(tensor: torch.Tensor) -> list[int]:
    shape = tensor.shape
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"variable_seq_lengths: sends up to {MAX_DIMENSIONS} dimensions, not {tuple(shape)}")
    return [DTYPES.index(tensor.dtype), len(shape), *shape, *[0] * (MAX_DIMENSIONS - len(shape))]
