// SPDX-License-Identifier: Apache-2.0
//
// Page-locks ranges of host memory on a thread of its own, one after the other in the order in which they are added,
// so that whoever fills memory goes on meanwhile. One thread, because the driver's calls hardly scale: 23 GB/s with
// one, 27 with eight, on an H200's host. All or nothing: once one range is refused nothing stays locked, and the rest
// is not tried.
//
// Threads: the callbacks run on the pinner's; Add may be called on any; the rest on the owner's. The ranges outlive the
// pinner and what it hands out.
#ifndef RESIDENCY_MECHANISMS_PINNER_H_
#define RESIDENCY_MECHANISMS_PINNER_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "mechanisms/device.h"

namespace residency {

struct PinCallbacks {
  // How many bytes of all ranges are locked, after each one; false gives up. May be empty.
  std::function<bool(uint64_t pinned_bytes)> progress;
  // What Device::RegisterHost refused one with; `pinned_bytes` had been locked by then, and are until this returns.
  // At most once. May be empty.
  std::function<void(const absl::Status& status, uint64_t pinned_bytes)> refused;
  // A range is locked. May be empty.
  std::function<void(size_t owner, const std::byte* address, uint64_t bytes)> locked;
  // Takes what was locked before one was refused or progress gave up, to give it back. Empty: it is given back at once.
  std::function<void(std::vector<HostRegistration> pinned)> give_back;
};

class Pinner {
 public:
  struct Pinned {
    size_t owner = 0;
    HostRegistration registration;
  };

  // For `device`, which outlives what the pinner hands out.
  Pinner(const Device& device, PinCallbacks callbacks);
  // Tries no more, and gives back what nobody has taken.
  ~Pinner();
  Pinner(const Pinner&) = delete;
  Pinner& operator=(const Pinner&) = delete;

  // `owner` is the caller's word for whose range it is.
  void Add(size_t owner, std::byte* address, uint64_t bytes);

  // Once every range was tried, or one was refused: the ranges, in the order of Add, locked until their owners drop
  // them. What Device::RegisterHost answers; CANCELLED/CANCELLED where progress gave up. Once, after the last Add.
  absl::StatusOr<std::vector<Pinned>> Finish();

  // Tries no more. What is locked and nobody has taken, for the caller; after the last Add.
  std::vector<HostRegistration> Stop();

 private:
  struct Range {
    size_t owner;
    std::byte* address;
    uint64_t bytes;
  };

  void Work();
  void Pin(const Range& range);
  void Join();
  std::vector<HostRegistration> TakePinned();

  const Device& device_;
  const PinCallbacks callbacks_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Range> ranges_;  // guarded by mutex_
  size_t next_ = 0;            // guarded by mutex_: of ranges_
  bool all_added_ = false;     // guarded by mutex_
  bool stopped_ = false;       // guarded by mutex_

  // The thread's while it runs.
  std::vector<Pinned> pinned_;
  uint64_t pinned_bytes_ = 0;
  absl::Status status_;

  std::thread thread_;
};

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_PINNER_H_
