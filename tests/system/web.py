"""A small web server on this machine, for images that come by URL."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = bytes | tuple[int, str] | tuple[int, bytes, int] | str
"""A body; a redirect; a body shorter than it is said to be; "drip", "flood" and, in its head, "crawl" never end."""


@contextmanager
def serving(pages: dict[str, Answer]) -> Iterator[str]:
    """Serves `pages` while the block runs; gives the address."""
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            page = pages.get(self.path)
            try:
                if page is None:
                    self.send_error(404)
                elif isinstance(page, bytes):
                    self._send(200, page, len(page))
                elif isinstance(page, tuple) and len(page) == 2:
                    self.send_response(page[0])
                    self.send_header("Location", page[1])
                    self.end_headers()
                elif isinstance(page, tuple):
                    self._send(*page)
                else:
                    self._send_for_ever(page)
            except (BrokenPipeError, ConnectionResetError):
                pass

        def _send(self, status, body, length):
            self.send_response(status)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body)

        def _send_for_ever(self, how):
            if how == "crawl":
                self.wfile.write(b"HTTP/1.0 200 OK\r\n")
            while how == "crawl" and not ended.is_set():
                self.wfile.write(b"X")
                time.sleep(0.05)
            self.send_response(200)
            self.end_headers()
            while not ended.is_set():
                self.wfile.write(b"x" * (1 if how == "drip" else 10_000))
                time.sleep(0.05 if how == "drip" else 0)

        def log_message(self, format, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
