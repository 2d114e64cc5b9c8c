"""The memory that one stream's operations exchange data through, and the protocol that lets calls reuse it.

A workspace belongs to one group and one stream. Every operation on it is one epoch: its kernels read the epoch from
device memory, signal with it, and the last program of the launch advances it.

Why two inboxes are enough, with no barrier and no credit: in every call every rank signals every peer at least once,
zero rows included, and every rank waits for at least one signal of each peer. A rank sends the signals of call n + 1
after its own call n has finished (same stream). So whoever has heard from everyone in call n + 1 knows that everyone
has finished call n, and may overwrite in call n + 2 what call n left in the peers' inboxes. Calls alternate between
two inboxes by the parity of the epoch. The argument holds for calls in one order on all ranks, of any mix of
operations and sizes, as long as both inboxes stay where they are: growing moves them and is a collective of its own.

A CUDA graph goes on with what it was captured with: growing then leaves inboxes, words and epoch to its replays and
takes others for later calls. Both are workspaces in their own right, as those of two streams are; neither sees the
other's epochs. For that, all ranks must capture what one of them does.

Growing under a capture meets nobody: it takes memory that no call has ever used. Its words are zero on every rank since
the context was made, so a peer that comes earlier may signal at once. What it outgrows is given back where ranks meet
next, when one grows outside of captures.
"""

import torch

from tkernels.comm import capture
from tkernels.comm.errors import HeapExhaustedError, TkernelsError
from tkernels.comm.plans import Plans
from tkernels.comm.regions import ALIGNMENT, Regions, round_up

# What small calls need is there from the first call on, so that a capture after a large one finds it.
PACKET_BYTES = 256 << 10  # that a rank sends a peer as packets with their epoch
PACKET_BLOCK = 1024  # words of 4 bytes that a program sends as packets at a step: 16 bytes for each of 256 threads
LAMPORT_BYTES = 4 << 20  # that a rank receives, itself included, in a call as packets that are numbers
MIN_CHUNKS = 64  # of a rank's part: as many as programs share one


def most_lamport_bytes(heap_bytes: int) -> int:
    """LAMPORT_BYTES, or less, so that the room for three inboxes of them is no more than a 32nd of the heap."""
    return min(LAMPORT_BYTES, 1 << (heap_bytes // 32 // 3).bit_length() >> 1)


def most_packets(size: int) -> int:
    """With their epoch, that a call of `size` ranks needs room for, at most."""
    return size * PACKET_BYTES // 4


class Workspace:
    """Symmetric inboxes and signal words, and local scratch, of one (context, stream).

    inbox: uint8 [2 * inbox_bytes + slack], symmetric; the second inbox begins at or after byte `inbox_bytes`.
    ready: int64 [2 * size * num_chunks], symmetric; word (phase, source, chunk) holds the epoch that has arrived.
    landing: uint8 [landing_bytes], symmetric: the one inbox that copies can go to (tkernels.comm.copies).
    landed: int64 [2 * size], symmetric, zero between calls: word (phase, source) counts the chunks that copies of this
        call have brought.
    begun: int64 [size], symmetric: the epoch of the last call that used the landing that each rank has come to.
    packets: int64 [2 * num_packets], symmetric, one half for each parity; words that carry their epoch (`put_packets`).
        Nothing else is ever there: older epochs, or the zeros that it began with, from which all epochs differ.
    lamport: int32 [3 * num_lamport], symmetric, for packets that are numbers: a third for each call of the kind, in
        turns. A call sets to zero what the one before has left. Nobody writes there before the next call but one of
        the kind, and by then has heard from this rank in the next one.
    state: int64 [4], local: the epoch of the last finished call, how many programs of this one have finished, how many
        calls used `lamport`, and how many words the last one of them.
    counters: int64 [num_counters], local, zero between calls: for programs of one launch among themselves.
    gates: two of int64 [1], local: 1 while the copies of a call may begin, or those that a CUDA graph holds.
    copied: int64 [1], local: 1 once a call's copies are done, 0 again at its end.
    scratch: uint8, local: what a call of the plain path has in between.
    """

    @capture.lasting()
    def __init__(self, context):
        self.context = context
        self._streams = None
        self._plans = Plans()  # of operations, with views of this memory as it is now
        # A CUDA graph reads what these hold: schedules, and local memory that calls since may have outgrown.
        self._captured_plans = set()  # of this memory as it is now
        self._outgrown_plans = set()
        self._made_beside = []  # local memory of other streams, to which the allocator must not hand it on
        self._outgrown = []  # symmetric memory that no graph goes on with, and that peers may still read
        self._forget_memory()
        self.state, self.counters = self._make(torch.zeros, 4), self._make(torch.zeros, 0)
        self.gates, self.copied = self._make_gates(), self._make(torch.zeros, 1)
        self.scratch = self._make(torch.empty, 0, torch.uint8)

    @capture.lasting()
    def reserve(
        self,
        inbox_bytes: int,
        num_chunks: int,
        scratch_bytes: int = 0,
        num_counters: int = 0,
        num_packets: int = 0,
        num_lamport: int = 0,
        landing_bytes: int = 0,
    ) -> "Workspace":
        """Make room; collective where it grows, so all ranks must ask for the same."""
        asked = (inbox_bytes, num_chunks, num_packets, num_lamport, landing_bytes)
        held = (self.inbox_bytes, self.num_chunks, self.num_packets, self.num_lamport, self.landing_bytes)
        if any(more > has for more, has in zip(asked, held, strict=True)):
            needed = tuple(map(max, asked, held, (0, MIN_CHUNKS, *self._least_packets(), 0)))
            inbox, chunks, packets, lamport, landing = needed
            ahead = self._ahead
            try:
                self._grow(ahead(inbox, held[0]), ahead(chunks, held[1]), packets, lamport, ahead(landing, held[4]))
            except HeapExhaustedError:
                self._grow(*needed)
        if scratch_bytes > self.scratch.numel():
            num_bytes = self._ahead(scratch_bytes, self.scratch.numel())
            self.scratch = self._make(torch.empty, round_up(num_bytes, ALIGNMENT), torch.uint8)
            self.forget_plans()
        if num_counters > self.counters.numel():
            self.counters = self._make(torch.zeros, num_counters)
            self.forget_plans()
        return self

    @property
    def nbytes(self) -> int:
        """Of all that it holds now, symmetric and local."""
        return sum(each.nbytes for each in (self._memory, self.scratch, self.counters) if each is not None)

    def plan(self, key, make):
        """The plan of that key, made by `make()` unless it is known. What `make` reserves may forget the others."""
        if not self.context.capturing:
            return self._plans.find(key, make)
        with capture.permitted():
            plan = self._plans.find(key, make)
        self._captured_plans.add(plan)
        return plan

    def known_plan(self, key):
        """The plan of that key, or None."""
        plan = self._plans.get(key)
        if plan is not None and self.context.capturing:
            self._captured_plans.add(plan)
        return plan

    def forget_plans(self, *which):
        self._plans.clear(*which)

    def streams(self):
        """The current stream, and one for the copies of calls on it."""
        current = self.context.current_stream()
        if self._streams is None or self._streams[0].cuda_stream != current:
            # torch takes as long to say this as a call of the driver does, so it is asked once.
            here = torch.cuda.current_stream(self.context.device)
            side = here if self._streams is None else self._streams[1]
            while side == here:  # torch hands out few streams, in turns
                side = torch.cuda.Stream(self.context.device)
            self._streams = here, side
        return self._streams

    def _least_packets(self) -> tuple[int, int]:
        """num_packets and num_lamport of any call, but no packets where they took more than a 32nd of the heap."""
        most = most_packets(self.context.size)
        fits = 2 * 8 * most <= self.context.heap.num_bytes // 32
        return most if fits else 0, self.context.lamport_bytes // 4

    def _ahead(self, needed: int, held: int) -> int:
        """Where more than was held is needed, half as much again: calls of one row more each time rarely outgrow it.

        No more than a 32nd of the heap; and not under a capture, which takes memory that no call has used.
        """
        if needed <= held or self.context.capturing:
            return needed
        return max(needed, held + min(held // 2, self.context.heap.num_bytes // 32))

    def _make(self, make, number: int, dtype=torch.int64) -> torch.Tensor:
        """make(number), torch.zeros or torch.empty, of this context's device; ready at once, under a capture too."""
        with capture.beside():
            made = make(number, dtype=dtype, device=self.context.device)
        if self.context.capturing:
            self._made_beside.append(made)
        return made

    def _make_gates(self) -> list[torch.Tensor]:
        return [self._make(torch.zeros, 1) for _ in range(2)]  # each a multiple of 16 bytes, as kernels expect

    def _forget_memory(self):
        self.inbox_bytes = self.num_chunks = self.num_packets = self.num_lamport = self.landing_bytes = 0
        self.inbox = self.ready = self.packets = self.lamport = self.landing = self.begun = self.landed = None
        self._memory = None

    def _grow(self, inbox_bytes: int, num_chunks: int, num_packets: int, num_lamport: int, landing_bytes: int):
        size = self.context.size
        inbox_bytes, landing_bytes = round_up(inbox_bytes, ALIGNMENT), round_up(landing_bytes, ALIGNMENT)
        # The slack lets an operation begin the second inbox at a multiple of its own row.
        plan = Regions(
            ready=((2 * size * num_chunks,), torch.int64),
            landed=((2 * size,), torch.int64),
            begun=((size,), torch.int64),
            packets=((2 * num_packets,), torch.int64),
            lamport=((3 * num_lamport,), torch.int32),
            inbox=((2 * inbox_bytes + inbox_bytes // 2,), torch.uint8),
            landing=((landing_bytes,), torch.uint8),
        )
        self.forget_plans()
        state, gates, copied = self._make(torch.zeros, 4), self._make_gates(), self._make(torch.zeros, 1)
        self._memory = self._untouched(plan.num_bytes) if self.context.capturing else self._replaced(plan.num_bytes)
        self.state, self.gates, self.copied = state, gates, copied
        self._outgrown_plans |= self._captured_plans
        self._captured_plans = set()
        for name in ("ready", "landed", "begun", "packets", "lamport", "inbox", "landing"):
            setattr(self, name, plan.view(self._memory, name))
        self.inbox_bytes, self.num_chunks, self.landing_bytes = inbox_bytes, num_chunks, landing_bytes
        self.num_packets, self.num_lamport = num_packets, num_lamport
        if not self.context.capturing:
            for words in (self.ready, self.landed, self.begun, self.packets, self.lamport):
                words.zero_()
            self.context.group.barrier()  # nobody signals before every rank's words are zero

    def _replaced(self, num_bytes: int) -> torch.Tensor:
        """Memory in place of what there was, which is given back unless a graph goes on with it."""
        heap, group = self.context.heap, self.context.group
        captured = any(group.gather(bool(self._captured_plans)))
        group.barrier()  # nobody still reads or writes the old inboxes
        while self._outgrown:
            heap.free(self._outgrown.pop())
        if self._memory is not None and not captured:
            heap.free(self._memory)
            # Should the heap have no room below, the next call must not take what is free again for inboxes.
            self._forget_memory()
        return heap.empty(num_bytes, dtype=torch.uint8)

    def _untouched(self, num_bytes: int) -> torch.Tensor:
        """Memory for a call that is captured, while what there was stays as it is."""
        memory = self.context.heap.untouched(num_bytes)
        if memory is None:
            raise TkernelsError(
                f"this call needs a workspace of {num_bytes} bytes, and while a CUDA graph is captured it takes only "
                f"memory that no call has used before, of which there is less; make one call with the same sizes "
                f"before the capture, or pass init(heap_bytes=...) more than {self.context.heap.num_bytes}"
            )
        if self._memory is not None and not self._captured_plans:
            self._outgrown.append(self._memory)
        return memory
