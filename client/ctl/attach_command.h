// SPDX-License-Identifier: Apache-2.0
//
// attach: does from the shell what a client process does: takes a lease, maps its cells, reads them back, keeps it.
#ifndef RESIDENCY_CLIENT_CTL_ATTACH_COMMAND_H_
#define RESIDENCY_CLIENT_CTL_ATTACH_COMMAND_H_

#include "client/ctl/flags.h"

namespace residency {

// `flags` and `chosen` outlive `app`.
void AddAttachCommand(CLI::App& app, const GlobalFlags& flags, Command& chosen);

}  // namespace residency

#endif  // RESIDENCY_CLIENT_CTL_ATTACH_COMMAND_H_
