"""Userbuffers' norms and attention: TransformerEngine's arguments, and the numbers of a few lines of fp64."""

import inspect
import math

import pytest
import torch

from tkernels.layers import userbuffers as te

HEADS, GROUPS, WIDTH, VALUES = 4, 2, 8, 6
EPSILON = 2.0**-23


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms_normalize_and_are_marked(kind, zero_centered):
    norm = getattr(te, kind)(
        hidden_size=32, eps=1e-3, sequence_parallel=True, zero_centered_gamma=zero_centered, device="cpu"
    )  # as Megatron makes it
    assert norm.weight.eq(0.0 if zero_centered else 1.0).all()
    assert list(norm.state_dict()) == (["weight", "bias"] if kind == "LayerNorm" else ["weight"])
    assert all(p.sequence_parallel and not p.tensor_model_parallel for p in norm.parameters())
    torch.manual_seed(0)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 2, 32)
    wide = x.double()
    centered = wide - wide.mean(-1, keepdim=True) if kind == "LayerNorm" else wide
    want = centered * (centered.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * (norm.weight.double() + zero_centered)
    want = want + (norm.bias.double() if kind == "LayerNorm" else 0)
    assert (norm(x) - want).abs().max() <= 64 * EPSILON * want.abs().max()  # sums of 32 terms
    norm.load_state_dict(norm.state_dict() | {"_extra_state": None})  # a checkpoint of TransformerEngine's
    plain = getattr(te, kind)(32, device="cpu", dtype=torch.bfloat16)
    assert plain.weight.dtype is torch.bfloat16 and not hasattr(plain.weight, "sequence_parallel")
    with pytest.raises(ValueError, match=f"{kind}: there is no shape; pass normalized_shape"):
        getattr(te, kind)(device="cpu")


def attention(query, key, value, mask, scale):
    """[s, b, heads, width] in fp64."""
    key, value = (part.repeat_interleave(HEADS // GROUPS, dim=2) for part in (key, value))
    scores = torch.einsum("sbhd,tbhd->bhst", query, key) * scale
    weights = scores.masked_fill(mask, -math.inf).softmax(-1)
    return torch.einsum("bhst,tbhd->sbhd", weights, value).flatten(2)


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("mask_type", ["causal", "no_mask", "arbitrary"])
def test_dot_product_attention_attends(layout, mask_type):
    torch.manual_seed(1)
    shapes = [(5, 2, HEADS, WIDTH), (5, 2, GROUPS, WIDTH), (5, 2, GROUPS, VALUES)]
    parts = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    masks = {"causal": torch.ones(5, 5).triu(1).bool(), "no_mask": torch.zeros(5, 5).bool()}
    masks["arbitrary"] = torch.zeros(1, 1, 5, 5).bool()
    masks["arbitrary"][..., 0, 2:] = masks["arbitrary"][..., 3, :2] = True
    layer = te.DotProductAttention(
        HEADS, (WIDTH, VALUES), GROUPS, qkv_format=layout, attn_mask_type="no_mask", softmax_scale=0.3
    )
    assert not list(layer.parameters()) and not layer.state_dict()
    turn = (lambda x: x) if layout == "sbhd" else (lambda x: x.transpose(0, 1))
    output = turn(layer(*map(turn, parts), masks["arbitrary"], attn_mask_type=mask_type))
    want = attention(*parts, masks[mask_type], 0.3)
    assert torch.allclose(output, want, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(want)
    grads, wanted = (torch.autograd.grad(y, parts, grad) for y in (output, want))
    assert all(torch.allclose(*pair, rtol=1e-11, atol=1e-11) for pair in zip(grads, wanted, strict=True))


def test_dot_product_attention_has_transformer_engines_arguments_and_refuses_what_it_cannot():
    names = list(inspect.signature(te.DotProductAttention).parameters)
    assert names[:7] == [
        "num_attention_heads", "kv_channels", "num_gqa_groups", "attention_dropout", "qkv_format", "attn_mask_type",
        "window_size",
    ]  # fmt: skip
    for options, message in [
        (dict(attention_type="cross"), "DotProductAttention: attention_type='cross' is not supported"),
        (dict(softmax_type="learnable"), "softmax_type='learnable' is not supported"),
        (dict(return_max_logit=True), "return_max_logit=True is not supported"),
        (dict(cp_group="a group"), "cp_group='a group' is not supported"),
        (dict(attn_mask_type="padding"), "attn_mask_type='padding' is not supported"),
        (dict(window_size=(8, 0)), r"window_size=\(8, 0\) is not supported"),
        (dict(num_gqa_groups=3), "num_attention_heads=4 doesn't divide by 3"),
        (dict(tp_size=3), "num_attention_heads=4 doesn't divide by 3"),
    ]:
        with pytest.raises(ValueError, match=message):
            te.DotProductAttention(4, 8, **options)
    layer = te.DotProductAttention(4, 8)
    q = torch.ones(3, 2, 4, 8)
    for options, error, message in [
        (dict(attn_mask_type="padding_causal"), ValueError, "attn_mask_type='padding_causal' is not supported"),
        (dict(attn_mask_type="arbitrary"), ValueError, "'arbitrary' needs an attention_mask of booleans"),
        (dict(cu_seqlens_q=torch.ones(1)), ValueError, "cu_seqlens_q is not supported"),
        (dict(core_attention_bias=torch.ones(1)), ValueError, "core_attention_bias is not supported"),
        (dict(checkpoint_core_attention=True), ValueError, "checkpoint_core_attention=True is not supported"),
        (dict(num_splits=2), ValueError, "num_splits=2 is not supported"),
        (dict(nothing=2), TypeError, "there is no argument 'nothing'"),
    ]:
        with pytest.raises(error, match=f"DotProductAttention.forward: .*{message}"):
            layer(q, q, q, **options)
    with pytest.raises(ValueError, match=r"key_layer has shape \(3, 2, 4, 6\); its last dimensions must be \(4, 8\)"):
        layer(q, q[..., :6], q)
    for key, value in ((q[:2], q[:2]), (q, q[:2]), (q.half(), q)):
        with pytest.raises(ValueError, match="all must be of one dtype and batch, keys and values of one length"):
            layer(q, key, value)
    whole = te.DotProductAttention(4, 8, attn_mask_type="no_mask")
    assert whole(q[:1], q, q).shape == (1, 2, 32)  # a query after keys that the caller has kept
    for key, value in ((q, q[:2]), (q, q[:1]), (q[:, :1], q[:, :1])):
        with pytest.raises(ValueError, match="all must be of one dtype and batch"):
            whole(q[:1], key, value)
    with torch.autocast("cpu", torch.bfloat16):
        assert whole(q, q, q.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(TypeError, match="softmax_scale='x' must be a number"):
        te.DotProductAttention(4, 8, softmax_scale="x")
