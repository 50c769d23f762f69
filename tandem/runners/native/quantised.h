// Products of int8 activations and a panel of blocks: integer sums in a group, then one rounded addition a group, from the
// first group to the last. So an output has the same bits whatever the number of tokens, and on every CPU.
#pragma once
#include "blocks.h"

namespace tandem {

// Adds a group's part of 16 outputs.
template <class B> inline v16f add_group(v16f sum, const v16u* units, const Factors<B::PARTS>& by, const Group8& x) {
    constexpr int EACH = UNITS / B::PARTS;
#pragma GCC unroll 2
    for (int part = 0; part < B::PARTS; part++) {
        v16i dot = v16i{} + (B::ZERO == 128 ? x.offset : -B::ZERO * (B::PARTS == 1 ? x.total() : x.sum[part]));
#pragma GCC unroll 8
        for (int i = 0; i < EACH; i++) dot = multiply_add(dot, units[part * EACH + i], x.values + FOUR * (part * EACH + i));
        sum = fused(floats(dot), by.scale[part] * x.scale, sum);
    }
    if constexpr (B::MINIMA) sum = fused(all(x.scale * float(x.total())), by.minimum, sum);
    return sum;
}

// The sums of N tokens, whose rows of groups lie `stride` groups apart; `lines` of `then` are fetched with each group.
template <class B, int N>
void multiply_blocks(const typename B::Packed* blocks, int count, const Group8* x, size_t stride, Soon& then, int lines, v16f* first, v16f* last) {
    v16f sums[2][N];
#pragma GCC unroll 8
    for (int m = 0; m < N; m++) sums[0][m] = sums[1][m] = v16f{};
    for (const auto* block = blocks; block < blocks + count; block++)
        for (int group = 0; group < B::INPUTS / GROUP; group++, x++) {
            then.fetch(lines);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                v16u units[UNITS];
                B::units(*block, group, half, units);
                const Factors<B::PARTS> by = B::factors(*block, group, half);
#pragma GCC unroll 8
                for (int m = 0; m < N; m++) sums[half][m] = add_group<B>(sums[half][m], units, by, x[m * stride]);
            }
        }
#pragma GCC unroll 8
    for (int m = 0; m < N; m++) first[m] = sums[0][m], last[m] = sums[1][m];
}

}  // namespace tandem
