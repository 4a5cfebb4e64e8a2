"""Two small English texts that quantization and its quality figures use when none is given.

calibration.txt: written for this project (Apache-2.0): stories, dialogue, questions, code, tables,
    letters, a little French, German and Spanish. Activation statistics come from it.
evaluation.txt: the Apache License 2.0, verbatim. KL divergence, top-1 agreement and perplexity are
    measured on it. No calibration may see it, or the figures would flatter.
"""
