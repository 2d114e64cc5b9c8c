"""Provides the module path that frameworks import: transformer_engine.pytorch.module.base and its neighbours.

    from tkernels.layers.userbuffers import shim

    shim.install()             # TransformerEngine is not installed: creates modules at that path
    shim.install(patch=True)   # it is installed: replaces its Userbuffers names and layers with this package's
    shim.uninstall()           # restores the previous state

Created modules contain the names of this package and no other part of TransformerEngine:

- An import of anything else, a module or a name of a module, raises ModuleNotFoundError. Frameworks that ask whether
  TransformerEngine has something, by `try`, thus do without it.
- Megatron takes some names for granted once it has found TransformerEngine (`LACKING`). They are classes that can be
  imported, inherited from and asked about by isinstance, and raise NotImplementedError once they are called.

Install the shim before the framework imports them. Each of Megatron's modules asks for TransformerEngine when it is
imported. If some were imported earlier, a warning says so, and Megatron's layers for TransformerEngine are defined
again, on this package's; the other modules go on without it.
"""

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import sys
import warnings

from tkernels.layers import userbuffers
from tkernels.layers.userbuffers import float8, registry

API_VERSION = "2.17.0"  # the TransformerEngine release whose interface this package follows
MEGATRONS_LAYERS = "megatron.core.extensions.transformer_engine"


def _of(module, names: str) -> dict:
    return {name: getattr(module, name) for name in names.split()}


_NAMES = "UserBufferQuantizationMode destroy_ub initialize_ub"
_BASE = _of(
    userbuffers,
    f"{_NAMES} fill_userbuffers_buffer_for_all_gather get_ub get_ub_is_fp8 is_ub_initialized using_cublasmp_backend",
)
_BASE |= _of(registry, "_ub_communicators") | _of(float8, "_2X_ACC_DGRAD _2X_ACC_FPROP _2X_ACC_WGRAD")
_TOP = _of(userbuffers, f"{_NAMES} Linear LayerNormLinear LayerNormMLP MultiheadAttention TransformerLayer")
_EXTENSIONS = _of(
    userbuffers,
    "CommOverlap CommOverlapAlgo CommOverlapCore CommOverlapHelper CommOverlapP2P CommOverlapType "
    "bulk_overlap_ag_with_external_gemm device_supports_multicast general_gemm get_stream_priority_range "
    "nvte_built_with_cublasmp ubuf_built_with_mpi",
)
MODULES = {
    "transformer_engine": {"__version__": API_VERSION},
    "transformer_engine.pytorch": _TOP,
    "transformer_engine.pytorch.module": _TOP,
    "transformer_engine.pytorch.module.base": _BASE,
    "transformer_engine.pytorch.cpp_extensions": _EXTENSIONS,
    "transformer_engine.pytorch.distributed": {"gather_along_first_dim": userbuffers.gather_along_first_dim},
}

# Of a TransformerEngine that is installed, these stay its own.
_OWN = {
    "transformer_engine.common": {},
    "transformer_engine.common.recipe": _of(userbuffers, "DelayedScaling Float8CurrentScaling Format"),
    "transformer_engine.pytorch": _of(
        userbuffers,
        "DotProductAttention Float8CurrentScalingQuantizer Float8Quantizer Float8Tensor LayerNorm RMSNorm autocast "
        "fp8_autocast",
    ),
    "transformer_engine.pytorch.fp8": _of(userbuffers, "autocast fp8_autocast"),
}
LACKING = {
    "transformer_engine.pytorch": ("GroupedLinear",),
    "transformer_engine.pytorch.distributed": ("CudaRNGStatesTracker",),
    "transformer_engine.pytorch.fp8": ("FP8GlobalStateManager", "fp8_model_init"),
    "transformer_engine.pytorch.ops": ("FusibleOperation", "Sequential"),
    "transformer_engine.pytorch.router": (
        "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function",
    ),
    "transformer_engine.pytorch.tensor": ("QuantizedTensor",),
}  # fmt: skip

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
    if present:
        for name, content in MODULES.items():
            module, missing = importlib.import_module(name), object()
            for key in content.keys() - {"__version__"}:
                before = getattr(module, key, missing)
                setattr(module, key, content[key])
                undo = (delattr, module, key) if before is missing else (setattr, module, key, before)
                _undo.callback(*undo)
        return
    if "megatron.core" in sys.modules:
        warnings.warn(
            "shim.install: what was imported of megatron.core before does without TransformerEngine, except for its "
            "layers, which are defined again; call shim.install() before the first import of megatron.core",
            stacklevel=2,
        )
    _undo.callback(_define_megatrons_layers)
    for name in sorted(MODULES.keys() | LACKING.keys() | _OWN.keys()):
        lacking = {key: _Lacking(key, (), {"__module__": name}) for key in LACKING.get(name, ())}
        _make(name, lacking | _OWN.get(name, {}) | MODULES.get(name, {}))
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    _undo.callback(sys.meta_path.remove, finder)
    _define_megatrons_layers()


def uninstall() -> None:
    """Undo install. May be repeated."""
    _undo.close()


def is_installed() -> bool:
    """Whether the module path refers to this package."""
    module = sys.modules.get("transformer_engine.pytorch.module.base")
    return getattr(module, "initialize_ub", None) is registry.initialize_ub


class _Lacking(type):
    """The class of names of TransformerEngine that frameworks import, and that nothing here stands in for."""

    def __call__(cls, *arguments, **options):
        lacking = next(each for each in cls.__mro__[::-1] if isinstance(each, _Lacking))
        raise NotImplementedError(_sentence(f"{lacking.__module__}.{lacking.__qualname__}"))

    def __getattr__(cls, name):
        raise AttributeError(_sentence(f"{cls.__module__}.{cls.__qualname__}.{name}"))


class _Finder:
    """Answers imports of what created modules don't contain, ahead of Python, which would raise a plain ImportError."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.startswith("transformer_engine."):
            raise ModuleNotFoundError(_sentence(name), name="transformer_engine")


def _sentence(name: str) -> str:
    return (
        f"{name} is not among the names of TransformerEngine that tkernels stands in for; install TransformerEngine "
        f"and call shim.install(patch=True), or choose what does without it (Megatron: --transformer-impl local)"
    )


def _define_megatrons_layers():
    """Let Megatron define its layers for TransformerEngine again, if it has been imported: their bases have changed."""
    if MEGATRONS_LAYERS in sys.modules:
        importlib.reload(sys.modules[MEGATRONS_LAYERS])


def _make(name: str, content):
    module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(name, loader=None, is_package=True))
    module.__doc__ = f"{name}, as tkernels.layers.userbuffers has it."
    module.__getattr__ = functools.partial(_refuse, name)
    vars(module).update(content)
    sys.modules[name] = module
    _undo.callback(sys.modules.pop, name, None)
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)


def _refuse(module: str, name: str):
    raise AttributeError(_sentence(f"{module}.{name}"))
