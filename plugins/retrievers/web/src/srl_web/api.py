"""The description of a search API: the format of requests, and where responses contain the results.

Values of `params`, `body` and `headers` may contain placeholders:

    {query} {k}              the query, and the number of results
    {language} {country}     the options of these names; an entry without a value is not sent
    {answers}                whether direct answers are requested (true or false)
    {key}                    the key, from the environment variable `key_env`
    {env:NAME}               another environment variable that must be set
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

_PLACE = re.compile(r"\{(query|k|language|country|answers|key|env:[A-Za-z_]\w*)\}")

Paths = str | tuple[str, ...]


class Result(NamedTuple):
    """One result of the API; any part may be empty."""

    title: str
    text: str
    url: str


class Fields(BaseModel):
    """Where an object contains the parts of a result, as dotted paths (`meta.0.title`)."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    title: str = "title"
    """Path of the title. Empty: no title."""
    text: Paths = "snippet"
    """Path of the text, or several paths whose texts are joined."""
    link: str = "link"
    """Path of the URL. Empty: no URL."""


class DirectAnswer(Fields):
    """A direct answer, such as an answer box, besides the results."""

    at: str = ""
    """Path of the object that contains it. Empty: the whole response."""


class Api(Fields):
    """A search API over HTTP with JSON responses."""

    url: str
    """The URL of the API, http or https, without a query string."""
    method: Literal["GET", "POST"] = "GET"
    """The HTTP method."""
    params: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Query parameters."""
    body: dict[str, Any] | None = None
    """The JSON body. null: no body."""
    headers: dict[str, str] = Field(default_factory=dict)
    """HTTP headers."""
    key_env: str = ""
    """The environment variable with the value of {key}."""
    results: str = "results"
    """Path of the list of results."""
    empty: str = ""
    """A path in every successful response. If it exists and `results` does not, there are no results."""
    answers: tuple[DirectAnswer, ...] = ()
    """Direct answers, in order of preference."""
    max_k: int = Field(default=10, ge=1)
    """Maximum number of results per request."""
    max_chars: int = Field(default=2000, ge=1, le=20_000)
    """Maximum length of a query in characters."""
    max_words: int | None = Field(default=None, ge=1)
    """Maximum length of a query in words. null: no limit."""

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if not re.fullmatch(r"https?://[^/{}\s@?#]+(/[^{}\s?#]*)?", url):
            raise ValueError(
                "expected http://HOST/PATH or https://HOST/PATH: put a query and placeholders into params, "
                "a user and a password into headers, keys into the environment"
            )
        return url

    @model_validator(mode="after")
    def _is_safe_to_save(self) -> Api:
        """The description is saved with an index, so a key is a placeholder, in an entry of its own."""
        for name, value in self._entries():
            secret = [_is_secret(place) for place in _placeholders(value)]
            if any(secret) and not all(secret):
                raise ValueError(f"{name!r} contains a key and other placeholders; separate them")
            if _holds_key(name) and isinstance(value, str) and not any(secret):
                raise ValueError(f"{name!r} is a key and would be saved; write {{key}}, and set key_env")
        if any(map(_is_secret, _placeholders([self.body]))):
            raise ValueError("a key in the body is not supported; put it into params or headers")
        return self

    def uses(self, name: str) -> bool:
        """Whether the description contains the placeholder `{name}`."""
        return name in self._places()

    def environment(self) -> list[str]:
        """The required environment variables, in a fixed order."""
        own = [self.key_env] if self.uses("key") else []
        return own + sorted(place[4:] for place in self._places() if place.startswith("env:"))

    def _places(self) -> set[str]:
        return {place for _, value in self._entries() for place in _placeholders(value)}

    def _entries(self) -> Iterator[tuple[str, Any]]:
        return (entry for part in (self.params, self.headers, self.body) for entry in _leaves(part))


class Call(NamedTuple):
    """The contents of one request; `body` is None for no body."""

    params: dict[str, Any]
    headers: dict[str, str]
    body: dict[str, Any] | None


def open_part(api: Api, values: Mapping[str, Any]) -> Call:
    """The public part of a request, without entries that contain a key.

    `values` has `query`, `k`, `language`, `country` and `answers`; entries whose value is None are omitted.
    """
    return Call(*(_fill(part, values) for part in (api.params, api.headers, api.body)))


def secret_part(api: Api, environment: Mapping[str, str]) -> Call:
    """The part of a request that contains the keys; it is the same for all queries."""
    values: dict[str, Any] = {f"env:{name}": value for name, value in environment.items()}
    values["key"] = environment.get(api.key_env)
    return Call(_fill(api.params, values), _fill(api.headers, values), None)


def read_results(api: Api, answer: Any) -> list[Result]:
    """The results in the API's JSON response. Raises ValueError if its structure is not the described one."""
    entries = at(answer, api.results)
    if entries is None and api.empty and at(answer, api.empty) is not None:
        return []
    if not isinstance(entries, list):
        raise ValueError(f"expected a list of results at {api.results!r}")
    results = [_result(entry, api) for entry in entries if isinstance(entry, dict)]
    readable = [result for result in results if result.title or result.text]
    if entries and not readable:
        raise ValueError(f"no result at {api.results!r} has a title at {api.title!r} or text at {api.text!r}")
    return readable


def read_answers(api: Api, answer: Any) -> list[Result]:
    """The direct answers in the JSON response that have a text."""
    parts = [(at(answer, place.at), place) for place in api.answers]
    results = [_result(part, place) for part, place in parts if isinstance(part, dict)]
    return [result for result in results if result.text]


def at(value: Any, path: str) -> Any:
    """The value at the path `a.0.b` of nested objects and lists; None if missing. An empty path is `value`.

    >>> at({"a": [{"b": 1}]}, "a.0.b")
    1
    """
    for step in path.split(".") if path else []:
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and step.isdigit() and int(step) < len(value):
            value = value[int(step)]
        else:
            return None
    return value


def _result(entry: dict[str, Any], fields: Fields) -> Result:
    paths = (fields.text,) if isinstance(fields.text, str) else fields.text
    text = " ".join(filter(None, (_text(at(entry, path)) for path in paths if path)))
    title, url = (_text(at(entry, path)) if path else "" for path in (fields.title, fields.link))
    return Result(title, text, url)


def _text(value: Any) -> str:
    """A string, a number or a list of them as text; empty for all other types."""
    if isinstance(value, list):
        return " ".join(filter(None, map(_text, value)))
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else ""


def _leaves(template: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The values in nested objects, each with its name; a list counts as one value."""
    if isinstance(template, Mapping):
        yield from (leaf for key, value in template.items() for leaf in _leaves(value, str(key)))
    else:
        yield name, template


def _placeholders(value: Any) -> list[str]:
    """The names of the placeholders in a string, or in all items of a list."""
    if isinstance(value, list | tuple):
        return [name for element in value for _, leaf in _leaves(element) for name in _placeholders(leaf)]
    return _PLACE.findall(value) if isinstance(value, str) else []


_KEYS = ("apikey", "accesskey", "subscriptionkey", "token", "secret", "password", "passwd", "authorization")


def _holds_key(name: str) -> bool:
    """Whether an entry of this name contains a key: `X-API-KEY`, `api_key`, `Authorization`."""
    letters = re.sub(r"[^a-z]", "", name.lower())
    return letters.endswith(_KEYS) or letters in ("key", "sig", "signature", "auth", "pwd", "cookie")


def _is_secret(place: str) -> bool:
    return place == "key" or place.startswith("env:")


def _fill(template: Any, values: Mapping[str, Any]) -> Any:
    """`template` with its placeholders replaced, not recursively; None if a placeholder has no value.

    Entries of objects that are None are omitted, and a list with such an item is None. A string that
    consists of one placeholder gets the value's type.
    """
    if isinstance(template, Mapping):
        filled = {name: _fill(value, values) for name, value in template.items()}
        return {name: value for name, value in filled.items() if value is not None}
    if isinstance(template, list | tuple):
        elements = [_fill(value, values) for value in template]
        return None if any(element is None for element in elements) else elements
    if not isinstance(template, str):
        return template
    if whole := _PLACE.fullmatch(template):
        return values.get(whole[1])
    if any(values.get(place) is None for place in _PLACE.findall(template)):
        return None
    return _PLACE.sub(lambda place: str(values[place[1]]), template)
