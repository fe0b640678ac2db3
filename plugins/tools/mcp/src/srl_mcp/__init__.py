"""The tools of an MCP server, as tools that a policy may call."""

from srl.plugins import hookimpl


@hookimpl
def srl_tools(register):
    register(
        "mcp",
        "srl_mcp.server:McpServer",
        "the tools of an MCP server",
        options="srl_mcp.server:Options",
    )
