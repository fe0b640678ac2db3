"""The tests, importable from processes that they start: other packages install a `tests` too."""
