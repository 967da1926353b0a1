// SPDX-License-Identifier: Apache-2.0
#include "daemon/service.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "daemon/calls.h"
#include "daemon/register_call.h"
#include "daemon/status.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

constexpr size_t kMaxNameBytes = 128;
// Requests about a GPU wait for each other, so nobody may hold it up for ever.
constexpr absl::Duration kMaxDrain = absl::Hours(1);
// gRPC's default limit on a message is 4 MiB on the receiving side.
constexpr size_t kTensorsMessageBytes = 1 << 20;

absl::Status CheckName(const std::string& name) {
  const bool good =
      !name.empty() && name.size() <= kMaxNameBytes && std::all_of(name.begin(), name.end(), [](unsigned char c) {
        return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '-' || c == '/' || c == ':';
      });
  if (good) return absl::OkStatus();
  return Refuse(absl::StatusCode::kInvalidArgument, "BAD_NAME",
                absl::StrCat("'", name, "' is no name for a model: 1 to ", kMaxNameBytes,
                             " letters, digits, '.', '_', '-', '/' and ':'"));
}

absl::Status CheckPath(const std::string& path) {
  if (!path.empty() && path.front() == '/') return absl::OkStatus();
  return Refuse(absl::StatusCode::kInvalidArgument, "BAD_PATH",
                absl::StrCat("'", path, "' is no absolute path; the daemon does not know the caller's folder"));
}

Budget BudgetOf(const v1::Budget& budget) {
  Budget made;
  if (budget.has_device_bytes()) made.device_bytes = budget.device_bytes();
  if (budget.has_host_bytes()) made.host_bytes = budget.host_bytes();
  return made;
}

absl::StatusOr<absl::Duration> DurationOf(const google::protobuf::Duration& duration, std::string_view field) {
  const absl::Duration made = absl::Seconds(duration.seconds()) + absl::Nanoseconds(duration.nanos());
  if (made >= absl::ZeroDuration()) return made;
  return Refuse(absl::StatusCode::kInvalidArgument, "BAD_DURATION",
                absl::StrCat(std::string(field), " is negative: ", absl::FormatDuration(made)));
}

absl::StatusOr<std::optional<HostTier>> HostTierOf(v1::HostTier tier) {
  switch (tier) {
    case v1::HOST_TIER_UNSPECIFIED:
      return std::optional<HostTier>();
    case v1::HOST_TIER_MIRROR:
      return std::optional<HostTier>(HostTier::kMirror);
    case v1::HOST_TIER_FILE:
      return std::optional<HostTier>(HostTier::kFile);
    default:
      return Refuse(absl::StatusCode::kInvalidArgument, "BAD_HOST_TIER",
                    absl::StrCat("host_tier is ", static_cast<int>(tier), ", which is none that is known here"));
  }
}

absl::StatusOr<RegisterOptions> RegisterOptionsOf(const v1::RegisterModelRequest& request) {
  if (auto status = CheckName(request.name()); !status.ok()) return status;
  RegisterOptions options{.name = request.name(),
                          .source = request.source(),
                          .device_uuid = request.device_uuid(),
                          .budget = BudgetOf(request.budget())};
  if (request.mode() != v1::MODEL_MODE_UNSPECIFIED && !v1::ModelMode_IsValid(request.mode())) {
    return Refuse(absl::StatusCode::kInvalidArgument, "BAD_MODE",
                  absl::StrCat("mode is ", static_cast<int>(request.mode()), ", which is none that is known here"));
  }
  if (request.mode() == v1::MODEL_MODE_PHASED) options.mode = ModelMode::kPhased;
  if (!request.source().empty() || request.components().empty()) {
    if (auto status = CheckPath(request.source()); !status.ok()) return status;
  }
  for (const v1::ComponentSource& component : request.components()) {
    if (auto status = CheckPath(component.path()); !status.ok()) return status;
    options.components.push_back({component.name(), component.path(), component.glob()});
  }
  switch (request.pin()) {
    case v1::PIN_POLICY_UNSPECIFIED:
      break;
    case v1::PIN_POLICY_AUTO:
      options.pin = PinPolicy::kAuto;
      break;
    case v1::PIN_POLICY_YES:
      options.pin = PinPolicy::kYes;
      break;
    case v1::PIN_POLICY_NO:
      options.pin = PinPolicy::kNo;
      break;
    default:
      return Refuse(absl::StatusCode::kInvalidArgument, "BAD_PIN",
                    absl::StrCat("pin is ", static_cast<int>(request.pin()), ", which no policy has"));
  }
  const auto tier = HostTierOf(request.host_tier());
  if (!tier.ok()) return tier.status();
  options.tier = *tier;
  options.activate = request.activate();
  return options;
}

void StartDryRun(Broker& broker, RegisterCall& call, RegisterOptions options) {
  // The call ends with its caller, the measurement does not.
  const auto gone = std::make_shared<bool>(false);
  call.OnGone([gone] { *gone = true; });
  broker.DryRun(std::move(options), [&call, gone](absl::StatusOr<v1::DryRun> run) {
    if (*gone) return;
    if (!run.ok()) return call.End(run.status());
    v1::RegisterModelResponse response;
    response.set_done(true);
    *response.mutable_dry_run() = *std::move(run);
    call.Push(std::move(response));
    call.End(absl::OkStatus());
  });
}

}  // namespace

absl::StatusOr<SessionId> Service::FindSession(const grpc::CallbackServerContext& context,
                                               const std::string& wire_id) const {
  if (!broker_.ending().ok()) return broker_.ending();
  const auto peer = connections_.Find(context.peer());
  if (!peer.has_value()) {
    return Refuse(absl::StatusCode::kPermissionDenied, "SESSION_OWNER", "the call came over no connection of ours");
  }
  return broker_.sessions().Find(wire_id, *peer);
}

grpc::ServerWriteReactor<v1::RegisterModelResponse>* Service::RegisterModel(grpc::CallbackServerContext* context,
                                                                            const v1::RegisterModelRequest* request) {
  return RegisterCall::Start(loop_, [this, request](RegisterCall& call) {
    auto options = RegisterOptionsOf(*request);
    if (!options.ok()) return call.End(options.status());
    if (request->dry_run()) return StartDryRun(broker_, call, *std::move(options));
    StartRegister(broker_, call, *std::move(options));
  });
}

grpc::ServerUnaryReactor* Service::UnloadModel(grpc::CallbackServerContext* context,
                                               const v1::UnloadModelRequest* request,
                                               v1::UnloadModelResponse* response) {
  return UnaryCall::Start(loop_, [this, request, response](UnaryCall& call) {
    const RequestId id = broker_.Unload(request->model(), [&call, response](const Reply& reply) {
      if (const auto* outcome = std::get_if<UnloadOutcome>(&reply.outcome)) {
        response->set_host_bytes(outcome->host_bytes);
        response->set_device_bytes(outcome->device_bytes);
      }
      call.End(reply.status);
    });
    call.OnGone([this, id] { broker_.Cancel(id); });
  });
}

grpc::ServerUnaryReactor* Service::Activate(grpc::CallbackServerContext* context, const v1::ActivateRequest* request,
                                            v1::ActivateResponse* response) {
  return UnaryCall::Start(loop_, [this, context, request, response](UnaryCall& call) {
    ActivateRequested event{.name = request->model(),
                            .budget = BudgetOf(request->budget()),
                            .working_bytes = request->working_bytes(),
                            .skip_verification = request->skip_verification()};
    if (!request->session_id().empty()) {
      const auto session = FindSession(*context, request->session_id());
      if (!session.ok()) return call.End(session.status());
      event.session = *session;
    }
    if (request->has_deadline()) {
      const auto deadline = DurationOf(request->deadline(), "deadline");
      if (!deadline.ok()) return call.End(deadline.status());
      event.deadline = MonotonicNow() + *deadline;
    }
    const RequestId id = broker_.Activate(std::move(event), [this, &call, response](const Reply& reply) {
      if (const auto* outcome = std::get_if<ActivateOutcome>(&reply.outcome)) {
        SetActivateResponse(*outcome, broker_, *response);
      }
      call.End(reply.status);
    });
    call.OnGone([this, id] { broker_.Cancel(id); });
  });
}

grpc::ServerUnaryReactor* Service::BeginPhase(grpc::CallbackServerContext* context,
                                              const v1::BeginPhaseRequest* request, v1::BeginPhaseResponse* response) {
  return UnaryCall::Start(loop_, [this, context, request, response](UnaryCall& call) {
    const auto session = FindSession(*context, request->session_id());
    if (!session.ok()) return call.End(session.status());
    BeginPhaseRequested event{
        .session = *session, .lease = LeaseId{request->lease_id()}, .component = request->component()};
    if (request->has_deadline()) {
      const auto deadline = DurationOf(request->deadline(), "deadline");
      if (!deadline.ok()) return call.End(deadline.status());
      event.deadline = MonotonicNow() + *deadline;
    }
    const RequestId id = broker_.BeginPhase(std::move(event), [&call, response](const Reply& reply) {
      if (const auto* outcome = std::get_if<PhaseOutcome>(&reply.outcome)) {
        response->set_phase_id(outcome->phase.value);
        response->set_generation(outcome->generation);
        response->set_bytes_moved(outcome->bytes_moved);
        response->set_seconds(absl::ToDoubleSeconds(outcome->duration));
        response->set_verified_cells(outcome->verified_cells);
        response->set_refilled_cells(outcome->refilled_cells);
        response->set_device_bytes(outcome->device_bytes);
      }
      call.End(reply.status);
    });
    call.OnGone([this, id] { broker_.Cancel(id); });
  });
}

grpc::ServerUnaryReactor* Service::EndPhase(grpc::CallbackServerContext* context, const v1::EndPhaseRequest* request,
                                            v1::EndPhaseResponse* response) {
  return UnaryCall::Start(loop_, [this, context, request](UnaryCall& call) {
    const auto session = FindSession(*context, request->session_id());
    if (!session.ok()) return call.End(session.status());
    const EndPhaseRequested event{
        .session = *session, .lease = LeaseId{request->lease_id()}, .phase = PhaseId{request->phase_id()}};
    broker_.EndPhase(event, [&call](const Reply& reply) { call.End(reply.status); });
  });
}

grpc::ServerUnaryReactor* Service::ReleaseLease(grpc::CallbackServerContext* context,
                                                const v1::ReleaseLeaseRequest* request,
                                                v1::ReleaseLeaseResponse* response) {
  return UnaryCall::Start(loop_, [this, context, request](UnaryCall& call) {
    const auto session = FindSession(*context, request->session_id());
    if (!session.ok()) return call.End(session.status());
    broker_.ReleaseLease(*session, LeaseId{request->lease_id()},
                         [&call](const Reply& reply) { call.End(reply.status); });
  });
}

grpc::ServerUnaryReactor* Service::Deactivate(grpc::CallbackServerContext* context,
                                              const v1::DeactivateRequest* request, v1::DeactivateResponse* response) {
  return UnaryCall::Start(loop_, [this, request, response](UnaryCall& call) {
    const auto drain = DurationOf(request->drain(), "drain");
    if (!drain.ok()) return call.End(drain.status());
    if (*drain > kMaxDrain) {
      return call.End(Refuse(
          absl::StatusCode::kInvalidArgument, "BAD_DURATION",
          absl::StrCat("drain is ", absl::FormatDuration(*drain), "; at most ", absl::FormatDuration(kMaxDrain))));
    }
    const RequestId id = broker_.Deactivate(request->model(), *drain, [&call, response](const Reply& reply) {
      if (const auto* outcome = std::get_if<DeactivateOutcome>(&reply.outcome)) {
        response->set_pooled_bytes(outcome->pooled_bytes);
        if (outcome->freed_bytes.has_value()) response->set_freed_bytes(*outcome->freed_bytes);
        response->set_copied_bytes(outcome->copied_bytes);
        response->set_seconds(absl::ToDoubleSeconds(outcome->duration));
      }
      call.End(reply.status);
    });
    call.OnGone([this, id] { broker_.Cancel(id); });
  });
}

grpc::ServerUnaryReactor* Service::Verify(grpc::CallbackServerContext* context, const v1::VerifyRequest* request,
                                          v1::VerifyResponse* response) {
  return UnaryCall::Start(loop_, [this, request, response](UnaryCall& call) {
    const RequestId id = broker_.Verify(request->model(), [&call, response](const Reply& reply) {
      if (const auto* outcome = std::get_if<VerifyOutcome>(&reply.outcome)) {
        response->set_verified_cells(outcome->verified_cells);
        response->set_refilled_cells(outcome->refilled_cells);
        response->set_absent_cells(outcome->absent_cells);
        response->set_seconds(absl::ToDoubleSeconds(outcome->duration));
      }
      call.End(reply.status);
    });
    call.OnGone([this, id] { broker_.Cancel(id); });
  });
}

grpc::ServerUnaryReactor* Service::Trim(grpc::CallbackServerContext* context, const v1::TrimRequest* request,
                                        v1::TrimResponse* response) {
  return UnaryCall::Start(loop_, [this, request, response](UnaryCall& call) {
    broker_.Trim(request->device_uuid(), [&call, response](absl::StatusOr<v1::TrimResponse> trimmed) {
      if (trimmed.ok()) *response = *std::move(trimmed);
      call.End(trimmed.status());
    });
  });
}

grpc::ServerWriteReactor<v1::ListTensorsResponse>* Service::ListTensors(grpc::CallbackServerContext* context,
                                                                        const v1::ListTensorsRequest* request) {
  using Call = StreamCall<v1::ListTensorsResponse>;
  return Call::Start(loop_, [this, request](Call& call) {
    const auto model = broker_.Find(request->model());
    if (!model.ok()) return call.End(model.status());
    v1::ListTensorsResponse response;
    response.set_layout_digest(model->layout_digest);
    response.set_cell_bytes(model->layout.cell_bytes);
    response.set_granule_bytes(model->layout.granule_bytes);
    response.set_span_bytes(model->layout.span_bytes);
    response.set_device_uuid(model->device_uuid);
    size_t message_bytes = 0;
    for (uint32_t i = 0; i < model->layout.components.size(); ++i) {
      response.add_components(model->layout.components[i].name);
    }
    for (uint32_t i = 0; i < model->layout.components.size(); ++i) {
      for (const LayoutTensor& tensor : model->layout.components[i].tensors) {
        v1::Tensor& added = *response.add_tensors();
        added.set_name(tensor.name);
        added.set_component(i);
        added.set_dtype(std::string(DTypeName(tensor.dtype)));
        for (uint64_t dimension : tensor.shape) added.add_shape(dimension);
        added.set_bytes(tensor.bytes);
        added.set_device_offset(tensor.device_offset);
        message_bytes += added.ByteSizeLong() + 4;
        if (message_bytes < kTensorsMessageBytes) continue;
        call.Push(std::exchange(response, {}));
        message_bytes = 0;
      }
    }
    call.Push(std::move(response));
    call.End(absl::OkStatus());
  });
}

grpc::ServerUnaryReactor* Service::GetStatus(grpc::CallbackServerContext* context, const v1::GetStatusRequest* request,
                                             v1::GetStatusResponse* response) {
  return UnaryCall::Start(loop_, [this, request, response](UnaryCall& call) {
    broker_.GetStatus(request->model(), [&call, response](absl::StatusOr<v1::Status> status) {
      if (status.ok()) *response->mutable_status() = *std::move(status);
      call.End(status.status());
    });
  });
}

namespace {

// What one WatchStatus has under way. At most one measurement is, and at most one answer waits for the reader; what
// changes meanwhile is told by the next one.
struct WatchedStatus {
  StreamCall<v1::WatchStatusResponse>* call;
  std::string model;
  std::function<void()> forget;  // drops what the service and the broker keep of it
  bool measuring = false;
  bool changed = false;
  bool ended = false;
};

void SendStatus(Broker& broker, const std::shared_ptr<WatchedStatus>& watched) {
  if (watched->ended) return;
  if (watched->measuring || watched->call->backlog() > 0) {
    watched->changed = true;
    return;
  }
  watched->measuring = true;
  watched->changed = false;
  broker.GetStatus(watched->model, [&broker, watched](absl::StatusOr<v1::Status> status) {
    watched->measuring = false;
    if (watched->ended) return;
    if (!status.ok()) {
      watched->ended = true;
      watched->call->End(status.status());
      return std::exchange(watched->forget, nullptr)();
    }
    v1::WatchStatusResponse response;
    *response.mutable_status() = *std::move(status);
    watched->call->Push(std::move(response));
    if (watched->changed) SendStatus(broker, watched);
  });
}

}  // namespace

grpc::ServerWriteReactor<v1::WatchStatusResponse>* Service::WatchStatus(grpc::CallbackServerContext* context,
                                                                        const v1::WatchStatusRequest* request) {
  using Call = StreamCall<v1::WatchStatusResponse>;
  return Call::Start(loop_, [this, request](Call& call) {
    if (!broker_.ending().ok()) return call.End(broker_.ending());
    auto watched = std::make_shared<WatchedStatus>(WatchedStatus{&call, request->model(), nullptr});
    const uint64_t watcher = broker_.Watch([this, watched] { SendStatus(broker_, watched); });
    watching_.emplace(watcher, [this, watched] {
      if (!std::exchange(watched->ended, true)) watched->call->End(broker_.ending());
    });
    watched->forget = [this, watcher] {
      broker_.Unwatch(watcher);
      watching_.erase(watcher);
    };
    call.OnSent([this, watched] {
      if (watched->changed) SendStatus(broker_, watched);
    });
    call.OnGone([watched] {
      if (!std::exchange(watched->ended, true)) std::exchange(watched->forget, nullptr)();
    });
    SendStatus(broker_, watched);
  });
}

void Service::ShutDown() {
  for (auto& [watcher, end] : watching_) {
    broker_.Unwatch(watcher);
    end();
  }
  watching_.clear();
}

}  // namespace residency
