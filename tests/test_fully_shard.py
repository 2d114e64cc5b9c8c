"""fully_shard: its own options and methods in every strategy, the order of its streams, and what it refuses.

What a loop may do with any system is in test_strategies. What only fully_shard has are the scenarios here: functions
that are run on the sharded model, on this rank's part of each batch, and on an unsharded twin in fp64, on the whole
batch. Both must end with the same weights.
"""

import collections
import contextlib
import copy
import dataclasses
import functools
import pickle
import types
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from streams import Race, Simulator, subsets
from test_strategies import FEATURES, Dense, Experts, Hybrid, StateSpace, accumulated, full, loss_of, no_sync, plain
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint
from transports import gpu_only, message_on_every_rank, simulated_only

import tkernels
from tkernels.comm import Context, LeaseError, MismatchError
from tkernels.layers import (
    ColumnParallelLinear,
    OverlappedDDP,
    ParallelMLP,
    RowParallelLinear,
    captured,
    gather_state_dict,
    load_full_state_dict,
    sharded_state_dict,
)
from tkernels.layers.data_parallel import engine, layout
from tkernels.layers.data_parallel.engine import State, unit_of
from tkernels.layers.data_parallel.fsdp import FullyShard
from tkernels.layers.data_parallel.fully_shard import fully_shard, register_fsdp_forward_method
from tkernels.layers.data_parallel.param_group import ParamGroup
from tkernels.layers.marks import RANKS
from tkernels.layers.tensor_parallel.dataflow import DeferringModule
from tkernels.testing.compare import assert_close_to, integers, normal

LATE = 4_000_000  # cycles, about 2 ms: several times what the host needs for a unit
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


UNITS = (Dense, StateSpace, Experts, Dense, StateSpace)


def mesh_of(ctx) -> DeviceMesh:
    return init_device_mesh(ctx.device.type, (ctx.size,), mesh_dim_names=("dp",))


def hybrid(ctx, seed=0, kinds=UNITS):
    torch.manual_seed(seed)
    return Hybrid(kinds).to(ctx.device)


def shard(ctx, model, shard=fully_shard, **options):
    """As a user would: the blocks first, the model last."""
    mesh = mesh_of(ctx)
    for layer in model.layers:
        shard(layer, mesh=mesh, **options)
    return shard(model, mesh=mesh, **options)


def batches(ctx, steps, dtype=torch.float32):
    """Each step's whole batch, [4 * R, 4]: the same on every rank."""
    return [normal((4 * ctx.size, 4), dtype, 100 + step, device=ctx.device) for step in range(steps)]


def in_fp64(model):
    """The model as the truth: the same weights in fp64, whatever the dtype of its input."""
    model.register_forward_pre_hook(lambda _, inputs: (inputs[0].double(), *inputs[1:]))
    return model.double()


def own(ctx, x):
    """This rank's part of a batch."""
    return x.chunk(ctx.size)[ctx.rank]


def assert_same_weights(sharded, unsharded, terms=512):
    """unsharded: in fp64."""
    want = dict(unsharded.named_parameters())
    assert list(dict(sharded.named_parameters())) == list(want)
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter, DTensor) and parameter.shape == want[name].shape, name
        assert_close_to(full(parameter.detach()), want[name].detach(), terms=terms)


# Scenarios: what a training loop may do. `part` gives this rank's part of a batch; the twin gets all of it.


@dataclasses.dataclass
class Run:
    """One training of one model. sharded: whether it is the sharded one; `part` is this rank's part of a batch."""

    model: nn.Module
    data: list
    part: object
    sharded: bool

    def __post_init__(self):
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)

    def __getattr__(self, method):
        """A method that only the sharded model has; the unsharded one needs none."""
        if not hasattr(FSDPModule, method):
            raise AttributeError(method)
        return getattr(self.model, method) if self.sharded else lambda *_, **__: None

    def backward(self, x):
        loss_of(self.model(self.part(x))).backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    @contextlib.contextmanager
    def no_sync(self):
        self.set_requires_gradient_sync(False)
        yield
        self.set_requires_gradient_sync(True)


SCENARIOS = {}


def scenario(function=None, **options):
    """Add a scenario. options: of the model, `kinds`, where one of each doesn't do; of fully_shard."""
    if function is None:
        return functools.partial(scenario, **options)
    SCENARIOS[function.__name__] = function, options
    return function


@scenario
def accumulated_until_the_last_backward(run):
    for x in run.data:
        for i, half in enumerate(x.chunk(2)):
            run.set_is_last_backward(i == 1)
            run.backward(half)
        run.step()


@scenario
def frozen_but_for_one(run):
    run.model.requires_grad_(False)
    run.model.layers[2].router.requires_grad_(True)
    plain(run)


@scenario
def interrupted(run):
    """In a forward, of which torch tells no hook: before a backward, and between it and the step."""

    def interrupt(*_):
        raise KeyboardInterrupt

    for step, x in enumerate(run.data):
        for fails in (True, False) if step != 1 else (False, True):
            handle = run.model.layers[1].register_forward_pre_hook(interrupt) if fails else contextlib.nullcontext()
            with handle, pytest.raises(KeyboardInterrupt) if fails else contextlib.nullcontext():
                run.backward(x)
        run.step()


@scenario
def changed_between_forward_and_backward(run):
    """What nobody should do is what torch does with it: gradients at the old weights, where nothing needs them."""
    for x in run.data:
        run.backward(x)
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.mul_(0.99)
        run.step()


@scenario(reshard_after_forward=False)
def kept_after_forward(run):
    for x in run.data:
        run.backward(x)
        run.step()


@scenario(reshard_after_forward=True)
def given_back_by_the_root_too(run):
    plain(run)


@scenario
def set_to_keep(run):
    for x, keep in zip(run.data, (False, True, False), strict=True):
        run.set_reshard_after_forward(keep)
        run.set_reshard_after_backward(keep)
        run.backward(x)
        run.step()


@scenario
def gathered_by_hand(run):
    for x in run.data:
        if run.sharded:
            run.model.unshard()
            handle = run.model.layers[0].unshard(async_op=True)
            assert type(run.model.embed.weight) is nn.Parameter
            handle.wait()
            assert type(run.model.layers[0].up.weight) is nn.Parameter
        run.backward(x)
        if run.sharded:
            run.model.layers[1].unshard()
            run.model.layers[1].reshard()
        run.step()


@scenario(kinds=UNITS)
def told_what_to_gather_ahead(run):
    layers = run.model.layers
    if run.sharded:
        for first, second in zip(layers, layers[1:], strict=False):
            first.set_modules_to_forward_prefetch([second])
            second.set_modules_to_backward_prefetch([first])
    plain(run)


class View(Dense):
    """Returns a view, which the next layer changes in place."""

    def forward(self, x):
        return super().forward(x).unflatten(-1, (2, -1)).flatten(-2)


@scenario(kinds=(View, View, Dense))
def changed_in_place(run):
    def around(layer, x):
        y = layer(x)
        y += 1
        return y

    run.model.around = around
    plain(run)


class Nested(Dense):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES, bias=False))

    def forward(self, x):
        return super().forward(self.inner(x))


@scenario(kinds=(Nested, Dense, Nested), inner=lambda layer: [layer.inner] if hasattr(layer, "inner") else [])
def nested(run):
    plain(run)


@scenario(kinds=UNITS, policy=BF16)
def mixed_precision(run):
    run.optimizer.param_groups[0]["lr"] = 0.01
    plain(run)


@scenario(kinds=UNITS, policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
def reduced_in_bf16(run):
    run.optimizer.param_groups[0]["lr"] = 0.01
    no_sync(run)


class Odd(Dense):
    """A frozen norm in bf16 between parameters in fp32."""

    def __init__(self):
        super().__init__()
        self.norm.to(torch.bfloat16).requires_grad_(False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x.to(self.norm.weight.dtype)).to(x.dtype))))


@scenario(kinds=(Odd, Dense))
def several_dtypes(run):
    plain(run)


STRATEGIES = ["parameters", "gradients", "optimizer", "replicate"]
# Through the interpreter, of all strategies but the first every third scenario is asked by default.
CELLS = [
    pytest.param(strategy, name, marks=pytest.mark.exhaustive if i and j % 3 != i % 3 else ())
    for i, strategy in enumerate(STRATEGIES)
    for j, name in enumerate(SCENARIOS)
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("strategy", "name"), CELLS)
def test_fully_shard_trains_as_the_unsharded_model(ctx, strategy, name):
    function, options = SCENARIOS[name]
    options = dict(options)
    kinds, policy = options.pop("kinds", UNITS[:3]), options.pop("policy", MixedPrecisionPolicy())
    inner = options.pop("inner", lambda layer: [])
    model = hybrid(ctx, kinds=kinds)
    unsharded = in_fp64(copy.deepcopy(model))
    for layer in model.layers:
        for part in inner(layer):
            fully_shard(part, mesh=mesh_of(ctx), mp_policy=policy, strategy=strategy, **options)
    shard(ctx, model, mp_policy=policy, strategy=strategy, **options)
    data = batches(ctx, 3)
    part = functools.partial(own, ctx)
    function(Run(model, data, part, True))
    function(Run(unsharded, data, lambda x: x, False))
    model.reset_iter_state()
    assert all(unit.state is State.SHARDED for unit in unit_of(model).engine.units)
    if policy.param_dtype is None:
        assert_same_weights(model, unsharded)
    else:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(full(parameter).double(), unsharded.get_parameter(name), rtol=0, atol=5e-3)


# Every order of the streams


@torch.no_grad()
def update(model, set_to_none):
    """A step of SGD on local tensors: what DTensor does to know shapes can't be queued."""
    for parameter in model.parameters():
        parameter._local_tensor.add_(parameter.grad._local_tensor, alpha=-0.1)
        if set_to_none:
            parameter.grad = None
        else:
            parameter.grad._local_tensor.zero_()


def simulated(starve, monkeypatch, overlap=True, steps=3, patch=None, policy=None, kinds=UNITS, every=None, **options):
    """Losses of one rank on simulated streams, the races, and the simulator."""
    policy, every = policy or MixedPrecisionPolicy(), every or {}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ctx = tkernels.init(heap_bytes=8 << 20)
    try:
        data, losses = batches(ctx, steps), []
        sim = Simulator()
        with monkeypatch.context() as patched:
            patched.setattr(engine, "device_module", lambda device: sim)
            model = hybrid(ctx, kinds=kinds)
            for layer in model.layers:
                fully_shard(layer, mesh=ctx, mp_policy=policy, **every)
            fully_shard(model, mesh=ctx, mp_policy=policy, overlap=overlap, **every, **options)
            with sim:
                if patch is not None:
                    patch(unit_of(model), patched)
                for x in data:
                    loss = loss_of(model(x))
                    loss.backward()
                    update(model, set_to_none=len(losses) % 2 == 0)
                    losses.append(loss.detach())
            races = sim.races
            sim.run(starve)
        return [loss.item() for loss in losses], races, sim
    finally:
        tkernels.finalize(ctx)
        dist.destroy_process_group()


@simulated_only
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("prefetch", [0, 1, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_fully_shard_computes_the_same_in_every_order_of_the_streams(prefetch, policy, monkeypatch):
    # The simulator's LayerNorm of bf16 is not the CPU's.
    options = {"policy": policy, "kinds": (StateSpace, Experts, StateSpace) if policy is BF16 else UNITS}
    want, races, sim = simulated((), monkeypatch, overlap=False, **options)
    assert not races and sim.waits == 0
    for starve in subsets(["main", "stream1"]):
        losses, races, _ = simulated(starve, monkeypatch, prefetch=prefetch, **options)
        assert not races, races[0]
        assert losses == want


@simulated_only
@pytest.mark.parametrize("strategy", ["gradients", "replicate"])
def test_fully_shard_orders_streams_in_every_strategy(strategy, monkeypatch):
    want, races, _ = simulated((), monkeypatch, overlap=False, every={"strategy": strategy})
    assert not races
    for starve in (["main"], ["stream1"]):
        losses, races, _ = simulated(starve, monkeypatch, every={"strategy": strategy})
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


def gather_over_parameters_in_use(unit, monkeypatch):
    plan = engine.Engine._plan

    def planned(self):
        plan(self)
        forget(self.pool.slots, monkeypatch)

    monkeypatch.setattr(engine.Engine, "_plan", planned)


def reuse_gradients_that_still_travel(unit, monkeypatch):
    def drop(self, keep=0):
        self._deferred.clear()

    monkeypatch.setattr(engine.Keepalive, "drain", drop)


def gather_before_the_optimizer(unit, monkeypatch):
    gather = engine.Engine.gather

    def early(self, group):
        self._weights.filled.clear()
        return gather(self, group)

    monkeypatch.setattr(engine.Engine, "gather", early)


def reduce_before_the_gradients(unit, monkeypatch):
    lease = engine.Lease.read

    def early(self, stream=None):
        if self.name == "gradients":
            self.filled.clear()
        return lease(self, stream)

    monkeypatch.setattr(engine.Lease, "read", early)


def step_before_the_reductions(unit, monkeypatch):
    lease = engine.Lease.read

    def early(self, stream=None):
        if self.name == "gradients of sharded parameters":
            self.filled.clear()
        return lease(self, stream)

    monkeypatch.setattr(engine.Lease, "read", early)
    monkeypatch.setattr(engine.Keepalive, "drain", lambda self, keep=0: None)


@simulated_only
@pytest.mark.parametrize(
    "form",
    [
        gather_over_parameters_in_use,
        reuse_gradients_that_still_travel,
        gather_before_the_optimizer,
        reduce_before_the_gradients,
        step_before_the_reductions,
    ],
)
def test_fully_shard_without_one_of_its_waits_is_found_out(form, monkeypatch):
    # Units of one size, so that freed memory is used again at once.
    _, races, _ = simulated(["stream1"], monkeypatch, patch=form, steps=2, kinds=(Dense,) * 4)
    assert races and isinstance(races[0], Race)


@simulated_only
def test_fully_shard_gathers_and_reduces_beside_the_computation(monkeypatch):
    counts = []
    for starve in ("main", "stream1"):
        _, _, sim = simulated([starve], monkeypatch)
        forward, backward = (
            [i for i, name in enumerate(sim.log) if name == f"native_layer_norm{suffix}"]
            for suffix in ("", "_backward")
        )
        # Layers 0 and 3 have norms. The first step gathers 11 times; in the second one come the root, layer 0, layer 1.
        gathered = sim.log[: forward[2]].count("all_gather") - 11
        # The first step reduces 6 times; then, in the backward of the second one, layer 4 before layer 3.
        reduced = sim.log[: backward[2]].count("reduce_scatter_out") - 6
        counts.append((gathered, reduced))
    assert counts == [(3, 1), (2, 0)]


# Checkpoints


def train_steps(model, optimizer, data, part, clip=0.5):
    for x in data:
        loss_of(model(part(x))).backward()
        if clip is not None:
            clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def adam(model):
    return torch.optim.AdamW(model.parameters(), 0.01)


def subgroup(ctx, count):
    """Of the first `count` ranks; None on the others."""
    group = dist.new_group(list(range(count)))
    return group if ctx.rank < count else None


@pytest.mark.ranks(2)
def test_fully_shard_saves_and_loads_through_torch_distributed_checkpoint(ctx, tmp_path):
    path = ctx.group.gather(str(tmp_path))[0]
    part = functools.partial(own, ctx)
    data = batches(ctx, 4)
    model = shard(ctx, hybrid(ctx))
    optimizer = adam(model)
    train_steps(model, optimizer, data[:2], part)
    states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    assert list(states["model"]) == list(hybrid(ctx).state_dict())
    dcp.save(states, checkpoint_id=f"{path}/saved")
    dcp.async_save(states, checkpoint_id=f"{path}/later").result()
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    train_steps(model, optimizer, data[2:], part)

    for folder in ("saved", "later"):
        again = shard(ctx, hybrid(ctx, seed=1))
        its_optimizer = adam(again)
        states = dict(zip(("model", "optim"), get_state_dict(again, its_optimizer), strict=True))
        dcp.load(states, checkpoint_id=f"{path}/{folder}")
        set_state_dict(again, its_optimizer, model_state_dict=states["model"], optim_state_dict=states["optim"])
        train_steps(again, its_optimizer, data[2:], part)
        for first, second in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(first._local_tensor, second._local_tensor)
    assert all(torch.equal(value, whole[key]) for key, value in loaded_whole(ctx, f"{path}/saved").items())
    broadcast = shard(ctx, hybrid(ctx, seed=2))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(broadcast, dict(whole) if ctx.rank == 0 else {}, options=options)
    assert all(torch.equal(full(value), whole[key]) for key, value in broadcast.state_dict().items())


def loaded_whole(ctx, path):
    """What a program without any sharding loads."""
    model = hybrid(ctx, seed=3)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=path)
    return state["model"]


class Parallel(Dense):
    """Its features are split over two ranks, and over four unevenly."""

    hidden = 34


def two_meshes(ctx, dp, tp):
    return init_device_mesh(ctx.device.type, (dp, tp), mesh_dim_names=("dp", "tp"))


def parallel(ctx, mesh, seed, shard):
    """A model over dp x tp, by torch's own styles."""
    torch.manual_seed(seed)
    model = nn.Sequential(Parallel(), Parallel(), nn.Linear(FEATURES, 3)).to(ctx.device)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model[:2]:
        parallelize_module(block, mesh["tp"], plan)
        shard(block, mesh=mesh["dp"])
    return shard(model, mesh=mesh["dp"])


@pytest.mark.ranks(4)
def test_fully_shard_over_tensor_parallel_layers_places_and_trains_as_torchs(ctx, tmp_path):
    path = ctx.group.gather(str(tmp_path))[0]
    x = normal((8, FEATURES), torch.float32, 5, device=ctx.device)
    torch.manual_seed(0)
    twin = in_fp64(nn.Sequential(Parallel(), Parallel(), nn.Linear(FEATURES, 3)).to(ctx.device))
    results = {}
    for shard in (fully_shard, torch_fully_shard):
        mesh = two_meshes(ctx, 2, 2)
        model = parallel(ctx, mesh, 0, shard)
        optimizer = adam(model)
        clip = None if shard is torch_fully_shard else 0.5
        train_steps(model, optimizer, [x, x + 1], lambda x: x.chunk(2)[ctx.rank // 2], clip)
        results[shard] = dict(model.named_parameters())
        if shard is fully_shard:
            model_of = model, optimizer
            states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
            dcp.save(states, checkpoint_id=path)
    train_steps(twin, adam(twin), [x, x + 1], lambda x: x)
    ours, theirs = results.values()
    for name, parameter in twin.named_parameters():
        assert ours[name].placements[: theirs[name].device_mesh.ndim] == theirs[name].placements, name
        assert (
            ours[name].device_mesh == mesh
        )  # where torch's norms have no tensor-parallel dimension, ours say Replicate
        assert_close_to(full(ours[name].detach()), parameter.detach(), terms=4096)
    for dp, tp in ((4, 1), (1, 4)):
        mesh = two_meshes(ctx, dp, tp)
        again = parallel(ctx, mesh, 1, fully_shard)
        its_optimizer = adam(again)
        states = dict(zip(("model", "optim"), get_state_dict(again, its_optimizer), strict=True))
        dcp.load(states, checkpoint_id=path)
        set_state_dict(again, its_optimizer, model_state_dict=states["model"], optim_state_dict=states["optim"])
        for name, parameter in again.named_parameters():
            assert torch.equal(full(parameter), full(ours[name])), (dp, tp, name)
        for parameter, other in zip(again.parameters(), model_of[0].parameters(), strict=True):
            moments = (full(each.state[p]["exp_avg"]) for each, p in ((its_optimizer, parameter), (model_of[1], other)))
            assert torch.equal(*moments)


@pytest.mark.ranks(4, timeout_s=240)
def test_fully_shard_over_tensor_parallel_layers_is_compiled(ctx):
    """Whole parameters that are DTensors lie within one buffer, where torch.compile has to take them for inputs."""
    mesh, results = two_meshes(ctx, 2, 2), {}
    up, down = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
    plan = {"norm": SequenceParallel(), "up": up, "down": down}
    for compiled in (None, "units", "top"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(Parallel(), Parallel()).to(ctx.device)
        for block in model:
            parallelize_module(block, mesh["tp"], plan)
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        for module in {"units": model, "top": [model]}.get(compiled, ()):
            module.compile(backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            x = normal((2, 4, FEATURES), torch.float32, 10 * step + ctx.rank).to(ctx.device)
            model(x).square().mean().backward()
            optimizer.step()
        results[compiled] = [full(parameter.detach()) for parameter in model.parameters()]
    torch._dynamo.reset()
    for compiled in ("units", "top"):
        for got, want in zip(results[compiled], results[None], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=lambda said, of=compiled: f"{of}: {said}")


# Beside torch's


@pytest.mark.ranks(2)
@pytest.mark.parametrize("direct", [layout.DIRECT_NUMEL, 100])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16], ids=["fp32", "bf16"])
def test_fully_shard_gives_the_bits_of_torchs(ctx, policy, direct, monkeypatch):
    monkeypatch.setattr(layout, "DIRECT_NUMEL", direct)
    monkeypatch.setattr(layout, "REDUCED_BYTES", direct * 8)  # at 100: in pieces of a few rows
    part = functools.partial(own, ctx)
    models = [shard(ctx, hybrid(ctx), each, mp_policy=policy) for each in (fully_shard, torch_fully_shard)]
    for model in models:
        train_steps(model, adam(model), batches(ctx, 3), part)
    for (name, ours), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        if "unused" not in name:  # torch leaves it without a gradient, and AdamW decays what has one
            # The last bits of some CPUs' products depend on where the weight lies.
            atol = 1e-4 if policy.param_dtype else 1e-7 if ctx.device.type == "cpu" else 0
            torch.testing.assert_close(ours._local_tensor, theirs._local_tensor, rtol=0, atol=atol)
        assert ours.placements == theirs.placements and ours.dtype == theirs.dtype == torch.float32


def test_fully_shard_reduces_in_pieces_that_a_workspace_holds():
    shapes = [torch.Size(shape) for shape in ((4096, 14336), (14336, 4096), (4099, 4096), (4096,), (7,))]
    for ranks in (2, 8):
        whole = layout.Layout(shapes, ranks)
        pieces = whole.pieces(torch.float32)
        assert pieces[0][0] == 0 and pieces[-1][1] == whole.numel
        assert all(first[1] == second[0] for first, second in zip(pieces, pieces[1:], strict=False))
        assert all(0 < 4 * ranks * (stop - start) <= layout.REDUCED_BYTES for start, stop in pieces)


# Meta device, moves, methods


@pytest.mark.ranks(2)
def test_fully_shard_on_the_meta_device_is_initialized_in_place(ctx):
    with torch.device("meta"):
        model = Hybrid(UNITS)
    shard(ctx, model)
    assert all(parameter.is_meta for parameter in model.parameters())
    with pytest.raises(ValueError, match=r"embed.weight is on the meta device; call to_empty"):
        model(torch.ones(2, 4, device=ctx.device))
    optimizer = adam(model)  # before there are values, as nobody forbids
    model.to_empty(device=ctx.device)
    source = hybrid(ctx)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(distribute_tensor(source.get_parameter(name).detach(), parameter.device_mesh, [Shard(0)]))
    model.layers[2].scale.fill_(1.0)
    kept = shard(ctx, source)
    part = functools.partial(own, ctx)
    for each, its_optimizer in ((model, optimizer), (kept, adam(kept))):
        train_steps(each, its_optimizer, batches(ctx, 2), part)
    for first, second in zip(model.parameters(), kept.parameters(), strict=True):
        assert torch.equal(first._local_tensor, second._local_tensor)


@pytest.mark.ranks(2)
def test_fully_shard_follows_conversions_and_assigned_state_dicts(ctx):
    part = functools.partial(own, ctx)
    models = [shard(ctx, hybrid(ctx)) for _ in range(2)]
    for model in models:
        loss_of(model(part(batches(ctx, 1)[0]))).backward()
        model.zero_grad()
    models[0].to(torch.bfloat16)
    state = {key: value.to(torch.bfloat16) for key, value in models[1].state_dict().items()}
    models[1].load_state_dict(state, assign=True)
    for model in models:
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x in batches(ctx, 2, torch.bfloat16):
            loss_of(model(part(x))).backward()
            optimizer.step()
            optimizer.zero_grad()
    for first, second in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(first._local_tensor, second._local_tensor)
    models[0].layers[0].up.weight = nn.Parameter(torch.ones(37, FEATURES, device=ctx.device))
    with pytest.raises(ValueError, match=r"up.weight was a DTensor of \(37, 8\).* and is Parameter now; copy values"):
        models[0](part(batches(ctx, 1, torch.bfloat16)[0]))


@pytest.mark.ranks(2)
def test_fully_shard_runs_a_whole_model_after_a_part_of_it_whose_graph_is_kept(ctx):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).to(ctx.device)
    twin, x = copy.deepcopy(model).double(), normal((4, 8), torch.float32, 1, device=ctx.device)
    for part in (*model, model):
        fully_shard(part, mesh=mesh_of(ctx))
    kept = model[1](x.requires_grad_())  # no backward of it may come
    for dtype, error in ((torch.float32, 1e-6), (torch.bfloat16, 0.02)):  # nor may it keep the memory for another dtype
        model.to(dtype)
        y = model(x.to(dtype))
        assert y.dtype == dtype and (y.double() - twin(x.double())).abs().max() < error
    with pytest.raises(LeaseError, match="1 ran by itself before the model that it is in, .* run the whole"):
        kept.sum().backward()


@pytest.mark.ranks(2)
def test_fully_shard_of_a_list_is_one_unit_and_takes_forward_methods(ctx):
    class Two(Hybrid):
        def forward(self, x):
            return self.head(self.encode(x))

        def encode(self, x):
            return self.layers[1](self.layers[0](self.embed(x)))

    torch.manual_seed(0)
    model = Two((Dense, Dense)).to(ctx.device)  # with the same names in both
    twin = in_fp64(copy.deepcopy(model))
    fully_shard([model.layers[0], model.layers[1]], mesh=mesh_of(ctx))
    fully_shard(model, mesh=mesh_of(ctx))
    assert unit_of(model.layers[0]) is unit_of(model.layers[1])
    register_fsdp_forward_method(model, "encode")
    plain(Run(model, batches(ctx, 3), functools.partial(own, ctx), True))
    plain(Run(twin, batches(ctx, 3), lambda x: x, False))
    assert_same_weights(model, twin)
    x = batches(ctx, 1)[0]
    with torch.no_grad():
        assert_close_to(model.encode(x), Two.encode(twin, x.double()), terms=512)


@pytest.mark.ranks(2)
def test_fully_shard_gives_modules_of_one_call_their_parameters_once_and_gathers_ahead_meanwhile(ctx, monkeypatch):
    torch.manual_seed(0)
    model, log = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))).to(ctx.device), []
    for first in (0, 2, 4):
        fully_shard(list(model[first : first + 2]), mesh=mesh_of(ctx))
    fully_shard(model, mesh=mesh_of(ctx))
    for index, part in enumerate(model):
        whole = lambda: "".join("01"[not isinstance(each.weight, DTensor)] for each in model)  # noqa: E731
        part.register_forward_hook(lambda *_, index=index, whole=whole: log.append(f"{index} {whole()}"))
    gather = engine.Engine.gather
    monkeypatch.setattr(engine.Engine, "gather", lambda self, group: log.append(group.id[0]) or gather(self, group))
    for _ in range(3):
        log.clear()
        y = model(torch.randn(4, 8, device=ctx.device))
        log.append(f"outside {isinstance(model[5].weight, DTensor)}")
        y.sum().backward()
    usual = ["0", "2", "0 110000", "1 110000", "4", "2 001100", "3 001100", "4 000011", "5 000011", "outside True"]
    assert log == [*usual, "2", "0"]

    def interrupt(*_):
        raise error

    for error in (ZeroDivisionError(), KeyboardInterrupt()):
        hook = model[1].register_forward_hook(interrupt)
        with torch.no_grad(), pytest.raises(type(error)):
            model(torch.randn(4, 8, device=ctx.device))
        hook.remove()
        with torch.no_grad():  # no hook of modules is called after an interrupt
            model(torch.randn(4, 8, device=ctx.device))
        assert all(isinstance(each.weight, DTensor) for each in model), error


@pytest.mark.ranks(2)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_fully_shard_takes_a_checkpoint_around_the_whole_model(ctx, use_reentrant):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 8)).to(ctx.device)
    twin = in_fp64(copy.deepcopy(model))
    fully_shard([model[0], model[2]], mesh=mesh_of(ctx))
    fully_shard(model, mesh=mesh_of(ctx))
    x = normal((4, 8), torch.float32, 1, device=ctx.device).requires_grad_()
    for _ in range(2):
        checkpoint(model, x, use_reentrant=use_reentrant).square().sum().backward()
        twin(x.detach().double()).square().sum().backward()
    for parameter, true in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close_to(parameter.grad.full_tensor(), true.grad, terms=64)


@pytest.mark.ranks(2)
def test_fully_shard_takes_several_forwards_before_a_backward_where_the_first_unit_is_fed_the_data(ctx):
    torch.manual_seed(0)
    model = nn.Sequential(Dense(), Dense(), nn.Linear(FEATURES, 3)).to(ctx.device)
    twin = in_fp64(copy.deepcopy(model))
    for part in (*model, model):
        fully_shard(part, mesh=mesh_of(ctx))
    for each, part in ((model, functools.partial(own, ctx)), (twin, lambda x: x)):
        for step in range(3):
            x = part(normal((4 * ctx.size, FEATURES), torch.float32, step, device=ctx.device))
            losses = [loss_of(each(x * factor)) for factor in (1, 2, 3)]
            (losses[0] + losses[2]).backward()  # the units' memory is that of the third forward, then of the first
            torch.optim.SGD(each.parameters(), 0.1).step()
            each.zero_grad()
    assert_same_weights(model, twin)


@pytest.mark.ranks(2)
def test_fully_shard_divides_by_the_factor_it_is_told(ctx):
    gradients = []
    for factor in (None, 1.0):
        model = shard(ctx, hybrid(ctx))
        if factor is not None:
            for layer in (*model.layers, model):
                layer.set_gradient_divide_factor(factor)
        loss_of(model(batches(ctx, 1)[0])).backward()
        gradients.append([parameter.grad._local_tensor for parameter in model.parameters()])
    for mean, total in zip(*gradients, strict=True):
        assert torch.equal(mean * ctx.size, total)


@pytest.mark.ranks(2)
def test_fully_shard_prepares_no_calls_for_another_factor(ctx, monkeypatch):
    """As one that is set in every step to a number of tokens."""
    model, made = shard(ctx, hybrid(ctx)), []
    prepare = Context._prepare_call
    monkeypatch.setattr(Context, "_prepare_call", lambda *args: made.append(args[1]) or prepare(*args))
    for factor in (3.0, 3.0, 5.0, 7.0):
        if factor > 3:
            made.clear()
        for layer in (*model.layers, model):
            layer.set_gradient_divide_factor(factor)
        loss_of(model(batches(ctx, 1)[0])).backward()
        assert factor == 3 or not made


@pytest.mark.ranks(2)
def test_fully_shard_refuses_a_forward_that_writes_to_a_parameter_that_is_split_already(ctx):
    class Writing(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.add_(1)
            return super().forward(x)

    mesh = init_device_mesh(ctx.device.type, (1, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(Writing(8, 8)).to(ctx.device)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    with pytest.raises(TypeError, match="has written to 0.weight, .* nothing brings that to"):
        model(torch.ones(2, 8, device=ctx.device))


@pytest.mark.ranks(2)
def test_fully_shard_refuses_by_name(ctx):
    mesh, model = mesh_of(ctx), hybrid(ctx)
    before = copy.deepcopy(model.state_dict())
    scalar, tied = hybrid(ctx), hybrid(ctx)
    scalar.scale = nn.Parameter(torch.ones((), device=ctx.device))
    tied.layers[3].up.weight = tied.layers[0].up.weight
    fully_shard(tied.layers[0], mesh=mesh)
    wide, deferring, turned = hybrid(ctx).double(), DeferringModule(), nn.Linear(4, 4, dtype=torch.complex64)
    turned = turned.to(ctx.device)
    deferring.wgrad_store = []
    scaled, copied = (
        fully_shard(nn.Embedding(8, 4, max_norm=0.1).to(ctx.device), mesh=mesh, strategy=strategy)
        for strategy in ("parameters", "replicate")
    )
    sharded, x = shard(ctx, hybrid(ctx)), batches(ctx, 1)[0]
    odd = lambda **policy: fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))  # noqa: E731
    refused = [
        (lambda: fully_shard(3, mesh=mesh), TypeError, "module=3 must be an nn.Module"),
        (lambda: fully_shard(model, mesh=mesh, mp_policy="bf16"), TypeError, "mp_policy='bf16' must be torch's Mixed"),
        (lambda: FullyShard(model, Dense if ctx.rank else 3, mesh=mesh), TypeError, r"classes .* \(on rank 0\)"),
        (lambda: fully_shard(model.layers, mesh=mesh), ValueError, "a ModuleList has no forward"),
        (lambda: fully_shard([model, model], mesh=mesh), ValueError, "a Hybrid is twice in the list of modules"),
        (lambda: fully_shard([], mesh=mesh), ValueError, r"module=\[\] has nothing to shard"),
        (lambda: fully_shard(model, mesh=mesh, strategy=[]), TypeError, r"strategy=\[\] must be a name"),
        (lambda: fully_shard(nn.LazyLinear(4), mesh=mesh), ValueError, "weight is not initialized, .* once before"),
        (lambda: fully_shard(model, mesh=mesh, ignored_params=3), TypeError, "ignored_params=3 must be parameters"),
        (lambda: fully_shard(model, mesh=mesh, ignored_params={"0.weight"}), TypeError, "one of ignored_params='0.we"),
        (lambda: fully_shard(model, mesh=mesh, ignored_params=iter(())), ValueError, "ignored_params gave nothing"),
        (lambda: odd(output_dtype="x"), TypeError, "output_dtype of mp_policy='x' must be a torch.dtype"),
        (lambda: odd(output_dtype=torch.int32), TypeError, "mp_policy=torch.int32 must be a dtype of floating-point"),
        (lambda: odd(cast_forward_inputs="x"), TypeError, "cast_forward_inputs='x' must be True or False"),
        (lambda: fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy()), ValueError, "CPUOffloadPolicy is"),
        (lambda: fully_shard(model, mesh=mesh, reshard_after_forward="2"), TypeError, "False, an integer or None"),
        (lambda: fully_shard(model, mesh=mesh, reshard_after_forward=4), ValueError, "over 4 of the 2 ranks"),
        (lambda: fully_shard(model, mesh=mesh, dp_mesh_dims="dp"), ValueError, "example mesh"),
        (lambda: fully_shard(model, mesh=mesh, shard_placement_fn=Shard), ValueError, "along their first dimension"),
        (lambda: fully_shard(deferring, mesh=mesh), ValueError, "to backward_dw.* without delay_wgrad_compute"),
        (lambda: fully_shard(scalar, mesh=mesh), ValueError, r"scale of shape \(\) has no rows to split"),
        (lambda: fully_shard(tied, mesh=mesh), ValueError, r"up.weight is tied to up.*, as fully_shard\(\[a, b\]\)"),
        (lambda: fully_shard(wide, mesh=mesh), TypeError, "summed in float32, float16 or bfloat16, not torch.float64"),
        (lambda: fully_shard(turned, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)), TypeError,
         "weight is in torch.complex64, in which no gradients .*view_as_real gives"),
        (lambda: fully_shard(sharded, mesh=mesh), ValueError, "FSDPHybrid is sharded already"),
        (lambda: scaled(x.abs().long()), TypeError, "FSDPEmbedding has written to weight, .* nothing brings that to"),
        (lambda: copied(x.abs().long()), TypeError, "FSDPEmbedding has written to weight, .* nothing brings that to"),
        (lambda: copy.deepcopy(sharded), NotImplementedError, "a deepcopy of FSDPHybrid would share its engine"),
        (lambda: pickle.dumps(sharded), NotImplementedError, "FSDPHybrid belongs to its rank, and can't be pickled"),
        (lambda: torch.func.grad(lambda x: loss_of(sharded(x)))(x), NotImplementedError, "inside of a transform of"),
        (lambda: sharded.set_all_reduce_hook(print), NotImplementedError, "set_all_reduce_hook has no meaning over"),
    ]  # fmt: skip
    for call, kind, message in refused:
        with pytest.raises(kind, match=message):
            call()
    with pytest.raises((TypeError, ValueError), match=r"CPUOffloadPolicy is not supported.* \(on rank 1\)$") as error:
        fully_shard(model, mesh=mesh, **({"offload_policy": CPUOffloadPolicy()} if ctx.rank == 1 else {}))
    message_on_every_rank(ctx, error.value)
    differing = Hybrid((Dense, Dense) if ctx.rank else (Dense,)).to(ctx.device)
    with pytest.raises(MismatchError, match="models of rank 0 and rank 1 differ in layers.1.norm.weight") as error:
        fully_shard(differing, mesh=mesh)
    message_on_every_rank(ctx, error.value)
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    assert isinstance(sharded.layers[:2], nn.ModuleList) and isinstance(sharded, FSDPModule)


@pytest.mark.ranks(2)
def test_fully_shard_leaves_ignored_params_alone_and_warns_of_those_that_are_not_the_models(ctx):
    x, ignored = torch.ones(2, 4, device=ctx.device), lambda model: model[2].parameters()
    for give, others in (
        (ignored, 0),
        (lambda model: [*ignored(model)], 0),
        (lambda _: nn.Linear(4, 4).parameters(), 2),
    ):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).to(ctx.device)
        given = give(model)
        if others:  # one set for all calls is as in torch
            given = {*given, *model[2].parameters()}
            fully_shard(model[0], mesh=mesh_of(ctx), ignored_params=given)
        fully_shard(model, mesh=mesh_of(ctx), ignored_params=given)
        assert not isinstance(model[2].weight, DTensor) and isinstance(model[0].weight, DTensor)
        with warnings.catch_warnings(record=True) as warned:
            warnings.filterwarnings("always", "fully_shard")
            model(x)
        assert [str(each.message)[:34] for each in warned] == ["fully_shard: 2 of ignored_params, "] * bool(others)


@pytest.mark.ranks(2)
def test_fully_shard_face_reduces_by_require_backward_grad_sync_and_after_the_outer_no_sync(ctx, monkeypatch):
    face, reductions, reduce = full_shard(ctx, 0), [], ParamGroup.reduce
    monkeypatch.setattr(ParamGroup, "reduce", lambda *args: reductions.append(1) or reduce(*args))

    def reduced():
        before = len(reductions)
        loss_of(face(own(ctx, batches(ctx, 1)[0]))).backward()
        return len(reductions) > before

    assert face.require_backward_grad_sync and reduced()
    face.require_backward_grad_sync = False  # as of a loop that accumulates
    with face.no_sync():
        assert not reduced()
    assert not reduced() and not face.require_backward_grad_sync
    face.require_backward_grad_sync = True
    with face.no_sync():
        with face.no_sync():
            pass
        assert not reduced()
    assert reduced()
    face.module.set_requires_gradient_sync(False)
    with face.no_sync():
        pass
    assert not reduced()
    with pytest.raises(TypeError, match="FullyShard: require_backward_grad_sync='no' must be True or False"):
        face.require_backward_grad_sync = "no"


@pytest.mark.ranks(2)
def test_fully_shard_under_functional_call_computes_with_what_is_passed_or_refuses_it(ctx):
    """Without gradients; with them those of the tensors passed would be lost, and the model would keep the tensors."""
    model, x = shard(ctx, hybrid(ctx)), batches(ctx, 1)[0]
    before = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    passed = {name: 0.5 * parameter for name, parameter in model.named_parameters()}
    for _ in range(2):
        with pytest.raises(ValueError, match="is no parameter now but a tensor, as torch.func.functional_call passes"):
            torch.func.functional_call(model, passed, (x,))
        twin = hybrid(ctx)
        twin.load_state_dict({name: 0.5 * whole for name, whole in before.items()}, strict=False)
        with torch.no_grad():
            y = torch.func.functional_call(model, {name: each.detach() for name, each in passed.items()}, (x,))
            torch.testing.assert_close(y, twin(x))
        loss_of(model(x)).backward()
        assert all(torch.equal(before[name], each.full_tensor()) for name, each in model.named_parameters())
        assert all(isinstance(each, nn.Parameter) and each.grad is not None for each in model.parameters())


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("asked", "kept"), [(2, False), (1, True)])
def test_fully_shard_takes_the_integers_of_reshard_after_forward_that_mean_all_or_one(ctx, asked, kept):
    model = fully_shard(nn.Linear(3, 5).to(ctx.device), mesh=mesh_of(ctx), reshard_after_forward=asked)
    model(torch.ones(2, 3, device=ctx.device))
    assert isinstance(model.weight, DTensor) != kept


@pytest.mark.ranks(2)
def test_fully_shard_refuses_a_backward_that_would_read_other_parameters(ctx):
    model = shard(ctx, hybrid(ctx))
    loss = loss_of(model(batches(ctx, 1)[0]))
    pool = unit_of(model).engine.pool
    for bucket, slot in list(pool._assigned.items()):
        pool._assigned[bucket] = next(other for other in pool._copies[bucket] if other is not slot or bucket[0] == "r")
    with pytest.raises(LeaseError, match="unit layers.4 lies elsewhere now than in the forward"):
        loss.backward()
    ctx.group.barrier()
    loss_of(model(batches(ctx, 1)[0])).backward()


@pytest.mark.ranks(4)
def test_fully_shard_over_replicas_of_shards_trains_as_the_unsharded_model(ctx):
    model = hybrid(ctx, kinds=UNITS[:3])
    twin = in_fp64(copy.deepcopy(model))
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for steps in (no_sync, accumulated):
        steps(Run(model, batches(ctx, 2), functools.partial(own, ctx), True))
        steps(Run(twin, batches(ctx, 2), lambda x: x, False))
        model.set_requires_all_reduce(False)  # replicas have the sums all the same
    assert {parameter.placements for parameter in model.parameters()} == {(Replicate(), Shard(0))}
    assert_same_weights(model, twin)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("strategy", "gathers", "sums"),
    [("parameters", 26, 2 * 6), ("gradients", 2 * 6, 2 * 6), ("optimizer", 2 * 6, 6), ("replicate", 0, 6)],
)
def test_fully_shard_communicates_what_its_strategy_says(ctx, strategy, gathers, sums, monkeypatch):
    """In a step of two backwards and an evaluation between: of the root and 5 units, of which backward finds one.

    The evaluation gives back what it finds: averages of the weights may be swapped for them without torch's notice.
    """
    calls = []
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        original = getattr(tkernels, name)
        count = lambda *arguments, name=name, original=original, **options: (  # noqa: E731
            calls.append(name),
            original(*arguments, **options),
        )[1]
        monkeypatch.setattr(tkernels, name, count)
    model = shard(ctx, hybrid(ctx), strategy=strategy)
    x = own(ctx, batches(ctx, 1)[0])
    for _ in range(2):
        calls.clear()
        for last in (False, True):
            model.set_is_last_backward(last)
            loss_of(model(x)).backward()
            if not last:
                with torch.no_grad():
                    model(x)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=-0.1)
                parameter.grad = None
    assert calls.count("all_gather") == gathers and len(calls) - calls.count("all_gather") == sums


# Odd models


class KeepsItsLoss(nn.Module):
    """A block with an auxiliary loss, of its output or of what comes before."""

    def __init__(self, behind: bool):
        super().__init__()
        self.behind, self.up, self.down = behind, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        if not self.behind:
            self.loss = self.down(torch.tanh(x)).square().mean()
        y = x + self.down(torch.tanh(self.up(x)))
        if self.behind:
            self.loss = self.down(torch.tanh(y)).square().mean()
        return y


@pytest.mark.ranks(2)
def test_fully_shard_refuses_the_backward_of_a_loss_that_no_output_begins(ctx):
    """Its unit's memory is another unit's by then: in the first step the gradients would be wrong."""
    for behind in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(KeepsItsLoss(behind) for _ in range(4))).to(ctx.device)
        twin, x = copy.deepcopy(model), torch.ones(2, 4, device=ctx.device)
        for each in (*model, model):
            fully_shard(each, mesh=mesh_of(ctx))

        def loss(model, x=x):
            return model(x).square().mean() + sum(block.loss for block in model)

        for _ in range(2):
            if behind:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss(model).backward()
                model.zero_grad()
                continue
            loss(model).backward()
            twin.zero_grad()
            loss(twin).backward()
            for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
            model.zero_grad()


class Towers(nn.Module):
    """Units none of whose inputs wants a gradient."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 3) for _ in range(4))

    def forward(self, x):
        return sum(layer(x) for layer in self.layers)


class Beside(StateSpace):
    def forward(self, x):
        return super().forward(x.detach())


class Apart(Hybrid):
    """Units whose outputs don't depend on their inputs, as far as autograd knows."""

    def forward(self, x):
        x, beside = self.embed(x), 0.0
        for layer in self.layers:
            if isinstance(layer, Beside):
                beside = beside + layer(x)
            else:
                x = layer(x)
        return self.head(x + beside)


@dataclasses.dataclass(frozen=True)
class Wrapped:
    values: torch.Tensor
    name: str = "wrapped"


class Wrapping(Dense):
    def forward(self, x):
        return Wrapped(super().forward(x.values))


class Dataclasses(Hybrid):
    def forward(self, x):
        x = Wrapped(self.embed(x))
        for layer in self.layers:
            x = layer(x)
        return self.head(x.values)


class Packing(Dense):
    def forward(self, x):
        return x._replace(data=super().forward(x.data))


class Packed(Hybrid):
    def forward(self, x):
        x = nn.utils.rnn.pack_sequence([self.embed(x)])
        for layer in self.layers:
            x = layer(x)
        return self.head(x.data)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        (Towers, ()),
        (Apart, (3 * (Dense, Beside),)),
        (Dataclasses, (4 * (Wrapping,),)),
        (Packed, (2 * (Packing,),)),
    ],
)
def test_fully_shard_finds_where_each_unit_begins_and_ends(ctx, kind, layers):
    torch.manual_seed(0)
    model = kind(*layers).to(ctx.device)
    twin = in_fp64(copy.deepcopy(model))
    shard(ctx, model)
    plain(Run(model, batches(ctx, 3), functools.partial(own, ctx), True))
    plain(Run(twin, batches(ctx, 3), lambda x: x, False))
    assert_same_weights(model, twin)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(2))

    def forward(self, x, taken):
        return x + sum(torch.tanh(self.branches[i](x)) for i in taken)


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


@pytest.mark.ranks(2)
@pytest.mark.parametrize("embeds", [True, False])
def test_fully_shard_lets_ranks_use_different_parameters_of_a_unit_and_of_the_root(ctx, embeds):
    torch.manual_seed(0)
    model = Choosy(embeds).to(ctx.device)
    twin = in_fp64(copy.deepcopy(model))
    shard(ctx, model)
    for step, taken in enumerate([[(0, 1), (0, 1)], [(0, 1), (0,)], [(1,), (0,)], [(0,), (0, 1)]]):
        x = normal((ctx.size, 4, FEATURES), torch.float32, step, device=ctx.device)
        loss_of(model(x[ctx.rank], taken[ctx.rank])).backward()
        (sum(loss_of(twin(x[rank], taken[rank])) for rank in range(ctx.size)) / ctx.size).backward()
        for each in (model, twin):
            torch.optim.SGD(each.parameters(), 0.1).step()
            each.zero_grad()
    assert_same_weights(model, twin)


@pytest.mark.ranks(2)
def test_fully_shard_refuses_outputs_that_hide_tensors(ctx):
    class Hiding(Dense):
        def forward(self, x):
            return types.SimpleNamespace(values=super().forward(x))

    x = torch.ones(4, 4, device=ctx.device)
    hiding = shard(ctx, hybrid(ctx, kinds=(Hiding,)))
    with pytest.raises(TypeError, match="unit layers.0 returns SimpleNamespace, in which no tensor is found"):
        hiding(x)


@pytest.mark.ranks(2)
def test_fully_shard_lets_a_frozen_model_return_any_object_beside_its_tensors(ctx):
    """As a model of transformers returns its cache; a reference model is evaluated without no_grad, too."""

    class Caching(Hybrid):
        def forward(self, x):
            return super().forward(x), types.SimpleNamespace()

    torch.manual_seed(0)
    model, x = shard(ctx, Caching(UNITS).to(ctx.device)), batches(ctx, 1)[0]
    with torch.no_grad():
        want, _ = model(x)
    model.requires_grad_(False)
    y, _ = model(x)
    assert torch.equal(y, want) and not y.requires_grad

    class Hiding(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y.detach(), types.SimpleNamespace(y=y)

    hiding = nn.Sequential(Hiding(4, 4)).to(ctx.device).requires_grad_(False)
    fully_shard(hiding[0], mesh=mesh_of(ctx))
    fully_shard(hiding, mesh=mesh_of(ctx))
    x = torch.ones(2, 4, device=ctx.device)
    hiding(x)
    with pytest.raises(TypeError, match="unit 0 returns SimpleNamespace, in which no tensor is found"):
        hiding(x.requires_grad_())  # whose gradient would be computed of weights that have been given back


@pytest.mark.ranks(2)
def test_fully_shard_keeps_hooks_and_marks_of_parameters(ctx):
    model, seen = hybrid(ctx), []
    weight = model.layers[0].up.weight
    want, weight.sequence_parallel = weight.norm().item(), True
    weight.register_hook(lambda grad: seen.append(tuple(grad.shape)))
    model.layers[0].register_forward_pre_hook(lambda layer, _: seen.append(layer.up.weight.norm().item()))
    shard(ctx, model)
    assert model.layers[0].up.weight.sequence_parallel
    loss_of(model(own(ctx, batches(ctx, 1)[0]))).backward()
    assert seen == [want, (37, FEATURES)]
    taken = hybrid(ctx)
    taken.head.weight.register_post_accumulate_grad_hook(print)
    with pytest.raises(ValueError, match="head.weight has a hook of register_post_acc"):
        fully_shard(taken, mesh=mesh_of(ctx))
    handle = model.head.bias.register_hook(lambda grad: 0 * grad)
    with pytest.raises(ValueError, match="head.bias has a hook of register_hook, .* register it before fully_shard"):
        model(own(ctx, batches(ctx, 1)[0]))
    handle.remove()
    assert model(own(ctx, batches(ctx, 1)[0])).isfinite().all()


@pytest.mark.ranks(4)
def test_fully_shard_of_units_without_split_layers_has_the_mesh_of_their_model(ctx):
    """torch's norm takes gradients of one mesh alone."""
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    styles = {"1": tkernels.layers.ColwiseParallel(), "2": tkernels.layers.RowwiseParallel()}
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 8), nn.Linear(8, 7), nn.LayerNorm(7)).to(ctx.device)
    for seed, parameter in enumerate(model.parameters()):
        parameter.data.copy_(normal(parameter.shape, torch.float32, seed))
    whole = copy.deepcopy(model)
    tkernels.layers.parallelize_module(model, mesh["tp"], styles)
    for unit in ([model[0], model[3]], model):
        fully_shard(unit, mesh=mesh["dp"])
    assert {parameter.device_mesh.ndim for parameter in model.parameters()} == {2}
    x = normal((4, 6), torch.float32, 10, device=ctx.device)
    for each in (model, whole):
        (each(x).square().sum() / 100).backward()
    norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0) for each in (model, whole)]
    torch.testing.assert_close(norms[0].full_tensor(), norms[1])
    for parameter, want in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), want.grad)


@pytest.mark.ranks(4)
def test_fully_shard_of_a_model_from_meta_tells_whoever_forgets_to_sum_gradients(ctx):
    """The check comes to sharded parameters, of which autograd knows nothing."""
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": tkernels.layers.ColwiseParallel(), "down": tkernels.layers.RowwiseParallel()}
    layers = {"up": nn.Linear(4, 8), "norm": nn.LayerNorm(4), "down": nn.Linear(8, 4)}
    whole = list(nn.Sequential(collections.OrderedDict(layers)).named_parameters())

    def shard(plan):
        model = nn.Sequential(collections.OrderedDict(copy.deepcopy(layers))).to("meta")
        tkernels.layers.parallelize_module(model, mesh["tp"], plan)
        for unit in (model.norm, model):
            fully_shard(unit, mesh=mesh["dp"])
        model.to_empty(device=ctx.device)
        values = {name: normal(each.shape, torch.float32, seed) for seed, (name, each) in enumerate(whole)}
        set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True))
        return model

    x = normal((2, 4), torch.float32, 0, device=ctx.device)
    with pytest.raises(MismatchError, match="gradients of norm.weight, norm.bias differ between ranks"):
        shard(plan)(x).square().sum().backward()
    shard(plan | {"norm": tkernels.layers.Replicated(sum_gradients=True)})(x).square().sum().backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=["alone", "tensor-parallel"])
def test_fully_shard_of_several_strategies_lets_grad_scaler_skip_on_all_ranks(ctx, sizes):
    """What one rank has an infinite part of is not split over the dimension that the first gradient is split over."""
    mesh = init_device_mesh(ctx.device.type, sizes, mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4, bias=False)).to(ctx.device)
    replicated, other = (model[0], model[1]) if sizes[0] == 2 else (model[1], model[0])
    if replicated is model[1]:
        tkernels.layers.parallelize_module(model, mesh["tp"], {"1": tkernels.layers.ColwiseParallel()})
    fully_shard(replicated, mesh=mesh["dp"], strategy="replicate")
    fully_shard(other, mesh=mesh["dp"])
    optimizer, scaler = torch.optim.SGD(model.parameters(), 1.0), torch.amp.GradScaler(ctx.device.type, init_scale=4.0)
    scaler.scale(model[1](model[0](torch.ones(2, 4, device=ctx.device))).sum()).backward()
    model[1].weight.grad.to_local().fill_(float("inf") if ctx.rank else 1.0)
    kept = {name: full(parameter).clone() for name, parameter in model.named_parameters()}
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert all(torch.equal(full(parameter), kept[name]) for name, parameter in model.named_parameters())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["parameters", "replicate"])
def test_fully_shard_calls_hooks_with_the_mean_so_that_an_optimizer_steps_in_backward(ctx, strategy):
    """To the bits of one that steps after it; units are reduced in backward, the root at its end."""
    models = [hybrid(ctx) for _ in range(2)]
    for model in models:
        shard(ctx, model, strategy=strategy)
    optimizers = {each: torch.optim.SGD([each], lr=0.1, momentum=0.9) for each in models[0].parameters()}

    def step(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    after = torch.optim.SGD(models[1].parameters(), lr=0.1, momentum=0.9)
    for batch in batches(ctx, 3):
        losses = [loss_of(model(own(ctx, batch))) for model in models]
        for loss in losses:
            loss.backward()
        assert losses[0].item() == losses[1].item()
        assert all(parameter.grad is None for parameter in optimizers)
        after.step()
        after.zero_grad()
    for stepped, want in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(stepped.full_tensor(), want.full_tensor())


@pytest.mark.ranks(2)
def test_fully_shard_calls_hooks_once_in_a_backward_through_several_forwards_of_a_unit(ctx):
    """Of which the first one's inputs tell nobody of its end."""
    layer = nn.Linear(4, 4).to(ctx.device)
    layer.weight.data.copy_(integers((4, 4), torch.float32, 1))
    layer.bias.data.copy_(integers(4, torch.float32, 2))
    twin = copy.deepcopy(layer)
    model = nn.Sequential(layer, layer, nn.Identity())
    fully_shard(layer, mesh=mesh_of(ctx))
    fully_shard(model, mesh=mesh_of(ctx))
    seen = []

    def double(weight):
        seen.append(weight.grad.full_tensor())
        weight.mul_(2)

    handle = layer.weight.register_post_accumulate_grad_hook(double)
    for _ in range(2):  # the second with what the hook has left
        x = integers((3, 4), torch.float32, 3, device=ctx.device)
        model(x).sum().backward()
        twin(twin(x)).sum().backward()
        assert len(seen) == 1 and torch.equal(seen.pop(), twin.weight.grad)
        twin.weight.data.mul_(2)
        for each in (model, twin):
            each.zero_grad()
    handle.remove()
    layer.weight.register_post_accumulate_grad_hook(seen.append)
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert len(seen) == 2  # once in each


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["parameters", "optimizer"])
def test_fully_shard_keeps_what_units_have_accumulated_when_one_is_zeroed_or_frozen(ctx, strategy):
    layers = [nn.Linear(4, 4) for _ in range(3)]
    model, x = nn.Sequential(*layers).to(ctx.device), torch.ones(2, 4, device=ctx.device)
    for each in (*layers, model):
        fully_shard(each, mesh=mesh_of(ctx), strategy=strategy)
    for drops in ("unit", "frozen"):
        model.set_requires_gradient_sync(False)
        model(x).sum().backward()
        if drops == "unit":
            model[1].zero_grad()
        else:
            model[2].bias.requires_grad_(False)
        model.set_requires_gradient_sync(True)
        model(x).sum().backward()
        model[2].bias.requires_grad_(True)
        # 2 rows in each backward; the zeroed unit has the second one's alone.
        want = (4.0, 2.0) if drops == "unit" else (2.0, 4.0)
        assert full(model[2].bias.grad).eq(want[0]).all()
        once, twice = full(model[1].weight.grad).clone(), full(model[0].weight.grad).clone()
        model.zero_grad(set_to_none=False)
        model.zero_grad()
        model(x).sum().backward()
        assert torch.equal(once, full(model[1].weight.grad) * want[1] / 2)
        assert torch.equal(twice, full(model[0].weight.grad) * 2)
        assert full(model[2].bias.grad).eq(2.0).all()  # nothing was left for the next step
        model.zero_grad()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["parameters", "gradients", "optimizer", "replicate"])
def test_fully_shard_adds_up_backwards_in_reduce_dtype(ctx, strategy):
    """In bf16, 256 and 1 are 256. What somebody does to `.grad` between backwards counts, and zero_grad begins anew."""
    model = nn.Linear(4, 6, bias=False, dtype=torch.bfloat16, device=ctx.device)
    fully_shard(model, mesh=mesh_of(ctx), strategy=strategy, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    x = torch.ones(1, 4, dtype=torch.bfloat16, device=ctx.device)

    def backwards(number):
        for _ in range(number):
            model(x).sum().backward()
        return full(model.weight.grad)

    x.fill_(256)
    backwards(1)
    x.fill_(1)
    assert backwards(44).eq(300).all()  # by ones, each of which bf16 would lose
    assert backwards(1).eq(300).all()  # 301 rounds to 300, and is 301 for the next one
    assert backwards(1).eq(302).all()
    with torch.no_grad():
        model.weight.grad.mul_(2)
    assert backwards(5).eq(608).all()  # 604 + 5 is 609
    model.weight.grad.zero_()
    assert backwards(3).eq(3).all()
    model.zero_grad()
    assert backwards(2).eq(2).all()


@pytest.mark.ranks(2)
def test_fully_shard_reaches_means_that_fp16_holds_where_it_does_not_hold_the_sums(ctx):
    x = torch.full((1, 4), 200.0, dtype=torch.float16, device=ctx.device)
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(reduce_dtype=torch.float32)):
        layer = nn.Linear(4, 4, bias=False, dtype=torch.float16, device=ctx.device)
        fully_shard(layer, mesh=mesh_of(ctx), mp_policy=policy)
        (layer(x) * 200.0).sum().backward()
        assert (layer.weight.grad.full_tensor() == 40000).all()


# The face


def full_shard(ctx, seed, **options):
    return FullyShard(hybrid(ctx, seed), (Dense, StateSpace, Experts), mesh=ctx, **options)


@pytest.mark.ranks(2)
def test_fully_shard_face_is_fully_shard_of_all_modules_of_some_classes(ctx, tmp_path):
    path = ctx.group.gather(str(tmp_path))[0]
    face, model = full_shard(ctx, 0), shard(ctx, hybrid(ctx))
    for each in (face, model):
        optimizer = adam(each)
        for x in batches(ctx, 2):
            first, second = own(ctx, x).chunk(2)
            with face.no_sync():
                model.set_requires_gradient_sync(False)
                loss_of(each(first)).backward()
            model.set_requires_gradient_sync(True)
            loss_of(each(second)).backward()
            optimizer.step()
            each.zero_grad()
    whole = gather_state_dict(face)
    assert whole.keys() == model.state_dict().keys()
    assert all(torch.equal(full(value).cpu(), whole[key]) for key, value in model.state_dict().items())
    assert list(gather_state_dict(face, rank0_only=True)) == (list(whole) if ctx.rank == 0 else [])
    loaded, restored = full_shard(ctx, 1), full_shard(ctx, 2)
    load_full_state_dict(loaded, whole)
    dcp.save(sharded_state_dict(face), checkpoint_id=path)
    dcp.load(sharded_state_dict(restored), checkpoint_id=path)
    for again in (loaded, restored):
        assert all(map(torch.equal, gather_state_dict(again).values(), whole.values()))
    with pytest.raises(ValueError, match=r"head.weight is \(8, 3\), but the tensor is \(3, 8\)"):
        load_full_state_dict(loaded, whole | {"head.weight": whole["head.weight"].t()})
    for wrong, message in (
        ({"units": nn.Conv2d}, "no module is a unit: none is of the types Conv2d"),
        ({"units": "Dense"}, "units are classes of .*, not instances of str"),
        ({"units": Hybrid}, "the module itself is of a unit's type"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            FullyShard(hybrid(ctx), mesh=ctx, **wrong)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(StateSpace()) for _ in range(3))
        self.norm = nn.LayerNorm(FEATURES)


def shared(ctx):
    """Most parameters are at two places in modules that are no units, so they are the root's in any case."""
    model = hybrid(ctx, kinds=(Dense, StateSpace))
    model.layers[1].into.weight = model.embed.again = nn.Parameter(torch.zeros(32, 100 * FEATURES, device=ctx.device))
    return model


def stacked(ctx):
    model = hybrid(ctx, kinds=(Dense,))
    model.stack = Stack().to(ctx.device)
    return model


MIXED = StateSpace, Dense, StateSpace, StateSpace, StateSpace  # StateSpace has about two thirds


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "make, said",
    [
        (functools.partial(hybrid, kinds=MIXED), "StateSpace hold 68 %"),
        (stacked, "StateSpace hold 61 %"),  # rather than Sequential, or Stack, of which there is one
        (functools.partial(hybrid, kinds=(StateSpace, Dense)), None),  # about a third
        (shared, None),
    ],
    ids=["most", "stacked", "few", "shared"],
)
def test_fully_shard_face_names_a_class_that_is_no_unit(ctx, make, said):
    with warnings.catch_warnings(record=True) as warned:
        warnings.filterwarnings("always", "FullyShard")
        FullyShard(make(ctx), Dense, mesh=ctx)
    warned = [each for each in warned if "FullyShard" in str(each.message)]
    assert len(warned) == (said is not None)
    for each in warned:
        assert f"modules of class {said} of the parameters and are no units" in str(each.message)
        assert str(each.message).endswith("; add StateSpace to units=") and each.filename == __file__


@pytest.mark.ranks(2)
def test_fully_shard_face_is_silent_where_blocks_are_units_and_logs_its_pool(ctx):
    by_hand = hybrid(ctx, kinds=MIXED)
    for layer in by_hand.layers[2:]:
        fully_shard(layer, mesh=ctx)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "FullyShard")
        face = full_shard(ctx, 0)
        FullyShard(hybrid(ctx, kinds=MIXED), Dense, mesh=ctx, strategy="optimizer")  # gathers units for as long
        FullyShard(by_hand, Dense, mesh=ctx)  # one StateSpace is left
    with mock.patch.object(engine._log, "info") as logged:
        for x in batches(ctx, 2):
            loss_of(face(own(ctx, x))).backward()
    said = [message % tuple(values) for (message, *values), _ in logged.call_args_list]
    assert said == ([f"the memory of gathered parameters\n{unit_of(face.module).engine.pool}"] if ctx.rank == 0 else [])
    assert all("layers.0" in text and "2 copies of" in text for text in said)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "units,first_name",
    [(ParallelMLP, "fc1"), ((ColumnParallelLinear, RowParallelLinear), "weight")],
    ids=["inside", "units"],
)
def test_gather_state_dict_of_parallel_layers_in_units(ctx, tmp_path, units, first_name):
    path = ctx.group.gather(str(tmp_path))[0]

    def mlp(seed, over):
        torch.manual_seed(seed)
        return nn.Sequential(ParallelMLP(6, 8, "swiglu", mesh=over), nn.Linear(6, 2)).to(ctx.device)

    with tkernels.init([dist.new_group([rank]) for rank in range(2)][ctx.rank], heap_bytes=8 << 20) as alone:
        want = mlp(1, alone).state_dict()
        first, second, third = (FullyShard(mlp(seed, ctx), units, mesh=alone) for seed in (1, 2, 3))
        load_full_state_dict(second, want)
        dcp.save(sharded_state_dict(first), checkpoint_id=path)
        dcp.load(sharded_state_dict(third), checkpoint_id=path)
        for each in (first, second, third):
            got = gather_state_dict(each)
            assert got.keys() == want.keys() and all(torch.equal(got[key], want[key].cpu()) for key in want)
    twice = mlp(1, ctx)
    with pytest.raises(ValueError, match=r"fully_shard: .*weight is split over ranks \[0, 1\], .* replicas of it"):
        FullyShard(twice, units, mesh=ctx)
    for parameter in twice.parameters():  # as of Megatron's layers
        vars(parameter).pop(RANKS, None)
    said = f"parts of tensors .tensor_model_parallel. of rank 0 .* in {first_name}"
    with pytest.raises(MismatchError, match=said):
        FullyShard(twice, units, mesh=ctx)


@pytest.mark.ranks(4)
def test_sharded_state_dict_refuses_parts_of_parts(ctx):
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = fully_shard(ParallelMLP(6, 8, mesh=mesh["tp"]).to(ctx.device), mesh=mesh["dp"])
    with pytest.raises(ValueError, match="fc1.weight is split by .*ColumnParallelLinear, and each part again by fully"):
        sharded_state_dict(model)


# On GPUs


@gpu_only
@pytest.mark.ranks(2, 4, timeout_s=900)
@pytest.mark.parametrize("side", ["comm", "compute"])
def test_fully_shard_with_a_late_stream_gives_the_same_bits(ctx, side, monkeypatch):
    plain_model, model = shard(ctx, hybrid(ctx), overlap=False), shard(ctx, hybrid(ctx))
    if side == "compute":
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda *_: torch.cuda._sleep(LATE))
    else:
        for name in ("gather", "reduce"):
            original = getattr(ParamGroup, name)

            def late(group, *tensors, original=original):
                torch.cuda._sleep(LATE)
                return original(group, *tensors)

            monkeypatch.setattr(ParamGroup, name, late)
    for each in (plain_model, model):
        train_steps(each, adam(each), batches(ctx, 50), functools.partial(own, ctx), clip=None)
    for first, second in zip(plain_model.parameters(), model.parameters(), strict=True):
        assert torch.equal(first._local_tensor, second._local_tensor)
    ctx.check()
    ctx.group.barrier()


@gpu_only
@pytest.mark.ranks(2, 4)
def test_fully_shard_in_a_graph_gives_the_eager_bits(ctx):
    eager, graphed = shard(ctx, hybrid(ctx)), shard(ctx, hybrid(ctx))
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (eager, graphed)]
    data = batches(ctx, 8)
    part = functools.partial(own, ctx)
    train_steps(eager, optimizers[0], data, part, clip=None)
    train_steps(graphed, optimizers[1], data[:3], part, clip=None)
    batch, graph, its_engine = data[3].clone(), torch.cuda.CUDAGraph(), unit_of(graphed).engine
    with captured(torch.cuda.graph(graph), slots=its_engine.slots, streams=[its_engine.comm_stream]) as replay:
        train_steps(graphed, optimizers[1], [batch], part, clip=None)
    for step in (3, 4, 5):
        batch.copy_(data[step])
        replay()
    train_steps(graphed, optimizers[1], data[6:], part, clip=None)  # eager steps find everything where it was
    for first, second in zip(eager.parameters(), graphed.parameters(), strict=True):
        assert torch.equal(first._local_tensor, second._local_tensor)
    ctx.check()
    torch.cuda.synchronize()
    ctx.group.barrier()


@pytest.mark.ranks(2)
def test_fully_shard_of_model_after_model_takes_one_workspace(ctx):
    """And OverlappedDDP beside it: contexts keep what each stream's calls have needed."""
    streams, held = [], []
    for _ in range(3):
        model = shard(ctx, hybrid(ctx))
        train_steps(model, adam(model), batches(ctx, 1), functools.partial(own, ctx), clip=None)
        ddp = OverlappedDDP(hybrid(ctx), mesh=ctx)
        ddp(batches(ctx, 1)[0]).square().sum().backward()
        streams += [unit_of(model).engine.comm_stream, ddp.comm_stream]
        held.append((len(ctx._workspaces), ctx.heap.held_bytes))
        ddp.remove()
    assert all(stream is streams[0] for stream in streams)
    assert held[1:] == held[:-1]


@pytest.mark.ranks(2)
def test_fully_shard_tells_an_optimizer_that_was_made_before_it(ctx):
    model = nn.Linear(4, 4).to(ctx.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model, mesh=mesh_of(ctx))
    model(torch.ones(4, device=ctx.device)).sum().backward()
    with pytest.raises(ValueError, match="SGD.step: 2 of its 2 parameters .* as fully_shard has put others in their"):
        optimizer.step()

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(ctx.device)
    kept = model[0].weight = model[1].weight  # where a part is sharded without the other
    fully_shard(model[1], mesh=mesh_of(ctx))
    # foreach, the default on GPUs, takes no tensors beside DTensors
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), kept.detach().clone()
    model(torch.ones(4, device=ctx.device)).sum().backward()
    optimizer.step()
    assert not torch.equal(kept, before)
    for other in (copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))):  # parameters of their own
        torch.optim.SGD([other], lr=0.1).step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("named", [False, True])
def test_fully_shard_refuses_a_mesh_that_is_not_of_one_with_that_of_the_split_layers(ctx, named):
    """Before anything has changed: of a mesh without names, or of the same dimension."""
    mesh = init_device_mesh(ctx.device.type, (1, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(ctx.device)
    tkernels.layers.parallelize(model, {"0": "colwise", "1": "rowwise"}, mesh["tp"] if named else ctx)
    weight = model[0].weight
    with pytest.raises(ValueError, match="fully_shard: 0.weight is split over .* can't be put beside .* make one mesh"):
        fully_shard(model, mesh=mesh["tp" if named else "dp"])
    assert model[0].weight is weight and not isinstance(model, FSDPModule)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("when", ["before the first forward", "after it"])
def test_fully_shard_tells_an_optimizer_of_what_was_added_after_it(ctx, when):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).to(ctx.device)
    alone, x = model[0].bias, torch.full((4,), ctx.rank + 1.0, device=ctx.device)
    for module in (model[0], model):
        fully_shard(module, mesh=mesh_of(ctx), ignored_params={alone})
    if when == "after it":
        model(x).sum().backward()
        model.zero_grad()
    model[1] = nn.Linear(4, 4).to(ctx.device)
    model[2] = nn.Sequential(model[2], nn.Linear(4, 4).to(ctx.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    model(x).sum().backward()
    with pytest.raises(ValueError, match="an optimizer has 1.weight, which was added after .* by its own"):
        optimizer.step()

    for module in (model[1], model[2][1]):  # the way out
        fully_shard(module, mesh=mesh_of(ctx))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    model(x).sum().backward()
    optimizer.step()
    for module in (model[1], model[2][1]):
        whole = [parameter.full_tensor() for parameter in module.parameters()]
        assert all(torch.equal(*ctx.group.gather(each.cpu())) for each in whole)
    model[1] = nn.Linear(4, 4).to(ctx.device)
    optimizer.param_groups[0]["params"] = list(model.parameters())  # as many as before
    with pytest.raises(ValueError, match="an optimizer has 1.weight"):
        optimizer.step()
    other = nn.Linear(4, 4)
    other(torch.ones(4)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()  # of another model


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fully_shard_tells_an_optimizer_of_what_a_forward_has_gathered(ctx, strategy):
    model = nn.Linear(4, 4).to(ctx.device)
    fully_shard(model, mesh=mesh_of(ctx), strategy=strategy)
    x = torch.ones(4, device=ctx.device)
    model(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    with pytest.raises(ValueError, match=r"SGD.step: 2 of its 2 .* fully_shard has gathered .*reset_iter_state"):
        optimizer.step()

    model(x)
    model.reset_iter_state()  # the way out
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.full_tensor().clone()
    model(x).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight.full_tensor(), before - 0.1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Stacked(nn.Module):
    """Three blocks: what is compiled for the first must do for the others."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.ranks(2, timeout_s=120)
@pytest.mark.parametrize("strategy,compiled", [("parameters", "units"), ("optimizer", "wrapper"), ("replicate", "top")])
def test_fully_shard_is_compiled_without_warnings_or_recompiled_frames(ctx, strategy, compiled):
    def trained(compiled):
        torch._dynamo.reset()
        torch.manual_seed(0)
        sharded = FullyShard(Stacked().to(ctx.device), Block, mesh=ctx, strategy=strategy)
        model, graphs = sharded.module, []

        def backend(graph, _):
            graphs.append(graph)
            return graph.forward

        call = torch.compile(sharded, backend=backend) if compiled == "wrapper" else sharded
        for module in {"units": model.blocks, "top": [model]}.get(compiled, ()):
            module.compile(backend=backend)
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        with warnings.catch_warnings(), torch._dynamo.config.patch(error_on_recompile=True):
            warnings.simplefilter("error", UserWarning)
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # dynamo's
            for step in range(3):
                optimizer.zero_grad()
                x = normal((4, 8), torch.float32, 10 * step + ctx.rank).to(ctx.device).requires_grad_()
                call(x).square().mean().backward()
                optimizer.step()
        return [each.full_tensor() for each in sharded.parameters()], len(graphs)

    want, none = trained(None)
    got, graphs = trained(compiled)
    assert none == 0 and graphs == 1 and all(map(torch.equal, got, want)), graphs  # that of a block
    torch._dynamo.reset()
