"""The ways to split the demo's training over ranks, one class each; `KINDS` has them by name.

            a rank has                         it sends                           overlapped with
    tp      positions; heads and features      activations, in the linear layers  the GEMMs of the same layers
    pp      blocks                             activations, and their gradients   the next microbatch
    fsdp    sequences, parts of parameters     parameters, and their gradients    the blocks before and after
    zero    sequences, parts of the optimizer  gradients, and parameters          backward; forward
    ddp     sequences                          gradients                          backward
"""

import torch
from torch import nn
from torch.nn import functional as F

import tkernels
from tkernels.comm.context import Context
from tkernels.demo.model import Block, ModelConfig, Transformer, shard
from tkernels.demo.operations import CountingCommunicator, OperationCounter
from tkernels.demo.training import ADAM, LOSS_SCALE, Optimizer, loss_part
from tkernels.layers import all_reduce_sequence_parallel_grads
from tkernels.layers.data_parallel.ddp import OverlappedDDP
from tkernels.layers.data_parallel.fully_shard import fully_shard
from tkernels.layers.data_parallel.state_dict import gather_state_dict
from tkernels.layers.data_parallel.zero import ZeroOptimizer
from tkernels.layers.pipeline.run import forward_backward_pipelining, split_into_stages

BUCKET_ELEMENTS = 1 << 15  # of a bucket: about a quarter of the model's gradients
MICROBATCH = 2  # sequences


class Parallel:
    """A way to split the training over ranks, and a rank's part of it.

    Collective, as are step and gradients. model: has the initial weights, and is split in place. float8: the
    recipe of the linear layers that are split, or None.

    name: as --parallel takes it.
    divided: the sizes of ModelConfig that ranks divide.
    share: a rank's part, in words.
    model: afterwards, the modules whose parameters the rank holds between two steps.
    counter: of what this rank sends.
    """

    name: str
    divided: tuple[str, ...]
    share: str

    def __init__(self, model: Transformer, config: ModelConfig, ctx: Context, float8: str | None = None):
        self.model, self.config, self.ctx, self.float8 = model, config, ctx, float8
        self.counter = OperationCounter(ctx)

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Train on a batch, which every rank has in full. Returns its loss [1], the same on every rank."""
        raise NotImplementedError

    def gradients(self) -> dict[str, torch.Tensor]:
        """After the first step: the gradients that the optimizer got, whole, by the unsharded model's names.

        They are gathered as the parameters are, in whose place they are for a moment. They are scaled as in backward,
        since fp16 holds no small numbers.
        """
        masters = self.optimizer.masters
        self.optimizer.write({name: master.grad * LOSS_SCALE for name, master in masters.items()})
        whole = gather_state_dict(self.model)
        self.optimizer.write(masters)
        return {name: value.float() / LOSS_SCALE for name, value in whole.items()}


class TensorParallel(Parallel):
    """Tensor and sequence parallel: linear layers split by heads and features, the rest by positions."""

    name, divided = "tp", ("sequence", "heads")

    def __init__(self, *arguments):
        super().__init__(*arguments)
        R, positions, heads = self.ctx.size, self.config.sequence, self.config.heads
        self.share = f"{positions // R} of {positions} positions and {heads // R} of {heads} heads"
        shard(self.model, self.ctx, self.float8)
        self.optimizer = Optimizer(self.model)

    def step(self, tokens, targets):
        tokens, targets = (part.chunk(self.ctx.size)[self.ctx.rank] for part in (tokens, targets))
        loss = loss_part(self.model, self.config, tokens, targets, first_position=self.ctx.rank * len(tokens))
        total = tkernels.all_reduce(loss.detach()[None], ctx=self.ctx)
        (loss * LOSS_SCALE).backward()
        all_reduce_sequence_parallel_grads(self.model, mesh=self.ctx)
        self.optimizer.step()
        return total


class PipelineParallel(Parallel):
    """Pipeline parallel, 1F1B: stages with equally many blocks; the first adds the embeddings, the last the head."""

    name, divided = "pp", ("layers",)

    def __init__(self, model, *arguments):
        super().__init__(model, *arguments)
        embedding, head = _Embeddings(model), nn.Sequential(model.norm, model.head)
        (self.model,) = split_into_stages(embedding, model.blocks, head, model=model, mesh=self.ctx)
        own = sum(isinstance(part, Block) for part in self.model.parts)
        microbatches = self.config.batch // MICROBATCH
        self.share = f"{own} of {self.config.layers} blocks; {microbatches} microbatches a step"
        self.optimizer = Optimizer(self.model)
        self.comm = CountingCommunicator(self.counter, dtype=model.head.weight.dtype)

    def step(self, tokens, targets):
        losses = forward_backward_pipelining(
            [self.model],
            list(zip(tokens.split(MICROBATCH, dim=1), targets.split(MICROBATCH, dim=1), strict=True)),
            lambda logits, targets: F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()) * LOSS_SCALE,
            self.comm,
            tensor_shape=(self.config.sequence, MICROBATCH, self.config.features),
            overlap=True,
            deallocate=True,
        )
        self.optimizer.step()
        # Only the last stage has losses.
        loss = torch.stack(losses).mean() / LOSS_SCALE if losses else torch.zeros((), device=self.ctx.device)
        return tkernels.all_reduce(loss[None], ctx=self.ctx)


class _Embeddings(nn.Module):
    def __init__(self, model: Transformer):
        super().__init__()
        self.tokens, self.positions = model.embedding, model.positions

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tokens(tokens) + self.positions(torch.arange(len(tokens), device=tokens.device))[:, None]


class _SequencesApart(Parallel):
    """Base class of data-parallel ways: every rank has a share of a batch's sequences.

    what: of the model or the optimizer, a rank has. forward: the module to call, if it is not the model itself.
    split: gives the model to the system that splits the training.
    """

    divided = ("batch",)
    what = "1 of {ranks} parts of each parameter"

    def __init__(self, *arguments):
        super().__init__(*arguments)
        batch, R = self.config.batch, self.ctx.size
        self.share = f"{batch // R} of {batch} sequences and {self.what.format(ranks=R)}"
        self.forward = self.model
        self.split()

    def step(self, tokens, targets):
        tokens, targets = (part.chunk(self.ctx.size, dim=1)[self.ctx.rank] for part in (tokens, targets))
        loss = loss_part(self.forward, self.config, tokens, targets)  # the batch's is the sum over ranks
        total = tkernels.all_reduce(loss.detach()[None], ctx=self.ctx)
        (loss * self.ctx.size * LOSS_SCALE).backward()  # times R, since gradients are means over ranks
        self.optimizer.step()
        return total


class FullySharded(_SequencesApart):
    """Parameters are gathered only while their block computes."""

    name = "fsdp"

    def split(self):
        for block in self.model.blocks:
            fully_shard(block, mesh=self.ctx)
        fully_shard(self.model, mesh=self.ctx)
        self.optimizer = Optimizer(self.model)


class Zero(_SequencesApart):
    """Each rank updates a part of the parameters: it receives their summed gradients and sends their new values."""

    name, what = "zero", "1 of {ranks} parts of the optimizer"

    def split(self):
        self.optimizer = ZeroOptimizer(
            self.model.parameters(),
            torch.optim.AdamW,
            mesh=self.ctx,
            bucket_bytes=4 * BUCKET_ELEMENTS,
            overlap_gather=self.model,
            reduce_dtype=torch.float32,
            loss_scale=LOSS_SCALE,
            **ADAM,
        )

    def gradients(self):
        self.optimizer.ensure_params_ready()
        state = self.optimizer.full_state_dict()["state"]
        names = [name for name, _ in self.model.named_parameters()]
        # Adam's first moment after one step
        return {name: state[number]["exp_avg"] / (1 - ADAM["betas"][0]) for number, name in enumerate(names)}


class DataParallel(_SequencesApart):
    """Gradients are averaged over all ranks, a bucket at a time."""

    name, what = "ddp", "the whole model"

    def split(self):
        self.forward = OverlappedDDP(self.model, mesh=self.ctx, bucket_size=BUCKET_ELEMENTS)
        self.optimizer = Optimizer(self.model)


KINDS = {kind.name: kind for kind in (TensorParallel, PipelineParallel, FullySharded, Zero, DataParallel)}
