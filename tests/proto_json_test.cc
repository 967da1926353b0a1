// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/proto_json.h"

#include <catch2/catch.hpp>

#include "client/grpc_status.h"
#include "daemon/grpc_status.h"
#include "mechanisms/refusal.h"
#include "proto/residency.pb.h"

namespace residency {

TEST_CASE("64-bit integers are numbers, zeros are printed and lists are always there") {
  v1::DeactivateResponse response;
  response.set_pooled_bytes(18446744073709551615u);
  CHECK(JsonText(ProtoToJson(response), /*one_line=*/true) ==
        R"({"pooled_bytes":18446744073709551615,"copied_bytes":0,"seconds":0.0})");
  CHECK(JsonText(ProtoToJson(v1::Status()), /*one_line=*/true) == R"({"devices":[],"models":[]})");
}

TEST_CASE("what is optional and was not set is absent, and what was set to zero is not") {
  v1::HostStatus host;
  CHECK(ProtoToJson(host).contains("budget_bytes") == false);
  host.set_budget_bytes(0);
  CHECK(JsonText(ProtoToJson(host), /*one_line=*/true) ==
        R"({"budget_bytes":0,"pinned_bytes":0,"pageable_bytes":0,"page_cache_bytes":0})");
}

TEST_CASE("enums are lower-case words without the name of their type") {
  v1::ModelStatus model;
  model.set_state(v1::MODEL_STATE_DEACTIVATING);
  model.set_mode(v1::MODEL_MODE_HELD);
  const auto json = ProtoToJson(model);
  CHECK(json["state"] == "deactivating");
  CHECK(json["mode"] == "held");
  v1::DeviceStatus device;
  CHECK(ProtoToJson(device)["state"] == "unspecified");
}

TEST_CASE("messages nest, in lists too, and fields keep the order of the definition") {
  v1::Status status;
  v1::ModelStatus& model = *status.add_models();
  model.set_name("flux");
  model.mutable_budget()->set_device_bytes(5);
  model.add_leases()->set_in_use(true);
  v1::ActivateResponse activated;
  activated.add_evicted("a");
  activated.add_evicted("b");
  const auto json = ProtoToJson(status);
  CHECK(json["models"][0]["budget"]["device_bytes"] == 5);
  CHECK(json["models"][0]["leases"][0]["in_use"] == true);
  CHECK(json["models"][0].begin().key() == "name");
  CHECK(ProtoToJson(activated)["evicted"].dump() == R"(["a","b"])");
}

TEST_CASE("bytes are hexadecimal") {
  v1::ReleaseLeaseRequest request;
  request.set_session_id(std::string("\x00\xff\x10", 3));
  CHECK(ProtoToJson(request)["session_id"] == "00ff10");
}

TEST_CASE("a refusal keeps its figures and holders on the way through gRPC into JSON") {
  Refusal refusal;
  refusal.reason = "IN_USE";
  refusal.needed_bytes = 10;
  refusal.available_bytes = 0;
  refusal.holders.push_back({.pid = 42, .uid = 1000, .client = "worker", .lease_id = 7, .age_seconds = 1.5});
  const absl::Status sent = Refuse(absl::StatusCode::kFailedPrecondition, refusal, "flux is in use");
  const absl::Status received = FromGrpcStatus(ToGrpcStatus(sent));
  CHECK(received == sent);
  CHECK(JsonText(ErrorToJson(received), /*one_line=*/true) ==
        R"({"error":{"code":"FAILED_PRECONDITION","reason":"IN_USE","message":"flux is in use","needed_bytes":10,)"
        R"("available_bytes":0,"holders":[{"pid":42,"uid":1000,"client":"worker","lease_id":7,"bytes":0,)"
        R"("age_seconds":1.5}]}})");
}

// What gRPC counts: the message with three bytes for each that is not ASCII, the details in base64.
size_t TrailingBytes(const grpc::Status& status) {
  size_t bytes = 0;
  for (const unsigned char c : status.error_message()) bytes += c < 0x20 || c >= 0x7f || c == '%' ? 3 : 1;
  return bytes + (status.error_details().size() + 2) / 3 * 4;
}

TEST_CASE("a refusal about hostile names fits into gRPC's 8 KiB of metadata and arrives with its reason") {
  std::string wide;
  for (int i = 0; i < 2000; ++i) wide += "\u6f22";
  const std::vector<Holder> holders(500,
                                    Holder{1 << 30, 1 << 30, std::string(64, 'c'), ~uint64_t{0}, ~uint64_t{0}, 1.5});
  for (const Refusal& sent : {Refusal{.reason = "FILE_MISSING", .file = wide, .tensor = wide.substr(0, 255)},
                              Refusal{.reason = "FILE_MISSING", .file = std::string("/m/\xff\x80.safetensors")},
                              Refusal{.reason = "FILE_MISSING", .file = std::string(4095, '\xff')},
                              Refusal{.reason = "IN_USE", .holders = holders}}) {
    const grpc::Status status =
        ToGrpcStatus(Refuse(absl::StatusCode::kNotFound, sent, sent.file + " is not there, but " + wide + " names it"));
    CHECK(TrailingBytes(status) < 7900);
    const absl::Status received = FromGrpcStatus(status);
    CHECK(received.code() == absl::StatusCode::kNotFound);
    const auto refusal = GetRefusal(received);
    REQUIRE(refusal.has_value());
    CHECK(refusal->reason == sent.reason);
    CHECK(refusal->file.empty() == sent.file.empty());
  }
  CHECK(ToGrpcStatus(absl::NotFoundError("no model 'a\n\x1b[31mOK'")).error_message() == "no model 'a??[31mOK'");
  const Refusal odd{.reason = "BAD_HEADER", .file = std::string("/m/\xff\x80.safetensors")};
  const auto refusal = GetRefusal(FromGrpcStatus(ToGrpcStatus(Refuse(absl::StatusCode::kNotFound, odd, odd.file))));
  REQUIRE(refusal.has_value());
  CHECK(refusal->file == R"(/m/\xff\x80.safetensors)");
}

TEST_CASE("gRPC's own failures get a reason that a script can tell apart") {
  CHECK(ReasonOf(FromGrpcStatus({grpc::StatusCode::UNAVAILABLE, "Socket closed"})) == "CONNECTION_LOST");
  CHECK(ReasonOf(FromGrpcStatus({grpc::StatusCode::DEADLINE_EXCEEDED, "Deadline Exceeded"})) == "NO_ANSWER");
  CHECK(ReasonOf(FromGrpcStatus({grpc::StatusCode::UNIMPLEMENTED, ""})) == "UNIMPLEMENTED");
  CHECK(FromGrpcStatus(grpc::Status::OK).ok());
  CHECK(FromGrpcStatus({grpc::StatusCode::INTERNAL, "oops"}) == absl::InternalError("oops"));
}

TEST_CASE("a text that is no UTF-8 still makes a document") {
  const auto json = ErrorToJson(absl::NotFoundError("no file \xff here"));
  CHECK(JsonText(json, /*one_line=*/true).find("no file \xef\xbf\xbd here") != std::string::npos);
}

}  // namespace residency
