"""Read-only views of the log: runs, trajectories, transcripts, verdicts, curves, SQL.

All are functions over a connection of `srl.store.open`; `srl inspect` prints what they give.
"""
