"""OverlappedDDP: data-parallel training that overlaps gradient reductions and parameter gathers with computation.

Parameters are taken in reverse order, which approximates the order of their gradients, and grouped into buckets. The
gradients of a bucket are contiguous: each parameter has `main_grad`, a view of its bucket. Once all gradients of a
bucket are produced (`grad_hooks`), its reduction starts on the comm stream. Each bucket is a slot of the lifetime core
(`tkernels.layers.lease`), with one tenancy after the other:

    tenancy               written by                                     read by
    as `.grad` says       the stream on which backward begins
    accumulated           the streams of hooks and of fused kernels
    reduced               the comm stream, in place                      the stream of backward's caller

The reduction is therefore ordered after every kernel that wrote a gradient, on whatever stream, and after nothing else.
Between two backwards, `.grad` is the truth, as in torch: it is `main_grad`, and whoever drops, zeroes, scales or
replaces it has done so to the sum that the next backward adds to. During backward `.grad` is None.

With the distributed optimizer, a rank keeps a shard of each bucket's sum and updates the same shard of the parameters.
The parameters of a bucket are then contiguous, too, and a slot of their own:

    gathered              the comm stream, in place                      the streams of forward and backward
    updated               the stream of the optimizer, its shard

With several instances of the distributed optimizer, an instance consists of R/I neighbouring ranks. Sums are scattered
inside an instance and then all-reduced across instances, among the ranks that have the same shard.

Collectives start in the order of the buckets on every rank, even if the autograd graphs of the ranks differ.
"""

import contextlib
import functools
import math
import warnings
import weakref
from types import SimpleNamespace

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from tkernels.comm.arguments import check_type
from tkernels.comm.collectives import SUMMED
from tkernels.comm.context import Context, MeshLike
from tkernels.comm.errors import LeaseError, MismatchError
from tkernels.comm.fence import EventCompletion, capturing
from tkernels.comm.group import checksum, first_difference
from tkernels.comm.regions import round_up
from tkernels.layers.data_parallel.norms import counts, squared_norm
from tkernels.layers.data_parallel.wire import Wire, open_wire
from tkernels.layers.grad_hooks import GradReadyHooks
from tkernels.layers.graphs import captured
from tkernels.layers.lease import Lease, Slot
from tkernels.layers.marks import is_split
from tkernels.layers.owners import disown, own, owner_of, remove_owners

ALIGN_BYTES = 128  # alignment of a parameter in its bucket: whole cache lines, and more than TMA requires


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
    average: divide by R before the sum. Otherwise gradients are the sum over ranks.
    grad_dtype: dtype of `main_grad`, in which gradients are added up and summed over ranks; default: the parameter's.
        If it differs, `.grad` is a copy of the sum in the parameter's dtype, as torch's optimizers require.
    comm_stream: default: a new one. dev: the module that provides streams; default: torch's module of the parameters'
        device.

    A gradient is added to `main_grad` as soon as autograd has produced it. Fused and deferred kernels add to
    `param.main_grad` themselves and report it: see `grad_hooks`. Every backward outside of `no_sync` reduces: all ranks
    must run the same number of them. One that fails discards the gradients since the last step. Buffers are not
    synchronised.

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
        whole = open_wire("OverlappedDDP", backend, mesh)
        with whole.group.checking():
            check_type("OverlappedDDP: module", module, nn.Module, "an nn.Module")
            params = {name: param for name, param in module.named_parameters() if param.requires_grad}
            needs_shards = overlap_param_gather or num_distributed_optimizer_instances > 1
            self.sharded = needs_shards if use_distributed_optimizer is None else use_distributed_optimizer
            if needs_shards and not self.sharded:
                raise ValueError(
                    "OverlappedDDP: overlap_param_gather and num_distributed_optimizer_instances > 1 are about shards "
                    "of the parameters; leave out use_distributed_optimizer=False"
                )
            if bucket_size is not None and not bucket_size >= 1:
                raise ValueError(f"OverlappedDDP: bucket_size={bucket_size} must be positive, or None")
            _check_parameters(params, grad_dtype)
            if num_distributed_optimizer_instances < 1 or whole.size % num_distributed_optimizer_instances:
                raise ValueError(
                    f"OverlappedDDP: num_distributed_optimizer_instances={num_distributed_optimizer_instances} must "
                    f"divide the {whole.size} ranks"
                )
        if bucket_size is None:
            bucket_size = max(40_000_000, 1_000_000 * whole.size) if overlap_grad_reduce else math.inf
        remove_owners(params.values(), OverlappedDDP)
        options = {
            "bucket_size": bucket_size,
            "use_distributed_optimizer": self.sharded,
            "num_distributed_optimizer_instances": num_distributed_optimizer_instances,
            "average": average,
            "grad_dtype": grad_dtype,
            "backend": backend,
        }
        _check_agreement(whole, options, params)

        self.module = module
        self.overlap_param_gather = overlap_param_gather
        self.dev = torch.get_device_module(next(iter(params.values())).device) if dev is None else dev
        self.comm_stream = self.dev.Stream() if comm_stream is None else comm_stream
        groups = _group(reversed(params.values()), bucket_size)
        largest = max(_num_bytes(members, grad_dtype) for members in groups)
        self._levels = _Levels(whole, self.sharded, num_distributed_optimizer_instances, average, largest)
        self.buckets = [
            _Bucket(f"bucket {index}", members, grad_dtype, self._levels, self.comm_stream, self.dev)
            for index, members in enumerate(groups)
        ]
        self._bucket_of = {param: bucket for bucket in self.buckets for param in bucket.parameters}
        names = {param: name for name, param in params.items()}
        self.hooks = GradReadyHooks(
            self._bucket_of,
            _Bucket.reduce,
            buckets=self._bucket_of.values(),
            names=[names[param] for param in self._bucket_of],
            passes=self,
        )
        self.hooks.counting = overlap_grad_reduce
        own([*self._bucket_of, *self.shards], self)
        self._removed, self._pre_hooks, self._waits = False, [], SimpleNamespace(whole=False)
        self._handed_out = not self.sharded  # whether somebody has asked for the shards
        self._sync = True
        self._prepared = False  # main_grad is what .grad says: a kernel may add to it before its gradient is reported
        self._open = False  # .grad is taken over: gradients are in main_grad alone
        self._due = False  # a backward has ended that reduces
        self._reduced = False  # main_grad is the sum over ranks
        self._local = False  # .grad is what no_sync has accumulated on this rank
        self._aside = {}  # the .grad of parameters to which autograd is adding
        self._callback = None  # weak reference to what ends the running backward
        self._stream = None  # that of the last backward's caller
        _wrappers.add(self)
        _watch_optimizers()
        if self.sharded:
            self._pre_hooks = [
                child.register_forward_pre_hook(functools.partial(_before_forward, self._waits))
                for child in module.modules()
                if any(param in self._bucket_of for param in child.parameters(recurse=False))
            ]
            self._pre_hooks.append(module.register_state_dict_pre_hook(_before_state_dict))
        self._pre_hooks.append(module.register_load_state_dict_pre_hook(_before_load_state_dict))

    def forward(self, *arguments, **options):
        """Call the module. Starts to gather updated parameters if `start_param_sync` has not been called.

        After a backward it can't always tell whether the optimizer has run. While torch has seen no write to some
        bucket's shard, parameters are gathered by this call, and again by the next one.
        """
        if self.sharded:
            self._gather_updated(torch.compiler.is_compiling())
        return self._watch(self.module(*arguments, **options))

    # The public torch.compiler.disable would import the compiler, here and below.
    @torch._disable_dynamo
    def _gather_updated(self, compiled: bool):
        if any(bucket.awaits_gather for bucket in self.buckets):
            unwritten = [bucket for bucket in self.buckets if bucket.unwritten]
            self.start_param_sync()
            for bucket in unwritten:
                bucket.expect_update()
        # A compiled module would break its graph at the hooks of the modules in it, so it is made to wait as a whole.
        self._waits.whole = compiled or any(
            module._compiled_call_impl is not None or hasattr(module, "_orig_mod")  # by compile(), torch.compile
            for module in self.module.modules()
        )
        if self._waits.whole:
            ensure_params_ready(self._bucket_of)

    @torch._disable_dynamo
    def _watch(self, output):
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(_weakly(self, OverlappedDDP._enter_by_output))
        return output

    def owned_parameters(self) -> list[nn.Parameter]:
        """The parameters that this rank's optimizer updates: all or, with the distributed optimizer, its shards.

        A shard is this rank's part of a bucket: 1-D, and cut without regard to the borders of parameters. Elementwise
        optimizers work on it. Code that looks at all gradients sees this rank's part of them: torch.amp.GradScaler
        would skip a step on some ranks only, and `tkernels.layers.clip_grad_norm_` has the norm of all. With shards,
        the step of an optimizer of the module's own parameters raises ValueError, and torch's clip_grad_norm_ over them
        finds no gradients.
        """
        self._handed_out = True
        return [owned for bucket in self.buckets for owned in bucket.owned]

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True):
        """Begin a step: zero `main_grad` at once, and set `.grad` to None.

        An optimizer's zero_grad is enough, unless kernels add to `main_grad` and the module is not called through this
        one, or a rank may have no backward in this step. set_to_none: accepted as in torch, without effect.
        """
        self._check_there()
        for parameter in self._bucket_of:
            self._check_place(parameter, parameter)
        self._forget_gradients()
        for bucket in self.buckets:
            bucket.drop()
            bucket.zero()
        self._prepared = True

    @contextlib.contextmanager
    def no_sync(self):
        """A context for all backward passes of a step except the last: gradients accumulate and no reduction starts."""
        before = self._sync, self.hooks.counting
        self._sync = self.hooks.counting = False
        try:
            yield
        finally:
            self._sync, self.hooks.counting = before

    @torch._disable_dynamo
    def start_grad_sync(self):
        """Collective. Start the reductions that have not started yet. No gradient may be produced after this call."""
        self._check_frozen()
        if not self._open and self._reduced and any(bucket.delivered for bucket in self.buckets):
            self._check_marks()
            return
        if not self._open:
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
        self._check_there()
        self.start_grad_sync()
        self._finish(self.dev.current_stream() if stream is None else stream)

    def check_tensor_parallel(self, caller: str, ctx: Context):
        """Raises ValueError if parameters are split over ranks of `ctx` that are ranks of this object, too."""
        group, ours = ctx.group, self._levels.whole.group
        common = {*group.global_ranks} & {*ours.global_ranks} - {group.global_ranks[group.rank]}
        if common and any(map(is_split, self._bucket_of)):
            raise ValueError(
                f"{caller}: some parameters are split over tensor-parallel ranks, but of the ranks of mesh, "
                f"{sorted(common)} are data-parallel ranks of an OverlappedDDP, with the same parts; pass mesh=, the "
                f"ranks that layers are split over"
            )

    def squared_norm(self, shards: set[nn.Parameter], tensor_parallel: Context) -> torch.Tensor:
        """Collective. What this rank adds to the squared 2-norm over the tensor-parallel ranks, fp32 [1].

        That is the sum over the data-parallel ranks of the gradients of their shards, with 0 for shards that are not
        among `shards`. It counts replicated parameters on the first tensor-parallel rank alone.
        """
        device, split = self.buckets[0].grads.slot.tensor.device, any(map(is_split, self._bucket_of))
        parts = [part for bucket in self.buckets if bucket.owned[0] in shards for part in bucket.parts()]
        total = squared_norm((grad for param, grad in parts if not split or counts(param, tensor_parallel)), device)
        if self.sharded:
            self._levels.inside.all_reduce(total)
        return total if split or tensor_parallel.rank == 0 else torch.zeros_like(total)

    # A backward

    def _enter_by_output(self, _):
        self.enter_backward()

    def enter_backward(self, parameter: nn.Parameter | None = None):
        """Called by whatever comes first in a backward: arrange for its end, and let `main_grad` be what .grad says.

        parameter: to which autograd is about to add. It must not do so in place, or in another dtype's `.grad`.
        """
        if self._removed:
            return
        if self._callback is None or self._callback() is None:
            if self._callback is not None:  # autograd dropped the callback before the end of backward: it failed
                self._put_back()
                self._prepared = False
                if self._open:
                    self._forget_gradients()
            callback = _weakly(self, OverlappedDDP._end_backward)  # only autograd holds it, as long as backward lasts
            torch.autograd.Variable._execution_engine.queue_callback(callback)
            self._callback = weakref.ref(callback)
            if not self._prepared and not self._open:
                self._prepare()
        if parameter is not None and parameter.grad is not None:
            self._aside[parameter], parameter.grad = parameter.grad, None

    def _prepare(self):
        self._check_marks()
        self.hooks.reset()
        for bucket in self.buckets:
            bucket.prepare()
        self._prepared = True

    def begin(self, written: bool):
        """Called before a gradient is taken. written: a kernel has added to `main_grad` already."""
        if torch._C._current_graph_task_id() == -1:
            return  # after backward
        early = not self._prepared
        self.enter_backward()
        if not self._open:
            if written and (early or self._reduced and any(bucket.must_be_shared for bucket in self.buckets)):
                raise LeaseError(
                    "OverlappedDDP: a kernel added to main_grad before this object knew that a backward had begun; "
                    "call the wrapper, not its module, or begin by the wrapper's zero_grad()"
                )
            self._take_over()

    def _take_over(self):
        self._check_frozen()
        self._put_back()
        if not self._prepared:
            self._prepare()
        for bucket in self.buckets:
            bucket.take_over(self._reduced)
        self._prepared = self._reduced = False
        self._open = True

    def _put_back(self):
        for parameter, grad in self._aside.items():
            parameter.grad = grad
        self._aside = {}

    def _end_backward(self):
        self._put_back()
        self._callback, self._prepared = None, False
        if self._open:
            self._stream = self.dev.current_stream()
            self._due |= self._sync
            if not self.hooks.waiting:
                self._end_pass()

    def end_deferred(self):
        """Called after the last gradient that was deferred."""
        if self._open and self._callback is None:
            self._end_pass()

    def _end_pass(self):
        if self._due:
            self.hooks.flush()
            self._finish(self._stream)
        else:
            self._deliver(self._stream, reduced=False)

    def _finish(self, stream):
        if self._open:
            self.hooks.forget_deferred()
            self._deliver(stream, reduced=True)
        for bucket in self.buckets:
            bucket.finish(stream)

    def _deliver(self, stream, reduced: bool):
        self._open, self._due, self._reduced, self._local = False, False, reduced, not reduced
        for bucket in self.buckets:
            bucket.deliver(stream, reduced)

    def _forget_gradients(self):
        """Discard what has been accumulated, and what a failed backward left."""
        self.hooks.reset()
        self.hooks.forget_deferred()
        self._open = self._due = self._prepared = self._reduced = self._local = False
        self._callback, self._aside = None, {}

    def _check_marks(self):
        if (name := self.hooks.stale_mark) is not None:
            raise LeaseError(
                f"OverlappedDDP: a kernel added to the main_grad of {name} (grad_added_to_main_grad) outside of a "
                f"backward that this object knows of. Call the wrapper, not its module, or begin by its zero_grad(); a "
                f"kernel that comes after backward is announced there, by grad_ready_hooks(param).defer(param)"
            )

    def _check_frozen(self):
        frozen = next((param for param in self._bucket_of if not param.requires_grad), None)
        if self.sharded and frozen is not None:
            raise ValueError(
                f"OverlappedDDP: {self._name_of(frozen)} was frozen after the module was wrapped, but lies in a shard "
                f"that is updated as a whole, by weight decay too; wrap the module again"
            )

    def _check_step(self, parameters: set):
        """Called before each optimizer's step, with its parameters."""
        wrong = next((param for param in self._bucket_of if param in parameters), None)
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
        local = self._local and any(bucket.delivered for bucket in self.buckets)
        if (self._open or local) and (wrong is not None or not parameters.isdisjoint(self.shards)):
            raise LeaseError(
                "OverlappedDDP: an optimizer's step before the gradients are reduced: a backward failed (begin again "
                "by the wrapper's zero_grad()), or all were in no_sync or deferred gradients have yet to come (call "
                "finish_grad_sync() after them)"
            )

    @torch._disable_dynamo
    def start_param_sync(self):
        """Collective. Gather the shards, in the order of forward, behind the optimizer's kernels launched so far.

        The next call of this object does so by itself; called right after the optimizer's step, gathers start earlier.
        Those kernels are on the current stream, on that of backward's caller, or on one that `finish_grad_sync` was
        called for. Without overlap_param_gather the current stream is ordered behind the gathers. Raises RuntimeError
        without shards, and warns if no optimizer can have updated them.
        """
        if not self.sharded:
            raise RuntimeError("start_param_sync: every rank has updated all parameters; there are no shards to gather")
        if not self._handed_out:
            self._handed_out = True  # warn only once
            warnings.warn(
                "OverlappedDDP: no optimizer can have updated the shards, since nobody has asked for them; make it of "
                "owned_parameters(), not of parameters()",
                stacklevel=2,
            )
        for param in self._bucket_of:
            self._check_place(param, param)
        self._gather_params()

    def _gather_params(self):
        for bucket in reversed(self.buckets):
            bucket.gather()
        if not self.overlap_param_gather:
            ensure_params_ready(self._bucket_of)

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
        slots = [buffer.slot for bucket in self.buckets for buffer in bucket.buffers]

        def settled_replay():
            self._settle()
            replay()

        self._settle()
        try:
            with captured(graph, slots=slots, streams=[self.comm_stream, *streams], dev=self.dev) as replay:
                yield settled_replay
                self._settle()
        except BaseException:
            self._forget_gradients()
            for bucket in self.buckets:
                bucket.forget_update()  # the update was captured, but did not run
            raise

    def remove(self):
        """Collective. Take hooks and buckets off the module.

        The module is then as before it was wrapped, with its current parameter values. Afterwards this object only
        forwards to the module. May be repeated.
        """
        if self._removed:
            return
        self._removed = True
        _wrappers.discard(self)
        if any(bucket.awaits_gather for bucket in self.buckets):
            self._gather_params()
        ensure_params_ready(self._bucket_of)
        self.hooks.remove()
        for handle in self._pre_hooks:
            handle.remove()
        for param in self._bucket_of:
            if _owner(param) is self:
                del param.main_grad
                param.grad = None
        disown([*self._bucket_of, *self.shards], self)
        self._levels.close()

    @property
    def shards(self) -> list[nn.Parameter]:
        """This rank's shards of all parameters; none if every rank updates the whole."""
        return [owned for bucket in self.buckets for owned in bucket.owned] if self.sharded else []

    def _check_there(self):
        if self._removed:
            raise LeaseError("OverlappedDDP: it was removed from its module, perhaps for another one; use that")

    def _check_place(self, parameter: nn.Parameter, now: torch.Tensor):
        if not self._bucket_of[parameter].holds(now):
            raise LeaseError(
                f"OverlappedDDP: {self._name_of(parameter)} is converted or moved, but its gradients and what ranks "
                f"gather are not; do so before a module is wrapped, or remove() this and wrap it again"
            )

    def _name_of(self, parameter: nn.Parameter) -> str:
        return next(name for name, each in self.module.named_parameters() if each is parameter)

    def _apply(self, function, recurse=True):
        for parameter in () if self._removed else self._bucket_of:
            self._check_place(parameter, function(parameter.detach()))
        return super()._apply(function, recurse)

    def _settle(self):
        """End all tenancies, as required at both edges of a capture. Zeros of outside are not those of the graph."""
        self._prepared = False
        if any(bucket.awaits_gather for bucket in self.buckets):
            self._gather_params()
        for bucket in self.buckets:
            for buffer in bucket.buffers:
                buffer.end()


@contextlib.contextmanager
def changing_main_grads(params):
    """A context in which the current stream changes `main_grad`. It begins as what `.grad` says; `.grad` follows.

    Does nothing for parameters without an OverlappedDDP.
    """
    owners = set(filter(None, map(_owner, params)))
    for owner in owners:
        for bucket in () if owner._open else owner.buckets:
            bucket.prepare()
    yield
    for owner in owners:
        for bucket in owner.buckets:
            bucket.follow()
            bucket.finish(owner.dev.current_stream())


def ensure_params_ready(params):
    """Order the current stream behind the gathers of these parameters, for code that reads them outside their modules.

    Starts no gather, and waits once per bucket and stream. The stream may read the parameters until the next update.
    Does nothing for parameters without an OverlappedDDP. Raises LeaseError if their gather has not been started.
    """
    buckets = {}
    for param in params:
        owner = _owner(param)
        if owner is not None and owner.sharded and param in owner._bucket_of:  # not a shard
            buckets[owner._bucket_of[param]] = None
    for bucket in buckets:
        bucket.ready()


def _before_forward(waits, module, _):
    if not (waits.whole and torch.compiler.is_compiling()):
        _ensure_own_ready(module)


@torch._disable_dynamo
def _ensure_own_ready(module):
    ensure_params_ready(module.parameters(recurse=False))


def _before_state_dict(module, *_):
    ensure_params_ready(module.parameters())


def _before_load_state_dict(module, state, prefix, metadata, *_):
    """Order the load after gathers that are under way. A gather that has not started yet takes the loaded values."""
    if metadata.get("assign_to_params_buffers"):
        raise ValueError("OverlappedDDP: load_state_dict(assign=True) would leave it with the old parameters")
    buckets = dict.fromkeys(_owner(param)._bucket_of[param] for param in module.parameters() if _owner(param))
    for bucket in buckets:
        if bucket.values is not None and not bucket.stale:
            bucket.ready()


def _owner(param) -> OverlappedDDP | None:
    return owner_of(param, OverlappedDDP)


def _weakly(ddp: OverlappedDDP, method):
    """The bound method, for what may outlive the wrapper and is to keep it no longer."""
    reference = weakref.ref(ddp)

    def call(*arguments):
        if (ddp := reference()) is not None:
            method(ddp, *arguments)

    return call


_wrappers = weakref.WeakSet()  # all that may own an optimizer's parameters


@functools.cache
def _watch_optimizers():
    register_optimizer_step_pre_hook(_before_step)


@torch._disable_dynamo
def _before_step(optimizer, *_):
    wrappers = list(_wrappers)
    if wrappers:
        parameters = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        for ddp in wrappers:
            ddp._check_step(parameters)


class _Buffer:
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

    def zero(self):
        self.end()
        with self.lease.write() as tensor:
            tensor.zero_()
        self.end()


class _Bucket:
    """Parameters with contiguous gradients and, with shards, contiguous values.

    grads: [n], where n is a multiple of the number of shards; zero between the parameters. values: [n], or None.
    owned: the parameters or shards that this rank's optimizer updates, each with its `main_grad`.
    given: what each of them gets as `.grad`: its `main_grad`, or a part of `cast`, a copy in the parameters' dtype.
    """

    def __init__(self, name: str, parameters: list[nn.Parameter], grad_dtype, levels: "_Levels", comm_stream, dev):
        self.name, self.parameters, self.levels, self.comm_stream, self.dev = name, parameters, levels, comm_stream, dev
        first = parameters[0]
        self._kind = first.dtype, first.device
        grad_dtype = first.dtype if grad_dtype is None else grad_dtype
        align = ALIGN_BYTES // min(first.element_size(), grad_dtype.itemsize)
        places, end = [], 0
        for parameter in parameters:
            places.append(slice(end, end + parameter.numel()))
            end = round_up(end + parameter.numel(), align)
        numel = round_up(max(end, 1), align * levels.num_shards)

        self.grads = _Buffer(numel, first, grad_dtype, dev, f"gradients of {name}")
        self.grads.zero()
        for parameter, place in zip(parameters, places, strict=True):
            parameter.main_grad = self.grads.slot.tensor[place].view(parameter.shape)
        self.values, self.owned = None, parameters
        self.forget_update()
        if levels.sharded:
            self.values = _Buffer(numel, first, first.dtype, dev, f"parameters of {name}")
            with torch.no_grad(), self.values.lease.write() as values:
                values.zero_()
                for parameter, place in zip(parameters, places, strict=True):
                    values[place].view(parameter.shape).copy_(parameter)
                    parameter.data = values[place].view(parameter.shape)
            self.owned = [nn.Parameter(levels.inside.part(self.values.slot.tensor))]
            self.owned[0].main_grad = levels.inside.part(self.grads.slot.tensor)
        self._own = levels.own(self.grads.slot.tensor)  # the part in which sums over ranks are valid
        self.cast, self.given = None, {owned: owned.main_grad for owned in self.owned}
        self._left = None  # torch's write count of a shard's .grad, if no_sync has left more outside of the shard
        if grad_dtype != first.dtype:
            self.cast, begin = self._own.to(first.dtype), self._own.storage_offset()
            for owned, grad in self.given.items():
                self.given[owned] = self.cast[grad.storage_offset() - begin :][: grad.numel()].view(grad.shape)

    def __repr__(self):
        return f"{self.name} ({len(self.parameters)} parameters, {self.grads.slot.tensor.numel()} elements)"

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter still has its dtype and device or, with shards, lies in the buffer that is gathered."""
        if self.values is None:
            return (parameter.dtype, parameter.device) == self._kind
        begin, nbytes = self.values.slot.tensor.data_ptr(), self.values.slot.tensor.nbytes
        return parameter.numel() == 0 or 0 <= parameter.data_ptr() - begin < nbytes

    @property
    def buffers(self) -> list[_Buffer]:
        return [self.grads] if self.values is None else [self.grads, self.values]

    @property
    def lease(self) -> Lease:
        """The tenancy in which gradients accumulate."""
        if self.grads.lease.state == "sealed":
            self.grads.end()  # they have been read, and others come: deferred ones, in no_sync
        return self.grads.lease

    @property
    def delivered(self) -> bool:
        """Whether somebody may still use the gradients: they have not been set to None."""
        return any(owned.grad is not None for owned in self.owned)

    @property
    def must_be_shared(self) -> bool:
        """Whether `take_over` changes a sum over ranks that is to be added to."""
        return self.delivered and (self.values is not None or self.levels.share != 1.0)

    def drop(self):
        for parameter in (*self.parameters, *self.owned):
            parameter.grad = None
        self._left = None

    def zero(self):
        self.grads.zero()

    @torch.no_grad()
    def prepare(self):
        """Let `main_grad` be what `.grad` says, which may have been dropped, changed or replaced. May be repeated."""
        if not self.delivered:
            self.zero()
            return
        replaced = {owned: given for owned, given in self.given.items() if owned.grad is not given}
        if self._left is not None and (replaced or self.owned[0].grad._version != self._left):
            raise LeaseError(
                f"the gradients of {self.name} that no_sync has accumulated are changed in this rank's shard, but lie "
                f"outside of it too; discard all by ddp.zero_grad(), and scale or clip after the backward that reduces"
            )
        if replaced or self.cast is not None:
            with self._changed():
                for owned, given in replaced.items():
                    if owned.grad is None:
                        given.zero_()
                    else:
                        given.copy_(owned.grad)
                        owned.grad = given
                if self.cast is not None:  # told by the value: torch counts no writes of a graph's replay, or to .data
                    self._own.copy_(torch.where(self.cast == self._own.to(self.cast.dtype), self._own, self.cast))

    @torch.no_grad()
    def take_over(self, reduced: bool):
        """Take `.grad` off, so that gradients are added to `main_grad` alone. reduced: it is a sum over ranks."""
        if not self.stale:
            self.expects_update, self._version = False, None
        if reduced and self.must_be_shared:  # the next sum over ranks is to count it once
            with self._changed() as grads:
                begin = self._own.storage_offset()
                grads[:begin].zero_()
                self._own.mul_(self.levels.share)
                grads[begin + self._own.numel() :].zero_()
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad is not self.given.get(parameter):
                with self._changed():  # set by hand or, in a shard, before it was wrapped
                    parameter.main_grad.add_(parameter.grad)
        self.drop()

    def parts(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """The parameters of which this rank's shard has a part, each with that part of its gradient."""
        grads, begin = self.grads.slot.tensor, self._own.storage_offset()
        parts = []
        for parameter in self.parameters:
            start = parameter.main_grad.storage_offset()
            first, last = max(start, begin), min(start + parameter.numel(), begin + self._own.numel())
            if first < last:
                parts.append((parameter, grads[first:last]))
        return parts

    @contextlib.contextmanager
    def _changed(self):
        """A tenancy in which the current stream changes gradients."""
        self.grads.end()
        with self.grads.lease.write() as grads:
            yield grads
        self.grads.end()

    @property
    def unwritten(self) -> bool:
        """Whether torch has seen no write to the shard since the optimizer's turn began; the next pass ends it."""
        return self._version == self.owned[0]._version

    @property
    def awaits_gather(self) -> bool:
        """Whether the shard may have been updated, although torch has seen no write, and is to be gathered."""
        return self.updating or self.expects_update

    @property
    def stale(self) -> bool:
        """Whether the shard may have been updated, and the values have not been gathered since."""
        return self.updating or self.expects_update and not self.unwritten

    def expect_update(self):
        """Go on expecting an update although the values were gathered: the optimizer may not have run yet."""
        self.expects_update, self._version = True, self.owned[0]._version

    def reduce(self):
        """Collective. Sum the gradients on the comm stream, behind all work that accumulated them."""
        self.grads.end()
        with self.dev.stream(self.comm_stream), self.grads.lease.write(self.comm_stream) as grads:
            self.levels.reduce(grads)
            self.follow()
        self._updatable = True

    def follow(self):
        """Let a copy of the gradients in another dtype be what `main_grad` says, on the current stream."""
        if self.cast is not None:
            self.cast.copy_(self._own)
        if self._left is not None:
            self._left = self.owned[0].grad._version

    def deliver(self, stream, reduced: bool):
        """Let `.grad` be the sum over ranks or, if it is not reduced, what this rank has accumulated."""
        if not reduced:
            if self.cast is not None:
                with self.dev.stream(stream), self.lease.write(stream, ordered=True):
                    self.follow()
            self.grads.read(stream)
        for owned, given in self.given.items():
            if owned.requires_grad:
                owned.grad = given
        self._left = None if reduced or self.values is None else self.owned[0].grad._version

    def finish(self, stream):
        """Order `stream` behind the reduction and, with shards, behind all readers of the values that it may update."""
        self.grads.read(stream)
        if self.values is not None and self._updatable:
            self._begin_update(stream)

    def gather(self):
        """Collective. Gather the values on the comm stream, behind the update on this stream and those of `finish`."""
        self._begin_update(self.dev.current_stream())
        if not self.unwritten:
            # Makes torch refuse a backward that needs values saved by forward and overwritten since.
            torch.autograd.graph.increment_version(self.parameters)
        for stream in self._updaters:
            with self.values.lease.write(stream):
                pass  # the optimizer's kernels have been launched: records them as writes
        self.values.end()
        self.forget_update()
        with self.dev.stream(self.comm_stream), self.values.lease.write(self.comm_stream) as values:
            self.levels.inside.all_gather(values)

    def ready(self):
        """Order the current stream behind the gather."""
        if self.stale:
            raise LeaseError(
                f"the parameters of {self.name} have been updated by each rank for itself, and not been gathered; call "
                f"start_param_sync() on every rank, or the OverlappedDDP itself, before they are used"
            )
        self.values.read(self.dev.current_stream())

    def forget_update(self):
        self.updating = self.expects_update = False  # an optimizer may be writing the shard; may still do so
        self._updatable = False  # whether gradients are reduced, and values not gathered since
        self._updaters = []  # the streams of the optimizer
        self._version = None  # torch's write count of the shard when the optimizer's turn began

    def _begin_update(self, stream):
        if not self.updating:
            self.values.end()
            self.updating, self._version = True, self.owned[0]._version
        if stream not in self._updaters:
            with self.values.lease.write(stream):
                self._updaters.append(stream)


class _Levels:
    """Sums gradients inside an instance and, if there are several, across them; gathers values inside one."""

    def __init__(self, whole: Wire, sharded: bool, instances: int, average: bool, largest: int):
        self.whole = whole
        self.inside, self.across = whole.split(instances, largest) if instances > 1 else (whole, None)
        self.sharded, self.num_shards = sharded, self.inside.size if sharded else 1
        self._scale = 1 / whole.size if average else 1.0
        # What a rank contributes of a sum over ranks, so that the next one counts it once: all that have it do so.
        self.share = (whole.size if average else 1) / (instances if sharded else whole.size)

    def own(self, flat: torch.Tensor) -> torch.Tensor:
        """The part that is valid on this rank after a reduction."""
        return self.inside.part(flat) if self.sharded else flat

    def reduce(self, grads: torch.Tensor):
        if self._scale != 1.0:
            grads.mul_(self._scale)
        if not self.sharded:
            self.inside.all_reduce(grads)
            return
        shard = self.inside.reduce_scatter(grads)
        if self.across is not None:
            self.across.all_reduce(shard)

    def close(self):
        """Collective. Close the wires of the two levels, if there are two."""
        if self.across is not None:
            self.inside.close()
            self.across.close()


def _check_parameters(params: dict[str, nn.Parameter], grad_dtype: torch.dtype | None):
    if not params:
        raise ValueError("OverlappedDDP: no parameter of the module requires a gradient; there is nothing to train")
    first, device = next((name, param.device) for name, param in params.items())
    for name, param in params.items():
        if param.device != device:
            raise ValueError(f"OverlappedDDP: {name} is on {param.device}, and {first} on {device}; move them together")
        for dtype in (param.dtype, grad_dtype or param.dtype):
            if dtype not in SUMMED:
                raise TypeError(f"OverlappedDDP: {name}: sums float32, float16 and bfloat16, not {dtype}")


def _check_agreement(whole: Wire, options: dict, params: dict[str, nn.Parameter]):
    """Collective. Raises MismatchError, the same on every rank."""
    layouts = {name: f"{list(param.shape)} of {param.dtype}" for name, param in params.items()}
    values = {name: checksum(param) for name, param in params.items()}
    told = {"option": options, "parameter": layouts, "values of parameter": values}
    everyone = whole.group.gather(told)
    for what in told:
        if difference := first_difference([each[what] for each in everyone]):
            rank, (name, *_) = difference
            ours, theirs = (everyone[at][what].get(name) for at in (0, rank))
            found = "" if told[what] is values else f": {ours} and {theirs}"
            raise MismatchError(
                f"OverlappedDDP: ranks 0 and {rank} differ in {what} {name}{found}; all ranks must pass the same "
                f"options and begin with the same parameters (one seed, or a broadcast of rank 0's)"
            )


def _group(params, bucket_size: float) -> list[list[nn.Parameter]]:
    """Groups of parameters of one dtype, each of at most bucket_size elements unless it is a single parameter.

    Those marked sequence_parallel have groups of their own. The sums over tensor-parallel ranks that they get need
    shards with the same borders, which parameters that are split unevenly would move.
    """
    filling, full = {}, []
    for param in params:
        kind = param.dtype, bool(getattr(param, "sequence_parallel", False))
        members = filling.setdefault(kind, [])
        if members and sum(member.numel() for member in members) + param.numel() > bucket_size:
            full.append(members)
            members = filling[kind] = []
        members.append(param)
    return full + list(filling.values())


def _num_bytes(members: list[nn.Parameter], grad_dtype: torch.dtype | None) -> int:
    """At least the bytes of a bucket's gradients or values, whichever are larger, before padding to the shards."""
    itemsize = max(members[0].element_size(), grad_dtype.itemsize if grad_dtype else 0)
    return sum(round_up(member.numel() * itemsize, ALIGN_BYTES * 2) for member in members)
