"""Images are opened from everywhere, upright and in RGB; what is no usable image is refused with a clear error."""

import base64
import io
import os
import struct
import zlib
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageSequence

from paceline.errors import ConfigError
from paceline.hf.images import ImageLimits, open_image
from tests.system.web import serving
from tests.vision.families import make_image


def saved(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def same(one: Image.Image, other: Image.Image) -> bool:
    return one.mode == other.mode == "RGB" and np.array_equal(np.asarray(one), np.asarray(other))


def bomb(side: int) -> bytes:
    """A small file that says it is a large image."""
    head = b"IHDR" + struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    chunk = struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))
    return PNG[:8] + chunk + PNG[33:]


HERE = ImageLimits(allow_private=True)  # the tests' server is on this machine
WANTED = make_image(1, 40, 24)
PNG = saved(WANTED)


def test_every_source_gives_the_same_image(tmp_path):
    path = tmp_path / "a picture.png"
    path.write_bytes(PNG)
    inline = base64.b64encode(PNG).decode()
    percent = "".join(f"%{byte:02X}" for byte in PNG)
    sources = [path, str(path), PNG, bytearray(PNG), memoryview(PNG), WANTED]
    sources += [
        f"data:image/png;base64,{inline}",
        f"DATA:;base64,{inline[:40]}\n {inline[40:]}",
        f"data:image/png,{percent}",
    ]
    for source in sources:
        assert same(open_image(source), WANTED)
    assert open_image(WANTED) is not WANTED


def test_home_folder_is_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.png").write_bytes(PNG)
    assert same(open_image("~/a.png"), WANTED)


def test_urls_and_redirects():
    with serving({"/a.png": PNG, "/moved": (302, "/a.png")}) as base:
        assert same(open_image(base + "/a.png", HERE), WANTED)
        assert same(open_image(base + "/moved", HERE), WANTED)


def test_a_redirect_never_leaves_the_web(tmp_path):
    (tmp_path / "secret.png").write_bytes(PNG)
    for target in (f"file://{tmp_path}/secret.png", "ftp://127.0.0.1/a.png", "data:image/png;base64,AAAA"):
        with (
            serving({"/to": (302, target)}) as base,
            pytest.raises(ConfigError, match=r"points elsewhere|is not allowed"),
        ):
            open_image(base + "/to", HERE)


def test_what_a_server_can_do_wrong():
    page = b"<!DOCTYPE html><html></html>"
    with serving({"/page": page, "/short": (200, PNG, len(PNG) + 9), "/loop": (302, "/loop")}) as base:
        for path, words in {"/none": "status 404", "/page": "a web page", "/loop": "returned no file"}.items():
            with pytest.raises(ConfigError, match=words):
                open_image(base + path, HERE)
        with pytest.raises(ConfigError, match="cannot be fetched"):
            open_image(base + "/short", HERE)
        with pytest.raises(ConfigError, match="too large"):
            open_image(base + "/short", replace(HERE, max_bytes=50))
    with pytest.raises(ConfigError, match="cannot be fetched"):
        open_image(base + "/gone", HERE)  # nobody listens there any more
    for url in ("http://", "http://127.0.0.1:notaport/a", "https://[broken"):
        with pytest.raises(ConfigError):
            open_image(url, HERE)


def test_a_server_that_never_ends_is_left_in_time_and_at_the_limit():
    with serving({"/drip": "drip", "/flood": "flood"}) as base:
        with pytest.raises(ConfigError, match="not complete after"):
            open_image(base + "/drip", replace(HERE, timeout_s=0.5))
        with pytest.raises(ConfigError, match="too large"):
            open_image(base + "/flood", replace(HERE, max_bytes=100_000))


def test_orientation_is_applied():
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright: turn clockwise
    turned = open_image(saved(WANTED, "PNG", exif=exif))
    assert same(turned, WANTED.transpose(Image.Transpose.ROTATE_270))
    assert turned.size == (24, 40)


@pytest.mark.parametrize("mode", ["L", "P", "1", "CMYK", "LA", "RGBA", "I;16"])
def test_modes_give_what_the_eye_sees(mode):
    grey = WANTED.convert("L")
    if mode == "I;16":
        wide = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
        assert wide.mode == "I;16"
        assert same(open_image(saved(wide)), grey.convert("RGB"))
    elif mode == "CMYK":
        got = np.asarray(open_image(saved(WANTED.convert("CMYK"), "TIFF"))).astype(int)
        assert np.abs(got - np.asarray(WANTED).astype(int)).max() <= 2
    elif mode == "P":
        assert same(open_image(saved(WANTED.quantize(64))), WANTED)
    else:
        made = WANTED.convert(mode)
        assert same(open_image(saved(made)), made.convert("RGB"))


def test_the_transparent_is_white():
    layer = WANTED.convert("RGBA")
    layer.putalpha(Image.new("L", layer.size, 0))
    assert same(open_image(saved(layer)), Image.new("RGB", layer.size, "white"))
    half = Image.new("RGBA", (8, 8), (0, 0, 0, 128))
    assert open_image(half).getpixel((0, 0)) == (127, 127, 127)
    few = WANTED.quantize(32)
    seen = open_image(saved(few, transparency=few.getpixel((0, 0))))
    assert seen.getpixel((0, 0)) == (255, 255, 255) != WANTED.getpixel((0, 0))
    assert seen.getpixel((39, 23)) == WANTED.getpixel((39, 23))


def test_other_numbers_than_16_bits_are_refused():
    with pytest.raises(ConfigError, match="32 bits"):
        open_image(Image.new("I", (8, 8), 70_000))
    with pytest.raises(ConfigError, match="floating-point"):
        open_image(saved(Image.new("F", (8, 8), 0.5), "TIFF"))


def test_an_animation_is_refused():
    frames = [make_image(i, 16, 16) for i in range(3)]
    for kind in ("GIF", "WEBP", "PNG", "TIFF"):
        data = saved(frames[0], kind, save_all=True, append_images=frames[1:])
        assert len(list(ImageSequence.Iterator(Image.open(io.BytesIO(data))))) == 3
        with pytest.raises(ConfigError, match="3 images"):
            open_image(data)
    assert same(open_image(saved(frames[0], "GIF")), frames[0])
    twice = saved(frames[0], "MPO", save_all=True, append_images=frames[1:2])  # what some cameras write
    assert open_image(twice).size == (16, 16)


def test_broken_files_are_named_so():
    jpeg = saved(make_image(1, 64, 64), "JPEG")
    broken = [PNG[: len(PNG) // 2], PNG[:40], jpeg[: len(jpeg) * 2 // 3], PNG[:50] + b"\0" * 40 + PNG[90:]]
    for data in broken:
        with pytest.raises(ConfigError, match=r"is broken|is no image"):
            open_image(data)
    for data in (b"", b"not a picture", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"\x89PNG\r\n\x1a\n"):
        with pytest.raises(ConfigError, match=r"is no image|is broken"):
            open_image(data)


def test_broken_and_closed_pictures_of_the_caller():
    png, jpeg = saved(make_image(1, 64, 64), "PNG"), saved(make_image(1, 64, 64), "JPEG")
    closed = Image.open(io.BytesIO(PNG))
    closed.close()
    for image in (Image.open(io.BytesIO(jpeg[:-40])), Image.open(io.BytesIO(png[: len(png) // 2])), closed):
        with pytest.raises(ConfigError, match="broken or closed"):
            open_image(image)


def test_no_byte_that_is_damaged_escapes_as_another_error():
    generator = np.random.default_rng(0)
    for data in (PNG, saved(WANTED, "JPEG"), saved(WANTED, "GIF"), saved(WANTED, "WEBP"), saved(WANTED, "TIFF")):
        for _ in range(60):
            damaged = np.frombuffer(data, np.uint8).copy()
            places = generator.integers(0, len(damaged), 4)
            damaged[places] = generator.integers(0, 256, 4)
            with suppress(ConfigError):  # anything else fails the test
                assert open_image(damaged.tobytes()).mode == "RGB"


def test_sizes_are_bounded_before_anything_is_decoded():
    for side in (9_000, 30_000):  # in the second Pillow itself sees a bomb
        with pytest.raises(ConfigError, match="too many pixels"):
            open_image(bomb(side))
    with pytest.raises(ConfigError, match="too many pixels"):
        open_image(WANTED, ImageLimits(max_pixels=40 * 24 - 1))
    assert same(open_image(WANTED, ImageLimits(max_pixels=40 * 24)), WANTED)
    for source in (PNG, "data:;base64," + base64.b64encode(PNG).decode()):
        with pytest.raises(ConfigError, match="too large"):
            open_image(source, ImageLimits(max_bytes=len(PNG) - 1))
    with pytest.raises(ConfigError, match="too small"):
        open_image(Image.new("RGB", (3, 100)))


def test_files_that_cannot_be_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "big.png").write_bytes(PNG)
    for source, words in {
        tmp_path / "none.png": "No such file",
        tmp_path: "a folder or a device",
        tmp_path / "pipe": "a folder or a device",
        "a\0b": "null",
        "iVBORw0KGgo" * 1000: "data:image/png;base64",
    }.items():
        with pytest.raises(ConfigError, match=words) as caught:
            open_image(source)
        assert len(str(caught.value)) < 500
    with pytest.raises(ConfigError, match="too large"):
        open_image(tmp_path / "big.png", ImageLimits(max_bytes=10))
    for source in (None, 7, [PNG], np.zeros((8, 8, 3), np.uint8)):
        with pytest.raises(ConfigError, match="this is no image"):
            open_image(source)  # type: ignore[arg-type]
    for source in ("data:image/png;base64,", "data:image/png", "data:image/png;base64,@@@@"):
        with pytest.raises(ConfigError, match="data URL"):
            open_image(source)
