"""What everything here that speaks HTTP shares: which host is this machine, and when to ask again."""

from __future__ import annotations

import re
import time
from datetime import UTC
from email.utils import parsedate_to_datetime
from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine; such connections never use a proxy."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def retry_after(value: str) -> float | None:
    """Seconds in a `Retry-After` header, given as a number or a date (RFC 9110, 10.2.3); None if neither."""
    if re.fullmatch("[0-9]+", value.strip()):
        return float(value)
    try:
        date = parsedate_to_datetime(value)
        return max(0.0, (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - time.time())
    except (ValueError, OverflowError, IndexError):
        return None
