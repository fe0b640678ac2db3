"""Whether another process of this machine is running."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from srl.process import Process, is_alive, started

MAIN_THREAD_ENDS = """
import ctypes, sys, threading

def tell():
    state = ""
    while state != "Z":
        with open("/proc/self/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
    print("ended", flush=True)
    sys.stdin.read(1)

threading.Thread(target=tell, daemon=True).start()
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are told apart in /proc")
def test_a_process_is_running_until_its_last_thread_has_ended():
    """Until then its files are open, and the locks on them are held."""
    command = [sys.executable, "-c", MAIN_THREAD_ENDS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "ended\n"
        there = Process(Process.here().host, child.pid, started(child.pid))
        assert there.since
        assert there.alive
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(child.pid)
        assert started(child.pid) == ""
        assert there.alive is False
