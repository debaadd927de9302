"""Opens images from files, URLs, bytes or Pillow."""

import base64
import binascii
import errno
import io
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from os import PathLike
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote_to_bytes

from PIL import Image, ImageOps, UnidentifiedImageError

from ..errors import ConfigError
from ..system.hardware import return_free_memory
from ..system.web import fetch, short, too_many_bytes
from .checkpoint import refused

ImageSource: TypeAlias = str | PathLike[str] | bytes | Image.Image
"""A path, a data URL, an http(s) URL, the bytes of a file, or an opened image."""

_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "AVIF")  # EPS would run another program
_FORMS = "a path, an http(s) URL, a data URL, bytes or a PIL image"
_AT_ONCE = 100_000_000  # pixels
_STRIP = 1 << 20  # pixels
_MANY = 4_000_000  # pixels whose memory is returned to the system


@dataclass(frozen=True)
class ImageLimits:
    """What images may cost: bytes of each file, pixels of each once decoded, seconds to fetch each.

    allow_private: whether URLs may lead to this machine and its own network; only for URLs that its user typed.
    hosts: the only ones from which images are fetched; None: any.
    max_images, max_total_pixels: of a chat.
    """

    max_bytes: int = 32 << 20
    max_pixels: int = 64_000_000
    timeout_s: float = 20.0
    allow_private: bool = False
    hosts: tuple[str, ...] | None = None
    min_side: int = 4  # below, processors mistake rows of pixels for channels
    max_images: int | None = None
    max_total_pixels: int = 256_000_000


LIMITS = ImageLimits()
OWN_CHOICE = ImageLimits(allow_private=True)
"""Limits for images that the user named on the command line."""


def open_image(source: ImageSource, limits: ImageLimits = LIMITS) -> Image.Image:
    """The image as RGB, upright by its EXIF orientation, what is transparent on white.

    16-bit greys are scaled to 8 bits. Raises `ConfigError` for what is missing, too large, broken, animated or no
    image.
    """
    with open_images([source], limits) as images:
        return images[0]


@contextmanager
def open_images(
    sources: Sequence[ImageSource], limits: ImageLimits = LIMITS, check: Callable[[], None] = lambda: None
) -> Iterator[list[Image.Image]]:
    """The images of a chat as `open_image` gives them, for as long as the body lasts. Raises `ConfigError`.

    All files are fetched, and all sizes are checked, before any is decoded. At most 100 million pixels are decoded at
    once by all threads together, in the order of arrival; more wait until they are alone.
    check: called again and again; an error that it raises ends the reading.
    """
    if limits.max_images is not None and len(sources) > limits.max_images:
        raise ConfigError("there are too many images", got=len(sources), expected=f"at most {limits.max_images}")
    unread, total = list[_Unread](), 0
    for source in sources:
        check()
        unread.append(_unread(source, limits, check))
        width, height = unread[-1].image.size
        total += width * height
        if total > limits.max_total_pixels:
            raise ConfigError(
                "the images of a chat have too many pixels together",
                got=f"{total:,} in the first {len(unread)} of {len(sources)}",
                expected=f"at most {limits.max_total_pixels:,}",
                fix="send fewer, or scale them down",
            )
    images = list[Image.Image]()
    with _decoding.taken(total, check) if sources else nullcontext():  # a text waits for nobody
        try:
            while unread:
                images.append(unread.pop(0).decode())
                check()
            yield images
        finally:
            images.clear()
            unread.clear()
            if total > _MANY:
                return_free_memory()


class _Room:
    """A number that several threads share, in the order of arrival; who wants more than all of it waits to be alone."""

    def __init__(self, most: int):
        self._most, self._taken = most, 0
        self._line, self._changed = deque[object](), threading.Condition()

    @contextmanager
    def taken(self, count: int, check: Callable[[], None]) -> Iterator[None]:
        """Wait for room, and take it while the body runs. check: see `open_images`."""
        ticket = object()
        with self._changed:
            self._line.append(ticket)
            try:
                while self._line[0] is not ticket or (self._taken and self._taken + count > self._most):
                    self._changed.wait(0.1)
                    check()
                self._taken += count
            finally:
                self._line.remove(ticket)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._taken -= count
                self._changed.notify_all()


_decoding = _Room(_AT_ONCE)


@dataclass(frozen=True)
class _Unread:
    """An image of which the header was read. is_given: the caller opened it, and it stays as it is."""

    image: Image.Image
    name: str
    is_given: bool = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Make one error of whatever Pillow raises."""
        closed, fix = (" or closed", "open it again, or pass its path") if self.is_given else ("", None)
        with refused(f"{self.name} is broken{closed}", fix=fix), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow about sizes, which are checked here, and about odd metadata
            yield

    def judge(self, limits: ImageLimits) -> None:
        """Raise `ConfigError` for what is too large, too small or animated."""
        width, height = self.image.size
        if width * height > limits.max_pixels:
            expected = f"at most {limits.max_pixels} pixels"
            raise ConfigError(
                f"{self.name} has too many pixels", got=f"{width}x{height}", expected=expected, fix="scale it down"
            )
        if min(width, height) < limits.min_side:
            expected = f"{limits.min_side} or more a side"
            raise ConfigError(f"{self.name} is too small", got=f"{width}x{height}", expected=expected)
        if getattr(self.image, "is_animated", False) and self.image.format != "MPO":  # a photograph with its preview
            fix = "save the one you mean"
            raise ConfigError(f"{self.name} is not one image", got="several images", expected="one", fix=fix)

    def decode(self) -> Image.Image:
        """The image of `open_image`. It is converted in strips, since every whole copy takes up to 4 bytes a pixel."""
        with self.reading():
            image = self.image
            image.load()
            if self.is_given:
                image = ImageOps.exif_transpose(image)
            else:
                ImageOps.exif_transpose(image, in_place=True)
            (width, height), converted = image.size, Image.new("RGB", image.size)
            rows = max(1, _STRIP // width)
            for top in range(0, height, rows):
                box = (0, top, width, min(top + rows, height))
                converted.paste(_rgb(image.crop(box), self.name), box)
            return converted


class _Watched(io.BytesIO):
    """A file that calls `check` whenever Pillow reads from it."""

    def __init__(self, data: bytes, check: Callable[[], None]):
        super().__init__(data)
        self._check = check

    def read(self, size: int | None = -1, /) -> bytes:
        self._check()
        return super().read(size)


def _unread(source: ImageSource, limits: ImageLimits, check: Callable[[], None]) -> _Unread:
    if isinstance(source, Image.Image):
        unread = _Unread(source, "the given PIL image", is_given=True)
    else:
        unread = _open(*_file(source, limits), limits, check)
    with unread.reading():
        unread.judge(limits)
    return unread


def _file(source: str | PathLike[str] | bytes, limits: ImageLimits) -> tuple[bytes, str]:
    """The bytes of a file, and its name in errors."""
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source), "the given bytes"
    if isinstance(source, str) and source[:5].lower() == "data:":
        return _from_data_url(source, limits), f"the data URL {short(source)}"
    if isinstance(source, str) and source[:8].lower().startswith(("http://", "https://")):
        return fetch(source, limits.max_bytes, limits.timeout_s, limits.allow_private, limits.hosts), short(source)
    if isinstance(source, str | PathLike):
        return _read(source, limits), short(str(source))
    raise ConfigError("this is no image", got=type(source).__name__, expected=_FORMS)


def _read(source: str | PathLike[str], limits: ImageLimits) -> bytes:
    name = short(str(source))
    try:
        path = Path(source).expanduser()
        if path.exists() and not path.is_file():  # a pipe would block
            raise ConfigError(f"the image {name} is not a file", got="a folder or a device", expected=_FORMS)
        size = path.stat().st_size
        if size > limits.max_bytes:
            raise too_many_bytes(name, size, limits.max_bytes)
        return path.read_bytes()
    except ConfigError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # a null byte in the name; no home folder
        long = isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG
        fix = 'write base64 as "data:image/png;base64,..."' if long else None
        got = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"the image {name} cannot be read", got=got, expected=_FORMS, fix=fix) from error


def _from_data_url(url: str, limits: ImageLimits) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not body:
        raise ConfigError(
            f"the data URL {short(url)} holds nothing", expected="data:image/png;base64, and the image in base64"
        )
    if len(body) > 4 * limits.max_bytes:  # base64 takes 4/3, percent signs three times the bytes
        raise too_many_bytes(f"the data URL {short(url)}", len(body), limits.max_bytes)
    raw = unquote_to_bytes(body)
    if not head.lower().endswith(";base64"):
        return raw
    try:
        return base64.b64decode(b"".join(raw.split()), validate=True)
    except binascii.Error as error:
        raise ConfigError(f"the data URL {short(url)} is not base64", got=str(error)) from error


def _open(data: bytes, name: str, limits: ImageLimits, check: Callable[[], None]) -> _Unread:
    if len(data) > limits.max_bytes:
        raise too_many_bytes(name, len(data), limits.max_bytes)
    with refused(f"{name} is broken"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _Unread(Image.open(_Watched(data, check), formats=_formats()), name)
        except UnidentifiedImageError as error:
            known = f"one of {', '.join(_formats())}"
            raise ConfigError(f"{name} is no image", got=_looks_like(data), expected=known) from error
        except Image.DecompressionBombError as error:
            raise ConfigError(f"{name} has too many pixels", expected=f"at most {limits.max_pixels}") from error


@cache
def _formats() -> tuple[str, ...]:
    """The formats that this Pillow was built with."""
    Image.init()
    return tuple(form for form in _FORMATS if form in Image.OPEN)


def _rgb(image: Image.Image, name: str) -> Image.Image:
    if image.mode in ("I", "I;16", "I;16L", "I;16B", "I;16N"):
        return _from_16_bits(image, name)
    if image.mode == "F":
        raise ConfigError(
            f"{name} has floating-point pixels", expected="8 or 16 bits a channel", fix="convert it first"
        )
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")


def _from_16_bits(image: Image.Image, name: str) -> Image.Image:
    wide = image.convert("I")
    least, most = wide.getextrema()  # type: ignore[misc]  # one channel
    if least < 0 or most > 65535:  # type: ignore[operator]
        raise ConfigError(f"{name} has pixels of 32 bits", got=f"{least} to {most}", expected="0 to 65535")
    return wide.point(lambda value: value * (1 / 257) + 0.5).convert("L").convert("RGB")


def _looks_like(data: bytes) -> str:
    if not data:
        return "an empty file"
    start = data.lstrip()[:15].lower()
    return "a web page" if start.startswith((b"<!doctype", b"<html")) else f"{len(data)} bytes of something else"
