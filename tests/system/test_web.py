"""Images by URL: strangers' URLs reach nothing that is not public, by no name, no redirect and no second look."""

import io
import socket

import pytest

from paceline.errors import ConfigError
from paceline.hf.chats import split_chat
from paceline.hf.images import ImageLimits, open_image
from paceline.system import web
from tests.system.web import serving
from tests.vision.families import make_image

_OUT = io.BytesIO()
make_image(1).save(_OUT, "PNG")
PNG = _OUT.getvalue()
REAL = socket.getaddrinfo


@pytest.fixture
def names(monkeypatch):
    """Names that this machine resolves, and how often it was asked for each."""
    known, asked = dict[str, list[str]](), list[str]()

    def resolve(host, port, *given, **options):
        asked.append(host)
        if host not in known:
            return REAL(host, port, *given, **options)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return known, asked


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.215.14", True),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),  # where clouds hand out credentials
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:127.0.0.1", False),
        ("2002:7f00:1::", False),
    ],
)
def test_what_is_public(address, public):
    assert web.is_public(address) == public


def test_private_addresses_need_a_word(names):
    known, _ = names
    known["intranet.example"] = ["93.184.215.14", "10.0.0.1"]  # one of several is enough
    with serving({"/a.png": PNG}) as base:
        port = base.rpartition(":")[2]
        places = ("127.0.0.1", "localhost", "127.1", "2130706433", "[::1]", "[::ffff:127.0.0.1]", "intranet.example")
        for host in places:
            with pytest.raises(ConfigError, match=r"private address(.|\n)*allow_private=True"):
                open_image(f"http://{host}:{port}/a.png")
        chat = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": base + "/a.png"}}]}]
        with pytest.raises(ConfigError, match="private address"):
            open_image(split_chat(chat)[1][0])
        assert open_image(base + "/a.png", ImageLimits(allow_private=True)).size == make_image(1).size


def test_redirects_are_checked_too(names, monkeypatch):
    monkeypatch.setattr(web, "is_public", lambda address: address == "127.0.0.1")
    pages = {"/a.png": PNG, "/near": (302, "/a.png")}
    with serving(pages) as base:
        port = base.rpartition(":")[2]
        pages["/inside"] = (302, f"http://127.0.0.2:{port}/a.png")
        assert open_image(base + "/near").size == make_image(1).size
        with pytest.raises(ConfigError, match="private address"):
            open_image(base + "/inside")


def test_what_was_checked_is_what_is_connected_to(names, monkeypatch):
    """A name may resolve to another address the second time (DNS rebinding), so there is no second time."""
    known, asked = names
    known["public.example"] = ["127.0.0.1"]
    monkeypatch.setattr(web, "is_public", lambda address: address == "127.0.0.1")
    with serving({"/a.png": PNG}) as base:
        assert open_image(f"http://public.example:{base.rpartition(':')[2]}/a.png").size == make_image(1).size
    assert asked.count("public.example") == 1


def test_a_proxy_is_no_way_around(names, monkeypatch):
    known, _ = names
    known |= {"public.example": ["93.184.215.14"], "inside.example": ["10.0.0.1"]}
    with serving({"http://public.example/a.png": PNG, "http://unknown.example/a.png": PNG}) as base:
        monkeypatch.setenv("http_proxy", base)
        monkeypatch.delenv("no_proxy", raising=False)
        assert open_image("http://public.example/a.png").size == make_image(1).size
        for host in ("inside.example", "10.0.0.1", "[::1]"):
            with pytest.raises(ConfigError, match="private address"):
                open_image(f"http://{host}/a.png")


@pytest.mark.parametrize("page", ["/crawl", "/drip", "/round"])
def test_one_time_for_everything(page):
    """Bytes that trickle in, in the head too, and redirects without end: each would begin a socket's timeout anew.

    The server ends none of these; without one time for everything this test would not end either.
    """
    with (
        serving({"/crawl": "crawl", "/drip": "drip", "/round": (302, "/crawl")}) as base,
        pytest.raises(ConfigError, match="not complete after"),
    ):
        open_image(base + page, ImageLimits(timeout_s=0.4, allow_private=True))


def test_https_checks_the_certificate(names):
    with serving({"/a.png": PNG}) as base, pytest.raises(ConfigError, match="cannot be fetched"):
        open_image(base.replace("http:", "https:") + "/a.png", ImageLimits(allow_private=True, timeout_s=5))
    assert web._Secure(None, "example.org", 1.0).context.check_hostname
