"""What a driver is asked for by prepared launches and by Triton's plain ones, as JSON, on a machine without a GPU.

    TKERNELS_RUNTIME=nvshmem python tests/prepared_launches.py facts.json

A script of its own, for the reason of compile_kernels.py. Kernels are compiled for sm_90a and launched by Triton's own
code; what that would ask of the driver is written down in its place.
"""

import functools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import triton.backends.nvidia.driver as nvidia
from compile_kernels import prepare
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import tkernels
from tkernels.comm import collectives
from tkernels.comm.launch import PreparedLaunch
from tkernels.library import in_precision
from tkernels.model import default_config

MAKE_LAUNCHER = getattr(nvidia, "make_launcher", None)  # of Triton 3.6, which generates a launcher for a signature
RUN = JITFunction.run

launched = []  # [grid, cooperative, parameters] of each launch
encoded = []  # the address of each TMA descriptor that is made
sources = []  # of generated launchers


def write_down(arguments, metadata, enter, parameters):
    if enter is not None:
        enter(metadata)
    values = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in parameters]
    launched.append([*arguments[:3], bool(arguments[5]), values])


def without_constants(kinds, values):
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, list | tuple):
            yield from without_constants(kind, value)
        elif kind != "constexpr":
            yield value


def launch_36(kinds):
    def launch(*arguments):
        parameters = list(without_constants(kinds, arguments[nvidia._BASE_ARGS_FORMAT_LEN :]))
        write_down(arguments, arguments[10], arguments[11], parameters)

    return launch


def make_launcher_36(constants, signature, tensordesc_meta):
    kinds = []
    for kind in signature.values():
        tma = isinstance(kind, str) and kind.startswith("tensordesc")
        kinds += ["nvTmaDesc", "i32", "i32", "i64", "i64"] if tma else [kind]
    sources.append(MAKE_LAUNCHER(constants, signature, tensordesc_meta))
    return kinds


def launch_39(*arguments):
    annotations, kinds, values = arguments[-3:]
    parameters = list(without_constants(annotations, values))
    assert len(parameters) == len(kinds)
    write_down(arguments, arguments[8], arguments[9], parameters)


def encode(address, *layout):
    encoded.append(address)
    return ["descriptor", address, *map(str, layout)]


def replace_driver():
    prepare()
    JITFunction.run = RUN
    active = driver.active
    active.launcher_cls = nvidia.CudaLauncher
    active.utils = SimpleNamespace(
        load_binary=lambda *arguments: (1, 2, 32, 0, 1024), unload_module=lambda module: None,
        get_device_properties=lambda device: {"max_shared_mem": 232448},
        fill_tma_descriptor=encode, fill_tma_descriptor_tiled=encode, build_signature_metadata=list, launch=launch_39,
    )  # fmt: skip
    if MAKE_LAUNCHER:
        nvidia.make_launcher, nvidia.library_dirs = make_launcher_36, list
        nvidia.compile_module_from_src = lambda src, **options: SimpleNamespace(launch=launch_36(src))
    else:
        nvidia.PyKernelArg = lambda nested_tuple, type: nested_tuple or type
        nvidia.ARG_TUPLE, nvidia.ARG_CONSTEXPR, nvidia.ARG_KERNEL = "tuple", "constexpr", "kernel"


def calls(ctx) -> dict:
    def make(*shape):
        return torch.empty(shape, dtype=torch.bfloat16)

    by_rule = functools.partial(default_config, dtype=torch.bfloat16)
    by_pointers = by_rule(1, 65, layout="pointers")

    def as_tf32():
        x, w = torch.empty(256, 64), torch.empty(256, 64)
        with in_precision("tf32"):
            tkernels.matmul(x, w, config=default_config(256, 256, torch.float32, precision="tf32"))

    def fused(name):
        return functools.partial(getattr(tkernels, name), ctx=ctx, path="fused")

    return {
        "matmul": lambda: tkernels.matmul(make(256, 64), make(256, 64), make(256), config=by_rule(256, 256)),
        "matmul by pointers": lambda: tkernels.matmul(make(1, 33), make(65, 33), config=by_pointers),
        "matmul as TF32": as_tf32,
        "all_gather_matmul": lambda: fused("all_gather_matmul")(make(64, 64), make(256, 64), make(256)),
        "matmul_reduce_scatter": lambda: fused("matmul_reduce_scatter")(make(256, 64), make(64, 256).t()),
        "matmul_all_reduce": lambda: fused("matmul_all_reduce")(make(250, 64), make(256, 64)),
        "all_gather": lambda: collectives.all_gather(ctx, make(64, 5)),
        "all_reduce": lambda: collectives.all_reduce(ctx, make(64, 64)),
        "barrier": ctx.barrier,
    }


def facts_of(call) -> dict:
    """A call that compiles and one that is prepared; then the launch of the latter again, in other circumstances."""
    sources.clear()
    seen, plain_call = [], PreparedLaunch.__call__

    def watch(launch, *tensors):
        plain_call(launch, *tensors)
        if launch._kernel is collectives.announce_kernel:  # as a workspace grows
            sources.clear()
        else:
            seen.append((launch, tensors))

    PreparedLaunch.__call__ = watch
    call()
    call()
    PreparedLaunch.__call__ = plain_call
    (first, _), (launch, tensors) = seen
    before, hooked = len(encoded), []
    knobs.runtime.launch_enter_hook.add(lambda metadata: hooked.append(metadata.get()["name"]))
    launch(*tensors)
    knobs.runtime.launch_enter_hook.calls.clear()
    facts = {"encoded_again": len(encoded) - before, "hooked": hooked, "launchers": len(set(sources))}
    prepared = launched[-1]
    launch._by_jit(tensors)
    facts |= {"same_launch": first is launch, "prepared": prepared, "plain": launched[-1]}
    if tensors and "descriptor" not in str(prepared):
        moved = [torch.empty(t.numel() + 1, dtype=t.dtype)[1:].as_strided(t.shape, t.stride()) for t in tensors]
        ((kernels, *_),) = launch._kernel.device_caches.values()
        before = len(kernels)
        launch(*moved)
        facts |= {"kernels_for_misaligned": len(kernels) - before, "addresses": [t.data_ptr() for t in moved]}
        facts["misaligned"] = launched[-1]
    return facts


def main():
    replace_driver()
    with tkernels.init((1, 4), heap_bytes=1 << 28, transport="peer") as ctx:
        facts = {name: facts_of(call) for name, call in calls(ctx).items()}
    Path(sys.argv[1]).write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
