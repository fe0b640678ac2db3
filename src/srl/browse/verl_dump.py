"""Reading the generations that stock verl writes (`trainer.rollout_data_dir`) into a log.

verl writes `<step>.jsonl`, a line an episode: `input` and `output` as text without special tokens, `gts`,
`score`, `step` and further numbers of the reward (verl 0.9.1, `PPOTrainer._write_generations`). There are no
token ids, masks, log-probs or advantages. What was read is told from what was written by its tags:
`<information>`, or `<tool_response>` of verl's tool agents.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from srl.errors import UserError, parsing
from srl.files import json_object, lines_of
from srl.protocol import parse_action
from srl.store import LogWriter, Record
from srl.trajectory import Hit, Passage, Phase, Question, Score, Search, Segment, Trajectory

_OPENS = re.compile(r"<(information|tool_response)>")
_CLOSES = {name: re.compile(rf"</{name}>\s*") for name in ("information", "tool_response")}
_DOCUMENT = re.compile(r"Doc \d+ ?\(Title: (.*?)\) ", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_QUESTION = re.compile(r"Question\s*:")


def dump_files(directory: Path) -> list[Path]:
    """The files of a dump, in the order of their steps. Raises UserError if there are none."""
    files = [file for file in directory.glob("*.jsonl") if file.stem.isascii() and file.stem.isdigit()]
    if not files:
        raise UserError(f"{directory}: expected files STEP.jsonl, as verl's trainer.rollout_data_dir has")
    return sorted(files, key=lambda file: int(file.stem))


def read_dump(file: Path, phase: Phase = "train") -> list[Record]:
    """The episodes of one step. Raises UserError for a line that is not one of verl's."""
    samples, records = Counter[str](), []
    for number, line in enumerate(lines_of(file), start=1):
        if not line.strip():
            continue
        row = json_object(line, f"{file}:{number}", lambda name: None)  # a reward of NaN is none
        with parsing(f"{file}:{number}: not a generation that verl wrote"):
            record = _record(row, int(file.stem), phase)
        question = record.trajectory.question.id
        record.trajectory.sample = samples[question]
        samples[question] += 1
        records.append(record)
    return records


def check_dump(directory: Path) -> None:
    """Read every file of a dump once. Raises UserError for the first line that cannot be read."""
    for file in dump_files(directory):
        read_dump(file)


def import_dump(directory: Path, log: LogWriter, phase: Phase = "train") -> int:
    """Write every step of a dump to `log`; returns the number of episodes."""
    count = 0
    for file in dump_files(directory):
        records = read_dump(file, phase)
        scores = [record.score.value for record in records if record.score is not None]
        mean = {"critic/score/mean": sum(scores) / len(scores)} if scores else {}
        log.write(int(file.stem), phase, records, mean)
        count += len(records)
    return count


def _record(row: Mapping[str, Any], step: int, phase: Phase) -> Record:
    prompt, score = str(row["input"]), row["score"]
    trajectory = Trajectory(_question(prompt, row["gts"]), step=step, phase=phase)
    trajectory.segments.append(Segment("prompt", (), prompt, 0))
    _read_output(trajectory, str(row["output"]))
    more = row.keys() - {"input", "output", "gts", "score", "step"}
    parts = {name: float(row[name]) for name in sorted(more) if isinstance(row[name], int | float)}
    return Record(trajectory, None if score is None else Score(float(score), parts))


def _question(prompt: str, gts: Any) -> Question:
    """The question, identified by its whole prompt; its text is what follows the last `Question:`."""
    *before, last = _QUESTION.split(prompt)
    text = last.strip().partition("\n")[0].strip() if before else prompt.strip()
    if isinstance(gts, Mapping):
        gts = gts.get("target")
    golds = gts if isinstance(gts, list) else [] if gts is None else [gts]
    identity = blake2b(prompt.encode("utf-8", "replace"), digest_size=8).hexdigest()
    message = {"role": "user", "content": prompt}
    return Question(f"verl/{identity}", text, tuple(map(str, golds)), "verl", prompt=(message,))


def _read_output(trajectory: Trajectory, output: str) -> None:
    """Segments, searches and answer of what follows the prompt."""
    turn, queries = 0, list[str]()
    for is_read, part in _parts(output):
        if is_read:
            trajectory.segments.append(Segment("observation", (), part, turn))
            hits = _hits(part)
            trajectory.searches += [
                Search(query, hits, "ok" if hits else "empty", turn=turn, shown=len(hits))
                for query in queries
            ]
            trajectory.valid_searches += len(queries)
            turn, queries = turn + 1, []
        elif part:
            trajectory.segments.append(Segment("policy", (), part, turn))
            action, queries = parse_action(part), _calls(part)
            trajectory.valid_actions += int(action is not None or bool(queries))
            if action is not None and action.kind == "search":
                queries = [action.content]
            elif action is not None and action.kind == "answer":
                trajectory.answer, trajectory.end = action.content, "answered"


def _parts(output: str) -> Iterator[tuple[bool, str]]:
    """What the policy read (True), with the white space around it, and what it wrote."""
    end, unclosed = 0, set[str]()
    for tag in _OPENS.finditer(output):
        if tag.start() < end or tag[1] in unclosed:
            continue
        if closing := _CLOSES[tag[1]].search(output, tag.end()):
            written = output[end : tag.start()].rstrip()
            yield False, written
            yield True, output[end + len(written) : closing.end()]
            end = closing.end()
        else:
            unclosed.add(tag[1])
    yield False, output[end:]


def _calls(text: str) -> list[str]:
    """The queries of calls of a tool `search` with `query_list` or `query`."""
    queries: list[str] = []
    for call, closed in _CALL.findall(text):
        if not closed:
            break
        try:
            arguments = json.loads(call)["arguments"]
            queries += map(str, arguments.get("query_list") or [arguments["query"]])
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return queries


def _hits(observation: str) -> tuple[Hit, ...]:
    """The passages of an observation; one without `Doc 1(Title: …)` is a passage itself."""
    body = re.sub(r"</?(information|tool_response)>", "", observation).strip()
    titled, end, rest = body.rpartition(") ")
    _, *parts = _DOCUMENT.split(titled + end)
    if not parts:
        return (Hit(Passage("", body), 0.0),) if body and body != "No results found." else ()
    texts = [*parts[1:-1:2], parts[-1] + rest]
    pairs = zip(parts[::2], texts, strict=True)
    return tuple(Hit(Passage("", f"{title}\n{text.strip()}"), 0.0) for title, text in pairs)
