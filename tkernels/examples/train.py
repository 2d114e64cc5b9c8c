"""Train a small Llama, tensor-parallel times fully sharded, with checkpoints that any mesh resumes.

    torchrun --nproc-per-node 4 -m tkernels.examples.train --tp 2 --steps 40 --checkpoints runs/llama
    torchrun --nproc-per-node 2 -m tkernels.examples.train --tp 1 --steps 80 --checkpoints runs/llama    # goes on

On GPUs, or else on the CPU. With torch's own in place of the names from tkernels it trains the same.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

from tkernels.layers import ColwiseParallel, RowwiseParallel, SequenceParallel, fully_shard, parallelize_module

DIM, HEADS, KV_HEADS, LAYERS, VOCABULARY, LENGTH = 64, 8, 4, 2, 256, 32


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(DIM, DIM * KV_HEADS // HEADS, bias=False) for _ in range(2))

    def forward(self, x):  # [batch, length, DIM]; heads are counted by the tensors: each rank has its own
        q, k, v = (y.unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for y in (self.wq(x), self.wk(x), self.wv(x)))
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))


def rotate(x):
    """Rotary position embedding of x [batch, heads, length, head_dim]."""
    frequencies = 10000.0 ** -(torch.arange(0, x.shape[-1], 2, device=x.device) / x.shape[-1])
    angles = torch.outer(torch.arange(x.shape[2], device=x.device), frequencies)
    turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(DIM), Attention()
        self.ffn_norm, self.w2 = nn.RMSNorm(DIM), nn.Linear(3 * DIM, DIM, bias=False)
        self.w1, self.w3 = (nn.Linear(DIM, 3 * DIM, bias=False) for _ in range(2))

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        y = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.output = nn.RMSNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


# Between the layers each tensor-parallel rank has its part of the sequence, dimension 1.
PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.*_norm": SequenceParallel(),
    "layers.*.attention.w[qkv]": ColwiseParallel(input_layouts=Shard(1)),
    "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.w[13]": ColwiseParallel(input_layouts=Shard(1)),
    "layers.*.w2": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def build(mesh, device):
    """The model on `mesh`, made on the meta device: no rank ever holds it whole."""
    with torch.device("meta"):
        model = Llama()
    parallelize_module(model, mesh["tp"], PLAN)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    model.to_empty(device=device)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        nn.init.ones_(parameter) if "norm" in name else nn.init.normal_(parameter, std=0.05)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def batch(step, size, mesh, device):
    """Tokens and targets of this data-parallel rank; those of all ranks depend on the step alone."""
    text = torch.tensor(list(Path(__file__).read_bytes()))  # the text is this file
    starts = torch.randint(len(text) - LENGTH, (size, 1), generator=torch.Generator().manual_seed(step))
    rows = text[starts + torch.arange(LENGTH + 1)].chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()].to(device)
    return rows[:, :-1], rows[:, 1:]


def states_of(model, optimizer, step):
    """What a checkpoint holds, with the names of the model's parameters; loading writes into it."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks; the others are data-parallel")
    parser.add_argument("--steps", type=int, default=40, help="in all, those of earlier runs included")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step, of all ranks")
    parser.add_argument("--every", type=int, default=10, help="steps from one printed line to the next")
    parser.add_argument("--checkpoints", type=Path, help="folder to go on from, and to save to at the end")
    args = parser.parse_args()
    dist.init_process_group()
    kind = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    mesh = init_device_mesh(kind, (dist.get_world_size() // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    device = torch.device(kind, dist.get_node_local_rank() if kind != "cpu" else 0)
    model, optimizer = build(mesh, device)
    done = 0
    if args.checkpoints and args.checkpoints.exists():
        states = states_of(model, optimizer, done)
        dcp.load(states, checkpoint_id=args.checkpoints)
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        done = states["step"]
    for step in range(done, args.steps):
        tokens, targets = batch(step, args.batch, mesh, device)
        loss = F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_(), group=mesh.get_group("dp"))
        if dist.get_rank() == 0 and (step + 1) % args.every == 0:
            print(f"step {step + 1}: loss {loss.item() / mesh['dp'].size():.4f}, gradient norm {norm.item():.3f}")
    if args.checkpoints:
        dcp.save(states_of(model, optimizer, args.steps), checkpoint_id=args.checkpoints)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
