"""The native core as it is compiled from `cpp/module.cc`; `soapstone.native` says what it does."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

def overlaps(written: NDArray[np.int64], read: NDArray[np.int64]) -> NDArray[np.int64]: ...
def grid_overlaps(
    sizes: Sequence[int], degrees: Sequence[int], read: NDArray[np.int64]
) -> NDArray[np.int64]: ...
