"""What Megatron's optimizers and gradient clipping read on a parameter, and what the layers here write there."""

import torch
from torch import nn

RANKS = "tkernels_ranks"  # on a part of a parameter: the name of the context whose ranks have the parts


def is_split(parameter) -> bool:
    """Whether each tensor-parallel rank has a different part: Megatron's mark, which the parallel layers set too."""
    return getattr(parameter, "tensor_model_parallel", False)


def num_parts(parameter) -> int | None:
    """How many ranks have a part of a split parameter; None where this is not known: Megatron has no such mark."""
    return getattr(parameter, "partition_size", None) if is_split(parameter) else None


def is_partial(parameter) -> bool:
    """Megatron's mark: a gradient of this rank's rows alone, which is yet to be summed over tensor-parallel ranks."""
    return bool(getattr(parameter, "sequence_parallel", False))


def is_copy(parameter) -> bool:
    """Megatron's mark: another pipeline stage has this parameter too, and counts its gradient in a norm over both."""
    return bool(getattr(parameter, "shared", False))


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient that an optimizer uses: main_grad if there is one, as on OverlappedDDP's parameters, else grad."""
    main_grad = getattr(parameter, "main_grad", None)
    return parameter.grad if main_grad is None else main_grad


class MarkedModule(nn.Module):
    """A module whose parameters carry Megatron's marks, which its optimizers and gradient clipping read.

    torch drops a parameter's attributes where it makes a new one of it: in copies, in to_empty, and where a state dict
    is loaded by assignment. This class sets the marks again.
    """

    def _mark(self, name: str, **marks):
        """Set attributes of a parameter, and of the parameters that later replace it."""
        vars(self).setdefault("_marks", {}).setdefault(name, {}).update(marks)
        vars(getattr(self, name)).update(marks)

    def _mark_part(self, name: str, dim: int | None, size: int, stride: int = 1, **marks):
        """Mark what is one of `size` ranks' parts of a parameter, split along `dim` in `stride` blocks; None: whole."""
        part = dict(
            tensor_model_parallel=dim is not None and size > 1, partition_dim=-1 if dim is None else dim,
            partition_stride=1 if dim is None else stride, partition_size=1 if dim is None else size,
        )  # fmt: skip
        self._mark(name, **part | marks)

    def _mark_again(self):
        for name, marks in vars(self).get("_marks", {}).items():
            if (parameter := getattr(self, name, None)) is not None:
                vars(parameter).update(marks | vars(parameter))  # attributes set since take precedence

    def _apply(self, function, recurse=True):
        super()._apply(function, recurse)
        self._mark_again()
        return self

    def __setstate__(self, state):
        super().__setstate__(state)
        self._mark_again()

    def _load_from_state_dict(self, *arguments):
        super()._load_from_state_dict(*arguments)
        self._mark_again()
