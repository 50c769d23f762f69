// Products of int8 activations and a panel of blocks: integer sums in a group, then one rounded addition per group in
// order, so bits depend neither on the number of tokens nor on the CPU.
#pragma once
#include "blocks.h"

namespace tandem {

constexpr int REGISTERS = PANEL / WIDTH;  // that hold a number of every output of a panel

// Tokens whose sums fit in registers.
#if defined(__AVX512VNNI__)
constexpr int TILE = 8;
#elif defined(__AVX2__)
constexpr int TILE = 6;
#else
constexpr int TILE = 4;
#endif

// Adds the integer sum of a group, or half of one, to a token's outputs.
template <class B> inline void add_part(vi dot, const Factors<B::PARTS>& by, int part, const Group8& x, vf& sum) {
    sum = fused(floats(dot), by.scale[part] * spread<vf>(x.scale), sum);
    if constexpr (B::MINIMA) sum = fused(spread<vf>(x.scaled), by.minimum, sum);
}

// Adds a group to R registers of outputs from `first` on for N tokens.
template <class B, int R, int N>
inline void add_group(const typename B::Packed& block, int group, int first, const Group8* x, vf (&sums)[REGISTERS][N]) {
    typedef Products<B::MOST> Sum;
    constexpr int EACH = UNITS / B::PARTS;
    asm volatile("" : "+r"(x));  // else GCC keeps the activations of the outputs before, in memory
#pragma GCC unroll 2
    for (int part = 0; part < B::PARTS; part++) {
        auto start = [&](int m) { return x[m].template start<B::ZERO, B::PARTS>(part); };
        Sum dots[R][N];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int m = 0; m < N; m++) dots[r][m].begin(start(m));
#pragma GCC unroll 8
        for (int i = part * EACH; i < (part + 1) * EACH; i += Sum::STEP) {
            typename Sum::Ready w[R];
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                vu numbers[Sum::STEP];
                for (int s = 0; s < Sum::STEP; s++) numbers[s] = B::unit(block, group, i + s, (first + r) * WIDTH);
                w[r] = Sum::ready(numbers);
            }
#pragma GCC unroll 8
            for (int m = 0; m < N; m++) {
                const typename Sum::Bytes bytes = Sum::bytes(x[m].values + FOUR * i);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) dots[r][m].add(w[r], bytes);
            }
        }
        Factors<B::PARTS> by[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) by[r] = B::factors(block, group, (first + r) * WIDTH);
#pragma GCC unroll 8
        for (int m = 0; m < N; m++)
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) add_part<B>(dots[r][m].total(start(m)), by[r], part, x[m], sums[first + r][m]);
    }
}

// The sums of N tokens. Group g of token m is x[g * stride + m]; prefetches `lines` of `then` per group.
template <class B, int N>
[[gnu::noinline]] void multiply_blocks(const void* packed, int count, const Group8* x, size_t stride, Soon& then, int lines, float (*to)[PANEL]) {
    constexpr int TOGETHER = Products<B::MOST>::together(N);
    const auto* blocks = static_cast<const typename B::Packed*>(packed);
    vf sums[REGISTERS][N];
#pragma GCC unroll 8
    for (int r = 0; r < REGISTERS; r++)
#pragma GCC unroll 8
        for (int m = 0; m < N; m++) sums[r][m] = vf{};
    for (const auto* block = blocks; block < blocks + count; block++)
        for (int group = 0; group < B::INPUTS / GROUP; group++, x += stride) {
            then.fetch(lines);
#pragma GCC unroll 8
            for (int r = 0; r < REGISTERS; r += TOGETHER) add_group<B, TOGETHER, N>(*block, group, r, x, sums);
        }
#pragma GCC unroll 8
    for (int m = 0; m < N; m++)
#pragma GCC unroll 8
        for (int r = 0; r < REGISTERS; r++) store(to[m] + r * WIDTH, sums[r][m]);
}

// The same for up to TILE tokens of any format; compiled apart.
void multiply_blocks(Format format, int tokens, const void* packed, int count, const Group8* x, size_t stride, Soon& then, int lines, float (*to)[PANEL]);

// --- the same products by AMX, whose instructions multiply tiles of up to 16 tokens ---

// Processor, system or compiler have no tiles; they are used; the system refuses them; they are switched off.
enum TileState : int { NO_TILES, TILES_USED, TILES_REFUSED, TILES_OFF };

// The first call asks the system for permission. `use`: whether tiles are from now on.
TileState use_tiles(bool use);

// The same as multiply_blocks for up to Tiles::ROWS tokens, where the thread has Tiles; may read the row behind the last token's.
void multiply_tiles(Format format, int tokens, const void* packed, int count, const Group8* x, size_t stride, Soon& then, int lines, float (*to)[PANEL]);

// Whether this process multiplies pairs of bfloat16 numbers by tiles, whatever `use_tiles` says: the order of sums is their own.
bool tiles_multiply_pairs();

// While it lives, its thread has AMX tiles for products of `tokens` tokens: of groups of int8 values, where tiles are used and pay
// (from the number on for which others need two passes), or of pairs. Not longer, since the thread may run other libraries that set
// up their own.
class Tiles {
public:
    enum Operands : uint8_t { NOTHING, GROUPS, PAIRS };
    static constexpr int ROWS = 16, MOST = 2 * ROWS;  // tokens of a tile; of a product

    Tiles(int tokens, Operands operands);
    ~Tiles();
    Tiles(const Tiles&) = delete;
    int most() const { return !on_ ? TILE : pairs_ ? MOST : ROWS; }
    template <class... Rest> void multiply(Rest&&... rest) const { (on_ ? multiply_tiles : plain)(rest...); }
    // Sums of values [tokens][inputs], `stride` bytes apart, and a panel's pairs [inputs / 2][outputs][2], by whole rows of tiles: each
    // tile's even and its odd inputs in two chains of multiply-adds, whose sum is added. May read the row behind the last token's.
    void multiply_pairs(const void* panel, int inputs, const void* values, size_t stride, Soon& then, int lines, float (*to)[PANEL]) const;
    const int tokens;

private:
    static constexpr auto plain = static_cast<decltype(&multiply_tiles)>(multiply_blocks);
    const bool pairs_, on_;
    int larger_ = 0;  // tokens of a larger product
};

}  // namespace tandem
