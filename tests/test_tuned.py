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
    return tmp_path / "cache" / "tuned"


def record(us=1.0, operation="matmul_all_reduce", M=64, **place):
    return {"key": {"operation": operation, "M": M} | HERE | place, "us": us}


def times(records):
    return [one["us"] for one in records]


def test_a_record_is_found_again_and_replaced_by_one_of_its_key(cache):
    assert tuned.known(2, "simulated") == []
    path = tuned.save(record(us=1.0))
    assert path.parent == cache and tuned.save(record(us=2.0)) == path
    tuned.save(record(us=3.0, M=128))
    records, damaged = tuned.saved()
    assert sorted(times(records)) == [2.0, 3.0] and damaged == {}
    assert sorted(times(tuned.known(2, "simulated"))) == [2.0, 3.0]


def test_others_who_share_the_folder_may_read_records_where_the_umask_lets_them(cache):
    usual = os.umask(0o022)
    try:
        assert tuned.save(record()).stat().st_mode & 0o777 == 0o644
        os.umask(0o077)
        assert tuned.save(record(M=128)).stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(usual)


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
        (b"\x93NUMPY\x00\xff", "can't decode"),
        (b"[1, 2]", "it is JSON, but no record"),
        (b'{"key": 3}', "it is JSON, but no record"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"format": 1, "key": {}, "note": ' + b"[" * 500 + b"]" * 500 + b"}", "it is JSON, but no record"),
        (b'{"format": 99, "key": {"operation": "matmul"}}', "its format is 99, and this version reads 1"),
        (b'{"format": 1, "key": {"operation": "matmul", "gpu": "H200"}}', "its key lacks ranks, tkernels"),
    ],
    ids=["cut off", "binary", "a list", "another tool's", "deep", "as deep as python", "another format", "no place"],
)
def test_a_damaged_or_foreign_file_is_reported_and_ignored(cache, content, reason):
    tuned.save(record(us=1.0))
    (cache / "matmul-0123.json").write_bytes(content)
    with pytest.warns(UserWarning, match=rf"matmul-0123.json is ignored: .*{reason}.*Delete it"):
        assert times(tuned.known(2, "simulated")) == [1.0]


def test_clear_removes_records_and_drafts_and_nothing_else(cache):
    path = tuned.save(record())
    path.rename(path.with_name("renamed.json"))
    tuned.save(record())
    (cache / "notes.txt").write_text("mine")
    (cache / "results.json").write_text('{"my": "results"}')
    (cache / "other.draft").write_text("{")
    (cache / "folder.json").mkdir()
    os.mkfifo(cache / "pipe.json")
    (cache / f"matmul-{'0' * 20}.json").write_text("{")  # cut off
    (cache / f"{'0' * 32}.draft").write_text("{")  # of a process that was killed
    assert tuned.clear() == 4
    left = ["folder.json", "notes.txt", "other.draft", "pipe.json", "results.json"]
    assert sorted(path.name for path in cache.iterdir()) == left


def test_known_reports_what_is_no_file_and_never_opens_it(cache):
    tuned.save(record(us=1.0))
    os.mkfifo(cache / "pipe\x1b[2J.json")  # to open it would wait for a writer
    with pytest.warns(UserWarning, match=r"pipe\\x1b\[2J.json is ignored: it is no file"):
        assert times(tuned.known(2, "simulated")) == [1.0]


def test_jobs_that_write_at_once_leave_whole_records(cache):
    """Writers replace the same few files while a reader reads: it finds whole records, and never half a file."""
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
    assert found == sorted(found)  # a file that is there stays there
    assert len(tuned.saved()[0]) == 2 and not list(cache.glob("*.draft"))


def test_a_record_that_cant_be_written_leaves_no_draft(cache):
    with pytest.raises(TypeError):
        tuned.save(record(us=object()))
    tuned.save(record())
    assert len(list(cache.iterdir())) == 1


def test_a_folder_that_cant_be_read_is_reported_and_ignored(cache, monkeypatch):
    def refuse(*_):
        raise PermissionError("not yours")

    monkeypatch.setattr(type(cache), "glob", refuse)
    with pytest.warns(UserWarning, match=f"{cache} is ignored: not yours.*TKERNELS_CACHE names another folder"):
        assert tuned.known(2, "simulated") == []


def test_the_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("TKERNELS_CACHE", str(tmp_path / "own"))
    assert tuned.folder() == tmp_path / "own" / "tuned"
    monkeypatch.delenv("TKERNELS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert tuned.folder() == tmp_path / "xdg" / "tkernels" / "tuned"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuned.folder() == tmp_path / ".cache" / "tkernels" / "tuned"


def test_folder_says_that_there_is_no_home_and_nothing_is_known(monkeypatch):
    for name in ("TKERNELS_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user who is not in the machine's list
    assert tuned.saved() == ([], {})
    for asked in (tuned.folder, tuned.clear, lambda: tuned.save(record())):
        with pytest.raises(OSError, match="no home to remember in: neither HOME nor XDG_CACHE_HOME nor TKERNELS_CACHE"):
            asked()
