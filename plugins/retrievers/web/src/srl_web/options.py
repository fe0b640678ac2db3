"""Options of web search."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from srl.errors import UserError
from srl.plugins import manager
from srl_web.api import Api

RUNTIME: dict[str, Any] = {"runtime": True}


class Options(BaseModel):
    """Options that affect results are part of the digest; limits, cache and keys are machine-dependent."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    provider: str | None = None
    """Provider of the search API: an installed one (`srl plugins list`), or `module:NAME`."""
    api: Api | None = Field(default=None, json_schema_extra={"path": True})
    """Description of another JSON API, instead of a provider: a mapping, or the path of a YAML file."""
    language: str | None = None
    """Language of the results, in the API's notation (`en`)."""
    country: str | None = None
    """Country to search from, in the API's notation (`us`; Tavily: `united states`)."""
    answers: bool = False
    """Put the API's direct answer (answer box, knowledge graph) before the results."""
    pages: bool = False
    """Fetch each result's page, and return the text around the snippet instead of the snippet."""
    page_chars: int = Field(default=1500, ge=100, le=100_000)
    """Maximum number of characters returned per page."""
    key_env: str | None = Field(default=None, json_schema_extra=RUNTIME)
    """Environment variable with the API key. null: the provider's usual one."""
    env: tuple[str, ...] = Field(default=(), json_schema_extra=RUNTIME)
    """Environment variables that the `api` of an index may send to its host, where another account or machine
    built the index. A provider, and an index built here, need none."""
    max_requests: int | None = Field(default=1000, ge=0, json_schema_extra=RUNTIME)
    """Spending cap: maximum number of requests to the API, including retries. null: none."""
    cost_per_request: float | None = Field(default=None, gt=0, json_schema_extra=RUNTIME)
    """Price of a request, in the currency of `max_cost`."""
    max_cost: float | None = Field(default=None, ge=0, json_schema_extra=RUNTIME)
    """Spending cap in money."""
    ledger: Path | None = Field(default=None, json_schema_extra=RUNTIME)
    """File that counts requests across processes and restarts. null: each process counts its own."""
    cache: Literal["user"] | Path | None = Field(default="user", json_schema_extra=RUNTIME)
    """Cache file of the API's responses. user: `$XDG_CACHE_HOME/srl/web.sqlite`. null: no cache."""
    cache_days: float | None = Field(default=30.0, gt=0, json_schema_extra=RUNTIME)
    """Days after which a cached response expires. null: never."""
    concurrency: int = Field(default=8, ge=1, le=1000, json_schema_extra=RUNTIME)
    """Concurrent requests."""
    rate: float | None = Field(default=10.0, gt=0, json_schema_extra=RUNTIME)
    """Maximum requests per second, per process. null: no limit."""
    timeout_s: float = Field(default=10.0, gt=0, json_schema_extra=RUNTIME)
    """Time-out of a request in seconds, until the last byte of the response."""
    attempts: int = Field(default=3, ge=1, le=20, json_schema_extra=RUNTIME)
    """Maximum number of requests per query."""
    backoff_s: float = Field(default=0.5, ge=0, json_schema_extra=RUNTIME)
    """Delay before the second attempt, in seconds; doubles with each further attempt."""
    retry_s: float = Field(default=20.0, ge=0, json_schema_extra=RUNTIME)
    """Seconds after the first attempt during which another may start. A query fails at once if the API
    requests a longer delay."""
    page_timeout_s: float = Field(default=5.0, gt=0, json_schema_extra=RUNTIME)
    """Time-out for fetching all pages of a query, in seconds."""
    page_bytes: int = Field(default=2_000_000, ge=1000, json_schema_extra=RUNTIME)
    """Maximum number of bytes read per page."""
    allow_private: bool = Field(default=False, json_schema_extra=RUNTIME)
    """Also fetch pages from private addresses (this machine, the local network)."""

    @field_validator("api", mode="before")
    @classmethod
    def _from_file(cls, value: Any) -> Any:
        if not isinstance(value, str | Path):
            return value
        try:
            return yaml.safe_load(Path(value).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{value} cannot be read: {error.strerror}") from error
        except (yaml.YAMLError, UnicodeError) as error:
            raise ValueError(f"{value} is not YAML: {error}".replace("\n", " ")) from error

    @model_validator(mode="after")
    def _fits(self) -> Options:
        if (self.provider is None) == (self.api is None):
            known = ", ".join(provider.name for provider in manager.installed("provider"))
            raise ValueError(f"choose one provider ({known}) or describe an api")
        for name in ("language", "country"):
            if getattr(self, name) is not None and not self.asked.uses(name):
                raise ValueError(f"{self.provider or 'this api'} has no {name}; leave it out")
        if self.answers and not self.asked.answers:
            raise ValueError(f"{self.provider or 'this api'} gives no direct answers; leave answers out")
        if self.asked.uses("key") and not self.asked.key_env:
            raise ValueError("the api uses {key} without an environment variable for it; add key_env")
        if self.max_cost is not None and self.cost_per_request is None:
            raise ValueError("max_cost needs cost_per_request")
        return self

    @property
    def asked(self) -> Api:
        """The API to use, with the variable `key_env` for its key if given."""
        api = self.api or provided(str(self.provider))
        return api.model_copy(update={"key_env": self.key_env}) if self.key_env else api

    @property
    def cap(self) -> int | None:
        """The maximum number of requests, from `max_requests` and `max_cost`; None: no limit."""
        affordable = None
        if self.max_cost is not None and self.cost_per_request is not None:
            affordable = int(self.max_cost / self.cost_per_request + 1e-9)
        caps = [cap for cap in (self.max_requests, affordable) if cap is not None]
        return min(caps, default=None)


def provided(name: str) -> Api:
    """The API of the provider plugin `name`. Raises UserError if it does not exist or is not an `Api`."""
    api = manager.load("provider", name)
    if not isinstance(api, Api):
        raise UserError(f"{name} is not a valid provider: expected an srl_web.api.Api")
    return api
