"""A reward model and a judge, offline: a tiny classifier made here, and a scripted judge on 127.0.0.1.

    python examples/model_rewards.py --steps 2

Both are stand-ins: the classifier has random weights, so its score is logged with weight 0, and the judge
compares texts. For real ones set reward.rm.model=DIRECTORY and reward.judge.url=http://HOST:PORT/v1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

WORKSPACE = Path(os.environ.get("SRL_WORKSPACE", "srl-workspace"))
SMALL = ["data.train_batch_size=8", "rollout.n=4", "actor.ppo_mini_batch_size=8",
         "eval.val_questions=8", "eval.test_questions=8"]  # fmt: skip


def make_classifier(folder: Path) -> None:
    """A classifier of pairs of texts with one label, byte by byte."""
    letters = ["<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({letter: token for token, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(folder)
    shape = BertConfig(
        vocab_size=len(letters), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, pad_token_id=0,
    )  # fmt: skip
    shape.num_labels = 1
    BertForSequenceClassification(shape).save_pretrained(folder)


class Judge(BaseHTTPRequestHandler):
    """The part of OpenAI's API that a judge needs. It reads the data in the prompt, and compares."""

    asked = 0

    def do_GET(self) -> None:
        self.reply({"data": [{"id": "scripted"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        lines = re.findall(r"^([a-z' ]+): (.*)$", body["messages"][-1]["content"], re.MULTILINE)
        data = {name: json.loads(text) for name, text in lines[:3]}
        accepted = [text.lower() for text in data["accepted answers"]]
        word = "right" if data["candidate's answer"].strip().lower() in accepted else "wrong"
        Judge.asked += 1
        self.reply(
            {
                "model": "scripted",
                "choices": [{"message": {"role": "assistant", "content": word}, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 200, "completion_tokens": 1},
            }
        )

    def reply(self, answer: object) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing for each request."""


@contextmanager
def running() -> Iterator[str]:
    """The URL of the judge while it runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()


def srl(*words: str) -> None:
    """Run a command, shown as one would type it."""
    print(f"$ {shlex.join(['srl', *words])}", flush=True)
    subprocess.run(["srl", *words], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=2)
    steps = parser.parse_args().steps
    classifier, verdicts = WORKSPACE / "models" / "made-classifier", WORKSPACE / "verdicts.sqlite"
    disable_progress_bar()
    make_classifier(classifier)
    with running() as url:
        settings = [
            *SMALL, "reward.weights={judge: 1, rm: 0, em: 0}", f"reward.rm.model={classifier}",
            f"reward.judge.url={url}", f"reward.judge.cache={verdicts}", "reward.judge.price_in=0.5",
        ]  # fmt: skip
        sets = [word for setting in settings for word in ("--set", setting)]
        srl("train", "--algo", "grpo", "--steps", str(steps), *sets)
        print(f"the judge was asked {Judge.asked:,} times")
        srl("inspect", "sql", "SELECT part, count(*) AS episodes, avg(value) AS mean, sum(value) AS total "
            "FROM rewards GROUP BY part ORDER BY part")  # fmt: skip


if __name__ == "__main__":
    main()
