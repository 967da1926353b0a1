// SPDX-License-Identifier: Apache-2.0
//
// How residencyctl tells what came of a command: text or JSON on standard output, a refusal as one line on standard
// error (and as a JSON document too with --json), and the exit status.
#ifndef RESIDENCY_CLIENT_CTL_REPORT_H_
#define RESIDENCY_CLIENT_CTL_REPORT_H_

#include <google/protobuf/message.h>

#include <string>

#include "absl/status/status.h"
#include "client/ctl/flags.h"

namespace residency {

enum ExitStatus { kExitDone = 0, kExitRefused = 1, kExitUsage = 2, kExitUnreachable = 3, kExitTimedOut = 4 };

// The exit status for `status`: by its code, and whether it is the daemon's word or says that there is none.
ExitStatus ExitStatusOf(const absl::Status& status);

// "RESOURCE_EXHAUSTED/GPU_BUDGET: flux needs ...", on one line.
std::string RefusalLine(const absl::Status& status);

// Prints and returns the exit status.
int ReportError(const GlobalFlags& flags, const absl::Status& status);
int ReportDone(const GlobalFlags& flags, const google::protobuf::Message& response, const std::string& text);
// The same of a command of two steps of which the second was refused: its refusal, and what came of the first, which
// stays done; with --json in one document, `response` under the key `done`.
int ReportHalfDone(const GlobalFlags& flags, const google::protobuf::Message& response, const std::string& text,
                   const std::string& done, const absl::Status& refused);

// Standard output, flushed: whoever reads a pipe sees it now.
void Print(const std::string& text);

}  // namespace residency

#endif  // RESIDENCY_CLIENT_CTL_REPORT_H_
