"""Pages behind the results: what is read, what is refused, and what happens when they are not there."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from threading import Event

import httpx
import pytest

from srl.errors import UserError
from srl_web.addresses import is_public
from srl_web.hits import around, share_of
from srl_web.pages import readable

pytest.importorskip("trafilatura")

FILLER = "The harbour of the town has been rebuilt many times, and its trade went on through all of it."
SNIPPET = "The lighthouse was first built in 1128 and rebuilt in 1543"
FACT = f"{SNIPPET}, after it had been damaged in a siege by the artillery of the republic itself."
ARTICLE = (
    "<html><head><title>Lanterna</title></head><body><nav><a href='/'>Home</a> <a href='/x'>Contact</a></nav>"
    f"<article><h1>Lanterna</h1><p>{FILLER}</p><p>{FILLER} It rained.</p><p>{FACT}</p>"
    f"<p>{FILLER} It snowed.</p></article><footer>Cookies and imprint</footer></body></html>"
)


def answer(body: str | bytes, kind="text/html; charset=utf-8", status="200 OK", head="") -> bytes:
    data = body.encode() if isinstance(body, str) else body
    lines = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n{head}\r\n"
    return lines.encode() + data


def found(*urls, snippet=SNIPPET):
    """An API that finds these URLs."""
    items = [{"title": "Lanterna", "snippet": snippet, "link": url} for url in urls]
    body = json.dumps({"organic": items}).encode()
    return lambda request: httpx.Response(200, content=body)


@pytest.fixture
def reading(web, pages):
    """`reading({path: answer}, *paths)`: a retriever that finds and fetches these pages of a local server."""

    def make(answers, *paths, **options):
        server = pages(answers)
        urls = [server.url + path for path in paths or answers]
        retriever = web(
            found(*urls), **{"pages": True, "allow_private": True, "page_timeout_s": 60, **options}
        )
        retriever.server = server
        return retriever

    return make


def texts(retriever, k=5):
    return [hit.passage.text for hit in retriever.search(["lanterna"], k)[0]]


def test_a_page_gives_the_part_that_the_snippet_is_from(reading):
    (text,) = texts(reading({"/a": answer(ARTICLE)}, page_chars=250))
    assert FACT in text
    assert "Home" not in text
    assert "imprint" not in text
    assert len(text) <= 250


def test_plain_text_is_read_too(reading):
    assert FACT in texts(reading({"/a.txt": answer(f"{FILLER}\n\n{FACT}\n", kind="text/plain")}))[0]


def test_the_encoding_that_the_server_names_is_believed(reading):
    page = ARTICLE.replace(FACT, f"{FACT} Città è più")
    assert (
        "Città è più"
        in texts(reading({"/a": answer(page.encode("latin-1"), "text/html; charset=latin-1")}))[0]
    )
    assert FACT in texts(reading({"/b": answer(ARTICLE, "text/html; charset=klingon")}))[0]


@pytest.mark.parametrize(
    ("page", "said"),
    [
        (answer("gone", status="404 Not Found"), "HTTP 404"),
        (answer("no", status="403 Forbidden"), "HTTP 403"),
        (answer(b"%PDF-1.7", kind="application/pdf"), "application/pdf is not supported"),
        (answer(b"\x89PNG", kind="image/png"), "image/png is not supported"),
        (answer("<p>Please enable JavaScript to go on.</p>"), "does not contain its snippet"),
        (answer(""), "does not contain its snippet"),
        (answer(b"\x00\xff\xfe" * 100), "does not contain its snippet"),
        (b"", "disconnected"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 9000\r\n\r\n<p>half",
            "closed connection",
        ),
        (answer("", status="302 Found", head="Location: /a\r\n"), "redirects"),
        (answer("", status="302 Found", head="Location: ftp://a.test/\r\n"), "its snippet is used"),
    ],
)
def test_a_page_that_cannot_be_had_is_replaced_by_its_snippet_and_that_is_logged(reading, caplog, page, said):
    caplog.set_level(logging.DEBUG, logger="srl.web")
    retriever = reading({"/a": page})
    assert texts(retriever) == [SNIPPET]
    assert said in caplog.text
    assert "its snippet" in caplog.text


def test_a_slow_page_costs_no_more_than_the_time_for_pages(web, loopback, pages, caplog, tmp_path):
    caplog.set_level(logging.DEBUG, logger="srl.web")
    hold = Event()
    slow, quick = loopback(lambda connection: hold.wait()), pages({"/a": answer(ARTICLE)})
    common = {"pages": True, "allow_private": True, "cache": tmp_path / "cache.sqlite"}
    web(found(f"{quick.url}/a"), **common, page_timeout_s=60).search(["read before"], 1)
    retriever = web(found(slow.url, f"{quick.url}/a"), **common, page_timeout_s=0.2)
    first, second = texts(retriever)
    hold.set()
    assert first == SNIPPET
    assert FACT in second
    assert f"{slow.url}: too slow, its snippet is used" in caplog.text


def test_a_large_page_is_read_as_far_as_allowed(reading):
    page = ARTICLE.replace("</article>", f"<p>{FILLER}</p>" * 2000 + "</article>")
    (text,) = texts(reading({"/a": answer(page)}, page_bytes=3000))
    assert FACT in text


def test_a_page_is_fetched_once_and_kept(reading, tmp_path):
    retriever = reading({"/a": answer(ARTICLE)}, cache=tmp_path / "cache.sqlite")
    assert texts(retriever) == texts(retriever)
    assert texts(retriever, k=7) == texts(retriever)
    assert retriever.server.connections == 1


def test_only_pages_of_the_hits_are_fetched(reading):
    retriever = reading({"/a": answer(ARTICLE), "/b": answer(ARTICLE), "/c": answer(ARTICLE)})
    assert len(texts(retriever, k=2)) == 2
    assert retriever.server.connections == 2


def test_no_cookie_is_given_back(reading):
    page = answer(ARTICLE, head="Set-Cookie: visited=1\r\n")
    retriever = reading({"/a": page, "/b": page})
    texts(retriever)
    texts(retriever, k=4)
    assert retriever.server.connections == 4
    assert not any("cookie" in request.lower() for request in retriever.server.requests)


def test_pages_do_not_count_against_the_cap(reading):
    retriever = reading({"/a": answer(ARTICLE), "/b": answer(ARTICLE)}, max_requests=1)
    assert all(FACT in text for text in texts(retriever))


def test_an_address_that_is_not_public_is_not_fetched(reading, caplog):
    caplog.set_level(logging.DEBUG, logger="srl.web")
    retriever = reading({"/a": answer(ARTICLE)}, allow_private=False)
    assert texts(retriever) == [SNIPPET]
    assert retriever.server.connections == 0
    assert "127.0.0.1 is not a public address" in caplog.text


@pytest.mark.parametrize(
    "host", ["localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "127.1", "2130706433"]
)
def test_no_spelling_of_this_machine_is_fetched(web, pages, host):
    server = pages({"/": answer(ARTICLE)})
    retriever = web(found(f"http://{host}:{server.port}/"), pages=True)
    assert texts(retriever) == [SNIPPET]
    assert server.connections == 0


def test_a_redirect_is_checked_like_the_first_address(web, pages, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, logger="srl.web")
    inside = pages({"/": answer(ARTICLE)})
    outside = pages(
        {"/": answer("", status="302 Found", head=f"Location: http://localhost:{inside.port}/\r\n")}
    )

    async def resolve(host, port):
        return ["127.0.0.1"] if host == "public.test" else ["127.0.0.2"]

    monkeypatch.setattr("srl_web.addresses.resolve", resolve)
    monkeypatch.setattr("srl_web.addresses.is_public", lambda address: address == "127.0.0.1")
    retriever = web(found(f"http://public.test:{outside.port}/"), pages=True)
    assert texts(retriever) == [SNIPPET]
    assert (outside.connections, inside.connections) == (1, 0)
    assert "localhost is not a public address" in caplog.text


def test_the_address_that_was_checked_is_the_one_connected_to(web, pages, monkeypatch):
    server = pages({"/": answer(ARTICLE)})
    asked = []

    async def resolve(host, port):
        asked.append(host)
        return ["127.0.0.3", "127.0.0.1"]

    monkeypatch.setattr("srl_web.addresses.resolve", resolve)
    monkeypatch.setattr("srl_web.addresses.is_public", lambda address: True)
    retriever = web(found(f"http://rebinding.test:{server.port}/"), pages=True)
    assert FACT in texts(retriever)[0]
    assert asked == ["rebinding.test"]


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("10.0.0.1", False),
        ("172.16.0.1", False),
        ("64:ff9b:1::a00:1", False),
        ("fec0::1", False),
        ("::127.0.0.1", False),
        ("::ffff:0:127.0.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("ff02::1", False),
        ("::ffff:10.0.0.1", False),
        ("2002:7f00:0001::", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::808:808", True),
    ],
)
def test_public_addresses_are_told_from_others(address, public):
    assert is_public(address) == public


def test_a_result_with_a_url_of_another_kind_keeps_its_snippet(web):
    for url in (
        "ftp://a.test/",
        "file:///etc/passwd",
        "javascript:alert(1)",
        "http://",
        "https://\ud800.test/",
        "",
    ):
        assert texts(web(found(url), pages=True)) == [SNIPPET]


def test_without_the_extractor_pages_are_refused_when_opening(web, monkeypatch):
    monkeypatch.setitem(sys.modules, "trafilatura", None)
    with pytest.raises(UserError, match=r"\[pages\]'"):
        web(found(), pages=True)


PARAGRAPHS = "one two\nthree four\nthe needle is here\nfive six\nseven eight"


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (18, "the needle is here"),
        (27, "the needle is here\nfive six"),
        (40, "the needle is here\nfive six\nseven eight"),
        (51, "three four\nthe needle is here\nfive six\nseven eight"),
        (100, PARAGRAPHS),
    ],
)
def test_neighbouring_paragraphs_are_added_while_they_fit(limit, expected):
    assert around(PARAGRAPHS, "A needle, here", limit) == expected


@pytest.mark.parametrize("limit", [1, 3, 5, 12, 30, 200])
def test_a_long_paragraph_is_cut_around_the_words(limit):
    paragraph = "hay " * 100 + "the sharp needle lies here " + "hay " * 100
    part = around(paragraph, "needle sharp", limit)
    assert len(part) <= limit
    if limit >= 12:
        assert "sharp needle" in part
    assert around("x" * 500, "x" * 500, 100) == "x" * 100


def test_text_without_any_of_the_words_has_no_part():
    assert around(PARAGRAPHS, "elephant", 100) == ""
    assert around("", "elephant", 100) == around("elephant", "", 100) == ""
    assert share_of("a b c", "a b x y") == 0.5
    assert share_of("a b c", "") == 0


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"<",
        b"<html>",
        b"\x00" * 100,
        b"<div>" * 20_000,
        "\ufeff<p>x</p>".encode("utf-16"),
        b"<!--",
        b"&#xD800;",
    ],
)
def test_any_bytes_are_a_page(page):
    assert isinstance(readable(page, None), str)
    asyncio.run(asyncio.to_thread(readable, page, "utf-8"))
