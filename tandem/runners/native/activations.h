// Rows of activations in int8: groups of 32 values, each with its scale. A group depends on its own values alone.
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

inline int32_t total(v16i value) {
    typedef int32_t v8i __attribute__((vector_size(32)));
    typedef int32_t v4i __attribute__((vector_size(16)));
    v8i halves[2];
    std::memcpy(halves, &value, sizeof(value));
    const v8i half = halves[0] + halves[1];
    v4i quarters[2];
    std::memcpy(quarters, &half, sizeof(half));
    const v4i last = quarters[0] + quarters[1];
    return last[0] + last[1] + last[2] + last[3];
}

// The largest magnitude, as the bits of a float: NaN is above infinity, that above all others.
inline uint32_t magnitude(v16f near, v16f far) {
    vu sizes[2][SIXTEEN], most{};
    std::memcpy(sizes[0], &near, sizeof(near));
    std::memcpy(sizes[1], &far, sizeof(far));
    for (const auto& half : sizes)
        by_register([&](int r) {
            const vu size = half[r] & 0x7fffffffu;
            most = size > most ? size : most;
        });
    uint32_t largest = 0;
    for (int lane = 0; lane < WIDTH; lane++) largest = std::max(largest, most[lane]);
    return largest;
}

inline void quantise(v16f near, v16f far, Group8& to) {
    constexpr uint32_t TINY = 0x0d000000, INFINITE = 0x7f800000;  // below 4e-31 a group counts as zeros
    const uint32_t bits = magnitude(near, far);
    const float most = load<float>(&bits), inverse = bits > TINY && bits < INFINITE ? 127.0f / most : 0.0f;
    to.scale = bits >= INFINITE ? NAN : bits > TINY ? most / 127.0f : 0.0f;
    const v16f magic = all(0x1.8p23f);  // its last bit is worth 1: adding it rounds, to even
    const v16i finite = v16i{} - int(bits < INFINITE);
    int32_t sums[2];
    for (int half = 0; half < 2; half++) {
        const v16i rounded = finite & ((v16i)((half ? far : near) * inverse + magic) - (v16i)magic);
        store(to.values + half * LANES, bytes_of(rounded));
        sums[half] = total(rounded);
        to.less32[half] = -32 * sums[half];
    }
    const int32_t both = sums[0] + sums[1];
    to.scaled = to.scale * float(both);
    to.less128 = -128 * both;
    to.less8 = -8 * both;
}

// `count` values as groups `apart` from each other; beyond them zeros.
template <class D> void quantise(const typename D::stored* from, int count, Group8* to, size_t apart) {
    for (; count >= GROUP; count -= GROUP, from += GROUP, to += apart) quantise(D::wide(from), D::wide(from + LANES), *to);
    if (!count) return;
    typename D::stored rest[GROUP] = {};
    std::memcpy(rest, from, count * sizeof(*from));
    quantise(D::wide(rest), D::wide(rest + LANES), *to);
}

}  // namespace tandem
