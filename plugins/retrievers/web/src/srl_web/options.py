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
    """What is asked is part of the index and its digest; speed and cost belong to the machine."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    provider: str | None = None
    """Whose API is asked: an installed provider (`srl plugins list`), or `module:NAME`."""
    api: Api | None = Field(default=None, json_schema_extra={"path": True})
    """Any other JSON API instead of a provider: a mapping, or the path of a YAML file that holds one."""
    language: str | None = None
    """The language wanted, as the API writes it (`en`)."""
    country: str | None = None
    """The country searched from, as the API writes it (`us`; Tavily: `united states`)."""
    answers: bool = False
    """Put the API's direct answer (answer box, knowledge graph) before the results."""
    pages: bool = False
    """Fetch each result's page and give the part of it that the snippet is from."""
    page_chars: int = Field(default=1500, ge=100, le=100_000)
    """The most characters of a page that are given."""
    key_env: str | None = Field(default=None, json_schema_extra=RUNTIME)
    """The environment variable with the key, where it is not the usual one."""
    max_requests: int | None = Field(default=1000, ge=0, json_schema_extra=RUNTIME)
    """The spending cap: requests sent to the API, retries too; `null` for none."""
    cost_per_request: float | None = Field(default=None, gt=0, json_schema_extra=RUNTIME)
    """What one request costs, in the currency of `max_cost`."""
    max_cost: float | None = Field(default=None, ge=0, json_schema_extra=RUNTIME)
    """The spending cap in money."""
    ledger: Path | None = Field(default=None, json_schema_extra=RUNTIME)
    """A file that counts the requests of all processes and restarts that name it; without, each its own."""
    cache: Literal["user"] | Path | None = Field(default="user", json_schema_extra=RUNTIME)
    """The file of answers already paid for: `user` is `$XDG_CACHE_HOME/srl/web.sqlite`, `null` is none."""
    cache_days: float | None = Field(default=30.0, gt=0, json_schema_extra=RUNTIME)
    """How long an answer is good; `null` for ever."""
    concurrency: int = Field(default=8, ge=1, le=1000, json_schema_extra=RUNTIME)
    """Requests on their way at once."""
    rate: float | None = Field(default=10.0, gt=0, json_schema_extra=RUNTIME)
    """Requests begun per second, in each process; `null` for no limit."""
    timeout_s: float = Field(default=10.0, gt=0, json_schema_extra=RUNTIME)
    """Seconds for one request, from the first byte sent to the last received."""
    attempts: int = Field(default=3, ge=1, le=20, json_schema_extra=RUNTIME)
    """Requests for one query before it is given up."""
    backoff_s: float = Field(default=0.5, ge=0, json_schema_extra=RUNTIME)
    """Seconds before the second attempt; doubled before each further one."""
    retry_s: float = Field(default=20.0, ge=0, json_schema_extra=RUNTIME)
    """Seconds after the first request in which another may begin; with an API that asks for a longer wait
    the query is given up at once."""
    page_timeout_s: float = Field(default=5.0, gt=0, json_schema_extra=RUNTIME)
    """Seconds for all pages of one query together."""
    page_bytes: int = Field(default=2_000_000, ge=1000, json_schema_extra=RUNTIME)
    """How much of a page is read."""
    allow_private: bool = Field(default=False, json_schema_extra=RUNTIME)
    """Also fetch pages from addresses that are not public (this machine, the local network)."""

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
            raise ValueError("the api uses {key} and does not say which variable has it; add key_env")
        if self.max_cost is not None and self.cost_per_request is None:
            raise ValueError("max_cost needs cost_per_request")
        return self

    @property
    def asked(self) -> Api:
        """The API that is asked, with the key where `key_env` says."""
        api = self.api or provided(str(self.provider))
        return api.model_copy(update={"key_env": self.key_env}) if self.key_env else api

    @property
    def cap(self) -> int | None:
        """The most requests that may be sent; None for no limit."""
        affordable = None
        if self.max_cost is not None and self.cost_per_request is not None:
            affordable = int(self.max_cost / self.cost_per_request + 1e-9)
        caps = [cap for cap in (self.max_requests, affordable) if cap is not None]
        return min(caps, default=None)


def provided(name: str) -> Api:
    """The API of the provider plugin `name`. Raises UserError where there is none, or it is no `Api`."""
    api = manager.load("provider", name)
    if not isinstance(api, Api):
        raise UserError(f"the provider {name!r} is a {type(api).__name__}, expected an srl_web.api.Api")
    return api
