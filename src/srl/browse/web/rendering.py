"""Templates, and what they call: links, numbers, and text made safe."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from srl.browse.curve import short_name
from srl.browse.formatting import duration, number, signed
from srl.browse.transcript import describe
from srl.safe import safe
from srl.store.verdict import VERDICTS

HERE = Path(__file__).parent
LONGEST = 50_000
"""Characters of one text that a page shows; of a longer one the beginning."""


def environment() -> Environment:
    """Templates that escape every value, with its control characters made visible."""
    made = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {"link": link, "verdicts": VERDICTS}
    made.filters |= {
        "number": number, "signed": signed, "duration": duration, "short": short_name, "cell": cell,
        "clipped": _clipped, "describe": describe,
    }  # fmt: skip
    return made


def standalone(template: str, values: Mapping[str, Any]) -> Iterator[str]:
    """A template as a file that loads nothing, in chunks: the pages' style is in it, and no script.

    Its policy on content allows this one style, by its digest, and nothing else.
    """
    style = (HERE / "static" / "page.css").read_text(encoding="utf-8")
    digest = b64encode(sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    given = {"style": Markup(f"<style>{style}</style>"), "policy": policy, **values}
    yield from environment().get_template(template).generate(given)


def _shown(value: Any) -> Any:
    if value is None:
        return ""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    rest = len(value) - LONGEST
    shown = safe(value[:LONGEST])
    return shown if rest <= 0 else f"{shown} … {rest:,} more characters, which `srl inspect show` prints"


def _clipped(value: Any, length: int) -> str:
    """The beginning of a text."""
    text = str(value)
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"


def link(*parts: object, **parameters: Any) -> str:
    """A path of the page with its query; parameters that are None, empty or False are left out."""
    path = "".join(f"/{quote(str(part), safe='')}" for part in parts) or "/"
    left_out = (None, "")
    given = {name: one for name, one in parameters.items() if one is not False and one not in left_out}
    return path + (f"?{urlencode(given, doseq=True)}" if given else "")


def cell(value: Any) -> str:
    """A value of a table as text."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else str(value)
