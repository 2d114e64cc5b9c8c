"""Times of libraries that cannot be part of every run: measured apart from this bench, over local cuBLAS's.

4 and 2 H200s over NVLink, no multicast, bf16, 2026-11-21; cuBLAS was measured in the same run as each of them. cuBLASMp
0.9.1 over NCCL 2.30.4 through nvmath-python 1.0, operands in NCCL memory; TransformerEngine 2.18's Userbuffers in their
default configuration, the better of ring exchange and pipeline.
"""

# By operation and ranks: (cuBLAS, cuBLASMp), us.
CUBLASMP = {
    ("all_gather_matmul", 4): {
        "llama8b-qkv": (142, 221),
        "llama8b-gate-up": (621, 635),
        "llama70b-qkv": (436, 453),
        "llama70b-gate-up": (2581, 2613),
        "llama70b-gate-up-4k": (1247, 1290),
        "llama405b-gate-up": (10544, 10269),
        "gpt3-fc1": (792, 884),
    },
    ("all_gather_matmul", 2): {
        "llama8b-qkv": (269, 277),
        "llama8b-gate-up": (1241, 1251),
        "llama70b-qkv": (879, 892),
        "llama70b-gate-up": (5380, 5421),
        "llama70b-gate-up-4k": (2804, 2800),
        "llama405b-gate-up": (21703, 21587),
        "gpt3-fc1": (1598, 1632),
    },
    ("matmul_reduce_scatter", 4): {
        "llama8b-o": (106, 473),
        "llama8b-down": (315, 640),
        "llama70b-o": (373, 948),
        "llama70b-down": (1262, 1498),
        "llama70b-down-4k": (616, 860),
        "rs-a": (2573, 2730),
        "rs-b": (463, 976),
        "rs-c": (147, 488),
        "rs-d": (1236, 1407),
        "rs-e": (788, 957),
    },
    ("matmul_reduce_scatter", 2): {
        "llama8b-o": (188, 507),
        "llama8b-down": (611, 929),
        "llama70b-o": (724, 1321),
        "llama70b-down": (2542, 3116),
        "llama70b-down-4k": (1225, 1388),
        "rs-a": (5456, 5895),
        "rs-b": (900, 1499),
        "rs-c": (272, 593),
        "rs-d": (2544, 2852),
        "rs-e": (1586, 1866),
    },
}

# By operation and ranks: time divided by cuBLAS's.
USERBUFFERS = {
    ("all_gather_matmul", 4): {
        "llama8b-qkv": 1.850,
        "llama8b-gate-up": 1.056,
        "llama70b-qkv": 1.110,
        "llama70b-gate-up": 1.022,
        "llama70b-gate-up-4k": 1.046,
        "gpt3-fc1": 1.125,
    },
    ("matmul_reduce_scatter", 4): {
        "llama8b-o": 2.468,
        "llama8b-down": 1.185,
        "llama70b-o": 1.346,
        "llama70b-down": 1.062,
        "rs-b": 1.175,
        "rs-e": 1.150,
        "rs-d": 1.077,
    },
}


def over_cublas(line: dict) -> dict[str, float]:
    """The time over local cuBLAS's of each library that was measured on the record's case."""
    case, found = (line["op"], line["ranks"]), {}
    if line["shape"] in CUBLASMP.get(case, {}):
        cublas_us, us = CUBLASMP[case][line["shape"]]
        found["cuBLASMp"] = us / cublas_us
    if line["shape"] in USERBUFFERS.get(case, {}):
        found["Userbuffers"] = USERBUFFERS[case][line["shape"]]
    return found
