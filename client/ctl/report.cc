// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/report.h"

#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "client/ctl/proto_json.h"
#include "mechanisms/refusal.h"

namespace residency {

ExitStatus ExitStatusOf(const absl::Status& status) {
  if (status.ok()) return kExitDone;
  if (status.code() == absl::StatusCode::kDeadlineExceeded) return kExitTimedOut;
  for (const char* reason : {"NO_SOCKET", "CONNECTION_REFUSED", "SOCKET_PERMISSION", "CONNECTION_LOST", "DAEMON_GONE",
                             "HANG_UP", "PATH_TOO_LONG", "BAD_PATH", "WRONG_SOCKET_TYPE"}) {
    if (ReasonOf(status) == reason) return kExitUnreachable;
  }
  return kExitRefused;
}

std::string RefusalLine(const absl::Status& status) {
  const std::string reason = ReasonOf(status);
  const std::string line =
      absl::StrCat(absl::StatusCodeToString(status.code()), reason.empty() ? "" : "/", reason, ": ", status.message());
  return absl::StrReplaceAll(line, {{"\n", " "}});
}

int ReportError(const GlobalFlags& flags, const absl::Status& status) {
  if (flags.json) Print(absl::StrCat(JsonText(ErrorToJson(status)), "\n"));
  std::fputs(absl::StrCat("residencyctl: ", RefusalLine(status), "\n").c_str(), stderr);
  return ExitStatusOf(status);
}

int ReportDone(const GlobalFlags& flags, const google::protobuf::Message& response, const std::string& text) {
  Print(flags.json ? absl::StrCat(JsonText(ProtoToJson(response)), "\n") : text);
  return kExitDone;
}

int ReportHalfDone(const GlobalFlags& flags, const google::protobuf::Message& response, const std::string& text,
                   const std::string& done, const absl::Status& refused) {
  GlobalFlags as_text = flags;
  if (flags.json) {
    auto document = ErrorToJson(refused);
    document[done] = ProtoToJson(response);
    Print(absl::StrCat(JsonText(document), "\n"));
    as_text.json = false;
  } else {
    Print(text);
  }
  return ReportError(as_text, refused);
}

void Print(const std::string& text) {
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
}

}  // namespace residency
