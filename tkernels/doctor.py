"""`tkernels doctor`: says what is installed, what is chosen and why, and tries every transport and operation.

The inventory needs no tkernels.comm, so it works on broken installations. Integers are small, so sums are exact: what
an operation returns must equal torch's result bit for bit.
"""

import argparse
import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tkernels.cli import console_of, print_facts, print_table, write_json

RANKS = 2
NAMES = 19  # width of what the report has at the left
TIMEOUT_S = 30.0  # of a wait for a peer; a working wait takes milliseconds once its kernel is compiled
M, N, K = 70, 48, 36  # no multiples of a tile's sizes
OPERATIONS = (
    "matmul",
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "barrier",
)
ANOTHER = "all_gather"  # tried over the transports that are not chosen; a kernel over NVSHMEM compiles in 2.5 s

# The possible names of each package, the one to install first.
PACKAGES = (
    ("torch",), ("triton",), ("numpy",), ("nvshmem4py-cu13", "nvshmem4py-cu12"),
    ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12"),
)  # fmt: skip
LINK_KINDS = {
    "NV": "NVLink",
    "PIX": "PCIe, one switch",
    "PXB": "PCIe, several switches",
    "PHB": "PCIe, through the CPU",
    "NODE": "PCIe, through several host bridges",
    "SYS": "through the link between CPUs",
}  # nvidia-smi's abbreviations; NV18 is 18 NVLinks


@dataclass(frozen=True)
class GPU:
    index: int
    name: str
    memory_gib: float
    multiprocessors: int
    architecture: str  # sm_90, for example


@dataclass(frozen=True)
class Link:
    """The link between two GPUs.

    peer_access: loads and stores work in both directions.
    kind: nvidia-smi's abbreviation, or "unknown".
    """

    gpus: tuple[int, int]
    peer_access: bool
    kind: str

    @property
    def description(self) -> str:
        letters = self.kind.rstrip("0123456789")
        number, known = self.kind.removeprefix(letters), LINK_KINDS.get(letters, "unknown link")
        return f"{number} x {known}" if number else known


@dataclass(frozen=True)
class Outcome:
    """milliseconds: of the second call; the first one compiles. None if it failed."""

    operation: str
    transport: str
    milliseconds: float | None
    problem: str | None


@dataclass
class Diagnosis:
    """The doctor's findings.

    inventory: what is installed, and the GPUs and their links.
    known: of each kind of GPU, by name: whether its kernels were measured, have run, or were compiled and never run.
    runtimes, transports: each with the reason why it cannot be used here, None if it can.
    seconds: how long each part of the diagnosis took.
    skipped: why nothing was tried.
    problems: what is broken.
    """

    inventory: dict
    known: dict[str, str] = field(default_factory=dict)
    runtime: str | None = None
    runtimes: dict[str, str | None] = field(default_factory=dict)
    transport: str | None = None
    transports: dict[str, str | None] = field(default_factory=dict)
    operations: list[Outcome] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    skipped: str | None = None
    problems: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def timed(self, part: str):
        start = time.monotonic()
        yield
        self.seconds[part] = time.monotonic() - start


def add_arguments(parser: argparse.ArgumentParser):
    parser.description = (
        "Say which versions, GPUs and links are here, which runtime and transports would be chosen and why not the "
        "others; then try every transport and every operation on two ranks, with their times. Exit code 1 if something "
        "is broken."
    )
    parser.epilog = "example: tkernels doctor --no-run --json -"
    parser.add_argument("--no-run", action="store_true", help="only say what is here")


def run(arguments: argparse.Namespace) -> int:
    """Take the inventory, try everything, report. Returns the exit code: 0, or 1 if something is broken."""
    from tkernels.launch import RankPool

    console = console_of(arguments.json)
    found = Diagnosis(find_software())
    _say_software(console, found.inventory)
    with RankPool(RANKS, ctx_options={"timeout_s": TIMEOUT_S}) as pool:
        if not arguments.no_run:
            pool.start()  # to import torch while this process does
        with found.timed("inventory"):
            find_gpus(found)
            if not found.problems:
                _choose(found)
        _say_gpus_and_choice(console, found)
        if arguments.no_run:
            found.skipped = "--no-run"
        elif not found.problems:
            _try_everything(console, found, pool)
    _say_verdict(console, found)
    write_json({"ok": not found.problems, **asdict(found)}, arguments.json)
    return 1 if found.problems else 0


# The inventory


def find_software() -> dict:
    """What is installed, at once, since nothing is imported.

    packages: their versions, None if not installed. nvshmem_library, nvshmem_bitcode: the paths of the host library,
    and of the device functions, which the transport nvshmem links into kernels; None if not found.
    """
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "packages": dict(map(_installed, PACKAGES)),
        "nvshmem_library": _nvshmem_file("libnvshmem_host.so*"),
        "nvshmem_bitcode": _nvshmem_file("libnvshmem_device*.bc"),
    }


def _installed(names: tuple[str, ...]) -> tuple[str, str | None]:
    """The first of these names that is installed, and its version; if none is, the first name and None."""
    for name in names:  # like comm.runtime.version_of, which must not be imported here
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return name, importlib.metadata.version(name)
    return names[0], None


def _nvshmem_file(pattern: str) -> str | None:
    try:
        spec = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:  # there is no package nvidia
        return None
    folders = spec.submodule_search_locations if spec else []
    return next((str(path) for folder in folders for path in sorted(Path(folder, "lib").glob(pattern))), None)


def find_gpus(found: Diagnosis):
    """Add the GPUs to the inventory, as torch sees them. cuda: torch's CUDA version, or why there are none."""
    found.inventory |= {"cuda": "torch can't be imported", "gpus": [], "links": [], "problem": None}
    with ThreadPoolExecutor(1) as executor:
        topology = executor.submit(_nvidia_smi_topology)  # takes seconds, as torch does
        try:
            import torch
            import triton  # noqa: F401
        except (ImportError, OSError) as error:  # OSError: one of torch's libraries doesn't load
            found.inventory["problem"] = f"{type(error).__name__}: {error}"
            found.problems.append(found.inventory["problem"])
            return
        if torch.version.cuda is None:
            found.inventory["cuda"] = "this torch is built without CUDA"
            return
        found.inventory["cuda"] = f"CUDA {torch.version.cuda}"
        if not torch.cuda.is_available():
            found.inventory["cuda"] = f"torch is built for CUDA {torch.version.cuda}, but sees no GPU or no driver"
            return
        properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        found.inventory["gpus"] = [
            GPU(index, p.name, p.total_memory / 2**30, p.multi_processor_count, f"sm_{p.major}{p.minor}")
            for index, p in enumerate(properties)
        ]
        # nvidia-smi numbers all GPUs of the machine, so its table applies only where torch sees them all.
        kinds = {} if "CUDA_VISIBLE_DEVICES" in os.environ else link_kinds(topology.result())
        reach = torch.cuda.can_device_access_peer
        found.inventory["links"] = [
            Link((a, b), reach(a, b) and reach(b, a), kinds.get((a, b), "unknown"))
            for a in range(len(properties))
            for b in range(a + 1, len(properties))
        ]


def _nvidia_smi_topology() -> str:
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=8)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def link_kinds(topology: str) -> dict[tuple[int, int], str]:
    """(GPU, GPU) -> kind of link, from what `nvidia-smi topo -m` prints; empty where it can't be read.

    >>> link_kinds("\\tGPU0\\tGPU1\\tCPU Affinity\\nGPU0\\t X \\tNV18\\t0-47\\nGPU1\\tNV18\\t X \\t0-47\\n")
    {(0, 1): 'NV18', (1, 0): 'NV18'}
    """
    plain = re.sub(r"\x1b\[\d*m", "", topology)
    lines = [[cell.strip() for cell in line.split("\t")] for line in plain.splitlines()]
    header = next((line for line in lines if "GPU0" in line[1:]), [])
    return {
        (int(line[0][3:]), int(column[3:])): kind
        for line in lines
        for column, kind in zip(header, line, strict=False)
        if line[0] in header and column != line[0] and all(re.fullmatch(r"GPU\d+", gpu) for gpu in (line[0], column))
    }


def _choose(found: Diagnosis):
    from tkernels import gpus
    from tkernels.comm import runtime

    for gpu in found.inventory["gpus"]:
        capability = divmod(int(gpu.architecture.removeprefix("sm_")), 10)
        if capability >= runtime.AMPERE:
            found.known[gpu.name] = gpus.known_of(gpu.name, capability)
        else:
            found.known[gpu.name] = f"too old: there are kernels for sm_{10 * runtime.AMPERE[0]} and newer"
            if runtime.RUNTIME == "nvshmem":
                found.problems.append(f"{gpu.name}, {gpu.architecture}, is {found.known[gpu.name]}")
    found.runtime, found.runtimes = runtime.RUNTIME, runtime.candidates()
    if found.runtimes[found.runtime] is not None:  # TKERNELS_RUNTIME asked for it
        found.problems.append(f"the {found.runtime} runtime was asked for, but {found.runtimes[found.runtime]}")
        return
    if found.runtime == "simulated":
        reason = "for GPUs, on the nvshmem runtime"
        found.transports = {"simulated": None, "peer": reason, "nvshmem": reason}
    else:
        unreachable = [link.gpus for link in found.inventory["links"] if not link.peer_access]
        found.transports = {
            "simulated": "for the interpreter, on the simulated runtime",
            "peer": f"GPUs {unreachable[0]} can't access each other's memory" if unreachable else None,
            "nvshmem": None if found.inventory["nvshmem_bitcode"] else "its device bitcode is not here",
        }
    found.transport = next((name for name in ("simulated", "peer", "nvshmem") if not found.transports[name]), None)
    if found.transport is None:
        found.problems.append("no transport can be used: " + "; ".join(found.transports.values()))


# Trying


def _try_everything(console, found: Diagnosis, pool):
    import torch

    from tkernels.comm.runtime import most_ranks
    from tkernels.launch import RankError, nothing

    if most_ranks() < RANKS:
        found.skipped = f"a transport needs {RANKS} GPUs, found {most_ranks()}; --runtime simulated needs none"
        if torch.cuda.is_available():
            found.skipped += ", and with TKERNELS_SHARE_GPUS=1 in the environment one is enough"
        return
    what = f"trying every transport and operation on {RANKS} ranks ..."
    console.print()
    if not console.is_terminal:
        console.print(what)
    with console.status(what):  # shows nothing where there is no terminal
        try:
            with found.timed("ranks' start"):
                pool.run(nothing)
        except RankError as error:  # each operation would start ranks again
            found.problems.append(f"the ranks don't start: {error.headline}")
            return
        usable = [transport for transport, reason in found.transports.items() if reason is None]
        for transport in sorted(usable, key=lambda transport: transport != found.transport):
            with found.timed(f"operations over {transport}"):
                for name in OPERATIONS if transport == found.transport else [ANOTHER]:
                    try:
                        outcome = pool.run(try_operation, name, transport)[0]
                    except RankError as error:  # the next call starts new ranks
                        outcome = Outcome(name, transport, None, error.headline)
                    found.operations.append(outcome)
    broken = [outcome for outcome in found.operations if outcome.problem]
    found.problems += [f"{each.operation} over {each.transport}: {each.problem}" for each in broken]
    _say_operations(console, found)


def try_operation(ctx, name: str, transport: str) -> Outcome:
    """Collective. Call one operation twice over a transport; compare the second result with torch's, on every rank."""
    import torch

    import tkernels
    from tkernels.timing import agree

    options = dict(transport=transport, heap_bytes=64 << 20, timeout_s=ctx.timeout_s, default=False)
    with contextlib.nullcontext(ctx) if transport == ctx.transport else tkernels.init(**options) as ctx:
        call, want = _case(ctx, name)
        for _ in range(2):
            ctx.group.barrier()
            start = time.perf_counter()
            got = call()
            ctx.check()  # waits for the device
            seconds = time.perf_counter() - start
        problem = None
        if want is not None and not torch.equal(got, want):
            problem = f"{int((got != want).sum())} of {want.numel()} numbers are not torch's"
        return Outcome(name, transport, seconds * 1e3, agree(ctx, problem))


def _case(ctx, name: str) -> tuple:
    """Returns (the call on this rank, torch's result or None). Every rank generates the operands of all ranks."""
    import torch

    import tkernels

    generator = torch.Generator().manual_seed(0)

    def integers(*sizes):
        return torch.randint(-4, 5, sizes, generator=generator).float().to(ctx.device)

    rank, size = ctx.rank, ctx.size
    x, w, bias = integers(size, M, K), integers(size, N, K), integers(N)
    own = x[0].chunk(size)[rank]  # of one matrix that is split by rows
    total, product = x.sum(0), (x @ w.mT).sum(0) + bias
    operands, want = {
        "matmul": ((x[rank], w[rank], bias), x[rank] @ w[rank].t() + bias),
        "all_gather_matmul": ((own, w[rank], bias), x[0] @ w[rank].t() + bias),
        "matmul_reduce_scatter": ((x[rank], w[rank], bias), product.chunk(size)[rank]),
        "matmul_all_reduce": ((x[rank], w[rank], bias), product),
        "all_gather": ((own,), x[0]),
        "reduce_scatter": ((x[rank],), total.chunk(size)[rank]),
        "all_reduce": ((x[rank],), total),
        "barrier": ((), None),
    }[name]
    options = {} if name == "matmul" else {"ctx": ctx}
    return functools.partial(getattr(tkernels, name), *operands, **options), want


# Saying it


def _say_software(console, inventory: dict):
    from rich.text import Text

    rows = {"python": "{python}, {system}, {cores} cores".format(**inventory)}
    rows |= {name: version or Text("not installed", "dim") for name, version in inventory["packages"].items()}
    for name, path in (("NVSHMEM library", "nvshmem_library"), ("NVSHMEM bitcode", "nvshmem_bitcode")):
        rows[name] = inventory[path] or Text("not found", "dim")
    print_facts(console, rows.items(), NAMES)


def _say_gpus_and_choice(console, found: Diagnosis):
    gpus = found.inventory["gpus"]
    rows = [
        (f"GPU {gpu.index}", f"{gpu.name}, {gpu.memory_gib:.0f} GiB, {gpu.multiprocessors} SMs, {gpu.architecture}")
        for gpu in gpus
    ]
    links = {}  # by kind and access, since machines have few kinds and many pairs
    for link in found.inventory["links"]:
        reach = "peer access" if link.peer_access else "no peer access"
        links.setdefault(f"{link.description}, {reach}", []).append("-".join(map(str, link.gpus)))
    rows += [("link" if len(pairs) == 1 else "links", f"{', '.join(pairs)}: {text}") for text, pairs in links.items()]
    rows += [("" if number else "known", text) for number, text in enumerate(found.known.values())]
    print_facts(console, rows or [("GPUs", f"none: {found.inventory['cuda']}")], NAMES)
    if found.runtime:
        choices = _choices("runtime", found.runtimes, found.runtime)
        print_facts(console, choices + _choices("transport", found.transports, found.transport), NAMES)


def _choices(label: str, reasons: dict[str, str | None], chosen: str | None) -> list[tuple[str, str]]:
    from rich.text import Text

    texts = []
    for name, reason in reasons.items():
        if name == chosen:
            but = f", but {reason}" if reason else ""
            texts.append(Text.assemble((f"{name:<10} ", "bold"), ("chosen", "bold green"), (but, "bold red")))
        else:
            texts.append(Text(f"{name:<10} {f'no: {reason}' if reason else 'possible'}", "dim"))
    return [(label if not number else "", text) for number, text in enumerate(texts)]


def _say_operations(console, found: Diagnosis):
    from rich.text import Text

    rows = []
    for outcome in found.operations:
        milliseconds = "" if outcome.milliseconds is None else f"{outcome.milliseconds:,.2f}"
        result = Text(outcome.problem, "bold red") if outcome.problem else Text("ok", "green")
        rows.append((outcome.operation, outcome.transport, milliseconds, result))
    print_table(console, ("operation", "transport", "milliseconds", ""), rows, right=("milliseconds",))


def _say_verdict(console, found: Diagnosis):
    """The last lines: what is broken, or that everything works."""
    parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in found.seconds.items())
    console.print(f"{sum(found.seconds.values()):.1f} s: {parts}", style="dim")
    if found.skipped:
        console.print(f"\n  nothing was tried: {found.skipped}\n" if found.skipped != "--no-run" else "")
    for problem in found.problems:
        console.print(f"broken: {problem}", style="bold red")
    if not found.problems:
        tried = f"{len(found.operations)} operations work" if found.operations else "chosen"
        console.print(f"{found.runtime} runtime, transport {found.transport}: {tried}", style="bold green")
