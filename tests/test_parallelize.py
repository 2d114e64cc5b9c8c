"""parallelize: an existing model trains the same on several ranks, and a plan that doesn't fit is refused by name."""

import collections
import copy
import functools
import math
import pickle
import re
import types
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tensor_parallel import assert_accurate
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tkernels
from tkernels import layers
from tkernels.comm import MismatchError
from tkernels.comm.group import Group
from tkernels.layers import (
    ColumnParallelLinear,
    FullyShard,
    OverlappedDDP,
    RowParallelLinear,
    ZeroOptimizer,
    parallelize,
)
from tkernels.layers.tensor_parallel.heads import check_heads
from tkernels.layers.tensor_parallel.linear import ParallelLinear
from tkernels.rounding import tolerance
from tkernels.testing.compare import assert_close_to, integers, normal

SEQUENCE, BATCH, HIDDEN, HEADS = 8, 2, 16, 4
STEPS, LEARNING_RATE = 3, 0.1


class Block(nn.Module):
    """A transformer block, [s, b, HIDDEN] -> the same, that takes the number of its heads from its tensors."""

    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        y = self.norm_1(x)
        q, k, v = (
            t.view(SEQUENCE, BATCH, -1, HIDDEN // HEADS).permute(1, 2, 0, 3) for t in (self.q(y), self.k(y), self.v(y))
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.permute(2, 0, 1, 3).reshape(SEQUENCE, BATCH, -1))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


def plan(**options):
    column, row = {"style": "column", **options}, {"style": "row", **options}
    return {"[qkv]": column, "out": row, "up": column, "down": row}


def train(model, x, target, ctx=None, sequence_parallel=False):
    """The losses of STEPS steps; with a context and sequence_parallel, x and target are this rank's positions."""
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (model(x) - target).square().sum() / (SEQUENCE * BATCH * HIDDEN)
        loss.backward()
        if sequence_parallel:
            layers.all_reduce_sequence_parallel_grads(model, mesh=ctx)
            loss = tkernels.all_reduce(loss.detach().reshape(1), ctx=ctx)
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


def forward_error() -> float:
    """By how much an element of the block's output may be off: an error of one sum reaches the output about as large
    as it is, so those of all sums add up. A sum of n terms is of order 1, its terms of order n**-0.5."""
    sums = [HIDDEN] * 6 + [SEQUENCE] + [4 * HIDDEN]  # q, k, v, scores, out, up; attention; down
    return sum(tolerance(torch.float32, n, scale=n**-0.5)[0] for n in sums)


def assert_same_losses(got, want):
    """The loss is the mean square of elements e, so it errs by at most twice the root of the loss times the error of e.
    Gradients err by as much in proportion, and a step carries LEARNING_RATE of that into the next forward."""
    atol = 2 * want.max().sqrt() * forward_error() * (1 + STEPS * LEARNING_RATE)
    assert (got - want).abs().max() < atol, (got - want, atol)
    assert (want[1:] - want[:-1]).abs().min() > 100 * atol  # a step that changes nothing, or the wrong thing, shows


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sequence"])
def test_parallelize_trains_a_transformer_block_as_the_unsharded_one(ctx, sequence_parallel):
    torch.manual_seed(3)
    model = Block()
    reference = copy.deepcopy(model).double()
    before = copy.deepcopy(model.state_dict())
    x, target = (normal((SEQUENCE, BATCH, HIDDEN), torch.float32, seed) for seed in (1, 2))
    want = train(reference, x.double(), target.double())

    assert parallelize(model, plan(sequence_parallel=sequence_parallel), ctx) is model
    for key, value in layers.gather_state_dict(model).items():
        assert torch.equal(value, before[key]), key
    model.to(ctx.device)
    if sequence_parallel:
        for norm in (model.norm_1, model.norm_2):
            for parameter in norm.parameters():
                parameter.sequence_parallel = True
        x, target = (t.chunk(ctx.size)[ctx.rank] for t in (x, target))
    assert_same_losses(train(model, x.to(ctx.device), target.to(ctx.device), ctx, sequence_parallel), want)

    trained, want_trained = layers.gather_state_dict(model), reference.state_dict()
    for key, value in trained.items():
        # The gradient of an element of the output is 2 e / (its number), and SEQUENCE * BATCH of them meet in a weight:
        # less than the error of one element. Every step rounds the weight once.
        rounding = STEPS * torch.finfo(torch.float32).eps * want_trained[key].abs()
        assert ((value - want_trained[key]).abs() < STEPS * LEARNING_RATE * forward_error() + rounding).all(), key


@pytest.mark.quick
@pytest.mark.ranks(2)
def test_parallelize_is_exact_on_integers(ctx):
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5, bias=False), nn.ReLU(), nn.Linear(5, 4))
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(integers(parameter.shape, torch.float32, seed, -2, 2))
    x = integers((7, 6), torch.float32, 9, -2, 2)
    want = model(x)
    want.sum().backward()
    want_grads = {name: parameter.grad for name, parameter in model.named_parameters()}

    model[4].weight.requires_grad_(False)
    model.eval()
    parallelize(model, {"0": "column", "2": "row", "4": {"style": "column", "gather_output": True}}, ctx)
    assert [type(module) for module in model][::2] == [ColumnParallelLinear, RowParallelLinear, ColumnParallelLinear]
    assert not model[4].weight.requires_grad and not model[4].training
    model.to(ctx.device)
    model.zero_grad()
    y = model(x.to(ctx.device))
    y.sum().backward()
    assert torch.equal(y.cpu(), want)
    assert torch.equal(model[0].weight.grad.cpu(), model[0].shard(want_grads["0.weight"], 0))
    assert torch.equal(model[2].weight.grad.cpu(), model[2].shard(want_grads["2.weight"], 1))
    assert torch.equal(model[4].bias.grad.cpu(), model[4].shard(want_grads["4.bias"], 0))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("words", [("column", "row"), ("colwise", "rowwise")])
def test_parallelize_splits_a_module_that_occurs_twice_once(ctx, words):
    """As the one block of all layers of an ALBERT, or a linear that two modules have."""
    torch.manual_seed(0)
    block = nn.Sequential(collections.OrderedDict(up=nn.Linear(4, 6), act=nn.GELU(), down=nn.Linear(6, 4)))
    other = nn.Sequential(collections.OrderedDict(up=block.up, act=nn.Tanh(), down=nn.Linear(6, 4)))
    model = nn.Sequential(block, nn.LayerNorm(4), block, other).to(ctx.device)
    x, twin = normal((3, 4), torch.float32, 1, device=ctx.device), copy.deepcopy(model)
    if words[0] == "column":
        with pytest.raises(ValueError, match="'0.up' and '3.up' are one module"):
            parallelize(model, {"0.up": "column", "3.up": "row"}, ctx)
    parallelize(model, {"*.up": words[0], "*.down": words[1]}, ctx)
    assert model[3].up is model[0].up is model[2].up
    for each in (model, twin):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            each(x).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(model(x), twin(x))
    assert model.state_dict().keys() == twin.state_dict().keys()


class Heads(nn.Module):
    """A norm over the heads between a column and a row layer: [s, b, HIDDEN] -> the same."""

    def __init__(self):
        super().__init__()
        self.norm, self.q_norm = nn.LayerNorm(HIDDEN), nn.RMSNorm(HIDDEN // HEADS)
        self.q, self.out = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return x + self.out(self.between(self.norm(x)))

    def between(self, x):
        heads = self.q_norm(self.q(x).unflatten(-1, (-1, HIDDEN // HEADS)))
        return functional.gelu(heads).flatten(-2)


STYLE = "replicated_with_grad_allreduce"


def heads(seed=0):
    torch.manual_seed(seed)
    model = Heads()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def heads_plan(sequence_parallel=False, **more):
    """With sequence parallelism the first norm sees this rank's rows alone, which the same style makes up for."""
    styles = {"q": "column", "out": "row"}
    plan = {name: {"style": style, "sequence_parallel": sequence_parallel} for name, style in styles.items()}
    return plan | {"q_norm": STYLE} | ({"norm": STYLE} if sequence_parallel else {}) | more


def own_rows(x, ctx, sequence_parallel):
    return (x.chunk(ctx.size)[ctx.rank] if sequence_parallel else x).to(ctx.device)


def assert_whole(model, values, want, what):
    """This rank's parts of gradients or weights against fp64: an element errs by some roundings of its layers' sums."""
    assert values.keys() == want.keys()
    for name, value in values.items():
        path, _, attribute = name.rpartition(".")
        layer, whole = model.get_submodule(path), want[name]
        if isinstance(layer, ParallelLinear) and attribute in layer.partitioned():
            whole = layer.shard(whole, layer.partitioned()[attribute])
        assert_accurate(value, whole, 64, f"{what}: {name}")


def assert_same_gradients(model, want, what):
    assert_whole(model, {name: parameter.grad for name, parameter in model.named_parameters()}, want, what)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sequence"])
def test_parallelize_sums_the_gradients_of_replicated_parameters(ctx, sequence_parallel):
    x = normal((SEQUENCE, BATCH, HIDDEN), torch.float32, 1)
    reference = heads().double()
    reference(x.double()).square().mean().backward()
    want = {name: parameter.grad for name, parameter in reference.named_parameters()}
    twice = {name: 2 * grad for name, grad in want.items()}
    mine = own_rows(x, ctx, sequence_parallel)

    def step(call):
        (call(mine).square().sum() / x.numel()).backward()

    def parallel():
        return parallelize(heads(), heads_plan(sequence_parallel), ctx).to(ctx.device)

    model = parallel()
    assert model.state_dict().keys() == reference.state_dict().keys()
    for count in (want, twice):
        step(model)  # and again, which accumulates
        assert_same_gradients(model, count, "plain")
    copied = copy.deepcopy(model)
    copied.zero_grad()
    step(copied)
    assert_same_gradients(copied, want, "copied")
    assert_same_gradients(model, twice, "the original of a copy")

    pickled = pickle.loads(pickle.dumps(model))
    pickled.zero_grad()
    loaded = parallel()
    loaded.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    empty = parallelize(heads().to("meta"), heads_plan(sequence_parallel), ctx).to_empty(device=ctx.device)
    empty.load_state_dict(model.state_dict())
    for what, made in (("pickled", pickled), ("assigned", loaded), ("from meta", empty)):
        step(made)
        assert_same_gradients(made, want, what)

    for reentrant in (False, True):
        model = parallel()
        leaf = mine.clone().requires_grad_()
        step(lambda _, m=model, at=leaf, how=reentrant: checkpoint(m, at, use_reentrant=how))
        step(lambda _, m=model, at=leaf, how=reentrant: checkpoint(m, at, use_reentrant=how))
        assert_same_gradients(model, twice, f"checkpoint, reentrant {reentrant}")

    torch._dynamo.reset()
    model = parallel()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    step(compiled)
    with mock.patch.object(torch._dynamo.config, "error_on_recompile", True):
        step(compiled)
    assert_same_gradients(model, twice, "compiled")

    model = parallel()
    weights = dict(model.named_parameters())
    slope = torch.func.grad(lambda w: torch.func.functional_call(model, w, (mine,)).square().sum() / x.numel())
    assert_whole(model, slope(weights), want, "functional")

    class Interrupt(BaseException):
        pass

    def interrupt(*_):
        raise Interrupt

    handle = model.q_norm.register_forward_pre_hook(interrupt)
    with pytest.raises(Interrupt):
        model(mine)
    handle.remove()
    step(model)
    assert_same_gradients(model, want, "after an interrupt")


def zero_step(model, backwards, tp, dp, stage):
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, lr=1.0, mesh=dp, tensor_parallel=tp, stage=stage)
    for backward in backwards:
        backward(model)
    optimizer.step()
    optimizer.remove()
    return dict(model.named_parameters())


def ddp_step(model, backwards, tp, dp, sharded):
    ddp = OverlappedDDP(model, mesh=dp, bucket_size=64, use_distributed_optimizer=sharded)
    optimizer = torch.optim.SGD(ddp.owned_parameters(), lr=1.0)
    ddp.zero_grad()
    with ddp.no_sync():
        backwards[0](ddp)
    backwards[1](ddp)
    ddp.finish_grad_sync()
    optimizer.step()
    if sharded:
        ddp.start_param_sync()
    ddp.remove()
    return dict(model.named_parameters())


def fsdp_step(model, backwards, tp, dp, units):
    sharded = FullyShard(model, units, mesh=dp)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
    with sharded.no_sync():
        backwards[0](sharded)
    backwards[1](sharded)
    optimizer.step()
    return {name.removeprefix("module."): value.full_tensor() for name, value in sharded.named_parameters()}


SYSTEMS = {
    "ZeRO-1": functools.partial(zero_step, stage=1),
    "ZeRO-2": functools.partial(zero_step, stage=2),
    "DDP": functools.partial(ddp_step, sharded=False),
    "sharded DDP": functools.partial(ddp_step, sharded=True),
    "FullyShard": functools.partial(fsdp_step, units=Heads),
    "FullyShard of its parts": functools.partial(fsdp_step, units=(nn.RMSNorm, ColumnParallelLinear)),
}


@pytest.mark.ranks(2)
def test_parallelize_sums_gradients_for_whoever_takes_them(ctx):
    """One SGD step of rate 1 on two backwards, whose update is the gradient; the style given, and forgotten."""
    xs = [normal((SEQUENCE, BATCH, HIDDEN), torch.float32, seed) for seed in range(2)]
    reference = nn.Sequential(heads()).double()
    sum(reference(x.double()).square().mean() for x in xs).backward()
    want = {name: (each - each.grad).detach() for name, each in reference.named_parameters()}
    alone = [dist.new_group([rank]) for rank in range(ctx.size)][ctx.rank]
    with tkernels.init(alone, heap_bytes=8 << 20, default=False) as dp:
        for index, (name, step) in enumerate(SYSTEMS.items()):
            sequence_parallel, backwards = index % 2 == 1, []
            for x in xs:
                mine = own_rows(x, ctx, sequence_parallel)
                backwards.append(lambda model, x=mine: (model(x).square().sum() / xs[0].numel()).backward())
            plan = {f"0.{module}": style for module, style in heads_plan(sequence_parallel).items()}
            model = parallelize(nn.Sequential(heads()), plan, ctx).to(ctx.device)
            assert_whole(model, step(model, backwards, ctx, dp), want, name)
            del plan["0.q_norm"]
            model = parallelize(nn.Sequential(heads()), plan, ctx).to(ctx.device)
            with pytest.raises(MismatchError, match="q_norm.weight differ"):
                step(model, backwards, ctx, dp)


def told(ctx, model, backward):
    """Collective. What a backward says, the same on every rank; None if it passes."""
    try:
        backward(model)
        said = None
    except MismatchError as error:
        said = str(error)
    assert all(each == said for each in ctx.group.gather(said))
    return said


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapped", [False, True])
def test_parallelize_tells_the_optimizer_of_marked_gradients_that_nobody_has_summed(ctx, wrapped):
    x = own_rows(normal((SEQUENCE, BATCH, HIDDEN), torch.float32, 1), ctx, True)
    plan = {name: style for name, style in heads_plan(True).items() if name != "norm"}
    alone = [dist.new_group([rank]) for rank in range(ctx.size)][ctx.rank]
    with tkernels.init(alone, heap_bytes=8 << 20, default=False) as dp:
        model = parallelize(heads(), plan, ctx).to(ctx.device)
        for parameter in model.norm.parameters():
            parameter.sequence_parallel = True
        called = OverlappedDDP(model, mesh=dp) if wrapped else model
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step, summed in enumerate((False, True, False)):
            optimizer.zero_grad()
            called(x).square().sum().backward()
            if summed:
                layers.all_reduce_sequence_parallel_grads(model, mesh=ctx)
            copied = pickle.loads(pickle.dumps(model.norm.weight))  # another process knows nothing of these ranks
            copied.grad = model.norm.weight.grad
            torch.optim.SGD([copied], 0.1).step()
            said = told(ctx, optimizer, lambda optimizer: optimizer.step())
            if step:  # once it was right, it is not compared any more
                assert said is None
            else:
                assert re.search("norm.weight.*call all_reduce_sequence_parallel_grads", said)
        other = parallelize(heads(), plan, ctx).to(ctx.device)
        other.norm.weight.sequence_parallel = other.norm.bias.sequence_parallel = True
        optimizer = torch.optim.SGD(other.parameters(), 0.1)
        optimizer.register_step_pre_hook(lambda *_: layers.all_reduce_sequence_parallel_grads(other, mesh=ctx))
        other(x).square().sum().backward()
        optimizer.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.Muon])
def test_parallelize_tells_an_optimizer_of_whole_parameters_of_the_parts_that_it_has(ctx, kind):
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False)).to(ctx.device)
    torch.manual_seed(0)
    for weight in model.parameters():
        nn.init.normal_(weight)
    parallelize(model, {"0": "column", "1": "row"}, ctx)
    before = [weight.detach().clone() for weight in model.parameters()]
    model(torch.ones(2, 4, device=ctx.device)).sum().backward()
    with pytest.raises(ValueError, match=rf"{kind.__name__}.step: .* looks at whole parameters, .* parallelize_module"):
        kind(model.parameters()).step(lambda: model(torch.ones(2, 4, device=ctx.device)).sum())
    with pytest.raises(ValueError, match=f"ZeroOptimizer: .*{kind.__name__}"):
        ZeroOptimizer(model.parameters(), kind, partition="parameters", mesh=ctx, tensor_parallel=ctx)
    assert all(map(torch.equal, before, model.parameters()))
    torch.optim.SGD(model.parameters()).step()


class Scaled(nn.Module):
    """A norm of what all ranks have, and a scale of its own for each rank's features. way: to read the scale by."""

    def __init__(self, way=lambda scale: scale):
        super().__init__()
        torch.manual_seed(5)
        self.way, self.norm, self.scale = way, nn.LayerNorm(HIDDEN), nn.Parameter(torch.rand(1) + 0.5)
        self.up, self.down = nn.Linear(HIDDEN, 8), nn.Linear(8, HIDDEN)

    def forward(self, x):
        return self.down(self.up(self.norm(x)) * self.way(self.scale))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("path", ["", "0."])
def test_parallelize_names_a_way_that_is_right_for_a_parameter_beside_modules(ctx, path):
    """The style of its module, or of the root, would go to the norm in it as well, whose gradient is whole."""

    def gradients(model):
        model(normal((SEQUENCE, HIDDEN), torch.float32, 1).to(ctx.device)).square().mean().backward()
        return {name: model.get_parameter(f"{path}{name}").grad for name in ("scale", "norm.weight", "norm.bias")}

    def made(*way):
        return nn.Sequential(Scaled(*way)) if path else Scaled(*way)

    def split(*way):
        return parallelize(made(*way), {f"{path}up": "column", f"{path}down": "row"}, ctx).to(ctx.device)

    said = told(ctx, split(), gradients)
    assert "plan |" not in said and f"pass {path}scale through copy_to_tensor_model_parallel_region" in said
    want = gradients(made().to(ctx.device))
    got = gradients(split(functools.partial(layers.copy_to_tensor_model_parallel_region, mesh=ctx)))
    for name, grad in want.items():
        torch.testing.assert_close(got[name], grad, msg=name)


FORGOTTEN = re.compile(
    r"parallelize: the gradients of q_norm.weight differ between ranks.*"
    r"give its module .*: plan \| \{'q_norm': 'replicated_with_grad_allreduce'\}"
)


@pytest.mark.ranks(2)
def test_parallelize_tells_whoever_forgets_to_sum_gradients(ctx):
    x = normal((SEQUENCE, BATCH, HIDDEN), torch.float32, 1).to(ctx.device)
    split = {"q": "column", "out": "row"}

    def backward(model, x=x):
        (model(x).square().sum() / x.numel()).backward()

    def recomputed(model):
        backward(lambda x: checkpoint(model, x.clone().requires_grad_(), use_reentrant=True))

    def forgetful(**styles):
        return parallelize(heads(), split | styles, ctx).to(ctx.device)

    # However backward comes about, at the end of the first.
    assert FORGOTTEN.match(told(ctx, forgetful(), backward))
    assert FORGOTTEN.match(told(ctx, copy.deepcopy(forgetful()), backward))
    assert FORGOTTEN.match(told(ctx, forgetful(), recomputed))
    assert FORGOTTEN.match(told(ctx, forgetful().bfloat16(), lambda model: backward(model, x.bfloat16())))
    torch._dynamo.reset()
    assert FORGOTTEN.match(told(ctx, torch.compile(forgetful(), backend="aot_eager", fullgraph=True), backward))
    empty = parallelize(heads().to("meta"), split, ctx).to_empty(device=ctx.device)
    empty.load_state_dict(forgetful().state_dict())
    assert FORGOTTEN.match(told(ctx, empty, backward))
    torch._dynamo.reset()
    empty = parallelize(heads().to("meta"), split, ctx).to_empty(device=ctx.device)
    empty.load_state_dict(forgetful().state_dict())
    assert FORGOTTEN.match(told(ctx, torch.compile(empty, backend="aot_eager", fullgraph=True), backward))
    frozen = forgetful()
    for name in split:
        frozen.get_submodule(name).requires_grad_(False)
    assert FORGOTTEN.match(told(ctx, frozen, backward))

    # A stage of a pipeline calls the layers that it has, and not the model.
    for at in (heads(), heads().to("meta")):
        stage = parallelize(nn.Sequential(at), {f"0.{name}": style for name, style in split.items()}, ctx)
        stage.to_empty(device=ctx.device).load_state_dict(nn.Sequential(forgetful()).state_dict())
        assert re.match("parallelize: the gradients of 0.q_norm.weight differ", told(ctx, stage[0], backward))

    # Later, where the first backward doesn't show it: it is of a part of the model, is zero, or overflows.
    late = forgetful()
    weight = late.out.weight.detach().clone()
    late.out.weight.data.zero_()
    for passes in (lambda m: m.norm(x).sum().backward(), backward, lambda m: (m(x).sum() * math.inf).backward()):
        assert told(ctx, late, passes) is None
    late.out.weight.data.copy_(weight)
    assert told(ctx, late, backward) is None  # the third of the parallel layers
    assert FORGOTTEN.match(told(ctx, late, backward))

    # What sequence parallelism sees of a norm, without Megatron's mark or the style, and with the mark.
    plan = {name: style for name, style in heads_plan(True).items() if name != "norm"}
    for mark in (False, True):
        model = parallelize(heads(), plan, ctx).to(ctx.device)
        for parameter in model.norm.parameters():
            parameter.sequence_parallel = mark
        said = told(ctx, model, lambda model: backward(model, own_rows(x, ctx, True)))
        assert said is None if mark else re.match("parallelize: the gradients of norm.*norm.* differ", said)

    # A style where the gradient is whole already, and a parameter that its module's forward doesn't read.
    wholes = forgetful(q_norm=STYLE, norm=STYLE)
    with pytest.warns(UserWarning, match="parallelize: norm.*norm.*each has the same.*, it counts 2 times; take the"):
        assert told(ctx, wholes, backward) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        assert told(ctx, wholes, backward) is None
    elsewhere = forgetful(q_norm=STYLE)
    weight = elsewhere.q_norm.weight
    elsewhere.q_norm.forward = lambda heads: functional.rms_norm(heads, (HIDDEN // HEADS,), weight)
    said = told(ctx, elsewhere, backward)
    assert re.match("parallelize: the gradients of q_norm.weight differ between ranks in spite of the style", said)


@pytest.mark.ranks(2)
def test_parallelize_tells_of_gradients_of_what_is_unfrozen_later(ctx):
    x = normal((SEQUENCE, BATCH, HIDDEN), torch.float32, 1).to(ctx.device)
    model = heads()
    model.q_norm.requires_grad_(False)
    parallelize(model, {"q": "column", "out": "row"}, ctx).to(ctx.device)
    backward = lambda model: model(x).square().mean().backward()  # noqa: E731
    for _ in range(3):
        assert told(ctx, model, backward) is None
    model.q_norm.requires_grad_(True)
    assert FORGOTTEN.match(told(ctx, model, backward))


class Rounded(torch.autograd.Function):
    """The identity, each element of whose gradient is off by up to `by` of it, in another way on every rank."""

    @staticmethod
    def forward(ctx, x, rank, by):
        ctx.rank, ctx.by = rank, by
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        noise = torch.rand(dy.shape, generator=torch.Generator().manual_seed(ctx.rank)) * 2 - 1
        return dy * (1 + ctx.by * noise.to(dy.device)), None, None


class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x):
        return x + self.bias


class Attention(nn.Module):
    """Attention that is left whole, and a split MLP. The gradient of the key's bias is zero but for rounding.

    apart: that bias has a module of its own.
    """

    def __init__(self, rank, by, apart=False):
        super().__init__()
        self.rank, self.by, self.shift = rank, by, Shift() if apart else nn.Identity()
        self.q, self.k, self.unused = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.up, self.down = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        q, k = self.q(x), self.shift(self.k(x))
        q, k = (Rounded.apply(y, self.rank, by) for y, by in ((q, 8 * self.by), (k, self.by)))
        scores = q @ k.transpose(-1, -2)
        return self.down(functional.gelu(self.up(scores.softmax(-1) @ x)))


@pytest.mark.ranks(2)
def test_parallelize_compares_gradients_seldom_and_by_more_than_rounding(ctx):
    x = normal((BATCH, SEQUENCE, HIDDEN), torch.float32, 1).to(ctx.device)
    met, gather = [], Group.gather

    def counted(*arguments):
        met.append(arguments)
        return gather(*arguments)

    torch.manual_seed(0)
    model = parallelize(Attention(ctx.rank, 2.0**-20, apart=True), {"up": "column", "down": "row"}, ctx).to(ctx.device)
    assert told(ctx, model, lambda model: model(x).square().sum().backward()) is None
    parts = ctx.group.gather(model.shift.bias.grad.cpu())
    assert (parts[0] - parts[1]).norm() > 0.5 * parts[0].norm()
    for by in (2.0**-8, 1.0):  # a rounding to bf16 and several of them, or the gradient itself
        torch.manual_seed(0)
        model = parallelize(Attention(ctx.rank, by), {"up": "column", "down": "row"}, ctx).to(ctx.device)
        said = told(ctx, model, lambda model: model(x).square().sum().backward())
        parts = ctx.group.gather(model.k.bias.grad.cpu())
        assert (parts[0] - parts[1]).norm() > 0.5 * parts[0].norm()
        assert said is None if by < 1 else re.match(r"parallelize: the gradients of [kq]\.", said)
        with mock.patch.object(Group, "gather", counted):
            for _ in range(4 if by < 1 else 0):
                model(x).square().sum().backward()
    assert len(met) == 2  # of the backwards 2 to 5, for the sake of the unused layer


@pytest.mark.ranks(4)
def test_parallelize_takes_a_mesh_or_a_group_for_its_context(ctx):
    """On a mesh of 2 x 2, each pair of ranks holds a model of its own."""
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.full((3, 4), 1.0 + mesh["dp"].get_local_rank())
    torch.manual_seed(0)
    full = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    want = copy.deepcopy(full).double()(x.double())

    with pytest.raises(ValueError, match=r"has 2 dimensions, \('dp', 'tp'\); pass .* mesh\['tp'\]"):
        parallelize(copy.deepcopy(full), {"0": "column", "1": "row"}, mesh)
    by_mesh = parallelize(copy.deepcopy(full), {"0": "column", "1": "row"}, mesh["tp"])
    made = by_mesh[0].ctx
    assert made is not ctx and made.size == 2 and by_mesh[0].weight.shape == (3, 4)
    by_group = parallelize(copy.deepcopy(full), {"0": "column", "1": "row"}, mesh["tp"].get_group())
    assert by_group[0].ctx is made  # over the same ranks: not a second one
    for model in (by_mesh, by_group):
        y = model.to(ctx.device)(x.to(ctx.device)).cpu()
        assert_close_to(y, want, terms=4 + 6 + 2)
    by_world = parallelize(copy.deepcopy(full), {"0": "column"}, dist.group.WORLD)
    assert by_world[0].ctx is ctx
    tkernels.finalize(made)
    with pytest.raises(TypeError, match="takes a Context, a ProcessGroup or a DeviceMesh of one dimension, not str"):
        parallelize(full, {"0": "column"}, "tp")


@pytest.mark.ranks(2)
def test_parallelize_refuses_plans_that_differ_between_ranks_before_anything_changed(ctx):
    torch.manual_seed(0)
    model = Block()
    for plans in (
        ({"up": "column"}, {"q": "column"}),
        ({"out": "column"}, {"out": "row"}),
        ({"up": "column"}, {"up": {"style": "column", "gather_output": True}}),
    ):
        with pytest.raises(MismatchError, match="the plans of rank 0 and rank 1 differ in"):
            parallelize(model, plans[ctx.rank], ctx)
    assert not any(isinstance(module, ParallelLinear) for module in model.modules())
    with pytest.raises(TypeError, match="plan=None must be 'auto', or a dict"):
        parallelize(model, None, ctx)
    with pytest.raises(TypeError, match="model=None must be an nn.Module"):
        parallelize(None, {"up": "column"}, ctx)


@pytest.mark.ranks(2)
def test_parallelize_refuses_a_plan_that_does_not_fit_and_changes_nothing(ctx):
    torch.manual_seed(0)
    model = nn.ModuleDict(
        dict(
            up=nn.Linear(4, 6),
            down=nn.Linear(6, 4),
            one=nn.Linear(4, 1),
            norm=nn.LayerNorm(4),
            embedding=nn.Embedding(8, 4),
            head=nn.Linear(4, 8, bias=False),
            attention=nn.MultiheadAttention(4, 2),
            activation=nn.SiLU(),
            scales=nn.ParameterList([torch.ones(2)]),
            hooked=nn.Linear(4, 4),
            watched=nn.Linear(4, 4),
            owned=nn.Linear(4, 4, device=ctx.device),
        )
    )
    model["head"].weight = model["embedding"].weight
    model["hooked"].register_forward_hook(lambda *_: None)
    model["watched"].weight.register_post_accumulate_grad_hook(lambda *_: None)
    optimizer = ZeroOptimizer(model["owned"].parameters(), torch.optim.SGD, lr=0.1, mesh=ctx)
    before = dict(model.named_modules())
    for wrong, error, message in [
        ({"upp": "column"}, ValueError, "'upp' matches no module; the modules are up, down, one"),
        ({"norm": "row"}, TypeError, "'norm' matches 'norm', which is a torch.*LayerNorm"),
        ({"*": "column"}, TypeError, r"'\*' matches 'norm'"),
        ({"attention.out_proj": "row"}, TypeError, "NonDynamicallyQuantizableLinear, not exactly an nn.Linear"),
        ({"u*": "column", "up": "row"}, ValueError, r"'up' is matched by both 'u\*' and 'up'"),
        (
            {"up": "diagonal"},
            ValueError,
            "no style 'diagonal' .of 'up'.; it has colwise, .* column and row",
        ),
        (
            {"up": "column", "down": "rowwise"},
            ValueError,
            "no style 'column' .of 'up'.; .* for all of a plan, column and row",
        ),
        ({"up": {"sequence_parallel": True}}, ValueError, "style of 'up' is None"),
        ({"up": None}, ValueError, "style of 'up' is None"),
        ({"up": {"style": ["row"]}}, ValueError, r"style of 'up' is \['row'\]"),
        ({"up": ["colwise"]}, ValueError, r"no style \['colwise'\] .of 'up'.; it has"),
        ({}, ValueError, "the plan is empty, so nothing would be split"),
        ({3: "row"}, TypeError, "a pattern of the plan=3 must be a name"),
        ({"up" if ctx.rank else "upp": "row"}, ValueError, r"'upp' matches no module; .* \(on rank 0\)"),
        (torch.ones(2) if ctx.rank else {"up": "row"}, TypeError, r"plan=tensor.* must be 'auto'.* \(on rank 1\)"),
        (
            {"up": {"style": "row", "gather_output": True}},
            ValueError,
            r"a row layer has no options \['gather_output'\]",
        ),
        ({"up": {"style": "column", "bias": False}}, ValueError, r"a column layer has no options \['bias'\]"),
        ({"norm": {"style": STYLE, "bias": True}}, ValueError, rf"a {STYLE} layer has no options \['bias'\]; .* none"),
        ({"activation": STYLE}, ValueError, "'activation' has no parameters whose gradients could be summed"),
        ({"scales": STYLE}, TypeError, "'scales' is a ParameterList, without a forward"),
        ({"norm": STYLE, "n*": STYLE}, ValueError, r"'norm' is matched by both 'norm' and 'n\*'"),
        ({"norm": STYLE, "upp": "row"}, ValueError, "'upp' matches no module"),
        ({"head": "column"}, ValueError, "'head' shares its parameters with embedding.weight.*untie them"),
        ({"hooked": "column"}, ValueError, "'hooked' has forward hooks.*register them after"),
        ({"watched": "column"}, ValueError, "'watched' has parameters' hooks.*register them after"),
        ({"owned": "row"}, ValueError, "owned.weight belongs to ZeroOptimizer, .* do this before"),
        ({"up": "column", "one": "column"}, ValueError, "'one': ColumnParallelLinear.*1 out-features can't be split"),
    ]:
        with pytest.raises(error, match=message):
            parallelize(model, wrong, ctx)
        assert dict(model.named_modules()) == before and not model._forward_pre_hooks
    sources = ("zero", TypeError, "'zero' must be a whole"), (9, ValueError, "9 must be at most 1")
    for source, error, message in sources:
        for plan in ({"up": "column"}, {"up": "colwise"}):
            with pytest.raises(error, match=f"src_data_rank={message}"):
                parallelize(model, plan, ctx, src_data_rank=source)
            assert dict(model.named_modules()) == before
    optimizer.remove()
    normed = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)).to(ctx.device)
    for part in ({"0": STYLE}, {"1": "column"}, {"2": "row"}):  # one part of a plan after the other
        parallelize(normed, part, ctx)
    with pytest.raises(ValueError, match=f"'0' has the style '{STYLE}' already, by an earlier call"):
        parallelize(normed, {"0": STYLE}, ctx)

    with torch.no_grad():
        model["down"].weight[0, 0] += ctx.rank
    with pytest.raises(
        MismatchError, match="models of rank 0 and rank 1 differ in down.weight .*; make them from the same"
    ):
        parallelize(model, {"up": "column"}, ctx)
    assert dict(model.named_modules()) == before


class Pool(nn.Module):
    """A parameter of its own beside an nn.MultiheadAttention, whose parameters are read by functions."""

    def __init__(self):
        super().__init__()
        self.probe, self.attention = nn.Parameter(torch.ones(1, 1, 8)), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(self.probe.expand(len(x), 1, 8), x, x)[0]


@pytest.mark.ranks(2)
def test_parallelize_leaves_an_attention_of_torch_whole_or_refuses_it_before_anything_changed(ctx):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.Sequential(Pool())).to(ctx.device)
    twin, x = copy.deepcopy(model), normal((2, 3, 8), torch.float32, 1, device=ctx.device)
    before = dict(model.named_parameters())
    with pytest.raises(TypeError, match="'2.0.attention' is a MultiheadAttention, whose parameters other modules read"):
        parallelize(model, {"0": "colwise", "1": "rowwise", "2.0": "replicated_with_grad_allreduce"}, ctx)
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    parallelize(model, {"0": "colwise", "1": "rowwise"}, ctx)
    torch.testing.assert_close(model(x), twin(x))


@pytest.mark.ranks(2)
def test_parallelize_refuses_a_plan_of_the_models_own_that_matches_nothing(ctx):
    """As that of a wrapper, which has it from the model that it wraps."""
    model = nn.ModuleDict(dict(inner=nn.ModuleDict(dict(up=nn.Linear(4, 6))))).to(ctx.device)
    model.tp_plan = {"up": "colwise"}
    with pytest.raises(ValueError, match="nothing would be split: no pattern of ModuleDict.tp_plan, as 'up', matches"):
        parallelize(model, "auto", ctx)
    assert type(model["inner"]["up"].weight) is nn.Parameter


@pytest.mark.ranks(2)
@pytest.mark.parametrize("words", [("column", "row"), ("colwise", "rowwise")])
@pytest.mark.parametrize(
    ("name", "heads", "reason"),
    [
        ("gate_up_proj", 2, "is gate and up-projection in one"),
        ("Wqkv", 2, "is queries, keys and values in one"),
        ("attention", 3, "3 heads and 3 of keys and values"),
    ],
)
def test_parallelize_refuses_stacked_projections_and_heads_by_the_models_config(ctx, words, name, heads, reason):
    model = nn.ModuleDict({name: nn.Linear(4, 6), "down": nn.Linear(6, 4)}).to(ctx.device)
    model.config = types.SimpleNamespace(model_type="ours", num_attention_heads=heads)
    with pytest.raises(ValueError, match=reason):
        parallelize(model, {name: words[0], "down": words[1]}, ctx)
    assert type(model[name]) is nn.Linear and type(model[name].weight) is nn.Parameter
    if heads == 3:
        layers = [types.SimpleNamespace(num_attention_heads=number) for number in (4, 3)]
        model.config.is_heterogeneous, model.config.per_layer_config = True, layers
        with pytest.raises(ValueError, match="4 or 3 heads and 4 or 3 of keys and values"):
            parallelize(model, {name: words[0], "down": words[1]}, ctx)
        model.config = types.SimpleNamespace(model_type="ours", num_attention_heads=[2, 3])  # of a model in stages
        with pytest.raises(ValueError, match="2 or 3 heads and 2 or 3 of keys and values"):
            parallelize(model, {name: words[0], "down": words[1]}, ctx)


class Attends(nn.Module):
    """Of hand-written attentions of heads of 4 features, two heads for keys and values."""

    def __init__(self, heads: int = 4):
        super().__init__()
        self.n_head, self.head_size = heads, 4
        self.q, self.kv, self.o = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(16, 8)


class AttendsInLines(Attends):
    def heads_of(self, x):
        return x.view(
            *x.shape[:-1],
            self.n_head,
            -1,
        )


class AttendsBySizes(Attends):
    def heads_of(self, x):
        sizes = [*x.shape[:-1], self.n_head, -1]
        return x.view(sizes)


class AttendsByName(Attends):
    def heads_of(self, x):
        number = self.n_head
        return x.unflatten(-1, (number, -1))


class AttendsByFeatures(Attends):
    def heads_of(self, x):
        return x.unflatten(-1, (-1, self.head_size))


class AttendsAndFlattens(AttendsByFeatures):
    all_head_size = 16

    def features_of(self, x):
        return x.reshape(x.shape[:-2] + (self.all_head_size,))


@pytest.mark.ranks(2)
def test_parallelize_refuses_an_attention_whose_code_counts_all_heads(ctx):
    """Whatever its names and however it is written; with -1 beside it, it would be wrong without a word."""
    plan = {"0.q": "colwise", "0.kv": "colwise", "0.o": "rowwise"}
    for kind in (AttendsInLines, AttendsBySizes, AttendsByName):
        model = nn.Sequential(kind()).to(ctx.device)
        with pytest.raises(ValueError, match=f"'0', {kind.__name__}, takes .* n_head=4, all heads, .* would have 2"):
            parallelize(model, plan, ctx)
        assert type(model[0].q.weight) is nn.Parameter
    model = nn.Sequential(AttendsAndFlattens()).to(ctx.device)
    with pytest.raises(ValueError, match="all_head_size=16, all features, .* would have 8"):
        parallelize(model, plan, ctx)
    for model in (AttendsInLines(2), AttendsByFeatures()):  # a rank's heads, as many as all of the keys; any number
        parallelize(nn.Sequential(model).to(ctx.device), plan, ctx)


class SaysNoSize(nn.Module):
    """Attention of 4 heads, or of so many, that doesn't say how many features one has."""

    def __init__(self, heads: int = 4):
        super().__init__()
        self.n_head = self.h = heads
        self.config = types.SimpleNamespace(n_head=heads)
        self.q, self.k, self.o = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        b, t, _ = x.shape
        q, k = self.q(x).view(b, t, self.h, -1).transpose(1, 2), self.k(x).view(b, t, self.h, -1).transpose(1, 2)
        return self.o(functional.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2))


class CountsByConfig(SaysNoSize):
    def forward(self, x):
        b, t, _ = x.shape
        q, k = (proj(x).reshape(b, t, self.config.n_head, -1).transpose(1, 2) for proj in (self.q, self.k))
        return self.o(functional.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2))


class CountsInALambda(SaysNoSize):
    def forward(self, x):
        number = self.h
        q, k = self.q(x), self.k(x)
        q, k = map(lambda t: t.unflatten(-1, (number, -1)).transpose(1, 2), (q, k))
        return self.o(functional.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2))


class AttendsByAFunction(SaysNoSize):
    def forward(self, x):
        return self.o(attention(self.q(x), self.k(x), self.n_head))


def attention(q, k, heads):
    q, k = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in (q, k))
    return functional.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)


class Rearranges(SaysNoSize):
    def forward(self, x):
        q, k = map(lambda t: einops.rearrange(t, "b t (h d) -> b h t d", h=self.h), (self.q(x), self.k(x)))  # noqa: F821
        return self.o(attend(q, k))  # noqa: F821


class SplitsAfterwards(CountsByConfig):
    """What is split isn't taken apart."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.down(self.up(super().forward(x)).relu())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("words", [("column", "row"), ("colwise", "rowwise")])
def test_parallelize_refuses_a_number_of_heads_that_may_be_of_all(ctx, words):
    """Where the module doesn't say a head's features, each rank's would be taken for as many heads of less features."""
    plan = {"[qk]": words[0], "o": words[1]}
    kinds = {SaysNoSize: "h", CountsByConfig: "config.n_head", CountsInALambda: "h", AttendsByAFunction: "n_head"}
    x = normal((2, 3, 8), torch.float32, 1, device=ctx.device)
    for kind, name in kinds.items():
        torch.manual_seed(0)
        model = kind().to(ctx.device)
        whole = model(x)
        with pytest.raises(ValueError, match=f"{kind.__name__}, takes .* by {name}=4, perhaps all heads, .* head_dim"):
            parallelize(model, plan, ctx)
        assert type(model.q) is nn.Linear
        model.n_head = model.h = model.config.n_head = 2
        model.head_dim = 4
        torch.testing.assert_close(parallelize(model, plan, ctx)(x), whole)
    with pytest.raises(ValueError, match="by h=4, perhaps all heads"):
        check_heads(Rearranges(), ["q", "k"], ctx.size)
    parallelize(SplitsAfterwards().to(ctx.device), {"up": words[0], "down": words[1]}, ctx)


class AttendsWithAScaleOfEachHead(AttendsByFeatures):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, 1, 1))


@pytest.mark.ranks(2)
def test_parallelize_refuses_an_attention_that_has_a_parameter_for_each_head(ctx):
    """As attention sinks are, which a rank's heads, if it has one, would all get, and the model's own plan forgets."""
    plan = {"0.q": "colwise", "0.kv": "colwise", "0.o": "rowwise"}
    for own_plan in ({}, {"base_model_tp_plan": plan}):
        model = nn.Sequential(AttendsWithAScaleOfEachHead()).to(ctx.device)
        model.config = types.SimpleNamespace(**own_plan)
        with pytest.raises(ValueError, match=r"'0', Attends\w+, has scale of .* all 4 heads, .* have 2; give"):
            parallelize(model, plan, ctx)
        assert type(model[0].q.weight) is nn.Parameter
        gathered = dict.fromkeys(("0.q", "0.kv"), "colwise_gather_output") | {"0.o": "rowwise_split_input"}
        parallelize(model, gathered, ctx)


class ChunksAtOnce(nn.Module):
    def __init__(self):
        super().__init__()
        self.w12, self.w3 = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x):
        gate, up = self.w12(x).chunk(2, dim=-1)
        return self.w3(gate.sigmoid() * up)


class ChunksLater(ChunksAtOnce):
    def forward(self, x):
        both = self.w12(x)
        gate, up = torch.chunk(both, 2, -1)
        return self.w3(gate.sigmoid() * up)


class ChunksInTurn(ChunksAtOnce):
    def forward(self, x):
        x = self.w12(x)
        x = nn.functional.glu(x)
        return self.w3(x)


class SplitsBySizes(ChunksAtOnce):
    def forward(self, x):
        both = self.w12(x)
        gate, up = both.split(both.shape[-1] // 2, dim=-1)
        return self.w3(gate.sigmoid() * up)


class ViewsAsTwo(ChunksAtOnce):
    def forward(self, x):
        gate, up = self.w12(x).view(*x.shape[:-1], 2, -1).unbind(-2)
        return self.w3(gate.sigmoid() * up)


class Gate(nn.Module):
    def forward(self, x):
        gate, up = x.chunk(2, dim=-1)
        return gate.sigmoid() * up


class HasAGate(ChunksAtOnce):
    def __init__(self):
        super().__init__()
        self.gate = Gate()

    def forward(self, x):
        return self.w3(self.gate(self.w12(x)))


class HasTorchsGate(ChunksAtOnce):
    def __init__(self):
        super().__init__()
        self.gate = nn.GLU()

    def forward(self, x):
        x = self.w12(x)
        return self.w3(self.gate(x))


class SplitsIntoHeads(ChunksAtOnce):
    width = 4

    def forward(self, x):  # as many as a rank has
        heads = torch.stack(self.w12(x).split(self.width, -1))
        return self.w3(heads.softmax(1).mean(0))


class ViewsWindows(ChunksAtOnce):
    def forward(self, x):
        h = self.w12(x)
        return self.w3(h.view(2, -1, h.shape[-1]).cumsum(1).flatten(0, 1))


def in_sequence(gate) -> nn.Module:
    layers = {"w12": nn.Linear(8, 16), "drop": nn.Dropout(0.0), "gate": gate, "w3": nn.Linear(8, 8)}
    return nn.Sequential(collections.OrderedDict(layers))


class ViewsPairs(ChunksAtOnce):
    def forward(self, x):  # of each feature's own gate, beside it, a rank has both
        gate, up = self.w12(x).unflatten(-1, (-1, 2)).unbind(-1)
        return self.w3(gate.sigmoid() * up)


class ChunksRows(ChunksAtOnce):
    def forward(self, x):
        return self.w3(sum(torch.chunk(input=self.w12(x)[..., :4].chunk(2)[0], chunks=2, dim=-1)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("words", [("column", "row"), ("colwise", "rowwise")])
def test_parallelize_refuses_stacked_projections_that_the_code_takes_apart(ctx, words):
    """Of which a rank would have other parts than the code takes them for, without a word."""
    plan, x = {"w12": words[0], "w3": words[1]}, normal((4, 8), torch.float32, 1, device=ctx.device)
    kinds = (ChunksAtOnce, ChunksLater, ChunksInTurn, SplitsBySizes, ViewsAsTwo, HasAGate, HasTorchsGate)
    gates = (functools.partial(in_sequence, gate) for gate in (Gate(), nn.GLU()))
    for kind in (*kinds, *gates):
        torch.manual_seed(0)
        model = kind().to(ctx.device)
        twin = copy.deepcopy(model)
        with pytest.raises(ValueError, match="'w12' is several projections in one"):
            parallelize(model, plan, ctx)
        if words[0] == "column":
            parallelize(model, {"w12": {"style": "column", "partition_stride": 2}, "w3": "row"}, ctx)
        else:
            parallelize(model, {"w12": "colwise_gather_output", "w3": "rowwise_split_input"}, ctx)
        torch.testing.assert_close(model(x), twin(x))
    named = ChunksRows()
    named.header, named.head_dims = {"a": 1}, [8, 8]  # numbers of heads are numbers
    check_heads(named, ["w12"], 2)
    for kind in (ViewsPairs, SplitsIntoHeads, ViewsWindows):
        check_heads(kind(), ["w12"], 2)


class OneHeadOfKeys(nn.Module):
    """Attention whose 4 heads of queries share one of keys and values."""

    def __init__(self):
        super().__init__()
        self.norm, self.q, self.kv = nn.LayerNorm(16), nn.Linear(16, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.o = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        h = self.norm(x)
        q = self.q(h).unflatten(-1, (-1, 4)).transpose(1, 2)
        k, v = self.kv(h).unsqueeze(1).chunk(2, -1)
        return x + self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.ranks(2)
def test_parallelize_sums_the_gradient_of_an_output_that_is_for_each_ranks_heads(ctx):
    """Keys and values of one head: forward is right in any case, and the gradients of what is before are parts."""
    torch.manual_seed(0)
    model = nn.Sequential(OneHeadOfKeys(), OneHeadOfKeys()).to(ctx.device)
    x = normal((2, 8, 16), torch.float32, 1, device=ctx.device)
    split = {"*.q": "colwise", "*.o": "rowwise"}

    def gradients(model):
        for parameter in model.parameters():
            parameter.grad = None
        model(x).square().mean().backward()
        return [full(parameter.grad) for parameter in model.parameters()]

    def full(grad):
        return grad.full_tensor() if isinstance(grad, DTensor) else grad

    want = gradients(model)
    named = r"1.kv.weight is that of a linear layer .* plan \| {'\*.kv': 'replicated_for_heads'}"
    with pytest.raises(MismatchError, match=named):
        gradients(parallelize(copy.deepcopy(model), split, ctx))
    said = r"gradient of the output of 1.kv, 0.kv differs .* plan \| {'\*.kv': 'replicated_for_heads'}"
    with pytest.raises(MismatchError, match=said):
        gradients(parallelize(copy.deepcopy(model), split | {"*.kv": "colwise_gather_output"}, ctx))
    gathered = {"*.q": "column", "*.o": "row", "*.kv": {"style": "column", "gather_output": True}}
    with pytest.raises(MismatchError, match=said):
        gradients(parallelize(copy.deepcopy(model), gathered, ctx))
    by_parameters = dict.fromkeys(("*.kv", "*.norm"), "replicated_with_grad_allreduce")
    with pytest.warns(UserWarning, match="0.kv.weight, 1.kv.weight: .* give it 'replicated_for_heads' instead"):
        gradients(parallelize(copy.deepcopy(model), split | by_parameters, ctx))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = gradients(parallelize(copy.deepcopy(model), split | {"*.kv": "replicated_for_heads"}, ctx))
        in_megatrons = {"*.q": "column", "*.o": "row", "*.kv": "replicated_for_heads"}
        other = parallelize(copy.deepcopy(model), in_megatrons, ctx)
        parts = gradients(other)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-7)
    for (name, parameter), part, whole in zip(other.named_parameters(), parts, want, strict=True):
        if getattr(parameter, "tensor_model_parallel", False):
            whole = whole.chunk(ctx.size, parameter.partition_dim)[ctx.rank]
        torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-7, msg=name)
    # Without a parameter that all ranks have, too; and once an output is compared, nothing watches it.
    alone = OneHeadOfKeys().to(ctx.device)
    alone.norm = nn.Identity()
    with pytest.raises(MismatchError, match="gradient of the output of kv differs"):
        gradients(parallelize(alone, {"q": "colwise", "o": "rowwise", "kv": "colwise_gather_output"}, ctx))
    plain = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 16)).to(ctx.device)
    parallelize(plain, {"0": "colwise", "1": "rowwise"}, ctx)
    assert plain[1]._forward_hooks
    gradients(plain)
    assert not plain[1]._forward_hooks
    # Where all ranks have the same of it, it is counted twice.
    with pytest.warns(UserWarning, match="here each has the same"):
        first = {"0.q": "colwise", "0.o": "rowwise", "*.kv": "replicated_for_heads"}
        gradients(parallelize(copy.deepcopy(model), first, ctx))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("words", [("column", "row"), ("colwise", "rowwise")])
def test_parallelize_compares_gradients_of_a_model_that_is_converted_or_moved_afterwards(ctx, words):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.LayerNorm(8), nn.Linear(16, 16)).to(ctx.device)
    parallelize(model, {"1": words[0], "3": words[1]}, ctx)
    model[2].forward = lambda h, norm=model[2].forward: norm(h.unflatten(-1, (-1, 8))).flatten(-2)
    model.to(torch.bfloat16).to(ctx.device)
    x = normal((4, 16), torch.bfloat16, 1, device=ctx.device)
    with pytest.raises(MismatchError, match="gradients of 2.(weight, 2.bias|bias, 2.weight) differ"):
        (model(x) * normal((4, 16), torch.bfloat16, 2, device=ctx.device)).sum().backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("words", [("column", "row"), ("colwise", "rowwise")])
@pytest.mark.parametrize("bias", [False, True])
def test_parallelize_tells_ranks_that_have_different_batches(ctx, words, bias):
    """Of a model that begins with a split layer: no parameter's gradient would differ."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, bias=bias), nn.GELU(), nn.Linear(16, 8, bias=bias)).to(ctx.device)
    parallelize(model, {"0": words[0], "2": words[1]}, ctx)
    x, own = (normal((4, 8), torch.float32, seed, device=ctx.device) for seed in (9, ctx.rank))
    model(own)  # of which there is no backward
    copied = copy.deepcopy(model)
    model(x).sum().backward()
    assert not model[0]._forward_hooks
    with pytest.raises(MismatchError, match="the input of 0 differs between ranks, although .* different batches"):
        copied(own).sum().backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("words", [("column", "row"), ("colwise", "rowwise")])
def test_parallelize_compares_no_input_of_a_backward_that_reaches_no_parameter(ctx, words):
    """As torch's pipelines infer shapes, each rank of numbers of its own. Backwards then begin with any forward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to(ctx.device)
    parallelize(model, {"0": words[0], "2": words[1]}, ctx)
    x, own = (normal((4, 8), torch.float32, seed, device=ctx.device) for seed in (9, ctx.rank))
    own.requires_grad_()
    torch.autograd.grad(model(own).sum(), own)
    for y in reversed([model(x) for _ in range(4)]):
        y.sum().backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("words", [("column", "row"), ("colwise", "rowwise")])
def test_parallelize_lets_torchs_encoder_layers_call_what_is_split(ctx, words):
    """In inference, without gradients, these would read the weights of their linears, here a part of each."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).to(ctx.device)
    twin, x = copy.deepcopy(model), normal((2, 8, 16), torch.float32, 1, device=ctx.device)
    parallelize(model, dict(zip(("*.linear1", "*.linear2"), words, strict=True)), ctx)
    mask = torch.zeros(2, 8, dtype=torch.bool, device=ctx.device)
    mask[1, 5:] = True
    for train in (True, False):
        model.train(train), twin.train(train)
        for options in ({}, {"src_key_padding_mask": mask}):
            with torch.no_grad():
                y, want = model(x, **options), twin(x, **options)
            rows = ~mask if options else slice(None)
            torch.testing.assert_close(y[rows], want[rows])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("words", [("column", "row"), ("colwise", "rowwise")])
def test_parallelize_refuses_a_linear_whose_forward_is_set_on_the_module(ctx, words):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).to(ctx.device)
    model[0].forward = lambda x, own=model[0].forward: 2 * own(x)
    with pytest.raises((ValueError, TypeError), match="'0' has a forward of its own, set on the module"):
        parallelize(model, dict(zip(("0", "2"), words, strict=True)), ctx)
    assert type(model[2]) is nn.Linear
