// SPDX-License-Identifier: Apache-2.0
//
// status and tensors: the commands that only look.
#ifndef RESIDENCY_CLIENT_CTL_STATUS_COMMANDS_H_
#define RESIDENCY_CLIENT_CTL_STATUS_COMMANDS_H_

#include "client/ctl/flags.h"

namespace residency {

// `flags` and `chosen` outlive `app`.
void AddStatusCommands(CLI::App& app, const GlobalFlags& flags, Command& chosen);

}  // namespace residency

#endif  // RESIDENCY_CLIENT_CTL_STATUS_COMMANDS_H_
