"""The parts that make things: data, demonstrations, the cold start, and what is trained from it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from hashlib import blake2b
from math import ceil
from pathlib import Path
from typing import Any

from bench.real.commands import Bench, Trained, options

from srl.data.demonstration_file import read_demonstrations
from srl.data.parquet import read_questions, write_questions
from srl.files import atomic_file
from srl.train.questions import stratified
from srl.trajectory import Question

SOURCES = (
    "squad:train=squad/train-43-articles.v1.1.json",
    "squad:test=squad/super-bowl-50.v1.1.json,squad/university-of-notre-dame.v1.1.json",
    "2wikimultihopqa:train=2wiki/train-500.json",
    "2wikimultihopqa:test=2wiki/dev-1000.json",
    "hotpotqa:train=hotpotqa/train-600.json",
    "hotpotqa:test=hotpotqa/dev-500.json",
    "musique:train=musique/train-100.jsonl",
    "nq:test=nq/nq-dev-with-paragraphs.jsonl",
    "2wiki-corpus=2wiki/2wikimultihopqa_corpus.json",
    "hotpotqa-corpus=hotpotqa/dev-500-corpus.json",
)
VALIDATION = {"squad": 60, "hotpotqa": 50, "2wikimultihopqa": 50}
"""Questions held out of each source; in proportion nine in ten would be of one hop."""
SHARES = {"squad": 0.5, "hotpotqa": 0.25, "2wikimultihopqa": 0.25}
"""Half of the demonstrations that a batch draws are of one hop."""
ASKED = {"squad": 0.35, "hotpotqa": 0.3, "2wikimultihopqa": 0.3, "musique": 0.05}
"""The shares of questions of reinforcement learning: most are of several hops, though nine in ten of all are
of one."""
PASSAGE_WORDS = 60
"""Longer passages are split: SQuAD's and NQ's paragraphs, and HotpotQA's introductions, have up to 300."""
READ = {"squad": 2400}
"""Training questions that the model learns to read passages on: demonstrations from what they retrieve."""
CHAINED = {"hotpotqa": 300, "2wikimultihopqa": 300}
"""Half of the training questions of several hops: demonstrations of them are made from supporting facts."""
CHECKED = ("trainer.test_freq=40", "trainer.save_freq=40")
"""How often fine-tuning is measured on the validation questions."""
TAUGHT = ("sft.steps=160", *CHECKED)
"""Fine-tuning on both."""
MIX = tuple(f"data.mix.{name}={share}" for name, share in ASKED.items())
ROUNDS, ROUND, SAMPLES = 2, 192, 8
"""Rounds of rejection sampling, their questions, and episodes a question."""
AS_MANY = 24
"""Steps of GRPO, of 16 questions × 8 episodes, that sample as many episodes as these rounds."""
RETRIEVED = ("data.template=rag", "rollout.max_turns=0", "data.max_prompt_length=512")
"""Settings of retrieve-once RAG: the passages that the question retrieves are in the prompt."""
SHOWN = "demonstrations.jsonl"
"""The demonstrations of the cold start."""
FIRST_STEPS = 5
"""Steps after which it is known how many tokens a step of fine-tuning has."""


def data(bench: Bench) -> None:
    """Questions and one corpus from all files, and its index."""

    def make() -> None:
        limit = ["--limit", 40] if bench.smoke else []
        amounts = ["8"] if bench.smoke else [f"{name}={count}" for name, count in VALIDATION.items()]
        held_out, out = [part for amount in amounts for part in ("--val", amount)], bench.prepared
        bench.srl(bench.cache, "data", "prepare", *located(bench.data), *held_out, *limit,
                  "--passage-words", PASSAGE_WORDS, "--out", out, "--overwrite")  # fmt: skip
        bench.srl(bench.cache, "index", "build", "--corpus", out / "corpus.jsonl", "--out", bench.index)

    bench.once("data", make)


def located(folder: Path) -> list[str]:
    """`SOURCES` with their files in `folder`."""
    found = []
    for source in SOURCES:
        name, _, files = source.partition("=")
        found.append(f"{name}={','.join(str(folder / file) for file in files.split(','))}")
    return found


def digest(name: str) -> str:
    return blake2b(name.encode(), digest_size=8).hexdigest()


def common(bench: Bench) -> list[str]:
    """The settings of every run: its questions, and the index."""
    files = {"train": "train", "val": "validation"}
    paths = [f'data.{split}_files=["{bench.prepared / name}.parquet"]' for split, name in files.items()]
    asked = f"eval.val_questions={sum(VALIDATION.values())}"
    return options([*paths, f"search.index={bench.index}", *([] if bench.smoke else [asked])])


def mixed(shown: Path, shares: Mapping[str, float] = SHARES) -> str:
    """The setting of fine-tuning on a file beside `shown` with its demonstrations, those of each source so
    often that they have about its share."""
    rows = [json.loads(line) for line in shown.read_text(encoding="utf-8").splitlines()]
    counts = Counter(row["data_source"] for row in rows)
    wanted = {source: shares.get(source, 0) / count for source, count in counts.items()}
    least = min(filter(None, wanted.values()))
    out = shown.with_name(f"mixed-{shown.name}")
    write_rows(out, [row for row in rows for _ in range(round(wanted[row["data_source"]] / least))])
    return f"sft.train_files={out}"


def demonstrations(bench: Bench) -> None:
    """Demonstrations in one file: of one hop from passages that a question itself retrieves, of several from
    supporting facts."""
    data(bench)
    files = {"passages": READ, "facts": CHAINED}
    shown = bench.prepared / SHOWN

    def make() -> dict[str, Any]:
        reports = {kind: demonstrated(bench, kind, amounts) for kind, amounts in files.items()}
        shown.write_text(
            "".join(made(bench, kind).read_text(encoding="utf-8") for kind in files), encoding="utf-8"
        )
        return reports

    bench.once("demonstrations", make)


def cold_start(bench: Bench) -> None:
    """Fine-tuning on the demonstrations, which are made first; the best by validation counts."""
    demonstrations(bench)
    bench.train_once("cold-start", "--algo", "sft", "--model", bench.model, *common(bench), *taught(bench),
                     *options([] if bench.smoke else [*TAUGHT]))  # fmt: skip


def taught(bench: Bench) -> list[str]:
    """The settings of fine-tuning: its demonstrations, and their shares."""
    return options([mixed(bench.prepared / SHOWN)])


def made(bench: Bench, kind: str) -> Path:
    """The file of the demonstrations of a kind."""
    return bench.prepared / f"{kind}.jsonl"


def demonstrated(bench: Bench, kind: str, amounts: Mapping[str, int]) -> dict[str, Any]:
    """Make the demonstrations of a kind, for so many questions of each source; the report of the command."""
    questions, drawn = read_questions(bench.prepared / "train.parquet"), list[Question]()
    for name, count in amounts.items():
        of_source = [question for question in questions if question.data_source == name]
        drawn += stratified(of_source, min(count, 20) if bench.smoke else count)
    asked = bench.prepared / f"{kind}.parquet"
    write_questions(asked, drawn)
    out = bench.srl(
        bench.cache, "data", "demonstrations", bench.model, "--from", kind, "--data", asked, "--index",
        bench.index, "--out", made(bench, kind), "--preset", bench.preset, *options(list(bench.sets)),
        "--overwrite", "--json",
    )  # fmt: skip
    return {key: value for key, value in json.loads(out).items() if key != "file"}


def start(bench: Bench) -> str:
    """The best checkpoint of the cold start, which is made first if need be."""
    cold_start(bench)
    found = bench.trained("cold-start")
    assert found is not None, "it was just made"
    return f"{found.run}@best"


def asked_by_rl(bench: Bench, settings: Iterable[str] = MIX) -> list[str]:
    """The settings of reinforcement learning, such as the shares of its questions. It asks none that the cold
    start was shown, whose answers the model knows by heart."""
    return options([*settings, f"data.exclude_files={bench.prepared / SHOWN}"])


def grpo(bench: Bench) -> None:
    """GRPO from the cold start."""
    bench.train_once("grpo", "--algo", "grpo", "--model", start(bench), *common(bench), *asked_by_rl(bench))


def ppo(bench: Bench) -> None:
    """PPO from the cold start."""
    bench.train_once("ppo", "--algo", "ppo", "--model", start(bench), *common(bench), *asked_by_rl(bench))


def mask(bench: Bench) -> None:
    """GRPO with retrieved tokens in the loss, from the same start."""
    settings = [*MIX, "actor.mask_observations=false"]
    bench.train_once("grpo-no-mask", "--algo", "grpo", "--model", start(bench), *common(bench),
                     *asked_by_rl(bench, settings))  # fmt: skip


def rft(bench: Bench) -> None:
    """Rounds of rejection-sampling fine-tuning from the cold start, and GRPO of as many episodes."""
    questions = 2 if bench.smoke else ROUND
    settings = [f"rft.questions={questions}", f"rollout.n={SAMPLES}", "sft.steps=30", "sft.optim.lr=5e-5"]
    runs = {
        "rft": ("rft", [*MIX, *settings], ROUNDS),
        f"grpo-{AS_MANY}": ("grpo", MIX, AS_MANY),
    }
    for name, (algo, asked, steps) in runs.items():
        bench.train_once(name, "--algo", algo, "--model", start(bench), *common(bench),
                         *asked_by_rl(bench, asked), steps=None if bench.smoke else steps)  # fmt: skip


def rag(bench: Bench) -> None:
    """Retrieve-once RAG, fine-tuned on the searcher's questions with as many tokens.

    These are the questions and the tokens of the cold start and GRPO, known when both have ended, in GRPO's
    shares. The best checkpoint by validation counts, as for the cold start.
    """
    grpo(bench)
    answer = "<answer> {answer} </answer>"
    shown = write_answers(bench, f"rag-s{bench.seed}.jsonl", answer, asked=asked(bench, "grpo"))
    arguments = [
        "--algo", "sft", "--model", bench.model, *common(bench),
        *options([*RETRIEVED, *CHECKED, mixed(shown, ASKED)]),
    ]  # fmt: skip

    def steps() -> int:
        first = bench.train("rag", *arguments, steps=1 if bench.smoke else FIRST_STEPS)
        found = [bench.trained(name) for name in ("cold-start", "grpo")]
        wanted = sum(tokens(bench, one) for one in found if one is not None)
        return 2 if bench.smoke else ceil(wanted / (tokens(bench, first) / first.summary["steps"]))

    bench.train_once("rag", *arguments, steps=bench.once(f"rag-steps-s{bench.seed}", steps))


def r1(bench: Bench) -> None:
    """R1 without search: fine-tuned to answer the same questions from its weights, then GRPO."""
    start(bench)
    text = "<think> I answer from what I know. </think> <answer> {answer} </answer>"
    shown = write_answers(bench, "r1.jsonl", text)
    alone = options(["data.template=r1", "rollout.search=false"])
    first = [*common(bench), *alone, *options([mixed(shown)])]
    taught = bench.train_once("r1-start", "--algo", "sft", "--model", bench.model, *first)
    bench.train_once(
        "r1", "--algo", "grpo", "--model", f"{taught.run}@best", *common(bench), *asked_by_rl(bench), *alone
    )


def asked(bench: Bench, name: str) -> set[str]:
    """The ids of the questions that a run trained on."""
    found = bench.trained(name)
    assert found is not None, "only a run that has ended is asked for its questions"
    query = "SELECT DISTINCT question_id AS id FROM trajectories WHERE phase = 'train'"
    out = bench.srl(found.workspace, "inspect", "sql", query, "--run", found.run.name, "--json")
    return {json.loads(line)["id"] for line in out.splitlines()}


def write_answers(bench: Bench, name: str, text: str, asked: Collection[str] = ()) -> Path:
    """Demonstrations that answer at once, with the first golden answer: the cold start's questions, and
    those `asked`."""
    path = bench.prepared / name
    chosen = {item.id for item in read_demonstrations(bench.prepared / SHOWN)}.union(asked)
    questions = read_questions(bench.prepared / "train.parquet")
    write_rows(path, [
        demonstration(item, text.format(answer=item.golden_answers[0]))
        for item in questions if item.id in chosen
    ])  # fmt: skip
    return path


def demonstration(question: Question, turn: str) -> dict[str, Any]:
    """A demonstration of one turn."""
    return {
        "id": question.id, "question": question.text, "golden_answers": list(question.golden_answers),
        "data_source": question.data_source, "turns": [turn],
    }  # fmt: skip


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with atomic_file(path) as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)


def tokens(bench: Bench, trained: Trained) -> int:
    """All tokens of the episodes that a run trained on: fine-tuning's from its metrics, else the log's."""
    query = (
        "SELECT coalesce("
        "(SELECT sum(value) FROM metrics WHERE name = 'perf/total_num_tokens' AND phase = 'sft'), "
        "(SELECT sum(total_tokens) FROM trajectories WHERE phase = 'train')) AS tokens"
    )
    out = bench.srl(trained.workspace, "inspect", "sql", query, "--run", trained.run.name, "--json")
    return int(json.loads(out)["tokens"])


PARTS: dict[str, Callable[[Bench], None]] = {
    "data": data,
    "cold-start": cold_start,
    "grpo": grpo,
    "ppo": ppo,
    "mask": mask,
    "rft": rft,
    "rag": rag,
    "r1": r1,
}
