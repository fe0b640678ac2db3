"""Trajectories as logs of Inspect: read back by inspect_ai, with what docs/inspect.md promises."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from tests.store_builder import BERN, KLEE, episode, new_log, policy, read, record, search
from tests.test_inspect_exchange import RUN, promised, whole

import srl.store
from srl.browse.inspect_eval import write_eval_logs
from srl.browse.trajectories import Filter
from srl.cli import main
from srl.store import Record
from srl.trajectory import Score

HOSTILE = "<script>alert(1)</script>\x00\x1b[31m\u202e🙂 ${x} attachment://0"


def exported(folder, *records, step=1, metrics=None):
    """The logs that inspect_ai reads of these records, by the names of their tasks."""
    log = pytest.importorskip("inspect_ai.log")
    new_log(folder / RUN).write(step, "train", records, metrics or {})
    with srl.store.open(folder / RUN) as connection:
        assert write_eval_logs(connection, Filter(), folder / "out") == len(records)
    found = log.list_eval_logs(str(folder / "out"))
    return {one.task: log.read_eval_log(one.name) for one in found}


def told(sample) -> dict[str, object]:
    """What a sample has of the facts that the page's table is about."""
    results = [one.metadata for one in sample.messages if one.role == "tool"]
    calls = [call for one in sample.messages if one.role == "assistant" for call in one.tool_calls or ()]
    hits = [hit for result in results for hit in result["hits"]]
    by_role = {
        role: [one.text for one in sample.messages if one.role == role] for role in ("assistant", "tool")
    }
    return {
        "text of the prompt": [one.text for one in sample.input], "text of the policy": by_role["assistant"],
        "text of observations": by_role["tool"], "golden answers": tuple(sample.target),
        "answer": sample.scores["em"].answer, "reward": sample.scores["reward"].value,
        "queries": [call.arguments["query"] for call in calls],
        "passages": [(hit["title"], hit["contents"].partition("\n")[2]) for hit in hits],
        "parts of the reward": {name: sample.scores[name].value for name in ("em", "format")},
        "scores of passages": [hit["score"] for hit in hits],
        "passage ids": [hit["id"] for hit in hits], "latency": [one["latency_s"] for one in results],
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.must_run
def test_a_log_of_inspect_keeps_what_the_page_says(tmp_path):
    from tests.test_inspect_exchange import facts

    made = whole(sample=2)
    logs = exported(tmp_path, record(made), metrics={"actor/entropy": 0.5, "actor/kl": float("nan")})
    log = logs["train-step-1"]
    [sample] = log.samples
    before, after = facts(made, record(made).score), told(sample)
    assert {name for name, said in promised(2).items() if said != "lost"} == after.keys()
    assert after == {name: before[name] for name in after}
    assert (sample.id, sample.epoch, sample.metadata["id"]) == ("nq-0", 3, made.id)
    assert sample.scores["em"].explanation.startswith("reader")
    assert {name: one.value for name, one in sample.scores.items()} == {
        "em": 0.0, "format": 1.0, "reward": 0.125, "f1": 0.0, "cover_em": 0.0
    }  # fmt: skip
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
    failed.segments, failed.searches = failed.segments[:2], [
        search("painter 1", status="timed_out", error="no answer in 5 s")
    ]  # fmt: skip
    odd = episode(2, passages=None, answer=None)
    odd.segments += [read("feedback", "try again", 1), policy(HOSTILE, 2), read("observation", HOSTILE, 2)]
    two = whole(3)
    two.searches.append(search("again", BERN, KLEE))
    bare = replace(episode(4), question=replace(episode(4).question, prompt=()))
    scores = Record(bare, Score(float("inf"), {"made": float("nan")}))
    [log] = exported(tmp_path, record(failed), record(odd), record(two), scores).values()
    by_id = {sample.id: sample for sample in log.samples}
    sample = by_id["nq-1"]
    assert (sample.error.message, sample.messages[-1].error.type) == (
        "timed_out: no answer in 5 s",
        "timeout",
    )
    assert sample.messages[-1].tool_call_id == sample.messages[-2].tool_calls[0].id
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
def test_each_step_is_a_log_and_a_large_one_has_several(workspace, tmp_path, monkeypatch, capsys):
    inspect_log = pytest.importorskip("inspect_ai.log")
    log = new_log(workspace / "runs" / RUN)
    for step in (1, 2):
        log.write(step, "train", [record(episode(n, step=step)) for n in range(3)], {})
    monkeypatch.setattr("srl.browse.messages.batches.__defaults__", (2,))
    out = tmp_path / "logs"
    assert main(["inspect", "export", "last", "--format", "inspect-eval", "-o", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    found = {one.task: one.name for one in inspect_log.list_eval_logs(str(out))}
    assert sorted(found) == ["train-step-1", "train-step-1-part-2", "train-step-2", "train-step-2-part-2"]
    counts = {task: len(inspect_log.read_eval_log(name).samples) for task, name in found.items()}
    assert sorted(counts.values()) == [1, 1, 2, 2]


def test_without_inspect_one_line_says_what_to_install(workspace, tmp_path, monkeypatch, capsys):
    new_log(workspace / "runs" / RUN).write(1, "train", [record(episode())], {})
    monkeypatch.setitem(sys.modules, "inspect_ai", None)
    monkeypatch.setitem(sys.modules, "inspect_ai.log", None)
    assert main(["inspect", "export", "--format", "inspect-eval", "-o", str(tmp_path / "logs")]) == 2
    err = capsys.readouterr().err
    assert "[inspect]'" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "logs").exists()


def test_other_formats_do_not_import_inspect(workspace, tmp_path, monkeypatch):
    new_log(workspace / "runs" / RUN).write(1, "train", [record(episode())], {})
    monkeypatch.setitem(sys.modules, "inspect_ai", None)
    assert main(["inspect", "export", "-o", str(tmp_path / "one.parquet")]) == 0
