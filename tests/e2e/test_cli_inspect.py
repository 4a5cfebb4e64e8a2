"""`onnxlm inspect` and `onnxlm providers`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
from support.commands import Ran, run_process
from support.tiny import CONFIG, CONTEXT

from onnxlm.package import open_package

Cli = Callable[..., Ran]

HIDDEN, WIDE, LAYERS = 64, 96, 2
QUERY_HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
VOCABULARY = CONFIG["vocab_size"]
# By hand from the config: q, k, v and o; gate, up and down; two norms a layer and the last.
PARAMETERS = {
    "embedding": VOCABULARY * HIDDEN,
    "attention": LAYERS * HIDDEN * HEAD_DIM * (QUERY_HEADS + KV_HEADS + KV_HEADS + QUERY_HEADS),
    "mlp": LAYERS * 3 * HIDDEN * WIDE,
    "norms": (2 * LAYERS + 1) * HIDDEN,
    "head": 0,
}
KV_BYTES_PER_TOKEN = LAYERS * 2 * KV_HEADS * HEAD_DIM * 4


def facts(ran: Ran) -> dict[str, Any]:
    assert (ran.code, ran.err) == (0, "")
    return dict(json.loads(ran.out))


def parameters(said: dict[str, Any]) -> dict[str, int]:
    parts = said["components"].items()
    return {name: part["parameters"] for name, part in parts if name in PARAMETERS}


def test_a_package(cli: Cli, tiny_package: Path) -> None:
    said = facts(cli("inspect", tiny_package, "--kv-lengths", "1,40", "--json"))
    assert (said["kind"], said["model_type"]) == ("package", "llama")
    assert said["context_length"] == CONTEXT
    assert parameters(said) == PARAMETERS
    for name, count in PARAMETERS.items():
        constants = 64  # a graph splits what it computes by numbers that are stored too
        assert 4 * count <= said["components"][name]["bytes"] <= 4 * count + constants
    assert said["components"]["head"]["tied_to"] == "embedding"
    cache = said["kv_cache"]
    assert cache["attention"] == "GQA"
    assert cache["bytes_per_token"] == KV_BYTES_PER_TOKEN
    assert cache["bytes_at"] == {"1": KV_BYTES_PER_TOKEN, "40": 40 * KV_BYTES_PER_TOKEN}
    manifest = open_package(tiny_package).manifest
    assert said["package"]["files"] == {name: f.bytes for name, f in manifest.files.items()}
    assert said["package"]["fusions"]["decode"]["packed_qkv"] == LAYERS


def test_a_checkpoint_and_its_config_alone(cli: Cli, tiny_source: Path, tmp_path: Path) -> None:
    whole = facts(cli("inspect", tiny_source, "--json"))
    assert (whole["kind"], parameters(whole)) == ("huggingface", PARAMETERS)
    config = tmp_path / "model" / "config.json"
    config.parent.mkdir()
    config.write_bytes((tiny_source / "config.json").read_bytes())
    for path in (config, config.parent):
        alone = facts(cli("inspect", path, "--json"))
        assert alone["kind"] == "config"
        assert alone["components"] == whole["components"]
        assert alone["kv_cache"] == whole["kv_cache"]
        assert alone["notes"]


def test_tables(tiny_package: Path) -> None:
    ran = run_process("inspect", tiny_package, "--kv-lengths", "1,40")
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0] == f"{tiny_package}: llama (package), context {CONTEXT}"
    rows = {line.split()[0]: line.split() for line in lines if line}
    assert rows["embedding"][1] == f"{PARAMETERS['embedding']:,}"
    assert rows["head"][1:4] == ["tied", "to", "embedding"]
    assert rows["total"][1] == f"{sum(PARAMETERS.values()):,}"
    assert rows["40"][1] == f"{40 * KV_BYTES_PER_TOKEN:,}"
    share = PARAMETERS["mlp"] / sum(PARAMETERS.values())
    assert rows["mlp"][1:3] == [f"{PARAMETERS['mlp']:,}", f"{share:.3%}"]
    assert "biases" not in ran.out
    assert "precision fp32, lowering ort" in lines


def test_gpt3() -> None:
    """The table of its parameters, and what a token takes in the cache."""
    ran = run_process("inspect", "gpt3-175b", "--kv-lengths", "2048,100000")
    assert ran.code == 0
    assert ran.out.splitlines() == [
        "gpt3-175b: gpt3 (preset), context 2048",
        "",
        "component                               parameters    share  of them biases     bytes",
        "embedding                              617,558,016   0.354%               0    1.2 GB",
        "positions                               25,165,824   0.014%               0   50.3 MB",
        "attention                           57,986,777,088  33.210%       4,718,592  116.0 GB",
        "mlp                                115,970,015,232  66.419%       5,898,240  231.9 GB",
        "norms                                    4,743,168   0.003%               0    9.5 MB",
        "head            tied to embedding                0                        0       0 B",
        "total                              174,604,259,328               10,616,832  349.2 GB",
        "without biases                     174,593,642,496",
        "",
        "KV cache: MHA, 96 layers x 96 key-value heads x 128 (96 query heads), float16, "
        "4,718,592 bytes (4.5 MiB) a token",
        " tokens            bytes     memory",
        "  2,048    9,663,676,416    9.0 GiB",
        "100,000  471,859,200,000  439.5 GiB",
    ]
    assert "counted with 16 bits each" in ran.err
    assert "Table 2.1" in ran.err


def test_a_preset_as_json(cli: Cli) -> None:
    ran = cli("inspect", "mixtral-8x7b", "--json")
    said = json.loads(ran.out)
    assert (said["kind"], said["model_type"]) == ("preset", "mixtral")
    assert said["active_parameters"] == 12_879_925_248
    assert said["components"]["mlp"]["parameters"] == 45_098_205_184


def test_a_name_that_is_no_preset(cli: Cli) -> None:
    ran = cli("inspect", "gpt3-175")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: gpt3-175: no such file, folder or preset; allowed: ")
    assert "gpt3-175b, " in ran.err


def test_what_cannot_be_inspected(cli: Cli, tmp_path: Path) -> None:
    ran = cli("inspect", tmp_path)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"error: {tmp_path}: no model in this folder; allowed: ")
    assert ran.err.count("\n") == 1


def test_providers(cli: Cli) -> None:
    rows = json.loads(cli("providers", "--json").out)
    by_name = {row["name"]: row for row in rows}
    assert by_name["cpu"] == {
        "name": "cpu",
        "onnxruntime_name": "CPUExecutionProvider",
        "available": True,
        "reason": None,
        "install": "pip install onnxruntime",
        "precisions": ["fp32", "fp16", "int8", "int4"],
        "lowerings": ["ort", "portable", "plain"],
    }
    here = onnxruntime.get_available_providers()
    for row in rows:
        assert row["install"]
        if row["onnxruntime_name"] not in here:
            assert not row["available"]
            assert row["onnxruntime_name"] in row["reason"]
    shown = cli("providers")
    assert [line.split()[:2] for line in shown.out.splitlines()[1:]] == [
        [row["name"], "yes" if row["available"] else "no"] for row in rows
    ]
    assert shown.err.count("to get ") == sum(not row["available"] for row in rows)
