"""Every example of the documentation runs and prints what the page shows."""

from __future__ import annotations

import re

import pytest

from running_docs import ROOT, pages, run

LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#]+)(#[^)]*)?\)")


@pytest.mark.packaged
@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_examples_print_what_the_page_shows(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for code, shown, printed in run(page):
        assert printed == (shown or ""), f"{page.name}: this example prints something else:\n{code}"


@pytest.mark.parametrize(
    "page", [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))], ids=lambda p: p.name
)
def test_links_lead_somewhere(page):
    for target, _ in LINK.findall(page.read_text("utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
