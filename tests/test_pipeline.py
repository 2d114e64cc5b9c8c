"""Pipelines: schedules that balance and cannot deadlock, and training to the losses of the model that is not split."""

import contextlib
import copy
import functools
import gc
import itertools
import re
import warnings
import weakref
from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transports import own_gpus

import tkernels
from tkernels.comm import MismatchError
from tkernels.comm.group import Group
from tkernels.demo.model import ModelConfig, Transformer
from tkernels.layers.pipeline import run
from tkernels.layers.pipeline.communicator import ISSUE_ORDER, P2PCommunicator
from tkernels.layers.pipeline.run import forward_backward_pipelining, split_into_stages
from tkernels.layers.pipeline.schedule import Step, schedule
from tkernels.testing.compare import assert_close_to

BACKENDS = ["tkernels", pytest.param("torch", marks=own_gpus)]
PLANS = [
    (size, chunks, count)
    for size, chunks, count in itertools.product((1, 2, 3, 4, 5), (1, 2, 3), (1, 2, 3, 4, 6, 8, 12))
    if chunks == 1 or (size > 1 and count % size == 0)
]
CONFIG = ModelConfig(vocabulary=11, sequence=6, batch=2, heads=2, head_features=4, layers=8)


# Schedules


class Ranks(Group):
    """A group of which this process plays one rank."""

    def __init__(self, rank, size):
        self.process_group, self.rank, self.size, self.global_ranks = None, rank, size, list(range(size))


class Recorder:
    """A wire that writes down what is asked of it: (verb, edge, number of the message on that edge)."""

    def __init__(self):
        self.trace, self.count = [], defaultdict(itertools.count)

    def send(self, edge, tensor):
        return self._start("send", edge)

    def receive(self, edge, tensor):
        tensor.zero_()
        return self._start("recv", edge)

    def _start(self, verb, edge):
        number = next(self.count[edge])
        self.trace.append((verb, edge, number))
        return Recorded(self.trace, edge, number)


class Recorded:
    captured = None

    def __init__(self, trace, edge, number):
        self.key, self._trace, self._what = self, trace, (edge, number)

    def wait(self, stream):
        self._trace.append(("wait", *self._what))

    def query(self):
        return False


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.weight


def traces(size, num_chunks, count, **options):
    """What every rank does in one step of training, and its communicators."""
    made = []
    for rank in range(size):
        wire = Recorder()
        comm = P2PCommunicator(Ranks(rank, size), backend=wire)
        chunks = [Scale() for _ in range(num_chunks)]
        data = [(torch.ones(1), None)] * count
        losses = forward_backward_pipelining(chunks, data, lambda y, _: y.sum(), comm, tensor_shape=(1,), **options)
        assert len(losses) == (count if rank == size - 1 else 0) and not any(loss.requires_grad for loss in losses)
        made.append((wire.trace, comm))
    return made


PEER = {"send_next": (1, "recv_prev"), "recv_prev": (-1, "send_next")}
PEER |= {"send_prev": (-1, "recv_next"), "recv_next": (1, "send_prev")}


def finishes(lists, slots=None):
    """Whether all ranks come to the end of their traces.

    slots None: a transfer is over once both ends have been posted, and only waits block. Otherwise the strictest form
    of a channel of so many slots: a receive runs when it is waited for, a send when it is posted, which blocks until a
    slot is free.
    """
    size, at = len(lists), [0] * len(lists)
    done = [set() for _ in lists]

    def can(rank, verb, edge, number):
        step, opposite = PEER[edge]
        peer = done[(rank + step) % size]
        if slots is None:
            return verb != "wait" or ("recv" if edge.startswith("send") else "send", opposite, number) in peer
        if verb == "send":
            return number < slots or ("wait", opposite, number - slots) in peer
        if verb == "wait" and edge.startswith("recv"):
            return ("send", opposite, number) in peer
        return True

    moved = True
    while moved:
        moved = False
        for rank, trace in enumerate(lists):
            while at[rank] < len(trace) and can(rank, *trace[at[rank]]):
                done[rank].add(trace[at[rank]])
                at[rank] += 1
                moved = True
    return at == [len(trace) for trace in lists]


def messages(trace, edge):
    """The numbers of the messages of an edge, in the order in which they were started."""
    return [number for verb, e, number in trace if verb != "wait" and e == edge]


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_forward_backward_pipelining_ends_in_every_schedule_on_every_transport_and_leaves_nothing_open(
    overlap, forward_only
):
    for size, num_chunks, count in PLANS:
        made = traces(size, num_chunks, count, overlap=overlap, forward_only=forward_only, deallocate=overlap)
        lists = [trace for trace, _ in made]
        for slots in (None, 2, 3):
            assert finishes(lists, slots), (size, num_chunks, count, slots)
        for rank, (trace, comm) in enumerate(made):
            assert comm.open_handles == [] and set(comm.num_in_flight.values()) == {0}
            for edge in PEER:  # as many as the peer's other end, and each one waited for
                step, opposite = PEER[edge]
                mine = messages(trace, edge)
                assert mine == messages(lists[(rank + step) % size], opposite)
                assert sorted({number for verb, e, number in trace if (verb, e) == ("wait", edge)}) == mine


def test_forward_backward_pipelining_needs_no_shape_on_one_rank():
    stage = Scale()
    comm = P2PCommunicator(Ranks(0, 1), backend=Recorder())
    losses = forward_backward_pipelining([stage], [(torch.ones(1), None)] * 2, lambda y, _: y.sum(), comm)
    assert losses == [1.0, 1.0] and stage.weight.grad.tolist() == [1.0]


def test_forward_backward_pipelining_returns_whatever_a_loss_without_backward_is():
    comm, data = P2PCommunicator(Ranks(0, 1), backend=Recorder()), [(torch.ones(2, 3), torch.zeros(2, 3))] * 2
    loss = lambda output, target: (F.mse_loss(output, target).item(), {"output": output})  # noqa: E731
    found = forward_backward_pipelining([Scale()], data, loss, comm, forward_only=True)
    assert [value for value, _ in found] == [1.0, 1.0] and found[0][1]["output"].shape == (2, 3)
    with pytest.raises(TypeError, match="loss_fn returns float, which has no gradient; return a scalar tensor, or"):
        forward_backward_pipelining([Scale()], data, lambda *pair: loss(*pair)[0], comm)


def test_forward_backward_pipelining_sends_zeros_back_from_a_stage_that_does_not_use_what_it_gets():
    wire = Recorder()
    stage = nn.Linear(1, 1)
    stage.forward = lambda x: stage.weight.sum()
    comm = P2PCommunicator(Ranks(1, 2), backend=wire)
    forward_backward_pipelining([stage], [(None, None)] * 3, lambda y, _: y, comm, tensor_shape=(1,))
    assert messages(wire.trace, "send_prev") == [0, 1, 2]


@pytest.mark.parametrize("deallocate", [False, True])
def test_forward_backward_pipelining_drops_no_handle_and_without_backward_keeps_no_activation(deallocate):
    kept = []

    class Counted(Scale):
        def forward(self, x):
            assert sum(tensor() is not None for tensor in kept) <= 1  # the one that was sent last
            kept.append(weakref.ref(result := super().forward(x)))
            return result

    comm = P2PCommunicator(Ranks(0, 3), backend=Recorder())
    options = {"tensor_shape": (1,), "overlap": True, "deallocate": deallocate}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        data = [(torch.ones(1), None)] * 6
        forward_backward_pipelining([Counted()], data, None, comm, forward_only=True, **options)
        assert len(kept) == 6
        forward_backward_pipelining([Scale()], data, None, comm, **options)
        gc.collect()
    assert not warned


def test_forward_backward_pipelining_in_the_model_of_transports_shows_a_deadlock():
    both_wait_first = [[("send", "send_next", 0), ("wait", "send_next", 0), ("recv", "recv_prev", 0)]] * 2
    assert not finishes(both_wait_first)
    two_first = [("send", "send_next", 0), ("send", "send_next", 1), ("recv", "recv_prev", 0), ("wait", "recv_prev", 0)]
    assert not finishes([two_first] * 2, slots=1) and finishes([two_first] * 2, slots=2)


def test_forward_backward_pipelining_interleaved_in_single_steps_without_overlap_would_deadlock(monkeypatch):
    def in_single_steps(*arguments, **options):
        return schedule(*arguments, **options | {"overlap": True})

    assert finishes([trace for trace, _ in traces(2, 2, 4, overlap=False)])
    monkeypatch.setattr(run, "schedule", in_single_steps)
    assert not finishes([trace for trace, _ in traces(2, 2, 4, overlap=False)])


@pytest.mark.parametrize("size, num_chunks, count", PLANS)
def test_forward_backward_pipelining_passes_every_microbatch_through_every_chunk_once_forward_then_backward(
    size, num_chunks, count
):
    for rank, overlap in itertools.product(range(size), (False, True)):
        steps = [step for turn in schedule(rank, size, num_chunks, count, overlap=overlap) for step in turn]
        everything = {(microbatch, chunk) for microbatch in range(count) for chunk in range(num_chunks)}
        forwards = [(s.microbatch, s.chunk) for s in steps if s.forward]
        backwards = [(s.microbatch, s.chunk) for s in steps if not s.forward]
        assert set(forwards) == set(backwards) == everything and len(forwards) == len(backwards) == len(everything)
        at = {step: number for number, step in enumerate(steps)}
        assert all(at[Step(True, *what)] < at[Step(False, *what)] for what in everything)
        held = max(itertools.accumulate(1 if step.forward else -1 for step in steps))
        warmup = size - rank if num_chunks == 1 else 2 * (size - rank - 1) + (num_chunks - 1) * size + 1
        assert held == min(warmup, len(everything))  # what 1F1B is for
        # gradients of a chunk are summed in the order of microbatches
        for chunk in range(num_chunks):
            order = [microbatch for microbatch, c in backwards if c == chunk]
            assert order == sorted(order)


def test_forward_backward_pipelining_is_one_forward_one_backward():
    turns = schedule(0, 2, 1, 4)
    assert " ".join(str(step) for turn in turns for step in turn) == "F0.0 F1.0 B0.0 F2.0 B1.0 F3.0 B2.0 B3.0"
    turns = schedule(1, 2, 2, 4)
    assert [len(turn) for turn in turns] == [1] * 2 + [2] * 6 + [1] * 2
    with pytest.raises(ValueError, match="2 chunks a rank take at least 2 ranks, .*there are 2 ranks and 3 microbatch"):
        schedule(0, 2, 2, 3)
    with pytest.raises(ValueError, match="there are 1 ranks"):
        schedule(0, 1, 2, 4)


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_forward_backward_pipelining_lets_even_ranks_send_first_and_odd_ranks_receive_first(rank):
    wire = Recorder()
    comm = P2PCommunicator(Ranks(rank, 4), backend=wire)
    comm.send_forward_backward_recv_forward_backward(torch.ones(1), torch.ones(1), True, True, (1,))
    assert tuple(edge for verb, edge, _ in wire.trace if verb != "wait") == ISSUE_ORDER[rank % 2]
    assert ISSUE_ORDER == (
        ("send_next", "recv_prev", "send_prev", "recv_next"),
        ("recv_prev", "send_next", "recv_next", "send_prev"),
    )


# The model, in stages


class Embedding(nn.Module):
    def __init__(self, model: Transformer):
        super().__init__()
        self.tokens, self.positions = model.embedding, model.positions

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(len(tokens), device=tokens.device)
        return self.tokens(tokens) + self.positions(positions)[:, None]


def build(config=CONFIG, seed=0):
    torch.manual_seed(seed)
    return Transformer(config)


def stages_of(model, rank, size, num_chunks):
    head = nn.Sequential(model.norm, model.head)
    mesh = Ranks(rank, size)
    return split_into_stages(Embedding(model), model.blocks, head, model=model, mesh=mesh, num_chunks=num_chunks)


def test_split_into_stages_keeps_the_models_names_and_its_modules():
    """The keys of the chunks of all ranks together are the model's; a checkpoint of either loads into the other."""
    for device, num_chunks in (("cpu", 1), ("cpu", 2), ("meta", 2)):
        with torch.device(device):
            model = build()
        want, found = model.state_dict(), {}
        for rank in range(2):
            for chunk in stages_of(model, rank, 2, num_chunks):
                mine = chunk.state_dict()
                assert not found.keys() & mine.keys() and dict(chunk.named_parameters()).keys() == mine.keys()
                chunk.load_state_dict({name: want[name] for name in mine})
                found |= mine
        assert found.keys() == want.keys() and all(found[name].data_ptr() == want[name].data_ptr() for name in want)
    rank_1 = stages_of(build(), 1, 2, 2)
    assert {name.split(".")[1] for name in rank_1[0].state_dict()} == {"2", "3"}
    assert set(dict(rank_1[1].named_children())) == {"blocks", "norm", "head"}


def test_split_into_stages_without_the_model_names_by_its_arguments():
    chunk = split_into_stages(nn.Linear(2, 2), [nn.Linear(2, 2, bias=False)], nn.Identity(), mesh=Ranks(0, 1))[0]
    assert list(chunk.state_dict()) == ["embedding.weight", "embedding.bias", "blocks.0.weight"]


def test_split_into_stages_runs_what_is_put_in_a_modules_place():
    """Swapped in the model before the split, or in the chunk after it, inside of a block, a part, or a part's part."""
    model = build()
    tokens, positions = torch.arange(12).view(6, 2) % 11, torch.arange(6)
    for path in ("blocks.1.mlp.fc1", "blocks.2", "embedding", "norm"):
        (chunk,) = stages_of(model, 0, 1, 1)
        assert torch.equal(chunk(tokens), model(tokens, positions))
        module = copy.deepcopy(model.get_submodule(path))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1.5)
        chunk.set_submodule(path, module)
        model.set_submodule(path, module)
        assert torch.equal(chunk(tokens), model(tokens, positions)), path
    assert torch.equal(copy.deepcopy(chunk)(tokens), model(tokens, positions))


def test_split_into_stages_sets_the_mode_of_a_part_that_the_model_does_not_have():
    class Dropping(Embedding):
        def forward(self, tokens):
            return F.dropout(super().forward(tokens), training=self.training)

    model = build()
    (chunk,) = split_into_stages(
        Dropping(model), model.blocks, nn.Sequential(model.norm, model.head), model=model, mesh=Ranks(0, 1)
    )
    assert not any(part.training for part in chunk.eval().parts) and all(part.training for part in chunk.train().parts)


class Scaled(nn.Module):
    """A block with options, one of which is no tensor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, mask=None, *, scale: float):
        x = self.linear(x) * scale
        return x if mask is None else x.masked_fill(mask, 0)


def test_split_into_stages_gives_each_module_the_options_that_its_forward_names():
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "blocks": nn.ModuleList([Scaled(), Scaled()]), "last": Scaled()})
    (chunk,) = split_into_stages(model["first"], model["blocks"], model["last"], model=model, mesh=Ranks(0, 1))
    x, mask = torch.ones(2, 4), torch.eye(4).bool()[:2]
    want = model["first"](x)
    for part in (*model["blocks"], model["last"]):
        want = part(want, mask, scale=0.5)
    assert torch.equal(chunk(x, mask=mask, scale=0.5), want)
    with pytest.raises(TypeError, match="no part of the model takes masks; they take mask, scale"):
        chunk(x, masks=mask, scale=0.5)
    with pytest.raises(TypeError, match="scale"):  # which a block lacks
        chunk(x)


def test_split_into_stages_tells_of_a_parameter_on_several_ranks_that_has_no_mark():
    embedding, blocks, head = nn.Embedding(5, 3), [nn.Linear(3, 3) for _ in range(4)], nn.Linear(3, 5, bias=False)
    head.weight = embedding.weight
    with pytest.warns(UserWarning, match="embedding.weight has a copy on each of ranks 0, 2, .*shared = True"):
        split_into_stages(embedding, blocks, head, mesh=Ranks(2, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        split_into_stages(embedding, blocks, head, mesh=Ranks(0, 1))  # one rank has both
        split_into_stages(embedding, blocks, head, mesh=Ranks(0, 3))  # the first of two counts it
        head.weight.shared = True
        split_into_stages(embedding, blocks, head, mesh=Ranks(0, 2))


def test_split_into_stages_refuses_what_is_no_module():
    linears, nothing = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}), nn.Identity()
    for parts, message in (
        ((nothing, linears, nothing), r"blocks\[0\]='a' must be an nn.Module"),
        ((nothing, nn.Linear(1, 1), nothing), "blocks=Linear.* must be a list of modules"),
        ((nothing, linears.values(), None), r"head=None must be an nn.Module; nn.Identity\(\) stands for none"),
    ):
        with pytest.raises(TypeError, match=f"split_into_stages: {message}"):
            split_into_stages(*parts, mesh=Ranks(0, 2))
    with pytest.raises(TypeError, match="split_into_stages: model=3 must be an nn.Module"):
        split_into_stages(nothing, linears.values(), nothing, model=3, mesh=Ranks(0, 2))


def test_split_into_stages_refuses_what_is_no_number_of_chunks_and_parts_that_leave_something_out():
    parts = nn.Linear(2, 2), [nn.Linear(2, 2) for _ in range(4)], nn.Linear(2, 2)
    for error, options in ((ValueError, {"num_chunks": 0}), (TypeError, {"num_chunks": "x"})):
        with pytest.raises(error, match=f"pipeline: {next(iter(options))}="):
            split_into_stages(*parts, mesh=Ranks(0, 2), **options)
    with pytest.raises(ValueError, match="5 blocks don't make 6 parts, of 3 ranks x 2"):
        split_into_stages(parts[0], [*parts[1], nn.Linear(2, 2)], parts[2], mesh=Ranks(0, 3), num_chunks=2)
    model = build()
    with pytest.raises(ValueError, match=r"positions.weight, norm.weight, norm.bias of the model are in none of embed"):
        split_into_stages(model.embedding, model.blocks, model.head, model=model, mesh=Ranks(0, 2))
    model.embedding.scale = nn.Parameter(torch.ones(1))
    embedding = Embedding(model)
    embedding.own = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="the part Embedding has own, which are in no module of the model"):
        stage = nn.Sequential(model.norm, model.head)
        split_into_stages(embedding, model.blocks, stage, model=model, mesh=Ranks(0, 2))


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(config, count, step, device, lengths=None):
    """`count` microbatches (tokens, next tokens), each [s, b]; lengths: of each, where they differ."""
    generator = torch.Generator().manual_seed(step)
    made = []
    for number in range(count):
        length = lengths[number] if lengths else config.sequence
        tokens = torch.randint(0, config.vocabulary, (length + 1, config.batch), generator=generator).to(device)
        made.append((tokens[:-1].clone(), tokens[1:].clone()))
    return made


def unsplit_losses(count, steps, device, dtype=torch.float32, **options):
    """[steps][microbatches] of the model as a whole, one microbatch after the other."""
    model = build().to(device, dtype)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(steps):
        losses.append([])
        for tokens, targets in batches(CONFIG, count, step, device, **options):
            loss = loss_of(model(tokens, torch.arange(len(tokens), device=device)), targets)
            (loss / count).backward()
            losses[-1].append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return torch.tensor(losses, dtype=dtype)


def pipeline_losses(ctx, comm, num_chunks, count, steps, lengths=None, shape=None, **options):
    """Collective. The same of the pipeline, on every rank."""
    chunks = stages_of(build().to(comm.device), comm.rank, comm.size, num_chunks)
    optimizer, losses = torch.optim.SGD(chunks.parameters(), lr=0.5), []
    for step in range(steps):
        data = batches(CONFIG, count, step, comm.device, lengths)
        row = forward_backward_pipelining(chunks, data, loss_of, comm, tensor_shape=shape, **options)
        losses.append([loss.item() for loss in row])
        optimizer.step()
        optimizer.zero_grad()
    assert comm.open_handles == [] and set(comm.num_in_flight.values()) == {0}
    return torch.tensor(ctx.group.gather(losses)[-1])


SHAPE = (CONFIG.sequence, CONFIG.batch, CONFIG.features)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_forward_backward_pipelining_trains_to_the_losses_of_the_model_that_is_not_split(ctx, backend, num_chunks):
    """The same products of the same numbers, and gradients summed in the order of microbatches: equal, not close.

    A GPU's libraries may choose another kernel for the same product, so there only the four forms are equal.
    """
    count, steps, results = 4, 2, []
    comm = P2PCommunicator(ctx, backend=backend, slot_bytes=4096)
    with sdpa_kernel(SDPBackend.MATH):  # whose backward is deterministic
        for overlap, deallocate in itertools.product((False, True), repeat=2):
            options = {"overlap": overlap, "deallocate": deallocate, "shape": SHAPE}
            results.append(pipeline_losses(ctx, comm, num_chunks, count, steps, **options))
            assert torch.equal(results[-1], results[0]), (options, results)
        want, truth = (unsplit_losses(count, steps, comm.device, dtype) for dtype in (torch.float32, torch.float64))
    comm.close()
    if ctx.device.type == "cpu":
        assert torch.equal(results[0], want), (results[0], want)
    assert_close_to(results[0], truth, terms=CONFIG.features * CONFIG.layers)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("exchanged", [False, True], ids=["known", "exchanged"])
def test_forward_backward_pipelining_trains_sequences_of_different_lengths_to_the_same_losses(ctx, backend, exchanged):
    lengths = [6, 1, 4, 5]
    comm = P2PCommunicator(ctx, backend=backend, slot_bytes=4096, variable_seq_lengths=exchanged)
    with sdpa_kernel(SDPBackend.MATH):
        want = unsplit_losses(4, 2, comm.device, lengths=lengths)
        truth = unsplit_losses(4, 2, comm.device, torch.float64, lengths=lengths)
        shape = None if exchanged else lambda number: (lengths[number], *SHAPE[1:])
        got = pipeline_losses(ctx, comm, 2, 4, 2, lengths, shape, overlap=not exchanged, deallocate=True)
    if exchanged:
        with pytest.raises(ValueError, match="with variable_seq_lengths the host waits for each shape"):
            pipeline_losses(ctx, comm, 1, 4, 1, lengths, overlap=True)
    comm.close()
    if ctx.device.type == "cpu":
        assert torch.equal(got, want)
    assert_close_to(got, truth, terms=CONFIG.features * CONFIG.layers)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_backward_pipelining_forward_only_gives_the_losses_and_no_gradients(ctx, backend):
    comm = P2PCommunicator(ctx, backend=backend, slot_bytes=4096)
    chunks = stages_of(build().to(comm.device), comm.rank, comm.size, 2)
    data = batches(CONFIG, 4, 0, comm.device)
    for overlap in (False, True):
        options = {"tensor_shape": SHAPE, "overlap": overlap, "forward_only": True, "deallocate": True}
        losses = forward_backward_pipelining(chunks, data, loss_of, comm, **options)
        with torch.no_grad():
            whole = build().to(comm.device).double()
            want = [loss_of(whole(tokens, torch.arange(len(tokens), device=comm.device)), t) for tokens, t in data]
        assert len(losses) == 4 * comm.rank and not any(loss.requires_grad for loss in losses)
        for loss, truth in zip(losses, want, strict=False):
            assert_close_to(loss, truth, terms=CONFIG.features * CONFIG.layers)
        assert all(parameter.grad is None for parameter in chunks.parameters())
    comm.close()


class Twice(nn.Module):
    """A stage of two streams of activations, one of which may not need a gradient."""

    def __init__(self, first):
        super().__init__()
        self.first, self.weight = first, nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x):
        a, b = (x, x + 1.0) if self.first else (x["a"], x["b"][0])
        return {"a": a * self.weight, "b": [b + self.weight]}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_backward_pipelining_passes_dicts_and_lists(ctx, backend):
    comm = P2PCommunicator(ctx, backend=backend, slot_bytes=4096)
    stage = Twice(ctx.rank == 0).to(comm.device)
    data = [(torch.arange(3.0, device=comm.device) + number, None) for number in range(3)]

    def loss_of_both(output, _):
        return (output["a"] * output["b"][0]).sum()

    shapes = {"a": (3,), "b": [(3,)]}
    losses = forward_backward_pipelining([stage], data, loss_of_both, comm, tensor_shape=shapes, deallocate=True)
    stages = [Twice(True).to(comm.device).double(), Twice(False).to(comm.device).double()]
    want = [loss_of_both(stages[1](stages[0](x.double())), None) for x, _ in data]
    (sum(want) / 3).backward()
    scale = stages[ctx.rank].weight.grad.abs().max()
    assert_close_to(stage.weight.grad / scale, stages[ctx.rank].weight.grad / scale, terms=8)
    assert [loss.item() for loss in losses] == [loss.item() for loss in want] * ctx.rank
    comm.close()


class Branch(nn.Module):
    """The first stage: two things to send, the second one with or without a gradient."""

    def __init__(self, constant: bool):
        super().__init__()
        self.main, self.side, self.constant = nn.Linear(16, 16), nn.Linear(16, 16), constant

    def forward(self, x):
        return {"h": self.main(x), "rest": torch.ones_like(x) if self.constant else self.side(x)}


class PassOn(nn.Module):
    """A stage between: it computes one of them, and passes the other one on, perhaps used as well."""

    def __init__(self, used: bool):
        super().__init__()
        self.main, self.used = nn.Linear(16, 16), used

    def forward(self, x):
        h = self.main(x["h"])
        return {"h": h * x["rest"] if self.used else h, "rest": x["rest"]}


class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Linear(16, 16)

    def forward(self, x):
        return self.main(x["h"]) + x["rest"]


def gradients_of(ctx, stages, comm, shape, deallocate, frozen=False):
    """[losses], [gradients of this rank's stage], of a step of training."""
    torch.manual_seed(0)
    stage = [make() for make in stages][ctx.rank].to(comm.device)
    if frozen and ctx.rank == 0:
        stage.requires_grad_(False)
    torch.manual_seed(1)
    data = [(torch.randn(8, 16, device=comm.device), torch.zeros(8, 16, device=comm.device)) for _ in range(4)]
    options = {"tensor_shape": shape, "deallocate": deallocate}
    losses = forward_backward_pipelining([stage], data, F.mse_loss, comm, **options)
    return losses, [parameter.grad for parameter in stage.parameters()]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("used", [False, True], ids=["passed on", "used too"])
@pytest.mark.parametrize("constant", [False, True], ids=["gradient", "constant"])
def test_forward_backward_pipelining_does_not_free_what_a_stage_passes_on(ctx, constant, used):
    """Cut to one element, it would give a gradient of one element, and the stage before takes its first numbers."""
    comm = P2PCommunicator(ctx, slot_bytes=4096)
    stages = [lambda: Branch(constant), lambda: PassOn(used), Join]
    shape = {"h": (8, 16), "rest": (8, 16)}
    (losses, want), (again, found) = (gradients_of(ctx, stages, comm, shape, form) for form in (False, True))
    comm.close()
    assert len(again) == len(losses) and all(map(torch.equal, again, losses))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, want, strict=True)), (found, want)
    torch.manual_seed(0)  # the same without a pipeline
    whole = nn.Sequential(*[make() for make in stages]).to(comm.device).double()
    torch.manual_seed(1)
    data = [torch.randn(8, 16, device=comm.device) for _ in range(4)]
    for x in data:
        (F.mse_loss(whole(x.double()), torch.zeros_like(x, dtype=torch.float64)) / len(data)).backward()
    for mine, of_whole in zip(found, whole[ctx.rank].parameters(), strict=True):
        if mine is None:
            assert of_whole.grad is None
        else:
            assert_close_to(mine, of_whole.grad, terms=256)


def test_forward_backward_pipelining_refuses_arguments_before_anything_is_sent():
    good = dict(stage_chunks=[Scale()], microbatches=[(torch.ones(8, 3), None)] * 2, loss_fn=F.mse_loss)
    for wrong, error, message in (
        (dict(stage_chunks=Scale()), TypeError, "stage_chunks is Scale; pass a list of this rank's chunks"),
        (dict(microbatches=iter([])), TypeError, "microbatches=.* must be a list"),
        (dict(microbatches=[torch.ones(8, 3)]), TypeError, "microbatch 0 is Tensor; each must be .input, target"),
        (dict(stage_chunks=[]), ValueError, "stage_chunks is empty; every rank has a part of the model"),
        (dict(stage_chunks=[torch.relu]), TypeError, r"stage_chunks\[0\]=.* must be an nn.Module"),
        (dict(microbatches=[(torch.ones(8, 3), None, None)]), TypeError, r"microbatches\[0\]\[2\]=None must be a dict"),
        (dict(overlap="no"), TypeError, "overlap='no' must be True or False"),
        (dict(tensor_shape=lambda number: None), TypeError, "tensor_shape: the shape None .* must be a tuple of sizes"),
        (dict(loss_fn="mse"), TypeError, "loss_fn='mse' must be a function"),
        (dict(no_sync_func=3), TypeError, "no_sync_func=3 must be a function"),
        (dict(grad_sync_func=[print, print]), ValueError, "grad_sync_func has 2 functions for 1 chunks"),
        (dict(tensor_shape=(8, -3)), ValueError, "tensor_shape: a size of the shape .* must be at least 0"),
        (dict(tensor_shape="8x3"), TypeError, "tensor_shape: the shape '8x3' .* must be a tuple of sizes"),
    ):
        wire = Recorder()
        comm = P2PCommunicator(Ranks(0, 2), backend=wire)
        with pytest.raises(error, match=message):
            forward_backward_pipelining(comm=comm, **{"tensor_shape": (8, 3)} | good | wrong)
        assert not wire.trace and comm.open_handles == []
    with pytest.raises(TypeError, match="comm=3 must be a P2PCommunicator"):
        forward_backward_pipelining(comm=3, tensor_shape=(8, 3), **good)


@pytest.mark.parametrize("output, kind", [((torch.ones(8, 3), 3), "int"), (dict(a="b"), "str")])
def test_forward_backward_pipelining_refuses_what_is_no_tensor_between_stages(output, kind):
    stage, wire = Scale(), Recorder()
    stage.forward = lambda x: output
    message = f"part 0 of the model makes {kind} of microbatch 0; only tensors go from stage to stage"
    with pytest.raises(TypeError, match=message):
        data, comm = [(torch.ones(8, 3), None)], P2PCommunicator(Ranks(0, 2), backend=wire)
        forward_backward_pipelining([stage], data, None, comm, tensor_shape=(8, 3), forward_only=True)
    assert not wire.trace


def test_forward_backward_pipelining_refuses_a_loss_that_is_no_scalar():
    comm, data = P2PCommunicator(Ranks(0, 1), backend=Recorder()), [(torch.ones(2, 3), torch.zeros(2, 3))]
    with pytest.raises(TypeError, match=r"loss_fn returns a tensor of shape \(2, 3\); return a scalar tensor, or"):
        forward_backward_pipelining([Scale()], data, torch.sub, comm)


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_forward_backward_pipelining_refuses_what_the_next_stage_does_not_expect_before_it_is_sent(
    forward_only, overlap
):
    data = [(torch.ones(rows, 3), None) for rows in (8, 8, 8, 5)]
    shapes = {"a": (8, 3), "b": (8, 3)}
    cases = [
        (Scale(), (8, 3), 3, r"part 0 of the model makes \(5, 3\) of microbatch 3, but tensor_shape says \(8, 3\); "
         r"pass a function of the microbatch's number, or a communicator with variable_seq_lengths=True"),
        (Scale(), [8, 2], 0, r"makes \(8, 3\) of microbatch 0, but tensor_shape says \(8, 2\)"),
        (Twice(True), shapes, 6, r"makes {'a': \(5, 3\), 'b': \[\(5, 3\)\]} of microbatch 3, but tensor_shape says"),
        (Twice(True), {"b": (8, 3), "a": (8, 3)}, 0, "of microbatch 0"),  # sent in another order
        (Scale(), lambda number: (len(data[number][0]), 3), 4, None),
    ]  # fmt: skip
    exchanged = [] if overlap or not forward_only else [  # a header before each tensor
        (Scale(), None, 8, None),
        (Twice(True), None, 0, "of microbatch 0, but tensor_shape says None; pass its lists and dicts, with None for"),
        (Twice(True), {"a": None, "b": [None]}, 16, None),
    ]  # fmt: skip
    for stage, shape, sent, message in cases + exchanged:
        wire, varies = Recorder(), (stage, shape, sent, message) in exchanged
        comm = P2PCommunicator(Ranks(0, 2), backend=wire, variable_seq_lengths=varies)
        context = contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message)
        options = {"tensor_shape": shape, "forward_only": forward_only, "overlap": overlap}
        with context:
            forward_backward_pipelining([stage], data, None, comm, **options)
        assert sum(verb == "send" for verb, *_ in wire.trace) == sent


@pytest.mark.ranks(2)
@pytest.mark.parametrize("deallocate", [False, True])
def test_forward_backward_pipelining_takes_a_frozen_stage(ctx, deallocate):
    comm = P2PCommunicator(ctx, slot_bytes=4096)
    stages = [lambda: nn.Linear(16, 16)] * 2
    _, want = gradients_of(ctx, stages, comm, (8, 16), False)
    _, found = gradients_of(ctx, stages, comm, (8, 16), deallocate, frozen=True)
    comm.close()
    assert found == [None, None] if ctx.rank == 0 else all(map(torch.equal, found, want))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "rank, message", [(0, "ValueError: of microbatch 2"), (1, "TypeError: .* a detached tensor, which has no gradient")]
)
def test_forward_backward_pipelining_ends_on_all_ranks_with_the_error_of_one(ctx, rank, message, overlap):
    def forward(x):
        seen.append(x)
        if ctx.rank == rank == 0 and len(seen) == 3:
            raise ValueError("of microbatch 2")
        return Scale.forward(stage, x)

    seen, stage = [], Scale().to(ctx.device)
    stage.forward, data = forward, [(torch.ones(8, 3, device=ctx.device), None)] * 6
    loss = lambda y, _: y.detach().sum() if rank else y.sum()  # noqa: E731
    with tkernels.init(ctx.group.process_group, heap_bytes=8 << 20) as own:
        comm = P2PCommunicator(own, slot_bytes=4096)
        message = message if ctx.rank == rank else f"rank {rank} has failed: {message}"
        with pytest.raises((ValueError, TypeError) if ctx.rank == rank else tkernels.TkernelsError) as caught:
            forward_backward_pipelining([stage], data, loss, comm, tensor_shape=(8, 3), overlap=overlap)
            if ctx.device.type == "cuda":  # the host may have queued all of it before the other rank failed
                torch.cuda.synchronize()
                own.check()
        assert re.match(message, f"{caught.typename}: {caught.value}" if ctx.rank == rank else str(caught.value))
        if ctx.rank == rank:
            comm.close()  # it waits for no peer


@pytest.mark.ranks(2)
def test_forward_backward_pipelining_refuses_steps_that_differ_between_ranks(ctx):
    data, stage, other = [(torch.ones(8, 3, device=ctx.device), None)] * 6, Scale().to(ctx.device), ctx.rank == 1
    own = tkernels.init(ctx.group.process_group, heap_bytes=8 << 20)
    comm = P2PCommunicator(own, slot_bytes=4096)
    step = functools.partial(forward_backward_pipelining, loss_fn=lambda y, _: y.sum(), comm=comm, tensor_shape=(8, 3))
    for differs, options in (
        ("microbatches by rank: 6, 5", dict(microbatches=data[other:])),
        ("chunks by rank: 1, 2", dict(stage_chunks=[stage] * (1 + other))),
        ("forward_only by rank: False, True", dict(forward_only=other)),
    ):
        with pytest.raises(MismatchError, match=f"forward_backward_pipelining: the ranks' calls differ, in {differs}"):
            step(**dict(stage_chunks=[stage], microbatches=data) | options)
    wrong = dict(stage_chunks=[stage], microbatches=data, loss_fn=None if other else F.mse_loss)
    with pytest.raises(TypeError, match=r"loss_fn=None must be a function .*on rank 1|^[^(]*loss_fn=None must be"):
        step(**wrong)
    assert step([stage], data) == ([24.0] * 6 if other else [])
    comm.close()
    own.finalize()


@pytest.mark.ranks(2)
def test_forward_backward_pipelining_lets_the_callers_handle_be_open_and_must_know_shapes(ctx):
    comm = P2PCommunicator(ctx, slot_bytes=4096)
    with pytest.raises(ValueError, match="tensor_shape is None.*variable_seq_lengths=True"):
        gradients_of(ctx, [lambda: nn.Linear(16, 16)] * 2, comm, None, True)
    sent = comm.isend(torch.full((3,), 1.0 + ctx.rank, device=comm.device), 1) if ctx.rank == 0 else None
    received, arrived = comm.irecv((3,), None, 0) if ctx.rank == 1 else (None, None)
    gradients_of(ctx, [lambda: nn.Linear(16, 16)] * 2, comm, (8, 16), True)
    (arrived or sent).wait()
    assert received is None or received.tolist() == [1.0] * 3
    comm.close()


def test_split_into_stages_takes_the_blocks_in_order():
    blocks = [nn.Linear(1, 1) for _ in range(5)]
    embedding, head = nn.Identity(), nn.Identity()
    parts = {}
    for rank in range(2):
        chunks = split_into_stages(embedding, blocks, head, mesh=Ranks(rank, 2), num_chunks=2)
        parts |= {2 * chunk + rank: stage.parts for chunk, stage in enumerate(chunks)}
    assert [part for number in range(4) for part in parts[number]] == [embedding, *blocks, head]
