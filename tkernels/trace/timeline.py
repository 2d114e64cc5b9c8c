"""A trace: the launches of all ranks on one time axis, as slices, as a file for Perfetto, and as a summary."""

import gzip
import itertools
import json
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tkernels.comm.marks import KINDS
from tkernels.trace.clocks import Comparison

NAMES = tuple(KINDS)
SHARES = (*NAMES[1:], "lost", "idle")  # where the time of programs goes
MOVES = ("send", "copy")  # these move data; the other slices are work on it, or waiting
# Colour names of chrome://tracing. Perfetto derives a colour from a slice's name without its numbers.
COLOURS = {"compute": "good", "store": "vsync_highlight_color", "wait": "terrible", "collect": "bad"}
LAUNCHES = 0  # the thread that shows whole launches; program p of lane l is thread 1 + p + l * LANE
LANE = 100_000


@dataclass(frozen=True)
class Launch:
    """One launch on one rank.

    num_comm: number of comm programs, which send before they compute tiles; None: all programs communicate.
    lane: index of its stream; launches of one lane follow each other.
    marks: of each program, int64 [n, 4]: kind, its two numbers, ns on this rank's clock.
    lost: of each program, the number of marks that did not fit; they were made before its last mark.
    """

    operation: str
    num_comm: int | None
    lane: int
    marks: list[np.ndarray]
    lost: list[int]

    def role(self, program: int) -> str:
        """The kind of a program: "comm" or "compute"."""
        return "comm" if self.num_comm is None or program < self.num_comm else "compute"

    def programs(self) -> dict[str, int]:
        """The number of programs of each kind."""
        return dict(Counter(map(self.role, range(len(self.marks)))))

    def thread(self, program: int) -> int:
        """The number of the thread that shows a program."""
        return 1 + program + self.lane * LANE


@dataclass(frozen=True)
class Slice:
    """One activity of one program; times in us since the trace's first mark, on one axis for all ranks.

    kind: a name of `tkernels.comm.marks.KINDS`, or "lost" for the time of marks that did not fit.
    arguments: row and column of an output tile's first element, in the full output; or chunk and peer.
    """

    rank: int
    launch: int
    program: int
    kind: str
    begin_us: float
    end_us: float
    arguments: dict[str, int]

    @property
    def name(self) -> str:
        return " ".join([self.kind, *map(str, self.arguments.values())])


@dataclass(frozen=True)
class Summary:
    """One launch on all ranks.

    span_us: from a rank's first mark to its last one, of the rank with the longest span.
    shares: by kind of program ("comm", "compute"), fractions of the time of all its programs on all ranks: for each
        kind of slice, and "idle" for the time before a program's first mark and after its last one.
    programs: the number of programs of each kind, on a rank.
    moving_us: time in which at least one program of a rank sends or copies; the mean over ranks.
    hidden: the part of that time in which another program of the rank computes, 0 to 1; 1 where nothing moves.
    """

    operation: str
    ranks: int
    span_us: float
    shares: dict[str, dict[str, float]]
    programs: dict[str, int]
    moving_us: float
    hidden: float


class Trace:
    """The result of `tracing`.

    launches: of each rank, in the order of their calls; the same index on every rank belongs to the same call.
    slices: all of them, by rank, launch, program and time.
    clock_error_us: bound on the remaining offset between the ranks' clocks after their alignment.
    tick_ns: the smallest step seen in the clocks; shorter intervals may appear as zero or as one step.
    lost: the number of marks that did not fit.
    """

    def __init__(self):
        self.launches: list[list[Launch]] = []
        self.slices: list[Slice] = []
        self._by_launch: dict[tuple[int, int], list[Slice]] = {}  # (rank, launch)
        self.clock_error_us, self.tick_ns, self.lost = 0.0, 0, 0

    def fill(self, launches: list[list[Launch]], before: Comparison, after: Comparison):
        """Take all ranks' launches, recorded between two comparisons of their clocks. Warns if marks were lost."""
        self.launches = launches
        self.clock_error_us = max(before.error_ns, after.error_ns) / 1e3
        self.lost = sum(sum(launch.lost) for own in launches for launch in own)
        times = [[marks[:, 3] for launch in own for marks in launch.marks] for own in launches]
        steps = [np.diff(np.unique(np.concatenate(own))) for own in times if own]
        self.tick_ns = min((int(step.min()) for step in steps if len(step)), default=0)

        def aligned(rank: int, times: np.ndarray) -> np.ndarray:
            """us on rank 0's clock since its first comparison: a float cannot resolve nanoseconds since 1970."""
            start, leads = before.time[rank], (before.lead[rank], after.lead[rank])
            elapsed = (times - start).astype(float)
            lead = np.interp(elapsed, [0, after.time[rank] - start], leads)
            return (elapsed - (lead - float(start - before.time[0]))) / 1e3

        self._by_launch = {
            (rank, number): [
                slice
                for program, marks in enumerate(launch.marks)
                for slice in _slices(rank, number, program, launch, aligned(rank, marks[:, 3]).tolist())
            ]
            for rank, own in enumerate(launches)
            for number, launch in enumerate(own)
        }
        self.slices = [slice for slices in self._by_launch.values() for slice in slices]
        if self.lost:
            most = max(len(marks) for own in launches for launch in own for marks in launch.marks)
            text = f"the trace lacks {self.lost} marks, for which programs had no room"
            warnings.warn(f"{text}; pass tracing(marks=...) more than {most}", stacklevel=4)

    def save(self, path: str | Path):
        """Write the trace as JSON, gzipped if `path` ends with .gz, for https://ui.perfetto.dev and chrome://tracing.

        Each rank is a process, with one thread for whole launches and one for each program, named by its kind and its
        SM. An arrow leads from a send to the wait that it ends, where a launch sends a chunk to a peer only once.
        """
        contents = {
            "traceEvents": [*self._names(), *self._activities(), *self._arrows()],
            "displayTimeUnit": "ns",
            "otherData": {
                "clock error (us)": self.clock_error_us,
                "clock tick (ns)": self.tick_ns,
                "lost marks": self.lost,
            },
        }
        with (gzip.open if Path(path).suffix == ".gz" else open)(path, "wt") as file:
            json.dump(contents, file, separators=(",", ":"))

    def summary(self, launch: int = -1) -> Summary:
        """Summarize launch number `launch` over all ranks. Raises ValueError if there is none."""
        count = min(map(len, self.launches), default=0)
        if not count:
            raise ValueError(
                "summary: nothing was recorded on every rank; call an operation on several ranks in the block, small "
                'ones with path="fused", and ask after the block: local GEMMs, the copy engine and replays of CUDA '
                "graphs leave no marks"
            )
        if not -count <= launch < count:
            raise ValueError(f"summary: launch {launch} of {count} that every rank recorded")
        number = launch % count
        slices = [self._by_launch[rank, number] for rank in range(len(self.launches))]
        spans = [end - begin for begin, end in map(_span, slices)]
        moving, hidden = (sum(times) for times in zip(*map(_moving, slices), strict=True))
        spent, total = defaultdict(Counter), Counter()  # us, by kind of program
        for own, theirs, span in zip(self.launches, slices, spans, strict=True):
            for s in theirs:
                spent[own[number].role(s.program)][s.kind] += s.end_us - s.begin_us
            for role, programs in own[number].programs().items():
                total[role] += programs * span
        shares = {}
        for role in sorted(total, reverse=True):
            busy = {kind: spent[role][kind] / total[role] for kind in SHARES if kind in spent[role]}
            shares[role] = busy | {"idle": 1 - sum(busy.values())}
        first = self.launches[0][number]
        return Summary(
            operation=first.operation,
            ranks=len(self.launches),
            span_us=max(spans),
            shares=shares,
            programs=first.programs(),
            moving_us=moving / len(self.launches),
            hidden=hidden / moving if moving else 1.0,
        )

    def _names(self) -> Iterator[dict]:
        for rank, own in enumerate(self.launches):
            threads = {LAUNCHES: "launches"}
            for launch in own:
                for program, marks in enumerate(launch.marks):
                    place = f" (SM {marks[-1, 1]})" if len(marks) else ""
                    threads.setdefault(launch.thread(program), f"{launch.role(program)} {program}{place}")
            names = [("process", 0, rank, f"rank {rank}")]
            names += [("thread", thread, thread, name) for thread, name in threads.items()]
            for what, thread, order, name in names:
                yield _event("M", f"{what}_name", rank, thread, args={"name": name})
                yield _event("M", f"{what}_sort_index", rank, thread, args={"sort_index": order})

    def _activities(self) -> Iterator[dict]:
        for (rank, number), slices in self._by_launch.items():
            launch = self.launches[rank][number]
            if slices:
                yield _activity(f"{launch.operation} {number}", "launch", rank, LAUNCHES, *_span(slices))
            for s in slices:
                more = {"args": s.arguments | {"launch": number}}
                more |= {"cname": COLOURS[s.kind]} if s.kind in COLOURS else {}
                yield _activity(s.name, s.kind, rank, launch.thread(s.program), s.begin_us, s.end_us, **more)

    def _arrows(self) -> Iterator[dict]:
        sends, waits = defaultdict(list), {}  # by launch, chunk, sender and receiver
        for s in self.slices:
            if s.kind == "send":
                sends[s.launch, s.arguments["chunk"], s.rank, s.arguments["peer"]].append(s)
            elif s.kind == "wait":
                key = s.launch, s.arguments["chunk"], s.arguments["peer"], s.rank
                waits[key] = min(waits.get(key, s), s, key=lambda wait: wait.end_us)
        for number, (key, sent) in enumerate(sends.items()):
            if len(sent) == 1 and key in waits:
                first, last = sent[0], waits[key]
                threads = [self.launches[s.rank][s.launch].thread(s.program) for s in (first, last)]
                yield _event("s", "chunk", first.rank, threads[0], first.begin_us, cat="chunk", id=number)
                yield _event("f", "chunk", last.rank, threads[1], last.end_us, cat="chunk", id=number, bp="e")


def _event(phase: str, name: str, rank: int, thread: int, begin_us: float = 0.0, **fields) -> dict:
    return {"name": name, "ph": phase, "pid": rank, "tid": thread, "ts": round(begin_us, 3)} | fields


def _activity(name: str, kind: str, rank: int, thread: int, begin_us: float, end_us: float, **fields) -> dict:
    took = round(end_us, 3) - round(begin_us, 3)  # so that activities of one thread meet, and never overlap
    return _event("X", name, rank, thread, begin_us, cat=kind, dur=round(took, 3), **fields)


def _slices(rank: int, number: int, program: int, launch: Launch, times: list[float]) -> Iterator[Slice]:
    marks = launch.marks[program].tolist()
    for i, (kind, *values, _) in enumerate(marks[:-1]):
        name, arguments = NAMES[kind], dict(zip(KINDS[NAMES[kind]], values, strict=False))
        if launch.lost[program] and i == len(marks) - 2:  # its end is unknown: the marks after it are lost
            name, arguments = "lost", {"marks": launch.lost[program]}
        yield Slice(rank, number, program, name, times[i], times[i + 1], arguments)


def _span(slices: list[Slice]) -> tuple[float, float]:
    return min(s.begin_us for s in slices), max(s.end_us for s in slices)


def _moving(slices: list[Slice]) -> tuple[float, float]:
    """(time in which at least one of these slices moves data, the part of it in which another one computes)."""
    counted = [s for s in slices if s.kind in (*MOVES, "compute")]
    edges = [(s.begin_us, s.kind in MOVES, 1) for s in counted] + [(s.end_us, s.kind in MOVES, -1) for s in counted]
    moving = hidden = 0.0
    active = [0, 0]  # programs that compute, programs that move data
    for (time, moves, change), (after, *_) in itertools.pairwise(sorted(edges)):
        active[moves] += change
        if active[True]:
            moving += after - time
            hidden += after - time if active[False] else 0.0
    return moving, hidden
