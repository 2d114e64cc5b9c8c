"""Triton kernels that overlap tensor-parallel communication with matrix multiplication."""

import importlib
import sys
import types

__version__ = "0.1.0"

# The module of each public name, imported at the name's first use. Importing the runtime turns Triton's interpreter on
# where there is no GPU, which must not happen in a pytest session that merely has this package's plugin installed.
_HOMES = {
    "tkernels.comm": "RUNTIME Context current_context finalize init HeapExhaustedError LeaseError MismatchError "
    "OutOfStepError TkernelsError WaitTimeoutError",
    "tkernels.comm.collectives": "split_rows",
    "tkernels.kept": "keep_staged",
    "tkernels.launch": "RankError RankTimeoutError launch",
    "tkernels.paths": "explain",
    "tkernels.tune": "tune",
    "tkernels.operators": "all_gather all_gather_matmul all_reduce barrier dequantize matmul matmul_all_reduce "
    "matmul_reduce_scatter quantize reduce_scatter",
    "tkernels.trace.recorder": "tracing",
}
_home_of = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = sorted(_home_of)


class _Package(types.ModuleType):
    """The class of this module. Where an operation and the module that holds it share a name, the operation wins."""

    def __getattr__(self, name):
        if name in ("comm", "layers"):  # importing them binds them here
            return importlib.import_module(f"{self.__name__}.{name}")
        if name not in _home_of:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_home_of[name]), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name, value):
        if not (name in _home_of and isinstance(value, types.ModuleType)):  # the import system binds submodules here
            super().__setattr__(name, value)

    def __dir__(self):
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
