"""Pipelines with other systems: data-parallel modules in a stage, and our layers under torch.distributed.pipelining.

The twin of a stage is the model that is not split, in the same data-parallel module and with the same microbatches. On
a CPU its losses and gradients are the same bits.
"""

import contextlib
import copy
import itertools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_pipeline import Ranks, Recorder, batches, build, loss_of, stages_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from transports import own_gpus

import tkernels
from tkernels.demo.model import Block, ModelConfig
from tkernels.layers import (
    FullyShard,
    OverlappedDDP,
    P2PCommunicator,
    forward_backward_pipelining,
    fully_shard,
    gather_state_dict,
    parallelize,
)
from tkernels.testing.compare import assert_close_to

CONFIG = ModelConfig(vocabulary=11, sequence=4, batch=2, heads=2, head_features=4, layers=4)
SHAPE = (CONFIG.sequence, CONFIG.batch, CONFIG.features)


class Whole(nn.Module):
    """The model that is not split, of tokens alone as its first stage is."""

    def __init__(self):
        super().__init__()
        self.model = build(CONFIG)

    def forward(self, tokens):
        return self.model(tokens, torch.arange(len(tokens), device=tokens.device))


@contextlib.contextmanager
def grid_of(ctx, second):
    """Collective. Contexts of a mesh of 2 x 2 ranks, whose first dimension is the pipeline."""
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("pp", second))
    with contextlib.ExitStack() as stack:
        contexts = [tkernels.init(mesh.get_group(name), heap_bytes=64 << 20, default=False) for name in ("pp", second)]
        yield mesh, *[stack.enter_context(each) for each in contexts]


def by_blocks(shard):
    def wrap(module, mesh, dp):
        for block in [each for each in module.modules() if isinstance(each, Block)]:
            shard(block, mesh=mesh["dp"])
        return shard(module, mesh=mesh["dp"])

    return wrap


WRAPPERS = {
    "OverlappedDDP": lambda module, mesh, dp: OverlappedDDP(module, mesh=dp),
    "OverlappedDDP with shards": lambda module, mesh, dp: OverlappedDDP(
        module, mesh=dp, use_distributed_optimizer=True
    ),
    "FullyShard": lambda module, mesh, dp: FullyShard(module, units=(Block,), mesh=dp),
    "torch's DDP": lambda module, mesh, dp: DistributedDataParallel(module, process_group=mesh.get_group("dp")),
    "fully_shard": by_blocks(fully_shard),
    "torch's fully_shard": by_blocks(torch_fully_shard),
}


def gradients(modules):
    """The gradients by their names in the model: what an optimizer adds to weights that are zero."""
    parameters = list(itertools.chain(*(getattr(each, "owned_parameters", each.parameters)() for each in modules)))
    with torch.no_grad():
        for parameter in parameters:
            parameter.zero_()
    torch.optim.SGD(parameters, lr=1.0, maximize=True).step()
    found = {}
    for module in modules:
        if isinstance(module, OverlappedDDP) and module.sharded:
            module.start_param_sync()
        state = gather_state_dict(module) if isinstance(module, FullyShard) else module.state_dict()
        for name, value in state.items():
            value = value.full_tensor() if isinstance(value, DTensor) else value
            found[name.replace("module.", "").removeprefix("model.")] = value.cpu()
    return found


def train_whole(module, data):
    """Losses of the model that is not split; its gradients are reduced with the last microbatch."""
    losses = []
    for number, (tokens, targets) in enumerate(data):
        last = number == len(data) - 1
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last)
        with contextlib.nullcontext() if last or isinstance(module, FSDPModule) else module.no_sync():
            losses.append(loss_of(module(tokens), targets))
            (losses[-1] / len(data)).backward()
    return [loss.detach() for loss in losses]


@pytest.mark.ranks(4, timeout_s=300)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[own_gpus] * ("torch" in name)) for name in WRAPPERS])
@pytest.mark.parametrize("num_chunks", [1, 2], ids=["1F1B", "interleaved"])
def test_forward_backward_pipelining_reduces_once_to_the_gradients_of_the_model_that_is_not_split(
    ctx, name, num_chunks
):
    wrap = WRAPPERS[name]
    with grid_of(ctx, "dp") as (mesh, pp, dp), sdpa_kernel(SDPBackend.MATH):
        data = batches(CONFIG, 4, dp.rank, ctx.device)
        whole = wrap(Whole().to(ctx.device), mesh, dp)
        losses = train_whole(whole, data)
        want = gradients([whole])
        comm = P2PCommunicator(pp, slot_bytes=4096)
        chunks = stages_of(build(CONFIG).to(ctx.device), pp.rank, 2, num_chunks)
        chunks = [wrap(chunk, mesh, dp) for chunk in chunks]
        options = {"tensor_shape": SHAPE, "overlap": True, "deallocate": True}
        got = forward_backward_pipelining(chunks, data, loss_of, comm, **options)
        found = gradients(chunks)
        assert len(got) == 4 * pp.rank and found and found.keys() <= want.keys()
        for key, gradient in found.items():
            compare(ctx, gradient, want[key])
        for mine, theirs in zip(got, losses, strict=False):
            compare(ctx, mine, theirs)
        comm.close()


def compare(ctx, got, want):
    if ctx.device.type == "cpu":
        assert torch.equal(got, want)
    else:
        assert_close_to(got, want.double(), terms=CONFIG.features * CONFIG.layers)


# Checkpoints


@pytest.mark.ranks(2)
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_split_into_stages_saves_for_and_loads_from_the_model_that_is_not_split(ctx, num_chunks, tmp_path):
    """By torch.distributed.checkpoint, into stages of a model that was on the meta device."""
    folder = ctx.group.gather(str(tmp_path))[0]
    with torch.device("meta"):
        model = build(CONFIG)
    chunks = stages_of(model, ctx.rank, 2, num_chunks).to_empty(device=ctx.device)
    assert any(parameter.is_meta for parameter in model.parameters())  # other ranks' parts take no memory
    whole = build(CONFIG).to(ctx.device)
    dcp.save({"model": whole.state_dict()}, checkpoint_id=f"{folder}/whole")
    state = {name: value for chunk in chunks for name, value in chunk.state_dict().items()}
    dcp.load({"model": state}, checkpoint_id=f"{folder}/whole")
    assert state and all(torch.equal(value, whole.state_dict()[name]) for name, value in state.items())
    for value in state.values():
        value.add_(1)
    dcp.save({"model": state}, checkpoint_id=f"{folder}/stages")
    again = build(CONFIG).to(ctx.device).state_dict()
    dcp.load({"model": again}, checkpoint_id=f"{folder}/stages")
    assert all(torch.equal(value, whole.state_dict()[name] + 1) for name, value in again.items())


# When gradients are reduced


class Watched(nn.Module):
    """Stands for a data-parallel module: writes down each backward, and whether it would be reduced."""

    def __init__(self, seen, number):
        super().__init__()
        self.weight, self.reduces = nn.Parameter(torch.ones(1)), True
        self.weight.register_hook(lambda grad: seen.append((number, self.reduces)))

    def forward(self, x):
        return x * self.weight


class WithNoSync(Watched):
    @contextlib.contextmanager
    def no_sync(self):
        self.reduces = False
        yield
        self.reduces = True


class WithSetter(Watched):
    def set_requires_gradient_sync(self, requires_gradient_sync):
        self.reduces = requires_gradient_sync


@pytest.mark.parametrize("kind", [WithNoSync, WithSetter])
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_forward_backward_pipelining_reduces_with_the_last_microbatch_of_each_chunk(kind, num_chunks):
    for rank in range(2):
        seen = []
        chunks = [nn.Sequential(kind(seen, number)) for number in range(num_chunks)]  # not the chunk itself
        comm = P2PCommunicator(Ranks(rank, 2), backend=Recorder())
        data = [(torch.ones(1), None)] * 4
        forward_backward_pipelining(chunks, data, lambda y, _: y.sum(), comm, tensor_shape=(1,))
        for number in range(num_chunks):
            assert [reduces for chunk, reduces in seen if chunk == number] == [False] * 3 + [True]
        seen.clear()
        options = {"tensor_shape": (1,), "no_sync_func": contextlib.nullcontext}
        forward_backward_pipelining(chunks, data, lambda y, _: y.sum(), comm, **options)
        assert all(reduces for _, reduces in seen) and len(seen) == 4 * num_chunks


@pytest.mark.parametrize("several", [False, True], ids=["a function", "one for each chunk"])
def test_forward_backward_pipelining_takes_megatrons_functions(several):
    """no_sync_func around all but the last backward of a chunk; around that too, if grad_sync_func comes after it."""
    seen, inside = [], [False]

    @contextlib.contextmanager
    def no_sync():
        inside[0] = True
        yield
        inside[0] = False

    chunks = [Watched([], 0), Watched([], 1)]
    for number, chunk in enumerate(chunks):
        chunk.weight.register_hook(lambda grad, number=number: seen.append((number, inside[0])))
    synced = lambda parameters: seen.append(("synced", inside[0], *parameters))  # noqa: E731
    comm, data = P2PCommunicator(Ranks(1, 2), backend=Recorder()), [(torch.ones(1), None)] * 2
    options = {"tensor_shape": (1,), "no_sync_func": [no_sync] * 2 if several else no_sync}
    forward_backward_pipelining(chunks, data, lambda y, _: y.sum(), comm, **options)
    assert seen == [(1, True), (1, False), (0, True), (0, False)]
    seen.clear()
    options["grad_sync_func"] = [synced] * 2 if several else synced
    forward_backward_pipelining(chunks, data, lambda y, _: y.sum(), comm, **options)
    last = [("synced", False, chunk.weight) for chunk in chunks]
    assert seen == [(1, True), (1, True), last[1], (0, True), (0, True), last[0]]


# torch.distributed.pipelining over our layers


class TwoLinears(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


SCHEDULES = {"GPipe": (ScheduleGPipe, 1), "1F1B": (Schedule1F1B, 1), "interleaved": (ScheduleInterleaved1F1B, 2)}


@pytest.mark.ranks(4, timeout_s=300)
@pytest.mark.parametrize("name", [pytest.param(name, marks=own_gpus) for name in SCHEDULES])
def test_parallelize_trains_under_torchs_pipelines(ctx, name):
    make, num_chunks = SCHEDULES[name]
    torch.manual_seed(0)
    blocks, x, target = [TwoLinears() for _ in range(4)], torch.randn(8, 16), torch.randn(8, 16)
    whole = nn.Sequential(*copy.deepcopy(blocks)).double()
    want = F.mse_loss(whole(x.double()), target.double())
    want.backward()
    with grid_of(ctx, "tp") as (mesh, pp, tp):
        stages, mine = [], list(range(pp.rank, 2 * num_chunks, 2))
        for number in mine:
            size = 2 // num_chunks
            chunk = nn.Sequential(*blocks[number * size : (number + 1) * size]).to(ctx.device)
            parallelize(chunk, {"*.up": "column", "*.down": "row"}, tp)
            stages.append(PipelineStage(chunk, number, 2 * num_chunks, ctx.device, group=mesh.get_group("pp")))
        schedule = make(stages if num_chunks > 1 else stages[0], 4, loss_fn=F.mse_loss)
        losses = []
        schedule.step(
            *[x.to(ctx.device)] * (mine[0] == 0),
            **({"target": target.to(ctx.device), "losses": losses} if pp.rank == 1 else {}),
        )
        if pp.rank == 1:
            assert_close_to(torch.stack(losses).mean().cpu(), want.detach(), terms=64)
        for number, stage in zip(mine, stages, strict=True):
            for part, block in enumerate(stage.submod):
                expected = whole[number * size + part]
                rows = slice(16 * tp.rank, 16 * (tp.rank + 1))
                for found, true in (
                    (block.up.weight, expected.up.weight.grad[rows]),
                    (block.up.bias, expected.up.bias.grad[rows]),
                    (block.down.weight, expected.down.weight.grad[:, rows]),
                    (block.down.bias, expected.down.bias.grad),
                ):
                    assert_close_to(found.grad.cpu(), true, terms=256)


@pytest.mark.ranks(4, timeout_s=300)
@pytest.mark.parametrize("strategy", [pytest.param(each, marks=own_gpus) for each in ("parameters", "optimizer")])
@pytest.mark.parametrize("name", SCHEDULES)
def test_fully_shard_trains_under_torchs_pipelines(ctx, name, strategy):
    """Twice, since the first step shows that units keep their memory between micro-batches, and the second has it."""
    make, num_chunks = SCHEDULES[name]
    torch.manual_seed(0)
    blocks, x, target = [TwoLinears() for _ in range(4)], torch.randn(2, 8, 16), torch.randn(2, 8, 16)
    whole = nn.Sequential(*copy.deepcopy(blocks)).double()
    for each in range(2):  # of the batch of each of the data-parallel ranks
        (F.mse_loss(whole(x[each].double()), target[each].double()) / 2).backward()
    with grid_of(ctx, "dp") as (mesh, pp, dp):
        stages, mine, size = [], list(range(pp.rank, 2 * num_chunks, 2)), 2 // num_chunks
        for number in mine:
            chunk = nn.Sequential(*blocks[number * size : (number + 1) * size]).to(ctx.device)
            for part in (*chunk, chunk):
                fully_shard(part, mesh=mesh["dp"], strategy=strategy)
            stages.append(PipelineStage(chunk, number, 2 * num_chunks, ctx.device, group=mesh.get_group("pp")))
        schedule = make(stages if num_chunks > 1 else stages[0], 4, loss_fn=F.mse_loss)
        for _ in range(2):
            for stage in stages:
                stage.submod.zero_grad()
            schedule.step(
                *[x[dp.rank].to(ctx.device)] * (mine[0] == 0),
                **({"target": target[dp.rank].to(ctx.device), "losses": []} if pp.rank == 1 else {}),
            )
            for number, stage in zip(mine, stages, strict=True):
                for part, block in enumerate(stage.submod):
                    for found, true in zip(block.parameters(), whole[number * size + part].parameters(), strict=True):
                        assert_close_to(found.grad.full_tensor().cpu(), true.grad, terms=256)


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="two stages of one rank begin by messages to itself there")
@pytest.mark.ranks(2)
def test_fully_shard_refuses_pipelines_that_take_gradients_of_parameters_later(ctx):
    """Those would be lost: what the parameters of a stage are then, its units have gathered for another graph."""
    torch.manual_seed(0)
    mesh = init_device_mesh(ctx.device.type, (1, 2), mesh_dim_names=("pp", "dp"))
    chunks = [nn.Sequential(TwoLinears()).to(ctx.device) for _ in range(2)]
    for chunk in chunks:
        for part in (*chunk, chunk):
            fully_shard(part, mesh=mesh["dp"])
    stages = [PipelineStage(each, i, 2, ctx.device, group=mesh.get_group("pp")) for i, each in enumerate(chunks)]
    x = torch.randn(4, 16, device=ctx.device)
    with pytest.raises(NotImplementedError, match="two backwards .zero bubble., .* take ScheduleGPipe, Schedule1F1B"):
        ScheduleInterleavedZeroBubble(stages, 2, loss_fn=F.mse_loss).step(x, target=x)
    for sync, kept in ((False, True), (True, False)):  # a graph that is kept in eager is no schedule's
        for chunk in chunks:
            chunk.set_requires_gradient_sync(sync)
            chunk(x).sum().backward(retain_graph=kept)
    for chunk in chunks:
        chunk.zero_grad()
    ScheduleLoopedBFS(stages, 2, loss_fn=F.mse_loss).step(x, target=x)
    assert all(parameter.grad.full_tensor().any() for chunk in chunks for parameter in chunk.parameters())
