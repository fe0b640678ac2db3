"""Search for many episodes at once: in process, over HTTP, and the server in between."""

from srl.serve.client import HttpSearch
from srl.serve.in_process import LocalSearch

__all__ = ["HttpSearch", "LocalSearch"]
