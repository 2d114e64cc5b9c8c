"""Communicators: the shape of a registered buffer, the ranks that share it, and how its data overlaps a GEMM.

A communicator of shape [S, H] serves every call of up to S * H elements. One of uint8 gathers FP8: operands are
Float8Tensors, and each rank's scale travels beside its rows. One of another dtype reduces what FP8 operands sum up to,
in bf16, or in fp32 if that is its dtype, or with fp8_buf in e4m3 (tkernels.partials). Construction allocates all that
it needs: the symmetric memory of the domain's context, grown to the largest shape. All communicators of one helper
share that memory, one context, and one communication stream per priority, because their calls are ordered anyway. The
buffer behind `copy_into_buffer` and `get_buffer` is allocated at its first use; the layers don't use it.

Deadlock: two kernels that wait for peers may start in opposite orders on two ranks. If each occupied all SMs, the ranks
could wait for each other forever. A collective on the communication stream therefore runs either beside local GEMMs,
which wait for no peer, or beside one fused GEMM + reduce-scatter that leaves as many SMs free as the collective has
programs. Both kernels then fit on every rank, whichever starts first. The caller's stream joins the communication
stream before anything else is launched.
"""

import contextlib
import enum
import inspect
import itertools
import math
import os
import warnings
import weakref
from collections.abc import Iterable
from dataclasses import fields, replace
from numbers import Integral

import torch
import torch.distributed as dist

from tkernels.all_gather_matmul import AllGatherMatmul
from tkernels.choice import gemm_config, overlap_config
from tkernels.comm import capture, collectives, stream_order
from tkernels.comm.arguments import check_dense, check_flags, check_type
from tkernels.comm.calls import describe
from tkernels.comm.capture import lasting
from tkernels.comm.collectives import check_rows, split_rows
from tkernels.comm.context import Context, group_of, init
from tkernels.comm.errors import TkernelsError
from tkernels.comm.fence import Fence
from tkernels.comm.mail import MAX_TILE_CHUNKS
from tkernels.comm.regions import round_up
from tkernels.comm.workspace import LAMPORT_BYTES, most_packets
from tkernels.configs import DTYPES, FP8, MIN_CHUNK_ROWS, OverlapConfig, result_dtype, with_room_for
from tkernels.gemm import Matmul, Scales, fused_layout, layout_of, precision
from tkernels.layers.lease import Lease
from tkernels.layers.tensor_parallel.dataflow import product
from tkernels.layers.tensor_parallel.float8 import Float8Tensor, memory
from tkernels.layers.userbuffers.defaults import OverlapOptions, integer
from tkernels.layers.userbuffers.float8 import check_quantizer, float8_tensor
from tkernels.matmul_reduce_scatter import MatmulReduceScatter
from tkernels.model import COPY_BYTES
from tkernels.overlap import TILE_COUNTS
from tkernels.partials import WIRE_FP8, with_scaled_slices

DEFAULT_TIMEOUT_S = 110.0
NUM_CARRIERS = 12  # programs of a collective beside a GEMM, unless options set a number: enough to saturate SM stores
MAX_PROGRAMS = 256  # upper bound on the programs of such kernels that a GPU runs at one time

_numbers = itertools.count()
_ARGUMENTS = {  # fields of OverlapOptions that the constructors take under other names
    "num_sm": "num_comm_sm",
    "cga_size": "comm_cga_size",
    "pipeline_rs_overlap_first_gemm": "rs_overlap_first_gemm",
}


class CommOverlapType(enum.IntEnum):
    """The collective of a communicator: reduce-scatter or all-gather."""

    RS = 0
    AG = 1


CommOverlapAlgo = enum.IntEnum(  # legacy names, which no function takes as an argument
    "CommOverlapAlgo",
    "BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P SPLIT_PIPELINED_RS SPLIT_PIPELINED_RS_P2P ATOMIC_GEMM_RS "
    "ATOMIC_GEMM_AG_P2P ATOMIC_GEMM_RS_P2P EXTERNAL_BULK_OVERLAP_AG",
    start=0,
)


class CommOverlapHelper:
    """Collective. The ranks that communicators connect: those of `intra_node_group`, by default of `world_group`.

    It holds their context and communication streams, which all its communicators share.

    If both are given, they must have one backend, and world_group the ranks of intra_node_group. Without groups, they
    are those of torch's default group.

    Communicators keep the helper alive. Once it and they are dropped, on every rank, their symmetric memory is freed
    when the ranks make the next helper, or context, for the group (Context.abandon); by `close`, at once.

    heap_bytes: symmetric memory for all communicators of the helper; the default is that of `tkernels.init`.
    """

    def __init__(self, world_group=None, intra_node_group=None, *, heap_bytes: int | None = None):
        given = {"world_group": world_group, "intra_node_group": intra_node_group}
        groups = [
            group_of(each, f"CommOverlapHelper: {name}").process_group
            for name, each in given.items()
            if each is not None
        ]
        if len(groups) == 2:
            world, ranks = map(dist.get_process_group_ranks, groups)
            backends = [*map(dist.get_backend, groups)]
            if backends[0] != backends[1]:
                raise ValueError(
                    f"CommOverlapHelper: world_group has backend {backends[0]} and intra_node_group {backends[1]}; "
                    f"pass groups of one backend"
                )
            if not set(ranks) <= set(world):
                raise ValueError(
                    f"CommOverlapHelper: intra_node_group has the ranks {ranks}, but world_group only {world}; pass a "
                    f"part of world_group"
                )
        group = groups[-1] if groups else None
        self.context = init(group, heap_bytes=heap_bytes, timeout_s=timeout_s(), default=False)
        self.context.shared = False
        self.dev = torch.get_device_module(self.context.device)
        self._streams = {}
        self._dropped = weakref.finalize(self, Context.abandon, self.context)
        self._dropped.atexit = False

    @property
    def closed(self) -> bool:
        return not self._dropped.alive

    def close(self):
        """Collective. Finalize the context. May be repeated."""
        if self._dropped.detach():
            self.context.finalize()

    def stream(self, priority: int):
        if priority not in self._streams:
            self._streams[priority] = self.dev.Stream(priority=priority)
        return self._streams[priority]


class CommOverlapCore:
    """Base class of both kinds of communicators.

    Attributes: rank, size, shape (S, H), dtype, comm_type, and `options`, an OverlapOptions whose `without_effect`
    names the options that change nothing here.
    """

    def __init__(
        self, buffer_shape, buffer_dtype, helper, tp_size, comm_type, use_cublasmp, options: OverlapOptions,
        alike: bool = False,
    ):  # fmt: skip
        """alike: whether the ranks are known to pass the same; otherwise what one alone has wrong is raised on all."""
        name = type(self).__name__
        if not isinstance(helper, CommOverlapHelper):
            raise TypeError(f"{name}: helper must be a CommOverlapHelper, not {type(helper).__name__}")
        self._helper = helper
        self.rank, self.size = self.context.rank, self.context.size
        with contextlib.nullcontext() if alike else self.context.group.checking():
            if type(use_cublasmp) is not bool or not isinstance(comm_type, CommOverlapType):
                raise TypeError(
                    f"{name}: use_cublasmp={use_cublasmp!r} and comm_type={comm_type!r} must be a bool and a "
                    f"CommOverlapType. Up to release 2.16 num_splits and num_max_streams stood in their positions; "
                    f"pass these by keyword"
                )
            self.shape = checked_shape(f"{name}: buffer_shape", buffer_shape)
            check_dtype(f"{name}: buffer_dtype", buffer_dtype, None if options.is_reduce_scatter else torch.uint8)
            options = options.checked(lambda key: f"{name}: {_ARGUMENTS.get(key, key)}")
            _check_method(name, options, use_cublasmp)
            if type(tp_size) is not int or tp_size != self.size:
                raise ValueError(f"{name}: tp_size={tp_size!r}, but the helper's group has {self.size} ranks")
            self._margin = margin()
        self.dtype = buffer_dtype
        self.comm_type, self.options, self._cublasmp = comm_type, options, use_cublasmp
        highest = get_stream_priority_range()[1]
        self.stream = self._helper.stream(options.comm_priority or highest)
        self._buffer, self._active, self._parts = None, self.shape, None
        self._moved = f"what {self!r} moves"  # the name of a lease in each call
        self._number = next(_numbers)  # identifies it among prepared calls, which must not keep it alive
        self._reserve()

    @classmethod
    def of(cls, options: OverlapOptions, buffer_shape, buffer_dtype, helper, tp_size, use_cublasmp):
        """Collective. The communicator with these options."""
        comm_type = CommOverlapType.RS if options.is_reduce_scatter else CommOverlapType.AG
        comm = cls.__new__(cls)
        common = buffer_shape, buffer_dtype, helper, tp_size, comm_type, use_cublasmp
        CommOverlapCore.__init__(comm, *common, options, alike=True)
        return comm

    def _tell(self, num_max_streams):
        """Warn of arguments of the constructor that are not its defaults, and change nothing."""
        integer(f"{type(self).__name__}: num_max_streams", num_max_streams, positive=True)
        found = {"num_max_streams": (num_max_streams, "a single kernel does all the work")}
        for key, reason in self.options.without_effect.items():
            found[_ARGUMENTS.get(key, key)] = getattr(self.options, key), reason
        defaults = {each.name: each.default for each in inspect.signature(type(self)).parameters.values()}
        lines = [
            f"{name}={value!r}: {reason}"
            for name, (value, reason) in found.items()
            if name in defaults and value != defaults[name]
        ]
        if lines and self.rank == 0:
            warnings.warn(f"{type(self).__name__}: these options change nothing here: {'; '.join(lines)}", stacklevel=3)

    # Queries

    def get_tp_size(self) -> int:
        return self.size

    def is_atomic_gemm(self) -> bool:
        return False

    def is_p2p_overlap(self) -> bool:
        return isinstance(self, CommOverlapP2P)

    def is_fp8_ubuf(self) -> bool:
        return self.dtype is torch.uint8

    def with_cublasmp(self) -> bool:
        return self._cublasmp

    @property
    def reduces_dgrad(self) -> bool:
        """Whether a column layer whose dgrad it is reduces dx inside its GEMM."""
        return self.options.is_reduce_scatter

    def get_communication_stream(self):
        """(send, recv): both are the same stream."""
        return self.stream, self.stream

    def __repr__(self):
        return f"{type(self).__name__}({self.comm_type.name} {self.options.method}, {list(self.shape)}, {self.dtype})"

    # The buffer

    def copy_into_buffer(self, input: torch.Tensor, local_chunk: bool = False):
        """Copy a tensor into the buffer, or into this rank's chunk of it, on the current stream.

        The tensor may have fewer rows than the buffer. Its number of rows sets the chunk boundaries from then on.
        """
        check_dense("copy_into_buffer", input=input)
        if input.dtype in FP8:
            input = input.view(torch.uint8)
        if input.dtype != self.dtype:
            raise TypeError(f"copy_into_buffer: the tensor is {input.dtype}, but the buffer is {self.dtype}")
        if input.device != self.context.device:
            raise ValueError(
                f"copy_into_buffer: the tensor is on {input.device}, not on {self.context.device}; move it"
            )
        self.get_buffer(local_chunk, input.shape).copy_(input)

    def get_buffer(self, local_chunk: bool = False, shape=None) -> torch.Tensor:
        """A view of the buffer, or of this rank's chunk of it. shape: [rows, ...], with at most as many elements."""
        check_flags("get_buffer", local_chunk=local_chunk)
        if shape is None:
            total, width = self._active = self.shape
            shape = (split_rows(total, self.size)[self.rank], width) if local_chunk else self.shape
        elif not isinstance(shape, Iterable) or isinstance(shape, torch.Tensor):
            raise TypeError(f"get_buffer: shape={shape!r} must be [rows, ...]")
        elif not (shape := tuple(shape)) or any(not isinstance(extent, Integral) or extent < 0 for extent in shape):
            raise ValueError(f"get_buffer: shape={list(shape)} must be [rows, ...], none of them negative")
        else:
            width = math.prod(shape[1:])
            total = shape[0]
            if local_chunk:  # the buffer's own rows are split evenly, any others equally
                own = split_rows(self.shape[0], self.size)[self.rank], self.shape[1]
                total = self.shape[0] if (total, width) == own else total * self.size
            if total * width > math.prod(self.shape):
                raise ValueError(
                    f"get_buffer: shape {list(shape)}{' of a chunk' if local_chunk else ''} makes {total * width} "
                    f"elements of {self.size} ranks, but the buffer has {list(self.shape)}; initialize it for the "
                    f"largest number of tokens"
                )
            self._active = total, width
        whole = self._storage()[: total * width]
        if local_chunk:
            first = sum(split_rows(total, self.size)[: self.rank]) * width
            whole = whole[first : first + math.prod(shape)]
        return whole.view(tuple(shape))

    def _storage(self) -> torch.Tensor:
        if self._buffer is None:
            if self.context.capturing:
                raise TkernelsError(
                    "get_buffer: a CUDA graph is being captured, and this communicator has no buffer yet; call "
                    "get_buffer() once before the capture"
                )
            with lasting():
                self._buffer = torch.empty(math.prod(self.shape), dtype=self.dtype, device=self.context.device)
        return self._buffer

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a view of the whole buffer, in the shape last used, and not of one chunk."""
        if self._buffer is None or tensor.numel() != math.prod(self._active):
            return False
        return tensor.untyped_storage().data_ptr() == self._buffer.untyped_storage().data_ptr()

    def parts(self) -> tuple[tuple[int, ...], torch.Tensor, torch.Tensor]:
        """(every rank's number of rows, this rank's chunk, the whole buffer), in the shape last used."""
        if self._parts is None or self._parts[0] != self._active:
            total, _ = active = self._active
            rows, whole = split_rows(total, self.size), self.get_buffer(False, active)
            own = whole.split(rows)[self.rank]
            self._parts = active, (rows, own, whole)
        return self._parts[1]

    # Communication and GEMMs

    @property
    def context(self) -> Context:
        if self._helper.closed:
            raise TkernelsError(f"{type(self).__name__}: it has been given back by destroy_ub()")
        return self._helper.context

    def all_gather_matmul(self, x_shard_m, w, bias=None, *, rows=None, gathered=False, out=None, out_dtype=None):
        """Collective. (all_gather(x_shard_m) @ w.T + bias, x gathered or None).

        gathered: True returns the rows in a new tensor that belongs to the caller and that no later call overwrites. A
            tensor is filled and returned, of FP8 a Float8Tensor with a scale for each row. "borrowed" returns rows that
            may lie in the workspace and are valid until the next call on this stream.
        """
        into = memory(gathered) if isinstance(gathered, (torch.Tensor, Float8Tensor)) else None
        options = into is not None or gathered, rows if rows is None else tuple(rows), out_dtype or x_shard_m.dtype
        tensors = x_shard_m, w, bias, out, into
        y, data, *scale = self._call(CommOverlapCore._prepare_all_gather_matmul, tensors, *options)
        if not scale or data is None:
            return y, data
        if into is not None:
            gathered.scale.copy_(scale[0])
            return y, gathered
        return y, replace(x_shard_m, data=data, scale=scale[0], source=None)

    def _prepare_all_gather_matmul(self, tensors, how: str, return_gathered: bool | str, rows, out_dtype):
        x, w, *_ = tensors
        rows = check_rows("all_gather_matmul", self.context, rows, own=x.shape[0])
        config = self._config("all_gather_matmul", sum(rows), x, w, x.shape[1], how, out_dtype)
        call = AllGatherMatmul(None, rows, out_dtype, config, None, how, return_gathered)
        return self.context.prepared(call, tensors)

    def matmul_reduce_scatter(
        self, x, w, bias=None, *, rows=None, out=None, out_dtype=None, beside: bool = False
    ) -> torch.Tensor:
        """Collective. This rank's rows of the sum over ranks of x @ w.T, plus bias; rows split as by split_rows.

        beside: the call is made inside a `self.beside` block, so the kernel leaves SMs free for the collective.
        """
        options = rows if rows is None else tuple(rows), out_dtype or x.dtype, beside
        return self._call(CommOverlapCore._prepare_matmul_reduce_scatter, (x, w, bias, out), *options)

    def _prepare_matmul_reduce_scatter(self, tensors, how: str, rows, out_dtype, beside: bool):
        x, w, *_ = tensors
        rows = split_rows(x.shape[0], self.size) if rows is None else rows
        rows = check_rows("matmul_reduce_scatter", self.context, rows, total=x.shape[0])
        narrow = x.dtype in FP8 and self.options.fp8_buf
        wire = torch.float32 if x.dtype in FP8 and self.dtype is torch.float32 else result_dtype(x.dtype)
        wire = WIRE_FP8 if narrow else wire
        stored = max(out_dtype, wire, key=lambda each: each.itemsize)
        spared = self._num_carriers if beside else 0
        config = self._config("matmul_reduce_scatter", x.shape[0], x, w, w.shape[0], how, stored, spared, narrow)
        call = MatmulReduceScatter(None, rows, out_dtype, config, None, how, wire_dtype=wire)
        return self.context.prepared(call, tensors)

    def all_gather(self, x_shard_m, rows, out=None, max_programs=collectives.MAX_PROGRAMS):
        """Collective. Every rank's rows, on the current stream."""
        if isinstance(x_shard_m, Float8Tensor):
            return x_shard_m.all_gather(lambda part, into: self.all_gather(part, rows, into, max_programs), rows, out)
        return collectives.all_gather(self.context, x_shard_m, rows, out, max_programs, config=self._collective)

    def reduce_scatter(self, x, rows, out=None, max_programs=collectives.MAX_PROGRAMS) -> torch.Tensor:
        """Collective. This rank's rows of the sum over ranks, on the current stream."""
        return collectives.reduce_scatter(self.context, x, rows, out, max_programs, config=self._collective)

    @contextlib.contextmanager
    def beside(self, collective, x, rows, out):
        """Overlap `self.all_gather` or `self.reduce_scatter` with the GEMMs that the block launches.

        These must be local GEMMs, or one `self.matmul_reduce_scatter(beside=True)`. The communication stream starts
        after all work launched so far on the caller's stream, which waits for the communication stream at the end of
        the block.
        """
        self._check(x.shape[-1], max(x.shape[0], out.shape[0]), memory(x).dtype)
        dev, current = self._helper.dev, self._helper.dev.current_stream()
        gate = Fence(dev)
        gate.record(current)
        lease = Lease(memory(out), dev=dev, home=current, gate=gate, name=self._moved)
        with lease.write(self.stream), dev.stream(self.stream):
            collective(x, rows, out, self._num_carriers)
        # They fit side by side, and the caller's stream joins at the end: what comes next need not follow this stream.
        stream_order.latest = self.context.current_stream()
        try:
            yield
        finally:
            with lease.read(current):
                pass
            lease.release()

    @property
    def _num_carriers(self) -> int:
        """The number of programs of a collective that runs beside a GEMM."""
        return max(min(NUM_CARRIERS if self._by_copies else self.options.num_sm, self.context.num_programs - 2), 1)

    def multiply(self, x: torch.Tensor, w: torch.Tensor, out_dtype=None, out=None) -> torch.Tensor:
        """x @ w.T on this rank. Leaves free the SMs that set_sm_margin and NVTE_EXT_MARGIN_SM reserve."""
        return self._call(CommOverlapCore._prepare_multiply, (x, w, None, out), out_dtype or x.dtype)

    def _prepare_multiply(self, tensors, how: str, out_dtype):
        x, w, bias, out, *scales = tensors
        margin = self._margin + (self._num_carriers if self.options.set_sm_margin else 0)
        config = None
        if margin and x.shape[1]:
            config = gemm_config(x.shape[0], *w.shape, x.dtype, layout_of(x, w), out_dtype, precision=how)
            config = replace(config, max_programs=max(self.context.num_programs - margin, 1))
        elif not scales:
            capture.prepare_cublas()
            return lambda x, w, bias, out: product(x, w, out_dtype, out)
        return Matmul(None, out_dtype, config, how).prepare(x, w, bias, out, *scales)

    def _call(self, prepare, tensors: tuple, *options):
        """What `prepare(self, tensors, precision, *options)` returns, called with the tensors; for calls alike kept.

        As by Context.call, whose calls have no communicator: its options choose their configurations. The first two
        tensors may be Float8Tensors; their scales then are what is prepared for last, and called with.
        """
        x, w, *others = tensors
        if isinstance(x, Float8Tensor):
            tensors, how = (x.data, w.data, *others, Scales(x.scale, w.scale)), precision(x.data.dtype, x.fast_accum)
        else:
            how = precision(x.dtype)
        key = prepare, self._number, how, *map(describe, tensors), *options
        with self.context.turn:
            return self.context.workspace().prepared(key, prepare, self, tensors, how, *options)(*tensors)

    def _check(self, width: int, tokens: int, dtype: torch.dtype):
        if dtype not in (self.dtype, *DTYPES, *FP8):
            raise TypeError(f"{self!r}: takes tensors of {', '.join(map(str, DTYPES))} and FP8, not {dtype}")
        takes = (self.dtype, *FP8) if self.is_fp8_ubuf() or self.comm_type is CommOverlapType.RS else (self.dtype,)
        if tokens * width > math.prod(self.shape) or dtype not in takes:
            mode = "quantization_modes of FP8" if dtype in FP8 else f"dtype={dtype}"
            raise ValueError(
                f"{self!r}: {tokens} tokens of {width} in {dtype} don't fit; initialize_ub() takes the largest number "
                f"of tokens, and {mode}"
            )

    def _config(
        self, operation: str, tokens: int, x, w, width: int, how: str, stored: torch.dtype, spared: int = 0,
        scaled: bool = False,
    ) -> OverlapConfig:  # fmt: skip
        """The kernel's configuration: the library's choice, changed by the options.

        width: columns of the data sent. scaled: partial sums are sent in FP8.
        """
        self._check(width, tokens, x.dtype)
        available = max(self.context.num_programs - self._margin - spared, 2)
        sizes, layout, sending = (tokens, *w.shape), fused_layout(x, w, how), not self._by_copies
        config = overlap_config(
            self.context, operation, *sizes, x.dtype, layout, sending=sending, precision=how, whole_chunks=scaled
        )
        config = replace(config, num_comm=min(config.num_comm, available - 1), max_programs=available)
        config = with_room_for(self._tuned(config, tokens, available), stored, x.dtype, how)
        return with_scaled_slices(config, w.shape[0] * stored.itemsize % 16 > 0) if scaled else config

    @property
    def _by_copies(self) -> bool:
        """Whether the copy engine (DMA) may send large shares. Otherwise num_sm comm programs send."""
        return self.options.method == "ring_exchange" and self.options.use_ce

    @property
    def _collective(self) -> collectives.CollectiveConfig:
        return collectives.DEFAULT if self._by_copies else collectives.BY_PROGRAMS

    def _tuned(self, config: OverlapConfig, tokens: int, available: int) -> OverlapConfig:
        return config

    def _reserve(self):
        """Collective. Reserve workspace for the largest call, on the current and on the communication stream."""
        sizes = workspace_bytes(self.shape, self.dtype, self.size)
        if not (self._by_copies and self.context.mapped):
            sizes["landing_bytes"] = 0
        # The current stream first: a captured stream that has no workspace may borrow an older one (Context.workspace).
        self.context.workspace().reserve(**sizes)
        with self._helper.dev.stream(self.stream):
            self.context.workspace().reserve(**sizes)


class CommOverlap(CommOverlapCore):
    """Collective. Reduce-scatter inside a GEMM, in pieces (pipeline), or either collective beside a GEMM (bulk).

    buffer_shape: [tokens of all ranks, hidden].
    num_splits: TransformerEngine's default, 4, which its initialize_ub passes too. Up to its release 2.16 this class
        had 3; pass num_splits=3 to keep that. No result depends on it: see OverlapOptions for how rows are cut.
    num_max_streams: no effect; a single kernel does all the work.
    method: "pipeline" (RS), "bulk", or "external" (AG); by default pipeline for RS and bulk for AG. With use_cublasmp
        there is only pipeline.

    The other arguments are fields of OverlapOptions. Options that are given and change nothing are told in a warning.
    Before release 2.17 the fifth and sixth positional arguments were num_splits and num_max_streams; such calls are
    refused.
    """

    def __init__(
        self,
        buffer_shape,
        buffer_dtype: torch.dtype,
        helper: CommOverlapHelper,
        tp_size: int,
        use_cublasmp: bool = False,
        comm_type: CommOverlapType = CommOverlapType.RS,
        num_splits: int = 4,
        num_max_streams: int = 3,
        comm_cga_size: int = 2,
        gemm_priority: int = 0,
        comm_priority: int = 0,
        num_comm_sm: int = 16,
        set_sm_margin: bool = True,
        atomic_gemm: bool = False,
        rs_overlap_first_gemm: bool = False,
        *,
        method: str | None = None,
    ):
        arguments = locals()
        if method is None:
            arguments["method"] = "pipeline" if comm_type is CommOverlapType.RS else "bulk"
        options = _options(arguments)
        super().__init__(buffer_shape, buffer_dtype, helper, tp_size, comm_type, use_cublasmp, options)
        self._tell(num_max_streams)

    def _tuned(self, config, tokens, available):
        piece = max(max(split_rows(tokens, self.size)) // self.options.num_splits, 1)
        # A power of two, as block_m is, and large enough that a tile spans at most MAX_TILE_CHUNKS chunks.
        chunk_rows = max(1 << piece.bit_length() - 1, config.gemm.block_m // MAX_TILE_CHUNKS.value, MIN_CHUNK_ROWS)
        chunk_rows = min(config.chunk_rows, chunk_rows)
        return replace(config, num_comm=min(self.options.num_sm, available - 1), chunk_rows=chunk_rows)


class CommOverlapP2P(CommOverlapCore):
    """Collective. All-gather or reduce-scatter inside a GEMM, point to point (ring_exchange).

    The arguments are those of CommOverlap, in a different order, plus aggregate and use_ce of OverlapOptions. There is
    no num_splits: a ring exchange sends a rank's rows in one piece for each rank.
    """

    def __init__(
        self,
        buffer_shape,
        buffer_dtype: torch.dtype,
        helper: CommOverlapHelper,
        tp_size: int,
        comm_type: CommOverlapType,
        num_max_streams: int = 3,
        comm_cga_size: int = 1,
        gemm_priority: int = 0,
        comm_priority: int = 0,
        num_comm_sm: int = 1,
        set_sm_margin: bool = False,
        atomic_gemm: bool = False,
        use_ce: bool = True,
        aggregate: bool = False,
        use_cublasmp: bool = False,
    ):
        options = _options(locals() | {"method": "ring_exchange", "num_splits": tp_size})
        super().__init__(buffer_shape, buffer_dtype, helper, tp_size, comm_type, use_cublasmp, options)
        self._tell(num_max_streams)

    def _tuned(self, config, tokens, available):
        if self.options.aggregate and self.comm_type is CommOverlapType.AG:
            config = config.with_wire(config.wire._replace(chunk_rows=2 * config.chunk_rows))
        if not self.options.use_ce:
            config = replace(config, num_comm=min(self.options.num_sm, available - 1))
        return config


def checked_shape(where: str, shape) -> tuple[int, int]:
    sizes = tuple(shape) if isinstance(shape, Iterable) else ()
    if len(sizes) != 2 or any(not isinstance(size, Integral) or size < 1 for size in sizes):
        raise ValueError(f"{where}={shape!r} must be [tokens, hidden], two positive integers")
    return sizes


def check_dtype(where: str, dtype, fp8: torch.dtype | None = None):
    """Raise TypeError for what no buffer is of. fp8: what one of FP8 is, None where there is none."""
    if not isinstance(dtype, torch.dtype) or dtype not in (*DTYPES, fp8):
        names = "torch.float32, torch.float16 or torch.bfloat16"
        names += ", or torch.uint8 for FP8" if fp8 else "; only what is gathered can be FP8"
        raise TypeError(f"{where}={dtype!r} must be {names}")


def _options(arguments: dict) -> OverlapOptions:
    """The options among a constructor's arguments."""
    names = {field.name: _ARGUMENTS.get(field.name, field.name) for field in fields(OverlapOptions)}
    found = {key: arguments[name] for key, name in names.items() if name in arguments}
    return OverlapOptions(is_reduce_scatter=arguments["comm_type"] is CommOverlapType.RS, **found)


def workspace_bytes(shape, dtype: torch.dtype, size: int) -> dict[str, int]:
    """The workspace sizes of one stream for which no call of up to `shape` elements has to grow it."""
    (tokens, hidden), itemsize = shape, dtype.itemsize
    rows = split_rows(tokens, size)[0]
    # Fused kernels pad a rank's rows to tiles of up to 128 rows; collectives pad a rank's part to whole blocks.
    part = max(round_up(rows, 128) * hidden, round_up(rows * hidden, collectives.BLOCK))
    part_bytes = rows * hidden * itemsize
    # A collective cuts a rank's part into at least as many chunks as it has programs.
    num_chunks = max(-(-rows // MIN_CHUNK_ROWS), part_bytes // collectives.MAX_CHUNK_BYTES + 1, MAX_PROGRAMS)
    packet_bytes = min(part_bytes, collectives.DEFAULT.packet_bytes)
    # Of FP8 each row, of 16 elements or more, has a scale.
    inbox_bytes = size * part * itemsize + (size * part // 4 if itemsize == 1 else 0)
    return dict(
        inbox_bytes=inbox_bytes,
        num_chunks=num_chunks,
        num_counters=TILE_COUNTS.value + size * num_chunks,
        num_packets=size * round_up(-(-packet_bytes // 4), collectives.PACKET_BLOCK),
        # By rule, shares use the landing buffer from COPY_BYTES on; a configuration may say so of smaller ones.
        landing_bytes=inbox_bytes if part_bytes >= COPY_BYTES // 4 else 0,
    )


def heap_bytes(shape, dtype: torch.dtype, size: int) -> int:
    """Symmetric memory for three workspaces: the communication stream's, the caller's, and one spare."""
    sizes = workspace_bytes(shape, dtype, size)
    words = size * sizes["num_chunks"] + max(sizes["num_packets"], most_packets(size))
    workspace = 5 * sizes["inbox_bytes"] // 2 + 16 * words + 3 * LAMPORT_BYTES + (1 << 16)
    return 3 * (workspace + sizes["landing_bytes"]) + (4 << 20)


def fill_userbuffers_buffer_for_all_gather(comm: CommOverlapCore, local_tensor: torch.Tensor, quantizer, process_group):
    """(global, local): the operand for `general_gemm(ub_type=AG)`, and this rank's part. No communication happens here.

    process_group: the communicator's ranks, or None.

    The local tensor is copied into this rank's chunk of the buffer. `global` is a view of the whole buffer, which the
    GEMM fills with the other ranks' rows. With cublasmp semantics nothing is copied and both are the local tensor.
    Passing the local tensor itself to general_gemm gives the same result without a buffer.

    quantizer: of the local tensor if that is not quantized and the buffer is FP8. Both are then Float8Tensors; `global`
        has a scale for each row, which the GEMM fills in, too. Raises RuntimeError for tensors of FP8 and a buffer of
        another dtype, or the reverse, and ValueError for quantizers with more than one scale.
    """
    where = "fill_userbuffers_buffer_for_all_gather"
    check_communicator(f"{where}: comm", comm)
    local_tensor = float8_tensor(f"{where}: local_tensor", local_tensor)
    if quantizer is not None:
        check_quantizer(f"{where}: quantizer", quantizer)
    check_dense(where, local_tensor=memory(local_tensor))
    ranks = group_of(comm.context if process_group is None else process_group, f"{where}: process_group").global_ranks
    if ranks != comm.context.group.global_ranks:
        raise ValueError(
            f"{where}: process_group has the ranks {ranks}, but {comm!r} gathers from "
            f"{comm.context.group.global_ranks}; pass the group that it was made for, or None"
        )
    is_fp8 = isinstance(local_tensor, Float8Tensor)
    if is_fp8 and not comm.is_fp8_ubuf() or comm.is_fp8_ubuf() and not is_fp8 and quantizer is None:
        raise RuntimeError(
            f"{where}: the tensor is {'FP8' if is_fp8 else local_tensor.dtype}, but the buffer of {comm!r} "
            f"{'is FP8; pass a quantizer' if comm.is_fp8_ubuf() else 'is not; use a communicator of FP8'}"
        )
    if comm.is_fp8_ubuf() and not is_fp8:
        local_tensor = float8_tensor(where, quantizer(local_tensor))
    if comm.with_cublasmp():
        return local_tensor, local_tensor
    comm.copy_into_buffer(memory(local_tensor), local_chunk=True)
    total = comm._active[0]
    whole = comm.get_buffer(shape=(total, *local_tensor.shape[1:]))
    if not comm.is_fp8_ubuf():
        return whole, local_tensor
    scale = torch.full((*whole.shape[:-1], 1), math.nan, device=whole.device)
    own = scale.split(split_rows(total, comm.size))[comm.rank]
    own.copy_(local_tensor.scale.reshape(1 if local_tensor.scale.numel() == 1 else own.shape))
    return replace(local_tensor, data=whole.view(local_tensor.data.dtype), scale=scale, source=None), local_tensor


def bulk_overlap_ag_with_external_gemm(allgather_communicator: CommOverlapCore, send_stream, recv_stream):
    """Collective. All-gather the buffer in place on recv_stream, after send_stream, beside a GEMM of the caller.

    The caller orders its own stream before and after the gather. Until the gather has finished, no other call that
    waits for peers may be launched on another stream. Raises ValueError for a CommOverlapP2P, and with cublasmp
    semantics, which have no bulk overlap.
    """
    where, comm = "bulk_overlap_ag_with_external_gemm", allgather_communicator
    check_communicator(f"{where}: allgather_communicator", comm)
    for name, stream in (("send_stream", send_stream), ("recv_stream", recv_stream)):
        check_type(f"{where}: {name}", stream, type(comm._helper.dev.current_stream()), "a stream")
    if comm.with_cublasmp() or comm.is_p2p_overlap():
        reason = "has cublasmp semantics" if comm.with_cublasmp() else "overlaps inside a GEMM only"
        raise ValueError(f"{where}: {comm!r} {reason}; make a CommOverlap without use_cublasmp")
    dev, (rows, own, whole) = comm._helper.dev, comm.parts()
    ready = Fence(dev)
    ready.record(send_stream)
    ready.wait(recv_stream)
    with dev.stream(recv_stream):
        comm.all_gather(own, rows, whole, comm.options.num_sm)


def check_communicator(what: str, value):
    check_type(what, value, CommOverlapCore, "a CommOverlap or a CommOverlapP2P")


def get_stream_priority_range(device_id: int = -1) -> tuple[int, int]:
    """(lowest, highest) priority of a stream on a GPU, -1 for the current one; (0, 0) without a GPU."""
    if not torch.cuda.is_available():
        return 0, 0
    with torch.cuda.device(device_id):
        return torch.cuda.Stream.priority_range()


def device_supports_multicast(device_id: int = -1) -> bool:
    """False, whatever the device: these kernels don't use multicast, so UB_SKIPMC=1 changes nothing."""
    return False


def ubuf_built_with_mpi() -> bool:
    """False: MPI isn't needed; any torch process group works."""
    return False


def nvte_built_with_cublasmp() -> bool:
    """True: `with_cublasmp=True` selects the semantics of the cuBLASMp backend, on the same kernels."""
    return True


def timeout_s() -> float:
    """Seconds that a kernel waits for a peer: UB_TIMEOUT. Raises ValueError if it isn't a positive number."""
    text = os.environ.get("UB_TIMEOUT", str(DEFAULT_TIMEOUT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise ValueError(f"UB_TIMEOUT={text!r} must be a positive number of seconds")
    return seconds


def margin() -> int:
    """SMs that GEMMs leave free: NVTE_EXT_MARGIN_SM. Raises ValueError if it isn't a whole number."""
    text = os.environ.get("NVTE_EXT_MARGIN_SM", "0")
    if not text.isdecimal():
        raise ValueError(f"NVTE_EXT_MARGIN_SM={text!r} must be a number of SMs")
    return int(text)


def _check_method(name: str, options: OverlapOptions, use_cublasmp: bool):
    ways = {"CommOverlapP2P": ("ring_exchange",)}.get(
        name, ("pipeline", "bulk") if options.is_reduce_scatter else ("bulk", "external")
    )
    if not isinstance(options.method, str) or options.method not in ways:
        raise ValueError(f"{name}: there is no method {options.method!r} of this type; there is {', '.join(ways)}")
    if use_cublasmp and options.method in ("bulk", "external"):
        raise ValueError(
            f"{name}: method={options.method!r} overlaps beside a GEMM, which cublasmp semantics don't have; make a "
            f"CommOverlapP2P, a pipeline of type RS, or pass use_cublasmp=False"
        )
