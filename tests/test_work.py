"""FLOPs and bytes by hand for small cases, and conservation: what is sent arrives."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # the bench is imported from the repository's root alone
from bench import work  # noqa: E402
from bench.work import Work  # noqa: E402

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.quick
def test_matmul_by_hand():
    # 2 x 3 x 4: 24 products and 24 additions; 8 + 12 elements read, 6 written, 2 bytes each
    assert work.matmul(2, 3, 4, BF16) == Work(48, 52)
    assert work.matmul(2, 3, 4, FP32) == Work(48, 104)


@pytest.mark.quick
def test_all_gather_matmul_by_hand():
    # 2 ranks, x 4 x 5, w 3 x 5 a rank: 2 * 4 * 3 * 5 FLOPs. Elements: x 20, w 15, y 12, and 10 that arrive.
    assert work.all_gather_matmul(4, 6, 5, 2, BF16) == Work(120, 2 * (20 + 15 + 12 + 10), 20, 20)


@pytest.mark.quick
def test_matmul_reduce_scatter_by_hand():
    # 2 ranks, x 4 x 3, w 5 x 3 a rank. Elements: x 12, w 15, 10 partial sums written and read, 10 arrived written and
    # read, 10 results.
    expected = Work(2 * 4 * 5 * 3, 2 * (12 + 15 + 20 + 20 + 10), 20, 20)
    assert work.matmul_reduce_scatter(4, 5, 6, 2, BF16) == expected


@pytest.mark.quick
def test_matmul_all_reduce_by_hand():
    # as above, then 10 results read to be sent and 10 that arrive
    expected = Work(2 * 4 * 5 * 3, 2 * (77 + 10 + 10), 40, 40)
    assert work.matmul_all_reduce(4, 5, 6, 2, BF16) == expected


@pytest.mark.quick
def test_products_of_fp8_by_hand():
    """As above, of a byte an element and four for the scale of a row; sums and results in bf16."""
    e4m3 = torch.float8_e4m3fn
    assert work.matmul(2, 3, 4, e4m3) == Work(48, (2 + 3) * (4 + 4) + 2 * 6)
    gather = Work(120, (4 + 3) * (5 + 4) + 2 * 12 + 2 * 9, 2 * 9, 2 * 9)
    assert work.all_gather_matmul(4, 6, 5, 2, e4m3) == gather
    reduce = Work(2 * 4 * 5 * 3, (4 + 5) * (3 + 4) + 2 * (20 + 20 + 10), 20, 20)
    assert work.matmul_reduce_scatter(4, 5, 6, 2, e4m3) == reduce
    assert work.matmul_all_reduce(4, 5, 6, 2, e4m3) == Work(120, reduce.hbm_bytes + 2 * (10 + 10), 40, 40)


@pytest.mark.quick
def test_collectives_by_hand():
    # [6, 2] over 3 ranks in fp32: a rank's part is 4 elements, the whole 12
    assert work.all_gather(6, 2, 3, FP32) == Work(0, 4 * (4 + 12), 4 * 8, 4 * 8)
    # 8 arrive: written and read, and added; the whole is read, 4 results are written
    assert work.reduce_scatter(6, 2, 3, FP32) == Work(8, 4 * (12 + 16 + 4), 4 * 8, 4 * 8)
    assert work.all_reduce(6, 2, 3, FP32) == Work(8, 4 * (32 + 4 + 8), 4 * 16, 4 * 16)


@pytest.mark.quick
def test_the_wire_of_a_measured_shape():
    # llama70b-gate-up on 4 GPUs: 261 us at 385 GB/s
    assert work.all_gather_matmul(8192, 57344, 8192, 4, BF16).link_in_bytes / 385e3 == pytest.approx(261, abs=1)


@pytest.mark.quick
def test_one_rank_has_no_link():
    assert work.all_gather_matmul(4, 6, 5, 1, BF16) == work.matmul(4, 6, 5, BF16)
    assert work.matmul_reduce_scatter(4, 6, 5, 1, BF16) == work.matmul(4, 6, 5, BF16)
    assert work.matmul_all_reduce(4, 6, 5, 1, BF16) == work.matmul(4, 6, 5, BF16)


FUNCTIONS = {
    "all_gather_matmul": (8, 12),
    "matmul_reduce_scatter": (8, 12),
    "matmul_all_reduce": (8, 12),
    "all_gather": (8,),
    "reduce_scatter": (8,),
    "all_reduce": (8,),
}


@pytest.mark.quick
@pytest.mark.parametrize("rows", [None, (7, 0, 3, 1), (11, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_sent_arrives(name, rows):
    ranks = [getattr(work, name)(11, *FUNCTIONS[name], 4, BF16, rank, rows) for rank in range(4)]
    assert sum(one.link_in_bytes for one in ranks) == sum(one.link_out_bytes for one in ranks) > 0


@pytest.mark.quick
@pytest.mark.parametrize("rows", [(11,), (7, 3), (12, -1)], ids=["too few", "of another sum", "negative"])
def test_rows_that_do_not_fit_are_refused(rows):
    with pytest.raises(ValueError, match="must name a count"):
        work.all_gather(11, 8, 2, BF16, rows=rows)


@pytest.mark.quick
def test_features_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="N=6 doesn't divide by 4 ranks"):
        work.all_gather_matmul(8, 6, 8, 4, BF16)
    with pytest.raises(ValueError, match="K=6 doesn't divide by 4 ranks"):
        work.matmul_reduce_scatter(8, 8, 6, 4, BF16)
