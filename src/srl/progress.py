"""How far long work is, told to whoever shows it: the command has a bar for that, a library call nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

Count = Callable[[int], None]
"""Called with how many are done so far."""
Show = Callable[[str, int | None], AbstractContextManager[Count]]
"""Shows a work (its name, how many there are to do, None where nobody knows) for as long as it lasts."""


def _unseen(what: str, total: int | None) -> AbstractContextManager[Count]:
    return nullcontext(lambda done: None)


_show: Show = _unseen


def show_with(show: Show | None) -> None:
    """Let `show` show all that is counted from here on; None: nobody does."""
    global _show
    _show = show or _unseen


def counted(what: str, total: int | None = None) -> AbstractContextManager[Count]:
    """The work inside is shown; what this gives is called with how many are done so far."""
    return _show(what, total)


@contextmanager
def counted_stages(what: str) -> Iterator[Callable[[str, int, int | None], None]]:
    """The stages of one work, `reading passages` and then `indexing passages`, one after the other."""
    with ExitStack() as stack:
        running: dict[str, Count] = {}

        def report(stage: str, done: int, total: int | None) -> None:
            if stage not in running:
                stack.close()
                running[stage] = stack.enter_context(counted(f"{stage} {what}".strip(), total))
            running[stage](done)

        yield report
