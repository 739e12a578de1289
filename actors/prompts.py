"""Prompts: the 13 built-in ones, prompt files, and encoding. Imports neither torch nor vLLM.

A prompt file holds one prompt a line. A line that begins with ``{`` is a JSON object with
``prompt`` (text) or ``prompt_token_ids`` (a list of token ids, used as they are). Empty
lines are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import ConfigError
from orchestrator.types import Prompt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FACTS: tuple[tuple[str, str], ...] = (
    ("The capital of Italy is", "Rome"),
    ("The metal that is liquid at room temperature is", "mercury"),
    ("The planet with the brightest rings is", "Saturn"),
    ("The longest river in Africa is the", "Nile"),
    ("Plants take in carbon dioxide and give off", "oxygen"),
    ("The author of the play Hamlet was", "Shakespeare"),
    ("The gas that makes up most of the air is", "nitrogen"),
    ("The number of minutes in one hour is", "sixty"),
    ("The hardest natural material is", "diamond"),
    ("The organ that pumps blood through the body is the", "heart"),
    ("The force that pulls things to the ground is", "gravity"),
    ("The largest hot desert in the world is the", "Sahara"),
    ("The first woman to win a Nobel Prize was Marie", "Curie"),
)
"""Built-in prompts with the word that answers each."""

BUILTIN_PROMPTS: tuple[str, ...] = tuple(prompt for prompt, _ in FACTS)

RawPrompt = str | tuple[int, ...]
"""Text, or token ids that are used as they are."""


def read_prompts(path: Path | None) -> list[tuple[str, RawPrompt]]:
    """Prompts of ``path`` (None: the built-in ones), each with where it stands, for errors.

    Raises ConfigError, naming file and line, when the file cannot be read, a line is no
    prompt, or there is none.
    """
    if path is None:
        return [(f"built-in prompt {i}", text) for i, text in enumerate(BUILTIN_PROMPTS, 1)]
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise ConfigError(
            f"cannot read prompts file {path}: {error.strerror or error}; "
            "give --prompts a text file with one prompt a line"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"prompts file {path} is not UTF-8 (byte {error.start}): save it as UTF-8"
        ) from None
    found = [
        (f"{path}:{number}", _parse(line, f"{path}:{number}"))
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not found:
        raise ConfigError(f"prompts file {path} holds no prompt: write one a line")
    return found


def _parse(line: str, where: str) -> RawPrompt:
    text = line.strip()
    if not text.startswith("{"):
        return text
    try:
        entry = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"{where}: not JSON ({error}); a line that begins with '{{' must be a JSON object"
        ) from None
    keys = {"prompt", "prompt_token_ids"} & entry.keys()
    if len(keys) != 1:
        have = ", ".join(sorted(entry)) or "none"
        raise ConfigError(
            f"{where}: needs exactly one of 'prompt' and 'prompt_token_ids', has keys: {have}"
        )
    value = entry[keys.pop()]
    if isinstance(value, str) and "prompt" in entry:
        if not value.strip():
            raise ConfigError(f"{where}: 'prompt' is empty; give it text or remove the line")
        if any("\ud800" <= c <= "\udfff" for c in value):
            raise ConfigError(f"{where}: 'prompt' has half a surrogate pair, which is no text")
        return value
    if "prompt" in entry:
        raise ConfigError(f"{where}: 'prompt' must be text, is {type(value).__name__}")
    if not isinstance(value, list) or not value or not all(type(i) is int for i in value):
        raise ConfigError(f"{where}: 'prompt_token_ids' must be a list of at least one integer")
    return tuple(value)


def encode_prompts(
    raw: Iterable[tuple[str, RawPrompt]], tokenizer_file: Path, *, vocab_size: int
) -> tuple[Prompt, ...]:
    """Token ids of ``raw`` by the checkpoint's ``tokenizer.json``, without special tokens.

    Raises ConfigError when a prompt encodes to nothing or has an id outside
    ``[0, vocab_size)``.
    """
    tokenizer = load_tokenizer(tokenizer_file)
    prompts = []
    for where, item in raw:
        if isinstance(item, str):
            ids = tuple(tokenizer.encode(item, add_special_tokens=False).ids)
            prompt = Prompt(token_ids=ids, text=item)
        else:
            prompt = Prompt(token_ids=item, text="")
        if not prompt.token_ids:
            raise ConfigError(f"{where}: encodes to no token; give it other text")
        bad = [i for i in prompt.token_ids if not 0 <= i < vocab_size]
        if bad:
            raise ConfigError(
                f"{where}: token id {bad[0]} is outside the model's vocabulary of {vocab_size}"
            )
        if not prompt.text:
            text = tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False)
            prompt = Prompt(token_ids=prompt.token_ids, text=text)
        prompts.append(prompt)
    return tuple(prompts)


def load_tokenizer(tokenizer_file: Path) -> Tokenizer:
    """The tokenizer of a checkpoint (ConfigError when it cannot be read)."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # tokenizers raises plain Exception
        raise ConfigError(f"cannot read tokenizer {tokenizer_file}: {error}") from None


def check_lengths(
    prompts: Sequence[Prompt], where: Sequence[str], *, context: int, new_tokens: int
) -> None:
    """Every prompt and its ``new_tokens`` must fit ``context`` tokens (ConfigError)."""
    for place, prompt in zip(where, prompts, strict=True):
        length = len(prompt.token_ids)
        if length + new_tokens > context:
            raise ConfigError(
                f"{place}: {length} prompt tokens + {new_tokens} new tokens = "
                f"{length + new_tokens}, but the context is {context}: "
                "shorten the prompt or ask for fewer new tokens"
            )


def load_prompts(
    path: Path | None, tokenizer_file: Path, *, vocab_size: int, context: int, new_tokens: int
) -> tuple[Prompt, ...]:
    """Read, encode and check in one call; every problem is a ConfigError."""
    raw = read_prompts(path)
    prompts = encode_prompts(raw, tokenizer_file, vocab_size=vocab_size)
    check_lengths(prompts, [place for place, _ in raw], context=context, new_tokens=new_tokens)
    return prompts
