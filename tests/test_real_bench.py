"""The pieces of `bench/real`: the choosing rule, the figures, resuming, and the tables."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from bench import real_tables
from bench.real import measure, parts
from bench.real.commands import Bench, Trained, output_of
from tests.shared_data import shared_data

from srl.config.load import load_config
from srl.data.demonstration_file import read_demonstrations
from srl.data.parquet import write_questions
from srl.evaluate.episode_results import EpisodeResult
from srl.trajectory import Question


def result(name: str, em: float = 0.0, hops: int | None = 2, evidence: float | None = 1.0) -> EpisodeResult:
    return EpisodeResult(
        question_id=name, sample=0, data_source="hotpotqa", split="test", hops=hops, kind="bridge",
        document="", valid=True, end="answered", em=em, f1=em, cover_em=em, answer_shown=True,
        evidence_recall=evidence, searches=2, valid_searches=2, failed_searches=0, named_searches=(), turns=3,
        valid_actions=3, tokens=40, total_tokens=400, seconds=1.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "fits"),
    [
        (result("q"), result("q", 1.0), True),
        (result("q", 1.0), result("q", 1.0), False),
        (result("q"), result("q"), False),
        (result("q"), result("q", 1.0, evidence=0.5), False),
        (result("q", hops=3), result("q", 1.0, hops=3), False),
    ],
)
def test_transcript_is_of_a_two_hop_question_that_was_learned(before, after, fits):
    assert measure.is_learned(before, after) is fits


def test_groups_are_the_set_the_hops_and_the_types():
    found = measure.groups(
        [result("a", 1.0), result("b", evidence=0.5), result("c", hops=None, evidence=None)]
    )
    assert found["all"]["em"]["mean"] == pytest.approx(1 / 3, abs=1e-4)
    assert found["all"]["questions"] == 3
    assert found["hops>1"]["em"]["mean"] == 0.5
    assert found["hops>1"]["all_evidence"] == 0.5
    assert found["hops>1"]["em_evidence"] == 1.0
    assert found["all"]["evidence"] == 0.75
    assert found["hops=1"]["questions"] == 1
    assert found["type=hotpotqa/bridge"]["questions"] == 3


def test_difference_is_of_the_questions_that_both_have():
    before = [result(f"q{number}") for number in range(60)]
    after = [result(f"q{number}", float(number % 2)) for number in range(20, 80)]
    found = measure.difference(measure.paired(before, after))
    assert (found["questions"], found["before"], found["after"]) == (40, 0.0, 0.5)
    assert found["difference"] == 0.5
    assert found["p"] < 0.001
    assert measure.difference([]) is None


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, tmp_path / "data", tmp_path / "model", seed=1, preset="small")


SUMMARY = {"run_id": "r", "algo": "grpo", "steps": 9, "seconds": 1.0}


def typing(monkeypatch: pytest.MonkeyPatch, commands: list[tuple[str, ...]], fails: int = 0) -> None:
    """Instead of `srl`, note what is typed; the first `fails` commands begin a run and stop."""

    def srl(bench: Bench, workspace: Path, *arguments: object) -> str:
        commands.append(tuple(map(str, arguments)))
        run = workspace / "runs" / "r"
        run.mkdir(parents=True, exist_ok=True)
        (run / "run.json").write_text("{}")
        if len(commands) <= fails:
            raise KeyboardInterrupt
        return f"a note\n{json.dumps(SUMMARY)}\n"

    monkeypatch.setattr(Bench, "srl", srl)


def test_run_that_was_stopped_is_resumed_and_a_finished_one_left_alone(bench, monkeypatch):
    commands: list[tuple[str, ...]] = []
    typing(monkeypatch, commands, fails=1)
    with pytest.raises(KeyboardInterrupt):
        bench.train_once("grpo", "--algo", "grpo")
    assert bench.trained("grpo") is None
    found = bench.train_once("grpo", "--algo", "grpo")
    assert commands == [
        ("train", "--preset", "small", "--seed", "1", "--algo", "grpo", "--json"),
        ("train", "--resume", "--run", "r", "--json"),
    ]
    assert found.summary == SUMMARY
    assert bench.train_once("grpo", "--algo", "grpo") == found == bench.trained("grpo")
    assert len(commands) == 2
    assert replace(bench, seed=2).trained("grpo") is None


COMMAND = """
import pathlib, signal, sys

def stop(number, frame):
    pathlib.Path(sys.argv[1]).write_text(str(number))  # as a run saves its log
    sys.exit(128 + number)

for one in (signal.SIGTERM, signal.SIGINT):
    signal.signal(one, stop)
signal.alarm(60)  # if no signal comes
print("ready", file=sys.stderr, flush=True)
while True:
    signal.pause()
"""
BENCH = """
import sys
from bench.real.commands import output_of
try:
    output_of([sys.executable, "-c", *sys.argv[1:]])
finally:
    print("ended", file=sys.stderr)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_command_that_runs_and_then_the_bench(tmp_path, number):
    said = tmp_path / "said"
    command = [sys.executable, "-c", BENCH, COMMAND, str(said)]
    with subprocess.Popen(
        command, cwd=Path(__file__).parent.parent, stderr=subprocess.PIPE, text=True
    ) as bench:
        assert bench.stderr.readline() == "ready\n"
        bench.send_signal(number)
        assert bench.stderr.read() == "ended\n", "the command has closed it too"
    assert said.read_text() == str(int(number))
    assert bench.returncode == 128 + number


def test_a_command_that_fails_raises_and_one_that_ends_gives_its_output():
    assert output_of([sys.executable, "-c", "print('found')"]) == "found\n"
    with pytest.raises(subprocess.CalledProcessError, match="status 3"):
        output_of([sys.executable, "-c", "raise SystemExit(3)"])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_step_is_made_once_and_not_at_all_if_it_fails(bench):
    with pytest.raises(ZeroDivisionError):
        bench.once("step", partial(divmod, 1, 0))
    assert bench.once("step", lambda: {"a": 1}) == {"a": 1}
    assert bench.once("step", partial(divmod, 1, 0)) == {"a": 1}


def estimated(mean: float) -> dict[str, object]:
    return {"mean": mean, "interval": None, "full": [mean - 0.05, mean + 0.05]}


def row(em: float) -> dict[str, object]:
    names = ["squad", "hotpotqa", "mean over sets", "all questions"]
    measures = {"em": estimated(em), "f1": estimated(em)}
    return {
        "run": "r", "questions": 1500, "questions_file": "gone", "place": "x",
        "metrics": {"answerable": 0.97},
        "sets": [{"name": name, "measures": measures} for name in names], "minutes": 61.4, "steps": 40,
        "groups": measure.groups([result("a", em), result("b", em, hops=1)]),
    }  # fmt: skip


def test_tables_are_of_all_rows_and_seeds_that_were_measured(bench, monkeypatch, tmp_path):
    save = [("row-base", {"closed-book": row(0.0)}), ("row-cold-start-s0", {"cold start": row(0.0)})]
    save += [("row-grpo-s0", {"+ GRPO": row(1.0)}), ("row-grpo-s1", {"+ GRPO": row(1.0)})]
    pairs = measure.paired([result("a")], [result("a", 1.0)])
    save.append(("compared-cold-start-grpo-s0", {"+ GRPO": {
        "rows": [], "all": measure.difference(pairs), "hops>1": None}}))  # fmt: skip
    save.append(("curves-grpo-s0", {"val/em": {"steps": [0], "values": [0.5]}}))
    episode = {"question": "Who?", "golden_answers": ["A"], "answer": "A", "verdict": "correct", "em": 1.0,
               "segments": [{"kind": "policy", "text": "<answer> A </answer>"},
                            {"kind": "observation", "text": "Doc 1\n\nDoc 2"}]}  # fmt: skip
    save.append(("transcript-grpo-s0", {"fitting": 3, "of": 70, "before": episode, "after": episode}))
    for key, value in save:
        bench.once(key, lambda value=value: value)
    found = measure.collected(bench)
    assert found["curves"] == {"grpo": {"0": {"val/em": {"steps": [0], "values": [0.5]}}}}
    assert not {"questions_file", "place"} & found["rows"]["closed-book"]["0"].keys()
    (tmp_path / "real_learning.json").write_text(json.dumps(found))
    monkeypatch.setattr(real_tables, "RESULT", tmp_path / "real_learning.json")
    lines = real_tables.learning().splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| closed-book", "| cold start, seed 0", "| + GRPO, seed 0", "| + GRPO, seed 1",
    ]  # fmt: skip
    assert (
        "| 1,500 | 1.000 (.950 to 1.050) | 1.000 (.950 to 1.050) | 1.000 | 1.000 | 1.000 | 1.000 | 2.00 |"
        in lines[4]
    )
    assert real_tables.summary().splitlines()[4] == (
        "| + GRPO, seed 0 | 1,500 | 1.000 (.950 to 1.050) | 1.000 | 1.000 | 2.00 |"
    )
    assert "| 61 min, 40 steps |" in real_tables.behaviour()
    assert (
        "| + GRPO, seed 0 | all | 1 | .000 | 1.000 | +1.000 (-1.000 to +1.000) | 1.000 |"
        in real_tables.differences()
    )
    assert "| hops 1 |" in real_tables.groups()
    assert "┊ Doc 1\n┊ Doc 2\n```\n\n3 of 70 two-hop" in real_tables.transcript()


def test_a_baseline_that_is_made_once_is_compared_with_every_seed(bench, monkeypatch):
    bench.once("row-rag-s0", lambda: {"RAG": row(0.0)})
    bench.once("row-grpo-s1", lambda: {"+ GRPO": row(1.0)})
    monkeypatch.setattr(Bench, "trained", lambda self, name: None)
    monkeypatch.setattr(measure, "differences", lambda bench, before, after: {
        "em": [one["sets"][0]["measures"]["em"]["mean"] for one in (before, after)]})  # fmt: skip
    measure.evaluate(replace(bench, seed=1))
    assert measure.collected(bench)["compared"] == {"+ GRPO against RAG": {"1": {"em": [0.0, 1.0]}}}


@pytest.mark.parametrize(("budget", "drawn"), [(None, 1500), (400, 400), (9000, 1500)])
def test_a_budget_limits_the_test_questions_of_a_row(bench, monkeypatch, budget, drawn):
    typed: list[str] = []

    def srl(self: Bench, workspace: Path, *arguments: object) -> str:
        typed[:] = map(str, arguments)
        return "{}"

    monkeypatch.setattr(Bench, "srl", srl)
    measure.asked(replace(bench, budget=budget), "model", measure.ENDS)
    assert typed[typed.index("--budget") + 1] == str(drawn)


def test_a_paired_test_leaves_comparisons_out(bench, monkeypatch):
    asked = [("a", 0.0, "bridge_comparison"), ("b", 1.0, "bridge"), ("c", 0.0, "")]
    found = [replace(result(name, em), kind=kind) for name, em, kind in asked]
    monkeypatch.setattr(Bench, "srl", lambda self, *typed: '{"rows": []}')
    monkeypatch.setattr(measure, "results_of", lambda bench, setting: found)
    tests = measure.differences(bench, {"place": "x"}, {"place": "y"})
    counts = {which: (tests[which] or {}).get("questions") for which in ("all", "hops>1", "no comparisons")}
    assert counts == {"all": 3, "hops>1": 3, "no comparisons": 2}


def test_em_without_comparisons_leaves_both_kinds_out():
    def group(questions, em):
        return {"questions": questions, "em": {"mean": em}}

    found = {"all": group(10, 0.5), "type=hotpotqa/bridge": group(2, 1.0)}
    assert real_tables.em_without_comparisons(found) == 0.5
    found |= {"type=hotpotqa/comparison": group(3, 1.0), "type=2wiki/bridge_comparison": group(2, 0.5)}
    assert real_tables.em_without_comparisons(found) == pytest.approx((5 - 3 - 1) / 5)


def test_results_stay_but_for_those_of_a_seed_that_this_cache_has():
    rows = {"cold start": {"0": 1, "1": 7}, "+ GRPO": {"0": 2}, "closed-book": {"0": 3}}
    known = {
        "rows": rows,
        "compared": {"+ GRPO": {"0": 8}},
        "curves": {"a": {"0": 4, "1": 9}},
        "transcript": {},
    }
    nothing = {kind: {} for kind in measure.KINDS}
    assert measure.with_known(nothing, known) == known
    assert measure.with_known(known, {}) == known
    base = measure.with_known({**nothing, "rows": {"closed-book": {"0": 5}}}, known)
    assert base == {**known, "rows": {**rows, "closed-book": {"0": 5}}}
    again = measure.with_known({**nothing, "rows": {"cold start": {"0": 6}}}, known)
    assert again == {
        "rows": {"cold start": {"0": 6, "1": 7}, "closed-book": {"0": 3}},
        "compared": {}, "curves": {"a": {"1": 9}}, "transcript": {},
    }  # fmt: skip
    other = measure.with_known({**nothing, "curves": {"a": {"2": 6}}}, known)
    assert other == {**known, "curves": {"a": {"0": 4, "1": 9, "2": 6}}}


def test_without_results_a_table_says_so(monkeypatch, tmp_path):
    for file in ("RESULT", "SHORTER"):
        monkeypatch.setattr(real_tables, file, tmp_path / "nothing.json")
    for name, made in real_tables.TABLES.items():
        assert made() == real_tables.NOTHING, name


def test_rag_learns_the_questions_of_the_demonstrations_and_of_the_run(bench, tmp_path):
    bench.prepared.mkdir()
    questions = [Question(name, f"{name}?", (name.upper(), "or"), "made") for name in "abcd"]
    write_questions(bench.prepared / "train.parquet", questions)
    shown = {"id": "c", "question": "c?", "golden_answers": ["C"], "turns": ["<answer> C </answer>"]}
    (bench.prepared / parts.SHOWN).write_text(f"{json.dumps(shown)}\n")
    path = parts.write_answers(bench, "rag.jsonl", "<answer> {answer} </answer>", asked={"a", "c"})
    found = read_demonstrations(path)
    assert [item.id for item in found] == ["a", "c"]
    assert [json.loads(line)["turns"] for line in path.read_text().splitlines()] == [
        ["<answer> A </answer>"], ["<answer> C </answer>"],
    ]  # fmt: skip


@pytest.mark.parametrize("part", ["grpo", "ppo", "tiny_hard", "mask", "rft", "r1"])
def test_reinforcement_learning_asks_nothing_that_the_cold_start_was_shown(bench, monkeypatch, part):
    typed: list[str] = []
    trained = Trained(bench.cache / "run", {"steps": 5}, 1.0)

    def train_once(self: Bench, name: str, *arguments: object, steps: int | None = None) -> Trained:
        typed[:] = map(str, arguments)
        return trained

    monkeypatch.setattr(parts, "start", lambda bench: "cold@best")
    monkeypatch.setattr(parts, "write_answers", lambda bench, name, text: bench.prepared / name)
    monkeypatch.setattr(Bench, "train_once", train_once)
    getattr(parts, part)(bench)
    assert f"data.exclude_files={bench.prepared / parts.SHOWN}" in typed
    mixed = [one.split("=")[0] for one in typed if one.startswith("data.mix.")]
    assert sorted(mixed) == sorted(f"data.mix.{name}" for name in parts.ASKED)


def test_rejection_sampling_and_the_grpo_beside_it_sample_as_many_episodes(bench, monkeypatch):
    typed: dict[str, tuple[list[str], int]] = {}
    monkeypatch.setattr(parts, "start", lambda bench: "cold@best")
    monkeypatch.setattr(
        Bench,
        "train_once",
        lambda self, name, *arguments, steps: typed.update({name: ([*map(str, arguments)], steps)}),
    )
    parts.rft(bench)
    preset = load_config("small").config
    (rounds, count), (beside, steps) = typed.values()
    assert [one[one.index("--algo") + 1] for one in (rounds, beside)] == ["rft", "grpo"]
    questions = next(int(one.split("=")[1]) for one in rounds if one.startswith("rft.questions="))
    samples = next(int(one.split("=")[1]) for one in rounds if one.startswith("rollout.n="))
    assert samples == preset.rollout.n
    assert questions * count == preset.data.train_batch_size * steps
    assert measure.ROWS[f"+ GRPO, {parts.AS_MANY} steps"].run in typed


def test_every_source_that_rag_learns_from_has_a_share(bench, monkeypatch):
    """Its questions are also those that GRPO asked, and GRPO asks sources that no demonstration is of."""
    typed: list[str] = []
    trained = Trained(bench.cache / "run", {"steps": 5}, 1.0)
    monkeypatch.setattr(parts, "grpo", lambda bench: None)
    monkeypatch.setattr(parts, "asked", lambda bench, name: {"a"})
    monkeypatch.setattr(parts, "write_answers", lambda bench, name, text, asked: bench.prepared / name)
    monkeypatch.setattr(parts, "tokens", lambda bench, trained: 100)
    monkeypatch.setattr(Bench, "trained", lambda self, name: trained)
    monkeypatch.setattr(Bench, "train", lambda self, name, *arguments, steps: trained)
    monkeypatch.setattr(
        Bench, "train_once", lambda self, name, *arguments, steps: typed.extend(map(str, [*arguments, steps]))
    )
    parts.rag(bench)
    shared = {one.split("=")[0] for one in typed if one.startswith("sft.mix.")}
    training = {source.split(":")[0] for source in parts.SOURCES if ":train=" in source}
    assert shared == {f"sft.mix.{name}" for name in training}
    assert typed[-1] == "10", "two runs of 100 tokens each, of which five steps have 100"


def test_cold_start_learns_to_read_from_one_kind_of_demonstrations_and_chains_from_the_other(
    bench, monkeypatch
):
    bench.prepared.mkdir()
    typed: dict[str, list[str]] = {}
    trained: list[object] = []

    def srl(self: Bench, workspace: Path, *arguments: object) -> str:
        options = [str(one) for one in arguments]
        kind = options[options.index("--from") + 1]
        typed[kind] = options
        Path(options[options.index("--out") + 1]).write_text(f"{kind}\n")
        return json.dumps({"file": "made.jsonl", "demonstrations": 1})

    monkeypatch.setattr(parts, "data", lambda bench: None)
    monkeypatch.setattr(Bench, "srl", srl)
    monkeypatch.setattr(
        Bench, "train_once", lambda self, name, *arguments: trained.extend([name, *arguments])
    )
    parts.cold_start(bench)
    limits = {kind: [one for one in options if "=" in one] for kind, options in typed.items()}
    assert limits == {"passages": ["squad=2400"], "facts": ["hotpotqa=300", "2wikimultihopqa=300"]}
    assert (bench.prepared / parts.SHOWN).read_text() == "passages\nfacts\n"
    assert f"sft.train_files={bench.prepared / parts.SHOWN}" in trained
    state = json.loads((bench.cache / "state" / "demonstrations.json").read_text())
    assert state["value"] == {kind: {"demonstrations": 1} for kind in typed}


@pytest.mark.slow
def test_parts_run_on_published_data_and_a_model_that_is_at_hand(tmp_path):
    model = os.environ.get("SRL_BENCH_MODEL")
    if not model:
        pytest.skip("$SRL_BENCH_MODEL names no model")
    parts_to_run = "cold-start", "grpo", "rft", "base", "evaluate", "curves", "transcript"
    settings = "model.lora_rank=0", "model.gradient_checkpointing=false", "model.device=cpu"
    data = shared_data("squad").parent
    command = [sys.executable, "bench/real", "--smoke", "--only", *parts_to_run, "--preset", "one-gpu",
               "--model", model, "--data", str(data), "--cache", str(tmp_path)]  # fmt: skip
    command += [part for setting in settings for part in ("--set", setting)]
    subprocess.run(command, cwd=Path(__file__).parent.parent, check=True)
    made = {path.stem for path in (tmp_path / "state").iterdir()}
    assert made >= {"data", "demonstrations", "cold-start-s0", "grpo-s0", "row-base", "row-grpo-s0",
                    "row-rft-s0", "compared-cold-start-grpo-s0", "curves-grpo-s0",
                    "transcript-grpo-s0"}  # fmt: skip
