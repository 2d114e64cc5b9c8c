"""Times training steps under data-parallel systems: python -m bench.sharding [--ranks R] [--json PATH], from the root.

A Llama, a sequence a rank, AdamW (fused on GPUs), bf16 products, fp32 parameters: four wide blocks (--model wide), or
48 narrow ones (--model deep), whose steps are as long as the host needs for them, and of which fully_shard takes 8
together, 26 MB of fp32, as DDP does. A step is forward, backward, clipping and the update. Each system of ours stands
beside torch's of the same kind:

    parameters    fully_shard                          torch's fully_shard (FSDP2), and that over our collectives (door)
    optimizer     the same, strategy="optimizer"       DistributedDataParallel and ZeroRedundancyOptimizer
                  ZeroOptimizer (face)
    replicate     the same, strategy="replicate"       DistributedDataParallel
                  OverlappedDDP (face)
    float8        fully_shard, gathers in FP8          torch's fully_shard, over the same linears of FP8, one scale each

All begin with the same weights and see the same data; their losses are compared before a time is reported. One system
is in memory at a time, each several times in turns. peak_bytes: of torch's allocator in a step, parameters and states
included, beyond what was there before the system was made (torch's DistributedDataParallel leaves its buckets behind),
and of ours the symmetric memory of its context, which is its own. What NCCL allocates for itself is not included.

Exit code 0: all was measured. 1: losses differ, or a rank failed. 2: wrong arguments.
"""

import argparse
import contextlib
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from rich.table import Table
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import tkernels
from bench import steps
from bench.provenance import provenance
from tkernels.comm.context import Context
from tkernels.layers import (
    ColwiseParallel,
    OverlappedDDP,
    RowwiseParallel,
    SequenceParallel,
    ZeroOptimizer,
    fully_shard,
    parallelize_module,
)
from tkernels.layers.doors import fsdp2
from tkernels.timing import agree

ON_GPU = tkernels.RUNTIME == "nvshmem"


class Size(NamedTuple):
    """Of a model: features of a block and inside its MLP, heads of its attention, blocks, words of a sequence.

    together: blocks that one call of fully_shard names, of both kinds.
    """

    dim: int
    inner: int
    heads: int
    blocks: int
    length: int
    together: int


MODELS = {"wide": Size(4096, 14336, 32, 4, 4096, 1), "deep": Size(256, 768, 4, 48, 256, 8)}
if not ON_GPU:
    MODELS = {"wide": Size(32, 64, 4, 2, 8, 1), "deep": Size(16, 32, 2, 3, 8, 2)}
WARMUPS, ROUNDS = (3, 3) if ON_GPU else (1, 1)
LOSS_ERROR = 0.02  # relative, after the steps of the warm-up: bf16 products, sums in different orders


class Block(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        dim, inner, self.heads = size.dim, size.inner, size.heads
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(2))
        self.qkv, self.o = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.gate_up, self.down = nn.Linear(dim, 2 * inner, bias=False), nn.Linear(inner, dim, bias=False)

    def forward(self, x):
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        y = F.scaled_dot_product_attention(*heads.unbind(2), is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


ADAMW = {"lr": 1e-4, "fused": ON_GPU}


class Trained:
    """A model and its optimizer under one system. step(): forward, backward, clipping, update; returns the loss."""

    def __init__(self, ctx: Context, size: Size, build: Callable):
        torch.manual_seed(0)
        self.device = ctx.device
        with ctx.device:  # nine models' weights are more than a host should draw
            model = nn.Sequential(*(Block(size) for _ in range(size.blocks)))
        self.model, self.optimizer = build(ctx, model, size.together)
        self.clip = not isinstance(self.optimizer, ZeroOptimizer)  # which clips by itself
        generator = torch.Generator(ctx.device).manual_seed(ctx.rank)
        self.x, self.y = torch.randn((2, 1, size.length, size.dim), generator=generator, device=ctx.device)

    def step(self) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = F.mse_loss(self.model(self.x).float(), self.y)
        loss.backward()
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def _sharded(shard: Callable, after: Callable = lambda model: None) -> Callable:
    def build(ctx, model, together):
        mesh = init_device_mesh(ctx.device.type, (ctx.size, 1), mesh_dim_names=("dp", "tp"))["dp"]
        policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for first in range(0, len(model), together):
            shard(list(model[first : first + together]), mesh=mesh, mp_policy=policy)
        shard(model, mesh=mesh, mp_policy=policy)
        after(model)
        return model, torch.optim.AdamW(model.parameters(), **ADAMW)

    return build


def _in_float8(shard: Callable, recipe: str) -> Callable:
    """Of linears that multiply in FP8, each whole, over one tensor-parallel rank."""

    def build(ctx, model, together):
        alone = init_device_mesh(ctx.device.type, (ctx.size, 1), mesh_dim_names=("dp", "tp"))["tp"]
        plan = dict.fromkeys(("*.qkv", "*.gate_up"), ColwiseParallel(float8=recipe))
        plan |= dict.fromkeys(("*.o", "*.down"), RowwiseParallel(float8=recipe))
        plan["*.norms.*"] = SequenceParallel(use_local_output=True)  # so that torch's norm finds one mesh
        return _sharded(shard)(ctx, parallelize_module(model, alone, plan), together)

    return build


def _replicated(ctx, model, _):
    model = OverlappedDDP(model, mesh=ctx)
    return model, torch.optim.AdamW(model.parameters(), **ADAMW)


def _zero(ctx, model, _):
    return model, ZeroOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW, max_norm=1.0, mesh=ctx)


def _torchs_ddp(optimizer: Callable) -> Callable:
    def build(ctx, model, _):
        ids = [ctx.device.index] if ON_GPU else None
        model = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
        return model, optimizer(model.parameters(), **ADAMW)

    return build


SYSTEMS = {
    "parameters": {
        "ours": _sharded(fully_shard),
        "torch": _sharded(fsdp.fully_shard),
        "door": _sharded(fsdp.fully_shard, fsdp2.install),
    },
    "optimizer": {
        "ours": _sharded(functools.partial(fully_shard, strategy="optimizer")),
        "torch": _torchs_ddp(functools.partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW)),
        "face": _zero,
    },
    "replicate": {
        "ours": _sharded(functools.partial(fully_shard, strategy="replicate")),
        "torch": _torchs_ddp(torch.optim.AdamW),
        "face": _replicated,
    },
    "float8": {
        "ours": _in_float8(fully_shard, "tensorwise_with_fp8_gather"),
        "torch": _in_float8(fsdp.fully_shard, "tensorwise"),
    },
}


def measure_kind(ctx: Context, kind: str, size: Size, iterations: int) -> dict:
    """Collective. The record of one kind of system, or {"op", "shape", "refused"}."""
    samples, losses, peaks, hosts = {}, {}, {}, {}
    for _ in range(ROUNDS):
        for name, build in SYSTEMS[kind].items():
            with _alone(ctx) as own:
                before = torch.cuda.memory_allocated() if ON_GPU else 0
                trained = Trained(own, size, build)
                for _ in range(WARMUPS):
                    losses[name] = trained.step()
                losses[name] = losses[name].item()
                took = []
                if ON_GPU:
                    torch.cuda.reset_peak_memory_stats()
                for _ in range(iterations):
                    ctx.group.barrier()
                    began = time.perf_counter()
                    loss = trained.step()
                    hosts.setdefault(name, []).append((time.perf_counter() - began) * 1e6)
                    loss.item()
                    took.append((time.perf_counter() - began) * 1e6)
                taken = 0 if name == "torch" else own.heap.held_bytes
                peak = torch.cuda.max_memory_allocated() - before + taken if ON_GPU else 0
                peaks[name] = max(peak, peaks.get(name, 0))
                samples.setdefault(name, []).extend(took)
                del trained, loss
    head = {"op": "sharding", "shape": kind, "layout": "TN"}
    off = [name for name in losses if not abs(losses[name] / losses["torch"] - 1) <= LOSS_ERROR]
    if reason := agree(ctx, f"losses differ: {losses}" if off else None):
        return {**head, "refused": reason}
    everyones = ctx.group.gather((samples, peaks, hosts))
    line = head | {"M": size.length * ctx.size, "N": size.inner, "K": size.dim, "ranks": ctx.size, "dtype": "bfloat16"}
    line |= {"blocks": size.blocks, "runtime": ctx.runtime, "transport": ctx.transport}
    line["iterations"] = iterations * ROUNDS
    for name in samples:
        slowest = sorted(max(of_rank) for of_rank in zip(*(theirs[0][name] for theirs in everyones), strict=True))
        line |= {
            f"{name}_us": round(statistics.median(slowest), 1),
            f"{name}_p10_us": round(slowest[len(slowest) // 10], 1),
            f"{name}_p90_us": round(slowest[-1 - len(slowest) // 10], 1),
            f"{name}_host_us": round(max(statistics.median(theirs[2][name]) for theirs in everyones), 1),
            f"{name}_peak_bytes": max(theirs[1][name] for theirs in everyones) if ON_GPU else None,
        }
    return line | {"speedup_over_torch": line["torch_us"] / line["ours_us"]} | provenance(ctx)


@contextlib.contextmanager
def _alone(ctx: Context):
    """A context over the same ranks, for what is made inside, which is gone after it."""
    with tkernels.init(ctx.group.process_group, transport=ctx.transport) as own:
        yield own
        gc.collect()
    if ON_GPU:
        torch.empty(1, device=ctx.device)  # what streams have just let go of is freed by the next allocation
        torch.cuda.empty_cache()


def table(lines: list[dict]) -> Table:
    first = lines[0]
    return steps.table(f"training steps, {first['blocks']} blocks of {first['K']}", lines, _labels)


def _labels(line: dict) -> dict[str, str]:
    return {name: name for name in SYSTEMS[line["shape"]]}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = steps.parser_of("sharding", __doc__, iterations=10)
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="with commas between them (default: all)")
    parser.add_argument("--model", default="wide", choices=MODELS, help="wide or deep (default: wide)")
    args = parser.parse_args(argv)
    steps.check(parser, args)
    args.systems = args.systems.split(",")
    if unknown := [kind for kind in args.systems if kind not in SYSTEMS]:
        parser.error(f"--systems {unknown[0]}: there are {', '.join(SYSTEMS)}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    size = MODELS[args.model]
    return steps.run(args, {kind: (measure_kind, kind, size, args.iterations) for kind in args.systems}, table)


if __name__ == "__main__":
    sys.exit(main())
