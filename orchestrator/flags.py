"""Flags made from the fields of :class:`~orchestrator.config.Settings`.

argparse only splits the command line: values stay text and are judged by the settings, so that
a mistake reads the same whether it came from a flag, a variable or a file.
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from orchestrator.config import ENV_PREFIX, Settings, public_names
from orchestrator.errors import ConfigError

_TITLES = {
    "run": "run",
    "models": "models and prompts",
    "engines": "engines",
    "swap": "weight swap",
    "rollouts": "rollouts",
    "training": "training",
    "validation": "validation",
    "recovery": "recovery after a failure",
    "deadlines": "deadlines: a phase that takes longer has failed",
    "output": "output",
}


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See --help")


def flag_of(name: str) -> str:
    """``max_tokens`` -> ``--max-tokens``."""
    return "--" + name.replace("_", "-")


def similar(word: str, known: Sequence[str]) -> str:
    """A hint: what may have been meant, else where the names are listed."""
    close = get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else "see --help for all names"


def choices(annotation: Any) -> list[str]:
    """Values of a Literal, also inside a union or a tuple; empty for other types."""
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    if get_origin(annotation) in (Union, types.UnionType, tuple):
        return [c for arg in get_args(annotation) for c in choices(arg)]
    return []


def _metavar(field: FieldInfo) -> str:
    named = choices(field.annotation)
    if named:
        return ",".join(named) if get_origin(field.annotation) is tuple else "|".join(named)
    text = str(field.annotation)
    kinds = (("Injection", "FAULT"), ("Path", "PATH"), ("int", "N"), ("float", "X"))
    return next((metavar for kind, metavar in kinds if kind in text), "NAME")


def _help(field: FieldInfo) -> str:
    text = (field.description or "").replace("%", "%%")
    default = field.default
    if default in (None, ()) or field.default_factory or isinstance(default, bool):
        return text
    if isinstance(default, tuple):
        default = ",".join(default)
    shown = f"{default:g}" if isinstance(default, float) else default
    return f"{text} (default {shown})"


def make_parser() -> argparse.ArgumentParser:
    """The command line. Only flags that were given appear in its namespace, as text."""
    parser = Parser(
        prog="midflight",
        usage="python -m orchestrator [--steps N] [--config FILE | --resume RUN_DIR] [flags]",
        description="Train, and swap the weights inside running vLLM engines after each step; "
        "prove each swap.",
        epilog=f"Every flag is also a variable ({ENV_PREFIX}MAX_TOKENS=64) and a key of the YAML "
        "file (max_tokens: 64). Flags win over variables, variables over the file. Exit codes: "
        "0 done, 1 failed, 2 cannot be run as asked, 130 interrupted. "
        "python -m orchestrator simulate --help: the controller without a data plane.",
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    general = parser.add_argument_group("general")
    general.add_argument("-h", "--help", action="store_true", help="show this")
    general.add_argument("--version", action="store_true", help="show the version")
    general.add_argument("--show-machine", action="store_true", help="print the states as Mermaid")
    general.add_argument("--config", metavar="FILE", help="YAML file with settings")
    general.add_argument(
        "--resume",
        metavar="RUN_DIR",
        help="go on with the run in this folder from its last checkpoint, with its config.yaml "
        "instead of --config; flags and variables given beside it override what that says "
        "(--steps counts from the run's beginning)",
    )
    groups = {key: parser.add_argument_group(title) for key, title in _TITLES.items()}
    for public, name in public_names().items():
        field = Settings.model_fields[name]
        extra = field.json_schema_extra
        assert isinstance(extra, dict)
        group = groups[str(extra["group"])]
        if field.annotation is bool:
            group.add_argument(flag_of(public), dest=public, action="store_true", help=_help(field))
        elif field.annotation == bool | None:
            either = argparse.BooleanOptionalAction
            group.add_argument(flag_of(public), dest=public, action=either, help=_help(field))
        else:
            group.add_argument(
                flag_of(public),
                dest=public,
                action="append" if extra.get("repeated") else "store",
                metavar=_metavar(field),
                help=_help(field),
            )
    return parser


def parse(argv: Sequence[str]) -> dict[str, Any]:
    """Flags that were given -> their text (True for switches). ConfigError for unknown ones."""
    parser = make_parser()
    given, rest = parser.parse_known_args(list(argv))
    if rest:
        word = rest[0].split("=", 1)[0]
        if not word.startswith("-"):
            raise ConfigError(f"unexpected argument {rest[0]!r}: write settings as --name value")
        known = [s for action in parser._actions for s in action.option_strings]
        raise ConfigError(f"unknown flag {word!r}: {similar(word, known)}")
    return vars(given)
