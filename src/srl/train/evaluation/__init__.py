"""Evaluations as runs: what the answers depend on, the run and its log, the episodes that fill it."""
