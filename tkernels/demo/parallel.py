"""The ways to split the demo's training over ranks, one class each; `KINDS` has them by name.

            a rank has                         it sends                           overlapped with
    tp      positions; heads and features      activations, in the linear layers  the GEMMs of the same layers
    pp      blocks                             activations, and their gradients   the next microbatch
    fsdp    sequences, parts of parameters     parameters, and their gradients    the blocks before and after
    zero    sequences, parts of the optimizer  gradients, and parameters          backward; forward
    ddp     sequences                          gradients                          backward

On GPUs a collective on one stream can block a collective on another. Each class therefore sums the losses at a point
where its own stream has waited for all other communication.
"""

import torch
from torch import nn
from torch.nn import functional as F

import tkernels
from tkernels.comm.regions import round_up
from tkernels.demo import training
from tkernels.demo.model import Block, Transformer, shard
from tkernels.demo.operations import CountingCommunicator
from tkernels.demo.training import Optimizer, Parallel, loss_part
from tkernels.layers import all_reduce_sequence_parallel_grads
from tkernels.layers.data_parallel.ddp import OverlappedDDP
from tkernels.layers.data_parallel.fully_shard import fully_shard
from tkernels.layers.data_parallel.zero import ZeroOptimizer
from tkernels.layers.pipeline.run import forward_backward_pipelining, split_into_stages

BUCKET_ELEMENTS = 1 << 15  # of a bucket: about a quarter of the model's gradients
MICROBATCH = 2  # sequences


class TensorParallel(Parallel):
    """Tensor and sequence parallel: linear layers split by heads and features, the rest by positions."""

    name = "tp"

    @staticmethod
    def sizes(ranks):
        return {"sequence": round_up(training.SEQUENCE, ranks), "heads": round_up(training.HEADS, ranks)}

    def __init__(self, *arguments):
        super().__init__(*arguments)
        R, positions, heads = self.ctx.size, self.config.sequence, self.config.heads
        self.share = f"{positions // R} of {positions} positions and {heads // R} of {heads} heads"
        shard(self.model, self.ctx)
        self.optimizer = Optimizer(self.model.named_parameters(), self.loss_scale)

    def step(self, tokens, targets):
        tokens, targets = (part.chunk(self.ctx.size)[self.ctx.rank] for part in (tokens, targets))
        loss = loss_part(self.model, self.config, tokens, targets, first_position=self.ctx.rank * len(tokens))
        (loss * self.loss_scale).backward()
        all_reduce_sequence_parallel_grads(self.model, mesh=self.ctx)
        loss = tkernels.all_reduce(loss.detach()[None], ctx=self.ctx)
        self.optimizer.step()
        return loss


class PipelineParallel(Parallel):
    """Pipeline parallel, 1F1B: stages with equally many blocks; the first adds the embeddings, the last the head."""

    name = "pp"

    @staticmethod
    def sizes(ranks):
        return {"layers": max(training.LAYERS, ranks)}

    def __init__(self, model, *arguments):
        super().__init__(model, *arguments)
        names = {parameter: name for name, parameter in model.named_parameters()}
        embedding, head = _Embeddings(model), nn.Sequential(model.norm, model.head)
        self.model = split_into_stages(embedding, model.blocks, head, model=model, mesh=self.ctx)
        own = sum(isinstance(part, Block) for part in self.model[0].parts)
        microbatches = self.config.batch // MICROBATCH
        self.share = f"{own} of {self.config.layers} blocks; {microbatches} microbatches a step"
        self.optimizer = Optimizer(((names[each], each) for each in self.model.parameters()), self.loss_scale)
        self.comm = CountingCommunicator(self.ctx, dtype=model.head.weight.dtype)
        self.messages = self.comm.sent

    def step(self, tokens, targets):
        losses = forward_backward_pipelining(
            self.model,
            list(zip(tokens.split(MICROBATCH, dim=1), targets.split(MICROBATCH, dim=1), strict=True)),
            self._scaled_loss,
            self.comm,
            tensor_shape=(self.config.sequence, MICROBATCH, self.config.features),
            overlap=True,
            deallocate=True,
        )
        self.optimizer.step()
        # Only the last stage has losses.
        loss = torch.stack(losses).mean() / self.loss_scale if losses else torch.zeros((), device=self.ctx.device)
        return tkernels.all_reduce(loss[None], ctx=self.ctx)

    def _scaled_loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()) * self.loss_scale

    def gradients(self):
        return self.optimizer.gradients()  # of the stage's own parameters

    def close(self):
        self.comm.close()


class _Embeddings(nn.Module):
    def __init__(self, model: Transformer):
        super().__init__()
        self.tokens, self.positions = model.embedding, model.positions

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tokens(tokens) + self.positions(torch.arange(len(tokens), device=tokens.device))[:, None]


class _SequencesApart(Parallel):
    """Base class of data-parallel ways: every rank has a share of a batch's sequences."""

    @staticmethod
    def sizes(ranks):
        return {"batch": round_up(training.BATCH, ranks)}

    def loss_part(self, model, tokens, targets) -> torch.Tensor:
        """This rank's part of the loss: the loss is the sum over ranks."""
        tokens, targets = (part.chunk(self.ctx.size, dim=1)[self.ctx.rank] for part in (tokens, targets))
        return loss_part(model, self.config, tokens, targets)

    def shares(self, what: str) -> str:
        return f"{self.config.batch // self.ctx.size} of {self.config.batch} sequences and {what}"


class FullySharded(_SequencesApart):
    """Parameters are gathered only while their block computes."""

    name = "fsdp"

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.share = self.shares(f"1 of {self.ctx.size} parts of each parameter")
        for block in self.model.blocks:
            fully_shard(block, mesh=self.ctx)
        self.model = fully_shard(self.model, mesh=self.ctx)
        self.optimizer = Optimizer(self.model.named_parameters(), self.loss_scale)

    def step(self, tokens, targets):
        loss = self.loss_part(self.model, tokens, targets)
        (loss * self.ctx.size * self.loss_scale).backward()  # times R, since gradients are means over ranks
        self.optimizer.step()
        return tkernels.all_reduce(loss.detach()[None], ctx=self.ctx)


class Zero(_SequencesApart):
    """Each rank updates a part of the parameters: it receives their summed gradients and sends their new values."""

    name = "zero"

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.share = self.shares(f"1 of {self.ctx.size} parts of the optimizer")
        self.zero = ZeroOptimizer(
            self.model.parameters(),
            torch.optim.AdamW,
            mesh=self.ctx,
            bucket_bytes=4 * BUCKET_ELEMENTS,
            overlap_gather=self.model,
            reduce_dtype=torch.float32,
            loss_scale=None if self.loss_scale == 1 else self.loss_scale,
            **training.ADAM,
        )

    def step(self, tokens, targets):
        loss = self.loss_part(self.model, tokens, targets)
        total = tkernels.all_reduce(loss.detach()[None], ctx=self.ctx)
        self.zero.scale(loss * self.ctx.size).backward()  # times R, since gradients are means over ranks
        self.zero.step()
        return total

    def gradients(self):
        self.zero.ensure_params_ready()
        state = self.zero.full_state_dict()["state"]
        names = [name for name, _ in self.model.named_parameters()]
        return {name: training.first_gradient(state[number]) for number, name in enumerate(names)}

    def close(self):
        self.zero.ensure_params_ready()
        self.zero.remove()


class DataParallel(_SequencesApart):
    """Gradients are summed on all ranks, a bucket at a time."""

    name = "ddp"

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.share = self.shares("the whole model")
        self.ddp = OverlappedDDP(self.model, mesh=self.ctx, bucket_size=BUCKET_ELEMENTS, average=False)
        self.optimizer = Optimizer(self.model.named_parameters(), self.loss_scale)

    def step(self, tokens, targets):
        loss = self.loss_part(self.ddp, tokens, targets)
        (loss * self.loss_scale).backward()
        self.optimizer.step()
        return tkernels.all_reduce(loss.detach()[None], ctx=self.ctx)

    def close(self):
        self.ddp.remove()


KINDS = {kind.name: kind for kind in (TensorParallel, PipelineParallel, FullySharded, Zero, DataParallel)}
