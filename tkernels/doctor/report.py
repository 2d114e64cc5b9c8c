"""Shows the doctor's findings, on the terminal and as JSON."""

import contextlib
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tkernels.cli import write_output


class Report:
    def __init__(self, to_stderr: bool):
        self.console = Console(stderr=to_stderr, highlight=False)

    def software(self, here):
        """Print what is installed."""
        missing = Text("not installed", style="dim")
        packages = {name: Text(version) if version else missing for name, version in here.packages.items()}
        rows = [("python", Text(f"{here.python}, {here.system}, {here.cores} cores"))]
        rows += packages.items()
        for name, path in (("NVSHMEM library", here.nvshmem_library), ("NVSHMEM bitcode", here.nvshmem_bitcode)):
            rows.append((name, Text(_from_home(path)) if path else Text("not found", style="dim")))
        self._print_rows(rows)

    def inventory(self, found):
        """Print the GPUs, and what would be chosen."""
        here, rows = found.inventory, []
        if not here.gpus:
            rows.append(("GPUs", Text(f"none: {here.cuda}")))
        for gpu in here.gpus:
            what = f"{gpu.name}, {gpu.memory_gib:.0f} GiB, {gpu.multiprocessors} SMs, {gpu.architecture}"
            rows.append((f"GPU {gpu.index}", Text(what)))
        rows += [(label, Text(text)) for label, text in _links(here.links)]
        self._print_rows(rows)
        if found.runtime:
            self._print_rows(
                _choices("runtime", found.runtimes, found.runtime)
                + _choices("transport", found.transports, found.transport)
            )

    def _print_rows(self, rows):
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="cyan", no_wrap=True, min_width=19)
        grid.add_column()
        for name, value in rows:
            grid.add_row(name, value)
        self.console.print()
        self.console.print(Padding.indent(grid, 2))

    @contextlib.contextmanager
    def trying(self, ranks: int):
        what = f"trying every transport and operation on {ranks} ranks ..."
        self.console.print()
        if self.console.is_terminal:
            with self.console.status(what):
                yield
        else:
            self.console.print(what)
            yield

    def tried(self, found):
        """Print the round trips and operations, one a line."""
        trips = _table("round trip of 2 ranks", "transport", "bytes", "microseconds")
        for trip in found.round_trips:
            cells = [trip.verb, trip.transport, f"{trip.num_bytes or ''}", _number(trip.microseconds)]
            trips.add_row(*cells, _outcome(trip.problem))
        operations = _table("operation", "milliseconds")
        for outcome in found.operations:
            operations.add_row(outcome.operation, _number(outcome.milliseconds), _outcome(outcome.problem))
        for table in (trips, operations):
            self.console.print(Padding.indent(table, 2))
            self.console.print()

    def verdict(self, found):
        """Print the last lines: what is broken, or that everything works."""
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in found.seconds.items())
        self.console.print(Text(f"{sum(found.seconds.values()):.1f} s: {parts}", style="dim"))
        if found.skipped:
            self.console.print(f"\n  nothing was tried: {found.skipped}\n" if found.skipped != "--no-run" else "")
        if found.problems:
            for problem in found.problems:
                self.console.print(Text(f"broken: {problem}", style="bold red"))
            return
        what = f"{found.runtime} runtime, transport {found.transport}"
        tried = f"{len(found.round_trips)} round trips and {len(found.operations)} operations work"
        self.console.print(Text(f"{what}: {tried if found.operations else 'chosen'}", style="bold green"))

    def write_json(self, found, where: str):
        write_output(json.dumps({"ok": not found.problems, **asdict(found)}, indent=2) + "\n", where)


def _table(*names: str) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
    for name in names:
        table.add_column(name, justify="right" if name in ("bytes", "microseconds", "milliseconds") else "left")
    table.add_column("")
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _outcome(problem: str | None) -> Text:
    return Text("ok", style="green") if problem is None else Text(problem, style="bold red")


def _choices(label: str, reasons: dict[str, str | None], chosen: str | None):
    rows = []
    for name, reason in reasons.items():
        if name == chosen:
            text = Text.assemble((f"{name:<10} ", "bold"), ("chosen", "bold green"))
            if reason:
                text.append(f", but {reason}", style="bold red")
        else:
            text = Text(f"{name:<10} {f'no: {reason}' if reason else 'possible'}", style="dim")
        rows.append((label if not rows else "", text))
    return rows


def _links(links):
    """One row for each kind of link and peer access, since machines have few kinds and many pairs."""
    kinds = {}
    for link in links:
        reach = "peer access" if link.peer_access else "no peer access"
        kinds.setdefault(f"{link.description}, {reach}", []).append("-".join(map(str, link.gpus)))
    return [("link" if len(pairs) == 1 else "links", f"{', '.join(pairs)}: {text}") for text, pairs in kinds.items()]


def _from_home(path: str) -> str:
    """The path from the folder `nvidia` on."""
    parts = Path(path).parts
    return str(Path(*parts[parts.index("nvidia") :])) if "nvidia" in parts else path
