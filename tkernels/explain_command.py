"""`tkernels explain`: what each way to carry out an operation would take on a GPU, which is taken, and why."""

import argparse

from tkernels.cli import console_of, count, print_table, write_json

WIDTH = 120


def add_arguments(parser: argparse.ArgumentParser):
    parser.description = (
        "Say what each way to carry out an operation would take on a GPU, by the model that chooses among them; which "
        "one is taken, why, and what overlap saves. Runs nothing, and needs no GPU."
    )
    parser.epilog = "example: tkernels explain all_gather_matmul --shape 8192x10240x8192 --ranks 4 --gpu H200"
    parser.add_argument(
        "operation",
        metavar="OP",
        help="all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce, or all of these; or matmul, on one GPU",
    )
    parser.add_argument(
        "--shape", required=True, metavar="MxNxK",
        help="sizes over all ranks, or names of tkernels.shapes, with commas; those of an operation are listed for a "
        "wrong one",
    )  # fmt: skip
    parser.add_argument("--ranks", type=count, metavar="N", help="default: 2, and for matmul 1, as it has no others")
    parser.add_argument(
        "--gpu", metavar="NAME", default="H200", help="its name or a part; those known are listed for a wrong one; "
        "default: H200",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32", "tf32", "fp8"), default="bf16",
        help="tf32: fp32 where torch's switches allow TF32; fp8: e4m3 with fast accumulation; default: bf16",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Returns 0. Raises argparse.ArgumentError."""
    from tkernels import model, shapes
    from tkernels.gpus import GPUS, KNOWN
    from tkernels.launch import MOST_RANKS
    from tkernels.paths import explain_on

    precision = "tf32" if arguments.dtype == "tf32" else "ieee"
    dtype = shapes.WITH_TF32[arguments.dtype]
    found, local = rows_named(arguments.gpu), arguments.operation == "matmul"
    ranks = arguments.ranks or (1 if local else 2)
    try:
        if arguments.operation not in (*model.FUSED, "matmul", "all"):
            raise ValueError(
                f"there is no operation {arguments.operation!r}; there are {', '.join(model.FUSED)}, all, and matmul"
            )
        if len(found) != 1:
            raise ValueError(f"--gpu {arguments.gpu}: name one of {', '.join([gpu.name for gpu in found] or GPUS)}")
        if local and ranks > 1:
            raise ValueError("matmul is on one rank alone: give the sizes that a rank multiplies, without --ranks")
        if ranks == 1 and not local:
            raise ValueError("one rank multiplies alone: there is nothing to overlap; give --ranks of 2 or more")
        if ranks > MOST_RANKS:
            raise ValueError(f"--ranks {ranks}: takes at most {MOST_RANKS} ranks")
        operations = model.FUSED if arguments.operation == "all" else (arguments.operation,)
        asked = shapes.find(operations, arguments.shape.split(","), run=False)
        (gpu,) = found
        gpu.rate(dtype)
        choices = {
            (operation, *sizes): explain_on(gpu, ranks, operation, *sizes, dtype, precision)
            for operation, named in asked.items()
            for sizes in named.values()
        }
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentError(None, str(error)) from None
    answers, console = [], console_of(arguments.json, width=WIDTH)
    for (operation, M, N, K), choice in choices.items():
        title = f"{operation} {M}x{N}x{K} {arguments.dtype}, {ranks} x {gpu.name}"
        console.print(title, style="bold")
        print_ways(console, choice.ways)
        console.print(f"takes {choice.ways[0].name}: {choice.reason}")
        if not local:
            console.print(saving(choice.ways))
        answers.append(
            {"operation": operation, "M": M, "N": N, "K": K, "dtype": arguments.dtype, "ranks": ranks,
             "gpu": gpu.name, "known": gpu.known, "path": choice.path, "reason": choice.reason,
             "ways": [plain(way) for way in choice.ways]}
        )  # fmt: skip
    console.print(KNOWN[gpu.known].format(gpu=gpu.name), style="dim")
    write_json(answers, arguments.json)
    return 0


def rows_named(asked: str) -> list:
    """The GPUs of that name, or with it as a word of theirs, first those on which kernels have run; or as a part."""
    from tkernels.gpus import GPUS

    asked, names = asked.lower(), {gpu: name.lower() for name, gpu in GPUS.items()}
    named = [[gpu for gpu, name in names.items() if asked == name]]
    named.append([gpu for gpu, name in names.items() if asked in name.split() and gpu.known != "compiled"])
    named.append([gpu for gpu, name in names.items() if asked in name.split()])
    return next(filter(None, named), [gpu for gpu, name in names.items() if asked in name])


def saving(ways) -> str:
    """What overlap saves, in a sentence: the way that is taken, beside the plain path."""
    one, after = ways[0].predicted, next(way.predicted for way in ways if way.name == "plain")
    if ways[0].name == "plain":
        fused = min(way.predicted.seconds for way in ways[1:] if way.predicted)
        hidden = f"{1 - one.exposed / one.wire:.0%} of the transfer" if one.hides else "nothing"
        return f"{hidden} is overlapped; with path='fused' it would take {1e6 * fused:.0f} us"
    saved = after.seconds - one.seconds
    if saved < 0:
        return f"the plain path would take {-1e6 * saved:.0f} us less; path='plain' asks for it"
    hidden = max(1 - one.exposed / one.wire, 0.0) if one.wire else 0.0
    return (
        f"overlap saves {1e6 * saved:.0f} of {1e6 * after.seconds:.0f} us, {saved / after.seconds:.0%}; it hides "
        f"{hidden:.0%} of the transfer"
    )


def print_ways(console, ways):
    numbers, rows = ("all", "GEMM", "transfer", "exposed", "launch"), []
    for way in ways:
        cells = [""] * len(numbers)
        if way.predicted:
            one = way.predicted
            cells = [f"{1e6 * value:.0f}" for value in (one.seconds, one.gemm, one.wire, one.exposed, one.launch)]
        rows.append((way.name, *cells, way.refused or how(way)))
    print_table(console, ("way", *numbers, "how, or why not"), rows, "us, predicted", right=numbers)


def how(way) -> str:
    from tkernels import model

    config = way.config
    if config is None:
        order = "in turns" if way.predicted.hides else "one after the other"
        ends = {"plain": f" and a collective, {order}", model.STAGED: " of copies in wider rows"}
        return "torch's matmul" + ends.get(way.name, "")
    gemm = getattr(config, "gemm", config)
    text = f"tiles of {gemm.block_m}x{gemm.block_n}x{gemm.block_k}"
    if way.name in (model.KERNEL, model.STAGED):
        return text + (" of copies in wider rows" if way.name == model.STAGED else "")
    if config.copied:
        return f"{text}, copies of {config.copy_rows} rows"
    number = config.num_comm
    sending = f"{number} program{'s send' if number > 1 else ' sends'}" if number else "every program sends its own"
    return f"{text}, {sending}"


def plain(way) -> dict:
    """As JSON."""
    parts = {}
    if way.predicted:
        parts = {f"{name}_us": round(1e6 * value, 1) for name, value in way.predicted._asdict().items()}
        parts |= {"us": parts.pop("seconds_us"), "exposed_us": round(1e6 * way.predicted.exposed, 1)}
    return {"way": way.name, **parts, "how": None if way.refused else how(way), "refused": way.refused}
