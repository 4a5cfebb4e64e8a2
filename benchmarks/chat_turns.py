"""What a second turn of a chat costs: by its new tokens, and by how much was said before.

    python benchmarks/chat_turns.py packages/int8 --json results.json

A first turn says so many tokens, a second one says more. "turn" is the time from the message to the first
token of the second answer, "anew" that of a chat which runs the same conversation from its beginning. If
a turn ran old tokens again, its time would grow with the first turn as "anew" does; what does grow is
attention, which reads the keys and values of all tokens, and rendering and encoding, which see the whole
conversation.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from record import Record, parser

from onnxlm.runtime import Chat, LanguageModel, load

WORD = " stone"
# A turn behind a long conversation costs at most so many times the same turn behind a short one.
AIM = 1.5


def words(model: LanguageModel, count: int) -> str:
    """A text of so many tokens."""
    one = len(model.encode(WORD, add_special_tokens=False))
    return WORD * (count // one)


def first_token_s(chat: Chat, message: str) -> tuple[float, int]:
    """Seconds from a message to the answer's first token, and the tokens that ran before it."""
    began = time.perf_counter()
    reply = chat.send(message, max_new_tokens=1)
    for _ in reply:
        pass
    return time.perf_counter() - began, reply.result.prompt_tokens


def main() -> None:
    options = parser(__doc__)
    options.add_argument("package", type=Path)
    options.add_argument("--before", type=int, nargs="+", default=[64, 256, 1024])
    options.add_argument("--new", type=int, nargs="+", default=[16, 64, 256])
    options.add_argument("--rounds", type=int, default=5)
    args = options.parse_args()
    model = load(args.package, threads=args.threads)
    record = Record(args, "onnxlm.chat_turns/1")
    cases = [(before, new) for new in args.new for before in args.before]
    chats = {before: model.chat() for before in args.before}
    for before, chat in chats.items():
        first_token_s(chat, words(model, before))
    times: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    tokens = {}
    for turn in range(args.rounds + 1):
        for before, new in cases:
            # A fork has a cache of its own, with the first turn in it.
            spent, tokens[before, new] = first_token_s(chats[before].fork(), words(model, new))
            if turn:  # the first round warms up
                times[before, new].append(spent)
    medians = {case: statistics.median(spent) for case, spent in times.items()}
    for before, new in cases:
        anew, all_tokens = first_token_s(model.chat(), words(model, before + new))
        record.add(
            before=before,
            new=new,
            tokens_run=tokens[before, new],
            turn_ms=medians[before, new] * 1e3,
            anew_tokens=all_tokens,
            anew_ms=anew * 1e3,
        )
    short, long = min(args.before), max(args.before)
    record.finish(
        {
            f"turn of {new} tokens behind {long} to the same behind {short}": (
                medians[long, new] / medians[short, new],
                "<=",
                AIM,
            )
            for new in args.new
        }
    )


if __name__ == "__main__":
    main()
