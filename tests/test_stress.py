"""Late signals: puts and signals are held up at random, ranks come late, buffers are poisoned, no shape divides evenly.

Calls of all operations follow each other in bursts, without a word between the ranks, each with fresh data; every
result is an exact sum of integers. On GPUs the delays are compiled into the device verbs, so the ranks are new ones.
"""

import functools
import random
import time

import pytest
import torch
import triton
import triton.language as tl
from execution import execution
from transports import TRANSPORTS, every_transport, interleaved, into_landing, over, poison_workspace, starts_ranks

import tkernels
from tkernels.comm import collectives, device, interpreter, runtime
from tkernels.launch import launch
from tkernels.testing.compare import integers

SIMULATED = tkernels.RUNTIME == "simulated"
CALLS = 24 if SIMULATED else 1000
BURST = 8  # calls before results are looked at
FEATURES = [(40, 48), (33, 50)]  # N, K on a rank: with and without TMA; the sums of 50 products are exact in bf16
COLLECTIVES = ["all_gather", "reduce_scatter", "all_reduce"]
FUSED = ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]
CONFIGS = [  # packets and chunks, each with all-reduces in one shot and in two, and copies
    collectives.DEFAULT,
    collectives.CollectiveConfig(hop_bytes=-1, packet_hop_bytes=-1),
    collectives.CollectiveConfig(0, 0, 0),
    collectives.CollectiveConfig(0, 0, 0, hop_bytes=-1),
    collectives.CollectiveConfig(0, 0, 0, copy_bytes=0),
]
MAX_ROWS = 90 if SIMULATED else 300
DTYPE, E4M3 = torch.bfloat16, torch.float8_e4m3fn


@triton.jit
def stall():
    """Up to 65 us, drawn from the clock; 21 us on average."""
    now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    draw = ((now // 32 + tl.program_id(0) * 7919) * 2654435761 // 65536) & 255
    nanoseconds = (draw * draw).to(tl.int32)
    tl.inline_asm_elementwise(
        "nanosleep.u32 $1; mov.u32 $0, 0;", "=r,r", [nanoseconds], dtype=tl.int32, is_pure=False, pack=1
    )


@interpreter.builtin
def no_wait(*arguments):
    return 1


# The line of each verb that a delay comes before: its data, or its signal, is late.
HELD_UP = {
    "put_signal": "    if L.TRANSPORT == NVSHMEM:",
    "signal": "    if L.TRANSPORT == NVSHMEM:",
    "signal_all": "        fence(L)",
    "put_tile": "    dst = peer(dst, target, net, ALIGN)",
    "tell": "    tl.atomic_xchg(peer(signal_word, target, net)",
    "tell_all": "        peers = tl.arange(0, triton.next_power_of_2(L.RANKS))",
    "put_packets": "    at = tl.arange(0, words.shape[0])",
}

NO_WAIT = """\
def wait_signal(signal_word, epoch, source, chunk, net, L, other=None, value=None, SHIFT: tl.constexpr = 0):
    tl.debug_barrier()
"""


def disturb_verbs(form: str):
    """Before anything is compiled in this process: delays before puts and signals; no waits in the wrong form."""
    if SIMULATED:
        if form == "wrong":
            device.spin = device.spin_packets = no_wait
        return
    device.stall = stall
    for name, line in HELD_UP.items():
        verb, indentation = getattr(device, name), line[: len(line) - len(line.lstrip())]
        assert line in verb.src
        verb._unsafe_update_src(verb.src.replace(line, f"{indentation}stall()\n{line}", 1))
    if form == "wrong":
        device.wait_signal._unsafe_update_src(NO_WAIT)
        looks = "while first_late < L.RANKS:"
        assert looks in device.wait_packets.src
        device.wait_packets._unsafe_update_src(device.wait_packets.src.replace(looks, "while first_late < 0:"))


def small(shape, seed, ctx):
    return integers(shape, DTYPE, seed, low=-2, high=2, device=ctx.device)


def powers(x, seed, ctx):
    """A power of two for each row of x."""
    return 2.0 ** integers((len(x), 1), torch.float32, seed + 3, low=-1, high=1, device=ctx.device)


def product(x, w):
    return x.float() @ w.float().t()


def draw_rows(draws: random.Random, size: int) -> tuple[int, ...]:
    """Row counts by rank, any split of a random total, ranks without rows among them."""
    cuts = sorted(draws.randint(0, 65 + draws.randint(0, MAX_ROWS)) for _ in range(size + 1))
    rows = [after - before for before, after in zip(cuts, cuts[1:], strict=False)]
    return (*rows[:-1], rows[-1] + max(0, 65 - sum(rows)))  # from 65 rows on the tiles are those of large products


def a_call(ctx, draws: random.Random, seed: int):
    """(what to call, its right result) of one random operation; all ranks draw the same."""
    fp8 = draws.random() < 1 / 4 and runtime.has_fp8()
    rows, (N, K) = draw_rows(draws, ctx.size), FEATURES[0] if fp8 else draws.choice(FEATURES)
    first = sum(rows[: ctx.rank])
    own = slice(first, first + rows[ctx.rank])
    seeds = [1000 * seed + 10 * rank for rank in range(ctx.size)]
    shards = [small((count, K), s, ctx) for count, s in zip(rows, seeds, strict=True)]
    wholes = [small((sum(rows), K), s + 1, ctx) for s in seeds]
    weights = [small((N, K), s + 2, ctx) for s in seeds]
    shard, whole, w = shards[ctx.rank], wholes[ctx.rank], weights[ctx.rank]
    name, config = draws.choice(FUSED if fp8 else [*COLLECTIVES, *2 * FUSED]), draws.choice(CONFIGS)
    scaling = {}
    if fp8:  # with a scale a row, of x as of w
        scales = [[powers(x, s, ctx) for x, s in zip(each, seeds, strict=True)] for each in (shards, wholes, weights)]
        shards, wholes, weights = (
            [x * scale for x, scale in zip(*pair, strict=True)]
            for pair in zip((shards, wholes, weights), scales, strict=True)
        )
        shard, whole, w = (x.to(E4M3) for x in (shard, whole, w))
        x_scale = scales[name != "all_gather_matmul"][ctx.rank]
        scaling = {"x_scale": x_scale, "w_scale": scales[2][ctx.rank]}
    path = draws.choice(["fused", "fused", "copies", "interleaved", "plain"])
    senders = [draws.choice([0, 0, 1, 3]) for _ in rows]  # with copies, who sends is each rank's own affair
    all_send = [draws.choice([False, True]) for _ in rows]
    operation = getattr(collectives if name in COLLECTIVES else tkernels, name)
    if name == "all_gather":
        return lambda: operation(ctx, shard, rows, config=config), torch.cat(shards)
    if path in ("copies", "interleaved") and name in FUSED:
        operation, options = functools.partial(into_landing, senders[ctx.rank], ctx, name), {}
        if name != "all_gather_matmul" and (path == "interleaved" or all_send[ctx.rank]):
            operation, options = functools.partial(interleaved, ctx, name), {"landing": path == "copies"}
    else:
        options = {"ctx": ctx, "path": path}
    options |= scaling
    if name == "all_gather_matmul":
        return lambda: operation(shard, w, rows=rows, **options), product(torch.cat(shards), weights[ctx.rank])
    if name in COLLECTIVES:
        total = sum(x.float() for x in wholes)
        if name == "all_reduce":
            return lambda: operation(ctx, whole, config=config), total
        return lambda: operation(ctx, whole, rows, config=config), total[own]
    total = sum(product(x, weight) for x, weight in zip(wholes, weights, strict=True))
    if name == "matmul_all_reduce":
        return lambda: operation(whole, w, **options), total
    return lambda: operation(whole, w, rows=rows, **options), total[own]


def come_late(ctx, draws: random.Random):
    """One rank in a call out of three, by up to some milliseconds simulated, 0.1 ms on a GPU."""
    late, which, how_long = draws.random() < 1 / 3, draws.randrange(ctx.size), draws.random()
    if late and which == ctx.rank and SIMULATED:
        time.sleep(5e-3 * how_long)
    elif late and which == ctx.rank:
        torch.cuda._sleep(int(200_000 * how_long))


def stress(ctx, transport: str, form: str, calls: int) -> int:
    """How many results of this rank are wrong."""
    disturb_verbs(form)
    ctx, draws, wrong = over(ctx, transport), random.Random(7), 0
    with execution(jitter_seed=3, rank=ctx.rank):
        for burst in range(0, calls, BURST):
            made = [a_call(ctx, draws, seed) for seed in range(burst, min(burst + BURST, calls))]
            if draws.random() < 1 / 2:
                poison_workspace(ctx)
            results = []
            for call, _ in made:
                come_late(ctx, draws)
                results.append(call())
            wrong += sum(not torch.equal(got, right.to(DTYPE)) for got, (_, right) in zip(results, made, strict=True))
            ctx.check()
    return wrong


@pytest.mark.parametrize("ranks", [
    pytest.param(2, marks=starts_ranks(2)),
    pytest.param(4, marks=[starts_ranks(4), *[pytest.mark.exhaustive] * SIMULATED]),
])  # fmt: skip
@every_transport
def test_late_signals_change_no_result(ranks, transport):
    assert launch(stress, ranks, transport, "right", CALLS, timeout_s=900) == [0] * ranks


@starts_ranks(2)
def test_without_waits_late_signals_change_results():
    assert sum(launch(stress, 2, TRANSPORTS[0], "wrong", 2 * BURST, timeout_s=900)) > 0
