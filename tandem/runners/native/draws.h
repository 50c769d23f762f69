// Draws tokens as tandem/speculation/draws.py does, with the same bits; that file says what they follow.
#pragma once
#include "pool.h"
#include <cmath>
#include <cstdint>

namespace tandem {

// How the tokens of a row are drawn, the first at `position`: from `tokens` ids. At temperature 0 they are not drawn.
struct Sampling {
    double temperature, top_p, min_p;
    uint64_t seed;
    int64_t position;
    int32_t top_k, tokens;

    bool draws() const { return temperature != 0; }
    bool sound() const {
        return temperature > 0 && std::isfinite(temperature) && top_p > 0 && top_p <= 1 && min_p >= 0 && min_p <= 1 && top_k >= 0 &&
               position >= 0 && position < int64_t(1) << 62 && tokens > 0 && tokens < 1 << 28;
    }
};

// The token that is drawn `ahead` positions further, or -1 if the logits are unsound. `logits`: those of tokens
// only[0 .. outputs), all others being -inf (null: of all tokens).
int32_t draw(Pool& pool, const float* logits, int outputs, const int32_t* only, const Sampling& by, int ahead);

// Of `rows` rows of `count` logits: totals[r] is log(sum(exp(logits[r]))), ids[r * top ...] those of the `top` largest, the
// largest first and the lower id first among equals. Where logits are unsound, the total is NaN.
void logprobs(Pool& pool, const float* const* logits, int rows, int count, int top, double* totals, int32_t* ids);

}  // namespace tandem
