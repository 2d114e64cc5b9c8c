"""Shows a search's current stage on the terminal, and nothing where there is no terminal."""

import sys

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars


class Progress:
    """One line that disappears at the end. shown: False on all ranks but one."""

    def __init__(self, title: str, shown: bool):
        self.title = title
        self.bars = Bars(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), TimeElapsedColumn(),
            console=Console(stderr=True, highlight=False, soft_wrap=True),
            transient=True,
            disable=not (shown and sys.stderr.isatty()),
        )  # fmt: skip
        self.task = self.bars.add_task(title)

    def begin(self, stage: str, total: int):
        """Begin a stage of `total` steps; 0 if its steps are not reported."""
        self.bars.update(self.task, description=f"{self.title}: {stage}", total=total or None, completed=0)

    def done(self, steps: int):
        self.bars.update(self.task, completed=steps)

    def __enter__(self):
        self.bars.start()
        return self

    def __exit__(self, *exception):
        self.bars.stop()
