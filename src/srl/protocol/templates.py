"""What the policy is told: prompt templates, built in (`templates.toml`) or from a file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from srl.errors import UserError, nearest, parsing
from srl.protocol.tags import list_retrievers, search_tag

INFORMATION = "{information}"
"""Where in a template the passages stand that the episode retrieves before its first turn."""


@dataclass(frozen=True, slots=True)
class Template:
    """What the policy is told: the prompt around a question, and the feedback on a useless turn.

    `{retrievers}` in the prompt is where `naming` lists the retrievers that have a name; without
    such retrievers nothing is there. `{information}` is where the passages stand that the episode retrieves
    with the question before the first turn. `searches`: the episode needs a search tool.

    `untagged` says how a last turn without an action is read, so that a model that knows no tags is measured
    by its answer: what follows the words "answer is", and without them the whole text ("text") or nothing
    ("phrase"). "no answer": the answer must stand between tags.

    `examples` are questions with what the policy should write: chat turns before the question, which a model
    imitates better than examples within one message.
    """

    name: str
    prompt: str
    feedback: str
    searches: bool = True
    untagged: Literal["no answer", "text", "phrase"] = "no answer"
    examples: tuple[tuple[str, str], ...] = ()

    @property
    def retrieves(self) -> bool:
        """Whether passages stand in the prompt, so that the episode searches before the first turn."""
        return INFORMATION in self.prompt

    def messages(self, question: str, information: str = INFORMATION) -> tuple[dict[str, str], ...]:
        """The chat messages for `question`, which gets its question mark where it lacks one.

        `information` is what `render_information` made of the passages; before they are retrieved, its place.
        """
        prompt, turns = _NO_RETRIEVERS.sub("", self.prompt), []
        for example, says in self.examples:
            turns += [_user(prompt, example), {"role": "assistant", "content": says}]
            prompt = _QUESTION
        return (*turns, _user(prompt, question, information))

    def untagged_answer(self, text: str) -> str | None:
        """The answer in a last turn that has no action, as `untagged` says; None where there is none."""
        *before, after = _ANSWER_IS.split(text.rpartition("</think>")[2])
        if self.untagged == "no answer" or (self.untagged == "phrase" and not before):
            return None
        return after.rpartition("<answer>")[2].strip() or None

    def naming(self, retrievers: Mapping[str, str]) -> Template:
        """This template with the named retrievers (name to description) in its prompt and its feedback."""
        if not retrievers or not self.searches:
            return self
        prompt = self.prompt.replace("{retrievers}", list_retrievers(retrievers))
        choices = f"<search> (for another search engine: {', '.join(map(search_tag, retrievers))}) and"
        return replace(self, prompt=prompt, feedback=self.feedback.replace("<search> and", choices))


_NO_RETRIEVERS = re.compile(r"\{retrievers\}[ \n]?")
_ANSWER_IS = re.compile(r"\banswer(?:\s+is\b:?|:)", re.IGNORECASE)
_PLACES = re.compile(r"\{(question|information)\}")
_QUESTION = "Question: {question}\n"


def _user(prompt: str, question: str, information: str = "") -> dict[str, str]:
    """A message of the user: `prompt` with its places filled."""
    text = question.strip()
    values = {"question": text if text.endswith("?") else text + "?", "information": information.strip()}
    return {"role": "user", "content": _PLACES.sub(lambda place: values[place[1]], prompt)}


def _examples_in(text: str) -> tuple[tuple[str, str], ...]:
    """The examples in a text, each a line `Question: …` and, below it, what the policy writes and reads."""
    _, *blocks = re.split(r"^Question:", text, flags=re.MULTILINE)
    split = (example.strip().partition("\n") for example in blocks)
    return tuple((question.strip(), says.strip()) for question, _, says in split)


def _built_in() -> tuple[dict[str, Template], dict[str, str]]:
    """The templates of `templates.toml` by name, and for each with search the corresponding one without."""
    templates, without = dict[str, Template](), dict[str, str]()
    for name, fields in tomllib.loads(_FILE.read_text(encoding="utf-8")).items():
        if "without_search" in fields:
            without[name] = fields.pop("without_search")
        if "feedback_like" in fields:
            fields["feedback"] = templates[fields.pop("feedback_like")].feedback
        if "like" in fields:
            like = templates[fields.pop("like")]
            fields = {"prompt": like.prompt, "feedback": like.feedback} | fields
        examples = _examples_in(fields.pop("examples", ""))
        templates[name] = Template(name=name, examples=examples, **fields)
    return templates, without


_FILE = Path(__file__).parent / "templates.toml"
TEMPLATES, WITHOUT_SEARCH = _built_in()


def template(name: str) -> Template:
    """The built-in template `name`, or one read from a text file that contains `{question}`.

    A text that does not ask for `<answer>` tags takes a last turn without an action as the answer. Raises
    UserError when it is neither.
    """
    if name in TEMPLATES:
        return TEMPLATES[name]
    path = Path(name)
    if not path.is_file():
        names = ", ".join(TEMPLATES)
        raise UserError(
            f"no template {name!r}: there are {names}, or a path to a text file with {{question}}"
            f"{nearest(name, list(TEMPLATES))}"
        )
    with parsing(path):
        text = path.read_text(encoding="utf-8")
    if "{question}" not in text:
        raise UserError(f"{path}: a template must contain {{question}}")
    searches = "<search>" in text or INFORMATION in text
    feedback = TEMPLATES["search-r1" if "<search>" in text else "r1"].feedback
    untagged: Literal["no answer", "text"] = "no answer" if "<answer>" in text else "text"
    return Template(name=name, prompt=text, feedback=feedback, searches=searches, untagged=untagged)
