"""`srl serve`: serve searches over HTTP, and check search servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from srl.cli import output
from srl.cli.options import Json, RetrieverSettings, read_settings
from srl.errors import EXIT_CHECK_FAILED

app = typer.Typer(no_args_is_help=True, help="Serve searches over HTTP, and check search servers.")


@app.command()
def retriever(
    index: Annotated[Path, typer.Option(metavar="DIR", help="Index directory.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8000,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0: reachable from the network.")
    ] = "127.0.0.1",
    topk: Annotated[int, typer.Option(min=1, help="Hits per query if a request does not say.")] = 3,
    settings: RetrieverSettings = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Server processes on this port.")] = 1,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Concurrent batches; default: as many as the retriever can use."),
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
    """Serve an index at POST /retrieve, until interrupted.

    The URL is printed when the server is ready. /health and /metrics tell the state. If $SRL_SEARCH_TOKEN is
    set, requests must carry it: Authorization: Bearer …. Without a token, a server on loopback refuses
    requests with the host name of another machine, and requests from web pages of other sites.

    \b
    Example:
      srl serve retriever --index my-index --port 8000
    """
    from srl.browse.formatting import counted
    from srl.index import check_index
    from srl.serve.http import is_loopback
    from srl.serve.request import bearer_token
    from srl.serve.server import bind, run_server, run_workers
    from srl.serve.server.run import AppFactory
    from srl.serve.wire import TOKEN_VARIABLE

    token, manifest = bearer_token(), check_index(index)
    options = read_settings(manifest.retriever, settings or [])

    def ready(url: str) -> None:
        size = counted(manifest.passages, "passage") if manifest.passages else "a live search"
        output.note(f"serving {size} by {manifest.retriever}, index {manifest.digest[:12]}")
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
        factory = AppFactory(str(index), options, limits)
        if workers == 1:
            run_server(factory.app(), listener, ready)
        else:
            run_workers(factory, workers, listener, ready)


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
