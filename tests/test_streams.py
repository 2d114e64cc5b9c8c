"""The simulator of streams: each kind of race is found, orders are followed, memory is reused, and values tell."""

import copy

import pytest
import torch
from streams import Deadlock, HostRead, Race, Simulator, subsets
from torch import nn


@pytest.fixture
def sim():
    return Simulator()


def test_a_reader_that_does_not_wait_races_with_the_writer_and_reads_what_was_there(sim):
    source = torch.zeros(4)
    with sim:
        comm = sim.Stream("comm")
        source.fill_(1)
        with sim.stream(comm):
            seen = source * 2
    (race,) = sim.races
    assert (race.kernels, race.streams, race.modes, race.bytes) == (("fill_", "mul"), ("main", "comm"), "wr", (0, 16))
    with pytest.raises(Race, match="'fill_' on main writes and 'mul' on comm reads bytes 0..16 of a tensor made out"):
        sim.check()
    sim.run(starve=["main"])
    assert seen.tolist() == [0, 0, 0, 0] and sim.log == ["mul", "fill_"]


def test_a_writer_that_does_not_wait_races_with_the_reader(sim):
    with sim:
        comm = sim.Stream("comm")
        buffer = torch.ones(4)
        comm.wait_stream(sim.current_stream())
        with sim.stream(comm):
            seen = buffer.clone()
        buffer.fill_(2)
    assert [(race.kernels, race.modes) for race in sim.races] == [(("clone", "fill_"), "rw")]
    sim.run(starve=["comm"])
    assert seen.tolist() == [2, 2, 2, 2]


def test_two_writers_race(sim):
    with sim:
        comm = sim.Stream("comm")
        buffer = torch.empty(4)
        buffer.fill_(1)
        with sim.stream(comm):
            buffer.fill_(2)
    assert [race.modes for race in sim.races] == ["ww"]


def test_readers_do_not_race(sim):
    buffer = torch.ones(4)
    with sim:
        for name in ("a", "b"):
            with sim.stream(sim.Stream(name)):
                buffer.sum()
    sim.check()


@pytest.mark.parametrize("starve", subsets(["main", "comm"]), ids=str)
def test_events_order_and_the_order_holds_under_every_starvation(sim, starve):
    with sim:
        comm = sim.Stream("comm")
        buffer = torch.ones(4)
        comm.wait_event(sim.current_stream().record_event())
        with sim.stream(comm):
            seen = buffer.clone()
        sim.current_stream().wait_event(comm.record_event())
        buffer.fill_(2)
    sim.check()
    sim.run(starve)
    assert seen.tolist() == [1, 1, 1, 1] and buffer.tolist() == [2, 2, 2, 2]
    assert (sim.waits, sim.records) == (2, 2)


def test_waits_are_transitive(sim):
    with sim:
        a, b = sim.Stream("a"), sim.Stream("b")
        buffer = torch.ones(4)
        a.wait_stream(sim.current_stream())
        b.wait_stream(a)
        with sim.stream(b):
            buffer.add_(1)
    sim.check()


def test_a_wait_covers_only_what_was_launched_before_its_event(sim):
    with sim:
        comm = sim.Stream("comm")
        first, second = torch.empty(4), torch.empty(4)
        first.fill_(1)
        event = sim.current_stream().record_event()
        second.fill_(1)
        comm.wait_event(event)
        with sim.stream(comm):
            first.sum()
            second.sum()
    assert [race.kernels for race in sim.races] == [("fill_", "sum")]
    assert sim.races[0].first.memory == "block 1"


def test_an_event_that_was_never_recorded_orders_nothing_as_in_cuda(sim):
    with sim:
        buffer = torch.ones(4)
        comm = sim.Stream("comm")
        comm.wait_event(sim.Event())
        with sim.stream(comm):
            buffer.sum()
    assert len(sim.races) == 1


def slices_of_one_bucket(bucket):
    yield bucket.narrow(0, 0, 3), bucket.narrow(0, 3, 5), False
    yield bucket.narrow(0, 0, 4), bucket.narrow(0, 3, 5), True
    yield bucket[::2], bucket[1::2], False
    yield bucket[::2], bucket[::4], True
    grid = bucket.view(4, 4)
    yield grid[:, :2], grid[:, 2:], False
    yield grid[:, :2], grid[:, 1:3], True
    yield grid[0], grid.t()[1], True
    yield grid[0], grid[2:, 1:3], False


@pytest.mark.parametrize("case", range(8))
def test_disjoint_slices_are_no_race_and_overlapping_ones_are(sim, case):
    bucket = torch.zeros(16)
    with sim:
        mine, theirs, overlap = list(slices_of_one_bucket(bucket))[case]
        mine.fill_(1)
        with sim.stream(sim.Stream("comm")):
            theirs.fill_(2)
    assert bool(sim.races) == overlap


def test_memory_is_reused_at_once_on_its_home_stream_and_the_late_reader_sees_the_next_tenant(sim):
    with sim:
        comm, inbox = sim.Stream("comm"), torch.empty(4)
        output = torch.ones(4)
        comm.wait_stream(sim.current_stream())
        sim.launch("send", lambda source, target: target.copy_(source), reads=[output], writes=[inbox], stream=comm)
        address = output.data_ptr()
        output.data = torch.empty(1)
        compute = torch.full((4,), 2.0)
        assert compute.data_ptr() == address
    assert [race.kernels for race in sim.races] == [("send", "full")]
    sim.run(starve=["comm"])
    assert inbox.tolist() == [2, 2, 2, 2]


def test_memory_is_not_reused_while_an_alias_holds_it_nor_by_another_stream(sim):
    with sim:
        comm = sim.Stream("comm")
        output = torch.ones(4)
        address, held = output.data_ptr(), output.detach()
        output.data = torch.empty(1)
        assert torch.ones(4).data_ptr() != address
        del held
        with sim.stream(comm):
            assert torch.ones(4).data_ptr() != address
        assert torch.ones(8).data_ptr() == address  # sizes are rounded up, as in CUDA's allocator
        assert torch.ones(1000).data_ptr() != address


def test_fresh_memory_is_nan_and_empty_is_no_kernel(sim):
    with sim:
        fresh = torch.empty(4)
        assert fresh.new_empty(2, 2).shape == (2, 2)
    sim.run()
    assert fresh.isnan().all() and sim.log == []


def test_deterministic_algorithms_fill_memory_which_shows_a_reuse_that_nobody_writes(sim):
    torch.use_deterministic_algorithms(True)
    try:
        with sim:
            comm = sim.Stream("comm")
            output = torch.ones(4)
            comm.wait_stream(sim.current_stream())
            with sim.stream(comm):
                seen = output * 1
            del output
            torch.empty(4)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [race.kernels for race in sim.races] == [("mul", "empty")]
    sim.run(starve=["comm"])
    assert seen.isnan().all()


def test_a_deadlock_names_the_heads_of_the_queues(sim):
    credit = sim.signal("credit")
    with sim:
        torch.ones(2)
        credit.wait(1)
        sim.launch("put")
        comm = sim.Stream("comm")
        comm.wait_stream(sim.current_stream())
    with pytest.raises(Deadlock, match=r"main waits for credit to be 1 \(it is 0\); comm waits for an event of main"):
        sim.check()
    with pytest.raises(Deadlock, match="credit"):
        sim.run()
    assert sim.log == ["ones"]


def credits(sim, honoured):
    """Rank 0 puts two messages into one slot of rank 1, which copies each out; a credit lets the second one go."""
    full, free = sim.signal("full"), sim.signal("free")
    slot, got = torch.zeros(2), []
    sender, receiver = sim.Stream("rank0"), sim.Stream("rank1")
    with sim:
        for generation in (1, 2):
            with sim.stream(sender):
                if honoured and generation > 1:
                    free.wait(generation - 1)
                slot.fill_(generation)
                full.set(generation)
        for generation in (1, 2):
            with sim.stream(receiver):
                full.wait(generation)
                got.append(slot.clone())
                free.set(generation)
    return got


@pytest.mark.parametrize("starve", subsets(["rank0", "rank1"]), ids=str)
def test_signals_order_streams_of_different_ranks_whoever_was_launched_first(sim, starve):
    got = credits(sim, honoured=True)
    sim.check()
    sim.run(starve)
    assert [value.tolist() for value in got] == [[1, 1], [2, 2]]


def test_a_credit_that_is_not_awaited_is_a_race(sim):
    got = credits(sim, honoured=False)
    assert [(race.kernels, race.modes) for race in sim.races] == [(("fill_", "clone"), "wr")]
    sim.run(starve=["rank1"])
    assert [value.tolist() for value in got] == [[2, 2], [2, 2]]


def test_the_host_can_not_read_or_block(sim):
    with sim:
        total = torch.ones(2).sum()
        for read in (
            total.item,
            lambda: bool(total > 1),
            total.nonzero,
            lambda: total[total > 1],
            lambda: total.equal(total),
        ):
            with pytest.raises(HostRead, match="run first"):
                read()
        for block in (
            sim.synchronize,
            sim.current_stream().synchronize,
            sim.current_stream().record_event().synchronize,
        ):
            with pytest.raises(HostRead, match="the host would block"):
                block()
        event = sim.current_stream().record_event()
        assert not event.query() and not sim.current_stream().query()
    sim.run()
    assert event.query() and total.item() == 2


def test_a_call_that_is_wrong_raises_where_it_is_made(sim):
    with sim, pytest.raises(RuntimeError, match="size|shape|broadcast"):
        torch.ones(2).add_(torch.ones(3))
    with pytest.raises(ValueError, match="no such streams; there are main"):
        sim.run(starve=["comn"])
    with pytest.raises(ValueError, match="there is a stream 'main' already"):
        sim.Stream("main")


def test_a_stream_without_a_name_gets_a_free_one(sim):
    sim.Stream("stream2")
    assert [sim.Stream().name for _ in range(2)] == ["stream3", "stream4"]
    assert Simulator().Stream().name == "stream1"


def test_what_is_no_torch_operation_is_launched_under_its_name(sim):
    with sim:
        a = torch.ones(2)
        sim.launch("all_reduce", lambda a: a.mul_(4), writes=[a])
        with sim.label("scale"):
            a.div_(2)
    sim.run()
    assert a.tolist() == [2, 2] and sim.log == ["ones", "all_reduce", "scale"]


def test_run_is_a_synchronise_and_races_stay_on_record(sim):
    with sim:
        a, comm = torch.ones(2), sim.Stream("comm")
    sim.run()
    with sim, sim.stream(comm):
        a.add_(1)
    sim.check()
    with sim:
        a.add_(1)
    assert len(sim.races) == 1
    sim.run()
    assert len(sim.races) == 1 and a.tolist() == [3, 3]


def test_streams_are_current_a_thread_and_nest(sim):
    a, b = sim.Stream("a"), sim.Stream()
    with sim.stream(a):
        with sim.stream(b), sim.stream(None):
            assert sim.current_stream() is b
        assert sim.current_stream() is a
    assert sim.current_stream() is sim.default_stream()


def train(model, optimizer, data, steps=2):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses


def test_training_in_the_simulator_is_bitwise_training_outside_and_hooks_run_on_the_current_stream(sim):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))
    twin, data, streams = copy.deepcopy(model), torch.randn(5, 3, 4), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: streams.append(sim.current_stream().name))
    with sim, sim.stream(sim.Stream("compute")):
        losses = train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), data)
    want = train(twin, torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9), data)
    sim.check()
    sim.run()
    assert streams == ["compute"] * 12
    assert [loss.item() for loss in losses] == [loss.item() for loss in want]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_gradient_read_on_another_stream_is_a_race(sim):
    weight = torch.ones(4, requires_grad=True)
    with sim:
        (weight * 2).sum().backward()
        with sim.stream(sim.Stream("comm")):
            weight.grad.add_(1)
    assert {race.streams for race in sim.races} == {("main", "comm")}


def test_out_operators_foreach_operators_views_and_inference_mode(sim):
    x, y = torch.arange(4.0), torch.empty(4)
    with sim, torch.inference_mode():
        torch.add(x, 1, out=y)
        torch._foreach_mul_([y, x], 2)
        product = torch.matmul(y.reshape(2, 2), x.view(2, 2).t())
        values, indices = torch.topk(product.flatten()[torch.tensor([3, 1, 0])], 2)
    sim.run()
    assert y.tolist() == [2, 4, 6, 8]
    assert (values.tolist(), indices.tolist()) == ([72, 32], [0, 1])
