"""`python -m onnxlm` is the `onnxlm` command."""

from onnxlm.cli import main

if __name__ == "__main__":
    main()
