"""`tkernels doctor`: shows what is installed, what is chosen and why, and tries every transport and operation."""

import contextlib
import time
from dataclasses import dataclass, field

from tkernels.doctor import inventory
from tkernels.doctor.inventory import Inventory
from tkernels.doctor.report import Report

RANKS = 2
TIMEOUT_S = 30.0  # of a wait for a peer; a working wait takes milliseconds once its kernel is compiled


@dataclass(frozen=True)
class Options:
    """The command's arguments. json: where the result goes, "-" is stdout."""

    try_everything: bool = True
    json: str | None = None


@dataclass
class Diagnosis:
    """The doctor's findings.

    runtimes, transports: each with the reason why it cannot be used here, None if it can.
    seconds: how long each part of the diagnosis took.
    skipped: why nothing was tried.
    problems: what is broken.
    """

    inventory: Inventory
    runtime: str | None = None
    runtimes: dict[str, str | None] = field(default_factory=dict)
    transport: str | None = None
    transports: dict[str, str | None] = field(default_factory=dict)
    round_trips: list = field(default_factory=list)  # of verbs.RoundTrip
    operations: list = field(default_factory=list)  # of operations.Outcome
    seconds: dict[str, float] = field(default_factory=dict)
    skipped: str | None = None
    problems: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def timed(self, part: str):
        start = time.monotonic()
        yield
        self.seconds[part] = time.monotonic() - start


def run(options: Options) -> int:
    """Take the inventory, try everything, report. Returns the exit code: 0, or 1 if something is broken."""
    report = Report(to_stderr=options.json == "-")
    software = inventory.find_software()
    report.software(software)  # before torch is imported, which may fail or take long
    start = time.monotonic()
    found = Diagnosis(inventory.take(software))
    if found.inventory.problem:
        found.problems.append(found.inventory.problem)
    else:
        _choose(found)
    found.seconds["inventory"] = time.monotonic() - start
    report.inventory(found)
    if not options.try_everything:
        found.skipped = "--no-run"
    elif not found.problems:
        _try_everything(found, report)
    report.verdict(found)
    if options.json:
        report.write_json(found, options.json)
    return 1 if found.problems else 0


def _choose(found: Diagnosis):
    from tkernels.comm import runtime

    found.runtime, found.runtimes = runtime.RUNTIME, runtime.candidates()
    if found.runtimes[found.runtime] is not None:  # TKERNELS_RUNTIME asked for it
        found.problems.append(f"the {found.runtime} runtime was asked for, but {found.runtimes[found.runtime]}")
        return
    if found.runtime == "simulated":
        reason = "for GPUs, on the nvshmem runtime"
        found.transports = {"simulated": None, "peer": reason, "nvshmem": reason}
    else:
        unreachable = [link.gpus for link in found.inventory.links if not link.peer_access]
        found.transports = {
            "simulated": "for the interpreter, on the simulated runtime",
            "peer": f"GPUs {unreachable[0]} can't access each other's memory" if unreachable else None,
            "nvshmem": None if found.inventory.nvshmem_bitcode else "libnvshmem_device.bc is not here",
        }
    found.transport = next((name for name in ("simulated", "peer", "nvshmem") if not found.transports[name]), None)
    if found.transport is None:
        found.problems.append("no transport can be used: " + "; ".join(found.transports.values()))


def _try_everything(found: Diagnosis, report: Report):
    import torch

    from tkernels.comm.runtime import most_ranks
    from tkernels.doctor import operations, verbs
    from tkernels.launch import RankError, RankPool

    if most_ranks() < RANKS:
        found.skipped = f"a round trip needs {RANKS} GPUs, found {most_ranks()}; --runtime simulated needs none"
        if torch.cuda.is_available():
            found.skipped += ", and with TKERNELS_SHARE_GPUS=1 in the environment one is enough"
        return
    with RankPool(RANKS, ctx_options={"timeout_s": TIMEOUT_S}) as pool, report.trying(RANKS):

        def attempt(function, *arguments):
            """(result, None), or (None, why it failed); after a failure the pool starts new ranks."""
            try:
                return pool.run(function, *arguments)[0], None
            except RankError as error:
                return None, error.headline

        with found.timed("ranks' start"):
            _, failure = attempt(verbs.nothing)
        if failure:  # each attempt would start ranks again
            found.problems.append(f"the ranks don't start: {failure}")
            return
        for transport in [name for name, reason in found.transports.items() if reason is None]:
            with found.timed(f"round trips over {transport}"):
                for verb in verbs.verbs_of(transport):
                    trip, failure = attempt(verbs.round_trip, verb, transport)
                    found.round_trips.append(trip or verbs.RoundTrip(verb, transport, 0, None, failure))
        with found.timed("operations"):
            for name in operations.OPERATIONS:
                outcome, failure = attempt(operations.run_operation, name)
                found.operations.append(outcome or operations.Outcome(name, None, failure))
    report.tried(found)
    found.problems += [f"{t.verb} over {t.transport}: {t.problem}" for t in found.round_trips if t.problem]
    found.problems += [f"{o.operation}: {o.problem}" for o in found.operations if o.problem]
