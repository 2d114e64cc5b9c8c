"""The shapes of real models, by name: (M, N, K) of the whole product, over all ranks.

M tokens.  N out-features.  K in-features.  The model's name and layer, where a shape is a model's.
"""

Shape = tuple[int, int, int]

SIMULATED_LIMIT = 1 << 24  # M N K that the interpreter does in seconds

# For tests.
TINY: dict[str, Shape] = {
    "tiny": (64, 64, 64),
    "tiny-wide": (128, 96, 160),
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

# Local products: what one GPU of four multiplies in a layer, more or less.
LOCAL: dict[str, Shape] = {f"{M}x{N}x{K}": (M, N, K) for M, N, K in [
    (8192, 14336, 8192),
    (8192, 8192, 14336),
    (4096, 7168, 8192),
    (8192, 1536, 4096),
]}  # fmt: skip

BY_OPERATION: dict[str, dict[str, Shape]] = {
    "gemm": LOCAL,
    "all_gather_matmul": COLUMN_PARALLEL,
    "matmul_reduce_scatter": ROW_PARALLEL,
    "matmul_all_reduce": ROW_PARALLEL,
    "all_gather": COLUMN_PARALLEL,  # of the input, [M, K]
    "reduce_scatter": ROW_PARALLEL,  # of the output, [M, N]
    "all_reduce": ROW_PARALLEL,
}


def select(op: str, names: list[str]) -> dict[str, Shape]:
    """The shapes of one operation by name; "all" is its whole table, without the tiny ones. Unknown names are left out.

    >>> select("gemm", ["tiny", "rs-a"])
    {'tiny': (64, 64, 64)}
    """
    known = {**BY_OPERATION[op], **TINY}
    names = [name for given in names for name in (BY_OPERATION[op] if given == "all" else [given])]
    return {name: known[name] for name in names if name in known}
