// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/use_word.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <cstddef>

#include "mechanisms/refusal.h"

namespace residency {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// Neither call is made process-private: daemon and client sleep and wake through one page.
long Futex(std::atomic<uint32_t>* address, int operation, uint32_t value, const timespec* deadline) {
  return syscall(SYS_futex, address, operation, value, deadline, nullptr, FUTEX_BITSET_MATCH_ANY);
}

}  // namespace

bool SharedUseMemory::WaitSequence(uint32_t seen, absl::Time deadline) {
  // Absolute, so that a signal in between does not lengthen the wait. The kernel refuses times before 1970.
  timespec until{};
  if (deadline > absl::UnixEpoch()) until = absl::ToTimespec(deadline);
  const bool bounded = deadline != absl::InfiniteFuture();
  const long result =
      Futex(&page_->sequence, FUTEX_WAIT_BITSET | FUTEX_CLOCK_REALTIME, seen, bounded ? &until : nullptr);
  // Woken, interrupted, or not asleep because the sequence has moved on: in all of these the caller looks again.
  return result == 0 || errno != ETIMEDOUT;
}

void SharedUseMemory::WakeSequence() { Futex(&page_->sequence, FUTEX_WAKE, INT_MAX, nullptr); }

void SharedUseMemory::WakeReader() {
  // The only failure is a counter that is full, and then the reader is awake already.
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(reader_eventfd_, &one, sizeof(one));
}

absl::StatusOr<UniqueFd> MakeUseWordPage() {
  UniqueFd fd(memfd_create("residency-use-word", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return ErrnoStatus(errno, "memfd_create of a use word");
  if (ftruncate(fd.get(), kUseWordPageBytes) != 0) return ErrnoStatus(errno, "ftruncate of a use word");
  const uint64_t word = kUseWordClosed | kUseWordTaken;
  static_assert(offsetof(UseWordPage, word) == 0);
  if (pwrite(fd.get(), &word, sizeof(word), 0) != sizeof(word)) return ErrnoStatus(errno, "write of a use word");
  if (fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) return ErrnoStatus(errno, "sealing of a use word");
  return fd;
}

absl::StatusOr<UseWordMapping> UseWordMapping::Map(int fd) {
  struct stat status;
  if (fstat(fd, &status) != 0) return ErrnoStatus(errno, "fstat of a use word");
  const int seals = fcntl(fd, F_GET_SEALS);
  // Without the seals the other side could shrink the file, and the next access here would be a fault.
  if (seals < 0 || (seals & kSeals) != kSeals || status.st_size != static_cast<off_t>(kUseWordPageBytes)) {
    return Refuse(absl::StatusCode::kInvalidArgument, "BAD_USE_WORD",
                  "the descriptor of the use word is not a sealed memfd of one page");
  }
  void* address = mmap(nullptr, kUseWordPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) return ErrnoStatus(errno, "mmap of a use word");
  // The kernel zeroed the page and MakeUseWordPage wrote the word; atomics of these types have no other state.
  return UseWordMapping(static_cast<UseWordPage*>(address));
}

UseWordMapping& UseWordMapping::operator=(UseWordMapping&& other) noexcept {
  std::swap(page_, other.page_);
  return *this;
}

UseWordMapping::~UseWordMapping() {
  if (page_ != nullptr) munmap(page_, kUseWordPageBytes);
}

}  // namespace residency
