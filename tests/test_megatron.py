"""Where megatron-core is installed: its own schedules over P2PCommunicator, and its models on Userbuffers' layers."""

import contextlib
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
    for name, chunks, options, reference in [
        ("1F1B", 1, {}, {}),
        ("1F1B, freed", 1, freed, {}),
        ("1F1B, variable, freed", 1, freed | variable, None),
        ("1F1B, forward only", 1, {"forward_only": True}, None),
        ("interleaved, overlap", 2, overlap, overlap),
        ("interleaved, overlap, freed", 2, freed | overlap, overlap),
        ("interleaved, overlap in the warm-up too, freed", 2, freed | in_warmup, overlap),
        ("interleaved, overlap, variable, freed", 2, freed | overlap | variable, None),
        ("interleaved, freed", 2, freed, overlap),  # two stages without overlap are too few for Megatron's own
    ]:
        with on_cpu():
            wanted = train(ctx, groups, theirs, chunks, **(options if reference is None else reference))
            for backend in ("tkernels", "torch"):
                make = lambda group, config, backend=backend: P2PCommunicator(group, config, backend=backend)  # noqa: E731
                losses, grads = train(ctx, groups, make, chunks, **options)
                assert losses == wanted[0], (name, backend)
                pairs = zip(grads, wanted[1], strict=True)  # None where there was no backward
                assert all(grad is want or torch.equal(grad, want) for grad, want in pairs), (name, backend)
    dist.destroy_process_group(groups.tp)


# Models


def gpt(spec, rank, **options):
    """The loss and the gradients of a step of Megatron's GPTModel, by the parameters' names in the local spec."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=24,
        normalization="RMSNorm", gated_linear_unit=True, activation_func=nn.functional.silu, add_bias_linear=False,
        hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.float32, use_cpu_initialization=True,
        bias_activation_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        persist_layer_norm=False, **options,
    )  # fmt: skip
    model = GPTModel(
        config=config, transformer_layer_spec=spec, vocab_size=32, max_sequence_length=8,
        share_embeddings_and_output_weights=False,
    )  # fmt: skip
    names = {}
    for name, parameter in model.named_parameters():
        for fused, own in (("self_attention.linear_qkv", "input_layernorm"), ("mlp.linear_fc1", "pre_mlp_layernorm")):
            name = name.replace(f"{fused}.layer_norm_weight", f"{own}.weight")
        names[name] = parameter
        split = getattr(parameter, "tensor_model_parallel", False)
        generator = torch.Generator().manual_seed(sum(map(ord, name)) + 1000 * split * rank)
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 5 + ("norm" in name))
    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(1))
    masked = torch.ones(1, 1, 8, 8).triu(1).bool()
    loss = model(tokens, torch.arange(8).expand(2, 8), masked, labels=tokens).mean()
    loss.backward()
    for parameter in names.values():
        if getattr(parameter, "sequence_parallel", False) and config.sequence_parallel:
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
        for overlap in (False, True):
            options = split | {"sequence_parallel": True, "tp_comm_overlap": overlap}
            got = gpt(specs.get_gpt_layer_with_transformer_engine_spec(), ctx.rank, **options)
            assert abs(got[0] - want[0]) <= 1e-6 and set(got[1]) == set(want[1])
            for name, grad in got[1].items():
                assert (grad - want[1][name]).abs().max() <= 1e-5 * want[1][name].abs().max(), name
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
