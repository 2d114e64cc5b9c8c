"""ReplicaCheck: what all ranks of a tensor-parallel model must have alike is compared, once: replicas whose gradients
differ drift apart.
"""

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from tkernels.comm import Context, MismatchError, find_context
from tkernels.comm.context import constant_in_traces
from tkernels.comm.contexts import open_contexts
from tkernels.comm.errors import OutOfStepError, TkernelsError
from tkernels.comm.group import listed
from tkernels.layers.marks import RANKS, gradient_of, is_partial, is_split
from tkernels.layers.owners import owner_of, parameters_of
from tkernels.layers.tensor_parallel.dtensors import is_part, num_ranks_of
from tkernels.layers.tensor_parallel.replicas import (
    FOR_HEADS,
    GRAD_ALLREDUCE,
    LocalParameters,
    SummedOutput,
    register_first,
)

SLICES = 16  # of a gradient, each compared by its sum and size
# Ranks may round differently (atomics, tuned kernels), in 16 bits under autocast whatever a gradient's dtype. The root
# lies midway between one rounding, EPS, and the difference between parts of one sum, about 1.
EPS = torch.finfo(torch.bfloat16).eps
TOLERANCE = EPS**0.5
_UNSUMMED = "tkernels_unsummed"  # on a parameter: an _Unsummed, until its gradient has been compared


class Found(NamedTuple):
    """Summaries of what has come since the last comparison: of one rank [2 * slices], gathered [R, 2 * slices].

    By parameter: gradients; summands, the parts of those that are summed over ranks; summed_inputs, what the linear
    layers of such read. By module: outputs, the gradients of whole outputs; inputs, the whole inputs of split ones.
    """

    gradients: dict[str, torch.Tensor]
    summands: dict[str, torch.Tensor]
    summed_inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    inputs: dict[str, torch.Tensor]

    @classmethod
    def nothing(cls) -> "Found":
        return cls(*({} for _ in cls._fields))


class _Unsummed(NamedTuple):
    """Of a parameter marked sequence_parallel: its ranks and its name, which are nothing to another process."""

    context: str
    name: str

    def __reduce__(self):
        return tuple, ()


class ReplicaCheck:
    """Compares the gradients of replicated parameters over ranks, each once, at the end of a backward.

    split, summed: names of the parameters of which each rank has a part, and of those whose gradients are summed by
        LocalParameters. outputs: paths of split modules with a whole output, whose gradient all ranks must have.
        inputs: of those with a whole input, which all ranks must have: it is compared once, with the first gradients.

    It looks at gradients where autograd hands them on, before anybody takes, adds or reduces them. Parameters with
    Megatron's marks are left out: tensor_model_parallel, since ranks have different ones, and sequence_parallel, whose
    gradients are yet to be summed. These are compared after the first steps of an optimizer that has them.

    The comparison is collective, so it comes at the end of a backward that has reached parallel layers, which all ranks
    run alike: the first, second, fourth, eighth and so on of each layer, until every parameter has had a gradient other
    than zero. (Layers may begin with zeros, and a backward, as that of a reentrant checkpoint, be of a part alone.) It
    is of the latest gradients of all parameters that have not been compared yet.
    """

    def __init__(self, context: str, split: frozenset[str], summed: frozenset[str], outputs, inputs):
        self._context, self._split, self._summed, self._of_modules = context, split, summed, (outputs, inputs)
        self._output_hooks = dict.fromkeys(outputs)  # of the modules whose outputs are yet to be compared
        self._input_hooks, self._forwards = dict.fromkeys(inputs), {}  # likewise; how many forwards each has had
        self._comparisons = 0
        self._linears, self._outer = set(), set()  # names of parameters of linear layers, and of modules with others
        self._handles = {}  # of hooks, by the names of parameters that are yet to be compared, and of split ones
        self._known = set()  # names of those that take gradients, as far as they have been looked at
        self._triggers, self._counts = split, {}  # whose gradients make a comparison due; how many each has had
        self._found = Found.nothing()
        self._frozen = None  # since the first forward, where the parameters are that have always been: module and name
        self._watch_in_trace = None  # of a model from the meta device: torch.compile calls it, and leaves it out
        self._called = set()  # paths of the parts that have been called, of those that were on the meta device
        # The running backward; whether it has reached a parameter; whether a comparison is due.
        self._task, self._reached, self._due = None, False, False

    def __reduce__(self):
        # A copy of the model has other parameters.
        return ReplicaCheck, (self._context, self._split, self._summed, *self._of_modules)

    @classmethod
    def attach(cls, model: nn.Module, context: str):
        """Let a check watch the parameters of a model whose modules have been parallelized."""
        summing, outputs, inputs = [], {}, {}
        for path, module in model.named_modules():
            owners = [getattr(hook, "__self__", None) for hook in module._forward_hooks.values()]
            sums = [each for each in owners if isinstance(each, SummedOutput)]
            hooks = LocalParameters.of(module)
            sums += [hooks] if hooks is not None and hooks.sum_gradients else []
            summing += [(f"{path}." if path else "", each) for each in sums]
            if _has_parts(module) and _has_whole_output(module) and not sums:
                outputs[path] = module
            if _has_parts(module) and _takes_whole_input(module):
                inputs[path] = module
        check = cls(
            context,
            split=frozenset(name for name, parameter in model.named_parameters() if is_part(parameter)),
            summed=frozenset(f"{path}{name}" for path, hooks in summing for name in getattr(hooks, "names", ())),
            outputs=frozenset(outputs),
            inputs=frozenset(inputs),
        )
        for path, module in outputs.items():
            hook = functools.partial(check._watch_output, path)
            check._output_hooks[path] = module.register_forward_hook(hook)
        for path, module in inputs.items():
            hook = functools.partial(check._watch_input, path)
            check._input_hooks[path] = module.register_forward_hook(hook)
        for path, hooks in summing:
            hooks.watched_by(check, path)
        check._watch(_places(model))
        register_first(model, check._before)  # it looks for parameters
        if any(parameter.is_meta for parameter in model.parameters()):
            check._watch_in_trace = constant_in_traces(lambda: check._watch(_places(model)))
        for path, module in model.named_modules():
            if path and any(each.is_meta for each in module.parameters(recurse=False)):
                register_first(module, functools.partial(check._before_part, path))

    def _before(self, model, _):
        """Watch the parameters of the first forward, which may have been on the meta device, frozen or copied.

        And all of them again once others are unfrozen.
        """
        if torch.compiler.is_compiling() and self._watch_in_trace is not None:
            self._watch_in_trace()
        if _traced() or not torch.is_grad_enabled():
            return
        first = self._frozen is None
        before = list(_places(model).values()) if first else self._frozen
        self._frozen = [(module, name) for module, name in before if not _trained(getattr(module, name, None))]
        if first or len(self._frozen) < len(before):
            self._known = set()
            self._watch(_places(model))

    def _before_part(self, path: str, module, _):
        """Watch what was on the meta device in a model whose own forward doesn't run, as that of a pipeline's stage."""
        if self._frozen is None and path not in self._called and torch.is_grad_enabled() and not _traced():
            self._called.add(path)
            self._watch({f"{path}.{name}": (module, name) for name, _ in module.named_parameters(recurse=False)})

    def _watch(self, places: dict[str, tuple[nn.Module, str]]):
        """Watch these parameters beside those that are watched. places: see `_places`."""
        found = {name: getattr(module, attribute) for name, (module, attribute) in places.items()}
        trained = {name: each for name, each in found.items() if _trained(each) and not each.is_meta}
        self._linears |= {name for name, (module, _) in places.items() if isinstance(module, nn.Linear)}
        self._outer |= {name for name, (module, _) in places.items() if any(map(_has_parameters, module.children()))}
        self._known |= trained.keys()
        self._triggers, self._counts = self._known & self._split or self._known, {}
        if find_context(self._context).size == 1:
            return
        for name, parameter in trained.items():
            if is_partial(parameter) and name not in self._split:
                setattr(parameter, _UNSUMMED, _Unsummed(self._context, name))
            if parameter._backward_hooks:  # set anew: after Module.to those of a DTensor do nothing (torch 2.13)
                parameter._backward_hooks = parameter._backward_hooks
            handle = self._handles.get(name)
            if handle is None or handle.id not in (parameter._backward_hooks or ()):
                hook = functools.partial(self._arrived, name, *places[name])
                self._handles[name] = parameter.register_hook(hook)

    def watch_use(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """`value`, which is watched: what arrives of its gradient must differ between ranks to be summed over them."""
        if not _traced() and name in self._handles:
            value.register_hook(functools.partial(self._use_arrived, name))
        return value

    def watch_input(self, name: str, x):
        """Look at the input of a linear layer, whose gradient would be a part if all ranks had the same one."""
        if _traced() or name not in self._handles or name in self._found.summed_inputs or not torch.is_grad_enabled():
            return
        if type(x) is torch.Tensor and x.requires_grad and x.numel():
            self._found.summed_inputs[name] = _summary(x.detach())

    def _watch_input(self, path: str, module, inputs, output):
        """Hook on a split module: look at its whole input, in forwards 1, 2, 4, 8 and so on that have a backward."""
        y = _differentiable(output)
        if y is None or path not in self._input_hooks or not self._looks():
            return
        x, count = next(iter(inputs), None), self._forwards.get(path, 0) + 1
        self._forwards[path] = count
        if count & (count - 1) == 0 and type(x) is torch.Tensor and x.is_floating_point() and x.numel():
            y.register_hook(functools.partial(self._input_counts, path, _summary(x.detach())))

    def _input_counts(self, path: str, summary: torch.Tensor, _):
        if path in self._input_hooks and self._looks():
            self._found.inputs[path] = summary
            self._take_part()

    def _watch_output(self, path: str, module, inputs, output):
        """Hook on a split module: watch the gradient of its whole output. Of a part of it, parts would come."""
        y = _differentiable(output)
        if y is not None and path in self._output_hooks:
            y.register_hook(functools.partial(self._output_arrived, path))

    def _output_arrived(self, path: str, grad: torch.Tensor):
        if path in self._output_hooks and self._looks():
            self._record(path, grad, self._found.outputs)

    def _use_arrived(self, name: str, grad: torch.Tensor):
        if self._looks():
            self._record(name, grad, self._found.summands)

    def _arrived(self, name: str, module: nn.Module, attribute: str, grad: torch.Tensor):
        """Hook on a parameter's gradient of one backward, or of one reentrant checkpoint in it."""
        if name not in self._handles or not self._looks():  # a sharded parameter's hooks stay on what it is gathered to
            return
        parameter = getattr(module, attribute, None)
        if name not in self._split and (is_partial(parameter) or is_part(parameter)):
            self._handles.pop(name).remove()
            return
        self._reached = True
        self._record(name, grad, self._found.gradients)
        if name in self._triggers:
            count = self._counts[name] = self._counts.get(name, 0) + 1
            self._due |= count & (count - 1) == 0

    def _looks(self) -> bool:
        """Not in compiled autograd, and not under a capture, where the host can't wait."""
        return not _traced() and not find_context(self._context).capturing

    def _take_part(self):
        """In the running backward, whose end may compare."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._compare)

    def _record(self, name: str, grad: torch.Tensor, found: dict[str, torch.Tensor]):
        self._take_part()
        if isinstance(grad, DTensor) and all(placement.is_replicate() for placement in grad.placements):
            grad = grad._local_tensor
        if name not in self._split and type(grad) is torch.Tensor and grad.layout is torch.strided and grad.numel():
            found[name] = _summary(grad.detach())

    @torch.no_grad()
    def _compare(self):
        """Collective, if a comparison is due. Raises MismatchError, the same on every rank."""
        if not self._reached:  # it trains nothing, and may be of any numbers, as where torch's pipelines infer shapes
            self._found.inputs.clear()
            self._found.outputs.clear()
        self._reached = False
        if not self._due or not self._found.inputs and self._done():
            return
        mine = [{name: each.tolist() for name, each in summaries.items()} for summaries in self._found]
        self._found, self._due = Found.nothing(), False
        ranks = find_context(self._context).group.gather(mine)
        found = Found(*(_judgeable(by_rank) for by_rank in zip(*ranks, strict=True)))
        self._judge(found)
        self._comparisons += 1
        for hooks, seen in ((self._output_hooks, found.outputs), (self._input_hooks, found.inputs)):
            for path in hooks.keys() & seen.keys():
                if (hook := hooks.pop(path)) is not None:  # a copy of the model doesn't know its hooks
                    hook.remove()
        if self._comparisons == 4:
            # Layers whose output has had no gradient by now are frozen, never used or compiled. Their hooks stay and do
            # nothing: without them what is compiled would be compiled again.
            self._output_hooks.clear()
        for name in found.gradients.keys() & self._handles.keys():
            self._handles.pop(name).remove()
        self._done()

    def _judge(self, found: Found):
        """Raises MismatchError for what differs between ranks, and warns of what should."""
        if unlike := _differing(found.inputs):
            raise MismatchError(
                f"parallelize: the input of {listed(unlike)} differs between ranks, although each has a part of the "
                f"layer and takes all of the input. Ranks that share a model have different batches, or random masks: "
                f"give them the same (ranks of the data-parallel dimension alone have their own), and seed them alike. "
                f"Or a row layer before it has an adapter that was added afterwards: add it before parallelize. Or the "
                f"input is a part of a sequence, and the plan is to say so (sequence_parallel, or a style's "
                f"input_layouts=Shard(...))"
            )
        if same := _equal(found.summands):
            warnings.warn(
                f"parallelize: {listed(same)}: a style as {GRAD_ALLREDUCE!r} sums the parts of a gradient that ranks "
                f"have, but here each has the same. If that is the whole one, it counts "
                f"{len(found.summands[same[0]])} times; take the style off modules that don't lie between a column and "
                f"a row layer. (Inputs or weights that are all equal, as of ones, make parts equal, too)",
                stacklevel=3,
            )
        if alike := _equal(found.summed_inputs):
            warnings.warn(
                f"parallelize: {listed(alike)}: the style {GRAD_ALLREDUCE!r} sums the gradient of a linear layer's "
                f"parameters, but not that of its input, which is the same on all ranks. If the output goes to each "
                f"rank's own heads, all that is before the layer gets a part of its gradient: give it {FOR_HEADS!r} "
                f"instead, and take the style off what is before it. (Inputs of equal numbers, as ones, are the same, "
                f"too)",
                stacklevel=3,
            )
        differing = _differing(found.gradients)
        if read := [name for name in differing if name in self._summed]:
            raise MismatchError(
                f"parallelize: the gradients of {listed(read)} differ between ranks in spite of the style "
                f"{GRAD_ALLREDUCE!r}, which concerns what a module's own forward reads; pass the parameter through "
                f"copy_to_tensor_model_parallel_region where it is read elsewhere"
            )
        if differing and (linear := next((name for name in differing if name in self._linears), None)):
            raise MismatchError(
                f"parallelize: the gradients of {listed(differing)} differ between ranks, so that these parameters "
                f"would drift apart. {linear} is that of a linear layer that is the same on all ranks. If its output "
                f"goes to each rank's own heads, as keys and values of all heads, have the output's gradient summed, "
                f"which makes those before it whole: plan | {{{_pattern(linear)!r}: {FOR_HEADS!r}}}, where the plan of "
                f"'auto' is model.tp_plan; ReplicatedForHeads() in parallelize_module's; "
                f"copy_to_tensor_model_parallel_region(output) in a forward. If its input is each rank's own, "
                f"{GRAD_ALLREDUCE!r}. Otherwise ranks that share a model have different inputs or random masks"
            )
        if parts := _differing(found.outputs):
            raise MismatchError(
                f"parallelize: the gradient of the output of {listed(parts)} differs between ranks, although all have "
                f"all of the output, so that gradients are wrong from there on. If each rank's own heads or features "
                f"read it, as keys and values of all heads, leave the layer whole, and have its output's gradient "
                f"summed: plan | {{{_pattern(f'{parts[0]}.weight')!r}: {FOR_HEADS!r}}}, or pass the output through "
                f"copy_to_tensor_model_parallel_region. Otherwise ranks that share a model have different inputs or "
                f"random masks"
            )
        if differing:
            outer = [name for name in differing if name in self._outer]
            patterns = dict.fromkeys(_pattern(name) for name in differing if name not in outer)
            more = ", ".join(f"{pattern!r}: {GRAD_ALLREDUCE!r}" for pattern in list(patterns)[:4])
            ways = [
                f"give its module a style in the plan that sums the gradient: plan | {{{more}}}, where the plan of "
                f"'auto' is model.tp_plan; in parallelize_module's Replicated(sum_gradients=True) or SequenceParallel()"
            ] if patterns else []  # fmt: skip
            if outer:  # the style of their modules would go to those inside as well
                ways.append(f"pass {listed(outer)} through copy_to_tensor_model_parallel_region where it is read")
            raise MismatchError(
                f"parallelize: the gradients of {listed(differing)} differ between ranks, so that these parameters "
                f"would drift apart. Where each rank uses a parameter for its own features or rows (a norm over heads, "
                f"between a column and a row layer), {'; and '.join(ways)}. Otherwise ranks that share a model have "
                f"different inputs or random masks, or a parameter is split by hand (mark it tensor_model_parallel = "
                f"True)"
            )

    def _done(self) -> bool:
        """Whether all that is watched has been compared. Nothing is watched then, until a part comes that is new."""
        if done := self._handles.keys() <= self._split and not self._output_hooks:
            self._known = set()
            while self._handles:
                self._handles.popitem()[1].remove()
        return done


_steps = weakref.WeakKeyDictionary()  # how many each optimizer has made


class Trained(NamedTuple):
    """A model's parameter that an optimizer has stepped with, and its gradient, None if it has had none.

    cut: whether `grad` is that of a piece, which other ranks may have cut otherwise; the name says which.
    """

    name: str
    parameter: torch.Tensor
    grad: torch.Tensor | None
    cut: bool = False

    @classmethod
    def piece(cls, name: str, parameter: torch.Tensor, grad: torch.Tensor | None, start: int, stop: int) -> "Trained":
        """Of elements `start` to `stop`, or of none."""
        if stop - start == parameter.numel():
            return cls(name, parameter, grad)
        return cls(f"{name}[{start}:{stop}]", parameter, grad if start < stop else None, True)


@register_optimizer_step_post_hook  # the sum may be made in the step, or in a hook of it
@torch._disable_dynamo
def _check_step(optimizer, *_):
    check_step(f"{type(optimizer).__name__}.step", optimizer, functools.partial(_trained_by, optimizer))


@torch.no_grad()
def check_step(step: str, optimizer, trained: Callable[[], list[Trained]]):
    """Look at the gradients that an optimizer has stepped with.

    Collective after steps 1, 2, 4 and 8 of an optimizer that has parts of layers, or what ReplicaCheck leaves to it.
    Raises MismatchError where nobody has summed the gradients of these: ranks train different values. It warns of
    gradients of others, of which ranks may have their own in a model that parallelize has not seen.

    optimizer: by which steps are counted.
    """
    count = _steps[optimizer] = _steps.get(optimizer, 0) + 1
    if count > 8 or count & (count - 1):
        return
    trained, marked = trained(), {}
    for each in trained:
        if not each.cut and (unsummed := getattr(each.parameter, _UNSUMMED, None)):
            marked.setdefault(unsummed.context, {})[unsummed.name] = each.parameter
    parts = {getattr(each.parameter, RANKS, None) for each in trained if is_split(each.parameter)} - {None}
    contexts = [ctx for ctx in open_contexts() if not ctx.capturing] if marked or parts else []
    for ctx in contexts:
        if ctx.name in marked:
            _compare_marked(ctx, step, marked[ctx.name])
    over = {tuple(ctx.group.global_ranks): ctx for ctx in contexts if ctx.name in parts}
    if len(over) == 1:  # the layers are over the same ranks
        _compare_wholes(*over.values(), step, trained)


def _compare_marked(ctx: Context, step: str, marked: dict[str, torch.Tensor]):
    """Collective. Raises MismatchError for gradients that differ; others are not compared again."""
    grads = {name: gradient_of(parameter) for name, parameter in marked.items()}
    (found,) = _gathered(ctx, step, [_summaries(grads)])
    if differing := _differing(found):
        raise MismatchError(
            f"{step}: the gradients of {listed(differing)} differ between ranks, so these part. They are marked "
            f"sequence_parallel, and each rank has the sum over its own rows: call "
            f"all_reduce_sequence_parallel_grads(model) between backward and the step"
        )
    for name in found:
        delattr(marked[name], _UNSUMMED)


def _compare_wholes(ctx: Context, step: str, trained: list[Trained]):
    """Collective. Warns of gradients that differ, of parameters that are no parts; and of parts that don't differ, nor
    their gradients.
    """
    parts = [each for each in trained if is_split(each.parameter) and not each.cut and each.grad is not None]
    values = {each.name: each.parameter.detach() for each in parts if each.parameter.dim() > 1}
    wholes = [each for each in trained if not (is_split(each.parameter) or _is_over(each.parameter, ctx))]
    by_name = values, {each.name: each.grad for each in parts}, {each.name: each.grad for each in wholes}
    cut = any(each.cut for each in trained)
    values, grads, found = _gathered(ctx, step, [*map(_summaries, by_name)], cut)
    if same := [name for name in _equal(values) if name in _equal(grads)]:
        warnings.warn(
            f"{step}: {listed(same)} are the same on all ranks, and so are their gradients, so that the model has the "
            f"features of one rank, several times. Each rank has its part of a weight; draw them from other random "
            f"numbers on each, as by Megatron's get_cuda_rng_tracker, or as parts of one whole, as these layers do at "
            f"construction and in reset_parameters()",
            stacklevel=5,
        )
    if (factors := _factors(found)) is not None:
        warnings.warn(
            f"{step}: the gradients of what ranks have in common differ between them by a factor, "
            f"{', '.join(f'{factor:.4g}' for factor in factors.tolist())}, as where each clips by the norm of its own "
            f"parts, which torch's clip_grad_norm_ does; call tkernels.layers.clip_grad_norm_(parameters, max_norm, "
            f"mesh=...) in its place",
            stacklevel=5,
        )
    elif differing := _differing(found):
        warnings.warn(
            f"{step}: the gradients of {listed(differing)} differ between ranks that have parts of the same layers, so "
            f"that these parameters part. Where each rank reads one for its own features or rows, pass it through "
            f"copy_to_tensor_model_parallel_region(), or mark it sequence_parallel = True and call "
            f"all_reduce_sequence_parallel_grads(model) before the step. Otherwise these ranks have different batches "
            f"or random masks. If each rank is to have its own parameter, mark it tensor_model_parallel = True",
            stacklevel=5,
        )


def _summaries(tensors: dict[str, torch.Tensor | None]) -> dict[str, list[float]]:
    """Of each what `_summary` says; nothing of those that are None, sparse or empty."""
    found = {}
    for name, tensor in tensors.items():
        tensor = getattr(tensor, "_local_tensor", tensor)
        dense = tensor is not None and tensor.layout is torch.strided and tensor.numel()
        found[name] = _summary(tensor).tolist() if dense else []
    return found


def _gathered(ctx: Context, step: str, summaries: list[dict], cut: bool = False) -> list[dict[str, torch.Tensor]]:
    """Collective. Several ranks' summaries, by name, as `_judgeable` has them.

    cut: whether some are of pieces. Where a rank has such, only those count that all ranks have cut alike.
    """
    try:
        summaries, cut = zip(*ctx.group.gather((summaries, cut), step, ctx.timeout_s), strict=True)
    except OutOfStepError as error:
        raise TkernelsError(
            f"{error}. Ranks that have parts of the same layers step together; torch.amp.GradScaler skips the step of "
            f"one alone, where torch's ShardedGradScaler(process_group=...) skips that of all"
        ) from error
    found = []
    for by_rank in zip(*summaries, strict=True):
        alike = set.intersection(*({*each} for each in by_rank))
        judgeable = _judgeable(by_rank).items()
        found.append({name: each for name, each in judgeable if name in alike or not any(cut)})
    return found


def _trained_by(optimizer) -> list[Trained]:
    """An optimizer's parameters by the names that it was given, else by number and shape; of shards, the pieces."""
    given = [name for group in optimizer.param_groups for name in group.get("param_names", ())]
    parameters = parameters_of(optimizer)
    if len(given) != len(parameters):
        given = [f"parameter {number} {[*each.shape]}" for number, each in enumerate(parameters)]
    found = []
    for name, parameter in zip(given, parameters, strict=True):
        pieces_of = getattr(owner_of(parameter), "pieces_of", lambda _: None)
        found += pieces_of(parameter) or [Trained(name, parameter, gradient_of(parameter))]
    return found


def _is_over(parameter: torch.Tensor, ctx: Context) -> bool:
    """Whether a parameter is a DTensor over several of these ranks."""
    return isinstance(parameter, DTensor) and num_ranks_of(parameter, ctx) > 1


def _differentiable(output) -> torch.Tensor | None:
    """The tensor that a module has returned, alone or before others, if it takes a gradient; None in a trace."""
    y = output[0] if isinstance(output, tuple) else output
    return y if not _traced() and isinstance(y, torch.Tensor) and y.requires_grad else None


def _has_parts(module: nn.Module) -> bool:
    """Whether each rank has a part of a module's own parameters."""
    return any(is_part(parameter) for parameter in module._parameters.values() if parameter is not None)


def _has_whole_output(module: nn.Module) -> bool:
    """Whether a module of which each rank has a part returns all of its output on each."""
    if (layout := getattr(module, "_layout", None)) is not None:
        return layout.output.is_replicate()
    return not getattr(module, "sequence_parallel", True) and getattr(module, "gather_output", True)


def _takes_whole_input(module: nn.Module) -> bool:
    """Whether a module of which each rank has a part takes the same input on each."""
    if (layout := getattr(module, "_layout", None)) is not None:
        return layout.input.is_replicate()
    return not getattr(module, "sequence_parallel", True) and not getattr(module, "input_is_parallel", False)


def _places(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Where each parameter is. (Not a weak reference to it, which would keep Module.to from swapping a DTensor.)"""
    modules = dict(model.named_modules(remove_duplicate=False))
    parts = {name: name.rpartition(".") for name, _ in model.named_parameters()}
    return {name: (modules[path], attribute) for name, (path, _, attribute) in parts.items()}


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _trained(parameter) -> bool:
    """Whether a module's attribute is a parameter that takes gradients, and none of functional_call's tensors."""
    return isinstance(parameter, nn.Parameter) and parameter.requires_grad


def _pattern(name: str) -> str:
    """Of a parameter's module, as a plan names it and its like."""
    path = name.rpartition(".")[0]
    last = path.rpartition(".")[2]
    return path if last.isdigit() or last == path else f"*.{last}"


def _traced() -> bool:
    """Whether this code is being compiled, or runs under a transform of torch.func."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def has_others_hooks(parameter: torch.Tensor) -> bool:
    """Whether a parameter has hooks on its gradient beside those of ReplicaChecks."""
    owners = (getattr(hook, "func", None) for hook in (parameter._backward_hooks or {}).values())
    return any(not isinstance(getattr(owner, "__self__", None), ReplicaCheck) for owner in owners)


def _summary(grad: torch.Tensor) -> torch.Tensor:
    """[2 * slices]: of each slice the sum, over the root of its length, and the root of its mean square.

    A difference of n independent elements changes the first as much as one element of it does.
    """
    flat = (torch.view_as_real(grad) if grad.is_complex() else grad).reshape(-1)
    parts = flat.tensor_split(min(SLICES, flat.numel()))
    dtype = torch.promote_types(flat.dtype, torch.float32)
    sums = [part.sum(dtype=dtype) for part in parts]
    norms = [torch.linalg.vector_norm(part, dtype=dtype) for part in parts]
    lengths = flat.new_tensor([part.numel() for part in parts] * 2, dtype=dtype)
    return torch.stack(sums + norms) / lengths.sqrt()


def _judgeable(by_rank: tuple[dict[str, list]]) -> dict[str, torch.Tensor]:
    """Name -> summaries [R, 2 * slices], zeros where a rank has none or fewer. Leaves out zeros and what overflowed."""
    found = {}
    for name in dict.fromkeys(name for each in by_rank for name in each):
        rows = [each.get(name, ()) for each in by_rank]
        longest = max(map(len, rows))
        rows = [row if len(row) == longest else [0.0] * longest for row in rows]
        values = torch.tensor(rows, dtype=torch.float64)
        if values.isfinite().all() and values.any():
            found[name] = values
    return found


def _equal(found: dict[str, torch.Tensor]) -> list[str]:
    """The names of what is the same on all ranks, and of more than one element."""
    return [name for name, values in found.items() if values.shape[1] > 2 and (values == values[0]).all()]


def _factors(gradients: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """By rank, that by which all its gradients are those of rank 0, if that is far from 1 beside how they differ."""
    if sum(values.shape[1] for values in gradients.values()) < 8:
        return None
    sizes = torch.cat([values.chunk(2, 1)[1] for values in gradients.values()], 1)
    sizes = sizes[:, sizes.any(0)]  # rows of an embedding that nobody has looked up are zero
    factors = sizes.norm(dim=1) / sizes[0].norm()
    away, rest = (factors - 1).abs().max(), (sizes - factors[:, None] * sizes[0]).abs() / sizes[0]
    return factors if away > 1e-4 and rest.max() < away / 8 else None


def _differing(gradients: dict[str, torch.Tensor]) -> list[str]:
    """The names of gradients that differ between ranks by more than rounding.

    A gradient that is zero but for rounding, as that of a key's bias, is judged by those of its module and, where it is
    alone there, by the largest of all.
    """
    largest = {}
    for name, values in gradients.items():
        module = name.rpartition(".")[0]
        largest[module] = max(largest.get(module, 0.0), values.chunk(2, 1)[1].max().item())
    # It is a sum of terms that cancel, each rounded to fp32 at best. They may be as large as any other gradient.
    noise = 64 * torch.finfo(torch.float32).eps * max(largest.values(), default=0.0)
    differing = []
    for name, values in gradients.items():
        sums, sizes = values.chunk(2, 1)
        allowed = TOLERANCE * (sums.abs() + sizes).amax(0) + EPS * largest[name.rpartition(".")[0]] + noise
        spread = values.amax(0) - values.amin(0)
        if (spread > allowed.repeat(2)).any():
            differing.append(name)
    return differing
