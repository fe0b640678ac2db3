"""Trajectories for other programs and theirs as a run: what each format keeps."""

import json
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from tests.store_builder import GRPO, episode, new_log, read, record

import srl.store
from srl.browse.filters import EVERY
from srl.browse.messages import write_messages
from srl.browse.verl_dump import dump_files, read_dump
from srl.cli import main
from srl.errors import UserError
from srl.protocol import render_information, render_passage
from srl.trajectory import Segment


def whole(number=0, sample=0, answer="Bern", step=1):
    """An episode whose observation is what the protocol renders of its hits."""
    made = episode(number, sample=sample, answer=answer, step=step)
    hits = made.searches[0].hits
    shown = render_information([render_passage(rank, hit) for rank, hit in enumerate(hits, start=1)])
    made.segments[2] = Segment("observation", made.segments[2].token_ids, shown, 0)
    made.searches = [replace(made.searches[0], shown=len(hits))]
    return made


def messages(folder, *records):
    """The rows that `export` writes of these records."""
    new_log(folder / GRPO).write(1, "train", records, {})
    with srl.store.open(folder / GRPO) as log:
        assert write_messages(log, EVERY, folder / "out.parquet") == len(records)
    return pq.read_table(folder / "out.parquet").to_pylist()


def test_messages_keep_texts_answer_and_reward(tmp_path):
    made = whole()
    made.segments.append(read("feedback", "try again", 1))
    [row] = messages(tmp_path, record(made))
    prompt, *after = row["messages"]
    assert prompt == made.question.prompt[0]
    assert [one["role"] for one in after] == ["assistant", "tool", "assistant", "user"]
    assert [one["content"] for one in after] == [one.text for one in made.segments[1:]]
    assert (row["answer"], row["reward"], row["golden_answers"]) == ("Bern", 0.125, ["Münchenbuchsee"])


def test_export_writes_only_what_is_chosen(workspace, tmp_path):
    log = new_log(workspace / "runs" / GRPO)
    for step in (1, 2):
        made = [episode(n, step=step, answer=answer) for n, answer in enumerate(["Bern", "Münchenbuchsee"])]
        log.write(step, "train", [record(one) for one in made], {})
    out = tmp_path / "right.parquet"
    assert main(["inspect", "export", "last", "--where", "em = 1", "-o", str(out)]) == 0
    assert pq.read_table(out)["step"].to_pylist() == [1, 2]


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


def test_an_imported_dump_keeps_texts_searches_answer_and_reward(tmp_path):
    made = whole()
    (read_back,) = read_dump(write_dump(tmp_path / "dump", [made]))
    after = read_back.trajectory
    assert "".join(one.text for one in after.segments) == "".join(one.text for one in made.segments)
    assert [[hit.passage.text for hit in one.hits] for one in after.searches] == [
        [hit.passage.text for hit in one.hits] for one in made.searches
    ]
    assert (after.question.golden_answers, after.answer) == (made.question.golden_answers, made.answer)
    assert read_back.score == record(made).score
    assert (after.end, after.valid_searches, after.valid_actions) == ("answered", 1, 2)


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


def test_a_reward_that_is_not_a_number_is_none(tmp_path):
    (tmp_path / "1.jsonl").write_text('{"input": "x", "output": "y", "gts": [], "score": NaN, "acc": NaN}\n')
    (unscored,) = read_dump(tmp_path / "1.jsonl")
    assert unscored.score is None


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
    assert f"{file}:2: " in err
    assert err.count("\n") == 1
    assert not (workspace / "runs").exists()
    with pytest.raises(UserError):
        dump_files(tmp_path)
