// SPDX-License-Identifier: Apache-2.0
//
// What `residencyctl doctor` finds out, as values. Each check is one line with one line of advice. One thread.
#ifndef RESIDENCY_CLIENT_CTL_HOST_CHECKS_H_
#define RESIDENCY_CLIENT_CTL_HOST_CHECKS_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "mechanisms/driver.h"
#include "mechanisms/sim_driver.h"

namespace residency {

enum class CheckState { kOk, kWarn, kFail };
std::string_view CheckStateName(CheckState state);  // OK, WARN, FAIL

struct Check {
  std::string what;
  CheckState state = CheckState::kOk;
  std::string found;
  std::string advice;  // empty where there is nothing to do
};

// The simulated cards of a directory with the faults of $RESIDENCY_SIM_FAULTS; whether somebody made cards there.
SimOptions SimOptionsFor(const std::string& sim_directory);
bool HasSimCards(const std::string& sim_directory);

// Opens the driver and tries, on every GPU, all that an activation needs. `sim_directory` is for the simulated driver,
// which is only looked at where somebody made its cards already.
std::vector<Check> CheckDriver(DriverKind kind, const std::string& sim_directory);

// Limits, io_uring, huge pages.
std::vector<Check> CheckHost();

// Whether a daemon answers.
std::vector<Check> CheckDaemon(const std::string& runtime_dir, absl::Duration timeout);

// The word in brackets in a file like /sys/kernel/mm/transparent_hugepage/shmem_enabled; empty where there is none.
std::string ChosenWord(std::string_view text);

}  // namespace residency

#endif  // RESIDENCY_CLIENT_CTL_HOST_CHECKS_H_
