"""Exchange of trajectories: messages in Parquet, and generations that verl wrote, with what each keeps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests.store_builder import episode, new_log, question, read, record

import srl.store
from srl.browse.messages import write_messages
from srl.browse.trajectories import Filter
from srl.browse.transcript import _steps as transcript_steps
from srl.browse.verl_dump import dump_files, read_dump
from srl.cli import main
from srl.errors import UserError
from srl.protocol import render_information, render_passage
from srl.trajectory import Segment

RUN = "20250102T030405Z-tiny-grpo-s1-00aa"
PAGE = Path(__file__).parent.parent / "docs" / "inspect.md"


def whole(number=0, sample=0, answer="Bern", step=1):
    """An episode whose observation is what the protocol renders of its hits."""
    made = episode(number, sample=sample, answer=answer, step=step)
    hits = made.searches[0].hits
    shown = render_information([render_passage(rank, hit) for rank, hit in enumerate(hits, start=1)])
    made.segments[2] = Segment("observation", made.segments[2].token_ids, shown, 0)
    made.searches = [replace(made.searches[0], shown=len(hits))]
    return made


def dumped(made) -> dict[str, object]:
    """The line that verl writes of an episode: text only."""
    prompt, *after = made.segments
    return {
        "input": prompt.text, "output": "".join(segment.text for segment in after),
        "gts": {"target": list(made.question.golden_answers)}, "score": 0.125, "step": made.step,
        "uid": "a_0_0", **record(made).score.parts,
    }  # fmt: skip


def facts(made, score) -> dict[str, object]:
    """What the page's table is about, by its rows."""
    by_kind = {
        kind: [one.text for one in made.segments if one.kind == kind]
        for kind in ("prompt", "policy", "observation")
    }
    hits = [hit for one in made.searches for hit in one.hits]
    return {
        "text of the prompt": by_kind["prompt"], "text of the policy": by_kind["policy"],
        "text of observations": by_kind["observation"], "golden answers": made.question.golden_answers,
        "answer": made.answer, "reward": score.value, "queries": [one.query for one in made.searches],
        "passages": [(hit.passage.title, hit.passage.text) for hit in hits],
        "token ids": made.token_ids, "log-probs": made.logprobs,
        "parts of the reward": dict(score.parts), "passage ids": [hit.passage.id for hit in hits],
        "scores of passages": [hit.score for hit in hits],
        "latency": [one.latency_s for one in made.searches],
    }  # fmt: skip


def promised(column: int) -> dict[str, str]:
    """A column of the table on the page, by the first one."""
    text = PAGE.read_text(encoding="utf-8").partition("### Export and import\n")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")
    ]
    return {row[0]: row[column] for row in rows[2:]}


def write_dump(folder, made, step=1):
    folder.mkdir(exist_ok=True)
    (folder / f"{step}.jsonl").write_text("".join(json.dumps(dumped(one)) + "\n" for one in made))
    return folder / f"{step}.jsonl"


def test_an_imported_dump_keeps_what_the_page_says(tmp_path):
    made = whole()
    (found,) = read_dump(write_dump(tmp_path / "dump", [made]))
    before, after = facts(made, record(made).score), facts(found.trajectory, found.score)
    kept = {name for name in before if after[name] == before[name]}
    table = promised(3)
    assert kept == {name for name, said in table.items() if said != "lost"}
    assert table.keys() - before.keys() == {"advantages"}
    assert found.advantages is None
    assert (found.score.parts, found.trajectory.end) == ({"em": 0.0, "format": 1.0}, "answered")
    assert (found.trajectory.valid_searches, found.trajectory.valid_actions) == (1, 2)


def test_messages_keep_what_the_page_says(tmp_path):
    made = whole()
    new_log(tmp_path / RUN).write(1, "train", [record(made)], {})
    with srl.store.open(tmp_path / RUN) as log:
        assert write_messages(log, Filter(), tmp_path / "out.parquet") == 1
    (row,) = pq.read_table(tmp_path / "out.parquet").to_pylist()
    prompt, wrote, saw, answered = row["messages"]
    assert prompt == made.question.prompt[0]
    assert [wrote["role"], saw["role"], answered["role"]] == ["assistant", "tool", "assistant"]
    assert [wrote["content"], saw["content"], answered["content"]] == [one.text for one in made.segments[1:]]
    assert (row["answer"], row["reward"], row["golden_answers"]) == ("Bern", 0.125, ["Münchenbuchsee"])
    lost = {name for name, said in promised(1).items() if said == "lost"}
    assert lost == {
        "parts of the reward", "token ids", "log-probs", "advantages", "passage ids", "scores of passages",
        "latency",
    }  # fmt: skip
    assert not {"parts", "token_ids", "logprobs", "advantages", "hits", "latency_s"} & row.keys()


def messages(made):
    """The messages of an episode: the prompt's, then one a segment."""
    roles = {"policy": "assistant", "observation": "tool", "feedback": "user"}
    said = [{"role": roles[one.kind], "content": one.text} for one in made.segments if one.kind != "prompt"]
    return [*made.question.prompt, *said]


@pytest.mark.parametrize("text", ["Read.\n\n{}\n\nQuestion: who?", "Question: who?\n\n{}", "{}\n\nwho?"])
def test_a_prompt_with_passages_is_exported_as_it_was_read(tmp_path, text):
    shown = "<information>Doc 1(Title: a) b</information>"
    asked = replace(question(), prompt=({"role": "user", "content": text.format("{information}")},))
    made = episode(asked=asked, passages=None)
    rendered = f"<|user|>{text.format(shown)}<|end|>"
    made.segments[0] = Segment("prompt", made.segments[0].token_ids, rendered, 0)
    new_log(tmp_path / RUN).write(1, "train", [record(made), record(episode(1))], {})
    with srl.store.open(tmp_path / RUN) as log:
        assert write_messages(log, Filter(), tmp_path / "out.parquet") == 2
    found = {row["id"]: row for row in pq.read_table(tmp_path / "out.parquet").to_pylist()}
    prompt, answered = found[made.id]["messages"]
    assert prompt == {"role": "user", "content": text.format(shown)}
    assert answered["role"] == "assistant"
    assert "rendered" not in found[made.id]


def test_a_search_for_the_prompt_is_none_of_the_policys():
    """Also where it failed, so that there is no turn."""
    asked = replace(question(), prompt=({"role": "user", "content": "{information} who?"},))
    made = episode(asked=asked)
    shown = transcript_steps(record(made))
    assert [len(step.searches) for step in shown] == [1, *[0] * (len(shown) - 1)]
    plain = transcript_steps(record(episode()))
    assert not plain[0].searches
    assert sum(len(step.searches) for step in plain) == 1


def test_feedback_is_the_users(tmp_path):
    made = episode(passages=None)
    made.segments.append(read("feedback", "try again", 1))
    new_log(tmp_path / RUN).write(1, "train", [record(made)], {})
    with srl.store.open(tmp_path / RUN) as log:
        write_messages(log, Filter(), tmp_path / "out.parquet")
    (row,) = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [one["role"] for one in row["messages"]] == ["user", "assistant", "user"]


def test_a_long_step_is_exported_in_its_order_a_few_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("srl.browse.messages.SIZE", 2)
    order = [7, 3, 9, 0, 5]
    log = new_log(tmp_path / RUN)
    for step in (1, 2):
        log.write(step, "train", [record(episode(number, step=step)) for number in order], {})
    with srl.store.open(tmp_path / RUN) as opened:
        assert write_messages(opened, Filter(), tmp_path / "out.parquet") == 10
    found = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [(row["step"], row["question_id"]) for row in found] == [
        (step, f"nq-{number}") for step in (1, 2) for number in order
    ]
    assert all(f"painter {row['question_id'][3:]} " in row["messages"][1]["content"] for row in found)


def test_export_writes_only_what_is_chosen(workspace, tmp_path, capsys):
    log = new_log(workspace / "runs" / RUN)
    for step in (1, 2):
        log.write(
            step,
            "train",
            [record(episode(n, step=step, answer=a)) for n, a in enumerate(["Bern", "Münchenbuchsee"])],
            {},
        )
    out = tmp_path / "right.parquet"
    assert main(["inspect", "export", "last", "--em", "1", "-o", str(out)]) == 0
    assert pq.read_table(out)["step"].to_pylist() == [1, 2]
    assert main(["inspect", "export", "last", "--em", "0.5", "-o", str(tmp_path / "none.parquet")]) == 2
    assert "nothing is written" in capsys.readouterr().err
    assert not (tmp_path / "none.parquet").exists()


def test_groups_of_a_dump_are_those_of_the_same_prompt(tmp_path):
    made = [whole(0, 0), whole(1), whole(0, 1, "Münchenbuchsee")]
    found = [one.trajectory for one in read_dump(write_dump(tmp_path / "dump", made))]
    assert [(one.question.text, one.sample) for one in found] == [
        ("where was painter 0 born?", 0), ("where was painter 1 born?", 0), ("where was painter 0 born?", 1)
    ]  # fmt: skip
    assert found[0].question.id == found[2].question.id != found[1].question.id


def test_queries_and_answers_of_verls_tool_agents_are_read(tmp_path):
    call = '<tool_call>{"name": "search", "arguments": {"query_list": ["a", "b"]}}</tool_call>'
    output = (
        f'I look.\n{call}\nuser\n<tool_response>{{"result": "Bern"}}</tool_response>\nassistant\nAnswer: Bern'
    )
    line = {"input": "user\nWho?\nassistant\n", "output": output, "gts": "Bern", "score": None}
    (tmp_path / "7.jsonl").write_text(json.dumps(line) + "\n")
    (found,) = read_dump(tmp_path / "7.jsonl")
    assert [(one.query, one.turn) for one in found.trajectory.searches] == [("a", 0), ("b", 0)]
    assert found.trajectory.question.golden_answers == ("Bern",)
    assert found.score is None
    assert "".join(one.text for one in found.trajectory.segments[1:]) == output


def test_import_makes_a_run_that_the_other_commands_show(workspace, tmp_path, capsys):
    for step in (1, 2):
        write_dump(tmp_path / "dump", [whole(0, step=step), whole(1, step=step)], step)
    assert main(["inspect", "import", str(tmp_path / "dump")]) == 0
    capsys.readouterr()
    assert main(["inspect", "searches", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["step"], row["searches"], row["evidence_shown"]) for row in rows] == [
        (1, 2, 1.0),
        (2, 2, 1.0),
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [("{", "line 2: not JSON"), ('{"input": "x", "output": "y", "gts": []}', "'score'"),
     ('{"input": "x", "output": "y", "gts": [], "score": "high"}', "could not convert"), ("[]", "line 2")],
)  # fmt: skip
def test_a_line_that_verl_did_not_write_is_said_and_no_run_is_made(workspace, tmp_path, capsys, line, said):
    file = write_dump(tmp_path / "dump", [whole()])
    file.write_text(file.read_text() + line + "\n")
    assert main(["inspect", "import", str(tmp_path / "dump")]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not (workspace / "runs").exists()


def test_a_line_cut_inside_a_letter_is_named(workspace, tmp_path, capsys):
    file = write_dump(tmp_path / "dump", [whole()])
    file.write_bytes(file.read_bytes() + '{"input": "é'.encode()[:-1])
    assert main(["inspect", "import", str(tmp_path / "dump")]) == 2
    assert "line 2: not JSON" in capsys.readouterr().err


def test_a_folder_without_a_dump_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"expected files STEP.jsonl"):
        dump_files(tmp_path)


@pytest.mark.slow
def test_many_trajectories_go_through_both(tmp_path):
    made = [whole(n // 5, n % 5) for n in range(1500)]
    new_log(tmp_path / RUN).write(1, "train", [record(one) for one in made], {})
    with srl.store.open(tmp_path / RUN) as log:
        assert write_messages(log, Filter(), tmp_path / "out.parquet") == 1500
    found = pq.read_table(tmp_path / "out.parquet")["messages"].to_pylist()
    assert all(row == messages(one) for row, one in zip(found, made, strict=True))
    back = read_dump(write_dump(tmp_path / "dump", made))
    assert [one.trajectory.policy_text for one in back] == [one.policy_text for one in made]
