"""Clocks that tests can count on."""

from __future__ import annotations


class Ticking:
    """A clock that goes on by a twentieth of a second whenever it is looked at, which is more than a slice of
    a chain takes."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return self.looks * 0.05
