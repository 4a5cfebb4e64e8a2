"""Keys of a config that no family reads."""

from __future__ import annotations

# Keys that every Hugging Face config may carry and that change no number of a forward pass in evaluation.
IGNORED_KEYS = frozenset(
    {
        "_name_or_path",
        "_num_labels",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "auto_map",  # names Python files inside the checkpoint; nothing of a checkpoint is ever executed
        "bos_token_id",
        "chunk_size_feed_forward",
        "custom_pipelines",  # as auto_map
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)
