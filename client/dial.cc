// SPDX-License-Identifier: Apache-2.0
#include "client/dial.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <chrono>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "mechanisms/page_channel.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

bool IsSocket(const std::string& path) {
  struct stat status {};
  return stat(path.c_str(), &status) == 0 && S_ISSOCK(status.st_mode);
}

std::string NonEmptyEnvironment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

absl::Status NoAnswer(const std::string& path) {
  return Refuse(absl::StatusCode::kDeadlineExceeded, "NO_ANSWER",
                absl::StrCat("somebody listens on ", path, " and does not answer; is the daemon stopped or stuck?"));
}

}  // namespace

std::string DefaultRuntimeDir() {
  if (std::string directory = NonEmptyEnvironment("RESIDENCY_RUNTIME_DIR"); !directory.empty()) return directory;
  if (const std::string user = NonEmptyEnvironment("XDG_RUNTIME_DIR"); !user.empty()) {
    std::string directory = absl::StrCat(user, "/residency");
    if (IsSocket(GrpcSocketPath(directory))) return directory;
  }
  return "/run/residency";
}

std::string GrpcSocketPath(const std::string& runtime_dir) { return absl::StrCat(runtime_dir, "/grpc.sock"); }

std::string PagesSocketPath(const std::string& runtime_dir) { return absl::StrCat(runtime_dir, "/pages.sock"); }

absl::StatusOr<std::shared_ptr<grpc::Channel>> DialDaemon(const std::string& runtime_dir, absl::Time deadline) {
  const std::string path = GrpcSocketPath(runtime_dir);
  grpc::ChannelArguments arguments;
  // Two clients of one process have a connection each, so that one's end is not the other's.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  auto channel = grpc::CreateCustomChannel(absl::StrCat("unix:", path), grpc::InsecureChannelCredentials(), arguments);
  grpc_connectivity_state state = channel->GetState(/*try_to_connect=*/true);
  while (state != GRPC_CHANNEL_READY) {
    if (state == GRPC_CHANNEL_TRANSIENT_FAILURE) {
      // gRPC has only one word for it, so the cause is looked for with a connection of our own.
      if (auto probe = ConnectUnix(path, SOCK_STREAM, deadline); !probe.ok()) {
        return ReasonOf(probe.status()) == "CONNECT_TIMEOUT" ? NoAnswer(path) : probe.status();
      }
    }
    if (!channel->WaitForStateChange(state, absl::ToChronoTime(deadline))) return NoAnswer(path);
    state = channel->GetState(/*try_to_connect=*/true);
  }
  return channel;
}

}  // namespace residency
