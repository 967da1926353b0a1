// SPDX-License-Identifier: Apache-2.0
//
// residencyd's command line.
#ifndef RESIDENCY_DAEMON_OPTIONS_H_
#define RESIDENCY_DAEMON_OPTIONS_H_

#include <sys/types.h>

#include <optional>
#include <string>

#include "daemon/broker.h"
#include "mechanisms/driver.h"
#include "mechanisms/sim_driver.h"

namespace residency {

struct DaemonOptions {
  std::string runtime_dir;
  std::optional<gid_t> socket_group;  // absent: DefaultSocketGroup
  DriverKind driver = DriverKind::kCuda;
  SimOptions sim;
  bool use_nvml = true;     // where it is there
  BrokerOptions broker;     // without its identity
  std::string replay_path;  // of a recording to decide again instead of serving; empty: serve
};

// What the command line says, or the exit status with which to end (after --help, --version, or an error that was
// printed).
struct ParsedOptions {
  std::optional<DaemonOptions> options;
  int exit_status = 0;
};
ParsedOptions ParseOptions(int argc, char** argv);

}  // namespace residency

#endif  // RESIDENCY_DAEMON_OPTIONS_H_
