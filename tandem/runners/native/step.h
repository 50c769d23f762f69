// The phases of a step. Threads claim work items; a phase ends when all are done, without waiting for late threads.
#pragma once
#include "transformer.h"
#include <numeric>

namespace tandem {

// Claims items until `place.until` and returns the first, or `pieces`. Each thread takes its own, neighbouring ones for
// sequential reads, then others' rest: of few tokens all its own at once, since a claim waits for all writes before it; else
// up to `most`, and at most half of those left, so that threads end together. Inlining it (g++ 12) slows wide steps by 2 %.
template <class D> [[gnu::noinline]] int Transformer<D>::claim(Place& place, int pieces, int most) {
    const Timer timer(place, CLAIMS);
    const uint64_t begin = uint64_t(place.phase) << 32;
    for (int i = 0; i < threads_; i++) {
        const int whose = (place.thread + i) % threads_, first = first_of(whose, pieces, threads_), end = first_of(whose + 1, pieces, threads_);
        std::atomic<uint64_t>& claimed = progress_[whose].claimed;
        for (uint64_t seen = claimed.load(std::memory_order_relaxed);;) {
            if (seen >> 32 > place.phase) return pieces;  // others are done with this phase
            const uint64_t next = std::max(seen, begin);
            const int piece = first + int(uint32_t(next)), count = !i && step_.tokens <= FEW ? end - piece : std::clamp((end - piece) / 2, 1, most);
            if (piece >= end) break;
            if (!claimed.compare_exchange_weak(seen, next + count, std::memory_order_relaxed)) continue;
            place.until = piece + count;
            return piece;
        }
    }
    return pieces;
}

// Ends a phase; meanwhile the thread prefetches. Waits for a preempted thread only while it has an item.
template <class D> void Transformer<D>::finish(Place& place, int pieces, const Linear<D>* then) {
    const Timer timer(place, WAITING);
    place.phase++;
    place.claimed = NONE;
    place.expected += pieces;
    Soon soon = then && place.thread < then->panels() ? then->soon(first_of(place.thread, then->panels(), threads_)) : Soon{};
    Pool::until([&] {
        soon.fetch(4);
        int finished = 0;  // of threads that are ahead, items of later phases too
        for (const Progress& each : progress_) finished += each.done.load(std::memory_order_acquire);
        return finished >= place.expected;
    });
}

template <class D> template <class Piece> void Transformer<D>::share(Place& place, int pieces, const Linear<D>* then, Piece piece) {
    const Timer timer(place, ALL);
    for (int i = claim(place, pieces); i < pieces; i = i + 1 < place.until ? i + 1 : claim(place, pieces)) {
        piece(i);
        progress_[place.thread].done.store(++place.done, std::memory_order_release);
    }
    finish(place, pieces, then);
}

// Claims the next panels early, to prefetch them; with the last one, the start of the next layer.
template <class D> template <class Done>
void Transformer<D>::multiply(Place& place, const Linear<D>& layer, const Linear<D>* then, const Input<D>& input, int tokens, Done each) {
    const Timer timer(place, ALL);
    const Tiles by(tokens, layer.by());
    if (place.claimed == NONE) place.claimed = claim(place, layer.panels(), PANELS);
    for (int panel = place.claimed, after = 0; panel < layer.panels(); panel = after) {
        after = panel + 1 < place.until ? panel + 1 : claim(place, layer.panels(), PANELS);
        Soon soon = layer.fetches_ahead(tokens) && after < layer.panels() ? layer.soon(after) : Soon{};
        layer.panel(panel, input, by, soon, [&](int t, v16f first, v16f last) { each(panel, t, first, last); });
        progress_[place.thread].done.store(++place.done, std::memory_order_release);
    }
    finish(place, layer.panels(), then);
}

template <class D> void Transformer<D>::work(int thread) {
    Place place{thread};
    if (front_) take_in(thread, place);
    else share(place, step_.tokens, &layers_[0].qkv, [&](int t) {
        stored* x = &x_[t * hidden_];
        std::memcpy(x, embedding_ + size_t(step_.ids[t]) * shape.hidden, shape.hidden * sizeof(stored));
        for (int i = 0; shape.embedding_scale && i < shape.hidden; i += LANES) D::keep(x + i, D::wide(x + i) * shape.embedding_scale);
    });
    for (size_t i = 0; i < layers_.size(); i++) {
        copy_out(int(i), place);
        work_layer(int(i), i + 1 < layers_.size() ? &layers_[i + 1].qkv : &head_, thread, place);
    }
    copy_out(int(layers_.size()), place);
    if (!step_.count) return;
    place.kind = TO_HEAD;
    const Input<D> last = input(place, thread, head_, {x_.data(), hidden_, &final_norm_, step_.first()}, step_.count);
    multiply(place, head_, nullptr, last, step_.count, [&](int panel, int wanted, v16f first, v16f second) {
        choose(thread, panel, wanted, first, second);
    });
}

// Hidden states change only in their own phases, so copies are consistent.
template <class D> void Transformer<D>::copy_out(int layer, Place& place) {
    const size_t count = taps_.size(), hidden = shape.hidden;
    for (size_t i = 0; i < count; i++) {
        if (taps_[i] != layer) continue;
        share(place, step_.tokens, nullptr, [&](int t) {
            std::memcpy(features_at(step_.slots[t], step_.positions[t]) + i * hidden, &x_[t * hidden_], hidden * sizeof(stored));
        });
    }
}

// A phase for tokens with adapters, if a step has any.
template <class D>
void Transformer<D>::shrink(int layer, Stacked which, const Linear<D>* then, const Activations& from, int thread, Place& place) {
    if (adapted_.empty()) return;
    const int count = int(adapted_.size()), parts = count < 4 * threads_ ? threads_ : 1;
    share(place, count * parts, then, [&](int i) {
        const int t = adapted_[i / parts], part = i % parts;
        if (t < from.first) return;
        const Addition<D>& addition = adapters_[step_.adapters[t]]->of(layer, which);
        if (!addition.rank()) return;
        const stored* x = from.values + t * from.stride;
        if (from.norm) {
            norm(x, from.norm->data(), shape.hidden, normed_[thread].data());
            x = normed_[thread].data();
        }
        addition.shrink(x, part * addition.rank() / parts, (part + 1) * addition.rank() / parts, &shrunk_[t * most_rank_]);
    });
}

// Adds an adapter to a panel's 32 outputs.
template <class D> void Transformer<D>::extend(int layer, Stacked which, int panel, int t, v16f& first, v16f& last) const {
    if (!step_.adapters || !step_.adapters[t]) return;
    const Addition<D>& addition = adapters_[step_.adapters[t]]->of(layer, which);
    if (!addition.rank()) return;
    addition.extend(panel, &shrunk_[t * most_rank_], first, last);
}

template <class D> void Transformer<D>::work_layer(int index, const Linear<D>* then, int thread, Place& place) {
    Layer& layer = layers_[index];
    const int first_token = index + 1 < shape.layers ? 0 : first_, turned = shape.heads + shape.kv_heads;
    int tokens = step_.tokens;
    auto by = [](const Buffer<stored>& norm) { return norm.size() ? &norm : nullptr; };
    place.kind = TO_QKV;
    Activations from{x_.data(), hidden_, by(layer.attention_norm)};
    if (front_) from = {front_->both.data(), 2 * size_t(shape.hidden)};
    shrink(index, QKV, &layer.qkv, from, thread, place);
    Input<D> in = input(place, thread, layer.qkv, from, tokens);
    multiply(place, layer.qkv, nullptr, in, tokens, [&](int panel, int t, v16f first, v16f last) {
        extend(index, QKV, panel, t, first, last);
        D::keep(&qkv_[t * wide_ + panel * PANEL], first);
        D::keep(&qkv_[t * wide_ + panel * PANEL + LANES], last);
    });
    if (shape.row_norms) share(place, tokens, nullptr, [&](int t) {
        stored *q = &qkv_[t * wide_], *k = q + size_t(shape.heads) * shape.head_dim;
        norm(q, layer.q_norm.data(), shape.heads * shape.head_dim, q);
        norm(k, layer.k_norm.data(), shape.kv_heads * shape.head_dim, k);
    });
    place.kind = ROTATE;
    // Heads one after another, each KV head before its queries, in rotating as in attending: a thread mostly attends to keys
    // that it has written.
    const int chunks = tokens < 4 * threads_ ? tokens : std::clamp(4 * threads_ / turned, 1, tokens), together = turned / shape.kv_heads;
    share(place, turned * chunks, nullptr, [&](int i) {
        const int unit = i / chunks, kv_head = unit / together, query = unit % together - 1;
        const int head = query < 0 ? shape.heads + kv_head : kv_head * (together - 1) + query;
        for (int t = first_of(i % chunks, tokens, chunks), end = first_of(i % chunks + 1, tokens, chunks); t < end; t++) rotate(layer, t, head);
    });
    tokens -= first_token;
    if (!tokens) return;
    place.kind = ATTEND;
    const int first_group = first_token ? first_group_ : 0, groups = int(groups_.size()) - first_group;
    share(place, groups * shape.kv_heads, &layer.o, [&](int i) {
        const Group& group = groups_[first_group + i % groups];
        const int head = i / groups;
        with_cache([&](auto kept) { attend_group<decltype(kept)>(layer, group, head, thread); });
    });
    auto add = [&](Stacked which, int panel, int t, v16f first, v16f last) {
        extend(index, which, panel, t += first_token, first, last);
        const size_t at = t * hidden_ + panel * PANEL;
        if (layer.attention_after.size()) return D::keep(&added_[at], first), D::keep(&added_[at + LANES], last);
        join(&x_[at], first);
        join(&x_[at + LANES], last);
    };
    auto norm_and_add = [&](const Buffer<stored>& weight, const Linear<D>* next) {
        if (weight.size()) share(place, tokens, next, [&](int t) {
            stored *added = &added_[(first_token + t) * hidden_], *x = &x_[(first_token + t) * hidden_];
            norm(added, weight.data(), shape.hidden, added);
            for (int i = 0; i < shape.hidden; i += LANES) join(x + i, D::wide(added + i));
        });
    };
    place.kind = TO_O;
    from = {attended_.data(), size_t(shape.heads) * shape.head_dim, nullptr, first_token};
    shrink(index, O, &layer.o, from, thread, place);
    in = input(place, thread, layer.o, from, tokens);
    multiply(place, layer.o, &layer.gate_up, in, tokens, [&](int panel, int t, v16f first, v16f last) { add(O, panel, t, first, last); });
    norm_and_add(layer.attention_after, &layer.gate_up);
    place.kind = TO_GATE_UP;
    from = {x_.data(), hidden_, by(layer.mlp_norm), first_token};
    shrink(index, GATE_UP, &layer.gate_up, from, thread, place);
    in = input(place, thread, layer.gate_up, from, tokens);
    multiply(place, layer.gate_up, &layer.down, in, tokens, [&](int panel, int t, v16f gate, v16f up) {
        extend(index, GATE_UP, panel, t += first_token, gate, up);
        D::keep(&gated_[t * inner_ + panel * LANES], D::rounded(activated(shape.activation, gate)) * up);
    });
    place.kind = TO_DOWN;
    from = {gated_.data(), inner_, nullptr, first_token};
    shrink(index, DOWN, &layer.down, from, thread, place);
    in = input(place, thread, layer.down, from, tokens);
    multiply(place, layer.down, then, in, tokens, [&](int panel, int t, v16f first, v16f last) { add(DOWN, panel, t, first, last); });
    norm_and_add(layer.mlp_after, then);
}

// Adds to the residual stream.
template <class D> void Transformer<D>::join(stored* x, v16f value) const {
    D::keep(x, D::wide(x) + (shape.residual_scale ? D::rounded(value * shape.residual_scale) : value));
}

// Every thread norms and quantises few tokens itself, which is cheaper than a phase.
template <class D> Input<D> Transformer<D>::input(Place& place, int thread, const Linear<D>& layer, const Activations& from, int tokens) {
    const bool dealt = tokens >= DEALT && threads_ > 1 && (from.norm || layer.blocks());
    const int whose = dealt ? 0 : thread;
    stored* normed = normed_[whose].data();
    const stored* rows = from.values + from.first * from.stride;
    const Input<D> made{from.norm ? normed : rows, from.norm ? hidden_ : from.stride, groups8_[whose].data(), size_t(tokens)};
    auto make = [&](int t) {
        if (from.norm) norm(rows + t * from.stride, from.norm->data(), shape.hidden, normed + t * hidden_);
        if (layer.blocks()) quantise<D>(made.values + t * made.stride, layer.inputs(), groups8_[whose].data() + t, tokens);
    };
    if (dealt) share(place, tokens, &layer, make);
    else if ((place.claimed = claim(place, layer.panels(), PANELS)) < layer.panels()) {  // else others may be done with these rows
        const Timer timer(place, INPUT);
        for (int t = 0; t < tokens; t++) make(t);
    }
    return made;
}

template <class D> void Transformer<D>::norm(const stored* from, const stored* weight, int width, stored* to) const {
    if (shape.layer_norm) return layer_norm(from, weight, width, to);
    v16f squares{};
    for (int i = 0; i < width; i += LANES) squares = fused(D::wide(from + i), D::wide(from + i), squares);
    const v16f factor = all(1.0f / std::sqrt(sum(squares) / width + shape.epsilon));
    if (shape.rounds_once)
        for (int i = 0; i < width; i += LANES) D::keep(to + i, (D::wide(weight + i) + shape.norm_offset) * (D::wide(from + i) * factor));
    else
        for (int i = 0; i < width; i += LANES) D::keep(to + i, D::wide(weight + i) * D::rounded(D::wide(from + i) * factor));
}

template <class D> void Transformer<D>::layer_norm(const stored* from, const stored* weight, int width, stored* to) const {
    v16f total{}, squares{};
    for (int i = 0; i < width; i += LANES) total += D::wide(from + i);
    const v16f mean = all(sum(total) / width);
    for (int i = 0; i < width; i += LANES) squares = fused(D::wide(from + i) - mean, D::wide(from + i) - mean, squares);
    const v16f factor = all(1.0f / std::sqrt(sum(squares) / width + shape.epsilon));
    for (int i = 0; i < width; i += LANES) D::keep(to + i, (D::wide(from + i) - mean) * factor * D::wide(weight + i) + D::wide(weight + width + i));
}

// Rotates queries and keys (heads from `heads` on) by position; stores keys and values in the cache.
template <class D> void Transformer<D>::rotate(Layer& layer, int token, int head) {
    const int dim = shape.head_dim, half = layer.turned, position = step_.positions[token];
    stored* x = &qkv_[token * wide_ + size_t(head) * dim];
    const bool is_key = head >= shape.heads;
    const Buffer<stored>& weight = is_key ? layer.k_norm : layer.q_norm;
    if (weight.size() && !shape.row_norms) norm(x, weight.data(), dim, x);
    const float *cosines = layer.cosines + size_t(position) * half, *sines = layer.sines + size_t(position) * half;
    auto product = [&](v16f value, v16f by) { return shape.wide_rope ? value * by : D::rounded(value * by); };
    for (int i = 0; i < half; i += LANES) {
        const int lanes = std::min(LANES, half - i);  // fewer at the end of heads like 48 or 80 wide
        const auto turn = [&](stored* near, stored* far, v16f cosine, v16f sine) {
            const v16f a = D::wide(near), b = D::wide(far);
            D::keep(near, product(a, cosine) + product(-b, sine));
            D::keep(far, product(b, cosine) + product(a, sine));
        };
        if (lanes == LANES) {
            turn(x + i, x + half + i, load<v16f>(cosines + i), load<v16f>(sines + i));
            continue;
        }
        stored near[LANES] = {}, far[LANES] = {};
        v16f cosine{}, sine{};
        std::memcpy(near, x + i, lanes * sizeof(stored));
        std::memcpy(far, x + half + i, lanes * sizeof(stored));
        std::memcpy(&cosine, cosines + i, lanes * sizeof(float));
        std::memcpy(&sine, sines + i, lanes * sizeof(float));
        turn(near, far, cosine, sine);
        std::memcpy(x + i, near, lanes * sizeof(stored));
        std::memcpy(x + half + i, far, lanes * sizeof(stored));
    }
    if (!is_key) return;
    const stored* value = x + size_t(shape.kv_heads) * dim;
    with_cache([&](auto kept) { layer.cache->template write<decltype(kept)>(step_.slots[token], head - shape.heads, position, x, value); });
}

// Few tokens are dealt singly, to busy all threads, more by as many as fill passes over keys and values with their queries.
template <class D> void Transformer<D>::group(int first, int end) {
    const size_t others = groups_.size();
    const int items = (end - first) * shape.kv_heads, full = QUERIES / std::gcd(QUERIES, shape.heads / shape.kv_heads);
    const int most = items < 4 * threads_ ? 1 : std::clamp(items / (6 * threads_), full, QUERIES) / full * full;
    for (int t = first; t < end; t++) {
        bool joins = groups_.size() > others && groups_.back().tokens < most && step_.slots[t] == step_.slots[t - 1];
        if (joins) groups_.back().tokens++;
        else groups_.push_back({t, 1});
    }
}

template <class D> template <class K> void Transformer<D>::attend_group(Layer& layer, const Group& group, int head, int thread) {
    const int dim = shape.head_dim, shared = shape.heads / shape.kv_heads;
    Query<K> queries[QUERIES];
    int count = 0;
    for (int i = 0; i < group.tokens * shared; i++) {
        const int token = group.first + i % group.tokens, query = head * shared + i / group.tokens;
        queries[count++] = {&qkv_[token * wide_ + size_t(query) * dim], &attended_[(size_t(token) * shape.heads + query) * dim],
                            layer.window ? std::max(0, step_.positions[token] - layer.window + 1) : 0, step_.positions[token]};
        if (count == QUERIES || i + 1 == group.tokens * shared) {
            attend<K>({*layer.cache, step_.slots[token], head, dim, 0, 0, 0, 0, shape.attention_cap, i >= QUERIES}, shape.scale, queries, count, scores_[thread]);
            count = 0;
        }
    }
}

// Logits scaled and capped, rounded after each operation as in transformers; unused outputs stay -inf.
template <class D> v16f Transformer<D>::final_logits(v16f value) const {
    if (shape.logit_scale) value = D::rounded(value * shape.logit_scale);
    if (!shape.logit_cap) return value;
    const v16f capped = D::rounded(D::rounded(hyperbolic_tangent(D::rounded(value / shape.logit_cap))) * shape.logit_cap);
    return select(value == v16f{} - INFINITY, value, capped);
}

template <class D> void Transformer<D>::choose(int thread, int panel, int wanted, v16f first, v16f last) {
    Running& best = running_[thread][wanted];
    const v16i lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int part = 0; part < 2; part++) {
        v16f value = final_logits(part ? last : first);
        best.take(value, lanes + (panel * PANEL + part * LANES));
        if (step_.logits) {
            int at = panel * PANEL + part * LANES, room = std::min(LANES, shape.outputs - at);
            float* to = step_.logits + size_t(wanted) * shape.outputs + at;
            if (room == LANES) store(to, value);  // a copy of known size is one instruction
            else if (room > 0) std::memcpy(to, &value, room * sizeof(float));
        }
    }
}

template <class D> void Transformer<D>::settle() {
    for (int wanted = 0; wanted < step_.count; wanted++) {
        float best = -INFINITY;
        int32_t token = 0;
        bool nan = false;
        for (auto& running : running_) running[wanted].end(best, token, nan);
        step_.best[wanted] = {token, !nan && std::isfinite(best)};
    }
}

}  // namespace tandem
