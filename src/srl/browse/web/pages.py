"""What each page shows: reads the log for one request, and gives a template its values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import duckdb
from starlette.requests import Request

from srl.browse.curve import curves, metric_names, verdicts_over_steps
from srl.browse.diff import PHASES, diff, sides
from srl.browse.filters import FACETS, Filter, facets
from srl.browse.groups import MOST, group, history, in_words, summary
from srl.browse.listing import SORTS, neighbours, page
from srl.browse.runs import runs
from srl.browse.sql import Answer, sql
from srl.browse.token_text import tokenizer_of
from srl.browse.transcript import transcript
from srl.browse.web.charts import OVERVIEW, PANELS, charts, verdict_charts
from srl.browse.web.heat import LEGENDS, Heat, kinds, legend
from srl.browse.web.rendering import LONGEST, environment, turns
from srl.errors import UserError, parsing
from srl.store import TooSlow, find_logs, reading, rows, run_info
from srl.workspace import Workspace

SIZE = 50
"""Rows of a listing on one page."""
_DRAWN = 24
"""The latest runs are drawn; more lines would hide each other."""
MOST_ROWS, QUERY_MEMORY, QUERY_S = 1000, "1GB", 30.0
"""Rows, memory and seconds of an SQL query, which is then stopped."""

CHANGES: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "flipped": lambda row: row["change"] != "same",
    "worse": lambda row: row["em_b"] < row["em_a"],
    "better": lambda row: row["em_b"] > row["em_a"],
    "queries": lambda row: row["queries_changed"],
}
"""The lists of a comparison, each with what a row needs to be on it."""
_ID = re.compile(r"[0-9a-f]{12}")

Values = dict[str, Any]
Log = duckdb.DuckDBPyConnection


class MissingError(UserError):
    """There is no such run or trajectory."""


@dataclass(frozen=True, slots=True)
class Page:
    """A template with its values; `live` pages are asked for again while they are looked at."""

    template: str
    values: Values
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

    def state(self, request: Request) -> str:
        """Changes with every step that is written to a run that the page may show, and when its
        process ends; of `last` also when another run is the latest."""
        name = request.path_params.get("run")
        run_paths = self._runs()
        name = name and self._latest(name)
        paths = run_paths if name is None else {name: run_paths.get(name, self._workspace.runs / name)}
        return json.dumps([(name, _state(path)) for name, path in paths.items()])

    def problem(self, why: str) -> Page:
        """A page that says one line."""
        return Page("problem.html", {"why": why})

    def runs(self, request: Request) -> Page:
        """All runs: a table, and curves with bands over seeds."""
        if not self._runs():
            why = f"no runs in {self._workspace.runs} yet: start one with `srl train`"
            return Page("problem.html", {"why": why}, live=True)
        query = request.query_params.get("q", "")

        def read(log: Log) -> Values:
            table = [row for row in runs(log) if query.lower() in row["run_id"].lower()]
            newest = [row["run_id"] for row in table if row["algo"] != "eval"][-_DRAWN:]
            configs = dict(log.execute("SELECT run_id, config FROM runs").fetchall())
            panels = {
                name: [curve for curve in series if curve.run_id in newest]
                for name, series in curves(log, OVERVIEW).items()
            }
            return {"rows": table[::-1], "charts": charts(panels, configs), "q": query}

        return self._page("runs.html", [self._workspace.runs], read, live=True)

    def run(self, request: Request) -> Page:
        """One run: its curves, its verdicts over steps, the counts of its trajectories, its configuration."""
        run, path = self._run_of(request)
        metric = request.query_params.getlist("metric")

        def read(log: Log) -> Values:
            names = metric_names(log)
            if unknown := [name for name in metric if name not in names]:
                raise MissingError(f"no metric {unknown[0]!r} in this run")
            row = rows(log, "FROM runs")[0]
            return {
                "run": run, "row": row, "metrics": names, "chosen": metric, "facets": facets(log, Filter()),
                "charts": [*charts(curves(log, metric or PANELS)), *verdict_charts(verdicts_over_steps(log))],
                "config": json.dumps(json.loads(row["config"]), indent=2, ensure_ascii=False),
            }  # fmt: skip

        return self._page("run.html", [path], read, live=True)

    def trajectories(self, request: Request) -> Page:
        """The trajectories of a run that match the conditions in the address."""
        run, path = self._run_of(request)
        query = request.query_params
        conditions, sort = _filter(query), query.get("sort") or "-step"
        after, before = query.get("after") or None, query.get("before") or None

        def read(log: Log) -> Values:
            return {
                "page": page(log, conditions.where(), sort, SIZE, after=after, before=before),
                "facets": facets(log, conditions), "facet_names": FACETS, "run": run, "sort": sort,
                "sorts": SORTS, "conditions": _conditions(query), "is_first": not (after or before),
            }  # fmt: skip

        return self._page("trajectories.html", [path], read, live=not (after or before))

    def trajectory(self, request: Request) -> Page:
        """One transcript, with the colours of a value, its group and its neighbours in the listing."""
        run, path = self._run_of(request)
        query = request.query_params
        conditions, sort = _filter(query), query.get("sort") or "-step"

        def read(log: Log) -> Values:
            shown = transcript(log, request.path_params["id"])
            previous, following = neighbours(log, conditions.where(), sort, shown.row)
            available = kinds(shown.steps)
            heat: Heat | None = next((kind for kind in available if kind == query.get("heat")), None)
            [model] = log.execute("SELECT model FROM runs").fetchone() or [""]
            return turns(shown, heat, tokenizer_of(path, model or "") if heat else None) | {
                "run": run, "row": shown.row, "group": [summary(sample) for sample in group(log, shown.row)],
                "previous": previous, "next": following, "conditions": _conditions(query), "heat": heat,
                "available": {kind: LEGENDS[kind] for kind in available},
                "legend": legend(heat) if heat else [],
            }  # fmt: skip

        return self._page("trajectory.html", [path], read)

    def group(self, request: Request) -> Page:
        """The samples of one question in one step, side by side with their advantages."""
        run, path = self._run_of(request)

        def read(log: Log) -> Values:
            samples = group(log, transcript(log, request.path_params["id"]).row)
            pairs = [(sample, summary(sample)) for sample in samples]
            words = in_words([summary_row for _, summary_row in pairs])
            return {"run": run, "row": samples[0].row, "shown": pairs, "words": words}

        return self._page("group.html", [path], read)

    def question(self, request: Request) -> Page:
        """One question in every step of the chosen runs, of all by default."""
        question_id, names = request.query_params.get("id", ""), request.query_params.getlist("run")
        paths = [self._path_of(name) for name in names] or [self._workspace.runs]
        run_names = [*self._runs()]

        def read(log: Log) -> Values:
            table = history(log, question_id)
            if not table:
                raise MissingError(f"no trajectory of the question {question_id!r} in these runs")
            return {"id": question_id, "rows": table, "most": MOST, "known": run_names, "chosen": names}

        if not run_names:
            raise MissingError("no runs yet")
        return self._page("question.html", paths, read)

    def compare(self, request: Request) -> Page:
        """Two steps, of one run or two: which questions flipped, which queries changed."""
        query, names = request.query_params, [*self._runs()]
        if not names:
            raise MissingError("no runs to compare yet")
        name_b = query.get("b") or names[-1]
        name_a = query.get("a") or name_b
        phase, show = query.get("phase") or None, query.get("show") or ""
        pair = [(name_a, _number(query, "step_a")), (name_b, _number(query, "step_b"))]
        start = _number(query, "from") or 0
        if show not in ("", *CHANGES):
            raise UserError(f"no list {show!r}: there are {', '.join(CHANGES)}")

        def read(log: Log) -> Values:
            if pair[0] == pair[1] and pair[0][1] is None:
                pair[0] = (name_a, _earliest(log, phase))
            result = diff(log, *sides(log, pair, phase))
            lists = {name: [row for row in result.changes if fits(row)] for name, fits in CHANGES.items()}
            tab = show or next((name for name, changes in lists.items() if changes), "flipped")
            next_start = start + SIZE if len(lists[tab]) > start + SIZE else None
            return {
                "found": result, "rows": lists[tab][start : start + SIZE], "more": next_start, "show": tab,
                "counts": {name: len(changes) for name, changes in lists.items()},
                "known": names, "phases": PHASES,
            }  # fmt: skip

        return self._page("compare.html", list(dict.fromkeys(map(self._path_of, (name_a, name_b)))), read)

    def sql(self, request: Request) -> Page:
        """A query on the log, whose rows open trajectories."""
        query, names = request.query_params.get("q", "").strip(), [*self._runs()]
        run = request.query_params.get("run") or (names[-1] if names else "")
        values: Values = {"q": query, "run": run, "known": names, "answer": None, "why": "", "warnings": []}
        if query and names:
            paths = [self._workspace.runs] if run == "all" else [self._path_of(run)]
            try:
                answer = _limited(paths, query, values["warnings"].append)
            except UserError as error:
                values["why"] = error.what
            else:
                places = [_place(record, "" if run == "all" else run) for record in answer.records()]
                values |= {"answer": answer, "places": places, "most": MOST_ROWS}
        return Page("sql.html", values)

    def _page(
        self, template: str, paths: Sequence[Path], read: Callable[[Log], Values], live: bool = False
    ) -> Page:
        """The page with what `read` returns of the logs at `paths`, and with the warnings of reading them."""
        warnings: list[str] = []
        values = reading(paths, read, warn=warnings.append)
        return Page(template, values | {"warnings": warnings}, live)

    def _path_of(self, name: str) -> Path:
        """The directory of the run with exactly this name. Raises MissingError."""
        run_paths = self._runs()
        if name not in run_paths:
            raise MissingError(f"no run {name!r} with a log in this workspace")
        return run_paths[name]

    def _runs(self) -> dict[str, Path]:
        """Every run that has a log, in the order of their starts."""
        return {path.name: path for path in self._workspace.all_runs() if find_logs(path)}

    def _run_of(self, request: Request) -> tuple[str, Path]:
        """The run that the address names; `last` is the latest. Raises MissingError."""
        name = self._latest(request.path_params["run"])
        return name, self._path_of(name)

    def _latest(self, name: str) -> str:
        """The name of the latest run for `last`, else `name`."""
        return next(reversed(self._runs()), name) if name == "last" else name


def _state(run: Path) -> list[Any]:
    log = run / "log"
    try:
        places = (log, log / "parts")
        times = [path.stat().st_mtime_ns for path in places if path.exists()]
        return [*times, run_info.status(run_info.load(log))]
    except (UserError, OSError) as error:
        return [str(error)]


def _earliest(log: Log, phase: str | None) -> int | None:
    """The first step of the phase that one run is compared in with itself; None if none."""
    query = "SELECT phase, min(step) FROM raw.trajectories GROUP BY phase"
    first = dict(log.execute(query).fetchall())
    return next((first[name] for name in ([phase] if phase else PHASES) if name in first), None)


def _number(query: Mapping[str, str], name: str) -> int | None:
    """A whole number in the address, None if it is not there. Raises UserError."""
    text = query.get(name) or ""
    if text and not (text.isascii() and text.isdigit()):
        raise UserError(f"{name} {text}: expected a whole number")
    with parsing(name):
        return int(text) if text else None


def _limited(paths: Sequence[Path], query: str, warn: Callable[[str], None]) -> Answer:
    """The first rows of a query, stopped after `QUERY_S`. Raises UserError."""

    def ask(log: Log) -> Answer:
        return sql(log, query, limit=MOST_ROWS, cell=LONGEST)

    try:
        return reading(paths, ask, warn=warn, memory=QUERY_MEMORY, seconds=QUERY_S)
    except TooSlow as error:
        raise UserError(str(error), hint="`srl inspect sql` waits longer") from error


def _place(record: Mapping[str, Any], run: str) -> tuple[str, str] | None:
    """The run and the id of the trajectory that a row of a query is about, if it says so."""
    run_id = record.get("run_id", run)
    for name in ("id", "trajectory_id"):
        value = record.get(name)
        if run_id and isinstance(value, str) and _ID.fullmatch(value):
            return str(run_id), value
    return None


def _conditions(query: Mapping[str, str]) -> dict[str, str]:
    """The conditions of a listing that the address has, to be carried on by links."""
    names = [field.name for field in fields(Filter)]
    return {name: query[name] for name in (*names, "sort") if query.get(name)}


def _filter(query: Mapping[str, str]) -> Filter:
    """The conditions of a listing in an address. Raises UserError."""
    conditions: Values = {name: text for name, text in _conditions(query).items() if name != "sort"}
    return Filter(**conditions | {"hops": _number(query, "hops")})
