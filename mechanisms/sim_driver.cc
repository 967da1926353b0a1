// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/sim_driver.h"

#include <time.h>

#include <cerrno>
#include <mutex>
#include <utility>

#include "absl/time/time.h"
#include "mechanisms/sim_calls.h"
#include "mechanisms/sim_errors.h"

namespace residency {
namespace {

std::atomic<SimProcess*> the_process{nullptr};

// Waits as a slow driver does: on the calling thread, to a deadline.
void Delay(absl::Duration delay) {
  timespec deadline;
  ::clock_gettime(CLOCK_MONOTONIC, &deadline);
  deadline = absl::ToTimespec(absl::DurationFromTimespec(deadline) + delay);
  while (::clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &deadline, nullptr) == EINTR) {
  }
}

}  // namespace

SimProcess* TheSimProcess() { return the_process.load(std::memory_order_acquire); }

SimContext*& CurrentSimContext() {
  thread_local SimContext* current = nullptr;
  return current;
}

SimProcess::SimProcess(const SimOptions& options, std::unique_ptr<FaultPlan> faults, std::unique_ptr<SimCards> cards)
    : options(options), faults(std::move(faults)), cards(std::move(cards)), hosts(this->faults->pin_limit_bytes()) {
  for (size_t i = 0; i < this->cards->size(); ++i) {
    contexts.push_back(std::make_unique<SimContext>(this->cards->card(i), space, hosts, options.context_bytes,
                                                    options.link_bytes_per_second));
  }
}

CUresult EnterSimCall(std::string_view name, SimNeeds needs) {
  SimProcess* process = TheSimProcess();
  if (process == nullptr) return CUDA_ERROR_NOT_INITIALIZED;
  SimContext* context = CurrentSimContext();
  const CallFault fault =
      process->faults->OnCall(name, absl::FromChrono(std::chrono::steady_clock::now() - process->opened_at));
  if (fault.delay > absl::ZeroDuration()) Delay(fault.delay);
  if (fault.error != CUDA_SUCCESS) {
    if (context != nullptr && IsSticky(fault.error)) context->health().Poison(fault.error);
    return fault.error;
  }
  if (needs == SimNeeds::kNothing) return CUDA_SUCCESS;
  if (!process->initialized) return CUDA_ERROR_NOT_INITIALIZED;
  if (needs == SimNeeds::kInit) return CUDA_SUCCESS;
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (!context->active()) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  return context->health().error();
}

absl::StatusOr<Driver> OpenSimDriver(const SimOptions& options) {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (SimProcess* process = TheSimProcess()) {
    if (!(process->options == options)) {
      return absl::FailedPreconditionError("the simulated driver is already open in this process with other options");
    }
  } else {
    absl::StatusOr<std::unique_ptr<FaultPlan>> faults = FaultPlan::Parse(options.faults);
    if (!faults.ok()) return faults.status();
    absl::StatusOr<std::unique_ptr<SimCards>> cards =
        SimCards::Open(options.directory, options.devices, options.device_bytes);
    if (!cards.ok()) return cards.status();
    the_process.store(new SimProcess(options, *std::move(faults), *std::move(cards)), std::memory_order_release);
  }
  Driver driver;
  FillSimDeviceCalls(driver);
  FillSimMemoryCalls(driver);
  FillSimStreamCalls(driver);
  return driver;
}

}  // namespace residency
