"""Command-line options made from settings models, so that a setting exists once.

Each field becomes an option of its own name with its description as help. Values reach the model as text,
which makes flags, environment and files fail with the same sentences. A nested model's fields stand among
the others; they take the parent's name in front only where two would collide.
"""

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
import yaml
from pydantic import BaseModel, SecretBytes, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from kvloop.runtime.config import ConfigError


@dataclass(frozen=True, slots=True)
class SettingOption:
    """One setting as an option."""

    parameter: str
    """Name of the command's parameter."""
    path: tuple[str, ...]
    """Where the value stands in the settings."""
    annotation: Any
    """Annotated type for typer."""
    structured: bool
    """Whether the text is YAML (mappings)."""
    repeatable: bool = False
    """Whether it may be given several times, or as one text with commas."""

    def parse(self, value: Any) -> Any:
        """Return the value as the settings take it. Raises ConfigError."""
        if self.repeatable and isinstance(value, list | tuple):
            return [part.strip() for text in value for part in str(text).split(",") if part.strip()]
        if not self.structured or not isinstance(value, str):
            return value
        try:
            return yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"{'.'.join(self.path)}: not YAML or JSON: {error}") from None


def options_of(model: type[BaseModel]) -> list[SettingOption]:
    """Return the options of a settings model, nested models included."""
    options: list[SettingOption] = []
    taken: set[str] = set()
    for path, field in _leaves(model, ()):
        name = path[-1] if path[-1] not in taken else "_".join(path)
        taken.add(name)
        options.append(_option(name, path, field))
    return options


def nest(options: list[SettingOption], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return given options as the mapping that settings are loaded from; None and () mean not given.

    Raises ConfigError.
    """
    values: dict[str, Any] = {}
    for option in options:
        value = given.get(option.parameter)
        if value is None or value in ((), []):
            continue
        place = values
        for part in option.path[:-1]:
            place = place.setdefault(part, {})
        place[option.path[-1]] = option.parse(value)
    return values


def command_of(
    options: list[SettingOption], extra: Mapping[str, Any], run: Callable[..., None], help_text: str
) -> Callable[..., None]:
    """Return a function whose signature is the options plus extra ones (name -> annotation, default None).

    It calls run(given, **extra values), given being the settings' options by parameter name.
    """
    annotations = {**extra, **{option.parameter: option.annotation for option in options}}

    def command(**given: Any) -> None:
        own = {name: given.pop(name) for name in extra}
        run(given, **own)

    command.__doc__ = help_text
    command.__annotations__ = annotations
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in annotations.items()
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _leaves(model: type[BaseModel], above: tuple[str, ...]) -> list[tuple[tuple[str, ...], FieldInfo]]:
    leaves: list[tuple[tuple[str, ...], FieldInfo]] = []
    for name, field in model.model_fields.items():
        nested = _plain_type(field.annotation)
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            leaves += _leaves(nested, (*above, name))
        else:
            leaves.append(((*above, name), field))
    # Outer settings keep their names when an inner one collides.
    return sorted(leaves, key=lambda leaf: len(leaf[0]))


def _plain_type(annotation: Any) -> Any:
    """Return X of `X | None`, else the annotation."""
    if get_origin(annotation) in (Union, types.UnionType):
        arguments = [part for part in get_args(annotation) if part is not type(None)]
        if len(arguments) == 1:
            return _plain_type(arguments[0])
    if get_origin(annotation) is Annotated:
        return _plain_type(get_args(annotation)[0])
    return annotation


def _option(name: str, path: tuple[str, ...], field: FieldInfo) -> SettingOption:
    kind = _plain_type(field.annotation)
    origin = get_origin(kind) or kind
    flag = "--" + name.replace("_", "-")
    text = " ".join((field.description or "").split())
    if shown := _shown_default(field):
        text += f" [default: {shown}]"
    shape: dict[str, Any] = {"help": text, "show_default": False}
    if kind is bool:
        switch = typer.Option(f"{flag}/--no-{flag[2:]}", **shape)
        return SettingOption(name, path, Annotated[bool | None, switch], structured=False)
    shape["metavar"] = _metavar(kind, origin)
    if origin in (list, tuple, set, frozenset):
        several = Annotated[list[str] | None, typer.Option(flag, **shape)]
        return SettingOption(name, path, several, structured=False, repeatable=True)
    single = Annotated[str | None, typer.Option(flag, **shape)]
    return SettingOption(name, path, single, structured=origin in (dict, Mapping))


def _metavar(kind: Any, origin: Any) -> str:
    if origin is Literal:
        return "|".join(str(choice) for choice in get_args(kind))
    if origin in (dict, Mapping):
        return "YAML"
    return {int: "INTEGER", float: "NUMBER", Path: "PATH"}.get(kind, "TEXT")


def _shown_default(field: FieldInfo) -> str:
    default = field.default
    secret = _plain_type(field.annotation) in (SecretStr, SecretBytes)
    if default is PydanticUndefined or default is None or secret:
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, list | tuple | dict | set | frozenset):
        return ", ".join(str(part) for part in default)
    return str(default)
