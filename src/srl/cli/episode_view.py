"""An episode on the terminal while it grows: thoughts, queries, passages, answer, each in its style."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.cells import cell_len

from srl.browse.transcript import Span, SpanKind, spans
from srl.cli import output
from srl.protocol import ENGINE
from srl.rollout.codec import Codec
from srl.safe import one_line, safe
from srl.trajectory import Hit, Search, Segment, Trajectory

INDENT = 8
_LABELS: dict[SpanKind, str] = {"thought": "think", "search": "search", "answer": "answer", "other": "text"}
_STYLES: dict[SpanKind, str] = {"thought": "dim", "search": "cyan", "answer": "bold green", "other": ""}
_OPENS = re.compile(rf"<(?:think|answer|search(?:{ENGINE})?)>")
_CLOSES = re.compile(r"</(?:think|answer|search)>$")
_UNFINISHED = re.compile(r"<[^<>]{0,60}$")
"""What may become a tag."""
_PARTS = re.compile(r"\s+|\S+")
_LONGEST_WORD = 24
"""Characters that are printed before it is known where their word ends."""
_PIPE_WIDTH = 160
"""Characters of a passage's line where there is no terminal."""


class Paragraphs:
    """Writes paragraphs with a label, a few characters at a time; words wrap at the terminal's width."""

    def __init__(self) -> None:
        self._style, self._word, self._gap, self._column = "", "", "", 0

    def start(self, label: str, style: str) -> None:
        self.end()
        output.piece(f"{label:<{INDENT}}", style)
        self._style, self._gap, self._column = style, "", INDENT

    def write(self, text: str) -> None:
        for part in _PARTS.findall(text):
            if part.isspace():
                self._put()
                self._gap = "\n" if "\n" in part else " "
            else:
                self._word += part
                if len(self._word) > _LONGEST_WORD:
                    self._put()

    def end(self) -> None:
        """End the line, if one is begun."""
        self._put()
        if self._column:
            output.piece("\n")
        self._column = 0

    def _put(self) -> None:
        """Print the word, on a new line if it does not fit."""
        word, self._word = safe(self._word), ""
        if not word:
            return
        size = cell_len(word)
        gap = self._gap if self._column > INDENT else ""
        if gap == "\n" or self._column + len(gap) + size > max(output.terminal_width(), 2 * INDENT):
            gap, self._column = "\n" + " " * INDENT, INDENT
        output.piece(gap + word, self._style)
        self._column, self._gap = self._column + len(gap.strip("\n")) * (gap == " ") + size, ""


class EpisodeView:
    """Prints an episode, called as `srl.rollout.episode.OnProgress`. A passage is a line unless `full`."""

    def __init__(self, codec: Codec, full: bool = False) -> None:
        self.codec, self.full = codec, full
        self._paragraphs = Paragraphs()
        self._segments = self._searches = 0  # printed so far
        self._spans = self._characters = 0  # of the turn: whole spans, and characters of the one after them
        self._answered = False

    def __call__(self, trajectory: Trajectory, token_ids: Sequence[int]) -> None:
        for segment in trajectory.segments[self._segments :]:
            self._segments += 1
            self._show_segment(trajectory, segment)
        if token_ids:
            text = self.codec.decode(token_ids).rstrip("\ufffd")
            self._show_turn(trajectory, _UNFINISHED.sub("", text), self._segments)

    def finish(self, trajectory: Trajectory) -> None:
        """Print the answer if it is not between tags, else why there is none."""
        self._show_searches(trajectory)
        if trajectory.answer is not None and not self._answered:
            self._paragraphs.start("answer", _STYLES["answer"])
            self._paragraphs.write(trajectory.answer)
        elif trajectory.answer is None:
            self._paragraphs.start("answer", "yellow")
            self._paragraphs.write(why_no_answer(trajectory))
        self.stop()

    def stop(self) -> None:
        """End the line that is begun."""
        self._paragraphs.end()

    def _show_segment(self, trajectory: Trajectory, segment: Segment) -> None:
        if segment.is_policy:
            self._show_turn(trajectory, segment.text, self._segments - 1)
            self._spans = self._characters = 0
            return
        self._show_searches(trajectory)
        if segment.kind == "feedback":
            self._paragraphs.start("invalid", "yellow")
            self._paragraphs.write("this was no search and no answer; the model was told so")
            self._paragraphs.end()

    def _show_turn(self, trajectory: Trajectory, text: str, before: int) -> None:
        """Print what is new in the `text` of a turn, which `before` segments precede."""
        is_first = not any(segment.is_policy for segment in trajectory.segments[:before])
        found = spans(text, trajectory.think_is_open and is_first)
        for position, span in enumerate(found):
            if any(map(_is_action, found[:position])):  # what follows an action counts for nothing
                return
            if position < self._spans:
                continue
            if position > self._spans:
                self._spans, self._characters = position, 0
            self._show_span(span)

    def _show_span(self, span: Span) -> None:
        text = _inside(span)
        new = text[self._characters :]
        if not text[: self._characters].strip() and new.strip():
            self._paragraphs.start(_LABELS[span.kind], _STYLES[span.kind])
            self._answered |= span.kind == "answer"
            new = new.lstrip()
        self._characters = len(text)
        if text.strip():
            self._paragraphs.write(new)

    def _show_searches(self, trajectory: Trajectory) -> None:
        for search in trajectory.searches[self._searches :]:
            self._searches += 1
            self._paragraphs.end()
            self._show_hits(search)

    def _show_hits(self, search: Search) -> None:
        if search.error or not search.hits:
            self._paragraphs.start("", "yellow")
            self._paragraphs.write(
                f"{search.status}: {search.error}" if search.error else "nothing was found"
            )
        for rank, hit in enumerate(search.hits, start=1):
            read = search.shown_as(rank) != "none"
            self._show_hit(rank, hit, "" if read else "(not read: it did not fit) ")
        self._paragraphs.end()

    def _show_hit(self, rank: int, hit: Hit, remark: str) -> None:
        head = f"{rank:>{INDENT + 1}}  {hit.score:7.3f}  "
        title, text = one_line(hit.passage.title), f"{remark}{hit.passage.text}"
        output.piece(head, "dim")
        if self.full:
            self._paragraphs.end()
            output.piece(f"{title}\n", "bold")
            self._paragraphs.start("", "dim")
            self._paragraphs.write(text)
            self._paragraphs.end()
            return
        width = min(output.terminal_width() - 1, _PIPE_WIDTH) - len(head)
        title = one_line(title, max(width, INDENT))
        output.piece(title, "bold")
        rest = width - cell_len(title) - 2
        output.piece((f"  {one_line(text, rest)}" if rest > INDENT else "") + "\n", "dim")


def _is_action(span: Span) -> bool:
    return span.kind in ("search", "answer") and _CLOSES.search(span.text) is not None


def _inside(span: Span) -> str:
    """The text of `span` without its tags."""
    return _CLOSES.sub("", _OPENS.sub("", span.text, count=1)) if span.kind != "other" else span.text


def why_no_answer(trajectory: Trajectory) -> str:
    """Why the episode has no answer, in one line."""
    if trajectory.fault:
        return f"none: {trajectory.fault}"
    if trajectory.end == "truncated":
        return f"none: cut off after {trajectory.policy_tokens} tokens"
    return f"none: the model did not answer in {trajectory.turns} turns"
