"""Opens pages in headless Chromium, and keeps what went wrong in them."""

import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium():
    """A browser; the test is skipped where there is none, or nothing that drives it."""
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with driver.sync_playwright() as playwright:
        # Root, as in a container, has no sandbox.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Opened:
    """A page that has drawn itself."""

    page: object
    asked: list = field(default_factory=list)
    """Addresses that it asked for, its own aside."""
    said: list = field(default_factory=list)
    """Messages on the console, and errors that nothing caught."""

    def ask(self, script):
        """What a script in the page gives back."""
        return self.page.evaluate(script)

    @property
    def tip(self):
        """The text beside the mouse; empty if there is none."""
        tip = self.page.locator("#tip")
        return tip.inner_text() if tip.is_visible() else ""

    def over(self, picture, x, y):
        """Move the mouse to a place in a picture: shares of its width and height."""
        box = self._box(picture)
        self.page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])

    def _box(self, picture):
        place = self.page.locator(picture)
        place.scroll_into_view_if_needed()
        return place.bounding_box()


@contextmanager
def opened(browser, path, width=1280, height=800, scheme="light", scripts=True):
    """A report in a window of its own, without network."""
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,
        offline=True,
        java_script_enabled=scripts,
    )
    found = Opened(context.new_page())
    address = path.as_uri()
    found.page.on("request", lambda r: found.asked.append(r.url) if r.url != address else None)
    found.page.on("console", lambda message: found.said.append(message.text))
    found.page.on("pageerror", lambda error: found.said.append(str(error)))
    found.page.goto(address)
    if scripts:
        found.page.wait_for_selector("html[data-ready=yes]", state="attached")
    yield found
    context.close()
