"""Mail: what arrives in a call, in which memory, how a program knows, and how all of it is reset.

Data arrives in one of two inboxes, which take turns (tkernels.comm.workspace says why two are enough); a word for each
chunk is set to the epoch once the chunk is there. But only the device knows the epoch, hence which inbox is next, and
the addresses of a copy by the copy engine must be known when it is enqueued. So copies go to a third inbox, the
*landing*, behind a *gate*, and a word for each rank counts the chunks that they have delivered (tkernels.comm.copies).

In each kernel the last program tells every peer that this rank has begun this call (`device.begin_call`), waits until
all peers have begun it too, and opens the gate (`begin_mail`). The same program does not end before the copies are done
(`end_mail`). So later work on the stream follows the copies, with no event between the two streams; an event would take
the host as long as a copy does.

Each rank chooses its sender independently. Its data has the same place and the same chunks in a peer's landing whether
the copy engine sends or programs do, and the peer polls for both. Programs that send to the landing also wait for all
peers first. Those that send the finished rows of an all-reduce, its second phase, need not: a finished tile has waited
for the partial sums of every peer in this call.

Why nothing lands on data that is still being read: the gate opens only once every peer has begun this call, and a peer
begins it after all earlier work on its stream has finished. Whatever lay in its landing was read by that work: by a
call, or by what followed the call on the stream. It makes no difference whether the earlier calls used the landing. The
argument also covers the first call, before which the landing was empty, and ranks without rows, which have a gate too.
The argument for two inboxes still holds: every rank receives a signal from every other.

Why no old data is taken for new: a rank's count of delivered chunks is zero when it begins a call. A peer writes a
larger count after the data, on one stream. By the end of the call the rank has waited for all counts that peers write,
so its last program to finish may reset them to zero. Peers write the next counts behind the gate of the next call,
which waits for this rank. A count, unlike an epoch, is known on the host, so a captured graph can hold it. One word for
each chunk, as puts have, would keep the stream for 0.75 us each, or cost the host another driver call (bench/LOG.md).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from tkernels.comm.device import arrived, await_peers, count, end_call, peers_of, put_signal, wait_signal
from tkernels.comm.marks import COLLECT, end_marks, mark

MAX_TILE_CHUNKS = tl.constexpr(8)  # most chunks of a tile, whose signals it checks in one poll
MAX_LOOK = tl.constexpr(256)  # signals that a program polls at once, one per thread


class Mail(NamedTuple):
    """What arrives in a call, and how a program knows.

    memory: where it arrives.  ready: signals [ranks, max_chunks] that a chunk is there once they are `epoch`.
    delivered: with L.LANDING, [ranks] chunks of each rank that copy engines have delivered.
    """

    memory: object
    ready: object
    delivered: object
    max_chunks: object
    epoch: object


# fmt: off
@triton.jit
def parity(epoch):
    """Which of two inboxes a call uses."""
    return epoch % 2


@triton.jit
def begin_mail(mail, gate, num_comm, net, L):
    """Every program's second call: if data goes to the landing, senders wait until all peers have begun this call too.

    The gate opens only then. Where programs send, the `num_comm` comm programs wait here, and interleaved programs wait
    before the first tile that they send.
    """
    pid = tl.program_id(0)
    if L.COPIED:
        if pid == tl.num_programs(0) - 1:
            await_peers(mail.epoch, net, L)
            count(gate, L, "sys")
    elif L.LANDING:
        if pid < num_comm:
            await_peers(mail.epoch, net, L)


@triton.jit
def second_phase(mail, memory, L):
    """The mail of what ranks send once they have what all of them sent first: it has words of its own."""
    return Mail(memory, mail.ready + phase_words(mail, L), mail.delivered + L.RANKS, mail.max_chunks, mail.epoch)


@triton.jit
def phase_words(mail, L):
    """From a chunk's signal in the first phase to the same chunk's in the second."""
    return L.RANKS * mail.max_chunks


@triton.jit
def chunk_word(mail, source, chunk):
    """The signal that a chunk of rank `source` is there; from L.RANKS on, of rank `source` - L.RANKS, second phase."""
    return mail.ready + source * mail.max_chunks + chunk


@triton.jit
def send_chunk(mail, dst, src, size, chunk, target, net, L, S):
    """`put_signal` of a chunk of this rank to `dst` in the memory of `target`. S: a NamedTuple with BLOCK and ALIGN."""
    put_signal(dst, src, size, chunk_word(mail, net.rank, chunk), mail.epoch, target, net, L, S.BLOCK, S.ALIGN)


@triton.jit
def wait_chunk(mail, source, chunk, net, L):
    """Wait for a chunk of `source`: for its signal, or for the copy engine to have delivered more than `chunk` chunks.

    Orders, ends: as `wait_signal`.
    Where this rank's copy engine sends, those of its peers mostly do: their word is polled more often; else the signal.
    """
    word = chunk_word(mail, source, chunk)
    if L.COPIED:
        wait_signal(mail.delivered + source, chunk + 1, source, chunk, net, L, word, mail.epoch)
    elif L.LANDING:
        wait_signal(word, mail.epoch, source, chunk, net, L, mail.delivered + source, chunk + 1)
    else:
        wait_signal(word, mail.epoch, source, chunk, net, L)


@triton.jit
def wait_chunks(mail, source, chunk, count, net, L, SOURCES: tl.constexpr):
    """Wait for `count` (at most MAX_TILE_CHUNKS) chunks from `chunk` on, of each of SOURCES ranks from `source` on.

    One poll of all of them comes first, of the words that are the likelier ones in `wait_chunk`; only if it fails are
    they waited for one by one.
    """
    lane = tl.arange(0, triton.next_power_of_2(SOURCES * MAX_TILE_CHUNKS))
    peer = (source + lane % SOURCES) % L.RANKS
    if L.COPIED:
        here = arrived(mail.delivered + peer, chunk + count, L)
    else:
        words = peer * mail.max_chunks + chunk + tl.minimum(lane // SOURCES, count - 1)
        here = arrived(mail.ready + words, mail.epoch, L)
    if not here:
        for step in range(SOURCES):
            late = (source + step) % L.RANKS
            for number in range(chunk, chunk + count):
                wait_chunk(mail, late, number, net, L)


@triton.jit
def words_of_peers(max_chunks, chunks, first, net, L):
    """Indices of the signal words of all peers' chunks, at most MAX_LOOK of them, beginning with chunk `first`."""
    lane = (first + tl.arange(0, MAX_LOOK)) % (chunks * (L.RANKS - 1))
    return (net.rank + 1 + lane // chunks) % L.RANKS * max_chunks + lane % chunks


@triton.jit
def all_arrived(mail, chunks, first, net, L):
    """Poll once whether `chunks` chunks of each peer have arrived, so that later tiles need not wait.

    May return False although they have.
    first: the chunk to begin with. It changes from tile to tile, so the words' indices are not kept in registers.
    """
    there = tl.full((), False, tl.int1)
    if L.COPIED:
        there = arrived(mail.delivered + peers_of(net, L), chunks, L)
    elif chunks * (L.RANKS - 1) <= MAX_LOOK:
        there = arrived(mail.ready + words_of_peers(mail.max_chunks, chunks, first, net, L), mail.epoch, L)
    return there


@triton.jit
def end_mail(mail, state, copied, counters, num_counters, call, net, L):
    """Every program's last call: `end_call`; the last program to arrive zeroes what must be zero between calls.

    With L.COPIED, the launch does not end before the copy engine has sent everything, or a wait has timed out.
    counters: None if this launch left them unchanged.
    """
    if L.COPIED:
        if tl.program_id(0) == tl.num_programs(0) - 1:
            mark(COLLECT, 0, net.rank, net, L)
            wait_signal(copied, 1, net.rank, 0, net, L)
    end_marks(net, L)
    if end_call(state, mail.epoch, call, net, L):
        if L.LANDING:
            word = tl.arange(0, triton.next_power_of_2(2 * L.RANKS))
            tl.store(mail.delivered + word, tl.zeros(word.shape, tl.int64), mask=word < 2 * L.RANKS)
        if counters is not None:
            if L.COPIED:
                if tl.load(copied) == 0:
                    num_counters = 0
            for first in range(0, num_counters, 256):
                at = first + tl.arange(0, 256)
                tl.store(counters + at, tl.full((256,), 0, tl.int64), mask=at < num_counters)
        if L.COPIED:
            tl.store(copied, tl.full((), 0, tl.int64))
# fmt: on
