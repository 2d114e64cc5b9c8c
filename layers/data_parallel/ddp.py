"""OverlappedDDP: torch's DistributedDataParallel over this library's collectives and, with shards, Megatron's.

Parameters stay what they are, nn.Parameters of the module with `.grad`, as under torch's DDP: code that reads them,
tied ones and those without a dimension need no care. DTensors, and modules that hold less than all parameters, are what
`fully_shard` is for.

Where a bucket's gradients and values lie, and which stream uses them when, is said in param_bucket.py; when the
gradients of a bucket are complete, in grad_hooks.py; when a backward begins and ends, in backward.py. They add up to

                  prepare               take_over
    DELIVERED  ------------> PREPARED ------------> OPEN      `.grad` is the truth, then `main_grad` too, then alone
        ^                                             |
        +---------------------------------------------+
                  deliver, at the end of backward

Between two backwards, `.grad` is the truth, as in torch: it is `main_grad`, and whoever drops, zeroes, scales or
replaces it has done so to the sum that the next backward adds to. While gradients are added, `.grad` is None.

With the distributed optimizer, a rank keeps a shard of each bucket's sum and updates the same shard of the parameters,
which are views of a buffer of their own; they are gathered after the optimizer's step. With several instances of the
distributed optimizer, an instance consists of R/I neighbouring ranks. Sums are scattered inside an instance and then
all-reduced across instances, among the ranks that have the same shard.

Collectives start in the order of the buckets on every rank, even if the autograd graphs of the ranks differ. Parameters
are taken in reverse order, which approximates the order of their gradients.
"""

import contextlib
import enum
import itertools
import math
import numbers
import warnings
import weakref
from types import SimpleNamespace

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from tkernels.comm.arguments import check_flags, check_streams, check_torch_dtype, check_type, whole
from tkernels.comm.context import Context, MeshLike
from tkernels.comm.errors import LeaseError
from tkernels.comm.fence import capturing, current_stream
from tkernels.comm.group import checksum, listed
from tkernels.layers.data_parallel.backward import Backward, backward_runs
from tkernels.layers.data_parallel.layout import in_buckets
from tkernels.layers.data_parallel.norms import check_parts, counts, in_common, squared_norm
from tkernels.layers.data_parallel.param_bucket import Levels, ParamBucket, UpdatedValues
from tkernels.layers.data_parallel.values import Values, ensure_params_ready, refuse_assignment, wait_in_modules
from tkernels.layers.data_parallel.wire import Wire, check_backend, open_wire, stream_beside
from tkernels.layers.grad_hooks import GradReadyHooks
from tkernels.layers.graphs import captured
from tkernels.layers.marks import is_partial, is_split
from tkernels.layers.owners import (
    check_free,
    disown,
    not_elementwise,
    own,
    owner_of,
    parameters_of,
    remove_owners,
    weakly,
)
from tkernels.layers.tensor_parallel.replica_check import Trained


class State(enum.Enum):
    DELIVERED = "delivered"
    PREPARED = "prepared"
    OPEN = "open"


class OverlappedDDP(nn.Module):
    """Collective. Wraps a module and averages its gradients over the ranks, overlapped with backward.

        ddp = OverlappedDDP(module, mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(ddp.parameters())
        for x, y in batches:                     # each rank has its own
            optimizer.zero_grad()
            loss(ddp(x), y).backward()           # reductions start during backward, and this stream is behind them
            optimizer.step()

    module: its parameters must be equal on all ranks. Those that require a gradient at construction are trained.
    mesh: the ranks, as in `tkernels.comm.as_context`; None: those of the current context, or for backend="torch" of
        torch's default group.
    bucket_size: elements of a bucket; a larger parameter has a bucket of its own. Default: 40 million, or 1 million per
        rank if that is more; one bucket per dtype without overlap.
    overlap_grad_reduce: reduce during backward; otherwise at its end. The results are bit-identical.
    use_distributed_optimizer: every rank updates a shard of each bucket: see `owned_parameters`. Default: only if one
        of the next two options needs it.
    overlap_param_gather: after the update, the forward of each module waits for its own parameters only.
    num_distributed_optimizer_instances: I, which must divide R.
    average: gradients are the mean over ranks, otherwise the sum.
    grad_dtype: dtype of `main_grad`, in which gradients are added up and summed over ranks; default: the parameter's.
        If it differs, `.grad` is a copy of the sum in the parameter's dtype, as torch's optimizers require.
    comm_stream: default: that of all data parallelism over these ranks. dev: the module that provides streams; default:
        torch's module of the parameters' device.

    Gradients are added to `main_grad` once autograd has produced them, small ones of a bucket together. Fused and
    deferred kernels add to `param.main_grad` themselves and report it: see `grad_hooks`. Every backward outside of
    `no_sync` reduces: all ranks must run the same number of them. One that fails discards the gradients since the last
    step. Buffers are not synchronised; batch norms are warned of. Hooks that users register see a rank's own gradient;
    an optimizer's step in one raises LeaseError.

    Raises ValueError or TypeError for options or parameters that are not supported, MismatchError if ranks disagree on
    parameters or options; on every rank, whichever it concerns.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        mesh: MeshLike = None,
        bucket_size: int | None = None,
        overlap_grad_reduce: bool = True,
        overlap_param_gather: bool = False,
        use_distributed_optimizer: bool | None = None,
        num_distributed_optimizer_instances: int = 1,
        average: bool = True,
        grad_dtype: torch.dtype | None = None,
        comm_stream=None,
        backend: str = "tkernels",
        dev=None,
    ):
        super().__init__()
        wire = open_wire("OverlappedDDP", backend, mesh)
        with wire.group.checking():
            check_backend("OverlappedDDP", backend)
            check_type("OverlappedDDP: module", module, nn.Module, "an nn.Module")
            flags = dict(overlap_grad_reduce=overlap_grad_reduce, overlap_param_gather=overlap_param_gather)
            if use_distributed_optimizer is not None:
                flags["use_distributed_optimizer"] = use_distributed_optimizer
            check_flags("OverlappedDDP", average=average, **flags)
            if grad_dtype is not None:
                check_torch_dtype("OverlappedDDP: grad_dtype", grad_dtype)
            params = {name: param for name, param in module.named_parameters() if param.requires_grad}
            instances = whole("OverlappedDDP: num_distributed_optimizer_instances", num_distributed_optimizer_instances)
            needs_shards = overlap_param_gather or instances > 1
            sharded = needs_shards if use_distributed_optimizer is None else use_distributed_optimizer
            if needs_shards and not sharded:
                raise ValueError(
                    "OverlappedDDP: overlap_param_gather and num_distributed_optimizer_instances > 1 are about shards "
                    "of the parameters; leave out use_distributed_optimizer=False"
                )
            check_type("OverlappedDDP: bucket_size", bucket_size, numbers.Real | None, "a number of elements, or None")
            if bucket_size is not None and not bucket_size >= 1:
                raise ValueError(f"OverlappedDDP: bucket_size={bucket_size} must be positive, or None")
            if any(isinstance(each, nn.parallel.DistributedDataParallel) for each in module.modules()):
                raise ValueError(
                    "OverlappedDDP: the module is or has one of torch's DistributedDataParallel, which reduces its "
                    "gradients; wrap what that wraps"
                )
            _check_parameters(params, wire, grad_dtype)
            if instances < 1 or wire.size % instances:
                raise ValueError(
                    f"OverlappedDDP: num_distributed_optimizer_instances={instances} must divide the {wire.size} ranks"
                )
            device = next(iter(params.values())).device
            dev = torch.get_device_module(device) if dev is None else dev
            check_streams("OverlappedDDP", dev, None if isinstance(backend, Wire) else device, comm_stream=comm_stream)
        if bucket_size is None:
            bucket_size = max(40_000_000, 1_000_000 * wire.size) if overlap_grad_reduce else math.inf
        remove_owners(params.values(), OverlappedDDP)
        options = {
            "bucket_size": bucket_size,
            "use_distributed_optimizer": sharded,
            "num_distributed_optimizer_instances": instances,
            "average": average,
            "grad_dtype": grad_dtype,
            "backend": backend,
        }
        layouts = {name: f"{list(param.shape)} of {param.dtype}" for name, param in params.items()}
        for alike in (options, layouts):  # a parameter may have an option's name
            wire.group.check_alike("OverlappedDDP", "options and parameters", alike, "pass the same on all")
        wire.group.check_alike(
            "OverlappedDDP", "values", {name: checksum(param) for name, param in params.items()},
            "begin with the same parameters (one seed, or a broadcast of rank 0's)",
        )  # fmt: skip

        self.module, self.dev, self.sharded = module, dev, sharded
        self.comm_stream = stream_beside(wire.ctx, dev) if comm_stream is None else comm_stream
        self.overlap_param_gather = overlap_param_gather
        self.levels = Levels(wire, sharded, instances, average)
        self.buckets = [
            ParamBucket(f"bucket {index}", members, grad_dtype, self.levels, self.comm_stream, dev)
            for index, members in enumerate(
                in_buckets(reversed(params.values()), _kind, lambda _: bucket_size, torch.Tensor.numel)
            )
        ]
        self.values = [bucket.values for bucket in self.buckets if bucket.values is not None]
        self.shards = [values.shard for values in self.values]
        self.bucket_of = {param: bucket for bucket in self.buckets for param in bucket.parameters}
        parts = [(part, name, param) for part in module.modules() for name, param in part._parameters.items()]
        self._places = [place for place in parts if place[-1] in self.bucket_of]
        self._names = names = {param: name for name, param in module.named_parameters()}  # which it may lose later
        self.hooks = GradReadyHooks(
            self.bucket_of,
            ParamBucket.reduce,
            buckets=self.bucket_of.values(),
            names=[names[param] for param in self.bucket_of],
            passes=self,
        )
        own([*self.bucket_of, *self.shards], self)
        self.removed, self.overlap_grad_reduce = False, overlap_grad_reduce
        self.require_backward_grad_sync = True
        self.handed_out = not self.sharded  # whether somebody has asked for the shards
        self._told = False  # of gradients that somebody has changed
        self._waits = SimpleNamespace(whole=False)
        self._state = State.DELIVERED
        self._reduced = None  # whether `.grad` is a sum over ranks, or this rank's own, by no_sync; None: neither
        self._due = False  # a backward has ended that reduces
        self._aside = {}  # the .grad of parameters to which autograd is adding
        self._backward = Backward(self._end_backward)
        self._stream = None  # that of the last backward's caller
        self._number = next(_numbers)
        _wrappers[self._number] = self
        self.handles = refuse_assignment(module)
        # torch's DistributedDataParallel around this one finds nothing to train, and says so.
        self._ddp_params_and_buffers_to_ignore = {f"module.{name}" for name in params}
        _warn_of_statistics(module, wire)
        if self.sharded:
            self.handles += wait_in_modules(module, self.bucket_of, self._waits)

    def forward(self, *arguments, **options):
        """Call the module. Starts to gather what was updated by other means than a step of one of torch's optimizers.

        After a backward it can't always tell whether there was such an update. While torch has seen no write to some
        bucket's shard, parameters are gathered by this call, and again by the next one.
        """
        if self.sharded:
            self._before_forward(torch.compiler.is_compiling())
        return self._watch(self.module(*arguments, **options))

    def owned_parameters(self) -> list[nn.Parameter]:
        """The parameters that this rank's optimizer updates: all or, with the distributed optimizer, its shards.

        A shard is this rank's part of a bucket: 1-D, and cut without regard to the borders of parameters. Elementwise
        optimizers work on it. Code that looks at all gradients sees this rank's part of them:
        `tkernels.layers.clip_grad_norm_` has the norm of all, and torch's ShardedGradScaler skips steps on all ranks,
        where those that torch.amp.GradScaler lets step alone end in MismatchError. With shards, the step of an
        optimizer of the module's own parameters raises ValueError, and torch's clip_grad_norm_ over them RuntimeError.
        """
        self.handed_out = True
        return [owned for bucket in self.buckets for owned in bucket.owned]

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True):
        """Begin a step: zero `main_grad` at once, and set `.grad` to None.

        An optimizer's zero_grad is enough, unless kernels add to `main_grad` and the module is not called through this
        one, or a rank may have no backward in this step. set_to_none: accepted as in torch, without effect.
        """
        self._check_there()
        self._check_places()
        self._forget_gradients()
        for bucket in self.buckets:
            bucket.drop()
            bucket.zero()
        self._state = State.PREPARED

    @contextlib.contextmanager
    def no_sync(self):
        """A context for all backward passes of a step except the last: gradients accumulate and no reduction starts."""
        before, self.require_backward_grad_sync = self._sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward reduces: as no_sync sets it, for loops that set this attribute of torch's themselves."""
        return self._sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, sync: bool):
        check_flags("OverlappedDDP", require_backward_grad_sync=sync)
        self._sync, self.hooks.counting = sync, sync and self.overlap_grad_reduce

    @torch._disable_dynamo
    def start_grad_sync(self):
        """Collective. Start the reductions that have not started yet. No gradient may be produced after this call."""
        self._check_there()
        self._check_frozen()
        if self._state is not State.OPEN:
            if self._reduced and self._delivered:
                self._check_marks()
                return
            self._take_over()  # what no_sync has accumulated, or the zeros of a rank that had no backward
        self.hooks.flush()

    @torch._disable_dynamo
    def finish_grad_sync(self, stream=None):
        """Collective. Order `stream` (None: the current one) behind all reductions of this step.

        Backward does this for its caller's stream. Call it for another stream, after accumulating in no_sync alone, or
        on a rank that had no backward in this step: `main_grad` is then the mean over ranks (the sum without
        `average`), with shards only in this rank's shards. Until the next backward, only the streams that this was
        called for may use gradients. Raises ValueError for a parameter in a shard that was frozen after the module was
        wrapped, LeaseError for a gradient that came too late and was not reported.
        """
        check_streams("finish_grad_sync", self.dev, None, stream=stream)
        self.start_grad_sync()
        self._finish(current_stream(self.dev) if stream is None else stream)

    @torch._disable_dynamo
    def start_param_sync(self):
        """Collective. Gather the shards, in the order of forward, behind the optimizer's kernels launched so far.

        Each step of one of torch's optimizers ends with that, and the next call of this object begins with it after any
        other update; called right after that, gathers start earlier. Its kernels are on the current stream, on that of
        backward's caller, or on one that `finish_grad_sync` was called for. Without overlap_param_gather the current
        stream is ordered behind the gathers. Raises RuntimeError without shards, and warns if no optimizer can have
        updated them.
        """
        if not self.sharded:
            raise RuntimeError("start_param_sync: every rank has updated all parameters; there are no shards to gather")
        self._gather_updates()

    @contextlib.contextmanager
    def captured(self, graph, *, streams=()):
        """Capture whole steps in a CUDA graph: `graph` is torch.cuda.graph(...), not yet entered.

            with ddp.captured(torch.cuda.graph(g)) as replay:
                step()
            replay()

        Run a few steps before the capture, and drop their losses: an autograd graph that is alive keeps its stream.
        Updated parameters are gathered before the capture and at its end. `replay()` is ordered with the work launched
        outside.
        streams: those that the capture uses besides its own and the comm stream.
        """
        slots = [bucket.grads.slot for bucket in self.buckets] + [values.buffer.slot for values in self.values]

        def settled_replay():
            self.settle()
            replay()

        self.settle()
        try:
            with captured(graph, slots=slots, streams=[self.comm_stream, *streams], dev=self.dev) as replay:
                yield settled_replay
                self.settle()
        except BaseException:
            self._forget_gradients()
            for values in self.values:
                values.forget_update()  # the update was captured, but did not run
            raise

    def remove(self):
        """Collective. Take hooks and buckets off the module.

        The module is then as before it was wrapped, with its current parameter values. Afterwards this object only
        forwards to the module. May be repeated.
        """
        if self.removed:
            return
        self.removed = True
        _wrappers.pop(self._number, None)
        if any(values.awaits_gather for values in self.values):
            self._gather(self.values)
        ensure_params_ready(self.bucket_of)
        self.hooks.remove()
        for handle in self.handles:
            handle.remove()
        for param in self.bucket_of:
            if owner_of(param, OverlappedDDP) is self:
                del param.main_grad
                param.grad = None
        disown([*self.bucket_of, *self.shards], self)
        for values in self.values:
            disown(self.bucket_of, values)

    def __getstate__(self):
        raise TypeError(
            "OverlappedDDP: it belongs to its rank, and can't be copied or pickled; copy or save its module, as by "
            "AveragedModel(ddp.module), and wrap a copy that is to be trained"
        )

    def _apply(self, function, recurse=True):
        for parameter in () if self.removed else self.bucket_of:
            self.check_place(parameter, function(parameter.detach()))
        return super()._apply(function, recurse)

    # Forward

    @torch._disable_dynamo
    def _before_forward(self, compiled: bool):
        """With shards: gather what may have been updated. compiled: whether the caller is being compiled."""
        if any(values.awaits_gather for values in self.values):
            unwritten = [values for values in self.values if values.unwritten]
            self._gather_updates()
            for values in unwritten:
                values.expect_update()
        # A compiled module would break its graph at the hooks of the modules in it, so it is made to wait as a whole.
        self._waits.whole = compiled or any(
            module._compiled_call_impl is not None or hasattr(module, "_orig_mod")  # by compile(), torch.compile
            for module in self.module.modules()
        )
        if self._waits.whole:
            ensure_params_ready(self.bucket_of)

    @torch._disable_dynamo
    def _watch(self, output):
        """Hear of the backward that begins with these outputs."""
        enter = weakly(self.enter_backward)  # outputs may outlive this object
        outputs = [each for each in tree_leaves(output) if isinstance(each, torch.Tensor) and each.grad_fn is not None]
        if outputs and not self.removed:
            self._check_alone()
        for tensor in outputs:
            tensor.register_hook(lambda _: enter())
        return output

    def _gather_updates(self):
        """Collective. Gather the shards, in the order of forward."""
        if not self.handed_out:
            self.handed_out = True  # warn only once
            warnings.warn(
                "OverlappedDDP: no optimizer can have updated the shards, since nobody has asked for them; make it of "
                "owned_parameters(), not of parameters()",
                stacklevel=3,
            )
        self._check_places()
        self._gather(self.values)

    def _gather(self, updated: list[UpdatedValues], stepped: bool = False):
        for values in reversed(updated):
            values.gather(stepped)
        for values in () if self.overlap_param_gather else updated:
            values.ready()

    def after_step(self, parameters: set):
        """Collective. Called after each optimizer's step, with its parameters: gather the shards among them.

        Whoever reads the model's parameters then finds them whole, with overlap_param_gather after
        `ensure_params_ready`. A step that is captured by itself is no update yet; forward gathers those of its replays.
        """
        updated = [values for values in self.values if values.shard in parameters and values.awaits_gather]
        if updated and not capturing(self.dev):
            self._check_places()
            self._gather(updated, stepped=True)

    def settle(self):
        """End all tenancies, as required at both edges of a capture. Zeros of outside are not those of the graph."""
        if self._state is State.PREPARED:
            self._state = State.DELIVERED
        if any(values.awaits_gather for values in self.values):
            self._gather(self.values)
        for bucket in self.buckets:
            bucket.grads.end()
        for values in self.values:
            values.buffer.end()

    # Backward

    def enter_backward(self, parameter: nn.Parameter | None = None):
        """Called by whatever comes first in a backward: arrange for its end, and let `main_grad` be what .grad says.

        parameter: to which autograd is about to add. It must not do so in place, or in another dtype's `.grad`.
        """
        if self.removed:
            return
        if not self._backward.runs:
            self._enter_backward()
        if parameter is not None and parameter.grad is not None:
            self._aside[parameter], parameter.grad = parameter.grad, None

    @torch._disable_dynamo  # as of the end: what counts writes counts otherwise in a trace of a step
    def _enter_backward(self):
        if self._backward.failed:
            self._put_back()
            if self._state is State.OPEN:
                self._forget_gradients()
            self._state = State.DELIVERED
        if self._backward.begin() and self._state is State.DELIVERED:
            self._prepare()

    def begin(self, written: bool):
        """Called before a gradient is taken. written: a kernel has added to `main_grad` already."""
        if self._state is State.OPEN and self._backward.runs or not backward_runs():
            return  # begun, or after backward
        early = self._state is not State.PREPARED
        self.enter_backward()
        if self._state is not State.OPEN:
            if written and (early or self._reduced and any(bucket.must_be_shared for bucket in self.buckets)):
                raise LeaseError(
                    "OverlappedDDP: a kernel added to main_grad before this object knew that a backward had begun; "
                    "call the wrapper, not its module, or begin by the wrapper's zero_grad()"
                )
            self._take_over()

    def end_deferred(self):
        """Called after the last gradient that was deferred."""
        if self._state is State.OPEN and not self._backward.begun:
            self._end_pass()

    def _prepare(self):
        self._check_marks()
        taken = self.hooks.taken
        self.hooks.reset([parameter for bucket in self.buckets for parameter in bucket.prepare(taken)])
        self._state = State.PREPARED

    def _take_over(self):
        self._check_frozen()
        self._put_back()
        if self._state is State.DELIVERED:
            self._prepare()
        for bucket in self.buckets:
            bucket.take_over(reduced=bool(self._reduced))
        self._state, self._reduced = State.OPEN, None

    def _put_back(self):
        for parameter, grad in self._aside.items():
            parameter.grad = grad
        self._aside = {}

    @torch._disable_dynamo
    def _end_backward(self):
        self._put_back()
        if self._state is not State.OPEN:
            self._state = State.DELIVERED
            return
        self._stream = current_stream(self.dev)
        self._due |= self._sync
        if self.hooks.waiting:
            self.hooks.place_held()
        else:
            self._end_pass()

    def _end_pass(self):
        if self._due:
            self.hooks.flush()
            self._finish(self._stream)
        else:
            self._deliver(self._stream, reduced=False)

    def _finish(self, stream):
        if self._state is State.OPEN:
            self.hooks.forget_deferred()
            self._deliver(stream, reduced=True)
        for bucket in self.buckets:
            bucket.finish(stream)

    def _deliver(self, stream, reduced: bool):
        self._state, self._reduced, self._due = State.DELIVERED, reduced, False
        self.hooks.zero_blank(stream)
        for bucket in self.buckets:
            bucket.deliver(stream, reduced)

    def _forget_gradients(self):
        """Discard what has been accumulated, and what a failed backward left."""
        self.hooks.reset()
        self.hooks.forget_deferred()
        self._state, self._reduced, self._due, self._aside = State.DELIVERED, None, False, {}
        self._backward.forget()

    # Norms

    def check_tensor_parallel(self, caller: str, ctx: Context):
        """Raises ValueError if parameters are split over ranks of `ctx` that are ranks of this object, too.

        And if they are split over more ranks.
        """
        check_parts(caller, self.bucket_of, ctx)
        group, ours = ctx.group, self.levels.whole.group
        common = in_common(group, ours)
        if common and any(map(is_split, self.bucket_of)):
            raise ValueError(
                f"{caller}: some parameters are split over tensor-parallel ranks, but of the ranks of mesh, "
                f"{common} are data-parallel ranks of an OverlappedDDP, with the same parts; pass mesh=, the "
                f"ranks that layers are split over"
            )

    def squared_norm(self, shards: set[nn.Parameter], tensor_parallel: Context | None) -> torch.Tensor:
        """Collective. What this rank adds to the squared 2-norm over the tensor-parallel ranks, if any, fp32 [1].

        That is the sum over the data-parallel ranks of the gradients of their shards, with 0 for shards that are not
        among `shards`. It counts replicated parameters on the first tensor-parallel rank alone.
        """
        device, split = self.buckets[0].grads.slot.tensor.device, any(map(is_split, self.bucket_of))
        parts = [part for bucket in self.buckets if bucket.owned[0] in shards for part in bucket.pieces()]
        across = tensor_parallel if split else None  # which may be the ranks that shards are over
        total = squared_norm((grad for param, grad, _ in parts if counts(param, across)), device)
        if self.sharded:
            self.levels.inside.all_reduce(total)
        return total if split or tensor_parallel is None or tensor_parallel.rank == 0 else torch.zeros_like(total)

    def pieces_of(self, shard: nn.Parameter) -> list[Trained] | None:
        """The parameters of a shard's bucket, with this rank's pieces of their gradients; None for what is no shard."""
        bucket = next((bucket for bucket in self.buckets if self.sharded and bucket.owned[0] is shard), None)
        return bucket and [
            Trained.piece(self._name_of(parameter), parameter, grad, *piece)
            for parameter, grad, piece in bucket.pieces()
        ]

    # What is refused

    def check_step(self, optimizer: torch.optim.Optimizer, parameters: set):
        """Called before each optimizer's step, with its parameters."""
        wrong = next((param for param in self.bucket_of if param in parameters), None)
        if self.sharded and wrong is not None:
            raise ValueError(
                f"OverlappedDDP: an optimizer has {self._name_of(wrong)}, but each rank updates its shards of the "
                f"parameters; make the optimizer of owned_parameters(), or pass use_distributed_optimizer=False and "
                f"don't overlap the gathers"
            )
        others = {param for param in parameters if param.requires_grad and owner_of(param) is None}
        missed = next((param for param in self.module.parameters() if param in others), None) if others else None
        if missed is not None:
            raise ValueError(
                f"OverlappedDDP: an optimizer has {self._name_of(missed)}, which was unfrozen or added after the "
                f"module was wrapped, so that each rank would train it by its own gradient; remove() this and wrap the "
                f"module again"
            )
        running = self._state is State.OPEN or self._backward.begun and not self._backward.failed
        unreduced = running or self._reduced is False and self._delivered
        if unreduced and (wrong is not None or not parameters.isdisjoint(self.shards)):
            raise LeaseError(
                "OverlappedDDP: an optimizer's step before the gradients are reduced: in a hook of backward (step "
                "after backward), after one that failed (begin again by the wrapper's zero_grad()), or when all were "
                "in no_sync or deferred gradients have yet to come (call finish_grad_sync() after them)"
            )
        if not parameters.isdisjoint(self.shards):
            if kind := not_elementwise(type(optimizer)):
                other = "" if kind == "LBFGS" else ", or take ZeroOptimizer with partition='parameters'"
                raise ValueError(
                    f"OverlappedDDP: {kind} looks at whole parameters, but each rank updates pieces of them; pass "
                    f"use_distributed_optimizer=False and don't overlap the gathers{other}"
                )
            if not self._told and any(bucket.changed for bucket in self.buckets):
                self._told = True
                warnings.warn(
                    "OverlappedDDP: the gradients of its shards have been changed since backward. If torch's "
                    "clip_grad_norm_ did so, each rank has clipped by the norm of its own shards: call "
                    "tkernels.layers.clip_grad_norm_(ddp.owned_parameters(), max_norm) instead. What scales all ranks' "
                    "alike is right",
                    stacklevel=5,
                )
            for bucket in self.buckets:
                if changed := bucket.overridden:
                    raise LeaseError(
                        f"OverlappedDDP: the .grad of {self._name_of(changed[0])} was replaced or scaled, but "
                        f"gradients lie in shards; change those of owned_parameters(), or set it to None to drop it"
                    )
                if bucket.dropped:
                    bucket.prepare()
                    bucket.finish(current_stream(self.dev))

    def check_place(self, parameter: nn.Parameter, now: torch.Tensor):
        """Raises LeaseError if `now`, which a parameter has become, is not where its bucket has it."""
        if not self.bucket_of[parameter].holds(now):
            raise LeaseError(
                f"OverlappedDDP: {self._name_of(parameter)} is converted or moved, but its gradients and what ranks "
                f"gather are not; do so before a module is wrapped, or remove() this and wrap it again"
            )

    @property
    def _delivered(self) -> bool:
        return any(bucket.delivered for bucket in self.buckets)

    def _check_places(self):
        for param in self.bucket_of:
            self.check_place(param, param)

    def _check_alone(self):
        """Raises ValueError if something around this object takes the parameters, or what backward adds to them."""
        ddp = nn.parallel.DistributedDataParallel._active_ddp_module
        if ddp is not None and not self.bucket_of.keys().isdisjoint(ddp._module_parameters):
            raise ValueError(
                "OverlappedDDP: it is inside of torch's DistributedDataParallel, which reduces the same gradients; "
                "wrap the whole model by one of them, or tell torch's to ignore these parameters "
                "(_set_params_and_buffers_to_ignore_for_model)"
            )
        now = [part._parameters.get(name) for part, name, _ in self._places]
        # Tensors may stand in for parameters in one call, as by torch.func.functional_call, and tied ones for good.
        others = [each for each in now if isinstance(each, nn.Parameter) and each.requires_grad]
        if missing := [each for each in others if each not in self.bucket_of]:
            raise ValueError(
                f"OverlappedDDP: {len(missing)} parameters that it reduces are not the module's any more, as inside of "
                f"torch's fully_shard, which replaces them; leave them to that, or remove() this and wrap the module "
                f"again"
            )

    def _check_there(self):
        if self.removed:
            raise LeaseError("OverlappedDDP: it was removed from its module, perhaps for another one; use that")

    def _check_marks(self):
        if (name := self.hooks.stale_mark) is not None:
            raise LeaseError(
                f"OverlappedDDP: a kernel added to the main_grad of {name} (grad_added_to_main_grad) outside of a "
                f"backward that this object knows of. Call the wrapper, not its module, or begin by its zero_grad(); a "
                f"kernel that comes after backward is announced there, by grad_ready_hooks(param).defer(param)"
            )

    def _check_frozen(self):
        frozen = next((param for param in self.bucket_of if not param.requires_grad), None)
        if self.sharded and frozen is not None:
            raise ValueError(
                f"OverlappedDDP: {self._name_of(frozen)} was frozen after the module was wrapped, but lies in a shard "
                f"that is updated as a whole, by weight decay too; wrap the module again"
            )

    def _name_of(self, parameter: nn.Parameter) -> str:
        now = (name for name, each in self.module.named_parameters() if each is parameter)
        return next(now, self._names.get(parameter, "a parameter"))


def _warn_of_statistics(module: nn.Module, wire: Wire):
    """Warn of running statistics, which each rank has of its own batches, while torch's wrapper keeps rank 0's."""
    norms = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.modules.batchnorm._NormBase)]
    moving = [(name, part) for name, part in norms if part.track_running_stats and part.training]
    found = [name for name, part in moving if not isinstance(part, nn.SyncBatchNorm)]
    if found and wire.size > 1:
        warnings.warn(
            f"OverlappedDDP: the running statistics of {listed(found)} are not synchronised, so that ranks would "
            f"evaluate differently; convert the module before, by torch.nn.SyncBatchNorm.convert_sync_batchnorm, or "
            f"broadcast these buffers before you evaluate or save",
            stacklevel=3,
        )


def _kind(parameter: nn.Parameter) -> tuple:
    """What the parameters of a bucket have in common.

    Those marked sequence_parallel have buckets of their own. The sums over tensor-parallel ranks that they get need
    shards with the same borders, which parameters that are split unevenly would move.
    """
    return parameter.dtype, is_partial(parameter)


def _check_parameters(params: dict[str, nn.Parameter], wire: Wire, grad_dtype: torch.dtype | None):
    if not params:
        raise ValueError("OverlappedDDP: no parameter of the module requires a gradient; there is nothing to train")
    first, device = next((name, param.device) for name, param in params.items())
    for name, param in params.items():
        check_free(f"OverlappedDDP: {name}", param, OverlappedDDP, GradReadyHooks, Values)
        if param.device != device:
            raise ValueError(f"OverlappedDDP: {name} is on {param.device}, and {first} on {device}; move them together")
        wire.check(f"OverlappedDDP: {name}", param, grad_dtype or param.dtype)


@contextlib.contextmanager
def changing_main_grads(params):
    """A context in which the current stream changes `main_grad`. It begins as what `.grad` says; `.grad` follows.

    Does nothing for parameters without buckets.
    """
    wrappers = {owner_of(param, OverlappedDDP) for param in params} - {None}
    for ddp in wrappers:
        for bucket in () if ddp._state is State.OPEN else ddp.buckets:
            bucket.prepare()
    yield
    for ddp in wrappers:
        for bucket in ddp.buckets:
            bucket.follow()
            bucket.finish(current_stream(ddp.dev))


_wrappers = weakref.WeakValueDictionary()  # all that may own an optimizer's parameters, in their order on all ranks
_numbers = itertools.count()


@register_optimizer_step_pre_hook
@torch._disable_dynamo
def _before_step(optimizer, *_):
    if wrappers := list(_wrappers.values()):
        parameters = set(parameters_of(optimizer))
        for ddp in wrappers:
            ddp.check_step(optimizer, parameters)


@register_optimizer_step_post_hook
@torch._disable_dynamo
def _after_step(optimizer, *_):
    if wrappers := [ddp for ddp in _wrappers.values() if ddp.sharded]:
        parameters = set(parameters_of(optimizer))
        for ddp in wrappers:
            ddp.after_step(parameters)
