"""OverlappedDDP: torch's DistributedDataParallel over this library's collectives and, with shards, Megatron's.

Checks what it is given, and makes a BucketEngine (bucket_engine.py), which does all the rest. Parameters stay what they
are, nn.Parameters of the module with `.grad`, as under torch's DDP: code that reads them, tied ones and those without a
dimension need no care. DTensors, and modules that hold less than all parameters, are what `fully_shard` is for.
"""

import math
import numbers

import torch
from torch import nn

from tkernels.comm.arguments import check_type
from tkernels.comm.collectives import SUMMED
from tkernels.comm.context import MeshLike
from tkernels.comm.errors import MismatchError
from tkernels.comm.group import checksum, first_difference
from tkernels.layers.data_parallel.bucket_engine import BucketEngine
from tkernels.layers.data_parallel.param_bucket import Levels, by_size
from tkernels.layers.data_parallel.wire import Wire, open_wire
from tkernels.layers.owners import disown, own, remove_owners


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
            sharded = needs_shards if use_distributed_optimizer is None else use_distributed_optimizer
            if needs_shards and not sharded:
                raise ValueError(
                    "OverlappedDDP: overlap_param_gather and num_distributed_optimizer_instances > 1 are about shards "
                    "of the parameters; leave out use_distributed_optimizer=False"
                )
            check_type("OverlappedDDP: bucket_size", bucket_size, numbers.Real | None, "a number of elements, or None")
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
            "use_distributed_optimizer": sharded,
            "num_distributed_optimizer_instances": num_distributed_optimizer_instances,
            "average": average,
            "grad_dtype": grad_dtype,
            "backend": backend,
        }
        _check_agreement(whole, options, params)

        dev = torch.get_device_module(next(iter(params.values())).device) if dev is None else dev
        self.module = module
        self.engine = BucketEngine(
            module,
            by_size(reversed(params.values()), bucket_size),
            Levels(whole, sharded, num_distributed_optimizer_instances, average),
            grad_dtype=grad_dtype,
            overlap_grad_reduce=overlap_grad_reduce,
            overlap_param_gather=overlap_param_gather,
            comm_stream=dev.Stream() if comm_stream is None else comm_stream,
            dev=dev,
        )
        self.sharded, self.hooks, self.comm_stream = sharded, self.engine.hooks, self.engine.comm_stream
        own([*self.engine.bucket_of, *self.engine.shards], self)

    def forward(self, *arguments, **options):
        """Call the module. Starts to gather updated parameters if `start_param_sync` has not been called.

        After a backward it can't always tell whether the optimizer has run. While torch has seen no write to some
        bucket's shard, parameters are gathered by this call, and again by the next one.
        """
        if self.sharded:
            self.engine.before_forward(torch.compiler.is_compiling())
        return self.engine.watch(self.module(*arguments, **options))

    def owned_parameters(self) -> list[nn.Parameter]:
        """The parameters that this rank's optimizer updates: all or, with the distributed optimizer, its shards.

        A shard is this rank's part of a bucket: 1-D, and cut without regard to the borders of parameters. Elementwise
        optimizers work on it. Code that looks at all gradients sees this rank's part of them: torch.amp.GradScaler
        would skip a step on some ranks only, and `tkernels.layers.clip_grad_norm_` has the norm of all. With shards,
        the step of an optimizer of the module's own parameters raises ValueError, and torch's clip_grad_norm_ over them
        finds no gradients.
        """
        self.engine.handed_out = True
        return [owned for bucket in self.engine.buckets for owned in bucket.owned]

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True):
        """Begin a step: zero `main_grad` at once, and set `.grad` to None.

        An optimizer's zero_grad is enough, unless kernels add to `main_grad` and the module is not called through this
        one, or a rank may have no backward in this step. set_to_none: accepted as in torch, without effect.
        """
        self.engine.zero_grad()

    def no_sync(self):
        """A context for all backward passes of a step except the last: gradients accumulate and no reduction starts."""
        return self.engine.no_sync()

    @torch._disable_dynamo
    def start_grad_sync(self):
        """Collective. Start the reductions that have not started yet. No gradient may be produced after this call."""
        self.engine.start()

    @torch._disable_dynamo
    def finish_grad_sync(self, stream=None):
        """Collective. Order `stream` (None: the current one) behind all reductions of this step.

        Backward does this for its caller's stream. Call it for another stream, after accumulating in no_sync alone, or
        on a rank that had no backward in this step: `main_grad` is then the mean over ranks (the sum without
        `average`), with shards only in this rank's shards. Until the next backward, only the streams that this was
        called for may use gradients. Raises ValueError for a parameter in a shard that was frozen after the module was
        wrapped, LeaseError for a gradient that came too late and was not reported.
        """
        self.engine.finish(stream)

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
        self.engine.gather()

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
        return self.engine.captured(graph, streams)

    def remove(self):
        """Collective. Take hooks and buckets off the module.

        The module is then as before it was wrapped, with its current parameter values. Afterwards this object only
        forwards to the module. May be repeated.
        """
        if not self.engine.removed:
            self.engine.remove()
            disown([*self.engine.bucket_of, *self.engine.shards], self)

    def _apply(self, function, recurse=True):
        for parameter in () if self.engine.removed else self.engine.bucket_of:
            self.engine.check_place(parameter, function(parameter.detach()))
        return super()._apply(function, recurse)


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
