"""The report page in a real browser: it opens, zooms and can be clicked without an error.

A script that is added to a copy of the page acts as a user would and writes down what it sees; Chromium
prints the resulting document. Skipped where there is no Chromium; `make browser` fetches one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from soapstone.cost.analytic import AnalyticCosts
from soapstone.graph import GraphBuilder
from soapstone.machine import preset
from soapstone.plans import Plan, simulation
from soapstone.report.figures import figures
from soapstone.report.page import Actual, Rival, page
from soapstone.search.baselines import data_parallel
from soapstone.sim.outcome import outcome

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FETCHED = Path(__file__).parents[2] / ".browser"
CHROMIUM = next(
    filter(None, map(shutil.which, [*BROWSERS, str(FETCHED / "usr/lib/chromium/chromium-headless-shell")])),
    None,
)
LIBRARIES = ":".join(
    str(FETCHED / "usr/lib" / processor / folder)
    for processor in ("x86_64-linux-gnu", "aarch64-linux-gnu")
    for folder in (".", "pulseaudio")
)
PATIENCE_S = 120

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason=f"none of {', '.join(BROWSERS)} is there, and `make browser` fetched none"
)

LISTENER, USER = (
    f"<script>{Path(__file__).with_name(name).read_text(encoding='utf-8')}</script>"
    for name in ("report_listener.js", "report_user.js")
)


def report(with_actual: bool, name: str = "net") -> str:
    """The page of a small network on four devices."""
    build = GraphBuilder(name)
    x = build.input("x", (8, 16))
    for i in range(3):
        (x,) = build.add("linear", [x, build.weight(f"w{i}", (16, 16)), None], name=f"fc{i}", scope=f"fc{i}")
    (loss,) = build.add("sum", [x], {"dim": (0, 1)}, name="loss")
    graph, machine = build.graph(loss=loss), preset("p100:2x2")
    strategy = data_parallel(graph, machine)
    simulated = simulation(strategy, machine)
    search = {
        "method": "mcmc",
        "lower_bound_s": simulated.timeline.makespan_s / 2,
        "curve": [[0.0, 1, 1.0], [1.0, 9, 0.5]],
    }
    plan = Plan(strategy, machine, simulated.prediction, search=search)
    own = figures(outcome(strategy, machine, AnalyticCosts()))
    timeline = simulated.timeline
    actual = Actual(tuple(2 * t for t in timeline.start_s), tuple(2 * t for t in timeline.end_s))
    return page(
        plan,
        simulated,
        own,
        [
            Rival("data_parallel", "all samples", own, 2**20, True),
            Rival("huge", "too much", own, 2**50, False),
        ],
        actual if with_actual else None,
    )


def used(text: str, folder: Path, *options: str) -> dict[str, Any]:
    """What a user of the page sees."""
    assert CHROMIUM is not None
    path = folder / "report.html"
    path.write_text(text.replace("<body>", f"<body>{LISTENER}").replace("</body>", f"{USER}</body>"))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,900", *options]
    command += [
        f"--user-data-dir={folder / 'profile'}",
        "--virtual-time-budget=2000",
        "--dump-dom",
        path.as_uri(),
    ]
    found_first = {"LD_LIBRARY_PATH": LIBRARIES} if CHROMIUM.startswith(str(FETCHED)) else {}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, **found_first},
    )
    found = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    seen: dict[str, Any] = json.loads(unescape(found[1]))
    return seen


@pytest.mark.parametrize("with_actual", [False, True], ids=["predicted", "actual"])
def test_the_page_can_be_used(tmp_path: Path, with_actual: bool) -> None:
    seen = used(report(with_actual), tmp_path)
    assert seen["errors"] == []
    assert len(seen["sections"]) == 7
    assert all(seen["sections"])
    assert "per iteration" in seen["verdict"]
    assert ("as it ran" in seen["verdict"]) == with_actual
    assert seen["verdict"].count("does not fit") == 1
    assert " 1 MiB" in seen["verdict"]
    assert "over data_parallel, the fastest baseline that fits" in seen["verdict"]
    assert (seen["tiles"], seen["cells"]) == (2, 8)
    assert seen["tables"]
    assert "sample(b) 4" in seen["tile"]
    assert seen["whole"] == seen["home"] == [0, 1]
    assert seen["zoomed"] == [0.25, 0.75]
    assert seen["panned"][0] > seen["zoomed"][0]
    assert seen["wheeled"][1] - seen["wheeled"][0] < 0.5
    assert "forward on node0/gpu0" in seen["first"]
    assert ("measured" in seen["first"]) == with_actual
    assert "on the critical path" in seen["critical"]
    assert seen["colours"] > 10
    assert "node0/gpu1" in seen["memory"]
    assert seen["focusable"]
    assert seen["wide"]


def test_names_stay_text(tmp_path: Path) -> None:
    nasty = "</script><img src=x onerror=\"console.error('run')\">"
    seen = used(report(with_actual=False, name=nasty), tmp_path)
    assert seen["errors"] == []


def test_the_page_in_the_dark(tmp_path: Path) -> None:
    seen = used(report(with_actual=False), tmp_path, "--blink-settings=preferredColorScheme=0")
    assert seen["errors"] == []
