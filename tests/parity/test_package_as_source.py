"""A full-precision package is a source like any other: what it loads is what it was made from."""

import pytest
import torch
from support.exported import variants
from support.hot import hot_model, oracle_logits, save_folder
from support.packages import replace_file

from onnxlm.errors import CheckpointError
from onnxlm.export import export
from onnxlm.models import load
from onnxlm.models.checkpoint import read
from onnxlm.package import open_package

CONFIG = variants("llama")["biases, one KV head, llama3"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_folder(hot_model(CONFIG), tmp_path_factory.mktemp("source"))


@pytest.mark.parametrize("lowering", ["ort", "portable"])
def test_every_parameter_comes_back_bit_for_bit(source, tmp_path, lowering):
    package = export(source, tmp_path / "package", lowering=lowering).path
    expected, found = load(source).state_dict(), load(package).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    ids = [5, 3, 8, 8, 1]
    assert torch.allclose(
        load(package).logits(ids), oracle_logits(hot_model(CONFIG), ids), atol=1e-4
    )


def test_export_of_a_package_gives_the_other_lowering(source, tmp_path):
    first = export(source, tmp_path / "first")
    second = export(first.path, tmp_path / "second", lowering="portable")
    assert read(second.path).kind == "package"
    assert open_package(second.path).manifest.lowering == "portable"


def test_package_whose_config_tells_of_another_model_is_refused(source, tmp_path):
    package = export(source, tmp_path / "package")
    other = save_folder(hot_model(CONFIG | {"intermediate_size": 48}), tmp_path / "other")
    text = (other / "config.json").read_text()
    # The hash of config.json is renewed, so that only the sizes disagree.
    replace_file(package.path, "config.json", text.encode())
    with pytest.raises(
        CheckpointError, match=r"parameters do not fit config\.json; found .*down_proj"
    ):
        read(package.path)
