"""The whole configuration, and the table of its keys: what each accepts, and what else is true of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from inspect import isclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import Field
from pydantic.fields import FieldInfo

from srl.config.sections import (
    ACTOR,
    EVERY,
    GENERATING,
    ROLLOUT,
    TRAINING,
    Actor,
    Algorithm,
    Cluster,
    Critic,
    Data,
    Eval,
    Key,
    Model,
    PluginSection,
    Ref,
    Retriever,
    Reward,
    Rft,
    Rollout,
    Search,
    Section,
    Sft,
    Tools,
    Trainer,
    Watches,
)

SectionT = TypeVar("SectionT", bound=Section)
KeyPath = tuple[str, ...]
"""A dotted key, split."""

Place = Literal["section", "leaf", "mapping", "free", "unknown"]
"""What is at a key: a section, a value, a mapping that is set as a whole, any value, or nothing."""


class Config(Section):
    """The configuration of a run."""

    model: Annotated[Model, Key(GENERATING, verl="actor_rollout_ref.model")] = Model()
    data: Annotated[Data, Key(TRAINING, verl="data")] = Data()
    search: Annotated[Search, Key(EVERY)] = Search()
    retriever: Annotated[Retriever, Key(EVERY)] = Retriever()
    rollout: Annotated[Rollout, Key(EVERY, verl=ROLLOUT)] = Rollout()
    tool: Annotated[Tools, Key(EVERY)] = Tools()
    reward: Annotated[Reward, Key(TRAINING)] = Reward()
    algorithm: Annotated[Algorithm, Key("rl", verl="algorithm")] = Algorithm()
    actor: Annotated[Actor, Key("rl", verl=ACTOR)] = Actor()
    critic: Annotated[Critic, Key("rl", verl="critic")] = Critic()
    ref: Annotated[Ref, Key("rl")] = Ref()
    sft: Annotated[Sft, Key(TRAINING, needs="sft.steps")] = Sft()
    rft: Annotated[Rft, Key("rft")] = Rft()
    trainer: Annotated[Trainer, Key(TRAINING, verl="trainer")] = Trainer()
    watch: Annotated[Watches, Key("rl")] = Watches()
    eval: Annotated[Eval, Key(TRAINING)] = Eval()
    cluster: Annotated[Cluster, Key("rl")] = Cluster()
    verl: Annotated[dict[str, Any], Key("rl")] = Field(default={})
    """Any key of verl's own configuration, by verl's name. Only with `--backend verl`."""

    def with_settings(self, settings: Mapping[str, Any]) -> Config:
        """A copy with other values of `section.key`, which are not validated."""
        config = self
        for name, value in settings.items():
            config = _with_value(config, name.split("."), value)
        return config

    @property
    def needs_reference(self) -> bool:
        """Whether a KL to the reference policy is computed, in the rewards or in the loss."""
        return self.algorithm.use_kl_in_reward or self.actor.use_kl_loss


def _with_value(section: SectionT, names: Sequence[str], value: Any) -> SectionT:
    """A copy of a section with another value of the key that `names` lead to."""
    name, *deeper = names
    return section.model_copy(
        update={name: _with_value(getattr(section, name), deeper, value) if deeper else value}
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """One documented key: its dotted name, its field, and what else is true of it."""

    name: str
    field: FieldInfo
    facts: Key

    @property
    def default(self) -> Any:
        return self.field.get_default()


def keys(model: type[Section] = Config, prefix: str = "") -> Iterator[Entry]:
    """Every key of `model` and the sections in it, in source order.

    `<name>` stands for a name that the user chooses.
    """
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        if section := section_of(field):
            yield from keys(section, f"{key}.")
            continue
        yield Entry(key, field, facts(key))
        if value_section := named_section_of(field):
            yield from keys(value_section, f"{key}.<name>.")


@cache
def facts(key: str) -> Key:
    """What is true of a key, from itself and its sections; of a plugin's option what is of its section."""
    whole = Key()
    section: type[Section] | None = Config
    for part in split_key(key):
        field = section.model_fields.get(part) if section else None
        if field is None:
            return replace(whole, verl="")
        own = next((mark for mark in field.metadata if isinstance(mark, Key)), Key())
        verl, needs = own.verl, own.needs
        if verl.startswith("."):
            verl = whole.verl and whole.verl + (f".{part}" if verl == "." else verl)
        if needs.startswith("."):
            needs = key.rpartition(".")[0] + needs
        whole = replace(
            own,
            read_by=own.read_by or whole.read_by,
            verl=verl,
            needs=" ".join(filter(None, (needs, whole.needs))),
            refused=own.refused or whole.refused,
        )
        section = section_of(field)
    return whole


def split_key(key: str, base: KeyPath = ()) -> KeyPath:
    """The path of a dotted key below `base`; a plugin's `package.module:Class` stays one part.

    >>> split_key("reward.weights.my.rewards:Brevity")
    ('reward', 'weights', 'my.rewards:Brevity')
    """
    path = (*base, *key.split("."))
    colon = next((place for place, part in enumerate(path) if ":" in part), 0)
    start = 2 if path[:2] == ("reward", "weights") else 1
    if path[0] not in ("retriever", "reward", "algorithm", "tool") or colon <= start:
        return path
    return (*path[:start], ".".join(path[start : colon + 1]), *path[colon + 1 :])


def value_of(config: Config, key: str) -> Any:
    """The value of a key; options of plugins are in mappings, and `module:Class` is one part of a key."""
    value: Any = config
    for name in split_key(key):
        value = value[name] if isinstance(value, Mapping) else getattr(value, name)
    return value


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section that a field holds; None for a value."""
    annotation = field.annotation
    return annotation if isclass(annotation) and issubclass(annotation, Section) else None


def named_section_of(field: FieldInfo) -> type[Section] | None:
    """The section that a mapping field holds under each name; None for other fields."""
    arguments = get_args(field.annotation)
    value_type = arguments[1] if get_origin(field.annotation) is dict else None
    return value_type if isclass(value_type) and issubclass(value_type, Section) else None


def place(path: Sequence[str], model: type[Section] | None = None) -> tuple[Place, FieldInfo | None]:
    """What is at `path` below `model` (default: the whole configuration), and its field if it has one."""
    model = model or Config
    if not path:
        return "section", None
    field, tail = model.model_fields.get(path[0]), path[1:]
    if field is None:
        return ("free" if issubclass(model, PluginSection) else "unknown"), None
    section = section_of(field)
    return place(tail, section) if section else _place_in(field, tail)


def _place_in(field: FieldInfo, tail: Sequence[str]) -> tuple[Place, FieldInfo | None]:
    """What is at `tail` below a field that is not a section: only mappings hold keys."""
    if get_origin(field.annotation) is not dict:
        return ("unknown", None) if tail else ("leaf", field)
    value_section = named_section_of(field)
    if value_section and tail:
        return place(tail[1:], value_section)
    if value_section or get_args(field.annotation)[1] is Any:
        return "free", field
    return ("leaf" if tail else "mapping"), field


def flat(tree: Mapping[str, Any], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """`(path, value)` of each value in a nested mapping; an empty mapping is a value."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, (*path, name))
        else:
            yield (*path, name), value


def plain(value: Any) -> Any:
    """`value` with lists for tuples, recursively, as YAML and JSON have it."""
    if isinstance(value, Mapping):
        return {name: plain(element) for name, element in value.items()}
    return [plain(element) for element in value] if isinstance(value, tuple | list) else value
