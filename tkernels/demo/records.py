"""The demo's measurements: made by the ranks, shown by the report, and written unchanged by --json."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Setup:
    """The configuration with which the ranks have started."""

    runtime: str
    transport: str
    device: str
    parallel: str
    ranks: int
    share: str  # of a rank, in words
    dtype: str
    seed: int
    text: str
    characters: int
    vocabulary: int
    layers: int
    features: int
    heads: int
    sequence: int
    batch: int
    tokens: int  # of a step
    parameters: int
    parameters_of_rank: int


@dataclass(frozen=True)
class Step:
    """The losses of one step, and how far they may differ."""

    step: int
    sharded: float
    unsharded: float
    difference: float
    allowed: float
    seconds: float  # of the sharded model's step, of one rank


@dataclass(frozen=True)
class Gradient:
    """A rank's gradient of the first step against the unsharded model's; error is relative to the norm."""

    rank: int
    parameter: str
    error: float
    allowed: float


@dataclass(frozen=True)
class Operation:
    """All calls of one operation on a rank, and the check of one of them against an fp64 reference.

    A pipeline's messages have no seconds, since they overlap with the computation, and no reference.
    """

    operation: str
    calls: int
    sent_bytes: int  # by the rank, to its peers
    seconds: float | None = None  # from call to result, waiting for peers included
    error: float | None = None  # the worst of all ranks, relative to the sum of the terms' absolute values
    allowed: float | None = None


@dataclass
class Result:
    """One run. problem: why it failed, None if the sharded and the unsharded model agree."""

    setup: Setup
    steps: list[Step] = field(default_factory=list)
    gradient: Gradient | None = None  # the worst of all parameters and ranks
    operations: list[Operation] = field(default_factory=list)
    problem: str | None = None
    plot: str | None = None
    seconds: float = 0.0

    @property
    def agree(self) -> bool:
        return self.problem is None
