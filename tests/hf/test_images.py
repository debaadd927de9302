"""Images are opened from everywhere, upright and in RGB; what is no usable image is refused with a clear error."""

import base64
import io
import os
import struct
import threading
import zlib
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from PIL import GifImagePlugin, Image, ImageFile, ImageSequence

from paceline.errors import ConfigError, EngineStopped
from paceline.hf import images
from paceline.hf.images import ImageLimits, open_image, open_images
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
        with pytest.raises(ConfigError, match="several images"):
            open_image(data)
    assert same(open_image(saved(frames[0], "GIF")), frames[0])
    twice = saved(frames[0], "MPO", save_all=True, append_images=frames[1:2])  # what some cameras write
    assert open_image(twice).size == (16, 16)


def test_frames_are_not_counted(monkeypatch):
    """There may be a million in a small file."""
    frames = [make_image(i, 16, 16) for i in range(3)]
    monkeypatch.setattr(GifImagePlugin.GifImageFile, "n_frames", property(lambda self: pytest.fail("all are read")))
    with pytest.raises(ConfigError, match="several images"):
        open_image(saved(frames[0], "GIF", save_all=True, append_images=frames[1:]))


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


def test_a_chat_is_bounded_before_anything_is_decoded():
    """25 million pixels each, of which no file has a single one."""
    for count, limits, words in (
        (3, ImageLimits(max_total_pixels=60_000_000), r"together(.|\n)*75,000,000 in the first 3 of 3"),
        (11, ImageLimits(), "in the first 11 of 11"),
        (3, ImageLimits(max_images=2), "too many images(.|\n)*3"),
    ):
        with pytest.raises(ConfigError, match=words), open_images([bomb(5000)] * count, limits):
            pass
    sources = [PNG, WANTED]
    with open_images(sources, ImageLimits(max_total_pixels=2 * 40 * 24, max_images=2)) as opened:
        assert all(same(one, WANTED) for one in opened)
        assert not any(one is WANTED for one in opened)
    assert not opened, "they are held for the body alone"


def test_a_file_whose_reader_is_gone_is_not_read_on(monkeypatch):
    monkeypatch.setattr(ImageFile, "MAXBLOCK", 1 << 12)
    data, reads = saved(Image.effect_noise((256, 256), 99), "TIFF"), []

    def check():
        reads.append(1)
        if len(reads) > 8:
            raise EngineStopped("gone")

    with pytest.raises(EngineStopped), open_images([data], check=check):
        pass
    assert len(reads) == 9


def test_strips_give_what_the_whole_image_gives(monkeypatch):
    monkeypatch.setattr(images, "_STRIP", 40 * 5)  # five rows; the last strip has fewer
    layer = make_image(3, 40, 24).convert("RGBA")
    layer.putalpha(make_image(4, 40, 24).convert("L"))
    exif = Image.Exif()
    exif[0x0112] = 5
    white = Image.new("RGBA", layer.size, "white")
    wanted = Image.alpha_composite(white, layer).convert("RGB")
    assert same(open_image(saved(layer)), wanted)
    assert same(open_image(saved(layer, exif=exif)), wanted.transpose(Image.Transpose.TRANSPOSE))
    few = WANTED.quantize(32)
    assert same(open_image(few), WANTED.quantize(32).convert("RGB"))
    wide = Image.fromarray(np.arange(24 * 40, dtype=np.uint16).reshape(24, 40) * 68)
    grey = Image.fromarray(np.floor(np.asarray(wide) / 257 + 0.5).astype(np.uint8))
    assert same(open_image(saved(wide)), grey.convert("RGB"))
    given = Image.open(io.BytesIO(saved(WANTED, exif=exif)))
    assert same(open_image(given), WANTED.transpose(Image.Transpose.TRANSPOSE))
    assert given.size == WANTED.size, "an opened image stays as it is"


def test_memory_of_large_images_is_returned(monkeypatch):
    returned = []
    monkeypatch.setattr(images, "return_free_memory", lambda: returned.append(1))
    open_image(Image.new("L", (2000, 2000)))
    assert not returned
    open_image(Image.new("L", (2001, 2000)))
    assert len(returned) == 1
    with pytest.raises(ConfigError), open_images([Image.new("L", (2001, 2000))]):
        raise ConfigError("the processor failed")
    assert len(returned) == 2


class Sharer:
    """A thread that takes some of a room until it is told to leave."""

    def __init__(self, room, count: int):
        self.has, self.leaves, self.error = threading.Event(), threading.Event(), None
        self.wants = True
        self.thread = threading.Thread(target=self._run, args=(room, count))
        self.thread.start()
        self.has.wait(0.05)

    def _run(self, room, count):
        try:
            with room.taken(count, self._check):
                self.has.set()
                assert self.leaves.wait(30)
        except EngineStopped as error:
            self.error = error

    def _check(self):
        if not self.wants:
            raise EngineStopped("gone")

    def end(self):
        self.leaves.set()
        self.thread.join(30)


def test_what_is_decoded_at_once_is_bounded():
    room = images._Room(10)
    first, second = Sharer(room, 6), Sharer(room, 4)
    assert second.has.is_set()
    large, gone, small = Sharer(room, 11), Sharer(room, 1), Sharer(room, 1)
    assert not large.has.is_set()
    assert not small.has.is_set(), "it came after one that waits"
    gone.wants = False
    gone.thread.join(30)
    assert isinstance(gone.error, EngineStopped)
    first.end()
    assert not large.has.wait(0.05), "more than the room is taken alone"
    second.end()
    assert large.has.wait(30)
    assert not small.has.wait(0.05)
    large.end()
    assert small.has.wait(30)
    small.end()


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
