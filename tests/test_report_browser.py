"""The report as a person meets it: a real headless Chromium opens the file and uses it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fake_records as fake
from headwise.record import Record, pack, unpack
from headwise.report import build

pytestmark = pytest.mark.browser

HOSTILE = "</script><img src=x onerror=alert(1)>"
L9H4 = "#/head/self%2F9/4"


def _missing(reason: str) -> None:
    line = f"Chromium is missing: {reason}"
    if os.environ.get("HEADWISE_REQUIRE_BROWSER") == "1":
        pytest.fail(line, pytrace=False)
    pytest.skip(line)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _missing("playwright is not installed (pip install 'headwise[test]')")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("HEADWISE_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if path is None or not Path(path).exists():
        _missing("install Debian's chromium, or set HEADWISE_CHROMIUM to a browser")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking",
             "--disable-component-update", "--disable-sync", "--no-first-run"]  # fmt: skip
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Open records in a page; at the end nothing was complained of, nothing was asked for."""
    trouble: list[str] = []
    contexts = []

    def open_page(records: list[Record], address: str = "", **options: Any) -> Any:
        file = tmp_path / "report.html"
        file.write_text(build(records), encoding="utf-8")
        options = {"viewport": {"width": 1280, "height": 900}, **options}
        context = chromium.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda m: trouble.append(f"console {m.type}: {m.text}"))
        page.on("pageerror", lambda e: trouble.append(f"error: {e}"))
        page.on("dialog", lambda d: (trouble.append(f"dialog: {d.message}"), d.dismiss()))

        def asked(request: Any) -> None:
            if request.url.split("#")[0] != file.as_uri() and not request.url.startswith("data:"):
                trouble.append(f"request: {request.url}")

        page.on("request", asked)
        page.goto(file.as_uri() + address)
        page.wait_for_selector("html[data-ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert trouble == []


def token(page: Any, i: int, axis: str = "text") -> Any:
    return page.locator(f'.tokens[data-axis="{axis}"] [data-i="{i}"]')


def until(page: Any, expression: str, arg: object = None) -> None:
    """Wait for an expression. The page's policy forbids the eval that playwright polls with."""
    end = time.monotonic() + 20
    while not page.evaluate(expression, arg):
        assert time.monotonic() < end, f"never came true: {expression}"
        page.wait_for_timeout(30)


def rows(page: Any, kind: str = "keys") -> list[list[str]]:
    lines = page.locator(f'[data-top="{kind}"] tr')
    return [lines.nth(i).locator("td").all_inner_texts()[:2] for i in range(lines.count())]


def weights(page: Any, axis: str = "text") -> list[str]:
    return page.locator(f'.tokens[data-axis="{axis}"] .token').evaluate_all(
        "all => all.map(el => el.dataset.weight)"
    )


def painted(page: Any, selector: str) -> bool:
    """Whether a canvas holds more than one colour."""
    return page.locator(selector).first.evaluate(
        "c => { const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        " const seen = new Set(); for (let i = 0; i < d.length; i += 4)"
        " seen.add(d[i] + ',' + d[i+1] + ',' + d[i+2] + ',' + d[i+3]); return seen.size > 1; }"
    )


@pytest.fixture(scope="module")
def causal() -> list[Record]:
    return fake.causal()


def test_opens_with_what_it_was_made_from(visit: Any, causal: list[Record]) -> None:
    page = visit(causal)
    text = page.locator(".intro").inner_text()
    for part in ("smollm2", "270 attention heads in 30 layers", "13 tokens", "float32", "sdpa",
                 "torch 2.13.0", "transformers 5.24.0", "2026-12-01 03:20 UTC",
                 "headwise report smollm2", "clues, not explanations"):  # fmt: skip
        assert part in text
    assert page.locator("#not-caught").count() == 0
    assert page.locator(".grid .cell").count() == 270
    until(page, "document.querySelector('.cell canvas').width > 1")
    assert painted(page, ".cell canvas")
    # What is far below is drawn when there is time, so that a print has it too.
    until(page, "[...document.querySelectorAll('.cell canvas')].every(c => c.width > 1)")


def test_says_what_could_not_be_caught(visit: Any) -> None:
    page = visit(fake.speech(1, 2))
    assert "What could not be caught: model.encoder.extra" in page.inner_text("#not-caught")


def test_picking_she_shows_maya_and_the_head(visit: Any, causal: list[Record]) -> None:
    page = visit(causal, "#/pick/text/0")
    page.fill("#search", "she")
    first = page.locator('.linklist[data-side="from"] li').first
    until(page, "location.hash === '#/pick/text/9'")
    until(page, "document.querySelector('.linklist[data-side=from] li')?.dataset.other === '1'")
    assert first.locator(".tok").inner_text() == "·Maya"
    assert first.locator("> .headlink").inner_text() == "L9H4 0.577"
    assert "special and first tokens" in page.inner_text("#left-out")
    assert token(page, fake.SHE).get_attribute("aria-selected") == "true"
    first.locator("> .headlink").click()
    page.wait_for_selector(".headtitle")
    assert page.inner_text("h1") == "Layer 9 · Head 4"
    assert rows(page)[0] == ["·Maya", "0.577"]


def test_ranking_leaves_out_and_takes_in(visit: Any, causal: list[Record]) -> None:
    page = visit(causal, "#/pick/text/9")
    page.wait_for_selector(".linklist li")

    def others() -> set[str]:
        found = page.locator('.linklist[data-side="from"] li')
        return set(found.evaluate_all("all => all.map(li => li.dataset.other)"))

    assert not others() & {"0", "8", "9"}
    for name, expected in (("aside", "0"), ("before", "8"), ("own", "9")):
        page.check(f"#include-{name}")
        until(
            page,
            f"!!document.querySelector('.linklist[data-side=from] li[data-other=\"{expected}\"]')",
        )
    assert "Nothing is left out" in page.inner_text("#left-out")
    page.check("#flat")
    until(page, "document.querySelectorAll('.linklist li details').length === 0")
    shown = page.locator('.linklist[data-side="from"] li > .headlink .num').all_inner_texts()
    assert [float(n) for n in shown] == sorted((float(n) for n in shown), reverse=True)


def test_grid_sorts_and_filters_by_statistic(visit: Any, causal: list[Record]) -> None:
    heads = {(r.where["id"], r.where["head"]): r.values for r in causal if r.kind == "head"}
    page = visit(causal)
    page.select_option("#grid-stat", "previous_token")
    page.select_option("#grid-order", "down")
    ranked = sorted(heads.items(), key=lambda item: -item[1]["previous_token"])
    names = [f"L{where[0].split('/')[1]}H{where[1]}" for where, _ in ranked]
    cells = page.locator(".ranked .cell")
    assert cells.count() == 270
    assert cells.evaluate_all("all => all.slice(0, 20).map(c => c.dataset.cell)") == names[:20]
    best = ranked[0][1]["previous_token"]
    assert cells.first.locator(".value").inner_text() == f"{best:.3f}"
    page.fill("#grid-low", "0.5")
    page.keyboard.press("Tab")
    many = sum(v["previous_token"] >= 0.5 for v in heads.values())
    assert 0 < many < 270
    until(page, f"document.querySelectorAll('.ranked .cell').length === {many}")
    assert f"{many} of 270 heads" in page.inner_text("#grid-count")
    page.fill("#grid-low", "")
    page.select_option("#grid-label", "broad")
    broad = sum("broad" in v["labels"] for v in heads.values())
    until(page, f"document.querySelectorAll('.ranked .cell').length === {broad}")
    page.select_option("#grid-order", "layer")
    assert page.locator(".grid .cell.dim").count() == 270 - broad
    page.fill("#grid-low", "9")
    page.keyboard.press("Tab")
    page.select_option("#grid-order", "down")
    assert "No head passes this filter" in page.inner_text("#all-heads")


def test_self_and_cross_attention_stand_apart(visit: Any) -> None:
    page = visit(fake.speech(2, 3))
    tabs = page.locator("#all-heads .segments button")
    assert tabs.all_inner_texts() == ["encoder self", "decoder self", "decoder cross"]
    assert page.locator(".grid .cell").count() == 6
    page.click('[data-section="decoder cross"]')
    assert page.locator(".grid .cell").first.get_attribute("href") == "#/head/decoder.cross%2F0/0"
    assert page.locator('[data-section="decoder cross"]').get_attribute("aria-pressed") == "true"


def test_hovering_a_token_shades_its_keys(visit: Any, causal: list[Record]) -> None:
    page = visit(causal, L9H4)
    assert "Point at a token" in page.inner_text("#caption")
    token(page, fake.SHE).hover()
    assert token(page, fake.MAYA).get_attribute("data-weight") == "0.577"
    assert token(page, fake.MAYA).locator(".w").inner_text() == "0.577"
    p = next(r for r in causal if r.kind == "map" and r.where == {"id": "self/9", "head": 4})
    row = unpack(p.values["cells"])[fake.SHE]
    said = ["<0.001" if 0 < w < 0.0005 else f"{w:.3f}" for w in row]
    assert weights(page) == said
    # The strongest key has the darkest fill, a key that she cannot see has none.
    fills = page.locator(".token").evaluate_all(
        "all => all.map(el => getComputedStyle(el.querySelector('.t')).backgroundColor)"
    )
    assert fills[10] == fills[12] == "rgba(0, 0, 0, 0)"

    def light(colour: str) -> float:
        parts = colour.removeprefix("rgb(").rstrip(")").replace(",", " ").split()
        return sum(c * float(x) for c, x in zip((0.21, 0.72, 0.07), parts, strict=True))

    darkest = min(range(10), key=lambda i: light(fills[i]))
    assert darkest == int(np.argmax(row))
    best = int(np.argmax(row))
    assert rows(page)[0][1] == f"{row[best]:.3f}"
    # And what attends to it: a bar under later tokens.
    column = unpack(p.values["cells"])[:, fake.SHE]
    assert token(page, 11).get_attribute("data-received") == (
        "<0.001" if column[11] < 0.0005 else f"{column[11]:.3f}"
    )
    page.mouse.move(5, 5)
    assert "Point at a token" in page.inner_text("#caption")


def test_the_same_by_keyboard(visit: Any, causal: list[Record]) -> None:
    page = visit(causal, L9H4)
    token(page, 0).focus()
    for _ in range(fake.SHE):
        page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.i") == str(fake.SHE)
    assert weights(page)[fake.MAYA] == "0.577"
    assert "weight 0.577" in (token(page, fake.MAYA).get_attribute("aria-label") or "")
    # One tab stop for all tokens.
    assert page.locator('.tokens .token[tabindex="0"]').count() == 1
    page.keyboard.press("Enter")
    assert page.evaluate("location.hash").endswith("?q=9")
    page.keyboard.press("Tab")
    assert weights(page)[fake.MAYA] == "0.577"  # it is kept
    page.keyboard.press("]")
    until(page, "document.querySelector('h1').textContent === 'Layer 9 · Head 5'")
    assert "q=9" in page.evaluate("location.hash")
    page.keyboard.press("[")
    until(page, "document.querySelector('h1').textContent === 'Layer 9 · Head 4'")
    page.keyboard.press("Escape")
    assert page.evaluate("location.hash") == L9H4


def test_grid_by_keyboard(visit: Any, causal: list[Record]) -> None:
    page = visit(causal)
    page.locator('.cell[data-cell="L0H0"]').focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight", "ArrowUp"):
        page.keyboard.press(key)
    assert page.evaluate("document.activeElement.dataset.cell") == "L1H2"
    assert page.locator('.grid .cell[tabindex="0"]').count() == 1
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Enter")
    until(page, "document.querySelector('h1').textContent === 'Layer 1 · Head 2'")


def test_skip_link_and_list_of_keys(visit: Any, causal: list[Record]) -> None:
    page = visit(causal)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("?")
    assert "previous and next head" in page.inner_text("#keylist")
    page.keyboard.press("Escape")
    assert page.locator("#keylist").count() == 0
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"


def test_map_zooms_by_wheel_keys_drag_and_buttons(visit: Any, causal: list[Record]) -> None:
    page = visit(causal, L9H4)
    canvas = page.locator("canvas.map")
    canvas.scroll_into_view_if_needed()

    def state() -> dict[str, float]:
        return {k: float(v) for k, v in canvas.evaluate("c => ({...c.dataset})").items()}

    first = state()
    box = canvas.bounding_box()
    place = (first["left"] + 1.5 * first["cell"], first["top"] + 9.5 * first["tall"])
    page.mouse.move(box["x"] + place[0], box["y"] + place[1])
    assert (state()["row"], state()["col"]) == (fake.SHE, fake.MAYA)
    assert "0.577" in page.inner_text("#caption")
    page.mouse.wheel(0, -500)
    until(page, f"+document.querySelector('canvas.map').dataset.cell > {first['cell']}")
    zoomed = state()
    # The cell under the pointer stays under it.
    assert int((place[0] - zoomed["left"]) / zoomed["cell"] + zoomed["x"]) == fake.MAYA
    assert int((place[1] - zoomed["top"]) / zoomed["tall"] + zoomed["y"]) == fake.SHE
    page.mouse.down()
    page.mouse.move(box["x"] + place[0] + 40, box["y"] + place[1] + 60, steps=4)
    page.mouse.up()
    assert state()["y"] < zoomed["y"]
    canvas.focus()
    page.keyboard.press("0")
    assert state()["cell"] == first["cell"] and state()["x"] == 0
    page.keyboard.press("+")
    assert state()["cell"] > first["cell"]
    page.keyboard.press("-")
    assert state()["cell"] == pytest.approx(first["cell"], abs=2e-3)
    page.click("button[aria-label='Zoom in']")
    assert page.inner_text(".zoom") == "1.6×"
    canvas.focus()
    page.keyboard.press("ArrowDown")
    until(page, "document.getElementById('live').textContent.includes('Query')")


def test_words_are_joined_exactly(visit: Any) -> None:
    page = visit(fake.tiny(), "#/head/self%2F0/0")
    page.check("#words")
    assert page.locator(".tokens .token").count() == 2
    assert page.locator(".tokens .t").all_inner_texts() == ["unhappy", "cat"]
    token(page, 0).hover()
    assert weights(page) == ["0.750", "0.250"]
    token(page, 1).hover()
    assert weights(page) == ["0.400", "0.600"]
    assert "words=1" in page.evaluate("location.hash")
    page.uncheck("#words")
    token(page, 1).hover()
    assert weights(page) == ["0.100", "0.600", "0.300"]


def test_hiding_special_and_first_tokens_rescales_and_says_so(visit: Any) -> None:
    page = visit(fake.tiny(), "#/head/self%2F0/0")
    assert page.locator("#banner").count() == 0
    page.check("#hide")
    banner = page.inner_text("#banner")
    assert "hidden" in banner and "rescaled to sum to 1" in banner and "not the model" in banner
    token(page, 0).hover()
    assert weights(page) == ["0.000", "0.600", "0.400"]  # .3 and .2 of .5
    token(page, 2).hover()
    assert weights(page) == ["0.000", "0.250", "0.750"]  # .2 and .6 of .8
    page.check("#words")  # set aside first, then join: un is hidden, so unhappy is ##happy
    token(page, 0).hover()
    assert weights(page) == ["0.633", "0.367"]  # means of (.6, .6667) and (.4, .3333)
    page.click("#banner button")
    until(page, "!document.getElementById('banner')")
    assert not page.is_checked("#hide")
    token(page, 0).hover()
    assert weights(page) == ["0.750", "0.250"]


def test_hiding_leaves_a_first_row_empty_and_says_so(visit: Any, causal: list[Record]) -> None:
    page = visit(causal, f"{L9H4}?q=0&hide=1")
    assert page.is_visible("#banner")
    assert set(weights(page)) == {"0.000"}
    assert "Nothing is left for this query" in page.inner_text("#caption")


def test_theme_follows_the_system_and_switches(visit: Any, causal: list[Record]) -> None:
    dark = visit(causal, color_scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    assert dark.evaluate(paper) == "rgb(16, 18, 23)"
    dark.click("#theme")
    assert dark.evaluate(paper) == "rgb(250, 249, 246)"
    assert dark.evaluate("document.activeElement.id") == "theme"
    light = visit(causal, L9H4)
    assert light.evaluate(paper) == "rgb(250, 249, 246)"
    light.keyboard.press("t")
    assert light.evaluate(paper) == "rgb(16, 18, 23)"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_ramp_is_monotone_in_lightness_and_text_has_contrast(
    visit: Any, causal: list[Record], scheme: str
) -> None:
    page = visit(causal, L9H4, color_scheme=scheme)
    ramp = page.locator(".ramp").first.evaluate(
        "c => [...c.getContext('2d').getImageData(0, 0, 256, 1).data]"
    )

    def light(rgb: list[float]) -> float:
        parts = [v / 255 for v in rgb[:3]]
        lin = [v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        return 0.2126 * lin[0] + 0.7152 * lin[1] + 0.0722 * lin[2]

    shades = [light(ramp[i : i + 4]) for i in range(0, 1024, 4)]
    steps = np.diff(shades)
    assert (steps <= 0).all() if scheme == "light" else (steps >= 0).all()
    assert abs(shades[0] - shades[-1]) > 0.6
    for address in (f"{L9H4}?q=9&hide=1", "#/pick/text/9", "#/table", "#/links", "#/about"):
        page.evaluate("a => { location.hash = a }", address)
        page.wait_for_timeout(300)
        pairs = page.evaluate(CONTRASTS)
        assert len(pairs) > 60
        for ink, ground, text in pairs:
            high, low = sorted((light(ink), light(ground)), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 4.5, (address, text, ink, ground)


# Every printed text with its colour and the ground it stands on.
CONTRASTS = """() => {
  const parse = c => c.match(/[\\d.]+/g).map(Number);
  const ground = el => {
    for (; el; el = el.parentElement) {
      const c = parse(getComputedStyle(el).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const kinds = 'p, h1, h2, h3, td, th, a, button, summary, code, .muted, .w, .t, .chip, .value';
  return [...document.querySelectorAll(kinds)]
    .filter(el => el.textContent.trim() && el.checkVisibility() && !el.disabled)
    .map(el => [parse(getComputedStyle(el).color), ground(el), el.textContent]);
}"""


def test_addresses_can_be_linked(visit: Any, causal: list[Record]) -> None:
    page = visit(causal, f"{L9H4}?q=9")
    assert rows(page)[0] == ["·Maya", "0.577"]
    page.evaluate("location.hash = '#/head/self%2F99/0'")
    until(page, "document.querySelector('.empty')?.textContent.includes('No such head')")
    page.evaluate("location.hash = '#/nowhere/%E0%A4%A'")
    until(page, "document.querySelector('.empty')?.textContent.includes('No such page')")
    page.go_back()
    page.go_back()
    until(page, "document.querySelector('h1')?.textContent === 'Layer 9 · Head 4'")


def test_head_table_sorts_by_mouse_and_keyboard(visit: Any, causal: list[Record]) -> None:
    page = visit(causal, "#/table")
    page.click('[data-key="largest_weight"]')
    header = page.locator('th:has([data-key="largest_weight"])')
    assert header.get_attribute("aria-sort") == "descending"
    position = page.locator("thead th").evaluate_all(
        "all => all.findIndex(th => th.getAttribute('aria-sort') === 'descending')"
    )

    def column() -> list[float]:
        cells = page.locator(f"tbody tr > :nth-child({position + 1})")
        return [float(text) for text in cells.all_inner_texts()]

    assert len(column()) == 270
    assert column() == sorted(column(), reverse=True)
    assert page.evaluate("document.activeElement.dataset.key") == "largest_weight"
    page.keyboard.press("Enter")
    assert header.get_attribute("aria-sort") == "ascending"
    assert column() == sorted(column())
    limits = page.inner_text(".thresholds")
    assert "sink 0.300" in limits and "previous token 0.500" in limits
    assert page.locator('.chip[data-label="sink"]').count() > 0


def test_similarity_and_links(visit: Any, causal: list[Record]) -> None:
    page = visit(causal, "#/similarity")
    until(page, "document.querySelectorAll('canvas.heat').length === 30")
    assert painted(page, "canvas.heat")
    page.uncheck("#grouped")
    until(page, "document.querySelectorAll('canvas.heat').length === 30")
    page.locator("canvas.heat").nth(9).scroll_into_view_if_needed()
    box = page.locator("canvas.heat").nth(9).bounding_box()
    page.mouse.move(box["x"] + 2, box["y"] + box["height"] - 2)
    found = next(r for r in causal if r.kind == "similarity" and r.where["id"] == "self/9")
    expected = found.values["bhattacharyya"][8][0]
    assert page.locator(".matrix .read").nth(9).inner_text() == f"L9H8 and L9H0: {expected:.3f}"
    page.locator("canvas.heat").nth(9).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    expected = found.values["bhattacharyya"][1][0]
    assert page.locator(".matrix .read").nth(9).inner_text() == f"L9H1 and L9H0: {expected:.3f}"
    page.evaluate("location.hash = '#/links'")
    page.wait_for_selector("tbody tr")
    first = page.locator("tbody tr").first.locator("td").all_inner_texts()
    assert [first[0], first[3]] == ["0.577", "L9H4"]


def test_hostile_texts_appear_as_text(visit: Any) -> None:
    tokens = ["[CLS]", HOSTILE, "\u202eevil", "", "\t", "[SEP]"]
    records = fake.bert(1, 2, tokens=tokens)
    records[0] = fake.run_record(model=HOSTILE, not_caught=[HOSTILE], command=HOSTILE,
                                 thresholds={HOSTILE: 1.0})  # fmt: skip
    values = {"labels": [HOSTILE], HOSTILE: 1.0}
    records = [Record(r.kind, r.where, {**r.values, **values}) if r.kind == "head" else r
               for r in records]  # fmt: skip
    page = visit(records)
    assert HOSTILE in page.inner_text(".intro")
    assert token(page, 1).inner_text().strip() == HOSTILE
    assert token(page, 2).inner_text().strip() == "U+202Eevil"
    assert token(page, 3).inner_text().strip() == "(empty)"
    assert token(page, 4).inner_text().strip() == "⇥"
    for address in ("#/table", "#/links", "#/about", "#/similarity", "#/head/self%2F0/1?q=1"):
        page.evaluate("a => { location.hash = a }", address)
        page.wait_for_timeout(150)
        assert page.locator("img").count() == 0
    assert HOSTILE in page.inner_text("#tops")


@pytest.mark.parametrize("width", [360, 1600])
def test_no_page_scrolls_sideways(visit: Any, causal: list[Record], width: int) -> None:
    page = visit(causal, viewport={"width": width, "height": 800})
    pages = ["#/", "#/pick/text/9", f"{L9H4}?q=9", "#/table", "#/similarity", "#/links", "#/about"]
    for address in pages:
        page.evaluate("a => { location.hash = a }", address)
        page.wait_for_timeout(250)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, address


@pytest.mark.parametrize("make", [fake.speech, fake.picture], ids=["sound", "picture"])
def test_other_inputs_fit_a_small_window(visit: Any, make: Callable[..., Any]) -> None:
    page = visit(make(1, 3), viewport={"width": 360, "height": 800})
    for link in ["#/", page.locator(".grid .cell").last.get_attribute("href")]:
        page.evaluate("a => { location.hash = a }", link)
        page.wait_for_timeout(250)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, link


def test_patches_are_shaded_on_the_picture(visit: Any) -> None:
    records = fake.picture(1, 3)
    page = visit(records, "#/head/self%2F0/0")
    assert page.locator(".picture img").first.evaluate("i => i.naturalWidth") == 224
    patch = page.locator('button.patch[data-i="120"]')
    patch.hover()
    top = next(r for r in records if r.kind == "top" and r.where["head"] == 0)
    keys, best = unpack(top.values["keys"])[120], unpack(top.values["weights"])[120]
    for key, weight in zip(keys, best, strict=True):
        got = page.locator(f'.pictures button[data-i="{key}"]')
        assert got.get_attribute("data-weight") == f"{weight:.3f}"
        assert f"weight {weight:.3f}" in (got.get_attribute("aria-label") or "")
    alpha = "p => +getComputedStyle(p, '::before').opacity"
    strongest = page.locator(f'button.patch[data-i="{keys[0]}"]').evaluate(alpha)
    weak = next(k for k in range(1, 257) if k not in keys)
    assert strongest > page.locator(f'button.patch[data-i="{weak}"]').evaluate(alpha)
    assert rows(page)[0][1] == f"{best[0]:.3f}"
    patch.focus()
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.i") == str(120 + 16)
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.dataset.i") == str(120 + 15)


def test_sound_is_a_strip_in_time(visit: Any) -> None:
    records = fake.speech(1, 2)
    page = visit(records, "#/head/decoder.cross%2F0/0")
    strip = page.locator(".audioview")
    assert painted(page, ".audioview canvas")
    before = page.locator(".audioview canvas").evaluate("c => c.toDataURL()")
    token(page, 4).hover()
    top = next(r for r in records if r.kind == "top" and r.where["id"] == "decoder.cross/0")
    key, best = unpack(top.values["keys"])[4, 0], unpack(top.values["weights"])[4, 0]
    assert rows(page)[0] == [f"{0.02 * key:.2f} s", f"{best:.3f}"]
    assert page.locator(".audioview canvas").evaluate("c => c.toDataURL()") != before
    strip.focus()
    page.keyboard.press("Home")
    page.keyboard.press("PageUp")
    assert strip.get_attribute("aria-valuenow") == "0.20"
    assert "0.20 s" in page.inner_text("#caption")
    assert page.locator('[data-top="queries"] tr').count() > 0


def test_sixteen_bits_still_show_three_decimals(visit: Any) -> None:
    tokens = ["[CLS]", *[f"word{i}" for i in range(58)], "[SEP]"]
    records = fake.bert(12, 12, tokens=tokens)
    page = visit(records, "#/head/self%2F7/3")
    assert '"bits":"u16"' in page.locator("#data").text_content()
    cells = unpack(next(r for r in records if r.kind == "map" and r.where
                        == {"id": "self/7", "head": 3}).values["cells"])  # fmt: skip
    for query in (1, 17, 40):
        token(page, query).hover()
        said = ["<0.001" if 0 < w < 0.0005 else f"{w:.3f}" for w in cells[query].astype(float)]
        assert weights(page) == said
    page.evaluate("location.hash = '#/about'")
    until(page, "document.getElementById('main').textContent.includes('to 3 decimals exactly')")


def test_rounded_cells_are_marked_and_kept_keys_stay_exact(
    visit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwise.report.embed.BUDGET", 1_150_000)
    tokens = ["[CLS]", *[f"word{i}" for i in range(58)], "[SEP]"]
    records = fake.bert(12, 12, tokens=tokens)
    page = visit(records, "#/head/self%2F7/3")
    assert '"bits":"u8"' in page.locator("#data").text_content()
    token(page, 17).hover()
    top = next(r for r in records if r.kind == "top" and r.where == {"id": "self/7", "head": 3})
    best = unpack(top.values["weights"])[17]
    shown = rows(page)
    assert 3 <= len(shown) <= len(best)
    assert [w for _, w in shown] == [f"{w:.3f}" for w in best[: len(shown)]]
    assert all(w.startswith("≈") for _, w in rows(page, "queries"))
    assert "254 steps" in page.inner_text("#tops")


def test_missing_parts_are_explained(visit: Any) -> None:
    bare = [r for r in fake.tiny() if r.kind in ("run", "axis", "attention")]
    page = visit(bare)
    assert page.locator(".grid .cell").count() == 1
    for address, text in (
        ("#/head/self%2F0/0", "The records hold no map of this head."),
        ("#/table", "The records hold no statistics."),
        ("#/similarity", "The records hold no similarity"),
        ("#/links", "The records list no links."),
    ):
        page.evaluate("a => { location.hash = a }", address)
        until(page, "t => document.getElementById('main').textContent.includes(t)", text)


def test_nan_has_its_own_colour_and_word(visit: Any) -> None:
    cells = np.array([[0.5, 0.3, 0.2], [np.nan] * 3, [0.2, 0.2, 0.6]], np.float32)
    records = [Record(r.kind, r.where, {**r.values, "cells": pack(cells)}) if r.kind == "map" else r
               for r in fake.tiny()]  # fmt: skip
    page = visit(records, "#/head/self%2F0/0")
    token(page, 1).hover()
    assert weights(page) == ["NaN"] * 3
    assert "Not a number" in page.inner_text(".mapview")


@pytest.mark.slow
def test_long_context_is_usable_within_seconds(visit: Any) -> None:
    records = fake.long()
    started = time.monotonic()
    page = visit(records)
    page.locator(".cell").first.scroll_into_view_if_needed()
    until(page, "document.querySelector('.cell canvas').width > 1")
    opened = time.monotonic() - started  # building the page included
    assert opened < 60
    started = time.monotonic()
    page.fill("#search", "xylophone")
    until(page, "location.hash === '#/pick/text/20001'")
    page.wait_for_selector('.linklist[data-side="from"] li')
    assert time.monotonic() - started < 20
    assert page.locator(".tokens .token").count() == 600
    assert page.locator('.tokens [data-i="20001"]').get_attribute("aria-selected") == "true"
    tops = [r for r in records if r.kind == "top"]
    at = int(np.flatnonzero(unpack(tops[0].values["rows"]) == 20_001)[0])
    best = max(float(unpack(r.values["weights"])[at].max()) for r in tops)
    for name in ("own", "before", "aside"):
        page.check(f"#include-{name}")
    until(
        page,
        "document.querySelector('.linklist[data-side=from] li > .headlink .num')"
        f".textContent === '{best:.3f}'",
    )
    page.evaluate("location.hash = '#/pick/text/77'")
    until(page, "document.getElementById('ranking').textContent.includes('Nearest:')")
    page.evaluate("location.hash = '#/head/self%2F3/2?q=20001'")
    page.wait_for_selector("canvas.map[data-cell]")
    assert "pooled: a cell is 256 queries × 256 keys" in page.inner_text(".split")
    assert "strongest keys, exact" in page.inner_text("#caption")
    before = page.locator("canvas.map").get_attribute("data-cell")
    page.click("button[aria-label='Zoom in']")
    assert page.locator("canvas.map").get_attribute("data-cell") != before


def check_records() -> list[Record]:
    where = {"check": "future leak", "path": "sdpa", "case": None}
    place = {"module": HOSTILE, "layer": 1, "head": 2, "query": 3, "key": 5, "weight": 0.25}
    failed = {
        "status": "failed", "message": "changing token 5 moves output 3", "cause": "future-leak",
        "fix": "mask it", "where": place, "ran": "8 tokens", "worst": 0.5, "tolerance": 1e-6,
        "declared": [[1, 0], [1, 1]], "measured": [[1.0, 0.25], [0.5, 1.0]],
    }  # fmt: skip
    passed = {"status": "passed", "message": "nothing moved", "ran": "8 tokens"}
    silent = {"status": "not run", "message": "the model keeps no cache"}
    return [
        Record("check", {"check": "padding", "path": None, "case": None}, passed),
        Record("check", {"check": "cache", "path": None, "case": None}, silent),
        Record("check", where, failed),
    ]


def test_checks_alone_make_a_page(visit):
    page = visit([Record("run", {}, {"model": "toy"}), *check_records()])
    assert page.locator("nav a").all_inner_texts() == ["Checks", "About"]
    assert page.locator("#check-counts").inner_text() == "1 failed, 1 passed, 1 not run."
    first = page.locator("tr.check").first
    assert "✗ failed" in first.inner_text() and "future-leak" in first.inner_text()
    assert HOSTILE in first.inner_text(), "untrusted text appears as text"
    assert first.locator(".check-grid").count() == 2
    cells = first.locator(".check-grid").nth(1).locator("td")
    assert cells.nth(1).get_attribute("title") == "0.250"
    shades = cells.evaluate_all("all => all.map(c => getComputedStyle(c).backgroundColor)")
    assert len(set(shades)) == 3, "1, 0.25 and 0.5 look different, equal weights alike"
    before = shades[0]
    page.keyboard.press("t")
    assert cells.first.evaluate("c => getComputedStyle(c).backgroundColor") != before


def test_checks_stand_beside_the_heads(visit):
    page = visit([*fake.causal(), *check_records()], "#/checks")
    assert "Checks" in page.locator("nav a").all_inner_texts()
    assert page.locator("tr.check").count() == 3
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def cost_record(context: int, **more: Any) -> Record:
    counted = {"attention_flops": 10**9 * context, "other_flops": 10**9, "fused_peak": 2**30}
    return Record(
        "cost", {"model": HOSTILE, "context": context},
        {**counted, "kv_bytes": 2**20 * context, "beyond_trained": context > 512, **more},
    )  # fmt: skip


def test_cost_is_drawn_and_told(visit):
    measured = {"measured_peak": 2**30, "prefill_seconds": 1.5, "attention_share": 0.25,
                "decode_seconds": 0.02, "of_matrix_rate": 0.8, "of_read_rate": 0.5}  # fmt: skip
    lines = Record("growth", {"model": "m"}, {"lines": ["attention's time grows as N^2.00"]})
    page = visit(
        [fake.run_record(), cost_record(512, **measured), cost_record(1024, **measured), lines]
    )
    assert page.locator("#cost h1").inner_text() == "Cost"
    assert page.locator("#cost tbody tr").count() == 2
    assert "1,024 *" in page.locator("#cost tbody tr").nth(1).inner_text()
    assert "512 MiB" in page.locator("#cost tbody tr").nth(0).inner_text()
    assert page.locator("#cost svg").count() == 2
    assert page.locator("#cost svg").first.locator("circle").count() == 4
    assert "grows as N^2.00" in page.locator("#cost").inner_text()
    assert page.locator("#cost img").count() == 0


def study_record(design: str, mean: float, **more: Any) -> Record:
    values = {"metric": "accuracy", "better": "higher", "mean": mean, "spread": 0.01, "seeds": 3,
              "difference": None, "low": None, "high": None, "parameters": 1000, "kv_bytes": 512,
              "latency": 0.002, "decode": None, "train": 12.5, "best": False,
              "chosen": False}  # fmt: skip
    return Record("study", {"task": "vision", "design": design}, {**values, **more})


def test_a_study_is_drawn_with_its_answer(visit):
    worse = {"difference": -0.2, "low": -0.3, "high": -0.1, "latency": 0.003}
    page = visit(
        [
            fake.run_record(),
            study_record("1 head × 64", 0.7, **worse),
            study_record(HOSTILE, 0.9, best=True, chosen=True),
            Record("study_baseline", {"task": "vision", "model": "logistic"}, {"mean": 0.8}),
            Record("study_answer", {"task": "vision"},
                   {"answer": "2 heads it is.", "cautions": ["small"], "limits": ["seeds"],
                    "match": "width"}),
        ]
    )  # fmt: skip
    assert page.locator("#study h1").inner_text() == "Study"
    assert page.locator("#answer").inner_text() == "2 heads it is."
    rows = page.locator("#study tbody tr")
    assert rows.count() == 3
    assert "-0.200 (-0.300 to -0.100)" in rows.nth(0).inner_text()
    assert "◀" in rows.nth(1).inner_text() and HOSTILE in rows.nth(1).inner_text()
    assert page.locator("#study svg circle").count() == 6
    assert page.locator("#study svg .front").count() == 3
    heads = page.locator("#study thead").inner_text()
    assert "Training, batches/s" in heads and "Next token, ms" not in heads
    assert rows.nth(0).locator("td").nth(4).inner_text() == "12.500"
    assert rows.nth(2).locator("td").count() == rows.nth(0).locator("td").count() == 8
    assert "Caution: small" in page.locator("#study").inner_text()
    assert "Cannot tell: seeds" in page.locator("#study").inner_text()


def test_names_of_many_designs_lie_inside_the_picture_and_not_on_each_other(visit):
    every = [
        study_record(f"{2**n} heads × {k}, {k} KV", 0.9 + 0.001 * n + 0.0001 * k,
                     parameters=1000 + 9 * n, latency=0.001 * (n + 1), kv_bytes=64 * k,
                     decode=0.0005 * (n + 1), best=n == 5, chosen=(n, k) == (2, 4))
        for n in range(6) for k in (1, 2, 4, 8)
    ]  # fmt: skip
    page = visit([fake.run_record(), *every])
    assert "Next token, ms" in page.locator("#study thead").inner_text()
    assert page.locator("#study tbody tr").nth(0).locator("td").nth(6).inner_text() == "0.500"
    for picture in page.locator("#study svg").all():
        frame = picture.bounding_box()
        boxes = [name.bounding_box() for name in picture.locator(".name").all()]
        assert len(boxes) >= 2
        for n, one in enumerate(boxes):
            assert one["x"] >= frame["x"]
            assert one["x"] + one["width"] <= frame["x"] + frame["width"] + 1
            for other in boxes[:n]:
                wide = min(one["x"] + one["width"], other["x"] + other["width"])
                high = min(one["y"] + one["height"], other["y"] + other["height"])
                over = (wide - max(one["x"], other["x"]), high - max(one["y"], other["y"]))
                assert min(over) < 3, (one, other)  # boxes count a line's own space
        assert picture.locator(".name", has_text="4 heads × 4, 4 KV").count() == 1


def test_a_rollout_is_drawn_on_its_axis_with_its_largest_shares(visit):
    """Drawn from records; the token itself does not end the ramp, and texts stay texts."""
    records = fake.causal()
    (axis,) = [r for r in records if r.kind == "axis"]
    count = len(axis.values["tokens"])
    shares = [0.02] * count
    shares[9], shares[1] = 0.5, 0.3
    values = {"text": HOSTILE, "tokens": 1, "layers": 12, "shares": shares}
    assert visit(records, "#/").locator('a[href="#/rollout"]').count() == 0
    page = visit([*records, Record("rollout", {"axis": "text", "query": 9}, values)], "#/rollout")
    assert page.locator("main h1").inner_text() == "Rollout"
    assert page.locator("main h2 q").inner_text() == HOSTILE
    drawn = weights(page)
    assert len(drawn) == count and drawn[1] == "0.300" and drawn[9] == "0.500"
    assert token(page, 9).get_attribute("class").split()[-1] == "focus"
    lines = page.locator("main tbody tr")
    assert lines.count() == 12
    assert lines.nth(0).locator("td").all_inner_texts()[0] == "0.300"
    assert lines.nth(0).locator("td").nth(1).inner_text().endswith(" 1")
