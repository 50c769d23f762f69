// What products.cpp has in place of AMX's instructions when it is compiled with -DTANDEM_EMULATED_TILES='"emulated_tiles.h"': the
// operations of Intel's manual (volume 2, LDTILECFG, TILELOADD, TILESTORED, TILEZERO, TDPBSUD, TDPBF16PS) on memory of each thread. What
// the processor answers by a fault ends the program. TILES_ARE_REFUSED refuses the tiles.
#pragma once
#include <cstdio>
#include <cstdlib>

#define ON_TILES inline

namespace tandem {
namespace {

struct Tile {
    int rows = 0, bytes = 0;  // of a row
    uint8_t at[16][64] = {};
};
thread_local Tile tiles[8];
thread_local bool configured = false;
const bool refused = std::getenv("TILES_ARE_REFUSED") != nullptr;

inline void fault(bool wrong, const char* what) {
    if (!wrong) return;
    std::fprintf(stderr, "fault: %s\n", what);
    std::abort();
}
inline Tile& tile(int which) {
    fault(!configured || !tiles[which].rows, "no such tile");
    return tiles[which];
}
inline bool have_tiles() { return true; }
inline bool tiles_permitted() { return !refused; }
inline void set_shapes(const void* shapes) {
    const auto* from = static_cast<const uint8_t*>(shapes);
    fault(from[0] != 1 || from[1] != 0, "palette or first row");
    for (int i = 2; i < 16; i++) fault(from[i], "reserved");
    for (int i = 0; i < 16; i++) {
        const int bytes = from[16 + 2 * i] | from[17 + 2 * i] << 8, rows = from[48 + i];
        fault(bytes > 64 || rows > 16 || (i >= 8 && (bytes || rows)) || !bytes != !rows, "shape");
        if (i < 8) tiles[i] = Tile{rows, bytes, {}};
    }
    configured = true;
}
inline void release_tiles() { configured = false; }
template <int T> inline void zero_tile() { std::memset(tile(T).at, 0, sizeof(tile(T).at)); }
template <int T> inline void load_tile(const void* from, size_t stride) {
    zero_tile<T>();
    for (int row = 0; row < tile(T).rows; row++) std::memcpy(tile(T).at[row], static_cast<const uint8_t*>(from) + row * stride, tile(T).bytes);
}
template <int T> inline void store_tile(void* to, size_t stride) {
    for (int row = 0; row < tile(T).rows; row++) std::memcpy(static_cast<uint8_t*>(to) + row * stride, tile(T).at[row], tile(T).bytes);
}
template <int SUM, int SIGNED, int UNSIGNED> inline void multiply_tile() {
    Tile &sum = tile(SUM), &x = tile(SIGNED), &w = tile(UNSIGNED);
    fault(SUM == SIGNED || SUM == UNSIGNED || SIGNED == UNSIGNED, "a tile is used twice");
    fault(sum.bytes % 4 || x.bytes % 4 || w.bytes % 4, "no whole numbers");
    fault(sum.rows != x.rows || sum.bytes != w.bytes || x.bytes / 4 != w.rows, "shapes do not fit");
    for (int m = 0; m < sum.rows; m++)
        for (int k = 0; k < x.bytes / 4; k++)
            for (int n = 0; n < w.bytes / 4; n++) {
                int32_t total = load<int32_t>(&sum.at[m][4 * n]);
                for (int i = 0; i < 4; i++)
                    total += int8_t(x.at[m][4 * k + i]) * int32_t(w.at[k][4 * n + i]);
                store(&sum.at[m][4 * n], total);
            }
}
template <int SUM, int X, int W> inline void multiply_pairs_tile() {
    Tile &sum = tile(SUM), &x = tile(X), &w = tile(W);
    fault(SUM == X || SUM == W || X == W, "a tile is used twice");
    fault(sum.rows != x.rows || sum.bytes != w.bytes || x.bytes / 4 != w.rows, "shapes do not fit");
    auto kept = [](float value) { return std::fabs(value) < 0x1p-126f ? 0 : value; };
    for (int m = 0; m < sum.rows; m++)
        for (int n = 0; n < w.bytes / 4; n++) {
            float chains[2] = {};
            for (int k = 0; k < x.bytes / 4; k++)
                for (int i = 0; i < 2; i++)
                    chains[i] = kept(std::fma(kept(widen(load<uint16_t>(&x.at[m][4 * k + 2 * i]))), kept(widen(load<uint16_t>(&w.at[k][4 * n + 2 * i]))), chains[i]));
            store(&sum.at[m][4 * n], kept(load<float>(&sum.at[m][4 * n]) + kept(chains[0] + chains[1])));
        }
}

}  // namespace
}  // namespace tandem
