"""FSDP2 over this library's collectives trains as it does over torch's: the same bits where the order of sums is."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tkernels
from tkernels.layers.doors import fsdp2, log_once

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
STEPS = 3


class Net(nn.Module):
    """Sizes that no number of ranks divides, and a frozen layer in bf16 beside trained ones in fp32."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.mid, self.down = nn.Linear(6, 13), nn.Linear(13, 7), nn.Linear(7, 5, bias=False)
        self.frozen = nn.Linear(5, 5).to(torch.bfloat16).requires_grad_(False)

    def forward(self, x):
        y = self.down(torch.relu(self.mid(torch.relu(self.up(x)))))
        return y + self.frozen(y.to(self.frozen.weight.dtype)).to(y.dtype)


def sharded(ctx, mesh=None, dtype=None, **options):
    """(model, its modules that FSDP2 shards): two of its layers by themselves, the rest with the root."""
    model = Net().to(ctx.device, dtype)
    mesh = mesh or init_device_mesh(ctx.device.type, (ctx.size,))
    modules = [model.up, model.mid, model]
    for module in modules:
        fully_shard(module, mesh=mesh, **options)
    return model, modules


def trained(ctx, model, prefetch=lambda: None):
    """Losses and whole parameters of some steps of AdamW, each rank on its own batch."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(STEPS):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + ctx.rank))
        prefetch()
        loss = model(x.to(ctx.device, model.up.weight.dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses), [parameter.full_tensor().detach() for parameter in model.parameters()]


@contextlib.contextmanager
def counted():
    """The names of this library's collectives that run in the block."""
    names = []

    def spy(name, real):
        return lambda *args, **options: names.append((name, args[0].dtype)) or real(*args, **options)

    each = {name: spy(name, getattr(tkernels, name)) for name in ("all_gather", "reduce_scatter")}
    with mock.patch.multiple(tkernels, **each):
        yield names


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", ["fp32", "bf16", "bf16, reduced in bf16", "one factor", "sums"])
def test_install_trains_bit_for_bit_as_torchs_own_collectives_do(ctx, case):
    options = {"bf16": BF16, "bf16, reduced in bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}.get(case)
    results = []
    for door in (False, True):
        model, modules = sharded(ctx, **({"mp_policy": options} if options else {}))
        for module in modules:
            if case == "sums":
                module.set_force_sum_reduction_for_comms(True)
            if case == "one factor":  # gloo has no PREMUL_SUM: its sums are divided afterwards
                module.set_gradient_divide_factor(4.0)
                module.set_force_sum_reduction_for_comms(not door)
        if door:
            fsdp2.install(model)
        with counted() as calls:
            results.append(trained(ctx, model))
        names = [name for name, _ in calls]
        # The root's parameters stay gathered until its backward has ended.
        expected = {"all_gather": 5 * STEPS, "reduce_scatter": 3 * STEPS} if door else {}
        assert {name: names.count(name) for name in names} == expected
        if door and case == "fp32":  # the frozen layer is bf16 beside fp32
            assert ("all_gather", torch.uint8) in calls and ("all_gather", torch.float32) in calls
    (losses, whole), (other_losses, other_whole) = results
    assert torch.equal(losses, other_losses)
    assert all(map(torch.equal, whole, other_whole))
    ctx.check()


@pytest.mark.ranks(4)
def test_install_leaves_the_all_reduce_over_replicas_to_torch(ctx):
    """A mesh of two dimensions; the second gather of a step is over smaller groups where shards grow after forward."""
    for shape, options in (((2, 2), {}), ((4,), {"reshard_after_forward": 2})):
        results = []
        for door in (False, True):
            mesh = init_device_mesh(ctx.device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
            model, _ = sharded(ctx, mesh, **options)
            if door:
                fsdp2.install(model)
            with counted() as calls, mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
                results.append(trained(ctx, model))
            assert (len(calls) > 0) == door
            assert (all_reduce.call_count > 0) == (shape == (2, 2))
        (losses, whole), (other_losses, other_whole) = results
        if shape == (2, 2):  # two terms have one order
            assert torch.equal(losses, other_losses) and all(map(torch.equal, whole, other_whole))
        for mine, theirs in zip(whole, other_whole, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(4)
def test_install_serves_a_model_that_another_dimension_of_the_mesh_splits(ctx):
    """torch's tensor parallelism over `tp` and FSDP2 over `dp`: two groups of ranks that each gather and reduce."""
    results = []
    for door in (False, True):
        torch.manual_seed(0)
        mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5)).to(ctx.device)
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for module in (model[0], model):
            fully_shard(module, mesh=mesh["dp"])
        if door:
            fsdp2.install(model)
        with counted() as calls:
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(mesh["dp"].get_local_rank()))
            model(x.to(ctx.device)).square().mean().backward()
        assert {name for name, _ in calls} == ({"all_gather", "reduce_scatter"} if door else set())
        results.append([parameter.grad.full_tensor() for parameter in model.parameters()])
    assert all(map(torch.equal, *results))


@pytest.mark.ranks(3)
def test_install_on_three_ranks_divides_as_it_is_told(ctx):
    """Against the gradients of the whole batch in fp64; 13, 7 and 5 rows are split unevenly."""
    for factor in (None, 4.0):
        model, modules = sharded(ctx)
        fsdp2.install(model)
        for module in modules:
            if factor:
                module.set_gradient_divide_factor(factor)
        x = [torch.randn(4, 6, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
        call, kinds = fsdp2.ReduceScatter.__call__, set()

        def spied(self, *tensors, group, op, call=call, kinds=kinds, **named):
            kinds.add(getattr(op, "op", op))
            return call(self, *tensors, group=group, op=op, **named)

        with mock.patch.object(fsdp2.ReduceScatter, "__call__", spied):
            model(x[ctx.rank].to(ctx.device)).square().sum().backward()
        assert kinds == {fsdp2.PREMUL_SUM if factor else fsdp2.AVG}
        whole = Net().double()
        y = whole.down(torch.relu(whole.mid(torch.relu(whole.up(torch.cat(x).double())))))
        (y + whole.frozen.float()(y.bfloat16().float()).bfloat16().double()).square().sum().backward()
        for name in ("up.weight", "mid.bias", "down.weight"):
            want = whole.get_parameter(name).grad / (factor or 3)
            got = model.get_parameter(name).grad.full_tensor().cpu().double()
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    ctx.check()


@pytest.mark.ranks(2)
def test_install_gathers_beside_what_the_program_does_where_it_is_asked_to(ctx):
    """`unshard(async_op=True)` before forward."""
    plain, _ = sharded(ctx)
    model, modules = sharded(ctx)
    fsdp2.install(model)
    want = trained(ctx, plain)
    waits = []
    wait = fsdp2._Gathered.wait
    with mock.patch.object(fsdp2._Gathered, "wait", lambda self, timeout=None: waits.append(self) or wait(self)):
        got = trained(ctx, model, lambda: [module.unshard(async_op=True) for module in modules])
    assert len(waits) >= 3 * STEPS
    assert torch.equal(got[0], want[0]) and all(map(torch.equal, got[1], want[1]))


@pytest.mark.ranks(2)
def test_install_is_undone_exactly_and_twice_is_once(ctx):
    model, modules = sharded(ctx)
    groups = [module._get_fsdp_state()._fsdp_param_group for module in modules]
    before = [(group._all_gather_comm, group._reduce_scatter_comm) for group in groups]
    undo = fsdp2.install(model)
    ours = [(group._all_gather_comm, group._reduce_scatter_comm) for group in groups]
    assert all(isinstance(each, fsdp2.AllGather) for each, _ in ours)
    with fsdp2.install(model):
        assert ours == [(group._all_gather_comm, group._reduce_scatter_comm) for group in groups]
    assert ours == [(group._all_gather_comm, group._reduce_scatter_comm) for group in groups]
    with counted() as calls:
        model(torch.ones(4, 6, device=ctx.device)).sum().backward()
        assert len(calls) > 0
        undo.close()
        assert before == [(group._all_gather_comm, group._reduce_scatter_comm) for group in groups]
        calls.clear()
        model(torch.ones(4, 6, device=ctx.device)).sum().backward()
        assert calls == []


@pytest.mark.ranks(2)
def test_install_leaves_sums_in_fp64_to_torch_and_says_so(ctx):
    results, said = [], []
    for door in (False, True):
        model, _ = sharded(ctx, dtype=torch.float64)
        if door:
            fsdp2.install(model)
        with mock.patch.object(fsdp2, "log_once", said.append):
            results.append(trained(ctx, model))
    (losses, whole), (other_losses, other_whole) = results
    assert torch.equal(losses, other_losses) and all(map(torch.equal, whole, other_whole))
    assert set(said) == {"FSDP2: RedOpType.SUM of torch.float64 stays torch's; tkernels sums fp32, fp16 and bf16"}


def test_log_once_says_a_thing_once(caplog):
    for text in ("a thing", "another", "a thing"):
        log_once(text)
    assert [record.getMessage() for record in caplog.records] == ["a thing", "another"]


@pytest.mark.ranks(2)
def test_install_refuses_what_fsdp2_does_not_shard(ctx):
    with pytest.raises(ValueError, match=r"^install: no module of this Net is sharded .* by FSDP2; call torch.distr"):
        fsdp2.install(Net())
    with pytest.raises(TypeError, match="^install: model=3 must be an nn.Module$"):
        fsdp2.install(3)
    model, modules = sharded(ctx)
    group = modules[0]._get_fsdp_state()._fsdp_param_group
    if ctx.rank == 1:
        group.device = torch.device("meta")
    with pytest.raises(ValueError, match="^install: the model is sharded on meta, but operations run on"):
        fsdp2.install(model)
    assert not isinstance(modules[2]._get_fsdp_state()._fsdp_param_group._all_gather_comm, fsdp2.AllGather)
    del group._all_gather_comm
    with pytest.raises(NotImplementedError, match="^install: FSDP2 of torch .* takes no other collectives in the way"):
        fsdp2.install(model)
