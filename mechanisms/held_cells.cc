// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/held_cells.h"

namespace residency {

void HeldCells::Hold(const std::set<uint32_t>& cells) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (uint32_t cell : cells) ++holders_[cell];
}

void HeldCells::LetGo(const std::set<uint32_t>& cells) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (uint32_t cell : cells) {
    const auto held = holders_.find(cell);
    if (held != holders_.end() && --held->second == 0) holders_.erase(held);
  }
  ++changes_;
  changed_.notify_all();
}

bool HeldCells::IsHeld(uint32_t cell) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return holders_.contains(cell);
}

bool HeldCells::any() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !holders_.empty();
}

uint64_t HeldCells::changes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return changes_;
}

bool HeldCells::AwaitChange(uint64_t changes, std::stop_token stop) const {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait(lock, std::move(stop), [&] { return changes_ > changes; });
}

}  // namespace residency
