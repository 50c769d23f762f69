// int8 activations: groups of 32 values with a scale each, independent of other groups.
#pragma once
#include "integers.h"
#include "memory.h"

namespace tandem {

constexpr int GROUP = 32;

struct alignas(64) Group8 {  // one line of the cache
    int8_t values[GROUP];
    float scale;         // of a value; NaN where an activation is not finite
    float scaled;        // the sum of the values times `scale`
    int32_t less128;     // -128 times the sum of the values: what numbers that are 128 too large add too much
    int32_t less8;       // the same for 8
    int32_t less32[2];   // for 32, of each half

    // Where the sum of a part begins with numbers that are `zero` too large.
    template <int ZERO, int PARTS> int32_t start(int part) const {
        static_assert(ZERO == 0 || (PARTS == 1 && (ZERO == 8 || ZERO == 128)) || (PARTS == 2 && ZERO == 32));
        return ZERO == 0 ? 0 : PARTS == 2 ? less32[part] : ZERO == 128 ? less128 : less8;
    }
};

inline int32_t total(vi value) {
    typedef int32_t v4i __attribute__((vector_size(16)));
    v4i parts[WIDTH / 4], sum{};
    store(parts, value);
    for (v4i part : parts) sum += part;
    return sum[0] + sum[1] + sum[2] + sum[3];
}

typedef vf Values32[2][SIXTEEN];

// The largest magnitude, as a float's bits: NaN is above infinity, which is above all others.
inline uint32_t magnitude(const Values32& values) {
    vu most{};
    for (const auto& half : values)
        by_register([&](int r) {
            const vu size = (vu)half[r] & 0x7fffffffu;
            most = size > most ? size : most;
        });
    uint32_t largest = 0;
    for (int lane = 0; lane < WIDTH; lane++) largest = std::max(largest, most[lane]);
    return largest;
}

inline void quantise(const Values32& values, Group8& to) {
    constexpr uint32_t TINY = 0x0d000000, INFINITE = 0x7f800000;  // below 4e-31 a group counts as zeros
    const uint32_t bits = magnitude(values);
    const float most = load<float>(&bits), inverse = bits > TINY && bits < INFINITE ? 127.0f / most : 0.0f;
    to.scale = bits >= INFINITE ? NAN : bits > TINY ? most / 127.0f : 0.0f;
    const float magic = 0x1.8p23f;  // its last bit is worth 1: adding it rounds, to even
    const vi finite = vi{} - int(bits < INFINITE);
    vi rounded[2][SIXTEEN];
    int32_t sums[2];
    for (int half = 0; half < 2; half++) {
        vi sum{};
        by_register([&](int r) {
            rounded[half][r] = finite & ((vi)(values[half][r] * inverse + magic) - (vi)(vf{} + magic));
            sum += rounded[half][r];
        });
        sums[half] = total(sum);
        to.less32[half] = -32 * sums[half];
    }
    store_bytes(to.values, rounded);
    const int32_t both = sums[0] + sums[1];
    to.scaled = to.scale * float(both);
    to.less128 = -128 * both;
    to.less8 = -8 * both;
}

// `count` values as groups `apart` from each other, zero-padded.
template <class D> void quantise(const typename D::stored* from, int count, Group8* to, size_t apart) {
    const auto group = [](const typename D::stored* from, Group8& to) {
        Values32 values;
        for (int half = 0; half < 2; half++) store(values[half], D::wide(from + half * LANES));
        quantise(values, to);
    };
    for (; count >= GROUP; count -= GROUP, from += GROUP, to += apart) group(from, *to);
    if (!count) return;
    typename D::stored rest[GROUP] = {};
    std::memcpy(rest, from, count * sizeof(*from));
    group(rest, *to);
}

}  // namespace tandem
