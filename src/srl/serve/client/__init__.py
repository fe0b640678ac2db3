"""Searching over HTTP: whom to ask, when to ask again, and what every answer is worth."""

from srl.serve.client.preflight import check_servers
from srl.serve.client.request import retrieve_url
from srl.serve.client.search import HttpSearch
from srl.serve.wire import is_loopback

__all__ = ["HttpSearch", "check_servers", "is_loopback", "retrieve_url"]
