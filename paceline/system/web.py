"""Fetches a file by http(s): only from public addresses, with limits of size and time.

A URL may come from an untrusted chat and must not reach this machine's own network (SSRF). So every address is checked,
and the connection goes to the checked address, not to what the name resolves to later:

    URL ── name ── addresses, all public? ── connect to one of them ── redirect? from the beginning ── bytes
"""

import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from ipaddress import IPv6Address, ip_address
from typing import Any, final
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler, Request, build_opener

from ..errors import ConfigError


def fetch(
    url: str, max_bytes: int, timeout_s: float, allow_private: bool = False, hosts: Sequence[str] | None = None
) -> bytes:
    """The content at an http(s) URL. Raises `ConfigError`.

    allow_private: also from this machine and its network. hosts: the only ones allowed, redirects too; None: any.
    timeout_s: for everything together; only the resolution of a name may take longer. A proxy resolves names itself;
    names that also resolve here are checked.
    """
    visit = _Visit(url, timeout_s, allow_private, hosts)
    timer = threading.Timer(timeout_s, visit.hang_up)
    timer.daemon = True
    timer.start()
    try:
        opener = build_opener(_HttpOnly, _Opener(visit))
        with opener.open(Request(url, headers={"User-Agent": "paceline"}), timeout=timeout_s) as answer:
            return _body(answer, url, max_bytes, visit)
    except ConfigError:
        raise
    except HTTPError as error:
        raise ConfigError(f"{short(url)} returned no file", got=f"status {error.code} {error.reason}") from error
    except (URLError, OSError, HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        got = f"not complete after {timeout_s:g} seconds" if visit.is_over else str(reason) or type(reason).__name__
        raise ConfigError(f"{short(url)} cannot be fetched", got=got) from error
    finally:
        timer.cancel()


def too_many_bytes(name: str, got: object, max_bytes: int) -> ConfigError:
    """The error for a file that is too large."""
    return ConfigError(f"{name} is too large", got=f"{got} bytes", expected=f"at most {max_bytes} bytes")


def short(text: str) -> str:
    """A text in quotes, shortened if it is long."""
    return repr(text if len(text) <= 80 else text[:60] + "..." + text[-12:])


def is_public(address: str) -> bool:
    """Whether an IP address is public: not loopback, private, link-local, multicast or reserved."""
    parsed = ip_address(address)
    if isinstance(parsed, IPv6Address) and (inner := parsed.ipv4_mapped or parsed.sixtofour) is not None:
        return is_public(str(inner))
    return parsed.is_global and not parsed.is_multicast


def _body(answer: HTTPResponse, url: str, max_bytes: int, visit: "_Visit") -> bytes:
    length = answer.headers.get("Content-Length", "")
    if length.isdigit() and int(length) > max_bytes:
        raise too_many_bytes(short(url), int(length), max_bytes)
    pieces, size = list[bytes](), 0
    while piece := answer.read1(1 << 16):
        pieces.append(piece)
        size += len(piece)
        if size > max_bytes:
            raise too_many_bytes(short(url), f"more than {max_bytes}", max_bytes)
        if visit.is_over:  # through a proxy, whose connection is not ours to end
            raise TimeoutError
    if visit.is_over:
        raise TimeoutError
    if length.isdigit() and size < int(length):
        raise ConnectionError(f"{size} of {length} bytes")
    return b"".join(pieces)


@final
class _Visit:
    """The connections of one fetch."""

    def __init__(self, url: str, timeout_s: float, allow_private: bool, hosts: Sequence[str] | None):
        self.url, self.allow_private, self.hosts = url, allow_private, hosts
        self._end = time.monotonic() + timeout_s
        self._sockets = list[socket.socket]()

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end

    def hang_up(self) -> None:
        """Abort all connections: a slow answer would restart a socket's own timeout with every byte."""
        for sock in self._sockets:
            with suppress(OSError):  # of one that is closed already
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not SSLSocket's, which takes the reader's state away

    def kept(self, sock: socket.socket) -> socket.socket:
        """Remember it for `hang_up`."""
        self._sockets.append(sock)
        if self.is_over:
            raise TimeoutError
        return sock

    def resolve(self, host: str, port: int | None) -> list[Any]:
        """As `socket.getaddrinfo`. Raises `ConfigError` for a host that is not allowed or not public."""
        if self.hosts is not None and host.lower() not in self.hosts:
            expected = f"one of {', '.join(self.hosts)}" if self.hosts else "a data: URL"
            message = f"{short(self.url)} leads to a host that is not allowed"
            raise ConfigError(message, got=short(host), expected=expected)
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(entry[4][0]) for entry in entries]
        private = [] if self.allow_private else [address for address in addresses if not is_public(address)]
        if private:
            raise ConfigError(
                f"{short(self.url)} leads to a private address",
                got=private[0] if host in private else f"{short(host)} at {private[0]}",
                expected="a public address, since URLs may be those of strangers",
                fix="if you trust it, pass the opened image: open_image(url, ImageLimits(allow_private=True)) of "
                "paceline.hf.images",
            )
        return entries

    def dial(self, host: str, port: int) -> socket.socket:
        """Connect to a checked address."""
        failed = OSError("the name has no address")
        for family, kind, protocol, _, address in self.resolve(host, port):
            sock = self.kept(socket.socket(family, kind, protocol))
            try:
                sock.settimeout(max(0.01, self._end - time.monotonic()))
                sock.connect(address)
                return sock
            except OSError as error:
                failed = error
                sock.close()
        raise failed

    def is_proxied(self, request: Request) -> bool:
        """Whether the request goes through a proxy; its target is then checked as far as it resolves here."""
        asked = urlsplit(request.full_url)
        if request.host == asked.netloc:
            return False
        with suppress(OSError):  # a name that only the proxy knows
            self.resolve(asked.hostname or "", None)
        return True


class _HttpOnly(HTTPRedirectHandler):
    """Follows redirects to http and https only."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        if urlsplit(newurl).scheme.lower() not in ("http", "https"):
            raise ConfigError(f"{short(req.full_url)} points elsewhere", got=short(newurl), expected="http or https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _Opener(HTTPHandler, HTTPSHandler):
    """Connects to checked addresses itself, except through a proxy."""

    def __init__(self, visit: _Visit):
        super().__init__()
        self.visit = visit

    def http_open(self, req: Request) -> HTTPResponse:
        connects: Any = partial(_Plain, self.visit)
        return super().http_open(req) if self.visit.is_proxied(req) else self.do_open(connects, req)

    def https_open(self, req: Request) -> HTTPResponse:
        connects: Any = partial(_Secure, self.visit)
        return super().https_open(req) if self.visit.is_proxied(req) else self.do_open(connects, req)


class _Plain(HTTPConnection):
    def __init__(self, visit: _Visit, host: str, timeout: float):
        super().__init__(host, timeout=timeout)
        self.visit = visit

    def connect(self) -> None:
        self.sock = self.visit.dial(self.host, self.port)


class _Secure(HTTPSConnection):
    def __init__(self, visit: _Visit, host: str, timeout: float):
        self.visit, self.context = visit, ssl.create_default_context()
        super().__init__(host, timeout=timeout, context=self.context)

    def connect(self) -> None:
        raw = self.visit.dial(self.host, self.port)
        # The certificate is held against the name.
        wrapped = self.context.wrap_socket(raw, server_hostname=self.host, do_handshake_on_connect=False)
        self.sock = self.visit.kept(wrapped)
        wrapped.do_handshake()
