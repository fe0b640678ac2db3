"""EM, F1 and cover-EM against the rules of SQuAD's, HotpotQA's and Search-R1's scripts, pair by pair.

The references below state the rules of those scripts. Ours differ in the cases of `DIFFERENCES`, which
docs/evaluation.md lists, and nowhere else; each of them must occur.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from tests.shared_data import shared_data

from srl.answers import cover_exact_match, exact_match, f1
from srl.data.sources import SOURCES

Pair = tuple[str, tuple[str, ...]]
"""A prediction and the golden answers."""

PAGE = Path(__file__).parents[1] / "docs" / "evaluation.md"
ASCII_PUNCTUATION = {chr(code) for code in range(33, 127) if not chr(code).isalnum()}
YES_NO = {"yes", "no", "noanswer"}


def plain(text: str) -> str:
    """How all three scripts normalise: lower case, no ASCII punctuation, no articles, single spaces."""
    kept = "".join(letter for letter in text.lower() if letter not in ASCII_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def squad_em(prediction: str, golds: Sequence[str]) -> float:
    return max(float(plain(prediction) == plain(gold)) for gold in golds)


def squad_f1(prediction: str, golds: Sequence[str]) -> float:
    return max(overlap(plain(prediction).split(), plain(gold).split()) for gold in golds)


def overlap(said: list[str], known: list[str]) -> float:
    """The harmonic mean of precision and recall over bags of words; 0 where they share none."""
    left, same = Counter(known), 0
    for word in said:
        if left[word]:
            left[word] -= 1
            same += 1
    if same == 0:
        return 0.0
    precision, recall = same / len(said), same / len(known)
    return 2 * precision * recall / (precision + recall)


def hotpotqa_f1(prediction: str, golds: Sequence[str]) -> float:
    """As SQuAD's, but `yes`, `no` and `noanswer` share nothing with any other text."""

    def one(gold: str) -> float:
        said, known = plain(prediction), plain(gold)
        if said != known and YES_NO & {said, known}:
            return 0.0
        return overlap(said.split(), known.split())

    return max(map(one, golds))


def search_r1_em(prediction: str, golds: Sequence[str]) -> float:
    return float(plain(prediction) in [plain(gold) for gold in golds])


def search_r1_subem(prediction: str, golds: Sequence[str]) -> float:
    """Containment of the letters, also inside a word."""
    return float(any(plain(gold) in plain(prediction) for gold in golds))


REFERENCES = {
    "SQuAD's EM": (exact_match, squad_em),
    "HotpotQA's EM": (exact_match, squad_em),
    "Search-R1's em_check": (exact_match, search_r1_em),
    "SQuAD's F1": (f1, squad_f1),
    "HotpotQA's F1": (f1, hotpotqa_f1),
    "Search-R1's subem_check": (cover_exact_match, search_r1_subem),
}


def empty_gold(prediction: str, golds: Sequence[str], ours: float, theirs: float) -> bool:
    """A golden answer of which normalising leaves nothing."""
    return "" in map(plain, golds)


def partly_yes_or_no(prediction: str, golds: Sequence[str], ours: float, theirs: float) -> bool:
    """One of the two is `yes`, `no` or `noanswer`, and the other contains it."""
    return bool(YES_NO & {plain(prediction), *map(plain, golds)}) and theirs < ours < 1


def inside_a_word(prediction: str, golds: Sequence[str], ours: float, theirs: float) -> bool:
    """A golden answer stands inside a longer word."""
    found = [gold for gold in map(plain, golds) if gold in plain(prediction)]
    alone = [gold for gold in found if re.search(rf"(?<!\S){re.escape(gold)}(?!\S)", plain(prediction))]
    return ours < theirs and bool(found) and not alone


DIFFERENCES: dict[tuple[str, str], Callable[[str, Sequence[str], float, float], bool]] = {
    ("SQuAD's EM", "nothing left"): empty_gold,
    ("HotpotQA's EM", "nothing left"): empty_gold,
    ("Search-R1's em_check", "nothing left"): empty_gold,
    ("SQuAD's F1", "nothing left"): empty_gold,
    ("HotpotQA's F1", "nothing left"): empty_gold,
    ("HotpotQA's F1", "yes, no, noanswer"): partly_yes_or_no,
    ("Search-R1's subem_check", "nothing left"): empty_gold,
    ("Search-R1's subem_check", "inside a word"): inside_a_word,
}
"""Where ours differ, by script and by the row of the page's table that says why."""


def reason(script: str, prediction: str, golds: Sequence[str], ours: float, theirs: float) -> str | None:
    """Which listed difference explains that `ours` is not `theirs`; None if none does."""
    rows = [row for row in DIFFERENCES if row[0] == script]
    return next((row[1] for row in rows if DIFFERENCES[row](prediction, golds, ours, theirs)), None)


def compare(pairs: Sequence[Pair]) -> Counter[tuple[str, str]]:
    """How many pairs differ, by script and reason. Fails at the first that differs without a reason."""
    found: Counter[tuple[str, str]] = Counter()
    for prediction, golds in pairs:
        for script, (measure, reference) in REFERENCES.items():
            ours, theirs = measure(prediction, golds), reference(prediction, golds)
            if abs(ours - theirs) > 1e-12:
                why = reason(script, prediction, golds, ours, theirs)
                assert why is not None, (script, prediction, golds, ours, theirs)
                found[script, why] += 1
    return found


def grouped(text: str) -> str:
    """1234 as 1,234."""
    return re.sub(r"\d{4,}", lambda match: f"{int(match[0]):,}", text)


def without_accents(text: str) -> str:
    return "".join(
        letter for letter in unicodedata.normalize("NFD", text) if not unicodedata.combining(letter)
    )


NOISE: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "case": str.swapcase,
    "capitals": str.upper,
    "an article": lambda text: f"The {text}",
    "articles inside": lambda text: " the ".join(text.split()),
    "an article as a letter": lambda text: f"{text} A.",
    "punctuation": lambda text: f'"{text}"!',
    "punctuation inside": lambda text: ", ".join(text.split()),
    "hyphens": lambda text: "-".join(text.split()),
    "quotation marks beyond ASCII": lambda text: f"“{text}”…",
    "spaces beyond ASCII": lambda text: "\u00a0".join(text.split()) + "\u2003\n",
    "letters and accents apart": lambda text: unicodedata.normalize("NFD", text),
    "no accents": without_accents,
    "full width": lambda text: "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text),
    "numbers in groups": grouped,
    "numbers without groups": lambda text: text.replace(",", ""),
    "another number": lambda text: re.sub(r"\d", lambda match: str((int(match[0]) + 1) % 10), text),
    "a sentence": lambda text: f"It was {text}, as far as I know.",
    "the first half": lambda text: " ".join(text.split()[: (len(text.split()) + 1) // 2]),
    "words turned round": lambda text: " ".join(reversed(text.split())),
    "words twice": lambda text: f"{text} {text}",
    "inside a word": lambda text: f"un{text}s",
    "yes": lambda text: "Yes",
    "no, and why": lambda text: f"no, {text}",
    "nothing": lambda text: "",
    "only articles": lambda text: "The a, an!",
}  # fmt: skip

FILES = {
    "nq": "nq/NQ-open.dev.jsonl",
    "hotpotqa": "hotpotqa/hotpot_dev_v1_simplified.json",
    "2wikimultihopqa": "2wiki/dev-1000.json",
    "musique": "musique/train-100.jsonl",
    "bamboogle": "bamboogle/bamboogle.json",
    "squad": "squad/train-43-articles.v1.1.json",
}


def real_answers() -> Iterator[tuple[str, ...]]:
    """The golden answers of each question of the published files."""
    for name, file in FILES.items():
        for question in SOURCES[name].questions(shared_data(file), "test"):
            yield question.golden_answers


def noisy(answers: Sequence[tuple[str, ...]]) -> Iterator[Pair]:
    """One golden answer of each question with one kind of noise, its alias, and the next one's answer."""
    kinds = list(NOISE.values())
    for number, (golds, following) in enumerate(pairwise(answers)):
        yield kinds[number % len(kinds)](golds[number % len(golds)]), golds
        if len(golds) > 1:
            yield golds[-1], golds[:1]
        if number % 4 == 0:
            yield following[0], golds


def test_real_answers_with_noise_score_as_the_scripts_say():
    pairs = list(noisy(list(real_answers())))
    assert len(pairs) >= 5000
    found = compare(pairs)
    assert set(found) <= set(DIFFERENCES)
    assert found["HotpotQA's F1", "yes, no, noanswer"]
    assert found["Search-R1's subem_check", "inside a word"]


@pytest.mark.parametrize("kind", NOISE)
def test_every_kind_of_noise_scores_as_the_scripts_say(kind):
    answers = ["Ossa Trell", "1,234 m", "Théâtre de l'Œuvre", "no", "Yes", "U.S.", "the O2", "A & E", "İzmir"]
    compare([(NOISE[kind](answer), (answer, other)) for answer, other in pairwise(answers)])


@pytest.mark.parametrize(
    ("prediction", "golds", "differs"),
    [
        ("a", ("the",), {(script, "nothing left") for script in REFERENCES if "F1" not in script}),
        ("The The", ("the the",), {(script, "nothing left") for script in REFERENCES if "F1" in script}),
        ("no, it is", ("no",), {("HotpotQA's F1", "yes, no, noanswer")}),
        ("no", ("No Country for Old Men",), {("HotpotQA's F1", "yes, no, noanswer")}),
        ("the party", ("art",), {("Search-R1's subem_check", "inside a word")}),
        ("I do not know", ("no",), {("Search-R1's subem_check", "inside a word")}),
    ],
)
def test_each_listed_difference_is_one(prediction, golds, differs):
    assert set(compare([(prediction, golds)])) == differs


def test_the_page_lists_every_difference():
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"| {why} |" in text and script in text for script, why in DIFFERENCES)
