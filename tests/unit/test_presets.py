"""Models of known size: their counts against the figures that were published, and against the formulas."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from onnxlm.config_inspection import parse
from onnxlm.errors import ConfigError, InputError
from onnxlm.inspection import Inspection, inspect
from onnxlm.models.config import ConfigReader
from onnxlm.models.presets import SOURCE, preset_names, read_preset
from onnxlm.models.registry import find_architecture

# Parameters as the sources give them, and how far their rounding may be off.
PUBLISHED = {
    "gpt3-125m": (125e6, 0.5e6),
    "gpt3-350m": (350e6, 10e6),
    "gpt3-760m": (760e6, 0.5e6),
    "gpt3-2.7b": (2.7e9, 0.05e9),
    "gpt3-6.7b": (6.7e9, 0.05e9),
    "gpt3-13b": (13.0e9, 0.1e9),
    "gpt3-175b": (175.0e9, 0.5e9),
    "palm-8b": (8.63e9, 0.005e9),
    "palm-62b": (62.50e9, 0.005e9),
    # To the digits of the files that were published.
    "llama2-7b": (6_738_415_616, 0),
    "llama2-13b": (13_015_864_320, 0),
    "llama2-70b": (68_976_648_192, 0),
    "llama3-8b": (8_030_261_248, 0),
    "llama3-70b": (70_553_706_496, 0),
    "mistral-7b": (7_241_732_096, 0),
    "mixtral-8x7b": (46_702_792_704, 0),
    "deepseek-v2": (236e9, 0.5e9),
    "deepseek-v3": (671e9, 0.5e9),
}
# Parameters that a token uses.
ACTIVE = {"mixtral-8x7b": 13e9, "deepseek-v2": 21e9, "deepseek-v3": 37e9}


def counted(found: Inspection) -> dict[str, int]:
    return {part.name: part.parameters for part in found.components if part.parameters}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(name: str) -> None:
    published, rounding = PUBLISHED[name]
    assert abs(sum(counted(inspect(name)).values()) - published) <= rounding


def test_palm_540b_without_its_norms() -> None:
    """Table 1 counts 540.35 billion."""
    parts = counted(inspect("palm-540b"))
    assert parts.pop("norms") == (118 + 1) * 18432
    assert round(sum(parts.values()) / 1e9, 2) == 540.35


def test_gpt3_xl_by_the_letter_of_its_table() -> None:
    """24 heads of 128 beside a width of 2048; 16 would give the 1.3 billion of the table's first column."""
    wide = counted(inspect("gpt3-1.3b"))["attention"] // 24
    assert wide == 4 * 2048 * 24 * 128 + 3 * 24 * 128 + 2048
    whole = sum(counted(inspect("gpt3-1.3b")).values())
    assert round((whole - 24 * 4 * 2048 * (24 - 16) * 128) / 1e9, 1) == 1.3


@pytest.mark.parametrize("name", ACTIVE)
def test_parameters_that_a_token_uses(name: str) -> None:
    active = inspect(name).active_parameters
    assert active is not None
    assert abs(active - ACTIVE[name]) < 0.6e9


def test_gpt3_by_component() -> None:
    """Layers 96, width 12288, vocabulary 50257, context 2048."""
    found = inspect("gpt3-175b", [1, 2048, 100_000])
    products = {part.name: (part.parameters or 0) - (part.biases or 0) for part in found.components}
    assert products == {
        "embedding": 617_558_016,
        "positions": 25_165_824,
        "attention": 96 * 603_979_776,
        "mlp": 96 * 1_207_959_552,
        "norms": 4_743_168,
        "head": 0,
    }
    assert sum(products.values()) == 174_593_642_496
    assert sum(part.biases or 0 for part in found.components) == 96 * (4 + 4 + 1) * 12288
    assert sum(counted(found).values()) == 174_604_259_328
    cache = found.kv_cache
    assert cache is not None
    assert (cache.attention, cache.dtype) == ("MHA", "float16")
    assert cache.bytes_at == {1: 4_718_592, 2048: 9 * 2**30, 100_000: 471_859_200_000}


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_tells_its_source_and_takes_no_memory(name: str) -> None:
    raw = read_preset(name)
    source = raw.pop(SOURCE)
    assert any(source in text for text in inspect(name).notes)
    _, module = parse(raw, name)
    assert all(parameter.is_meta for parameter in module.parameters())
    # Rotary tables are real; they are small.
    assert sum(b.nbytes for b in module.buffers() if not b.is_meta) < 64 * 2**20


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells a process's peak")
def test_inspecting_the_largest_takes_no_memory() -> None:
    """In a process of its own; 540 billion parameters would be a terabyte."""
    code = (
        "import pathlib, re; from onnxlm.inspection import inspect; inspect('palm-540b');"
        # Not getrusage, which counts what the test's own process took before it started this one.
        "print(re.search(r'VmHWM:\\s*(\\d+) kB', pathlib.Path('/proc/self/status').read_text())[1])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 2 * 2**20  # KiB, libraries and all


def test_a_preset_is_a_plain_config() -> None:
    raw = read_preset("llama3-8b")
    del raw[SOURCE]
    config = find_architecture("llama").parse_config(ConfigReader(raw, "llama3-8b"))
    assert (config.vocab_size, config.num_hidden_layers) == (128_256, 32)


def test_what_lies_on_disk_goes_before_a_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("gpt3-175b")
    folder.mkdir()
    tiny = json.dumps(dict(find_architecture("llama").tiny))
    (folder / "config.json").write_text(tiny, encoding="utf-8")
    found = inspect("gpt3-175b")
    assert (found.kind, found.model_type) == ("config", "llama")


def test_a_name_that_is_not_known_lists_those_that_are() -> None:
    with pytest.raises(
        InputError, match=r"gpt5-1t: no such file, folder or preset; allowed: .*"
    ) as e:
        inspect("gpt5-1t")
    assert all(name in str(e.value) for name in preset_names())
    with pytest.raises(ConfigError, match=r"preset; found 'gpt5-1t'; allowed: deepseek-v2, "):
        read_preset("gpt5-1t")
