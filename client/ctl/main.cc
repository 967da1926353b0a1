// SPDX-License-Identifier: Apache-2.0
//
// residencyctl: the command line of residencyd. Reads the flags and runs one command.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <optional>
#include <string>

#include "client/ctl/attach_command.h"
#include "client/ctl/doctor_command.h"
#include "client/ctl/flags.h"
#include "client/ctl/model_commands.h"
#include "client/ctl/report.h"
#include "client/ctl/status_commands.h"
#include "mechanisms/version.h"

namespace residency {
namespace {

constexpr char kFooter[] =
    "Sizes: 12GiB, 500MB or plain bytes. Durations: 500ms, 5s, 1m30s.\n"
    "Exit status: 0 done, 1 refused, 2 usage, 3 daemon not reachable, 4 timed out.\n"
    "`residencyctl COMMAND --help` has an example of each command.";

int Main(int argc, char** argv) {
  CLI::App app("Talks to residencyd, the residency broker of this host.", "residencyctl");
  app.set_help_flag("--help", "prints this and exits");
  app.set_version_flag("--version", std::string("residencyctl ") + kVersion);
  app.footer(kFooter);
  // A missing one is found below: CLI11 would say so of a mistyped one too.
  app.require_subcommand(0, 1);
  GlobalFlags flags;
  std::optional<absl::Duration> timeout;
  app.add_option("--runtime_dir", flags.runtime_dir,
                 "where the daemon's sockets are; $RESIDENCY_RUNTIME_DIR, else $XDG_RUNTIME_DIR/residency where a "
                 "socket is there, else /run/residency")
      ->type_name("DIR");
  AddDuration(app, "--timeout", timeout, "bounds connecting and short calls; 5s if not given");
  app.add_flag("--json", flags.json, "prints one JSON document, errors included");
  Command chosen;
  AddModelCommands(app, flags, chosen);
  AddAttachCommand(app, flags, chosen);
  AddStatusCommands(app, flags, chosen);
  AddDoctorCommand(app, flags, chosen);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    // CLI11 has an exit status for each kind of error; for a script they are all usage.
    return app.exit(error) == 0 ? kExitDone : kExitUsage;
  }
  if (!chosen) {
    std::fputs("residencyctl: no command given; residencyctl --help lists them\n", stderr);
    return kExitUsage;
  }
  flags.timeout = timeout.value_or(flags.timeout);
  return chosen();
}

}  // namespace
}  // namespace residency

int main(int argc, char** argv) { return residency::Main(argc, argv); }
