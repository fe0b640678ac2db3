"""Coverage: which questions have their gold passages, and their answer, in the corpus at all."""

from hypothesis import example, given
from hypothesis import strategies as st

from srl.answers import contains_answer, findable
from srl.cli import main
from srl.data.corpus import write_corpus
from srl.data.parquet import write_questions
from srl.evaluate.coverage import Coverage, Phrases, coverage
from srl.trajectory import Passage, Question

CORPUS = [
    Passage("p0", '"Lighthouse"\nThe Lighthouse of Velmar was built by Ossa Trell.'),
    Passage("p1", '"Velmar"\nVelmar is a port. Its mayor is Iro Bann.'),
    Passage("p2", '"Fair"\nThe fair of Velmar sells chocolate; yes, no other.'),
]


def ask(name: str, *answers: str, **metadata: object) -> Question:
    return Question(name, f"{name}?", answers, "made-up", "test", metadata=metadata)


def cover(*questions: Question) -> dict[str, Coverage]:
    return coverage(questions, iter(CORPUS))


def test_gold_passages_count_by_id_and_the_answer_by_its_words():
    found = cover(
        ask("all", "Ossa Trell", supporting_ids=["p0", "p1"]),
        ask("one of two", "chocolate", supporting_ids=["p2", "p9"]),
        ask("only the answer", "Iro Bann", supporting_ids=["p8"]),
        ask("only the passage", "Orra Vess", supporting_ids=["p1"]),
        ask("none named", "Orra Vess", "the PORT!"),
    )
    assert found == {
        "all": Coverage(True, True),
        "one of two": Coverage(False, True, ("p9",)),
        "only the answer": Coverage(False, True, ("p8",)),
        "only the passage": Coverage(True, False),
        "none named": Coverage(None, True),
    }
    assert [each.answerable for each in found.values()] == [True, False, False, False, True]


def test_all_passages_are_said_to_be_read():
    counts = list[int]()
    coverage([ask("one", "Iro Bann")], iter(CORPUS), counts.append)
    assert counts == [3]


def test_a_yes_or_no_is_in_every_corpus_and_so_is_not_looked_for():
    found = cover(
        ask("named", "yes", supporting_ids=["p0"]),
        ask("lacks", "no", supporting_ids=["p9"]),
        ask("plain", "Yes"),
        ask("both", "yes", "Orra Vess"),
    )
    assert found["named"] == Coverage(True, None)
    assert [each.answerable for each in found.values()] == [True, False, None, False]


def test_ids_of_another_corpus_give_way_to_titles():
    coverages = cover(
        ask("a", "Iro Bann", supporting_ids=["wiki/17"], supporting_titles=["Velmar"]),
        ask("b", "Iro Bann", supporting_ids=["wiki/18"], supporting_titles=["Velmar", "Genoa"]),
    )
    assert coverages["a"] == Coverage(True, True)
    assert coverages["b"] == Coverage(False, True, ("Genoa",))


SOME = ["the", "A", "an", "of", "new", "New", "york", "York's", "U.S.", "–", "Røros", "1,961", "a-b"]
WORDS = st.sampled_from([*SOME, "the–", "İ", "\x00"])
TEXTS = st.lists(WORDS, max_size=8).map(" ".join) | st.text(max_size=12)


@given(st.lists(TEXTS, max_size=6), st.lists(TEXTS, min_size=1, max_size=8))
@example(["new york new york city"], ["new york city", "york new", "city new"])
@example(["of of the of"], ["of", "of of", "of of of", "of of of of"])
def test_phrases_are_found_where_contains_answer_finds_them(texts, golds):
    wanted = {gold: findable([gold]) for gold in golds}
    phrases = Phrases(phrase for those in wanted.values() for phrase in those)
    for text in texts:
        phrases.see(text)
    for gold, those in wanted.items():
        if those:
            assert (not phrases.found.isdisjoint(those)) == any(
                contains_answer(text, [gold]) for text in texts
            )


def test_a_prepared_directory_is_compared_with_its_own_corpus_split_by_split(capsys, tmp_path):
    write_corpus(tmp_path / "corpus.jsonl", CORPUS)
    write_questions(
        tmp_path / "test.parquet",
        [ask("t0", "Ossa Trell", supporting_ids=["p0"]), ask("t1", "Orra Vess", supporting_ids=["p1", "p9"])],
    )
    write_questions(
        tmp_path / "train.parquet",
        [Question("n0", "Is it?", ("yes",), "other"), Question("n1", "Who?", ("Iro Bann",), "made-up")],
    )
    assert main(["data", "coverage", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()[1:]]
    assert rows == [
        ["train", "other", "1", "unknown", "unknown", "unknown"],
        ["train", "made-up", "1", "unknown", "100.0%", "100.0%"],
        ["test", "made-up", "2", "50.0%", "50.0%", "50.0%"],
        ["all", "all", "4", "50.0%", "of", "2", "66.7%", "of", "3", "66.7%", "of", "3"],
    ]
