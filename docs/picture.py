"""The picture of the README: `make picture` draws it from report.html."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]


def main() -> None:
    page_file, picture = Path(sys.argv[1]).resolve(), sys.argv[2]
    chromium = os.environ.get("HEADWISE_CHROMIUM", "/usr/bin/chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=QUIET)
        page = browser.new_page(viewport={"width": 1240, "height": 1180}, color_scheme="light")
        page.goto(page_file.as_uri())
        # Thumbnails are drawn when they come into view.
        page.mouse.wheel(0, 500)
        page.wait_for_timeout(700)
        page.evaluate("scrollTo({top: 0, behavior: 'instant'})")
        page.wait_for_timeout(700)
        page.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    main()
