"""The memory plan: one table, from which sizes, views and bounds come."""

import doctest

import pytest
import torch

from tkernels.comm import Regions, regions


@pytest.fixture
def plan():
    return Regions(ready=((2, 3), torch.int64), rows=((5, 7), torch.bfloat16), empty=((0, 4), torch.float32))


@pytest.mark.quick
def test_regions_lie_one_after_the_other_at_aligned_offsets(plan):
    assert [plan.offset(name) for name in ("ready", "rows", "empty")] == [0, 256, 512]
    assert plan.num_bytes == 512
    assert Regions().num_bytes == 0
    assert Regions(a=((257,), torch.uint8), b=((1,), torch.uint8)).num_bytes == 768


def test_views_have_their_shape_share_memory_and_never_overlap(plan):
    buffer = torch.zeros(plan.num_bytes, dtype=torch.uint8)
    ready, rows, empty = (plan.view(buffer, name) for name in ("ready", "rows", "empty"))
    assert (ready.shape, ready.dtype) == ((2, 3), torch.int64)
    assert (rows.shape, rows.dtype) == ((5, 7), torch.bfloat16)
    assert (empty.shape, empty.dtype) == ((0, 4), torch.float32)
    ready.fill_(-1)
    assert rows.eq(0).all() and buffer[: 2 * 3 * 8].eq(0xFF).all() and buffer[2 * 3 * 8 :].eq(0).all()
    rows.fill_(float("nan"))
    assert ready.eq(-1).all()


def test_a_view_beyond_the_buffer_is_refused_with_both_sizes(plan):
    # The first region still fits, so the buffer is only refused where it is too short.
    buffer = torch.zeros(300, dtype=torch.uint8)
    assert plan.view(buffer, "ready").numel() == 6
    with pytest.raises(ValueError, match=r"'rows' ends at byte 326, .* only 300 bytes; the whole plan needs 512"):
        plan.view(buffer, "rows")


def test_only_a_flat_byte_buffer_is_viewed(plan):
    with pytest.raises(TypeError, match=r"flat uint8 buffer, not torch.float32 \(512,\)"):
        plan.view(torch.zeros(512), "ready")
    with pytest.raises(TypeError, match=r"not torch.uint8 \(2, 256\)"):
        plan.view(torch.zeros(2, 256, dtype=torch.uint8), "ready")


def test_an_unknown_region_is_refused_with_the_names_there_are(plan):
    with pytest.raises(KeyError, match="no region 'raedy' .* it has ready, rows, empty"):
        plan.offset("raedy")


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match=r"region 'inbox' has a negative size in \(4, -1\)"):
        Regions(inbox=((4, -1), torch.uint8))


def test_the_example_in_the_docstring_holds():
    assert doctest.testmod(regions) == (0, 2)
