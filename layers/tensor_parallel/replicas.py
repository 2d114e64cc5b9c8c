"""Parameters that every rank of a tensor-parallel model holds whole: gradients are summed where each rank has a part of
them. That all ranks have the same gradients is compared elsewhere (replica_check.py).
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tkernels.layers.tensor_parallel.dtensors import is_part, local
from tkernels.torch_operators import replicated

GRAD_ALLREDUCE = "replicated_with_grad_allreduce"  # transformers' name of the style
FOR_HEADS = "replicated_for_heads"


class LocalParameters:
    """Hooks of a module that reads its own parameters, the same on all ranks or its part of them, as plain tensors.

    During its forward the module finds, in place of each parameter, its values here as a plain tensor; with
    `sum_gradients`, as one whose gradient is summed over ranks, for a module that each rank uses for its own features
    or rows alone. So the sum is a part of autograd's graph: wherever the parameter comes from (copied, moved, sharded,
    passed by functional_call), whoever takes the gradient, once for each use, in the order of backward.
    """

    def __init__(self, module: nn.Module, context: str, sum_gradients: bool):
        self.names = [name for name, _ in module.named_parameters(recurse=False)]
        self.sum_gradients, self._context = sum_gradients, context
        self._check, self._path = None, ""
        self._parameters, self._lent = {}, False  # that forward finds replaced, and whether the parent's forward does
        self.has_reader = False  # ReadsChildren of a parent
        register_first(module, self._before)  # spectral_norm's hook reads parameters
        register_always(module, self._after)

    def _before(self, module, args):
        if not self._lent:
            self._replace(module)
        if self._check is not None and isinstance(module, nn.Linear) and args:
            self._check.watch_input(f"{self._path}weight", args[0])

    def _after(self, module, *_):
        if not self._lent:
            self._restore(module)

    def lend(self, module: nn.Module):
        """Replace them until `take_back`, where they are whole: a sharding system may gather them at a call alone."""
        self._lent = False
        own = [getattr(module, name) for name in self.names]
        if all(isinstance(each, DTensor) and each.device_mesh.ndim == 1 and not is_part(each) for each in own):
            self._replace(module)
            self._lent = True

    def take_back(self, module: nn.Module):
        self._lent = False
        self._restore(module)

    def _replace(self, module):
        self._restore(module)  # an interrupt may have ended the last forward
        for name in self.names:
            parameter = getattr(module, name)
            value = local(parameter)
            if self.sum_gradients and parameter.requires_grad and torch.is_grad_enabled():
                value = replicated(value, self._context)
                if self._check is not None:
                    value = self._check.watch_use(f"{self._path}{name}", value)
            if value is not parameter:
                self._parameters[name] = parameter
                module._parameters[name] = value  # not an attribute, which torch.compile of torch 2.11 can't take away

    def _restore(self, module):
        for name, parameter in self._parameters.items():
            module._parameters[name] = parameter
        self._parameters.clear()

    def watched_by(self, check, path: str):
        """Let a ReplicaCheck see the parts of the gradients that are summed. path: the parameters' prefix."""
        self._check, self._path = check, path

    @staticmethod
    def of(module: nn.Module) -> "LocalParameters | None":
        """The hooks that a module has."""
        owners = (getattr(hook, "__self__", None) for hook in module._forward_hooks.values())
        return next((owner for owner in owners if isinstance(owner, LocalParameters)), None)


class SummedOutput:
    """A hook of a module that is the same on all ranks, but whose output each rank's heads read: keys and values of all
    heads. The output's gradient is summed over ranks, so that those behind it, of parameters and input, are whole.

    features: of the output, the last ones are summed; None: all.
    """

    def __init__(self, module: nn.Module, context: str, features: int | None):
        self.features, self._context = features, context
        self._check, self._name = None, ""
        module.register_forward_hook(self._after)

    def _after(self, module, inputs, y: torch.Tensor) -> torch.Tensor:
        first, own = (None, y) if self.features is None else y.tensor_split([y.shape[-1] - self.features], -1)
        own = replicated(own, self._context)
        if self._check is not None and own.requires_grad:
            own = self._check.watch_use(self._name, own)
        return own if first is None else torch.cat((first, own), -1)

    def watched_by(self, check, path: str):
        """Let a ReplicaCheck see the parts of the gradient. path: the parameters' prefix."""
        self._check, self._name = check, f"{path}weight"


class ReadsChildren:
    """Hooks of a module whose forward may read the parameters of replicated children instead of calling them.

    It finds plain tensors there, too: a mixer of Mamba, for example, reads its convolution's weight.

    Sums of gradients concern what a child's own forward reads, so children with them are left out.
    """

    def __init__(self, module: nn.Module, children: list[tuple[nn.Module, LocalParameters]]):
        self._children = children
        module.register_forward_pre_hook(self._before)
        register_always(module, self._after)

    def _before(self, module, _):
        for child, hooks in self._children:
            hooks.lend(child)

    def _after(self, module, *_):
        for child, hooks in self._children:
            hooks.take_back(child)

    @classmethod
    def attach(cls, model: nn.Module):
        """To every module in a model that has such children, each of which is lent by one parent."""
        for module in model.modules():
            found = [(child, LocalParameters.of(child)) for child in _called(module)] if _calls(module) else []
            found = [(child, own) for child, own in found if own and not (own.sum_gradients or own.has_reader)]
            for _, hooks in found:
                hooks.has_reader = True
            if found:
                cls(module, found)


def register_first(module: nn.Module, hook: Callable):
    """Register a forward pre-hook that runs before the others.

    Its `prepend` moves an entry of an OrderedDict to the front, of which torch.compile's guards of torch 2.11 know
    nothing: they take one hook for another.
    """
    hooks = module._forward_pre_hooks
    others = list(hooks.items())
    hooks.clear()
    module.register_forward_pre_hook(hook)
    hooks.update(others)


def register_always(module: nn.Module, hook: Callable):
    """Register a forward hook that is called after a failure too, for good, by a number of this module's own.

    torch.compile guards on that number. torch counts over all modules, so that each block of a model would be compiled
    anew, and from the ninth one on none.
    """
    handle = module.register_forward_hook(hook, always_call=True)
    number = min(0, *module._forward_hooks) - 1
    for hooks in (module._forward_hooks, module._forward_hooks_always_called):
        hooks[number] = hooks.pop(handle.id)


def _calls(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _called(module: nn.Module):
    """The children of a module, those in lists and dictionaries of modules included."""
    for child in module.children():
        if _calls(child):
            yield child
        else:
            yield from _called(child)
