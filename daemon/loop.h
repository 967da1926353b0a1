// SPDX-License-Identifier: Apache-2.0
//
// A thread that runs what is posted to it, one after the other, fires timers and watches descriptors. The
// decision loop, the device loops, the gauges and the disk workers are each one Loop; what a loop owns is touched
// on it alone, so nothing above has a lock.
#ifndef RESIDENCY_DAEMON_LOOP_H_
#define RESIDENCY_DAEMON_LOOP_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "mechanisms/unique_fd.h"

namespace residency {

// Monotonic time, as an absl::Time whose epoch means nothing.
absl::Time MonotonicNow();

class Loop {
 public:
  using Task = absl::AnyInvocable<void()>;

  // Starts the thread, named `name` (at most 15 bytes).
  static absl::StatusOr<std::unique_ptr<Loop>> Start(const std::string& name);
  ~Loop() { Stop(); }
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  // Any thread. Tasks of one thread run in the order posted. After Stop began, a task posted by anybody but a
  // task is dropped.
  void Post(Task task);

  // Runs what was posted before, then ends the thread; what the loop owned may be touched by the caller from then
  // on. Not on the loop itself. Once is enough, twice no harm.
  void Stop();

  // The rest on the loop's own thread.

  // Runs `task` once, at or soon after `when`. The number is for CancelTimer.
  uint64_t At(absl::Time when, Task task);
  void CancelTimer(uint64_t timer);

  // Calls `handler` whenever `fd` (borrowed) has one of `events` (EPOLLIN, EPOLLOUT; hang-up and error
  // always). One handler per descriptor; a second Watch changes events and handler. A handler may unwatch.
  absl::Status Watch(int fd, uint32_t events, absl::AnyInvocable<void(uint32_t)> handler);
  void Unwatch(int fd);

  bool on_loop() const { return std::this_thread::get_id() == thread_id_.load(); }

 private:
  Loop(UniqueFd epoll, UniqueFd wake) : epoll_(std::move(epoll)), wake_(std::move(wake)) {}
  void Run();
  void RunPosted();
  void RunTimers();
  void RunReady();
  int MillisecondsToNextTimer() const;

  UniqueFd epoll_;
  UniqueFd wake_;  // eventfd
  std::map<std::pair<absl::Time, uint64_t>, Task> timers_;
  std::map<uint64_t, absl::Time> timer_times_;
  uint64_t next_timer_ = 1;
  struct Watched {
    uint64_t token;  // tells a handler from one that had the same descriptor number before
    std::shared_ptr<absl::AnyInvocable<void(uint32_t)>> handler;
  };
  std::map<int, Watched> watched_;
  uint64_t next_token_ = 1;

  std::mutex mutex_;
  std::vector<Task> posted_;                // under mutex_
  bool stopping_ = false;                   // under mutex_
  std::atomic<std::thread::id> thread_id_;  // of thread_, which Stop ends while others ask
  std::thread thread_;
};

}  // namespace residency

#endif  // RESIDENCY_DAEMON_LOOP_H_
