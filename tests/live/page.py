"""Does the chat page of `paceline serve` work in a browser? Asks, compares, stops, and begins again in Chromium.

    paceline serve smollm2-135m --drafter lookup+self-int4 &
    python -m tests.live.page --base-url http://127.0.0.1:8000 --screenshot page.png [--result answers.html]

Needs `pip install playwright` and an installed Chromium. --image: the model sees, and gets an image. Prints what was
checked, also on the screen of a phone; exit code 1 where a check failed or the page reported an error.
"""

import argparse
import re
import shutil
import sys
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect, sync_playwright  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

from tests.live.nonsense import red_square

MINUTES = 3.0
ORIGINS = {"drafted", "recovered", "bonus", "plain"}
PHONE = {"width": 390, "height": 844}
PINNED = """() => {
  const all = [...document.querySelectorAll("*")];
  const pinned = all.filter((one) => ["sticky", "fixed"].includes(getComputedStyle(one).position));
  const heights = pinned.map((one) => one.getBoundingClientRect())
    .map((box) => Math.max(0, Math.min(innerHeight, box.bottom) - Math.max(0, box.top)));
  return heights.reduce((sum, one) => sum + one, 0) / innerHeight;
}"""
"""The share of the screen whose contents do not scroll."""


def say(page: Page, text: str) -> None:
    """Type a message, send it, and wait until the answer is there."""
    page.fill("#text", text)
    page.press("#text", "Enter")
    expect(page.locator("#send")).to_have_text("Stop")
    expect(page.locator("#send")).to_have_text("Send", timeout=60_000 * MINUTES)


def checks(page: Page, image: bool) -> dict[str, Any]:
    """What holds, by name; the screen shows an answer and its comparison at the end."""
    if image:
        picture = b64decode(red_square(64).partition(",")[2])
        page.set_input_files("#image", files=[{"name": "red.png", "mimeType": "image/png", "buffer": picture}])
    page.fill("#tokens", "80")
    say(page, "Repeat this twice: the quick brown fox jumps over the lazy dog and runs into the deep green forest.")
    answer = page.locator("article.assistant").first
    origins = {one.get_attribute("class") for one in answer.locator(".text span").all()}
    found: dict[str, Any] = {
        "the answer has text": len(answer.locator(".text").inner_text()) > 20,
        "tokens are coloured by origin": bool(origins & {"drafted", "recovered"}) and origins <= ORIGINS,
        "speed is shown": "tokens/s" in answer.locator(".facts").inner_text(),
        "acceptance by position is shown": answer.locator(".positions i").count() > 0,
        "the image is shown": page.locator("article.user img").count() == int(image),
    }
    answer.get_by_role("button").click()
    answer.get_by_text("times as fast with drafts").wait_for(timeout=60_000 * MINUTES)
    found["plain decoding gives the same text"] = "the same text" in answer.locator(".facts").inner_text()
    page.fill("#tokens", "1000")
    page.fill("#text", "Write a long story about a river.")
    page.press("#text", "Enter")
    expect(page.locator("article.assistant").nth(1).locator(".text")).to_have_text(re.compile(r"\w"))
    page.click("#send")
    expect(page.locator("#send")).to_have_text("Send")
    found["an answer can be stopped"] = page.locator("article.assistant").nth(1).locator(".error").count() == 0
    return found


def phone_checks(browser: Any, urls: list[str]) -> dict[str, bool]:
    """What holds on a small screen, by name."""
    found = dict[str, bool]()
    for url in urls:
        page = browser.new_page(viewport=PHONE, is_mobile=True, has_touch=True)
        page.goto(url)
        found[f"on a phone less than a third of {url} is pinned"] = page.evaluate(PINNED) < 1 / 3
        width = page.evaluate("document.documentElement.scrollWidth")
        found[f"on a phone {url} fits the width"] = width <= PHONE["width"]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks, print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("google-chrome"))
    parser.add_argument("--screenshot", help="a file for the picture of the page")
    parser.add_argument("--result", help="a page of `paceline show --html`, which is also looked at on a phone")
    parser.add_argument("--image", action="store_true", help="the model sees")
    options = parser.parse_args(arguments)
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 900, "height": 700})
        errors = list[str]()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
        page.goto(options.base_url)
        expect(page.locator("#model")).not_to_be_empty()
        found = checks(page, options.image)
        if options.screenshot:
            page.screenshot(path=options.screenshot)
        page.click("#again")
        found["a new chat is empty"] = page.locator("article").count() == 0
        others = [Path(options.result).absolute().as_uri()] if options.result else []
        found |= phone_checks(browser, [options.base_url, *others])
        browser.close()
    found["the page reports no error"] = not errors
    for name, holds in found.items():
        print(f"{'ok' if holds else 'FAILED':<8}{name}")
    print(*errors, sep="\n", end="\n" if errors else "")
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
