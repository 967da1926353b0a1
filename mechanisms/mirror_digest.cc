// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/mirror_digest.h"

#include <algorithm>

#include "mechanisms/digest.h"

namespace residency {
namespace {

constexpr uint64_t kWordBytes = sizeof(uint64_t);

uint64_t WordDown(uint64_t offset) { return offset & ~(kWordBytes - 1); }
uint64_t WordUp(uint64_t offset) { return WordDown(offset + kWordBytes - 1); }

}  // namespace

MirrorDigest::MirrorDigest(const std::byte* image, uint64_t bytes, uint64_t cell_bytes)
    : image_(image), cell_bytes_(cell_bytes), sums_((bytes + cell_bytes - 1) / cell_bytes) {}

void MirrorDigest::Add(uint64_t offset, uint64_t bytes) {
  if (bytes == 0) return;
  const uint64_t end = offset + bytes;
  if (offset % kWordBytes != 0 || end % kWordBytes != 0) {
    std::lock_guard lock(mutex_);
    if (offset % kWordBytes != 0) edges_.push_back(WordDown(offset));
    if (end % kWordBytes != 0) edges_.push_back(WordDown(end));
  }
  if (WordUp(offset) < WordDown(end)) AddWords(WordUp(offset), WordDown(end) - WordUp(offset));
}

void MirrorDigest::AddWords(uint64_t offset, uint64_t bytes) {
  const uint64_t end = offset + bytes;
  while (offset < end) {
    const uint64_t within = offset & (cell_bytes_ - 1);
    const uint64_t part = std::min(end - offset, cell_bytes_ - within);
    const auto* words = reinterpret_cast<const uint64_t*>(image_ + offset);
    sums_[offset / cell_bytes_].fetch_add(DigestWords(words, part / kWordBytes, within / kWordBytes),
                                          std::memory_order_relaxed);
    offset += part;
  }
}

std::vector<uint64_t> MirrorDigest::Finish() {
  std::lock_guard lock(mutex_);
  std::sort(edges_.begin(), edges_.end());
  edges_.erase(std::unique(edges_.begin(), edges_.end()), edges_.end());
  for (uint64_t edge : edges_) AddWords(edge, kWordBytes);
  return {sums_.begin(), sums_.end()};
}

}  // namespace residency
