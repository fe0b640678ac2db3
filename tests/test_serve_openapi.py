"""The server keeps to its own description, from which it is fuzzed; and the description is complete."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from jsonschema import Draft202012Validator
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from tests.test_serve_server import Client

from srl.index import build_index, open_index
from srl.serve.server import create_app
from srl.serve.server.openapi import docs_page
from srl.serve.wire import Limits
from srl.trajectory import Passage

load_all_checks()
WANTED = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "positive_data_acceptance",
)
CONFIG = {"checks": {"negative_data_rejection": {"expected-statuses": [400, 404, 413, 415, 422]}}}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    directory: Path = tmp_path_factory.mktemp("fuzz") / "i"
    build_index([Passage(str(row), f'"T{row}"\nred fox 0 {row}') for row in range(5)], directory)
    index = open_index(directory)
    return create_app({"first": index, "second": index}, limits=Limits(queries=8, query_chars=40, topk=9))


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("path", ["/retrieve", "/retrieve/{name}", "/access"])
def test_the_server_keeps_to_its_description(app, path, mode):
    config = schemathesis.Config.from_dict(CONFIG)
    operation = schemathesis.openapi.from_asgi("/openapi.json", app, config=config)[path]["POST"]
    checks = [CHECKS.get_one(name) for name in WANTED]

    @given(operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=30,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def attempt(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=checks)

    attempt()


def described(app: FastAPI) -> dict[str, Any]:
    found: dict[str, Any] = Client(app).get("/openapi.json").json()
    return found


def operations(app: FastAPI) -> list[tuple[str, str, dict[str, Any]]]:
    paths = described(app)["paths"].items()
    return [(method, path, operation) for path, methods in paths for method, operation in methods.items()]


def test_every_route_is_described_with_its_errors_and_an_example(app):
    found = {f"{method.upper()} {path}": operation for method, path, operation in operations(app)}
    assert set(found) == {
        "POST /retrieve",
        "POST /retrieve/{name}",
        "POST /access",
        "GET /health",
        "GET /healthz",
        "GET /health/{name}",
        "GET /metrics",
    }
    for route, operation in found.items():
        assert operation["summary"].endswith("."), route
        if route.startswith("POST"):
            assert {"200", "400", "401", "413", "422"} <= set(operation["responses"])
            assert operation["requestBody"]["content"]["application/json"]["example"]


def test_the_examples_are_valid_and_answered_as_described(app):
    for method, path, operation in operations(app):
        if method != "post":
            continue
        body = operation["requestBody"]["content"]["application/json"]
        Draft202012Validator(body["schema"]).validate(body["example"])
        answer = Client(app).post(path.replace("{name}", "second"), json=body["example"])
        assert answer.status_code == 200
        reference = operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
        schemas = described(app)
        Draft202012Validator({"$ref": reference, **schemas}).validate(answer.json())


@pytest.mark.parametrize("path", ["/health", "/healthz", "/health/second"])
def test_health_is_as_described(app, path):
    schemas = described(app)
    name = "NamedHealth" if path.endswith("second") else "Health"
    Draft202012Validator({"$ref": f"#/components/schemas/{name}", **schemas}).validate(
        Client(app).get(path).json()
    )


def test_the_page_shows_every_route_with_a_line_to_try_it_and_fetches_nothing(app):
    page = Client(app).get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    for method, path, _ in operations(app):
        assert f"<h2>{method.upper()} {path}</h2>" in page.text
    assert "curl http://test/retrieve -H &#x27;Content-Type: application/json&#x27; -d &#x27;{" in page.text
    assert "<td>integer or null, minimum 1, maximum 9</td>" in page.text
    assert not re.search(r"<script|src=|href=.?http|@import|url\(", page.text)


def test_the_page_escapes_what_it_shows(app):
    description = json.loads(json.dumps(described(app)))
    description["info"]["title"] = description["paths"]["/health"]["get"]["summary"] = "<img src=x>"
    page = docs_page(description, "http://<evil>/")
    assert "<img" not in page
    assert "<evil>" not in page
