// SPDX-License-Identifier: Apache-2.0
//
// Streams and events of the simulated driver. A stream is a thread that does its work in order; a marker
// is a point in a stream that others can wait for, and everything that waits (events, synchronising, the
// default stream) is made of markers. Any thread.
#ifndef RESIDENCY_MECHANISMS_SIM_STREAM_H_
#define RESIDENCY_MECHANISMS_SIM_STREAM_H_

#include <cuda.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace residency {

// A point in a stream's order. Shared by the stream that reaches it and by everybody who waits for it.
class SimMarker {
 public:
  bool reached() const { return reached_.load(std::memory_order_acquire); }
  void Wait() const { reached_.wait(false, std::memory_order_acquire); }
  // When it was reached; only after reached().
  std::chrono::steady_clock::time_point time() const { return time_; }

  void Reach() {
    time_ = std::chrono::steady_clock::now();
    reached_.store(true, std::memory_order_release);
    reached_.notify_all();
  }

 private:
  std::atomic<bool> reached_{false};
  std::chrono::steady_clock::time_point time_;
};

// The error that made a context unusable, or CUDA_SUCCESS. The first one stays.
class SimHealth {
 public:
  CUresult error() const { return error_.load(); }
  void Poison(CUresult error) {
    CUresult healthy = CUDA_SUCCESS;
    error_.compare_exchange_strong(healthy, error);
  }
  void Clear() { error_.store(CUDA_SUCCESS); }

 private:
  std::atomic<CUresult> error_{CUDA_SUCCESS};
};

class SimStream : public std::enable_shared_from_this<SimStream> {
 public:
  using Work = std::function<CUresult()>;

  // Starts the stream's thread. `health` outlives the stream: work that fails poisons it, and on a poisoned
  // context work is passed over while markers are still reached.
  static std::shared_ptr<SimStream> Start(SimHealth& health, bool blocking);

  void Do(Work work);
  std::shared_ptr<SimMarker> Mark();
  void WaitFor(std::shared_ptr<SimMarker> marker);
  bool Idle() const;
  // The thread ends by itself once the work is done. What another thread still gives the stream after that
  // is done at once, on the giver's thread.
  void Close();
  // True for a stream that keeps order with the default stream.
  bool blocking() const { return blocking_; }

 private:
  // One of the two.
  struct Step {
    std::function<void()> work;
    std::shared_ptr<SimMarker> marker;
  };

  SimStream(SimHealth& health, bool blocking) : health_(health), blocking_(blocking) {}
  void Push(Step step);
  void Run();

  SimHealth& health_;
  const bool blocking_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Step> steps_;
  // Work has been taken out and is not done. Never true for a marker: whoever was woken by one may ask at
  // once whether the stream is idle.
  bool working_ = false;
  bool closed_ = false;
  bool ended_ = false;  // Run has returned
};

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_SIM_STREAM_H_
