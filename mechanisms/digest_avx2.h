// SPDX-License-Identifier: Apache-2.0
//
// The digest by AVX2, for digest.cc and its test. Pure; any thread.
#ifndef RESIDENCY_MECHANISMS_DIGEST_AVX2_H_
#define RESIDENCY_MECHANISMS_DIGEST_AVX2_H_

#include <cstdint>

namespace residency {

#if defined(__x86_64__)
// DigestWords for a processor with AVX2; the caller has checked that it is one.
uint64_t DigestWordsAvx2(const uint64_t* words, uint64_t word_count, uint64_t first_index);
#endif

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_DIGEST_AVX2_H_
