"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write a file by way of another in the same directory, which then takes its place.

    A reader sees the old file or the new one, never half of it. What is no file, such as /dev/stdout or a
    pipe, is written to and stays what it is. Raises OSError.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        with path.open("w", encoding="utf-8") as stream:
            stream.write(text)
        return
    draft = path.parent / f".{path.name}.{os.getpid()}.part"
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        with contextlib.suppress(OSError):  # there is none any more, or there never was
            draft.unlink()
