"""Signals reach what waits, and a process is known to run or not."""

import asyncio
import os
import signal

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
