"""Pipeline-parallel training: a model in stages under its own names, and a step of 1F1B or interleaved 1F1B.

    stages = split_into_stages(model.embed, model.blocks, model.head, model=model, mesh=mesh["pp"])
    comm = P2PCommunicator(mesh["pp"])
    losses = forward_backward_pipelining(stages, microbatches, loss_fn, comm, tensor_shape=(s, b, d))

A rank's stages are its chunks of the model. A step computes and exchanges in the order of `schedule`.
"""

import contextlib
import functools
import inspect
import itertools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import MappingKey, tree_flatten_with_path, tree_leaves, tree_map, tree_map_only

from tkernels.comm.arguments import check_flags, check_type, whole
from tkernels.comm.collectives import split_rows
from tkernels.comm.context import MeshLike
from tkernels.comm.group import Group, listed
from tkernels.layers.marks import is_copy
from tkernels.layers.pipeline.communicator import P2PCommunicator, check_shapes, is_shape, map_shapes, ranks_of
from tkernels.layers.pipeline.memory import custom_backward, deallocate_output_tensor, leaves
from tkernels.layers.pipeline.schedule import Step, schedule


class Stage(nn.Module):
    """Modules of a model that run one after the other, registered under the names that they have in the model.

    `forward(x, **options)` calls each with the result of the one before. A module is given those of the options that
    its forward names, or all if it takes `**kwargs`. Raises TypeError for an option that no module of the model takes.
    """

    def __init__(self, parts, names: dict[nn.Module, str], options: set[str] | None):
        """parts: modules of the model, or modules of such modules. options: that the model's parts take; None: any."""
        super().__init__()
        self._options, self._order, self._links = options, [], []
        for part in parts:
            self._order.append(names.get(part, (part,)))  # in a tuple it is not registered
            for owner, attribute, module in _named(part, names):
                self._register(names[module], module)
                if owner is not None:
                    self._links.append((owner, attribute, names[module]))

    def _register(self, name: str, module: nn.Module):
        *path, last = name.split(".")
        parent = self
        for each in path:
            if each not in parent._modules:
                parent.add_module(each, nn.Module())
            parent = parent._modules[each]
        parent.add_module(last, module)

    @property
    def parts(self) -> list[nn.Module]:
        """The modules in the order of forward. What has been put in a module's place under its name counts."""
        for owner, attribute, name in self._links:
            owner._modules[attribute] = self.get_submodule(name)
        return [self.get_submodule(each) if isinstance(each, str) else each[0] for each in self._order]

    def train(self, mode: bool = True):
        for each in self._order:
            if not isinstance(each, str):
                each[0].train(mode)
        return super().train(mode)

    def forward(self, x, /, **options):
        if self._options is not None and (unknown := options.keys() - self._options):
            raise TypeError(
                f"pipeline: no part of the model takes {', '.join(sorted(unknown))}; they take "
                f"{', '.join(sorted(self._options)) or 'no keyword arguments'}"
            )
        for part in self.parts:
            taken = _options_of(part) if options else set()
            x = part(x, **(options if taken is None else {name: options[name] for name in options.keys() & taken}))
        return x


def split_into_stages(
    embedding: nn.Module,
    blocks,
    head: nn.Module,
    *,
    model: nn.Module | None = None,
    mesh: MeshLike = None,
    num_chunks: int = 1,
) -> nn.ModuleList:
    """This rank's chunks of a model: `embedding`, then `blocks`, then `head`, the blocks split as evenly as possible.

    model: the whole one, whose names the chunks keep: `chunk.state_dict()` has the model's keys, and loads from its
        checkpoints. A part may be one of its modules, or a module around several, such as
        nn.Sequential(model.norm, model.head). None: the names are embedding, blocks.0 and so on, and head.
    mesh: the pipeline's ranks: a DeviceMesh of one dimension, a ProcessGroup, a Context; None is the current context.
    num_chunks: of the model, on each rank, for interleaved 1F1B.

    Returns a `Stage` for each chunk. Shares the modules, which may be on the meta device. Swap or wrap modules
    (`parallelize`, `fully_shard`, activation checkpoints) before the split or in a chunk.

    Raises ValueError if there are fewer blocks than parts, if the parts leave some of the model out, or if they have
    parameters or buffers that are not in a module of the model. A parameter in the parts of several ranks, such as a
    head that is tied to the embedding, is a separate parameter on each of them: sum its gradients over these ranks, or
    the values diverge at the first step. All of them but the first warn of it, unless `shared = True` marks it there.
    """
    group = ranks_of(mesh, "split_into_stages: mesh")
    check_type("split_into_stages: blocks", blocks, Iterable, "a list of modules")
    blocks = list(blocks)
    named = {"embedding": embedding, "head": head} | {f"blocks[{number}]": block for number, block in enumerate(blocks)}
    for name, part in named.items():
        check_type(f"split_into_stages: {name}", part, nn.Module, "an nn.Module; nn.Identity() stands for none")
    if model is not None:
        check_type("split_into_stages: model", model, nn.Module, "an nn.Module")
    num_chunks = whole("pipeline: num_chunks", num_chunks, 1)
    num_parts = group.size * num_chunks
    if len(blocks) < num_parts:
        raise ValueError(
            f"pipeline: {len(blocks)} blocks don't make {num_parts} parts, of {group.size} ranks x {num_chunks}"
        )
    if model is None:
        model = nn.ModuleDict({"embedding": embedding, "blocks": nn.ModuleList(blocks), "head": head})
    names = {module: name for name, module in model.named_modules() if name}
    parts = [embedding, *blocks, head]
    covered = tuple(f"{names[module]}." for part in parts for _, _, module in _named(part, names))
    if left_out := [name for name in model.state_dict(keep_vars=True) if not name.startswith(covered)]:
        raise ValueError(
            f"pipeline: {listed(left_out)} of the model are in none of embedding, blocks and head; a module around "
            f"several modules can be one part"
        )
    taken = [_options_of(part) for part in parts]
    options = None if None in taken else set().union(*taken)
    ends = [0, *itertools.accumulate(split_rows(len(blocks), num_parts))]
    split = [blocks[start:end] for start, end in itertools.pairwise(ends)]
    split = [[embedding, *split[0]], *split[1:]]
    split[-1].append(head)
    _warn_of_tied(model, split, group)
    return nn.ModuleList(Stage(split[number], names, options) for number in range(group.rank, num_parts, group.size))


def _warn_of_tied(model: nn.Module, split: list[list[nn.Module]], group: Group):
    """Warns of a parameter of this rank that one before it has too, if nobody has marked it as shared."""
    ranks_of_each = defaultdict(set)
    for number, parts in enumerate(split):
        for parameter in nn.ModuleList(parts).parameters():
            ranks_of_each[parameter].add(number % group.size)
    for name, parameter in model.named_parameters():
        ranks = sorted(ranks_of_each[parameter])
        if group.rank in ranks[1:] and not is_copy(parameter):
            warnings.warn(
                f"pipeline: {name} has a copy on each of ranks {', '.join(map(str, ranks))}, which diverge unless you "
                f"sum its gradient over these ranks before each step; if you do, mark it shared = True on all of them "
                f"but the first, so that norms count it once",
                stacklevel=3,
            )


def _named(part: nn.Module, names: dict[nn.Module, str], owner=None, attribute: str | None = None):
    """Yields the model's modules in a part, each behind the module of the part that has it, and its attribute there."""
    if part in names:
        yield owner, attribute, part
        return
    if own := [name for name, _ in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))]:
        raise ValueError(
            f"pipeline: the part {type(part).__name__} has {listed(own)}, which are in no module of the model; put "
            f"them into one of its modules"
        )
    for name, child in part._modules.items():
        if child is not None:
            yield from _named(child, names, part, name)


def _options_of(part: nn.Module) -> set[str] | None:
    """The keyword arguments that a module takes beside its input; None if any."""
    others = [*inspect.signature(part.forward).parameters.values()][1:]
    if any(each.kind is each.VAR_KEYWORD for each in others):
        return None
    return {each.name for each in others if each.kind is not each.VAR_POSITIONAL}


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
    no_sync_func=None,
    grad_sync_func=None,
) -> list:
    """Collective. One training step: accumulates the gradients of the mean of the microbatches' losses.

    stage_chunks: this rank's parts of the model, in order. Each maps the tensors it receives to those it sends. The
        first part gets a microbatch's input, which may be anything.
    microbatches: (input, target) or (input, target, options), the same number on every rank. The first part reads
        inputs, the last targets. options: keyword arguments of every part (masks, positions, ids), which are not sent:
        each rank has its own, and no gradient leaves through them.
    loss_fn: (output of the last part, target) -> scalar, with forward_only anything; None on ranks without the last
        part.
    tensor_shape: of the tensors between stages, or a function of the microbatch's number; lists and dicts of shapes as
        in P2PCommunicator; None if there is one rank, or for each tensor if the communicator exchanges shapes.
    forward_only: losses without gradients.
    overlap: transfers run while the next step computes; the losses are bit-identical.
    deallocate: a stage's output is freed once it is sent, and only its graph stays for backward. Tensors that the stage
        passes on unchanged, or that need no gradient, are kept.
    no_sync_func: makes the context for all of a chunk's steps but the last backward, in which gradients accumulate and
        are not reduced. Default: what the data-parallel modules in the chunk have, `set_requires_gradient_sync` of
        fully_shard's, which is True afterwards, as after a step of torch's pipelines, `no_sync` of DDP's,
        OverlappedDDP's and FullyShard's. So each parameter's gradient is reduced once. contextlib.nullcontext leaves
        them alone.
    grad_sync_func: called with a chunk's parameters after its last backward, which is then in the context, too. Like
        no_sync_func, as in Megatron's config: a function, or a list of one for each chunk.

    Returns the losses by microbatch, detached, on the rank of the last stage; [] on the others. Before anything is
    sent, raises TypeError for arguments that are none of these, ValueError for an impossible schedule, for missing
    shapes, and for overlap with a communicator that exchanges shapes, because the host waits for them: on every rank in
    its first step, later where they are wrong. And MismatchError, at the first such step, for numbers of microbatches
    or chunks, or a forward_only, that differ between ranks. Meanwhile, raises TypeError for what is no tensor between
    stages, and for a loss that is no scalar with a gradient; ValueError for shapes other than those that a stage
    returns. What a stage raises ends the step on all ranks (`P2PCommunicator.fail`); one whose host has queued the step
    by then raises in its next call, and what it has computed is of no use.
    """
    check_type("pipeline: comm", comm, P2PCommunicator, "a P2PCommunicator")
    shape_of, alike = tensor_shape if callable(tensor_shape) else lambda microbatch: tensor_shape, {}
    with comm.checking("forward_backward_pipelining", alike):
        check_flags("pipeline", forward_only=forward_only, overlap=overlap, deallocate=deallocate)
        if tensor_shape is None and comm.size > 1 and not comm.variable_seq_lengths:
            raise ValueError(
                "pipeline: tensor_shape is None, so nobody knows the shape of what goes from stage to stage; pass it, "
                "or a communicator with variable_seq_lengths=True, which exchanges shapes"
            )
        if overlap and comm.variable_seq_lengths:
            raise ValueError(
                "pipeline: with variable_seq_lengths the host waits for each shape, so nothing would overlap; pass "
                "overlap=False, or a communicator without it and tensor_shape as a function of the microbatch"
            )
        last = comm.rank == comm.size - 1
        _check_arguments(stage_chunks, microbatches, loss_fn, no_sync_func, grad_sync_func, last)
        for number in range(len(microbatches) if callable(tensor_shape) else 1):
            check_shapes("pipeline: tensor_shape", shape_of(number), comm.variable_seq_lengths or comm.size == 1)
        alike |= dict(microbatches=len(microbatches), chunks=len(stage_chunks), forward_only=forward_only)
    turns = schedule(
        comm.rank, comm.size, len(stage_chunks), len(microbatches), forward_only=forward_only, overlap=overlap
    )
    run = _Run(list(stage_chunks), microbatches, loss_fn, comm, shape_of, forward_only, overlap, deallocate)
    run.set_grad_sync(no_sync_func, grad_sync_func)
    ahead, num_open = 1 + overlap, len(comm.open_handles)  # the caller may have some
    try:
        for turn in turns[:ahead]:
            run.exchange(turn)
        with torch.set_grad_enabled(not forward_only):
            for turn, later in zip(turns, [*turns[ahead:], *[()] * ahead], strict=False):
                for step in turn:
                    run.compute(step)
                run.exchange(later)
    except Exception as error:
        comm.fail(error)  # the other stages wait for this one
        raise
    comm.drain()
    assert not run.arriving and len(comm.open_handles) <= num_open, comm.open_handles
    return [tree_map_only(torch.Tensor, torch.Tensor.detach, run.losses[number]) for number in sorted(run.losses)]


def _check_arguments(stage_chunks, microbatches, loss_fn, no_sync_func, grad_sync_func, last: bool):
    if not isinstance(stage_chunks, Sequence | nn.ModuleList):
        raise TypeError(f"pipeline: stage_chunks is {type(stage_chunks).__name__}; pass a list of this rank's chunks")
    if not len(stage_chunks):
        raise ValueError("pipeline: stage_chunks is empty; every rank has a part of the model")
    for number, each in enumerate(stage_chunks):
        check_type(f"pipeline: stage_chunks[{number}]", each, nn.Module, "an nn.Module")
    check_type("pipeline: microbatches", microbatches, Sequence, "a list, since it is counted before anything runs")
    for number, each in enumerate(microbatches):
        if not isinstance(each, tuple | list) or len(each) not in (2, 3):
            raise TypeError(
                f"pipeline: microbatch {number} is {type(each).__name__}; each must be (input, target) or (input, "
                f"target, options)"
            )
        if len(each) == 3:
            check_type(f"pipeline: microbatches[{number}][2]", each[2], Mapping, "a dict of keyword arguments")
    if loss_fn is not None or last:
        check_type("pipeline: loss_fn", loss_fn, Callable, "a function of an output and a target")
    for name, value in {"no_sync_func": no_sync_func, "grad_sync_func": grad_sync_func}.items():
        functions, count = value if isinstance(value, list) else [value], len(stage_chunks)
        if isinstance(value, list) and len(value) != count:
            raise ValueError(f"pipeline: {name} has {len(value)} functions for {count} chunks; pass one each")
        for function in functions:
            if function is not None:
                check_type(f"pipeline: {name}", function, Callable, "a function, or a list of one for each chunk")


class _Run:
    """One call of forward_backward_pipelining: the state that is kept between its steps."""

    def __init__(self, chunks, microbatches, loss_fn, comm, shape_of, forward_only, overlap, deallocate):
        self.chunks, self.microbatches, self.loss_fn, self.comm = chunks, microbatches, loss_fn, comm
        self.forward_only, self.overlap, self.deallocate = forward_only, overlap, deallocate
        self.shape_of, self.losses = shape_of, {}
        self.inputs, self.outputs = {}, {}  # by (microbatch, chunk), from forward to backward
        self.output = self.grad = None  # of the turn that has just run, to be sent
        self.arriving = {}  # step -> (tensor, its handle or None)

    def is_first(self, step: Step) -> bool:
        return self.comm.rank == 0 and step.chunk == 0

    def is_last(self, step: Step) -> bool:
        return self.comm.rank == self.comm.size - 1 and step.chunk == len(self.chunks) - 1

    def set_grad_sync(self, no_sync_func, grad_sync_func):
        """The functions of each chunk, of one for all, of a list, or by default of what is in the chunk."""
        count = len(self.chunks)
        self.grad_sync = grad_sync_func if isinstance(grad_sync_func, list) else [grad_sync_func] * count
        self.replicas = [[] if no_sync_func else list(_data_parallel(chunk)) for chunk in self.chunks]
        if no_sync_func is None:
            self.no_sync = [functools.partial(_accumulating, wrappers) for wrappers in self.replicas]
        else:
            self.no_sync = no_sync_func if isinstance(no_sync_func, list) else [no_sync_func] * count

    def compute(self, step: Step):
        received, handle = self.arriving.pop(step, (None, None))
        if handle is not None:
            handle.wait()
        if step.forward:
            with contextlib.nullcontext() if self.forward_only else self.no_sync[step.chunk]():
                return self._forward(step, received)
        last, sync = step.microbatch == len(self.microbatches) - 1, self.grad_sync[step.chunk]
        with contextlib.nullcontext() if last and sync is None else self.no_sync[step.chunk]():
            self._backward(step, received)
        if last and sync is not None:
            sync(self.chunks[step.chunk].parameters())

    def _forward(self, step: Step, x):
        source, target, *options = self.microbatches[step.microbatch]
        output = self.chunks[step.chunk](source if self.is_first(step) else x, **(options[0] if options else {}))
        if self.is_last(step):
            output = self.losses[step.microbatch] = self.loss_fn(output, target)
            if not self.forward_only:
                _check_loss(output)
        else:
            self._check_shapes(step, output)
            self.output = output
        if not self.forward_only:
            self.inputs[step.microbatch, step.chunk] = x
            self.outputs[step.microbatch, step.chunk] = output

    def _check_shapes(self, step: Step, output):
        """Raises ValueError if an output has not the shapes of tensor_shape, or not the tensors if these are exchanged.

        And TypeError if something in it is no tensor.

        The next stage receives by tensor_shape, and would compute on uninitialised memory where nothing arrives, or
        take what is left over for the next microbatch. A gradient has the shape of the received tensor, so it needs no
        check; the communicator checks dtypes.
        """
        exchanged, shapes = self.comm.variable_seq_lengths, self.shape_of(step.microbatch)
        part = step.chunk * self.comm.size + self.comm.rank
        for leaf in tree_leaves(output):
            if not isinstance(leaf, torch.Tensor | None):
                raise TypeError(
                    f"pipeline: part {part} of the model makes {type(leaf).__name__} of microbatch {step.microbatch}; "
                    f"only tensors go from stage to stage, in lists and dicts, so let it return these"
                )
        found = tree_map(lambda tensor: None if tensor is None else tuple(tensor.shape), output)
        wanted = map_shapes(shapes, lambda shape: () if exchanged else tuple(map(int, shape)))
        sent, received = _in_order(found), _in_order(wanted)
        if exchanged:
            sent, received = ([keys for keys, _ in each] for each in (sent, received))
        if sent != received:
            wayout = (
                "pass its lists and dicts, with None for each tensor"
                if exchanged
                else "pass a function of the microbatch's number, or a communicator with variable_seq_lengths=True"
            )
            raise ValueError(
                f"pipeline: part {part} of the model makes {found} of microbatch {step.microbatch}, but tensor_shape "
                f"says {shapes if exchanged else wanted}; {wayout}"
            )

    def _backward(self, step: Step, grad):
        x, output = (tensors.pop((step.microbatch, step.chunk)) for tensors in (self.inputs, self.outputs))
        if step.microbatch == len(self.microbatches) - 1:
            _expect_gradients(self.replicas[step.chunk], output)
        if self.is_last(step):
            (output / len(self.microbatches)).backward()
        else:
            pairs = zip(leaves(output), leaves(grad), strict=True)
            pairs = [pair for pair in pairs if pair[0].requires_grad]
            if pairs:  # a frozen stage has no backward
                outputs, grads = map(list, zip(*pairs, strict=True))
                (custom_backward if self.deallocate else torch.autograd.backward)(outputs, grads)
        if not self.is_first(step):
            gradient = lambda tensor: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad  # noqa: E731
            self.grad = tree_map_only(torch.Tensor, gradient, x)

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


def _check_loss(loss):
    if not isinstance(loss, torch.Tensor):
        found = f"{type(loss).__name__}, which has no gradient"
    elif not loss.requires_grad:
        found = "a detached tensor, which has no gradient"
    elif loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}"
    else:
        return
    raise TypeError(f"pipeline: loss_fn returns {found}; return a scalar tensor, or pass forward_only=True")


def _in_order(shapes) -> list:
    """For each tensor in the order of sending, the dict keys that lead to it and its shape."""
    paths, _ = tree_flatten_with_path(shapes, is_leaf=is_shape)
    return [([key for key in path if isinstance(key, MappingKey)], shape) for path, shape in paths if shape is not None]


# Data-parallel modules, torch's and ours, by the methods that they share


def _data_parallel(module: nn.Module):
    """Yields the outermost modules in a chunk that reduce gradients."""
    if hasattr(module, "set_requires_gradient_sync") or hasattr(module, "no_sync"):
        yield module
    else:
        for child in module.children():
            yield from _data_parallel(child)


@contextlib.contextmanager
def _accumulating(wrappers):
    """A context in which these modules reduce no gradients."""
    with contextlib.ExitStack() as stack:
        for each in wrappers:
            if hasattr(each, "set_requires_gradient_sync"):
                _set_sync(each, False)
                stack.callback(_set_sync, each, True)
            else:
                stack.enter_context(each.no_sync())
        yield


def _set_sync(wrapper, reduces: bool):
    wrapper.set_requires_gradient_sync(reduces)
    if hasattr(wrapper, "set_is_last_backward"):
        wrapper.set_is_last_backward(reduces)


def _expect_gradients(wrappers, output):
    """torch's DDP prepares a reduction in forward, where the last microbatch's comes before others' backward."""
    for each in wrappers:
        if isinstance(each, DistributedDataParallel):
            each.reducer.prepare_for_backward(leaves(output) if each.find_unused_parameters else [])
