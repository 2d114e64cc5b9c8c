"""Wires: the same sums and parts by every backend, even or not, in place, and on two levels."""

import re
import warnings

import pytest
import torch

from tkernels.comm import as_context, current_context
from tkernels.layers.data_parallel.wire import check_backend, open_wire
from tkernels.testing.compare import integers

BACKENDS = ["tkernels", "torch"]
ROWS = {"equal": None, "uneven": [5, 0, 30, 1], "all on the last": [0, 0, 0, 36]}


def of_rank(ctx, rank):
    return integers((36,), torch.float32, rank, device=ctx.device)


def rows_of(ctx, kind):
    """For any number of ranks: None, or counts that sum up to 36."""
    if ROWS[kind] is None:
        return None
    *_, last = rows = ROWS[kind][-ctx.size :]
    return (*rows[:-1], last + 36 - sum(rows))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ROWS)
def test_sums_and_parts_are_exact_and_in_place(ctx, backend, kind):
    wire, rows = open_wire("test", backend, ctx), rows_of(ctx, kind)
    total = sum(of_rank(ctx, rank) for rank in range(ctx.size))
    x = of_rank(ctx, ctx.rank)
    wire.all_reduce(x)
    assert torch.equal(x, total)

    x = of_rank(ctx, ctx.rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # torch's of names that it has changed
        own = wire.reduce_scatter(x, rows)
    assert torch.equal(own, wire.part(total, rows))
    assert own.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()

    x = torch.zeros_like(total)
    wire.part(x, rows).copy_(wire.part(total, rows))
    wire.all_gather(x, rows)
    assert torch.equal(x, total)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_levels_are_neighbours_and_those_of_one_place(ctx, backend):
    if ctx.rank == 3:  # as where a pipeline's ends have one for themselves
        torch.distributed.new_group([3], use_local_synchronization=True)
    inside, across = open_wire("test", backend, ctx).split(2)
    assert current_context().name == ctx.name
    assert inside.group.gather(ctx.rank) == [ctx.rank // 2 * 2, ctx.rank // 2 * 2 + 1]
    assert across.group.gather(ctx.rank) == [ctx.rank % 2, ctx.rank % 2 + 2]
    x = of_rank(ctx, ctx.rank)
    own = inside.reduce_scatter(x)
    across.all_reduce(own)
    inside.all_gather(x)
    assert torch.equal(x, sum(of_rank(ctx, rank) for rank in range(4)))
    for level, again in zip((inside, across), open_wire("test", backend, ctx).split(2), strict=True):
        assert again.group.process_group is level.group.process_group
        assert backend == "torch" or (again.ctx is level.ctx and level.ctx.timeout_s == ctx.timeout_s)


@pytest.mark.ranks(2)
def test_a_backend_takes_what_it_can_use(ctx):
    assert open_wire("test", "tkernels").ctx is current_context()
    wire = open_wire("test", "torch", ctx.group.process_group)
    assert (wire.rank, wire.size) == (ctx.rank, ctx.size)
    assert open_wire("test", wire) is wire
    assert open_wire("test", "tkernels", ctx.group.process_group).ctx is as_context(ctx.group.process_group)
    for backend in BACKENDS:
        with pytest.raises(TypeError, match="^test: mesh: takes a Context, a ProcessGroup or a DeviceMesh .*, not int"):
            open_wire("test", backend, 2)
    with pytest.raises(ValueError, match="test: backend='nccl' is unknown; use 'tkernels' or 'torch'"):
        check_backend("test", "nccl")


@pytest.mark.ranks(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_rank_has_it_all(ctx, backend):
    wire, x = open_wire("test", backend, ctx), of_rank(ctx, 0)
    wire.all_reduce(x)
    assert wire.reduce_scatter(x).data_ptr() == x.data_ptr()
    wire.all_gather(x)
    assert torch.equal(x, of_rank(ctx, 0))


def test_collectives_that_torch_renames_are_called_by_the_names_that_fit(checkout):
    old = re.compile(r"\b(all_gather_into|reduce_scatter)_tensor\b")
    files = [file for folder in ("comm", "tkernels", "layers", "bench") for file in (checkout / folder).rglob("*.py")]
    assert {file.name for file in files if old.search(file.read_text())} == {"group.py"}
