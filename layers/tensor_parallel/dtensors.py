"""DTensors as the layers use them: the mesh of an argument, sizes by rank, and local tensors taken cheaply."""

import contextlib
import copy
import weakref

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from tkernels.comm import Context, MeshLike, as_context
from tkernels.comm.context import group_of
from tkernels.comm.contexts import current_context
from tkernels.layers.marks import is_split


def as_mesh_and_context(mesh: MeshLike) -> tuple[DeviceMesh, Context]:
    """Collective. Resolve an argument that says which ranks: a mesh of one dimension over them, and their context.

    A Context is itself, over a mesh of its process group. None is the mesh of a surrounding `with mesh:`, else the
    current context. Raises what `as_context` does, and ValueError for a context without torch.distributed.
    """
    if mesh is None:
        with contextlib.suppress(RuntimeError):  # no mesh is active
            mesh = _mesh_resources.get_current_mesh()
    if mesh is None:
        mesh = current_context()
    if (group := group_of(mesh).process_group) is None:
        raise ValueError("parameters become DTensors, which need torch.distributed; call init_process_group() first")
    ctx = as_context(mesh)
    return mesh if isinstance(mesh, DeviceMesh) else DeviceMesh.from_group(group, ctx.device.type), ctx


_meshes = weakref.WeakKeyDictionary()  # a module of a model that was parallelized -> the mesh that it is split over


def remember_mesh(model: nn.Module, mesh: DeviceMesh):
    """Let `mesh_of` know what a model is split over, also of modules in it that have no DTensors."""
    _meshes.update(dict.fromkeys(model.modules(), mesh))


def mesh_of(module: nn.Module) -> DeviceMesh | None:
    """The mesh that the model is split over which a module is in."""
    return _meshes.get(module)


def is_part(parameter: torch.Tensor) -> bool:
    """Whether each rank has a different part of a parameter, by its placements or Megatron's mark."""
    if isinstance(parameter, DTensor):
        return any(placement.is_shard() for placement in parameter.placements)
    return is_split(parameter)


def num_ranks_of(parameter: DTensor, ctx: Context) -> int:
    """How many of a context's ranks a DTensor is over."""
    return len({*parameter.device_mesh.mesh.flatten().tolist()}.intersection(ctx.group.global_ranks))


def chunk_sizes(size: int, ranks: int) -> tuple[int, ...]:
    """How DTensors split `size` over ranks, as torch.chunk does: 10 over 4 as 3, 3, 3, 1; 5 over 4 as 2, 2, 1, 0."""
    most = -(-size // ranks)
    return tuple(max(0, min(most, size - rank * most)) for rank in range(ranks))


def _writes(parameter: torch.Tensor) -> int:
    """Torch's count of writes; 0 for one made in inference mode, which has none."""
    return 0 if parameter.is_inference() else parameter._version


class _Local(torch.autograd.Function):
    """A parameter's local tensor. Its gradient becomes a DTensor of the same placements.

    DTensor.to_local does the same for 98 us a parameter and step, this for 34 (a tiny linear's forward and backward on
    one core, torch 2.13): a parameter's gradient has the parameter's own sizes and strides, which to_local works out.

    Writes to a DTensor count at the DTensor alone, so that what saves the local tensor for backward sees none: they are
    looked for here, whether or not backward needs the value. torch._foreach operations, fused optimizers too, count
    none.
    """

    @staticmethod
    def forward(ctx, parameter):
        ctx.spec, ctx.parameter, ctx.version = parameter._spec, parameter, _writes(parameter)
        return parameter._local_tensor.view_as(parameter._local_tensor)

    @staticmethod
    def backward(ctx, grad):
        if _writes(ctx.parameter) != ctx.version:
            raise RuntimeError(
                f"a parameter {list(ctx.spec.shape)} of a parallel module has been written to between a forward and "
                f"its backward, as by an optimizer's step, so that gradients might be of neither value; run backward "
                f"before it, or forward again"
            )
        spec = copy.copy(ctx.spec)
        if torch.is_grad_enabled():  # double backward
            return DTensor.from_local(
                grad, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
            )
        return DTensor(grad.contiguous(), spec, requires_grad=False)


_apply = super(torch.autograd.Function, _Local).apply  # without the look for functorch transforms, made below


def local(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """This rank's part of a parameter, whose gradient has the placements of the parameter. A plain tensor is itself."""
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return parameter.to_local()
    if parameter.requires_grad and torch.is_grad_enabled():
        return _apply(parameter)
    return parameter._local_tensor


def as_dtensor(part: torch.Tensor, mesh: DeviceMesh, placement: Placement, shape) -> DTensor:
    """The DTensor of a global shape of which this rank has `part`."""
    if placement.is_shard() and shape[placement.dim] % mesh.size():
        part = part.contiguous()
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(part, mesh, (placement,), run_check=False, shape=torch.Size(shape), stride=stride)
    return DTensor.from_local(part, mesh, (placement,), run_check=False)  # strides follow the part's


def let_grad_scaler_see_all_ranks():
    """Let torch.amp.GradScaler skip a step on all ranks where a gradient of one has overflowed.

    torch (2.13) shares what it finds over the mesh dimensions that the first gradient is split over, and a rank whose
    part of another has overflowed would skip alone. It takes no plain gradients beside DTensors, either.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers
    unscale = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    torchs = handlers.get(unscale)
    if torchs is None or getattr(torchs, "sees_all", False):
        return

    def seeing_all(op_call, args, kwargs):
        grads, found, *others = args
        op_call([getattr(grad, "_local_tensor", grad) for grad in grads], found, *others, **kwargs)
        split = {}  # by mesh, for each of its dimensions whether a gradient differs along it
        for grad in grads:
            if isinstance(grad, DTensor):
                differs = split.setdefault(grad.device_mesh, [False] * grad.device_mesh.ndim)
                differs[:] = (was or not now.is_replicate() for was, now in zip(differs, grad.placements, strict=True))
        for mesh, dims in split.items():
            placements = [Partial("max") if differs else Replicate() for differs in dims]
            found.copy_(DTensor.from_local(found, mesh, placements, run_check=False).full_tensor())

    seeing_all.sees_all = True
    handlers[unscale] = seeing_all
