"""Parameters and caches worked by hand: GPT-3's components, the first Transformer's layer, shared heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn

from onnxlm.config_inspection import parse, states_of
from onnxlm.inspection import kv_cache_of
from onnxlm.models.architectures._common import embedding_and_head
from onnxlm.models.config import ModelConfig
from onnxlm.models.layers.attention import Attention
from onnxlm.models.layers.cached_attention import AttentionSpec
from onnxlm.models.layers.decoder import DecoderLM
from onnxlm.models.layers.mla import LatentAttention, LatentSpec
from onnxlm.models.layers.mlp import MLP, GatedMLP
from onnxlm.models.presets import SOURCE, read_preset

LAYERS, WIDTH, VOCABULARY, CONTEXT = 96, 12288, 50257, 2048


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def weights(module: nn.Module) -> int:
    """Numbers in matrices."""
    return sum(p.numel() for p in module.parameters() if p.dim() > 1)


def vectors(module: nn.Module) -> int:
    """Numbers in biases and norms."""
    return sum(p.numel() for p in module.parameters() if p.dim() == 1)


@pytest.fixture(scope="module")
def gpt3() -> DecoderLM:
    """Without its weights."""
    raw = read_preset("gpt3-175b")
    del raw[SOURCE]
    return parse(raw, "gpt3-175b")[1]


def test_layer_of_the_first_transformer() -> None:
    """Width 512, eight heads, 2048 inside: a third of the matrices attends, two thirds feed forward."""
    block = on_meta(lambda: MLP(512, 2048, True, "relu"))
    attention = on_meta(lambda: Attention(512, 64, AttentionSpec(8, 8, 64**-0.5)))
    assert (weights(block), vectors(block)) == (2 * 1_048_576, 2048 + 512)
    assert (weights(attention), vectors(attention)) == (4 * 262_144, 0)
    assert round(weights(block) / (weights(block) + weights(attention)), 2) == 0.67


@pytest.mark.parametrize("width", [768, 1536, 12288])
def test_three_matrices_of_eight_thirds_are_two_of_four(width: int) -> None:
    gated = on_meta(lambda: GatedMLP(width, 8 * width // 3))
    plain = on_meta(lambda: MLP(width, 4 * width, False, "gelu"))
    assert weights(gated) == weights(plain) == 8 * width**2


def test_layer_of_gpt3(gpt3: DecoderLM) -> None:
    layer = gpt3.layers[0]
    assert len(gpt3.layers) == LAYERS
    assert weights(layer.self_attn) == 4 * WIDTH**2 == 603_979_776
    assert layer.self_attn.q_proj.weight.shape == (WIDTH, 96 * 128) == (WIDTH, WIDTH)
    assert [tuple(p.weight.shape) for p in (layer.mlp.up_proj, layer.mlp.down_proj)] == [
        (49_152, WIDTH),
        (WIDTH, 49_152),
    ]
    assert layer.mlp.up_proj.weight.numel() == 603_979_776
    assert weights(layer.mlp) == 8 * WIDTH**2 == 1_207_959_552
    assert vectors(layer.input_layernorm) == vectors(layer.post_attention_layernorm) == 24_576


def test_all_of_gpt3(gpt3: DecoderLM) -> None:
    """Matrices, embeddings and norms 174.594 billion; with the bias of every product 174.604."""
    products = {
        "mlp": sum(weights(layer.mlp) for layer in gpt3.layers),
        "attention": sum(weights(layer.self_attn) for layer in gpt3.layers),
        "embedding": gpt3.embed_tokens.weight.numel(),
        "positions": gpt3.embed_positions.weight.numel(),
    }
    norms = LAYERS * 4 * WIDTH + 2 * WIDTH
    assert norms == 96 * 49_152 + 24_576 == 4_718_592 + 24_576 == 4_743_168
    assert products["embedding"] == VOCABULARY * WIDTH == 617_558_016
    assert products["positions"] == CONTEXT * WIDTH == 25_165_824
    whole = sum(products.values()) + norms
    assert whole == 174_593_642_496
    biases = sum(vectors(layer.self_attn) + vectors(layer.mlp) for layer in gpt3.layers)
    assert sum(p.numel() for p in gpt3.parameters()) == whole + biases == 174_604_259_328
    shares = {name: round(100 * count / whole, 1) for name, count in products.items()}
    assert shares == {"mlp": 66.4, "attention": 33.2, "embedding": 0.4, "positions": 0.0}
    assert round(100 * (products["embedding"] + products["positions"]) / whole, 2) == 0.37
    assert math.ceil(100_000 * norms / whole) == 3  # thousandths of a percent


@pytest.mark.parametrize(
    ("vocabulary", "head"), [(VOCABULARY, 617_558_016), (128_256, 1_576_009_728)]
)
def test_a_tied_head_costs_nothing(vocabulary: int, head: int) -> None:
    def count(tied: bool) -> int:
        config = ModelConfig(
            model_type="",
            vocab_size=vocabulary,
            hidden_size=WIDTH,
            num_hidden_layers=1,
            num_attention_heads=1,
            max_position_embeddings=1,
            tie_word_embeddings=tied,
        )
        pair = on_meta(lambda: nn.ModuleList(embedding_and_head(config)))
        return sum(p.numel() for p in pair.parameters())

    assert (count(True), count(False)) == (head, 2 * head)


def token_bytes(state: Mapping[str, tuple[int, int]], layers: int = LAYERS) -> int:
    """Of one more token in 16 bits."""
    cache = kv_cache_of(states_of([state] * layers, [0] * layers, "float16"), 96, [1], None)
    assert cache is not None
    return cache.bytes_per_token


def test_cache_of_gpt3(gpt3: DecoderLM) -> None:
    """2 * 96 layers * 12288 * 2 bytes = 4.5 MiB a token; 9 GiB at 2048, 439.5 GiB at 100,000."""
    cache = kv_cache_of(
        states_of(gpt3.state_shapes, gpt3.windows, "float16"), 96, [1, 2048, 100_000], CONTEXT
    )
    assert cache is not None
    assert cache.attention == "MHA"
    assert cache.bytes_per_token == 2 * 96 * 12288 * 2 == 4_718_592
    in_gib = {length: count / 2**30 for length, count in cache.bytes_at.items()}
    assert in_gib[1] == 4.5 / 1024
    assert in_gib[2048] == 9.0
    assert round(in_gib[100_000], 1) == 439.5


@pytest.mark.parametrize(("kv_heads", "kind"), [(96, "MHA"), (8, "GQA"), (1, "MQA")])
def test_cache_of_shared_heads(kv_heads: int, kind: str) -> None:
    """All 96 heads with their own keys, 8 groups, one: the cache shrinks as the heads."""
    attention = on_meta(lambda: Attention(WIDTH, 128, AttentionSpec(96, kv_heads, 128**-0.5)))
    assert isinstance(attention, Attention)
    assert token_bytes(attention.state_shapes) == 4_718_592 * kv_heads // 96
    cache = kv_cache_of(states_of([attention.state_shapes], [0]), 96, None, None)
    assert cache is not None
    assert cache.attention == kind


@pytest.mark.parametrize(
    ("name", "query_heads", "share"), [("llama2-70b", 64, 8), ("llama3-8b", 32, 4)]
)
def test_cache_of_grouped_models(name: str, query_heads: int, share: int) -> None:
    raw = read_preset(name)
    del raw[SOURCE]
    kept = parse(raw, name)[1].state_shapes[0]
    assert kept["key"] == kept["value"] == (query_heads // share, 128)


def test_cache_of_compressed_keys_and_values() -> None:
    """DeepSeek-V2: 512 + 64 numbers a token and layer, as much as 2.25 groups of heads of 128 would take."""
    sizes = LatentSpec(
        num_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        scale=192**-0.5,
        eps=1e-6,
    )
    attention = on_meta(lambda: LatentAttention(5120, sizes))
    assert isinstance(attention, LatentAttention)
    assert attention.state_shapes == {"latent": (1, 576)}
    assert token_bytes(attention.state_shapes, layers=60) == 69_120
    assert 576 / (2 * 128) == 2.25
    cache = kv_cache_of(states_of([attention.state_shapes], [0]), 128, None, None)
    assert cache is not None
    assert cache.attention == "MLA"
