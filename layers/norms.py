"""One norm of gradients over data-parallel and tensor-parallel ranks: what is split counts everywhere, the rest once.

Without it the ranks of a tensor-parallel group would clip by different norms, and what they have in common would part.
"""

from tkernels.comm.context import Context


def is_split(parameter) -> bool:
    """Whether each tensor-parallel rank has a part of its own: Megatron's mark, which our layers set too."""
    return getattr(parameter, "tensor_model_parallel", False)


def counts(parameter, tensor_parallel: Context | None) -> bool:
    """Whether this rank adds the parameter's gradient to the norm over the tensor-parallel ranks."""
    return tensor_parallel is None or tensor_parallel.rank == 0 or is_split(parameter)


def check_norm(caller: str, parameters, tensor_parallel: Context | None):
    """Raises ValueError where parameters are split and nobody says over which ranks."""
    if tensor_parallel is None and any(map(is_split, parameters)):
        raise ValueError(
            f"{caller}: some parameters are split over tensor-parallel ranks (tensor_model_parallel), so that each of "
            f"these would have a norm of its own, and what they have in common would part; pass tensor_parallel=, "
            f"their context"
        )
