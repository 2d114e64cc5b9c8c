"""Plots bench.run's records and writes README's table: python -m bench.plot [FILE] [--readme], from the root.

FILE-time.png shows the time of every shape, ours and that of every peer, as a multiple of local cuBLAS's time, whose
microseconds stand beside the shape. FILE-efficiency.png shows efficiency over wire time / cuBLAS time. Without FILE:
the newest file of bench/results.
"""

import argparse
import sys
import textwrap
from pathlib import Path

from bench.peers import over_cublas
from bench.records import FUSED, PEERS, best_peer_us, circumstances, limit_us, newest, of_fp8, ratio, read

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- written by python -m bench.plot --readme -->\n", "<!-- end of what it writes -->\n"
TITLES = {
    "all_gather_matmul": "all-gather + GEMM",
    "matmul_reduce_scatter": "GEMM + reduce-scatter",
    "matmul_all_reduce": "GEMM + all-reduce",
}

# Okabe and Ito's colours, which colour-blind readers can tell apart; the markers differ as well.
SERIES = {
    "ours": ("tkernels", "#D55E00", "o"),
    "torch": (PEERS["torch"], "#0072B2", "s"),
    "serial": (PEERS["serial"], "#009E73", "D"),
    "nccl": ("NCCL alone", "#CC79A7", "v"),
    "cublas": ("cuBLAS alone", "#000000", "|"),
    "wire": ("wire", "#E69F00", "_"),
}
OTHER_RUNS = {"cuBLASMp": ("cuBLASMp*", "#56B4E9", "^"), "Userbuffers": ("Userbuffers*", "#777777", "P")}
FULL = ("ours", "cublas", "wire")  # the other markers are hollow, so that overlapping ones stay visible
TICKS = (0.05, 0.1, 0.2, 0.5, 1, 2, 4, 8)
OPERATION_MARKERS = dict(zip(FUSED, ("o", "s", "D"), strict=True))


def fused(path: Path) -> list[dict]:
    """The file's fused forward records with cuBLAS and wire times, longest first within each operation; none of FP8.

    Raises ValueError if there are none.
    """
    lines = [line for line in read(path) if line["op"] in FUSED and line["layout"] == "TN" and not of_fp8(line)]
    lines = [line for line in lines if limit_us(line)]
    if not lines:
        raise ValueError(f"{path} has no records of {', '.join(FUSED)} on GPUs; write some by bench.run --json")
    return sorted(lines, key=lambda line: (FUSED.index(line["op"]), -line["ours_us"]))


def draw(lines: list[dict], name: Path) -> list[Path]:
    """Draw both pictures, as NAME-time.png and NAME-efficiency.png. Returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    figures = {"time": time_figure(lines), "efficiency": efficiency_figure(lines)}
    paths = []
    for kind, figure in figures.items():
        figure.supxlabel(circumstances(lines).replace("; ", "\n"), fontsize=8, color="#444444")
        paths.append(name.with_name(f"{name.name}-{kind}.png"))
        figure.savefig(paths[-1], dpi=90, metadata={"Software": None})
    return paths


def time_figure(lines: list[dict]):
    from matplotlib.figure import Figure

    ops = [op for op in FUSED if any(line["op"] == op for line in lines)]
    heights = [sum(line["op"] == op for line in lines) + 2 for op in ops]
    figure = Figure(figsize=(9, 1.4 + 0.22 * sum(heights)), layout="constrained")
    legend, grid = {}, figure.subplots(len(ops), sharex=True, squeeze=False, height_ratios=heights)
    for axes, op in zip(grid[:, 0], ops, strict=True):
        rows = [line for line in lines if line["op"] == op]
        for key, (label, colour, marker) in (SERIES | OTHER_RUNS).items():
            at = [(multiple(line, key), row) for row, line in enumerate(rows)]
            at = [(x, row) for x, row in at if x is not None]
            if at:
                colours = {"color": colour} if key in FULL else {"facecolors": "none", "edgecolors": colour}
                legend[label] = axes.scatter(
                    *zip(*at, strict=True), s=36, marker=marker, zorder=4 if key == "ours" else 3, **colours
                )
        axes.axvline(1.0, color="#000000", linewidth=0.8)
        axes.set_yticks(range(len(rows)), [f"{line['shape']}, {line['cublas_us']:.0f} us" for line in rows], fontsize=8)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xscale("log")
        axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
        axes.minorticks_off()
        axes.set_title(TITLES[op], fontsize=10)
        axes.grid(alpha=0.3)
    note = "      * of another run, by its own cuBLAS" if any(label.endswith("*") for label in legend) else ""
    axes.set_xlabel(f"time / time of cuBLAS alone{note}")
    figure.legend(legend.values(), legend, loc="outside upper center", ncols=4, frameon=False)
    return figure


def multiple(line: dict, key: str) -> float | None:
    """A series' time divided by cuBLAS's."""
    return over_cublas(line).get(key) if key in OTHER_RUNS else ratio(line[f"{key}_us"], line["cublas_us"])


def efficiency_figure(lines: list[dict]):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.2), layout="constrained")
    axes = figure.subplots()
    for key, label in (("ours", "tkernels"), ("best", "best of " + " and ".join(PEERS.values()))):
        colour = SERIES["ours"][1] if key == "ours" else SERIES["torch"][1]
        for op, marker in OPERATION_MARKERS.items():
            points = []
            for line in lines:
                us = line["ours_us"] if key == "ours" else best_peer_us(line)
                if line["op"] == op and us is not None:
                    points.append((line["wire_us"] / line["cublas_us"], limit_us(line) / us))
            if points:
                face = colour if key == "ours" else "none"
                axes.scatter(
                    *zip(*points, strict=True), s=40, marker=marker, edgecolors=colour, facecolors=face,
                    label=f"{label}, {TITLES[op]}", zorder=3,
                )  # fmt: skip
    axes.axhline(1.0, color="#000000", linewidth=0.8)
    axes.axvline(1.0, color="#000000", linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("wire time / cuBLAS time")
    axes.set_ylabel("efficiency: max(cuBLAS, wire) / time")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def readme_block(path: Path) -> str:
    """README's text about the file: conditions, pictures, and a table of the shapes with at least 2048 tokens."""
    lines = fused(path)
    folder = path.resolve().parent.relative_to(README.parent)
    pictures = [f"![{kind}]({folder}/{path.stem}-{kind}.png)" for kind in ("time", "efficiency")]
    columns = [
        "operation, shape (M, N, K)",
        "ours",
        "cuBLAS alone",
        "wire",
        *PEERS.values(),
        "best peer / ours",
        "efficiency",
    ]
    rows = [f"| {' | '.join(columns)} |", "| --- |" + " ---: |" * (len(columns) - 1)]
    for line in lines:
        if line["M"] < 2048:
            continue
        times = [line[f"{name}_us"] for name in ("ours", "cublas", "wire", *PEERS)]
        ratios = [ratio(best_peer_us(line), line["ours_us"]), line["overlap_efficiency"]]
        cells = ["-" if us is None else f"{us:.0f}" for us in times]
        cells += ["-" if value is None else f"{value:.2f}" for value in ratios]
        shape = f"{line['op']} {line['shape']} ({line['M']}, {line['N']}, {line['K']})"
        rows.append(f"| {shape} | {' | '.join(cells)} |")
    text = f"{circumstances(lines)}. Times in microseconds; efficiency is max(cuBLAS, wire) / ours."
    return BEGIN + "\n".join([textwrap.fill(text, 120), "", *pictures, "", *rows]) + "\n" + END


def with_block(readme: str, block: str) -> str:
    """README's text with its block replaced by this one. Raises ValueError if it has none."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md needs the lines {BEGIN.strip()!r} and {END.strip()!r}, to be filled between them")
    return before + block + after


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.plot", description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="default: the newest of bench/results")
    parser.add_argument("--readme", action="store_true", help="write the newest file's table into README.md")
    args = parser.parse_args(argv)
    if args.readme and args.file is not None:
        parser.error("--readme: README shows the newest file; leave FILE out")
    try:
        path = args.file or newest()
        for picture in draw(fused(path), path.with_suffix("")):
            print(picture)
        if args.readme:
            README.write_text(with_block(README.read_text(), readme_block(path)))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
