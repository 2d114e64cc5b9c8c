"""The gradient bucket: no race whatever the timing, no wait too many, right sums; and the forms that get it wrong.

The wrong forms are what a bucket does that orders streams by hand: with the current stream only, or with all producers
on the way to the reduction but only the current one on the way back. On a GPU, `torch.cuda._sleep` on the stream that
must be late makes both of them fail every time.
"""

import contextlib
import functools
import itertools

import pytest
import torch
from streams import Simulator, subsets
from transports import STREAMED, gpu_only

import tkernels
from tkernels.comm.errors import LeaseError
from tkernels.layers.data_parallel.grad_bucket import GradBucket

NUMEL = 8  # elements of a gradient in the simulations


class CurrentStreamOnly:
    """The first wrong form: the reduction waits for the stream that is current at the flush, and for no other."""

    def __init__(self, capacity, dtype, *, reduce, deliver, comm_stream, device="cpu", dev=None, **_):
        self.dev, self.comm, self.reduce, self.deliver = (
            dev or torch.get_device_module(device),
            comm_stream,
            reduce,
            deliver,
        )
        self.buffers = [torch.zeros(capacity, dtype=dtype, device=device) for _ in range(2)]
        self.index, self.end, self.slices, self.streams = 0, 0, [], []

    def add(self, parameter, grad):
        view = self.buffers[self.index][self.end : self.end + grad.numel()]
        view.copy_(grad.view(-1))
        self.end += grad.numel()
        self.streams.append(self.dev.current_stream())

    def producers(self):
        return [self.dev.current_stream()]

    def flush(self):
        for stream in self.producers():
            self.comm.wait_event(stream.record_event())
        self.dev.current_stream().wait_event(self.comm.record_event())  # after the reduction before this one
        with self.dev.stream(self.comm):
            self.deliver(self.reduce(self.buffers[self.index][: self.end]), self.slices)
        self.index, self.end, self.streams = 1 - self.index, 0, []

    def finish(self):
        self.dev.current_stream().wait_event(self.comm.record_event())


class AllProducersOneWay(CurrentStreamOnly):
    """The second: the reduction waits for every producer, but only the current stream waits for the reduction."""

    def producers(self):
        return self.streams


class Serialised(CurrentStreamOnly):
    """Right, and slow: everybody waits for everything."""

    def producers(self):
        return self.streams

    def flush(self):
        streams = list(self.streams)
        super().flush()
        for stream in streams:
            stream.wait_event(self.comm.record_event())


def simulate(form, num_producers, fills=4):
    """Issue `fills` fills from `num_producers` streams. Returns the simulator and, for each fill, (got, want)."""
    sim = Simulator()
    producers = [sim.Stream(f"producer{i}") for i in range(num_producers)]
    comm, results = sim.Stream("comm"), []
    with sim:

        def reduce(flat):
            with sim.label(f"reduce {len(results)}"):
                return flat * 2

        def deliver(reduced, slices):
            with sim.label(f"deliver {len(results)}"):
                results.append(reduced.clone())

        bucket = form(
            NUMEL * num_producers, torch.float32, ranks=1, reduce=reduce, deliver=deliver, comm_stream=comm, dev=sim
        )
        for stream in producers:
            stream.wait_event(sim.current_stream().record_event())  # the wrong forms know nothing of their construction
        parameters = [torch.zeros(NUMEL) for _ in producers]
        for fill in range(fills):
            for i, (stream, parameter) in enumerate(zip(producers, parameters, strict=True)):
                with sim.stream(stream), sim.label(f"fill {fill}"):
                    bucket.add(parameter, torch.full((NUMEL,), float(10 * fill + i + 1)))
                    if i == num_producers - 1:
                        bucket.flush()
        bucket.finish()
    want = [
        torch.cat([torch.full((NUMEL,), 2.0 * (10 * fill + i + 1)) for i in range(num_producers)])
        for fill in range(fills)
    ]
    return sim, list(zip(results, want, strict=True))


@pytest.mark.parametrize("num_producers", [1, 2, 3])
def test_grad_bucket_every_timing_gives_the_right_sums(num_producers):
    streams = ["main", "comm", *(f"producer{i}" for i in range(num_producers))]
    for starved in subsets(streams):
        sim, results = simulate(GradBucket, num_producers)
        sim.check()
        sim.run(starve=starved)
        for fill, (got, want) in enumerate(results):
            assert torch.equal(got, want), (starved, fill)


@pytest.mark.parametrize("num_producers", [2, 3])
def test_grad_bucket_the_current_stream_alone_is_not_enough(num_producers):
    sim, results = simulate(CurrentStreamOnly, num_producers)
    kinds = {race.modes for race in sim.races}
    assert "wr" in kinds  # a copy that the reduction doesn't wait for
    sim.run(starve=["producer0"])
    assert not torch.equal(*results[0])


@pytest.mark.parametrize("num_producers", [2, 3])
def test_grad_bucket_all_producers_one_way_leaves_the_way_back(num_producers):
    sim, results = simulate(AllProducersOneWay, num_producers)
    assert {race.modes for race in sim.races} == {"rw"}  # a reduction reads what the next tenant overwrites
    sim.run(starve=["comm"])
    assert not torch.equal(*results[0])


def order(sim, first, second):
    return sim.log.index(first) < sim.log.index(second)


@pytest.mark.parametrize("form, overlaps", [(GradBucket, True), (Serialised, False)])
def test_grad_bucket_the_second_fill_does_not_wait_for_the_first_reduction(form, overlaps):
    sim, _ = simulate(form, 2)
    sim.check()
    sim.run(starve=["comm"])
    last_of_fill_1 = len(sim.log) - 1 - sim.log[::-1].index("fill 1")
    assert (last_of_fill_1 < sim.log.index("reduce 0")) == overlaps
    assert order(sim, "deliver 0", "reduce 1")


def test_grad_bucket_a_buffer_is_overwritten_after_the_last_reader_and_not_after_later_ones():
    """Fill 2 takes the buffer of fill 0: it waits for `deliver 0`, and not for reduction 1, which is queued behind."""
    sim, _ = simulate(GradBucket, 2)
    sim.run(starve=["comm"])
    copies_of_fill_2 = [i for i, name in enumerate(sim.log) if name == "fill 2"][-2:]
    assert sim.log.index("deliver 0") < copies_of_fill_2[-1] < sim.log.index("reduce 1")


class FakeStream:
    def __init__(self, dev, name):
        self.dev, self.name, self.waits = dev, name, []

    def __repr__(self):
        return self.name

    def record_event(self):
        return self.name, next(self.dev.numbers)

    def wait_event(self, event):
        self.waits.append(event[0])


class FakeDevice:
    """Streams that write down whom they wait for."""

    def __init__(self):
        self.numbers, self.current = itertools.count(), None
        self.current = self.main = FakeStream(self, "main")

    def current_stream(self):
        return self.current

    def stream(self, stream):
        dev = self

        class Within:
            def __enter__(self):
                self.before, dev.current = dev.current, stream

            def __exit__(self, *exception):
                dev.current = self.before

        return Within()


@pytest.fixture
def fake():
    dev = FakeDevice()
    dev.comm = FakeStream(dev, "comm")
    return dev


def bucket_of(dev, capacity=16, **options):
    options = {"ranks": 1, "reduce": lambda flat: flat, "comm_stream": getattr(dev, "comm", None)} | options
    return GradBucket(capacity, torch.float32, dev=dev, **options)


def test_grad_bucket_the_comm_stream_waits_once_for_each_producer(fake):
    bucket = bucket_of(fake)
    streams = [FakeStream(fake, f"s{i}") for i in range(3)]
    for stream in (*streams, *streams):
        with fake.stream(stream):
            bucket.add(torch.zeros(2), torch.ones(2))
    bucket.flush()
    assert sorted(fake.comm.waits) == ["s0", "s1", "s2"]
    assert [stream.waits for stream in streams] == [["main"]] * 3  # where the buffer was made; once each


def test_grad_bucket_one_stream_waits_as_often_as_with_waits_written_by_hand(fake):
    """Once there and, from the third fill on, once back, for each fill."""
    bucket = bucket_of(fake)
    for _ in range(6):
        for _ in range(4):
            bucket.add(torch.zeros(2), torch.ones(2))
        bucket.flush()
    assert fake.comm.waits == ["main"] * 6
    assert fake.main.waits == ["comm"] * 4
    bucket.finish()
    assert fake.main.waits == ["comm"] * 5
    bucket.finish()
    assert fake.main.waits == ["comm"] * 5


def test_grad_bucket_without_a_comm_stream_nobody_waits(fake):
    bucket = bucket_of(fake, comm_stream=None)
    for _ in range(3):
        bucket.add(torch.zeros(16), torch.ones(16))
    bucket.finish()
    assert fake.main.waits == []


def test_grad_bucket_a_large_gradient_is_waited_for_on_its_own_stream(fake):
    bucket, other = bucket_of(fake), FakeStream(fake, "other")
    with fake.stream(other):
        bucket.add(torch.zeros(17), torch.ones(17))
    assert fake.comm.waits == ["other"]


# What lies where


def recorded(capacity=16, **options):
    """A bucket on one stream, and what it delivers: (address of the fill, its values, parameters and starts)."""
    fills = []

    def reduce(flat):
        fills.append([flat.data_ptr(), flat.tolist()])
        return flat

    def deliver(reduced, slices):
        fills[-1].append([(slice.parameter, slice.start) for slice in slices])

    return GradBucket(capacity, torch.float32, **{"ranks": 1, "reduce": reduce, "deliver": deliver} | options), fills


def grad(numel, value=1.0):
    return torch.zeros(numel), torch.full((numel,), float(value))


def test_grad_bucket_a_fill_ends_where_the_next_gradient_has_no_room():
    bucket, fills = recorded()
    for value, numel in enumerate([8, 8, 1, 15, 2]):  # two exact fits
        bucket.add(*grad(numel, value))
    assert [fill[1] for fill in fills] == [[0.0] * 8 + [1.0] * 8, [2.0] + [3.0] * 15]
    bucket.finish()
    assert fills[2][1] == [4.0, 4.0]
    bucket.finish()
    assert len(fills) == 3  # nothing twice, and no empty fill


def test_grad_bucket_the_turn_survives_finish():
    """A buffer that was reduced last is not the next to be filled, however the step before ended."""
    bucket, fills = recorded()
    for _ in range(5):
        bucket.add(*grad(4))
        bucket.finish()
    addresses = [fill[0] for fill in fills]
    assert addresses == [addresses[0], addresses[1]] * 2 + [addresses[0]]
    assert addresses[0] != addresses[1]


def test_grad_bucket_a_gradient_of_exactly_the_capacity_is_copied_and_a_larger_one_is_its_own_buffer():
    bucket, fills = recorded()
    fits, larger = grad(16, 2), grad(17, 3)
    bucket.add(*fits)
    bucket.add(*larger)
    bucket.add(*grad(1, 4))
    bucket.finish()
    assert [len(fill[1]) for fill in fills] == [16, 17, 1]
    assert fills[0][0] != fits[1].data_ptr()
    assert fills[1][0] == larger[1].data_ptr()
    assert fills[0][0] != fills[2][0]  # a large one takes nobody's turn


def test_grad_bucket_a_large_gradient_of_another_dtype_is_converted():
    bucket, fills = recorded()
    bucket.add(torch.zeros(17), torch.ones(17, dtype=torch.bfloat16))
    assert fills[0][1] == [1.0] * 17


def test_grad_bucket_empty_parameters_take_no_room():
    bucket, fills = recorded()
    assert bucket.add(*grad(0)).numel() == 0
    bucket.finish()
    assert fills == []


def test_grad_bucket_no_gradient_counts_as_zeros():
    bucket, fills = recorded(copies=1)
    bucket.add(*grad(4, 7))
    bucket.flush()
    bucket.add(torch.zeros(2), None)
    bucket.add(torch.zeros(18), None)
    bucket.finish()
    assert [fill[1] for fill in fills[1:]] == [[0.0] * 2, [0.0] * 18]


def test_grad_bucket_a_second_gradient_of_a_parameter_is_added():
    bucket, fills = recorded()
    parameter, first = grad(4, 1)
    bucket.add(parameter, first)
    bucket.add(*grad(4, 5))
    bucket.add(parameter, torch.full((4,), 2.0))
    bucket.finish()
    assert fills[0][1] == [3.0] * 4 + [5.0] * 4


def test_grad_bucket_a_gradient_that_is_its_slice_is_not_copied():
    bucket, fills = recorded()
    parameter = torch.zeros(2, 2)
    with bucket.write(parameter) as view:
        view.fill_(3.0)
    view[0, 0] = 4.0
    assert bucket.add(parameter, view).data_ptr() == view.data_ptr()
    bucket.finish()
    assert fills[0][1] == [4.0, 3.0, 3.0, 3.0]


@pytest.mark.parametrize("starved", subsets(["main", "first", "second", "comm"]))
def test_grad_bucket_streams_that_accumulate_into_one_slice_are_ordered(starved):
    """Micro-batches on two streams: autograd's copy, a kernel that adds, and a slice that is its own gradient."""
    sim = Simulator()
    first, second, comm = (sim.Stream(name) for name in ("first", "second", "comm"))
    totals = []
    with sim:
        bucket = bucket_of(sim, comm_stream=comm, deliver=lambda reduced, slices: totals.append(reduced.clone()))
        parameter = torch.zeros(8)
        with sim.stream(first):
            view = bucket.add(parameter, torch.full((8,), 1.0))
        with sim.stream(second):
            bucket.add(parameter, torch.full((8,), 2.0))
        with sim.stream(first):
            with bucket.write(parameter) as view:
                view.add_(4.0)
            bucket.add(parameter, view)
        bucket.finish()
    sim.check()
    sim.run(starve=starved)
    assert torch.equal(totals[0], torch.full((8,), 7.0))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("starved", subsets(["main", "producer", "comm"]))
def test_grad_bucket_large_gradients_are_held_until_they_are_reduced(starved, fails):
    """The caller drops each at once; its memory must not be reused while the comm stream reads it."""
    sim = Simulator()
    producer, comm = sim.Stream("producer"), sim.Stream("comm")
    totals = []

    def deliver(reduced, slices):
        totals.append(reduced * 1)
        if fails:
            raise ArithmeticError

    with sim:
        bucket = bucket_of(sim, capacity=4, comm_stream=comm, deliver=deliver)
        with sim.stream(producer):
            for value in range(6):
                with pytest.raises(ArithmeticError) if fails else contextlib.nullcontext():
                    bucket.add(torch.zeros(8), torch.full((8,), float(value)))
            bucket.finish()
    sim.check()
    sim.run(starve=starved)
    assert [total.tolist() for total in totals] == [[float(value)] * 8 for value in range(6)]


def test_grad_bucket_the_average_is_of_what_the_reduction_returned():
    bucket, fills = recorded(
        ranks=4, reduce=lambda flat: flat[:2] * 4, deliver=lambda got, _: fills.append(got.tolist())
    )
    bucket.add(*grad(4, 3))
    bucket.finish()
    assert fills == [[3.0, 3.0]]


@pytest.mark.parametrize("average", [True, False])
def test_grad_bucket_without_deliver_divides_before_the_reduction_whose_result_it_ignores(average):
    for dtype in (torch.float32, torch.float16):
        seen = []
        reduce = lambda flat, seen=seen: seen.append(flat.tolist())  # noqa: E731
        bucket = GradBucket(8, dtype, ranks=4, average=average, reduce=reduce)
        for numel in (4, 12):  # the second is larger than the bucket
            bucket.add(*grad(numel, 3))
        bucket.finish()
        assert seen == [[0.75 if average else 3.0] * numel for numel in (4, 12)], dtype


def test_grad_bucket_takes_whole_numbers_and_tensors():
    bucket, _ = recorded()
    with pytest.raises(TypeError, match="gradient=3 must be a tensor"):
        bucket.add(torch.zeros(2), 3)
    for dtype, ranks, message in ((torch.float32, 2.5, "ranks=2.5"), ("float32", 2, "dtype='float32'")):
        with pytest.raises(TypeError, match=f"GradBucket: {message} must be a"):
            GradBucket(8, dtype, ranks=ranks, reduce=lambda flat: flat)


def test_grad_bucket_refuses_what_are_no_functions_streams_and_sums_by_name():
    bucket = functools.partial(GradBucket, 8, torch.float32, ranks=1)
    for options, message in (
        ({"reduce": None}, "reduce=None must be a function of a fill"),
        ({"reduce": abs, "deliver": "grad"}, "deliver='grad' must be a function"),
        ({"reduce": abs, "dev": "cpu"}, "dev='cpu' has no streams"),
        ({"reduce": abs, "average": "no"}, "average='no' must be True or False"),
        ({"reduce": abs, "comm_stream": "comm"}, "comm_stream='comm' must be a stream"),
    ):
        with pytest.raises(TypeError, match=f"GradBucket: {message}"):
            bucket(**options)
    for device in (3.5, [1], "meta"):
        with pytest.raises(ValueError, match="GradBucket: device=.* is none that buffers can be on"):
            bucket(reduce=abs, device=device)
    with pytest.raises(TypeError, match="GradBucket.finish: stream='comm' must be a stream"):
        bucket(reduce=abs).finish("comm")
    without = bucket(reduce=lambda flat: None, deliver=lambda reduced, slices: None)
    without.add(parameter := torch.nn.Parameter(torch.ones(3)), torch.ones_like(parameter))
    with pytest.raises(TypeError, match="GradBucket: what reduce returns, for deliver=None must be a tensor"):
        without.finish()


def test_grad_bucket_what_cannot_be_summed_is_refused():
    bucket, _ = recorded()
    with pytest.raises(TypeError, match="sparse=False"):
        bucket.add(torch.zeros(2, 2), torch.eye(2).to_sparse())
    with pytest.raises(TypeError, match="view_as_real"):
        bucket.add(torch.zeros(2), torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"\[3\] for one of \[2\]"):
        bucket.add(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="within the bucket's 16"), bucket.write(torch.zeros(17)):
        pass
    with pytest.raises(ValueError, match="capacity=0"):
        recorded(capacity=0)
    with pytest.raises(TypeError, match="complex64"):
        GradBucket(4, torch.complex64, ranks=1, reduce=None)


def test_grad_bucket_a_fill_is_not_reduced_while_a_kernel_writes_it():
    bucket, _ = recorded()
    with bucket.write(torch.zeros(2)), pytest.raises(LeaseError, match="write"):
        bucket.flush()


# On GPUs, with real streams. The lever is a kernel that sleeps on the stream that must be late.

ELEMENTS = 1 << 16
SLEEPS = [(1, 50.0), (1000, 1.0)]  # iterations, and about how many milliseconds a sleep takes


def sleep(milliseconds):
    torch.cuda._sleep(int(milliseconds * 2e6))  # cycles, of a clock of nearly 2 GHz


def all_reduce(ctx, backend, flat):
    if backend == "tkernels":
        return tkernels.all_reduce(flat, ctx=ctx)
    torch.distributed.all_reduce(flat, group=ctx.group.process_group)
    return flat


def summed(ctx, backend, *gradients):
    return all_reduce(ctx, backend, torch.cat(gradients)).clone()


@gpu_only
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("backend", STREAMED)
@pytest.mark.parametrize(
    "form, iterations, milliseconds", [*((GradBucket, *case) for case in SLEEPS), (CurrentStreamOnly, *SLEEPS[0])]
)
def test_grad_bucket_the_reduction_waits_for_hooks_on_two_streams(ctx, backend, form, iterations, milliseconds):
    """Two forward streams, hence two hook streams: the first hook is held up, the second one flushes at once."""
    main, comm = torch.cuda.current_stream(), torch.cuda.Stream()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    weights = [torch.nn.Parameter(torch.ones(ELEMENTS, device=ctx.device)) for _ in streams]
    data = [torch.arange(ELEMENTS, device=ctx.device).float() % 97 + 100 * i + ctx.rank for i in range(2)]
    total, wrong = torch.zeros(2 * ELEMENTS, device=ctx.device), torch.zeros((), device=ctx.device)
    bucket = form(
        2 * ELEMENTS,
        torch.float32,
        ranks=1,
        reduce=lambda flat: all_reduce(ctx, backend, flat),
        deliver=lambda reduced, slices: total.copy_(reduced),
        comm_stream=comm,
        device=ctx.device,
    )
    order, on = [], []

    def ready(weight):
        if not order:
            sleep(milliseconds)
        bucket.add(weight, weight.grad)
        weight.grad = None
        order.append(0 if weight is weights[0] else 1)
        on.append(torch.cuda.current_stream().cuda_stream)
        if len(order) == 2:
            bucket.flush()

    for weight in weights:
        weight.register_post_accumulate_grad_hook(ready)
    for iteration in range(iterations + 1):  # the first one makes workspaces, which synchronises, and is not counted
        order.clear()
        on.clear()
        gradients = [values * (iteration + 1) for values in data]
        losses = []
        for stream, weight, gradient in zip(streams, weights, gradients, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                losses.append((weight * gradient).sum())
        for stream in streams:
            main.wait_stream(stream)
        (losses[0] + losses[1]).backward()
        bucket.finish()
        assert sorted(on) == sorted(stream.cuda_stream for stream in streams)
        if iteration > 0:
            wrong += (total != summed(ctx, backend, *(gradients[index] for index in order))).any()
    assert (wrong.item() == 0) == (form is GradBucket), f"{wrong.item():.0f} of {iterations} sums are wrong"


@gpu_only
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("backend", STREAMED)
@pytest.mark.parametrize(
    "form, iterations, milliseconds", [*((GradBucket, *case) for case in SLEEPS), (AllProducersOneWay, *SLEEPS[0])]
)
def test_grad_bucket_a_buffer_is_not_overwritten_before_its_reduction(ctx, backend, form, iterations, milliseconds):
    """Each reduction is held up, while two streams fill two buffers four times."""
    main, comm = torch.cuda.current_stream(), torch.cuda.Stream()
    streams, fills = [torch.cuda.Stream(), torch.cuda.Stream()], 4
    parameters = [torch.zeros(ELEMENTS, device=ctx.device) for _ in streams]
    gradients = [
        [torch.full((ELEMENTS,), float(10 * fill + i + ctx.rank + 1), device=ctx.device) for i in range(2)]
        for fill in range(fills)
    ]
    want = [summed(ctx, backend, *pair) for pair in gradients]
    totals, wrong = torch.zeros(fills, 2 * ELEMENTS, device=ctx.device), torch.zeros((), device=ctx.device)
    delivered = itertools.count()

    def reduce(flat):
        sleep(milliseconds)
        return all_reduce(ctx, backend, flat)

    bucket = form(
        2 * ELEMENTS,
        torch.float32,
        ranks=1,
        reduce=reduce,
        deliver=lambda reduced, slices: totals[next(delivered) % fills].copy_(reduced),
        comm_stream=comm,
        device=ctx.device,
    )
    for iteration in range(iterations + 1):  # the first one makes workspaces, which synchronises, and is not counted
        for stream in streams:
            stream.wait_stream(main)
        for pair in gradients:
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    bucket.add(parameters[i], pair[i])
                    if i == 1:
                        bucket.flush()
        bucket.finish()
        if iteration > 0:
            wrong += torch.stack([(got != expected).any() for got, expected in zip(totals, want, strict=True)]).any()
    assert (wrong.item() == 0) == (form is GradBucket), f"{wrong.item():.0f} of {iterations} iterations are wrong"
