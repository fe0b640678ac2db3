"""`srl serve`: answer searches over HTTP, and check a server that does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from srl.cli import output
from srl.errors import EXIT_CHECK_FAILED

if TYPE_CHECKING:
    from srl.serve.check import Report

app = typer.Typer(no_args_is_help=True, help="Answer searches over HTTP.")


@app.command()
def retriever(
    index: Annotated[Path, typer.Option(help="The directory of the index.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes any free one.")] = 8000,
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 opens it to the network.")
    ] = "127.0.0.1",
    topk: Annotated[int, typer.Option(min=1, help="Hits where a request does not say how many.")] = 3,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of the retriever, such as n_threads=4."),
    ] = None,
) -> None:
    """Serve an index at POST /retrieve, until interrupted.

    The URL is printed once requests are taken. /health and /metrics tell how it is.

    \b
    Example:
      srl serve retriever --index my-index --port 8000
    """
    from srl.cli.index import read_settings
    from srl.index import open_index, read_index_manifest
    from srl.serve.client import is_loopback
    from srl.serve.server import bind, create_app, run_server

    options = read_settings(read_index_manifest(index).retriever, settings or [])
    with bind(host, port) as listener:
        opened = open_index(index, options)
        if not is_loopback(listener.getsockname()[0]):
            output.note(f"listening on {host}: whoever can reach this machine can search, without a password")
        output.note(
            f"serving {len(opened):,} passages by {opened.manifest.retriever}, index {opened.digest[:12]}"
        )
        run_server(create_app(opened, topk), listener, lambda url: print(url, flush=True))


@app.command()
def check(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Of a search server, such as http://127.0.0.1:8000.")
    ],
    queries: Annotated[
        list[str] | None, typer.Option("--query", help="What to search for; may come again.")
    ] = None,
    topk: Annotated[int, typer.Option("-k", "--topk", min=1, help="Hits to ask for.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which dialects a search server speaks; exit code 1 when it cannot answer episodes.

    \b
    Example:
      srl serve check http://127.0.0.1:8000
    """
    from srl.serve.check import QUERIES, check_server

    report = check_server(url, queries or QUERIES, topk)
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


def _print(report: Report) -> None:
    words = {True: "yes", False: "no", None: "?"}
    rows = [
        (words[finding.passed], finding.name + (" (required)" if finding.required else ""), finding.detail)
        for finding in report.findings
    ]
    output.table(("holds", "what", "detail"), rows)
    print(f"index digest: {report.index_digest or 'not named'}")
    if report.latency_s:
        print(f"latency: median {report.median_latency_s * 1e3:.1f} ms, {len(report.latency_s)} requests")
    print(f"{report.url} {'conforms' if report.conforms else 'does not conform'}")
