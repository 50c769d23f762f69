// Rounds of rows: greedy drafts, verification by agreement, and both in one call.
#pragma once
#include "draws.h"
#include "model.h"

namespace tandem {

// Sampling callback. For rows with rows[r] set, draw(r, at, best) returns the next token, or -1 to stop; others follow
// sampled[r] (null: greedy). Row r's logits lie at logits[at * outputs ...]; `best` is their argmax, -1 if unsound.
struct Drawing {
    const int32_t* rows;
    const Sampling* sampled;
    float* logits;
    int32_t (*draw)(int32_t row, int32_t at, int32_t best);
};

// Rows of a step, each of which is row of[i] of a call.
struct Batch {
    std::vector<int32_t> of, slots, starts, begins{0}, tokens, adapters, knowns;

    void add(int row, const Rows& call, int start, const int32_t* first, const int32_t* last) {
        of.push_back(row);
        slots.push_back(call.slots[row]);
        starts.push_back(start);
        tokens.insert(tokens.end(), first, last);
        begins.push_back(int(tokens.size()));
        adapters.push_back(call.adapters ? call.adapters[row] : 0);
        knowns.push_back(call.knowns ? call.knowns[row] : 0);
    }
    Rows rows(const Rows& call) const {
        return {int(of.size()), slots.data(), starts.data(), begins.data(), tokens.data(), call.adapters ? adapters.data() : nullptr, call.knowns ? knowns.data() : nullptr};
    }
};

// Drafts counts[r] tokens of row r into drafts[r * stride ...], greedily or by `drawing`. A row stops at unsound logits
// or a token without embedding; `counts` returns the lengths. Outputs are tokens only[...] (null: all).
inline void propose(Model& draft, const Rows& tails, int32_t* counts, const int32_t* only, int stride, int32_t* drafts, const Drawing* drawing) {
    Batch batch;
    for (int r = 0; r < tails.count; r++)
        if (counts[r]) batch.add(r, tails, tails.starts[r], tails.tokens + tails.begins[r], tails.tokens + tails.begins[r + 1]);
    std::vector<Best> best;
    for (int i = 0; !batch.of.empty(); i++) {
        draft.feed(batch.rows(tails), 1, drawing ? drawing->logits : nullptr, best, i > 0);
        Batch next;
        for (size_t a = 0; a < batch.of.size(); a++) {
            const int r = batch.of[a];
            int32_t token = !best[a].sound ? -1 : only ? only[best[a].token] : best[a].token;
            if (drawing && drawing->rows && drawing->rows[r]) token = drawing->draw(r, int32_t(a), token);
            else if (drawing && drawing->sampled && drawing->sampled[r].draws())
                token = draw(draft.pool, drawing->logits + a * draft.shape.outputs, draft.shape.outputs, only, drawing->sampled[r], i);
            if (token < 0 || token >= draft.shape.vocabulary) {
                counts[r] = i;
                continue;
            }
            drafts[r * stride + i] = token;
            if (i + 1 < counts[r]) next.add(r, tails, batch.starts[a] + batch.begins[a + 1] - batch.begins[a], &token, &token + 1);
        }
        batch = std::move(next);
    }
}

// Verification by agreement. `said`: the target's token after each token, -1 if unsound: argmax, or for `sampled` rows
// drawn up to the first mismatch. accepted[r]: matching draft tokens, -1 if a decisive logit is unsound. `logits`:
// buffer for all tokens, or null.
inline void verify(Model& target, const Rows& rows, const Sampling* sampled, int32_t* said, int32_t* accepted, float* logits) {
    std::vector<Best> best;
    target.feed(rows, 2, logits, best);
    for (size_t i = 0; i < best.size(); i++) said[i] = best[i].sound ? best[i].token : -1;
    for (int r = 0; r < rows.count - rows.silent; r++) {
        const int32_t* drafted = rows.tokens + rows.begins[r] + 1;
        const int count = rows.begins[r + 1] - rows.begins[r] - 1, outputs = target.shape.outputs;
        for (int same = 0;; same++) {
            int32_t& own = said[rows.begins[r] + same];
            if (sampled && sampled[r].draws())
                own = draw(target.pool, logits + size_t(rows.begins[r] + same) * outputs, outputs, nullptr, sampled[r], same);
            accepted[r] = own < 0 ? -1 : same;
            if (same == count || own != drafted[same]) break;
        }
    }
}

}  // namespace tandem
