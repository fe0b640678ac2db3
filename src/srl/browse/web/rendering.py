"""Templates, and what they call: links, numbers, and text made safe."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from srl.answers import contains_answer
from srl.browse import groups, listing, runs, why
from srl.browse.curve import short_name
from srl.browse.formatting import cell, counted, duration, number, signed
from srl.browse.token_text import token_texts
from srl.browse.transcript import Step, Transcript, describe, facts, marked
from srl.browse.web.heat import Heat, largest_advantage, tokens
from srl.safe import safe

HERE = Path(__file__).parent
LONGEST = 50_000
"""Characters of one text that a page shows; of a longer one the beginning."""


def environment() -> Environment:
    """Templates that escape every value, with its control characters made visible."""
    templates = Environment(
        loader=FileSystemLoader(HERE / "templates"), autoescape=True, finalize=_cell_text,
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    templates.globals |= {
        "link": link, "facts": facts, "turns": turns, "listed": listing.HEADINGS, "runs": runs.HEADINGS,
        "grouped": groups.HEADINGS, "changes": why.HEADINGS, "examples": why.EXAMPLES, "causes": why.CAUSES,
    }  # fmt: skip
    templates.filters |= {
        "number": number, "signed": signed, "duration": duration, "short": short_name, "cell": cell,
        "counted": counted, "clipped": _clipped, "describe": describe, "marked": _marked,
    }  # fmt: skip
    return templates


def standalone(template: str, values: Mapping[str, Any]) -> Iterator[str]:
    """A template as a file that loads nothing, in chunks: the pages' style is in it, and no script.

    Its policy on content allows this one style, by its digest, and nothing else.
    """
    style = (HERE / "static" / "page.css").read_text(encoding="utf-8")
    digest = b64encode(sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    whole = {"style": Markup(f"<style>{style}</style>"), "policy": policy, **values}
    yield from environment().get_template(template).generate(whole)


def turns(transcript: Transcript, heat: Heat | None = None, tokenizer: Any = None) -> dict[str, Any]:
    """The segments of a transcript, with the tokens of the policy's if they are coloured by `heat`."""
    largest = largest_advantage(transcript.steps)
    segments, as_ids = [], False
    for step in transcript.steps:
        pieces = None
        if heat and step.segment.is_policy:
            texts = token_texts(tokenizer, step.segment.token_ids, step.segment.text)
            as_ids = as_ids or texts is None
            pieces = tokens(step, heat, texts, largest)
        segments.append({"step": step, "tokens": pieces, "searches": _searches(step, transcript)})
    return {"turns": segments, "as_ids": as_ids, "golds": transcript.row["golden_answers"]}


def _searches(step: Step, transcript: Transcript) -> list[dict[str, Any]]:
    """The searches of a step, with each hit's passage and whether it was shown and has the answer."""
    golds, searches = transcript.row["golden_answers"], []
    for search in step.searches:
        texts = dict(enumerate(search.shown_texts, start=1))
        hits = [
            {"rank": rank, "hit": hit, "shown": search.shown_as(rank),
             "gold": contains_answer(texts.get(rank, hit.passage.contents), golds)}
            for rank, hit in enumerate(search.hits, start=1)
        ]  # fmt: skip
        searches.append({"search": search, "hits": hits})
    return searches


def _cell_text(value: Any) -> Any:
    if value is None:
        return ""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    surplus = len(value) - LONGEST
    text = safe(value[:LONGEST])
    return text if surplus <= 0 else f"{text} … {surplus:,} more characters, which `srl inspect show` prints"


def _marked(text: str, golds: Sequence[str]) -> Markup:
    """The text with the golden answers in it marked."""
    pieces = marked(str(_cell_text(text)), golds)
    return Markup().join(
        Markup("<mark>{}</mark>").format(piece) if gold else escape(piece) for piece, gold in pieces
    )


def _clipped(value: Any, length: int) -> str:
    """The beginning of a text."""
    text = str(value)
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"


def link(*parts: object, **parameters: Any) -> str:
    """A path of the page with its query; parameters that are None or empty are left out."""
    path = "".join(f"/{quote(str(part), safe='')}" for part in parts) or "/"
    query = {name: value for name, value in parameters.items() if value not in (None, "")}
    return path + (f"?{urlencode(query, doseq=True)}" if query else "")
