"""Four systems in small, each in forms that were shipped and are wrong, in forms that wait too much, and in ours.

A form issues one trace on a simulator and returns what each result must be. `races` are the pairs of kernels that
nothing orders. `overlap` names two kernels and the stream that is held up: the first has to run before the second all
the same, or the form has serialised what it was to overlap.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from streams import Simulator

from tkernels.layers.lease import Keepalive, Lease, Slot

Expected = list[tuple[torch.Tensor, list[float]]]


@dataclass(frozen=True)
class Form:
    """right: whether both checks must pass. overlap: (earlier, later, the starved stream)."""

    system: str
    name: str
    issue: Callable[[Simulator], Expected]
    races: tuple[tuple[str, str], ...] = ()
    serialises: bool = False
    overlap: tuple[str, str, str] = ("", "", "")

    @property
    def right(self) -> bool:
        return not self.races and not self.serialises

    def __str__(self):
        return f"{self.system}: {self.name}"


def reduce(source: torch.Tensor, result: torch.Tensor):
    """A collective: it reads a bucket and leaves the sum of all ranks, here of two equal ones."""
    torch.mul(source, 2, out=result)


# A pipeline's send and the free of its output: compute makes an output, `comm` sends it, the next compute takes fresh
# memory of the same size.

MICROBATCHES = 3
NUMEL = 256  # more than the allocator's granule, so that the block of a swapped-in torch.empty(1) is another one


def pipeline(send: Callable) -> Callable[[Simulator], Expected]:
    """send(sim, comm, output, launch) orders, launches and frees; if it returns anything, that is called after the next
    compute.
    """

    def issue(sim):
        inbox = torch.zeros(MICROBATCHES, NUMEL)
        with sim:
            comm, after = sim.Stream("comm"), None
            for k in range(MICROBATCHES):
                with sim.label(f"compute {k}"):
                    output = torch.full((NUMEL,), k + 1.0)
                if after is not None:
                    after()

                def launch(source, k=k):
                    sim.launch(f"send {k}", lambda s, t: t.copy_(s), reads=[source], writes=[inbox[k]], stream=comm)

                after = send(sim, comm, output, launch)
                del output
        return [(inbox[k], [k + 1.0] * NUMEL) for k in range(MICROBATCHES)]

    return issue


def free_before_wait(sim, comm, output, launch):
    comm.wait_stream(sim.current_stream())
    launch(output)
    sent, main = comm.record_event(), sim.current_stream()
    output.data = torch.empty(1)
    return lambda: main.wait_event(sent)


def wait_at_once(sim, comm, output, launch):
    free_before_wait(sim, comm, output, launch)()


def stash_the_tensor(stash):
    """What a list of tensors keeps is the tensor, whose storage has been swapped."""

    def send(sim, comm, output, launch):
        stash.append(output)
        return free_before_wait(sim, comm, output, launch)

    return send


def leased_sends():
    keepalive = Keepalive()

    def send(sim, comm, output, launch):
        keepalive.drain(keep=1)
        lease = Lease(output, dev=sim)
        with lease.write():
            pass
        with lease.read(comm):
            launch(lease.tensor)
        output.data = torch.empty(1)
        keepalive.defer(lease)

    return send


PIPELINE_OVERLAP = ("compute 1", "send 0", "comm")
SENDS = [
    Form(
        "pipeline",
        "freed before the wait",
        pipeline(free_before_wait),
        races=(("send 0", "compute 1"), ("send 1", "compute 2")),
    ),
    Form(
        "pipeline",
        "the tensor is stashed, not its storage",
        lambda sim: pipeline(stash_the_tensor([]))(sim),
        races=(("send 0", "compute 1"), ("send 1", "compute 2")),
    ),
    Form("pipeline", "waits at once", pipeline(wait_at_once), serialises=True, overlap=PIPELINE_OVERLAP),
    Form("pipeline", "leases", lambda sim: pipeline(leased_sends())(sim), overlap=PIPELINE_OVERLAP),
]


# A pool of two gradient buffers: each unit's gradients are copied into one, by one or two streams, and `comm` reduces
# it into the unit's shard.

UNITS = 4


def pool(protocol: Callable, num_writers: int = 1) -> Callable[[Simulator], Expected]:
    """protocol(sim, comm, buffers) -> fill(k, stream, write), called for each writer of unit k, and then
    send(k, writers, launch), called once. They order, and call `write` and `launch`, which launch the kernels.
    """

    def issue(sim):
        buffers, shards = torch.zeros(2, 4), torch.zeros(UNITS, 4)
        with sim:
            comm = sim.Stream("comm")
            writers = [sim.current_stream(), *(sim.Stream(f"writer {i}") for i in range(1, num_writers))]
            fill, send = protocol(sim, comm, buffers)
            for k in range(UNITS):
                with sim.label(f"backward {k}"):
                    torch.ones(4)
                for index, stream in enumerate(writers):
                    part = buffers[k % 2].chunk(num_writers)[index]

                    def write(k=k, part=part, stream=stream):
                        sim.launch(f"fill {k}", lambda p, k=k: p.fill_(k + 1), writes=[part], stream=stream)

                    fill(k, stream, write)

                def launch(k=k):
                    sim.launch(f"reduce {k}", reduce, reads=[buffers[k % 2]], writes=[shards[k]], stream=comm)

                send(k, writers, launch)
        return [(shards[k], [2.0 * (k + 1)] * 4) for k in range(UNITS)]

    return issue


def limiter(waits: Callable):
    """A double-buffer limiter: before a unit takes a buffer, `waits(sim, comm, event)` of the one that had it."""

    def protocol(sim, comm, buffers):
        events = {}

        def fill(k, stream, write):
            if k - 2 in events:
                waits(sim, comm, stream, events.pop(k - 2))
            write()

        def send(k, writers, launch):
            for stream in writers:
                comm.wait_event(stream.record_event())
            launch()
            events[k] = comm.record_event()

        return fill, send

    return protocol


def reader_waits(sim, comm, stream, event):
    comm.wait_event(event)


def writer_waits(sim, comm, stream, event):
    stream.wait_event(event)


def tail_waits(sim, comm, buffers):
    """Every writer waits for all that `comm` has been given, before each unit."""
    _, send = limiter(writer_waits)(sim, comm, buffers)

    def fill(k, stream, write):
        stream.wait_stream(comm)
        write()

    return fill, send


def leased_pool(sim, comm, buffers):
    slots, leases = [Slot(buffer, dev=sim) for buffer in buffers], {}

    def fill(k, stream, write):
        lease = leases.get(k) or leases.setdefault(k, slots[k % 2].acquire())
        with lease.write(stream):
            write()

    def send(k, writers, launch):
        with leases[k].read(comm):
            launch()
        slots[k % 2].release(leases[k])

    return fill, send


POOL_OVERLAP = ("fill 1", "reduce 0", "comm")
POOLS = [
    Form(
        "pool",
        "the reader waits for its own event",
        pool(limiter(reader_waits)),
        races=(("reduce 0", "fill 2"), ("reduce 1", "fill 3")),
    ),
    Form("pool", "the one writer waits", pool(limiter(writer_waits)), overlap=POOL_OVERLAP),
    Form(
        "pool",
        "the first of two writers waits",
        pool(limiter(writer_waits), num_writers=2),
        races=(("reduce 0", "fill 2"), ("reduce 1", "fill 3")),
    ),
    Form("pool", "writers wait for the stream's tail", pool(tail_waits, 2), serialises=True, overlap=POOL_OVERLAP),
    Form("pool", "slots, one writer", pool(leased_pool), overlap=POOL_OVERLAP),
    Form("pool", "slots, two writers", pool(leased_pool, num_writers=2), overlap=POOL_OVERLAP),
]


# Two gradient buckets that take turns: hooks on streams `a` and `b` copy gradients in; the last one flushes.

FILLS = 3


def zero(flush: Callable, admit: Callable = lambda sim, stream, copy, state: None) -> Callable[[Simulator], Expected]:
    """flush(sim, comm, producers, current, launch, copy, state) around the reduction; `admit` before a producer's copy.

    `state` is a dict for what the form remembers of each copy, 0 or 1.
    """

    def issue(sim):
        buckets, sums = torch.zeros(2, 4), torch.zeros(FILLS, 4)
        with sim:
            comm, producers, state = sim.Stream("comm"), [sim.Stream("a"), sim.Stream("b")], {}
            for k in range(FILLS):
                copy = k % 2
                for index, stream in enumerate(producers):
                    part = buckets[copy].chunk(2)[index]
                    sim.launch(f"backward {k}{stream.name}", stream=stream)
                    admit(sim, stream, copy, state)
                    sim.launch(f"fill {k}{stream.name}", lambda p, k=k: p.fill_(k + 1), writes=[part], stream=stream)

                def launch(k=k, copy=copy):
                    sim.launch(f"reduce {k}", reduce, reads=[buckets[copy]], writes=[sums[k]], stream=comm)

                flush(sim, comm, producers, stream, launch, copy, state)
        return [(sums[k], [2.0 * (k + 1)] * 4) for k in range(FILLS)]

    return issue


def current_stream_only(sim, comm, producers, current, launch, copy, state):
    comm.wait_stream(current)
    current.wait_stream(comm)
    launch()


def every_producer(sim, comm, producers, current, launch, copy, state):
    for stream in producers:
        comm.wait_stream(stream)
    current.wait_stream(comm)
    launch()


def event_a_buffer(sim, comm, producers, current, launch, copy, state):
    for stream in producers:
        comm.wait_stream(stream)
    launch()
    state[copy] = comm.record_event()


def first_write_pops_it(sim, stream, copy, state):
    if copy in state:
        stream.wait_event(state.pop(copy))


def producers_wait_for_the_reduction(sim, comm, producers, current, launch, copy, state):
    for stream in producers:
        comm.wait_stream(stream)
    launch()
    for stream in producers:
        stream.wait_stream(comm)


def leased_zero(sim):
    buckets, sums = torch.zeros(2, 4), torch.zeros(FILLS, 4)
    with sim:
        comm, producers = sim.Stream("comm"), [sim.Stream("a"), sim.Stream("b")]
        slots = [Slot(bucket, dev=sim) for bucket in buckets]
        for k in range(FILLS):
            slot = slots[k % 2]
            lease = slot.acquire()
            for index, stream in enumerate(producers):
                part = lease.tensor.chunk(2)[index]
                sim.launch(f"backward {k}{stream.name}", stream=stream)
                with lease.write(stream):
                    sim.launch(f"fill {k}{stream.name}", lambda p, k=k: p.fill_(k + 1), writes=[part], stream=stream)
            with lease.read(comm):
                sim.launch(f"reduce {k}", reduce, reads=[lease.tensor], writes=[sums[k]], stream=comm)
            slot.release(lease)
    return [(sums[k], [2.0 * (k + 1)] * 4) for k in range(FILLS)]


NEXT_FILL = ("fill 1a", "reduce 0", "comm")
NEXT_BACKWARD = ("backward 2b", "reduce 0", "comm")
BUCKETS = [
    Form(
        "buckets",
        "the current stream only",
        zero(current_stream_only),
        races=(
            *((f"fill {k}a", f"reduce {k}") for k in range(FILLS)),
            ("fill 0a", "reduce 2"),  # the same buffer, two fills later
            ("reduce 0", "fill 2a"),
        ),
        serialises=True,
        overlap=NEXT_BACKWARD,
    ),
    Form(
        "buckets",
        "every producer on the way there, the current stream on the way back",
        zero(every_producer),
        races=(("reduce 0", "fill 2a"),),
        serialises=True,
        overlap=NEXT_BACKWARD,
    ),
    Form(
        "buckets",
        "one event a buffer, taken by its first writer",
        zero(event_a_buffer, first_write_pops_it),
        races=(("reduce 0", "fill 2b"),),
    ),
    Form(
        "buckets",
        "producers wait for the reduction",
        zero(producers_wait_for_the_reduction),
        serialises=True,
        overlap=NEXT_FILL,
    ),
    Form("buckets", "slots", leased_zero, overlap=NEXT_FILL),
    Form("buckets", "slots let the next backward run", leased_zero, overlap=NEXT_BACKWARD),
]


# Gradient hooks of one bucket on two streams, neither of them the default one; the last one starts the reduction.

HOOKS = ("x", "y")


def hooks(start: Callable, finish: Callable, produce: Callable, late: bool = False) -> Callable[[Simulator], Expected]:
    """start(sim, comm, streams, state, launch) once the bucket is full; with `late`, once backward is over.

    produce(sim, stream, bucket, state, launch) is a hook; finish(sim, comm, state) comes before the optimizer's step.
    """

    def issue(sim):
        bucket, result, final = torch.zeros(4), torch.zeros(4), torch.zeros(4)
        with sim:
            comm, streams, state = sim.Stream("comm"), [sim.Stream(name) for name in HOOKS], {}
            for index, stream in enumerate(streams):

                def hook(index=index, stream=stream):
                    part = bucket.chunk(2)[index]
                    sim.launch(f"hook {stream.name}", lambda p: p.add_(1), writes=[part], stream=stream)

                produce(sim, stream, bucket, state, hook)

            def launch():
                sim.launch("reduce", reduce, reads=[bucket], writes=[result], stream=comm)

            if not late:
                start(sim, comm, streams, state, launch)
            sim.launch("rest of backward", stream=streams[-1])
            if late:
                start(sim, comm, streams, state, launch)
            finish(sim, comm, state)
            sim.launch("step", lambda r, f: f.copy_(r), reads=[result], writes=[final])
        return [(final, [2.0] * 4)]

    return issue


def plain_hook(sim, stream, bucket, state, hook):
    hook()


def waits_for(which: Callable):
    def start(sim, comm, streams, state, launch):
        for stream in which(sim, streams):
            comm.wait_stream(stream)
        launch()

    return start


def join_tail(sim, comm, state):
    sim.current_stream().wait_stream(comm)


def leased_hook(sim, stream, bucket, state, hook):
    lease = state.get("lease") or state.setdefault("lease", Lease(bucket, dev=sim))
    with lease.write(stream):
        hook()


def leased_start(sim, comm, streams, state, launch):
    with state["lease"].read(comm):
        launch()


def leased_finish(sim, comm, state):
    state["lease"].release().wait(sim.current_stream())


REDUCE_OVERLAP = ("reduce", "rest of backward", "y")
HOOK_FORMS = [
    Form(
        "hooks",
        "the default stream",
        hooks(waits_for(lambda sim, streams: [sim.default_stream()]), join_tail, plain_hook),
        races=(("hook x", "reduce"), ("hook y", "reduce")),
    ),
    Form(
        "hooks",
        "the stream of the last hook",
        hooks(waits_for(lambda sim, streams: streams[-1:]), join_tail, plain_hook),
        races=(("hook x", "reduce"),),
        overlap=REDUCE_OVERLAP,
    ),
    Form(
        "hooks",
        "the tails of both streams when backward is over",
        hooks(waits_for(lambda sim, streams: streams), join_tail, plain_hook, late=True),
        serialises=True,
        overlap=REDUCE_OVERLAP,
    ),
    Form("hooks", "leases", hooks(leased_start, leased_finish, leased_hook), overlap=REDUCE_OVERLAP),
    Form(
        "hooks",
        "leases, read when backward is over",
        hooks(leased_start, leased_finish, leased_hook, late=True),
        overlap=REDUCE_OVERLAP,
    ),
]

FORMS = [*SENDS, *POOLS, *BUCKETS, *HOOK_FORMS]
