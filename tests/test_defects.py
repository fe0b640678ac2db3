"""What Search-R1 got wrong cannot come in here: `docs/defects.md`, and what no other test holds of it."""

import ast
import asyncio
import copy
import inspect
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
from tests.scripts import RecordingEngine, TableSearch, play
from tests.tiny_models import byte_level_tokenizer, tiny_model

from srl.config import load_config
from srl.protocol import TEMPLATES
from srl.reward import RewardMix
from srl.rollout.codec import Codec
from srl.rollout.engine import Completion, Sampling
from srl.rollout.environment import Environment
from srl.rollout.episode import EpisodeOptions
from srl.rollout.torch_engine import TorchEngine
from srl.serve.server import bind
from srl.train.loop import Loop
from srl.train.questions import Splits
from srl.trajectory import Question

ROOT = Path(__file__).parents[1]
PAGE_OF_DEFECTS = ROOT / "docs" / "defects.md"
SEARCH = "<think>I search.</think><search>lighthouse</search>"
ANSWER = "<think>Now I know.</think><answer>Ossa Trell</answer>"


def rows_of_the_page() -> dict[int, list[str]]:
    """The cells of every defect, by its number."""
    lines = PAGE_OF_DEFECTS.read_text(encoding="utf-8").splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| \d", line)
    ]
    assert len({row[0] for row in cells}) == len(cells), "a number stands twice"
    return {int(row[0]): row[1:] for row in cells}


@cache
def names_of_tests() -> set[str]:
    """All tests of the core and of its plugins, read and not run."""
    files = [*ROOT.glob("tests/test_*.py"), *ROOT.glob("plugins/*/*/tests/test_*.py")]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    return {node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_all_defects_have_a_line_with_what_happened_what_we_do_and_what_holds_it():
    found = rows_of_the_page()
    assert sorted(found) == list(range(1, 37))
    assert all(len(cells) == 3 and all(cells) for cells in found.values())


@pytest.mark.parametrize("number", range(1, 37))
def test_every_test_that_the_page_names_exists(number):
    held_by = rows_of_the_page()[number][2]
    named = re.findall(r"`(test_\w+)`", held_by)
    assert named or held_by.startswith("Impossible: ")
    assert set(named) <= names_of_tests()


@dataclass
class Said:
    """A log and a terminal that keep what they are told."""

    records: list = field(default_factory=list)

    def write(self, step, phase, records, metrics) -> None:
        self.records += records

    def evaluation(self, *told: object) -> None:
        pass


class Silent(RecordingEngine):
    """Answers each question in one turn."""

    def reset(self) -> None:
        pass

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec, [ANSWER])


def test_validation_is_greedy_and_leaves_no_question_out():
    codec, said = Codec(byte_level_tokenizer()), Said()
    engine = Silent(codec)
    questions = [Question(f"q/{number}", "Who?", ("Ossa Trell",)) for number in range(7)]
    environment = Environment(
        codec, TEMPLATES["search-r1"], EpisodeOptions(max_turn_tokens=200, temperature=1.0, top_p=0.9),
        TableSearch(),
    )  # fmt: skip
    config = load_config(None, sets=["data.train_batch_size=4", "actor.ppo_mini_batch_size=4",
                                     "critic.ppo_mini_batch_size=4"]).config  # fmt: skip
    run = Loop(
        config=config, terminal=said, splits=Splits([], val=questions), environment=environment,
        reward=RewardMix({"em": 1.0}, plugins={"em": Ones()}), engine=engine, actor=None,
    )  # fmt: skip
    run.log = said
    run.evaluate("val", 0)
    run.wait_for_log()
    assert [record.trajectory.question.id for record in said.records] == [item.id for item in questions]
    assert {(sampling.temperature, sampling.top_p) for sampling in engine.samplings} == {(0.0, 1.0)}


class Ones:
    """A reward that is content with everything."""

    def score(self, trajectories):
        from srl.trajectory import Score

        return [Score(1.0) for _ in trajectories]


class EndsInEos(RecordingEngine):
    """Samples its EOS after each turn, as a policy may that is not stopped at `</answer>`."""

    async def generate(self, request_id: str, token_ids, sampling: Sampling) -> Completion:
        said = await super().generate(request_id, token_ids, sampling)
        ids = (*said.token_ids, self.codec.tokenizer.eos_token_id)
        return Completion(ids, (0.0,) * len(ids), "eos")


@pytest.mark.parametrize(
    "chat",
    [
        None,
        "{% for m in messages %}<|start_header_id|>user<|end_header_id|>\n{{ m['content'] }}{% endfor %}",
        "{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}",
        "{% for m in messages %}<|im_start|>assistant\n{{ m['content'] }}<think>\n{% endfor %}",
    ],
    ids=["none", "llama", "mistral", "think is open"],
)
def test_form_asks_for_no_particular_chat_markup(chat):
    pytest.importorskip("srl_format")
    tokenizer = copy.deepcopy(byte_level_tokenizer())
    tokenizer.chat_template = chat
    codec = Codec(tokenizer)
    opened = chat is not None and chat.endswith("<think>\n{% endfor %}")
    turns = [SEARCH.removeprefix("<think>") if opened else SEARCH, ANSWER]
    for engine in (RecordingEngine(codec, turns), EndsInEos(codec, turns)):
        trajectory = play(codec, [], TableSearch(), engine=engine)
        (score,) = asyncio.run(RewardMix({"format": 1.0}).score([trajectory]))
        assert (score.value, score.parts["format/well_formed"]) == (1.0, 1.0)


def test_a_later_turn_is_fed_only_what_is_new():
    model, fed = tiny_model(), []
    engine = TorchEngine(model, Codec(byte_level_tokenizer()), max_num_seqs=2, max_model_len=300)
    model.get_input_embeddings().register_forward_hook(
        lambda module, given, out: fed.append(given[0].numel())
    )
    history, read, count = list(range(2, 122)), [5, 6, 7], 4

    async def converse() -> int:
        first = await engine.generate("one", list(history), Sampling(max_tokens=count, temperature=0.0))
        fed.clear()
        ids = [*history, *first.token_ids, *read]
        return len((await engine.generate("one", ids, Sampling(max_tokens=count, temperature=0.0))).token_ids)

    written = asyncio.run(converse())
    assert sum(fed) <= 1 + len(read) + written < len(history)


def test_only_the_episode_reads_actions_and_writes_observations():
    """What is `protocol`'s is used in one place; nobody writes observations in a second form."""
    used: dict[str, set[str]] = {}
    for file in [*ROOT.glob("src/srl/**/*.py"), *ROOT.glob("plugins/*/*/src/**/*.py")]:
        text = file.read_text(encoding="utf-8")
        for name in ("parse_action", "render_information", "render_passage", "<information>"):
            if name in text:
                used.setdefault(name, set()).add(file.relative_to(ROOT).as_posix())
    protocol, rollout, foreign = "src/srl/protocol/", "src/srl/rollout", "src/srl/browse/verl_dump.py"
    outside = {
        name: {path for path in paths if not path.startswith(protocol)} for name, paths in used.items()
    }
    readers = {f"{rollout}/tags.py", f"{rollout}/native.py", foreign}
    assert outside["parse_action"] == readers, "foreign: texts of stock verl"
    assert outside["render_information"] == outside["render_passage"] == {f"{rollout}/observation.py"}
    assert not any(path.startswith(rollout) for path in used["<information>"])


def test_no_file_names_a_place_on_one_machine():
    places = re.compile(r"(?<![\w.])/(?:home|Users|work|root|mnt|scratch)/[\w.]")
    kinds = ("*.py", "*.md", "*.yaml", "*.toml", "*.txt", "Makefile")
    files = [
        file
        for kind in kinds
        for folder in ("src", "plugins", "docs", "bench")
        for file in (ROOT / folder).rglob(kind)
    ]
    found = [
        file for file in [*files, ROOT / "pyproject.toml"] if places.search(file.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_a_server_listens_on_this_machine_only_and_no_command_takes_a_key():
    from srl.cli.serve import retriever

    assert inspect.signature(retriever).parameters["host"].default == "127.0.0.1"
    with bind(port=0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    secret = re.compile(r"--[\w-]*(api|password|secret|credential|auth)|--key")
    assert [text for text in options_of_all_commands() if secret.search(text)] == []


def options_of_all_commands() -> list[str]:
    from srl.cli.app import command

    found, groups = [], [command()]
    while groups:
        group = groups.pop()
        for name in group.list_commands(None):
            inner = group.get_command(None, name)
            found += [text for parameter in inner.params for text in parameter.opts]
            groups += [inner] if hasattr(inner, "list_commands") else []
    return found
