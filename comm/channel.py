"""Channel: device-initiated messages from each rank to one peer, with a credit from the receiver for every slot.

A rank's inbox has `copies` slots. *Generation* n is the n-th slotful that a rank sends; it goes to slot
(n - 1) % copies of its peer. Progress is recorded in two words for each program, which only grow:

    full    in the receiver's memory, set by the sender: generation n is in its slot; one word for each slot, whose low
            bits are the form of what is there.
    free    in the sender's memory, set by the receiver: generation n has been copied out of its slot.

Why no slot is overwritten before it is read: the sender writes generation g only after all its `free` words are at
least g - copies, the generation that was last in that slot. The receiver raises them by a release, after its loads of
that generation.

Why the receiver reads what was sent: it copies generation g out only after all `full` words are at least g. Each
sending program raises its word by put_signal, after its own part of the data. The form in the word, dtype and number of
bytes, is compared with that of the receiver's tensor: it costs no message and no wait.

Each end counts generations in its own device memory; the last program of the kernel that moves the data advances the
count. Both ends count alike, since every message is the same number of generations for both. Nothing is ever reset, and
no generation is a launch argument, so replays of a captured graph continue the count. The parts that programs copy may
differ between generations and between the two ends, because a wait is always for all words.

A wait is a separate kernel of one program and one warp, launched before the kernel of several programs that copies. So
a kernel that waits for a peer occupies almost nothing of the GPU, and a kernel that occupies it never waits.

A message longer than a slot takes several generations. Growing the slots instead would be a collective in the middle of
a transfer between two ranks. A sender may be `copies` generations ahead of its receiver. On the simulated runtime the
caller waits while a launch runs, so a send beyond that blocks the caller until the peer receives. Two ranks that both
send first make progress as long as their messages fit into `copies` slots.
"""

import contextlib
import threading

import torch
import triton
import triton.language as tl

from tkernels.comm.arguments import LARGEST, check_dense, check_resolved, whole
from tkernels.comm.calls import form_of
from tkernels.comm.context import Context, as_context
from tkernels.comm.device import (
    Net,
    begin_epoch,
    check_form,
    copy,
    end_epoch,
    operation,
    put_signal,
    quiet,
    signal,
    wait_signal,
)
from tkernels.comm.errors import TkernelsError
from tkernels.comm.fence import Fence
from tkernels.comm.regions import ALIGNMENT, Regions, round_up

OP_SEND = operation("channel send")
OP_RECEIVE = operation("channel receive")

FORM_SHIFT = tl.constexpr(32)  # low bits of a `full` word, below its generation
FORM_MASK = tl.constexpr((1 << 32) - 1)
BLOCK_BYTES = 32 << 10  # what a program copies at a step
PROGRAMS = {"simulated": 2, "nvshmem": 8}
_WIDTHS = {16: torch.int32, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


# fmt: off
@triton.jit(do_not_specialize=["rank", "peer"])
def channel_wait_kernel(
    words, state,  # [ROWS, WORDS] here, raised by `peer`: a row for each slot, or one for all
    table, rank, peer,
    L, LAG: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, SHIFT: tl.constexpr,
):
    net = Net(table, rank)
    generation = begin_epoch(state) - LAG
    if ROWS > 1:
        words += (generation - 1) % ROWS * WORDS
    for index in range(WORDS):
        wait_signal(words + index, generation, peer, index, net, L, SHIFT=SHIFT)


@triton.jit
def share_of(num_elements, share, DTYPE: tl.constexpr, ALIGN: tl.constexpr):
    """First element and number of elements of this program's part, which may be empty; its start is aligned."""
    VECTOR: tl.constexpr = max(ALIGN * 8 // DTYPE.primitive_bitwidth, 1)
    first = tl.multiple_of(tl.cast(tl.program_id(0), tl.int64) * share, VECTOR)
    return first, tl.minimum(tl.maximum(num_elements - first, 0), share)


@triton.jit(do_not_specialize=["rank", "peer", "num_elements", "share", "form"])
def channel_send_kernel(
    data, slots, slot_stride,  # [num_elements], [SLOTS, slot_stride]
    full, state,  # [SLOTS, programs]
    table, rank, peer,
    num_elements, share, form,
    L, SLOTS: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):
    net = Net(table, rank)
    generation = begin_epoch(state)
    first, part = share_of(num_elements, share, data.dtype.element_ty, ALIGN)
    slot = slots + (generation - 1) % SLOTS * slot_stride
    word = full + (generation - 1) % SLOTS * tl.num_programs(0) + tl.program_id(0)
    raised = generation << FORM_SHIFT | tl.cast(form, tl.int64)
    put_signal(slot + first, data + first, part, word, raised, peer, net, L, BLOCK, ALIGN)
    quiet(L)  # work ordered after this kernel may overwrite the data
    end_epoch(state, generation)


@triton.jit(do_not_specialize=["rank", "peer", "num_elements", "share", "form"])
def channel_receive_kernel(
    data, slots, slot_stride,  # [num_elements], [SLOTS, slot_stride]
    full, free, state,  # [SLOTS, programs], [programs]
    table, rank, peer,
    num_elements, share, form,
    L, SLOTS: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):
    net = Net(table, rank)
    generation = begin_epoch(state)
    first, part = share_of(num_elements, share, data.dtype.element_ty, ALIGN)
    slot = slots + (generation - 1) % SLOTS * slot_stride
    word = tl.load(full + (generation - 1) % SLOTS * tl.num_programs(0) + tl.program_id(0))
    check_form(tl.cast(form, tl.int64), word & FORM_MASK, peer, tl.program_id(0), net, L)
    copy(data + first, slot + first, part, BLOCK, ALIGN)
    signal(free + tl.program_id(0), generation, peer, net, L)
    end_epoch(state, generation)
# fmt: on


class RemoteSignal:
    """A completion: all words that a peer raises have reached the next generation of one end of a channel, less `lag`.

    The generation is read on the device when the wait runs, so one object serves every turn and every replay.
    """

    captured = None  # the wait's kernel reads the current state when it runs, in a graph or outside

    def __init__(self, ctx: Context, dev, words, state, peer: int, lag: int, operation, shift: int = 0):
        """words: [programs], or [copies, programs], a row for each slot. shift: low bits that are no generation."""
        self.key = self
        self._ctx, self._dev, self._words, self._state = ctx, dev, words.view(-1, words.shape[-1]), state
        self._peer, self._lag, self._operation, self._shift = peer, lag, operation, shift

    def wait(self, stream):
        with self._dev.stream(stream):
            self._ctx.launch(
                channel_wait_kernel, 1, words=self._words, state=self._state, table=self._ctx.table,
                rank=self._ctx.rank, peer=self._peer, L=self._ctx.link(self._operation), LAG=self._lag,
                ROWS=len(self._words), WORDS=self._words.shape[1], SHIFT=self._shift, num_warps=1,
            )  # fmt: skip

    def query(self) -> bool:
        """Whether it is known to have happened; on a GPU always False, since reading would wait for a stream."""
        if self._ctx.device.type != "cpu":
            return False
        finished = int(self._state[0]) - self._lag
        return int(self._words[finished % len(self._words)].min()) >> self._shift > finished


class End:
    """One end of a channel. Its turns run one after the other, on whatever streams and from whatever threads.

    state: [generation, programs that have finished], on the device.
    gate: what the next turn waits for. `join` and `forget` are what a capture asks of it.
    """

    def __init__(self, device: torch.device, dev):
        self.state = torch.zeros(2, dtype=torch.int64, device=device)
        self.dev, self.gate, self._lock = dev, Fence(dev), threading.RLock()

    @contextlib.contextmanager
    def turn(self, signal: RemoteSignal):
        """One generation: on the current stream, after the end's previous one and after the peer's signal."""
        with self._lock:
            self.gate.add(signal)
            self.join()
            try:
                yield self.state
            finally:
                self.gate.record(self.dev.current_stream())

    def join(self, stream=None):
        """Order `stream` (None: the current one) after all turns so far, and clear the gate."""
        with self._lock:
            self.gate.wait(self.dev.current_stream() if stream is None else stream)
            self.gate.clear()

    def forget(self):
        """Be as if no turn had been taken, after a capture that failed."""
        self.gate.clear()


class Channel:
    """Collective. Connects every rank to the peer it sends to, `dst`, and the peer it receives from, `src`.

    dst, src: ranks of the context's group, or None for a rank without one. If a is b's source, b must be a's
        destination.
    slot_bytes: rounded up to 256. A longer message takes several slots in turn.
    copies: the number of slots, and of generations that a sender may be ahead of its receiver.
    num_programs: programs of the kernels that copy. Default: 8, or 2 simulated.

    Sends are received in the order in which they were made. Both ends run on the current stream. If one end is used
    from several streams, its turns run in the order in which they were launched. A receive of another size or dtype
    than was sent raises MismatchError, as a wait that has expired raises its error: on all ranks, and on GPUs later.

    Raises ValueError on every rank for a topology that doesn't match, MismatchError for other options that differ.
    """

    def __init__(
        self,
        ctx: Context,
        dst: int | None,
        src: int | None,
        *,
        slot_bytes: int,
        copies: int = 2,
        num_programs: int | None = None,
    ):
        ctx = as_context(ctx, "Channel: ctx")
        num_programs = PROGRAMS[ctx.runtime] if num_programs is None else num_programs
        options = {"slot_bytes": slot_bytes, "copies": copies, "num_programs": num_programs}
        dst, src, options = _check_options(ctx, dst, src, options)
        slot_bytes, copies, num_programs = options.values()
        self.ctx, self.dst, self.src, self.copies, self.num_programs = ctx, dst, src, copies, num_programs
        self.slot_bytes = round_up(slot_bytes, ALIGNMENT)
        plan = Regions(
            full=((copies, num_programs), torch.int64),
            free=((num_programs,), torch.int64),
            spare=((copies, num_programs), torch.int64),
            slots=((copies * self.slot_bytes,), torch.uint8),
        )
        self._memory = ctx.empty(plan.num_bytes, dtype=torch.uint8)
        self._full, self._free, self._slots = (plan.view(self._memory, name) for name in ("full", "free", "slots"))
        self._full.zero_()
        self._free.zero_()
        self._spare = plan.view(self._memory, "spare").fill_(1 << 62)  # far ahead of any generation
        self._loaded = set()
        dev = torch.get_device_module(ctx.device)
        self._sending, self._receiving = End(ctx.device, dev), End(ctx.device, dev)
        self.credit = RemoteSignal(ctx, dev, self._free, self._sending.state, dst, copies, OP_SEND)
        self.arrival = RemoteSignal(ctx, dev, self._full, self._receiving.state, src, 0, OP_RECEIVE, FORM_SHIFT.value)
        self._load(self._slots[:ALIGNMENT])
        ctx.group.barrier()  # no rank signals before every rank's words are zero

    @property
    def slots(self) -> tuple["End", "End"]:
        """The two ends, for the `slots` of `captured` around a CUDA graph that sends or receives."""
        return self._sending, self._receiving

    def send(self, tensor: torch.Tensor):
        """Send a contiguous tensor of any dtype to `dst`, on the current stream; later work there may overwrite it.

        Raises ValueError for a tensor that isn't contiguous or is on another device, or without a `dst`.
        """
        for part in self._parts(tensor, "send", self.dst):
            self._load(part)
            with self._sending.turn(self.credit) as state:
                form = form_of(tensor.dtype, part.numel())
                self._launch(channel_send_kernel, OP_SEND, part, state, self.dst, form, full=self._full)

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        """Receive the next message of `src` into a contiguous tensor of the size that was sent, on the current stream.

        Returns the tensor. It counts as written, so that a backward that has saved it is refused. Raises ValueError for
        a tensor that isn't contiguous or is on another device, or without a `src`.
        """
        for part in self._parts(tensor, "receive", self.src):
            with self._receiving.turn(self.arrival) as state:
                form = form_of(tensor.dtype, part.numel())
                words = {"full": self._full, "free": self._free}
                self._launch(channel_receive_kernel, OP_RECEIVE, part, state, self.src, form, **words)
        torch.autograd.graph.increment_version(tensor)
        return tensor

    def close(self):
        """Collective. Give the slots back, once all ranks have received what was sent to them. May be repeated.

        Does nothing once the context has been finalized. After a failure that its `check` raises it doesn't wait for
        the other ranks, which may be gone, and leaves the slots to the context; it raises what has not been raised yet.
        A rank without one waits as long as for a signal, and raises OutOfStepError.
        """
        memory, self._memory = self._memory, None
        if memory is not None and not self.ctx.closed:
            if self.ctx.failed:
                if not self.ctx.reported:
                    self.ctx.check()
                return
            self.ctx.group.barrier(limit_s=self.ctx.timeout_s)
            self.ctx.free(memory)

    def _parts(self, tensor: torch.Tensor, verb: str, peer: int | None):
        """The message as flat bytes, split into slotfuls."""
        if self._memory is None:
            raise TkernelsError("channel: it has been closed, and its slots are given back; make a new one")
        if peer is None:
            raise ValueError(f"channel: rank {self.ctx.rank} has no peer to {verb} to or from; it was made with None")
        check_dense("channel", tensor=tensor)
        check_resolved("channel", "tensor", tensor)
        if tensor.device != self.ctx.device:
            raise ValueError(f"channel: the tensor is on {tensor.device}, but the context works on {self.ctx.device}")
        if not tensor.is_contiguous():
            raise ValueError(
                f"channel: moves contiguous tensors, not one of strides {tensor.stride()}; pass a .contiguous() one"
            )
        return tensor.detach().view(-1).view(torch.uint8).split(self.slot_bytes) if tensor.numel() else ()

    def _load(self, part: torch.Tensor):
        """Launch the kernels as they would be for this part, but without data and without waiting, to load them.

        The driver loads a module only once running kernels have ended. If two ranks loaded one while a send or a
        receive of each waited for the other, they would deadlock.
        """
        ctx, dev, variant = self.ctx, self._sending.dev, (_alignment(part), part.data_ptr() % 16)
        if variant in self._loaded or ctx.device.type == "cpu":
            return
        state = torch.zeros(2, dtype=torch.int64, device=ctx.device)
        if not self._loaded:
            for words, lag, operation, shift in (
                (self._spare[0], self.copies, OP_SEND, 0), (self._spare, 0, OP_RECEIVE, FORM_SHIFT.value),
            ):  # fmt: skip
                RemoteSignal(ctx, dev, words, state, ctx.rank, lag, operation, shift).wait(dev.current_stream())
        full = self._spare
        self._launch(channel_send_kernel, OP_SEND, part, state, ctx.rank, 0, 0, full=full)
        self._launch(channel_receive_kernel, OP_RECEIVE, part, state, ctx.rank, 0, 0, full=full, free=full[0])
        self._loaded.add(variant)

    def _launch(self, kernel, operation, part: torch.Tensor, state, peer: int, form: int, num_bytes=None, **words):
        align = _alignment(part)
        itemsize = _WIDTHS[align].itemsize
        num_elements = (part.numel() if num_bytes is None else num_bytes) // itemsize
        share = round_up(-(-num_elements // self.num_programs), 16 // itemsize)
        self.ctx.launch(
            kernel, self.num_programs, data=part.view(_WIDTHS[align]), num_elements=num_elements, share=share,
            form=form, slots=self._slots.view(_WIDTHS[align]), slot_stride=self.slot_bytes // itemsize, state=state,
            **words, table=self.ctx.table, rank=self.ctx.rank, peer=peer, L=self.ctx.link(operation),
            SLOTS=self.copies,
            # Without alignment each element needs its own address and mask, so a step copies fewer.
            BLOCK=BLOCK_BYTES // 4 // (1 if align == 16 else 4), ALIGN=align, num_warps=8, maxnreg=128,
        )  # fmt: skip


def _alignment(part: torch.Tensor) -> int:
    """The largest of the widths 16, 8, 4, 2, 1 in bytes that divides the address and the size."""
    return next(width for width in _WIDTHS if (part.data_ptr() | part.numel()) % width == 0)


def _check_options(ctx: Context, dst, src, options: dict):
    """Collective. Returns dst, src and the options as ints.

    Raises the same error on every rank for bad options or a topology that doesn't match.
    """
    with ctx.group.checking():
        dst, src = (end if end is None else whole("channel: dst and src", end, -LARGEST) for end in (dst, src))
        options = {name: whole(f"channel: {name}", value, 1) for name, value in options.items()}
        ctx.check_resident(options["num_programs"])
    with ctx.group.during(lambda: ("channel", options)):
        ends = ctx.group.gather((dst, src))
    edges = {(rank, dst) for rank, (dst, _) in enumerate(ends) if dst is not None}
    expected = {(src, rank) for rank, (_, src) in enumerate(ends) if src is not None}
    wrong = edges ^ expected or {edge for edge in edges if edge[0] == edge[1] or edge[1] not in range(ctx.size)}
    if wrong:
        a, b = min(wrong)
        raise ValueError(
            f"channel: from rank {a} to rank {b} there must be dst={b} on rank {a} and src={a} on rank {b}, which "
            f"differ and are below {ctx.size}; dst and src by rank are {ends}"
        )
    return dst, src, options
