"""Launches of which all take as long as each other."""

from __future__ import annotations

from soapstone.cost.launching import Launches
from soapstone.cost.profile import Launched, Profile
from soapstone.cost.work import Work


def launches(kernels_s: float, launching_s: float) -> Launches:
    """Every pass takes so long of the GPU, and of the thread that launches it."""

    class Same(Launches):
        def of(self, work: Work) -> Launched:
            del work
            return Launched(kernels_s, launching_s)

    return Same(Profile("gpu", {}), lambda _: 0.0)
