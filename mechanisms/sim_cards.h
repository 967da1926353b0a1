// SPDX-License-Identifier: Apache-2.0
//
// The simulated cards, shared by every process that opens the same directory, and the ledger of what is
// taken of each. What is free is counted, never noted down: everything that takes memory of a card is a
// file in the card's folder, opened once by its maker under a shared flock. Handles, mappings and
// exported descriptors all keep that one open file description, and a killed process or a socket with a
// descriptor in flight lets go of it exactly when the kernel does. So a file is alive while an exclusive
// flock through a fresh open of its path fails; whoever finds a dead one removes it.
//
//   DIRECTORY/lock, cards        the cards' description and the lock under which it is first written
//   DIRECTORY/N/lock             card N: held while taking memory and while counting
//   DIRECTORY/N/m-BYTES-ID       device memory, with a label of one page behind its BYTES
//   DIRECTORY/N/c-BYTES-ID       a charge without pages: a process's context; a label is all that it holds
//
// A label also notes which processes hold the memory, for UsedByProcess alone: one that was killed is still noted.
//
// Any thread. Figures are bytes.
#ifndef RESIDENCY_MECHANISMS_SIM_CARDS_H_
#define RESIDENCY_MECHANISMS_SIM_CARDS_H_

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "mechanisms/unique_fd.h"

namespace residency {

// Smallest unit of device memory, as on the real cards.
inline constexpr uint64_t kSimGranuleBytes = uint64_t{2} << 20;

class SimCard {
 public:
  using Uuid = std::array<unsigned char, 16>;
  enum class Kind { kMemory, kCharge };

  SimCard(int index, const Uuid& uuid, uint64_t total_bytes, UniqueFd folder, UniqueFd lock);

  int index() const { return index_; }
  const Uuid& uuid() const { return uuid_; }
  uint64_t total_bytes() const { return total_bytes_; }

  // Takes `bytes` of the card until the last copy of the descriptor is gone. Memory reads as zeros.
  // RESOURCE_EXHAUSTED when less is free; INTERNAL for an error of the file system.
  absl::StatusOr<UniqueFd> Take(Kind kind, uint64_t bytes);

  // What is free now. INTERNAL for an error of the file system.
  absl::StatusOr<uint64_t> FreeBytes();

  // Notes that this process holds the memory of `fd`, which another one made, or that it lets go of memory that it
  // made or joined. Where there is no room for a note none is made.
  void Join(int fd);
  void Leave(int fd);
  // Bytes by pid: memory is charged to the first of its holders that lives, which is its maker while that has not let
  // go. INTERNAL for an error of the file system.
  absl::StatusOr<std::map<int64_t, uint64_t>> UsedByProcess();

 private:
  // All are called under the card's lock.
  absl::StatusOr<uint64_t> CountUsedBytes();
  // Calls `each` for what is alive, with no descriptor where this process may not open it, and removes what is not.
  absl::Status ForEachAlive(const std::function<void(Kind kind, uint64_t bytes, int fd)>& each);
  absl::StatusOr<UniqueFd> MakeFile(Kind kind, uint64_t bytes, uint64_t& next_id);
  void ReplaceHolder(int fd, int32_t from, int32_t to);

  const int index_;
  const Uuid uuid_;
  const uint64_t total_bytes_;
  const UniqueFd folder_;
  const UniqueFd lock_;
  std::mutex mutex_;  // flock does not tell threads of one process apart
};

// A piece of device memory that arrived as a descriptor.
struct SimLabel {
  int card_index = 0;
  uint64_t bytes = 0;
};

class SimCards {
 public:
  // Opens `directory`, made when absent; the first to open it describes `devices` cards of
  // `device_bytes` there. Errors name the directory.
  static absl::StatusOr<std::unique_ptr<SimCards>> Open(const std::string& directory, uint32_t devices,
                                                        uint64_t device_bytes);

  size_t size() const { return cards_.size(); }
  SimCard& card(size_t index) { return *cards_[index]; }

  // What memory of these cards `fd` is, or nothing where it is something else.
  std::optional<SimLabel> LabelOf(int fd) const;

 private:
  std::vector<std::unique_ptr<SimCard>> cards_;
};

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_SIM_CARDS_H_
