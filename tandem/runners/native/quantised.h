// Products of int8 activations and a panel of blocks: integer sums in a group, then one rounded addition a group, from the
// first group to the last. So an output has the same bits whatever the number of tokens, and on every CPU.
#pragma once
#include "blocks.h"

namespace tandem {

// Vectors of 16 outputs, and tokens, whose integer sums are held in registers at once.
#if defined(__AVX512VNNI__)
constexpr int HALVES = 2, ABREAST = 8;
#else
constexpr int HALVES = 1, ABREAST = 4;
#endif

// Adds a group's part of H * 16 outputs from `half` on for N of ALL tokens, from `FROM` on; x: that group of all.
template <class B, int H, int N, int ALL, int FROM>
inline void add_group(const typename B::Packed& block, int group, int half, const Group8* x, v16f (&sums)[2][ALL]) {
    typedef Products<B::MOST> Sum;
    constexpr int EACH = UNITS / B::PARTS;
#pragma GCC unroll 2
    for (int part = 0; part < B::PARTS; part++) {
        Sum dots[H][N];
#pragma GCC unroll 2
        for (int h = 0; h < H; h++)
#pragma GCC unroll 8
            for (int m = 0; m < N; m++) dots[h][m].begin(x[FROM + m].template start<B::ZERO, B::PARTS>(part));
#pragma GCC unroll 8
        for (int i = part * EACH; i < (part + 1) * EACH; i++) {
            typename Sum::Ready w[H];
#pragma GCC unroll 2
            for (int h = 0; h < H; h++) w[h] = Sum::ready(B::unit(block, group, i, half + h));
#pragma GCC unroll 8
            for (int m = 0; m < N; m++) {
                const typename Sum::Bytes bytes = Sum::bytes(x[FROM + m].values + FOUR * i);
#pragma GCC unroll 2
                for (int h = 0; h < H; h++) dots[h][m].add(w[h], bytes);
            }
        }
#pragma GCC unroll 2
        for (int h = 0; h < H; h++) {
            const Factors<B::PARTS> by = B::factors(block, group, half + h);
#pragma GCC unroll 8
            for (int m = 0; m < N; m++) {
                v16f& sum = sums[half + h][FROM + m];
                sum = fused(floats(dots[h][m].total()), by.scale[part] * x[FROM + m].scale, sum);
                if constexpr (B::MINIMA) sum = fused(all(x[FROM + m].scaled), by.minimum, sum);
            }
        }
    }
}

// The same for all 32 outputs, token after token from `FROM` on as registers allow.
template <class B, int N, int FROM = 0>
inline void add_groups(const typename B::Packed& block, int group, const Group8* x, v16f (&sums)[2][N]) {
    constexpr int COUNT = N - FROM < ABREAST ? N - FROM : ABREAST;
#pragma GCC unroll 2
    for (int half = 0; half < 2; half += HALVES) add_group<B, HALVES, COUNT, N, FROM>(block, group, half, x, sums);
    if constexpr (FROM + COUNT < N) add_groups<B, N, FROM + COUNT>(block, group, x, sums);
}

// The sums of N tokens. Group g of token m is x[g * stride + m]; `lines` of `then` are fetched with each group.
template <class B, int N>
void multiply_blocks(const typename B::Packed* blocks, int count, const Group8* x, size_t stride, Soon& then, int lines, v16f* first, v16f* last) {
    v16f sums[2][N];
#pragma GCC unroll 8
    for (int m = 0; m < N; m++) sums[0][m] = sums[1][m] = v16f{};
    for (const auto* block = blocks; block < blocks + count; block++)
        for (int group = 0; group < B::INPUTS / GROUP; group++, x += stride) {
            then.fetch(lines);
            add_groups<B, N>(*block, group, x, sums);
        }
#pragma GCC unroll 8
    for (int m = 0; m < N; m++) first[m] = sums[0][m], last[m] = sums[1][m];
}

}  // namespace tandem
