"""The arguments of `tkernels tune`."""

import argparse

from tkernels.cli import count, output


def add_arguments(parser: argparse.ArgumentParser):
    parser.description = (
        "Measure configurations of an operation on shapes of yours, on ranks of this machine; the best one is "
        "remembered for calls of that size on such a machine. Exit code 1 if a shape could not be tuned."
    )
    parser.epilog = "example: tkernels tune all_gather_matmul --shape 8192x10240x8192"
    parser.add_argument(
        "operation", nargs="?", metavar="OP",
        help="all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce, matmul, or all; default: all",
    )  # fmt: skip
    parser.add_argument(
        "--shape", metavar="MxNxK",
        help="sizes over all ranks, or names of tkernels.shapes, with commas; those of an operation are listed for a "
        "wrong one; default: layers (simulated: tiny)",
    )  # fmt: skip
    parser.add_argument("--ranks", type=count, metavar="N", help="default: all GPUs, or 2 on the simulated runtime")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="default: bf16")
    parser.add_argument(
        "--layout", choices=("TN", "NN", "NT", "TT", "pointers"), default="TN",
        help="of w and x in memory, as BLAS names it; TN: K contiguous in both; NN: w.t() of a [K, N]; pointers: as "
        "TN, at addresses that TMA can't take, which are no multiples of 16 bytes; what is tuned of sizes that it "
        "can't take is for pointers, whatever is asked; default: TN",
    )  # fmt: skip
    parser.add_argument(
        "--transport", choices=("auto", "peer", "nvshmem", "simulated"), default="auto",
        help="how bytes reach peers: by loads and stores (peer) or by NVSHMEM's device calls (nvshmem); simulated: on "
        "the runtime of that name; default: auto, the first that reaches all ranks",
    )  # fmt: skip
    parser.add_argument(
        "--budget", type=_seconds, metavar="S", default=30.0,
        help="seconds for a shape, compilations not counted; default: 30",
    )  # fmt: skip
    parser.add_argument("--grid", nargs="+", default=[], metavar="FIELD=A,B", help="try these values, and no others")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--list", action="store_true", help="show what is remembered, and tune nothing")
    instead.add_argument("--export", type=output, metavar="PATH", help="write it as JSON lines; - is stdout")
    instead.add_argument("--clear", action="store_true", help="forget it")


def run(arguments: argparse.Namespace) -> int:
    from tkernels.tuner import command

    names = ("operation", "shape", "ranks", "dtype", "layout", "transport", "budget", "json", "list", "export", "clear")
    asked = {name: getattr(arguments, name) for name in names}
    return command.run(command.Options(**asked, grid=tuple(arguments.grid)))


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"takes a number of seconds above 0, not {text!r}")
    return seconds
