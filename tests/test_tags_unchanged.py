"""Episodes by tags, whole, by digest: what a change of the seam between policy and tools must leave."""

import json
from dataclasses import asdict
from hashlib import sha256

import pytest
from tests.made_tokenizers import made_tokenizer
from tests.scripts import PAGE, TableSearch, play
from tests.tiny_models import byte_level_tokenizer

from srl.protocol import TEMPLATES
from srl.rollout.codec import Codec
from srl.trajectory import Passage, Search, Trajectory

LONG = Passage("long", '"Velmar"\n' + "The lighthouse of <answer> Velmar stands on a rock. " * 40)
SEARCH, ANSWER = "<think>I look</think><search>lighthouse</search>", "Now <answer> Ossa Trell </answer>."
BOTH = [SEARCH, ANSWER]


def found(*passages: Passage, **options: object) -> dict[str, object]:
    return {"search": lambda: TableSearch(passages), **options}


def outcome(status: str) -> dict[str, object]:
    return {"search": lambda: TableSearch([PAGE], [Search("lighthouse", status=status, error="why")])}


# scripted turns, how they are played, digest
EPISODES = {
    "a search, an answer": (BOTH, found(PAGE), "cafd8014 25af4cda"),
    "an overhanging tag": (["<search>a</search>.\n", ANSWER], found(PAGE), "dd70147e 2c37203f"),
    "no action": (["no tag", "", ANSWER], found(PAGE), "36f4807b 7c22b68a"),
    "no search tool": ([SEARCH, ANSWER], {"template": TEMPLATES["r1"]}, "8aa20795 776a25a4"),
    "nothing retrieved": (BOTH, found(), "a3466e08 fb51d59a"),
    "three passages": (BOTH, found(PAGE, LONG, PAGE), "0e7835c1 4e5b9a16"),
    "one cut": (BOTH, found(LONG, PAGE, options={"max_obs_length": 90}), "e394d8d7 5c0db660"),
    "no room": (BOTH, found(LONG, options={"max_obs_length": 3}), "e9b862aa 7f612431"),
    "a named retriever": (["<search engine='web'>a</search>", ANSWER], found(PAGE), "277dc0e2 c5a66b6c"),
    "an empty query": (["<search> </search>", ANSWER], found(PAGE), "8ca5d97a 62910a41"),
    "a fault": (BOTH, outcome("timed_out"), "ab3c700f c3d1df9b"),
    "a rejected query": (BOTH, outcome("rejected"), "d053d0cd 89a86bce"),
    "too many searches": ([SEARCH] * 3, found(PAGE, options={"max_turns": 2}), "f9d5bcf7 80833f49"),
    "a long turn": (["word " * 300] * 6, found(PAGE), "35215dd5 629ea5c4"),
    "no tags": (["so the answer is Ossa Trell"], {"template": TEMPLATES["closed-book"],
                                                  "options": {"max_turns": 0}}, "6448b8bb 92575b7b"),
    "passages in the prompt": ([ANSWER], found(PAGE, LONG, template=TEMPLATES["rag"]), "0cd59bee 46e05d57"),
    "examples": (BOTH, found(PAGE, template=TEMPLATES["few-shot"],
                             options={"max_prompt_length": 8000}), "d1e17d2f 898118bb"),
}  # fmt: skip
TOKENIZERS = {"byte level": byte_level_tokenizer, "metaspace": lambda: made_tokenizer("metaspace-first")}


OF_TRAJECTORY = ("end", "answer", "valid_actions", "valid_searches", "think_is_open", "error")
OF_SEARCH = ("query", "status", "attempts", "error", "turn", "retriever", "shown", "cut", "hits")


def digest(trajectory: Trajectory) -> str:
    fields = {
        "trajectory": [getattr(trajectory, name) for name in OF_TRAJECTORY],
        "segments": [asdict(segment) for segment in trajectory.segments],
        "searches": [{name: asdict(search)[name] for name in OF_SEARCH} for search in trajectory.searches],
        "mask": trajectory.response_mask,
    }
    return sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:8]


@pytest.mark.parametrize("name", EPISODES)
def test_an_episode_by_tags_is_what_it_was(name):
    turns, options, expected = EPISODES[name]
    played = []
    for make in TOKENIZERS.values():
        search = options["search"]() if "search" in options else None
        played.append(digest(play(Codec(make()), turns, **{**options, "search": search})))
    assert " ".join(played) == expected
