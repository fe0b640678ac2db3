"""`srl serve`: serve searches over HTTP, and check search servers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from srl.cli import output
from srl.cli.options import Json, read_settings, whole_settings
from srl.errors import EXIT_CHECK_FAILED, UserError

app = typer.Typer(no_args_is_help=True, help="Serve searches over HTTP, and check search servers.")


@app.command()
def retriever(
    index: Annotated[
        list[str],
        typer.Option(
            metavar="[NAME=]DIR",
            help="Index directory (repeatable). The first is the default; the others are named after "
            "their directories unless NAME is given.",
        ),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8000,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0: reachable from the network.")
    ] = "127.0.0.1",
    topk: Annotated[int, typer.Option(min=1, help="Hits per query if a request does not say.")] = 3,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="[NAME.]KEY=VALUE",
            help="Option of the retriever, such as n_threads=4, for one index or all (repeatable).",
            callback=whole_settings,
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Server processes on this port.")] = 1,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Concurrent batches per index; default: as many as its retriever can use.",
        ),
    ] = None,
    cache_mb: Annotated[
        int, typer.Option(min=0, help="Cache of recent answers per process, in MB; 0: none.")
    ] = 128,
    timeout: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="Time-out of a search; then it gets 504.")
    ] = 25.0,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Further host name that requests may use, such as a proxy's (repeatable).",
        ),
    ] = None,
) -> None:
    """Serve indexes at POST /retrieve, until interrupted.

    The URL is printed when the server is ready. /health and /metrics tell the state. If $SRL_SEARCH_TOKEN is
    set, requests must carry it: Authorization: Bearer …. Without a token, a server on loopback refuses
    requests with the host name of another machine, and requests from web pages of other sites.

    \b
    Example:
      srl serve retriever --index my-index --port 8000
    """
    from srl.index import check_index
    from srl.serve.http import is_loopback
    from srl.serve.request import bearer_token
    from srl.serve.server import bind, run_server, run_workers
    from srl.serve.server.run import AppFactory
    from srl.serve.wire import TOKEN_VARIABLE

    token = bearer_token()
    directories = _directories(index)
    manifests = {name: check_index(directory) for name, directory in directories.items()}
    options = {
        name: read_settings(manifest.retriever, _settings_of(name, directories, settings or []))
        for name, manifest in manifests.items()
    }

    def ready(url: str) -> None:
        for name, manifest in manifests.items():
            called = f" as {name}" if len(manifests) > 1 else ""
            size = f"{manifest.passages:,} passages" if manifest.passages else "a live search"
            output.note(f"serving {size} by {manifest.retriever}{called}, index {manifest.digest[:12]}")
        output.line(url, flush=True)

    with bind(host, port) as listener:
        is_local = is_loopback(listener.getsockname()[0])
        if not token and not is_local:
            output.warn(
                f"listening on {host}: anyone who can reach this machine can search without a token; "
                f"to require one, type: export {TOKEN_VARIABLE}=…"
            )
        own_names = [] if is_loopback(host) else [host]
        is_guarded = allow_host or (not token and is_local)
        limits = {
            "topk": topk, "threads": threads, "processes": workers, "cache_bytes": cache_mb << 20,
            "timeout_s": timeout, "token": token,
            "hosts": [*(allow_host or []), *own_names] if is_guarded else None,
        }  # fmt: skip
        factory = AppFactory({name: str(path) for name, path in directories.items()}, options, limits)
        if workers == 1:
            run_server(factory.app(), listener, ready)
        else:
            run_workers(factory, workers, listener, ready)


def _directories(texts: list[str]) -> dict[str, Path]:
    """Directories by name: the NAME before `=`, else the directory's name without other characters.

    Where nothing is left of a name, it is `index`. Raises UserError for a name that comes twice.
    """
    directories: dict[str, Path] = {}
    for text in texts:
        name, sign, rest = text.partition("=")
        if not sign or Path(text).is_dir():
            name, rest = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(text).absolute().name).strip("-._"), text
        name = name or "index"
        if name in directories:
            raise UserError(f"--index {text}: duplicate name {name!r}", hint=f"--index NAME={rest}")
        directories[name] = Path(rest)
    return directories


def _settings_of(index: str, names: Iterable[str], settings: list[str]) -> list[str]:
    """The settings for all indexes and for this one: the longest name that a setting begins with counts."""

    def owner(setting: str) -> str | None:
        return max((name for name in names if setting.startswith(f"{name}.")), key=len, default=None)

    return [setting.removeprefix(f"{index}.") for setting in settings if owner(setting) in (None, index)]


@app.command()
def check(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="URL of a search server, such as http://127.0.0.1:8000.")
    ],
    queries: Annotated[list[str] | None, typer.Option("--query", help="Query to send (repeatable).")] = None,
    topk: Annotated[int, typer.Option("-k", "--topk", min=1, help="Hits per query.")] = 3,
    as_json: Json = False,
) -> None:
    """Check whether a search server can serve episodes; exit code 1 if it cannot.

    \b
    Example:
      srl serve check http://127.0.0.1:8000
    """
    from srl.serve.check import QUERIES, check_server

    report = check_server(url, queries or QUERIES, topk)
    if as_json:
        output.print_json(report)
    else:
        output.line(f"index digest: {report.index_digest or 'unknown'}")
        for problem in report.problems:
            output.line(problem)
        output.line(f"{report.url} {'cannot' if report.problems else 'can'} serve episodes")
    if report.problems:
        raise typer.Exit(EXIT_CHECK_FAILED)
