#!/usr/bin/env python3
"""Take the picture of a report that README.md shows: screenshot.py PLAN.html PICTURE.png.

Without playwright or Chromium it says so, and the old picture stays.
"""

import shutil
import sys
from pathlib import Path

WIDTH, HEIGHT = 1240, 900


def main(report: Path, picture: Path) -> None:
    """Open a report and save what the first screen shows."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        path = None
    if path is None:
        print(f"{picture} stays as it is: no Chromium here, or no playwright.", file=sys.stderr)
        return
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto(report.resolve().as_uri())
        page.wait_for_selector("html[data-ready=yes]", state="attached")
        page.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
