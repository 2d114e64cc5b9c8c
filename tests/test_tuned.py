"""Records on disk: found again where they hold, ignored with a warning where damaged, safe to write at once."""

import json
import os
import threading

import pytest

from tkernels import tuned

HERE = tuned.place(2, "simulated")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and no records that come with the package."""
    shipped = tmp_path / "shipped.jsonl"
    shipped.write_text("")
    monkeypatch.setenv("TKERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuned, "SHIPPED", shipped)
    return tmp_path / "cache" / "tuned.jsonl"


def record(us=1.0, operation="matmul_all_reduce", M=64, **place):
    return {"key": {"operation": operation, "M": M} | HERE | place, "us": us}


def times(records):
    return [one["us"] for one in records]


def test_save_replaces_a_record_of_the_same_key(cache):
    assert tuned.known(2, "simulated") == []
    assert tuned.save(record(us=1.0)) == tuned.save(record(us=2.0)) == cache
    tuned.save(record(us=3.0, M=128))
    records, damaged = tuned.saved()
    assert sorted(times(records)) == [2.0, 3.0] and damaged == {}
    assert sorted(times(tuned.known(2, "simulated"))) == [2.0, 3.0]


def test_only_what_holds_here_is_known(cache):
    tuned.save(record(us=1.0))
    tuned.save(record(us=2.0, operation="matmul", ranks=1, transport="local"))
    for number, elsewhere in enumerate(
        [{"gpu": "another"}, {"ranks": 4}, {"transport": "peer"}, {"torch": "0"}, {"triton": "0"}, {"tkernels": "0"}]
    ):
        tuned.save(record(us=10.0 + number, **elsewhere))
    assert sorted(times(tuned.known(2, "simulated"))) == [1.0, 2.0]
    assert sorted(times(tuned.known(3, "simulated"))) == [2.0]


def test_what_this_machine_found_comes_after_what_the_package_brings(cache):
    tuned.save(record(us=1.0))
    lines = [record(us=2.0, torch="0", triton="0"), record(us=3.0, gpu="another")]
    tuned.SHIPPED.write_text("".join(json.dumps({"format": tuned.FORMAT, **line}) + "\n" for line in lines))
    assert times(tuned.known(2, "simulated")) == [2.0, 1.0]


def test_the_same_chip_with_other_memory_is_used_until_something_better_is_known(cache, monkeypatch):
    monkeypatch.setattr(tuned, "place", lambda ranks, transport: HERE | {"gpu": "NVIDIA H100 80GB HBM3"})
    lines = [record(us=1.0, gpu="NVIDIA H100 80GB HBM3"), record(us=2.0, gpu="NVIDIA H200")]
    tuned.SHIPPED.write_text("".join(json.dumps({"format": tuned.FORMAT, **line}) + "\n" for line in lines))
    assert times(tuned.known(2, "simulated")) == [2.0, 1.0]  # of one key, the last one counts


def test_the_records_of_the_package_are_read(monkeypatch):
    for one in tuned.shipped():
        assert one["us"] > 0 and one["key"]["gpu"] in ("NVIDIA H200", "NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize(
    "content, reason",
    [
        (b'{"key": {"opera', "it is no JSON"),
        (b"\x93NUMPY\x00\xff", "it is no JSON"),
        (b"[1, 2]", "it is JSON, but no record"),
        (b'{"key": 3}', "it is JSON, but no record"),
        (b"[" * 200_000, "it is no JSON"),
        (b'{"format": 1, "key": {}, "note": ' + b"[" * 500 + b"]" * 500 + b"}", "it is JSON, but no record"),
        (b'{"format": 99, "key": {"operation": "matmul"}}', "its format is 99, and this version reads 1"),
        (b'{"format": 1, "key": {"operation": "matmul", "gpu": "H200"}}', "its key lacks ranks, tkernels"),
    ],
    ids=["cut off", "binary", "a list", "another tool's", "deep", "as deep as python", "another format", "no place"],
)
def test_known_reports_and_ignores_a_line_that_holds_no_record(cache, content, reason):
    tuned.save(record(us=1.0))
    with open(cache, "ab") as lines:
        lines.write(content + b"\n")
    tuned.save(record(us=2.0, M=128))
    with pytest.warns(UserWarning, match=rf"tuned.jsonl:2 is ignored: .*{reason}.*Delete it"):
        assert times(tuned.known(2, "simulated")) == [1.0, 2.0]


def test_clear_removes_the_records_and_nothing_else(cache, monkeypatch):
    tuned.save(record())
    tuned.save(record(M=128))
    (cache.parent / "notes.txt").write_text("mine")
    assert tuned.clear() == 2 and tuned.clear() == 0
    assert [path.name for path in cache.parent.iterdir()] == ["notes.txt"]
    for foreign, found in (
        ("another program's", "its only line has no end"),
        ("another program's\n", "it is no JSON"),
        (None, "it is no file"),
    ):
        cache.unlink(missing_ok=True)
        cache.mkdir() if foreign is None else cache.write_text(foreign)
        with pytest.raises(OSError, match=f"tuned.jsonl is not removed, since it holds no records: {found}"):
            tuned.clear()
        assert cache.exists()
    monkeypatch.setenv("TKERNELS_CACHE", str(cache.parent / "notes.txt"))
    with pytest.raises(OSError, match="notes.txt/tuned.jsonl is not removed, .*: Not a directory; delete it"):
        tuned.clear()


def test_save_leaves_whole_records_to_jobs_that_write_at_once(cache):
    """A reader finds whole records meanwhile, and never half a line."""
    writers = [
        threading.Thread(target=lambda: [tuned.save(record(us=1.0, M=M, note="x" * 4000)) for M in (1, 2, 1, 2) * 25])
        for _ in range(4)
    ]
    for writer in writers:
        writer.start()
    found = []
    while any(writer.is_alive() for writer in writers):
        records, damaged = tuned.saved()
        assert damaged == {}
        found.append(len(records))
    for writer in writers:
        writer.join()
    assert found == sorted(found)  # a record that is there stays there
    assert len(tuned.saved()[0]) == 2 and cache.read_text().count("\n") == 400


def test_save_leaves_nothing_of_a_record_that_cant_be_written(cache):
    with pytest.raises(TypeError):
        tuned.save(record(us=object()))
    assert tuned.saved() == ([], {}) and not cache.exists()


def test_known_reports_what_is_no_file_and_never_opens_it(monkeypatch, tmp_path):
    monkeypatch.setenv("TKERNELS_CACHE", str(tmp_path / "a\x1b[2Jb"))
    tuned.path().parent.mkdir()
    os.mkfifo(tuned.path())  # to open it would wait for a writer
    with pytest.warns(UserWarning, match=r"a\\x1b\[2Jb.tuned.jsonl is ignored: it is no file"):
        tuned.known(2, "simulated")
    with pytest.raises(FileExistsError, match="it is no file"):
        tuned.save(record())


def test_known_reports_and_ignores_a_file_that_cant_be_read(cache):
    cache.mkdir(parents=True)
    with pytest.warns(UserWarning, match=f"{cache} is ignored: it is no file.*TKERNELS_CACHE names another folder"):
        assert tuned.known(2, "simulated") == []


def test_path_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("TKERNELS_CACHE", str(tmp_path / "own"))
    assert tuned.path() == tmp_path / "own" / "tuned.jsonl"
    monkeypatch.delenv("TKERNELS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert tuned.path() == tmp_path / "xdg" / "tkernels" / "tuned.jsonl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuned.path() == tmp_path / ".cache" / "tkernels" / "tuned.jsonl"


def test_path_says_that_there_is_no_home_and_nothing_is_known(monkeypatch):
    for name in ("TKERNELS_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user who is not in the machine's list
    assert tuned.saved() == ([], {})
    for asked in (tuned.path, lambda: tuned.save(record())):
        with pytest.raises(OSError, match="no home to remember in: neither HOME nor XDG_CACHE_HOME nor TKERNELS_CACHE"):
            asked()
