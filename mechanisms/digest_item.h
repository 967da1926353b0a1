// SPDX-License-Identifier: Apache-2.0
//
// What the processor's digest and the GPU's share: the item that a kernel works on, the constants and the
// mixing of one word. C++17, so that nvcc of every supported CUDA release compiles it. Pure; any thread.
#ifndef RESIDENCY_MECHANISMS_DIGEST_ITEM_H_
#define RESIDENCY_MECHANISMS_DIGEST_ITEM_H_

#include <cstdint>

#ifdef __CUDACC__
#define RESIDENCY_HOST_DEVICE __host__ __device__
#else
#define RESIDENCY_HOST_DEVICE
#endif

namespace residency {

// Name of the kernel in the embedded GPU image, and of its double in the simulated driver.
//   residency_digest(const DigestItem* items, uint32_t item_count, uint64_t* sums)
// Adds the digest of each item's words to sums[item]; sums must be zero before. Launched with a
// one-dimensional grid of any number of blocks, kDigestThreads threads each.
inline constexpr char kDigestKernel[] = "residency_digest";
inline constexpr uint32_t kDigestThreads = 256;

// One range of device memory to digest. Plain data, laid out alike on both sides.
struct DigestItem {
  uint64_t address;      // device address, 8-byte aligned
  uint64_t word_count;   // 8-byte words
  uint64_t first_index;  // index of the first word within its cell
};
static_assert(sizeof(DigestItem) == 24);

// The odd integer nearest to 2^64 / golden ratio: multiples of it by consecutive indices are all
// different and well spread (Knuth, The Art of Computer Programming, volume 3, section 6.4).
inline constexpr uint64_t kDigestWeyl = 0x9e3779b97f4a7c15;
// The multipliers of fmix64 (Appleby, MurmurHash3, public domain).
inline constexpr uint64_t kDigestMultiplier1 = 0xff51afd7ed558ccd;
inline constexpr uint64_t kDigestMultiplier2 = 0xc4ceb9fe1a85ec53;
inline constexpr int kDigestShift = 33;

// fmix64. A bijection of 64-bit words.
RESIDENCY_HOST_DEVICE constexpr uint64_t DigestMix(uint64_t word) {
  word ^= word >> kDigestShift;
  word *= kDigestMultiplier1;
  word ^= word >> kDigestShift;
  word *= kDigestMultiplier2;
  word ^= word >> kDigestShift;
  return word;
}

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_DIGEST_ITEM_H_
