// SPDX-License-Identifier: Apache-2.0
//
// A daemon of a test's own and a client that registers files with it, call by call, so that a test sees the refusal
// itself, how long the verdict took, and what memory it left behind. Main thread.
#ifndef RESIDENCY_TESTS_REGISTRAR_H_
#define RESIDENCY_TESTS_REGISTRAR_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/client.h"
#include "mechanisms/refusal.h"
#include "tests/daemon_rig.h"

namespace residency {

// Memory that is taken, as measured.
struct Memory {
  uint64_t pinned_bytes = 0;
  uint64_t pageable_bytes = 0;
  uint64_t broker_bytes = 0;
  uint64_t free_bytes = 0;  // with the cells that wait in the pool, which count as available

  bool operator==(const Memory&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Memory& memory);

class Registrar {
 public:
  explicit Registrar(std::vector<std::string> daemon_flags = {});

  DaemonRig& rig() { return rig_; }
  v1::Residency::Stub& service() { return client_->service(); }

  // Registers and waits for the verdict. `on_progress` hears of every message before the last.
  absl::StatusOr<v1::RegisterModelResponse> Register(
      const v1::RegisterModelRequest& request,
      const std::function<void(const v1::RegisterModelResponse&)>& on_progress = {});
  absl::StatusOr<v1::RegisterModelResponse> Register(const std::string& name, const std::string& source);
  // The same for what must be refused, within kVerdictTime: the refusal, whose message names the file and the tensor.
  Refusal Refused(const std::string& name, const std::string& source, absl::StatusCode code);
  // How long the last call took, and what it ended with.
  absl::Duration verdict_time() const { return verdict_time_; }
  const absl::Status& last_status() const { return last_status_; }

  void Unload(const std::string& name);
  // The pieces in which the table of tensors comes, through a channel with gRPC's own limits.
  std::vector<v1::ListTensorsResponse> ListTensors(const std::string& name);
  Memory Measure();
  v1::Status Status();

 private:
  DaemonRig rig_;
  std::unique_ptr<Client> client_;
  absl::Duration verdict_time_;
  absl::Status last_status_;
};

// Whoever waits for a verdict on a file gets it by then.
inline constexpr absl::Duration kVerdictTime = absl::Seconds(1);

}  // namespace residency

#endif  // RESIDENCY_TESTS_REGISTRAR_H_
