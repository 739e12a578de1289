"""Reads settings from flags, environment and a YAML file, and says where a mistake came from.

Every mistake is one :class:`~orchestrator.errors.ConfigError` line: where, what, what to do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings.sources import EnvSettingsSource

from orchestrator.config import ENV_PREFIX, PRESETS, Settings, public_names
from orchestrator.errors import ConfigError
from orchestrator.flags import choices, flag_of, similar

RESERVED = ENV_PREFIX + "TEST_"
"""Variables of test plugins; not settings."""


def load(flags: Mapping[str, Any], config: Path | None = None) -> Settings:
    """Settings from ``flags`` (name -> text) over ``MIDFLIGHT_*`` over ``config`` over defaults."""
    path = config or (Path(p) if (p := os.environ.get(ENV_PREFIX + "CONFIG")) else None)
    layers = {
        "flag": dict(flags),
        "env": _environment(),
        "file": _file(path) if path is not None else {},
    }
    values: dict[str, Any] = {}
    for layer in reversed(layers.values()):
        # A preset given here must win over a model named in a weaker layer.
        values |= PRESETS.get(str(layer.get("preset")), {}) | layer
    try:
        return Settings(**values)
    except ValidationError as error:
        raise ConfigError(_explain(error, layers, path)) from None


def _environment() -> dict[str, Any]:
    known = {ENV_PREFIX + name.upper() for name in public_names()} | {ENV_PREFIX + "CONFIG"}
    for name in sorted(os.environ):
        upper = name.upper()
        if upper.startswith(ENV_PREFIX) and not upper.startswith(RESERVED) and upper not in known:
            raise ConfigError(
                f"unknown variable {name} in the environment: {similar(upper, sorted(known))}"
            )
    return EnvSettingsSource(Settings)()


def _file(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(f"cannot read --config {path}: {reason}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read --config {path}: it is not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not valid"
        raise ConfigError(f"{path}{where} is not YAML: {problem}. Fix it there") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        kind = type(data).__name__
        raise ConfigError(f"{path} holds a {kind}, not settings: write lines like 'steps: 5'")
    names = sorted(public_names())
    for key in data:
        if key not in names:
            hint = similar(str(key).replace("-", "_"), names)
            raise ConfigError(f"unknown key {str(key)!r} in {path}: {hint}")
    return data


def _explain(
    error: ValidationError, layers: Mapping[str, Mapping[str, Any]], path: Path | None
) -> str:
    def origin(name: str) -> str:
        for kind, layer in layers.items():
            if name in layer:
                value = _short(layer[name])
                flag = {True: flag_of(name), False: flag_of(f"no_{name}")}
                switch = flag.get(layer[name]) if isinstance(layer[name], bool) else None
                return {
                    "flag": switch or f"{flag_of(name)} {value}",
                    "env": f"{ENV_PREFIX}{name.upper()}={value}",
                    "file": f"{name}: {value} in {path}",
                }[kind]
        return ""

    def explained(detail: ErrorDetails) -> str:
        if detail["type"] == "conflict":
            given = [where for f in detail["ctx"]["fields"] if (where := origin(f))]
            return detail["msg"] + (f" ({'; '.join(given)})" if given else "")
        name = str(detail["loc"][0]) if detail["loc"] else "settings"
        return f"{origin(name) or name}: {_reason(name, detail)}"

    return "; ".join(map(explained, error.errors(include_url=False)))


def _reason(name: str, detail: ErrorDetails) -> str:
    limits = {
        "greater_than_equal": "must be at least {ge:g}",
        "greater_than": "must be above {gt:g}",
        "less_than_equal": "must be at most {le:g}",
        "less_than": "must be below {lt:g}",
        "int_parsing": "must be a whole number",
        "int_type": "must be a whole number",
        "int_from_float": "must be a whole number",
        "float_parsing": "must be a number",
        "float_type": "must be a number",
        "finite_number": "must be a finite number",
        "string_type": "must be text",
        "string_too_short": "must not be empty",
        "bool_parsing": "must be true or false",
        "bool_type": "must be true or false",
    }
    kind = detail["type"]
    if kind in ("literal_error", "tuple_type"):
        named = choices(Settings.model_fields[public_names()[name]].annotation)
        close = similar(str(detail["input"]), named)
        hint = f"; {close}" if close.startswith("did") else ""
        return f"{_short(detail['input'])!r} is not one of {', '.join(named)}{hint}"
    if kind in limits:
        return limits[kind].format(**detail.get("ctx", {}))
    return detail["msg"][:1].lower() + detail["msg"][1:]


def _short(value: object, limit: int = 60) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
