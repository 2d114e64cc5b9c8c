"""Values of parameters that stay whole: views of one buffer, to which every rank sends its part; who reads them when.

The buffer is a slot of the lifetime core (`tkernels.layers.lease`). Its parameters are found by their owner, so that
whoever reads them, a module's forward above all, waits for the gather that fills them and for nothing else.
"""

import contextlib
import functools
from types import SimpleNamespace

import torch
from torch import nn

from tkernels.comm.arguments import check_tensors, several
from tkernels.comm.fence import EventCompletion, capturing, current_stream
from tkernels.layers.data_parallel.layout import FlatLayout
from tkernels.layers.data_parallel.wire import Wire
from tkernels.layers.lease import Lease, Slot
from tkernels.layers.owners import check_free, check_whole, own, owner_of


class Buffer:
    """A slot with at most one open tenancy, whose readers may read until it ends."""

    def __init__(self, numel: int, like: torch.Tensor, dtype: torch.dtype, dev, name: str):
        self.slot = Slot(torch.empty(numel, dtype=dtype, device=like.device), dev=dev, name=name)
        self._readers = []

    @property
    def lease(self) -> Lease:
        """The open tenancy; begins a new one if there is none."""
        if self.slot.lease is None or self.slot.lease.released:
            self._readers = []
            return self.slot.acquire()
        return self.slot.lease

    def read(self, stream):
        """Order `stream` behind the writers; it may read until the end of the tenancy."""
        lease = self.lease
        if stream not in self._readers:
            with lease.read(stream):
                self._readers.append(stream)

    def end(self):
        """End the open tenancy, if any. All work of its readers must have been launched."""
        if self.slot.lease is None or self.slot.lease.released:
            return
        for stream in self._readers:
            self.slot.lease.read_by(EventCompletion(stream, capturing(self.slot.dev)))
        self.slot.release(self.slot.lease)

    @contextlib.contextmanager
    def changed(self):
        """A tenancy in which the current stream alone writes."""
        self.end()
        with self.lease.write() as tensor:
            yield tensor
        self.end()


class Values:
    """The parameters of a layout become views of `buffer` [n], with the values that they have.

    part: this rank's part of the buffer. comm_stream: on which ranks gather; None: the current one. stale: whether this
    rank may have changed its part, which has not been gathered since.
    """

    stale = False

    def __init__(self, name: str, layout: FlatLayout, wire: Wire, comm_stream, dev):
        self.name, self.layout, self.comm_stream, self.dev, self._wire = name, layout, comm_stream, dev, wire
        first = layout.parameters[0]
        self.buffer = Buffer(layout.numel, first, first.dtype, dev, f"parameters of {name}")
        self.part = layout.part(self.buffer.slot.tensor, wire.rank)
        with torch.no_grad(), self.buffer.lease.write() as whole:
            whole.zero_()
            for parameter, view in zip(layout.parameters, layout.views(whole), strict=True):
                view.copy_(parameter)
                # Views of one storage can't be saved by DCP's async_save; through dlpack each has a storage of its own.
                parameter.data = torch.from_dlpack(view)
        own(layout.parameters, self)

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter lies in the buffer."""
        begin, nbytes = self.buffer.slot.tensor.data_ptr(), self.buffer.slot.tensor.nbytes
        return parameter.numel() == 0 or 0 <= parameter.data_ptr() - begin < nbytes

    def ready(self):
        """Order the current stream behind the gather."""
        self.buffer.read(current_stream(self.dev))

    def replace(self, part: torch.Tensor | None = None, rows: tuple[int, ...] | None = None):
        """Collective. Gather new values, behind the work of this stream. part: of this rank, if it lies elsewhere.

        rows: elements that each rank sends; None: the layout's.
        """
        self.ready()  # earlier work on this stream may have read the old values, or made the part
        self.outdate()
        self._gather(part, rows)

    def outdate(self):
        """Make torch refuse a backward that needs values saved by forward and overwritten since."""
        torch.autograd.graph.increment_version(self.layout.parameters)

    def _gather(self, part=None, rows=None, where=None):
        self.buffer.end()
        comm = current_stream(self.dev) if self.comm_stream is None else self.comm_stream
        with self.dev.stream(comm), self.buffer.lease.write(comm) as whole:
            if part is not None:
                self.part.copy_(part)
            self._wire.all_gather(whole, rows or self.layout.rows, where)


def ensure_params_ready(params):
    """Order the current stream behind the gathers of these parameters, for code that reads them outside their modules.

    Starts no gather, and waits once per bucket and stream. The stream may read the parameters until the next update.
    Does nothing for parameters of which nobody updates a part. Raises LeaseError if their gather has not been started,
    and if it never will be, as their OverlappedDDP is gone.
    """
    params = several("ensure_params_ready: params", params, "parameters, as a module's parameters() gives them")
    for param in params:
        check_tensors("ensure_params_ready", param=param)
        check_whole(param)
    for values in _values_of(params):
        values.ready()


def wait_in_modules(root: nn.Module, parameters, waits: SimpleNamespace | None = None) -> list:
    """Let each module inside `root` wait for those of its own that are among `parameters`. Returns the handles.

    It waits in its forward, and for its state dict. waits.whole: a forward that is being compiled is to wait elsewhere.
    """
    handles, before_forward = [], functools.partial(_before_forward, waits or SimpleNamespace(whole=False))
    for module in root.modules():
        if any(parameter in parameters for parameter in module.parameters(recurse=False)):
            handles.append(module.register_forward_pre_hook(before_forward))
            handles.append(module.register_state_dict_pre_hook(_ensure_own_ready))
            handles.append(module.register_load_state_dict_pre_hook(_before_load_state_dict))
    return handles


def refuse_assignment(root: nn.Module) -> list:
    """Let no module inside `root` be assigned new parameters in place of those with owners. Returns the handles."""
    return [module.register_load_state_dict_pre_hook(_before_assignment) for module in root.modules()]


def _before_assignment(module, state, prefix, metadata, *_):
    if metadata.get("assign_to_params_buffers"):
        for name, parameter in module.named_parameters():
            check_free(f"load_state_dict(assign=True): {prefix}{name}", parameter)


def _values_of(params) -> dict[Values, None]:
    return {values: None for param in params if (values := owner_of(param, Values)) is not None}


def _before_forward(waits, module, _):
    if not (waits.whole and torch.compiler.is_compiling()):
        _ensure_own_ready(module)


@torch._disable_dynamo
def _ensure_own_ready(module, *_):
    ensure_params_ready(module.parameters(recurse=False))


def _before_load_state_dict(module, *_):
    """Order the load after gathers that are under way. A gather that has not started yet takes the loaded values."""
    for values in _values_of(module.parameters(recurse=False)):
        if not values.stale:
            values.ready()
