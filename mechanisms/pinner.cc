// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/pinner.h"

#include <system_error>
#include <utility>

#include "mechanisms/refusal.h"

namespace residency {

Pinner::Pinner(const Device& device, PinCallbacks callbacks) : device_(device), callbacks_(std::move(callbacks)) {
  try {
    thread_ = std::thread([this] { Work(); });
  } catch (const std::system_error&) {
    // Where the system gives no more threads, Finish does the work.
  }
}

Pinner::~Pinner() { (void)Stop(); }

std::vector<HostRegistration> Pinner::Stop() {
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  Join();
  return TakePinned();
}

std::vector<HostRegistration> Pinner::TakePinned() {
  std::vector<HostRegistration> taken;
  for (Pinned& pinned : std::exchange(pinned_, {})) taken.push_back(std::move(pinned.registration));
  return taken;
}

void Pinner::Join() {
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void Pinner::Add(size_t owner, std::byte* address, uint64_t bytes) {
  {
    std::lock_guard lock(mutex_);
    ranges_.push_back({owner, address, bytes});
  }
  changed_.notify_one();
}

absl::StatusOr<std::vector<Pinner::Pinned>> Pinner::Finish() {
  {
    std::lock_guard lock(mutex_);
    all_added_ = true;
  }
  if (thread_.joinable()) {
    Join();
  } else {
    Work();
  }
  if (!status_.ok()) return status_;
  return std::move(pinned_);
}

void Pinner::Work() {
  std::unique_lock lock(mutex_);
  while (status_.ok()) {
    changed_.wait(lock, [this] { return stopped_ || all_added_ || next_ < ranges_.size(); });
    if (stopped_ || next_ == ranges_.size()) return;
    const Range range = ranges_[next_++];
    lock.unlock();
    Pin(range);
    lock.lock();
  }
}

void Pinner::Pin(const Range& range) {
  absl::StatusOr<HostRegistration> registration = device_.RegisterHost(range.address, range.bytes);
  if (!registration.ok()) {
    status_ = registration.status();
    if (callbacks_.refused != nullptr) callbacks_.refused(status_, pinned_bytes_);
  } else {
    pinned_.push_back({range.owner, *std::move(registration)});
    pinned_bytes_ += range.bytes;
    if (callbacks_.locked != nullptr) callbacks_.locked(range.owner, range.address, range.bytes);
    if (callbacks_.progress == nullptr || callbacks_.progress(pinned_bytes_)) return;
    status_ = Refuse(absl::StatusCode::kCancelled, "CANCELLED", "page-locking was cancelled");
  }
  if (callbacks_.give_back != nullptr) callbacks_.give_back(TakePinned());
  // At once, for the reading that feeds us may go on for long, and others may want the memory's limit.
  pinned_.clear();
}

}  // namespace residency
