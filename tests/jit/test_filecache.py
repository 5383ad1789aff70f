"""The cache of compiled kernels under what clusters do to it: races, deaths, damage, full or closed disks."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.files import write_whole
from kvlab.jit import filecache
from kvlab.jit.filecache import FileCache, cache_folder

CONTENT = b"what was compiled" * 100
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.test_filecache"])  # import once, fork 32 times


def _never() -> bytes:
    raise AssertionError("produced although the entry is sound")


def _get_logged(folder: Path, log: Path, start: float, results: multiprocessing.Queue[bytes]) -> None:
    """Get one key at the moment `start`; every production leaves a line in `log`."""

    def produce() -> bytes:
        with open(log, "a") as file:
            file.write("made\n")
        time.sleep(0.1)
        return CONTENT

    time.sleep(max(0.0, start - time.time()))
    results.put(FileCache(folder).get("key", produce))


def test_of_32_cold_processes_one_produces(tmp_path: Path) -> None:
    results = PROCESSES.Queue()
    arguments = (tmp_path / "cache", tmp_path / "log", time.time() + 3, results)
    workers = [PROCESSES.Process(target=_get_logged, args=arguments) for _ in range(32)]
    for worker in workers:
        worker.start()
    assert [results.get(timeout=120) for _ in workers] == [CONTENT] * 32
    for worker in workers:
        worker.join(timeout=60)
    assert [worker.exitcode for worker in workers] == [0] * 32
    assert (tmp_path / "log").read_text() == "made\n"


def _die_while_producing(folder: Path) -> None:
    def produce() -> bytes:
        os.kill(os.getpid(), signal.SIGKILL)
        return b""

    FileCache(folder).get("key", produce)


def test_a_producer_that_dies_leaves_the_key_free(tmp_path: Path) -> None:
    worker = PROCESSES.Process(target=_die_while_producing, args=(tmp_path,))
    worker.start()
    worker.join(timeout=60)
    assert worker.exitcode == -signal.SIGKILL
    assert FileCache(tmp_path).get("key", lambda: CONTENT) == CONTENT
    assert FileCache(tmp_path).get("key", _never) == CONTENT


def test_waiting_for_a_stuck_producer_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filecache, "LOCK_TIMEOUT_S", 0.2)
    with open(tmp_path / "key.lock", "w") as stuck:
        fcntl.flock(stuck, fcntl.LOCK_EX)
        assert FileCache(tmp_path).get("key", lambda: CONTENT) == CONTENT
    assert FileCache(tmp_path).get("key", _never) == CONTENT


def test_works_where_the_file_system_has_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert FileCache(tmp_path).get("key", lambda: CONTENT) == CONTENT
    assert FileCache(tmp_path).get("key", _never) == CONTENT


def test_an_entry_made_while_waiting_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take = fcntl.flock

    def another_finishes_first(descriptor: int, operation: int) -> None:
        take(descriptor, operation)
        write_whole(tmp_path / "key", filecache._header(CONTENT), CONTENT)

    monkeypatch.setattr(fcntl, "flock", another_finishes_first)
    assert FileCache(tmp_path).get("key", _never) == CONTENT


Damage = Callable[[bytes], bytes]
_SIZE = 48 + len(CONTENT)
damages: st.SearchStrategy[Damage] = st.one_of(
    st.integers(0, _SIZE - 1).map(lambda length: lambda blob: blob[:length]),
    st.tuples(st.integers(0, _SIZE - 1), st.integers(1, 255)).map(
        lambda spot: lambda blob: blob[: spot[0]] + bytes([blob[spot[0]] ^ spot[1]]) + blob[spot[0] + 1 :]
    ),
    st.binary(min_size=1, max_size=20).map(lambda tail: lambda blob: blob + tail),
    st.binary(max_size=200).map(lambda other: lambda blob: other),
)


@given(damages)
def test_a_damaged_entry_is_produced_anew(damage: Damage) -> None:
    with tempfile.TemporaryDirectory() as name:
        cache, entry, made = FileCache(Path(name)), Path(name, "key"), []
        cache.get("key", lambda: CONTENT)
        sound = entry.read_bytes()
        assert len(sound) == _SIZE
        entry.write_bytes(damage(sound))
        assert cache.get("key", lambda: made.append(1) or CONTENT) == CONTENT  # type: ignore[func-returns-value]
        assert made == [1]
        assert entry.read_bytes() == sound


def test_what_fails_to_compile_is_not_stored_and_frees_the_key(tmp_path: Path) -> None:
    def fail() -> bytes:
        raise OSError("the compiler failed")

    with pytest.raises(OSError, match="the compiler failed"):
        FileCache(tmp_path).get("key", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]
    assert FileCache(tmp_path).get("key", lambda: CONTENT) == CONTENT


def test_a_folder_that_cannot_be_made_costs_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = FileCache(tmp_path / "file" / "cache")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert cache.get("key", lambda: CONTENT) == CONTENT
        assert cache.get("other", lambda: b"other") == b"other"
    assert [warning.category for warning in caught] == [RuntimeWarning]
    assert "KVLAB_CACHE_DIR" in str(caught[0].message)
    assert str(cache.folder) in str(caught[0].message)


def test_a_full_disk_costs_one_warning_and_one_production(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    made = []
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert FileCache(tmp_path).get("key", lambda: made.append(1) or CONTENT) == CONTENT  # type: ignore[func-returns-value]
    assert made == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"], "a temporary file was left behind"


def test_a_closed_folder_is_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FileCache(tmp_path).get("key", lambda: CONTENT)

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    assert FileCache(tmp_path).get("key", _never) == CONTENT


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        (
            {"KVLAB_CACHE_DIR": "/scratch/kvlab", "XDG_CACHE_HOME": "/xdg", "HOME": "/home/me"},
            "/scratch/kvlab",
        ),
        ({"XDG_CACHE_HOME": "/xdg", "HOME": "/home/me"}, "/xdg/kvlab"),
        ({"HOME": "/home/me"}, "/home/me/.cache/kvlab"),
    ],
)
def test_folder_is_chosen_by_the_environment(
    variables: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KVLAB_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(folder)
