"""Channel: messages of any size in order, a credit for every slot, waits that end with a name, replays that count."""

import contextlib
import time

import pytest
import torch
from execution import execution
from transports import (
    LateRank,
    every_transport,
    expire_after,
    gpu_only,
    late,
    late_words,
    message_on_every_rank,
    over,
    simulated_only,
)

import tkernels
from tkernels.comm import MismatchError, TkernelsError, WaitTimeoutError, interpreter
from tkernels.comm.channel import Channel
from tkernels.testing.compare import poison


def ring(ctx, **options):
    """Collective. A channel from every rank to the next one."""
    options = {"slot_bytes": 1 << 10, **options}
    return Channel(ctx, (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size, **options)


def message(ctx, rank, number, shape, dtype=torch.uint8):
    """What `rank` sends as its message of that number; every rank can make it."""
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randint(0, 120, shape, generator=generator).to(dtype).to(ctx.device)


def poison_slots(channel):
    """Collective. All bits set in the slots; nobody sends meanwhile."""
    channel.ctx.group.barrier()
    channel._slots.fill_(0xFF)
    channel.ctx.group.barrier()


@pytest.mark.quick
@pytest.mark.ranks(2, 3, 4)
@every_transport
def test_messages_of_any_size_arrive_whole(ctx, transport):
    ctx = over(ctx, transport)
    channel = ring(ctx, slot_bytes=1 << 10, copies=3)
    sizes = [1, 2, 15, 16, 17, 255, 1000, 1023, 1024, 1025, 2049, 3072, 0, 7]
    for number, size in enumerate(sizes):
        poison_slots(channel)
        channel.send(message(ctx, ctx.rank, number, (size,)))
        got = poison(torch.empty(size + 2, dtype=torch.uint8, device=ctx.device))
        channel.receive(got[1:-1])  # an odd address, and bytes beside it that must stay
        assert torch.equal(got[1:-1], message(ctx, channel.src, number, (size,))), size
        assert got[0] == got[-1] == 0xFF
    ctx.check()
    channel.close()


@pytest.mark.ranks(2)
def test_any_dtype_and_alignment_moves_bit_for_bit(ctx):
    channel = ring(ctx)
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.bool, torch.float8_e4m3fn]
    for dtype in [*dtypes, torch.complex128]:
        for start in range(3):
            sent = message(ctx, ctx.rank, start, (40,), torch.uint8).to(dtype)[start:]
            got = torch.empty(40 + start, dtype=dtype, device=ctx.device)[2 * start :]
            channel.send(sent)
            channel.receive(got)
            want = message(ctx, channel.src, start, (40,), torch.uint8).to(dtype)[start:]
            assert got.view(torch.uint8).equal(want.view(torch.uint8)), (dtype, start)
    bits = torch.tensor([0x7FC00001, -0x80000000], dtype=torch.int32, device=ctx.device)
    channel.send(bits.view(torch.float32))
    assert channel.receive(torch.empty(2, device=ctx.device)).view(torch.int32).equal(bits)
    scalar = torch.full((), float(ctx.rank), device=ctx.device)
    channel.send(scalar)
    assert channel.receive(torch.empty((), device=ctx.device)).item() == channel.src
    channel.close()


@pytest.mark.ranks(2)
@every_transport
@pytest.mark.parametrize("late_end", ["sender", "receiver", "either"])
def test_fifty_messages_in_a_row_stay_in_order(ctx, transport, late_end):
    ctx = over(ctx, transport)
    channel = Channel(ctx, *[(1, None), (None, 0)][ctx.rank], slot_bytes=256, copies=2)
    got = []
    ctx.group.barrier()
    for number in range(50):
        size = 1 + 37 * number % 600  # up to three slots
        if number % 7 == {"sender": ctx.rank == 0, "receiver": ctx.rank == 1, "either": True}[late_end] * 3:
            time.sleep(0.01)
        if ctx.rank == 0:
            channel.send(message(ctx, 0, number, (size,)))
        else:
            got.append(channel.receive(torch.empty(size, dtype=torch.uint8, device=ctx.device)))
    ctx.check()
    for number, tensor in enumerate(got):
        assert tensor.equal(message(ctx, 0, number, tensor.shape)), number
    channel.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("seed", range(3))
def test_random_delays_change_no_message(ctx, seed):
    channel = ring(ctx, slot_bytes=256, copies=2, num_programs=3)
    with execution(jitter_seed=seed, rank=ctx.rank):
        for number in range(8):
            channel.send(message(ctx, ctx.rank, number, (500,)))
            got = channel.receive(torch.empty(500, dtype=torch.uint8, device=ctx.device))
            assert got.equal(message(ctx, channel.src, number, (500,)))
    channel.close()


@simulated_only
@pytest.mark.ranks(2)
def test_a_sender_that_asks_for_no_credit_is_caught(ctx):
    """Five messages, two slots: without the credit the third is put over the first, which nobody has read."""
    wrong = {}
    for form in ("right", "wrong"):
        with tkernels.init(heap_bytes=1 << 20) as context:
            channel = Channel(context, *[(1, None), (None, 0)][ctx.rank], slot_bytes=256, copies=2)
            if form == "wrong":
                channel.credit.wait = lambda stream: None
            with LateRank(context, form):
                for number in range(5 * (1 - ctx.rank)):
                    channel.send(message(ctx, 0, number, (200,)))
            got = [channel.receive(torch.zeros(200, dtype=torch.uint8)) for _ in range(5 * ctx.rank)]
            wrong[form] = [n for n, tensor in enumerate(got) if not tensor.equal(message(ctx, 0, n, (200,)))]
    assert wrong == ({"right": [], "wrong": [0, 1, 2]} if ctx.rank == 1 else {"right": [], "wrong": []})


@simulated_only
@pytest.mark.ranks(2)
def test_a_receiver_that_does_not_wait_is_caught(ctx):
    """It finds the form of an earlier message, or none, and not that of its own."""
    for form in ("right", "wrong"):
        with tkernels.init(heap_bytes=1 << 20) as context:
            channel = ring(context)
            if form == "wrong":
                channel.arrival.wait = lambda stream: None
            poison_slots(channel)
            late(context, 0, 0.2)
            if ctx.rank == 1 and form == "wrong":
                with pytest.raises(
                    MismatchError, match="expects 200 bytes of torch.uint8, and rank 0 has sent 0 bytes"
                ):
                    channel.receive(torch.zeros(200, dtype=torch.uint8))
            elif ctx.rank == 1:
                got = channel.receive(torch.zeros(200, dtype=torch.uint8))
                assert got.equal(message(ctx, 0, 0, (200,)))
            elif form == "right":
                channel.send(message(ctx, 0, 0, (200,)))
            context.group.barrier()
            if form == "wrong":
                with pytest.raises(MismatchError):
                    context.check()


@pytest.mark.ranks(2)
@every_transport
def test_a_receiver_that_never_releases_is_named(ctx, transport):
    channel = ring(over(ctx, transport))
    channel.send(message(ctx, ctx.rank, 0, (10,)))  # compiled before a short limit runs
    channel.receive(torch.empty(10, dtype=torch.uint8, device=ctx.device))
    with tkernels.init(heap_bytes=1 << 20, transport=transport) as context:
        expire_after(context, 1.0)
        channel = Channel(context, *[(1, None), (None, 0)][ctx.rank], slot_bytes=256, copies=2)
        with pytest.raises(WaitTimeoutError) as e:
            for number in range(3 * (1 - ctx.rank)):
                channel.send(message(ctx, 0, number, (200,)))
            if ctx.rank == 1:
                time.sleep(1.5)  # a rank that is told of the fault by its peer
            while True:
                context.check()
                time.sleep(0.01)
        assert (e.value.operation, e.value.rank, e.value.peer) == ("channel send", 0, 1)
        assert (e.value.expected, e.value.seen) == (1, 0)  # generation 3 asks that generation 1 was read
        for said in ctx.group.gather(str(e.value)):  # and what rank 1 did meanwhile, which each asks in its own time
            assert "channel send: rank 0 waited 1 s for the signal of rank 1" in said


@pytest.mark.ranks(2)
def test_close_waits_for_no_rank_that_has_failed(ctx):
    context = tkernels.init(ctx.group.process_group, heap_bytes=1 << 20, timeout_s=2, default=False)
    channel = Channel(context, *[(1, None), (None, 0)][ctx.rank], slot_bytes=256)
    if ctx.rank == 0:
        context.fail("for the test")
        channel.close()
    else:
        with pytest.raises(tkernels.TkernelsError):
            channel.close()
    ctx.group.barrier()
    with contextlib.suppress(tkernels.TkernelsError):
        context.finalize()
    tkernels.init(ctx.group.process_group, heap_bytes=1 << 20, default=False).finalize()


@pytest.mark.ranks(2)
def test_a_sender_that_never_sends_is_named(ctx):
    channel = ring(ctx)
    channel.send(message(ctx, ctx.rank, 0, (10,)))
    channel.receive(torch.empty(10, dtype=torch.uint8, device=ctx.device))
    with tkernels.init(heap_bytes=1 << 20) as context:
        channel = ring(context)
        expire_after(context, 0.5)
        with pytest.raises(WaitTimeoutError) as e:
            if ctx.rank == 1:
                channel.receive(torch.empty(10, dtype=torch.uint8, device=ctx.device))
            while True:
                context.check()
                time.sleep(0.01)
        assert (e.value.operation, e.value.rank, e.value.peer) == ("channel receive", 1, 0)
        assert (e.value.expected, e.value.seen) == (1, 0)


@pytest.mark.ranks(2)
@every_transport
@pytest.mark.parametrize("kind", ["dtype", "size", "fewer slots"])
def test_channel_receive_of_another_form_than_was_sent_is_named_on_every_rank(ctx, transport, kind):
    shape, dtype, found = {
        "dtype": ((64,), torch.float16, "128 bytes of torch.float16, and rank 0 has sent 128 bytes of torch.bfloat16"),
        "size": ((40,), torch.bfloat16, "80 bytes of torch.bfloat16, and rank 0 has sent 128 bytes of torch.bfloat16"),
        "fewer slots": ((200,), torch.bfloat16, "256 bytes of torch.bfloat16, and rank 0 has sent 128 bytes of torch"),
    }[kind]
    with tkernels.init(ctx.group.process_group, heap_bytes=1 << 20, transport=transport) as context:
        channel = Channel(context, *[(1, None), (None, 0)][ctx.rank], slot_bytes=256, copies=2)
        with pytest.raises(MismatchError) as e:
            for number in range(3):  # of the first two it is right
                if ctx.rank == 0:
                    channel.send(torch.zeros(64, dtype=torch.bfloat16, device=ctx.device))
                elif number < 2:
                    channel.receive(torch.empty(64, dtype=torch.bfloat16, device=ctx.device))
                else:
                    channel.receive(torch.empty(shape, dtype=dtype, device=ctx.device))
            while True:
                context.check()
                time.sleep(0.01)
        assert f"channel receive: rank 1 expects {found}" in message_on_every_rank(ctx, e.value)


@pytest.mark.ranks(3)
def test_wrong_arguments_are_refused_before_the_first_signal(ctx):
    after, before = (ctx.rank + 1) % 3, (ctx.rank - 1) % 3
    with pytest.raises(ValueError, match="from rank 0 to rank 1 there must be dst=1 on rank 0 and src=0 on rank 1"):
        Channel(ctx, after, None if ctx.rank == 1 else before, slot_bytes=256)
    with pytest.raises(ValueError, match="dst and src by rank are"):
        Channel(ctx, ctx.rank, ctx.rank, slot_bytes=256)
    differing = "channel: the ranks' calls differ, in slot_bytes by rank: 256, 512, 1024; all must pass the same"
    with pytest.raises(MismatchError, match=differing):
        Channel(ctx, after, before, slot_bytes=256 << ctx.rank)
    for wrong in ({"dst": "next"}, {"copies": 2.5}, {"slot_bytes": None if ctx.rank else 256}):  # the last of one rank
        options = {"dst": 1 - ctx.rank, "src": 1 - ctx.rank, "slot_bytes": 256} | wrong
        with pytest.raises(TypeError, match=r"^channel: .*=('next'|2.5|None) must be a whole number"):
            Channel(ctx, **options)
    with pytest.raises(TypeError, match="takes a Context"):
        Channel(3, None, None, slot_bytes=256)
    with pytest.raises(ValueError, match="channel: copies=0 must be at least 1"):
        Channel(ctx, after, before, slot_bytes=256, copies=0)
    channel = Channel(
        ctx, *((1, None) if ctx.rank == 0 else (None, 0) if ctx.rank == 1 else (None, None)), slot_bytes=1
    )
    if ctx.rank == 2:
        with pytest.raises(ValueError, match="rank 2 has no peer to send to"):
            channel.send(torch.zeros(3, device=ctx.device))
    if ctx.rank == 0:
        with pytest.raises(ValueError, match=r"contiguous tensors, not one of strides \(1, 3\)"):
            channel.send(torch.zeros(3, 3, device=ctx.device).t())
        with pytest.raises(ValueError, match="the tensor is on meta, but the context works on"):
            channel.send(torch.zeros(3, device="meta"))
    size = channel._memory.numel()
    channel.close()
    mine = ctx.empty(size, dtype=torch.uint8)
    channel.close()  # gives back nothing of others
    other = ctx.empty(size, dtype=torch.uint8)
    assert other.data_ptr() != mine.data_ptr()
    with pytest.raises(TkernelsError, match="channel: it has been closed"):
        channel.receive(torch.zeros(3, device=ctx.device))
    for tensor in (mine, other):
        ctx.free(tensor)


@pytest.mark.ranks(2)
def test_channel_receive_counts_as_a_write_so_that_a_backward_that_has_saved_what_was_there_is_refused(ctx):
    channel, peer = ring(ctx), 1 - ctx.rank
    w, factor = torch.ones(3, device=ctx.device, requires_grad=True), torch.ones(3, device=ctx.device)
    y = w * factor
    channel.send(torch.full((3,), 5.0 + ctx.rank, device=ctx.device))
    assert channel.receive(factor).tolist() == [5.0 + peer] * 3
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    channel.close()


@pytest.mark.ranks(2)
def test_channel_refuses_what_is_no_message_and_more_programs_than_run_at_once(ctx):
    channel, ones = ring(ctx), torch.ones(3, device=ctx.device)
    for wrong, said in (
        (3, "tensor=3 must be a tensor"),
        (ones.to_sparse(), "tensor must be a strided tensor, not torch.sparse_coo"),
        (torch.nested.nested_tensor([ones, ones], layout=torch.jagged), "tensor must be one tensor, not a nested one"),
    ):
        for verb in (channel.send, channel.receive):
            with pytest.raises(TypeError, match=f"^channel: {said}"):
                verb(wrong)
    for view in (torch._neg_view(ones), torch.ones(3, dtype=torch.complex64, device=ctx.device).conj()):
        for verb in (channel.send, channel.receive):
            with pytest.raises(ValueError, match="^channel: tensor is a negated or conjugated view"):
                verb(view)
    channel.send(ones)
    assert channel.receive(torch.zeros_like(ones)).equal(ones)
    channel.close()
    if ctx.runtime == "simulated":
        most = interpreter.resident()
        with pytest.raises(ValueError, match=f"{most + 1} programs wait for each other, but .* runs {most} at once"):
            ring(ctx, num_programs=most + 1)


@pytest.mark.ranks(2)
def test_words_begin_with_zero_and_nobody_sends_before_every_ranks_do(ctx):
    with tkernels.init(heap_bytes=1 << 20) as context:
        with_ones = context.empty(1 << 16)
        with_ones.fill_(1.0)
        context.free(with_ones)
        channel = ring(context)
        assert not channel._full.any() and not channel._free.any()
        channel.close()
        with late_words(ctx.rank):
            channel = ring(context)
        channel.send(message(ctx, ctx.rank, 0, (200,)))
        got = channel.receive(torch.empty(200, dtype=torch.uint8, device=ctx.device))
        assert got.equal(message(ctx, 1 - ctx.rank, 0, (200,)))
        context.check()


@pytest.mark.ranks(2)
def test_two_channels_of_one_context_and_both_directions_do_not_mix(ctx):
    forward = ring(ctx)
    backward = Channel(ctx, 1 - ctx.rank, 1 - ctx.rank, slot_bytes=512)
    for number in range(6):
        forward.send(message(ctx, ctx.rank, number, (300,)))
        backward.send(message(ctx, ctx.rank, 100 + number, (301,)))
        got = backward.receive(torch.empty(301, dtype=torch.uint8, device=ctx.device))
        assert got.equal(message(ctx, 1 - ctx.rank, 100 + number, (301,)))
        got = forward.receive(torch.empty(300, dtype=torch.uint8, device=ctx.device))
        assert got.equal(message(ctx, 1 - ctx.rank, number, (300,)))
    backward.close()
    forward.close()


@gpu_only
@pytest.mark.ranks(2, 4)
@every_transport
@pytest.mark.parametrize("rounds", [20])
def test_a_captured_exchange_replays_with_fresh_generations(ctx, transport, rounds):
    """More replays than slots: generations that stood still would let them overwrite each other."""
    from tkernels.layers import captured

    ctx = over(ctx, transport)
    channel = ring(ctx, slot_bytes=1 << 20, copies=2)
    sent, got = (torch.zeros(1 << 19, device=ctx.device) for _ in range(2))  # all slots
    channel.send(sent)
    channel.receive(got)
    torch.cuda.synchronize()
    ctx.group.barrier()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with captured(torch.cuda.graph(graph), slots=channel.slots, streams=[side]) as replay:
        with torch.cuda.stream(side):
            channel.receive(got)
        channel.send(sent)
    for number in range(rounds):
        sent.fill_(float(100 * number + ctx.rank))
        got.fill_(-1.0)
        if number % 5 == 0:
            late(ctx, number // 5 % ctx.size, 0.05)
        replay()
        assert (got == 100 * number + channel.src).all(), number
        if number % 3 == 0:  # calls in between go on with the count
            channel.send(sent[: 1 << 18])
            assert (channel.receive(got[: 1 << 18]) == 100 * number + channel.src).all()
    ctx.check()
    channel.close()


@gpu_only
@pytest.mark.ranks(2, 4)
@every_transport
@pytest.mark.parametrize("iterations", [200])
def test_a_source_may_be_overwritten_behind_its_send(ctx, transport, iterations):
    ctx = over(ctx, transport)
    channel = ring(ctx, slot_bytes=4 << 20, copies=3)
    source = torch.empty(1 << 20, device=ctx.device)
    wrong = torch.zeros((), device=ctx.device, dtype=torch.int64)
    for number in range(iterations):
        source.fill_(float(number))
        channel.send(source)
        source.fill_(-1.0)
        if number >= 2:
            got = channel.receive(torch.empty_like(source))
            wrong += (got != number - 2).sum()
    for number in range(iterations - 2, iterations):
        wrong += (channel.receive(torch.empty_like(source)) != number).sum()
    ctx.check()
    assert wrong.item() == 0
    channel.close()
