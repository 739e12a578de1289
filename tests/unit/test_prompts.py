"""Prompt files, and what is said when they are wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.prompts import BUILTIN_PROMPTS, FACTS, load_prompts, read_prompts
from orchestrator.errors import ConfigError


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def load(path: Path | None, tokenizer_file: Path, **changes: int) -> list[tuple[int, ...]]:
    sizes = {"vocab_size": 256, "context": 200, "new_tokens": 110, **changes}
    return [p.token_ids for p in load_prompts(path, tokenizer_file, **sizes)]


def test_there_are_thirteen_different_built_in_prompts_with_answers() -> None:
    assert len(set(BUILTIN_PROMPTS)) == 13
    assert all(answer and not prompt.endswith(" ") for prompt, answer in FACTS)


def test_lines_and_json_lines_mix_and_blank_lines_are_skipped(
    tmp_path: Path, tokenizer_file: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text('Hello é\n\n{"prompt": "Hello é"}\n{"prompt_token_ids": [5, 0, 255]}\n')
    first, second, ids = load(file, tokenizer_file)
    assert first == second and len(first) == 8
    assert ids == (5, 0, 255)


def test_prompts_given_as_ids_get_their_text(tmp_path: Path, tokenizer_file: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("Hi you\n")
    (plain,) = load_prompts(file, tokenizer_file, vocab_size=256, context=50, new_tokens=1)
    file.write_text(json.dumps({"prompt_token_ids": plain.token_ids}))
    (ids,) = load_prompts(file, tokenizer_file, vocab_size=256, context=50, new_tokens=1)
    assert ids == plain


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{not json", "not JSON"),
        ('{"text": "x"}', "has keys: text"),
        ('{"prompt": "x", "prompt_token_ids": [1]}', "exactly one of"),
        ('{"prompt": 3}', "must be text, is int"),
        ('{"prompt": "  "}', "is empty"),
        ('{"prompt_token_ids": []}', "at least one integer"),
        ('{"prompt_token_ids": [true]}', "at least one integer"),
        ('{"prompt_token_ids": "12"}', "at least one integer"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(f"fine\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        read_prompts(file)
    assert str(caught.value).startswith(f"{file}:2: ") and words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_hold_no_prompts_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n  \n")
    with pytest.raises(ConfigError, match="holds no prompt"):
        read_prompts(empty)
    with pytest.raises(ConfigError, match="cannot read prompts file"):
        read_prompts(tmp_path / "missing.txt")
    with pytest.raises(ConfigError, match="cannot read prompts file"):
        read_prompts(tmp_path)
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9\n")
    with pytest.raises(ConfigError, match=r"not UTF-8 \(byte 3\)"):
        read_prompts(latin)


def test_a_prompt_must_leave_room_for_the_new_tokens(tmp_path: Path, tokenizer_file: Path) -> None:
    file = tmp_path / "long.txt"
    file.write_text("short\n" + "x" * 90 + "\n")
    assert len(load(file, tokenizer_file, context=200, new_tokens=110)[1]) == 90
    with pytest.raises(ConfigError) as caught:
        load(file, tokenizer_file, context=199, new_tokens=110)
    assert str(caught.value).startswith(
        f"{file}:2: 90 prompt tokens + 110 new tokens = 200, but the context is 199"
    )


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path, tokenizer_file: Path) -> None:
    file = tmp_path / "ids.jsonl"
    for bad in (256, -1):
        file.write_text(f'{{"prompt_token_ids": [1, {bad}]}}')
        with pytest.raises(ConfigError, match=f"token id {bad} is outside .* 256"):
            load(file, tokenizer_file)


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    with pytest.raises(ConfigError, match=r"cannot read tokenizer .*tokenizer\.json"):
        load(None, file)
