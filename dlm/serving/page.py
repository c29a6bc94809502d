"""The page at `/`: one file, with a policy under which only its own script and style run."""

import base64
import re
from functools import cache
from hashlib import sha256
from importlib.resources import files


@cache
def page() -> tuple[bytes, dict[str, str]]:
    """The page and its headers."""
    text = (files("dlm.serving") / "page.html").read_text("utf-8")
    script, style = (_digest(re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)) for tag in ("script", "style"))
    policy = (
        f"default-src 'none'; script-src '{script}'; style-src '{style}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), {"content-security-policy": policy, **COMMON, "cache-control": "no-cache"}


COMMON = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "content-type": "text/html; charset=utf-8",
}
TRACE_POLICY = {
    # The page of a trace runs its own script, in an origin of its own that can reach nothing.
    "content-security-policy": "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'",
    **COMMON,
    "cache-control": "no-store",
}


def _digest(found: re.Match[str] | None) -> str:
    assert found is not None
    return "sha256-" + base64.b64encode(sha256(found[1].encode()).digest()).decode()
