"""Progress of long work. Commands show it as a bar; in library calls it is not shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Protocol

Note = Callable[[str], None]
"""Is told, in a line, what was noticed."""


class Count(Protocol):
    """Called with the number done so far, and in a few words what came out so far."""

    def __call__(self, done: int, so_far: str = "", /) -> None: ...


Show = Callable[[str, int | None, int], AbstractContextManager[Count]]
"""Shows a task while it runs, given its name, its total (None if unknown), and the number done before."""


def _unseen(what: str, total: int | None, start: int) -> AbstractContextManager[Count]:
    return nullcontext(lambda done, so_far="": None)


_show: Show = _unseen


def show_with(show: Show | None) -> None:
    """Show progress with `show` from now on; None: do not show it."""
    global _show
    _show = show or _unseen


def counted(what: str, total: int | None = None, start: int = 0) -> AbstractContextManager[Count]:
    """Shows the task inside the block; yields a function to call with the number done so far.

    `start` of them were done before the block; they do not count as its speed.
    """
    return _show(what, total, start)


@contextmanager
def counted_stages(what: str) -> Iterator[Callable[[str, int, int | None], None]]:
    """Shows the stages of a task one after the other, such as `reading passages` and `indexing passages`."""
    with ExitStack() as stack:
        running: dict[str, Count] = {}

        def report(stage: str, done: int, total: int | None) -> None:
            if stage not in running:
                stack.close()
                running[stage] = stack.enter_context(counted(f"{stage} {what}".strip(), total))
            running[stage](done)

        yield report
