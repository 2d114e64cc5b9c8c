"""Tensor-parallel layers in FP8: their noise beside fp64, the copies of their weights, training beside bf16."""

import copy
import functools
import math
import pickle
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tkernels
from tkernels import layers
from tkernels.comm import MismatchError
from tkernels.layers import (
    ColumnParallelLinear,
    ColwiseParallel,
    ColwiseParallelGroup,
    ParallelMLP,
    RowParallelLinear,
    RowwiseParallel,
    parallelize,
    parallelize_module,
)
from tkernels.layers.tensor_parallel.activations import KNOWN, activated, activated_gradient
from tkernels.layers.tensor_parallel.float8 import RECIPES, Copies
from tkernels.testing.compare import normal

K, N, BATCH, SEQUENCE = 64, 96, 2, 12
OUTPUT_DB, GRADIENT_DB = 25, 17


def tp_mesh(ctx):
    return init_device_mesh(ctx.device.type, (ctx.size,), mesh_dim_names=("tp",))


def full(t):
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().cpu().double()


def decibels(got, want) -> float:
    """The signal-to-noise ratio of a result."""
    got, want = full(got), full(want)
    assert got.shape == want.shape
    return (10 * torch.log10(want.square().sum() / (got - want).square().sum())).item()


def linear(k=K, n=N, dtype=torch.bfloat16, bias=True, seed=3):
    made = nn.Linear(k, n, bias, dtype=dtype)
    with torch.no_grad():
        made.weight.copy_(normal((n, k), dtype, seed) * k**-0.5)
        if bias:
            made.bias.copy_(normal(n, dtype, seed + 1))
    return made


LAYERS = {  # the style of each, and whether it splits the sequence of its input and of its output
    "gather": (ColwiseParallel, True, False),
    "copy": (ColwiseParallel, False, False),
    "scatter": (RowwiseParallel, False, True),
    "reduce": (RowwiseParallel, False, False),
}


def styled(kind: str, **options):
    style, split, splits = LAYERS[kind]
    if style is ColwiseParallel:
        return style(input_layouts=Shard(1) if split else Replicate(), output_layouts=Replicate(), **options)
    return style(input_layouts=Replicate(), output_layouts=Shard(1) if splits else Replicate(), **options)


def run(ctx, model, kind: str, x, dy, part: bool = True):
    """Collective. -> (y, dx) of all ranks. The model's parameters get gradients."""
    _, split, splits = LAYERS[kind]
    x = x.chunk(ctx.size, 1)[ctx.rank].contiguous() if split else x
    x = x.to(ctx.device, copy=True).requires_grad_()
    y = model(x)
    y.backward((dy.chunk(ctx.size, 1)[ctx.rank] if splits else dy).to(ctx.device))
    whole = [each.detach().cpu() for each in (y, x.grad)]
    for at, apart in enumerate((splits, split)):
        if apart:
            whole[at] = torch.cat(ctx.group.gather(whole[at]), 1)
    return whole


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", [name for name, recipe in RECIPES.items() if not recipe.gathers_weights])
@pytest.mark.parametrize("kind", LAYERS)
def test_float8_layers_are_within_torchaos_limits_of_fp64(ctx, kind, recipe):
    model = linear()
    twin = copy.deepcopy(model).double()
    x, dy = normal((BATCH, SEQUENCE, K), torch.bfloat16, 1), normal((BATCH, SEQUENCE, N), torch.bfloat16, 2)
    x64 = x.double().requires_grad_()
    want = twin(x64)
    want.backward(dy.double())
    parallelize_module(model.to(ctx.device), tp_mesh(ctx), styled(kind, float8=recipe))
    y, dx = run(ctx, model, kind, x, dy)
    assert y.dtype == dx.dtype == model.weight.grad.dtype == torch.bfloat16
    assert OUTPUT_DB < decibels(y, want) < 40  # so something has been quantized
    assert GRADIENT_DB < decibels(dx, x64.grad) < 40
    dw = decibels(model.weight.grad, twin.weight.grad)
    travels = kind in ("gather", "scatter") and recipe != "rowwise_with_gw_hp"
    in_float8 = travels or RECIPES[recipe].weight_gradient
    assert (GRADIENT_DB < dw < 40) if in_float8 else dw > 45
    assert decibels(model.bias.grad, twin.bias.grad) > 40
    ctx.check()


class Quantizations:
    """The shapes that are quantized in a block."""

    def __enter__(self):
        self.real, self.shapes = tkernels.quantize, []
        tkernels.quantize = lambda x, *options, **more: (
            self.shapes.append(tuple(x.shape)) or self.real(x, *options, **more)
        )
        return self

    def __exit__(self, *_):
        tkernels.quantize = self.real

    def weights(self, *shapes) -> int:
        """How often what has one of these shapes; the others are forgotten too."""
        found, self.shapes = sum(shape in shapes for shape in self.shapes), []
        return found


@pytest.mark.ranks(2)
def test_float8_copies_of_weights_are_kept_until_a_weight_may_have_changed(ctx):
    model = linear()
    parallelize_module(model.to(ctx.device), tp_mesh(ctx), styled("reduce", float8="rowwise"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    shapes = (N, K // 2), (K // 2, N)
    x, dy = normal((1, 8, K), torch.bfloat16, 1), normal((1, 8, N), torch.bfloat16, 2)

    def outputs():
        return run(ctx, model, "reduce", x, dy)

    def changes(how):
        before = outputs()
        quantized.weights()
        with torch.no_grad():
            how()
        after, made = outputs(), quantized.weights(*shapes)
        fresh = copy.deepcopy(model)
        assert isinstance(fresh._float8.copies, Copies) and fresh._float8.copies._made == {}
        want = run(ctx, fresh, "reduce", x, dy)
        quantized.weights()
        assert all(map(torch.equal, after, want))
        assert not torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])
        return made

    with Quantizations() as quantized:
        first = outputs()
        assert quantized.weights(*shapes) == 2  # as it is, and transposed
        for _ in range(2):  # further microbatches
            assert all(map(torch.equal, outputs(), first))
            assert quantized.weights(*shapes) == 0
        assert changes(lambda: model.weight.mul_(2)) == 2
        assert changes(lambda: model.weight.to_local()[0].add_(1)) == 2
        assert changes(optimizer.step) == 2
        assert (
            changes(lambda: model.load_state_dict({name: value * 3 for name, value in model.state_dict().items()})) == 2
        )
        assert changes(lambda: setattr(model, "weight", nn.Parameter(model.weight.detach() * 2))) == 2
        assert (
            changes(lambda: [model.weight.to_local().data.mul_(2), optimizer.zero_grad(), optimizer.step()]) == 2
        )  # writes that don't count
        assert changes(lambda: [torch._foreach_mul_([model.weight], 2), model.zero_grad()]) == 2
        model.requires_grad_(False).zero_grad()
        frozen = [(outputs(), quantized.weights(*shapes))[1] for _ in range(2)]
        assert frozen == [0, 0]
        at = x.to(ctx.device).requires_grad_()
        memory = torch.empty_like(model.weight.detach())
        for factor in (1, 2):  # frozen weights of one call each, of which the second lies where the first did
            memory.data.copy_(model.weight.detach() * factor)  # each .data has a count of writes of its own
            other = {"weight": memory.data, "bias": torch.zeros_like(model.bias)}
            ys = [torch.func.functional_call(model, other, at).detach() for _ in range(2)]
            assert torch.equal(*ys) and quantized.weights(*shapes) == 1
            del other
        assert decibels(ys[0], full(x) @ full(model.weight).t() * 2) > OUTPUT_DB
        model.requires_grad_()
        for _ in range(2):  # neither kept nor used where no gradient is recorded
            with torch.no_grad():
                model.weight._local_tensor.data.mul_(2)
                model(x.to(ctx.device).requires_grad_())
            assert quantized.weights(*shapes) == 1
    again = pickle.loads(pickle.dumps(model._float8.copies))
    assert again._made == {}
    ctx.check()


class Attention(nn.Module):
    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.q, self.k, self.v = linear(K, N, dtype), linear(K, 32, dtype, False, 5), linear(K, 32, dtype, True, 6)
        self.o = linear(160, K, dtype, True, 7)

    def forward(self, x):
        return self.o(torch.cat([self.q(x), self.k(x), self.v(x)], -1).relu_())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("split", [True, False])
def test_float8_siblings_are_one_product_of_all_their_weights(ctx, split):
    layouts = {"input_layouts": Shard(1) if split else Replicate(), "float8": "rowwise"}
    grouped, apart, twin = Attention(), Attention(), Attention().double()
    parallelize_module(grouped.to(ctx.device), tp_mesh(ctx), {"": ColwiseParallelGroup("q", "k", "v", **layouts)})
    parallelize_module(apart.to(ctx.device), tp_mesh(ctx), {"[qkv]": ColwiseParallel(**layouts)})
    x = normal((BATCH, SEQUENCE, K), torch.bfloat16, 1)
    x64 = x.double().requires_grad_()
    shard = x.chunk(ctx.size, 1)[ctx.rank] if split else x
    results = []
    for model in (grouped, apart):
        at = shard.clone().to(ctx.device).requires_grad_()
        with Quantizations() as quantized:
            ys = [each(at) for each in (model.q, model.k, model.v)]
        assert quantized.weights(tuple(at.reshape(-1, K).shape)) == (1 if model is grouped else 3)
        torch.cat(ys, -1).backward(torch.cat([torch.ones_like(y) for y in ys], -1))
        results.append(
            ([y.detach() for y in ys], at.grad, {n: p.grad for n, p in model.named_parameters() if "o." not in n})
        )
    assert all(map(torch.equal, results[0][0], results[1][0]))
    (twin.q(x64).sum() + twin.k(x64).sum() + twin.v(x64).sum()).backward()
    for _, dx, grads in results:
        want = x64.grad.chunk(ctx.size, 1)[ctx.rank] if split else x64.grad
        assert decibels(dx, want) > GRADIENT_DB
        for name, grad in grads.items():
            assert decibels(grad, twin.get_parameter(name).grad) > GRADIENT_DB, name
    ctx.check()


MEGATRON = [
    (ColumnParallelLinear, {"sequence_parallel": True}),
    (ColumnParallelLinear, {"sequence_parallel": True, "keep_gathered": False}),
    (ColumnParallelLinear, {"gather_output": True}),
    (RowParallelLinear, {"sequence_parallel": True}),
    (RowParallelLinear, {"input_is_parallel": False}),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind, options", MEGATRON)
def test_float8_is_an_option_of_megatrons_layers(ctx, kind, options):
    """Also of uneven rows, and of one that is empty."""
    layer = kind.from_linear(linear(), mesh=ctx, float8="rowwise", **options).to(ctx.device)
    twin, rows = linear().double(), (8, 0)
    assert "float8=rowwise" in repr(layer)
    x, dy = normal((8, 2, K), torch.bfloat16, 1), normal((8, 2, N), torch.bfloat16, 2)
    x64 = x.double().requires_grad_()
    want = twin(x64)
    want.backward(dy.double())
    split = options.get("sequence_parallel", False)
    column = kind is ColumnParallelLinear

    def mine(whole, by_rows, by_features):
        whole = whole.split(rows)[ctx.rank] if by_rows else whole
        return whole.chunk(ctx.size, -1)[ctx.rank].contiguous() if by_features else whole

    parallel = not column and options.get("input_is_parallel", True)
    at = mine(x, split and column, parallel).to(ctx.device).requires_grad_()
    y = layer(at, rows=rows if split else None)
    by_rows, by_features = split and not column, column and not options.get("gather_output")
    y.backward(mine(dy, by_rows, by_features).to(ctx.device))
    if y.numel():
        assert decibels(y, mine(want, by_rows, by_features)) > OUTPUT_DB
    if at.numel():
        assert decibels(at.grad, mine(x64.grad, split and column, parallel)) > GRADIENT_DB
    dw, db = layer.shard(twin.weight.grad, layer.partition_dim), twin.bias.grad
    assert decibels(layer.weight.grad, dw) > (45 if options.get("keep_gathered") is False else GRADIENT_DB)
    assert decibels(layer.bias.grad, layer.shard(db, 0) if column else db) > 40
    ctx.check()


@pytest.mark.quick
@pytest.mark.parametrize("activation", KNOWN)
def test_activated_gradient_has_the_bits_of_autograds(activation):
    for dtype in (torch.bfloat16, torch.float32):
        x = normal((3, 5, 32), dtype, 1).requires_grad_()
        with torch.no_grad():
            x[0, 0, ::3] = 0
        y = activated(x, activation)
        dy = normal(y.shape, dtype, 2)
        (want,) = torch.autograd.grad(y, x, dy)
        assert torch.equal(activated_gradient(dy, x.detach(), activation), want)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("activation, sequence_parallel", [("relu", True), ("swiglu", True), ("gelu", False)])
def test_parallel_mlp_quantizes_its_activation_in_one_kernel(ctx, monkeypatch, activation, sequence_parallel):
    """The same as activating before, but for fp32's last bits that "relu" doesn't round; and it keeps less."""
    torch.manual_seed(0)
    options = {"sequence_parallel": sequence_parallel, "dtype": torch.bfloat16, "mesh": ctx, "float8": "rowwise"}
    mlp = ParallelMLP(32, 64, activation, **options)
    x = normal((4, 2, 32), torch.bfloat16, 1 + sequence_parallel * ctx.rank, ctx.device)
    dy = normal((4, 2, 32), torch.bfloat16, 3 + sequence_parallel * ctx.rank, ctx.device)
    assert mlp.fc2.quantizes_activations

    def results(call):
        kept = []
        at = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
            y = call(at)
        y.backward(dy)
        grads = [parameter.grad for parameter in mlp.parameters()]
        mlp.zero_grad()
        parameters = {parameter.data_ptr() for parameter in mlp.parameters()}
        sizes = {each.data_ptr(): each.nbytes for each in kept if each.data_ptr() not in parameters}
        return [y.detach(), at.grad, *grads], sum(sizes.values())

    (fused, kept), (traced, _) = (
        results(call) for call in (mlp, torch.compile(mlp, fullgraph=True, backend="aot_eager"))
    )
    assert all(map(torch.equal, fused, traced))
    forward, given = mlp.fc2.forward, []
    mlp.fc2.forward = lambda x, rows=None: given.append(x) or forward(x, rows=rows)  # what replaces it knows no more
    wrapped, _ = results(mlp)
    del mlp.fc2.forward
    assert len(given) == 1 and (activation != "relu" or all(map(torch.equal, fused, wrapped)))
    monkeypatch.setattr(RowParallelLinear, "quantizes_activations", False)
    plain, kept_before = results(mlp)
    rows, tensors = 8 * (1 + sequence_parallel), {"relu": 0, "gelu": 1, "swiglu": 2}[activation]
    assert kept_before - kept == tensors * rows * 32 * 2  # bf16, of a rank's features
    for mine, theirs in zip(fused, plain, strict=True):
        assert torch.equal(mine, theirs) if activation == "relu" else decibels(mine, theirs) > 35
    with pytest.raises(ValueError, match="RowParallelLinear: activation='relu' must be .* apply it before"):
        mlp.fc2(x, activation="relu")
    ctx.check()


def least_decibels(quantized: int, gradients: int = 0, recipe: str = "rowwise") -> float:
    """What roundings of so many operands leave, gradients by the recipe's dtype of them, if all are independent.

    An element is off by up to half a step, evenly distributed, and half a step is at most 2^-4 of it in e4m3 and 2^-3
    in e5m2: its mean square is at most a third of that squared. One product, of two operands in e4m3, has 25.8 dB.
    """
    steps = torch.finfo(torch.float8_e4m3fn).eps, torch.finfo(RECIPES[recipe].gradient).eps
    return -10 * math.log10((quantized * (steps[0] / 2) ** 2 + gradients * (steps[1] / 2) ** 2) / 3)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_parallel_mlp_in_float8_is_near_the_same_in_bf16(ctx, recipe):
    """A layer's output at least 25 dB, and of both what the roundings on the way to each result leave.

    "silu" passes noise on no larger beside what it gives, in forward and in backward, where the noise of its input
    counts too.
    """
    found, x, dy = {}, *(normal((32, 2, 64), torch.bfloat16, seed).chunk(2)[ctx.rank] for seed in (1, 2))
    for float8 in (None, recipe):
        torch.manual_seed(0)
        options = {"sequence_parallel": True, "dtype": torch.bfloat16, "mesh": ctx, "float8": float8}
        mlp, mine = ParallelMLP(64, 128, "silu", **options), x.to(ctx.device, copy=True).requires_grad_()
        with torch.no_grad():
            h = mlp.fc1(mine)
        y = mlp(mine)
        y.backward(dy.to(ctx.device))
        found[float8] = {"h": h, "y": y, "dx": mine.grad} | {name: each.grad for name, each in mlp.named_parameters()}
    roundings = {"h": (2, 0), "y": (4, 0), "dx": (4, 2), "fc1.weight": (5, 2), "fc1.bias": (3, 1), "fc2.weight": (3, 1)}
    for name, counts in roundings.items():
        got, least = decibels(found[recipe][name], found[None][name]), least_decibels(*counts, recipe)
        assert least < got < 40, f"{name}: {got} dB, at least {least}"
    assert decibels(found[recipe]["h"], found[None]["h"]) > 25
    ctx.check()


@pytest.mark.ranks(2)
def test_float8_trains_a_model_beside_bf16(ctx):
    """The losses of 12 steps, those of FP8 within 3 % of bf16's."""

    def losses(float8):
        torch.manual_seed(0)
        model = ParallelMLP(32, 64, "swiglu", sequence_parallel=True, dtype=torch.bfloat16, mesh=ctx, float8=float8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        x = normal((16, 4, 32), torch.bfloat16, 1).chunk(ctx.size)[ctx.rank].to(ctx.device)
        target = x.roll(1, -1).float().tanh()
        found = []
        for _ in range(12):
            loss = functional.mse_loss(model(x).float(), target)
            loss.backward()
            layers.all_reduce_sequence_parallel_grads(model, mesh=ctx)
            optimizer.step()
            optimizer.zero_grad()
            found.append(sum(ctx.group.gather(loss.item())) / ctx.size)
        return found

    plain, rowwise = losses(None), losses("rowwise")
    assert plain[-1] < 0.7 * plain[0] and plain != rowwise
    assert rowwise == pytest.approx(plain, rel=0.03)
    ctx.check()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fully_shard", [torch_fully_shard, layers.fully_shard], ids=["torch", "ours"])
def test_float8_under_fully_shard_trains_as_without_it(ctx, fully_shard):
    """Of one tensor-parallel rank, over two that have the same batch. Gathers don't count as writes to a weight.

    Copies are made once a step, with shards once a microbatch, and then none is kept while a weight isn't gathered.
    """
    mesh = init_device_mesh(ctx.device.type, (2, 1), mesh_dim_names=("dp", "tp"))
    x = normal((4, 8, K), torch.bfloat16, 1).to(ctx.device)
    found = []
    for sharded in (False, True):
        model = nn.Sequential(linear(), nn.GELU(), linear(N, K, seed=9)).to(ctx.device)
        plan = {"0": ColwiseParallel(float8="rowwise"), "2": RowwiseParallel(float8="rowwise")}
        parallelize_module(model, mesh["tp"], plan)
        if sharded:
            fully_shard(model[0], mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
        losses = []
        for _ in range(3):
            with Quantizations() as quantized:
                for _ in range(2):
                    loss = model(x).float().square().mean()
                    loss.backward()
                    losses.append(loss.item())
            # Both weights, and the second one's transpose: x has no gradient.
            assert quantized.weights((N, K), (K, N)) == (6 if sharded else 3)
            kept = [len(each._float8.copies._made) for each in (model[0], model[2])]
            assert kept == ([0, 0] if sharded else [1, 2])
            with torch.no_grad():  # no optimizer, whose step would be noticed
                for parameter in model.parameters():
                    parameter.add_(parameter.grad, alpha=-0.5)
            model.zero_grad()
        found.append(losses)
    assert found[0] == found[1] and len(set(found[0])) == 3
    ctx.check()


def gathering(recipe: str):
    return RECIPES[recipe]._replace(gathers_weights=True)


class Gathers:
    """The dtypes and sizes of what tkernels.all_gather is given, while it is open."""

    def __enter__(self):
        self.seen, self._call = [], tkernels.all_gather
        self._patch = mock.patch.object(tkernels, "all_gather", self._note)
        self._patch.__enter__()
        return self

    def _note(self, x, **options):
        self.seen.append((x.dtype, x.numel()))
        return self._call(x, **options)

    def __exit__(self, *raised):
        self._patch.__exit__(*raised)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("recipe", ["tensorwise", "tensorwise_with_gw_fp8"])
@pytest.mark.parametrize("strategy", ["parameters", "gradients"])
def test_fully_shard_gathers_float8_weights_as_their_layers_quantize_them(ctx, strategy, recipe):
    """Bit for bit, over 2 data-parallel and perhaps 2 tensor-parallel ranks: siblings too, which have one scale."""
    mesh = init_device_mesh(ctx.device.type, (2, ctx.size // 2), mesh_dim_names=("dp", "tp"))
    x = normal((BATCH, SEQUENCE, K), torch.bfloat16, 1 + mesh.get_local_rank("dp")).to(ctx.device)
    found = []
    for float8 in (RECIPES[recipe], gathering(recipe)):
        model = Attention().to(ctx.device)
        plan = {"": ColwiseParallelGroup("q", "k", "v", float8=float8), "o": RowwiseParallel(float8=float8)}
        parallelize_module(model, mesh["tp"], plan)
        layers.fully_shard(model, mesh=mesh["dp"], strategy=strategy, reshard_after_forward=strategy == "parameters")
        optimizer, results = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        with Gathers() as gathers:
            for _ in range(3):
                for _ in range(2):
                    loss = model(x).float().square().mean()
                    loss.backward()
                results += [loss.item(), *(full(each.grad) for each in model.parameters())]
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    results.append(model(x).float().sum().item())
        results += [full(each) for each in model.parameters()]
        found.append([torch.as_tensor(each) for each in results])
        assert all(each.isfinite().all() for each in found[-1])
        weights = sum(each._local_tensor.numel() for each in model.parameters() if each.dim() == 2)
        widest = max(numel for dtype, numel in gathers.seen if dtype == torch.bfloat16)
        assert (weights <= widest) == (not float8.gathers_weights)
        assert ((torch.uint8, weights) in gathers.seen) == float8.gathers_weights
    assert all(map(torch.equal, *found))
    ctx.check()


@pytest.mark.ranks(2)
def test_fully_shard_gathers_float8_weights_of_fp32_masters(ctx):
    """Rounded once, of fp32, so not the bits of a gather in bf16. With checkpoints, compiled, and uneven rows."""
    x, y = (normal((6, width), torch.bfloat16, 1 + ctx.rank, ctx.device) for width in (48, 48))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = {}
    for name in ("exact", "plain", "gathered", "checkpointed", "compiled"):
        float8 = None if name == "exact" else RECIPES["tensorwise"]._replace(gathers_weights=name != "plain")
        first, second = linear(48, 80, torch.float32), linear(80, 48, torch.float32, seed=9)
        made = {"mesh": init_device_mesh(ctx.device.type, (2, 1), mesh_dim_names=("dp", "tp"))["tp"], "float8": float8}
        blocks = [ColumnParallelLinear.from_linear(first, **made), RowParallelLinear.from_linear(second, **made)]
        model = nn.Sequential(*blocks).to(ctx.device)
        layers.fully_shard(model, mesh=ctx, mp_policy=policy)
        call = torch.compile(model, backend="eager") if name == "compiled" else model
        if name == "checkpointed":
            call = functools.partial(checkpoint, model, use_reentrant=False)
        for _ in range(2):
            loss = functional.mse_loss(call(x).float(), y.float())
            loss.backward()
        found[name] = [loss.detach().cpu(), *(full(each.grad) for each in model.parameters())]
    assert all(map(torch.equal, found["gathered"], found["checkpointed"]))
    assert all(map(torch.equal, found["gathered"], found["compiled"]))
    assert not torch.equal(found["gathered"][0], found["plain"][0])
    for got, want in zip(found["gathered"][1:], found["exact"][1:], strict=True):
        assert decibels(got, want) > GRADIENT_DB
    ctx.check()


@pytest.mark.ranks(2)
def test_fully_shard_refuses_float8_weights_that_others_take(ctx):
    mesh = init_device_mesh(ctx.device.type, (2, 1), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"], mesh["tp"]
    model = nn.Sequential(linear(), linear(N, K)).to(ctx.device)
    parallelize_module(model, tp, {"0": ColwiseParallel(float8="tensorwise_with_fp8_gather")})
    whole = nn.Linear(K, N, dtype=torch.bfloat16, device=ctx.device)
    whole.weight = model[0].weight
    tied = r"^fully_shard: 0.0.weight is to be gathered in FP8 .*, but is also that of a Linear, .* untie"
    with pytest.raises(ValueError, match=tied):
        layers.fully_shard(nn.Sequential(model, whole), mesh=dp)
    frozen = nn.Linear(K, N, dtype=torch.bfloat16, device=ctx.device)
    frozen.scales = nn.Parameter(torch.ones(4, device=ctx.device).to(torch.float8_e4m3fn), requires_grad=False)
    layers.fully_shard(frozen, mesh=dp)(torch.ones(2, K, dtype=torch.bfloat16, device=ctx.device)).sum().backward()
    # Alone, and where nothing is split, there is nothing to gather.
    x, found = normal((8, K), torch.bfloat16, 1, ctx.device), []
    for float8 in ("tensorwise", "tensorwise_with_fp8_gather"):
        one = parallelize_module(linear().to(ctx.device), tp, ColwiseParallel(float8=float8))
        found.append(one(x).detach())
        layers.fully_shard(one, mesh=dp, strategy="replicate")
        found.append(one(x).detach())
    assert all(torch.equal(each, found[0]) for each in found)
    ctx.check()


@pytest.mark.ranks(2)
def test_float8_under_autocast_quantizes_fp32_weights_and_gives_fp32_gradients(ctx):
    model = nn.Sequential(linear(dtype=torch.float32), linear(N, K, torch.float32, seed=9))
    twin = copy.deepcopy(model).double()
    plan = {"0": ColwiseParallel(float8="rowwise"), "1": RowwiseParallel(float8="rowwise")}
    parallelize_module(model.to(ctx.device), tp_mesh(ctx), plan)
    x = normal((4, 8, K), torch.float32, 1)
    with torch.autocast(ctx.device.type, torch.bfloat16):
        y = model(x.to(ctx.device))
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    want = twin(x.double())
    want.square().sum().backward()
    assert decibels(y, want) > OUTPUT_DB - 3  # two layers
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.grad.dtype == torch.float32 and decibels(mine.grad, theirs.grad) > GRADIENT_DB
    ctx.check()


@pytest.mark.ranks(2)
def test_float8_is_refused_by_name(ctx):
    mesh = tp_mesh(ctx)
    with pytest.raises(ValueError, match="ColwiseParallel: float8='blockwise' is no recipe; use 'rowwise', "):
        ColwiseParallel(float8="blockwise")
    for style, sizes, what in (
        (ColwiseParallel, (24, 64), "24 in-features"),
        (ColwiseParallel, (64, 48), "24 out-features"),
        (RowwiseParallel, (48, 64), "24 in-features"),
        (RowwiseParallel, (64, 24), "24 out-features"),
    ):
        with pytest.raises(ValueError, match=f"'0' takes|'0': float8 takes .* multiples of 16 .* a rank has {what}"):
            parallelize_module(nn.Sequential(nn.Linear(*sizes)), mesh, {"0": style(float8="rowwise")})
    with pytest.raises(ValueError, match="ColumnParallelLinear: float8 takes .* has 24 out-features"):
        ColumnParallelLinear(64, 48, float8="rowwise", mesh=ctx)
    for beyond in ("weight_gradient", "gathers_weights"):
        with pytest.raises(ValueError, match='has scales of rows, .* take scale="tensor"'):
            ColwiseParallel(float8=RECIPES["rowwise"]._replace(**{beyond: True}))
    with pytest.raises(ValueError, match="RowParallelLinear: float8='fp8' is no recipe"):
        RowParallelLinear(64, 64, float8="fp8", mesh=ctx)
    with pytest.raises(TypeError, match="Embedding, but float8 is for linear layers"):
        parallelize_module(nn.Embedding(64, 64), mesh, RowwiseParallel(float8="rowwise", input_layouts=Replicate()))
    with pytest.raises(MismatchError, match="the plans of rank 0 and rank 1 differ"):
        parallelize_module(linear(), mesh, ColwiseParallel(float8=("rowwise", None)[ctx.rank]))
    model = parallelize_module(linear().to(ctx.device), mesh, ColwiseParallel(float8="rowwise"))
    x = torch.ones(2, K, dtype=torch.bfloat16, device=ctx.device, requires_grad=True)
    (dx,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable|does not require grad"):
        dx.sum().backward()
    for transform in (torch.vmap, lambda function: torch.func.grad(lambda x: function(x).sum())):
        with pytest.raises(NotImplementedError, match="^float8: torch.func .* can't follow .* leave float8 out$"):
            transform(ColumnParallelLinear.from_linear(linear(), mesh=ctx, float8="rowwise").to(ctx.device))(x.detach())
    ctx.check()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise_with_gw_fp8"])
def test_float8_layers_trace_without_a_break(ctx, recipe):
    layer = ColumnParallelLinear.from_linear(linear(), mesh=ctx, float8=recipe, sequence_parallel=True).to(ctx.device)
    x = normal((8, K), torch.bfloat16, 1 + ctx.rank, ctx.device)
    results = []
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        at = x.clone().requires_grad_()
        y = call(at)
        y.float().square().sum().backward()
        results.append([y.detach(), at.grad, layer.weight.grad])
        layer.zero_grad()
    assert all(map(torch.equal, *results))
    ctx.check()


@pytest.mark.ranks(2)
def test_parallelize_gives_float8_to_what_a_plan_names_by_a_word(ctx):
    class Model(nn.Sequential):
        def get_output_embeddings(self):
            return self[3]

    def recipes(model):
        return [getattr(each, "_float8", None) and each._float8.recipe for each in model]

    def made():
        torch.manual_seed(0)
        return Model(nn.Embedding(32, K), linear(), linear(N, K), linear(K, 32)).to(ctx.device)

    rowwise, tensorwise = RECIPES["rowwise"], RECIPES["tensorwise"]
    words = {"0": "embedding_rowwise", "1": "colwise", "2": "rowwise", "3": "colwise_gather_output"}
    model = parallelize(made(), words | {"2": RowwiseParallel()}, ctx, float8="rowwise")
    assert recipes(model) == [None, rowwise, None, None]
    assert recipes(parallelize(made(), words, ctx, float8="tensorwise")) == [None, tensorwise, tensorwise, None]
    assert recipes(parallelize(made(), words, ctx)) == [None] * 4  # a word's style is as it was
    megatron = {"1": "column", "2": {"style": "row", "float8": None}}
    assert recipes(parallelize(made(), megatron, ctx, float8="rowwise")) == [None, rowwise, None, None]
    with pytest.raises(ValueError, match="parallelize: float8='fp8' is no recipe"):
        parallelize(made(), words, ctx, float8="fp8")
    ctx.check()
