// SPDX-License-Identifier: Apache-2.0
#include "daemon/loop.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "mechanisms/refusal.h"

namespace residency {

absl::Time MonotonicNow() {
  return absl::UnixEpoch() + absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
}

absl::StatusOr<std::unique_ptr<Loop>> Loop::Start(const std::string& name) {
  UniqueFd epoll(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll.valid()) return ErrnoStatus(errno, "epoll_create1");
  UniqueFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.valid()) return ErrnoStatus(errno, "eventfd");
  epoll_event event{.events = EPOLLIN, .data = {.u64 = 0}};
  if (epoll_ctl(epoll.get(), EPOLL_CTL_ADD, wake.get(), &event) != 0) return ErrnoStatus(errno, "epoll_ctl");
  std::unique_ptr<Loop> loop(new Loop(std::move(epoll), std::move(wake)));
  loop->thread_ = std::thread([raw = loop.get()] { raw->Run(); });
  pthread_setname_np(loop->thread_.native_handle(), name.substr(0, 15).c_str());
  return loop;
}

void Loop::Stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  eventfd_write(wake_.get(), 1);
  if (thread_.joinable()) thread_.join();
}

void Loop::Post(Task task) {
  {
    std::lock_guard lock(mutex_);
    if (stopping_ && !on_loop()) return;
    posted_.push_back(std::move(task));
  }
  eventfd_write(wake_.get(), 1);
}

uint64_t Loop::At(absl::Time when, Task task) {
  const uint64_t timer = next_timer_++;
  timers_.emplace(std::pair(when, timer), std::move(task));
  timer_times_.emplace(timer, when);
  return timer;
}

void Loop::CancelTimer(uint64_t timer) {
  const auto found = timer_times_.find(timer);
  if (found == timer_times_.end()) return;
  timers_.erase({found->second, timer});
  timer_times_.erase(found);
}

absl::Status Loop::Watch(int fd, uint32_t events, absl::AnyInvocable<void(uint32_t)> handler) {
  const auto known = watched_.find(fd);
  const uint64_t token = next_token_++;
  // The descriptor and the token in one: an event that was read before the descriptor was unwatched and its number
  // watched anew carries the old token.
  epoll_event event{.events = events, .data = {.u64 = (token << 32) | static_cast<uint32_t>(fd)}};
  if (epoll_ctl(epoll_.get(), known == watched_.end() ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, fd, &event) != 0) {
    return ErrnoStatus(errno, absl::StrCat("epoll_ctl of descriptor ", fd));
  }
  watched_.insert_or_assign(
      fd, Watched{token & 0xffffffff, std::make_shared<absl::AnyInvocable<void(uint32_t)>>(std::move(handler))});
  return absl::OkStatus();
}

void Loop::Unwatch(int fd) {
  if (watched_.erase(fd) > 0) (void)epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

void Loop::Run() {
  thread_id_ = std::this_thread::get_id();
  while (true) {
    {
      std::lock_guard lock(mutex_);
      if (stopping_ && posted_.empty()) return;
    }
    RunReady();
    RunPosted();
    RunTimers();
  }
}

int Loop::MillisecondsToNextTimer() const {
  if (timers_.empty() || timers_.begin()->first.first == absl::InfiniteFuture()) return -1;
  const absl::Duration left = timers_.begin()->first.first - MonotonicNow();
  // Rounded up, or the loop would spin through the last fraction of a millisecond.
  return static_cast<int>(
      std::clamp<int64_t>(absl::ToInt64Milliseconds(left + absl::Milliseconds(1)), 0, 60 * 60 * 1000));
}

void Loop::RunReady() {
  std::array<epoll_event, 64> events;
  const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), MillisecondsToNextTimer());
  for (int i = 0; i < count; ++i) {
    if (events[i].data.u64 == 0) {
      eventfd_t ignored;
      eventfd_read(wake_.get(), &ignored);
      continue;
    }
    const auto found = watched_.find(static_cast<int>(events[i].data.u64 & 0xffffffff));
    if (found == watched_.end() || found->second.token != events[i].data.u64 >> 32) continue;
    // Held here, since the handler may unwatch itself.
    const auto handler = found->second.handler;
    (*handler)(events[i].events);
  }
}

void Loop::RunPosted() {
  std::vector<Task> tasks;
  {
    std::lock_guard lock(mutex_);
    tasks.swap(posted_);
  }
  for (Task& task : tasks) {
    task();
    task = nullptr;  // what it holds goes before the next task runs
  }
}

void Loop::RunTimers() {
  while (!timers_.empty() && timers_.begin()->first.first <= MonotonicNow()) {
    auto node = timers_.extract(timers_.begin());
    timer_times_.erase(node.key().second);
    node.mapped()();
  }
}

}  // namespace residency
