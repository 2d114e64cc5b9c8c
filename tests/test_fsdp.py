"""FullyShard: the unsharded model's losses, the same bits whatever the streams do, and what it refuses."""

import copy
import dataclasses
import logging
import math
import pickle
import re
import types
import warnings

import pytest
import torch
import torch._dynamo.utils
import torch.distributed as dist
from streams import Race, Simulator, subsets
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transports import gpu_only, message_on_every_rank, simulated_only

import tkernels
from tkernels.comm import LeaseError, MismatchError
from tkernels.demo.data import Text
from tkernels.demo.model import Block, ModelConfig, Transformer
from tkernels.demo.training import ADAM_EPSILON, LEARNING_RATE, allowed_loss
from tkernels.layers import ParallelMLP, captured, gather_state_dict, load_full_state_dict, sharded_state_dict
from tkernels.layers.data_parallel.ddp import OverlappedDDP
from tkernels.layers.data_parallel.fsdp import FullyShard
from tkernels.layers.data_parallel.zero import ZeroOptimizer
from tkernels.layers.tensor_parallel.functions import all_reduce_sequence_parallel_grads
from tkernels.testing.compare import assert_close_to, integers, normal

FEATURES = 8
LATE = 4_000_000  # cycles, about 2 ms: several times what the host needs for a unit
# With all parameters gathered before the first reduction, what must wait for reductions is the next gradient, and not a
# gather in between; with two copies, gathers must wait for compute.
COPIES = {"comm": 5, "compute": 2}


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.up, self.down = nn.Linear(FEATURES, 40), nn.Linear(40, FEATURES)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class StateSpace(nn.Module):
    """Shaped like a state-space layer: a gate, a decay, and no bias."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(FEATURES, 32, bias=False), nn.Linear(16, FEATURES, bias=False)
        self.decay = nn.Parameter(torch.linspace(0.1, 0.9, 16))

    def forward(self, x):
        values, gate = self.into(x).chunk(2, dim=-1)
        return x + self.out(values * self.decay * torch.sigmoid(gate))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(FEATURES, 3)
        self.weight = nn.Parameter(0.1 * torch.randn(3, FEATURES, FEATURES))

    def forward(self, x):
        share = self.router(x).softmax(-1)
        return x + torch.einsum("be,bf,efg->bg", share, x, self.weight)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.norm = nn.ModuleList(StateSpace() for _ in range(3)), nn.LayerNorm(FEATURES)


class Hybrid(nn.Module):
    """Units of three shapes between two layers that belong to none."""

    def __init__(self, kinds=(Dense, StateSpace, Experts, Dense, StateSpace)):
        super().__init__()
        self.embed = nn.Linear(4, FEATURES)
        self.layers = nn.ModuleList(kind() for kind in kinds)
        self.head = nn.Linear(FEATURES, 3)

    def forward(self, x, order=None):
        x = self.embed(x)
        for i in order or range(len(self.layers)):
            x = self.layers[i](x)
        return self.head(x)


UNITS = (Dense, StateSpace, Experts)


def hybrid(ctx, seed=0, dtype=torch.float32, **options):
    torch.manual_seed(seed)
    return Hybrid(**options).to(ctx.device, dtype)


def batches(ctx, steps, dtype=torch.float32):
    """Each step's whole batch, [4 * R, 4]: the same on every rank."""
    return [normal((4 * ctx.size, 4), dtype, 100 + step, device=ctx.device) for step in range(steps)]


def own(ctx, batch):
    return batch.chunk(ctx.size)[ctx.rank]


def train(ctx, model, data, optimizer=None, part=own):
    """One step for each batch; returns this rank's losses."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    losses = []
    for batch in data:
        y = model(part(ctx, batch))
        loss = y.to(torch.promote_types(y.dtype, torch.float32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def same_bits(first: FullyShard, second: FullyShard):
    return all(torch.equal(a, b) for a, b in zip(first.shards.values(), second.shards.values(), strict=True))


def whole_batch(ctx, batch):
    return batch


def in_fp64(model):
    """The model as the truth: the same weights in fp64, whatever the dtype of its input."""
    model.register_forward_pre_hook(lambda _, inputs: (inputs[0].double(), *inputs[1:]))
    return model.double()


def assert_trained_alike(ctx, sharded, unsharded, steps):
    """The same weights, but for the roundings of each step. unsharded: in fp64."""
    full, reference = sharded.gather_state_dict(), unsharded.state_dict()
    assert list(full) == list(reference)
    for name, value in reference.items():
        assert_close_to(full[name].to(ctx.device), value, terms=64 * steps)


# The same training as unsharded


def demo_losses(ctx, model, config, steps, part, seed=3):
    generator, text = torch.Generator().manual_seed(seed), Text.of_python_help()
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), eps=ADAM_EPSILON)
    losses = []
    positions = torch.arange(config.sequence, device=ctx.device)
    for _ in range(steps):
        tokens, targets = (part(t.to(ctx.device)) for t in text.batch(config.sequence, config.batch, generator))
        loss = F.cross_entropy(model(tokens, positions).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.ranks(2, 4)
def test_the_demo_model_trains_to_the_losses_of_the_unsharded_one(ctx):
    steps = 4
    vocabulary = len(Text.of_python_help().vocabulary)
    config = ModelConfig(vocabulary=vocabulary, sequence=16, batch=2 * ctx.size, heads=2, layers=3)
    torch.manual_seed(0)
    model = Transformer(config).to(ctx.device)
    columns = slice(2 * ctx.rank, 2 * ctx.rank + 2)
    with sdpa_kernel(SDPBackend.MATH):  # the same bits on every run
        results = []
        for overlap in (True, False):
            sharded = FullyShard(copy.deepcopy(model), Block, mesh=ctx, overlap=overlap)
            results.append((demo_losses(ctx, sharded, config, steps, lambda t: t[:, columns]), sharded))
        want = demo_losses(ctx, model.double(), config, steps, lambda t: t)
    (losses, first), (without_overlap, second) = results
    assert torch.equal(losses, without_overlap) and same_bits(first, second)
    mean = tkernels.all_reduce(losses, ctx=ctx) / ctx.size
    assert abs(want[0].item() - math.log(vocabulary)) < 0.1 and want[-1] < want[0] - 0.2
    for step in range(steps):
        allowed = allowed_loss(config, torch.float32, want[step].item(), step)
        assert abs(mean[step] - want[step]).item() <= allowed, step


@pytest.mark.ranks(2)
def test_a_lost_gradient_of_one_rank_would_be_noticed(ctx):
    config = ModelConfig(vocabulary=79, sequence=16, batch=4, heads=2)
    torch.manual_seed(0)
    model = Transformer(config).to(ctx.device)
    columns = slice(2 * ctx.rank, 2 * ctx.rank + 2)
    sharded = FullyShard(copy.deepcopy(model), Block, mesh=ctx)
    reduce = sharded._reduce

    def lose(flat):
        if ctx.rank == 1 and flat.id.startswith("blocks.1"):
            sharded.gradient_pool.acquire(flat.id).tensor.zero_()
        reduce(flat)

    sharded._reduce = lose
    losses = demo_losses(ctx, sharded, config, 4, lambda t: t[:, columns])
    want = demo_losses(ctx, model.double(), config, 4, lambda t: t)
    mean = tkernels.all_reduce(losses, ctx=ctx) / ctx.size
    assert abs(mean - want)[3].item() > 10 * allowed_loss(config, torch.float32, want[3].item(), 3)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_units_of_different_shapes_train_as_without_a_pool(ctx, dtype):
    data = batches(ctx, 4, dtype)
    pooled = FullyShard(hybrid(ctx, dtype=dtype), UNITS, mesh=ctx, memory="symmetric")
    alone = FullyShard(hybrid(ctx, dtype=dtype), UNITS, mesh=ctx, pool="fixed", overlap=False)
    assert len(alone.parameter_pool.plan.others) == 4 and len(pooled.parameter_pool.plan.others) == 1
    losses = [train(ctx, model, data) for model in (pooled, alone)]
    assert torch.equal(*losses) and same_bits(pooled, alone)
    pooled.parameter_pool.check_order()
    pooled.gradient_pool.check_order()
    if dtype is torch.float32:
        unsharded = in_fp64(hybrid(ctx))
        train(ctx, unsharded, data, part=whole_batch)
        assert_trained_alike(ctx, pooled, unsharded, 4)
    for pool in (pooled.parameter_pool, pooled.gradient_pool):
        pool.close()


@pytest.mark.ranks(2)
def test_every_bucket_stays_where_it_is_from_the_first_step_on(ctx):
    sharded = FullyShard(hybrid(ctx), UNITS, mesh=ctx)
    seen, acquire = {}, sharded.parameter_pool.acquire

    def watch(bucket):
        lease = acquire(bucket)
        seen.setdefault(bucket, set()).add(lease.tensor.data_ptr())
        return lease

    sharded.parameter_pool.acquire = watch
    train(ctx, sharded, batches(ctx, 4))
    with torch.no_grad():
        sharded(own(ctx, batches(ctx, 1)[0]))
    train(ctx, sharded, batches(ctx, 2))
    assert len(seen) == 6 and all(len(addresses) == 1 for addresses in seen.values())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("pool", ["max", "fixed"])
def test_one_unit_is_gathered_ahead_once_the_order_is_known(ctx, pool):
    sharded = FullyShard(hybrid(ctx), UNITS, mesh=ctx, pool=pool)
    events, gather = [], sharded._gather
    sharded._gather = lambda flat: events.append(f"gather {flat.id[7]}") or gather(flat)
    for i, layer in enumerate(sharded.module.layers):
        layer.register_forward_pre_hook(lambda module, args, i=i: events.append(f"use {i}"))
    x = own(ctx, batches(ctx, 1)[0])
    sharded(x).sum().backward()
    del events[0]  # the root
    first = [f"{verb} {i}" for i in range(5) for verb in ("gather", "use")]
    assert events == first + [f"gather {i}" for i in (4, 3, 2, 1, 0)]
    events.clear()
    sharded(x).sum().backward()
    forward = ["gather 0", "gather 1", "use 0", "gather 2", "use 1", "gather 3", "use 2", "gather 4", "use 3"]
    # The last unit of forward is the first of backward: it stays.
    assert events[1:] == [*forward, "gather 3", "use 4", "gather 2", "gather 1", "gather 0"]


# What training does besides


@pytest.mark.ranks(2)
def test_accumulated_gradients_are_those_of_the_whole_batch(ctx):
    parts = batches(ctx, 3)
    unsharded, sharded = in_fp64(hybrid(ctx)), FullyShard(hybrid(ctx), UNITS, mesh=ctx)
    unsharded(torch.cat(parts)).square().sum().backward()
    reduced = []
    reduce = sharded._reduce
    sharded._reduce = lambda flat: reduced.append(flat.id) or reduce(flat)
    grads = []
    for silent in (True, False):
        for i, part in enumerate(parts):
            if silent and i < 2:
                with sharded.no_sync():
                    sharded(own(ctx, part)).square().sum().backward()
                assert not reduced
            else:
                sharded(own(ctx, part)).square().sum().backward()
        assert len(reduced) == (6 if silent else 18)
        reduced.clear()
        grads.append([shard.grad.clone() for shard in sharded.shards.values()])
        sharded.zero_grad()
    for once, each, flat in zip(*grads, sharded._flats.values(), strict=True):
        whole = [tkernels.all_gather(grad, ctx=ctx) * ctx.size for grad in (once, each)]
        for names, *views in zip(flat.names, *(flat.views(w) for w in whole), strict=True):
            want = unsharded.get_parameter(names[0]).grad
            scale = want.abs().max()
            for view in views:
                assert_close_to(view / scale, want / scale, terms=512)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_units_give_the_same_bits(ctx, reentrant):
    class Checkpointed(Hybrid):
        def forward(self, x):
            x = self.embed(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return self.head(x)

    data = batches(ctx, 4)
    torch.manual_seed(0)
    recomputing = FullyShard(Checkpointed().to(ctx.device), UNITS, mesh=ctx)
    keeping = FullyShard(hybrid(ctx), UNITS, mesh=ctx)
    losses = [train(ctx, model, data) for model in (recomputing, keeping)]
    assert torch.equal(*losses) and same_bits(recomputing, keeping)


@pytest.mark.ranks(2)
def test_shards_and_their_optimizer_can_be_pickled(ctx):
    model = FullyShard(hybrid(ctx), UNITS, mesh=ctx)
    optimizer = torch.optim.AdamW(model.parameters())
    copies, _ = pickle.loads(pickle.dumps((list(model.parameters()), optimizer)))
    assert all(map(torch.equal, copies, model.parameters()))


@pytest.mark.ranks(2)
def test_marked_parameters_have_marked_shards_of_their_own(ctx):
    """A gradient of a rank's rows alone is yet to be summed over the tensor-parallel ranks, here both."""
    model = hybrid(ctx, kinds=(Dense, Dense))
    for layer in model.layers:
        for parameter in layer.norm.parameters():
            parameter.sequence_parallel = True
    whole, (x,) = in_fp64(copy.deepcopy(model)), batches(ctx, 1)
    whole(x).square().sum().backward()
    with tkernels.init([dist.new_group([rank]) for rank in range(2)][ctx.rank], heap_bytes=8 << 20) as alone:
        sharded = FullyShard(model, Dense, mesh=alone)
        sharded(own(ctx, x)).square().sum().backward()
        all_reduce_sequence_parallel_grads(sharded, mesh=ctx)
        marked = [flat for flat in sharded._flats.values() if getattr(flat.shard, "sequence_parallel", False)]
        assert [flat.id for flat in marked] == [f"layers.{i}:float32-sequence_parallel" for i in range(2)]
        for flat in marked:
            for (name,), grad in zip(flat.names, flat.views(flat.shard.grad), strict=True):
                assert ".norm." in name
                assert_close_to(grad, whole.get_parameter(name).grad, terms=512)
        assert sharded.gather_state_dict().keys() == whole.state_dict().keys()


@pytest.mark.ranks(2)
def test_a_checkpoint_of_several_units_is_refused_and_the_module_can_be_used_again(ctx):
    class Checkpointed(Hybrid):
        several = True

        def forward(self, x):
            if not self.several:
                return super().forward(x)
            last = nn.Sequential(*self.layers[2:])  # three units, where there is room for two at a time
            x = self.layers[1](self.layers[0](self.embed(x)))
            return self.head(checkpoint(last, x, use_reentrant=False))

    data = batches(ctx, 2)
    torch.manual_seed(0)
    model = FullyShard(Checkpointed().to(ctx.device), UNITS, mesh=ctx)
    with pytest.raises(LeaseError, match="unit layers.2 can't be gathered: .* let each checkpoint hold one unit alone"):
        train(ctx, model, data)
    model.module.several = False
    model.zero_grad()
    keeping = FullyShard(hybrid(ctx), UNITS, mesh=ctx)
    assert torch.equal(*(train(ctx, each, data) for each in (model, keeping)))
    assert same_bits(model, keeping)


@pytest.mark.ranks(2)
def test_tied_parameters_are_one_and_belong_to_the_root(ctx):
    def tied():
        model = hybrid(ctx, kinds=(Dense, StateSpace, Dense))
        model.layers[2].up.weight = model.layers[0].up.weight  # of two units
        model.head.weight = nn.Parameter(model.head.weight[:, :4].detach().clone().t().contiguous().t())
        model.head = nn.Linear(FEATURES, 4, device=ctx.device)
        model.extra = nn.Linear(4, FEATURES, device=ctx.device)
        model.extra.weight = model.embed.weight  # within the root, and never used through this name
        return model

    torch.manual_seed(1)
    unsharded = tied()
    sharded = FullyShard(copy.deepcopy(unsharded), UNITS, mesh=ctx)
    root = [names for flat in sharded._root.flats for names in flat.names]
    assert ["layers.0.up.weight", "layers.2.up.weight"] in root and ["embed.weight", "extra.weight"] in root
    data = batches(ctx, 3)
    train(ctx, sharded, data)
    train(ctx, in_fp64(unsharded), data, part=whole_batch)
    assert_trained_alike(ctx, sharded, unsharded, 3)
    full = sharded.gather_state_dict()
    assert torch.equal(full["layers.0.up.weight"], full["layers.2.up.weight"])


@pytest.mark.ranks(2)
def test_frozen_unused_and_mixed_parameters(ctx):
    class Odd(Dense):
        def __init__(self):
            super().__init__()
            self.unused = nn.Parameter(torch.ones(5))
            self.up.weight.requires_grad_(False)
            self.register_buffer("seen", torch.zeros(1))
            self.norm.to(torch.bfloat16)

        def forward(self, x):
            return x + self.down(F.gelu(self.up(self.norm(x.bfloat16()).float())))

    def odd():
        torch.manual_seed(0)
        return Hybrid(kinds=(Odd, StateSpace, Odd)).to(ctx.device)

    unsharded, sharded = odd(), FullyShard(odd(), (Odd, StateSpace), mesh=ctx)
    ids = {flat.id for flat in sharded._flats.values()}
    assert {"layers.0:float32", "layers.0:bfloat16", "layers.0:float32-frozen", "layers.1:float32"} <= ids
    data = [integers((4 * ctx.size, 4), torch.float32, step, device=ctx.device) for step in range(3)]
    train(ctx, sharded, data)
    train(ctx, unsharded, data, part=whole_batch)
    full, want = sharded.gather_state_dict(), unsharded.state_dict()
    assert list(full) != [] and full.keys() == want.keys()
    for name in ("layers.0.unused", "layers.0.up.weight", "layers.2.seen"):
        assert torch.equal(full[name], want[name].cpu())
    for name, value in want.items():  # bf16 norms round once more a step
        assert (full[name].double() - value.cpu().double()).abs().max() <= 2e-2 * value.double().abs().max(), name


@pytest.mark.ranks(2)
def test_units_none_of_whose_inputs_wants_a_gradient_end_with_their_parameters(ctx):
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.towers = nn.ModuleList(nn.Linear(4, 3) for _ in range(5))

        def forward(self, x):
            return sum(tower(x) for tower in self.towers)

    torch.manual_seed(0)
    unsharded = Towers().to(ctx.device)
    sharded = FullyShard(copy.deepcopy(unsharded), nn.Linear, mesh=ctx)
    data = batches(ctx, 3)
    train(ctx, sharded, data)
    train(ctx, in_fp64(unsharded), data, part=whole_batch)
    assert_trained_alike(ctx, sharded, unsharded, 3)


class Choosy(nn.Module):
    """Units of two branches, and two layers before and behind, or behind alone; a call says which of them it takes."""

    def __init__(self, embeds):
        super().__init__()
        self.embeds = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(2 * embeds))
        self.layers = nn.ModuleList(Branches() for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(FEATURES, 3) for _ in range(2))

    def forward(self, x, taken):
        if self.embeds:
            x = sum(self.embeds[i](x) for i in taken)
        for layer in self.layers:
            x = layer(x, taken)
        return torch.cat([self.heads[i](x) for i in taken])


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(2))

    def forward(self, x, taken):
        return x + sum(torch.tanh(self.branches[i](x)) for i in taken)


def train_beside(ctx, sharded, unsharded, loss):
    """A step of both: each rank's loss(model, rank), and their mean over ranks. unsharded: in fp64."""
    loss(sharded, ctx.rank).backward()
    (sum(loss(unsharded, rank) for rank in range(ctx.size)) / ctx.size).backward()
    for model in (sharded, unsharded):
        torch.optim.SGD(model.parameters(), 0.1).step()
        model.zero_grad()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("embeds", [True, False])
def test_ranks_may_use_different_parameters_of_a_unit_and_of_the_root(ctx, embeds):
    torch.manual_seed(0)
    unsharded = Choosy(embeds).to(ctx.device)
    sharded = FullyShard(copy.deepcopy(unsharded), Branches, mesh=ctx)
    in_fp64(unsharded)
    taken = [[(0, 1), (0, 1)], [(0, 1), (0,)], [(1,), (0,)], [(0,), (0, 1)], [(0, 1), (0, 1)]]
    data = [normal((ctx.size, 4, FEATURES), torch.float32, step, device=ctx.device) for step in range(len(taken))]
    for x, mine in zip(data, taken, strict=True):
        train_beside(ctx, sharded, unsharded, lambda model, rank: model(x[rank], mine[rank]).square().mean())  # noqa: B023
    assert_trained_alike(ctx, sharded, unsharded, len(taken))


@pytest.mark.ranks(2)
def test_what_the_shard_is_frozen_for_its_parameters_are(ctx):
    """As in adversarial training: the model is frozen in every other step, in which only its input is trained."""
    unsharded, sharded = in_fp64(hybrid(ctx)), FullyShard(hybrid(ctx), UNITS, mesh=ctx)
    x = [normal((4, 4), torch.float32, rank, device=ctx.device).requires_grad_() for rank in range(ctx.size)]
    for step in range(4):
        for model in (sharded, unsharded):
            model.requires_grad_(step % 2 == 0)
        before = [shard.clone() for shard in sharded.shards.values()]
        train_beside(ctx, sharded, unsharded, lambda model, rank: model(x[rank]).square().mean())
        assert all(map(torch.equal, before, sharded.shards.values())) == (step % 2 == 1)
    assert_trained_alike(ctx, sharded, unsharded, 4)
    assert x[ctx.rank].grad is not None

    sharded.requires_grad_(True)
    sharded(x[0])
    sharded.module.layers[0].up.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="requires_grad of layers.0.up.weight was changed, .* the shard, 'layers.0:fl"):
        sharded(x[0])
    frozen = FullyShard(hybrid(ctx).requires_grad_(False), UNITS, mesh=ctx)
    frozen.requires_grad_(True)
    with pytest.raises(ValueError, match="embed.weight is to be trained, but was frozen when the module was sharded"):
        frozen(x[0])


@pytest.mark.ranks(2)
def test_a_second_derivative_is_refused(ctx):
    sharded, x = FullyShard(hybrid(ctx), UNITS, mesh=ctx), torch.ones(4, 4, device=ctx.device, requires_grad=True)
    (slope,) = torch.autograd.grad(sharded(x).square().mean(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.square().sum().backward()


@dataclasses.dataclass(frozen=True)
class Wrapped:
    values: torch.Tensor
    name: str = "wrapped"


class Wrapping(Dense):
    def forward(self, x):
        return Wrapped(super().forward(x.values))


@pytest.mark.ranks(2)
def test_units_may_pass_dataclasses_on_but_nothing_that_hides_tensors(ctx):
    class Model(Hybrid):
        def forward(self, x):
            x = Wrapped(self.embed(x))
            for layer in self.layers:
                x = layer(x)
            return self.head(x.values)

    class Hiding(Dense):
        def forward(self, x):
            return types.SimpleNamespace(values=super().forward(x))

    data = batches(ctx, 3)
    for frozen in (False, True):
        torch.manual_seed(0)
        unsharded = Model(kinds=4 * (Wrapping,)).to(ctx.device)
        unsharded.layers.requires_grad_(not frozen)
        sharded = FullyShard(copy.deepcopy(unsharded), Wrapping, mesh=ctx)
        train(ctx, sharded, data)
        train(ctx, in_fp64(unsharded), data, part=whole_batch)
        assert_trained_alike(ctx, sharded, unsharded, 3)
    hiding = FullyShard(hybrid(ctx, kinds=(Hiding,)), Hiding, mesh=ctx)
    with pytest.raises(TypeError, match="unit layers.0 returns SimpleNamespace, in which no tensor is found"):
        hiding(own(ctx, data[0]))


@pytest.mark.ranks(2)
def test_what_does_not_depend_on_a_units_input_still_ends_in_backward(ctx):
    class Beside(StateSpace):
        def forward(self, x):
            return super().forward(x.detach())

    class Model(Hybrid):
        def forward(self, x):
            x, beside = self.embed(x), 0.0
            for layer in self.layers:
                if isinstance(layer, Beside):
                    beside = beside + layer(x)
                else:
                    x = layer(x)
            return self.head(x + beside)

    torch.manual_seed(0)
    unsharded = Model(kinds=3 * (Dense, Beside)).to(ctx.device)
    sharded = FullyShard(copy.deepcopy(unsharded), (Dense, Beside), mesh=ctx)
    in_fp64(unsharded)
    for batch in batches(ctx, 3):
        parts = batch.chunk(ctx.size)
        train_beside(ctx, sharded, unsharded, lambda model, rank: model(parts[rank]).square().mean())  # noqa: B023
    assert_trained_alike(ctx, sharded, unsharded, 3)


class Some(nn.Module):
    """Units of which a call says which ones it takes, and whether it takes what is the root's."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))
        self.scale = nn.Parameter(torch.full((FEATURES,), 2.0))

    def forward(self, x, taken=(0, 1, 2), scaled=True):
        for i in taken:
            x = x + self.layers[i](x)
        return x * self.scale if scaled else x


def some(ctx):
    torch.manual_seed(0)
    return Some().to(ctx.device)


@pytest.mark.ranks(2)
def test_gradients_are_of_what_was_used_is_trained_and_is_not_held_back(ctx):
    sharded, x = FullyShard(some(ctx), nn.Linear, mesh=ctx), torch.ones(2, FEATURES, device=ctx.device)

    def with_gradients():
        return {name for name, shard in sharded.shards.items() if shard.grad is not None}

    root, first, second, third = sharded.shards
    with sharded.no_sync():
        with sharded.no_sync():
            pass
        sharded(x, (0, 1)).sum().backward()
        assert not with_gradients()
    sharded.zero_grad()
    sharded(x, (0,)).sum().backward()
    assert with_gradients() == {root, first}
    sharded.zero_grad()
    sharded.shards[second].requires_grad_(False)
    sharded(x).sum().backward()
    assert with_gradients() == {root, first, third}


@pytest.mark.ranks(2)
def test_a_rank_may_use_nothing_of_the_root(ctx):
    unsharded, sharded = in_fp64(some(ctx)), FullyShard(some(ctx), nn.Linear, mesh=ctx)
    x = normal((ctx.size, 4, FEATURES), torch.float32, 1, device=ctx.device)
    for step in range(2):
        loss = lambda model, rank: model(x[rank], scaled=rank == step).square().mean()  # noqa: B023, E731
        train_beside(ctx, sharded, unsharded, loss)
    assert_trained_alike(ctx, sharded, unsharded, 2)


@pytest.mark.ranks(2)
def test_what_a_failed_backward_has_left_is_given_back_and_its_graph_can_be_used_again(ctx):
    torch.manual_seed(0)
    unsharded = Choosy(True).to(ctx.device)
    sharded = FullyShard(copy.deepcopy(unsharded), Branches, mesh=ctx)
    in_fp64(unsharded)
    x = normal((ctx.size, 4, FEATURES), torch.float32, 1, device=ctx.device)
    failing = []

    def fail(*_):
        if failing:
            raise RuntimeError("out of luck")

    sharded.module.layers[1].branches[0].register_full_backward_pre_hook(fail)
    for taken in ((0,), (0, 1)):
        failed = sharded(x[ctx.rank], (0, 1)).square().mean()
        failing.append(failed)
        with pytest.raises(RuntimeError, match="out of luck"):
            failed.backward(retain_graph=True)
        failing.clear()
        sharded.zero_grad()

        def loss(model, rank, failed=failed, taken=taken):
            return failed if model is sharded and taken == (0, 1) else model(x[rank], taken).square().mean()

        train_beside(ctx, sharded, unsharded, loss)
    assert_trained_alike(ctx, sharded, unsharded, 2)
    failing.append(sharded(x[ctx.rank], (0, 1)).sum())
    with pytest.raises(RuntimeError, match="out of luck"):
        failing[0].backward()
    sharded.close()  # no pool holds anything


@pytest.mark.ranks(2)
def test_zero_grad_forgets_what_no_sync_has_kept(ctx):
    forgetful, plain = (FullyShard(hybrid(ctx), UNITS, mesh=ctx) for _ in range(2))
    data = batches(ctx, 4)
    with forgetful.no_sync():
        forgetful(own(ctx, data[3])).square().mean().backward()
    forgetful.zero_grad()
    for model in (forgetful, plain):
        train(ctx, model, data[:3])
    assert same_bits(forgetful, plain)


@pytest.mark.ranks(2)
def test_a_backward_that_fails_spoils_no_other(ctx):
    failing, plain = (FullyShard(hybrid(ctx), UNITS, mesh=ctx) for _ in range(2))
    for batch in batches(ctx, 4):
        for model in (failing, plain):
            x = own(ctx, batch).requires_grad_()
            losses = [model(x).square().mean() for _ in range(2)]  # both graphs are there when the first one fails
            if model is failing:
                hook = model.module.layers[2].register_full_backward_pre_hook(lambda *_: 1 // 0)
                with pytest.raises(ZeroDivisionError):
                    model(x).square().mean().backward()
                hook.remove()
                model.zero_grad()
            losses[1].backward()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert same_bits(failing, plain)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dropped", ["at once", "late"])
def test_a_backward_that_fails_leaves_no_gradient_behind(ctx, dropped):
    """Of a unit whose inputs want none, which is reduced when it is complete: the optimizer can't forget those.

    dropped: when autograd drops the callback that would have ended this backward. On a GPU a thread of autograd's may
    still hold it when backward() has raised.
    """
    torch.manual_seed(0)
    model = FullyShard(Choosy(embeds=False).to(ctx.device), Branches, mesh=ctx)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, grads, held = torch.ones(2, FEATURES, device=ctx.device), [], []

    def fail(*_):
        if dropped == "late":
            held.append(model._callback())
        raise ZeroDivisionError

    for failing in (False, True, False):
        if failing:
            hook = model.module.layers[0].branches[0].register_full_backward_pre_hook(fail)
            with pytest.raises(ZeroDivisionError):
                model(x, (0, 1)).sum().backward()
            hook.remove()
        else:
            model(x, (0, 1)).sum().backward()
            grads.append([shard.grad.clone() for shard in model.shards.values()])
        optimizer.zero_grad()
    assert all(map(torch.equal, *grads))


@pytest.mark.ranks(2)
def test_hooks_that_were_there_before_see_parameters(ctx):
    model, seen = hybrid(ctx), []
    want = model.layers[0].up.weight.norm().item()
    model.layers[0].register_forward_pre_hook(lambda layer, _: seen.append(layer.up.weight.norm().item()))
    FullyShard(model, UNITS, mesh=ctx)(own(ctx, batches(ctx, 1)[0]))
    assert seen == [want]


@pytest.mark.ranks(2)
def test_gradients_are_clipped_by_the_norm_of_all_shards(ctx):
    unsharded, sharded = in_fp64(hybrid(ctx)), FullyShard(hybrid(ctx), UNITS, mesh=ctx)
    (batch,) = batches(ctx, 1)
    unsharded(batch).square().mean().backward()
    sharded(own(ctx, batch)).square().mean().backward()
    want = torch.nn.utils.get_total_norm([p.grad for p in unsharded.parameters()])
    for max_norm, after in ((1e3, want), (0.5 * want.item(), 0.5 * want)):
        norm = sharded.clip_grad_norm_(max_norm)
        assert_close_to(norm / want, torch.ones_like(want), terms=512)
        now = sharded.clip_grad_norm_(1e3)
        assert_close_to(now / after, torch.ones_like(want), terms=512)
    sharded.zero_grad()
    assert sharded.clip_grad_norm_(1.0) == 0


@pytest.mark.ranks(2)
def test_means_that_fp16_holds_are_reached_where_it_does_not_hold_the_sums(ctx):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.float16)).to(ctx.device)
    sharded = FullyShard(model, nn.Linear, mesh=ctx)
    sharded(torch.full((1, 4), 40000.0, dtype=torch.float16, device=ctx.device)).sum().backward()
    (shard,) = sharded.shards.values()
    assert tkernels.all_gather(shard.grad, ctx=ctx).max() == 40000.0


@pytest.mark.ranks(2)
def test_another_order_and_a_failure_change_no_result(ctx):
    sharded, plain = (FullyShard(hybrid(ctx), UNITS, mesh=ctx, overlap=overlap) for overlap in (True, False))
    orders = [None, None, (0, 2, 1), None, (4, 3, 2, 1, 0), (0, 0, 1), None, None]
    for order, batch in zip(orders, batches(ctx, len(orders)), strict=True):
        for model in (sharded, plain):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            loss = model(own(ctx, batch), order).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(own(ctx, batch))
        if order == (0, 2, 1):
            with pytest.raises(IndexError):
                sharded(own(ctx, batch), (0, 1, 7))
        assert same_bits(sharded, plain), order
    assert not sharded.parameter_pool._held and not sharded.gradient_pool._held


@pytest.mark.ranks(2)
def test_evaluations_in_inference_mode_change_no_result(ctx):
    evaluated, plain = (FullyShard(hybrid(ctx), UNITS, mesh=ctx) for _ in range(2))
    data = batches(ctx, 4)
    for batch in data:
        with torch.inference_mode():
            evaluated(own(ctx, batch))
        for model in (evaluated, plain):
            train(ctx, model, [batch], torch.optim.SGD(model.parameters(), 0.1))
    assert same_bits(evaluated, plain)


@pytest.mark.ranks(2)
def test_gradients_travel_in_the_dtype_that_is_asked_for(ctx):
    data = batches(ctx, 1)
    results = {}
    for grad_dtype in (None, torch.bfloat16):
        sharded = FullyShard(hybrid(ctx), UNITS, mesh=ctx, grad_dtype=grad_dtype)
        buckets = sharded.gradient_pool.plan.buckets.values()
        assert {bucket.dtype for bucket in buckets} == {grad_dtype or torch.float32}
        sharded(own(ctx, data[0])).square().mean().backward()
        results[grad_dtype] = torch.cat([shard.grad for shard in sharded.shards.values()])
    assert results[None].dtype == results[torch.bfloat16].dtype == torch.float32
    assert not torch.equal(results[None], results[torch.bfloat16])
    # each term is rounded to bf16 on its way, and their sum once more
    bound = 2 * torch.finfo(torch.bfloat16).eps * results[None].abs().max()
    assert (results[None] - results[torch.bfloat16]).abs().max() <= bound


@pytest.mark.ranks(2)
def test_fully_shard_adds_up_passes_in_grad_dtype(ctx):
    """256 and some ones are 256 in bf16, whether the passes meet in the shards or before, in no_sync."""
    torch.manual_seed(0)
    linear = nn.Linear(4, 8, bias=False, dtype=torch.bfloat16, device=ctx.device)
    model = FullyShard(nn.Sequential(linear), (nn.Linear,), mesh=ctx, grad_dtype=torch.float32)
    (shard,) = model.shards.values()
    x = torch.ones(1, 4, dtype=torch.bfloat16, device=ctx.device)

    def passes(*gradients):
        for gradient in gradients:
            (model(x) * gradient).sum().backward()
        return shard.grad.unique().tolist()

    assert passes(256, 1, 1, 1, 1) == [260] and shard.grad.dtype == shard.dtype
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    before = shard.detach().clone()
    optimizer.step()
    assert torch.equal(shard.detach(), before - 260)
    optimizer.zero_grad()
    with model.no_sync():
        for gradient in (256, 1, 1, 1):
            (model(x) * gradient).sum().backward()
    assert shard.grad is None and passes(1) == [260]
    # What others write to `.grad` counts, however they do it.
    optimizer.zero_grad(set_to_none=False)
    assert passes(256, 1) == [256]
    norm = model.clip_grad_norm_(math.inf)
    assert norm.item() == pytest.approx(257 * 32**0.5, rel=1e-6)
    assert passes(3) == [260]
    shard.grad.data.mul_(0.5)
    assert passes(1, 1) == [132]
    shard.grad = torch.full_like(shard, 256.0)
    assert passes(1, 1, 1, 1) == [260]
    model.clip_grad_norm_(260 * 32**0.5 / 2)
    assert passes(2) == [132]


@pytest.mark.ranks(2)
def test_fully_shard_compiles_units_and_nothing_else(ctx):
    """No warning, no recompiled frame, one graph for equal units, and the bits of eager training."""
    data, told = batches(ctx, 3), []
    log, listener = logging.getLogger("torch._dynamo"), logging.Handler(logging.WARNING)
    listener.emit = lambda record: told.append(record.getMessage())
    eager, compiled = (FullyShard(hybrid(ctx, kinds=(Dense, Dense)), UNITS, mesh=ctx) for _ in range(2))
    want = train(ctx, eager, data)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    log.addHandler(listener)
    try:
        with warnings.catch_warnings(record=True) as warned, torch._dynamo.config.patch(error_on_recompile=True):
            warnings.simplefilter("always")
            compiled.compile(backend="eager")
            assert torch.equal(train(ctx, compiled, data), want)
    finally:
        log.removeHandler(listener)
    assert same_bits(eager, compiled) and not told and not [str(each.message) for each in warned]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@simulated_only
def test_fully_shard_names_a_class_that_is_no_unit_and_logs_its_pools(caplog, recwarn):
    ctx = tkernels.init(heap_bytes=8 << 20)
    try:
        with caplog.at_level(logging.INFO, "tkernels"):
            FullyShard(hybrid(ctx), UNITS, mesh=ctx)
        assert not recwarn
        pools = [record.getMessage() for record in caplog.records if "pool of" in record.getMessage()]
        for what, text in zip(("parameters", "gradients"), pools, strict=True):
            assert re.search(rf"pool of {what}\nslot .*\nfloat32\[0\] +2,944  layers.0:float32 +layers.0\n", text), text
        half = [StateSpace, Dense, StateSpace, StateSpace, StateSpace]
        with pytest.warns(UserWarning, match="class StateSpace hold 6. % .* add StateSpace to units") as warned:
            FullyShard(hybrid(ctx, kinds=half), (Dense,), mesh=ctx)
        assert len(warned) == 1 and warned[0].filename == __file__
        recwarn.clear()
        FullyShard(hybrid(ctx, kinds=half), (StateSpace,), mesh=ctx)  # Dense has less than half
        tied = hybrid(ctx, kinds=half[:2])
        tied.layers[0].into.weight = tied.again = nn.Parameter(torch.zeros(32, 100 * FEATURES))
        FullyShard(tied, (Dense,), mesh=ctx)  # the root's in any case
        assert not recwarn
        stacked = hybrid(ctx, kinds=[Dense])
        stacked.stack = Stack()
        with pytest.warns(UserWarning, match="class StateSpace hold 60 %"):
            FullyShard(stacked, (Dense,), mesh=ctx)
    finally:
        tkernels.finalize(ctx)


# State and refusals


@pytest.mark.ranks(2, 4)
def test_a_state_dict_of_the_whole_model_goes_out_and_in(ctx):
    unsharded = hybrid(ctx, seed=5)
    sharded = FullyShard(hybrid(ctx, seed=6), UNITS, mesh=ctx)
    assert sum(p.numel() for p in sharded.parameters()) < sum(p.numel() for p in unsharded.parameters())
    want = {name: value.cpu() for name, value in unsharded.state_dict().items()}
    sharded.load_full_state_dict(want)
    full = sharded.gather_state_dict()
    assert list(full) == list(want) and all(torch.equal(full[name], want[name]) for name in want)
    rank0 = sharded.gather_state_dict(rank0_only=True)
    assert list(rank0) == (list(want) if ctx.rank == 0 else [])
    x = batches(ctx, 1)[0]
    with torch.no_grad():
        assert_close_to(sharded(x), in_fp64(unsharded)(x), terms=64)
    again = FullyShard(hybrid(ctx, seed=6), UNITS, mesh=ctx)
    again.load_state_dict(sharded.state_dict())
    assert same_bits(again, sharded)
    del want["head.bias"]
    want["head.weight"] = want["head.weight"].t()
    with pytest.raises(ValueError, match=r"2 entries don't fit.*bias is nothing, not \(3,\); head.weight is \(8, 3\)"):
        sharded.load_full_state_dict(want)


class Shapes(Dense):
    """What is not cut between rows: a convolution's weight, a number, nothing at all; and what is not trained."""

    def __init__(self):
        super().__init__()
        self.kernel, self.empty = nn.Parameter(torch.randn(3, 5, 2, 3)), nn.Parameter(torch.ones(0, 3))
        self.gain, self.narrow = nn.Parameter(torch.randn(())), nn.Parameter(torch.randn(7, 3, dtype=torch.bfloat16))
        self.fixed = nn.Parameter(torch.randn(11), requires_grad=False)
        self.register_buffer("seen", torch.randn(2))


def tower(seed, contexts=()):
    """Layers inside of a larger model, sharded over a context if there is one; a parameter is shared by two units."""
    torch.manual_seed(seed)
    inner = Hybrid(kinds=(Shapes, StateSpace, Shapes))
    inner.layers[2].up.weight = inner.layers[0].up.weight
    model = nn.ModuleDict({"inner": inner, "last": nn.Linear(3, 2)})
    for ctx in contexts:
        model = model.to(ctx.device)
        model["inner"] = FullyShard(inner, UNITS, mesh=ctx)
    return model


def assert_same_state(got, want):
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert torch.equal(got[key].cpu(), value.cpu()), key


@pytest.mark.ranks(2, 4)
def test_a_checkpoint_of_shards_loads_into_any_number_of_ranks_and_the_unsharded_model(ctx, tmp_path):
    want = tower(1).state_dict()
    first, second = tower(1, [ctx]), tower(2, [ctx])
    assert_same_state(gather_state_dict(first), want)
    rank0 = gather_state_dict(first, rank0_only=True)
    assert rank0.keys() == (want.keys() if ctx.rank == 0 else set())
    assert str(load_full_state_dict(second, want)) == "<All keys matched successfully>"
    assert_same_state(gather_state_dict(second), want)
    with pytest.raises(RuntimeError, match="Missing key.*last.bias"):
        load_full_state_dict(second, {key: value for key, value in want.items() if key != "last.bias"})

    dcp.save(sharded_state_dict(first), checkpoint_id=tmp_path / "sharded")
    unsharded = tower(2).state_dict()
    dcp.load(unsharded, checkpoint_id=tmp_path / "sharded", no_dist=True)
    assert_same_state(unsharded, want)
    with tkernels.init([dist.new_group([rank]) for rank in range(ctx.size)][ctx.rank], heap_bytes=8 << 20) as alone:
        one = tower(2, [alone])
        dcp.load(sharded_state_dict(one), checkpoint_id=tmp_path / "sharded", no_dist=True)
        assert_same_state(gather_state_dict(one), want)
        if ctx.rank == 0:
            dcp.save(sharded_state_dict(one), checkpoint_id=tmp_path / "one", no_dist=True)
    dist.barrier()
    again = tower(3, [ctx])
    again["inner"](own(ctx, batches(ctx, 1)[0]))  # whose backward never comes
    dcp.load(sharded_state_dict(again), checkpoint_id=tmp_path / "one")
    assert_same_state(gather_state_dict(again), want)
    assert same_bits(again["inner"], first["inner"])


@pytest.mark.ranks(2)
def test_parallel_layers_inside_are_gathered_and_split_as_well(ctx, tmp_path):
    def mlp(seed, over, features=9):
        torch.manual_seed(seed)
        return nn.Sequential(ParallelMLP(6, features, "swiglu", mesh=over), nn.Linear(6, 2)).to(ctx.device)

    with tkernels.init([dist.new_group([rank]) for rank in range(2)][ctx.rank], heap_bytes=8 << 20) as alone:
        want = mlp(1, alone).state_dict()
        first, second, third = (FullyShard(mlp(seed, ctx), ParallelMLP, mesh=alone) for seed in (1, 2, 3))
        assert_same_state(gather_state_dict(first), want)
        load_full_state_dict(second, want)
        assert same_bits(second, first)
        dcp.save(sharded_state_dict(first), checkpoint_id=tmp_path)
        dcp.load(sharded_state_dict(third), checkpoint_id=tmp_path)
        assert same_bits(third, first)
    twice = mlp(1, ctx, features=8)
    for parameter in twice.parameters():
        nn.init.ones_(parameter)  # so that the parts of both ranks are equal, as replicas' are
    with pytest.raises(ValueError, match="0.fc1.weight is split by ColumnParallelLinear, and each part again by Fully"):
        sharded_state_dict(FullyShard(twice, ParallelMLP, mesh=ctx))


@pytest.mark.ranks(2)
def test_what_cannot_be_sharded_is_refused_by_name(ctx):
    class Nested(Dense):
        def __init__(self):
            super().__init__()
            self.inner = Experts()

    model = hybrid(ctx)
    sharded, x = FullyShard(hybrid(ctx), UNITS, mesh=ctx), own(ctx, batches(ctx, 1)[0])
    integer = hybrid(ctx)
    integer.scale = nn.Parameter(torch.ones(2, device=ctx.device, dtype=torch.float64))
    refused = [
        (lambda: FullyShard(model, nn.Conv2d, mesh=ctx), ValueError, "no module is a unit: none is of .* Conv2d"),
        (lambda: FullyShard(model, "Dense", mesh=ctx), TypeError, "units are classes of .*, not instances of str"),
        (lambda: FullyShard(model, (Dense, model.head), mesh=ctx), TypeError, "units=.nn.Linear,., not .* of Linear"),
        (lambda: FullyShard(model, Hybrid, mesh=ctx), ValueError, "the module itself is of a unit's type"),
        (
            lambda: FullyShard(nn.Sequential(Nested()).to(ctx.device), UNITS, mesh=ctx),
            ValueError, "unit '0.inner' lies inside unit '0'",
        ),
        (lambda: FullyShard(hybrid(ctx).to("meta"), UNITS, mesh=ctx), ValueError, "embed.weight is on meta; move"),
        (lambda: FullyShard(integer, UNITS, mesh=ctx), TypeError, "scale: gradients are summed .* not torch.float64"),
        (lambda: FullyShard(model, UNITS, mesh=ctx, pool="rotary"), ValueError, "pool='rotary' is unknown; use"),
        (
            lambda: FullyShard(model, UNITS, mesh=ctx, overlap=False, comm_stream=object()),
            ValueError, "overlap=False communicates on the stream that computes, not on comm_stream; leave one out",
        ),
        (lambda: FullyShard(hybrid(ctx), UNITS, mesh=ctx).to(torch.bfloat16), TypeError, "before it is sharded"),
        (lambda: FullyShard(sharded, UNITS, mesh=ctx), ValueError, "the module is sharded already"),
        (lambda: FullyShard(sharded.module, UNITS, mesh=ctx), ValueError, "embed is sharded already"),
        (lambda: sharded.module(x), LeaseError, "Hybrid was called outside .* call the FullyShard, not"),
        (lambda: sharded.module.layers[0](x), LeaseError, "Dense was called outside .* call the FullyShard, not"),
        (lambda: sharded.load_state_dict(sharded.state_dict(), assign=True), ValueError, "assign=True. would leave"),
        (
            lambda: nn.Sequential(sharded).load_state_dict(nn.Sequential(hybrid(ctx)).state_dict(), strict=False),
            ValueError, "takes this rank's shards, .* 0.embed.weight is of the unsharded module; call load_full_state",
        ),
    ]  # fmt: skip
    for call, kind, message in refused:
        with pytest.raises(kind, match=message):
            call()
    differing = hybrid(ctx, seed=ctx.rank)
    with pytest.raises(MismatchError) as error:
        FullyShard(differing, UNITS, mesh=ctx)
    for whole in (model, differing):
        train(ctx, whole, [x])
    text = message_on_every_rank(ctx, error.value)
    assert "the modules of rank 0 and rank 1 differ in embed.weight" in text and re.search(r"and \d+ more; make", text)


@pytest.mark.ranks(2)
def test_fully_shard_raises_what_is_wrong_on_one_rank_on_every_rank_and_changes_nothing(ctx):
    module = hybrid(ctx)
    before = copy.deepcopy(module.state_dict())
    for wrong, message in [
        ({"units": Stack}, "no module is a unit"),
        ({"pool": "large"}, "pool='large' is unknown"),
        ({"overlap": False, "comm_stream": object()}, "leave one out"),
        ({"grad_dtype": torch.float64}, "pass one as grad_dtype"),
        ({"copies": 0}, "a pool's copies"),
        ({"module": 3}, "module"),
    ]:
        options = {"module": module, "units": UNITS, "mesh": ctx} | (wrong if ctx.rank == 1 else {})
        with pytest.raises((TypeError, ValueError), match=rf"{message}.* \(on rank 1\)$") as error:
            FullyShard(**options)
        message_on_every_rank(ctx, error.value)
    assert all(map(torch.equal, before.values(), module.state_dict().values()))
    FullyShard(module, UNITS, mesh=ctx).close()


@pytest.mark.ranks(2)
def test_parameters_that_belong_to_another_are_refused_and_so_are_shards(ctx):
    model = hybrid(ctx)
    for own_all in (
        lambda: OverlappedDDP(model, mesh=ctx),
        lambda: ZeroOptimizer(model.parameters(), torch.optim.SGD, lr=1.0, mesh=ctx),
    ):
        other = own_all()
        with pytest.raises(ValueError, match=rf"embed.weight belongs to {type(other).__name__}.* call remove\(\)"):
            FullyShard(model, UNITS, mesh=ctx)
        other.remove()
    sharded = FullyShard(model, UNITS, mesh=ctx)
    sharded(own(ctx, batches(ctx, 1)[0])).square().mean().backward()
    assert all(shard.grad.abs().sum() > 0 for shard in sharded.parameters())
    with pytest.raises(ValueError, match=r"parameter 0 of shape \[\d+\] is a shard of a FullyShard.*pass its"):
        ZeroOptimizer(sharded.parameters(), torch.optim.SGD, lr=1.0, mesh=ctx)


@pytest.mark.ranks(2)
def test_what_is_closed_says_so_and_leaves_room_for_others(ctx):
    x = own(ctx, batches(ctx, 1)[0])
    with tkernels.init(ctx.group.process_group, heap_bytes=16 << 20) as context:
        free = set()
        for _ in range(3):
            sharded = FullyShard(hybrid(ctx), UNITS, mesh=context, memory="symmetric", overlap=False)
            state = sharded.gather_state_dict()
            sharded(x)
            sharded.close()
            sharded.close()
            with pytest.raises(LeaseError, match="the pool has been closed"):
                sharded(x)
            assert all(value.equal(state[key]) for key, value in sharded.gather_state_dict().items())
            free.add(context.heap.largest)
        assert len(free) == 1


@pytest.mark.ranks(2)
def test_extra_state_travels_with_the_state_dict(ctx):
    class Counting(Dense):
        count = 0

        def get_extra_state(self):
            return {"count": self.count}

        def set_extra_state(self, state):
            self.count = state["count"]

    first, second = (FullyShard(hybrid(ctx, seed, kinds=(Counting, Dense)), Dense, mesh=ctx) for seed in (1, 2))
    first.module.layers[0].count = 7
    second.load_full_state_dict(first.gather_state_dict())
    assert second.module.layers[0].count == 7 and same_bits(first, second)


@pytest.mark.ranks(2)
def test_a_backward_whose_parameters_have_moved_is_refused(ctx):
    sharded = FullyShard(hybrid(ctx), UNITS, mesh=ctx)
    loss = sharded(own(ctx, batches(ctx, 1)[0])).sum()
    pool = sharded.parameter_pool
    for bucket, slot in list(pool._assigned.items()):
        pool._assigned[bucket] = next(other for other in pool._copies[bucket] if other is not slot or bucket[0] == "r")
    with pytest.raises(LeaseError, match="unit layers.4 lies elsewhere now than in the forward"):
        loss.backward()
    ctx.group.barrier()
    train(ctx, sharded, batches(ctx, 1))


# Every order of the streams


def simulated(starve, overlap=True, steps=3, patch=None, copies=2):
    """Losses of a one-rank FullyShard on simulated streams, and the simulator."""
    ctx = tkernels.init(heap_bytes=8 << 20)
    try:
        model, data = hybrid(ctx), batches(ctx, steps)
        sim, losses = Simulator(), []
        with sim:
            comm = sim.Stream("comm") if overlap else None
            sharded = FullyShard(model, UNITS, mesh=ctx, overlap=overlap, copies=copies, comm_stream=comm, dev=sim)
            if patch is not None:
                patch(sharded)
            optimizer = torch.optim.SGD(sharded.parameters(), 0.5)
            for x in data:
                loss = sharded(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=len(losses) % 2 == 0)
                losses.append(loss.detach())
        races = sim.races
        sim.run(starve)
        return [loss.item() for loss in losses], races, sim
    finally:
        tkernels.finalize(ctx)


@simulated_only
@pytest.mark.parametrize("copies", [1, 2, pytest.param(5, marks=pytest.mark.exhaustive)])
def test_no_order_of_the_streams_changes_a_loss(copies):
    want, races, sim = simulated((), overlap=False)
    assert not races and sim.waits == 0
    for starve in subsets(["main", "comm"]):
        losses, races, _ = simulated(starve, copies=copies)
        assert not races, races[0]
        assert losses == want


def forget(slots, monkeypatch):
    """The slots' tenants wait for nobody before them."""
    for slot in slots:
        acquire = slot.acquire

        def forgetful(slot=slot, acquire=acquire):
            slot.gate.clear()
            return acquire()

        monkeypatch.setattr(slot, "acquire", forgetful)


def gather_over_parameters_in_use(sharded, monkeypatch):
    forget(sharded.parameter_pool.slots, monkeypatch)


def fill_gradients_that_still_travel(sharded, monkeypatch):
    forget(sharded.gradient_pool.slots, monkeypatch)


def gather_before_the_optimizer(sharded, monkeypatch):
    gather = sharded._gather

    def early(flat):
        sharded._weights.filled.clear()
        return gather(flat)

    monkeypatch.setattr(sharded, "_gather", early)


def reduce_before_the_gradients(sharded, monkeypatch):
    reduce = sharded._reduce

    def early(flat):
        sharded.gradient_pool.acquire(flat.id).filled.clear()
        reduce(flat)

    monkeypatch.setattr(sharded, "_reduce", early)


@simulated_only
@pytest.mark.parametrize(
    ("form", "copies"),
    [
        (gather_over_parameters_in_use, 2),
        (fill_gradients_that_still_travel, 5),
        (gather_before_the_optimizer, 2),
        (reduce_before_the_gradients, 2),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_wrong_forms_are_found_out(form, copies, monkeypatch):
    want, _, _ = simulated((), overlap=False)
    results = []
    for starve in ("main", "comm"):
        with monkeypatch.context() as patched:
            patch = lambda sharded, patched=patched: form(sharded, patched)  # noqa: E731
            losses, races, _ = simulated([starve], copies=copies, patch=patch)
        assert races and isinstance(races[0], Race)
        results.append(losses)
    assert any(losses != want for losses in results)


@simulated_only
def test_shards_are_changed_after_a_gather_that_nobody_used():
    ctx, sim = tkernels.init(heap_bytes=8 << 20), Simulator()
    try:
        with sim, torch.no_grad():
            sharded = FullyShard(some(ctx), nn.Linear, mesh=ctx, comm_stream=sim.Stream("comm"), dev=sim)
            for taken in ((0, 1, 2), (0,)):
                sharded(torch.ones(2, FEATURES), taken)
            for shard in sharded.shards.values():
                shard.zero_()
        sim.check()
        sim.run()
        assert sim.log.count("all_gather_out") == 4 + 3  # the root, the first unit, and the second one ahead
    finally:
        tkernels.finalize(ctx)


@simulated_only
def test_the_next_gather_and_the_last_reduction_overlap_with_compute():
    counts = []
    for starve in ("main", "comm"):
        _, _, sim = simulated([starve])
        forward, backward = (
            [i for i, name in enumerate(sim.log) if name == f"native_layer_norm{suffix}"]
            for suffix in ("", "_backward")
        )
        # Layers 0 and 3 have norms. The first step gathers 11 times; in the second one come the root, layer 0, layer 1.
        gathered = sim.log[: forward[2]].count("all_gather_out") - 11
        # The first step reduces 6 times; then, in the backward of the second one, layer 4 before layer 3.
        reduced = sim.log[: backward[2]].count("reduce_scatter") - 6
        counts.append((gathered, reduced))
    assert counts == [(3, 1), (2, 0)]


# On GPUs


class late:
    """Slows one side of training: every collective on comm, or every unit's forward on the compute stream."""

    def __init__(self, sharded, side, cycles=LATE):
        self.sharded, self.side, self.cycles = sharded, side, cycles

    def __enter__(self):
        sharded = self.sharded
        if self.side == "comm":
            for name in ("_gather", "_reduce"):
                setattr(sharded, name, self._after_sleep(getattr(sharded, name)))
        else:
            sleep = lambda *_: torch.cuda._sleep(self.cycles)  # noqa: E731
            self.hooks = [layer.register_forward_pre_hook(sleep) for layer in sharded.module.layers]

    def __exit__(self, *_):
        if self.side == "comm":
            del self.sharded._gather, self.sharded._reduce
        else:
            for hook in self.hooks:
                hook.remove()

    def _after_sleep(self, communicate):
        def call(flat):
            with torch.cuda.stream(self.sharded.comm_stream):
                torch.cuda._sleep(self.cycles)
            return communicate(flat)

        return call


@gpu_only
@pytest.mark.ranks(2, 4, timeout_s=900)
@pytest.mark.parametrize("side", ["comm", "compute"])
@pytest.mark.parametrize("iterations", [1000])
def test_training_with_a_late_stream_gives_the_same_bits(ctx, side, iterations):
    plain = FullyShard(hybrid(ctx), UNITS, mesh=ctx, overlap=False)
    sharded = FullyShard(hybrid(ctx), UNITS, mesh=ctx, memory="symmetric", copies=COPIES[side])
    optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in (plain, sharded)]
    for start in range(0, iterations, 50):
        data = [normal((4 * ctx.size, 4), torch.float32, start + i, device=ctx.device) for i in range(50)]
        want = train(ctx, plain, data, optimizers[0])
        with late(sharded, side):
            losses = train(ctx, sharded, data, optimizers[1])
        assert torch.equal(losses, want) and same_bits(sharded, plain), start
    ctx.check()
    ctx.group.barrier()
    for pool in (sharded.parameter_pool, sharded.gradient_pool):
        pool.close()


@gpu_only
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("side", ["comm", "compute"])
def test_without_the_wait_for_the_last_tenant_a_late_stream_breaks_training(ctx, side):
    plain = FullyShard(hybrid(ctx), UNITS, mesh=ctx, overlap=False)
    sharded = FullyShard(hybrid(ctx), UNITS, mesh=ctx, copies=COPIES[side])
    data = batches(ctx, 10)
    for model in (plain, sharded):  # kernels are compiled, workspaces are large enough
        train(ctx, model, data[:2], torch.optim.SGD(model.parameters(), 0.0))
    want = train(ctx, plain, data)
    with pytest.MonkeyPatch.context() as patched, late(sharded, side):
        forget([*sharded.parameter_pool.slots, *sharded.gradient_pool.slots], patched)
        losses = train(ctx, sharded, data)
    torch.cuda.synchronize()
    assert not torch.equal(losses, want)
    ctx.check()
    ctx.group.barrier()


@gpu_only
@pytest.mark.ranks(2, 4)
def test_compute_goes_on_while_a_reduction_is_late(ctx):
    sharded = FullyShard(hybrid(ctx), UNITS, mesh=ctx)
    data = batches(ctx, 3)
    train(ctx, sharded, data[:2])
    loss = sharded(own(ctx, data[2])).square().mean()
    torch.cuda.synchronize()
    computed, reduced = torch.cuda.Event(), torch.cuda.Event()
    reduce = sharded._reduce

    def late_reduce(flat):
        if flat.id.startswith("layers.4"):
            with torch.cuda.stream(sharded.comm_stream):
                torch.cuda._sleep(200 * LATE)  # half a second
        reduce(flat)
        if flat.id.startswith("layers.4"):
            reduced.record(sharded.comm_stream)

    sharded._reduce = late_reduce
    # Layer 3 begins its backward once layer 4 is reduced; what it computes needs no gather, and ends before.
    sharded.module.layers[3].norm.register_full_backward_hook(lambda *_: computed.record())
    loss.backward()
    computed.synchronize()
    assert not reduced.query()
    torch.cuda.synchronize()


@gpu_only
@pytest.mark.ranks(2, 4)
def test_whole_iterations_in_a_graph_are_the_eager_ones(ctx):
    eager, graphed = (FullyShard(hybrid(ctx), UNITS, mesh=ctx, memory=memory) for memory in ("torch", "symmetric"))
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (eager, graphed)]
    data = batches(ctx, 8)
    want = train(ctx, eager, data, optimizers[0])
    assert torch.equal(train(ctx, graphed, data[:3], optimizers[1]), want[:3])
    addresses = [slot.tensor.data_ptr() for slot in graphed.slots if slot.tensor is not None]
    seen, acquire = {}, graphed.parameter_pool.acquire

    def watch(bucket):
        lease = acquire(bucket)
        assert seen.setdefault(bucket, lease.tensor.data_ptr()) == lease.tensor.data_ptr()
        return lease

    graphed.parameter_pool.acquire = watch
    assert torch.equal(train(ctx, graphed, data[3:4], optimizers[1]), want[3:4])
    batch = data[4].clone()
    graph = torch.cuda.CUDAGraph()
    with captured(torch.cuda.graph(graph), slots=graphed.slots, streams=[graphed.comm_stream]) as replay:
        loss = graphed(own(ctx, batch)).float().square().mean()
        loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    for step in (4, 5, 6):
        batch.copy_(data[step])
        replay()
        assert torch.equal(loss.detach(), want[step])
    # Eager steps after it find everything where it was.
    assert torch.equal(train(ctx, graphed, data[7:], optimizers[1]), want[7:])
    assert same_bits(eager, graphed)
    assert [slot.tensor.data_ptr() for slot in graphed.slots if slot.tensor is not None] == addresses
    ctx.check()
    torch.cuda.synchronize()
    ctx.group.barrier()


@pytest.mark.ranks(4)
def test_the_norm_of_a_model_that_is_split_is_that_of_the_whole(ctx):
    replica, part = divmod(ctx.rank, 2)
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    tp, dp = (tkernels.init(groups[at], heap_bytes=8 << 20, default=False) for at in (replica, 2 + part))
    with tp, dp:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4, device=ctx.device), nn.ReLU(), nn.Linear(4, 2, device=ctx.device))
        model[0].weight.tensor_model_parallel = True
        sharded = FullyShard(model, (nn.Linear,), mesh=dp)
        for shard in sharded.shards.values():
            split = getattr(shard, "tensor_model_parallel", False)
            shard.grad = torch.full_like(shard, 2.0 + part if split else 3.0)
        with pytest.raises(ValueError, match="split over tensor-parallel ranks .* pass tensor_parallel="):
            sharded.clip_grad_norm_(1.0)
        numels = [sum(s.numel() for s in sharded.shards.values() if hasattr(s, "tensor_model_parallel") == split)
                  for split in (True, False)]  # fmt: skip
        want = (2 * (numels[0] * (4 + 9) + numels[1] * 9)) ** 0.5
        assert sharded.clip_grad_norm_(1.0, tensor_parallel=tp).item() == pytest.approx(want, rel=1e-5)
        plain = next(s for s in sharded.shards.values() if not hasattr(s, "tensor_model_parallel"))
        torch.testing.assert_close(plain.grad, torch.full_like(plain, 3 / want), rtol=1e-4, atol=0.0)
        sharded.close()


@pytest.mark.ranks(2)
def test_units_that_come_in_another_order_lose_no_gradient(ctx):
    """A forward without its backward, then one with it: what was learnt of the order is wrong in mid-backward."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))).to(ctx.device)
    sharded = FullyShard(copy.deepcopy(plain), (nn.Linear,), mesh=ctx)
    in_fp64(plain)
    x = normal((4, 6), torch.float32, 1, device=ctx.device)
    for _ in range(2):
        sharded(x)  # nobody wants its gradients
        sharded(x).square().sum().backward()
        plain(x).square().sum().backward()
    whole = {}
    for flat in sharded._flats.values():
        gathered = tkernels.all_gather(flat.shard.grad, ctx=ctx)
        whole |= {names[0]: view for names, view in zip(flat.names, flat.views(gathered), strict=True)}
    for name, parameter in plain.named_parameters():
        scale = parameter.grad.abs().max()
        assert_close_to(whole[name] / scale, parameter.grad / scale, terms=64)


@pytest.mark.ranks(2)
def test_a_sum_that_fp16_does_not_hold_is_averaged_before_it_is_rounded(ctx):
    model = nn.Sequential(nn.Linear(4, 4, bias=False, dtype=torch.float16, device=ctx.device))
    sharded = FullyShard(model, (nn.Linear,), grad_dtype=torch.float32, mesh=ctx)
    x = torch.full((1, 4), 200.0, dtype=torch.float16, device=ctx.device)
    (sharded(x) * 200.0).sum().backward()
    for shard in sharded.shards.values():
        assert (tkernels.all_gather(shard.grad, ctx=ctx)[:16] == 40000).all()
