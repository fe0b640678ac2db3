"""What is shown acts on no terminal, whoever wrote it, and errors and logs hold no secret."""

import json
import subprocess
import sys
import unicodedata
from importlib.util import find_spec
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srl.safe import HIDDEN, hidden, one_line, quoted, safe, safe_json, safe_message

TOKEN = "s3cr3t/key+of=tests"
ATTACK = "a\x1b]0;pwned\x07\x1b[2J\x9b31m\u202eb\u2066c\u061cd\ue000e\ud800f\u2028g\rh"


@given(st.text())
def test_safe_text_prints_and_keeps_what_prints(text):
    made = safe(text)
    assert made.isprintable() or set(made) <= set("\n\t\u200c\u200d") | {c for c in made if not _acts(c)}
    assert safe(made) == made
    plain = "".join(letter for letter in text if letter.isprintable())
    assert set(plain) <= set(made)


def _acts(letter: str) -> bool:
    return unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")


def test_what_acts_on_a_terminal_is_written_out():
    expected = r"a\x1b]0;pwned\x07\x1b[2J\x9b31m\u202eb\u2066c\u061cd\ue000e\ud800f\u2028g\rh"
    assert safe(ATTACK) == safe_message(ATTACK) == expected
    assert one_line(f" {ATTACK}\n\tx ") == expected.replace("\\u2028", " ").replace("\\r", " ") + " x"
    assert safe("ü 中 \u200d 👩\u200d🚀\nx\ty") == "ü 中 \u200d 👩\u200d🚀\nx\ty"


@given(st.dictionaries(st.text(), st.text()))
def test_safe_json_says_the_same_and_prints(value):
    text = safe_json(json.dumps(value, ensure_ascii=False, indent=1))
    assert json.loads(text) == value
    assert not any(_acts(letter) for letter in text if letter not in "\n\u200c\u200d")


@pytest.mark.parametrize("value", [TOKEN, "\udcff-secret"])
@pytest.mark.parametrize("form", [str, lambda value: quote(value, safe="", errors="replace")])
def test_a_token_is_hidden_in_errors_as_it_is_and_as_in_a_url(value, form, monkeypatch):
    monkeypatch.setenv("SRL_SEARCH_TOKEN", value)
    for show in (hidden, safe_message, quoted):
        assert show(f"said: [{form(value)}] to all") == f"said: [{HIDDEN}] to all"


def test_results_are_never_altered_to_hide_a_secret(monkeypatch):
    monkeypatch.setenv("SRL_SEARCH_TOKEN", TOKEN)
    text = f"the painter {TOKEN} was born"
    for show in (safe, one_line, safe_json):
        assert show(text) == text


READERS = {
    "safe_text": "import srl.safe as s\nread = lambda t: [show(t) for show in"
    " (s.safe, s.one_line, s.safe_message, s.safe_json, s.hidden, s.quoted)]",
    "parse_action": "from srl.protocol import parse_action as read",
    "escape": "from srl.protocol import escape as read",
    "verl_dump": "from srl.browse.verl_dump import read_dump\n"
    "def read(text):\n"
    "    Path('1.jsonl').write_text(json.dumps(dict(input='', output=text, gts=None, score=None)))\n"
    "    read_dump(Path('1.jsonl'))",
    "failures": "from ray.exceptions import RayActorError\n"
    "from srl.train.verl.failures import reason\n"
    "read = lambda text: reason(RayActorError(error_msg=text))",
    "trec": "from srl.data import trec\n"
    "def read(text):\n"
    "    Path('x').write_text(f'<top>{text}</top>{text}')\n"
    "    with suppress(UserError): list(trec.read_topics(Path('x')))\n"
    "    Path('x').write_text(f'<doc>{text}</doc>')\n"
    "    list(trec.document_records(Path('x')))",
    "titles": "from srl.data.supporting_facts import Lookup\nread = lambda text: Lookup(text).name",
    "golden_answers": "from srl.data.golden_answers import golden_answers\n"
    "def read(text):\n    with suppress(ValueError): golden_answers(text)",
    "overrides": "from srl.train.importing.convert import read_value\n"
    "def read(text):\n    if text[0] not in '[(': read_value(text)",
}
"""Code that defines `read`, which is called with text of others."""
UNITS = (
    *(" ", "\n", "\t", "\x1b", "a", "0", "(", "[ '", "a.", "%2F", "://@", "authorization: bearer "),
    *("< ", "<tool>", "<search>", '<search engine="', "<answer>", "<information>", "<tool_call>"),
    *("<tool_response>\n", "Doc 1(Title: ", "<top>", "<num>", "<title>\n", "<docno>", "<text>", "<doc>\n"),
    "class_name",
)


def test_long_foreign_text_is_read_at_once(tmp_path, monkeypatch):
    """In a process of its own: a pattern that never ends also ends no test."""
    readers = [code for name, code in READERS.items() if name != "failures" or find_spec("ray")]
    monkeypatch.setenv("SRL_SEARCH_TOKEN", "aaaaaaaaaaaaaaaaaaaaaaaaab")
    texts = f"[a + u * (1_000_000 // len(u)) + z for u in {UNITS!r} for a, z in (('', '://'), ('<', ''))]"
    code = (
        "import json\nfrom contextlib import suppress\nfrom pathlib import Path\n"
        f"from srl.errors import UserError\nfor reader in {readers!r}:\n"
        f"    exec(reader)\n    for text in {texts}:\n        read(text)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, cwd=tmp_path)


def test_a_secret_is_what_srl_reads_as_one_and_no_other_variable(monkeypatch):
    monkeypatch.setenv("MY_PUBLIC_KEY", "painter 0 born")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    assert safe_message("painter 0 born") == "painter 0 born"
    assert safe_message("it is hf_abcdefgh.") == f"it is {HIDDEN}."
