// Draws tokens with the bits of tandem/speculation/draws.py.
#include "model.h"
#include "ranking.h"

namespace tandem {

namespace {

constexpr double MARGIN = 0x1p-40;

typedef uint64_t vw __attribute__((vector_size(8 * DOUBLES)));
constexpr int BLOCKS = STRIP / 4, EIGHT = 8;

// Products of two words: high and low halves.
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
inline void multiply_short(vw x, uint64_t y, vw& high, vw& low) {  // x below 2^32
    const vw first = of_low_halves(x, vw{} + y), second = of_low_halves(x, vw{} + (y >> 32)) + (first >> 32);
    high = second >> 32, low = (second << 32) | (first & 0xffffffffu);
}
inline void multiply(vw x, uint64_t y, vw& high, vw& low) {
    const vw y_low = vw{} + y, y_high = vw{} + (y >> 32), x_high = x >> 32;
    const vw first = of_low_halves(x, y_low), second = of_low_halves(x_high, y_low) + (first >> 32);
    const vw third = of_low_halves(x, y_high) + (second & 0xffffffffu);
    high = of_low_halves(x_high, y_high) + (second >> 32) + (third >> 32);
    low = (third << 32) | (first & 0xffffffffu);
}

// Philox4x64-10 (Salmon et al. 2011) as in numpy: the first block of four words has counter 1; word v is token v's.
class Noise {
public:
    Noise(uint64_t seed, uint64_t position) {
        for (int i = 0; i < ROUNDS; i++) {
            keys_[i][0] = seed + uint64_t(i) * 0x9E3779B97F4A7C15u;
            keys_[i][1] = position + uint64_t(i) * 0xBB67AE8584CAA73Bu;
        }
        multiply(keys_[0][0], FIRST, second_high_, second_low_);
    }
    // The words of any eight tokens.
    void words(const int32_t (&tokens)[EIGHT], uint64_t (&to)[EIGHT]) const {
        uint64_t blocks[EIGHT], made[4][EIGHT];
        for (int i = 0; i < EIGHT; i++) blocks[i] = uint64_t(tokens[i]) / 4 + 1;
        turn<EIGHT / DOUBLES>(blocks, made[0], EIGHT);
        for (int i = 0; i < EIGHT; i++) to[i] = made[tokens[i] % 4][i];
    }
    // The words of a strip's tokens; a block's lie BLOCKS apart.
    void words(int s, uint64_t (&to)[STRIP]) const {
        uint64_t blocks[BLOCKS];
        for (int i = 0; i < BLOCKS; i++) blocks[i] = uint64_t(s) * BLOCKS + 1 + i;
        for (int i = 0; i < BLOCKS; i += TOGETHER * DOUBLES) turn<TOGETHER>(blocks + i, to + i, BLOCKS);
    }

private:
    static constexpr int ROUNDS = 10, TOGETHER = 2;  // two at a time keep the CPU's multipliers busy
    static constexpr uint64_t FIRST = 0xD2E7470EE14C6C93u, SECOND = 0xCA5A826395121157u;

    // N registers of counters, below 2^32, to words; word k of a block lies k * `apart` further. The first two rounds'
    // factors are short, or equal in all lanes.
    template <int N> void turn(const uint64_t* blocks, uint64_t* to, int apart) const {
        vw x[N][4];
        for (int j = 0; j < N; j++) {
            vw high, low;
            multiply_short(load<vw>(blocks + j * DOUBLES), FIRST, high, low);
            x[j][2] = high ^ keys_[0][1], x[j][3] = low;
            multiply(x[j][2], SECOND, high, low);
            x[j][0] = high ^ keys_[1][0], x[j][1] = low;
            x[j][2] = x[j][3] ^ (second_high_ ^ keys_[1][1]), x[j][3] = vw{} + second_low_;
        }
        for (int i = 2; i < ROUNDS; i++)
            for (int j = 0; j < N; j++) {
                vw high[2], low[2];
                multiply(x[j][0], FIRST, high[0], low[0]);
                multiply(x[j][2], SECOND, high[1], low[1]);
                x[j][0] = high[1] ^ x[j][1] ^ keys_[i][0], x[j][1] = low[1];
                x[j][2] = high[0] ^ x[j][3] ^ keys_[i][1], x[j][3] = low[0];
            }
        for (int j = 0; j < N; j++)
            for (int k = 0; k < 4; k++) store(to + k * apart + j * DOUBLES, x[j][k]);
    }
    uint64_t keys_[ROUNDS][2], second_high_, second_low_;
};

double gumbel(uint64_t word) { return -log_of(-log_of((double(int64_t(word >> 12)) + 0.5) * 0x1p-52)); }

// The noise of words >= LEAST, one token in 1024; others' is below MOST. It decides between unlikely tokens; the latest
// positions are cached, since a target draws as its draft did.
struct Rare {
    static constexpr uint64_t LEAST = 0x3FFull << 54;
    static constexpr double MOST = 6.94;
    uint64_t seed = 0, position = 0;
    int32_t tokens = 0;
    std::vector<std::pair<int32_t, double>> noise;

    static Rare& at(uint64_t seed, uint64_t position) {
        static thread_local std::vector<Rare> latest(64);
        return latest[(seed * 0x9E3779B97F4A7C15u + position) % latest.size()];
    }
};

// The best so far; equals by higher score if `by_score`, then by lower id.
struct Winner {
    double noisy = -INFINITY;
    Candidate own{0, -1};

    void offer(double its, const Candidate& one, bool by_score) {
        if (its > noisy || (its == noisy && own.token >= 0 && (by_score ? one < own : one.token < own.token))) noisy = its, own = one;
    }
    // A token of this chance cannot win with words below (rounded down): noise is at most -log(1 - w / 2^64).
    static uint64_t needed(double chance) {
        const double least = 1.0 - chance * (1.0 + MARGIN) - MARGIN;
        return least > 0 ? uint64_t(least * 0x1p64) : 0;
    }
};

// One draw; threads share its long parts.
class Draw : Ranking {
public:
    Draw(Pool& pool, const float* logits, int count, const int32_t* ids, const Sampling& by, int ahead)
        : Ranking(pool, logits, count, by.temperature, ids), by_(by), position_(by.position + ahead), noise_(by.seed, position_) {}

    int32_t token() {
        if (!find_largest()) return -1;
        const bool k = by_.top_k > 0 && by_.top_k < by_.tokens, p = by_.top_p < 1;
        if (!k && !p && by_.min_p <= 0) return best_of_all();
        if (k) rank(by_.top_k, p);
        if (p && k) cut_ranked(mass_of_candidates());
        if (p && !k) cut_nucleus();
        if (by_.min_p > 0) cut_below(log_of(by_.min_p), k || p);
        return best_of_candidates(k || p);
    }

private:
    // Leaves the fewest tokens, most likely first, that reach top-p. An approximation nearly always decides, usually by
    // few tokens; all others have at most the remaining probability.
    void cut_nucleus() {
        double error, mass = about_mass(error);
        for (const bool exact : {false, true}) {
            if (exact) mass = mass_of_all(), error = 0;
            for (const double others : {128.0, 2048.0, double(count_)}) {
                const double lowest = log_of((1 - by_.top_p) * mass / others);
                cut_below(lowest, false);
                if (cut(lowest, mass - error, mass + error)) return;
            }
        }
        rank(count_);
        cut_ranked(mass);
    }

    // The same of candidates in order.
    void cut_ranked(double total) {
        double mass = 0;
        size_t size = 0;
        weigh_candidates([&](int i, double weight) {
            mass += weight;
            if (!size && mass / total >= by_.top_p) size = size_t(i) + 1;
        });
        if (size) candidates_.resize(size);
    }

    // The same of unsorted candidates, all with scores >= `lowest`, for a total between `least` and `most`: by ranges
    // of scores, then within the decisive range by single scores. Returns false if that is ambiguous or they do not
    // suffice.
    bool cut(double lowest, double least, double most) {
        constexpr int RANGES = 256;
        if (!(lowest < 0)) return false;
        const double slack = 1 + count_ * 0x1p-50, enough = by_.top_p * most * slack, little = by_.top_p * least / slack;
        const auto range = [&](const Candidate& one) { return std::min(RANGES - 1, int(one.score / lowest * RANGES)); };
        double sums[RANGES] = {}, before = 0;
        weigh_candidates([&](int i, double weight) { sums[range(candidates_[i])] += weight; });
        int last = 0;
        while (last < RANGES && before + sums[last] < little) before += sums[last++];
        const auto own = std::partition(candidates_.begin(), candidates_.end(), [&](const Candidate& one) { return range(one) < last; });
        const auto end = std::partition(own, candidates_.end(), [&](const Candidate& one) { return range(one) == last; });
        std::sort(own, end);
        auto next = own;
        while (next < end && before < little) before += exp_of(next++->score);
        if (!(before >= enough)) return false;
        candidates_.erase(next, candidates_.end());
        return true;
    }

    double mass_of_candidates() const {
        double sums[SUMS] = {};
        weigh_candidates([&](int i, double weight) { sums[i % SUMS] += weight; });
        return in_order(sums);
    }
    template <class Each> void weigh_candidates(Each each) const {
        weigh(0, int(candidates_.size()), [&](int i) { return candidates_[i].score; }, each);
    }

    // Leaves tokens with scores >= `least`, of the candidates or of all.
    void cut_below(double least, bool chosen) {
        if (!chosen) gather(top_ + temperature_ * least);
        candidates_.erase(std::remove_if(candidates_.begin(), candidates_.end(), [&](const Candidate& one) { return !(one.score >= least); }), candidates_.end());
    }

    // The best of the candidates and the previous best. Threads take 64 at a time.
    int32_t best_of_candidates(bool by_score, Winner best = {}) const {
        const int count = int(candidates_.size()), threads = count < 1024 ? 1 : this->threads();
        std::vector<Winner> winners(threads, best);
        std::atomic<int> next{0}, arrived{0};
        shared([&] {
            Winner& own = winners[arrived++];
            for (int i = 64 * next++; i < count; i = 64 * next++)
                for (int end = std::min(count, i + 64); i < end; i += EIGHT) offer(&candidates_[i], std::min(EIGHT, end - i), by_score, own);
        }, threads);
        for (const Winner& one : winners) best.offer(one.noisy, one.own, by_score);
        return best.own.token;
    }

    void offer(const Candidate* own, int count, bool by_score, Winner& best) const {
        int32_t tokens[EIGHT] = {};
        uint64_t words[EIGHT];
        double most = -INFINITY;
        for (int j = 0; j < count; j++) tokens[j] = own[j].token, most = std::max(most, own[j].score);
        noise_.words(tokens, words);
        const uint64_t needed = Winner::needed(exp_of(most - best.noisy));
        for (int j = 0; j < count; j++)
            if (words[j] >= needed) best.offer(own[j].score + gumbel(words[j]), own[j], by_score);
    }

    // After the likeliest token and those with rare words, only tokens that can still win are left.
    int32_t best_of_all() {
        Winner best;
        gather(top_);
        offer(candidates_.data(), 1, false, best);
        for (const auto& [token, noise] : rare().noise) {
            const int i = ids_ ? int(std::lower_bound(ids_, ids_ + count_, token) - ids_) : token;
            if (i < count_ && (!ids_ || ids_[i] == token)) best.offer(score(logits_[i]) + noise, {score(logits_[i]), token}, false);
        }
        gather(top_ + temperature_ * (best.noisy - Rare::MOST));
        return best_of_candidates(false, best);
    }

    // Threads take eight strips at a time.
    const Rare& rare() const {
        Rare& kept = Rare::at(by_.seed, position_);
        if (kept.seed == by_.seed && kept.position == position_ && kept.tokens == by_.tokens) return kept;
        kept.tokens = 0;
        kept.noise.clear();
        kept.noise.reserve(by_.tokens / 256 + 64);  // four times what comes
        std::atomic<int> next{0};
        std::mutex adding;
        const int strips = (by_.tokens + STRIP - 1) / STRIP;
        shared([&] {
            for (int part = next++; 8 * part < strips; part = next++)
                for (int s = 8 * part; s < std::min(strips, 8 * part + 8); s++) {
                    uint64_t words[STRIP];
                    noise_.words(s, words);
                    vl any{};
                    for (int i = 0; i < STRIP; i += DOUBLES) any |= (vl)(load<vw>(words + i) >= Rare::LEAST);
                    int64_t found = 0;
                    for (int i = 0; i < DOUBLES; i++) found |= any[i];
                    if (!found) continue;
                    int at[STRIP], count = 0;
                    for (int i = 0; i < STRIP; i++) at[count] = i, count += words[i] >= Rare::LEAST;
                    const std::lock_guard lock(adding);
                    for (int i = 0; i < count; i++) kept.noise.push_back({s * STRIP + at[i] % BLOCKS * 4 + at[i] / BLOCKS, gumbel(words[at[i]])});
                }
        }, threads());
        kept.seed = by_.seed, kept.position = position_, kept.tokens = by_.tokens;
        return kept;
    }

    const Sampling& by_;
    const uint64_t position_;
    Noise noise_;
};

}  // namespace

int32_t draw(Pool& pool, const float* logits, int outputs, const int32_t* only, const Sampling& by, int ahead) {
    bool apart = only && (only[0] < 0 || only[outputs - 1] >= by.tokens);
    for (int i = 1; only && i < outputs; i++) apart |= only[i] <= only[i - 1];
    if (!apart) return Draw(pool, logits, outputs, only, by, ahead).token();
    std::vector<float>& wide = kept().wide;
    wide.assign(by.tokens, -INFINITY);
    for (int i = 0; i < outputs; i++)
        if (only[i] >= 0 && only[i] < by.tokens) wide[only[i]] = logits[i];
    return Draw(pool, wide.data(), by.tokens, nullptr, by, ahead).token();
}

double largest_probability(Pool& pool, const float* logits, int count) {
    Ranking row(pool, logits, count, 1.0);
    double error;
    return row.find_largest() ? 1 / row.about_mass(error) : 0;
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
