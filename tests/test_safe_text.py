"""What is shown holds no secret and acts on no terminal, whoever wrote it."""

from __future__ import annotations

import json
import unicodedata
from base64 import b64encode, urlsafe_b64encode
from html import escape
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srl.errors import UserError
from srl.safe_text import (
    HIDDEN,
    hidden,
    keep_secret,
    one_line,
    quoted,
    redacted,
    refuse_credentials,
    safe,
    safe_json,
    safe_message,
)

TOKEN = "s3cr3t/key+of=tests"
ATTACK = "a\x1b]0;pwned\x07\x1b[2J\x9b31m\u202eb\u2066c\u061cd\ue000e\ud800f\u2028g\rh"


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SRL_SEARCH_TOKEN", TOKEN)
    return TOKEN


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
    expected = r"a\x1b]0;pwned\x07\x1b[2J\x9b31m\u202eb\u2066c\u061cd\ue000e\ud800f\u2028g\x0dh"
    assert safe(ATTACK) == safe_message(ATTACK) == expected
    assert one_line(f" {ATTACK}\n\tx ") == expected + " x"
    assert safe("ü 中 \u200d 👩\u200d🚀\nx\ty") == "ü 中 \u200d 👩\u200d🚀\nx\ty"


@given(st.dictionaries(st.text(), st.text()))
def test_safe_json_says_the_same_and_prints(value):
    text = safe_json(json.dumps(value, ensure_ascii=False, indent=1))
    assert json.loads(text) == value
    assert not any(_acts(letter) for letter in text if letter not in "\n\u200c\u200d")


@pytest.mark.parametrize(
    "echo",
    [
        TOKEN,
        quote(TOKEN),
        quote(TOKEN, safe=""),
        "".join(f"%{byte:02X}" for byte in TOKEN.encode()),
        json.dumps(TOKEN)[1:-1],
        json.dumps(TOKEN)[1:-1].replace("/", "\\/"),
        "".join(f"\\u{ord(letter):04x}" for letter in TOKEN),
        escape(TOKEN).replace("/", "&#x2F;").replace("+", "&#43;"),
        b64encode(TOKEN.encode()).decode(),
        urlsafe_b64encode(TOKEN.encode()).decode(),
        b64encode(b"me:" + TOKEN.encode()).decode(),
        b64encode(b"user:" + TOKEN.encode()).decode(),
        b64encode(b"name:" + TOKEN.encode() + b"\n").decode(),
    ],
)
def test_a_token_is_hidden_in_every_form_that_it_comes_back_in(token, echo):
    for show in (hidden, safe, one_line, redacted, safe_message, quoted):
        shown = show(f"said: [{echo}] to all")
        assert echo not in shown
        assert HIDDEN in shown
        assert shown.startswith("said: [")
        assert shown.endswith("] to all")


def test_a_token_at_the_end_of_a_long_answer_is_hidden_before_it_is_cut(token):
    assert quoted("x" * 95 + TOKEN, 105) == "x" * 95 + HIDDEN + ""
    assert "s3c" not in quoted(b"x" * 95 + TOKEN.encode(), 100)
    assert quoted(b"\xff\x00") == "�\\x00"


@pytest.mark.parametrize(
    ("name", "value", "is_hidden"),
    [
        ("HF_TOKEN", "hf_abcdefgh", True),
        ("WANDB_API_KEY", "abcdefgh", True),
        ("aws_secret_access_key", "abcdefgh", True),
        ("MY_PASSWORD", "abcdefgh", True),
        ("TOKEN", "abcdefgh", True),
        ("MY_PASSWORD", "abcdefg", False),
        ("TLS_KEY", "/etc/ssl/server.key", False),
        ("MONKEY", "abcdefgh", False),
        ("TOKENIZERS_PARALLELISM", "abcdefgh", False),
        ("PWD", "abcdefgh", False),
        ("SRL_SEARCH_TOKEN", "abcd", True),
        ("SRL_SEARCH_TOKEN", "abc", False),
    ],
)
def test_secrets_are_variables_that_are_named_like_one_and_long_enough(monkeypatch, name, value, is_hidden):
    monkeypatch.setenv(name, value)
    assert hidden(f"it is {value}.") == f"it is {HIDDEN if is_hidden else value}."


def test_a_short_token_is_hidden_as_a_whole_word_only(monkeypatch):
    monkeypatch.setenv("SRL_SEARCH_TOKEN", "test")
    assert hidden("Bearer test, tested: test_em") == f"Bearer {HIDDEN}, tested: test_em"


def test_the_variable_that_a_plugin_names_is_hidden_too(monkeypatch):
    monkeypatch.setenv("SAFE_TEXT_ENGINE_ID", "0123456789:abc")
    assert hidden("0123456789:abc") == "0123456789:abc"
    keep_secret(["SAFE_TEXT_ENGINE_ID"])
    assert hidden("0123456789:abc") == HIDDEN


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GET http://me:pw@h:1/x?k=s3cret failed", f"GET http://{HIDDEN}@h:1/x?{HIDDEN} failed"),
        ("at 'https://s3cret@h/'", f"at 'https://{HIDDEN}@h/'"),
        ("<https://h/a?X-Sig=s3cret>", f"<https://h/a?{HIDDEN}>"),
        ("Authorization: Bearer s3cret", f"Authorization: Bearer {HIDDEN}"),
        ("{'authorization': 'Basic czNjcmV0'}", f"{{'authorization': 'Basic {HIDDEN}'}}"),
        ("send Authorization: Bearer …", "send Authorization: Bearer …"),
        ("is it http://h:1/retrieve?", "is it http://h:1/retrieve?"),
        ("ask me@example.org, why? a=b", "ask me@example.org, why? a=b"),
    ],
)
def test_messages_show_no_credentials_of_urls_and_headers(text, shown):
    assert redacted(text) == safe_message(text) == quoted(text) == shown


def test_text_that_is_no_message_keeps_its_urls():
    assert safe("see https://h/?v=1") == "see https://h/?v=1"


@pytest.mark.parametrize(
    ("url", "held"),
    [
        ("http://me:s3cret@h:1/retrieve", "a password"),
        ("http://s3cret@h/", "a user name"),
        ("http://h/retrieve?api_key=s3cret", "a query"),
        ("http://h/?s3cret", "a query"),
        ("http://h/#s3cret", "a fragment"),
    ],
)
def test_a_search_url_with_more_than_host_port_and_path_is_refused(url, held):
    with pytest.raises(UserError, match=rf"URL for h has {held}.*export SRL_SEARCH_TOKEN=…") as caught:
        refuse_credentials("URL", url)
    assert "s3cret" not in str(caught.value)
    refuse_credentials("URL", "http://h:8000/behind/a/proxy/retrieve/wiki")


def test_what_is_no_url_is_one_line():
    with pytest.raises(UserError, match=r"URL is not a URL \(Invalid IPv6 URL\)"):
        refuse_credentials("URL", "http://[s3cret")
