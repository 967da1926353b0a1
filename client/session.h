// SPDX-License-Identifier: Apache-2.0
//
// Opens the page channel: connects to RUNTIME_DIR/pages.sock, says Hello, reads Welcome. Any thread.
#ifndef RESIDENCY_CLIENT_SESSION_H_
#define RESIDENCY_CLIENT_SESSION_H_

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "mechanisms/page_channel.h"
#include "mechanisms/unique_fd.h"

namespace residency {

inline constexpr uint32_t kPageProtocolVersion = 1;

// As Welcome states it.
struct SessionTerms {
  std::string session_id;
  std::string epoch;
  std::string driver;         // "cuda" or "sim"
  std::string sim_directory;  // empty for cuda
};

struct Session {
  PageChannel channel;
  SessionTerms terms;
};

// Errors of ConnectUnix and PageChannel; what the daemon's Refused says; DEADLINE_EXCEEDED/NO_ANSWER where no Welcome
// came by `deadline`. Raises this process's soft limit of open files to the hard one, because cells travel as
// descriptors.
absl::StatusOr<Session> OpenSession(const std::string& pages_socket, std::string_view client_name, absl::Time deadline);

// The part after connecting, for a socket that is connected already.
absl::StatusOr<Session> BeginSession(UniqueFd socket, std::string_view client_name, absl::Time deadline);

// A Status from the text of a packet; a code that is none of absl's is UNKNOWN.
absl::Status StatusFromText(std::string_view code, std::string_view reason, std::string_view message);

}  // namespace residency

#endif  // RESIDENCY_CLIENT_SESSION_H_
