// A whole decoder-only transformer behind a C interface: token ids and page tables in, KV into the pool, logits out.
//
// Activations are float32 throughout. One call is one engine step; it runs on `threads` threads that share every operation.
#include <memory>

#include "attention.h"
#include "team.h"

namespace kvr {

extern "C" {

// Mirrored by services/engine/model/native/binding.py: keep the order.
struct KvrConfig {
    int32_t layers, hidden, inner, query_heads, kv_heads, head_dim, max_positions;
    int32_t gelu;  // the gate is gelu (tanh) instead of silu
    float norm_epsilon;
    float query_scale;
    float embedding_scale;
    int32_t threads;
};

struct KvrStep {
    int32_t tokens, spans, samples;
    const int32_t* token_ids;    // [tokens]
    const int32_t* starts;       // [spans] absolute position of a span's first token
    const int32_t* counts;       // [spans] tokens of a span
    const int64_t* table_starts; // [spans] where its page table begins in `pages`
    const int32_t* pages;
    const int32_t* sample_rows;  // [samples] rows whose logits are wanted
    float* logits;               // [samples, logits_stride]
    int64_t logits_stride;
    char* pool;
    int32_t page_size;
    int32_t pool_bf16;
};

}  // extern "C"

namespace {

constexpr size_t kFloat = sizeof(float);

long padded(long columns) { return (columns + kPanel - 1) / kPanel * kPanel; }

using Gain = std::vector<float>;  // of a norm; empty where a layer has none

enum Which { kQkv = 0, kOutput = 1, kGateUp = 2, kDown = 3, kLinears = 4 };
enum WhichNorm { kInput = 0, kQuery = 1, kKey = 2, kMlp = 3, kAfterAttention = 4, kAfterMlp = 5, kNorms = 6 };

struct Layer {
    Linear linears[kLinears];
    Gain norms[kNorms];
    int window = 0;
    const float* rope = nullptr;  // [2, max_positions, head_dim]: cosines, sines; the caller's
};

void normalize(const float* x, const float* gain, int size, float epsilon, float* y) {
    F squares = splat(0.0f);
    for (int i = 0; i < size; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
    const F scale = splat(1.0f / std::sqrt(sum(squares) / (float)size + epsilon));
    for (int i = 0; i < size; i += kLanes) store(y + i, load(x + i) * scale * load(gain + i));
}

struct Token {
    int32_t position, page, slot;
};

// Some tokens of a span, from `offset` on, and some of its KV heads.
struct Task {
    int32_t span, row, offset, tokens, head, heads;
};

class Model {
  public:
    explicit Model(const KvrConfig& config) : c(config), layers_(config.layers), team_(config.threads), scratch_(config.threads) {}

    bool forward(const KvrStep& step) {
        if (!prepare(step)) return false;
        team_.begin();
        embed(step);
        for (int l = 0; l < c.layers; ++l) layer(step, l);
        for (long i = 0; i < step.samples; ++i)
            normalize(row(hidden_, step.sample_rows[i], stride_hidden_), final_norm_.data(), c.hidden, c.norm_epsilon, row(normed_, i, stride_hidden_));
        apply(head_, normed_, stride_hidden_, step.samples, Finish::kStore, step.logits, step.logits_stride);
        team_.end();
        return true;
    }

    const KvrConfig c;
    std::vector<Layer> layers_;
    Linear head_;
    Gain final_norm_;
    const void* embedding_ = nullptr;  // [vocab, hidden], the caller's
    bool embedding_bf16_ = false;

  private:
    struct ThreadScratch {
        Buffer panel;
        AttentionScratch attention;
    };

    int query_size() const { return c.query_heads * c.head_dim; }
    int kv_size() const { return c.kv_heads * c.head_dim; }
    int group() const { return c.query_heads / c.kv_heads; }
    static float* row(const Buffer& buffer, long index, long stride) { return buffer.as<float>() + index * stride; }

    // Room for the step, where its tokens go, and who attends to what. False when there is no memory.
    bool prepare(const KvrStep& step) {
        const long rows = std::max(step.tokens, step.samples);
        stride_hidden_ = padded(c.hidden), stride_qkv_ = padded(query_size() + 2 * kv_size());
        stride_out_ = padded(query_size()), stride_inner_ = padded(c.inner);
        const long deepest = std::max({c.hidden, query_size(), c.inner});
        bool ok = hidden_.reserve(rows * stride_hidden_ * kFloat) && normed_.reserve(rows * stride_hidden_ * kFloat) &&
                  qkv_.reserve(rows * stride_qkv_ * kFloat) && attended_.reserve(rows * stride_out_ * kFloat) &&
                  inner_.reserve(rows * stride_inner_ * kFloat) && bytes_.reserve(rows * (deepest + kQuad)) && scales_.reserve(rows * kFloat);
        for (auto& scratch : scratch_) ok = ok && scratch.panel.reserve(2 * deepest * kPanel * kFloat) && scratch.attention.reserve(c.head_dim);
        if (!ok) return false;
        pool_ = {step.pool, c.layers, step.page_size, c.kv_heads, c.head_dim, step.pool_bf16 != 0, __builtin_ctz(step.page_size)};
        tokens_.clear(), tasks_.clear();
        const int tile = std::max(1, kQueryRows / group());
        for (int s = 0; s < step.spans; ++s) {
            const int first_row = (int)tokens_.size(), count = step.counts[s];
            const int32_t* pages = step.pages + step.table_starts[s];
            for (int i = 0; i < count; ++i) {
                const int position = step.starts[s] + i;
                tokens_.push_back({position, pages[position / step.page_size], position % step.page_size});
            }
            // Few rows are bound by memory: all heads in one pass read the pages once and in order, if every thread has a sequence.
            const bool together = count * c.query_heads <= kQueryRows && step.spans >= team_.size();
            const int heads = together ? c.kv_heads : 1;
            for (int offset = 0; offset < count; offset += tile)
                for (int h = 0; h < c.kv_heads; h += heads) tasks_.push_back({s, first_row + offset, offset, std::min(tile, count - offset), h, heads});
        }
        return true;
    }

    // body(row) for every row; few rows are not worth sharing.
    template <typename Body>
    void each_row(long rows, const Body& body) {
        team_.split(rows, rows < 16 ? 1 : 8 * team_.size(), [&](long begin, long end, int) {
            for (long r = begin; r < end; ++r) body(r);
        });
    }

    void embed(const KvrStep& step) {
        const F scale = splat(c.embedding_scale);
        each_row(step.tokens, [&](long r) {
            const long source = (long)step.token_ids[r] * c.hidden;
            float* out = row(hidden_, r, stride_hidden_);
            for (int i = 0; i < c.hidden; i += kLanes) {
                F x = embedding_bf16_ ? load_bf16((const uint16_t*)embedding_ + source + i) : load((const float*)embedding_ + source + i);
                store(out + i, x * scale);
            }
        });
    }

    void layer(const KvrStep& step, int number) {
        const Layer& layer = layers_[number];
        const long rows = step.tokens;
        norm_rows(layer.norms[kInput], rows);
        apply(layer.linears[kQkv], normed_, stride_hidden_, rows, Finish::kStore, qkv_.as<float>(), stride_qkv_);
        each_row(rows, [&](long r) { rotate_and_store(layer, number, r); });
        attention(step, layer, number);
        add_to_hidden(layer.linears[kOutput], layer.norms[kAfterAttention], attended_, stride_out_, rows);
        norm_rows(layer.norms[kMlp], rows);
        const Finish gate = c.gelu ? Finish::kGeluMul : Finish::kSiluMul;
        apply(layer.linears[kGateUp], normed_, stride_hidden_, rows, gate, inner_.as<float>(), stride_inner_);
        add_to_hidden(layer.linears[kDown], layer.norms[kAfterMlp], inner_, stride_inner_, rows);
    }

    void norm_rows(const Gain& gain, long rows) {
        each_row(rows, [&](long r) {
            normalize(row(hidden_, r, stride_hidden_), gain.data(), c.hidden, c.norm_epsilon, row(normed_, r, stride_hidden_));
        });
    }

    // hidden += norm(linear(x)), the norm only where the layer has one.
    void add_to_hidden(const Linear& linear, const Gain& after, const Buffer& x, long stride, long rows) {
        if (after.empty()) return apply(linear, x, stride, rows, Finish::kAdd, hidden_.as<float>(), stride_hidden_);
        apply(linear, x, stride, rows, Finish::kStore, normed_.as<float>(), stride_hidden_);
        each_row(rows, [&](long r) {
            float* from = row(normed_, r, stride_hidden_);
            float* out = row(hidden_, r, stride_hidden_);
            normalize(from, after.data(), c.hidden, c.norm_epsilon, from);
            for (int i = 0; i < c.hidden; i += kLanes) store(out + i, load(out + i) + load(from + i));
        });
    }

    // Inputs are used up: int8 linears rotate them in place.
    void apply(const Linear& linear, const Buffer& x, long stride, long rows, Finish how, float* y, long ldy) {
        const Inputs in{x.as<float>(), stride, bytes_.as<uint8_t>(), scales_.as<float>()};
        if (linear.kind == Kind::kInt8)
            team_.split(rows, rows < 16 ? 1 : 8 * team_.size(), [&](long begin, long end, int) {
                quantize(linear, x.as<float>(), stride, begin, end, bytes_.as<uint8_t>(), scales_.as<float>());
            });
        const int step = linear.paired ? 2 : 1;
        const long blocks = (rows + rows_together(linear) - 1) / rows_together(linear);
        for (long b = 0; b < blocks; ++b) {
            const long first = rows * b / blocks, last = rows * (b + 1) / blocks;
            // Long units when there are few rows: a thread then reads the weights in long runs.
            const long pieces = team_.size() == 1 ? 1 : (last - first < 16 ? 8 : 16) * team_.size();
            team_.split(linear.panels() / step, pieces, [&](long begin, long end, int thread) {
                run_panels(linear, in, first, last, how, y, ldy, begin * step, end * step, scratch_[thread].panel.as<float>());
            });
        }
    }

    void rotate_and_store(const Layer& layer, int number, long r) {
        const Token token = tokens_[r];
        const int dim = c.head_dim, half = dim / 2;
        float* heads = row(qkv_, r, stride_qkv_);
        const float* cosines = layer.rope + (long)token.position * dim;
        const float* sines = cosines + (long)c.max_positions * dim;
        for (int h = 0; h < c.query_heads + c.kv_heads; ++h) {
            const bool query = h < c.query_heads;
            float* x = heads + h * dim;
            const Gain& gain = layer.norms[query ? kQuery : kKey];
            if (!gain.empty()) normalize(x, gain.data(), dim, c.norm_epsilon, x);
            const float scale = query ? c.query_scale : 1.0f;
            for (int i = 0; i < half; ++i) {
                const float a = x[i], b = x[i + half];
                x[i] = std::fma(a, cosines[i], -(b * sines[i])) * scale;
                x[i + half] = std::fma(b, cosines[i + half], a * sines[i + half]) * scale;
            }
        }
        for (int h = 0; h < c.kv_heads; ++h) {
            store_row(pool_, pool_.at(token.page, number, 0, token.slot, h), heads + query_size() + h * dim);
            store_row(pool_, pool_.at(token.page, number, 1, token.slot, h), heads + query_size() + kv_size() + h * dim);
        }
    }

    void attention(const KvrStep& step, const Layer& layer, int number) {
        const long tasks = (long)tasks_.size();
        team_.each(tasks, [&](long t, int thread) {
            const Task& task = tasks_[tasks - 1 - t];  // a thread's dear tasks, a prompt's last tokens, come first: others can take the rest
            const Pass pass{step.pages + step.table_starts[task.span], number, task.head, task.heads, group(), task.tokens, layer.window,
                            (long)step.starts[task.span] + task.offset};
            const long column = (long)task.head * group() * c.head_dim;
            attend(pool_, pass, row(qkv_, task.row, stride_qkv_) + column, stride_qkv_, row(attended_, task.row, stride_out_) + column, stride_out_,
                   scratch_[thread].attention);
        });
    }

    Team team_;
    std::vector<ThreadScratch> scratch_;
    Buffer hidden_, normed_, qkv_, attended_, inner_, bytes_, scales_;
    long stride_hidden_ = 0, stride_qkv_ = 0, stride_out_ = 0, stride_inner_ = 0;
    Pool pool_{};
    std::vector<Token> tokens_;
    std::vector<Task> tasks_;
};

}  // namespace

extern "C" {

const char* kvr_instruction_set() {
#if defined(KVR_VNNI)
    return "avx512-vnni";
#elif defined(KVR_AVX512)
    return "avx512";
#elif defined(KVR_AVX2)
    return "avx2";
#else
    return "portable";
#endif
}

// Columns that rows of logits must have room for.
int64_t kvr_padded(int64_t columns) { return padded(columns); }

// NULL when there is no memory. The config must have been checked: hidden, inner and head_dim are multiples of 16, counts are positive.
void* kvr_create(const KvrConfig* config) {
    try {
        return new Model(*config);
    } catch (...) {
        return nullptr;
    }
}

void kvr_destroy(void* model) { delete static_cast<Model*>(model); }

// `layer` -1: the head. `scales` [columns] and `block` only for int8, `bias` may be NULL. 0 when there is no memory. The source may go afterwards.
int kvr_set_linear(void* model, int layer, int which, int kind, const void* weights, const float* scales, const float* bias, int columns, int depth,
                   int block) {
    try {
        Model& m = *static_cast<Model*>(model);
        Linear& linear = layer < 0 ? m.head_ : m.layers_[layer].linears[which];
        return linear.pack(static_cast<Kind>(kind), weights, scales, bias, columns, depth, block, layer >= 0 && which == kGateUp);
    } catch (...) {
        return 0;
    }
}

// `layer` -1: the final norm. 0 when there is no memory.
int kvr_set_norm(void* model, int layer, int which, const float* gain, int size) {
    try {
        Model& m = *static_cast<Model*>(model);
        (layer < 0 ? m.final_norm_ : m.layers_[layer].norms[which]).assign(gain, gain + size);
        return 1;
    } catch (...) {
        return 0;
    }
}

// `rope` [2, max_positions, head_dim] must outlive the model.
void kvr_set_layer(void* model, int layer, int window, const float* rope) {
    Model& m = *static_cast<Model*>(model);
    m.layers_[layer].window = window;
    m.layers_[layer].rope = rope;
}

// `table` [vocab, hidden] must outlive the model.
void kvr_set_embedding(void* model, const void* table, int bf16) {
    Model& m = *static_cast<Model*>(model);
    m.embedding_ = table;
    m.embedding_bf16_ = bf16 != 0;
}

// 0 when there is no memory for the step.
int kvr_forward(void* model, const KvrStep* step) {
    try {
        return static_cast<Model*>(model)->forward(*step);
    } catch (...) {
        return 0;
    }
}

}  // extern "C"

}  // namespace kvr
