"""The documentation's links lead somewhere, and its commands can be copied."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

_ROOT = Path(__file__).parents[2]
_PAGES = [*_ROOT.glob("*.md"), *_ROOT.glob("docs/**/*.md"), *_ROOT.glob("charts/**/*.md")]
_BY_NAME = {str(path.relative_to(_ROOT)): path for path in _PAGES}
_FENCED = re.compile(r"(?ms)^ *```.*?^ *```")


def _anchors(page: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    titles = re.findall(r"(?m)^#+ (.*)$", _FENCED.sub("", page.read_text()))
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title.strip()).replace(" ", "-") for title in plain}


@pytest.mark.parametrize("name", _BY_NAME)
def test_every_link_of_a_page_leads_somewhere(name: str) -> None:
    page = _BY_NAME[name]
    for link in re.findall(r"\]\(([^)\s]+)\)", _FENCED.sub("", page.read_text())):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in _anchors(target), link


@pytest.mark.parametrize("name", _BY_NAME)
def test_no_command_has_a_prompt_before_it(name: str) -> None:
    """Whoever copies a block into a shell copies commands alone; output has a block of its own."""
    for block in _FENCED.findall(_BY_NAME[name].read_text()):
        assert not re.search(r"(?m)^ *\$ ", block), block


@pytest.mark.parametrize("name", _BY_NAME)
def test_every_target_of_make_that_a_page_names_is_there(name: str) -> None:
    targets = set(re.findall(r"(?m)^([a-z-]+):", (_ROOT / "Makefile").read_text()))
    named = re.findall(r"(?m)(?:^|`)make ([a-z-]+)", _BY_NAME[name].read_text())
    assert set(named) <= targets
