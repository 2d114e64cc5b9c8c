"""FusedCall: what calls of the operations that overlap communication with a matmul have in common.

`prepare` takes a call through the steps: the operands and options are checked; sizes of zero and a single rank need no
communication; the path is chosen, and then the plain one or the fused kernel is prepared. An operation's own class says
what each step is for it.
"""

from typing import NamedTuple

import torch

from tkernels.choice import overlap_config
from tkernels.comm.context import Context
from tkernels.configs import FP8, OverlapConfig, with_room_for
from tkernels.gemm import Scales, check_operands, layout_of, multiply
from tkernels.overlap import check_mapped
from tkernels.partials import check_scaled_slices, with_scaled_slices
from tkernels.paths import choose_path


class FusedCall(NamedTuple):
    """A call of the tensors x, w, bias and out; the last two may be None. The public functions describe its options.

    Operands of FP8 come with Scales as the last tensor. Those of x may be one number, which may differ between ranks.
    precision: how operands are multiplied, as gemm.precision says it.

    The class of an operation has its name as `operation`, `shared` as `comm.calls.Call` wants it, and five methods. All
    but `sent_shape` take the context and the tensors, and all but `checked` are called on what that returns:
    checked: the call with its defaults in place of None, but for config, and path if it is to be chosen. Raises
        ValueError or TypeError.
    sent_shape: of x and w: rows and columns of the matrix that is sent.
    without_sending: what `prepare` returns where sizes are zero or there is one rank, else None.
    plain, fused: what `prepare` returns for a path.
    """

    activation: str | None = None
    rows: tuple[int, ...] | None = None
    out_dtype: torch.dtype | None = None
    config: OverlapConfig | None = None
    path: str | None = None
    precision: str = "ieee"
    return_gathered: bool | str = False  # of all_gather_matmul
    wire_dtype: torch.dtype | None = None  # of the reductions

    def prepare(self, ctx: Context, x, w, bias, *results):
        """The function of tensors like these that carries out the call; see `comm.calls.Call`."""
        scales = results[-1] if isinstance(results[-1], Scales) else None
        check_operands(self.operation, x, w, bias, self.activation, ctx.device, scales)
        call = self.checked(ctx, x, w, *results)
        path = choose_path(ctx, self.operation, *call.sent_shape(x, w), x.dtype, call.path, self.config, self.precision)
        call = call._replace(path=path)
        carry_out = call.without_sending(ctx, x, w, bias, *results)
        if carry_out is None:
            carry_out = (call.plain if path == "plain" else call.fused)(ctx, x, w, bias, *results)
        return carry_out

    def multiply(self, x, w, bias, out, scales=None) -> torch.Tensor:
        """The product on this rank alone."""
        options = self.activation, self.out_dtype, self.config.gemm if self.config else None, self.precision
        return multiply(options, (x, w, bias, out) if scales is None else (x, w, bias, out, scales))

    def configured(self, ctx: Context, x, w, stored: torch.dtype) -> OverlapConfig:
        """The configuration of the fused kernel. stored: the widest dtype that it stores tiles in."""
        config = self.config
        if config is None:
            M, (N, K) = self.sent_shape(x, w)[0], w.shape
            config = overlap_config(
                ctx, self.operation, M, N, K, x.dtype, layout_of(x, w), precision=self.precision,
                whole_chunks=self.wire_dtype in FP8,
            )  # fmt: skip
            config = with_room_for(config, stored, x.dtype, self.precision)
            if self.wire_dtype in FP8:
                # With scales of operands besides, stores through pointers spill 80 to 160 registers in two slices.
                config = with_scaled_slices(config, x.dtype in FP8 and N * self.out_dtype.itemsize % 16 > 0)
        elif self.wire_dtype in FP8:
            check_scaled_slices(self.operation, config)
        check_mapped(self.operation, ctx, config)
        return config
