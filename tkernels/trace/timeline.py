"""A trace: the launches of all ranks on one time axis, as slices, as a file for Perfetto, and as a summary."""

import gzip
import json
import warnings
from collections import defaultdict
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
        self.clock_error_us, self.tick_ns, self.lost = 0.0, 0, 0

    def fill(self, launches: list[list[Launch]], before: Comparison, after: Comparison):
        """Take all ranks' launches, recorded between two comparisons of their clocks. Warns if marks were lost."""
        self.launches = launches
        self.clock_error_us = max(before.error_ns, after.error_ns) / 1e3
        self.lost = sum(sum(launch.lost) for own in launches for launch in own)
        times = [[program[:, 3] for launch in own for program in launch.marks] for own in launches]
        steps = [np.diff(np.unique(np.concatenate(own))) for own in times if own]
        self.tick_ns = min((int(step.min()) for step in steps if len(step)), default=0)

        def aligned(rank: int, times: np.ndarray) -> np.ndarray:
            """us on rank 0's clock since its first comparison: a float cannot resolve nanoseconds since 1970."""
            elapsed = (times - before.time[rank]).astype(float)
            lead = np.interp(
                elapsed, [0, after.time[rank] - before.time[rank]], [before.lead[rank], after.lead[rank]]
            )
            return (elapsed - (lead - float(before.time[rank] - before.time[0]))) / 1e3

        self.slices = [
            slice
            for rank, own in enumerate(launches)
            for number, launch in enumerate(own)
            for program in range(len(launch.marks))
            for slice in _slices(rank, number, program, launch, aligned(rank, launch.marks[program][:, 3]))
        ]
        if self.lost:
            warnings.warn(
                f"the trace lacks {self.lost} marks, for which programs had no room; pass tracing(marks=...) more than "
                f"{max(len(program) for own in launches for launch in own for program in launch.marks)}",
                stacklevel=4,
            )

    def save(self, path: str | Path):
        """Write the trace as JSON, gzipped if `path` ends with .gz, for https://ui.perfetto.dev and chrome://tracing.

        Each rank is a process, with one thread for whole launches and one for each program, named by its kind and its
        SM. An arrow leads from a send to the wait that it ends, where a launch sends a chunk to a peer only once.
        """
        path = Path(path)
        opened = gzip.open if path.suffix == ".gz" else open
        contents = {
            "traceEvents": [*self._names(), *self._events(), *self._arrows()],
            "displayTimeUnit": "ns",
            "otherData": {
                "clock error (us)": self.clock_error_us,
                "clock tick (ns)": self.tick_ns,
                "lost marks": self.lost,
            },
        }
        with opened(path, "wt") as file:
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
        by_rank = [[] for _ in self.launches]
        for slice in self.slices:
            if slice.launch == number:
                by_rank[slice.rank].append(slice)
        spent = defaultdict(lambda: defaultdict(float))
        spans, moving, hidden = [], [], []
        for own, slices in zip(self.launches, by_rank, strict=True):
            spans.append(max(s.end_us for s in slices) - min(s.begin_us for s in slices))
            for slice in slices:
                spent[own[number].role(slice.program)][slice.kind] += slice.end_us - slice.begin_us
            for program in range(len(own[number].marks)):
                spent[own[number].role(program)]["idle"] += spans[-1]
            moves = _union([(s.begin_us, s.end_us) for s in slices if s.kind in MOVES])
            work = _union([(s.begin_us, s.end_us) for s in slices if s.kind == "compute"])
            moving.append(_length(moves))
            hidden.append(_length(moves) + _length(work) - _length(_union(moves + work)))
        shares = {}
        for role, times in sorted(spent.items(), reverse=True):
            total = times.pop("idle")
            busy = {kind: times[kind] / total for kind in SHARES if kind in times}
            shares[role] = busy | {"idle": 1 - sum(busy.values())}
        first = self.launches[0][number]
        roles = [first.role(program) for program in range(len(first.marks))]
        return Summary(
            first.operation,
            len(self.launches),
            max(spans),
            shares,
            {role: roles.count(role) for role in shares},
            sum(moving) / len(moving),
            sum(hidden) / sum(moving) if sum(moving) else 1.0,
        )

    def _names(self) -> Iterator[dict]:
        for rank, own in enumerate(self.launches):
            yield _name("process_name", rank, 0, name=f"rank {rank}")
            yield _name("process_sort_index", rank, 0, sort_index=rank)
            threads = {LAUNCHES: "launches"}
            for launch in own:
                for program, marks in enumerate(launch.marks):
                    place = f" (SM {marks[-1, 1]})" if len(marks) else ""
                    threads.setdefault(_thread(launch, program), f"{launch.role(program)} {program}{place}")
            for thread, name in threads.items():
                yield _name("thread_name", rank, thread, name=name)
                yield _name("thread_sort_index", rank, thread, sort_index=thread)

    def _events(self) -> Iterator[dict]:
        spans: dict[tuple[int, int], tuple[float, float]] = {}
        for slice in self.slices:
            key = slice.rank, slice.launch
            begin, end = spans.get(key, (slice.begin_us, slice.end_us))
            spans[key] = min(begin, slice.begin_us), max(end, slice.end_us)
            thread = _thread(self.launches[slice.rank][slice.launch], slice.program)
            event = _event(slice.name, slice.kind, slice.rank, thread, slice.begin_us, slice.end_us)
            event["args"] = slice.arguments | {"launch": slice.launch}
            if slice.kind in COLOURS:
                event["cname"] = COLOURS[slice.kind]
            yield event
        for (rank, number), (begin, end) in spans.items():
            name = f"{self.launches[rank][number].operation} {number}"
            yield _event(name, "launch", rank, LAUNCHES, begin, end)

    def _arrows(self) -> Iterator[dict]:
        sends, waits = defaultdict(list), {}
        for slice in self.slices:
            if slice.kind == "send":
                sends[slice.launch, slice.arguments["chunk"], slice.rank, slice.arguments["peer"]].append(slice)
            elif slice.kind == "wait":
                key = slice.launch, slice.arguments["chunk"], slice.arguments["peer"], slice.rank
                if key not in waits or slice.end_us < waits[key].end_us:
                    waits[key] = slice
        for number, (key, slices) in enumerate(sends.items()):
            if len(slices) > 1 or key not in waits:
                continue
            for slice, phase, at in ((slices[0], "s", slices[0].begin_us), (waits[key], "f", waits[key].end_us)):
                thread = _thread(self.launches[slice.rank][slice.launch], slice.program)
                arrow = {"name": "chunk", "cat": "chunk", "ph": phase, "id": number, "pid": slice.rank, "tid": thread}
                yield arrow | {"ts": round(at, 3)} | ({"bp": "e"} if phase == "f" else {})


def _slices(rank: int, number: int, program: int, launch: Launch, times: np.ndarray) -> Iterator[Slice]:
    marks = launch.marks[program]
    for i in range(len(marks) - 1):
        kind = NAMES[marks[i, 0]]
        arguments = dict(zip(KINDS[kind], marks[i, 1:3].tolist(), strict=False))
        if launch.lost[program] and i == len(marks) - 2:  # its end is unknown: the marks after it are lost
            kind, arguments = "lost", {"marks": launch.lost[program]}
        yield Slice(rank, number, program, kind, float(times[i]), float(times[i + 1]), arguments)


def _thread(launch: Launch, program: int) -> int:
    return 1 + program + launch.lane * LANE


def _name(what: str, rank: int, thread: int, **arguments) -> dict:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": arguments}


def _event(name: str, category: str, rank: int, thread: int, begin: float, end: float) -> dict:
    begin, end = round(begin, 3), round(end, 3)
    return {
        "name": name, "cat": category, "ph": "X", "pid": rank, "tid": thread, "ts": begin, "dur": round(end - begin, 3),
    }  # fmt: skip


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same spans of time, merged where they overlap."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def _length(spans: list[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)
