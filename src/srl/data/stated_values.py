"""Where a text states a value: a name, a date in another order, the adjective of a country."""

from __future__ import annotations

import re

Span = tuple[int, int]

_MONTHS = ("january", "february", "march", "april", "may", "june", "july", "august", "september", "october",
           "november", "december")  # fmt: skip
_NUMBER = r"\d{1,2}(?:st|nd|rd|th)?"
_DATE = re.compile(
    rf"(?<!\w)(?:(?:(?P<day>{_NUMBER})\s+)?(?P<month>{'|'.join(_MONTHS)})(?:\s+(?P<day2>{_NUMBER}))?,?\s+"
    r"(?P<year>\d{3,4})|(?P<only>\d{4}))(?!\w)",
    re.IGNORECASE,
)


_COUNTRIES = (
    ("United States", "United States of America", "US", "U.S.", "USA", "America", "American"),
    ("United Kingdom", "UK", "U.K.", "Britain", "Great Britain", "British"),
    ("Denmark", "Danish"), ("France", "French"), ("Greece", "Greek"), ("Ireland", "Irish"),
    ("Netherlands", "Dutch"), ("Philippines", "Filipino"), ("Poland", "Polish"), ("Spain", "Spanish"),
    ("Switzerland", "Swiss"), ("Thailand", "Thai"),
)  # fmt: skip
"""Names and adjectives of countries that do not begin alike."""


def find_text(value: str, text: str) -> Span | None:
    """Where `value` stands in `text` as whole words: as it is written, else in other case or punctuation."""
    value = value.strip()
    words = r"\W+".join(map(re.escape, re.findall(r"\w+", value)))
    for pattern, flags in ((re.escape(value), 0), (words, re.IGNORECASE)):
        if pattern and (match := re.search(rf"(?<!\w){pattern}(?!\w)", text, flags)):
            return match.span()
    return None


def find_value(value: str, text: str) -> Span | None:
    """Where `text` states `value`: in its words, as the same date, or as the adjective of a country."""
    if (span := find_text(value, text)) is not None:
        return span
    if (date := _DATE.search(value)) and date["month"]:
        return next((match.span() for match in _DATE.finditer(text) if _date(match) == _date(date)), None)
    for name in next((names for names in _COUNTRIES if value in names), ()):
        if (span := find_text(name, text)) is not None:
            return span
    if len(value) < 4 or not (value.isalpha() and value[0].isupper()):
        return None
    stem = value[: max(4, len(value) - 3)]  # what a country's name and its adjective have in common
    adjective = re.search(rf"(?<!\w){re.escape(stem)}[a-z]*(?!\w)", text)
    return adjective.span() if adjective else None


def _date(match: re.Match[str]) -> tuple[int, int, int]:
    """Year, month and day; 0 for a part that is not given."""
    if match["only"]:
        return int(match["only"]), 0, 0
    day = re.sub(r"\D", "", match["day"] or match["day2"] or "0")
    return int(match["year"]), _MONTHS.index(match["month"].lower()) + 1, int(day)
