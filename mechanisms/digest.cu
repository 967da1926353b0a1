// SPDX-License-Identifier: Apache-2.0
//
// The digest of cells on the GPU; digest_item.h says how it is launched. Every item is cut into slices, and the slices
// of all items are dealt to the blocks in turn, so that many small items and a few large ones fill the GPU alike,
// whatever the grid. A block reads the item table once, adds up its slices of an item in registers and publishes them
// with one atomic addition.
#include "mechanisms/digest_item.h"

namespace residency {
namespace {

constexpr int kWarpThreads = 32;
constexpr int kWarps = kDigestThreads / kWarpThreads;
// 16-byte loads that a thread has in flight. Four of them at eight blocks on each multiprocessor keep more bytes under
// way than the memory's latency times its rate asks for.
constexpr int kLoads = 4;
constexpr uint64_t kSlicePairs = uint64_t{kDigestThreads} * kLoads;

// An item as 16-byte pairs of words between an odd first and an odd last word.
struct Pairs {
  const ulonglong2* data;
  uint64_t count;
  uint64_t first_index;  // of the first pair's first word within the cell
  uint64_t slices;
};

__device__ uint64_t MixAt(uint64_t word, uint64_t index) { return DigestMix(word + (index + 1) * kDigestWeyl); }

__device__ uint64_t MixPair(ulonglong2 pair, uint64_t index) { return MixAt(pair.x, index) + MixAt(pair.y, index + 1); }

__device__ bool HasOddFirst(const DigestItem& item) { return (item.address & 15) != 0; }

__device__ Pairs PairsOf(const DigestItem& item) {
  const uint64_t odd = HasOddFirst(item) ? 1 : 0;
  Pairs pairs = {};
  if (item.word_count == 0) return pairs;
  pairs.data = reinterpret_cast<const ulonglong2*>(item.address + odd * sizeof(uint64_t));
  pairs.count = (item.word_count - odd) / 2;
  pairs.first_index = item.first_index + odd;
  // An item without a pair still has a slice, for its odd words.
  pairs.slices = pairs.count == 0 ? 1 : (pairs.count + kSlicePairs - 1) / kSlicePairs;
  return pairs;
}

__device__ uint64_t OddWords(const DigestItem& item) {
  const uint64_t* words = reinterpret_cast<const uint64_t*>(item.address);
  const uint64_t odd = HasOddFirst(item) ? 1 : 0;
  const uint64_t last = item.word_count - 1;
  uint64_t sum = 0;
  if (odd != 0) sum += MixAt(words[0], item.first_index);
  if (((item.word_count - odd) & 1) != 0) sum += MixAt(words[last], item.first_index + last);
  return sum;
}

__device__ uint64_t SumSlice(const Pairs& pairs, uint64_t slice) {
  const uint64_t first = slice * kSlicePairs + threadIdx.x;
  uint64_t sum = 0;
  if ((slice + 1) * kSlicePairs <= pairs.count) {
    ulonglong2 loaded[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) loaded[i] = __ldcs(pairs.data + first + i * kDigestThreads);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      sum += MixPair(loaded[i], pairs.first_index + 2 * (first + i * kDigestThreads));
    }
    return sum;
  }
  for (uint64_t i = first; i < pairs.count; i += kDigestThreads) {
    sum += MixPair(__ldcs(pairs.data + i), pairs.first_index + 2 * i);
  }
  return sum;
}

__device__ uint64_t SumOfWarp(uint64_t value) {
#pragma unroll
  for (int offset = kWarpThreads / 2; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
  return value;
}

// Adds the sum of `value` over the block to *sum. Called by all threads of the block.
__device__ void PublishBlockSum(uint64_t value, uint64_t* sum) {
  __shared__ uint64_t warp_sums[kWarps];
  value = SumOfWarp(value);
  if (threadIdx.x % kWarpThreads == 0) warp_sums[threadIdx.x / kWarpThreads] = value;
  __syncthreads();
  if (threadIdx.x < kWarpThreads) {
    value = SumOfWarp(threadIdx.x < kWarps ? warp_sums[threadIdx.x] : 0);
    if (threadIdx.x == 0) atomicAdd(reinterpret_cast<unsigned long long*>(sum), value);
  }
  __syncthreads();  // warp_sums is free for the next item
}

}  // namespace
}  // namespace residency

extern "C" __global__ void __launch_bounds__(residency::kDigestThreads)
    residency_digest(const residency::DigestItem* items, uint32_t item_count, uint64_t* sums) {
  using namespace residency;
  const uint64_t blocks = gridDim.x;
  uint64_t dealt = 0;  // slices of the items before, modulo the number of blocks: the block whose turn it is
  for (uint32_t i = 0; i < item_count; ++i) {
    const DigestItem item = items[i];
    const Pairs pairs = PairsOf(item);
    const uint64_t mine = blockIdx.x >= dealt ? blockIdx.x - dealt : blockIdx.x + blocks - dealt;
    if (mine < pairs.slices) {
      uint64_t sum = mine == 0 && threadIdx.x == 0 ? OddWords(item) : 0;
      for (uint64_t slice = mine; slice < pairs.slices; slice += blocks) sum += SumSlice(pairs, slice);
      PublishBlockSum(sum, sums + i);
    }
    dealt = (dealt + pairs.slices) % blocks;
  }
}
