"""Write down the PTX of the kernels that compile_kernels.py compiles, and compare it with that of another commit.

    TKERNELS_RUNTIME=nvshmem python tests/ptx.py write FOLDER [-k TEXT ...] [--every N] [-n PROCESSES]
    python tests/ptx.py compare OLD NEW

A change that only regroups or renames device code leaves every file the same. The names of a kernel, its parameters and
its labels, and the places in the source, are no part of what is written. Of the parameters, those that an instruction
uses are, by number, so their order is.
"""

import argparse
import concurrent.futures
import functools
import json
import re
from pathlib import Path

import compile_kernels

FACTS = ("registers", "spills", "shared")


def normalised(ptx: str, kernel: str) -> str:
    """The instructions in their order, without comments, locations, debug sections and the names of what they use."""
    labels, lines = {}, []
    for line in ptx.split("\t.section\t")[0].splitlines():
        line = re.sub(r"\s*//.*", "", line).strip()
        if not line or re.match(r"\.(?:loc|file)\b|\$L__tmp\d+:|\$L__func_\w+:", line):
            continue
        line = re.sub(r"\$L__\w+", lambda found: labels.setdefault(found[0], f"$L{len(labels)}"), line)
        lines.append(re.sub(rf"\b{kernel}\b", "kernel", re.sub(rf"\b{kernel}_param_", "param_", line)))
    return used_parameters("\n".join(lines) + "\n")


def used_parameters(text: str) -> str:
    """The text with its kernel's unused parameters left out, and the others numbered."""
    before, entry, after = text.partition(".entry kernel(\n")
    declared, end, body = after.partition("\n)\n")
    used = sorted(set(re.findall(r"\bparam_(\d+)", body)), key=int)
    declared = [line.rstrip(",") for line in declared.splitlines() if re.search(r"\bparam_(\d+)", line)[1] in used]
    text = before + entry + "\n".join(declared) + end + body
    return re.sub(r"\bparam_(\d+)", lambda found: f"param_{used.index(found[1])}", text)


def write_case(folder: Path, name: str) -> str:
    """Compile a case and write what came out to a file, behind a line of facts. Returns what went wrong, or nothing."""

    def describe(kernel):
        facts = {"kernel": kernel.src.fn.__name__, **compile_kernels.resources_of(kernel)[0]}
        return facts | {"ptx": normalised(kernel.asm["ptx"], facts["kernel"])}

    facts = compile_kernels.run_case(name, describe)
    if "ptx" in facts:
        ptx = facts.pop("ptx")
        (folder / f"{name}.ptx").write_text(f"// {json.dumps(facts)}\n{ptx}")
    return facts.get("error") or facts.get("skip") or ""


def write(options):
    names = list(compile_kernels.CASES)[:: options.every]
    names = [name for name in names if all(text in name for text in options.k)]
    names.sort(key=lambda name: "nvshmem" not in name)  # the slow ones first
    options.folder.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ProcessPoolExecutor(options.n) as pool:
        for name, problem in zip(names, pool.map(functools.partial(write_case, options.folder), names), strict=True):
            if problem:
                print(f"{name}: {problem.strip()}")
    print(f"{len(list(options.folder.glob('*.ptx')))} cases in {options.folder}")


def compare(options):
    files = {name: [path / name for path in (options.old, options.new)] for name in _names(options.old, options.new)}
    both = {name: [path.read_text().split("\n", 1) for path in pair] for name, pair in files.items()}
    differing = {name: pair for name, pair in both.items() if pair[0][1] != pair[1][1]}
    print(f"{len(both) - len(differing)} of {len(both)} cases are identical, {len(differing)} differ")
    for path, other in ((options.old, options.new), (options.new, options.old)):
        if alone := sorted(_names(path) - _names(other)):
            print(f"only in {path}: {', '.join(alone)}")
    for name, pair in sorted(differing.items()):
        old, new = (json.loads(facts.removeprefix("// ")) for facts, _ in pair)
        changes = [f"{fact} {old[fact]} -> {new[fact]}" for fact in FACTS]
        print(f"{name.removesuffix('.ptx')}: {', '.join(changes)}")
    return 1 if differing else 0


def _names(*folders: Path) -> set[str]:
    """The names of the files that all of the folders have."""
    return set.intersection(*({path.name for path in folder.glob("*.ptx")} for folder in folders))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    writing = commands.add_parser("write", help="compile cases; replaces the files of the same names")
    writing.add_argument("folder", type=Path)
    writing.add_argument("-k", action="append", default=[], metavar="TEXT", help="only cases whose names have this")
    writing.add_argument("--every", type=int, default=16, metavar="N", help="one case in N; default: 16, as in a hurry")
    writing.add_argument("-n", type=int, default=compile_kernels.WORKERS, metavar="PROCESSES")
    writing.set_defaults(run=write)
    comparing = commands.add_parser("compare", help="exits with 1 if any differ")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    comparing.set_defaults(run=compare)
    options = parser.parse_args()
    if options.run is write and compile_kernels.runtime.RUNTIME != "nvshmem":
        parser.error("set TKERNELS_RUNTIME=nvshmem, so that kernels are compiled and not interpreted")
    raise SystemExit(options.run(options))


if __name__ == "__main__":
    main()
