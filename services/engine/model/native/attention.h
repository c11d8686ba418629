// Causal attention straight over the pages of the KV pool: online softmax over blocks of 64 keys (Flash-Attention), block
// borders at absolute positions. A query row meets the same blocks in the same order and the same chains of additions whether
// it is decoded alone or computed inside a prompt's chunk, so its bits are the same.
#pragma once

#include <limits>

#include "linear.h"

namespace kvr {

constexpr int kKeyBlock = 64;
constexpr int kQueryRows = 96;  // query rows that share a pass over the keys, all of one sequence
// Keys that a decoding sequence's few rows meet at once: as many as fill a tile of `product`, in the first-level cache.
constexpr int kFewRowsKeys = kPanelVectors == 2 ? kKeyBlock : kLanes;

// The pool as the engine lays it out: [pages, layers, 2, page_size, kv_heads, head_dim].
struct Pool {
    char* data;
    int layers, page_size, kv_heads, head_dim;
    bool bf16;
    int page_shift;  // page_size is a power of two

    long element_bytes() const { return bf16 ? 2 : 4; }
    // Keys (values: `which` 1) of one token and head.
    char* at(int page, int layer, int which, int slot, int head) const {
        long index = ((((long)page * layers + layer) * 2 + which) * page_size + slot) * kv_heads + head;
        return data + index * head_dim * element_bytes();
    }
    long row_bytes() const { return (long)kv_heads * head_dim * element_bytes(); }
    long head_bytes() const { return head_dim * element_bytes(); }
    // From a token's keys to its values.
    long value_offset() const { return page_size * row_bytes(); }
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
#elif defined(KVR_AVX2)
// Eight rows of eight 32-bit words, transposed in registers.
KVR_INLINE void transpose8(__m256i (&r)[8]) {
    __m256i t[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
        t[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
    }
    for (int i = 0; i < 8; ++i) r[i] = t[i];
}
#endif

// Where the keys of a block of positions lie: of the first head, in one layer. Rows beyond the last position repeat the first one's
// address: what is read there is hidden from every query.
struct Block {
    const char* rows[kKeyBlock];
    int count = 0;

    // Positions [first, end), as many as a block has; there must be one.
    void find(const Pool& pool, const int32_t* pages, int layer, long first, long end) {
        count = (int)std::min<long>(kKeyBlock, end - first);
        for (int j = 0; j < count;) {
            const int slot = (int)((first + j) & (pool.page_size - 1)), stop = std::min(count, j + pool.page_size - slot);
            const char* row = pool.at(pages[(first + j) >> pool.page_shift], layer, 0, slot, 0);
            for (; j < stop; ++j, row += pool.row_bytes()) rows[j] = row;
        }
        for (int j = count; j < kKeyBlock; ++j) rows[j] = rows[0];
    }
    // Asks for `bytes` from `offset` of a row: rows lie too far apart for the CPU to foresee.
    KVR_INLINE void prefetch(int row, long offset, long bytes) const {
        for (long line = 0; line < bytes; line += 64) __builtin_prefetch(rows[row] + offset + line, 0, 2);
    }
};

// Keys [first, first + width) of one head, transposed to `out` [head_dim][width]. Loading one block asks for the same rows of the
// `next` one, evenly, so that memory works while the CPU computes.
inline void load_keys(const Pool& pool, const Block& block, [[maybe_unused]] const Block& next, long offset, int first, int width, float* out) {
    for (int j = 0; j < width; j += kLanes) {
        const char* rows[kLanes];
        for (int i = 0; i < kLanes; ++i) rows[i] = block.rows[first + j + i] + offset;
#if defined(KVR_AVX512)
        const int words = pool.head_dim * (int)pool.element_bytes() / 64;  // whole registers of a row
        for (int w = 0; w < words; ++w) {
            __m512i words16[16];
            for (int i = 0; i < kLanes; ++i) words16[i] = _mm512_loadu_si512(rows[i] + w * 64);
            transpose16(words16);
            for (int i = 0; i < kLanes; ++i) {
                next.prefetch(first + j + i, offset + w * 64, 64);
                if (pool.bf16) {
                    float* line = out + (w * 32 + 2 * i) * width + j;
                    _mm512_storeu_ps(line, _mm512_castsi512_ps(_mm512_slli_epi32(words16[i], 16)));
                    _mm512_storeu_ps(line + width, _mm512_castsi512_ps(_mm512_and_si512(words16[i], _mm512_set1_epi32((int)0xffff0000))));
                } else {
                    _mm512_storeu_ps(out + (w * 16 + i) * width + j, _mm512_castsi512_ps(words16[i]));
                }
            }
        }
        const int done = words * (pool.bf16 ? 32 : 16);
#elif defined(KVR_AVX2)
        const int words = pool.head_dim * (int)pool.element_bytes() / 32, each = pool.bf16 ? 16 : 8;
        for (int half = 0; half < kLanes; half += 8)
            for (int w = 0; w < words; ++w) {
                __m256i lines[8];
                for (int i = 0; i < 8; ++i) {
                    lines[i] = _mm256_loadu_si256((const __m256i*)(rows[half + i] + w * 32));
                    if (w % 2 == 0) next.prefetch(first + j + half + i, offset + w * 32, 64);
                }
                transpose8(lines);
                for (int i = 0; i < 8; ++i) {
                    if (pool.bf16) {
                        float* line = out + (w * 16 + 2 * i) * width + j + half;
                        _mm256_storeu_ps(line, _mm256_castsi256_ps(_mm256_slli_epi32(lines[i], 16)));
                        _mm256_storeu_ps(line + width, _mm256_castsi256_ps(_mm256_and_si256(lines[i], _mm256_set1_epi32((int)0xffff0000))));
                    } else {
                        _mm256_storeu_ps(out + (w * 8 + i) * width + j + half, _mm256_castsi256_ps(lines[i]));
                    }
                }
            }
        const int done = words * each;
#else
        const int done = 0;
#endif
        for (int i = 0; i < kLanes; ++i)
            for (int d = done; d < pool.head_dim; ++d)
                out[d * width + j + i] = pool.bf16 ? widen(((const uint16_t*)rows[i])[d]) : ((const float*)rows[i])[d];
    }
}

inline void load_values(const Pool& pool, const Block& block, const Block& next, long offset, float* out) {
    for (int j = 0; j < block.count; ++j) {
        next.prefetch(j, offset + pool.value_offset(), pool.head_bytes());
        load_row(pool, block.rows[j] + offset + pool.value_offset(), out + (long)j * pool.head_dim);
    }
}

// c[row][0, columns) (+)= a[row][0, depth) b[0, depth)[0, columns): a small product in tiles, every element one ascending chain.
template <int MR, int NV>
void product_tile(const float* a, long lda, const float* b, long ldb, int depth, float* c, long ldc, bool add) {
    F acc[MR][NV];
    for (int r = 0; r < MR; ++r)
        for (int v = 0; v < NV; ++v) acc[r][v] = add ? load(c + r * ldc + v * kLanes) : splat(0.0f);
    multiply<MR, NV>(a, lda, b, ldb, depth, acc, Nothing({}));
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
        if (kPanelVectors == 2 && count <= kTileRows / 2)  // few rows: wider tiles keep the multipliers busy
            for (; column + 4 * kLanes <= columns; column += 4 * kLanes)
                pick_product<2 * kPanelVectors>(count, std::make_integer_sequence<int, kTileRows / 2>{})(
                    a + row * lda, lda, b + column, ldb, depth, c + row * ldc + column, ldc, add);
        if (kPanelVectors == 2)
            for (; column + 2 * kLanes <= columns; column += 2 * kLanes)
                pick_product<kPanelVectors>(count, std::make_integer_sequence<int, kTileRows>{})(a + row * lda, lda, b + column, ldb, depth,
                                                                                                c + row * ldc + column, ldc, add);
        for (; column < columns; column += kLanes)
            pick_product<1>(count, std::make_integer_sequence<int, kTileRows>{})(a + row * lda, lda, b + column, ldb, depth,
                                                                                c + row * ldc + column, ldc, add);
    }
}

// out[r][d] += sum over the block's keys j of weights[r][j] * value[j][d], j ascending, for columns [column, column + NV lanes):
// the values are widened as they are read from the pages.
template <int MR, int NV, bool BF16>
void add_values(const Block& block, const Block& next, long offset, int column, const float* weights, float* out, int dim) {
    F acc[MR][NV];
    for (int r = 0; r < MR; ++r)
        for (int v = 0; v < NV; ++v) acc[r][v] = load(out + r * dim + column + v * kLanes);
    const long start = offset + column * (BF16 ? 2 : 4);
    for (int j = 0; j < block.count; ++j) {
        const char* row = block.rows[j] + start;
        if (start % 64 == 0) next.prefetch(j, start, NV * kLanes * (BF16 ? 2 : 4));
        F w[NV];
        for (int v = 0; v < NV; ++v) w[v] = BF16 ? load_bf16((const uint16_t*)row + v * kLanes) : load((const float*)row + v * kLanes);
        for (int r = 0; r < MR; ++r) {
            F x = splat(weights[r * kKeyBlock + j]);
            for (int v = 0; v < NV; ++v) acc[r][v] = fma(x, w[v], acc[r][v]);
        }
    }
    for (int r = 0; r < MR; ++r)
        for (int v = 0; v < NV; ++v) store(out + r * dim + column + v * kLanes, acc[r][v]);
}
using AddValues = void (*)(const Block&, const Block&, long, int, const float*, float*, int);
template <int NV, bool BF16, int... MR>
constexpr AddValues pick_values(int rows, std::integer_sequence<int, MR...>) {
    constexpr AddValues tiles[] = {&add_values<MR + 1, NV, BF16>...};
    return tiles[rows - 1];
}
template <bool BF16>
void add_values(const Block& block, const Block& next, long offset, int rows, const float* weights, float* out, int dim) {
    constexpr int wide = kPanelVectors == 2 ? 4 : 1, most = kPanelVectors == 2 ? kTileRows / 2 : kTileRows;
    const auto sizes = std::make_integer_sequence<int, most>{};
    for (int row = 0; row < rows; row += most) {
        const int count = std::min(most, rows - row);
        int column = 0;
        for (; column + wide * kLanes <= dim; column += wide * kLanes)
            pick_values<wide, BF16>(count, sizes)(block, next, offset, column, weights + row * kKeyBlock, out + row * dim, dim);
        for (; column < dim; column += kLanes)
            pick_values<1, BF16>(count, sizes)(block, next, offset, column, weights + row * kKeyBlock, out + row * dim, dim);
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

// What one pass over the keys computes: `tokens` tokens from absolute position `start`, and of each the query heads (`group` a
// KV head) of `heads` KV heads from `head` on. At most kQueryRows rows in all.
struct Pass {
    const int32_t* pages;
    int layer, head, heads, group, tokens, window;  // `window` 0: all positions
    long start;
};

// Scores of one row against a block of keys become weights, and the row's running maximum, total and output follow.
KVR_INLINE void weigh(float* s, long hidden_from, long hidden_until, int dim, float* top, float* total, float* out) {
    const float none = -std::numeric_limits<float>::infinity();
    for (long j = std::max<long>(0, hidden_from); j < kKeyBlock; ++j) s[j] = none;
    for (long j = 0; j < std::min<long>(kKeyBlock, hidden_until); ++j) s[j] = none;
    static_assert(kKeyBlock == 4 * kLanes);
    const float now = std::max(*top, largest(max(max(load(s), load(s + 16)), max(load(s + 32), load(s + 48)))));
    if (now == none) {
        std::memset(s, 0, sizeof(float) * kKeyBlock);
        return;
    }
    F part = splat(0.0f);
    for (int j = 0; j < kKeyBlock; j += kLanes) {
        F p = exp(load(s + j) - splat(now));
        store(s + j, p);
        part = part + p;
    }
    if (*top != now) {
        float lanes[kLanes];
        store(lanes, exp(splat(*top - now)));
        const float fade = *top == none ? 0.0f : lanes[0];
        *total *= fade;
        for (int d = 0; d < dim; d += kLanes) store(out + d, load(out + d) * splat(fade));
        *top = now;
    }
    *total += sum(part);
}

// `q` and `y` point at the first token's first head of the pass; a token's next is a stride of floats on.
inline void attend(const Pool& pool, const Pass& pass, const float* q, long q_stride, float* y, long y_stride, AttentionScratch& scratch) {
    const int dim = pool.head_dim, group = pass.group, rows = pass.tokens * group;
    float* queries = scratch.queries.as<float>();
    float* outs = scratch.out.as<float>();
    float* scores = scratch.scores.as<float>();
    float* keys = scratch.keys.as<float>();
    float* values = scratch.values.as<float>();
    float top[kQueryRows], total[kQueryRows];
    for (int h = 0; h < pass.heads; ++h)
        for (int r = 0; r < rows; ++r) {
            const float* source = q + (r / group) * q_stride + (long)(h * group + r % group) * dim;
            std::memcpy(queries + (long)(h * rows + r) * dim, source, sizeof(float) * dim);
        }
    for (int r = 0; r < pass.heads * rows; ++r) top[r] = -std::numeric_limits<float>::infinity(), total[r] = 0.0f;
    std::memset(outs, 0, sizeof(float) * pass.heads * rows * dim);
    const bool few = rows <= kTileRows;
    const long end = pass.start + pass.tokens;
    const long seen = pass.window ? std::max<long>(0, pass.start - pass.window + 1) : 0;
    Block block, next;
    next.find(pool, pass.pages, pass.layer, seen / kKeyBlock * kKeyBlock, end);
    for (long first = seen / kKeyBlock * kKeyBlock; first < end; first += kKeyBlock) {
        block = next;
        if (first + kKeyBlock < end) next.find(pool, pass.pages, pass.layer, first + kKeyBlock, end);
        // Rows whose token lies before this block see nothing of it.
        const int skipped = first > pass.start ? (int)(first - pass.start) * group : 0;
        const int seeing = rows - skipped, width = few ? kFewRowsKeys : kKeyBlock;
        for (int j = 0; j < block.count; j += width)
            for (int h = 0; h < pass.heads; ++h) {
                load_keys(pool, block, next, (pass.head + h) * pool.head_bytes(), j, width, keys);
                const int row = h * rows + skipped;
                product(seeing, width, dim, queries + (long)row * dim, dim, keys, width, scores + row * kKeyBlock + j, kKeyBlock, false);
            }
        for (int h = 0; h < pass.heads; ++h)
            for (int r = skipped; r < rows; ++r) {
                const long position = pass.start + r / group;
                const int row = h * rows + r;
                weigh(scores + row * kKeyBlock, position + 1 - first, pass.window ? position - pass.window + 1 - first : 0, dim, &top[row],
                      &total[row], outs + (long)row * dim);
            }
        for (int h = 0; h < pass.heads; ++h) {
            const long offset = (pass.head + h) * pool.head_bytes();
            const int row = h * rows + skipped;
            if (few) {
                const auto add = pool.bf16 ? add_values<true> : add_values<false>;
                add(block, next, offset + pool.value_offset(), seeing, scores + row * kKeyBlock, outs + (long)row * dim, dim);
            } else {
                load_values(pool, block, next, offset, values);
                product(seeing, dim, block.count, scores + row * kKeyBlock, kKeyBlock, values, dim, outs + (long)row * dim, dim, true);
            }
        }
    }
    for (int h = 0; h < pass.heads; ++h)
        for (int r = 0; r < rows; ++r)
            for (int d = 0; d < dim; d += kLanes)
                store(y + (r / group) * y_stride + (long)(h * group + r % group) * dim + d,
                      load(outs + (long)(h * rows + r) * dim + d) / splat(total[h * rows + r]));
}

}  // namespace kvr
