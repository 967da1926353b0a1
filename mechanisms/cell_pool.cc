// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/cell_pool.h"

#include <utility>

#include "mechanisms/units.h"

namespace residency {
namespace {

uint64_t CountOf(const CellCounts& counts, uint64_t bytes) {
  const auto found = counts.find(bytes);
  return found == counts.end() ? 0 : found->second;
}

}  // namespace

absl::StatusOr<Cell> CellPool::Take(uint64_t bytes) {
  if (auto found = idle_.find(bytes); found != idle_.end() && !found->second.empty()) {
    Cell cell = std::move(found->second.back());
    found->second.pop_back();
    idle_bytes_ -= bytes;
    return cell;
  }
  GiveBack(bytes, {});
  auto memory = device_.Create(bytes);
  if (!memory.ok()) return memory.status();
  return Cell{.memory = *std::move(memory), .descriptor = UniqueFd()};
}

void CellPool::Put(Cell cell) {
  const uint64_t bytes = cell.memory.bytes();
  idle_[bytes].push_back(std::move(cell));
  idle_bytes_ += bytes;
}

absl::Status CellPool::Export(Cell& cell) const {
  if (cell.descriptor.valid()) return absl::OkStatus();
  auto descriptor = device_.Export(cell.memory);
  if (!descriptor.ok()) return descriptor.status();
  cell.descriptor = *std::move(descriptor);
  return absl::OkStatus();
}

bool CellPool::HasIdle(uint64_t bytes) const {
  const auto found = idle_.find(bytes);
  return found != idle_.end() && !found->second.empty();
}

uint64_t CellPool::MissingBytes(const CellCounts& needed) const {
  uint64_t missing_bytes = 0;
  for (const auto& [bytes, count] : needed) {
    const auto found = idle_.find(bytes);
    const uint64_t idle_count = found == idle_.end() ? 0 : found->second.size();
    missing_bytes += SaturatingSubtract(count, idle_count) * bytes;
  }
  return missing_bytes;
}

uint64_t CellPool::IdleBytesBeyond(const CellCounts& kept) const {
  uint64_t idle_bytes = 0;
  for (const auto& [bytes, cells] : idle_) idle_bytes += SaturatingSubtract(cells.size(), CountOf(kept, bytes)) * bytes;
  return idle_bytes;
}

absl::Status CellPool::Stock(const CellCounts& needed) {
  GiveBack(MissingBytes(needed), needed);
  for (const auto& [bytes, count] : needed) {
    while (idle_[bytes].size() < count) {
      auto memory = device_.Create(bytes);
      if (!memory.ok()) return memory.status();
      Put(Cell{.memory = *std::move(memory), .descriptor = UniqueFd()});
    }
  }
  return absl::OkStatus();
}

void CellPool::GiveBack(uint64_t bytes, const CellCounts& kept) {
  uint64_t given_bytes = 0;
  // The largest first: the fewest calls.
  for (auto size = idle_.rbegin(); size != idle_.rend() && given_bytes < bytes; ++size) {
    while (size->second.size() > CountOf(kept, size->first) && given_bytes < bytes) {
      given_bytes += size->first;
      idle_bytes_ -= size->first;
      size->second.pop_back();
    }
  }
}

uint64_t CellPool::Trim() {
  idle_.clear();
  return idle_bytes_.exchange(0);
}

}  // namespace residency
