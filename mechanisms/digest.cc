// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/digest.h"

#include "mechanisms/digest_avx2.h"

namespace residency {
namespace {

using DigestFunction = uint64_t (*)(const uint64_t*, uint64_t, uint64_t);

DigestFunction ChooseDigest() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return DigestWordsAvx2;
#endif
  return DigestWordsPortable;
}

}  // namespace

uint64_t DigestWordsPortable(const uint64_t* words, uint64_t word_count, uint64_t first_index) {
  uint64_t sum = 0;
  uint64_t weyl = (first_index + 1) * kDigestWeyl;
  for (uint64_t i = 0; i < word_count; ++i, weyl += kDigestWeyl) sum += DigestMix(words[i] + weyl);
  return sum;
}

uint64_t DigestWords(const uint64_t* words, uint64_t word_count, uint64_t first_index) {
  static const DigestFunction digest = ChooseDigest();
  return digest(words, word_count, first_index);
}

}  // namespace residency
