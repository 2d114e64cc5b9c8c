"""ZeRO: the sharded training is the unsharded one, whatever streams hooks run on and whatever a rank leaves out.

Gradients of small integers make everything exact: what is lost, doubled or averaged wrongly shows as inequality.
"""

import collections
import contextlib
import copy
import functools
import gc
import hashlib
import itertools
import math
import warnings
import weakref
import zlib

import numpy as np
import pytest
import torch
import torch._dynamo
from streams import Simulator, subsets
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from transports import gpu_only, message_on_every_rank

import tkernels
from tkernels.comm import Context
from tkernels.comm.errors import LeaseError, MismatchError, TkernelsError
from tkernels.comm.fence import Fence
from tkernels.comm.group import Group
from tkernels.demo.model import ModelConfig, Transformer
from tkernels.layers import (
    ColumnParallelLinear,
    ColwiseParallel,
    RowParallelLinear,
    RowwiseParallel,
    gather_state_dict,
    parallelize_module,
)
from tkernels.layers import userbuffers as te
from tkernels.layers.data_parallel import engine
from tkernels.layers.data_parallel import zero as zero_optimizer
from tkernels.layers.data_parallel.ddp import OverlappedDDP
from tkernels.layers.data_parallel.flat_group import FlatGroup, lay_out, padded
from tkernels.layers.data_parallel.fsdp import FullyShard
from tkernels.layers.data_parallel.layout import ALIGN, in_buckets
from tkernels.layers.data_parallel.values import Values, ensure_params_ready
from tkernels.layers.data_parallel.wire import TkernelsWire
from tkernels.layers.data_parallel.zero import ZeroOptimizer
from tkernels.layers.grad_hooks import called_last
from tkernels.layers.gradients import all_reduce_sequence_parallel_grads, clip_grad_norm_
from tkernels.layers.marks import RANKS
from tkernels.layers.tensor_parallel.mlp import ParallelMLP
from tkernels.testing.compare import assert_close_to

CONFIG = ModelConfig(vocabulary=29, sequence=8, batch=4, heads=2, head_features=8, layers=1)


# Layout


def plan(parameters, capacity, ranks, partition):
    loads, buckets = [0] * ranks, in_buckets(parameters, lambda _: None, lambda _: capacity, padded)
    return [lay_out(bucket, capacity, loads, partition) for bucket in buckets]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("partition", ["elements", "parameters"])
def test_zero_optimizer_every_element_has_one_owner_and_a_place(ranks, partition):
    capacity = 5 * ranks * ALIGN
    sizes = [1, 7, 16, 33, capacity, capacity + 1, 3, 2, 4, 64, 5, 6]
    parameters = [torch.zeros(size) for size in sizes]
    layouts = plan(parameters, capacity, ranks, partition)
    assert {parameter for layout in layouts for parameter in layout.parameters} == set(parameters)
    order = [min(sizes.index(parameter.numel()) for parameter in layout.parameters) for layout in layouts]
    assert order == sorted(order)
    for layout in layouts:
        large = layout.parameters[0].numel() > capacity
        assert len(layout.parameters) == 1 if large else layout.numel <= capacity
        flat = torch.zeros(layout.numel)
        for view in layout.views(flat):
            assert view.storage_offset() % ALIGN == 0
            view += 1
        assert sum(map(torch.Tensor.numel, layout.parameters)) == flat.sum() and flat.max() == 1
        assert not large or layout.numel == layout.parameters[0].numel()
        if partition == "elements" and not large:
            assert len(set(layout.rows)) == 1
        for index, parameter in enumerate(layout.parameters):
            pieces = [layout.piece(index, rank) for rank in range(ranks)]
            owned = [(first, last) for first, last in pieces if last > first]
            assert [0, *(last for _, last in owned)] == [*(first for first, _ in owned), parameter.numel()]
            if partition == "parameters":
                assert len(owned) == 1
            for rank, (first, last) in enumerate(pieces):
                layout.views(flat)[index].view(-1)[first:last] = 2 + rank
        for rank in range(ranks):
            assert set(layout.part(flat, rank).tolist()) <= {0, 2 + rank}


def test_zero_optimizer_whole_parameters_are_shared_out_evenly():
    layouts = plan([torch.zeros(size) for size in (64, 48, 16, 32)], 256, 2, "parameters")
    assert [layout.rows for layout in layouts] == [(80, 80)]


# Like the unsharded training


def batches(ctx, steps, seed=0):
    """For each step this rank's sequences, and all of them: (tokens, targets) [s, b]."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        text = torch.randint(CONFIG.vocabulary, (CONFIG.sequence + 1, CONFIG.batch), generator=generator).to(ctx.device)
        yield text[:, ctx.rank :: ctx.size], text


def loss_of(model, text):
    logits = model(text[:-1], torch.arange(CONFIG.sequence, device=text.device)).flatten(0, 1)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), text[1:].flatten())


def models(ctx, seed=0):
    torch.manual_seed(seed)
    model = Transformer(CONFIG).to(ctx.device)
    return model, copy.deepcopy(model)


# Exactly


def integers(shape, *key):
    generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    return torch.randint(-8, 9, shape, generator=generator).float()


class Exact:
    """Parameters whose gradients are what we say, trained sharded and, beside it, by the same optimizer whole."""

    def __init__(self, ctx, shapes, dtypes=None, optimizer=torch.optim.SGD, settings=None, **options):
        self.ctx, self.shapes = ctx, shapes
        settings = {"lr": 0.5, "momentum": 0.5} if settings is None else settings
        dtypes = dtypes or [torch.float32] * len(shapes)
        start = [
            integers(shape, "start", i).to(ctx.device, dtype)
            for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        ]
        self.parameters = [nn.Parameter(value.clone()) for value in start]
        self.whole = [nn.Parameter(value.float()) for value in start]
        self.zero = ZeroOptimizer(self.parameters, optimizer, mesh=ctx, **options, **settings)
        self.reference = optimizer(self.whole, **settings)

    def gradient(self, i, rank, key):
        return integers(self.shapes[i], i, rank, key).to(self.ctx.device)

    def backward(self, key, used=lambda i, rank: True):
        """A backward in which `rank` uses parameter i if used(i, rank); None of a parameter's ranks: no gradient."""
        terms = [
            (parameter.float() * self.gradient(i, self.ctx.rank, key)).sum()
            for i, parameter in enumerate(self.parameters)
            if used(i, self.ctx.rank)
        ]
        if terms:
            sum(terms).backward()
        for i, whole in enumerate(self.whole):
            ranks = [rank for rank in range(self.ctx.size) if used(i, rank)]
            if ranks:
                gradient = sum(self.gradient(i, rank, key) for rank in ranks) / self.ctx.size
                whole.grad = gradient if whole.grad is None else whole.grad + gradient

    def step(self):
        self.zero.step()
        self.reference.step()
        self.reference.zero_grad()

    def check(self):
        for i, (parameter, whole) in enumerate(zip(self.parameters, self.whole, strict=True)):
            assert torch.equal(parameter, whole.to(parameter.dtype)), i


SHAPES = [(5,), (3, 4), (), (0, 3), (40, 20), (7, 7, 7), (1,), (64,)]  # of which 40 x 20 is larger than a bucket
SMALL = 1024  # bytes of a bucket


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"partition": "parameters", "stage": 1, "overlap_comm": False},
        {"backend": "torch"},
        {"backend": "torch", "partition": "parameters"},
    ],
    ids=str,
)
def test_zero_optimizer_sums_exactly(ctx, options):
    exact = Exact(ctx, SHAPES, bucket_bytes=SMALL, **options)
    assert len(part_of(exact.zero)["masters"]) >= 3
    for step in range(3):
        exact.backward(step)
        exact.step()
        exact.check()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_zero_optimizer_two_dtypes_have_a_bucket_each(ctx, reduce_dtype):
    dtypes = [torch.float32, torch.bfloat16] * 4
    exact = Exact(ctx, SHAPES, dtypes, bucket_bytes=SMALL, reduce_dtype=reduce_dtype)
    for step in range(3):
        exact.backward(step)
        exact.step()
        exact.check()


@pytest.mark.ranks(2)
def test_zero_optimizer_adds_up_what_ranks_and_micro_batches_use_in_no_sync(ctx):
    exact = Exact(ctx, SHAPES, bucket_bytes=SMALL, stage=1)
    for step in range(2):
        with exact.zero.no_sync():
            exact.backward((step, 0))
            exact.backward((step, 1), used=lambda i, rank: i % 2 == 0)
        assert exact.parameters[0].grad is not None
        exact.backward((step, 2), used=lambda i, rank: i % 3 == 0)  # takes what the others have, too
        assert all(parameter.grad is None or parameter.grad.isnan().all() for parameter in exact.parameters)
        with exact.zero.no_sync():
            exact.backward((step, 3), used=lambda i, rank: rank == 0)  # which `step` takes, on all ranks
        exact.step()
        exact.check()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 2])
def test_zero_optimizer_gradients_set_by_hand_count_before_backward_and_are_refused_after_it(ctx, stage):
    exact = Exact(ctx, SHAPES, bucket_bytes=SMALL, stage=stage)
    exact.parameters[1].grad = exact.gradient(1, ctx.rank, "by hand")
    exact.whole[1].grad = sum(exact.gradient(1, rank, "by hand") for rank in range(ctx.size)) / ctx.size
    exact.backward("kept")
    exact.step()
    exact.check()
    exact.backward("lost")
    exact.parameters[1].grad = exact.gradient(1, ctx.rank, "by hand")
    with pytest.raises(TkernelsError, match=r"parameter 1 of shape \[3, 4\] has a gradient .*before backward") as error:
        exact.zero.step()
    message_on_every_rank(ctx, error.value)
    exact.zero.zero_grad()
    exact.reference.zero_grad()
    exact.backward("again")
    exact.step()
    exact.check()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 2])
def test_zero_optimizer_hooks_of_users_see_a_ranks_own_gradient_and_may_change_it(ctx, stage):
    exact, seen = Exact(ctx, SHAPES, bucket_bytes=SMALL, stage=stage), []

    def hook(parameter):
        seen.append(parameter.grad.clone())
        parameter.grad.mul_(2.0)

    handle = exact.parameters[4].register_post_accumulate_grad_hook(hook)  # behind the optimizer's
    for step in range(2):
        exact.backward(step)
        assert torch.equal(seen.pop(), exact.gradient(4, ctx.rank, step)) and not seen
        exact.whole[4].grad *= 2
        exact.step()
        exact.check()
    handle.remove()
    exact.backward("unwatched")
    exact.step()
    exact.check()
    assert not seen


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 2])
def test_zero_optimizer_deferred_weight_gradients_count(ctx, stage):
    """Whatever the order in which they are computed, and though a rank has none of some layer."""

    def trained(delay):
        common = dict(params_dtype=torch.float32, device=ctx.device, delay_wgrad_compute=delay)
        layers = [te.Linear(4, 4, bias=bias, **common) for bias in (True, False)]
        for i, parameter in enumerate(parameters := [p for layer in layers for p in layer.parameters()]):
            parameter.data.copy_(integers(parameter.shape, "start", i))
        zero = ZeroOptimizer(parameters, torch.optim.SGD, mesh=ctx, lr=0.5, momentum=0.5, stage=stage)
        for step in range(2):
            for micro in range(2):
                x = integers((3, 4), step, micro, ctx.rank).to(ctx.device)
                loss = layers[0](x).sum()
                (loss + layers[1](x).square().sum() if ctx.rank == 0 else loss).backward()
                if micro or step:  # of both micro-batches at once, or of each
                    for layer in layers:
                        layer.backward_dw()
            zero.step()
        zero.remove()
        return parameters

    deferred, plain = trained(True), trained(False)
    assert all(map(torch.equal, deferred, plain))


UNUSED = {
    "by one rank": lambda i, rank: i % 3 != 0 or rank != 1,
    "by all but one": lambda i, rank: i % 2 == 0 or rank == 0,
    "by all": lambda i, rank: i % 3 != 1,
    "one rank has no loss at all": lambda i, rank: rank != 0,
    "different ones": lambda i, rank: (i + rank) % 2 == 0,
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("unused", UNUSED)
def test_zero_optimizer_ranks_may_leave_parameters_out(ctx, unused):
    """What no rank used keeps its value, momentum and weight decay notwithstanding."""
    settings = {"lr": 0.5, "momentum": 0.5, "weight_decay": 0.25}
    exact = Exact(ctx, SHAPES, bucket_bytes=SMALL, settings=settings)
    for step in range(3):
        exact.backward(step, used=UNUSED[unused] if step else lambda i, rank: True)
        exact.step()
        exact.check()


@pytest.mark.ranks(2)
def test_zero_optimizer_weights_that_are_loaded_count_or_are_refused(ctx):
    weight = nn.Parameter(torch.ones(40, device=ctx.device))
    zero = ZeroOptimizer([weight], torch.optim.SGD, mesh=ctx, lr=0.5)
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(3.0)  # averages to evaluate, for example
        weight.copy_(kept)  # and back
    weight.sum().backward()
    zero.step()
    assert weight.eq(0.5).all()
    with torch.no_grad():
        weight.fill_(5.0)
    with pytest.raises(ValueError, match="step: parameter 0 of .* changed elsewhere, .* call refresh_masters"):
        zero.step()
    zero.zero_grad()
    zero.refresh_masters()
    weight.sum().backward()
    zero.step()
    assert weight.eq(4.5).all()


@pytest.mark.ranks(2)
def test_zero_optimizer_refuses_on_every_rank_what_one_rank_has_noticed(ctx):
    """As of a load on rank 0 and a broadcast, which torch counts as no write."""
    with tkernels.init(ctx.group.process_group, heap_bytes=8 << 20, timeout_s=20) as own:
        weight = nn.Parameter(torch.ones(40, device=ctx.device))
        zero, kept = ZeroOptimizer([weight], torch.optim.SGD, mesh=own, lr=0.5), weight.detach().clone()
        for loaded in (kept, 3 * kept):
            if ctx.rank == 0:
                with torch.no_grad():
                    weight.fill_(7.0)  # averages to evaluate there
                    weight.copy_(loaded)
            weight.sum().backward()
            if loaded is kept:
                zero.step()
        with pytest.raises(tkernels.MismatchError, match="rank 0 is in .*step of parameters .* call refresh_masters"):
            zero.step()
            own.check()


@pytest.mark.ranks(2)
def test_zero_optimizer_over_torch_refuses_on_every_rank_what_has_changed_on_one(ctx):
    """As of a load of a parameter that one rank owns: over torch.distributed the other would meet no call of ours."""
    weights = [nn.Parameter(torch.ones(40, device=ctx.device)) for _ in range(2)]
    zero = ZeroOptimizer(weights, torch.optim.SGD, mesh=ctx, backend="torch", partition="parameters", lr=0.5)
    with torch.no_grad():
        weights[1].fill_(3.0)
    sum(weights).sum().backward()
    with pytest.raises(ValueError, match="step: parameter 1 of .* changed elsewhere"):
        zero.step()


def small_model(ctx):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).to(ctx.device)


def sgd_steps(ctx, model, optimizer, steps=2):
    """Steps of this rank's own data; returns the parameters then."""
    for step in range(steps):
        torch.manual_seed(10 * step + ctx.rank)
        model(torch.randn(4, 6, device=ctx.device)).square().mean().backward()
        optimizer.step()
    optimizer.ensure_params_ready()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("before", ["alive", "removed", "dropped"])
def test_zero_optimizer_parameters_belong_to_the_newest_optimizer_and_then_to_none(ctx, before):
    def optimizer(model):
        return ZeroOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1, mesh=ctx, overlap_gather=model)

    want = sgd_steps(ctx, fresh := small_model(ctx), optimizer(fresh))
    model = small_model(ctx)
    older = optimizer(model)
    if before == "removed":
        older.remove()
        older.remove()
    if before == "dropped":
        seen = weakref.ref(older)
        gc.disable()  # it lets go at once
        del older
        model(torch.ones(4, 6, device=ctx.device)).sum().backward()
        gc.enable()
        assert seen() is None and all(parameter.grad is not None for parameter in model.parameters())
        model.zero_grad()
    newer = optimizer(model)
    assert all(map(torch.equal, sgd_steps(ctx, model, newer), want))
    newer.remove()
    model(torch.ones(4, 6, device=ctx.device)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.ranks(2)
def test_zero_optimizer_parameters_that_were_converted_or_moved_are_refused_by_name(ctx):
    model = small_model(ctx)
    zero = ZeroOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1, mesh=ctx)
    sgd_steps(ctx, model.to(ctx.device, torch.float32), zero)  # as they were
    model[2].double()
    state, full = copy.deepcopy(zero.state_dict()), zero.full_state_dict()
    masters = [value.clone() for value in part_of(zero)["masters"]]
    [part] = state.values()
    for saved in (part["masters"], full["masters"].values()):
        [value.add_(1.0) for value in saved]
    uses = (
        lambda: sgd_steps(ctx, model[:2], zero),
        zero.refresh_masters,
        lambda: zero.load_state_dict(state),
        lambda: zero.load_full_state_dict(full),
    )
    for use in uses:
        with pytest.raises(LeaseError, match=r"2\.bias has been converted or moved.* make another") as error:
            use()
        message_on_every_rank(ctx, error.value)
        assert all(map(torch.equal, part_of(zero)["masters"], masters))  # nothing has changed
    newer = ZeroOptimizer(model.float().parameters(), torch.optim.SGD, lr=0.1, mesh=ctx)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    assert not any(map(torch.equal, sgd_steps(ctx, model, newer), before))


@pytest.mark.ranks(2)
def test_zero_optimizer_after_an_error_in_backward_or_step_training_goes_on(ctx):
    class Failing(torch.optim.SGD):
        fails = False

        def step(self):
            if self.fails:
                raise RuntimeError("out of luck")
            super().step()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 3)

        def forward(self, numbers):
            return self.head(self.table(numbers))

    torch.manual_seed(0)
    model, numbers = Model().to(ctx.device), torch.tensor([ctx.rank, 7], device=ctx.device)
    plain = copy.deepcopy(model)
    model.table.sparse = plain.table.sparse = False
    optimizers = [ZeroOptimizer(each.parameters(), Failing, lr=0.1, mesh=ctx) for each in (model, plain)]
    for step in range(3):
        if step == 0:
            model.table.sparse = True
            with pytest.raises(TypeError, match="the gradient of parameter 0 .* is sparse"):
                model(numbers).sum().backward()
            model.table.sparse = False
            optimizers[0].zero_grad()
        if step == 1:
            optimizers[0].optimizer.fails = True
            model(numbers).square().sum().backward()
            with pytest.raises(RuntimeError, match="out of luck"):
                optimizers[0].step()
            optimizers[0].optimizer.fails = False
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            each(numbers).square().sum().backward()
            optimizer.step()
        assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.ranks(2)
def test_zero_optimizer_refuses_to_go_on_after_a_backward_that_failed_until_zero_grad(ctx):
    exact = Exact(ctx, SHAPES, bucket_bytes=SMALL)

    def fail(gradient):
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        hook = exact.parameters[0].register_hook(fail)  # backward comes to it last
        sum((parameter * (1 + ctx.rank)).sum() for parameter in exact.parameters).backward()
    hook.remove()
    for use in (exact.zero.step, lambda: exact.backward("lost")):
        with pytest.raises(TkernelsError, match="backward has failed.* call zero_grad"):
            use()
    exact.zero.zero_grad()
    exact.reference.zero_grad()
    exact.backward("kept")
    exact.step()
    exact.check()


@pytest.mark.ranks(2)
def test_zero_optimizer_fp16_sums_that_are_too_large_have_a_mean(ctx):
    weight = nn.Parameter(torch.zeros(8, dtype=torch.float16, device=ctx.device))
    zero = ZeroOptimizer([weight], torch.optim.SGD, lr=1.0, mesh=ctx)
    for _ in range(2):
        (weight * 40000.0).sum().backward()
    zero.step()
    assert zero.grad_norm.isfinite() and weight.isneginf().all()  # -80000, as without sharding


@pytest.mark.ranks(2)
def test_zero_optimizer_groups_keep_their_options_and_closures_run(ctx):
    parameters = [nn.Parameter(torch.ones(40, device=ctx.device)) for _ in range(3)]
    frozen = nn.Parameter(torch.ones(3, device=ctx.device), requires_grad=False)
    groups = [{"params": parameters[:2]}, {"params": [parameters[2], frozen], "lr": 2.0}]
    zero = ZeroOptimizer(groups, torch.optim.SGD, mesh=ctx, lr=1.0)

    def closure():
        loss = sum(parameter.sum() for parameter in parameters)
        loss.backward()
        return loss

    assert zero.step(closure).item() == 120
    assert [parameter[0].item() for parameter in (*parameters, frozen)] == [0, 0, -1, 1]
    assert [group["lr"] for group in zero.param_groups] == [1.0, 2.0]
    frozen.requires_grad_()
    with pytest.raises(TkernelsError, match=r"parameter 3 of shape \[3\] is to be trained, but was frozen when"):
        zero.step(closure)
    assert [parameter[0].item() for parameter in parameters] == [0, 0, -1]


@pytest.mark.ranks(4)
def test_zero_optimizer_experts_are_shared_by_some_of_the_ranks(ctx):
    """Ranks 0 and 2 hold one expert, 1 and 3 another; each is averaged over all ranks, and leaves the others alone."""
    groups = [torch.distributed.new_group([0, 2]), torch.distributed.new_group([1, 3])]
    experts = tkernels.init(groups[ctx.rank % 2], heap_bytes=16 << 20)
    shared, own = (nn.Parameter(torch.full((50,), 4.0, device=ctx.device)) for _ in range(2))
    unused = nn.Parameter(torch.ones(3, device=ctx.device))  # one expert uses it, and the other doesn't
    zero = ZeroOptimizer(
        [{"params": [shared]}, {"params": [own, unused], "mesh": experts}],
        torch.optim.SGD, mesh=ctx, lr=1.0, weight_decay=0.5, max_norm=1e9,
    )  # fmt: skip
    loss = (shared * ctx.rank).sum() + (own * 2.0**ctx.rank).sum()
    (loss + unused.sum() if ctx.rank % 2 else loss).backward()
    zero.step()
    assert shared[7].item() == 4 - 2 - (0 + 1 + 2 + 3) / 4
    assert own[7].item() == 4 - 2 - (2.0 ** (ctx.rank % 2) + 2.0 ** (ctx.rank % 2 + 2)) / 4
    assert unused[0].item() == (1 - 0.5 - 0.5 if ctx.rank % 2 else 1)
    squares = 50 * (1.5**2 + 1.25**2 + 2.5**2) + 3 * 0.5**2
    assert zero.grad_norm.item() == pytest.approx(squares**0.5, rel=1e-6)
    zero.remove()
    experts.finalize()


# Scaling


@pytest.mark.ranks(2)
def test_zero_optimizer_a_step_that_overflows_anywhere_is_skipped_everywhere(ctx):
    parameter = nn.Parameter(torch.ones(40, device=ctx.device, dtype=torch.float16))
    zero = ZeroOptimizer([parameter], torch.optim.SGD, mesh=ctx, lr=1.0, loss_scale="dynamic", bucket_bytes=SMALL)
    for step, value in enumerate([torch.inf if ctx.rank == 1 else 1.0, 0.5, torch.nan if ctx.rank == 0 else 1.0]):
        zero.scale((parameter.float() * value / 2**10).sum()).backward()
        zero.step()
        assert zero.skipped == (step != 1)
        assert zero.loss_scale == 2.0 ** (16 - (step + 2) // 2)
        assert torch.equal(parameter, torch.full_like(parameter, 1.0 if step == 0 else 1 - 2**-11))


@pytest.mark.ranks(2)
def test_zero_optimizer_a_loss_scale_grows_after_an_interval_without_a_skip_and_goes_on_from_either_state(
    ctx, monkeypatch
):
    monkeypatch.setattr(zero_optimizer, "GROWTH_INTERVAL", 3)

    def made(loss_scale="dynamic"):
        parameter = nn.Parameter(torch.ones(40, device=ctx.device))
        return parameter, ZeroOptimizer([parameter], torch.optim.SGD, mesh=ctx, lr=1.0, loss_scale=loss_scale)

    def scales(parameter, zero, steps, overflow=None):
        found = []
        for step in range(steps):
            zero.scale((parameter * (torch.inf if step == overflow and ctx.rank == 1 else 0.25)).sum()).backward()
            zero.step()
            found.append(zero.loss_scale / 2.0**16)
        return found

    parameter, zero = made()
    assert scales(parameter, zero, 8, overflow=5) == [1.0, 1.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0]
    assert scales(parameter, zero, 3, overflow=0) == [0.5, 0.5, 0.5]
    assert parameter.eq(1 - 9 * 0.25).all()
    (same, sharded), (another, full), (fixed_one, fixed) = made(), made(), made(8.0)
    sharded.load_state_dict(zero.state_dict())
    full.load_full_state_dict(zero.full_state_dict())
    fixed.load_full_state_dict(zero.full_state_dict())
    assert torch.equal(same, parameter) and torch.equal(another, parameter) and torch.equal(fixed_one, parameter)
    assert scales(same, sharded, 4) == scales(parameter, zero, 4) == [1.0, 1.0, 1.0, 2.0]
    fixed.load_state_dict(zero.state_dict())
    assert fixed.loss_scale == 8.0  # as it was asked for
    assert scales(another, full, 4) == [0.5, 0.5, 1.0, 1.0] and scales(fixed_one, fixed, 1) == [2.0**-13]
    assert torch.equal(same, parameter) and torch.equal(another, parameter)


@pytest.mark.ranks(2)
def test_zero_optimizer_masters_keep_what_the_parameters_round_away(ctx):
    parameter = nn.Parameter(torch.ones(40, device=ctx.device, dtype=torch.bfloat16))
    zero = ZeroOptimizer([parameter], torch.optim.SGD, mesh=ctx, lr=2.0**-10)
    for _ in range(8):
        parameter.sum().backward()
        zero.step()
    assert parameter[3].item() == 1 - 8 * 2.0**-10


# State


def trained(ctx, steps, zero, model, skip=0):
    for own, _ in list(batches(ctx, skip + steps))[skip:]:
        loss_of(model, own).backward()
        zero.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def part_of(zero) -> dict:
    """What its state dict has of this rank."""
    [part] = zero.state_dict().values()
    return part


def adam_of(ctx, model, **options):
    return ZeroOptimizer(model.parameters(), torch.optim.AdamW, mesh=ctx, lr=1e-2, **{"bucket_bytes": 4096} | options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("full", [False, True])
def test_zero_optimizer_a_loaded_state_continues_to_the_bit(ctx, full):
    (first, second), (third, _) = models(ctx), models(ctx, seed=1)
    want = trained(ctx, 4, adam_of(ctx, first), first)
    half = adam_of(ctx, second)
    trained(ctx, 2, half, second)
    other = {"partition": "parameters", "bucket_bytes": 1 << 16} if full else {}
    rest = adam_of(ctx, third, **other)
    if full:
        rest.load_full_state_dict(half.full_state_dict())
    else:
        rest.load_state_dict(half.state_dict())
    got = trained(ctx, 2, rest, third, skip=2)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def schedules(optimizer):
    """Schedulers of all kinds: functions of the step, of the optimizer's defaults, of a metric, and in sequence."""
    lr = torch.optim.lr_scheduler
    cosine = functools.partial(lr.CosineAnnealingLR, optimizer, T_max=4)
    yield lr.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    yield lr.OneCycleLR(optimizer, max_lr=0.5, total_steps=8)
    yield lr.ReduceLROnPlateau(optimizer, patience=0)
    yield lr.SequentialLR(optimizer, [lr.ConstantLR(optimizer, total_iters=2), cosine()], milestones=[2])


@pytest.mark.ranks(2)
def test_zero_optimizer_takes_schedulers_as_torchs_do(ctx):
    def make(kind, sharded):
        model = small_model(ctx)
        options = {"lr": 0.25, "momentum": 0.5}
        if sharded:
            optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, mesh=ctx, **options)
        else:
            optimizer = torch.optim.SGD(model.parameters(), **options)
        return model, optimizer, list(itertools.islice(schedules(optimizer), kind, kind + 1))[0]

    def train(model, optimizer, scheduler, steps):
        rates = []
        for step in steps:
            x = integers((4, 6), "x", step).to(ctx.device) / 8  # the same on all ranks: the mean is the gradient
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(*[1.0] * isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's for schedulers that are stepped first, among others
        warnings.filterwarnings("ignore", "The epoch parameter")  # of SequentialLR itself
        for kind in range(4):
            plain, zero = (make(kind, sharded) for sharded in (False, True))
            assert isinstance(zero[1], torch.optim.Optimizer)
            rates = train(*plain, range(5))
            assert len(set(rates)) > 2 and train(*zero, range(3)) == rates[:3]
            resumed = make(kind, True)
            for old, new in zip(zero, resumed, strict=True):
                new.load_state_dict(copy.deepcopy(old.state_dict()))
            assert train(*resumed, range(3, 5)) == train(*zero, range(3, 5)) == rates[3:]
            models = (model.parameters() for model, *_ in (zero, resumed, plain))
            for parameter, same, want in zip(*models, strict=True):
                assert torch.equal(parameter, same)
                assert_close_to(parameter, want.double(), terms=256)


@pytest.mark.ranks(2)
def test_zero_optimizer_has_an_optimizers_hooks_and_refuses_what_it_cant_do(ctx):
    model, calls = small_model(ctx), []
    zero = ZeroOptimizer(model.parameters(), torch.optim.SGD, mesh=ctx, lr=1.0)
    zero.register_step_pre_hook(lambda optimizer, *_: calls.append(optimizer))
    zero.register_step_post_hook(lambda optimizer, *_: calls.append(optimizer))
    sgd_steps(ctx, model, zero, steps=1)
    assert calls == [zero, zero]
    with pytest.raises(TkernelsError, match="make a new ZeroOptimizer of all"):
        zero.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(TypeError, match="can't be copied or pickled; save its state_dict"):
        copy.deepcopy(zero)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("partition", ["elements", "parameters"])
def test_zero_optimizer_the_full_state_is_that_of_the_unsharded_optimizer(ctx, partition):
    adam = {"optimizer": torch.optim.Adam, "settings": {"lr": 0.5, "eps": 1.0}}
    exact = Exact(ctx, SHAPES, bucket_bytes=SMALL, partition=partition, **adam)
    exact.backward(0)
    exact.step()
    got, want = exact.zero.full_state_dict(), exact.reference.state_dict()
    assert [group["params"] for group in got["param_groups"]] == [group["params"] for group in want["param_groups"]]
    for number, values in want["state"].items():
        if exact.parameters[number].numel():  # an empty one needs no state
            for name, value in values.items():
                assert torch.equal(got["state"][number][name], value.cpu()), (number, name)
    resumed = Exact(ctx, SHAPES, bucket_bytes=SMALL, **adam)
    resumed.zero.load_full_state_dict(want)  # without masters: the parameters stay
    for parameter, whole in zip(resumed.parameters, exact.whole, strict=True):
        parameter.data.copy_(whole)
    resumed.zero.refresh_masters()
    resumed.whole, resumed.reference = exact.whole, exact.reference
    resumed.backward(1)
    resumed.step()
    resumed.check()


@pytest.mark.ranks(2)
def test_zero_optimizer_frozen_parameters_have_numbers_in_the_full_state(ctx):
    settings = {"lr": 0.5, "eps": 1.0}

    def parameters(frozen):
        return [nn.Parameter(integers((3, 4), i).to(ctx.device), i not in frozen) for i in range(3)]

    def sharded(*frozen):
        return (mine := parameters(frozen)), ZeroOptimizer(mine, torch.optim.Adam, mesh=ctx, **settings)

    def step(mine, optimizer):
        sum((parameter * parameter).sum() for parameter in mine if parameter.requires_grad).backward()
        optimizer.step()
        optimizer.zero_grad()

    whole = parameters(frozen=[0])
    adam = torch.optim.Adam(whole, **settings)
    step(whole, adam)
    mine, zero = sharded(0)
    for parameter, value in zip(mine, whole, strict=True):
        parameter.data.copy_(value)
    zero.load_full_state_dict(adam.state_dict())
    step(whole, adam)
    step(mine, zero)
    assert all(map(torch.equal, mine, whole))
    full, want = zero.full_state_dict(), adam.state_dict()
    assert full["state"].keys() == want["state"].keys() == {1, 2}
    assert all(torch.equal(full["state"][i]["exp_avg"], want["state"][i]["exp_avg"].cpu()) for i in (1, 2))
    torch.optim.Adam(parameters(frozen=[0])).load_state_dict(full)
    thawed, rest = sharded()
    rest.load_full_state_dict(full)
    assert all(map(torch.equal, thawed, whole))
    with pytest.raises(ValueError, match="another parameters"):
        rest.load_state_dict(zero.state_dict())
    full["param_groups"][0]["params"] = [0, 1, 2][ctx.rank :]
    with pytest.raises(
        ValueError, match=r"got groups of \[2\] parameters.*groups of \[3\]; .*frozen.*on rank 1"
    ) as error:
        rest.load_full_state_dict(full)
    message_on_every_rank(ctx, error.value)


@pytest.mark.ranks(2)
def test_zero_optimizer_another_layout_is_refused(ctx):
    model, other = models(ctx)
    state = adam_of(ctx, model).state_dict()
    rest = adam_of(ctx, other, bucket_bytes=1 << 16)
    with pytest.raises(ValueError, match="another bucket_bytes.*full_state_dict"):
        rest.load_state_dict(state)
    with pytest.raises(ValueError, match="load_full_state_dict"):
        rest.load_state_dict(adam_of(ctx, other).full_state_dict())
    resumed = adam_of(ctx, model)
    state = resumed.state_dict()
    with pytest.raises(ValueError, match="got no sharded state of rank 1; .*on rank 1") as error:
        resumed.load_state_dict(ctx.group.gather(state)[0])  # one file for all
    message_on_every_rank(ctx, error.value)


@pytest.mark.ranks(2)
def test_zero_optimizer_goes_through_torch_distributed_checkpoint(ctx, tmp_path):
    model, other = models(ctx)
    zero, path = adam_of(ctx, model), tmp_path / "asynchronously"
    trained(ctx, 2, zero, model)
    saved = {"optimizer": zero.state_dict()}
    dcp.save(saved, checkpoint_id=tmp_path)
    dcp.async_save(saved, checkpoint_id=path).result()
    want = trained(ctx, 2, zero, model)
    for where in (tmp_path, path):
        state = {"optimizer": zero.state_dict()}
        dcp.load(state, checkpoint_id=where)
        zero.load_state_dict(state["optimizer"])
        assert all(map(torch.equal, trained(ctx, 2, zero, model), want))
    fresh = adam_of(ctx, other)
    state = {"optimizer": fresh.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match="the states of 0 parameters where those of .* take a step before") as refused:
        fresh.load_state_dict(state["optimizer"])
    message_on_every_rank(ctx, refused.value)


@pytest.mark.ranks(2)
def test_zero_optimizer_ranks_start_from_the_values_of_rank_0(ctx):
    parameter = nn.Parameter(torch.full((40,), float(ctx.rank + 1), device=ctx.device))
    ZeroOptimizer([parameter], torch.optim.SGD, mesh=ctx, lr=1.0)
    assert parameter.tolist() == [1.0] * 40


@pytest.mark.ranks(2)
def test_zero_optimizer_parts_of_tensors_are_kept_apart_from_rank_0s(ctx):
    """What the ranks split between them is refused; what a rank has whole is not, nor what is equal."""
    torch.manual_seed(0)
    split = ParallelMLP(8, 16, mesh=ctx)
    split.fc1.bias.data.zero_()
    before = copy.deepcopy(split.state_dict())
    frozen = nn.Parameter(torch.ones(2, device=ctx.device), requires_grad=False)
    named = [("frozen", frozen), *split.named_parameters()]
    with pytest.raises(ValueError, match=r"fc1.weight is split over ranks \[0, 1\], .* replicas"):
        ZeroOptimizer(named, torch.optim.SGD, mesh=ctx, lr=1.0)
    for _, parameter in named:  # as of Megatron's layers
        vars(parameter).pop(RANKS, None)
    with pytest.raises(MismatchError, match=r"in fc1.weight, fc2.weight, which .* mesh of the data-parallel") as error:
        ZeroOptimizer(named, torch.optim.SGD, mesh=ctx, lr=1.0)
    message_on_every_rank(ctx, error.value)
    assert all(torch.equal(value, before[name]) for name, value in split.state_dict().items())
    torch.manual_seed(ctx.rank)
    groups = [torch.distributed.new_group([rank]) for rank in range(ctx.size)]
    alone = tkernels.init(groups[ctx.rank], heap_bytes=1 << 20, default=False)
    whole = ParallelMLP(8, 16, mesh=alone)
    ZeroOptimizer(whole.parameters(), torch.optim.SGD, mesh=ctx, lr=1.0)
    assert len(set(ctx.group.gather(digest(whole.parameters())))) == 1
    alone.finalize()


def makes_nothing(*_, **options):
    return None


REFUSED = {
    "stage=3 is unknown; use 1 or 2": {"stage": 3},
    "stage=2.0 is unknown; use 1 or 2": {"stage": 2.0},
    "stage=True is unknown; use 1 or 2": {"stage": True},
    "SparseAdam takes sparse gradients": {"optimizer_class": torch.optim.SparseAdam},
    "of shape [4] is computed from others": {"params": lambda p: [2 * p]},
    "a parameter is not initialized, as a lazy module's": {"params": lambda p: nn.LazyLinear(4).parameters()},
    "backend='nccl' is unknown": {"backend": "nccl"},
    "bucket_bytes=0 must be positive": {"bucket_bytes": 0},
    "loss_scale=1e+60 is more than fp32 can hold": {"loss_scale": 10**60},
    "needs overlap_comm=True": {"overlap_comm": False, "overlap_gather": nn.Linear(1, 1)},
    "pass partition='parameters'": {"optimizer_class": functools.partial(torch.optim.Adafactor, lr=1e-2)},
    "LBFGS": {"optimizer_class": torch.optim.LBFGS},
    "occurs twice": {"params": lambda p: [{"params": [p]}, {"params": [p]}]},
    "no parameter that requires": {"params": lambda p: []},
    "not torch.float64": {"params": lambda p: [nn.Parameter(p.data.double())]},
    "is on meta, without values": {"params": lambda p: [nn.Parameter(p.data.to("meta"))], "backend": "torch"},
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("message", REFUSED)
def test_zero_optimizer_what_cannot_be_sharded_is_refused_on_every_rank(ctx, message):
    options = dict(REFUSED[message])
    parameter = nn.Parameter(torch.ones(4, device=ctx.device))
    params = options.pop("params", lambda p: [p])(parameter)
    with pytest.raises((ValueError, TypeError)) as refused:
        ZeroOptimizer(params, options.pop("optimizer_class", torch.optim.SGD), mesh=ctx, **options)
    assert message.lstrip("not ") in message_on_every_rank(ctx, refused.value)


@pytest.mark.ranks(2)
def test_zero_optimizer_ranks_that_differ_are_refused(ctx):
    parameter = nn.Parameter(torch.ones(4 + ctx.rank, device=ctx.device))
    with pytest.raises(MismatchError, match=r"differ in parameters \(.*\), stage") as refused:
        ZeroOptimizer([parameter], torch.optim.SGD, mesh=ctx, stage=1 + ctx.rank)
    message_on_every_rank(ctx, refused.value)
    parameter = nn.Parameter(torch.ones(4, device=ctx.device))
    with pytest.raises(MismatchError, match=r"differ in options \(.*\), groups"):
        groups = [{"params": [parameter], "weight_decay": 0.1 * ctx.rank}]
        ZeroOptimizer(groups, torch.optim.SGD, mesh=ctx, lr=1.0 + ctx.rank)
    alike = [(name, nn.Parameter(torch.ones(4, device=ctx.device))) for name in "ab"]
    with pytest.raises(MismatchError, match=r"differ in names \(\['a', 'b'\] and \['b', 'a'\]\)"):
        ZeroOptimizer(alike[:: 1 - 2 * ctx.rank], torch.optim.SGD, mesh=ctx)


@pytest.mark.ranks(2)
def test_zero_optimizer_refuses_arguments_of_other_types_by_name_and_leaves_no_hooks(ctx):
    parameter = nn.Parameter(torch.ones(8, device=ctx.device))
    for message, change in (
        ("optimizer_class='SGD' must be a class", {"optimizer_class": "SGD"}),
        ("overlap_gather=True must be an nn.Module", {"overlap_gather": True}),
        ("reduce_dtype='bf16' must be a torch.dtype", {"reduce_dtype": "bf16"}),
        ("overlap_comm='no' must be True or False", {"overlap_comm": "no"}),
        ("bucket_bytes=2.5 must be a number", {"bucket_bytes": 2.5}),
        ("max_norm='x' must be a number", {"max_norm": "x"}),
        ("max_norm=tensor.* must be a number", {"max_norm": torch.ones(3)}),
        ("loss_scale=tensor.* must be a number", {"loss_scale": torch.ones(3)}),
        ("backend=array.* must be a name", {"backend": np.ones(3)}),
        ("optimizer_class=makes_nothing made a NoneType, which is no", {"optimizer_class": makes_nothing}),
        ("params=tensor.* must be parameters, or groups of them", {"params": torch.ones(())}),
        ("takes a Context", {"tensor_parallel": "tp"}),
        ("parameter=3 must be a tensor", {"params": [3]}),
        ("a param group is a dict with params, not {}", {"params": [{}]}),
        ("params of a group=3 must be parameters", {"params": [{"params": 3}]}),
        ("params=3 must be parameters, or groups of them", {"params": 3}),
        ("takes a Context", {"params": [{"params": [parameter], "mesh": "x"}]}),
    ):
        arguments = {"params": [parameter], "optimizer_class": torch.optim.SGD, "mesh": ctx, "lr": 1.0}
        with pytest.raises(TypeError, match=message) as refused:
            ZeroOptimizer(**arguments | change)
        message_on_every_rank(ctx, refused.value)
        with pytest.raises((TypeError, MismatchError), match="on rank 1|of rank 0 and rank 1 differ") as refused:
            ZeroOptimizer(**arguments | (change if ctx.rank == 1 else {}))
        message_on_every_rank(ctx, refused.value)
    with pytest.raises(TypeError, match="there is no process_group=; pass the ranks as mesh="):
        ZeroOptimizer([parameter], torch.optim.SGD, lr=1.0, process_group=None)
    zero = ZeroOptimizer([parameter], torch.optim.SGD, mesh=ctx, lr=1.0)
    refusals = (lambda: zero.step(3), "step: closure=3 must be"), (lambda: zero.scale("x"), "scale: loss='x'")
    for call, message in refusals:
        with pytest.raises(TypeError, match=f"ZeroOptimizer.*{message}"):
            call()
    zero.remove()
    with pytest.raises(ValueError, match="Invalid learning rate") as refused:  # kept, and with it what its frames hold
        ZeroOptimizer([parameter], torch.optim.SGD, mesh=ctx, lr=-1.0)
    parameter.sum().backward()
    assert refused and parameter.grad.tolist() == [1.0] * 8


def _spoilt(state, change, part=None):
    state = copy.deepcopy(state)
    change(state if part is None else state[part])
    return state


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["tkernels", "torch"])
def test_zero_optimizer_refuses_dtensors_by_name(ctx, backend):
    mesh = init_device_mesh(ctx.device.type, (2, 1), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(ctx.device)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    with pytest.raises(TypeError, match="ZeroOptimizer: 0.weight is a DTensor, .* use fully_shard"):
        ZeroOptimizer(model.named_parameters(), torch.optim.SGD, lr=1.0, mesh=mesh["dp"], backend=backend)


@pytest.mark.ranks(2)
def test_zero_optimizer_refuses_states_that_do_not_fit_on_every_rank_before_anything_changed(ctx):
    parameter = nn.Parameter(torch.arange(1.0, 81, device=ctx.device).view(8, 10))
    zero = ZeroOptimizer([parameter], torch.optim.Adam, mesh=ctx, lr=0.5)
    parameter.sum().backward()
    zero.step()
    kept = parameter.detach().clone()
    sharded, full, own = zero.state_dict(), zero.full_state_dict(), f"rank {ctx.rank}"
    wrong = [
        (zero.load_state_dict, None),
        (zero.load_state_dict, {"layout": 3}),
        (zero.load_state_dict, {own: {"layout": 3}}),
        (zero.load_state_dict, _spoilt(sharded, lambda state: state.update(masters=[torch.ones(1)]), own)),
        (zero.load_state_dict, _spoilt(sharded, lambda state: state.pop("masters"), own)),
        (zero.load_state_dict, _spoilt(sharded, lambda state: state.pop("optimizer"), own)),
        (zero.load_full_state_dict, None),
        (zero.load_full_state_dict, {}),
        (zero.load_full_state_dict, _spoilt(full, lambda state: state.pop("state"))),
        (zero.load_full_state_dict, _spoilt(full, lambda state: state["state"].update({0: None}))),
        (zero.load_full_state_dict, _spoilt(full, lambda state: state["masters"].update({0: torch.ones(1)}))),
        (zero.load_full_state_dict, _spoilt(full, lambda state: state["masters"].update({0: None}))),
    ]
    for load, state in wrong:  # on one rank alone, and refused by both
        with pytest.raises(ValueError, match="got .* \\(on rank 1\\)") as refused:
            load(state if ctx.rank else sharded if load == zero.load_state_dict else full)
        message_on_every_rank(ctx, refused.value)
    assert torch.equal(parameter, kept)
    zero.load_state_dict(sharded)
    zero.load_full_state_dict(full)
    assert torch.equal(parameter, kept)


@pytest.mark.ranks(2)
def test_zero_optimizer_refuses_to_step_and_load_once_it_is_removed(ctx):
    parameter = nn.Parameter(torch.ones(8, device=ctx.device))
    zero = ZeroOptimizer([parameter], torch.optim.SGD, mesh=ctx, lr=0.5)
    state = zero.state_dict()
    zero.remove()
    parameter.sum().backward()
    for call in (zero.step, zero.refresh_masters, lambda: zero.load_state_dict(state)):
        with pytest.raises(LeaseError, match="was removed from its parameters"):
            call()
    assert parameter.grad.tolist() == [1.0] * 8  # it stays with whoever trains now


# Streams


class Tower(nn.Module):
    """[n] -> a number, by parameters of which one is larger than a bucket."""

    def __init__(self, numel, start):
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.full((numel,), start)) for _ in range(2))
        self.large = nn.Parameter(torch.full((2, 2 * numel), start))

    def forward(self, x):
        return ((x * self.weight + self.bias) * self.large.sum(0)[: x.numel()]).sum()


class OneRank(Context):
    """As much of a Context as there is without ranks."""

    rank, size, name, device = 0, 1, "one rank", torch.device("cpu")
    group = object.__new__(Group)
    group.rank, group.size, group.global_ranks = 0, 1, [0]

    def __init__(self):
        pass


def simulate(patch, wrong=None, numel=16, steps=3, overlap_gather=True, reverse=False):
    """Train two towers, each on its own stream, whose hooks run there too. Returns simulator, parameters, reference.

    In place of other ranks, a reduction doubles what it gets, and a gather writes what is there. With `reverse`, the
    last tower's forward comes first and its gradients last, so that those of the first tower wait for their bucket.
    """
    sim = Simulator()
    streams, kept = [sim.Stream("left"), sim.Stream("right")], []

    def reduce_scatter(self, x, rows, factor, out):
        sim.launch("reduce", lambda x, out: out.copy_(x.mul_(2 * factor)), writes=[x, out])

    patch.setattr(engine, "device_module", lambda device: sim)
    patch.setattr(TkernelsWire, "reduce_scatter", reduce_scatter)
    patch.setattr(TkernelsWire, "all_gather", lambda self, x, *_: sim.launch("gather", lambda x: None, writes=[x]))
    if wrong is not None:
        patch.setattr(*wrong)
    towers = nn.ModuleList(Tower(numel, start) for start in (1.0, 2.0))
    whole = copy.deepcopy(towers)
    with sim:
        main = sim.current_stream()
        zero = ZeroOptimizer(
            towers.parameters(), torch.optim.SGD, mesh=OneRank(), lr=2.0**-8, momentum=0.5, bucket_bytes=64 * 3,
            overlap_gather=towers if overlap_gather else None,
        )  # fmt: skip
        within = contextlib.ExitStack()

        def enter(stream, grad):  # as autograd does: behind the gradient, on the stream of the forward
            stream.wait_event(main.record_event())
            kept.append(grad)
            within.enter_context(sim.stream(stream))
            return grad.clone()

        for stream, tower in zip(streams, towers, strict=True):
            for parameter in tower.parameters():
                parameter.register_hook(lambda grad, stream=stream: enter(stream, grad))
                handle = parameter.register_post_accumulate_grad_hook(lambda parameter: within.close())
                called_last(parameter, handle)  # later than the optimizer's
        for step in range(steps):
            x, losses = torch.full((numel,), 0.5 + step), []
            for stream, tower in list(zip(streams, towers, strict=True))[:: -1 if reverse else 1]:
                stream.wait_event(main.record_event())
                with sim.stream(stream):
                    losses.append(tower(x))
                main.wait_event(stream.record_event())
            (losses[0] + losses[1]).backward()
            for stream in streams:
                main.wait_event(stream.record_event())
            kept += [x, *losses]
            del losses
            zero.step()
        zero.ensure_params_ready()
        got = [parameter.detach().clone() for parameter in towers.parameters()]
    sgd = torch.optim.SGD(whole.parameters(), lr=2.0**-7, momentum=0.5)
    for step in range(steps):
        sum(tower(torch.full((numel,), 0.5 + step)) for tower in whole).backward()
        sgd.step()
        sgd.zero_grad()
    return sim, got, list(whole.parameters())


@pytest.mark.parametrize("reverse", [False, True], ids=["gradients in turn", "gradients that wait"])
@pytest.mark.parametrize("starved", subsets(["main", "left", "right", "stream3"]))
def test_zero_optimizer_no_timing_of_hooks_reductions_and_gathers_changes_a_bit(monkeypatch, starved, reverse):
    sim, got, want = simulate(monkeypatch, reverse=reverse)
    sim.check()
    sim.run(starve=starved)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_zero_optimizer_orders_a_gradient_that_waited_behind_the_stream_that_produced_it(monkeypatch):
    """The hook that completes the bucket may run on another stream, which is not behind the gradient."""
    collect = engine.Unit.collect

    def forgetful(self, parameter):
        collect(self, parameter)
        parameter.producer = None

    for reverse in (False, True):
        sim, got, want = simulate(monkeypatch, (engine.Unit, "collect", forgetful), reverse=reverse)
        assert bool(sim.races) == reverse
    sim.run(starve=["left"])
    assert not all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("buffers", [2, 1])
def test_zero_optimizer_fills_a_bucket_while_the_one_before_it_is_reduced(monkeypatch, buffers):
    """Of four buckets, in two buffers: the third waits for the first one's, and for nothing else."""
    sim, pack, fills, sums = Simulator(), FlatGroup.pack, itertools.count(), itertools.count()

    def labelled(self, *arguments):
        with sim.label(f"fill {next(fills)}"):
            pack(self, *arguments)

    def reduce_scatter(self, x, rows, factor, out):
        sim.launch(f"reduce {next(sums)}", lambda *_: None, writes=[x, out])

    monkeypatch.setattr(engine, "device_module", lambda device: sim)
    monkeypatch.setattr(FlatGroup, "pack", labelled)
    monkeypatch.setattr(TkernelsWire, "reduce_scatter", reduce_scatter)
    monkeypatch.setattr(TkernelsWire, "all_gather", lambda self, x, *_: None)
    with sim:
        parameters = [nn.Parameter(torch.ones(9)) for _ in range(4)]  # with padding: copied into buffers
        zero = ZeroOptimizer(parameters, torch.optim.SGD, lr=1.0, mesh=OneRank(), bucket_bytes=64)
        if buffers == 1:
            zero._engine._sendings = collections.deque(maxlen=0)
        sum((parameter * 2).sum() for parameter in parameters).backward()
    sim.check()
    sim.run(starve=["stream1"])
    ends = {name: place for place, name in enumerate(sim.log)}
    assert (ends["fill 1"] < ends["reduce 0"]) == (buffers == 2)
    assert ends["reduce 0"] < ends["fill 2"] and (ends["fill 2"] < ends["reduce 1"]) == (buffers == 2)


@pytest.fixture
def alone(monkeypatch):
    """A simulator, a tower in it, and what makes its optimizer of one rank, which gathers during forward."""
    sim, tower = Simulator(), Tower(16, 1.0)
    monkeypatch.setattr(engine, "device_module", lambda device: sim)
    monkeypatch.setattr(TkernelsWire, "all_gather", lambda self, x, *_: sim.launch("gather", writes=[x]))
    options = {"lr": 1.0, "mesh": OneRank(), "overlap_gather": tower}
    return sim, tower, functools.partial(ZeroOptimizer, list(tower.parameters()), torch.optim.SGD, **options)


def test_zero_optimizer_a_state_dict_comes_after_the_gathers_that_overlap_with_forward(alone):
    sim, tower, make = alone
    with sim:
        zero = make()
        zero.step()
        state = {name: value.clone() for name, value in tower.state_dict().items()}
        zero.step()
        tower.load_state_dict(state)
    sim.check()


@pytest.mark.parametrize("asks", [True, False])
def test_ensure_params_ready_orders_a_stream_behind_zero_optimizers_gathers_and_the_next_ones_behind_it(alone, asks):
    sim, tower, make = alone
    with sim:
        zero = make()
        zero.step()
        with sim.stream(sim.Stream("reader")):
            ensure_params_ready(tower.parameters() if asks else [])
            tower.weight.detach().clone()
        zero.step()
    assert {race.modes for race in sim.races} == (set() if asks else {"wr", "rw"})


def test_zero_optimizer_a_step_waits_for_its_gathers_unless_they_overlap_with_forward(monkeypatch):
    sim, got, want = simulate(monkeypatch, overlap_gather=False)
    sim.check()
    sim.run(starve=["stream3"])
    assert all(map(torch.equal, got, want))


def test_zero_optimizer_the_simulation_sees_missing_waits(monkeypatch):
    sim, got, want = simulate(monkeypatch, (Fence, "wait", lambda self, stream: None))
    assert {race.modes for race in sim.races} >= {"wr", "rw"}
    sim.run(starve=["left"])
    assert not all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_zero_optimizer_a_newer_optimizer_comes_after_the_gathers_of_the_older_one(alone):
    sim, _, make = alone
    with sim:
        older = make()
        older.step()
        make()
    sim.check()


def test_zero_optimizer_the_simulation_sees_a_forward_that_does_not_wait_for_its_parameters(monkeypatch):
    sim, *_ = simulate(monkeypatch, (Values, "ready", lambda self: None))
    assert {race.kernels[0] for race in sim.races} == {"copy_", "gather"}  # of the own part, and of the others


def digest(parameters):
    return hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in parameters)).hexdigest()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["eager", "compiled"]
)
def test_zero_optimizer_overlap_changes_no_bit(ctx, compiled):
    cuda = ctx.device.type == "cuda"

    def trained_hash(overlap):
        model, _ = models(ctx)
        forward = torch.compile(model, backend="inductor" if cuda else "aot_eager") if compiled else model
        zero = adam_of(ctx, model, overlap_comm=overlap, max_norm=0.05)
        for own, _ in batches(ctx, 20 if cuda else 3):
            loss_of(forward, own).backward()
            zero.step()
        zero.remove()
        return digest(model.parameters())

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            first = trained_hash(False)
            assert trained_hash(False) == first, "the training itself differs from run to run; this test needs another"
            assert [trained_hash(True) for _ in range(2)] == [first] * 2
            assert ctx.group.gather(first) == [first] * ctx.size
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.ranks(2)
def test_zero_optimizer_works_inside_a_compiled_step(ctx):
    models = [small_model(ctx) for _ in range(2)]
    zeros = [ZeroOptimizer(model.parameters(), torch.optim.SGD, lr=0.5, mesh=ctx) for model in models]

    def step(model, zero, x):
        model(x).square().mean().backward()
        zero.step()
        zero.zero_grad()

    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(functools.partial(step, models[0], zeros[0]), backend="eager")
        for number in range(3):
            x = integers((4, 6), number, ctx.rank).to(ctx.device)
            compiled(x)
            step(models[1], zeros[1], x)
    assert all(map(torch.equal, *(model.parameters() for model in models)))


def train_towers(ctx, steps, milliseconds, side_streams, compiled=False, overlap_gather=True):
    """Two towers, on two streams or one. With side streams, the left hooks and all gathers are held up."""
    numel, main = 1 << 14, torch.cuda.current_stream()
    towers = nn.ModuleList(Tower(numel, start) for start in (0.01, 0.02)).to(ctx.device)
    forwards = [torch.compile(tower) if compiled else tower for tower in towers]
    zero = ZeroOptimizer(
        towers.parameters(), torch.optim.SGD, mesh=ctx, lr=1e-3, momentum=0.5, bucket_bytes=6 * numel,
        overlap_comm=side_streams, overlap_gather=towers if side_streams and overlap_gather else None,
    )  # fmt: skip
    streams = [torch.cuda.Stream() for _ in towers] if side_streams else [main, main]

    def hold_up(*_):
        torch.cuda._sleep(int(milliseconds * 2e6))

    with pytest.MonkeyPatch.context() as patch:
        if side_streams:
            towers[0].weight.register_hook(hold_up)
            towers[0].large.register_hook(hold_up)
            gather = TkernelsWire.all_gather
            patch.setattr(TkernelsWire, "all_gather", lambda *arguments: hold_up() or gather(*arguments))
        for step in range(steps):
            x = torch.arange(numel, device=ctx.device).remainder(7 + step % 5 + ctx.rank).div(16)
            losses = []
            # Every other step, gradients come against the layout's order and wait for their bucket.
            for stream, forward in list(zip(streams, forwards, strict=True))[:: -1 if step % 2 else 1]:
                stream.wait_stream(main)
                with torch.cuda.stream(stream):
                    losses.append(forward(x))
            for stream in streams:
                main.wait_stream(stream)
            (losses[0] + losses[1]).backward()
            zero.step()
        zero.ensure_params_ready()
    zero.remove()
    torch.cuda.synchronize()
    return digest(towers.parameters())


@gpu_only
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("steps, milliseconds", [(4, 50.0), (1000, 0.2)])
def test_zero_optimizer_streams_that_are_late_change_no_bit(ctx, compiled, steps, milliseconds):
    want = train_towers(ctx, steps, 0, side_streams=False, compiled=compiled)
    assert train_towers(ctx, steps, milliseconds, True, compiled, overlap_gather=not compiled) == want


@gpu_only
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("owner, name", [(Fence, "wait"), (Values, "ready")], ids=["fences", "gathers"])
def test_zero_optimizer_streams_that_are_late_show_a_missing_wait(ctx, owner, name):
    want = train_towers(ctx, 4, 0, side_streams=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, lambda *_: None)
        assert train_towers(ctx, 4, 50.0, side_streams=True) != want


@pytest.mark.ranks(4)
def test_zero_optimizer_tensor_parallel_ranks_clip_and_skip_alike(ctx):
    """What they share must not part: one norm of all parts, shared gradients counted once, one verdict."""
    replica, part = divmod(ctx.rank, 2)
    groups = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    tp, dp = (tkernels.init(groups[at], heap_bytes=8 << 20, default=False) for at in (replica, 2 + part))
    with tp, dp:
        split, shared = (nn.Parameter(torch.ones(40, 3, device=ctx.device)) for _ in range(2))
        split.tensor_model_parallel = True
        for options in ({"max_norm": 1.0}, {"loss_scale": "dynamic"}):
            with pytest.raises(ValueError, match="split over tensor-parallel ranks .* pass tensor_parallel="):
                ZeroOptimizer([split, shared], torch.optim.SGD, mesh=dp, lr=1.0, **options)
        zero = ZeroOptimizer(
            [split, shared], torch.optim.SGD, mesh=dp, tensor_parallel=tp, lr=1.0, max_norm=0.5, loss_scale="dynamic"
        )
        zero.scale((split * (3.0 + part)).sum() + (shared * 5.0).sum()).backward()
        zero.step()
        norm = (120 * (9 + 16 + 25)) ** 0.5
        assert zero.grad_norm.item() == pytest.approx(norm, rel=1e-5)
        torch.testing.assert_close(shared.detach(), torch.full_like(shared, 1 - 5 * 0.5 / norm))
        before = shared.detach().clone()
        zero.scale((split * (math.inf if ctx.rank == 1 else 1.0)).sum() + shared.sum()).backward()
        zero.step()
        assert zero.skipped and zero.loss_scale == 2.0**15 and torch.equal(shared, before)
        zero.remove()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["tkernels", "torch"])
def test_zero_optimizer_stages_of_a_pipeline_clip_and_skip_alike(ctx, backend):
    mesh = init_device_mesh(ctx.device.type, (2, 1), mesh_dim_names=("pp", "dp"))
    own, tied = (nn.Parameter(torch.ones(shape, device=ctx.device)) for shape in (3 + ctx.rank, 5))
    tied.shared = ctx.rank == 1
    options = dict(mesh=mesh["dp"], pipeline=mesh["pp"], backend=backend, max_norm=0.5, loss_scale="dynamic")
    zero = ZeroOptimizer([own, tied], torch.optim.SGD, lr=1.0, **options)
    zero.scale((own * (3.0 + ctx.rank)).sum() + (tied * 5.0).sum()).backward()
    zero.step()
    norm = (3 * 9 + 4 * 16 + 5 * 25) ** 0.5
    assert zero.grad_norm.item() == pytest.approx(norm, rel=1e-5)
    torch.testing.assert_close(tied.detach(), torch.full_like(tied, 1 - 5 * 0.5 / norm))
    before = own.detach().clone()
    zero.scale((own * (math.inf if ctx.rank == 1 else 1.0)).sum() + tied.sum()).backward()
    zero.step()
    assert zero.skipped and zero.loss_scale == 2.0**15 and torch.equal(own, before)
    zero.remove()


@pytest.mark.ranks(2)
def test_zero_optimizer_refuses_stages_of_a_pipeline_as_ranks_with_the_same_parameters(ctx):
    """Of equal shapes ones, whose values and gradients would be mixed: without mesh, of the current context."""
    own = nn.Parameter(torch.full((3,), 1.0 + ctx.rank, device=ctx.device))
    pipeline = init_device_mesh(ctx.device.type, (2, 1), mesh_dim_names=("pp", "dp"))["pp"]
    with pytest.raises(ValueError, match=r"mesh has ranks \[0, 1\], of which .* have other stages of pipeline="):
        ZeroOptimizer([own], torch.optim.SGD, lr=1.0, max_norm=1.0, pipeline=pipeline)
    assert own.tolist() == [1.0 + ctx.rank] * 3


class Sequence(nn.Module):
    """A residual block between norms, plain or over `tp`: rows outside of its parallel layers, features inside.

    65 features differ by rank, and so do the sizes of split parameters and all layouts that they are part of: in one
    bucket, the border of two shards lies before the bias of `down` on one rank, and after it on the other. Rows from
    `first` on use one more parameter.
    """

    def __init__(self, tp=None):
        super().__init__()
        self.before, self.rare = nn.LayerNorm(8), nn.Parameter(torch.full((8,), 1.5))
        self.down, self.up = nn.Linear(65, 8), nn.Linear(8, 65)
        self.after = nn.LayerNorm(8)
        if tp is None:
            return
        self.down = RowParallelLinear.from_linear(self.down, sequence_parallel=True, return_bias=True, mesh=tp)
        self.up = ColumnParallelLinear.from_linear(self.up, sequence_parallel=True, mesh=tp)
        self.to(tp.device)
        for parameter in (*self.before.parameters(), *self.after.parameters(), self.rare):
            parameter.sequence_parallel = True

    def forward(self, x, first=None):
        y = self.down(F.gelu(self.up(self.before(x))))
        y = self.after(x + (sum(y) if isinstance(y, tuple) else y))
        return y if first is None else torch.cat([y[:first], y[first:] * self.rare])


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return self.inner(*args)


def sequence_steps():
    """By step: x, dy [passes, replicas, 8, 8]; whether `rare` is used, by rows 4.. of replica 0."""
    return [(integers((2, 2, 8, 8), "x", n) / 4, integers((2, 2, 8, 8), "dy", n) / 64, n == 1) for n in range(2)]


def sequence_alone(weight_decay):
    """What one rank trains, in fp64, and the norms that it clips by."""
    torch.manual_seed(0)
    model, norms = Sequence().double(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9, weight_decay=weight_decay)
    for xs, dys, rare in sequence_steps():
        for replica in range(2):
            for x, dy in zip(xs[:, replica].double(), dys[:, replica].double(), strict=True):
                (model(x, 4 if rare and replica == 0 else None) * dy / 2).sum().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), norms


def train_sequence(tp, dp, wrap):
    """The same over tp and dp. `wrap(model)` gives the forward, no_sync, and the step, which returns the norm."""
    torch.manual_seed(0)
    model, norms = Sequence(tp), []
    forward, no_sync, step = wrap(model)
    for xs, dys, rare in sequence_steps():
        for micro in range(2):
            x, dy = (each[micro, dp.rank, 4 * tp.rank :][:4].to(tp.device) for each in (xs, dys))
            with no_sync() if micro == 0 else contextlib.nullcontext():
                y = forward(x, 0) if rare and (dp.rank, tp.rank) == (0, 1) else forward(x)
                (y * dy).sum().backward()
        norms.append(step().item())
    state = gather_state_dict(forward if isinstance(forward, FullyShard) else model)
    return {name.removeprefix("inner."): value for name, value in state.items()}, norms


@pytest.mark.ranks(4)
def test_zero_optimizer_sums_sequence_parallel_gradients_over_tensor_parallel_ranks(ctx):
    """On 2 x 2 ranks it trains as one rank does; so do the others, with the call that they need."""
    replica, part = divmod(ctx.rank, 2)
    groups = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    tp, dp = (tkernels.init(groups[at], heap_bytes=16 << 20, default=False) for at in (replica, 2 + part))

    def zero(**options):
        def wrap(model):
            zero = ZeroOptimizer(model.named_parameters(), torch.optim.SGD, mesh=dp, tensor_parallel=tp, lr=0.5,
                                 momentum=0.9, weight_decay=0.1, max_norm=0.5, **options)  # fmt: skip
            no_sync = zero.no_sync if options["stage"] == 1 else contextlib.nullcontext
            return model, no_sync, lambda: zero.step() or zero.grad_norm

        return wrap

    def by_the_call(wrapped, clip, parameters=None):
        optimizer = torch.optim.SGD(parameters or wrapped.parameters(), lr=0.5, momentum=0.9)

        def step():
            all_reduce_sequence_parallel_grads(wrapped, mesh=tp)
            norm = clip(0.5)
            optimizer.step()
            if parameters:
                wrapped.start_param_sync()
            wrapped.zero_grad()
            return norm

        return wrapped, wrapped.no_sync, step

    def fully_sharded(model):
        wrapped = FullyShard(Around(model), (Sequence,), mesh=dp)
        return by_the_call(wrapped, functools.partial(clip_grad_norm_, list(wrapped.parameters()), mesh=tp))

    def overlapped(model):
        wrapped = OverlappedDDP(model, mesh=dp, bucket_size=100)
        return by_the_call(wrapped, functools.partial(clip_grad_norm_, list(model.parameters()), mesh=tp))

    def overlapped_shards(model):
        wrapped = OverlappedDDP(model, mesh=dp, use_distributed_optimizer=True)
        shards = wrapped.owned_parameters()
        return by_the_call(wrapped, functools.partial(clip_grad_norm_, shards, mesh=tp), shards)

    with tp, dp:
        for wrap, weight_decay in (
            (zero(stage=2, bucket_bytes=256), 0.1),
            (zero(stage=1, backend="torch", partition="parameters"), 0.1),
            (fully_sharded, 0.0),  # with them, what nobody has used decays
            (overlapped, 0.0),
            (overlapped_shards, 0.0),
        ):
            want, norms = sequence_alone(weight_decay)
            got, found = train_sequence(tp, dp, wrap)
            assert found == pytest.approx(norms, rel=1e-5)
            for name, value in got.items():
                assert_close_to(value, want[name], terms=64)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 2])
def test_zero_optimizer_lets_nobody_clip_or_drop_gradients_that_have_gone_to_their_owners(ctx, stage):
    model, x = nn.Linear(8, 4).to(ctx.device), torch.ones(2, 8, device=ctx.device)
    zero = ZeroOptimizer(model.named_parameters(), torch.optim.SGD, mesh=ctx, stage=stage, lr=1.0)
    start = [parameter.detach().clone() for parameter in model.parameters()]

    def backward():
        model(x).sum().backward()

    for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
        backward()
        with pytest.raises(RuntimeError, match="memory location"):
            clip(model.parameters(), 0.1)
        zero.zero_grad()
    for drop in (model.zero_grad, functools.partial(model.zero_grad, set_to_none=False)):
        for goes_on in (zero.step, backward):
            backward()
            drop()
            with pytest.raises(LeaseError, match="the .grad of .* was dropped .* call the optimizer's zero_grad"):
                goes_on()
            zero.zero_grad()
            assert all(parameter.grad is None for parameter in model.parameters())
    backward()
    backward()
    zero.step()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(now.equal(was - 4.0) for now, was in zip(model.parameters(), start, strict=True))
    backward()
    zero.remove()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.ranks(2)
def test_zero_optimizer_refuses_another_optimizers_step_of_its_parameters(ctx):
    """Whether that was made before or after it: it would find no gradients, and train nothing."""
    model = nn.Linear(8, 4).to(ctx.device)
    before = torch.optim.SGD(model.parameters(), lr=1.0)
    zero = ZeroOptimizer(model.named_parameters(), torch.optim.SGD, mesh=ctx, lr=1.0)
    for other in (before, torch.optim.AdamW(model.parameters())):
        model(torch.ones(2, 8, device=ctx.device)).sum().backward()
        with pytest.raises(ValueError, match="step: it has weight, whose gradients a ZeroOptimizer takes; step that"):
            other.step()
    zero.step()
    zero.remove()
    model(torch.ones(2, 8, device=ctx.device)).sum().backward()
    before.step()


@pytest.mark.ranks(2)
def test_zero_optimizer_refuses_marks_that_nothing_would_be_done_about(ctx):
    groups = [torch.distributed.new_group([rank]) for rank in range(ctx.size)]
    norm = nn.LayerNorm(8).to(ctx.device)
    norm.bias.sequence_parallel = True
    before = norm.bias.data_ptr()
    with tkernels.init(groups[ctx.rank], heap_bytes=1 << 20, default=False) as alone:
        with pytest.raises(ValueError, match="bias is marked sequence_parallel: .* pass tensor_parallel=") as refused:
            ZeroOptimizer(norm.named_parameters(), torch.optim.SGD, mesh=alone, lr=1.0)
        message_on_every_rank(ctx, refused.value)
        norm.weight.sequence_parallel = ctx.rank == 1
        with pytest.raises(MismatchError, match="sequence_parallel of rank 0 and rank 1 differ in weight") as refused:
            ZeroOptimizer(norm.named_parameters(), torch.optim.SGD, mesh=alone, tensor_parallel=ctx, lr=1.0)
        message_on_every_rank(ctx, refused.value)
        norm.weight.sequence_parallel = True
        nn.init.constant_(norm.weight, 1.0 + ctx.rank)
        with pytest.raises(MismatchError, match="sequence_parallel of rank 0 and rank 1 differ in weight") as refused:
            ZeroOptimizer(norm.named_parameters(), torch.optim.SGD, mesh=alone, tensor_parallel=ctx, lr=1.0)
        message_on_every_rank(ctx, refused.value)
    assert norm.bias.data_ptr() == before
