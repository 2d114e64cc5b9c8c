"""Where megatron-core is installed: its schedules over P2PCommunicator, its models on our linears and Userbuffers'."""

import contextlib
import dataclasses
import functools
import importlib
import itertools
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from transports import simulated_only

from tkernels.launch import launch
from tkernels.layers import userbuffers as te
from tkernels.layers.pipeline.communicator import P2PCommunicator
from tkernels.layers.userbuffers import shim

pytestmark = simulated_only  # Megatron's own communicator, which ours is compared with, runs over gloo there

SEQUENCE, BATCH, FEATURES, STAGES = 4, 2, 8, 2
LENGTHS = (4, 6, 2, 5)


@pytest.fixture(autouse=True)
def installed():
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")


class OnCpu(TorchFunctionMode):
    """Megatron makes tensors on "cuda"."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        return function(*args, **kwargs | ({"device": "cpu"} if kwargs.get("device") == "cuda" else {}))


@contextlib.contextmanager
def on_cpu():
    from megatron.core.tensor_parallel import random

    with pytest.MonkeyPatch.context() as patch, OnCpu():
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        patch.setattr(torch.cuda, "synchronize", lambda *arguments: None)
        patch.setattr(random.CudaRNGStatesTracker, "fork", lambda *arguments: contextlib.nullcontext())
        yield


class Part(nn.Module):
    """A part of a model, as Megatron's schedules drive it: its input comes by set_input_tensor."""

    model_type = vp_stage = None

    def __init__(self, config, number):
        super().__init__()
        torch.manual_seed(number)
        self.linear, self.config, self.input = nn.Linear(FEATURES, FEATURES), config, None

    def set_input_tensor(self, tensors):
        self.input = tensors[0] if isinstance(tensors, list) else tensors

    def forward(self, x):
        return self.linear(x if self.input is None else self.input).tanh()


def forward_step(data, model):
    return model(next(data)), lambda output: (output.square().mean(), output.detach().sum())


def train(ctx, groups, make, chunks, lengths=(SEQUENCE,) * 4, forward_only=False, **options):
    """Collective. Losses and gradients of one step by Megatron's schedule over the communicator that `make` makes."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.transformer.transformer_config import TransformerConfig

    virtual = chunks if chunks > 1 else None
    config = TransformerConfig(
        num_layers=4, hidden_size=FEATURES, num_attention_heads=2, pipeline_model_parallel_size=STAGES,
        virtual_pipeline_model_parallel_size=virtual, pipeline_dtype=torch.float32, batch_p2p_comm=False,
        moe_token_dispatcher_type="alltoall", **options,
    )  # fmt: skip
    model = [Part(config, chunk * STAGES + ctx.rank) for chunk in range(chunks)]
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(length, BATCH, FEATURES, generator=generator) for length in lengths]
    comm = make(groups.pp, config)
    losses = get_forward_backward_func(pp_size=STAGES, vp_size=virtual)(
        forward_step_func=forward_step, data_iterator=[iter(data) for _ in model], model=model,
        num_microbatches=len(data), seq_length=SEQUENCE, micro_batch_size=BATCH, forward_only=forward_only,
        p2p_communicator=comm, pg_collection=groups,
    )  # fmt: skip
    if isinstance(comm, P2PCommunicator):
        comm.close()
    return losses, [parameter.grad for part in model for parameter in part.parameters()]


def groups_of(ctx):
    """Collective. Megatron's collection of process groups: a pipeline over all ranks, and nothing else."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    alone = [dist.new_group([rank]) for rank in range(ctx.size)][ctx.rank]
    groups = ProcessGroupCollection()
    groups.tp = groups.cp = groups.dp_cp = alone
    groups.embd = groups.pos_embd = None
    groups.pp = ctx.group.process_group
    return groups


@pytest.mark.ranks(STAGES, timeout_s=300)
def test_p2p_communicator_under_megatrons_schedules_is_bitwise_megatrons_own(ctx):
    from megatron.core.pipeline_parallel import p2p_communication

    groups, theirs = groups_of(ctx), p2p_communication.P2PCommunicator
    freed = {"deallocate_pipeline_outputs": True}
    overlap = {"overlap_p2p_comm": True}
    in_warmup = overlap | {"overlap_p2p_comm_warmup_flush": True}
    variable = {"variable_seq_lengths": True, "lengths": LENGTHS}
    for chunks, reference, cases in [  # what Megatron's own has run with, and what must give the same
        (1, {}, [{}, freed]),
        (1, freed | variable, [freed | variable]),
        (1, {"forward_only": True}, [{"forward_only": True}]),
        # Two stages without overlap are too few for Megatron's own.
        (2, overlap, [overlap, freed | overlap, freed | in_warmup, freed]),
        (2, freed | overlap | variable, [freed | overlap | variable]),
    ]:
        with on_cpu():
            wanted = train(ctx, groups, theirs, chunks, **reference)
            for options, backend in itertools.product(cases, ("tkernels", "torch")):
                make = functools.partial(P2PCommunicator, backend=backend)
                losses, grads = train(ctx, groups, make, chunks, **options)
                assert losses == wanted[0], (chunks, options, backend)
                pairs = zip(grads, wanted[1], strict=True)  # None where there was no backward
                assert all(grad is want or torch.equal(grad, want) for grad, want in pairs), (chunks, options, backend)
    dist.destroy_process_group(groups.tp)


# Models


def make_gpt(spec, tied=False, **options):
    """Collective. Megatron's GPTModel."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(**dict(
        num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=24,
        normalization="RMSNorm", gated_linear_unit=True, activation_func=nn.functional.silu, add_bias_linear=False,
        hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.float32, use_cpu_initialization=True,
        bias_activation_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    ) | options)  # fmt: skip
    return GPTModel(
        config=config, transformer_layer_spec=spec, vocab_size=32, max_sequence_length=8,
        share_embeddings_and_output_weights=tied,
    )  # fmt: skip


def loss_of(model, seed=1):
    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(seed))
    masked = torch.ones(1, 1, 8, 8).triu(1).bool()
    return model(tokens, torch.arange(8).expand(2, 8), masked, labels=tokens).mean()


def gpt(spec, rank, change=lambda model: model, **options):
    """The loss and the gradients of a step of Megatron's GPTModel, by the parameters' names in the local spec."""
    model = change(make_gpt(spec, **options))
    names = {}
    for name, parameter in model.named_parameters():
        for fused, own in (("self_attention.linear_qkv", "input_layernorm"), ("mlp.linear_fc1", "pre_mlp_layernorm")):
            name = name.replace(f"{fused}.layer_norm_weight", f"{own}.weight")
        names[name] = parameter
        split = getattr(parameter, "tensor_model_parallel", False)
        generator = torch.Generator().manual_seed(sum(map(ord, name)) + 1000 * split * rank)
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 5 + ("norm" in name))
    loss = loss_of(model)
    loss.backward()
    for parameter in names.values():
        if getattr(parameter, "sequence_parallel", False) and model.config.sequence_parallel:
            dist.all_reduce(parameter.grad)
    return loss.detach(), {name: parameter.grad for name, parameter in names.items()}, model


def assert_alike(got, want):
    assert abs(got[0] - want[0]) <= 1e-6 and set(got[1]) == set(want[1])
    for name, grad in got[1].items():
        assert (grad - want[1][name]).abs().max() <= 1e-5 * want[1][name].abs().max(), name


def train_on_both(ctx, order):
    if order == "megatron first":
        import megatron.core  # noqa: F401
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        shim.install()
    assert [str(warning.message)[:13] for warning in warned] == ["shim.install:"] * (order == "megatron first")
    from megatron.core import parallel_state, utils
    from megatron.core.models.gpt import gpt_layer_specs as specs

    assert specs.HAVE_TE and utils.get_te_version() == utils.PkgVersion(shim.API_VERSION)
    with on_cpu():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        te.initialize_ub([8 * 2, 16], 2, dtype=torch.float32)
        split = {"tensor_model_parallel_size": 2}
        want = gpt(specs.get_gpt_layer_local_spec(normalization="RMSNorm"), ctx.rank, **split)
        for overlap in (False, True) if order == "shim first" else (True,):
            options = split | {"sequence_parallel": True, "tp_comm_overlap": overlap}
            got = gpt(specs.get_gpt_layer_with_transformer_engine_spec(), ctx.rank, **options)
            assert_alike(got, want)
            qkv = got[2].decoder.layers[0].self_attention.linear_qkv
            assert isinstance(qkv, te.LayerNormLinear) and qkv.ub_overlap_ag_fprop == qkv.ub_bulk_dgrad == overlap
            assert got[2].sharded_state_dict()  # Megatron's own checkpoints
        te.destroy_ub()
        moe = specs.get_gpt_layer_with_transformer_engine_spec(num_experts=2, moe_grouped_gemm=True)
        with pytest.raises(NotImplementedError, match="transformer_engine.pytorch.GroupedLinear is not among"):
            gpt(moe, ctx.rank, num_moe_experts=2, moe_grouped_gemm=True, **split)


@pytest.mark.parametrize("order", ["shim first", "megatron first"])
def test_shim_install_lets_megatron_train_on_these_layers_as_on_its_own(order):
    launch(train_on_both, 2, order)


# Megatron's linears on our kernels


@contextlib.contextmanager
def megatron_of(tensor_parallel):
    """Collective. Megatron's process groups over all ranks, on the CPU."""
    from megatron.core import parallel_state

    with on_cpu():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
        try:
            yield parallel_state
        finally:
            parallel_state.destroy_model_parallel()


class Norm(nn.LayerNorm):
    """Megatron's own norms need Apex or TransformerEngine where the sequence is split."""

    def __init__(self, config, hidden_size, eps=1e-5):
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


def blocks(layer):
    """The specification of two layers, with norms that a split sequence may pass."""
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    parts = dataclasses.replace(layer.submodules, input_layernorm=Norm, pre_mlp_layernorm=Norm)
    return TransformerBlockSubmodules([dataclasses.replace(layer, submodules=parts)] * 2, layer_norm=Norm)


@pytest.mark.ranks(2, timeout_s=300)
def test_get_gpt_layer_local_spec_and_convert_train_as_megatrons_own_layers(ctx):
    with megatron_of(2):
        from megatron.core.models.gpt import gpt_layer_specs as theirs

        from tkernels.layers.doors import megatron as ours

        for form in [{}, {"sequence_parallel": True}, {"sequence_parallel": True, "tied": True}]:
            for bias in (False, True):
                options = {"tensor_model_parallel_size": 2, "add_bias_linear": bias, **form}
                want = gpt(blocks(theirs.get_gpt_layer_local_spec()), ctx.rank, **options)
                got = gpt(blocks(ours.get_gpt_layer_local_spec()), ctx.rank, **options)
                assert type(got[2].decoder.layers[1].mlp.linear_fc2) is ours.RowParallelLinear
                assert_alike(got, want)
            got = gpt(blocks(theirs.get_gpt_layer_local_spec()), ctx.rank, ours.convert, **options)
            assert type(got[2].output_layer) is type(got[2].decoder.layers[0].mlp.linear_fc1)
            assert type(got[2].output_layer) is ours.ColumnParallelLinear
            assert_alike(got, want)


COLUMN = [
    {"bias": True, "skip_bias_add": True},
    {"gather_output": True},
    {"gather_output": True, "sequence_parallel": True},
    {"sequence_parallel": True, "keep_gathered": True},
    {"sequence_parallel": True, "frozen": True, "bias": False},  # where it is frozen, Megatron forgets the bias
    {"disable_grad_reduce": True},
    {"stride": 2, "bias": False},
    {"is_expert": True},
    {"skip_weight_param_allocation": True, "bias": False},
]
ROW = [
    {"skip_bias_add": False},
    {"skip_bias_add": False, "sequence_parallel": True},
    {"input_is_parallel": False},
    {"frozen": True, "sequence_parallel": True},
    {"is_expert": True},
    {"explicit_later": True},
    {"explicit_later": True, "sequence_parallel": True},
]


def step_of(kind, rank, case, inputs=(24, 16)):
    """A layer of this class and what it returns and leaves: the output, the bias, and the gradients."""
    from megatron.core.model_parallel_config import ModelParallelConfig

    case = dict(case)
    row, frozen, fused = kind.__name__.startswith("Row"), case.pop("frozen", False), case.pop("fused", False)
    config = ModelParallelConfig(
        tensor_model_parallel_size=2, sequence_parallel=case.pop("sequence_parallel", False),
        use_cpu_initialization=True, perform_initialization=True, params_dtype=torch.float32,
        gradient_accumulation_fusion=fused,
    )  # fmt: skip
    config._cpu_offloading_context = None
    config.delay_wgrad_compute = case.pop("delayed", False)
    explicit_later = case.pop("explicit_later", False)  # as Megatron's shared experts do it
    options = {"bias": True, "input_is_parallel": True, "skip_bias_add": True} if row else {}
    torch.manual_seed(7)
    layer = kind(16, 24, config=config, init_method=nn.init.normal_, **options | case)
    layer.explicit_expert_comm = layer.explicit_expert_comm or explicit_later
    split = config.sequence_parallel and not row, row and (options | case)["input_is_parallel"]
    shape = 4 // (1 + split[0]), 2, 16 // (1 + split[1])
    generator = torch.Generator().manual_seed(10 + rank * any(split))
    x = torch.randn(shape, generator=generator).requires_grad_()
    weight = []
    if layer.weight is None:
        weight = [torch.randn(12, 16, generator=torch.Generator().manual_seed(rank)).requires_grad_()]
    elif frozen:
        layer.weight.requires_grad_(False)
    if fused:
        layer.weight.main_grad = torch.ones_like(layer.weight)
    y, bias = layer(x, *weight)
    (y * torch.arange(y.numel()).view(y.shape).cos()).sum().backward()
    return layer, [y, x.grad, *(each.grad for each in weight), *(each.grad for each in layer.parameters())], bias


@pytest.mark.ranks(2, timeout_s=300)
def test_column_and_row_parallel_linear_take_megatrons_options_with_its_weights_and_marks(ctx):
    with megatron_of(2):
        from megatron.core.tensor_parallel import layers as theirs

        from tkernels.layers.doors import megatron as ours

        for name, cases in {"ColumnParallelLinear": COLUMN, "RowParallelLinear": ROW}.items():
            for case in cases:
                layer, got, bias = step_of(getattr(ours, name), ctx.rank, case)
                without = {key: value for key, value in case.items() if key != "keep_gathered"}
                reference, want, their_bias = step_of(getattr(theirs, name), ctx.rank, without)
                for mine, other in zip(got, want, strict=True):
                    assert (mine is None) == (other is None), (name, case)
                    assert mine is None or torch.allclose(mine, other, atol=1e-5), (name, case)
                assert (bias is None) == (their_bias is None) and (bias is None or bias is layer.bias)
                assert layer.state_dict().keys() == reference.state_dict().keys()
                assert repr(layer) == repr(reference) and isinstance(layer, type(reference))
                for mine, other in zip(layer.parameters(), reference.parameters(), strict=True):
                    assert torch.equal(mine, other) and vars(mine) == vars(other), (name, case)


@pytest.mark.ranks(2, timeout_s=300)
def test_column_and_row_parallel_linear_name_an_input_that_they_cannot_take(ctx):
    with megatron_of(2):
        from tkernels.layers.doors import megatron as ours

        for kind in (ours.ColumnParallelLinear, ours.RowParallelLinear):
            layer, (y, *_), _ = step_of(kind, ctx.rank, {"sequence_parallel": True})
            own = layer.weight.shape[1]
            x = torch.ones(4, 2, own)
            for wrong, error, message in [
                (None, TypeError, "input=None"),
                ([x], TypeError, "input="),
                (x.to_sparse(), TypeError, "input must be a strided tensor"),
                (x[..., 1:], ValueError, rf"the input is .*, {own - 1}\] on cpu, but must be .*, {own}\] on cpu"),
                (x[0, 0], ValueError, rf"the input is \[{own}\] on cpu"),
                (x.to("meta"), ValueError, "the input is .* on meta, but must be .* on cpu"),
            ]:
                with pytest.raises(error, match=f"{kind.__name__}: {message}"):
                    layer(wrong)
            assert layer(x)[0].isfinite().all()


@pytest.mark.ranks(2, timeout_s=300)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_backward_dw_computes_what_was_deferred_and_backward_adds_to_main_grad(ctx, sequence_parallel):
    with megatron_of(2):
        from tkernels.layers.doors import megatron as ours

        for kind in (ours.ColumnParallelLinear, ours.RowParallelLinear):
            case = {"bias": True, "sequence_parallel": sequence_parallel}
            want = step_of(kind, ctx.rank, case)[0].weight.grad
            layer, _, _ = step_of(kind, ctx.rank, case | {"fused": True})
            assert layer.weight.grad is None
            torch.testing.assert_close(layer.weight.main_grad, want + 1)
            layer, _, _ = step_of(kind, ctx.rank, case | {"delayed": True})
            assert layer.weight.grad is None and layer.weight.skip_backward_post_hook and layer.need_backward_dw()
            called = []
            layer.register_wgrad_accumulation_and_reduce_hooks(lambda called=called: called.append(1))
            layer.backward_dw()
            assert torch.equal(layer.weight.grad, want) and called == [1]


@pytest.mark.ranks(2, timeout_s=300)
def test_convert_refuses_weights_in_a_ddp_that_would_miss_their_deferred_gradients(ctx):
    with megatron_of(2):
        from megatron.core.tensor_parallel import layers as theirs

        from tkernels.layers.doors import megatron as ours

        pair = [step_of(theirs.ColumnParallelLinear, ctx.rank, {"delayed": delayed})[0] for delayed in (False, True)]
        pair[1].weight.main_grad = torch.zeros_like(pair[1].weight)
        with pytest.raises(ValueError, match=r"ColumnParallelLinear\(16, 24\): .* make the DDP of the converted model"):
            ours.convert(nn.ModuleList(pair))
        assert {type(layer) for layer in pair} == {theirs.ColumnParallelLinear}  # nothing has changed


def test_convert_refuses_what_has_none_of_megatrons_linears():
    from tkernels.layers.doors import megatron as ours

    with pytest.raises(ValueError, match="no module of this Linear is Megatron's ColumnParallelLinear or RowParallel"):
        ours.convert(nn.Linear(2, 2))
    for wrong in (None, [nn.Linear(2, 2)]):
        with pytest.raises(TypeError, match="convert: model=.* must be an nn.Module; of several chunks, convert each"):
            ours.convert(wrong)


def test_with_kernels_replaces_linears_wherever_a_specification_has_them():
    from megatron.core.models.gpt import gpt_layer_specs as theirs

    from tkernels.layers.doors import megatron as ours

    spec = theirs.get_gpt_layer_local_spec(num_experts=2)
    for given in (
        spec,
        functools.partial(dict, submodules=spec.submodules),
        blocks(spec),
    ):  # newer releases have partials
        before = repr(given)
        replaced = repr(ours.with_kernels(given))
        for name in ("ColumnParallelLinear", "RowParallelLinear"):
            assert f"doors.megatron.{name}" in replaced and f"tensor_parallel.layers.{name}" not in replaced
        assert repr(given) == before and f"tensor_parallel.layers.{name}" in before


def test_doors_megatron_names_the_extra_that_brings_megatron(monkeypatch):
    monkeypatch.delitem(sys.modules, "tkernels.layers.doors.megatron", raising=False)
    monkeypatch.setitem(sys.modules, "megatron.core.models.gpt", None)
    with pytest.raises(ImportError, match=r'needs megatron-core 0.15 or newer: pip install "tkernels\[interop\]"'):
        importlib.import_module("tkernels.layers.doors.megatron")


@pytest.mark.ranks(2, timeout_s=300)
def test_sharded_state_dict_of_one_loads_into_the_other(ctx, tmp_path):
    with megatron_of(2) as groups:
        from megatron.core import dist_checkpointing
        from megatron.core.models.gpt import gpt_layer_specs as theirs

        from tkernels.layers.doors import megatron as ours

        metadata = {"dp_cp_group": groups.get_data_parallel_group(with_context_parallel=True)}
        options = {"tensor_model_parallel_size": 2, "add_bias_linear": True}
        specs = [
            get(normalization="RMSNorm") for get in (ours.get_gpt_layer_local_spec, theirs.get_gpt_layer_local_spec)
        ]
        for number, (saved, loaded) in enumerate([specs, specs[::-1]]):
            torch.manual_seed(1 + number)
            source, target = make_gpt(saved, **options), make_gpt(loaded, **options)
            folder = str(tmp_path / str(number))
            if ctx.rank == 0:
                (tmp_path / str(number)).mkdir()
            ctx.group.barrier()
            dist_checkpointing.save(source.sharded_state_dict(metadata=metadata), folder)
            state = dist_checkpointing.load(target.sharded_state_dict(metadata=metadata), folder)
            target.load_state_dict(state)
            pairs = zip(source.named_parameters(), target.named_parameters(), strict=True)
            assert all(name == other and torch.equal(mine, theirs) for (name, mine), (other, theirs) in pairs)


def train_under_ddp(spec, change, **ddp):
    """Collective. Losses and parameters of two steps by Megatron's DDP and its optimizer."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    torch.manual_seed(3)
    options = {"sequence_parallel": True, "add_bias_linear": True}
    model = change(make_gpt(blocks(spec), tensor_model_parallel_size=2, **options))
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(**ddp), model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0), [ddp]
    )  # it clips on GPUs only
    losses = []
    for step in range(2):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        loss = loss_of(ddp, 10 * step + parallel_state.get_data_parallel_rank())
        loss.backward()
        for module in model.modules():
            if getattr(module, "wgrad_store", None):
                module.backward_dw()
        finalize_model_grads([ddp])
        optimizer.prepare_grads()
        losses += [loss.item(), optimizer.get_grad_norm()]  # the norm reads the marks
        assert optimizer.step()[0]
    return losses, dict(model.named_parameters())


@pytest.mark.ranks(4, timeout_s=300)
def test_convert_trains_under_megatrons_ddp_and_optimizer_as_its_own_layers(ctx):
    with megatron_of(2):
        from megatron.core.models.gpt import gpt_layer_specs as theirs

        from tkernels.layers.doors import megatron as ours

        def fused(model):
            for module in ours.convert(model).modules():  # its own output layer would ask for an extension
                if isinstance(module, (ours.ColumnParallelLinear, ours.RowParallelLinear)):
                    module.gradient_accumulation_fusion = True
            return model

        def deferred(model):
            model.config.delay_wgrad_compute = True
            return fused(model)

        as_it_is, of_theirs = lambda model: model, theirs.get_gpt_layer_local_spec()  # noqa: E731
        want = train_under_ddp(of_theirs, as_it_is, overlap_grad_reduce=False)
        of_ours = ours.get_gpt_layer_local_spec()
        for spec, change, overlap in [(of_ours, as_it_is, False), (of_ours, fused, True), (of_theirs, deferred, True)]:
            delays = {"delay_wgrad_compute": True} if change is deferred else {}
            losses, parameters = train_under_ddp(spec, change, overlap_grad_reduce=overlap, **delays)
            torch.testing.assert_close(losses, want[0], atol=1e-5, rtol=1e-5)
            for name, parameter in parameters.items():
                torch.testing.assert_close(parameter, want[1][name], atol=1e-4, rtol=0)
