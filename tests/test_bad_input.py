"""Bad input at random: whatever is passed for one argument of a public call, the error is a sentence of ours.

All ranks pass the same. A call may succeed: many odd values are right somewhere.
"""

import inspect
import linecache
import random
import traceback
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import tkernels
from tkernels import layers
from tkernels.comm import TkernelsError
from tkernels.layers import cublasmp
from tkernels.layers import userbuffers as te
from tkernels.layers.cublasmp import BlockCyclic, Box, MatmulEpilog, MatmulOptions, ProcessGrid, Slab

RIGHT = ValueError, TypeError, KeyError, NotImplementedError, TkernelsError
# What the caller's own function raises, or torch's of which ours are a face, is as it comes.
OTHERS = {"init_method", "output_layer_init_method", "get_rng_state_tracker", "optimizer_class", "lr"}
SAMPLE = 3  # odd values for an argument in a plain run


class Odd:
    pass


def odd_values(ctx) -> dict:
    """By name. No rank has another value, and none is changed by a call."""
    x = torch.arange(32.0, device=ctx.device).view(4, 8)
    tensors = {
        "scalar": x[1, 3], "index": torch.tensor(3, device=ctx.device), "empty": x[:0, 0], "vector": x[0], "matrix": x,
        "strided": x[:, ::2], "3-D": x.view(2, 4, 4), "expanded": x[:1].expand(4, 8), "double": x.double(),
        "bfloat16": x.bfloat16(), "integers": x.long(), "booleans": x > 3, "complex": x * 1j, "negated": (x * 1j).imag,
        "conjugated": (x * 1j).conj(), "float8": x.to(torch.float8_e4m3fn), "meta": x.to("meta"),
        "sparse": x.to_sparse(), "parameter": nn.Parameter(x.clone()),
        "nested": torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged),
    }  # fmt: skip
    numbers = {
        "zero": 0, "one": 1, "minus three": -3, "huge": 10**30, "2.5": 2.5, "1e300": 1e300, "nan": float("nan"),
        "infinity": float("inf"), "1j": 1j, "True": True, "int64": np.int64(4), "float32": np.float32(2.0),
    }  # fmt: skip
    others = {
        "None": None, "no list": [], "list": [1, 2], "tuple": (1, 2, 3), "no dict": {}, "dict": {"a": 1}, "set": {1},
        "range": range(2), "size": torch.Size([3]), "no string": "", "string": "x", "long string": "9" * 5000,
        "bytes": b"ab", "array": np.ones((4, 4), np.float32), "class": Odd, "object": Odd(), "function": len,
        "ellipsis": ..., "dtype": torch.float64, "device": torch.device("meta"), "ctx": ctx,
        "module": nn.Linear(6, 6).to(ctx.device),
    }  # fmt: skip
    return tensors | numbers | others


def defaults(function, **given) -> dict:
    """The arguments of a function by name: those given, others as they are by default."""
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    taken = {name: each for name, each in inspect.signature(function).parameters.items() if each.kind not in kinds}
    return {name: each.default for name, each in taken.items() if each.default is not each.empty} | given


def call_of(function, **given) -> tuple:
    return function, defaults(function, **given)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


MODEL = object()  # stands for a new model, or its parameters, in each call


def trains(ctx, wrap, argument="module"):
    """Wrap a new model and run a forward and a backward."""

    def call(**options):
        if options[argument] is MODEL:
            torch.manual_seed(0)
            options[argument] = Two().to(ctx.device)
        made = wrap(**options)
        if isinstance(made, nn.Module) and options[argument] is not made:
            made(torch.ones(2, 6, device=ctx.device)).sum().backward()
        getattr(made, "remove", lambda: None)()

    return call


def operators(ctx) -> dict:
    x, w = torch.ones(4, 8, device=ctx.device), torch.ones(6, 8, device=ctx.device)
    return {
        name: call_of(getattr(tkernels, name), ctx=ctx, **{first: x}, **({} if second is None else {second: w}))
        for name, first, second in (
            ("all_gather_matmul", "x_shard_m", "w_shard_n"), ("matmul_reduce_scatter", "x_shard_k", "w_shard_k"),
            ("matmul_all_reduce", "x_shard_k", "w_shard_k"), ("all_gather", "x_shard_m", None),
            ("reduce_scatter", "x", None), ("all_reduce", "x", None),
        )
    } | {
        "matmul": call_of(tkernels.matmul, x=x, w=w), "quantize": call_of(tkernels.quantize, x=x),
        "explain": call_of(tkernels.explain, operation="all_gather_matmul", M=16, N=16, K=16),
        "split_rows": call_of(tkernels.split_rows, num_rows=5, size=2),
    }  # fmt: skip


def tensor_parallel(ctx) -> dict:
    x = torch.ones(4, 6, device=ctx.device)
    linear = {"in_features": 6, "out_features": 8, "mesh": ctx}
    plan = {"a": layers.ColwiseParallel(), "b": layers.RowwiseParallel()}
    mesh = init_device_mesh(ctx.device.type, (ctx.size,))
    module = dict(module=MODEL, device_mesh=mesh, parallelize_plan=plan)
    mappings = "copy_to_tensor_model_parallel_region", "scatter_to_sequence_parallel_region"
    return {
        "ColumnParallelLinear": call_of(layers.ColumnParallelLinear, **linear),
        "RowParallelLinear": call_of(layers.RowParallelLinear, **linear),
        "ParallelMLP": call_of(layers.ParallelMLP, hidden=6, ffn_hidden=8, mesh=ctx),
        "ColumnParallelLinear.forward": call_of(layers.ColumnParallelLinear(**linear).__call__, x=x, rows=None),
        "parallelize": (trains(ctx, layers.parallelize, "model"),
                        defaults(layers.parallelize, model=MODEL, plan={"a": "column", "b": "row"}, mesh=ctx)),
        "parallelize_module": (trains(ctx, layers.parallelize_module), defaults(layers.parallelize_module, **module)),
        "all_reduce_sequence_parallel_grads": call_of(
            layers.all_reduce_sequence_parallel_grads, module=nn.Linear(2, 2).to(ctx.device), mesh=ctx
        ),
    } | {name: call_of(getattr(layers, name), x=x, mesh=ctx) for name in mappings}  # fmt: skip


def data_parallel(ctx) -> dict:
    def zero(params, **options):
        model = Two().to(ctx.device)
        params = model.parameters() if params is MODEL else params
        optimizer = layers.ZeroOptimizer(params, **options)
        model(torch.ones(2, 6, device=ctx.device)).sum().backward()
        optimizer.step()
        optimizer.remove()

    def clip(parameters, **options):
        if parameters is MODEL:
            parameters = [nn.Parameter(torch.ones(3, device=ctx.device))]
            parameters[0].grad = torch.ones(3, device=ctx.device)
        layers.clip_grad_norm_(parameters, **options)

    named = {"gather_state_dict": {}, "sharded_state_dict": {}, "load_full_state_dict": {"full": Two().state_dict()}}
    bucket = dict(capacity=8, dtype=torch.float32, ranks=2, reduce=abs, device=ctx.device, dev=None)
    return {
        "OverlappedDDP": (trains(ctx, layers.OverlappedDDP), defaults(layers.OverlappedDDP, module=MODEL, mesh=ctx)),
        "FullyShard": (trains(ctx, layers.FullyShard),
                       defaults(layers.FullyShard, module=MODEL, units=(nn.Linear,), mesh=ctx)),
        "fully_shard": (trains(ctx, layers.fully_shard), defaults(layers.fully_shard, module=MODEL, mesh=ctx)),
        "ZeroOptimizer": (zero, defaults(
            layers.ZeroOptimizer, params=MODEL, optimizer_class=torch.optim.SGD, mesh=ctx, lr=0.1
        )),
        "clip_grad_norm_": (clip, defaults(layers.clip_grad_norm_, parameters=MODEL, max_norm=1.0, mesh=ctx)),
        "ensure_params_ready": call_of(layers.ensure_params_ready, params=[nn.Parameter(torch.ones(3))]),
        "GradBucket": call_of(layers.GradBucket, **bucket),
    } | {
        name: call_of(getattr(layers, name), model=Two().to(ctx.device), **more) for name, more in named.items()
    }  # fmt: skip


def userbuffers(ctx) -> dict:
    group, x = ctx.group.process_group, torch.ones(4, 2, 16, device=ctx.device)
    common = dict(tp_group=group, tp_size=ctx.size, sequence_parallel=True, device=ctx.device)
    split = common | {"set_parallel_mode": True}
    column = common | {"parallel_mode": "column", "ub_name": "qkv", "ub_overlap_ag": True}
    attention = te.MultiheadAttention(16, 4, **split)
    a, b = torch.ones(12, 16, device=ctx.device), torch.ones(4, 16, device=ctx.device)
    e4m3, one = torch.float8_e4m3fn, torch.ones(1, device=ctx.device)
    return {
        "Linear": call_of(te.Linear, in_features=16, out_features=24, **column),
        "LayerNormLinear": call_of(te.LayerNormLinear, in_features=16, out_features=24, **column),
        "LayerNormMLP": call_of(te.LayerNormMLP, hidden_size=16, ffn_hidden_size=32, **split),
        "MultiheadAttention": call_of(te.MultiheadAttention, hidden_size=16, num_attention_heads=4, **split),
        "TransformerLayer": call_of(
            te.TransformerLayer, hidden_size=16, ffn_hidden_size=32, num_attention_heads=4, **split
        ),
        "DotProductAttention": call_of(te.DotProductAttention, num_attention_heads=4, kv_channels=8),
        "LayerNorm": call_of(te.LayerNorm, normalized_shape=16, device=ctx.device),
        "RMSNorm": call_of(te.RMSNorm, normalized_shape=16, device=ctx.device),
        "Linear.forward": call_of(te.Linear(16, 24, **column).forward, inp=x),
        "MultiheadAttention.forward": call_of(attention.forward, hidden_states=x),
        "general_gemm": call_of(te.general_gemm, A=a, B=b),
        "general_gemm, gathering": call_of(
            te.general_gemm, A=a, B=b, ub=te.get_ub("qkv_fprop"), ub_type=te.CommOverlapType.AG
        ),
        "gather_along_first_dim": call_of(te.gather_along_first_dim, inp=b, process_group=group),
        "get_ub": call_of(te.get_ub, name="qkv_fprop"),
        "Float8Quantizer": call_of(te.Float8Quantizer, scale=one, amax=one.clone(), fp8_dtype=e4m3),
        "Float8CurrentScalingQuantizer": call_of(te.Float8CurrentScalingQuantizer, fp8_dtype=e4m3),
    }


def of_cublasmp(ctx) -> dict:
    a, b = torch.ones(4, 16, device=ctx.device).t(), torch.ones(3, 16, device=ctx.device).t()
    given = dict(distributions=[Slab.Y, Slab.Y, Slab.X], qualifiers="TN", mesh=ctx)

    def matmul(a, b, c, **options):
        return cublasmp.matmul(a, b, c, **options)

    def stateful(a, b, c, epilog, epilog_inputs, preferences, release_workspace, **options):
        with cublasmp.Matmul(a, b, c, **options) as product:
            product.plan(epilog=epilog, epilog_inputs=epilog_inputs, preferences=preferences)
            product.execute(release_workspace=release_workspace)

    def with_options(**options):
        return cublasmp.matmul(a, b, **given, options=MatmulOptions(**options))

    def with_bias(bias):
        return cublasmp.matmul(a, b, **given, epilog=MatmulEpilog.BIAS, epilog_inputs={"bias": bias})

    plan = dict(epilog=None, epilog_inputs=None, preferences=None, release_workspace=False)
    return {
        "matmul": (matmul, defaults(cublasmp.matmul, a=a, b=b, c=None, **given)),
        "matmul, planned": (matmul, defaults(cublasmp.matmul, a=a, b=b, c=None, totals=(8, 6, 16), **given)),
        "Matmul": (stateful, defaults(cublasmp.Matmul, a=a, b=b, c=None, **given) | plan),
        "MatmulOptions": (with_options, defaults(MatmulOptions)),
        "epilog_inputs": (with_bias, {"bias": torch.ones(4, device=ctx.device)}),
        "Slab": call_of(Slab, partition_dim=1, ndim=2), "Box": call_of(Box, lower=(0, 0), upper=(2, 3)),
        "ProcessGrid": call_of(ProcessGrid, shape=(2, 1)),
        "BlockCyclic": call_of(BlockCyclic, process_grid=ProcessGrid(shape=(1, 2)), block_sizes=(2, 2)),
    }  # fmt: skip


def fault_of(error: Exception) -> str | None:
    """What is wrong with an error: its type, or that it was not raised by a sentence of ours."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    ours = "/tkernels/" in frame.filename and "raise" in linecache.getline(frame.filename, frame.lineno)
    if isinstance(error, RIGHT) and ours or "Error(s) in loading state_dict" in str(error):  # torch's words
        return None
    return f"{type(error).__name__} at {frame.filename}:{frame.lineno}: {str(error)[:120]}"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("values", [SAMPLE, pytest.param(None, marks=pytest.mark.exhaustive)], ids=["some", "all"])
@pytest.mark.parametrize(
    "calls", [operators, tensor_parallel, data_parallel, userbuffers, of_cublasmp], ids=lambda calls: calls.__name__
)
def test_bad_input_is_refused_by_a_sentence(ctx, calls, values):
    torch.manual_seed(0)
    odd, draw, wrong, refused = odd_values(ctx), random.Random(1), [], 0
    with tkernels.init(ctx.group.process_group, heap_bytes=64 << 20, timeout_s=30) as own, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if calls is userbuffers:
            te.initialize_ub([16, 16], ctx.size, dtype=torch.float32)
        for name, (function, arguments) in calls(own).items():
            torch.manual_seed(0)
            function(**arguments)  # as it is it succeeds
            for argument in (argument for argument in arguments if argument not in OTHERS):
                for what in odd if values is None else draw.sample([*odd], values):
                    torch.manual_seed(0)
                    try:
                        function(**arguments | {argument: odd[what]})
                    except Exception as error:
                        refused += 1
                        if fault := fault_of(error):
                            wrong.append(f"{name}({argument}={what}): {fault}")
        own.check()
        if calls is userbuffers:
            te.destroy_ub()
    assert not wrong, "\n".join(wrong)
    assert refused > 20
