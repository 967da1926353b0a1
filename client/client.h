// SPDX-License-Identifier: Apache-2.0
//
// A process's connection to residencyd. Connect opens the service only; the page channel, the driver and the reader
// thread come with the first Activate, so a program that only asks for the status never touches a GPU.
//
// Threads: any. Leases and uses end before their Client.
#ifndef RESIDENCY_CLIENT_CLIENT_H_
#define RESIDENCY_CLIENT_CLIENT_H_

#include <grpcpp/channel.h>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/lease.h"
#include "client/reader.h"
#include "mechanisms/driver.h"
#include "proto/residency.grpc.pb.h"

namespace residency {

struct ConnectOptions {
  std::string runtime_dir;                    // empty: DefaultRuntimeDir()
  std::string client_name;                    // shown in status; at most 64 printable bytes
  absl::Duration timeout = absl::Seconds(5);  // of connecting, and of each short call
};

struct ActivateOptions {
  std::optional<uint64_t> device_bytes;  // most that the model may hold on its GPU; nothing: what it needs
  uint64_t working_bytes = 0;            // what the caller needs beside the weights; shown in status
  absl::Time deadline = absl::InfiniteFuture();
};

class Client : private PhaseCalls {
 public:
  // Errors as DialDaemon.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(ConnectOptions options);
  // Leases and uses have ended.
  ~Client() override;
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Brings `model` onto its GPU, maps it into this process and blocks until both are done. Leases on one model in one
  // client share their addresses.
  //  The refusals of the call Activate; those of OpenSession, OpenDriver and Device::OpenByUuid;
  //  DEADLINE_EXCEEDED/DEADLINE; what Reader::Claim and Lease::Make say.
  absl::StatusOr<Lease> Activate(std::string_view model, const ActivateOptions& options = {});

  // The model's tensors. NOT_FOUND/NO_SUCH_MODEL.
  absl::StatusOr<TensorTable> ListTensors(std::string_view model, absl::Time deadline);

  // For the calls that need no lease.
  v1::Residency::Stub& service() { return *stub_; }
  const std::string& runtime_dir() const { return options_.runtime_dir; }

 private:
  Client(ConnectOptions options, std::shared_ptr<grpc::Channel> channel);
  absl::StatusOr<Reader*> OpenReader(absl::Time deadline);
  absl::StatusOr<Driver> OpenNamedDriver(const std::string& name, const std::string& sim_directory);
  absl::StatusOr<v1::ActivateResponse> CallActivate(std::string_view model, const ActivateOptions& options);
  absl::StatusOr<Lease> ActivateWith(Reader& reader, std::string_view model, const ActivateOptions& options);
  void ReleaseLease(uint64_t lease_id);
  absl::StatusOr<PhaseBegun> CallBeginPhase(uint64_t lease_id, std::string_view component,
                                            absl::Time deadline) override;
  absl::Status CallEndPhase(uint64_t lease_id, uint64_t phase_id) override;

  const ConnectOptions options_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Residency::Stub> stub_;

  std::mutex mutex_;
  std::condition_variable released_;
  int releases_under_way_ = 0;  // guarded by mutex_

  std::mutex opening_mutex_;  // held while the page channel is being opened
  // Set once, under opening_mutex_; constant afterwards.
  std::string session_id_;
  Driver driver_;
  std::unique_ptr<Reader> reader_;
};

}  // namespace residency

#endif  // RESIDENCY_CLIENT_CLIENT_H_
