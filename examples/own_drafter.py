"""Brings a drafter of its own: `python examples/own_drafter.py HOST:PORT`, after `tandem target`."""

import sys

from tandem import DraftSession


class Repeat:
    """Drafts what followed the last token when it occurred before."""

    def propose(self, tokens, k):
        before = tokens[:-1]
        at = len(before) - before[::-1].index(tokens[-1]) if tokens[-1] in before else len(tokens)
        return tokens[at : at + k]


with DraftSession(sys.argv[1] if len(sys.argv) > 1 else "localhost:50051", Repeat()) as session:
    completion = session.generate([7, 8, 9, 7, 8, 9, 7, 8], max_new_tokens=40, timeout=60)
    print(*completion.token_ids)
    print(f"{completion.statistics.rounds} rounds for {completion.output_tokens} tokens")
