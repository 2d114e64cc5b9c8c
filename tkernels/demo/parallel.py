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

from collections import defaultdict

import torch
from torch import nn
from torch.nn import functional as F

import tkernels
from tkernels.comm.regions import round_up
from tkernels.demo import training
from tkernels.demo.model import Block, Transformer, shard
from tkernels.demo.recorder import Tally
from tkernels.demo.training import Optimizer, Parallel, loss_part
from tkernels.layers import ColumnParallelLinear, RowParallelLinear, all_reduce_sequence_parallel_grads
from tkernels.layers.ddp import OverlappedDDP
from tkernels.layers.fsdp import ALIGN, FullyShard
from tkernels.layers.p2p import P2PCommunicator
from tkernels.layers.pipeline import forward_backward_pipelining, split_into_stages
from tkernels.layers.zero import ZeroOptimizer

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
        self.model = shard(self.model, self.ctx)
        self.optimizer = Optimizer(self.model.named_parameters(), self.loss_scale)

    @property
    def share(self):
        R, positions, heads = self.ctx.size, self.config.sequence, self.config.heads
        return f"{positions // R} of {positions} positions and {heads // R} of {heads} heads"

    def step(self, tokens, targets):
        tokens, targets = (part.chunk(self.ctx.size)[self.ctx.rank] for part in (tokens, targets))
        loss = loss_part(self.model, self.config, tokens, targets, first_position=self.ctx.rank * len(tokens))
        (loss * self.loss_scale).backward()
        all_reduce_sequence_parallel_grads(self.model, ctx=self.ctx)
        loss = tkernels.all_reduce(loss.detach()[None], ctx=self.ctx)
        self.optimizer.step()
        return loss

    def parts(self, whole):
        parts = dict(whole)
        for path, module in self.model.named_modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                for name, dim in module.partitioned().items():
                    parts[f"{path}.{name}"] = module.shard(whole[f"{path}.{name}"], dim)
        return parts


class PipelineParallel(Parallel):
    """Pipeline parallel, 1F1B: stages with equally many blocks; the first adds the embeddings, the last the head."""

    name = "pp"

    @staticmethod
    def sizes(ranks):
        return {"layers": max(training.LAYERS, ranks)}

    def __init__(self, *arguments):
        super().__init__(*arguments)
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        head = nn.Sequential(self.model.norm, self.model.head)
        self.stage = split_into_stages(
            _Embeddings(self.model), self.model.blocks, head, rank=self.ctx.rank, size=self.ctx.size
        )
        own = [(names[parameter], parameter) for parameter in self.stage.parameters()]
        self.optimizer = Optimizer(own, self.loss_scale)
        self.comm = _CountingCommunicator(self.ctx, dtype=own[0][1].dtype)

    @property
    def share(self):
        own = sum(isinstance(part, Block) for part in self.stage[0])
        return f"{own} of {self.config.layers} blocks; {self.config.batch // MICROBATCH} microbatches a step"

    def step(self, tokens, targets):
        losses = forward_backward_pipelining(
            self.stage,
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

    def messages(self):
        return {name: tally for name, tally in self.comm.sent.items() if tally.calls}

    def close(self):
        self.comm.close()


class _Embeddings(nn.Module):
    def __init__(self, model: Transformer):
        super().__init__()
        self.tokens, self.positions = model.embedding, model.positions

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tokens(tokens) + self.positions(torch.arange(len(tokens), device=tokens.device))[:, None]


class _CountingCommunicator(P2PCommunicator):
    """Counts what an overlapped pipeline sends."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.sent = {"send_forward": Tally(), "send_backward": Tally()}

    def send_forward_recv_forward(self, output_tensor, *arguments):
        self._count("send_forward", output_tensor)
        return super().send_forward_recv_forward(output_tensor, *arguments)

    def send_backward_recv_backward(self, input_tensor_grad, *arguments):
        self._count("send_backward", input_tensor_grad)
        return super().send_backward_recv_backward(input_tensor_grad, *arguments)

    def _count(self, name: str, tensor: torch.Tensor | None):
        if tensor is not None:
            self.sent[name].calls += 1
            self.sent[name].sent_bytes += tensor.nbytes


class _SequencesApart(Parallel):
    """Base class of data-parallel ways: every rank has a share of a batch's sequences."""

    @staticmethod
    def sizes(ranks):
        return {"batch": round_up(training.BATCH, ranks)}

    @property
    def share(self):
        batch = self.config.batch
        return f"{batch // self.ctx.size} of {batch} sequences and {self.share_of_model}"

    def loss_part(self, model, tokens, targets) -> torch.Tensor:
        """This rank's part of the loss: the loss is the sum over ranks."""
        tokens, targets = (part.chunk(self.ctx.size, dim=1)[self.ctx.rank] for part in (tokens, targets))
        return loss_part(model, self.config, tokens, targets)


class DataParallel(_SequencesApart):
    """Gradients are summed on all ranks, a bucket at a time."""

    name = "ddp"
    share_of_model = "the whole model"

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.ddp = OverlappedDDP(self.model, self.ctx, bucket_size=BUCKET_ELEMENTS, average=False)
        self.optimizer = Optimizer(self.model.named_parameters(), self.loss_scale)

    def step(self, tokens, targets):
        loss = self.loss_part(self.ddp, tokens, targets)
        (loss * self.loss_scale).backward()
        self.optimizer.step()
        return tkernels.all_reduce(loss.detach()[None], ctx=self.ctx)

    def close(self):
        self.ddp.remove()


class Zero(_SequencesApart):
    """Each rank updates a part of the parameters: it receives their summed gradients and sends their new values."""

    name = "zero"

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.zero = ZeroOptimizer(
            self.model.parameters(),
            torch.optim.AdamW,
            ctx=self.ctx,
            bucket_bytes=4 * BUCKET_ELEMENTS,
            overlap_gather=self.model,
            reduce_dtype=torch.float32,
            loss_scale=None if self.loss_scale == 1 else self.loss_scale,
            **training.ADAM,
        )

    @property
    def share_of_model(self):
        return f"1 of {self.ctx.size} parts of the optimizer"

    @property
    def num_parameters(self):
        return sum(parameter.numel() for parameter in self.model.parameters())

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


class FullySharded(_SequencesApart):
    """Parameters are gathered only while their block computes."""

    name = "fsdp"

    def __init__(self, *arguments):
        super().__init__(*arguments)
        sizes = {name: parameter.numel() for name, parameter in self.model.named_parameters()}
        self.model = FullyShard(self.model, units=Block, ctx=self.ctx)
        self.pieces = self._pieces(sizes)
        self.optimizer = Optimizer(self.model.named_parameters(), self.loss_scale)

    @property
    def share_of_model(self):
        return f"1 of {self.ctx.size} parts of each parameter"

    def _pieces(self, sizes: dict[str, int]) -> dict[str, tuple[str, slice, slice]]:
        """This rank's pieces of the parameters, by name: (shard's name, slice of the shard, slice of the parameter).

        A unit's parameters lie one after the other, each at a multiple of ALIGN; a shard is an R-th of a unit.
        """
        units = ["", *(f"blocks.{number}." for number in range(self.config.layers))]
        shards = dict(zip(units, self.model.named_parameters(), strict=True))
        ends, pieces = defaultdict(int), {}
        for name, size in sizes.items():
            unit = next(unit for unit in reversed(units) if name.startswith(unit))
            shard_name, shard = shards[unit]
            start, begin = ends[unit], self.ctx.rank * shard.numel()
            ends[unit] = round_up(start + size, ALIGN)
            first, last = max(start, begin), min(start + size, begin + shard.numel())
            if first < last:
                pieces[name] = shard_name, slice(first - begin, last - begin), slice(first - start, last - start)
        return pieces

    def step(self, tokens, targets):
        loss = self.loss_part(self.model, tokens, targets)
        (loss * self.ctx.size * self.loss_scale).backward()  # gradients are means over ranks
        self.optimizer.step()
        return tkernels.all_reduce(loss.detach()[None], ctx=self.ctx)

    def gradients(self):
        shards = self.optimizer.gradients()
        return {name: shards[shard_name][place] for name, (shard_name, place, _) in self.pieces.items()}

    def parts(self, whole):
        return {name: whole[name].flatten()[place] for name, (_, _, place) in self.pieces.items()}


KINDS = {kind.name: kind for kind in (TensorParallel, PipelineParallel, FullySharded, Zero, DataParallel)}
