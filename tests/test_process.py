"""Signals reach what waits, and a process is known to run or not."""

from __future__ import annotations

import asyncio
import os
import selectors
import signal
import sys
import threading

import pytest

from srl import process


def test_a_signal_lets_a_coroutine_clean_up_and_then_ends_the_command() -> None:
    cleaned = []

    async def waits() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    with process.signals_handled(), pytest.raises(KeyboardInterrupt):
        process.run_async(waits())
    assert (cleaned, process.signal_received()) == ([True], signal.SIGTERM)


def test_a_signal_that_does_not_interrupt_a_waiting_loop_wakes_it() -> None:
    """Another thread gets the signal here, as if it had come just before the loop's `select`."""
    main, ended, woken = threading.get_ident(), threading.Event(), []

    async def waits() -> None:
        loop = asyncio.get_running_loop()

        def signals_when_it_waits() -> None:
            while sys._current_frames()[main].f_code is not selectors.DefaultSelector.select.__code__:
                os.sched_yield()
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
            if not ended.wait(20):
                woken.append("by the test")
                loop.call_soon_threadsafe(lambda: None)

        threading.Thread(target=signals_when_it_waits).start()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with process.signals_handled(), pytest.raises(KeyboardInterrupt):
        process.run_async(waits())
    assert woken == []
    assert signal.set_wakeup_fd(-1) == -1
