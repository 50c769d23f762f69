// A position's tokens ordered by logits, and the sum of exponentials of scores, with numpy's bits (draws.py,
// elementary.py): sums have one order for any threads.
#pragma once
#include "elementary.h"
#include "system.h"
#include "vectors.h"
#include <algorithm>
#include <functional>
#include <limits>
#include <mutex>
#include <vector>

namespace tandem {

typedef float narrow_vd __attribute__((vector_size(4 * DOUBLES)));  // as many floats

constexpr int STRIP = SUMS;  // logits whose largest is kept
constexpr int WORTH_SHARING = 4096;  // tokens for which threads compute exponentials or words

struct Candidate {
    double score;
    int32_t token;
    bool operator<(const Candidate& other) const { return score > other.score || (score == other.score && token < other.token); }
};

// Memory reused between draws of the calling thread, because allocation is slow.
struct Kept {
    std::vector<float> maxima, ordered, wide;
    std::vector<Candidate> candidates;
};
inline Kept& kept() {
    static thread_local Kept own;
    return own;
}

// 2^y, with y from -126 to 0, and a relative error below 2^-21 (Cephes' exp2f).
inline vf power_of_two(vf y) {
    const vf magic = vf{} + 0x1.8p23f, shifted = y + magic, f = y - (shifted - magic);
    vf power = vf{} + 1.535336188319500e-4f;
    for (const float next : {1.339887440266574e-3f, 9.618437357674640e-3f, 5.550332471162809e-2f, 2.402264791363012e-1f, 6.931472028550421e-1f, 1.0f})
        power = fused(power, f, vf{} + next);
    return (vf)((vi)power + ((vi)shifted << 23));
}

// Scores: logits / temperature, shifted to a maximum of 0. Logits are of ascending tokens `ids` (null: all), others
// -inf.
class Ranking {
public:
    Ranking(Pool& pool, const float* logits, int count, double temperature, const int32_t* ids = nullptr)
        : pool_(pool), logits_(logits), count_(count), temperature_(temperature), ids_(ids) {}

    double top() const { return top_; }
    const std::vector<Candidate>& candidates() const { return candidates_; }

    // The maximum of each strip and of all; whether it is finite and nothing is NaN.
    bool find_largest() {
        maxima_.resize((count_ + STRIP - 1) / STRIP);
        std::atomic<bool> sound{true};
        each_strips(8, [&](int begin, int end) {
            vi nan{};
            for (int s = begin; s < end; s++) {
                float rest[STRIP];
                const float* from = strip(s, rest);
                vf most = load<vf>(from);
                nan |= most != most;
                for (int i = WIDTH; i < STRIP; i += WIDTH) {
                    const vf next = load<vf>(from + i);
                    nan |= next != next;
                    most = next > most ? next : most;
                }
                maxima_[s] = largest(most);
            }
            for (int i = 0; i < WIDTH; i++)
                if (nan[i]) sound = false;
        });
        top_ = *std::max_element(maxima_.begin(), maxima_.end());
        return sound && std::isfinite(top_);
    }

    // The `k` largest scores, sorted if `in_order`: at least k logits reach the k-th largest strip maximum.
    void rank(int k, bool in_order = true) {
        double bound = -INFINITY;
        if (k < strips()) {
            ordered_ = maxima_;
            std::nth_element(ordered_.begin(), ordered_.begin() + k - 1, ordered_.end(), std::greater<float>());
            bound = ordered_[k - 1];
        }
        gather(bound);
        if (k < int(candidates_.size())) {
            std::nth_element(candidates_.begin(), candidates_.begin() + k, candidates_.end());
            candidates_.resize(k);
        }
        if (in_order) std::sort(candidates_.begin(), candidates_.end());
    }

    // Threads take lanes, eight at a time: each lane sums its own tokens.
    double mass_of_all() {
        double sums[SUMS] = {};
        if (ids_) {
            weigh(0, count_, [&](int i) { return score(logits_[i]); }, [&](int i, double weight) { sums[ids_[i] % SUMS] += weight; });
            return in_order(sums);
        }
        std::atomic<int> next{0};
        float rest[STRIP];
        const float* last = strip(strips() - 1, rest);
        shared([&] {
            for (int lane = 8 * next++; lane < SUMS; lane = 8 * next++) {
                vd own[8 / DOUBLES] = {};
                for (int s = 0; s < strips(); s++) {
                    const float* from = (s + 1 < strips() ? logits_ + s * STRIP : last) + lane;
                    for (int i = 0; i < 8 / DOUBLES; i++) {
                        const vd logits = __builtin_convertvector(load<narrow_vd>(from + i * DOUBLES), vd);
                        own[i] += exp_of((logits - top_) / temperature_);
                    }
                }
                std::memcpy(sums + lane, own, sizeof(own));
            }
        }, threads());
        return in_order(sums);
    }

    // The same ten times faster, within `error`, in float32. A power 2^y errs by 2^-22 y, plus less than 3 * 2^-22.
    double about_mass(double& error) const {
        if (!(temperature_ > 1e-30 && temperature_ < 1e30)) return error = INFINITY, 1;
        const float by = float(0x1.71547652b82fep+0 / temperature_), top = float(top_);
        double mass = 0, wrong = 0;
        std::mutex adding;
        each_strips(8, [&](int begin, int end) {
            vd sums[2] = {};
            for (int s = begin; s < end; s++) {
                float rest[STRIP];
                const float* from = strip(s, rest);
                vf own[2] = {};
                for (int i = 0; i < STRIP; i += WIDTH) {
                    vf y = (load<vf>(from + i) - top) * by;
                    y = y > -126.0f ? y : vf{} - 126.0f;
                    const vf weight = power_of_two(y);
                    own[0] += weight, own[1] = fused(weight, 3.0f - y, own[1]);
                }
                for (int j = 0; j < 2; j++)
                    for (int i = 0; i < WIDTH; i += DOUBLES) sums[j] += __builtin_convertvector(load<narrow_vd>((const char*)&own[j] + i * sizeof(float)), vd);
            }
            const std::lock_guard lock(adding);
            for (int i = 0; i < DOUBLES; i++) mass += sums[0][i], wrong += sums[1][i];
        });
        error = wrong * 0x1p-22 + count_ * 0x1p-100;
        return mass;
    }

protected:
    double score(float logit) const { return (double(logit) - top_) / temperature_; }
    int strips() const { return int(maxima_.size()); }
    int threads() const { return count_ < WORTH_SHARING ? 1 : pool_.count(); }

    // A strip's logits; the last is padded with -inf in `rest`.
    const float* strip(int s, float* rest) const {
        if ((s + 1) * STRIP <= count_) return logits_ + s * STRIP;
        std::fill(std::copy(logits_ + s * STRIP, logits_ + count_, rest), rest + STRIP, -INFINITY);
        return rest;
    }

    // Shares work(begin, end) over strips among threads, if `times` the tokens reach WORTH_SHARING.
    template <class Work> void each_strips(int times, Work work) const {
        constexpr int PART = 32;
        const int count = (count_ + STRIP - 1) / STRIP;
        std::atomic<int> next{0};
        shared([&] {
            for (int s = PART * next++; s < count; s = PART * next++) work(s, std::min(count, s + PART));
        }, count_ < times * WORTH_SHARING ? 1 : pool_.count());
    }
    template <class Work> void shared(Work work, int threads) const {
        pool_.run([](void* work_, int) { (*static_cast<Work*>(work_))(); }, &work, threads);
    }

    // Tokens with scores at least that of `logit`, and a few others; equal scores may have smaller logits.
    void gather(double logit) {
        const double lost = (top_ - logit) * 0x1p-50 + temperature_ * 0x1p-1070;
        const float least = std::nextafter(float(std::max(logit - lost, -double(std::numeric_limits<float>::max()))), -INFINITY);
        candidates_.clear();
        for (int s = 0; s < strips(); s++) {
            if (maxima_[s] < least) continue;
            int found[STRIP], count = 0;
            for (int i = s * STRIP; i < std::min(count_, (s + 1) * STRIP); i++) found[count] = i, count += logits_[i] >= least;  // no branch to guess
            for (int i = 0; i < count; i++) candidates_.push_back({score(logits_[found[i]]), ids_ ? ids_[found[i]] : found[i]});
        }
    }

    // Calls each(i, exp(score(i))) for i from `begin` to `end`, in order.
    template <class Score, class Each> static void weigh(int begin, int end, Score score, Each each) {
        for (; begin < end; begin += 8) {
            const int count = std::min(8, end - begin);
            double weights[8] = {};
            for (int i = 0; i < count; i++) weights[i] = score(begin + i);
            exps_of(weights);
            for (int i = 0; i < count; i++) each(begin + i, weights[i]);
        }
    }

    static double in_order(const double* sums) {
        double total = 0;
        for (int i = 0; i < SUMS; i++) total += sums[i];
        return total;
    }

    Pool& pool_;
    const float* logits_;
    int count_;
    double temperature_, top_ = 0;
    const int32_t* ids_;
    std::vector<float>&maxima_ = kept().maxima, &ordered_ = kept().ordered;
    std::vector<Candidate>& candidates_ = kept().candidates;
};

}  // namespace tandem
