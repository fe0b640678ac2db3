"""`srl ask`: a model answers questions one by one, in the episodes of training and evaluation."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from srl import process
from srl.config import Config
from srl.progress import Note
from srl.rollout.environment import Environment
from srl.rollout.episode import Key, OnProgress
from srl.serve.named_retrievers import aclose, connect
from srl.train.load_components import Generation, load_environment, load_generation
from srl.train.load_protocol import load_template, prompts
from srl.train.model_settings import trained_with
from srl.train.search import index_digests, load_search
from srl.trajectory import Question, Trajectory
from srl.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Conversation:
    """A model and what it searches, both loaded. `indexes` and `trained_with` are digests by retriever.

    Questions are asked one after the other, each without what was said before it.
    """

    loaded: Generation
    environment: Environment
    seed: int
    indexes: Mapping[str, str]
    trained_with: Mapping[str, str]
    _runner: asyncio.Runner
    _samples: Counter[str] = field(default_factory=Counter)

    def ask(self, text: str, on_progress: OnProgress | None = None) -> Trajectory:
        """The episode of the question `text`; the same question again is another sample.

        Raises UserError for a question that does not fit, KeyboardInterrupt after a signal.
        """
        prompt = prompts(self.environment.template, self.environment.codec)(text)
        digest = blake2b(text.encode(), digest_size=6).hexdigest()
        question = Question(f"ask/{digest}", text, (), prompt=prompt)
        self._samples[text] += 1
        key = Key(self.seed, "eval", sample=self._samples[text] - 1)
        episode = self.environment.play(self.loaded.engine, question, key, on_progress)
        return process.run_async(episode, self._runner)


@contextmanager
def conversation(config: Config, workspace: Workspace, note: Note) -> Iterator[Conversation]:
    """The model `config.model.path`, or a server's, and what `config.search` names, until the body ends.

    Sampling is that of an evaluation. Raises UserError.
    """
    load_template(config)  # raises before the model is loaded
    search = load_search(config, workspace, note)
    loaded = load_generation(config.with_settings({"rollout.max_num_seqs": 1}), note)
    with asyncio.Runner() as runner:
        try:
            process.run_async(connect(search), runner)
            environment = load_environment(config, loaded.codec, search, note, loaded.engine)
            environment = replace(environment.for_evaluation(config.eval.temperature), attempts=1)
            yield Conversation(
                loaded, environment, config.trainer.seed, index_digests(search), trained_with(config), runner
            )
        finally:
            loaded.engine.close()
            process.run_async(aclose(search), runner)
