"""State dicts of models with parallel layers or FullyShard: as shards, full, and for torch.distributed.checkpoint.

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
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards

from tkernels.comm.arguments import check_tensors, check_type
from tkernels.layers.data_parallel.fsdp import FullyShard
from tkernels.layers.tensor_parallel.linear import ParallelLinear


def _fully_sharded(model: nn.Module) -> dict[str, FullyShard]:
    """Prefix of state dict keys -> the FullyShard whose keys begin with it."""
    return {
        f"{path}.".removeprefix("."): part
        for path, part in model.named_modules(remove_duplicate=False)
        if isinstance(part, FullyShard)
    }


def _partitioned(model: nn.Module) -> dict[str, tuple[ParallelLinear, int]]:
    """Key of the full model -> (the parallel layer that holds a part of it, the dimension that is split)."""
    check_type("model", model, nn.Module, "an nn.Module")
    partitioned = {
        f"{path}.{name}".removeprefix("."): (layer, dim)
        for path, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, ParallelLinear)
        for name, dim in layer.partitioned().items()
        if getattr(layer, name) is not None
    }
    for prefix in _fully_sharded(model):  # the full model's keys lack the "module." of FullyShard
        inside = f"{prefix}module."
        partitioned = {
            prefix + key.removeprefix(inside) if key.startswith(inside) else key: place
            for key, place in partitioned.items()
        }
    return partitioned


def _state(model: nn.Module, of: Callable[[FullyShard], dict]) -> dict:
    """model.state_dict() with the full model's keys: `of(sharded)` replaces the entries of each FullyShard."""
    state = model.state_dict()
    for prefix, sharded in _fully_sharded(model).items():
        state = {key: value for key, value in state.items() if not key.startswith(prefix)}
        state |= {prefix + key: value for key, value in of(sharded).items()}
    return state


def gather_state_dict(model: nn.Module, *, rank0_only: bool = False) -> dict:
    """Collective. The state dict of the full model, its tensors on the CPU.

    rank0_only: the other ranks get an empty dict, and hold at most one full tensor, or unit, at a time.
    """
    partitioned = _partitioned(model)
    contexts = [layer.ctx for layer, _ in partitioned.values()]
    contexts += [sharded.ctx for sharded in _fully_sharded(model).values()]
    wanted = not rank0_only or all(ctx.rank == 0 for ctx in contexts)
    full = {}
    for key, value in _state(model, lambda sharded: sharded.gather_state_dict(rank0_only=rank0_only)).items():
        if isinstance(value, torch.Tensor):
            value = value.detach().to("cpu", copy=True)  # a snapshot, even if the model is on the CPU
        if key in partitioned:
            layer, dim = partitioned[key]
            value = layer.unshard(layer.ctx.group.gather(value), dim)
        if wanted:
            full[key] = value
    return full


def load_full_state_dict(model: nn.Module, full: Mapping[str, torch.Tensor], *, strict: bool = True):
    """Load a state dict of the full model; each rank takes its parts. Not collective; every rank passes `full`.

    Tensors that are mapped from a file (torch.load(..., mmap=True)) are read only where this rank needs them, except by
    a FullyShard, which reads whole tensors. strict and the result are those of load_state_dict. Raises ValueError for a
    tensor that isn't a full one, and, whatever strict is, for missing or unknown entries of a FullyShard.
    """
    shards = dict(full)
    for key, (layer, dim) in _partitioned(model).items():
        if key not in shards:
            continue
        check_tensors("load_full_state_dict", **{key: shards[key]})
        found, features = tuple(shards[key].shape), sum(layer.feature_sizes)
        if found[dim : dim + 1] != (features,):
            raise ValueError(
                f"load_full_state_dict: {key} is {found}, but the full tensor has {features} along dimension {dim}; "
                f"load a state dict of shards with model.load_state_dict"
            )
        shards[key] = layer.shard(shards[key], dim)
    for prefix, sharded in _fully_sharded(model).items():
        own = {key: value for key, value in shards.items() if key.startswith(prefix)}
        sharded.load_full_state_dict({key.removeprefix(prefix): value for key, value in own.items()})
        loaded = {prefix + key: value for key, value in sharded.state_dict().items()}
        shards = {key: value for key, value in shards.items() if key not in own} | loaded
    return model.load_state_dict(shards, strict=strict)


def sharded_state_dict(model: nn.Module) -> dict:
    """Collective. A state dict for torch.distributed.checkpoint, whose tensors share memory with the model's.

        checkpoint.save(sharded_state_dict(model), checkpoint_id=folder)
        checkpoint.load(sharded_state_dict(model), checkpoint_id=folder)  # into the model; no load_state_dict needed

    Split tensors are returned as ShardedTensors, which, unlike DTensors, may be uneven and have several pieces per
    rank; the rest is returned as it is. A checkpoint of the same model with nn.Linear, or without FullyShard, loads
    too, and the other way round. Raises ValueError for parallel layers inside a FullyShard, if both have several ranks.
    """
    partitioned = _partitioned(model)
    return {
        key: _sharded_tensor(key, value, *partitioned[key]) if key in partitioned else value
        for key, value in _state(model, FullyShard.sharded_state_dict).items()
    }


def _sharded_tensor(key: str, value: torch.Tensor, layer: ParallelLinear, dim: int):
    """This rank's part of a parameter, with its place in the full one; with one rank, `value` itself."""
    group = layer.ctx.group
    if group.size == 1:
        return value
    if isinstance(value, ShardedTensor):
        raise ValueError(
            f"sharded_state_dict: {key} is split by {type(layer).__name__}, and each part again by FullyShard, whose "
            f"ranks know nothing of the other parts; use gather_state_dict and load_full_state_dict"
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
