"""Options of web search."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from srl_web.api import Api
from srl_web.providers import PROVIDERS

_RUNTIME: dict[str, Any] = {"runtime": True}


class Options(BaseModel):
    """Options that affect results are part of the digest; limits, cache and keys are machine-dependent."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    provider: Literal["serpapi", "google", "serper", "brave", "tavily"] | None = None
    """Provider of the search API."""
    api: Api | None = Field(default=None, json_schema_extra={"path": True})
    """Description of another JSON API, instead of a provider: a mapping, or the path of a YAML file."""
    language: str | None = None
    """Language of the results, in the API's notation (`en`)."""
    country: str | None = None
    """Country to search from, in the API's notation (`us`; Tavily: `united states`)."""
    answers: bool = False
    """Put the API's direct answer (answer box, knowledge graph) before the results."""
    key_env: str | None = Field(default=None, json_schema_extra=_RUNTIME)
    """Environment variable with the API key. null: the provider's usual one."""
    env: tuple[str, ...] = Field(default=(), json_schema_extra=_RUNTIME)
    """Environment variables that the `api` of an index may send to its host. A provider needs none."""
    max_requests: int | None = Field(default=1000, ge=0, json_schema_extra=_RUNTIME)
    """Spending cap: maximum number of requests of this process to the API, including retries. null: none."""
    cache: Literal["user"] | Path | None = Field(default="user", json_schema_extra=_RUNTIME)
    """Cache file of the API's responses. user: `$XDG_CACHE_HOME/srl/web.sqlite`. null: no cache."""
    concurrency: int = Field(default=8, ge=1, le=1000, json_schema_extra=_RUNTIME)
    """Concurrent requests."""
    rate: float | None = Field(default=10.0, gt=0, json_schema_extra=_RUNTIME)
    """Maximum requests per second, per process. null: no limit."""
    timeout_s: float = Field(default=10.0, gt=0, json_schema_extra=_RUNTIME)
    """Time-out of a request in seconds, until the last byte of the response."""
    attempts: int = Field(default=3, ge=1, le=20, json_schema_extra=_RUNTIME)
    """Maximum number of requests per query."""

    @field_validator("api", mode="before")
    @classmethod
    def _from_file(cls, value: Any) -> Any:
        if not isinstance(value, str | Path):
            return value
        try:
            return yaml.safe_load(Path(value).read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError, UnicodeError) as error:
            raise ValueError(f"{value} is not a readable YAML file: {error}".replace("\n", " ")) from error

    @model_validator(mode="after")
    def _fits(self) -> Options:
        if (self.provider is None) == (self.api is None):
            raise ValueError(f"choose one provider ({', '.join(PROVIDERS)}) or describe an api")
        for name in ("language", "country"):
            if getattr(self, name) is not None and not self.chosen_api.uses(name):
                raise ValueError(f"{self.provider or 'this api'} has no {name}; leave it out")
        if self.answers and not self.chosen_api.answers:
            raise ValueError(f"{self.provider or 'this api'} gives no direct answers; leave answers out")
        if self.chosen_api.uses("key") and not self.chosen_api.key_env:
            raise ValueError("the api uses {key} without an environment variable for it; add key_env")
        return self

    @property
    def chosen_api(self) -> Api:
        """The API to use, with the variable `key_env` for its key if given."""
        api = self.api or PROVIDERS[str(self.provider)]
        return api.model_copy(update={"key_env": self.key_env}) if self.key_env else api
