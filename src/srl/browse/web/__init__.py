"""The page of `srl inspect web`: runs, trajectories, transcripts and SQL in a browser, rendered here.

Everything from models and passages is shown as text: templates escape it, control characters are written
out, and the policy on content that is sent with every page allows no script but the package's.
"""

from srl.browse.web.app import create_app, serve_pages

__all__ = ["create_app", "serve_pages"]
