"""The chat page: one document that loads nothing, and a policy that allows its own script and style alone."""

import hashlib
from base64 import b64encode
from importlib import resources

SCRIPTS = ("dom", "inline", "markdown", "render", "server", "history", "messages", "settings", "chat")
"""In the order in which they are joined."""


def chat_page() -> tuple[str, dict[str, str]]:
    """The page and its headers."""
    here, shared = resources.files(__name__), resources.files("paceline.measure")
    script = "".join((here / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    script = f'"use strict";\n(() => {{\n{script}}})();\n'
    style = "".join(place.read_text(encoding="utf-8") for place in (shared / "colours.css", here / "page.css"))
    page = (here / "page.html").read_text(encoding="utf-8").replace("{{style}}", style).replace("{{script}}", script)
    rules = {
        "default-src": "'none'",
        "script-src": _fingerprint(script),
        "style-src": _fingerprint(style),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    policy = "; ".join(f"{name} {value}" for name, value in rules.items())
    return page, {
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }


def _fingerprint(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
