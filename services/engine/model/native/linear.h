// y = x W^T with weights packed once into panels of columns: float32, bfloat16 (widened as it is read) or int8.
//
// Each output element is one chain of fused multiply-adds over the inputs in ascending order (int8: an exact integer sum),
// whatever the number of rows, the tile they fall in, or the thread. Tiles only decide how many such chains run side by side.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "vector.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kvr {

#if defined(KVR_AVX512)
constexpr int kPanelVectors = 2;  // 12 rows x 2 vectors of accumulators, 2 of weights, 1 of inputs: 27 of 32 registers
constexpr int kTileRows = 12;
constexpr int kInt8Rows = 8;  // with more, the rows' addresses no longer fit the general registers
#else
constexpr int kPanelVectors = 1;  // AVX2: 6 rows x 2 registers, 2 of weights, 1 of inputs: 15 of 16
constexpr int kTileRows = 6;
constexpr int kInt8Rows = 4;
#endif
constexpr int kPanel = kPanelVectors * kLanes;

enum class Kind : int { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };

// Memory for weights and big buffers: zeroed, aligned, on huge pages where the system has them.
class Buffer {
  public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    Buffer(Buffer&& other) noexcept : data_(other.data_), size_(other.size_) { other.data_ = nullptr, other.size_ = 0; }
    ~Buffer() { std::free(data_); }
    // At least `bytes`; what was there is lost when it has to grow. False when there is no memory.
    bool reserve(size_t bytes) {
        if (bytes <= size_) return true;
        std::free(data_);
        data_ = nullptr, size_ = 0;
        size_t align = bytes >= (size_t)1 << 21 ? (size_t)1 << 21 : 64;
        size_t rounded = (bytes + align - 1) / align * align;
        data_ = std::aligned_alloc(align, rounded);
        if (!data_) return false;
#if defined(__linux__)
        if (align > 64) madvise(data_, rounded, MADV_HUGEPAGE);
#endif
        std::memset(data_, 0, rounded);
        size_ = rounded;
        return true;
    }
    template <typename T>
    T* as() const {
        return static_cast<T*>(data_);
    }

  private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

KVR_INLINE float widen(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

// --- float32 and bfloat16 --------------------------------------------------------------------------------------------------

// Memory to ask for while a tile is computed: `stride` bytes from `start` on for each step. Weights come from memory: tiles ask for
// the next panel while they compute this one, so that memory and multipliers work at the same time.
struct Ahead {
    const char* start;
    long stride;
    KVR_INLINE void ask(long step) const {
        __builtin_prefetch(start + step * stride, 0, 2);
        __builtin_prefetch(start + step * stride + 64, 0, 2);
    }
};
// For tiles that ask for nothing: not even a prefetch of what is there, which would cost five percent of a large product.
struct Nothing {
    explicit Nothing(Ahead) {}
    KVR_INLINE void ask(long) const {}
};

// acc[r][v] += sum over k of a[r][k] * b[k][v], k ascending. `b` has `ldb` floats a row.
template <int MR, int NV, typename Asking>
KVR_INLINE void multiply(const float* a, long lda, const float* b, long ldb, int depth, F (&acc)[MR][NV], Asking ahead) {
    for (int k = 0; k < depth; ++k) {
        F w[NV];
        ahead.ask(k);
        for (int v = 0; v < NV; ++v) w[v] = load(b + k * ldb + v * kLanes);
        for (int r = 0; r < MR; ++r) {
            F x = splat(a[r * lda + k]);
            for (int v = 0; v < NV; ++v) acc[r][v] = fma(x, w[v], acc[r][v]);
        }
    }
}

// A packed bfloat16 row of a panel: 32-bit words, word j holds column j below and column j + kPanel / 2 above.
KVR_INLINE void load_panel(const uint32_t* p, F (&w)[kPanelVectors]) {
#if defined(KVR_AVX512)
    __m512i both = _mm512_loadu_si512(p);
    w[0] = {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16))};
    w[1] = {_mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32((int)0xffff0000)))};
#elif defined(KVR_AVX2)
    __m256i both = _mm256_loadu_si256((const __m256i*)p);
    w[0] = {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32((int)0xffff0000)))};
#else
    for (int j = 0; j < kPanel / 2; ++j) {
        w[0].v[j] = widen((uint16_t)(p[j] & 0xffff));
        w[0].v[j + kPanel / 2] = widen((uint16_t)(p[j] >> 16));
    }
#endif
}

template <int MR, typename Asking>
KVR_INLINE void multiply_bf16(const float* a, long lda, const uint32_t* b, int depth, F (&acc)[MR][kPanelVectors], Asking ahead) {
    for (int k = 0; k < depth; ++k) {
        F w[kPanelVectors];
        ahead.ask(k);
        load_panel(b + k * (kPanel / 2), w);
        for (int r = 0; r < MR; ++r) {
            F x = splat(a[r * lda + k]);
            for (int v = 0; v < kPanelVectors; ++v) acc[r][v] = fma(x, w[v], acc[r][v]);
        }
    }
}

// --- int8 ------------------------------------------------------------------------------------------------------------------

// W8A8 as services/engine/model/quantization.py defines it: a token's inputs are rotated in blocks (a Hadamard transform) and get one
// scale; a weight row, rotated when it was quantized, has one too. Both lie between -127 and 127. AVX-512's dot product takes
// unsigned activations: there they are stored offset by 128, and the sum of a weight row, times 128, is taken off again. A packed
// panel: steps of kPanel columns x kQuad bytes, then kPanel int32 offsets, then kPanel float scales.
#if defined(KVR_AVX512) && defined(__AVX512VNNI__)
#define KVR_VNNI 1
#endif
#if defined(KVR_AVX512)
constexpr int kOffset = 128;
#else
constexpr int kOffset = 0;
#endif
constexpr int kQuad = 4;
constexpr int kMaxBlock = 64;

// Integer sums of 16 columns.
struct I {
#if defined(KVR_AVX512)
    __m512i v;
#elif defined(KVR_AVX2)
    __m256i a, b;
#else
    int32_t v[kLanes];
#endif
};
KVR_INLINE F finish(I x, const int32_t* offsets) {
#if defined(KVR_AVX512)
    return {_mm512_cvtepi32_ps(_mm512_add_epi32(x.v, _mm512_loadu_si512(offsets)))};
#elif defined(KVR_AVX2)
    return {_mm256_cvtepi32_ps(_mm256_add_epi32(x.a, _mm256_loadu_si256((const __m256i*)offsets))),
            _mm256_cvtepi32_ps(_mm256_add_epi32(x.b, _mm256_loadu_si256((const __m256i*)(offsets + 8))))};
#else
    return each([&](int i) { return (float)(x.v[i] + offsets[i]); });
#endif
}
// One step's weights of 16 columns, ready to be multiplied.
struct Quads {
#if defined(KVR_AVX512)
    __m512i v;
#elif defined(KVR_AVX2)
    __m256i a, b;
#else
    const int8_t* p;
#endif
};
KVR_INLINE Quads load_quads(const int8_t* p) {
#if defined(KVR_AVX512)
    return {_mm512_loadu_si512(p)};
#elif defined(KVR_AVX2)
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
#else
    return {p};
#endif
}
// sums += dot products of four inputs with four weights, for 16 columns; exact.
KVR_INLINE I dot(I sums, const uint8_t* x, Quads w) {
    int32_t four;
    std::memcpy(&four, x, 4);
#if defined(KVR_VNNI)
    return {_mm512_dpbusd_epi32(sums.v, _mm512_set1_epi32(four), w.v)};
#elif defined(KVR_AVX512)
    __m512i xs = _mm512_set1_epi32(four);
    __m512i x_even = _mm512_and_si512(xs, _mm512_set1_epi16(0x00ff)), x_odd = _mm512_srli_epi16(xs, 8);
    __m512i w_even = _mm512_srai_epi16(_mm512_slli_epi16(w.v, 8), 8), w_odd = _mm512_srai_epi16(w.v, 8);
    return {_mm512_add_epi32(sums.v, _mm512_add_epi32(_mm512_madd_epi16(x_even, w_even), _mm512_madd_epi16(x_odd, w_odd)))};
#elif defined(KVR_AVX2)
    // |w| (x sign(w)): two such products always fit 16 bits, while 255 x 127 twice would saturate.
    const __m256i xs = _mm256_set1_epi32(four), ones = _mm256_set1_epi16(1);
    const auto products = [&](__m256i ws) {
        return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(ws), _mm256_sign_epi8(xs, ws)), ones);
    };
    return {_mm256_add_epi32(sums.a, products(w.a)), _mm256_add_epi32(sums.b, products(w.b))};
#else
    for (int j = 0; j < kLanes; ++j)
        for (int i = 0; i < kQuad; ++i) sums.v[j] += (int32_t)(int8_t)x[i] * w.p[j * kQuad + i];
    return sums;
#endif
}

// acc[r][v] = integer sum * (x_scale * w_scale). `depth` is a multiple of kQuad.
template <int MR, typename Asking>
KVR_INLINE void multiply_int8(const uint8_t* x, long ldx, const float* x_scales, const int8_t* panel, int depth, F (&acc)[MR][kPanelVectors],
                              Asking ahead) {
    const int32_t* offsets = (const int32_t*)(panel + (size_t)depth * kPanel);
    const float* scales = (const float*)(offsets + kPanel);
    I sums[MR][kPanelVectors] = {};
    for (int k = 0; k < depth; k += kQuad) {
        Quads q[kPanelVectors];
        ahead.ask(k / kQuad);
        for (int v = 0; v < kPanelVectors; ++v) q[v] = load_quads(panel + k * kPanel + v * kLanes * kQuad);
        for (int r = 0; r < MR; ++r)
            for (int v = 0; v < kPanelVectors; ++v) sums[r][v] = dot(sums[r][v], x + r * ldx + k, q[v]);
    }
    for (int r = 0; r < MR; ++r)
        for (int v = 0; v < kPanelVectors; ++v) acc[r][v] = finish(sums[r][v], offsets + v * kLanes) * (splat(x_scales[r]) * load(scales + v * kLanes));
}

// One stage of the transform inside a vector: (a, b) -> (a + b, a - b) for lanes that differ in bit D.
template <int D>
KVR_INLINE F butterfly(F x) {
    alignas(64) static constexpr float signs[4][kLanes] = {
        {1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1},
        {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1},
        {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1},
        {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1},
    };
    return fma(x, load(signs[D == 1 ? 0 : D == 2 ? 1 : D == 4 ? 2 : 3]), swap_lanes<D>(x));
}

// Rotates `size` floats in place, in blocks of `block` (a power of two up to kMaxBlock that divides `size`).
inline void rotate(float* x, int size, int block) {
    if (block % kLanes) {
        for (int distance = 1; distance < block; distance *= 2)
            for (int i = 0; i < size; ++i) {
                if (i & distance) continue;
                const float a = x[i], b = x[i + distance];
                x[i] = a + b, x[i + distance] = a - b;
            }
        return;
    }
    for (int start = 0; start < size; start += block) {
        F v[kMaxBlock / kLanes];
        const int vectors = block / kLanes;
        for (int i = 0; i < vectors; ++i) v[i] = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(load(x + start + i * kLanes)))));
        for (int distance = 1; distance < vectors; distance *= 2)
            for (int i = 0; i < vectors; ++i) {
                if (i & distance) continue;
                const F a = v[i], b = v[i + distance];
                v[i] = a + b, v[i + distance] = a - b;
            }
        for (int i = 0; i < vectors; ++i) store(x + start + i * kLanes, v[i]);
    }
}

// --- a linear --------------------------------------------------------------------------------------------------------------

// What is done with a finished tile.
enum class Finish { kStore, kAdd, kSiluMul, kGeluMul };

struct Linear {
    Kind kind = Kind::kFloat32;
    int columns = 0;  // outputs, without padding
    int depth = 0;    // inputs
    int block = 1;    // inputs that are rotated together (int8)
    bool paired = false;  // even panels are gates, odd ones the matching ups: a tile ends in act(gate) * up
    Buffer weights;
    std::vector<float> bias;  // padded to whole panels, or empty

    int panels() const { return paired ? 2 * ((columns / 2 + kPanel - 1) / kPanel) : (columns + kPanel - 1) / kPanel; }
    // Bytes of a quantized row.
    int quads_depth() const { return (depth + kQuad - 1) / kQuad * kQuad; }
    size_t panel_bytes() const {
        if (kind == Kind::kInt8) return (size_t)(quads_depth() + 2 * sizeof(float)) * kPanel;
        return (size_t)depth * kPanel * (kind == Kind::kFloat32 ? 4 : 2);
    }
    // Inner steps of a tile.
    int steps() const { return kind == Kind::kInt8 ? quads_depth() / kQuad : depth; }
    const char* panel(int index) const { return weights.as<char>() + index * panel_bytes(); }
    // The output that column `j` of panel `index` is; -1 for padding.
    int column(int index, int j) const {
        if (!paired) return index * kPanel + j < columns ? index * kPanel + j : -1;
        int half = columns / 2, inner = (index / 2) * kPanel + j;
        return inner < half ? (index % 2) * half + inner : -1;
    }

    // `source` is [columns, depth] of the kind's type; `scales` (int8) [columns]. False when there is no memory.
    bool pack(Kind new_kind, const void* source, const float* scales, const float* new_bias, int new_columns, int new_depth, int new_block,
              bool new_paired) {
        kind = new_kind, columns = new_columns, depth = new_depth, block = new_block, paired = new_paired;
        if (!weights.reserve(panels() * panel_bytes())) return false;
        for (int p = 0; p < panels(); ++p) {
            for (int j = 0; j < kPanel; ++j) {
                int n = column(p, j);
                if (n < 0) continue;
                if (kind == Kind::kFloat32) {
                    float* out = (float*)panel(p) + j;
                    const float* row = (const float*)source + (size_t)n * depth;
                    for (int k = 0; k < depth; ++k) out[(size_t)k * kPanel] = row[k];
                } else if (kind == Kind::kBfloat16) {
                    uint16_t* out = (uint16_t*)panel(p) + (j % (kPanel / 2)) * 2 + j / (kPanel / 2);
                    const uint16_t* row = (const uint16_t*)source + (size_t)n * depth;
                    for (int k = 0; k < depth; ++k) out[(size_t)k * kPanel] = row[k];
                } else {
                    pack_int8(p, j, (const int8_t*)source + (size_t)n * depth, scales[n]);
                }
            }
        }
        bias.clear();
        if (new_bias) {
            bias.assign((size_t)panels() * kPanel, 0.0f);
            for (int p = 0; p < panels(); ++p)
                for (int j = 0; j < kPanel; ++j)
                    if (int n = column(p, j); n >= 0) bias[p * kPanel + j] = new_bias[n];
        }
        return true;
    }

    void pack_int8(int p, int j, const int8_t* row, float scale) {
        int8_t* out = (int8_t*)panel(p);
        int32_t* offsets = (int32_t*)(out + (size_t)quads_depth() * kPanel);
        int total = 0;
        for (int k = 0; k < depth; ++k) {
            out[(k / kQuad * kPanel + j) * kQuad + k % kQuad] = row[k];
            total += row[k];
        }
        offsets[j] = -kOffset * total;
        ((float*)(offsets + kPanel))[j] = scale;
    }
};

// The inputs of a linear: float rows, and for int8 their quantized form.
struct Inputs {
    const float* rows;
    long stride;
    const uint8_t* bytes;  // [rows, quads_depth()]
    const float* scales;   // [rows]
};

KVR_INLINE F silu(F x) { return x / (splat(1.0f) + exp(splat(0.0f) - x)); }
// 0.5 x (1 + tanh(u)) = x / (1 + e^-2u), u = sqrt(2/pi) (x + 0.044715 x^3).
KVR_INLINE F gelu_tanh(F x) {
    F u = splat(0.7978845608028654f) * fma(splat(0.044715f) * x * x, x, x);
    return x / (splat(1.0f) + exp(splat(-2.0f) * u));
}

template <int MR>
KVR_INLINE void finish_tile(const Linear& linear, int panel, const F (&acc)[MR][kPanelVectors], Finish how, float* gates, float* y, long ldy) {
    for (int r = 0; r < MR; ++r) {
        for (int v = 0; v < kPanelVectors; ++v) {
            F value = acc[r][v];
            if (!linear.bias.empty()) value = value + load(&linear.bias[panel * kPanel + v * kLanes]);
            if (how == Finish::kSiluMul || how == Finish::kGeluMul) {
                float* gate = gates + (r * kPanelVectors + v) * kLanes;
                if (panel % 2 == 0) {
                    store(gate, how == Finish::kSiluMul ? silu(value) : gelu_tanh(value));
                } else {
                    store(y + r * ldy + (panel / 2) * kPanel + v * kLanes, load(gate) * value);
                }
            } else {
                float* out = y + r * ldy + panel * kPanel + v * kLanes;
                store(out, how == Finish::kAdd ? load(out) + value : value);
            }
        }
    }
}

template <int MR, typename Asking>
void run_tile(const Linear& linear, int panel, const float* wide, const Inputs& in, long row, Ahead ahead, Finish how, float* gates, float* y,
              long ldy) {
    F acc[MR][kPanelVectors];
    for (int r = 0; r < MR; ++r)
        for (int v = 0; v < kPanelVectors; ++v) acc[r][v] = splat(0.0f);
    const char* weights = linear.panel(panel);
    const float* x = in.rows + row * in.stride;
    if (linear.kind == Kind::kInt8) {
        if constexpr (MR <= kInt8Rows) {
            const int width = linear.quads_depth();
            multiply_int8<MR, Asking>(in.bytes + row * width, width, in.scales + row, (const int8_t*)weights, width, acc, Asking(ahead));
        }
    } else if (wide) {
        multiply<MR, kPanelVectors>(x, in.stride, wide, kPanel, linear.depth, acc, Asking(ahead));
    } else {
        multiply_bf16<MR>(x, in.stride, (const uint32_t*)weights, linear.depth, acc, Asking(ahead));
    }
    finish_tile<MR>(linear, panel, acc, how, gates, y + row * ldy, ldy);
}

using TileRunner = void (*)(const Linear&, int, const float*, const Inputs&, long, Ahead, Finish, float*, float*, long);
template <typename Asking, int... MR>
constexpr TileRunner pick_tile(int rows, std::integer_sequence<int, MR...>) {
    constexpr TileRunner runners[] = {&run_tile<MR + 1, Asking>...};
    return runners[rows - 1];
}

// How many rows a pass over the panels takes: their inputs, about a megabyte, stay in a near cache meanwhile. A fourth of that made
// products slower even on a CPU with 512 KB of second-level cache.
inline long rows_together(const Linear& linear) {
    const long row_bytes = linear.kind == Kind::kInt8 ? linear.quads_depth() : (long)linear.depth * (long)sizeof(float);
    return std::max<long>((1 << 20) / row_bytes, kTileRows);
}

// A linear over rows [first, last) for panels [begin, end) (whole pairs where paired). `scratch` holds depth * kPanel floats, twice
// that where paired. Outputs are padded: `ldy` is at least panels() * kPanel (half of it where paired).
inline void run_panels(const Linear& linear, const Inputs& in, long first, long last, Finish how, float* y, long ldy, long begin, long end,
                       float* scratch) {
    const int step = linear.paired ? 2 : 1;
    const bool widened = linear.kind == Kind::kBfloat16 && last - first > 2 * kTileRows;
    const int most = linear.kind == Kind::kInt8 ? kInt8Rows : kTileRows;
    const long count = (last - first + most - 1) / most;
    alignas(64) float gates[kTileRows * kPanel];
    for (long panel = begin; panel < end; panel += step) {
        const float* wide[2] = {nullptr, nullptr};
        for (int half = 0; half < step; ++half) {
            if (linear.kind == Kind::kFloat32) wide[half] = (const float*)linear.panel(panel + half);
            if (!widened) continue;
            float* out = scratch + (size_t)half * linear.depth * kPanel;
            const uint32_t* words = (const uint32_t*)linear.panel(panel + half);
            for (int k = 0; k < linear.depth; ++k) {
                F w[kPanelVectors];
                load_panel(words + (size_t)k * (kPanel / 2), w);
                for (int v = 0; v < kPanelVectors; ++v) store(out + (size_t)k * kPanel + v * kLanes, w[v]);
            }
            wide[half] = out;
        }
        for (long t = 0; t < count; ++t) {
            // Tiles of like size: 16 rows are 8 + 8, not 12 + 4.
            const long row = first + (last - first) * t / count, next = first + (last - first) * (t + 1) / count;
            // The last four tiles (few enough rows: all) ask for the next panel.
            const long asking = std::min<long>(count, 4), turn = t - (count - asking), part = (long)linear.panel_bytes() / asking;
            const auto sizes = std::make_integer_sequence<int, kTileRows>{};
            const TileRunner run = turn >= 0 ? pick_tile<Ahead>((int)(next - row), sizes) : pick_tile<Nothing>((int)(next - row), sizes);
            for (int half = 0; half < step; ++half) {
                const Ahead ahead{linear.panel(panel + half + step) + std::max<long>(0, turn) * part, part / linear.steps()};
                run(linear, (int)panel + half, wide[half], in, row, ahead, how, gates, y, ldy);
            }
        }
    }
}

// Rotates rows [begin, end) of `linear`'s inputs in place and quantizes them: bytes offset by kOffset, a scale for each row.
inline void quantize(const Linear& linear, float* x, long stride, long begin, long end, uint8_t* bytes, float* scales) {
    const int depth = linear.depth, width = linear.quads_depth();
    for (long r = begin; r < end; ++r) {
        float* source = x + r * stride;
        uint8_t* out = bytes + r * width;
        rotate(source, depth, linear.block);
        int k = 0;
        F top = splat(0.0f);
        for (; k + kLanes <= depth; k += kLanes) top = max(top, abs(load(source + k)));
        float most = largest(top);
        for (; k < depth; ++k) most = std::max(most, std::fabs(source[k]));
        const float inverse = most > 1e-30f ? 127.0f / most : 0.0f;  // quantization.py: SMALLEST
        scales[r] = most / 127.0f;
        for (k = 0; k + kLanes <= depth; k += kLanes) {
#if defined(KVR_AVX512)
            __m512i q = _mm512_add_epi32(_mm512_cvtps_epi32((load(source + k) * splat(inverse)).v), _mm512_set1_epi32(kOffset));
            _mm_storeu_si128((__m128i*)(out + k), _mm512_cvtepi32_epi8(q));
#elif defined(KVR_AVX2)
            const F scaled = load(source + k) * splat(inverse);
            const __m256i mixed = _mm256_packs_epi32(_mm256_cvtps_epi32(scaled.a), _mm256_cvtps_epi32(scaled.b));  // 0-3 8-11 | 4-7 12-15
            const __m256i q = _mm256_permute4x64_epi64(mixed, 0xd8);
            _mm_storeu_si128((__m128i*)(out + k), _mm_packs_epi16(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1)));
#else
            float rounded[kLanes];
            store(rounded, round_even(load(source + k) * splat(inverse)));
            for (int i = 0; i < kLanes; ++i) out[k + i] = (uint8_t)((int)rounded[i] + kOffset);
#endif
        }
        for (; k < depth; ++k) out[k] = (uint8_t)((int)std::nearbyint(source[k] * inverse) + kOffset);
        for (; k < width; ++k) out[k] = (uint8_t)kOffset;
    }
}

}  // namespace kvr
