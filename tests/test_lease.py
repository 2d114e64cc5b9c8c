"""The lifetime core, invariant by invariant, on simulated streams; what only real ones can show, on a GPU."""

import ast
import contextlib
import functools
import gc
import importlib
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from streams import Simulator, subsets
from transports import gpu_only

from tkernels.comm import fence
from tkernels.comm.channel import End
from tkernels.comm.errors import LeaseError
from tkernels.comm.fence import EventCompletion, Fence
from tkernels.layers import graphs
from tkernels.layers.graphs import captured
from tkernels.layers.lease import Keepalive, Lease, Slot, WorkCompletion


class CapturingSimulator(Simulator):
    """A simulator that can say that the current stream is being captured."""

    capturing = False

    def is_current_stream_capturing(self):
        return self.capturing


class Graph:
    """What torch.cuda.graph(...) is to `captured`: its kernels are launched once, as one eager call."""

    def __init__(self, sim):
        self.sim, self.cuda_graph, self.replays = sim, self, 0

    def __enter__(self):
        self.sim.capturing = True

    def __exit__(self, *exception):
        self.sim.capturing = False

    def replay(self):
        self.replays += 1


@pytest.fixture
def sim():
    return CapturingSimulator()


def producers_and_a_reader(sim, count):
    """`count` streams fill a part each of one buffer; `comm` doubles the whole."""
    with sim:
        streams, comm = [sim.Stream(f"p{i}") for i in range(count)], sim.Stream("comm")
        lease = Lease(torch.zeros(2 * count), dev=sim)
        comm.wait_stream(sim.current_stream())  # zeros ran there
        for stream in streams:
            stream.wait_stream(sim.current_stream())
        before = sim.waits
        for index, stream in enumerate(streams):
            with lease.write(stream), sim.stream(stream):
                lease.tensor.narrow(0, 2 * index, 2).fill_(index + 1)
        with lease.read(comm), sim.stream(comm):
            doubled = lease.tensor * 2
    return doubled, sim.waits - before


@pytest.mark.parametrize("starve", subsets(["p0", "p1", "p2", "comm"]), ids=str)
def test_lease_invariant_1_a_reader_waits_for_every_producer_of_its_tenancy(sim, starve):
    doubled, waits = producers_and_a_reader(sim, 3)
    sim.check()
    sim.run(starve)
    assert doubled.tolist() == [2, 2, 4, 4, 6, 6] and waits == 3


def test_lease_invariant_1_a_reader_on_a_producers_stream_does_not_wait_for_itself(sim):
    with sim:
        other = sim.Stream("other")
        lease = Lease(dev=sim)
        with lease.write(), lease.write(other):
            pass
        with lease.read(other):
            pass
    assert sim.waits == 1


def test_lease_invariant_1_a_reader_of_what_nobody_wrote_is_behind_the_last_tenancy(sim):
    with sim:
        comm = sim.Stream("comm")
        slot = Slot(torch.empty(2), dev=sim)
        first = slot.acquire()
        with first.write():
            first.tensor.fill_(1)
        slot.release(first)
        second = slot.acquire()
        with second.read(comm), sim.stream(comm):
            seen = second.tensor.clone()
    sim.check()
    sim.run(starve=["main"])
    assert seen.tolist() == [1, 1]


def two_writers_and_a_late_reader(sim, tenancies=3):
    """Two streams fill a half each, `comm` reads; tenancy after tenancy of one slot."""
    seen = []
    with sim:
        comm, side, main = sim.Stream("comm"), sim.Stream("side"), sim.current_stream()
        slot = Slot(torch.empty(4), dev=sim)
        for value in range(1, tenancies + 1):
            lease = slot.acquire()
            for half, stream in enumerate((main, side)):
                with lease.write(stream), sim.stream(stream):
                    lease.tensor.narrow(0, 2 * half, 2).fill_(value)
            with lease.read(comm), sim.stream(comm):
                seen.append(lease.tensor.clone())
            slot.release(lease)
    return seen


@pytest.mark.parametrize("starve", subsets(["main", "side", "comm"]), ids=str)
def test_lease_invariant_2_every_distinct_writer_waits_for_the_whole_tenancy_before(sim, starve):
    seen = two_writers_and_a_late_reader(sim)
    sim.check()
    sim.run(starve)
    assert [value.tolist() for value in seen] == [[1] * 4, [2] * 4, [3] * 4]


def test_lease_invariant_2_a_writer_waits_once_a_tenancy_at_its_first_write(sim):
    with sim:
        comm = sim.Stream("comm")
        slot = Slot(torch.empty(2), dev=sim)
        with (lease := slot.acquire()).read(comm):
            pass
        slot.release(lease)
        lease, counts = slot.acquire(), []
        for _ in range(3):
            with lease.write():
                counts.append(sim.waits)
    assert counts == [1, 1, 1]


def test_lease_invariant_2_the_wait_is_on_events_and_not_on_what_the_reader_was_given_since(sim):
    with sim:
        comm = sim.Stream("comm")
        slot = Slot(torch.ones(2), dev=sim)
        lease = slot.acquire()
        with lease.write(), sim.label("fill"):
            lease.tensor.fill_(1)
        with lease.read(comm):
            sim.launch("reduce", reads=[lease.tensor], stream=comm)
        slot.release(lease)
        sim.launch("unrelated", stream=comm)
        lease = slot.acquire()
        with lease.write(), sim.label("next fill"):
            lease.tensor.fill_(2)
    sim.check()
    sim.run(starve=["comm"])
    assert sim.log[-3:] == ["reduce", "next fill", "unrelated"]


def test_lease_invariant_2_what_nobody_waited_for_stays_in_the_gate(sim):
    """A peer writes the second tenancy: no stream of ours waited for the first, so the third has to."""
    with sim:
        slot, full, comm = Slot(torch.empty(2), dev=sim), sim.signal("full"), sim.Stream("comm")
        lease = slot.acquire()
        with lease.write(comm), sim.stream(comm):
            lease.tensor.fill_(1)
        slot.release(lease)
        lease = slot.acquire()
        lease.written_by(full.at(1))
        slot.release(lease)
        with slot.acquire().write() as tensor:
            tensor.fill_(3)
        full.set(1, sim.Stream("peer"))
    sim.check()


def test_lease_invariant_3_producers_are_unordered_unless_they_ask(sim):
    def fill(ordered):
        with sim:
            side = sim.Stream()
            lease = Lease(torch.empty(2), dev=sim)
            with lease.write():
                lease.tensor.fill_(1)
            with lease.write(side, ordered=ordered), sim.stream(side):
                lease.tensor.add_(1)
        return lease.tensor

    total = fill(ordered=True)
    sim.check()
    sim.run(starve=["main"])
    assert total.tolist() == [2, 2]
    fill(ordered=False)
    assert [race.kernels for race in sim.races] == [("fill_", "add_")]


def test_lease_invariant_3_an_ordered_write_inside_an_open_write_is_refused(sim):
    lease = Lease(dev=sim, name="bucket")
    with lease.write(), pytest.raises(LeaseError, match="bucket: an ordered write while another write block is open"):
        with lease.write(sim.Stream("side"), ordered=True):
            pass


def test_lease_invariant_4_the_event_is_recorded_at_the_end_of_the_block(sim):
    with sim:
        comm = sim.Stream("comm")
        lease = Lease(torch.empty(2), dev=sim)
        with lease.write():
            assert sim.records == 0
            lease.tensor.fill_(1)
            sim.launch("last", writes=[lease.tensor])
        assert sim.records == 1
        sim.launch("after")
        with lease.read(comm), sim.stream(comm):
            lease.tensor.sum()
    sim.check()
    sim.run(starve=["main"])
    assert sim.log == ["fill_", "last", "sum", "after"]


def test_lease_invariant_4_a_block_that_raises_was_a_use_all_the_same(sim):
    with sim:
        comm = sim.Stream("comm")
        lease = Lease(torch.empty(2), dev=sim)
        with contextlib.suppress(ZeroDivisionError), lease.write():
            lease.tensor.fill_(1)
            1 / 0  # noqa: B018
        with lease.read(comm), sim.stream(comm):
            lease.tensor.sum()
        lease.release()
    sim.check()


def test_lease_invariant_4_work_launched_elsewhere_is_entered(sim):
    with sim:
        engine, comm = sim.Stream("copy engine"), sim.Stream("comm")
        slot = Slot(torch.empty(2), dev=sim)
        lease = slot.acquire()
        sim.launch("upload", writes=[lease.tensor], stream=engine)
        lease.written_by(EventCompletion(engine))
        with lease.read(comm):
            sim.launch("send", reads=[lease.tensor], stream=engine)
        lease.read_by(EventCompletion(engine))
        slot.release(lease)
        with slot.acquire().write() as tensor:
            tensor.fill_(1)
    sim.check()


def test_lease_invariant_5_a_lease_is_written_then_read_then_released(sim):
    lease = Lease(dev=sim, name="bucket 3")
    with lease.write(), pytest.raises(LeaseError, match="bucket 3: read while a write block is open; leave it first"):
        lease.read_by(sim.signal().at(1))
    with lease.write(), pytest.raises(LeaseError, match="bucket 3: read while a write block is open; leave it first"):
        with lease.read():
            pass
    with lease.write(), pytest.raises(LeaseError, match="released inside an open write block"):
        lease.release()
    with lease.read():
        with pytest.raises(LeaseError, match="released inside an open read block"):
            lease.release()
        with pytest.raises(LeaseError, match="written while sealed; .* acquire a new lease to write again"):
            lease.written_by(sim.signal().at(1))
    with pytest.raises(LeaseError, match="bucket 3: written while sealed"), lease.write():
        pass
    assert lease.release() is lease.release() and lease.released
    for use in (lease.write, lease.read):
        with pytest.raises(LeaseError, match="while released"), use():
            pass


def test_lease_invariant_5_a_slot_has_one_tenant_and_a_stale_release_raises(sim):
    slot = Slot(dev=sim, name="pool[0]")
    first = slot.acquire()
    for use in (slot.acquire, slot.join):
        with pytest.raises(LeaseError, match=r"pool\[0\]: \w+ while its last lease is filling; release it first"):
            use()
    slot.release(first)
    slot.release(first)
    second = slot.acquire()
    with pytest.raises(LeaseError, match=r"pool\[0\]: a stale lease was released"):
        slot.release(first)
    assert slot.lease is second and not second.released


def test_lease_and_slot_are_of_a_tensor():
    for make in (Lease, Slot):
        with pytest.raises(TypeError, match=r"^inbox: tensor=\[1.0\] must be a tensor$"):
            make([1.0], name="inbox")


def test_lease_and_its_kin_refuse_what_has_no_streams_and_is_no_lease_by_name():
    x = torch.ones(4)
    slot, keepalive = Slot(x), Keepalive()
    lease = slot.acquire()
    for call, message in (
        (lambda: Lease(x, dev="cuda"), "buffer: dev='cuda' has no streams"),
        (lambda: Slot(x, dev="cuda"), "slot: dev='cuda' has no streams"),
        (lambda: Lease(x, home="main"), "buffer: home='main' must be a stream"),
        (lambda: Lease(x.to_sparse()), "buffer: the tensor is torch.sparse_coo"),
        (lambda: lease.write("comm").__enter__(), "slot: stream='comm' must be a stream"),
        (lambda: lease.read(3).__enter__(), "slot: stream=3 must be a stream"),
        (lambda: Slot(x).join("comm"), "slot: stream='comm' must be a stream"),
        (lambda: Slot(x).release(None), "slot: lease=None must be what acquire has returned"),
        (lambda: lease.written_by(torch.cpu.current_stream()), "a fence takes completions, not Stream; make an Event"),
        (lambda: keepalive.defer(x), "Keepalive.defer: lease=tensor.* must be a Lease"),
        (lambda: keepalive.drain("all"), "Keepalive.drain: keep='all' must be a whole number"),
        (lambda: WorkCompletion("sum", torch.cpu), "WorkCompletion: work='sum' must be what torch.distributed returns"),
        (lambda: EventCompletion("comm"), "EventCompletion: stream='comm' must be a stream"),
    ):
        with pytest.raises(TypeError, match=f"^{message}"):
            call()
    with pytest.raises(ValueError, match="Keepalive.drain: keep=-1 must be at least 0"):
        keepalive.drain(-1)


def test_captured_refuses_a_bare_graph_and_what_are_no_slots(sim):
    slot = Slot(torch.ones(4), dev=sim)
    for graph, options, message in (
        (torch.Generator(), {}, r"graph=.* must be torch.cuda.graph\(...\), not yet entered"),
        (Graph(sim), {"slots": slot}, "slots=.* must be a list of slots"),
        (Graph(sim), {"slots": [slot.tensor]}, "a slot=tensor.* must be a Slot"),
        (Graph(sim), {"streams": 3}, "streams=3 must be a list of streams"),
    ):
        with pytest.raises(TypeError, match=f"captured: {message}"), captured(graph, dev=sim, **options):
            pass


def test_lease_without_a_tensor_needs_a_device():
    for make in (Lease, Slot):
        with pytest.raises(LeaseError, match="inbox: neither a tensor nor dev=; pass dev="):
            make(name="inbox")
    assert Lease(torch.empty(2)).dev is torch.cpu


def test_lease_invariant_6_a_release_issues_nothing_and_blocks_nothing(sim):
    two_writers_and_a_late_reader(sim, tenancies=1)
    before = sim.waits, sim.records
    with sim:
        slot = Slot(torch.empty(2), dev=sim)
        lease = slot.acquire()
        with lease.write(sim.Stream("a")), lease.write(sim.Stream("b")):
            pass
        slot.release(lease)
    assert (sim.waits, sim.records - 2) == before


def sent_and_given_back(sim, drain):
    """A stream sends an output whose visible tensor is swapped at once; compute goes on in fresh memory."""
    keepalive = Keepalive()
    with sim:
        comm, inbox = sim.Stream("comm"), torch.zeros(4)
        output = torch.ones(4)
        address = output.data_ptr()
        comm.wait_stream(sim.current_stream())
        lease = Lease(output, dev=sim)
        with lease.read(comm):
            sim.launch("send", lambda s, t: t.copy_(s), reads=[lease.tensor], writes=[inbox], stream=comm)
        before = sim.waits
        output.data = torch.empty(1)
        keepalive.defer(lease)
        assert sim.waits == before and lease.tensor is None
        if drain:
            keepalive.drain()
            assert sim.waits == before + 1
        with sim.label("compute"):
            compute = torch.full((4,), 2.0)
    return inbox, compute.data_ptr() == address, keepalive


@pytest.mark.parametrize("starve", subsets(["main", "comm"]), ids=str)
@pytest.mark.parametrize("drain", [False, True], ids=["held", "drained"])
def test_lease_invariant_7_storage_goes_back_once_its_home_is_behind_every_use(sim, drain, starve):
    inbox, reused, keepalive = sent_and_given_back(sim, drain)
    assert reused == drain and len(keepalive) == (not drain)
    sim.check()
    sim.run(starve)
    assert inbox.tolist() == [1] * 4
    if not drain and "comm" in starve and "main" not in starve:
        assert sim.log.index("compute") < sim.log.index("send")


def test_lease_invariant_7_drain_keeps_the_newest_and_drops_in_order(sim):
    keepalive, newest = Keepalive(), []
    with sim:
        for _ in range(4):
            lease = Lease(torch.ones(2), dev=sim)
            newest = [*newest[-1:], lease.tensor.untyped_storage()._cdata]
            keepalive.defer(lease)
        keepalive.drain(keep=2)
    assert keepalive.storages == newest


def test_lease_invariant_7_collect_lets_go_of_what_has_finished_and_waits_for_nothing(sim):
    inbox, _, keepalive = sent_and_given_back(sim, drain=False)
    keepalive.collect()
    assert len(keepalive) == 1
    sim.run()
    before = sim.waits
    keepalive.collect()
    assert len(keepalive) == 0 and sim.waits == before


def test_lease_invariant_7_a_lease_is_deferred_instead_of_released(sim):
    lease = Lease(torch.ones(2), dev=sim, name="output")
    lease.release()
    with pytest.raises(LeaseError, match="output: deferred after its release"):
        Keepalive().defer(lease)


def test_lease_invariant_7_what_a_capture_refuses_to_wait_for_is_held_still(sim):
    inbox, _, keepalive = sent_and_given_back(sim, drain=False)
    sim.capturing = True
    with pytest.raises(LeaseError, match="outside the CUDA graph"):
        keepalive.drain()
    assert len(keepalive) == 1


def test_lease_invariant_8_the_host_never_blocks_or_asks(sim):
    """The simulator raises at every synchronise; an event that is asked under way says no, and nothing changes."""
    two_writers_and_a_late_reader(sim)
    fence = Fence(sim)
    assert fence.query()
    fence.record(sim.current_stream())
    assert not fence.query()
    sim.run()
    assert fence.query()


def test_lease_invariant_8_nobody_asks_under_capture(sim):
    fence = Fence(sim)
    fence.record(sim.current_stream())
    sim.run()
    sim.capturing = True
    assert not fence.query()


@pytest.mark.parametrize("same_stream", [False, True], ids=["another stream", "the same stream"])
@pytest.mark.parametrize("inside", [False, True], ids=["recorded outside", "recorded inside"])
def test_lease_invariant_9_nothing_waits_across_the_edge_of_a_capture(sim, inside, same_stream):
    with sim:
        comm = sim.current_stream() if same_stream else sim.Stream("comm")
        sim.capturing = inside
        lease = Lease(torch.ones(2), dev=sim)
        with lease.write():
            pass
        with lease.read(comm):
            pass
        sim.capturing = not inside
        place = "inside a CUDA graph's capture" if inside else "outside the CUDA graph that is being captured"
        with pytest.raises(LeaseError, match=f"last used {place}.*captured"), lease.read(comm):
            pass


def test_lease_invariant_9_a_collective_started_inside_a_capture_means_nothing_outside(sim):
    class Work:
        def is_completed(self):
            return True

    sim.capturing = True
    lease = Lease(dev=sim)
    lease.written_by(WorkCompletion(Work(), sim))
    sim.capturing = False
    with pytest.raises(LeaseError, match="inside a CUDA graph's capture"), lease.read():
        pass


def test_lease_invariant_9_captured_joins_at_the_edges_and_leaves_one_external_event(sim):
    with sim:
        comm, other = sim.Stream("comm"), sim.Stream("other")
        slot, graph = Slot(torch.empty(2), dev=sim), Graph(sim)

        def step():
            lease = slot.acquire()
            with lease.write():
                lease.tensor.fill_(1)
            with lease.read(comm), sim.stream(comm):
                lease.tensor.sum()
            slot.release(lease)

        step()
        with captured(graph, slots=[slot], streams=[comm], dev=sim) as replay:
            assert len(slot.gate) == 0
            step()
        assert not sim.capturing and len(slot.gate) == 1
        lease = slot.acquire()
        with lease.write(other), sim.stream(other):
            lease.tensor.fill_(2)
        slot.release(lease)
        before = sim.waits
        replay()
        # The graph waits for what `other` and `comm` did, and `comm` for the graph.
        assert sim.waits == before + 3 and graph.replays == 1
        replay()
        assert graph.replays == 2 and len(slot.gate) == 1
    sim.check()


def test_lease_invariant_9_side_streams_fork_from_the_capture_and_join_it(sim):
    with sim:
        comm = sim.Stream("comm")
        data = torch.ones(2)
        with captured(Graph(sim), streams=[comm], dev=sim):
            sim.launch("on the side", reads=[data], stream=comm)
        data.fill_(2)
    sim.check()


def test_lease_invariant_9_a_replay_runs_after_what_was_launched_on_its_slots_since(sim):
    """The wrong form is the bare replay, which knows nothing of the slots."""

    def races(right):
        sim, replays = CapturingSimulator(), []
        with sim:
            other = sim.Stream("other")
            slot, graph = Slot(torch.empty(2), dev=sim), Graph(sim)
            graph.replay = lambda: sim.launch("replay", writes=[slot.tensor])
            with captured(graph, slots=[slot], dev=sim) as replay:
                pass
            with slot.acquire().read(other) as tensor, sim.stream(other):
                replays.append(tensor.clone())
            slot.release(slot.lease)
            replay() if right else graph.replay()
        return [race.kernels for race in sim.races]

    assert races(right=True) == []
    assert races(right=False) == [("clone", "replay")]


def test_lease_invariant_9_a_capture_that_fails_leaves_the_slots_usable(sim):
    with sim:
        slot = Slot(torch.empty(2), dev=sim)
        with contextlib.suppress(ZeroDivisionError), captured(Graph(sim), slots=[slot], dev=sim):
            with slot.acquire().write():
                1 / 0  # noqa: B018
        with slot.acquire().write() as tensor:
            tensor.fill_(1)
    sim.check()


@pytest.mark.skipif(
    not hasattr(torch.autograd.graph, "set_override_stale_capture_stream"), reason="this torch has no such override"
)
def test_captured_lets_stale_nodes_of_autograd_follow_it_and_no_longer(sim):
    follows = torch._C._override_stale_capture_stream
    with sim, captured(Graph(sim), dev=sim):
        assert follows()
        with contextlib.suppress(ZeroDivisionError), captured(Graph(sim), dev=sim):
            1 / 0  # noqa: B018
        assert follows()
    assert not follows()
    torch.autograd.graph.set_override_stale_capture_stream(True)  # somebody's own setting
    try:
        with sim, captured(Graph(sim), dev=sim):
            pass
        assert follows()
    finally:
        torch.autograd.graph.set_override_stale_capture_stream(False)


def test_captured_says_once_what_breaks_a_capture_where_torch_has_no_override(sim, monkeypatch):
    follows = getattr(torch._C, "_override_stale_capture_stream", lambda: False)
    monkeypatch.delattr(torch.autograd.graph, "set_override_stale_capture_stream", raising=False)
    monkeypatch.setattr(graphs, "_stale_stream_override", functools.cache(graphs._stale_stream_override.__wrapped__))
    with sim, pytest.warns(UserWarning, match="has no set_override_stale_capture_stream: .*del loss") as warned:
        for _ in range(2):
            with captured(Graph(sim), dev=sim):
                assert not follows()
    assert len(warned) == 1 and warned[0].filename == __file__


def test_lease_invariant_9_a_slot_in_use_can_not_cross_the_edge(sim):
    slot = Slot(dev=sim, name="pool")
    lease = slot.acquire()
    with pytest.raises(LeaseError, match="pool: joined while its last lease is filling"):
        with captured(Graph(sim), slots=[slot], dev=sim):
            pass
    slot.release(lease)
    with pytest.raises(LeaseError, match="pool: joined while its last lease is filling"):
        with captured(Graph(sim), slots=[slot], dev=sim):
            slot.acquire()


def test_lease_invariant_10_one_stream_issues_no_wait_and_one_record_a_block(sim):
    keepalive = Keepalive()
    with sim:
        slot = Slot(torch.empty(2), dev=sim)
        for _ in range(5):
            lease = slot.acquire()
            with lease.write():
                pass
            with lease.write(ordered=True):
                pass
            with lease.read():
                pass
            slot.release(lease)
        slot.join()
        keepalive.defer(Lease(torch.ones(2), dev=sim))
        keepalive.drain()
    assert (sim.waits, sim.records) == (0, 15)


@pytest.mark.parametrize("producers, waits", [(1, 1), (2, 2), (3, 3)])
def test_lease_invariant_10_several_streams_wait_once_for_each_other(sim, producers, waits):
    assert producers_and_a_reader(sim, producers)[1] == waits


def test_lease_invariant_11_the_storage_is_held_and_not_the_tensor(sim):
    output = torch.ones(4, requires_grad=True) * 2
    address = output.data_ptr()
    lease, slot = Lease(output, dev=sim), Slot(output, dev=sim)
    output.data = torch.empty(1)
    assert lease.tensor.data_ptr() == slot.tensor.data_ptr() == address and lease.tensor.tolist() == [2] * 4
    assert output.numel() == 1 and output.grad_fn is not None


def test_lease_invariant_11_a_storage_that_is_resized_while_leased_is_caught(sim):
    tensor = torch.ones(4)
    slot = Slot(tensor, dev=sim, name="gathered")
    lease = slot.acquire()
    tensor.untyped_storage().resize_(0)
    with pytest.raises(LeaseError, match="gathered: its storage had 16 bytes when it was leased and has 0 now"):
        slot.release(lease)


def test_lease_invariant_11_a_released_lease_holds_nothing(sim):
    tensor = torch.ones(4)
    lease = Lease(tensor, dev=sim)
    watch = weakref.ref(lease.tensor)
    lease.release()
    gc.collect()
    assert watch() is None


def test_lease_invariant_12_threads_share_a_lease(sim):
    """Each thread has its stream and its slice; the reader waits for all of them, and none is lost."""
    num_threads, writes = 8, 40
    lease = Lease(torch.zeros(num_threads), dev=sim)
    comm, start = sim.Stream("comm"), threading.Barrier(num_threads)
    streams = [sim.Stream(f"t{i}") for i in range(num_threads)]

    def produce(index):
        own = lease.tensor.narrow(0, index, 1)
        start.wait()
        for _ in range(writes):
            with lease.write(streams[index]):
                sim.launch("add", lambda own: own.add_(1), writes=[own], stream=streams[index])

    threads = [threading.Thread(target=produce, args=(index,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with lease.read(comm):
        sim.launch("reduce", reads=[lease.tensor], stream=comm)
    assert (sim.waits, sim.records) == (num_threads, num_threads * writes + 1)
    sim.check()
    sim.run(starve=[stream.name for stream in streams])
    assert lease.tensor.tolist() == [writes] * num_threads and sim.log[-1] == "reduce"


def test_lease_invariant_12_one_of_many_threads_gets_the_slot_and_the_others_are_told(sim):
    slot, got, refused, start = Slot(dev=sim), [], [], threading.Barrier(8)

    def take():
        start.wait()
        try:
            got.append(slot.acquire())
        except LeaseError as error:
            refused.append(error)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 7)


@pytest.mark.parametrize("starve", subsets(["main", "side", "peer"]), ids=str)
def test_lease_invariant_9_a_channels_ends_take_turns_as_slots_do(sim, starve):
    """On any stream, after the peer's signal, and across the edge of a capture inside `captured` alone."""

    def turn(stream):
        with sim.stream(stream), end.turn(credit.at(1)) as state:
            state.add_(1)

    with sim:
        main, side, credit = sim.current_stream(), sim.Stream("side"), sim.signal("credit")
        end = End(torch.device("cpu"), sim)
        credit.set(1, sim.Stream("peer"))
        turn(main)
        turn(side)
        with captured(Graph(sim), slots=[end], streams=[side], dev=sim) as replay:
            turn(side)
        replay()
        turn(main)
        with contextlib.suppress(ZeroDivisionError), captured(Graph(sim), slots=[end], dev=sim):
            turn(main)
            1 / 0  # noqa: B018
        turn(main)
        sim.capturing = True
        with pytest.raises(LeaseError, match="outside the CUDA graph"):
            turn(main)
    sim.check()
    sim.run(starve)
    assert end.state.tolist() == [6, 6]


# Completions of the three kinds


@pytest.mark.parametrize("starve", subsets(["sender", "receiver"]), ids=str)
def test_lease_a_peers_signals_are_completions_full_for_its_reader_and_free_for_its_writer(sim, starve):
    """Three messages through two slots of the receiver: its reads wait for `full`, the sender for the credit `free`."""
    got = []
    with sim:
        sender, receiver = sim.Stream("sender"), sim.Stream("receiver")
        inbox = [Slot(torch.empty(2), dev=sim, name=f"inbox {i}") for i in range(2)]
        full, free = sim.signal("full"), sim.signal("free")
        for message in (1, 2, 3):
            outbox = Lease(inbox[message % 2].tensor, dev=sim)  # the sender's view of the same memory
            if message > 2:
                outbox.gate.add(free.at(message - 2))
            with outbox.write(sender), sim.stream(sender):
                outbox.tensor.fill_(message)
            full.set(message, sender)
            outbox.release()
        for message in (1, 2, 3):
            slot = inbox[message % 2]
            lease = slot.acquire()
            lease.written_by(full.at(message))
            with lease.read(receiver), sim.stream(receiver):
                got.append(lease.tensor.clone())
            slot.release(lease)
            free.set(message, receiver)
    sim.check()
    sim.run(starve)
    assert [value.tolist() for value in got] == [[1, 1], [2, 2], [3, 3]]


@pytest.mark.ranks(2)
def test_lease_a_collective_of_torch_distributed_is_a_completion(ctx):
    dev = torch.get_device_module(ctx.device)
    lease = Lease(torch.full((64,), float(ctx.rank + 1), device=ctx.device))
    with lease.write():
        work = dist.all_reduce(lease.tensor, group=ctx.group.process_group, async_op=True)
    lease.written_by(WorkCompletion(work, dev))
    stream = dev.Stream()
    with lease.read(stream), dev.stream(stream):
        total = lease.tensor.sum()
    gate = lease.release()
    assert len(gate) == 3  # this stream, the work and the reader
    gate.wait(dev.current_stream())
    assert total.item() == 64 * sum(range(1, ctx.size + 1))
    assert gate.query()


@pytest.mark.ranks(2)
def test_lease_a_transfer_of_gloos_is_waited_for_any_number_of_times(ctx):
    """A second wait for the same send would never return."""
    group, tensor = dist.new_group(backend="gloo"), torch.full((64,), float(ctx.rank))
    transfer = dist.irecv if ctx.rank else dist.isend
    completion = WorkCompletion(transfer(tensor, 1 - ctx.rank, group=group), torch.cpu)
    for _ in range(2):
        completion.wait(torch.cpu.current_stream())
    assert completion.query() and tensor.eq(0.0).all()
    dist.destroy_process_group(group)


# Nothing else orders streams

OF_THE_DRIVER = {"cuStreamWaitEvent", "cuEventRecord", "cuStreamWaitValue64_v2", "cuStreamBatchMemOp_v2"}
ORDERING = {"wait_stream", "wait_event", "record_event", "record_stream", *OF_THE_DRIVER}
# The core; the order of whole operations, and inside of one; and the side stream of copies, which waits for words of
# kernels alone.
CORE = "fence", "stream_order", "lanes", "copies", "driver"
MAY_ORDER = {"layers/graphs.py", *(f"comm/{name}.py" for name in CORE)}


def ordering(source: str) -> Iterator[str]:
    """Where a module orders streams by itself: calls and names of methods and of the driver, untimed events."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in ORDERING:
            yield f"line {node.lineno}: {node.attr}"
        elif isinstance(node, ast.Constant) and node.value in ORDERING:
            yield f"line {node.lineno}: {node.value!r}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "Event":
            timing = any(keyword.arg == "enable_timing" for keyword in node.keywords)
            if not timing and ast.unparse(node.func).split(".")[0] not in ("threading", "multiprocessing"):
                yield f"line {node.lineno}: {ast.unparse(node)}"


def test_lease_nothing_but_the_core_orders_streams(checkout):
    found = {}
    for folder in ("comm", "tkernels", "layers"):
        for file in (checkout / folder).rglob("*.py"):
            name = file.relative_to(checkout).as_posix()
            if name not in MAY_ORDER and (lines := list(ordering(file.read_text()))):
                found[name] = lines
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.current_stream().wait_stream(comm)",
        "comm.wait_event(event)",
        "event = stream.record_event()",
        "bucket.record_stream(comm)",
        "getattr(stream, 'wait_stream')(comm)",
        "wait = stream.wait_event",
        "driver().cuStreamBatchMemOp_v2(stream, 1, operations, 0)",
        "torch.cuda.Event().record()",
        "event = dev.Event(external=True)",
        "def f():\n    from torch.cuda import Event\n    return Event()",
    ],
)
def test_lease_the_rule_of_order_sees_a_violation(line):
    assert list(ordering(line))


@pytest.mark.parametrize("line", ["torch.cuda.Event(enable_timing=True).record()", "threading.Event().wait()"])
def test_lease_the_rule_of_order_lets_the_rest_through(line):
    assert not list(ordering(line))


def test_lease_the_core_itself_would_be_found():
    for module in (fence, graphs):
        assert list(ordering(Path(module.__file__).read_text()))


@pytest.mark.ranks(2)
def test_lease_the_bench_of_leases_counts_those_of_a_training_step(ctx, checkout):
    sys.path.insert(0, str(checkout))  # the bench is imported from the repository's root alone
    leases = importlib.import_module("bench.leases")
    leases.REPEATS = leases.CALLS = leases.WARMUPS = leases.STEPS = 2
    line = leases.measure(ctx, None)
    assert line["leases"] >= leases.BUCKETS and line["share"] > 0
    line = leases.measure(ctx, {"leases": 4, "step_ms": 2.0})
    assert line["share"] == pytest.approx(4 * line["two_streams_us"] / 2000)


# Real streams. `_sleep` holds up the stream that must be late; the wrong form stands beside each.

CYCLES = 40_000_000  # about 20 ms
ROUNDS = 20


def warm(*tensors):
    """The first launch of a kernel loads it, which may wait for the device; later ones don't."""
    for tensor in tensors:
        tensor.fill_(0)
        torch.cuda._sleep(1)
        tensor[: len(tensor) // 2].copy_(tensor[len(tensor) // 2 :])
    torch.cuda.synchronize()


@gpu_only
@pytest.mark.ranks(1)
@pytest.mark.parametrize("form", ["lease", "no wait"])
def test_lease_on_a_gpu_a_reader_comes_after_a_late_producer_and_the_host_does_not_wait(ctx, form):
    side, comm = torch.cuda.Stream(), torch.cuda.Stream()
    buffer, seen = (torch.zeros(ROUNDS, 1024, device=ctx.device) for _ in range(2))
    warm(buffer, seen)
    pending = []
    for index in range(ROUNDS):
        lease = Lease(buffer[index])
        with torch.cuda.stream(side), lease.write():
            torch.cuda._sleep(CYCLES)
            lease.tensor.fill_(index + 1)
        with torch.cuda.stream(comm):
            with lease.read() if form == "lease" else contextlib.nullcontext():
                seen[index].copy_(buffer[index])
        pending.append(lease.release().query())
    assert not pending[-1], "the host has waited for the device"
    torch.cuda.synchronize()
    right = [[index + 1.0] * 2 for index in range(ROUNDS)]
    assert (seen[:, [0, -1]].tolist() == right) == (form == "lease")


@gpu_only
@pytest.mark.ranks(1)
@pytest.mark.parametrize("form", ["lease", "one writer waits"])
def test_lease_on_a_gpu_every_writer_comes_after_a_late_reader(ctx, form):
    main, side, comm = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    buffer, seen = torch.zeros(1024, device=ctx.device), torch.zeros(ROUNDS, 1024, device=ctx.device)
    warm(buffer, seen)
    slot = Slot(buffer)
    halves = buffer.chunk(2)
    for index in range(ROUNDS):
        lease = slot.acquire()
        with lease.write(main):
            halves[0].fill_(index + 1)
        if form == "lease":
            with lease.write(side), torch.cuda.stream(side):
                halves[1].fill_(index + 1)
        else:
            with torch.cuda.stream(side):
                halves[1].fill_(index + 1)
        with lease.read(comm), torch.cuda.stream(comm):
            torch.cuda._sleep(CYCLES)
            seen[index].copy_(buffer)
        slot.release(lease)
    assert not slot.gate.query(), "the host has waited for the device"
    torch.cuda.synchronize()
    right = [[index + 1.0] * 2 for index in range(ROUNDS)]
    assert (seen[:, [0, -1]].tolist() == right) == (form == "lease")


@gpu_only
@pytest.mark.ranks(1)
@pytest.mark.parametrize("form", ["lease", "dropped at once"])
def test_lease_on_a_gpu_memory_that_a_late_stream_reads_is_not_given_away(ctx, form):
    comm, keepalive = torch.cuda.Stream(), Keepalive()
    seen = torch.zeros(ROUNDS, 1 << 20, device=ctx.device)
    warm(seen, torch.zeros(1 << 20, device=ctx.device))
    reused = 0
    for index in range(ROUNDS):
        output = torch.full((1 << 20,), index + 1.0, device=ctx.device)
        address, lease = output.data_ptr(), Lease(output)
        with lease.write():
            pass  # the stream that filled it
        with lease.read(comm), torch.cuda.stream(comm):
            torch.cuda._sleep(CYCLES)
            seen[index].copy_(lease.tensor)
        output.data = torch.empty(1, device=ctx.device)
        keepalive.defer(lease) if form == "lease" else lease.release()
        compute = torch.full((1 << 20,), -1.0, device=ctx.device)
        reused += compute.data_ptr() == address
        keepalive.drain(keep=1)
        del compute
    keepalive.drain()
    torch.cuda.synchronize()
    right = [[index + 1.0] * 2 for index in range(ROUNDS)]
    assert (seen[:, [0, -1]].tolist() == right) == (form == "lease")
    assert (reused == 0) == (form == "lease"), f"the block was handed out {reused} times while it was read"


@gpu_only
@pytest.mark.ranks(1)
@pytest.mark.parametrize("replays", [3])
def test_lease_on_a_gpu_a_captured_step_replays_as_the_eager_one(ctx, replays):
    comm = torch.cuda.Stream()
    data, total = torch.zeros(1024, device=ctx.device), torch.zeros(1024, device=ctx.device)
    slots = [Slot(torch.zeros(1024, device=ctx.device)) for _ in range(2)]

    def step():
        for index in range(4):
            slot = slots[index % 2]
            lease = slot.acquire()
            with lease.write():
                torch.add(data, index, out=lease.tensor)
            with lease.read(comm), torch.cuda.stream(comm):
                torch.cuda._sleep(CYCLES // 20)
                total.add_(lease.tensor)
            slot.release(lease)

    step()  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with captured(torch.cuda.graph(graph), slots=slots, streams=[comm]) as replay:
        step()
    results = {}
    for name, run in (("eager", step), ("graph", replay)):
        total.zero_()
        comm.wait_stream(torch.cuda.current_stream())
        results[name] = []
        for index in range(replays):
            data.fill_(index)
            run()
            for slot in slots:
                slot.join()
            results[name].append(total.clone())
    for eager, replayed in zip(*results.values(), strict=True):
        assert torch.equal(eager, replayed)
    assert results["graph"][-1][0].item() == sum(4 * index + 6 for index in range(replays))


@gpu_only
@pytest.mark.ranks(1)
@pytest.mark.parametrize("form", ["lease", "no order"])
def test_lease_on_a_gpu_a_replay_and_what_is_launched_outside_take_turns(ctx, form):
    """The graph's write is late for the reader outside, then the reader for the next replay."""
    comm, other = torch.cuda.Stream(), torch.cuda.Stream()
    value, seen = torch.zeros((), device=ctx.device), torch.zeros(ROUNDS, 1024, device=ctx.device)
    values = torch.arange(1.0, ROUNDS + 1, device=ctx.device)
    slot, graph = Slot(torch.zeros(1024, device=ctx.device)), torch.cuda.CUDAGraph()
    warm(seen, slot.tensor)
    slot.tensor.copy_(value.expand(1024))
    torch.cuda.synchronize()
    with captured(torch.cuda.graph(graph), slots=[slot], streams=[comm]) as replay:
        lease = slot.acquire()
        with lease.write(comm), torch.cuda.stream(comm):
            torch.cuda._sleep(CYCLES // 2)
            lease.tensor.copy_(value.expand(1024))
        slot.release(lease)
    for index in range(ROUNDS):
        value.copy_(values[index])
        if form == "lease":
            replay()
            lease = slot.acquire()
            with lease.read(other), torch.cuda.stream(other):
                torch.cuda._sleep(CYCLES)
                seen[index].copy_(lease.tensor)
            slot.release(lease)
        else:
            graph.replay()
            with torch.cuda.stream(other):
                torch.cuda._sleep(CYCLES)
                seen[index].copy_(slot.tensor)
    assert not other.query(), "the host has waited for the device"
    torch.cuda.synchronize()
    right = [[index + 1.0] * 2 for index in range(ROUNDS)]
    assert (seen[:, [0, -1]].tolist() == right) == (form == "lease")
