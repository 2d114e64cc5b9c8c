"""Other people's models and wrappers on our layers: right beside the same model unsharded in fp64, or refused by name.

`pip install -e ".[interop]"` brings the packages; without them these tests are skipped. Models are tiny and random.
"""

import copy
import dataclasses

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tkernels import layers
from tkernels.comm import MismatchError
from tkernels.layers import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    gather_state_dict,
    parallelize,
    parallelize_module,
)
from tkernels.layers.tensor_parallel.heads import check_heads

VOCABULARY, BATCH, SEQUENCE, NEW_TOKENS = 64, 2, 6, 2
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 50,  # 25 a rank: no power of two
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
ATTENTION = {"*.[qkv]_proj": "column", "*.o_proj": "row"}
MLP = {"*.gate_proj": "column", "*.up_proj": "column", "*.down_proj": "row"}
HEAD = {"lm_head": {"style": "column", "gather_output": True}}
NORMS = {"*.[qk]_norm": "replicated_with_grad_allreduce"}
FAMILIES = {  # name -> (its configuration's changes, the plan)
    "Llama": ({}, ATTENTION | MLP | HEAD),
    "Qwen2": ({"tie_word_embeddings": True}, ATTENTION | MLP),
    "Qwen3": ({}, ATTENTION | MLP | NORMS),
    "Gemma3": ({"sliding_window": 4}, ATTENTION | MLP | NORMS),
    "Mixtral": ({"num_local_experts": 4, "experts_implementation": "eager"}, ATTENTION),
}
OTHERS = {
    "Gemma3n": (  # a norm of values without a scale
        {
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 4,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0, 0.0],
        },
    ),
}


@pytest.fixture(autouse=True)
def installed():
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("peft", reason="peft is not installed")


def make(family: str, **changes) -> torch.nn.Module:
    """A model of about unit gain everywhere, the same on every rank."""
    import transformers

    kind = f"{family}Text" if family.startswith("Gemma3") else family
    config = getattr(transformers, f"{kind}Config")(**SIZES | (FAMILIES | OTHERS).get(family, ({},))[0] | changes)
    return fill(getattr(transformers, f"{family}ForCausalLM")(config).eval())


def fill(model: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model


def run(model: torch.nn.Module, device="cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, tokens of `generate`). Leaves the gradients of the language model's loss in the parameters."""
    tokens = torch.randint(2, VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(2)).to(device)
    model.zero_grad()
    out = model(input_ids=tokens, labels=tokens)
    out.loss.backward()
    new = model.generate(
        input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    assert new.shape == (BATCH, SEQUENCE + NEW_TOKENS)
    return out.logits.detach(), new


def whole(ctx, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Collective. A parameter's value or gradient from all ranks' parts, in fp64 on the CPU."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    elif getattr(parameter, "tensor_model_parallel", False):
        value = torch.cat(ctx.group.gather(value.detach().cpu()), parameter.partition_dim)
    return value.detach().cpu().double()


def assert_trains_like(ctx, model: torch.nn.Module, twin: torch.nn.Module):
    """Collective. Logits, all gradients and generated tokens of `model` are those of its unsharded twin."""
    (logits, tokens), (want_logits, want_tokens) = run(model, ctx.device), run(twin.double())
    assert torch.equal(tokens.cpu(), want_tokens)
    assert_near(logits, want_logits, "logits")
    assert_same_gradients(ctx, model, twin)


def assert_same_gradients(ctx, model: torch.nn.Module, twin: torch.nn.Module):
    got, want = dict(model.named_parameters()), dict(twin.named_parameters())
    assert got.keys() == want.keys()
    trained = {name for name, parameter in want.items() if parameter.requires_grad}
    assert trained == {name for name, parameter in got.items() if parameter.requires_grad}
    largest = max(want[name].grad.abs().max() for name in trained)
    for name in sorted(trained):
        assert_near(whole(ctx, got[name], got[name].grad), want[name].grad, name, noise=1e-7 * largest)


def assert_near(got: torch.Tensor, want: torch.Tensor, what: str, noise: float = 0.0):
    """Off by at most 1e-5 of the largest element: two layers in fp32 are off by 1e-6. `noise` is for a gradient that is
    zero but for rounding, as that of a key's bias."""
    assert got.shape == want.shape, what
    off = (got.cpu().double() - want).abs().max()
    assert off <= 1e-5 * want.abs().max() + noise, f"{what}: off by {off:.3g} of {want.abs().max():.3g}"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_parallelize_trains_a_model_of_transformers_as_its_unsharded_twin(ctx, family):
    model = make(family)
    twin = copy.deepcopy(model)
    assert_trains_like(ctx, parallelize(model, FAMILIES[family][1], ctx).to(ctx.device), twin)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Gemma3", "Gemma3n", "GraniteSWA"])
def test_parallelize_reads_a_models_own_plan(ctx, family):
    """ "auto": all parameters are DTensors, the embedding and the head are split by the vocabulary, tied or not."""
    model = make(family)
    twin = copy.deepcopy(model)
    parallelize(model, "auto", ctx)
    base = model.model
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    split = base.embed_tokens.weight, model.lm_head.weight, base.layers[0].mlp.up_proj.weight
    whole = split[:1] if "model.embed_tokens" not in model.tp_plan and split[0] is not split[1] else ()
    assert {parameter.placements for parameter in split[len(whole) :]} == {(Shard(0),)}
    assert all(parameter.placements == (Replicate(),) for parameter in whole)  # by plans before transformers 5.24
    assert (split[0] is split[1]) == bool(twin.config.tie_word_embeddings)
    assert_trains_like(ctx, model, twin)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "first_k_dense_replace": 1,
    "experts_implementation": "eager",
}


@pytest.mark.ranks(2)
def test_parallelize_sums_the_gradients_of_rotary_keys_beside_latent_ones(ctx):
    model = make("DeepseekV2", **LATENT)
    twin = copy.deepcopy(model)
    parallelize(model, "auto", ctx)
    assert_trains_like(ctx, model, twin)
    with pytest.raises(ValueError, match="'mla_kv_a_proj' of 'lm_head' is for .* model.config has qk_rope_head_dim"):
        parallelize(make("Llama"), {"lm_head": "mla_kv_a_proj"}, ctx)


MIXTURE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "decoder_sparse_step": 1}


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_parallelize_deals_experts_to_ranks(ctx, implementation):
    """5 to 2 ranks: 3 and 2; to 4, 2, 2, 1 and none, which is refused."""
    model = make("Qwen3Moe", **MIXTURE, experts_implementation=implementation)
    twin = make("Qwen3Moe", **MIXTURE, experts_implementation="eager")  # which alone has fp64
    if ctx.size == 4:
        with pytest.raises(ValueError, match="experts.*: .* has 5 along dimension 0, which 4 ranks get as 2, 2, 1, 0"):
            parallelize(model, {"*.experts": "moe_tp_experts"}, ctx)
        return
    parallelize(model, "auto", ctx)
    for name in ("gate_up_proj", "down_proj"):
        experts = getattr(model.model.layers[0].mlp.experts, name)
        assert experts.placements == (Shard(0),) and len(experts.to_local()) == 3 - ctx.rank
    assert_trains_like(ctx, model, twin)
    ctx.check()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_parallelize_trains_where_no_token_chooses_a_ranks_experts(ctx, checkpointed):
    """Its gradients are zeros, as the others' of experts that nobody chose, and backward leaves out no collective."""
    model = make("Qwen3Moe", **MIXTURE, experts_implementation="eager")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight[3:].fill_(0)
            layer.mlp.gate.weight[:3].mul_(4)
    twin = copy.deepcopy(model).double()
    parallelize(model, "auto", ctx).to(ctx.device)
    if checkpointed:  # whose recomputation, with collectives, begins where backward first needs a saved tensor
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    for each in (model, twin):
        each(input_ids=torch.tensor([[3]], device=each.device)).logits.square().sum().backward()
    chosen = twin.model.layers[0].mlp.experts.down_proj.grad.abs().amax((1, 2)) > 0
    assert not all(chosen.split(3)[rank].any() for rank in range(2))
    assert_same_gradients(ctx, model, twin)
    model.load_state_dict(make("Qwen3Moe", **MIXTURE).to(ctx.device).state_dict(), assign=True)
    with pytest.raises(ValueError, match="whole tensors; load these by"):
        model.model.layers[0].mlp.experts(*(torch.zeros(1, 2, device=ctx.device) for _ in range(3)))
    ctx.check()


@pytest.mark.ranks(4)
def test_fully_shard_over_dealt_experts_trains_as_the_unsharded_model(ctx):
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    model = make("Qwen3Moe", **MIXTURE, experts_implementation="grouped_mm")
    twin = make("Qwen3Moe", **MIXTURE, experts_implementation="eager").double()
    parallelize(model, "auto", mesh["tp"]).to(ctx.device)
    for layer in model.model.layers:
        layers.fully_shard(layer, mesh=mesh["dp"])
    layers.fully_shard(model, mesh=mesh["dp"])
    tokens = torch.randint(2, VOCABULARY, (2, 2, SEQUENCE), generator=torch.Generator().manual_seed(2))
    mine = tokens[mesh.get_local_rank("dp")].to(ctx.device)
    for _ in range(2):
        model(input_ids=mine, labels=mine).loss.backward()
        sum(twin(input_ids=each, labels=each).loss for each in tokens).div(2).backward()
    assert_same_gradients(ctx, model, twin)
    ctx.check()


@pytest.mark.ranks(2)
def test_parallelize_refuses_what_auto_can_not_split(ctx):
    identity = {"model.layers.*.mlp.experts": "moe_identity_expert"}
    with pytest.raises(ValueError, match=r"this library has no style 'moe_identity_expert' \(of 'model.*'\)"):
        parallelize(make("Mixtral"), identity, ctx)
    with pytest.raises(ValueError, match="'local_params' of 'model.layers.0.self_attn' .* none of them a word"):
        parallelize(make("GraniteSWA"), {"*.self_attn": "local_params"}, ctx)
    with pytest.raises(TypeError, match="Experts: .* is a .*NemotronHExperts, whose code isn't known to pass over"):
        model = make("NemotronH", layer_types=["attention", "moe"], **MIXTURE)
        parallelize(model, {"*.experts": "moe_tp_experts"}, ctx)
    with pytest.raises(TypeError, match="Experts: .* is a .*GptOssExperts, whose code isn't known to pass over"):
        parallelize(make("GptOss", num_local_experts=4), {"*.experts": "moe_tp_experts"}, ctx)
    with pytest.raises(ValueError, match="4 heads and 1 of keys and values .* don't divide by 2 ranks"):
        parallelize(make("Llama", num_key_value_heads=1), "auto", ctx)
    halves = {"*.gate_up_proj": "colwise", "*.down_proj": "rowwise"}
    with pytest.raises(ValueError, match="mlp.gate_up_proj' is gate and up-projection in one, .*'rowwise_split_input'"):
        parallelize(make("Phi3"), halves, ctx)
    with pytest.raises(ValueError, match="Sequential has no tp_plan, which 'auto' reads"):
        parallelize(torch.nn.Sequential(torch.nn.Linear(2, 2)), "auto", ctx)


GPT2 = {
    "*.attn.c_attn": "colwise_gather_output",
    "*.attn.c_proj": "rowwise_split_input",
    "*.c_fc": "colwise",
    "*.mlp.c_proj": "rowwise",
    "*.wte": "embedding_rowwise",
    "lm_head": "colwise_gather_output",
}


@pytest.mark.ranks(2)
def test_parallelize_splits_conv1d_as_the_linear_that_it_is(ctx):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=None)
    model = fill(GPT2LMHeadModel(config).eval())
    twin = copy.deepcopy(model)
    with pytest.raises(ValueError, match="h.0.attn.c_attn' is queries, keys and values in one"):
        parallelize(model, GPT2 | {"*.attn.c_attn": "colwise"}, ctx)
    with pytest.raises(ValueError, match="h.0.attn.c_attn' is queries"):  # as a layer of PEFT's wraps its base
        check_heads(model, ["transformer.h.0.attn.c_attn.base_layer"], ctx.size)
    parallelize(model, GPT2, ctx)
    assert model.transformer.h[0].mlp.c_fc.weight.placements == (Shard(1),)
    assert_trains_like(ctx, model, twin)


@pytest.mark.ranks(2)
def test_parallelize_refuses_an_attention_that_views_features_by_the_number_of_all_heads(ctx):
    """OPT's takes [batch, -1, num_heads, head_dim]: of half the features half as many positions, without a word."""
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, ffn_dim=48, num_attention_heads=4,
        max_position_embeddings=32, word_embed_proj_dim=32, dropout=0.0, eos_token_id=None,
    )  # fmt: skip
    model, plan = fill(OPTForCausalLM(config).eval()), {"*.[qkv]_proj": "colwise", "*.out_proj": "rowwise"}
    twin = copy.deepcopy(model)
    with pytest.raises(ValueError, match="0.self_attn', OPTAttention, takes .* num_heads=4, all heads, .* have 2"):
        parallelize(model, plan, ctx)
    with pytest.raises(ValueError, match="num_heads=4, all heads, .* set num_heads"):  # as PEFT's layer wraps its base
        check_heads(model, ["model.decoder.layers.0.self_attn.q_proj.base_layer"], ctx.size)
    for layer in model.model.decoder.layers:
        layer.self_attn.num_heads //= ctx.size
    parallelize(model, plan | {"*.fc1": "colwise", "*.fc2": "rowwise"}, ctx)
    assert_trains_like(ctx, model, twin)

    class Biased(torch.nn.Module):  # T5's has a table of biases, one for each head, which no rank's heads alone fit
        def __init__(self):
            super().__init__()
            self.q, self.o, self.bias = *(torch.nn.Linear(32, 32) for _ in "qo"), torch.nn.Embedding(9, 4)
            self.n_heads, self.head_dim = 4, 8

        def forward(self, x):
            return self.o(self.q(x).view(len(x), self.n_heads, self.head_dim).flatten(1))

    with pytest.raises(ValueError, match="n_heads=4, all heads, of which .* have 2; give"):
        parallelize(torch.nn.ModuleDict({"attention": Biased()}), {"*.q": "colwise", "*.o": "rowwise"}, ctx)


@pytest.mark.ranks(2)
def test_parallelize_splits_a_linear_of_falcon(ctx):
    from transformers.models.falcon.modeling_falcon import FalconLinear

    model = fill(torch.nn.Sequential(FalconLinear(8, 12), torch.nn.GELU(), FalconLinear(12, 6, bias=False)))
    twin = copy.deepcopy(model).double()
    parallelize(model, ctx, {"0": "colwise", "2": "rowwise"})  # torch's order
    assert isinstance(model[0], FalconLinear)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(5))
    (y, want) = model.to(ctx.device)(x.to(ctx.device)), twin(x.double())
    assert_near(y.detach(), want.detach(), "output")
    y.square().sum().backward()
    want.square().sum().backward()
    for (name, got), parameter in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert_near(whole(ctx, got, got.grad), parameter.grad, name)


@pytest.mark.ranks(2)
def test_parallelize_names_the_norms_over_heads_that_a_plan_for_qwen3_forgets(ctx):
    model = parallelize(make("Qwen3"), ATTENTION | MLP, ctx).to(ctx.device)
    each = r"'\*.{}': 'replicated_with_grad_allreduce'"
    with pytest.raises(MismatchError, match=r"plan \| \{" + f"{each.format('[kq]_norm')}, {each.format('[kq]_norm')}"):
        run(model, ctx.device)


@pytest.mark.ranks(2)
def test_parallelize_refuses_what_is_no_linear_layer_of_transformers(ctx):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4, bos_token_id=1))
    with pytest.raises(TypeError, match=r"'transformer.h.0.mlp.c_fc', which is a transformers.pytorch_utils.Conv1D"):
        parallelize(model, {"*.c_fc": "column", "*.mlp.c_proj": "row"}, ctx)
    with pytest.raises(TypeError, match="experts"):
        parallelize(make("Mixtral"), ATTENTION | {"*.experts": "column"}, ctx)
    with pytest.raises(ValueError, match="'lm_head' shares its parameters with model.embed_tokens.weight"):
        parallelize(make("Qwen2"), ATTENTION | MLP | HEAD, ctx)


@pytest.mark.ranks(2)
def test_gather_state_dict_goes_through_save_pretrained_and_back(ctx, tmp_path):
    from transformers import AutoModelForCausalLM

    model = parallelize(make("Llama"), FAMILIES["Llama"][1], ctx)
    whole = gather_state_dict(model)  # on every rank
    if ctx.rank == 0:
        model.save_pretrained(tmp_path, state_dict=whole)
    ctx.group.barrier()
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.state_dict().keys() == make("Llama").state_dict().keys()
    for name, value in make("Llama").state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


LORA = {
    "*.q_proj.base_layer": "column",
    "*.q_proj.lora_B.default": "column",
    "*.[kv]_proj": "column",
    "*.o_proj": "row",
    "*.gate_proj": "column",
    "*.up_proj": "column",
    "*.down_proj.base_layer": "row",
    "*.down_proj.lora_A.default": "row",
}


def with_lora(model: torch.nn.Module, **options) -> torch.nn.Module:
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=4, **options))


@pytest.mark.ranks(2)
def test_parallelize_after_lora_trains_the_adapters_as_the_unsharded_ones(ctx):
    model = fill(with_lora(make("Llama")))
    twin = copy.deepcopy(model)
    assert_trains_like(ctx, parallelize(model, LORA, ctx).to(ctx.device), twin)
    assert sum(parameter.requires_grad for parameter in model.parameters()) == 8


@pytest.mark.ranks(2)
def test_parallelize_splits_the_linears_inside_of_lora(ctx):
    """By the model's own plan, which names the layers that LoRA has wrapped."""
    model = make("Llama")
    plan = {f"base_model.model.{name}": style for name, style in model.tp_plan.items()}
    model = fill(with_lora(model, modules_to_save=["lm_head"]))
    twin = copy.deepcopy(model)
    parallelize(model, plan, ctx)
    for head in model.base_model.model.lm_head.children():  # the original, and the copy that is trained
        assert all(weight.placements == (Shard(0),) for weight in head.parameters())
    attention = model.base_model.model.model.layers[0].self_attn.q_proj
    assert attention.lora_B["default"].weight.placements == (Shard(0),)
    assert attention.lora_A["default"].weight.placements == (Replicate(),)
    assert_trains_like(ctx, model, twin)
    assert sum(parameter.requires_grad for parameter in model.parameters()) == 9
    dora = with_lora(make("Llama"), use_dora=True)
    with pytest.raises(TypeError, match="q_proj' is a peft.* with the variants .* plain LoRA alone"):
        parallelize(dora, plan, ctx)


@pytest.mark.ranks(2)
def test_parallelize_after_lora_names_a_layer_that_is_not_torchs(ctx):
    with pytest.raises(TypeError, match=r"q_proj', which is a peft\.tuners\.lora\.layer\.Linear, not exactly an nn"):
        parallelize(with_lora(make("Llama")), ATTENTION | MLP, ctx)


@pytest.mark.ranks(2)
def test_parallelize_refuses_lora_after_it(ctx):
    with pytest.raises(ValueError, match="Target module ColumnParallelLinear.* is not supported"):
        with_lora(parallelize(make("Llama"), ATTENTION | MLP, ctx))


@pytest.mark.ranks(2)
def test_parallelize_makes_torchs_ddp_refuse_ranks_that_hold_shards(ctx):
    model = parallelize(make("Llama"), "auto", ctx).to(ctx.device)
    refusals = "broadcast|mixed torch.Tensor and DTensor|propagation failed"
    with pytest.raises((NotImplementedError, RuntimeError), match=refusals):
        DistributedDataParallel(model)
    model = DistributedDataParallel(parallelize(make("Llama"), ATTENTION | MLP, ctx).to(ctx.device))
    with pytest.raises(ValueError, match=r"is split over ranks \[0, 1\], .* DistributedDataParallel .* same"):
        run(model, ctx.device)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("compiled", ["inside", "outside", "before"])
def test_parallelize_under_torchs_ddp_is_refused_where_it_is_compiled_too(ctx, compiled):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model = parallelize(model, {"0": "column", "1": "row"}, ctx).to(ctx.device)
    batch = torch.ones(2, 4, device=ctx.device)
    torch._dynamo.reset()
    if compiled == "before":
        model = torch.compile(model, backend="eager")
        model(batch)
        model = DistributedDataParallel(model)
    elif compiled == "inside":
        model = DistributedDataParallel(torch.compile(model, backend="eager"))
    else:
        model = torch.compile(DistributedDataParallel(model), backend="eager")
    with pytest.raises(ValueError, match=r"is split over ranks \[0, 1\], .* DistributedDataParallel .* same"):
        model(batch)


# torch's own ways, over the styles


def styles(family: str) -> dict:
    """What transformers' own tp_plan splits, and the embedding, as torch's users write it."""
    layer = "model.layers.*"
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        f"{layer}.self_attn.[qkv]_proj": ColwiseParallel(),
        f"{layer}.self_attn.o_proj": RowwiseParallel(),
        f"{layer}.mlp.gate_proj": ColwiseParallel(),
        f"{layer}.mlp.up_proj": ColwiseParallel(),
        f"{layer}.mlp.down_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    if NORMS.keys() <= FAMILIES[family][1].keys():
        plan[f"{layer}.self_attn.[qk]_norm"] = SequenceParallel(sequence_dim=2, use_local_output=True)  # over heads
    return plan


@pytest.mark.ranks(2)
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Gemma3"])
def test_parallelize_module_trains_a_model_of_transformers_as_its_unsharded_twin(ctx, family):
    model = make(family).to(ctx.device)
    twin = copy.deepcopy(model).cpu()
    assert_trains_like(ctx, parallelize_module(model, ctx, styles(family)), twin)


def train(model: torch.nn.Module, ctx, part=slice(None), optimizer=None) -> tuple[list[float], torch.optim.Optimizer]:
    """Two steps as any script of torch's has them: (the norms of the gradients, the optimizer).

    part: of the batch, for this rank.
    """
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for step in range(2):
        tokens = torch.randint(2, VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(step))
        tokens = tokens[part].to(ctx.device)
        model(input_ids=tokens, labels=tokens).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, optimizer


def full(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
    return {name: value.clone() for name, value in whole.items()}  # a replicated one is the parameter itself


@pytest.mark.ranks(2)
def test_parallelize_gives_a_checkpoint_of_the_whole_model_and_its_optimizer(ctx, tmp_path):
    """Saved split; loaded split, and into the plain model. All go on as if nothing had happened."""
    model = parallelize(make("Llama").to(ctx.device), "auto", ctx)
    _, optimizer = train(model, ctx)
    saved = full(model)
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=tmp_path)
    norms = [train(model, ctx, optimizer=optimizer)[0]]
    for again in (parallelize(make("Llama").to(ctx.device), "auto", ctx), make("Llama").to(ctx.device)):
        optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
        state = {"model": again.state_dict(), "optim": get_optimizer_state_dict(again, optimizer)}
        dcp.load(state, checkpoint_id=tmp_path)
        again.load_state_dict(state["model"])
        set_optimizer_state_dict(again, optimizer, state["optim"])
        for name, value in full(again).items():
            assert torch.equal(value, saved[name]), name
        norms.append(train(again, ctx, optimizer=optimizer)[0])
    assert norms[0] == norms[1]
    assert norms[0] == pytest.approx(norms[2], rel=1e-5)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("fully_shard", [torch.distributed.fsdp.fully_shard, layers.fully_shard], ids=["torch", "ours"])
def test_fully_shard_over_a_parallelized_model_trains_as_the_unsharded_model(ctx, fully_shard):
    """2 x 2 ranks: halves of the batch, and halves of the features."""
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    model, twin = make("Llama").to(ctx.device), make("Llama").to(ctx.device)
    parallelize(model, "auto", mesh["tp"])
    for block in model.model.layers:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    rank = mesh.get_local_rank("dp")
    norms, _ = train(model, ctx, slice(rank, rank + 1))
    want, _ = train(twin, ctx)
    assert norms == pytest.approx(want, rel=1e-5)
    got = full(model)
    for name, value in full(twin).items():
        assert (got[name] - value).abs().max() <= 1e-4 * value.abs().max(), name


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["tensorwise", "tensorwise_with_gw_fp8", "rowwise", "rowwise_with_gw_hp"])
def test_parallelize_takes_torchaos_float8_linears(ctx, recipe):
    """They multiply as torchao's emulation of them does, up to the noise of FP8, which both have beside the exact.

    With "gw_fp8" ours have the weight's gradient in FP8, as torchao's tensorwise ones do.
    """
    float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed")
    ours = recipe if recipe.endswith("gw_fp8") else None
    config = float8.Float8LinearConfig.from_recipe_name(recipe.removesuffix("_with_gw_fp8"))
    config = dataclasses.replace(config, emulate=True)
    torch.manual_seed(0)
    whole = fill(torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 64)).bfloat16())
    exact = copy.deepcopy(whole).double()
    torchaos = float8.convert_to_float8_training(copy.deepcopy(whole), config=config)
    x = torch.randn(24, 64, generator=torch.Generator().manual_seed(3)).bfloat16()

    def results(model, x):
        x = x.requires_grad_()
        y = model(x)
        y.float().square().sum().backward()
        grads = [
            each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad for each in model.parameters()
        ]
        return [each.detach().cpu().double() for each in (y, x.grad, *grads)]

    want, torchaos = results(exact, x.double()), results(torchaos, x.clone())
    for plan in ({"0": "colwise", "2": "rowwise"}, {"0": "column", "2": "row"}):
        model = copy.deepcopy(whole) if ours else float8.convert_to_float8_training(copy.deepcopy(whole), config=config)
        parallelize(model, plan, ctx, float8=ours).to(ctx.device)
        made = model[0]._float8.recipe
        assert (made.scale, made.gathers_again) == (recipe[:3].replace("ten", "tensor"), recipe.endswith("hp"))
        assert made.power_of_two == (made.scale == "row") and made.fast_accum and not made.fast_accum_backward
        assert made.weight_gradient == (ours is not None)
        if "column" in plan.values():
            continue
        limit = 10**-1.8  # 18 dB of the output, 17 of gradients: torchao's own
        for got, theirs, right in zip(results(model, x.clone().to(ctx.device)), torchaos, want, strict=True):
            noise, others = ((each - right).square().sum() for each in (got, theirs))
            assert noise < 1.5 * others + 1e-5 * right.square().sum()  # no more than torchao's, beside bf16's
            assert noise < limit * right.square().sum()
            limit = 10**-1.7
    if recipe == "tensorwise":
        model = float8.convert_to_float8_training(copy.deepcopy(whole), config=config)
        want = parallelize(model, {"0": "colwise", "2": "rowwise"}, ctx).to(ctx.device)(x.to(ctx.device))
        gathers = dataclasses.replace(config, enable_fsdp_float8_all_gather=True)
        for plan in ({"0": "colwise", "2": "rowwise"}, {"0": "column", "2": "row"}):
            model = float8.convert_to_float8_training(copy.deepcopy(whole), config=gathers)
            parallelize(model, plan, ctx).to(ctx.device)
            assert model[0]._float8.recipe.gathers_weights
            assert torch.equal(model(x.to(ctx.device)), want)
        odd = float8.Float8LinearConfig(cast_config_weight=float8.CastConfig(target_dtype=torch.float8_e5m2))
        with pytest.raises(ValueError, match="a Float8Linear with .* has no equal here"):
            parallelize(float8.convert_to_float8_training(copy.deepcopy(whole), config=odd), {"0": "colwise"}, ctx)


@pytest.mark.ranks(2, 4)
def test_fully_shard_trains_torchtitans_llama_as_fsdp2_does(ctx):
    """torchtitan's own parallelize_llama, with one name replaced; bit for bit, since two ranks' sums have one order."""
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, fsdp, parallel_dims
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs, parallelize_llama
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    shards, tensor_parallel = 2, ctx.size // 2

    def whole(t):
        return t.full_tensor() if isinstance(t, DTensor) else t

    def train(fully_shard):
        config = llama3_configs["debugmodel"](attn_backend="flex")
        config.layers = config.layers[:2]
        for layer in config.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        set_llama3_sharding_config(config, enable_sp=True)
        with torch.device("meta"):
            model = config.build()
        names = {"data_parallel_shard_degree": shards, "tensor_parallel_degree": tensor_parallel}
        parallelism = ParallelismConfig(**names, spmd_backend="partial_dtensor")
        dims = ParallelDims.from_config(parallelism, ctx.size)
        dims.build_mesh()
        options = {"training": TrainingConfig(), "compile_config": CompileConfig(enable=False), "ac_config": None}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fsdp, "fully_shard", fully_shard)
            parallelize_llama(model, parallel_dims=dims, parallelism=parallelism, dump_folder="", **options)
        for module in model.modules():
            if isinstance(module, torch.distributed.fsdp.FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other
        model.to_empty(device=ctx.device)
        with torch.no_grad():
            model.init_states(buffer_device=None)
            for seed, (_, parameter) in enumerate(sorted(model.named_parameters())):
                values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)).to(ctx.device) / 16
                parameter.copy_(distribute_tensor(values, parameter.device_mesh, parameter.placements))
        optimizer, seen = torch.optim.AdamW(model.parameters(), lr=1e-3), []
        positions = torch.arange(16, device=ctx.device).expand(2, 16)
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * step + ctx.rank // tensor_parallel)
            tokens, wanted = torch.randint(0, 2048, (2, 2, 16), generator=generator).to(ctx.device)
            logits = whole(model(tokens, positions=positions)).float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()) / shards
            loss.backward()
            seen += [loss.item(), whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)).item()]
            optimizer.step()
            optimizer.zero_grad()
        return seen, {name: whole(value) for name, value in model.state_dict().items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_dims, "device_type", ctx.device.type)
        (want, theirs), (got, ours) = train(torch.distributed.fsdp.fully_shard), train(layers.fully_shard)
    assert got == want and list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
