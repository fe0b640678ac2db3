"""What the trajectory log holds: every table and column with its meaning, and the views over the parts.

Four tables lie on disk in parts (`PARTS`), two in files of their own beside them; what people query
(`TABLES`) are views over them. docs/store.md is generated from `TABLES`.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from srl.store.verdict import VERDICT_SQL

_TEXTS = pa.list_(pa.string())
_FLOATS = pa.list_(pa.float32())
_NUMBERS = pa.map_(pa.string(), pa.float64())
_HITS = pa.list_(
    pa.struct(
        [
            ("passage_id", pa.string()),
            ("title", pa.string()),
            ("contents", pa.string()),
            ("url", pa.string()),
            ("score", pa.float64()),
            ("has_answer", pa.bool_()),
        ]
    )
)


@dataclass(frozen=True, slots=True)
class Column:
    """One column and what it means."""

    name: str
    type: pa.DataType
    description: str

    @property
    def sql_type(self) -> str:
        """The type as DuckDB writes it, such as `INTEGER[]`."""
        return sql_type(self.type)


@dataclass(frozen=True, slots=True)
class Table:
    """A table that can be queried; `sql` defines it over the tables on disk (schema `raw`)."""

    name: str
    summary: str
    columns: tuple[Column, ...]
    sql: str


_SQL_TYPES = {
    pa.string(): "VARCHAR",
    pa.bool_(): "BOOLEAN",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.timestamp("us"): "TIMESTAMP",
}


def sql_type(kind: pa.DataType) -> str:
    """DuckDB's name for an Arrow type of this schema."""
    if pa.types.is_map(kind):
        return f"MAP({sql_type(kind.key_type)}, {sql_type(kind.item_type)})"
    if pa.types.is_list(kind):
        return f"{sql_type(kind.value_type)}[]"
    if pa.types.is_struct(kind):
        fields = ", ".join(f"{field.name} {sql_type(field.type)}" for field in kind)
        return f"STRUCT({fields})"
    return _SQL_TYPES[kind]


def _columns(*rows: tuple[str, pa.DataType, str]) -> tuple[Column, ...]:
    return tuple(Column(*row) for row in rows)


_RUN_ID = ("run_id", pa.string(), "The run: the name of its directory.")
_STEP = ("step", pa.int32(), "The training step, from 1; 0 is before the first update, and an evaluation.")
_PHASE = ("phase", pa.string(), "`train`, `val`, `test`, `sft` or `eval`.")
_TRAJECTORY = ("trajectory_id", pa.string(), "The trajectory, `trajectories.id`.")

RUNS = _columns(
    _RUN_ID,
    ("status", pa.string(), "`running`, `finished`, `failed`, `interrupted`, or `unknown` (the writer is "
     "on another machine)."),
    ("preset", pa.string(), "The preset."),
    ("algo", pa.string(), "The algorithm, such as `grpo`; `eval` for an evaluation."),
    ("seed", pa.int64(), "The seed."),
    ("model", pa.string(), "The model that training started from, or that was evaluated."),
    ("index_digest", pa.string(), "The digest of the index at the start."),
    ("srl_version", pa.string(), "The version of srl that wrote the log."),
    ("started", pa.timestamp("us"), "Start (UTC)."),
    ("ended", pa.timestamp("us"), "End (UTC); NULL while the run is not finished."),
    ("resumed", pa.timestamp("us"), "Start of the last session (UTC)."),
    ("earlier_s", pa.float64(), "Seconds of running time before the last session."),
    ("error", pa.string(), "The error that a failed run ended with, on one line; otherwise empty."),
    ("parent", pa.string(), "The run it was derived from, or an empty text."),
    ("config", pa.string(), "The resolved configuration as JSON."),
    ("host", pa.string(), "The machine of the writer."),
    ("pid", pa.int64(), "The process id of the writer."),
    ("path", pa.string(), "The directory of the log."),
)  # fmt: skip

_STEPS = _columns(
    _RUN_ID,
    _STEP,
    _PHASE,
    ("written", pa.timestamp("us"), "When the step was written (UTC)."),
    ("trajectories", pa.int32(), "Number of trajectories."),
    ("metrics", _NUMBERS, "Every metric of the step, by name."),
)  # fmt: skip

_TRAJECTORIES = _columns(
    _RUN_ID,
    ("id", pa.string(), "Twelve hex digits, the same in every run for a phase, step, question and sample."),
    _STEP,
    _PHASE,
    ("position", pa.int32(), "Position in the batch of the step, from 0."),
    ("question_id", pa.string(), "The question's id, unique across data sets; it identifies the group."),
    ("question", pa.string(), "The text of the question."),
    ("prompt", pa.string(), "The chat messages as JSON."),
    ("data_source", pa.string(), "The data set, such as `hotpotqa`."),
    ("split", pa.string(), "The data set's split."),
    ("hops", pa.int32(), "Hops that the question needs, if its metadata says so."),
    ("metadata", pa.string(), "The question's metadata as JSON."),
    ("golden_answers", _TEXTS, "The golden answers."),
    ("sample", pa.int32(), "Index among the samples of the question, from 0."),
    ("attempt", pa.int32(), "How many times the episode was resampled after a fault."),
    ("end", pa.string(), "`answered`, `unanswered`, `truncated` or `failed`."),
    ("answer", pa.string(), "The final answer; NULL if there is none."),
    ("em", pa.float64(), "Exact match: the reward part `em`, else computed; NULL without golden answers."),
    ("f1", pa.float64(), "F1 over words: the reward part `f1`, else computed; NULL without golden answers."),
    ("cover_em", pa.float64(), "1 if the answer contains a golden answer as whole words, else 0; NULL "
     "without golden answers."),
    ("reward", pa.float64(), "The reward, the weighted sum of its parts; NULL if not scored."),
    ("parts", _NUMBERS, "The parts of the reward, unweighted."),
    ("per_turn", pa.list_(pa.float64()), "Rewards per turn, if the reward gives them."),
    ("valid", pa.bool_(), "False if a search, the engine or the reward failed: logged, but excluded from "
     "the loss."),
    ("left_out", pa.bool_(), "True if dynamic sampling left its group out of the update."),
    ("turns", pa.int32(), "Number of generations."),
    ("searches", pa.int32(), "Number of searches, with any outcome."),
    ("valid_actions", pa.int32(), "Number of turns with a valid action."),
    ("valid_searches", pa.int32(), "Number of executed searches."),
    ("malformed", pa.int32(), "Number of calls that could not be read, or that no tool takes."),
    ("protocol", pa.string(), "How policy and tools talked: `tags`, or the format of the model's own calls, "
     "such as `hermes`."),
    ("tokens", pa.int32(), "Policy tokens."),
    ("total_tokens", pa.int32(), "All tokens: prompt, policy and observations."),
    ("seconds", pa.float64(), "Seconds from the prompt to the end, beside the episodes that ran at the "
     "same time; NULL if not known."),
    ("gold_in_passages", pa.bool_(), "Whether a passage that was shown contains a golden answer."),
    ("think_is_open", pa.bool_(), "Whether the rendered prompt ends inside `<think>`."),
    ("index_digest", pa.string(), "The digest of the first index that answered, or an empty text."),
    ("error", pa.string(), "Why the engine did not generate or a reward gave no score, if the episode "
     "failed by that, or an empty text."),
)  # fmt: skip

_VERDICT = Column(
    "verdict",
    pa.string(),
    "`correct`, or the cause of the error: `failed search`, `failed engine`, `failed reward`, "
    "`unanswered`, `no search`, `reader` (a passage that was shown contained a golden answer) or `retriever` "
    "(none did); NULL without golden answers.",
)

_SEGMENTS = _columns(
    _RUN_ID,
    _TRAJECTORY,
    _STEP,
    _PHASE,
    ("position", pa.int32(), "Position in the trajectory, from 0."),
    ("kind", pa.string(), "`prompt`, `policy`, `observation` or `feedback`."),
    ("turn", pa.int32(), "The turn, from 0; `srl inspect show` counts from 1."),
    ("text", pa.string(), "The text."),
    ("token_ids", pa.list_(pa.int32()), "The token ids, as sampled or as encoded."),
    ("mask", pa.int32(), "The response mask of its tokens: 1 for policy segments, else 0."),
    ("logprobs", _FLOATS, "The sampler's log-probability of each token; NULL except for policy segments."),
    ("advantages", _FLOATS, "The advantage of each token; NULL if there is none."),
    ("returns", _FLOATS, "The return of each token; NULL if there is none."),
    ("trainer_logprobs", _FLOATS, "The trainer's log-probability of each token before the update (verl's "
     "`old_log_probs`), at the temperature of the rollout; NULL where training did not compute it: "
     "evaluations, episodes that failed or have no gradient."),
    ("entropies", _FLOATS, "The entropy (nats) of the trainer's distribution that each token was drawn "
     "from, to 11 bits; NULL like `trainer_logprobs`."),
)  # fmt: skip

_SEARCHES = _columns(
    _RUN_ID,
    _TRAJECTORY,
    _STEP,
    _PHASE,
    ("position", pa.int32(), "Position among the searches of the trajectory, from 0."),
    ("turn", pa.int32(), "The turn of the search, from 0."),
    ("tool", pa.string(), "The tool that was called; an empty text if the call could not be read."),
    ("arguments", pa.string(), "The call's arguments as JSON; what was written, if it could not be read."),
    ("retriever", pa.string(), "The named retriever that was called; an empty text for the default one."),
    ("query", pa.string(), "The query."),
    ("status", pa.string(), "`ok`, `empty`, `rejected` (a bad query), `timed_out`, `refused` or `failed`."),
    ("latency_s", pa.float64(), "Seconds, including retries."),
    ("attempts", pa.int32(), "Number of attempts."),
    ("error", pa.string(), "The error, or an empty text."),
    ("index_digest", pa.string(), "The digest of the index that answered."),
    ("shown", pa.int32(), "How many of the passages, from the best, reached the policy; the others did not "
     "fit into the observation."),
    ("cut", pa.string(), "What was shown of the only one, in whole words, if its middle was cut; else NULL."),
)  # fmt: skip
_NESTED_HITS = Column("hits", _HITS, "The returned passages, best first.")
_RETURNED = ("hits", pa.int32(), "Number of returned passages.")
_ABOUT_HITS = _columns(
    ("gold_rank", pa.int32(), "The best rank of a returned passage that contains a golden answer, from 1; "
     "NULL if none does, and without golden answers."),
    ("judged", pa.bool_(), "Whether the question has golden answers."),
    ("repeated", pa.bool_(), "Whether the episode had asked the same query before, ignoring case and outer "
     "spaces."),
)  # fmt: skip
"""What is known of a search without its passages, which most of a log's bytes are."""

_METRICS = _columns(
    _RUN_ID, _STEP, _PHASE,
    ("name", pa.string(), "The metric, such as `critic/score/mean`."),
    ("value", pa.float64(), "The value."),
)  # fmt: skip

_HIT_ROWS = _columns(
    _RUN_ID, _TRAJECTORY, _STEP, _PHASE,
    ("search", pa.int32(), "The search, `searches.position`."),
    ("turn", pa.int32(), "The turn of the search, from 0."),
    ("rank", pa.int32(), "Rank among the hits of the search, from 1."),
    ("passage_id", pa.string(), "The passage's id in the corpus."),
    ("title", pa.string(), "The title."),
    ("contents", pa.string(), "The passage: title on the first line, then the text."),
    ("url", pa.string(), "Where the passage is from; empty if its corpus does not say."),
    ("score", pa.float64(), "The score of the retriever."),
    ("shown", pa.string(), "`whole`, `part` (its middle was cut) or `none` (it did not fit into the "
     "observation)."),
    ("has_answer", pa.bool_(), "Whether it contains a golden answer as whole words, both normalised; of "
     "one that was cut, whether the part that was shown does."),
)  # fmt: skip

_REWARDS = _columns(
    _RUN_ID, _TRAJECTORY, _STEP, _PHASE,
    ("part", pa.string(), "The part, such as `em`."),
    ("value", pa.float64(), "Its unweighted value."),
)  # fmt: skip

_RUN_SPAN = _columns(
    ("steps", pa.int32(), "The last step in the log; NULL before the first."),
    ("written", pa.timestamp("us"), "When the last step was written (UTC)."),
    ("seconds", pa.float64(), "Seconds of running time, without the time between sessions."),
)  # fmt: skip

_PIVOT = {
    "score": ("`critic/score/mean`, the mean of the rewards.", "critic/score/mean"),
    "em": ("`val/em`, `test/em` or `train/em`, by phase.", "val/em", "test/em", "train/em"),
    "f1": ("`val/f1`, `test/f1` or `train/f1`, by phase.", "val/f1", "test/f1", "train/f1"),
    "response_length": ("`response_length/mean`, in tokens.", "response_length/mean"),
    "searches": ("`env/number_of_valid_search`, per trajectory.", "env/number_of_valid_search"),
    "finish_ratio": ("`env/finish_ratio`, the share of trajectories that answered.", "env/finish_ratio"),
    "excluded_share": (
        "`env/excluded_share`, the share of trajectories lost to faults.",
        "env/excluded_share",
    ),
    "entropy": ("`actor/entropy`.", "actor/entropy"),
    "ppo_kl": ("`actor/ppo_kl`.", "actor/ppo_kl"),
    "grad_norm": ("`actor/grad_norm`.", "actor/grad_norm"),
    "seconds": ("`timing_s/step`, the seconds of the step.", "timing_s/step"),
}
"""Columns of `steps`: what each means, and the metrics of which a step has one."""


def _pivot_sql() -> str:
    columns = ""
    for column, (_, *names) in _PIVOT.items():
        values = ", ".join(f"max(metrics['{name}'])" for name in names)
        columns += f", coalesce({values}) AS {column}"
    return (
        "SELECT run_id, step, phase, max(written) AS written, sum(trajectories)::INTEGER AS trajectories"
        f"{columns} FROM raw.steps GROUP BY run_id, step, phase"
    )


_STEP_ROWS = _STEPS[:-1] + _columns(*((name, pa.float64(), text) for name, (text, *_) in _PIVOT.items()))

_RUN_SQL = """
SELECT runs.*, steps, written,
    earlier_s + greatest(epoch(coalesce(ended, written, resumed) - resumed), 0) AS seconds
FROM raw.runs LEFT JOIN (
    SELECT run_id, max(step) AS steps, max(written) AS written FROM raw.steps GROUP BY run_id
) USING (run_id)
"""

_HIT_SQL = """
SELECT run_id, trajectory_id, step, phase, position AS search, turn, rank::INTEGER AS rank,
    hit.passage_id, hit.title, hit.contents, hit.url, hit.score, CASE WHEN rank > shown THEN 'none'
    WHEN cut IS NOT NULL THEN 'part' WHEN shown IS NOT NULL THEN 'whole' END AS shown, hit.has_answer
FROM (
    SELECT *, unnest(hits) AS hit, generate_subscripts(hits, 1) AS rank FROM raw.searches
)
"""

_WATCHES = _columns(
    _RUN_ID,
    ("number", pa.int32(), "From 1, in the order in which they fired."),
    _STEP,
    _PHASE,
    ("watch", pa.string(), "The watch: its name in the section `watch` of the configuration."),
    ("metric", pa.string(), "What it watches."),
    ("value", pa.float64(), "The value; NULL if it was not a finite number."),
    ("bound", pa.float64(), "What the value was compared with; NULL if it was not known yet."),
    ("since", pa.int32(), "The first step that may be bad."),
    ("action", pa.string(), "`note` or `stop`."),
)  # fmt: skip

TABLES: tuple[Table, ...] = (
    Table("runs", "One row per run.", RUNS + _RUN_SPAN, _RUN_SQL),
    Table("steps", "One row per step and phase, with the most common metrics.", _STEP_ROWS, _pivot_sql()),
    Table(
        "metrics", "One row per metric of a step.", _METRICS,
        "SELECT run_id, step, phase, entry.key AS name, entry.value AS value FROM "
        "(SELECT run_id, step, phase, unnest(map_entries(metrics)) AS entry FROM raw.steps)",
    ),
    Table("trajectories", "One row per episode.", (*_TRAJECTORIES, _VERDICT), VERDICT_SQL),
    Table("segments", "One row per segment: consecutive tokens with one author.", _SEGMENTS,
          "SELECT * FROM raw.segments"),
    Table("searches", "One row per search.", (*_SEARCHES, Column(*_RETURNED), *_ABOUT_HITS),
          "SELECT * EXCLUDE (returned) REPLACE (returned AS hits) FROM raw.searches"),
    Table("hits", "One row per returned passage.", _HIT_ROWS, _HIT_SQL),
    Table(
        "rewards", "One row per part of a trajectory's reward.", _REWARDS,
        "SELECT run_id, trajectory_id, step, phase, entry.key AS part, entry.value AS value FROM "
        "(SELECT run_id, id AS trajectory_id, step, phase, unnest(map_entries(parts)) AS entry "
        "FROM raw.trajectories)",
    ),
    Table("watches", "One row each time that a watch fired, in a file of its own.", _WATCHES,
          "SELECT * FROM raw.watches"),
)  # fmt: skip


def _schema(columns: tuple[Column, ...]) -> pa.Schema:
    return pa.schema([(column.name, column.type) for column in columns])


PARTS: dict[str, pa.Schema] = {
    "trajectories": _schema(_TRAJECTORIES),
    "segments": _schema(_SEGMENTS),
    "searches": _schema((*_SEARCHES, _NESTED_HITS, Column("returned", *_RETURNED[1:]), *_ABOUT_HITS)),
    "steps": _schema(_STEPS),
}
"""The tables on disk: one Parquet file each in every part."""

PER_TOKEN = ("advantages", "returns", "trainer_logprobs", "entropies")
"""The columns of `segments` with a number for each policy token that training computed."""

RUN_SCHEMA = _schema(RUNS)
WATCH_SCHEMA = _schema(_WATCHES)
