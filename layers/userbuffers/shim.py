"""Provides the module path that frameworks import: transformer_engine.pytorch.module.base and its neighbours.

    from tkernels.layers.userbuffers import shim

    shim.install()             # TransformerEngine is not installed: creates modules at that path
    shim.install(patch=True)   # it is installed: replaces its Userbuffers names and layers with this package's
    shim.uninstall()           # restores the previous state

Created modules contain the names of this package and no other part of TransformerEngine. Install the shim before the
framework imports them.
"""

import contextlib
import importlib
import importlib.machinery
import importlib.util
import sys
import types

from tkernels.layers import userbuffers
from tkernels.layers.userbuffers import registry
from tkernels.layers.userbuffers.communicators import fill_userbuffers_buffer_for_all_gather

API_VERSION = "2.17.0"  # the TransformerEngine release whose interface this package follows

_BASE = {
    **{
        name: getattr(registry, name)
        for name in (
            "UserBufferQuantizationMode",
            "_2X_ACC_DGRAD",
            "_2X_ACC_FPROP",
            "_2X_ACC_WGRAD",
            "_ub_communicators",
            "destroy_ub",
            "get_ub",
            "get_ub_is_fp8",
            "initialize_ub",
            "is_ub_initialized",
            "using_cublasmp_backend",
        )
    },
    "fill_userbuffers_buffer_for_all_gather": fill_userbuffers_buffer_for_all_gather,
}
_LAYERS = {
    name: getattr(userbuffers, name)
    for name in ("Linear", "LayerNormLinear", "LayerNormMLP", "MultiheadAttention", "TransformerLayer")
}
_TOP = {name: _BASE[name] for name in ("initialize_ub", "destroy_ub", "UserBufferQuantizationMode")}
_EXTENSIONS = {
    name: getattr(userbuffers, name)
    for name in (
        "CommOverlap",
        "CommOverlapAlgo",
        "CommOverlapCore",
        "CommOverlapHelper",
        "CommOverlapP2P",
        "CommOverlapType",
        "bulk_overlap_ag_with_external_gemm",
        "device_supports_multicast",
        "general_gemm",
        "get_stream_priority_range",
        "nvte_built_with_cublasmp",
        "ubuf_built_with_mpi",
    )
}
MODULES = {
    "transformer_engine": {"__version__": API_VERSION},
    "transformer_engine.pytorch": {**_LAYERS, **_TOP},
    "transformer_engine.pytorch.module": {**_LAYERS, **_TOP},
    "transformer_engine.pytorch.module.base": _BASE,
    "transformer_engine.pytorch.cpp_extensions": _EXTENSIONS,
    "transformer_engine.pytorch.distributed": {"gather_along_first_dim": userbuffers.gather_along_first_dim},
}

_undo = contextlib.ExitStack()


def install(patch: bool = False) -> None:
    """Redirect the module path to this package. May be repeated.

    Raises RuntimeError if TransformerEngine is installed and patch is False: two implementations would be mixed.
    """
    if is_installed():
        return
    present = importlib.util.find_spec("transformer_engine") is not None
    if present and not patch:
        raise RuntimeError(
            "shim.install: transformer_engine is installed; pass patch=True to replace its Userbuffers and layers"
        )
    for name, content in MODULES.items():
        if present:
            _patch(
                importlib.import_module(name), {key: value for key, value in content.items() if key != "__version__"}
            )
        else:
            _make(name, content)


def uninstall() -> None:
    """Undo install. May be repeated."""
    _undo.close()


def is_installed() -> bool:
    """Whether the module path refers to this package."""
    module = sys.modules.get("transformer_engine.pytorch.module.base")
    return getattr(module, "initialize_ub", None) is registry.initialize_ub


def _patch(module, content):
    missing = object()
    for key, value in content.items():
        before = getattr(module, key, missing)
        setattr(module, key, value)
        _undo.callback(delattr, module, key) if before is missing else _undo.callback(setattr, module, key, before)


def _make(name: str, content):
    module = types.ModuleType(name, f"{name}, as tkernels.layers.userbuffers has it.")
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
    module.__path__ = []
    vars(module).update(content)
    sys.modules[name] = module
    _undo.callback(sys.modules.pop, name, None)
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
