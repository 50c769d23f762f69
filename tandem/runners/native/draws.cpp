#include "draws.h"
#include "ranking.h"

namespace tandem {

namespace {

constexpr double MARGIN = 0x1p-40, MOST_NOISE = 37;  // of any word: 53 ln 2 = 36.74

typedef uint64_t vw __attribute__((vector_size(8 * DOUBLES)));
constexpr int BLOCKS = STRIP / 4;

// The products of two words, as their high and low halves.
inline void multiply(uint64_t x, uint64_t y, uint64_t& high, uint64_t& low) {
    const unsigned __int128 product = (unsigned __int128)x * y;
    high = uint64_t(product >> 64), low = uint64_t(product);
}
inline vw of_low_halves(vw x, vw y) {
#if defined(__AVX512F__)
    return (vw)_mm512_mul_epu32((__m512i)x, (__m512i)y);
#elif defined(__AVX2__)
    return (vw)_mm256_mul_epu32((__m256i)x, (__m256i)y);
#else
    return (x & 0xffffffffu) * (y & 0xffffffffu);
#endif
}
inline void multiply(vw x, uint64_t y, vw& high, vw& low) {
    const vw y_low = vw{} + y, y_high = vw{} + (y >> 32), x_high = x >> 32;
    const vw first = of_low_halves(x, y_low), second = of_low_halves(x_high, y_low) + (first >> 32);
    const vw third = of_low_halves(x, y_high) + (second & 0xffffffffu);
    high = of_low_halves(x_high, y_high) + (second >> 32) + (third >> 32);
    low = (third << 32) | (first & 0xffffffffu);
}

// Philox4x64-10 (Salmon et al. 2011) as numpy counts: the first block of four words has counter 1. Word v belongs to token v.
class Noise {
public:
    Noise(uint64_t seed, uint64_t position) {
        for (int i = 0; i < ROUNDS; i++) {
            keys_[i][0] = seed + uint64_t(i) * 0x9E3779B97F4A7C15u;
            keys_[i][1] = position + uint64_t(i) * 0xBB67AE8584CAA73Bu;
        }
    }
    uint64_t word(int32_t token) const {
        uint64_t x[1][4] = {{uint64_t(token) / 4 + 1}};
        turn(x);
        return x[0][token % 4];
    }
    // The words of a strip's tokens: those of a block lie BLOCKS apart.
    void words(int s, uint64_t (&to)[STRIP]) const {
        vw counting;
        for (int i = 0; i < DOUBLES; i++) counting[i] = uint64_t(s) * BLOCKS + 1 + i;
        for (int at = 0; at < BLOCKS; at += TOGETHER * DOUBLES) {
            vw x[TOGETHER][4] = {};
            for (int j = 0; j < TOGETHER; j++) x[j][0] = counting + uint64_t(at + j * DOUBLES);
            turn(x);
            for (int j = 0; j < TOGETHER; j++)
                for (int k = 0; k < 4; k++) store(to + k * BLOCKS + at + j * DOUBLES, x[j][k]);
        }
    }

private:
    static constexpr int ROUNDS = 10, TOGETHER = 2;  // two at a time keep the CPU's multipliers busy

    template <class V, int N> void turn(V (&x)[N][4]) const {
        for (int i = 0; i < ROUNDS; i++)
            for (int j = 0; j < N; j++) {
                V high[2], low[2];
                multiply(x[j][0], 0xD2E7470EE14C6C93u, high[0], low[0]);
                multiply(x[j][2], 0xCA5A826395121157u, high[1], low[1]);
                x[j][0] = high[1] ^ x[j][1] ^ keys_[i][0], x[j][1] = low[1];
                x[j][2] = high[0] ^ x[j][3] ^ keys_[i][1], x[j][3] = low[0];
            }
    }
    uint64_t keys_[ROUNDS][2];
};

double gumbel(uint64_t word) { return -log_of(-log_of((double(int64_t(word >> 12)) + 0.5) * 0x1p-52)); }

// The best so far. The noise of a word w is at most -log(1 - w / 2^64), so a token with this score at most cannot win with
// words below `needed`, which is rounded down: no token that could win is passed over.
struct Winner {
    double noisy = -INFINITY;
    int32_t token = -1;

    void offer(double score, int32_t id, uint64_t word) {
        const double own = score + gumbel(word);
        if (own > noisy) noisy = own, token = id;
    }
    static uint64_t needed(double chance) {
        const double least = 1.0 - chance * (1.0 + MARGIN) - MARGIN;
        return least > 0 ? uint64_t(least * 0x1p64) : 0;
    }
};

// One draw. What takes long is shared among threads.
class Draw : Ranking {
public:
    Draw(Pool& pool, const float* logits, int count, const Sampling& by, int ahead)
        : Ranking(pool, logits, count, by.temperature), by_(by), noise_(by.seed, uint64_t(by.position + ahead)) {}

    int32_t token() {
        if (!find_largest()) return -1;
        const bool k = by_.top_k > 0 && by_.top_k < count_, p = by_.top_p < 1;
        if (!k && !p && by_.min_p <= 0) return best_of_all();
        if (k) rank(by_.top_k);
        if (p) cut_nucleus(k);
        if (by_.min_p > 0) cut_below(log_of(by_.min_p), k || p);
        return best_of_candidates();
    }

private:
    // Leaves the fewest candidates, most likely first, whose total probability reaches top-p.
    void cut_nucleus(bool ranked) {
        const int all = ranked ? int(candidates_.size()) : count_;
        const double total = ranked ? mass_of_candidates() : mass_of_all();
        for (int size = ranked ? all : std::min(all, STRIP);; size = size < all / 4 ? 4 * size : all) {
            if (!ranked) rank(size);
            double mass = 0;
            for (int i = 0; i < size; i += 8) {
                double weights[8] = {};
                for (int lane = 0; lane < 8 && i + lane < size; lane++) weights[lane] = candidates_[i + lane].score;
                exps_of(weights);
                for (int lane = 0; lane < 8 && i + lane < size; lane++) {
                    mass += weights[lane];
                    if (mass / total >= by_.top_p) return candidates_.resize(i + lane + 1);
                }
            }
            if (size == all) return;
        }
    }

    double mass_of_candidates() const {
        double sums[SUMS] = {};
        for (size_t i = 0; i < candidates_.size(); i++) sums[i % SUMS] += exp_of(candidates_[i].score);
        return in_order(sums);
    }

    // Leaves the candidates, or of all tokens those, whose scores are at least `least`.
    void cut_below(double least, bool chosen) {
        if (!chosen) gather(top_ + temperature_ * least);
        candidates_.erase(std::remove_if(candidates_.begin(), candidates_.end(), [&](const Candidate& one) { return !(one.score >= least); }), candidates_.end());
    }

    int32_t best_of_candidates() const {
        constexpr int TOGETHER = 8;
        Winner best;
        for (size_t i = 0; i < candidates_.size(); i += TOGETHER) {
            const Candidate* own = &candidates_[i];
            const int count = int(std::min<size_t>(TOGETHER, candidates_.size() - i));
            uint64_t words[TOGETHER];
            double most = -INFINITY;
            for (int j = 0; j < count; j++) words[j] = noise_.word(own[j].token), most = std::max(most, own[j].score);
            const uint64_t needed = Winner::needed(exp_of(most - best.noisy));
            for (int j = 0; j < count; j++)
                if (words[j] >= needed) best.offer(own[j].score, own[j].token, words[j]);
        }
        return best.token;
    }

    // Threads take eight strips at a time, and note the best that they found. All begin with the best of the likeliest strip.
    int32_t best_of_all() {
        const int parts = (strips() + 7) / 8;
        Winner first;
        offer_strip(int(std::max_element(maxima_.begin(), maxima_.end()) - maxima_.begin()), 0, first);
        std::vector<Winner> winners(threads(), first);
        std::atomic<int> next{0}, arrived{0};
        shared([&] {
            Winner& own = winners[arrived++];
            Winner best = own;
            for (int part = next++; part < parts; part = next++) {
                double chances[8] = {};
                for (int i = 0; i < 8 && 8 * part + i < strips(); i++) chances[i] = score(maxima_[8 * part + i]) - best.noisy;
                exps_of(chances);
                for (int i = 0; i < 8 && 8 * part + i < strips(); i++)
                    if (score(maxima_[8 * part + i]) + MOST_NOISE >= best.noisy) offer_strip(8 * part + i, Winner::needed(chances[i]), best);
            }
            own = best;
        });
        for (const Winner& one : winners)
            if (one.noisy > first.noisy || (one.noisy == first.noisy && one.token < first.token)) first = one;
        return first.token;
    }

    void offer_strip(int s, uint64_t needed, Winner& best) const {
        uint64_t words[STRIP];
        noise_.words(s, words);
        vl any{};
        for (int i = 0; i < STRIP; i += DOUBLES) any |= (vl)(load<vw>(words + i) >= needed);
        int64_t found = 0;
        for (int i = 0; i < DOUBLES; i++) found |= any[i];
        const int begin = s * STRIP, end = found ? std::min(count_, begin + STRIP) : begin;
        for (int id = begin; id < end; id++) {
            const uint64_t word = words[id % 4 * BLOCKS + (id - begin) / 4];
            if (word >= needed) best.offer(score(logits_[id]), id, word);
        }
    }

    const Sampling& by_;
    Noise noise_;
};

}  // namespace

int32_t draw(Pool& pool, const float* logits, int outputs, const int32_t* only, const Sampling& by, int ahead) {
    if (!only) return Draw(pool, logits, outputs, by, ahead).token();
    std::vector<float>& wide = kept().wide;
    wide.assign(by.tokens, -INFINITY);
    for (int i = 0; i < outputs; i++)
        if (only[i] >= 0 && only[i] < by.tokens) wide[only[i]] = logits[i];
    return Draw(pool, wide.data(), by.tokens, by, ahead).token();
}

void logprobs(Pool& pool, const float* const* logits, int rows, int count, int top, double* totals, int32_t* ids) {
    for (int r = 0; r < rows; r++, ids += top) {
        Ranking row(pool, logits[r], count, 1.0);
        const bool sound = row.find_largest();
        totals[r] = sound ? row.top() + log_of(row.mass_of_all()) : NAN;
        if (top && sound) row.rank(top);
        for (int i = 0; i < top; i++) ids[i] = sound ? row.candidates()[i].token : i;
    }
}

}  // namespace tandem
