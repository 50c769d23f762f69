// int8 activations (groups of 32 values with a scale each, independent of other groups), products of small integers, and
// float16 scales. Integer sums are exact, so CPUs may differ in method, not in result.
#pragma once
#include "system.h"
#include "vectors.h"

namespace tandem {

constexpr int FOUR = 4;  // neighbouring inputs in a lane of 32 bits

// Sums of products by lane: four unsigned numbers up to MOST times four signed bytes, for STEP neighbouring units.
// `ready` prepares numbers for several tokens and together() registers of outputs. begin() and total() get the same
// `start`.
#if defined(__AVX512VNNI__)
template <int MOST> struct Products {
    static constexpr int STEP = 1;
    static constexpr int together(int) { return 2; }
    typedef vu Ready;
    typedef vi Bytes;
    vi sum;

    static Ready ready(const vu (&numbers)[STEP]) { return numbers[0]; }
    static Bytes bytes(const int8_t* from) { return vi{} + load<int32_t>(from); }
    void begin(int32_t start) { sum = vi{} + start; }
    void add(Ready w, Bytes x) { sum = (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x); }
    vi total(int32_t) const { return sum; }
};
#elif defined(__AVX2__)
// `vpmaddubsw` adds two products in 16 bits. Numbers up to 15 leave room for a whole group, 8 * 2 * 15 * 127, those up
// to 63 for two units; those up to 255 are split in two.
template <int MOST> struct Products {
    static constexpr int STEP = MOST == 63 ? 2 : 1, HALVES = MOST > 63 ? 2 : 1;
    static constexpr int together(int tokens) {  // so that sums and numbers of 6 and 8 bits leave a register for bytes
        return HALVES * tokens <= 2 ? 4 : HALVES * tokens <= (MOST == 15 ? 6 : 4) ? 2 : 1;
    }
    struct Ready {
        __m256i numbers[STEP * HALVES];
    };
    struct Bytes {
        __m256i units[STEP];
    };
    __m256i sums[HALVES];

    static __m256i ones(int value) { return _mm256_set1_epi16(short(value)); }
    static Ready ready(const vu (&numbers)[STEP]) {
        if constexpr (HALVES == 2) return {{(__m256i)(numbers[0] & 0x0f0f0f0fu), (__m256i)(numbers[0] >> 4 & 0x0f0f0f0fu)}};
        else if constexpr (STEP == 2) return {{(__m256i)numbers[0], (__m256i)numbers[1]}};
        else return {{(__m256i)numbers[0]}};
    }
    static Bytes bytes(const int8_t* from) {
        Bytes made;
        for (int i = 0; i < STEP; i++) made.units[i] = _mm256_set1_epi32(load<int32_t>(from + FOUR * i));
        return made;
    }
    void begin(int32_t) {
        for (__m256i& sum : sums) sum = _mm256_setzero_si256();
    }
    void add(const Ready& w, const Bytes& x) {
        if constexpr (STEP == 2) {
            const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(w.numbers[0], x.units[0]), _mm256_maddubs_epi16(w.numbers[1], x.units[1]));
            sums[0] = _mm256_add_epi32(sums[0], _mm256_madd_epi16(pairs, ones(1)));
        } else
            for (int i = 0; i < HALVES; i++) sums[i] = _mm256_add_epi16(sums[i], _mm256_maddubs_epi16(w.numbers[i], x.units[0]));
        for (__m256i& sum : sums) asm("" : "+x"(sum));  // added now: GCC would keep products for later, in memory
    }
    vi total(int32_t start) const {
        vi sum = (vi)(STEP == 2 ? sums[0] : _mm256_madd_epi16(sums[0], ones(1)));
        if constexpr (HALVES == 2) sum += (vi)_mm256_madd_epi16(sums[1], ones(16));
        return sum + start;
    }
};
#else
template <int MOST> struct Products {
    static constexpr int STEP = 1;
    static constexpr int together(int) { return 2; }
    typedef vu Ready;
    typedef const int8_t* Bytes;
    vi sum;

    static Ready ready(const vu (&numbers)[STEP]) { return numbers[0]; }
    static Bytes bytes(const int8_t* from) { return from; }
    void begin(int32_t start) { sum = vi{} + start; }
    void add(Ready w, Bytes x) {
        for (int i = 0; i < FOUR; i++) sum += (vi)((w >> (8 * i)) & 255u) * int32_t(x[i]);
    }
    vi total(int32_t) const { return sum; }
};
#endif

// float16 to float32, exactly.
inline vf from_half(vh value) {
#if defined(__AVX512VNNI__)
    return (vf)_mm512_cvtph_ps((__m256i)value);
#elif defined(__AVX2__) && defined(__F16C__)
    return (vf)_mm256_cvtph_ps((__m128i)value);
#else
    const vu bits = __builtin_convertvector(value, vu), magnitude = (bits & 0x7fffu) << 13;
    const vu special = (vu)(magnitude >= 0x0f800000u) & 0x7f800000u;  // infinity and NaN
    const vf scaled = (vf)magnitude * 0x1p112f;
    return (vf)((vu)scaled | special | ((bits & 0x8000u) << 16));
#endif
}
inline float from_half(uint16_t value) { return from_half(vh{} + value)[0]; }

// The nearest float16, ties to even; NaN for overflow.
inline uint16_t to_half(float value) {
    const uint32_t sign = load<uint32_t>(&value) >> 16 & 0x8000u;
    const float size = std::fabs(value), shifted = size + 0.5f, half = 0.5f;  // 0.5's last bit is worth the least float16
    const uint32_t bits = load<uint32_t>(&size), normal = ((bits + 0xfffu + (bits >> 13 & 1u)) >> 13) - (112u << 10);
    if (!(size < 65520.0f)) return 0x7e00u;
    return uint16_t(sign | (size < 0x1p-14f ? load<uint32_t>(&shifted) - load<uint32_t>(&half) : normal));
}

inline vf floats(vi value) { return __builtin_convertvector(value, vf); }

// Stores 32 integers of -128 to 127 as bytes; GCC would convert one by one.
inline void store_bytes(int8_t* to, const vi (&from)[2][SIXTEEN]) {
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
    const auto words = [&](int half) { return _mm256_packs_epi32((__m256i)from[half][0], (__m256i)from[half][1]); };
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    store(to, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words(0), words(1)), in_order));
#else
    for (int half = 0; half < 2; half++) store(to + half * LANES, __builtin_convertvector(load<v16i>(from[half]), v16b));
#endif
}

// Bytes as floats; GCC would convert one by one.
#if defined(__AVX512VNNI__)
inline vf wide(const int8_t* from) { return floats((vi)_mm512_cvtepi8_epi32((__m128i)load<vb>(from))); }
inline vf wide(const uint8_t* from) { return floats((vi)_mm512_cvtepu8_epi32((__m128i)load<vc>(from))); }
#elif defined(__AVX2__)
inline vf wide(const int8_t* from) { return floats((vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)))); }
inline vf wide(const uint8_t* from) { return floats((vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)))); }
#else
inline vf wide(const int8_t* from) { return floats(__builtin_convertvector(load<vb>(from), vi)); }
inline vf wide(const uint8_t* from) { return floats(__builtin_convertvector(load<vc>(from), vi)); }
#endif

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

// The sums of two halves of a group.
#if defined(__AVX512VNNI__)
inline void add_up(const vi (&halves)[2][SIXTEEN], int32_t (&sums)[2]) {
    const __m512i a = (__m512i)halves[0][0], b = (__m512i)halves[1][0];
    const __m512i both = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m256i four = _mm256_add_epi32(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1));
    const __m128i two = _mm_add_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(sums), _mm_add_epi32(two, _mm_unpackhi_epi64(two, two)));
}
#else
inline int32_t total(vi value) {
    typedef int32_t v4i __attribute__((vector_size(16)));
    v4i parts[WIDTH / 4], sum{};
    store(parts, value);
    for (v4i part : parts) sum += part;
    return sum[0] + sum[1] + sum[2] + sum[3];
}
inline void add_up(const vi (&halves)[2][SIXTEEN], int32_t (&sums)[2]) {
    for (int half = 0; half < 2; half++) {
        vi sum{};
        by_register([&](int r) { sum += halves[half][r]; });
        sums[half] = total(sum);
    }
}
#endif

typedef vf Values32[2][SIXTEEN];

// The largest magnitude, as a float's bits: NaN is above infinity, which is above all others.
inline uint32_t magnitude(const Values32& values) {
    vu most{};
    for (const auto& half : values)
        by_register([&](int r) {
            const vu size = (vu)half[r] & 0x7fffffffu;
            most = size > most ? size : most;
        });
#if defined(__AVX512VNNI__)
    return _mm512_reduce_max_epu32((__m512i)most);
#else
    uint32_t largest = 0;
    for (int lane = 0; lane < WIDTH; lane++) largest = std::max(largest, most[lane]);
    return largest;
#endif
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
    for (int half = 0; half < 2; half++)
        by_register([&](int r) { rounded[half][r] = finite & ((vi)(values[half][r] * inverse + magic) - (vi)(vf{} + magic)); });
    add_up(rounded, sums);
    for (int half = 0; half < 2; half++) to.less32[half] = -32 * sums[half];
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
