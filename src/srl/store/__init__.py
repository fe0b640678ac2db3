"""The trajectory log: written one finished step at a time, readable at any time.

with LogWriter(run / "log", RunInfo(run_id)) as log:
    log.write(step, "train", records, metrics)

connection = srl.store.open(run)
connection.sql("SELECT step, em FROM steps WHERE phase = 'val'")
"""

from srl.store.database import in_one_line
from srl.store.reader import TooSlow, find_logs, reading
from srl.store.reader import open_logs as open
from srl.store.records import (
    QUESTION_DIGEST,
    RECORD_ORDER,
    Record,
    question_digest,
    read_records,
    read_with_rows,
    rows,
)
from srl.store.run_info import RunInfo
from srl.store.schema import PER_TOKEN, TABLES, Column, Table
from srl.store.writer import LogWriter

__all__ = [
    "PER_TOKEN",
    "QUESTION_DIGEST",
    "RECORD_ORDER",
    "TABLES",
    "Column",
    "LogWriter",
    "Record",
    "RunInfo",
    "Table",
    "TooSlow",
    "find_logs",
    "in_one_line",
    "open",
    "question_digest",
    "read_records",
    "read_with_rows",
    "reading",
    "rows",
]
