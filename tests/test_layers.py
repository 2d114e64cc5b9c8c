"""The layers against nn.Linear in fp64: outputs, all gradients, every option, state dicts, torch.compile."""

import copy
import functools
import pickle
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import tkernels
from tkernels import layers
from tkernels.comm import MismatchError, TkernelsError, as_context
from tkernels.layers import ColumnParallelLinear, OverlappedDDP, ParallelMLP, RowParallelLinear, ZeroOptimizer
from tkernels.testing.compare import assert_close_to, integers, normal


def linear(in_features, out_features, seed, *, values=normal, dtype=torch.float32, bias=True, device="cpu"):
    """A full nn.Linear with parameters of unit variance or small integers, the same on all ranks."""
    made = nn.Linear(in_features, out_features, bias, dtype=dtype, device=device)
    with torch.no_grad():
        made.weight.copy_(values((out_features, in_features), dtype, seed))
        if bias:
            made.bias.copy_(values((out_features,), dtype, seed + 1))
    return made


def double(module):
    """The same module on the CPU in fp64, the reference."""
    return copy.deepcopy(module).cpu().double()


def part(whole, sizes, rank, dim=0):
    return whole.split(list(sizes), dim)[rank]


def own_rows(whole, ctx):
    return part(whole, tkernels.split_rows(whole.shape[0], ctx.size), ctx.rank)


def leaf(x, ctx):
    return x.detach().to(ctx.device).clone().requires_grad_()


# Each layer alone: [s, b, K] -> [s, b, N] with s = 8, b = 3

S, B, K, N = 8, 3, 12, 20


def assert_matches_linear(ctx, layer, full, x, dy, got, got_dx, columns, x_rows, x_features, y_rows, y_features):
    """Output and gradients of one call. The slices say which part of the whole this rank holds; the sums have K, N and
    S * B terms, and one more for the bias. What travels between ranks is rounded once a rank."""
    reference, x = double(full), x.double().requires_grad_()
    want = reference(x)
    want.backward(dy.double())
    assert_close_to(got, want[y_rows][..., y_features], terms=K + 1, roundings=ctx.size)
    assert_close_to(got_dx, x.grad[x_rows][..., x_features], terms=N, roundings=ctx.size)
    features = (columns, slice(None)) if isinstance(layer, ColumnParallelLinear) else (slice(None), columns)
    assert_close_to(layer.weight.grad, reference.weight.grad[features], terms=S * B)
    assert_close_to(layer.bias.grad, reference.bias.grad[features[0]], terms=S * B)


def run_column(ctx, dtype, sequence_parallel, gather_output):
    full = linear(K, N, 1, dtype=dtype)
    layer = ColumnParallelLinear.from_linear(
        full, mesh=ctx, sequence_parallel=sequence_parallel, gather_output=gather_output
    ).to(ctx.device)
    x, dy = normal((S, B, K), dtype, 3), normal((S, B, N), dtype, 4)
    everything, size = slice(None), N // ctx.size
    columns = slice(ctx.rank * size, (ctx.rank + 1) * size)
    rows = slice(ctx.rank * S // ctx.size, (ctx.rank + 1) * S // ctx.size) if sequence_parallel else everything
    outputs = everything if gather_output else columns
    mine = leaf(x[rows], ctx)
    y = layer(mine)
    y.backward(dy[..., outputs].to(ctx.device))
    assert_matches_linear(ctx, layer, full, x, dy, y, mine.grad, columns, rows, everything, everything, outputs)


def run_row(ctx, dtype, sequence_parallel, input_is_parallel=True):
    full = linear(K, N, 5, dtype=dtype)
    layer = RowParallelLinear.from_linear(
        full, mesh=ctx, sequence_parallel=sequence_parallel, input_is_parallel=input_is_parallel
    ).to(ctx.device)
    x, dy = normal((S, B, K), dtype, 7), normal((S, B, N), dtype, 8)
    everything, size = slice(None), K // ctx.size
    columns = slice(ctx.rank * size, (ctx.rank + 1) * size)
    rows = slice(ctx.rank * S // ctx.size, (ctx.rank + 1) * S // ctx.size) if sequence_parallel else everything
    inputs = columns if input_is_parallel else everything
    mine = leaf(x[..., inputs], ctx)
    y = layer(mine)
    y.backward(dy[rows].to(ctx.device))
    assert_matches_linear(ctx, layer, full, x, dy, y, mine.grad, columns, everything, inputs, rows, everything)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("gather_output", [False, True], ids=["split", "gathered"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sequence"])
def test_column_parallel_linear_matches_linear(ctx, sequence_parallel, gather_output):
    run_column(ctx, torch.float32, sequence_parallel, gather_output)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    "options",
    [
        dict(sequence_parallel=False),
        dict(sequence_parallel=True),
        dict(sequence_parallel=False, input_is_parallel=False),
    ],
    ids=["replicated", "sequence", "splits its input"],
)
def test_row_parallel_linear_matches_linear(ctx, options):
    run_row(ctx, torch.float32, **options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sequence"])
def test_column_and_row_parallel_linear_match_linear_in_bf16(ctx, sequence_parallel):
    run_column(ctx, torch.bfloat16, sequence_parallel, gather_output=False)
    run_row(ctx, torch.bfloat16, sequence_parallel)


# Column and row layer together, on integers: fp32 is exact, so nothing but the right answer is equal


def mlp_and_reference(ctx, hidden, ffn_hidden, activation="relu", **options):
    """An MLP of integer parameters, and the full one as a function with nn.Linear modules fc1 and fc2."""
    blocks = 2 if activation == "swiglu" else 1
    values = integers if activation == "relu" else normal
    full = nn.ModuleDict(
        dict(
            fc1=linear(hidden, blocks * ffn_hidden, 11, values=values),
            fc2=linear(ffn_hidden, hidden, 13, values=values),
        )
    )
    torch.manual_seed(0)
    mlp = ParallelMLP(hidden, ffn_hidden, activation, mesh=ctx, **options)
    layers.load_full_state_dict(mlp, full.state_dict())
    return mlp, double(full)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    "sequence", [None, "divides by nothing", "all on the last rank"], ids=["replicated", "uneven", "zero rows"]
)
def test_parallel_mlp_is_exact_on_integers_with_uneven_features_and_rows(ctx, sequence):
    s, b, hidden, ffn_hidden = 7, 2, 5, 9
    rows = {
        None: None,
        "divides by nothing": tkernels.split_rows(s, ctx.size),
        "all on the last rank": (0,) * (ctx.size - 1) + (s,),
    }[sequence]
    mlp, reference = mlp_and_reference(ctx, hidden, ffn_hidden, sequence_parallel=rows is not None)
    x, dy = integers((s, b, hidden), torch.float32, 15), integers((s, b, hidden), torch.float32, 16)
    mine, dy_mine = (part(t, rows or (s,), ctx.rank if rows else 0) for t in (x, dy))

    for _ in range(2):  # signals of the first call must not satisfy the second one's waits
        mlp.zero_grad()
        mine = leaf(mine, ctx)
        y = mlp(mine, rows=rows)
        y.backward(dy_mine.to(ctx.device))

    x = x.double().requires_grad_()
    want = reference.fc2(reference.fc1(x).relu())
    want.backward(dy.double())
    assert torch.equal(y.cpu(), part(want, rows or (s,), ctx.rank if rows else 0).float())
    assert torch.equal(mine.grad.cpu(), part(x.grad, rows or (s,), ctx.rank if rows else 0).float())
    columns = mlp.fc1.feature_sizes
    assert columns == tkernels.split_rows(ffn_hidden, ctx.size)
    for got, full, dim in [
        (mlp.fc1.weight, reference.fc1.weight, 0),
        (mlp.fc1.bias, reference.fc1.bias, 0),
        (mlp.fc2.weight, reference.fc2.weight, 1),
    ]:
        assert torch.equal(got.grad.cpu(), part(full.grad, columns, ctx.rank, dim).float())
    assert torch.equal(mlp.fc2.bias.grad.cpu(), reference.fc2.bias.grad.float())


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "swiglu"])
def test_parallel_mlp_applies_its_activation(ctx, activation):
    """The weights are scaled so that every tensor has a variance of about 1. An error of the first product then passes
    through activation (slope 1.13 at most) and second product without growing, so the terms of both add up."""
    s, hidden, ffn_hidden = 4, 16, 12
    mlp, reference = mlp_and_reference(ctx, hidden, ffn_hidden, activation, sequence_parallel=True)
    with torch.no_grad():
        for module in (mlp, reference):
            module.fc1.weight /= hidden**0.5
            module.fc2.weight /= ffn_hidden**0.5
    rounded = double(layers_to_full(mlp))
    x = normal((s, hidden), torch.float32, 17)
    got = mlp(own_rows(x, ctx).to(ctx.device))
    h = rounded.fc1(x.double())
    if activation == "swiglu":
        gate, up = h.chunk(2, -1)
        h = nn.functional.silu(gate) * up
    else:
        h = tkernels.activations.activation_reference(h, activation)
    want = rounded.fc2(h)
    terms = hidden + ffn_hidden + 2
    # swiglu multiplies two values of order 1, at most 4 in a sample of this size: so much may an error of either grow
    scale = (4 if activation == "swiglu" else 1) / min(hidden, ffn_hidden) ** 0.5
    assert_close_to(got, own_rows(want, ctx), terms=terms, roundings=2, scale=scale)
    assert (want - rounded.fc2(rounded.fc1(x.double())[..., :ffn_hidden])).abs().max() > 0.1  # without an activation


def layers_to_full(mlp):
    """The nn.Linear modules that a parallel MLP's weights are the parts of. Collective."""
    state = layers.gather_state_dict(mlp)
    full = nn.ModuleDict()
    for name in ("fc1", "fc2"):
        weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
        full[name] = nn.Linear(weight.shape[1], weight.shape[0])
        full[name].load_state_dict({"weight": weight, "bias": bias})
    return full


# Options


@pytest.mark.ranks(2, 4)
def test_row_parallel_linear_adds_its_bias_once(ctx):
    full = linear(8, 6, 21, values=integers)
    x = integers((4, 8), torch.float32, 23)
    right = full(x)
    wrong = right + (ctx.size - 1) * full.bias
    for sequence_parallel in (False, True):
        layer = RowParallelLinear.from_linear(full, mesh=ctx, sequence_parallel=sequence_parallel).to(ctx.device)
        y = layer(part(x, layer.feature_sizes, ctx.rank, 1).to(ctx.device)).cpu()
        rows = slice(ctx.rank * 4 // ctx.size, (ctx.rank + 1) * 4 // ctx.size) if sequence_parallel else slice(None)
        assert torch.equal(y, right[rows])
        with pytest.raises(AssertionError, match="are off"):
            assert_close_to(y, wrong[rows].double(), terms=9, roundings=ctx.size, scale=8)


@pytest.mark.quick
@pytest.mark.ranks(2)
def test_row_parallel_linear_with_return_bias_leaves_the_bias_to_the_caller(ctx):
    x, dy = integers((4, 8), torch.float32, 25), integers((4, 6), torch.float32, 26)
    full = linear(8, 6, 27, values=integers)
    reference = double(full)
    reference(x.double()).backward(dy.double())
    mine = slice(2 * ctx.rank, 2 * ctx.rank + 2)

    column = ColumnParallelLinear.from_linear(full, mesh=ctx, return_bias=True, sequence_parallel=True).to(ctx.device)
    y, bias = column(x[mine].to(ctx.device))
    assert bias is column.bias
    columns = slice(3 * ctx.rank, 3 * ctx.rank + 3)
    assert torch.equal(y.cpu(), (x @ full.weight.t())[:, columns])
    (y + bias).backward(dy[:, columns].to(ctx.device))
    assert torch.equal(column.bias.grad.cpu(), reference.bias.grad[columns].float())

    row = RowParallelLinear.from_linear(full, mesh=ctx, return_bias=True, sequence_parallel=True).to(ctx.device)
    assert row.bias.sequence_parallel  # as long as the caller adds it to this rank's rows
    y, bias = row(x[:, 4 * ctx.rank : 4 * ctx.rank + 4].to(ctx.device))
    assert bias is row.bias
    assert torch.equal(y.cpu(), (x @ full.weight.t())[mine])
    (y + bias).backward(dy[mine].to(ctx.device))
    assert torch.equal(row.bias.grad.cpu(), dy[mine].sum(0))
    layers.all_reduce_sequence_parallel_grads(row, mesh=ctx)
    assert torch.equal(row.bias.grad.cpu(), reference.bias.grad.float())

    row.bias.grad = None if ctx.rank == 1 else torch.ones_like(row.bias)  # counts as zero, and takes the sum
    layers.all_reduce_sequence_parallel_grads(row, mesh=ctx)
    assert row.bias.grad.eq(1.0).all()
    row.bias.main_grad = torch.full_like(row.bias, ctx.rank + 1.0, dtype=torch.float32)
    layers.all_reduce_sequence_parallel_grads(row, mesh=ctx)
    assert row.bias.main_grad.eq(3.0).all() and row.bias.grad.eq(1.0).all()
    del row.bias.main_grad
    row.bias.requires_grad_(False).grad = None
    layers.all_reduce_sequence_parallel_grads(row, mesh=ctx)
    assert row.bias.grad is None
    row.bias.requires_grad_(True)
    alone = [torch.distributed.new_group([rank]) for rank in range(ctx.size)][ctx.rank]
    with tkernels.init(alone, heap_bytes=1 << 20, default=False) as dp:
        zero = layers.ZeroOptimizer([row.bias], torch.optim.SGD, lr=1.0, mesh=dp, tensor_parallel=ctx)
        with pytest.raises(ValueError, match="bias belongs to a ZeroOptimizer, .* leave out this call"):
            layers.all_reduce_sequence_parallel_grads(row, mesh=ctx)
        zero.remove()
    layers.all_reduce_sequence_parallel_grads(row, mesh=ctx)


@pytest.mark.ranks(2)
def test_clip_grad_norm_is_that_of_the_whole_model(ctx):
    full = nn.Sequential(linear(8, 6, 41, values=integers), nn.ReLU(), linear(6, 4, 43, values=integers))
    model = layers.parallelize(copy.deepcopy(full).to(ctx.device), {"0": "column", "2": "row"}, ctx)
    x, full = integers((5, 8), torch.float32, 45), double(full)
    full(x.double()).sum().backward()
    model(x.to(ctx.device)).sum().backward()
    model[2].bias.main_grad = model[2].bias.grad.clone()
    model[2].bias.grad = None
    want = nn.utils.clip_grad_norm_(full.parameters(), 2.0)
    norm = layers.clip_grad_norm_(model.parameters(), 2.0, mesh=ctx)
    assert_close_to(norm / want, torch.ones_like(want), terms=128)
    assert_close_to(model[0].weight.grad, model[0].shard(full[0].weight.grad, 0), terms=128)
    assert_close_to(model[2].bias.main_grad, full[2].bias.grad, terms=128)
    assert layers.clip_grad_norm_(nn.Parameter(torch.ones(2, device=ctx.device)), 1.0, mesh=ctx) == 0
    large = nn.Parameter(torch.ones(4096, device=ctx.device))  # of which every rank has a part
    alone = torch.distributed.new_group([ctx.rank], use_local_synchronization=True)
    model.zero_grad()
    ddp = layers.OverlappedDDP(copy.deepcopy(model), mesh=alone, overlap_param_gather=True)
    for parameters in (model.parameters(), ddp.owned_parameters()):  # a mesh of data-parallel ranks: of one
        with pytest.raises(ValueError, match="are split over 2 ranks .*, but mesh has 1; pass mesh=, the ranks that"):
            layers.clip_grad_norm_(parameters, 1.0, mesh=alone)
    ddp(x.to(ctx.device)).sum().backward()
    norm = layers.clip_grad_norm_(ddp.owned_parameters(), 9.0, mesh=ctx)
    assert_close_to(norm / want, torch.ones_like(want), terms=128)
    zero = layers.ZeroOptimizer([model[2].bias, large], torch.optim.SGD, lr=1.0, mesh=ctx)
    masters = [master for group in zero.param_groups for master in group["params"]]
    for parameters in (model.parameters(), masters):
        with pytest.raises(ValueError, match="belong to ZeroOptimizer, .* their gradients alone; pass max_norm="):
            layers.clip_grad_norm_(parameters, 1.0, mesh=ctx)
    zero.remove()


@pytest.mark.ranks(4)
def test_clip_grad_norm_over_the_stages_of_a_pipeline_is_that_of_the_whole_model(ctx):
    """2 stages x 2 tensor-parallel ranks; the second stage has a copy of the first one's norm."""
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("pp", "tp"))
    stage, part = divmod(ctx.rank, 2)
    split, whole, tied = (nn.Parameter(torch.zeros(shape, device=ctx.device)) for shape in ((3 + stage,), (2, 2), (5,)))
    split.tensor_model_parallel, tied.shared = True, stage == 1
    for parameter, value in ((split, 1.0 + ctx.rank), (whole, 5.0 + stage), (tied, 7.0)):
        parameter.grad = torch.full_like(parameter, value)
    want = (3 * (1 + 4) + 4 * (9 + 16) + 4 * (25 + 36) + 5 * 49) ** 0.5
    norm = layers.clip_grad_norm_([split, whole, tied], want / 2, mesh=mesh["tp"], pipeline=mesh["pp"])
    assert norm.item() == pytest.approx(want, rel=1e-6)
    assert_close_to(split.grad, torch.full_like(split, (1.0 + ctx.rank) / 2).double(), terms=128)
    assert_close_to(tied.grad, torch.full_like(tied, 3.5).double(), terms=128)


@pytest.mark.ranks(2)
def test_clip_grad_norm_without_mesh_counts_all_stages_of_the_current_contexts_ranks(ctx):
    """Each rank has a stage; the current context, over the same ranks, is not taken for one of copies of parameters."""
    pipeline = init_device_mesh(ctx.device.type, (2,), mesh_dim_names=("pp",))["pp"]
    own = nn.Parameter(torch.zeros(4 + ctx.rank, device=ctx.device))
    own.grad = torch.full_like(own, 2.0 + ctx.rank)
    want = (4 * 4 + 5 * 9) ** 0.5
    norm = layers.clip_grad_norm_(own, want / 2, pipeline=pipeline)
    assert norm.item() == pytest.approx(want, rel=1e-6)
    assert_close_to(own.grad, torch.full_like(own, 1.0 + ctx.rank / 2).double(), terms=128)
    with pytest.raises(ValueError, match=r"mesh has ranks \[0, 1\], of which .* have other stages of pipeline="):
        layers.clip_grad_norm_(own, 1.0, mesh=ctx, pipeline=pipeline)
    own.tensor_model_parallel = True
    with pytest.raises(ValueError, match="split over tensor-parallel ranks .* pass mesh="):
        layers.clip_grad_norm_(own, 1.0, pipeline=pipeline)


@pytest.mark.ranks(2)
def test_clip_grad_norm_under_torchs_fully_shard_needs_the_marks_that_it_drops(ctx):
    full = nn.Sequential(linear(8, 6, 41, values=integers), nn.ReLU(), linear(6, 4, 43, values=integers))
    model = layers.parallelize(copy.deepcopy(full).to(ctx.device), {"0": "column", "2": "row"}, ctx)
    split = {name: getattr(each, "tensor_model_parallel", False) for name, each in model.named_parameters()}
    torch_fully_shard(model, mesh=init_device_mesh(ctx.device.type, (1, 2), mesh_dim_names=("dp", "tp"))["dp"])
    x, full = integers((5, 8), torch.float32, 45), double(full)
    full(x.double()).sum().backward()
    model(x.to(ctx.device)).sum().backward()
    with pytest.raises(ValueError, match="FSDP2 drops them; use tkernels.layers.fully_shard"):
        layers.clip_grad_norm_(model.parameters(), 2.0, mesh=ctx)
    for name, parameter in model.named_parameters():
        parameter.tensor_model_parallel = split[name]
    want = nn.utils.clip_grad_norm_(full.parameters(), 2.0)
    norm = layers.clip_grad_norm_(model.parameters(), 2.0, mesh=ctx)
    assert_close_to(norm / want, torch.ones_like(want), terms=128)


@pytest.mark.ranks(2)
def test_column_parallel_linear_that_gathers_again_gives_the_same_gradients(ctx):
    full = linear(8, 6, 31, values=integers)
    x = integers((4, 8), torch.float32, 33)
    grads = []
    for keep_gathered in (True, False):
        layer = ColumnParallelLinear.from_linear(full, mesh=ctx, sequence_parallel=True, keep_gathered=keep_gathered)
        layer.to(ctx.device)
        y = layer(own_rows(x, ctx).to(ctx.device))
        kept = {tuple(saved.shape) for saved in y.grad_fn.saved_tensors}
        y.sum().backward()
        grads.append((layer.weight.grad, layer.bias.grad, (4, 8) in kept))
    (w, b, kept), (w_again, b_again, kept_again) = grads
    assert torch.equal(w, w_again) and torch.equal(b, b_again)
    assert kept and not kept_again


@pytest.mark.ranks(2)
def test_column_parallel_linear_keeps_gathered_rows_for_a_weights_gradient_alone(ctx):
    layer = ColumnParallelLinear.from_linear(linear(8, 6, 31), mesh=ctx, sequence_parallel=True).to(ctx.device)
    x, kept, product = torch.ones(2, 8, device=ctx.device), [], tkernels.all_gather_matmul

    def watched(*operands, return_gathered, **options):
        kept.append(return_gathered)
        return product(*operands, return_gathered=return_gathered, **options)

    with mock.patch.object(tkernels, "all_gather_matmul", watched):
        layer(x)
        with torch.no_grad():
            layer(x)
        layer.weight.requires_grad_(False)
        layer(x)
    assert kept == [True, False, False]


@pytest.mark.ranks(1, 2)
def test_column_and_row_parallel_linear_take_one_row_no_bias_and_frozen_weights(ctx):
    full = linear(4, 6, 35, values=integers, bias=False)
    full.eval().weight.requires_grad_(False)
    x = integers((4,), torch.float32, 36)
    column = ColumnParallelLinear.from_linear(full, mesh=ctx, gather_output=True).to(ctx.device)
    row = RowParallelLinear.from_linear(full, mesh=ctx, input_is_parallel=False).to(ctx.device)
    for layer in (column, row):
        assert layer.bias is None and not layer.weight.requires_grad and not layer.training
        assert layer.weight.tensor_model_parallel == (ctx.size > 1)
        mine = leaf(x, ctx)
        y = layer(mine)
        assert torch.equal(y.cpu(), full(x))
        y.sum().backward()
        assert torch.equal(mine.grad.cpu(), full.weight.sum(0))
    assert "bias=False" in repr(column)


@pytest.mark.ranks(2)
def test_column_and_row_parallel_linear_follow_autocast(ctx):
    full = linear(8, 6, 37)
    x = normal((4, 8), torch.float32, 38)
    column = ColumnParallelLinear.from_linear(full, mesh=ctx, sequence_parallel=True, gather_output=True).to(ctx.device)
    row = RowParallelLinear.from_linear(full, mesh=ctx, input_is_parallel=False).to(ctx.device)
    narrow = double(copy.deepcopy(full).bfloat16())
    want = narrow(x.bfloat16().double())
    for layer, given in [(column, own_rows(x, ctx)), (row, x)]:
        with torch.autocast(ctx.device.type, torch.bfloat16):
            y = layer(given.to(ctx.device))
        assert y.dtype is torch.bfloat16
        assert_close_to(y, want, terms=9, roundings=ctx.size)
        y.sum().backward()
        assert layer.weight.grad.dtype is torch.float32
    x, w = (normal(shape, torch.float32, 39, device=ctx.device).requires_grad_() for shape in ((4, 8), (6, 8)))
    with torch.autocast(ctx.device.type, torch.bfloat16):
        y = layers.column_parallel_linear(x, w, mesh=ctx)  # as the operators: autocast is up to layers
        y.sum().backward()
    assert y.dtype is x.grad.dtype is torch.float32
    assert_close_to(w.grad, x.detach().double().sum(0).expand(6, 8), terms=4)


# Weights: drawing, marks, copies


@pytest.mark.ranks(1, 2, 4)
def test_column_and_row_parallel_linear_begin_with_linears_weights_of_the_same_seed(ctx):
    torch.manual_seed(7)
    want, after = nn.Linear(6, 9), torch.rand(1)
    for make, dim in [(ColumnParallelLinear, 0), (RowParallelLinear, 1)]:
        torch.manual_seed(7)
        layer = make(6, 9, mesh=ctx, device="cpu")
        assert torch.rand(1) == after
        assert torch.equal(layer.weight, part(want.weight, layer.feature_sizes, ctx.rank, dim))
        state = layers.gather_state_dict(layer)
        assert torch.equal(state["weight"], want.weight) and torch.equal(state["bias"], want.bias)

    layer = ColumnParallelLinear(6, 9, mesh=ctx, init_method=lambda w: w.copy_(torch.arange(54).view(9, 6)))
    assert layer.weight[0, 0] == 6 * sum(layer.feature_sizes[: ctx.rank])
    assert not layer.bias.any()


@pytest.mark.ranks(2)
def test_column_parallel_linear_refuses_ranks_with_different_seeds(ctx):
    torch.manual_seed(ctx.rank)
    with pytest.raises(MismatchError, match=r"generators of rank 0 and rank 1 differ in state .*torch.manual_seed"):
        ColumnParallelLinear(4, 4, mesh=ctx)


@pytest.mark.ranks(2)
def test_column_and_row_parallel_linear_carry_the_marks_of_megatron(ctx):
    def marks(parameter):
        return parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride

    torch.manual_seed(0)
    mlp = ParallelMLP(4, 6, "swiglu", sequence_parallel=True, mesh=ctx)
    assert marks(mlp.fc1.weight) == marks(mlp.fc1.bias) == (True, 0, 2)
    assert marks(mlp.fc2.weight) == (True, 1, 1)
    assert marks(mlp.fc2.bias) == (False, -1, 1)
    assert not mlp.fc2.bias.sequence_parallel  # its gradient is the sum over all rows


class ByHand(nn.Module):
    """Layers that nobody has shown to parallelize, and between them a scale of each rank's own features."""

    def __init__(self, ctx, way):
        super().__init__()
        torch.manual_seed(0)
        self.way, self.norm = way, nn.LayerNorm(8, device=ctx.device)
        self.up = ColumnParallelLinear(8, 6, mesh=ctx)
        self.scale = nn.Parameter(torch.tensor([2.0, 3.0, 4.0], device=ctx.device))
        self.down = RowParallelLinear(6, 8, mesh=ctx)

    def forward(self, x):
        return self.down(self.up(self.norm(x)) * self.way(self.scale))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sharded", [False, True])
def test_column_parallel_linear_tells_the_optimizer_of_wholes_whose_gradients_differ(ctx, sharded):
    alone = [dist.new_group([rank]) for rank in range(ctx.size)][ctx.rank]
    x = normal((5, 8), torch.float32, 1).to(ctx.device)

    def warned(way=lambda scale: scale, *, x=x, steps=1, names=False, before=lambda model: None, **marks):
        """What the steps of an optimizer warn of, the same on every rank."""
        model = ByHand(ctx, way)
        vars(model.scale).update(marks)
        with tkernels.init(alone, heap_bytes=8 << 20, default=False) as dp:
            if sharded:
                layers.fully_shard(model, mesh=dp)
            optimizer = torch.optim.SGD(model.named_parameters() if names else model.parameters(), 1e-4)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(steps):
                    model(x).square().sum().backward()
                    before(model)
                    optimizer.step()
                    optimizer.zero_grad()
        said = [str(each.message) for each in caught if "SGD.step" in str(each.message)]
        assert all(each == said for each in ctx.group.gather(said))
        return said

    read = functools.partial(layers.copy_to_tensor_model_parallel_region, mesh=ctx)
    (said,) = warned()
    assert said.startswith("SGD.step: the gradients of parameter 0 [3] differ between ranks that have parts of the")
    assert "copy_to_tensor_model_parallel_region" in said
    assert len(warned(steps=9)) == 4  # 1, 2, 4 and 8
    own = normal((5, 8), torch.float32, 2 + ctx.rank).to(ctx.device)  # a batch of each rank's own
    assert warned(x=own, names=True)[0].startswith("SGD.step: the gradients of scale, norm.weight differ")
    assert not warned(read, steps=2)
    assert not warned(read, before=lambda model: layers.clip_grad_norm_(model.parameters(), 0.1, mesh=ctx))
    if not sharded:
        (said,) = warned(read, before=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        assert "in common differ between them by a factor, 1, " in said and "layers.clip_grad_norm_(" in said
    assert not warned(tensor_model_parallel=True)
    summed = functools.partial(layers.all_reduce_sequence_parallel_grads, mesh=ctx)
    assert not warned(before=summed, sequence_parallel=True)
    assert warned(sequence_parallel=True)
    layer = ColumnParallelLinear(8, 5, mesh=ctx)  # 3 features of rank 0, 2 of the other
    layer.scale = nn.Parameter(torch.ones_like(layer.bias))
    others = [(f"other {number}", nn.Parameter(x.clone())) for number in range(2)]
    optimizer = torch.optim.SGD([*layer.named_parameters(), *others], 0.1)
    (layer(x) * layer.scale).sum().backward()
    with pytest.warns(UserWarning, match="of scale differ"):
        optimizer.step()
    layer.scale.tensor_model_parallel = True
    optimizer.param_groups[0]["params"] = [*layer.parameters()]  # as what flattens parameters does, names aside
    optimizer.step()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("system", ["ZeroOptimizer", "OverlappedDDP"])
def test_zero_optimizer_and_overlapped_ddp_in_shards_tell_of_wholes_whose_gradients_differ(ctx, system):
    """By each rank's pieces, which are no others' where the parts of a layer differ in size."""
    mesh = init_device_mesh(ctx.device.type, (ctx.size // 2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"], as_context(mesh["tp"])
    x = normal((5, 8), torch.float32, 1 + dp.get_local_rank()).to(ctx.device)

    def warned(way=lambda scale: scale, uneven=False):
        model = ByHand(tp, way)
        if uneven:
            model.more = ColumnParallelLinear(8, 5, mesh=tp)
        if system == "ZeroOptimizer":
            call = model
            optimizer = ZeroOptimizer(
                model.named_parameters(), torch.optim.SGD, lr=1e-4, mesh=dp, tensor_parallel=tp, bucket_bytes=64,
                partition="elements",
            )  # fmt: skip
        else:
            call = OverlappedDDP(model, mesh=dp, overlap_param_gather=True, bucket_size=16)
            optimizer = torch.optim.SGD(call.owned_parameters(), 1e-4)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                y = call(x)
                (y.square().sum() + (model.more(x).square().sum() if uneven else 0)).backward()
                optimizer.step()
                optimizer.zero_grad()
        (call if system == "OverlappedDDP" else optimizer).remove()
        return [str(each.message) for each in caught if ".step: the gradients of" in str(each.message)]

    read = functools.partial(layers.copy_to_tensor_model_parallel_region, mesh=tp)
    assert not warned(read) and not warned(read, uneven=True)
    for features in (7, 9, 11):  # of which ranks cut what they have in common in other places
        torch.manual_seed(0)
        up, down = ColumnParallelLinear(8, features, mesh=tp), RowParallelLinear(features, 8, mesh=tp)
        model = nn.Sequential(nn.LayerNorm(8), up, down, nn.LayerNorm(8)).to(ctx.device)
        if system == "ZeroOptimizer":
            call = optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, mesh=dp, bucket_bytes=256)
        else:
            call = OverlappedDDP(model, mesh=dp, overlap_param_gather=True, bucket_size=64)
            optimizer = torch.optim.SGD(call.owned_parameters(), 0.1)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*the gradients of")
            for _ in range(2):
                (model if call is optimizer else call)(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        call.remove()
    for uneven in (False, True):
        found = tp.group.gather(warned(uneven=uneven))
        assert found[0] == found[1]
        about = {text.partition(" differ")[0].rpartition(" of ")[2].partition("[")[0] for text in found[0]}
        found = ctx.group.gather(about)
        assert set().union(*found) == {"scale"}, found


@pytest.mark.ranks(2)
def test_column_parallel_linear_names_what_lets_one_rank_step_alone(ctx):
    with tkernels.init(ctx.group.process_group, heap_bytes=8 << 20, timeout_s=2, default=False) as own:
        torch.manual_seed(0)
        layer = ColumnParallelLinear(8, 6, mesh=own)
        layer(torch.ones(5, 8, device=ctx.device)).sum().backward()
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        if ctx.rank == 0:  # as under torch.amp.GradScaler, where the other's part has overflowed
            with pytest.raises(tkernels.TkernelsError, match="SGD.step.*no call for 2 s.*ShardedGradScaler"):
                optimizer.step()
        ctx.barrier()
        own.reported = True


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["column", "row", "mlp", "column, row"])
def test_parallel_mlp_has_the_full_models_second_derivatives(ctx, kind):
    """A penalty on the gradient of the input, which is replicated, and its gradients by input and weights."""
    first, second = linear(K, N, 1), linear(N, K, 3)
    column = ColumnParallelLinear.from_linear(first, mesh=ctx, gather_output=kind == "column").to(ctx.device)
    row = RowParallelLinear.from_linear(second, mesh=ctx, input_is_parallel=kind != "row").to(ctx.device)
    parallel, full = {
        "column": ([column], [first]),
        "row": ([row], [second]),
        "mlp": ([column, nn.SiLU(), row], [first, nn.SiLU(), second]),
        "column, row": ([column, row], [first, second]),
    }[kind]
    parallel, full = nn.Sequential(*parallel), double(nn.Sequential(*full))
    x = normal((B, N if kind == "row" else K), torch.float32, 5)
    mine, whole = leaf(x, ctx), x.double().requires_grad_()
    for model, leaf_of in ((parallel, mine), (full, whole)):
        (dx,) = torch.autograd.grad((0.1 * model(leaf_of)).pow(3).sum(), leaf_of, create_graph=True)
        dx.square().sum().backward()
    pairs = [(mine.grad, whole.grad)]
    for layer, reference in zip(parallel, full, strict=True):
        if isinstance(reference, nn.Linear):
            pairs.append((layer.weight.grad, layer.shard(reference.weight.grad, layer.partition_dim)))
    for got, want in pairs:
        scale = want.abs().max().to(got.device)
        assert_close_to(got / scale, want.to(got.device) / scale, terms=64 * N)


@pytest.mark.ranks(2)
def test_parallel_mlp_and_the_mappings_under_torch_func(ctx):
    """Gradients by functional_call, of every sample by vmap, and of functions that map: as autograd's, and a loop's."""
    for sequence_parallel in (False, True):
        torch.manual_seed(0)
        mlp = ParallelMLP(6, 8, "relu", sequence_parallel=sequence_parallel, mesh=ctx)
        with torch.no_grad():
            for seed, parameter in enumerate(mlp.parameters()):
                own = ctx.rank if parameter.tensor_model_parallel else 0
                parameter.copy_(integers(parameter.shape, torch.float32, 10 * seed + own, -2, 2))
        own = ctx.rank if sequence_parallel else 0
        xs = torch.stack([integers((4, 6), torch.float32, 80 + 2 * at + own, -2, 2) for at in range(2)]).to(ctx.device)
        weights = dict(mlp.named_parameters())

        def loss(weights, x, mlp=mlp):
            return torch.func.functional_call(mlp, weights, (x,)).square().sum()

        looped = [torch.autograd.grad(mlp(x).square().sum(), list(weights.values())) for x in xs]
        whole = torch.func.grad(loss)(weights, xs[0])
        each = torch.vmap(torch.func.grad(loss), (None, 0))(weights, xs)
        mapped = torch.func.grad(lambda weights, loss=loss, xs=xs: torch.vmap(loss, (None, 0))(weights, xs).sum())(
            weights
        )
        for name, first, second in zip(weights, *looped, strict=True):
            assert torch.equal(whole[name], first), name
            assert torch.equal(each[name], torch.stack([first, second])), name
            assert torch.equal(mapped[name], first + second), name

    x = integers((2, 4, 6), torch.float32, 1, -2, 2, device=ctx.device)
    heavy = torch.arange(24.0, device=ctx.device).view(4, 6) * (1 + ctx.rank)
    for function in (
        layers.copy_to_tensor_model_parallel_region,
        layers.scatter_to_tensor_model_parallel_region,
        layers.gather_from_tensor_model_parallel_region,
    ):

        def slope(x, function=function):
            y = function(x * heavy, mesh=ctx)
            return (y * torch.ones_like(y).cumsum(0)).sum()

        leaves = [each.clone().requires_grad_() for each in x]
        looped = torch.stack([torch.autograd.grad(slope(each), each)[0] for each in leaves])
        assert torch.equal(torch.vmap(torch.func.grad(slope))(x), looped), function.__name__
        mapped = torch.func.grad(lambda x, slope=slope: torch.vmap(slope)(x).sum())(x)
        assert torch.equal(mapped, looped), function.__name__


@pytest.mark.ranks(2)
def test_parallel_mlp_keeps_marks_of_parameters_that_are_made_anew(ctx):
    made = RowParallelLinear(K, N, sequence_parallel=True, return_bias=True, mesh=ctx)
    empty = RowParallelLinear(K, N, sequence_parallel=True, return_bias=True, mesh=ctx, device="meta")
    assigned = RowParallelLinear(K, N, sequence_parallel=True, return_bias=True, mesh=ctx, device="meta")
    assigned.load_state_dict(made.state_dict(), assign=True)
    copies = copy.deepcopy(made), pickle.loads(pickle.dumps(made)), empty.to_empty(device=ctx.device), made.half()
    for layer in (*copies, assigned):
        assert layer.bias.sequence_parallel and not layer.bias.tensor_model_parallel
        assert layer.weight.tensor_model_parallel and layer.weight.partition_dim == 1
    plain = nn.Linear(K, N)
    plain.weight.no_weight_decay = True  # a program's own
    assert RowParallelLinear.from_linear(plain, mesh=ctx).double().weight.no_weight_decay
    made.bias.sequence_parallel = False  # somebody knows better
    assert not made.float().bias.sequence_parallel
    del made.bias
    made.half()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("init_method", [None, nn.init.xavier_normal_], ids=["default", "init_method"])
def test_parallel_mlp_draws_weights_again_and_late_as_at_construction(ctx, init_method):
    for kind, device in ((ColumnParallelLinear, None), (ColumnParallelLinear, "meta"), (RowParallelLinear, "meta")):
        torch.manual_seed(3)
        made = kind(K, N, init_method=init_method, mesh=ctx)
        after = torch.rand(3, device=ctx.device)
        layer = kind(K, N, init_method=init_method, device=device, mesh=ctx)
        layer.weight.requires_grad_(False)
        torch.manual_seed(3)
        layer.reset_parameters()
        assert torch.equal(torch.rand(3, device=ctx.device), after)
        assert torch.equal(layer.weight, made.weight) and torch.equal(layer.bias, made.bias)
        assert layer.weight.tensor_model_parallel and not layer.weight.requires_grad and layer.bias.requires_grad
    torch.manual_seed(ctx.rank)
    with pytest.raises(MismatchError, match="generators of rank 0 and rank 1 differ in state"):
        layer.reset_parameters()


@pytest.mark.ranks(2)
def test_column_and_row_parallel_linear_can_be_copied_and_pickled(ctx):
    torch.manual_seed(0)
    layer = RowParallelLinear(4, 3, mesh=ctx)
    x = torch.ones(2, 2, device=ctx.device)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))
    other._rank = 1 - ctx.rank  # pickled by the other rank
    with pytest.raises(MismatchError, match=rf"part of rank {1 - ctx.rank} of .* here that of rank {ctx.rank}"):
        other(x)


@pytest.mark.ranks(2)
def test_column_parallel_linear_sums_the_gradient_though_a_rank_has_no_features(ctx):
    x = integers((3, 4), torch.float32, 1, device=ctx.device).requires_grad_()
    w = integers((1, 4), torch.float32, 2, device=ctx.device).split((1, 0))[ctx.rank].clone().requires_grad_()
    dy = integers((3, 1), torch.float32, 3, device=ctx.device)
    layers.column_parallel_linear(x, w, mesh=ctx).backward(dy.split((1, 0), 1)[ctx.rank])
    assert torch.equal(x.grad, dy @ integers((1, 4), torch.float32, 2, device=ctx.device))
    assert torch.equal(w.grad, (dy.t() @ x).split((1, 0))[ctx.rank])


# Refusals


@pytest.mark.ranks(2)
def test_column_parallel_linear_and_its_kin_refuse_wrong_arguments_by_name(ctx):
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"ColumnParallelLinear\(4, 1\): 1 out-features can't be split over 2 ranks"):
        ColumnParallelLinear(4, 1, mesh=ctx)
    with pytest.raises(ValueError, match=r"RowParallelLinear\(1, 4\): 1 in-features"):
        RowParallelLinear(1, 4, mesh=ctx)
    with pytest.raises(ValueError, match="sequence_parallel=True takes input_is_parallel=True"):
        RowParallelLinear(4, 4, sequence_parallel=True, input_is_parallel=False, mesh=ctx)
    with pytest.raises(ValueError, match="gather_output=True takes partition_stride=1"):
        ColumnParallelLinear(4, 4, gather_output=True, partition_stride=2, mesh=ctx)
    with pytest.raises(ValueError, match="activation='tanh' is unknown; use relu, .*, swiglu, .* or reglu"):
        ParallelMLP(4, 4, "tanh", mesh=ctx)

    for error, message, wrong in (  # on one rank alone, while the other makes a layer
        (TypeError, "ColumnParallelLinear: out_features='4' must be a whole number", {"out_features": "4"}),
        (TypeError, "ColumnParallelLinear: dtype=torch.int64 has no gradient", {"dtype": torch.int64}),
        (ValueError, "ColumnParallelLinear: device='nowhere' is none that parameters", {"device": "nowhere"}),
        (TypeError, "ColumnParallelLinear: init_method=3 must be a function", {"init_method": 3}),
        (TypeError, "ColumnParallelLinear: sequence_parallel='no' must be True or", {"sequence_parallel": "no"}),
        (TypeError, "ColumnParallelLinear: bias=3 must be True or False", {"bias": 3}),
    ):
        with pytest.raises(error, match=rf"{message}(?s:.*) \(on rank 1\)"):
            ColumnParallelLinear(**{"in_features": 4, "out_features": 4} | (wrong if ctx.rank else {}), mesh=ctx)
    with pytest.raises(ValueError, match=r"activation=3 is unknown; .* \(on rank 1\)"):
        ParallelMLP(4, 4, 3 if ctx.rank else "gelu", mesh=ctx)

    row = RowParallelLinear(4, 4, mesh=ctx)
    with pytest.raises(ValueError, match=r"is 4, but must be 2, rank \d's part of 4 in-features"):
        row(torch.ones(2, 4))
    with pytest.raises(ValueError, match="last dimension is missing, but must be 2"):
        row(torch.ones(()))
    with pytest.raises(ValueError, match=r"rows=\(1, 1\) splits a sequence, but .* sequence_parallel=False"):
        row(torch.ones(2, 2), rows=(1, 1))
    row = RowParallelLinear(4, 4, sequence_parallel=True, mesh=ctx)
    with pytest.raises(ValueError, match=r"M=3 rows don't divide by 2 ranks; pass rows=split_rows\(3, 2\)"):
        row(torch.ones(3, 2, 2))  # 6 rows of 2 would divide, in the middle of a position
    with pytest.raises(ValueError, match="first of at least two dimensions"):
        row(torch.ones(2))
    with pytest.raises(ValueError, match=r"5 features can't be split over 2 ranks.*split_rows\(5, 2\)"):
        layers.scatter_to_tensor_model_parallel_region(torch.ones(5), mesh=ctx)
    for sizes in ((2, 2), (2, 2, 1)):
        with pytest.raises(ValueError, match=rf"5 features .* over 2 ranks as sizes=\({str(sizes)[1:-1]}\)"):
            layers.scatter_to_tensor_model_parallel_region(torch.ones(5), sizes=sizes, mesh=ctx)
    with pytest.raises(TypeError, match="column_parallel_linear"):
        x = torch.ones(2, 4, device=ctx.device)
        layers.column_parallel_linear(x, x.half(), mesh=ctx)
    own = layers.scatter_to_tensor_model_parallel_region(torch.ones(3, 4), mesh=ctx)
    assert own.is_contiguous() and own.untyped_storage().nbytes() == own.nbytes  # it outlives the whole


@pytest.mark.ranks(2)
def test_column_parallel_linear_and_its_kin_refuse_what_is_no_tensor_no_layer_and_no_size_by_name(ctx):
    torch.manual_seed(0)
    column, x = ColumnParallelLinear(4, 4, mesh=ctx), torch.ones(2, 4, device=ctx.device)
    mappings = [
        layers.scatter_to_tensor_model_parallel_region,
        layers.gather_from_tensor_model_parallel_region,
        layers.scatter_to_sequence_parallel_region,
        lambda x, **options: layers.gather_from_sequence_parallel_region(
            x, tensor_parallel_output_grad=False, **options
        ),
    ]
    for wrong in (None, [[1.0] * 4] * 2, x.to_sparse()):
        for call in (lambda x, mesh: column(x), *mappings):
            with pytest.raises(TypeError, match=r"(Linear|_region): x.* must be a (strided )?tensor"):
                call(wrong, mesh=ctx)
    with pytest.raises(TypeError, match="tensor_parallel_output_grad=.* must be True or False"):
        layers.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=x, mesh=ctx)
    for call in mappings:
        with pytest.raises(ValueError, match="_region: .* x is a scalar"):
            call(torch.ones((), device=ctx.device), mesh=ctx)
    with pytest.raises(TypeError, match="copy_to_tensor_model_parallel_region: x=None must be a tensor"):
        layers.copy_to_tensor_model_parallel_region(None, mesh=ctx)
    with pytest.raises(TypeError, match="column_parallel_linear: bias=3 must be a tensor"):
        layers.column_parallel_linear(x, x, 3, mesh=ctx)
    with pytest.raises(ValueError, match="is on meta, but the operation runs on"):
        column(torch.ones(2, 4, device="meta"))
    for error, sizes in ((ValueError, (5, -1)), (TypeError, (2.0, 2.0)), (TypeError, 4)):
        for call in mappings[:2]:
            with pytest.raises(error, match="tensor_model_parallel_region: (a size|sizes)="):
                call(x, sizes=sizes, mesh=ctx)
    for options, error in (((-4, 4), ValueError), ((4.0, 4), TypeError), ((4, "x"), TypeError)):
        with pytest.raises(error, match="ColumnParallelLinear: (in|out)_features=.* must be"):
            ColumnParallelLinear(*options, mesh=ctx)
    with pytest.raises(ValueError, match="partition_stride=0 must be at least 1"):
        ColumnParallelLinear(4, 4, partition_stride=0, mesh=ctx)
    with pytest.raises(TypeError, match=r"RowParallelLinear.from_linear: linear=.* must be an nn.Linear"):
        RowParallelLinear.from_linear(nn.Conv1d(2, 2, 1), mesh=ctx)
    for options in (
        {"dtype": (torch.float32, torch.float16)[ctx.rank]}, {"gather_output": ctx.rank == 0},
        {"return_bias": ctx.rank == 0}, {"keep_gathered": ctx.rank == 0},
    ):  # fmt: skip
        torch.manual_seed(0)
        with pytest.raises(MismatchError, match=f"of rank 0 and rank 1 differ in {next(iter(options))} .*; all must"):
            ColumnParallelLinear(4, 4, mesh=ctx, **options)
    torch.manual_seed(0)
    with pytest.raises(MismatchError, match="init_method: .* differ, in the weight's norm by rank: 4.0, 0.0"):
        RowParallelLinear(4, 4, mesh=ctx, init_method=(nn.init.ones_, nn.init.zeros_)[ctx.rank])
    with pytest.raises(TkernelsError, match="no such generator"):
        RowParallelLinear(4, 4, mesh=ctx, init_method=fails if ctx.rank else nn.init.ones_)
    with pytest.raises(MismatchError, match="ParallelMLP: .* in activation by rank: gelu, relu"):
        ParallelMLP(4, 8, ("gelu", "relu")[ctx.rank], mesh=ctx)


def fails(weight):
    raise RuntimeError("no such generator")


class Halved(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_from_linear_refuses_what_the_layer_would_lose(ctx, kind):
    def watched(linear):
        linear.weight.register_hook(lambda grad: grad * 2)
        return linear

    def hooked(linear):
        linear.register_forward_hook(lambda module, x, y: y * 2)
        return linear

    for wrong, message in (
        (torch.nn.utils.parametrizations.weight_norm(linear(4, 6, 1)), "the linear is parametrized"),
        (torch.nn.utils.spectral_norm(linear(4, 6, 1)), "the linear has forward_pre and .* hooks"),
        (watched(linear(4, 6, 1)), "the linear has parameters' hooks"),
        (hooked(linear(4, 6, 1)), "the linear has forward hooks"),
        (Halved(4, 6), "the linear is a Halved with a forward of its own"),
    ):
        with pytest.raises(ValueError, match=f"{kind.__name__}.from_linear: {message}.*which the new layer would lose"):
            kind.from_linear(wrong, mesh=ctx)
    kind.from_linear(nn.modules.linear.NonDynamicallyQuantizableLinear(4, 6), mesh=ctx)  # attention's, which adds none


@pytest.mark.ranks(2)
def test_parallel_layers_refuse_norms_of_whole_weights(ctx):
    """By which each rank would divide by what its own part gives, but for those that lie in one rank."""
    norms = torch.nn.utils.parametrizations
    ways = [norms.spectral_norm, norms.orthogonal, torch.nn.utils.spectral_norm]
    column, row = (functools.partial(kind, 4, 6, mesh=ctx) for kind in (ColumnParallelLinear, RowParallelLinear))
    wrong = [(make, way) for make in (column, row) for way in ways]
    wrong += [(row, norms.weight_norm), (column, functools.partial(norms.weight_norm, dim=1))]
    for make, way in wrong:
        torch.manual_seed(0)
        layer = way(make())
        with pytest.raises(ValueError, match="ParallelLinear: the weight is this rank's part, and .* for the whole"):
            layer(torch.ones(2, layer.weight.shape[1], device=ctx.device))
    torch.manual_seed(0)
    full = nn.Linear(4, 6).to(ctx.device)
    layer = norms.weight_norm(ColumnParallelLinear.from_linear(full, mesh=ctx, gather_output=True))
    torch.compile(layer, backend="eager")(torch.ones(2, 4, device=ctx.device))
    x, optimizer = torch.ones(2, 4, device=ctx.device), torch.optim.SGD(layer.parameters(), 0.1)
    full = norms.weight_norm(full)
    layer(x).square().sum().backward()
    full(x).square().sum().backward()
    mine = full.parametrizations.weight.original0.grad.chunk(2)[ctx.rank]
    torch.testing.assert_close(layer.parametrizations.weight.original0.grad, mine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()  # these parts may differ


@pytest.mark.ranks(2)
def test_torch_wrappers_over_the_ranks_of_parts_are_refused(ctx):
    """As far as they show what they do: they take parts for replicas."""
    torch.manual_seed(0)
    mesh = init_device_mesh(ctx.device.type, (2,))
    with pytest.raises(ValueError, match=r"weight is split over ranks \[0, 1\], .* a DTensor over ranks \[0, 1\]"):
        torch_fully_shard(nn.Sequential(ColumnParallelLinear(4, 6, mesh=ctx)), mesh=mesh)
    layer = RowParallelLinear(4, 6, mesh=ctx)
    ranks = dict(process_group=ctx.group.process_group)
    optimizer = ZeroRedundancyOptimizer(layer.parameters(), torch.optim.SGD, **ranks, lr=0.1)
    layer(torch.ones(2, 2, device=ctx.device)).sum().backward()
    with pytest.raises(ValueError, match=r"parameter 0, of shape \(6, 2\), is split over ranks \[0, 1\]"):
        optimizer.step()
    with torch.no_grad():
        layer.weight.fill_(1.0)  # equal parts, which tell nobody
    for wrap in (
        lambda: OverlappedDDP(nn.Sequential(layer), mesh=ctx),
        lambda: layers.fully_shard(nn.Sequential(layer), mesh=ctx),
        lambda: ZeroOptimizer(layer.parameters(), torch.optim.SGD, lr=0.1, mesh=ctx),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"is split over ranks \[0, 1\], and of each another part is trained"):
            wrap()


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        raise RuntimeError("no such forward")


@pytest.mark.ranks(2)
def test_column_parallel_linear_runs_after_another_models_forward_has_failed_in_torchs_replicate(ctx):
    """Which leaves that model's DistributedDataParallel as the active one."""
    other = replicate(Fails().to(ctx.device))
    with pytest.raises(RuntimeError, match="no such forward"):
        other(torch.ones(2, device=ctx.device))
    try:
        assert nn.parallel.DistributedDataParallel._active_ddp_module is not None
        torch.manual_seed(0)
        assert ColumnParallelLinear(4, 6, mesh=ctx)(torch.ones(2, 4, device=ctx.device)).shape == (2, 3)
    finally:
        nn.parallel.DistributedDataParallel._active_ddp_module = None


@pytest.mark.ranks(2)
def test_parallel_layers_tell_of_parts_that_are_the_same_on_all_ranks(ctx):
    torch.manual_seed(0)
    made = [kind(8, 8, bias=False, mesh=ctx) for kind in (ColumnParallelLinear, RowParallelLinear)]
    model = nn.Sequential(made[0], nn.Tanh(), made[1])
    x = normal((4, 8), torch.float32, seed=5, device=ctx.device)

    def step():
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
    torch.manual_seed(1)
    for layer in made:
        nn.init.normal_(layer.weight)
    with pytest.warns(UserWarning, match="AdamW.step: parameter 0 .*, parameter 1 .* are the same on all ranks"):
        step()
    torch.manual_seed(1)
    column, row = (kind(8, 8, bias=False, mesh=ctx) for kind in (ColumnParallelLinear, RowParallelLinear))
    nn.init.ones_(column.weight)  # whose gradients tell ranks apart
    frozen = ColumnParallelLinear(8, 8, bias=False, mesh=ctx, init_method=nn.init.ones_).requires_grad_(False)
    row(column(x)).square().sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.optim.SGD([*column.parameters(), *row.parameters(), *frozen.parameters()], 0.0).step()


@pytest.mark.ranks(2)
def test_load_full_state_dict_and_wrappers_refuse_what_is_no_module_and_no_tensor_by_name(ctx):
    torch.manual_seed(0)
    model = nn.Sequential(ColumnParallelLinear(4, 4, mesh=ctx))
    full = {"0.weight": torch.ones(4, 4), "0.bias": torch.ones(4)}
    for error, wrong in ((TypeError, None), (TypeError, [[1.0]]), (ValueError, torch.tensor(1.0))):
        with pytest.raises(error, match="load_full_state_dict: 0.weight"):
            layers.load_full_state_dict(model, full | {"0.weight": wrong})
    for wrong in (None, [("0.weight", torch.ones(4, 4))], "model.pt"):
        with pytest.raises(TypeError, match="load_full_state_dict: full=.* must be a dict of full tensors"):
            layers.load_full_state_dict(model, wrong)
    with pytest.raises(TypeError, match="load_full_state_dict: strict='no' must be True or False"):
        layers.load_full_state_dict(model, full, strict="no")
    with pytest.raises(TypeError, match="gather_state_dict: rank0_only='no' must be True or False"):
        layers.gather_state_dict(model, rank0_only="no")
    for call in (
        layers.gather_state_dict,
        layers.sharded_state_dict,
        lambda module: layers.load_full_state_dict(module, full),
        lambda module: layers.OverlappedDDP(module, mesh=ctx),
        lambda module: layers.FullyShard(module, nn.Linear, mesh=ctx),
    ):
        with pytest.raises(TypeError, match=r"(model|module)=None must be an nn.Module"):
            call(None)
    with pytest.raises(TypeError, match="P2PCommunicator: dtype='x' must be a torch.dtype"):
        layers.P2PCommunicator(ctx, dtype="x")
    elsewhere = torch.cpu if ctx.device.type == "cuda" else torch.cuda
    with pytest.raises(TypeError, match=f"P2PCommunicator: dev={elsewhere.__name__} must be torch.{ctx.device.type}"):
        layers.P2PCommunicator(ctx, dev=elsewhere)
    with pytest.raises(TypeError, match="P2PCommunicator: backend=3 is unknown; use 'tkernels' or 'torch'"):
        layers.P2PCommunicator(ctx, backend=3)


def test_grad_ready_hooks_refuse_a_parameter_of_others():
    own, other = (nn.Parameter(torch.ones(2)) for _ in range(2))
    own.main_grad = torch.zeros(2)
    hooks = layers.GradReadyHooks([own], lambda bucket: None, buckets=[object()])
    for report in (hooks.defer, hooks.produced):
        for wrong in (other, None):
            with pytest.raises(ValueError, match="reported for what is none of its parameters"):
                report(wrong)
    assert not hooks.waiting


@pytest.mark.ranks(2)
def test_clip_grad_norm_takes_every_dense_gradient_and_refuses_the_rest_on_every_rank(ctx):
    def parameter(grad):
        parameter = nn.Parameter(torch.zeros(2, dtype=grad.dtype, device=ctx.device))
        parameter.grad = grad.to(ctx.device)
        return parameter

    wide = [parameter(torch.tensor([3.0, 4.0], dtype=dtype)) for dtype in (torch.float64, torch.complex64)]
    norm = layers.clip_grad_norm_(wide, 1.0, mesh=ctx)
    torch.testing.assert_close(norm.item(), 50**0.5)
    for each in wide:
        torch.testing.assert_close(each.grad.abs().double().cpu(), torch.tensor([3.0, 4.0]).double() / 50**0.5)

    whole = parameter(torch.ones(2))
    norm = layers.clip_grad_norm_(whole, 9.0, 2.0, error_if_nonfinite=True, foreach=True, mesh=ctx)
    assert norm.item() == pytest.approx(2**0.5)
    overflown = parameter(torch.tensor([float("inf")] * 2))
    with pytest.raises(RuntimeError, match="the norm of all gradients is inf; no gradient was changed"):
        layers.clip_grad_norm_([whole, overflown], 1.0, error_if_nonfinite=True, mesh=ctx)
    for options, error in (
        ({"norm_type": float("inf")}, ValueError), ({"norm_type": torch.ones(2)}, ValueError),
        ({"error_if_nonfinite": "no"}, TypeError),
    ):  # fmt: skip
        with pytest.raises(error, match=f"clip_grad_norm_: {next(iter(options))}="):
            layers.clip_grad_norm_(whole, 1.0, mesh=ctx, **options)
    sparse = parameter(torch.ones(2).to_sparse())
    elsewhere = nn.Parameter(torch.ones(2, device="meta"))  # rank 0 alone counts it, but all are to raise
    elsewhere.grad = torch.ones(2, device="meta")
    for error, message, parameters, max_norm in (
        (TypeError, "gradient must be a strided tensor", [whole, sparse], 1.0),
        (ValueError, r"gradient of the parameter of \(2,\) is on meta, but the", [whole, elsewhere], 1.0),
        (TypeError, "parameter=None must be a tensor", [whole, None], 1.0),
        (TypeError, "max_norm='1' must be a number", [whole], "1"),
        (TypeError, "max_norm=.* must be a number", [whole], torch.ones(1) * 1j),
        (TypeError, "(?s)parameters=Linear.* must be parameters, as a module's", nn.Linear(2, 2), 1.0),
        (TypeError, "parameters=None must be parameters", None, 1.0),
        (ValueError, "max_norm=-1.0 must not be negative", [whole], -1.0),
        (ValueError, "max_norm=nan must not be", [whole], float("nan")),
    ):
        with pytest.raises(error, match=message):
            layers.clip_grad_norm_(parameters, max_norm, mesh=ctx)
    assert whole.grad.tolist() == [1.0, 1.0]


@pytest.mark.ranks(2)
def test_all_reduce_sequence_parallel_grads_changes_nothing_if_one_gradient_cannot_be_summed(ctx):
    model = nn.ParameterList(torch.zeros(2, dtype=dtype) for dtype in (torch.float32, torch.float32, torch.float64))
    model.to(ctx.device)
    for each in model:
        each.sequence_parallel = True
    for index in (0, 2):
        model[index].grad = torch.ones_like(model[index])
    with pytest.raises(TypeError, match="but that of 2 is torch.float64"):
        layers.all_reduce_sequence_parallel_grads(model, mesh=ctx)
    assert model[0].grad.tolist() == [1.0, 1.0] and model[1].grad is None
    model[2].main_grad = [1.0, 1.0]
    with pytest.raises(TypeError, match=r"the gradient of 2=\[1.0, 1.0\] must be a tensor"):
        layers.all_reduce_sequence_parallel_grads(model, mesh=ctx)
    with pytest.raises(TypeError, match="module=.* must be an nn.Module"):
        layers.all_reduce_sequence_parallel_grads(model.parameters(), mesh=ctx)


# The mappings


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
def test_copy_to_tensor_model_parallel_region_and_its_kin_forward_and_backward(ctx, uneven):
    """Forward is a linear map of all ranks' inputs to all ranks' outputs; with replicated gradients taken as equal,
    backward is what the table of functions.py says. Integers, so exact."""
    size = 2 * ctx.size + uneven
    sizes = tkernels.split_rows(size, ctx.size) if uneven else None
    shares = tkernels.split_rows(size, ctx.size)
    everyone = [integers((size, 3), torch.float32, 40 + rank).to(ctx.device) for rank in range(ctx.size)]
    whole, mine, total = everyone[0], everyone[ctx.rank], sum(everyone)
    grad = integers((size, 3), torch.float32, 60).to(ctx.device)

    def own(t, dim=0):
        return part(t, shares, ctx.rank, dim)

    def check(mapping, x, want, dy, want_dx, **options):
        x = leaf(x, ctx)
        y = mapping(x, mesh=ctx, **options)
        y.backward(dy)
        assert torch.equal(y, want), mapping.__name__
        assert torch.equal(x.grad, want_dx), mapping.__name__

    check(layers.copy_to_tensor_model_parallel_region, whole, whole, mine, total)
    check(layers.reduce_from_tensor_model_parallel_region, mine, total, grad, grad)
    check(layers.scatter_to_sequence_parallel_region, whole, own(whole), own(grad), grad, rows=sizes)
    check(layers.gather_from_sequence_parallel_region, own(whole), whole, mine, own(total), rows=sizes)
    check(
        layers.gather_from_sequence_parallel_region, own(whole), whole, grad, own(grad), rows=sizes,
        tensor_parallel_output_grad=False,
    )  # fmt: skip
    check(layers.reduce_scatter_to_sequence_parallel_region, mine, own(total), own(grad), grad, rows=shares)
    whole, grad = whole.t(), grad.t()
    scatter, gather = layers.scatter_to_tensor_model_parallel_region, layers.gather_from_tensor_model_parallel_region
    check(scatter, whole, own(whole, 1), own(grad, 1), grad, sizes=sizes)
    check(gather, own(whole, 1), whole, grad, own(grad, 1), sizes=sizes)


# State dicts


def assert_same_state(got, want):
    assert got.keys() == want.keys()
    for key in want:
        assert torch.equal(got[key].cpu(), want[key].cpu()), key


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_gather_state_dict_and_load_full_state_dict_go_between_shards_and_the_full_model(ctx, activation):
    torch.manual_seed(1)
    mlp = ParallelMLP(6, 9, activation, mesh=ctx)
    torch.manual_seed(1)
    alone = ParallelMLP(6, 9, activation, mesh=context_of(ctx.rank, ctx))
    full = layers.gather_state_dict(mlp)
    assert_same_state(full, alone.state_dict())
    only_first = layers.gather_state_dict(mlp, rank0_only=True)
    assert only_first.keys() == (full.keys() if ctx.rank == 0 else set())

    other = ParallelMLP(6, 9, activation, mesh=ctx)
    assert not torch.equal(other.fc1.weight, mlp.fc1.weight)
    assert str(layers.load_full_state_dict(other, full)) == "<All keys matched successfully>"
    assert_same_state(other.state_dict(), mlp.state_dict())
    other.load_state_dict(ParallelMLP(6, 9, activation, mesh=ctx).state_dict())
    assert not torch.equal(other.fc1.weight, mlp.fc1.weight)
    other.load_state_dict(mlp.state_dict())
    assert_same_state(other.state_dict(), mlp.state_dict())

    with pytest.raises(ValueError, match=r"fc1.weight is \(.*, 6\), but the full tensor has .* along dimension 0"):
        layers.load_full_state_dict(other, mlp.state_dict())
    with pytest.raises(RuntimeError, match="Missing key.*fc2.bias"):
        layers.load_full_state_dict(other, {key: value for key, value in full.items() if key != "fc2.bias"})
    tkernels.finalize(alone.fc1.ctx)


def context_of(rank, ctx):
    """A context of this rank alone; all ranks make theirs at the same time."""
    groups = [dist.new_group([other]) for other in range(ctx.size)]
    return tkernels.init(groups[rank], heap_bytes=1 << 20)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_sharded_state_dict_loads_on_any_number_of_ranks(ctx, tmp_path, activation):
    """Written on 4 ranks, read and written again on 2, read by an unsharded model; and from that back to 4. Features
    divide by neither 4 nor 2."""

    def mlp(context, seed):
        torch.manual_seed(seed)
        return ParallelMLP(6, 9, activation, mesh=context)

    first = mlp(ctx, 1)
    full = layers.gather_state_dict(first)
    checkpoint.save(layers.sharded_state_dict(first), checkpoint_id=tmp_path / "four")

    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][ctx.rank // 2]
    with tkernels.init(pair, heap_bytes=1 << 20) as ctx_2:
        if ctx.rank < 2:
            second = mlp(ctx_2, 2)
            checkpoint.load(layers.sharded_state_dict(second), checkpoint_id=tmp_path / "four", process_group=pair)
            assert_same_state(layers.gather_state_dict(second), full)
            checkpoint.save(layers.sharded_state_dict(second), checkpoint_id=tmp_path / "two", process_group=pair)
    dist.barrier()

    if ctx.rank == 3:
        unsharded = {key: torch.zeros_like(value) for key, value in full.items()}  # as nn.Linear modules have them
        checkpoint.load(unsharded, checkpoint_id=tmp_path / "two", no_dist=True)
        assert_same_state(unsharded, full)
        unsharded["fc2.bias"] += 1
        checkpoint.save(unsharded, checkpoint_id=tmp_path / "one", no_dist=True)
    dist.barrier()

    again = mlp(ctx, 3)
    checkpoint.load(layers.sharded_state_dict(again), checkpoint_id=tmp_path / "one")
    full["fc2.bias"] += 1
    assert_same_state(layers.gather_state_dict(again), full)
    if ctx.device.type == "cpu":  # which async_save wants gloo for
        options = {"checkpoint_id": tmp_path / "later", "async_stager": BlockingAsyncStager()}
        checkpoint.async_save(layers.sharded_state_dict(again), **options).result()
        checkpoint.load(layers.sharded_state_dict(first), checkpoint_id=tmp_path / "later")
        assert_same_state(layers.gather_state_dict(first), full)


# torch.compile


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sequence"])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_column_and_row_parallel_linear_compile_without_a_graph_break(ctx, kind, sequence_parallel):
    torch._dynamo.reset()
    torch.manual_seed(0)
    if kind == "column":
        layer = ColumnParallelLinear(6, 8, sequence_parallel=sequence_parallel, gather_output=True, mesh=ctx)
        x, rows = integers((4, 6), torch.float32, 71), (1, 3)
        mine = part(x, rows, ctx.rank) if sequence_parallel else x
    else:
        layer = RowParallelLinear(6, 8, sequence_parallel=sequence_parallel, mesh=ctx)
        rows = (1, 3)
        mine = integers((4, 3), torch.float32, 72)
    rows = rows if sequence_parallel else None
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")

    def outcome(call):
        layer.zero_grad()
        given = leaf(mine, ctx)
        y = call(given, rows=rows)
        (y * y).sum().backward()
        return y, given.grad, layer.weight.grad.clone(), layer.bias.grad.clone()

    for got, want in zip(outcome(compiled), outcome(layer), strict=True):
        assert torch.equal(got, want)
