"""Settings: where they come from, what wins, and what a mistake reads like."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.config import Settings, public_names
from orchestrator.errors import ConfigError
from orchestrator.flags import flag_of, make_parser, parse
from orchestrator.options import GenerationOptions, SwapOptions
from orchestrator.sources import load
from orchestrator.types import KVPolicy, PauseMode, PhaseTimeouts, State, TransferBackend


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.upper().startswith("MIDFLIGHT_")]:
        monkeypatch.delenv(name)


def settings(*argv: str) -> Settings:
    given = parse(argv)
    config = given.pop("config", None)
    return load(given, Path(config) if config else None)


def mistake(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        settings(*argv)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == 2
    return message


@pytest.fixture
def conf(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        path = tmp_path / "conf.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_defaults_are_those_of_the_options() -> None:
    s = settings()
    assert s.swap_options(TransferBackend.GLOO) == SwapOptions()
    assert s.generation_options() == GenerationOptions()
    assert s.timeouts() == PhaseTimeouts()
    options = s.validation_options(min_pass_rate=0.9, canary_tolerance=0.05)
    assert (options.digest, options.canary, options.fresh) == (True, True, True)
    assert (options.min_pass_rate, options.canary_tolerance) == (0.9, 0.05)


def test_flags_win_over_variables_over_the_file(monkeypatch: pytest.MonkeyPatch, conf: Any) -> None:
    monkeypatch.setenv("MIDFLIGHT_STEPS", "20")
    monkeypatch.setenv("MIDFLIGHT_SEED", "21")
    path = conf("steps: 30\nseed: 31\nengines: 32\n")
    s = settings("--steps", "10", "--config", path)
    assert (s.steps, s.seed, s.engines, s.group_size) == (10, 21, 32, 4)


def test_config_file_may_be_named_by_a_variable(monkeypatch: pytest.MonkeyPatch, conf: Any) -> None:
    monkeypatch.setenv("MIDFLIGHT_CONFIG", conf("steps: 7\n"))
    assert settings().steps == 7


def test_every_setting_has_a_flag_and_help() -> None:
    text = make_parser().format_help()
    for name in public_names():
        assert flag_of(name) in text
    assert all(field.description for field in Settings.model_fields.values())


def test_every_flag_reaches_the_options() -> None:
    given = {
        "backend": "ipc",
        "pause-mode": "abort",
        "kv": "keep",
        "pause-after-tokens": "3",
        "timeout-pausing": "1.5",
        "timeout-syncing": "2",
        "timeout-starting": "3",
        "timeout-staging": "4",
        "max-tokens": "8",
        "temperature": "0.5",
        "group-size": "2",
        "prompts-per-step": "3",
        "max-in-flight": "4",
        "buffer-size": "9",
        "max-staleness": "1",
        "probe-tokens": "20",
        "seed": "5",
        "validate": "digest,fresh",
        "fresh-every": "2",
        "min-pass-rate": "0.5",
        "canary-tolerance": "0.25",
    }
    s = settings(*(f"--{name}={value}" for name, value in given.items()))
    assert not s.swap_options(TransferBackend.IPC).staged
    swap = s.swap_options(TransferBackend.IPC, staged=True)
    assert swap.staged
    assert swap.timeouts.staging == 4.0
    assert (swap.backend, swap.pause_mode) == (TransferBackend.IPC, PauseMode.ABORT)
    assert (swap.kv_policy, swap.pause_after_tokens) == (KVPolicy.KEEP, 3)
    assert swap.timeouts.of(State.PAUSING) == 1.5
    assert swap.timeouts.of(State.SYNCING) == 2.0
    assert swap.timeouts.of(State.STARTING) == 3.0
    assert s.generation_options() == GenerationOptions(8, 0.5, 2, 3, 4, 9, 1, 20, 5)
    v = s.validation_options(min_pass_rate=1.0, canary_tolerance=1.0)
    assert (v.digest, v.canary, v.fresh, v.fresh_every) == (True, False, True, 2)
    assert (v.min_pass_rate, v.canary_tolerance) == (0.5, 0.25)
    assert v.canary_control_factor == 0, "a limit that was asked for is one"
    assert settings().validation_options().canary_control_factor == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("digest,canary,fresh", ("digest", "canary", "fresh")),
        ("fresh, digest,fresh", ("fresh", "digest")),
        ("none", ()),
    ],
)
def test_validate_is_a_comma_list(
    text: str, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, conf: Any
) -> None:
    assert settings("--validate", text).validate_ == expected
    assert settings("--config", conf(f"validate: {list(expected)}\n")).validate_ == expected
    monkeypatch.setenv("MIDFLIGHT_VALIDATE", text)
    assert settings().validate_ == expected


def test_a_choice_with_a_default_of_its_own_is_yes_no_or_left_open(
    monkeypatch: pytest.MonkeyPatch, conf: Any
) -> None:
    assert settings().cuda_graphs is None
    assert settings("--cuda-graphs").cuda_graphs is True
    assert settings("--no-cuda-graphs").cuda_graphs is False
    assert settings("--config", conf("cuda_graphs: false\n")).cuda_graphs is False
    monkeypatch.setenv("MIDFLIGHT_CUDA_GRAPHS", "true")
    assert settings().cuda_graphs is True
    assert settings("--no-cuda-graphs").cuda_graphs is False
    monkeypatch.setenv("MIDFLIGHT_CUDA_GRAPHS", "none")
    assert settings().cuda_graphs is None
    monkeypatch.setenv("MIDFLIGHT_CUDA_GRAPHS", "maybe")
    with pytest.raises(ConfigError, match="CUDA_GRAPHS=maybe: must be true or false"):
        settings()


def test_an_unrelated_variable_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VALIDATE", "nonsense")
    monkeypatch.setenv("STEPS", "nonsense")
    assert settings() == Settings()


def test_preset_sets_both_models_and_yields_to_a_named_one(conf: Any) -> None:
    s = settings("--preset", "qwen3-1.7b")
    assert (s.model, s.trainer_model) == ("Qwen/Qwen3-1.7B-Base", "Qwen/Qwen3-1.7B")
    s = settings("--preset", "qwen3-1.7b", "--trainer-model", "/models/mine")
    assert (s.model, s.trainer_model) == ("Qwen/Qwen3-1.7B-Base", "/models/mine")
    # A preset asked for on the command line beats a model named in the weaker file.
    s = settings("--preset", "qwen3-1.7b", "--config", conf("model: tiny\n"))
    assert s.model == "Qwen/Qwen3-1.7B-Base"


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("--steps", "3", "--validate", "none", "--max-staleness", "2", "--quiet"),
        ("--preset", "qwen3-1.7b", "--learning-rate", "1e-5", "--kv", "keep"),
    ],
)
def test_dumped_yaml_gives_the_same_settings_back(argv: tuple[str, ...], conf: Any) -> None:
    s = settings(*argv)
    assert settings("--config", conf(s.to_yaml())) == s


def test_dump_holds_what_was_resolved_but_not_the_folder(tmp_path: Path, conf: Any) -> None:
    s = settings("--output-dir", str(tmp_path), "--prompts", "some/prompts.txt")
    data = yaml.safe_load(s.to_yaml(backend="gloo", min_pass_rate=1.0))
    assert (data["backend"], data["min_pass_rate"]) == ("gloo", 1.0)
    assert "output_dir" not in data
    assert data["prompts"] == str(Path("some/prompts.txt").resolve())
    with pytest.raises(KeyError):
        s.to_yaml(bakend="gloo")


def test_none_clears_an_optional_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDFLIGHT_MAX_STALENESS", "3")
    assert settings().max_staleness == 3
    assert settings("--max-staleness", "none").max_staleness is None


def test_cache_dir_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert settings().cache_dir == tmp_path / "midflight"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert settings().cache_dir == tmp_path / "home/.cache/midflight"
    assert settings("--cache-dir", "~/x").cache_dir == tmp_path / "home/x"


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        settings().steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ("--steps 0", ["--steps 0", "at least 1"]),
        ("--steps=x", ["--steps x", "whole number"]),
        ("--steps", ["--steps", "expected one argument"]),
        ("--stpes 3", ["unknown flag '--stpes'", "did you mean '--steps'?"]),
        ("--frobnicate", ["unknown flag '--frobnicate'", "--help"]),
        ("5", ["unexpected argument '5'", "--name value"]),
        ("--backend glo", ["--backend glo", "auto, gloo, nccl, ipc", "did you mean 'gloo'?"]),
        ("--validate digest,fres", ["'fres'", "digest, canary, fresh", "did you mean 'fresh'?"]),
        ("--learning-rate nan", ["--learning-rate nan", "finite"]),
        ("--learning-rate 0", ["--learning-rate 0", "above 0"]),
        ("--min-pass-rate 1.5", ["--min-pass-rate 1.5", "at most 1"]),
        ("--preset qwen", ["--preset qwen", "qwen3-1.7b"]),
        ("--max-tokens 0", ["--max-tokens 0", "at least 1"]),
        ("--buffer-size 31", ["32 rollouts", "raise buffer_size to 32", "--buffer-size 31"]),
        ("--quiet --verbose", ["exclude each other", "--quiet; --verbose"]),
        ("--executor uni --tensor-parallel-size 2", ["executor uni", "auto, mp or ray"]),
        ("--validate digest --fresh-every 2", ["fresh_every 2", "add fresh to validate"]),
        ("--max-model-len 64", ["110 new tokens", "context of 64", "--max-model-len 64"]),
        ("--steps 0 --seed -1", ["--steps 0: must be at least 1; --seed -1: must be at least 0"]),
    ],
)
def test_a_mistake_in_a_flag_is_one_line(argv: str, parts: list[str]) -> None:
    message = mistake(*argv.split())
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("stpes: 3\n", ["unknown key 'stpes'", "conf.yaml", "did you mean 'steps'?"]),
        ("steps: 0\n", ["steps: 0", "conf.yaml", "at least 1"]),
        ("steps: 2.5\n", ["steps: 2.5", "conf.yaml", "whole number"]),
        ("max-tokens: 3\n", ["'max-tokens'", "did you mean 'max_tokens'?"]),
        ("5: 3\n", ["unknown key '5'"]),
        ("steps: [1\nseed: 2\n", ["conf.yaml line 2", "is not YAML"]),
        ("- steps\n", ["holds a list", "steps: 5"]),
        ("buffer_size: 8\n", ["buffer_size: 8 in", "conf.yaml", "raise buffer_size"]),
        ("quiet: maybe\n", ["quiet: maybe", "true or false"]),
        ("model: 3\n", ["model: 3", "must be text"]),
    ],
)
def test_a_mistake_in_the_file_is_one_line(text: str, parts: list[str], conf: Any) -> None:
    message = mistake("--config", conf(text))
    for part in parts:
        assert part in message


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "no.yaml"
    assert f"cannot read --config {missing}: No such file" in mistake("--config", str(missing))
    assert "Is a directory" in mistake("--config", str(tmp_path))
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in mistake("--config", str(binary))


def test_an_empty_file_changes_nothing(conf: Any) -> None:
    assert settings("--config", conf("# nothing\n")) == Settings()


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("MIDFLIGHT_STPES", "3", ["unknown variable MIDFLIGHT_STPES", "'MIDFLIGHT_STEPS'"]),
        ("MIDFLIGHT_STEPS", "0", ["MIDFLIGHT_STEPS=0", "at least 1"]),
        ("MIDFLIGHT_QUIET", "perhaps", ["MIDFLIGHT_QUIET=perhaps", "true or false"]),
    ],
)
def test_a_mistake_in_a_variable_is_one_line(
    name: str, value: str, parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    message = mistake()
    for part in parts:
        assert part in message


def test_variables_of_test_plugins_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDFLIGHT_TEST_FLIP_BIT", "head")
    assert settings() == Settings()


def test_an_error_names_the_layer_that_won(monkeypatch: pytest.MonkeyPatch, conf: Any) -> None:
    monkeypatch.setenv("MIDFLIGHT_STEPS", "0")
    path = conf("steps: -5\n")
    assert mistake("--config", path).startswith("MIDFLIGHT_STEPS=0:")
    assert mistake("--config", path, "--steps", "-1").startswith("--steps -1:")
