// SPDX-License-Identifier: Apache-2.0
#include "daemon/register_call.h"

#include <memory>
#include <optional>
#include <utility>

#include "daemon/status.h"

namespace residency {
namespace {

// Lives as long as one of the broker's answers may come.
class Registering : public std::enable_shared_from_this<Registering> {
 public:
  Registering(Broker& broker, RegisterCall& call, std::string name, bool activate)
      : broker_(broker), call_(call), name_(std::move(name)), activate_(activate) {}

  void Start(RegisterOptions options) {
    const auto self = shared_from_this();
    call_.OnGone([self] { self->GiveUp(); });
    registration_ = broker_.Register(
        std::move(options),
        [self](uint64_t done_bytes, uint64_t total_bytes, uint64_t pinned_bytes) {
          self->OnProgress(done_bytes, total_bytes, pinned_bytes);
        },
        [self] { self->Activate(); }, [self](const Reply& reply) { self->OnRegistered(reply); });
    if (gone_) broker_.Cancel(registration_);
  }

 private:
  void OnProgress(uint64_t done_bytes, uint64_t total_bytes, uint64_t pinned_bytes) {
    // A slow reader gets fewer messages, not older ones.
    if (ended_ || call_.backlog() > 1) return;
    v1::RegisterModelResponse response;
    response.set_bytes_done(done_bytes);
    response.set_bytes_total(total_bytes);
    response.set_pinned_bytes(pinned_bytes);
    call_.Push(std::move(response));
  }

  void OnRegistered(const Reply& reply) {
    // The one that failed took its activation with it.
    if (!reply.status.ok()) return End(reply.status);
    if (ended_) return;
    const auto& outcome = std::get<RegisterOutcome>(reply.outcome);
    const Broker::ModelView model = broker_.ViewOf(outcome.model);
    v1::RegisterModelResponse& response = registered_.emplace();
    response.set_done(true);
    response.set_bytes_done(model.layout.payload_bytes);
    response.set_bytes_total(model.layout.payload_bytes);
    uint64_t tensors = 0;
    for (const LayoutComponent& component : model.layout.components) tensors += component.tensors.size();
    response.set_tensors(tensors);
    response.set_payload_bytes(model.layout.payload_bytes);
    response.set_tax_bytes(model.layout.tax_bytes());
    response.set_pinned_bytes(outcome.pinned_bytes);
    *response.mutable_pin() = PinProto(outcome.pin);
    response.set_host_tier(HostTierProto(model.tier));
    response.set_seconds(absl::ToDoubleSeconds(MonotonicNow() - began_));
    response.set_device_uuid(model.device_uuid);
    if (activate_) Activate();
    EndWhereDone();
  }

  // Early, or once it is registered.
  void Activate() {
    if (ended_ || std::exchange(asked_, true)) return;
    const auto self = shared_from_this();
    activation_ = broker_.Activate(ActivateRequested{.name = name_}, [self](const Reply& reply) {
      self->activated_ = reply;
      self->EndWhereDone();
    });
    if (gone_) broker_.Cancel(activation_);
  }

  void EndWhereDone() {
    if (ended_ || !registered_.has_value() || (activate_ && !activated_.has_value())) return;
    if (activated_.has_value()) {
      if (const auto* outcome = std::get_if<ActivateOutcome>(&activated_->outcome)) {
        SetActivateResponse(*outcome, broker_, *registered_->mutable_activation());
      }
    }
    // Also where the activation was refused: registered it is.
    call_.Push(*std::move(registered_));
    End(activated_.has_value() ? activated_->status : absl::OkStatus());
  }

  void End(const absl::Status& status) {
    if (!std::exchange(ended_, true)) call_.End(status);
  }

  void GiveUp() {
    gone_ = true;
    broker_.Cancel(registration_);
    if (activation_) broker_.Cancel(activation_);
    ended_ = true;
  }

  Broker& broker_;
  RegisterCall& call_;  // until `ended_`
  const std::string name_;
  const bool activate_;
  const absl::Time began_ = MonotonicNow();
  RequestId registration_;
  RequestId activation_;
  bool asked_ = false;  // for the activation
  bool gone_ = false;
  bool ended_ = false;
  std::optional<v1::RegisterModelResponse> registered_;
  std::optional<Reply> activated_;
};

}  // namespace

void StartRegister(Broker& broker, RegisterCall& call, RegisterOptions options) {
  const auto registering = std::make_shared<Registering>(broker, call, options.name, options.activate);
  registering->Start(std::move(options));
}

void SetActivateResponse(const ActivateOutcome& outcome, const Broker& broker, v1::ActivateResponse& response) {
  const Broker::ModelView model = broker.ViewOf(outcome.model);
  response.set_lease_id(outcome.lease.value);
  response.set_layout_digest(model.layout_digest);
  response.set_generation(outcome.generation);
  response.set_bytes_moved(outcome.bytes_moved);
  response.set_seconds(absl::ToDoubleSeconds(outcome.duration));
  response.set_verified_cells(outcome.verified_cells);
  response.set_refilled_cells(outcome.refilled_cells);
  response.set_trusted_cells(outcome.trusted_cells);
  response.set_verified_against(VerifiedAgainstProto(model.tier));
  response.set_device_bytes(outcome.device_bytes);
  response.set_device_uuid(model.device_uuid);
  for (const std::string& name : outcome.evicted) response.add_evicted(name);
  response.set_mode(model.mode == ModelMode::kPhased ? v1::MODEL_MODE_PHASED : v1::MODEL_MODE_HELD);
}

}  // namespace residency
