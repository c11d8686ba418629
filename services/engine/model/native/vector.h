// Sixteen float lanes with one meaning on every CPU: one AVX-512 register, two AVX2 registers, or a plain array.
//
// Every operation rounds each lane by itself and in the same order whatever the instruction set, fused multiply-adds are
// always asked for by name (the compiler must not contract: -ffp-contract=off), and reductions follow one fixed tree. So a
// kernel written on `F` gives equal bits on machines of different kinds.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define KVR_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__)
#define KVR_AVX2 1
#endif
#if defined(KVR_AVX512) || defined(KVR_AVX2)
#include <immintrin.h>
#endif

#define KVR_INLINE inline __attribute__((always_inline))

namespace kvr {

constexpr int kLanes = 16;

#if defined(KVR_AVX512)

struct F {
    __m512 v;
};
KVR_INLINE F load(const float* p) { return {_mm512_loadu_ps(p)}; }
KVR_INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
KVR_INLINE F splat(float x) { return {_mm512_set1_ps(x)}; }
KVR_INLINE F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
KVR_INLINE F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
KVR_INLINE F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
KVR_INLINE F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
KVR_INLINE F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
KVR_INLINE F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
KVR_INLINE F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
KVR_INLINE F abs(F a) { return {_mm512_abs_ps(a.v)}; }
KVR_INLINE F round_even(F a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// 2^n for integral n from -126 to 127.
KVR_INLINE F pow2(F n) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))}; }
// x where a >= b, else 0.
KVR_INLINE F keep_ge(F a, F b, F x) { return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ), x.v)}; }
KVR_INLINE F load_bf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
// Round to nearest even; NaN stays NaN.
KVR_INLINE void store_bf16(uint16_t* p, F a) {
    __m512i bits = _mm512_castps_si512(a.v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
// Lane i becomes lane i xor D, D from 1, 2, 4, 8.
template <int D>
KVR_INLINE F swap_lanes(F a) {
    if constexpr (D == 1) return {_mm512_permute_ps(a.v, 0xb1)};
    if constexpr (D == 2) return {_mm512_permute_ps(a.v, 0x4e)};
    if constexpr (D == 4) return {_mm512_shuffle_f32x4(a.v, a.v, 0xb1)};
    return {_mm512_shuffle_f32x4(a.v, a.v, 0x4e)};
}
// The lower and the upper eight lanes.
struct Halves {
    __m256 low, high;
};
KVR_INLINE Halves halves(F a) { return {_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1)}; }

#elif defined(KVR_AVX2)

struct F {
    __m256 a, b;
};
KVR_INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
KVR_INLINE void store(float* p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
KVR_INLINE F splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
KVR_INLINE F operator+(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
KVR_INLINE F operator-(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
KVR_INLINE F operator*(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
KVR_INLINE F operator/(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
KVR_INLINE F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
KVR_INLINE F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
KVR_INLINE F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
KVR_INLINE F abs(F x) {
    __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask)};
}
KVR_INLINE F round_even(F x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
KVR_INLINE __m256 pow2(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
KVR_INLINE F pow2(F n) { return {pow2(n.a), pow2(n.b)}; }
KVR_INLINE F keep_ge(F x, F y, F z) {
    return {_mm256_and_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ), z.a), _mm256_and_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ), z.b)};
}
KVR_INLINE __m256 widen_bf16(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
KVR_INLINE F load_bf16(const uint16_t* p) {
    return {widen_bf16(_mm_loadu_si128((const __m128i*)p)), widen_bf16(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
KVR_INLINE __m128i narrow_bf16(__m256 x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    rounded = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}
KVR_INLINE void store_bf16(uint16_t* p, F x) {
    _mm_storeu_si128((__m128i*)p, narrow_bf16(x.a));
    _mm_storeu_si128((__m128i*)(p + 8), narrow_bf16(x.b));
}
template <int D>
KVR_INLINE F swap_lanes(F x) {
    if constexpr (D == 1) return {_mm256_permute_ps(x.a, 0xb1), _mm256_permute_ps(x.b, 0xb1)};
    if constexpr (D == 2) return {_mm256_permute_ps(x.a, 0x4e), _mm256_permute_ps(x.b, 0x4e)};
    if constexpr (D == 4) return {_mm256_permute2f128_ps(x.a, x.a, 1), _mm256_permute2f128_ps(x.b, x.b, 1)};
    return {x.b, x.a};
}
struct Halves {
    __m256 low, high;
};
KVR_INLINE Halves halves(F x) { return {x.a, x.b}; }

#else

struct F {
    float v[kLanes];
};
template <typename Op>
KVR_INLINE F each(Op op) {
    F result;
    for (int i = 0; i < kLanes; ++i) result.v[i] = op(i);
    return result;
}
KVR_INLINE F load(const float* p) { return each([&](int i) { return p[i]; }); }
KVR_INLINE void store(float* p, F a) { std::memcpy(p, a.v, sizeof(a.v)); }
KVR_INLINE F splat(float x) { return each([&](int) { return x; }); }
KVR_INLINE F operator+(F a, F b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
KVR_INLINE F operator-(F a, F b) { return each([&](int i) { return a.v[i] - b.v[i]; }); }
KVR_INLINE F operator*(F a, F b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
KVR_INLINE F operator/(F a, F b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
KVR_INLINE F fma(F a, F b, F c) { return each([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); }); }
KVR_INLINE F max(F a, F b) { return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
KVR_INLINE F min(F a, F b) { return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
KVR_INLINE F abs(F a) { return each([&](int i) { return std::fabs(a.v[i]); }); }
KVR_INLINE F round_even(F a) { return each([&](int i) { return std::nearbyint(a.v[i]); }); }
KVR_INLINE F pow2(F n) { return each([&](int i) { return std::ldexp(1.0f, (int)n.v[i]); }); }
KVR_INLINE F keep_ge(F a, F b, F x) { return each([&](int i) { return a.v[i] >= b.v[i] ? x.v[i] : 0.0f; }); }
KVR_INLINE F load_bf16(const uint16_t* p) {
    return each([&](int i) {
        uint32_t bits = (uint32_t)p[i] << 16;
        float x;
        std::memcpy(&x, &bits, 4);
        return x;
    });
}
KVR_INLINE void store_bf16(uint16_t* p, F a) {
    for (int i = 0; i < kLanes; ++i) {
        uint32_t bits;
        std::memcpy(&bits, &a.v[i], 4);
        p[i] = a.v[i] != a.v[i] ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
}
template <int D>
KVR_INLINE F swap_lanes(F a) {
    return each([&](int i) { return a.v[i ^ D]; });
}

#endif

// Reductions halve the lanes four times: 16 -> 8 -> 4 -> 2 -> 1.
#if defined(KVR_AVX512) || defined(KVR_AVX2)
KVR_INLINE float sum(F x) {
    Halves h = halves(x);
    __m256 eight = _mm256_add_ps(h.low, h.high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
KVR_INLINE float largest(F x) {
    Halves h = halves(x);
    __m256 eight = _mm256_max_ps(h.low, h.high);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
#else
KVR_INLINE float sum(F x) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; ++i) x.v[i] += x.v[i + half];
    return x.v[0];
}
KVR_INLINE float largest(F x) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; ++i) x.v[i] = x.v[i] > x.v[i + half] ? x.v[i] : x.v[i + half];
    return x.v[0];
}
#endif

// e^x within 2 ulp (Cephes' polynomial); 0 below -87, e^88 above 88.
KVR_INLINE F exp(F x) {
    const F floor = splat(-87.0f);
    F clamped = min(max(x, floor), splat(88.0f));
    F n = round_even(clamped * splat(1.44269504088896341f));
    F r = fma(n, splat(-0.693359375f), clamped);
    r = fma(n, splat(2.12194440e-4f), r);
    F p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + splat(1.0f);
    return keep_ge(x, floor, p * pow2(n));
}

}  // namespace kvr
