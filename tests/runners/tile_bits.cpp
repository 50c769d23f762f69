// Compares products by tiles with those of other instructions, byte by byte: matrices of every format, of 1 to 40 tokens and
// few and many groups. Those of bfloat16 weights (format 0) are compared with the order of sums in Intel's manual. Prints what
// use_tiles() said, then for each format how many products it compared, how many were by tiles, and how many differ.
#include "linear.h"
#include <cstdio>

using namespace tandem;

namespace {

constexpr int OUTPUTS = 2 * PANEL;
uint64_t state = 1;
uint32_t chance() { return uint32_t((state = state * 6364136223846793005u + 1442695040888963407u) >> 33); }

// The rows of a matrix, blocks of random bytes whose scales are finite.
template <class B> std::vector<uint8_t> matrix(Format format, int inputs) {
    std::vector<uint8_t> made(up(inputs, B::INPUTS) / B::INPUTS * B::BYTES * OUTPUTS);
    for (uint8_t& byte : made) byte = uint8_t(chance());
    for (size_t at = 0; at < made.size(); at += B::BYTES) {
        const size_t scale = at + (format == Q6_K ? 208 : 0);
        made[scale + 1] &= 0xbf;
        if (B::MINIMA) made[scale + 3] &= 0xbf;
    }
    return made;
}

typedef std::vector<float> Outputs;

template <class D> Outputs product(const Linear<D>& layer, const std::vector<typename D::stored>& values, int tokens) {
    Buffer<Group8> groups(size_t(tokens) * Linear<D>::groups(layer.inputs()));
    const Input<D> x{values.data(), size_t(layer.inputs()), groups.data(), size_t(tokens)};
    for (int t = 0; t < tokens && layer.blocks(); t++) quantise<D>(x.values + t * x.stride, layer.inputs(), groups.data() + t, tokens);
    Outputs made(size_t(tokens) * OUTPUTS);
    const Tiles by(tokens, layer.by());
    for (int panel = 0; panel < layer.panels(); panel++)
        layer.panel(panel, x, by, Soon{}, [&](int token, v16f first, v16f last) {
            store(&made[size_t(token) * OUTPUTS + panel * PANEL], first);
            store(&made[size_t(token) * OUTPUTS + panel * PANEL + LANES], last);
        });
    return made;
}

template <class B> void compare(Format format) {
    int compared = 0, differ = 0, passes = 0;
    for (const int inputs : {B::INPUTS, 3 * B::INPUTS, 3 * B::INPUTS - 5, 8 * B::INPUTS}) {
        const auto rows = matrix<B>(format, inputs);
        const size_t bytes = rows.size() / OUTPUTS;
        Arena arena;
        const Linear<Float32> layer(arena, inputs, OUTPUTS / PANEL, [&](int o) { return Row{&rows[o * bytes], format, float(o)}; });
        for (int tokens = 1; tokens <= 40; tokens++) {
            std::vector<float> values(size_t(tokens) * inputs);
            for (float& value : values) value = float(int32_t(chance() % 20001) - 10000) / 1000;
            use_tiles(false);
            const Outputs own = product(layer, values, tokens);
            use_tiles(true);
            const Outputs other = product(layer, values, tokens);
            differ += std::memcmp(own.data(), other.data(), own.size() * sizeof(float)) != 0;
            compared++;
            passes += Tiles(tokens, Tiles::GROUPS).most() == Tiles::ROWS;
        }
    }
    std::printf("%d: %d compared, %d by tiles, %d differ\n", int(format), compared, passes, differ);
}

struct Unrounded : Bfloat16 {
    static v16f rounded(v16f value) { return value; }
};

// In tdpbf16ps's order: of each 32 inputs, a chain of multiply-adds for even ones and one for odd ones. Denormals are zeros.
float in_order(const uint16_t* x, const uint16_t* w, int inputs) {
    auto kept = [](float value) { return std::fabs(value) < 0x1p-126f ? 0 : value; };
    float total = 0;
    for (int from = 0; from < inputs; from += 32) {
        float chains[2] = {};
        for (int i = from; i < from + 32; i++) chains[i % 2] = kept(std::fma(kept(widen(x[i])), kept(widen(w[i])), chains[i % 2]));
        total = kept(total + kept(chains[0] + chains[1]));
    }
    return total;
}

// One output in four and, for some numbers of tokens, all values are so small that products and sums are denormal.
void compare_pairs() {
    int differ = 0;
    auto number = [](bool small) { return uint16_t((chance() & 0x807f) | ((small ? 55 : 120) + chance() % 12) << 7); };
    for (const int inputs : {32, 96, 224, 576}) {
        std::vector<uint16_t> rows(size_t(inputs) * OUTPUTS);
        for (size_t i = 0; i < rows.size(); i++) rows[i] = number(i / inputs % 4 == 0);
        Arena arena;
        const Linear<Unrounded> layer(arena, inputs, OUTPUTS / PANEL, [&](int o) { return Row{&rows[size_t(o) * inputs]}; });
        for (int tokens = 1; tokens <= 40; tokens++) {
            std::vector<uint16_t> values(size_t(tokens) * inputs);
            for (uint16_t& value : values) value = number(tokens % 3 == 0);
            const Outputs made = product(layer, values, tokens);
            for (size_t i = 0; i < made.size(); i++) differ += made[i] != in_order(&values[i / OUTPUTS * inputs], &rows[i % OUTPUTS * inputs], inputs);
        }
    }
    std::printf("0: 160 compared, %d by tiles, %d differ\n", tiles_multiply_pairs() ? 160 : 0, differ);
}

}  // namespace

int main() {
    std::printf("%d\n", use_tiles(true));
    if (tiles_multiply_pairs()) compare_pairs();
    for (Format format : {Q4_0, Q4_1, Q8_0, Q4_K, Q6_K}) with_blocks(format, [&](auto kind) { compare<decltype(kind)>(format); });
}
