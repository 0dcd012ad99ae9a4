"""Commands that the documentation shows exist, with their options, and its links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from soapstone.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def shown(page: Path) -> list[str]:
    """The commands in a page's blocks of code."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = [re.match(r"^(?:\$ )?(?:torchrun .* -m )?(soapstone .*)$", line) for line in lines]
    return [match[1].split(" # ")[0].split(" | ")[0] for match in found if match]


def unknown_options(command: str) -> list[str]:
    """The options of a command line that its command does not have; the command itself if there is none."""
    words = shlex.split(command.split("   ", maxsplit=1)[0].replace("[", "").replace("]", ""))[1:]
    found = get_command(app)
    while isinstance(found, typer.core.TyperGroup) and words and not words[0].startswith("-"):
        if words[0] not in found.commands:
            return [words[0]]
        found = found.commands[words.pop(0)]
    known = {name for each in found.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}
    used = [word.partition("=")[0] for word in words if re.match(r"^--?[a-z]", word)]
    return [option for option in used if option not in known]


@pytest.mark.parametrize("page", [page for page in PAGES if shown(page)], ids=lambda page: page.name)
def test_commands_of_a_page_exist(page: Path) -> None:
    wrong = {command: options for command in shown(page) if (options := unknown_options(command))}
    assert wrong == {}


def test_what_does_not_exist_is_found() -> None:
    assert unknown_options("soapstone plan lenet --machne p100") == ["--machne"]
    assert unknown_options("soapstone plot lenet") == ["plot"]
    assert unknown_options("soapstone machine show p100:4x4") == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+\.\w+|)(#[^)]*)?\)", page.read_text(encoding="utf-8")):
        path, anchor = target
        file = (page.parent / path) if path else page
        assert file.exists(), path
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor[1:] in [_anchor(heading) for heading in headings], anchor


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
