"""The command `tkernels`: its subcommands, and what they share: options, checks of arguments, tables, errors' output.

A subcommand is a module with

    add_arguments(parser)       declare the options, each once; set the parser's description and its example
    run(arguments) -> int       the exit code; raises argparse.ArgumentError for arguments that only it can judge

It imports torch, and whatever does, in `run`: so help and wrong arguments are answered at once, and --runtime is known
before the runtime is chosen.
"""

import argparse
import dataclasses
import importlib
import json
import os
import sys
import traceback
from pathlib import Path

import tkernels

COMMANDS = {  # name -> module, summary
    "demo": ("tkernels.demo", "train a transformer on several ranks, beside the same one on a single rank"),
    "doctor": ("tkernels.doctor", "say what is here and what would be chosen, and try every operation"),
    "tune": ("tkernels.tune_command", "measure configurations of an operation on all ranks, and remember the best"),
    "explain": ("tkernels.explain_command", "say what each way to carry out an operation would take, without a GPU"),
    "trace": ("tkernels.trace.command", "record what every program of a kernel does when, for Perfetto to show"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run one subcommand. Returns its exit code: 0, 1 if it failed, 130 on Ctrl-C; a wrong argument exits with 2.

    Raises SystemExit for the latter, and if what was printed can't be written; quietly where its reader has gone.
    """
    code = 0
    try:
        code = _run(arguments)
        return code
    finally:
        try:
            if sys.stdout:
                sys.stdout.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the exit, which flushes again
            quiet = code or isinstance(error, BrokenPipeError)
            sys.exit(1 if quiet else f"tkernels: can't write to stdout: {error.strerror}")


def _run(arguments: list[str] | None) -> int:
    options, unknown = _parser().parse_known_args(arguments)
    if unknown:  # reported by the subcommand's parser: the top-level one would not name the subcommand
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as a daemon's
            setattr(sys, name, open(os.devnull, "w"))
    try:
        if options.runtime:
            _choose_runtime(options.runtime)
        return options.run(options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 1
    except argparse.ArgumentError as error:
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
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--runtime", choices=("auto", "simulated", "nvshmem"),
        help="simulated needs no GPU; default: $TKERNELS_RUNTIME, or auto, what fits",
    )  # fmt: skip
    common.add_argument("--json", type=output, metavar="PATH", help="write the result here as JSON; - is stdout")
    common.add_argument("--traceback", action="store_true", help="show all of an error, not its first sentence alone")
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = importlib.import_module(module)
        subparser = commands.add_parser(name, parents=[common], help=summary)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run, parser=subparser)
    return parser


# Types of arguments


def count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"takes a whole number of at least 1, not {text!r}")
    return int(text)


def output(text: str) -> str:
    """A path, checked to be writable before a minute of work is spent; or "-"."""
    path = Path(text)
    if text == "-" and sys.stdout is None:
        raise argparse.ArgumentTypeError("can't write to '-': stdout is closed")
    if text != "-" and (path.is_dir() or not path.parent.is_dir()):
        problem = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise argparse.ArgumentTypeError(f"can't write to {text!r}: {problem}")
    if text != "-" and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"can't write to {text!r}: permission denied")
    return text


def file_to_write(text: str) -> Path:
    """A path that can be written, but not "-"."""
    if text == "-":
        raise argparse.ArgumentTypeError("takes a path, not '-'")
    return Path(output(text))


# Output


def console_of(*outputs: str | None, width: int | None = None):
    """Where a command reports, text as it is: stdout, or stderr if an output is "-". width: where is no terminal."""
    from rich.console import Console

    console = Console(stderr="-" in outputs, markup=False, emoji=False, highlight=False)
    if width and not console.is_terminal:
        console.width = width
    return console


def print_table(console, headings, rows, title: str | None = None, right=()):
    """Print rows of cells, each a text or rich's Text. right: the headings of numbers."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_facts(console, facts, width: int):
    """Print pairs of a name and a text, or rich's Text, below each other. width: of the names."""
    from rich.padding import Padding
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="cyan", no_wrap=True, min_width=width)
    grid.add_column()
    for name, fact in facts:
        grid.add_row(name, fact)
    console.print()
    console.print(Padding.indent(grid, 2))


def write_json(value, where: str | None):
    """Write a result, with dataclasses as dictionaries, where `--json` asks for it; of a list, a line for each."""
    if where:
        values, indent = (value, None) if isinstance(value, list) else ([value], 2)
        texts = [json.dumps(each, default=dataclasses.asdict, indent=indent) + "\n" for each in values]
        write_output("".join(texts), where)


def write_output(text: str, where: str):
    """Write to a path that `output` has accepted, or to stdout for "-"."""
    try:
        sys.stdout.write(text) if where == "-" else Path(where).write_text(text)
    except BrokenPipeError:
        raise
    except OSError as error:  # which names no file if the disk is full
        raise OSError(f"can't write to {where!r}: {error.strerror}") from error


def _sentence(error: Exception) -> str:
    # A RankError's text is a headline, followed by the rank's traceback.
    text = getattr(error, "headline", None) or str(error) or type(error).__name__
    return text.splitlines()[0].rstrip(".")


if __name__ == "__main__":
    sys.exit(main())
