"""What a stage keeps of an output that it has sent: the node of autograd's graph, without the numbers.

A value is a tensor or a pytree of tensors (lists, dicts, named tuples, whatever torch.utils._pytree knows), here and in
the whole folder. None stands for no tensor.
"""

import torch
from torch.utils._pytree import tree_leaves

from tkernels.comm.arguments import check_flags


def leaves(value) -> list[torch.Tensor]:
    """The tensors of a value, in order. Raises TypeError for anything else in it, but for None."""
    found = [leaf for leaf in tree_leaves(value) if leaf is not None]
    for leaf in found:
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(f"takes tensors, or lists or dicts of them, not {type(leaf).__name__}")
    return found


def deallocate_output_tensor(out, deallocate_pipeline_outputs=False):
    """Shrink `out`, a tensor or a list or dict of them, to one element each; only their grad_fn is of use afterwards.

    The storage of a tensor that is being sent is held until it has been sent.
    deallocate_pipeline_outputs: False: leave `out` as it is. Instead of True, the P2PHandle of its send may be passed.
        It must be open or waited for, so that a released handle, perhaps of another output, is noticed.

    Raises ValueError for a view, whose storage is shared, and for a leaf that needs a gradient: a parameter, or a
    tensor that a stage has received and passes on. Raises LeaseError for a released handle.
    """
    if hasattr(deallocate_pipeline_outputs, "require_not_released"):
        deallocate_pipeline_outputs.require_not_released()
    elif deallocate_pipeline_outputs is not None:
        check_flags("deallocate_output_tensor", deallocate_pipeline_outputs=deallocate_pipeline_outputs)
    if not deallocate_pipeline_outputs:
        return
    check_own(out)
    for tensor in leaves(out):
        tensor.data = torch.empty((1,), dtype=tensor.dtype, device=tensor.device)


def check_own(out):
    """Raises ValueError unless the tensors can be deallocated."""
    for tensor in leaves(out):
        if tensor.is_leaf and tensor.requires_grad:
            raise ValueError(
                f"deallocate: a {tuple(tensor.shape)} leaf that needs a gradient can't be deallocated, for it is a "
                f"parameter, or what a stage has received and passes on; leave it, since it takes no memory of its own"
            )
        if tensor._base is not None:
            raise ValueError(
                f"deallocate: a {tuple(tensor.shape)} view can't be deallocated, since others use its storage; let "
                f"the stage return a tensor of its own, for instance by .clone()"
            )


def custom_backward(output, grad_output):
    """Backward of a deallocated output. The gradient has the output's original shape, which torch would refuse.

    output, grad_output: a tensor each, or lists or dicts of them. grad_output None: outputs are scalars, whose gradient
        is one. The outputs may include leaves, not deallocated, that a stage passes on unchanged.
    Raises ValueError if another output is neither deallocated nor a scalar, for which use torch.autograd.backward, and
    for gradients of other shapes than the outputs had.
    """
    outputs = tuple(leaves(output))
    for tensor in outputs:
        if tensor.numel() != 1 and not (tensor.is_leaf and tensor.requires_grad):
            raise ValueError(
                f"custom_backward: takes an output that was deallocated to one element, not one of shape "
                f"{tuple(tensor.shape)}; use torch.autograd.backward"
            )
        if not tensor.requires_grad:
            raise ValueError("custom_backward: an output has no gradient to compute; leave it out")
    grads = tuple(torch.ones_like(tensor) for tensor in outputs) if grad_output is None else tuple(leaves(grad_output))
    wanted = [_shape_before(tensor) for tensor in outputs]
    if wanted != (found := [tuple(grad.shape) for grad in grads]):
        raise ValueError(f"custom_backward: the outputs were of shapes {wanted}, the gradients are of {found}")
    torch.autograd.Variable._execution_engine.run_backward(
        outputs, grads, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _shape_before(output: torch.Tensor) -> tuple[int, ...]:
    """The shape that an output had before it was deallocated, which its node of the graph knows."""
    return tuple(output.grad_fn._input_metadata[output.output_nr].shape if output.grad_fn else output.shape)
