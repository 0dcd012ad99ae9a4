"""A script that joins the other ranks need not take leave of them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import atexit
import torch.distributed as dist
from soapstone.runtime.session import joined

atexit.register(lambda: print("in a group" if dist.is_initialized() else "left"))
joined("cpu")
"""

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.mark.parametrize(
    ("last_line", "code", "told"),
    [
        ("", 0, "left"),
        ("dist.destroy_process_group()", 0, "left"),
        ("raise SystemExit(3)", 3, "left"),
        ("raise ValueError('mine')", 1, "in a group"),  # others may wait for it: it does not wait for them
    ],
)
def test_a_rank_leaves_its_group_before_the_interpreter_goes(last_line: str, code: int, told: str) -> None:
    command = [sys.executable, "-c", SCRIPT + last_line]
    environment = {**os.environ, **ALONE}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (code, f"{told}\n"), done.stderr
