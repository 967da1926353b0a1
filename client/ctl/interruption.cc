// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/interruption.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>

#include "absl/time/clock.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

// A signal handler has no argument of its own, so what it writes to is global.
std::atomic<int> signal_fd{-1};

void OnSignal(int) {
  const int saved = errno;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(signal_fd.load(std::memory_order_relaxed), &one, sizeof(one));
  errno = saved;
}

void Handle(void (*handler)(int)) {
  struct sigaction action {};
  action.sa_handler = handler;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

// False once there is nothing more to read.
bool DropInput() {
  char bytes[4096];
  const ssize_t count = read(STDIN_FILENO, bytes, sizeof(bytes));
  return count > 0 || (count < 0 && (errno == EINTR || errno == EAGAIN));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Interruption>> Interruption::Begin() {
  UniqueFd fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd.valid()) return ErrnoStatus(errno, "eventfd for signals");
  signal_fd.store(fd.get(), std::memory_order_relaxed);
  Handle(OnSignal);
  return std::unique_ptr<Interruption>(new Interruption(std::move(fd)));
}

Interruption::~Interruption() {
  Handle(SIG_DFL);
  signal_fd.store(-1, std::memory_order_relaxed);
}

bool Interruption::came() const {
  pollfd poller{signalled_.get(), POLLIN, 0};
  return poll(&poller, 1, 0) > 0;
}

void Interruption::WaitFor(absl::Time until, bool or_input_ends) const {
  while (!came() && absl::Now() < until) {
    pollfd pollers[2] = {{signalled_.get(), POLLIN, 0}, {STDIN_FILENO, POLLIN, 0}};
    int milliseconds = -1;
    if (until != absl::InfiniteFuture()) {
      // Rounded up, so that the last turn is no busy one.
      const int64_t left = absl::ToInt64Milliseconds(until - absl::Now()) + 1;
      milliseconds = static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
    }
    const int ready = poll(pollers, or_input_ends ? 2 : 1, milliseconds);
    if (ready > 0 && or_input_ends && pollers[1].revents != 0 && !DropInput()) return;
  }
}

}  // namespace residency
