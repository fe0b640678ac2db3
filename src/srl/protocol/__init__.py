"""How policy and tools talk, as text: prompt templates, Search-R1's tags, calls of tools."""

from srl.protocol.calls import FORMATS, Format, Said, ToolCall, checked, opens_thought, shown_result
from srl.protocol.passages import (
    NO_INFORMATION,
    NO_RESULTS,
    TAGS,
    escape,
    render_information,
    render_passage,
)
from srl.protocol.tags import (
    ENGINE,
    STOP_STRINGS,
    Action,
    parse_action,
    search_tag,
    unknown_retriever,
)
from srl.protocol.templates import (
    INFORMATION,
    TEMPLATES,
    WITHOUT_SEARCH,
    Template,
    template,
)

__all__ = [
    "ENGINE", "FORMATS", "INFORMATION", "NO_INFORMATION", "NO_RESULTS", "STOP_STRINGS", "TAGS", "TEMPLATES",
    "WITHOUT_SEARCH", "Action", "Format", "Said", "Template", "ToolCall", "checked", "escape",
    "opens_thought", "parse_action", "render_information", "render_passage", "search_tag", "shown_result",
    "template", "unknown_retriever",
]  # fmt: skip
