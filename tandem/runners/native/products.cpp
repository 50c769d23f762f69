// Products with quantised weights of every format and number of tokens, compiled once for all models. Those by AMX tiles are
// compiled wherever the compiler knows the instructions, and run where processor and system have them.
#include "quantised.h"
#include <atomic>

#if defined(TANDEM_EMULATED_TILES)
#include TANDEM_EMULATED_TILES  // tests have functions in place of the instructions
#elif defined(__AVX512BF16__) && defined(__linux__) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#include "amx.h"
#else
#define NO_AMX
#endif

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

#ifndef NO_AMX
namespace {

// What tile registers hold: integer sums [tokens][16 outputs], four of them in flight; values [tokens][inputs] and numbers
// [inputs / 4][16 outputs][4], of a whole group or of half a group. With pairs: float sums of two times 16 tokens and 16 outputs,
// and 32 inputs.
constexpr int SUMS = 0, VALUES = 4, HALF_VALUES = 5, NUMBERS = 6, HALF_NUMBERS = 7;

struct alignas(64) TileShapes {  // as `ldtilecfg` reads it
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, GROUP, GROUP / 2, 64, 64};
    uint8_t rows[16] = {0, 0, 0, 0, 0, 0, UNITS, UNITS / 2};

    explicit TileShapes(int tokens) { std::fill(rows + SUMS, rows + NUMBERS, uint8_t(tokens)); }
    TileShapes(int first, int second) {
        const int tokens[] = {first, first, second, second, first, second, LANES, LANES};
        for (int i = 0; i < 8; i++) rows[i] = uint8_t(tokens[i]), row_bytes[i] = tokens[i] ? 64 : 0;
    }
};
static_assert(sizeof(TileShapes) == 64);

typedef int32_t TileSums[Tiles::ROWS][PANEL];

// Two neighbouring groups on their way: their numbers, in place or in `room`, then their sums.
template <class B> struct Pair {
    alignas(64) Units room[2][UNITS];
    alignas(64) TileSums sums[2][B::PARTS];
    const Units* numbers[2];
};

template <class B> inline const Units* spread(const typename B::Packed& block, int group, Units (&room)[UNITS]) {
    if constexpr (B::MOST == 255) return block.rows;
    else {
#pragma GCC unroll 8
        for (int i = 0; i < UNITS; i++)
            for (int r = 0; r < REGISTERS; r++) store(room[i][r * WIDTH], B::unit(block, group, i, r * WIDTH));
        return room;
    }
}

// The integer sums of a group, or of half a group, 16 outputs after the other.
template <int SUM, int X, int W> ON_TILES void sum_part(const int8_t* values, const Units* numbers, TileSums& to) {
    load_tile<X>(values, sizeof(Group8));
    load_tile<W>(numbers[0][0], sizeof(Units));
    zero_tile<SUM>();
    multiply_tile<SUM, X, W>();
    load_tile<W>(numbers[0][LANES], sizeof(Units));
    zero_tile<SUM + 1>();
    multiply_tile<SUM + 1, X, W>();
    store_tile<SUM>(to[0], sizeof(to[0]));
    store_tile<SUM + 1>(to[0] + LANES, sizeof(to[0]));
}

// Of the groups of a pair, one takes one half of the tiles of sums and the other the other, or each part does.
template <class B, int WHICH> ON_TILES void sum_group(const Group8& x, Pair<B>& pair) {
    const Units* numbers = pair.numbers[WHICH];
    if constexpr (B::PARTS == 1) return sum_part<SUMS + 2 * WHICH, VALUES, NUMBERS>(x.values, numbers, pair.sums[WHICH][0]);
    else {
        sum_part<SUMS, HALF_VALUES, HALF_NUMBERS>(x.values, numbers, pair.sums[WHICH][0]);
        sum_part<SUMS + 2, HALF_VALUES, HALF_NUMBERS>(x.values + GROUP / 2, numbers + UNITS / 2, pair.sums[WHICH][1]);
    }
}

// Scales the sums of a pair that begins with group `first`, or of the last group alone, and adds them to each token's outputs.
template <class B, int GROUPS>
inline void add_pair(const Pair<B>& pair, const typename B::Packed* blocks, int first, const Group8* x, size_t stride, int tokens, float (*to)[PANEL]) {
    constexpr int EACH = B::INPUTS / GROUP;
    Factors<B::PARTS> by[GROUPS][REGISTERS];
#pragma GCC unroll 2
    for (int g = 0; g < GROUPS; g++)
#pragma GCC unroll 8
        for (int r = 0; r < REGISTERS; r++) by[g][r] = B::factors(blocks[(first + g) / EACH], (first + g) % EACH, r * WIDTH);
    for (int m = 0; m < tokens; m++) {
        vf sums[REGISTERS];
#pragma GCC unroll 8
        for (int r = 0; r < REGISTERS; r++) sums[r] = load<vf>(to[m] + r * WIDTH);
#pragma GCC unroll 2
        for (int g = 0; g < GROUPS; g++)
#pragma GCC unroll 2
            for (int part = 0; part < B::PARTS; part++) {
                const Group8& own = x[(first + g) * stride + m];
                const int32_t start = own.template start<B::ZERO, B::PARTS>(part);
#pragma GCC unroll 8
                for (int r = 0; r < REGISTERS; r++)
                    add_part<B>(load<vi>(pair.sums[g][part][m] + r * WIDTH) + start, by[g][r], part, own, sums[r]);
            }
#pragma GCC unroll 8
        for (int r = 0; r < REGISTERS; r++) store(to[m] + r * WIDTH, sums[r]);
    }
}

// While the sums of a pair of groups are scaled, the tiles of the next are multiplied and the numbers of the one after that
// are spread: what one of these three writes, the next reads a turn later.
template <class B>
ON_TILES void multiply(const void* packed, int count, const Group8* x, size_t stride, int tokens, Soon& then, int lines, float (*to)[PANEL]) {
    constexpr int EACH = B::INPUTS / GROUP;
    const auto* blocks = static_cast<const typename B::Packed*>(packed);
    const int groups = count * EACH;
    Pair<B> pairs[2];
    std::fill(to[0], to[tokens], 0.0f);
    for (int at = 0; at < groups + 4; at += 2) {
        Pair<B>&own = pairs[at / 2 % 2], &before = pairs[1 - at / 2 % 2];
        for (int i = 0; i < 2 && at + i < groups; i++) {
            then.fetch(lines);
            own.numbers[i] = spread<B>(blocks[(at + i) / EACH], (at + i) % EACH, own.room[i]);
        }
        if (const int g = at - 2; g >= 0 && g < groups) {
            sum_group<B, 0>(x[g * stride], before);
            if (g + 1 < groups) sum_group<B, 1>(x[(g + 1) * stride], before);
        }
        if (const int g = at - 4; g >= 0) (g + 1 < groups ? add_pair<B, 2> : add_pair<B, 1>)(own, blocks, g, x, stride, tokens, to);
    }
}

// The sums of pairs for one or two tiles of tokens.
template <bool BOTH> ON_TILES void sum_pairs(const char* numbers, int inputs, const char* values, size_t stride, Soon& then, int lines, float (*to)[PANEL]) {
    constexpr size_t ROW = sizeof(to[0]);
    zero_tile<SUMS>(), zero_tile<SUMS + 1>();
    if constexpr (BOTH) zero_tile<SUMS + 2>(), zero_tile<SUMS + 3>();
    for (int i = 0; i < inputs; i += 2 * LANES, values += 64, numbers += LANES * ROW) {
        then.fetch(lines);
        load_tile<NUMBERS>(numbers, ROW);
        load_tile<NUMBERS + 1>(numbers + 64, ROW);
        load_tile<VALUES>(values, stride);
        multiply_pairs_tile<SUMS, VALUES, NUMBERS>();
        multiply_pairs_tile<SUMS + 1, VALUES, NUMBERS + 1>();
        if constexpr (!BOTH) continue;
        load_tile<VALUES + 1>(values + Tiles::ROWS * stride, stride);
        multiply_pairs_tile<SUMS + 2, VALUES + 1, NUMBERS>();
        multiply_pairs_tile<SUMS + 3, VALUES + 1, NUMBERS + 1>();
    }
    store_tile<SUMS>(to[0], ROW), store_tile<SUMS + 1>(to[0] + LANES, ROW);
    if constexpr (BOTH) store_tile<SUMS + 2>(to[Tiles::ROWS], ROW), store_tile<SUMS + 3>(to[Tiles::ROWS] + LANES, ROW);
}

std::atomic<bool> wanted{true};

TileState found() {
    static const TileState once = !have_tiles() ? NO_TILES : tiles_permitted() ? TILES_USED : TILES_REFUSED;
    return once;
}
TileState state() { return found() == TILES_USED && !wanted ? TILES_OFF : found(); }

}  // namespace

TileState use_tiles(bool use) {
    wanted = use;
    return state();
}

bool tiles_multiply_pairs() { return found() == TILES_USED; }

// Products as equal as can be; the larger ones come last.
Tiles::Tiles(int count, Operands operands)
    : tokens(count), pairs_(operands == PAIRS), on_(pairs_ || (operands == GROUPS && count > TILE && state() == TILES_USED)) {
    if (!on_) return;
    const int products = (tokens + most() - 1) / most();
    larger_ = (tokens + products - 1) / products;
    const TileShapes shapes = pairs_ ? TileShapes(std::min(larger_, ROWS), std::max(larger_ - ROWS, 0)) : TileShapes(larger_);
    set_shapes(&shapes);
}
Tiles::~Tiles() {
    if (on_) release_tiles();
}

void multiply_tiles(Format format, int tokens, const void* packed, int count, const Group8* x, size_t stride, Soon& then, int lines, float (*to)[PANEL]) {
    with_blocks(format, [&](auto blocks) { multiply<decltype(blocks)>(packed, count, x, stride, tokens, then, lines, to); });
}
void Tiles::multiply_pairs(const void* panel, int inputs, const void* values, size_t stride, Soon& then, int lines, float (*to)[PANEL]) const {
    const auto sums = larger_ > ROWS ? sum_pairs<true> : sum_pairs<false>;
    sums(static_cast<const char*>(panel), inputs, static_cast<const char*>(values), stride, then, lines, to);
}
#else
TileState use_tiles(bool) { return NO_TILES; }
bool tiles_multiply_pairs() { return false; }
Tiles::Tiles(int count, Operands) : tokens(count), pairs_(false), on_(false) {}
Tiles::~Tiles() {}
void Tiles::multiply_pairs(const void*, int, const void*, size_t, Soon&, int, float (*)[PANEL]) const {}
void multiply_tiles(Format, int, const void*, int, const Group8*, size_t, Soon&, int, float (*)[PANEL]) {}
#endif

}  // namespace tandem
