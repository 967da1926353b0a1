// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/cell_pool.h"

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
  auto memory = device_.Create(bytes);
  if (!memory.ok() && ReasonOf(memory.status()) == "GPU_MEMORY" && Trim() > 0) memory = device_.Create(bytes);
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

uint64_t CellPool::Trim() {
  idle_.clear();
  return idle_bytes_.exchange(0);
}

}  // namespace residency
