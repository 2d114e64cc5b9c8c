"""Userbuffers' configuration and lifetime: the pinned defaults, what is refused, what is left after a failure."""

import contextlib
import copy
import functools
import gc
import importlib
import inspect
import itertools
import os
import subprocess
import sys
import textwrap
import time
import types
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from streams import Race, Simulator
from transports import expire_after, late, nccl

import tkernels
from tkernels import shared_gpus
from tkernels.comm import TkernelsError, current_context
from tkernels.comm.contexts import open_contexts
from tkernels.comm.group import Group
from tkernels.comm.heap import SymmetricHeap
from tkernels.comm.workspace import Workspace
from tkernels.layers import userbuffers as te
from tkernels.layers.userbuffers import communicators, float8, registry, shim
from tkernels.layers.userbuffers.defaults import configure, without_effect

# The table


RING = dict(method="ring_exchange", num_sm=1, cga_size=1, set_sm_margin=False, num_splits=4)
COLLECTIVE = dict(num_sm=16, cga_size=2, set_sm_margin=True, num_splits=4)
COMMON = dict(
    aggregate=False, atomic_gemm=False, use_ce=True, comm_priority=0, gemm_priority=0,
    pipeline_rs_overlap_first_gemm=False,
)  # fmt: skip
GOLDEN = {  # tp_size 4
    **{n: RING | dict(is_reduce_scatter=False) for n in ("qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad")},
    **{n: COLLECTIVE | dict(method="pipeline", is_reduce_scatter=True) for n in ("proj_fprop", "fc2_fprop")},
    **{n: COLLECTIVE | dict(method="bulk", is_reduce_scatter=False) for n in ("qkv_dgrad", "fc1_dgrad")},
    **{n: COLLECTIVE | dict(method="bulk", is_reduce_scatter=True) for n in ("qkv_wgrad", "fc1_wgrad")},
    **{n: COLLECTIVE | dict(method="external", is_reduce_scatter=False) for n in ("proj_wgrad", "fc2_wgrad")},
}


def golden(entry):
    return entry | COMMON | dict(fp8_buf=not entry["is_reduce_scatter"])


def test_the_default_table_is_pinned():
    assert {name: vars(options) for name, options in te.default_config(4).items()} == {
        name: golden(entry) for name, entry in GOLDEN.items()
    }
    cublasmp = {name: entry for name, entry in GOLDEN.items() if not name.endswith("wgrad")}
    cublasmp |= {name: RING | dict(is_reduce_scatter=True) for name in ("qkv_dgrad", "fc1_dgrad")}
    assert {name: vars(options) for name, options in te.default_config(4, with_cublasmp=True).items()} == {
        name: golden(entry) for name, entry in cublasmp.items()
    }
    assert te.default_config(8)["qkv_fprop"].num_splits == 8 and te.default_config(8)["proj_fprop"].num_splits == 4


LINEAR = (
    "in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None, tp_size=1, "
    "get_rng_state_tracker=None, rng_tracker_name=None, init_method=None, bias=True, return_bias=False, "
    "params_dtype=None, parallel_mode=None, parameters_split=None, device='cuda', ub_overlap_ag=False, "
    "ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False, ub_name=None, "
    "delay_wgrad_compute=False, symmetric_ar_type=None, save_original_input=False, name=None"
)
LAYER_NORM_LINEAR = (
    "in_features, out_features, eps=1e-05, sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None, "
    "tp_size=1, get_rng_state_tracker=None, init_method=None, bias=True, normalization='LayerNorm', "
    "return_bias=False, params_dtype=None, parallel_mode=None, return_layernorm_output=False, "
    "return_layernorm_output_gathered=False, parameters_split=None, zero_centered_gamma=False, device='cuda', "
    "ub_overlap_ag=False, ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_wgrad=False, ub_bulk_dgrad=False, "
    "ub_name=None, delay_wgrad_compute=False, symmetric_ar_type=None, name=None"
)
SIGNATURES = {
    te.initialize_ub: "shape, tp_size, use_fp8=False, quantization_modes=None, dtype=torch.bfloat16, ub_cfgs=None, "
    "bootstrap_backend=None, with_cublasmp=False, *, tp_group=None",
    te.CommOverlapHelper: "world_group=None, intra_node_group=None, *, heap_bytes=None",
    te.CommOverlap: "buffer_shape, buffer_dtype, helper, tp_size, use_cublasmp=False, comm_type=RS, num_splits=4, "
    "num_max_streams=3, comm_cga_size=2, gemm_priority=0, comm_priority=0, num_comm_sm=16, set_sm_margin=True, "
    "atomic_gemm=False, rs_overlap_first_gemm=False, *, method=None",
    te.CommOverlapP2P: "buffer_shape, buffer_dtype, helper, tp_size, comm_type, num_max_streams=3, comm_cga_size=1, "
    "gemm_priority=0, comm_priority=0, num_comm_sm=1, set_sm_margin=False, atomic_gemm=False, use_ce=True, "
    "aggregate=False, use_cublasmp=False",
    te.general_gemm: "A, B, out_dtype=None, quantization_params=None, gelu=False, gelu_in=None, alpha=1.0, beta=None, "
    "accumulate=False, layout='TN', out=None, bias=None, use_split_accumulator=False, grad=False, ub=None, "
    "ub_type=None, extra_output=None, bulk_overlap=False, *, rows=None",
    te.fill_userbuffers_buffer_for_all_gather: "comm, local_tensor, quantizer, process_group",
    te.get_ub: "name, use_fp8=False",
    te.Linear: LINEAR,
    te.LayerNormLinear: LAYER_NORM_LINEAR,
}


def written(function) -> str:
    """The parameters without annotations, as they are written."""
    parameters = inspect.signature(function).parameters.values()
    bare = inspect.Signature([p.replace(annotation=inspect.Parameter.empty) for p in parameters])
    return str(bare).strip("()").replace("<CommOverlapType.RS: 0>", "RS").replace("CommOverlapType.RS", "RS")


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_signatures_are_pinned(function):
    assert written(function) == SIGNATURES[function]


def test_the_orders_of_overlap_options_differ_as_in_transformer_engine():
    flags = ["ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad"]
    for cls in (te.Linear, te.LayerNormMLP, te.MultiheadAttention, te.TransformerLayer, te.LayerNormLinear):
        order = [name for name in inspect.signature(cls).parameters if name in flags]
        assert order == (flags if cls is not te.LayerNormLinear else flags[:3] + flags[:2:-1]), cls
    parameters = inspect.signature(te.TransformerLayer).parameters
    defaults = {name: parameters[name].default for name in ("ub_tp_comm_overlap", *flags)}
    assert list(defaults.values()) == [False, True, True, False, True, True]
    assert list(inspect.signature(te.LayerNormMLP).parameters)[23:26] == ["ub_overlap_ag", "name", "ub_overlap_rs"]


# Configurations


def test_a_configuration_changes_what_it_names_and_nothing_else():
    cfg = {"proj_fprop": {"method": "ring_exchange", "num_sm": 24}, "fc2_fprop": None, "qkv_fprop": {"aggregate": 1}}
    before = copy.deepcopy(cfg)
    options = configure(cfg, 4)
    assert vars(options["proj_fprop"]) == golden(GOLDEN["proj_fprop"]) | dict(method="ring_exchange", num_sm=24)
    assert vars(options["qkv_fprop"]) == golden(GOLDEN["qkv_fprop"]) | dict(aggregate=True)
    untouched = set(GOLDEN) - {"proj_fprop", "qkv_fprop"}
    assert {name: options[name] for name in untouched} == {name: te.default_config(4)[name] for name in untouched}
    assert cfg == before


@pytest.mark.parametrize("method", ["ring_exchange", "pipeline"])
def test_a_dgrad_that_reduces_takes_the_place_of_both_bulk_overlaps_in_every_mode(method):
    cfg = {"qkv_dgrad": {"method": method}}
    first, second = configure(cfg, 4), configure(cfg, 4)  # nothing is remembered between two modes
    assert first == second and cfg == {"qkv_dgrad": {"method": method}}
    assert first["qkv_dgrad"].is_reduce_scatter and first["qkv_dgrad"].num_sm == (16 if method == "pipeline" else 1)
    assert "qkv_wgrad" not in first and "fc1_wgrad" in first


REFUSED = [
    ({"qkv_frop": {}}, "there is no GEMM 'qkv_frop'; there are qkv_fprop, fc1_fprop"),
    ({"qkv_fprop": {"method": "ring"}}, "there is no method 'ring'; qkv_fprop can have ring_exchange"),
    ({"qkv_dgrad": {"method": "ring"}}, "there is no method 'ring'; qkv_dgrad can have bulk, ring_exchange, pipeline"),
    ({"qkv_fprop": {"num_sms": 1}}, "there is no option 'num_sms'; there are aggregate, atomic_gemm, cga_size"),
    ({"qkv_fprop": {"method": "pipeline"}}, "`pipeline` overlap method is not supported for AllGather"),
    ({"qkv_fprop": {"method": "bulk"}}, "qkv_fprop can't have method 'bulk'; it can have ring_exchange"),
    ({"proj_wgrad": {"method": "bulk"}}, "proj_wgrad can't have method 'bulk'; it can have external"),
    ({"qkv_dgrad": {"method": "pipeline"}, "qkv_wgrad": {"num_sm": 4}}, "drop the entry of qkv_wgrad"),
    ({"qkv_fprop": {"atomic_gemm": 1}}, "atomic_gemm=True is not supported"),
    ({"qkv_fprop": {"gemm_priority": -1}}, "GEMMs run on the caller's stream"),
    ({"qkv_fprop": {"is_reduce_scatter": 1}}, "ring_exchange of qkv_fprop is an all-gather"),
    ({"qkv_fprop": {"aggregate": 2}}, r"\['aggregate'\]: 2 must be a boolean, or 0 or 1"),
    ({"qkv_dgrad": {"num_sm": 0}}, "0 must be a positive integer"),
    ({"qkv_dgrad": {"num_sm": True}}, "True must be a positive integer"),
    ({"qkv_dgrad": 4}, "must be a dict of options or None, not int"),
    ([("qkv_dgrad", {})], "a configuration is a dict of GEMMs, not list"),
]


@pytest.mark.parametrize("cfg, message", REFUSED, ids=[str(index) for index in range(len(REFUSED))])
def test_a_wrong_configuration_is_refused_with_what_is_allowed(cfg, message):
    with pytest.raises((ValueError, TypeError), match=message):
        configure(cfg, 4)


def test_cublasmp_semantics_have_no_bulk_overlap():
    for cfg in ({"qkv_dgrad": {"method": "bulk"}}, {"qkv_wgrad": {"num_sm": 4}}, {"proj_wgrad": {}}):
        with pytest.raises(ValueError, match=f"{next(iter(cfg))}.*with_cublasmp=True|with_cublasmp=True has no bulk"):
            configure(cfg, 4, with_cublasmp=True)


MEGATRON = """
qkv_fprop:  {method: ring_exchange, aggregate: 1}
proj_fprop: {method: pipeline, num_sm: 4, num_splits: 4, set_sm_margin: 0}
fc1_fprop:  {method: ring_exchange, aggregate: 0}
fc2_fprop:  {method: ring_exchange, aggregate: 0}
fc2_dgrad:  {method: ring_exchange, aggregate: 0}
proj_dgrad: {method: ring_exchange, aggregate: 1}
qkv_dgrad:  {method: bulk, num_sm: 2, set_sm_margin: 0}
qkv_wgrad:  {method: bulk, num_sm: 2, set_sm_margin: 0}
fc1_dgrad:  {method: bulk, num_sm: 2, set_sm_margin: 0}
fc1_wgrad:  {method: bulk, num_sm: 2, set_sm_margin: 0}
"""
BULK = dict(method="bulk", cga_size=2, set_sm_margin=False)
PRESETS = {
    "llama 70B, 4 ranks": {
        "qkv_dgrad": BULK | dict(num_sm=4),
        "qkv_wgrad": BULK | dict(num_sm=24),
        "fc1_dgrad": BULK | dict(num_sm=2),
        "fc1_wgrad": BULK | dict(num_sm=4),
        **{
            name: dict(method="ring_exchange", aggregate=False, num_sm=1, cga_size=1, set_sm_margin=False,
                       fp8_buf=False, atomic_gemm=False)
            for name in ("qkv_fprop", "proj_dgrad", "fc1_fprop", "fc2_dgrad")
        },
        "proj_fprop": dict(method="pipeline", num_sm=24, cga_size=2, num_splits=4, set_sm_margin=True,
                           fp8_buf=(False,), atomic_gemm=False),
        "fc2_fprop": dict(method="pipeline", num_sm=16, cga_size=2, num_splits=4, set_sm_margin=True,
                          fp8_buf=(False,), atomic_gemm=False),
        "proj_wgrad": None,
        "fc2_wgrad": None,
    },
    "low rank": {
        "fc1_dgrad": dict(method="pipeline", num_sm=16, cga_size=2, num_splits=4, set_sm_margin=True, fp8_buf=True),
        "qkv_dgrad": None, "qkv_wgrad": None, "fc1_wgrad": None,
    },
    "empty": {},
}  # fmt: skip


def shipped(bulk, proj, fc2, aggregate=False, **ring):
    """A published preset. bulk: num_sm of four products. proj, fc2: num_sm of a pipeline, or a ring's options."""
    names = ("qkv_dgrad", "qkv_wgrad", "fc1_dgrad", "fc1_wgrad")
    cfg = {name: num_sm and BULK | dict(num_sm=num_sm) for name, num_sm in zip(names, bulk, strict=True)}
    exchange = dict(method="ring_exchange", aggregate=aggregate, num_sm=1, cga_size=1, set_sm_margin=False,
                    fp8_buf=False, atomic_gemm=False)  # fmt: skip
    cfg |= {name: exchange | ring for name in ("qkv_fprop", "proj_dgrad", "fc1_fprop", "fc2_dgrad")}
    for name, chosen in (("proj_fprop", proj), ("fc2_fprop", fc2)):
        pipeline = dict(method="pipeline", cga_size=2, num_splits=4, set_sm_margin=True, atomic_gemm=False)
        cfg[name] = pipeline | chosen if "num_sm" in chosen else exchange | chosen
    return cfg


TUPLE, FP8, MARGIN = dict(fp8_buf=(False,)), dict(fp8_buf=True), dict(set_sm_margin=True)
PRESETS |= {  # one of each form that the published ones have
    "h100 8192 tp4 fp8": shipped((4, 24, 2, 4), dict(num_sm=24) | FP8, dict(num_sm=16) | FP8),
    "b200 8192 tp2 fp8": shipped((4, 24, 2, 4), MARGIN, MARGIN),
    "h100 8192 tp2 lora": shipped((2, None, None, None), MARGIN | dict(cga_size=2), MARGIN | dict(cga_size=2), **MARGIN)
    | {"fc1_dgrad": PRESETS["low rank"]["fc1_dgrad"]},
    "h100 8192 tp4 lora": shipped((4, None, None, None), dict(num_sm=32) | FP8, dict(num_sm=16, fp8_buf=False))
    | {"fc1_dgrad": PRESETS["low rank"]["fc1_dgrad"]},
    "h100 16384 tp8 bf16": shipped((2, 24, 2, 2), dict(num_sm=24) | TUPLE, dict(num_sm=8) | TUPLE, aggregate=True),
    "b200 16384 tp4 fp8": shipped((8, 32, 2, 8), MARGIN, MARGIN, aggregate=True),
    "h100 12288 tp4 bf16": shipped((4, 4, 2, 4), dict(num_sm=24) | TUPLE, MARGIN),
    "b200 18432 tp8": shipped((8, 32, 2, 8), MARGIN, dict(num_sm=24) | TUPLE),
}


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("name", PRESETS)
def test_published_presets_load(name, fp8):
    options = configure(PRESETS[name], 4, fp8=fp8)
    assert ("fc1_wgrad" in options) == (name != "low rank" and "lora" not in name)
    for product, entry in PRESETS[name].items():
        for key, value in (entry or {}).items():
            settled = key == "fp8_buf" and not options[product].is_reduce_scatter  # what is gathered is FP8 by its mode
            assert settled or getattr(options[product], key) == (value[0] if isinstance(value, tuple) else value)


def test_megatrons_yaml_loads(tmp_path, monkeypatch):
    path = tmp_path / "overlap.yaml"
    path.write_text(MEGATRON)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ImportError, match="needs PyYAML: pip install pyyaml, or pass a dict"):
        te.load_ub_cfgs(path)
    monkeypatch.undo()
    pytest.importorskip("yaml")
    options = configure(te.load_ub_cfgs(path), 2)
    assert options["qkv_fprop"].aggregate is True and options["fc1_fprop"].aggregate is False
    assert options["fc1_wgrad"].num_sm == 2 and options["fc1_wgrad"].set_sm_margin is False
    assert options["fc2_fprop"].method == "ring_exchange" and options["fc2_fprop"].num_sm == 16
    path.write_text("")
    assert te.load_ub_cfgs(path) == {}


def test_the_copy_engine_can_be_asked_for():
    asked = configure({"qkv_fprop": {"use_ce": 1}, "fc1_fprop": {"use_ce": False}}, 4)
    assert asked["qkv_fprop"].use_ce is True and asked["fc1_fprop"].use_ce is False
    assert asked["qkv_fprop"] == configure({}, 4)["qkv_fprop"]


def test_options_without_effect_are_told():
    cfg = {"qkv_fprop": {"num_sm": 4, "aggregate": 1}, "proj_fprop": {"num_sm": 4, "cga_size": 4, "set_sm_margin": 0}}
    assert without_effect(cfg, configure(cfg, 4), 4) == [
        "qkv_fprop.num_sm=4: with use_ce the library chooses what carries the data",
        "proj_fprop.cga_size=4: the programs form no clusters",
        "proj_fprop.set_sm_margin=False: a fused kernel always has dedicated comm programs",
    ]
    assert without_effect({}, configure({}, 4), 4) == []


# Without ranks


def test_the_layers_and_the_questions_work_on_one_device_without_any_initialisation():
    """In a process of its own, without assertions, as `python -O` runs."""
    code = """
        import torch
        from tkernels.layers import userbuffers as te
        print(te.is_ub_initialized(), te.using_cublasmp_backend(), torch.distributed.is_initialized())
        x = torch.randn(6, 2, 16, requires_grad=True)
        flags = dict(ub_overlap_ag=True, ub_overlap_rs=True, ub_bulk_dgrad=True, ub_bulk_wgrad=True, device="cpu")
        for layer in (
            te.Linear(16, 16, parallel_mode="column", sequence_parallel=True, **flags),
            te.LayerNormLinear(16, 16, **flags),
            te.LayerNormMLP(16, 32, **flags),
            te.MultiheadAttention(16, 4, attention_dropout=0.0, **flags),
            te.TransformerLayer(16, 32, 4, ub_tp_comm_overlap=True, device="cpu"),
        ):
            layer(x).sum().backward()
        te.destroy_ub()
        refused = 0
        for call in (
            lambda: te.get_ub("qkv_fprop"),
            lambda: te.initialize_ub([8, 8], 3),
            lambda: te.initialize_ub([8, 8], 1, bootstrap_backend="smoke"),
            lambda: te.initialize_ub([8], 1),
            lambda: te.initialize_ub(None, 1),
            lambda: te.initialize_ub([8, 8], 1, dtype="bf16"),
            lambda: te.initialize_ub([8, 8], 1, ub_cfgs={"qkv_frop": {}}),
            lambda: te.initialize_ub([8, 8], 1, ub_cfgs=[{}, {}]),
            lambda: te.initialize_ub([8, 8], 1, quantization_modes=te.UserBufferQuantizationMode.NONE),
            lambda: te.initialize_ub([8, 8], 1, quantization_modes=["none"]),
            lambda: te.initialize_ub([8, 8], 1, quantization_modes=[te.UserBufferQuantizationMode.FP8] * 2),
            lambda: te.general_gemm(x[0], x[0], layout="TT"),
            lambda: te.Linear(16, 16, tp_size=2, sequence_parallel=True, parallel_mode="row", ub_overlap_rs=True,
                              ub_name="proj", device="cpu"),
        ):
            try:
                call()
            except (ValueError, TypeError, RuntimeError):
                refused += 1
        print(refused, te.is_ub_initialized())
        te.initialize_ub([8, 8], 1, dtype=torch.float32)
        print(te.get_ub("qkv_fprop"))
        te.destroy_ub()
    """
    environment = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    done = subprocess.run(
        [sys.executable, "-O", "-c", inspect.cleandoc(code)],
        env=environment | {"TKERNELS_RUNTIME": "simulated"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "False False False",
        "13 False",
        "CommOverlapP2P(AG ring_exchange, [8, 8], torch.float32)",
    ]


def test_a_layer_names_what_its_overlap_lacks():
    common = dict(tp_size=2, sequence_parallel=True, parallel_mode="column", device="cpu")
    with pytest.raises(RuntimeError, match=r"UB manager is not initialized. Call initialize_ub\(\)"):
        te.Linear(8, 8, ub_overlap_ag=True, ub_name="qkv", **common)
    with pytest.raises(ValueError, match="ub_overlap_ag_fprop needs ub_name, one of qkv, fc1"):
        te.Linear(8, 8, ub_overlap_ag=True, **common)
    with pytest.raises(ValueError, match="no GEMM for ub_bulk_wgrad to run beside"):
        te.Linear(8, 8, ub_bulk_wgrad=True, delay_wgrad_compute=True, ub_name="qkv", **common)
    with pytest.raises(ValueError, match="out_features=9 doesn't divide by 2"):
        te.Linear(8, 9, **common)
    with pytest.raises(ValueError, match="symmetric_ar_type='one_shot' is not supported; pass 'two_shot'"):
        te.Linear(8, 8, symmetric_ar_type="one_shot", **common)
    with pytest.raises(ValueError, match="attention_type='cross' is not supported"):
        te.MultiheadAttention(8, 2, attention_type="cross", device="cpu")
    with pytest.raises(ValueError, match="drop_path_rate=0.1 is not supported"):
        te.TransformerLayer(8, 8, 2, drop_path_rate=0.1, device="cpu")
    te.Linear(8, 8, ub_overlap_rs=True, **common)  # for the other mode: Megatron passes both to every layer


def test_the_positions_of_older_releases_are_refused_by_name():
    with pytest.raises(TypeError, match="up to release 2.7 dtype stood in the fourth position, so pass dtype=torch"):
        te.initialize_ub([8, 8], 1, False, torch.bfloat16)
    x = torch.ones(4, 4)
    with pytest.raises(TypeError, match="older releases had a workspace in the third position"):
        te.general_gemm(x, x, torch.empty(16))
    assert not te.is_ub_initialized()


# The module path


def test_the_path_that_megatron_calls_leads_here():
    assert "transformer_engine" not in sys.modules
    shim.install()
    try:
        shim.install()
        import transformer_engine
        import transformer_engine.pytorch as pytorch
        import transformer_engine.pytorch.cpp_extensions as tex
        from transformer_engine.pytorch.module.base import get_ub, initialize_ub

        assert initialize_ub is te.initialize_ub and get_ub is te.get_ub
        assert pytorch.module.base._ub_communicators is registry._ub_communicators
        assert pytorch.Linear is te.Linear and tex.general_gemm is te.general_gemm
        assert transformer_engine.__version__ == shim.API_VERSION
    finally:
        shim.uninstall()
    assert not [name for name in sys.modules if name.startswith("transformer_engine")] and not shim.is_installed()


# As Megatron's modules ask for TransformerEngine, each on its own, when they are imported.
MODULES = {
    "__init__": "",
    "utils": """
        try:
            import transformer_engine
            HAVE_TE = True
        except ImportError:
            HAVE_TE = False
        def te_version():
            import transformer_engine
            return transformer_engine.__version__
    """,
    "random": """
        try:
            from transformer_engine.pytorch.distributed import activation_recompute_forward
            HAVE_TE = True
        except ModuleNotFoundError:
            HAVE_TE = False
    """,
    "optimizer": """
        try:
            from transformer_engine.pytorch.optimizers import FusedAdam as Adam
        except ImportError:
            from torch.optim import Adam
    """,
    "fp8_utils": """
        import transformer_engine
        from transformer_engine.pytorch.tensor import QuantizedTensor
        from transformer_engine.pytorch.router import fused_topk_with_score_function
    """,
    "extensions/__init__": "",
    "extensions/transformer_engine": """
        try:
            import transformer_engine as te
            from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_autocast
            HAVE_TE = True
        except ImportError:
            from unittest.mock import MagicMock
            te, HAVE_TE = MagicMock(), False
        class TELinear(te.pytorch.Linear):
            pass
        class TEDotProductAttention(te.pytorch.DotProductAttention):
            pass
        class TEGroupedLinear(te.pytorch.GroupedLinear):
            def __init__(self, size):
                super().__init__(size)
        class TEDelayedScaling(te.common.recipe.DelayedScaling):
            pass
        class TECudaRNGStatesTracker(te.pytorch.distributed.CudaRNGStatesTracker):
            pass
        def fused() -> te.pytorch.ops.Sequential:
            return te.pytorch.ops.SwiGLU()
    """,
}


@pytest.fixture
def megatron(tmp_path, monkeypatch):
    """Imports a module of a small package that asks as Megatron does."""
    for name, text in MODULES.items():
        path = tmp_path / "megatron/core" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    mine = lambda: [name for name in sys.modules if name.partition(".")[0] == "megatron"]  # noqa: E731
    for name in mine():  # the one that is installed
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda name: importlib.import_module(f"megatron.core.{name}")
    shim.uninstall()
    for name in mine():
        del sys.modules[name]


@pytest.mark.parametrize("order", ["shim first", "megatron first"])
def test_shim_install_lets_megatron_believe_what_is_true(megatron, order):
    if order == "megatron first":
        assert not megatron("extensions.transformer_engine").HAVE_TE and not megatron("utils").HAVE_TE
        with pytest.warns(UserWarning, match="megatron.core before does without TransformerEngine, except for its"):
            shim.install()
    else:
        shim.install()
    layers = megatron("extensions.transformer_engine")
    assert layers.HAVE_TE and issubclass(layers.TELinear, te.Linear)
    assert issubclass(layers.TEDotProductAttention, te.DotProductAttention)
    assert megatron("utils").HAVE_TE == (order == "shim first") and megatron("utils").te_version() == shim.API_VERSION
    assert not megatron("random").HAVE_TE and megatron("optimizer").Adam is torch.optim.Adam  # its own ways out
    fp8 = megatron("fp8_utils")
    assert not isinstance(torch.ones(1), fp8.QuantizedTensor) and not issubclass(torch.Tensor, fp8.QuantizedTensor)
    with layers.fp8_autocast(fp8_recipe=layers.TEDelayedScaling(margin=1)):
        assert float8.current().margin == 1
    for use, name in [
        (lambda: layers.TEGroupedLinear(8), "pytorch.GroupedLinear"),
        (lambda: layers.TECudaRNGStatesTracker(), "pytorch.distributed.CudaRNGStatesTracker"),
        (lambda: fp8.fused_topk_with_score_function(1), "pytorch.router.fused_topk_with_score_function"),
    ]:
        with pytest.raises(NotImplementedError, match=rf"^transformer_engine\.{name} is not among .* shim.install\("):
            use()
    for use, name in [
        (lambda: layers.FP8GlobalStateManager.is_fp8_enabled(), "pytorch.fp8.FP8GlobalStateManager.is_fp8_enabled"),
        (layers.fused, "pytorch.ops.SwiGLU"),
    ]:
        with pytest.raises(AttributeError, match=rf"^transformer_engine\.{name} is not among the names"):
            use()
    with pytest.raises(ModuleNotFoundError, match="^transformer_engine.pytorch.Fp8Padding is not among the names"):
        from transformer_engine.pytorch import Fp8Padding  # noqa: F401
    assert not hasattr(sys.modules["transformer_engine.pytorch"], "Fp8Padding")
    shim.uninstall()
    with pytest.raises(ImportError, match="No module named 'transformer_engine'"):
        import transformer_engine  # noqa: F401
    assert not layers.HAVE_TE and not shim.is_installed()


def test_a_transformer_engine_that_is_there_is_patched_on_request_only(tmp_path, monkeypatch):
    for folder in ("pytorch/module", "pytorch/cpp_extensions", "pytorch/distributed"):
        (tmp_path / "transformer_engine" / folder).mkdir(parents=True)
        (tmp_path / "transformer_engine" / folder / "__init__.py").write_text("")
    (tmp_path / "transformer_engine/__init__.py").write_text("__version__ = '9'")
    (tmp_path / "transformer_engine/pytorch/__init__.py").write_text("Linear = LayerNorm = 'theirs'")
    (tmp_path / "transformer_engine/pytorch/module/base.py").write_text("initialize_ub = 'theirs'")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="transformer_engine is installed; pass patch=True"):
        shim.install()
    shim.install(patch=True)
    try:
        import transformer_engine.pytorch as pytorch
        import transformer_engine.pytorch.module.base as base

        assert base.initialize_ub is te.initialize_ub and pytorch.Linear is te.Linear
        assert pytorch.LayerNorm == "theirs"
        shim.uninstall()
        assert base.initialize_ub == "theirs" and pytorch.Linear == "theirs" and not hasattr(base, "get_ub")
    finally:
        shim.uninstall()
        for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
            del sys.modules[name]


# Streams


def communicator_on(sim):
    """A communicator whose streams are the simulator's, and which needs no ranks."""
    comm = te.CommOverlap.__new__(te.CommOverlap)
    context = types.SimpleNamespace(num_programs=4, current_stream=lambda: 0)
    comm._helper = types.SimpleNamespace(dev=sim, context=context, closed=False)
    comm.shape, comm.dtype, comm.comm_type = (64, 4), torch.float32, te.CommOverlapType.AG
    comm.options = te.default_config(2)["qkv_dgrad"]
    comm.stream, comm._moved = sim.Stream("comm"), "what it moves"
    return comm


def bulk_step(sim, comm, joined=True):
    """A product, a collective beside a second one, a third that reads what the collective brought."""
    x, w, gathered = torch.ones(32, 4), torch.ones(4, 4), torch.empty(64, 4)

    def all_gather(x, rows, out, programs):
        sim.launch("gather", lambda x, out: out.copy_(torch.cat([x, x])), reads=[x], writes=[out])

    x = x @ w  # what travels is made on the caller's stream
    if joined:
        with comm.beside(all_gather, x, (32, 32), gathered):
            beside = x @ w
    else:  # the wrong form: nobody waits
        with sim.stream(comm.stream):
            all_gather(x, (32, 32), gathered, 1)
        beside = x @ w
    return beside, gathered @ w


def test_a_collective_beside_a_product_is_ordered_both_ways():
    for starve in ((), ("comm",)):
        sim = Simulator()
        with sim:
            _, result = bulk_step(sim, communicator_on(sim))
        sim.check()
        sim.run(starve=starve)
        assert result.eq(16.0).all() and result.shape == (64, 4)
    assert sim.log.index("gather") > 1  # starved, it came after the product that it runs beside


def test_the_check_sees_a_collective_that_nobody_waits_for():
    sim = Simulator()
    with sim:
        bulk_step(sim, communicator_on(sim), joined=False)
    with pytest.raises(Race):
        sim.check()


# On ranks


def resources():
    gc.collect()
    with open("/proc/self/maps") as maps:
        segments = sum("memfd:tkernels" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), segments


def gathered(comm, ctx, rows=4):
    x = torch.full((rows, 8), float(comm.rank), device=ctx.device)
    return te.general_gemm(torch.eye(8, device=ctx.device), x, ub=comm, ub_type=te.CommOverlapType.AG)[0]


def gathers(comm, ctx, rows=4):
    """Collective. The communicator gathers in the order of the ranks."""
    y = gathered(comm, ctx, rows)
    assert y[::rows, 0].tolist() == list(range(comm.size))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", [None, "gloo", nccl])
def test_any_backend_can_bootstrap_and_init_and_destroy_may_be_repeated(ctx, backend):
    if backend == "nccl" and ctx.device.type == "cpu":
        pytest.skip("nccl needs GPUs")
    default, before = current_context(), None
    for round in range(3):
        te.initialize_ub([8, 8], 2, dtype=torch.float32, bootstrap_backend=backend)
        assert te.is_ub_initialized() and not te.using_cublasmp_backend() and current_context() is default
        late(ctx, round % 2, 0.05)
        gathers(te.get_ub("qkv_fprop"), ctx)  # straight after init, on skewed ranks
        assert te.get_ub_is_fp8("qkv_fprop") is False
        comm = te.get_ub("fc1_dgrad")
        te.destroy_ub()
        te.destroy_ub()
        assert not te.is_ub_initialized()
        with pytest.raises(TkernelsError, match="given back by destroy_ub"):
            comm.context  # noqa: B018
        del comm
        if round:
            assert resources() == before
        before = resources()


@pytest.mark.ranks(2)
def test_one_context_serves_all_communicators_and_no_group_is_made(ctx):
    groups, contexts = dist.get_pg_count(), len(registry.domain_context.__globals__["_ub_communicators"])
    te.initialize_ub([8, 8], 2, dtype=torch.float32)
    try:
        comms = {te.get_ub(name) for name in te.default_config(2)}
        assert len(comms) == 12 + contexts and len({id(comm.context) for comm in comms}) == 1
        assert dist.get_pg_count() == groups
        with pytest.raises(KeyError, match="UB for qkv_gprop is not registered. Registered: fc1_dgrad, fc1_fprop"):
            te.get_ub("qkv_gprop")
        with pytest.raises(RuntimeError, match="already initialized"):
            te.initialize_ub([8, 8], 2)
    finally:
        te.destroy_ub()


@pytest.mark.ranks(2)
def test_an_error_of_one_rank_is_an_error_of_all_and_leaves_nothing(ctx, monkeypatch=None):
    wrong = {"qkv_frop": {}} if ctx.rank == 1 else {}
    with pytest.raises(ValueError, match="there is no GEMM 'qkv_frop'"):
        te.initialize_ub([8, 8], 2, dtype=torch.float32, ub_cfgs=wrong)
    with pytest.raises(TkernelsError, match=r"ask for different things: rank 0: .*\[8, 8\].*rank 1: .*\[16, 8\]"):
        te.initialize_ub([8 + 8 * ctx.rank, 8], 2, dtype=torch.float32)
    groups = dist.get_pg_count()
    for value in ("soon", "0", "7"):  # on one rank alone
        os.environ.update({"UB_TIMEOUT": value} if ctx.rank == 1 else {})
        with pytest.raises((ValueError, TkernelsError), match=f"UB_TIMEOUT.*{value}"):
            te.initialize_ub([8, 8], 2, dtype=torch.float32, bootstrap_backend="gloo")
        os.environ.pop("UB_TIMEOUT", None)
    for options in ({"bootstrap_backend": "gloo"}, {"tp_group": dist.group.WORLD}):  # of which groups are made
        with pytest.raises(TkernelsError, match=f"ask for different things: .*{next(iter(options))}"):
            te.initialize_ub([8, 8], 2, dtype=torch.float32, **(options if ctx.rank == 1 else {}))
    assert not te.is_ub_initialized() and dist.get_pg_count() == groups

    class Unreadable(list):
        def __repr__(self):
            raise RuntimeError("can't be shown")

    with pytest.raises(RuntimeError, match="can't be shown"):  # where the ranks' arguments are compared
        te.initialize_ub(Unreadable([8, 8]) if ctx.rank == 1 else [8, 8], 2, dtype=torch.float32)

    def fail():
        if ctx.rank == 1:
            raise RuntimeError("the last communicator broke")

    before = resources()
    with after_the_last_communicator(fail):
        with pytest.raises(RuntimeError, match="the last communicator broke") as caught:
            te.initialize_ub([8, 8], 2, dtype=torch.float32)
        assert ctx.rank == 1 or "failed on rank 1, so nothing is initialised on any rank" in str(caught.value)
    del caught
    assert not te.is_ub_initialized() and resources() == before
    te.initialize_ub([8, 8], 2, dtype=torch.float32)
    gathers(te.get_ub("qkv_fprop"), ctx)
    te.destroy_ub()


def breaks(original, call, before):
    """`original`, whose `call`-th call from now on raises before it does anything, or after it has done everything."""
    calls = itertools.count()

    def broken(*arguments, **options):
        now = next(calls) == call
        if now and before:
            raise RuntimeError("boom")
        made = original(*arguments, **options)
        if now:
            raise RuntimeError("boom", made)  # whoever keeps the error keeps what was made
        return made

    return broken


@pytest.mark.ranks(2)
def test_initialize_ub_that_fails_anywhere_on_one_rank_raises_on_all_and_works_next_time(ctx):
    """Rank 1 fails in each object that is constructed, before and after it, and where the ranks meet for it."""
    stages = [
        (registry, "_resolve", 0), (registry, "_domain", 0), (registry, "CommOverlapHelper", 0),
        (communicators, "init", 0), (SymmetricHeap, "empty", 0), (te.CommOverlapCore, "_reserve", 0),
        (Workspace, "reserve", 0), (Workspace, "_grow", 0),
        *((registry, "_communicator", number) for number in (0, 1, 11)),
    ]  # fmt: skip
    with tkernels.init(heap_bytes=1 << 20):
        pass  # it gives back what another test has left
    before, contexts, gather, met = resources(), open_contexts(), Group.gather, []

    def meets(group, value, call=None, fails_at=None, **limit):
        if call not in (registry.AGREED, registry.ENDED):
            if ctx.rank == 1 and len(met) == fails_at:
                raise RuntimeError("boom")
            met.append(call)
        return gather(group, value, call, **limit)

    def fails():
        with pytest.raises(RuntimeError, match="boom") as caught:
            te.initialize_ub([8, 8], 2, dtype=torch.float32)
        assert ctx.rank == 1 or "initialize_ub: failed on rank 1, so nothing is initialised" in str(caught.value)
        assert not te.is_ub_initialized() and open_contexts() == contexts

    for (owner, name, call), early in itertools.product(stages, (True, False)):
        broken = breaks(getattr(owner, name), call, early)
        with mock.patch.object(owner, name, broken) if ctx.rank == 1 else contextlib.nullcontext():
            fails()
    assert resources() == before
    with mock.patch.object(Group, "gather", functools.partialmethod(meets)):
        te.initialize_ub([8, 8], 2, dtype=torch.float32)
    gathers(te.get_ub("qkv_fprop"), ctx)
    te.destroy_ub()
    assert len(met) > 10
    for fails_at in range(len(met)):
        met.clear()
        with mock.patch.object(Group, "gather", functools.partialmethod(meets, fails_at=fails_at)):
            fails()
    assert resources() == before
    te.initialize_ub([8, 8], 2, dtype=torch.float32)
    gathers(te.get_ub("qkv_fprop"), ctx)
    te.destroy_ub()


@pytest.mark.ranks(2)
def test_initialize_ub_that_fails_on_one_rank_is_told_to_one_that_has_left_a_context(ctx):
    left = tkernels.init(ctx.group.process_group, heap_bytes=8 << 20, default=False)
    if ctx.rank == 0:
        left.abandon()
    contexts = open_contexts()
    broken = mock.patch.object(registry, "CommOverlapHelper", breaks(te.CommOverlapHelper, 0, before=True))
    with broken if ctx.rank == 1 else contextlib.nullcontext(), pytest.raises(RuntimeError, match="boom"):
        te.initialize_ub([8, 8], 2, dtype=torch.float32)
    assert open_contexts() == contexts
    left.abandon()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"bootstrap_backend": "gloo"}, {"tp_group": True}], ids=str)
def test_initialize_ub_works_again_after_a_rank_has_left_a_call(ctx, options):
    """Which the other one waits for, in vain, and leaves then by itself; over everyone's group and over another one."""
    if "tp_group" in options:
        options = {"tp_group": dist.new_group([0, 1])}

    def wait_for_rank_0():
        while not te.get_ub("qkv_fprop").context.failed:
            time.sleep(0.02)

    segments = resources()[1]
    for knows in (False, True):  # that rank 0 has failed, before it leaves
        te.initialize_ub([8, 8], 2, dtype=torch.float32, **options)
        gathers(te.get_ub("qkv_fprop"), ctx)
        context = te.get_ub("qkv_fprop").context
        expire_after(context, 1)
        if ctx.rank == 1 and knows:
            wait_for_rank_0()
        with pytest.raises(tkernels.WaitTimeoutError, match="rank 0 waited 1 s for the signal of rank 1"):
            if ctx.rank == 0:
                gathered(te.get_ub("qkv_fprop"), ctx)  # on a GPU its values come first, which are of no use
                context.check()
            te.destroy_ub()
        te.destroy_ub()
        del context
    te.initialize_ub([8, 8], 2, dtype=torch.float32, **options)
    if ctx.rank == 0:
        expire_after(te.get_ub("qkv_fprop").context, 1)
        with pytest.raises(tkernels.WaitTimeoutError):
            gathered(te.get_ub("qkv_fprop"), ctx)
            te.get_ub("qkv_fprop").context.check()
        te.destroy_ub()
    else:
        wait_for_rank_0()
    with pytest.raises(RuntimeError, match="already initialized. Call destroy_ub"):  # on rank 1
        te.initialize_ub([8, 8], 2, dtype=torch.float32, **options)
    with contextlib.suppress(tkernels.WaitTimeoutError):
        te.destroy_ub()
    te.initialize_ub([8, 8], 2, dtype=torch.float32, **options)
    gathers(te.get_ub("qkv_fprop"), ctx)
    te.destroy_ub()
    assert resources()[1] <= segments  # those of contexts that tests before have left are freed, too


@contextlib.contextmanager
def after_the_last_communicator(call):
    """`initialize_ub`, with default options, calls this when it has made its last communicator."""
    made, original = [], registry._communicator

    def make(*arguments):
        made.append(original(*arguments))
        if len(made) == len(te.default_config(2)):
            call()
        return made[-1]

    with mock.patch.object(registry, "_communicator", make):
        yield


@pytest.mark.ranks(2)
@pytest.mark.parametrize("slow", [0, 1])
def test_init_returns_when_all_ranks_are_ready(ctx, slow, tmp_path):
    """One rank is late, and the other one waits for it."""
    ready = tmp_path / "ready"

    def be_late():
        if ctx.rank == slow:
            time.sleep(0.5)
            ready.touch()

    with after_the_last_communicator(be_late):
        te.initialize_ub([8, 8], 2, dtype=torch.float32)
    assert ready.exists()
    gathers(te.get_ub("qkv_fprop"), ctx)
    te.destroy_ub()


@pytest.mark.ranks(4)
def test_domains_are_blocks_of_neighbours_or_the_group_that_is_given(ctx):
    te.initialize_ub([8, 8], 2, dtype=torch.float32)
    comm = te.get_ub("qkv_fprop")
    assert comm.context.group.global_ranks == [ctx.rank // 2 * 2, ctx.rank // 2 * 2 + 1] and comm.rank == ctx.rank % 2
    gathers(comm, ctx)
    odd_and_even = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = odd_and_even[ctx.rank % 2]
    options = dict(sequence_parallel=True, tp_size=2, parallel_mode="column", ub_overlap_ag=True, ub_name="qkv")
    with pytest.raises(ValueError, match=r"tp_group has the ranks \[.\, .\], but initialize_ub made a domain of"):
        te.Linear(8, 8, tp_group=mine, device="cpu", **options)
    te.destroy_ub()
    te.initialize_ub([8, 8], 2, dtype=torch.float32, tp_group=mine)
    assert te.get_ub("qkv_fprop").rank == ctx.rank // 2
    gathers(te.get_ub("qkv_fprop"), ctx)
    te.Linear(8, 8, tp_group=mine, device="cpu", **options)
    te.destroy_ub()
    neighbours = [dist.new_group([0, 1]), dist.new_group([2, 3])][ctx.rank // 2]
    with pytest.raises((ValueError, TkernelsError), match="tp_group has the ranks .*, but rank . passed a group of"):
        te.initialize_ub([8, 8], 2, dtype=torch.float32, tp_group=neighbours if ctx.rank == 3 else mine)
    other = "gloo" if "gloo" not in dist.get_backend_config(mine) else "nccl"
    with pytest.raises(ValueError, match=f"bootstrap_backend='{other}' is for groups that initialize_ub creates"):
        te.initialize_ub([8, 8], 2, dtype=torch.float32, tp_group=mine, bootstrap_backend=other)
    make = registry._communicator

    def fails(*arguments):
        if ctx.rank == 3:
            raise RuntimeError("boom")
        return make(*arguments)

    for options in (dict(tp_group=mine), dict(bootstrap_backend="gloo")):  # the other domain has none of its own
        groups = set(dist.distributed_c10d._world.pg_map)
        with mock.patch.object(registry, "_communicator", fails), pytest.raises(RuntimeError, match="boom"):
            te.initialize_ub([8, 8], 2, dtype=torch.float32, **options)
        assert set(dist.distributed_c10d._world.pg_map) == groups
    backend = dist.get_backend(mine)
    own = {} if backend == shared_gpus.BACKEND else {"bootstrap_backend": backend}
    te.initialize_ub([8, 8], 2, dtype=torch.float32, tp_group=mine, **own)
    gathers(te.get_ub("qkv_fprop"), ctx)
    te.destroy_ub()
    for group in (mine, neighbours):
        dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_communicators_outlive_their_helper_and_give_everything_back_where_ranks_meet_next(ctx):
    """Garbage is collected at another time on each rank, so it can't be then."""
    make = dict(buffer_shape=[8, 8], buffer_dtype=torch.float32, tp_size=2, comm_type=te.CommOverlapType.AG)
    before, held = resources(), []
    for _ in range(3):
        helper = te.CommOverlapHelper(ctx.group.process_group, heap_bytes=8 << 20)
        comm = te.CommOverlapP2P(helper=helper, **make)
        many = [te.CommOverlap(helper=helper, **make) for _ in range(33)]
        del helper
        gc.collect()
        gathers(comm, ctx)
        comm.itself = comm  # so that counting references does not find it
        del many, comm
        if ctx.rank == 0:
            gc.collect()
        ctx.group.barrier()
        held.append(resources())
    assert held[1:] == held[:-1]  # one at a time
    tkernels.init(ctx.group.process_group, heap_bytes=8 << 20, default=False).finalize()
    assert resources() == before


@pytest.mark.ranks(2)
def test_classes_say_what_they_are_and_refuse_what_they_are_not(ctx):
    helper = te.CommOverlapHelper(ctx.group.process_group, heap_bytes=8 << 20)
    common = [8, 8], torch.float32, helper, 2
    AG, RS = te.CommOverlapType.AG, te.CommOverlapType.RS
    for cublasmp in (False, True):
        ring = te.CommOverlapP2P(*common, AG, use_cublasmp=cublasmp)
        pipeline = te.CommOverlap(*common, cublasmp, RS)
        for comm, p2p in ((ring, True), (pipeline, False)):
            assert comm.get_tp_size() == 2 and comm.is_p2p_overlap() is p2p and comm.with_cublasmp() is cublasmp
            assert not comm.is_atomic_gemm() and not comm.is_fp8_ubuf() and comm.context.rank == comm.rank == ctx.rank
            send, receive = comm.get_communication_stream()
            assert send is receive
    refused = [
        (lambda: te.CommOverlap(*common, 3, 3, 2), "num_splits and num_max_streams stood in their positions"),
        (lambda: te.CommOverlapP2P(*common, 1), "comm_type=1 must be a bool and a CommOverlapType"),
        (lambda: te.CommOverlap([8, 8], torch.float32, helper, "2"), "tp_size='2', but the helper's"),
        (lambda: te.CommOverlap([8, 8], torch.float32, helper, 2 - ctx.rank), r"tp_size=1, .* \(on rank 1\)"),
        (lambda: te.CommOverlap([8, 8, 8], *common[1:]), r"buffer_shape=\[8, 8, 8\] must be \[tokens, hidden\]"),
        (lambda: te.CommOverlap([8, 8], torch.uint8, helper, 2), "only what is gathered can be FP8"),
        (lambda: te.CommOverlap(*common, atomic_gemm=True), "atomic_gemm=True is not supported"),
        (lambda: te.CommOverlap(*common, gemm_priority=-1), "GEMMs run on the caller's stream"),
        (lambda: te.CommOverlap([8, 8], torch.float32, None, 2), "helper must be a CommOverlapHelper"),
        (lambda: te.CommOverlap(*common, comm_priority=10**30), "comm_priority: 10+ must be an integer, of 32 bits"),
        (lambda: pipeline.copy_into_buffer(torch.ones(8, 8).to_sparse()), "copy_into_buffer: input must be a strided"),
        (lambda: pipeline.copy_into_buffer(torch.ones(4, 8).to(ctx.device), "no"),
         "get_buffer: local_chunk='no' must be True or"),
        (lambda: te.fill_userbuffers_buffer_for_all_gather(ring, torch.ones(4, 8).to_sparse(), None, None),
         "fill_userbuffers_buffer_for_all_gather: local_tensor must be a strided tensor"),
        (lambda: te.get_ub([]), r"get_ub: name=\[\] must be the name of a GEMM"),
        (lambda: te.get_ub("qkv_fprop", "yes"), "get_ub: use_fp8: 'yes' must be a boolean"),
        *((lambda wrong=wrong: te.initialize_ub([8, 8], 2, wrong), "initialize_ub: use_fp8: .* must be a boolean")
          for wrong in ("yes", torch.ones(2))),
    ]  # fmt: skip
    for wrong, message in refused:
        with pytest.raises((ValueError, TypeError), match=message):
            wrong()


@pytest.mark.ranks(2)
def test_the_buffer_holds_any_number_of_tokens_up_to_its_own(ctx):
    comm = te.CommOverlap([10, 4], torch.float32, te.CommOverlapHelper(heap_bytes=8 << 20), 2)
    assert comm.get_buffer().shape == (10, 4) and comm.get_buffer(True).shape == (5, 4)
    for rows in (5, 2, 1):
        mine = torch.full((rows, 4), float(rows), device=ctx.device)
        comm.copy_into_buffer(mine, local_chunk=True)
        whole = comm.get_buffer(shape=(2 * rows, 4))
        assert whole[ctx.rank * rows : (ctx.rank + 1) * rows].eq(rows).all()
        assert comm.get_buffer(True, (rows, 2, 2)).data_ptr() == whole[ctx.rank * rows].data_ptr()
    with pytest.raises(ValueError, match=r"makes 48 elements of 2 ranks, but the buffer has \[10, 4\]"):
        comm.get_buffer(shape=(12, 4))
    with pytest.raises(TypeError, match="the tensor is torch.float64, but the buffer is torch.float32"):
        comm.copy_into_buffer(torch.zeros(5, 4, dtype=torch.float64), True)
    with pytest.raises(ValueError, match="copy_into_buffer: the tensor is on meta, not "):
        comm.copy_into_buffer(torch.zeros(5, 4, device="meta"), True)
    with pytest.raises(ValueError, match="quantizer=object is not supported"):
        te.fill_userbuffers_buffer_for_all_gather(comm, mine, object(), None)


@pytest.mark.ranks(2)
def test_environment_variables_that_still_mean_something(ctx):
    asked = {"UB_TIMEOUT": "70", "UB_SKIPMC": "1", "NVTE_EXT_MARGIN_SM": "1", "NVTE_UB_SPLIT_RS": "1"}
    os.environ.update(asked)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            te.initialize_ub([8, 8], 2, dtype=torch.float32, ub_cfgs={"proj_fprop": {"cga_size": 4}})
        texts = [str(warning.message) for warning in told if "initialize_ub" in str(warning.message)]
        if ctx.rank == 0:
            assert "change nothing here: proj_fprop.cga_size=4: the programs form no clusters" in texts[0]
            assert "NVTE_UB_SPLIT_RS have no meaning any more" in texts[1]
        comm = te.get_ub("qkv_fprop")
        assert comm.context.timeout_s == 70.0 and not te.device_supports_multicast()
        configs, config = [], communicators.CommOverlapCore._config
        keep = lambda *arguments: configs.append(config(*arguments)) or configs[-1]  # noqa: E731
        with mock.patch.object(communicators.CommOverlapCore, "_config", keep):
            gathers(comm, ctx)
        assert [each.max_programs for each in configs] == [comm.context.num_programs - 1]
        te.destroy_ub()
        os.environ["NVTE_EXT_MARGIN_SM"] = "some"
        with pytest.raises(ValueError, match="NVTE_EXT_MARGIN_SM='some' must be a number of SMs"):
            te.initialize_ub([8, 8], 2, dtype=torch.float32)
    finally:
        for name in asked:
            os.environ.pop(name, None)
        te.destroy_ub()
    assert te.get_stream_priority_range()[0] == 0


JOB = """
import torch, tkernels
from tkernels.layers import userbuffers as te

def job(ctx):
    if ctx.rank == 0:
        print("begun", flush=True)
    for _ in range(5):
        te.initialize_ub([8, 8], ctx.size, dtype=torch.float32)
        x = torch.full((4, 8), float(ctx.rank))
        y = te.general_gemm(torch.eye(8), x, ub=te.get_ub("qkv_fprop"), ub_type=te.CommOverlapType.AG)[0]
        te.destroy_ub()
    return y[::4, 0].tolist()

if __name__ == "__main__":
    print(tkernels.launch(job, 2))
"""


@pytest.mark.skipif(tkernels.RUNTIME != "simulated", reason="two jobs need GPUs of their own")
@pytest.mark.ranks(2)
def test_two_jobs_on_one_machine_never_meet(ctx, tmp_path):
    """These ranks are the one, and go on for as long as the other one's do the same."""
    job = None
    if ctx.rank == 0:
        (tmp_path / "job.py").write_text(JOB)
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        job = subprocess.Popen([sys.executable, tmp_path / "job.py"], **pipes)
    try:
        if job is not None:
            assert job.stdout.readline() == "begun\n", job.stderr.read()
        while ctx.group.gather(job is not None and job.poll() is None)[0]:
            te.initialize_ub([8, 8], 2, dtype=torch.float32)
            gathers(te.get_ub("qkv_fprop"), ctx)
            te.destroy_ub()
        if job is not None:
            out, error = job.communicate(timeout=600)
            assert out.strip() == "[[0.0, 1.0], [0.0, 1.0]]", error
    finally:
        if job is not None:
            job.kill()
