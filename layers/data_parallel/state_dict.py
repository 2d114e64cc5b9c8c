"""State dicts of models with parallel layers: as shards, full, and for torch.distributed.checkpoint.

Where all parts are DTensors, torch's own functions do all of this; these serve layers with Megatron's marks too.
`model.state_dict()` and `model.load_state_dict()` work on this rank's shards. The full model has the keys and shapes of
the same model with nn.Linear and without FullyShard, so a state dict of one loads into the other:

    gather_state_dict(model)          shards -> full tensors, on the CPU
    load_full_state_dict(model, full) full tensors -> shards
    sharded_state_dict(model)         shards that carry their place in the full tensor; a checkpoint that
                                      torch.distributed.checkpoint writes of it loads on any number of ranks
"""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tkernels.comm.arguments import check_flags, check_tensors, check_type
from tkernels.layers.data_parallel.fsdp import FullyShard
from tkernels.layers.tensor_parallel.linear import ParallelLinear


def _full_key(model: nn.Module) -> Callable[[str], str]:
    """What a key of model.state_dict() is in the full model: without the "module." of every FullyShard."""
    faces = [path for path, part in model.named_modules() if isinstance(part, FullyShard)]
    inside = [f"{path}.module.".removeprefix(".") for path in faces]

    def full_key(key: str) -> str:
        for prefix in reversed(inside):  # the innermost first, so that the others still are prefixes
            if key.startswith(prefix):
                key = prefix.removesuffix("module.") + key.removeprefix(prefix)
        return key

    return full_key


def _partitioned(model: nn.Module) -> dict[str, tuple[ParallelLinear, int]]:
    """Key of model.state_dict() -> (the parallel layer that holds a part of it, the dimension that is split)."""
    check_type("model", model, nn.Module, "an nn.Module")
    return {
        f"{path}.{name}".removeprefix("."): (layer, dim)
        for path, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, ParallelLinear)
        for name, dim in layer.partitioned().items()
        if getattr(layer, name) is not None
    }


def gather_state_dict(model: nn.Module, *, rank0_only: bool = False) -> dict:
    """Collective. The state dict of the full model, its tensors on the CPU.

    rank0_only: the other ranks get an empty dict, and hold at most one full tensor at a time.
    """
    check_flags("gather_state_dict", rank0_only=rank0_only)
    partitioned, full_key, state, full = _partitioned(model), _full_key(model), model.state_dict(), {}
    places = [layer.ctx.rank for layer, _ in partitioned.values()]
    for value in state.values():
        if isinstance(value, DTensor):
            places += value.device_mesh.get_coordinate()
    for key, value in state.items():
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if isinstance(value, torch.Tensor):
            value = value.detach().to("cpu", copy=True)  # a snapshot, even if the model is on the CPU
        if key in partitioned:
            layer, dim = partitioned[key]
            value = layer.join(layer.ctx.group.gather(value), dim)
        if not (rank0_only and any(places)):
            full[full_key(key)] = value
    return full


def load_full_state_dict(model: nn.Module, full: Mapping[str, torch.Tensor], *, strict: bool = True):
    """Load a state dict of the full model; each rank takes its parts. Not collective; every rank passes `full`.

    Tensors that are mapped from a file (torch.load(..., mmap=True)) are read only where this rank needs them. strict
    and the result are those of load_state_dict. Raises ValueError for a tensor that isn't a full one.
    """
    partitioned, full_key = _partitioned(model), _full_key(model)
    check_type("load_full_state_dict: full", full, Mapping, "a dict of full tensors")
    check_flags("load_full_state_dict", strict=strict)
    shards = dict(full)
    for key, own in model.state_dict().items():
        if full_key(key) not in full:
            continue
        value = shards.pop(full_key(key))
        if key in partitioned:
            check_tensors("load_full_state_dict", **{key: value})
            layer, dim = partitioned[key]
            found, features = tuple(value.shape), sum(layer.feature_sizes)
            if found[dim : dim + 1] != (features,):
                raise ValueError(
                    f"load_full_state_dict: {key} is {found}, but the full tensor has {features} along dimension "
                    f"{dim}; load a state dict of shards with model.load_state_dict"
                )
            value = layer.shard(value, dim)
        if isinstance(own, DTensor) and not isinstance(value, DTensor):
            value = _part_of(full_key(key), value, own)
        shards[key] = value
    return model.load_state_dict(shards, strict=strict)


def _part_of(key: str, value: torch.Tensor, own: DTensor) -> DTensor:
    """This rank's part of a full tensor, placed as `own`."""
    check_tensors("load_full_state_dict", **{key: value})
    if value.shape != own.shape:
        raise ValueError(f"load_full_state_dict: {key} is {tuple(value.shape)}, but the tensor is {tuple(own.shape)}")
    sizes, starts = compute_local_shape_and_global_offset(own.shape, own.device_mesh, own.placements)
    local = value[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]
    local = local.to(own.device, own.dtype)
    return DTensor.from_local(
        local, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
    )


def sharded_state_dict(model: nn.Module) -> dict:
    """Collective. A state dict for torch.distributed.checkpoint, whose tensors share memory with the model's.

        checkpoint.save(sharded_state_dict(model), checkpoint_id=folder)
        checkpoint.load(sharded_state_dict(model), checkpoint_id=folder)  # into the model; no load_state_dict needed

    What Megatron's marks alone say is split is returned as ShardedTensors, which may be uneven and have several pieces
    per rank; the rest is returned as it is, DTensors too. A checkpoint of the same model with nn.Linear, or without
    FullyShard, loads too, and the other way round. checkpoint.async_save needs async_stager=BlockingAsyncStager(), of
    torch.distributed.checkpoint.staging: torch's default stager refuses ShardedTensors. Raises ValueError for parallel
    layers whose parts are plain tensors inside `fully_shard`, if both have several ranks.
    """
    partitioned, full_key = _partitioned(model), _full_key(model)
    return {
        full_key(key): _sharded_tensor(key, value, *partitioned[key]) if key in partitioned else value
        for key, value in model.state_dict().items()
    }


def _sharded_tensor(key: str, value: torch.Tensor, layer: ParallelLinear, dim: int):
    """This rank's part of a parameter, with its place in the full one; with one rank, `value` itself."""
    group = layer.ctx.group
    if group.size == 1:
        return value
    if isinstance(value, DTensor) and value.device_mesh.size() == 1:
        value = value.to_local()
    if isinstance(value, DTensor):
        raise ValueError(
            f"sharded_state_dict: {key} is split by {type(layer).__name__}, and each part again by fully_shard, whose "
            f"ranks know nothing of the other parts; use gather_state_dict and load_full_state_dict, or split the "
            f"layer by parallelize_module, into DTensors"
        )
    features, blocks = sum(layer.feature_sizes), value.tensor_split(layer.partition_stride, dim)
    first = sum(layer.feature_sizes[: group.rank]) // layer.partition_stride
    shards = []
    for index, block in enumerate(blocks):
        offsets = [0] * value.dim()
        offsets[dim] = index * (features // layer.partition_stride) + first
        shards.append(Shard.from_tensor_and_offsets(block, offsets, dist.get_rank()))
    size = list(value.shape)
    size[dim] = features
    return init_from_local_shards(shards, size, process_group=group.process_group)
