"""What comes of one prompt."""

from __future__ import annotations

from dataclasses import dataclass

from onnxlm.runtime.logprobs import TokenLogprob
from onnxlm.runtime.stopping import StopReason
from onnxlm.runtime.tokenizer import no_text


@dataclass(frozen=True)
class Generation:
    """What came of one prompt.

    Attributes:
        decoded: The text, see there; None where the package has no tokenizer.
        token_ids: The new ids, what ended the text included.
        finish_reason: Why it ended: "eos", "stop", "length", "context" or "cancelled"; None while it runs.
        prompt_tokens: Tokens that ran before the first new one.
        ttft_s: Seconds to the first token.
        decode_tokens_per_s: New tokens after the first, all rows together, by the seconds they took.
        logprobs: Of each new token; None where nothing was asked for.
        score: Of beam search, the sum of log-probabilities over length to the power of length_penalty.
        alternatives: The other sequences that num_return_sequences asked for, best first.
    """

    decoded: str | None
    token_ids: list[int]
    finish_reason: StopReason | None
    prompt_tokens: int
    ttft_s: float
    decode_tokens_per_s: float
    logprobs: list[TokenLogprob] | None = None
    score: float | None = None
    alternatives: tuple[Generation, ...] = ()

    @property
    def text(self) -> str:
        """The new text, special tokens left out; it ends before a stop string or a stop token.

        Raises:
            InputError: The package has no tokenizer.
        """
        if self.decoded is None:
            raise no_text()
        return self.decoded
