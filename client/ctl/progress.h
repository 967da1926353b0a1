// SPDX-License-Identifier: Apache-2.0
//
// What a person sees on standard error while a long call runs; nothing where standard error is no terminal.
#ifndef RESIDENCY_CLIENT_CTL_PROGRESS_H_
#define RESIDENCY_CLIENT_CTL_PROGRESS_H_

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

#include "absl/time/time.h"

namespace residency {

// "[#########.........]  47 %  5.27 GiB of 11.22 GiB  3.10 GiB/s  5.00 GiB pinned", at most `columns` wide.
// `bytes_total` 0: not known yet. What is pinned stands there once something is. Pure.
std::string ProgressLine(uint64_t bytes_done, uint64_t bytes_total, uint64_t pinned_bytes, absl::Duration elapsed,
                         uint64_t columns);

// A bar that is redrawn with every Update. One thread.
class ProgressBar {
 public:
  ProgressBar();
  ~ProgressBar();  // wipes the bar
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  void Update(uint64_t bytes_done, uint64_t bytes_total, uint64_t pinned_bytes);

 private:
  const bool visible_;
  const absl::Time start_;
  absl::Time drawn_ = absl::InfinitePast();
};

// "activating flux  3.2 s", redrawn by a thread of its own while it lives.
class Spinner {
 public:
  explicit Spinner(std::string what);
  ~Spinner();
  Spinner(const Spinner&) = delete;
  Spinner& operator=(const Spinner&) = delete;

 private:
  void Run();

  const std::string what_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace residency

#endif  // RESIDENCY_CLIENT_CTL_PROGRESS_H_
