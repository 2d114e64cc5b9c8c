"""Named shapes of real models, (M, N, K) of the whole GEMM over all ranks, and their selection by commands.

M tokens.  N out-features.  K in-features.  A shape of a model is named after the model and the layer.
"""

import torch

from tkernels.comm import runtime

Shape = tuple[int, int, int]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}  # by their names on the command line
WITH_FP8 = DTYPES | {"fp8": torch.float8_e4m3fn}
WITH_TF32 = WITH_FP8 | {"tf32": torch.float32}

LARGEST = 1 << 30  # of M, N and K: torch counts the bytes of a matrix in 63 bits
SIMULATED_LIMIT = 1 << 24  # M * N * K that the interpreter computes in seconds

# For tests.
TINY: dict[str, Shape] = {
    "tiny": (64, 64, 64),
    "tiny-wide": (128, 96, 160),
    "tiny-m1": (1, 64, 64),
}

COLUMN_PARALLEL: dict[str, Shape] = {
    "llama8b-qkv": (8192, 6144, 4096),
    "llama8b-gate-up": (8192, 28672, 4096),
    "llama70b-qkv": (8192, 10240, 8192),
    "llama70b-gate-up": (8192, 57344, 8192),
    "llama70b-gate-up-4k": (4096, 57344, 8192),
    "llama405b-gate-up": (8192, 106496, 16384),
    "gpt3-fc1": (2048, 49152, 12288),
}

ROW_PARALLEL: dict[str, Shape] = {
    "llama8b-o": (8192, 4096, 4096),
    "llama8b-down": (8192, 4096, 14336),
    "llama70b-o": (8192, 8192, 8192),
    "llama70b-down": (8192, 8192, 28672),
    "llama70b-down-4k": (4096, 8192, 28672),
    "rs-a": (8192, 8192, 57344),
    "rs-b": (8192, 8192, 10240),
    "rs-c": (8192, 4096, 6144),
    "rs-d": (4096, 8192, 57344),
    "rs-e": (2048, 12288, 49152),
}

FEW_TOKENS = (1, 16, 64, 256, 1024, 2048)


def _with_few_tokens(shapes: dict[str, Shape]) -> dict[str, Shape]:
    """llama70b's layers with the token counts of decoding and of short prompts, named NAME-mTOKENS."""
    names = [name for name in shapes if name.startswith("llama70b") and not name.endswith("-4k")]
    return {f"{name}-m{M}": (M, *shapes[name][1:]) for name in names for M in FEW_TOKENS}


def _local(ranks: int) -> list[Shape]:
    """The local GEMMs of one of `ranks` GPUs in the layers above."""
    columns = [(M, N // ranks, K) for M, N, K in COLUMN_PARALLEL.values()]
    return columns + [(M, N, K // ranks) for M, N, K in ROW_PARALLEL.values()]


LOCAL: dict[str, Shape] = {"x".join(map(str, shape)): shape for shape in _local(2) + _local(4)}

# All-reduces of M rows of 8192 elements, named after their size in 16-bit elements.
SHORT_SUMS: dict[str, Shape] = {
    "16KB": (1, 8192, 8192),
    "64KB": (4, 8192, 8192),
    "256KB": (16, 8192, 8192),
    "1MB": (64, 8192, 8192),
    "2MB": (128, 8192, 8192),
}

LAYERS: dict[str, dict[str, Shape]] = {
    "gemm": LOCAL,
    "all_gather_matmul": COLUMN_PARALLEL,
    "matmul_reduce_scatter": ROW_PARALLEL,
    "matmul_all_reduce": ROW_PARALLEL,
    "all_gather": COLUMN_PARALLEL,  # of the input, [M, K]
    "reduce_scatter": ROW_PARALLEL,  # of the output, [M, N]
    "all_reduce": ROW_PARALLEL,
}

SMALL: dict[str, dict[str, Shape]] = {
    "all_gather_matmul": _with_few_tokens(COLUMN_PARALLEL),
    "matmul_reduce_scatter": _with_few_tokens(ROW_PARALLEL),
    "matmul_all_reduce": _with_few_tokens(ROW_PARALLEL),
    "all_reduce": SHORT_SUMS,
}

BY_OPERATION: dict[str, dict[str, Shape]] = {op: shapes | SMALL.get(op, {}) for op, shapes in LAYERS.items()}

GROUPS = {"all": BY_OPERATION, "layers": LAYERS, "small": SMALL}


def select(op: str, names: list[str]) -> dict[str, Shape]:
    """The shapes of one operation, by name or group. Unknown names are left out; the tiny shapes are in no group.

    Groups: "layers" has whole sequences, "small" has few tokens, "all" has both.

    >>> select("gemm", ["tiny", "rs-a"])
    {'tiny': (64, 64, 64)}
    """
    known = {**BY_OPERATION[op], **TINY}
    names = [name for given in names for name in (GROUPS[given].get(op, {}) if given in GROUPS else [given])]
    return {name: known[name] for name in names if name in known}


def find(
    operations: list[str], names: list[str], groups: bool = True, run: bool = True
) -> dict[str, dict[str, Shape]]:
    """The shapes of each operation, by name, by group or as MxNxK. A name applies to those operations that have it.

    groups: whether names of groups are accepted. run: whether the shapes are to run here, and must be tiny on the
    simulated runtime. Raises ValueError for a name that none of the operations has.

    >>> find(["matmul", "matmul_all_reduce"], ["1x2x3", "rs-b"])
    {'matmul': {'1x2x3': (1, 2, 3)}, 'matmul_all_reduce': {'1x2x3': (1, 2, 3), 'rs-b': (8192, 8192, 10240)}}
    """
    found = {operation: {} for operation in operations}
    for name in names:
        sizes = _sizes(name)
        here = {operation: {name: sizes} for operation in operations} if sizes else {}
        if not sizes and (groups or name not in GROUPS):
            here = {operation: select(_table(operation), [name]) for operation in operations}
        if not any(here.values()):
            raise ValueError(_unknown(operations, name, groups, run))
        for operation, shapes in here.items():
            found[operation] |= shapes
    return found


def check_interpretable(M: int, N: int, K: int):
    """Raises ValueError for a GEMM that is too large for the simulated runtime, if this is it."""
    if runtime.RUNTIME == "simulated" and M * N * K > SIMULATED_LIMIT:
        small = f"on the simulated runtime, use {', '.join(TINY)} or as small"
        raise ValueError(f"{M}x{N}x{K} would take the interpreter hours; {small}")


def _table(operation: str) -> str:
    return "gemm" if operation == "matmul" else operation


def _sizes(name: str) -> Shape | None:
    """The sizes in MxNxK; None for any other name. Raises ValueError for a size of 0, or too large for any memory."""
    parts = name.split("x")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        return None
    sizes = tuple(map(int, parts))
    if 0 in sizes:
        raise ValueError(f"{name}: M, N and K must be at least 1")
    if max(sizes) > LARGEST:
        raise ValueError(f"{name}: M, N and K must be at most {LARGEST}")
    return sizes


def _unknown(operations: list[str], name: str, groups: bool, run: bool) -> str:
    asked = f"there is no shape {name!r} for {' or '.join(operations)}: give MxNxK, or one of "
    if run and runtime.RUNTIME == "simulated":  # it runs only the tiny shapes
        return f"{asked}{', '.join(TINY)}; the simulated runtime takes what is as small"
    tables = [_table(operation) for operation in operations]
    # Names of the form MxNxK need not be listed, and those of several operations would be too many.
    names = [known for known in BY_OPERATION[tables[0]] if not _sizes(known)] if len(tables) == 1 else []
    text = ", ".join([*names, *TINY])
    held = [group for group, members in GROUPS.items() if any(members.get(table) for table in tables)]
    text += f", or a group: {', '.join(held)}" if groups else ""
    text += "; one operation alone has names of its own" if len(tables) > 1 else ""
    return asked + text
