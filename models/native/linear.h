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
    size_t bytes() const { return size_t(panels_) * panel_bytes(); }
    size_t panel_bytes() const { return size_t(units_) * PANEL * sizeof(unit); }
    Soon soon(int which) const {
        const char* at = reinterpret_cast<const char*>(packed_) + which * panel_bytes();
        return {at, at + panel_bytes()};
    }

    // Calls done(token, first 16 outputs, last 16 outputs) for each of `tokens` rows of x, `stride` values apart. The
    // first tile waits for memory; during the others, which find the panel in the cache, `then` is fetched.
    template <class Done> void panel(int which, const stored* x, size_t stride, int tokens, Soon then, Done done) const {
        int at = 0;
        for (; tokens - at >= TILE; at += TILE) {
            if (at) tile<TILE, true>(which, x + at * stride, stride, at, done, &then);
            else tile<TILE>(which, x, stride, at, done);
        }
        switch (tokens - at) {
            case 1: return tile<1>(which, x + at * stride, stride, at, done);
            case 2: return tile<2>(which, x + at * stride, stride, at, done);
            case 3: return tile<3>(which, x + at * stride, stride, at, done);
            case 4: return tile<4>(which, x + at * stride, stride, at, done);
            case 5: return tile<5>(which, x + at * stride, stride, at, done);
            case 6: return tile<6>(which, x + at * stride, stride, at, done);
            case 7: return tile<7>(which, x + at * stride, stride, at, done);
        }
    }

private:
    template <int N, bool FETCH = false, class Done>
    void tile(int which, const stored* x, size_t stride, int at, Done done, Soon* then = nullptr) const {
        const unit* w = packed_ + size_t(which) * units_ * PANEL;
        v16f first[N], last[N];
#pragma GCC unroll 8  // all of these loops, or else the sums lie in memory
        for (int m = 0; m < N; m++) first[m] = last[m] = v16f{};
        for (int i = 0; i < units_; i++, w += PANEL) {
            v16u near = load<v16u>(w), far = load<v16u>(w + LANES);
            if (FETCH) then->fetch(2);
#pragma GCC unroll 8
            for (int m = 0; m < N; m++) {
                unit value = load<unit>(x + m * stride + size_t(i) * D::PER_UNIT);
                first[m] = D::multiply_add(first[m], value, near);
                last[m] = D::multiply_add(last[m], value, far);
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
