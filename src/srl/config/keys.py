"""The whole configuration, and the table of its keys: what each accepts, and what else is true of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import isclass
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import Field
from pydantic.fields import FieldInfo

from srl.config.sections import (
    ACTOR,
    EVERY,
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


class Config(Section):
    """The configuration of a run."""

    model: Annotated[Model, Key(EVERY, verl="actor_rollout_ref.model")] = Model()
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


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section that a field holds; None for a value."""
    annotation = field.annotation
    return annotation if isclass(annotation) and issubclass(annotation, Section) else None


def named_section_of(field: FieldInfo) -> type[Section] | None:
    """The section that a mapping field holds under each name; None for other fields."""
    value_type = get_args(field.annotation)[1] if _is_mapping(field) else None
    return value_type if isclass(value_type) and issubclass(value_type, Section) else None


def _is_mapping(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is dict


@dataclass(frozen=True, slots=True)
class Entry:
    """A key or a section: its dotted name, its field, and what else is true of it."""

    name: str
    field: FieldInfo
    facts: Key

    @property
    def default(self) -> Any:
        return self.field.get_default()

    @property
    def is_section(self) -> bool:
        return section_of(self.field) is not None

    @property
    def is_replaced(self) -> bool:
        """Whether it is a mapping that a layer replaces as a whole, such as the weights of rewards."""
        value_types = get_args(self.field.annotation)[1:] if _is_mapping(self.field) else ()
        return bool(value_types) and value_types[0] is not Any and named_section_of(self.field) is None


def _entries(section: type[Section], prefix: str = "", above: Key = Key()) -> Iterator[Entry]:
    """`section`'s keys and the sections in it with theirs, in source order; `above` is what is true of it."""
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        own = next((mark for mark in field.metadata if isinstance(mark, Key)), Key())
        verl, needs = own.verl, own.needs
        if verl.startswith("."):
            verl = above.verl and above.verl + (f".{name}" if verl == "." else verl)
        if needs.startswith("."):
            needs = prefix.removesuffix(".") + needs
        facts = replace(
            own,
            read_by=own.read_by or above.read_by,
            verl=verl,
            needs=" ".join(filter(None, (needs, above.needs))),
            refused=own.refused or above.refused,
        )
        yield Entry(key, field, facts)
        if inner := section_of(field):
            yield from _entries(inner, f"{key}.", facts)
        elif inner := named_section_of(field):
            yield from _entries(inner, f"{key}.<name>.", replace(facts, verl=""))


TABLE = {entry.name: entry for entry in _entries(Config)}
"""Every key and section by its name; `<name>` stands for a name that the user chooses."""


def keys(section: str = "") -> list[Entry]:
    """Every key, or those of a section, in source order."""
    below = [entry for entry in TABLE.values() if not entry.is_section]
    return [entry for entry in below if not section or entry.name.startswith(f"{section}.")]


def entry_of(path: Sequence[str]) -> Entry | None:
    """What the table has at `path`; None for an option of a plugin, and for what is in a mapping."""
    named = path[:2] == ("search", "retrievers") and len(path) > 3
    return TABLE.get(".".join((*path[:2], "<name>", *path[3:]) if named else path))


def facts(key: str) -> Key:
    """What is true of a key; of an option of a plugin, or what is in a mapping, what is true of that."""
    if key in TABLE:
        return TABLE[key].facts
    above, dot, _ = key.rpartition(".")
    return replace(facts(above), verl="") if dot else Key()


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
