// SPDX-License-Identifier: Apache-2.0
//
// The functions carry their target as an attribute, not by a compiler flag for this file: inline functions
// of headers, compiled here with a flag, could be the copies that the linker keeps for everybody.
#include "mechanisms/digest_avx2.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include "mechanisms/digest.h"

namespace residency {
namespace {

#define RESIDENCY_AVX2 __attribute__((target("avx2"), always_inline)) inline

// Low 64 bits of lane * multiplier. AVX2 multiplies 32 by 32 bits only, so there are three products, of which the
// two crossed ones count modulo 2^32.
RESIDENCY_AVX2 __m256i Multiply(__m256i value, uint64_t multiplier) {
  const __m256i low = _mm256_set1_epi64x(static_cast<int64_t>(multiplier & 0xffffffff));
  const __m256i high = _mm256_set1_epi64x(static_cast<int64_t>(multiplier >> 32));
  const __m256i crossed =
      _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(value, 32), low), _mm256_mul_epu32(value, high));
  return _mm256_add_epi64(_mm256_mul_epu32(value, low), _mm256_slli_epi64(crossed, 32));
}

RESIDENCY_AVX2 __m256i ShiftXor(__m256i value) {
  return _mm256_xor_si256(value, _mm256_srli_epi64(value, kDigestShift));
}

RESIDENCY_AVX2 __m256i Mix(__m256i value) {
  value = Multiply(ShiftXor(value), kDigestMultiplier1);
  value = Multiply(ShiftXor(value), kDigestMultiplier2);
  return ShiftXor(value);
}

RESIDENCY_AVX2 __m256i MixAt(const uint64_t* words, __m256i weyl) {
  return Mix(_mm256_add_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)), weyl));
}

}  // namespace

__attribute__((target("avx2"))) uint64_t DigestWordsAvx2(const uint64_t* words, uint64_t word_count,
                                                         uint64_t first_index) {
  constexpr uint64_t kLanes = 4;
  constexpr uint64_t kStep = 2 * kLanes;  // two chains, so that one's multiplications hide the other's
  const uint64_t weyl = (first_index + 1) * kDigestWeyl;
  __m256i weyl_a =
      _mm256_set_epi64x(static_cast<int64_t>(weyl + 3 * kDigestWeyl), static_cast<int64_t>(weyl + 2 * kDigestWeyl),
                        static_cast<int64_t>(weyl + kDigestWeyl), static_cast<int64_t>(weyl));
  __m256i weyl_b = _mm256_add_epi64(weyl_a, _mm256_set1_epi64x(static_cast<int64_t>(kLanes * kDigestWeyl)));
  const __m256i advance = _mm256_set1_epi64x(static_cast<int64_t>(kStep * kDigestWeyl));
  __m256i sum_a = _mm256_setzero_si256();
  __m256i sum_b = _mm256_setzero_si256();
  uint64_t i = 0;
  for (; i + kStep <= word_count; i += kStep) {
    sum_a = _mm256_add_epi64(sum_a, MixAt(words + i, weyl_a));
    sum_b = _mm256_add_epi64(sum_b, MixAt(words + i + kLanes, weyl_b));
    weyl_a = _mm256_add_epi64(weyl_a, advance);
    weyl_b = _mm256_add_epi64(weyl_b, advance);
  }
  alignas(32) uint64_t lanes[kLanes];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), _mm256_add_epi64(sum_a, sum_b));
  return lanes[0] + lanes[1] + lanes[2] + lanes[3] + DigestWordsPortable(words + i, word_count - i, first_index + i);
}

}  // namespace residency

#endif
