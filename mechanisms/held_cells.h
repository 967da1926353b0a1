// SPDX-License-Identifier: Apache-2.0
//
// Which cells of a model clients have mapped still, while they let them go one after the other: an arena that gives its
// cells to another one waits for each. Told by one thread, asked by another: any thread may call anything.
#ifndef RESIDENCY_MECHANISMS_HELD_CELLS_H_
#define RESIDENCY_MECHANISMS_HELD_CELLS_H_

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <stop_token>

namespace residency {

class HeldCells {
 public:
  // A client more has each of `cells`, or one less.
  void Hold(const std::set<uint32_t>& cells);
  void LetGo(const std::set<uint32_t>& cells);

  bool IsHeld(uint32_t cell) const;
  // Whether any cell is.
  bool any() const;
  // How often cells were let go.
  uint64_t changes() const;
  // Waits until that is more than `changes`; false where `stop` was requested first.
  bool AwaitChange(uint64_t changes, std::stop_token stop) const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable_any changed_;
  std::map<uint32_t, uint32_t> holders_;  // guarded by mutex_: how many each cell has
  uint64_t changes_ = 0;                  // guarded by mutex_
};

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_HELD_CELLS_H_
