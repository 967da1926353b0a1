// SPDX-License-Identifier: Apache-2.0
#include "client/client.h"

#include <grpcpp/client_context.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/dial.h"
#include "client/grpc_status.h"
#include "client/session.h"
#include "mechanisms/open_driver.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

// How much longer than the daemon we wait, so that its answer, which says more, comes first.
constexpr absl::Duration kAnswerGrace = absl::Seconds(1);

// One ReleaseLease that nobody waits for; owned by its callback.
struct PendingRelease {
  grpc::ClientContext context;
  v1::ReleaseLeaseRequest request;
  v1::ReleaseLeaseResponse response;
};

void SetDeadline(grpc::ClientContext& context, absl::Time deadline) {
  if (deadline != absl::InfiniteFuture()) context.set_deadline(absl::ToChronoTime(deadline));
}

void SetDuration(google::protobuf::Duration& proto, absl::Duration duration) {
  duration = std::max(duration, absl::ZeroDuration());
  proto.set_seconds(absl::IDivDuration(duration, absl::Seconds(1), &duration));
  proto.set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(duration)));
}

TensorEntry FromProto(const v1::Tensor& tensor, const std::vector<std::string>& components) {
  TensorEntry entry;
  entry.name = tensor.name();
  if (tensor.component() < components.size()) entry.component = components[tensor.component()];
  entry.dtype = tensor.dtype();
  entry.shape.assign(tensor.shape().begin(), tensor.shape().end());
  entry.bytes = tensor.bytes();
  entry.device_offset = tensor.device_offset();
  return entry;
}

// Counts an Activate for the reader as long as it lives.
class ActivationScope {
 public:
  explicit ActivationScope(Reader& reader) : reader_(reader) { reader_.BeginActivation(); }
  ~ActivationScope() { reader_.EndActivation(); }
  ActivationScope(const ActivationScope&) = delete;
  ActivationScope& operator=(const ActivationScope&) = delete;

 private:
  Reader& reader_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(ConnectOptions options) {
  if (options.runtime_dir.empty()) options.runtime_dir = DefaultRuntimeDir();
  auto channel = DialDaemon(options.runtime_dir, absl::Now() + options.timeout);
  if (!channel.ok()) return channel.status();
  return std::unique_ptr<Client>(new Client(std::move(options), *std::move(channel)));
}

Client::Client(ConnectOptions options, std::shared_ptr<grpc::Channel> channel)
    : options_(std::move(options)), channel_(std::move(channel)), stub_(v1::Residency::NewStub(channel_)) {}

Client::~Client() {
  // The reader starts no release once it is gone, and those that it started have a deadline.
  reader_.reset();
  std::unique_lock<std::mutex> lock(mutex_);
  released_.wait(lock, [this] { return releases_under_way_ == 0; });
}

absl::StatusOr<Driver> Client::OpenNamedDriver(const std::string& name, const std::string& sim_directory) {
  auto kind = ParseDriverKind(name);
  if (!kind.ok()) return kind.status();
  SimOptions sim;
  sim.directory = sim_directory;
  if (const char* faults = std::getenv("RESIDENCY_SIM_FAULTS"); faults != nullptr) sim.faults = faults;
  return OpenDriver(*kind, sim);
}

absl::StatusOr<Reader*> Client::OpenReader(absl::Time deadline) {
  const std::lock_guard<std::mutex> lock(opening_mutex_);
  if (reader_ != nullptr) return reader_.get();
  deadline = std::min(deadline, absl::Now() + options_.timeout);
  auto session = OpenSession(PagesSocketPath(options_.runtime_dir), options_.client_name, deadline);
  if (!session.ok()) return session.status();
  auto driver = OpenNamedDriver(session->terms.driver, session->terms.sim_directory);
  if (!driver.ok()) return driver.status();
  driver_ = *driver;
  session_id_ = session->terms.session_id;
  auto reader =
      Reader::Start(std::move(session->channel), driver_, [this](uint64_t lease_id) { ReleaseLease(lease_id); });
  if (!reader.ok()) return reader.status();
  reader_ = *std::move(reader);
  return reader_.get();
}

absl::StatusOr<Lease> Client::Activate(std::string_view model, const ActivateOptions& options) {
  auto reader = OpenReader(options.deadline);
  if (!reader.ok()) return reader.status();
  if (auto status = (*reader)->SessionStatus(); !status.ok()) return status;
  const ActivationScope scope(**reader);
  auto lease = ActivateWith(**reader, model, options);
  // Another thread gave the same lease back while this one was given it: the next one is of its own.
  if (ReasonOf(lease.status()) == "RELEASED") lease = ActivateWith(**reader, model, options);
  return lease;
}

absl::StatusOr<Lease> Client::ActivateWith(Reader& reader, std::string_view model, const ActivateOptions& options) {
  auto activated = CallActivate(model, options);
  if (!activated.ok()) return activated.status();
  auto record = reader.Claim(activated->lease_id(), activated->generation(), options.deadline);
  if (!record.ok()) return record.status();
  // The table is of the model as it is now; the lease compares the layouts.
  auto table = ListTensors(model, absl::Now() + options_.timeout);
  if (!table.ok()) {
    reader.Retire(activated->lease_id());
    return table.status();
  }
  return Lease::Make(reader, **record, *std::move(table), activated->mode() == v1::MODEL_MODE_PHASED ? this : nullptr);
}

absl::StatusOr<v1::ActivateResponse> Client::CallActivate(std::string_view model, const ActivateOptions& options) {
  v1::ActivateRequest request;
  request.set_model(std::string(model));
  request.set_session_id(session_id_);
  request.set_working_bytes(options.working_bytes);
  if (options.device_bytes.has_value()) request.mutable_budget()->set_device_bytes(*options.device_bytes);
  grpc::ClientContext context;
  if (options.deadline != absl::InfiniteFuture()) {
    SetDuration(*request.mutable_deadline(), options.deadline - absl::Now());
    SetDeadline(context, options.deadline + kAnswerGrace);
  }
  v1::ActivateResponse response;
  if (auto status = FromGrpcStatus(stub_->Activate(&context, request, &response)); !status.ok()) return status;
  return response;
}

absl::StatusOr<PhaseBegun> Client::CallBeginPhase(uint64_t lease_id, std::string_view component, absl::Time deadline) {
  v1::BeginPhaseRequest request;
  request.set_session_id(session_id_);
  request.set_lease_id(lease_id);
  request.set_component(std::string(component));
  grpc::ClientContext context;
  if (deadline != absl::InfiniteFuture()) {
    SetDuration(*request.mutable_deadline(), deadline - absl::Now());
    SetDeadline(context, deadline + kAnswerGrace);
  }
  v1::BeginPhaseResponse response;
  if (auto status = FromGrpcStatus(stub_->BeginPhase(&context, request, &response)); !status.ok()) return status;
  return PhaseBegun{response.phase_id(), response.generation(), response.bytes_moved(),
                    absl::Seconds(response.seconds())};
}

absl::Status Client::CallEndPhase(uint64_t lease_id, uint64_t phase_id) {
  v1::EndPhaseRequest request;
  request.set_session_id(session_id_);
  request.set_lease_id(lease_id);
  request.set_phase_id(phase_id);
  grpc::ClientContext context;
  SetDeadline(context, absl::Now() + options_.timeout);
  v1::EndPhaseResponse response;
  return FromGrpcStatus(stub_->EndPhase(&context, request, &response));
}

absl::StatusOr<TensorTable> Client::ListTensors(std::string_view model, absl::Time deadline) {
  grpc::ClientContext context;
  SetDeadline(context, deadline);
  v1::ListTensorsRequest request;
  request.set_model(std::string(model));
  const auto stream = stub_->ListTensors(&context, request);
  TensorTable table;
  std::vector<std::string> components;
  v1::ListTensorsResponse piece;
  for (bool first = true; stream->Read(&piece); first = false) {
    if (first) {
      table.layout_digest = piece.layout_digest();
      table.span_bytes = piece.span_bytes();
      components.assign(piece.components().begin(), piece.components().end());
    }
    for (const v1::Tensor& tensor : piece.tensors()) table.tensors.push_back(FromProto(tensor, components));
  }
  if (auto status = FromGrpcStatus(stream->Finish()); !status.ok()) return status;
  return table;
}

// A release that does not get through is no loss: the daemon ends the session's leases when this process ends.
void Client::ReleaseLease(uint64_t lease_id) {
  auto release = std::make_unique<PendingRelease>();
  release->request.set_session_id(session_id_);
  release->request.set_lease_id(lease_id);
  SetDeadline(release->context, absl::Now() + options_.timeout);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++releases_under_way_;
  }
  PendingRelease* const started = release.release();
  stub_->async()->ReleaseLease(&started->context, &started->request, &started->response,
                               [this, started](const grpc::Status&) {
                                 delete started;
                                 const std::lock_guard<std::mutex> lock(mutex_);
                                 --releases_under_way_;
                                 released_.notify_all();
                               });
}

}  // namespace residency
