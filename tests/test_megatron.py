"""Megatron's own schedules, where megatron-core is installed, over P2PCommunicator."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from transports import simulated_only

from tkernels.layers.p2p import P2PCommunicator

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = simulated_only  # Megatron's own communicator, which ours is compared with, runs over gloo there

SEQUENCE, BATCH, FEATURES, STAGES = 4, 2, 8, 2
LENGTHS = (4, 6, 2, 5)


class OnCpu(TorchFunctionMode):
    """Megatron makes tensors on "cuda"."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        return function(*args, **kwargs | ({"device": "cpu"} if kwargs.get("device") == "cuda" else {}))


@contextlib.contextmanager
def on_cpu():
    with pytest.MonkeyPatch.context() as patch, OnCpu():
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        patch.setattr(torch.cuda, "synchronize", lambda *arguments: None)
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
    for name, chunks, options, reference in [
        ("1F1B", 1, {}, {}),
        ("1F1B, freed", 1, freed, {}),
        ("1F1B, variable, freed", 1, freed | {"variable_seq_lengths": True, "lengths": LENGTHS}, None),
        ("1F1B, forward only", 1, {"forward_only": True}, None),
        ("interleaved, overlap", 2, {"overlap_p2p_comm": True}, {"overlap_p2p_comm": True}),
        ("interleaved, overlap, freed", 2, freed | {"overlap_p2p_comm": True}, {"overlap_p2p_comm": True}),
        ("interleaved, overlap in the warm-up too, freed", 2,
         freed | {"overlap_p2p_comm": True, "overlap_p2p_comm_warmup_flush": True}, {"overlap_p2p_comm": True}),
        ("interleaved, overlap, variable, freed", 2,
         freed | {"overlap_p2p_comm": True, "variable_seq_lengths": True, "lengths": LENGTHS}, None),
        # Megatron's own takes two stages with overlap only
        ("interleaved, freed", 2, freed, {"overlap_p2p_comm": True}),
    ]:
        with on_cpu():
            wanted = train(ctx, groups, theirs, chunks, **(options if reference is None else reference))
            for backend in ("nvshmem", "gloo"):
                make = lambda group, config, backend=backend: P2PCommunicator(group, config, backend=backend)  # noqa: E731
                losses, grads = train(ctx, groups, make, chunks, **options)
                assert losses == wanted[0], (name, backend)
                pairs = zip(grads, wanted[1], strict=True)  # None where there was no backward
                assert all(grad is want or torch.equal(grad, want) for grad, want in pairs), (name, backend)
    dist.destroy_process_group(groups.tp)
