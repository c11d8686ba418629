// A whole decoder-only transformer behind a C interface: token ids and page tables in, KV into the pool, logits out.
//
// Activations are float32 throughout. One call is one engine step; it runs on `threads` threads that share every operation.
#include <condition_variable>
#include <memory>
#include <mutex>

#include "attention.h"

namespace kvr {

extern "C" {

// Mirrored by services/engine/native/binding.py: keep the order.
struct KvrConfig {
    int32_t layers, hidden, inner, query_heads, kv_heads, head_dim, vocab, max_positions;
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

struct Norm {
    std::vector<float> gain;
    bool present() const { return !gain.empty(); }
};

enum Which { kQkv = 0, kOutput = 1, kGateUp = 2, kDown = 3, kLinears = 4 };
enum WhichNorm { kInput = 0, kQuery = 1, kKey = 2, kMlp = 3, kAfterAttention = 4, kAfterMlp = 5, kNorms = 6 };

struct Layer {
    Linear linears[kLinears];
    Norm norms[kNorms];
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
    explicit Model(const KvrConfig& config) : c(config), layers_(config.layers), barrier_(config.threads), scratch_(config.threads) {
        for (auto& scratch : scratch_) scratch = std::make_unique<ThreadScratch>();
        for (int id = 1; id < c.threads; ++id) threads_.emplace_back([this, id] { serve(id); });
    }
    ~Model() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
        }
        wake_.notify_all();
        for (auto& thread : threads_) thread.join();
    }

    bool forward(const KvrStep& step) {
        if (!prepare(step)) return false;
        step_ = &step;
        if (c.threads > 1) {
            {
                std::lock_guard<std::mutex> lock(mutex_);
                ++round_;
            }
            wake_.notify_all();
        }
        run({0, c.threads, &barrier_});
        return true;
    }

    const KvrConfig c;
    std::vector<Layer> layers_;
    Linear head_;
    Norm final_norm_;
    const void* embedding_ = nullptr;  // [vocab, hidden], the caller's
    bool embedding_bf16_ = false;

  private:
    struct ThreadScratch {
        Buffer panel;
        AttentionScratch attention;
    };

    void serve(int id) {
        for (long seen = 0;;) {
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return stopping_ || round_ != seen; });
                if (stopping_) return;
                seen = round_;
            }
            run({id, c.threads, &barrier_});
        }
    }

    int query_size() const { return c.query_heads * c.head_dim; }
    int kv_size() const { return c.kv_heads * c.head_dim; }

    bool prepare(const KvrStep& step) {
        const long rows = step.tokens;
        stride_hidden_ = padded(c.hidden), stride_qkv_ = padded(query_size() + 2 * kv_size());
        stride_out_ = padded(query_size()), stride_inner_ = padded(c.inner);
        const long widest = std::max({stride_hidden_, stride_out_, stride_inner_});
        bool ok = hidden_.reserve(rows * stride_hidden_ * kFloat) && normed_.reserve(rows * stride_hidden_ * kFloat) &&
                  qkv_.reserve(rows * stride_qkv_ * kFloat) && attended_.reserve(rows * stride_out_ * kFloat) &&
                  inner_.reserve(rows * stride_inner_ * kFloat) && bytes_.reserve(rows * (widest + 1024)) &&
                  scales_.reserve(rows * (widest / kQuad + 1) * kFloat);
        const long deepest = std::max({c.hidden, query_size(), c.inner});
        for (auto& scratch : scratch_) ok = ok && scratch->panel.reserve(2 * deepest * kPanel * kFloat) && scratch->attention.reserve(c.head_dim);
        if (!ok) return false;
        const int group = c.query_heads / c.kv_heads;
        const int tile = std::max(1, kQueryRows / group);
        pool_ = {step.pool, c.layers, step.page_size, c.kv_heads, c.head_dim, step.pool_bf16 != 0, __builtin_ctz(step.page_size)};
        tokens_.clear(), tasks_.clear();
        for (int s = 0; s < step.spans; ++s) {
            const int first_row = (int)tokens_.size();
            const int32_t* pages = step.pages + step.table_starts[s];
            for (int i = 0; i < step.counts[s]; ++i) {
                const int position = step.starts[s] + i;
                tokens_.push_back({position, pages[position / step.page_size], position % step.page_size});
            }
            // Few rows are bound by memory: all heads in one pass read the pages once and in order, if every thread has a sequence.
            const bool together = step.counts[s] * c.query_heads <= kQueryRows && step.spans >= c.threads;
            const int heads = together ? c.kv_heads : 1;
            for (int offset = 0; offset < step.counts[s]; offset += tile)
                for (int h = 0; h < c.kv_heads; h += heads)
                    tasks_.push_back({s, first_row + offset, offset, std::min(tile, step.counts[s] - offset), h, heads});
        }
        return true;
    }

    void run(const Worker& worker) {
        const KvrStep& step = *step_;
        embed(step, worker);
        for (int l = 0; l < c.layers; ++l) layer(l, worker);
        for (long i = worker.id; i < step.samples; i += worker.count)
            normalize(row(hidden_, step.sample_rows[i], stride_hidden_), final_norm_.gain.data(), c.hidden, c.norm_epsilon,
                      row(normed_, i, stride_hidden_));
        worker.sync();
        apply(head_, normed_, stride_hidden_, step.samples, Finish::kStore, step.logits, step.logits_stride, worker);
        worker.sync();
    }

    static float* row(const Buffer& buffer, long index, long stride) { return buffer.as<float>() + index * stride; }

    void embed(const KvrStep& step, const Worker& worker) {
        long begin, end;
        worker.share(step.tokens, &begin, &end);
        const F scale = splat(c.embedding_scale);
        for (long r = begin; r < end; ++r) {
            const long source = (long)step.token_ids[r] * c.hidden;
            float* out = row(hidden_, r, stride_hidden_);
            for (int i = 0; i < c.hidden; i += kLanes) {
                F x = embedding_bf16_ ? load_bf16((const uint16_t*)embedding_ + source + i) : load((const float*)embedding_ + source + i);
                store(out + i, x * scale);
            }
        }
        worker.sync();
    }

    void layer(int number, const Worker& worker) {
        Layer& layer = layers_[number];
        const long rows = (long)tokens_.size();
        norm_rows(layer.norms[kInput], hidden_, normed_, rows, worker);
        apply(layer.linears[kQkv], normed_, stride_hidden_, rows, Finish::kStore, qkv_.as<float>(), stride_qkv_, worker);
        worker.sync();
        rotate_and_store(layer, number, worker);
        worker.sync();
        attention(layer, number, worker);
        worker.sync();
        add_to_hidden(layer.linears[kOutput], layer.norms[kAfterAttention], attended_, stride_out_, rows, worker);
        norm_rows(layer.norms[kMlp], hidden_, normed_, rows, worker);
        apply(layer.linears[kGateUp], normed_, stride_hidden_, rows, c.gelu ? Finish::kGeluMul : Finish::kSiluMul, inner_.as<float>(),
              stride_inner_, worker);
        worker.sync();
        add_to_hidden(layer.linears[kDown], layer.norms[kAfterMlp], inner_, stride_inner_, rows, worker);
    }

    void norm_rows(const Norm& norm, const Buffer& from, const Buffer& to, long rows, const Worker& worker) {
        long begin, end;
        worker.share(rows, &begin, &end);
        for (long r = begin; r < end; ++r)
            normalize(row(from, r, stride_hidden_), norm.gain.data(), c.hidden, c.norm_epsilon, row(to, r, stride_hidden_));
        worker.sync();
    }

    // hidden += norm(linear(x)), the norm only where the layer has one.
    void add_to_hidden(const Linear& linear, const Norm& after, const Buffer& x, long stride, long rows, const Worker& worker) {
        apply(linear, x, stride, rows, after.present() ? Finish::kStore : Finish::kAdd, (after.present() ? normed_ : hidden_).as<float>(),
              stride_hidden_, worker);
        worker.sync();
        if (!after.present()) return;
        long begin, end;
        worker.share(rows, &begin, &end);
        for (long r = begin; r < end; ++r) {
            float* x_row = row(normed_, r, stride_hidden_);
            float* out = row(hidden_, r, stride_hidden_);
            normalize(x_row, after.gain.data(), c.hidden, c.norm_epsilon, x_row);
            for (int i = 0; i < c.hidden; i += kLanes) store(out + i, load(out + i) + load(x_row + i));
        }
        worker.sync();
    }

    void apply(const Linear& linear, const Buffer& x, long stride, long rows, Finish how, float* y, long ldy, const Worker& worker) {
        Inputs in{x.as<float>(), stride, bytes_.as<uint8_t>(), scales_.as<float>()};
        if (linear.kind == Kind::kInt8) {
            quantize(in.rows, stride, rows, linear.depth, linear.group, bytes_.as<uint8_t>(), scales_.as<float>(), worker);
            worker.sync();
        }
        run_linear(linear, in, rows, how, y, ldy, scratch_[worker.id]->panel.as<float>(), worker);
    }

    void rotate_and_store(const Layer& layer, int number, const Worker& worker) {
        long begin, end;
        worker.share((long)tokens_.size(), &begin, &end);
        const int dim = c.head_dim, half = dim / 2;
        for (long r = begin; r < end; ++r) {
            const Token token = tokens_[r];
            float* heads = row(qkv_, r, stride_qkv_);
            const float* cosines = layer.rope + (long)token.position * dim;
            const float* sines = cosines + (long)c.max_positions * dim;
            for (int h = 0; h < c.query_heads + c.kv_heads; ++h) {
                const bool query = h < c.query_heads;
                float* x = heads + h * dim;
                const Norm& norm = layer.norms[query ? kQuery : kKey];
                if (norm.present()) normalize(x, norm.gain.data(), dim, c.norm_epsilon, x);
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
    }

    void attention(const Layer& layer, int number, const Worker& worker) {
        const int group = c.query_heads / c.kv_heads;
        AttentionScratch& scratch = scratch_[worker.id]->attention;
        // Later tiles of a prompt see more keys: dealing tasks in turn evens them out.
        for (size_t t = worker.id; t < tasks_.size(); t += worker.count) {
            const Task& task = tasks_[t];
            const Pass pass{step_->pages + step_->table_starts[task.span], number, task.head, task.heads, group, task.tokens, layer.window,
                            (long)step_->starts[task.span] + task.offset};
            const long column = (long)task.head * group * c.head_dim;
            attend(pool_, pass, row(qkv_, task.row, stride_qkv_) + column, stride_qkv_, row(attended_, task.row, stride_out_) + column, stride_out_,
                   scratch);
        }
    }

    Barrier barrier_;
    std::vector<std::unique_ptr<ThreadScratch>> scratch_;
    Buffer hidden_, normed_, qkv_, attended_, inner_, bytes_, scales_;
    long stride_hidden_ = 0, stride_qkv_ = 0, stride_out_ = 0, stride_inner_ = 0;
    Pool pool_{};
    std::vector<Token> tokens_;
    std::vector<Task> tasks_;
    const KvrStep* step_ = nullptr;

    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable wake_;
    long round_ = 0;
    bool stopping_ = false;
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

// `layer` -1: the head. `scales` and `group` only for int8, `bias` may be NULL. 0 when there is no memory. The source may go afterwards.
int kvr_set_linear(void* model, int layer, int which, int kind, const void* weights, const float* scales, const float* bias, int columns, int depth,
                   int group) {
    try {
        Model& m = *static_cast<Model*>(model);
        Linear& linear = layer < 0 ? m.head_ : m.layers_[layer].linears[which];
        return linear.pack(static_cast<Kind>(kind), weights, scales, bias, columns, depth, group, layer >= 0 && which == kGateUp);
    } catch (...) {
        return 0;
    }
}

// `layer` -1: the final norm.
void kvr_set_norm(void* model, int layer, int which, const float* gain, int size) {
    Model& m = *static_cast<Model*>(model);
    (layer < 0 ? m.final_norm_ : m.layers_[layer].norms[which]).gain.assign(gain, gain + size);
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
int kvr_forward(void* model, const KvrStep* step) { return static_cast<Model*>(model)->forward(*step); }

}  // extern "C"

}  // namespace kvr
