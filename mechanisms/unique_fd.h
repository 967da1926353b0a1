// SPDX-License-Identifier: Apache-2.0
//
// UniqueFd owns one file descriptor and closes it when it goes. Any thread may hold one; one object is
// for one thread at a time. Every descriptor in the project is held by a UniqueFd or is a plain int that
// borrows from one.
#ifndef RESIDENCY_MECHANISMS_UNIQUE_FD_H_
#define RESIDENCY_MECHANISMS_UNIQUE_FD_H_

#include <unistd.h>

#include <utility>

namespace residency {

class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  UniqueFd(const UniqueFd&) = delete;
  UniqueFd& operator=(const UniqueFd&) = delete;
  ~UniqueFd() { reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  // Hands the descriptor to the caller, who closes it.
  [[nodiscard]] int release() { return std::exchange(fd_, -1); }
  void reset() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }

 private:
  int fd_ = -1;
};

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_UNIQUE_FD_H_
