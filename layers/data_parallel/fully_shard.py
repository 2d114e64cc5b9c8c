"""`fully_shard`: torch's FSDP2 by its own names, over this library's collectives.

    from tkernels.layers import fully_shard                              # the only line that differs from torch's

    for block in model.layers:
        fully_shard(block, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(model, mesh=mesh["dp"], mp_policy=...)
    optimizer = torch.optim.AdamW(model.parameters())                    # DTensors, with their names and shapes

What runs underneath is engine.py; what it moves, param_group.py and layout.py. A face of another library's shape
(FullyShard, ZeroOptimizer) calls `fully_shard` and `unit_of`, and adds no behaviour.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, UnshardHandle
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tkernels.comm import Context, as_context
from tkernels.comm.arguments import check_flags, check_type, several, whole
from tkernels.comm.collectives import SUMMED
from tkernels.comm.group import checksum
from tkernels.layers.data_parallel.engine import STRATEGIES, Engine, Options, Unit, unit_of
from tkernels.layers.data_parallel.float8_group import Float8Group
from tkernels.layers.data_parallel.param_group import DataParallelRanks, Parameter, ParamGroup, param_dtype_of
from tkernels.layers.marks import check_replicas, is_split
from tkernels.layers.owners import check_free, own
from tkernels.layers.tensor_parallel.dataflow import DeferringModule
from tkernels.layers.tensor_parallel.dtensors import let_grad_scaler_see_all_ranks, mesh_of
from tkernels.layers.tensor_parallel.float8 import Float8, gathered_by

_SHARDED = "_tkernels_sharded"  # on an original parameter that has been sharded: its name


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | dist.ProcessGroup | Context | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # it is frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims=None,
    strategy: str = "parameters",
    prefetch: int = 1,
    overlap: bool = True,
):
    """Collective. Split a module's parameters over the ranks of `mesh`; they are whole only while it computes.

    As torch.distributed.fsdp.fully_shard: no wrapper, called on the blocks first and on the model last. Each call makes
    one unit of the parameters that are in no unit yet; a list of modules makes one unit. Between iterations the module
    has its parameters as DTensors with their own names and shapes, `Shard(0)` on `mesh`, and gradients as DTensors in
    the parameters' dtype, their mean over ranks. Parameters that are DTensors over tensor-parallel ranks, another
    dimension of the same mesh, are split again, and are DTensors over both; plain ones of the same model, as
    parallelize_module leaves them, count as replicated.

    module: changed in place, and returned; its class becomes a subclass that is an FSDPModule. On the meta device until
        `to_empty` is fine. The ranks' values may differ: each keeps its own rows.
    mesh: a DeviceMesh of one dimension, or of two, (replicas, shards); or a group or context, of which one is made.
        None: all ranks.
    reshard_after_forward: whether to give the memory back between forward and backward. None: yes with
        strategy="parameters", but for the root, the module whose forward runs first. False takes memory of the unit's
        own for good, and keeps it after a forward without gradients too, as torch's does: what is written through
        `.data` then is seen after `reshard()`. Of torch's integers, the number of ranks that parts are kept over, all
        is True and 1 is False.
    strategy: what is split over the ranks.
        "parameters": all: parameters, gradients and optimizer states (ZeRO 3).
        "gradients": the same, but parameters are gathered once in a step, in the order of their use, and in each
            forward without gradients (ZeRO 2).
        "optimizer": the same, and gradients accumulate whole, to be reduced once in a step (ZeRO 1).
        "replicate": nothing. Parameters are DTensors too, `Replicate()`; gradients are all-reduced once a step (DDP).
        A step ends with every backward, unless set_is_last_backward(False) was called before.
    mp_policy: torch's. The optimizer's parameters keep their dtype, so fp32 parameters with param_dtype=torch.bfloat16
        are what elsewhere is called master weights. reduce_dtype must be float32, float16 or bfloat16. If it is wider
        than the parameters, backwards add up in it, in memory of as many elements beside `.grad`.
    ignored_params: parameters to leave alone. One set may serve the calls on all parts of a model; the first forward
        warns of what is in no part.
    prefetch: of the root: units that are gathered ahead, in the order learned from the last iteration. Each takes
        memory for one more unit.
    overlap: of the root: communicate on a stream of its own. False uses one stream, and gives the same bits.

    Weights of layers that multiply in FP8 are gathered in FP8 where their recipe says so: see ColwiseParallel.

    All ranks must run the same units in the same order; inside a unit they may use different parameters, and the
    gradient of one that a rank didn't use counts as zero. A loss must come from outputs of the module or its units.
    After a forward or backward that failed the next forward begins afresh, without a call of reset_iter_state.

    Raises ValueError or TypeError on every rank, before anything is changed, for what can't be sharded: CPU offload,
    shard_placement_fn, dp_mesh_dims, a reshard_after_forward of some of the ranks, parameters without a dimension or
    elements, parameters tied across units (shard those modules as one list), layers that defer weight gradients.
    MismatchError if the ranks' modules differ, or their parts of plain parameters that are split over other ranks.
    """
    modules = tuple(module) if isinstance(module, (list, tuple)) else (module,)
    ranks = ranks_of(mesh, strategy)
    device = ranks.contexts[0].device
    with ranks.checking():
        _check_policy(mp_policy)
        check_type("fully_shard: strategy", strategy, str, "a name")
        if strategy not in STRATEGIES:
            raise ValueError(f"fully_shard: strategy={strategy!r} is unknown; use one of {', '.join(STRATEGIES)}")
        reshard_after_forward = _reshards(reshard_after_forward, ranks.parts)
        _refuse_options(shard_placement_fn, offload_policy, dp_mesh_dims)
        whole("fully_shard: prefetch", prefetch)
        check_flags("fully_shard", overlap=overlap)
        managed = _managed_modules(modules)
        parameters, places = _parameters_of(modules, managed, ignored := _ignored(ignored_params))
        for part in managed:
            _check_module(part)
        float8 = {}
        for name, parameter in parameters.items():
            _check_parameter(name, parameter, mp_policy, ranks.mesh)
            float8[name] = None if ranks.shard is None else gathered_by(f"fully_shard: {name}", places[name])
            for ctx in ranks.contexts:
                check_replicas(f"fully_shard: {name}", parameter, ctx.group.global_ranks)
    options = dict(mp_policy=repr(mp_policy), strategy=strategy, reshard_after_forward=reshard_after_forward)
    layouts = {
        name: f"{tuple(p.shape)} {p.dtype} {p.requires_grad} {_gathered_as(float8[name]) or ''}".rstrip()
        for name, p in parameters.items()
    }
    plain = ((name, p) for name, p in parameters.items() if not (isinstance(p, DTensor) or p.is_meta))
    split = {name: checksum(parameter) for name, parameter in plain if is_split(parameter)}
    for ctx in ranks.contexts:
        for alike in (options, layouts):  # a parameter may have an option's name
            ctx.group.check_alike("fully_shard", "models", alike, "shard the same model alike")
        ctx.group.check_alike(
            "fully_shard", "parts of tensors (tensor_model_parallel)", split,
            "pass a mesh of data-parallel ranks, which have the same parts, with the same values",
        )  # fmt: skip

    beside = _tensor_parallel_mesh(modules, ranks.mesh)
    by_kind: dict[tuple, list[Parameter]] = {}
    for name, parameter in parameters.items():
        kind = parameter.dtype, param_dtype_of(parameter.dtype, mp_policy), _gathered_as(float8[name])
        part = Parameter.of(name, places[name], parameter, ranks, beside, device, float8[name])
        by_kind.setdefault(kind, []).append(part)
        setattr(parameter, _SHARDED, name)
    groups = []
    for kind, parameters in by_kind.items():
        names = [str(each).removeprefix("torch.") for each in dict.fromkeys(kind) if each is not None]
        made = ParamGroup if parameters[0].float8 is None else Float8Group
        groups.append(made("-".join(names), parameters, ranks, mp_policy))
    options = STRATEGIES[strategy], Options(prefetch, overlap)
    unit = Unit(modules, groups, ranks, mp_policy, reshard_after_forward, *options, device)
    for part in managed if ignored else ():
        unit.ignored += [(part, name) for name, each in part._parameters.items() if each in ignored]
    unit.unfound = ignored.difference(*(part._parameters.values() for part in managed))
    for group in groups:
        own([parameter.sharded for parameter in group.parameters], unit)
    for part in managed:
        for buffer in part.buffers(recurse=False):
            if buffer.device.type != "meta":
                buffer.data = buffer.to(device)
    for each in modules:
        each.__class__ = _sharded_class(type(each))
        vars(each).setdefault(STATE_KEY, {})[fsdp.fully_shard.__wrapped__] = _PipelinesState(unit)
    unit.settle()
    let_grad_scaler_see_all_ranks()
    return module


class ShardedModule(FSDPModule):
    """What fully_shard adds to a module's class: torch's FSDPModule, with the methods that mean something here.

    The others of torch's FSDPModule raise NotImplementedError. deepcopy is refused, as by torch.
    """

    def __new__(cls, *args, **kwargs):
        """An object of the original class: a slice of a Sequential, say, is no unit."""
        made = cls._unsharded.__new__(cls._unsharded)
        made.__init__(*args, **kwargs)
        return made

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Collective. Gather this unit's parameters, until `reshard` or its next forward or backward has ended.

        async_op: return a handle; the module has the parameters once its `wait` was called, or in forward.
        """
        unit = unit_of(self)
        unit.unshard()
        handle = _Handle(unit)
        return handle if async_op else handle.wait()

    def reshard(self):
        """Give the memory of this unit's parameters back; the module has the DTensors again."""
        unit_of(self).reshard()

    def reset_iter_state(self):
        """Give everything back, and discard gradients that have not been reduced."""
        if (engine := unit_of(self).engine) is not None:
            engine.end()
            engine.forget_gradients()
            for unit in engine.units:
                unit.reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True):
        """Whether backward reduces gradients. Without, whole ones accumulate, in reduce_dtype, until one that does."""
        for unit in _units(self, recurse):
            unit.sync = requires_gradient_sync

    def set_is_last_backward(self, is_last_backward: bool):
        """Whether a step of the optimizer may follow the next backwards; see `strategy` of fully_shard.

        Whatever it is, a backward ends with this stream ordered behind its reductions.
        """
        unit = unit_of(self)
        if unit.engine is None:
            Engine(unit)
        unit.engine.is_last_backward = is_last_backward

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True):
        """As the argument of fully_shard, from the next iteration on."""
        check_type("set_reshard_after_forward", reshard_after_forward, bool, "a bool")
        for unit in _units(self, recurse):
            unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True):
        """Whether the memory is given back after a unit's backward; if not, once the last one has reduced."""
        for unit in _units(self, recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]):
        """Units to gather when this one computes in forward, instead of those that came next in the last iteration."""
        unit_of(self).forward_prefetch = [unit_of(module) for module in modules]

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]):
        """Units to gather when this one computes in backward, instead of those that came next in the last iteration."""
        unit_of(self).backward_prefetch = [unit_of(module) for module in modules]

    def set_gradient_divide_factor(self, factor: float):
        """What sums of this unit's gradients are divided by, instead of the number of ranks."""
        for group in unit_of(self).groups:
            group.divisor = factor

    def set_force_sum_reduction_for_comms(self, enable: bool):
        """Changes nothing: gradients are always summed, and the sum is divided."""

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True):
        """Changes nothing: each reduction goes on to the replicas, to the same sums. See set_requires_gradient_sync."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True):
        """Changes nothing: parameters that a rank didn't use always count as zero."""

    def zero_grad(self, set_to_none: bool = True):
        """Discard the gradients of this module's parameters, also those that accumulate without having been reduced."""
        unit = unit_of(self)
        unit.end_iteration()
        super().zero_grad(set_to_none)
        if unit.engine is not None:
            unit.engine.forget_gradients(_units(self, recurse=True))

    def _apply(self, function, recurse=True):
        unit_of(self).end_iteration()
        super(FSDPModule, self)._apply(function, recurse)
        unit_of(self).settle()
        return self

    def _get_fsdp_state(self):
        raise NotImplementedError(
            "fully_shard: the state of torch's FSDP is asked for, which a unit of tkernels has not"
        )

    def __deepcopy__(self, memo):
        raise NotImplementedError(
            f"fully_shard: a deepcopy of {type(self).__name__} would share its engine; make the model again, shard it, "
            f"and load_state_dict, or keep [p.detach().clone() for p in model.parameters()]"
        )

    def __getstate__(self):
        raise NotImplementedError(
            f"fully_shard: {type(self).__name__} belongs to its rank, and can't be pickled; save its state_dict(), by "
            f"torch.distributed.checkpoint or, whole, by get_model_state_dict with full_state_dict=True"
        )


def _not_here(name: str):
    def refuse(self, *args, **kwargs):
        raise NotImplementedError(
            f"fully_shard: {name} has no meaning over tkernels' collectives; leave it out, or shard with torch's "
            f"fully_shard and use its collectives through tkernels.layers.doors"
        )

    return refuse


for _name, _method in inspect.getmembers(FSDPModule, inspect.isfunction):
    if not _name.startswith("_") and _name not in vars(ShardedModule):
        setattr(ShardedModule, _name, _not_here(_name))


class _PipelinesState:
    """What torch.distributed.pipelining finds as FSDP2's own state, to reduce at the end of a step what accumulated."""

    def __init__(self, unit: Unit):
        self._unit = unit
        self._state_ctx, self.all_states = self, ()

    def _root_post_backward_final_callback(self):
        self._unit.engine.reduce_accumulated()


class _Handle(UnshardHandle):
    def __init__(self, unit: Unit):
        self._unit = unit

    def wait(self):
        self._unit.expose()


def register_fsdp_forward_method(module: nn.Module, method_name: str):
    """Make a method of a unit one that its parameters are gathered for, as for `forward`. Else changes nothing."""
    unit = unit_of(module)
    if unit is None:
        return
    original = getattr(module, method_name)

    @functools.wraps(original)
    def method(*args, **kwargs):
        args, kwargs = unit.before_forward(module, args, kwargs)
        output = None
        try:
            output = original(*args, **kwargs)
        finally:
            cast = unit.after_forward(module, args, output)
        return output if cast is None else cast

    setattr(module, method_name, method)


def _gathered_as(float8: Float8 | None) -> str | None:
    """In words, how the weight of such a layer is gathered; None: in its own dtype."""
    if float8 is None:
        return None
    return "in float8" + " by powers of two" * float8.recipe.power_of_two


def _units(module: nn.Module, recurse: bool) -> list[Unit]:
    parts = module.modules() if recurse else [module]
    return [unit for part in parts if (unit := unit_of(part)) is not None]


@functools.cache
def _sharded_class(kind: type) -> type:
    return type(f"FSDP{kind.__name__}", (ShardedModule, kind), {"_unsharded": kind})


def ranks_of(mesh, strategy: str) -> DataParallelRanks:
    if mesh is None:
        mesh = init_device_mesh(torch._C._get_accelerator().type, (dist.get_world_size(),))
    replicate = isinstance(strategy, str) and strategy == "replicate"  # any other word is yet to be refused
    if isinstance(mesh, DeviceMesh) and mesh.ndim == 2 and not replicate:
        if mesh.mesh_dim_names is None:
            raise ValueError("fully_shard: a mesh of two dimensions, (replicas, shards), needs names: mesh_dim_names=")
        replica, shard = (as_context(mesh[name]) for name in mesh.mesh_dim_names)
        return DataParallelRanks(mesh, (Replicate(), Shard(0)), shard, replica)
    ctx = as_context(mesh, "fully_shard: mesh")
    if not isinstance(mesh, DeviceMesh):
        mesh = DeviceMesh.from_group(ctx.group.process_group, ctx.device.type)
    if replicate:
        return DataParallelRanks(mesh, (Replicate(),), replica=ctx)
    return DataParallelRanks(mesh, (Shard(0),), ctx)


def _reshards(asked: bool | int | None, parts: int) -> bool | None:
    """Whether to give the memory back after forward. Raises TypeError or ValueError for what can't be."""
    check_type("fully_shard: reshard_after_forward", asked, bool | int | None, "True, False, an integer or None")
    if asked is None or isinstance(asked, bool):
        return asked
    if asked not in (1, parts):
        raise ValueError(
            f"fully_shard: reshard_after_forward={asked} would keep parts over {asked} of the {parts} ranks, which is "
            f"not supported; pass True to gather from all of them again, or False to keep the whole parameters"
        )
    return asked != 1


def _check_policy(policy: MixedPrecisionPolicy):
    check_type("fully_shard: mp_policy", policy, MixedPrecisionPolicy, "torch's MixedPrecisionPolicy")
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, name)
        check_type(f"fully_shard: {name} of mp_policy", dtype, torch.dtype | None, "a torch.dtype")
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"fully_shard: {name} of mp_policy={dtype} must be a dtype of floating-point numbers")
    check_flags("fully_shard: mp_policy", cast_forward_inputs=policy.cast_forward_inputs)


def _ignored(parameters) -> set[nn.Parameter]:
    words = "parameters, as module.parameters() gives, or None"
    ignored = [] if parameters is None else several("fully_shard: ignored_params", parameters, words)
    for each in ignored:
        check_type("fully_shard: one of ignored_params", each, nn.Parameter, "an nn.Parameter, not its name")
    if isinstance(parameters, Iterator) and not ignored:
        raise ValueError("fully_shard: ignored_params gave nothing, as a generator that was used up; pass a set")
    return set(ignored)


def _refuse_options(shard_placement_fn, offload_policy, dp_mesh_dims):
    if isinstance(offload_policy, CPUOffloadPolicy):
        raise ValueError("fully_shard: CPUOffloadPolicy is not supported; leave offload_policy out")
    if shard_placement_fn is not None:
        raise ValueError("fully_shard: parameters are split along their first dimension; leave shard_placement_fn out")
    if dp_mesh_dims is not None:
        raise ValueError(
            "fully_shard: dp_mesh_dims is not supported; pass the data-parallel dimensions as mesh=, for example "
            "mesh['dp'] or mesh['replicate', 'shard']"
        )


def _managed_modules(modules: tuple[nn.Module, ...]) -> list[nn.Module]:
    """These modules and what is inside them and in no unit yet."""
    managed = {}

    def collect(module, outermost):
        check_type("fully_shard: module", module, nn.Module, "an nn.Module, or a list of them")
        if outermost and unit_of(module) is not None:
            raise ValueError(f"fully_shard: {type(module).__name__} is sharded already")
        if outermost and isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(
                f"fully_shard: a {type(module).__name__} has no forward to gather parameters for; shard its modules, "
                f"one by one or as fully_shard([a, b])"
            )
        if unit_of(module) is None and module not in managed:
            managed[module] = None
            for child in module.children():
                collect(child, False)

    if not modules:
        raise ValueError("fully_shard: module=[] has nothing to shard; pass a module, or a list of them")
    for module in modules:
        collect(module, True)
        if modules.count(module) > 1:
            raise ValueError(f"fully_shard: a {type(module).__name__} is twice in the list of modules; pass it once")
    return list(managed)


def _parameters_of(
    modules: tuple[nn.Module, ...], managed: list[nn.Module], ignored: set[nn.Parameter]
) -> tuple[dict[str, nn.Parameter], dict[str, list[tuple[nn.Module, str]]]]:
    """Name -> parameter, and name -> its places: (module, attribute), the first one under this name."""
    names, places = {}, {}
    root = modules[0] if len(modules) == 1 else nn.ModuleList(modules)  # of which two may have a "weight"
    paths = {part: path for path, part in root.named_modules()}
    for module in managed:
        for attribute, parameter in module._parameters.items():
            if parameter is None or parameter in ignored:
                continue
            name = names.setdefault(parameter, f"{paths[module]}.{attribute}".removeprefix("."))
            places.setdefault(name, []).append((module, attribute))
    return {name: parameter for parameter, name in names.items()}, places


def _tensor_parallel_mesh(modules: tuple[nn.Module, ...], mesh: DeviceMesh) -> DeviceMesh | None:
    """The mesh of the parameters that are DTensors already, if they have one in common.

    Where there are none, that of the model in which the modules are, if it can be put beside `mesh`.
    """
    units = {unit for module in modules for unit in _units(module, True)}
    sharded = [parameter for unit in units for group in unit.groups for parameter in group.parameters]
    meshes = [parameter.tensor_parallel.mesh for parameter in sharded if parameter.tensor_parallel is not None]
    own = {parameter.sharded for parameter in sharded}
    plain = {parameter for module in modules for parameter in module.parameters()} - own
    meshes += [parameter.device_mesh for parameter in plain if isinstance(parameter, DTensor)]
    if not meshes:
        around = {mesh_of(part) for module in modules for part in module.modules()} - {None}
        with contextlib.suppress(TypeError, RuntimeError):
            for found in around:
                DeviceMesh._concatenate([mesh, found])
            meshes = [*around]
    return meshes[0] if meshes and all(mesh == meshes[0] for mesh in meshes) else None


def _check_module(module: nn.Module):
    if isinstance(module, DeferringModule) and module.need_backward_dw():
        raise ValueError(
            f"fully_shard: a {type(module).__name__} leaves its weight's gradient to backward_dw, when backward has "
            f"reduced gradients and given the parameters back; make it without delay_wgrad_compute"
        )


def _check_parameter(name: str, parameter: nn.Parameter, policy: MixedPrecisionPolicy, mesh: DeviceMesh):
    if (other := getattr(parameter, _SHARDED, None)) is None:
        check_free(f"fully_shard: {name}", parameter)
    if parameter.dim() == 0 or parameter.numel() == 0:
        raise ValueError(
            f"fully_shard: {name} of shape {tuple(parameter.shape)} has no rows to split; give it a dimension and an "
            f"element, or pass it in ignored_params"
        )
    if other is not None:
        raise ValueError(
            f"fully_shard: {name} is tied to {other}, which is sharded in another unit; shard the modules that share "
            f"it together, as fully_shard([a, b])"
        )
    if parameter._post_accumulate_grad_hooks:
        raise ValueError(
            f"fully_shard: {name} has a hook of register_post_accumulate_grad_hook, which would take its gradient "
            f"before the mean over ranks is made; register it on the sharded parameter, for the mean"
        )
    if parameter.requires_grad and parameter.is_complex():
        raise TypeError(
            f"fully_shard: {name} is in {parameter.dtype}, in which no gradients are summed; make a parameter of real "
            f"numbers, as torch.view_as_real gives, or pass it in ignored_params"
        )
    reduce_dtype = policy.reduce_dtype or param_dtype_of(parameter.dtype, policy)
    if parameter.requires_grad and reduce_dtype not in SUMMED:
        raise TypeError(
            f"fully_shard: {name}: gradients are summed in float32, float16 or bfloat16, not {reduce_dtype}; pass one "
            f"as reduce_dtype= of mp_policy"
        )
    if not isinstance(parameter, DTensor):
        return
    if any(isinstance(p, Partial) for p in parameter.placements):
        raise ValueError(f"fully_shard: {name} is a sum that is still to be made, {parameter.placements}")
    try:
        DeviceMesh._concatenate([mesh, parameter.device_mesh])
    except (TypeError, RuntimeError) as error:  # without names, of another mesh, or of the same dimension
        raise ValueError(
            f"fully_shard: {name} is split over {parameter.device_mesh}, which {mesh} can't be put beside ({error}); "
            f"make one mesh, as by init_device_mesh(device_type, (dp, tp), mesh_dim_names=('dp', 'tp')), and pass "
            f"mesh['tp'] to what splits layers, mesh['dp'] here"
        ) from error
