"""Column layers that read one input share its communication: queries, keys and values, or gate and up."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional

from tkernels.comm import find_context
from tkernels.layers.tensor_parallel.float8 import Float8, Recipe
from tkernels.layers.tensor_parallel.functions import copy_to_tensor_model_parallel_region
from tkernels.layers.tensor_parallel.modules import ColwiseLinear, products_of
from tkernels.layers.tensor_parallel.replicas import register_always
from tkernels.layers.tensor_parallel.styles import ColwiseParallel


class ColwiseParallelGroup(ParallelStyle):
    """ColwiseParallel for linears of one module whose forward passes the same tensor to each of them.

        {"layers.*.attention": ColwiseParallelGroup("wq", "wk", "wv", input_layouts=Shard(1)), ...}

    names: the module's attributes that hold the linears. The other arguments are ColwiseParallel's.

    A sequence that is split is gathered once for all of them, during the first product of the call that comes first,
    and its gradient is reduce-scattered once; name the largest first. A replicated input has its gradient summed over
    ranks once, without overlap, instead of once for each linear with it. The module's forward stays as it is: the
    others find their products ready when they are called with the same tensor, unchanged. For another tensor that is
    split all products are computed again, so linears of different inputs, as in cross-attention, belong in different
    groups. So do linears between whose calls the forward changes the tensor in place: where torch counts no changes, in
    inference mode and in compiled code, a split input's products are those of before.
    """

    context = None  # as Style's

    def __init__(
        self,
        *names: str,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        float8: str | Recipe | None = None,
    ):
        super().__init__()
        if len(set(names)) < 2 or len(set(names)) < len(names):
            raise ValueError(f"ColwiseParallelGroup: takes the names of two or more linears, each once, not {names}")
        self.names = names
        self.style = ColwiseParallel(
            input_layouts=input_layouts,
            output_layouts=output_layouts,
            use_local_output=use_local_output,
            float8=float8,
        )

    def __repr__(self) -> str:
        return f"ColwiseParallelGroup{self.names}: {self.style}"

    def members(self, path: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
        """(path, linear) of those named. Raises ValueError where one is missing, TypeError for what can't be shared."""
        found = []
        for name in self.names:
            linear, where = getattr(module, name, None), f"{path}.{name}".strip(".")
            if not isinstance(linear, nn.Module):
                raise ValueError(
                    f"ColwiseParallelGroup: {where!r} is no module; {type(module).__name__} has "
                    f"{', '.join(each for each, _ in module.named_children()) or 'none'}"
                )
            if not self.style.takes(linear):
                raise TypeError(
                    f"ColwiseParallelGroup: {where!r} is a {type(linear).__module__}.{type(linear).__name__}, and no "
                    f"nn.Linear; take it out of the group"
                )
            found.append((where, linear))
        return found

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        members = self.members("", module)
        for path, linear in members:
            self.style.check(path, linear, device_mesh.size())
        self.style.src_data_rank, self.style.context = self.src_data_rank, self.context
        for _, linear in members:
            self.style._apply(linear, device_mesh)
        return Share([linear for _, linear in members])._apply(module, device_mesh)


class Share(ParallelStyle):
    """Of a module: let column layers in it share the communication of their common input."""

    def __init__(self, linears: list[nn.Module]):
        self.linears = linears

    def __repr__(self) -> str:
        return f"Share({len(self.linears)})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        groups = {}  # those that multiply alike
        for linear in self.linears:
            groups.setdefault(linear._float8 and linear._float8.recipe, []).append(linear)
        for recipe, linears in groups.items():
            if len(linears) > 1:
                siblings = Siblings(linears, recipe)
                for linear in linears:
                    linear._siblings = siblings
                register_always(module, siblings.forget)
        return module


class Siblings:
    """One input's communication, for all its column layers.

    A split input is gathered at the first call of a sibling, for the products of all. A replicated one is passed on,
    with a gradient that is summed over ranks. Both are held until each sibling has been called, at most until the end
    of the parent's forward. In FP8 the product of either input is one for all.
    """

    def __init__(self, linears: list[ColwiseLinear], recipe: Recipe | None):
        self._linears, self._float8 = linears, recipe and Float8(recipe)
        for linear in linears if recipe else ():
            linear._float8 = self._float8  # whose copies are those of all weights
        self.forget()

    def forget(self, *_):
        self._input, self._whole, self._products = None, None, {}  # _products: None where it is not computed

    def product(self, linear: ColwiseLinear, x: torch.Tensor) -> torch.Tensor:
        """This rank's out-features of x, all positions. Collective, if x is not the last call's."""
        at = next(index for index, each in enumerate(self._linears) if each is linear)
        state = _state(x)
        if self._input is None or self._input[0] is not x or self._input[1] != state or at not in self._products:
            self._take(linear, x)
            self._input = x, state
        whole, y = self._whole, self._products.pop(at)
        if not self._products:
            self.forget()
        if y is None:
            weight, bias = linear._parts()
            with torch.autocast(whole.device.type, enabled=False):  # all three have its dtype already
                y = functional.linear(whole, weight, bias)
        return y

    def _take(self, linear: ColwiseLinear, x: torch.Tensor):
        self.forget()
        x, placement, shape = linear._enter(x)
        if self._float8 is not None or placement.is_shard():
            products = products_of(self._linears, x, placement, shape)
        else:
            self._whole = copy_to_tensor_model_parallel_region(x, mesh=find_context(linear._layout.context))
            products = [None] * len(self._linears)
        self._products = dict(enumerate(products))


def _state(x: torch.Tensor) -> tuple:
    """What must not have changed for a product to be that of x still."""
    version = 0 if torch.compiler.is_compiling() or x.is_inference() else x._version
    return version, torch.is_grad_enabled(), torch.is_autocast_enabled(x.device.type)
