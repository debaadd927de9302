"""The page at /: it loads nothing from elsewhere and runs its own script alone."""

import asyncio
import re
from base64 import b64encode
from hashlib import sha256

from tests.server.helpers import server


def get():
    async def ask():
        async with server() as client:
            return await client.get("/")

    return asyncio.run(ask())


def test_the_policy_allows_the_script_of_the_page():
    answer = get()
    (script,) = re.findall(r"<script>(.*?)</script>", answer.text, re.S)
    rules = answer.headers["content-security-policy"]
    assert f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" in rules
    assert "default-src 'none'" in rules
    assert "innerHTML" not in re.sub(r'innerHTML = "";', "", script), "answers must stay text"


def test_it_loads_nothing_from_elsewhere():
    text = get().text
    assert "{{" not in text
    assert ".drafted {" in text
    assert not re.search(r"https?://|<link|<img|<iframe|url\(|@import| on[a-z]+=", text)
