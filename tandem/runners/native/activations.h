// Rows of activations in int8: groups of 32 values, each with its scale. A group depends on its own values alone.
#pragma once
#include "integers.h"
#include "memory.h"

namespace tandem {

constexpr int GROUP = 32;

struct Group8 {
    int8_t values[GROUP];
    float scale;     // of a value; NaN where an activation is not finite
    int32_t sum[2];  // of the values of each half
    int32_t offset;  // -128 times the sum of all: what numbers without a sign add too much

    int32_t total() const { return sum[0] + sum[1]; }
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

template <class V> inline V greater(V a, V b) { return a > b ? a : b; }

// The largest magnitude, as the bits of a float: NaN is above infinity, that above all others.
inline uint32_t magnitude(v16f near, v16f far) {
    typedef uint32_t v8u __attribute__((vector_size(32)));
    typedef uint32_t v4u __attribute__((vector_size(16)));
    const v16u sizes = greater((v16u)near & 0x7fffffffu, (v16u)far & 0x7fffffffu);
    v8u halves[2];
    std::memcpy(halves, &sizes, sizeof(sizes));
    const v8u half = greater(halves[0], halves[1]);
    v4u quarters[2];
    std::memcpy(quarters, &half, sizeof(half));
    const v4u most = greater(quarters[0], quarters[1]);
    return std::max({most[0], most[1], most[2], most[3]});
}

inline void quantise(v16f near, v16f far, Group8& to) {
    constexpr uint32_t TINY = 0x0d000000, INFINITE = 0x7f800000;  // below 4e-31 a group counts as zeros
    const uint32_t bits = magnitude(near, far);
    const float most = load<float>(&bits), inverse = bits > TINY && bits < INFINITE ? 127.0f / most : 0.0f;
    to.scale = bits >= INFINITE ? NAN : bits > TINY ? most / 127.0f : 0.0f;
    const v16f magic = all(0x1.8p23f);  // its last bit is worth 1: adding it rounds, to even
    const v16i finite = v16i{} - int(bits < INFINITE);
    for (int half = 0; half < 2; half++) {
        const v16i rounded = finite & ((v16i)((half ? far : near) * inverse + magic) - (v16i)magic);
        store(to.values + half * LANES, __builtin_convertvector(rounded, v16b));
        to.sum[half] = total(rounded);
    }
    to.offset = -128 * to.total();
}

// `count` values as groups; beyond them zeros.
template <class D> void quantise(const typename D::stored* from, int count, Group8* to) {
    for (; count >= GROUP; count -= GROUP, from += GROUP) quantise(D::wide(from), D::wide(from + LANES), *to++);
    if (!count) return;
    typename D::stored rest[GROUP] = {};
    std::memcpy(rest, from, count * sizeof(*from));
    quantise(D::wide(rest), D::wide(rest + LANES), *to);
}

}  // namespace tandem
