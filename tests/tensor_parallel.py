"""What tests of tensor-parallel layers share: the whole layer from all ranks' parts, and one judgement of results."""

import torch


def whole_state(ctx, layer) -> dict[str, torch.Tensor]:
    """Collective. Every parameter as one tensor in fp64, put together as Megatron's marks say."""
    state = {}
    mine = {name: parameter.detach().cpu().double() for name, parameter in layer.named_parameters()}
    everyone = ctx.group.gather(mine)
    for name, parameter in layer.named_parameters():
        parts = [theirs[name] for theirs in everyone]
        split = parameter.tensor_model_parallel and len(parts) > 1
        if not split:
            assert all(torch.equal(part, parts[0]) for part in parts), f"{name} is not the same on all ranks"
        state[name] = torch.cat(parts, parameter.partition_dim) if split else parts[0]
    return state


def own_part(ctx, parameter, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole gradient."""
    return whole.chunk(ctx.size, parameter.partition_dim)[ctx.rank] if parameter.tensor_model_parallel else whole


def fill(layer, seed: int, rank: int):
    """Parameters of about unit gain: parts differ from rank to rank, replicated parameters do not."""
    for index, (name, parameter) in enumerate(layer.named_parameters()):
        own = rank if parameter.tensor_model_parallel else 0
        generator = torch.Generator().manual_seed(1000 * seed + 10 * index + own)
        value = torch.randn(parameter.shape, generator=generator)
        scale = 0.3 if parameter.dim() == 1 else parameter.shape[1] ** -0.5
        with torch.no_grad():
            parameter.copy_(value * scale + ("layer_norm_weight" in name))


def assert_accurate(got: torch.Tensor, want: torch.Tensor, roundings: float, what: str = "result"):
    """Every element is within `roundings` half-ulps, of the element itself and of the mean size, of an fp64 truth.

    A layer's result is a sum of terms of about its own mean size, each rounded some times on the way: `roundings` grows
    with the depth of the layer, not with its widths. Raises AssertionError, also for what is not finite.
    """
    assert want.dtype is torch.float64 and want.isfinite().all()
    value, want = got.detach().cpu().double(), want.detach().cpu()
    assert value.shape == want.shape, f"{what}: shape {tuple(value.shape)}, want {tuple(want.shape)}"
    unit = torch.finfo(got.dtype).eps / 2
    error = (value - want).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    allowed = roundings * unit * (want.abs() + want.square().mean().sqrt())
    off = error > allowed
    if off.any():
        worst = (error / allowed).argmax()
        raise AssertionError(
            f"{what}: {int(off.sum())} of {off.numel()} elements are off, the worst: got "
            f"{value.flatten()[worst]:.9g}, want {want.flatten()[worst]:.9g}, allowed {allowed.flatten()[worst]:.3g}"
        )
