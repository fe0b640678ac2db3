"""What each page shows: reads the log for one request, and gives a template its values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import duckdb
from starlette.requests import Request

from srl.browse.curve import curves, metric_names
from srl.browse.diff import PHASES, diff, sides
from srl.browse.groups import MOST, advantage, history, in_words, siblings, summary
from srl.browse.listing import FACETS, SORTS, facets, neighbours, page
from srl.browse.runs import runs as run_rows
from srl.browse.sql import Answer, sql
from srl.browse.token_text import tokenizer_of
from srl.browse.trajectories import Filter
from srl.browse.transcript import Transcript, transcript
from srl.browse.web.heat import LEGENDS, Heat, kinds, legend
from srl.browse.web.parts import OVERVIEW, PANELS, charts, turns
from srl.browse.web.rendering import LONGEST, environment
from srl.browse.web.seeds import bands
from srl.errors import UserError, parsing
from srl.store import TooSlow, find_logs, reading, rows, run_info
from srl.workspace import Workspace

T = TypeVar("T")
SIZE = 50
"""Rows of a listing on one page."""

_DRAWN = 24
"""The latest runs are drawn; more lines would hide each other."""
MOST_ROWS = 1000
"""Rows of an SQL query that are shown."""
MOST_BYTES = 16 << 20
QUERY_MEMORY = "1GB"
QUERY_S = 30.0
"""Bytes, memory and seconds of an SQL query, which is then stopped."""

CHANGES: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "lost": lambda row: row["em_b"] < row["em_a"],
    "gained": lambda row: row["em_b"] > row["em_a"],
    "queries": lambda row: row["queries_changed"],
}
"""The lists of a comparison, each with what a row needs to be on it."""
_ID = re.compile(r"[0-9a-f]{12}")
_NUMBERS = {"hops", "min_searches", "max_searches"}


class MissingError(UserError):
    """There is no such run or trajectory."""


@dataclass(frozen=True, slots=True)
class Page:
    """A template with its values; `live` pages are asked for again while they are looked at."""

    template: str
    values: dict[str, Any]
    live: bool = False


class Pages:
    """The pages over the runs of one workspace; each is a function of the request alone."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._templates = environment()

    def html(self, shown: Page, request: Request) -> str:
        """The page as HTML."""
        template = self._templates.get_template(shown.template)
        return template.render(path=request.url.path, live=shown.live, **{"warnings": []} | shown.values)

    def state(self, run: str | None) -> str:
        """Changes with every step and rescore that is written to `run` (None: to any run), and when its
        process ends; of `last` also when another run is the latest."""
        name = run and self._latest(run)
        paths = self._runs() if name is None else {name: self._workspace.runs / name}
        return json.dumps([(name, _state(path)) for name, path in paths.items()])

    def problem(self, why: str) -> Page:
        """A page that says one line."""
        return Page("problem.html", {"why": why})

    def runs(self, request: Request) -> Page:
        """All runs: a table, and curves with bands over seeds."""
        if not self._runs():
            why = f"no runs in {self._workspace.runs} yet: start one with `srl train`"
            return Page("problem.html", {"why": why}, live=True)
        wanted = request.query_params.get("q", "")
        warnings: list[str] = []

        def read(log: duckdb.DuckDBPyConnection) -> dict[str, Any]:
            found = [row for row in run_rows(log) if wanted.lower() in row["run_id"].lower()]
            drawn = [row["run_id"] for row in found if row["algo"] != "eval"][-_DRAWN:]
            configs = {row["run_id"]: row for row in rows(log, "SELECT run_id, config FROM runs")}
            series = curves(log, OVERVIEW)
            panels = {
                name: bands([one for one in some if one.run_id in drawn], configs)
                for name, some in series.items()
            }
            return {"rows": found[::-1], "panels": charts(panels), "q": wanted, "drawn": len(drawn)}

        return Page("runs.html", self._read(self._all(), read, warnings) | {"warnings": warnings}, live=True)

    def run(self, request: Request) -> Page:
        """One run: its curves, the counts of its trajectories, its configuration."""
        run, path = self._chosen(request)
        metric = request.query_params.getlist("metric")
        warnings: list[str] = []

        def read(log: duckdb.DuckDBPyConnection) -> dict[str, Any]:
            names = metric_names(log)
            unknown = [name for name in metric if name not in names]
            if unknown:
                raise MissingError(f"no metric {unknown[0]!r} in this run")
            panels = {name: bands(some, {}) for name, some in curves(log, metric or PANELS).items()}
            return {
                "row": rows(log, "FROM runs")[0], "panels": charts(panels), "metrics": names,
                "chosen": metric, "facets": facets(log, Filter()),
            }  # fmt: skip

        values = self._read([path], read, warnings)
        config = json.dumps(json.loads(values["row"]["config"]), indent=2, ensure_ascii=False)
        return Page("run.html", values | {"run": run, "config": config, "warnings": warnings}, live=True)

    def trajectories(self, request: Request) -> Page:
        """The trajectories of a run that match the conditions in the address."""
        run, path = self._chosen(request)
        given = request.query_params
        chosen, sort = _filter(given), given.get("sort") or "-step"
        after, before = given.get("after") or None, given.get("before") or None
        warnings: list[str] = []

        def read(log: duckdb.DuckDBPyConnection) -> dict[str, Any]:
            listed = page(log, chosen, sort, SIZE, after=after, before=before)
            return {"page": listed, "facets": facets(log, chosen)}

        values = self._read([path], read, warnings)
        conditions = _conditions(given)
        return Page(
            "trajectories.html",
            values
            | {
                "run": run, "sort": sort, "sorts": SORTS, "conditions": conditions, "warnings": warnings,
                "facet_names": FACETS, "is_first": not (after or before),
            },
            live=not (after or before),
        )  # fmt: skip

    def trajectory(self, request: Request) -> Page:
        """One transcript, with the colours of a value, its siblings and its neighbours in the listing."""
        run, path = self._chosen(request)
        given, wanted = request.query_params, request.path_params["id"]
        chosen, sort = _filter(given), given.get("sort") or "-step"
        warnings: list[str] = []

        def read(log: duckdb.DuckDBPyConnection) -> dict[str, Any]:
            shown = _found(log, wanted)
            previous, following = neighbours(log, chosen, sort, shown.row)
            model = rows(log, "SELECT model FROM runs")[0]["model"]
            group = siblings(log, shown.row)
            return {
                "shown": shown, "model": model, "group": group, "previous": previous, "next": following,
            }  # fmt: skip

        values = self._read([path], read, warnings)
        shown: Transcript = values["shown"]
        available = kinds(shown.steps)
        heat: Heat | None = next((kind for kind in available if kind == given.get("heat")), None)
        return Page(
            "trajectory.html",
            values
            | turns(shown, heat, tokenizer_of(path, values["model"]) if heat else None)
            | {
                "run": run, "row": shown.row, "conditions": _conditions(given), "heat": heat, "sort": sort,
                "available": {kind: LEGENDS[kind] for kind in available}, "advantage": advantage,
                "legend": legend(heat) if heat else [], "warnings": warnings,
            },
        )  # fmt: skip

    def siblings(self, request: Request) -> Page:
        """The samples of one question in one step, side by side with their advantages."""
        run, path = self._chosen(request)
        warnings: list[str] = []

        def read(log: duckdb.DuckDBPyConnection) -> list[Transcript]:
            return siblings(log, _found(log, request.path_params["id"]).row)

        group = self._read([path], read, warnings)
        columns = [{"row": one.row, "advantage": advantage(one), **turns(one)} for one in group]
        return Page(
            "siblings.html",
            {
                "run": run,
                "row": group[0].row,
                "columns": columns,
                "spread": in_words([summary(one) for one in group]),
                "warnings": warnings,
            },
        )

    def question(self, request: Request) -> Page:
        """One question in every step of the chosen runs, of all by default."""
        wanted, names = request.query_params.get("id", ""), request.query_params.getlist("run")
        known = self._runs()
        paths = [self._named(name) for name in names] if names else self._all()
        warnings: list[str] = []
        found = self._read(paths, lambda log: history(log, wanted), warnings) if known else []
        if not found:
            raise MissingError(f"no trajectory of the question {wanted!r} in these runs")
        return Page(
            "question.html",
            {
                "id": wanted,
                "rows": found,
                "most": MOST,
                "known": [*known],
                "chosen": names,
                "warnings": warnings,
            },
        )

    def compare(self, request: Request) -> Page:
        """Two steps, of one run or two: which questions flipped, which queries changed."""
        given, known = request.query_params, self._runs()
        if not known:
            raise MissingError("no runs to compare yet")
        name_b = given.get("b") or next(reversed(known))
        name_a = given.get("a") or name_b
        paths = dict.fromkeys([self._named(name_a), self._named(name_b)])
        show, start = given.get("show") or "lost", _number(given, "from") or 0
        if show not in CHANGES:
            raise UserError(f"no list {show!r}: there are {', '.join(CHANGES)}")
        warnings: list[str] = []

        def read(log: duckdb.DuckDBPyConnection) -> dict[str, Any]:
            asked = [(name_a, _number(given, "step_a")), (name_b, _number(given, "step_b"))]
            if asked[0] == asked[1] and asked[0][1] is None:
                asked[0] = (name_a, _earliest(log, given.get("phase") or None))
            found = diff(log, *sides(log, asked, given.get("phase") or None))
            lists = {name: [row for row in found.changes if fits(row)] for name, fits in CHANGES.items()}
            more = start + SIZE if len(lists[show]) > start + SIZE else None
            counts = {name: len(some) for name, some in lists.items()}
            return {"found": found, "rows": lists[show][start : start + SIZE], "more": more, "counts": counts}

        values = self._read([*paths], read, warnings)
        return Page(
            "compare.html",
            values | {"show": show, "known": [*known], "phases": PHASES, "warnings": warnings},
        )

    def sql(self, request: Request) -> Page:
        """A query on the log, whose rows open trajectories."""
        query, known = request.query_params.get("q", "").strip(), self._runs()
        run = request.query_params.get("run") or (next(reversed(known)) if known else "")
        values: dict[str, Any] = {"q": query, "run": run, "known": [*known], "answer": None, "why": ""}
        warnings: list[str] = []
        if query and known:
            paths = self._all() if run == "all" else [self._named(run)]
            try:
                answer = _limited(paths, query, warnings.append)
            except UserError as error:
                values["why"] = re.sub("[;,] (or )?add --unsafe.*", "", str(error))
            else:
                only = "" if run == "all" else run
                places = [_place(record, only) for record in answer.records()]
                values |= {"answer": answer, "places": places, "most": MOST_ROWS}
        return Page("sql.html", values | {"warnings": warnings})

    def _named(self, name: str) -> Path:
        """The directory of the run with exactly this name. Raises MissingError."""
        known = self._runs()
        if name not in known:
            raise MissingError(f"no run {name!r} with a log in this workspace")
        return known[name]

    def _runs(self) -> dict[str, Path]:
        """Every run that has a log, in the order of their starts."""
        return {path.name: path for path in self._workspace.all_runs() if find_logs(path)}

    def _all(self) -> list[Path]:
        """What to read for all runs: their folder, of which copies of a run are left out."""
        return [self._workspace.runs]

    def _chosen(self, request: Request) -> tuple[str, Path]:
        """The run that the address names; `last` is the latest. Raises MissingError."""
        name = self._latest(request.path_params["run"])
        return name, self._named(name)

    def _latest(self, name: str) -> str:
        """The name of the latest run for `last`, else `name`."""
        return next(reversed(self._runs()), name) if name == "last" else name

    def _read(
        self,
        paths: Any,
        read: Callable[[duckdb.DuckDBPyConnection], T],
        warnings: list[str],
    ) -> T:
        return reading(list(paths), read, warn=warnings.append)


def _state(run: Path) -> list[Any]:
    log = run / "log"
    try:
        places = (log, log / "parts", log / "rescores")
        times = [path.stat().st_mtime_ns for path in places if path.exists()]
        return [*times, run_info.status(run_info.load(log))]
    except (UserError, OSError) as error:
        return [str(error)]


def _earliest(log: duckdb.DuckDBPyConnection, phase: str | None) -> int | None:
    """The first step, not pruned, of the phase that one run is compared in with itself; None if none."""
    query = "SELECT phase, min(step) AS step FROM raw.trajectories GROUP BY phase"
    first = {row["phase"]: row["step"] for row in rows(log, query)}
    return next((first[name] for name in ([phase] if phase else PHASES) if name in first), None)


def _number(given: Mapping[str, str], name: str) -> int | None:
    """A whole number in the address, None if it is not there. Raises UserError."""
    text = given.get(name) or ""
    if text and not (text.isascii() and text.isdigit()):
        raise UserError(f"{name} {text}: expected a whole number")
    with parsing(name):
        return int(text) if text else None


def _limited(paths: Sequence[Path], query: str, warn: Callable[[str], None]) -> Answer:
    """The first rows of a query, stopped after `QUERY_S`. Raises UserError."""

    def ask(log: duckdb.DuckDBPyConnection) -> Answer:
        return sql(log, query, limit=MOST_ROWS, cell=LONGEST, most_bytes=MOST_BYTES)

    try:
        return reading(paths, ask, warn=warn, memory=QUERY_MEMORY, seconds=QUERY_S)
    except TooSlow as error:
        raise UserError(f"{error}; `srl inspect sql` waits longer") from error


def _place(record: Mapping[str, Any], run: str) -> tuple[str, str] | None:
    """The run and the id of the trajectory that a row of a query is about, if it says so."""
    run_id = record.get("run_id", run)
    for name in ("id", "trajectory_id"):
        value = record.get(name)
        if run_id and isinstance(value, str) and _ID.fullmatch(value):
            return str(run_id), value
    return None


def _conditions(given: Mapping[str, str]) -> dict[str, str]:
    """The conditions of a listing that the address has, to be carried on by links."""
    names = [field.name for field in fields(Filter)]
    return {name: given[name] for name in (*names, "sort") if given.get(name)}


def _filter(given: Mapping[str, str]) -> Filter:
    """The conditions of a listing in an address. Raises UserError."""
    conditions: dict[str, Any] = {}
    for name, text in _conditions(given).items():
        if name != "sort":
            conditions[name] = _number(given, name) if name in _NUMBERS else text
    if "failed" in conditions:
        conditions["failed"] = True
    return Filter(**conditions)


def _found(log: duckdb.DuckDBPyConnection, wanted: str) -> Transcript:
    try:
        return transcript(log, wanted)
    except UserError as error:
        raise MissingError(f"no trajectory {wanted!r} in this run") from error
