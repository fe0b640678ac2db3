"""`srl serve`: serve searches over HTTP, and check search servers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from srl.cli import output
from srl.cli.options import Json, whole_settings
from srl.errors import EXIT_CHECK_FAILED, UserError
from srl.safe import keep_secret, refuse_credentials

if TYPE_CHECKING:
    import socket

    from srl.serve.check import ServerCheck
    from srl.serve.server.app import IndexSource, ServerSettings
    from srl.serve.server.replicas import Facts

TOKEN_VARIABLE = "SRL_SEARCH_TOKEN"

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
    replicas: Annotated[int, typer.Option(min=1, max=64, help="Server processes on this port.")] = 1,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Concurrent batches per index; default: as many as its retriever can use.",
        ),
    ] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Maximum queries per batch.")] = 256,
    batch_wait_ms: Annotated[
        float,
        typer.Option(
            min=0, max=1000, help="Batching delay: how long a query at an idle index waits for others."
        ),
    ] = 0.0,
    cache_mb: Annotated[
        int, typer.Option(min=0, help="Cache of recent answers per process, in MB; 0: none.")
    ] = 128,
    max_queries: Annotated[int, typer.Option(min=1, help="Maximum queries per request.")] = 1024,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Maximum size of a request, in MB.")] = 4,
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Maximum queued queries per index; further requests get 503.")
    ] = 8192,
    timeout: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="Time-out of a search; then it gets 504.")
    ] = 25.0,
    token_env: Annotated[
        str,
        typer.Option(metavar="NAME", help="Environment variable with the token that requests must carry."),
    ] = TOKEN_VARIABLE,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Further host name that requests may use, such as a proxy's (repeatable).",
        ),
    ] = None,
    log_json: Annotated[
        bool, typer.Option("--log-json", help="Log each request to stderr as a line of JSON.")
    ] = False,
    log_queries: Annotated[
        bool, typer.Option("--log-queries", help="The same, including the queries.")
    ] = False,
) -> None:
    """Serve indexes at POST /retrieve, until interrupted.

    The URL is printed when the server is ready. /docs describes the API, /health and /metrics the state. If
    $SRL_SEARCH_TOKEN is set, requests must carry it: Authorization: Bearer …. Without a token, a server on
    loopback refuses requests with the host name of another machine, and requests from web pages of other
    sites.

    \b
    Example:
      srl serve retriever --index my-index --port 8000
    """
    from srl.serve.server import bind
    from srl.serve.server.app import ServerSettings
    from srl.serve.wire import Limits

    token = _token(token_env)
    limits = Limits(
        queries=max_queries,
        body_bytes=max_body_mb << 20,
        waiting=max_waiting,
        timeout_s=timeout,
        topk=max(topk, Limits().topk),
        hits=max(topk * max_queries, Limits().hits),
    )
    directories = _named(index)
    with bind(host, port) as listener:
        address = listener.getsockname()[0]
        serving = ServerSettings(
            indexes={name: _source(name, directories, settings or []) for name in directories},
            topk=topk,
            limits=limits,
            threads=threads,
            max_batch=max_batch,
            batch_wait_s=batch_wait_ms / 1000,
            cache_bytes=cache_mb << 20,
            token=token,
            hosts=_hosts(host, address, token, allow_host or []),
            log_requests=log_json,
            log_queries=log_queries,
        )
        _warn(host, address, token)
        _run(serving, replicas, listener)


def _run(serving: ServerSettings, replicas: int, listener: socket.socket) -> None:
    """Serve from this process, or from several replicas."""
    from srl.serve.server import run_replicas, run_server
    from srl.serve.server.app import facts_of

    if replicas == 1:
        opened = {}
        for name in serving.indexes:
            opened[name] = serving.open(name)
            _say(serving, name, facts_of(opened[name]))
        run_server(serving.app(opened), listener, lambda url: output.line(url, flush=True))
        return

    def ready(url: str, facts: Facts) -> None:
        for name, index in facts.items():
            _say(serving, name, index, replicas)
        output.line(url, flush=True)

    cores = len(os.sched_getaffinity(0))
    if replicas > cores:
        output.note(f"{replicas} replicas on {cores} cores: more replicas than cores are not faster")
    run_replicas(serving, replicas, listener, ready, output.note)


def _token(variable: str) -> str:
    """The token from the environment. Raises UserError if it is missing or cannot be sent in a header."""
    keep_secret([variable])
    token = os.environ.get(variable, "").strip()
    if not token and variable != TOKEN_VARIABLE:
        raise UserError(f"${variable} has no token; type: export {variable}=…")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(
            f"${variable} contains characters that a header cannot carry; expected ASCII without spaces"
        )
    return token


def _hosts(host: str, address: str, token: str, allowed: list[str]) -> tuple[str, ...] | None:
    """The host names that requests may use besides those of loopback; None: any."""
    from srl.serve.server.auth import host_name
    from srl.serve.wire import is_loopback

    if not allowed and (token or not is_loopback(address)):
        return None
    return tuple(map(host_name, allowed if is_loopback(host) else [*allowed, host]))


def _named(given: list[str]) -> dict[str, Path]:
    """Directories by name: the NAME before `=`, else the directory's name without other characters.

    Where nothing is left of a name, it is `index`. Raises UserError for a name that comes twice.
    """
    named: dict[str, Path] = {}
    for one in given:
        name, sign, rest = one.partition("=")
        if not sign or Path(one).is_dir():
            name, rest = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(one).absolute().name).strip("-._"), one
        name = name or "index"
        if name in named:
            raise UserError(f"--index {one}: duplicate name {name!r}; give another: --index NAME={rest}")
        named[name] = Path(rest)
    return named


def _source(name: str, names: Mapping[str, Path], settings: list[str]) -> IndexSource:
    """An index with the settings for all indexes and for this one. Raises UserError if there is no index."""
    from srl.cli.options import read_settings
    from srl.index import check_index
    from srl.serve.server.app import IndexSource

    mine = [one.removeprefix(f"{name}.") for one in settings if _owner(one, names) in (None, name)]
    manifest = check_index(names[name])
    return IndexSource(str(names[name]), read_settings(manifest.retriever, mine))


def _owner(setting: str, names: Iterable[str]) -> str | None:
    """The index that a setting is for: the one with the longest name that it begins with; None: all."""
    return max((name for name in names if setting.startswith(f"{name}.")), key=len, default=None)


def _say(serving: ServerSettings, name: str, index: Mapping[str, Any], replicas: int = 1) -> None:
    what = "a live search" if index["live"] else f"{index['passages']:,} passages"
    called = f" as {name}" if len(serving.indexes) > 1 else ""
    many = f", {replicas} replicas" if replicas > 1 else ""
    output.note(f"serving {what} by {index['retriever']}{called}, index {index['digest'][:12]}{many}")


def _warn(host: str, address: str, token: str) -> None:
    """Warn about an open server, even with -q."""
    from srl.serve.wire import is_loopback

    if not token and not is_loopback(address):
        output.warn(
            f"listening on {host}: anyone who can reach this machine can search without a token; "
            f"to require one, type: export {TOKEN_VARIABLE}=…"
        )


@app.command()
def check(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="URL of a search server, such as http://127.0.0.1:8000.")
    ],
    queries: Annotated[list[str] | None, typer.Option("--query", help="Query to send (repeatable).")] = None,
    topk: Annotated[int, typer.Option("-k", "--topk", min=1, help="Hits per query.")] = 3,
    as_json: Json = False,
) -> None:
    """Check which protocol dialects a search server supports; exit code 1 if it cannot serve episodes.

    \b
    Example:
      srl serve check http://127.0.0.1:8000
    """
    from srl.serve.check import QUERIES, check_server
    from srl.serve.client.request import bearer_token

    refuse_credentials("URL", url)
    report = check_server(url, queries or QUERIES, topk, token=bearer_token())
    if as_json:
        output.print_json(
            {
                "url": report.url,
                "conforms": report.conforms,
                "index_digest": report.index_digest,
                "median_latency_s": report.median_latency_s,
                "findings": report.findings,
            }
        )
    else:
        _print(report)
    if not report.conforms:
        raise typer.Exit(EXIT_CHECK_FAILED)


def _print(report: ServerCheck) -> None:
    words = {True: "yes", False: "no", None: "?"}
    rows = [
        (words[finding.passed], finding.name + (" (required)" if finding.required else ""), finding.detail)
        for finding in report.findings
    ]
    output.table(("holds", "what", "detail"), rows)
    output.line(f"index digest: {report.index_digest or 'unknown'}")
    if report.latency_s:
        milliseconds = report.median_latency_s * 1e3
        output.line(f"latency: median {milliseconds:.1f} ms, {len(report.latency_s)} requests")
    output.line(f"{report.url} {'conforms' if report.conforms else 'does not conform'}")
