"""What pages and reports have in common: curves, and the segments of a transcript with their searches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from srl.answers import contains_answer
from srl.browse.svg import Band, chart
from srl.browse.token_text import token_texts
from srl.browse.transcript import Step, Transcript
from srl.browse.web.heat import Heat, largest_advantage, tokens

OVERVIEW = ("val/em", "test/em", "critic/score/mean", "response_length/mean")
PANELS = (
    *OVERVIEW, "env/number_of_valid_search", "env/finish_ratio", "actor/entropy", "actor/ppo_kl",
    "actor/grad_norm", "timing_s/step",
)  # fmt: skip
"""The metrics that are drawn of all runs, and of one."""


def charts(panels: Mapping[str, Sequence[Band]]) -> list[dict[str, Any]]:
    """The metrics of `panels` that a run has, each with its picture."""
    return [
        {"name": name, "svg": Markup(chart(name, some)), "bands": some}
        for name, some in panels.items()
        if some
    ]


def turns(shown: Transcript, heat: Heat | None = None, tokenizer: Any = None) -> dict[str, Any]:
    """The segments of a transcript, with the tokens of the policy's if they are coloured by `heat`."""
    largest = largest_advantage(shown.steps)
    found, as_ids = [], False
    for step in shown.steps:
        texts = coloured = None
        if heat and step.segment.is_policy:
            texts = token_texts(tokenizer, step.segment.token_ids, step.segment.text)
            as_ids = as_ids or texts is None
            coloured = tokens(step, heat, texts, largest)
        found.append({"step": step, "tokens": coloured, "searches": _searches(step, shown)})
    return {"turns": found, "as_ids": as_ids}


def _searches(step: Step, shown: Transcript) -> list[dict[str, Any]]:
    """The searches of a step, with each hit's passage and whether it was shown and has the answer."""
    found = []
    for search in step.searches:
        texts = dict(enumerate(search.shown_texts, start=1))
        hits = [
            {
                "rank": rank, "hit": hit, "shown": search.shown_as(rank),
                "gold": contains_answer(texts.get(rank, hit.passage.contents), shown.row["golden_answers"]),
            }
            for rank, hit in enumerate(search.hits, start=1)
        ]  # fmt: skip
        found.append({"search": search, "hits": hits})
    return found
