"""What export and quantization share about graphs: linear layers in them, and weights on disk (onnx-ir)."""
