"""How long a request's sequence may become, which is what memory is reserved for."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.speculation.types import GenerationRequest


@dataclass(frozen=True, slots=True)
class Extent:
    """The most new tokens, and the most tokens in all, of a sequence; None: as many as the model takes."""

    most_new: int | None = None
    most_total: int | None = None

    @staticmethod
    def of(request: GenerationRequest) -> Extent:
        return Extent(request.max_new_tokens, request.max_total_tokens)

    def tokens(self, prompt_length: int) -> int | None:
        """Returns the most tokens of a sequence that begins with a prompt, or None if nothing bounds them."""
        with_new = None if self.most_new is None else prompt_length + self.most_new
        return min((most for most in (with_new, self.most_total) if most is not None), default=None)


WHOLE = Extent()
