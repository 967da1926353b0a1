// SPDX-License-Identifier: Apache-2.0
#include "client/reader.h"

#include <errno.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

// Between two looks at a stream capture that is in the way: nothing tells of its end.
constexpr int kCaptureRetryMilliseconds = 1;

}  // namespace

absl::StatusOr<std::unique_ptr<Reader>> Reader::Start(PageChannel channel, const Driver& driver,
                                                      ReleaseLeaseFunction release_lease) {
  UniqueFd wakeup(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wakeup.valid()) return ErrnoStatus(errno, "eventfd of the reader thread");
  std::unique_ptr<Reader> reader(new Reader(std::move(channel), driver, std::move(wakeup), std::move(release_lease)));
  reader->thread_ = std::thread([raw = reader.get()] { raw->Run(); });
  return reader;
}

Reader::Reader(PageChannel channel, const Driver& driver, UniqueFd wakeup, ReleaseLeaseFunction release_lease)
    : channel_(std::move(channel)),
      driver_(driver),
      wakeup_(std::move(wakeup)),
      release_lease_(std::move(release_lease)) {}

Reader::~Reader() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
  }
  Wake();
  thread_.join();
}

void Reader::Wake() {
  const uint64_t one = 1;
  // The only failure is a counter that is full, and then the reader is awake already.
  [[maybe_unused]] const ssize_t written = write(wakeup_.get(), &one, sizeof(one));
}

void Reader::BeginActivation() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++activations_;
}

void Reader::EndActivation() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    --activations_;
    if (activations_ == 0) ended_meanwhile_.clear();
  }
  Wake();
}

absl::StatusOr<LeaseRecord*> Reader::Claim(uint64_t lease_id, uint64_t generation, absl::Time deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto record = AwaitLocked(lock, lease_id, generation, deadline);
  if (record.ok()) ++(*record)->handles;
  return record;
}

absl::Status Reader::AwaitGeneration(uint64_t lease_id, uint64_t generation, absl::Time deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  return AwaitLocked(lock, lease_id, generation, deadline).status();
}

absl::StatusOr<LeaseRecord*> Reader::AwaitLocked(std::unique_lock<std::mutex>& lock, uint64_t lease_id,
                                                 uint64_t generation, absl::Time deadline) {
  while (true) {
    const auto found = records_.find(lease_id);
    if (found != records_.end()) {
      LeaseRecord& record = *found->second;
      if (!record.stopped.ok()) return record.stopped;
      const bool failed = record.pages == nullptr || record.failed_generation >= generation;
      if (failed && !record.failure.ok()) return record.failure;
      if (record.retiring) {
        return Refuse(absl::StatusCode::kAborted, "RELEASED",
                      absl::StrCat("the lease on ", record.model, " was released while it was activated again"));
      }
      if (record.pages != nullptr && record.generation.load(std::memory_order_acquire) >= generation) {
        return &record;
      }
    } else if (!session_status_.ok()) {
      return session_status_;
    } else if (ended_meanwhile_.contains(lease_id)) {
      return Refuse(absl::StatusCode::kAborted, "RELEASED",
                    absl::StrCat("lease ", lease_id, " was released while it was activated again"));
    }
    if (deadline == absl::InfiniteFuture()) {
      changed_.wait(lock);
    } else if (changed_.wait_until(lock, absl::ToChronoTime(deadline)) == std::cv_status::timeout) {
      return Refuse(absl::StatusCode::kDeadlineExceeded, "DEADLINE",
                    absl::StrCat("the memory of lease ", lease_id, " did not come over the page channel in time"));
    }
  }
}

void Reader::Retire(uint64_t lease_id) {
  RetireWaiter waiter;
  std::unique_lock<std::mutex> lock(mutex_);
  const auto found = records_.find(lease_id);
  if (found == records_.end() || --found->second->handles > 0) return;
  LeaseRecord& record = *found->second;
  record.retiring = true;
  record.waiter = &waiter;
  Wake();
  const auto patience = absl::ToChronoTime(absl::Now() + kRetirePatience);
  const bool answered = changed_.wait_until(lock, patience, [&waiter] { return waiter.done || waiter.outlived; });
  // The record is there as long as nobody has called the waiter.
  if (!answered) record.waiter = nullptr;
}

absl::Status Reader::StopStatus(const LeaseRecord& record) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!record.stopped.ok()) return record.stopped;
  if (!record.failure.ok()) return record.failure;
  return Refuse(absl::StatusCode::kAborted, "REVOKED",
                absl::StrCat("the daemon took the memory of ", record.model, " by force"));
}

absl::Status Reader::SessionStatus() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return session_status_;
}

void Reader::Run() {
  while (true) {
    AwaitWork();
    if (connected_) ReadPackets();
    AdvanceAll();
    const std::lock_guard<std::mutex> lock(mutex_);
    if (ending_) break;
  }
}

void Reader::AwaitWork() {
  pollfd pollers[2] = {{wakeup_.get(), POLLIN, 0}, {channel_.fd(), POLLIN, 0}};
  if (connected_ && channel_.wants_write()) pollers[1].events |= POLLOUT;
  // An interrupted poll is a look for nothing, which does no harm.
  (void)poll(pollers, connected_ ? 2 : 1, retry_soon_ ? kCaptureRetryMilliseconds : -1);
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t drained = read(wakeup_.get(), &count, sizeof(count));
}

void Reader::AdvanceAll() {
  retry_soon_ = false;
  DropUnclaimed();
  // Finish takes a record out, so the next one is found by its id.
  for (auto entry = records_.begin(); entry != records_.end();) {
    const uint64_t lease_id = entry->first;
    Advance(*entry->second);
    entry = records_.upper_bound(lease_id);
  }
}

void Reader::DropUnclaimed() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (activations_ > 0) return;
  for (auto& [lease_id, record] : records_) {
    if (record->handles == 0) record->retiring = true;
  }
}

void Reader::Advance(LeaseRecord& record) {
  bool retiring = false;
  bool over = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    retiring = record.retiring;
    // After a hang-up users go on reading what is mapped, until their lease goes.
    over = record.ended || (retiring && !connected_);
  }
  if (retiring && !over && !std::exchange(record.release_asked, true)) release_lease_(record.id);
  if (record.pages != nullptr) {
    if (!over && !record.revoked.has_value()) return;
    // From here on no Cancel of the daemon comes in between.
    if (over) {
      StopUsers(record, Refuse(absl::StatusCode::kAborted, "RELEASED",
                               absl::StrCat("the lease on ", record.model, " was released")));
    }
    if (!TakePages(record, over)) return;
    if (GiveCellsBack(record) == GiveBack::kLater) return;
  }
  if (retiring && over) Finish(record.id);
}

bool Reader::TakePages(LeaseRecord& record, bool over) {
  while (true) {
    switch (record.pages->word().TryTake()) {
      case TakeResult::kTaken:
      case TakeResult::kAlreadyTaken:
        return true;
      case TakeResult::kInUse: {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (RetireWaiter* waiter = std::exchange(record.waiter, nullptr); waiter != nullptr) {
          waiter->outlived = true;
          changed_.notify_all();
        }
        return false;
      }
      case TakeResult::kOpen:
        if (!over) {
          record.revoked.reset();
          return false;
        }
        // A daemon that took a revocation back and ended the lease, or died, before its users had left.
        record.pages->word().Stop(kStoppedByClient);
    }
  }
}

Reader::GiveBack Reader::GiveCellsBack(LeaseRecord& record) {
  absl::Status status = record.pages->has_cells() ? record.pages->WaitForDeviceWork() : absl::OkStatus();
  if (ReasonOf(status) == "CAPTURING") {
    retry_soon_ = true;
    return GiveBack::kLater;
  }
  // A context that is lost runs nothing any more, so there is nothing to wait for; unmapping still works in it.
  status = absl::OkStatus();
  bool answered = false;
  while (status.ok()) {
    const auto piece = record.pages->UnmapPiece();
    status = piece.status();
    if (!status.ok() || (piece->empty() && answered)) break;
    if (record.revoked.has_value()) SendReleased(record.id, *record.revoked, *piece);
    answered = true;
    if (piece->empty()) break;
  }
  if (record.revoked.has_value()) record.released_generation = *std::exchange(record.revoked, std::nullopt);
  if (status.ok()) return GiveBack::kDone;
  // The cells are still mapped, so the daemon is not told otherwise: they go with this process.
  StopUsers(record, status);
  const std::lock_guard<std::mutex> lock(mutex_);
  record.ended = true;
  return GiveBack::kFailed;
}

void Reader::Finish(uint64_t lease_id) {
  LeaseRecord& record = *records_.at(lease_id);
  // The addresses go before the waiter does, for whom nothing of the lease may be left.
  record.pages.reset();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (record.waiter != nullptr) record.waiter->done = true;
  if (activations_ > 0) ended_meanwhile_.insert(lease_id);
  records_.erase(lease_id);
  changed_.notify_all();
}

void Reader::StopUsers(LeaseRecord& record, const absl::Status& why) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!record.stopped.ok()) return;
    record.stopped = why;
    changed_.notify_all();
  }
  if (record.pages != nullptr) record.pages->word().Stop(kStoppedByClient);
}

LeaseRecord* Reader::FindRecord(uint64_t lease_id) {
  const auto found = records_.find(lease_id);
  return found == records_.end() ? nullptr : found->second.get();
}

}  // namespace residency
