"""The cache of costs: several processes at once, and files that are not to be trusted."""

from __future__ import annotations

import logging
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from soapstone.cost.cache import APPLICATION_ID, Cache
from soapstone.cost.profile import Measured, OpKey, Profile, Updated
from soapstone.errors import CostError

KEY = OpKey("linear", "{}", "f32", 0)


def profile(size: int = 4, seconds: float = 1e-5, **software: str) -> Profile:
    time = Measured(((size, 8), None), ((size,),), seconds, 0.02, 128.0, 224)
    return Profile("cpu", software, {KEY: (time,)}, (Updated(256, 1e-5, 0.1),))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "deep" / "costs.sqlite")


def test_what_is_added_is_there(cache: Cache) -> None:
    assert cache.profiles() == []
    cache.add(profile(torch="1"))
    cache.add(profile(torch="2"))
    assert {each.software["torch"] for each in cache.profiles("cpu")} == {"1", "2"}
    assert cache.profile("cpu", {"torch": "1"}) == profile(torch="1")
    assert cache.profile("cpu", {"torch": "3"}).count == 0
    assert cache.profiles("h200") == []


def test_times_add_up_and_newer_ones_replace(cache: Cache) -> None:
    cache.add(profile(4))
    cache.add(profile(8))
    cache.add(profile(4, seconds=7e-5))
    (found,) = cache.profiles()
    assert [(m.outputs, m.seconds) for m in found.times[KEY]] == [(((4,),), 7e-5), (((8,),), 1e-5)]


WRITER = """
import sys
from pathlib import Path
from soapstone.cost.cache import Cache
from soapstone.cost.profile import Measured, OpKey, Profile
cache, number = Cache(Path(sys.argv[1])), int(sys.argv[2])
for i in range(20):
    time = Measured(((number, i),), ((number, i),), 1e-6, 0.0, 1.0, 1)
    cache.add(Profile("cpu", {}, {OpKey("linear", "{}", "f32", 0): (time,)}))
"""


def test_several_processes_write_at_once(cache: Cache) -> None:
    """No time of any of them is lost, though none knows of the others and the file is new to all."""
    command = [sys.executable, "-c", WRITER, str(cache.path)]
    writers = [subprocess.Popen([*command, str(number)]) for number in range(4)]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0, 0]
    (found,) = cache.profiles()
    assert {m.outputs[0] for m in found.times[KEY]} == {(n, i) for n in range(4) for i in range(20)}


BEGINNER = """
import sys, time
from pathlib import Path
from soapstone.cost.cache import Cache
from soapstone.cost.profile import Measured, OpKey, Profile
folder, number, start = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
time.sleep(max(0.0, start - time.time()))
for i in range(40):
    time_ = Measured(((number,),), ((number,),), 1e-6, 0.0, 1.0, 1)
    times = {OpKey("linear", "{}", "f32", 0): (time_,)}
    Cache(folder / str(i) / "costs.sqlite").add(Profile("cpu", {}, times))
    time.sleep(max(0.0, start + 0.05 * (i + 1) - time.time()))
"""


def test_several_processes_begin_a_cache_at_once(tmp_path: Path) -> None:
    """None sees what another has half made, sets it aside, or is refused: forty times, together."""
    command = [sys.executable, "-c", BEGINNER, str(tmp_path)]
    start = str(time.time() + 3.0)
    writers = [subprocess.Popen([*command, str(number), start]) for number in range(4)]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0, 0, 0]
    for i in range(40):
        cache = Cache(tmp_path / str(i) / "costs.sqlite")
        assert set_aside(cache) == []
        (found,) = cache.profiles()
        assert {m.outputs[0] for m in found.times[KEY]} == {(n,) for n in range(4)}


def test_a_cache_that_was_begun_and_not_finished_is_begun_again(cache: Cache) -> None:
    """Also with what a killed process left beside it, or beside a cache that somebody took away."""
    cache.path.parent.mkdir()
    cache.path.touch()
    begun = cache.path.with_name(f"{cache.path.name}.new")
    begun.write_bytes(b"a process was killed here")
    other = cache.path.with_name("other.sqlite")
    with closing(sqlite3.connect(other)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE profiles (x)")
        database.commit()
        log = other.with_name(f"{other.name}-wal").read_bytes()  # gone once it is closed
    for path in (begun, cache.path):
        path.with_name(f"{path.name}-wal").write_bytes(log)
    cache.add(profile())
    assert cache.profiles() == [profile()]
    assert set_aside(cache) == []


def set_aside(cache: Cache) -> list[Path]:
    return [path for path in cache.path.parent.iterdir() if ".set-aside-" in path.name]


def test_a_file_that_is_no_database_is_set_aside(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    cache.path.parent.mkdir()
    cache.path.write_bytes(b"not a database, but somebody's work" * 100)
    with caplog.at_level(logging.WARNING):
        assert cache.profiles() == []
    assert "it is kept as" in caplog.text
    (kept,) = set_aside(cache)
    assert kept.read_bytes() == b"not a database, but somebody's work" * 100
    cache.add(profile())
    assert cache.profiles() == [profile()]


def test_another_programs_database_is_set_aside(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    cache.path.parent.mkdir()
    with sqlite3.connect(cache.path) as other:
        other.execute("CREATE TABLE mine (x)")
        other.execute("INSERT INTO mine VALUES (7)")
    other.close()
    cache.add(profile())
    assert "another program's database" in caplog.text
    (kept,) = set_aside(cache)
    with sqlite3.connect(kept) as other:
        assert other.execute("SELECT x FROM mine").fetchall() == [(7,)]
    other.close()


def test_another_version_is_set_aside(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    cache.add(profile())
    with sqlite3.connect(cache.path) as database:
        assert database.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        database.execute("PRAGMA user_version = 99")
    database.close()
    assert cache.profiles() == []
    assert "version 99" in caplog.text
    assert len(set_aside(cache)) >= 1


def test_a_damaged_cache_is_set_aside(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    for size in range(1, 200):
        cache.add(profile(size))
    with sqlite3.connect(cache.path) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()
    whole = bytearray(cache.path.read_bytes())
    for page in range(1, len(whole) // 4096):
        whole[page * 4096 : page * 4096 + 64] = b"\xff" * 64
    cache.path.write_bytes(bytes(whole))
    assert cache.profiles() == []
    assert "it is kept as" in caplog.text
    assert any(path.read_bytes() == bytes(whole) for path in set_aside(cache))


def test_a_cache_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(CostError, match="cannot be opened"):
        Cache(tmp_path / "file" / "costs.sqlite").add(profile())
