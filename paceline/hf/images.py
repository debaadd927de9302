"""Opens images from files, URLs, bytes or Pillow."""

import base64
import binascii
import errno
import io
import warnings
from dataclasses import dataclass
from functools import cache
from os import PathLike
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote_to_bytes

from PIL import Image, ImageOps, UnidentifiedImageError

from ..errors import ConfigError
from ..system.web import fetch, short, too_many_bytes
from .checkpoint import refused

ImageSource: TypeAlias = str | PathLike[str] | bytes | Image.Image
"""A path, a data URL, an http(s) URL, the bytes of a file, or an opened image."""

_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "AVIF")  # EPS would run another program
_FORMS = "a path, an http(s) URL, a data URL, bytes or a PIL image"


@dataclass(frozen=True)
class ImageLimits:
    """What an image may cost: bytes of its file, pixels once decoded, seconds to fetch it.

    allow_private: whether URLs may lead to this machine and its own network; only for URLs that its user typed.
    hosts: the only ones from which images are fetched; None: any.
    """

    max_bytes: int = 32 << 20
    max_pixels: int = 64_000_000
    timeout_s: float = 20.0
    allow_private: bool = False
    hosts: tuple[str, ...] | None = None
    min_side: int = 4  # below, processors mistake rows of pixels for channels


LIMITS = ImageLimits()
OWN_CHOICE = ImageLimits(allow_private=True)
"""Limits for images that the user named on the command line."""


def open_image(source: ImageSource, limits: ImageLimits = LIMITS) -> Image.Image:
    """The image as RGB, upright by its EXIF orientation, what is transparent on white.

    16-bit greys are scaled to 8 bits. Raises `ConfigError` for what is missing, too large, broken, animated or no
    image.
    """
    if isinstance(source, Image.Image):
        with refused("the given PIL image is broken or closed", fix="open it again, or pass its path"):
            return _upright_rgb(source, "the given PIL image", limits)
    if isinstance(source, bytes | bytearray | memoryview):
        return _decode(bytes(source), "the given bytes", limits)
    if isinstance(source, str) and source[:5].lower() == "data:":
        return _decode(_from_data_url(source, limits), f"the data URL {short(source)}", limits)
    if isinstance(source, str) and source[:8].lower().startswith(("http://", "https://")):
        data = fetch(source, limits.max_bytes, limits.timeout_s, limits.allow_private, limits.hosts)
        return _decode(data, short(source), limits)
    if isinstance(source, str | PathLike):
        return _decode(_read(source, limits), short(str(source)), limits)
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


def _decode(data: bytes, name: str, limits: ImageLimits) -> Image.Image:
    if len(data) > limits.max_bytes:
        raise too_many_bytes(name, len(data), limits.max_bytes)
    with refused(f"{name} is broken"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow about sizes, which are checked here, and about odd metadata
        try:
            with Image.open(io.BytesIO(data), formats=_formats()) as image:
                return _upright_rgb(image, name, limits)
        except UnidentifiedImageError as error:
            known = f"one of {', '.join(_formats())}"
            raise ConfigError(f"{name} is no image", got=_looks_like(data), expected=known) from error
        except Image.DecompressionBombError as error:
            raise ConfigError(f"{name} has too many pixels", expected=f"at most {limits.max_pixels}") from error


@cache
def _formats() -> tuple[str, ...]:
    """The formats that this Pillow was built with."""
    Image.init()
    return tuple(one for one in _FORMATS if one in Image.OPEN)


def _upright_rgb(image: Image.Image, name: str, limits: ImageLimits) -> Image.Image:
    width, height = image.size
    if width * height > limits.max_pixels:
        expected = f"at most {limits.max_pixels} pixels"
        raise ConfigError(
            f"{name} has too many pixels", got=f"{width}x{height}", expected=expected, fix="scale it down"
        )
    if min(width, height) < limits.min_side:
        raise ConfigError(f"{name} is too small", got=f"{width}x{height}", expected=f"{limits.min_side} or more a side")
    if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":  # MPO: a photograph with a preview behind it
        frames = f"{getattr(image, 'n_frames', 1)} images"
        raise ConfigError(f"{name} is not one image", got=frames, expected="one", fix="save the one you mean")
    image.load()
    upright = ImageOps.exif_transpose(image)
    if upright.mode in ("I", "I;16", "I;16L", "I;16B", "I;16N"):
        return _from_16_bits(upright, name)
    if upright.mode == "F":
        raise ConfigError(
            f"{name} has floating-point pixels", expected="8 or 16 bits a channel", fix="convert it first"
        )
    if upright.has_transparency_data:
        layer = upright.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer).convert("RGB")
    return upright.convert("RGB")  # a copy of its own, also where it is RGB already


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
