"""Takes the pictures of the page that the documents show, in a headless Chromium, from a server that really answers.

    python docs/screenshots.py                                 docs/images/*.png
    python docs/screenshots.py --every --output build/pages    every panel at two widths, light and dark, to look at

It needs playwright and a Chromium (apt-get install chromium).
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

DOCS = Path(__file__).parent
PANELS = sorted(file.stem for file in (DOCS.parent / "server/headway_server/transports/http/page/panels").glob("*.js"))
Scheme: TypeAlias = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")
LOOKED_INTO = ("generate", "translate", "classify", "tag", "images")
"""Panels whose answers open the viewer of attention."""


class Shot(NamedTuple):
    """A picture: a panel at a width in a scheme."""

    panel: str
    width: int = 1180
    scheme: Scheme = "light"
    is_looked_into: bool = False
    """True to open the viewer of attention below the answer."""


SHOWN = {
    "page": Shot("translate"),
    "page-generate": Shot("generate"),
    "page-attention": Shot("images", is_looked_into=True),
    "page-segment": Shot("segment"),
    "page-draw": Shot("draw"),
    "page-narrow": Shot("translate", 360, "dark"),
}
"""Pictures of the documents."""


@contextmanager
def serving(store: Path) -> Iterator[str]:
    """Runs a server on free ports; gives the page's address."""
    command = [sys.executable, "-m", "headway_server", "--store", str(store), "--port", "0", "--http-port", "0"]
    with subprocess.Popen([*command, "--log-level", "warning"], stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        assert process.stdout is not None
        found = re.search(r"http=(\S+)", process.stdout.readline())
        if found is None:
            raise SystemExit("the server did not start")
        try:
            yield f"http://{found[1]}/"
        finally:
            process.send_signal(signal.SIGTERM)


def prepare(page: Page, panel: str) -> None:
    """Does on a panel what a visitor would, so that it shows something."""
    match panel:
        case "generate":
            page.get_by_text("All parameters").click()
            page.get_by_label("Seed").fill("7")
            page.get_by_label("Length limit").fill("110")
            page.get_by_text("All parameters").click()
        case "draw":
            page.get_by_label("Prompt", exact=True).select_option("Sneaker")
            page.get_by_label("Seed").fill("7")
        case "server":
            page.wait_for_timeout(4000)
    example = page.get_by_role("button", name="Show an example")
    if example.count():
        example.click()
        page.mouse.move(0, 0)
        page.wait_for_selector(".results .timings", state="attached")
        expect(page.locator("main form")).not_to_have_attribute("aria-busy", "true", timeout=20_000)
    if panel == "generate":
        page.locator(".token").nth(3).focus()


def take(browser: Browser, address: str, shot: Shot, file: Path) -> None:
    """Takes one picture."""
    panel, width = shot.panel, shot.width
    context = browser.new_context(
        viewport={"width": width, "height": 1000}, color_scheme=shot.scheme, reduced_motion="reduce"
    )
    page = context.new_page()
    page.goto(f"{address}#/{panel}")
    page.wait_for_selector("#panel-title")
    page.wait_for_load_state("networkidle") if panel != "server" else None
    prepare(page, panel)
    if shot.is_looked_into:
        page.get_by_role("button", name="Attention").first.click()
        page.wait_for_selector(".attention-view .multiples")
    panel_box = page.locator("article.panel").bounding_box()
    assert panel_box is not None, "the panel is open"
    height = panel_box["y"] + panel_box["height"] + 32
    picture = page.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": width, "height": height})
    Image.open(BytesIO(picture)).convert("RGB").save(file, optimize=True)
    context.close()
    sys.stdout.write(f"{file} {file.stat().st_size:,} bytes\n")


def main() -> None:
    """Takes the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", type=Path, default=DOCS.parent / "models")
    parser.add_argument("--output", type=Path, default=DOCS / "images")
    parser.add_argument("--every", action="store_true")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    shots = dict(SHOWN)
    if arguments.every:
        shots = {
            f"{panel}-{width}-{scheme}": Shot(panel, width, scheme, panel in LOOKED_INTO)
            for panel in PANELS
            for width in (360, 1180)
            for scheme in SCHEMES
        }
    with serving(arguments.store) as address, sync_playwright() as playwright:
        chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, shot in shots.items():
            take(browser, address, shot, arguments.output / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
