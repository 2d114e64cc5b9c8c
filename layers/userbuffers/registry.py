"""initialize_ub and its registry: one communicator for each GEMM's overlap, looked up by name.

Everything is checked before anything is created, and the ranks exchange their errors: an error on one rank is raised on
all ranks and leaves nothing initialised on any.
"""

import contextlib
import contextvars
import os
import warnings
from dataclasses import replace
from numbers import Integral

import torch
import torch.distributed as dist

from tkernels.comm import runtime
from tkernels.comm.arguments import check_type
from tkernels.comm.context import Context, MeshLike, constant_in_traces, group_of
from tkernels.comm.contexts import INIT, is_abandoned, let_go, meet, open_contexts
from tkernels.comm.errors import MismatchError, OutOfStepError, TkernelsError
from tkernels.comm.group import Group
from tkernels.layers.userbuffers.communicators import (
    CommOverlap,
    CommOverlapCore,
    CommOverlapHelper,
    CommOverlapP2P,
    check_dtype,
    checked_shape,
    heap_bytes,
    margin,
    timeout_s,
)
from tkernels.layers.userbuffers.defaults import (
    OverlapOptions,
    UserBufferQuantizationMode,
    boolean,
    configure,
    without_effect,
)

NONE, FP8 = UserBufferQuantizationMode.NONE, UserBufferQuantizationMode.FP8
BACKENDS = ("gloo", "mpi", "nccl")
# Names of meetings; the second counts as one of `init`, and not as a call of a context that another rank has left.
AGREED, ENDED = "initialize_ub", f"{INIT} of initialize_ub, after constructing or an error"
REMOVED_VARIABLES = (
    "NVTE_UB_SPLIT_RS",
    "NVTE_UB_SPLIT_AG",
    "NVTE_UB_ATOMIC_GEMM_RS",
    "NVTE_UB_ATOMIC_GEMM_AG",
    "NVTE_UB_BULK_WGRAD",
    "NVTE_UB_BULK_DGRAD",
    "NVTE_UB_FP8_RS",
)

_ub_communicators: dict[tuple[str, UserBufferQuantizationMode], CommOverlapCore] = {}
_NOTHING = {"helper": None, "groups": (), "cublasmp": False, "met": False}  # met: who left it after a failure
_state = dict(_NOTHING)
_left = []  # contexts that destroy_ub has left after a failure, where other ranks may wait for this one; their groups
_noted = contextvars.ContextVar("options of the layers that `constructing` is constructing", default=None)


def initialize_ub(
    shape: list,
    tp_size: int,
    use_fp8: bool = False,
    quantization_modes: list[UserBufferQuantizationMode] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    ub_cfgs: dict | list[dict] | None = None,
    bootstrap_backend: str | None = None,
    with_cublasmp: bool = False,
    *,
    tp_group: MeshLike = None,
) -> None:
    """Collective over torch's default group. Create the communicators of all overlaps; call it before making layers.

    shape: [tokens, hidden], the largest of any call of a tensor-parallel group. Calls may have fewer tokens.
    tp_size: ranks per domain. Domains are blocks of consecutive ranks, unless tp_group gives this rank's domain: a
        process group, or a mesh of one dimension.
    quantization_modes: [NONE], [FP8] or both: a set of communicators for each. Those of FP8 serve products of FP8, in
        `fp8_autocast` those of the layers: gathers move a byte an element, and sums travel as they do for bf16, unless
        fp8_buf says otherwise.
    use_fp8: deprecated; True is quantization_modes=[FP8].
    dtype: of operands that are not quantized, and of results; layers whose results are of another one are refused.
    ub_cfgs: {GEMM: {option: value}}, see `defaults`; or a list with one such dict for each mode.
    bootstrap_backend: of the torch groups created for the domains: gloo, mpi or nccl. None: the default group's. With
        tp_group, of which none is created, it must be that group's.
    with_cublasmp: the semantics of the cuBLASMp backend: no bulk overlap, and no buffers for gathered operands.

    Environment: UB_TIMEOUT, seconds that a kernel waits for a peer (110). NVTE_EXT_MARGIN_SM, SMs left free by GEMMs
    that have a communicator or run beside its collective (0). UB_SKIPMC has no effect, since no multicast is used.

    Raises RuntimeError if UB is already initialised or torch.distributed is not, ValueError or TypeError for invalid
    arguments, and MismatchError if the ranks' arguments differ. An error of one rank, wherever it occurs, is raised on
    all: ranks without one of their own raise ValueError or TypeError like it, for any other error TkernelsError, with
    its text. Nothing is left behind then, and initialize_ub may be called again.
    """
    asked = locals() | {"tp_group": tp_group is not None}
    asked |= {name: os.environ.get(name) for name in ("UB_TIMEOUT", "NVTE_EXT_MARGIN_SM")}
    _let_go()
    world = Group(None)
    with _agreed(world, asked=asked):
        timeout_s(), margin()
        tp_group = None if tp_group is None else group_of(tp_group, "initialize_ub: tp_group").process_group
        with_cublasmp = boolean("initialize_ub: with_cublasmp", with_cublasmp)
        _check(world, shape, tp_size, dtype, bootstrap_backend, tp_group)
        modes = _modes(use_fp8, quantization_modes)
        configurations = ub_cfgs if isinstance(ub_cfgs, list) else [ub_cfgs] * len(modes)
        options = _resolve(configurations, modes, tp_size, with_cublasmp)
        if world.rank == 0:
            _tell(configurations, options, tp_size)

    before, groups, made = open_contexts(), [], {}
    try:
        with _agreed(world):
            group = _domain(world, tp_size, bootstrap_backend, tp_group, groups)
        with _agreed(world, domain=Group(group)):
            helper = CommOverlapHelper(group, heap_bytes=heap_bytes(shape, dtype, tp_size))
            for mode, table in options.items():
                for name, mine in table.items():
                    if mode is NONE and mine.is_reduce_scatter:  # operands of FP8 are reduced there as well
                        mine = replace(mine, fp8_buf=False)
                    of = torch.uint8 if mode is FP8 and not mine.is_reduce_scatter else dtype
                    made[name, mode] = _communicator(mine, shape, of, helper, tp_size, with_cublasmp)
    except Exception:  # raised on all ranks, so none of them uses what any of them has made
        for context in open_contexts():
            if context not in before:
                context.give_back()
        _destroy(groups)
        raise
    _ub_communicators.update(made)
    _state.update(helper=helper, groups=groups, cublasmp=with_cublasmp)


def _let_go():
    """Collective over the ranks of domains that have failed: whoever waits in destroy_ub returns."""
    if is_ub_initialized() and (context := domain_context()).failed and context.group.alive:
        if not _state["met"]:  # others have called destroy_ub, and wait in here
            meet(Group(context.group.process_group), INIT, once=True)
            _state["met"] = True
    while _left:
        context, groups = _left.pop()
        try:
            let_go(context)
        finally:
            _destroy(groups if context.group.alive else ())


def destroy_ub() -> None:
    """Collective. Free everything; communicators must not be used afterwards. May be repeated.

    After a failure, of which this raises what has not been raised yet, it doesn't wait for the other ranks, and one
    that has not failed may wait for this one's next initialize_ub.
    """
    helper, groups, met = _state["helper"], _state["groups"], _state["met"]
    _ub_communicators.clear()
    _state.update(_NOTHING)
    if helper is not None:
        try:
            helper.close()
        finally:
            if is_abandoned(helper.context) and not met:
                _left.append((helper.context, groups))
            else:
                _destroy(groups)
            torch.compiler.reset()


def is_ub_initialized() -> bool:
    """Whether initialize_ub has made communicators. May be called at any time; never raises."""
    return _state["helper"] is not None


def using_cublasmp_backend() -> bool:
    """Whether initialize_ub has made communicators with cublasmp semantics. May be called at any time; never raises."""
    return _state["cublasmp"]


def get_ub(name: str, use_fp8: bool = False) -> CommOverlapCore:
    """The communicator of a GEMM. Raises RuntimeError before initialize_ub, KeyError for a GEMM without one."""
    check_type("get_ub: name", name, str, "the name of a GEMM, such as 'qkv_fprop'")
    use_fp8 = boolean("get_ub: use_fp8", use_fp8)
    if not is_ub_initialized():
        raise RuntimeError("UB manager is not initialized. Call initialize_ub() on every rank before making layers.")
    key = name, FP8 if use_fp8 else NONE
    if key not in _ub_communicators:
        there = ", ".join(sorted(name for name, mode in _ub_communicators if mode is key[1])) or "none in this mode"
        way = f"; pass initialize_ub quantization_modes with {key[1]}" if not has_mode(use_fp8) else ""
        raise KeyError(f"UB for {name} is not registered{' in FP8' if use_fp8 else ''}. Registered: {there}{way}.")
    return _ub_communicators[key]


def has_mode(use_fp8: bool) -> bool:
    """Whether initialize_ub has made communicators of FP8, or of none."""
    return any(mode is (FP8 if use_fp8 else NONE) for _, mode in _ub_communicators)


@constant_in_traces
def get_ub_is_fp8(name: str, use_fp8: bool = False) -> bool:
    """Whether the communicator's buffer is fp8."""
    return get_ub(name, use_fp8).is_fp8_ubuf()


def domain_context() -> Context:
    """The context of this rank's tensor-parallel domain. Raises RuntimeError before initialize_ub."""
    if not is_ub_initialized():
        raise RuntimeError("UB manager is not initialized. Call initialize_ub() on every rank before this call.")
    return _state["helper"].context


def check_group(name: str, tp_group) -> None:
    """Raise ValueError unless a layer's group has the ranks of this rank's initialize_ub domain."""
    ranks, domain = Group(tp_group).global_ranks, domain_context().group.global_ranks
    if list(ranks) != list(domain):
        raise ValueError(
            f"{name}: tp_group has the ranks {list(ranks)}, but initialize_ub made a domain of {list(domain)}; pass "
            f"tp_group to initialize_ub as well"
        )


@contextlib.contextmanager
def constructing(name: str, tp_group, tp_size):
    """Collective over this rank's domain, if a layer's group, as it was passed, is that or none at all.

    What fails in the block on one rank is raised on all, and MismatchError if they note different options. The layers
    that a layer consists of are in its block. A rank with a wrong tp_group may be the only one, so it meets the others.
    """
    if _noted.get() is not None or not _concerns_domain(tp_group, tp_size):
        yield
        return
    group, noted = domain_context().group, {}
    token = _noted.set(noted)
    try:
        with group.checking(name):
            yield
        group.check_alike(name, "layers", noted, "all must make the same layer")
    finally:
        _noted.reset(token)


def _concerns_domain(tp_group, tp_size) -> bool:
    if not is_ub_initialized():
        return False
    if tp_group is None:
        return not (isinstance(tp_size, Integral) and tp_size == 1)
    with contextlib.suppress(TypeError, ValueError):
        return group_of(tp_group).global_ranks == domain_context().group.global_ranks
    return True


def note(name: str, options: dict) -> None:
    """Let `constructing` compare the ranks' options of the layer of that name."""
    if (noted := _noted.get()) is not None:
        layer, number = name, 1
        while any(f"{option} of {name}" in noted for option in options):  # another one in the same layer
            number += 1
            name = f"{layer}, {number}"
        noted.update({f"{option} of {name}": value for option, value in options.items()})


def load_ub_cfgs(path: str | os.PathLike) -> dict:
    """A configuration for `ub_cfgs` from a YAML file. Needs PyYAML, which is not installed with this package."""
    check_type("load_ub_cfgs: path", path, (str, os.PathLike), "a path")
    try:
        import yaml
    except ImportError as error:
        raise ImportError(f"load_ub_cfgs({str(path)!r}) needs PyYAML: pip install pyyaml, or pass a dict") from error
    with open(path) as file:
        return yaml.safe_load(file) or {}


def _check(world: Group, shape, tp_size, dtype, bootstrap_backend, tp_group):
    if is_ub_initialized():
        raise RuntimeError("UB communicators are already initialized. Call destroy_ub() before.")
    if type(tp_size) is int and tp_size > 1 and not dist.is_initialized():
        raise RuntimeError("initialize_ub: torch.distributed is not initialised; call init_process_group() before")
    if type(tp_size) is not int or tp_size < 1 or world.size % tp_size:
        raise ValueError(f"initialize_ub: tp_size={tp_size!r} must divide the {world.size} ranks of the default group")
    checked_shape("initialize_ub: shape", shape)
    check_dtype("initialize_ub: dtype", dtype)
    if tp_group is not None and dist.get_world_size(tp_group) != tp_size:
        raise ValueError(
            f"initialize_ub: tp_group has {dist.get_world_size(tp_group)} ranks, but tp_size={tp_size}; pass its size"
        )
    if bootstrap_backend is not None and bootstrap_backend not in BACKENDS:
        raise ValueError(
            f"initialize_ub: bootstrap_backend={bootstrap_backend!r} must be {', '.join(BACKENDS)} or None"
        )
    if tp_group is not None and bootstrap_backend is not None:
        has = dist.get_backend_config(tp_group)
        if bootstrap_backend not in has:
            raise ValueError(
                f"initialize_ub: bootstrap_backend={bootstrap_backend!r} is for groups that initialize_ub creates, but "
                f"tp_group, of backend {has}, is used as it is; leave out one of them"
            )
    if bootstrap_backend is not None and not getattr(dist, f"is_{bootstrap_backend}_available")():
        raise RuntimeError(
            f"initialize_ub: bootstrap_backend={bootstrap_backend!r}, but this torch was built without it"
        )


def _modes(use_fp8: bool, modes) -> list[UserBufferQuantizationMode]:
    if boolean("initialize_ub: use_fp8", use_fp8):
        beside = ", and has no effect beside quantization_modes; leave it out"
        way_out = beside if modes else "; pass quantization_modes"
        warnings.warn(f"initialize_ub: use_fp8 is deprecated{way_out}", DeprecationWarning, stacklevel=3)
    modes = modes or [FP8 if use_fp8 else NONE]
    if isinstance(modes, torch.dtype):
        raise TypeError(
            f"initialize_ub: quantization_modes={modes}; up to release 2.7 dtype stood in the fourth position, so pass "
            f"dtype={modes} and what follows it by keyword"
        )
    if not isinstance(modes, list):
        raise TypeError(f"initialize_ub: quantization_modes must be a list, not {type(modes).__name__}")
    wrong = [mode for mode in modes if not isinstance(mode, UserBufferQuantizationMode)]
    if wrong:
        raise TypeError(f"initialize_ub: quantization_modes has {wrong}, which are no UserBufferQuantizationMode")
    if FP8 in modes and not runtime.has_fp8():
        raise ValueError(
            "initialize_ub: this GPU has no float8 arithmetic; pass "
            "quantization_modes=[UserBufferQuantizationMode.NONE]"
        )
    if len(set(modes)) < len(modes):
        raise ValueError(f"initialize_ub: quantization_modes has {modes[0]} more than once")
    return modes


def _resolve(ub_cfgs: list, modes, tp_size, with_cublasmp) -> dict[UserBufferQuantizationMode, dict]:
    if len(ub_cfgs) != len(modes):
        raise ValueError(f"initialize_ub: {len(ub_cfgs)} ub_cfgs for {len(modes)} quantization_modes; pass one each")
    pairs = zip(modes, ub_cfgs, strict=True)
    return {mode: configure(each, tp_size, with_cublasmp=with_cublasmp, fp8=mode is FP8) for mode, each in pairs}


@contextlib.contextmanager
def _agreed(world: Group, domain: Group | None = None, asked: dict | None = None):
    """Collective. An error of one rank in the block is raised on all; without any, MismatchError if `asked` differs.

    A rank with an error raises its own. The others raise one of the same kind, TypeError, ValueError or else
    TkernelsError, with the first failed rank's.
    domain: ranks that meet inside the block.
    """
    error = text = None
    try:
        yield
        text = repr(asked)
    except Exception as caught:
        error = caught
    if domain is not None and _has_ended(domain, error):
        error = None
    kind = next((kind for kind in (TypeError, ValueError) if isinstance(error, kind)), TkernelsError)
    found = world.gather((None if error is None else (kind, f"{type(error).__name__}: {error}"), text), AGREED)
    failed = {rank: failure for rank, (failure, _) in enumerate(found) if failure is not None}
    if error is not None:
        raise error
    if failed:
        rank, (kind, text) = next(iter(failed.items()))
        raise kind(f"initialize_ub: failed on rank {rank}, so nothing is initialised on any rank: {text}")
    if len({theirs for _, theirs in found}) > 1:
        by_rank = "; ".join(f"rank {rank}: {theirs}" for rank, (_, theirs) in enumerate(found))
        raise MismatchError(f"initialize_ub: the ranks ask for different things: {by_rank}")


def _has_ended(domain: Group, error: Exception | None) -> bool:
    """Collective. Whether `error` only says that another rank has one. Afterwards no rank of the domain waits.

    A rank that has failed comes to this meeting while the others wait in a meeting of what they construct. The group
    notices that these are two, and both raise OutOfStepError: here it is expected, there it is how they learn.
    """
    if isinstance(error, OutOfStepError) and ENDED in error.calls:
        return True
    with contextlib.suppress(OutOfStepError):
        meet(domain, ENDED)
    return False


def _domain(world: Group, tp_size: int, backend: str | None, tp_group, made: list):
    """Collective. This rank's tensor-parallel group; None for all ranks. A group that is created is added to `made`."""
    if tp_group is not None:
        everyone = world.gather(mine := Group(tp_group).global_ranks)  # in order of the ranks
        if other := [rank for rank in mine if everyone[rank] != mine]:
            raise ValueError(
                f"initialize_ub: tp_group has the ranks {mine}, but rank {other[0]} passed a group of "
                f"{everyone[other[0]]}; the ranks of a domain must pass one group"
            )
        return tp_group
    if world.process_group is None or (tp_size == world.size and backend is None):
        return None
    for first in range(0, world.size, tp_size):
        group = dist.new_group(list(range(first, first + tp_size)), backend=backend)
        if first <= world.rank < first + tp_size:
            made.append(group)
    return made[0]


def _communicator(options: OverlapOptions, shape, dtype, helper, tp_size, with_cublasmp) -> CommOverlapCore:
    kind = CommOverlapP2P if options.method == "ring_exchange" else CommOverlap
    return kind.of(options, shape, dtype, helper, tp_size, with_cublasmp)


def _destroy(groups):
    for group in groups:
        dist.destroy_process_group(group)


def _tell(configurations, options, tp_size):
    """Warn of settings without effect: options of this configuration, environment variables of old releases."""
    for ub_cfg, (mode, table) in zip(configurations, options.items(), strict=True):
        if lines := without_effect(ub_cfg, table, tp_size, mode is FP8):
            warnings.warn("initialize_ub: these options change nothing here: " + "; ".join(lines), stacklevel=3)
    if old := [name for name in REMOVED_VARIABLES if name in os.environ]:
        warnings.warn(f"initialize_ub: {', '.join(old)} have no meaning any more; pass ub_cfgs", stacklevel=3)
