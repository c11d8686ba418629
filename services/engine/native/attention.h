// Causal attention straight over the pages of the KV pool: online softmax over blocks of 64 keys (Flash-Attention), block
// borders at absolute positions. A query row meets the same blocks in the same order and the same chains of additions whether
// it is decoded alone or computed inside a prompt's chunk, so its bits are the same.
#pragma once

#include <limits>

#include "linear.h"

namespace kvr {

constexpr int kKeyBlock = 64;
constexpr int kQueryRows = 96;  // query rows that share a pass over the keys, all of one KV head

// The pool as the engine lays it out: [pages, layers, 2, page_size, kv_heads, head_dim].
struct Pool {
    char* data;
    int layers, page_size, kv_heads, head_dim;
    bool bf16;

    long element_bytes() const { return bf16 ? 2 : 4; }
    // Keys (values: `which` 1) of one token and head.
    char* at(int page, int layer, int which, int slot, int head) const {
        long index = ((((long)page * layers + layer) * 2 + which) * page_size + slot) * kv_heads + head;
        return data + index * head_dim * element_bytes();
    }
};

KVR_INLINE void load_row(const Pool& pool, const char* source, float* out) {
    for (int d = 0; d < pool.head_dim; d += kLanes)
        store(out + d, pool.bf16 ? load_bf16((const uint16_t*)source + d) : load((const float*)source + d));
}
KVR_INLINE void store_row(const Pool& pool, char* target, const float* row) {
    for (int d = 0; d < pool.head_dim; d += kLanes) {
        if (pool.bf16) {
            store_bf16((uint16_t*)target + d, load(row + d));
        } else {
            store((float*)target + d, load(row + d));
        }
    }
}

#if defined(KVR_AVX512)
// Sixteen rows of sixteen 32-bit words, transposed in registers.
KVR_INLINE void transpose16(__m512i (&r)[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}
#endif

// Keys [first, first + kKeyBlock) of one head, transposed to `out` [head_dim][kKeyBlock]; zero from `count` on.
inline void load_keys(const Pool& pool, const int32_t* pages, int layer, int head, long first, int count, float* out) {
    for (int j = 0; j < kKeyBlock; j += kLanes) {
        const char* rows[kLanes];
        for (int i = 0; i < kLanes; ++i) {
            long position = first + j + i;
            rows[i] = j + i < count ? pool.at(pages[position / pool.page_size], layer, 0, (int)(position % pool.page_size), head) : nullptr;
        }
#if defined(KVR_AVX512)
        const int words = pool.head_dim * (int)pool.element_bytes() / 64;  // whole registers of a row
        for (int w = 0; w < words; ++w) {
            __m512i block[16];
            for (int i = 0; i < kLanes; ++i) block[i] = rows[i] ? _mm512_loadu_si512(rows[i] + w * 64) : _mm512_setzero_si512();
            transpose16(block);
            for (int i = 0; i < kLanes; ++i) {
                if (pool.bf16) {
                    float* line = out + (w * 32 + 2 * i) * kKeyBlock + j;
                    _mm512_storeu_ps(line, _mm512_castsi512_ps(_mm512_slli_epi32(block[i], 16)));
                    _mm512_storeu_ps(line + kKeyBlock, _mm512_castsi512_ps(_mm512_and_si512(block[i], _mm512_set1_epi32((int)0xffff0000))));
                } else {
                    _mm512_storeu_ps(out + (w * 16 + i) * kKeyBlock + j, _mm512_castsi512_ps(block[i]));
                }
            }
        }
        const int done = words * (pool.bf16 ? 32 : 16);
#else
        const int done = 0;
#endif
        for (int i = 0; i < kLanes; ++i)
            for (int d = done; d < pool.head_dim; ++d)
                out[d * kKeyBlock + j + i] = !rows[i] ? 0.0f : pool.bf16 ? widen(((const uint16_t*)rows[i])[d]) : ((const float*)rows[i])[d];
    }
}

inline void load_values(const Pool& pool, const int32_t* pages, int layer, int head, long first, int count, float* out) {
    for (int j = 0; j < count; ++j) {
        long position = first + j;
        load_row(pool, pool.at(pages[position / pool.page_size], layer, 1, (int)(position % pool.page_size), head), out + (long)j * pool.head_dim);
    }
    std::memset(out + (long)count * pool.head_dim, 0, sizeof(float) * (kKeyBlock - count) * pool.head_dim);
}

// c[row][0, columns) (+)= a[row][0, depth) b[0, depth)[0, columns): a small product in tiles, every element one ascending chain.
template <int MR, int NV>
void product_tile(const float* a, long lda, const float* b, long ldb, int depth, float* c, long ldc, bool add) {
    F acc[MR][NV];
    for (int r = 0; r < MR; ++r)
        for (int v = 0; v < NV; ++v) acc[r][v] = add ? load(c + r * ldc + v * kLanes) : splat(0.0f);
    multiply<MR, NV>(a, lda, b, ldb, depth, acc);
    for (int r = 0; r < MR; ++r)
        for (int v = 0; v < NV; ++v) store(c + r * ldc + v * kLanes, acc[r][v]);
}
using ProductTile = void (*)(const float*, long, const float*, long, int, float*, long, bool);
template <int NV, int... MR>
constexpr ProductTile pick_product(int rows, std::integer_sequence<int, MR...>) {
    constexpr ProductTile tiles[] = {&product_tile<MR + 1, NV>...};
    return tiles[rows - 1];
}
inline void product(int rows, int columns, int depth, const float* a, long lda, const float* b, long ldb, float* c, long ldc, bool add) {
    const int tiles = (rows + kTileRows - 1) / kTileRows;
    for (int t = 0; t < tiles; ++t) {
        const int row = rows * t / tiles, count = rows * (t + 1) / tiles - row;
        int column = 0;
        if (kPanelVectors == 2)
            for (; column + 2 * kLanes <= columns; column += 2 * kLanes)
                pick_product<kPanelVectors>(count, std::make_integer_sequence<int, kTileRows>{})(a + row * lda, lda, b + column, ldb, depth,
                                                                                                c + row * ldc + column, ldc, add);
        for (; column < columns; column += kLanes)
            pick_product<1>(count, std::make_integer_sequence<int, kTileRows>{})(a + row * lda, lda, b + column, ldb, depth,
                                                                                c + row * ldc + column, ldc, add);
    }
}

struct AttentionScratch {
    Buffer keys, values, scores, out, queries;
    bool reserve(int head_dim) {
        const size_t row = sizeof(float) * head_dim;
        return keys.reserve(row * kKeyBlock) && values.reserve(row * kKeyBlock) && scores.reserve(sizeof(float) * kQueryRows * kKeyBlock) &&
               out.reserve(row * kQueryRows) && queries.reserve(row * kQueryRows);
    }
};

// Queries of one KV head: `tokens` tokens from absolute position `start`, `group` query heads each. `q` and `y` point at the
// first token's first head of the group; a token's next is `stride` floats on. `window` 0: all positions.
inline void attend(const Pool& pool, const int32_t* pages, int layer, int head, long start, int tokens, int group, int window, const float* q,
                   long q_stride, float* y, long y_stride, AttentionScratch& scratch) {
    const int dim = pool.head_dim, rows = tokens * group;
    float* queries = scratch.queries.as<float>();
    float* out = scratch.out.as<float>();
    float* scores = scratch.scores.as<float>();
    float* keys = scratch.keys.as<float>();
    float* values = scratch.values.as<float>();
    float top[kQueryRows], total[kQueryRows];
    const float none = -std::numeric_limits<float>::infinity();
    for (int r = 0; r < rows; ++r) {
        std::memcpy(queries + (long)r * dim, q + (r / group) * q_stride + (r % group) * dim, sizeof(float) * dim);
        top[r] = none, total[r] = 0.0f;
    }
    std::memset(out, 0, sizeof(float) * rows * dim);
    const long end = start + tokens;
    const long seen = window ? std::max<long>(0, start - window + 1) : 0;
    for (long first = seen / kKeyBlock * kKeyBlock; first < end; first += kKeyBlock) {
        const int count = (int)std::min<long>(kKeyBlock, end - first);
        load_keys(pool, pages, layer, head, first, count, keys);
        load_values(pool, pages, layer, head, first, count, values);
        // Rows whose token lies before this block see nothing of it.
        const int skipped = first > start ? (int)(first - start) * group : 0;
        product(rows - skipped, kKeyBlock, dim, queries + (long)skipped * dim, dim, keys, kKeyBlock, scores + skipped * kKeyBlock, kKeyBlock, false);
        for (int r = skipped; r < rows; ++r) {
            float* s = scores + r * kKeyBlock;
            const long position = start + r / group;
            for (long j = std::max<long>(0, position + 1 - first); j < kKeyBlock; ++j) s[j] = none;
            if (window)
                for (long j = 0; j < std::min<long>(kKeyBlock, position - window + 1 - first); ++j) s[j] = none;
            F highest = max(max(load(s), load(s + 16)), max(load(s + 32), load(s + 48)));
            const float now = std::max(top[r], largest(highest));
            if (now == none) {
                std::memset(s, 0, sizeof(float) * kKeyBlock);
                continue;
            }
            F part = splat(0.0f);
            for (int j = 0; j < kKeyBlock; j += kLanes) {
                F p = exp(load(s + j) - splat(now));
                store(s + j, p);
                part = part + p;
            }
            if (top[r] != now) {
                float lanes[kLanes];
                store(lanes, exp(splat(top[r] - now)));
                const float fade = top[r] == none ? 0.0f : lanes[0];
                total[r] *= fade;
                for (int d = 0; d < dim; d += kLanes) store(out + (long)r * dim + d, load(out + (long)r * dim + d) * splat(fade));
                top[r] = now;
            }
            total[r] += sum(part);
        }
        product(rows - skipped, dim, kKeyBlock, scores + skipped * kKeyBlock, kKeyBlock, values, dim, out + (long)skipped * dim, dim, true);
    }
    for (int r = 0; r < rows; ++r)
        for (int d = 0; d < dim; d += kLanes)
            store(y + (r / group) * y_stride + (r % group) * dim + d, load(out + (long)r * dim + d) / splat(total[r]));
}

}  // namespace kvr
