"""NVSHMEM's device functions from libnvshmem_device.bc, as externs that Triton kernels can call.

The data-moving functions are the thread-block forms: every thread of a program must call them together. Addresses are
symmetric addresses as int64, sizes are in bytes. The constants come from the headers of NVSHMEM 3.4
(host/nvshmem_api_types.h); torch's docstrings give other values.
"""

from triton.language import core

SIGNAL_SET = core.constexpr(9)
SIGNAL_ADD = core.constexpr(10)


def _function(name: str, *types):
    """The extern of that name, of arguments of these types."""

    @core.extern
    def call(*arguments, _semantic=None):
        # extern_elementwise looks the function up by the exact types of its arguments, so they are cast here.
        arguments = [_semantic.to_tensor(argument) for argument in arguments]
        arguments = [core.cast(a, t, _semantic=_semantic) for a, t in zip(arguments, types, strict=True)]
        found = {types: (name, core.int32)}
        return core.extern_elementwise("", "", arguments, found, is_pure=False, _semantic=_semantic)

    return call


_MOVED = core.int64, core.int64, core.int64  # dst, src, num_bytes
putmem_block = _function("nvshmemx_putmem_block", *_MOVED, core.int32)  # pe
getmem_block = _function("nvshmemx_getmem_block", *_MOVED, core.int32)
putmem_signal_block = _function(  # signal, value, operation, pe
    "nvshmemx_putmem_signal_block", *_MOVED, core.int64, core.uint64, core.int32, core.int32
)
fence = _function("nvshmem_fence")
quiet = _function("nvshmem_quiet")
