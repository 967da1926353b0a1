// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/sim_stream.h"

#include <thread>
#include <utility>

namespace residency {

std::shared_ptr<SimStream> SimStream::Start(SimHealth& health, bool blocking) {
  std::shared_ptr<SimStream> stream(new SimStream(health, blocking));
  // Detached: cuStreamDestroy does not wait for the work, which ends on its own, and nobody is left to join.
  std::thread([stream] { stream->Run(); }).detach();
  return stream;
}

void SimStream::Do(Work work) {
  const auto do_if_healthy = [this, work = std::move(work)] {
    if (health_.error() != CUDA_SUCCESS) return;
    if (const CUresult result = work(); result != CUDA_SUCCESS) health_.Poison(result);
  };
  Push({.work = do_if_healthy, .marker = nullptr});
}

std::shared_ptr<SimMarker> SimStream::Mark() {
  auto marker = std::make_shared<SimMarker>();
  Push({.work = nullptr, .marker = marker});
  return marker;
}

void SimStream::WaitFor(std::shared_ptr<SimMarker> marker) {
  Push({.work = [marker = std::move(marker)] { marker->Wait(); }, .marker = nullptr});
}

bool SimStream::Idle() const {
  std::lock_guard lock(mutex_);
  return steps_.empty() && !working_;
}

void SimStream::Close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_one();
}

void SimStream::Push(Step step) {
  std::unique_lock lock(mutex_);
  if (ended_) {
    lock.unlock();
    if (step.work) step.work();
    if (step.marker) step.marker->Reach();
    return;
  }
  steps_.push_back(std::move(step));
  changed_.notify_one();
}

void SimStream::Run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !steps_.empty() || closed_; });
    if (steps_.empty()) {
      ended_ = true;
      return;
    }
    Step step = std::move(steps_.front());
    steps_.pop_front();
    working_ = step.work != nullptr;
    lock.unlock();
    if (step.work) step.work();
    if (step.marker) step.marker->Reach();
    step = {};  // What the step holds is let go before the stream counts as idle.
    lock.lock();
    working_ = false;
  }
}

}  // namespace residency
