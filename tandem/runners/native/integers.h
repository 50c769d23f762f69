// Products of small integers, and the halves of floats that scale them. An integer sum is exact in any order, so every
// CPU has its own way here and all have the same result.
#pragma once
#include "vectors.h"
#if defined(__ARM_FEATURE_MATMUL_INT8)
#include <arm_neon.h>
#endif

namespace tandem {

constexpr int FOUR = 4;  // neighbouring inputs in a lane of 32 bits

// Sums of products, in each of 16 lanes: of unsigned numbers up to MOST, four to a lane, and four signed bytes. Those of
// all lanes begin at `start`. `ready` prepares numbers that are multiplied with several tokens' bytes.
#if defined(__AVX512VNNI__)
template <int MOST> struct Products {
    typedef v16u Ready;
    typedef v16i Bytes;
    v16i sum;

    static Ready ready(v16u numbers) { return numbers; }
    static Bytes bytes(const int8_t* from) { return v16i{} + load<int32_t>(from); }
    void begin(int32_t start) { sum = v16i{} + start; }
    void add(Ready w, Bytes x) { sum = (v16i)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x); }
    v16i total() const { return sum; }
};
#elif defined(__AVX2__)
// Two neighbouring products fit in 16 bits: numbers up to 15 even those of a whole group, 8 * 2 * 15 * 127. Numbers up
// to 255 are 128 too large on purpose: without that, their magnitudes fit, and the sign goes to the other factor.
template <int MOST> struct Products {
    static constexpr bool SHORT = MOST == 15, SIGNED = MOST == 255;
    struct Ready {
        __m256i numbers[2], sizes[2];
    };
    typedef __m256i Bytes;
    __m256i sums[2];
    int32_t from;

    static Ready ready(v16u numbers) {
        Ready made;
        if (SIGNED) numbers ^= 0x80808080u;
        std::memcpy(made.numbers, &numbers, sizeof(numbers));
        for (int i = 0; i < 2; i++) made.sizes[i] = SIGNED ? _mm256_abs_epi8(made.numbers[i]) : made.numbers[i];
        return made;
    }
    static Bytes bytes(const int8_t* from) { return _mm256_set1_epi32(load<int32_t>(from)); }
    void begin(int32_t start) {
        from = SIGNED ? 0 : start;
        sums[0] = sums[1] = _mm256_set1_epi32(SHORT ? 0 : from);
    }
    void add(const Ready& w, Bytes x) {
        const __m256i ones = _mm256_set1_epi16(1);
        for (int i = 0; i < 2; i++) {
            const __m256i pairs = _mm256_maddubs_epi16(w.sizes[i], SIGNED ? _mm256_sign_epi8(x, w.numbers[i]) : x);
            sums[i] = SHORT ? _mm256_add_epi16(sums[i], pairs) : _mm256_add_epi32(sums[i], _mm256_madd_epi16(pairs, ones));
        }
    }
    v16i total() const {
        if (!SHORT) return load<v16i>(sums);
        __m256i wide[2];
        for (int i = 0; i < 2; i++) wide[i] = _mm256_add_epi32(_mm256_madd_epi16(sums[i], _mm256_set1_epi16(1)), _mm256_set1_epi32(from));
        return load<v16i>(wide);
    }
};
#elif defined(__ARM_FEATURE_MATMUL_INT8)
template <int MOST> struct Products {
    struct Ready {
        uint8x16_t quarters[4];
    };
    typedef int8x16_t Bytes;
    int32x4_t sums[4];

    static Ready ready(v16u numbers) { return load<Ready>(&numbers); }
    static Bytes bytes(const int8_t* from) { return vreinterpretq_s8_u32(vdupq_n_u32(load<uint32_t>(from))); }
    void begin(int32_t start) { sums[0] = sums[1] = sums[2] = sums[3] = vdupq_n_s32(start); }
    void add(const Ready& w, Bytes x) {
        for (int i = 0; i < 4; i++) sums[i] = vusdotq_s32(sums[i], w.quarters[i], x);
    }
    v16i total() const { return load<v16i>(sums); }
};
#else
template <int MOST> struct Products {
    typedef v16u Ready;
    typedef const int8_t* Bytes;
    v16i sum;

    static Ready ready(v16u numbers) { return numbers; }
    static Bytes bytes(const int8_t* from) { return from; }
    void begin(int32_t start) { sum = v16i{} + start; }
    void add(Ready w, Bytes x) {
        for (int i = 0; i < FOUR; i++) sum += (v16i)((w >> (8 * i)) & 255u) * int32_t(x[i]);
    }
    v16i total() const { return sum; }
};
#endif

// float16 to float32, exactly.
inline v16f from_half(v16h value) {
#if defined(__AVX512F__)
    return (v16f)_mm512_cvtph_ps((__m256i)value);
#else
    const v16u bits = __builtin_convertvector(value, v16u), magnitude = (bits & 0x7fffu) << 13;
    const v16u special = (v16u)(magnitude >= 0x0f800000u) & 0x7f800000u;  // infinity and NaN
    const v16f scaled = (v16f)magnitude * 0x1p112f;
    return (v16f)((v16u)scaled | special | ((bits & 0x8000u) << 16));
#endif
}
inline float from_half(uint16_t value) { return from_half(v16h{} + value)[0]; }

// The nearest float16, the even one of two; NaN for what is too large.
inline uint16_t to_half(float value) {
    const uint32_t sign = load<uint32_t>(&value) >> 16 & 0x8000u;
    const float size = std::fabs(value), shifted = size + 0.5f, half = 0.5f;  // 0.5's last bit is worth the least float16
    const uint32_t bits = load<uint32_t>(&size), normal = ((bits + 0xfffu + (bits >> 13 & 1u)) >> 13) - (112u << 10);
    if (!(size < 65520.0f)) return 0x7e00u;
    return uint16_t(sign | (size < 0x1p-14f ? load<uint32_t>(&shifted) - load<uint32_t>(&half) : normal));
}

inline v16f floats(v16i value) { return __builtin_convertvector(value, v16f); }

// Bytes as floats; GCC would convert them one by one.
#if defined(__AVX512F__)
inline v16f wide(const int8_t* from) { return floats((v16i)_mm512_cvtepi8_epi32((__m128i)load<v16b>(from))); }
inline v16f wide(const uint8_t* from) { return floats((v16i)_mm512_cvtepu8_epi32((__m128i)load<v16c>(from))); }
#else
inline v16f wide(const int8_t* from) { return floats(__builtin_convertvector(load<v16b>(from), v16i)); }
inline v16f wide(const uint8_t* from) { return floats(__builtin_convertvector(load<v16c>(from), v16i)); }
#endif

}  // namespace tandem
