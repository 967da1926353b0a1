// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/refill_reader.h"

#include <liburing.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <deque>
#include <utility>
#include <vector>

#include "absl/base/internal/raw_logging.h"
#include "absl/strings/str_cat.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

class PreadReader final : public BlockReader {
 public:
  void Start(uint32_t slot, const BlockRead& read) override { waiting_.emplace_back(slot, read); }

  BlockResult Wait() override {
    const auto [slot, read] = waiting_.front();
    waiting_.pop_front();
    ssize_t result;
    do {
      result = ::pread(read.fd, read.buffer, read.bytes, static_cast<off_t>(read.file_offset));
    } while (result < 0 && errno == EINTR);
    return {slot, result < 0 ? -static_cast<int64_t>(errno) : result};
  }

 private:
  std::deque<std::pair<uint32_t, BlockRead>> waiting_;
};

class UringReader final : public BlockReader {
 public:
  explicit UringReader(uint32_t slots) : vectors_(slots) {}
  ~UringReader() override {
    if (ready_) io_uring_queue_exit(&ring_);
  }

  // 0, or a negated errno value. A filter may let a process make a ring and refuse its use, so one empty operation
  // goes through it.
  int Init() {
    const int made = io_uring_queue_init(static_cast<unsigned>(vectors_.size()), &ring_, 0);
    if (made < 0) return made;
    ready_ = true;
    io_uring_prep_nop(io_uring_get_sqe(&ring_));
    int result;
    do {
      result = io_uring_submit_and_wait(&ring_, 1);
    } while (result == -EINTR);
    io_uring_cqe* entry = nullptr;
    if (result < 0 || (result = io_uring_peek_cqe(&ring_, &entry)) < 0) return result;
    result = entry->res;
    io_uring_cqe_seen(&ring_, entry);
    return result;
  }

  void Start(uint32_t slot, const BlockRead& read) override {
    // The vectored operation is the oldest one: kernel 5.1 has it, the plain one came with 5.6.
    vectors_[slot] = {.iov_base = read.buffer, .iov_len = read.bytes};
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    ABSL_RAW_CHECK(entry != nullptr, "more reads under way than the ring has slots");
    io_uring_prep_readv(entry, read.fd, &vectors_[slot], 1, read.file_offset);
    entry->user_data = slot;
    // Now rather than in Wait, so that the disk works while the worker copies. What the kernel refuses for the moment
    // stays in the ring, and Wait submits it again.
    io_uring_submit(&ring_);
  }

  BlockResult Wait() override {
    io_uring_cqe* entry = nullptr;
    while (io_uring_peek_cqe(&ring_, &entry) != 0) {
      const int result = io_uring_submit_and_wait(&ring_, 1);
      // Short of memory for a moment, the kernel asks to try again; any other refusal is a mistake of ours, and with
      // reads under way there is no safe way back.
      ABSL_RAW_CHECK(result >= 0 || result == -EINTR || result == -EAGAIN || result == -EBUSY,
                     "io_uring_enter refused a prepared read");
    }
    const BlockResult answer = {static_cast<uint32_t>(entry->user_data), entry->res};
    io_uring_cqe_seen(&ring_, entry);
    return answer;
  }

 private:
  io_uring ring_ = {};
  bool ready_ = false;
  std::vector<iovec> vectors_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<BlockReader>> MakePreadReader(uint32_t /*slots*/) {
  return std::make_unique<PreadReader>();
}

absl::StatusOr<std::unique_ptr<BlockReader>> MakeUringReader(uint32_t slots) {
  auto reader = std::make_unique<UringReader>(slots);
  if (const int result = reader->Init(); result < 0) {
    return Refuse(absl::StatusCode::kUnavailable, "NO_URING",
                  absl::StrCat("the system refuses io_uring: ", std::strerror(-result)));
  }
  return reader;
}

}  // namespace residency
