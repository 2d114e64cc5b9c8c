"""Groups of parameters that stay whole, and whose gradients and masters are cut over the ranks, anywhere.

In all three buffers of a group its parameters lie one after the other, so that nothing is copied on the way to a
collective but the gradients, once, into their buffer:

    whole      [n]          a | b | c | ...      what computes: the caller's parameters are views of it
    gradients  [n]          the same
    flat       [rows[rank]] this rank's part, masters in fp32 at least: what the optimizer updates

This module moves data on the current stream; who waits for whom is the engine's business.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from tkernels.comm import Context, LeaseError
from tkernels.comm.regions import round_up
from tkernels.layers.data_parallel.layout import ALIGN, FlatLayout
from tkernels.layers.data_parallel.param_group import Parameter
from tkernels.layers.data_parallel.wire import Wire
from tkernels.layers.grad_hooks import GradMark, called_last
from tkernels.layers.owners import weakly


def padded(parameter: torch.Tensor) -> int:
    return round_up(parameter.numel(), ALIGN)


def lay_out(parameters: list[torch.Tensor], capacity: int, loads: list[int], partition: str) -> FlatLayout:
    """The layout of a bucket of at most `capacity` elements, but for a larger parameter.

    partition: "elements" cuts it evenly. "parameters" gives each parameter to one rank, from the largest down, each to
        the rank with the smallest of `loads`, which are added to.
    """
    large = parameters[0].numel() > capacity  # without padding, its gradient is its buffer
    if partition == "elements":
        rows = round_up(sum(map(padded, parameters)), len(loads) * ALIGN) // len(loads)
        end = parameters[0].numel() if large else rows * len(loads)
        return FlatLayout(parameters, tuple(max(0, min(rows, end - rank * rows)) for rank in range(len(loads))))
    owned = [[] for _ in loads]
    for parameter in sorted(parameters, key=torch.Tensor.numel, reverse=True):
        owner = loads.index(min(loads))
        loads[owner] += parameter.numel()
        owned[owner].append(parameter)
    return FlatLayout(
        list(itertools.chain(*owned)), tuple(sum(p.numel() if large else padded(p) for p in theirs) for theirs in owned)
    )


@dataclass(eq=False)
class Piece(Parameter):
    """A parameter of a resident unit. sharded: the master of this rank's part, elements `start` to `stop`.

    total: the gradient of the master, once it is reduced. Both have the parameter's shape if they are the whole of it,
    and are 1-D otherwise. used: whether this rank has had a gradient of it since the last step. marked:
    whether it was taken, and `mark` put in its place.
    """

    start: int = 0
    stop: int = 0
    total: torch.Tensor | None = None
    used: bool = False
    mark: GradMark | None = None
    marked: bool = False

    def take_gradient(self) -> torch.Tensor | None:
        self.unmark()
        grad = super().take_gradient()
        self.used = self.used or grad is not None
        if self.used:
            self.mark, self.marked = GradMark.put_on(self.whole, self.mark), True
        return grad

    @property
    def late(self) -> bool:
        """Whether `.grad` has been set since the gradient was taken."""
        return self.whole.grad is not None and not (self.marked and self.whole.grad is self.mark.nan)

    def check_mark(self):
        """Raises LeaseError if somebody has dropped or changed the mark."""
        if self.marked and not self.mark.is_on(self.whole):
            raise LeaseError(
                f"ZeroOptimizer: the .grad of {self.name} was dropped or changed when its gradient had gone to its "
                f"owner, as by the module's zero_grad(); to drop gradients call the optimizer's zero_grad()"
            )

    def unmark(self, _=None):
        """Called before autograd adds to `.grad`."""
        self.check_mark()
        if self.marked:
            self.whole.grad, self.marked = None, False

    def forget_gradient(self):
        self.whole.grad, self.used, self.marked = None, False, False

    def widen_gradient(self):
        """Do nothing: it is the caller's `.grad`, in whose dtype autograd adds up."""

    def cut(self, value):
        """A copy of this piece of a tensor in the parameter's shape; any other value is returned whole."""
        if not isinstance(value, torch.Tensor):
            return value
        if value.shape != self.shape:
            return value.clone()
        return value.reshape(-1)[self.start : self.stop].view(self.sharded.shape).clone()


class FlatGroup:
    """The parameters of a resident unit; see ParamGroup, which the engine takes in the same way.

    values: of the parameters. flat: the masters [rows[rank]]. total: the gradients of these, reduced, if `has_total`.
    divisor: of the sums over ranks.
    """

    def __init__(self, layout: FlatLayout, names, ctx: Context, wire: Wire, reduce_dtype: torch.dtype | None, divisor):
        first = layout.parameters[0]
        self.ctx, self.layout, self.wire, self.numel, self.divisor = ctx, layout, wire, layout.numel, divisor
        self.reduce_dtype, masters = reduce_dtype or first.dtype, torch.promote_types(first.dtype, torch.float32)
        # Each with a storage of its own, since what is saved of one is its storage.
        size, options = layout.rows[wire.rank], {"dtype": masters, "device": first.device}
        self.flat, self.total = torch.zeros(size, **options), torch.zeros(size, **options)
        self.has_total, self.values = False, None
        begin, self.parameters = sum(layout.rows[: wire.rank]), []
        for index, parameter in enumerate(layout.parameters):
            start, stop = layout.piece(index, wire.rank)
            shape = parameter.shape if stop - start == parameter.numel() else (-1,)
            place = slice(layout.starts[index] + start - begin, layout.starts[index] + stop - begin)
            master, total = (flat[place].view(shape) for flat in (self.flat, self.total))
            piece = Piece(names[parameter], [], nn.Parameter(master), parameter.shape, None, self, parameter)
            piece.start, piece.stop, piece.total = start, stop, total
            self.parameters.append(piece)

    @property
    def trained(self) -> list[Piece]:
        return self.parameters  # one that is frozen later has no gradient, which counts as zero

    def watch(self, hook: Callable) -> list:
        """Call hook(piece) with each gradient. Returns the handles. Parameters keep neither the hook nor masters alive.

        hook: a bound method.
        """
        return [
            handle
            for piece in self.parameters
            for handle in called_last(piece.whole, piece.watch(hook), weakly(piece.unmark))
        ]

    def settle(self, hook) -> bool:
        """Raises LeaseError if parameters no longer lie in the gathered buffer."""
        moved = next((piece.name for piece in self.parameters if not self.values.holds(piece.whole)), None)
        if moved is not None:
            raise LeaseError(
                f"{moved} has been converted or moved, so that what the ranks gather would not come to it; do so "
                f"before the optimizer is made, or make another one now"
            )
        return False

    def layout_of(self, parameters: list[Piece]) -> FlatLayout:
        return self.layout

    def buffers(self, layout: FlatLayout, grads=None) -> tuple[torch.Tensor, torch.Tensor]:
        """As of ParamGroup, but that one large gradient is its own buffer."""
        sums = torch.empty_like(self.total) if self.has_total else self.total
        first = grads[0] if grads else None
        if (
            first is not None
            and first.is_contiguous()
            and (first.numel(), first.dtype) == (self.numel, self.reduce_dtype)
        ):
            return first.view(-1), sums
        return torch.empty(self.numel, dtype=self.reduce_dtype, device=self.flat.device), sums

    def pack(self, grads: list[torch.Tensor | None], layout: FlatLayout, buffer: torch.Tensor):
        """Copy gradients to their places in the buffer [n]; one that is None counts as zero."""
        pairs = list(zip(layout.views(buffer), grads, strict=True))
        elsewhere = [(view, grad) for view, grad in pairs if grad is not None and grad.data_ptr() != view.data_ptr()]
        if missing := [view for view, grad in pairs if grad is None]:
            torch._foreach_zero_(missing)
        if elsewhere:
            torch._foreach_copy_(*map(list, zip(*elsewhere, strict=True)))

    def forget_gradients(self):
        """Discard whole gradients, and the masters'."""
        for piece in self.parameters:
            piece.forget_gradient()
        self.has_total = False

    def reduce(self, buffer: torch.Tensor, sums: torch.Tensor, layout: FlatLayout):
        """Collective. The mean over ranks of this rank's part of the buffer, in `sums`; the buffer is used up."""
        self.wire.reduce_scatter(buffer, layout.rows, 1 / self.divisor, sums)

    def accumulate(self, parameters: list[Piece], layout: FlatLayout, sums: torch.Tensor, _=None) -> bool:
        """Make these the masters' gradients, or add them to those that there are; as of ParamGroup."""
        if self.has_total:
            self.total.add_(sums)
            return False
        self.has_total = True
        return True
