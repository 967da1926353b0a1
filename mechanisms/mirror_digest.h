// SPDX-License-Identifier: Apache-2.0
//
// Adds up the digests of a component's cells while its image is being filled. Slices come from several threads, in
// any order and at any offset; the words that a slice holds whole are digested at once, while they are in the
// processor's cache, those on its edges and those that no slice touches at the end.
#ifndef RESIDENCY_MECHANISMS_MIRROR_DIGEST_H_
#define RESIDENCY_MECHANISMS_MIRROR_DIGEST_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace residency {

class MirrorDigest {
 public:
  // Of an image at `image`, 8-byte aligned, whose cells are `cell_bytes` long but for the last; `bytes` is a multiple
  // of 8, `cell_bytes` a power of two.
  MirrorDigest(const std::byte* image, uint64_t bytes, uint64_t cell_bytes);

  // The bytes from `offset` on are final. Slices do not overlap. Any thread.
  void Add(uint64_t offset, uint64_t bytes);

  // Digests whole words that no slice will hold. Any thread.
  void AddWords(uint64_t offset, uint64_t bytes);

  // The digests of the cells, once all bytes are final. Every word must have been in a slice, wholly or in parts, or
  // among the words added by themselves. Called once, after the last Add.
  std::vector<uint64_t> Finish();

 private:
  const std::byte* const image_;
  const uint64_t cell_bytes_;
  std::vector<std::atomic<uint64_t>> sums_;
  std::mutex mutex_;
  std::vector<uint64_t> edges_;  // guarded by mutex_: offsets of words that a slice holds in part
};

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_MIRROR_DIGEST_H_
