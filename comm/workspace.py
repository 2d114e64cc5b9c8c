"""The memory through which one stream's operations exchange data, and the protocol that lets calls reuse it.

A workspace belongs to one group and one stream. Every operation on it is one epoch: its kernels read the epoch from
device memory and signal with it, and the last program of the launch to finish advances it.

Why two inboxes are enough, with no barrier and no credit:

1. In every call every rank tells every peer that it has begun it, even for zero rows, and waits until every peer has
   (`device.begin_call`, `device.end_call`). Behind what only tells, ranks meet on the host (`Context.meeting`).
2. A rank sends the signals of call n + 1 only after its own call n has finished, since both run on one stream.
3. So once every peer has told a rank that it has begun call n + 1, every peer has finished call n. In call n + 2 the
   rank may overwrite what call n left in the peers' inboxes.

Calls alternate between the two inboxes by the parity of the epoch. The argument holds for any mix of operations and
sizes, if all ranks make their calls in the same order and both inboxes stay where they are. Growing moves them, and is
a collective of its own.

A CUDA graph keeps the memory that it was captured with. Growing after a capture leaves the inboxes, words and epoch to
the graph's replays and takes others for later calls. The two then act as separate workspaces, like those of two
streams, and neither sees the other's epochs. For that, all ranks must capture what one of them captures.

Growing during a capture involves no synchronization with other ranks: it takes memory that no call has ever used. The
words there have been zero on every rank since the context was made, so a peer that gets there first may signal at once.
The memory that was outgrown is given back when ranks next meet: when the workspace next grows outside of a capture.
"""

import logging
from typing import NamedTuple

import torch

from tkernels.comm import capture, contexts, runtime, stream_order
from tkernels.comm.calls import PreparedCalls
from tkernels.comm.errors import HeapExhaustedError, TkernelsError
from tkernels.comm.regions import ALIGNMENT, Regions, round_up

# Room for small calls is reserved from the first call on, so that a capture after a large call finds it there.
PACKET_BYTES = 256 << 10  # the most data that a rank sends a peer in a call as packets with their epoch
# Words of 4 bytes that a program sends as packets at a step: 16 bytes for each of 256 threads. The interpreter takes as
# long for four times as many.
PACKET_BLOCK = {"simulated": 4096, "nvshmem": 1024}[runtime.RUNTIME]
LAMPORT_BYTES = 4 << 20  # the most data that a rank receives in a call, also from itself, as packets that are numbers
MIN_CHUNKS = 128  # chunks of a rank's part: as many as the programs that share a part

_log = logging.getLogger("tkernels")


def inboxes_fit(heap_bytes: int, num_bytes: int, landing: bool) -> bool:
    """Whether the inboxes for a call that receives so many bytes take no more than three quarters of a heap.

    landing: there is one, not two that alternate, with slack between them.
    """
    return num_bytes * (1 if landing else 2.5) <= 0.75 * heap_bytes


def most_lamport_bytes(heap_bytes: int) -> int:
    """LAMPORT_BYTES, or a smaller power of two, so that three such inboxes take no more than a 32nd of the heap."""
    return min(LAMPORT_BYTES, 1 << (heap_bytes // 32 // 3).bit_length() >> 1)


class Room(NamedTuple):
    """The sizes of a workspace's symmetric memory; see Workspace for what each is of."""

    inbox_bytes: int = 0
    num_chunks: int = 0
    num_packets: int = 0
    num_lamport: int = 0
    landing_bytes: int = 0

    def regions(self, size: int) -> Regions:
        """The memory of one of `size` ranks. Signal words, which begin as zeros, come first."""
        return Regions(
            ready=((2 * size * self.num_chunks,), torch.int64),
            delivered=((2 * size,), torch.int64),
            begun=((size,), torch.int64),
            packets=((2 * self.num_packets,), torch.int64),
            lamport=((3 * self.num_lamport,), torch.int32),
            # The slack lets an operation start the second inbox at a multiple of its own row size.
            inbox=((2 * self.inbox_bytes + self.inbox_bytes // 2,), torch.uint8),
            landing=((self.landing_bytes,), torch.uint8),
        )


WORDS, INBOXES = ("ready", "delivered", "begun", "packets", "lamport"), ("inbox", "landing")


def most_packets(size: int) -> int:
    """The most packets with their epoch that a call of `size` ranks needs room for."""
    return size * PACKET_BYTES // 4


class Workspace:
    """The symmetric inboxes and signal words, and the local scratch, of one (context, stream).

    inbox: uint8 [2 * inbox_bytes + slack], symmetric; the second inbox begins at or after byte `inbox_bytes`.
    ready: int64 [2 * size * num_chunks], symmetric; word (phase, source, chunk) holds the epoch in which that chunk
        last arrived.
    landing: uint8 [landing_bytes], symmetric: the single inbox that the copy engine can write into
        (tkernels.comm.mail).
    delivered: int64 [2 * size], symmetric, zero between calls: word (phase, source) counts the chunks of this call that
        a copy engine has delivered.
    begun: int64 [size], symmetric: for each rank, the epoch of the last call that it has begun, and in the low
        CALL_BITS bits which call that is (tkernels.comm.calls).
    table: the context's, with the address of `begun`.
    packets: int64 [2 * num_packets], symmetric, one half for each parity; words that carry their epoch (`put_packets`).
        The memory never holds anything but packets of older epochs or its initial zeros; every new epoch differs from
        both.
    lamport: int32 [3 * num_lamport], symmetric, for packets that are numbers. The calls that use it take its thirds in
        turn: call t receives in third t % 3, and zeroes the third that call t - 1 used. Peers write there again in call
        t + 2, and by then have received this rank's packets of call t + 1, which it sent after its call t.
    state: int64 [4], local: the epoch of the last finished call, the number of this call's programs that have finished,
        the number of calls that used `lamport`, and the number of words that the last of these used.
    counters: int64 [num_counters], local, zero between calls: for programs of one launch among themselves.
    gates: two of int64 [1], local: 1 while a call's copies may begin. The first is for copies outside of CUDA graphs,
        the second for those that a CUDA graph holds.
    copied: int64 [1], local: 1 once a call's copies are done, 0 again at its end.
    scratch: uint8, local: what a call of the plain path makes on the way, where that is little.
    """

    @capture.lasting()
    def __init__(self, context):
        self.context = context
        self._streams, self._lanes = None, {}
        self._wanted = 0  # bytes, for all that there was and what was asked for
        self._told = False  # that the heap is too small for all calls
        self._calls = PreparedCalls()  # with views of the current memory
        # CUDA graphs read what captured calls hold: schedules, and local memory that later calls may have outgrown.
        self._captured_calls = set()  # of the current memory
        self._kept = []  # captured calls of earlier memory; and local memory made on other streams, not to be reused
        self._outgrown = []  # symmetric memory that no graph uses, but that peers may still read
        self._use(Room(), None)
        self.state, self.gates, self.copied = self._make_words()
        self.counters, self.scratch = self._make(torch.zeros, 0), self._make(torch.empty, 0, torch.uint8)

    @capture.lasting()
    def reserve(self, *, scratch_bytes: int = 0, num_counters: int = 0, **room: int) -> "Workspace":
        """Make room for at least this much; room: by the names of `Room`.

        Collective if that grows, so all ranks must ask for the same; MismatchError if one has enough (`meeting`). Where
        the heap can't hold both what is asked for and what is there for other calls, that is given up, with a warning.
        """
        asked = Room(**room)
        if any(more > has for more, has in zip(asked, self.room, strict=True)):
            least = Room(*map(max, asked, Room(0, MIN_CHUNKS, *self._least_packets())))
            needed = Room(*map(max, least, self.room))
            grown = ("inbox_bytes", "num_chunks", "landing_bytes")
            ahead = {name: self._ahead(getattr(needed, name), getattr(self.room, name)) for name in grown}
            self._wanted = needed.regions(self.context.size).num_bytes
            with self.context.meeting(self):
                self._grow_to_one_of(needed._replace(**ahead), needed, least)
        if scratch_bytes > self.scratch.numel():
            num_bytes = self._ahead(scratch_bytes, self.scratch.numel())
            self.scratch = self._make(torch.empty, round_up(num_bytes, ALIGNMENT), torch.uint8)
            self.forget_calls()
        if num_counters > self.counters.numel():
            self.counters = self._make(torch.zeros, num_counters)
            self.forget_calls()
        return self

    def settled(self, prepare):
        """What prepare() returns; again, if the workspace grew meanwhile, under what had been prepared by then.

        Collective if that grows. Raises HeapExhaustedError where the heap can't hold all of it at once.
        """
        for _ in range(3):
            table = self.table
            prepared = prepare()
            if self.table is table:
                return prepared
        heap = self.context.heap
        raise HeapExhaustedError(self._wanted, heap.num_bytes - heap.held_bytes, heap.num_bytes, (self._memory.nbytes,))

    @property
    def nbytes(self) -> int:
        """Bytes of its current memory: the symmetric memory, the scratch and the counters."""
        return sum(each.nbytes for each in (self._memory, self.scratch, self.counters) if each is not None)

    def words(self) -> dict[str, torch.Tensor | int]:
        """What a call's kernel reads and writes there besides data, by the names of its arguments."""
        names = "table", "state", "counters", "ready", "copied", "delivered"
        words = {name: getattr(self, name) for name in names}
        # Captured calls that the copy engine sends are given another gate.
        return words | {"rank": self.context.rank, "max_chunks": self.num_chunks, "gate": self.gates[0]}

    def prepared(self, *key_and_prepare):
        """What `PreparedCalls.find` finds or prepares; it is kept for a graph that is being captured.

        If the workspace grows meanwhile, all that was prepared before is lost.
        """
        if not self.context.capturing:
            return self._calls.find(*key_and_prepare)
        with capture.permitted():
            found = self._calls.find(*key_and_prepare)
        self._captured_calls.add(found)
        return found

    def forget_calls(self):
        self._calls.clear()

    def streams(self):
        """The current stream, and a side stream for the copies of its calls."""
        current = self.context.current_stream()
        if self._streams is None or self._streams[0].cuda_stream != current:
            # torch.cuda.current_stream takes as long as a call of the driver does, so its result is kept.
            here = torch.cuda.current_stream(self.context.device)
            side = here if self._streams is None else self._streams[1]
            while side == here:  # torch hands out streams from a small pool, in turn
                side = torch.cuda.Stream(self.context.device)
            self._streams = here, side
        return self._streams

    def lanes(self) -> "tuple[torch.cuda.Stream, torch.cuda.Stream]":
        """Two streams for what a call does beside its kernels: one more, and one of high priority.

        A call that launches a kernel of this workspace there has it begin behind all earlier work of the current
        stream, and end before the later one. A CUDA graph is captured with streams of its own, since cuBLAS keeps
        memory for each stream, which a graph would go on using.
        """
        captured = self.context.capturing
        if captured not in self._lanes:
            here, copies = self.streams()
            ahead, beside = torch.cuda.Stream(self.context.device, priority=-1), here
            while beside in (here, copies):  # torch hands out streams from a small pool, in turn
                beside = torch.cuda.Stream(self.context.device)
            self._lanes[captured] = beside, ahead
        return self._lanes[captured]

    def _least_packets(self) -> tuple[int, int]:
        """The least num_packets and num_lamport; no packets if they would take more than a 32nd of the heap."""
        most = most_packets(self.context.size)
        fits = 2 * 8 * most <= self.context.heap.num_bytes // 32
        return most if fits else 0, self.context.lamport_bytes // 4

    def _ahead(self, needed: int, held: int) -> int:
        """The size to grow to: half as much again as held, so that calls of one more row each time rarely outgrow it.

        The half is at most a 32nd of the heap. During a capture, which takes unused memory, it is just what is needed.
        """
        if needed <= held or self.context.capturing:
            return needed
        return max(needed, held + min(held // 2, self.context.heap.num_bytes // 32))

    def _make(self, make, number: int, dtype=torch.int64) -> torch.Tensor:
        """make(number), with torch.zeros or torch.empty, on the context's device; ready at once, also in a capture."""
        with capture.uncaptured():
            made = make(number, dtype=dtype, device=self.context.device)
        if self.context.capturing:
            self._kept.append(made)
        return made

    def _make_words(self) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """A new state, gates and copied; each aligned to 16 bytes, as kernels expect."""
        state, *gates, copied = (self._make(torch.zeros, number) for number in (4, 1, 1, 1))
        return state, gates, copied

    def _use(self, room: Room, memory: torch.Tensor | None):
        """Let the attributes be the sizes, and views of the memory."""
        self.room, self._memory, self.table = room, memory, None
        regions = room.regions(self.context.size)
        for name in (*WORDS, *INBOXES):
            setattr(self, name, None if memory is None else regions.view(memory, name))
        for name, value in room._asdict().items():
            setattr(self, name, value)

    def _grow_to_one_of(self, *rooms: Room):
        """Grow to the first that the heap can hold. The last has no room for other calls than the one that asks."""
        heap, given_back = self.context.heap, (self._memory, *self._outgrown)
        others = heap.held_bytes - heap.reserved_bytes - sum(each.nbytes for each in given_back if each is not None)
        for room in rooms:
            last = room is rooms[-1]
            if not last and others + room.regions(self.context.size).num_bytes > heap.num_bytes:
                continue
            try:
                self._grow(room)
                break
            except HeapExhaustedError:
                if last:
                    raise
        if last and rooms[-1] != rooms[-2] and not self._told:
            self._told = True
            _log.warning(
                "a heap of %d bytes can't hold the inboxes of all calls at once; each takes the others' memory, and "
                "the ranks meet each time; pass init(heap_bytes=...)", heap.num_bytes,
            )  # fmt: skip

    def _grow(self, room: Room):
        inbox_bytes, landing_bytes = round_up(room.inbox_bytes, ALIGNMENT), round_up(room.landing_bytes, ALIGNMENT)
        room = room._replace(inbox_bytes=inbox_bytes, landing_bytes=landing_bytes)
        num_bytes = room.regions(self.context.size).num_bytes
        self.forget_calls()
        words = self._make_words()
        memory = self._untouched(num_bytes) if self.context.capturing else self._replaced(num_bytes)
        self.state, self.gates, self.copied = words
        self._kept += self._captured_calls
        self._captured_calls = set()
        self._use(room, memory)
        self.table = self.context.make_table(self.begun)
        if not self.context.capturing:
            for name in WORDS:
                getattr(self, name).zero_()
            self.context.group.barrier()  # no rank signals before every rank's words are zero

    def _replaced(self, num_bytes: int) -> torch.Tensor:
        """Collective. New memory; the old is given back unless a graph of any rank still uses it."""
        heap, group = self.context.heap, self.context.group
        captured = any(group.barrier(bool(self._captured_calls)))  # behind it no rank reads or writes the old inboxes
        while self._outgrown:
            heap.free(self._outgrown.pop())
        if self._memory is not None and not captured:
            heap.free(self._memory)
            # If the heap has no room below, the next call must not use the freed memory as its inboxes.
            self._use(Room(), None)
        return heap.empty(num_bytes, dtype=torch.uint8)

    def _untouched(self, num_bytes: int) -> torch.Tensor:
        """Memory for a call that is being captured; the old memory stays as it is."""
        memory = self.context.heap.untouched(num_bytes)
        if memory is None:
            raise TkernelsError(
                f"this call needs a workspace of {num_bytes} bytes, and while a CUDA graph is captured it takes only "
                f"memory that no call has used before, of which there is less; make one call with the same sizes "
                f"before the capture, or pass init(heap_bytes=...) more than {self.context.heap.num_bytes}"
            )
        if self._memory is not None and not self._captured_calls:
            self._outgrown.append(self._memory)
        return memory


class Inbox(NamedTuple):
    """Where rows of peers arrive in calls of one kind, in a workspace that has room for them.

    matrix: [stride + rows, columns], both of the inboxes that alternate, or the landing.
    stride: row at which the second inbox begins; 0: there is only the landing.
    behind: what lies behind the rows of the first inbox, and behind those of the second, in fp32.
    """

    workspace: Workspace
    matrix: torch.Tensor
    stride: int
    behind: torch.Tensor

    @classmethod
    def of(
        cls, ctx, landing: bool, chunks: int, rows: int, columns: int, dtype, numbers: int = 0, least: int = 0
    ) -> "Inbox":  # fmt: skip
        """numbers: so many of fp32 lie behind the rows. least: bytes that the inboxes have room for in any case."""
        row_bytes = columns * dtype.itemsize
        num_bytes = max(rows, 4) * row_bytes + 4 * numbers
        if landing:
            workspace = ctx.workspace().reserve(inbox_bytes=least, num_chunks=chunks, landing_bytes=num_bytes)
            memory, stride = workspace.landing, 0
        else:
            workspace = ctx.workspace().reserve(inbox_bytes=max(least, num_bytes), num_chunks=chunks)
            # The second inbox begins at the first whole row past the first one's bytes, and at an even one: finished
            # rows may be fp32, and two 16-bit rows are whole fp32 words.
            memory, stride = workspace.inbox, -(-workspace.inbox_bytes // row_bytes)
            stride += stride % 2
        end = (stride + rows) * row_bytes
        matrix = memory[:end].view(dtype).view(-1, columns)
        behind = memory[rows * row_bytes : end + 4 * numbers] if numbers else memory[:0]
        return cls(workspace, matrix, stride, behind.view(torch.float32))


class Workspaces(dict):
    """The workspaces of a context, by stream.

    A CUDA graph is usually captured on a separate stream. Under capture, a stream without a workspace borrows the
    workspace of the default stream, or the only one there is: that stream made the calls before, and will replay the
    graph. Another stream in the same capture gets its own workspace, since the two may run at the same time. So does
    the lender, which the capture may reach last.
    """

    _lender = _borrower = None  # streams: the borrower was captured with the lender's workspace

    def current(self, context) -> Workspace:
        """The current stream's workspace, created at first use.

        Orders the stream behind this process's latest operation on another one (tkernels.comm.stream_order).
        """
        stream = context.current_stream()
        workspace = self.get(stream)
        if workspace is None or stream == self._lender:
            workspace = self._find(context, stream)
        if stream != stream_order.latest and context.size > 1:
            stream_order.follow(stream, contexts.programs_at_once())
        return workspace

    def _find(self, context, stream: int) -> Workspace:
        if stream not in self:
            if self and context.capturing and self._lends(stream):
                return self[self._lender]
            self[stream] = Workspace(context)
        elif stream and self._lent(context):  # the default stream can't be captured
            self[self._borrower] = self[stream]
            self[stream] = Workspace(context)
        return self[stream]

    def _lent(self, context) -> bool:
        """Whether the capture that has reached the lender's stream uses the lender's workspace already."""
        return self._borrower not in self and context.capturing and capture.taken(self._borrower)

    def _lends(self, borrower: int) -> bool:
        """Whether a captured stream without a workspace may borrow that of `_lender`, which is determined here."""
        if borrower == self._borrower and (self._lender == 0 or 0 not in self):
            return not capture.taken(self._lender)
        lender = 0 if 0 in self else next(iter(self))
        another = borrower != self._borrower and capture.taken(self._borrower)
        if (lender and len(self) > 1) or capture.taken(lender) or another:
            return False
        self._lender, self._borrower = lender, borrower
        return True
