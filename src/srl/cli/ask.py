"""`srl ask`: ask a model a question, and see it search."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from srl.cli import output
from srl.cli.options import IndexToSearch, ModelToRun, ServerUrl, Sets, Temperature
from srl.errors import CheckFailed, SrlError, UserError

if TYPE_CHECKING:
    from srl.train.ask import Conversation
    from srl.trajectory import Trajectory

app = typer.Typer()


@app.command()
def ask(
    model: ModelToRun = None,
    question: Annotated[
        str | None, typer.Argument(metavar="[QUESTION]", help="The question, in quotation marks.")
    ] = None,
    index: IndexToSearch = None,
    url: ServerUrl = None,
    temperature: Temperature = None,
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

    is_server = any(text.replace(" ", "") == "rollout.engine=openai" for text in sets or [])
    if is_server and question is None:
        model, question = None, model
    elif model is None and not is_server:
        raise UserError("which model? name its directory or run, or --set rollout.engine=openai")
    if question is not None:
        _check(question)
    check_inputs([], index, url, [])
    directory, workspace = read_model(model)
    flags = {"search.index": index, "search.url": url, "eval.temperature": temperature}
    output.show_counted()
    with ExitStack() as stack:
        with output.progress("loading", passing=True):
            from srl.train.ask import conversation
            from srl.train.model_settings import local_settings

            settings = local_settings(directory, None, None, flags, sets or [], output.note)
            check_search(settings, typed=index or url)
            talk = stack.enter_context(conversation(settings, workspace, output.note))
        tell_changed_indexes(
            talk.indexes, talk.trained_with, "now", "it may search worse in a different index"
        )
        if question is not None:
            _answer(talk, question, full, as_json)
        else:
            _answer_each(talk, full, as_json)


def _check(question: str) -> None:
    if not question.strip():
        raise UserError("the question is empty")
    output.checked_text(question, "question")


def _answer_each(talk: Conversation, full: bool, as_json: bool) -> None:
    """Answer the lines of stdin, one after the other; one that fails does not end the others."""
    from srl import process

    interactive, failed = sys.stdin.isatty(), 0
    if interactive:
        output.note("ask a question; Ctrl-C stops an answer, Ctrl-D ends")
    while True:
        try:
            question = next(output.stdin_lines("\nquestion: "), None)
            if question is None:
                break
            if question.strip():
                _check(question)
                _answer(talk, question.strip(), full, as_json)
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

    if as_json:
        episode = talk.ask(question)
        output.print_rows([_as_json(episode)])
    else:
        view = EpisodeView(talk.loaded.codec, full)
        try:
            episode = talk.ask(question, view)
            view.finish(episode)
        finally:
            view.stop()
        counts = {"searches": len(episode.searches), "turns": episode.turns, "tokens": episode.policy_tokens}
        parts = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        output.note(f"{parts}; {episode.seconds or 0:.1f} s")
    if episode.fault:
        raise SrlError(f"the question could not be answered: {episode.fault}")


def _as_json(episode: Trajectory) -> dict[str, Any]:
    from srl.browse.transcript import search_json

    facts = {name: getattr(episode, name) for name in ("answer", "end", "turns", "seconds")}
    searches = [search_json(search) for search in episode.searches]
    return {"question": episode.question.text, **facts, "tokens": episode.policy_tokens, "searches": searches}
