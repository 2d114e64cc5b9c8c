"""parallelize_module: torch's, except that a plan is refused by name, on every rank, before anything has changed."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    style,
)

from tkernels.comm import Context, MeshLike
from tkernels.comm.arguments import check_type, whole
from tkernels.comm.group import listed
from tkernels.layers.tensor_parallel.dtensors import (
    as_mesh_and_context,
    is_part,
    let_grad_scaler_see_all_ranks,
    remember_mesh,
)
from tkernels.layers.tensor_parallel.heads import check_heads
from tkernels.layers.tensor_parallel.replica_check import ReplicaCheck
from tkernels.layers.tensor_parallel.replicas import ReadsChildren
from tkernels.layers.tensor_parallel.siblings import ColwiseParallelGroup, Share
from tkernels.layers.tensor_parallel.styles import (
    ColwiseParallel,
    ForHeads,
    Replicated,
    ReplicatedForHeads,
    RowwiseParallel,
    Style,
    reads_its_parameters,
)

Given = tuple[str, nn.Module, ParallelStyle]  # a module's path, the module, its style
# Of these a module may have several: they leave its parameters alone.
PREPARE = PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput, ColwiseParallelGroup, Share
PREPARE += (ReplicatedForHeads,)


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Collective. torch's parallelize_module: apply styles to modules of `module` in place, and return it.

        parallelize_module(model, mesh["tp"], {"layers.*.wq": ColwiseParallel(), "layers.*.wo": RowwiseParallel()})

    device_mesh: of one dimension; a process group or a Context stands for one. None: that of a surrounding `with mesh`.
    parallelize_plan: one style for `module`, or a dict of paths to styles, ours and torch's. Each name in a path is a
        pattern (fnmatch); "" is `module` itself. A module on the meta device stays there: to_empty() comes afterwards.
    src_data_rank: the rank in the mesh whose weights all ranks get their parts of. None: each takes its parts of its
        own weights, which must be equal on all ranks.

    Parameters that are tied stay tied where all of them get the same placement. The parameters in no plan stay as they
    are. The gradients of those that are the same on all ranks are compared over ranks at the end of the first backward;
    where they differ by more than rounding, MismatchError names them and a style that sums them.

    Raises, on every rank before anything has changed: ValueError for a path that matches nothing, for a module that two
    paths match (unless they prepare its inputs or outputs), for features that leave a rank none, for tied parameters of
    which the plan would split one, for an attention whose heads, by module.config, don't divide by the ranks; TypeError
    for a module that its style can't be given to; MismatchError for plans or models that differ between ranks.
    """
    plan = {"": parallelize_plan} if isinstance(parallelize_plan, ParallelStyle) else parallelize_plan
    return apply(module, device_mesh, lambda: _resolve(module, plan), src_data_rank)


def apply(
    module: nn.Module,
    mesh: MeshLike,
    resolve: Callable[[], list[Given]],
    src_data_rank: int | None,
    replicate_rest: bool = False,
) -> nn.Module:
    """Collective. Apply the styles that `resolve` returns, or raise what it raises on every rank.

    replicate_rest: make DTensors of the other parameters too, of all modules that use their own.
    """
    mesh, ctx = as_mesh_and_context(mesh)
    with ctx.group.checking("parallelize"):
        if mesh.device_type != ctx.device.type:
            raise ValueError(
                f"parallelize_module: the mesh is on {mesh.device_type}, but kernels run on {ctx.device.type}; make it "
                f"with init_device_mesh({ctx.device.type!r}, ...)"
            )
        if src_data_rank is not None:
            src_data_rank = whole("parallelize_module: src_data_rank", src_data_rank, most=ctx.size - 1)
        given = _complete(resolve())
        if replicate_rest:
            taken = {id(target) for _, target, each in given if not isinstance(each, PREPARE)}
            rest = [(path, each) for path, each in Replicated.owners(module) if id(each) not in taken]
            given += [(path, each, Replicated()) for path, each in rest if reads_its_parameters(each)]
        columns = [(path, each) for path, _, each in given if isinstance(each, ColwiseParallel)]
        of_heads = {f"{path}.{name}" for path, _, each in given if isinstance(each, ForHeads) for name in each.names}
        split = [path for path, each in columns if each.output_layouts[0].is_shard()]
        check_heads(module, split, ctx.size, of_heads=of_heads)
        for path, target, each in given:
            if isinstance(each, Style):
                each.check(path, target, ctx.size)
        tied = _tied(module, given)
    _check_agreement(module, given, ctx)
    for _, target, each in given:
        each.src_data_rank, each.context = src_data_rank, ctx.name
        if not isinstance(each, Replicated):
            each._apply(target, mesh)
        elif reads_its_parameters(target):  # modules inside are given on their own, perhaps to another style
            each.apply_to_own(target, mesh)
    for (first, name), *others in tied:
        for other, other_name in others:
            other.register_parameter(other_name, first._parameters[name])
    call_layers(module)
    remember_mesh(module, mesh)
    ReplicaCheck.attach(module, ctx.name)
    ReadsChildren.attach(module)
    let_grad_scaler_see_all_ranks()
    return module


def call_layers(model: nn.Module):
    """Have torch's encoder layers call the split linears in them, with no nested tensors.

    In inference they would read the weights, of which a rank has a part.
    """
    read = []
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            if any(is_part(each) for child in module.children() for each in child.parameters(recurse=False)):
                module.activation_relu_or_gelu = 0  # torch's number of an activation that its fast path doesn't know
                read.append(module)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and any(layer in read for layer in module.layers):
            module.use_nested_tensor = False


def _resolve(module: nn.Module, plan: Mapping[str, ParallelStyle]) -> list[Given]:
    """What a plan gives, in its order. Raises ValueError or TypeError if it doesn't fit the module."""
    check_type("parallelize_module: module", module, nn.Module, "an nn.Module")
    words = "a ParallelStyle, or a dict of paths to them"
    check_type("parallelize_module: parallelize_plan", plan, Mapping, words)
    given, matched = [], {}
    for pattern, each in plan.items():
        check_type("parallelize_module: a path of the plan", pattern, str, "a module's name, or a pattern of names")
        check_type(f"parallelize_module: the style of {pattern!r}", each, ParallelStyle, "a ParallelStyle")
        found = {"": module}
        for token in pattern.split(".") if pattern else ():
            parents = found
            found = {
                f"{path}.{name}".lstrip("."): child
                for path, parent in parents.items()
                for name, child in parent.named_children()
                if fnmatchcase(name, token)
            }
            if not found:
                names = list(dict.fromkeys(name for parent in parents.values() for name, _ in parent.named_children()))
                raise ValueError(
                    f"parallelize_module: {pattern!r} matches no module: {token!r} is none of {listed(names) or 'none'}"
                )
        for path, target in {id(target): (path, target) for path, target in found.items()}.values():
            before = matched.setdefault(id(target), {})
            if sum(not isinstance(other, PREPARE) for other in (each, *before.values())) > 1:
                raise ValueError(
                    f"parallelize_module: {path!r} is matched by both {next(iter(before))!r} and {pattern!r}"
                )
            before[pattern] = each
            given.append((path, target, each))
    return given


def _complete(given: list[Given]) -> list[Given]:
    """The modules that compute what a style is given to: PEFT's layers are several, and what is replicated may be many.

    Replicated comes last, for what no other style has.
    """
    complete, replicated, shared = [], [], []
    for path, target, each in given:
        if isinstance(each, ColwiseParallelGroup):
            members = each.members(path, target)
            complete += [(where, linear, each.style) for where, linear in members]
            shared.append((path, target, Share([linear for _, linear in members])))
            continue
        (replicated if isinstance(each, Replicated) else complete).extend(_peft(path, target, each))
    taken = set()
    for path, target, each in complete:
        if not isinstance(each, PREPARE):
            if id(target) in taken:
                raise ValueError(f"parallelize: {path!r} is given two styles, one as a part of a LoRA layer or group")
            taken.add(id(target))
    for path, target, each in sorted(replicated, key=lambda given: -len(given[0])):  # what is inside comes first
        own = [(inner, module) for inner, module in Replicated.owners(target) if id(module) not in taken]
        if not own:
            raise ValueError(f"Replicated: {path!r} has no parameters of its own that could be replicated")
        complete += [(f"{path}.{inner}".strip("."), module, each) for inner, module in own]
        taken |= {id(module) for _, module in own}
    return complete + shared


def _peft(path: str, module: nn.Module, each: ParallelStyle) -> list[Given]:
    """The linears in a LoRA layer of PEFT, B(A(x)) beside the base layer, each with its style; or what is given.

    Of a module in its modules_to_save, the original and its trained copies.
    """
    copies = getattr(module, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict) and not isinstance(each, PREPARE):
        trained = [(f"{path}.modules_to_save.{name}", copy, each) for name, copy in copies.items()]
        return [(f"{path}.original_module", module.original_module, each), *trained]
    adapters = {name: getattr(module, name, None) for name in ("lora_A", "lora_B")}
    if not isinstance(each, ColwiseParallel | RowwiseParallel):
        return [(path, module, each)]
    if not all(isinstance(linears, nn.ModuleDict) for linears in adapters.values()):
        return [(path, module, each)]
    if getattr(module, "lora_variant", None):
        raise TypeError(
            f"parallelize: {path!r} is a {type(module).__module__}.{type(module).__name__} with the variants "
            f"{dict(module.lora_variant)}, of which plain LoRA alone can be split; use LoraConfig without them"
        )
    colwise = isinstance(each, ColwiseParallel)
    split, whole = ("lora_B", "lora_A") if colwise else ("lora_A", "lora_B")
    rows = each.input_layouts[0] if colwise else each.output_layouts[0]
    other = Replicated(sum_gradients=rows.is_shard())  # it has this rank's rows alone
    parts = [(f"{path}.base_layer", module.base_layer, each)]
    parts += [(f"{path}.{split}.{name}", linear, each.in_float8(None)) for name, linear in adapters[split].items()]
    return parts + [(f"{path}.{whole}.{name}", linear, other) for name, linear in adapters[whole].items()]


def _placement(each: ParallelStyle, module: nn.Module, name: str) -> Placement | None:
    """Of a module's parameter once a style is applied. None: this is not known."""
    if isinstance(each, Style):
        return each.placement(module, name)
    embedding = isinstance(module, nn.Embedding)
    if isinstance(each, style.ColwiseParallel):
        return Shard(1) if embedding else Shard(0)
    if isinstance(each, style.RowwiseParallel):
        return Shard(0) if embedding else Shard(1) if name == "weight" else Replicate()
    return Replicate() if isinstance(each, style.SequenceParallel) else None


def _tied(module: nn.Module, given) -> list[list[tuple[nn.Module, str]]]:
    """The places of each parameter that has several, all of which the styles split alike; ValueError if they do not."""
    styles = {id(target): each for _, target, each in given if not isinstance(each, PREPARE)}
    places = {}
    for path, target in module.named_modules():
        for name, parameter in target._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((f"{path}.{name}".lstrip("."), target, name))
    tied = []
    for group in places.values():
        planned = {full: id(target) in styles for full, target, _ in group}
        if len(group) == 1 or not any(planned.values()):
            continue
        placements = {
            full: _placement(styles[id(target)], target, name) if planned[full] else "whole"
            for full, target, name in group
        }
        if None in placements.values():  # a style of somebody else's, which may do anything
            continue
        if len(set(placements.values())) > 1:
            what = " and ".join(f"{full} ({placement})" for full, placement in placements.items())
            raise ValueError(
                f"parallelize_module: {what} are one parameter, which can have one placement only; give all of them "
                f"styles of the same placement (for an embedding and its head RowwiseParallel and ColwiseParallel), or "
                f"untie them"
            )
        tied.append([(target, name) for _, target, name in group])
    return tied


def _check_agreement(module: nn.Module, given, ctx: Context):
    """Collective. Raises MismatchError unless all ranks apply the same styles to parameters of the same kinds."""
    styles = {
        path: type(each).__qualname__ if type(each).__repr__ is object.__repr__ else repr(each)
        for path, _, each in given
    }
    kinds = {
        name: (tuple(parameter.shape), parameter.dtype, parameter.requires_grad, parameter.is_meta)
        for name, parameter in module.named_parameters()
    }
    ctx.group.check_alike("parallelize_module", "plans", styles, "pass one plan on every rank")
    ctx.group.check_alike("parallelize_module", "models", kinds, "make the same model, on the same kind of device")
