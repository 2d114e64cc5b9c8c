"""Pipelines: schedules that balance and cannot deadlock, and training to the losses of the model that is not split."""

import itertools
from collections import defaultdict, deque

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tkernels
from tkernels.demo.model import ModelConfig, Transformer
from tkernels.layers.p2p import ISSUE_ORDER, P2PCommunicator, deallocate_output_tensor
from tkernels.layers.pipeline import Step, forward_backward_pipelining, schedule, split_into_stages

BACKENDS = ["nvshmem", "gloo"] if tkernels.RUNTIME == "simulated" else ["nvshmem", "nccl"]
PLANS = [
    (size, chunks, count)
    for size, chunks, count in itertools.product((1, 2, 3, 4, 5), (1, 2, 3), (1, 2, 3, 4, 6, 8, 12))
    if chunks == 1 or (size > 1 and count % size == 0)
]
CONFIG = ModelConfig(vocabulary=11, sequence=6, batch=2, heads=2, head_features=4, layers=8)


# The model, in stages


class Embedding(nn.Module):
    def __init__(self, model: Transformer):
        super().__init__()
        self.tokens, self.positions = model.embedding, model.positions

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(len(tokens), device=tokens.device)
        return self.tokens(tokens) + self.positions(positions)[:, None]


def build(config=CONFIG, seed=0):
    torch.manual_seed(seed)
    return Transformer(config)


def stages_of(model, rank, size, num_chunks):
    head = nn.Sequential(model.norm, model.head)
    return split_into_stages(Embedding(model), model.blocks, head, rank=rank, size=size, num_chunks=num_chunks)


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(config, count, step, device, lengths=None):
    """`count` microbatches (tokens, next tokens), each [s, b]; lengths: of each, where they differ."""
    generator = torch.Generator().manual_seed(step)
    made = []
    for number in range(count):
        length = lengths[number] if lengths else config.sequence
        tokens = torch.randint(0, config.vocabulary, (length + 1, config.batch), generator=generator).to(device)
        made.append((tokens[:-1].clone(), tokens[1:].clone()))
    return made


def unsplit_losses(count, steps, device, **options):
    """[steps][microbatches] of the model as a whole, one microbatch after the other."""
    model = build().to(device)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(steps):
        losses.append([])
        for tokens, targets in batches(CONFIG, count, step, device, **options):
            loss = loss_of(model(tokens, torch.arange(len(tokens), device=device)), targets)
            (loss / count).backward()
            losses[-1].append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return torch.tensor(losses)


def pipeline_losses(ctx, comm, num_chunks, count, steps, lengths=None, shape=None, **options):
    """Collective. The same of the pipeline, on every rank."""
    chunks = stages_of(build().to(comm.device), comm.rank, comm.size, num_chunks)
    optimizer, losses = torch.optim.SGD(chunks.parameters(), lr=0.5), []
    for step in range(steps):
        data = batches(CONFIG, count, step, comm.device, lengths)
        losses.append(forward_backward_pipelining(chunks, data, loss_of, comm, tensor_shape=shape, **options))
        optimizer.step()
        optimizer.zero_grad()
    assert comm.open_handles == [] and set(comm.num_in_flight.values()) == {0}
    return torch.tensor([[loss.item() for loss in row] for row in ctx.group.gather(losses)[-1]])


SHAPE = (CONFIG.sequence, CONFIG.batch, CONFIG.features)


@pytest.mark.ranks(2, 4, timeout_s=100)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_a_pipeline_trains_to_the_losses_of_the_model_that_is_not_split(ctx, backend, num_chunks):
    """The same products of the same numbers, and gradients summed in the order of microbatches: equal, not close."""
    if ctx.size * num_chunks > CONFIG.layers:
        pytest.skip("fewer blocks than parts")
    count, steps = 4, 2
    with sdpa_kernel(SDPBackend.MATH):
        comm = P2PCommunicator(ctx, backend=backend, slot_bytes=4096)
        want = unsplit_losses(count, steps, comm.device)
        for overlap, deallocate in itertools.product((False, True), repeat=2):
            options = {"overlap": overlap, "deallocate": deallocate, "shape": SHAPE}
            got = pipeline_losses(ctx, comm, num_chunks, count, steps, **options)
            assert torch.equal(got, want), (options, got, want)
        comm.close()
