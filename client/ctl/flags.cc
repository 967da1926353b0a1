// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/flags.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "mechanisms/units.h"

namespace residency {

// CLI11 reports a bad value by its own exceptions, which its parser catches.
CLI::Option* AddDuration(CLI::App& app, const std::string& name, std::optional<absl::Duration>& value,
                         const std::string& help) {
  return app
      .add_option_function<std::string>(
          name,
          [name, &value](const std::string& text) {
            auto parsed = ParseDuration(text);
            if (!parsed.ok()) throw CLI::ValidationError(name, std::string(parsed.status().message()));
            value = *parsed;
          },
          help)
      ->type_name("DURATION");
}

CLI::Option* AddBytes(CLI::App& app, const std::string& name, std::optional<uint64_t>& value, const std::string& help) {
  return app
      .add_option_function<std::string>(
          name,
          [name, &value](const std::string& text) {
            auto parsed = ParseBytes(text);
            if (!parsed.ok()) throw CLI::ValidationError(name, std::string(parsed.status().message()));
            value = *parsed;
          },
          help)
      ->type_name("BYTES");
}

CLI::App* AddCommand(CLI::App& app, const std::string& name, const std::string& help, const std::string& example,
                     Command& chosen, Command run) {
  CLI::App* const command = app.add_subcommand(name, help);
  // So that `residencyctl status --json` means what it says.
  command->fallthrough();
  command->footer(absl::StrCat("Example:\n  ", example));
  command->callback([&chosen, run = std::move(run)] { chosen = run; });
  return command;
}

}  // namespace residency
