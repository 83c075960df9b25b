"""The HTML page in a real browser: whole, readable and quiet, on a desk and on a phone, by day and by night."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

from sample_reports import SAMPLES, accepted, origin
from seatrial.report import plots, write

pytestmark = pytest.mark.browser

PAGES = {**{name: [make] for name, make in SAMPLES.items()}, "twins": [origin, accepted]}
DESK, PHONE = 1280, 390
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars", "--force-color-profile=srgb",
)  # fmt: skip


def browser_or_why_not() -> tuple[str, str]:
    """Paths of chromium and chromedriver; skips without them, and fails where they are required."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if chromium and driver:
        return chromium, driver
    missing = f"the page was not seen in a browser: chromium is {chromium or 'missing'}, chromedriver is {driver or 'missing'}"
    if os.environ.get("SEATRIAL_REQUIRE_BROWSER") == "1":
        pytest.fail(missing)
    pytest.skip(missing)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    chromium, driver = browser_or_why_not()
    options = ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = Chrome(options=options, service=Service(driver))
    chrome.set_page_load_timeout(60)
    yield chrome
    chrome.quit()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All pages, written once."""
    path = tmp_path_factory.mktemp("pages")
    for name, makers in PAGES.items():
        write("html", [make() for make in makers], path / f"{name}.html")
    return path


def look(browser: Chrome, path: Path, width: int, scheme: str = "light") -> None:
    """Open a page as a reader with such a screen sees it, everything unfolded."""
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    browser.get(path.as_uri())
    browser.execute_script("document.querySelectorAll('details').forEach(fold => fold.open = true)")


def logged(browser: Chrome, kind: str) -> list[dict[str, str]]:
    """What the browser wrote into one of its logs since the last time."""
    lines: list[dict[str, str]] = browser.get_log(kind)  # type: ignore[no-untyped-call]  # selenium leaves it so
    return lines


def asked(browser: Chrome, script: str) -> Any:
    return browser.execute_script(script)


# Elements that hold text of their own.
_SPEAKING = """
const speaking = [...document.querySelectorAll('body *')].filter(e => !(e instanceof SVGElement)
  && [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()) && e.checkVisibility());
const told = e => `${e.tagName}.${e.className} «${e.textContent.trim().slice(0, 40)}»`;
"""
_CUT = (
    _SPEAKING
    + """
const scrolls = e => e.closest('.scroll') !== null;
const hidden = e => e.closest('thead') !== null && getComputedStyle(e.closest('thead')).position === 'absolute';
return speaking.filter(e => !scrolls(e) && !hidden(e)).filter(e => {
  const box = e.getBoundingClientRect();
  const inline = getComputedStyle(e).display === 'inline';
  return (!inline && e.scrollWidth > e.clientWidth + 1) || box.right > innerWidth + 1 || box.left < -1;
}).map(told);
"""
)
_SPILT = (
    _SPEAKING
    + """
// Words drawn outside the card that holds them.
const cards = '.hero, .opinion, .finding, .growth, .cell, .checks, .candidates, pre';
return speaking.filter(e => e.closest(cards) && !e.closest('thead') && !e.closest('.scroll')).filter(e => {
  const card = e.closest(cards).getBoundingClientRect();
  const range = document.createRange(); range.selectNodeContents(e);
  return [...range.getClientRects()].some(r => r.width > 0 && (r.right > card.right + 1 || r.left < card.left - 1
    || r.bottom > card.bottom + 1 || r.top < card.top - 1));
}).map(told);
"""
)
_COVERED = (
    _SPEAKING
    + """
// Two pieces of text in one place.
const boxes = speaking.filter(e => !e.closest('thead') && !e.closest('.scroll')).flatMap(e => [...e.childNodes]
  .filter(n => n.nodeType === 3 && n.textContent.trim()).flatMap(n => {
    const range = document.createRange(); range.selectNodeContents(n);
    return [...range.getClientRects()].map(r => ({e, top: r.top + 3, bottom: r.bottom - 3, left: r.left + 1, right: r.right - 1}));
  })).sort((a, b) => a.top - b.top);
const clashes = [];
boxes.forEach((a, i) => {
  for (let j = i + 1; j < boxes.length && boxes[j].top < a.bottom; j++) {
    const b = boxes[j];
    if (a.e !== b.e && a.left < b.right && b.left < a.right) clashes.push(told(a.e) + ' and ' + told(b.e));
  }
});
return clashes;
"""
)
_FAINT = """
const channel = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const rgba = text => { const m = text.match(/[\\d.]+/g).map(Number); return m.length > 3 ? m : [...m, 1]; };
const light = c => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
const ground = e => {
  for (; e; e = e.parentElement) { const c = rgba(getComputedStyle(e).backgroundColor); if (c[3] === 1) return c; if (c[3] > 0) throw Error('translucent ground'); }
  throw Error('no ground');
};
return [...document.querySelectorAll('body *')].filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()) && e.checkVisibility())
  .map(e => {
    const style = getComputedStyle(e);
    const [a, b] = [light(rgba(e instanceof SVGElement ? style.fill : style.color)), light(ground(e))];
    return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.tagName + '.' + (e.className.baseVal ?? e.className), e.textContent.trim().slice(0, 30)];
  }).filter(([ratio]) => ratio < 4.5);
"""
_DRAWN_BADLY = """
const faults = [];
for (const svg of document.querySelectorAll('svg[role=img]')) {
  const frame = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll('text')].map(t => ({t, box: t.getBoundingClientRect()}));
  texts.forEach(({t, box}, i) => {
    if (box.left < frame.left - .5 || box.right > frame.right + .5 || box.top < frame.top - .5 || box.bottom > frame.bottom + .5)
      faults.push('outside: ' + t.textContent);
    for (const {t: u, box: other} of texts.slice(i + 1))
      if (box.left < other.right - 1 && other.left < box.right - 1 && box.top + 3 < other.bottom && other.top + 3 < box.bottom)
        faults.push('overlap: ' + t.textContent + ' / ' + u.textContent);
  });
}
return faults;
"""
_SMALL = """
return [...document.querySelectorAll('svg[role=img]')].map(svg => {
  const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  return scale * parseFloat(getComputedStyle(svg.querySelector('text')).fontSize);
});
"""


@pytest.mark.parametrize("width", [DESK, PHONE])
@pytest.mark.parametrize("name", PAGES)
def test_no_text_is_cut_covered_or_spilt(browser: Chrome, folder: Path, name: str, width: int) -> None:
    look(browser, folder / f"{name}.html", width)
    assert asked(browser, "return document.documentElement.scrollWidth <= innerWidth")
    assert asked(browser, "return innerWidth") == width
    assert asked(browser, _CUT) == []
    assert asked(browser, _SPILT) == []
    assert asked(browser, _COVERED) == []
    assert asked(browser, _DRAWN_BADLY) == []


_BROKEN_NUMBERS = """
return [...document.querySelectorAll('.growth .n, .scroll .n')].filter(e => {
  const range = document.createRange(); range.selectNodeContents(e);
  return new Set([...range.getClientRects()].map(r => Math.round(r.top))).size > 1;
}).map(e => e.textContent);
"""
_LOOSE_TABLES = """
return [...document.querySelectorAll('.growth table')].filter(t => {
  const frame = t.closest('.scroll');
  return !frame || getComputedStyle(frame).overflowX !== 'auto' || frame.getBoundingClientRect().right > innerWidth;
}).length;
"""


@pytest.mark.parametrize("width", [DESK, PHONE, 280])
@pytest.mark.parametrize("name", ["origin", "not-finite", "twins"])
def test_numbers_of_a_table_are_not_broken_and_the_table_scrolls_alone(
    browser: Chrome, folder: Path, name: str, width: int
) -> None:
    look(browser, folder / f"{name}.html", width)
    assert asked(browser, "return document.querySelectorAll('.growth td.n').length") > 10
    assert asked(browser, _BROKEN_NUMBERS) == []
    assert asked(browser, _LOOSE_TABLES) == 0
    assert asked(browser, "return document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["origin", "accepted-with-limits", "inconclusive", "not-finite", "twins"])
def test_all_text_stands_out_from_its_ground(browser: Chrome, folder: Path, name: str, scheme: str) -> None:
    look(browser, folder / f"{name}.html", DESK, scheme)
    assert asked(browser, _FAINT) == []


def test_paper_is_white_at_night_too(browser: Chrome, folder: Path) -> None:
    look(browser, folder / "origin.html", DESK, "dark")
    media = {"media": "print", "features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    try:
        assert asked(browser, "return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert asked(browser, _FAINT) == []
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_day_and_night_differ(browser: Chrome, folder: Path) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        look(browser, folder / "origin.html", DESK, scheme)
        grounds.append(asked(browser, "return getComputedStyle(document.body).backgroundColor"))
    assert grounds[0] != grounds[1]


@pytest.mark.parametrize("name", ["origin", "hostile", "twins"])
def test_the_page_is_quiet_and_asks_for_nothing(browser: Chrome, folder: Path, name: str) -> None:
    logged(browser, "browser"), logged(browser, "performance")  # forget what came before
    path = folder / f"{name}.html"
    look(browser, path, DESK)
    assert logged(browser, "browser") == []
    asked_for = [
        line["message"] for line in logged(browser, "performance") if '"Network.requestWillBeSent"' in line["message"]
    ]
    assert len(asked_for) == 1
    assert path.as_uri() in asked_for[0]
    assert asked(browser, "return performance.getEntriesByType('resource').length") == 0
    assert asked(browser, "return document.scripts.length") == 0


def test_the_checks_above_can_fail(browser: Chrome, folder: Path) -> None:
    """A page spoilt on purpose: every question of this file finds its fault."""
    look(browser, folder / "origin.html", DESK)
    spoil = """
    const add = (html, parent = document.querySelector('.hero')) => parent.insertAdjacentHTML('beforeend', html);
    add('<p style="width:40px;overflow:hidden;white-space:nowrap">cut away in the middle</p>');
    add('<p style="position:relative;top:-600px">spilt</p>');
    add('<p style="position:absolute">one</p><p style="position:absolute">two</p>');
    add('<p style="color:#999;background:#fff">faint</p>');
    document.querySelector('svg[role=img]').insertAdjacentHTML('beforeend', '<text x="900" y="20">out</text><text x="900" y="21">side</text>');
    """
    browser.execute_script(spoil)
    assert any("cut away" in fault for fault in asked(browser, _CUT))
    assert any("spilt" in fault for fault in asked(browser, _SPILT))
    assert any("one" in fault and "two" in fault for fault in asked(browser, _COVERED))
    assert any(fault[2] == "faint" for fault in asked(browser, _FAINT))
    assert {fault.split(":")[0] for fault in asked(browser, _DRAWN_BADLY)} == {"outside", "overlap"}


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_plots_stay_readable(browser: Chrome, folder: Path, width: int) -> None:
    look(browser, folder / "origin.html", width)
    sizes = asked(browser, _SMALL)
    assert len(sizes) == 7
    assert min(sizes) >= 10
    assert max(sizes) <= 18


def test_a_link_of_the_overview_leads_to_its_candidate(browser: Chrome, folder: Path) -> None:
    look(browser, folder / "twins.html", PHONE)
    browser.execute_script(
        "document.documentElement.style.scrollBehavior = 'auto'; document.querySelectorAll('.candidates a')[1].click()"
    )
    top = asked(browser, "return document.querySelector('#candidate-2').getBoundingClientRect().top")
    assert 0 <= top < 100


def test_a_reproducer_is_selected_whole(browser: Chrome, folder: Path) -> None:
    look(browser, folder / "origin.html", PHONE)
    text = asked(
        browser,
        "const p = document.querySelector('.finding pre'); getSelection().selectAllChildren(p); return getSelection().toString()",
    )
    assert text.strip() == origin().findings[0].reproducer


@pytest.mark.parametrize("name", ["origin", "not-finite"])
def test_pictures_alone_are_drawn_well(browser: Chrome, tmp_path: Path, name: str) -> None:
    report = SAMPLES[name]()
    assert report.trial is not None
    for number, picture in enumerate((plots.growth_svg(report.growth[0]), plots.training_picture_svg(report.trial))):
        path = tmp_path / f"{number}.svg"
        path.write_text(picture, "utf-8")
        page = tmp_path / f"{number}.html"
        page.write_text(f"<!doctype html><title>picture</title>{picture}", "utf-8")
        look(browser, page, DESK)
        assert asked(browser, _DRAWN_BADLY) == []
        assert asked(browser, "return document.querySelectorAll('text').length") > 5
