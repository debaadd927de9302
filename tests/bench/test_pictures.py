"""The moving pictures of the documentation: whole, small and quiet, and true to what a command put out."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.pictures import __main__ as pictures
from bench.pictures.film import COLUMNS, HEIGHT, TOP, frames, picture
from bench.pictures.pace import WAIT_S, shortened
from bench.pictures.reel import REST_S, Reel
from bench.pictures.terminal import Output, Turn, record, typed

SVG = "{http://www.w3.org/2000/svg}"
DOCS = Path(__file__).parents[2] / "docs"
TALK = r"""
import sys, time
print("\x1b[32mdrafted\x1b[0m \x1b[1;33mcorrected\x1b[0m \x1b[2mdim\x1b[0m \x1b[7mback\x1b[0m <&>")
print("one\ntwo\x1b[1A\rONE\x1b[1B")
print("河 wide, é, \x1b[36m河\x1b[0m")
print("gone", end="\r\x1b[K", flush=True)
while (line := input("> ")) != "end":
    print("you said", line)
"""


def faults(svg: str) -> list[str]:
    """What a picture must not have in a page, or has too little of."""
    found, tree = list[str](), ElementTree.fromstring(svg)
    if len(svg) > pictures.MOST_BYTES:
        found.append("is too large")
    named = {child.get("id"): child.text or "" for child in tree if child.tag in (f"{SVG}title", f"{SVG}desc")}
    if [*named] != (tree.get("aria-labelledby") or "").split() or not all(named.values()):
        found.append("has no name for screen readers")
    for one in tree.iter():
        if one.tag in (f"{SVG}script", f"{SVG}foreignObject", f"{SVG}animate", f"{SVG}set", f"{SVG}a"):
            found.append(f"has {one.tag}")
        for name, value in one.attrib.items():
            if name.startswith("on") or (name.endswith("href") and not re.match(r"#|data:image/webp;base64,", value)):
                found.append(f"has {name}={value[:40]}")
    style = "".join(one.text or "" for one in tree.iter(f"{SVG}style"))
    if re.search(r"url\(|@import|@font-face", style):
        found.append("loads a style or a font")
    if "@keyframes" in style and "prefers-reduced-motion:reduce" not in style:
        found.append("moves for everyone")
    if "prefers-color-scheme:dark" not in style:
        found.append("has no dark colours")
    said = "\n".join(one.text or "" for one in tree.iter() if one.tag != f"{SVG}style")
    places = re.findall(r"(?<![\w.])/(?:home|root|work|tmp|usr)/\S*", said)
    hosts = [host for host in re.findall(r"https?://([^\s/:]*)", said) if not "127.0.0.1".startswith(host)]  # as typed
    found += [f"names {one}" for one in [*places, *hosts]]
    return found


def seen_at(svg: str, second: float) -> list[tuple[str, str]]:
    """The texts in the window at a second of the loop, by line, and their classes, as a browser steps through them."""
    tree, width = ElementTree.fromstring(svg), int(re.search(r'width="(\d+)"', svg)[1])
    found = list[tuple[int, float, str, str]]()
    for group in tree.findall(f"{SVG}g/{SVG}g"):
        moved = 0
        if style := group.get("style"):
            name, whole = re.match(r"animation:(\w+) ([\d.]+)s step-end infinite", style).groups()
            steps = re.search(rf"@keyframes {name}\{{(.*?\}})\}}", svg)[1]
            for share, at in re.findall(r"([\d.]+)%\{transform:translateX\((-?\d+)px\)\}", steps):
                moved = int(at) if float(share) / 100 * float(whole) <= second + 0.002 else moved
        for state in [group, *group.findall(f"{SVG}g")]:
            place = int(re.search(r"-?\d+|$", state.get("transform", ""))[0] or 0) + moved
            for text in state.findall(f"{SVG}text") if place == 0 else []:
                found.append((int(text.get("y")), float(text.get("x")), text.text, text.get("class")))
            assert place % width == 0
    return [(text, style) for y, _, text, style in sorted(found) if y >= 0]


@pytest.fixture(scope="module")
def talk() -> list[Output]:
    """A recording of a small program that is talked to."""
    turns = [Turn("> ", "hello\r"), Turn("> ", "河\r")]
    return record([sys.executable, "-c", TALK], "python talk.py", turns)


def test_a_recording_is_what_the_command_put_out(talk):
    said = b"".join(one.data for one in talk)
    assert said.startswith(b"$ python talk.py\r\n\x1b[32mdrafted")
    *_, last = frames(talk)
    assert last.text[:9] == [
        "$ python talk.py", "drafted corrected dim back <&>", "ONE", "two", "河 wide, é, 河", "> hello",
        "you said hello", "> 河", "you said 河",
    ]  # fmt: skip
    assert [one.at for one in talk] == sorted(one.at for one in talk)
    cells = last.lines[1]
    assert (cells[0].fg, cells[8].fg, cells[8].bold, cells[18].fg, cells[22].reverse) == (
        "green", "brown", True, "brightblack", True,
    )  # fmt: skip


def test_the_picture_shows_each_frame(talk):
    svg = picture(talk, "a talk", "About it.")
    assert faults(svg) == []
    shown = list(frames(talk))
    seen, _ = shortened([one.at for one in shown], [False] * len(shown))
    for second, at in seen.items():
        told = "".join(text for text, _ in seen_at(svg, second))
        assert re.sub(r"\s", "", told) == re.sub(r"\s", "", "".join(shown[at].text)), second
    last = dict(seen_at(svg, max(seen) + REST_S - 0.1))
    assert (last["drafted"], last["corrected"], last["dim"], last["back"]) == (
        "green", "brown bold", "brightblack", "paper",
    )  # fmt: skip
    still = re.sub(r' style="animation[^"]*"', "", svg)  # where motion is not wanted
    assert seen_at(still, 0) == seen_at(svg, max(seen) + REST_S - 0.1)


def test_a_wide_letter_takes_two_cells():
    svg = picture([Output(0.0, "河河x".encode())], "wide", "About it.")
    assert f'textLength="{5 * 8.4:.5g}"' in svg
    assert f'y="{TOP}"' in svg
    assert f'height="{TOP + HEIGHT + 37}"' in svg


@pytest.mark.parametrize(("status", "raises"), [(3, False), (0, True)])
def test_another_exit_status_is_an_error(status, raises):
    command = [sys.executable, "-c", "print('as it is'); raise SystemExit(3)"]
    if not raises:
        assert b"".join(one.data for one in record(command, "x", statuses=[status])[2:]) == b"\r\nas it is\r\n"
        return
    with pytest.raises(subprocess.CalledProcessError, match="exit status 3"):
        record(command, "x", statuses=[status])


def test_a_command_that_does_not_end_is_stopped(monkeypatch):
    monkeypatch.setattr("bench.pictures.terminal.LIMIT_S", 0.5)
    with pytest.raises(TimeoutError):
        record([sys.executable, "-c", "input()"], "x")


def test_waits_are_shortened_and_nothing_else():
    times = [0.0, 0.5, 1.0, 1.4, 9.0, 9.4, 9.8, 10.0, 13.0, 13.4]
    busy = [False, False, True, True, False, False, False, False, False, False]
    seen, (spinner, silence) = shortened(times, busy)
    shown = {at: second for second, at in seen.items()}
    assert (spinner.since, spinner.until, spinner.times) == (1.0, 1.0 + WAIT_S, pytest.approx(8.0 / WAIT_S))
    assert spinner.label == "waiting, 5 times as fast"
    assert silence.times == pytest.approx(3.0 / WAIT_S)
    assert shown[6] - shown[4] == pytest.approx(0.8, abs=0.05), "what came is shown as it came"
    assert shown[8] - shown[7] == pytest.approx(WAIT_S, abs=0.1)
    assert shortened([0.0, 0.9, 1.8], [False] * 3)[1] == []


def test_a_line_that_is_typed_has_a_cursor():
    shown = list(frames(typed("ab")))
    assert [one.text[0] for one in shown] == ["$", "$ a", "$ ab", "$ ab"]
    assert [sum(cell.reverse for cell in one.lines[0]) for one in shown] == [1, 1, 1, 0]
    assert len(shown[0].lines[0]) == COLUMNS


BAD = {
    "script": ("</svg>", "<script>1</script></svg>"),
    "handler": ("<defs>", '<defs onload="1">'),
    "reference": ("<defs>", '<defs><image href="https://example.org/x.png"/>'),
    "font": ("<style>", "<style>@font-face{src:local(x)}"),
    "motion": ("prefers-reduced-motion", "prefers-motion"),
    "name": ('id="title"', 'id="other"'),
    "path": ("About it", "About /home/me"),
    "host": ("About it", "About http://example.org"),
}


@pytest.mark.parametrize("mutant", BAD.values(), ids=BAD)
def test_a_faulty_picture_is_noticed(mutant):
    reel = Reel(100, 50, "a title", "About it.", 2.0)
    reel.show([(0.0, ""), (1.0, reel.use('<rect width="9" height="9"/>', 'x="3" y="3"'))])
    assert faults(reel.svg()) == []
    assert mutant[0] in reel.svg()
    assert faults(reel.svg().replace(*mutant))


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_of_the_documentation_is_whole(name):
    svg = (DOCS / "assets" / f"{name}.svg").read_text(encoding="utf-8")
    assert faults(svg) == []
    assert pictures.PICTURES[name].shows[1:] in (ElementTree.fromstring(svg).findtext(f"{SVG}desc") or "")
    assert f"assets/{name}.svg" in (DOCS / "index.md").read_text()


def test_the_list_and_what_is_missing(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        pictures.main(["--help"])
    told = capsys.readouterr().out
    assert all(f"{name} " in told and one.shows in told for name, one in pictures.PICTURES.items())
    with pytest.raises(SystemExit):
        pictures.main(["chta"])

    def lacks(*_):
        raise pictures.Missing("a browser")

    made = {"one": ("what it shows", lacks), "two": ("more", lambda _, about: f"<svg>{about}</svg>")}
    monkeypatch.setattr(pictures, "PICTURES", {name: pictures.Picture(*one) for name, one in made.items()})
    assert pictures.main(["--out", str(tmp_path), "--machine", "one test"]) == 1
    told = capsys.readouterr().out
    assert "one: not made. It needs a browser" in told
    assert [file.name for file in tmp_path.iterdir()] == ["two.svg"]
    assert "Recorded on one test" in (tmp_path / "two.svg").read_text()
