"""The command `tkernels`: argument parsing and error output. Subcommands: demo, doctor, tune_command, trace."""

import argparse
import os
import sys
import traceback
from pathlib import Path

import tkernels

RUNTIMES = ("auto", "simulated", "nvshmem")
TRACED = (
    "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "all_gather", "reduce_scatter", "all_reduce"
)  # fmt: skip
PARALLEL = ("tp", "pp", "fsdp", "zero", "ddp")


def main(arguments: list[str] | None = None) -> int:
    """Run one subcommand. Returns its exit code: 0, 1 if it failed, 130 on Ctrl-C; a wrong argument exits with 2.

    Raises SystemExit for the latter.
    """
    options, unknown = _parser().parse_known_args(arguments)
    if unknown:  # reported by the subcommand's parser: the top-level one would not name the subcommand
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as a daemon's
            setattr(sys, name, open(os.devnull, "w"))
    try:
        if options.runtime:
            _choose_runtime(options.runtime)
        return options.command(options)
    except KeyboardInterrupt:
        return 130
    except argparse.ArgumentError as error:  # from checks that only the subcommand's own modules can make
        if options.traceback:
            traceback.print_exc()
        options.parser.error(str(error))
    except Exception as error:  # the outermost handler: print one sentence for the user
        if options.traceback:
            traceback.print_exc()
        else:
            print(f"tkernels: {_sentence(error)} (--traceback shows where)", file=sys.stderr)
        return 1


def _choose_runtime(asked: str):
    os.environ["TKERNELS_RUNTIME"] = asked  # read when tkernels.comm is imported, which the command does
    chosen = sys.modules.get("tkernels.comm.runtime")
    if chosen is not None and asked not in ("auto", chosen.RUNTIME):
        raise ValueError(f"--runtime {asked}: this process uses the {chosen.RUNTIME} runtime already")


def _demo(options: argparse.Namespace) -> int:
    from tkernels import demo

    plot = None if options.no_plot else options.plot
    names = ("parallel", "ranks", "steps", "dtype", "seed", "json")
    return demo.run(demo.Options(**{name: getattr(options, name) for name in names}, plot=plot))


def _tune(options: argparse.Namespace) -> int:
    from tkernels import tune_command

    return tune_command.run(options)


def _trace(options: argparse.Namespace) -> int:
    from tkernels.trace import command

    names = ("operation", "shape", "ranks", "dtype", "calls", "out", "json")
    return command.run(command.Options(**{name: getattr(options, name) for name in names}))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help shows what it takes\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="tkernels",
        description="Triton kernels that overlap tensor-parallel communication with matrix multiplication.",
        epilog="example: tkernels demo --ranks 4 --steps 20",
    )
    parser.add_argument("--version", action="version", version=f"tkernels {tkernels.__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)

    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--runtime", choices=RUNTIMES, help="simulated needs no GPU; default: $TKERNELS_RUNTIME, or auto, what fits"
    )  # fmt: skip
    common.add_argument("--json", type=output, metavar="PATH", help="write the result here as JSON; - is stdout")
    common.add_argument("--traceback", action="store_true", help="show all of an error, not its first sentence alone")

    demo = commands.add_parser(
        "demo",
        parents=[common],
        help="train a transformer on several ranks, beside the same one on a single rank",
        description="Train a small transformer on Python's own help texts, sharded over several ranks and unsharded "
        "beside it, and compare: the losses of each step, the first gradients, and a call of each operation. Exit code "
        "1 if anything differs by more than rounding explains.",
        epilog="example: tkernels demo --parallel fsdp --ranks 4 --dtype bf16",
    )
    demo.add_argument(
        "--parallel", choices=PARALLEL, default="tp",
        help="what ranks share: the layers (tp), the blocks of a pipeline (pp), or the sequences, with sharded "
        "parameters (fsdp), a sharded optimizer (zero) or whole models (ddp); default: tp",
    )  # fmt: skip
    demo.add_argument("--ranks", type=count, metavar="N", help="default: 2, or all GPUs on the nvshmem runtime")
    demo.add_argument("--steps", type=count, metavar="N", default=40, help="default: 40")
    demo.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="default: fp32")
    demo.add_argument("--seed", type=_seed, metavar="N", default=0, help="of weights and batches; default: 0")
    demo.add_argument(
        "--plot", type=_picture, metavar="PATH", default="tkernels-demo.png",
        help="where the picture of the loss curves goes, in the format of its ending; default: tkernels-demo.png",
    )  # fmt: skip
    demo.add_argument("--no-plot", action="store_true", help="draw no picture")
    demo.set_defaults(command=_demo, parser=demo)

    from tkernels import doctor

    doctor_parser = commands.add_parser(
        "doctor", parents=[common], help="say what is here and what would be chosen, and try every operation"
    )
    doctor.add_arguments(doctor_parser)
    doctor_parser.set_defaults(command=doctor.run, parser=doctor_parser)
    _add_tune(commands, common)
    _add_trace(commands, common)
    return parser


def _add_tune(commands, common: argparse.ArgumentParser):
    tune = commands.add_parser(
        "tune",
        parents=[common],
        help="measure configurations of an operation on all ranks, and remember the best",
        description="Measure configurations of an operation on shapes of yours, on ranks of this machine; the best one "
        "is remembered for calls of that size on such a machine. Exit code 1 if a shape could not be tuned.",
        epilog="example: tkernels tune all_gather_matmul --shape 8192x10240x8192",
    )
    tune.add_argument(
        "operation", nargs="?", metavar="OP",
        help="all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce, matmul, or all; default: all",
    )  # fmt: skip
    tune.add_argument(
        "--shape", metavar="MxNxK",
        help="sizes over all ranks, or names of tkernels.shapes, with commas; those of an operation are listed for a "
        "wrong one; default: layers (simulated: tiny)",
    )  # fmt: skip
    tune.add_argument("--ranks", type=count, metavar="N", help="default: all GPUs, or 2 on the simulated runtime")
    tune.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="default: bf16")
    tune.add_argument(
        "--layout", choices=("TN", "NN", "NT", "TT", "pointers"), default="TN",
        help="of w and x in memory, as BLAS names it; TN: K contiguous in both; NN: w.t() of a [K, N]; pointers: as "
        "TN, at addresses that TMA can't take, which are no multiples of 16 bytes; what is tuned of sizes that it "
        "can't take is for pointers, whatever is asked; default: TN",
    )  # fmt: skip
    tune.add_argument(
        "--transport", choices=("auto", "peer", "nvshmem", "simulated"), default="auto",
        help="how bytes reach peers: by loads and stores (peer) or by NVSHMEM's device calls (nvshmem); simulated: on "
        "the runtime of that name; default: auto, the first that reaches all ranks",
    )  # fmt: skip
    tune.add_argument(
        "--budget", type=_seconds, metavar="S", default=30.0,
        help="seconds for a shape, compilations not counted; default: 30",
    )  # fmt: skip
    tune.add_argument("--grid", nargs="+", default=[], metavar="FIELD=A,B", help="try these values, and no others")
    instead = tune.add_mutually_exclusive_group()
    instead.add_argument("--list", action="store_true", help="show what is remembered, and tune nothing")
    instead.add_argument("--export", type=output, metavar="PATH", help="write it as JSON lines; - is stdout")
    instead.add_argument("--clear", action="store_true", help="forget it")
    tune.set_defaults(command=_tune, parser=tune)


def _add_trace(commands, common: argparse.ArgumentParser):
    trace = commands.add_parser(
        "trace",
        parents=[common],
        help="record what every program of a kernel does when, for Perfetto to show",
        description="Record when each program of an operation's kernel waits, computes and sends, on every rank; write "
        "it as a trace for https://ui.perfetto.dev and chrome://tracing, and print what the time went to.",
        epilog="example: tkernels trace all_gather_matmul --shape tiny --ranks 2",
    )
    trace.add_argument("operation", choices=TRACED, metavar="OP", help=", ".join(TRACED))
    trace.add_argument(
        "--shape", required=True, metavar="NAME",
        help="MxNxK over all ranks, or a name of tkernels.shapes, which are listed for a wrong one; on the simulated "
        "runtime: tiny, tiny-wide, tiny-m1, or as small",
    )  # fmt: skip
    trace.add_argument("--ranks", type=count, metavar="N", help="default: all GPUs, or 2 on the simulated runtime")
    trace.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="bf16", help="default: bf16")
    trace.add_argument("--calls", type=count, metavar="N", default=3, help="how many to record; default: 3")
    trace.add_argument(
        "--out", type=file_to_write, metavar="PATH", default="tkernels-trace.json",
        help="where the trace goes, packed if it ends with .gz; default: tkernels-trace.json",
    )  # fmt: skip
    trace.set_defaults(command=_trace, parser=trace)


def count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"takes a whole number of at least 1, not {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"takes a number of seconds above 0, not {text!r}")
    return seconds


def _seed(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"takes a whole number from 0 to 2**63 - 1, not {text!r}")
    return int(text)


def output(text: str) -> str:
    """The type of an output argument: a path, checked to be writable before a minute of work is spent; or "-"."""
    path = Path(text)
    if text == "-" and sys.stdout is None:
        raise argparse.ArgumentTypeError("can't write to '-': stdout is closed")
    if text != "-" and (path.is_dir() or not path.parent.is_dir()):
        problem = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise argparse.ArgumentTypeError(f"can't write to {text!r}: {problem}")
    if text != "-" and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"can't write to {text!r}: permission denied")
    return text


def _picture(text: str) -> Path:
    if text == "-":
        raise argparse.ArgumentTypeError("takes a path, not '-'; --no-plot draws no picture")
    return file_to_write(text)


def file_to_write(text: str) -> Path:
    """The type of an argument that names a file: a path that can be written, but not "-"."""
    if text == "-":
        raise argparse.ArgumentTypeError("takes a path, not '-'")
    return Path(output(text))


def write_output(text: str, where: str):
    """Write to a path that `output` has accepted, or to stdout for "-"."""
    sys.stdout.write(text) if where == "-" else Path(where).write_text(text)


def _sentence(error: Exception) -> str:
    # A RankError's text is a headline, followed by the rank's traceback.
    text = getattr(error, "headline", None) or str(error) or type(error).__name__
    return text.splitlines()[0].rstrip(".")


if __name__ == "__main__":
    sys.exit(main())
