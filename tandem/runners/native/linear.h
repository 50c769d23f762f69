// Linear layers over weights packed in panels of 32 outputs. Each output is one sum in the order of the inputs, whatever
// the number of tokens: the same token has the same bits alone, among drafts, in a prefill and beside any neighbours.
#pragma once
#include "memory.h"
#include "vectors.h"

namespace tandem {

constexpr int PANEL = 2 * LANES;
constexpr int TILE = 8;  // tokens whose sums are held in registers at once

// Row `row` of a matrix that is to be packed, or nothing (zeros) where `row` is null.
template <class D> using Row = const typename D::stored*;

template <class D> class Linear {
public:
    typedef typename D::stored stored;
    typedef typename D::unit unit;

    Linear() = default;

    // Its weights live in `arena`. `row(i)` gives the weights of output i, `bias(i)` its bias; both for i below panels * 32.
    template <class Rows, class Biases> Linear(Arena& arena, int inputs, int panels, Rows row, Biases bias)
        : units_(inputs / D::PER_UNIT), panels_(panels), packed_(arena.take<unit>(size_t(panels) * units_ * PANEL)), bias_(size_t(panels) * PANEL) {
        for (int panel = 0; panel < panels; panel++)
            for (int lane = 0; lane < PANEL; lane++) {
                int output = panel * PANEL + lane;
                Row<D> weights = row(output);
                bias_[output] = bias(output);
                if (!weights) continue;
                unit* to = packed_ + size_t(panel) * units_ * PANEL + lane;
                for (int i = 0; i < units_; i++)
                    std::memcpy(to + size_t(i) * PANEL, weights + size_t(i) * D::PER_UNIT, sizeof(unit));
            }
    }
    int panels() const { return panels_; }
    size_t panel_bytes() const { return size_t(units_) * PANEL * sizeof(unit); }
    Soon soon(int which) const {
        const char* at = reinterpret_cast<const char*>(packed_) + which * panel_bytes();
        return {at, at + panel_bytes()};
    }

    // Calls done(token, first 16 outputs, last 16 outputs) for each of `tokens` rows of x, `stride` values apart, in tiles as
    // equal as can be. Meanwhile `then`, the panel after this one, is fetched, as much of it in one tile as in another.
    template <class Done> void panel(int which, const stored* x, size_t stride, int tokens, Soon then, Done done) const {
        const int tiles = (tokens + TILE - 1) / TILE, lines = (BURST_LINES + tiles - 1) / tiles;
        for (int at = 0, left = tiles; left; left--) {
            const int count = (tokens - at + left - 1) / left;
            sized<TILE>(count, which, x + at * stride, stride, at, then, lines, done);
            at += count;
        }
    }

private:
    static constexpr int BURST = 8, BURST_LINES = BURST * PANEL * sizeof(unit) / 64;  // between two fetches: units, and their lines

    template <int N, class Done>
    void sized(int count, int which, const stored* x, size_t stride, int at, Soon& then, int lines, Done& done) const {
        if (count == N) tile<N>(which, x, stride, at, then, lines, done);
        else if constexpr (N > 1) sized<N - 1>(count, which, x, stride, at, then, lines, done);
    }

    template <int N, class Done>
    void tile(int which, const stored* x, size_t stride, int at, Soon& then, int lines, Done& done) const {
        const unit* w = packed_ + size_t(which) * units_ * PANEL;
        v16f first[N], last[N];
#pragma GCC unroll 8  // all of these loops, or else the sums lie in memory
        for (int m = 0; m < N; m++) first[m] = last[m] = v16f{};
        for (int i = 0; i < units_;) {
            then.fetch(lines);
            for (const int end = std::min(i + BURST, units_); i < end; i++, w += PANEL) {
                v16u near = load<v16u>(w), far = load<v16u>(w + LANES);
#pragma GCC unroll 8
                for (int m = 0; m < N; m++) {
                    unit value = load<unit>(x + m * stride + size_t(i) * D::PER_UNIT);
                    first[m] = D::multiply_add(first[m], value, near);
                    last[m] = D::multiply_add(last[m], value, far);
                }
            }
        }
        v16f near = load<v16f>(&bias_[size_t(which) * PANEL]), far = load<v16f>(&bias_[size_t(which) * PANEL + LANES]);
#pragma GCC unroll 8
        for (int m = 0; m < N; m++) done(at + m, D::rounded(first[m] + near), D::rounded(last[m] + far));
    }

    int units_ = 0, panels_ = 0;
    unit* packed_ = nullptr;
    Buffer<float> bias_;
};

}  // namespace tandem
