// Draws tokens with the bits of tandem/speculation/draws.py.
#pragma once
#include "system.h"
#include <cmath>
#include <cstdint>

namespace tandem {

// A row's draws, the first at `position`, from `tokens` ids. Temperature 0: none.
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

// The token `ahead` positions further, or -1 for unsound logits, which are of tokens only[0 .. outputs) (null: all).
int32_t draw(Pool& pool, const float* logits, int outputs, const int32_t* only, const Sampling& by, int ahead);

// Per row of `count` logits: totals[r] = log(sum(exp(logits[r]))) (NaN: unsound), and ids[r * top ...], the `top`
// largest in order, lower ids first among equals.
void logprobs(Pool& pool, const float* const* logits, int rows, int count, int top, double* totals, int32_t* ids);

}  // namespace tandem
