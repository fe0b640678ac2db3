"""Metrics from the log of a run, with DuckDB and without a notebook; works during training too.

    python examples/read_log.py srl-workspace/runs            # a run, or a folder of runs
    python examples/read_log.py srl-workspace/runs val

`srl.store.open` gives a DuckDB connection with a view for each table of docs/store.md.
"""

import sys

import srl.store

FIGURES = {
    "exact match and searches by step": """
        SELECT run_id, step, round(avg(em), 3) AS em, round(avg(searches), 2) AS searches, count(*) AS n
        FROM trajectories WHERE phase = $phase GROUP BY run_id, step ORDER BY run_id, step
    """,
    "why answers were wrong": """
        SELECT verdict, count(*) AS episodes, round(avg(turns), 2) AS turns
        FROM trajectories WHERE phase = $phase AND verdict <> 'correct'
        GROUP BY verdict ORDER BY episodes DESC
    """,
    "questions that no sample answered": """
        SELECT question, any_value(golden_answers) AS golden, list(DISTINCT answer)[:3] AS answers
        FROM trajectories WHERE phase = $phase
        GROUP BY question_id, question HAVING max(em) = 0 ORDER BY question LIMIT 5
    """,
    "what a search costs": """
        SELECT status, count(*) AS searches, round(median(latency_s) * 1000, 1) AS median_ms
        FROM searches WHERE phase = $phase GROUP BY status ORDER BY searches DESC
    """,
}


def main(path: str, phase: str = "train") -> None:
    log = srl.store.open(path)
    for title, query in FIGURES.items():
        print(f"{title} ({phase})")
        found = log.execute(query, {"phase": phase})
        print("  " + " | ".join(column[0] for column in found.description))
        for row in found.fetchall():
            print("  " + " | ".join(map(str, row)))
        print()


if __name__ == "__main__":
    main(*sys.argv[1:])
