// Products with quantised weights of every format and number of tokens, compiled once for all models.
#include "quantised.h"

namespace tandem {

namespace {

template <class B, int N, class... Rest> void sized(int tokens, Rest&&... rest) {
    if (tokens == N) return multiply_blocks<B, N>(rest...);
    if constexpr (N > 1) sized<B, N - 1>(tokens, rest...);
}

}  // namespace

void multiply_blocks(Format format, int tokens, const void* packed, int count, const Group8* x, size_t stride, Soon& then, int lines, float (*to)[PANEL]) {
    with_blocks(format, [&](auto blocks) { sized<decltype(blocks), TILE>(tokens, packed, count, x, stride, then, lines, to); });
}

}  // namespace tandem
