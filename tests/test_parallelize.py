"""parallelize: an existing model trains the same on several ranks, and a plan that doesn't fit is refused by name."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import tkernels
from tkernels import layers
from tkernels.comm import MismatchError
from tkernels.layers import ColumnParallelLinear, RowParallelLinear, ZeroOptimizer, parallelize
from tkernels.testing.compare import assert_close_to, integers, normal, tolerance

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
            layers.all_reduce_sequence_parallel_grads(model, ctx=ctx)
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
def test_a_transformer_block_trains_as_the_unsharded_one(ctx, sequence_parallel):
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
def test_a_swapped_model_is_exact_on_integers(ctx):
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


@pytest.mark.ranks(4)
def test_a_mesh_or_a_group_stands_for_its_context(ctx):
    """On a mesh of 2 x 2, each pair of ranks holds a model of its own."""
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.full((3, 4), 1.0 + mesh["dp"].get_local_rank())
    torch.manual_seed(0)
    full = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    want = copy.deepcopy(full).double()(x.double())

    with pytest.raises(ValueError, match=r"has 2 dimensions \('dp', 'tp'\); pass .* mesh\['tp'\]"):
        parallelize(copy.deepcopy(full), {"0": "column", "1": "row"}, mesh)
    by_mesh = parallelize(copy.deepcopy(full), {"0": "column", "1": "row"}, mesh["tp"])
    made = tkernels.current_context()
    assert made is not ctx and made.size == 2 and by_mesh[0].weight.shape == (3, 4)
    by_group = parallelize(copy.deepcopy(full), {"0": "column", "1": "row"}, mesh["tp"].get_group())
    assert by_group[0].ctx is made  # over the same ranks: not a second one
    for model in (by_mesh, by_group):
        y = model.to(ctx.device)(x.to(ctx.device)).cpu()
        assert_close_to(y, want, terms=4 + 6 + 2)
    by_world = parallelize(copy.deepcopy(full), {"0": "column"}, dist.group.WORLD)
    assert by_world[0].ctx is ctx
    tkernels.finalize(made)
    with pytest.raises(TypeError, match="takes a Context, a ProcessGroup or a DeviceMesh, not str"):
        parallelize(full, {"0": "column"}, "tp")


@pytest.mark.ranks(2)
def test_a_plan_that_does_not_fit_is_refused_and_changes_nothing(ctx):
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
            hooked=nn.Linear(4, 4),
            watched=nn.Linear(4, 4),
            owned=nn.Linear(4, 4, device=ctx.device),
        )
    )
    model["head"].weight = model["embedding"].weight
    model["hooked"].register_forward_hook(lambda *_: None)
    model["watched"].weight.register_post_accumulate_grad_hook(lambda *_: None)
    optimizer = ZeroOptimizer(model["owned"].parameters(), torch.optim.SGD, lr=0.1, ctx=ctx)
    before = dict(model.named_modules())
    for wrong, error, message in [
        ({"upp": "column"}, ValueError, "'upp' matches no module; the modules are up, down, one"),
        ({"norm": "row"}, TypeError, "'norm' matches 'norm', which is a LayerNorm"),
        ({"*": "column"}, TypeError, r"'\*' matches 'norm'"),
        ({"attention.out_proj": "row"}, TypeError, "NonDynamicallyQuantizableLinear, not exactly an nn.Linear"),
        ({"u*": "column", "up": "row"}, ValueError, r"'up' is matched by both 'u\*' and 'up'"),
        ({"up": "diagonal"}, ValueError, "style of 'up' is 'diagonal'; use column or row"),
        ({"up": {"sequence_parallel": True}}, ValueError, "style of 'up' is None"),
        (
            {"up": {"style": "row", "gather_output": True}},
            ValueError,
            r"a row layer has no options \['gather_output'\]",
        ),
        ({"up": {"style": "column", "bias": False}}, ValueError, r"a column layer has no options \['bias'\]"),
        ({"head": "column"}, ValueError, "'head' shares its parameters with embedding.weight.*untie them"),
        ({"hooked": "column"}, ValueError, "'hooked' has forward hooks.*register them after"),
        ({"watched": "column"}, ValueError, "'watched' has parameters' hooks.*register them after"),
        ({"owned": "row"}, ValueError, "parameters of 'owned' belong to ZeroOptimizer.*parallelize the model first"),
        ({"up": "column", "one": "column"}, ValueError, "'one': ColumnParallelLinear.*1 out-features can't be split"),
    ]:
        with pytest.raises(error, match=message):
            parallelize(model, wrong, ctx)
        assert dict(model.named_modules()) == before
    optimizer.remove()

    with torch.no_grad():
        model["down"].weight[0, 0] += ctx.rank
    with pytest.raises(
        MismatchError, match="models of rank 0 and rank 1 differ in down.weight; make them from the same"
    ):
        parallelize(model, {"up": "column"}, ctx)
    assert dict(model.named_modules()) == before
