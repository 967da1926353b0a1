// SPDX-License-Identifier: Apache-2.0
//
// register, activate, deactivate, unload, verify: the commands that change or check a model.
#ifndef RESIDENCY_CLIENT_CTL_MODEL_COMMANDS_H_
#define RESIDENCY_CLIENT_CTL_MODEL_COMMANDS_H_

#include "client/ctl/flags.h"

namespace residency {

// `flags` and `chosen` outlive `app`.
void AddModelCommands(CLI::App& app, const GlobalFlags& flags, Command& chosen);

}  // namespace residency

#endif  // RESIDENCY_CLIENT_CTL_MODEL_COMMANDS_H_
