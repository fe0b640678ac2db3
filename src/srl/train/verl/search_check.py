"""Whether the search servers of a run answer the machine that asks; run in every worker of episodes."""

from __future__ import annotations

import json
import os
from pathlib import Path

from srl.config import load_saved
from srl.serve.client import check_servers
from srl.train.verl.job import ABOUT, RUN_VARIABLE


def search_problems(actor: object = None) -> list[str]:
    """What is wrong with the servers of `search.url` as this machine sees them, a line each.

    They must have the index that the run began with. `actor` is whom Ray calls it on.
    """
    run = Path(os.environ[RUN_VARIABLE])
    search = load_saved(run).search
    digest = json.loads((run / ABOUT).read_text(encoding="utf-8")).get("index_digest") or search.digest or ""
    return check_servers(search.url or (), digest=digest, topk=search.topk, timeout_s=search.timeout_s)
