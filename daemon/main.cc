// SPDX-License-Identifier: Apache-2.0
//
// residencyd: from the command line to a daemon that serves, and back down.
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <iostream>
#include <memory>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "daemon/broker.h"
#include "daemon/connections.h"
#include "daemon/listener.h"
#include "daemon/loop.h"
#include "daemon/notify.h"
#include "daemon/options.h"
#include "daemon/recording.h"
#include "daemon/runtime_dir.h"
#include "daemon/service.h"
#include "daemon/socket_group.h"
#include "mechanisms/open_driver.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

// How long calls have to end by themselves once the daemon is told to stop; they were answered before.
constexpr absl::Duration kGrace = absl::Milliseconds(500);
// After a GPU was lost the process is gone by then, whatever hangs.
constexpr unsigned kLostGraceSeconds = 3;

std::string RandomEpoch() {
  std::string bytes(16, '\0');
  while (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
  }
  return absl::BytesToHexString(bytes);
}

// Each cell and each connection is a descriptor.
void RaiseDescriptorLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  (void)setrlimit(RLIMIT_NOFILE, &limit);
}

int Fail(const absl::Status& status) {
  const std::string reason = ReasonOf(status);
  std::fprintf(stderr, "residencyd: %s%s%s: %s\n", absl::StatusCodeToString(status.code()).c_str(),
               reason.empty() ? "" : "/", reason.c_str(), std::string(status.message()).c_str());
  return 1;
}

// Runs `task` on `loop` and waits for it.
void RunOn(Loop& loop, std::function<void()> task) {
  std::promise<void> done;
  loop.Post([&] {
    task();
    done.set_value();
  });
  done.get_future().wait();
}

int Serve(const DaemonOptions& options, const sigset_t& signals) {
  auto lock = ClaimRuntimeDir(options.runtime_dir);
  if (!lock.ok()) return Fail(lock.status());
  const auto driver = OpenDriver(options.driver, options.sim);
  if (!driver.ok()) return Fail(driver.status());
  auto loop = Loop::Start("decision");
  if (!loop.ok()) return Fail(loop.status());

  BrokerOptions broker_options = options.broker;
  broker_options.identity.epoch = RandomEpoch();
  broker_options.identity.driver = std::string(DriverKindName(options.driver));
  if (options.driver == DriverKind::kSim) broker_options.identity.sim_directory = options.sim.directory;
  broker_options.nvml =
      options.use_nvml ? OpenNvml(options.driver)
                       : Refuse(absl::StatusCode::kUnavailable, "NO_NVML", "--nvml no: processes are not told apart");
  auto broker = Broker::Start(**loop, *driver, std::move(broker_options));
  if (!broker.ok() && options.driver == DriverKind::kCuda && ReasonOf(broker.status()) == "NO_DEVICE") {
    return Fail(Refuse(
        broker.status().code(), "NO_DEVICE",
        absl::StrCat(std::string(broker.status().message()), "; without a GPU, --driver=sim runs on a simulated one")));
  }
  if (!broker.ok()) return Fail(broker.status());

  Connections connections;
  Service service(**loop, **broker, connections);
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  builder.RegisterService(&service);
  // Clients may keep an idle watch alive by pings as often as they like; they are on this machine.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 1000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) return Fail(absl::InternalError("gRPC did not start"));

  absl::Status listening;
  std::unique_ptr<Listener> grpc_listener;
  std::unique_ptr<Listener> pages_listener;
  std::atomic<bool> lost{false};
  RunOn(**loop, [&] {
    (*broker)->OnLost([&lost](const absl::Status&) {
      // Nothing that this process could still do is right; the service manager starts a new one. A lost GPU's driver
      // may not return from a call, and somebody may wait for that call's answer.
      lost = true;
      signal(SIGALRM, [](int) { _exit(1); });
      alarm(kLostGraceSeconds);
      kill(getpid(), SIGTERM);
    });
    auto pages = Listener::Open(
        **loop, absl::StrCat(options.runtime_dir, "/pages.sock"), SOCK_SEQPACKET,
        [&](UniqueFd connection, const PeerIdentity& peer) { (*broker)->sessions().Add(std::move(connection), peer); });
    listening = pages.status();
    if (!listening.ok()) return;
    pages_listener = *std::move(pages);
    auto grpc = Listener::Open(
        **loop, absl::StrCat(options.runtime_dir, "/grpc.sock"), SOCK_STREAM,
        [&](UniqueFd connection, const PeerIdentity& peer) { connections.Add(*server, std::move(connection), peer); });
    listening = grpc.status();
    if (listening.ok()) grpc_listener = *std::move(grpc);
  });
  if (listening.ok()) {
    if (options.broker.pin == PinPolicy::kNo && options.broker.tier == HostTier::kFile) {
      spdlog::warn("--pin no is for the host tier mirror: models of the tier file, the default here, are page-locked");
    }
    spdlog::info("serving on {}, driver {}", options.runtime_dir, DriverKindName(options.driver));
    NotifyManager("READY=1");
    int signal = 0;
    sigwait(&signals, &signal);
    spdlog::info("{} received, ending", strsignal(signal));
    NotifyManager("STOPPING=1");
    server->GetHealthCheckService()->SetServingStatus(false);
  }

  RunOn(**loop, [&] {
    grpc_listener.reset();
    pages_listener.reset();
    (*broker)->ShutDown();
    service.ShutDown();
  });
  server->Shutdown(absl::ToChronoTime(absl::Now() + kGrace));
  server->Wait();
  // Giving back what a lost GPU held is work for a driver that fails at it or hangs; its memory goes with the process.
  if (lost) {
    spdlog::shutdown();
    _exit(1);
  }
  (*loop)->Stop();
  broker->reset();
  if (!listening.ok()) return Fail(listening);
  // All of ours is put away. ~Server would now wait for gRPC's threads, one of which sleeps up to 10 s after an answer
  // that filled a socket (the backup poller of its tcp_posix.cc), and who stops us allows half of that.
  std::_Exit(0);
}

int ReplayRecording(const std::string& path) {
  const absl::StatusOr<bool> same = Replay(path, std::cout);
  std::cout.flush();
  if (!same.ok()) return Fail(same.status());
  return *same ? 0 : 1;
}

}  // namespace

int Main(int argc, char** argv) {
  const ParsedOptions parsed = ParseOptions(argc, argv);
  if (!parsed.options.has_value()) return parsed.exit_status;
  if (!parsed.options->replay_path.empty()) return ReplayRecording(parsed.options->replay_path);
  spdlog::set_default_logger(spdlog::stderr_color_mt("residencyd"));
  // Before any thread is started, so that none of them takes the signals.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  // A recording that reaches the limit on a file's size ends; the daemon does not.
  signal(SIGXFSZ, SIG_IGN);
  RaiseDescriptorLimit();
  const absl::StatusOr<gid_t> group =
      parsed.options->socket_group.has_value() ? *parsed.options->socket_group : DefaultSocketGroup();
  if (!group.ok()) return Fail(group.status());
  if (auto status = TakeGroup(*group); !status.ok()) return Fail(status);
  return Serve(*parsed.options, signals);
}

}  // namespace residency

int main(int argc, char** argv) { return residency::Main(argc, argv); }
