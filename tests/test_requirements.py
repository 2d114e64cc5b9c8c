"""The table from requirement to test is complete, and what it names exists."""

import ast
import tomllib
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
REQUIREMENTS = [
    *(f"R{number}" for number in range(1, 43)),
    *(f"G{number}" for number in (*range(1, 7), 15)),
    *(f"L{number}" for number in range(1, 14)),
    *(f"F{number}" for number in range(1, 9)),
    *(f"C{number}" for number in range(1, 10)),
]


@pytest.fixture(scope="module")
def table() -> dict[str, list[str]]:
    return tomllib.loads((TESTS / "requirements.toml").read_text())


def functions_in(file: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def unknown(table: dict[str, list[str]]) -> list[str]:
    """What the table names and there is not."""
    found = {}
    missing = []
    for requirement, places in table.items():
        for place in places:
            name, _, test = place.partition("::")
            file = TESTS / name
            if test and file.exists() and file not in found:
                found[file] = functions_in(file)
            if not file.exists() or (test and test not in found[file]):
                missing.append(f"{requirement}: {place}")
    return missing


def test_every_requirement_is_shown_somewhere(table):
    assert list(table) == REQUIREMENTS
    assert [requirement for requirement, places in table.items() if not places] == []
    assert unknown(table) == []


def test_the_check_sees_what_is_not_there():
    assert unknown({"R1": ["test_requirements.py::test_the_check_sees_what_is_not_there"]}) == []
    assert unknown({"R1": ["test_requirements.py::test_gone", "test_gone.py::test_it", "gone"]}) == [
        "R1: test_requirements.py::test_gone",
        "R1: test_gone.py::test_it",
        "R1: gone",
    ]


def test_names_are_written_in_one_way(checkout):
    wrong = ("cuBlasMp", "CublasMp", "UserBuffers ", "Megatron-lm", "Transformer-Engine ")
    for folder in ("layers", "tkernels", "comm", "tests"):
        for file in (checkout / folder).rglob("*.py"):
            if file != Path(__file__).resolve():
                assert not [name for name in wrong if name in file.read_text()], file
