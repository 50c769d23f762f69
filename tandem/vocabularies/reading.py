"""Reads the vocabularies of tokenizers."""

from __future__ import annotations

from tandem.checkpoints.tokenizers import ChatTokenizer, HuggingFaceTokenizer, Tokenizer
from tandem.vocabularies.mapping import Translation, Vocabulary, translation


def translated(target: Tokenizer, draft: Tokenizer) -> Translation | None:
    """The translation between two tokenizers; None if they are equal. Raises ValueError on too little overlap."""
    if target.sha256 == draft.sha256:
        return None
    found = translation(_vocabulary(target), _vocabulary(draft))
    if len(found.back) < 256:  # what remains are bytes, if anything
        raise ValueError(f"foreign_draft: only {len(found.back)} tokens of the draft's are also the target's")
    return found


def _vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    if not isinstance(tokenizer, ChatTokenizer):
        raise ValueError("foreign_draft: this backend's tokens stand for no text")
    ends = tokenizer.end_of_sequence_ids
    begins = tuple(token for token in tokenizer.tokens("", special=True) if token not in ends[:1])
    special = tokenizer.special_ids if isinstance(tokenizer, HuggingFaceTokenizer) else frozenset()
    return Vocabulary(
        tuple(map(tokenizer.token_bytes, range(tokenizer.vocab_size))),
        lambda text: tokenizer.tokens(text, special=False),
        special,
        begins,
        ends[0] if ends else None,
    )
