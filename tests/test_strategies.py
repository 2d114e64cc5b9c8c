"""One table of scenarios and systems: whatever a training loop may do, with every system that shards or reduces.

A scenario is a function of a `Loop`. It runs once in the words of a system, on this rank's part of each batch, and once
in torch's own words without any sharding, in fp64, on the parts of all ranks. Both must end with the same weights. What
a system has other words for, refuses or doesn't have stands beside the scenario, by the beginning of the system's name.

    python tests/test_strategies.py     prints the table, as it stands in layers/README.md
"""

import contextlib
import copy
import dataclasses
import functools
import gc
import itertools
import weakref

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transports import message_on_every_rank

from tkernels import layers
from tkernels.layers import FullyShard, OverlappedDDP, ZeroOptimizer, fully_shard
from tkernels.testing.compare import assert_close_to, normal

FEATURES = 8


# Models


class Dense(nn.Module):
    hidden = 37

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.up, self.down = nn.Linear(FEATURES, self.hidden), nn.Linear(self.hidden, FEATURES)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Even(Dense):
    """Its features are split over two ranks."""

    hidden = 38


class StateSpace(nn.Module):
    """Shaped like a state-space layer: a gate, a decay, and no bias."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(FEATURES, 32, bias=False), nn.Linear(16, FEATURES, bias=False)
        self.decay = nn.Parameter(0.1 + 0.8 * torch.arange(16) / 15)

    def forward(self, x):
        values, gate = self.into(x).chunk(2, dim=-1)
        return x + self.out(values * self.decay * torch.sigmoid(gate))


class Experts(nn.Module):
    """Fewer rows than ranks, a parameter that nothing uses, and a buffer. `taken`: the experts that are asked."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(FEATURES, 3)
        self.experts = nn.ParameterList(0.1 * torch.randn(FEATURES, FEATURES) for _ in range(3))
        self.unused = nn.Parameter(torch.ones(1, 5))
        self.register_buffer("scale", torch.ones(1))
        self.taken = range(3)

    def forward(self, x):
        share = self.router(x).softmax(-1)
        return x + sum(share[:, i, None] * (x @ self.experts[i]) for i in self.taken) * self.scale


class Tied(Dense):
    def __init__(self):
        super().__init__()
        self.again = nn.Linear(FEATURES, self.hidden)
        self.again.weight = self.up.weight

    def forward(self, x):
        return super().forward(x) + self.again(x).mean(-1, keepdim=True)


class Looked(nn.Module):
    """A table, of whose rows one is looked up for each number, with gradients of those rows only."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, FEATURES, sparse=True)

    def forward(self, x):
        return x + self.table(x[:, 0].abs().long() % 6)


class Hybrid(nn.Module):
    """Blocks of several shapes between two layers that belong to none."""

    def __init__(self, kinds=(Dense, StateSpace, Experts)):
        super().__init__()
        self.embed = nn.Linear(4, FEATURES)
        self.layers = nn.ModuleList(kind() for kind in kinds)
        self.head = nn.Linear(FEATURES, 3)
        self.order, self.around = None, lambda layer, x: layer(x)

    def forward(self, x):
        x = self.embed(x.to(self.embed.weight.dtype))
        for i in self.order or range(len(self.layers)):
            x = self.around(self.layers[i], x)
        return self.head(x)


def loss_of(y):
    return y.to(torch.promote_types(y.dtype, torch.float32)).square().mean()


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@functools.cache
def mesh_of(device_type, *sizes):
    return init_device_mesh(device_type, sizes, mesh_dim_names=("dp", "tp"))


# Systems: how a loop is written with each


class Loop:
    """A training of `scenario`'s model, from one seed. It compares `numbers` and all weights, of `beside` too."""

    def __init__(self, scenario, ctx, seed=0, path=None):
        self.scenario, self.ctx, self.path, self.beside, self.numbers = scenario, ctx, path, [], []
        self.turn = lambda rank: None  # called before a rank's part of a batch
        mesh = mesh_of(ctx.device.type, ctx.size // scenario.tp, scenario.tp)
        self.dp, self.tp = mesh["dp"], mesh["tp"] if scenario.tp > 1 else None
        self.own = [self.dp.get_local_rank()]
        self.data = [normal((4 * self.dp.size(), 4), torch.float32, 100 + i, device=ctx.device) for i in range(3)]
        torch.manual_seed(seed)
        self.model = Hybrid(scenario.kinds).to(ctx.device)
        scenario.before(self.model)
        self.called = self.wrap()
        self.optimizer = self.make_optimizer()

    # In the words of each system

    def wrap(self):
        """What is called."""
        return self.model

    def make_optimizer(self):
        return self.scenario.optimizer(self.scenario.groups(self.model.named_parameters()))

    def no_sync(self):
        return contextlib.nullcontext()

    def clipped_step(self, max_norm):
        """Returns the norm of all gradients."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self.step()
        return full(norm)

    def discard(self):
        """Begin again after a failure."""
        self.optimizer.zero_grad()

    def after_failure(self):
        """What is needed before the next forward."""

    def readable(self):
        """The model, whose parameters others may read."""
        return self.model

    def whole(self):
        """All parameters by name, whole, on every rank."""
        return {name: full(parameter.detach()) for name, parameter in self.readable().named_parameters()}

    def save(self):
        dcp.save(dict(zip("mo", get_state_dict(self.readable(), self.optimizer), strict=True)), checkpoint_id=self.path)

    def load(self):
        states = dict(zip("mo", get_state_dict(self.model, self.optimizer), strict=True))
        dcp.load(states, checkpoint_id=self.path)
        set_state_dict(self.model, self.optimizer, model_state_dict=states["m"], optim_state_dict=states["o"])

    def again(self, seed):
        """Another training of the kind, whose weights are compared too."""
        self.beside.append(type(self)(self.scenario, self.ctx, seed, path=self.path))
        return self.beside[-1]

    def resumed(self):
        """Another one, which has loaded what this one saves."""
        self.save()
        other = self.again(seed=1)
        other.load()
        return other

    # What scenarios use

    def loss(self, x):
        """The mean over ranks; of one system's training this rank's part."""
        losses = []
        for rank in self.own:
            self.turn(rank)
            losses.append(loss_of(self.called(x.chunk(self.dp.size())[rank])))
        return sum(losses) / len(losses)

    def backward(self, x):
        self.loss(x).backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad(self.scenario.set_to_none)


class Twin(Loop):
    """In torch's own words, unsharded, in fp64. zeros: which unused parameters have gradients of zero."""

    def __init__(self, scenario, ctx, seed=0, path=None, zeros="none"):
        self.zeros = zeros
        super().__init__(scenario, ctx, seed)
        self.own = range(self.dp.size())

    def wrap(self):
        return self.model.double()

    def again(self, seed):
        self.beside.append(Twin(self.scenario, self.ctx, seed, zeros=self.zeros))
        return self.beside[-1]

    def step(self):
        for layer in self.model.layers:
            trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
            used = [parameter for parameter in trained if parameter.grad is not None]
            if self.zeros == "all" or self.zeros == "of blocks that ran" and used:
                for parameter in set(trained) - set(used):
                    parameter.grad = torch.zeros_like(parameter)
        super().step()

    def resumed(self):
        other = self.again(seed=1)
        other.model.load_state_dict(self.model.state_dict())
        other.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        return other


class Sharded(Loop):
    """`fully_shard`, as a user would call it: the blocks first, the model last."""

    strategy, zeros = "parameters", "of blocks that ran"

    def wrap(self):
        if self.tp is not None:
            plan = {"up": layers.ColwiseParallel(), "down": layers.RowwiseParallel()}
            layers.parallelize_module(self.model, self.tp, {f"layers.*.{name}": style for name, style in plan.items()})
        for module in (*self.model.layers, self.model):
            fully_shard(module, mesh=self.dp, strategy=self.strategy)
        return self.model

    @contextlib.contextmanager
    def no_sync(self):
        self.model.set_requires_gradient_sync(False)
        yield
        self.model.set_requires_gradient_sync(True)

    def discard(self):
        self.model.zero_grad()


class Face(Sharded):
    """`FullyShard`."""

    def wrap(self):
        return FullyShard(self.model, units=self.scenario.kinds, mesh=self.dp)

    def no_sync(self):
        return self.called.no_sync()


class Parallel(Loop):
    """Systems for plain parameters, over Megatron's layers where there is tensor parallelism."""

    def split(self):
        if self.tp is not None:
            layers.parallelize(self.model, {"layers.*.up": "column", "layers.*.down": "row"}, self.tp)

    def whole(self):
        if self.tp is None:
            return super().whole()
        return layers.gather_state_dict(self.readable())


class Reduced(Parallel):
    """`OverlappedDDP`."""

    zeros, options = "all", {}

    def wrap(self):
        self.split()
        return OverlappedDDP(self.model, mesh=self.dp, bucket_size=400, **self.options)

    def make_optimizer(self):
        return self.scenario.optimizer(self.scenario.groups(self.called.module.named_parameters()))

    def no_sync(self):
        return self.called.no_sync()

    def clipped_step(self, max_norm):
        if self.tp is None:
            return super().clipped_step(max_norm)
        norm = layers.clip_grad_norm_(self.model.parameters(), max_norm, mesh=self.tp)
        self.step()
        return norm

    def discard(self):
        self.called.zero_grad()


class ReducedShards(Reduced):
    """`OverlappedDDP` that updates a shard of every bucket and gathers beside what follows."""

    options = {"overlap_param_gather": True}

    def make_optimizer(self):
        return self.scenario.optimizer(self.called.owned_parameters())

    def clipped_step(self, max_norm):
        norm = layers.clip_grad_norm_(self.called.owned_parameters(), max_norm, mesh=self.tp)
        self.step()
        return norm

    def readable(self):
        layers.ensure_params_ready(self.model.parameters())
        return self.model


class Zero(Parallel):
    """`ZeroOptimizer`; stage 1 gathers in forward."""

    stage, zeros = 2, "none"

    def wrap(self):
        self.split()
        return self.model

    def make_optimizer(self):
        make, groups = self.scenario.optimizer, self.scenario.groups(self.model.named_parameters())
        options = {"mesh": self.dp, "stage": self.stage, "bucket_bytes": 1600, **make.keywords}
        if self.stage == 1:
            options["overlap_gather"] = self.model
        if self.scenario.max_norm is not None:
            options |= {"max_norm": self.scenario.max_norm, "tensor_parallel": self.tp}
        return ZeroOptimizer(groups, make.func, **options)

    def no_sync(self):
        return self.optimizer.no_sync()

    def after_failure(self):
        self.discard()

    def clipped_step(self, max_norm):
        self.step()
        return self.optimizer.grad_norm

    def readable(self):
        self.optimizer.ensure_params_ready()
        return self.model

    def save(self):
        torch.save(self.optimizer.full_state_dict(), f"{self.path}-{self.ctx.rank}")

    def load(self):
        self.optimizer.load_full_state_dict(torch.load(f"{self.path}-{self.ctx.rank}", weights_only=False))


SYSTEMS = {
    "fully_shard-parameters": Sharded,
    **{f"fully_shard-{name}": type("Sharded", (Sharded,), {"strategy": name}) for name in ("gradients", "optimizer")},
    "fully_shard-replicate": type("Sharded", (Sharded,), {"strategy": "replicate"}),
    "FullyShard": Face,
    "OverlappedDDP": Reduced,
    "OverlappedDDP-shards": ReducedShards,
    "ZeroOptimizer-2": Zero,
    "ZeroOptimizer-1": type("Zero", (Zero,), {"stage": 1}),
}


# Scenarios


@dataclasses.dataclass(frozen=True)
class Other:
    """It does so in words of its own, which the adapter above has."""

    note: str


@dataclasses.dataclass(frozen=True)
class Refused:
    """It raises, on every rank, an error in which these words stand, a regular expression."""

    note: str
    words: str


@dataclasses.dataclass(frozen=True)
class Absent:
    """It has no such thing."""

    note: str


SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@dataclasses.dataclass(frozen=True)
class Scenario:
    """title: as the guide says it. but: what is not simply right, by the beginning of systems' names."""

    run: object
    title: str
    but: dict = dataclasses.field(default_factory=dict)
    kinds: tuple = (Dense, StateSpace, Experts)
    optimizer: functools.partial = SGD
    groups: object = lambda named: [parameter for _, parameter in named]
    before: object = lambda model: None
    set_to_none: bool = True
    max_norm: float | None = None
    tp: int = 1

    def cell(self, system):
        """None where it is simply right."""
        names = [name for name in self.but if system.startswith(name)]
        return self.but[max(names, key=len)] if names else None


SCENARIOS = {}


def scenario(title, but=None, **options):
    def add(function):
        SCENARIOS[function.__name__] = Scenario(function, title, but or {}, **options)
        return function

    return add


@scenario("The usual loop")
def plain(run):
    for x in run.data:
        run.backward(x)
        run.step()


def two_steps(run):
    """For what shows at once: of the first, whose order nobody knows yet, and of one that gathers ahead."""
    for x in run.data[:2]:
        run.backward(x)
        run.step()


@scenario("`zero_grad(set_to_none=False)`", set_to_none=False)
def zero_grad_in_place(run):
    two_steps(run)


@scenario(
    "Parameter groups by name, AdamW",
    {"OverlappedDDP-shards": Absent("its optimizer sees flat pieces of buckets, without names")},
    optimizer=functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.5),
    groups=lambda named: [
        {"params": [parameter for name, parameter in named if (parameter.dim() > 1) == decays], "weight_decay": decay}
        for named in [list(named)]
        for decays, decay in ((True, 0.5), (False, 0.0))
    ],
)
def param_groups(run):
    two_steps(run)


@scenario("Foreach optimizers", optimizer=functools.partial(torch.optim.AdamW, lr=0.01, foreach=True))
def foreach(run):
    two_steps(run)


@scenario(
    "Accumulation without communication",
    {"ZeroOptimizer-2": Refused("stage 2 keeps no whole gradients; take stage=1", "stage=1")},
)
def no_sync(run):
    for x in run.data:
        first, second = x.chunk(2)
        with run.no_sync():
            run.backward(first)
        run.backward(second)
        run.step()


@scenario("Accumulation, each backward reducing")
def accumulated(run):
    for x in run.data:
        for half in x.chunk(2):
            run.backward(half)
        run.step()


@scenario("Several forwards before a backward")
def several_forwards(run):
    for i, x in enumerate(run.data):
        losses = [run.loss(half) for half in x.chunk(2)]
        for loss in losses if i else [sum(losses)]:
            loss.backward()
        run.step()


@scenario("Evaluation between")
def evaluated(run):
    for x, mode in zip(run.data, (torch.no_grad, torch.inference_mode, torch.no_grad), strict=True):
        with mode():
            run.loss(x)
        run.backward(x)
        run.step()
        run.loss(x)  # a forward whose backward nobody wants


@scenario("Blocks in changing order, left out, used twice")
def reordered(run):
    for x, order in zip(run.data, ((0, 1, 2), (1, 0), (0, 0, 2, 1)), strict=True):
        run.model.order = order
        run.backward(x)
        run.step()


@scenario("Parameters that some or all ranks leave unused")
def unused(run):
    experts = run.model.layers[2]
    for x, taken in zip(run.data, [((0, 1, 2), (0, 1, 2)), ((0, 1), (0,)), ((1,), (0,))], strict=True):
        run.turn = lambda rank, taken=taken: setattr(experts, "taken", taken[rank])
        run.backward(x)
        run.step()


def _fail(*_):
    raise KeyError("of a hook")


@scenario("Forwards and backwards that fail, then good ones")
def failed(run):
    for x in run.data:
        loss = run.loss(x)
        loss.register_hook(_fail)
        with pytest.raises(KeyError):
            loss.backward()
        for register in (run.model.layers[2].register_forward_hook, run.model.layers[1].register_full_backward_hook):
            run.after_failure()
            hook = register(_fail)
            with pytest.raises(KeyError):
                run.backward(x)
            hook.remove()
        run.discard()
        run.backward(x)
        run.step()


@scenario("Frozen parameters", before=lambda model: model.layers[:2].requires_grad_(False))
def frozen(run):
    two_steps(run)


@scenario(
    "Parameters frozen and unfrozen later",
    {"OverlappedDDP-shards": Refused("wrap the module again", "was frozen after the module was wrapped")},
)
def frozen_later(run):
    for x, kind in zip(run.data, (Dense, Experts, StateSpace), strict=True):
        for layer in run.model.layers:
            layer.requires_grad_(not isinstance(layer, kind))
        run.backward(x)
        run.step()


@scenario("Tied parameters", kinds=(Tied, StateSpace))
def tied(run):
    two_steps(run)


CLIPPED = {"OverlappedDDP-shards": Other("`tkernels.layers.clip_grad_norm_`"), "ZeroOptimizer": Other("`max_norm=`")}


@scenario("torch's `clip_grad_norm_`", CLIPPED, max_norm=0.1)
def clip_grad_norm_(run):
    for x in run.data:
        run.backward(x)
        run.numbers.append(run.clipped_step(0.1))


MEGATRONS = {name: Other("over `ColumnParallelLinear` and its kin") for name in ("OverlappedDDP", "ZeroOptimizer")}


@scenario("Tensor parallelism, clipped", MEGATRONS, kinds=(Even, Even), max_norm=0.1, tp=2)
def tensor_parallel(run):
    clip_grad_norm_(run)


@scenario("Learning-rate schedulers")
def lr_scheduler(run):
    scheduler = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, max_lr=0.2, total_steps=4)
    for x in run.data:
        run.backward(x)
        run.step()
        scheduler.step()


@scenario(
    "`torch.amp.GradScaler`",
    {
        "OverlappedDDP-shards": Absent("ranks that skip steps on their own are told"),
        "ZeroOptimizer": Refused('`loss_scale="dynamic"` takes its place', 'loss_scale="dynamic"'),
    },
)
def grad_scaler(run):
    scaler = torch.amp.GradScaler(run.ctx.device.type, init_scale=2.0**8)
    for i, x in enumerate(run.data):
        for scale in (torch.inf, 1.0) if i == 1 else (1.0,):  # a step that all skip
            scaler.scale(run.loss(x) * scale).backward()
            scaler.unscale_(run.optimizer)
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()
        run.numbers.append(torch.tensor(scaler.get_scale()))


@scenario("Averages of the weights, swapped in to evaluate")
def averaged(run):
    averages = [parameter.detach().clone() for parameter in run.readable().parameters()]
    for number, x in enumerate(run.data):
        run.backward(x)
        run.step()
        weights = list(run.readable().parameters())
        kept = [weight.detach().clone() for weight in weights]
        # Through .data, as diffusers does it, torch counts no writes.
        seen = [weight.data if number % 2 else weight for weight in weights]
        with torch.no_grad():
            for average, weight in zip(averages, seen, strict=True):
                average.mul_(0.75).add_(weight, alpha=0.25)
                weight.copy_(average)
            run.loss(x)
            for weight, value in zip(seen, kept, strict=True):
                weight.copy_(value)
    run.numbers += map(full, averages)


@scenario(
    "`copy.deepcopy` of the model, as of `AveragedModel`",
    {
        "fully_shard": Refused("shard a new model and load the state dict", "deepcopy of FSDPHybrid would share"),
        "FullyShard": Refused("shard a new model and load the state dict", "deepcopy of FSDPHybrid would share"),
    },
)
def deepcopy(run):
    average = torch.optim.swa_utils.AveragedModel(run.model)
    for x in run.data:
        run.backward(x)
        run.step()
        average.update_parameters(run.readable())
    run.numbers += average.parameters()


@scenario(
    "Weights written between steps",
    {"ZeroOptimizer": Refused("call `refresh_masters()`", "call refresh_masters")},
)
def written(run):
    for x in run.data:
        with torch.no_grad():
            run.loss(x)  # which may leave whole parameters behind
            for parameter in run.readable().parameters():
                parameter.mul_(0.99)
        run.backward(x)
        run.step()


@scenario("Activation checkpointing")
def checkpointed(run):
    run.model.around = functools.partial(checkpoint, use_reentrant=False)
    two_steps(run)


@scenario("Activation checkpointing, `use_reentrant=True`")
def checkpointed_by_reentry(run):
    run.model.around = functools.partial(checkpoint, use_reentrant=True)
    two_steps(run)


@scenario("`torch.compile` of each block")
def compiled(run):
    for layer in run.model.layers:
        layer.compile(backend="eager")
    plain(run)


@scenario("Blocks on several streams")
def streams(run):
    dev, turns = torch.get_device_module(run.ctx.device), itertools.count()
    others = [dev.Stream(), dev.Stream()]

    def around(layer, x):
        current, stream = dev.current_stream(), others[next(turns) % 2]
        stream.wait_stream(current)
        with dev.stream(stream):
            y = layer(x)
        current.wait_stream(stream)
        return y

    run.model.around = around
    plain(run)


@scenario("Two models at once")
def two_models(run):
    other = run.again(seed=1)
    for x in run.data:
        (run.loss(x) + other.loss(x)).backward()
        run.step()
        other.step()


@scenario(
    "Checkpoints by `torch.distributed.checkpoint`",
    {
        "OverlappedDDP-shards": Absent("its optimizer's state is of flat pieces of buckets"),
        "ZeroOptimizer": Other("`state_dict()`, `full_state_dict()`"),
    },
)
def state_dict(run):
    for x in run.data[:2]:
        run.backward(x)
        run.step()
    for each in (run, run.resumed()):
        each.backward(run.data[2])
        each.step()


@scenario(
    "The backward of a forward from before the step",
    {"": Refused("as torch refuses it", "modified by an inplace operation")},
)
def late_backward(run):
    losses = [run.loss(run.data[0]) for _ in range(2)]
    losses[0].backward()
    run.step()
    run.loss(run.data[0])
    losses[1].backward()


@scenario(
    "Second derivatives",
    {
        # Of what autograd has saved of a unit: its memory has been given back once. On GPUs its node refuses before.
        name: Refused("its gather is not differentiable twice", "modified by an inplace operation|differentiate twice")
        for name in ("fully_shard", "FullyShard")
    },
)
def second_derivatives(run):
    for x in run.data:
        x = x.clone().requires_grad_()
        loss = run.loss(x)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum() * len(run.own)).backward()
        run.step()


NOT_DENSE = Refused("ask the table for dense ones", "dense")


@scenario(
    "Sparse gradients",
    {name: NOT_DENSE for name in ("fully_shard", "FullyShard", "ZeroOptimizer")},
    kinds=(Looked, Dense),
)
def sparse(run):
    two_steps(run)


@scenario(
    "Conversion after wrapping, as by `model.bfloat16()`",
    {name: Refused("convert before", "converted or moved") for name in ("OverlappedDDP", "ZeroOptimizer")},
)
def converted(run):
    run.called.bfloat16()
    run.called.to(torch.float64 if isinstance(run, Twin) else torch.float32)
    two_steps(run)


# The table


def check(ctx, name, system, path=None):
    """Collective. What the table has: the same training as the twin's, or an error in which the words stand."""
    scenario, kind = SCENARIOS[name], SYSTEMS[system]

    def trained(kind, **options):
        loop = kind(scenario, ctx, path=path, **options)
        scenario.run(loop)
        return loop

    cell = scenario.cell(system)
    if isinstance(cell, Refused):
        with pytest.raises(Exception, match=cell.words) as refused:
            trained(kind)
        message_on_every_rank(ctx, refused.value)
        return
    got, want = trained(kind), trained(Twin, zeros=kind.zeros)
    for ours, theirs in zip((got, *got.beside), (want, *want.beside), strict=True):
        weights, truth = ours.whole(), theirs.whole()
        assert list(weights) == list(truth)
        for name, value in weights.items():
            assert_close_to(value, truth[name], terms=512)
        for ours_is, theirs_is in zip(ours.numbers, theirs.numbers, strict=True):
            assert_close_to(ours_is, theirs_is.double(), terms=512)


# Through the interpreter, the first of each system's forms is asked of every scenario. Of the others, one in turn is,
# and those that have another cell than the first.
FIRST = {"fully_shard": "fully_shard-parameters", "OverlappedDDP": "OverlappedDDP", "ZeroOptimizer": "ZeroOptimizer-2"}
FIRST["FullyShard"] = FIRST["fully_shard"]
OTHERS = [system for system in SYSTEMS if system not in FIRST.values()]


def cells(tp):
    made = []
    for i, (name, scenario) in enumerate(SCENARIOS.items()):
        for system in SYSTEMS:
            cell, first = scenario.cell(system), FIRST[system.partition("-")[0]]
            asked = system in (first, OTHERS[i % len(OTHERS)]) or cell != scenario.cell(first)
            if scenario.tp == tp and not isinstance(cell, Absent):
                made.append(pytest.param(name, system, marks=() if asked else pytest.mark.exhaustive))
    return made


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("name", "system"), cells(tp=1))
def test_fully_shard_and_others_train_as_the_unsharded_model(ctx, name, system, tmp_path):
    check(ctx, name, system, path=f"{ctx.group.gather(str(tmp_path))[0]}/saved")


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("name", "system"), cells(tp=2))
def test_fully_shard_and_others_train_beside_tensor_parallel_layers(ctx, name, system):
    check(ctx, name, system)


HELD = {  # of the parameters and of the optimizer's states, by one of two ranks: the guide's table of what to take
    "OverlappedDDP": (1, 1),
    "fully_shard-replicate": (1, 1),
    "ZeroOptimizer-2": (1, 1 / 2),
    "fully_shard-optimizer": (1 / 2, 1 / 2),
    "fully_shard-parameters": (1 / 2, 1 / 2),
}


@pytest.mark.ranks(2)
def test_fully_shard_and_others_refuse_parameters_that_another_one_has(ctx):
    systems = {
        "OverlappedDDP": lambda model: OverlappedDDP(model, mesh=ctx),
        "ZeroOptimizer": lambda model: ZeroOptimizer(
            model.named_parameters(), torch.optim.SGD, lr=1.0, mesh=ctx, overlap_gather=model
        ),
        "fully_shard": lambda model: fully_shard(model, mesh=ctx),
        "parallelize_module": lambda model: layers.parallelize_module(model, ctx, {"": layers.ColwiseParallel()}),
    }
    for first, second in itertools.permutations(systems, 2):
        if first == "parallelize_module" or (first, second) == ("fully_shard", "parallelize_module"):
            continue  # makes DTensors, which have no owner, and are refused as such
        model = nn.Linear(4, 4, bias=False).to(ctx.device)
        nn.init.ones_(model.weight)
        kept = systems[first](model)
        with pytest.raises(ValueError, match=f"weight belongs to {first}, which takes its") as refused:
            systems[second](model)
        message_on_every_rank(ctx, refused.value)
        if first == "ZeroOptimizer":
            with pytest.raises(ValueError, match="assign=True.: weight belongs to ZeroOptimizer"):
                model.load_state_dict(model.state_dict(), assign=True)
        if first != "fully_shard":
            kept.remove()
            model.load_state_dict(model.state_dict(), assign=True)
            systems[second](model)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("system", SYSTEMS)
def test_fully_shard_and_others_let_a_model_go_that_nobody_holds(ctx, system):
    loop = SYSTEMS[system](SCENARIOS["plain"], ctx)
    loop.backward(loop.data[0])
    loop.step()
    seen = [weakref.ref(each) for each in (loop.model, *loop.model.parameters())]
    del loop
    gc.collect()
    assert not any(reference() is not None for reference in seen)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("system", HELD)
def test_fully_shard_and_others_hold_as_much_as_the_guide_says(ctx, system):
    def held(tensors):
        return sum(tensor.to_local().numel() if isinstance(tensor, DTensor) else tensor.numel() for tensor in tensors)

    loop = SYSTEMS[system](SCENARIOS["plain"], ctx)
    loop.backward(loop.data[0])
    loop.step()
    whole = held(Hybrid().parameters())
    states = [value for state in loop.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    for found, part in zip((held(loop.model.parameters()), held(states)), HELD[system], strict=True):
        assert abs(found / whole - part) < (0.1 if part < 1 else 1e-6), (found, whole, part)


WORDS = {Other: "in its words", Refused: "refused", Absent: "no"}
OPTIONS = {"shards": "`overlap_param_gather`", "1": "`stage=1`"}


def markdown() -> str:
    """The table as it stands in layers/README.md: one column for systems that do all alike."""
    columns, notes = {}, {}
    for system in SYSTEMS:
        name, _, option = system.partition("-")
        head = ", ".join([f"`{name}`", *([OPTIONS[option]] if option in OPTIONS else [])])
        columns.setdefault(tuple(each.cell(system) for each in SCENARIOS.values()), {})[head] = None
    lines = [["", *(", ".join(heads) for heads in columns.values())], ["---"] * (len(columns) + 1)]
    for i, each in enumerate(SCENARIOS.values()):
        lines.append([each.title])
        for cell in [column[i] for column in columns]:
            note = f" ({notes.setdefault(cell.note, len(notes) + 1)})" if cell and cell.note else ""
            lines[-1].append("yes" if cell is None else WORDS[type(cell)] + note)
    rows = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([*rows, "", *(f"{number}. {note}" for note, number in notes.items())])


def test_fully_shard_and_others_have_this_table_in_the_guide(checkout):
    assert markdown() in (checkout / "layers/README.md").read_text(), "print it by python tests/test_strategies.py"


if __name__ == "__main__":
    print(markdown())
