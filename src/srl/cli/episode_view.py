"""An episode on the terminal while it grows: thoughts, queries, passages, answer, each in its style."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.cells import cell_len

from srl.browse.transcript import Span, SpanKind, spans
from srl.cli import output
from srl.protocol import ENGINE, opens_thought
from srl.rollout.codec import Codec
from srl.safe import one_line
from srl.trajectory import Search, Trajectory

INDENT = 8
_LABELS: dict[SpanKind, tuple[str, str]] = {
    "thought": ("think", "dim"),
    "search": ("search", "cyan"),
    "answer": ("answer", "bold green"),
    "other": ("text", ""),
}
"""The label of a span, and rich's style of its text."""
_TAGS = re.compile(rf"^<(?:think|answer|search(?:{ENGINE})?)>|</(?:think|answer|search)>$")
_UNFINISHED = re.compile(r"<[^<>]{0,60}$")
"""What may become a tag."""
_PIPE_WIDTH = 160
"""Characters of a passage's line where there is no terminal."""


class EpisodeView:
    """Prints an episode, called as `srl.rollout.episode.OnProgress`. A passage is a line unless `full`."""

    def __init__(self, codec: Codec, full: bool = False) -> None:
        self.codec, self.full = codec, full
        self._segments = self._searches = 0  # printed so far
        self._spans, self._span_text = 0, ""  # of the turn: whole spans, and what is printed of the next one
        self._in_line = self._answered = False

    def __call__(self, trajectory: Trajectory, token_ids: Sequence[int]) -> None:
        for segment in trajectory.segments[self._segments :]:
            if segment.is_policy:
                self._show_turn(trajectory, segment.text)
                self._spans, self._span_text = 0, ""
            else:
                self._show_searches(trajectory)
            if segment.kind == "feedback":
                self._start("invalid", "yellow", "this was no search and no answer; the model was told so")
            self._segments += 1
        if token_ids:
            ids = token_ids[:-1] if token_ids[-1] in self.codec.eos_ids else token_ids
            text = self.codec.decode(ids, special=trajectory.protocol != "tags").rstrip("\ufffd")
            self._show_turn(trajectory, _UNFINISHED.sub("", text))

    def finish(self, trajectory: Trajectory) -> None:
        """Print the answer if it is not between tags, else why there is none."""
        self._show_searches(trajectory)
        if trajectory.answer is None:
            self._start("answer", "yellow", why_no_answer(trajectory))
        elif not self._answered:
            self._start("answer", "bold green", one_line(trajectory.answer))
        self.stop()

    def stop(self) -> None:
        """End the line that is begun."""
        if self._in_line:
            output.piece("\n")
        self._in_line = False

    def _start(self, label: str, style: str, text: str = "") -> None:
        self.stop()
        output.piece(f"{label:<{INDENT}}{text}", style)
        self._in_line = True

    def _show_turn(self, trajectory: Trajectory, text: str) -> None:
        """Print what is new in the `text` of a turn, which the segments so far precede."""
        is_first = not any(segment.is_policy for segment in trajectory.segments[: self._segments])
        inside = trajectory.think_is_open and is_first
        if trajectory.protocol != "tags":
            inside = opens_thought(trajectory.segments[self._segments - 1].text)
        for place, span in enumerate(spans(text, inside, trajectory.protocol)):
            if place > self._spans:
                self._spans, self._span_text = place, ""
            if place == self._spans:
                self._show_span(span)
            if span.kind in ("search", "answer") and span.text.endswith(">"):
                return  # what follows an action counts for nothing

    def _show_span(self, span: Span) -> None:
        text = span.text if span.kind == "other" else _TAGS.sub("", span.text.strip())
        text = " ".join(text.split())
        label, style = _LABELS[span.kind]
        if text and not self._span_text:
            self._start(label, style)
            self._answered |= span.kind == "answer"
        output.piece(text[len(self._span_text) :], style)
        self._span_text = text

    def _show_searches(self, trajectory: Trajectory) -> None:
        for search in trajectory.searches[self._searches :]:
            self.stop()
            self._show_hits(search)
            self._searches += 1

    def _show_hits(self, search: Search) -> None:
        if search.error or not search.hits:
            self._start("", "yellow", f"{search.status}: {search.error or 'nothing was found'}")
        for rank, hit in enumerate(search.hits, start=1):
            self.stop()
            head = f"{rank:>{INDENT + 1}}  {hit.score:7.3f}  "
            title = one_line(hit.passage.title)
            text = "(not read: it did not fit) " * (search.shown_as(rank) == "none") + hit.passage.text
            if not self.full:
                width = max(min(output.terminal_width() - 1, _PIPE_WIDTH) - len(head), INDENT)
                title = one_line(title, width)
                text = one_line(text, max(width - cell_len(title) - 2, 1))
            output.piece(head, "dim")
            output.piece(title, "bold")
            output.piece(f"  {one_line(text)}", "dim")
            self._in_line = True
        self.stop()


def why_no_answer(trajectory: Trajectory) -> str:
    """Why the episode has no answer, in one line."""
    if trajectory.fault:
        return f"none: {trajectory.fault}"
    if trajectory.end == "truncated":
        return f"none: cut off after {trajectory.policy_tokens} tokens"
    return f"none: the model did not answer in {trajectory.turns} turns"
