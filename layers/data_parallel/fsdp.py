"""FullyShard: `fully_shard` of all modules of some classes, in one call, as a wrapper."""

import collections
import contextlib
import warnings

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tkernels.comm.arguments import check_flags, check_type, whole
from tkernels.layers.data_parallel.engine import unit_of
from tkernels.layers.data_parallel.fully_shard import fully_shard, ranks_of

_CONTAINERS = {nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict}


class FullyShard(nn.Module):
    """Every module of the classes `units` is one unit of `fully_shard`, and the module itself the last; nothing more.

        model = FullyShard(model, units=(Block,), mesh=mesh["dp"])

    A call runs the module, whose parameters are DTensors, named after it: "module.embed.weight". What `fully_shard`
    says of optimizers, clipping, checkpoints and failures holds.
    """

    def __init__(
        self,
        module: nn.Module,
        units: type[nn.Module] | tuple[type[nn.Module], ...],
        *,
        mesh=None,
        overlap: bool = True,
        grad_dtype: torch.dtype | None = None,
        copies: int = 2,
        strategy: str = "parameters",
    ):
        """Collective. Shard `module` in place.

        grad_dtype: reduce_dtype of torch's MixedPrecisionPolicy. copies: units that may be gathered at once, one more
        than `prefetch` of fully_shard. mesh, overlap, strategy: as there.

        Raises ValueError or TypeError if no module is a unit, or the module itself; and what fully_shard raises.
        Warns of a class that holds most of the parameters and is no unit, since the root gathers those all at once.
        """
        super().__init__()
        with ranks_of(mesh, strategy).checking():
            check_type("FullyShard: module", module, nn.Module, "an nn.Module")
            for unit in units if isinstance(units, tuple) else (units,):
                if not isinstance(unit, type):
                    raise TypeError(
                        f"FullyShard: units are classes of modules, as in units=(nn.Linear,), not instances of "
                        f"{type(unit).__name__}"
                    )
            if isinstance(module, units):
                raise ValueError("FullyShard: the module itself is of a unit's type; name the types of its parts")
            parts = [part for part in module.modules() if isinstance(part, units)]
            if not parts:
                names = ", ".join(kind.__name__ for kind in (units if isinstance(units, tuple) else (units,)))
                raise ValueError(f"FullyShard: no module is a unit: none is of the types {names}")
            whole("FullyShard: copies", copies, 1)
            check_type("FullyShard: strategy", strategy, str, "a name")
            if strategy == "parameters":  # with the others all that is gathered stays so
                _warn_of_a_forgotten_class(module, units)
        options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(reduce_dtype=grad_dtype), "strategy": strategy}
        for part in reversed(parts):  # what is inside comes first
            fully_shard(part, **options)
        self.module = fully_shard(module, prefetch=copies - 1, overlap=overlap, **options)

    @property
    def slots(self):
        """The slots to pass to `layers.captured`, to capture whole iterations; after two eager ones."""
        return unit_of(self.module).engine.slots

    @property
    def comm_stream(self):
        """The stream that collectives run on, from the first iteration on; None without overlap."""
        return unit_of(self.module).engine.comm_stream

    def forward(self, *args, **kwargs):
        """Collective. The module's result for this rank's part of the batch."""
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self):
        """A context in which backward reduces no gradients: whole ones accumulate until a backward outside of it."""
        before = {unit: unit.sync for unit in map(unit_of, self.module.modules()) if unit is not None}
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            for unit, sync in before.items():
                unit.sync = sync

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward reduces: as no_sync sets it, for loops that set this attribute of torch's themselves."""
        return unit_of(self.module).sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, sync: bool):
        check_flags("FullyShard", require_backward_grad_sync=sync)
        self.module.set_requires_gradient_sync(sync)

    def zero_grad(self, set_to_none: bool = True):
        """Discard all gradients, also those that `no_sync` has accumulated."""
        self.module.zero_grad(set_to_none)


def _warn_of_a_forgotten_class(module: nn.Module, units):
    """Warn if modules of one class that could be units, but are none, hold more than half of the parameters.

    Of such modules inside one another, the outermost count whose class occurs more than once: a layer rather than the
    stack that it is part of. Parameters of several modules count for none of them: they could be in no unit.
    """
    parts = list(module.modules())
    sharded = [part for part in parts if isinstance(part, units) or unit_of(part) is not None]
    inside = {each for part in sharded for each in part.modules()}
    taken = {type(part) for part in parts if not inside.isdisjoint(part.modules())}  # in units, and around them
    free = [part for part in parts if type(part) not in taken | _CONTAINERS]
    occurrences = collections.Counter(map(type, free))
    homes = collections.Counter(parameter for part in parts for parameter in part.parameters(recurse=False))
    left, held = {parameter for parameter, count in homes.items() if count == 1}, collections.Counter()
    for part in sorted(free, key=lambda part: occurrences[type(part)] == 1):  # stable: what is around comes first
        own = left.intersection(part.parameters())
        held[type(part)] += sum(parameter.numel() for parameter in own)
        left -= own
    total = sum(parameter.numel() for parameter in homes)
    for kind, numel in held.most_common(1):
        if 2 * numel > total:
            warnings.warn(
                f"FullyShard: modules of class {kind.__name__} hold {100 * numel // total} % of the parameters and are "
                f"no units, so every rank has all of that gathered for the whole iteration; add {kind.__name__} to "
                f"units=",
                stacklevel=3,
            )
