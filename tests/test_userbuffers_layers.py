"""The layers with overlap against the same layers without it, and against the whole layer on one rank in fp64."""

import contextlib
import copy
import itertools
import warnings
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from tensor_parallel import assert_accurate, fill, own_part, whole_state
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from transports import gpu_only, late, launches

import tkernels
from tkernels.comm.device import operation_name
from tkernels.layers import OverlappedDDP
from tkernels.layers import userbuffers as te
from tkernels.layers.grad_hooks import GradReadyHooks
from tkernels.layers.userbuffers import communicators
from tkernels.layers.userbuffers.transformer import rotate
from tkernels.testing.compare import integers, normal

S, B, H, FFN, HEADS = 16, 2, 32, 64, 4  # sequence, batch, hidden, and so on
STEPS = 50 if tkernels.RUNTIME == "nvshmem" else 2
BULK = dict(ub_overlap_ag=True, ub_overlap_rs=True, ub_bulk_dgrad=True, ub_bulk_wgrad=True)
DGRAD = dict(ub_overlap_ag=True, ub_overlap_rs=True, ub_overlap_rs_dgrad=True)
REDUCING = {"qkv_dgrad": {"method": "ring_exchange"}, "fc1_dgrad": {"method": "pipeline", "num_sm": 2}}


def linear(mode, **options):
    sizes = (H, 3 * H) if mode == "column" else (3 * H, H)
    return te.Linear(*sizes, parallel_mode=mode, **options)


def transformer(**options):
    common = dict(hidden_dropout=0.0, attention_dropout=0.0, set_parallel_mode=True, fuse_qkv_params=True)
    flags = {"ub_tp_comm_overlap": any(key.startswith("ub_") for key in options)}
    return te.TransformerLayer(H, FFN, HEADS, **common, **flags, **options)


def two_transformers(**options):
    return nn.Sequential(transformer(**options), transformer(**options))


def attention(**options):
    return te.MultiheadAttention(
        H, HEADS, attention_dropout=0.0, input_layernorm=True, set_parallel_mode=True, fuse_qkv_params=True, **options
    )


MAKE = {  # how each layer is made, and its roundings for assert_accurate
    "row": (lambda **o: linear("row", **(dict(ub_name="proj") if "ub_overlap_ag" in o else {}), **o), 40),
    "column": (lambda **o: linear("column", **(dict(ub_name="qkv") if "ub_overlap_ag" in o else {}), **o), 40),
    "layernorm column": (
        lambda **o: te.LayerNormLinear(
            H, 3 * H, parallel_mode="column", **(dict(ub_name="qkv") if "ub_overlap_ag" in o else {}), **o
        ),
        80,
    ),
    "mlp": (lambda **o: te.LayerNormMLP(H, FFN, set_parallel_mode=True, **o), 160),
    "attention": (attention, 160),
    "transformer": (transformer, 250),
    "two transformers": (two_transformers, 500),
}
CASES = {
    "L1": ("row", BULK), "L2": ("column", BULK), "L3": ("column", DGRAD), "L4": ("layernorm column", BULK),
    "L5": ("layernorm column", DGRAD), "L6": ("mlp", BULK), "L7": ("mlp", DGRAD), "L8": ("attention", BULK),
    "L9": ("attention", DGRAD), "L10": ("transformer", BULK), "L11": ("transformer", DGRAD),
    "L12": ("two transformers", BULK), "L13": ("two transformers", DGRAD),
}  # fmt: skip


@contextlib.contextmanager
def initialized(ctx, dtype, flags, **options):
    """Collective. Userbuffers for S * B tokens, with the configuration that the flags need, in a block."""
    options.setdefault("ub_cfgs", REDUCING if "ub_overlap_rs_dgrad" in flags else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of options without effect
        te.initialize_ub([S * B, 3 * H], ctx.size, dtype=dtype, **options)
    try:
        yield
    finally:
        te.destroy_ub()


def parallel(ctx, dtype, **options):
    return dict(
        sequence_parallel=True, tp_group=ctx.group.process_group, tp_size=ctx.size, params_dtype=dtype,
        device=ctx.device, **options,
    )  # fmt: skip


def step(layer, x, dy):
    """(y, dx, gradients by name) of one forward and backward."""
    layer.zero_grad()
    leaf = x.detach().clone().requires_grad_()
    y = layer(leaf)
    y.backward(dy)
    return y.detach(), leaf.grad, {name: parameter.grad for name, parameter in layer.named_parameters()}


def sum_marked(ctx, layer, grads):
    """Collective. Gradients of parameters that each rank used on its own rows, summed over ranks in fp64."""
    marked = [name for name, parameter in layer.named_parameters() if getattr(parameter, "sequence_parallel", False)]
    if not marked:
        return grads
    everyone = ctx.group.gather({name: grads[name].cpu().double() for name in marked})
    return grads | {name: sum(parts[name] for parts in everyone).to(grads[name]) for name in marked}


def run_case(ctx, kind, flags, dtype, steps=STEPS, roundings=None, **layer_options):
    """The layer with overlap, without it, and whole in fp64, on two inputs in turns.

    What is wrong with a single call shows in the first two steps, what one call leaves to the next in the others.
    """
    make, allowed = MAKE[kind]
    allowed = roundings or allowed
    layer = make(**parallel(ctx, dtype), **flags, **layer_options)
    plain = make(**parallel(ctx, dtype), **layer_options)
    whole = make(params_dtype=torch.float64, device="cpu", **layer_options)
    fill(layer, 3, ctx.rank)
    plain.load_state_dict(layer.state_dict())
    whole.load_state_dict(whole_state(ctx, layer))
    rows = slice(ctx.rank * S // ctx.size, (ctx.rank + 1) * S // ctx.size)
    everything = slice(None)
    x_rows, y_rows = (everything if kind == "row" else rows), (everything if "column" in kind else rows)
    split = lambda t, yes: t.chunk(ctx.size, -1)[ctx.rank].contiguous() if yes else t  # noqa: E731
    inputs = []
    for seed in (0, 10)[:steps]:
        x = normal((S, B, 3 * H if kind == "row" else H), dtype, seed)
        dy = normal((S, B, 3 * H if "column" in kind else H), dtype, seed + 1)
        mine = split(x, kind == "row")[x_rows].to(ctx.device), split(dy, "column" in kind)[y_rows].to(ctx.device)
        y, dx, grads = step(whole, x.double(), dy.double())
        wanted = {name: own_part(ctx, parameter, grads[name]) for name, parameter in layer.named_parameters()}
        inputs.append((mine, split(y, "column" in kind)[y_rows], split(dx, kind == "row")[x_rows], wanted))
    for index in range(steps):
        late(ctx, index % ctx.size, 0.02)
        mine, want_y, want_dx, wanted = inputs[index % len(inputs)]
        for which, candidate in (("overlapped", layer), ("distributed", plain))[: 1 if index >= len(inputs) else 2]:
            y, dx, grads = step(candidate, *mine)
            grads = sum_marked(ctx, candidate, grads)
            assert_accurate(y, want_y, allowed, f"{which} y")
            assert_accurate(dx, want_dx, allowed, f"{which} dx")
            for name, want in wanted.items():
                assert_accurate(grads[name], want, allowed, f"{which} gradient of {name}")


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("case", CASES)
def test_layers_with_overlap(ctx, case):
    kind, flags = CASES[case]
    with initialized(ctx, torch.float32, flags):
        run_case(ctx, kind, flags, torch.float32)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", ["L1", "L2", "L3", "L6", "L13"])
def test_layers_with_overlap_in_bf16(ctx, case):
    kind, flags = CASES[case]
    with initialized(ctx, torch.bfloat16, flags):
        # Stored values are rounded between the products as well, and sums of marked gradients once more.
        run_case(ctx, kind, flags, torch.bfloat16, steps=1, roundings=40 if "transformer" in kind else 20)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", ["L1", "L2", "L4", "L6", "L8", "L10"])
def test_cublasmp_semantics_replace_bulk_overlap_and_say_so(ctx, case):
    kind, flags = CASES[case]
    with initialized(ctx, torch.float32, flags, with_cublasmp=True):
        assert te.using_cublasmp_backend()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run_case(ctx, kind, flags, torch.float32, steps=1)
        replaced = [str(w.message) for w in told if "has no bulk overlap; dx is reduced inside" in str(w.message)]
        assert bool(replaced) == (kind != "row") and len(replaced) <= 2


@contextlib.contextmanager
def watched_beside(entered):
    """`entered` receives the name of each collective that runs beside a GEMM in the block."""
    beside = communicators.CommOverlapCore.beside

    def watch(comm, collective, *rest):
        entered.append(collective.__name__)
        return beside(comm, collective, *rest)

    with mock.patch.object(communicators.CommOverlapCore, "beside", watch):
        yield


@pytest.mark.ranks(2)
def test_linear_overlaps_with_ub_bulk_wgrad_alone(ctx):
    """On either backend, dx is not reduced by itself: beside wgrad, or with cublasmp semantics inside its GEMM."""
    flags = dict(ub_overlap_ag=True, ub_bulk_wgrad=True)
    for cublasmp, inside in ((False, "reduce_scatter"), (True, "matmul_reduce_scatter")):
        with initialized(ctx, torch.float32, flags, with_cublasmp=cublasmp):
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                run_case(ctx, "column", flags, torch.float32, steps=1)
                layer = linear("column", ub_name="qkv", **parallel(ctx, torch.float32), **flags)
            assert sum("has no bulk overlap; dx is reduced inside" in str(w.message) for w in told) == 2 * cublasmp
            x = torch.ones(S // ctx.size, B, H, device=ctx.device, requires_grad=True)
            y = layer(x)
            entered = []
            with launches() as launched, watched_beside(entered):
                y.sum().backward()
            assert [name for name, _ in operations(launched)] == ["all_gather", inside]
            assert entered == (["all_gather"] if cublasmp else ["reduce_scatter"])


def test_linear_and_its_kin_refuse_what_they_cannot_use():
    """By name, of arguments and of inputs, on one device; what is right works afterwards."""
    cpu = dict(device="cpu")
    layer, attention = te.LayerNormLinear(8, 8, **cpu), te.MultiheadAttention(8, 2, **cpu)
    x = torch.ones(3, 2, 8)
    refused = [
        *((lambda size=size: te.Linear(size, 8, **cpu), "in_features") for size in (0, -8, 2.5, "8", None, [8])),
        (lambda: te.Linear(8, 8, init_method=3, **cpu), "init_method=3 must be a function or None"),
        (lambda: te.Linear(8, 8, get_rng_state_tracker="x", **cpu), "get_rng_state_tracker='x' must be a function"),
        (lambda: te.Linear(8, 8, get_rng_state_tracker=lambda: None, **cpu), r"returned NoneType, which has no fork\("),
        *((lambda split=split: te.Linear(8, 8, parameters_split=split, **cpu), "parameters_split")
          for split in ("qkv", 3, [], {}, 3.0)),
        *((lambda split=split, each=each: each(8, 8, parameters_split=split, **cpu), f"_split has {found}, but its n")
          for each in (te.Linear, te.LayerNormLinear)
          for split, found in ((("q", "q"), "'q'"), (("a.b", "c"), "'a.b'"), ((1, 2), "1"), ({"a.b": 8}, "'a.b'"),
                               (("layer_norm", "v"), "'layer_norm'"), (([],), r"\[\]"))),
        *((lambda flag=flag, wrong=wrong: te.Linear(8, 8, **{flag: wrong}, **cpu), f"Linear: {flag}=.* must be True or")
          for flag in ("sequence_parallel", "bias", "return_bias", "ub_overlap_ag", "ub_bulk_wgrad")
          for wrong in ("False", "no", 1, x, [])),
        *((lambda kind=kind: kind(8, zero_centered_gamma="no", **cpu), f"{kind.__name__}: zero_centered_gamma='no'")
          for kind in (te.LayerNorm, te.RMSNorm)),
        (lambda: te.LayerNormLinear(8, 8, zero_centered_gamma="no", **cpu), "LayerNormLinear: zero_centered_gamma='n"),
        (lambda: te.LayerNormMLP(8, 8, set_parallel_mode="no", **cpu), "LayerNormMLP: set_parallel_mode='no' must be"),
        (lambda: te.MultiheadAttention(8, 2, fuse_qkv_params="no", **cpu), "fuse_qkv_params='no' must be True or"),
        (lambda: te.TransformerLayer(8, 8, 2, bias="no", **cpu), "TransformerLayer: bias='no' must be True or False"),
        (lambda: te.TransformerLayer(8, 8, 2, kv_channels=0, **cpu), "kv_channels=0 must be a positive integer"),
        (lambda: te.DotProductAttention(2, 0), "DotProductAttention: kv_channels=0 must be a positive integer"),
        *((lambda wrong=wrong: te.TransformerLayer(8, 8, 2, layer_type=wrong, **cpu), "layer_type=.* is not supported")
          for wrong in ([], "", "decoder")),
        (lambda: te.Linear(10**30, 8, **cpu), "in_features=10+ must be a positive integer, no larger than torch can"),
        (lambda: te.Linear(8, 8, **cpu)(x, rows=3), "rows=3 must be every rank's number of rows"),
        *((lambda rows=rows: te.Linear(8, 8, **cpu)(x, rows=rows), f"Linear: rows={found} must be a whole number")
          for rows, found in (((None, None), "None"), ("ab", "'a'"))),
        (lambda: te.gather_along_first_dim(x, None, "x"), "gather_along_first_dim: async_op='x' must be True or False"),
        (lambda: te.Linear(8, 8, tp_group="world", **cpu), "tp_group: takes .* or a DeviceMesh .* not str"),
        (lambda: te.LayerNormLinear(8, 8, eps="x", **cpu), "eps='x' must be a number"),
        (lambda: te.RMSNorm(8, device="nowhere"), "RMSNorm: device='nowhere' is none that parameters can be on"),
        (lambda: te.Linear(8, 8, params_dtype=torch.int8, **cpu), "Linear: dtype=torch.int8 has no gradient"),
        (lambda: te.MultiheadAttention(8, 2, qk_norm_type=x, **cpu), "(?s)qk_norm_type=.* must be no array"),
        (lambda: te.gather_along_first_dim(x.to_sparse(), None), "inp must be a strided tensor"),
        (lambda: te.LayerNormMLP(0, 8, **cpu), "hidden_size=0 must be a positive integer"),
        (lambda: te.LayerNormMLP(8, 8, eps=-1.0, **cpu), "eps=-1.0 must be a number"),
        (lambda: te.LayerNormMLP(8, 8, activation=["gelu"], **cpu), "activation=.* is unknown"),
        (lambda: te.MultiheadAttention(8, 0, **cpu), "num_attention_heads=0 must be a positive integer"),
        (lambda: te.MultiheadAttention(8, 2, num_gqa_groups=0, **cpu), "num_gqa_groups=0 must be a positive"),
        (lambda: te.MultiheadAttention(8, 2, attention_dropout=1.5, **cpu), "attention_dropout=1.5 must be a number"),
        (lambda: te.MultiheadAttention(8, 2, window_size=3, **cpu), "window_size=3 is not supported"),
        (lambda: te.TransformerLayer(8, 8, 2, hidden_dropout="x", **cpu), "hidden_dropout='x' must be a number"),
        *((lambda wrong=wrong, each=each: each(wrong), "the input .* must be a tensor of")
          for wrong in (None, 3, [1.0], x[0, 0], x.numpy()) for each in (layer, attention, te.Linear(8, 8, **cpu))),
        (lambda: attention(x, rotary_pos_emb=3), "angles=3 must be a tensor, or a pair of them"),
        (lambda: attention(x, rotary_pos_emb=(x,) * 3), "rotary_pos_emb: it has 3 tensors; pass one, or a pair"),
        (lambda: attention(x, rotary_pos_emb=torch.ones(3, 1, 1, 3)), "an even number of at most 4"),
        *((lambda wrong=wrong: attention(wrong), "the input has shape .* and must be a tensor of \\[s")
          for wrong in (x[0], x[None])),
        *((lambda wrong=wrong, each=each: each(wrong, **cpu), message) for each in (te.LayerNorm, te.RMSNorm)
          for wrong, message in ((-3, "normalized_shape=-3 must be at least 1"), (2.5, "2.5 must be a size or several"),
                                 ((2, "x"), "normalized_shape='x' must be a whole number"))),
        (lambda: te.RMSNorm(8, eps="x", **cpu), "RMSNorm: eps='x' must be a number"),
        (lambda: te.LayerNormMLP(8, 8, output_layer_init_method=3, **cpu), "output_layer_init_method=3 must be a func"),
        (lambda: te.Linear(8, 8, ub_name=3, **cpu), "Linear: ub_name=3 must be a name or None"),
        (lambda: te.Linear(8, 8, device=10**30), "Linear: device=10+ is none that parameters can be on"),
        (lambda: attention(x, checkpoint_core_attention=x), "(?s)checkpoint_core_attention=.* must be True or False"),
        (lambda: attention(x, core_attention_bias_type=x.numpy()), "core_attention_bias_type is not supported"),
        (lambda: te.Linear(8, 8, **cpu)(x, rows=x[0, 0, 0]), "rows=tensor.* must be every rank's number of rows"),
        (lambda: te.Linear(8, 8, **cpu)(x.double()), "the input is torch.float64, but the weight torch.float32"),
        *((lambda name=name, each=each: each(8, 8, **{name: x.numpy()}, **cpu), f"(?s){name}=.* must be no array")
          for each, name in ((te.Linear, "parallel_mode"), (te.LayerNormLinear, "normalization"),
                             (te.LayerNormMLP, "activation"), (te.Linear, "symmetric_ar_type"))),
        *((lambda wrong=wrong: te.Linear(8, 8, parameters_split=wrong, **cpu), "(?s)parameters_split=.* must be a dict")
          for wrong in (3, iter(()))),
        (lambda: te.load_ub_cfgs(0), "load_ub_cfgs: path=0 must be a path"),
        (lambda: attention(x, rotary_pos_emb=torch.ones(3, 1, 1, 4, device="meta")), "angles are on meta, but the"),
        *((lambda wrong=wrong, each=each: each(wrong), message) for each in (layer, attention, te.Linear(8, 8, **cpu))
          for wrong, message in ((x[..., :4], r"shape \[3, 2, 4\], but its last dimension must be 8"),
                                 (x.to("meta"), "input is on meta, but the layer on cpu"),
                                 (torch.nested.nested_tensor([x], layout=torch.jagged), "one tensor, not a nested"))),
        (lambda: te.RMSNorm(8, **cpu)(x[..., :4]), r"x is \[3, 2, 4\] on cpu, but must be \[..., 8\] on cpu"),
        (lambda: attention(x, attn_mask_type=x), "(?s)attn_mask_type=.* is not supported"),
        (lambda: attention(x, "x", attn_mask_type="arbitrary"), "needs an attention_mask of booleans"),
        (lambda: attention(x, x[None, None] > 0, attn_mask_type="arbitrary"), r"fit the scores, \[2, 2, 3, 3\]"),
        (lambda: te.DotProductAttention(2, 4)(x, x.to_sparse(), x), "key must be a strided tensor"),
    ]  # fmt: skip
    for wrong, message in refused:
        with pytest.raises((TypeError, ValueError), match=message):
            wrong()
    assert layer(x).shape == x.shape and attention(x).shape == x.shape
    assert te.RMSNorm(np.int64(8), **cpu)(x).shape == te.LayerNorm(torch.Size([8]), **cpu)(x).shape == x.shape


@pytest.mark.ranks(2)
def test_linear_and_its_kin_raise_on_every_rank_what_one_alone_has_wrong(ctx):
    """As its error, with its rank, before any of them has the layer; so do layers inside of layers."""
    last = ctx.rank == 1
    with initialized(ctx, torch.float32, BULK):
        common = parallel(ctx, torch.float32)
        column = common | {"parallel_mode": "column", "ub_overlap_ag": True, "ub_name": "qkv"}
        split = common | {"set_parallel_mode": True}
        alone = {"tp_group": None} if last else {}
        refused = [
            (lambda: te.Linear(16, 33 if last else 32, **column), ValueError, "out_features=33 doesn't divide by 2"),
            (lambda: te.Linear(16, 32, **column | {"bias": "no" if last else True}), TypeError, "Linear: bias='no'"),
            (lambda: te.Linear(16, 32, **column | {"tp_group": "world"} if last else column), TypeError, "tp_group:"),
            (lambda: te.Linear(16, 32, **column, **{"nothing": 1} if last else {}), TypeError, "argument 'nothing'"),
            (lambda: te.Linear(16, 32, **column | alone | {"tp_size": 1.5 if last else 2}), ValueError, "tp_size=1.5"),
            (lambda: te.Linear(16, 32, **column | {"ub_name": "moe" if last else "qkv"}), tkernels.TkernelsError,
             "UB for moe_fprop is not registered"),
            (lambda: te.LayerNormLinear(16, 32, -1.0 if last else 1.0, **column), ValueError, "eps=-1.0 must be"),
            (lambda: te.LayerNormMLP(16, 32, activation="elu" if last else "relu", **split), ValueError, "='elu' is"),
            (lambda: te.MultiheadAttention(16, 3 if last else 4, **split), ValueError, "num_attention_heads=3 does"),
            (lambda: te.TransformerLayer(16, 33 if last else 32, 4, **split), ValueError, "LayerNormMLP: ffn_hid"),
            (lambda: te.TransformerLayer(16, 32, 4, normalization=3 if last else "RMSNorm", **split), ValueError,
             "LayerNormLinear: normalization=3 must be"),
        ]  # fmt: skip
        for wrong, kind, message in refused:
            with pytest.raises(kind, match=message) as caught:
                wrong()
            assert str(caught.value).endswith("(on rank 1)")
        assert te.TransformerLayer(16, 32, 4, **split) and te.Linear(16, 32, **column)
        if last:
            te.Linear(16, 32, device=ctx.device)  # a layer of one rank meets nobody
        with pytest.raises(ValueError, match="in_features=0 must be"):
            te.Linear(0, 32, device=ctx.device)
        assert ctx.group.gather(ctx.rank) == [0, 1]


def test_linear_refuses_the_transforms_of_torch_func():
    layer = te.Linear(8, 8, device="cpu")
    for transform in (torch.func.vmap(layer), torch.func.grad(lambda x: layer(x).sum())):
        with pytest.raises(NotImplementedError, match="which torch.func .* can't follow; use backward, or Column"):
            transform(torch.ones(3, 2, 8))


@pytest.mark.ranks(2)
def test_linear_says_that_overlap_needs_sequence_parallel(ctx):
    common = dict(tp_group=ctx.group.process_group, device=ctx.device)
    for mode, options, told in (("column", DGRAD, 1), ("row", BULK, 1), ("row", dict(ub_bulk_dgrad=True), 0)):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            linear(mode, ub_name="qkv", **options, **common)
        assert sum("have no effect without sequence_parallel=True" in str(w.message) for w in found) == told, mode


def test_the_judgement_sees_wrong_layers():
    """Two ranks' parts exchanged, one row off, a bias a rank, a value that is not a number."""
    truth = normal((8, 6), torch.float64, 1)
    assert_accurate(truth.float(), truth, 2)
    exchanged, shifted, biased, broken = truth.float().roll(4, 0), truth.float(), truth.float() + 0.01, truth.float()
    shifted[3] = truth[4].float()
    broken[0, 0] = float("nan")
    for wrong in (exchanged, shifted, biased, broken):
        with pytest.raises(AssertionError, match="elements are off"):
            assert_accurate(wrong, truth, 500)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("flags", [BULK, DGRAD], ids=["bulk", "reducing dgrad"])
def test_integers_are_exact_in_bf16(ctx, flags):
    """Every bit of Linear, both modes, with another all-gather between forward and backward."""
    values = lambda shape, seed: integers(shape, torch.bfloat16, seed, low=-1, high=1)  # noqa: E731
    with initialized(ctx, torch.bfloat16, flags):
        for mode, name in (("column", "qkv"), ("row", "proj")):
            layer = linear(mode, ub_name=name, **parallel(ctx, torch.bfloat16), **flags)
            shape = (3 * H, H) if mode == "column" else (H, 3 * H)
            dim = 0 if mode == "column" else 1
            w, bias = values(shape, 1), values(shape[:1], 2)
            with torch.no_grad():
                layer.weight.copy_(w.chunk(ctx.size, dim)[ctx.rank])
                layer.bias.copy_(bias.chunk(ctx.size)[ctx.rank] if mode == "column" else bias)
            for round in range(STEPS):
                x, dy = values((S * B, shape[1]), 10 + round), values((S * B, shape[0]), 20 + round)
                of_x, of_y = (0, 1) if mode == "column" else (1, 0)
                mine = x.chunk(ctx.size, of_x)[ctx.rank].contiguous().to(ctx.device).requires_grad_()
                layer.zero_grad()
                y = layer(mine)
                te.get_ub(f"{name}_{'dgrad' if mode == 'row' else 'fprop'}").all_gather_matmul(
                    torch.ones_like(mine[:4, :8]).contiguous(), layer.weight[:8, :8].detach().contiguous()
                )
                y.backward(dy.chunk(ctx.size, of_y)[ctx.rank].contiguous().to(ctx.device))
                want_y = x.float() @ w.float().t() + bias.float()
                want_dx, want_dw = dy.float() @ w.float(), dy.float().t() @ x.float()
                for got, want, along in (
                    (y, want_y, of_y),
                    (mine.grad, want_dx, of_x),
                    (layer.weight.grad, want_dw, dim),
                ):
                    assert torch.equal(got.float().cpu(), want.chunk(ctx.size, along)[ctx.rank]), (mode, round)


def operations(launched):
    """(name, number of programs) of what waits for peers."""
    return [(operation_name(args["L"].OPERATION.value), programs) for _, programs, args in launched if "L" in args]


@pytest.mark.ranks(2, 4)
def test_what_travels_in_each_pass_of_a_layer(ctx):
    """What forward and backward launch, in order: no pass gathers or reduces more, or elsewhere, than it must."""
    gather, reduce = "all_gather", "reduce_scatter"
    gathering, reducing = "all_gather_matmul", "matmul_reduce_scatter"
    expected = {
        ("column", "bulk"): ([gathering], [gather, reduce]),  # x beside dgrad, dx beside wgrad
        ("column", "reducing"): ([gathering], [gather, reducing]),  # x beside dgrad, which reduces dx inside
        ("row", "bulk"): ([reducing], [gathering]),  # wgrad has the dy that dgrad gathered
        ("row", "reducing"): ([reducing], [gathering]),
    }
    for which, flags in (("bulk", BULK), ("reducing", DGRAD)):
        with initialized(ctx, torch.float32, flags):
            context = te.get_ub("qkv_fprop").context
            for mode, name in (("column", "fc1"), ("row", "proj")):
                layer = linear(mode, ub_name=name, **parallel(ctx, torch.float32), **flags)
                x = torch.ones(S if mode == "row" else S // ctx.size, B, layer.in_features, device=ctx.device)
                x.requires_grad_()
                with launches() as forward:
                    y = layer(x)
                with launches() as backward:
                    y.sum().backward()
                names = tuple([operation for operation, _ in operations(launched)] for launched in (forward, backward))
                assert names == expected[mode, which]
                if names[1] == [gather, reducing]:
                    # Both wait for peers, so each has its own multiprocessors, whichever is there first.
                    assert sum(programs for _, programs in operations(backward)) <= context.num_programs


@pytest.mark.ranks(2)
@pytest.mark.parametrize("flags", [BULK, DGRAD], ids=["bulk", "reducing dgrad"])
def test_bias_and_frozen_weights(ctx, flags):
    """F1 to F8: {bias} x {column, row} x {weight that requires a gradient}."""
    with initialized(ctx, torch.float32, flags):
        for mode, bias, trained in itertools.product(("column", "row"), (False, True), (True, False)):
            name = "fc1" if mode == "column" else "proj"
            layer = linear(mode, bias=bias, ub_name=name, **parallel(ctx, torch.float32), **flags)
            fill(layer, 7, ctx.rank)
            layer.weight.requires_grad_(trained)
            state = whole_state(ctx, layer)
            of_x, of_y = (0, 1) if mode == "column" else (1, 0)
            x = normal((S * B, layer.weight.shape[1] * (ctx.size if mode == "row" else 1)), torch.float32, 1)
            dy = normal((S * B, layer.weight.shape[0] * (ctx.size if mode == "column" else 1)), torch.float32, 2)
            part = lambda t, dim: t.chunk(ctx.size, dim)[ctx.rank].contiguous()  # noqa: E731
            mine = part(x, of_x).to(ctx.device).requires_grad_()
            y = layer(mine)
            y.backward(part(dy, of_y).to(ctx.device))
            want = x.double() @ state["weight"].t() + state.get("bias", torch.zeros((), dtype=torch.float64))
            assert_accurate(y, part(want, of_y), 40)
            assert_accurate(mine.grad, part(dy.double() @ state["weight"], of_x), 40)
            assert (layer.weight.grad is not None) == trained
            if trained:
                assert_accurate(layer.weight.grad, part(dy.double().t() @ x.double(), 0 if mode == "column" else 1), 40)
            if bias:
                grads = sum_marked(ctx, layer, {"bias": layer.bias.grad, "weight": layer.weight.grad})
                whole_bias = dy.double().sum(0)
                assert_accurate(grads["bias"], part(whole_bias, 0) if mode == "column" else whole_bias, 40)


@pytest.mark.ranks(2)
def test_a_bias_counts_once(ctx):
    with initialized(ctx, torch.float32, BULK):
        for mode, name in (("column", "qkv"), ("row", "proj")):
            layer = linear(mode, ub_name=name, **parallel(ctx, torch.float32), **BULK)
            with torch.no_grad():
                layer.weight.zero_()
                layer.bias.fill_(1000.0)
            x = torch.ones(S // 2 if mode == "column" else S, B, layer.in_features, device=ctx.device)
            assert layer(x).eq(1000.0).all()
            kept = linear(mode, ub_name=name, return_bias=True, **parallel(ctx, torch.float32), **BULK)
            kept.load_state_dict(layer.state_dict())
            y, bias = kept(x)
            assert y.eq(0.0).all() and bias is kept.bias
            assert kept.bias.tensor_model_parallel == (mode == "column")
            assert getattr(kept.bias, "sequence_parallel", False) == (mode == "row")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("flags", [BULK, DGRAD], ids=["bulk", "reducing dgrad"])
def test_weight_gradients_can_be_fused_and_deferred(ctx, flags, monkeypatch):
    """Of rows that the copy engine has moved: deferred gradients have their own, whatever lands after them."""
    chosen = communicators.overlap_config
    monkeypatch.setattr(communicators, "overlap_config", lambda *a, **o: replace(chosen(*a, **o), num_comm=0))
    delayed = {key: value for key, value in flags.items() if key != "ub_bulk_wgrad"}
    with initialized(ctx, torch.float32, flags):
        for mode, name in (("column", "fc1"), ("row", "fc2")):
            common = dict(ub_name=name, **parallel(ctx, torch.float32))
            plain = linear(mode, **common, **flags)
            fill(plain, 5, ctx.rank)
            x = normal((S if mode == "row" else S // 2, B, plain.in_features), torch.float32, ctx.rank).to(ctx.device)
            dy = normal((S if mode == "column" else S // 2, B, plain.out_features), torch.float32, 9 + ctx.rank)
            y, dx, grads = step(plain, x, dy.to(ctx.device))
            for fuse, delay in ((True, False), (False, True), (True, True)):
                layer = linear(
                    mode,
                    fuse_wgrad_accumulation=fuse,
                    delay_wgrad_compute=delay,
                    **common,
                    **(delayed if delay else flags),
                )
                layer.load_state_dict(plain.state_dict())
                assert getattr(layer.weight, "skip_backward_post_hook", False) == delay
                told = []
                layer.register_wgrad_accumulation_and_reduce_hooks(lambda: told.append(len(told)))  # noqa: B023
                layer.weight.main_grad = torch.ones_like(layer.weight, dtype=torch.float32)
                for times in (1, 2):
                    mine = x.clone().requires_grad_()
                    layer(mine).backward(dy.to(ctx.device))
                    if delay:
                        te.get_ub(f"{name}_dgrad").context.workspace().landing.fill_(0xFF)
                        assert layer.need_backward_dw() and layer.weight.grad is None or times == 2
                        assert len(told) == 2 * (times - 1)
                        layer.backward_dw()
                        layer.backward_dw()
                        assert len(told) == 2 * times
                    torch.testing.assert_close(mine.grad, dx)
                    got = layer.weight.main_grad - 1.0 if fuse else layer.weight.grad
                    torch.testing.assert_close(got, times * grads["weight"], atol=1e-5, rtol=1e-5)
                    assert (layer.weight.grad is None) == fuse


@pytest.mark.ranks(2)
def test_megatrons_marks_on_a_weight(ctx):
    """grad_added_to_main_grad, overwrite_main_grad, zero_out_wgrad; main_grad in fp32 is rounded once."""
    with initialized(ctx, torch.bfloat16, BULK):
        layer = linear("row", ub_name="proj", fuse_wgrad_accumulation=True, **parallel(ctx, torch.bfloat16), **BULK)
        fill(layer, 5, ctx.rank)
        x = normal((S, B, layer.in_features), torch.bfloat16, ctx.rank).to(ctx.device)
        dys = [normal((S // 2, B, H), torch.bfloat16, 9 + rank) for rank in range(2)]
        with pytest.raises(ValueError, match="adds to weight.main_grad, but the weight .* has none"):
            layer(x).backward(dys[ctx.rank].to(ctx.device))
        weight = layer.weight
        weight.main_grad = torch.full(weight.shape, 5.0, device=ctx.device)
        weight.grad_added_to_main_grad, weight.overwrite_main_grad, weight.zero_out_wgrad = False, True, True
        layer.zero_grad()
        layer(x).backward(dys[ctx.rank].to(ctx.device))
        assert weight.grad_added_to_main_grad is True and weight.grad.eq(0.0).all()
        truth = torch.cat(dys).flatten(0, 1).double().t() @ x.cpu().flatten(0, 1).double()
        assert_accurate(weight.main_grad, truth, 40)
        with pytest.raises(AssertionError):  # rounded to bf16 first
            assert_accurate(truth.bfloat16().float(), truth, 40)


class Bucket:
    def __init__(self, lease):
        self.lease = lease


@pytest.mark.ranks(2)
@pytest.mark.parametrize("delay", [False, True], ids=["fused", "deferred"])
def test_fused_gradients_are_reported_where_they_are_produced(ctx, delay):
    from tkernels.layers.lease import Slot

    with initialized(ctx, torch.float32, BULK):
        flags = dict(ub_overlap_ag=True, ub_overlap_rs=True)
        layer = linear(
            "row", bias=False, ub_name="proj", fuse_wgrad_accumulation=not delay, delay_wgrad_compute=delay,
            **parallel(ctx, torch.float32), **flags,
        )  # fmt: skip
        memory = torch.zeros_like(layer.weight)
        layer.weight.main_grad = memory.view_as(layer.weight)
        slot, ready = Slot(memory, name="bucket"), []
        bucket = Bucket(slot.acquire())
        hooks = GradReadyHooks([layer.weight], ready.append, buckets=[bucket])
        x = normal((S, B, layer.in_features), torch.float32, ctx.rank).to(ctx.device)
        dy = normal((S // 2, B, H), torch.float32, 9 + ctx.rank).to(ctx.device)
        layer(x).backward(dy)
        layer.backward_dw()
        hooks.flush()
        assert ready == [bucket] and hooks.expected == {"parameter 0": 1}
        assert memory.ne(0.0).all() and layer.weight.grad is None


@pytest.mark.ranks(2)
def test_megatron_can_switch_overlap_off_on_a_layer(ctx):
    with initialized(ctx, torch.float32, BULK):
        layer = linear("column", ub_name="fc1", **parallel(ctx, torch.float32), **BULK)
        on = (layer.ub_overlap_ag_fprop, layer.ub_bulk_dgrad, layer.ub_bulk_wgrad, layer.ub_overlap_rs_fprop)
        assert on == (True, True, True, False) and not layer.ub_overlap_rs_dgrad and not layer.ub_overlap_ag_dgrad
        layer.ub_overlap_rs_fprop = layer.ub_overlap_ag_dgrad = layer.ub_overlap_ag_fprop = False
        layer.ub_bulk_dgrad = layer.ub_bulk_wgrad = layer.ub_overlap_rs_dgrad = False
        layer.parallel_mode = None
        x = torch.ones(3, 2, H, device=ctx.device)
        te.destroy_ub()
        assert layer(x).shape == (3, 2, 3 * H // ctx.size)  # no rank is waited for


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode, ub_name", [("column", "fc1"), ("row", "proj")])
def test_linear_with_overlap_whose_sequence_is_no_longer_split_is_as_one_without(ctx, mode, ub_name):
    """As Megatron's text generation has it, which switches sequence_parallel off on every layer."""
    x = integers((S, B, H if mode == "column" else 3 * H // ctx.size), torch.float32, 1 + ctx.rank * (mode == "row"))
    options, seen = parallel(ctx, torch.float32), []
    with initialized(ctx, torch.float32, BULK):
        for overlaps in ({"ub_name": ub_name, **BULK}, {"sequence_parallel": False}):
            layer = linear(mode, **options | overlaps)
            fill(layer, 1, ctx.rank)
            layer.sequence_parallel = False
            own = x.to(ctx.device).requires_grad_()
            (y := layer(own)).square().sum().backward()
            seen.append((y, own.grad, *(parameter.grad for parameter in layer.parameters())))
    assert all(map(torch.equal, *seen))


def test_linear_and_recipes_have_what_megatron_sets_and_passes():
    assert te.Linear(4, 4, device="cpu").save_original_input is False
    assert te.DelayedScaling(params_dtype=torch.bfloat16, device="cuda").margin == 0


@pytest.mark.ranks(2)
def test_fewer_and_uneven_tokens(ctx):
    with initialized(ctx, torch.float32, BULK):
        column = linear("column", ub_name="qkv", **parallel(ctx, torch.float32), **BULK)
        row = linear("row", ub_name="proj", **parallel(ctx, torch.float32), **BULK)
        for layer in (column, row):
            fill(layer, 5, ctx.rank)
        states = whole_state(ctx, column), whole_state(ctx, row)
        for rows in ((3, 3), (5, 2), (0, 3), (8, 7)):
            x = normal((sum(rows), B, H), torch.float32, sum(rows))
            mine = x.split(rows)[ctx.rank].to(ctx.device).requires_grad_()
            y = row(column(mine, rows=rows), rows=rows)
            dy = normal(x.shape, torch.float32, 50)
            y.backward(dy.split(rows)[ctx.rank].to(ctx.device))
            leaf = x.double().requires_grad_()
            truth = leaf
            for state in states:
                truth = truth @ state["weight"].t() + state["bias"]
            truth.backward(dy.double())
            assert_accurate(y, truth.split(rows)[ctx.rank], 80) if y.numel() else None
            assert_accurate(mine.grad, leaf.grad.split(rows)[ctx.rank], 80) if y.numel() else None
        with pytest.raises(ValueError, match=r"don't fit; initialize_ub\(\) takes the largest number of tokens"):
            column(torch.ones(40, B, H, device=ctx.device))
        plain = linear("column", **parallel(ctx, torch.float32))
        with pytest.raises(ValueError, match=r"rows=\[10, 4\] needs overlap"):
            plain(mine, rows=(5, 2))
        with pytest.raises(TypeError, match="Linear: rows=7 must be every rank's number of rows"):
            column(mine, rows=7)


@pytest.mark.ranks(2)
def test_overlap_that_a_configuration_does_not_have_is_refused(ctx):
    with initialized(ctx, torch.float32, BULK):
        common = parallel(ctx, torch.float32)
        with pytest.raises(ValueError, match="ub_overlap_rs_dgrad needs qkv_dgrad to be an overlapped RS, but it is"):
            linear("column", ub_name="qkv", ub_overlap_rs_dgrad=True, **common)
        with pytest.raises(ValueError, match="ub_overlap_ag_fprop needs proj_fprop to be an overlapped AG"):
            linear("column", ub_name="proj", ub_overlap_ag=True, **common)
        with pytest.raises(KeyError, match="UB for moe_fprop is not registered"):
            linear("column", ub_name="moe", ub_overlap_ag=True, **common)
        differ = r"Linear: the layers .* differ in ub_overlap_ag of Linear\(qkv\) \(True and False\)"
        with pytest.raises(tkernels.MismatchError, match=differ):
            linear("column", ub_name="qkv", ub_overlap_ag=ctx.rank == 0, **common)
        for kind, sizes, options in (
            (te.Linear, (8, 16), {"bias": (True, False)}),
            (te.LayerNormLinear, (8, 16), {"normalization": ("LayerNorm", "RMSNorm")}),
            (te.LayerNormMLP, (8, 16), {"activation": ("gelu", "relu")}),
            (te.LayerNormMLP, (8, 16), {"eps": (1e-5, 1e-6)}),
        ):
            (option, values), = options.items()
            with pytest.raises(tkernels.MismatchError, match=f"{kind.__name__}: the layers .* differ in {option} of"):
                split = {"set_parallel_mode": True} if kind is te.LayerNormMLP else {}
                kind(*sizes, **{option: values[ctx.rank]}, **split, **common)
        with pytest.raises(tkernels.MismatchError, match="differ in out_features of Linear"):
            te.Linear(8, 16 + 8 * ctx.rank, **common)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        dict(activation="swiglu", normalization="RMSNorm", zero_centered_gamma=True, bias=False),
        dict(activation="srelu", checkpoint=True),
        dict(activation="relu", return_layernorm_output_gathered=True, return_bias=True),
    ],
    ids=["swiglu", "recomputed", "gathered norm"],
)
def test_variants_of_the_mlp(ctx, options):
    with initialized(ctx, torch.float32, BULK):
        layer = te.LayerNormMLP(H, FFN, set_parallel_mode=True, **parallel(ctx, torch.float32), **BULK, **options)
        fill(layer, 3, ctx.rank)
        state = whole_state(ctx, layer)
        if options["activation"] == "swiglu":  # each rank has its gate above its up-projection
            parts = ctx.group.gather(layer.fc1_weight.detach().cpu().double())
            halves = [part.chunk(2) for part in parts]
            state["fc1_weight"] = torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
        whole = te.LayerNormMLP(H, FFN, params_dtype=torch.float64, device="cpu", **options)
        whole.load_state_dict(state)
        x, dy = normal((S, B, H), torch.float32, 1), normal((S, B, H), torch.float32, 2)
        mine, leaf = x.chunk(ctx.size)[ctx.rank].to(ctx.device).requires_grad_(), x.double().requires_grad_()
        y, truth = layer(mine), whole(leaf)
        if options.get("return_bias"):
            (y, bias, normed), (truth, _, want) = y, truth
            assert bias is layer.fc2_bias
            assert_accurate(normed, want, 40)
            (normed.sum() / ctx.size).backward(retain_graph=True)
            want.sum().backward(retain_graph=True)
        y.backward(dy.chunk(ctx.size)[ctx.rank].to(ctx.device))
        truth.backward(dy.double())
        assert_accurate(y, truth.chunk(ctx.size)[ctx.rank], 160)
        assert_accurate(mine.grad, leaf.grad.chunk(ctx.size)[ctx.rank], 160)
        assert_accurate(layer.fc2_weight.grad, whole.fc2_weight.grad.chunk(ctx.size, 1)[ctx.rank], 160)


def test_a_recomputed_mlp_computes_twice_where_backward_comes(monkeypatch):
    layer, calls = te.LayerNormMLP(H, FFN, device="cpu", checkpoint=True), []
    forward = layer._forward
    monkeypatch.setattr(layer, "_forward", lambda *arguments: calls.append(None) or forward(*arguments))
    y = layer(torch.ones(2, 1, H))
    assert len(calls) == 1
    y.sum().backward(retain_graph=True)
    assert len(calls) == 2
    once = layer.fc1_weight.grad.clone()
    y.sum().backward()
    assert len(calls) == 3 and torch.equal(layer.fc1_weight.grad, 2 * once)
    with torch.no_grad():
        layer(torch.ones(2, 1, H))
    assert len(calls) == 4


@pytest.mark.ranks(2)
def test_layers_take_checkpoints_copies_and_compilation_but_no_second_derivative(ctx):
    te.initialize_ub([S * B, H], 2, dtype=torch.float32)
    torch.manual_seed(0)
    layer = linear("row", sequence_parallel=True, tp_size=2, ub_name="proj", device=ctx.device, **BULK)
    layer.load_state_dict(layer.state_dict() | {"_extra_state": torch.zeros(3)})  # TransformerEngine's, about fp8
    other = copy.deepcopy(layer)
    for each in (layer, other, other.to_empty(device=ctx.device)):
        assert each.bias.sequence_parallel and each.weight.tensor_model_parallel and each.weight.partition_dim == 1
    x = normal((S, B, 3 * H // 2), torch.float32, ctx.rank, device=ctx.device).requires_grad_()
    y = layer(x)
    assert torch.equal(torch.compile(layer, backend="aot_eager")(x), y)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.square().sum().backward()
    with pytest.raises(ValueError, match=r"x has shape \(16, 0, 48\), and thus no tokens"):
        layer(x[:, :0])
    te.destroy_ub()


def test_what_transformer_engine_keeps_about_fp8_is_left_out_of_a_state_dict():
    layer = te.TransformerLayer(H, FFN, HEADS, device="cpu")
    state = layer.state_dict()
    for name in ("self_attention.proj.", "self_attention.core_attention.", "self_attention.core_attention.fused."):
        state[f"{name}_extra_state"] = torch.zeros(3)
    layer.load_state_dict(state)
    for name in ("self_attention.core_attention.weight", "layernorm_mlp.other._extra_state"):
        with pytest.raises(RuntimeError, match=f'Unexpected key.*"{name}"'):
            layer.load_state_dict(state | {name: torch.zeros(3)})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("gathered", [True, False], ids=["gathered", "own rows"])
def test_a_linear_layer_returns_its_norms_output_and_takes_its_gradient(ctx, gathered):
    with initialized(ctx, torch.float32, BULK):
        options = dict(parallel_mode="column", return_layernorm_output=True, return_layernorm_output_gathered=gathered)
        layer = te.LayerNormLinear(H, 3 * H, ub_name="qkv", **parallel(ctx, torch.float32), **BULK, **options)
        fill(layer, 3, ctx.rank)
        whole = te.LayerNormLinear(H, 3 * H, params_dtype=torch.float64, device="cpu", **options)
        whole.load_state_dict(whole_state(ctx, layer))
        x, dy = normal((S, B, H), torch.float32, 1), normal((S, B, 3 * H), torch.float32, 2)
        mine, leaf = x.chunk(ctx.size)[ctx.rank].to(ctx.device).requires_grad_(), x.double().requires_grad_()
        (y, normed), (truth, want) = layer(mine), whole(leaf)
        dnormed = normal((S, B, H), torch.float32, 3)
        if gathered:  # each rank has a part of the gradient of all rows
            theirs = dnormed.to(ctx.device) / ctx.size
        else:
            want, theirs = want.chunk(ctx.size)[ctx.rank], dnormed.chunk(ctx.size)[ctx.rank].to(ctx.device)
        assert_accurate(y, truth.chunk(ctx.size, -1)[ctx.rank], 80)
        assert_accurate(normed, want, 40)
        torch.autograd.backward([y, normed], [dy.chunk(ctx.size, -1)[ctx.rank].contiguous().to(ctx.device), theirs])
        torch.autograd.backward(whole(leaf), [dy.double(), dnormed.double()])
        assert_accurate(mine.grad, leaf.grad.chunk(ctx.size)[ctx.rank], 160)
        assert_accurate(layer.weight.grad, whole.weight.grad.chunk(ctx.size)[ctx.rank], 160)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["LayerNormLinear", "LayerNormMLP"])
def test_uneven_rows_are_refused_where_the_norms_output_is_gathered(ctx, kind):
    options = dict(return_layernorm_output_gathered=True, **parallel(ctx, torch.float32))
    options |= dict(set_parallel_mode=True) if kind == "LayerNormMLP" else dict(parallel_mode="column")
    layer = getattr(te, kind)(H, FFN, **options)
    with pytest.raises(ValueError, match=rf"{kind}: return_layernorm_output_gathered .* rows=\(5, 3\) can't be passed"):
        layer(torch.zeros((5, 3)[ctx.rank], B, H, device=ctx.device), rows=(5, 3))


@pytest.mark.ranks(2)
def test_layers_made_on_the_meta_device_initialize_their_parameters_late(ctx):
    def mlp(device):
        return te.LayerNormMLP(
            H, FFN, device=device, set_parallel_mode=True, tp_size=2, tp_group=ctx.group.process_group,
            zero_centered_gamma=True, delay_wgrad_compute=True,
        )  # fmt: skip

    torch.manual_seed(3)
    made = mlp(ctx.device)
    late = mlp("meta")
    late.reset_parameters(defer_init=True)
    assert all(parameter.is_meta for parameter in late.parameters())
    te.initialize_ub([S * B, H], 2, dtype=torch.float32)
    try:
        torch.manual_seed(3)
        late.reset_parameters()
    finally:
        te.destroy_ub()
    for (name, parameter), want in zip(late.named_parameters(), made.parameters(), strict=True):
        assert parameter.device == ctx.device and torch.equal(parameter, want), name
    assert late.fc1_weight.skip_backward_post_hook and late.fc1_weight.tensor_model_parallel


class TrackedGenerator:
    """A tracker of generators as Megatron's: what runs inside of fork() draws other numbers on each rank."""

    def __init__(self, seed):
        self.seed = seed

    @contextlib.contextmanager
    def fork(self):
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            yield


@pytest.mark.ranks(2)
def test_without_sequence_parallel_all_ranks_drop_the_same_hidden_features(ctx):
    tracker = TrackedGenerator(ctx.rank)
    layer = te.TransformerLayer(
        H, FFN, HEADS, hidden_dropout=0.5, attention_dropout=0.0, set_parallel_mode=True, device=ctx.device,
        get_rng_state_tracker=lambda: tracker, tp_group=ctx.group.process_group, tp_size=2,
    )  # fmt: skip
    fill(layer, 3, 0)
    torch.manual_seed(0)
    y = layer(normal((S, B, H), torch.float32, 1, device=ctx.device)).detach()
    assert 0 < y.eq(y[0, 0, 0]).sum() < y.numel()
    same = [torch.equal(y.cpu(), other) for other in ctx.group.gather(y.cpu())]
    assert same == [True, True]


@pytest.mark.ranks(2)
def test_grouped_queries_separate_parameters_and_autocast(ctx):
    with initialized(ctx, torch.bfloat16, BULK):
        options = dict(num_gqa_groups=2, input_layernorm=True, set_parallel_mode=True, attention_dropout=0.0)
        layer = te.MultiheadAttention(H, HEADS, **options, **parallel(ctx, torch.float32), **BULK)
        names = {name for name, _ in layer.layernorm_qkv.named_parameters()}
        assert {"query_weight", "key_weight", "value_weight", "query_bias"} <= names
        fill(layer, 3, ctx.rank)
        whole = te.MultiheadAttention(H, HEADS, params_dtype=torch.float64, device="cpu", **options)
        whole.load_state_dict(whole_state(ctx, layer))
        x, dy = normal((S, B, H), torch.float32, 1), normal((S, B, H), torch.float32, 2)
        mine = x.chunk(ctx.size)[ctx.rank].to(ctx.device).requires_grad_()
        with torch.autocast(ctx.device.type, torch.bfloat16):
            y = layer(mine)
        assert y.dtype is torch.bfloat16 and not y.isnan().any()
        y.backward(dy.chunk(ctx.size)[ctx.rank].to(ctx.device).bfloat16())
        truth = step(whole, x.double(), dy.double())
        assert_accurate(y, truth[0].chunk(ctx.size)[ctx.rank], 20)
        key = layer.layernorm_qkv.key_weight
        assert key.grad.dtype is torch.float32
        assert_accurate(key.grad.bfloat16(), truth[2]["layernorm_qkv.key_weight"].chunk(ctx.size)[ctx.rank], 20)


def test_a_whole_transformer_layer_is_torchs():
    """The truth of the tests above, against torch's own layer."""
    layer = te.TransformerLayer(
        H, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.float64, device="cpu",
        self_attn_mask_type="causal", fuse_qkv_params=True, qkv_weight_interleaved=False,
    )  # fmt: skip
    for name, parameter in layer.named_parameters():
        with torch.no_grad():
            parameter.copy_(normal(parameter.shape, torch.float64, len(name)) * 0.2)
    gelu = lambda x: nn.functional.gelu(x, approximate="tanh")  # noqa: E731
    theirs = nn.TransformerEncoderLayer(H, HEADS, FFN, 0.0, gelu, norm_first=True, dtype=torch.float64)
    pairs = {
        "self_attn.in_proj_": "self_attention.layernorm_qkv.", "self_attn.out_proj.": "self_attention.proj.",
        "linear1.": "layernorm_mlp.fc1_", "linear2.": "layernorm_mlp.fc2_",
        "norm1.": "self_attention.layernorm_qkv.layer_norm_", "norm2.": "layernorm_mlp.layer_norm_",
    }  # fmt: skip
    state = layer.state_dict()
    theirs.load_state_dict({t + end: state[o + end] for t, o in pairs.items() for end in ("weight", "bias")})
    x = normal((S, B, H), torch.float64, 1)
    mask = nn.Transformer.generate_square_subsequent_mask(S, dtype=torch.float64)
    torch.testing.assert_close(layer(x), theirs(x, src_mask=mask), atol=1e-12, rtol=1e-12)


def angles(length, features, **options):
    position = torch.arange(length, dtype=torch.float32)[:, None] / 100 ** torch.linspace(0, 1, features // 2)
    return torch.cat((position, position), dim=-1).view(length, 1, 1, features).to(**options)


@pytest.mark.ranks(2)
def test_queries_and_keys_are_rotated_by_their_positions(ctx):
    """Attention then depends on distances alone: angles that all begin later change nothing; others do."""
    layer = transformer(**parallel(ctx, torch.float32))
    fill(layer, 3, ctx.rank)
    x = normal((S, B, H), torch.float32, 1).chunk(ctx.size)[ctx.rank].to(ctx.device)
    width, table = H // HEADS, angles(S + 5, H // HEADS, device=ctx.device)
    plain, rotated, later = layer(x), layer(x, rotary_pos_emb=table), layer(x, rotary_pos_emb=table[5:])
    torch.testing.assert_close(rotated, later, atol=1e-5, rtol=1e-5)
    assert (rotated - plain).abs().max() > 0.01
    half = angles(S, width // 2, device=ctx.device)
    assert (layer(x, rotary_pos_emb=(half, half)) - rotated).abs().max() > 0.001
    for wrong in (table[: S - 1], angles(S, 2 * width, device=ctx.device), table[:, 0]):
        with pytest.raises(ValueError, match=rf"rotary_pos_emb: .* \[at least {S}, 1, 1, an even .* at most {width}\]"):
            layer(x, rotary_pos_emb=wrong)


def test_rotation_is_that_of_complex_numbers():
    x, turns = normal((3, 2, 2, 6), torch.float64, 1), angles(4, 4, dtype=torch.float64)
    for layout in ("sbhd", "bshd"):
        turned = rotate(x if layout == "sbhd" else x.transpose(0, 1), turns, layout)
        turned = turned if layout == "sbhd" else turned.transpose(0, 1)
        numbers = torch.complex(x[..., :2], x[..., 2:4]) * torch.polar(torch.ones(()).double(), turns[:3, :, :, :2])
        want = torch.cat((numbers.real, numbers.imag, x[..., 4:]), dim=-1)
        torch.testing.assert_close(turned, want, atol=1e-12, rtol=0)


@pytest.mark.ranks(4)
def test_a_group_of_other_ranks_than_the_domains_is_refused_wherever_it_comes_from(ctx):
    """The communicators', or an all-reduce over the domain, would sum what is not one layer's."""
    across = [torch.distributed.new_group(ranks) for ranks in ([0, 2], [1, 3])][ctx.rank % 2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        te.initialize_ub([S * B, 3 * H], 2, dtype=torch.float32)
    try:
        common = dict(tp_size=2, device=ctx.device, parallel_mode="row")
        layer = te.Linear(3 * H, H, symmetric_ar_type="two_shot", tp_group=across, **common)
        with pytest.raises(ValueError, match=r"tp_group has the ranks .* initialize_ub made a domain of"):
            layer(torch.ones(S, B, 3 * H // 2, device=ctx.device))
        layer = te.Linear(3 * H, H, sequence_parallel=True, ub_overlap_rs=True, ub_name="proj", **common)
        options = dict(sequence_parallel=True, set_parallel_mode=True, tp_size=2, device=ctx.device)
        mlp = te.LayerNormMLP(H, FFN, **options, **BULK)
        for each in (layer, mlp):
            with pytest.raises(ValueError, match=r"tp_group has the ranks .* initialize_ub made a domain of"):
                each.set_tensor_parallel_group(across)
            each.set_tensor_parallel_group(None)
    finally:
        te.destroy_ub()


@pytest.mark.ranks(2)
def test_a_group_says_the_size_by_itself(ctx):
    group = ctx.group.process_group
    mesh = DeviceMesh.from_group(group, ctx.device.type)
    layers = (
        te.Linear(H, 2 * H, parallel_mode="column", tp_group=mesh, device=ctx.device),
        te.LayerNormMLP(H, FFN, set_parallel_mode=True, tp_group=group, device=ctx.device).requires_grad_(False),
        te.TransformerLayer(H, FFN, HEADS, set_parallel_mode=True, tp_group=group, device=ctx.device),
    )
    assert [layer.tp_size for layer in layers] == [2, 2, 2] and layers[2].self_attention.num_heads == HEADS // 2
    assert layers[0].weight.shape == (H, H) and layers[1].fc1_weight.shape == (FFN // 2, H)
    with pytest.raises(ValueError, match="tp_group has 2 ranks, but tp_size=3"):
        te.Linear(H, 3 * H, parallel_mode="column", tp_group=group, tp_size=3, device=ctx.device)
    copied = copy.deepcopy(layers[2])
    assert copied.self_attention.proj.tp_group is group and copied.self_attention.proj.weight.partition_dim == 1
    x = torch.ones(S, H, device=ctx.device)
    with torch.no_grad():
        assert layers[0](x).shape == (S, H) and te.gather_along_first_dim(x, mesh)[0].shape == (2 * S, H)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_a_gamma_around_zero_counts_in_16_bits(normalization):
    """1 + 0.003 is no number of bf16, but a norm of 3 features is one that shows it."""
    layer = te.LayerNormLinear(
        H, H, normalization=normalization, zero_centered_gamma=True, params_dtype=torch.bfloat16, device="cpu",
        return_layernorm_output=True,
    )  # fmt: skip
    x = normal((256, H), torch.bfloat16, 1)
    plain = layer(x)[-1]
    with torch.no_grad():
        layer.layer_norm_weight.fill_(0.003)
    assert 0 < (layer(x)[-1] != plain).sum() < x.numel()


class States(TrackedGenerator):
    """A generator that goes on from where it was, and keeps that where it was told to, as Megatron's do."""

    def __init__(self, seed):
        super().__init__(seed)
        self.states = {"seed": seed}

    def get_states(self):
        return dict(self.states)

    def set_states(self, states):
        self.states = states

    def fork(self):
        self.states["seed"] += 1
        self.seed = self.states["seed"]
        return super().fork()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("tracked", [False, True])
def test_attention_that_is_computed_again_drops_the_same(ctx, tracked):
    tracker, grads = States(5), []
    layer = te.MultiheadAttention(
        H, HEADS, attention_dropout=0.5, device=ctx.device, get_rng_state_tracker=(lambda: tracker) if tracked else None
    )
    fill(layer, 3, 0)
    for again in (False, True):
        tracker.set_states({"seed": 5})
        torch.manual_seed(0)
        x = normal((S, B, H), torch.float32, 1, device=ctx.device).requires_grad_()
        loss = layer(x, checkpoint_core_attention=again).square().sum()
        for kept in (True, False):  # each backward recomputes
            (grad,) = torch.autograd.grad(loss, x, retain_graph=kept)
            grads.append(grad)
        assert tracker.get_states() == {"seed": 5 + tracked}
    assert all(torch.equal(grad, grads[0]) for grad in grads)


@pytest.mark.ranks(1)
def test_a_call_says_what_its_mask_is_and_what_has_no_answer_is_refused(ctx):
    common = dict(hidden_dropout=0.0, attention_dropout=0.0, device=ctx.device)
    causal = te.TransformerLayer(H, FFN, HEADS, **common)
    full = te.TransformerLayer(H, FFN, HEADS, self_attn_mask_type="no_mask", **common)
    full.load_state_dict(causal.state_dict())
    x = normal((S, B, H), torch.float32, 1, device=ctx.device)
    assert torch.equal(causal(x, None, "no_mask"), full(x)) and torch.equal(full(x, None, "causal"), causal(x))
    for wrong in (
        {"encoder_output": x}, {"enc_dec_attn_mask": x > 0}, {"inference_params": {}}, {"cu_seqlens_q": x[0, 0]},
        {"core_attention_bias_type": "alibi"}, {"pad_between_seqs": True},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"forward: {next(iter(wrong))} is not supported; leave it out"):
            causal(x, **wrong)
    with pytest.raises(ValueError, match=r"window_size=\(4, 0\) is not supported"):
        causal(x, window_size=(4, 0))
    assert torch.equal(causal(x, x[..., 0] > 0), causal(x))  # a mask that is there always, and not asked for
    with pytest.raises(ValueError, match="'arbitrary' needs an attention_mask of booleans"):
        causal(x, torch.ones(S, S, device=ctx.device), "arbitrary")
    for options in ({"qk_norm_type": "RMSNorm"}, {"softmax_type": "off-by-one"}, {"rotary_pos_interleaved": True}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}=.* is not supported; leave it out"):
            te.MultiheadAttention(H, HEADS, device=ctx.device, **options)
    te.MultiheadAttention(H, HEADS, device=ctx.device, qk_norm_type=None, seq_length=S, window_size=[-1, -1])
    with pytest.raises(TypeError, match="forward: there is no argument 'rotary'"):
        causal(x, rotary=x)
    causal(x, fast_zero_fill=False, core_attention_bias_type="no_bias")


@pytest.mark.ranks(2, 4)
@gpu_only
@pytest.mark.parametrize("case", ["L1", "L2", "L3", "L6"])
def test_forward_and_backward_in_a_cuda_graph(ctx, case):
    kind, flags = CASES[case]
    with initialized(ctx, torch.bfloat16, flags):
        layer = MAKE[kind][0](**parallel(ctx, torch.bfloat16), **flags)
        fill(layer, 3, ctx.rank)
        shape = (S, B, layer.in_features) if kind == "row" else (S // ctx.size, B, H)
        x = torch.zeros(shape, dtype=torch.bfloat16, device=ctx.device, requires_grad=True)
        dy = torch.zeros_like(layer(x))
        for _ in range(3):  # small shapes have kernels of their own, which compile here
            layer(x).backward(dy)
        layer.zero_grad(set_to_none=True)
        x.grad = None
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
            y.backward(dy)
        weight = next(p for name, p in layer.named_parameters() if name.endswith("weight") and p.dim() == 2)
        for replay in range(50):
            with torch.no_grad():
                x.copy_(normal(shape, torch.bfloat16, 100 * replay + ctx.rank))
                dy.copy_(normal(dy.shape, torch.bfloat16, 100 * replay + 50 + ctx.rank))
            if ctx.rank == replay % ctx.size:
                torch.cuda._sleep(200_000)
            graph.replay()
            got = y.clone(), x.grad.clone(), weight.grad.clone()
            leaf = x.detach().clone().requires_grad_()
            layer_grad, weight.grad = weight.grad, None
            want = layer(leaf)
            want.backward(dy)
            assert all(torch.equal(a, b) for a, b in zip(got, (want, leaf.grad, weight.grad), strict=True)), replay
            weight.grad = layer_grad
        del graph


@pytest.mark.ranks(1)
def test_hooks_of_every_layer_come_at_the_end_of_backward_dw(ctx):
    """Megatron's DDP reduces there."""
    common = dict(device=ctx.device, delay_wgrad_compute=True, fuse_qkv_params=True)
    layers = te.TransformerLayer(16, 32, 2, **common), te.MultiheadAttention(16, 2, **common)
    for layer in layers:
        came = []
        layer.register_wgrad_accumulation_and_reduce_hooks(lambda came=came: came.append(True))
        layer(torch.ones(4, 2, 16, device=ctx.device)).sum().backward()
        layer.backward_dw()
        assert came == [True] and all(p.grad is not None for p in layer.parameters())


@pytest.mark.ranks(2)
def test_layers_tell_of_what_makes_ranks_part_or_be_one(ctx):
    """Norms whose gradients nobody has summed, parts that are the same on all ranks, wrappers for replicas."""
    flags = dict(ub_overlap_ag=True, ub_name="qkv")
    with initialized(ctx, torch.float32, flags):
        torch.manual_seed(ctx.rank)
        norm = te.LayerNormLinear(H, 3 * H, **parallel(ctx, torch.float32, **flags), parallel_mode="column")
        optimizer = torch.optim.SGD(norm.parameters(), 0.1)
        x = normal((S, 1, H), torch.float32, seed=1 + ctx.rank, device=ctx.device)
        norm(x).square().sum().backward()
        with pytest.warns(UserWarning, match="SGD.step: the gradients of .*all_reduce_sequence_parallel_grads"):
            optimizer.step()
        norm.zero_grad()
        torch.manual_seed(0)
        same = te.Linear(H, 3 * H, **parallel(ctx, torch.float32, **flags), parallel_mode="column", bias=False)
        same(x).square().sum().backward()
        with pytest.warns(UserWarning, match="parameter 0 .* are the same on all ranks, and so are their gradients"):
            torch.optim.SGD(same.parameters(), 0.1).step()
        with pytest.raises(ValueError, match="Adafactor looks at whole parameters"):
            torch.optim.Adafactor(same.parameters()).step()
        with pytest.raises(ValueError, match=r"is split over ranks \[0, 1\], and of each another part is trained"):
            OverlappedDDP(same, mesh=ctx)
        alone = [torch.distributed.new_group([rank]) for rank in range(2)][ctx.rank]
        late = te.Linear(H, 3 * H, tp_size=2, parallel_mode="column", params_dtype=torch.float32, device=ctx.device)
        torch_fully_shard(late, mesh=DeviceMesh.from_group(alone, ctx.device.type))
        late.set_tensor_parallel_group(ctx.group.process_group)
        assert late(x).shape == (S, 1, 3 * H // 2)
        wrapped = nn.parallel.DistributedDataParallel(same, process_group=ctx.group.process_group)
        with pytest.raises(ValueError, match=r"Linear: the weight is split over ranks \[0, 1\], .* replicas"):
            wrapped(x)
