"""Every GPU kernel, in the configurations that the library chooses, compiles for sm_90a and passes the gates.

So do some of them for sm_80 and for sm_100a, in the configurations that it chooses there.

The compilations run once a session, in processes of their own (see compile_kernels.py), and need no GPU.
"""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from compile_kernels import ALLOWED, CASES, COLLECTIVES, REFUSED
from packaging.version import Version

import tkernels
from tkernels.comm.runtime import HOPPER
from tkernels.gpus import H200

pytestmark = pytest.mark.compile

FEW_SPILLS = 32  # instructions that store or load one
REGISTERS = 65536  # of a multiprocessor


def cases(names):
    """Parameters of a test, of which a check in a hurry (-m "compile and not exhaustive") takes one in sixteen.

    It takes all of those for other GPUs, and those whose results are stored through pointers, where most would spill.
    """
    stored = "uneven_eights", "unaligned_N_gelu", "unaligned_N_float32"
    usual = {name for name, case in CASES.items() if case.gpu is H200 and case.label not in stored}
    left_out = {name for number, name in enumerate(CASES) if name in usual and number % 16}
    return [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in left_out)) for name in names]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory, request):
    """The facts of every case that a test of this session asks for, by name."""
    items = [item for item in request.session.items if item.path == Path(__file__) and hasattr(item, "callspec")]
    asked = {item.callspec.params[key] for item in items for key in ("name", "plain") if key in item.callspec.params}
    output = tmp_path_factory.mktemp("compile") / "facts.json"
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TKERNELS_RUNTIME"] = "nvshmem"
    command = [sys.executable, script, output, *sorted(asked)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text())


def facts_of(compiled, name: str) -> dict:
    facts = compiled[name]
    if "skip" in facts:
        pytest.skip(facts["skip"])
    assert "error" not in facts, facts["error"]
    return facts


# A gate returns what is wrong with a kernel, in words, or nothing.


def spills(facts):
    constants = facts["constants"]
    # The main loop goes on while a fused operation's tile is finished: that takes a few, once a tile, and an activation
    # some more.
    fused = {"INTERLEAVED", "ACTIVATION"} <= constants.keys()
    few = FEW_SPILLS if fused and constants["ACTIVATION"] > 1 else FEW_SPILLS // 4 if fused else 0
    if facts["spills"] > few or facts["local"] or facts["stack"] > 2 * few:
        return f"{facts['spills']} spills, {facts['stack']} bytes of stack, with {facts['registers']} registers"


def fits(facts):
    if facts["shared"] > facts["shared_bytes"]:
        return f"{facts['shared']} bytes of shared memory; a program may have {facts['shared_bytes']}"
    if facts["registers"] * facts["threads"] > REGISTERS:
        return f"{facts['registers']} registers for each of {facts['threads']} threads"


def tensor_cores(facts):
    constants = facts["constants"]
    tensors = facts["dtype"] in ("fp8", "fp16", "bf16")
    expected = "BLOCK_K" in constants and (tensors or constants["PRECISION"] == "tf32")
    if expected != bool(facts["tensor_cores"]):
        return f"{facts['tensor_cores']} tensor-core instructions"


def descriptors(facts):
    if {"x", "w", "partials", "sums"} & set(facts["descriptors"]) and not facts["tma_loads"]:
        return "no TMA loads"
    if {"y", "outbox", "sums"} & set(facts["descriptors"]) and not facts["tma_stores"]:
        return "no TMA stores"


def pipeline(facts):
    constants = facts["constants"]
    if {"x", "w"} <= set(facts["descriptors"]):
        bits = int(facts["dtype"].lstrip("bfp"))
        stage = (constants["BLOCK_M"] + constants["BLOCK_N"]) * constants["BLOCK_K"] * bits // 8
        # wgmma reads a stage from shared memory while others arrive; without it a stage is copied to registers first.
        stages = facts["num_stages"] - (not facts["tensor_cores"])
        if facts["shared"] < stages * stage or not facts["mbarrier_waits"]:
            return f"{facts['shared']} bytes of shared memory don't hold {stages} stages of {stage}"
    elif (facts["dtype"] == "fp32" or "BLOCK_K" in constants and facts["sm"] < 90) and not facts["async_copies"]:
        return "no asynchronous copies"  # of fewer than 4 bytes there are none: the cases for sm_80 have aligned rows


def calls(facts):
    if facts["missing"]:
        return "the compiler deleted " + ", ".join(facts["missing"])
    if facts["unexpected"]:
        return "the source doesn't account for " + ", ".join(facts["unexpected"])


def order(facts):
    return "; ".join(facts["violations"])


def sends_first(facts):
    """In a tile's last step a program sends the one before, and then waits for peers, who may wait for what it sent."""
    if facts["constants"].get("INTERLEAVED") and not re.fullmatch(".*s[^s]*w[^s]*", facts["loop"]):
        return f"the main loop signals (s) and waits (w) in the order {facts['loop']!r}"


def remote_stores(facts):
    """Copies between aligned addresses go by 16 bytes: NVLink is slow with less."""
    widths = {width: math.prod(int(part.lstrip("vb")) for part in width.split(".")) for width in facts["copy_stores"]}
    narrow = [width for width, bits in widths.items() if bits < 128]
    if facts["dtype"] == "fp8" and facts["kernel"] == "all_gather_matmul_kernel":
        narrow = [width for width in narrow if width != "b32"]  # a row's scale, which may begin at any 4 bytes
    if facts["constants"].get("ALIGN") == 16 and narrow:
        return f"stores of {', '.join(narrow)} where addresses are aligned to 16 bytes"


def linked(facts):
    if facts["external"]:
        return f"unresolved functions {', '.join(facts['external'])}"


def plain_warps(facts):
    if facts["warp_specialized"]:
        return "warps are specialized; Triton then deletes waits and signals"


def untraced(facts):
    """Without TRACE, nothing but the looks of bounded waits reads a clock in a kernel that can make marks."""
    if facts["marks"] and not facts["constants"]["TRACE"]:
        if facts["multiprocessor_reads"] or facts["clock_reads"] > facts["clock_looks"]:
            return f"{facts['clock_reads']} reads of the clock for {facts['clock_looks']} looks of waits"


GATES = (
    spills, fits, tensor_cores, descriptors, pipeline, calls, order, sends_first, remote_stores, linked, plain_warps,
    untraced,
)  # fmt: skip


def judge(facts) -> dict[str, str]:
    """The gates that refuse a kernel, each with its reason."""
    return {gate.__name__: problem for gate in GATES if (problem := gate(facts))}


@pytest.mark.parametrize("name", cases(CASES))
def test_kernel_passes_the_gates(compiled, name):
    assert judge(facts_of(compiled, name)) == {}


@pytest.mark.parametrize("name", cases([name for name, case in CASES.items() if "matmul" in case.operation]))
def test_descriptors_are_used_where_the_layout_allows(compiled, name):
    case, facts = CASES[name], facts_of(compiled, name)
    constants, descriptors = facts["constants"], facts["descriptors"]
    itemsize = 4 if case.dtype == "float32" else 2
    M, N, K = case.shape
    tma, staged = case.gpu.capability >= HOPPER, case.label.startswith("staged")
    x_allows, w_allows = (
        tma and not case.misaligned and (inner * itemsize % 16 == 0 or staged)
        for inner in (M if case.x_transposed else K, N if case.w_transposed else K)
    )
    assert ("x" in descriptors) == x_allows
    assert ("w" in descriptors) == w_allows
    assert constants["W_TRANSPOSED"] == case.w_transposed
    rows = case.rows or (M // case.ranks,)
    whole_tiles = case.operation == "matmul" or all(count % constants["BLOCK_M"] == 0 for count in rows)
    assert ("y" in descriptors) == (tma and (N * itemsize % 16 == 0 or staged) and whole_tiles)


TRACED = {
    name: dataclasses.replace(case, traced=False, label=case.label.removesuffix("_traced")).name
    for name, case in CASES.items()
    if case.traced
}
assert all(name != plain and plain in CASES for name, plain in TRACED.items())
# A check in a hurry takes one of each fused operation, and of a collective one for each of its kernels.
FIRST_TRACED = {
    (CASES[name].operation, CASES[name].label * (CASES[name].operation in COLLECTIVES)): name
    for name in reversed(TRACED)
}.values()


@pytest.mark.parametrize(
    "name, plain",
    [pytest.param(*pair, marks=[pytest.mark.exhaustive] * (pair[0] not in FIRST_TRACED)) for pair in TRACED.items()],
)
def test_a_traced_kernel_takes_the_same_arguments(compiled, name, plain):
    """Marks add instructions and no parameter, and the gate that finds none in other kernels sees them in this one."""
    traced = facts_of(compiled, name)
    assert traced["parameters"] == facts_of(compiled, plain)["parameters"]
    assert untraced(traced | {"constants": {"TRACE": False}})


@pytest.mark.exhaustive  # looks at cases that a check in a hurry leaves out
def test_every_kernel_of_the_library_is_compiled(compiled):
    package = Path(tkernels.__file__).parent
    files = [file for folder in (package, *package.glob("*/")) for file in folder.glob("*.py")]
    jitted = r"^@triton\.jit\b.*?^def (\w+_kernel)\("
    kernels = {name for file in files for name in re.findall(jitted, file.read_text(), re.MULTILINE | re.DOTALL)}
    assert kernels == {compiled[name].get("kernel") for name in CASES} - {None}


@pytest.mark.exhaustive  # looks at cases that a check in a hurry leaves out
def test_waits_and_signals_are_found_in_the_source(compiled):
    """So that the gate of calls compares with what is really there. The record of an expired wait releases twice."""
    assert facts_of(compiled, "barrier-4-peer")["sites"] == {"acquire": 1, "release": 2, "acq_rel": 1}
    assert facts_of(compiled, "all_gather-bfloat16-aligned-4-peer")["sites"] == {
        "acquire": 1, "release": 2, "acq_rel": 1
    }  # fmt: skip
    # Packets are neither signalled nor waited for by a word of their own.
    assert facts_of(compiled, "all_reduce-bfloat16-small-4-peer")["sites"] == {"release": 2, "acq_rel": 1}
    assert facts_of(compiled, "all_gather_matmul-bfloat16-large_parts-4-peer")["sites"] == {
        "acquire": 5, "release": 2 + 3 * 2, "acq_rel": 1
    }  # fmt: skip


REASONS = {
    "release_without_barrier": order,
    "relaxed_signal_without_fence": order,
    "look_without_agreement": order,
    "tma_store_without_publish": order,
    "tma_load_without_fence": order,
    "signal_behind_wait": sends_first,
    "wait_unused": calls,
    "put_without_align": remote_stores,
    "put_tile_without_align": remote_stores,
    "spilling_config": spills,
    "too_many_stages": fits,
}
# What newer versions of Triton do by themselves, so that the kernel is right there.
DONE_BY_TRITON = {
    "release_without_barrier": "puts a barrier before a release",
    "tma_store_without_publish": "completes TMA stores",
    "wait_unused": "keeps an acquire whose result nobody uses",
}


@pytest.mark.parametrize("name", REFUSED)
def test_gates_refuse(compiled, name):
    refused = judge(facts_of(compiled, name))
    if not refused and name in DONE_BY_TRITON and Version(triton.__version__) >= Version("3.7"):
        pytest.skip(f"Triton {triton.__version__} itself {DONE_BY_TRITON[name]}; 3.6 does not")
    assert list(refused) == [REASONS[name].__name__]


@pytest.mark.parametrize("name", ALLOWED)
def test_gates_allow(compiled, name):
    assert judge(facts_of(compiled, name)) == {}


AHEAD = """
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction
run = JITFunction.run
import compile_kernels
compile_kernels.prepare()
JITFunction.run = run
CompiledKernel._init_handles = lambda kernel: setattr(kernel, "n_spills", 0)  # needs a GPU

import torch, tkernels
from bench.compile import compile_ahead
from tkernels.choice import problem_of
from tkernels.model import choose
from tkernels.tune import Job, Operands
from tkernels.variants import changed

with tkernels.init((0, 2), heap_bytes=1 << 30, transport="peer") as ctx:
    operands = Operands(ctx, Job("all_gather_matmul", 1024, 2048, 512), 0)
    default = choose(problem_of(ctx, "all_gather_matmul", 1024, 1024, 512, torch.bfloat16, "TN"))
    # One kernel for all of them: with chunks larger and smaller than a tile, without and with tiles split along K.
    settings = [{"chunk_rows": rows, "max_splits": splits} for rows in (32, 128, 256) for splits in (1, 4)]
    asked = {str(each): changed(default, each) for each in (*settings, {"num_comm": 3})}
    asked["warps"] = changed(default, {"num_warps": 32})
    object.__setattr__(asked["warps"].gemm, "num_warps", 64)  # 2048 threads, of 1024, past the check of its fields
    calls = {name: lambda config=config: operands.run(config) for name, config in asked.items()}
    compiled = []
    CompiledKernel.run = property(lambda kernel: 1 / 0)  # a launch would come here
    print(sorted(compile_ahead(ctx, calls, compiled.append)), compiled)  # every second one of what there is
"""


def test_compile_ahead_launches_nothing(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TKERNELS_RUNTIME": "nvshmem", "TRITON_CACHE_DIR": str(tmp_path)}
    folder = Path(__file__).parent
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(folder.parent), *sys.path])
    command = [sys.executable, "-c", AHEAD]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['warps'] [1]"


@pytest.mark.exhaustive  # looks at cases that a check in a hurry leaves out
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("label, kernel, whole, gather", [
    ("small-4", "packets_kernel", True, False),
    ("two_shots-4", "packets_kernel", False, True),
    ("one_shot-2", "reduce_kernel", True, False),
    ("aligned-4", "reduce_kernel", False, True),
])  # fmt: skip
def test_a_case_of_an_all_reduce_has_the_size_that_its_name_says(compiled, dtype, label, kernel, whole, gather):
    facts = facts_of(compiled, f"all_reduce-{dtype}-{label}-peer")
    assert facts["kernel"] == kernel
    assert (facts["constants"]["WHOLE"], facts["constants"]["GATHER"]) == (whole, gather)
