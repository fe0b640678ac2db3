"""The HTTP search server behind `srl serve retriever`."""

from srl.serve.server.app import create_app, default_threads
from srl.serve.server.run import bind, run_server, run_workers, url_of

__all__ = ["bind", "create_app", "default_threads", "run_server", "run_workers", "url_of"]
