"""The search client: `HttpSearch`, with retries, failover and a check of the servers before a run."""

from srl.serve.client.http_search import HttpSearch
from srl.serve.client.preflight import check_servers
from srl.serve.client.request import retrieve_url
from srl.serve.wire import is_loopback

__all__ = ["HttpSearch", "check_servers", "is_loopback", "retrieve_url"]
