// SPDX-License-Identifier: Apache-2.0
#include "tests/registrar.h"

#include <grpcpp/client_context.h>

#include <catch2/catch.hpp>
#include <optional>
#include <ostream>
#include <utility>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "client/grpc_status.h"

namespace residency {

std::ostream& operator<<(std::ostream& out, const Memory& memory) {
  return out << "pinned " << memory.pinned_bytes << ", pageable " << memory.pageable_bytes << ", on the device "
             << memory.broker_bytes << ", free " << memory.free_bytes;
}

Registrar::Registrar(std::vector<std::string> daemon_flags) : rig_(std::move(daemon_flags)) {
  auto client = Client::Connect({rig_.runtime_dir(), "registrar", kPatience});
  INFO(client.status().ToString());
  REQUIRE(client.ok());
  client_ = *std::move(client);
}

absl::StatusOr<v1::RegisterModelResponse> Registrar::Register(
    const v1::RegisterModelRequest& request, const std::function<void(const v1::RegisterModelResponse&)>& on_progress) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kPatience));
  const absl::Time start = absl::Now();
  const auto stream = service().RegisterModel(&context, request);
  v1::RegisterModelResponse response;
  while (stream->Read(&response)) {
    if (on_progress && !response.done()) on_progress(response);
  }
  last_status_ = FromGrpcStatus(stream->Finish());
  verdict_time_ = absl::Now() - start;
  if (!last_status_.ok()) return last_status_;
  REQUIRE(response.done());
  return response;
}

absl::StatusOr<v1::RegisterModelResponse> Registrar::Register(const std::string& name, const std::string& source) {
  v1::RegisterModelRequest request;
  request.set_name(name);
  request.set_source(source);
  return Register(request);
}

Refusal Registrar::Refused(const std::string& name, const std::string& source, absl::StatusCode code) {
  const absl::Status status = Register(name, source).status();
  INFO(source << ": " << status.ToString() << " after " << verdict_time_);
  CHECK(verdict_time_ < kVerdictTime);
  REQUIRE(status.code() == code);
  const std::optional<Refusal> refusal = GetRefusal(status);
  REQUIRE(refusal.has_value());
  const std::string message(status.message());
  CHECK(absl::StrContains(message, refusal->file));
  CHECK(absl::StrContains(message, refusal->tensor));
  return *refusal;
}

void Registrar::Unload(const std::string& name) {
  grpc::ClientContext context;
  v1::UnloadModelRequest request;
  request.set_model(name);
  v1::UnloadModelResponse response;
  const absl::Status status = FromGrpcStatus(service().UnloadModel(&context, request, &response));
  INFO(status.ToString());
  REQUIRE(status.ok());
}

std::vector<v1::ListTensorsResponse> Registrar::ListTensors(const std::string& name) {
  grpc::ClientContext context;
  v1::ListTensorsRequest request;
  request.set_model(name);
  const auto stream = service().ListTensors(&context, request);
  std::vector<v1::ListTensorsResponse> pieces;
  for (v1::ListTensorsResponse piece; stream->Read(&piece);) pieces.push_back(piece);
  const absl::Status status = FromGrpcStatus(stream->Finish());
  INFO(status.ToString());
  REQUIRE(status.ok());
  REQUIRE_FALSE(pieces.empty());
  return pieces;
}

v1::Status Registrar::Status() {
  grpc::ClientContext context;
  v1::GetStatusResponse response;
  const absl::Status status = FromGrpcStatus(service().GetStatus(&context, v1::GetStatusRequest(), &response));
  INFO(status.ToString());
  REQUIRE(status.ok());
  return response.status();
}

Memory Registrar::Measure() {
  const v1::Status status = Status();
  const v1::DeviceStatus& device = status.devices(0);
  return {status.host().pinned_bytes(), status.host().pageable_bytes(), device.broker_bytes(),
          device.free_bytes() + device.pool_idle_bytes()};
}

}  // namespace residency
