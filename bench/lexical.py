"""`bm25` compared with Lucene through pyserini: questions per second, build, memory, for growing corpora.

Both are asked all 3,610 questions of NQ-open again and again, three passages each, by the same number of
threads; after two passes to get warm the timed ones alternate. Lucene is asked through pyserini's
`batch_search`, which uses as many threads as Java sees processors, and gives ids and scores; `bm25` gives the
passages too. Passages are made of the sentences of 2WikiMultihopQA. What both rank is compared.

    python bench/lexical.py --data ../shared/data --sizes 6000 300000
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from made_passages import made_passages, nq_questions

from srl.data.corpus import write_corpus

RESULT = Path(__file__).parent / "results" / "lexical.json"
OPTIONS: dict[str, Any] = {"stemmer": "porter"}
K, WARM = 3, 2
DEPTH = 50
"""How deep both are asked for the comparison, so that ties at the third place are seen whole."""


def build_bm25(corpus: Path, out: Path, threads: int = 0) -> None:
    from srl.index import build_index

    build_index(corpus, out, "bm25", OPTIONS | {"build_processes": threads})


def build_lucene(corpus: Path, out: Path, threads: int, *options: str) -> None:
    """Anserini's own indexer, as `python -m pyserini.index.lucene` runs it."""
    from srl_lucene import java

    java.start("8g")
    arguments = ["-collection", "JsonCollection", "-input", str(corpus.parent), "-index", str(out),
                 "-generator", "DefaultLuceneDocumentGenerator", "-threads", str(threads)]  # fmt: skip
    java.java_class("io.anserini.index.IndexCollection").main([*arguments, *options])


def open_bm25(index: Path, threads: int) -> Callable[[Sequence[str], int], Any]:
    from srl.index import open_index

    return lambda queries, k, index=open_index(index, {"n_threads": threads}): index.search(list(queries), k)


def open_lucene(index: Path, threads: int) -> Callable[[Sequence[str], int], Any]:
    from srl_lucene import java

    java.start("4g")
    os.environ.setdefault("OPENAI_API_KEY", "none")  # pyserini makes a client of it on import
    from pyserini.search.lucene import LuceneSearcher

    searcher = LuceneSearcher(str(index))
    searcher.set_bm25(0.9, 0.4)
    return lambda queries, k: searcher.batch_search(
        list(queries), [str(number) for number in range(len(queries))], k=k, threads=threads
    )


BUILD: dict[str, Callable[[Path, Path, int], None]] = {"bm25": build_bm25, "lucene": build_lucene}
OPEN = {"bm25": open_bm25, "lucene": open_lucene}
RETRIEVERS = ("bm25", "lucene")


def work(retriever: str, index: Path, threads: int, data: Path) -> None:
    """Open an index and answer on stdin's lines: one pass over the questions, or their rankings."""
    questions, begin = nq_questions(data), time.perf_counter()
    search = OPEN[retriever](index, threads)
    search(questions[:1], K)
    say({"open_s": time.perf_counter() - begin, **memory()})
    for line in sys.stdin:
        if line.strip() == "rank":
            say([[list(pair) for pair in hits] for hits in ranked(retriever, search(questions, DEPTH))])
            continue
        begin = time.perf_counter()
        search(questions, K)
        say({"seconds": time.perf_counter() - begin, **memory()})


def ranked(retriever: str, rankings: Any) -> list[list[tuple[str, float]]]:
    """Ids and scores, best first."""
    if retriever != "lucene":
        return [[(hit.passage.id, hit.score) for hit in hits] for hits in rankings]
    return [[(hit.docid, hit.score) for hit in rankings[str(number)]] for number in range(len(rankings))]


def memory() -> dict[str, int]:
    """Resident MiB of this process: its own, and of files that are mapped."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        key: int(lines[name].split()[0]) >> 10
        for key, name in (("own_mib", "RssAnon"), ("mapped_mib", "RssFile"))
    }


def say(obj: object) -> None:
    print("@" + json.dumps(obj), flush=True)


class Worker:
    """A process that holds one retriever open."""

    def __init__(self, retriever: str, index: Path, threads: int, data: Path) -> None:
        arguments = ["--data", str(data), "--work", retriever, str(index), str(threads)]
        environment = {**os.environ, "JAVA_TOOL_OPTIONS": f"-XX:ActiveProcessorCount={threads}"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip
        self.opened: dict[str, float] = self._read()

    def ask(self, what: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        raise SystemExit(f"the worker ended: {self._process.wait()}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def build(retriever: str, corpus: Path, out: Path, threads: int, data: Path) -> dict[str, float]:
    """Seconds of a build in a process of its own, and the most memory it had, in MiB."""
    begin = time.perf_counter()
    arguments = ["--data", str(data), "--build", retriever, str(corpus), str(out), str(threads)]
    process = subprocess.Popen(
        [sys.executable, __file__, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"building with {retriever} failed")
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    seconds, peak = time.perf_counter() - begin, usage.ru_maxrss >> 10
    return {"build_s": seconds, "build_peak_mib": peak, "disk_mib": size >> 20}


def measure(size: int, threads: int, rounds: int, builds: int, data: Path, compare: bool) -> dict[str, Any]:
    """Both retrievers at one size."""
    with tempfile.TemporaryDirectory(prefix="srl-bench-") as folder:
        corpus = Path(folder) / "corpus" / "corpus.jsonl"
        write_corpus(corpus, made_passages(data, size))
        row: dict[str, Any] = {"passages": size, "threads": threads}
        tries: dict[str, list[dict[str, float]]] = {retriever: [] for retriever in RETRIEVERS}
        for _ in range(builds):
            for retriever in RETRIEVERS:
                shutil.rmtree(Path(folder) / retriever, ignore_errors=True)
                tries[retriever].append(build(retriever, corpus, Path(folder) / retriever, threads, data))
                print(size, retriever, tries[retriever][-1], file=sys.stderr, flush=True)
        for retriever, builds_of in tries.items():
            seconds = [build["build_s"] for build in builds_of]
            row[retriever] = builds_of[-1] | {"build_s": median(seconds), "builds_s": seconds}
        workers = {
            retriever: Worker(retriever, Path(folder) / retriever, threads, data) for retriever in RETRIEVERS
        }
        passes: dict[str, list[float]] = {retriever: [] for retriever in workers}
        for turn in range(WARM + rounds):
            for retriever, worker in workers.items():
                last = worker.ask("pass")
                if turn >= WARM:
                    passes[retriever].append(last["seconds"])
                row[retriever] |= {name: last[name] for name in ("own_mib", "mapped_mib")}
        if compare:
            ranks = {retriever: worker.ask("rank") for retriever, worker in workers.items()}
            row["overlap"] = overlap(ranks["bm25"], ranks["lucene"])
        for retriever, worker in workers.items():
            row[retriever] |= {"open_s": worker.opened["open_s"], "qps": per_second(passes[retriever], data)}
            worker.close()
    row["ratio"] = row["bm25"]["qps"]["median"] / row["lucene"]["qps"]["median"]
    row["build_ratio"] = row["lucene"]["build_s"] / row["bm25"]["build_s"]
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def per_second(seconds: list[float], data: Path) -> dict[str, float]:
    rates = [len(nq_questions(data)) / each for each in seconds]
    return {"median": median(rates), "low": min(rates), "high": max(rates)}


def overlap(ours: list[list[tuple[str, float]]], theirs: list[list[tuple[str, float]]]) -> float:
    """The mean share of one's first three that the other has too, what is tied with the third pooled."""
    shares = []
    for our_hits, their_hits in zip(ours, theirs, strict=True):
        if our_hits and their_hits:
            shares += [_share(our_hits, their_hits), _share(their_hits, our_hits)]
    return sum(shares) / len(shares)


def _share(hits: Sequence[tuple[str, float]], others: Sequence[tuple[str, float]]) -> float:
    last = others[min(K, len(others)) - 1][1]
    pool = {name for name, score in others if score >= last * (1 - 1e-5)}
    first = hits[:K]
    tied = {name for name, score in hits if score >= first[-1][1] * (1 - 1e-5)}
    return min(len(tied & pool), len(first)) / len(first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--sizes", type=int, nargs="+", default=[6000, 300_000])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--builds", type=int, default=3, help="builds of each, in turn")
    parser.add_argument("--keep", action="store_true", help="keep the rows of other sizes in the result")
    parser.add_argument("--build", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.build:
        retriever, corpus, out, threads = options.build
        BUILD[retriever](Path(corpus), Path(out), int(threads))
    elif options.work:
        retriever, index, threads = options.work
        work(retriever, Path(index), int(threads), options.data)
    else:
        rows = json.loads(RESULT.read_text())["rows"] if options.keep and RESULT.is_file() else []
        for size in options.sizes:
            for threads in options.threads:
                rows = [row for row in rows if (row["passages"], row["threads"]) != (size, threads)]
                rows.append(
                    measure(size, threads, options.rounds, options.builds, options.data, compare=threads == 1)
                )
                rows.sort(key=lambda row: (row["threads"], row["passages"]))
                RESULT.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
