"""ZeroOptimizer: any torch optimizer, with its state and the gradients sharded over data-parallel ranks (ZeRO 1 and 2).

R ranks.

    backward   full buckets of gradients are reduced to their owners on the comm stream
    step       owners unscale and clip; the optimizer updates their masters; every rank gathers all parameters

What runs underneath is resident.py, what it moves, flat_group.py.
"""

import contextlib
import itertools
import math
import reprlib
import weakref
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tkernels.comm import Context, MeshLike, MismatchError, TkernelsError, as_context
from tkernels.comm.arguments import check_flags, check_tensors, check_torch_dtype, check_type, real, several
from tkernels.comm.collectives import announce, barrier
from tkernels.comm.context import group_of
from tkernels.comm.group import checksum, listed
from tkernels.comm.regions import round_up
from tkernels.layers.data_parallel.flat_group import FlatGroup, lay_out, padded
from tkernels.layers.data_parallel.layout import ALIGN, in_buckets
from tkernels.layers.data_parallel.norms import check_stage, clip_scale, counts, squared_norm
from tkernels.layers.data_parallel.resident import ResidentEngine
from tkernels.layers.data_parallel.values import Values
from tkernels.layers.data_parallel.wire import check_backend, open_wire
from tkernels.layers.marks import is_partial, is_split
from tkernels.layers.owners import (
    check_elementwise,
    check_free,
    check_initialized,
    disown,
    not_elementwise,
    own,
    parameters_of,
    remove_owners,
)
from tkernels.layers.tensor_parallel.replica_check import Trained, check_step

FIRST_LOSS_SCALE, GROWTH_INTERVAL = 2.0**16, 2000  # of a dynamic loss scale; as in torch.amp.GradScaler
REFRESH = "call refresh_masters() after such a change, on all ranks"
CHOICES = {"stage": (1, 2), "partition": ("elements", "parameters")}


class ZeroOptimizer(torch.optim.Optimizer):
    """Runs `optimizer_class` on this rank's shards of the parameters, and communicates gradients and parameters.

        optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4, max_norm=1.0)
        for batch in batches:                    # each rank has its own
            loss_of(model(batch)).backward()     # the mean over ranks is minimised
            optimizer.step()

    params: parameters, or param groups as torch optimizers take them, the same on every rank. Rank 0's values are kept.
        Parameters become contiguous views of common buffers and belong to the newest optimizer made for them. A group
        with "mesh" is shared by those ranks only, as experts are; its gradients are still divided by the size of the
        optimizer's `mesh`.
    optimizer_class, **options: the wrapped optimizer. It sees fp32 masters: whole parameters with
        partition="parameters", otherwise 1-D pieces of those that are cut.
    mesh: the ranks, as in `tkernels.comm.as_context`; None: those of the current context. With tensor parallelism they
        are the data-parallel ranks: a parameter marked tensor_model_parallel must be equal on all of them.
    stage: 2 reduces the gradients of every backward immediately, and no rank keeps full gradients. 1 has `no_sync`,
        which keeps them. With layers that defer weight gradients (delay_wgrad_compute) all full gradients are kept, and
        `step` reduces them.
    bucket_bytes: bytes of one reduction. A larger parameter is reduced by itself.
    overlap_comm: reduce and gather on a stream other than the current one. The results are bit-identical.
    overlap_gather: a module. Parameters are gathered while its forward runs: each submodule waits, on the stream that
        it runs on, for the parameters that are registered on itself. Any other reader of parameters must call
        `ensure_params_ready` first.
    backend: "tkernels", or "torch" for torch.distributed on the process group of these ranks.
    partition: "elements" cuts every fill evenly, for elementwise optimizers; "parameters" keeps each parameter whole at
        one owner, for optimizers that look at a whole one (Muon, Adafactor), with parts of uneven size.
    reduce_dtype: the dtype in which gradients are summed over ranks; None: the parameter's. Owners accumulate passes in
        fp32.
    max_norm: clip the global norm of the averaged gradients to it. torch's clip_grad_norm_ finds NaN, and raises.
    loss_scale: a factor that `scale(loss)` applies and `step` removes; "dynamic" adapts it. All ranks skip a step whose
        gradients are not finite on some rank. None: no scaling and no skipping, and `step` reads nothing back to the
        host unless this rank has left a parameter unused.
    tensor_parallel: the ranks that layers are split over, if they are, given as `mesh` is. The norm and the skipping of
        steps are then those of the whole model. Without it max_norm and loss_scale are refused for such a model, and so
        are parameters marked sequence_parallel: their gradients come from a rank's rows alone, and `step` sums them
        over these ranks.
    pipeline: the ranks that have the stages of a pipeline, each of which has an optimizer of its own parameters. The
        norm and the skipping are then those of all stages. A parameter of several stages counts once if it is marked
        `shared = True` (Megatron's mark) on the others. `mesh` is then the ranks that have the same stage.

    Learning-rate schedulers and whatever else takes a torch optimizer take this one. Its param_groups, state and
    defaults are those of the wrapped optimizer: change learning rates there. Their params are this rank's masters.
    torch.amp.GradScaler, which would look for gradients there, is refused: `loss_scale` takes its place.

    Collective, as `step` and backward are. `step` must be ordered after forward and backward on its stream, as usual.
    It ends the accumulation, so zero_grad is needed only to discard gradients. Once a gradient has gone to its owner,
    the parameter's `.grad` is a NaN in its shape, without memory; whoever drops that, as a module's zero_grad does, is
    told to call the optimizer's. Code that changes parameters, such as load_state_dict, must call `refresh_masters`
    afterwards. After a step, `grad_norm` is the norm before clipping, a tensor, and `skipped` is whether the step was
    skipped. A parameter that no rank has used is left alone, as without sharding. Activation checkpointing with
    use_reentrant=True gives correct results, but each checkpoint ends a pass; prefer use_reentrant=False. After a
    backward that failed call zero_grad; else the next backward or step raises.

    Raises ValueError or TypeError for parameters or options that can't be sharded, MismatchError if the ranks'
    parameters or options differ. `step` and the loading methods raise LeaseError once a parameter has been converted or
    moved. `step` raises TkernelsError for a parameter that was frozen at construction and requires a gradient later.
    """

    def __init__(
        self,
        params,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        mesh: MeshLike = None,
        stage: int = 2,
        bucket_bytes: int = 64 << 20,
        overlap_comm: bool = True,
        overlap_gather: nn.Module | None = None,
        backend: str = "tkernels",
        partition: str = "elements",
        reduce_dtype: torch.dtype | None = None,
        max_norm: float | None = None,
        loss_scale: float | str | None = None,
        tensor_parallel: MeshLike = None,
        pipeline: MeshLike = None,
        **options,
    ):
        if "process_group" in options:  # as torch's ZeroRedundancyOptimizer has it
            raise TypeError("ZeroOptimizer: there is no process_group=; pass the ranks as mesh=")
        self.ctx = as_context(mesh, "ZeroOptimizer: mesh")
        with self.ctx.group.checking():
            groups, self._names, meshes = _param_groups(params)
            if not callable(optimizer_class):
                raise TypeError(f"ZeroOptimizer: optimizer_class={optimizer_class!r} must be a class of optimizers")
            check_flags("ZeroOptimizer", overlap_comm=overlap_comm)
            check_type("ZeroOptimizer: overlap_gather", overlap_gather, nn.Module | None, "an nn.Module")
            if reduce_dtype is not None:
                check_torch_dtype("ZeroOptimizer: reduce_dtype", reduce_dtype)
            needs_norm = max_norm is not None or loss_scale is not None
            if needs_norm and tensor_parallel is None and any(map(is_split, meshes)):
                raise ValueError(
                    "ZeroOptimizer, with max_norm or loss_scale: some parameters are split over tensor-parallel ranks "
                    "(tensor_model_parallel), so that each of these would have a norm of its own, and what they have "
                    "in common would part; pass tensor_parallel=, these ranks"
                )
            check_elementwise("ZeroOptimizer", optimizer_class, meshes)
            across = None if tensor_parallel is None else group_of(tensor_parallel, "ZeroOptimizer: tensor_parallel")
            if pipeline is not None:
                stages = group_of(pipeline, "ZeroOptimizer: pipeline")
                ranks = "the ranks that have the same stage, which may be a process group of this rank alone"
                check_stage("ZeroOptimizer", stages, "mesh", self.ctx.group, ranks)
                if across is not None:
                    check_stage("ZeroOptimizer", stages, "tensor_parallel", across, "the ranks that split this stage")
        shapes = [(tuple(p.shape), p.dtype, p.requires_grad, is_partial(p)) for p in self._names]
        deferred = any(getattr(parameter, "skip_backward_post_hook", False) for parameter in meshes)
        layout = dict(partition=partition, bucket_bytes=bucket_bytes, parameters=shapes)
        asked = layout | dict(
            stage=stage, overlap_comm=overlap_comm, overlap_gather=overlap_gather is not None, backend=backend,
            reduce_dtype=reduce_dtype, max_norm=max_norm, loss_scale=loss_scale, delay_wgrad_compute=deferred,
            optimizer_class=getattr(optimizer_class, "__name__", repr(optimizer_class)),
            tensor_parallel=tensor_parallel is not None, pipeline=pipeline is not None,
            options=_plain(options), groups=[_plain(g) for g in groups],
            names=[*self._names.values()],  # of equal shapes and another order, rank 0's values would go to others
        )  # fmt: skip
        _check(self.ctx, asked, not_elementwise(optimizer_class))
        contexts = {p: self.ctx if theirs is None else as_context(theirs) for p, theirs in meshes.items()}
        self._tensor_parallel = None if tensor_parallel is None else as_context(tensor_parallel)
        with self.ctx.group.checking():
            check_backend("ZeroOptimizer", backend)
            self._wires = {ctx: open_wire("ZeroOptimizer", backend, ctx) for ctx in (self.ctx, *contexts.values())}
            _check_parameters(contexts, self._names, self._wires, reduce_dtype, tensor_parallel)
        remove_owners(contexts, ZeroOptimizer)  # orders the reads below after the previous optimizer's gathers
        _check_parts(self.ctx, contexts, self._names)
        if tensor_parallel is not None:
            _check_partial(self.ctx, self._tensor_parallel, contexts, self._names)
        loss_scale = float(loss_scale) if isinstance(loss_scale, Real) else loss_scale
        self.stage, self.max_norm, self._dynamic = stage, max_norm, loss_scale == "dynamic"
        self.loss_scale, self._steps_at_scale = FIRST_LOSS_SCALE if self._dynamic else loss_scale, 0
        self.grad_norm, self.skipped = None, False
        self._frozen = [parameter for parameter in self._names if parameter not in meshes]
        self._group_sizes = [len(group["params"]) for group in groups]
        self._layout = layout | dict(rank=self.ctx.rank, ranks=self.ctx.size)

        self._across = None if tensor_parallel is None else open_wire("ZeroOptimizer", backend, self._tensor_parallel)
        self._stages = None if pipeline is None else open_wire("ZeroOptimizer", backend, as_context(pipeline))

        # By themselves, partial parameters have one layout on all tensor-parallel ranks, where split ones may differ in
        # size: what an owner sums over those ranks is the same part on each.
        def kind(parameter):
            return contexts[parameter], parameter.dtype, is_partial(parameter)

        def capacity(kind):
            ctx, dtype, _ = kind
            return round_up(bucket_bytes // (reduce_dtype or dtype).itemsize, ctx.size * ALIGN)

        # Empty ones have no gradient. One order for all: that in which backward completes them.
        trained, loads, buckets = [parameter for parameter in reversed(contexts) if parameter.numel()], {}, []
        for members in in_buckets(trained, kind, capacity, padded):
            ctx, *_ = its = kind(members[0])
            layout = lay_out(members, capacity(its), loads.setdefault(its, [0] * ctx.size), partition)
            buckets.append(FlatGroup(layout, self._names, ctx, self._wires[ctx], reduce_dtype, divisor=self.ctx.size))
        self._engine, self._buckets = ResidentEngine(buckets, overlap=overlap_comm), buckets
        own(contexts, self)
        weakref.finalize(self, self._engine.unhook).atexit = False  # at once: its units and it hold each other
        for unit in self._engine.units:
            unit.sync = not deferred  # deferred gradients come after backward: `step` reduces all of them
        self._overlap_gather = overlap_gather is not None
        if self._overlap_gather:
            self._engine.wait_in_modules(overlap_gather)

        pieces = [[self._engine.piece_of[p] for p in group["params"] if p in self._engine.piece_of] for group in groups]
        owned = [[piece for piece in theirs if piece.stop > piece.start] for theirs in pieces]
        self._pieces = [piece for pieces in owned for piece in pieces]  # in the order of the optimizer's state dict
        own([piece.sharded for piece in self._pieces], self)
        groups = [group | {"params": [p.sharded for p in pieces]} for group, pieces in zip(groups, owned, strict=True)]
        try:
            self.optimizer = optimizer_class(groups, **options)
        except Exception:  # a refusal, perhaps of an option: nobody is to take the gradients then
            self.remove()
            raise
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            self.remove()
            raise TypeError(
                f"ZeroOptimizer: optimizer_class={asked['optimizer_class']} made a {type(self.optimizer).__name__}, "
                f"which is no torch.optim.Optimizer"
            )
        # In place of the base's __init__, which would make groups and state of its own: only its hooks.
        super().__setstate__({})
        _live.add(self)

    def __getstate__(self):
        raise TypeError("ZeroOptimizer: it belongs to its rank, and can't be copied or pickled; save its state_dict()")

    def __repr__(self):
        sizes = f"{len(self._engine.piece_of)} parameters in {len(self._buckets)} buckets"
        return f"ZeroOptimizer({type(self.optimizer).__name__}, stage {self.stage}, rank {self.ctx.rank}, {sizes})"

    @property
    def comm_stream(self):
        """The stream that gradients are reduced and parameters are gathered on; None without overlap_comm."""
        return self._engine.comm_stream

    @property
    def param_groups(self) -> list[dict]:
        return self.optimizer.param_groups

    @property
    def state(self) -> dict:
        return self.optimizer.state

    @property
    def defaults(self) -> dict:
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict):
        """Raises TkernelsError: parameters are shared out when the optimizer is made."""
        raise TkernelsError(
            "ZeroOptimizer: add_param_group would add parameters that no rank owns; make a new ZeroOptimizer of all"
        )

    @property
    def _step_supports_amp_scaling(self):  # torch.amp.GradScaler.step asks for it
        raise TkernelsError(
            "ZeroOptimizer: torch.amp.GradScaler finds no gradients, which are with their owners; leave it out, pass "
            'loss_scale="dynamic", and call backward on optimizer.scale(loss)'
        )

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward on: multiplied by `loss_scale`, if there is one."""
        check_tensors("ZeroOptimizer.scale", loss=loss)
        return loss if self.loss_scale is None else loss * self.loss_scale

    @contextlib.contextmanager
    def no_sync(self):
        """A context in which backward only accumulates into `parameter.grad`, in full on every rank.

        The next backward outside, or `step`, reduces it. Raises TkernelsError for stage 2, which keeps no full
        gradients.
        """
        if self.stage == 2:
            raise TkernelsError(
                "no_sync: stage 2 reduces each backward to the owners' shards, and adds it up there by itself; use "
                "stage=1 to keep full gradients"
            )
        with self._engine.no_sync():
            yield

    @torch._disable_dynamo
    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True):
        """Discard the gradients since the last step. Parameters' `.grad` become None in any case."""
        self._engine.discard_gradients()

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure=None):
        """Collective. Update the parameters on all ranks, using the average of the gradients since the last step.

        closure: called first, with gradients enabled; `step` returns its value, as torch optimizers do.
        """
        check_type("ZeroOptimizer.step: closure", closure, Callable | None, "a function that returns the loss")
        self._engine.check()
        thawed = next((self._names[parameter] for parameter in self._frozen if parameter.requires_grad), None)
        if thawed is not None:
            raise TkernelsError(
                f"ZeroOptimizer: {thawed} is to be trained, but was frozen when the optimizer was made; make a new "
                f"one, or begin with requires_grad=True and freeze it afterwards"
            )
        self._check_values()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._engine.step():
            for bucket in self._buckets:
                if is_partial(bucket.layout.parameters[0]) and bucket.total.numel():
                    self._across.all_reduce(bucket.total)
            used, norm = self._exchange()
            self.grad_norm = norm / (self.loss_scale or 1.0)
            self.skipped = self.loss_scale is not None and not math.isfinite(self.grad_norm.item())
            inverse = None if self.loss_scale is None else 1 / self.loss_scale
            if self._dynamic:
                self._steps_at_scale = 0 if self.skipped else self._steps_at_scale + 1
                if self.skipped:
                    self.loss_scale /= 2
                elif self._steps_at_scale == GROWTH_INTERVAL:
                    self.loss_scale, self._steps_at_scale = self.loss_scale * 2, 0
            if not self.skipped:
                if self.max_norm is not None:
                    inverse = clip_scale(self.grad_norm, self.max_norm) * (inverse or 1.0)
                for bucket in self._buckets if inverse is not None else ():
                    bucket.total.mul_(inverse)
                for piece in self._pieces:
                    piece.sharded.grad = piece.total if piece.whole in used else None
                self.optimizer.step()
                check_step("ZeroOptimizer.step", self._engine, self._trained)
        if not self.skipped:
            self._publish()
        return loss

    def _trained(self) -> list[Trained]:
        """All trained parameters, with this rank's pieces of their gradients."""
        return [
            Trained.piece(self._names[parameter], parameter, piece.sharded.grad, piece.start, piece.stop)
            for parameter, piece in self._engine.piece_of.items()
        ]

    def _exchange(self) -> tuple[set, torch.Tensor]:
        """The parameters that some rank has used, and the norm of the mean of all gradients.

        Takes one all-reduce per context, one over `tensor_parallel`, and one over `pipeline`.
        """
        norm, used = None, {parameter for parameter, piece in self._engine.piece_of.items() if piece.used}
        for ctx, wire in self._wires.items():
            parameters = [p for bucket in self._buckets if bucket.wire is wire for p in bucket.layout.parameters]
            parameters.sort(key=is_partial, reverse=True)
            unused = [parameter not in used for parameter in parameters]
            values = torch.ones(1 + len(parameters), device=ctx.device)
            if any(unused):
                values[1:].masked_fill_(torch.tensor(unused).to(ctx.device), 0.0)
            # Every piece is counted once, by its owner: the main context includes all owners.
            if ctx is self.ctx:
                counted = (piece.total for piece in self._pieces if counts(piece.whole, self._tensor_parallel))
                values[:1] = squared_norm(counted, ctx.device)
            wire.all_reduce(values)
            partial = sum(map(is_partial, parameters))
            if self._across is not None and (partial or ctx is self.ctx):
                self._across.all_reduce(values[: 1 + partial])  # the norm, and who has used what these ranks share
            if ctx is self.ctx:
                if self._stages is not None:
                    self._stages.all_reduce(values[:1])
                norm = values[0].sqrt()
            if any(unused):
                used |= {p for p, flag in zip(parameters, values[1:].tolist(), strict=True) if flag > 0}
        return used, norm

    def _publish(self):
        """Send the owners' masters to every rank."""
        self._engine.publish()
        if not self._overlap_gather:
            self._engine.ready()

    def _check_values(self):
        """Raises ValueError for a write that the gathers would undo.

        torch doesn't count every write, and a rank owns only some values: others, which have found none, go on, and
        meet this rank's barrier in their next call. Then all raise MismatchError. Over torch.distributed they would
        meet nothing, so there all ranks that have been written to compare.
        """
        if not self._engine.written:
            return
        changed, current = self._engine.changed(), self._engine.dev.current_stream()
        if self._wires[self.ctx].ctx is not None:
            if not changed:
                return
            where = f"ZeroOptimizer.step of parameters that changed elsewhere: {REFRESH}"
            mine = self.ctx.current_stream()
            with self._engine.dev.stream(self.comm_stream or current):
                if self.ctx.current_stream() != mine:  # as it is simulated, where this would take the barrier's epoch
                    announce(self.ctx, where)
            barrier(self.ctx, where)
            self.ctx.check()
        with self.ctx.group.checking():
            if changed:
                raise ValueError(
                    f"ZeroOptimizer.step: {listed(changed)} changed elsewhere, as by load_state_dict, which the "
                    f"next gather would undo; {REFRESH}"
                )

    def ensure_params_ready(self):
        """Order the current stream after the gathers of the last step, for readers that overlap_gather doesn't see."""
        self._engine.ready()

    @torch.no_grad()
    def refresh_masters(self):
        """Copy the parameters' values into the masters, after a change from outside that is the same on all ranks."""
        self._engine.check()
        self._engine.copy_masters()

    def remove(self):
        """Take the hooks off the parameters and modules. `step` and loading raise LeaseError then. May be repeated.

        A new ZeroOptimizer removes the previous one of its parameters in the same way.
        """
        _live.discard(self)
        self._engine.remove()
        disown([*self._names, *(piece.sharded for piece in self._pieces)], self)

    def state_dict(self) -> dict:
        """This rank's part of the state, for the same ranks and layout. `full_state_dict` is for any.

        All of it is under a key of this rank, so that torch.distributed.checkpoint takes no two ranks' parts for one.
        Its get_state_dict wants a state for each parameter: it takes fully_shard(strategy="optimizer"), not this class.
        As in torch's optimizers, the tensors are those in use: copy.deepcopy it to be able to go back to it after more
        steps.
        """
        own = self.optimizer.state_dict()
        part = {
            "layout": self._layout,
            "optimizer": own,
            "num_states": len(own["state"]),
            "masters": [bucket.flat for bucket in self._buckets],
            "loss_scale": (self.loss_scale, self._steps_at_scale),
        }
        return {self._part: part}

    @property
    def _part(self) -> str:
        return f"rank {self.ctx.group.global_ranks[self.ctx.rank]}"

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict):
        """Collective. Load the result of `state_dict`.

        Raises ValueError, on every rank and before anything is changed, for what is no such state, and for the state of
        another layout or rank.
        """
        with self.ctx.group.checking():
            part = state_dict.get(self._part) if isinstance(state_dict, Mapping) else None
            layout = part.get("layout") if isinstance(part, Mapping) else None
            if not isinstance(layout, Mapping):
                raise ValueError(
                    f"load_state_dict: got no sharded state of {self._part}; each rank loads what it has saved, on as "
                    f"many ranks, and a full state goes to load_full_state_dict"
                )
            if differ := [name for name in self._layout if layout.get(name) != self._layout[name]]:
                raise ValueError(
                    f"load_state_dict: got a state saved with another {', '.join(differ)}; save with full_state_dict, "
                    f"which any number of ranks and any layout can load"
                )
            if _shapes(part.get("masters")) != [bucket.flat.shape for bucket in self._buckets]:
                raise ValueError("load_state_dict: got masters of other shapes, in a state that was changed since")
            if _group_sizes(part.get("optimizer")) != _group_sizes(self.optimizer.state_dict()):
                raise ValueError("load_state_dict: got a state of the wrapped optimizer that has other param groups")
            if (found := len(part["optimizer"]["state"])) != part.get("num_states"):
                raise ValueError(
                    f"load_state_dict: got the states of {found} parameters where those of {part.get('num_states')} "
                    f"were saved: torch.distributed.checkpoint loads what is there already, so take a step before, or "
                    f"save with torch.save, a file a rank"
                )
        self._engine.check()
        self._engine.end()
        self.optimizer.load_state_dict(part["optimizer"])
        for bucket, master in zip(self._buckets, part["masters"], strict=True):
            bucket.flat.copy_(master)
        if self._dynamic and part["loss_scale"][0] is not None:
            self.loss_scale, self._steps_at_scale = part["loss_scale"]
        self._publish()

    def full_state_dict(self) -> dict:
        """Collective. The state that the unsharded optimizer would have, on the CPU of every rank.

        optimizer_class(params).load_state_dict accepts it, and so does load_full_state_dict on any number of ranks.
        "masters" holds the trained parameters, in fp32, by number. Frozen parameters have numbers, too.
        """
        own = self.optimizer.state_dict()
        numbers = {parameter: number for number, parameter in enumerate(self._names)}
        state, masters = {}, {}
        for ctx, wire in self._wires.items():
            parts = [
                (numbers[piece.whole], piece.shape, piece.start, own["state"].get(position, {}) | {"": piece.sharded})
                for position, piece in enumerate(self._pieces)
                if piece.group.wire is wire
            ]
            parts = [(*place, {name: _to_cpu(value) for name, value in values.items()}) for *place, values in parts]
            for number, shape, start, values in itertools.chain(*ctx.group.gather(parts)):
                master = values.pop("")
                _place(masters, number, shape, start, master, master.shape)
                for name, value in values.items():
                    _place(state.setdefault(number, {}), name, shape, start, value, master.shape)
        numbers = iter(range(len(self._names)))
        groups = [
            group | {"params": [next(numbers) for _ in range(size)]}
            for group, size in zip(own["param_groups"], self._group_sizes, strict=True)
        ]
        return {"state": state, "param_groups": groups, "masters": masters, "loss_scale": self.loss_scale}

    @torch.no_grad()
    def load_full_state_dict(self, state: dict):
        """Collective. Load a full state, from `full_state_dict` or from the unsharded optimizer.

        A parameter that "masters" lacks keeps its present value. One without state starts afresh: it may have been
        frozen. Raises ValueError, on every rank and before anything is changed, for what is no such state, for groups
        of other sizes, and for masters of other shapes than the parameters'.
        """
        numbers = {parameter: number for number, parameter in enumerate(self._names)}
        with self.ctx.group.checking():
            if (sizes := _group_sizes(state)) is None:
                raise ValueError(
                    'load_full_state_dict: got no state of an optimizer, which has "state" and "param_groups"'
                )
            if sizes != self._group_sizes:
                raise ValueError(
                    f"load_full_state_dict: got groups of {sizes} parameters for groups of {self._group_sizes}; make "
                    f"the optimizer for the same parameters in the same groups, frozen ones too"
                )
            masters, shapes = state.get("masters") or {}, {n: p.shape for p, n in numbers.items()}
            if not isinstance(masters, Mapping) or _shapes(masters.values()) != [*map(shapes.get, masters)]:
                raise ValueError(
                    "load_full_state_dict: got masters that are not tensors of its parameters' shapes, by number"
                )
        self._engine.check()
        own = self.optimizer.state_dict()
        own["state"] = {
            position: {name: piece.cut(value) for name, value in state["state"][numbers[piece.whole]].items()}
            for position, piece in enumerate(self._pieces)
            if numbers[piece.whole] in state["state"]
        }
        own["param_groups"] = [
            theirs | {"params": mine["params"]}
            for theirs, mine in zip(state["param_groups"], own["param_groups"], strict=True)
        ]
        self.optimizer.load_state_dict(own)
        self.refresh_masters()
        if masters:
            for piece in self._pieces:
                if numbers[piece.whole] in masters:
                    piece.sharded.copy_(piece.cut(masters[numbers[piece.whole]]))
            self._publish()
        if self._dynamic and state.get("loss_scale") is not None:
            self.loss_scale = state["loss_scale"]


def _param_groups(params) -> tuple[list[dict], dict[torch.Tensor, str], dict[torch.Tensor, MeshLike]]:
    """Groups with lists of parameters; names of all of them, in order; the mesh of those that require gradients."""
    groups = several("ZeroOptimizer: params", params, "parameters, or groups of them, as torch's optimizers take")
    names, meshes = {}, {}
    if groups and not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    result = []
    for group in groups:
        if not isinstance(group, Mapping) or "params" not in group:
            raise TypeError(f"ZeroOptimizer: a param group is a dict with params, not {reprlib.repr(group)}")
        if group.get("mesh") is not None:
            group_of(group["mesh"], "ZeroOptimizer: a param group's mesh")
        theirs = group["params"]
        check_type("ZeroOptimizer: params of a group", theirs, Iterable, "parameters")
        theirs = [theirs] if isinstance(theirs, torch.Tensor) else list(theirs)
        named = [each if isinstance(each, tuple) else ("", each) for each in theirs]  # as named_parameters() has them
        for name, parameter in named:
            check_tensors("ZeroOptimizer", parameter=parameter)
            check_initialized(f"ZeroOptimizer: {name or 'a parameter'}", parameter)
            if not parameter.is_leaf:
                raise ValueError(
                    f"ZeroOptimizer: {name or 'a parameter'} of shape {list(parameter.shape)} is computed from others, "
                    f"so that no gradient comes to it; pass the parameters that it is made of"
                )
            if parameter in names:
                raise ValueError(f"ZeroOptimizer: {names[parameter]} occurs twice in params")
            names[parameter] = name or f"parameter {len(names)} of shape {list(parameter.shape)}"
            if parameter.requires_grad:
                meshes[parameter] = group.get("mesh")
        options = {name: value for name, value in group.items() if name != "mesh"}
        result.append(options | {"params": [parameter for _, parameter in named]})
    if not any(parameter.numel() for parameter in meshes):
        raise ValueError("ZeroOptimizer: there is no parameter that requires a gradient")
    return result, names, meshes


def _plain(options: dict) -> dict:
    """The part of `options` that ranks can compare.

    Plain values are kept as they are, other values become the name of their type, and params their number.
    """
    kinds = (type(None), bool, int, float, str, tuple)
    compared = {name: value if isinstance(value, kinds) else type(value).__name__ for name, value in options.items()}
    return compared | ({"params": len(options["params"])} if "params" in options else {})


def _check(ctx: Context, asked: dict, kind: str | None):
    """Collective. Raises the same error on every rank, for options that differ or are invalid.

    kind: of the optimizer, see not_elementwise.
    """
    with ctx.group.checking():  # before they are compared: anything can be passed
        check_type("ZeroOptimizer: backend", asked["backend"], str, "a name")
        for name, values in CHOICES.items():
            if type(asked[name]) is not type(values[0]) or asked[name] not in values:
                choices = " or ".join(map(repr, values))
                raise ValueError(f"ZeroOptimizer: {name}={asked[name]!r} is unknown; use {choices}")
        for name in ("bucket_bytes", "max_norm", "loss_scale"):
            value = asked[name]
            dynamic = name == "loss_scale" and isinstance(value, str) and value == "dynamic"
            if dynamic or value is None and name != "bucket_bytes":
                continue
            check_type(f"ZeroOptimizer: {name}", value, Integral if name == "bucket_bytes" else Real, "a number")
            if not real(f"ZeroOptimizer: {name}", value) > 0:
                raise ValueError(f"ZeroOptimizer: {name}={value} must be positive")
    ctx.group.check_alike("ZeroOptimizer", "options", asked, "all must pass the same")
    if asked["overlap_gather"] and not asked["overlap_comm"]:
        raise ValueError("ZeroOptimizer: overlap_gather needs overlap_comm=True: without it there is no other stream")
    if kind == "LBFGS":
        raise ValueError("ZeroOptimizer: LBFGS takes products over all parameters, which no rank has")
    if "SparseAdam" in asked["optimizer_class"]:
        raise ValueError("ZeroOptimizer: SparseAdam takes sparse gradients, and sums over ranks are dense; take Adam")
    if asked["partition"] == "elements" and kind is not None:
        raise ValueError(f"ZeroOptimizer: {kind} looks at whole parameters; pass partition='parameters'")


def _check_parameters(contexts: dict[torch.Tensor, Context], names, wires, reduce_dtype, tensor_parallel):
    for parameter, ctx in contexts.items():
        what = f"ZeroOptimizer: {names[parameter]}"
        if is_partial(parameter) and tensor_parallel is None:
            raise ValueError(
                f"{what} is marked sequence_parallel: its gradient comes from this rank's "
                f"rows alone and is yet to be summed over the tensor-parallel ranks; pass tensor_parallel=, these "
                f"ranks, or take off the mark if the gradient is whole"
            )
        check_free(what, parameter, ZeroOptimizer, Values)
        wires[ctx].check(what, parameter, reduce_dtype or parameter.dtype)
        if parameter.device != ctx.device:  # over torch, too: the buffers are there
            raise ValueError(f"{what} is on {parameter.device}, its context on {ctx.device}; move the model")


def _check_partial(ctx: Context, tensor_parallel: Context, contexts: dict[torch.Tensor, Context], names):
    """Collective. Raises MismatchError, on every rank, unless tensor-parallel ranks have the same partial parameters.

    Of the data-parallel ranks, those count whose values all will have.
    """
    partial = {
        names[parameter]: (tuple(parameter.shape), parameter.dtype, None if its.rank else checksum(parameter))
        for parameter, its in contexts.items()
        if is_partial(parameter)
    }
    with ctx.group.checking():
        tensor_parallel.group.check_alike(
            "ZeroOptimizer", "parameters marked sequence_parallel", partial,
            "they are whole and the same on each tensor-parallel rank: begin with one seed, or load one state dict",
        )  # fmt: skip


_live = weakref.WeakSet()  # those that take gradients


@register_optimizer_step_pre_hook
@torch._disable_dynamo
def _check_step(optimizer, *_):
    """Raises ValueError for a step of parameters whose gradients a ZeroOptimizer takes: nothing would be trained."""
    for zero in _live:
        for parameter in () if optimizer in (zero, zero.optimizer) else parameters_of(optimizer):
            if parameter in zero._names and parameter.requires_grad:
                raise ValueError(
                    f"{type(optimizer).__name__}.step: it has {zero._names[parameter]}, whose gradients a "
                    f"ZeroOptimizer takes; step that, or remove() it before you make another optimizer of them"
                )


def _check_parts(ctx: Context, contexts: dict[torch.Tensor, Context], names: dict[torch.Tensor, str]):
    """Collective. Raises the same error on every rank, for parts of split tensors that differ.

    Rank 0's values would replace the others.
    """
    parts = {
        (number, *contexts[parameter].group.global_ranks): checksum(parameter)
        for number, parameter in enumerate(names)
        if parameter in contexts and is_split(parameter)
    }
    found = {}  # (number, the ranks that share it) -> checksums
    for theirs in ctx.group.gather(parts):
        for part, value in theirs.items():
            found.setdefault(part, set()).add(value)
    if differ := sorted({number for (number, *_), values in found.items() if len(values) > 1}):
        differing = [[*names.values()][number] for number in differ]
        raise MismatchError(
            f"ZeroOptimizer: the ranks differ in {listed(differing)}, which are marked as parts of tensors "
            f"(tensor_model_parallel), and rank 0's would replace the others; pass a mesh of the data-parallel ranks "
            f"only, or begin with equal values on its ranks"
        )


def _group_sizes(state) -> list[int] | None:
    """The numbers of parameters in the groups of a torch optimizer's state dict; None for what is no such dict."""
    if not isinstance(state, Mapping) or not isinstance(own := state.get("state"), Mapping):
        return None
    if not all(isinstance(values, Mapping) for values in own.values()):
        return None
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(each, Mapping) and "params" in each for each in groups):
        return None
    return [len(group["params"]) for group in groups]


def _shapes(tensors) -> list[torch.Size] | None:
    """The shapes of tensors; None for what is no collection of tensors."""
    if not isinstance(tensors, Iterable) or not all(isinstance(each, torch.Tensor) for each in tensors):
        return None
    return [each.shape for each in tensors]


def _to_cpu(value):
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _place(values: dict, name, shape: torch.Size, start: int, value, piece_shape: torch.Size):
    """Put a piece's value at its place in values[name], of the parameter's `shape`; other values as they are."""
    if not isinstance(value, torch.Tensor) or value.shape != piece_shape:
        values[name] = value
        return
    if name not in values:
        values[name] = torch.zeros(shape, dtype=value.dtype)
    values[name].view(-1)[start : start + value.numel()] = value.reshape(-1)
