"""Pipeline-parallel training: 1F1B and interleaved 1F1B over a P2PCommunicator.

R ranks.  V chunks of the model on each rank.  m microbatches.  Chunk c of rank r is part c * R + r of the model.

    R = 2, V = 1, m = 4        rank 0    F0 F1 B0 F2 B1 F3 B2 B3
                               rank 1       F0 B0 F1 B1 F2 B2 F3 B3

A schedule is a list of turns, built before anything runs. A turn is one step, or a forward and a backward. Between two
turns there is one exchange: it sends the results of the turn before, and receives the inputs of a turn to come. Without
overlap that is the next turn, and the exchange is waited for. With overlap, turns are single steps, and the inputs are
those of the step after the next one. Meanwhile the next step computes on inputs that were received before.
"""

from dataclasses import dataclass

import torch
from torch import nn

from tkernels.comm.arguments import whole
from tkernels.comm.collectives import split_rows
from tkernels.layers.pipeline.communicator import (
    P2PCommunicator,
    custom_backward,
    deallocate_output_tensor,
    leaves,
    map_shapes,
)


@dataclass(frozen=True)
class Step:
    """Forward or backward of one microbatch through one of this rank's chunks."""

    forward: bool
    microbatch: int
    chunk: int

    def __str__(self):
        return f"{'F' if self.forward else 'B'}{self.microbatch}.{self.chunk}"


def schedule(
    rank: int, size: int, num_chunks: int, num_microbatches: int, *, forward_only: bool = False, overlap: bool = False
) -> list[tuple[Step, ...]]:
    """The turns of a rank: 1F1B for one chunk, interleaved 1F1B for several.

    Several chunks without overlap use turns of two steps, which avoids a deadlock: if a rank waited for the receiver of
    its forward before it ran its backward, the backward of that receiver could be waiting for this rank.

    Raises ValueError if interleaved microbatches are not a multiple of the ranks, or if there is one rank to
    interleave.
    """
    if num_chunks > 1 and (size == 1 or num_microbatches % size):
        raise ValueError(
            f"pipeline: {num_chunks} chunks a rank take at least 2 ranks, of which the number of microbatches is a "
            f"multiple; there are {size} ranks and {num_microbatches} microbatches"
        )
    total = num_microbatches * num_chunks
    forwards, backwards = [], []
    for k in range(total):
        # A round takes `size` microbatches through chunk 0, then the same ones through chunk 1, and so on.
        round, within = divmod(k, size * num_chunks)
        chunk, microbatch = within // size, round * size + within % size
        forwards.append(Step(True, microbatch, chunk))
        backwards.append(Step(False, microbatch, num_chunks - 1 - chunk))
    if forward_only:
        return [(step,) for step in forwards]
    if num_chunks == 1:
        warmup = size - rank - 1
    else:
        warmup = 2 * (size - rank - 1) + (num_chunks - 1) * size
    warmup = min(warmup, total)
    steady = list(zip(forwards[warmup:], backwards, strict=False))
    if overlap or num_chunks == 1:
        steady = [(step,) for pair in steady for step in pair]
    return [(step,) for step in forwards[:warmup]] + steady + [(step,) for step in backwards[total - warmup :]]


def split_into_stages(
    embedding: nn.Module, blocks, head: nn.Module, *, rank: int, size: int, num_chunks: int = 1
) -> nn.ModuleList:
    """This rank's chunks of a model: `embedding`, then `blocks`, then `head`, the blocks split as evenly as possible.

    Shares the modules. Raises ValueError if there are fewer blocks than parts or no such rank. A parameter in the parts
    of several ranks, such as a head that is tied to the embedding, is a separate parameter on each of them: sum its
    gradients over these ranks, or the values diverge at the first step.
    """
    size, num_chunks = whole("pipeline: size", size, 1), whole("pipeline: num_chunks", num_chunks, 1)
    rank = whole("pipeline: rank", rank, 0, size - 1)
    blocks, parts = list(blocks), size * num_chunks
    if len(blocks) < parts:
        raise ValueError(f"pipeline: {len(blocks)} blocks don't make {parts} parts, of {size} ranks x {num_chunks}")
    counts, chunks = split_rows(len(blocks), parts), nn.ModuleList()
    for part in range(rank, parts, size):
        mine = blocks[sum(counts[:part]) : sum(counts[: part + 1])]
        chunks.append(nn.Sequential(*[embedding] * (part == 0), *mine, *[head] * (part == parts - 1)))
    return chunks


def forward_backward_pipelining(
    stage_chunks,
    microbatches,
    loss_fn,
    comm: P2PCommunicator,
    *,
    tensor_shape=None,
    forward_only: bool = False,
    overlap: bool = False,
    deallocate: bool = False,
) -> list[torch.Tensor]:
    """Collective. One training step: accumulates the gradients of the mean of the microbatches' losses.

    stage_chunks: this rank's parts of the model, in order. Each maps the tensors it receives to those it sends. The
        first part gets a microbatch's input.
    microbatches: pairs (input, target), the same number on every rank. The first part reads inputs, the last targets.
    loss_fn: (output of the last part, target) -> scalar.
    tensor_shape: of the tensors between stages, or a function of the microbatch's number; lists and dicts of shapes as
        in P2PCommunicator; None if the communicator exchanges shapes, or if there is one rank.
    forward_only: losses without gradients.
    overlap: transfers run while the next step computes; the losses are bit-identical.
    deallocate: a stage's output is freed once it is sent, and only its graph stays for backward. Tensors that the stage
        passes on unchanged, or that need no gradient, are kept.

    Returns the losses by microbatch, detached, on the rank of the last stage; [] on the others. Raises ValueError for
    an impossible schedule, for missing shapes, for shapes other than those that a stage returns, and for overlap with a
    communicator that exchanges shapes, because the host waits for them.
    """
    if tensor_shape is None and comm.size > 1 and not comm.variable_seq_lengths:
        raise ValueError(
            "pipeline: tensor_shape is None, so nobody knows the shape of what goes from stage to stage; pass it, or a "
            "communicator with variable_seq_lengths=True, which exchanges shapes"
        )
    if overlap and comm.variable_seq_lengths:
        raise ValueError(
            "pipeline: with variable_seq_lengths the host waits for each shape, so nothing would overlap; pass "
            "overlap=False, or a communicator without it and tensor_shape as a function of the microbatch"
        )
    turns = schedule(
        comm.rank, comm.size, len(stage_chunks), len(microbatches), forward_only=forward_only, overlap=overlap
    )
    run = _Run(list(stage_chunks), microbatches, loss_fn, comm, tensor_shape, forward_only, overlap, deallocate)
    ahead, num_open = 1 + overlap, len(comm.open_handles)  # the caller may have some
    for turn in turns[:ahead]:
        run.exchange(turn)
    with torch.set_grad_enabled(not forward_only):
        for turn, later in zip(turns, [*turns[ahead:], *[()] * ahead], strict=False):
            for step in turn:
                run.compute(step)
            run.exchange(later)
    comm.drain()
    assert not run.arriving and len(comm.open_handles) <= num_open, comm.open_handles
    return [run.losses[number].detach() for number in sorted(run.losses)]


class _Run:
    """One call of forward_backward_pipelining: the state that is kept between its steps."""

    def __init__(self, chunks, microbatches, loss_fn, comm, tensor_shape, forward_only, overlap, deallocate):
        self.chunks, self.microbatches, self.loss_fn, self.comm = chunks, microbatches, loss_fn, comm
        self.forward_only, self.overlap, self.deallocate = forward_only, overlap, deallocate
        self.shape_of = tensor_shape if callable(tensor_shape) else lambda microbatch: tensor_shape
        self.losses = {}
        self.inputs, self.outputs = {}, {}  # by (microbatch, chunk), from forward to backward
        self.output = self.grad = None  # of the turn that has just run, to be sent
        self.arriving = {}  # step -> (tensor, its handle or None)

    def is_first(self, step: Step) -> bool:
        return self.comm.rank == 0 and step.chunk == 0

    def is_last(self, step: Step) -> bool:
        return self.comm.rank == self.comm.size - 1 and step.chunk == len(self.chunks) - 1

    def compute(self, step: Step):
        received, handle = self.arriving.pop(step, (None, None))
        if handle is not None:
            handle.wait()
        (self._forward if step.forward else self._backward)(step, received)

    def _forward(self, step: Step, x):
        source, target = self.microbatches[step.microbatch]
        output = self.chunks[step.chunk](source if self.is_first(step) else x)
        if self.is_last(step):
            output = self.losses[step.microbatch] = self.loss_fn(output, target)
        else:
            self._check_shapes(step, output)
            self.output = output
        if not self.forward_only:
            self.inputs[step.microbatch, step.chunk] = x
            self.outputs[step.microbatch, step.chunk] = output

    def _check_shapes(self, step: Step, output):
        """Raises ValueError if an output does not have the shapes of tensor_shape.

        The next stage receives by tensor_shape, and would compute on uninitialised memory where nothing arrives. A
        gradient has the shape of the received tensor, so it needs no check; the communicator checks dtypes.
        """
        if self.comm.variable_seq_lengths:
            return
        found = _map(output, lambda tensor: tuple(tensor.shape))
        wanted = map_shapes(self.shape_of(step.microbatch), lambda shape: tuple(map(int, shape)))
        if list(_in_order(found)) != list(_in_order(wanted)):
            part = step.chunk * self.comm.size + self.comm.rank
            raise ValueError(
                f"pipeline: part {part} of the model makes {found} of microbatch {step.microbatch}, but tensor_shape "
                f"says {wanted}; pass a function of the microbatch's number, or a communicator with "
                f"variable_seq_lengths=True"
            )

    def _backward(self, step: Step, grad):
        x, output = (tensors.pop((step.microbatch, step.chunk)) for tensors in (self.inputs, self.outputs))
        if self.is_last(step):
            (output / len(self.microbatches)).backward()
        else:
            pairs = zip(leaves(output), leaves(grad), strict=True)
            pairs = [pair for pair in pairs if pair[0].requires_grad]
            if pairs:  # a frozen stage has no backward
                outputs, grads = map(list, zip(*pairs, strict=True))
                (custom_backward if self.deallocate else torch.autograd.backward)(outputs, grads)
        if not self.is_first(step):
            self.grad = _map(x, lambda tensor: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)

    def exchange(self, later: tuple[Step, ...]):
        """Send the results of the last turn, and receive the inputs of the steps in `later`."""
        forward = next((step for step in later if step.forward and not self.is_first(step)), None)
        backward = next((step for step in later if not step.forward and not self.is_last(step)), None)
        x_shape, grad_shape = (self.shape_of(step.microbatch) if step else None for step in (forward, backward))
        output, grad, self.output, self.grad = self.output, self.grad, None, None
        handles = {}
        if self.overlap:
            x, handles = self.comm.send_forward_recv_forward(output, forward is not None, x_shape, True)
            output_grad, others = self.comm.send_backward_recv_backward(grad, backward is not None, grad_shape, True)
            handles |= others
        else:
            x, output_grad = self.comm.send_forward_backward_recv_forward_backward(
                output, grad, forward is not None, backward is not None, x_shape, grad_shape
            )
        if self.deallocate and not self.forward_only:
            computed = [tensor for tensor in leaves(output) if tensor.grad_fn is not None]
            deallocate_output_tensor(computed, True)
        for edge in ("send_next", "send_prev"):
            if edge in handles:
                handles[edge].release()  # the communicator holds the storage that is sent
        if forward is not None:
            self.arriving[forward] = x, handles.get("recv_prev")
        if backward is not None:
            self.arriving[backward] = output_grad, handles.get("recv_next")


def _map(value, function):
    """`function` of each tensor of a tensor, or of a list or dict of them."""
    if isinstance(value, dict):
        return {name: _map(part, function) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_map(part, function) for part in value]
    return None if value is None else function(value)


def _in_order(shapes, names=()):
    """Yields, for each tensor in the order of sending, the dict keys that lead to it and its shape."""
    if isinstance(shapes, dict):
        for name, part in shapes.items():
            yield from _in_order(part, (*names, name))
    elif isinstance(shapes, list):
        for part in shapes:
            yield from _in_order(part, names)
    elif shapes is not None:
        yield names, shapes
