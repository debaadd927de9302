"""Does the chat page of `paceline serve` work in a browser? Asks, compares, edits, stops and reloads in Chromium.

    paceline serve smollm2-135m --drafter lookup+self-int4 &
    python -m tests.live.page --base-url http://127.0.0.1:8000 --screenshot page.png [--result answers.html]

Needs `pip install playwright` and an installed Chromium. --image: the model sees, and gets an image. Prints what was
checked, also on the screen of a phone; exit code 1 where a check failed or the page reported an error.
"""

import argparse
import json
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
PHONE = {"width": 375, "height": 760}
PINNED = """() => {
  const all = [...document.querySelectorAll("*")];
  const isPinned = (one, style) => one.matches("header, #dock") || ["sticky", "fixed"].includes(style.position);
  const isShown = (one) => getComputedStyle(one).visibility === "visible" && isPinned(one, getComputedStyle(one));
  const heights = all.filter(isShown).map((one) => one.getBoundingClientRect())
    .map((box) => Math.max(0, Math.min(innerHeight, box.bottom) - Math.max(0, box.top)));
  return heights.reduce((sum, one) => sum + one, 0) / innerHeight;
}"""
"""The share of the screen whose contents do not scroll."""
HOSTILE = """# <img src=x onerror="window.ran=1">
<script>window.ran=1</script><svg onload="window.ran=1"><style>*{display:none}</style></div></article>
[a](javascript:window.ran=1) ![b](javascript:window.ran=1) <javascript:window.ran=1> [c](data:text/html,1)
[https://good.example](https://evil.example/x) &lt;script&gt;window.ran=1&lt;/script&gt; ![d](https://evil.example/y.png)

| <iframe src=//evil.example> | b |
|---|---|
| 1 | 2 |

```html"><script>
<script>window.ran=1</script> and a line that is much longer than the screen of a phone, and scrolls inside its block
```
"""
INSIDE = """() => {
  const answer = document.querySelector("article.assistant .rendered"), all = [...answer.querySelectorAll("*")];
  return {
    tags: [...new Set(all.map((one) => one.localName))],
    handlers: all.flatMap((one) => [...one.attributes]).filter((one) => /^on|^style$|^src/.test(one.name)).length,
    links: [...answer.querySelectorAll("a")].map((one) => [one.protocol, one.rel, one.textContent.includes(one.host)]),
    ran: window.ran,
  };
}"""


def ended(page: Page) -> None:
    """Wait until no answer is in progress."""
    expect(page.locator("#send")).to_have_attribute("aria-label", "Send", timeout=60_000 * MINUTES)


def say(page: Page, text: str) -> None:
    """Type a message, send it, and wait until the answer is there."""
    page.fill("#text", text)
    page.click("#send")
    expect(page.locator("article.user").last).to_contain_text(text[:20])
    ended(page)


def set_tokens(page: Page, count: int) -> None:
    """The limit of answers in the settings."""
    page.click("#open-settings")
    page.get_by_label("Max tokens").fill(str(count))
    page.keyboard.press("Escape")


def checks(page: Page, image: bool) -> dict[str, Any]:
    """What holds, by name; the screen shows an answer and its comparison at the end."""
    found: dict[str, Any] = {"the opening shows what the colours mean": page.locator(".meanings dt").count() == 4}
    if image:
        picture = b64decode(red_square(64).partition(",")[2])
        page.set_input_files("#image", files=[{"name": "red.png", "mimeType": "image/png", "buffer": picture}])
        expect(page.locator("#pictures img")).to_have_count(1)
    page.click("#open-settings")
    papers = set[str]()
    for theme in ("Light", "Dark", "System"):
        page.get_by_role("radio", name=theme).check()
        papers.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    page.keyboard.press("Escape")
    found["the appearance can be chosen"] = len(papers) == 2
    set_tokens(page, 80)
    asked = "Repeat this twice: the quick brown fox jumps over the lazy dog and runs into the deep green forest."
    page.fill("#text", asked)
    page.press("#text", "Enter")
    expect(page.locator("article.user")).to_have_count(1)
    ended(page)
    answer = page.locator("article.assistant").first
    page.get_by_role("radio", name="Tokens").check()
    origins = {one.get_attribute("class") for one in answer.locator(".tokens span").all()}
    page.get_by_role("radio", name="Colours").check()
    painted = {one.get_attribute("class") for one in answer.locator(".rendered span").all()}
    said = answer.locator(".rendered").inner_text()
    found |= {
        "the answer has text": len(said) > 20,
        "tokens are coloured by origin": bool(origins & {"drafted", "recovered"}) and origins <= ORIGINS,
        "so is the formatted answer": bool(painted) and painted <= origins,
        "speed is shown": "tokens/s" in answer.locator(".facts").inner_text(),
        "acceptance by position is shown": answer.locator(".positions i").count() > 0,
        "the image is shown": page.locator("article.user img").count() == int(image),
    }
    answer.get_by_role("button", name="Compare").click()
    answer.get_by_text("plain decoding, ").wait_for(timeout=60_000 * MINUTES)
    found["plain decoding gives the same text"] = "the same text" in answer.locator(".compared").inner_text()
    answer.get_by_label("Answer again").click()
    ended(page)
    found["an answer can be asked for again, and the first one is kept"] = page.get_by_text("2 / 2").count() == 1
    found["at temperature 0 it is the same"] = page.locator("article.assistant .rendered").inner_text() == said
    page.reload()
    expect(page.locator("article.assistant .rendered")).to_have_text(said)
    found["a conversation survives a reload"] = page.locator("article.user .said").inner_text() == asked
    page.locator("article.user").hover()
    page.get_by_label("Edit and send again").click()
    page.get_by_label("Your message").fill("Name three rivers.")
    page.keyboard.press("Enter")
    expect(page.locator("article.user .said")).to_have_text("Name three rivers.")
    ended(page)
    page.get_by_label("Earlier version").first.click()
    found["a message can be edited, and the first one is kept"] = page.locator(".said").inner_text() == asked
    set_tokens(page, 1000)
    page.fill("#text", "Write a long story about a river.")
    page.press("#text", "Enter")
    expect(page.locator("article.assistant").nth(1).locator(".text").last).to_have_text(re.compile(r"\w"))
    page.keyboard.press("Escape")
    ended(page)
    found["an answer can be stopped"] = page.locator("article.assistant").nth(1).locator(".problem p").count() == 0
    return found


def history_checks(page: Page) -> dict[str, bool]:
    """What holds of the list of conversations, of which there is one."""
    page.click("#again")
    found = {"a new chat is empty": page.locator("article").count() == 0}
    rows = page.locator("#conversations li")
    rows.first.hover()
    rows.first.get_by_label("More about").click()
    page.get_by_role("button", name="Rename").click()
    page.get_by_label("Title").fill("Foxes & <b>dogs</b>")
    page.keyboard.press("Enter")
    page.reload()
    expect(rows).to_have_count(1)
    found["a conversation can be renamed"] = rows.first.inner_text() == "Foxes & <b>dogs</b>"
    rows.first.hover()
    rows.first.get_by_label("More about").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export as Markdown").click()
    text = download.value.path().read_text(encoding="utf-8")
    found["a conversation can be exported"] = "## You" in text and "## Answer" in text
    full = "IDBObjectStore.prototype.put = () => { throw new DOMException('', 'QuotaExceededError'); };"
    page.evaluate(f"() => {{ {full} }}")
    page.click("#again")
    page.fill("#text", "Say hello.")
    page.click("#send")
    expect(page.locator("#notice")).to_contain_text("storage is full")
    ended(page)
    page.click("#delete-all")
    page.click("#yes")
    expect(rows).to_have_count(0)
    page.reload()
    expect(page.locator("#none-yet")).to_be_visible()
    found["all can be deleted"] = rows.count() == 0
    return found


def told(text: str) -> str:
    """The stream of an answer with thoughts and a call in two pieces, whose tokens are three letters each."""
    pieces = [text[at : at + 3] for at in range(0, len(text), 3)]
    chunks = [
        {"delta": {"content": one}, "provenance": [{"text": one, "origin": "drafted", "source": "x"}]} for one in pieces
    ]
    thought = {"delta": {"reasoning_content": "<b>thought</b>"}}
    parts = [{"name": "weather", "arguments": '{"city":'}, {"arguments": '"<i>Oslo</i>"}'}]
    calls = [{"delta": {"tool_calls": [{"index": 0, "function": part}]}} for part in parts]
    lines = [
        json.dumps({"choices": [chunk]}) for chunk in [thought, *chunks, *calls, {"delta": {}, "finish_reason": "stop"}]
    ]
    return "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])


def hostile_checks(page: Page) -> dict[str, bool]:
    """What holds where the model, or the server, says what it should not. Leaves a conversation with a long line."""
    place = "**/v1/chat/completions"
    refusal = {"error": {"message": "The queue is full. <b>Wait.</b>"}}
    page.route(place, lambda route: route.fulfill(status=429, json=refusal))
    say(page, "Say what you must not.")
    note = page.locator(".problem")
    found = {"a refusal is readable": "The queue is full. <b>Wait.</b>" in note.inner_text()}
    page.unroute(place)
    page.route(place, lambda route: route.fulfill(content_type="text/event-stream", body=told(HOSTILE)))
    note.get_by_role("button").click()
    expect(page.locator("article.assistant .text .code")).to_be_visible()
    ended(page)
    page.unroute(place)
    seen = page.evaluate(INSIDE)
    ours = {"h1", "p", "a", "small", "span", "div", "table", "thead", "tbody", "tr", "th", "td", "pre", "code"}
    icons = {"button", "svg", "rect", "path"}  # of the button that copies code
    found |= {
        "hostile Markdown runs nothing": seen["ran"] is None,
        "it makes no elements but those of Markdown": set(seen["tags"]) <= ours | icons,
        "it sets no handlers, styles or sources": seen["handlers"] == 0,
        "links open addresses of the web, and name them": len(seen["links"]) == 2
        and all(link == ["https:", "noopener noreferrer", True] for link in seen["links"]),
        "thoughts are folded": page.locator(".reasoning .text").is_hidden()
        and page.locator(".reasoning .text").text_content() == "<b>thought</b>",
        "calls are shown": '"city": "<i>Oslo</i>"' in page.locator(".calls").inner_text(),
        "a refused request can be sent again": page.locator(".problem p").count() == 0,
    }
    return found


def phone_checks(browser: Any, urls: list[str]) -> dict[str, bool]:
    """What holds on a small screen, by name."""
    found = dict[str, bool]()
    for url in urls:
        page = browser.new_page(viewport=PHONE, is_mobile=True, has_touch=True)
        page.goto(url)
        fits = [page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]]
        if page.locator("#ask").count():
            hostile_checks(page)
            fits.append(page.locator("#chat").evaluate("one => one.scrollWidth") <= PHONE["width"])
        found[f"on a phone less than a third of {url} is pinned"] = page.evaluate(PINNED) < 1 / 3
        found[f"on a phone {url} fits the width"] = all(fits)
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
        expect(page.locator("#model-name, #model option").first).not_to_be_empty()
        found = checks(page, options.image)
        if options.screenshot:
            page.screenshot(path=options.screenshot)
        found |= history_checks(page)
        found |= hostile_checks(page)
        errors = [error for error in errors if "429" not in error]  # which was asked for
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
