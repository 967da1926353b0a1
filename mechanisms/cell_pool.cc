// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/cell_pool.h"

#include <iterator>
#include <utility>

#include "mechanisms/refusal.h"

namespace residency {

absl::StatusOr<Cell> CellPool::Take(uint64_t bytes) {
  if (auto found = idle_.find(bytes); found != idle_.end() && !found->second.empty()) {
    Cell cell = std::move(found->second.back());
    found->second.pop_back();
    idle_bytes_ -= bytes;
    return cell;
  }
  GiveBack(bytes);
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

void CellPool::GiveBack(uint64_t bytes) {
  for (uint64_t given_bytes = 0; given_bytes < bytes && !idle_.empty();) {
    // The largest first: the fewest calls.
    const auto largest = std::prev(idle_.end());
    if (largest->second.empty()) {
      idle_.erase(largest);
      continue;
    }
    given_bytes += largest->first;
    idle_bytes_ -= largest->first;
    largest->second.pop_back();
  }
}

uint64_t CellPool::Trim() {
  idle_.clear();
  return idle_bytes_.exchange(0);
}

}  // namespace residency
