"""Which descriptions of an API may have keys: those that this user built into an index, or named keys for.

An index says which API it asks, and an API says which environment variables are sent to its host. So an
index of somebody else could send any of the user's secrets anywhere.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from srl.errors import UserError
from srl.files import FORMAT, digest_text, write_json
from srl_web.api import Api
from srl_web.cache import user_cache


def trust(api: Api) -> None:
    """Note that this user's own description sends these variables to this address."""
    if api.environment():
        with suppress(UserError, OSError):  # then `env` names them
            _record(api).parent.mkdir(parents=True, exist_ok=True)
            write_json(_record(api), {"format": FORMAT, "url": api.url, "env": api.environment()})


def check_trusted(api: Api, named: Collection[str | None]) -> None:
    """Raises UserError where the API of an index from elsewhere sends variables that are not `named`."""
    unnamed = [name for name in api.environment() if name not in named]
    if unnamed and not _record(api).is_file():
        raise UserError(
            f"the api of this index sends {', '.join(unnamed)} to {urlsplit(api.url).hostname}, and the "
            f"index was not built here; if you trust it, type: --set env=[{','.join(api.environment())}]"
        )


def _record(api: Api) -> Path:
    return user_cache() / "web-apis" / f"{digest_text(api.url, *api.environment())}.json"
