// Formats of quantised weights as in GGUF files: blocks of neighbouring inputs of one output. Packed, the blocks of 32
// outputs are interleaved number by number, losslessly, with Q4_K's 6-bit scales as bytes. A weight is (number - ZERO)
// * scale + minimum.
#pragma once
#include "activations.h"
#include <algorithm>

namespace tandem {

constexpr int PANEL = 2 * LANES;
constexpr int UNITS = GROUP / FOUR;  // units of 4 neighbouring inputs in a group

enum Format : int32_t { DENSE = 0, Q4_0 = 2, Q4_1 = 3, Q8_0 = 8, Q4_K = 12, Q6_K = 14 };  // as GGML numbers them

typedef uint8_t Units[PANEL][FOUR];  // one unit of every output

inline uint16_t half_at(const uint8_t* from) { return load<uint16_t>(from); }

// The numbers of 32 inputs, 4 bits each: unit i in the low bits of row i, unit 4 + i in its high bits.
struct Nibbles {
    Units rows[4];

    void set(int lane, const uint8_t* numbers) {
        auto four = [&](int unit) { return load<uint32_t>(numbers + FOUR * unit) & 0x0f0f0f0fu; };
        for (int i = 0; i < 4; i++) store(rows[i][lane], four(i) | four(4 + i) << 4);
    }
    vu get(int unit, int lane) const { return load<vu>(rows[unit % 4][lane]) >> (unit / 4 * 4) & 0x0f0f0f0fu; }
};

// Factors of a group's sums for a register of outputs: one scale, or one per half of the group.
template <int PARTS> struct Factors {
    vf scale[PARTS], minimum;
};

// Every format has BYTES of a stored block of INPUTS inputs; Packed, a panel's blocks; PARTS scales a group; ZERO;
// MOST, the largest number; whether it has MINIMA. pack() puts an output's stored block into its lane; unit() and
// factors() return a group's values for outputs from `lane` on.
struct BlocksOf8 {  // Q8_0
    static constexpr int INPUTS = GROUP, BYTES = 34, PARTS = 1, ZERO = 128, MOST = 255;
    static constexpr bool MINIMA = false;
    struct Packed {
        Units rows[UNITS];
        uint16_t scale[PANEL];
    };
    static void pack(const uint8_t* from, Packed& to, int lane) {
        to.scale[lane] = half_at(from);
        for (int i = 0; i < UNITS; i++) store(to.rows[i][lane], load<uint32_t>(from + 2 + FOUR * i) ^ 0x80808080u);
    }
    static vu unit(const Packed& p, int, int unit, int lane) { return load<vu>(p.rows[unit][lane]); }
    static Factors<1> factors(const Packed& p, int, int lane) { return {{from_half(load<vh>(p.scale + lane))}, vf{}}; }
};

template <bool MINIMUM> struct BlocksOf4 {  // Q4_1 with minima, else Q4_0
    static constexpr int INPUTS = GROUP, BYTES = MINIMUM ? 20 : 18, PARTS = 1, ZERO = MINIMUM ? 0 : 8, MOST = 15;
    static constexpr bool MINIMA = MINIMUM;
    struct Packed {
        Nibbles numbers;
        uint16_t scale[PANEL], minimum[MINIMUM ? PANEL : 0];
    };
    static void pack(const uint8_t* from, Packed& to, int lane) {
        to.scale[lane] = half_at(from);
        if constexpr (MINIMA) to.minimum[lane] = half_at(from + 2);
        for (int i = 0; i < 4; i++) std::memcpy(to.numbers.rows[i][lane], from + BYTES - GROUP / 2 + FOUR * i, FOUR);
    }
    static vu unit(const Packed& p, int, int unit, int lane) { return p.numbers.get(unit, lane); }
    static Factors<1> factors(const Packed& p, int, int lane) {
        if constexpr (MINIMA) return {{from_half(load<vh>(p.scale + lane))}, from_half(load<vh>(p.minimum + lane))};
        else return {{from_half(load<vh>(p.scale + lane))}, vf{}};
    }
};

struct SuperBlocksOf4 {  // Q4_K: 8 groups share a scale of scales and one of minima; products of the two are exact
    static constexpr int INPUTS = 256, BYTES = 144, PARTS = 1, ZERO = 0, MOST = 15;
    static constexpr bool MINIMA = true;
    struct Packed {
        uint16_t scale[PANEL], minimum[PANEL];
        struct {
            Nibbles numbers;
            uint8_t scale[PANEL], minimum[PANEL];
        } groups[INPUTS / GROUP];
    };
    static void pack(const uint8_t* from, Packed& to, int lane) {
        to.scale[lane] = half_at(from);
        to.minimum[lane] = half_at(from + 2);
        const uint8_t *six = from + 4, *numbers = from + 16;
        for (int group = 0; group < 8; group++) {
            auto& one = to.groups[group];
            const int low = group % 4;  // the upper two bits of groups 4 to 7 lie above the six of groups 0 to 3
            one.scale[lane] = group < 4 ? six[low] & 63 : uint8_t((six[low + 8] & 15) | (six[low] >> 6) << 4);
            one.minimum[lane] = group < 4 ? six[low + 4] & 63 : uint8_t(six[low + 8] >> 4 | (six[low + 4] >> 6) << 4);
            uint8_t own[GROUP];
            for (int i = 0; i < GROUP; i++) own[i] = uint8_t(numbers[group / 2 * GROUP + i] >> (group % 2 * 4));
            one.numbers.set(lane, own);
        }
    }
    static vu unit(const Packed& p, int group, int unit, int lane) { return p.groups[group].numbers.get(unit, lane); }
    static Factors<1> factors(const Packed& p, int group, int lane) {
        return {{from_half(load<vh>(p.scale + lane)) * wide(p.groups[group].scale + lane)},
                -(from_half(load<vh>(p.minimum + lane)) * wide(p.groups[group].minimum + lane))};
    }
};

struct SuperBlocksOf6 {  // Q6_K: 16 halves of groups share a scale of scales
    static constexpr int INPUTS = 256, BYTES = 210, PARTS = 2, ZERO = 32, MOST = 63;
    static constexpr bool MINIMA = false;
    struct Packed {
        uint16_t scale[PANEL];
        struct {
            Nibbles low;
            Units high[2];  // two bits of unit 4 j + t at 2 t of row j
            int8_t scale[2][PANEL];
        } groups[INPUTS / GROUP];
    };
    static void pack(const uint8_t* from, Packed& to, int lane) {
        const uint8_t *low = from, *high = from + 128, *scales = from + 192;
        to.scale[lane] = half_at(from + 208);
        for (int group = 0; group < 8; group++) {
            auto& one = to.groups[group];
            const int side = group / 4, quarter = group % 4;
            uint8_t own[GROUP];
            for (int i = 0; i < GROUP; i++) own[i] = uint8_t(low[side * 64 + quarter % 2 * 32 + i] >> (quarter / 2 * 4));
            for (int row = 0; row < 2; row++) {
                uint32_t twos = 0;
                for (int t = 0; t < 4; t++) twos |= (load<uint32_t>(high + side * 32 + FOUR * (4 * row + t)) >> (2 * quarter) & 0x03030303u) << 2 * t;
                store(one.high[row][lane], twos);
            }
            one.low.set(lane, own);
            for (int part = 0; part < 2; part++) one.scale[part][lane] = int8_t(scales[group * 2 + part]);
        }
    }
    static vu unit(const Packed& p, int group, int unit, int lane) {
        const auto& one = p.groups[group];
        const vu high = load<vu>(one.high[unit / 4][lane]);
        const int at = 2 * (unit % 4);
        return one.low.get(unit, lane) | ((at < 4 ? high << (4 - at) : high >> (at - 4)) & 0x30303030u);
    }
    static Factors<2> factors(const Packed& p, int group, int lane) {
        const vf scale = from_half(load<vh>(p.scale + lane));
        return {{scale * wide(p.groups[group].scale[0] + lane), scale * wide(p.groups[group].scale[1] + lane)}, vf{}};
    }
};

// Calls what(Blocks{}) for a quantised format's blocks.
template <class What> auto with_blocks(Format format, What what) {
    switch (format) {
        case Q4_0: return what(BlocksOf4<false>{});
        case Q4_1: return what(BlocksOf4<true>{});
        case Q4_K: return what(SuperBlocksOf4{});
        case Q6_K: return what(SuperBlocksOf6{});
        default: return what(BlocksOf8{});
    }
}

// --- dense weights as Q8_0 or Q4_1: scales are rounded as stored before the nearest numbers are chosen ---

inline void store_half(uint8_t* to, float value) {
    const uint16_t half = to_half(value);
    std::memcpy(to, &half, sizeof(half));
}

struct Weights32 {
    v16f parts[2];
};

// value / scale as the nearest integer in `least` .. `most`; 0 for scale 0.
inline v16f nearest(v16f value, float scale, float least, float most) {
    if (!(scale > 0)) return v16f{};
    const v16f magic = all(0x1.8p23f), number = (value / scale + magic) - magic;
    return select(number < least, all(least), select(number > most, all(most), number));
}

// A block of Q8_0.
inline void encode_8(const Weights32& weights, uint8_t* to) {
    Values32 values;
    std::memcpy(values, weights.parts, sizeof(values));
    const uint32_t bits = magnitude(values);
    store_half(to, load<float>(&bits) / 127);
    const float scale = from_half(half_at(to));
    for (int part = 0; part < 2; part++) {
        const v16f numbers = nearest(weights.parts[part], scale, -127, 127);
        store(to + 2 + part * LANES, __builtin_convertvector(__builtin_convertvector(numbers, v16i), v16b));
    }
}

// A Q4_1 block whose numbers 0 and 15 are `least` and `most`. Returns the squared error.
inline float encode_4(const Weights32& weights, float least, float most, uint8_t* to) {
    store_half(to, (most - least) / 15);
    store_half(to + 2, least);
    const float scale = from_half(half_at(to)), minimum = from_half(half_at(to + 2));
    v16f error{}, numbers[2];
    for (int part = 0; part < 2; part++) {
        numbers[part] = nearest(weights.parts[part] - minimum, scale, 0, 15);
        const v16f off = numbers[part] * scale + minimum - weights.parts[part];
        error += off * off;
    }
    store(to + 4, __builtin_convertvector(__builtin_convertvector(numbers[0] + numbers[1] * 16.0f, v16i), v16c));
    return sum(error);
}

// Also tries a range without the outermost weights.
inline void encode_4(const Weights32& weights, uint8_t* to) {
    float least = INFINITY, most = -INFINITY;
    for (const v16f& part : weights.parts)
        for (int i = 0; i < LANES; i++) least = std::min(least, part[i]), most = std::max(most, part[i]);
    constexpr int TRIES = 4;
    const float step = 0.03f * (most - least);
    float best = INFINITY;
    for (int below = 0; below <= TRIES; below++)
        for (int above = 0; above <= TRIES; above++) {
            uint8_t tried[BlocksOf4<true>::BYTES];
            const float error = encode_4(weights, least + below * step, most - above * step, tried);
            if (error < best || !(below || above)) best = error, std::memcpy(to, tried, sizeof(tried));
        }
}

// `inputs` weights as blocks of `format`, zero-padded.
inline void encode(Format format, int inputs, const float* weights, uint8_t* to) {
    const int bytes = format == Q4_1 ? BlocksOf4<true>::BYTES : BlocksOf8::BYTES;
    for (int begin = 0; begin < inputs; begin += GROUP, to += bytes) {
        Weights32 block{};
        std::memcpy(block.parts, weights + begin, std::min(GROUP, inputs - begin) * sizeof(float));
        if (format == Q4_1) encode_4(block, to);
        else encode_8(block, to);
    }
}

}  // namespace tandem
