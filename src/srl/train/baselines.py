"""The baselines of an evaluation: the same episodes with another template and other limits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from srl.config import Config
from srl.errors import UserError, nearest
from srl.protocol import NO_INFORMATION, WITHOUT_SEARCH, Template
from srl.train.load_protocol import choose_template, template_name

ALL = "all"
"""The name that stands for every baseline."""
CLOSED_BOOK = "closed-book"
"""The baseline that others gain over: what the model knows without looking anything up."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """A setting to compare a model with: its template, whether it searches, and whether it answers at once.

    Without a template it has the counterpart without search of the model's own: R1's for Search-R1's.
    `at_once`: one generation, which cannot search. Else a turn without an action gets feedback, as in search.
    """

    template: str
    searches: bool = False
    at_once: bool = False


BASELINES = {
    CLOSED_BOOK: Baseline("closed-book", at_once=True),
    "cot": Baseline("cot", at_once=True),
    "rag": Baseline("rag", searches=True, at_once=True),
    "few-shot": Baseline("few-shot", searches=True),
    "r1": Baseline(""),
}
"""Each baseline by its name, which is also the name of its setting."""


def chosen_baselines(names: Iterable[str]) -> list[str]:
    """The baselines that were named, each once, in the order of `BASELINES`. Raises UserError."""
    selection = set(names)
    for name in selection - {ALL, *BASELINES}:
        listing = ", ".join(BASELINES)
        raise UserError(
            f"no baseline {name!r}: there are {listing}, and {ALL}{nearest(name, list(BASELINES))}"
        )
    return [name for name in BASELINES if selection & {ALL, name}]


def baseline_config(config: Config, name: str) -> Config:
    """`config` as the baseline `name` has it; a question whose prompt fits in `config` also fits here.

    Prompts get as many tokens more as the baseline's text is longer, and room for the passages of rag.
    """
    baseline, data, rollout = BASELINES[name], config.data, config.rollout
    template = baseline.template or WITHOUT_SEARCH.get(template_name(config), "r1")
    changed = config.with_settings(
        {"data.template": template, "rollout.search": baseline.searches, "rollout.protocol": "tags"}
    )
    if baseline.at_once:
        at_once = {"rollout.max_turns": 0, "data.max_response_length": rollout.max_turn_tokens}
        changed = changed.with_settings(at_once)
    used, own = choose_template(changed), choose_template(config)
    longer = max(0, _tokens(used) - _tokens(own)) + (rollout.max_obs_length if used.retrieves else 0)
    return changed.with_settings({"data.max_prompt_length": data.max_prompt_length + longer})


_MARKUP = 8
"""About the most tokens that a chat template puts around a message."""


def _tokens(template: Template) -> int:
    """About the most tokens that a template's own text takes: one for three bytes."""
    messages = template.messages("", NO_INFORMATION)
    return sum(ceil(len(message["content"].encode()) / 3) + _MARKUP for message in messages)
