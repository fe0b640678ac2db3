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
from srl.trajectory import Search, Segment, Trajectory

INDENT = 8
_LABELS: dict[SpanKind, tuple[str, str]] = {
    "thought": ("think", "dim"),
    "search": ("search", "cyan"),
    "answer": ("answer", "bold green"),
    "other": ("text", ""),
}
"""The label of a span, and rich's style of its text."""
_OPENS = re.compile(rf"<(?:think|answer|search(?:{ENGINE})?)>")
_CLOSES = re.compile(r"</(?:think|answer|search)>$")
_UNFINISHED = re.compile(r"<[^<>]{0,60}$")
"""What may become a tag."""
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
        for part in re.findall(r"\s+|\S+", text):
            if part.isspace():
                self._put()
                self._gap = " "
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
        gap = self._gap if self._column > INDENT else ""
        if self._column + len(gap) + cell_len(word) > max(output.terminal_width(), 2 * INDENT):
            gap, self._column = "\n" + " " * INDENT, INDENT
        output.piece(gap + word, self._style)
        self._column += cell_len(word) + (gap == " ")
        self._gap = ""


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
            self._show_segment(trajectory, segment)
            self._segments += 1
        if token_ids:
            text = self.codec.decode(token_ids).rstrip("\ufffd")
            self._show_turn(trajectory, _UNFINISHED.sub("", text))

    def finish(self, trajectory: Trajectory) -> None:
        """Print the answer if it is not between tags, else why there is none."""
        self._show_searches(trajectory)
        if trajectory.answer is None or not self._answered:
            self._paragraphs.start("answer", "yellow" if trajectory.answer is None else "bold green")
            self._paragraphs.write(trajectory.answer or why_no_answer(trajectory))
        self.stop()

    def stop(self) -> None:
        """End the line that is begun."""
        self._paragraphs.end()

    def _show_segment(self, trajectory: Trajectory, segment: Segment) -> None:
        if segment.is_policy:
            self._show_turn(trajectory, segment.text)
            self._spans = self._characters = 0
            return
        self._show_searches(trajectory)
        if segment.kind == "feedback":
            self._paragraphs.start("invalid", "yellow")
            self._paragraphs.write("this was no search and no answer; the model was told so")

    def _show_turn(self, trajectory: Trajectory, text: str) -> None:
        """Print what is new in the `text` of a turn, which the segments so far precede."""
        is_first = not any(segment.is_policy for segment in trajectory.segments[: self._segments])
        for place, span in enumerate(spans(text, trajectory.think_is_open and is_first)):
            if place > self._spans:
                self._spans, self._characters = place, 0
            if place == self._spans:
                self._show_span(span)
            if span.kind in ("search", "answer") and _CLOSES.search(span.text):
                return  # what follows an action counts for nothing

    def _show_span(self, span: Span) -> None:
        text = span.text if span.kind == "other" else _CLOSES.sub("", _OPENS.sub("", span.text, count=1))
        new = text[self._characters :]
        if not text[: self._characters].strip() and new.strip():
            self._paragraphs.start(*_LABELS[span.kind])
            self._answered |= span.kind == "answer"
        self._characters = len(text)
        if text.strip():
            self._paragraphs.write(new)

    def _show_searches(self, trajectory: Trajectory) -> None:
        for search in trajectory.searches[self._searches :]:
            self._paragraphs.end()
            self._show_hits(search)
            self._searches += 1

    def _show_hits(self, search: Search) -> None:
        if search.error or not search.hits:
            self._paragraphs.start("", "yellow")
            self._paragraphs.write(f"{search.status}: {search.error or 'nothing was found'}")
        for rank, hit in enumerate(search.hits, start=1):
            unread = "(not read: it did not fit) " if search.shown_as(rank) == "none" else ""
            head = f"{rank:>{INDENT + 1}}  {hit.score:7.3f}  "
            title, text = one_line(hit.passage.title), unread + hit.passage.text
            output.piece(head, "dim")
            if self.full:
                output.piece(f"{title}\n", "bold")
                self._paragraphs.start("", "dim")
                self._paragraphs.write(text)
            else:
                width = max(min(output.terminal_width() - 1, _PIPE_WIDTH) - len(head), INDENT)
                title = one_line(title, width)
                output.piece(title, "bold")
                rest = width - cell_len(title) - 2
                output.piece((f"  {one_line(text, rest)}" if rest > INDENT else "") + "\n", "dim")
        self._paragraphs.end()


def why_no_answer(trajectory: Trajectory) -> str:
    """Why the episode has no answer, in one line."""
    if trajectory.fault:
        return f"none: {trajectory.fault}"
    if trajectory.end == "truncated":
        return f"none: cut off after {trajectory.policy_tokens} tokens"
    return f"none: the model did not answer in {trajectory.turns} turns"
