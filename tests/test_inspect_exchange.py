"""Trajectories for other programs and theirs as a run: what each format keeps, as docs/inspect.md says."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests.store_builder import BERN, KLEE, episode, new_log, policy, question, read, record, search

import srl.store
from srl.browse.inspect_eval import write_eval_logs
from srl.browse.messages import write_messages
from srl.browse.trajectories import Filter
from srl.browse.verl_dump import dump_files, read_dump
from srl.cli import main
from srl.errors import UserError
from srl.protocol import render_information, render_passage
from srl.store import Record
from srl.trajectory import Score, Segment

RUN = "20250102T030405Z-tiny-grpo-s1-00aa"
PAGE = Path(__file__).parent.parent / "docs" / "inspect.md"
HOSTILE = "<script>alert(1)</script>\x00\x1b[31m\u202e🙂 ${x} attachment://0"


def whole(number=0, sample=0, answer="Bern", step=1):
    """An episode whose observation is what the protocol renders of its hits."""
    made = episode(number, sample=sample, answer=answer, step=step)
    hits = made.searches[0].hits
    shown = render_information([render_passage(rank, hit) for rank, hit in enumerate(hits, start=1)])
    made.segments[2] = Segment("observation", made.segments[2].token_ids, shown, 0)
    made.searches = [replace(made.searches[0], shown=len(hits))]
    return made


def facts(made, score) -> dict[str, object]:
    """What the page's table is about, by its rows."""

    def texts(kind):
        return [one.text for one in made.segments if one.kind == kind]

    hits = [hit for one in made.searches for hit in one.hits]
    return {
        "text of the prompt": texts("prompt"), "text of the policy": texts("policy"),
        "text of observations": texts("observation"), "golden answers": made.question.golden_answers,
        "answer": made.answer, "reward": score.value, "queries": [one.query for one in made.searches],
        "passages": [(hit.passage.title, hit.passage.text) for hit in hits],
        "token ids": made.token_ids, "log-probs": made.logprobs,
        "parts of the reward": dict(score.parts), "passage ids": [hit.passage.id for hit in hits],
        "scores of passages": [hit.score for hit in hits],
        "latency": [one.latency_s for one in made.searches],
    }  # fmt: skip


def kept(column: int) -> set[str]:
    """The rows of the page's table that a format does not lose, by its column."""
    text = PAGE.read_text(encoding="utf-8").partition("### Export and import\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {row[0] for row in rows[2:] if row[column] != "lost"}


def messages(folder, *records):
    """The rows that `export` writes of these records."""
    new_log(folder / RUN).write(1, "train", records, {})
    with srl.store.open(folder / RUN) as log:
        assert write_messages(log, Filter(), folder / "out.parquet") == len(records)
    return pq.read_table(folder / "out.parquet").to_pylist()


def test_messages_keep_what_the_page_says(tmp_path):
    made = whole()
    made.segments.append(read("feedback", "try again", 1))
    [row] = messages(tmp_path, record(made))
    prompt, *after = row["messages"]
    assert prompt == made.question.prompt[0]
    assert [one["role"] for one in after] == ["assistant", "tool", "assistant", "user"]
    assert [one["content"] for one in after] == [one.text for one in made.segments[1:]]
    assert (row["answer"], row["reward"], row["golden_answers"]) == ("Bern", 0.125, ["Münchenbuchsee"])
    lost = {
        "parts of the reward",
        "token ids",
        "log-probs",
        "advantages",
        "passage ids",
        "scores of passages",
        "latency",
    }
    assert kept(1).isdisjoint(lost)
    assert not {"parts", "token_ids", "logprobs", "advantages", "hits", "latency_s", "rendered"} & row.keys()


@pytest.mark.parametrize("text", ["Read.\n\n{}\n\nQuestion: who?", "Question: who?\n\n{}", "{}\n\nwho?"])
def test_a_prompt_with_passages_is_exported_as_it_was_read(tmp_path, text):
    shown = "<information>Doc 1(Title: a) b</information>"
    asked = replace(question(), prompt=({"role": "user", "content": text.format("{information}")},))
    made = episode(asked=asked, passages=None)
    rendered = f"<|user|>{text.format(shown)}<|end|>"
    made.segments[0] = Segment("prompt", made.segments[0].token_ids, rendered, 0)
    by_id = {row["id"]: row["messages"] for row in messages(tmp_path, record(made), record(episode(1)))}
    assert by_id[made.id][0] == {"role": "user", "content": text.format(shown)}
    assert by_id[made.id][1]["role"] == "assistant"


def test_a_long_step_is_exported_in_its_order_a_few_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("srl.browse.messages.SIZE", 2)
    order = [7, 3, 9, 0, 5]
    log = new_log(tmp_path / RUN)
    for step in (1, 2):
        log.write(step, "train", [record(episode(number, step=step)) for number in order], {})
    with srl.store.open(tmp_path / RUN) as opened:
        assert write_messages(opened, Filter(), tmp_path / "out.parquet") == 10
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [(row["step"], row["question_id"]) for row in rows] == [
        (s, f"nq-{n}") for s in (1, 2) for n in order
    ]
    assert all(f"painter {row['question_id'][3:]} " in row["messages"][1]["content"] for row in rows)


def test_export_writes_only_what_is_chosen(workspace, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "inspect_ai", None)  # which this format does not need
    log = new_log(workspace / "runs" / RUN)
    for step in (1, 2):
        made = [episode(n, step=step, answer=answer) for n, answer in enumerate(["Bern", "Münchenbuchsee"])]
        log.write(step, "train", [record(one) for one in made], {})
    out = tmp_path / "right.parquet"
    assert main(["inspect", "export", "last", "--em", "1", "-o", str(out)]) == 0
    assert pq.read_table(out)["step"].to_pylist() == [1, 2]
    assert main(["inspect", "export", "--format", "inspect-eval", "-o", str(tmp_path / "logs")]) == 2
    assert not (tmp_path / "logs").exists()


def eval_logs(folder, *records, metrics=None):
    """The logs that inspect_ai reads of these records, by the names of their tasks."""
    log = pytest.importorskip("inspect_ai.log")
    new_log(folder / RUN).write(1, "train", records, metrics or {})
    with srl.store.open(folder / RUN) as connection:
        assert write_eval_logs(connection, Filter(), folder / "out") == len(records)
    return {one.task: log.read_eval_log(one.name) for one in log.list_eval_logs(str(folder / "out"))}


@pytest.mark.slow
@pytest.mark.must_run
def test_a_log_of_inspect_keeps_what_the_page_says(tmp_path):
    made = whole(sample=2)
    [log] = eval_logs(
        tmp_path, record(made), metrics={"actor/entropy": 0.5, "actor/kl": float("nan")}
    ).values()
    [sample] = log.samples
    by_role = {role: [one for one in sample.messages if one.role == role] for role in ("assistant", "tool")}
    results = [one.metadata for one in by_role["tool"]]
    hits = [hit for result in results for hit in result["hits"]]
    after = {
        "text of the prompt": [one.text for one in sample.input],
        "text of the policy": [one.text for one in by_role["assistant"]],
        "text of observations": [one.text for one in by_role["tool"]], "golden answers": tuple(sample.target),
        "answer": sample.scores["em"].answer, "reward": sample.scores["reward"].value,
        "queries": [call.arguments["query"] for one in by_role["assistant"] for call in one.tool_calls or ()],
        "passages": [(hit["title"], hit["contents"].partition("\n")[2]) for hit in hits],
        "parts of the reward": {name: sample.scores[name].value for name in ("em", "format")},
        "scores of passages": [hit["score"] for hit in hits], "passage ids": [hit["id"] for hit in hits],
        "latency": [one["latency_s"] for one in results],
    }  # fmt: skip
    before = facts(made, record(made).score)
    assert kept(2) == after.keys()
    assert after == {name: before[name] for name in after}
    assert (sample.id, sample.epoch, sample.metadata["id"]) == ("nq-0", 3, made.id)
    assert sample.scores["em"].explanation.startswith("reader")
    usage = sample.model_usage["tiny-model"]
    assert (usage.output_tokens, usage.total_tokens) == (made.policy_tokens, len(made.token_ids))
    assert log.eval.metadata["metrics"] == {"actor/entropy": 0.5}
    assert log.eval.metadata["config"] == {"trainer": {"steps": 3}}
    means = {score.name: score.metrics["mean"].value for score in log.results.scores}
    assert (means["reward"], log.eval.model, log.eval.run_id) == (0.125, "tiny-model", RUN)


@pytest.mark.slow
@pytest.mark.must_run
def test_searches_that_failed_and_texts_that_are_hostile_are_samples_as_well(tmp_path):
    failed = episode(1, end="failed", answer=None)
    failed.segments = failed.segments[:2]
    failed.searches = [search("painter 1", status="timed_out", error="no answer in 5 s")]
    odd = episode(2, passages=None, answer=None)
    odd.segments += [read("feedback", "try again", 1), policy(HOSTILE, 2), read("observation", HOSTILE, 2)]
    two = whole(3)
    two.searches.append(search("again", BERN, KLEE))
    bare = replace(episode(4), question=replace(episode(4).question, prompt=()))
    scores = Record(bare, Score(float("inf"), {"made": float("nan")}))
    [log] = eval_logs(tmp_path, record(failed), record(odd), record(two), scores).values()
    by_id = {sample.id: sample for sample in log.samples}
    lost = by_id["nq-1"].messages
    assert (by_id["nq-1"].error.message, lost[-1].error.type) == ("timed_out: no answer in 5 s", "timeout")
    assert lost[-1].tool_call_id == lost[-2].tool_calls[0].id
    shown = by_id["nq-2"].messages
    assert [one.role for one in shown] == ["user", "assistant", "user", "assistant", "tool"]
    assert shown[3].text == shown[4].text == HOSTILE
    calls, *results = by_id["nq-3"].messages[1:4]
    assert [one.tool_call_id for one in results] == [call.id for call in calls.tool_calls]
    assert [one.text for one in results] == [two.segments[2].text, ""]
    assert by_id["nq-4"].messages[0].text == bare.segments[0].text
    assert not {"reward", "made"} & by_id["nq-4"].scores.keys()


@pytest.mark.slow
@pytest.mark.must_run
def test_each_step_is_a_log_and_a_large_one_has_several(tmp_path, monkeypatch):
    inspect_log = pytest.importorskip("inspect_ai.log")
    monkeypatch.setattr("srl.browse.messages.SIZE", 2)
    log = new_log(tmp_path / RUN)
    for step in (1, 2):
        log.write(step, "train", [record(episode(n, step=step)) for n in range(3)], {})
    with srl.store.open(tmp_path / RUN) as connection:
        assert write_eval_logs(connection, Filter(), tmp_path / "out") == 6
    tasks = {one.task: one.name for one in inspect_log.list_eval_logs(str(tmp_path / "out"))}
    counts = {task: len(inspect_log.read_eval_log(name).samples) for task, name in tasks.items()}
    assert counts == {
        f"train-step-{step}{part}": n for step in (1, 2) for part, n in (("", 2), ("-part-2", 1))
    }


def write_dump(folder, made, step=1):
    """A file that verl writes of episodes: text only."""
    folder.mkdir(exist_ok=True)
    file = folder / f"{step}.jsonl"
    rows = [
        {
            "input": one.segments[0].text, "output": "".join(part.text for part in one.segments[1:]),
            "gts": {"target": list(one.question.golden_answers)}, "score": 0.125, "step": one.step,
            "uid": "a_0_0", **record(one).score.parts,
        }
        for one in made
    ]  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_an_imported_dump_keeps_what_the_page_says(tmp_path):
    made = whole()
    (found,) = read_dump(write_dump(tmp_path / "dump", [made]))
    before, after = facts(made, record(made).score), facts(found.trajectory, found.score)
    assert {name for name in before if after[name] == before[name]} == kept(3)
    assert found.advantages is None
    assert (found.trajectory.end, found.trajectory.valid_searches, found.trajectory.valid_actions) == (
        "answered",
        1,
        2,
    )


def test_groups_of_a_dump_are_those_of_the_same_prompt(tmp_path):
    made = [whole(0, 0), whole(1), whole(0, 1, "Münchenbuchsee")]
    found = [one.trajectory for one in read_dump(write_dump(tmp_path / "dump", made))]
    assert [(one.question.text[-7], one.sample) for one in found] == [("0", 0), ("1", 0), ("0", 1)]
    assert found[0].question.id == found[2].question.id != found[1].question.id


def test_queries_and_answers_of_verls_tool_agents_are_read(tmp_path):
    call = '<tool_call>{"name": "search", "arguments": {"query_list": ["a", "b"]}}</tool_call>'
    answer = 'user\n<tool_response>{"result": "Bern"}</tool_response>\nassistant\nAnswer: Bern'
    output = f"I look.\n{call}\n{answer}"
    line = {"input": "user\nWho?\nassistant\n", "output": output, "gts": "Bern", "score": None}
    (tmp_path / "7.jsonl").write_text(json.dumps(line) + "\n")
    (found,) = read_dump(tmp_path / "7.jsonl")
    assert [(one.query, one.turn) for one in found.trajectory.searches] == [("a", 0), ("b", 0)]
    assert (found.trajectory.question.golden_answers, found.score) == (("Bern",), None)
    assert "".join(one.text for one in found.trajectory.segments[1:]) == output


def test_import_makes_a_run_that_the_other_commands_show(workspace, tmp_path, capsys):
    for step in (1, 2):
        write_dump(tmp_path / "dump", [whole(0, step=step), whole(1, step=step)], step)
    assert main(["inspect", "import", str(tmp_path / "dump")]) == 0
    capsys.readouterr()
    query = "SELECT step, count(*) AS n, min(gold_rank) AS gold FROM searches GROUP BY step ORDER BY step"
    assert main(["inspect", "sql", query, "--json"]) == 0
    rows = [tuple(json.loads(line).values()) for line in capsys.readouterr().out.splitlines()]
    assert rows == [(1, 2, 1), (2, 2, 1)]


@pytest.mark.parametrize(
    "line",
    [b"{", b'{"input": "x", "output": "y", "gts": []}', b"[]", '{"input": "é'.encode()[:-1],
     b'{"input": "x", "output": "y", "gts": [], "score": "high"}'],
)  # fmt: skip
def test_a_line_that_verl_did_not_write_is_named_and_no_run_is_made(workspace, tmp_path, capsys, line):
    file = write_dump(tmp_path / "dump", [whole()])
    file.write_bytes(file.read_bytes() + line + b"\n")
    assert main(["inspect", "import", str(tmp_path / "dump")]) == 2
    err = capsys.readouterr().err
    assert "line 2" in err
    assert err.count("\n") == 1
    assert not (workspace / "runs").exists()
    with pytest.raises(UserError):
        dump_files(tmp_path)
