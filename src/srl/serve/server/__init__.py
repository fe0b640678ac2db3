"""The HTTP search server behind `srl serve retriever`."""

from srl.serve.server.app import create_app, default_threads
from srl.serve.server.connections import bind, run_server, url_of
from srl.serve.server.replicas import run_replicas

__all__ = ["bind", "create_app", "default_threads", "run_replicas", "run_server", "url_of"]
