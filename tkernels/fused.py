"""FusedCall: what calls of the operations that overlap communication with a matmul have in common.

`prepare` takes a call through the steps: the operands and options are checked; sizes of zero and a single rank need no
communication; the path is chosen, and then the plain one or the fused kernel is prepared. An operation's own class says
what each step is for it.
"""

import functools
from dataclasses import replace
from typing import NamedTuple

import torch

from tkernels.choice import overlap_config
from tkernels.comm.arguments import check_type
from tkernels.comm.collectives import bind_empty
from tkernels.comm.context import Context
from tkernels.comm.regions import round_up
from tkernels.configs import FP8, OverlapConfig, by_elements, with_room_for
from tkernels.gemm import (
    Scales,
    check_operands,
    check_result,
    fused_layout,
    multiply,
    prepare_strided,
    staging,
    turned_for,
)
from tkernels.gpus import stages_rows
from tkernels.leading import ROWS_FIRST
from tkernels.model import GATHER
from tkernels.overlap import check_mapped
from tkernels.partials import check_scaled_slices, with_scaled_slices
from tkernels.paths import choose_path, fused_sizes
from tkernels.staging import SECTOR, VECTOR_BYTES, Rows

# From so many rows of x on, w is copied into rows of whole sectors: tiles of 256 of its rows wait for L2 otherwise, for
# up to 0.45 of a call's time (2 H200s), and the copy takes 350 / M of a GEMM's.
SECTOR_ROWS = 2048


class FusedCall(NamedTuple):
    """A call of the tensors x, w, bias and out; the last two may be None. The public functions describe its options.

    Operands of FP8 come with Scales as the last tensor. Those of x may be one number, which may differ between ranks.
    precision: how operands are multiplied, as gemm.precision says it.

    The class of an operation has its name as `operation`, `shared` as `comm.calls.Call` wants it, and six methods. All
    but `sent_shape` take the context and the tensors, and all but `checked` are called on what that returns:
    checked: the call with its defaults in place of None, but for config, and path if it is to be chosen. Raises
        ValueError or TypeError.
    sent_shape: of x and w: rows and columns of the matrix that is sent.
    result_shape: of y.
    without_sending: what `prepare` returns where sizes are zero or there is one rank, else None.
    plain, fused: what `prepare` returns for a path.

    columns: out-features as the fused kernel computes them, more than w has where rows of y are made whole 16 bytes.
    leading: which dimension of the caller's x comes first in the matrix, then the sizes of the other leading ones; see
        `Leading.order`. It changes nothing here, but what ranks make of each other's rows.
    """

    activation: str | None = None
    rows: tuple[int, ...] | None = None
    out_dtype: torch.dtype | None = None
    config: OverlapConfig | None = None
    path: str | None = None
    precision: str = "ieee"
    return_gathered: bool | str = False  # of all_gather_matmul
    wire_dtype: torch.dtype | None = None  # of the reductions
    columns: int | None = None
    leading: tuple[int, ...] = ROWS_FIRST

    def shared_leading(self, option: str) -> dict:
        """The part of `shared` that is of `leading`. option: names the dimension."""
        dim, *others = map(int, self.leading)
        return {option: dim, "sizes beside it": tuple(others)}

    def prepare(self, ctx: Context, *tensors):
        """The function of tensors like these that carries out the call; see `comm.calls.Call`."""
        return prepare_strided(functools.partial(self.prepare_path, ctx), *tensors)

    def prepare_path(self, ctx: Context, x, w, bias, *results):
        """`prepare`, of operands with a unit stride."""
        scales = results[-1] if isinstance(results[-1], Scales) else None
        check_type(f"{self.operation}: config", self.config, OverlapConfig | None, "an OverlapConfig or None")
        check_operands(self.operation, x, w, bias, self.activation, ctx.device, scales)
        call = self.checked(ctx, x, w, *results)
        how = call.path, self.config, self.precision, call.arriving()
        path = choose_path(ctx, self.operation, *call.sent_shape(x, w), x.dtype, *how)
        call = call._replace(path=path)
        carry_out = call.without_sending(ctx, x, w, bias, *results)
        if carry_out is None:
            how = call.plain if path == "plain" else call.staged if self.stages_rows(x) else call.fused
            return how(ctx, x, w, bias, *results)
        if ctx.size == 1 or 0 not in call.sent_shape(x, w):
            return carry_out
        meet = bind_empty(ctx)

        def run(*tensors):
            meet()
            return carry_out(*tensors)

        return run

    def arriving(self) -> int | None:
        """Bytes in which an element of the matrix that is sent arrives, as `choose_path` has it."""
        return None

    def stages_rows(self, x) -> bool:
        """Whether rows of any length are made rows that TMA can take. All ranks' are, where one's are."""
        return stages_rows(x.dtype, self.precision) and (self.config is None or self.config.gemm.use_tma)

    def staged(self, ctx: Context, x, w, bias, out, *others):
        """`fused`, where the rows of w, and mostly of y, are made whole 16 bytes; those of x are its own business.

        TMA reads zeros where w has no more rows, so only a w that lies in other rows, or as TF32 turned, is copied; for
        enough rows of x also into those of whole sectors of the cache. Columns that y has not are computed beside it,
        and left out as it is copied. Both copies are made in each call, but for that of a weight that `keep_staged`
        keeps.
        """
        N, M = w.shape[0], self.sent_shape(x, w)[0]
        # Between two ranks an all-gather's tiles store such rows, by elements, in four slices. Among four 10 registers
        # spill.
        stored = self.operation == GATHER and ctx.size == 2 and (self.config is None or self.config.gemm.split == 4)
        columns = N if stored else round_up(N, VECTOR_BYTES // x.element_size())
        w_like, stage = staging(w, turned_for(self.precision), SECTOR if M >= SECTOR_ROWS else VECTOR_BYTES, kept=True)
        if columns == N:
            run = self.fused(ctx, x, w_like, bias, out, *others)
            return lambda x, w, *others: run(x, stage(w), *others)
        shape = self.result_shape(ctx, x, w)
        y = check_result(self.operation, out, x, shape, self.out_dtype)
        wide = Rows(*shape, self.out_dtype, False, columns)
        unstage = wide.plan_copy(y, back=True) if y.numel() else lambda source, target: None
        widened = lambda bias: bias if bias is None else torch.nn.functional.pad(bias, (0, columns - N))  # noqa: E731
        run = self._replace(columns=columns).fused(ctx, x, w_like, widened(bias), None, *others)

        def run_beside(x, w, bias, out, *others):
            beside = x.new_empty((shape[0], columns), dtype=self.out_dtype)
            found = run(x, stage(w), widened(bias), beside, *others)
            y = x.new_empty(shape, dtype=self.out_dtype) if out is None else out
            unstage(beside, y)
            return (y, *found[1:]) if isinstance(found, tuple) else y

        return run_beside

    def multiply(self, x, w, bias, out, scales=None) -> torch.Tensor:
        """The product on this rank alone."""
        options = self.activation, self.out_dtype, self.config.gemm if self.config else None, self.precision
        return multiply(options, (x, w, bias, out) if scales is None else (x, w, bias, out, scales))

    def configured(self, ctx: Context, x, w, stored: torch.dtype) -> OverlapConfig:
        """The configuration of the fused kernel. stored: the widest dtype that it stores tiles in."""
        config = self.config
        if config is None:
            M, N, K = self.sent_shape(x, w)[0], self.columns or w.shape[0], x.shape[1]
            config = overlap_config(
                ctx, self.operation, *fused_sizes(self.operation, M, N, K, x.dtype, self.precision), x.dtype,
                fused_layout(x, w, self.precision), precision=self.precision, whole_chunks=self.wire_dtype in FP8,
            )  # fmt: skip
            config = with_room_for(config, stored, x.dtype, self.precision)
            if self.stages_rows(x) and N * self.out_dtype.itemsize % VECTOR_BYTES:
                config = replace(config, gemm=by_elements(config.gemm))
            gemm, ragged = config.gemm, any(rows % config.gemm.block_m for rows in self.rows)
            if self.precision == "tf32" and self.operation != GATHER and ragged and gemm.block_n == 256:
                # Stored through pointers, as tiles that leave a shard are, a reduction's spill 17 to 54 registers.
                config = replace(config, gemm=replace(gemm, block_n=128, split=2, num_stages=4))
            if self.wire_dtype in FP8:
                # With scales of operands besides, stores through pointers spill 80 to 160 registers in two slices.
                config = with_scaled_slices(config, x.dtype in FP8 and N * self.out_dtype.itemsize % 16 > 0)
        elif self.wire_dtype in FP8:
            check_scaled_slices(self.operation, config)
        check_mapped(self.operation, ctx, config)
        return config
