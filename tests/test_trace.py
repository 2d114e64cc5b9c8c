"""Traces: what kernels write down is what they did, on one axis of time, and nothing is lost in silence."""

import dataclasses
import gzip
import itertools
import json
import time

import numpy as np
import pytest
import torch
from transports import starts_ranks

import tkernels
from tkernels import cli
from tkernels.comm import collectives, interpreter, marks
from tkernels.comm.collectives import CollectiveConfig
from tkernels.configs import GemmConfig, OverlapConfig
from tkernels.testing.compare import integers
from tkernels.trace import clocks
from tkernels.trace.recorder import tracing
from tkernels.trace.timeline import Launch, Trace

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
N = 96
CONFIG = OverlapConfig(GemmConfig(32, 64, 32, split=2, num_stages=2), chunk_rows=64, num_comm=1)


def call(ctx, op, rows, **options):
    """One call on `rows` rows of each rank, with tiles of 32 x 64 in chunks of 64 rows."""
    M = rows[ctx.rank] if op in ("all_gather_matmul", "all_gather") else sum(rows)
    x = integers((M, 64), torch.float32, seed=ctx.rank, device=ctx.device)
    if op in COLLECTIVES:
        options |= {} if op == "all_reduce" else {"rows": rows}
        return getattr(collectives, op)(ctx, x, **options)
    w = integers((N, 64), torch.float32, seed=100 + ctx.rank, device=ctx.device)
    options = {"config": CONFIG} | options | ({} if op == "matmul_all_reduce" else {"rows": rows})
    return getattr(tkernels, op)(x, w, path="fused", ctx=ctx, **options)


def recorded(ctx, op, rows, marks=1024, **options) -> Trace:
    """The trace of two calls, whose results are those of a call that is not traced."""
    want = call(ctx, op, rows, **options)
    with tracing(ctx, marks=marks) as trace:
        got = [call(ctx, op, rows, **options) for _ in range(2)]
    assert all(torch.equal(y, want) for y in got)
    return trace


def of(trace, kind, launch=1, **wanted):
    return [
        s for s in trace.slices
        if s.kind == kind and s.launch == launch
        and all({"rank": s.rank, **s.arguments}[name] == value for name, value in wanted.items())
    ]  # fmt: skip


def chunks_of(rows) -> dict[int, tuple[int, int]]:
    """(owner, chunk) of each row of tiles, by its first row in the whole, as CONFIG cuts them."""
    found, start = {}, 0
    for owner, count in enumerate(rows):
        for row in range(0, count, 32):
            found[start + row] = owner, row // 64
        start += count
    return found


def uneven(size: int) -> tuple[int, ...]:
    return (70, 0, 33, 40)[:size]


def check(trace, rows):
    """Each rank computes every tile of the whole once and stores it; a program does one thing after the other."""
    tiles = sorted((row, column) for row in chunks_of(rows) for column in range(0, N, 64))
    for rank in range(len(trace.launches)):
        for launch in range(2):
            computed = of(trace, "compute", launch, rank=rank)
            assert sorted((s.arguments["row"], s.arguments["column"]) for s in computed) == tiles
            stored = of(trace, "store", launch, rank=rank)
            assert {(s.arguments["row"], s.arguments["column"]) for s in stored} >= set(tiles)
    programs = len(trace.launches[0][-1].marks)
    assert trace.summary().programs == {"comm": CONFIG.num_comm, "compute": programs - CONFIG.num_comm}
    check_times(trace)


def check_times(trace):
    by_program = {}
    for s in trace.slices:
        assert s.end_us >= s.begin_us >= 0
        by_program.setdefault((s.rank, s.launch, s.program), []).append(s)
    for slices in by_program.values():
        assert all(first.end_us == second.begin_us for first, second in zip(slices, slices[1:], strict=False))
    assert trace.lost == 0


@pytest.mark.ranks(2, 4)
def test_rows_are_sent_then_awaited_then_multiplied(ctx):
    rows = uneven(ctx.size)
    trace = recorded(ctx, "all_gather_matmul", rows)
    check(trace, rows)
    for rank in range(ctx.size):
        for s in of(trace, "compute", rank=rank):
            source, chunk = chunks_of(rows)[s.arguments["row"]]
            awaited = [
                w for w in of(trace, "wait", rank=rank, chunk=chunk, peer=source)
                if (w.program, w.end_us) == (s.program, s.begin_us)
            ]  # fmt: skip
            assert len(awaited) == (source != rank)
            for w in awaited:
                (sent,) = of(trace, "send", rank=source, chunk=chunk, peer=rank)
                assert sent.begin_us < w.end_us + trace.clock_error_us


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_a_chunk_is_sent_once_its_tiles_are_computed_and_stored_once_the_peers_are_there(ctx, op):
    rows = uneven(ctx.size)
    if op == "matmul_all_reduce":
        rows = collectives.split_rows(sum(rows), ctx.size)
    trace = recorded(ctx, op, rows)
    check(trace, rows)
    for rank, peer in itertools.permutations(range(ctx.size), 2):
        for chunk in range(max(-(-rows[peer] // 64), 1)):
            tiles = [s for s in of(trace, "compute", rank=rank) if chunks_of(rows)[s.arguments["row"]] == (peer, chunk)]
            sent = min(of(trace, "send", rank=rank, chunk=chunk, peer=peer), key=lambda s: s.begin_us)
            assert all(s.end_us <= sent.begin_us for s in tiles)
            awaited = of(trace, "wait", rank=peer, chunk=chunk, peer=peer)
            assert len(awaited) == len(tiles)
            assert all(sent.begin_us < s.end_us + trace.clock_error_us for s in awaited)
            stored = [s for s in of(trace, "store", rank=peer) if chunks_of(rows)[s.arguments["row"]] == (peer, chunk)]
            assert {(s.program, s.begin_us) for s in stored} == {(s.program, s.end_us) for s in awaited}
    sends = of(trace, "send")
    places = {(s.rank, s.arguments["chunk"], s.arguments["peer"]) for s in sends}
    if op == "matmul_reduce_scatter":  # of an all-reduce, chunks of the sums follow
        assert len(sends) == len(places)
    else:
        assert len(sends) > len(places)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_a_tile_is_sent_while_the_next_one_is_computed(ctx, op):
    rows = collectives.split_rows(70 * ctx.size, ctx.size)
    config = dataclasses.replace(CONFIG, num_comm=0, interleaved=True, max_programs=3)
    trace = recorded(ctx, op, rows, config=config)
    for rank, program in itertools.product(range(ctx.size), range(3)):
        done = [s for s in trace.slices if (s.rank, s.program, s.launch) == (rank, program, 1)]
        owed, stored, sent = [], [], []
        for s in done:
            if s.kind == "store":
                assert not owed
                stored.append(s)
                owner, chunk = chunks_of(rows)[s.arguments["row"]]
                peers = [owner] if owner != rank else []
                if op == "matmul_all_reduce" and owner == rank:
                    peers = [(rank + step) % ctx.size for step in range(1, ctx.size)]
                owed = [(chunk, peer) for peer in peers]
                sent += [s] if owed else []
            elif s.kind == "send":
                assert owed.pop(0) == (s.arguments["chunk"], s.arguments["peer"])
            else:
                assert s.kind != "wait" or not owed  # for peers may wait for just that
        assert not owed
        resumed = [s for s in sent if s is not stored[-1]]  # in the midst of the next tile
        assert len([s for s in done if s.kind == "compute"]) == len(stored) + len(resumed)
    assert trace.summary().programs == {"compute": 3}
    check_times(trace)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_the_last_part_of_a_tile_collects_the_others(ctx, op):
    trace = recorded(ctx, op, (64, 64), config=dataclasses.replace(CONFIG, split_tiles=1, max_splits=2))
    for rank in range(2):
        (collected,) = of(trace, "collect", rank=rank, peer=rank)
        stored = [s for s in of(trace, "store", rank=rank) if s.program == collected.program]
        whole = min((s for s in stored if s.begin_us >= collected.end_us), key=lambda s: s.begin_us)
        (part,) = (s for s in of(trace, "store", rank=rank, **whole.arguments) if s is not whole)
        assert part.begin_us <= collected.end_us
        assert len(of(trace, "compute", rank=rank, **whole.arguments)) == 2
        assert len(of(trace, "compute", rank=rank)) == 8 + 1
    check_times(trace)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["packets", "chunks"])
@pytest.mark.parametrize("op", COLLECTIVES)
def test_collectives_send_every_chunk_to_every_peer(ctx, op, way):
    config = CollectiveConfig(0, 0, 0, hop_bytes=-1) if way == "chunks" else CollectiveConfig()
    trace = recorded(ctx, op, (96, 96) if op == "all_reduce" else (96, 33), config=config)
    for rank in range(2):
        sent, awaited = of(trace, "send", rank=rank, peer=1 - rank), of(trace, "wait", rank=1 - rank)
        assert awaited and {s.arguments["chunk"] for s in sent} >= {s.arguments["chunk"] for s in awaited}
        first = min(sent, key=lambda s: s.begin_us)
        assert all(first.begin_us < s.end_us + trace.clock_error_us for s in awaited)
    assert trace.summary().shares.keys() == {"comm"}
    check_times(trace)


@pytest.mark.ranks(2)
def test_marks_without_room_are_counted_and_shown(ctx):
    config = dataclasses.replace(CONFIG, max_programs=3)  # each computes several tiles
    with pytest.warns(UserWarning, match=r"the trace lacks \d+ marks, .* pass tracing\(marks=\.\.\.\) more than 4"):
        trace = recorded(ctx, "matmul_reduce_scatter", (96, 96), marks=4, config=config)
    short = [s for s in trace.slices if s.kind == "lost"]
    assert trace.lost == sum(s.arguments["marks"] for s in short) > 0
    full = recorded(ctx, "matmul_reduce_scatter", (96, 96), config=config)
    counts = [[len(program) for launch in own for program in launch.marks] for own in full.launches]
    assert trace.lost == sum(max(count - 4, 0) for own in counts for count in own)
    assert "lost" in trace.summary().shares["compute"] and full.lost == 0


@pytest.mark.ranks(3)
def test_clocks_that_are_apart_are_aligned(ctx):
    if ctx.runtime != "simulated":
        pytest.skip("sets the clock of the simulated runtime")
    ahead = ctx.rank * 86400 * 10**9
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(marks, "clock_ns", interpreter.builtin(lambda: time.monotonic_ns() + ahead))
        compared = clocks.compare_clocks(ctx)
        assert np.abs(compared.lead - np.arange(3) * 86400e9).max() <= compared.error_ns
        began = time.monotonic_ns()
        trace = recorded(ctx, "all_gather_matmul", (64,) * 3)
        took_us = (time.monotonic_ns() - began) / 1e3
    assert max(s.end_us for s in trace.slices) < took_us + trace.clock_error_us
    check_times(trace)


def test_leads_lie_within_their_bounds():
    """Signals of random durations between clocks with random leads: the truth is never outside, and never far."""
    generator = np.random.default_rng(0)
    size, rounds, truth = 4, 64, np.array([0, 10**15, -(10**12), 77])
    noted = np.zeros((size, rounds, size - 1, 2), np.int64)
    for turn in range(rounds):
        for step in range(1, size):
            sent = turn * 10**6 + generator.integers(0, 5000, size)
            for rank in range(size):
                source = (rank - step) % size
                noted[rank, turn, step - 1, 0] = sent[rank] + truth[rank]
                arrived = max(sent[source] + generator.integers(900, 4000), sent[rank])
                noted[rank, turn, step - 1, 1] = arrived + truth[rank]
    found = clocks.leads(noted)
    assert np.abs(found.lead - truth).max() <= found.error_ns < 2500


def a_trace() -> Trace:
    """Two ranks of one comm and one compute program; rank 1's clock is 1000 ns ahead, at the end 2000."""

    def program(*kinds):
        return np.array([[marks_of.index(kind), first, second, at] for kind, first, second, at in kinds], np.int64)

    marks_of = list(marks.KINDS)
    start = 1_700_000_000_000_000_000
    launches = []
    for rank, ahead in ((0, 0), (1, 1500)):
        at = start + ahead
        comm = program(("send", 0, 1 - rank, at), ("wait", 0, 1 - rank, at + 4000), ("end", 7, 0, at + 6000))
        work = program(("compute", 0, 64, at + 2000), ("store", 0, 64, at + 8000), ("end", 8, 0, at + 10000))
        launches.append([Launch("all_gather_matmul", 1, 0, [comm, work], [0, 0])])
    before = clocks.Comparison(np.array([start - 10**6, start - 10**6 + 1000]), np.array([0.0, 1000.0]), 300.0)
    after = clocks.Comparison(np.array([start + 10**6, start + 10**6 + 2000]), np.array([0.0, 2000.0]), 400.0)
    trace = Trace()
    trace.fill(launches, before, after)
    return trace


def test_the_summary_says_what_the_time_went_to():
    trace = a_trace()
    assert (trace.clock_error_us, trace.lost) == (0.4, 0)
    first, second = (of(trace, "send", 0, rank=rank)[0] for rank in range(2))
    assert abs(first.begin_us - second.begin_us) < 0.01  # the drift is halfway
    summary = trace.summary()
    assert summary.operation == "all_gather_matmul" and summary.ranks == 2
    assert summary.programs == {"compute": 1, "comm": 1}
    assert summary.shares["comm"] == pytest.approx({"wait": 0.2, "send": 0.4, "idle": 0.4}, abs=1e-3)
    assert summary.shares["compute"] == pytest.approx({"compute": 0.6, "store": 0.2, "idle": 0.2}, abs=1e-3)
    assert summary.span_us == pytest.approx(10, abs=0.02)
    assert summary.moving_us == pytest.approx(4, abs=0.01) and summary.hidden == pytest.approx(0.5, abs=0.01)
    with pytest.raises(ValueError, match="launch 1 of 1"):
        trace.summary(1)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_the_file_is_what_trace_viewers_read(tmp_path, name):
    trace = a_trace()
    trace.save(tmp_path / name)
    opened = gzip.open if name.endswith("gz") else open
    with opened(tmp_path / name, "rt") as file:
        events = json.load(file)["traceEvents"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named[0, 1] == "comm 0 (SM 7)" and named[1, 2] == "compute 1 (SM 8)" and named[0, 0] == "launches"
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"rank 0", "rank 1"}
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == len(trace.slices) + 2
    assert all((e["pid"], e["tid"]) in named and e["dur"] >= 0 and e["ts"] >= 0 for e in slices)
    (tile,) = (e for e in slices if e["pid"] == 1 and e["cat"] == "compute")
    assert tile["name"] == "compute 0 64" and tile["args"] == {"row": 0, "column": 64, "launch": 0}
    arrows = [(e["ph"], e["pid"], e["tid"]) for e in events if e["name"] == "chunk"]
    assert arrows == [("s", 0, 1), ("f", 1, 1), ("s", 1, 1), ("f", 0, 1)]


def test_slices_of_a_thread_meet_in_the_file_and_do_not_overlap_after_rounding(tmp_path):
    program = np.array([[1, 0, 0, at] for at in range(10)] + [[0, 0, 0, 10]])
    trace = Trace()
    before, after = (clocks.Comparison(np.array([at]), np.array([lead]), 0.0) for at, lead in ((0, 0.0), (10, 3.3)))
    trace.fill([[Launch("all_gather", None, 0, [program], [0])]], before, after)
    trace.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tiles = [e for e in events if e.get("cat") == "compute"]
    assert len(tiles) == 10
    assert all(round(a["ts"] + a["dur"], 3) == b["ts"] for a, b in itertools.pairwise(tiles))


@pytest.mark.ranks(2)
def test_only_what_is_in_the_block_is_recorded(ctx):
    with pytest.raises(KeyError), tracing(ctx):  # the ranks part here, and nobody waits for anybody
        raise KeyError
    assert ctx.recorder is None
    with pytest.raises(ValueError, match="marks=1, but a program makes at least 2"), tracing(ctx, marks=1):
        pass
    with tracing(ctx) as empty, pytest.raises(ValueError, match="is being traced already"), tracing(ctx):
        pass
    call(ctx, "all_gather", (8, 8))
    assert empty.launches == [[], []] and empty.slices == []
    with pytest.raises(ValueError, match='^summary: nothing was recorded on every rank; call .* with path="fused"'):
        empty.summary()
    x = torch.ones(8, 16, device=ctx.device, requires_grad=True)
    with tkernels.tracing(ctx) as trace:
        tkernels.all_gather_matmul(x, torch.ones(8, 16, device=ctx.device), path="fused", ctx=ctx).sum().backward()
    operations = [[launch.operation for launch in own] for own in trace.launches]
    assert operations == [["all_gather_matmul", "matmul_reduce_scatter"]] * 2


# The command


@starts_ranks(2)
def test_the_command_writes_a_trace_and_says_what_is_in_it(tmp_path, capsys):
    out = tmp_path / "trace.json"
    arguments = f"trace all_gather_matmul --shape tiny --ranks 2 --dtype fp32 --calls 2 --out {out} --json -"
    assert cli.main(arguments.split()) == 0
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert result["sizes"] == [64, 64, 64] and result["lost"] == 0
    shares = result["summary"]["shares"]
    assert set(shares) == {"comm", "compute"} and shares["comm"]["send"] > 0
    assert sum(kinds.get("compute", 0) for kinds in shares.values()) > 0  # comm programs may take all tiles of so few
    assert all(sum(kinds.values()) == pytest.approx(1) for kinds in shares.values())
    assert "all_gather_matmul tiny (M 64, N 64, K 64, fp32) on 2 ranks" in said.err
    assert f"{out}: open it in https://ui.perfetto.dev" in said.err
    events = json.loads(out.read_text())["traceEvents"]
    assert [e["name"] for e in events if e.get("cat") == "launch"] == ["all_gather_matmul 0", "all_gather_matmul 1"] * 2


@starts_ranks(2)
def test_the_command_records_collectives_too(tmp_path, capsys):
    out = tmp_path / "trace.json"
    arguments = f"trace reduce_scatter --shape tiny --ranks 2 --dtype fp32 --calls 1 --out {out} --json -"
    assert cli.main(arguments.split()) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["operation"] == "reduce_scatter" and "send" in result["summary"]["shares"]["comm"]


@pytest.mark.quick
@pytest.mark.parametrize(
    "arguments, said",
    [
        ("all_gather_matmul --shape none", "there is no shape 'none' for all_gather_matmul: give MxNxK, or one of"),
        ("all_gather_matmul --shape rs-a", "there is no shape 'rs-a' for all_gather_matmul: give MxNxK, or one of"),
        ("all_gather_matmul --shape layers", "there is no shape 'layers' for all_gather_matmul"),
        ("all_gather_matmul --shape 0x64x64", "0x64x64: M, N and K must be at least 1"),
        ("all_gather_matmul --shape tiny --ranks 1", "1 rank has nobody to talk to"),
        ("all_gather_matmul --shape tiny --ranks 3", "M=64, N=64 doesn't divide by 3 ranks"),
        ("matmul_all_reduce --shape 3x5x7 --ranks 2", "K=7 doesn't divide by 2 ranks"),
    ],
)
def test_what_cannot_be_recorded_is_refused(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["trace", *arguments.split()])
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1


@pytest.mark.quick
def test_large_shapes_are_refused_where_the_interpreter_would_take_hours(capsys):
    if tkernels.RUNTIME != "simulated":
        pytest.skip("about the simulated runtime")
    with pytest.raises(SystemExit) as ended:
        cli.main("trace all_gather_matmul --shape llama70b-qkv".split())
    assert ended.value.code == 2
    assert "would take the interpreter hours" in capsys.readouterr().err
