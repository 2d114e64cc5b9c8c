"""The pytest plugin, each claim by a pytest run of its own, and the judgement of results."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed  # (pytester drops modules that a run imports; torch cannot be imported twice)
from transports import starts_ranks

import tkernels.launch  # noqa: F401
from tkernels.comm import runtime
from tkernels.rounding import tolerance
from tkernels.testing.compare import assert_close_to, integers, normal, poison


@pytest.fixture
def run(pytester):
    """Write a test file and run it, the plugin loaded as for a user."""
    installed = importlib.metadata.entry_points(group="pytest11", name="tkernels")
    plugin = [] if installed else ["-p", "tkernels.testing.plugin"]

    def run(source, *options):
        pytester.makepyfile("import math, os, time\nimport pytest, torch\nimport torch.distributed as dist\n" + source)
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-v", "-rs", *plugin, *options)

    return run


@starts_ranks(2)
def test_a_marked_body_runs_on_ranks_that_stay_between_tests(run, tmp_path):
    result = run(f"""
NOTES = {str(tmp_path)!r}

@pytest.fixture
def offset(tmp_path):
    assert tmp_path.exists()
    return torch.full((3,), 10.0)

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.ranks(2, 1)
def test_first(ctx, dtype, offset, tmp_path):
    x = offset.to(ctx.device) + ctx.rank
    torch.distributed.all_reduce(x)
    assert x.tolist() == [10 * ctx.size + ctx.size * (ctx.size - 1) / 2] * 3
    assert tmp_path.exists() and dtype in (torch.float32, torch.bfloat16)
    with open(f"{{NOTES}}/{{ctx.size}}-{{ctx.rank}}", "a") as notes:
        print(os.getpid(), id(ctx), file=notes)

class TestOfAClass:
    word = "here"

    @pytest.mark.ranks(2)
    def test_method(self, ctx, monkeypatch):
        monkeypatch.setattr(math, "pi", 3)
        assert self.word == "here" and ctx.size == 2 and math.pi == 3

@pytest.mark.ranks(2)
def test_that_skips(ctx, monkeypatch):
    assert math.pi > 3, "what a test patches on its ranks is undone there"
    pytest.skip("not today")

def test_without_ranks(tmp_path):
    assert tmp_path.exists()

class TestOfAnInstance:
    number = 0

    def setup_method(self):
        self.number = 1

    @pytest.fixture(autouse=True)
    def opened(self, ctx):
        self.word, self.own = "set", ctx
        yield

    @pytest.mark.ranks(2)
    def test_state(self, ctx):
        assert (self.number, self.word, self.own) == (1, "set", ctx)

@pytest.mark.ranks(2)
def test_that_is_expected_to_fail(ctx):
    pytest.xfail("known")

@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=ZeroDivisionError)
def test_that_raises_as_expected(ctx):
    1 / 0
""")
    result.assert_outcomes(passed=7, skipped=1, xfailed=2)
    result.stdout.fnmatch_lines(["*test_first?2-ranks-torch.float32? PASSED*", "*SKIPPED*not today*"])
    result.stdout.fnmatch_lines(["*test_first?1-ranks-torch.bfloat16? PASSED*", "*::TestOfAClass::test_method*PASSED*"])
    notes = [(tmp_path / name).read_text().split("\n") for name in ("2-0", "2-1", "1-0")]
    assert all(first == second for first, second, _ in notes), "the same process and Context in both tests"
    for first, _, _ in notes:
        with pytest.raises(ProcessLookupError):
            os.kill(int(first.split()[0]), 0)


@starts_ranks(2)
def test_failures_come_back_with_rank_and_traceback_and_the_next_test_has_new_ranks(run):
    result = run("""
@pytest.mark.ranks(2)
def test_that_skips_on_one_rank(ctx):
    if ctx.rank == 1:
        pytest.skip("not here")

@pytest.mark.ranks(2)
def test_that_fails_on_rank_1(ctx):
    if ctx.rank == 1:
        print("printed by rank 1")
        assert ctx.rank + 40 == 42
    dist.barrier()

@pytest.mark.ranks(2)
def test_after_a_failure(ctx):
    dist.barrier()

@pytest.mark.ranks(2, timeout_s=5)
def test_that_hangs(ctx):
    if ctx.rank == 1:
        time.sleep(600)
    dist.barrier()

@pytest.mark.ranks(2)
def test_with_a_rank_that_dies(ctx):
    if ctx.rank == 1:
        os._exit(3)
    dist.barrier()
""")
    result.assert_outcomes(passed=1, failed=4)
    result.stdout.fnmatch_lines([
        "rank 1 skipped (not here), but ranks [[]0[]] did not;*",
        "rank 1 of 2: AssertionError: assert (1 + 40) == 42",
        "*in test_that_fails_on_rank_1",
        "*where 1 = Context(*).rank",
        "*printed by rank 1*",
        "ranks 0, 1 of 2 still running after 5 s",
        "rank 0 (still running):",
        "*in barrier",
        "*in test_that_hangs",
        "rank 1 (still running):",
        "*in test_that_hangs",
        "rank 1 of 2 exited with code 3 before it had finished",
    ])
    seconds = [r.duration for r in result.reprec.getreports() if r.when == "call" and "hangs" in r.nodeid]
    assert 5 <= seconds[0] < 600, "when it would have ended by itself"


def test_what_cannot_reach_the_ranks_is_named(run):
    result = run("""
@pytest.fixture
def opener():
    return lambda: 0

@pytest.fixture
def rank_in_a_fixture(ctx):
    return ctx.rank

@pytest.mark.ranks(1)
def test_with_an_opener(ctx, opener):
    pass

@pytest.mark.ranks(1)
def test_with_a_rank_in_a_fixture(rank_in_a_fixture):
    pass

class TestOfAnInstance:
    def setup_method(self):
        self.opened = lambda: 0

    @pytest.mark.ranks(1)
    def test_it(self, ctx):
        pass

def test_without_a_mark(ctx):
    pass
""")
    result.assert_outcomes(failed=2, errors=2)
    result.stdout.fnmatch_lines([
        "*AttributeError: ctx.rank: ctx exists on the ranks only*",
        "*ctx is the Context of a rank: mark the test with @pytest.mark.ranks*",
        "*the value of fixture 'opener' (function) cannot be sent to the ranks:*",
        "*the attribute 'opened' (function) cannot be sent to the ranks:*",
    ])


@pytest.mark.parametrize(
    "mark",
    ["ranks()", "ranks(0)", "ranks('2')", "ranks(2, timeout=3)", "ranks(2, timeout_s='3')", "ranks(2, timeout_s=-1)"],
)
def test_a_mark_that_says_nothing_is_refused(run, mark):
    result = run(f"@pytest.mark.{mark}\ndef test_it(ctx): pass\n\ndef test_beside_it(): pass\n")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines([f"*@pytest.mark.{mark}: give one or more numbers of ranks*"])


@pytest.mark.parametrize("text", ["abc", "0", "nan"])
def test_plugin_refuses_a_timeout_that_is_no_time(run, text):
    result = run("def test_it(): pass", "-o", f"tkernels_timeout={text}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: tkernels_timeout = {text}: the ini option is a positive number of seconds"])


def test_plugin_ids_can_be_selected(run):
    result = run("@pytest.mark.ranks(1, 2)\ndef test_it(ctx): pass\n", "-k", "1-ranks and it", "--collect-only")
    result.stdout.fnmatch_lines(["*test_it?1-ranks?*", "*1/2 tests collected*"])


@starts_ranks(1)
def test_plugin_refuses_by_name_what_ranks_cannot_run(run):
    result = run("""
import functools
import unittest

@pytest.mark.ranks(1)
async def test_that_awaits(ctx):
    assert False

def decorated(function):
    return functools.wraps(function)(lambda *args, **given: function(*args, **given))

@pytest.mark.ranks(1)
@decorated
async def test_that_awaits_behind_a_function(ctx):
    assert False

@pytest.mark.ranks(1)
async def test_that_yields(ctx):
    yield

@pytest.mark.ranks(1)
class TestOld(unittest.TestCase):
    def test_method(self):
        assert False

    @pytest.mark.ranks(2)
    def test_marked_method(self):
        assert False
""")
    result.assert_outcomes(errors=2, failed=3)
    result.stdout.fnmatch_lines([
        "TestOld.test_marked_method: @pytest.mark.ranks has no effect in a unittest.TestCase*",
        "TestOld.test_method: @pytest.mark.ranks has no effect in a unittest.TestCase*",
    ])
    for name in ("test_that_awaits", "test_that_awaits_behind_a_function", "test_that_yields"):
        result.stdout.fnmatch_lines([f"*: {name} is `async def`, which ranks don't run*"])


@starts_ranks(2)
def test_plugin_gives_bodies_the_environment_of_the_moment(run, monkeypatch):
    """Whether a fixture sets a variable before the ranks start or after, and whether it is gone or back then."""
    monkeypatch.setenv("DELETED", "before")
    result = run("""
@pytest.fixture
def patched(monkeypatch):
    monkeypatch.setenv("WORD", "set")
    monkeypatch.delenv("DELETED")

def words():
    return os.environ.get("WORD"), os.environ.get("DELETED")

@pytest.mark.ranks(2)
def test_that_starts_ranks(patched, ctx):
    assert words() == ("set", None)

@pytest.mark.ranks(2)
def test_without(ctx):
    assert words() == (None, "before")

@pytest.mark.ranks(2)
def test_with_the_fixture_and_more(ctx, patched, monkeypatch):
    assert words() == ("set", None)
    monkeypatch.setenv("WORD", "again")

@pytest.mark.ranks(2)
def test_without_again(ctx):
    assert words() == (None, "before")
""")
    result.assert_outcomes(passed=4)


def test_missing_gpus_skip_with_a_reason(run, monkeypatch):
    monkeypatch.setattr(runtime, "RUNTIME", "nvshmem")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("TKERNELS_SHARE_GPUS", raising=False)
    result = run("@pytest.mark.ranks(4)\ndef test_it(ctx): pass\n")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*needs 4 GPUs, found 2*"])


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["in this process", "in a worker of pytest-xdist"])
def test_a_context_that_cannot_be_finalized_fails_the_session(run, options):
    source = """
def finalize():
    raise RuntimeError("cannot finalize")

@pytest.mark.ranks(1)
def test_it(ctx):
    ctx.finalize = finalize
"""
    result = run(source, *options)
    result.assert_outcomes(passed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*ranks failed to finalize after their tests*", "rank 0 of 1: *: cannot finalize"])


def test_the_plugin_alone_imports_neither_torch_nor_triton():
    """Every pytest run of a user loads it; and to import triton here would decide how it runs there."""
    code = "import sys, tkernels.testing.plugin; print(sorted({'torch', 'triton', 'numpy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# compare


def test_operands_are_repeatable_and_as_described():
    x = integers((50, 40), torch.bfloat16, seed=3)
    assert torch.equal(x, integers((50, 40), torch.bfloat16, seed=3))
    assert not torch.equal(x, integers((50, 40), torch.bfloat16, seed=4))
    assert x.unique().tolist() == list(range(-4, 5))
    assert integers(5, torch.int64, seed=0, low=7, high=7).tolist() == [7] * 5
    y = normal((200, 300), torch.float32, seed=3)
    assert abs(y.mean()) < 0.02 and abs(y.var() - 1) < 0.02


def test_poison_shows():
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.complex64):
        assert poison(torch.zeros(3, dtype=dtype)).isnan().all()
    for dtype in (torch.int64, torch.uint8):
        assert (poison(torch.zeros(3, dtype=dtype)) == torch.iinfo(dtype).max).all()


def product(dtype, m=48, n=40, k=256, seed=1):
    """Operands, bias, and the exact result of a matmul with bias."""
    x, w, bias = normal((m, k), dtype, seed), normal((n, k), dtype, seed + 1), normal(n, dtype, seed + 2)
    return x, w, bias, x.double() @ w.double().T + bias.double()


def staged(x, w, bias, parts):
    """The sum over parts of k, every partial sum rounded to dtype, as a ring of `parts` ranks makes it."""
    y = torch.zeros(x.shape[0], w.shape[0], dtype=x.dtype)
    for x_part, w_part in zip(x.chunk(parts, 1), w.chunk(parts, 1), strict=True):
        y = (y.float() + x_part.float() @ w_part.float().T).to(x.dtype)
    return (y.float() + bias.float()).to(x.dtype)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


@DTYPES
@pytest.mark.parametrize("k", [1, 31, 256, 4096])
def test_results_with_nothing_but_rounding_errors_pass(dtype, k):
    x, w, bias, want = product(dtype, k=k)
    one_by_one = torch.zeros(want.shape)
    for i in range(k):
        one_by_one += x[:, i, None].float() * w[None, :, i].float()
    assert_close_to((one_by_one + bias.float()).to(dtype), want, terms=k + 1)
    if k >= 4:
        assert_close_to(staged(x, w, bias, parts=4), want, terms=k + 1, roundings=5)


@DTYPES
def test_tensor_cores_that_truncate_pass(dtype):
    """16 products at a time, the sum cut to fp32 towards zero."""
    x, w, bias, want = product(dtype, k=4096)
    y = torch.zeros(want.shape)
    for x_part, w_part in zip(x.split(16, 1), w.split(16, 1), strict=True):
        exact = y.double() + x_part.double() @ w_part.double().T
        y = exact.float()
        y = torch.where(y.double().abs() > exact.abs(), torch.nextafter(y, torch.zeros(())), y)
    assert_close_to((y.double() + bias.double()).to(dtype), want, terms=4097)


def wrong(case, x, w, bias):
    y = x.float() @ w.float().T
    if case == "bias twice":
        return y + 2 * bias.float()
    y += bias.float()
    if case == "no bias":
        return y - bias.float()
    if case == "a lost row":
        y[-1] = 0
    elif case == "rows swapped":
        y[[3, 4]] = y[[4, 3]]
    elif case == "one product missing":
        y[5, 6] -= x[5, 100].float() * w[6, 100].float()
    elif case == "one element never written":
        poison(y[7, 8:9])
    elif case == "one element infinite":
        y[7, 8] = torch.inf
    elif case == "columns shifted":
        y = y.roll(1, 1)
    elif case == "a rank's part missing":
        y = x[:, :192].float() @ w[:, :192].float().T + bias.float()
    elif case == "accumulated in dtype":
        y = torch.zeros(y.shape, dtype=torch.bfloat16)
        for i in range(x.shape[1]):
            y += x[:, i, None].bfloat16() * w[None, :, i].bfloat16()
        y = y.float() + bias.float()
    return y


@DTYPES
@pytest.mark.parametrize(
    "case",
    [
        "bias twice",
        "no bias",
        "a lost row",
        "rows swapped",
        "one product missing",
        "one element never written",
        "one element infinite",
        "columns shifted",
        "a rank's part missing",
        "accumulated in dtype",
    ],
)
def test_wrong_results_are_rejected(dtype, case):
    x, w, bias, want = product(dtype)
    assert_close_to(wrong("right", x, w, bias).to(dtype), want, terms=257)
    with pytest.raises(AssertionError, match="elements are off"):
        assert_close_to(wrong(case, x, w, bias).to(dtype), want, terms=257)


@DTYPES
@pytest.mark.parametrize("terms", [16, 512, 8192])
def test_the_tolerance_is_small_against_a_result(dtype, terms):
    """A whole result is about sqrt(terms), one missing product about 1: half precision must see the one, fp32 both."""
    size = terms**0.5
    for roundings in (1, 4):
        atol, rtol = tolerance(dtype, terms, roundings)
        assert atol + rtol * size < 0.1 * size
    atol, rtol = tolerance(dtype, terms)
    assert atol + rtol * size < (0.02 if dtype is torch.float32 else 0.01 * size)
    doubled = tolerance(dtype, terms, scale=2.0)
    assert doubled[1] == rtol and doubled[0] == pytest.approx(2 * atol, rel=0.01)


def test_the_message_names_the_worst_element():
    x, w, bias, want = product(torch.float32)
    got = want.float()
    got[2, 3] += 1
    got[4, 5] = 99.0
    with pytest.raises(AssertionError) as failure:
        assert_close_to(got, want, terms=257)
    assert str(failure.value).startswith(f"2 of {want.numel()} elements are off, the worst at (4, 5): got 99, want ")
    assert "terms=257" in str(failure.value) and "0 not finite" in str(failure.value)
    got[0, 0] = torch.nan
    with pytest.raises(AssertionError, match=r"3 of .* worst at \(0, 0\): got nan, .*1 not finite"):
        assert_close_to(got, want, terms=257)


def test_what_cannot_be_judged_is_refused():
    want = torch.zeros(2, 3, dtype=torch.float64)
    with pytest.raises(TypeError, match="float32; compute it in torch.float64"):
        assert_close_to(want, want.float(), terms=1)
    with pytest.raises(AssertionError, match=r"shape \(2, 2\), want \(2, 3\)"):
        assert_close_to(torch.zeros(2, 2), want, terms=1)
    with pytest.raises(ValueError, match="not finite"):
        assert_close_to(torch.zeros(2, 3), want / 0, terms=1)
    assert_close_to(torch.zeros(0, 3), want[:0], terms=1)


@pytest.mark.ranks(2)
def test_ranks_give_the_groups_of_gloo_one_thread(ctx):
    """Each device of gloo has one that wakes up 100 times a second, and torch keeps the groups of all tests."""

    def loops():
        return [each.read_text().strip() for each in Path("/proc/self/task").glob("*/comm")].count("gloo_tcp_loop")

    groups = [torch.distributed.new_group(backend="gloo")]
    before = loops()
    groups += [torch.distributed.new_group(backend="gloo") for _ in range(3)]
    assert 0 < before == loops()
    for group in groups:
        found = torch.ones(1)
        torch.distributed.all_reduce(found, group=group)
        assert found == ctx.size
