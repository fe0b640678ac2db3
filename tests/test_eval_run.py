"""Measuring a policy on questions: scripted episodes by hand, and a small random model end to end."""

import json
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.store_builder import log_records
from tests.tiny_models import byte_level_tokenizer, tiny_model

from srl.cli import main
from srl.config import load_config
from srl.data.parquet import write_questions
from srl.files import ABOUT
from srl.index import build_index, open_index
from srl.models.weights import save_model
from srl.protocol import template
from srl.rollout.codec import Codec, TextCodec
from srl.rollout.engine import Completion, Sampling, ScriptedEngine
from srl.rollout.tags import Tags
from srl.train.eval_run import evaluate_model
from srl.train.load_protocol import card_of_run, load_template, write_card
from srl.train.model_settings import settings_of
from srl.train.named_checkpoint import model_directory
from srl.trajectory import Passage, Question
from srl.workspace import Workspace

pytest.importorskip("srl_bm25")

TOWERS = {"Velmar": "Ossa Trell", "Quillon": "Ada Brix", "Tarn": "Ivo Stell", "Mirre": "Una Vost"}
QUESTIONS = [
    Question(f"q/{town}", f"Who built the lighthouse of {town}?", (builder,), "towers", "test",
             prompt=template("search-r1").messages(f"Who built the lighthouse of {town}?"),
             metadata={"hops": 1 + (town == "Tarn"), "supporting_ids": [town]})
    for town, builder in TOWERS.items()
]  # fmt: skip
PASSAGES = [
    Passage(town, f'"{town}"\nThe lighthouse of {town} was built by {builder}.')
    for town, builder in TOWERS.items()
]
SMALL = [
    "data.max_prompt_length=512", "data.max_response_length=128", "rollout.max_turns=1",
    "rollout.max_turn_tokens=8", "rollout.max_obs_length=64",
    "trainer.threads=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small random model, a corpus, its index, and questions."""
    folder = tmp_path_factory.mktemp("evaluation")
    save_model(tiny_model(max_length=4096), byte_level_tokenizer(), folder / "model")
    write_questions(folder / "test.parquet", QUESTIONS)
    build_index(PASSAGES, folder / "index")
    return folder


def words(option: str, values: Iterable[str]) -> list[str]:
    """An option that is typed several times."""
    return [part for value in values for part in (option, value)]


def run(
    place: Path, capsys: pytest.CaptureFixture[str], *arguments: str, model: str = "", data: bool = True
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `srl eval run`."""
    files = ["--data", str(place / "test.parquet")] if data else []
    code = main(["eval", "run", model or str(place / "model"), *files, *words("--set", SMALL), *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_file_decides_over_the_models_card_where_it_names_the_prompt(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    model = shutil.copytree(place / "model", tmp_path / "model")
    write_card(model / ABOUT, {"template": "few-shot", "search": True})
    for text, name in (("rollout: {max_turns: 1}", "few-shot"), ("data: {template: short}", "short")):
        file.write_text(text)
        assert settings_of(model, None, file, {"data.template": None}, SMALL).data.template == name


def test_data_sources_are_sets_with_rows_of_their_own(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"nq": 5, "popqa": 3}
    for source, size in sizes.items():
        asked = [
            replace(QUESTIONS[0], id=f"{source}/{place}", data_source=source, split="test")
            for place in range(size)
        ]
        write_questions(tmp_path / f"{source}.parquet", asked)
    drawn = ("--set", "rollout.search=false", "--set", "data.template=r1", "--limit", "4")
    files = words("--data", (str(tmp_path / f"{source}.parquet") for source in sizes))
    code, out, _ = run(place, capsys, *drawn, *files, "--json", data=False)
    assert code == 0
    rows = {row["name"]: row for row in json.loads(out)["no_search"]["sets"]}
    assert {name: (row["used"], row["size"]) for name, row in rows.items()} == {
        "nq": (2, 5), "popqa": (2, 3), "mean over sets": (4, 8), "all questions": (4, 8),
    }  # fmt: skip
    assert set(rows["nq"]["measures"]["em"]) == {"mean", "interval", "full"}
    code, out, _ = run(place, capsys, *drawn, *files, data=False)
    assert code == 0
    assert re.search(r"^popqa\s+2 of 3\s", out, re.MULTILINE)


def test_settings_are_those_of_the_models_run_but_for_what_was_searched(place: Path, tmp_path: Path) -> None:
    from srl.config import save_config

    run = tmp_path / "20260101T000000Z-x-grpo-s0-00ff"
    model = _copy_of(place / "model", run / "checkpoints" / "step-000010")
    sets = ["rollout.max_turns=7", "search.index=old", "data.corpus=old.jsonl", "model.lora_rank=4"]
    save_config(run, load_config(None, sets=sets).config)
    config = settings_of(model, None, None, {"search.url": "http://localhost:1"}, [])
    assert config.rollout.max_turns == 7
    assert (config.search.index, config.data.corpus, config.search.url) == (
        None,
        None,
        ("http://localhost:1",),
    )
    assert (config.model.path, config.model.lora_rank) == (str(model), 0)
    assert settings_of(model, None, None, {}, []).search.index == "old"
    assert model_directory(str(run), Workspace.resolve()) == model


@pytest.mark.parametrize("own", [True, False])
def test_a_model_trained_on_the_prompts_of_its_files_is_measured_on_them(
    place: Path, tmp_path: Path, own: bool
) -> None:
    """`data.template=null`, as of an imported run: the card must not name the template of questions without a
    prompt, which would replace those that there are."""
    sets = [f"search.index={place / 'index'}", "data.template=" + ("null" if own else "short")]
    trained = load_config(None, sets=sets).config
    model = _copy_of(place / "model", tmp_path / "model")
    write_card(model / "srl.json", card_of_run(trained, Tags(TextCodec(), load_template(trained), {}), {}))
    config = settings_of(model, None, None, {"search.index": place / "index"}, SMALL)
    asked = [replace(item, prompt=({"role": "user", "content": f"Mine: {item.text}"},)) for item in QUESTIONS]
    write_questions(tmp_path / "test.parquet", asked)
    report = evaluate_model(config, [str(tmp_path / "test.parquet")], Workspace.resolve(), limit=1)
    (record,) = log_records(report.settings["search"].run)
    assert ("Mine: " in record.trajectory.segments[0].text) is own


def _copy_of(model: Path, to: Path) -> Path:
    """A directory with links to the files of `model`."""
    to.mkdir(parents=True)
    for file in model.iterdir():
        (to / file.name).hardlink_to(file)
    return to


class Policy(ScriptedEngine):
    """An engine that knows one tower, reads passages, and searches where the prompt tells it how."""

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec, lambda request, turn: "")

    async def generate(self, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        text = self.codec.decode(token_ids)
        town = next(name for name in TOWERS if f"lighthouse of {name}?" in text)
        if f"was built by {TOWERS[town]}" in text:
            said = f"<answer>{TOWERS[town]}</answer>"
        elif "<search>" in text:
            said = f"<search>lighthouse of {town}</search>"
        else:
            said = "Ossa Trell" if "from your own knowledge" in text else "<answer>nobody</answer>"
        ids = tuple(self.codec.encode_text(said))
        return Completion(ids, (0.0,) * len(ids), "stop")


def test_baselines_are_columns_of_one_table_and_rows_of_json(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "srl.train.load_components.load_engine", lambda config, policy, note: Policy(policy.codec)
    )
    roomy = ["data.max_prompt_length=2048", "data.max_response_length=400", "rollout.max_turn_tokens=60",
             "rollout.max_obs_length=120"]  # fmt: skip
    searching = ("--index", str(place / "index"), "--baseline", "all", *words("--set", roomy))
    code, out, _ = run(place, capsys, *searching, "--json")
    assert code == 0
    report = json.loads(out)
    assert (report["questions"], report["indexes"][""]) == (4, open_index(place / "index").digest)
    settings = {name: value for name, value in report.items() if isinstance(value, dict) and "run" in value}
    assert list(settings) == ["search", "closed-book", "cot", "rag", "few-shot", "r1"]
    em = {name: value["metrics"]["em"] for name, value in settings.items()}
    assert em == {"search": 1, "closed-book": 0.25, "cot": 0, "rag": 1, "few-shot": 1, "r1": 0}
    gains = {name: value["gain_over_closed_book"] for name, value in settings.items()}
    assert gains == {
        "search": 0.75, "closed-book": None, "cot": -0.25, "rag": 0.75, "few-shot": 0.75, "r1": -0.25,
    }  # fmt: skip
    searches = [value["metrics"]["env/number_of_valid_search"] for value in settings.values()]
    assert searches == [1, 0, 0, 1, 1, 0]
    assert len({value["run"] for value in settings.values()}) == len(settings)

    code, out, _ = run(place, capsys, *searching)
    assert code == 0
    head, *rows = out.splitlines()
    assert head.split("  ")[-1] == "r1"
    assert head.split("  closed-book")[0].strip() == "with search"
    gain = next(row for row in rows if "gain over closed-book" in row)
    assert gain.split()[3:] == ["+0.750", "-0.250", "+0.750", "+0.750", "-0.250"]
