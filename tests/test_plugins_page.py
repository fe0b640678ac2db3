"""docs/plugins.md: its plugins are complete, typed, short, and import only what it calls public."""

import pytest
from tests.docs_page_lines import ROOT, blocks_of
from tests.plugin_site import forget_modules

from srl.testing import checks

PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
PLUGINS = {
    text.partition("\n")[0].removeprefix("# "): text for text in blocks_of(PAGE, "python") if text[0] == "#"
}
KINDS = {
    "my_rewards.py": ("reward", "Brevity"),
    "my_algos.py": ("algorithm", "baseline"),
    "my_retriever.py": ("retriever", "Overlap"),
    "my_tools.py": ("tool", "Days"),
}


@pytest.mark.parametrize("name", KINDS)
def test_plugin_of_the_page_conforms_as_it_is_written(name, tmp_path, monkeypatch):
    for file, text in PLUGINS.items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    kind, target = KINDS[name]
    assert all(check.passed for check in checks(kind, f"{name.removesuffix('.py')}:{target}"))
    forget_modules(tmp_path)
