"""How a P2PCommunicator's messages travel: by device-initiated puts through channels, or by torch.distributed.

A transport has `send(edge, tensor)` and `receive(edge, tensor)`. They start a transfer on the current stream and return
its completion, or None if it completes in the order of that stream.

With channels, a receive on a GPU launches nothing before it is waited for or queried. The sender puts the message into
a slot meanwhile. A kernel that waited for the message would block the host: the CUDA driver loads a module (Triton's,
or that of a torch kernel that is used for the first time), and frees memory, only once the running kernels have ended
(seen with CUDA 13.0). Two ranks that each load something while a kernel waits for the other deadlock. NCCL's kernels do
run, and wait, from the moment the receive is posted: with NCCL, take the first steps without overlap_p2p_comm.
"""

import threading
import time
import weakref
from collections import deque

import torch
import torch.distributed as dist

from tkernels.comm.channel import Channel
from tkernels.comm.context import Context
from tkernels.comm.fence import EventCompletion, capturing
from tkernels.comm.group import Group
from tkernels.layers.lease import WorkCompletion

EDGES = ("send_next", "recv_prev", "send_prev", "recv_next")

# By default group, backend and ranks: groups of closed transports, for the next one. Once destroyed, torch would make
# others of the same name, whose ranks look for each other where the first ones were.
_idle = weakref.WeakKeyDictionary()


class ChannelTransport:
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
        self.ctx, self._late = ctx, {edge: deque() for edge in EDGES}
        self._lock = threading.RLock()  # handles may be waited for in autograd's threads

    def send(self, edge: str, tensor: torch.Tensor):
        if self.ctx.device.type == "cpu":
            return self._start(edge, tensor)
        self.channels[edge].send(tensor)

    def receive(self, edge: str, tensor: torch.Tensor):
        if self.ctx.device.type == "cpu":
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
        limit = time.monotonic() + self.ctx.timeout_s
        while transfer.parts:
            if self.progress():
                limit = time.monotonic() + self.ctx.timeout_s
            elif time.monotonic() < limit and not self.ctx.failed:
                time.sleep(1e-4)
            else:
                self.move(transfer.edge)


class _LateReceive:
    """A completion on GPUs: a receive that is launched when first needed, on the stream it was posted on."""

    def __init__(self, wire: ChannelTransport, edge: str, tensor: torch.Tensor):
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

    def __init__(self, wire: ChannelTransport, edge: str, tensor: torch.Tensor):
        self.key, self.edge, self._wire, self._tensor = self, edge, wire, tensor
        self.parts = deque(range(0, tensor.nbytes, wire.channels[edge].slot_bytes))

    def part(self) -> torch.Tensor:
        """The next slotful."""
        start, end = self.parts[0], self.parts[0] + self._wire.channels[self.edge].slot_bytes
        return self._tensor.view(-1)[start // self._tensor.itemsize : end // self._tensor.itemsize]

    def moved(self):
        self.parts.popleft()
        if not self.parts:
            self._tensor = None

    def wait(self, stream):
        self._wire.finish(self)

    def query(self) -> bool:
        self._wire.progress()
        return not self.parts


class TorchTransport:
    """Transfers by torch.distributed, with process groups of its own: NCCL's on GPUs, else gloo's.

    NCCL runs the sends and receives that a rank issues in one group in order. A receive that is posted early must never
    delay a send. So the edges of each direction are coloured such that no rank has two edges of one colour, and every
    colour of a direction has its own group.
    """

    def __init__(self, group: Group, device: torch.device, dev):
        ranks, world = group.global_ranks, dist.get_world_size()
        backend = dist.get_default_backend_for_device(device)
        if backend == "nccl" and len(ranks) < world and dist.group.WORLD.bound_device_id is not None:
            raise ValueError(
                f"P2PCommunicator: {len(ranks)} of {world} ranks can't make NCCL groups of their own after "
                f"init_process_group(device_id=...), which splits the communicator of all; leave device_id out"
            )
        self._rank, self._size, self._ranks, self._dev = group.rank, group.size, ranks, dev
        self._idle = _idle.setdefault(dist.group.WORLD, {}).setdefault((backend, *ranks), [])
        if self._idle:
            self._groups = [group() for group in self._idle.pop()]
            return
        group.count_groups_alike()
        self._groups = [
            dist.new_group(ranks, backend=backend, use_local_synchronization=len(ranks) < world)
            for _ in range(2 * (2 + self._size % 2))
        ]
        if backend == "nccl":
            self._connect(torch.zeros(1, device=device))

    def _connect(self, nothing: torch.Tensor):
        """Send a message along every edge, one group at a time; in a group each rank has at most one edge.

        NCCL connects two ranks at their first message, while both hosts wait. If both sent first, they would wait for
        each other; once connected, both may send first.
        """
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
        self._idle.append([weakref.ref(group) for group in self._groups])  # torch owns them
        self._groups = ()
