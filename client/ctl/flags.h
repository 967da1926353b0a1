// SPDX-License-Identifier: Apache-2.0
//
// What all commands share: the global flags, options with units, and how an outcome is reported. A command is a
// function that returns the exit status.
#ifndef RESIDENCY_CLIENT_CTL_FLAGS_H_
#define RESIDENCY_CLIENT_CTL_FLAGS_H_

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/time/time.h"

namespace residency {

struct GlobalFlags {
  std::string runtime_dir;  // empty: the default one
  absl::Duration timeout = absl::Seconds(5);
  bool json = false;
};

// Runs the command that was chosen, once all flags are read.
using Command = std::function<int()>;

// Options whose text has a unit. A text that has none is a usage error which names the known units.
CLI::Option* AddDuration(CLI::App& app, const std::string& name, std::optional<absl::Duration>& value,
                         const std::string& help);
CLI::Option* AddBytes(CLI::App& app, const std::string& name, std::optional<uint64_t>& value, const std::string& help);

// A command below `app` with an example for its --help; `command` is set to `run` where it is chosen.
CLI::App* AddCommand(CLI::App& app, const std::string& name, const std::string& help, const std::string& example,
                     Command& chosen, Command run);

}  // namespace residency

#endif  // RESIDENCY_CLIENT_CTL_FLAGS_H_
