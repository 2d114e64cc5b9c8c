"""Configurations: which values their fields can have, and what follows from them."""

import re
from dataclasses import replace

import pytest
import torch

from tkernels.configs import COUNT, GemmConfig, OverlapConfig, Wire, by_copy_engine, by_elements, with_room_for


@pytest.mark.parametrize("rows, row_bytes, copy_rows", [
    (2048, 16384, 1024),  # 32 MB to a peer in 2 copies
    (2048, 8192, 1024),
    (1024, 8192, 1024),
    (512, 24576, 256),  # 12 MB in 2
    (8192, 16384, 4096),  # never more than 2
    (100, 64, 256),
    (0, 64, 256),
])  # fmt: skip
def test_the_copy_engine_gets_few_large_copies_of_whole_chunks_whatever_the_tiles(rows, row_bytes, copy_rows):
    for block_m in (64, 128, 256):
        config = by_copy_engine(OverlapConfig(GemmConfig(block_m=block_m), chunk_rows=256), rows, row_bytes)
        assert (config.num_comm, config.landing, config.chunk_rows, config.gemm.block_m) == (0, True, 256, block_m)
        assert config.sent_rows == config.copy_rows == copy_rows


@pytest.mark.parametrize(
    "kind, field, value, allowed",
    [
        (GemmConfig, "block_m", 2**30, "a power of two from 16 to 1024"),
        (GemmConfig, "block_k", 48, "a power of two from 16 to 1024"),
        (GemmConfig, "group_m", 0, f"a whole number from 1 to {COUNT}"),
        (GemmConfig, "split", 3, "1, 2 or 4"),
        (GemmConfig, "num_warps", 6, "a power of two up to 32"),
        (GemmConfig, "num_stages", 2.0, f"a whole number from 1 to {COUNT}"),
        (GemmConfig, "use_tma", None, "True or False"),
        (GemmConfig, "max_programs", 0, f"None, or a whole number from 1 to {COUNT}"),
        (OverlapConfig, "gemm", {}, "a GemmConfig"),
        (OverlapConfig, "chunk_rows", 10**30, f"a whole number from 1 to {COUNT}"),
        (OverlapConfig, "num_comm", -1, f"a whole number from 0 to {COUNT}"),
        (OverlapConfig, "put_block", 100, "a power of two from 16 to 2**20"),
        (OverlapConfig, "copy_rows", 0, f"None, or a whole number from 1 to {COUNT}"),
        (OverlapConfig, "split_tiles", -1, f"None, or a whole number from 0 to {COUNT}"),
        (OverlapConfig, "max_splits", 0, f"a whole number from 1 to {COUNT}"),
    ],
)
def test_a_field_that_makes_no_sense_is_refused(kind, field, value, allowed):
    said = f"{kind.__name__}: {field}={value!r} must be {allowed}"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        kind(**{field: value})


def test_gemm_config_of_four_slices_takes_wide_tiles_and_by_elements_makes_it_of_those_alone():
    with pytest.raises(ValueError, match="split=4 takes a block_n of 64 or more, not 32; pass split=2"):
        GemmConfig(block_n=32, split=4)
    wide, narrow, pointers = GemmConfig(), GemmConfig(block_n=32, split=1), GemmConfig(use_tma=False)
    assert by_elements(wide) == replace(wide, split=4) and by_elements(wide, one_slice=True) == replace(wide, split=1)
    assert by_elements(narrow) == replace(narrow, split=2) and by_elements(pointers) is pointers


def test_overlap_config_with_wire_keeps_the_rows_of_a_copy_in_whole_chunks():
    copied = OverlapConfig(GemmConfig(block_m=64), 128, 0, copy_rows=1024)
    assert copied.with_wire(copied.wire) is copied
    assert copied.with_wire(Wire(512, True)) == replace(copied, chunk_rows=512)
    assert copied.with_wire(Wire(768, True)).copy_rows == 1536
    sent = OverlapConfig(GemmConfig(block_m=64), 128, 4)
    assert sent.with_wire(Wire(64, True)) == replace(sent, chunk_rows=64, landing=True)
    with pytest.raises(AssertionError, match="the copy engine writes into the landing alone"):
        copied.with_wire(Wire(128, False))


def test_with_room_for_wider_results_takes_narrower_tiles():
    config = OverlapConfig()
    assert with_room_for(config, torch.bfloat16, torch.float16) is config
    assert with_room_for(config, torch.float32, torch.float16).gemm == replace(config.gemm, block_n=128, split=2)
