"""P2P: what is sent is not given away before it was read, and nothing waits for that; handles, shapes, and misuse."""

import copy
import gc
import pickle
import time
import uuid
import warnings
from collections import Counter
from types import SimpleNamespace

import numpy
import pytest
import torch
import triton
import triton.language as tl
from streams import Race, Simulator, subsets
from test_pipeline import PEER, Ranks, Recorder
from torch.distributed.device_mesh import init_device_mesh
from transports import every_transport, gpu_only, largest_free, late, message_on_every_rank, over, own_gpus

import tkernels
from tkernels.comm import HeapExhaustedError, LeaseError, MismatchError, WaitTimeoutError
from tkernels.comm.context import Context, as_context
from tkernels.layers.lease import Lease
from tkernels.layers.pipeline.communicator import P2PCommunicator
from tkernels.layers.pipeline.memory import custom_backward, deallocate_output_tensor
from tkernels.layers.pipeline.transports import EDGES

BACKENDS = ["tkernels", pytest.param("torch", marks=own_gpus)]
every_backend = pytest.mark.parametrize("backend", BACKENDS)


# On simulated streams


class Wire:
    """Transfers of one rank in the simulator: a send copies to a peer's memory, a receive from it."""

    def __init__(self, sim, size=512):
        self.sim = sim
        self.theirs = [torch.zeros(size) for _ in range(8)]
        self.sent = 0

    def send(self, edge, tensor):
        self.sim.launch("send", lambda x, out: out.copy_(x), reads=[tensor], writes=[self.theirs[self.sent]])
        self.sent += 1

    def receive(self, edge, tensor):
        self.sim.launch("receive", lambda out: out.fill_(7.0), writes=[tensor])


def communicator(sim, **options):
    wire = Wire(sim)
    return P2PCommunicator(Ranks(0, 4), backend=wire, dev=sim, stream=sim.Stream("comm"), **options), wire


def produce(sim, value):
    with sim.label(f"produce {value:g}"):
        return torch.full((512,), value)


def send_unleased(comm, edge, tensor):
    """The wrong form: ordered behind its producer, and nobody holds the storage."""
    lease = Lease(None, dev=comm.dev)
    with lease.write():
        pass
    with lease.read(comm.streams[edge]), comm.dev.stream(comm.streams[edge]):
        return comm._transport.send(edge, tensor)


def three_sends(sim, form):
    """Three outputs, each sent and freed, each followed by the compute that takes the memory that is free."""
    comm, wire = communicator(sim, max_inflight=2)
    with sim:
        for number in range(3):
            output = produce(sim, float(number + 1))
            if form == "free before wait":  # what the schedules of the field did: the send reads what is already free
                send_unleased(comm, "send_next", output)
            elif form == "wait at once":  # what mended it
                comm.isend(output, 1).wait()
            else:
                comm.isend(output, 1, deallocate=True).release()
            del output
            produce(sim, -1.0 - number)  # the next compute
        comm.drain()
    return wire


STREAMS = subsets(["main", "comm"])


@pytest.mark.parametrize("starve", STREAMS, ids=str)
def test_deallocate_output_tensor_lets_an_output_be_sent_whole_whatever_runs_late(starve):
    sim = Simulator()
    wire = three_sends(sim, "leased")
    sim.check()
    sim.run(starve=starve)
    assert [theirs[0].item() for theirs in wire.theirs[:3]] == [1.0, 2.0, 3.0]


def test_p2p_communicator_memory_that_is_free_before_the_send_has_read_it_is_found():
    sim = Simulator()
    wire = three_sends(sim, "free before wait")
    with pytest.raises(Race, match="'send' on comm reads and 'produce -1' on main writes"):
        sim.check()
    assert sim.races[0].modes in ("rw", "wr") and set(sim.races[0].streams) == {"main", "comm"}
    sim.run(starve=["comm"])
    assert [theirs[0].item() for theirs in wire.theirs[:3]] != [1.0, 2.0, 3.0]


def overlaps(form):
    """Whether the compute behind a send runs while the send is held up."""
    sim = Simulator()
    three_sends(sim, form)
    sim.check()
    sim.run(starve=["comm"])
    return sim.log.index("produce -1") < sim.log.index("send")


def test_p2p_communicator_the_next_compute_does_not_wait_for_the_send():
    assert overlaps("leased")
    assert not overlaps("wait at once")


def test_p2p_communicator_nothing_waits_on_the_compute_stream_at_issue():
    sim = Simulator()
    comm, _ = communicator(sim, max_inflight=2)
    with sim:
        for _ in range(2):
            output, waits = produce(sim, 1.0), sim.waits
            comm.isend(output, 1, deallocate=True).release()
            assert sim.waits - waits == 1  # comm, for the producer
        output, waits = produce(sim, 1.0), sim.waits
        comm.isend(output, 1, deallocate=True).release()
        assert sim.waits - waits == 2  # and this stream, for the oldest: only two are in flight
        assert comm.num_in_flight == {"send_next": 2, "send_prev": 0}
        comm.drain()
        assert comm.num_in_flight == {"send_next": 0, "send_prev": 0}
    sim.check()


def five_sends_of_kept_outputs(sim, comm):
    """Waits of the compute stream for sends whose outputs are still there; then these are freed, and others made."""
    kept, sends = [], []
    with sim:
        for number in range(5):
            kept.append(produce(sim, float(number + 1)))
            waits = sim.waits
            comm.isend(kept[-1], 1).release()
            sends.append(sim.waits - waits - 1)  # without that of comm, for the producer
        waits = sim.waits
        kept.clear()
        comm.irecv((512,), None, 3)[1].release()  # whatever comes next
        held = comm.num_in_flight["send_next"]
        for number in range(5):
            produce(sim, -1.0 - number)
        comm.drain()
        produce(sim, -9.0)
    return sends, sim.waits - waits, held


@pytest.mark.parametrize("starve", STREAMS, ids=str)
def test_isend_makes_nothing_wait_for_a_send_whose_memory_nobody_freed(starve):
    sim = Simulator()
    comm, wire = communicator(sim, max_inflight=2)
    sends, _, held = five_sends_of_kept_outputs(sim, comm)
    assert sends == [0] * 5
    assert held == 2  # memory that was freed stays bounded: this stream is behind the other three
    sim.check()
    sim.run(starve=starve)
    assert [theirs[0].item() for theirs in wire.theirs[:5]] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_isend_that_holds_no_memory_because_nobody_freed_it_is_a_race(monkeypatch):
    """The wrong form of it: memory that is freed later goes back while it is being sent."""
    monkeypatch.setattr(P2PCommunicator, "_let_go", lambda comm, next_send=None: comm._in_flight["send_next"].clear())
    sim = Simulator()
    comm, _ = communicator(sim, max_inflight=2)
    five_sends_of_kept_outputs(sim, comm)
    with pytest.raises(Race, match="'send' on comm reads and 'produce -[1-5]' on main writes"):
        sim.check()


def test_isend_of_views_of_one_tensor_and_to_two_peers_counts_its_own_leases_as_nobody():
    """Each message has two leases of a storage, and a part of it that is still used; only the first two are freed."""
    sim = Simulator()
    comm, wire = communicator(sim, max_inflight=1)
    wire.theirs *= 2
    with sim:
        kept = []
        for number in range(4):
            pair = produce(sim, float(number)).view(2, 256)
            comm.isend(list(pair), 1).release()
            comm.isend(list(pair), 3).release()
            if number >= 2:
                kept.append(pair[1])
            del pair
        assert comm.num_in_flight == {"send_next": 2, "send_prev": 2}
        kept.clear()
        comm.irecv((512,), None, 3)[1].release()
        assert comm.num_in_flight == {"send_next": 1, "send_prev": 1}
        comm.drain()
    sim.check()


def test_p2p_communicator_the_block_is_handed_out_again_after_the_drain_and_not_before():
    sim = Simulator()
    comm, _ = communicator(sim)
    with sim:
        output = produce(sim, 1.0)
        address = output.data_ptr()
        handle = comm.isend(output, 1)
        deallocate_output_tensor(output, handle)
        handle.release()
        assert produce(sim, 2.0).data_ptr() != address
        comm.drain()
        assert produce(sim, 3.0).data_ptr() == address
    sim.check()


@pytest.mark.parametrize("starve", subsets(["main", "comm", "side"]), ids=str)
def test_p2p_communicator_the_producer_may_be_on_a_side_stream(starve):
    """Without its name the send would start too early, and its memory go back to a stream that still writes it."""
    sim = Simulator()
    comm, wire = communicator(sim)
    with sim:
        side = sim.Stream("side")
        with sim.stream(side):
            output = produce(sim, 5.0)
        comm.isend(output, 1, deallocate=True, producers=[side]).release()
        del output
        with sim.stream(side):
            produce(sim, 6.0)
        comm.drain()
        with sim.stream(side):
            produce(sim, 7.0)
    sim.check()
    sim.run(starve=starve)
    assert wire.theirs[0].eq(5.0).all()


def test_p2p_communicator_a_producer_that_nobody_names_is_a_race():
    sim = Simulator()
    comm, _ = communicator(sim)
    with sim:
        with sim.stream(sim.Stream("side")):
            output = produce(sim, 5.0)
        comm.isend(output, 1).release()
        comm.drain()
    assert {frozenset(race.streams) for race in sim.races} == {frozenset({"side", "comm"})}


@pytest.mark.parametrize("starve", STREAMS, ids=str)
def test_p2p_communicator_one_tensor_goes_to_two_peers_and_is_held_until_both_have_it(starve):
    sim = Simulator()
    comm, wire = communicator(sim)
    with sim:
        output = produce(sim, 4.0)
        comm.isend(output, 1).release()
        comm.isend(output, 3, deallocate=True).release()
        produce(sim, -1.0)
        comm.drain()
        produce(sim, -2.0)
    sim.check()
    sim.run(starve=starve)
    assert wire.theirs[0].eq(4.0).all() and wire.theirs[1].eq(4.0).all()


@pytest.mark.parametrize("starve", STREAMS, ids=str)
@pytest.mark.parametrize("end", ["wait", "release", "drop"])
def test_p2p_communicator_a_received_tensor_that_nobody_uses_is_held_until_it_has_arrived(starve, end):
    sim = Simulator()
    comm, _ = communicator(sim)
    with sim:
        scratch = produce(sim, 1.0)  # whose memory the receive gets
        scratch.add_(1.0)
        del scratch
        tensor, handle = comm.irecv((512,), None, 3)
        if end == "wait":
            handle.wait()
            copied = tensor.clone()
        elif end == "release":
            handle.release()
        del tensor
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del handle
        produce(sim, -1.0)
        comm.drain()
        produce(sim, -2.0)
    sim.check()
    sim.run(starve=starve)
    assert end != "wait" or copied.eq(7.0).all()


def test_p2p_communicator_receives_that_nobody_waits_for_at_home_are_held_in_a_bounded_number():
    sim = Simulator()
    comm = P2PCommunicator(Ranks(0, 4), backend=Wire(sim), dev=sim, stream=sim.Stream("comm"), max_inflight=3)
    with sim:
        elsewhere = sim.Stream("elsewhere")
        for _ in range(10):
            _, handle = comm.irecv((2,), None, 3)
            handle.wait(elsewhere)
            handle.release()
        assert len(comm._dropped) == 4  # the last one has not been looked at
    sim.check()
    comm.drain()
    assert len(comm._dropped) == 0


def test_p2p_communicator_a_drain_keeps_the_newest_and_what_is_closed_holds_and_sends_nothing():
    sim = Simulator()
    comm, wire = communicator(sim, max_inflight=3)
    with sim:
        for number in range(3):
            output = produce(sim, float(number))
            comm.isend(output, 1, deallocate=True).release()
            del output
        comm.drain(keep=2)
        assert comm.num_in_flight == {"send_next": 2, "send_prev": 0}
        comm.close()
        assert comm.num_in_flight == {"send_next": 0, "send_prev": 0}
        produce(sim, -1.0)
        with pytest.raises(ValueError, match="send_next: rank 0 of 4 has no peer, or the communicator was closed"):
            comm.isend(produce(sim, 1.0), 1)
        with pytest.raises(ValueError, match="recv_prev: rank 0 of 4 has no peer, or the communicator was closed"):
            comm.irecv((1,), None, 3)
    sim.check()
    sim.run(starve=["comm"])
    assert [theirs[0].item() for theirs in wire.theirs[:3]] == [0.0, 1.0, 2.0]


def test_p2p_communicator_activations_of_floats_alone_want_a_gradient():
    sim = Simulator()
    comm, _ = communicator(sim)
    with sim:
        for peer, dtype, wants in ((3, None, True), (3, torch.int64, False), (1, None, False)):
            received, handle = comm.irecv((2,), dtype, peer)
            handle.wait()
            assert received.requires_grad == wants, (peer, dtype)


def test_p2p_communicator_an_exception_between_issue_and_release_gives_nothing_away():
    sim = Simulator()
    comm, wire = communicator(sim)
    with sim:
        output = produce(sim, 1.0)
        with pytest.raises(ZeroDivisionError):
            with comm.isend(output, 1, deallocate=True):
                raise ZeroDivisionError
        produce(sim, 2.0)
        assert comm.open_handles == []
        comm.drain()
    sim.check()
    sim.run(starve=["comm"])
    assert wire.theirs[0].eq(1.0).all()


# Handles


def test_p2p_communicator_a_handle_is_closed_once_and_says_so_otherwise():
    sim = Simulator()
    comm, _ = communicator(sim)
    with sim:
        handle = comm.isend(produce(sim, 1.0), 1)
        assert comm.open_handles == ["send_next of rank 0"] and "open" in repr(handle)
        assert not handle.query()
        with pytest.raises(TypeError, match="P2PHandle.wait: stream='comm' must be a stream"):
            handle.wait("comm")
        handle.wait()
        handle.wait()
        assert comm.open_handles == []
        handle.release()
        handle.release()
        for use in (handle.wait, handle.query, lambda: deallocate_output_tensor(torch.ones(1), handle)):
            with pytest.raises(LeaseError, match="the handle of send_next of rank 0 has been released"):
                use()
        with comm.isend(produce(sim, 1.0), 3) as handle:
            pass
        with pytest.raises(LeaseError, match="send_prev"):
            handle.wait()
    with pytest.warns(ResourceWarning, match="the handle of send_next of rank 0 was dropped; call wait"):
        with sim:
            comm.isend(produce(sim, 1.0), 1)
        gc.collect()
    sim.check()
    sim.run()


@pytest.mark.parametrize("structure", ["tensor", "list", "dict"])
def test_deallocate_output_tensor_swaps_the_tensor_holds_the_storage_and_keeps_the_graph(structure):
    sim = Simulator()
    comm = P2PCommunicator(Ranks(0, 4), backend=Wire(sim), dev=sim, stream=sim.Stream("comm"))
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    grads = [torch.arange(6.0).view(2, 3) - 2, torch.ones(2, 3)]

    def outputs():
        made = [x * x, x.exp()]
        return {"tensor": made[0], "list": made, "dict": dict(zip("ab", made, strict=True))}[structure]

    def parts(value):
        return [value] if structure == "tensor" else list(value.values()) if structure == "dict" else value

    used = grads[: len(parts(outputs()))]
    torch.autograd.backward(parts(outputs()), used)
    want, x.grad = x.grad, None

    out = outputs()
    nodes, addresses = [t.grad_fn for t in parts(out)], [t.data_ptr() for t in parts(out)]
    handle = comm.isend(out, 1)
    deallocate_output_tensor(out, handle)
    assert [t.numel() for t in parts(out)] == [1] * len(used) and [t.grad_fn for t in parts(out)] == nodes
    (message,) = comm._in_flight["send_next"]
    assert [entry[2].untyped_storage().data_ptr() for entry in message._deferred] == addresses
    handle.release()
    custom_backward(out, used if structure != "tensor" else used[0])
    assert torch.equal(x.grad, want)
    deallocate_output_tensor(None, True)


def test_custom_backward_refuses_gradients_of_another_number_or_shape():
    x = torch.ones(3, 2, requires_grad=True)
    out = x * 2
    deallocate_output_tensor(out, True)
    for grads, found in ((torch.ones(2), r"\[\(2,\)\]"), ([torch.ones(3, 2)] * 2, r"\[\(3, 2\), \(3, 2\)\]")):
        with pytest.raises(ValueError, match=rf"the outputs were of shapes \[\(3, 2\)\], the gradients are of {found}"):
            custom_backward(out, grads)
    custom_backward(out, torch.ones(3, 2))
    assert x.grad.tolist() == [[2.0, 2.0]] * 3
    with pytest.raises(ValueError, match="an output has no gradient to compute"):
        custom_backward(torch.ones(1), None)


def test_deallocate_output_tensor_takes_megatrons_arguments():
    out = torch.ones(3)
    for flag in ([], [False], [None]):  # Megatron's default is to leave it
        deallocate_output_tensor(out, *flag)
    deallocate_output_tensor(out, deallocate_pipeline_outputs=False)
    assert out.numel() == 3
    for flag in ("False", 1):
        with pytest.raises(TypeError, match=f"deallocate_pipeline_outputs={flag!r} must be True or False"):
            deallocate_output_tensor(out, flag)
    deallocate_output_tensor(None)
    deallocate_output_tensor([out], deallocate_pipeline_outputs=True)
    assert out.numel() == 1


def test_deallocate_output_tensor_and_isend_refuse_views_by_name_before_anything_is_sent_or_swapped():
    sim = Simulator()
    comm = P2PCommunicator(Ranks(0, 4), backend=(wire := Wire(sim)), dev=sim, stream=sim.Stream("comm"))
    whole = torch.ones(4, 4)
    outputs = {"a": torch.ones(3), "b": whole[1:]}
    with pytest.raises(ValueError, match=r"a \(3, 4\) view can't be deallocated.*by .clone\(\)"):
        deallocate_output_tensor(outputs, True)
    with pytest.raises(ValueError, match="view can't be deallocated"):
        comm.isend(outputs, 1, deallocate=True)
    assert outputs["a"].numel() == 3 and wire.sent == 0
    with pytest.raises(ValueError, match=r"deallocated to one element, not one of shape \(4, 4\)"):
        custom_backward(whole, whole)
    received = torch.ones(3, requires_grad=True)
    for use in (lambda out: deallocate_output_tensor(out, True), lambda out: comm.isend(out, 1, deallocate=True)):
        with pytest.raises(ValueError, match=r"a \(3,\) leaf that needs a gradient can't be deallocated"):
            use([torch.ones(3), received])
    assert received.numel() == 3 and wire.sent == 0
    with pytest.raises(TypeError, match="takes tensors, or lists or dicts of them, not int"):
        deallocate_output_tensor([1], True)


def test_p2p_communicator_wrong_arguments_are_refused_by_name():
    sim = Simulator()
    comm = P2PCommunicator(Ranks(0, 4), backend=Wire(sim), dev=sim, stream=sim.Stream("comm"), dtype=torch.bfloat16)
    for call, message in [
        (lambda: P2PCommunicator(Ranks(0, 1), backend="mpi"), "backend='mpi' is unknown; use 'tkernels' or 'torch'"),
        (lambda: P2PCommunicator(Ranks(0, 4), backend=Wire(sim), max_inflight=0), "max_inflight=0 must be at least 1"),
        (lambda: comm.isend(torch.ones(1), 2), r"can't send to rank 2: .* before it \(3\) and the one after it \(1\)"),
        (lambda: comm.irecv((1,), None, 0), "can't receive from rank 0"),
        (lambda: comm.isend(torch.ones(2, 3).t(), 1), r"contiguous tensors, not one of strides \(1, 3\)"),
        (lambda: comm.send_forward(torch.ones(1), False), "a torch.float32 tensor, but the peer receives torch.bfloat"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    for wrong, message in (
        ({"dev": "cuda"}, "dev='cuda' must be torch.cuda, or another that has its streams"),
        ({"dev": torch.device("cpu")}, r"dev=device\(type='cpu'\) must be torch.cuda"),
        ({"dev": sim, "stream": "main"}, "stream='main' must be a SimulatedStream, or None"),
        ({"dev": sim, "variable_seq_lengths": "no"}, "variable_seq_lengths='no' must be True or False"),
    ):
        with pytest.raises(TypeError, match=f"P2PCommunicator: {message}"):
            P2PCommunicator(Ranks(0, 4), backend=Wire(sim), **wrong)
    for wrong in ({"producers": 3}, {"producers": ["main"]}, {"home": "main"}):
        with pytest.raises(TypeError, match="isend: .* must be a .*tream"):
            comm.isend(torch.ones(1), 1, **wrong)
    t, shape = torch.ones(1, dtype=torch.bfloat16), (1,)
    for call, name in (
        (lambda: comm.isend(t, t.expand(2)), "isend: dst"), (lambda: comm.irecv(shape, None, t.expand(2)), "irecv: src")
    ):  # fmt: skip
        with pytest.raises(TypeError, match=rf"P2PCommunicator.{name}=tensor.* must be a whole number"):
            call()
    for call, name in (
        (lambda: comm.recv_forward(shape, "x"), "is_first_stage"),
        (lambda: comm.recv_backward(shape, "x"), "is_last_stage"),
        (lambda: comm.send_forward(t, "x"), "is_last_stage"),
        (lambda: comm.send_backward(t, "x"), "is_first_stage"),
        (lambda: comm.send_forward_recv_backward(t, shape, "x"), "is_last_stage"),
        (lambda: comm.send_backward_recv_forward(t, shape, "x"), "is_first_stage"),
        (lambda: comm.send_forward_recv_forward(None, "x", shape), "recv_prev"),
        (lambda: comm.send_forward_recv_forward(None, False, shape, "x"), "overlap_p2p_comm"),
        (lambda: comm.send_backward_recv_backward(None, "x", shape), "recv_next"),
        (lambda: comm.send_forward_backward_recv_forward_backward(t, t, "x", False, shape), "recv_prev"),
        (lambda: comm.send_forward_backward_recv_forward_backward(t, t, False, "x", shape), "recv_next"),
    ):
        with pytest.raises(TypeError, match=f"P2PCommunicator: {name}='x' must be True or False"):
            call()
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="P2PCommunicator: .* can't be copied or pickled; keep it out of what is"):
            copied(comm)
    options = {"variable_seq_lengths": True, "dev": sim, "stream": sim.Stream("any")}
    with pytest.raises(ValueError, match=r"variable_seq_lengths: sends up to 8 dimensions, not \(1, 1, 1"):
        P2PCommunicator(Ranks(0, 4), backend=Wire(sim), **options).send_forward(torch.ones([1] * 9), False)
    alone = P2PCommunicator(Ranks(0, 1), backend=Wire(sim), dev=sim, stream=sim.Stream("alone"))
    assert alone.recv_forward((1,), True) is None and alone.send_forward(torch.ones(1), True) is None
    with pytest.raises(ValueError, match="rank 0 of 1 has no peer"):
        alone.send_forward(torch.ones(1), False)
    assert comm.open_handles == [] and comm.num_in_flight == {"send_next": 0, "send_prev": 0}
    assert set(comm.streams) == set(EDGES) == set(PEER)


# As Megatron's schedules use it; test_megatron.py runs those themselves


def config(**options):
    defaults = {"pipeline_dtype": torch.bfloat16, "variable_seq_lengths": False, "mtp_standalone": False}
    return SimpleNamespace(virtual_pipeline_model_parallel_size=None, **defaults | options)


def test_p2p_communicator_takes_megatrons_config_and_has_what_its_schedules_read():
    sim = Simulator()
    for rank, options in ((0, {"virtual": 2}), (3, {"mtp_standalone": True}), (1, {"variable_seq_lengths": True})):
        options, virtual = dict(options), options.get("virtual")
        options.pop("virtual", None)
        given = config(**options)
        given.virtual_pipeline_model_parallel_size = virtual
        comm = P2PCommunicator(pp_group=(group := Ranks(rank, 4)), config=given, backend=Wire(sim), dev=sim)
        assert comm.config is given and comm.pp_group is group.process_group and comm.dtype is torch.bfloat16
        assert comm.variable_seq_lengths == (rank != 0) and comm.virtual_pipeline_model_parallel_size == virtual
        assert (comm.is_pp_first_stage, comm.is_pp_last_stage) == (rank == 0, rank == 3)
        assert (comm.total_stages, comm.current_stage) == (4, rank)
    plain, _ = communicator(sim)
    assert plain.config is None and plain.virtual_pipeline_model_parallel_size is None and plain.dtype is torch.float32


def test_p2p_communicator_refuses_a_config_that_says_nothing_or_something_else():
    make = lambda *arguments, **options: P2PCommunicator(Ranks(0, 4), *arguments, backend=Recorder(), **options)  # noqa: E731
    for given, options, error, message in [
        ("nccl", {}, TypeError, "config has Megatron's attributes, .* and 'nccl' has not; pass options by name"),
        (config(), {"dtype": torch.float32}, ValueError, "dtype and variable_seq_lengths were passed beside a config"),
        (config(), {"variable_seq_lengths": True}, ValueError, "beside a config, which says them too; leave them out"),
        (config(pipeline_dtype=None), {}, ValueError, "config.pipeline_dtype is None; set it to the dtype"),
        (config(pipeline_dtype="bfloat16"), {}, TypeError, "config.pipeline_dtype='bfloat16' must be a torch.dtype"),
    ]:
        with pytest.raises(error, match=message):
            make(given, **options)
    P2PCommunicator(Ranks(0, 1), config(pipeline_dtype=None), backend=Recorder())  # one stage exchanges nothing


def test_p2p_communicator_returns_none_in_the_place_of_each_tensor_at_the_ends_of_the_pipeline():
    comm = P2PCommunicator(Ranks(0, 4), backend=Recorder())
    shapes, mine = [(2, 3), (4,)], [torch.ones(2, 3), torch.ones(4)]
    for none in (
        comm.recv_forward(shapes, True),
        comm.recv_backward(shapes, True),
        comm.send_forward_recv_backward(mine, shapes, True),
        comm.send_backward_recv_forward(mine, shapes, True),
    ):
        assert none == [None, None]
    assert comm.recv_forward([(2, 3)], True) == [None] and comm.recv_forward((2, 3), True) is None
    assert comm.recv_forward(torch.Size([2, 3]), True) is None and comm.recv_backward({"a": (2,)}, True) == {"a": None}
    assert comm.send_forward_recv_backward([mine[0]], (2, 3), True) == [None]  # as what is sent, not as the shape
    assert comm.send_backward_recv_forward(mine[0], [(2, 3)], True) is None
    (got,) = comm.send_forward_recv_backward([mine[0]], (2, 3), False)
    assert got.shape == (2, 3) and comm.send_backward_recv_forward(mine[0], [(2, 3)], False).shape == (2, 3)
    comm.drain()


# Between ranks


def value(rank, number, shape=(3, 5)):
    return torch.full(shape, 10.0 * number + rank)


@pytest.mark.quick
@pytest.mark.ranks(2, 3, 4)
@every_backend
def test_p2p_communicator_every_method_moves_what_its_name_says(ctx, backend):
    comm = P2PCommunicator(ctx, backend=backend, slot_bytes=1 << 10)
    mine, shape = value(ctx.rank, 1).to(comm.device), (3, 5)
    from_prev, from_next = value(comm.prev_rank, 1).to(comm.device), value(comm.next_rank, 1).to(comm.device)
    first, last = ctx.rank == 0, ctx.rank == ctx.size - 1
    for _ in range(3):
        got = comm.recv_forward(shape, first)
        assert got is None if first else torch.equal(got, from_prev) and got.requires_grad
        comm.send_forward(mine, last)
        got = comm.recv_backward(shape, last)
        assert got is None if last else torch.equal(got, from_next)
        comm.send_backward(mine, first)
        for rank in range(ctx.size - 1):  # a pair after the other
            if ctx.rank == rank:
                assert torch.equal(comm.send_forward_recv_backward(mine, shape, last), from_next)
                assert torch.equal(comm.recv_backward(shape, last), from_next)
                comm.send_forward(mine, last)
            elif ctx.rank == rank + 1:
                assert torch.equal(comm.recv_forward(shape, first), from_prev)
                comm.send_backward(mine, first)
                assert torch.equal(comm.send_backward_recv_forward(mine, shape, first), from_prev)
        assert comm.send_forward_recv_backward(mine, shape, True) is None
        assert comm.send_backward_recv_forward(mine, shape, True) is None
        # rings
        assert torch.equal(comm.send_forward_recv_forward(mine, True, shape), from_prev)
        assert torch.equal(comm.send_backward_recv_backward(mine, True, shape), from_next)
        got = comm.send_forward_backward_recv_forward_backward(mine, mine, True, True, shape)
        assert torch.equal(got[0], from_prev) and torch.equal(got[1], from_next)
        got, handles = comm.send_forward_recv_forward(mine, True, shape, overlap_p2p_comm=True)
        other, others = comm.send_backward_recv_backward(mine, True, shape, overlap_p2p_comm=True)
        assert set(handles) == {"send_next", "recv_prev"} and set(others) == {"send_prev", "recv_next"}
        for handle in (handles | others).values():
            handle.wait()
        assert torch.equal(got, from_prev) and torch.equal(other, from_next)
        assert comm.send_forward_recv_forward(None, False, shape, overlap_p2p_comm=True) == (None, {})
    comm.drain()
    assert comm.open_handles == []
    comm.close()


@pytest.mark.ranks(2, 4)
@every_backend
def test_p2p_communicator_lists_and_dicts_of_outputs_arrive_as_they_were(ctx, backend):
    comm = P2PCommunicator(ctx, backend=backend, slot_bytes=1 << 10, dtype=torch.bfloat16)
    for number in range(3):
        output = {"hidden": value(ctx.rank, number), "extra": [value(ctx.rank, 5, (2,)), value(ctx.rank, 6, ())]}
        output = {"hidden": output["hidden"].bfloat16().to(comm.device),
                  "extra": [part.bfloat16().to(comm.device) for part in output["extra"]]}  # fmt: skip
        shapes = {"hidden": (3, 5), "extra": [(2,), ()]}
        got, handles = comm.send_forward_recv_forward(output, True, shapes, overlap_p2p_comm=True)
        deallocate_output_tensor(output, handles["send_next"])
        assert output["hidden"].numel() == output["extra"][0].numel() == 1
        for handle in handles.values():
            handle.wait()
        assert list(got) == ["hidden", "extra"]
        assert got["hidden"].cpu().equal(value(comm.prev_rank, number).bfloat16())
        assert [part.cpu().tolist() for part in got["extra"]] == [
            [50.0 + comm.prev_rank] * 2,
            60.0 + comm.prev_rank,
        ]
    comm.close()


@pytest.mark.ranks(2, 3)
@every_backend
def test_p2p_communicator_shapes_that_vary_are_exchanged(ctx, backend):
    comm = P2PCommunicator(ctx, backend=backend, slot_bytes=256, variable_seq_lengths=True)
    for number, shape in enumerate([(7, 2, 3), (1,), (), (0, 4), (30, 20)]):
        mine = value(ctx.rank, number, (ctx.rank + 1,) if number == 1 else shape).to(comm.device)
        got = comm.send_forward_recv_forward(mine, True, None)
        want = value(comm.prev_rank, number, (comm.prev_rank + 1,) if number == 1 else shape)
        assert torch.equal(got.cpu(), want), (shape, got.shape)
    comm.close()


@pytest.mark.ranks(2, 4)
@every_backend
def test_p2p_communicator_messages_longer_than_all_slots_meet_in_the_order_of_issue(ctx, backend):
    comm = P2PCommunicator(ctx, backend=backend, slot_bytes=256)
    for number in range(3):
        mine = value(ctx.rank, number, (300,)).to(comm.device)  # five slots of two
        x, grad = comm.send_forward_backward_recv_forward_backward(mine, mine, True, True, (300,))
        assert torch.equal(x.cpu(), value(comm.prev_rank, number, (300,)))
        assert torch.equal(grad.cpu(), value(comm.next_rank, number, (300,)))
    comm.close()


@pytest.mark.ranks(2)
@every_backend
def test_p2p_communicator_handles_may_be_waited_for_in_any_order_and_polled(ctx, backend):
    comm = P2PCommunicator(ctx, backend=backend, slot_bytes=1 << 10)
    sends = [comm.isend(value(ctx.rank, number).to(comm.device), 1 - ctx.rank) for number in range(2)]
    (first, first_handle), (second, second_handle) = (comm.irecv((3, 5), None, 1 - ctx.rank) for _ in range(2))
    second_handle.wait()
    assert torch.equal(second.cpu(), value(1 - ctx.rank, 1))
    if backend == "tkernels":
        limit = time.monotonic() + 300
        while not first_handle.query() and time.monotonic() < limit:
            pass
        assert first_handle.query()
    first_handle.wait()
    assert torch.equal(first.cpu(), value(1 - ctx.rank, 0))
    for handle in sends:
        handle.release()
    comm.close()


# On GPUs

MEBIBYTES = 64
PATIENCE_S = {"leased": 300.0, "wait at once": 1.0}  # for the compute, which comes in the first form alone


@pytest.mark.ranks(2)
def test_p2p_communicator_raises_what_is_wrong_on_one_rank_on_every_rank(ctx):
    wrongs = ({"backend": "nccl"}, {"backend": 3}, {"max_inflight": 0}, {"dtype": "bf16"}, {"config": 3})
    for wrong in (*wrongs, {"slot_bytes": "many"}, {"copies": 0}):
        with pytest.raises((TypeError, ValueError, MismatchError)) as error:
            P2PCommunicator(ctx, **(wrong if ctx.rank == 1 else {}))
        message_on_every_rank(ctx, error.value)
    P2PCommunicator(ctx).close()


@pytest.mark.ranks(2)
def test_p2p_communicator_an_exchange_that_is_wrong_in_one_direction_has_begun_in_none(ctx):
    """The transfer of the other edge would be taken for the next call's."""
    comm = P2PCommunicator(ctx, slot_bytes=1 << 12)
    x, shape = torch.ones(2, 3, device=ctx.device), (2, 3)
    both = dict(recv_prev=True, recv_next=True, tensor_shape=shape)
    good = dict(output_tensor=x, input_tensor_grad=x)
    for wrong, error, message in (
        (dict(input_tensor_grad=3), TypeError, "takes tensors, or lists or dicts of them"),
        (dict(output_tensor=x.double()), ValueError, "but the peer receives torch.float32"),
        (dict(grad_shape="x"), TypeError, "shape 'x' of what"),
        (dict(grad_shape=(2, -3)), ValueError, "must be at least 0"),
    ):
        with pytest.raises(error, match=message):
            comm.send_forward_backward_recv_forward_backward(**good | both | wrong)
    for number in range(3):
        y = comm.send_forward_recv_forward(torch.full(shape, float(number), device=ctx.device), True, shape)
        assert torch.equal(y, torch.full_like(y, number))
    assert comm.open_handles == []
    comm.close()


@pytest.mark.ranks(2)
def test_p2p_communicator_that_finds_no_room_leaves_none_behind(ctx):
    large = largest_free(ctx.heap) // 3  # for one channel of two slots, and not for two
    with pytest.raises(HeapExhaustedError):
        P2PCommunicator(ctx, slot_bytes=large, copies=2)
    ctx.free(ctx.empty(2 * large, dtype=torch.uint8))
    free = largest_free(ctx.heap)
    comm = P2PCommunicator(ctx, slot_bytes=4096, max_inflight=3)
    assert {channel.copies for channel in comm._transport.channels.values()} == {3}  # no send waits for one let go of
    comm.close()
    assert largest_free(ctx.heap) == free


@pytest.mark.ranks(4)
@every_backend
def test_p2p_communicator_takes_a_mesh_a_process_group_or_a_context(ctx, backend):
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("pp", "dp"))
    for pp_group in (mesh["pp"], mesh.get_group("pp"), as_context(mesh["pp"])):
        comm = P2PCommunicator(pp_group, backend=backend, slot_bytes=4096)
        assert (comm.rank, comm.size) == (ctx.rank // 2, 2)
        assert isinstance(pp_group, Context) or comm.pp_group is mesh.get_group("pp")
        got = comm.send_forward_recv_forward(value(ctx.rank, 1).to(comm.device), True, (3, 5))
        assert torch.equal(got.cpu(), value((ctx.rank + 2) % 4, 1))
        comm.close()
    with pytest.raises(ValueError, match=r"pp_group: the mesh has 2 dimensions, \('pp', 'dp'\); pass one"):
        P2PCommunicator(mesh, backend=backend)


@pytest.mark.ranks(2)
def test_p2p_communicator_refuses_ranks_with_other_options(ctx):
    for name, values in (
        ("dtype", (torch.float32, torch.bfloat16)),
        ("variable_seq_lengths", (False, True)),
        ("backend", ("tkernels", "torch")),
    ):
        with pytest.raises(MismatchError, match=f"P2PCommunicator: the ranks' calls differ, in {name}") as error:
            P2PCommunicator(ctx, **{name: values[ctx.rank]})
        message_on_every_rank(ctx, error.value)
    P2PCommunicator(ctx).close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("form", [((4, 3), torch.float32), ((4, 2), torch.int32), ((4, 4), torch.bfloat16)], ids=str)
def test_irecv_of_another_size_or_dtype_than_was_sent_is_named_on_every_rank(ctx, form):
    """Over channels, without an exchange of shapes."""
    shape, dtype = form
    with tkernels.init(ctx.group.process_group, heap_bytes=1 << 20, default=False) as own:
        comm = P2PCommunicator(own, slot_bytes=4096)
        with pytest.raises(
            MismatchError, match="channel receive: rank 1 expects .*, and rank 0 has sent 32 bytes"
        ) as e:
            if ctx.rank == 0:
                comm.isend(torch.ones(4, 2, device=comm.device), 1).release()
            else:
                comm.irecv(shape, dtype, 0)[1].wait()
            while True:
                own.check()
                time.sleep(0.01)
        message_on_every_rank(ctx, e.value)


@pytest.mark.ranks(2)
@every_backend
def test_irecv_of_another_dtype_than_was_sent_is_refused_where_it_is_exchanged(ctx, backend):
    comm = P2PCommunicator(ctx, backend=backend, slot_bytes=4096, variable_seq_lengths=True)
    if ctx.rank == 0:
        comm.isend(torch.ones(4, 2, device=comm.device, dtype=torch.bfloat16), 1).wait()
    else:
        with pytest.raises(ValueError, match=r"recv_prev: rank 1 receives torch.float32, but a torch.bfloat16 tensor"):
            comm.irecv(None, torch.float32, 0)
        comm._transport.receive("recv_prev", torch.empty(4, 2, dtype=torch.bfloat16, device=comm.device)).wait(
            comm.dev.current_stream()
        )  # or rank 0 waits for its message to leave
    comm.close()


@pytest.mark.ranks(2)
def test_p2p_communicator_sizes_may_be_numpys(ctx):
    comm = P2PCommunicator(ctx, slot_bytes=4096)
    if ctx.rank == 0:
        comm.isend(torch.ones(4, 8, device=comm.device), 1).wait()
    else:
        tensor, handle = comm.irecv(tuple(numpy.array([4, 8])), None, 0)
        handle.wait()
        assert tensor.shape == (4, 8) and bool(tensor.eq(1.0).all())
    comm.close()


def big(fill, mebibytes=MEBIBYTES):
    return torch.full((mebibytes << 18,), fill, device="cuda")


def sleep(seconds):
    """Keep the current stream busy."""
    torch.cuda._sleep(int(seconds * 1.9e9))  # cycles


def send_then_free(comm, edge, delay_s, form):
    """Rank 0's part of a race: an output is sent late, freed at once, and something else takes its memory."""
    output = big(1.0)
    with torch.cuda.stream(comm.streams[edge]):
        if delay_s:
            sleep(delay_s)
    if form == "leased":
        comm.isend(output, comm.next_rank, deallocate=True).release()
        work = None
    else:  # the output is the transport's to read, and nobody's to keep
        work = send_unleased(comm, edge, output)
        output.data = torch.empty(1, device="cuda")
    del output
    return work, big(2.0)


def warm_up(comm, ctx):
    """Every kernel compiled, every communicator connected, memory of this size in the allocator's hands."""
    for _ in range(2):
        got = comm.send_forward_recv_forward(big(0.0), True, (MEBIBYTES << 18,))
        ((got != 1.0).sum() + (got == 1.0).all()).item()
    comm.drain()
    del got
    big(0.0), big(0.0), sleep(0.0), torch.ones(1024, 1024, device="cuda") @ torch.ones(1024, 1024, device="cuda")
    torch.cuda.synchronize()
    ctx.group.barrier()


def ring_of_sends(comm, form, delay_s, iterations):
    """Collective. Every rank sends, frees and overwrites; returns how many elements it received that are not 1."""
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(iterations):
        work, overwrite = send_then_free(comm, "send_next", delay_s, form)
        got, handle = comm.irecv((MEBIBYTES << 18,), None, comm.prev_rank)
        handle.wait()
        wrong += (got != 1.0).sum()
        if work is not None:
            work.wait(torch.cuda.current_stream())
        del overwrite, got
        if form != "leased":
            torch.cuda.synchronize()  # the delay, not what piles up behind it
    comm.drain()
    torch.cuda.synchronize()
    return wrong.item()


@gpu_only
@pytest.mark.ranks(2, 4)
@every_transport
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "filled"])
@pytest.mark.parametrize("iterations", [100])
def test_p2p_communicator_a_send_that_is_late_reads_what_was_sent(ctx, transport, deterministic, iterations):
    """The sleep before the put is the window; deterministic algorithms fill memory that is reused with NaN at once."""
    with tkernels.init(ctx.group.process_group, transport=transport, heap_bytes=6 * (MEBIBYTES << 20)) as context:
        comm = P2PCommunicator(context, slot_bytes=MEBIBYTES << 20)
        warm_up(comm, ctx)
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        try:
            wrong = ring_of_sends(comm, "leased", 0.002, iterations)
            control = ring_of_sends(comm, "unleased", 0.05, 2)
        finally:
            torch.use_deterministic_algorithms(False)
        comm.close()
    assert wrong == 0
    assert control > 0  # under the same lever, without the lease


@gpu_only
@pytest.mark.ranks(2, 4)
@every_backend
@pytest.mark.parametrize("rounds", [3])
def test_p2p_communicator_a_receiver_that_comes_late_gets_what_was_sent(ctx, backend, rounds):
    comm = P2PCommunicator(ctx, backend=backend, slot_bytes=MEBIBYTES << 18)  # a quarter: the put needs the receiver
    warm_up(comm, ctx)
    for number in range(rounds):
        ctx.group.barrier()
        comm.isend(big(1.0 + number), comm.next_rank, deallocate=True).release()
        overwrite = big(-1.0)
        torch.cuda.current_stream().synchronize()  # overwritten, if it were to be
        time.sleep(0.3)
        got, handle = comm.irecv((MEBIBYTES << 18,), None, comm.prev_rank)
        handle.wait()
        assert (got == 1.0 + number).all()
        del overwrite, got
    comm.close()


@gpu_only
@pytest.mark.ranks(2, 4)
@every_backend
def test_p2p_communicator_the_next_compute_is_done_while_the_send_is_open(ctx, backend):
    """And is not, where the compute stream waits for the send at once."""
    comm = P2PCommunicator(ctx, backend=backend, slot_bytes=MEBIBYTES << 18)
    warm_up(comm, ctx)
    a = torch.randn(1024, 1024, device="cuda")
    # NCCL's buffers, 4 MiB for each of up to 32 channels, take in a message that nobody receives yet.
    mebibytes = 512 if backend == "torch" else MEBIBYTES
    host_group(ctx)
    big(0.0, mebibytes), a @ a  # all modules are loaded before a kernel waits
    receiving = torch.cuda.Stream()  # which doesn't come after this rank's own send, nor does its memory
    with torch.cuda.stream(receiving):
        (big(0.0, mebibytes) == 3.0).all().item()
    for form in PATIENCE_S:
        torch.cuda.synchronize()
        ctx.group.barrier()
        handle = comm.isend(big(3.0, mebibytes), comm.next_rank)
        if form == "wait at once":
            handle.wait()
        a @ a
        computed = torch.cuda.Event()
        computed.record()
        limit = time.monotonic() + PATIENCE_S[form]
        while not computed.query() and time.monotonic() < limit:
            time.sleep(1e-3)
        seen = computed.query(), handle.query()  # nobody receives yet
        torch.distributed.barrier(group=host_group(ctx))
        with torch.cuda.stream(receiving):
            got, received = comm.irecv((mebibytes << 18,), None, comm.prev_rank)
            received.wait()
            assert (got == 3.0).all()
        handle.release()
        assert seen == ((True, False) if form == "leased" else (False, False))
    comm.close()


_host_groups = {}


def host_group(ctx):
    """Collective. A group whose barrier doesn't wait for the device, as that of `ctx.group` does."""
    key = tuple(ctx.group.global_ranks)
    if key not in _host_groups:
        _host_groups[key] = torch.distributed.new_group(list(key), backend="gloo")
    return _host_groups[key]


@triton.jit
def fresh_kernel(out, NUMBER: tl.constexpr):
    tl.store(out, NUMBER)


@gpu_only
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("form", ["when wanted", "at once"])
def test_p2p_communicator_modules_may_be_loaded_while_a_receive_is_open(ctx, form):
    """The driver loads a module once no kernel runs. Were receives launched at once, each rank would wait for all."""
    with tkernels.init(heap_bytes=16 << 20, timeout_s=5 if form == "at once" else 60, default=False) as own:
        comm = P2PCommunicator(own, slot_bytes=1 << 20)
        x, handle = comm.irecv((1000,), None, comm.prev_rank)
        if form == "at once":
            handle.query()
            time.sleep(0.5)  # by then it runs
        number = torch.empty((), dtype=torch.int64, device="cuda")
        start = time.monotonic()
        fresh_kernel[(1,)](number, NUMBER=uuid.uuid4().int >> 66)
        loading_s = time.monotonic() - start
        sent = torch.full((1000,), float(ctx.rank), device="cuda")
        if form == "at once":
            own.group.gather(None)
            with pytest.raises(WaitTimeoutError, match="channel receive"):
                own.check()
            assert loading_s > 3  # until the wait expired
            handle.release()
            return
        comm.isend(sent, comm.next_rank).release()
        handle.wait()
        assert (x == comm.prev_rank).all()
        comm.close()


@gpu_only
@own_gpus
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("iterations", [3])
def test_p2p_communicator_whether_nccls_sends_may_be_freed_without_a_lease(ctx, iterations):
    """Either data is wrong without the lease, or torch itself holds the block, and the allocator's snapshot says how.

    active_pending_free: by recordStream, which waits for NCCL. active_allocated: by a reference to the storage.
    """
    comm = P2PCommunicator(ctx, backend="torch")
    warm_up(comm, ctx)
    wrong, held = 0, Counter()
    for _ in range(iterations):
        ctx.group.barrier()
        output = big(1.0)
        address = output.data_ptr()
        completion = send_unleased(comm, "send_next", output)
        output.data = torch.empty(1, device="cuda")
        held[state_of_block(address)] += 1
        overwrite = big(2.0)
        torch.cuda.current_stream().synchronize()
        time.sleep(0.3)
        got, handle = comm.irecv((MEBIBYTES << 18,), None, comm.prev_rank)
        handle.wait()
        wrong += int((got != 1.0).any())
        completion.wait(torch.cuda.current_stream())
        del overwrite, got, output
    comm.close()
    found = f"torch {torch.__version__}: {wrong} of {iterations} corrupted; blocks after the free: {dict(held)}"
    print(f"rank {ctx.rank}: free before wait over NCCL, {found}")
    reproduces = ctx.group.gather(wrong > 0)[comm.next_rank]  # the receiver sees what this rank's sends became
    assert reproduces or held["inactive"] == 0, found


def state_of_block(address):
    """What torch's allocator says of the block at this address: active_allocated, active_pending_free or inactive."""
    for segment in torch.cuda.memory_snapshot():
        start = segment["address"]
        for block in segment["blocks"]:
            if start <= address < start + block["size"]:
                return block["state"]
            start += block["size"]
    return "inactive"


@gpu_only
@pytest.mark.ranks(2, 4)
@every_backend
@pytest.mark.parametrize("max_inflight", [1, 2, 3])
def test_p2p_communicator_memory_stays_below_the_outputs_in_flight(ctx, backend, max_inflight):
    comm = P2PCommunicator(ctx, backend=backend, slot_bytes=1 << 20, max_inflight=max_inflight)
    warm_up(comm, ctx)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(12):
        comm.isend(big(1.0), comm.next_rank, deallocate=True).release()
        got, handle = comm.irecv((MEBIBYTES << 18,), None, comm.prev_rank)
        handle.wait()
        del got, handle
    comm.drain()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= (max_inflight + 2) * (MEBIBYTES << 20) + (1 << 20)  # in flight, the new output, and what arrives
    comm.close()


@gpu_only
@pytest.mark.ranks(2, 4)
@every_transport
@pytest.mark.parametrize("iterations", [1000])
def test_p2p_communicator_a_thousand_sends_with_jitter_on_every_stream(ctx, transport, iterations):
    """Seeded sleeps on compute and edges, different from rank to rank, and every output overwritten once freed."""
    ctx = over(ctx, transport)
    comm = P2PCommunicator(ctx, slot_bytes=1 << 20, copies=2)
    generator = torch.Generator().manual_seed(ctx.rank)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    late(ctx, 0)
    for number in range(iterations):
        for stream in (torch.cuda.current_stream(), *comm.streams.values()):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(int(torch.randint(0, 40_000, (), generator=generator)))
        size = 1 << int(torch.randint(8, 18, (), generator=torch.Generator().manual_seed(number)))
        forward, backward = (torch.full((size,), sign * float(number), device="cuda") for sign in (1, -1))
        x, handles = comm.send_forward_recv_forward(forward, True, (size,), overlap_p2p_comm=True)
        grad, others = comm.send_backward_recv_backward(backward, True, (size,), overlap_p2p_comm=True)
        deallocate_output_tensor([forward, backward], True)
        del forward, backward
        torch.full((size,), float("nan"), device="cuda"), torch.full((size,), float("nan"), device="cuda")
        for handle in (handles | others).values():
            handle.wait() if handle.name.startswith("recv") else handle.release()
        wrong += (x != number).sum() + (grad != -number).sum()
        del x, grad
    comm.drain()
    ctx.check()
    assert wrong.item() == 0
    comm.close()


@pytest.mark.ranks(2)
def test_p2p_communicator_a_tensor_on_another_device_is_refused_and_the_next_one_arrives(ctx):
    comm = P2PCommunicator(ctx, dtype=torch.float32)
    if ctx.rank == 0:
        with pytest.raises(ValueError, match="send_next: sends tensors on .*, not on meta; move it there first"):
            comm.send_forward(torch.ones(4, device="meta"), False)
        comm.send_forward(torch.ones(4, device=ctx.device), False)
    else:
        assert comm.recv_forward((4,), False).tolist() == [1.0] * 4
    comm.close()
