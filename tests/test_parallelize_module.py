"""parallelize_module: torch's tensor-parallel styles train as one rank does, and torch's tools take the parameters."""

import copy
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as torch_parallel
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import tkernels
from tkernels import layers
from tkernels.comm import MismatchError, as_context
from tkernels.layers import (
    ColwiseParallel,
    ColwiseParallelGroup,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    Replicated,
    RowwiseParallel,
    SequenceParallel,
    parallelize,
    parallelize_module,
)
from tkernels.testing.compare import integers, normal

HIDDEN, FEATURES, VOCABULARY = 8, 12, 10  # over 2, 3 and 4 ranks: some uneven
BATCH, SEQUENCE = 2, 8
EPS = torch.finfo(torch.float32).eps


class Block(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.norm, self.other_norm = nn.LayerNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, FEATURES, bias), nn.Linear(FEATURES, HIDDEN, bias)
        self.other_up, self.other_down = nn.Linear(HIDDEN, FEATURES, bias), nn.Linear(FEATURES, HIDDEN, bias)

    def forward(self, x):
        x = x + self.down(functional.gelu(self.up(self.norm(x))))
        return x + self.other_down(functional.gelu(self.other_up(self.other_norm(x))))


class Model(nn.Module):
    def __init__(self, num_blocks=1):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def init_weights(self):
        """The same weights on any number of ranks: those of seeds, whatever the parameters are."""
        for seed, parameter in enumerate(self.parameters()):
            value = 1 + 0.1 * normal(parameter.shape, torch.float32, seed) if parameter.dim() == 1 else None
            value = (
                normal(parameter.shape, torch.float32, seed) * parameter.shape[-1] ** -0.5 if value is None else value
            )
            with torch.no_grad():
                if isinstance(parameter, DTensor):
                    value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
                parameter.copy_(value)


def plan(dim=1, embedding=torch_parallel.RowwiseParallel):
    """Of a Model. torch's own styles in the other half of each block, and for the embedding."""
    colwise, rowwise, sequence = ColwiseParallel, RowwiseParallel, SequenceParallel
    return {
        "embedding": embedding(input_layouts=Replicate(), output_layouts=Shard(dim)),
        "blocks.*.*norm": sequence(sequence_dim=dim, use_local_output=True),
        "blocks.*.up": colwise(input_layouts=Shard(dim)),
        "blocks.*.down": rowwise(output_layouts=Shard(dim)),
        "blocks.*.other_up": torch_parallel.ColwiseParallel(input_layouts=Shard(dim)),
        "blocks.*.other_down": rowwise(output_layouts=Shard(dim)),
        "norm": sequence(sequence_dim=dim),  # gives a DTensor
        "head": colwise(input_layouts=Shard(dim), output_layouts=Replicate()),
    }


def tp_mesh(ctx):
    return init_device_mesh(ctx.device.type, (ctx.size,), mesh_dim_names=("tp",))


def full(t):
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().cpu().double()


def assert_near(got, want, what, roundings=200):
    """Within some hundred roundings of the largest element: sums of a few dozen terms, some layers deep."""
    got, want = full(got), want.detach().cpu().double()
    assert got.shape == want.shape, (what, got.shape, want.shape)
    error = (got - want).abs().max().item()
    assert error <= roundings * EPS * (want.abs().max().item() + 1e-3), (what, error)


def tokens(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator)


def twin(num_blocks=1):
    """The model in fp64 on one rank."""
    model = Model(num_blocks)
    model.init_weights()
    return model.double()


def loss_of(logits):
    return logits.logsumexp(-1).square().mean()


def train(model, batch, steps=3):
    """AdamW and clipping. -> the first gradients, the last norm, each step's output, the optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    outputs, first = [], None
    for _ in range(steps):
        y = model(batch)
        loss_of(y).backward()
        grads = {name: full(parameter.grad).clone() for name, parameter in model.named_parameters()}
        first, norm = first or grads, full(clip_grad_norm_(model.parameters(), 0.5))
        outputs.append(full(y))
        optimizer.step()
        optimizer.zero_grad()
    return first, norm, outputs, optimizer


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dim", [0, 1])
def test_parallelize_module_trains_as_one_rank_does(ctx, dim):
    """Mixed with torch's styles; sequences along either dimension, features that do not divide over 3 ranks."""
    if dim == 0 and BATCH % ctx.size:
        batch = tokens().repeat(3, 1)[: 2 * ctx.size]  # plain parts of a sequence are equal
    else:
        batch = tokens()[:, : SEQUENCE // ctx.size * ctx.size]
    reference = twin()
    want_grads, want_norm, want_outputs, _ = train(reference, batch)
    model = Model()
    model.init_weights()
    assert parallelize_module(model, tp_mesh(ctx), plan(dim)) is model
    up, down = model.blocks[0].up, model.blocks[0].down
    assert (up.weight.shape, up.weight.placements) == ((FEATURES, HIDDEN), (Shard(0),))
    assert (down.weight.placements, down.bias.placements) == ((Shard(1),), (Replicate(),))
    assert up.weight.to_local().shape == (FEATURES // ctx.size, HIDDEN)
    assert (
        isinstance(up, nn.Linear) and dict(model.named_parameters()).keys() == dict(reference.named_parameters()).keys()
    )
    grads, norm, outputs, _ = train(model, batch.to(ctx.device))
    for name, want in want_grads.items():
        assert_near(grads[name], want, name)
    assert_near(norm, want_norm, "norm")
    for step, (got, want) in enumerate(zip(outputs, want_outputs, strict=True)):
        assert_near(got, want, f"output {step}")
    for (name, parameter), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_near(parameter, want, name, 2000)  # AdamW divides by the root of a gradient's square


LAYOUTS = [  # (style's name, shape of the input, its layout as it comes, input_layouts, output_layouts)
    ("ColwiseParallel", (2, 8, 6), None, Shard(1), None),
    ("ColwiseParallel", (8, 3, 6), None, Shard(0), Replicate()),
    ("ColwiseParallel", (4, 6), None, None, None),
    ("ColwiseParallel", (6,), None, None, None),
    ("ColwiseParallel", (4, 6), None, Shard(-1), Shard(0)),
    ("ColwiseParallel", (2, 3, 5, 6), Shard(2), None, None),  # 5 over 2 ranks
    ("ColwiseParallel", (7, 2, 6), Shard(0), Shard(0), Replicate()),
    ("ColwiseParallel", (4, 6), Replicate(), Replicate(), Shard(0)),
    ("RowwiseParallel", (2, 8, 6), None, None, Shard(1)),
    ("RowwiseParallel", (5, 3, 6), None, None, Shard(0)),
    ("RowwiseParallel", (4, 6), None, None, None),
    ("RowwiseParallel", (4, 6), None, Replicate(), None),
    ("RowwiseParallel", (6,), None, Replicate(), None),
    ("RowwiseParallel", (4, 6), Shard(1), None, Shard(-1)),
    ("RowwiseParallel", (3, 4, 6), Replicate(), None, Shard(0)),
    ("RowwiseParallel", (3, 4, 6), Shard(0), None, Shard(0)),
]


@pytest.mark.ranks(2)
def test_colwise_and_rowwise_parallel_compute_what_the_linear_does_exactly(ctx):
    """On integers, where every sum is exact: outputs, their kinds and placements, and all gradients."""
    mesh = tp_mesh(ctx)
    linear = nn.Linear(6, 5).to(ctx.device)
    for seed, parameter in enumerate(linear.parameters()):
        parameter.data.copy_(integers(parameter.shape, torch.float32, seed))
    for name, shape, comes, inputs, outputs in LAYOUTS:
        whole = integers(shape, torch.float32, 7, device=ctx.device).requires_grad_()
        linear.zero_grad()
        want = linear(whole)
        weights = integers(want.shape, torch.float32, 9, device=ctx.device)
        (want * weights).sum().backward()
        colwise = name == "ColwiseParallel"
        split = comes or inputs or (Replicate() if colwise else Shard(-1))
        output = outputs or (Shard(-1) if colwise else Replicate())
        placed = distribute_tensor(weights, mesh, [output])
        for use_local_output in (True, False):
            what = name, shape, comes, inputs, outputs, use_local_output
            options = dict(input_layouts=inputs, output_layouts=outputs, use_local_output=use_local_output)
            module = parallelize_module(copy.deepcopy(linear), mesh, getattr(layers, name)(**options))
            leaf = distribute_tensor(whole.detach(), mesh, [split])
            leaf = (leaf if comes else leaf.to_local().clone()).requires_grad_()
            y = module(leaf)
            local = y if use_local_output else y.to_local()
            assert type(y) is (torch.Tensor if use_local_output else DTensor), what
            if not use_local_output:
                assert y.placements == placed.placements and y.shape == want.shape, what
                assert torch.equal(full(y), full(want)), what
            assert torch.equal(local, distribute_tensor(want.detach(), mesh, [output]).to_local()), what
            (local * placed.to_local()).sum().backward()
            got = (
                leaf.grad
                if comes
                else DTensor.from_local(
                    leaf.grad, mesh, [split], run_check=False, shape=whole.shape, stride=whole.stride()
                )
            )
            assert torch.equal(full(got), full(whole.grad)), what
            for key, parameter in module.named_parameters():
                assert parameter.placements == parameter.grad.placements, what
                assert torch.equal(full(parameter.grad), full(getattr(linear, key).grad)), (what, key)


@pytest.mark.ranks(2)
def test_colwise_and_rowwise_parallel_take_inputs_and_gradients_of_any_strides(ctx):
    """As nn.Linear: every second feature, a channel of several, one row for all, features that are not neighbours."""
    mesh = tp_mesh(ctx)
    twin = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6)).to(ctx.device)
    for seed, parameter in enumerate(twin.parameters()):
        parameter.data.copy_(integers(parameter.shape, torch.float32, seed))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    model = parallelize_module(copy.deepcopy(twin), mesh, plan)
    for shape, view in (
        ((4, 12), lambda x: x[:, ::2]),
        ((2, 4, 6, 3), lambda x: x[..., 1]),
        ((1, 4, 6, 2), lambda x: x[..., 0]),
        ((1, 6, 2), lambda x: x[..., 0].expand(4, 6)),
        ((6, 4), torch.t),
        ((1, 6, 5), lambda x: x[..., 2].narrow(0, 0, 1)),
    ):
        leaves = [integers(shape, torch.float32, 7, device=ctx.device).requires_grad_() for _ in "mt"]
        ys = [each(view(leaf)) for each, leaf in zip((model, twin), leaves, strict=True)]
        assert torch.equal(*ys), shape
        for y in ys:
            weights = integers((*y.shape, 3), torch.float32, 9, device=ctx.device)
            y.backward(weights[..., 1])
        assert torch.equal(*(leaf.grad for leaf in leaves)), shape
    for got, want in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(full(got.grad), full(want.grad))


@pytest.mark.ranks(2)
def test_rowwise_parallel_and_its_kin_refuse_plain_parts_that_are_unequal(ctx):
    mesh = tp_mesh(ctx)
    x = torch.ones(4 - ctx.rank, 6, device=ctx.device)
    with tkernels.init(mesh, default=False, compare_calls=True):  # so that it can go on
        for style, module, given in (
            (RowwiseParallel(input_layouts=Shard(0)), nn.Linear(6, 5), x),
            (RowwiseParallel(input_layouts=Shard(0)), nn.Embedding(6, 5), x.long()),
            (ColwiseParallel(input_layouts=Shard(1)), nn.Linear(7, 5), x.t()),
            (ColwiseParallel(input_layouts=Shard(0)), nn.Linear(6, 5), x),
            (PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()), nn.Identity(), x),
            (PrepareModuleOutput(output_layouts=Shard(-1), desired_output_layouts=Shard(0)), nn.Identity(), x.t()),
        ):
            parallelize_module(module.to(ctx.device), mesh, style)
            with pytest.raises(MismatchError, match=r"differ, in rows by rank: \(4, 4\), \(3, 3\)"):
                module(given)


@pytest.mark.ranks(2)
def test_prepare_module_input_output_lays_out_what_torchs_does(ctx):
    x, mesh, got = integers((4, 6), torch.float32, ctx.rank, device=ctx.device), tp_mesh(ctx), []
    for kind in (PrepareModuleInputOutput, torch_parallel.PrepareModuleInputOutput):
        layouts = dict(input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_input=True)
        style = kind(**layouts, output_layouts=Shard(1), desired_output_layouts=Shard(0))
        leaf, module = x.clone().requires_grad_(), parallelize_module(nn.Hardtanh(-2, 2), mesh, style)
        y = module(leaf)
        y.square().sum().backward()
        got.append((y.detach(), leaf.grad))
    assert all(map(torch.equal, *got)) and got[0][0].shape == (4, 12)


class Gated(nn.Module):
    """A gated MLP as in a Llama, whose forward calls two linears with one tensor, and a third one with it too."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.extra = nn.Linear(HIDDEN, 6), nn.Linear(HIDDEN, 6, bias=False), nn.Linear(HIDDEN, 10)
        self.down = nn.Linear(6, HIDDEN)

    def forward(self, x, other=None):
        y = functional.silu(self.gate(x)) * self.up(x if other is None else other)
        return self.down(y) * self.extra(x).square().mean(-1, keepdim=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence", [Replicate(), Shard(1)], ids=str)
def test_colwise_parallel_group_shares_what_its_members_do_for_one_input(ctx, sequence):
    """One gather and one reduce-scatter, or one all-reduce, and the results and gradients of one rank."""
    calls, call = [], type(ctx).call
    torch.manual_seed(0)
    model, mesh = Gated(), tp_mesh(ctx)
    x, other = (normal((2, 4, HIDDEN), torch.float32, seed) for seed in (1, 2))
    twin = copy.deepcopy(model).double()
    split = {
        "": ColwiseParallelGroup("gate", "up", input_layouts=sequence),
        "extra": ColwiseParallel(input_layouts=sequence, output_layouts=Replicate()),
        "down": RowwiseParallel(),
    }
    with pytest.raises(ValueError, match="'extra' is given two styles"):
        parallelize_module(model, mesh, split | {"": ColwiseParallelGroup("gate", "extra")})
    with pytest.raises(ValueError, match="'wq' is no module; Gated has gate, up, extra, down"):
        parallelize_module(model, mesh, split | {"": ColwiseParallelGroup("gate", "wq")})
    with pytest.raises(TypeError, match="'act' is a torch.nn.modules.activation.SiLU, and no nn.Linear"):
        module = nn.ModuleDict(dict(up=nn.Linear(4, 4), act=nn.SiLU()))
        parallelize_module(module, mesh, ColwiseParallelGroup("up", "act"))
    parallelize_module(model.to(ctx.device), mesh, split)

    def judge(what, run, made, *inputs, roundings=200):
        made.zero_grad()
        twin.zero_grad()
        mine = [distribute_tensor(each.to(ctx.device), mesh, [sequence]).to_local().clone() for each in inputs]
        mine = [each.requires_grad_() for each in mine]
        wanted = [each.double().requires_grad_() for each in inputs]
        (y, want) = run(*mine), twin(*wanted)
        assert_near(y, want, what, roundings)
        y.square().sum().backward()
        want.square().sum().backward()
        for got, leaf in zip(mine, wanted, strict=True):
            assert_near(DTensor.from_local(got.grad, mesh, [sequence]), leaf.grad, what, roundings)
        for (name, parameter), truth in zip(made.named_parameters(), twin.parameters(), strict=True):
            assert_near(parameter.grad, truth.grad, (what, name), roundings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(ctx), "call", lambda self, op, *t: calls.append(op.operation) or call(self, op, *t))
        judge("shared", model, model, x)
    shared = ["all_gather_matmul"] * 2 + ["matmul_reduce_scatter"] * 2 if sequence.is_shard() else ["all_reduce"]
    assert [each for each in sorted(calls) if each in shared] == shared  # the other one of each is the extra one's
    judge("different inputs", model, model, x, other)
    judge("again", model, model, x)
    copied = copy.deepcopy(model)
    judge("copied", copied, copied, x)
    judge("checkpointed", lambda t: torch.utils.checkpoint.checkpoint(model, t, use_reentrant=False), model, x)
    torch._dynamo.reset()
    judge("compiled", torch.compile(model, backend="aot_eager", fullgraph=True), model, x)
    with torch.autocast(ctx.device.type, torch.bfloat16):
        judge("autocast", model, model, x, roundings=16 * torch.finfo(torch.bfloat16).eps / EPS)
    siblings = model.gate._siblings
    assert siblings is model.up._siblings and siblings is not copied.gate._siblings
    assert siblings._input is None and not siblings._products  # no activation is held
    with torch.no_grad():
        inplace = distribute_tensor(x.to(ctx.device), mesh, [sequence]).to_local().clone()
        model(inplace)
        assert_near(model(inplace.add_(1)), twin(x.double() + 1), "changed in place")


@pytest.mark.ranks(2)
def test_rowwise_parallel_splits_an_embedding_by_its_vocabulary(ctx):
    """The output in any layout, the gradient of this rank's rows alone, none for the padding; no word outside."""
    mesh = tp_mesh(ctx)
    for padding, output in ((None, Replicate()), (7, Shard(1)), (1, Shard(0))):
        embedding = nn.Embedding(9, 4, padding_idx=padding).to(ctx.device)
        embedding.weight.data.copy_(integers((9, 4), torch.float32, 1))
        batch = integers((2, 5), torch.int64, 2, 0, 8, device=ctx.device)
        want = embedding(batch)
        weights = integers(want.shape, torch.float32, 9, device=ctx.device)
        (want * weights).sum().backward()
        module = parallelize_module(copy.deepcopy(embedding), mesh, RowwiseParallel(output_layouts=output))
        y = module(batch)
        placed = [distribute_tensor(each.detach(), mesh, [output]).to_local() for each in (want, weights)]
        assert torch.equal(y, placed[0])
        (y * placed[1]).sum().backward()
        assert module.weight.grad.placements == (Shard(0),)
        assert torch.equal(full(module.weight.grad), full(embedding.weight.grad))
    if ctx.device.type == "cpu":  # on a GPU it is an assertion of the kernel's, as in nn.Embedding
        for outside in (-1, 9):
            with pytest.raises(IndexError, match="index out of range"):
                module(batch.clone().fill_(outside))


@pytest.mark.ranks(2)
def test_rowwise_parallel_names_ranks_that_look_up_other_tokens(ctx):
    """Each would find what it has: the sums are the same on both, and so is every gradient behind them."""
    module = parallelize_module(nn.Embedding(9, 4).to(ctx.device), tp_mesh(ctx), RowwiseParallel())
    same = torch.tensor([[1, 8, 3]], device=ctx.device)
    with tkernels.init(tp_mesh(ctx), default=False):
        with pytest.raises(tkernels.MismatchError, match=r"look up other tokens \(rank 0 \[1, 3\], rank 1 \[1, 3\]\)"):
            module(same + torch.tensor([0, 0, ctx.rank], device=ctx.device))
        with pytest.raises(tkernels.MismatchError, match=r"rank 0 \[1, 1\], rank 1 \[1, 2\]"):
            module(same[:, : ctx.rank + 1])
        want = module(same)
        assert torch.equal(module(same), want)
        meetings = []
        with mock.patch.object(type(ctx.group), "gather", lambda *given: meetings.append(given)):
            assert torch.equal(module(same), want) and not meetings


@pytest.mark.ranks(2)
def test_colwise_and_rowwise_parallel_compute_by_this_librarys_operations(ctx):
    """Which of them, by the calls that reach the context."""
    calls, call = [], type(ctx).call
    mesh = tp_mesh(ctx)
    expected = [
        (ColwiseParallel(input_layouts=Shard(0)), ["all_gather_matmul", "matmul_reduce_scatter"]),
        (ColwiseParallel(), ["matmul_all_reduce"]),
        (RowwiseParallel(output_layouts=Shard(0)), ["matmul_reduce_scatter", "all_gather_matmul"]),
        (RowwiseParallel(), ["matmul_all_reduce"]),
    ]
    for style, operations in expected:
        module = parallelize_module(nn.Linear(6, 6).to(ctx.device), mesh, style)
        features = 6 if isinstance(style, ColwiseParallel) else 3
        x = torch.ones(4, features, device=ctx.device, requires_grad=True)
        calls.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(ctx), "call", lambda self, op, *t: calls.append(op.operation) or call(self, op, *t))
            module(x).sum().backward()
        assert calls == operations


class Mixer(nn.Module):
    """Reads its convolutions' parameters, one in a list, instead of calling them, as Mamba's mixers do."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3, groups=HIDDEN, padding=1)
        self.others, self.norm = nn.ModuleList([nn.Conv1d(HIDDEN, HIDDEN, 1)]), nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, FEATURES), nn.Linear(FEATURES, HIDDEN)
        self.fails = False

    def forward(self, x):
        x = self.norm(x).transpose(1, 2)
        x = functional.conv1d(x, self.conv.weight, self.conv.bias, padding=1, groups=HIDDEN)
        x = functional.conv1d(x, self.others[0].weight, self.others[0].bias).transpose(1, 2)
        if self.fails:
            raise ArithmeticError
        return self.down(functional.gelu(self.up(x)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["eager", "compiled", "checkpointed", "sharded", "sharded-apart"])
def test_parallelize_lets_modules_read_their_childrens_parameters(ctx, way):
    torch.manual_seed(0)
    model = nn.Sequential(Mixer(), Mixer())
    twin, x = copy.deepcopy(model).double(), normal((BATCH, SEQUENCE, HIDDEN), torch.float32, 1)
    parallelize(model.to(ctx.device), {"*.up": "colwise", "*.down": "rowwise"}, tp_mesh(ctx))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    if way.startswith("sharded"):
        ranks = init_device_mesh(ctx.device.type, (1, ctx.size), mesh_dim_names=("dp", "tp"))["dp"]
        for module in (model[0].norm, model[1].norm) if way == "sharded-apart" else model:
            layers.fully_shard(module, mesh=ranks)
        layers.fully_shard(model, mesh=ranks)
    run = torch.compile(model, backend="aot_eager") if way == "compiled" else model
    if way == "checkpointed":
        run = lambda x: model[1](checkpoint(model[0], x, use_reentrant=False))  # noqa: E731
    model[1].fails = True
    with pytest.raises(ArithmeticError):
        model(x.to(ctx.device))
    model[1].fails = False
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    for _ in range(2):
        with torch.backends.cudnn.flags(enabled=False):  # it would multiply in TF32
            y = run(x.to(ctx.device))
            y.square().mean().backward()
        want = twin(x.double())
        want.square().mean().backward()
        assert_near(y, want, "y")
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert_near(parameter.grad, other.grad, name)


@pytest.mark.ranks(2)
def test_parallelize_module_computes_in_the_context_that_it_was_given(ctx):
    """And over a mesh in the newest one over its ranks, which another part of the program may have made."""
    group, given = ctx.group.process_group, tkernels.init(ctx.group.process_group, default=False)
    with tkernels.init(group, num_programs=2, default=False) as newest:
        plan = {"0": ColwiseParallelGroup("q", "k"), "1": RowwiseParallel(), "2": SequenceParallel()}
        for mesh, name in ((given, given.name), (DeviceMesh.from_group(group, ctx.device.type), newest.name)):
            first = nn.ModuleDict({"q": nn.Linear(6, 6), "k": nn.Linear(6, 6)})
            model = nn.ModuleList([first, nn.Linear(6, 6), nn.LayerNorm(6)]).to(ctx.device)
            parallelize_module(model, mesh, plan)
            assert {each._layout.context for each in (*first.values(), *model[1:])} == {name}
    given.finalize()


@pytest.mark.ranks(2)
def test_parallelize_module_is_for_copies_meta_compile_autocast_and_scalers(ctx):
    batch, mesh = tokens().to(ctx.device), tp_mesh(ctx)
    want_grads, _, (want, *_), _ = train(twin(), batch.cpu(), 1)
    with torch.device("meta"):
        model = Model()
    parallelize_module(model, mesh, plan())
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device=ctx.device)
    model.init_weights()

    def judge(what, made, y):
        assert_near(y, want, what)
        loss_of(y).backward()
        for name, parameter in made.named_parameters():
            assert_near(parameter.grad, want_grads[name], (what, name))
            if "other_up" not in name and "embedding" not in name:  # torch's own may be Partial and Replicate
                assert parameter.grad.placements == parameter.placements, (what, name)
        made.zero_grad()

    judge("from meta", model, model(batch))
    copied = copy.deepcopy(model)
    judge("copied", copied, copied(batch))
    assert copied.blocks[0].up.weight is not model.blocks[0].up.weight
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    judge("compiled", model, compiled(batch))
    with torch.no_grad():
        assert_near(model(batch), want, "no grad")
    leaf = torch.ones(BATCH, SEQUENCE, HIDDEN, device=ctx.device, requires_grad=True)
    again = torch.utils.checkpoint.checkpoint(model.blocks[0], leaf, use_reentrant=False)
    assert_near(again, model.blocks[0](leaf), "checkpointed")

    scaler = torch.amp.GradScaler(ctx.device.type, init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    before = {name: full(parameter).clone() for name, parameter in model.named_parameters()}
    scaler.scale(loss_of(model(batch))).backward()
    scaler.step(optimizer)
    scaler.update()
    for name, parameter in model.named_parameters():
        assert_near(before[name] - full(parameter), want_grads[name], ("scaled", name), 2000)
    weight = model.blocks[0].up.weight
    weight.grad.to_local().fill_(float("inf") if ctx.rank else 1.0)  # of one rank alone
    stepped = full(weight).clone()
    scaler.step(optimizer)
    assert torch.equal(full(weight), stepped), "a rank stepped with another's infinite gradient"

    linears = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6)).to(ctx.device)
    parallelize_module(linears, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    with torch.autocast(ctx.device.type, torch.bfloat16):
        assert linears(torch.ones(3, 6, device=ctx.device)).dtype is torch.bfloat16
    linears(torch.ones(3, 6, device=ctx.device)).sum().backward()
    assert linears[0].weight.grad.dtype is torch.float32


def sub_mesh(ctx, size):
    """A mesh of the first `size` ranks, None on the others. Collective."""
    group = dist.new_group(range(size))
    return None if ctx.rank >= size else DeviceMesh.from_group(group, ctx.device.type)


@pytest.mark.ranks(3, timeout_s=300)
def test_parallelize_module_saves_on_2_ranks_and_loads_on_1_and_3(ctx, tmp_path):
    """Model and optimizer by torch.distributed.checkpoint, at once and in the background, and whole on one rank."""
    batch = tokens()[:, :6].to(ctx.device)
    paths = [tmp_path / "now", tmp_path / "later"]
    reference = twin()
    *_, optimizer = train(reference, batch.cpu(), 2)
    want = {name: parameter.detach().clone() for name, parameter in reference.named_parameters()}
    want_state = {
        name: optimizer.state[parameter]["exp_avg"].clone() for name, parameter in reference.named_parameters()
    }
    two, one = sub_mesh(ctx, 2), sub_mesh(ctx, 1)
    if two is not None:
        model = parallelize_module(twin().float(), two, plan())
        *_, optimizer = train(model.to(ctx.device), batch, 2)
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        assert {type(each["exp_avg"]) for each in state["optimizer"]["state"].values()} == {DTensor}
        dcp.save(state, checkpoint_id=paths[0], process_group=two.get_group())
        dcp.async_save(state, checkpoint_id=paths[1], process_group=two.get_group()).result()
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        for name, each in whole.items():
            assert_near(each, want[name], ("whole", name), 2000)
        tkernels.finalize(as_context(two))
    dist.barrier()
    for mesh, path in ((tp_mesh(ctx), paths[0]), (one, paths[1])):
        if mesh is None:
            continue
        model = parallelize_module(Model().to(ctx.device), mesh, plan())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=path, process_group=mesh.get_group())
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        for name, parameter in model.named_parameters():
            assert_near(parameter, want[name], (mesh.size(), name), 2000)
            assert_near(optimizer.state[parameter]["exp_avg"], want_state[name], (mesh.size(), name), 2000)
        if mesh is one:
            tkernels.finalize(as_context(one))


@pytest.mark.ranks(2)
def test_parallelize_module_keeps_tied_parameters_and_loss_parallel(ctx):
    """A head tied to its embedding, both split by the vocabulary, and torch's cross entropy of the parts."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, t):
            return self.head(self.embedding(t))

    torch.manual_seed(0)
    model, batch = Tied(), tokens()
    reference = copy.deepcopy(model).double()
    targets = batch.roll(1)
    want = functional.cross_entropy(reference(batch).flatten(0, 1), targets.flatten())
    want.backward()
    split = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    for wrong, message in [
        ({"head": split["head"]}, f"embedding.weight (whole) and head.weight ({Shard(0)}) are one parameter"),
        (split | {"embedding": ColwiseParallel()}, f"embedding.weight ({Shard(1)}) and head.weight ({Shard(0)})"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            parallelize_module(model, tp_mesh(ctx), wrong)
    model = parallelize_module(model.to(ctx.device), tp_mesh(ctx), split)
    assert model.head.weight is model.embedding.weight and len(list(model.parameters())) == 1
    with torch_parallel.loss_parallel():
        loss = functional.cross_entropy(model(batch.to(ctx.device)).flatten(0, 1), targets.flatten().to(ctx.device))
        loss.backward()
    assert_near(loss, want, "loss")
    assert_near(model.head.weight.grad, reference.head.weight.grad, "gradient")
    assert model.head.weight.grad.placements == (Shard(0),)


@pytest.mark.ranks(2)
def test_parallelize_module_refuses_before_anything_changed(ctx):
    mesh = tp_mesh(ctx)
    torch.manual_seed(0)
    model = nn.ModuleDict(
        dict(
            up=nn.Linear(4, 6),
            down=nn.Linear(6, 4),
            one=nn.Linear(4, 1),
            norm=nn.LayerNorm(4),
            conv=nn.Conv1d(4, 4, 1),
            attention=nn.MultiheadAttention(4, 2),
            watched=nn.Linear(4, 4),
            inner=nn.Sequential(nn.Linear(4, 4)),
            tokens=nn.Embedding(8, 4, max_norm=1.0),
            sparse=nn.Embedding(8, 4, sparse=True),
            normed=nn.utils.spectral_norm(nn.Linear(4, 4)),
            parametrized=nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, bias=False)),
            wide=nn.Linear(4, 4, dtype=torch.float64),
        )
    )
    model["watched"].weight.register_post_accumulate_grad_hook(lambda *_: None)
    kinds = {name: (type(module), list(module._parameters.items())) for name, module in model.named_modules()}
    column, row = ColwiseParallel(), RowwiseParallel()
    for wrong, error, message in [
        ({"up": column, "upp": column}, ValueError, "'upp' matches no module: 'upp' is none of up, down, one"),
        ({"inner.1": column}, ValueError, "'inner.1' matches no module: '1' is none of 0"),
        ({"u*": column, "up": row}, ValueError, "'up' is matched by both 'u*' and 'up'"),
        ({"up": "column"}, TypeError, "the style of 'up'='column' must be a ParallelStyle"),
        ({"up": column, "conv": column}, TypeError, "'conv' is a torch.nn.modules.conv.Conv1d, and no nn.Linear or"),
        ({"attention.out_proj": row}, TypeError, "'attention.out_proj' belongs to an nn.MultiheadAttention"),
        ({"watched": row}, ValueError, "'watched': weight has hooks"),
        (
            {"inner": SequenceParallel()},
            TypeError,
            "'inner' is a Sequential with parameters of modules in it, as 0.weight",
        ),
        (
            {"up": column, "one": column},
            ValueError,
            "weight of (1, 4) has 1 along dimension 0, which 2 ranks get as 1, 0",
        ),
        (None, TypeError, "parallelize_plan=None must be a ParallelStyle, or a dict"),
        ({"up": ColwiseParallel(input_layouts=1.5)}, TypeError, "'up': input_layouts=1.5 must be a Placement"),
        ({3: row}, TypeError, "a path of the plan=3 must be a module's name"),
        ({"tokens": row}, ValueError, "'tokens': max_norm=1.0 scales the weight's rows in forward"),
        ({"tokens": column}, ValueError, "'tokens': max_norm=1.0 scales the weight's rows in forward"),
        ({"sparse": row}, ValueError, "RowwiseParallel: 'sparse': its gradients are sparse"),
        ({"sparse": Replicated()}, ValueError, "Replicated: 'sparse': its gradients are sparse"),
        ({"wide": column}, TypeError, "'wide' is in torch.float64, and tkernels multiplies float32, bfloat16 and"),
        ({"normed": row}, TypeError, "'normed': its weight is computed from bias and weight_orig, as by"),
        ({"parametrized": column}, TypeError, "its weight is computed from parametrizations.weight.original0 and"),
    ]:
        with pytest.raises(error, match=re.escape(message)):
            parallelize_module(model, mesh, wrong)
        assert kinds == {
            name: (type(module), list(module._parameters.items())) for name, module in model.named_modules()
        }
    with pytest.raises(ValueError, match=r"which 2 ranks get as 1, 0"):
        torch_parallel.parallelize_module(model, mesh, {"one": column})  # by torch's function too
    with pytest.raises(MismatchError, match="the plans of rank 0 and rank 1 differ in up"):
        parallelize_module(model, mesh, {"up": column if ctx.rank else row})
    wrong = nn.Linear(4, 6 + 2 * ctx.rank)
    with pytest.raises(MismatchError, match="the models of rank 0 and rank 1 differ in weight"):
        parallelize_module(wrong, mesh, column)
    with pytest.raises(ValueError, match="'upp' matches no module.* [(]on rank 1[)]"):
        parallelize_module(model, mesh, {"up" if ctx.rank == 0 else "upp": column})
    layer = parallelize_module(nn.Linear(4, 4), mesh, column)
    with pytest.raises(TypeError, match=r"ColwiseLinear: x=\[1.0\] must be a tensor"):
        layer([1.0])
    with pytest.raises(ValueError, match=r"the mesh has 2 dimensions, \('dp', 'tp'\)"):
        parallelize_module(
            model, init_device_mesh(ctx.device.type, (1, 2), mesh_dim_names=("dp", "tp")), {"up": column}
        )
    for whole, x in ((nn.Linear(4, 4), torch.ones(1, 4)), (nn.Embedding(4, 4), torch.tensor([1]))):
        layer = parallelize_module(copy.deepcopy(whole), mesh, row if isinstance(whole, nn.Embedding) else column)
        layer.load_state_dict(whole.state_dict(), assign=True)  # without a word
        with pytest.raises(ValueError, match=f"has 4 of 4 rows, but rank {ctx.rank}'s part has 2: .*assign=True"):
            layer(x)
    parallelize_module(model, mesh, {"up": column})
    with pytest.raises(ValueError, match="'up' has a parallel style already"):
        parallelize_module(model, mesh, {"up": row})
    with pytest.raises(NotImplementedError, match="broadcast"):  # as of any model of DTensors
        nn.parallel.DistributedDataParallel(nn.Sequential(model["up"]))


@pytest.mark.ranks(2)
def test_parallelize_module_takes_a_mesh_a_group_or_a_context(ctx):
    for ranks in (tp_mesh(ctx), dist.group.WORLD, ctx, None):
        model = parallelize_module(nn.Linear(4, 4).to(ctx.device), ranks, ColwiseParallel())
        assert model.weight.placements == (Shard(0),) and model.weight.device_mesh.size() == 2
    with tp_mesh(ctx):
        parallelize_module(nn.Linear(4, 4).to(ctx.device), parallelize_plan=ColwiseParallel())
    with pytest.raises(TypeError, match="takes a Context, a ProcessGroup or a DeviceMesh of one dimension, not str"):
        parallelize_module(nn.Linear(4, 4), "tp", ColwiseParallel())


@pytest.mark.ranks(2)
def test_parallelize_module_tells_of_replicas_whose_gradients_differ(ctx):
    """A norm of this rank's rows without SequenceParallel; and one of its features, between a column and a row."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(2), nn.Linear(4, 4)).to(ctx.device)
    x = normal((4, 4), torch.float32, ctx.rank, device=ctx.device)
    prepare = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Shard(0), use_local_output=True)
    split = {"": prepare, "1": ColwiseParallel(input_layouts=Shard(0)), "3": RowwiseParallel(output_layouts=Shard(0))}
    parallelize_module(model, tp_mesh(ctx), split)
    with pytest.raises(MismatchError, match="the gradients of 2.weight, 2.bias, 0.weight, 0.bias differ between ranks"):
        model(x).square().sum().backward()


@pytest.mark.ranks(2)
def test_parallelize_module_takes_sequences_that_do_not_divide_as_dtensors(ctx):
    """5 positions over 2 ranks, through a whole block; plain parts of 3 and 2 can't be told apart and are refused."""
    mesh, x = tp_mesh(ctx), normal((BATCH, 5, HIDDEN), torch.float32, 1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 6), nn.Linear(6, HIDDEN))
    twin = copy.deepcopy(model).double()
    options = {"use_local_output": False}
    split = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1), **options),
        "2": RowwiseParallel(output_layouts=Shard(1), **options),
    }
    parallelize_module(model.to(ctx.device), mesh, split)
    leaf = distribute_tensor(x.to(ctx.device), mesh, [Shard(1)]).requires_grad_()
    truth = x.double().requires_grad_()
    y, want = model(leaf), twin(truth)
    assert y.placements == (Shard(1),)
    assert_near(y, want, "output")
    y.to_local().square().sum().backward()
    want.square().sum().backward()
    assert_near(leaf.grad, truth.grad, "input")
    for (name, parameter), wanted in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert_near(parameter.grad, wanted.grad, name)

    with tkernels.init(ctx.group.process_group) as own:  # which the error ends
        linear = parallelize_module(nn.Linear(4, 4).to(ctx.device), own, ColwiseParallel(input_layouts=Shard(0)))
        with pytest.raises(MismatchError, match=r"rows=\(3, 2\)"):
            linear(torch.ones(3 - ctx.rank, 4, device=ctx.device))
            own.check()


@pytest.mark.ranks(2)
def test_replicated_lets_a_module_find_plain_tensors_and_sums_gradients_where_asked(ctx):
    """A norm of each rank's own features, and one outside: all parameters are DTensors, and clipping works."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN), nn.Unflatten(-1, (-1, HIDDEN)))
    model += nn.Sequential(nn.RMSNorm(HIDDEN), nn.Flatten(-2), nn.Linear(2 * HIDDEN, HIDDEN))
    twin, x = copy.deepcopy(model).double(), normal((4, HIDDEN), torch.float32, 1)
    split = {
        "0": Replicated(),
        "1": ColwiseParallel(),
        "3": Replicated(sum_gradients=True),
        "5": RowwiseParallel(),
    }
    parallelize_module(model.to(ctx.device), tp_mesh(ctx), split)
    model(x.to(ctx.device)).square().sum().backward()
    twin(x.double()).square().sum().backward()
    norms = [clip_grad_norm_(each.parameters(), 1e9) for each in (model, twin)]
    assert_near(norms[0], norms[1], "norm")
    for (name, parameter), wanted in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert parameter.grad.placements == parameter.placements
        assert_near(parameter.grad, wanted.grad, name)
    normed = nn.utils.spectral_norm(nn.Linear(HIDDEN, HIDDEN))  # by a hook that reads parameters
    pair = copy.deepcopy(normed).double(), parallelize_module(normed.to(ctx.device), tp_mesh(ctx), Replicated())
    want, y = (each(x.to(each.bias)) for each in pair)
    assert_near(y, want, "spectral norm")
    with pytest.raises(ValueError, match="'4' has no parameters of its own"):
        parallelize_module(model, tp_mesh(ctx), {"4": Replicated()})


class Scaled(nn.Module):
    """A module with a parameter of its own and one inside, as a vision transformer's embeddings have them."""

    def __init__(self):
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.full((HIDDEN,), 1.5)), nn.LayerNorm(HIDDEN)

    def forward(self, x):
        return self.norm(x) * self.scale


@pytest.mark.ranks(2)
def test_replicated_takes_a_module_and_those_inside_each_once_and_what_is_inside_may_have_its_own(ctx):
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(), nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN))
    twin, x = copy.deepcopy(model).double(), normal((4, HIDDEN), torch.float32, 1)
    split = {"1": ColwiseParallel(), "2": RowwiseParallel()}
    whole, apart = copy.deepcopy(model).to(ctx.device), copy.deepcopy(model).to(ctx.device)
    parallelize_module(whole, tp_mesh(ctx), {"0": Replicated()} | split)
    parallelize_module(apart, tp_mesh(ctx), {"0": Replicated(), "0.norm": Replicated(sum_gradients=True)} | split)
    parallelize(rest := model.to(ctx.device), {"1": "colwise", "2": "rowwise"}, ctx)
    twin(x.double()).square().sum().backward()
    for each, times in ((whole, 1), (apart, ctx.size), (rest, 1)):
        each(x.to(ctx.device)).square().sum().backward()
        for (name, parameter), wanted in zip(each.named_parameters(), twin.parameters(), strict=True):
            assert parameter.grad.placements == parameter.placements
            assert_near(parameter.grad, wanted.grad * (times if "norm" in name else 1), name)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.ranks(2)
def test_parallelize_module_lets_grad_scaler_take_what_is_in_no_plan(ctx):
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4, bias=False)).to(ctx.device)
    parallelize_module(model, tp_mesh(ctx), {"1": ColwiseParallel(output_layouts=Replicate())})
    optimizer = torch.optim.SGD(model.parameters(), 1.0, foreach=False)
    scaler = torch.amp.GradScaler(ctx.device.type, init_scale=4.0)
    scaler.scale(model(torch.ones(2, 4, device=ctx.device)).sum()).backward()
    model[0].bias.grad.fill_(4.0)
    kept = model[0].bias.detach().clone()
    scaler.step(optimizer)
    assert torch.equal(kept - model[0].bias, torch.ones_like(kept))
    scaler.update()
    scaler.scale(model(torch.ones(2, 4, device=ctx.device)).sum()).backward()
    model[1].weight.grad.to_local().fill_(float("inf") if ctx.rank else 1.0)
    kept = model[0].bias.detach().clone()
    scaler.step(optimizer)
    assert torch.equal(kept, model[0].bias), "a rank stepped with another's infinite gradient"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("linear", [nn.Linear, Doubled], ids=["ours", "torchs"])
def test_parallelize_module_tells_an_optimizer_that_was_made_before_it(ctx, linear):
    model = nn.Sequential(linear(4, 4), nn.LayerNorm(4)).to(ctx.device)
    model[0].weight.no_decay = True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4, device=ctx.device)).sum().backward()
    parallelize_module(model, tp_mesh(ctx), {"0": ColwiseParallel(output_layouts=Replicate())})
    with pytest.raises(ValueError, match="SGD.step: 2 of its 4 parameters are no .* as parallelize has put others"):
        optimizer.step()
    optimizer.param_groups[0]["params"] = list(model.parameters())
    optimizer.step()
    assert model[0].weight.no_decay


@pytest.mark.ranks(2)
def test_parallelize_module_passes_weights_of_one_rank_on(ctx):
    """src_data_rank: ranks have different weights, and rank 0's or 1's are taken; or each its own part."""
    for source in (0, 1, None):
        linear = nn.Linear(4, 4)
        nn.init.constant_(linear.weight, 1.0 + ctx.rank)
        linear.weight.no_decay = True
        parallelize_module(linear.to(ctx.device), tp_mesh(ctx), ColwiseParallel(), src_data_rank=source)
        value = 1.0 + (ctx.rank if source is None else source)
        assert (linear.weight.to_local() == value).all() and linear.weight.no_decay
    for error, source, said in ((ValueError, 2, "2 must be at most 1"), (TypeError, "all", "'all' must be a whole")):
        with pytest.raises(error, match=f"src_data_rank={said}"):
            parallelize_module(nn.Linear(4, 4), tp_mesh(ctx), ColwiseParallel(), src_data_rank=source)


@pytest.mark.ranks(4, timeout_s=300)
@pytest.mark.parametrize("made_by", ["torch", "tkernels"])
def test_parallelize_module_under_fully_shard(ctx, made_by, tmp_path):
    """2 x 2 ranks train as one does, by torch's and by our own; the checkpoint is loaded on 4 x 1 and 1 x 2."""
    fully_shard = torch_fully_shard if made_by == "torch" else layers.fully_shard

    def build(mesh):
        model = Model().to(ctx.device)
        model.init_weights()
        parallelize_module(model, mesh["tp"], plan(embedding=RowwiseParallel))
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"])

    def state_of(model, optimizer):
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    batch = tokens().to(ctx.device)
    want_grads, want_norm, _, reference = train(twin(), batch.cpu(), 2)
    want = [parameter.detach() for group in reference.param_groups for parameter in group["params"]]
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    model = build(mesh)
    mine = batch.chunk(2)[mesh["dp"].get_local_rank()]
    grads, norm, _, optimizer = train(model, mine, 2)
    for (name, grad), wanted in zip(grads.items(), want_grads.values(), strict=True):
        assert_near(grad, wanted, name)
    assert_near(norm, want_norm, "norm")
    for (name, parameter), wanted in zip(model.named_parameters(), want, strict=True):
        assert_near(parameter, wanted, name, 2000)
    dcp.save(state_of(model, optimizer), checkpoint_id=tmp_path)
    moments = {name: full(optimizer.state[parameter]["exp_avg"]) for name, parameter in model.named_parameters()}
    four = init_device_mesh(ctx.device.type, (4, 1), mesh_dim_names=("dp", "tp"))
    pair = DeviceMesh(ctx.device.type, [[0, 1]], mesh_dim_names=("dp", "tp"))  # of the first two ranks
    for other in (four, pair):
        if other.get_coordinate() is None:
            continue
        model = build(other)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        state = state_of(model, optimizer)
        ranks = dist.group.WORLD if other is four else pair["tp"].get_group()
        dcp.load(state, checkpoint_id=tmp_path, process_group=ranks)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        for (name, parameter), wanted in zip(model.named_parameters(), want, strict=True):
            assert_near(parameter, wanted, name, 2000)
            assert torch.equal(full(optimizer.state[parameter]["exp_avg"]), moments[name])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_parallelize_module_differentiates_penalties_on_gradients(ctx, split):
    """The bias of the row layer is replicated, so its gradient, equal on all ranks, counts once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).to(ctx.device)
    twin, x = copy.deepcopy(model).double(), normal((2, 4, 6), torch.float32, 1, device=ctx.device)
    place = Shard(1) if split else Replicate()
    plan = {"0": ColwiseParallel(input_layouts=place), "2": RowwiseParallel(output_layouts=place)}
    parallelize_module(model, tp_mesh(ctx), plan)

    def penalty(model, x):
        grads = torch.autograd.grad(model(x).sin().sum(), list(model.parameters()), create_graph=True)
        squares = [grad.square().sum() for grad in grads]
        total = sum(each.full_tensor() if isinstance(each, DTensor) else each for each in squares)
        total.backward()
        return [total, *(parameter.grad for parameter in model.parameters())]

    got = penalty(model, x.chunk(2, 1)[ctx.rank] if split else x)
    for mine, want in zip(got, penalty(twin, x.double()), strict=True):
        if want is not None:  # the last bias has no part in any gradient
            assert_near(mine, want, "penalty")


class Stacked(nn.Module):
    """Three blocks: what is compiled for the first must do for the others."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.gate = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(8, 16)
            self.down = nn.Linear(16, 8)

        def forward(self, x):
            normed = self.norm(x)
            return x + self.down(self.up(normed) * self.gate(normed).sigmoid())

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.ranks(2)
@pytest.mark.parametrize("words", ["torch's", "Megatron's"])
def test_parallelize_lets_all_blocks_be_compiled_as_one_and_for_good(ctx, words):
    column, row = ("colwise", "rowwise") if words == "torch's" else ("column", "row")

    def trained(compiled):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = parallelize(Stacked().to(ctx.device), {"*.up": column, "*.gate": column, "*.down": row}, ctx)
        graphs = []

        def backend(graph, _):
            graphs.append(graph)
            return graph.forward

        for block in model.blocks if compiled else ():
            block.compile(backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for step in range(10):  # the check compares gradients in steps 1, 2, 4 and 8
                x = normal((4, 8), torch.float32, step).to(ctx.device).requires_grad_()
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [getattr(each, "_local_tensor", each).detach() for each in model.parameters()], len(graphs)

    want, none = trained(False)
    got, graphs = trained(True)
    torch._dynamo.reset()
    assert none == 0 and 1 <= graphs <= 2, graphs  # those of one block
    assert all(map(torch.equal, got, want))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("float8", [None, "rowwise"])
def test_parallelize_module_refuses_a_backward_of_a_forward_from_before_the_step(ctx, float8):
    """As torch does of plain parameters and of its own DTensors, whose counts of writes local tensors don't have.

    (Not of steps by torch._foreach, which count no writes to DTensors, nor of parameters without such counts.)
    """
    mesh = init_device_mesh(ctx.device.type, (ctx.size,), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).to(ctx.device)
    parallelize_module(model, mesh, {"0": ColwiseParallel(float8=float8), "1": RowwiseParallel(float8=float8)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=False)
    x = torch.ones(4, 32, device=ctx.device)
    losses = [model(x).sum() for _ in range(2)]
    losses[0].backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"a parameter \[32.* written to between a forward and its backward"):
        losses[1].backward()
    model(x).sum().backward()
    ctx.check()
