"""The chat page of `paceline serve`, driven in Chromium, as a picture of tiles that change."""

import io
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeAlias

from PIL import Image

from .pace import shortened
from .reel import Reel

WIDTH, HEIGHT, TILE = 680, 480, (340, 40)
SCALE = 1.5  # pixels of a picture for one of the page
COLOURS = 32  # of a tile
LOOK_S = 1.4  # before something is clicked
Shots: TypeAlias = list[tuple[float, Image.Image]]


def watched(url: str, chromium: str, theme: Literal["light", "dark"]) -> Shots:
    """What the page shows from second to second, while an example is asked, and compared with plain decoding."""
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

    with sync_playwright() as play:
        sharp = ["--no-sandbox", f"--force-device-scale-factor={SCALE}"]
        browser = play.chromium.launch(executable_path=chromium, args=sharp)
        page = browser.new_page(
            viewport={"width": WIDTH, "height": HEIGHT}, device_scale_factor=SCALE, color_scheme=theme,
            reduced_motion="reduce",  # a dot that pulses takes a picture for each shade
        )  # fmt: skip
        session, shots = page.context.new_cdp_session(page), list[tuple[float, bytes]]()

        def keep(event: dict[str, Any]) -> None:
            shots.append((event["metadata"]["timestamp"], b64decode(event["data"])))
            session.send("Page.screencastFrameAck", {"sessionId": event["sessionId"]})

        page.goto(url)
        page.locator("#model-name:not(:empty), #model option").first.wait_for(state="attached")
        page.locator("#text").evaluate("one => one.blur()")  # a cursor that blinks tells nothing
        session.on("Page.screencastFrame", keep)
        most = {"maxWidth": int(SCALE * WIDTH), "maxHeight": int(SCALE * HEIGHT)}
        session.send("Page.startScreencast", {"format": "png", **most})
        page.wait_for_timeout(1000 * LOOK_S)
        page.get_by_role("button", name="Correct a text").click()
        page.locator("article.assistant .text").last.wait_for()
        page.locator("#send[aria-label=Send]").wait_for()
        page.wait_for_timeout(1000 * LOOK_S)
        page.get_by_role("button", name="Compare").click()
        page.get_by_text("plain decoding, ").wait_for()
        page.mouse.move(0, 0)
        page.wait_for_timeout(500)
        session.send("Page.stopScreencast")
        page.wait_for_timeout(200)
        browser.close()
    return [(at - shots[0][0], Image.open(io.BytesIO(data)).convert("RGB")) for at, data in shots]


def picture(shots: dict[str, Shots], title: str, about: str, step_s: float) -> str:
    """A recording in each theme as SVG, in which no two changes are nearer than step_s."""
    paced = {
        theme: shortened([at for at, _ in all_shots], [False] * len(all_shots), step_s)
        for theme, all_shots in shots.items()
    }
    reel = Reel(WIDTH, HEIGHT, title, about, max(max(seen) for seen, _ in paced.values()))
    for theme, (seen, lapses) in paced.items():
        for lapse in lapses:
            reel.say(lapse.label, lapse.since, lapse.until, theme)
        for x in range(0, WIDTH, TILE[0]):
            for y in range(0, HEIGHT, TILE[1]):
                reel.show(list(_changes(reel, ((now, shots[theme][at][1]) for now, at in seen.items()), x, y)), theme)
    return reel.svg()


def _changes(reel: Reel, shown: Iterable[tuple[float, Image.Image]], x: int, y: int) -> Iterator[tuple[float, str]]:
    """What a tile shows, where it changes."""
    before = None
    for now, image in shown:
        tile = image.crop([int(SCALE * at) for at in (x, y, x + TILE[0], y + TILE[1])])
        if (pixels := tile.tobytes()) != before:
            yield now, reel.use(_image(tile), f'x="{x}" y="{y}"')
        before = pixels


def _image(tile: Image.Image) -> str:
    data = io.BytesIO()
    tile.quantize(COLOURS).convert("RGB").save(data, "webp", lossless=True, quality=80, method=4)
    size = f'width="{TILE[0]}" height="{TILE[1]}"'
    return f'<image {size} href="data:image/webp;base64,{b64encode(data.getvalue()).decode()}"/>'
