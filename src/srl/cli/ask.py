"""`srl ask`: ask a model a question, and see it search."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from srl.cli.options import IndexToSearch, ModelToRun, ServerUrl, Sets, Temperature

if TYPE_CHECKING:
    from srl.train.ask import Conversation
    from srl.trajectory import Trajectory

app = typer.Typer()

_SERVER = "rollout.engine=openai"


@app.command()
def ask(
    model: ModelToRun = None,
    question: Annotated[
        str | None, typer.Argument(metavar="[QUESTION]", help="The question, in quotation marks.")
    ] = None,
    index: IndexToSearch = None,
    url: ServerUrl = None,
    temperature: Temperature = None,
    max_turns: Annotated[int | None, typer.Option(min=0, help="The most turns that may search.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Print whole passages.")] = False,
    sets: Sets = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each question with its answer as a line of JSON.")
    ] = False,
) -> None:
    """Ask a model a question, and see it search.

    Thoughts, queries, passages and the answer appear while they are generated. Without a question, ask
    several: Ctrl-C stops an answer, Ctrl-D ends. In a pipe, each line of stdin is a question.

    Prompt and limits are those of the model's run, as in srl eval run. With --set rollout.engine=openai a
    server generates, at rollout.openai.url; a single argument is then the question.

    \b
    Example:
      srl ask last --index my-index "Who wrote the Origin of Species?"
      srl ask best --index my-index --full "Who wrote the Origin of Species?"
    """
    from srl.cli.eval.shared import check_inputs, check_search, read_model, tell_changed_indexes
    from srl.cli.output import note, progress, show_counted
    from srl.errors import UserError

    model, question = _model_and_question(model, question, sets or [])
    question = None if question is None else _checked(question)
    check_inputs([], index, url, [])
    try:
        directory, workspace = read_model(model)
    except UserError as error:
        raise _swapped(model, question) or error from error
    flags = {"search.index": index, "search.url": url, "eval.temperature": temperature,
             "rollout.max_turns": max_turns}  # fmt: skip
    show_counted()
    with ExitStack() as stack:
        with progress("loading", passing=True):
            from srl.train.ask import conversation
            from srl.train.evaluate_model import local_settings

            settings = local_settings(directory, None, None, flags, sets or [], workspace, note, "ask")
            check_search(settings, typed=index or url)
            talk = stack.enter_context(conversation(settings, workspace, note))
        tell_changed_indexes(talk.changed_indexes, "now", "it may search worse in a different index")
        if question is not None:
            _answer(talk, question, full, as_json)
        else:
            _answer_each(talk, full, as_json)


def _model_and_question(
    model: str | None, question: str | None, sets: Sequence[str]
) -> tuple[str | None, str | None]:
    """Model and question: a server's model needs no name, so that a single argument is the question."""
    from srl.errors import UserError

    is_server = any(one.replace(" ", "") == _SERVER for one in sets)
    if model is None and not is_server:
        raise UserError(f"which model? name its directory or run, or --set {_SERVER} for a server's")
    return (None, model) if is_server and question is None else (model, question)


def _swapped(model: str | None, question: str | None) -> Exception | None:
    """The error for arguments in the wrong order; None where the question names no model either."""
    from shlex import join

    from srl.cli.eval.shared import read_model
    from srl.errors import UserError

    if not model or not question:
        return None
    try:
        read_model(question)
    except UserError:
        return None
    return UserError(f"MODEL comes before QUESTION; type: {join(['srl', 'ask', question, model])} …")


def _checked(question: str) -> str:
    """The question. Raises UserError where it is empty or not text."""
    from srl.cli.output import checked_text
    from srl.errors import UserError

    if not question.strip():
        raise UserError("the question is empty")
    return checked_text(question, "question")


def _answer_each(talk: Conversation, full: bool, as_json: bool) -> None:
    """Answer the lines of stdin, one after the other; one that fails does not end the others."""
    from srl import process
    from srl.cli import output
    from srl.errors import CheckFailed, SrlError, UserError

    if sys.stdin is None:
        raise UserError("there is no question, and stdin is closed: give a question")
    interactive, failed = sys.stdin.isatty(), 0
    if interactive:
        output.note("ask a question; Ctrl-C stops an answer, Ctrl-D ends")
    while True:
        try:
            if (question := output.typed("\nquestion: ")) is None:
                break
            if question.strip():
                _answer(talk, _checked(question.strip()), full, as_json)
        except KeyboardInterrupt:
            if not (interactive and process.forget_interrupt()):
                raise
            output.warn("stopped")
        except SrlError as error:
            failed += 1
            output.warn(f"srl: {error}")
    if failed and not interactive:
        raise CheckFailed(f"{failed:,} question{'s' if failed > 1 else ''} could not be answered")


def _answer(talk: Conversation, question: str, full: bool, as_json: bool) -> None:
    """Print the episode of one question. Raises SrlError if a search or the engine fails."""
    from srl.cli.episode_view import EpisodeView
    from srl.cli.output import note, print_rows
    from srl.errors import SrlError

    if as_json:
        found = talk.ask(question)
        print_rows([_as_json(found)])
    else:
        view = EpisodeView(talk.loaded.codec, full)
        try:
            found = talk.ask(question, view)
            view.finish(found)
        finally:
            view.stop()
        note(_summary(found))
    if found.fault:
        raise SrlError(f"the question could not be answered: {found.fault}")


def _summary(found: Trajectory) -> str:
    """`2 searches, 3 turns, 87 tokens in 3.2 s`."""
    counts = {"search": len(found.searches), "turn": found.turns, "token": found.policy_tokens}
    parts = [f"{count:,} {_plural(name) if count != 1 else name}" for name, count in counts.items()]
    return f"{', '.join(parts)} in {found.seconds or 0:.1f} s"


def _plural(name: str) -> str:
    return "searches" if name == "search" else f"{name}s"


def _as_json(found: Trajectory) -> dict[str, Any]:
    from srl.browse.transcript import search_json

    return {
        "question": found.question.text,
        "answer": found.answer,
        "end": found.end,
        "turns": found.turns,
        "searches": [search_json(search) for search in found.searches],
        "tokens": found.policy_tokens,
        "seconds": found.seconds,
    }
