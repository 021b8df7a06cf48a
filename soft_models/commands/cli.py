"""Command line and YAML reader derived from a dataclass: its fields are the one list of options.

A field ``batch_size: int = 128  # images ...`` becomes the flag ``--batch-size``, the YAML key ``batch_size`` (or
``batch-size``) and, from its trailing comment, the line of ``--help``. Defaults < YAML < command line.
"""

import argparse
import ast
import dataclasses
import inspect
import re
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from soft_models.errors import UsageError, suggestion

ConfigT = TypeVar("ConfigT")

TRUE = ("true", "yes", "on", "1")
FALSE = ("false", "no", "off", "0")


def cast(value: Any, hint: Any, name: str) -> Any:
    """``value``, as text or as YAML gives it, in the type ``hint`` of the option ``name``.

    Raises:
        UsageError: The value does not fit the type.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
            return None
        return cast(value, next(a for a in args if a is not type(None)), name)
    if origin is Literal:
        if value not in args:
            text = str(value)
            choices = ", ".join(repr(a) for a in args)
            raise UsageError(f"{name} must be one of {choices}, got {value!r}{suggestion(text, map(str, args))}")
        return value
    if origin is tuple:
        items = value if isinstance(value, list | tuple) else [] if value is None else [value]
        if Ellipsis not in args and len(items) != len(args):
            raise UsageError(f"{name} takes {len(args)} values, got {len(items)}")
        return tuple(cast(item, args[0], name) for item in items)
    if origin is dict:
        return _cast_dict(value, name)
    return _cast_scalar(value, hint, name)


def _cast_scalar(value: Any, kind: type, name: str) -> Any:
    wrong = UsageError(f"{name} must be {kind.__name__}, got {value!r}")
    if kind is bool:
        text = str(value).lower()
        if text not in TRUE + FALSE:
            raise wrong
        return text in TRUE
    if kind is str:
        if isinstance(value, list | dict):
            raise wrong
        return "" if value is None else str(value)  # an empty value in YAML
    if isinstance(value, bool) or value is None:
        raise wrong
    try:
        number = float(value)
        if kind is int and number != int(number):
            raise wrong
        return int(value) if kind is int and not isinstance(value, float) else kind(number)
    except (TypeError, ValueError, OverflowError):
        raise wrong from None


def _cast_dict(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    result = {}
    for item in value if isinstance(value, list | tuple) else [value]:
        key, equals, text = str(item).partition("=")
        if not equals:
            raise UsageError(f"{name} takes key=value pairs, got {item!r}")
        try:
            result[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            result[key] = text
    return result


def field_help(cls: type) -> dict[str, str]:
    """Trailing comment of every field of a dataclass and of its bases."""
    comments: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            source = inspect.getsource(base)
        except OSError:  # installed without sources
            continue
        comments.update(re.findall(r"^    (\w+): [^#\n]*#\s*(.+)$", source, flags=re.MULTILINE))
    return comments


class _Parser(argparse.ArgumentParser):
    """Argument parser whose errors are ``UsageError`` and name the closest flag."""

    refused: Mapping[str, str] = {}

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def parse(self, argv: Sequence[str] | None) -> dict[str, Any]:
        known, unknown = self.parse_known_args(argv)
        for token in unknown:
            flag = token.split("=")[0]
            reason = next((why for prefix, why in self.refused.items() if flag.startswith(prefix)), None)
            if reason:
                raise UsageError(f"{flag} is not supported: {reason}")
            if token.startswith("-"):
                hint = suggestion(flag, self._option_string_actions) or "; --help lists them"
                raise UsageError(f"unknown flag {flag}{hint}")
        if unknown:
            raise UsageError(f"unexpected argument {unknown[0]!r}")
        return vars(known)


def build_parser(cls: type, description: str) -> _Parser:
    """Parser with one flag for every field of the dataclass ``cls``; what is not given is left out of its result."""
    parser = _Parser(
        description=description, argument_default=argparse.SUPPRESS, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    aliases: Mapping[str, Sequence[str]] = getattr(cls, "ALIASES", {})
    bare: Mapping[str, Any] = getattr(cls, "BARE_VALUES", {})
    parser.refused = getattr(cls, "REFUSED", {})
    hints, comments = get_type_hints(cls), field_help(cls)
    if name := getattr(cls, "POSITIONAL", ""):
        several = get_origin(hints[name]) is tuple
        flag = "--" + name.replace("_", "-")
        parser.add_argument("arguments", nargs="*" if several else "?", metavar=name.upper(), help=f"same as {flag}")
    for field in dataclasses.fields(cls):
        hint, flag = hints[field.name], "--" + field.name.replace("_", "-")
        default = "" if field.default in (None, "", dataclasses.MISSING) else f" (default: {field.default})"
        options: dict[str, Any] = {
            "dest": field.name,
            "help": (comments.get(field.name, "") + default).replace("%", "%%"),
        }
        flags = [*aliases.get(field.name, ()), flag]
        if bool in (hint, *get_args(hint)):
            action = "store_true" if field.name.startswith("no_") else argparse.BooleanOptionalAction
            parser.add_argument(*flags, action=action, **options)
            continue
        if get_origin(hint) is dict or tuple in {get_origin(h) for h in (hint, *get_args(hint))}:
            options["nargs"] = "*" if get_origin(hint) is dict else "+"
        elif field.name in bare:
            options.update(nargs="?", const=bare[field.name])
        parser.add_argument(*flags, metavar=field.name.rsplit("_", 1)[-1].upper(), **options)
    return parser


def load_yaml(path: str | Path, cls: type) -> dict[str, Any]:
    """Options in a YAML file, cast to the types of the fields of ``cls``.

    Raises:
        UsageError: No such file, no mapping of options in it, an unknown key, or a value of another type.
    """
    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the config {str(path)!r}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(loaded or {}, dict):
        raise UsageError(f"{path} must hold 'option: value' lines, got a {type(loaded).__name__}")
    hints = get_type_hints(cls)
    options = {str(key).replace("-", "_"): value for key, value in (loaded or {}).items()}
    names = [field.name for field in dataclasses.fields(cls)]
    for key in options:
        if key not in names:
            raise UsageError(f"unknown option {key!r} in {path}{suggestion(key, names) or '; --help lists them'}")
    return {key: _cast_given(cls, key, value, hints) for key, value in options.items()}


def _cast_given(cls: type, name: str, value: Any, hints: Mapping[str, Any]) -> Any:
    bare = getattr(cls, "BARE_VALUES", {})
    return cast(bare[name] if value is True and name in bare else value, hints[name], name)


def parse_config(cls: type[ConfigT], argv: Sequence[str] | None, description: str) -> ConfigT:
    """Build the config ``cls`` from the command line and from the YAML file that its ``--config`` names.

    Raises:
        UsageError: Unknown or ill-typed flag or key.
    """
    given = build_parser(cls, description).parse(argv)
    arguments = given.pop("arguments", None)
    if arguments:
        name = cls.POSITIONAL  # type: ignore[attr-defined]
        if name in given:
            first = arguments[0] if isinstance(arguments, list) else arguments
            raise UsageError(f"unexpected argument {first!r}: --{name.replace('_', '-')} is given already")
        given[name] = arguments
    hints = get_type_hints(cls)
    given = {name: _cast_given(cls, name, value, hints) for name, value in given.items()}
    from_file = load_yaml(given["config"], cls) if given.get("config") else {}
    return cls(**{**from_file, **given})
