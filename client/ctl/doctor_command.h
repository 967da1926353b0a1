// SPDX-License-Identifier: Apache-2.0
//
// doctor: looks at the machine and says what is missing, or measures what a card can do; works without a daemon.
#ifndef RESIDENCY_CLIENT_CTL_DOCTOR_COMMAND_H_
#define RESIDENCY_CLIENT_CTL_DOCTOR_COMMAND_H_

#include "client/ctl/flags.h"

namespace residency {

// `flags` and `chosen` outlive `app`.
void AddDoctorCommand(CLI::App& app, const GlobalFlags& flags, Command& chosen);

}  // namespace residency

#endif  // RESIDENCY_CLIENT_CTL_DOCTOR_COMMAND_H_
