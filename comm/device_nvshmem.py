"""NVSHMEM's device functions from libnvshmem_device.bc, as externs that Triton kernels can call.

The data-moving functions are the thread-block forms: every thread of a program must call them together. Addresses are
symmetric addresses as int64, sizes are in bytes. The constants come from the headers of NVSHMEM 3.4
(host/nvshmem_api_types.h); torch's docstrings give other values.
"""

from triton.language import core

SIGNAL_SET = core.constexpr(9)
SIGNAL_ADD = core.constexpr(10)

_INT32, _INT64, _UINT64 = core.int32, core.int64, core.uint64


def _call(name, result, arguments, types, semantic):
    # extern_elementwise looks the function up by the exact types of its arguments, so they are cast here.
    arguments = [semantic.to_tensor(argument) for argument in arguments]
    arguments = [core.cast(a, t, _semantic=semantic) for a, t in zip(arguments, types, strict=True)]
    return core.extern_elementwise(
        "", "", arguments, {tuple(types): (name, result)}, is_pure=False, _semantic=semantic
    )


@core.extern
def putmem_block(dst, src, num_bytes, pe, _semantic=None):
    types = [_INT64, _INT64, _INT64, _INT32]
    return _call("nvshmemx_putmem_block", _INT32, [dst, src, num_bytes, pe], types, _semantic)


@core.extern
def getmem_block(dst, src, num_bytes, pe, _semantic=None):
    types = [_INT64, _INT64, _INT64, _INT32]
    return _call("nvshmemx_getmem_block", _INT32, [dst, src, num_bytes, pe], types, _semantic)


@core.extern
def putmem_signal_block(dst, src, num_bytes, signal, value, operation, pe, _semantic=None):
    types = [_INT64, _INT64, _INT64, _INT64, _UINT64, _INT32, _INT32]
    arguments = [dst, src, num_bytes, signal, value, operation, pe]
    return _call("nvshmemx_putmem_signal_block", _INT32, arguments, types, _semantic)


@core.extern
def fence(_semantic=None):
    return core.extern_elementwise("", "", [], {(): ("nvshmem_fence", _INT32)}, is_pure=False, _semantic=_semantic)


@core.extern
def quiet(_semantic=None):
    return core.extern_elementwise("", "", [], {(): ("nvshmem_quiet", _INT32)}, is_pure=False, _semantic=_semantic)
