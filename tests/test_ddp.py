"""Data parallelism: the gradients and losses of one process, whatever is overlapped, and no race in any trace."""

import contextlib
import copy
import functools
import gc
import pickle
import warnings

import pytest
import torch
from streams import Simulator, subsets
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint
from transports import STREAMED, gpu_only, message_on_every_rank

import tkernels
from tkernels.comm import LeaseError, MismatchError, current_context
from tkernels.comm.group import Group
from tkernels.layers import (
    FullyShard,
    ZeroOptimizer,
    all_reduce_sequence_parallel_grads,
    clip_grad_norm_,
    fully_shard,
    grad_hooks,
)
from tkernels.layers.data_parallel.ddp import OverlappedDDP, changing_main_grads
from tkernels.layers.data_parallel.param_bucket import ParamBucket, UpdatedValues
from tkernels.layers.data_parallel.values import ensure_params_ready
from tkernels.layers.data_parallel.wire import Wire
from tkernels.layers.grad_hooks import GradReadyHooks, grad_ready_hooks
from tkernels.testing.compare import integers

BACKENDS = ["tkernels", "torch"]
ALL_REDUCED = {}
SHARDED = {"use_distributed_optimizer": True}
GATHERED_LATE = {"overlap_param_gather": True}
TWO_INSTANCES = {"overlap_param_gather": True, "num_distributed_optimizer_instances": 2}
every_mode = pytest.mark.parametrize(
    "mode", [ALL_REDUCED, SHARDED, GATHERED_LATE, TWO_INSTANCES], ids=["all-reduced", "sharded", "gathered-late", "two"]
)
every_backend = pytest.mark.parametrize("backend", BACKENDS)


# Training, against the same model in one process


def exact_model():
    """Two layers side by side, so that gradients don't depend on the weights and all numbers are small integers."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4, bias=False)

        def forward(self, x):
            return self.a(x) + self.b(2 * x)

    model = Sum()
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(integers(parameter.shape, torch.float32, seed, -2, 2))
    return model


class Stacked(nn.Module):
    """Three layers: what is compiled for the first must do for the others."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.ranks(2, timeout_s=120)
@pytest.mark.parametrize("mode", [ALL_REDUCED, GATHERED_LATE], ids=["all-reduced", "gathered-late"])
def test_overlapped_ddp_is_compiled_without_warnings_or_recompiled_frames(ctx, mode):
    def trained(compiled):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, graphs = Stacked().to(ctx.device), []
        ddp = OverlappedDDP(model, mesh=ctx, bucket_size=100, **mode)

        def backend(graph, _):
            graphs.append(graph)
            return graph.forward

        call = torch.compile(ddp, backend=backend) if compiled == "wrapper" else ddp
        if compiled == "module":
            model.compile(backend=backend)
        optimizer = torch.optim.SGD(ddp.owned_parameters(), lr=0.1)
        with warnings.catch_warnings(), torch._dynamo.config.patch(error_on_recompile=True):
            warnings.simplefilter("error", UserWarning)
            for step in range(3):
                optimizer.zero_grad()
                generator = torch.Generator().manual_seed(10 * step + ctx.rank)
                x = torch.randn(4, 8, generator=generator).to(ctx.device)
                call(x).square().mean().backward()
                optimizer.step()
        ddp.remove()
        return list(model.parameters()), len(graphs)

    want, none = trained(None)
    assert none == 0
    for compiled in ("wrapper", "module"):
        got, graphs = trained(compiled)
        assert graphs == 1 and all(map(torch.equal, got, want)), (compiled, graphs)
    torch._dynamo.reset()


@pytest.mark.ranks(2)
def test_overlapped_ddp_with_shards_trains_on_after_the_module_has_lost_a_block(ctx):
    """Whose parameters stay in the shards, with gradients of zero."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).to(ctx.device)
    ddp = OverlappedDDP(model, mesh=ctx, use_distributed_optimizer=True, average=True)
    optimizer = torch.optim.SGD(ddp.owned_parameters(), 0.1)
    twin = copy.deepcopy(model)
    its_optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    for each in (ddp.module, twin):
        del each[1]
    x = torch.ones(2, 4, device=ctx.device)
    for _ in range(2):
        for each, its in ((ddp, optimizer), (twin, its_optimizer)):
            each(x).square().sum().backward()
            its.step()
            its.zero_grad()
    torch.testing.assert_close([*ddp.module.parameters()], [*twin.parameters()])


@pytest.mark.ranks(2, timeout_s=120)
def test_overlapped_ddp_with_shards_trains_in_a_compiled_step_after_one_without(ctx):
    """What dynamo has compiled of the first one's backward isn't run for the second's."""

    def trained(mode, compiled=False):
        torch.manual_seed(0)
        model = Stacked().to(ctx.device)
        ddp = OverlappedDDP(model, mesh=ctx, bucket_size=100, **mode)
        optimizer = torch.optim.SGD(ddp.owned_parameters(), lr=1.0)

        def step(x):
            ddp(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        call = torch.compile(step, backend="aot_eager") if compiled else step
        for number in range(2):
            call(torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + ctx.rank)).to(ctx.device))
        ddp.remove()
        return list(model.parameters())

    want = trained(GATHERED_LATE)
    trained(ALL_REDUCED, compiled=True)
    got = trained(GATHERED_LATE, compiled=True)
    torch._dynamo.reset()
    assert all(map(torch.equal, got, want))


@pytest.mark.ranks(2)
def test_overlapped_ddp_keeps_the_gradient_of_what_is_frozen_between_backwards(ctx):
    model = exact_model().to(ctx.device)
    first, second = batch_of(ctx, 0, 0), batch_of(ctx, 1, 0)
    frozen, *_ = model.parameters()
    ddp = OverlappedDDP(model, mesh=ctx, average=False)
    ddp(first).sum().backward()
    want = frozen.grad.clone()
    frozen.requires_grad_(False)
    ddp(second).sum().backward()
    assert torch.equal(frozen.grad, want) and want.any()
    ddp.zero_grad()
    ddp(second).sum().backward()
    assert frozen.grad is None
    ddp.remove()


@pytest.mark.ranks(2)
def test_overlapped_ddp_can_not_be_copied_or_pickled_but_its_module_can(ctx):
    ddp = OverlappedDDP(exact_model().to(ctx.device), mesh=ctx)
    for copied in (copy.deepcopy, pickle.dumps, torch.optim.swa_utils.AveragedModel):
        with pytest.raises(TypeError, match=r"OverlappedDDP: .* can't be copied or pickled; copy or save its module"):
            copied(ddp)
    torch.optim.swa_utils.AveragedModel(ddp.module).update_parameters(ddp.module)
    ddp.remove()


@pytest.mark.ranks(2)
def test_clip_grad_norm_refuses_shards_and_tensor_parallel_parts_whose_ranks_it_is_not_told(ctx):
    model = exact_model().to(ctx.device)
    ddp = OverlappedDDP(model, mesh=ctx, **SHARDED)
    ddp(torch.ones(1, 8, device=ctx.device)).sum().backward()
    with pytest.raises(ValueError, match=r"belong to OverlappedDDP, .*; pass its owned_parameters\(\)"):
        clip_grad_norm_(model.parameters(), 1.0)
    model.a.weight.tensor_model_parallel = True
    with pytest.raises(ValueError, match="over tensor-parallel ranks, but of the ranks of mesh, .* pass mesh="):
        clip_grad_norm_(ddp.owned_parameters(), 1.0, mesh=ctx)
    ddp.remove()


# Gradients, exactly


class FusedLinear(nn.Module):
    """Its backward adds the weight's gradient to `main_grad` on `stream` and tells autograd nothing.

    deferred: only in `backward_dw`, which the caller calls after backward.
    told: how the kernel is reported: "where launched", "after launch", or "by the hook", on whatever stream that is.
    sleep: cycles of a GPU that the gradient comes late.
    """

    def __init__(self, features, *, deferred=False, told="where launched", sleep=0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features, features))
        self.deferred, self.told, self.sleep, self.stream, self.queue = deferred, told, sleep, None, []

    def forward(self, x):
        if grad_ready_hooks(self.weight) is None:
            return x @ self.weight.t()
        return _FusedLinear.apply(x, self.weight, self)

    def backward_dw(self):
        while self.queue:
            self.queue.pop(0)()

    def launch(self, dy, x):
        weight, dev = self.weight, torch.get_device_module(x.device)
        if self.stream is None:
            self.stream = dev.Stream()
        self.stream.wait_stream(dev.current_stream())  # dy and x are made there
        for tensor in (dy, x):
            if tensor.is_cuda:
                tensor.record_stream(self.stream)

        def kernel():
            if self.sleep:
                torch.cuda._sleep(self.sleep)
            weight.main_grad.add_(dy.t() @ x)

        with torch.no_grad(), dev.stream(self.stream):
            if self.told == "where launched":
                with grad_ready_hooks(weight).writing(weight):
                    kernel()
            else:
                kernel()
            if self.told == "after launch":
                grad_ready_hooks(weight).produced(weight)
        weight.grad_added_to_main_grad = True


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, layer):
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return x @ weight.t()

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        if ctx.layer.deferred:
            grad_ready_hooks(ctx.layer.weight).defer(ctx.layer.weight)
            ctx.layer.queue.append(lambda: ctx.layer.launch(dy, x))
        else:
            ctx.layer.launch(dy, x)
        return dy @ weight, None, None


class Awkward(nn.Module):
    """Whatever makes gradients come more than once, late, elsewhere or not at all; of small integers."""

    def __init__(self, device):
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.tied = nn.Linear(8, 8, bias=False)
        self.unused = nn.Parameter(torch.empty(5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.empty(()))
        self.optional = nn.Linear(8, 8, bias=False)
        self.checkpointed = nn.Linear(8, 8, bias=False)
        self.fused = FusedLinear(8)
        self.reported = FusedLinear(8, told="after launch")
        self.deferred = FusedLinear(8, deferred=True)
        self.frozen = nn.Parameter(torch.ones(()), requires_grad=False)
        self.tail = nn.Linear(8, 8, bias=False)
        self.tail.weight = self.tied.weight
        with torch.no_grad():
            for seed, parameter in enumerate(self.parameters()):
                parameter.copy_(integers(parameter.shape, torch.float32, seed, -1, 1))
        self.to(device)

    def forward(self, x, with_optional=True):
        x = self.first(x) * self.frozen
        for _ in range(2):
            x = checkpoint(self.checkpointed, x, use_reentrant=True)
        x = self.tied(x)
        x = self.reported(self.fused(x))
        if with_optional:
            x = self.optional(x)
        return self.tail(self.deferred(x)) * self.scalar


def gradients(model, x, **options):
    """model: an Awkward, or its wrapper."""
    model(x, **options).sum().backward()
    getattr(model, "module", model).deferred.backward_dw()


def batch_of(ctx, step, micro):
    return integers((2, 8), torch.float32, 1000 * step + 10 * micro + ctx.rank, -1, 1, device=ctx.device)


def expected_gradients(ctx, model, batches, **options):
    """Collective. What every parameter that is trained gets in all, by plain autograd."""
    plain = copy.deepcopy(model)
    parameters = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    for x in batches:
        gradients(plain, x, **options)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return [sum(parts) for parts in zip(*ctx.group.gather([grad.cpu() for grad in grads]), strict=True)]


def check_gradients(ddp, want):
    """This rank's part of every bucket is, to the bit, what `want` puts there."""
    places = dict(zip((p for p in ddp.module.parameters() if p.requires_grad), want, strict=True))
    for bucket in ddp.buckets:
        flat = torch.zeros(bucket.grads.slot.tensor.numel())
        for parameter in bucket.parameters:
            start = parameter.main_grad.storage_offset()
            flat[start : start + parameter.numel()] = places[parameter].flatten()
        for owned in bucket.owned:
            part = flat[owned.main_grad.storage_offset() :][: owned.numel()]
            assert owned.main_grad.flatten().cpu().equal(part), bucket
            assert owned.grad.data_ptr() == owned.main_grad.data_ptr()


def check_awkward_gradients(ctx, backend, mode, overlap):
    model = Awkward(ctx.device)
    plain = copy.deepcopy(model)
    ddp = OverlappedDDP(
        model, mesh=ctx, bucket_size=150, backend=backend, average=False, overlap_grad_reduce=overlap, **mode
    )
    assert len(ddp.buckets) == 4
    for step in range(4):
        batches = [batch_of(ctx, step, micro) for micro in range(3)]
        want = expected_gradients(ctx, plain, batches)
        ddp.zero_grad()
        with ddp.no_sync():
            for x in batches[:2]:
                gradients(ddp, x)
        before_last = ddp.hooks._unreported[:]
        assert before_last == ddp.buckets
        gradients(ddp, batches[2])
        if overlap and step:
            assert ddp.hooks._unreported == []  # everything has been started, the deferred one's bucket last
        if step == 2:
            ddp.start_grad_sync()
        ddp.finish_grad_sync()
        check_gradients(ddp, want)
        ddp.finish_grad_sync()  # again
        check_gradients(ddp, want)
        with torch.no_grad():
            ddp(batches[0])  # evaluation between steps; it gathers what nobody has changed
    if overlap:
        other = {"checkpointed.weight": 2, "unused": 0, "empty": 0}
        assert ddp.hooks.expected == {name: other.get(name, 1) for name in ddp.hooks.expected}
    ddp.remove()


@pytest.mark.ranks(2)
@every_backend
@every_mode
def test_overlapped_ddp_gradients_that_come_twice_late_elsewhere_or_not_at_all(ctx, backend, mode):
    check_awkward_gradients(ctx, backend, mode, overlap=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", [ALL_REDUCED, TWO_INSTANCES], ids=["all-reduced", "two"])
def test_overlapped_ddp_awkward_gradients_without_overlap(ctx, mode):
    check_awkward_gradients(ctx, "tkernels", mode, overlap=False)


@pytest.mark.ranks(4)
@every_backend
def test_overlapped_ddp_awkward_gradients_in_two_instances_of_two_ranks(ctx, backend):
    check_awkward_gradients(ctx, backend, TWO_INSTANCES, overlap=True)


@pytest.mark.ranks(2)
@every_backend
def test_overlapped_ddp_ranks_with_different_graphs_start_their_collectives_in_one_order(ctx, backend, monkeypatch):
    model = Awkward(ctx.device)
    plain = copy.deepcopy(model)
    ddp = OverlappedDDP(model, mesh=ctx, bucket_size=150, backend=backend, average=False)
    order = []
    start = ParamBucket.reduce
    monkeypatch.setattr(ddp.hooks, "_on_ready", lambda bucket: (order.append(bucket.name), start(bucket)))
    for step in range(6):
        x = batch_of(ctx, step, 0)
        with_optional = step == 0 or (step + ctx.rank) % 3 != 0
        want = expected_gradients(ctx, plain, [x], with_optional=with_optional)
        ddp.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the overlap was lost once
            gradients(ddp, x, with_optional=with_optional)
        check_gradients(ddp, want)
    assert order == [bucket.name for bucket in ddp.buckets] * 6
    assert ctx.group.gather(order) == [order] * ctx.size
    ddp.remove()


@pytest.mark.ranks(2)
def test_overlapped_ddp_a_step_that_fails_can_be_begun_again(ctx):
    model = nn.Linear(8, 8, bias=False).to(ctx.device)
    model.weight.data.fill_(1.0)
    ddp = OverlappedDDP(model, mesh=ctx, average=False)

    def gradient():
        ddp(torch.full((1, 8), ctx.rank + 1.0, device=ctx.device)).sum().backward()

    def fail(*_):
        raise ArithmeticError("a hook of the user's")

    for step in range(4):
        ddp.zero_grad()
        node = get_gradient_edge(model.weight).node
        handle = node.register_hook(fail)  # after ours, which may have started a reduction
        with ddp.no_sync() if step % 2 else contextlib.nullcontext(), pytest.raises(ArithmeticError):
            gradient()
        handle.remove()
        with pytest.raises(LeaseError, match=r"begin again by the wrapper's zero_grad\(\)"):
            torch.optim.SGD(model.parameters(), lr=1.0).step()
        if step != 2:
            ddp.zero_grad()  # in the other step nothing does so, as torch's zero_grad would do nothing
        gradient()
        assert model.weight.grad.eq(3.0).all()
    ddp.remove()


@pytest.mark.ranks(2)
@every_mode
def test_overlapped_ddp_a_second_wrapper_takes_the_parameters_over(ctx, mode):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(ctx.device)
    for seed, parameter in enumerate(model.parameters()):
        parameter.data.copy_(integers(parameter.shape, torch.float32, seed))
    values = [parameter.detach().clone() for parameter in model.parameters()]
    default = current_context()
    older = OverlappedDDP(model, mesh=ctx, **mode)
    if older.sharded:
        for owned in older.owned_parameters():
            owned.data.add_(ctx.rank * 0.0 + 1.0)
        older.start_param_sync()
        values = [value + 1.0 for value in values]
    newer = OverlappedDDP(model, mesh=ctx, average=False, **mode)
    assert current_context() is default  # those of two instances are not
    assert all(grad_ready_hooks(parameter) is newer.hooks for parameter in model.parameters())
    older.remove()  # again: nothing of the newer one is lost
    for _ in range(2):
        newer.zero_grad()
        newer(torch.ones(1, 8, device=ctx.device)).sum().backward()
        newer.finish_grad_sync()
    newer.remove()
    assert all(map(torch.equal, model.parameters(), values))
    model(torch.ones(1, 8, device=ctx.device)).sum().backward()
    assert model[1].bias.grad.eq(1.0).all() and not hasattr(model[1].bias, "main_grad")


@pytest.mark.ranks(2)
def test_overlapped_ddp_a_gradient_from_before_the_wrapper_is_the_first_to_accumulate(ctx):
    model = nn.Linear(4, 4, bias=False).to(ctx.device)
    model.weight.data.fill_(1.0)
    x = torch.full((1, 4), ctx.rank + 1.0, device=ctx.device)
    model(x).sum().backward()
    ddp = OverlappedDDP(model, mesh=ctx, average=False)
    ddp(x).sum().backward()
    ddp.finish_grad_sync()
    assert model.weight.grad.eq(2 * 3.0).all()
    ddp.remove()


@pytest.mark.ranks(2)
def test_overlapped_ddp_adds_up_bfloat16_gradients_in_fp32_and_torch_optimizers_train(ctx):
    model = nn.Linear(16, 16, bias=False).to(ctx.device, torch.bfloat16)

    def backward(value):
        ddp(torch.full((1, 16), value, device=ctx.device, dtype=torch.bfloat16)).sum().backward()

    for mode in (ALL_REDUCED, SHARDED):
        model.weight.data.fill_(1.0)
        weight = 1.0
        ddp = OverlappedDDP(model, mesh=ctx, grad_dtype=torch.float32, **mode)
        optimizer = torch.optim.SGD(ddp.owned_parameters(), lr=2.0**-7)
        for sync in (True, False):  # bfloat16 has 8 bits: the sum of 256 and three times 1 needs 9
            optimizer.zero_grad()
            for value in (256.0, 1.0, 1.0):
                with contextlib.nullcontext() if sync else ddp.no_sync():
                    backward(value)
            backward(1.0 + ctx.rank)  # 1.5 in the mean
            for owned in ddp.owned_parameters():
                assert owned.main_grad.dtype == torch.float32 and owned.main_grad.eq(259.5).all()
                assert owned.grad.eq(260.0).all() and owned.grad.dtype == torch.bfloat16
            ddp(torch.ones(1, 16, device=ctx.device, dtype=torch.bfloat16))  # with shards, before the update
            optimizer.step()
            with torch.no_grad():
                weight = float(torch.tensor(weight - 260.0 / 128, dtype=torch.bfloat16))
                y = ddp(torch.ones(1, 16, device=ctx.device, dtype=torch.bfloat16))
            assert y.eq(16 * weight).all()
        optimizer.zero_grad(set_to_none=False)
        backward(2.0)
        for owned in ddp.owned_parameters():
            owned.grad.data.mul_(0.5)  # as clipping and unscaling do; torch counts no writes to .data
        backward(3.0)
        assert all(owned.main_grad.eq(4.0).all() and owned.grad.eq(4.0).all() for owned in ddp.owned_parameters())
        for owned in ddp.owned_parameters():
            owned.grad.mul_(0.5)
        assert abs(clip_grad_norm_(ddp.owned_parameters(), 1.0, mesh=ctx) - 16 * 2.0) < 1e-4
        for owned in ddp.owned_parameters():
            assert owned.grad.equal(owned.main_grad.bfloat16()) and owned.grad.eq(2.0 / 32).all()
        if mode is ALL_REDUCED:
            model.weight.sequence_parallel = True
            all_reduce_sequence_parallel_grads(model, mesh=ctx)
            assert model.weight.grad.eq(ctx.size * 2.0 / 32).all()
            del model.weight.sequence_parallel
        ddp.remove()


class InOneBuffer(torch.autograd.Function):
    """x * w, whose backward has the gradient of w where the next call of it has its own."""

    buffer = torch.zeros(4)

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return x * w

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        buffer = InOneBuffer.buffer = InOneBuffer.buffer.to(x.device)
        return dy * 3, buffer.copy_(dy * x).view(4)


@pytest.mark.ranks(2)
def test_overlapped_ddp_adds_a_gradient_before_others_write_to_its_memory(ctx):
    model = nn.ParameterList(torch.full((4,), value, device=ctx.device) for value in (1.0, 2.0))
    ddp = OverlappedDDP(model, mesh=ctx)
    x = torch.arange(4.0, device=ctx.device)
    for _ in range(2):
        ddp.zero_grad()
        InOneBuffer.apply(InOneBuffer.apply(x, model[0]), model[1]).sum().backward()
        ddp.finish_grad_sync()
        assert model[1].grad.tolist() == x.tolist() and model[0].grad.tolist() == (3 * x).tolist()


@pytest.mark.ranks(2)
def test_overlapped_ddp_warns_of_shards_whose_gradients_torchs_clipping_has_changed(ctx):
    model, x = exact_model().to(ctx.device), torch.ones(1, 8, device=ctx.device)
    ddp = OverlappedDDP(model, mesh=ctx, **SHARDED)
    owned = ddp.owned_parameters()
    optimizer = torch.optim.SGD(owned, lr=1.0)
    for clip in (lambda *_: None, functools.partial(clip_grad_norm_, mesh=ctx), nn.utils.clip_grad_norm_):
        optimizer.zero_grad()
        ddp(x).sum().backward()
        clip(owned, 0.5)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            optimizer.step()
        assert [*said] == [] if clip is not nn.utils.clip_grad_norm_ else "own shards" in str(said[0].message)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
@pytest.mark.parametrize("sharded", [False, True])
def test_overlapped_ddp_leaves_gradients_that_somebody_keeps(ctx, sharded, grad_dtype):
    """As gradient surgery does, of several tasks: in the memory of the next ones they would be those."""
    dtype = torch.float32 if grad_dtype is None else torch.bfloat16
    model = exact_model().to(ctx.device, dtype)
    options = dict(overlap_param_gather=True) if sharded else {}
    ddp = OverlappedDDP(model, mesh=ctx, grad_dtype=grad_dtype, **options)
    trained, x = ddp.owned_parameters() if sharded else list(model.parameters()), torch.ones(1, 8, device=ctx.device)
    ddp(x.to(dtype)).sum().backward()
    kept = [each.grad for each in trained]
    values, places = [each.clone() for each in kept], [each.main_grad.data_ptr() for each in trained]
    for each in trained:
        each.grad = None
    (2 * ddp(x.to(dtype)).sum()).backward()
    for each, grad, value, place in zip(trained, kept, values, places, strict=True):
        assert torch.equal(grad, value) and torch.equal(each.grad, 2 * value)
        assert each.main_grad.data_ptr() == place and torch.equal(each.main_grad, 2 * value.to(each.main_grad.dtype))
    trained[0].grad = trained[0].grad + kept[0]  # and in its place
    ddp(x.to(dtype)).sum().backward()
    assert torch.equal(trained[0].grad, 4 * values[0]) and torch.equal(kept[0], values[0])


@pytest.mark.ranks(2)
def test_overlapped_ddp_takes_gradients_that_were_replaced_or_set_by_hand(ctx):
    ddp = OverlappedDDP(exact_model().to(ctx.device), mesh=ctx)
    weight, bias, x = ddp.module.a.weight, ddp.module.a.bias, torch.ones(1, 8, device=ctx.device)
    ddp(x).sum().backward()
    if ctx.rank == 0:  # without the others, and without an effect
        torch.autograd.grad(ddp(x).sum(), [weight])
    weight.grad, bias.grad = weight.grad * 3, None
    ddp(x).sum().backward()
    assert weight.grad.data_ptr() == weight.main_grad.data_ptr() and weight.grad.eq(4.0).all()
    assert bias.grad.eq(1.0).all() and ddp.module.b.weight.grad.eq(4.0).all()
    ddp.zero_grad()
    weight.grad = torch.full_like(weight, 5.0)
    ddp(x).sum().backward()
    assert weight.grad.eq(6.0).all() and bias.grad.eq(1.0).all()
    ddp.zero_grad()
    if ctx.rank == 0:
        ddp(x).sum().backward()
    else:
        ddp.finish_grad_sync()  # a rank without a batch
    assert weight.grad.eq(0.5).all()
    ddp.remove()


@pytest.mark.ranks(2)
def test_overlapped_ddp_refuses_steps_and_gradients_that_would_be_lost(ctx):
    x = torch.ones(1, 8, device=ctx.device)
    ddp = OverlappedDDP(exact_model().to(ctx.device), mesh=ctx, **SHARDED)
    ddp(x).sum().backward()
    before = [parameter.detach().clone() for parameter in ddp.parameters()]
    for wrong in (ddp.parameters(), ddp.module.parameters()):
        with pytest.raises(ValueError, match=r"an optimizer has b.weight, .* make .* of owned_parameters\(\)"):
            torch.optim.AdamW(wrong).step()
    for kind, way in (("LBFGS", "don't overlap the gathers$"), ("Adafactor", "ZeroOptimizer with partition='.*'$")):
        with pytest.raises(ValueError, match=f"{kind} looks at whole parameters, .* {way}"):
            getattr(torch.optim, kind)(ddp.owned_parameters()).step(lambda: ddp(x).sum())
    torch.optim.AdamW(nn.Linear(2, 2).parameters()).step()  # another model's
    assert all(map(torch.equal, before, ddp.parameters()))
    ddp.remove()

    layer = FusedLinear(8, deferred=True).to(ctx.device)
    layer.weight.data.fill_(1.0)
    ddp = OverlappedDDP(layer, mesh=ctx, average=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    x.requires_grad_()
    for _ in range(2):
        optimizer.zero_grad()
        ddp(x).sum().backward()
        with ddp.no_sync():
            ddp(x).sum().backward()
        with pytest.raises(LeaseError, match="before the gradients are reduced: .* deferred .* to come"):
            optimizer.step()
        layer.backward_dw()
        assert layer.weight.grad.eq(2.0 * ctx.size).all()
        optimizer.step()
    with pytest.raises(LeaseError, match=r"weight: a gradient was produced after the end of the pass.*defer\(param\)"):
        layer.launch(torch.ones(1, 8, device=ctx.device), x.detach())
    ddp.remove()

    ddp = OverlappedDDP(exact_model().to(ctx.device), mesh=ctx)
    x = torch.ones(1, 8, device=ctx.device)
    ddp(x).sum().backward()
    ddp.module.a.weight.grad_added_to_main_grad = True  # by a layer that tells nobody
    for late in (ddp.finish_grad_sync, lambda: ddp(x).sum().backward()):
        with pytest.raises(LeaseError, match="a kernel added to the main_grad of a.weight .* outside of a backward"):
            late()
    ddp.remove()


class Changing(nn.Module):
    """Two layers, of which a forward uses those that it is told, the second by a fused kernel or without."""

    def __init__(self, told):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), FusedLinear(4, told=told)
        with torch.no_grad():
            self.a.weight.zero_(), self.b.weight.zero_()

    def forward(self, x, used):
        y = self.a(x) if "a" in used else torch.zeros_like(x)
        return y + (x @ self.b.weight.t() if "b" in used else self.b(x) if "fused" in used else 0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("grad_dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("mode", [ALL_REDUCED, SHARDED], ids=["all-reduced", "sharded"])
def test_overlapped_ddp_begins_a_pass_with_any_main_grads(ctx, mode, grad_dtype):
    """It copies a first gradient that a hook has brought, as all before, and takes none for zero."""

    def wrapped(told):
        model = Changing(told).to(ctx.device)
        return model, OverlappedDDP(model, mesh=ctx, grad_dtype=grad_dtype, **mode)

    def backward(ddp, used):
        for parameter in ddp.bucket_of:
            parameter.main_grad.fill_(torch.nan)
        ddp(torch.full((1, 4), 1.0 + ctx.rank, device=ctx.device), used).sum().backward()

    model, ddp = wrapped("where launched")
    optimizer, want = torch.optim.SGD(ddp.owned_parameters(), lr=2.0), {"a": 0.0, "b": 0.0}
    for passes in (["a b"], ["a"], ["b"], ["a b", "a", "b"], ["a fused"], ["a", "fused"], ["fused", "b"], ["a"], ["b"]):
        for number, used in enumerate(passes):
            with contextlib.nullcontext() if used is passes[-1] else ddp.no_sync():
                if number:
                    ddp(torch.full((1, 4), 1.0 + ctx.rank, device=ctx.device), used).sum().backward()
                else:
                    backward(ddp, used)
            for name in want:
                want[name] -= 3.0 * (name in used.split() or name == "b" and "fused" in used)  # twice the mean, 1.5
        optimizer.step()
        optimizer.zero_grad()
        if passes == ["a"]:  # one that is set by hand is added to, in shards too
            model.a.weight.grad, want["a"] = torch.full_like(model.a.weight, 2.0), want["a"] - 4.0
        ddp.module(torch.ones(1, 4, device=ctx.device), "a b")
        for name, value in want.items():
            got = model.get_parameter(f"{name}.weight") - 4.0 * (passes == ["a"] and name == "a")
            assert got.eq(value).all(), (passes, name)
    ddp.remove()

    model, ddp = wrapped("after launch")
    backward(ddp, "a b")
    ddp.zero_grad()
    ddp(torch.ones(1, 4, device=ctx.device), "a fused").sum().backward()
    assert model.b.weight.main_grad.isfinite().all()
    ddp.remove()
    model, ddp = wrapped("after launch")
    backward(ddp, "a b")
    optimizer = torch.optim.SGD(ddp.owned_parameters(), lr=2.0)
    if mode:  # all of a shard is zeroed, also between parameters, where clipping by NaN has written
        for shard in ddp.owned_parameters():
            shard.grad.fill_(torch.nan)
    optimizer.zero_grad()
    if mode:
        backward(ddp, "a b")
        assert all(shard.grad.isfinite().all() for shard in ddp.owned_parameters())
    else:
        with pytest.raises(LeaseError, match="b.weight: a kernel has added to its main_grad, .* by hooks alone"):
            backward(ddp, "a fused")
    ddp.remove()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", [ALL_REDUCED, SHARDED], ids=["all-reduced", "sharded"])
def test_overlapped_ddp_refuses_a_step_by_what_no_sync_alone_has_accumulated(ctx, mode):
    ddp = OverlappedDDP(exact_model().to(ctx.device), mesh=ctx, **mode)
    optimizer = torch.optim.SGD(ddp.owned_parameters(), lr=1.0)
    bias, x = ddp.module.a.bias.detach().clone(), torch.ones(1, 8, device=ctx.device)

    def accumulate():
        with ddp.no_sync():
            (ddp(x).sum() * (1 + 2 * ctx.rank)).backward()

    for _ in range(2):
        accumulate()
        with pytest.raises(LeaseError, match=r"no_sync .*finish_grad_sync\(\)"):
            optimizer.step()
        optimizer.zero_grad()
        optimizer.step()  # nothing to do
    accumulate()
    with changing_main_grads(ddp.module.parameters()):  # as sums over tensor-parallel ranks do
        ddp.module.a.bias.main_grad.mul_(4)
    ddp.finish_grad_sync()  # 4 and 12: 8 in the mean
    optimizer.step()
    ddp.remove()
    assert ddp.module.a.bias.equal(bias - 8.0)


@pytest.mark.ranks(2)
def test_overlapped_ddp_refuses_changes_of_a_shard_of_what_no_sync_has_accumulated(ctx):
    ddp = OverlappedDDP(exact_model().to(ctx.device), mesh=ctx, **SHARDED)
    (owned,), x = ddp.owned_parameters(), torch.ones(1, 8, device=ctx.device)
    optimizer = torch.optim.SGD([owned], lr=1.0)
    for change in (
        lambda: optimizer.zero_grad(set_to_none=False),
        lambda: owned.grad.mul_(0.5),
        lambda: setattr(owned, "grad", owned.grad.clone()),
    ):
        for reduce in (ddp.finish_grad_sync, lambda: ddp(x).sum().backward()):
            with ddp.no_sync():
                (ddp(x).sum() * 100).backward()
            change()
            with pytest.raises(LeaseError, match=r"no_sync .* ddp.zero_grad\(\)"):
                reduce()
            ddp.zero_grad()
            with ddp.no_sync():
                ddp(x).sum().backward()
            ddp(x).sum().backward()
            assert all(
                grad.eq(2.0).all() for param, grad, _ in ddp.buckets[0].pieces() if param is ddp.module.a.weight
            )
            ddp.zero_grad()
    ddp.remove()


@pytest.mark.ranks(2)
def test_overlapped_ddp_tells_ranks_of_which_grad_scaler_lets_one_step_alone(ctx):
    with tkernels.init(heap_bytes=32 << 20, default=False) as own:
        ddp = OverlappedDDP(exact_model().to(ctx.device), mesh=own, **SHARDED)
        optimizer = torch.optim.SGD(ddp.owned_parameters(), lr=1.0)
        scaler, x = torch.amp.GradScaler(ctx.device.type, init_scale=4.0), torch.ones(1, 8, device=ctx.device)
        for infinite in (False, True):
            for _ in range(2):  # gathers again where no optimizer has stepped yet, on both ranks
                ddp(x)
            scaler.scale(ddp(x).sum()).backward()
            if not infinite:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        if own.rank == 1:
            for owned in ddp.owned_parameters():
                owned.grad.fill_(torch.inf)
        with pytest.raises(MismatchError, match=r"absent on rank 0, shards without a step .*GradScaler.* on rank 1"):
            scaler.step(optimizer)  # of rank 0 alone
            ddp(x)
            own.check()


@pytest.mark.ranks(2)
def test_overlapped_ddp_loops_that_would_train_nothing_are_told_of(ctx):
    model = nn.Linear(4, 4).to(ctx.device)
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
    x = torch.ones(1, 4, device=ctx.device)
    ddp = OverlappedDDP(model, mesh=ctx, **SHARDED)
    ddp(x).sum().backward()
    ddp.finish_grad_sync()
    with pytest.warns(UserWarning, match=r"nobody has asked for them; make it of owned_parameters\(\)"):
        ddp(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ddp(x)
    ddp.remove()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", [ALL_REDUCED, SHARDED], ids=["all-reduced", "sharded"])
def test_overlapped_ddp_refuses_assigned_state_dicts(ctx, mode):
    model = nn.Linear(4, 4).to(ctx.device)
    torch.nn.init.ones_(model.weight), torch.nn.init.ones_(model.bias)
    ddp = OverlappedDDP(model, mesh=ctx, **mode)
    for module in (model, ddp):
        with pytest.raises(ValueError, match=r"assign=True\): (module\.)?weight belongs to OverlappedDDP"):
            module.load_state_dict(module.state_dict(), assign=True)
    around = torch.nn.Sequential(model)  # its hooks are on the part
    with pytest.raises(ValueError, match=r"assign=True\): 0.weight belongs to OverlappedDDP"):
        around.load_state_dict(around.state_dict(), assign=True)
    ddp.remove()
    model.load_state_dict(model.state_dict(), assign=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", [ALL_REDUCED, SHARDED], ids=["all-reduced", "sharded"])
def test_overlapped_ddp_a_model_that_is_converted_or_moved_after_it_was_wrapped_is_refused(ctx, mode):
    model = nn.Linear(4, 4).to(ctx.device)
    with torch.no_grad():
        [parameter.fill_(1.0) for parameter in model.parameters()]
    ddp = OverlappedDDP(model, mesh=ctx, **mode).float().to(ctx.device)  # changes nothing
    with pytest.raises(LeaseError, match="bias is converted or moved, .*before a module is wrapped, or remove"):
        ddp.bfloat16()
    with pytest.raises(LeaseError, match="bias is converted or moved"):
        ddp.to("meta")
    ddp.zero_grad()
    model.bfloat16()  # behind its back
    with pytest.raises(LeaseError, match="bias is converted or moved"):
        ddp.zero_grad()
    ddp.remove()
    assert ddp.half().module.weight.dtype == torch.float16


@pytest.mark.ranks(2)
def test_overlapped_ddp_refuses_parameters_that_have_left_their_shards(ctx):
    for leave in (
        lambda model: model.bfloat16(),
        lambda model: setattr(model.bias, "data", model.bias.detach().clone()),
    ):
        model, x = nn.Linear(4, 4).to(ctx.device), torch.ones(1, 4, device=ctx.device)
        with torch.no_grad():
            [parameter.fill_(1.0) for parameter in model.parameters()]
        ddp = OverlappedDDP(model, mesh=ctx, **SHARDED)
        optimizer = torch.optim.SGD(ddp.owned_parameters(), lr=1.0)
        ddp(x).sum().backward()
        leave(model)
        with pytest.raises(LeaseError, match="bias is converted or moved"):
            optimizer.step()
        with pytest.raises(LeaseError, match="bias is converted or moved"):
            ddp(x)
        ddp.remove()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", [ALL_REDUCED, SHARDED], ids=["all-reduced", "sharded"])
def test_overlapped_ddp_refuses_a_step_of_parameters_that_it_does_not_reduce(ctx, mode):
    model = exact_model().to(ctx.device)
    model.b.requires_grad_(False)
    ddp = OverlappedDDP(model, mesh=ctx, **mode)
    model.c, x = nn.Linear(8, 4).to(ctx.device), torch.ones(1, 8, device=ctx.device)
    for name, later in (("b.weight", model.b.weight), ("c.bias", model.c.bias)):
        optimizer = torch.optim.SGD([*ddp.owned_parameters(), later], lr=1.0)
        later.requires_grad_()
        ddp(x).sum().backward()
        with pytest.raises(ValueError, match=f"{name}, which was unfrozen or added after .* wrap the module again"):
            optimizer.step()
        later.requires_grad_(False)
        optimizer.step()
        optimizer.zero_grad()
    ddp.remove()


@pytest.mark.ranks(2)
def test_overlapped_ddp_refuses_a_backward_that_creates_a_graph(ctx):
    ddp = OverlappedDDP(exact_model().to(ctx.device), mesh=ctx)
    x = torch.ones(1, 8, device=ctx.device)
    ddp(x).sum().backward()
    with pytest.raises(LeaseError, match="create_graph=True.*torch.autograd.grad"):
        ddp(x).square().sum().backward(create_graph=True)
    ddp.remove()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("grad_dtype", [None, torch.float64])
def test_overlapped_ddp_whoever_drops_gradients_of_parameters_in_shards_has_dropped_them(ctx, grad_dtype):
    """By the module's zero_grad, or one by one, and whether backward or the optimizer's step is next."""
    outer = nn.Sequential(OverlappedDDP(exact_model().to(ctx.device), mesh=ctx, backend="torch", grad_dtype=grad_dtype,
                                        **SHARDED))  # fmt: skip
    ddp, x = outer[0], torch.ones(2, 8, device=ctx.device)
    model, optimizer = ddp.module, torch.optim.SGD(ddp.owned_parameters(), lr=1.0)

    def sums():
        """Of all ranks' shards, the gradients of a.weight, a.bias and b.weight."""
        found = {param: torch.zeros_like(param) for param in model.parameters()}
        for bucket in ddp.buckets:
            for index, param in enumerate(bucket.parameters):
                first, last = bucket.layout.piece(index, bucket.levels.shard)
                found[param].view(-1)[first:last] = param.main_grad.view(-1)[first:last]
        parts = torch.cat([grad.flatten() for grad in found.values()])
        ddp.levels.whole.all_reduce(parts)
        return [part.unique().tolist() for part in parts.split([param.numel() for param in found])]

    def backward():
        ddp(x).sum().backward()
        return sums()

    assert backward() == [[2], [2], [4]]
    assert backward() == [[4], [4], [8]]
    outer.zero_grad()
    assert backward() == [[2], [2], [4]]
    model.zero_grad(set_to_none=False)
    assert backward() == [[2], [2], [4]]
    model.a.weight.grad = None
    model.b.zero_grad(set_to_none=False)
    assert backward() == [[2], [4], [4]]
    model.a.weight.grad = torch.full_like(model.a.weight, 5.0)
    assert backward() == [[7], [6], [8]]
    with ddp.no_sync():
        ddp(x).sum().backward()
        model.a.zero_grad()
        ddp(x).sum().backward()
    model.b.zero_grad()
    assert backward() == [[4], [4], [4]]
    with pytest.raises(RuntimeError, match="memory location"):
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)

    before = [param.detach().clone() for param in model.parameters()]
    model.a.zero_grad()
    optimizer.step()
    ddp.start_param_sync()
    ensure_params_ready(model.parameters())
    moved = [(now - was).unique().tolist() for now, was in zip(model.parameters(), before, strict=True)]
    assert moved == [[0], [0], [-4]]
    ddp.remove()
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", [ALL_REDUCED, SHARDED], ids=["all-reduced", "sharded"])
def test_overlapped_ddp_hooks_of_users_see_a_rank_s_own_gradient_and_may_change_but_not_use_it_up(ctx, mode):
    model, seen, optimizers = exact_model().to(ctx.device), [], {}

    def hook(param):
        seen.append(param.grad.clone())
        param.grad.mul_(3.0)
        if param in optimizers:
            optimizers[param].step()

    early = model.a.bias.register_post_accumulate_grad_hook(hook)
    ddp = OverlappedDDP(model, mesh=ctx, **mode)
    late = model.a.weight.register_post_accumulate_grad_hook(hook)
    x = torch.full((1, 8), ctx.rank + 1.0, device=ctx.device)
    for _ in range(2):
        ddp(x).sum().backward()
        assert len(seen) == 2 and all(grad.eq(ctx.rank + 1.0 if grad.dim() == 2 else 1.0).all() for grad in seen)
        for bucket in ddp.buckets:
            for param, grad, _ in bucket.pieces():
                each = 4.5 if param is model.a.weight else 3.0  # three times the mean of 1 and 2; twice it
                assert grad.eq(each).all()
        seen.clear()
        ddp.zero_grad()
    ddp(x).sum().backward()  # gathers
    ddp.zero_grad()
    for param in (model.a.weight, model.a.bias):
        optimizers[param] = torch.optim.SGD([param], lr=1.0)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises((LeaseError, ValueError), match="in a hook of backward|make the optimizer of owned_parameters"):
        ddp(x).sum().backward()
    optimizers.clear()
    ddp.zero_grad()
    assert all(map(torch.equal, model.parameters(), before))
    ddp(x).sum().backward()
    early.remove(), late.remove()
    ddp.remove()


@pytest.mark.ranks(2)
def test_overlapped_ddp_inside_of_what_takes_its_gradients_or_parameters_is_refused_on_every_rank(ctx):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.body = nn.Linear(8, 8), OverlappedDDP(exact_model().to(ctx.device), mesh=ctx)

        def forward(self, x):
            return self.body(self.head(x))

    x, group = torch.ones(1, 8, device=ctx.device), ctx.group.process_group
    outer = nn.parallel.DistributedDataParallel(Outer().to(ctx.device), process_group=group)
    with pytest.raises(ValueError, match="OverlappedDDP: it is inside of torch's DistributedDataParallel"):
        outer(x)
    outer = Outer().to(ctx.device)
    ignored = [name for name, _ in outer.named_parameters() if name.startswith("body.")]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(outer, ignored)
    outer = nn.parallel.DistributedDataParallel(outer, process_group=group)
    for _ in range(2):
        outer(x * ctx.rank).sum().backward()
    assert outer.module.body.module.b.weight.grad.unique().numel() > 1

    mesh = DeviceMesh.from_group(group, ctx.device.type)
    outer = Outer().to(ctx.device)
    for take in (
        lambda: fully_shard(outer, mesh=mesh),
        lambda: FullyShard(outer, units=(nn.Linear,), mesh=mesh),
        lambda: ZeroOptimizer(outer.parameters(), torch.optim.SGD, mesh=mesh),
    ):
        with pytest.raises(ValueError, match="belongs to OverlappedDDP"):
            take()
    outer = Outer().to(ctx.device)  # the head may have been sharded
    fsdp.fully_shard(outer.body, mesh=mesh)
    with pytest.raises(ValueError, match="3 parameters that it reduces are not the module's any more"):
        outer(x)
    with pytest.raises(ValueError, match="belongs to fully_shard"):
        OverlappedDDP(fully_shard(exact_model().to(ctx.device), mesh=mesh), mesh=ctx)
    with pytest.raises((ValueError, TypeError), match="OverlappedDDP: a.weight is a DTensor"):
        OverlappedDDP(fsdp.fully_shard(exact_model().to(ctx.device), mesh=mesh), mesh=ctx)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sharded", [False, True])
def test_overlapped_ddp_lets_other_tensors_stand_in_for_parameters(ctx, sharded):
    """As averages do in functional_call, and tied weights."""
    model = exact_model().to(ctx.device)
    ddp = OverlappedDDP(model, mesh=ctx, use_distributed_optimizer=sharded)
    x = torch.ones(1, 8, device=ctx.device)
    others = {f"module.{name}": torch.ones_like(each) for name, each in model.named_parameters()}
    with torch.no_grad():
        y = torch.func.functional_call(ddp, others, (x,))
    assert y.unique().tolist() == [25.0]  # 8 and a bias, and twice 8
    twice = {f"module.{name}": 2 * each for name, each in model.named_parameters()}
    torch.func.functional_call(ddp, twice, (x,)).sum().backward()
    parts = [part for bucket in ddp.buckets for _, part, _ in bucket.pieces() if part.numel()]
    assert all(part.unique().item() in (2, 4) for part in parts)
    ddp.zero_grad()
    model.a.weight = model.b.weight
    ddp(x).sum().backward()
    model.a.weight = nn.Parameter(torch.ones(4, 8, device=ctx.device))
    with torch.no_grad():
        ddp(x)
    with pytest.raises(ValueError, match="1 parameters that it reduces are not the module's any more"):
        ddp(x)


@pytest.mark.ranks(2)
def test_overlapped_ddp_gradients_in_shards_are_not_replaced_or_scaled_by_their_parameters(ctx):
    model = nn.Linear(1, 1, bias=False).to(ctx.device)
    model.weight.data.fill_(1.0)
    ddp = OverlappedDDP(model, mesh=ctx, use_distributed_optimizer=True)
    optimizer, x = torch.optim.SGD(ddp.owned_parameters(), lr=1.0), torch.ones(1, 1, device=ctx.device)
    for change in (lambda grad: torch.ones_like(grad), lambda grad: grad * 0.5, lambda grad: grad.mul_(0.5)):
        ddp(x).sum().backward()
        model.weight.grad = change(model.weight.grad)
        with pytest.raises(LeaseError, match="the .grad of weight was replaced or scaled, but gradients lie in shards"):
            optimizer.step()
        ddp.zero_grad()
    ddp(x).sum().backward()
    assert model.weight.grad.isnan().all()
    del ddp, optimizer
    gc.collect()
    assert model.weight.grad is None
    model(x).sum().backward()
    assert model.weight.grad.eq(1).all()


@pytest.mark.ranks(2)
def test_overlapped_ddp_what_does_not_fit_is_refused_on_every_rank(ctx):
    model = nn.Linear(4, 4).to(ctx.device)
    for parameter in model.parameters():
        parameter.data.zero_()
    with pytest.raises(ValueError, match="num_distributed_optimizer_instances=3 must divide the 2 ranks"):
        OverlappedDDP(model, mesh=ctx, num_distributed_optimizer_instances=3)
    with pytest.raises(ValueError, match="leave out use_distributed_optimizer=False"):
        OverlappedDDP(model, mesh=ctx, overlap_param_gather=True, use_distributed_optimizer=False)
    with pytest.raises(ValueError, match="bucket_size=0 must be positive"):
        OverlappedDDP(model, mesh=ctx, bucket_size=0)
    with pytest.raises(ValueError, match="backend='nccl' is unknown; use 'tkernels' or 'torch'"):
        OverlappedDDP(model, mesh=ctx, backend="nccl")
    with pytest.raises(TypeError, match="^OverlappedDDP: mesh: takes a Context, a ProcessGroup or .*, not str"):
        OverlappedDDP(model, mesh="dp")
    with pytest.raises(TypeError, match="weight: backend='tkernels' sums .*, not torch.float64"):
        OverlappedDDP(copy.deepcopy(model).double(), mesh=ctx)
    with pytest.raises(ValueError, match=r"weight is on meta, without values; .* \(on rank 1\)") as error:
        OverlappedDDP(copy.deepcopy(model).to("meta" if ctx.rank == 1 else ctx.device), mesh=ctx)
    message_on_every_rank(ctx, error.value)
    with pytest.raises(ValueError, match=r"weight is on meta, without values; .* \(on rank 1\)"):
        OverlappedDDP(copy.deepcopy(model).to("meta" if ctx.rank == 1 else ctx.device), mesh=ctx, backend="torch")
    torchs, plain = nn.parallel.DistributedDataParallel, copy.deepcopy(model)
    with pytest.raises(ValueError, match="has one of torch's DistributedDataParallel"):
        OverlappedDDP(nn.Sequential(torchs(plain)), mesh=ctx)
    with pytest.raises(RuntimeError, match="doesn't have any parameter that requires a gradient"):
        torchs(OverlappedDDP(copy.deepcopy(model), mesh=ctx))
    with pytest.raises(ValueError, match="nothing to train"):
        OverlappedDDP(copy.deepcopy(model).requires_grad_(False), mesh=ctx)
    with pytest.raises(ValueError, match="weight is not initialized, as a lazy module's; run the model once before"):
        OverlappedDDP(nn.LazyLinear(4).to(ctx.device), mesh=ctx)
    ddp = OverlappedDDP(model, mesh=ctx)
    with pytest.raises(RuntimeError, match="no shards to gather"):
        ddp.start_param_sync()
    with pytest.raises(TypeError, match="finish_grad_sync: stream=3 must be a .*Stream, or None"):
        ddp.finish_grad_sync(3)

    instances, dtype = {"num_distributed_optimizer_instances": 3}, {"grad_dtype": torch.float64}
    words = [{name: "False"} for name in ("average", "overlap_param_gather", "grad_dtype", "comm_stream", "dev")]
    counts = [{"num_distributed_optimizer_instances": count} for count in ("2", None, 2.0)]
    others = {"backend": []}, {"dev": torch.cuda if ctx.device.type == "cpu" else torch.cpu}
    for wrong in ({"bucket_size": 0}, {"bucket_size": "40M"}, instances, dtype, *others, *words, *counts):
        with pytest.raises((TypeError, ValueError), match=r"^OverlappedDDP: .* \(on rank 1\)$") as error:
            OverlappedDDP(model, mesh=ctx, **(wrong if ctx.rank == 1 else {}))
        message_on_every_rank(ctx, error.value)
    with pytest.raises(MismatchError, match=r"differ in bucket_size \(100 and 101\)") as error:
        OverlappedDDP(model, mesh=ctx, bucket_size=100 + ctx.rank)
    message_on_every_rank(ctx, error.value)
    other = nn.Linear(4, 4 + ctx.rank).to(ctx.device)
    with pytest.raises(MismatchError, match=r"differ in weight \('\[4, 4\] of torch.float32' and '\[5, 4\]"):
        OverlappedDDP(other, mesh=ctx)
    model.bias.data.fill_(ctx.rank)
    with pytest.raises(MismatchError, match="values of rank 0 and rank 1 differ in bias .*; begin with the same"):
        OverlappedDDP(model, mesh=ctx)
    model.bias.data.copy_(torch.arange(4.0) if ctx.rank else torch.arange(4.0).flip(0))  # the same values elsewhere
    with pytest.raises(MismatchError, match="values of rank 0 and rank 1 differ in bias .*; begin with the same"):
        OverlappedDDP(model, mesh=ctx)
    model.bias.data.zero_()

    double = copy.deepcopy(model).double()  # which torch sums, too
    for options in ({}, {"grad_dtype": torch.float32, "use_distributed_optimizer": True}):
        ddp = OverlappedDDP(double, mesh=ctx, backend="torch", **options)
        optimizer = torch.optim.SGD(ddp.owned_parameters(), lr=1.0)
        ddp(torch.full((1, 4), ctx.rank + 1.0, dtype=torch.float64, device=ctx.device)).sum().backward()
        optimizer.step()
        ddp.remove()
    assert double.weight.eq(-2 * 1.5).all()

    ddp = OverlappedDDP(model, mesh=ctx.group.process_group, backend="torch")
    ddp.remove()
    ddp.remove()
    for call in (ddp.zero_grad, ddp.finish_grad_sync):
        with pytest.raises(LeaseError, match="it was removed from its module"):
            call()


@pytest.mark.ranks(2)
def test_overlapped_ddp_warns_of_running_statistics_which_ranks_have_of_their_own(ctx):
    def norms(**options):
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, **options)).to(ctx.device)

    def warned(module):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for parameter in module.parameters():
                parameter.data.fill_(1.0)
            OverlappedDDP(module, mesh=ctx).remove()
        return [str(each.message) for each in found if "OverlappedDDP" in str(each.message)]

    (message,) = warned(norms())
    assert "running statistics of 1 are not synchronised" in message and "convert_sync_batchnorm, or" in message
    assert not warned(norms(track_running_stats=False))
    assert not warned(nn.SyncBatchNorm.convert_sync_batchnorm(norms()))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("writes", ["seen", "unseen"])
def test_overlapped_ddp_a_forward_before_the_update_changes_no_result(ctx, writes):
    """Also where the optimizer writes to `.data`, of which torch counts no writes."""
    want = None
    for evaluates in (False, True):
        torch.manual_seed(0)
        ddp, results = OverlappedDDP(nn.Linear(6, 5).to(ctx.device), mesh=ctx, **SHARDED), []
        for step in range(4):
            x = integers((4, 6), torch.float32, 10 * step + ctx.rank, device=ctx.device)
            ddp.zero_grad(set_to_none=True)
            for y in [ddp(x) for _ in range(1 + step % 2)]:  # two backwards in the second step
                y.square().mean().backward()
            ddp.finish_grad_sync()
            if evaluates:
                with torch.no_grad():
                    ddp(x)
            for owned in ddp.owned_parameters():
                target = owned.data if writes == "unseen" else owned
                with torch.no_grad():
                    target.sub_(owned.grad, alpha=2.0**-10)
            if writes == "seen":
                for use in (ddp.state_dict, lambda ddp=ddp, x=x: ddp.module(x)):
                    with pytest.raises(LeaseError, match=r"updated by each rank .* call start_param_sync\(\)"):
                        use()
            if step == 2:
                ddp.zero_grad()
            if step == 3:
                ddp.remove()
            with torch.no_grad():
                results.append((ddp.module if step == 3 else ddp)(x).clone())
        assert want is None or all(map(torch.equal, results, want))
        want = results


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fused", [False, True])  # of which torch counts no writes
@pytest.mark.parametrize("mode", [SHARDED, {"overlap_param_gather": True}], ids=["sharded", "overlapped"])
def test_overlapped_ddp_has_gathered_parameters_after_a_step_for_whoever_reads_them(ctx, mode, fused):
    """And refuses a state dict of parameters that were updated by hand, which nothing tells it of."""
    for module in (nn.Linear(6, 5), nn.Sequential(nn.Linear(6, 5))):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        average = torch.optim.swa_utils.AveragedModel(module.to(ctx.device))
        ddp = OverlappedDDP(module, mesh=ctx, bucket_size=1, **mode)
        optimizers = [torch.optim.SGD([owned], 1.0, fused=fused) for owned in ddp.owned_parameters()]
        for step in (1, 2):
            ddp.zero_grad()
            ddp(torch.ones(4, 6, device=ctx.device)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            if mode is not SHARDED:
                ensure_params_ready(module.parameters())
            average.update_parameters(module)
            for read in (module.parameters(), copy.deepcopy(module).parameters(), ddp.state_dict().values()):
                assert all(value.eq(-4.0 * step).all() for value in read)
        assert all(value.eq(-6.0).all() for value in average.module.parameters())
        with torch.no_grad():
            for owned in ddp.owned_parameters():
                owned.sub_(1.0)
        for saved in (ddp, module):
            with pytest.raises(LeaseError, match="not been gathered; call start_param_sync"):
                saved.state_dict()
        ddp.start_param_sync()
        assert all(value.eq(-9.0).all() for value in ddp.state_dict().values())
        ddp.remove()
        module.state_dict()


@pytest.mark.ranks(2)
def test_overlapped_ddp_of_several_models_in_one_optimizer_are_gathered_in_one_order(ctx):
    """Whatever their addresses: models of equal sizes would have each other's values."""
    models, kept = [], []
    for number in range(6):
        kept.append([object() for _ in range(1000 * ctx.rank * number)])
        models.append(nn.Linear(4, 4).to(ctx.device))
        with torch.no_grad():
            [parameter.fill_(float(number)) for parameter in models[-1].parameters()]
    wrapped = [OverlappedDDP(model, mesh=ctx, **SHARDED) for model in models]
    optimizer = torch.optim.SGD([owned for ddp in wrapped for owned in ddp.owned_parameters()], lr=0.0)
    sum(ddp(torch.ones(1, 4, device=ctx.device)).sum() for ddp in wrapped).backward()
    optimizer.step()
    for number, model in enumerate(models):
        assert all(parameter.eq(float(number)).all() for parameter in model.parameters())


# The order of streams, in the simulator


@pytest.fixture(autouse=True)
def gradients_in_a_simulation_have_their_own_memory(monkeypatch):
    """The simulator keeps what its kernels read, so that it would count as another's. Ranks are other processes."""
    monkeypatch.setattr(grad_hooks, "_has_own_memory", lambda grad: True)


class SimulatedWire(Wire):
    """The collectives of rank 0 of two, as kernels of the simulator; the other rank has what this one has."""

    def __init__(self, sim, name=""):
        group = object.__new__(Group)
        group.rank, group.size, group.global_ranks = 0, 2, [0, 1]
        group.gather = lambda value, *_, **__: [value] * 2
        super().__init__(group)
        self.sim, self.name = sim, name

    def split(self, instances):
        return SimulatedWire(self.sim, "inside "), SimulatedWire(self.sim, "across ")

    def all_reduce(self, x, factor=1.0):
        self.sim.launch(f"{self.name}all_reduce", lambda x, _: x.mul_(2 * factor), reads=[x], writes=[x])

    def reduce_scatter(self, x, rows=None, factor=1.0):
        own = self.part(x, rows)
        self.sim.launch(f"{self.name}reduce_scatter", lambda _, own: own.mul_(2 * factor), reads=[x], writes=[own])
        return own

    def all_gather(self, x, rows=None, where=None):
        def copy_to_all(own, x):
            x.view(2, -1).copy_(own.expand(2, -1).clone())

        self.sim.launch("all_gather", copy_to_all, reads=[self.part(x, rows)], writes=[x])


class Scale(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.full((64,), value))

    def forward(self, x):
        return x * self.weight


class Spread:
    """While it is on, a parameter's hooks run on a stream of its own, as if its forward had been there."""

    def __init__(self, sim):
        self.sim, self.on, self.entered, self.kept = sim, False, None, []

    def enter(self, grad, stream):
        if self.on:
            self.kept.append(grad)  # autograd would have made it on `stream`
            stream.wait_stream(self.sim.current_stream())
            self.entered = self.sim.stream(stream)
            self.entered.__enter__()

    def leave(self):
        if self.entered is not None:
            self.entered.__exit__(None, None, None)
            self.entered = None


class Simulated:
    """A wrapped model of `a`, then `b`, with streams `one`, `two` and `comm` beside the main one; one step is done.

    The hooks of `a` run on `one` and those of `b` on `two`, as if each layer had a forward stream of its own.
    """

    def __init__(self, bucket_size=None, **options):
        self.sim = Simulator()
        self.one, self.two = self.sim.Stream("one"), self.sim.Stream("two")
        self.a, self.b = Scale(2.0), Scale(3.0)
        self.places, spread = ((self.a, self.one), (self.b, self.two)), Spread(self.sim)
        for layer, stream in self.places:  # before the hooks of the wrapper, and below after them
            layer.weight.register_hook(lambda grad, stream=stream: spread.enter(grad, stream))
        self.ddp = OverlappedDDP(
            nn.ModuleList([self.a, self.b]),
            backend=SimulatedWire(self.sim),
            bucket_size=bucket_size,
            average=False,
            comm_stream=self.sim.Stream("comm"),
            dev=self.sim,
            **options,
        )
        self.ddp.module.forward = lambda: None
        self.nodes = [get_gradient_edge(layer.weight).node for layer, _ in self.places]
        for node in self.nodes:  # after all hooks of the parameter
            node.register_hook(lambda *_: spread.leave())
        self.spread = spread
        self.ddp.owned_parameters()  # as an optimizer's maker would
        with self.sim:
            self.step()
        self.finish_step()

    def step(self):
        self.ddp.zero_grad()
        self.backward()

    def backward(self):
        outputs = []
        for layer, stream in self.places:
            with self.sim.stream(stream):
                outputs.append(layer(torch.ones(64)))
            self.sim.current_stream().wait_stream(stream)
        self.spread.kept += outputs
        self.spread.on = True
        (outputs[0] + outputs[1]).sum().backward()
        self.spread.on = False

    def finish_step(self):
        with self.sim:
            self.ddp.finish_grad_sync()
            if self.ddp.sharded:
                self.ddp.start_param_sync()
        self.sim.check()
        self.sim.run()
        self.sim.log.clear()


def reduce_behind(stream_of):
    """The landed forms: the comm stream waits for the tail of one stream, which had better be the right one."""

    def reduce(bucket):
        bucket.comm_stream.wait_stream(stream_of(bucket.dev))
        with bucket.dev.stream(bucket.comm_stream):
            bucket.levels.reduce(bucket.grads.slot.tensor)

    return reduce


FORMS = {
    "default stream": (reduce_behind(lambda dev: dev.default_stream()), 2),
    "current stream": (reduce_behind(lambda dev: dev.current_stream()), 1),
    "lease": (ParamBucket.reduce, 0),
}


@pytest.mark.parametrize("form", FORMS)
def test_overlapped_ddp_a_reduction_comes_after_the_hooks_of_all_streams(form):
    reduce, races = FORMS[form]
    right = []
    for starved in subsets(("one", "two", "main", "comm")):
        simulated = Simulated()
        simulated.ddp.hooks._on_ready = reduce
        with simulated.sim:
            simulated.step()
        found = [race for race in simulated.sim.races if race.kernels == ("_foreach_add_", "all_reduce")]
        assert len(found) == len(simulated.sim.races) == races
        simulated.sim.run(starve=starved)
        grads = torch.cat([simulated.a.weight.main_grad, simulated.b.weight.main_grad])
        right.append(bool(grads.eq(2.0).all()))
    assert all(right) == (races == 0)


def test_overlapped_ddp_the_order_of_hooks_and_fused_kernels_does_not_matter():
    for starved in subsets(("one", "two", "main", "comm")):
        simulated = Simulated()
        sim, ddp = simulated.sim, simulated.ddp
        with sim:
            ddp.zero_grad()
            ddp.hooks.defer(simulated.a.weight)
            with sim.stream(simulated.two):
                simulated.b(torch.ones(64)).sum().backward()
            assert simulated.a.weight.grad is None  # the pass waits
            with ddp.hooks.writing(simulated.a.weight, simulated.one) as main_grad, sim.stream(simulated.one):
                main_grad.add_(1.0)
            with sim.stream(simulated.two):
                grads = [weight.grad.clone() for weight in (simulated.a.weight, simulated.b.weight)]
        sim.check()
        sim.run(starve=starved)
        assert all(grad.eq(2.0).all() for grad in grads)


class OnlyMarked(torch.autograd.Function):
    """The identity, whose backward adds 1 to the weight's main_grad as Megatron's layers do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.weight.main_grad.add_(1.0)
        ctx.weight.grad_added_to_main_grad = True
        return grad, None


def produced_on_the_default_stream(hooks, param):
    produced(hooks, param, hooks._gradients[param].bucket.dev.default_stream())


produced = GradReadyHooks.produced
MARKED = {"the default stream": (produced_on_the_default_stream, 1), "the hook's stream": (produced, 0)}


@pytest.mark.parametrize("form", MARKED)
def test_grad_ready_hooks_order_the_reduction_behind_a_kernel_that_only_sets_its_mark(form, monkeypatch):
    monkeypatch.setattr(GradReadyHooks, "produced", MARKED[form][0])
    monkeypatch.setattr(grad_hooks, "HELD_BYTES", 0)  # else what comes later on the hook's stream covers the kernel
    right = []
    for starved in subsets(("one", "main", "comm")):
        simulated = Simulated()
        sim, weight = simulated.sim, simulated.a.weight
        with sim:
            simulated.ddp.zero_grad()
            with sim.stream(simulated.one):
                (OnlyMarked.apply(torch.ones(64), weight) + simulated.b(torch.ones(64))).sum().backward()
                grad = weight.grad.clone()
        assert [race.kernels for race in sim.races if race.kernels == ("add_", "all_reduce")] == (
            [("add_", "all_reduce")] * MARKED[form][1]
        )
        sim.run(starve=starved)
        right.append(bool(grad.eq(2.0).all()))
    assert all(right) == (form == "the hook's stream")


def test_overlapped_ddp_micro_batches_on_different_streams_add_up():
    for starved in subsets(("one", "two", "main", "comm")):
        simulated = Simulated()
        sim, ddp = simulated.sim, simulated.ddp
        with sim:
            ddp.zero_grad()
            with ddp.no_sync(), sim.stream(simulated.one):
                simulated.a(torch.ones(64)).sum().backward()
            for layer in (simulated.a, simulated.b):
                with sim.stream(simulated.two):
                    layer(torch.ones(64)).sum().backward()
        sim.check()
        sim.run(starve=starved)
        assert simulated.a.weight.main_grad.eq(4.0).all() and simulated.b.weight.main_grad.eq(2.0).all()


@pytest.mark.parametrize("overlap", [True, False])
def test_overlapped_ddp_no_sync_inside_no_sync_ends_with_the_outer_one(overlap):
    ddp = Simulated(overlap_grad_reduce=overlap).ddp
    with ddp.no_sync():
        with ddp.no_sync():
            pass
        assert not ddp.hooks.counting
    assert ddp.hooks.counting == overlap


@pytest.mark.parametrize("overlap", [True, False])
def test_overlapped_ddp_reduces_in_the_backwards_that_require_backward_grad_sync_says(overlap, monkeypatch):
    reductions, counts, reduce = [], [], ParamBucket.reduce
    monkeypatch.setattr(ParamBucket, "reduce", lambda bucket: reductions.append(bucket) or reduce(bucket))
    simulated = Simulated(overlap_grad_reduce=overlap)
    ddp = simulated.ddp
    reductions.clear()
    for sync in (False, False, True):  # as loops that accumulate set it
        ddp.require_backward_grad_sync = sync
        with simulated.sim.stream(simulated.one):
            (simulated.a(torch.ones(64)).sum() + simulated.b(torch.ones(64)).sum()).backward()
        counts.append(len(reductions))
        with ddp.no_sync():
            assert not ddp.require_backward_grad_sync
        assert ddp.require_backward_grad_sync == sync
    assert counts == [0, 0, len(ddp.buckets)]
    with pytest.raises(TypeError, match="OverlappedDDP: require_backward_grad_sync='no' must be True or False"):
        ddp.require_backward_grad_sync = "no"


def test_overlapped_ddp_only_what_may_have_been_updated_is_gathered_again(monkeypatch):
    simulated, gathered, gather = Simulated(**SHARDED), [], UpdatedValues.gather
    sim, ddp = simulated.sim, simulated.ddp
    state = {name: value.clone() for name, value in ddp.module.state_dict().items()}
    monkeypatch.setattr(UpdatedValues, "gather", lambda bucket, *_: gathered.append(bucket) or gather(bucket))
    with sim:
        simulated.step()
        ddp.finish_grad_sync()
        ddp.module.load_state_dict(state)  # the gather to come takes it
        for gathers in (1, 2):  # the optimizer may have its turn yet
            ddp()
            assert len(gathered) == gathers
        ddp.finish_grad_sync(simulated.one)  # for another reader
        ensure_params_ready([simulated.a.weight])
        ddp.zero_grad()
        for gathers in (3, 4):  # or has had it, by writes that torch doesn't see
            ddp()
            assert len(gathered) == gathers
        with ddp.no_sync():
            simulated.backward()
        ddp()
        assert len(gathered) == 4


@pytest.mark.parametrize("mode", [SHARDED, GATHERED_LATE], ids=["sharded", "gathered-late"])
def test_overlapped_ddp_what_forward_needs_first_is_gathered_first_and_waited_for_unless_that_overlaps(
    mode, monkeypatch
):
    simulated, gathered, gather = Simulated(bucket_size=64, **mode), [], UpdatedValues.gather
    sim, ddp = simulated.sim, simulated.ddp
    monkeypatch.setattr(UpdatedValues, "gather", lambda own, *_: gather(own) or gathered.extend(own.layout.parameters))
    with sim:
        simulated.step()
        ddp.finish_grad_sync()
        update(simulated, 1.0)
        ddp.start_param_sync()
        simulated.a.weight.detach().clone()
    assert gathered[0] is simulated.a.weight and gathered[1] is simulated.b.weight
    assert bool(sim.races) == (mode is GATHERED_LATE)


def test_overlapped_ddp_backward_orders_its_stream_and_finish_the_one_that_it_is_given_and_no_other():
    for reader, races in (("one", False), ("two", False), ("main", True)):
        simulated = Simulated()
        sim, ddp = simulated.sim, simulated.ddp
        with sim:
            with sim.stream(simulated.one):
                simulated.step()
            ddp.finish_grad_sync(simulated.two)
            with sim.stream({"one": simulated.one, "two": simulated.two}.get(reader)):
                simulated.a.weight.grad.clone()
        assert bool(sim.races) == races


def test_overlapped_ddp_gradients_are_zeroed_after_the_optimizer_has_read_them():
    for starved in subsets(("one", "two", "main", "comm")):
        simulated = Simulated()
        sim, ddp = simulated.sim, simulated.ddp
        with sim:
            simulated.step()
            ddp.finish_grad_sync(simulated.one)
            with sim.stream(simulated.one):
                read = simulated.b.weight.main_grad.clone()
            simulated.step()  # zeroes on the main stream
        sim.check()
        sim.run(starve=starved)
        assert read.eq(2.0).all()


@pytest.mark.parametrize("form", ["lease", "tail of the stream"])
def test_overlapped_ddp_a_bucket_is_reduced_while_backward_goes_on(form, monkeypatch):
    """Backward is held up wherever it can be: what the comm stream does meanwhile is overlapped."""
    monkeypatch.setattr(grad_hooks, "HELD_BYTES", 0)  # so that gradients are added while backward goes on
    overlapped = form == "lease"
    simulated = Simulated(bucket_size=64, overlap_grad_reduce=overlapped)
    sim, ddp = simulated.sim, simulated.ddp
    if not overlapped:
        ddp.hooks._on_ready = reduce_behind(lambda dev: dev.current_stream())
    with sim:
        ddp.zero_grad()
        simulated.b(simulated.a(torch.ones(64))).sum().backward()
        ddp.finish_grad_sync()
    sim.run(starve=["main"])
    adds = [index for index, name in enumerate(sim.log) if name == "_foreach_add_"]
    assert len(adds) == 2 and (sim.log.index("all_reduce") < adds[1]) == overlapped


@pytest.mark.parametrize("held, kernels", [(grad_hooks.HELD_BYTES, 1), (0, 2)])
def test_overlapped_ddp_adds_small_gradients_of_a_stream_at_once(held, kernels, monkeypatch):
    monkeypatch.setattr(grad_hooks, "HELD_BYTES", held)
    simulated = Simulated()
    sim, ddp = simulated.sim, simulated.ddp
    with sim:
        ddp.zero_grad()
        (simulated.a(torch.ones(64)) + simulated.b(torch.ones(64))).sum().backward()
        grads = [weight.grad.clone() for weight in (simulated.a.weight, simulated.b.weight)]
    sim.check()
    sim.run()
    assert sim.log.count("_foreach_add_") == kernels and all(grad.eq(2.0).all() for grad in grads)


def test_overlapped_ddp_one_stream_of_hooks_costs_one_wait_a_bucket():
    simulated = Simulated(bucket_size=64)
    sim, ddp = simulated.sim, simulated.ddp
    for _ in range(2):
        with sim:
            ddp.zero_grad()
            sim.waits = 0
            (simulated.a(torch.ones(64)) + simulated.b(torch.ones(64))).sum().backward()
            assert sim.waits == 4  # the comm stream and this one, for each bucket
            ddp.finish_grad_sync()
            assert sim.waits == 4
    sim.check()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("options", [{}, {"grad_dtype": torch.bfloat16}, GATHERED_LATE], ids=["plain", "cast", "late"])
def test_overlapped_ddp_in_the_usual_loop_has_no_race(options, set_to_none):
    for starved in subsets(("one", "two", "main", "comm")):
        simulated = Simulated(bucket_size=64, **options)
        sim, ddp = simulated.sim, simulated.ddp
        optimizer = torch.optim.SGD(ddp.owned_parameters(), lr=1.0)
        with sim:
            for _ in range(2):
                optimizer.zero_grad(set_to_none)
                for context in (ddp.no_sync(), contextlib.nullcontext()):
                    if ddp.sharded:
                        ddp()
                    for stream in (simulated.one, simulated.two):
                        stream.wait_stream(sim.current_stream())  # whole parameters are the caller's to order
                    with context:
                        simulated.backward()
                with torch.no_grad():
                    for owned in ddp.owned_parameters():
                        owned.sub_(owned.grad)
            if ddp.sharded:
                ddp.start_param_sync()
                ensure_params_ready([simulated.a.weight, simulated.b.weight])
            values = [simulated.a.weight.detach().clone(), simulated.b.weight.detach().clone()]
        sim.check()
        sim.run(starve=starved)
        assert values[0].eq(2.0 - 2 * 4.0).all() and values[1].eq(3.0 - 2 * 4.0).all()


def update(simulated, amount):
    for owned in simulated.ddp.owned_parameters():
        owned.data.add_(amount)


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("mode", [SHARDED, GATHERED_LATE, TWO_INSTANCES], ids=["sharded", "gathered-late", "two"])
def test_overlapped_ddp_parameters_are_read_after_their_gather_and_gathered_after_they_were_read(mode, asks):
    """`asks`: a stream that reads a parameter outside of its module says so; it races if not."""
    right = []
    for starved in subsets(("one", "two", "main", "comm")):
        simulated = Simulated(bucket_size=64, **mode)
        sim, ddp = simulated.sim, simulated.ddp
        with sim:
            for _ in range(2):
                simulated.step()
                ddp.finish_grad_sync(simulated.two)
                with sim.stream(simulated.two):
                    update(simulated, 1.0)
                ddp.start_param_sync()
                with sim.stream(simulated.one):
                    if asks:
                        ensure_params_ready([simulated.b.weight])
                    read = simulated.b.weight.detach().clone()
        assert bool(sim.races) == (not asks)
        sim.run(starve=starved)
        right.append(bool(read.eq(3.0 + 2.0).all() and simulated.a.weight.eq(2.0 + 2.0).all()))
    assert all(right) == asks


def test_overlapped_ddp_both_levels_of_a_reduction_are_in_order_on_the_comm_stream():
    simulated = Simulated(**TWO_INSTANCES)
    with simulated.sim:
        simulated.step()
        simulated.ddp.finish_grad_sync()
    simulated.sim.check()
    simulated.sim.run(starve=["comm"])
    assert [name for name in simulated.sim.log if "reduce" in name] == ["inside reduce_scatter", "across all_reduce"]
    assert simulated.ddp.buckets[0].owned[0].main_grad.eq(4.0).all()


# ensure_params_ready


def updated(**options):
    """After an update, with gathers under way and nobody behind them yet."""
    simulated = Simulated(bucket_size=64, **GATHERED_LATE, **options)
    with simulated.sim:
        simulated.step()
        simulated.ddp.finish_grad_sync()
        update(simulated, 1.0)
        simulated.ddp.start_param_sync()
    simulated.sim.waits = 0
    return simulated


def test_ensure_params_ready_waits_once_for_each_bucket_and_stream():
    simulated = updated()
    sim, (a, b) = simulated.sim, (simulated.a.weight, simulated.b.weight)
    with sim:
        ensure_params_ready([a, a])
        assert sim.waits == 1
        ensure_params_ready([a, b, nn.Parameter(torch.ones(1))])
        assert sim.waits == 2
        ensure_params_ready([a, b])
        simulated.a(torch.ones(64))
        assert sim.waits == 2
        with sim.stream(simulated.one):
            simulated.a(torch.ones(64))
        assert sim.waits == 3
    sim.check()


def test_overlapped_ddp_all_parameters_in_one_bucket_are_one_wait():
    simulated = Simulated(**GATHERED_LATE)
    with simulated.sim:
        simulated.step()
        simulated.ddp.finish_grad_sync()
        simulated.ddp.start_param_sync()
        simulated.sim.waits = 0
        ensure_params_ready(simulated.ddp.module.parameters())
    assert simulated.sim.waits == 1


def test_ensure_params_ready_starts_nothing_and_refuses_parameters_that_were_not_gathered():
    simulated = Simulated(**GATHERED_LATE)
    with simulated.sim:
        simulated.step()
        simulated.ddp.finish_grad_sync()
        update(simulated, 1.0)
        with pytest.raises(LeaseError, match=r"bucket 0 have been updated .* call start_param_sync\(\)"):
            simulated.a(torch.ones(64))
    simulated.sim.run()
    assert "all_gather" not in simulated.sim.log


def test_overlapped_ddp_the_wrapper_itself_starts_the_gather():
    class Both(nn.Sequential):
        pass

    sim = Simulator()
    ddp = OverlappedDDP(
        Both(Scale(2.0), Scale(3.0)), backend=SimulatedWire(sim), bucket_size=64, dev=sim, **GATHERED_LATE
    )
    with sim:
        ddp(torch.ones(64)).sum().backward()
        ddp.finish_grad_sync()
        for owned in ddp.owned_parameters():
            owned.data.add_(1.0)
        y = ddp(torch.ones(64))
    sim.check()
    sim.run(starve=["main"])
    assert y.eq(3.0 * 4.0).all()
    gathers = [i for i, name in enumerate(sim.log) if name == "all_gather"]
    assert len(gathers) == 2


def test_overlapped_ddp_a_state_dict_is_loaded_after_the_gather_that_is_under_way():
    simulated = updated()
    sim, ddp = simulated.sim, simulated.ddp
    with sim:
        state = {name: torch.full((64,), 7.0) for name in ("0.weight", "1.weight")}
        ddp.module.load_state_dict(state)
        assert sim.waits == 2  # this stream, for both gathers
    sim.check()


def test_overlapped_ddp_the_state_dict_of_a_part_is_read_after_its_own_gather():
    simulated = updated()
    with simulated.sim:
        copied = {name: value.clone() for name, value in simulated.a.state_dict().items()}
        assert copied and simulated.sim.waits == 1
    simulated.sim.check()


def test_overlapped_ddp_parameters_keep_no_wrapper_alive():
    simulated = updated()
    a, sim = simulated.a, simulated.sim
    simulated.sim.run()
    del simulated
    gc.collect()
    assert grad_ready_hooks(a.weight) is None
    with sim:
        ensure_params_ready([a.weight])
        a(torch.ones(64))
    assert sim.waits == 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", [ALL_REDUCED, SHARDED], ids=["all-reduced", "sharded"])
def test_overlapped_ddp_dropped_leaves_no_hooks_that_fully_shard_would_refuse(ctx, mode):
    model, x = exact_model().to(ctx.device), torch.ones(1, 8, device=ctx.device)
    OverlappedDDP(model, mesh=ctx, **mode)(x).sum().backward()
    gc.collect()
    fully_shard(model, mesh=ctx)
    (model(x).sum() * (1 + 2 * ctx.rank)).backward()
    assert model.b.weight.grad.full_tensor().eq(4.0).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", [SHARDED, GATHERED_LATE], ids=["sharded", "gathered-late"])
def test_overlapped_ddp_dropped_after_a_step_leaves_no_parameters_that_are_mixtures_unnoticed(ctx, mode):
    model, x = exact_model().to(ctx.device), torch.ones(2, 8, device=ctx.device)
    start = copy.deepcopy(model.state_dict())

    def train(steps, gathered):
        ddp = OverlappedDDP(model, mesh=ctx, **mode)
        for _ in range(steps):
            ddp(x).sum().backward()
            with torch.no_grad():  # by hand: after an optimizer's step parameters are gathered
                for owned in ddp.owned_parameters():
                    owned.sub_(owned.grad)
        if gathered:
            ddp.start_param_sync()
        elif not steps:
            ddp(x).sum().backward()

    train(0, False)
    gc.collect()
    want = model(x)  # nothing has been written
    train(1, False)
    gc.collect()
    for use in (
        lambda: model(x),
        model.state_dict,
        lambda: ensure_params_ready(model.parameters()),
        lambda: OverlappedDDP(model, mesh=ctx),
        lambda: ZeroOptimizer(model.parameters(), torch.optim.SGD, lr=1.0, mesh=ctx),
    ):
        with pytest.raises(LeaseError, match=r"bucket 0 were updated .* dropped before .* start_param_sync\(\) or"):
            use()
    model.load_state_dict(start)
    assert model(x).equal(want)
    train(1, True)
    gc.collect()
    assert not model(x).equal(want)


def test_ensure_params_ready_is_nothing_once_the_wrapper_is_removed():
    simulated = updated()
    sim = simulated.sim
    with sim:
        simulated.ddp.remove()
        assert sim.waits == 2  # the stream that removed it is behind both gathers
        ensure_params_ready([simulated.a.weight])
        simulated.a(torch.ones(64))
    assert sim.waits == 2
    assert simulated.ddp.handles and not simulated.a._forward_pre_hooks
    sim.check()


@pytest.mark.parametrize("settled", [True, False])
def test_overlapped_ddp_a_capture_waits_for_nothing_of_outside(settled, monkeypatch):
    """At its edge all is joined; without that, a gather of outside is refused, since no graph could wait for it."""
    simulated = updated()
    sim, ddp = simulated.sim, simulated.ddp
    if settled:
        with sim:
            ddp.settle()
            for bucket in ddp.buckets:
                bucket.values.buffer.slot.join()
    sim.waits = 0
    monkeypatch.setattr(sim, "is_current_stream_capturing", lambda: True)
    with sim, sim.stream(simulated.one):
        if settled:
            simulated.a(torch.ones(64))
        else:
            with pytest.raises(LeaseError, match="outside the CUDA graph"):
                simulated.a(torch.ones(64))
    assert sim.waits == 0


class SimulatedGraph:
    """What torch.cuda.graph(...) is to a capture; what is captured runs once, at once. A replay records its event."""

    def __init__(self, sim, monkeypatch):
        self.cuda_graph, self.replays = self, 0
        self._sim, self._inside, self._event = sim, False, sim.Event()
        monkeypatch.setattr(sim, "is_current_stream_capturing", lambda: self._inside)
        monkeypatch.setattr(sim, "Event", lambda external: self._event)

    def __enter__(self):
        self._inside = True

    def __exit__(self, *_):
        self._inside = False

    def replay(self):
        self._event.record(self._sim.current_stream())
        self.replays += 1


@pytest.mark.parametrize("usual", [True, False], ids=["usual", "explicit"])
@pytest.mark.parametrize("mode", [ALL_REDUCED, SHARDED, TWO_INSTANCES], ids=["all-reduced", "sharded", "two"])
def test_overlapped_ddp_steps_are_captured_between_eager_ones(mode, usual, monkeypatch):
    """No wait crosses an edge of the capture: the lifetime core refuses those."""
    simulated = Simulated(bucket_size=64, **mode)
    sim, ddp = simulated.sim, simulated.ddp
    graph = SimulatedGraph(sim, monkeypatch)

    streams = [simulated.one, simulated.two]

    def step():
        if usual:
            for owned in ddp.owned_parameters():
                owned.grad = None
            if ddp.sharded:
                ddp()
            simulated.backward()
            update(simulated, 1.0)
        else:
            simulated.step()
            ddp.finish_grad_sync()
            update(simulated, 1.0)
            if ddp.sharded:
                ddp.start_param_sync()
        for stream in streams:  # all-reduced parameters are the caller's to order
            stream.wait_stream(sim.current_stream())

    with sim:
        step()
        with ddp.captured(graph, streams=streams) as replay:
            step()
        for replays in (1, 2):
            replay()
            assert graph.replays == replays
            step()
    sim.check()
    sim.run(starve=["one", "comm"])
    with sim, pytest.raises(ZeroDivisionError), ddp.captured(graph, streams=streams):
        step()
        1 / 0  # noqa: B018
    sim.run()  # here what was captured has run all the same
    with sim:
        step()
    sim.check()


def test_overlapped_ddp_a_capture_that_fails_leaves_nothing_begun(monkeypatch):
    simulated = Simulated(bucket_size=64, **SHARDED)
    sim, ddp = simulated.sim, simulated.ddp
    graph = SimulatedGraph(sim, monkeypatch)
    with sim, pytest.raises(ZeroDivisionError), ddp.captured(graph, streams=[simulated.one, simulated.two]):
        simulated.step()
        ddp.finish_grad_sync()
        1 / 0  # noqa: B018
    assert not any(gradient.written for gradient in ddp.hooks._gradients.values())
    with sim:
        ensure_params_ready([simulated.a.weight])  # there was no update


# On GPUs: the same, with streams that are really late

SLEEP = 100_000_000  # cycles, about 50 ms
MANY = [(5, SLEEP), (1000, 2_000_000)]  # iterations and cycles


class Branches(nn.Module):
    """Two parameters, each used on its own stream; late[i]: cycles that pass in its hook before ours is called."""

    def __init__(self, device):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.full((4096,), 2.0, device=device)) for _ in range(2))
        self.streams, self.late = [torch.cuda.Stream() for _ in range(2)], [0, 0]
        for index, weight in enumerate(self.weights):  # before those of the wrapper, which come after it then
            weight.register_post_accumulate_grad_hook(lambda _, index=index: torch.cuda._sleep(self.late[index]))

    def backward(self, value):
        """Every gradient is `value`. The second weight's hook is the last. Only the wrapper orders reductions."""
        losses, main = [], torch.cuda.current_stream()
        for weight, stream in reversed(list(zip(self.weights, self.streams, strict=True))):
            stream.wait_stream(main)  # behind the parameters
            with torch.cuda.stream(stream):
                losses.append((weight * value).sum())
            main.wait_stream(stream)
        (losses[0] + losses[1]).backward()

    def gradients(self, ddp):
        """This rank's shards of the gradients, as they are once the GPU has nothing left to do."""
        torch.cuda.synchronize()
        return torch.cat([owned.main_grad for owned in ddp.owned_parameters()]).cpu()


def wrapped_on_a_side_stream(ctx, backend, **options):
    """A wrapper that was made on a stream of its own, and has learned its counts."""
    model, side = Branches(ctx.device), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        ddp = OverlappedDDP(model, mesh=ctx, backend=backend, average=False, **TWO_INSTANCES, **options)
    torch.cuda.current_stream().wait_stream(side)
    for _ in range(2):
        ddp.zero_grad()
        model.backward(ctx.rank + 1.0)
        ddp.finish_grad_sync()
    torch.cuda.synchronize()
    return model, ddp


@gpu_only
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("backend", STREAMED)
@pytest.mark.parametrize("iterations, cycles", MANY, ids=["sleep", "many"])
def test_overlapped_ddp_late_hooks_are_waited_for(ctx, backend, iterations, cycles):
    model, ddp = wrapped_on_a_side_stream(ctx, backend)
    reference, plain = wrapped_on_a_side_stream(ctx, backend, overlap_grad_reduce=False)
    for iteration in range(iterations):
        model.late = [cycles, 0] if iteration % 2 else [0, cycles]
        value = iteration + ctx.rank + 1.0
        for module, wrapper in ((model, ddp), (reference, plain)):
            wrapper.zero_grad()
            module.backward(value)
            wrapper.finish_grad_sync()
        grads, want = (torch.cat([p.main_grad for p in w.owned_parameters()]).clone() for w in (ddp, plain))
        assert torch.equal(grads, want), f"iteration {iteration}"
        assert grads.eq(sum(iteration + rank + 1.0 for rank in range(ctx.size))).all(), f"iteration {iteration}"
    ddp.remove()
    plain.remove()


@gpu_only
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("backend", STREAMED)
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("form", FORMS)
def test_overlapped_ddp_forms_that_wait_for_one_stream_lose_the_gradients_of_another(ctx, backend, form, late):
    """The stream of the first hook is late, or that of the last one."""
    reduce, races = FORMS[form]
    model, ddp = wrapped_on_a_side_stream(ctx, backend)
    ddp.hooks._on_ready = reduce
    model.late[late] = SLEEP
    ddp.zero_grad()
    # the last stream sees the zeros, and the wrong forms fail for one reason only
    torch.cuda.synchronize()
    model.backward(ctx.rank + 1.0)
    grads = model.gradients(ddp)
    right = all(ctx.group.gather(bool(grads.eq(sum(rank + 1.0 for rank in range(ctx.size))).all())))
    assert right == (races == 0 or (form == "current stream" and late == 1))
    ctx.group.barrier()
    ddp.hooks._on_ready = ParamBucket.reduce
    ddp.remove()


@gpu_only
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("backend", STREAMED)
@pytest.mark.parametrize("told", ["where launched", "after launch", "by the hook"])
@pytest.mark.parametrize("deferred", [False, True])
def test_overlapped_ddp_late_fused_gradients_are_waited_for(ctx, backend, told, deferred):
    """Readiness is where the kernel is launched; "by the hook" takes the hook's stream for the kernel's, and fails."""
    layer = FusedLinear(64, told=told, deferred=deferred).to(ctx.device)
    layer.weight.data.fill_(1.0)
    x = torch.full((4, 64), ctx.rank + 1.0, device=ctx.device)
    ddp = OverlappedDDP(layer, mesh=ctx, backend=backend, average=False)
    right = []
    for step in range(4):
        layer.sleep = SLEEP if step else 0
        ddp.zero_grad()
        torch.cuda.synchronize()
        ddp(x.requires_grad_()).sum().backward()
        layer.backward_dw()
        ddp.finish_grad_sync()
        grad = layer.weight.main_grad.clone()
        torch.cuda.synchronize()
        right.append(bool(grad.eq(sum(4.0 * (rank + 1) for rank in range(ctx.size))).all()))
        ctx.group.barrier()
    assert all(right) == (told != "by the hook"), right
    ddp.remove()


@gpu_only
@pytest.mark.ranks(2)
def test_overlapped_ddp_a_hook_runs_where_its_node_was_made(ctx):
    """And wherever it was registered; the nodes that we don't keep are made by each forward."""
    main, side, other = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    seen = []

    def node_of(param):
        return param.expand_as(param).grad_fn.next_functions[0][0]

    def note(*_):
        seen.append(torch.cuda.current_stream())

    param = nn.Parameter(torch.ones(10, device=ctx.device))
    node = node_of(param)
    with torch.cuda.stream(side):
        node.register_hook(note)
    (param * 2).sum().backward()
    assert seen == [main]

    seen.clear()
    param = nn.Parameter(torch.ones(10, device=ctx.device))
    with torch.cuda.stream(side):
        node = node_of(param)
        node.register_hook(note)
    (param * 2).sum().backward()
    assert seen == [side]
    del node
    torch.cuda.synchronize()

    seen.clear()
    layer = Scale(1.0).to(ctx.device)
    with torch.cuda.stream(side):
        ddp = OverlappedDDP(layer, mesh=ctx, backend="torch")
        layer.weight.register_post_accumulate_grad_hook(note)
    for stream in (main, other, side, main):
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            layer(torch.ones(64, device=ctx.device)).sum().backward()
        main.wait_stream(stream)
        assert seen.pop() == stream
    ddp.finish_grad_sync()
    ddp.remove()


@gpu_only
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("backend", STREAMED)
def test_overlapped_ddp_backward_goes_on_while_a_reduction_is_open(ctx, backend):
    """The comm stream is held up; what overlaps has finished before it."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).to(ctx.device)
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(integers(parameter.shape, torch.float32, seed, -1, 1))
    ddp = OverlappedDDP(model, mesh=ctx, backend=backend, bucket_size=100_000)
    x, seen = torch.ones(16, 256, device=ctx.device, requires_grad=True), []

    def computed(_):  # backward, all but its end, which waits for the reductions
        started = len(ddp.hooks._unreported) < len(ddp.buckets)
        seen[:] = started, torch.cuda.current_stream().record_event(), ddp.comm_stream.record_event()

    x.register_hook(computed)
    for number in range(3):  # the first pass learns, and the second may have kernels to compile
        ddp.zero_grad()
        torch.cuda.synchronize()
        ctx.group.barrier()
        with torch.cuda.stream(ddp.comm_stream):
            torch.cuda._sleep(10 * SLEEP)
        ddp(x).sum().backward()
        started, last_gradient, reduced = seen
        last_gradient.synchronize()
        assert number < 2 or (started and not reduced.query())
    torch.cuda.synchronize()
    ddp.remove()


@gpu_only
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("backend", STREAMED)
@every_mode
def test_overlapped_ddp_a_whole_iteration_is_captured_after_a_warm_up_on_the_default_stream(ctx, backend, mode):
    ctx = tkernels.init(ctx.group.process_group, heap_bytes=256 << 20)  # what a graph was captured with is never freed

    def training_of(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(ctx.device)
        ddp = OverlappedDDP(model, mesh=ctx, backend=backend, bucket_size=10_000, **mode)
        sgd = torch.optim.SGD(ddp.owned_parameters(), lr=0.1, momentum=0.9)
        x = torch.empty(32, 64, device=ctx.device)
        loss_of_step = torch.zeros((), device=ctx.device)

        def step():
            ddp.zero_grad()
            loss = (ddp(x) - x).square().mean()
            loss.backward()
            ddp.finish_grad_sync()
            sgd.step()
            loss_of_step.copy_(loss.detach())

        return ddp, x, loss_of_step, step

    def batch(number):
        generator = torch.Generator().manual_seed(100 * number + ctx.rank)
        return torch.randn(32, 64, generator=generator)

    eager, captured = training_of(0), training_of(0)
    for number in range(3):
        for _, x, _, step in (eager, captured):
            x.copy_(batch(number))
            step()
    ddp, x, loss_of_step, step = captured
    graph = torch.cuda.CUDAGraph()
    with ddp.captured(torch.cuda.graph(graph)) as replay:
        step()
    for number in range(3, 6):
        x.copy_(batch(number))
        replay()
        eager[1].copy_(batch(number))
        eager[3]()
        assert torch.equal(loss_of_step, eager[2]), f"replay {number - 3}"
    # and eagerly again, in order with the last replay
    for _, x, _, step in (eager, captured):
        x.copy_(batch(6))
        step()
    assert torch.equal(loss_of_step, eager[2])
    for wrapper in (eager[0], ddp):
        wrapper.remove()
    assert all(map(torch.equal, ddp.module.parameters(), eager[0].module.parameters()))
    ctx.finalize()
