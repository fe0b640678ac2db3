"""How question, search and answer are written down: templates, tags, parsing, passages, escaping.

Pure text in, text out. The tags and the default prompt are Search-R1's (arXiv 2503.09516, table 1).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from srl.errors import UserError, nearest
from srl.trajectory import Hit

TAGS = ("think", "search", "information", "answer")
STOP_STRINGS = ("</search>", "</answer>")
NO_RESULTS = "No results found."

_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_TAG_START = re.compile(rf"<(?=\s*/?\s*(?:{'|'.join(TAGS)})\b)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Template:
    """What the policy is told: the prompt around a question, and the feedback on a useless turn."""

    name: str
    prompt: str
    feedback: str
    searches: bool = True

    def messages(self, question: str) -> tuple[dict[str, str], ...]:
        """The chat messages for `question`, which gets its question mark where it lacks one."""
        text = question.strip()
        text = text if text.endswith("?") else text + "?"
        return ({"role": "user", "content": self.prompt.replace("{question}", text)},)


_SEARCH_FEEDBACK = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and "
    "</search>. If I want to give the final answer, I should put the answer between <answer> and "
    "</answer>. Let me try again.\n"
)
_ANSWER_FEEDBACK = (
    "\nMy previous action is invalid. I should put the answer between <answer> and </answer>. "
    "Let me try again.\n"
)

TEMPLATES = {
    template.name: template
    for template in (
        Template(
            name="search-r1",
            prompt="Answer the given question. You must conduct reasoning inside <think> and </think> first "
            "every time you get new information. After reasoning, if you find you lack some knowledge, you "
            "can call a search engine by <search> query </search> and it will return the top searched "
            "results between <information> and </information>. You can search as many times as your want. "
            "If you find no further external knowledge needed, you can directly provide the answer inside "
            "<answer> and </answer>, without detailed illustrations. For example, <answer> Beijing "
            "</answer>. Question: {question}\n",
            feedback=_SEARCH_FEEDBACK,
        ),
        Template(
            name="r1",
            prompt="Answer the given question. You should first have a reasoning process in mind and then "
            "provide the answer. Show your reasoning in <think> </think> tags and return the final answer in "
            "<answer> </answer> tags, for example <answer> Beijing </answer>. Question: {question}\n",
            feedback=_ANSWER_FEEDBACK,
            searches=False,
        ),
        Template(name="tiny", prompt="Question : {question}", feedback=" try again . "),
        Template(name="tiny-r1", prompt="Question : {question}", feedback=" try again . ", searches=False),
    )
}


WITHOUT_SEARCH = {"search-r1": "r1", "tiny": "tiny-r1"}
"""For a template that searches, the one that asks the same without."""


def template(name: str) -> Template:
    """The built-in template `name`, or one read from a text file that contains `{question}`.

    Raises UserError when it is neither.
    """
    if name in TEMPLATES:
        return TEMPLATES[name]
    path = Path(name)
    if not path.is_file():
        known = ", ".join(TEMPLATES)
        raise UserError(
            f"no template {name!r}: there are {known}, or a path to a text file with {{question}}"
            f"{nearest(name, list(TEMPLATES))}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path}: expected a template in UTF-8 with {{question}} in it, {error}") from error
    if "{question}" not in text:
        raise UserError(f"{path}: a template must contain {{question}} once, and this file does not")
    return Template(name=name, prompt=text, feedback=_SEARCH_FEEDBACK, searches="<search>" in text)


@dataclass(frozen=True, slots=True)
class Action:
    """What a turn asks for: a search or the end of the episode."""

    kind: Literal["search", "answer"]
    content: str


def parse_action(text: str) -> Action | None:
    """The first complete action in one turn's text, or None when there is none."""
    match = _ACTION.search(text)
    if match is None:
        return None
    return Action("search" if match[1] == "search" else "answer", match[2].strip())


def escape(text: str) -> str:
    """`text` with every opening of one of our tags made harmless (`<answer>` → `&lt;answer>`)."""
    return _TAG_START.sub("&lt;", text)


def render_passage(position: int, hit: Hit) -> str:
    """`Doc 1(Title: …) text`, escaped; `position` counts from 1."""
    return escape(f"Doc {position}(Title: {hit.passage.heading}) {hit.passage.text}")


def render_information(passages: Sequence[str]) -> str:
    """The observation after a search: the rendered passages between the information tags."""
    body = "\n".join(passages).strip() or NO_RESULTS
    return f"\n\n<information>{body}</information>\n\n"
