"""The cache of measured times: an SQLite file that several processes may use at once.

One row for each (kind of device, software, operator, shapes). Writers are serialised by SQLite (write-ahead
log, a busy time-out), so profiles of several processes add up. A file that is no such cache, or damaged, is
set aside under another name with a warning, and a fresh one is begun: it is never trusted, and never lost.

`SOAPSTONE_CACHE` names another folder than the user's cache folder.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from soapstone.cost.profile import Measured, OpKey, Profile, Updated
from soapstone.errors import CostError

logger = logging.getLogger(__name__)

APPLICATION_ID = 0x50A9_570E
"""What marks an SQLite file as ours."""

VERSION = 1
BUSY_S = 60.0
"""[choice] How long a process waits for others to finish writing."""

_SCHEMA = """
CREATE TABLE profiles (
    id INTEGER PRIMARY KEY, kind TEXT NOT NULL, software TEXT NOT NULL, changed TEXT NOT NULL,
    UNIQUE (kind, software)
);
CREATE TABLE times (
    profile INTEGER NOT NULL REFERENCES profiles, op TEXT NOT NULL, attrs TEXT NOT NULL, dtype TEXT NOT NULL,
    gradients INTEGER NOT NULL, operands TEXT NOT NULL, outputs TEXT NOT NULL,
    seconds REAL NOT NULL CHECK (seconds >= 0), spread REAL NOT NULL, flops REAL NOT NULL,
    size_bytes INTEGER NOT NULL,
    PRIMARY KEY (profile, op, attrs, dtype, gradients, operands, outputs)
) WITHOUT ROWID;
CREATE TABLE updates (
    profile INTEGER NOT NULL REFERENCES profiles, size_bytes INTEGER NOT NULL,
    seconds REAL NOT NULL CHECK (seconds >= 0), spread REAL NOT NULL,
    PRIMARY KEY (profile, size_bytes)
) WITHOUT ROWID;
"""


def default_path() -> Path:
    """Where the cache is unless a user says otherwise."""
    chosen = os.environ.get("SOAPSTONE_CACHE")
    if chosen:
        return Path(chosen) / "costs.sqlite"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "soapstone" / "costs.sqlite"


class Cache:
    """Profiles on disk."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or default_path()

    def add(self, profile: Profile) -> None:
        """Add a profile's times to those of its kind and software; newer ones replace older."""
        with self._opened(create=True) as database, database:
            number = self._number(database, profile)
            database.executemany(
                "INSERT OR REPLACE INTO times VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (
                        number,
                        key.op_name,
                        key.attrs,
                        key.dtype,
                        key.gradients,
                        json.dumps(m.operands),
                        json.dumps(m.outputs),
                        m.seconds,
                        m.spread,
                        m.flops,
                        m.size_bytes,
                    )
                    for key, times in profile.times.items()
                    for m in times
                ],
            )
            database.executemany(
                "INSERT OR REPLACE INTO updates VALUES (?, ?, ?, ?)",
                [(number, u.size_bytes, u.seconds, u.spread) for u in profile.updates],
            )

    def profiles(self, kind: str | None = None) -> list[Profile]:
        """The profiles of a kind of device (of all), the one changed last first; none without a cache."""
        if not self.path.exists():
            return []
        with self._opened(create=False) as database:
            rows = database.execute(
                "SELECT id, kind, software FROM profiles WHERE ?1 IS NULL OR kind = ?1 ORDER BY changed DESC",
                (kind,),
            ).fetchall()
            return [self._profile(database, *row) for row in rows]

    def profile(self, kind: str, software: dict[str, str]) -> Profile:
        """The profile of one kind and software; an empty one where nothing was measured yet."""
        found = [each for each in self.profiles(kind) if dict(each.software) == software]
        return found[0] if found else Profile(kind, software)

    # -- rows -----------------------------------------------------------------------------------------

    def _number(self, database: sqlite3.Connection, profile: Profile) -> int:
        software = json.dumps(dict(profile.software), sort_keys=True)
        now = datetime.now(UTC).isoformat()
        row = database.execute(
            "INSERT INTO profiles (kind, software, changed) VALUES (?, ?, ?)"
            " ON CONFLICT (kind, software) DO UPDATE SET changed = excluded.changed RETURNING id",
            (profile.kind, software, now),
        ).fetchone()
        return int(row[0])

    def _profile(self, database: sqlite3.Connection, number: int, kind: str, software: str) -> Profile:
        times: dict[OpKey, list[Measured]] = {}
        for op, attrs, dtype, gradients, operands, outputs, *figures in database.execute(
            "SELECT op, attrs, dtype, gradients, operands, outputs, seconds, spread, flops, size_bytes"
            " FROM times WHERE profile = ?",
            (number,),
        ):
            shapes = [
                tuple(None if shape is None else tuple(shape) for shape in json.loads(text))
                for text in (operands, outputs)
            ]
            key = OpKey(op, attrs, dtype, gradients)
            times.setdefault(key, []).append(Measured(shapes[0], shapes[1], *figures))  # type: ignore[arg-type]
        updates = database.execute(
            "SELECT size_bytes, seconds, spread FROM updates WHERE profile = ?", (number,)
        )
        return Profile(
            kind,
            json.loads(software),
            {key: tuple(found) for key, found in times.items()},
            tuple(Updated(*row) for row in updates),
        )

    # -- the file -------------------------------------------------------------------------------------

    @contextmanager
    def _opened(self, *, create: bool) -> Iterator[sqlite3.Connection]:
        try:
            if create:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            database = self._checked()
        except (OSError, sqlite3.OperationalError) as error:
            raise CostError(
                f"{self.path}: the cache of costs cannot be opened ({error}); set SOAPSTONE_CACHE."
            ) from None
        with closing(database):
            try:
                yield database
            except sqlite3.DatabaseError as error:
                raise CostError(
                    f"{self.path}: the cache of costs cannot be used ({error}); try again."
                ) from None

    def _checked(self) -> sqlite3.Connection:
        """A connection to a cache that is ours and sound; what is not is set aside first."""
        for _ in range(2):
            self._begin()
            file = self._file()
            database = sqlite3.connect(self.path, timeout=BUSY_S)
            try:
                reason = _objection(database)
                if reason is None:
                    return database
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):
                    database.close()
                    raise
                reason = str(error)
            database.close()
            self._set_aside(file, reason)
        raise CostError(f"{self.path}: the cache of costs is damaged again and again; set SOAPSTONE_CACHE.")

    def _begin(self) -> None:
        """An empty cache where there is none. It comes to be whole: none ever sees a part of it."""
        if self._size():
            return
        with self._alone():
            if self._size():
                return
            new = self.path.with_name(f"{self.path.name}.new")
            for left in (new, *_logs(new), *_logs(self.path)):
                left.unlink(missing_ok=True)  # by a process that was killed, or of a file that was taken away
            with closing(sqlite3.connect(new)) as database:
                _make(database)
            new.replace(self.path)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process begins a cache, or sets one aside, meanwhile."""
        with self.path.with_name(f"{self.path.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def _file(self) -> tuple[int, int] | None:
        """Which file is there now, whatever its name was before."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def _set_aside(self, judged: tuple[int, int] | None, reason: str) -> None:
        """Keep the file that was judged under another name, unless another process has done so already."""
        with self._alone():
            if judged is None or judged != self._file():
                return
            stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
            aside = self.path.with_name(f"{self.path.name}.set-aside-{stamp}")
            self.path.rename(aside)
            for log, kept in zip(_logs(self.path), _logs(aside), strict=True):
                if log.exists():
                    log.rename(kept)
        logger.warning("%s is no cache of costs (%s); it is kept as %s", self.path, reason, aside.name)


def _logs(path: Path) -> list[Path]:
    """What SQLite keeps beside a database while it is in use; without it they mean nothing."""
    return [path.with_name(path.name + suffix) for suffix in ("-wal", "-shm")]


def _objection(database: sqlite3.Connection) -> str | None:
    """Why a database is not to be trusted; None when it is ours and sound."""
    (marked,) = database.execute("PRAGMA application_id").fetchone()
    if marked != APPLICATION_ID:
        return "another program's database"
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version != VERSION:
        return f"version {version} where this Soapstone has {VERSION}"
    (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
    return None if found == "ok" else str(found)


def _make(database: sqlite3.Connection) -> None:
    database.execute("PRAGMA journal_mode = WAL")
    with database:
        database.execute("BEGIN")
        database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        database.execute(f"PRAGMA user_version = {VERSION}")
        for statement in filter(str.strip, _SCHEMA.split(";")):
            database.execute(statement)
