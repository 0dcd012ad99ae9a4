"""Options of the test run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite golden files with what the code gives now (run with -n 0)",
    )


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test sees the costs that were measured on this computer, or adds to them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOAPSTONE_CACHE", str(tmp_path_factory.mktemp("costs")))
        yield
