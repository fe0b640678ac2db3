"""Make the small base model that travels with the package, and say what it has seen.

    python bench/base.py [--out src/srl/presets/base]

About half an hour on one core. It writes a Hugging Face directory with `card.json`: the stages,
what was trained on, and the loss on the policy's own tokens at the end of each.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from srl.files import write_json
from srl.model import count_parameters, save_model
from srl.train.base_model import make_base
from srl.train.prepare import BASE_MODEL


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=BASE_MODEL)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began, stages = time.perf_counter(), {}

    def report(stage: str, step: int, metrics: dict[str, float]) -> None:
        stages[stage] = {"steps": step, "policy_loss": round(metrics["sft/policy_loss"], 5)}
        if step % 50 == 0:
            print(f"{stage} {step}  loss {metrics['sft/policy_loss']:.4f}", file=sys.stderr, flush=True)

    model, tokenizer = make_base(arguments.seed, report)
    save_model(model, tokenizer, arguments.out)
    card = {
        "format": 1,
        "made_by": "python bench/base.py",
        "seed": arguments.seed,
        "parameters": count_parameters(model),
        "vocabulary": len(tokenizer),
        "seconds": round(time.perf_counter() - began),
        "stages": stages,
    }
    write_json(arguments.out / "card.json", card)
    print(json.dumps(card, indent=2))


if __name__ == "__main__":
    main()
